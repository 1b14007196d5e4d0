"""Optuna's samplers beside random search and a greedy one: the best predicted speed-up at equal numbers of trials."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.table import Table

from decoding.run.costs import SublayerCosts
from decoding.run.prediction import Prediction
from model import LayerPlan
from search.study import SAMPLERS, candidates, choices, enqueue, open_study, optimise, parameters, plan_of

Evaluate = Callable[[LayerPlan], Prediction]


def remembering(evaluate: Evaluate, on_trial: Callable[[], None] = lambda: None) -> Evaluate:
    """The same function, which computes each plan once for all contenders."""
    known: dict[LayerPlan, Prediction] = {}

    def look_up(plan: LayerPlan) -> Prediction:
        if plan not in known:
            known[plan] = evaluate(plan)
        on_trial()
        return known[plan]

    return look_up


def greedy(evaluate: Evaluate, first: Sequence[LayerPlan], trials: int) -> float:
    """Take the best of the first plans; then change the sublayer whose change helps, one at a time, in order.

    Every improvement is kept at once (hill climbing by first improvement); a whole turn without one ends it.
    """
    tried = {plan: evaluate(plan).speedup for plan in first[:trials]}
    best = max(tried, key=lambda plan: tried[plan])
    changes = [(name, bits) for name in parameters(best) for bits in choices(name)]
    fruitless, at = 0, 0
    while len(tried) < trials and fruitless < len(changes):
        name, bits = changes[at % len(changes)]
        changed = plan_of({**parameters(best), name: bits})
        at += 1
        fruitless += 1
        if changed not in tried:
            tried[changed] = evaluate(changed).speedup
            if tried[changed] > tried[best]:
                best, fruitless = changed, 0
    return tried[best]


def compare(
    evaluate: Evaluate, costs: SublayerCosts, first: Sequence[LayerPlan], trials: int, seeds: Sequence[int]
) -> dict[str, list[float]]:
    """The best predicted speed-up of every contender for every seed; all start from the same plans."""
    num_layers = first[0].num_layers
    results: dict[str, list[float]] = {"greedy": [greedy(evaluate, first, trials)] * len(seeds)}
    for name in SAMPLERS:
        results[name] = []
        for seed in seeds:
            study = open_study(None, {}, name, seed, resume=False)
            enqueue(study, first)
            optimise(study, evaluate, costs, num_layers, trials)
            results[name].append(candidates(study)[0].prediction.speedup)
    return results


def comparison_table(results: dict[str, list[float]], best_start: float, trials: int) -> Table:
    """Medians and ranges over the seeds, and how often random search was beaten."""
    count = len(results["random"])
    table = Table(title=f"best predicted speed-up in {trials} trials, {count} seeds; best start {best_start:.3f}")
    for heading in ("search", "median", "lowest", "highest", "beats random"):
        table.add_column(heading, justify="left" if heading == "search" else "right")
    for name, values in results.items():
        ordered = sorted(values)
        wins = sum(value > other for value, other in zip(values, results["random"], strict=True))
        beats = "" if name == "random" else f"{wins} of {count}"
        table.add_row(name, f"{ordered[count // 2]:.3f}", f"{ordered[0]:.3f}", f"{ordered[-1]:.3f}", beats)
    return table
