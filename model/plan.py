"""Which sublayers of a model run: a value that is passed to ``forward``, never a mode that is set.

The full model, the skipped sublayers of Draft & Verify (arXiv 2309.08168, section 3.1) and the early
exit of LayerSkip (arXiv 2404.16710, section 4.3) are three plans for the same forward pass.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from model.errors import InputError


@dataclass(frozen=True)
class LayerPlan:
    """For each layer, whether its attention and its MLP sublayer run.

    A skipped sublayer adds nothing to the residual stream, and a skipped attention neither reads nor
    writes its layer of the KV cache.
    """

    attention: tuple[bool, ...]
    mlp: tuple[bool, ...]

    def __post_init__(self) -> None:
        if len(self.attention) != len(self.mlp):
            raise ValueError(f"a plan of {len(self.attention)} attention and {len(self.mlp)} MLP sublayers")

    @staticmethod
    def full(num_layers: int) -> LayerPlan:
        """Every sublayer runs: the target itself."""
        return LayerPlan((True,) * num_layers, (True,) * num_layers)

    @staticmethod
    def early_exit(num_layers: int, exit_layer: int) -> LayerPlan:
        """The first ``exit_layer`` layers run, then the final norm and the head.

        Raises InputError unless 1 <= exit_layer <= num_layers.
        """
        if not 1 <= exit_layer <= num_layers:
            raise InputError(f"exit layer {exit_layer} is not in 1..{num_layers}, the layers of this model")
        runs = (True,) * exit_layer + (False,) * (num_layers - exit_layer)
        return LayerPlan(runs, runs)

    @staticmethod
    def skipping(num_layers: int, attention: Iterable[int], mlp: Iterable[int]) -> LayerPlan:
        """Every sublayer runs but the attention and MLP sublayers of the layers listed (counted from 0).

        Raises InputError when a layer is not in the model.
        """
        skipped = {"attn": set(attention), "mlp": set(mlp)}
        for name, layers in skipped.items():
            for layer in sorted(layers):
                if not 0 <= layer < num_layers:
                    raise InputError(
                        f"the plan skips {name} of layer {layer}, but this model has layers 0..{num_layers - 1}"
                    )
        return LayerPlan(
            tuple(layer not in skipped["attn"] for layer in range(num_layers)),
            tuple(layer not in skipped["mlp"] for layer in range(num_layers)),
        )

    @property
    def num_layers(self) -> int:
        return len(self.attention)

    @property
    def skipped_attention(self) -> list[int]:
        return [layer for layer, runs in enumerate(self.attention) if not runs]

    @property
    def skipped_mlp(self) -> list[int]:
        return [layer for layer, runs in enumerate(self.mlp) if not runs]
