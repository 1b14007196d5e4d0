"""The drafter of ``--draft auto`` as the laws use it: it learns from few rounds."""

from collections.abc import Callable
from typing import Any

from decoding.auto import Auto, Costs, Estimates, Rates
from decoding.drafters import Drafter, PromptLookup
from model.cache import KVCache


class QuickRates(Rates):
    """Rates with a short memory, which few rounds change."""

    MEMORY = 0.5


def quick(
    drafters: dict[str, Drafter], *, step: float = 0.45, row: float = 0.1, **more: Any
) -> Auto:
    """Every draft step has one cost."""
    kinds = ("model", *(f"lookup {quality}" for quality in range(4)))
    estimates = Estimates({kind: QuickRates(0.6) for kind in kinds})
    return Auto(drafters, lambda length: Costs({"model": step}, row), estimates, **more)


def auto(
    new_drafter: Callable[[Any, KVCache], Drafter], model: Any, cache: KVCache, **more: Any
) -> Auto:
    """Between a drafter of the model's and prompt lookup."""
    lookup = PromptLookup()
    return quick({"model": new_drafter(model, cache), "lookup": lookup}, **more)
