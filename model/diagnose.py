"""Finds where a model's numbers first go wrong, for a message; decoding itself only looks at the logits."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from model.cache import KVCache
from model.decoder import PREFILL_CHUNK, Decoder
from model.errors import InputError
from model.layers import place
from model.plan import LayerPlan


@torch.inference_mode()
def explain_nonfinite(model: Decoder, cache: KVCache, tokens: Tensor, plan: LayerPlan | None = None) -> InputError:
    """The error to raise when the logits after ``tokens`` ``[n]`` hold NaN or infinity.

    Runs the text again, sublayer by sublayer, and names the first place where a number is not finite. The
    cache is written anew from position 0, so that no second one is needed.
    """
    plan = plan or LayerPlan.full(model.num_layers)
    where = "the final norm and head"
    for start in range(0, len(tokens), PREFILL_CHUNK):
        stages = _stages(model, cache, tokens[None, start : start + PREFILL_CHUNK], start, plan)
        broken = next((name for name, x in stages if not x.isfinite().all()), None)
        if broken:
            where = broken
            break
    dtype = str(model.dtype).removeprefix("torch.")
    return InputError(
        f"the model's numbers stop being finite (NaN or infinity) in {where}: the checkpoint is damaged there, or "
        f"its numbers are too large for {dtype}: fetch it again, or give --dtype bfloat16 or float32"
    )


def _stages(
    model: Decoder, cache: KVCache, tokens: Tensor, start: int, plan: LayerPlan
) -> Iterator[tuple[str, Tensor]]:
    """The residual stream after each sublayer, with the place in words."""
    x = model.embed(tokens)
    yield "the embedding", x
    positions = place(model.config, start, tokens.shape[1], x)
    for layer in range(model.num_layers):
        block = model.twins.block(layer, plan.attention[layer], plan.mlp[layer])
        if plan.attention[layer]:
            x = block(x, positions, cache, attention=True, mlp=False)
            yield f"the attention of layer {layer}", x
        if plan.mlp[layer]:
            x = block(x, positions, cache, attention=False, mlp=True)
            yield f"the MLP of layer {layer}", x
