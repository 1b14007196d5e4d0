"""Texts of a search: prompts, their continuations by the target itself, and the parts that these
are split into.

The built-in prompts have several kinds of task, since the speed of drafts depends on it. Knows
nothing of plans.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from app.common.files import read_text
from app.session import Session
from model.errors import InputError
from weights.tokenizer import Tokenizer

PROMPTS: dict[str, list[str]] = json.loads(
    Path(__file__).with_name("prompts.json").read_text(encoding="utf-8")
)
DOCUMENTS = Path(__file__).parents[1] / "docs"
PARTS = 3  # of the texts: two to search on, one held out to decode
LEAST_TOKENS = 32  # of all texts together: fewer say nothing about a plan


@dataclass(frozen=True)
class Continuation:
    """A prompt and the tokens that the target wrote after it, at least one each."""

    prompt: tuple[int, ...]
    written: tuple[int, ...]


def read_prompts(file: Path | None) -> list[str]:
    """Return the different prompts of a file, one per line; without a file the built-in ones."""
    lines = read_text(file).split("\n") if file else chain(*PROMPTS.values())
    return [*dict.fromkeys(line for line in lines if line.strip())]


def after_documents(tokenizer: Tokenizer, requests: Sequence[str], length: int) -> list[str]:
    """Return long prompts: each is a part of this project's documents of ``length`` tokens, with a
    request after it. The parts differ. An edited document makes other prompts, and so begins
    another study.

    Raises InputError where the documents are shorter; a program without its checkout has none.
    """
    texts = [path.read_text(encoding="utf-8") for path in sorted(DOCUMENTS.glob("*.md"))]
    tokens = tokenizer.encode("\n\n".join(texts))
    if length > len(tokens):
        raise InputError(
            f"--context {length}: the documents have {len(tokens)} tokens, and only the checkout"
            " has them: give fewer"
        )
    begins = [number * (len(tokens) - length) // len(requests) for number in range(len(requests))]
    parts = [tokenizer.decode(tokens[begin : begin + length]) for begin in begins]
    return [f"{part}\n\n{request}" for part, request in zip(parts, requests, strict=True)]


def plain_texts(session: Session, prompts: Sequence[str]) -> list[Continuation]:
    """Return plain texts after those prompts that fit the context, as the loop writes them: a pass
    over many texts at once would round otherwise, and so write others.
    """
    options = session.options.merged({"draft": "none"})
    texts = []
    for prompt in prompts:
        ids = session.encode(prompt, options)
        if len(ids) < session.context:
            sample = session.finish(session.begin(ids, options))
            texts.append(Continuation(tuple(ids), tuple(sample.tokens)))
    return texts


def split_texts(texts: Sequence[Continuation]) -> tuple[list[Continuation], list[Continuation]]:
    """Return the texts to search on, and those held out to decode, of all kinds of prompts each.

    A plan that is the best of hundreds on some texts owes a part of its lead to these texts. Raises
    InputError for too few or too short texts.
    """
    if len(texts) < PARTS or sum(len(text.written) for text in texts) < LEAST_TOKENS:
        raise InputError(
            f"a search needs at least {PARTS} prompts that fit the model's context, and"
            f" {LEAST_TOKENS} tokens after them in all: give more prompts or a larger"
            " --max-new-tokens"
        )
    searched = [text for at, text in enumerate(texts, start=1) if at % PARTS]
    return searched, [*texts[PARTS - 1 :: PARTS]]
