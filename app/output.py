"""Output of ``generate.py``: samples as text or trace, statistics, comparison and JSON.

Chooses no draft and runs no step itself.
"""

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, TextIO

from rich.console import Console

from app.characters import Labels, TextStream
from app.common.command_line import say
from app.sample import Sample
from app.session import Session
from app.trace import LiveTrace
from decoding.rounds import Round
from decoding.text import Text, common_prefix

PAUSE = 0.06  # seconds for which a trace shows a draft before its verdict
# Two ways to write a text are compared in turns: at least this many, and more while all of them
# took less than these seconds. In fewer tokens noise is larger than the difference.
TURNS = 3
MOST_TURNS = 20
FEW_SECONDS = 1.0
FEW_TOKENS = 48


def write_samples(session: Session, samples: Sequence[Sample]) -> None:
    """Write samples and show them: one while it is written, several when all are."""
    if len(samples) == 1:
        show(session, samples[0], session.rounds(samples[0]))
        return
    try:
        session.finish_all(samples)
    finally:  # all that was written, also after Ctrl-C or an error
        for sample in samples:
            show(session, sample, sample.rounds, pause=0)


def show(session: Session, sample: Sample, rounds: Iterable[Round], pause: float = PAUSE) -> None:
    """Show the rounds of a sample, then its statistics; nothing of one without a round.

    Text goes to standard output, unless --json has that for itself.
    """
    options = session.options
    file = sys.stderr if options.json else sys.stdout
    labels = session.labels if options.trace else None
    rounds = iter(rounds)
    first = next(rounds, None)
    if first is None:
        return
    if sample.rule.sample:  # another one came before
        print("-" * 20, file=file)
    try:
        with view(sample.source, labels, file, pause) as add:
            for round in chain([first], rounds):
                add(round)
    finally:
        say("; ".join(filter(None, (statistics_line(sample), sample.repeat_with))))
    wanted = options.max_new_tokens
    if sample.finish == "length" and len(sample.tokens) < wanted:
        say(
            f"the context of {session.context} tokens is full, so the text has"
            f" {len(sample.tokens)} of the {wanted} asked for"
        )


def print_json(samples: Sequence[Sample]) -> None:
    """Print a JSON object for each sample that has a round."""
    for sample in samples:
        if sample.rounds:
            print(json.dumps({"text": sample.text, "tokens": sample.tokens, **as_json(sample)}))


@contextmanager
def view(
    text: Text, labels: Labels | None, file: TextIO, pause: float = PAUSE
) -> Iterator[Callable[[Round], None]]:
    """Return a context with a function that shows a round: its text or, given ``labels``, its
    trace.
    """
    if labels:
        with LiveTrace(Console(file=file), labels, pause=pause) as trace:
            yield trace.add
        return
    stream = TextStream(text)
    try:
        yield lambda round: print(stream.pull(), end="", file=file, flush=True)
    finally:
        print(stream.pull(at_end=True), file=file, flush=True)


def statistics_line(sample: Sample) -> str:
    """Return the statistics of a sample in one line."""
    statistics = sample.statistics
    draft = sample.draft
    if statistics.drafted:
        draft += (
            f": {statistics.acceptance_rate:.0%} of {statistics.drafted} drafted tokens accepted"
        )
    elif not sample.is_plain:
        draft += ": nothing drafted"
    trouble = f"; {sample.trouble}" if sample.trouble else ""
    return (
        f"{statistics.tokens} tokens in {sample.seconds:.2f} s: {sample.speed:.1f} tokens/s;"
        f" {draft}, {statistics.tokens_per_round:.2f} tokens a round; prompt read in"
        f" {sample.prompt_seconds:.2f} s, first token after {sample.first_token_seconds:.2f} s"
        f"{trouble}"
    )


def as_json(sample: Sample) -> dict[str, Any]:
    """Return the statistics of a sample, for --json and for clients."""
    return {
        "prompt_tokens": sample.prompt_tokens,
        "finish_reason": sample.finish,
        "prompt_seconds": sample.prompt_seconds,
        "first_token_seconds": sample.first_token_seconds,
        "seconds": sample.seconds,
        "tokens_per_second": sample.speed,
        "rounds": sample.statistics.rounds,
        "drafted": sample.statistics.drafted,
        "accepted": sample.statistics.accepted,
        "acceptance_rate": sample.statistics.acceptance_rate,
        "acceptance_by_position": sample.statistics.acceptance_by_position,
        "tokens_per_round": sample.statistics.tokens_per_round,
        "accepted_histogram": sample.statistics.histogram,
        "repeat_with": sample.repeat_with,
    }


def comparison(session: Session, sample: Sample) -> str:
    """Return a line with the median speed-up over plain decoding, the speeds of its turn, the range
    of all turns, and whether texts are equal.

    The ``sample`` has been written; its text is written anew in turns with a plain one.
    """
    if sample.is_plain and not sample.statistics.drafted:
        return "both ways are plain decoding: there is no speed-up to measure"
    prompt = sample.source.tokens[: sample.source.prompt_length]
    ways = [sample.options, sample.options.merged({"draft": "none"})]

    def turn() -> list[Sample]:
        begun = [session.begin(prompt, way, sample.rule.sample) for way in ways]
        return [session.finish(each) for each in begun]

    turns = [turn()]
    texts = compared(session, sample, turns[0][1])
    tokens = sample.statistics.tokens
    if tokens < FEW_TOKENS:
        return f"{texts}; too short to compare speeds: {tokens} tokens"
    while len(turns) < TURNS or (len(turns) < MOST_TURNS and seconds_of(turns) < FEW_SECONDS):
        turns.append(turn())
    turns.sort(key=ratio_of)
    slowest, median, fastest = turns[0], turns[(len(turns) - 1) // 2], turns[-1]
    return (
        f"{ratio_of(median):.2f} times plain decoding, {median[0].speed:.1f} against"
        f" {median[1].speed:.1f} tokens/s without the prompt (the median of {len(turns)} turns,"
        f" {ratio_of(slowest):.2f}-{ratio_of(fastest):.2f}), {texts}"
    )


def compared(session: Session, sample: Sample, plain: Sample) -> str:
    """Return in words whether a text and a plain one are equal, as they must be where no draft can
    change them.
    """
    if not sample.options.draws_alike:
        return "another text of the same law, if the drafter states its q truly"
    if sample.tokens == plain.tokens:
        return "same text"
    why = session.model.abilities.why_rows_vary or "a defect: here steps do not depend on length"
    differing = common_prefix(sample.tokens, plain.tokens)
    return f"the texts differ from token {differing} on ({why})"


def ratio_of(turn: Sequence[Sample]) -> float:
    """Return how many times as fast as the second sample of a turn the first was."""
    return turn[0].speed / turn[1].speed


def seconds_of(turns: list[list[Sample]]) -> float:
    """Return the seconds of all turns."""
    return sum(sample.seconds for turn in turns for sample in turn)
