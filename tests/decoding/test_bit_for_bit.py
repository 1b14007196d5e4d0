"""Text under speculation is plain text, token for token, on real checkpoints in bf16: greedy and
with a seed.
"""

from pathlib import Path

import pytest
import torch

from app.session import Session, load
from search.texts import PROMPTS

SOME = [PROMPTS["story"][0], PROMPTS["summary"][0], PROMPTS["rewriting"][2]]
EVERY = [prompt for prompts in PROMPTS.values() for prompt in prompts]
SAMPLED = {"temperature": 0.8, "top_p": 0.95, "seed": 7}


@pytest.fixture(scope="module", params=["smollm2-135m-instruct", "tiny-llama", "tiny-gemma2"])
def session(request: pytest.FixtureRequest, smollm2: Path) -> Session:
    session = load(request.param)
    assert session.dtype == torch.bfloat16
    return session


def check(session: Session, ids: list[int], params: dict[str, object], tokens: int = 16) -> None:
    """Every drafter's text is plain decoding's; a machine that cannot guarantee it gives the reason
    in one line.
    """
    if why := session.model.abilities.why_rows_vary:
        assert "\n" not in why
        return
    layers = session.model.num_layers
    ways = [
        {"draft": "none"},
        {"draft": "lookup"},
        {"draft": "exit", "exit_layer": layers * 4 // 5, "gamma": 6},
        {"draft": "exit", "exit_layer": layers // 4, "adaptive": True},
        {"draft": "lowbit", "min_target_confidence": 0.1},
        {"draft": "auto"},
    ]
    if (session.folder / "plan.json").exists():
        ways.append({"draft": "skip", "gamma": 4})
    texts = []
    for way in ways:
        options = session.merged(params, {"max_new_tokens": tokens}, way)
        texts.append(session.finish(session.begin(ids, options)).tokens)
    assert texts == [texts[0]] * len(ways)


@pytest.mark.parametrize(("prompt", "params"), [(0, {}), (1, {}), (2, SAMPLED)])
def test_speculated_text_is_plain_text(
    session: Session, prompt: int, params: dict[str, object]
) -> None:
    check(session, session.encode(SOME[prompt]), params)


@pytest.mark.prove
@pytest.mark.parametrize("number", range(len(EVERY)))
def test_speculated_text_is_plain_text_on_every_built_in_prompt(
    session: Session, number: int
) -> None:
    """80 greedy tokens of each, and 80 sampled ones."""
    ids = session.encode(EVERY[number])
    check(session, ids, {}, 80)
    check(session, ids, SAMPLED, 80)


def test_speculated_text_is_plain_text_to_the_end_of_the_context(session: Session) -> None:
    """The shipped models' context ends at 1,024."""
    ids = session.tokenizer.encode("\n\n".join(EVERY * 2))
    check(session, ids[:1010], {}, 16)
