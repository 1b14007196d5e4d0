"""A loaded model, prepared in place: its readable parts exchanged for fast ones."""

from __future__ import annotations

from torch import nn

from model.decoder import Decoder
from model.fast.graphs import GraphedDecoder
from model.fast.low_bits import LowBits
from model.fast.parts import FastNorm, FusedAttention, FusedLlamaBlock, FusedMLP, PackedLinear, can_pack
from model.fast.steady import SteadyDecoder
from model.layers import Attention, GatedMLP, RMSNorm
from model.llama import LlamaBlock
from model.twins import Twins

FAST = {RMSNorm: FastNorm, Attention: FusedAttention, GatedMLP: FusedMLP}


def accelerate(model: Decoder) -> SteadyDecoder | GraphedDecoder:
    """Replace the model's norms, attentions, MLPs and head by fast ones, layer by layer, and return it.

    The weights are moved, not copied: memory peaks at one layer more. Only a tied embedding is held twice,
    once to be looked up and once packed as the head. The prepared model decodes but can no longer be trained
    or saved. On a GPU its short steps are replayed as CUDA graphs; on a CPU, in bf16, they give a position the same
    bits however many tokens they take (``SteadyDecoder``).
    """
    for number, block in enumerate(model.layers):
        if isinstance(block, LlamaBlock):
            model.layers[number] = block = FusedLlamaBlock(block)
        exchange_parts(block)
    head = model.embed_tokens if model.lm_head is None else model.lm_head
    if model.lm_head is not None or can_pack(head.weight.device, head.weight.dtype):
        del model.lm_head
        model.lm_head = PackedLinear([head.weight])
    exchange_parts(model)
    model.twins = Twins(model, LowBits())
    return GraphedDecoder(model) if model.device.type == "cuda" else SteadyDecoder(model)


def exchange_parts(module: nn.Module) -> None:
    """Put a fast part where ``module`` holds a readable one. The blocks call either by the same name."""
    for name, part in list(module.named_children()):
        for readable, fast in FAST.items():
            if isinstance(part, readable):
                delattr(module, name)  # what is no Module cannot take a Module's place
                setattr(module, name, fast(part))
