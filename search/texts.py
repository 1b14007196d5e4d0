"""The texts that the search measures on: the target's own continuations of a few prompts, written once."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from decoding.corpus.batch import sample_texts
from decoding.run.acceptance import Continuation
from decoding.sampling import SamplingParams
from model import Decoder, InputError
from search.prompts import PROMPTS
from weights.cli.files import check_utf8, read_optional_json, write_json

FILE = "calibration.json"
MOST_PROMPTS = 24  # of a longer file, as many are taken, evenly spaced
HELD_OUT = 4  # every fourth prompt is kept for the confirmation
LEAST_TOKENS = 32  # written in all: less says nothing about a plan


def read_prompts(path: Path | None) -> list[str]:
    """The prompts of a .txt file (one a line) or a .jsonl file (an object with "prompt" a line); None: the built-in.

    Raises InputError when there are fewer than two: one is needed to search with, one to confirm with.
    """
    if path is None:
        return [prompt for prompts in PROMPTS.values() for prompt in prompts]
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read as UTF-8 text: {error}") from None
    if path.suffix == ".jsonl":
        rows = enumerate(text.split("\n"), start=1)  # splitlines would cut at U+2028 too
        lines = [_prompt_of(row, f"{path}, line {number}") for number, row in rows if row.strip()]
    else:
        lines = [line for line in text.splitlines() if line.strip()]
    if len(lines) < 2:
        raise InputError(f"{path} holds {len(lines)} prompts: a search needs at least 2, one of them to confirm with")
    taken = min(len(lines), MOST_PROMPTS)
    return [lines[number * len(lines) // taken] for number in range(taken)]


def _prompt_of(line: str, where: str) -> str:
    try:
        prompt = json.loads(line)["prompt"]
    except (ValueError, TypeError, KeyError, RecursionError):
        prompt = None
    if not isinstance(prompt, str) or not prompt.strip():
        raise InputError(f'{where}: expected an object like {{"prompt": "Tell me a story."}}')
    check_utf8(f"prompt in {where}", prompt)
    return prompt


def written_texts(
    model: Decoder,
    prompts: Sequence[tuple[int, ...]],
    params: SamplingParams,
    *,
    max_new_tokens: int,
    eos_ids: frozenset[int],
    seed: int,
    folder: Path,
    fingerprint: str,
) -> list[Continuation]:
    """What the model writes after each prompt; kept in the model's folder, where it can be written.

    Raises InputError for a prompt that does not fit, and when the texts are too short to measure anything.
    """
    longest = max(map(len, prompts))
    if longest + max_new_tokens > model.max_positions:
        raise InputError(
            f"a prompt of {longest} tokens and {max_new_tokens} written ones exceed the model's context of "
            f"{model.max_positions}: shorten the prompt or lower --max-new-tokens"
        )
    asked = [fingerprint, str(model.dtype), asdict(params), max_new_tokens, sorted(eos_ids), seed, list(prompts)]
    key = hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:16]
    try:
        kept = read_optional_json(folder / FILE)
    except InputError:
        kept = {}
    written = kept.get(key)
    if not _fits(written, len(prompts), max_new_tokens, model.vocab_size):
        written = sample_texts(
            model, list(prompts), max_new_tokens=max_new_tokens, params=params, eos_ids=eos_ids, seed=seed
        )
        with suppress(OSError, ValueError):  # no place to keep them only means writing them again
            write_json(folder / FILE, {**kept, key: written})
    if sum(map(len, written)) < LEAST_TOKENS:
        raise InputError(
            f"the model wrote {sum(map(len, written))} tokens after {len(prompts)} prompts, too few to measure a plan "
            f"with: give more prompts or a larger --max-new-tokens (at least {LEAST_TOKENS} tokens in all)"
        )
    return [
        Continuation(prompt, tuple(tokens), max_new_tokens - len(tokens))
        for prompt, tokens in zip(prompts, written, strict=True)
    ]


def _fits(written: object, count: int, longest: int, vocab_size: int) -> bool:
    """Whether this is what an earlier run has kept, and not something that has become of it."""
    return (
        isinstance(written, list)
        and len(written) == count
        and all(
            isinstance(tokens, list)
            and 0 < len(tokens) <= longest
            and all(type(token) is int and 0 <= token < vocab_size for token in tokens)
            for tokens in written
        )
    )


def split(texts: Sequence[Continuation]) -> tuple[list[Continuation], list[Continuation]]:
    """The texts to search with, and those held out: every fourth, and one at least."""
    held_out = set(range(HELD_OUT - 1, len(texts), HELD_OUT)) or {len(texts) - 1}
    return (
        [text for number, text in enumerate(texts) if number not in held_out],
        [text for number, text in enumerate(texts) if number in held_out],
    )
