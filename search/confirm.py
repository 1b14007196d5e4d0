"""Confirmation of a search: its best plans decode held-out prompts beside plain decoding, and the
fastest is written.

Knows nothing of how plans are found.
"""

import shlex
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import track
from rich.table import Table

from app.common.command_line import say
from app.common.table import table
from app.plan_file import DraftPlan, plan_in_words, write_plan
from app.session import Session
from decoding.rounds import Statistics
from model.plan import LayerPlan
from search.study import Prediction
from search.texts import Prompt

TURNS = 3  # in which a held-out prompt is written in each way


class Confirmed(NamedTuple):
    """A plan, its prediction, and its speed-up and acceptance rate on held-out prompts."""

    plan: LayerPlan
    predicted: Prediction
    speedup: float
    acceptance: float


def confirm(
    session: Session, held_out: Sequence[Prompt], plans: Mapping[LayerPlan, Prediction]
) -> list[Confirmed]:
    """Return the results of these plans on the held-out prompts, the fastest first: all prompts are
    written in turns with plain decoding.
    """
    ways: dict[LayerPlan | None, dict[str, Any]] = {
        None: {"draft": "none"},
        **{
            plan: {"draft": "skip", "plan": DraftPlan(plan, predicted.gamma)}
            for plan, predicted in plans.items()
        },
    }
    seconds = dict.fromkeys(ways, 0.0)
    totals = {plan: Statistics() for plan in ways}
    for prompt in track(
        held_out, "running the best plans on held-out prompts", console=Console(stderr=True)
    ):
        turns = [
            {
                plan: session.finish(session.begin(prompt, session.options.merged(way)))
                for plan, way in ways.items()
            }
            for _ in range(TURNS)
        ]
        for plan in ways:
            seconds[plan] += median(turn[plan].seconds for turn in turns)
            for round in turns[0][plan].rounds:
                totals[plan].add(round)
    speeds = {plan: totals[plan].tokens / seconds[plan] for plan in ways}
    results = [
        Confirmed(plan, predicted, speeds[plan] / speeds[None], totals[plan].acceptance_rate or 0.0)
        for plan, predicted in plans.items()
    ]
    return sorted(results, key=lambda result: -result.speedup)


def result_table(results: Sequence[Confirmed]) -> Table:
    """Return the table of these results."""
    rows = [
        {
            "plan": plan_in_words(result.plan),
            "γ": result.predicted.gamma,
            "speed-up": result.speedup,
            "expected": result.predicted.speedup,
            "accepted": result.acceptance,
        }
        for result in results
    ]
    return table(rows, "held-out prompts: measured beside plain decoding, and expected")


def write_result(
    path: Path, best: Confirmed, settings: Mapping[str, Any], study: str, model: str
) -> None:
    """Write the plan file of a result, with the settings of its study, and print how to use it. A
    plan that is not faster than plain decoding gets a draft length of 0.
    """
    predicted = best.predicted
    pays = best.speedup > 1
    provenance = {
        "acceptance_rate": best.acceptance,
        "predicted_speedup": predicted.speedup,
        "measured_speedup": best.speedup,
        "sampling": settings["sampling"],
        "dtype": settings["dtype"],
        "machine": settings["machine"],
        "date": date.today().isoformat(),
        "study": study,
    }
    draft = DraftPlan(best.plan, predicted.gamma if pays else 0, alpha=predicted.acceptance)
    write_plan(path, draft, settings["model"], provenance)
    measured = f"{path}: {best.speedup:.2f} times plain decoding"
    if pays:
        say(f"{measured}, with a draft length of up to {predicted.gamma}")
        say(
            f'to use it: python generate.py "Your prompt" --model {shlex.quote(model)}'
            f" --draft skip --plan {shlex.quote(str(path))}"
        )
    else:
        say(f"{measured}: no plan beats plain decoding, so --draft skip decodes plainly")
