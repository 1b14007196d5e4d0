"""Sections of the benchmark, each of which measures one table.

A new one is a function, its name and the title of its table in ``SECTIONS``, and its panel in
``picture.PANELS``. Knows nothing of command lines and screens.

The way of a number: a section gives its cases and drafts to ``Bench.measure``. Each draft becomes a
way to write a case. ``compare`` lets the ways take turns, under the clock of ``timing``, and
``row_of`` makes a row of the table from the texts and seconds of a way.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, cycle, islice
from pathlib import Path
from statistics import median
from typing import Any

import torch

from app.common.files import read_json
from app.common.table import Row
from app.drafts import kind_of, strategy_of
from app.offers import WINDOW
from app.options import Options
from app.plan_file import LONGEST_DRAFT
from app.session import Session
from benchmark.steps import ROWS, measure_steps
from benchmark.timing import spread, take_turns, timed
from benchmark.ways import (
    AUTO,
    DRAFT_MODEL,
    LOOKUP,
    LOW_BITS,
    PLAIN,
    Case,
    Way,
    Written,
    begin,
    write,
)
from decoding.rounds import Statistics
from model.errors import InputError
from search.texts import PROMPTS, after_documents
from training.corpus.stories import repetition

LENGTHS = (64, 256, 1024, 2048, 4096, 8192)  # of texts whose first token is timed
QUICK_LENGTHS = 3  # of these in a quick run
SCHEMAS = Path(__file__).with_name("schemas.json")
STRUCTURED_TOKENS = 256  # of the longest text under a schema
# drafts nothing but the tokens that a schema forces
FORCED = {"draft": f"{Path(__file__).with_name('forced.py')}:Forced", "gamma": 15}
TOGETHER = (1, 2, 4, 8, 16)  # texts at a time
STEP_COSTS = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8)  # simulated, in plain rounds
TURNS = 3  # but "costs" has its own number, and the many texts of "speed" have one each


@dataclass
class Bench:
    """Input of every section: a session that decodes plainly, the cases of the section "speed", the
    options of each draft, and the ways of other libraries, plainly and with drafts of theirs.

    Each input has this number of ``turns``, but in "costs" and "speed". ``lengths`` are those of
    the texts whose first token is timed, ``contexts`` the numbers of tokens before the requests of
    the section "context".
    """

    session: Session
    cases: Sequence[Case]
    drafts: dict[str, Options]
    libraries: dict[str, Way]
    their_drafts: dict[str, Way]
    turns: int
    lengths: Sequence[int]
    contexts: Sequence[int]

    def measure(
        self, drafts: dict[str, Options], libraries: dict[str, Way], cases: Sequence[Case]
    ) -> list[Row]:
        """Return the rows of plain decoding, of drafts and of libraries.

        Raises InputError for a prompt that is too long, before any of these cases is timed.
        """
        session = self.session
        slot = session.new_slot(
            max(begin(session, session.options, case).source.longest for case in cases)
        )
        ours = {
            name: partial(write, session, slot, options)
            for name, options in {PLAIN: session.options, **drafts}.items()
        }
        return compare(ours | libraries, cases, session.device, [case.kind for case in cases])


def compare(
    ways: Mapping[str, Callable[[Any], Written]],
    inputs: Sequence[Any],
    device: torch.device,
    kinds: Sequence[str] = (),
) -> list[Row]:
    """Return a row for each way, with its speed-up over the way ``PLAIN`` on the same inputs, in
    all and by the ``kinds`` of the inputs, where they have any.

    Raises InputError where the texts are too short to be timed.
    """
    runs = {
        name: [
            replace(written, seconds=took) if written.seconds is None else written
            for written, took in own
        ]
        for name, own in take_turns(ways, inputs, device).items()
    }
    if any(written.seconds <= 0 for written in chain(*runs.values())):
        raise InputError("the texts are too short to be timed: raise --max-new-tokens")
    return [{"decoder": name} | row_of(own, runs[PLAIN], kinds) for name, own in runs.items()]


def row_of(own: Sequence[Written], plain: Sequence[Written], kinds: Sequence[str]) -> Row:
    """Return what a way's own texts and their seconds tell, beside the plain ones.

    "repeated" is the share of repeated four-grams in the plain texts, since repetition flatters
    drafts. "equal" counts the texts that equal the plain ones.
    """
    pairs = [*zip(plain, own, strict=True)]
    lengths = [sum(map(len, written.texts)) for written in own]
    seconds = [written.seconds for written in own]
    speedups = [before.seconds / written.seconds for before, written in pairs]
    columns = [*dict.fromkeys(kind for kind in kinds if kind)]
    statistics = Statistics()
    for round in chain(*(written.rounds for written in own)):
        statistics.add(round)
    return {
        "tokens/s": spread(count / each for count, each in zip(lengths, seconds, strict=True)),
        "speed-up": spread(speedups),
        "repeated": repetition([*chain(*(written.texts for written in plain))]),
        "accepted": statistics.acceptance_rate,
        "a round": statistics.tokens_per_round or None,
        "equal": f"{sum(before.texts == written.texts for before, written in pairs)}/{len(own)}",
        # lists are for the picture and the JSON, not the table
        "kinds": columns,
        "tokens": lengths,
        "rounds": [len(written.rounds) for written in own],
        "seconds": seconds,
    } | {
        column: median(each for each, kind in zip(speedups, kinds, strict=True) if kind == column)
        for column in columns
    }


def costs_section(bench: Bench) -> list[Row]:
    """Return the costs of verifications, and of the steps of drafts by a model.

    The kinds that may be adaptive are those by a model, and an adaptive draft has the same steps.
    """
    session = bench.session
    slot = session.new_slot(max(ROWS))
    drafters = {
        name: strategy_of(
            session, begin(session, options, Case([0], 1)), slot, session.model
        ).drafter
        for name, options in bench.drafts.items()
        if "adaptive" in kind_of(options.draft).options and not options.adaptive
    }
    return [*chain(*measure_steps(session.model, slot.cache, drafters))]


def speed_section(bench: Bench) -> list[Row]:
    """Return the speeds of the bench's own cases, in each way."""
    return bench.measure(bench.drafts, bench.libraries | bench.their_drafts, bench.cases)


def structured_section(bench: Bench) -> list[Row]:
    """Return the speeds of texts under JSON schemas.

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
    drafts = {name: bench.drafts[name] for name in (LOW_BITS, AUTO) if name in bench.drafts}
    return bench.measure({"forced": session.options.merged(FORCED), **drafts}, {}, cases)


def first_token_section(bench: Bench) -> list[Row]:
    """Return the seconds to the first token of texts of several lengths.

    Of other libraries plain decoding is timed alone.
    """
    return [
        {
            "decoder": row["decoder"],
            "tokens": length,
            "ms": spread(1e3 * each for each in row["seconds"]),
            "speed-up": row["speed-up"],
        }
        for length in bench.lengths
        if length <= bench.session.context
        for row in bench.measure({}, bench.libraries, [Case([0] * (length - 1), 1)] * bench.turns)
    ]


def context_section(bench: Bench) -> list[Row]:
    """Return the speeds of texts after long prompts.

    A prompt is a part of this project's documents, followed by a request to write something else.
    """
    session = bench.session
    drafts = {LOOKUP: bench.drafts[LOOKUP], AUTO: bench.drafts[AUTO]}
    if low_bits := bench.drafts.get(LOW_BITS):
        short_sighted = low_bits.merged({"window": WINDOW})
        drafts |= {LOW_BITS: low_bits, f"{LOW_BITS}, newest {WINDOW}": short_sighted}
    rows = []
    for length in bench.contexts:
        prompts = after_documents(session.tokenizer, PROMPTS["story"][: bench.turns], length)
        cases = [
            Case(session.encode(prompt), session.options.max_new_tokens, turn, reads_prompt=False)
            for turn, prompt in enumerate(prompts)
        ]
        rows += [{"context": length} | row for row in bench.measure(drafts, {}, cases)]
    return rows


def together_section(bench: Bench) -> list[Row]:
    """Return the speeds of texts that are written several at a time.

    Always the same 16 texts, without the time until their first tokens. Beside auto drafts the
    draft model, else low bits, else the first draft. "equal" counts the turns in which all texts
    equal those written plainly, which are equal for every n.
    """
    session = bench.session
    draft = next(name for name in (DRAFT_MODEL, LOW_BITS, *bench.drafts) if name in bench.drafts)
    options = {PLAIN: session.options} | {name: bench.drafts[name] for name in (draft, AUTO)}
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
    """Return all tokens after the first of each text, and the seconds they took: the time of whole
    texts less that of texts of one token. Short texts may give a negative difference.

    The texts are written ``at_once`` at a time.
    """

    def write_up_to(budget: int) -> list[list[int]]:
        samples = [begin(session, options, replace(case, count=budget)) for case in cases]
        for at in range(0, len(samples), at_once):
            session.finish_all(samples[at : at + at_once])
        return [sample.tokens[1:] for sample in samples]

    _, reading = timed(session.device, write_up_to, 1)
    texts, whole = timed(session.device, write_up_to, cases[0].count)
    return Written(texts, seconds=whole - reading)


def adaptive_section(bench: Bench) -> list[Row]:
    """Return the speed-ups that follow from simulated costs of a draft step.

    The first early exit writes greedy texts in each way. Their rounds and drafted tokens have the
    cost of a draft step that is simulated; a verification is taken to cost a plain round.
    """
    first = next(options for options in bench.drafts.values() if options.draft == "exit")
    lengths = {
        "adaptive exit": {"adaptive": True, "gamma": LONGEST_DRAFT},
        **{f"length {length}": {"gamma": length} for length in range(1, LONGEST_DRAFT + 1)},
    }
    rows = []
    for name, given in lengths.items():
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
# The sections that use an option, where others do not
USED_BY = {
    "--against": ("speed", "first-token"),
    "--prompts": ("speed", "adaptive", "together"),
}
# Titles of their tables and functions, in the order in which they are measured
SECTIONS: dict[str, tuple[str, Callable[[Bench], list[Row]]]] = {
    "costs": (
        "Costs of verifications and of draft steps, in plain rounds, by the model's steps alone.",
        costs_section,
    ),
    "speed": (
        "Texts, prefill included: medians over all prompts (lowest-highest), and by kind of"
        " prompt.",
        speed_section,
    ),
    "first-token": (
        "Time to the first token of a text of n tokens, prompt included.",
        first_token_section,
    ),
    "structured": (
        "Texts under JSON schemas, without prefill: speed-up over plain constrained decoding.",
        structured_section,
    ),
    "context": (
        "Texts after long prompts of n tokens, without prefill: speed-up over plain decoding.",
        context_section,
    ),
    "adaptive": (
        "Simulated speed-up by the cost of a draft step, for each draft length and the adaptive"
        " exit.",
        adaptive_section,
    ),
    "together": (
        "Texts written n at a time: tokens per second of all, and the speed-up of drafts.",
        together_section,
    ),
}
