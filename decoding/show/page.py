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
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from decoding.drafters import Draft
from decoding.policies import Policy
from decoding.rounds import Round
from decoding.sampling import SamplingParams
from decoding.show.details import Detail, examine
from decoding.show.labels import Labels
from model import InputError, LayerPlan
from weights.cli.files import atomic_path

TEMPLATE = Path(__file__).with_name("page.html")
DIGITS = 6  # of a probability: more than a reader compares, and a file half as large


@dataclass
class Recording:
    """The rounds of one text as they come in, the exit threshold each was drafted under, and the probabilities behind.

    ``observe`` is to be handed to the loop, which calls it before the round is ``add``ed.
    """

    policy: Policy
    params: SamplingParams
    rounds: list[Round] = field(default_factory=list)
    details: list[list[Detail]] = field(default_factory=list)
    thresholds: list[float | None] = field(default_factory=list)
    seconds: float = 0.0

    def __post_init__(self) -> None:
        self.threshold = self.policy.threshold
        self.seen: list[Detail] = []

    def observe(self, draft: Draft, logits: Tensor, probs: Tensor, accepted: int, token: Tensor) -> None:
        """Note what draft and target thought of each token (see ``decoding.speculate.Observer``)."""
        self.seen = examine(draft, logits, probs, accepted, token, self.params)

    def add(self, round: Round, seconds: float) -> None:
        """Take in a round; ``seconds`` is the time that decoding has taken so far."""
        self.rounds.append(round)
        self.details.append(self.seen)
        self.thresholds.append(self.threshold)
        self.threshold = self.policy.threshold  # the policy has learnt from this round already
        self.seconds = seconds


@dataclass(frozen=True)
class Heading:
    """What the page says about the whole run: ``facts`` are pairs of a name and a value."""

    prompt: str
    facts: Sequence[tuple[str, str]]
    plan: LayerPlan | None  # which sublayers draft, and in how many bits; None where no plan of the target drafts
    greedy: bool
    race: bool = False  # which of the two rules of verification decided


def render_page(heading: Heading, recordings: Iterable[Recording], labels: Labels) -> str:
    """The whole page as HTML."""
    samples = [_sample(recording) for recording in recordings]
    shown = [token for sample in samples for round in sample["rounds"] for token in round["tokens"]]
    named = {token: labels(token) for token in sorted(named_tokens(shown))}
    return fill({**heading_data(heading), "samples": samples, "labels": named})


def fill(data: dict[str, Any], live: str = "") -> str:
    """The template with its data; the elements of a ``live`` page may ask the server that it came from for more."""
    template = TEMPLATE.read_text(encoding="utf-8").replace("{{live}}", live)
    policy = _content_security_policy(template) + ("; connect-src 'self'" if live else "")
    return template.replace("{{policy}}", policy).replace("{{data}}", embed(data))


def heading_data(heading: Heading) -> dict[str, Any]:
    """A heading as the page reads it."""
    plan = heading.plan
    bits = plan and {"attention": plan.attention, "mlp": plan.mlp}
    facts = {"prompt": heading.prompt, "facts": heading.facts, "plan": bits}
    return {**facts, "greedy": heading.greedy, "race": heading.race}


def write_page(path: Path, heading: Heading, recordings: Iterable[Recording], labels: Labels) -> None:
    """Write the page, atomically. Raises InputError when the file cannot be written."""
    page = render_page(heading, recordings, labels)
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


def _sample(recording: Recording) -> dict[str, Any]:
    parts = zip(recording.rounds, recording.details, recording.thresholds, strict=True)
    finish = recording.rounds[-1].finish if recording.rounds else None
    rounds = [round_data(*part) for part in parts]
    return {"rounds": rounds, "finish": finish or "interrupted", "seconds": recording.seconds}


def round_data(round: Round, details: Sequence[Detail], threshold: float | None) -> dict[str, Any]:
    """A round as the page reads it, with the exit threshold it was drafted under."""
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


def named_tokens(shown: Iterable[dict[str, Any]]) -> set[int]:
    """Every token that the page names in showing these: themselves, and the likeliest beside them."""
    shown = list(shown)
    return {token["id"] for token in shown} | {
        other for token in shown for side in ("draftTop", "targetTop") for other, _ in token[side]
    }
