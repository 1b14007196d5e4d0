"""Find the layer plan with which a model drafts for itself fastest.

``python -m search --model DIR``: the target writes a few texts, and the costs of its sublayers are
measured. A trial predicts the speed-up of one plan: a single pass of it over the texts gives its
acceptance rate, and the sublayers' costs add up to that of its draft step. Optuna proposes the
plans. The best ones and the best early exit decode held-out prompts beside plain decoding, and the
fastest is written.
"""

if __name__ == "__main__":  # before anything that takes long to import
    from app.common.command_line import start

    start()

import argparse
import hashlib
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from itertools import chain, islice
from pathlib import Path
from typing import Any

import optuna
from rich.console import Console

from app.common.command_line import say
from app.common.device import machine
from app.common.files import check_place, read_optional_json
from app.common.parsers import DEVICE, DTYPE, MODEL, TEMPERATURE, Groups, script, within
from app.common.picture import write_picture
from app.options import Options
from app.plan_file import LONG, LONGEST_DRAFT, read_plan
from app.session import Session
from model.errors import InputError
from model.places import version
from model.plan import LOW_BITS, LayerPlan
from search.acceptance import ACCEPTED, Calibration
from search.confirm import confirm, result_table, write_result
from search.costs import CostModel, kept_costs
from search.plots import best_values, draw_search
from search.study import (
    HEAD_KEY,
    SAMPLERS,
    WINDOW_KEY,
    WINDOWS,
    Importance,
    Predict,
    Prediction,
    Space,
    compare_samplers,
    early_exits,
    first_plans,
    measure_importance,
    open_study,
    optimise,
    predictions_of,
    space_of,
)
from search.texts import Prompt, after_documents, plain_texts, read_prompts, split_prompts
from weights.importance import set_importance
from weights.load import model_fingerprint

# Files by whose change a search begins another study: its predictions and costs are made by them
PREDICTING = (
    "search/acceptance.py",
    "search/costs.py",
    "search/study.py",
    "search/texts.py",
    "decoding/*.py",
    "model/*.py",
    "model/fast/*.*",
    "weights/importance.py",
)
CONFIRMED = 5  # best plans that decode; beside them the best early exit
BLOCKS = "▁▂▃▄▅▆▇█"  # from 0 to 1

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
            "help": "the plan file to write, replaced if it exists (default: plan.json in the"
            " model's folder, or plan-STUDY.json where another search or a hand made that)",
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
        "--sampler": {
            "choices": [*SAMPLERS],
            "default": "tpe",
            "help": "method that proposes plans",
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
        "--dtype": DTYPE,
    },
    "calibration text": {
        "--calibration": {
            "type": Path,
            "metavar": "FILE",
            "help": "a prompt per line (default: built-in prompts)",
        },
        "--context": {
            "type": within(int, 1),
            "metavar": "N",
            "help": "put N tokens of this project's documents before each prompt; from"
            f" {LONG} on a plan may have a window",
        },
        "--max-new-tokens": {
            "type": within(int, 1),
            "default": 64,
            "metavar": "N",
            "help": "tokens written after each prompt",
        },
        "--coupling": {
            "choices": [*ACCEPTED],
            "default": "race",
            "help": "rule of verification of the sampled texts that the plan is for",
        },
        "--temperature": {**TEMPERATURE, "type": float},
    },
}


def run(options: argparse.Namespace) -> int:
    """Run a search and write its plan; returns the exit status. Wrong input is refused before the
    long work.
    """
    # 1. The settings name the study, and its files.
    session, settings, study = open_search(options)
    out, before = (options.out, None) if options.out else place_of_plan(session, study)
    # 2. The target writes the texts, on which plans are predicted with costs measured once.
    searched, held_out = split_prompts(session, settings["prompts"])
    is_long = min(map(len, searched)) >= LONG
    space = space_of(session.model.num_layers, options.bits, WINDOWS if is_long else ())
    if any(options.bits):  # before any weight is rounded
        set_importance(session.model, session.tokenizer, session.folder)
    calibration = Calibration(session, plain_texts(session, searched))
    if "costs" not in study.user_attrs:
        prepare(study, session, calibration, searched, space)
    costs = CostModel(**study.user_attrs["costs"])
    importance = Importance(*study.user_attrs["importance"])
    known = predictions_of(study)  # of earlier runs; then of all plans that are asked for

    def predict(plan: LayerPlan) -> Prediction:
        if plan not in known:
            acceptance = calibration.acceptance(plan)
            known[plan] = Prediction(*costs.best(acceptance, costs.step(plan)), acceptance)
        return known[plan]

    # 3. Trials predict plans.
    first = first_plans(importance, space)
    announce(importance, len(first), options.trials)
    status = 0
    try:
        optimise(study, predict, space, first, options.trials)
    except KeyboardInterrupt:  # the study has all finished trials
        status = 130
        say(
            "interrupted: the best plans found decode now, if there are any; the same command"
            " continues the search"
        )
    # 4. The best plans decode, and the fastest is written.
    if found := predictions_of(study):
        exits = early_exits(importance.num_layers) if 0 in options.bits else []
        plans = plans_to_confirm(found, exits, before, predict)
        results = confirm(session, held_out, {plan: predict(plan) for plan in plans})
        Console(width=None if sys.stdout.isatty() else 120).print(result_table(results))
        write_result(out, results[0], settings, study.study_name, options.model)
        if options.plots is not None:
            draw_search(options.plots, found, importance, predict, costs)
    if options.compare_samplers and status == 0:
        curves = compare_samplers(predict, space, first, options.trials, options.compare_samplers)
        if options.plots is not None:
            write_picture(lambda: best_values(curves, len(first)), options.plots / "samplers.svg")
    return status


def open_search(options: argparse.Namespace) -> tuple[Session, dict[str, Any], optuna.Study]:
    """Return the session, the settings, and the study that they name.

    Raises InputError for files that cannot be read or written, and for too little memory.
    """
    prompts = read_prompts(options.calibration)
    shared = ("model", "device", "dtype", "max_new_tokens", "coupling", "temperature", "seed")
    session = Session(Options(**{name: getattr(options, name) for name in shared}))
    if options.context:
        prompts = after_documents(session.tokenizer, prompts, options.context)
    settings = settings_of(session, options, prompts)
    study_name = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]
    place = options.out or session.folder / "plan.json"
    check_place(place)
    journal = place.with_suffix(".journal")
    if place == journal:
        raise InputError(f"--out {place}: the trials are kept there: name a .json")
    session.check_memory()
    if options.plots is not None:
        options.plots.mkdir(parents=True, exist_ok=True)
    return session, settings, open_study(journal, study_name, options.sampler, options.seed)


def settings_of(
    session: Session, options: argparse.Namespace, prompts: list[str]
) -> dict[str, Any]:
    """Return all on which the predictions of a search depend. Sampler and seed are not among them:
    they choose the plans, so that trials of any sampler belong to one study.
    """
    return {
        "model": model_fingerprint(session.folder),
        "dtype": str(session.dtype).removeprefix("torch."),
        "bits": sorted({*options.bits}),
        "sampling": {**asdict(session.options.params), "coupling": options.coupling},
        "max_new_tokens": options.max_new_tokens,
        "prompts": prompts,
        "machine": machine(session.device),
        "version": version(chain(*map(Path(__file__).parents[1].glob, PREDICTING))),
        "longest_draft": LONGEST_DRAFT,
        "windows": WINDOWS,
        "long": LONG,
    }


def place_of_plan(session: Session, study: optuna.Study) -> tuple[Path, LayerPlan | None]:
    """Return the file for the plan of a study, and the plan that the study wrote into it before.

    The file is ``plan.json`` in the model's folder or, where that is of another search or was
    written by hand, a file beside it.
    """
    shipped = session.folder / "plan.json"
    before = plan_before(shipped, session, study)
    if before or not shipped.exists():
        return shipped, before
    beside = session.folder / f"plan-{study.study_name}.json"
    say(f"{shipped} is not of this search and stays: the new plan goes to {beside}")
    return beside, plan_before(beside, session, study)


def plan_before(file: Path, session: Session, study: optuna.Study) -> LayerPlan | None:
    """Return the plan that this study wrote into a file before: one that it tried, or an early
    exit. Return None where there is none: another search wrote the file, or a hand changed its
    plan.
    """
    if read_optional_json(file).get("study") != study.study_name:
        return None
    plan = read_plan(file, session.model.num_layers, session.folder).plan
    return plan if plan in {*predictions_of(study), *early_exits(plan.num_layers)} else None


def prepare(
    study: optuna.Study,
    session: Session,
    calibration: Calibration,
    prompts: Sequence[Prompt],
    space: Space,
) -> None:
    """Store costs and importances of sublayers in a new study.

    The costs are also in a file of the cache folder, for other journals with the same settings. The
    study has its own, since its trials were predicted with them, whatever becomes of that file.
    """
    # The head may have every number of bits but 0.
    costs = kept_costs(study.study_name, session, prompts, space[HEAD_KEY], space[WINDOW_KEY])
    study.set_user_attr(
        "importance", measure_importance(session.model.num_layers, calibration.acceptance)
    )
    study.set_user_attr("costs", asdict(costs))  # the last: with them the study is complete


def announce(importance: Importance, first: int, trials: int) -> None:
    """Print the importance of each sublayer, and whether the sampler is asked for any plan."""
    for title, shares in zip(("attention", "MLP"), importance, strict=True):
        blocks = "".join(BLOCKS[round(share * (len(BLOCKS) - 1))] for share in shares)
        say(f"importance by layer, {title:9} {blocks}")
    if trials <= first:
        say(f"the first {first} plans are chosen: with {trials} trials no sampler is asked")


def plans_to_confirm(
    found: Iterable[LayerPlan],
    exits: Iterable[LayerPlan],
    before: LayerPlan | None,
    predict: Predict,
) -> list[LayerPlan]:
    """Return the plans to decode: the first of those ``found``, the best of these early exits, and
    the plan that this search wrote ``before``, so that no slower one replaces it.
    """
    # a plan file cannot skip every layer
    plans = [*islice((plan for plan in found if any(plan.attention + plan.mlp)), CONFIRMED)]
    plans += sorted(exits, key=lambda plan: -predict(plan).speedup)[:1]
    return [*plans, before] if before else plans


main = script(run, OPTIONS, "python -m search", __doc__)


if __name__ == "__main__":
    sys.exit(main())
