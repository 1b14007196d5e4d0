"""Local server of one model: OpenAI's endpoints and a live page. Begin with ``app``, its routes.

``requests`` reads JSON, ``worker`` writes texts, several at once, and sends them to clients.
"""

from cli.files import explaining
from decoding.run.options import Request


def serve(command_line: Request) -> None:
    """Serve the model until Ctrl-C or SIGTERM. Raises InputError where that is not possible."""
    install = "--serve needs more: run make serve, or pip install -r requirements-serve.txt"
    with explaining(install, (ModuleNotFoundError,)):
        from decoding.serve.app import Server
    Server(command_line).serve_until_stopped()
