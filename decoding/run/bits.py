"""Bits of a model's low-bit drafts, chosen by measurement: their cost, their acceptance, and the speed-up of both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from decoding.run.acceptance import Calibration, Continuation
from decoding.run.costs import CostTable, measure_costs
from decoding.run.prediction import predict
from decoding.sampling import SamplingParams
from model import Decoder, LayerPlan
from weights.memory import free_bytes, twin_bytes


@dataclass(frozen=True)
class BitsTable:
    """Drafts of all layers in each of ``bits``: one number per entry of it, and ``verify`` of their cost tables.

    ``cost`` of a draft step; ``acceptance``, the share of drafted tokens up to the first rejected one that the target
    keeps; ``gamma``, the draft length of the largest ``speedup`` over plain decoding.
    """

    bits: tuple[int, ...]
    cost: tuple[float, ...]
    acceptance: tuple[float, ...]
    gamma: tuple[int, ...]
    speedup: tuple[float, ...]
    verify: tuple[float, ...]
    steady: bool = field(default=True, compare=False)  # whether no number of bits was left out, nor measured unsteadily

    def __post_init__(self) -> None:
        """Raises ValueError for columns of different lengths."""
        if len({len(column) for column in (self.bits, self.cost, self.acceptance, self.gamma, self.speedup)}) > 1:
            raise ValueError(f"no table of bits: {self}")

    @property
    def best(self) -> int | None:
        """The place of the largest speed-up; None where no number of bits gains."""
        place = max(range(len(self.bits)), key=self.speedup.__getitem__, default=None)
        return None if place is None or self.speedup[place] <= 1 else place

    def costs(self, place: int) -> CostTable:
        """The cost table of the drafts at this place."""
        return CostTable(self.cost[place], self.verify)


def measure_bits(
    model: Decoder, texts: Sequence[Continuation], params: SamplingParams, coupling: str = "ratio"
) -> BitsTable:
    """The table of a model's ``fast_bits``, on texts that it wrote with these sampling parameters.

    One number of bits at a time is in memory, and one that does not fit is left out. ``coupling`` is the rule of
    verification that the acceptance is of.
    """
    rows, verify, steady = [], None, True
    for bits in model.fast_bits:
        plan = LayerPlan.full(model.num_layers).in_bits(bits)
        if not has_memory_for(model, plan):
            steady = False
            continue
        costs = measure_costs(model, model, plan, params, verify=verify)
        verify, steady = costs.verify, steady and costs.steady
        model.forget_low_bits()
        prediction = predict(Calibration(model, texts, params, coupling).acceptance(plan), costs)
        rows.append((bits, costs.draft, prediction.kept_share, prediction.gamma, prediction.speedup))
    return BitsTable(*zip(*rows, strict=True), verify, steady) if rows else BitsTable((), (), (), (), (), (), False)


def has_memory_for(model: Decoder, plan: LayerPlan) -> bool:
    """Whether the low-bit copies of a plan fit into the free memory."""
    # Besides the copies, a matrix is rounded in float32.
    rounding = 6 * model.config.vocab_size * model.config.hidden_size
    return twin_bytes(model.config, plan) + rounding < free_bytes(model.device)
