"""The drafter of ``--draft auto`` as the laws use it: it learns from few rounds."""

from collections.abc import Callable
from typing import Any

from decoding.auto import Auto, Costs, Estimates, Rates
from decoding.drafters import Drafter, PromptLookup
from model.cache import KVCache


class QuickRates(Rates):
    """Rates with a short memory, which few rounds change."""

    MEMORY = 0.5


def auto(
    new_drafter: Callable[[Any, KVCache], Drafter],
    model: Any,
    cache: KVCache,
    *,
    step: float = 0.45,
    by_confidence: bool,
) -> Auto:
    """Between a drafter of the model's and prompt lookup, with credit for any draft."""
    drafters = {"model": new_drafter(model, cache), "lookup": PromptLookup()}
    kinds = ("model", *(f"lookup {quality}" for quality in range(4)))
    estimates = Estimates({kind: QuickRates(0.6) for kind in kinds}, credit=4.0)
    costs = Costs({"model": step}, 0.1)
    return Auto(drafters, lambda length: costs, estimates, by_confidence=by_confidence)
