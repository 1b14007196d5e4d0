"""Location of the first non-finite number in a model, for the error message when logits are non-finite."""

from __future__ import annotations

from bisect import bisect_left

import torch
from torch import Tensor

from model.cache import KVCache
from model.decoder import PREFILL_CHUNK, Decoder
from model.errors import InputError
from model.plan import LayerPlan


@torch.inference_mode()
def explain_nonfinite(model: Decoder, cache: KVCache, tokens: Tensor) -> InputError:
    """Error to raise when the logits after ``tokens`` ``[n]`` hold NaN or infinity.

    It names the first sublayer after which a number is non-finite: in a residual stream it stays so. A binary search
    finds it, by passes over the text with fewer sublayers. They overwrite the cache from position 0.
    """
    layers = range(model.num_layers)  # each has two sublayers, attention and MLP

    def breaks_after(count: int) -> bool:
        """Whether the residual stream holds a non-finite number after the first ``count`` sublayers."""
        plan = LayerPlan.skipping(len(layers), layers[(count + 1) // 2 :], layers[count // 2 :])
        starts = range(0, len(tokens), PREFILL_CHUNK)
        chunks = (model.hidden(tokens[None, start : start + PREFILL_CHUNK], cache, start, plan) for start in starts)
        return not all(chunk.isfinite().all() for chunk in chunks)

    first = bisect_left(range(2 * len(layers) + 1), True, key=breaks_after)
    place = f"the {'attention' if first % 2 else 'MLP'} of layer {(first - 1) // 2}"
    if first in (0, 2 * len(layers) + 1):
        place = "the final norm and head" if first else "the embedding"
    dtype = str(model.dtype).removeprefix("torch.")
    return InputError(
        f"the model's numbers stop being finite (NaN or infinity) in {place}: the checkpoint is damaged there, "
        f"or its numbers are too large for {dtype}: fetch it again, or give --dtype bfloat16 or float32"
    )
