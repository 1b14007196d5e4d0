"""Speed, without the readable files knowing: compiled steps on a CPU, compiled and captured ones on a GPU."""

from __future__ import annotations

import sys
from importlib.util import find_spec

import torch

from model.decoder import Decoder

__all__ = ["accelerate"]

COMPILED = (torch.bfloat16, torch.float16, torch.float32)  # on a CPU; float64 is for exact laws


def accelerate(model: Decoder, compiled: bool = True) -> Decoder:
    """The model, prepared to decode fast on its device: one with the methods of ``Decoder``, and the same weights.

    Not ``compiled``, its steps are the readable blocks'.
    Its short steps then give a position the same bits however many tokens they take. Where it cannot be prepared, a
    line on standard error says so, and it is returned as it is.
    """
    if model.device.type != "cpu":
        from model.fast.gpu import StaticDecoder

        return StaticDecoder(model, model.device.type == "cuda" and compiled)
    if model.dtype not in COMPILED or not compiled:
        return model
    if find_spec("numba") is None:
        print("numba is not installed: steps are the readable blocks', several times slower", file=sys.stderr)
        return model
    from model.fast.cpu.compile import compiled_functions
    from model.fast.cpu.decoder import FastDecoder

    return FastDecoder(model, *compiled_functions())
