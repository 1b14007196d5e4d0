"""Coloured trace of the rounds: drafted tokens with their verdicts, and the target's residual or bonus token.

On a terminal the last line is redrawn in each round, and a footer stands below it until the text ends. Where there are
no colours, as in a file or a pipe, signs around the tokens replace them.
"""

from __future__ import annotations

import codecs
import time
from collections.abc import Iterable, Sequence
from itertools import groupby
from operator import itemgetter

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from decoding.policies import Policy
from decoding.rounds import Round, Statistics
from decoding.show.labels import Labels, visible

PAUSE = 0.06  # seconds for which a draft is shown before its verdict
VERDICTS = {  # verdict -> its name in the legend, its style, and the signs around it where there are no colours
    "accepted": ("accepted", "green", "[", "]"),
    "rejected": ("rejected", "red strike", "{-", "-}"),
    "discarded": ("discarded", "dim strike", "{~", "~}"),
    "own": ("residual or bonus", "bold blue", "", ""),
    "taken back": ("", "yellow", "", ""),
}


class TraceConsole(Console):
    """Console that raises BrokenPipeError when its output is closed; rich's would end the process."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


class LiveTrace:
    """Trace of one text on a console; a context manager, so that the terminal is restored in any case.

    Full lines are printed once; only the last line and the footer are redrawn.
    """

    def __init__(self, console: Console, labels: Labels, policy: Policy, *, pause: float = PAUSE) -> None:
        self.console, self.labels, self.policy, self.pause = console, labels, policy, pause
        self.signs = console.no_color or console.color_system is None
        # With FORCE_COLOR rich takes a pipe for a terminal. Colours may go there, cursor movements may not.
        self.redraws = console.file.isatty() and not console.is_dumb_terminal
        self.live = Live(console=console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
        self.kept = bytearray()  # bytes of the text so far
        self.decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.statistics, self.drafted, self.seconds = Statistics(), 0, 0.0
        self.line = Text()  # the last line of the text

    def __enter__(self) -> LiveTrace:
        legend = Text(" ").join(self._styled(name, verdict) for verdict, (name, *_) in VERDICTS.items() if name)
        self.console.print(legend, soft_wrap=not self.redraws)
        if self.redraws:
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._settle(self._styled(self.decoder.decode(b"", final=True), "own"))
        if self.redraws:
            self.live.update(self.line)  # without the footer, since the line of statistics comes next
            self.live.stop()
        else:
            self.console.print()

    def add(self, round: Round, seconds: float) -> None:
        """Show a round; ``seconds`` is the time of decoding so far."""
        self.statistics.add(round)
        self.drafted, self.seconds = len(round.drafted), seconds
        try:
            if self.redraws and round.drafted and not self.signs:
                self._draw(Text(self._undecided(round.drafted), style="dim"))
                time.sleep(self.pause)
        finally:  # Ctrl-C during the pause loses nothing
            self._settle(self.text_of(round))

    def footer(self) -> Text:
        """Speed and acceptance so far, the length of the last draft, and the exit threshold of the next, if any."""
        s = self.statistics
        parts = [f"{s.tokens / self.seconds:.1f} tokens/s" if self.seconds else "0 tokens/s"]
        if s.acceptance_rate is not None:
            parts.append(f"{s.acceptance_rate:.0%} accepted")
        parts.append(f"{s.tokens_per_round:.2f} tokens a round")
        if s.drafted:
            parts.append(f"last draft length {self.drafted}")
        if self.policy.threshold is not None:
            parts.append(f"threshold {self.policy.threshold:.3f}")
        return Text(" · ".join(parts), style="dim")

    def text_of(self, round: Round) -> Text:
        """The round's tokens in order, styled by their verdicts, then the tokens that a banned word took back.

        A character whose bytes are spread over tokens appears with the last of them.
        """
        text, failed = Text(), []
        for verdict, run in groupby(round.verdicts(), key=itemgetter(1)):
            tokens = [token for token, _ in run]
            if verdict in ("rejected", "discarded"):
                shown = self._undecided(tokens, after=failed)
                failed += tokens
            else:
                self.kept += self._bytes(tokens)
                shown = self._decode(tokens, self.decoder)
            text.append_text(self._styled(shown, verdict))
        if round.retracted:
            text.append_text(self._styled(f'<taken back: "{self._take_back(round.retracted)}">', "taken back"))
        return text

    def _styled(self, text: str, verdict: str) -> Text:
        _, style, before, after = VERDICTS[verdict]
        if self.signs:
            return Text(before + text + after if text else "")
        return Text(text, style=style)

    def _undecided(self, tokens: list[int], after: Sequence[int] = ()) -> str:
        """The text that these drafted tokens would add ``after`` other tokens that are not kept either."""
        fork = codecs.getincrementaldecoder("utf-8")(errors="replace")
        fork.setstate(self.decoder.getstate())
        fork.decode(self._bytes(after))
        text = self._decode(tokens, fork) + fork.decode(b"", final=True)
        return text.replace("\n", "↵")  # a line break that is not kept must not break the line

    def _decode(self, tokens: list[int], decoder: codecs.IncrementalDecoder) -> str:
        pieces = [(token, self.labels.token_bytes(token)) for token in tokens]
        return "".join(
            visible(decoder.decode(data), lines=True) if data else self.labels.name(token) for token, data in pieces
        )

    def _take_back(self, tokens: list[int]) -> str:
        """Remove these tokens from the end of the text; returns their text."""
        taken = self._bytes(tokens)
        del self.kept[len(self.kept) - len(taken) :]
        self.decoder.reset()
        self.decoder.decode(bytes(self.kept[-4:]))  # the state after these holds the bytes of an unfinished character
        return visible(taken.decode("utf-8", errors="replace"))

    def _bytes(self, tokens: Iterable[int]) -> bytes:
        return b"".join(map(self.labels.token_bytes, tokens))

    def _settle(self, text: Text) -> None:
        """Add text that is final, and print lines that are full."""
        if not self.redraws:
            self.console.print(text, end="", soft_wrap=True)
            return
        *full, self.line = (self.line + text).wrap(self.console, self.console.width)
        for line in full:
            self.console.print(line)
        self._draw(Text())

    def _draw(self, undecided: Text) -> None:
        self.live.update(Group(self.line + undecided, self.footer()), refresh=True)
