"""Find the layer plan with which a model drafts for itself fastest.

``python -m search --model DIR``: the target writes a few texts, and the costs of its sublayers are
measured. A trial predicts the speed-up of one plan: a single pass of it over the texts gives its
acceptance rate, and the sublayers' costs add up to that of its draft step. Optuna proposes the
plans. The best ones and the best early exit decode held-out prompts beside plain decoding, and the
fastest is written.
"""

if __name__ == "__main__":  # before anything that takes long to import
    from app.common.start import start

    start()

import argparse
import hashlib
import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import date
from functools import cache
from itertools import islice
from pathlib import Path
from statistics import fmean, median
from typing import Any

import optuna
from rich.console import Console
from rich.progress import track

from app.common.command_line import say
from app.common.device import machine
from app.common.files import check_place, read_optional_json
from app.common.parsers import DEVICE, DTYPE, MODEL, TEMPERATURE, Groups, script, within
from app.common.picture import write_picture
from app.common.table import Row, table
from app.options import Options
from app.plan_file import DraftPlan, plan_in_words, read_plan, write_plan
from app.session import Session
from decoding.rounds import Statistics
from model.plan import FULL, LOW_BITS, LayerPlan
from search.acceptance import Calibration
from search.costs import CostModel, kept_costs
from search.plots import best_values, front, importances
from search.study import (
    HEAD,
    SAMPLERS,
    Objective,
    Prediction,
    Space,
    best_so_far,
    early_exits,
    first_plans,
    open_study,
    optimise,
    parameters,
    plan_of,
    predictions_of,
    space_of,
    thinned_plans,
)
from search.texts import Continuation, plain_texts, read_prompts, split_texts
from weights.load import DTYPES, model_fingerprint

VERSION = 10  # of the study
CONFIRMED = 5  # best plans that decode; beside them the best early exit
TURNS = 3  # in which a held-out prompt is written in each way
BLOCKS = "▁▂▃▄▅▆▇█"  # from 0 to 1
# Searches that are compared: the sampler, and whether the first plans are tried before it is asked
SEARCHES = {
    "TPE": ("tpe", True),
    "random draws": ("random", True),
    "TPE without the first plans": ("tpe", False),
}

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
            "help": "the plan file (default: plan.json of the model, or one beside it where"
            " that is not of this search)",
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
            "help": "draw all plans tried and the importance of sublayers into this folder",
        },
        "--compare-samplers": {
            "type": within(int, 0),
            "default": 0,
            "metavar": "N",
            "help": "also search N times by each sampler, with other seeds, and compare",
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
    settings = settings_of(session, options, prompts)
    name = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]
    out = options.out or place_of_plan(session.folder, name)
    check_place(out)
    session.check_memory()
    if options.plots is not None:
        options.plots.mkdir(parents=True, exist_ok=True)
    journal = (options.out or session.folder / "plan").with_suffix(".journal")
    study = open_study(journal, name, options.sampler, options.seed)
    searched, held_out = split_texts(plain_texts(session, prompts))
    calibration = Calibration(session, searched)
    if "costs" not in study.user_attrs:
        prepare(study, session, calibration, searched, settings["bits"])
    costs = CostModel(**study.user_attrs["costs"])

    @cache
    def objective(plan: LayerPlan) -> Prediction:
        acceptance = calibration.acceptance(plan)
        return Prediction(*costs.best(acceptance, costs.step(plan)), acceptance)

    status = 0
    space = space_of(session.model.num_layers, options.bits)
    first = first_plans(study.user_attrs["importance"], space)
    announce(study.user_attrs["importance"], len(first), options.trials)
    try:
        optimise(study, objective, space, options.trials)
    except KeyboardInterrupt:  # the study has all finished trials
        status = 130
        say("interrupted: the same command continues the search")
    if predictions_of(study):
        finish(options, session, settings, study, objective, held_out, out)
        if options.plots is not None:
            draw(options.plots, study, objective, costs)
    if options.compare_samplers and status == 0:
        compare_samplers(options, objective, space, first)
    return status


def settings_of(
    session: Session, options: argparse.Namespace, prompts: list[str]
) -> dict[str, Any]:
    """Return all on which the predictions of a search depend."""
    return {
        "model": model_fingerprint(session.folder),
        "dtype": str(session.dtype).removeprefix("torch."),
        "bits": sorted({*options.bits}),
        "sampling": {**asdict(session.options.params), "coupling": options.coupling},
        "prompts": [options.max_new_tokens, prompts],
        "machine": machine(session.device),
        "version": VERSION,
    }


def place_of_plan(folder: Path, study: str) -> Path:
    """Return the file for the plan of a study: ``plan.json`` in the model's folder or, where that
    is of another search or was written by hand, a file beside it.
    """
    shipped = folder / "plan.json"
    if not shipped.exists() or read_optional_json(shipped).get("study") == study:
        return shipped
    beside = folder / f"plan-{study}.json"
    say(f"{shipped} is not of this search and stays: the new plan goes to {beside}")
    return beside


def prepare(
    study: optuna.Study,
    session: Session,
    calibration: Calibration,
    texts: list[Continuation],
    bits: list[int],
) -> None:
    """Store costs, importances of sublayers and the first plans in a new study."""
    widths = sorted({*bits, FULL} - {0})
    costs = kept_costs(session, [text.prompt for text in texts], widths, study.study_name)
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


def announce(importance: Mapping[str, float], first: int, trials: int) -> None:
    """Print the importance of each sublayer, and whether the sampler is asked for any plan."""
    layers = range(len(importance) // 2)
    for kind, title in (("attn", "attention"), ("mlp", "MLP")):
        shares = [importance[f"{kind} {layer}"] for layer in layers]
        blocks = "".join(BLOCKS[round(share * (len(BLOCKS) - 1))] for share in shares)
        say(f"importance by layer, {title:9} {blocks}")
    if trials <= first:
        say(f"the first {first} plans are chosen: with {trials} trials no sampler is asked")


def finish(
    options: argparse.Namespace,
    session: Session,
    settings: Mapping[str, Any],
    study: optuna.Study,
    objective: Objective,
    held_out: list[Continuation],
    out: Path,
) -> None:
    """Confirm the best plans, print the results, and write the fastest plan.

    The best early exit is confirmed too, tried or not, if sublayers may be skipped. So is the plan
    that this search wrote before: neither is replaced by a slower one.
    """
    layers = session.model.num_layers
    exits = early_exits(layers) if 0 in options.bits else []
    best_exit = max(exits, key=lambda plan: objective(plan).speedup, default=None)
    plans = dict.fromkeys([*islice(predictions_of(study), CONFIRMED), best_exit])
    if options.out is None and out.exists():
        plans |= {read_plan(out, layers, session.folder).plan: None}
    rows = confirm(session, held_out, {plan: objective(plan) for plan in plans if plan})
    title = "held-out prompts: measured beside plain decoding, and expected"
    Console(width=None if sys.stdout.isatty() else 120).print(
        table([row for _, row in rows], title)
    )
    best, measured = rows[0]
    pays = measured["speed-up"] > 1
    kept = DraftPlan(best, measured["γ"] if pays else 0, None, objective(best).acceptance)
    provenance = {
        "acceptance_rate": measured["accepted"],
        "predicted_speedup": measured["expected"],
        "measured_speedup": measured["speed-up"],
        "sampling": settings["sampling"],
        "dtype": settings["dtype"],
        "machine": settings["machine"],
        "date": date.today().isoformat(),
        "study": study.study_name,
    }
    write_plan(out, kept, settings["model"], provenance)
    result = f"{out}: {measured['speed-up']:.2f} times plain decoding"
    if pays:
        say(f"{result}, drafts of up to {kept.gamma} tokens")
        say(
            f'to use it: python generate.py "Your prompt" --model {shlex.quote(options.model)}'
            f" --draft skip --plan {shlex.quote(str(out))}"
        )
    else:
        say(f"{result}: no plan beats plain decoding, so --draft skip decodes plainly")


def confirm(
    session: Session, held_out: list[Continuation], plans: Mapping[LayerPlan, Prediction]
) -> list[tuple[LayerPlan, Row]]:
    """Return the plans, each with a row of its results on the held-out prompts, the fastest first:
    all prompts are written in turns with plain decoding.
    """
    drafts = [DraftPlan(plan, prediction.gamma) for plan, prediction in plans.items()]
    ways = [{"draft": "none"}, *({"draft": "skip", "plan": draft} for draft in drafts)]
    seconds = [0.0 for _ in ways]
    totals = [Statistics() for _ in ways]
    for text in track(
        held_out, "running the best plans on held-out prompts", console=Console(stderr=True)
    ):
        turns = [
            [
                session.finish(session.begin(text.prompt, session.options.merged(way)))
                for way in ways
            ]
            for _ in range(TURNS)
        ]
        for number, samples in enumerate(zip(*turns, strict=True)):
            seconds[number] += median(sample.seconds for sample in samples)
            for round in samples[0].rounds:
                totals[number].add(round)
    plain, *speeds = [total.tokens / took for total, took in zip(totals, seconds, strict=True)]
    rows: list[Row] = [
        {
            "plan": plan_in_words(plan),
            "γ": prediction.gamma,
            "speed-up": speed / plain,
            "expected": prediction.speedup,
            "accepted": total.acceptance_rate or 0.0,
        }
        for (plan, prediction), speed, total in zip(plans.items(), speeds, totals[1:], strict=True)
    ]
    return sorted(zip(plans, rows, strict=True), key=lambda each: -each[1]["speed-up"])


def draw(folder: Path, study: optuna.Study, objective: Objective, costs: CostModel) -> None:
    """Write the pictures of a study."""
    importance = study.user_attrs["importance"]
    plans = {
        "early exits": early_exits(len(importance) // 2),
        "least important sublayers left out": thinned_plans(importance)[:-1],
    }
    lines = {
        name: [(costs.step(plan), objective(plan).acceptance) for plan in each]
        for name, each in plans.items()
    }
    write_picture(lambda: front(predictions_of(study), costs), folder / "front.svg")
    write_picture(lambda: importances(importance, lines), folder / "importance.svg")


def compare_samplers(
    options: argparse.Namespace, objective: Objective, space: Space, first: Sequence[LayerPlan]
) -> None:
    """Search anew with several seeds in each of the ways to compare, print the best speed-ups, and
    draw those so far.
    """
    curves: dict[str, list[list[float]]] = {}
    for name, (sampler, tries_first) in SEARCHES.items():
        plans = first if tries_first else ()
        curves[name] = [
            best_so_far(objective, space, plans, options.trials, SAMPLERS[sampler](seed=seed))
            for seed in range(options.compare_samplers)
        ]
        best = [curve[-1] for curve in curves[name]]
        say(f"{name}: {fmean(best):.3f} ({min(best):.3f} to {max(best):.3f})")
    if options.plots is not None:
        write_picture(lambda: best_values(curves, len(first)), options.plots / "samplers.svg")


main = script(run, OPTIONS, "python -m search", __doc__)


if __name__ == "__main__":
    sys.exit(main())
