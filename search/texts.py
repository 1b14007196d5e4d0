"""Texts of a search: prompts, their continuations by the target itself, and the parts that these
are split into.

The built-in prompts have several kinds of task, since the speed of drafts depends on it. Each is a
user's turn of a chat; a model without a chat template continues it as text.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from app.chooser import Setting
from app.files import read_text
from app.prompt import encode_prompt
from app.writer import Writer
from decoding.text import Rules
from decoding.verify import Coupling
from model import InputError

PROMPTS: dict[str, list[str]] = json.loads(
    Path(__file__).with_name("prompts.json").read_text(encoding="utf-8")
)
PARTS = 4  # of the texts: one to search on, two to judge the best plans on, one held out
LEAST_TOKENS = 32  # of all texts together: fewer say nothing about a plan


@dataclass(frozen=True)
class Continuation:
    """A prompt and the tokens that the target wrote after it, at least one each.

    ``unused`` tokens of the budget were left when the text ended (0: the budget ended it).
    """

    prompt: tuple[int, ...]
    written: tuple[int, ...]
    unused: int = 0


def read_prompts(file: Path | None) -> list[str]:
    """Prompts of a file, one per line; without a file the built-in ones."""
    lines = read_text(file).split("\n") if file else chain(*PROMPTS.values())
    return [line for line in lines if line.strip()]


def plain_texts(
    setting: Setting, prompts: Sequence[str], count: int, coupling: Coupling
) -> list[Continuation]:
    """Plain texts of up to ``count`` tokens after those prompts that fit the context, as the loop
    writes them.

    A pass over many texts at once would round otherwise, and so write others.
    """
    encoded = [encode_prompt(setting.tokenizer, prompt) for prompt in prompts]
    positions = setting.model.max_positions
    fitting = [ids for ids in encoded if len(ids) < positions]
    rules = Rules(count, setting.tokenizer.eos_ids)
    writer = Writer(setting.model, min(positions, max(map(len, fitting), default=1) + count))
    texts = []
    for ids in fitting:
        writer.begin(ids)
        sample = writer.write(writer.new_text(rules), writer.plain, setting.params, coupling)
        texts.append(Continuation(tuple(ids), tuple(sample.tokens), count - len(sample.tokens)))
    return texts


def split_texts(
    texts: Sequence[Continuation],
) -> tuple[list[Continuation], list[Continuation], list[Continuation]]:
    """Texts to search on, to judge the best plans on, and held out to decode: a quarter, a half, a
    quarter, each of all kinds of prompts.

    A plan that is the best of hundreds on some texts owes a part of its lead to these texts. On
    others it is judged without it. Raises InputError for too few or too short texts.
    """
    if len(texts) < PARTS or sum(len(text.written) for text in texts) < LEAST_TOKENS:
        raise InputError(
            f"a search needs at least {PARTS} prompts that fit the model's context, and"
            f" {LEAST_TOKENS} tokens after them in all: give more prompts or a larger"
            " --max-new-tokens"
        )
    quarters = [list(texts[part::PARTS]) for part in range(PARTS)]
    return quarters[0], quarters[1] + quarters[2], quarters[3]
