"""Draw docs/round.svg anew: a text written plainly and with drafts, at measured speeds.

``python -m docs.moving`` writes both texts on this machine. CSS alone animates the picture, so that
it plays in an ``<img>``: each period begins with the finished comparison. Knows nothing of how a
text is written.
"""

if __name__ == "__main__":  # before anything that takes long to import
    from app.common.command_line import start

    start()

import sys
from collections.abc import Iterator
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from app.characters import Labels, visible
from app.common.files import write_text
from app.common.parsers import script
from app.sample import Sample
from app.session import load

MODEL = "smollm2-135m-instruct"
PROMPT = "What is photosynthesis?"
COLUMNS = 84  # of a line
CHARACTER = 8.4  # pixels, as the next three
LINE = 22
MARGIN = 24
WIDTH = 800
PAUSE = 3.0  # seconds in which the finished texts are shown
SLOWER = 10  # times that the picture is slower than the run
STYLE = """
svg { --card: #fff; --ink: #22242a; --muted: #656a75; --drafted: #a86200; --accepted: #15803d;
  --rejected: #c8281e; --own: #1f4fc4 }
@media (prefers-color-scheme: dark) { svg { --card: #15171b; --ink: #e6e8ec; --muted: #9ba2ae;
  --drafted: #f0b04c; --accepted: #58d17c; --rejected: #ff7b70; --own: #8fb2ff } }
rect { fill: var(--card) }
text { font: 14px ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace; fill: var(--ink) }
.muted { fill: var(--muted) } .drafted { fill: var(--drafted) } .accepted { fill: var(--accepted) }
.rejected { fill: var(--rejected) } .own { fill: var(--own) } .plain .own { fill: var(--ink) }
g text { animation-timing-function: step-end; animation-iteration-count: infinite }
@media (prefers-reduced-motion: reduce) { g text { animation: none !important } }
"""


class Piece(NamedTuple):
    """Text of a token and its kind, line and column, the seconds of decoding at which it appears,
    and those at which it disappears, if it does.
    """

    text: str
    kind: str
    line: int
    column: int
    appears: float
    disappears: float | None = None


def pieces(sample: Sample, labels: Labels, step: float) -> Iterator[Piece]:
    """Yield the pieces of a text. Drafted tokens appear one by one where they would stand, before
    the ``step`` of the verification, and are judged at the end of their round.
    """
    kept = 0, 0  # line and column after the text
    for (_, began), (round, ended) in pairwise([(None, 0.0), *sample.timeline]):
        drafting = max(ended - began - step, 0.2 * (ended - began))
        after = kept
        for number, (token, verdict) in enumerate(round.verdicts(), start=1):
            text = visible(labels.spelled([token]).decode(errors="replace"))
            line, column = kept if verdict == "own" else after
            line, column = (line, column) if column + len(text) <= COLUMNS else (line + 1, 0)
            after = (line + 1, 0) if "↵" in text else (line, column + len(text))
            if verdict != "own":
                appears = began + drafting * number / len(round.drafted)
                yield Piece(text, "drafted", line, column, appears, ended)
            if verdict in ("accepted", "own"):
                yield Piece(text, verdict, line, column, ended)
                kept = after


def element(name: str, piece: Piece, top: float, period: float) -> str:
    """Return a piece of a text at height ``top`` with its animation, of a ``period`` in seconds.

    The period begins with the finished text, which is then taken away.
    """
    stays = int(piece.disappears is None)
    moments = [
        PAUSE + SLOWER * each for each in (piece.appears, piece.disappears) if each is not None
    ]
    frames = zip([0, PAUSE, *moments], (stays, 0, 1, 0), strict=False)
    shown = "".join(f"{100 * at / period:.2f}%{{opacity:{alpha}}}" for at, alpha in frames)
    return (
        f"<style>@keyframes {name}{{{shown}}}</style>"
        f'<text class="{piece.kind}" x="{MARGIN + CHARACTER * piece.column:.0f}"'
        f' y="{top + LINE * (1 + piece.line)}"'
        f' opacity="{stays}" style="animation-name:{name};animation-duration:{period:.2f}s"'
        f' xml:space="preserve">{escape(piece.text)}</text>'
    )


def picture(samples: list[Sample], labels: Labels) -> str:
    """Return the picture of a plain text and a drafted one."""
    period = 2 * PAUSE + SLOWER * max(sample.seconds for sample in samples)
    lanes = ""
    top = 62
    for name, sample in zip(("plain", "drafts"), samples, strict=True):
        said = f"{name}: {sample.draft}, {sample.speed:.0f} tokens/s".removeprefix("plain: ")
        lane = [*pieces(sample, labels, samples[0].seconds / len(samples[0].rounds))]
        drawn = (element(f"{name}-{at}", each, top, period) for at, each in enumerate(lane))
        lanes += (
            f'<text class="muted" x="{MARGIN}" y="{top}">{escape(said)}</text>'
            f'<g class="{name}">{"".join(drawn)}</g>'
        )
        top += LINE * (2 + max(piece.line for piece in lane)) + 14
    title = escape(
        f"{MODEL}: {PROMPT} {samples[1].speed / samples[0].speed:.2f} times plain decoding"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" width="{WIDTH}" height="{top}">'
        f'<title>{title}</title><style>{STYLE}</style><rect width="100%" height="100%" rx="8"/>'
        f'<text x="{MARGIN}" y="30">{title}</text>{lanes}</svg>\n'
    )


def draw(_: object) -> None:
    """Write both texts, and the picture."""
    session = load(MODEL, max_new_tokens=64)
    session.warm_up(session.encode(PROMPT))
    samples = [session.write(PROMPT, draft=draft) for draft in ("none", "lowbit")]
    write_text(Path(__file__).with_name("round.svg"), picture(samples, session.labels))


main = script(draw, {}, "python -m docs.moving", __doc__)


if __name__ == "__main__":
    sys.exit(main())
