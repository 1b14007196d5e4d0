"""Costs of draft steps and of verification on this machine, in units of one plain round.

The loop writes short texts in turns, each text with one kind of round. A cost is the median of its
rounds over that of plain ones. The cost of a plan's draft step is the sum of its parts': an
attention, an MLP and the head per number of bits, the attention also per window. Each of these is
the difference of two timed plans. Knows nothing of acceptance.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import cycle, islice, pairwise
from statistics import median
from time import perf_counter
from typing import NamedTuple

from app.common.command_line import say
from app.common.files import read_json, write_json
from app.plan_file import LONGEST_DRAFT
from app.session import Session
from decoding.drafters import Drafter, ModelDrafter, ModelFreeDrafter
from decoding.policies import FixedLength
from decoding.rounds import expected_speedup
from decoding.speculate import speculate
from decoding.text import Conditions, Text
from model.cache import KVCache
from model.errors import InputError, explaining
from model.places import cache_folder
from model.plan import LayerPlan

TURNS = 8
ROUNDS = 5  # of a measured text, the first of which is not timed
TIMED_DRAFT = 4  # tokens of the drafts by which a draft step is measured


@dataclass(frozen=True)
class CostModel:
    """Costs by which the speed-up of any plan is predicted, in plain rounds.

    ``parts``: of a draft step, by the names of ``parts_of``; the head's holds all that every draft
    step does. ``verify[k]``: a round that verifies a draft of k tokens, without its draft steps;
    verify[0] is 1 by definition.
    """

    parts: dict[str, float]
    verify: Sequence[float]

    def step(self, plan: LayerPlan) -> float:
        """Return the cost of a draft step under the plan. Raises InputError where one of its parts
        was not measured.
        """
        with explaining("the cost of a part of the plan was not measured", (KeyError,)):
            return sum(count * self.parts[part] for part, count in parts_of(plan).items())

    def best(self, acceptance: float, step: float) -> tuple[float, int]:
        """Return the largest expected speed-up of drafts with this acceptance rate α and cost of a
        step, and the draft length γ that has it.
        """
        return max(
            (expected_speedup(acceptance, length, step, self.verify[length]), length)
            for length in range(1, len(self.verify))
        )


def parts_of(plan: LayerPlan) -> Counter[str]:
    """Return the parts of a draft step, as in ``{"8-bit head": 1, "4-bit attn": 12, "16-bit mlp":
    20}``; under a window of 512 keys an attention is called "4-bit attn of 512".
    """
    of_window = f" of {plan.window}" if plan.window else ""
    attention = (f"{bits}-bit attn{of_window}" for bits in plan.attention if bits)
    mlp = (f"{bits}-bit mlp" for bits in plan.mlp if bits)
    return Counter([f"{plan.head}-bit head", *attention, *mlp])


def probes(layers: int, bits: Collection[int], windows: Collection[int | None]) -> list[LayerPlan]:
    """Return the plans by which the parts are measured. In each number of bits they are the head
    alone, the head with all MLPs, and the head with all attentions under each of the windows. So
    the last part of each is new, and the plans before it have the others.
    """
    every = range(layers)
    plans = [
        LayerPlan.skipping(layers, every, every),
        LayerPlan.skipping(layers, every, ()),
        *(replace(LayerPlan.skipping(layers, (), every), window=window) for window in windows),
    ]
    return [plan.in_bits(width, width) for width in bits for plan in plans]


class Repetition(ModelFreeDrafter):
    """Drafter of the last token again and again: its rounds cost their verification alone."""

    def find(self, text: Text, limit: int) -> tuple[int, Sequence[int]]:
        return 0, text.tokens[-1:] * limit


def seconds_of_round(
    session: Session, cache: KVCache, prompt: Sequence[int], drafter: Drafter, gamma: int
) -> float:
    """Return the median seconds of a round with drafts of ``gamma`` tokens. The cache holds the
    prompt, and perhaps a former text behind it, which is overwritten.
    """
    text = Text(prompt, Conditions(ROUNDS * (gamma + 1)), session.model)
    rule = session.options.rule
    rounds = speculate(
        session.model,
        cache,
        text,
        drafter,
        FixedLength(gamma),
        session.options.params,
        rule.randomness(session.device),
        rule.verify,
    )
    ended = [(len(round.drafted), perf_counter()) for round in islice(rounds, ROUNDS)]
    # The first round of a text is slower than the others; a draft may end with its text.
    return median(
        after - before for (_, before), (length, after) in pairwise(ended) if length == gamma
    )


class Turn(NamedTuple):
    """Seconds of a turn's rounds: ``verify[k]`` with a draft of k tokens that costs nothing, and
    ``draft[plan]`` with a draft of ``TIMED_DRAFT`` tokens under the plan.
    """

    verify: Sequence[float]
    draft: Mapping[LayerPlan, float]


def measure_costs(
    session: Session,
    prompts: Sequence[Sequence[int]],
    bits: Collection[int],
    windows: Collection[int | None],
) -> CostModel:
    """Return the costs of sublayers in each of ``bits``, of attentions under each window, and of
    verification, behind these prompts: another one each turn.

    Raises InputError for a model whose context is too short to be timed.
    """
    longest = ROUNDS * (LONGEST_DRAFT + 1)
    room = session.context - longest
    if room < 1:
        raise InputError(
            f"{session.name} has a context of {session.context} tokens: a search needs at least"
            f" {longest + 1}, in which to time drafts"
        )
    cut = [list(each)[:room] for each in prompts]
    plans = probes(session.model.num_layers, bits, windows)
    return costs_from([*timed_turns(session, cut, plans, max(map(len, cut)) + longest)])


def timed_turns(
    session: Session, prompts: Sequence[Sequence[int]], plans: Collection[LayerPlan], positions: int
) -> Iterator[Turn]:
    """Yield the seconds of all kinds of rounds in each turn, in a cache of these ``positions``."""
    slot = session.slot_for(positions)
    for plan in plans:
        session.prepare(plan)
    drafters = {plan: ModelDrafter(session.model, slot.cache, plan) for plan in plans}
    for prompt in islice(cycle(prompts), TURNS):
        slot.read(session.begin(prompt), session.model)
        seconds = partial(seconds_of_round, session, slot.cache, prompt)
        yield Turn(
            verify=[seconds(Repetition(), length) for length in range(LONGEST_DRAFT + 1)],
            draft={plan: seconds(drafter, TIMED_DRAFT) for plan, drafter in drafters.items()},
        )


def costs_from(turns: Sequence[Turn]) -> CostModel:
    """Return the costs that follow from turns with the plans of ``probes``: in each turn relative
    to its plain round, the one that verifies no draft.
    """
    verify = [
        median(turn.verify[length] / turn.verify[0] for turn in turns)
        for length in range(LONGEST_DRAFT + 1)
    ]
    parts: dict[str, float] = {}
    for plan in turns[0].draft:
        cost = median(turn.draft[plan] / turn.verify[0] for turn in turns)
        step = max(0.0, cost - verify[TIMED_DRAFT]) / TIMED_DRAFT
        *known, (part, count) = parts_of(plan).items()
        rest = step - sum(times * parts[name] for name, times in known)
        parts[part] = max(0.0, rest) / count
    return CostModel(parts, verify)


def kept_costs(
    study: str,
    session: Session,
    prompts: Sequence[Sequence[int]],
    bits: Collection[int],
    windows: Collection[int | None],
) -> CostModel:
    """Return the costs of a study: see ``measure_costs``. They are measured once, and kept for
    others of its name: with the same costs a seed proposes the same plans.
    """
    path = cache_folder() / "costs" / f"{study}.json"
    say(
        f"costs of sublayers, measured once: {path}; remove it and the search's journal"
        " to measure them again"
    )
    with suppress(InputError, TypeError):  # absent or damaged
        kept = CostModel(**read_json(path))
        if kept.parts and len(kept.verify) == LONGEST_DRAFT + 1:
            return kept
    found = measure_costs(session, prompts, bits, windows)
    try:
        write_json(path, asdict(found))
    except InputError as error:
        say(f"the costs are not kept, and only this search's journal has them: {error}")
    return found
