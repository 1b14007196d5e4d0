"""Bar that shows how much of a walk over paths is done. Knows nothing of what is walked."""

import sys
from collections.abc import Hashable, Iterable, Iterator

from rich.console import Console
from rich.progress import Progress


def with_bar(found: Iterable[tuple[Hashable, float]]) -> Iterator[tuple[Hashable, float]]:
    """Return the same results with their probabilities, whose sum a bar shows on a terminal."""
    with Progress(
        console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()
    ) as bar:
        task = bar.add_task("every outcome of every draw", total=1.0)
        for result, weight in found:
            yield result, weight
            bar.advance(task, weight)
