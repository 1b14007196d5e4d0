"""Author of a corpus: a chat model that writes stories on request, or both sides of a chat."""

from __future__ import annotations

import random
from dataclasses import dataclass

from decoding.corpus.quality import worth_learning
from decoding.corpus.templates import story_request
from decoding.corpus.text_file import WrittenText
from decoding.run.calibration import write_texts
from decoding.sampling import SamplingParams
from decoding.text import Rules
from model import Decoder, InputError
from weights.cli.prompt import encode_prompt
from weights.tokenizer import Tokenizer

NARRATOR = "You are a kind teacher who tells stories to small children in short, simple sentences."
MESSAGE_TOKENS = 64  # most tokens of a user's message that the model writes


def user_turn(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Token ids of the chat template before a user's message and after it, which begin with an end-of-turn token.

    Raises InputError where there is no template, or no control token ends the message.
    """
    ids = tokenizer.encode_chat([{"role": "user", "content": "zebra"}]) if tokenizer.chat_template else []
    message = tokenizer.vocabulary.encode("zebra")
    start = next((at for at in range(len(ids)) if ids[at : at + len(message)] == message), 0)
    opening, closing = ids[:start], ids[start + len(message) :]
    if not opening or not closing or closing[0] not in tokenizer.vocabulary.special.values():
        raise InputError("no control token ends a user's turn in this model's chat template, if any: give --kind story")
    return opening, closing


@dataclass(frozen=True)
class Author:
    """A chat model that writes texts with responses of up to ``max_new_tokens`` tokens."""

    model: Decoder
    tokenizer: Tokenizer
    params: SamplingParams
    max_new_tokens: int

    def write(self, kind: str, rows: int, rng: random.Random) -> list[WrittenText]:
        """Those of ``rows`` texts of a kind, "story" or "chat", that are worth learning."""
        begun = self.stories(rows, rng) if kind == "story" else self.chats(rows, rng)
        eos_ids = self.tokenizer.eos_ids
        responses = self.sample([[*ids, *opening] for _, ids, opening in begun], self.max_new_tokens, eos_ids, rng)
        texts = []
        for (prompt, _, opening), response in zip(begun, responses, strict=True):
            finished = response[-1] in eos_ids
            said = self.text([*opening, *(response[:-1] if finished else response)])
            if said and (kept := worth_learning(WrittenText(kind, prompt, said), finished)):
                texts.append(kept)
        return texts

    def stories(self, rows: int, rng: random.Random) -> list[tuple[str, list[int], list[int]]]:
        """Requests for a story with their token ids, and token ids of the story's opening.

        A request is a turn of a chat or, without a chat template, plain text.
        """
        stories = []
        for prompt, opening in (story_request(rng) for _ in range(rows)):
            try:
                ids = encode_prompt(self.tokenizer, prompt, system=NARRATOR)
            except InputError:  # no template, or one that refuses a system message
                ids = encode_prompt(self.tokenizer, prompt)
            stories.append((prompt, ids, self.tokenizer.vocabulary.encode(opening)))
        return stories

    def chats(self, rows: int, rng: random.Random) -> list[tuple[str, list[int], list[int]]]:
        """Messages of a user, written by the model, with token ids of their chats; openings are empty."""
        opening, closing = user_turn(self.tokenizer)
        ends = self.tokenizer.eos_ids.union(closing[:1])
        chats = []
        for *message, end in self.sample([opening] * rows, MESSAGE_TOKENS, ends, rng):
            if end == closing[0] and (said := self.text(message)):
                chats.append((said, [*opening, *message, *closing], []))
        return chats

    def sample(
        self, prompts: list[list[int]], max_new_tokens: int, eos_ids: frozenset[int], rng: random.Random
    ) -> list[list[int]]:
        """The continuation of each prompt."""
        rules = Rules(max_new_tokens, eos_ids)
        texts = write_texts(self.model, prompts, self.params, rules, rng.getrandbits(64))
        return [list(text.written) for text in texts]

    def text(self, tokens: list[int]) -> str:
        """The text of these tokens; empty where it is blank or holds a control token."""
        if not set(self.tokenizer.vocabulary.special.values()).isdisjoint(tokens):
            return ""
        text = self.tokenizer.decode(tokens).rstrip("\ufffd")  # the budget may end inside a character
        return text if text.strip() else ""
