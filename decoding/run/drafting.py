"""Drafting: a drafter with its policy, and the one of plain decoding."""

from collections.abc import Callable
from dataclasses import dataclass

from decoding.drafters import Drafter, ModelDrafter, NoDraft
from decoding.policies import FixedLength, Policy
from decoding.run.plan_file import DraftPlan
from model import Decoder, KVCache, LayerPlan

GAMMA = 4  # tokens drafted per round by default


@dataclass(frozen=True)
class Drafting:
    """A drafter and its policy.

    ``name`` is for people; ``new_drafter`` takes the target's cache, which the drafter may share; ``new_policy`` makes
    a fresh policy for a text. ``model`` is the model that drafts: the target, under the ``chosen`` plan, or a draft
    model. Both are None where no model drafts.
    """

    name: str
    new_drafter: Callable[[KVCache], Drafter]
    new_policy: Callable[[], Policy] = lambda: FixedLength(GAMMA)
    model: Decoder | None = None
    chosen: DraftPlan | None = None

    @property
    def plan(self) -> LayerPlan | None:
        """The layer plan under which the target drafts for itself; None where it does not."""
        return self.chosen and self.chosen.plan


def plain(model: Decoder, name: str = "plain") -> Drafting:
    """Plain decoding: an empty draft."""
    return Drafting(name, lambda cache: NoDraft(model.vocab_size, model.device), lambda: FixedLength(0))


def make_steps(model: Decoder, cache: KVCache, plan: LayerPlan | None = None) -> None:
    """Make the static steps of a model that has them, before any text is timed."""
    if step := getattr(model, "step_of", None):
        step(cache, plan or LayerPlan.full(model.num_layers))


def model_drafter(model: Decoder, cache: KVCache, plan: LayerPlan | None = None) -> ModelDrafter:
    """A drafter with its steps made."""
    make_steps(model, cache, plan)
    return ModelDrafter(model, cache, plan)
