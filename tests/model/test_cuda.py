"""Tests of whole texts on a real GPU: tokens, waits, memory. Skipped where there is none.

Each captured step is compared with the readable blocks when it is made (``StaticDecoder``).
One case of each kind runs by default, and the others under ``-m prove``.
"""

import warnings
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from app.session import Session, load
from decoding.rows import NOT_COMPILED
from decoding.verify import RULES
from tests.peak import peak_bytes

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(),
    reason="needs a CUDA device: run it on a machine with an NVIDIA GPU",
)
DRAFTS = ["lowbit", "auto", "lookup", "exit"]
MODELS = ["smollm2-135m-instruct", "tiny-gemma2"]
PROMPT = "Why is the sky blue?"


def each(*cases: Any) -> list[Any]:
    """Cases of a test, of which the first one runs by default."""
    return [
        pytest.param(*case, marks=[pytest.mark.prove] * (at > 0)) for at, case in enumerate(cases)
    ]


@pytest.fixture(autouse=True)
def forget_compiled_code() -> Iterator[None]:
    """Each test compiles its own shapes."""
    yield
    torch._dynamo.reset()
    torch.cuda.set_sync_debug_mode("default")


def is_recorded(session: Session) -> bool:
    """Whether all steps are graphs, and all sampling is compiled."""
    steps = session.slot.cache.static.steps.values()
    recorded = all(step.replay != step.compute for step in steps)
    return recorded and session.model.trouble is None and not NOT_COMPILED


def session_of(name: str = "smollm2-135m-instruct", **options: object) -> Session:
    return load(name, device="cuda", max_new_tokens=24, seed=5, **options)


@pytest.mark.parametrize(("draft", "name"), each(*product(DRAFTS, MODELS)))
def test_a_session_writes_plain_decodings_text(name: str, draft: str, smollm2: Path) -> None:
    session = session_of(name)
    for prompt, temperature in product([PROMPT, "I saw a fox. " * 30], [0, 0.8]):
        plain = session.write(prompt, draft="none", temperature=temperature)
        drafted = session.write(prompt, draft=draft, temperature=temperature)
        assert drafted.tokens == plain.tokens
    assert is_recorded(session)


@pytest.mark.parametrize(
    ("draft", "coupling"), each(*product(["lowbit", "lookup", "exit"], reversed(RULES)))
)
def test_a_round_waits_for_the_device_once_under_every_rule(
    draft: str, coupling: str, smollm2: Path
) -> None:
    """To read the verdict; and torch counts the copy of a text's new tokens."""
    how = {"gamma": 4, "temperature": 0.8, "top_k": 50, "top_p": 0.9}
    session = session_of(draft=draft, coupling=coupling, **how)
    session.write(PROMPT)  # compiles and captures
    rounds = session.rounds(session.begin(session.encode(PROMPT)))
    next(rounds)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        count = len(list(rounds))
    assert count and len(told) <= count * (2 if draft == "lookup" else 1) + 1


@pytest.mark.parametrize("name", each(*((name,) for name in MODELS)))
def test_memory_stays_within_the_estimate_captures_included(name: str, smollm2: Path) -> None:
    session = session_of(name, draft="exit", temperature=0.8, top_k=50, top_p=0.9)
    prompt = "I saw a fox. " * 90
    count = len(session.encode(prompt))
    needed = session.memory(count + 24, count)
    took = peak_bytes(lambda: session.write(prompt), session.device)
    assert took <= needed.cache + needed.workspace + needed.buffers  # those of libraries
