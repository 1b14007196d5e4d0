"""Find the layer plan with which a model drafts for itself fastest.

``python -m search --model DIR``: the target writes a few texts. One pass of a plan over them
predicts its acceptance and, with the costs measured on this machine, its speed-up. Optuna searches
the plans. The best ones are judged on other texts and decode held-out prompts, and the fastest is
written.
"""

if __name__ == "__main__":  # before anything that takes long to import
    from cli.start import start

    start()

import argparse
import shlex
import sys
from dataclasses import asdict
from datetime import date
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from rich.console import Console

from cli.command_line import run_command, say
from cli.device import machine, pick_device
from cli.files import check_place, read_text
from cli.options import FLAG, Groups, parser_of, within
from cli.picture import write_picture
from cli.table import Row, table
from decoding.run.calibration import Continuation, importance_steps
from decoding.run.chooser import Setting
from decoding.run.plan_file import DraftPlan, write_plan
from decoding.sampling import SamplingParams
from decoding.text import Rules
from decoding.verify import COUPLINGS, Coupling
from model.fast import accelerate
from model.plan import LOW_BITS
from search.acceptance import Calibration
from search.confirm import confirm, judge
from search.plots import front
from search.prompts import PROMPTS
from search.study import (
    SAMPLERS,
    SublayerCosts,
    begin,
    open_study,
    optimise,
    predicted,
    space_of,
    split,
    tried,
)
from weights.load import DTYPES, load_model, model_fingerprint, model_folder
from weights.tokenizer import Tokenizer

VERSION = 6  # of the journal
DEPTHS = 2  # of acceptance in the search; the best plans are judged with more


OPTIONS: Groups = {
    "": {
        "--model": {
            "default": "smollm2-135m-instruct",
            "help": "a folder, or a name under weights/",
        },
        "--trials": {
            "type": within(int, 1),
            "default": 200,
            "metavar": "N",
            "help": "plans to try",
        },
        "--out": {
            "type": Path,
            "metavar": "FILE",
            "help": "the plan file (default: plan.json of the model)",
        },
        "--resume": {**FLAG, "help": "continue the search of this plan file"},
        "--sampler": {
            "choices": list(SAMPLERS),
            "default": "tpe",
            "help": "method that proposes plans",
        },
        "--seed": {
            "type": within(int, 0, 2**31 - 1),
            "default": 0,
            "metavar": "S",
            "help": "same seed: same search",
        },
        "--plots": {
            "type": Path,
            "metavar": "DIR",
            "help": "draw front.svg, all plans tried, into this folder",
        },
        "--bits": {
            "type": int,
            "nargs": "+",
            "choices": (0, *LOW_BITS),
            "default": (0, *LOW_BITS),
            "help": "bits that a sublayer may have besides the checkpoint's, 0: skipped"
            " (default: all)",
        },
        "--device": {"help": "cpu, cuda, cuda:1 ... (default: cuda if there is one)"},
        "--dtype": {
            "choices": [*DTYPES, "auto"],
            "default": "auto",
            "help": "default: the checkpoint's",
        },
    },
    "calibration text": {
        "--calibration": {
            "type": Path,
            "metavar": "FILE",
            "help": "a prompt per line (default: built-in prompts)",
        },
        "--max-new-tokens": {
            "type": within(int, 1),
            "default": 64,
            "metavar": "N",
            "help": "tokens written after each prompt",
        },
        "--coupling": {
            "choices": list(COUPLINGS),
            "help": "rule of verification of the sampled texts that the plan is for"
            " (default: race)",
        },
        "--temperature": {"type": float, "default": 0.0, "metavar": "T", "help": "0: greedy"},
    },
}


def run(options: argparse.Namespace, resuming: str) -> int:
    """Run a search and write its plan; returns the exit status. Wrong input is refused before the
    long work. ``resuming`` is the line with the command that continues it.
    """
    folder = model_folder(options.model)
    out = options.out or folder / "plan.json"
    check_place(out)
    if options.plots is not None:
        options.plots.mkdir(parents=True, exist_ok=True)
    file = options.calibration
    lines = read_text(file).split("\n") if file else chain(*PROMPTS.values())
    prompts = [line for line in lines if line.strip()]
    params = SamplingParams(options.temperature)
    coupling = Coupling.of(options.coupling, options.seed)
    tokenizer = Tokenizer(folder)
    model = accelerate(load_model(folder, DTYPES.get(options.dtype), pick_device(options.device)))
    setting = Setting(folder, model, tokenizer, params, model.max_positions, coupling.name)
    if model.fast_bits:  # as generate.py rounds
        list(importance_steps(model, setting.kept, tokenizer))
    identity = {
        "model": model_fingerprint(folder),
        "dtype": str(model.dtype).removeprefix("torch."),
        "bits": sorted({*options.bits}),
        "sampling": {**asdict(params), "coupling": coupling.name},
        "prompts": [options.max_new_tokens, prompts],
        "version": VERSION,
    }
    study = open_study(
        out.with_suffix(".journal"), identity, options.sampler, options.seed, resume=options.resume
    )
    if not study.trials:
        begin(study, identity, setting, coupling)
    searched, judged, held_out = split([Continuation(**text) for text in study.user_attrs["texts"]])
    costs = SublayerCosts(**study.user_attrs["costs"])
    calibration = Calibration(model, searched, params, coupling.name, DEPTHS)
    space = space_of(model.num_layers, options.bits)
    status = 0
    try:
        optimise(study, partial(predicted, calibration, costs), space, options.trials)
    except KeyboardInterrupt:  # the study has all finished trials
        status = 130
        say(resuming)
    if not (found := tried(study)):
        say("no plan was tried: no plan written")
        return status
    plans = judge(Calibration(model, judged, params, coupling.name), costs, found)
    rules = Rules(options.max_new_tokens, tokenizer.eos_ids)
    results = confirm(setting, held_out, plans, rules, coupling)
    title = "held-out prompts: measured beside plain decoding, and predicted"
    Console(width=None if sys.stdout.isatty() else 120).print(
        table([row for _, row in results], title)
    )
    say(write_result(out, identity, *results[0], machine(model.device)))
    place = "" if options.out is None else f" --plan {shlex.quote(str(out))}"
    say(f'to use it: python generate.py "Your prompt" --model {options.model} --draft skip{place}')
    if options.plots is not None:
        write_picture(lambda: front(found, costs), options.plots / "front.svg")
    return status


def write_result(
    out: Path, identity: dict[str, Any], best: DraftPlan, measured: Row, machine: str
) -> str:
    """Line with the result of the search, whose plan file is written."""
    # γ = 0: plain decoding is faster
    chosen = best if measured["speed-up"] > 1 else DraftPlan(best.plan, 0)
    provenance = {
        "acceptance_rate": measured["accepted"],
        "predicted_speedup": measured["predicted"],
        "measured_speedup": measured["speed-up"],
        "sampling": identity["sampling"],
        "dtype": identity["dtype"],
        "machine": machine,
        "date": date.today().isoformat(),
    }
    write_plan(out, chosen, identity["model"], provenance)
    result = (
        f"drafting up to {chosen.gamma} tokens"
        if chosen.gamma
        else "no plan beats plain decoding, so --draft skip decodes plainly"
    )
    return f"{out}: {measured['speed-up']:.2f}x plain decoding, {result}"


def main(arguments: list[str] | None = None) -> int:
    words = sys.argv[1:] if arguments is None else arguments
    if "--resume" not in words:
        words = [*words, "--resume"]
    resuming = f"interrupted; to continue: {shlex.join(['python', '-m', 'search', *words])}"
    parser = parser_of(OPTIONS, prog="python -m search", description=__doc__.splitlines()[0])
    return run_command(lambda: run(parser.parse_args(arguments), resuming), resuming)


if __name__ == "__main__":
    sys.exit(main())
