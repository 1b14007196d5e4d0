"""Costs of draft steps and of verification on this machine, in units of one round of plain
decoding.

They are measured as a text pays them. The loop writes short texts in turns, each text with one
kind of round. A round's cost is its mean time in a text over that of plain decoding in the same
turn, and of that the median over the turns. Rounds of one kind follow each other, since a round
after one of another kind finds other weights in the processor's caches. The mean is taken, not the
fastest round, because a text has slow rounds too.

An example: plain rounds take 10 ms, rounds that verify four tokens 12 ms, and rounds that draft
these four tokens as well 20 ms. Then verify[4] = 12 / 10 = 1.2, and a draft step costs
(20 - 12) / 10 / 4 = 0.2.
"""

import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

from decoding.drafters import KnownTokens
from decoding.policies import AdaptiveExit, FixedLength
from decoding.run.chooser import Setting
from decoding.run.writer import Drafting, Writer
from decoding.text import Rules, Text
from decoding.verify import Coupling
from model import Decoder
from weights.memory import LONGEST_DRAFT

ROUNDS = 4  # of the longest draft in a measured text, the first of which is not timed
LEAST_TURNS = 4
MOST_TURNS = 25
PATIENCE = 10.0  # seconds after which no turn begins beyond the least


@dataclass(frozen=True)
class CostTable:
    """Costs of a draft in plain rounds.

    ``draft``: one draft step. ``verify[k]``: a round that verifies a draft of k tokens, without its
    draft steps; verify[0], a round without a draft, is 1 by definition.
    """

    draft: float
    verify: tuple[float, ...]

    def of_round(self, drafted: int) -> float:
        """Cost of a round that drafts this number of tokens: 4 · 0.2 + 1.2 = 2 in the example."""
        return drafted * self.draft + self.verify[drafted]


def expected_tokens(acceptance: float, length: int) -> float:
    """Expected tokens per round: 1 + α + ... + α^γ = (1 - α^(γ+1)) / (1 - α) (arXiv 2211.17192,
    equation 1).

    For α = 0.8 and γ = 4: 1 + 0.8 + 0.64 + 0.512 + 0.4096 = 3.36.
    """
    return sum(acceptance**kept for kept in range(length + 1))


def predicted_speedup(acceptance: float, length: int, costs: CostTable) -> float:
    """Expected speed-up over plain decoding: expected tokens over γ·c + v (arXiv 2211.17192,
    theorem 3.8).

    For the 3.36 tokens of α = 0.8 and γ = 4, and the round of cost 2 in the example: 1.68.
    """
    return expected_tokens(acceptance, length) / costs.of_round(length)


class KnownText(KnownTokens):
    """Draft of a text known in advance: its rounds cost their verification alone."""

    def __init__(self, model: Decoder, known: Sequence[int]) -> None:
        super().__init__(model.vocab_size, model.device)
        self.known = known

    def find(self, text: Text, limit: int) -> tuple[int, Sequence[int]]:
        written = len(text.generated)
        return 0, self.known[written : written + limit]


def at_full_length(draft: Drafting) -> Drafting:
    """The draft without an early end, which still reads each confidence where its policy does."""
    policy = draft.new_policy()
    if policy.reads_draft_confidence:
        return replace(draft, new_policy=partial(AdaptiveExit, 0.0, policy.gamma, step=0.0))
    return replace(draft, new_policy=partial(FixedLength, policy.gamma))


def enough_turns(turns: int, began: float) -> bool:
    """Whether this number of turns, begun at a time of ``time.perf_counter``, is enough."""
    if turns < LEAST_TURNS:
        return False
    return turns == MOST_TURNS or time.perf_counter() - began > PATIENCE


def measure_costs(
    setting: Setting,
    prompts: Sequence[Sequence[int]],
    drafts: Sequence[Drafting],
    longest: int = LONGEST_DRAFT,
) -> list[CostTable]:
    """Cost table of each draft, with verifications of up to ``longest`` drafted tokens.

    The texts follow the prompts, another one each turn, so that costs are those of their contexts.
    A draft step is measured in rounds of the draft's full length; without a model it costs nothing.
    """
    model = setting.model
    tokens = ROUNDS * (longest + 1)
    # Mixed, since a turn takes one prompt, and not every prompt has its turn.
    mixed = random.Random(0).sample(prompts, len(prompts))
    prompts = [prompt[: max(1, model.max_positions - tokens)] for prompt in mixed]
    writer = Writer(model, max(map(len, prompts)) + tokens)
    known: list[int] = []  # the plain text of a turn, which verifications draft
    ways = [
        (Drafting("known", lambda cache: KnownText(model, known), partial(FixedLength, n)), tokens)
        for n in range(1, longest + 1)
    ]
    ways += [
        (at_full_length(draft), ROUNDS * (draft.new_policy().gamma + 1))
        for draft in drafts
        if draft.model
    ]
    turns: list[list[float]] = []
    began = time.perf_counter()
    while not enough_turns(len(turns), began):
        writer.begin(prompts[len(turns) % len(prompts)])
        known[:], plain_seconds = write_timed(writer, setting, writer.plain, tokens)
        seconds = [write_timed(writer, setting, way, count)[1] for way, count in ways]
        turns.append([each / plain_seconds for each in seconds])
    # the first turn warms up
    medians = [statistics.median(costs) for costs in zip(*turns[1:], strict=True)]
    verify = (1.0, *medians[:longest])
    of_drafts = iter(medians[longest:])
    tables = []
    for draft in drafts:
        length = draft.new_policy().gamma
        step = (next(of_drafts) - verify[length]) / length if draft.model else 0.0
        tables.append(CostTable(max(0.0, step), verify))
    return tables


def write_timed(
    writer: Writer, setting: Setting, way: Drafting, tokens: int
) -> tuple[list[int], float]:
    """A text of this many tokens, and the mean seconds of its rounds with a draft of full length,
    without the first, which reads weights that no cache holds.
    """
    clock = [0.0]
    sample = writer.write(
        writer.new_text(Rules(tokens)),
        way,
        setting.params,
        Coupling(setting.coupling, 0),
        readers=[lambda round, seconds: clock.append(seconds)],
    )
    longest = way.new_policy().gamma
    seconds = [
        after - before
        for round, (before, after) in zip(sample.rounds, pairwise(clock), strict=True)
        if len(round.drafted) == longest and before
    ]
    return sample.tokens, statistics.fmean(seconds)
