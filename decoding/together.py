"""Several texts written in shared steps, each the text that it would be alone.

Each text's loop runs in a greenlet, and ``Together`` stands for the model in all of them. A call of
the model hands control back; when every loop has called it, the calls that can share a step are
computed at once, and each loop goes on with its logits. There is one thread, since switching
threads makes a step half as long again. No text depends on the others: the rows of a step do not
depend on each other, and prompts are read in the same chunks as alone.

Knows nothing of files, options and clocks. No other file of this folder knows of it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from greenlet import GreenletExit, getcurrent, greenlet
from torch import Tensor

from decoding.drafters import Draft, Wrapper, draft_of
from decoding.model_port import Cache
from decoding.text import Text
from model.decoder import Decoder, chunks
from model.plan import LayerPlan

MOST_DRAFTING = 2  # texts that share steps and still draft: low bits gain 1.41 at two, 1.02 at four


class Call(NamedTuple):
    """Call of a model with its arguments; ``is_prompt``: a chunk of a prompt, without logits."""

    model: Decoder
    tokens: Tensor
    cache: Cache
    start: int
    plan: LayerPlan | None = None
    is_prompt: bool = False


class Together:
    """Model in several loops (``decoding.model_port``), whose calls are computed in shared steps.

    ``calls`` has each loop that has not ended, in the order in which they began, with its waiting
    call. It is shared with the ``target``, where the model is one that drafts for it.
    """

    def __init__(self, model: Decoder, target: "Together | None" = None) -> None:
        self.model = model
        self.vocab_size = model.vocab_size
        self.max_positions = model.max_positions
        self.device = model.device
        self.calls: dict[greenlet, Call | None] = target.calls if target else {}

    def __call__(
        self, tokens: Tensor, cache: Cache, start: int, plan: LayerPlan | None = None
    ) -> Tensor:
        return getcurrent().parent.switch(Call(self.model, tokens, cache, start, plan))

    def prefill(self, tokens: Tensor, cache: Cache, start: int = 0) -> None:
        """Read the tokens in chunks, between which the other texts take steps."""
        for chunk, chunk_start in chunks(tokens, start):
            call = Call(self.model, chunk, cache, chunk_start, is_prompt=True)
            getcurrent().parent.switch(call)

    @torch.inference_mode()  # as ``step``: a loop that leaves its greenlet leaves its mode behind
    def start(self, loop: Callable[[], None]) -> greenlet:
        """Run a loop up to its first call of the model; returns its greenlet.

        Raises the loop's errors, here and in ``step``: a loop that may fail alone catches them.
        """
        running = greenlet(lambda _: loop())
        self.calls[running] = None  # it has begun
        self._go_on(running)
        return running

    @torch.inference_mode()
    def stop(self, loop: greenlet) -> None:
        """End a loop where it is."""
        self.calls.pop(loop, None)
        loop.throw(GreenletExit)

    @torch.inference_mode()
    def step(self) -> bool:
        """Compute a chunk of the oldest prompt, and a step of the other calls; let these loops go
        on. Returns whether any loop is left.

        Drafts come first, so that all verifications can share a step.
        """
        prompts = [loop for loop, call in self.calls.items() if call.is_prompt]
        others = [loop for loop, call in self.calls.items() if not call.is_prompt]
        if prompts:
            self._compute(prompts[:1])
        if others:
            ways = {loop: (self.calls[loop].model, self.calls[loop].plan) for loop in others}
            target = self.model, None
            way = next((way for way in ways.values() if way != target), target)
            self._compute([loop for loop in others if ways[loop] == way])
        return bool(self.calls)

    def _compute(self, loops: Sequence[greenlet]) -> None:
        """Compute the calls of these loops, and let each go on with its result."""
        calls = [self.calls[loop] for loop in loops]
        for loop, result in zip(loops, self._results(calls), strict=True):
            self._go_on(loop, result)

    def _results(self, calls: Sequence[Call]) -> list[Tensor | Exception | None]:
        """Return the logits, or the error, of calls of one model and plan; None for a chunk of a
        prompt, which is computed alone.
        """
        first = calls[0]
        try:
            if first.is_prompt:
                return [first.model.prefill(first.tokens, first.cache, first.start)]
            given = [(call.tokens, call.cache, call.start) for call in calls]
            return first.model.together(given, first.plan)
        except Exception as error:  # computed one by one, only the failing call has an error
            return [error] if len(calls) == 1 else [self._results([call])[0] for call in calls]

    def _go_on(self, loop: greenlet, result: Tensor | Exception | None = None) -> None:
        """Run a loop until its next call. ``result`` is that of its last call; an exception is
        raised in the loop.
        """
        resume = loop.throw if isinstance(result, Exception) else loop.switch
        try:
            self.calls[loop] = resume(result)
        finally:
            if loop.dead:
                del self.calls[loop]


@dataclass
class ForFew(Wrapper):
    """Drafter that drafts nothing while more than ``MOST_DRAFTING`` texts share the steps.

    For greedy texts and the race, which no draft length changes. Under the ratio rule a draft
    length decides which random numbers a token is drawn with, so a text drafts as it would alone.
    """

    together: Together

    def instead(self, text: Text, limit: int) -> Draft | None:
        """Return an empty draft while there are too many texts."""
        return draft_of(text, ()) if len(self.together.calls) > MOST_DRAFTING else None
