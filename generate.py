"""Write text with a language model, speculatively: ``python generate.py "PROMPT"``."""

if __name__ == "__main__":  # before anything that takes long to import
    from app.start import start

    start()

import argparse
import os
import sys

from app.chat import converse
from app.command_line import run_command
from app.compare import comparison
from app.files import explaining
from app.options import make_parser
from app.output import Output
from app.request import Request
from app.session import Session, load
from app.together import Scheduler
from app.writer import Sample
from weights.memory import check_fits


def run(options: argparse.Namespace) -> None:
    """Check, load, write."""
    request = Request(options)
    if options.dry_run:
        copies = request.optional_copies()
        print(check_fits(request.memory(), request.device, optional_copies=copies))
    elif options.serve:
        with explaining(
            "--serve needs more: run make serve, or pip install -r requirements-serve.txt",
            (ModuleNotFoundError,),
        ):
            from app.server.app import Server
        Server(request).serve_until_stopped()
    elif options.interactive:
        converse(Session(request))
    else:
        write(Session(request))


def write(session: Session) -> None:
    """Write the samples of the session's request, and all that it asks about them."""
    request = session.request
    options = request.options
    output = Output(session)
    first = output.tasks[0]
    is_shown_beside_plain = options.compare or options.svg
    slots = 1 if is_shown_beside_plain else session.slots(len(output.tasks), request.capacity)
    try:
        if slots > 1:
            scheduler = Scheduler(session.model, request.capacity, slots)
            output.write(output.tasks, scheduler.write_all)
            return
        writer = session.new_writer(request.capacity)
        writer.begin(request.ids)
        if is_shown_beside_plain or request.device.type == "cuda":
            writer.warm_up(first)
        for task in output.tasks:
            output.write([task], writer.write_all)
        if options.compare:
            print(comparison(writer, first), file=sys.stderr)
        if options.svg:
            output.write_picture(writer.again(first, writer.plain))
    finally:  # complete samples are printed, also after Ctrl-C or an error
        output.close()


def generate(model: str, prompt: str, **options: object) -> Sample:
    """One text of a model: ``load`` and ``Session.write`` in one call. Raises InputError."""
    return load(model, **options).write(prompt)


def main(arguments: list[str] | None = None) -> int:
    """The command line, in one process or on one rank of several; returns its exit status."""
    if os.environ.get("WORLD_SIZE", "1") not in ("0", "1"):
        from app.ranks import run_on_ranks

        return run_on_ranks(lambda: make_parser().parse_args(arguments), write)
    return run_command(lambda: run(make_parser().parse_args(arguments)))


if __name__ == "__main__":
    sys.exit(main())
