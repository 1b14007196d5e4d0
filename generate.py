"""Write text with a language model, speculatively: ``python generate.py "PROMPT"``."""

if __name__ == "__main__":  # before anything that takes long to import
    from app.common.command_line import start

    start()

import os
import sys

from app.common.command_line import run_command, say
from app.options import Options, parse
from app.output import comparison, print_json, write_samples
from app.prompt import Prompt, read_prompt
from app.sample import Sample
from app.session import Session, load
from app.terminal import converse
from model.errors import explaining


def run(options: Options) -> None:
    """Load the model, and serve, converse or write as the options ask."""
    session = Session(options)
    if options.serve is not None:
        with explaining(
            "--serve needs more: pip install pydantic sse-starlette starlette uvicorn",
            (ModuleNotFoundError,),
        ):
            from app.server.network import Server
        Server(session).serve_until_stopped()
    elif options.interactive:
        converse(session)
    elif options.dry_run:
        is_given = options.prompt is not None or options.prompt_file is not None
        # An empty standard input, as of a job without a terminal, is no prompt.
        text = read_prompt(options) if is_given or not sys.stdin.isatty() else ""
        print(session.check_memory(session.encode(text) if is_given or text.strip() else []))
    else:
        write(session)


def write(session: Session) -> None:
    """Write the samples that the options ask for, and compare them."""
    options = session.options
    ids = session.encode(read_prompt(options))
    session.check_memory(ids)
    seeded = options.seeded()
    samples = [session.begin(ids, seeded, number) for number in range(options.num_samples)]
    if options.compare or session.device.type == "cuda":
        session.warm_up(ids)
    try:
        write_samples(session, samples)
        if options.compare:
            say(comparison(session, samples[0]))
    finally:  # the JSON of all that was written, also after Ctrl-C or an error
        if options.json:
            print_json(samples)


def generate(model: str, prompt: Prompt, **options: object) -> Sample:
    """Return one text of a model: ``load`` and ``Session.write`` in one call."""
    return load(model, **options).write(prompt)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line, in one process or on one rank of several; returns its exit status."""
    if os.environ.get("WORLD_SIZE", "1") not in ("0", "1"):
        from app.processes import run_on_ranks

        return run_on_ranks(lambda: parse(arguments), write)
    return run_command(lambda: run(parse(arguments)))


if __name__ == "__main__":
    sys.exit(main())
