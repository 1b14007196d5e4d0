"""Expected speed-up of drafts over plain decoding, from their acceptance and their costs, with the
best draft length.

Drafts are accepted in bursts, so that a mean acceptance rate predicts the wrong speed. Instead a
dynamic programme follows the rounds of the loop along the texts. Token by token it computes the
probability that a round begins here, and that a round is here with d tokens drafted. Rounds are
counted by the number of tokens they draft.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from search.acceptance import Acceptance
from search.costs import CostTable
from weights.memory import LONGEST_DRAFT

GAMMAS = tuple(range(1, LONGEST_DRAFT + 1))
TINY = 1e-12  # in place of a sum of 0, which is divided by


@dataclass(frozen=True)
class Prediction:
    """Expected gain of drafts of up to ``gamma`` tokens that end early below confidence
    ``threshold`` (0: never).

    ``speedup`` is over plain decoding. ``acceptance_rate`` is the accepted share of all drafted
    tokens, ``kept_share`` that of the drafted tokens up to the first rejected one: α in the
    formulas.
    """

    speedup: float
    gamma: int
    threshold: float
    acceptance_rate: float
    kept_share: float


@dataclass(frozen=True)
class Rounds:
    """Expected numbers over all texts for each threshold and draft length: arrays ``[thresholds,
    gammas, depths]``.

    ``drafted[..., k]`` rounds that draft k tokens; ``accepted[..., d]`` and ``rejected[..., d]``
    drafts number d + 1 of their round that the target accepts or is the first to reject. Depths run
    from 0 to the largest gamma.
    """

    drafted: np.ndarray
    accepted: np.ndarray
    rejected: np.ndarray


def expected_rounds(
    acceptance: Acceptance, gammas: Sequence[int], thresholds: Sequence[float]
) -> Rounds:
    """Expected numbers of the loop's rounds along the texts, which end by their last token or the
    budget.

    Exact for drafts of full length, up to the depths of ``acceptance``. With a threshold, a draft
    with a rejected token is taken to go on as long as a draft along the text would, since its
    tokens are not known.

    The programme goes token by token through all texts at once. Its state are probabilities:
    ``begin``, that a round begins at this token, and by the number d of tokens drafted so far
    ``on_text[d]``, that a round is here with all of them accepted, and ``off_text[d]``, that one
    was rejected and the draft goes on beyond it, at a cost without a gain. Where a draft of d
    tokens ends, ``drafted[d]`` counts it. The next round begins after the token that the target
    added: at the token after a rejected one (which the target replaced by the text's), after the
    bonus token of a full draft, and, where a draft stops behind an unsure token, two tokens on
    (``begin_next``: a bonus comes between). For γ = 2 and a text of 3 tokens kept with
    probabilities a, b, c: rounds begin at the first token surely, at the second with probability 1
    - a, at the third with a·(1 - b) + (1 - a)·(1 - b).
    """
    longest = max(gammas)
    accept, unsure, sure_to_stop = _tables(acceptance, longest, thresholds)
    lengths, limits = (
        np.asarray(each)[:, None, None] for each in (acceptance.lengths, acceptance.limits)
    )
    depth = np.arange(longest + 1)[:, None, None, None]
    full = depth == np.array(gammas)
    # depth, text, threshold, draft length
    shape = (longest + 1, len(lengths), len(thresholds), len(gammas))
    on_text, off_text, drafted, accepted, rejected = np.zeros((5, *shape))
    begin, begin_next = np.ones(shape[1:]), np.zeros(shape[1:])
    for at in range(lengths.max() + longest):
        written, row = at < lengths, min(at, lengths.max() - 1)
        on_text[0] = begin * written
        # A draft beyond the end of a text is off it.
        on_text, off_text = on_text * written, off_text + on_text * ~written
        closing = full | (at >= limits - 1)
        drafted += (on_text + off_text) * closing
        bonus = (on_text * closing).sum(0)
        on_text, off_text = on_text * ~closing, off_text * ~closing
        kept, refused = (
            on_text * accept[..., row, :, None],
            on_text * (1 - accept[..., row, :, None]),
        )
        stopped = kept * unsure[..., row, :, None]
        leaving = refused + off_text
        halted = leaving * sure_to_stop[..., row, :, None] * written
        drafted[1:] += (stopped + halted)[:-1]
        accepted += kept
        rejected += refused
        begin, begin_next = bonus + refused.sum(0) + begin_next, stopped.sum(0)
        deeper = kept - stopped, leaving - halted  # one drafted token later
        on_text, off_text = (
            np.pad(state[:-1], ((1, 0), (0, 0), (0, 0), (0, 0))) for state in deeper
        )
    return Rounds(*(np.moveaxis(each.sum(1), 0, -1) for each in (drafted, accepted, rejected)))


def _tables(
    acceptance: Acceptance, longest: int, thresholds: Sequence[float]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Three tables ``[depth, text, token, threshold]``: probabilities of acceptance, of the draft
    being unsure of the text's token, and of its being unsure of a token that it draws."""
    depths = np.minimum(np.arange(longest + 1), acceptance.accept.shape[1] - 1)

    def table(values: Tensor) -> np.ndarray:
        return np.asarray(values)[:, depths].swapaxes(0, 1)[..., None]

    levels = np.array(thresholds)
    unsure = (table(acceptance.confidence) < levels).astype(float)
    # Only the likeliest token is looked at: exact in greedy decoding, and where no two tokens reach
    # the threshold.
    sure_to_stop = 1 - table(acceptance.share) * (table(acceptance.likeliest) >= levels)
    sure_to_stop[..., levels == 0] = 0
    return table(acceptance.accept), unsure, sure_to_stop


def predict(
    acceptance: Acceptance,
    costs: CostTable,
    gammas: Sequence[int] = GAMMAS,
    thresholds: Sequence[float] = (0.0,),
    *,
    confidence: float = 0.0,
) -> Prediction:
    """The largest expected speed-up, tokens over the cost of all rounds, over all draft lengths and
    thresholds.

    In plain rounds, a round that drafts k tokens costs k · costs.draft + costs.verify[k], and under
    a threshold k · ``confidence`` more, to read the confidence of each token. Plain decoding costs
    1 per token. A tie goes to the smaller threshold, then the shorter draft. A speed-up below 1
    means that no draft pays.
    """
    rounds = expected_rounds(acceptance, gammas, thresholds)
    tokens = int(acceptance.lengths.sum())
    lengths = np.arange(max(gammas) + 1)
    step = costs.draft + confidence * (np.array(thresholds) > 0)[:, None, None]
    round_costs = lengths * step + np.array(costs.verify)[lengths]
    speedups = tokens / (rounds.drafted * round_costs).sum(-1)
    best = np.unravel_index(np.argmax(speedups), speedups.shape)
    gamma = gammas[best[1]]
    drafted, accepted, rejected = rounds.drafted[best], rounds.accepted[best], rounds.rejected[best]
    return Prediction(
        speedup=float(speedups[best]),
        gamma=gamma,
        threshold=thresholds[best[0]],
        acceptance_rate=float(accepted.sum() / max(TINY, (drafted * lengths).sum())),
        kept_share=float(accepted.sum() / max(TINY, (accepted + rejected).sum())),
    )
