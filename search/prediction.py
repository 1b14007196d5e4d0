"""Expected speed-up of drafts over plain decoding, from their acceptance and their costs, with the
best draft length; and the picture of all predictions of a search.

Drafts are accepted in bursts, so that a mean acceptance rate predicts the wrong speed. Of a text
whose draft is right ten times and then wrong ten times, half is accepted; but rounds in its first
half gain all they can, and rounds in its second nothing. So a dynamic programme follows the rounds
of the loop along the texts:

1. Token by token it computes the probability that a round begins here, and that a round is here
   with d tokens drafted (``expected_rounds``).
2. It counts the rounds by the number of tokens that they draft.
3. Rounds times their costs are the time of the texts, and plain decoding's time over it is the
   speed-up (``predict``).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from matplotlib.figure import Figure
from torch import Tensor

from app.picture import INK, MUTED, RED, SCALE
from app.plan_file import LONGEST_DRAFT
from model import FULL, LOW_BITS, LayerPlan
from search.acceptance import Acceptance, Calibration
from search.costs import CostTable, SublayerCosts, best_speedup

GAMMAS = tuple(range(1, LONGEST_DRAFT + 1))
THRESHOLDS = (0.0, 0.3, 0.45, 0.6, 0.75, 0.9)  # confidence below which a draft ends; 0: never
LEVELS = (0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0)  # speed-ups that a line joins


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


def expected_rounds(
    acceptance: Acceptance, gammas: Sequence[int], thresholds: Sequence[float]
) -> tuple[np.ndarray, ...]:
    """Expected numbers of the loop's rounds along the texts, and of their accepted and rejected
    tokens, for each threshold and draft length.

    Three arrays ``[thresholds, gammas, depths]``, whose depths run from 0 to the largest gamma:

    ``rounds[..., k]``    rounds that draft k tokens
    ``accepted[..., d]``  accepted tokens among those drafted as number d + 1 of their round
    ``rejected[..., d]``  tokens likewise that are the first rejected ones of their round

    A text ends by its last token or the budget. The numbers are exact for drafts of full length, up
    to the depths of ``acceptance``. With a threshold, a draft with a rejected token is taken to go
    on as long as a draft along the text would, since its tokens are not known.

    The programme goes token by token through all texts at once. Its state consists of these
    probabilities:

    ``begin``        a round begins at this token
    ``begin_next``   a round begins at the next token, after a draft that stopped unsure and the
                     bonus token after it
    ``on_text[d]``   a round is here with d tokens drafted, all of them accepted
    ``off_text[d]``  a round is here with d tokens drafted, one of them rejected: it drafts on
                     without a gain

    At each token:

    1. A draft of full length, or one at the last token of the budget, ends and is counted. Where
       all of it was accepted, this token is its bonus, and a round begins after it.
    2. Other drafts draft this token, which is kept or refused. Where it is refused the target puts
       the text's token in its place, and a round begins after it.
    3. Under a threshold, a draft that is unsure of the token ends after it and is counted.

    For γ = 2 and 3 tokens kept with probabilities a, b, c: rounds begin at the first token surely,
    at the second with probability 1 - a, at the third with a·(1 - b) + (1 - a)·(1 - b).
    """
    longest = max(gammas)
    # [depth, text, token, threshold]
    accept, unsure, unsure_of_own = probability_tables(acceptance, longest, thresholds)
    # [text, threshold, draft length]
    lengths = acceptance.lengths.numpy()[:, None, None]
    limits = acceptance.limits.numpy()[:, None, None]
    # [depth, text, threshold, draft length]
    has_full_length = np.arange(longest + 1)[:, None, None, None] == np.array(gammas)
    shape = (longest + 1, len(lengths), len(thresholds), len(gammas))
    on_text, off_text, rounds, accepted, rejected = np.zeros((5, *shape))
    # [text, threshold, draft length]
    begin = np.ones(shape[1:])
    begin_next = np.zeros(shape[1:])
    for token in range(lengths.max() + longest):
        is_written = token < lengths
        # Index of this token, or the last one, in a table: gives [depth, text, threshold, 1].
        at_token = (..., min(token, lengths.max() - 1), slice(None), None)
        on_text[0] = begin * is_written
        # A draft beyond the end of a text is off it.
        off_text = off_text + on_text * ~is_written
        on_text = on_text * is_written
        # 1. Drafts that end before this token are counted at the depth that they have reached.
        ends = has_full_length | (token >= limits - 1)
        rounds += (on_text + off_text) * ends
        bonus = (on_text * ends).sum(axis=0)  # over the depths, as in begin
        on_text = on_text * ~ends
        off_text = off_text * ~ends
        # 2. The others draft it: the text's token, or another one, with which they leave the text.
        kept = on_text * accept[at_token]
        refused = on_text - kept
        left_text = refused + off_text
        accepted += kept
        rejected += refused
        # 3. Those unsure of it end at the next depth. Off the text it is a token of their own.
        unsure_on_text = kept * unsure[at_token]
        unsure_off_text = left_text * unsure_of_own[at_token] * is_written
        rounds[1:] += (unsure_on_text + unsure_off_text)[:-1]
        begin = bonus + refused.sum(axis=0) + begin_next
        begin_next = unsure_on_text.sum(axis=0)
        # The others are one token deeper: depth d moves to d + 1. The last depth, which the roll
        # brings to depth 0, is empty, since drafts of full length have ended.
        on_text = np.roll(kept - unsure_on_text, 1, axis=0)
        off_text = np.roll(left_text - unsure_off_text, 1, axis=0)
    # summed over the texts, depth last: [threshold, draft length, depth]
    return tuple(np.moveaxis(each.sum(axis=1), 0, -1) for each in (rounds, accepted, rejected))


def probability_tables(
    acceptance: Acceptance, longest: int, thresholds: Sequence[float]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Three tables ``[depth, text, token, threshold]``: probabilities of the target accepting the
    draft, of the draft being unsure of the text's token, and of its being unsure of the token that
    it draws itself.

    With threshold 0.6, a draft that gives the text's token a probability of 0.5 and another one 0.4
    is unsure of either.
    """
    depths = np.minimum(np.arange(longest + 1), acceptance.accept.shape[1] - 1)

    def table(values: Tensor) -> np.ndarray:
        return np.asarray(values)[:, depths].swapaxes(0, 1)[..., None]

    levels = np.array(thresholds)
    unsure = (table(acceptance.confidence) < levels).astype(float)
    # Only the likeliest token is looked at: exact in greedy decoding, and where no two tokens reach
    # the threshold.
    goes_on = table(acceptance.share) * (table(acceptance.likeliest) >= levels)
    return table(acceptance.accept), unsure, np.where(levels == 0, 0.0, 1 - goes_on)


def predict(
    acceptance: Acceptance,
    costs: CostTable,
    gammas: Sequence[int] = GAMMAS,
    thresholds: Sequence[float] = THRESHOLDS,
) -> Prediction:
    """Prediction at the draft length and threshold of the largest expected speed-up: the tokens of
    the texts over the cost of their rounds.

    A round that drafts k tokens costs ``costs.of_round(k)``, and under a threshold k ·
    costs.confidence more. Plain decoding costs 1 per token: 60 tokens in 20 rounds, each of cost 2,
    are a speed-up of 60 / 40 = 1.5. A tie goes to the smaller threshold, then the shorter draft. A
    speed-up below 1 means that no draft pays.
    """
    rounds, accepted, rejected = expected_rounds(acceptance, gammas, thresholds)
    tokens = int(acceptance.lengths.sum())
    lengths = np.arange(max(gammas) + 1)
    confidence = costs.confidence * (np.array(thresholds) > 0)[:, None, None]
    round_costs = np.array([*map(costs.of_round, lengths)]) + confidence * lengths
    speedups = tokens / (rounds * round_costs).sum(-1)
    best = np.unravel_index(np.argmax(speedups), speedups.shape)
    kept = accepted[best].sum()
    drafted = (rounds[best] * lengths).sum()
    judged = kept + rejected[best].sum()
    return Prediction(
        speedup=float(speedups[best]),
        gamma=gammas[best[1]],
        threshold=thresholds[best[0]],
        acceptance_rate=float(kept / (drafted or 1)),
        kept_share=float(kept / (judged or 1)),
    )


def predict_plan(calibration: Calibration, costs: SublayerCosts, plan: LayerPlan) -> Prediction:
    """Prediction for a plan on the texts of the calibration, at its best draft length and
    threshold.
    """
    return predict(calibration.acceptance(plan), costs.table(plan))


def plot_plans(predictions: Mapping[LayerPlan, Prediction], costs: SublayerCosts) -> Figure:
    """Picture of the tried plans, the best first, by draft cost and acceptance, with lines of equal
    speed-up for drafts whose first step costs as much more as the best plan's.

    The colour is the mean number of bits of a plan's sublayers; a skipped one has 0.
    """
    figure = Figure(figsize=(7.5, 5.6))
    axes = figure.subplots()
    drafts = [costs.table(plan) for plan in predictions]
    cost = [table.draft for table in drafts]
    kept = [prediction.kept_share for prediction in predictions.values()]
    grid_cost = np.linspace(0, max(1.05, 1.03 * max(cost)), 80)
    grid_kept = np.linspace(0, 1, 80)
    tables = [replace(drafts[0], draft=price) for price in grid_cost]
    speedups = [[best_speedup(rate, table) for table in tables] for rate in grid_kept]
    lines = axes.contour(
        grid_cost,
        grid_kept,
        speedups,
        levels=LEVELS,
        colors=MUTED,
        linewidths=[2.0 if level == 1 else 0.8 for level in LEVELS],
        alpha=0.5,
    )
    axes.clabel(lines, fmt=lambda level: f"{level:g}×", fontsize=9, colors=INK)
    bits = [np.mean(plan.attention + plan.mlp) for plan in predictions]
    dots = axes.scatter(
        cost,
        kept,
        s=30,
        c=bits,
        cmap=SCALE,
        vmin=0,
        vmax=FULL,
        edgecolors="white",
        label="plan tried",
    )
    axes.scatter(
        cost[:1], kept[:1], s=150, marker="*", color=RED, edgecolors="white", label="best predicted"
    )
    figure.colorbar(
        dots, ax=axes, label="mean bits of a sublayer", ticks=[0, *LOW_BITS, FULL], pad=0.02
    )
    axes.set(
        xlim=(0, grid_cost[-1]),
        ylim=(0, 1.02),
        xlabel="cost of a draft step, in plain rounds",
        ylabel="share of drafted tokens kept, α",
        title="The plans tried; lines join equal speed-ups",
    )
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower left", ncols=2)
    return figure
