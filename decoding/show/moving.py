"""Moving picture of a run: an SVG in which a text is written twice, plainly and speculatively, in
the rhythm that was measured.

``Lane`` lays the tokens of a text out: in lines and columns of characters, and in seconds of
decoding. ``Canvas`` draws them: in pixels, and in percent of the animation's period. CSS alone
animates it, so that it plays in an ``<img>``. Each piece of text is an element that appears at one
moment and may disappear at a later one. Each period begins with the end of the run, which is also
shown where nothing can move; then both texts vanish and are written again.
"""

import codecs
from collections.abc import Sequence
from dataclasses import dataclass, replace
from xml.etree.ElementTree import Element, SubElement, indent, tostring

from rich.cells import cell_len
from rich.text import Text

from decoding.rounds import Round
from decoding.run.session import Labels, visible

# Rounds of a text, each with the seconds of decoding until its end.
Timeline = Sequence[tuple[Round, float]]

MOST_TOKENS = 64  # of a text that are shown: of more the picture would be high, and a large file
PAUSE = 3.0  # seconds in which the finished texts are shown, before they vanish and behind the run
SHORTEST = 10.0  # seconds: a run that was faster is shown in slow motion
SLOWER = (1, 2, 5, 10, 20, 50, 100)  # times that slow motion may be slower than the run
LEAST_DRAFTING = 0.2  # share of a round's time in which its draft appears
WIDTH = 800
MARGIN = 24
CELL = 8.4  # width of a character
COLUMNS = 84  # of a line
OVERHANG = 5  # columns more for the end of a word
PLAIN_LINE = 20  # from one line of text to the next
DRAFT_LINE = 27  # with room below for rejected tokens
DROP = 12  # from the text to rejected tokens
LEGEND = {
    "drafted": "drafted",
    "accepted": "accepted",
    "rejected": "rejected",
    "own": "the target's own token",
}
CSS = """
svg {
  --card: #fff; --line: #d4d7dc; --ink: #22242a; --muted: #656a75;
  --drafted: #a86200; --accepted: #15803d; --rejected: #c8281e; --own: #1f4fc4;
}
@media (prefers-color-scheme: dark) {
  svg {
    --card: #15171b; --line: #32363e; --ink: #e6e8ec; --muted: #9ba2ae;
    --drafted: #f0b04c; --accepted: #58d17c; --rejected: #ff7b70; --own: #8fb2ff;
  }
}
rect { fill: var(--card); stroke: var(--line) }
text { font: 14px ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace; fill: var(--ink) }
.title { font-weight: bold }
.muted { fill: var(--muted) }
.drafted { fill: var(--drafted) }
.accepted { fill: var(--accepted) }
.rejected { fill: var(--rejected); text-decoration: line-through }
.own { fill: var(--own); font-weight: bold }
.plain .own { fill: var(--ink); font-weight: normal }
@media (prefers-reduced-motion: reduce) { g text { animation: none !important } }
"""


@dataclass
class Piece:
    """Text of a token that begins at a line and column; ``kind`` is one of ``LEGEND``.

    It appears at ``begin`` and, unless ``end`` is None, disappears then, in seconds of decoding.
    """

    text: str
    kind: str
    line: int
    column: int
    begin: float
    end: float | None = None


def piece_after(last: Piece, text: str, kind: str, begin: float) -> Piece:
    """The piece of the next token, on the line of the ``last`` where it fits, else on a new one.

    A line break of the text is shown as a sign, and ends the line. Leading spaces are a distance
    inside a line, and are dropped at its beginning.
    """
    text = visible(text)
    start = last.column + cell_len(last.text)
    most = COLUMNS if text.startswith(" ") else COLUMNS + OVERHANG
    is_new_line = start + cell_len(text) > most or (last.kind != "rejected" and "↵" in last.text)
    shown = text.lstrip()
    column = start + len(text) - len(shown) if start and not is_new_line else 0
    return Piece(shown, kind, last.line + is_new_line, column, begin)


class Lane:
    """Layout of the first tokens of a text in time and place.

    Drafted tokens appear where they would stand in the text. When some are rejected, the target's
    token takes their place, and they are shown below it, until others are rejected.
    """

    def __init__(self, timeline: Timeline, verifying: float, labels: Labels) -> None:
        """``verifying``: seconds of a round that its draft does not take."""
        self.labels = labels
        self.decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.pieces: list[Piece] = []
        self.kept = [Piece("", "own", 0, 0, 0.0)]  # of the text, behind an empty one
        self.rejected: list[Piece] = []  # of the last round that has any
        began = 0.0
        for round, ended in timeline:
            self._add(round, began, ended, verifying)
            began = ended
            if len(self.kept) > MOST_TOKENS:
                break
        self.lines = 1 + max(piece.line for piece in self.pieces)

    def _add(self, round: Round, began: float, ended: float, verifying: float) -> None:
        """Place the tokens of a round. Each is judged at its end; before, the drafted ones appear
        one by one, each in the same time.
        """
        drafting = max(ended - began - verifying, LEAST_DRAFTING * (ended - began))
        rejected: list[Piece] = []
        for number, (token, verdict) in enumerate(round.verdicts(), 1):
            data = self.labels.spelled([token])
            if verdict in ("accepted", "own"):
                piece = piece_after(self.kept[-1], self.decoder.decode(data), verdict, ended)
                self.kept.append(piece)
            else:
                text = data.decode(errors="replace")
                piece = piece_after((rejected or self.kept)[-1], text, "rejected", ended)
                rejected.append(piece)
            self.pieces.append(piece)
            if verdict != "own":
                drawn = began + drafting * number / len(round.drafted)
                self.pieces.append(replace(piece, kind="drafted", begin=drawn, end=ended))
        for piece in self.kept[len(self.kept) - len(round.retracted) :]:
            piece.end = ended
            rejected.append(replace(piece, kind="rejected", begin=ended, end=None))
            self.pieces.append(rejected[-1])
            self.kept.pop()
            self.decoder.reset()
        if rejected:
            for piece in self.rejected:
                piece.end = ended
            self.rejected = rejected


class Canvas:
    """An SVG that repeats after ``period`` seconds, and is ``slower`` than the run."""

    def __init__(self, title: str, height: float, slower: int, period: float) -> None:
        self.percent = 100 * slower / period  # of the period, per second of the run
        self.begin = 100 * PAUSE / period  # of the run
        self.moments: dict[str, str] = {}  # keyframes: their name
        self.svg = Element(
            "svg",
            xmlns="http://www.w3.org/2000/svg",
            role="img",
            width=f"{WIDTH}",
            height=f"{height:g}",
            viewBox=f"0 0 {WIDTH} {height:g}",
        )
        SubElement(self.svg, "title").text = title
        self.style = SubElement(self.svg, "style")
        self.style.text = f"g text {{ animation: {period:g}s step-end infinite }}\n{CSS}"
        card = {"width": f"{WIDTH - 1}", "height": f"{height - 1:g}", "rx": "8", "fill": "#fff"}
        SubElement(self.svg, "rect", card, x=".5", y=".5")

    def write(self, text: str, kind: str, x: float, y: float, anchor: str = "start") -> None:
        """Write text that does not move, cut to the width of a line."""
        place = {"x": f"{x:g}", "y": f"{y:g}", "text-anchor": anchor}
        shown = Text(text)
        shown.truncate(COLUMNS, overflow="ellipsis")
        SubElement(self.svg, "text", place | {"class": kind}).text = shown.plain

    def draw(self, lane: Lane, kind: str, top: float, pitch: float) -> None:
        """Draw the pieces of a lane, whose lines begin at ``top``, one every ``pitch``."""
        group = SubElement(self.svg, "g", {"class": kind})
        for piece in lane.pieces:
            text = piece.text.rstrip()
            if not text:
                continue
            drop = DROP if piece.kind == "rejected" else 0
            attributes = {
                "x": f"{MARGIN + CELL * piece.column:.0f}",
                "y": f"{top + pitch * piece.line + drop:g}",
                # so wide in any font
                "textLength": f"{CELL * min(cell_len(text), COLUMNS):.0f}",
                "lengthAdjust": "spacingAndGlyphs",
                "class": piece.kind,
                "style": f"animation-name:{self.moment(piece)}",
            }
            if piece.end is not None:
                attributes["opacity"] = "0"  # where nothing can move
            SubElement(group, "text", attributes).text = text

    def moment(self, piece: Piece) -> str:
        """Name of the keyframes by which a piece appears and disappears."""
        begin = self.begin + self.percent * piece.begin
        frames = f"{begin:.2f}%{{opacity:1}}"
        if piece.end is None:
            frames = f"0%{{opacity:1}}{self.begin:.2f}%{{opacity:0}}{frames}"
        else:
            end = self.begin + self.percent * piece.end
            frames = f"0%{{opacity:0}}{frames}{end:.2f}%{{opacity:0}}"
        return self.moments.setdefault(frames, f"m{len(self.moments)}")

    def finish(self) -> str:
        """The whole file."""
        self.style.text += "".join(
            f"@keyframes {name}{{{frames}}}\n" for frames, name in self.moments.items()
        )
        indent(self.svg, space="")
        return tostring(self.svg, encoding="unicode")


def render_picture(
    title: str, plain: Timeline, drafted: Timeline, draft: str, labels: Labels
) -> str:
    """The picture of a text that was written plainly, and ``drafted`` by a draft of this name."""
    # To verify a draft is counted as a plain round, the rest of its round as drafting.
    step = plain[-1][1] / len(plain)
    above = Lane(plain, step, labels)
    below = Lane(drafted, step, labels)
    last = max(piece.begin for piece in above.pieces + below.pieces)
    slower = next((times for times in SLOWER if times * last >= SHORTEST), SLOWER[-1])
    top = 84  # below the title and the plain text's heading
    middle = top + PLAIN_LINE * above.lines
    below_top = middle + 58  # below the draft's heading of two lines
    bottom = below_top + DRAFT_LINE * below.lines
    right = WIDTH - MARGIN
    period = round(slower * last + 2 * PAUSE, 3)
    canvas = Canvas(
        f"{title}: plain decoding beside drafting by {draft}", bottom + 48, slower, period
    )
    canvas.write(title, "muted", MARGIN, 30)
    canvas.write("plain decoding: one token per step", "title", MARGIN, 60)
    canvas.write(f"{speed(plain):.1f} tokens/s", "title", right, 60, "end")
    canvas.draw(above, "plain", top, PLAIN_LINE)
    gain = f"{speed(drafted):.1f} tokens/s: {speed(drafted) / speed(plain):.2f} times plain"
    # A draft's name may be as long as a line, so the numbers stand below it.
    canvas.write(f"draft: {draft}", "title", MARGIN, middle + 14)
    canvas.write(gain, "title", right, middle + 34, "end")
    canvas.draw(below, "draft", below_top, DRAFT_LINE)
    x = float(MARGIN)
    for kind, meaning in LEGEND.items():
        canvas.write(meaning, kind, x, bottom + 12)
        x += CELL * (len(meaning) + 2)
    rhythm = "in real time" if slower == 1 else f"slowed down {slower} times"
    most = max(tokens_of(drafted), tokens_of(plain))
    part = f"; the first {MOST_TOKENS} of {most} tokens" if most > MOST_TOKENS else ""
    canvas.write(f"{rhythm}{part}", "muted", right, bottom + 32, "end")
    return canvas.finish()


def tokens_of(timeline: Timeline) -> int:
    """Number of tokens of the text."""
    return sum(len(round.emitted) - len(round.retracted) for round, _ in timeline)


def speed(timeline: Timeline) -> float:
    """Tokens per second of decoding."""
    return tokens_of(timeline) / timeline[-1][1]
