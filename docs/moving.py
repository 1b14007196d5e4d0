"""Draw docs/round.svg anew: a text written plainly and with drafts, at measured speeds.

``python -m docs.moving`` writes both texts on this machine. CSS alone animates the picture, so that
it plays in an ``<img>``: each period begins with the finished comparison. Knows nothing of how a
text is written.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path

from app.characters import Labels, visible
from app.common.files import write_text
from app.sample import Sample
from app.session import load

PICTURE = Path(__file__).with_name("round.svg")
MODEL = "smollm2-135m-instruct"
PROMPT = "What is photosynthesis?"
TOKENS = 64
COLUMNS = 84  # of a line, each of CELL pixels
CELL = 8.4
LINE = 22
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


@dataclass
class Piece:
    """Text of a token at a line and column, which appears at ``begin`` and, unless ``end`` is None,
    disappears then, in seconds of decoding.
    """

    text: str
    kind: str
    line: int
    column: int
    begin: float
    end: float | None = None


def pieces(sample: Sample, labels: Labels, step: float) -> Iterator[Piece]:
    """Yield the pieces of a text. Drafted tokens appear one by one where they would stand, before
    the ``step`` of the verification, and are judged at the end of their round.
    """
    line = column = 0
    began = 0.0
    for round, ended in sample.timeline:
        drafting = max(ended - began - step, 0.2 * (ended - began))
        place = line, column
        for number, (token, verdict) in enumerate(round.verdicts(), start=1):
            text = visible(labels.spelled([token]).decode(errors="replace"))
            if verdict == "own":
                line, column = place
            if column + len(text) > COLUMNS:
                line, column = line + 1, 0
            if verdict != "own":
                drawn = began + drafting * number / len(round.drafted)
                yield Piece(text, "drafted", line, column, drawn, ended)
            if verdict in ("accepted", "own"):
                yield Piece(text, verdict, line, column, ended)
                place = line + ("↵" in text), 0 if "↵" in text else column + len(text)
            line, column = (line, column + len(text)) if verdict != "own" else place
        began = ended


def drawn(samples: list[Sample], labels: Labels) -> str:
    """Return the picture of a plain text and a drafted one."""
    step = samples[0].seconds / len(samples[0].rounds)
    lanes = [list(pieces(sample, labels, step)) for sample in samples]
    period = 2 * PAUSE + SLOWER * max(sample.seconds for sample in samples)
    keyframes: dict[str, str] = {}
    body = []
    top = 62
    for name, sample, lane in zip(("plain", "drafts"), samples, lanes, strict=True):
        way = name if name == sample.draft else f"{name}: {sample.draft}"
        said = f"{way}, {sample.speed:.0f} tokens/s"
        body.append(f'<text class="muted" x="24" y="{top}">{escape(said)}</text><g class="{name}">')
        for piece in lane:
            times = [piece.begin, *([] if piece.end is None else [piece.end])]
            shares = [100 * (PAUSE + SLOWER * each) / period for each in times]
            moment = "at-" + "-".join(f"{share:.2f}".replace(".", "_") for share in shares)
            start = "0%{opacity:1}" if piece.end is None else "0%{opacity:0}"
            gone = f"{100 * PAUSE / period:.2f}%{{opacity:0}}"
            ends = [f"{share:.2f}%{{opacity:{1 - n}}}" for n, share in enumerate(shares)]
            keyframes[moment] = f"@keyframes {moment}{{{start}{gone}{''.join(ends)}}}"
            x, y = 24 + CELL * piece.column, top + LINE * (1 + piece.line)
            hidden = ' opacity="0"' if piece.end is not None else ""
            style = f"animation-name:{moment};animation-duration:{period:.2f}s"
            shown = f'class="{piece.kind}" x="{x:.0f}" y="{y}"{hidden} style="{style}"'
            body.append(f'<text xml:space="preserve" {shown}>{escape(piece.text)}</text>')
        body.append("</g>")
        top += LINE * (2 + max(piece.line for piece in lane)) + 14
    title = f"{MODEL}: {PROMPT} {samples[1].speed / samples[0].speed:.2f} times plain decoding"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" role="img" width="800" height="{top}"'
    style = f"<style>{STYLE}{''.join(keyframes.values())}</style>"
    first = f'<rect width="100%" height="100%" rx="8"/><text x="24" y="30">{escape(title)}</text>'
    return f"{head}><title>{escape(title)}</title>{style}{first}{''.join(body)}</svg>\n"


def main() -> None:
    """Write both texts, and the picture."""
    session = load(MODEL, max_new_tokens=TOKENS)
    session.warm_up(session.encode(PROMPT))
    samples = [session.write(PROMPT, draft=draft) for draft in ("none", "lowbit")]
    write_text(PICTURE, drawn(samples, session.labels))


if __name__ == "__main__":
    main()
