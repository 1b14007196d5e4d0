"""Finds where a model's numbers first go wrong, for a message; decoding itself only looks at the logits."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace

import torch
from torch import Tensor

from model.cache import KVCache
from model.decoder import PREFILL_CHUNK, Decoder
from model.errors import InputError
from model.plan import LayerPlan


@torch.inference_mode()
def explain_nonfinite(model: Decoder, cache: KVCache, tokens: Tensor, plan: LayerPlan | None = None) -> InputError:
    """The error to raise when the logits after ``tokens`` ``[n]`` hold NaN or infinity.

    Runs the text again, under plans that end earlier, and names the first sublayer after which a number is not finite:
    in a residual stream it stays so. The cache is written anew from position 0, so that no second one is needed.
    """
    plan = plan or LayerPlan.full(model.num_layers)
    runs = [("attention", layer) for layer, bits in enumerate(plan.attention) if bits]
    runs += [("MLP", layer) for layer, bits in enumerate(plan.mlp) if bits]
    runs.sort(key=lambda sublayer: sublayer[1])  # an attention stays before the MLP of its layer

    def breaks_after(count: int) -> bool:
        """Whether a number is not finite after the first so many sublayers."""
        bits = {
            name: tuple(each * ((name, layer) in runs[:count]) for layer, each in enumerate(given))
            for name, given in (("attention", plan.attention), ("MLP", plan.mlp))
        }
        part = replace(plan, attention=bits["attention"], mlp=bits["MLP"])
        starts = range(0, len(tokens), PREFILL_CHUNK)
        chunks = (model.hidden(tokens[None, start : start + PREFILL_CHUNK], cache, start, part) for start in starts)
        return not all(chunk.isfinite().all() for chunk in chunks)

    first = bisect_left(range(len(runs) + 1), True, key=breaks_after)
    names = ["the embedding", *(f"the {name} of layer {layer}" for name, layer in runs), "the final norm and head"]
    dtype = str(model.dtype).removeprefix("torch.")
    return InputError(
        f"the model's numbers stop being finite (NaN or infinity) in {names[first]}: the checkpoint is damaged there, "
        f"or its numbers are too large for {dtype}: fetch it again, or give --dtype bfloat16 or float32"
    )
