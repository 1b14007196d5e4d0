"""The live page: that of ``--html`` with a form, and what it is told while a text is written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from decoding.drafters import Draft, Drafter
from decoding.policies import Policy
from decoding.randomness import Randomness
from decoding.rounds import Round
from decoding.run.chooser import Drafting
from decoding.run.writer import Sample
from decoding.sampling import SamplingParams
from decoding.serve.orders import Defaults, Order
from decoding.show.details import Detail, examine
from decoding.show.labels import Labels
from decoding.show.page import Heading, fill, heading_data, named_tokens, round_data
from decoding.show.report import sampling_in_words
from decoding.text import Text
from model.clock import now

FORM = Path(__file__).with_name("live.html")


def live_page(defaults: Defaults) -> str:
    """The page before anything was asked of it."""
    heading = Heading("", [("Model", defaults.name)], None, greedy=True)
    form = {
        "drafts": defaults.drafts,
        "draft": defaults.draft.kind,
        "temperature": defaults.params.temperature,
        "seed": defaults.seed,
        "max_tokens": defaults.rules.max_new_tokens,
    }
    sample = {"rounds": [], "finish": None, "seconds": 0}
    data = {**heading_data(heading), "samples": [sample], "labels": {}, "form": form}
    return fill(data, FORM.read_text(encoding="utf-8"))


def opening(name: str, order: Order, drafting: Drafting) -> dict[str, Any]:
    """What the page is told when its turn has come: the heading of a run of the model ``name``."""
    drawn = order.params.temperature > 0
    sampling = sampling_in_words(order.params, str(order.coupling) if drawn else "")
    facts = [("Model", name), ("Draft", drafting.name), ("Sampling", sampling)]
    heading = Heading("", facts, drafting.plan, greedy=not drawn, race=order.coupling.name == "race")
    return {"kind": "begin", "columns": [drafting.name, *["plain"] * order.beside], **heading_data(heading)}


class Watch:
    """Shows the page one text as it comes into being: every draft before it is verified, then its round.

    The seconds are those of decoding: what looking took is left out, so that two texts with drafts of different
    lengths can be compared.
    """

    def __init__(
        self,
        show: Callable[[dict[str, Any]], None],
        labels: Labels,
        column: int,
        policy: Policy,
        params: SamplingParams,
        device: torch.device,
    ) -> None:
        self.show, self.labels, self.column = show, labels, column
        self.policy, self.params, self.device = policy, params, device
        self.threshold = policy.threshold
        self.looking = 0.0  # seconds
        self.seen: list[Detail] = []
        self.named: set[int] = set()

    def drafted(self, draft: Draft) -> None:
        """Show a draft that is not verified yet."""
        began = now(self.device)
        if tokens := draft.tokens.tolist():
            self._tell("draft", {*tokens}, tokens=tokens)
        self.looking += now(self.device) - began

    def observe(self, draft: Draft, logits: Tensor, probs: Tensor, accepted: int, token: Tensor) -> None:
        """Note what draft and target thought of each token (see ``decoding.speculate.Observer``)."""
        began = now(self.device)
        self.seen = examine(draft, logits, probs, accepted, token, self.params)
        self.looking += now(self.device) - began

    def add(self, round: Round, seconds: float) -> None:
        """Show a round; ``seconds`` is what decoding has taken so far, looking included."""
        data = round_data(round, self.seen, self.threshold)
        self.threshold = self.policy.threshold  # the policy has learnt from this round already
        self._tell("round", named_tokens(data["tokens"]), round=data, seconds=seconds - self.looking)

    def close(self, sample: Sample) -> None:
        """Show how the text ended."""
        self._tell("written", set(), finish=sample.finish, seconds=sample.seconds - self.looking)

    def _tell(self, kind: str, names: set[int], **facts: Any) -> None:
        new = {token: self.labels(token) for token in names - self.named}
        self.named |= names
        self.show({"kind": kind, "column": self.column, "labels": new, **facts})


class WatchedDrafter:
    """A drafter whose every draft is shown before it is verified."""

    def __init__(self, drafter: Drafter, show: Callable[[Draft], None]) -> None:
        self.drafter, self.show = drafter, show

    def propose(self, text: Text, limit: int, params: SamplingParams, policy: Policy, randomness: Randomness) -> Draft:
        draft = self.drafter.propose(text, limit, params, policy, randomness)
        self.show(draft)
        return draft

    def rollback(self, length: int) -> None:
        self.drafter.rollback(length)
