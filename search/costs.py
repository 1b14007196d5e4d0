"""Costs of draft steps and of verification on this machine, in units of one round of plain
decoding.

They are measured as a text pays them. The loop writes short texts in turns, each text with one
kind of round; a round's cost is its mean time in a text over that of plain decoding in the same
turn, and the median over the turns counts. Rounds of one kind follow each other, since a round
after one of another kind finds other weights in the processor's caches. A fastest round does not
count: no text consists of fastest rounds.
"""

import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import torch

from decoding.drafters import Draft, NoDraft
from decoding.policies import FixedLength, Policy
from decoding.randomness import Randomness
from decoding.run.chooser import Setting
from decoding.run.writer import Drafting, Writer
from decoding.sampling import SamplingParams, one_hot
from decoding.text import Rules, Text
from decoding.verify import Coupling
from weights.memory import LONGEST_DRAFT

ROUNDS = 4  # of the longest draft in a measured text, the first of which is not timed
LEAST_TURNS, MOST_TURNS = 4, 25
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
        """Cost of a round that drafts this number of tokens."""
        return drafted * self.draft + self.verify[drafted]


def expected_tokens(acceptance: float, length: int) -> float:
    """Expected tokens per round: 1 + α + ... + α^γ = (1 - α^(γ+1)) / (1 - α) (arXiv 2211.17192,
    equation 1).
    """
    return sum(acceptance**kept for kept in range(length + 1))


def predicted_speedup(acceptance: float, length: int, costs: CostTable) -> float:
    """Expected speed-up over plain decoding: expected tokens over γ·c + v (arXiv 2211.17192,
    theorem 3.8).
    """
    return expected_tokens(acceptance, length) / costs.of_round(length)


class KnownDraft(NoDraft):
    """Drafter of a text that is known, without a model: its rounds cost their verification."""

    def __init__(self, vocab_size: int, device: torch.device, known: Sequence[int]) -> None:
        super().__init__(vocab_size, device)
        self.known = known

    def propose(
        self, text: Text, limit: int, params: SamplingParams, policy: Policy, randomness: Randomness
    ) -> Draft:
        written = len(text.generated)
        ids = torch.tensor(self.known[written : written + limit], dtype=torch.int64)
        ids = ids.to(self.empty.tokens.device)
        return Draft(ids, one_hot(ids, self.empty.probs.shape[1]))


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
    known: list[int] = []  # the text of the turn
    verifying = [
        Drafting(
            f"{length} known tokens",
            lambda cache: KnownDraft(model.vocab_size, model.device, known),
            lambda length=length: FixedLength(length),
        )
        for length in range(1, longest + 1)
    ]
    # Of full length, whatever the confidence: a policy that stops early has no such round.
    drafting = [
        replace(draft, new_policy=partial(FixedLength, draft.new_policy().gamma))
        for draft in drafts
        if draft.model
    ]
    turns: list[list[float]] = []
    began = time.perf_counter()
    while not enough_turns(len(turns), began):
        writer.begin(prompts[len(turns) % len(prompts)])
        known[:] = _write(writer, setting, writer.plain, tokens)[0]
        seconds = [_write(writer, setting, way, tokens)[1] for way in [writer.plain, *verifying]]
        for way in drafting:
            few = ROUNDS * (way.new_policy().gamma + 1)
            seconds.append(_write(writer, setting, way, few)[1])
        turns.append([each / seconds[0] for each in seconds])
    # the first turn warms up
    medians = [statistics.median(costs) for costs in zip(*turns[1:], strict=True)]
    verify = tuple(medians[: longest + 1])
    steps = {}
    for way, cost in zip(drafting, medians[longest + 1 :], strict=True):
        length = way.new_policy().gamma
        steps[way.new_drafter] = max(0.0, (cost - verify[length]) / length)
    return [CostTable(steps.get(draft.new_drafter, 0.0), verify) for draft in drafts]


def _write(writer: Writer, setting: Setting, way: Drafting, tokens: int) -> tuple[list[int], float]:
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
