"""Progress of a proof on a terminal."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress


@contextmanager
def bar_of(title: str) -> Iterator[Callable[[float], None]]:
    """Return a bar on a terminal, which is called with the probability of each path of draws."""
    hidden = not sys.stderr.isatty()
    with Progress(console=Console(stderr=True), transient=True, disable=hidden) as bar:
        task = bar.add_task(title, total=1.0)
        yield lambda weight: bar.advance(task, weight)
