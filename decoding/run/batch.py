"""Batched sampling: continuations of many prompts, written together by plain decoding."""

from __future__ import annotations

from collections.abc import Sequence

from decoding.run.acceptance import Continuation
from decoding.run.drafting import plain
from decoding.run.together import Conductor, Task
from decoding.sampling import SamplingParams
from decoding.text import Rules, Text
from decoding.verify import Coupling
from model import Decoder, InputError

TOGETHER = 16  # texts in a step


def write_texts(
    model: Decoder, prompts: Sequence[Sequence[int]], params: SamplingParams, rules: Rules, seed: int = 0
) -> list[Continuation]:
    """The continuation of each prompt, of one token or more; sample i of ``seed`` under the race is that of prompt i.

    Raises InputError for a prompt that does not fit the context, and for non-finite logits.
    """
    longest = max(map(len, prompts), default=0)
    if longest >= model.max_positions:
        raise InputError(f"a prompt has {longest} tokens: the model's context ends after {model.max_positions}")
    together = min(len(prompts), TOGETHER) if hasattr(model, "together") else 1
    conductor = Conductor(model, min(longest + rules.max_new_tokens, model.max_positions), together)
    tasks = [
        Task(Text(prompt, rules, model), plain(model), params, Coupling("race", seed, number))
        for number, prompt in enumerate(prompts)
    ]
    for task in tasks:
        conductor.submit(task)
    conductor.run()
    for task in tasks:
        if task.error is not None:
            raise task.error
    texts = [(task.text.tokens[: task.text.prompt_length], task.text.generated) for task in tasks]
    return [Continuation(tuple(prompt), tuple(text), rules.max_new_tokens - len(text)) for prompt, text in texts]
