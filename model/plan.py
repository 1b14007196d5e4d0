"""Layer plan: what a draft leaves out of the model. It is a value passed to ``forward``, never a
mode that is set.

The full model, the skipped sublayers of Draft & Verify (arXiv 2309.08168, section 3.1), the early
exit of LayerSkip (arXiv 2404.16710, section 4.3), the model in few bits and the model that sees the
newest tokens only are plans for one forward pass. 0 bits skip a sublayer.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from model.errors import InputError

FULL = 16  # the checkpoint's weights, whatever their dtype
LOW_BITS = (4, 8)
SINKS = 4  # first keys, which no plan hides: texts fall apart without them (arXiv 2309.17453)


@dataclass(frozen=True)
class LayerPlan:
    """Bits of each layer's attention and MLP sublayer, and of the head: 0, 4, 8 or ``FULL``; and a
    window of all attentions.

    A sublayer of 0 bits is skipped: it adds nothing to the residual stream, and a skipped attention
    neither reads nor writes its layer of the KV cache. The head always runs. With a ``window`` a
    query attends to that many of the newest keys, its own included, and to the first ``SINKS``.
    Without one no key is hidden. A family's own sliding window may hide the first keys too.
    """

    attention: tuple[int, ...]
    mlp: tuple[int, ...]
    head: int = FULL
    window: int | None = None

    def __post_init__(self) -> None:
        run = {*self.attention, *self.mlp} - {0} | {self.head}
        is_blind = self.window is not None and self.window < 1
        if not run <= {*LOW_BITS, FULL} or len(self.attention) != len(self.mlp) or is_blind:
            raise ValueError(
                f"a plan gives both sublayers of each layer 0, 4, 8 or {FULL} bits, and its window"
                f" at least 1 key: {self}"
            )

    @staticmethod
    def full(num_layers: int) -> LayerPlan:
        """Return the target's plan: every sublayer runs, with the checkpoint's weights."""
        return LayerPlan((FULL,) * num_layers, (FULL,) * num_layers)

    @staticmethod
    def of(num_layers: int, plan: LayerPlan | None) -> LayerPlan:
        """Return the plan, or for None the target's. Raises ValueError where it is of another
        number of layers.
        """
        plan = plan or LayerPlan.full(num_layers)
        if plan.num_layers != num_layers:
            raise ValueError(
                f"a plan of {plan.num_layers} layers is for another model: this one has"
                f" {num_layers}"
            )
        return plan

    @staticmethod
    def early_exit(num_layers: int, exit_layer: int) -> LayerPlan:
        """Return an early exit: the first ``exit_layer`` layers run, then final norm and head.

        Raises InputError unless 1 <= exit_layer <= num_layers.
        """
        if not 1 <= exit_layer <= num_layers:
            raise InputError(
                f"exit layer {exit_layer} is not in 1..{num_layers}, the layers of this model"
            )
        skipped = range(exit_layer, num_layers)
        return LayerPlan.skipping(num_layers, skipped, skipped)

    @staticmethod
    def skipping(num_layers: int, attention: Collection[int], mlp: Collection[int]) -> LayerPlan:
        """Return a plan that skips attention and MLP sublayers of these layers (counted from 0).

        Raises InputError when a layer is not in the model.
        """
        layers = range(num_layers)
        if absent := {*attention, *mlp}.difference(layers):
            raise InputError(
                f"the plan skips layer {min(absent)}, but this model has layers 0..{num_layers - 1}"
            )
        return LayerPlan(
            tuple(0 if layer in attention else FULL for layer in layers),
            tuple(0 if layer in mlp else FULL for layer in layers),
        )

    def in_bits(self, bits: int, head: int = 8) -> LayerPlan:
        """Return a plan of the same sublayers in ``bits`` bits, and the head in ``head`` bits."""
        return replace(
            self,
            attention=tuple(bits if each else 0 for each in self.attention),
            mlp=tuple(bits if each else 0 for each in self.mlp),
            head=head,
        )

    @property
    def num_layers(self) -> int:
        return len(self.attention)

    @property
    def attention_layers(self) -> list[int]:
        return [layer for layer, bits in enumerate(self.attention) if bits]

    @property
    def skipped_attention(self) -> list[int]:
        return [layer for layer, bits in enumerate(self.attention) if not bits]

    @property
    def skipped_mlp(self) -> list[int]:
        return [layer for layer, bits in enumerate(self.mlp) if not bits]

    @property
    def has_low_bits(self) -> bool:
        return not {*self.attention, *self.mlp, self.head}.isdisjoint(LOW_BITS)
