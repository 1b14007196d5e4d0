"""Find the layer plan with which a model drafts for itself fastest.

``python -m search --model DIR``: the target writes a few texts, and the costs of its sublayers are
measured. A trial predicts the speed-up of one plan: a single pass of it over the texts gives its
acceptance rate, and the sublayers' costs add up to that of its draft step. Optuna proposes the
plans. The best ones and the best early exit decode held-out prompts beside plain decoding, and the
fastest is written.
"""

if __name__ == "__main__":  # before anything that takes long to import
    from app.start import start

    start()

import argparse
import hashlib
import json
import shlex
import sys
from collections.abc import Mapping
from dataclasses import asdict
from datetime import date
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.progress import track

from app.command_line import say
from app.device import machine
from app.drafts import plan_in_words
from app.files import check_place
from app.options import Options
from app.parsers import DEVICE, DTYPE, MODEL, TEMPERATURE, Groups, run_script, within
from app.picture import write_picture
from app.plan_file import DraftPlan, write_plan
from app.session import Session
from app.table import Row, table
from model.plan import FULL, LOW_BITS, LayerPlan
from search.acceptance import Calibration
from search.costs import Costs, measure_costs
from search.plots import front
from search.study import (
    HEAD,
    SAMPLERS,
    Prediction,
    first_plans,
    open_study,
    optimise,
    parameters,
    plan_of,
    predictions_of,
    space_of,
)
from search.texts import Continuation, plain_texts, read_prompts, split_texts
from weights.load import DTYPES, model_fingerprint

VERSION = 9  # of the study
CONFIRMED = 5  # best plans that decode; beside them the best early exit
TURNS = 3  # in which a held-out prompt is written in each way

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
            "choices": ["race", "ratio"],
            "default": "race",
            "help": "rule of verification of the sampled texts that the plan is for",
        },
        "--temperature": TEMPERATURE,
    },
}


def run(options: argparse.Namespace) -> int:
    """Run a search and write its plan; returns the exit status. Wrong input is refused before the
    long work.
    """
    prompts = read_prompts(options.calibration)
    shared = ("model", "device", "dtype", "max_new_tokens", "coupling", "temperature", "seed")
    session = Session(Options(**{name: getattr(options, name) for name in shared}))
    out: Path = options.out or session.folder / "plan.json"
    check_place(out)
    session.check_memory()
    if options.plots is not None:
        options.plots.mkdir(parents=True, exist_ok=True)
    settings = {
        "model": model_fingerprint(session.folder),
        "dtype": str(session.dtype).removeprefix("torch."),
        "bits": sorted({*options.bits}),
        "sampling": {**asdict(session.options.params), "coupling": options.coupling},
        "prompts": [options.max_new_tokens, prompts],
        "version": VERSION,
    }
    name = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]
    study = open_study(out.with_suffix(".journal"), name, options.sampler, options.seed)
    searched, held_out = split_texts(plain_texts(session, prompts))
    calibration = Calibration(session, searched)
    if "costs" not in study.user_attrs:
        prepare(study, session, calibration, searched, settings["bits"])
    costs = Costs(**study.user_attrs["costs"])

    def objective(plan: LayerPlan) -> Prediction:
        acceptance = calibration.acceptance(plan)
        return Prediction(*costs.best(acceptance, costs.step(plan)), acceptance)

    status = 0
    try:
        optimise(study, objective, space_of(session.model.num_layers, options.bits), options.trials)
    except KeyboardInterrupt:  # the study has all finished trials
        status = 130
        say("interrupted: the same command continues the search")
    predictions = predictions_of(study)
    if predictions:
        finish(options, session, settings, predictions, costs, held_out, out)
    return status


def prepare(
    study: Any, session: Session, calibration: Calibration, texts: list[Continuation], bits: Any
) -> None:
    """Store costs, importances of sublayers and the first plans in a new study."""
    say("measuring the costs of sublayers")
    widths = sorted({*bits, FULL} - {0})
    costs = measure_costs(session, [text.prompt for text in texts], widths)
    full = parameters(LayerPlan.full(session.model.num_layers))
    importance = {
        name: 1 - calibration.acceptance(plan_of({**full, name: 0}))
        for name in track(
            full.keys() - {HEAD}, "importance of each sublayer", console=Console(stderr=True)
        )
    }
    study.set_user_attr("importance", importance)
    for plan in first_plans(importance, space_of(session.model.num_layers, bits)):
        study.enqueue_trial(parameters(plan))
    study.set_user_attr("costs", asdict(costs))


def finish(
    options: argparse.Namespace,
    session: Session,
    settings: Mapping[str, Any],
    predictions: Mapping[LayerPlan, Prediction],
    costs: Costs,
    held_out: list[Continuation],
    out: Path,
) -> None:
    """Confirm the best plans, print the results, and write the fastest plan and the picture."""
    exits = islice(filter(is_exit, predictions), 1)
    plans = list(dict.fromkeys([*islice(predictions, CONFIRMED), *exits]))
    chosen = [DraftPlan(plan, predictions[plan].gamma) for plan in plans]
    rows = confirm(session, held_out, chosen, [predictions[plan].speedup for plan in plans])
    title = "held-out prompts: measured beside plain decoding, and expected"
    Console(width=None if sys.stdout.isatty() else 120).print(
        table([row for _, row in rows], title)
    )
    best, measured = rows[0]
    pays = measured["speed-up"] > 1
    kept = DraftPlan(best.plan, best.gamma if pays else 0, None, predictions[best.plan].acceptance)
    provenance = {
        "acceptance_rate": measured["accepted"],
        "predicted_speedup": measured["expected"],
        "measured_speedup": measured["speed-up"],
        "sampling": settings["sampling"],
        "dtype": settings["dtype"],
        "machine": machine(session.device),
        "date": date.today().isoformat(),
    }
    write_plan(out, kept, settings["model"], provenance)
    result = f"drafts of up to {best.gamma} tokens"
    if not pays:
        result = "no plan beats plain decoding, so --draft skip decodes plainly"
    say(f"{out}: {measured['speed-up']:.2f} times plain decoding, {result}")
    if pays:
        place = "" if options.out is None else f" --plan {shlex.quote(str(out))}"
        name = shlex.quote(options.model)
        say(f'to use it: python generate.py "Your prompt" --model {name} --draft skip{place}')
    if options.plots is not None:
        write_picture(lambda: front(predictions, costs), options.plots / "front.svg")


def is_exit(plan: LayerPlan) -> bool:
    """Return whether a plan is an early exit in the checkpoint's bits."""
    layers = sum(map(bool, plan.attention))
    return layers > 0 and plan == LayerPlan.early_exit(plan.num_layers, layers)


def confirm(
    session: Session, held_out: list[Continuation], plans: list[DraftPlan], expected: list[float]
) -> list[tuple[DraftPlan, Row]]:
    """Return the plans, each with a row of its results on the held-out prompts, the fastest first:
    all prompts are written in turns with plain decoding.
    """
    ways = [{"draft": "none"}, *({"draft": "skip", "plan": plan} for plan in plans)]
    seconds = [0.0 for _ in ways]
    tokens = [0 for _ in ways]
    drafted = [0 for _ in ways]
    accepted = [0 for _ in ways]
    for text in track(
        held_out, "running the best plans on held-out prompts", console=Console(stderr=True)
    ):
        for number, way in enumerate(ways):
            options = session.options.merged(way)
            samples = [session.finish(session.begin(text.prompt, options)) for _ in range(TURNS)]
            seconds[number] += median(sample.seconds for sample in samples)
            told = samples[0].statistics
            tokens[number] += told.tokens
            drafted[number] += told.drafted
            accepted[number] += told.accepted
    speeds = [count / took for count, took in zip(tokens, seconds, strict=True)]
    rows = []
    for number, plan in enumerate(plans, start=1):
        row: Row = {
            "plan": plan_in_words(plan.plan),
            "γ": plan.gamma,
            "speed-up": speeds[number] / speeds[0],
            "expected": expected[number - 1],
            "accepted": accepted[number] / max(1, drafted[number]),
        }
        rows.append((plan, row))
    return sorted(rows, key=lambda each: -each[1]["speed-up"])


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns its exit status."""
    return run_script(run, OPTIONS, "python -m search", __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())
