"""Sections of the benchmark, each of which measures one table.

The first line of a section's docstring is the title of its table.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import cycle, islice
from pathlib import Path

from app.drafts import draft_of
from app.files import read_json
from app.options import Options
from app.session import Session
from app.table import Row
from benchmark.costs import POSITION, ROWS, Drafting, measure_costs
from benchmark.libraries import PACKAGES
from benchmark.timing import ratios, spread, take_turns, timed
from benchmark.ways import Case, Way, Written, begin, compare, count_equal, way_of
from decoding.drafters import ModelDrafter

TURNS = 3  # of first tokens and of texts together
# by the section that they belong to: first-token
LENGTHS = (64, 256, 1024, 2048, 4096, 8192)  # of texts
LONGEST_IF_QUICK = 1024
# structured
SCHEMAS = Path(__file__).with_name("schemas.json")
FORCED = f"{Path(__file__).with_name('forced.py')}:Forced"
LONGEST_FORCED = 15  # tokens of a draft
STRUCTURED_TOKENS = 256  # of the longest text
STRUCTURED_TURNS = 5  # texts of each schema
# together
TOGETHER = (1, 2, 4, 8, 16)  # texts at a time


@dataclass
class Bench:
    """Input of every section: a session that decodes plainly, the cases of the section "speed", the
    options of each draft, and the ways of other libraries.
    """

    session: Session
    cases: Sequence[Case]
    drafts: dict[str, Options]
    libraries: dict[str, Way] = field(default_factory=dict)
    quick: bool = False

    def turns(self, most: int = TURNS) -> int:
        """Return how often a section measures the same."""
        return 1 if self.quick else most

    def ways(self, drafts: dict[str, Options], positions: int) -> dict[str, Way]:
        """Return plain decoding and drafts as ways, on one cache of at most so many positions."""
        slot = self.session.new_slot(min(positions, self.session.context))
        ways = {"plain": self.session.options, **drafts}
        return {name: way_of(self.session, slot, options) for name, options in ways.items()}


def costs_section(bench: Bench) -> list[Row]:
    """Costs of verifications and of draft steps, in plain rounds, by the model's steps alone.

    The floor is the cost of reading every weight once. Norms and biases, a thousandth of them, are
    left out, and an untied embedding, of which one row is read.
    """
    session = bench.session
    slot = session.new_slot(min(POSITION + max(ROWS), session.context))
    drafts = {}
    for name, options in bench.drafts.items():
        sample = begin(session, options, Case("", [0], 1))
        drafter = draft_of(session, sample, slot, session.model).drafter
        if isinstance(drafter, ModelDrafter) and not options.adaptive:
            drafts[name] = Drafting(drafter.model, drafter.cache, drafter.plan)
    costs = measure_costs(session.model, slot.cache, drafts)
    rows: list[Row] = [
        {"step": "verification", "tokens": count, "plain rounds": cost}
        for count, cost in costs.rows.items()
    ]
    rows[0]["ms"] = costs.milliseconds
    rows += [
        {"step": f"draft step, {name}", "plain rounds": cost, "more in the first step": first}
        for name, (cost, first) in costs.drafts.items()
    ]
    return [*rows, {"step": "floor", "plain rounds": costs.floor, "GB/s": costs.bandwidth}]


def speed_section(bench: Bench) -> list[Row]:
    """Texts, prefill included: medians over all prompts (lowest-highest), and by kind of prompt."""
    longest = max(len(case.ids) + case.count for case in bench.cases)
    ways = bench.ways(bench.drafts, longest) | bench.libraries
    return compare(ways, bench.cases, bench.session.device)


def structured_section(bench: Bench) -> list[Row]:
    """Texts under JSON schemas, without prefill: speed-up over plain constrained decoding.

    The drafts are forced tokens alone, low bits where they are fast, and auto.
    """
    session = bench.session
    cases = []
    for name, each in read_json(SCHEMAS).items():
        schema = json.dumps(each["schema"])
        ids = session.encode(each["request"], session.options.merged({"json_schema": schema}))
        for turn in range(bench.turns(STRUCTURED_TURNS)):
            cases.append(Case(name, ids, STRUCTURED_TOKENS, turn, schema))
    drafts = {"forced": session.options.merged({"draft": FORCED, "gamma": LONGEST_FORCED})}
    drafts |= {name: bench.drafts[name] for name in ("low bits", "auto") if name in bench.drafts}
    longest = max(len(case.ids) for case in cases) + STRUCTURED_TOKENS
    return compare(bench.ways(drafts, longest), cases, session.device)


def first_token_section(bench: Bench) -> list[Row]:
    """Time to the first token of a text of n tokens, prompt included; its ratio to plain decoding's.

    Of other libraries plain decoding is timed alone.
    """
    longest = min(bench.session.context, LONGEST_IF_QUICK if bench.quick else LENGTHS[-1])
    ways = bench.ways({}, longest)
    ways |= {name: way for name, way in bench.libraries.items() if name in PACKAGES}
    rows = []
    for length in [length for length in LENGTHS if length <= longest]:
        case = Case("", [0] * (length - 1), 1)
        runs = take_turns(ways, [case] * bench.turns(), bench.session.device)
        milliseconds = {name: [1e3 * run.seconds for run in each] for name, each in runs.items()}
        for name, own in milliseconds.items():
            ratio = spread(ratios(own, milliseconds["plain"]))
            rows.append({"decoder": name, "tokens": length, "ms": spread(own), "ratio": ratio})
    return rows


def together_section(bench: Bench) -> list[Row]:
    """Texts written n at a time: tokens per second of all, and the speed-up of drafts.

    Always the same 16 texts, without the time until their first tokens. The draft beside auto is
    the draft model's or in low bits, else another one. "equal" counts the texts that equal those
    written alone and plainly.
    """
    session = bench.session
    draft = next(name for name in ("model", "low bits", *bench.drafts) if name in bench.drafts)
    options = {"plain": session.options} | {name: bench.drafts[name] for name in (draft, "auto")}
    cases = [*islice(cycle(bench.cases), TOGETHER[-1])]
    ways = {name: partial(write_together, session, each, cases) for name, each in options.items()}
    alone: list[Written] = []
    rows = []
    for count in TOGETHER:
        runs = take_turns(ways, [count] * bench.turns(), session.device)
        texts = {name: each[-1].result[1] for name, each in runs.items()}
        speeds = {name: [run.result[0] for run in each] for name, each in runs.items()}
        alone = alone or texts["plain"]
        for name, own in speeds.items():
            rows.append(
                {
                    "texts": count,
                    "decoder": name,
                    "tokens/s": spread(own),
                    "speed-up": spread(ratios(own, speeds["plain"])),
                    "equal": count_equal(texts[name], alone),
                }
            )
    return rows


def write_together(
    session: Session, options: Options, cases: Sequence[Case], count: int
) -> tuple[float, list[Written]]:
    """Return the tokens per second of all texts, ``count`` of them at a time, after their first
    tokens; and the texts.
    """

    def write(budget: int) -> list[Written]:
        samples = [begin(session, options, replace(case, count=budget)) for case in cases]
        for at in range(0, len(samples), count):
            session.finish_all(samples[at : at + count])
        return [Written(sample.tokens) for sample in samples]

    reading = timed(write, session.device, 1)
    whole = timed(write, session.device, cases[0].count)
    written = sum(len(text.tokens) - 1 for text in whole.result)
    return written / (whole.seconds - reading.seconds), whole.result


SECTIONS = {  # in the order in which they are measured
    "costs": costs_section,
    "speed": speed_section,
    "first-token": first_token_section,
    "structured": structured_section,
    "together": together_section,
}
