"""Acceptance and costs -> the speed-up to expect, with the draft length and exit threshold that make it largest.

Drafts are accepted in bursts, so a mean acceptance rate predicts the wrong speed. Instead the rounds of the loop are
walked along the texts: a dynamic programme carries, token by token, the probability that a round begins here, or
that a round is here with d tokens drafted. What is counted is how many rounds drafted k tokens; what a round costs
is multiplied in afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from decoding.run.costs import SublayerCosts
from model import LayerPlan
from search.acceptance import Acceptance, Text

GAMMAS = tuple(range(1, 9))
THRESHOLDS = (0.0, 0.3, 0.45, 0.6, 0.75, 0.9)  # 0: draft the full length always


@dataclass(frozen=True)
class Prediction:
    """What a plan's drafts bring with draft length ``gamma`` and exit threshold ``threshold`` (0: none).

    ``speedup`` is over plain decoding; ``acceptance_rate`` the accepted share of drafted tokens, ``kept_share``
    that of the drafted tokens which verification comes to: what formulas call α.
    """

    speedup: float
    gamma: int
    threshold: float
    acceptance_rate: float
    kept_share: float
    tokens_per_round: float


@dataclass(frozen=True)
class Rounds:
    """Expected numbers over all texts, for each threshold and draft length: arrays ``[thresholds, gammas, ...]``.

    ``drafted[..., k]`` rounds that draft k tokens; ``rejections`` rounds that end with a rejection; ``accepted``
    drafted tokens of the texts that are accepted.
    """

    drafted: np.ndarray
    rejections: np.ndarray
    accepted: np.ndarray


def expected_rounds(
    acceptance: Acceptance, texts: Sequence[Text], gammas: Sequence[int], thresholds: Sequence[float]
) -> Rounds:
    """Walk the loop's rounds along the texts, which end as the loop ends them: by their last token or the budget.

    Exact for drafts of full length. With a threshold, a draft that has left the text (its token was rejected) goes
    on as long as a draft of the text itself would from there: what it would have drafted is not known.

    The walk goes token by token through all texts at once and carries probabilities: ``begin``, that a round begins
    at this token, and by the number d of tokens drafted so far ``live[d]``, that a round is here with all of them
    accepted, and ``astray[d]``, that one was rejected and the draft goes on beyond it, for nothing but its cost.
    Where a draft of d tokens ends, ``drafted[d]`` counts it. The next round begins after the token that the target
    added: at the token after a rejected one (which the target replaced by the text's), after the bonus token of a
    full draft, and, where a draft stops behind an unsure token, two tokens on (``soon``: the bonus comes between).
    For γ = 2 and a text of 3 tokens kept with probabilities a, b, c: rounds begin at the first token surely, at the
    second with probability 1 - a, at the third with a·(1 - b) + (1 - a)·(1 - b).
    """
    longest = max(gammas)
    accept, unsure, sure_to_stop = _tables(acceptance, longest, thresholds)
    lengths = np.array([len(text.written) for text in texts])[:, None, None]
    limits = lengths + np.array([text.room for text in texts])[:, None, None]
    depth = np.arange(longest + 1)[:, None, None, None]
    full = depth == np.array(gammas)
    shape = (longest + 1, len(texts), len(thresholds), len(gammas))  # depth, text, threshold, draft length
    live, astray, drafted = np.zeros(shape), np.zeros(shape), np.zeros(shape)
    begin, soon, rejections, accepted = np.ones(shape[1:]), *np.zeros((3, *shape[1:]))
    for at in range(lengths.max() + longest):
        written, row = at < lengths, min(at, lengths.max() - 1)
        live[0] = begin * written
        # A draft that runs over the end of a text has left it.
        live, astray = live * written, astray + live * ~written
        closing = full | (at >= limits - 1)
        drafted += (live + astray) * closing
        bonus = (live * closing).sum(0)
        live, astray = live * ~closing, astray * ~closing
        kept, lost = live * accept[..., row, :, None], live * (1 - accept[..., row, :, None])
        stopped = kept * unsure[..., row, :, None]
        wandering = lost + astray
        halted = wandering * sure_to_stop[..., row, :, None] * written
        drafted[1:] += (stopped + halted)[:-1]
        rejections += lost.sum(0)
        accepted += kept.sum(0)
        begin, soon = bonus + lost.sum(0) + soon, stopped.sum(0)
        live, astray = _deeper(kept - stopped), _deeper(wandering - halted)
    return Rounds(np.moveaxis(drafted.sum(1), 0, -1), rejections.sum(0), accepted.sum(0))


def _tables(
    acceptance: Acceptance, longest: int, thresholds: Sequence[float]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """By ``[depth, text, token, threshold]``: is the draft accepted; is it unsure of the text's token, of its own."""
    depths = np.minimum(np.arange(longest + 1), acceptance.accept.shape[1] - 1)

    def table(values: object) -> np.ndarray:
        return np.asarray(values)[:, depths].swapaxes(0, 1)[..., None]

    limits = np.array(thresholds)
    unsure = (table(acceptance.confidence) < limits).astype(float)
    # Only the likeliest token is looked at: exact in greedy decoding, and where no two tokens reach the threshold.
    sure_to_stop = 1 - table(acceptance.share) * (table(acceptance.likeliest) >= limits)
    sure_to_stop[..., limits == 0] = 0
    return table(acceptance.accept), unsure, sure_to_stop


def _deeper(state: np.ndarray) -> np.ndarray:
    """The same probabilities one drafted token later."""
    return np.concatenate((np.zeros_like(state[:1]), state[:-1]))


def predict(
    acceptance: Acceptance,
    texts: Sequence[Text],
    plan: LayerPlan,
    costs: SublayerCosts,
    gammas: Sequence[int] = GAMMAS,
    thresholds: Sequence[float] = THRESHOLDS,
) -> Prediction:
    """The best of all draft lengths and thresholds. A tie goes to the smaller threshold, then the shorter draft."""
    rounds = expected_rounds(acceptance, texts, gammas, thresholds)
    tokens = sum(len(text.written) for text in texts)
    lengths = np.arange(max(gammas) + 1)
    reads = np.array(thresholds)[:, None] > 0
    step = costs.draft(plan) + reads * costs.confidence
    round_costs = lengths * step[..., None] + np.array(costs.verify)[lengths] + costs.overhead
    speedups = tokens * (1 + costs.overhead) / (rounds.drafted * round_costs).sum(-1)
    best = np.unravel_index(np.argmax(speedups), speedups.shape)
    count, drafted = rounds.drafted[best].sum(), (rounds.drafted[best] * lengths).sum()
    accepted = rounds.accepted[best]
    looked_at = accepted + rounds.rejections[best]
    return Prediction(
        speedup=float(speedups[best]),
        gamma=gammas[best[1]],
        threshold=thresholds[best[0]],
        acceptance_rate=float(accepted / drafted) if drafted else 0.0,
        kept_share=float(accepted / looked_at) if looked_at else 0.0,
        tokens_per_round=float(tokens / count),
    )
