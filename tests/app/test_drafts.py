"""Drafts: the drafter and the policy that options and a plan mean, and what they need."""

import json
import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from app import loaded, offers
from app.drafts import strategy_of
from app.options import Options
from app.plan_file import DraftPlan
from app.session import Session, load
from decoding.policies import AdaptiveExit, ConfidenceGate, FixedLength, Policy
from model.places import cache_folder
from model.plan import LayerPlan
from tests.calls import recorded
from weights import memory

LAYERS = 24  # of tiny-llama
PLAN = DraftPlan(LayerPlan.skipping(LAYERS, [1], []), gamma=6, threshold=0.7)
PLAIN = DraftPlan(LayerPlan.skipping(LAYERS, [1], []), gamma=0)
PROMPT = "Once upon a time"
Seen = tuple[type[Policy], int, float | None]


@pytest.fixture(scope="module")
def session() -> Session:
    return load("tiny-llama", max_new_tokens=24)


def found(session: Session, **options: Any) -> Any:
    sample = session.begin(session.encode(PROMPT), session.options.merged(options))
    slot = session.slot_for(sample.source.longest)
    slot.read(sample, session.model)
    return strategy_of(session, sample, slot, session.model)


def seen(policy: Policy) -> Seen:
    """Kind, length and threshold."""
    return type(policy), policy.gamma, getattr(policy, "threshold", None)


@pytest.mark.parametrize(
    ("given", "plan", "expected"),
    [
        ({}, None, (FixedLength, 4, None)),
        ({}, PLAN, (AdaptiveExit, 6, 0.7)),
        ({}, PLAIN, (FixedLength, 0, None)),
        ({"adaptive": True}, PLAIN, (FixedLength, 0, None)),
        ({"gamma": 2}, PLAIN, (FixedLength, 2, None)),
        ({"gamma": 2}, PLAN, (FixedLength, 2, None)),
        ({"adaptive": False}, PLAN, (FixedLength, 6, None)),
        ({"adaptive": False}, None, (FixedLength, 4, None)),
        ({"adaptive": True}, None, (AdaptiveExit, 8, 0.8)),
        ({"adaptive": True, "temperature": 1.0}, None, (AdaptiveExit, 8, 0.5)),
        ({"adaptive": True, "gamma": 3}, None, (AdaptiveExit, 3, 0.8)),
        ({"adaptive": True, "gamma": 3}, PLAN, (AdaptiveExit, 3, 0.7)),
    ],
)
def test_what_an_option_does_not_say_the_plan_says(
    session: Session, given: dict[str, Any], plan: DraftPlan | None, expected: Seen
) -> None:
    """A plan that says that no draft pays drafts only where a length is given."""
    of_plan = {"draft": "skip", "plan": plan} if plan else {"draft": "exit"}
    assert seen(found(session, **of_plan, **given).policy) == expected
    gated = found(session, **of_plan, **given, min_target_confidence=0.4).policy
    inner = getattr(gated, "inner", gated)
    assert (seen(inner), isinstance(gated, ConfidenceGate)) == (expected, expected[1] > 0)


@pytest.mark.parametrize(
    ("bits", "kernels", "expected"),
    [
        (None, (4,), {4}),
        (None, (4, 8), {4, 8}),
        (8, (4, 8), {8}),
        (None, (), {4, 8}),
    ],
)
def test_a_low_bit_draft_has_the_bits_asked_for_and_its_head_those_with_a_kernel(
    bits: int | None,
    kernels: tuple[int, ...],
    expected: set[int],
    session: Session,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By default four, and eight in the head. A GPU has a kernel for four bits only."""
    abilities = session.model.abilities._replace(low_bits=kernels)
    monkeypatch.setattr(session.model, "abilities", abilities)
    strategy = found(session, draft="lowbit", bits=bits)
    plan = strategy.drafter.plan
    assert {*plan.attention, *plan.mlp, plan.head} == expected and strategy.policy.gamma == 5


def test_auto_takes_four_bits_and_a_plan_only_if_their_copies_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A window has the copies of its plan. Copies that are made need no more memory."""
    monkeypatch.setattr(offers, "LONG", 8)
    plan = LayerPlan.full(LAYERS).in_bits(8)
    session = load("tiny-llama", plan=DraftPlan(plan, 3))
    session.make_copies_at_once()
    eight, four = (
        memory.low_bit_bytes(session.config, each) for each in (plan, session.low_bit_plan.plan)
    )
    eight += 6 * session.config.vocab_size * session.config.hidden_size + 1  # while it is rounded
    for free, names in [
        (1, []),
        (eight, ["low bits"]),
        (four + eight, ["low bits", "plan"]),
        (1, ["low bits", "plan"]),
    ]:
        monkeypatch.setattr(memory, "free_bytes", lambda device, free=free: free)
        drafters = found(session, draft="auto").policy.drafters
        assert [*drafters] == [*names, *(f"{name}, newest" for name in names), "lookup"]


@pytest.mark.parametrize(
    ("plan", "names"),
    [
        ({"attn": [1]}, ["low bits", "plan"]),
        ({"bits": 8}, ["low bits", "plan"]),
        ({"bits": 4, "head_bits": 8}, ["low bits"]),
        ({"attn": [1], "gamma": 0}, ["low bits"]),
    ],
    ids=str,
)
def test_auto_drafts_in_four_bits_and_with_a_plan_that_is_another_and_pays(
    plan: dict[str, Any], names: list[str], tmp_path: Path
) -> None:
    file = tmp_path / "plan.json"
    file.write_text(json.dumps({"attn": [], "alpha": 0.9} | plan))
    session = Session(Options(model="tiny-llama", plan=str(file)))
    assert [*session.optional_plans(session.options)] == names
    assert session.memory(64).low_bit_copies == 0, "copies are made only if they fit"


def test_a_length_under_auto_is_a_cap(session: Session) -> None:
    longest = [found(session, draft="auto", gamma=gamma).policy.gamma for gamma in (0, 2, 90)]
    assert longest == [0, 2, 7]


@pytest.mark.parametrize(
    ("options", "granted"),
    [
        ({}, True),
        ({"temperature": 1.0}, True),
        ({"temperature": 1.0, "coupling": "ratio"}, False),
        ({"temperature": 1.0, "coupling": "block"}, False),
        ({"no_compile": True}, False),
    ],
    ids=str,
)
def test_costs_are_measured_where_no_draft_length_can_change_a_text(
    options: dict[str, Any], granted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once per session; its texts then share their estimates."""
    measured = recorded(monkeypatch, offers, "measured_costs", lambda _, cache, *__: cache.length)
    session = load("tiny-llama", draft="auto", max_new_tokens=4, seed=0, **options)
    texts = [session.write(PROMPT) for _ in range(2)]
    behind_the_prompt = len(session.encode(PROMPT)) - 1
    assert measured == [behind_the_prompt] * granted
    assert granted == bool(session.offers.estimates.rates)
    assert texts[0].tokens == texts[1].tokens


@pytest.mark.parametrize("coupling", ["race", "ratio"])
def test_auto_counts_costs_anew_where_a_text_has_doubled_and_offers_windows_in_long_ones(
    coupling: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"SHORT": 8, "LONG": 32, "WINDOW": 8}.items():
        monkeypatch.setattr(f"app.offers.{name}", value)
    own = DraftPlan(replace(PLAN.plan, window=16))
    drawn = {"temperature": 1.0, "seed": 1, "coupling": coupling}
    session = load("tiny-llama", max_new_tokens=60, plan=own, **drawn)
    session.make_copies_at_once()
    found(session, temperature=0.0)  # whose costs are measured
    costs_at = found(session).policy.costs_at
    counted = [costs_at(length) for length in (5, 8, 9, 32, 33, 64)]
    assert {costs.timed for costs in counted} == {coupling == "race"}
    short = ["low bits", "plan"]  # a plan's own window is its maker's choice
    assert [[*costs.steps] for costs in counted] == [short] * 4 + [[*short, "low bits, newest"]] * 2
    different = [before != after for before, after in pairwise(counted)]
    assert different == [False, True, True, True, False]
    texts = [session.write(PROMPT, draft=draft).tokens for draft in ("auto", "auto", "none")]
    assert texts[0] == texts[1] and (coupling == "ratio" or texts[0] == texts[2])


FEW = {"max_new_tokens": 24}


@pytest.mark.parametrize(
    ("options", "written", "rate", "makes"),
    [
        (FEW, 0, 1, False),
        ({"max_new_tokens": 1000}, 0, 1, True),
        (FEW, 1000, 1, True),
        (FEW, math.inf, 1e-9, True),
        (FEW, 0, 100, True),
        (FEW | {"temperature": 1.0}, 0, 1, False),
        (FEW | {"temperature": 1.0, "coupling": "ratio"}, 0, 1, True),
        (FEW | {"draft": "lowbit"}, 0, 1, True),
        (FEW | {"draft": "lowbit", "gamma": 0, "adaptive": True}, 0, 1, False),
    ],
    ids=str,
)
def test_auto_makes_copies_that_its_tokens_earn_and_other_drafts_make_theirs_always(
    options: dict[str, Any],
    written: float,
    rate: float,
    makes: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """``written``: tokens before. Under the ratio rule another draft would be another text."""
    monkeypatch.setattr(loaded, "ROUNDED", rate * loaded.ROUNDED)
    session = load("tiny-llama", seed=1)
    session.written = written
    found(session, **options)
    assert bool(session.prepared) == makes


def test_a_session_counts_what_it_writes_and_a_warm_up_makes_all_copies() -> None:
    session = load("tiny-llama", max_new_tokens=6)
    for _ in range(2):
        session.write(PROMPT, draft="exit", exit_layer=LAYERS)
    assert session.written == 12
    session.warm_up([0, 0])
    assert session.low_bit_plan.plan in session.prepared


def test_the_seconds_that_copies_take_are_said_before_they_are_made(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    session = load("tiny-llama", max_new_tokens=4)
    said = recorded(monkeypatch, type(session.model), "prepare", lambda *_: capsys.readouterr().err)
    copies = memory.low_bit_bytes(session.config, session.low_bit_plan.plan)
    monkeypatch.setattr(loaded, "ROUNDED", copies / 7)
    session.write(PROMPT, draft="lowbit")
    assert "rounding weights for drafts takes about 7.0 s" in said[0]
    session.write(PROMPT, draft="lowbit", window=8)
    assert not capsys.readouterr().err


def test_a_models_folder_stays_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, session: Session
) -> None:
    """Importance is measured anew, since the cache is empty but for compiled steps."""
    (tmp_path / "step").symlink_to(cache_folder() / "step")
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path))
    before = [(file, file.stat().st_mtime_ns) for file in session.folder.iterdir()]
    load("tiny-llama", draft="lowbit", max_new_tokens=4).write(PROMPT)
    assert [(file, file.stat().st_mtime_ns) for file in session.folder.iterdir()] == before
