"""Page of a run: one self-contained HTML file that replays it round by round.

Text of the model is data, never markup: it is embedded as JSON in which no character can end the script element, and
the page shows it through ``textContent`` only. The page's content security policy allows its scripts and styles, and
no network.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from decoding.drafters import Draft
from decoding.policies import Policy
from decoding.rounds import Round
from decoding.run.chooser import Drafting
from decoding.sampling import SamplingParams
from decoding.show.details import Detail, examine
from decoding.show.report import sampling_in_words
from decoding.verify import Coupling
from model import LayerPlan
from model.clock import now
from weights.cli.files import atomic_path, explaining

TEMPLATE = Path(__file__).with_name("page.html")


class Recording:
    """Rounds of one text as the page shows them, with their probabilities, exit thresholds and token labels.

    ``observe`` is the loop's observer (``decoding.speculate.Observer``); ``add`` takes each round after it. ``show``
    gets each part at once, for a page that is open while the text is written. ``seconds`` are those of decoding,
    without the time that ``observe`` took.
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
        """Add a round; ``seconds`` is the time of decoding so far, that of ``observe`` included."""
        data = round_data(round, self.details, self.threshold)
        self.rounds.append(data)
        self.threshold = self.policy.threshold  # for the next round: the policy has observed this one
        self.finish, self.seconds = round.finish or self.finish, seconds - self.examining
        self._show("round", named_tokens(data["tokens"]), round=data, finish=round.finish, seconds=self.seconds)

    def _show(self, kind: str, named: Iterable[int], **facts: Any) -> None:
        """Show a part of the given kind, with labels of those ``named`` tokens that have none yet."""
        new = {token: self.label(token) for token in named if token not in self.labels}
        self.labels |= new
        self.show({"kind": kind, "labels": new, **facts})


@dataclass(frozen=True)
class Heading:
    """Facts about the whole run.

    ``facts`` are pairs of a name and a value; ``plan`` is that under which the target drafts for itself, if any;
    ``race`` names the rule of verification, the race or the ratio rule.
    """

    prompt: str
    facts: Sequence[tuple[str, str]]
    plan: LayerPlan | None
    greedy: bool
    race: bool = False

    @classmethod
    def of(cls, prompt: str, model: str, drafting: Drafting, params: SamplingParams, coupling: Coupling) -> Heading:
        """The heading of texts that a model writes after a prompt."""
        greedy, race = params.temperature == 0, coupling.name == "race"
        sampling = sampling_in_words(params, "" if greedy else str(coupling))
        facts = [("Model", model), ("Draft", drafting.name), ("Sampling", sampling)]
        return cls(prompt, facts, drafting.plan, greedy, race)


def render_page(heading: Heading, recordings: Iterable[Recording]) -> str:
    """The whole page as HTML."""
    samples, labels = [], {}
    for recording in recordings:
        samples.append({"rounds": recording.rounds, "finish": recording.finish, "seconds": recording.seconds})
        labels |= recording.labels
    return fill({**asdict(heading), "samples": samples, "labels": labels})


def fill(data: dict[str, Any], live: str = "") -> str:
    """The template with its data and, for a live page, its further elements, which may ask the page's server."""
    template = TEMPLATE.read_text(encoding="utf-8").replace("{{live}}", live)
    policy = _content_security_policy(template) + ("; connect-src 'self'" if live else "")
    return template.replace("{{policy}}", policy).replace("{{data}}", embed(data))


def write_page(path: Path, heading: Heading, recordings: Iterable[Recording]) -> None:
    """Write the page, atomically. Raises InputError when the file cannot be written."""
    with explaining(f"{path} cannot be written"), atomic_path(path) as temporary:
        temporary.write_text(render_page(heading, recordings), encoding="utf-8")


def embed(data: Any) -> str:
    """JSON for a script element: ASCII without <, > and &, so that nothing in it can end the element."""
    text = json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _content_security_policy(page: str) -> str:
    """The policy that allows the page's scripts and styles, by their hashes, and nothing else."""
    allowed = ["default-src 'none'"]
    for kind, tag in (("script-src", "script"), ("style-src", "style")):
        contents = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        digests = [base64.b64encode(hashlib.sha256(content.encode()).digest()).decode() for content in contents]
        allowed.append(" ".join([kind, *(f"'sha256-{digest}'" for digest in digests)]))
    return "; ".join(allowed)


def round_data(round: Round, details: Sequence[Detail], threshold: float | None) -> dict[str, Any]:
    """JSON of a round, with the exit threshold under which it was drafted."""
    return {
        "position": round.position,
        "tokens": [
            {**asdict(detail), "verdict": verdict}
            for (_, verdict), detail in zip(round.verdicts(), details, strict=False)
        ],
        "drafted": len(round.drafted),
        "accepted": min(round.accepted, len(round.emitted)),
        "emitted": len(round.emitted),
        "retracted": len(round.retracted),
        "threshold": threshold,
    }


def named_tokens(tokens: Iterable[dict[str, Any]]) -> Iterator[int]:
    """Ids of these tokens and of the likeliest beside each: all that the page names."""
    for token in tokens:
        yield token["id"]
        yield from (other for other, _ in [*token["draft_top"], *token["target_top"]])
