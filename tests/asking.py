"""A process that asks the hub for models by name: ``python -m tests.asking``.

Each line that it reads is JSON of a name and a revision, each line that it prints JSON of the
folder or the error.
"""

import json
import sys
from unittest import mock

from model import InputError
from weights.load import model_folder


def answer(name: str, revision: str | None) -> dict[str, str]:
    try:
        return {"folder": str(model_folder(name, revision))}
    except InputError as error:
        return {"error": str(error)}


if __name__ == "__main__":
    with mock.patch("time.sleep"):  # the pauses between tries
        for line in sys.stdin:
            print(json.dumps(answer(*json.loads(line))), flush=True)
