"""Text under speculation is plain text, token for token, on real checkpoints in bf16: greedy, with
a seed, and under a schema, which it then follows.
"""

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch

from app.common.files import read_json
from app.session import Session, load
from benchmark.sections import SCHEMAS
from search.texts import PROMPTS

EVERY = [prompt for prompts in PROMPTS.values() for prompt in prompts]
SAMPLED = {"temperature": 0.8, "top_p": 0.95, "seed": 7}


@pytest.fixture(scope="module", params=["smollm2-135m-instruct", "tiny-llama", "tiny-gemma2"])
def session(request: pytest.FixtureRequest, smollm2: Path) -> Session:
    session = load(request.param)
    assert session.dtype == torch.bfloat16
    return session


def check(session: Session, ids: list[int], given: dict[str, Any], tokens: int = 16) -> str | None:
    """Every drafter's text is plain decoding's, which is returned; a machine that cannot guarantee
    it gives the reason in one line.
    """
    if why := session.model.abilities.why_rows_vary:
        assert "\n" not in why
        return None
    layers = session.model.num_layers
    ways = [
        {"draft": "none"},
        {"draft": "lookup"},
        {"draft": "exit", "exit_layer": layers * 4 // 5, "gamma": 6},
        {"draft": "exit", "exit_layer": layers // 4, "adaptive": True},
        {"draft": "lowbit", "min_target_confidence": 0.1},
        {"draft": "auto"},
        *([{"draft": "skip", "gamma": 4}] if (session.folder / "plan.json").exists() else []),
    ]
    given = given | {"max_new_tokens": tokens}
    texts = [
        session.finish(session.begin(ids, session.options.merged(given | way))) for way in ways
    ]
    assert [text.tokens for text in texts] == [texts[0].tokens] * len(ways)
    return texts[0].text


@pytest.mark.parametrize(
    ("prompt", "given"),
    [
        (PROMPTS["story"][0], {}),
        (PROMPTS["summary"][0], {}),
        (PROMPTS["rewriting"][2], SAMPLED),
        ("\n\n".join(EVERY * 2), {}),
    ],
    ids=["story", "summary", "rewriting", "to the end of the context"],
)
def test_speculated_text_is_plain_text(
    session: Session, prompt: str, given: dict[str, Any]
) -> None:
    """The shipped models' context ends at 1,024."""
    check(session, session.encode(prompt)[:1010], given)


@pytest.mark.prove
@pytest.mark.parametrize("number", range(len(EVERY)))
def test_speculated_text_is_plain_text_on_every_built_in_prompt(
    session: Session, number: int
) -> None:
    """80 greedy tokens of each, and 80 sampled ones."""
    ids = session.encode(EVERY[number])
    check(session, ids, {}, 80)
    check(session, ids, SAMPLED, 80)


@pytest.mark.parametrize(("name", "style"), [("person", {}), ("tool call", SAMPLED)])
def test_speculated_text_under_a_schema_is_plain_text_and_valid(
    smollm2: Path, name: str, style: dict[str, Any]
) -> None:
    asked = read_json(SCHEMAS)[name]
    session = load(str(smollm2), json_schema=asked["schema"])
    text = check(session, session.encode(asked["request"]), style, 160)
    jsonschema.validate(
        json.loads(text), asked["schema"], format_checker=jsonschema.FormatChecker()
    )
