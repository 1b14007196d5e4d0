"""Prepared decoder: base of the decoders of ``model.fast``."""

from torch import Tensor

from model.cache import KVCache
from model.decoder import Decoder, Steps
from model.plan import LayerPlan


class PreparedDecoder(Steps):
    """The readable ``model`` behind other steps: a subclass has a ``__call__`` of its own, and what
    it replaces of ``Steps``. Everything else is the readable model's.
    """

    def __init__(self, model: Decoder) -> None:
        self.model = model
        self.config = model.config
        self.vocab_size = model.vocab_size
        self.max_positions = model.max_positions
        self.num_layers = model.num_layers
        self.device = model.device
        self.dtype = model.dtype
        self.embed_tokens = model.embed_tokens
        self.layers = model.layers
        self.norm = model.norm
        self.lm_head = model.lm_head
        self.importance = model.importance
        self.named_parameters = model.named_parameters
        self.embed = model.embed
        self.hidden = model.hidden
        self.logits = model.logits
        self.rounded = model.rounded

    def new_cache(self, capacity: int, batch: int = 1) -> KVCache:
        return self.model.new_cache(capacity, batch)

    def prepare(self, plan: LayerPlan) -> None:
        self.model.prepare(plan)

    def prefill(self, tokens: Tensor, cache: KVCache, start: int = 0) -> None:
        self.model.prefill(tokens, cache, start)
