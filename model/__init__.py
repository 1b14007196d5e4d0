"""Decoders of the families of ``config.FAMILIES``, with an explicit KV cache and layer plans.

Begin with ``llama`` or ``gemma2``: one block each, made of ``layers``. ``decoder`` has the forward
pass, ``cache`` the KV cache and ``plan`` the layer plan; ``quantise`` rounds weights
and makes sublayers in low bits, and ``parallel`` splits a model over processes. ``fast`` makes the
same models faster.
"""

from model.cache import KVCache
from model.config import ModelConfig, parse_config
from model.decoder import Decoder
from model.errors import InputError
from model.gemma2 import Gemma2
from model.llama import Llama
from model.plan import LayerPlan

__all__ = [
    "Decoder",
    "Gemma2",
    "InputError",
    "KVCache",
    "LayerPlan",
    "Llama",
    "ModelConfig",
    "build",
    "parse_config",
]


def build(config: ModelConfig) -> Decoder:
    """Decoder of a config's family, without weights: load them, or call ``initialise``."""
    return {"llama": Llama, "gemma2": Gemma2}[config.block](config)
