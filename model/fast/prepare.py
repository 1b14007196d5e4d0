"""A loaded model, prepared in place: its readable parts exchanged for fast ones."""

from __future__ import annotations

import torch
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
    or saved. Its short steps give a position the same bits however many tokens they take: on a GPU, where they are
    replayed as CUDA graphs (``GraphedDecoder``), and in bf16 on a CPU (``SteadyDecoder``). On a GPU torch no longer
    uses cuDNN's attention in this process.
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
    if model.device.type == "cpu":
        return SteadyDecoder(model)
    # Its attention is planned anew, for tens of milliseconds, at every length that it has not met.
    torch.backends.cuda.enable_cudnn_sdp(False)
    if model.device.type == "cuda":
        torch.cuda.empty_cache()  # the weights that were packed leave room of sizes that nothing else will ask for
    return GraphedDecoder(model)


def exchange_parts(module: nn.Module) -> None:
    """Put a fast part where ``module`` holds a readable one. The blocks call either by the same name."""
    for name, part in list(module.named_children()):
        for readable, fast in FAST.items():
            if isinstance(part, readable):
                delattr(module, name)  # what is no Module cannot take a Module's place
                setattr(module, name, fast(part))
