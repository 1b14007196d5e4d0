"""A model prepared for a GPU in place: its readable parts exchanged for larger ones, its steps recorded."""

from __future__ import annotations

import torch
from torch import nn

from model.decoder import Decoder
from model.fast.graphs import GraphedDecoder
from model.fast.low_bits import LowBits, can_save
from model.fast.parts import FastNorm, FusedAttention, FusedLlamaBlock, FusedMLP, StackedLinear
from model.layers import Attention, GatedMLP, RMSNorm
from model.llama import LlamaBlock
from model.plan import LOW_BITS
from model.twins import Twins

FAST = {RMSNorm: FastNorm, Attention: FusedAttention, GatedMLP: FusedMLP}


def graphed(model: Decoder) -> GraphedDecoder:
    """The model with its steps recorded as CUDA graphs. On a GPU torch no longer uses cuDNN's attention afterwards."""
    fuse(model)
    # Its attention is planned anew, for tens of milliseconds, at every length that it has not met.
    torch.backends.cuda.enable_cudnn_sdp(False)
    if model.device.type == "cuda":
        torch.cuda.empty_cache()  # memory of sizes that nothing else will ask for
    return GraphedDecoder(model)


def fuse(model: Decoder) -> Decoder:
    """Replace the model's norms, attentions, MLPs and head, layer by layer: weights are moved, not copied.

    It decodes but can no longer be trained or saved.
    """
    for number, block in enumerate(model.layers):
        if isinstance(block, LlamaBlock):
            model.layers[number] = block = FusedLlamaBlock(block)
        exchange_parts(block)
    if model.lm_head is not None:
        head = model.lm_head
        del model.lm_head
        model.lm_head = StackedLinear([head.weight])
    exchange_parts(model)
    model.twins = Twins(model, LowBits())
    model.fast_bits = LOW_BITS if can_save(model) else ()
    return model


def exchange_parts(module: nn.Module) -> None:
    """Put a fast part where ``module`` holds a readable one. The blocks call either by the same name."""
    for name, part in list(module.named_children()):
        for readable, fast in FAST.items():
            if isinstance(part, readable):
                delattr(module, name)  # what is no Module cannot take a Module's place
                setattr(module, name, fast(part))
