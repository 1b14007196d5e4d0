"""Local server of one model: OpenAI's endpoints and a live page. Begin with ``app``, its routes.

``requests`` reads JSON, ``worker`` writes texts in order, ``completions`` and ``live`` send them to clients.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from model import InputError

if TYPE_CHECKING:
    from decoding.run.options import Request

LIBRARIES = ("pydantic", "sse-starlette", "starlette", "uvicorn")
WITHOUT_EFFECT = ("prompt", "prompt_file", "dry_run", "compare", "trace", "html", "json")


def serve(address: str, command_line: Request) -> int:
    """Serve the model at ``[HOST:]PORT`` until Ctrl-C or SIGTERM. Raises InputError where that is not possible."""
    for name in WITHOUT_EFFECT:
        if getattr(command_line.options, name):
            option = "a prompt" if name == "prompt" else "--" + name.replace("_", "-")
            raise InputError(f"{option} has no effect with --serve: leave it out")
    if missing := [name for name in LIBRARIES if find_spec(name.replace("-", "_")) is None]:
        raise InputError(
            f"--serve needs {', '.join(missing)}: run make serve, or pip install -r requirements-serve.txt"
        )
    from decoding.serve.app import run

    run(address, command_line)
    return 0
