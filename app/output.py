"""Output of ``generate.py``: samples as text or trace, statistics, page and JSON."""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from textwrap import shorten
from typing import Any

from rich.console import Console

from app.characters import TextStream, visible
from app.command_line import say
from app.files import write_text
from app.moving import render_picture
from app.page import Recording, heading, render_page
from app.session import Session
from app.trace import PAUSE, LiveTrace
from app.writer import Reader, Sample, Task
from decoding.text import Text


class Output:
    """Output of a request's samples: text to standard output, which --json has for itself."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.request = session.request
        self.file = sys.stderr if self.request.options.json else sys.stdout
        prompts = [self.request.ids] * self.request.options.num_samples
        self.tasks = session.tasks(prompts, self.request.asked)
        self.samples: list[Sample] = []  # that have been shown
        self.recordings: list[Recording] = []  # of all tasks, for the page
        if self.request.options.html:
            for task in self.tasks:
                self.recordings.append(Recording(task.params, session.labels))
                task.readers.append(self.recordings[-1].add)
                task.observer = self.recordings[-1].observe

    def write(self, tasks: Sequence[Task], write_all: Callable[[Sequence[Task]], float]) -> None:
        """Write samples at once, by a function that returns the seconds this took.

        The first is shown while it is written, the others after it.
        """
        first, *others = tasks
        try:
            with self.shown(first.sample) as show:
                first.readers.append(show)
                seconds = write_all(tasks)
        finally:
            for task in others:
                if not task.sample.rounds:
                    continue  # Ctrl-C or an error came before anything of it was written
                with self.shown(task.sample, pause=0) as show:
                    for round, at in task.sample.timeline:
                        show(round, at)
        if others:
            tokens = sum(task.sample.statistics.tokens for task in tasks)
            say(f"{len(tasks)} texts together: {tokens / seconds:.1f} tokens/s in all")

    @contextmanager
    def shown(self, sample: Sample, pause: float = PAUSE) -> Iterator[Reader]:
        """A reader of rounds that shows a sample, after a line that separates it from the one
        before. Statistics follow it, unless an error came before its first round.
        """
        if self.samples:
            print("-" * 20, file=self.file)
        try:
            with self.view(sample.source, pause) as show:
                yield show
        except BaseException as error:
            if sample.rounds or isinstance(error, KeyboardInterrupt):
                self.end(sample)
            raise
        self.end(sample)

    @contextmanager
    def view(self, text: Text, pause: float) -> Iterator[Reader]:
        """A reader of rounds that shows the text, or its trace."""
        if self.request.options.trace:
            console = Console(file=self.file)
            labels = self.session.labels
            with LiveTrace(console, labels, pause=pause, grammar=bool(text.grammar)) as trace:
                yield trace.add
            return
        stream = TextStream(text)
        show = partial(print, end="", file=self.file, flush=True)
        try:
            yield lambda round, seconds: show(stream.pull())
        finally:
            show(stream.pull(at_end=True) + "\n")

    def end(self, sample: Sample) -> None:
        """Print the line of statistics of a sample that has been shown."""
        line = in_words(sample)
        say(f"{line}; {self.request.repeat_with}" if self.request.repeat_with else line)
        wanted = self.request.options.max_new_tokens
        if sample.finish == "length" and len(sample.tokens) < wanted:
            say(
                f"the context of {self.request.context} tokens is full, so the text has"
                f" {len(sample.tokens)} of the {wanted} asked for"
            )
        self.samples.append(sample)

    def close(self) -> None:
        """Print the JSON and write the page of the samples so far. Raises InputError."""
        request = self.request
        if request.options.json:
            for sample in self.samples:
                text = {"text": sample.text, "tokens": sample.tokens}
                statistics = as_json(sample, request.repeat_with)
                print(json.dumps(text | statistics, ensure_ascii=False))
        samples = [each.sample for each in self.recordings if each.sample["rounds"]]
        if samples:
            facts = heading(request.prompt, request.name, self.tasks[0])
            write_text(request.options.html, render_page(facts, samples))
            say(f"the run round by round: {request.options.html}")

    def write_picture(self, plain: Sample) -> None:
        """Write the moving picture of the sample beside the ``plain`` one. Raises InputError when
        it cannot be written.
        """
        request = self.request
        title = f"{request.name}: {shorten(visible(request.prompt), 60, placeholder=' …')}"
        picture = render_picture(title, plain, self.tasks[0].sample, self.session.labels)
        write_text(request.options.svg, picture)
        say(f"the run as a moving picture: {request.options.svg}")


def in_words(sample: Sample) -> str:
    """The statistics of a sample in one line."""
    told = sample.statistics
    line = f"{told.tokens} tokens in {sample.seconds:.2f} s: {sample.speed:.1f} tokens/s"
    line += f"; {sample.draft}"
    if told.drafted:
        line += f": {told.acceptance_rate:.0%} of {told.drafted} drafted tokens accepted"
    line += f", {told.tokens_per_round:.2f} tokens a round"
    return f"{line}; {sample.trouble}" if sample.trouble else line


def as_json(sample: Sample, repeat_with: str) -> dict[str, Any]:
    """Statistics for --json and for clients, with the options that repeat a sampled text."""
    return {
        "prompt_tokens": sample.source.prompt_length,
        "finish_reason": sample.finish,
        "seconds": sample.seconds,
        "tokens_per_second": sample.speed,
        "rounds": sample.statistics.rounds,
        "drafted": sample.statistics.drafted,
        "accepted": sample.statistics.accepted,
        "acceptance_rate": sample.statistics.acceptance_rate,
        "tokens_per_round": sample.statistics.tokens_per_round,
        "accepted_histogram": sample.statistics.histogram,
        "repeat_with": repeat_with,
    }
