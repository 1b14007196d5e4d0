"""Moving picture of a run: an SVG in which a text is written twice, plainly and speculatively, in
the rhythm that was measured.

``Lane`` lays the tokens of a text out: in lines and columns of characters, and in seconds of
decoding. The template ``moving.svg`` draws them, in pixels, and in percent of the animation's
period. CSS alone animates it, so that it plays in an ``<img>``. Each piece of text is an element
that appears at one moment and may disappear at a later one. Each period begins with the end of the
run, which is also shown where nothing can move; then both texts vanish and are written again.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from jinja2 import Environment
from rich.cells import cell_len
from rich.text import Text

from app.characters import Labels, new_decoder, visible
from app.writer import Sample
from decoding.rounds import Round

TEMPLATE = Path(__file__).with_name("moving.svg")
MOST_TOKENS = 64  # of a text that are shown: of more the picture would be high, and a large file
PAUSE = 3.0  # seconds in which the finished texts are shown, before they vanish and after the run
SHORTEST = 10.0  # seconds: a run that was faster is shown in slow motion
SLOWER = (1, 2, 5, 10, 20, 50, 100)  # times that slow motion may be slower than the run
LEAST_DRAFTING = 0.2  # share of a round's time in which its draft appears
COLUMNS = 84  # of a line
OVERHANG = 5  # columns more for the end of a word


@dataclass
class Piece:
    """Text of a token that begins at a line and column; ``kind`` is "drafted", "accepted",
    "rejected" or "own", the target's.

    It appears at ``begin`` and, unless ``end`` is None, disappears then, in seconds of decoding.
    """

    text: str
    kind: str
    line: int
    column: int
    begin: float
    end: float | None = None

    @property
    def width(self) -> int:
        """Columns that are drawn."""
        return min(cell_len(self.text.rstrip()), COLUMNS)

    @property
    def moment(self) -> str:
        """Name of the keyframes by which the piece appears and disappears."""
        times = [f"{1e6 * time:.0f}" for time in (self.begin, self.end) if time is not None]
        return "-".join(["at", *times])


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

    def __init__(self, sample: Sample, verifying: float, labels: Labels) -> None:
        """``verifying``: seconds of a round that its draft does not take."""
        self.labels = labels
        self.decoder = new_decoder()
        self.pieces: list[Piece] = []
        self.kept = [Piece("", "own", 0, 0, 0.0)]  # of the text, after an empty one
        self.rejected: list[Piece] = []  # of the last round that has any
        began = 0.0
        for round, ended in sample.timeline:
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


def cut(text: str) -> str:
    """The text, cut to the width of a line."""
    shown = Text(text)
    shown.truncate(COLUMNS, overflow="ellipsis")
    return shown.plain


def render_picture(title: str, plain: Sample, drafted: Sample, labels: Labels) -> str:
    """The picture of a text that was written plainly, and ``drafted``."""
    # To verify a draft is counted as a plain round, the rest of its round as drafting.
    step = plain.seconds / len(plain.rounds)
    above = Lane(plain, step, labels)
    below = Lane(drafted, step, labels)
    last = max(piece.begin for piece in above.pieces + below.pieces)
    slower = next((times for times in SLOWER if times * last >= SHORTEST), SLOWER[-1])
    environment = Environment(autoescape=True, trim_blocks=True)
    environment.filters["cut"] = cut
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    return template.render(
        title=title,
        draft=drafted.draft,
        plain=above,
        drafted=below,
        plain_speed=plain.speed,
        speed=drafted.speed,
        tokens=max(drafted.statistics.tokens, plain.statistics.tokens),
        most_tokens=MOST_TOKENS,
        pause=PAUSE,
        slower=slower,
        period=round(slower * last + 2 * PAUSE, 3),
    )
