"""Output of ``generate.py``: samples as text or trace, statistics, comparison and JSON.

Knows nothing of drafts and models.
"""

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from itertools import chain, islice
from typing import Any, TextIO

from rich.console import Console

from app.characters import Labels, TextStream
from app.common.command_line import say
from app.sample import Sample
from app.session import Session
from app.trace import PAUSE, LiveTrace
from decoding.rounds import Round
from decoding.text import Text, common_prefix

TURNS = 3  # a text is written both ways, one after the other, at least this often
MOST_TURNS = 20
# Below this number of tokens, or of seconds of all turns, noise is larger than the difference.
FEW_TOKENS = 48
FEW_SECONDS = 0.5
UNSTEADY = 2.0  # ratio of the largest speed-up to the smallest, from which a line warns


class Output:
    """Output of a command line's samples: text to standard output, which --json has for itself."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.labels = session.labels if session.options.trace else None
        self.file = sys.stderr if session.options.json else sys.stdout
        self.shown: list[Sample] = []

    def write(self, samples: list[Sample]) -> None:
        """Write samples, the first visibly, the others shown when all are written."""
        first, *others = samples
        try:
            with closing(self.session.rounds_of_all(samples)) as written:
                self.show(first, (round for sample, round in written if sample is first))
        finally:
            for sample in others:
                self.show(sample, sample.rounds, pause=0)

    def show(self, sample: Sample, rounds: Iterable[Round], pause: float = PAUSE) -> None:
        """Show the rounds of a sample, after a line that separates it from the one before.

        Nothing is printed of a sample without a round. Statistics follow the last.
        """
        rounds = iter(rounds)
        for first in islice(rounds, 1):
            if self.shown:
                print("-" * 20, file=self.file)
            try:
                with view(sample.source, self.labels, self.file, pause) as show:
                    for round in chain([first], rounds):
                        show(round)
            finally:
                self.end(sample)

    def end(self, sample: Sample) -> None:
        """Print the line of statistics of a sample that has been shown."""
        say("; ".join(filter(None, (statistics_line(sample), sample.options.repeat_with))))
        wanted = self.session.options.max_new_tokens
        if sample.finish == "length" and len(sample.tokens) < wanted:
            say(
                f"the context of {self.session.context} tokens is full, so the text has"
                f" {len(sample.tokens)} of the {wanted} asked for"
            )
        self.shown.append(sample)

    def close(self) -> None:
        """Print the JSON of the samples so far."""
        if self.session.options.json:
            for sample in self.shown:
                shown = {"text": sample.text, "tokens": sample.tokens, **as_json(sample)}
                print(json.dumps(shown))


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
        "repeat_with": sample.options.repeat_with,
    }


def comparison(session: Session, sample: Sample) -> str:
    """Return the median speed-up over plain decoding, with the speeds of its turn and the range of
    all, and whether texts are equal.

    The ``sample`` has been written; its text is written anew in turns with a plain one. In greedy
    decoding and under the race the two must be equal. Under the other rules they have the same law,
    if the drafter states its q truly.
    """
    if sample.is_plain and not sample.statistics.drafted:
        return "[both ways are plain decoding: there is no speed-up to measure]"
    prompt = sample.source.tokens[: sample.source.prompt_length]
    tokens = sample.statistics.tokens
    most = TURNS if tokens < FEW_TOKENS else MOST_TURNS
    ways = [sample.options, sample.options.merged({"draft": "none"})]
    turns: list[list[Sample]] = []
    while len(turns) < TURNS or (len(turns) < most and shortest(turns) < FEW_SECONDS):
        begun = [session.begin(prompt, way, sample.rule.sample) for way in ways]
        turns.append([session.finish(each) for each in begun])
    texts = "same text"
    plainly = turns[0][1].tokens
    if not sample.options.draws_alike:
        texts = "another text of the same law, if the drafter states its q truly"
    elif sample.tokens != plainly:
        why = (
            session.model.abilities.why_rows_vary or "a defect: here steps do not depend on length"
        )
        texts = f"the texts differ from token {common_prefix(sample.tokens, plainly)} on ({why})"
    if tokens < FEW_TOKENS:
        return f"[{texts}; too short to compare speeds: {tokens} tokens]"
    turns.sort(key=ratio_of)
    ratios = [*map(ratio_of, turns)]
    drafted, plain = turns[(len(turns) - 1) // 2]
    spread = f"the median of {len(turns)} turns, {ratios[0]:.2f}-{ratios[-1]:.2f}"
    if ratios[-1] > UNSTEADY * ratios[0]:
        spread += "; the turns differ much: compare again on an idle machine"
    return (
        f"[{ratio_of((drafted, plain)):.2f} times plain decoding, {drafted.speed:.1f} against"
        f" {plain.speed:.1f} tokens/s without the prompt ({spread}), {texts}]"
    )


def ratio_of(turn: Sequence[Sample]) -> float:
    """Return how many times as fast as the second sample of a turn the first was."""
    return turn[0].speed / turn[1].speed


def shortest(turns: list[list[Sample]]) -> float:
    """Return the seconds of all turns, of the way that takes less."""
    return min(sum(sample.seconds for sample in way) for way in zip(*turns, strict=True))
