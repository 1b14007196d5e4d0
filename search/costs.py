"""Costs of draft steps and of verification on this machine, in units of one round of plain
decoding.

They are measured as a text pays them (``measure_costs``). The loop writes short texts in turns,
each text with one kind of round. A round's cost is its mean time in a text over that of plain
decoding in the same turn, and of that the median over the turns. Rounds of one kind follow each
other, since a round after one of another kind finds other weights in the processor's caches. The
mean is taken, not the fastest round, because a text has slow rounds too.

An example: plain rounds take 10 ms, rounds that verify a draft of four tokens 12 ms, and rounds
that make this draft as well 21 ms. Of drafts of one token these are 11 and 14 ms. So the first
draft step takes 3 ms and the three others 6. Then verify[4] = 12 / 10 = 1.2, a draft step costs 0.2
and the first one 0.1 more: the pass before it has left other weights in the caches.

A search needs the costs of many more plans than it can measure. So it measures a few, and computes
the cost of each sublayer from them (``measure_sublayers``).
"""

import random
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import numpy as np

from app.chooser import Setting
from app.plan_file import LONGEST_DRAFT, DraftPlan
from app.writer import Drafting, Writer, model_drafter
from decoding.drafters import KnownTokens
from decoding.policies import AdaptiveExit, FixedLength
from decoding.text import Rules, Text
from decoding.verify import Coupling
from model import InputError, LayerPlan
from search.texts import Continuation

ROUNDS = 4  # of the longest draft in a measured text, the first of which is not timed
LEAST_TURNS = 4
MOST_TURNS = 25
PATIENCE = 10.0  # seconds after which no turn begins beyond the least


@dataclass(frozen=True)
class CostTable:
    """Costs of a draft in plain rounds.

    ``draft``: one draft step; ``first``: what the first step of a round costs more. ``verify[k]``:
    a round that verifies a draft of k tokens, without its draft steps; verify[0], a round without a
    draft, is 1 by definition. ``confidence``: of a draft step under a threshold, which reads the
    confidence of the drafted token, the part that ``draft`` does not contain.
    """

    draft: float
    verify: Sequence[float]
    confidence: float = 0.0
    first: float = 0.0

    def of_round(self, drafted: int) -> float:
        """Cost of a round that drafts this number of tokens: 4 · 0.2 + 0.1 + 1.2 = 2.1 in the
        example.
        """
        first = self.first if drafted else 0.0
        return drafted * self.draft + first + self.verify[drafted]


def predicted_speedup(acceptance: float, length: int, costs: CostTable) -> float:
    """Expected speed-up over plain decoding of drafts of γ = ``length`` tokens, each accepted with
    probability α: the expected tokens of a round over its cost γ·c + v (arXiv 2211.17192, theorem
    3.8).

    A round writes 1 + α + ... + α^γ = (1 - α^(γ+1)) / (1 - α) expected tokens (equation 1). For
    α = 0.8 and γ = 4 these are 1 + 0.8 + 0.64 + 0.512 + 0.4096 = 3.36, and with the round of cost
    2.1 in the example the speed-up is 1.6.
    """
    tokens = sum(acceptance**kept for kept in range(length + 1))
    return tokens / costs.of_round(length)


def best_speedup(acceptance: float, costs: CostTable) -> float:
    """``predicted_speedup`` of the best of the draft lengths whose verification is known."""
    lengths = range(1, len(costs.verify))
    return max(predicted_speedup(acceptance, length, costs) for length in lengths)


class KnownText(KnownTokens):
    """Draft of a text known in advance: its rounds cost their verification alone."""

    known: Sequence[int] = ()

    def find(self, text: Text, limit: int) -> tuple[int, Sequence[int]]:
        written = len(text.generated)
        return 0, self.known[written : written + limit]


def turns() -> Iterator[int]:
    """Numbers of the turns of a measurement: as many as ``PATIENCE`` allows, from ``LEAST_TURNS``
    to ``MOST_TURNS``.
    """
    began = time.perf_counter()
    for turn in range(MOST_TURNS):
        if turn >= LEAST_TURNS and time.perf_counter() - began > PATIENCE:
            return
        yield turn


def measure_costs(
    setting: Setting,
    prompts: Sequence[Sequence[int]],
    drafts: Sequence[Drafting],
    longest: int = LONGEST_DRAFT,
) -> list[CostTable]:
    """Costs of drafts that are known, up to ``longest`` tokens or the longest of these drafts, and
    those of each draft.

    Each draft is made by a model, and measured in rounds of one token and of its full length. The
    texts follow the prompts, another one each turn, so that costs are those of their contexts.
    """
    model = setting.model
    lengths = [draft.new_policy().gamma for draft in drafts]
    longest = max([longest, *lengths])
    tokens = ROUNDS * (longest + 1)
    room = max(1, model.max_positions - tokens)
    # Mixed, since a turn takes one prompt, and not every prompt has its turn.
    prompts = [prompt[:room] for prompt in random.Random(0).sample(prompts, len(prompts))]
    writer = Writer(model, max(map(len, prompts)) + tokens)
    plain_text = KnownText(model.vocab_size, model.device)
    # by the name of the known text or the number of a draft, and by length; with the texts' tokens
    ways = {
        ("known", length): (
            Drafting("known", lambda cache: plain_text, partial(FixedLength, length)),
            tokens,
        )
        for length in range(1, longest + 1)
    }
    ways |= {
        (number, length): (at_length(draft, length), ROUNDS * (length + 1))
        for number, draft in enumerate(drafts)
        for length in (1, lengths[number])
    }
    ratios = defaultdict(list)
    for turn in turns():
        writer.begin(prompts[turn % len(prompts)])
        write_timed(writer, setting, writer.plain, tokens)  # slower, after the prompt
        # the plain text is the draft of the rounds that measure verification
        plain_text.known, plain = write_timed(writer, setting, writer.plain, tokens)
        for measured, (way, count) in ways.items():
            _, seconds = write_timed(writer, setting, way, count)
            ratios[measured].append(seconds / plain)
    # the first turn warms up
    cost = {measured: statistics.median(each[1:]) for measured, each in ratios.items()}
    verify = [cost["known", length] for length in range(1, longest + 1)]
    known = CostTable(0.0, (1.0, *verify))
    return [known] + [
        draft_costs(known, cost[number, 1], cost[number, length], length)
        for number, length in enumerate(lengths)
    ]


def draft_costs(known: CostTable, of_one: float, of_all: float, length: int) -> CostTable:
    """Costs of a draft from those of its rounds of one token, 1.4 in the example, and of all
    ``length``, 2.1; ``known`` has those of verification.
    """
    first = max(0.0, of_one - known.of_round(1))
    others = max(0.0, of_all - known.of_round(length) - first)
    step = others / (length - 1) if length > 1 else first
    return replace(known, draft=step, first=max(0.0, first - step))


def at_length(draft: Drafting, length: int) -> Drafting:
    """The draft with all of ``length`` tokens, which still reads each confidence where its policy
    does.
    """
    reading = partial(AdaptiveExit, 0.0, step=0.0)
    of_length = reading if draft.new_policy().reads_draft_confidence else FixedLength
    return replace(draft, new_policy=partial(of_length, length))


def write_timed(
    writer: Writer, setting: Setting, way: Drafting, tokens: int
) -> tuple[list[int], float]:
    """A text of this many tokens, and the mean seconds of its rounds with a draft of full length,
    without the first, which reads weights that no cache holds.

    Raises InputError where the context ends before such a round.
    """
    text = writer.new_text(Rules(tokens))
    sample = writer.write(text, way, setting.params, Coupling(setting.coupling, 0))
    longest = way.new_policy().gamma
    seconds = [
        after - before
        for (_, before), (round, after) in pairwise(sample.timeline)
        if len(round.drafted) == longest
    ]
    if not seconds:
        raise InputError(
            f"a context of {writer.model.max_positions} tokens is too short to measure drafts of"
            f" {longest}: give a model with a context of {tokens + 1} or more"
        )
    return sample.tokens, statistics.fmean(seconds)


@dataclass(frozen=True)
class SublayerCosts:
    """Costs of the parts of a draft step, from which the costs of any layer plan follow, in rounds
    of plain decoding.

    ``parts``: by the names of ``parts_of``. The head's holds all that every draft step does:
    embedding, head, distribution, draw. ``first`` is that of plans in the checkpoint's bits alone:
    their first step reads weights that the pass before it has read too. Low-bit copies have left
    the caches in that pass, so plans with any of them pay ``first_in_low_bits``. The others as in
    CostTable.
    """

    parts: Mapping[str, float]
    confidence: float
    verify: Sequence[float]
    first: float = 0.0
    first_in_low_bits: float = 0.0

    def table(self, plan: LayerPlan) -> CostTable:
        """Costs of drafts under ``plan``."""
        draft = sum(count * self.parts[part] for part, count in parts_of(plan).items())
        first = self.first_in_low_bits if plan.has_low_bits else self.first
        return CostTable(draft, self.verify, self.confidence, first)


def parts_of(plan: LayerPlan) -> Counter[str]:
    """Numbers of the parts of a draft step, as in ``{"head 8": 1, "attn 4": 12, "mlp 16": 20}``."""
    sublayers = {"attn": plan.attention, "mlp": plan.mlp, "head": (plan.head,)}
    return Counter(f"{kind} {bits}" for kind, each in sublayers.items() for bits in each if bits)


def measured_plans(layers: int, bits: Collection[int]) -> list[LayerPlan]:
    """Plans whose draft steps determine the costs of all parts in each of ``bits``; the first skips
    all sublayers.
    """
    every = range(layers)
    even = every[::2]
    skipped = ((every, every), ((), ()), (even, ()), ((), every[1::2]), (even, even))
    return [
        LayerPlan.skipping(layers, attention, mlp).in_bits(width, width)
        for width in bits
        for attention, mlp in skipped
    ]


def drafting_under(setting: Setting, chosen: DraftPlan) -> Drafting:
    """Drafts of the target under a layer plan, with exactly its bits, of which the costs are asked.

    Unlike ``by_plan`` this changes no bits of the head, and keeps no low-bit copies on disk, where
    those of most measured plans would never be read again.
    """
    model = setting.model
    model.prepare(chosen.plan)
    return Drafting(
        "plan",
        lambda cache: model_drafter(model, cache, chosen.plan),
        chosen.new_policy,
        chosen,
    )


def measure_sublayers(
    setting: Setting, texts: Sequence[Continuation], bits: Collection[int]
) -> SublayerCosts:
    """Costs of sublayers in each of ``bits``, in the contexts of these texts.

    The cost of a plan's draft step is the sum of the costs of its parts: one equation per measured
    plan, and one unknown per part, such as "attn 4". Solved by least squares. What the first step
    costs more is the median of the measured plans with low bits, and of those without.
    """
    plans = measured_plans(setting.model.num_layers, bits)
    drafts = [drafting_under(setting, DraftPlan(plan)) for plan in plans]
    # The cheapest step again, with a threshold, where each confidence is read: there the difference
    # shows best.
    drafts.append(drafting_under(setting, DraftPlan(plans[0], threshold=1.0)))
    prompts = [text.prompt for text in texts]
    known, *tables, with_confidence = measure_costs(setting, prompts, drafts)
    names = sorted(set().union(*map(parts_of, plans)))
    parts_in_plans = [[parts_of(plan)[name] for name in names] for plan in plans]
    steps = [table.draft for table in tables]
    first, first_in_low_bits = (
        [table.first for plan, table in zip(plans, tables, strict=True) if plan.has_low_bits is low]
        for low in (False, True)
    )
    solution = np.linalg.lstsq(parts_in_plans, steps, rcond=None)[0].clip(min=0)
    return SublayerCosts(
        parts=dict(zip(names, solution.tolist(), strict=True)),
        confidence=max(0.0, with_confidence.draft - steps[0]),
        verify=known.verify,
        first=statistics.median(first or [0.0]),
        first_in_low_bits=statistics.median(first_in_low_bits or [0.0]),
    )
