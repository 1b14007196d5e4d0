"""Decoders of the families of ``config.FAMILIES``, with an explicit KV cache and layer plans.

Begin with ``llama`` or ``gemma2``: one block each, made of ``layers``. ``decoder`` has the forward
pass, ``cache`` the KV cache and ``plan`` the layer plan; ``quantise`` rounds weights
and makes sublayers in low bits, and ``parallel`` splits a model over processes. ``fast`` makes the
same models faster.
"""

from model.cache import KVCache
from model.config import ModelConfig, parse_config
from model.decoder import PREFILL_CHUNK, Decoder, Steps, chunk_at
from model.device import LAUNCHERS, launch, now
from model.errors import NON_FINITE, InputError
from model.gemma2 import Gemma2
from model.layers import layer_positions
from model.llama import Llama
from model.parallel import Cut, Shard, exchange, split
from model.places import cache_folder, version
from model.plan import FULL, LOW_BITS, LayerPlan
from model.quantise import Twins

__all__ = [
    "FULL",
    "LAUNCHERS",
    "LOW_BITS",
    "NON_FINITE",
    "PREFILL_CHUNK",
    "Cut",
    "Decoder",
    "Gemma2",
    "InputError",
    "KVCache",
    "LayerPlan",
    "Llama",
    "ModelConfig",
    "Shard",
    "Steps",
    "Twins",
    "build",
    "cache_folder",
    "chunk_at",
    "exchange",
    "launch",
    "layer_positions",
    "now",
    "parse_config",
    "split",
    "version",
]


def build(config: ModelConfig) -> Decoder:
    """Decoder of a config's family, without weights: load them, or call ``initialise``."""
    return {"llama": Llama, "gemma2": Gemma2}[config.block](config)
