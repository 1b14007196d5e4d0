"""Find the layer plan with which a model drafts for itself fastest: ``python -m search --model DIR``.

The target writes a few texts. One pass of a plan over them predicts its acceptance and, with the costs measured on this
machine, its speed-up. Optuna searches the plans. The best ones then decode held-out prompts, and the fastest is written
as a plan file for generate.py.
"""

if __name__ == "__main__":  # before anything that takes long to import
    from weights.cli.start import start

    start()

import argparse
import math
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, fields
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

from optuna import Study
from rich.console import Console

from decoding.run.acceptance import Calibration, Continuation
from decoding.run.calibration import calibration_texts, weigh_inputs
from decoding.run.chooser import Setting
from decoding.run.cost_file import kept as kept_costs
from decoding.run.cost_file import machine
from decoding.run.costs import SublayerCosts
from decoding.run.plan_file import DraftPlan, write_plan
from decoding.sampling import SamplingParams
from decoding.text import Rules
from decoding.verify import COUPLINGS
from model import InputError
from model.fast import accelerate
from model.plan import LOW_BITS
from search.confirm import confirm
from search.costs import measure_sublayers
from search.plots import draw_plots
from search.prompts import PROMPTS
from search.study import (
    SAMPLERS,
    VERSION,
    Candidate,
    Objective,
    begin,
    candidates,
    importances,
    kept,
    open_study,
    optimise,
    quiet_optuna,
    space_of,
    starts,
)
from weights.cli.command_line import OneLineParser, run_command, say
from weights.cli.device import pick_device
from weights.cli.files import check_place, read_text
from weights.cli.table import Row, table
from weights.load import DTYPES, load_model, model_fingerprint, model_folder
from weights.tokenizer import Tokenizer

CONFIRMED = 3  # plans that decode the held-out prompts
MOST_PROMPTS = 24  # of a longer file, evenly spaced
HELD_OUT = 4  # every fourth text is kept for the confirmation
LEAST_TOKENS = 32  # of all texts together: fewer say nothing about a plan


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = OneLineParser(prog="python -m search", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m-instruct", help="a folder, or a name under weights/")
    parser.add_argument("--trials", type=int, default=200, metavar="N", help="plans to try")
    parser.add_argument("--out", type=Path, metavar="FILE", help="the plan file (default: plan.json of the model)")
    parser.add_argument("--resume", action="store_true", help="continue the search of this plan file")
    parser.add_argument("--sampler", choices=list(SAMPLERS), default="tpe", help="method that proposes plans")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="same seed: same search")
    parser.add_argument("--plots", type=Path, metavar="DIR", help="draw the best plan and all plans into this folder")
    widths = (0, *LOW_BITS)
    bits = "bits that a sublayer may have besides the checkpoint's, 0: skipped (default: all)"
    parser.add_argument("--bits", type=int, nargs="+", choices=widths, default=widths, help=bits)
    text = parser.add_argument_group("calibration text")
    text.add_argument("--calibration", type=Path, metavar="FILE", help="a prompt per line (default: built-in prompts)")
    text.add_argument("--max-new-tokens", type=int, default=64, metavar="N", help="tokens written after each prompt")
    text.add_argument("--coupling", choices=list(COUPLINGS), default="ratio", help="rule of verification when sampling")
    text.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0: greedy")
    text.add_argument("--top-k", type=int, default=0, metavar="K", help="0: off")
    text.add_argument("--top-p", type=float, default=1.0, metavar="P", help="1: off")
    text.add_argument("--min-p", type=float, default=0.0, metavar="P", help="0: off")
    text.add_argument("--repetition-penalty", type=float, default=1.0, metavar="R", help="1: off")
    parser.add_argument("--device", help="cpu, cuda, cuda:1 ... (default: cuda if there is one)")
    parser.add_argument("--dtype", choices=[*DTYPES, "auto"], default="auto", help="default: the checkpoint's")
    return parser.parse_args(arguments)


def read_prompts(path: Path | None) -> list[str]:
    """Prompts of a file, one per line, else the built-in ones. Raises InputError for fewer than two."""
    if path is None:
        return [prompt for prompts in PROMPTS.values() for prompt in prompts]
    prompts = [line for line in read_text(path).split("\n") if line.strip()]
    if len(prompts) < 2:
        raise InputError(f"{path} holds {len(prompts)} prompts: a search needs at least 2, one of them to confirm with")
    return prompts[:: math.ceil(len(prompts) / MOST_PROMPTS)]


def split(texts: Sequence[Continuation]) -> tuple[list[Continuation], list[Continuation]]:
    """Texts to search with, and held-out texts: every fourth, and at least one.

    Raises InputError for texts that are too short for a prediction.
    """
    if len(texts) < 2 or sum(len(text.written) for text in texts) < LEAST_TOKENS:
        raise InputError(
            "the model wrote too few tokens to measure a plan with: give more prompts that fit its context, or a "
            f"larger --max-new-tokens (at least {LEAST_TOKENS} tokens in all)"
        )
    numbers = range(len(texts))
    held_out = numbers[HELD_OUT - 1 :: HELD_OUT] or numbers[-1:]
    return [texts[number] for number in numbers if number not in held_out], [texts[number] for number in held_out]


def begin_study(study: Study, identity: dict[str, Any], setting: Setting, options: argparse.Namespace) -> None:
    """Store calibration texts, costs and the first plans in a new study."""
    model, params = setting.model, setting.params
    say("writing calibration texts")
    count, prompts = identity["prompts"]
    texts = calibration_texts(model, setting.tokenizer, params, options.seed, prompts, count)
    first = Calibration(model, split(texts)[0], params, setting.coupling, depths=1)
    say("measuring the costs of sublayers, or reading those measured before")
    measure = partial(measure_sublayers, model, params)
    costs = kept_costs(setting.folder, model, f"sublayers, {params}", SublayerCosts, measure)
    begin(study, identity, texts, costs, starts(importances(first), space_of(model.num_layers, options.bits)))


def run(options: argparse.Namespace) -> int:
    """Run a search and write its plan; returns the exit status. Wrong input is refused before the long work."""
    quiet_optuna()
    if options.trials < 1 or not 0 <= options.seed < 2**31:
        raise InputError(f"--trials must be at least 1, --seed from 0 to {2**31 - 1}")
    folder = model_folder(options.model)
    out = options.out or folder / "plan.json"
    check_place(out)
    if options.plots is not None:
        options.plots.mkdir(parents=True, exist_ok=True)
    params = SamplingParams(*(getattr(options, field.name) for field in fields(SamplingParams)))
    prompts, tokenizer = read_prompts(options.calibration), Tokenizer(folder)
    model = accelerate(load_model(folder, DTYPES.get(options.dtype), pick_device(options.device)))
    setting = Setting(folder, model, tokenizer, params, model.max_positions, options.coupling)
    if model.fast_bits:  # as generate.py rounds
        weigh_inputs(model, folder, tokenizer)
    identity = {
        "model": model_fingerprint(folder),
        "dtype": str(model.dtype).removeprefix("torch."),
        "bits": sorted({*options.bits}),
        "sampling": {**asdict(params), "coupling": options.coupling},
        "prompts": [options.max_new_tokens, prompts],
        "version": VERSION,
    }
    study = open_study(out.with_suffix(".journal"), identity, options.sampler, options.seed, resume=options.resume)
    if not study.trials:
        begin_study(study, identity, setting, options)
    texts, costs = kept(study)
    searched, held_out = split(texts)
    objective = Objective(Calibration(model, searched, params, options.coupling), costs)
    rules, confirmed = Rules(options.max_new_tokens, tokenizer.eos_ids), []
    with suppress(KeyboardInterrupt):  # the study has all finished trials
        optimise(study, objective, space_of(model.num_layers, options.bits), options.trials)
        confirmed = confirm(setting, costs, held_out, candidates(study)[:CONFIRMED], rules, options.seed)
        title = "held-out prompts: predicted, and measured beside plain decoding"
        Console(width=None if sys.stdout.isatty() else 120).print(table([row for _, row in confirmed], title))
    found = candidates(study)
    if not found:
        say("interrupted before the first plan was tried: no plan written")
        return 130
    say(write_result(out, identity, *(confirmed[0] if confirmed else (found[0], {})), machine(model.device)))
    if options.plots is not None:
        draw_plots(options.plots, confirmed[0][0].plan if confirmed else found[0].plan, found, costs)
    return 0 if confirmed else 130


def write_result(out: Path, identity: dict[str, Any], best: Candidate, measured: Row, machine: str) -> str:
    """Line with the result of the search, whose plan file is written.

    Without measurements (the confirmation was interrupted) the prediction alone decides whether to speculate.
    """
    prediction = best.prediction
    speedup = measured.get("speed-up", prediction.speedup)
    chosen = best.draft_plan if speedup > 1 else DraftPlan(best.plan, 0)  # γ = 0: plain decoding is faster
    provenance = {
        "acceptance_rate": measured.get("accepted", prediction.acceptance_rate),
        "predicted_speedup": prediction.speedup,
        "measured_speedup": measured.get("speed-up"),
        "sampling": identity["sampling"],
        "dtype": identity["dtype"],
        "machine": machine,
        "date": date.today().isoformat(),
    }
    write_plan(out, chosen, identity["model"], provenance)
    result = f"drafting up to {chosen.gamma} tokens" if chosen.gamma else "no plan beats plain decoding: none drafts"
    return f"{out}: {speedup:.2f}x plain decoding ({'measured' if measured else 'predicted, not run'}), {result}"


def main(arguments: list[str] | None = None) -> int:
    return run_command(lambda: run(parse_arguments(arguments)))


if __name__ == "__main__":
    sys.exit(main())
