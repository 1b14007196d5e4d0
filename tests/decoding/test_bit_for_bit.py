"""Text under speculation is plain text, token for token, on real checkpoints in bf16: greedy and
with a seed.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from app.chooser import Setting
from app.draft_options import DraftOptions
from app.prompt import encode_prompt
from app.writer import Drafting, Writer
from decoding.sampling import SamplingParams
from decoding.text import Rules
from decoding.verify import Coupling
from model.fast import accelerate
from search.texts import PROMPTS
from weights.load import WEIGHTS, load_model
from weights.tokenizer import Tokenizer

PARAMS = {"greedy": SamplingParams(), "sampled": SamplingParams(0.8, top_p=0.95)}
SOME = [PROMPTS["story"][0], PROMPTS["summary"][0], PROMPTS["rewriting"][2]]
EVERY = [prompt for prompts in PROMPTS.values() for prompt in prompts]


Loaded = tuple[Setting, list[Drafting]]


@pytest.fixture(scope="module", params=["smollm2-135m-instruct", "tiny-llama", "tiny-gemma2"])
def loaded(request: pytest.FixtureRequest, smollm2: Path) -> Loaded:
    """A prepared model with several draftings."""
    folder = WEIGHTS / request.param
    model = accelerate(load_model(folder))
    assert model.dtype == torch.bfloat16
    setting = Setting(folder, model, Tokenizer(folder), SamplingParams(), 1400)
    layers = model.num_layers
    wanted = [DraftOptions("lookup"), DraftOptions("exit", exit_layer=layers * 4 // 5, gamma=6)]
    gated = {"adaptive": True, "min_target_confidence": 0.1}
    wanted.append(DraftOptions("exit", exit_layer=layers // 4, **gated))
    wanted += [DraftOptions("skip", gamma=4)] if (folder / "plan.json").exists() else []
    return setting, [setting.drafting(options, setting.params) for options in wanted]


def check(loaded: Loaded, prompt: list[int], params: SamplingParams, tokens: int = 16) -> None:
    """Every drafter's text is plain decoding's; a machine that cannot guarantee it gives the reason
    in one line.
    """
    setting, draftings = loaded
    model, seed = setting.model, len(prompt)
    if model.why_rows_vary:
        assert "\n" not in model.why_rows_vary
        return
    writer = Writer(model, min(len(prompt) + tokens, model.max_positions))
    rules, texts = Rules(tokens, setting.tokenizer.eos_ids), {}
    writer.begin(prompt)
    for drafting in [writer.plain, *draftings]:
        text = writer.new_text(rules)
        sample = writer.write(text, drafting, params, Coupling("race", seed))
        texts[drafting.name, len(texts)] = text.generated
        assert (sample.statistics.drafted > 0) == (drafting is not writer.plain)
    (_, plain), *others = texts.items()
    assert {name: text == plain for name, text in others} == {name: True for name, _ in others}


@pytest.mark.parametrize(("prompt", "params"), [(0, "greedy"), (1, "greedy"), (2, "sampled")])
def test_speculated_text_is_plain_text(loaded: Loaded, prompt: int, params: str) -> None:
    check(loaded, encode_prompt(loaded[0].tokenizer, SOME[prompt]), PARAMS[params])


@pytest.mark.prove
@pytest.mark.parametrize("number", range(len(EVERY)))
def test_speculated_text_is_plain_text_on_every_built_in_prompt(
    loaded: Loaded, number: int
) -> None:
    """80 greedy tokens of each, and 80 sampled ones of one of each kind."""
    prompt = encode_prompt(loaded[0].tokenizer, EVERY[number])
    check(loaded, prompt, PARAMS["greedy"], 80)
    if EVERY[number] in [prompts[0] for prompts in PROMPTS.values()]:
        check(loaded, prompt, PARAMS["sampled"], 80)


def test_speculated_text_is_plain_text_to_the_end_of_the_context(loaded: Loaded) -> None:
    """The shipped models' context ends at 1,024."""
    ids = encode_prompt(loaded[0].tokenizer, "\n\n".join(EVERY) + "\n\n" + "\n\n".join(EVERY))
    check(loaded, ids[:1010], PARAMS["greedy"], 16)
