"""Hand-written Llama and Gemma-2 decoders with an explicit KV cache and layer plans."""

from model.cache import KVCache
from model.config import ModelConfig, parse_config
from model.decoder import Decoder
from model.errors import InputError
from model.gemma2 import Gemma2
from model.llama import Llama
from model.plan import LayerPlan

__all__ = ["Decoder", "Gemma2", "InputError", "KVCache", "LayerPlan", "Llama", "ModelConfig", "build", "parse_config"]


def build(config: ModelConfig) -> Decoder:
    """The module of a config's family. Its weights are to be loaded, or ``initialise``d."""
    return {"llama": Llama, "gemma2": Gemma2}[config.family](config)
