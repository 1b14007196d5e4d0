"""Calibration texts of a search: prompts, and the target's continuations of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from decoding.run import calibration
from decoding.run.acceptance import Continuation
from decoding.sampling import SamplingParams
from decoding.text import Rules
from model import Decoder, InputError
from search.prompts import PROMPTS
from weights.cli.files import read_json_lines, read_text

MOST_PROMPTS = 24  # of a longer file, evenly spaced
HELD_OUT = 4  # every fourth prompt is kept for the confirmation
LEAST_TOKENS = 32  # of all texts together: fewer say nothing about a plan


def read_prompts(path: Path | None) -> list[str]:
    """Prompts of a .txt file (one per line) or .jsonl file (an object with "prompt" per line), else the built-in ones.

    Raises InputError for fewer than two: one to search with and one to confirm with.
    """
    if path is None:
        return [prompt for prompts in PROMPTS.values() for prompt in prompts]
    if path.suffix == ".jsonl":
        prompts = [_prompt_of(row, place) for place, row in read_json_lines(path)]
    else:
        prompts = [line for line in read_text(path).split("\n") if line.strip()]
    if len(prompts) < 2:
        raise InputError(f"{path} holds {len(prompts)} prompts: a search needs at least 2, one of them to confirm with")
    taken = min(len(prompts), MOST_PROMPTS)
    return [prompts[number * len(prompts) // taken] for number in range(taken)]


def _prompt_of(row: Any, place: str) -> str:
    """Prompt of a jsonl line."""
    match row:
        case {"prompt": str(prompt)} if prompt.strip():
            return prompt
    raise InputError(f'{place}: expected an object like {{"prompt": "Tell me a story."}}')


def write_texts(
    model: Decoder, prompts: Sequence[Sequence[int]], params: SamplingParams, rules: Rules, seed: int
) -> list[Continuation]:
    """The model's continuation of each prompt.

    Raises InputError for a prompt that does not fit the context, and when the texts are too short for a prediction.
    """
    longest, budget = max(map(len, prompts)), rules.max_new_tokens
    if longest + budget > model.max_positions:
        raise InputError(
            f"a prompt of {longest} tokens and {budget} written ones exceed the model's context of "
            f"{model.max_positions}: shorten the prompt or lower --max-new-tokens"
        )
    texts = calibration.write_texts(model, prompts, params, rules, seed)
    if (count := sum(len(text.written) for text in texts)) < LEAST_TOKENS:
        raise InputError(
            f"the model wrote {count} tokens after {len(prompts)} prompts, too few to measure a plan with: give more "
            f"prompts or a larger --max-new-tokens (at least {LEAST_TOKENS} tokens in all)"
        )
    return texts


def split(texts: Sequence[Continuation]) -> tuple[list[Continuation], list[Continuation]]:
    """Texts to search with, and held-out texts: every fourth, and at least one."""
    numbers = range(len(texts))
    held_out = numbers[HELD_OUT - 1 :: HELD_OUT] or numbers[-1:]
    return [texts[number] for number in numbers if number not in held_out], [texts[number] for number in held_out]
