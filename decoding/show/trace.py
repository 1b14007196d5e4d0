"""The run as it happens: drafted tokens appear dim, then accepted, rejected or discarded, then the target's token.

On a terminal the last lines are redrawn as each round comes in, with a footer below them. Where the output
goes into a file or a pipe, or has no colours, signs say the same.
"""

from __future__ import annotations

import codecs
import time
from collections.abc import Iterable, Sequence
from itertools import groupby
from operator import itemgetter

from rich.cells import cell_len, chop_cells
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from decoding.policies import Policy
from decoding.rounds import Round, Statistics
from decoding.show.labels import Labels, visible

PAUSE = 0.06  # seconds a viewer is given to see a draft before its verdict
STYLES = {
    "accepted": "green",
    "rejected": "red strike",
    "discarded": "dim strike",
    "own": "bold blue",
    "taken back": "yellow",
}
SIGNS = {"accepted": ("[", "]"), "rejected": ("{-", "-}"), "discarded": ("{~", "~}")}


class TraceConsole(Console):
    """A console that leaves it to the program what to do when the reader of its output has gone."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


class LiveTrace:
    """Shows the rounds of one text on a console; a context manager, so that the terminal is always given back.

    What is settled is printed for good; only the line being written, and the footer, are redrawn.
    """

    def __init__(self, console: Console, labels: Labels, policy: Policy, *, pause: float = PAUSE) -> None:
        self.console, self.labels, self.policy, self.pause = console, labels, policy, pause
        self.signs = console.no_color or console.color_system is None
        # FORCE_COLOR makes rich take a pipe for a terminal: colours may go there, cursor movements may not.
        self.redraws = console.file.isatty() and not console.is_dumb_terminal
        self.live = Live(console=console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
        self.kept = bytearray()  # the bytes of the tokens kept so far
        self.decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.statistics, self.seconds = Statistics(), 0.0
        self.line = Text()  # what is still redrawn: the last line of the text

    def __enter__(self) -> LiveTrace:
        self.console.print(self.legend(), soft_wrap=not self.redraws)
        if self.redraws:
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._settle(self._styled(self.decoder.decode(b"", final=True), "own"))
        if self.redraws:
            self.live.stop()
        else:
            self.console.print()
            self.console.print(self.footer(), soft_wrap=True)

    def add(self, round: Round, seconds: float) -> None:
        """Show a round; ``seconds`` is the time that decoding has taken so far."""
        self.statistics.add(round)
        self.seconds = seconds
        try:
            if self.redraws and round.drafted and not self.signs:
                self._draw(Text(self._undecided(round.drafted), style="dim"))
                time.sleep(self.pause)
        finally:  # Ctrl-C during the pause loses nothing
            self._settle(self.text_of(round))

    def legend(self) -> Text:
        """One line that explains the colours, or the signs."""
        names = {"accepted": "accepted", "rejected": "rejected", "discarded": "discarded", "own": "the target's token"}
        return Text(" ").join(self._styled(text, verdict) for verdict, text in names.items())

    def footer(self) -> Text:
        """Speed and acceptance so far, and what the policy will do next."""
        s = self.statistics
        parts = [f"{s.tokens / self.seconds:.1f} tokens/s" if self.seconds else "0 tokens/s"]
        if s.acceptance_rate is not None:
            parts.append(f"{s.acceptance_rate:.0%} accepted")
        parts.append(f"{s.tokens_per_round:.2f} tokens a round")
        if self.policy.gamma:
            parts.append(f"draft length {self.policy.draft_length()}")
        if self.policy.threshold is not None:
            parts.append(f"threshold {self.policy.threshold:.3f}")
        return Text(" · ".join(parts), style="dim")

    def text_of(self, round: Round) -> Text:
        """The round's tokens in order, each run with its verdict's style or signs, and what was taken back.

        A character whose bytes are spread over tokens appears with the token that completes it.
        """
        text, failed = Text(), []
        for verdict, run in groupby(round.verdicts(), key=itemgetter(1)):
            tokens = [token for token, _ in run]
            if verdict in ("rejected", "discarded"):
                shown = self._undecided(tokens, after=failed)
                failed += tokens
            else:
                shown = self._append(tokens)
            text.append_text(self._styled(shown, verdict))
        if round.retracted:
            text.append_text(self._styled(f'<taken back: "{self._take_back(round.retracted)}">', "taken back"))
        return text

    def _styled(self, text: str, verdict: str) -> Text:
        if self.signs:
            before, after = SIGNS.get(verdict, ("", ""))
            return Text(before + text + after if text else "")
        return Text(text, style=STYLES[verdict])

    def _append(self, tokens: list[int]) -> str:
        """The text that these tokens add to what is kept."""
        self.kept += self._bytes(tokens)
        return self._decode(tokens, self.decoder)

    def _undecided(self, tokens: list[int], after: Sequence[int] = ()) -> str:
        """The text that these drafted tokens would add ``after`` others, of which none is kept either."""
        fork = codecs.getincrementaldecoder("utf-8")(errors="replace")
        fork.setstate(self.decoder.getstate())
        fork.decode(self._bytes(after))
        text = self._decode(tokens, fork) + fork.decode(b"", final=True)
        return text.replace("\n", "↵")  # a line break that is not kept breaks no line

    def _decode(self, tokens: list[int], decoder: codecs.IncrementalDecoder) -> str:
        pieces = [(token, self.labels.token_bytes(token)) for token in tokens]
        return "".join(
            visible(decoder.decode(data), lines=True) if data else self.labels.name(token) for token, data in pieces
        )

    def _take_back(self, tokens: list[int]) -> str:
        """Take back these tokens, the last that were kept; returns their text."""
        taken = self._bytes(tokens)
        del self.kept[len(self.kept) - len(taken) :]
        self.decoder.reset()
        self.decoder.decode(bytes(self.kept[-4:]))  # leaves the bytes of an unfinished character
        return visible(taken.decode("utf-8", errors="replace"))

    def _bytes(self, tokens: Iterable[int]) -> bytes:
        return b"".join(map(self.labels.token_bytes, tokens))

    def _settle(self, text: Text) -> None:
        """Text that will not change any more: lines that are full are printed for good."""
        if not self.redraws:
            self.console.print(text, end="", soft_wrap=True)
            return
        *paragraphs, self.line = (self.line + text).split("\n", allow_blank=True)
        for paragraph in paragraphs:
            self.console.print(self._print_full_lines(paragraph))
        self.line = self._print_full_lines(self.line)
        self._draw(Text())

    def _print_full_lines(self, text: Text) -> Text:
        """Print what fills lines of the console, broken after spaces where there are any; returns the rest."""
        while cell_len(text.plain) > self.console.width:
            fitting = len(chop_cells(text.plain, self.console.width)[0]) or 1
            cut = text.plain.rfind(" ", 0, fitting + 1) + 1 or fitting
            line, text = text.divide([cut])
            line.rstrip()
            self.console.print(line)
        return text

    def _draw(self, undecided: Text) -> None:
        self.live.update(Group(self.line + undecided, self.footer()), refresh=True)
