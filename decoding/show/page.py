"""The run as a page: one self-contained file in which a reader replays it round by round.

What the model wrote is data, never markup: it is embedded as JSON in which no character can end the script
element, and the page shows it through ``textContent`` only. The page's own policy allows nothing but its own
script and style, and no network.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from decoding.drafters import Draft
from decoding.policies import Policy
from decoding.rounds import Round
from decoding.sampling import SamplingParams
from decoding.show.details import Detail, examine
from model import InputError, LayerPlan
from model.clock import now
from weights.cli.files import atomic_path

TEMPLATE = Path(__file__).with_name("page.html")
DIGITS = 6  # of a probability: more than a reader compares, and a file half as large


class Recording:
    """Rounds of one text as the page shows them, with their probabilities, exit thresholds and token labels.

    ``observe`` is the loop's observer (``decoding.speculate.Observer``); ``add`` takes each round after it. ``show``
    gets every new part at once, for a page that is open while the text is written. ``seconds`` are those of decoding:
    the time that examining took is left out.
    """

    def __init__(
        self,
        policy: Policy,
        params: SamplingParams,
        label: Callable[[int], str],
        show: Callable[[dict[str, Any]], None] = lambda part: None,
    ) -> None:
        self.policy, self.params, self.label, self.show = policy, params, label, show
        self.rounds: list[dict[str, Any]] = []
        self.labels: dict[int, str] = {}
        self.finish, self.seconds = "interrupted", 0.0
        self.threshold = policy.threshold
        self.details: list[Detail] = []
        self.examining = 0.0  # seconds

    def draft(self, draft: Draft) -> None:
        """Show a draft that is not verified yet."""
        began = now(draft.tokens.device)
        if tokens := draft.tokens.tolist():
            self._show("draft", tokens, tokens=tokens)
        self.examining += now(draft.tokens.device) - began

    def observe(self, draft: Draft, logits: Tensor, probs: Tensor, accepted: int, token: Tensor) -> None:
        """Keep the probabilities of the round that ``add`` takes next."""
        began = now(logits.device)
        self.details = examine(draft, logits, probs, accepted, token, self.params)
        self.examining += now(logits.device) - began

    def add(self, round: Round, seconds: float) -> None:
        """Add a round; ``seconds`` is the time that decoding has taken so far, examining included."""
        data = round_data(round, self.details, self.threshold)
        self.rounds.append(data)
        self.threshold = self.policy.threshold  # the policy has learnt from this round already
        self.finish, self.seconds = round.finish or self.finish, seconds - self.examining
        self._show("round", named_tokens(data["tokens"]), round=data, finish=round.finish, seconds=self.seconds)

    def _show(self, kind: str, named: Iterable[int], **facts: Any) -> None:
        """Show a part of the given kind, with the labels of the tokens named there that had none."""
        new = {token: self.label(token) for token in named if token not in self.labels}
        self.labels |= new
        self.show({"kind": kind, "labels": new, **facts})


@dataclass(frozen=True)
class Heading:
    """What the page says about the whole run: ``facts`` are pairs of a name and a value."""

    prompt: str
    facts: Sequence[tuple[str, str]]
    plan: LayerPlan | None  # which sublayers draft, and in how many bits; None where no plan of the target drafts
    greedy: bool
    race: bool = False  # which of the two rules of verification decided


def render_page(heading: Heading, recordings: Iterable[Recording]) -> str:
    """The whole page as HTML."""
    samples, labels = [], {}
    for recording in recordings:
        samples.append({"rounds": recording.rounds, "finish": recording.finish, "seconds": recording.seconds})
        labels |= recording.labels
    return fill({**heading_data(heading), "samples": samples, "labels": labels})


def fill(data: dict[str, Any], live: str = "") -> str:
    """The template with its data; the elements of a ``live`` page may ask the server that it came from for more."""
    template = TEMPLATE.read_text(encoding="utf-8").replace("{{live}}", live)
    policy = _content_security_policy(template) + ("; connect-src 'self'" if live else "")
    return template.replace("{{policy}}", policy).replace("{{data}}", embed(data))


def heading_data(heading: Heading) -> dict[str, Any]:
    """JSON of a heading."""
    plan = heading.plan
    bits = plan and {"attention": plan.attention, "mlp": plan.mlp}
    facts = {"prompt": heading.prompt, "facts": heading.facts, "plan": bits}
    return {**facts, "greedy": heading.greedy, "race": heading.race}


def write_page(path: Path, heading: Heading, recordings: Iterable[Recording]) -> None:
    """Write the page, atomically. Raises InputError when the file cannot be written."""
    page = render_page(heading, recordings)
    try:
        with atomic_path(path) as temporary:
            temporary.write_text(page, encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror}") from None


def embed(data: Any) -> str:
    """JSON that may stand inside a script element: ASCII without <, > and &, so nothing in it can end the element."""
    text = json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _content_security_policy(page: str) -> str:
    """Allows the page's own scripts and styles by their hashes, and nothing else."""
    allowed = ["default-src 'none'"]
    for kind, tag in (("script-src", "script"), ("style-src", "style")):
        contents = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        digests = [base64.b64encode(hashlib.sha256(content.encode()).digest()).decode() for content in contents]
        allowed.append(" ".join([kind, *(f"'sha256-{digest}'" for digest in digests)]))
    return "; ".join(allowed)


def round_data(round: Round, details: Sequence[Detail], threshold: float | None) -> dict[str, Any]:
    """JSON of a round, with the exit threshold it was drafted under."""
    return {
        "position": round.position,
        "tokens": [_token(*pair, detail) for pair, detail in zip(round.verdicts(), details, strict=False)],
        "drafted": len(round.drafted),
        "accepted": min(round.accepted, len(round.emitted)),
        "emitted": len(round.emitted),
        "retracted": len(round.retracted),
        "threshold": threshold,
    }


def _token(token: int, verdict: str, detail: Detail) -> dict[str, Any]:
    return {
        "id": token,
        "verdict": verdict,
        "q": None if detail.draft_prob is None else _short(detail.draft_prob),
        "p": _short(detail.target_prob),
        "draftTop": [(other, _short(prob)) for other, prob in detail.draft_top],
        "targetTop": [(other, _short(prob)) for other, prob in detail.target_top],
    }


def _short(probability: float) -> float:
    return float(f"{probability:.{DIGITS}g}")


def named_tokens(tokens: Iterable[dict[str, Any]]) -> Iterator[int]:
    """Ids of every token that the page names in showing these: their own, and the likeliest beside them."""
    for token in tokens:
        yield token["id"]
        yield from (other for other, _ in [*token["draftTop"], *token["targetTop"]])
