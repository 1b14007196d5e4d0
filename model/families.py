"""Choice of a model's block by its config."""

from model.config import ModelConfig
from model.decoder import Decoder
from model.gemma2 import Gemma2
from model.llama import Llama


def build(config: ModelConfig) -> Decoder:
    """Return a decoder of a config's family, without weights: load them, or call ``initialise``."""
    return {"llama": Llama, "gemma2": Gemma2}[config.block](config)
