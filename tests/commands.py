"""A command line in the process of the test: its status and its output."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass
class Outcome:
    """Status and output of a command."""

    status: int
    out: str
    err: str

    @property
    def objects(self) -> list[dict[str, Any]]:
        """Those of --json."""
        return [json.loads(line) for line in self.out.splitlines()]

    @property
    def result(self) -> dict[str, Any]:
        """The only object of a command that did its work."""
        assert self.status == 0 and len(self.objects) == 1, self.err
        return self.objects[0]

    @property
    def complaint(self) -> str:
        """The one line of a command that was refused."""
        assert (self.status, self.out) == (2, ""), self.err
        assert self.err.startswith("error: ") and self.err.count("\n") == 1, self.err
        return self.err


Run = Callable[..., Outcome]
