"""--compare measures fairly: the same request, the same context, the same rules, after a warm-up."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import generate
from decoding.rounds import Round
from tests.folders import write_folder


def test_the_baseline_starts_from_the_same_context_after_a_warm_up() -> None:
    """Four runs of the loop: two short ones that are not timed, the speculative one, the plain one."""
    runs: list[tuple[str, int, int]] = []
    production = generate.speculate

    def watched(*arguments: Any, **named: Any) -> Iterator[Round]:
        _, cache, prompt, drafter, _, _, stop, *_ = arguments
        runs.append((type(drafter).__name__, stop.max_new_tokens, cache.length - len(prompt)))
        return production(*arguments, **named)

    with tempfile.TemporaryDirectory() as folder, mock.patch.object(generate, "speculate", watched):
        model = str(write_folder(Path(folder)))
        options = ["the hen", "--model", model, "--draft", "exit", "--max-new-tokens", "9", "--compare"]
        assert generate.main(options) == 0
    drafters, budgets, beyond_prompt = zip(*runs, strict=True)
    assert drafters == ("ModelDrafter", "NoDraft", "ModelDrafter", "NoDraft")
    assert budgets == (6, 6, 9, 9), "the warm-up has room for a draft of full length, 4 tokens"
    assert beyond_prompt[0] == -1, "the first run finds the prompt but its last token, as speculate wants it"
