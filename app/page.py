"""Page of a run: one self-contained HTML file that replays it round by round.

Text of the model is data, never markup: it is embedded as JSON in which no character can end the
script element, and the page shows it through ``textContent`` only. The page's content security
policy allows its scripts and styles, by a random number of the page, and requests to its server, if
any.
"""

import json
import secrets
from collections.abc import Callable, Iterable
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from app.writer import Task
from decoding.drafters import Draft
from decoding.rounds import Round
from decoding.sampling import SamplingParams

TEMPLATE = Path(__file__).with_name("page.html")
TOP = 5  # likeliest tokens that are kept
DIGITS = 6  # of a probability on the page: more than a reader compares, in half the bytes


class Recording:
    """Rounds of one text as the page shows them, with their probabilities.

    ``observe`` is the loop's observer (``decoding.speculate.Observer``), and only keeps the record;
    ``add`` reads it, and takes each round with the seconds of decoding so far.
    """

    def __init__(self, params: SamplingParams, label: Callable[[int], str]) -> None:
        self.params = params
        self.label = label
        self.sample: dict[str, Any] = {"rounds": [], "finish": "interrupted", "seconds": 0.0}
        self.record: tuple[Draft, Tensor, Tensor, int, Tensor]  # of the round that ``add`` takes

    def observe(self, *record: Any) -> None:
        """Keep the record of a round."""
        self.record = record

    @property
    def details(self) -> list[dict[str, Any]]:
        """JSON of each drafted token of the kept record, then of the target's ``token`` (``[]``
        int64).

        ``id``, ``text``  the token and its label
        ``q``  the draft's probability of it; None where nothing was drafted
        ``p``  the target's
        ``draft_top``, ``target_top``  ``(label, probability)`` of the likeliest tokens, best first,
        and of this token. They are those of q and p. In greedy decoding, where q and p are one-hot,
        they are raw softmax probabilities, but q's where the drafter keeps no logits. ``draft_top``
        is empty where nothing was drafted.

        ``logits`` and ``target_probs`` p are ``[k + 1, vocab]``. The target's token belongs to row
        ``accepted``; where a drafted token was rejected, the draft has probabilities of that row
        too. Reads the host.
        """
        draft, logits, target_probs, accepted, token = self.record
        drafted = draft.probs
        shown = target_probs
        if self.params.temperature == 0:
            shown = torch.softmax(logits.float(), dim=-1)
            if draft.logits:
                drafted = torch.softmax(torch.cat(list(draft.logits)).float(), dim=-1)
        count = len(draft.tokens)
        return [
            {
                "id": each,
                "text": self.label(each),
                "p": probability(target_probs[row], each),
                "q": probability(draft.probs[row], each) if row < count else None,
                "target_top": self._top(shown[row], each),
                "draft_top": self._top(drafted[row], each) if row < count else [],
            }
            for row, each in [*enumerate(draft.tokens.tolist()), (accepted, token.item())]
        ]

    def add(self, round: Round, seconds: float) -> dict[str, Any]:
        """Add a round; ``seconds`` is the time of decoding so far. Returns its JSON."""
        verdicts = round.verdicts()
        # where the text ends before the target's own token, that has no verdict
        details = self.details[: len(verdicts)]
        tokens = [
            {**detail, "verdict": verdict}
            for detail, (_, verdict) in zip(details, verdicts, strict=True)
        ]
        data = {
            "position": round.position,
            "drafter": self.record[0].drafter,
            "tokens": tokens,
            "drafted": len(round.drafted),
            "accepted": min(round.accepted, len(round.emitted)),
            "emitted": len(round.emitted),
            "retracted": len(round.retracted),
        }
        self.sample["rounds"].append(data)
        self.sample["finish"] = round.finish or "interrupted"
        self.sample["seconds"] = seconds
        return data

    def _top(self, probs: Tensor, token: int) -> list[tuple[str, float]]:
        """Labels and ``[vocab]`` probabilities of the ``TOP`` likeliest tokens above 0, best first,
        and of token.
        """
        ids = [*probs.nan_to_num(0.0).topk(min(TOP, len(probs))).indices.tolist(), token]
        top = {each: probability(probs, each) for each in ids}
        return [(self.label(each), value) for each, value in top.items() if value or each == token]


def probability(probs: Tensor, token: int) -> float:
    """A token's entry of ``[vocab]`` probabilities to ``DIGITS`` significant digits; 0 for NaN."""
    return float(f"{probs[token].nan_to_num(0.0).item():.{DIGITS}g}")


def heading(prompt: str, model: str, task: Task) -> dict[str, Any]:
    """JSON of the facts about a whole run, of which this is the first text, with the plan of its
    self-drafts, if any.
    """
    params = task.params
    given = [
        f"{field.name.replace('_', '-')} {getattr(params, field.name)}"
        for field in fields(params)
        if getattr(params, field.name) != field.default
    ]
    greedy = params.temperature == 0
    sampling = ", ".join(["greedy", *given] if greedy else [*given, str(task.coupling)])
    plan = task.drafting.plan
    return {
        "prompt": prompt,
        "facts": [("Model", model), ("Draft", task.drafting.name), ("Sampling", sampling)],
        "plan": plan and asdict(plan),
        "greedy": greedy,
        "race": task.coupling.name == "race",
    }


def render_page(heading: dict[str, Any], samples: Iterable[dict[str, Any]], live: str = "") -> str:
    """The whole page as HTML; a live page has further elements."""
    page = TEMPLATE.read_text(encoding="utf-8").replace("{{live}}", live)
    page = page.replace("{{nonce}}", secrets.token_hex(16))
    return page.replace("{{data}}", embed({**heading, "samples": list(samples)}))


def embed(data: Any) -> str:
    """JSON for a script element: ASCII without <, so that nothing in it can end the element."""
    return json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":")).replace(
        "<", "\\u003c"
    )
