"""Sections of the benchmark, each of which measures one table.

The first line of a section's docstring is the title of its table. Knows nothing of command lines
and screens.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, compress, cycle, islice
from operator import truediv
from pathlib import Path
from statistics import median

import torch

from app.common.files import read_json
from app.common.table import Row
from app.drafts import strategy_of
from app.offers import WINDOW
from app.options import Options
from app.session import Session
from benchmark.adaptive import record, simulated_speedups
from benchmark.shapes import ROWS, measure_steps
from benchmark.timing import spread, take_turns, timed
from benchmark.ways import LIBRARIES, Case, Way, Written, begin, write
from decoding.rounds import Statistics
from search.texts import PROMPTS, after_documents
from training.corpus.stories import repetition

LENGTHS = (64, 256, 1024, 2048, 4096, 8192)  # of texts whose first token is timed
LONGEST_IF_QUICK = 1024
SCHEMAS = Path(__file__).with_name("schemas.json")
STRUCTURED_TOKENS = 256  # of the longest text under a schema
# drafts nothing but the tokens that a schema forces
FORCED = {"draft": f"{Path(__file__).with_name('forced.py')}:Forced", "gamma": 15}
TOGETHER = (1, 2, 4, 8, 16)  # texts at a time
TURNS = 3  # of all but the texts of "speed", of which there are many


@dataclass
class Bench:
    """Input of every section: a session that decodes plainly, the cases of the section "speed", the
    options of each draft, and the ways of other libraries.

    ``turns`` is the number of turns of the other sections. ``contexts`` are the tokens of long
    prompts.
    """

    session: Session
    cases: Sequence[Case]
    drafts: dict[str, Options]
    libraries: dict[str, Way] = field(default_factory=dict)
    turns: int = TURNS
    contexts: Sequence[int] = ()

    def measure(
        self, drafts: dict[str, Options], libraries: dict[str, Way], cases: Sequence[Case]
    ) -> list[Row]:
        """Return the rows of plain decoding, of drafts, which share a cache, and of libraries."""
        longest = max(len(case.ids) + case.count for case in cases)
        slot = self.session.new_slot(min(longest, self.session.context))
        options = {"plain": self.session.options, **drafts}
        ours = {name: partial(write, self.session, slot, each) for name, each in options.items()}
        return compare(ours | libraries, cases, self.session.device)


def compare(ways: Mapping[str, Way], cases: Sequence[Case], device: torch.device) -> list[Row]:
    """Return a row for each way, with its speed-up over the way "plain" on the same prompts, in all
    and by kind. "repeated" is the share of repeated four-grams in the plain texts, since repetition
    flatters drafts. "equal" counts the texts that equal the plain ones.
    """
    runs = take_turns(ways, cases, device)
    written = {name: [each for each, _ in own] for name, own in runs.items()}
    seconds = {name: [each.seconds or took for each, took in own] for name, own in runs.items()}
    share = repetition([text for each in written["plain"] for text in each.texts])
    kinds = [*dict.fromkeys(case.kind for case in cases)]
    rows = []
    for name, own in written.items():
        statistics = Statistics()
        for round in chain.from_iterable(each.rounds for each in own):
            statistics.add(round)
        lengths = [sum(map(len, each.texts)) for each in own]
        equal = [one.texts == two.texts for one, two in zip(own, written["plain"], strict=True)]
        speedups = [*map(truediv, seconds["plain"], seconds[name])]
        row = {
            "decoder": name,
            "tokens/s": spread(map(truediv, lengths, seconds[name])),
            "speed-up": spread(speedups),
            "repeated": share,
            "accepted": statistics.acceptance_rate,
            "a round": statistics.tokens_per_round or None,
            "equal": f"{sum(equal)}/{len(equal)}",
            "kinds": kinds,
            "tokens": lengths,
            "rounds": [len(each.rounds) for each in own],
            "seconds": seconds[name],
        }
        for kind in kinds:
            row[kind] = median(compress(speedups, [case.kind == kind for case in cases]))
        rows.append(row)
    return rows


def costs_section(bench: Bench) -> list[Row]:
    """Costs of verifications and of draft steps, in plain rounds, by the model's steps alone."""
    session = bench.session
    slot = session.new_slot(max(ROWS))
    drafters = {}
    for name, options in bench.drafts.items():
        if options.draft not in ("lookup", "auto") and not options.adaptive:
            sample = begin(session, options, Case("", [0], 1))
            drafters[name] = strategy_of(session, sample, slot, session.model).drafter
    return measure_steps(session.model, slot.cache, drafters)


def speed_section(bench: Bench) -> list[Row]:
    """Texts, prefill included: medians over all prompts (lowest-highest), and by kind of prompt."""
    return bench.measure(bench.drafts, bench.libraries, bench.cases)


def structured_section(bench: Bench) -> list[Row]:
    """Texts under JSON schemas, without prefill: speed-up over plain constrained decoding.

    The drafts are forced tokens alone, low bits where they are fast, and auto.
    """
    session = bench.session
    cases = []
    for name, each in read_json(SCHEMAS).items():
        schema = json.dumps(each["schema"])
        ids = session.encode(each["request"], session.options.merged({"json_schema": schema}))
        cases += [
            Case(name, ids, STRUCTURED_TOKENS, turn, schema, reads_prompt=False)
            for turn in range(bench.turns)
        ]
    drafts = {name: bench.drafts[name] for name in ("low bits", "auto") if name in bench.drafts}
    return bench.measure({"forced": session.options.merged(FORCED), **drafts}, {}, cases)


def first_token_section(bench: Bench) -> list[Row]:
    """Time to the first token of a text of n tokens, prompt included.

    Of other libraries plain decoding is timed alone.
    """
    longest = min(bench.session.context, LENGTHS[-1] if bench.turns > 1 else LONGEST_IF_QUICK)
    others = {name: way for name, way in bench.libraries.items() if name in LIBRARIES}
    return [
        {
            "decoder": row["decoder"],
            "tokens": length,
            "ms": spread(1e3 * each for each in row["seconds"]),
            "speed-up": row["speed-up"],
        }
        for length in LENGTHS
        if length <= longest
        for row in bench.measure({}, others, [Case("", [0] * (length - 1), 1)] * bench.turns)
    ]


def context_section(bench: Bench) -> list[Row]:
    """Texts after long prompts of n tokens, without prefill: speed-up over plain decoding.

    A prompt is a part of this project's documents, followed by a request to write something else.
    """
    session = bench.session
    drafts = {
        name: bench.drafts[name] for name in ("lookup", "low bits", "auto") if name in bench.drafts
    }
    if "low bits" in drafts:
        short_sighted = session.options.merged({"draft": "lowbit", "window": WINDOW})
        drafts[f"low bits, newest {WINDOW}"] = short_sighted
    columns = ("decoder", "tokens/s", "speed-up", "repeated", "accepted", "a round", "equal")
    rows = []
    for length in bench.contexts:
        prompts = after_documents(session, PROMPTS["story"][: bench.turns], length)
        cases = [
            Case("", session.encode(prompt), bench.cases[0].count, turn, reads_prompt=False)
            for turn, prompt in enumerate(prompts)
        ]
        rows += [
            {"context": length} | {name: row[name] for name in columns}
            for row in bench.measure(drafts, {}, cases)
        ]
    return rows


def together_section(bench: Bench) -> list[Row]:
    """Texts written n at a time: tokens per second of all, and the speed-up of drafts.

    Always the same 16 texts, without the time until their first tokens. The draft beside auto is
    the draft model's or in low bits, else another one. "equal" counts the turns in which all texts
    equal those written plainly, which are equal for every n.
    """
    session = bench.session
    draft = next(name for name in ("model", "low bits", *bench.drafts) if name in bench.drafts)
    options = {"plain": session.options} | {name: bench.drafts[name] for name in (draft, "auto")}
    cases = [*islice(cycle(bench.cases), TOGETHER[-1])]
    ways = {name: partial(write_together, session, each, cases) for name, each in options.items()}
    columns = ("decoder", "tokens/s", "speed-up", "repeated", "equal")
    return [
        {"texts": count} | {name: row[name] for name in columns}
        for count in TOGETHER
        for row in compare(ways, [Case("", [], count)] * bench.turns, session.device)
    ]


def write_together(
    session: Session, options: Options, cases: Sequence[Case], turn: Case
) -> Written:
    """Return the tokens of all texts but their first ones, written ``turn.count`` texts at a time;
    and the seconds that these took.
    """

    def write(budget: int) -> list[list[int]]:
        samples = [begin(session, options, replace(case, count=budget)) for case in cases]
        for at in range(0, len(samples), turn.count):
            session.finish_all(samples[at : at + turn.count])
        return [sample.tokens[1:] for sample in samples]

    _, reading = timed(session.device, write, 1)
    texts, whole = timed(session.device, write, cases[0].count)
    return Written(texts, seconds=whole - reading)


def adaptive_section(bench: Bench) -> list[Row]:
    """Simulated speed-up by the cost of a draft step, for each draft length and the adaptive exit.

    By the drafts of the first early exit at every position of greedy texts.
    """
    first, *_ = (options for options in bench.drafts.values() if options.draft == "exit")
    greedy = first.merged({"temperature": 0.0})
    return simulated_speedups([record(bench.session, greedy, case) for case in bench.cases])


DEFAULT = ("costs", "speed", "first-token")
SECTIONS = {  # in the order in which they are measured
    "costs": costs_section,
    "speed": speed_section,
    "first-token": first_token_section,
    "structured": structured_section,
    "context": context_section,
    "together": together_section,
    "adaptive": adaptive_section,
}
