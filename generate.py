"""Write text with a Llama or Gemma-2 checkpoint, speculatively or not: ``python generate.py "PROMPT"``."""

from __future__ import annotations

if __name__ == "__main__":  # before anything that takes long to import
    from weights.cli.start import start

    start()

import argparse
import json
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from decoding.policies import Policy
from decoding.run.chooser import DRAFTERS, Drafting, Setting, choose
from decoding.run.compare import comparison
from decoding.run.options import TextOptions
from decoding.run.together import Conductor, Task
from decoding.run.writer import Interrupted, Reader, Sample, Writer
from decoding.serve import serve
from decoding.show.labels import Labels
from decoding.show.page import Heading, Recording, write_page
from decoding.show.report import as_json, describe, sampling_in_words
from decoding.show.streaming import TextStream
from decoding.show.trace import PAUSE, LiveTrace, TraceConsole
from decoding.text import Text
from decoding.verify import COUPLINGS, Coupling
from model import Decoder, InputError
from model.clock import now
from model.fast import accelerate
from weights.cli.command_line import OneLineParser, run_command, say
from weights.cli.device import pick_device
from weights.cli.files import check_place, check_utf8
from weights.cli.prompt import check_prompt, encode_prompt, read_prompt
from weights.load import DTYPES, load_model, read_config, stored_dtype
from weights.memory import check_fits, estimate, free_bytes
from weights.names import model_folder
from weights.tokenizer import Tokenizer

MOST_TOGETHER = 16  # samples written at once
COUPLING = "race (default with --seed or several samples): a seed means a text; ratio: accepts more"


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = OneLineParser(prog="generate.py", description=__doc__)
    parser.add_argument("prompt", nargs="?", help="the prompt, or give --prompt-file")
    parser.add_argument("--prompt-file", metavar="F", help="read the prompt from a file (-: standard input)")
    parser.add_argument("--model", default="smollm2-135m-instruct", help="a folder, or a name under weights/")
    parser.add_argument("--chat", action=argparse.BooleanOptionalAction, help="default: if the model has a template")
    parser.add_argument("--system", metavar="S", help="system message of the chat")
    draft = parser.add_argument_group("drafting")
    draft.add_argument("--draft", default="auto", metavar="KIND", help=f"{', '.join(DRAFTERS)}, or FILE.py:Class")
    draft.add_argument("--plan", type=Path, metavar="FILE", help="which sublayers --draft skip leaves out")
    draft.add_argument("--exit-layer", type=int, metavar="E", help="layers that --draft exit runs (default: half)")
    draft.add_argument("--bits", type=int, metavar="B", help="lowbit, exit, skip: draft with weights in 4, 6 or 8 bits")
    draft.add_argument("--draft-model", metavar="DIR", help="the model of --draft model")
    draft.add_argument("--gamma", type=int, metavar="N", help="tokens drafted per round (default: measured, else 4)")
    draft.add_argument("--adaptive", action=argparse.BooleanOptionalAction, help="Draft & Verify's adaptive exit")
    draft.add_argument("--min-target-confidence", type=float, metavar="X", help="draft only while the target is sure")
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument("--max-new-tokens", type=int, default=256, metavar="N", help="the budget of a text")
    sampling.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0: greedy")
    sampling.add_argument("--top-k", type=int, default=0, metavar="K", help="0: off")
    sampling.add_argument("--top-p", type=float, default=1.0, metavar="P", help="1: off")
    sampling.add_argument("--min-p", type=float, default=0.0, metavar="P", help="0: off")
    sampling.add_argument("--repetition-penalty", type=float, default=1.0, metavar="R", help="1: off")
    sampling.add_argument("--seed", type=int, metavar="S", help="(default: random)")
    sampling.add_argument("--coupling", choices=list(COUPLINGS), help=COUPLING)
    sampling.add_argument(
        "--num-samples", type=int, default=1, metavar="N", help="texts to write, together if they can be"
    )
    sampling.add_argument("--stop", action="append", default=[], metavar="STR", help="end the text before STR")
    sampling.add_argument("--ban", action="append", default=[], metavar="WORD", help="never write WORD")
    machine = parser.add_argument_group("machine and output")
    machine.add_argument("--device", help="cpu, cuda, cuda:1 ... (default: cuda if there is one)")
    machine.add_argument("--dtype", choices=[*DTYPES, "auto"], default="auto", help="auto: the checkpoint's")
    machine.add_argument(
        "--no-compile", action="store_true", help="decode with the readable blocks, several times slower"
    )
    machine.add_argument("--dry-run", action="store_true", help="say what memory it would take, and load nothing")
    machine.add_argument("--compare", action="store_true", help="also decode plainly; print speed-up and equality")
    machine.add_argument("--trace", action="store_true", help="show drafted tokens, and which were accepted, in colour")
    machine.add_argument("--html", type=Path, metavar="FILE", help="write a page that replays the run round by round")
    machine.add_argument("--json", action="store_true", help="one JSON object a sample on standard output")
    machine.add_argument("--serve", metavar="[HOST:]PORT", help="a page and OpenAI's endpoints, until Ctrl-C")
    return parser.parse_args(arguments)


class Request:
    """What is asked for, checked before any weight is read."""

    def __init__(self, options: argparse.Namespace) -> None:
        for value in (options.system or "", *options.stop, *options.ban):
            check_utf8("text of --system, --stop or --ban", value)
        self.draft, self.params, self.rules, self.coupling = TextOptions.of(options)
        if options.num_samples < 1:
            raise InputError(f"--num-samples must be at least 1, found {options.num_samples}")
        if options.html is not None:
            check_place(options.html)
        self.repeat_with = str(self.coupling) if options.temperature else ""
        self.folder, self.device = model_folder(options.model), pick_device(options.device)
        self.config = read_config(self.folder)
        self.dtype = DTYPES.get(options.dtype) or stored_dtype(self.folder)
        self.options, self.prompt, self.ids = options, "", [0]
        if not (options.dry_run or options.serve) or options.prompt is not None or options.prompt_file is not None:
            self.tokenizer = Tokenizer(self.folder)
            self.rules = replace(self.rules, eos_ids=self.tokenizer.eos_ids)
            self.prompt = read_prompt(options.prompt, options.prompt_file)
            self.ids = encode_prompt(self.tokenizer, self.prompt, chat=options.chat, system=options.system)
            check_prompt(self.ids, self.config, self.folder)

    @property
    def capacity(self) -> int:
        """Positions that prompt and output may take; without a prompt the model's whole context."""
        wanted = len(self.ids) + self.rules.max_new_tokens if self.prompt else self.config.max_positions
        return min(wanted, self.config.max_positions)

    def needs(self) -> dict[str, Any]:
        """What ``estimate`` asks for besides the config."""
        needs = {"dtype": self.dtype, "positions": self.capacity, "prompt": len(self.ids)}
        return needs | self.draft.needs(self.folder, self.config)

    def places(self, model: Decoder) -> int:
        """The number of samples written at once: as many as fit into memory; 1 where times are to be compared."""
        if self.options.num_samples == 1 or self.options.compare:
            return 1
        if not hasattr(model, "together"):
            say("samples are written one after another: here a step takes one text")
            return 1
        memory = estimate(self.config, **self.needs(), fast_on=self.device)
        room = free_bytes(self.device) // (memory.cache + memory.workspace)
        return max(1, min(self.options.num_samples, MOST_TOGETHER, room))


class Output:
    """Where pieces of text, the trace, the page and the JSON go."""

    def __init__(self, request: Request, drafting: Drafting) -> None:
        self.request, self.drafting = request, drafting
        self.file = sys.stderr if request.options.json else sys.stdout
        control = {token: name for name, token in request.tokenizer.vocabulary.special.items()}
        self.labels = Labels(request.tokenizer.token_bytes, control)
        self.samples: list[Sample] = []
        self.recordings: list[Recording] = []

    def write(self, writer: Writer, coupling: Coupling) -> Sample:
        """Write one sample, showing it as it comes, and its line of statistics."""
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

        The first is shown as it comes, another when it and those before it have ended. Raises the first error, when
        all have ended.
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
        """Shows a text, or its trace, as its rounds are read."""
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
        """The line of statistics of a text that has been shown."""
        print(describe(sample, self.drafting.name, self.request.repeat_with), file=sys.stderr)
        self.samples.append(sample)

    def close(self) -> None:
        """Print the JSON and write the page, of what is complete."""
        request, options = self.request, self.request.options
        if options.json:
            for sample in self.samples:
                print(json.dumps(as_json(sample, request.repeat_with), ensure_ascii=False))
        if options.html and (recordings := [each for each in self.recordings if each.rounds]):
            sampling = sampling_in_words(request.params, request.repeat_with)
            facts = [("Model", request.folder.name), ("Draft", self.drafting.name), ("Sampling", sampling)]
            rule = {"greedy": request.params.temperature == 0, "race": request.coupling.name == "race"}
            heading = Heading(request.prompt, facts, self.drafting.plan, **rule)
            write_page(options.html, heading, recordings)
            say(f"the run round by round: {options.html}")


def run(options: argparse.Namespace) -> int:
    """Check, load, write; returns the exit status."""
    request = Request(options)
    if options.serve:
        return serve(options.serve, request)
    fits = check_fits(estimate(request.config, **request.needs(), fast_on=request.device), request.device)
    if options.dry_run:
        print(fits)
        return 0
    model = load_model(request.folder, request.dtype, request.device)
    return write(request, accelerate(model, not options.no_compile))


def write(request: Request, model: Decoder) -> int:
    """Choose how to draft, and write the samples; returns the exit status."""
    options = request.options
    setting = Setting(request.folder, model, request.tokenizer, request.params, request.capacity)
    setting = replace(setting, coupling=request.coupling.name, prompt=len(request.ids))
    drafting = choose(request.draft, setting)
    output = Output(request, drafting)
    couplings = [replace(request.coupling, sample=number) for number in range(options.num_samples)]
    try:
        if (places := request.places(model)) > 1:
            return 130 if output.write_together(Conductor(model, request.capacity, places), couplings) else 0
        writer = Writer(model, request.capacity, request.tokenizer.token_bytes)
        writer.begin(request.ids)
        if options.compare or request.device.type == "cuda":
            writer.warm_up(drafting, request.params)
        for coupling in couplings:
            sample = output.write(writer, coupling)
            if sample.interrupted:
                return 130
            if options.compare and coupling is couplings[0]:
                exact = ":" not in options.draft  # a class of the user's may misstate its q
                said = comparison(writer, sample, request.params, request.coupling, exact=exact)
                print(said, file=sys.stderr)
    finally:  # what is complete is printed, whatever ends the rest
        output.close()
    return 0


def main(arguments: list[str] | None = None) -> int:
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        from decoding.run.ranks import run_on_ranks

        return run_on_ranks(lambda: parse_arguments(arguments), Request, write)
    return run_command(lambda: run(parse_arguments(arguments)))


if __name__ == "__main__":
    sys.exit(main())
