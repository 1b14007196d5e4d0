"""Output of ``generate.py``: the samples as text or trace, their statistics, the page and the JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from decoding.policies import Policy
from decoding.run.chooser import Drafting
from decoding.run.options import Request
from decoding.run.together import Conductor, Task
from decoding.run.writer import Interrupted, Reader, Sample, Writer
from decoding.show.labels import Labels
from decoding.show.page import Heading, Recording, write_page
from decoding.show.report import as_json, describe
from decoding.show.streaming import TextStream
from decoding.show.trace import PAUSE, LiveTrace, TraceConsole
from decoding.text import Text
from decoding.verify import Coupling
from model.clock import now
from weights.cli.command_line import say


class Output:
    """Output of a request's samples. Text goes to standard output; with --json that is for JSON alone."""

    def __init__(self, request: Request, drafting: Drafting) -> None:
        self.request, self.drafting = request, drafting
        self.file = sys.stderr if request.options.json else sys.stdout
        self.labels = Labels.of(request.tokenizer)
        self.samples: list[Sample] = []
        self.recordings: list[Recording] = []

    def write(self, writer: Writer, coupling: Coupling) -> Sample:
        """Write one sample, shown while it is written, and its line of statistics."""
        text, recorded = writer.new_text(self.request.rules), self.record()
        with self.shown(text, recorded["policy"]) as read:
            recorded["readers"].append(read)
            try:
                sample = writer.write(text, self.drafting, self.request.params, coupling, **recorded)
            except Interrupted as stopped:
                sample = stopped.sample
        self.end(sample)
        return sample

    def write_together(self, conductor: Conductor, couplings: list[Coupling]) -> bool:
        """Write a sample of each coupling at once, shown in order; returns whether Ctrl-C ended them.

        The first is shown while it is written, another when it and those before it have ended. Raises the first error,
        when all have ended.
        """
        request, began, interrupted = self.request, now(self.request.device), False
        text = partial(Text, request.ids, request.rules, conductor.model, request.tokenizer.token_bytes)
        tasks = [Task(text(), self.drafting, request.params, each, **self.record()) for each in couplings]
        with ExitStack() as live:
            tasks[0].readers.append(live.enter_context(self.shown(tasks[0].text, tasks[0].policy)))

            def show_ended(_: Task | None = None) -> None:
                for task in tasks[len(self.samples) :]:
                    if task.sample is None:
                        return
                    if task is tasks[0]:
                        live.close()
                    else:
                        with self.shown(task.text, task.policy, pause=0) as read:
                            for round in task.sample.rounds:
                                read(round, task.sample.seconds)
                    self.end(task.sample)

            for task in tasks:
                task.on_end = show_ended
                conductor.submit(task)
            try:
                conductor.run()
            except KeyboardInterrupt:
                interrupted = True
                show_ended()
        for error in [task.error for task in tasks if task.error]:
            raise error
        seconds = now(request.device) - began - conductor.reading
        speed = sum(sample.statistics.tokens for sample in self.samples) / seconds
        print(f"[{len(self.samples)} texts together: {speed:.1f} tokens/s in all]", file=sys.stderr)
        return interrupted

    def record(self) -> dict[str, Any]:
        """A fresh policy, and the recording of a text under it for the page: arguments of ``Writer.write``."""
        recording = Recording(self.drafting.new_policy(), self.request.params, self.labels)
        self.recordings.append(recording)
        observer = recording.observe if self.request.options.html else None
        return {"policy": recording.policy, "readers": [recording.add], "observer": observer}

    @contextmanager
    def shown(self, text: Text, policy: Policy, pause: float = PAUSE) -> Iterator[Reader]:
        """A reader of rounds that shows the text, or its trace; a line separates it from the sample before."""
        if self.samples:
            print("-" * 20, file=self.file)
        if self.request.options.trace:
            with LiveTrace(TraceConsole(file=self.file), self.labels, policy, pause=pause) as live:
                yield live.add
            return
        stream, show = TextStream(text), partial(print, end="", file=self.file, flush=True)
        try:
            yield lambda round, seconds: show(stream.pull())
        finally:
            show(stream.flush() + "\n")

    def end(self, sample: Sample) -> None:
        """Print the line of statistics of a sample that has been shown."""
        print(describe(sample, self.drafting.name, self.request.repeat_with), file=sys.stderr)
        self.samples.append(sample)

    def close(self) -> None:
        """Print the JSON and write the page of the samples so far."""
        request, options = self.request, self.request.options
        if options.json:
            for sample in self.samples:
                print(json.dumps(as_json(sample, request.repeat_with), ensure_ascii=False))
        if options.html and (recordings := [each for each in self.recordings if each.rounds]):
            about = request.folder.name, self.drafting, request.params, request.coupling
            write_page(options.html, Heading.of(request.prompt, *about), recordings)
            say(f"the run round by round: {options.html}")
