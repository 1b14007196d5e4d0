"""Local server of one model: OpenAI's endpoints and a live page. Begin with ``app``, its routes.

``requests`` reads JSON, ``worker`` writes texts, several at once, ``messages`` sends them to clients.
"""

from decoding.run.options import Request
from model import InputError

WITHOUT_EFFECT = ("prompt", "prompt_file", "dry_run", "compare", "trace", "html", "json")


def serve(address: str, command_line: Request) -> int:
    """Serve the model at ``[HOST:]PORT`` until Ctrl-C or SIGTERM. Raises InputError where that is not possible."""
    for name in WITHOUT_EFFECT:
        if getattr(command_line.options, name):
            raise InputError(f"{name.replace('_', '-')} has no effect with --serve: leave it out")
    try:
        from decoding.serve.app import run
    except ModuleNotFoundError as error:
        install = "run make serve, or pip install -r requirements-serve.txt"
        raise InputError(f"--serve needs {error.name}: {install}") from None
    run(address, command_line)
    return 0
