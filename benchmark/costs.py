"""Costs of steps: of verifications by their rows, and of draft steps, in plain steps.

All of them are timed calls of a model, each up to the choice of the likeliest token, which the host
reads. Knows nothing of texts.
"""

from collections.abc import Mapping
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch

from app.plan_file import LONGEST_DRAFT
from benchmark.timing import spread, take_turns
from decoding.rounds import expected_speedup
from model import Decoder, LayerPlan
from weights.memory import bytes_read

ROWS = (1, 2, 4, 8, 16)  # tokens of a verification
DRAFTED = 5  # draft steps of a round
POSITION = 128  # after which the steps are timed
TURNS = 15
# enough that the time to read them can be measured
BLOCK_BYTES = {"cpu": 1 << 28, "cuda": 1 << 32}


class Drafting(NamedTuple):
    """Model that drafts, its cache, and its plan, if any."""

    model: Any
    cache: Any
    plan: LayerPlan | None = None


class Costs(NamedTuple):
    """Costs in plain steps, which take some ``milliseconds``: median and range.

    ``rows``: by the tokens of a verification. ``drafts``: by name, the cost of a draft step, and
    what the first of a round costs more, since the verification before it has left other weights in
    the caches. ``floor``: of reading every weight once, at a ``bandwidth`` in GB/s.
    """

    milliseconds: Mapping[str, float]
    rows: Mapping[int, float]
    drafts: Mapping[str, tuple[float, float]]
    floor: float
    bandwidth: float

    def speedup(self, name: str, rate: float) -> float:
        """Return the expected speed-up of a draft at an acceptance rate, at its best length.

        Costs of verifications between the measured ones are interpolated.
        """
        step, first = self.drafts[name]
        verify = partial(np.interp, xp=[*self.rows], fp=[*self.rows.values()])
        lengths = range(1, LONGEST_DRAFT + 1)
        return max(expected_speedup(rate, k, step, first + float(verify(k + 1))) for k in lengths)


@torch.inference_mode()
def measure_costs(model: Decoder, cache: Any, drafts: Mapping[str, Drafting]) -> Costs:
    """Return the costs of a model's steps, and of the steps of drafts for it.

    The caches count as full up to ``POSITION``, whatever they hold.
    """
    target = Drafting(model, cache)
    steps: dict[Any, Any] = {rows: partial(run_steps, target, rows) for rows in ROWS}
    for name, draft in drafts.items():
        steps |= {(name, count): partial(run_steps, draft, 1, count) for count in (1, DRAFTED)}
    block = torch.ones(BLOCK_BYTES.get(model.device.type, 1 << 28) // 4, device=model.device)
    steps["read"] = lambda turn: block.sum().item()
    runs = take_turns(steps, range(TURNS), model.device)
    seconds = {key: [run.seconds for run in each] for key, each in runs.items()}
    plain = median(seconds[1])
    cost = {key: median(each) / plain for key, each in seconds.items()}
    later = {name: (cost[name, DRAFTED] - cost[name, 1]) / (DRAFTED - 1) for name in drafts}
    bandwidth = block.nbytes / min(seconds["read"])
    size = bytes_read(model.config, LayerPlan.full(model.num_layers), model.dtype.itemsize)
    return Costs(
        spread(1e3 * each for each in seconds[1]),
        {rows: cost[rows] for rows in ROWS},
        {name: (step, max(0.0, cost[name, 1] - step)) for name, step in later.items()},
        size / bandwidth / plain,
        bandwidth / 1e9,
    )


def run_steps(drafting: Drafting, rows: int = 1, count: int = 1, turn: int = 0) -> None:
    """Run steps of some rows each, one after another; the cache forgets them. All turns are alike."""
    model, cache, plan = drafting
    start = min(POSITION, cache.capacity - max(ROWS))
    cache.claim(range(len(cache.lengths)), 0, start)
    tokens = torch.zeros(1, rows, dtype=torch.int64, device=model.device)
    for at in range(start, start + rows * count, rows):
        model(tokens, cache, at, plan)[0, -1].argmax().item()
    cache.truncate(0)
