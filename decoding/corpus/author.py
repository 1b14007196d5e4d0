"""A chat model that writes both sides of a conversation: the texts of a corpus, a batch at a time."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection
from dataclasses import dataclass
from itertools import takewhile

from decoding.corpus.batch import sample_texts
from decoding.corpus.quality import worth_learning
from decoding.corpus.templates import story_request
from decoding.corpus.text_file import WrittenText
from decoding.sampling import SamplingParams
from model import Decoder, InputError
from weights.cli.prompt import encode_prompt
from weights.tokenizer import Tokenizer

NARRATOR = "You are a kind teacher who tells stories to small children in short, simple sentences."
MESSAGE_TOKENS = 64  # of a user's message that the model writes itself, at most


@dataclass(frozen=True)
class UserTurn:
    """The chat template around a user's message: tokens before it, and those from its end-of-turn token on."""

    opening: list[int]
    closing: list[int]

    @staticmethod
    def of(tokenizer: Tokenizer) -> UserTurn:
        """What is common to two conversations that differ in all of their message.

        Raises InputError when the template does not let the model end a user's turn: when there is none, or
        no control token ends the message.
        """
        if tokenizer.chat_template is None:
            raise InputError("this model has no chat template: give --kind story")
        message, other = (tokenizer.encode_chat([{"role": "user", "content": text}]) for text in ("Apples", "zebra?"))
        opening = common_beginning(message, other)
        closing = common_beginning(message[::-1], other[::-1])[::-1]
        inside = tokenizer.decode(message[len(opening) : len(message) - len(closing)])
        control = tokenizer.vocabulary.special.values()
        if inside != "Apples" or not opening or not closing or closing[0] not in control:
            raise InputError("this model's chat template ends a user's turn with no control token: give --kind story")
        return UserTurn(opening, closing)


def common_beginning(one: list[int], other: list[int]) -> list[int]:
    return [a for a, _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))]


def narrator(tokenizer: Tokenizer) -> str | None:
    """``NARRATOR``, or None where there is no chat template, or one that refuses a system message."""
    try:
        encode_prompt(tokenizer, "A fox.", system=NARRATOR)
    except InputError:
        return None
    return NARRATOR


class Author:
    """A model that writes both sides of a conversation, a batch of them at a time."""

    def __init__(
        self,
        model: Decoder,
        tokenizer: Tokenizer,
        params: SamplingParams,
        max_new_tokens: int,
        on_tokens: Callable[[int], None] = lambda count: None,
    ) -> None:
        """``max_new_tokens`` bounds a response; ``on_tokens`` hears how many tokens of responses a step has written."""
        self.model, self.tokenizer, self.params = model, tokenizer, params
        self.max_new_tokens, self.on_tokens = max_new_tokens, on_tokens
        self.control = frozenset(tokenizer.vocabulary.special.values())

    def write(self, kind: str, rows: int, rng: random.Random) -> list[WrittenText]:
        """Up to ``rows`` texts, "story" or "chat": rows that are not worth learning or hold a control token are out."""
        begun = self.stories(rows, rng) if kind == "story" else self.chats(rows, rng)
        eos_ids = self.tokenizer.eos_ids
        prompts = [[*ids, *opening] for _, ids, opening in begun]
        responses = self.sample(prompts, self.max_new_tokens, eos_ids, rng, self.on_tokens)
        texts = []
        for (prompt, _, opening), response in zip(begun, responses, strict=True):
            finished = response[-1] in eos_ids
            said = self.text([*opening, *(response[:-1] if finished else response)])
            if said is not None:
                texts.append(WrittenText(kind, prompt, said, finished, self.params.temperature))
        return [kept for text in texts if (kept := worth_learning(text))]

    def stories(self, rows: int, rng: random.Random) -> list[tuple[str, list[int], list[int]]]:
        """Requests for a story, with their ids and those of the story's opening.

        Each is a turn of a chat, or plain text where the model has no template for one.
        """
        system = narrator(self.tokenizer)
        requests = [story_request(rng) for _ in range(rows)]
        return [
            (
                prompt,
                encode_prompt(self.tokenizer, prompt, system=system),
                self.tokenizer.vocabulary.encode(opening, parse_special=False),
            )
            for prompt, opening in requests
        ]

    def chats(self, rows: int, rng: random.Random) -> list[tuple[str, list[int], list[int]]]:
        """Messages that the model writes in the user's place, with the ids of the conversations they begin.

        Those without an end are left out. No response has an opening.
        """
        turn = UserTurn.of(self.tokenizer)
        ends = self.tokenizer.eos_ids.union(turn.closing[:1])
        chats = []
        for *message, end in self.sample([turn.opening] * rows, MESSAGE_TOKENS, ends, rng):
            said = self.text(message)
            if end == turn.closing[0] and said is not None:
                chats.append((said, [*turn.opening, *message, *turn.closing], []))
        return chats

    def sample(
        self,
        prompts: list[list[int]],
        max_new_tokens: int,
        eos_ids: Collection[int],
        rng: random.Random,
        on_tokens: Callable[[int], None] = lambda count: None,
    ) -> list[list[int]]:
        """The continuation of each prompt, all in one batch."""
        return sample_texts(
            self.model,
            prompts,
            max_new_tokens=max_new_tokens,
            params=self.params,
            eos_ids=eos_ids,
            seed=rng.getrandbits(64),
            batch=max(1, len(prompts)),
            on_tokens=on_tokens,
        )

    def text(self, tokens: list[int]) -> str | None:
        """What these tokens say; None when that is nothing, or when there is a control token among them."""
        if not self.control.isdisjoint(tokens):
            return None
        text = self.tokenizer.decode(tokens).rstrip("\ufffd")  # a text may be cut off inside a character
        return text if text.strip() else None
