"""Costs of draft steps and of verification on this machine, in units of one plain round.

The loop writes short texts in turns, each text with one kind of round; a cost is the median of its
rounds over that of plain ones. The cost of a plan's draft step is the sum of its parts': an
attention, an MLP and the head per number of bits, each the difference of two timed plans. Knows
nothing of acceptance.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from time import perf_counter

from app.plan_file import LONGEST_DRAFT
from app.session import Session
from decoding.drafters import Drafter, ModelDrafter, ModelFreeDrafter, NoDraft
from decoding.policies import FixedLength
from decoding.rounds import expected_speedup
from decoding.speculate import speculate
from decoding.text import Rules, Text
from model.cache import KVCache
from model.errors import InputError
from model.plan import LayerPlan

TURNS = 8
ROUNDS = 5  # of a measured text, the first of which is not timed
GAMMA = 4  # tokens of the drafts by which a draft step is measured


@dataclass(frozen=True)
class Costs:
    """Costs in plain rounds. ``parts``: of a draft step, by the names of ``parts_of``; the head's
    holds all that every draft step does. ``verify[k]``: a round that verifies a draft of k tokens,
    without its draft steps; verify[0] is 1 by definition.
    """

    parts: dict[str, float]
    verify: Sequence[float]

    def step(self, plan: LayerPlan) -> float:
        """Return the cost of a draft step under the plan."""
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
    """Return the parts of a draft step, as in ``{"head 8": 1, "attn 4": 12, "mlp 16": 20}``."""
    sublayers = {"attn": plan.attention, "mlp": plan.mlp, "head": (plan.head,)}
    return Counter(f"{kind} {bits}" for kind, each in sublayers.items() for bits in each if bits)


class KnownText(ModelFreeDrafter):
    """Drafter of a text known in advance: its rounds cost their verification alone."""

    known: Sequence[int] = ()

    def find(self, text: Text, limit: int) -> tuple[int, Sequence[int]]:
        written = len(text.generated)
        return 0, self.known[written : written + limit]


def seconds_of_round(
    session: Session, cache: KVCache, prompt: Sequence[int], drafter: Drafter, gamma: int
) -> tuple[float, list[int]]:
    """Return the median seconds of a round with drafts of ``gamma`` tokens, and the text. The cache
    holds the prompt. Raises InputError where the context ends before such a round.
    """
    options = session.options
    text = Text(prompt, Rules(ROUNDS * (gamma + 1)), session.model)
    rule = options.rule
    randomness = rule.randomness(session.device)
    how = FixedLength(gamma), options.params, randomness, rule.verify
    times = [perf_counter()]
    full = []
    for round in speculate(session.model, cache, text, drafter, *how):
        times.append(perf_counter())
        full.append(len(round.drafted) == gamma)
    seconds = [
        after - before
        for (before, after), is_full in zip(pairwise(times[1:]), full[1:], strict=True)
        if is_full
    ]
    if not seconds:
        raise InputError(
            f"a context of {session.context} tokens is too short to measure drafts of {gamma}: give"
            " a model with a longer one"
        )
    return median(seconds), text.generated


def measure_costs(
    session: Session, prompts: Sequence[Sequence[int]], bits: Collection[int]
) -> Costs:
    """Return the costs of sublayers in each of ``bits``, and of verification, behind these prompts:
    another one each turn.
    """
    model = session.model
    layers = model.num_layers
    every = range(layers)
    skipped = {"head": (every, every), "attn": ((), every), "mlp": (every, ())}
    plans = {
        (kind, width): LayerPlan.skipping(layers, *which).in_bits(width, width)
        for width in bits
        for kind, which in skipped.items()
    }
    for plan in plans.values():
        session.prepare(plan)
    nothing = NoDraft(model.vocab_size, model.device)
    known = KnownText(model.vocab_size, model.device)
    longest = ROUNDS * (LONGEST_DRAFT + 1)
    room = max(2, session.context - longest)
    times: dict[object, list[float]] = {}
    for turn in range(TURNS):
        prompt = list(prompts[turn % len(prompts)])[:room]
        sample = session.begin(prompt, session.options.merged({"max_new_tokens": longest}))
        slot = session.slot_for(sample.source.longest)
        session.read(sample, slot, model)
        cache = slot.cache
        drafters = {("verify", length): (known, length) for length in range(1, LONGEST_DRAFT + 1)}
        drafters |= {
            part: (ModelDrafter(model, cache, plan), GAMMA) for part, plan in plans.items()
        }
        # The text that plain rounds write is the draft of the rounds that measure verification.
        plain_options = session.options.merged({"draft": "none", "max_new_tokens": longest})
        known.known = session.finish(session.begin(prompt, plain_options)).tokens
        plain, _ = seconds_of_round(session, cache, prompt, nothing, 0)
        for name, (drafter, gamma) in drafters.items():
            seconds, _ = seconds_of_round(session, cache, prompt, drafter, gamma)
            times.setdefault(name, []).append(seconds / plain)
    cost = {name: median(each) for name, each in times.items()}
    verify = [1.0, *(cost["verify", length] for length in range(1, LONGEST_DRAFT + 1))]
    parts = {}
    for width in bits:
        step = {kind: max(0.0, cost[kind, width] - verify[GAMMA]) / GAMMA for kind in skipped}
        parts[f"head {width}"] = step["head"]
        for kind in ("attn", "mlp"):
            parts[f"{kind} {width}"] = max(0.0, step[kind] - step["head"]) / layers
    return Costs(parts, verify)
