"""Draw docs/round.svg anew: a text written plainly and with drafts, at measured speeds.

``python -m docs.moving`` writes both texts on this machine. CSS alone animates the picture, so that
it plays in an ``<img>``: each period begins with the finished comparison. Knows nothing of how a
text is written.
"""

from collections.abc import Callable, Iterator
from html import escape
from itertools import pairwise
from pathlib import Path

from app.characters import Labels, visible
from app.common.files import write_text
from app.sample import Sample
from app.session import load

MODEL = "smollm2-135m-instruct"
PROMPT = "What is photosynthesis?"
COLUMNS = 84  # of a line
CHARACTER = 8.4  # pixels, as the next two
LINE = 22
MARGIN = 24
PAUSE = 3.0  # seconds in which the finished texts are shown
SLOWER = 10  # times that the picture is slower than the run
# Text, kind, place, and the shares of the period at which it changes, as ``piece`` takes them
Token = tuple[str, str, int, float, float]
STYLE = """
svg { --card: #fff; --ink: #22242a; --muted: #656a75; --drafted: #a86200; --accepted: #15803d;
  --own: #1f4fc4 }
@media (prefers-color-scheme: dark) { svg { --card: #15171b; --ink: #e6e8ec; --muted: #9ba2ae;
  --drafted: #f0b04c; --accepted: #58d17c; --own: #8fb2ff } }
rect { fill: var(--card) }
text { font: 14px ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace; fill: var(--ink) }
.muted { fill: var(--muted) } .drafted { fill: var(--drafted) } .accepted { fill: var(--accepted) }
.own { fill: var(--own) } .plain .own { fill: var(--ink) }
g text { animation: var(--period) step-end infinite }
@media (prefers-reduced-motion: reduce) { g text { animation: none !important } }
"""


def picture(plain: Sample, drafted: Sample, labels: Labels) -> str:
    """Return the picture of a plain text and a drafted one."""
    period = 2 * PAUSE + SLOWER * max(plain.seconds, drafted.seconds)

    def when(seconds: float) -> float:
        """Return the share of the period at which a moment of the run is shown."""
        return (PAUSE + SLOWER * seconds) / period

    lanes = ""
    top = 62
    for name, label, sample in (("plain", "", plain), ("drafts", "drafts: ", drafted)):
        tokens = [*lane(sample, labels, plain.seconds / len(plain.rounds), when)]
        lanes += (
            f'<g class="{name}" transform="translate({MARGIN} {top})"><text class="muted">'
            f"{escape(f'{label}{sample.draft}, {sample.speed:.0f} tokens/s')}</text>"
            f"{''.join(piece(*token) for token in tokens)}</g>"
        )
        lines = 1 + max(place for _, _, place, *_ in tokens) // COLUMNS
        top += LINE * (1 + lines) + 14
    title = escape(f"{MODEL}: {PROMPT} {drafted.speed / plain.speed:.2f} times plain decoding")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" width="800" height="{top}"'
        f' style="--period: {period:.2f}s"><title>{title}</title><style>{STYLE}</style>'
        f'<rect width="100%" height="100%" rx="8"/><text x="{MARGIN}" y="30">{title}</text>'
        f"{lanes}</svg>\n"
    )


def lane(
    sample: Sample, labels: Labels, verification: float, when: Callable[[float], float]
) -> Iterator[Token]:
    """Yield the tokens of a text's rounds, as ``piece`` draws them.

    Drafted tokens appear one by one where they would stand, before the verification, which takes
    that many seconds. They are judged at the end of their round, when the target's own token
    appears: from then on what stays is drawn.
    """
    text_end = 0  # the place after the tokens that stay
    for (_, began), (round, ended) in pairwise([(None, 0.0), *sample.timeline]):
        # A round may take less than a plain step of average length. Its draft then gets a fifth.
        drafting = max(ended - began - verification, 0.2 * (ended - began))
        draft_end = text_end
        for number, (token, verdict) in enumerate(round.verdicts(), start=1):
            text = visible(labels.spelled([token]).decode(errors="replace"))
            place = fitting(text_end if verdict == "own" else draft_end, text)
            draft_end = place + len(text)
            if verdict != "own":
                drafted = began + drafting * number / len(round.drafted)
                yield text, "drafted", place, when(drafted), when(ended)
            if verdict in ("accepted", "own"):
                text_end = draft_end
                yield text, verdict, place, when(0), when(ended)


def fitting(place: int, text: str) -> int:
    """Return the place from which a text fits into a line: this one, or the start of the next."""
    rest = COLUMNS - place % COLUMNS
    return place if len(text) <= rest else place + rest


def piece(text: str, kind: str, place: int, first: float, second: float) -> str:
    """Return a piece of a text at a place; a line has ``COLUMNS`` places. A drafted one appears at
    the ``first`` share of the period and vanishes at the ``second``. Others vanish and reappear.
    """
    before = int(kind != "drafted")  # its opacity: a period begins with the finished texts
    # Pieces with the same name share an animation, so it names all of it.
    name = f"at-{before}-{100_000 * first:.0f}-{100_000 * second:.0f}"
    return (
        f"<style>@keyframes {name}{{0%{{opacity:{before}}}{first:.2%}{{opacity:{1 - before}}}"
        f"{second:.2%}{{opacity:{before}}}}}</style>"
        f'<text class="{kind}" opacity="{before}" style="animation-name:{name}"'
        f' x="{CHARACTER * (place % COLUMNS):.0f}" y="{LINE * (1 + place // COLUMNS)}"'
        f' xml:space="preserve">{escape(text)}</text>'
    )


if __name__ == "__main__":
    session = load(MODEL, max_new_tokens=64)
    session.warm_up(session.encode(PROMPT))
    samples = [session.write(PROMPT, draft=draft) for draft in ("none", "lowbit")]
    write_text(Path(__file__).with_name("round.svg"), picture(*samples, session.labels))
