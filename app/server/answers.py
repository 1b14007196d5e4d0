"""Answers: the messages of a text, in the form of OpenAI's API, with statistics of its rounds.

Knows nothing of queues and sockets, nor of how texts are drafted.
"""

import secrets
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor

from app.characters import Labels, TextStream
from app.output import as_json
from app.sample import Sample
from app.server.requests import ChatBody, CompletionBody
from decoding.drafters import Draft
from decoding.rounds import Round
from decoding.text import Text

LEAST = -9999.0  # log probability that stands for minus infinity, which JSON has not


class Answer:
    """Messages of a text: the whole text in one or, of a stream, the text that a terminal would
    show, after each round.
    """

    def __init__(
        self, body: CompletionBody | ChatBody, sample: Sample, model: str, labels: Labels
    ) -> None:
        self.body = body
        self.sample = sample
        self.labels = labels
        self.is_chat = isinstance(body, ChatBody)
        kind = "chat.completion" if self.is_chat else "text_completion"
        self.head = {
            "id": f"{'chatcmpl' if self.is_chat else 'cmpl'}-{secrets.token_hex(12)}",
            "object": f"{kind}.chunk" if self.is_chat and body.stream else kind,
            "created": int(time.time()),
            "model": model,
        }
        self.stream = TextStream(sample.source)
        self.logprobs = None if body.top is None else Logprobs(sample.source, labels, body.top)

    def messages(self, rounds: Iterable[Round]) -> Iterator[dict[str, Any]]:
        """Yield the messages while the ``rounds`` write the text."""
        body = self.body
        if body.stream and self.is_chat:
            yield self._choice({"role": "assistant", "content": ""})
        for round in rounds:
            piece = self.stream.pull()
            more = {"trace": shown_round(round, self.sample, self.labels)} if body.trace else {}
            if body.stream and (piece or more):
                yield self._choice({"content": piece}, **more)
        usage = {
            "prompt_tokens": self.sample.prompt_tokens,
            "completion_tokens": len(self.sample.tokens),
            "total_tokens": len(self.sample.source),
            "speculation": as_json(self.sample),
        }
        said = {} if body.stream else {"role": "assistant", "content": self.sample.text}
        last = self._choice(said, "length" if self.sample.finish == "length" else "stop")
        yield last if body.stream else last | {"usage": usage}
        if body.stream and (body.stream_options or {}).get("include_usage"):
            yield {**self.head, "choices": [], "usage": usage}

    def _choice(
        self, said: dict[str, str], finish: str | None = None, **more: Any
    ) -> dict[str, Any]:
        """Return a message with what is ``said``, and the log probabilities of its tokens."""
        key = "delta" if self.body.stream else "message"
        shown = {key: said} if self.is_chat else {"text": said.get("content", "")}
        told = self.logprobs and self.logprobs.pull(self.stream.shown, self.is_chat)
        choice = {"index": 0, **shown, "logprobs": told, "finish_reason": finish, **more}
        return {**self.head, "choices": [choice]}


def shown_round(round: Round, sample: Sample, label: Callable[[int], str]) -> dict[str, Any]:
    """Return a round as the live page shows it, with the statistics so far."""
    tokens = [
        {"id": token, "text": label(token), "verdict": verdict}
        for token, verdict in round.verdicts()
    ]
    return {
        **as_json(sample),
        "tokens": tokens,
        "retracted": len(round.retracted),
        "draft": sample.draft,
    }


class Logprobs:
    """Log probabilities of a text's tokens, each with the ``top`` likeliest in its place.

    They are of the target's own distributions, before penalties, temperature and filters, so they
    are equal with any draft.
    """

    def __init__(self, text: Text, labels: Labels, top: int) -> None:
        self.text = text
        self.labels = labels
        self.top = top
        # of each token its entry and those of the likeliest, in OpenAI's form
        self.entries: list[list[dict[str, Any]]] = []
        self.told = 0

    def see(self, draft: Draft, logits: Tensor, *_: object) -> None:
        """Add the tokens that a round added to the text: an observer of the loop. Those that a ban
        took back are dropped.
        """
        del self.entries[len(self.text.generated) :]
        new = self.text.generated[len(self.entries) :]
        for row, token in zip(logits.double().log_softmax(-1), new, strict=False):
            ids = [token, *row.topk(self.top).indices.tolist()]
            self.entries.append([self._entry(each, row[each].item()) for each in ids])

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        spelled = self.labels.spelled([token])
        return {
            "token": spelled.decode(errors="backslashreplace"),
            "logprob": max(logprob, LEAST),
            "bytes": [*spelled],
        }

    def pull(self, end: int, is_chat: bool) -> dict[str, Any]:
        """Return the entries since the last call of tokens that end at offset ``end`` of the text
        or before, or of all where it is finished, in the form of chats or of completions.
        """
        begins = self.text.begins[self.text.prompt_length :]
        count = len(self.entries) if self.text.finish else bisect_right(begins, end) - 1
        new = slice(self.told, count)
        self.told = count
        if is_chat:
            return {"content": [own | {"top_logprobs": top} for own, *top in self.entries[new]]}
        output = self.text.data[begins[0] :]
        return {
            "tokens": [own["token"] for own, *_ in self.entries[new]],
            "token_logprobs": [own["logprob"] for own, *_ in self.entries[new]],
            "top_logprobs": [
                {each["token"]: each["logprob"] for each in top} for _, *top in self.entries[new]
            ],
            "text_offset": [
                len(output[: begin - begins[0]].decode(errors="replace")) for begin in begins[new]
            ],
        }
