"""Texts of a search: prompts, the parts that these are split into, and continuations by the target
itself.

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
PARTS = 3  # of the prompts: two to search on, one held out to decode
LEAST_TOKENS = 32  # of all texts together: fewer say nothing about a plan

Prompt = tuple[int, ...]  # its tokens


@dataclass(frozen=True)
class Continuation:
    """A prompt and the tokens that the target wrote after it, at least one each."""

    prompt: Prompt
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


def split_prompts(session: Session, prompts: Sequence[str]) -> tuple[list[Prompt], list[Prompt]]:
    """Return the prompts to search on, and those held out to decode, of all kinds each. Prompts
    that do not fit the context are left out.

    A plan that is the best of hundreds on some texts owes a part of its lead to these texts. Raises
    InputError where fewer than ``PARTS`` prompts fit.
    """
    encoded = [tuple(session.encode(prompt)) for prompt in prompts]
    fitting = [prompt for prompt in encoded if len(prompt) < session.context]
    if len(fitting) < PARTS:
        raise InputError(
            f"a search needs at least {PARTS} prompts that fit the model's context: give more"
        )
    searched = [prompt for at, prompt in enumerate(fitting, start=1) if at % PARTS]
    return searched, fitting[PARTS - 1 :: PARTS]


def plain_texts(session: Session, prompts: Sequence[Prompt]) -> list[Continuation]:
    """Return plain texts after the prompts as the loop writes them: a pass over many texts at once
    would round otherwise, and so write others. Raises InputError for too short texts.
    """
    options = session.options.merged({"draft": "none"})
    samples = [session.finish(session.begin(prompt, options)) for prompt in prompts]
    if sum(len(sample.tokens) for sample in samples) < LEAST_TOKENS:
        raise InputError(
            f"a search needs at least {LEAST_TOKENS} tokens after its prompts in all: give more"
            " prompts or a larger --max-new-tokens"
        )
    return [
        Continuation(prompt, tuple(sample.tokens))
        for prompt, sample in zip(prompts, samples, strict=True)
    ]
