"""Write text with a Llama or Gemma-2 checkpoint, speculatively or not: ``python generate.py "PROMPT"``."""

if __name__ == "__main__":  # before anything that takes long to import
    from weights.cli.start import start

    start()

import argparse
import os
import sys
from dataclasses import replace
from pathlib import Path

from decoding.run.chooser import DRAFTERS, choose
from decoding.run.compare import comparison
from decoding.run.options import Request
from decoding.run.together import Scheduler
from decoding.run.writer import Sample, Writer
from decoding.serve import serve
from decoding.show.output import Output
from decoding.verify import COUPLINGS
from model import Decoder, InputError
from model.fast import accelerate
from weights.cli.command_line import OneLineParser, run_command
from weights.load import DTYPES, load_model
from weights.memory import check_fits, estimate

NOT_FROM_PYTHON = {"num_samples", "dry_run", "compare", "trace", "html", "json", "serve", "together"}
COUPLING = "race (default with --seed or several samples): the seed determines the text; ratio: accepts more"


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = OneLineParser(prog="generate.py", description=__doc__)
    parser.add_argument("prompt", nargs="?", help="the prompt, or give --prompt-file")
    parser.add_argument("--prompt-file", metavar="F", help="read the prompt from a file (-: standard input)")
    parser.add_argument("--model", default="smollm2-135m-instruct", help="a folder, or a name under weights/")
    parser.add_argument("--chat", action=argparse.BooleanOptionalAction, help="as a chat (default: if the model can)")
    parser.add_argument("--system", metavar="S", help="system message of the chat")
    draft = parser.add_argument_group("drafting")
    draft.add_argument("--draft", default="auto", metavar="KIND", help=f"{', '.join(DRAFTERS)}, or FILE.py:Class")
    draft.add_argument("--plan", type=Path, metavar="FILE", help="layer plan of --draft skip or auto")
    draft.add_argument("--exit-layer", type=int, metavar="E", help="layers that --draft exit runs (default: half)")
    draft.add_argument("--bits", type=int, metavar="B", help="lowbit, exit, skip: draft with weights in 4, 6 or 8 bits")
    draft.add_argument("--draft-model", metavar="DIR", help="the model of --draft model")
    draft.add_argument("--gamma", type=int, metavar="N", help="tokens drafted per round (default: measured, else 4)")
    draft.add_argument("--adaptive", action=argparse.BooleanOptionalAction, help="end a draft after an unsure token")
    draft.add_argument("--min-target-confidence", type=float, metavar="X", help="no draft after a less sure token")
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument("--max-new-tokens", type=int, default=256, metavar="N", help="most tokens of a text")
    sampling.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0: greedy")
    sampling.add_argument("--top-k", type=int, default=0, metavar="K", help="0: off")
    sampling.add_argument("--top-p", type=float, default=1.0, metavar="P", help="1: off")
    sampling.add_argument("--min-p", type=float, default=0.0, metavar="P", help="0: off")
    sampling.add_argument("--repetition-penalty", type=float, default=1.0, metavar="R", help="1: off")
    sampling.add_argument("--seed", type=int, metavar="S", help="(default: random)")
    sampling.add_argument("--coupling", choices=list(COUPLINGS), help=COUPLING)
    sampling.add_argument("--num-samples", type=int, default=1, metavar="N", help="texts, together where possible")
    sampling.add_argument("--stop", action="append", default=[], metavar="STR", help="end the text before STR")
    sampling.add_argument("--ban", action="append", default=[], metavar="WORD", help="never write WORD")
    machine = parser.add_argument_group("machine and output")
    machine.add_argument("--device", help="cpu, cuda, cuda:1 ... (default: cuda if there is one)")
    machine.add_argument("--dtype", choices=[*DTYPES, "auto"], default="auto", help="auto: the checkpoint's")
    machine.add_argument("--no-compile", action="store_true", help="use the readable blocks, several times slower")
    machine.add_argument("--dry-run", action="store_true", help="print the memory it would take, and load nothing")
    machine.add_argument("--compare", action="store_true", help="write both ways in turns; print speed-up and equality")
    machine.add_argument("--trace", action="store_true", help="show drafted tokens and their verdicts, in colour")
    machine.add_argument("--html", type=Path, metavar="FILE", help="write a page that replays the run round by round")
    machine.add_argument("--json", action="store_true", help="one JSON object per sample on standard output")
    machine.add_argument("--serve", metavar="[HOST:]PORT", help="a page and OpenAI's endpoints, until Ctrl-C")
    machine.add_argument("--together", type=int, default=4, metavar="N", help="texts that --serve writes at once")
    return parser.parse_args(arguments)


def run(options: argparse.Namespace) -> int:
    """Check, load, write; returns the exit status."""
    request = Request(options)
    if options.serve:
        return serve(request)
    fits = check_fits(estimate(request.config, **request.needs(), fast_on=request.device), request.device)
    if options.dry_run:
        print(fits)
        return 0
    return write(request, load(request))


def load(request: Request) -> Decoder:
    """The request's model, with the fast steps of its device."""
    model = load_model(request.folder, request.dtype, request.device)
    return accelerate(model, not request.options.no_compile)


def write(request: Request, model: Decoder) -> int:
    """Choose a draft, and write the samples; returns the exit status."""
    options = request.options
    drafting = choose(request.draft, request.setting(model))
    output = Output(request, drafting)
    couplings = [replace(request.coupling, sample=number) for number in range(options.num_samples)]
    try:
        if (count := request.samples_together(model)) > 1:
            return 130 if output.write_together(Scheduler(model, request.capacity, count), couplings) else 0
        writer = Writer(model, request.capacity, request.tokenizer.token_bytes)
        writer.begin(request.ids)
        if options.compare or request.device.type == "cuda":
            writer.warm_up(drafting, request.params)
        for coupling in couplings:
            sample = output.write(writer, coupling)
            if sample.interrupted:
                return 130
            if options.compare and coupling is couplings[0]:
                exact = ":" not in options.draft  # a class of the user may misstate its q
                result = comparison(writer, sample, drafting, request.params, coupling, exact=exact)
                print(result, file=sys.stderr)
    finally:  # complete samples are printed, also after Ctrl-C or an error
        output.close()
    return 0


def generate(model: str, prompt: str, draft: str = "auto", **options: object) -> Sample:
    """A text with its statistics; ``options`` are the command line's, ``stop`` and ``ban`` lists. Raises InputError."""
    known = vars(parse_arguments([]))
    if unknown := options.keys() - (known.keys() - NOT_FROM_PYTHON):
        raise InputError(f"generate has no option {min(unknown)}")
    request = Request(argparse.Namespace(**known | {"model": model, "prompt": prompt, "draft": draft} | options))
    writer = Writer(load(request), request.capacity, request.tokenizer.token_bytes)
    writer.begin(request.ids)
    drafting = choose(request.draft, request.setting(writer.model))
    return writer.write(writer.new_text(request.rules), drafting, request.params, request.coupling)


def main(arguments: list[str] | None = None) -> int:
    """The command line, in one process or on one rank of several; returns its exit status."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        from decoding.run.ranks import run_on_ranks

        return run_on_ranks(lambda: parse_arguments(arguments), write)
    return run_command(lambda: run(parse_arguments(arguments)))


if __name__ == "__main__":
    sys.exit(main())
