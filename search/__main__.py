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
from collections.abc import Sequence
from dataclasses import asdict
from datetime import date
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import optuna
from rich.console import Console

from cli.command_line import run_command, say
from cli.device import machine, pick_device
from cli.files import check_place, read_text
from cli.options import DEVICE, DTYPE, FLAG, MODEL, TEMPERATURE, Groups, parser_of, within
from cli.picture import write_picture
from cli.table import Row, table
from decoding.run.calibration import importance_steps
from decoding.run.chooser import Setting
from decoding.run.plan_file import DraftPlan, write_plan
from decoding.sampling import SamplingParams
from decoding.text import Rules
from decoding.verify import COUPLINGS, Coupling
from model.fast import accelerate
from model.plan import LOW_BITS
from search.acceptance import Calibration, Continuation
from search.confirm import confirm, plans_to_confirm
from search.plots import plot_plans
from search.prompts import PROMPTS
from search.study import (
    SAMPLERS,
    SublayerCosts,
    open_study,
    optimise,
    predict_plan,
    predictions_of,
    prepare_study,
    space_of,
    split_texts,
)
from weights.load import DTYPES, load_model, model_fingerprint, model_folder
from weights.tokenizer import Tokenizer

VERSION = 6  # of the journal
SEARCH_DEPTHS = 2  # of acceptance in the search; the best plans are judged with more


OPTIONS: Groups = {
    "": {
        "--model": MODEL,
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
        "--device": DEVICE,
        "--dtype": {**DTYPE, "choices": [*DTYPES, "auto"]},
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
        "--temperature": TEMPERATURE,
    },
}


def run(options: argparse.Namespace, resuming: str) -> int:
    """Run a search and write its plan; returns the exit status. Wrong input is refused before the
    long work. ``resuming`` is the line with the command that continues it.
    """
    folder = model_folder(options.model)
    out: Path = options.out or folder / "plan.json"
    check_place(out)
    if options.plots is not None:
        options.plots.mkdir(parents=True, exist_ok=True)
    prompts = read_prompts(options.calibration)
    params = SamplingParams(options.temperature)
    coupling = Coupling.of(options.coupling, options.seed)
    setting = load_setting(options, folder, params, coupling.name)
    study = study_of(options, out.with_suffix(".journal"), setting, prompts, coupling)
    searched, judged, held_out = split_texts(
        [Continuation(**text) for text in study.user_attrs["texts"]]
    )
    costs = SublayerCosts(**study.user_attrs["costs"])
    calibration = Calibration(setting.model, searched, params, coupling.name, SEARCH_DEPTHS)
    space = space_of(setting.model.num_layers, options.bits)
    status = 0
    try:
        optimise(study, partial(predict_plan, calibration, costs), space, options.trials)
    except KeyboardInterrupt:  # the study has all finished trials
        status = 130
        say(resuming)
    predictions = predictions_of(study)
    if not predictions:
        say("no plan was tried: no plan written")
        return status
    plans = plans_to_confirm(
        Calibration(setting.model, judged, params, coupling.name), costs, predictions
    )
    best, measured = confirm_best(setting, held_out, plans, options.max_new_tokens, coupling)
    identity = study.user_attrs["identity"]
    say(write_result(out, identity, best, measured, machine(setting.model.device)))
    place = "" if options.out is None else f" --plan {shlex.quote(str(out))}"
    say(f'to use it: python generate.py "Your prompt" --model {options.model} --draft skip{place}')
    if options.plots is not None:
        write_picture(lambda: plot_plans(predictions, costs), options.plots / "front.svg")
    return status


def read_prompts(file: Path | None) -> list[str]:
    """Prompts of a file, one per line; without a file the built-in ones."""
    lines = read_text(file).split("\n") if file else chain(*PROMPTS.values())
    return [line for line in lines if line.strip()]


def load_setting(
    options: argparse.Namespace, folder: Path, params: SamplingParams, coupling: str
) -> Setting:
    """The loaded target, which rounds to low bits as ``generate.py`` does."""
    tokenizer = Tokenizer(folder)
    model = accelerate(load_model(folder, DTYPES.get(options.dtype), pick_device(options.device)))
    setting = Setting(folder, model, tokenizer, params, model.max_positions, coupling)
    if model.fast_bits:
        list(importance_steps(model, setting.kept, tokenizer))
    return setting


def study_of(
    options: argparse.Namespace,
    journal: Path,
    setting: Setting,
    prompts: Sequence[str],
    coupling: Coupling,
) -> optuna.Study:
    """The study in a journal, a new one with its texts, costs and first plans."""
    identity = {
        "model": model_fingerprint(setting.folder),
        "dtype": str(setting.model.dtype).removeprefix("torch."),
        "bits": sorted({*options.bits}),
        "sampling": {**asdict(setting.params), "coupling": coupling.name},
        "prompts": [options.max_new_tokens, prompts],
        "version": VERSION,
    }
    study = open_study(journal, identity, options.sampler, options.seed, resume=options.resume)
    if not study.trials:
        prepare_study(study, identity, setting, coupling)
    return study


def confirm_best(
    setting: Setting,
    held_out: Sequence[Continuation],
    plans: Sequence[DraftPlan],
    max_new_tokens: int,
    coupling: Coupling,
) -> tuple[DraftPlan, Row]:
    """The fastest plan on the held-out prompts, with its row of the table, which is printed."""
    rules = Rules(max_new_tokens, setting.tokenizer.eos_ids)
    results = confirm(setting, held_out, plans, rules, coupling)
    title = "held-out prompts: measured beside plain decoding, and predicted"
    Console(width=None if sys.stdout.isatty() else 120).print(
        table([row for _, row in results], title)
    )
    return results[0]


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
