"""Write text with a checkpoint of Hugging Face, speculatively or not: ``python generate.py
"PROMPT"``.
"""

if __name__ == "__main__":  # before anything that takes long to import
    from cli.start import start

    start()

import argparse
import os
import sys
from dataclasses import replace

from cli.command_line import run_command
from decoding.run.arguments import checked, make_parser
from decoding.run.compare import comparison
from decoding.run.options import Request
from decoding.run.session import Session
from decoding.run.together import Scheduler
from decoding.run.writer import Sample
from decoding.serve import serve
from decoding.show.interactive import converse
from decoding.show.output import Output
from weights.kept import kept_in_words
from weights.memory import check_fits, estimate


def run(options: argparse.Namespace) -> int:
    """Check, load, write; returns the exit status."""
    request = Request(options)
    if options.interactive:
        return converse(Session(request))
    if options.serve:
        return serve(request)
    if options.dry_run:
        needs = estimate(request.config, **request.needs(), fast_on=request.device)
        print(check_fits(needs, request.device), kept_in_words(), sep="\n")
        return 0
    return write(request, Session(request))


def write(request: Request, session: Session) -> int:
    """Choose a draft, and write the samples; returns the exit status."""
    options = request.options
    drafting = session.draftings.of(request.draft, request.params)
    output = Output(request, drafting)
    couplings = [replace(request.coupling, sample=number) for number in range(options.num_samples)]
    slots = 1 if options.compare else session.slots(options.num_samples, request.capacity)
    try:
        if slots > 1:
            scheduler = Scheduler(session.model, request.capacity, slots)
            return 130 if output.write_together(scheduler, couplings) else 0
        writer = session.new_writer(request.capacity)
        writer.begin(request.ids)
        if options.compare or options.svg or request.device.type == "cuda":
            writer.warm_up(drafting, request.params, request.coupling)
        for coupling in couplings:
            sample = output.write(writer, coupling)
            if sample.interrupted:
                return 130
            if options.compare and coupling is couplings[0]:
                exact = ":" not in options.draft  # a class of the user may misstate its q
                result = comparison(writer, sample, drafting, request.params, coupling, exact=exact)
                print(result, file=sys.stderr)
        if options.svg:
            output.write_picture(writer, couplings[0])
    finally:  # complete samples are printed, also after Ctrl-C or an error
        output.close()
    return 0


def load(model: str = "smollm2-135m-instruct", **options: object) -> Session:
    """A loaded model, with the options of the command line: see ``Session``. Raises InputError."""
    known = checked({"model": model} | options, make_parser().parse_args([]))
    return Session(Request(known, needs_prompt=False))


def generate(model: str, prompt: str, **options: object) -> Sample:
    """One text of a model: ``load`` and ``Session.write`` in one call. Raises InputError."""
    return load(model, **options).write(prompt)


def main(arguments: list[str] | None = None) -> int:
    """The command line, in one process or on one rank of several; returns its exit status."""
    if os.environ.get("WORLD_SIZE", "1") not in ("0", "1"):
        from decoding.run.ranks import run_on_ranks

        return run_on_ranks(lambda: make_parser().parse_args(arguments), write)
    return run_command(lambda: run(make_parser().parse_args(arguments)))


if __name__ == "__main__":
    sys.exit(main())
