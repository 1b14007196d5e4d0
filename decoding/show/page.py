"""Page of a run: one self-contained HTML file that replays it round by round.

Text of the model is data, never markup: it is embedded as JSON in which no character can end the script element, and
the page shows it through ``textContent`` only. The page's content security policy allows its scripts and styles, and
no network.
"""

import base64
import hashlib
import json
import re
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from decoding.drafters import Draft
from decoding.policies import Policy
from decoding.rounds import Round
from decoding.run.chooser import Drafting
from decoding.sampling import SamplingParams
from decoding.show.report import sampling_in_words
from decoding.verify import Coupling
from model.clock import now

TEMPLATE = Path(__file__).with_name("page.html")
TOP = 5  # likeliest tokens that are kept
DIGITS = 6  # of a probability on the page: more than a reader compares, in half the bytes


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
        self.sample: dict[str, Any] = {"rounds": [], "finish": "interrupted", "seconds": 0.0}
        self.labels: dict[int, str] = {}
        self.threshold = policy.threshold
        self.details: list[dict[str, Any]] = []
        self.examining = 0.0  # seconds

    def draft(self, tokens: list[int]) -> None:
        """Show a draft that is not verified yet."""
        self._show("draft", tokens, tokens=tokens)

    def observe(self, draft: Draft, logits: Tensor, probs: Tensor, accepted: int, token: Tensor) -> None:
        """Keep the probabilities of the round that ``add`` takes next."""
        began = now(logits.device)
        self.details = examine(draft, logits, probs, accepted, token, self.params)
        self.examining += now(logits.device) - began

    def add(self, round: Round, seconds: float) -> None:
        """Add a round; ``seconds`` is the time of decoding so far, that of ``observe`` included."""
        verdicts = zip(self.details, round.verdicts(), strict=False)
        data = {
            "position": round.position,
            "tokens": [{**detail, "verdict": verdict} for detail, (_, verdict) in verdicts],
            "drafted": len(round.drafted),
            "accepted": min(round.accepted, len(round.emitted)),
            "emitted": len(round.emitted),
            "retracted": len(round.retracted),
            "threshold": self.threshold,
        }
        self.threshold = self.policy.threshold  # for the next round: the policy has observed this one
        self.sample["rounds"].append(data)
        self.sample |= {"finish": round.finish or "interrupted", "seconds": seconds - self.examining}
        lists = [each["draft_top"] + each["target_top"] for each in self.details]  # they include the tokens themselves
        named = [token for top in lists for token, _ in top]
        self._show("round", named, round=data, finish=round.finish, seconds=self.sample["seconds"])

    def _show(self, kind: str, named: Iterable[int], **facts: Any) -> None:
        """Show a part of the given kind, with labels of those ``named`` tokens that have none yet."""
        new = {token: self.label(token) for token in named if token not in self.labels}
        self.labels |= new
        self.show({"kind": kind, "labels": new, **facts})


def examine(
    draft: Draft, logits: Tensor, target_probs: Tensor, accepted: int, token: Tensor, params: SamplingParams
) -> list[dict[str, Any]]:
    """JSON of each drafted token, then of the target's ``token`` (``[]`` int64).

    ``id``  the token
    ``q``  the draft's probability of it; None where nothing was drafted
    ``p``  the target's
    ``draft_top``, ``target_top``  ``(token, probability)`` of the likeliest tokens, best first, and of this token.
    They are those of q and p. In greedy decoding, where q and p are one-hot, they are raw softmax probabilities, but
    q's where the drafter keeps no logits. ``draft_top`` is empty where nothing was drafted.

    ``logits`` and ``target_probs`` p are ``[k + 1, vocab]``. The target's token belongs to row ``accepted``; where a
    drafted token was rejected, the draft has probabilities of that row too. Reads the host.
    """
    drafted, shown = draft.probs, target_probs
    if params.temperature == 0:
        drafted = torch.softmax(torch.cat(list(draft.logits)).float(), dim=-1) if draft.logits else drafted
        shown = torch.softmax(logits.float(), dim=-1)

    def detail(row: int, token: int) -> dict[str, Any]:
        facts = {"id": token, "p": probability(target_probs[row], token), "target_top": likeliest(shown[row], token)}
        if row == len(draft.tokens):
            return {**facts, "q": None, "draft_top": []}
        return {**facts, "q": probability(draft.probs[row], token), "draft_top": likeliest(drafted[row], token)}

    return [*map(detail, range(len(draft.tokens)), draft.tokens.tolist()), detail(accepted, token.item())]


def likeliest(probs: Tensor, token: int) -> list[tuple[int, float]]:
    """The ``TOP`` likeliest tokens of ``[vocab]`` probabilities above 0, best first, then ``token`` if not there."""
    ids = probs.nan_to_num(0.0).topk(min(TOP, len(probs))).indices.tolist()
    top = [(each, value) for each in ids if (value := probability(probs, each))]
    return top if token in dict(top) else [*top, (token, probability(probs, token))]


def probability(probs: Tensor, token: int) -> float:
    """A token's entry of ``[vocab]`` probabilities to ``DIGITS`` significant digits; 0 for NaN."""
    return float(f"{probs[token].nan_to_num(0.0).item():.{DIGITS}g}")


def heading(prompt: str, model: str, drafting: Drafting, params: SamplingParams, coupling: Coupling) -> dict[str, Any]:
    """JSON of the facts about a whole run, with the plan under which the target drafts for itself, if any."""
    greedy, race = params.temperature == 0, coupling.name == "race"
    sampling = sampling_in_words(params, "" if greedy else str(coupling))
    facts = [("Model", model), ("Draft", drafting.name), ("Sampling", sampling)]
    plan = drafting.plan and asdict(drafting.plan)
    return {"prompt": prompt, "facts": facts, "plan": plan, "greedy": greedy, "race": race}


def render_page(heading: dict[str, Any], recordings: Iterable[Recording], live: str = "") -> str:
    """The whole page as HTML; a live page has further elements, which may ask the page's server."""
    data = {**heading, "samples": [], "labels": {}}
    for recording in recordings:
        data["samples"].append(recording.sample)
        data["labels"] |= recording.labels
    template = TEMPLATE.read_text(encoding="utf-8").replace("{{live}}", live)
    policy = _content_security_policy(template) + ("; connect-src 'self'" if live else "")
    return template.replace("{{policy}}", policy).replace("{{data}}", embed(data))


def embed(data: Any) -> str:
    """JSON for a script element: ASCII without <, > and &, so that nothing in it can end the element."""
    text = json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _content_security_policy(page: str) -> str:
    """The policy that allows the page's scripts and styles, by their hashes, and nothing else."""

    def hashes(tag: str) -> str:
        contents = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        digests = [base64.b64encode(hashlib.sha256(content.encode()).digest()).decode() for content in contents]
        return " ".join(f"'sha256-{digest}'" for digest in digests)

    return f"default-src 'none'; script-src {hashes('script')}; style-src {hashes('style')}"
