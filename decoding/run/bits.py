"""Bits of a model's low-bit drafts, chosen by measurement: their cost, their acceptance, and the speed-up of both."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from decoding.run.acceptance import Calibration, Continuation
from decoding.run.costs import measure_costs
from decoding.run.plan_file import DraftPlan
from decoding.run.prediction import predict
from decoding.sampling import SamplingParams
from model import Decoder, LayerPlan
from weights.memory import free_bytes, twin_bytes


@dataclass(frozen=True)
class BitsTable:
    """Measurements of drafts of all layers in each of ``bits``, one number per entry.

    ``cost`` of a draft step; ``acceptance``, the share of drafted tokens up to the first rejected one that the target
    keeps; ``gamma``, the draft length of the largest ``speedup`` over plain decoding. ``steady`` is False where a
    number of bits was left out or measured while other work disturbed it.
    """

    bits: tuple[int, ...] = ()
    cost: tuple[float, ...] = ()
    acceptance: tuple[float, ...] = ()
    gamma: tuple[int, ...] = ()
    speedup: tuple[float, ...] = ()
    steady: bool = field(default=True, compare=False)

    def best_plan(self, layers: int) -> DraftPlan | None:
        """The plan of the bits with the largest speed-up, for a model of this many layers; None where none gains."""
        best = max(range(len(self.bits)), key=self.speedup.__getitem__, default=None)
        if best is None or self.speedup[best] <= 1:
            return None
        return DraftPlan(LayerPlan.full(layers).in_bits(self.bits[best]), self.gamma[best], None, self.acceptance[best])

    def in_words(self) -> str:
        """The predicted speed-up of each number of bits."""
        if not self.bits:
            return "drafts in low bits do not fit into the free memory"
        gains = [f"{bits} bits {gain:.2f}" for bits, gain in zip(self.bits, self.speedup, strict=True)]
        return "predicted speed of drafts, in times of plain decoding: " + ", ".join(gains)


def measure_bits(
    model: Decoder, texts: Sequence[Continuation], params: SamplingParams, coupling: str = "ratio"
) -> BitsTable:
    """The table of a model's ``fast_bits``, on texts that it wrote with these sampling parameters.

    One number of bits at a time is in memory, and one that does not fit is left out. ``coupling`` names the rule.
    """
    rows, known, steady = [], None, True
    for bits in model.fast_bits:
        plan = LayerPlan.full(model.num_layers).in_bits(bits)
        if not has_memory_for(model, plan):
            steady = False
            continue
        costs = known = measure_costs(model, model, plan, params, coupling, known=known)
        steady = steady and costs.steady
        if len(model.fast_bits) > 1:  # else the copies are those that drafts will use
            model.forget_low_bits()
        prediction = predict(Calibration(model, texts, params, coupling).acceptance(plan), costs)
        rows.append((bits, costs.draft, prediction.kept_share, prediction.gamma, prediction.speedup))
    return BitsTable(*zip(*rows, strict=True), steady=steady)


def has_memory_for(model: Decoder, plan: LayerPlan) -> bool:
    """Whether the low-bit copies of a plan fit into the free memory."""
    # Besides the copies, a matrix is rounded in float32.
    rounding = 6 * model.config.vocab_size * model.config.hidden_size
    return twin_bytes(model.config, plan) + rounding < free_bytes(model.device)
