"""Answers: the replies with a text, in the form of OpenAI's API, and statistics of its rounds.

Knows nothing of queues and sockets, nor of how texts are drafted.
"""

import secrets
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

from torch import Tensor

from app.characters import Labels, TextStream, new_decoder
from app.output import as_json
from app.sample import Sample
from app.server.requests import ChatBody, CompletionBody
from app.session import Session
from decoding.rounds import Round
from decoding.speculate import Observer
from decoding.text import Text


def replies(
    body: CompletionBody | ChatBody,
    sample: Sample,
    session: Session,
    rounds: Callable[[Observer | None], Iterator[Round]],
) -> Iterator[dict[str, Any]]:
    """Yield the replies to a request while its text is written by ``rounds``, which take an
    observer: one reply at the end or, in a stream, one after each round, with the characters that
    will stay. There is none before the first round, which may fail.
    """
    kind = "chat.completion" if body.is_chat else "text_completion"
    head = {
        "id": f"{'chatcmpl' if body.is_chat else 'cmpl'}-{secrets.token_hex(12)}",
        "object": f"{kind}.chunk" if body.is_chat and body.stream else kind,
        "created": int(time.time()),
        "model": session.name,
    }
    stream = TextStream(sample.source)
    logprobs = (
        None if body.likeliest is None else Logprobs(sample.source, session.labels, body.likeliest)
    )
    is_first = True

    def reply(text: str, **more: Any) -> dict[str, Any]:
        """Return a reply with a part of the text, with what was not told yet of its tokens, and
        ``more``. In a chat the first reply names the role.
        """
        shown: dict[str, Any] = {"text": text}
        if body.is_chat:
            role = {"role": "assistant"} if is_first else {}
            shown = {"delta" if body.stream else "message": {**role, "content": text}}
        told = logprobs and logprobs.pull(stream.shown, body.is_chat)
        choice = {"index": 0, **shown, "logprobs": told, "finish_reason": None, **more}
        return {**head, "choices": [choice]}

    for round in rounds(logprobs and logprobs.see):
        piece = stream.pull()
        if body.stream and (piece or body.trace):
            trace = {"trace": trace_of(round, sample, session.labels)} if body.trace else {}
            yield reply(piece, **trace)
            is_first = False
    finish = "length" if sample.finish == "length" else "stop"
    usage = {
        "prompt_tokens": sample.prompt_tokens,
        "completion_tokens": len(sample.tokens),
        "total_tokens": len(sample.source),
        "speculation": as_json(sample),
    }
    last = reply("" if body.stream else sample.text, finish_reason=finish)
    if body.stream:
        yield last
        if body.stream_options.get("include_usage"):
            yield {**head, "choices": [], "usage": usage}
    else:
        yield {**last, "usage": usage}


def trace_of(round: Round, sample: Sample, labels: Labels) -> dict[str, Any]:
    """Return a round as the live page shows it, with the statistics so far."""
    return {
        **as_json(sample),
        "tokens": [
            {"id": token, "text": labels(token), "verdict": verdict}
            for token, verdict in round.verdicts()
        ],
        "retracted": len(round.retracted),
        "draft": sample.draft,
    }


class Logprobs:
    """Log probabilities of a text's tokens and, in the place of each, of the likeliest ones.

    They are those of the target's own distributions, before penalties, temperature and filters. So
    no draft changes them.
    """

    def __init__(self, text: Text, labels: Labels, likeliest: int) -> None:
        self.text = text
        self.labels = labels
        self.likeliest = likeliest
        # for each token its own entry and those of the likeliest, in OpenAI's form for chats
        self.entries: list[list[dict[str, Any]]] = []
        # of each token that was told, and of the next one, the characters of the text before it
        self.offsets = [0]
        self.decoder = new_decoder()
        self.decoded = 0  # characters

    def see(self, logits: Tensor) -> None:
        """Add entries of the tokens that a round added to the text: an observer of the loop.
        Entries of tokens that a ban took back are dropped.
        """
        del self.entries[len(self.text.generated) :]
        new = self.text.generated[len(self.entries) :]
        # Rows beyond the new tokens are those of rejected ones, or of a text that has ended.
        for row, token in zip(logits.double().log_softmax(-1), new, strict=False):
            ids = [token, *row.topk(self.likeliest).indices.tolist()]
            self.entries.append([self._entry(each, row[each].item()) for each in ids])

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        spelled = self.labels.spelled([token])
        return {
            "token": spelled.decode(errors="backslashreplace"),
            "logprob": logprob,
            "bytes": [*spelled],
        }

    def pull(self, end: int, is_chat: bool) -> dict[str, Any]:
        """Return what was not told yet, in the form of chats or of completions.

        It ends with the last token within the first ``end`` bytes of prompt and text or, once the
        text is finished, with its last token. An offset counts an unfinished character as one.
        """
        begins = self.text.begins[self.text.prompt_length :]
        count = len(self.entries) if self.text.finish else bisect_right(begins, end) - 1
        new = slice(len(self.offsets) - 1, count)
        entries = self.entries[new]
        for first, last in pairwise(begins[new.start : count + 1]):
            self.decoded += len(self.decoder.decode(bytes(self.text.data[first:last])))
            self.offsets.append(self.decoded + bool(self.decoder.getstate()[0]))
        if is_chat:
            return {"content": [own | {"top_logprobs": top} for own, *top in entries]}
        return {
            "tokens": [own["token"] for own, *_ in entries],
            "token_logprobs": [own["logprob"] for own, *_ in entries],
            "top_logprobs": [
                {each["token"]: each["logprob"] for each in top} for _, *top in entries
            ],
            "text_offset": self.offsets[new],
        }
