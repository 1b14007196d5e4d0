"""Sections of the benchmark, each of which measures one table.

``SECTIONS`` has all that is known of one. The first line of its function's docstring is the title
of its table. Knows nothing of command lines and screens.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, compress, cycle, islice
from operator import truediv
from pathlib import Path
from statistics import median
from typing import Any

import torch

from app.common.files import read_json
from app.common.table import Row
from app.drafts import strategy_of
from app.offers import WINDOW
from app.options import Options
from app.plan_file import LONGEST_DRAFT
from app.session import Session
from benchmark.picture import Panel
from benchmark.shapes import ROWS, measure_steps
from benchmark.timing import spread, take_turns, timed
from benchmark.ways import LIBRARIES, Case, Way, Written, begin, write
from decoding.rounds import Statistics
from training.corpus.stories import repetition

LENGTHS = (64, 256, 1024, 2048, 4096, 8192)  # of texts whose first token is timed
LONGEST_IF_QUICK = 1024
SCHEMAS = Path(__file__).with_name("schemas.json")
STRUCTURED_TOKENS = 256  # of the longest text under a schema
# drafts nothing but the tokens that a schema forces
FORCED = {"draft": f"{Path(__file__).with_name('forced.py')}:Forced", "gamma": 15}
TOGETHER = (1, 2, 4, 8, 16)  # texts at a time
STEP_COSTS = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8)  # simulated, in plain rounds
LEAST_SECONDS = 1e-6  # of a text: a difference of two times may be none, or negative
TURNS = 3  # of all but the texts of "speed", of which there are many


@dataclass
class Bench:
    """Input of every section: a session that decodes plainly, the cases of the section "speed", the
    options of each draft, and the ways of other libraries.

    ``turns`` is the number of turns of the other sections, 1 in a quick run. ``contexts`` has the
    cases of long prompts by the number of the documents' tokens.
    """

    session: Session
    cases: Sequence[Case]
    drafts: dict[str, Options]
    libraries: dict[str, Way]
    turns: int
    contexts: Mapping[int, Sequence[Case]]

    def measure(
        self, drafts: dict[str, Options], libraries: dict[str, Way], cases: Sequence[Case]
    ) -> list[Row]:
        """Return the rows of plain decoding, of drafts, which share a cache, and of libraries."""
        longest = max(len(case.ids) + case.count for case in cases)
        slot = self.session.new_slot(min(longest, self.session.context))
        options = {"plain": self.session.options, **drafts}
        ours = {name: partial(write, self.session, slot, each) for name, each in options.items()}
        kinds = [case.kind for case in cases]
        return compare(ours | libraries, cases, self.session.device, kinds)


def compare(
    ways: Mapping[str, Callable[[Any], Written]],
    inputs: Sequence[Any],
    device: torch.device,
    kinds: Sequence[str] = (),
) -> list[Row]:
    """Return a row for each way, with its speed-up over the way "plain" on the same inputs, in all
    and by the ``kinds`` of the inputs, where they have any. "repeated" is the share of repeated
    four-grams in the plain texts, since repetition flatters drafts. "equal" counts the texts that
    equal the plain ones.
    """
    runs = take_turns(ways, inputs, device)
    written = {name: [each for each, _ in own] for name, own in runs.items()}
    seconds = {
        name: [
            max(took if each.seconds is None else each.seconds, LEAST_SECONDS) for each, took in own
        ]
        for name, own in runs.items()
    }
    share = repetition([text for each in written["plain"] for text in each.texts])
    columns = [*dict.fromkeys(filter(None, kinds))]
    rows = []
    for name, own in written.items():
        statistics = Statistics()
        for round in chain.from_iterable(each.rounds for each in own):
            statistics.add(round)
        lengths = [sum(map(len, each.texts)) for each in own]
        equal = [one.texts == two.texts for one, two in zip(own, written["plain"], strict=True)]
        speedups = [*map(truediv, seconds["plain"], seconds[name])]
        of_kinds = {
            column: median(compress(speedups, [kind == column for kind in kinds]))
            for column in columns
        }
        rows.append(
            {
                "decoder": name,
                "tokens/s": spread(map(truediv, lengths, seconds[name])),
                "speed-up": spread(speedups),
                "repeated": share,
                "accepted": statistics.acceptance_rate,
                "a round": statistics.tokens_per_round or None,
                "equal": f"{sum(equal)}/{len(equal)}",
                "kinds": columns,
                "tokens": lengths,
                "rounds": [len(each.rounds) for each in own],
                "seconds": seconds[name],
                **of_kinds,
            }
        )
    return rows


def costs_section(bench: Bench) -> list[Row]:
    """Costs of verifications and of draft steps, in plain rounds, by the model's steps alone."""
    session = bench.session
    slot = session.new_slot(max(ROWS))
    drafters = {}
    for name, options in bench.drafts.items():
        if options.draft not in ("lookup", "auto") and not options.adaptive:
            sample = begin(session, options, Case([0], 1))
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
            Case(ids, STRUCTURED_TOKENS, turn, name, schema, reads_prompt=False)
            for turn in range(bench.turns)
        ]
    drafts = {name: bench.drafts[name] for name in ("low bits", "auto") if name in bench.drafts}
    return bench.measure({"forced": session.options.merged(FORCED), **drafts}, {}, cases)


def first_token_section(bench: Bench) -> list[Row]:
    """Time to the first token of a text of n tokens, prompt included.

    Of other libraries plain decoding is timed alone.
    """
    # a quick run has one turn
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
        for row in bench.measure({}, others, [Case([0] * (length - 1), 1)] * bench.turns)
    ]


def context_section(bench: Bench) -> list[Row]:
    """Texts after long prompts of n tokens, without prefill: speed-up over plain decoding.

    A prompt is a part of this project's documents, followed by a request to write something else.
    """
    drafts = {
        name: bench.drafts[name] for name in ("lookup", "low bits", "auto") if name in bench.drafts
    }
    if "low bits" in drafts:
        short_sighted = {"draft": "lowbit", "window": WINDOW}
        drafts[f"low bits, newest {WINDOW}"] = bench.session.options.merged(short_sighted)
    return [
        {"context": length} | row
        for length, cases in bench.contexts.items()
        for row in bench.measure(drafts, {}, cases)
    ]


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
    return [
        {"texts": at_once} | row
        for at_once in TOGETHER
        for row in compare(ways, [at_once] * bench.turns, session.device)
    ]


def write_together(
    session: Session, options: Options, cases: Sequence[Case], at_once: int
) -> Written:
    """Return the tokens of all texts but their first ones, written ``at_once`` at a time; and the
    seconds that these took.
    """

    def write(budget: int) -> list[list[int]]:
        samples = [begin(session, options, replace(case, count=budget)) for case in cases]
        for at in range(0, len(samples), at_once):
            session.finish_all(samples[at : at + at_once])
        return [sample.tokens[1:] for sample in samples]

    _, reading = timed(session.device, write, 1)
    texts, whole = timed(session.device, write, cases[0].count)
    return Written(texts, seconds=whole - reading)


def adaptive_section(bench: Bench) -> list[Row]:
    """Simulated speed-up by the cost of a draft step, for each draft length and the adaptive exit.

    The first early exit writes greedy texts in each way. Their rounds and drafted tokens have the
    cost of a draft step that is simulated; a verification is taken to cost a plain round.
    """
    first = next(options for options in bench.drafts.values() if options.draft == "exit")
    ways = {"adaptive exit": {"adaptive": True, "gamma": LONGEST_DRAFT}}
    ways |= {f"length {length}": {"gamma": length} for length in range(1, LONGEST_DRAFT + 1)}
    rows = []
    for name, given in ways.items():
        options = first.merged({"temperature": 0.0, **given})
        samples = [
            bench.session.finish(begin(bench.session, options, each)) for each in bench.cases
        ]
        tokens, rounds, drafted = (
            sum(getattr(sample.statistics, count) for sample in samples)
            for count in ("tokens", "rounds", "drafted")
        )
        rows += [
            {"decoder": name, "draft step": cost, "speed-up": tokens / (rounds + cost * drafted)}
            for cost in STEP_COSTS
        ]
    return rows


DEFAULT = ("costs", "speed", "first-token")
# In the order in which they are measured, with their panels of the picture
SECTIONS: dict[str, tuple[Callable[[Bench], list[Row]], Panel]] = {
    "costs": (costs_section, Panel("Costs of steps", "plain rounds", "step")),
    "speed": (speed_section, Panel("Speed-up over plain decoding", "speed-up", "decoder")),
    "first-token": (
        first_token_section,
        Panel("Time to the first token", "tokens", "ms", "decoder"),
    ),
    "structured": (
        structured_section,
        Panel("Speed-up under JSON schemas", "speed-up", "decoder"),
    ),
    "context": (
        context_section,
        Panel("Speed-up after long prompts", "context", "speed-up", "decoder"),
    ),
    "together": (together_section, Panel("Texts written together", "texts", "tokens/s", "decoder")),
    "adaptive": (
        adaptive_section,
        Panel(
            "Simulated speed-up by the cost of a draft step", "draft step", "speed-up", "decoder"
        ),
    ),
}
