"""Coloured trace of the rounds: drafted tokens with their verdicts, and the target's own token.

On a terminal the last line is redrawn in each round. In a file or a pipe, signs around the tokens
replace colours.
"""

from __future__ import annotations

import time
from itertools import groupby
from operator import itemgetter

from rich.console import Console
from rich.live import Live
from rich.text import Text

from app.characters import Labels, new_decoder, visible
from decoding.rounds import Round

# verdict -> its name in the legend, its style, and the signs around it where there are no colours
VERDICTS = {
    "accepted": ("accepted", "green", "[", "]"),
    "rejected": ("rejected", "red strike", "{-", "-}"),
    "discarded": ("discarded", "dim strike", "{~", "~}"),
    "own": ("the target's own token", "bold blue", "", ""),
}


class LiveTrace:
    """Trace of one text on a console: a context manager, which restores the terminal.

    Full lines are printed once; only the last line is redrawn. A draft is shown for ``pause``
    seconds before its verdict.
    """

    def __init__(self, console: Console, labels: Labels, *, pause: float) -> None:
        self.console = console
        self.labels = labels
        self.pause = pause
        self.signs = console.no_color or console.color_system is None
        # With FORCE_COLOR rich takes a pipe for a terminal. Colours may go there, cursor movements
        # may not.
        self.redraws = not self.signs and console.file.isatty() and not console.is_dumb_terminal
        self.live = Live(
            console=console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False
        )
        # of the tokens that are kept
        self.decoder = new_decoder()
        self.line = Text()  # the last line of the text

    def __enter__(self) -> LiveTrace:
        legend = [self._styled(name, verdict) for verdict, (name, *_) in VERDICTS.items()]
        self.console.print(*legend, soft_wrap=not self.redraws)
        if self.redraws:
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._settle(self._styled(self.decoder.decode(b"", final=True), "own"))
        if self.redraws:
            self.live.stop()
        else:
            self.console.print()

    def add(self, round: Round) -> None:
        """Show a round."""
        if self.redraws and round.drafted:
            self.live.update(
                self.line + Text(self._aside(round.drafted), style="dim"), refresh=True
            )
            time.sleep(self.pause)
        self._settle(self._text_of(round))

    def _text_of(self, round: Round) -> Text:
        """Return the round's tokens in order, styled by their verdicts, then those that a ban
        retracted.

        A character whose bytes are spread over tokens appears with the last of them.
        """
        text = Text()
        for verdict, run in groupby(round.verdicts(), key=itemgetter(1)):
            tokens = [token for token, _ in run]
            if verdict in ("accepted", "own"):
                kept = self.decoder.decode(self.labels.spelled(tokens)).expandtabs(4)
                shown = "\n".join(map(visible, kept.split("\n")))
            else:
                shown = self._aside(tokens)
            text.append_text(self._styled(shown, verdict))
        if round.retracted:
            self.decoder.reset()
            text.append(
                f'<taken back: "{self._aside(round.retracted)}">',
                style=None if self.signs else "yellow",
            )
        return text

    def _aside(self, tokens: list[int]) -> str:
        """Return the text of tokens that are not kept, in one line."""
        return visible(self.labels.spelled(tokens).decode("utf-8", errors="replace"))

    def _styled(self, text: str, verdict: str) -> Text:
        _, style, before, after = VERDICTS[verdict]
        if not self.signs:
            return Text(text, style=style)
        return Text(before + text + after if text else "")

    def _settle(self, text: Text) -> None:
        """Add text that is final, and print lines that are full."""
        if not self.redraws:
            self.console.print(text, end="", soft_wrap=True)
            return
        *full, self.line = (self.line + text).wrap(self.console, self.console.width)
        for line in full:
            self.console.print(line)
        self.live.update(self.line, refresh=True)
