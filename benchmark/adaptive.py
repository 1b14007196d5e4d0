"""Simulation of draft lengths: what fixed ones and the adaptive exit of Draft & Verify (arXiv
2309.08168) gain, by the cost of a draft step.

A draft is recorded at each position of a text: the confidences of its tokens, and how many of them
are the text's. So the rounds of any policy follow without decoding again. Knows nothing of clocks.
"""

from collections.abc import Sequence
from functools import partial

from app.common.table import Row
from app.drafts import START_GREEDY, strategy_of
from app.options import Options
from app.plan_file import LONGEST_DRAFT
from app.session import Session
from benchmark.ways import Case, begin
from decoding.policies import AdaptiveExit, FixedLength, Policy
from decoding.rounds import Round, common_prefix
from decoding.speculate import speculate

COSTS = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8)  # of a draft step, in plain rounds
LENGTHS = range(1, LONGEST_DRAFT + 1)
POLICIES = {
    "adaptive exit": partial(AdaptiveExit, START_GREEDY, LONGEST_DRAFT),
    **{f"length {length}": partial(FixedLength, length) for length in LENGTHS},
}

Draft = tuple[Sequence[float], int]  # its confidences, and the number of accepted tokens


def record(session: Session, options: Options, case: Case) -> list[Draft]:
    """Return the drafts at all positions of the text of a case, which each of its tokens ends."""
    sample = begin(session, options, case)
    text = sample.source
    slot = session.slot_for(text.longest)
    slot.read(sample, session.model)
    drafter = strategy_of(session, sample, slot, session.model).drafter
    confidences: list[list[float]] = []
    rounds = speculate(
        session.model,
        slot.cache,
        text,
        drafter,
        FixedLength(LONGEST_DRAFT),
        options.params,
        sample.rule.randomness(session.device),
        # a rule that accepts nothing, so that a round begins at each position
        lambda p, q, drafted, randomness, place: (
            drafted.new_zeros(()),
            randomness.draw(p[0], place),
        ),
        observer=lambda draft, *_: confidences.append(
            [logits.float().softmax(-1).amax().item() for logits in draft.logits]
        ),
    )
    drafted = [(round.position, round.drafted) for round in rounds]
    accepted = [common_prefix(tokens, text.tokens[position:]) for position, tokens in drafted]
    return [*zip(confidences, accepted, strict=True)]


def simulate(policy: Policy, drafts: Sequence[Draft]) -> tuple[int, int]:
    """Return how many rounds a text takes under a policy, and how many tokens they draft."""
    rounds = drafted = position = 0
    while position < len(drafts):
        confidences, accepted = drafts[position]
        goes_on = [policy.keep_drafting(each) for each in confidences[: policy.gamma]]
        length = len(goes_on) if all(goes_on) else goes_on.index(False) + 1
        accepted = min(length, accepted)
        policy.observe(Round(position, [0] * length, accepted, []))
        rounds += 1
        drafted += length
        position += accepted + 1
    return rounds, drafted


def simulated_speedups(texts: Sequence[Sequence[Draft]]) -> list[Row]:
    """Return the speed-up of each policy at each cost of a draft step. A verification is taken to
    cost a plain round.
    """
    tokens = sum(map(len, texts))
    rows: list[Row] = []
    for name, new_policy in POLICIES.items():
        each = [simulate(new_policy(), drafts) for drafts in texts]
        rounds, drafted = map(sum, zip(*each, strict=True))
        rows += [
            {"decoder": name, "draft step": cost, "speed-up": tokens / (rounds + cost * drafted)}
            for cost in COSTS
        ]
    return rows
