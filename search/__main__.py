"""Find the layer plan with which a model drafts for itself fastest: ``python -m search --model DIR``.

The target writes a few texts. One pass of a plan over them predicts its acceptance and, with the costs measured on this
machine, its speed-up. Optuna searches the plans. The best ones then decode held-out prompts, and the fastest is written
as a plan file for generate.py.
"""

from __future__ import annotations

if __name__ == "__main__":  # before anything that takes long to import
    from weights.cli.start import start

    start()

import argparse
import sys
from contextlib import suppress
from dataclasses import asdict, fields
from datetime import date
from pathlib import Path
from typing import Any

from rich.console import Console

from decoding.run.acceptance import Calibration
from decoding.run.chooser import Setting, plan_in_words
from decoding.run.cost_file import kept, machine
from decoding.run.costs import SublayerCosts
from decoding.run.importance import weigh_inputs
from decoding.run.plan_file import DraftPlan, write_plan
from decoding.sampling import SamplingParams
from decoding.text import Rules
from decoding.verify import COUPLINGS
from model import InputError
from model.fast import accelerate
from model.plan import LOW_BITS
from search.confirm import Confirmation, confirm, draft_plan
from search.costs import measure_sublayers
from search.plots import draw_plots
from search.study import (
    SAMPLERS,
    Candidate,
    Objective,
    begin,
    candidates,
    importances,
    kept_costs,
    kept_texts,
    open_study,
    optimise,
    quiet_optuna,
    space_of,
    starts,
)
from search.texts import read_prompts, split, write_texts
from weights.cli.command_line import OneLineParser, run_command, say
from weights.cli.device import pick_device
from weights.cli.files import check_place
from weights.cli.prompt import encode_prompt
from weights.cli.table import Row, table
from weights.load import DTYPES, load_model, model_fingerprint, model_folder
from weights.tokenizer import Tokenizer

CONFIRMED = 3  # plans that decode the held-out prompts


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
    prompts = ".txt (one prompt per line) or .jsonl with prompt (default: built-in prompts)"
    text.add_argument("--calibration", type=Path, metavar="FILE", help=prompts)
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


def check_options(options: argparse.Namespace, out: Path) -> SamplingParams:
    """Sampling parameters. Raises InputError for an option out of range and for a file that cannot be written."""
    if options.trials < 1:
        raise InputError(f"--trials must be at least 1, found {options.trials}")
    if not 0 <= options.seed < 2**31:
        raise InputError(f"--seed must be from 0 to {2**31 - 1}, found {options.seed}")
    if out.suffix == ".journal":
        raise InputError(f"--out {out}: the search stores its trials in that file: give a name that ends in .json")
    check_place(out)
    if options.plots is not None:
        options.plots.mkdir(parents=True, exist_ok=True)
    return SamplingParams(*(getattr(options, field.name) for field in fields(SamplingParams)))


def row_of(confirmed: Confirmation) -> Row:
    """Columns of a confirmed plan."""
    return {
        "plan": plan_in_words(confirmed.candidate.plan),
        "γ": confirmed.candidate.prediction.gamma,
        "threshold": confirmed.candidate.prediction.threshold or None,
        "speed-up": confirmed.speedup,
        "speed-up predicted": confirmed.predicted.speedup,
        "accepted": confirmed.acceptance_rate,
        "acceptance predicted": confirmed.predicted.acceptance_rate,
        "tokens per round": confirmed.tokens_per_round,
    }


def conclude(
    out: Path, identity: dict[str, Any], objective: Objective, found: list[Candidate], confirmed: list[Confirmation]
) -> str:
    """Line with the result of the search, whose plan file is written.

    Without a confirmation (it was interrupted) the prediction alone decides whether to speculate.
    """
    first = confirmed[0] if confirmed else None
    best = first.candidate if first else found[0]
    speedup = first.speedup if first else best.prediction.speedup
    provenance = {
        "acceptance_rate": first and first.acceptance_rate,
        "predicted_acceptance_rate": best.prediction.acceptance_rate,
        "predicted_speedup": best.prediction.speedup,
        "predicted_speedup_held_out": first and first.predicted.speedup,
        "measured_speedup": first and first.speedup,
        "draft_cost": objective.costs.draft(best.plan),
        "sampling": identity["sampling"],
        "dtype": identity["dtype"],
        "machine": machine(objective.calibration.model.device),
        "date": date.today().isoformat(),
    }
    chosen = draft_plan(best) if speedup > 1 else DraftPlan(best.plan, 0)  # γ = 0: plain decoding is faster
    write_plan(out, chosen, identity["model"], provenance)
    how = "measured" if confirmed else "predicted, not run"
    if speedup <= 1:
        return f"no plan beats plain decoding (best {speedup:.2f}x, {how}); {out} turns self-speculation off"
    return f"{out}: {speedup:.2f}x plain decoding ({how}), drafting up to {best.prediction.gamma} tokens"


def run(options: argparse.Namespace) -> int:
    """Run a search and write its plan; returns the exit status. Wrong input is refused before the long work."""
    quiet_optuna()
    folder = model_folder(options.model)
    out = options.out or folder / "plan.json"
    params, prompts, tokenizer = check_options(options, out), read_prompts(options.calibration), Tokenizer(folder)
    rules = Rules(options.max_new_tokens, tokenizer.eos_ids)
    model = accelerate(load_model(folder, DTYPES.get(options.dtype), pick_device(options.device)))
    setting = Setting(folder, model, tokenizer, params, model.max_positions, options.coupling)
    if model.fast_bits:  # as generate.py rounds
        weigh_inputs(model, folder, tokenizer)
    encoded = [encode_prompt(tokenizer, prompt) for prompt in prompts]
    identity = {
        "model": model_fingerprint(folder),
        "dtype": str(model.dtype).removeprefix("torch."),
        "bits": sorted({*options.bits}),
        "sampling": {**asdict(params), "coupling": options.coupling},
        "prompts": [options.max_new_tokens, encoded],
    }
    study = open_study(out.with_suffix(".journal"), identity, options.sampler, options.seed, resume=options.resume)
    space = space_of(model.num_layers, options.bits)
    if not study.trials:
        say("writing calibration texts")
        texts = write_texts(model, encoded, params, rules, options.seed)
        say("measuring the costs of sublayers, or reading those measured before")
        name = f"sublayers, {params}"
        costs = kept(folder, model, name, SublayerCosts, lambda: measure_sublayers(model, params))
        lost = importances(Calibration(model, split(texts)[0], params, options.coupling, depths=1))
        attributes = {"identity": identity, "texts": [asdict(text) for text in texts], "costs": asdict(costs)}
        begin(study, attributes, starts(lost, costs, space))
    costs, (searched, held_out) = kept_costs(study), split(kept_texts(study))
    objective = Objective(Calibration(model, searched, params, options.coupling), costs)
    confirmed: list[Confirmation] = []
    with suppress(KeyboardInterrupt):  # the study has all finished trials
        optimise(study, objective, space, options.trials)
        confirmed = confirm(setting, costs, held_out, candidates(study)[:CONFIRMED], rules, options.seed)
        title = "held-out prompts: predicted, and measured beside plain decoding"
        Console(width=None if sys.stdout.isatty() else 120).print(table([row_of(each) for each in confirmed], title))
    found = candidates(study)
    if not found:
        say("interrupted before the first plan was tried: no plan written")
        return 130
    say(conclude(out, identity, objective, found, confirmed))
    if options.plots is not None:
        draw_plots(options.plots, found, confirmed, costs)
    return 0 if confirmed else 130


def main(arguments: list[str] | None = None) -> int:
    return run_command(lambda: run(parse_arguments(arguments)))


if __name__ == "__main__":
    sys.exit(main())
