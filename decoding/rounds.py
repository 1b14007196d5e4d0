"""Record of one round of the loop, and statistics over such records.

Knows nothing of models: a round is numbers.
"""

from collections import Counter
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Round:
    """Record of one draft, its verification, and the change of the text.

    ``position``  tokens in the text (prompt included) before the round
    ``drafted``   the draft's tokens
    ``accepted``  the number of them that the target accepted
    ``emitted``   tokens appended to the text: the accepted ones and the residual or bonus token
                  after them, if any can follow, up to the first that ended the text or completed a
                  banned word
    ``retracted`` the tokens then removed from the end of the text, because of a banned word
    ``finish``    the reason why the text ended with this round: "eos", "stop" or "length"; None
                  while it continues
    ``target_confidence``: the target's raw softmax probability (temperature 1, unfiltered) of the
    residual or bonus token; None unless the policy reads it.
    """

    position: int
    drafted: list[int]
    accepted: int
    emitted: list[int]
    retracted: list[int] = field(default_factory=list)
    finish: str | None = None
    target_confidence: float | None = None

    def verdicts(self) -> list[tuple[int, str]]:
        """Return the tokens of the round with their verdicts, in order of appearance.

        "accepted"; "rejected": the first drafted token that the target did not accept; "discarded":
        drafted after a rejected token or after the end of the text; "own": the target's residual or
        bonus token.
        """
        accepted = min(self.accepted, len(self.emitted))
        verdicts = ["accepted" if at < accepted else "discarded" for at in range(len(self.drafted))]
        goes_on = len(self.emitted) > self.accepted or not (self.finish or self.retracted)
        if goes_on and self.accepted < len(self.drafted):
            verdicts[self.accepted] = "rejected"
        own = [(token, "own") for token in self.emitted[accepted:]]
        return [*zip(self.drafted, verdicts, strict=True), *own]


@dataclass
class Statistics:
    """Sums over rounds. Retracted tokens do not count as output, nor do accepted ones after the end
    of the text.

    ``accepted`` measures the draft, so it includes tokens that a banned word retracts afterwards.
    """

    rounds: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    # [n]: the number of rounds that accepted n tokens of their draft
    histogram: list[int] = field(default_factory=list)
    # rounds that drafted a token at this position of the draft, counted from 0
    drafts_at: Counter[int] = field(default_factory=Counter)

    def add(self, round: Round) -> None:
        self.rounds += 1
        self.tokens += len(round.emitted) - len(round.retracted)
        self.drafted += len(round.drafted)
        accepted = min(round.accepted, len(round.emitted))
        self.accepted += accepted
        if round.drafted:
            self.histogram += [0] * (accepted + 1 - len(self.histogram))
            self.histogram[accepted] += 1
        self.drafts_at.update(range(len(round.drafted)))

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted share of the drafted tokens; None when nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def acceptance_by_position(self) -> list[float]:
        """Accepted share of the tokens drafted at each position of a draft: a token counts as
        rejected where one before it is.
        """
        return [
            sum(self.histogram[at + 1 :]) / self.drafts_at[at] for at in range(len(self.drafts_at))
        ]

    @property
    def tokens_per_round(self) -> float:
        return self.tokens / self.rounds if self.rounds else 0.0


def expected_speedup(rate: float, length: int, cost: float, verification: float) -> float:
    """Return the expected speed-up over plain decoding of rounds that draft ``length`` tokens, each
    accepted with probability α, the ``rate``, if those before it were (arXiv 2211.17192).

    A round writes (1 - α^(γ+1)) / (1 - α) expected tokens (equation 1). Its cost is γ·c + v, with
    draft steps of ``cost`` c and a ``verification`` of cost v, both in plain rounds (theorem 3.8).

    For α = 0.8 and γ = 4 the tokens are 1 + 0.8 + 0.64 + 0.512 + 0.4096 = 3.36. For c = 0.2 and
    v = 1.2 the speed-up is 3.36 / 2 = 1.68.
    """
    tokens = sum(rate**accepted for accepted in range(length + 1))
    return tokens / (length * cost + verification)
