"""Texts for calibration: each is what the loop would write alone."""

from __future__ import annotations

import pytest

from decoding.run.calibration import write_texts
from decoding.run.together import MOST_TOGETHER
from decoding.run.writer import Writer
from decoding.sampling import SamplingParams
from decoding.text import Rules
from decoding.verify import Coupling
from model import InputError
from model.fast import accelerate
from tests.laws import tiny_model

RULES = Rules(20, frozenset([1]))
PROMPTS = [[4] * 57, [0, 2, 5], [3], [4, 4, 1, 0, 2, 3, 5], [0] * 55, [5, 5, 3] * 18, [0], [1], [2], [3], [4], [5]]


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(0.7, top_p=0.9, repetition_penalty=1.4)], ids=str)
@pytest.mark.parametrize("kind", ["llama", "gemma2", "llama, fast"])
def test_each_text_is_that_of_its_prompt_alone(kind: str, params: SamplingParams) -> None:
    """Prompts of any lengths, texts that end early and texts that fill the context, in order."""
    model = tiny_model(kind.split(",")[0], vocab=6, seed=3)
    model = accelerate(model.bfloat16()) if "fast" in kind else model
    prompts = PROMPTS * 2 if len(PROMPTS) < MOST_TOGETHER < 2 * len(PROMPTS) else []
    expected = []
    for number, prompt in enumerate(prompts):
        writer = Writer(model, model.max_positions)
        writer.begin(prompt)
        expected.append(tuple(writer.write_plainly(RULES, params, Coupling("race", 7, number)).text.generated))
    texts = write_texts(model, prompts, params, RULES, 7)
    assert [text.written for text in texts] == expected
    assert [text.unused for text in texts] == [20 - len(written) for written in expected]
    assert len({len(written) for written in expected}) > 2
    assert params.temperature == 0 or len(set(expected)) > len(PROMPTS), "equal prompts differ by their numbers"


def test_a_model_with_non_finite_logits_is_refused_with_the_place() -> None:
    model = tiny_model("llama", vocab=6)
    model.layers[1].mlp.up_proj.weight[0] = float("nan")
    with pytest.raises(InputError, match="the MLP of layer 1"):
        write_texts(model, PROMPTS, SamplingParams(1.0), RULES)


def test_a_prompt_that_fills_the_context_is_refused() -> None:
    with pytest.raises(InputError, match="a prompt has 64 tokens: the model's context ends after 64"):
        write_texts(tiny_model("llama"), [[0], [0] * 64], SamplingParams(), RULES)


def test_no_prompts_give_no_texts() -> None:
    assert write_texts(tiny_model("llama"), [], SamplingParams(), RULES) == []
