"""Texts of a model on many prompts, written together in shared steps."""

from collections.abc import Iterable, Sequence

from app.together import MOST_TOGETHER, Scheduler
from app.writer import Task, plain
from decoding.sampling import SamplingParams
from decoding.text import Rules, Text
from decoding.verify import Coupling
from model import Decoder, InputError


def sample_texts(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    params: SamplingParams,
    eos_ids: Iterable[int],
    seed: int,
) -> list[list[int]]:
    """The model's continuation of each prompt, of one token or more; greedy at temperature 0.

    A text ends with the first of ``eos_ids``, which it keeps, after ``max_new_tokens`` or at the
    end of the context. Text i draws by ``seed`` and i, and does not depend on the others. Raises
    InputError for a prompt that does not fit the context, and for non-finite logits.
    """
    longest = max(map(len, prompts))
    if longest >= model.max_positions:
        raise InputError(
            f"a prompt has {longest} tokens: the model's context ends after {model.max_positions}"
        )
    rules = Rules(max_new_tokens, frozenset(eos_ids))
    tasks = [
        Task(Text(prompt, rules, model), plain(model), params, Coupling("race", seed, index))
        for index, prompt in enumerate(prompts)
    ]
    capacity = max(task.text.longest for task in tasks)
    Scheduler(model, capacity, min(MOST_TOGETHER, len(tasks))).write_all(tasks)
    return [task.text.generated for task in tasks]
