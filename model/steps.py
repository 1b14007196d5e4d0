"""Interface of a model's steps: what the readable and the faster ones can do."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from model.cache import KVCache
from model.plan import LayerPlan

DESCRIPTION = "{} texts of {} layers with {} key heads of size {}, in {}"  # of a cache


class Abilities(NamedTuple):
    """Abilities of a model's steps on its device.

    ``low_bits``: numbers of bits in which a draft takes less time; elsewhere low bits are only a
    reference. ``shares_steps``: whether ``together`` computes several calls in one step.
    ``why_rows_vary``: the reason why the bits of a position's logits depend on the other rows of
    the step; None if they do not.
    """

    low_bits: tuple[int, ...] = ()
    shares_steps: bool = False
    why_rows_vary: str | None = "the readable blocks round a row differently alone and among others"


class Steps:
    """Base of every model: what it offers beyond its logits. A model has a ``device``, and for
    ``check`` a ``dtype`` and a ``config``.

    The members here are those of the readable blocks; the classes of ``model.fast`` have others.
    ``trouble`` says why the fast steps were given up for the readable blocks; None while they run.
    """

    abilities = Abilities()
    trouble: str | None = None

    def prepare(self, plan: LayerPlan) -> None:
        """Make the low-bit copies of a plan now, not while a text is timed."""
        self(torch.zeros(1, 1, dtype=torch.int64, device=self.device), plan=plan)

    def make_step(self, cache: KVCache, plan: LayerPlan | None = None) -> None:
        """Make the static step of a plan on this cache now, not while a text is timed; readable
        blocks have none.
        """

    def check(self, plan: LayerPlan, tokens: Tensor, cache: KVCache, start: int) -> None:
        """Raise ValueError unless tokens ``[batch, T]`` at ``start`` fit the cache.

        Every model asks this before it writes: so a call that is refused has changed nothing.
        """
        if tokens.ndim != 2:
            raise ValueError(f"tokens are [batch, T], found {list(tokens.shape)}")
        entries = cache.keys[0]
        found = (len(entries), len(cache.keys), entries.shape[1], entries.shape[3], entries.dtype)
        wanted = (
            len(tokens),
            self.config.num_layers,
            self.config.num_kv_heads,  # in a split model those of the rank
            self.config.head_dim,
            self.dtype,
        )
        if found != wanted:
            raise ValueError(
                f"a cache for {DESCRIPTION.format(*found)} does not fit"
                f" {DESCRIPTION.format(*wanted)}: take one of the model's new_cache"
            )
        cache.check(plan.attention_layers, start, tokens.shape[1])

    def together(
        self, calls: Sequence[tuple[Tensor, KVCache, int]], plan: LayerPlan | None = None
    ) -> list[Tensor]:
        """Return the logits of calls ``(tokens, cache, start)`` under one plan, in as few steps as
        possible.

        Each call has its own cache.
        """
        return [self(*call, plan) for call in calls]
