"""Local server of one model: OpenAI's endpoints and a live page. Begin with ``app``, its routes.

``requests`` reads JSON, ``worker`` writes texts, several at once, and sends them to clients.
"""

from decoding.run.options import Request
from model import InputError


def serve(command_line: Request) -> None:
    """Serve the model until Ctrl-C or SIGTERM. Raises InputError where that is not possible."""
    try:
        from decoding.serve.app import Server
    except ModuleNotFoundError as error:
        install = "run make serve, or pip install -r requirements-serve.txt"
        raise InputError(f"--serve needs {error.name}: {install}") from None
    Server(command_line).serve_until_stopped()
