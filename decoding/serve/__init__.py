"""A local server: OpenAI's endpoints and a live page, of one model. Needs two libraries that nothing else here does."""

from __future__ import annotations

from importlib.util import find_spec

from decoding.serve.orders import Defaults
from model import InputError

__all__ = ["Defaults", "serve"]


def serve(address: str, defaults: Defaults) -> int:
    """Serve the model at ``[HOST:]PORT`` until Ctrl-C, or SIGTERM. Raises InputError where that is not possible."""
    if missing := [name for name in ("starlette", "uvicorn") if find_spec(name) is None]:
        raise InputError(
            f"--serve needs {' and '.join(missing)}: run make serve, or pip install -r requirements-serve.txt"
        )
    from decoding.serve.app import run

    run(address, defaults)
    return 0
