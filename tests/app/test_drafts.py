"""Drafts: plan files, the drafter and policy that options and a plan mean, and what they need."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from app import loaded, offers
from app.drafts import low_bit_plan, strategy_of
from app.options import Options
from app.plan_file import DraftPlan, read_plan, write_plan
from app.session import Session, load
from decoding.policies import AdaptiveExit, ConfidenceGate, FixedLength, Policy
from model.plan import LayerPlan
from tests.calls import recorded
from tests.laws import plans
from tests.refusal import refusal
from weights import memory

LAYERS = 24  # of tiny-llama
FULL = LayerPlan.full(LAYERS)
PLAN = DraftPlan(LayerPlan.skipping(LAYERS, [1], []), gamma=6, threshold=0.7)
PLAIN = DraftPlan(LayerPlan.skipping(LAYERS, [1], []), gamma=0)
PROMPT = "Once upon a time"
Seen = tuple[type[Policy], int, float | None]


@pytest.fixture(scope="module")
def session() -> Session:
    return load("tiny-llama", max_new_tokens=24)


def found(session: Session, **options: Any) -> Any:
    sample = session.begin(session.encode(PROMPT), session.merged(options))
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
    with_kernels = session.model.abilities._replace(low_bits=kernels)
    monkeypatch.setattr(session.model, "abilities", with_kernels)
    strategy = found(session, draft="lowbit", bits=bits)
    plan = strategy.drafter.plan
    assert {*plan.attention, *plan.mlp, plan.head} == expected and strategy.policy.gamma == 5


def test_auto_takes_four_bits_and_a_plan_only_if_their_copies_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A window has the copies of its plan. Copies that are made need no more memory."""
    monkeypatch.setattr(offers, "LONG", 8)
    session = load("tiny-llama", plan=DraftPlan(FULL.in_bits(8), 3))
    session.copies_at_once = True
    eight, four = (memory.low_bit_bytes(session.config, FULL.in_bits(bits)) for bits in (8, 4))
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
        (PLAN, ["low bits", "plan"]),
        (DraftPlan(FULL.in_bits(8)), ["low bits", "plan"]),
        (DraftPlan(FULL.in_bits(4)), ["low bits"]),
        (PLAIN, ["low bits"]),
    ],
    ids=["skips", "eight bits", "four bits", "no draft pays"],
)
def test_auto_drafts_in_four_bits_and_with_a_plan_that_is_another_and_pays(
    plan: DraftPlan, names: list[str]
) -> None:
    session = Session(Options(model="tiny-llama", plan=plan))
    assert [*session.optional_plans(session.options)] == names
    assert session.memory(64).low_bit_copies == 0, "copies are made only if they fit"


def test_a_plans_longest_draft_takes_memory() -> None:
    of_length = [
        Session(Options(model="tiny-llama", draft="skip", plan=replace(PLAN, gamma=gamma)))
        for gamma in (8, 64)
    ]
    short, long = (session.memory(999, prompt=1).workspace for session in of_length)
    assert long / short == (64 + 1) / (8 + 1)


def test_a_length_under_auto_is_a_cap(session: Session) -> None:
    assert [found(session, draft="auto", gamma=n).policy.gamma for n in (0, 2, 90)] == [0, 2, 7]


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
    texts = {session.write(PROMPT).text for _ in range(2)}
    assert measured == [len(session.encode(PROMPT)) - 1] * granted, "behind the prompt"
    assert granted == bool(session.offers.estimates.rates_by_kind) and len(texts) == 1


@pytest.mark.parametrize("coupling", ["race", "ratio"])
def test_auto_counts_costs_anew_where_a_text_has_doubled_and_offers_windows_in_long_ones(
    coupling: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"SAME_COSTS": 8, "LONG": 32, "WINDOW": 8}.items():
        monkeypatch.setattr(f"app.offers.{name}", value)
    drawn = {"temperature": 1.0, "seed": 1, "coupling": coupling}
    session = load(
        "tiny-llama", max_new_tokens=60, plan=DraftPlan(replace(PLAN.plan, window=16)), **drawn
    )
    session.copies_at_once = True
    found(session, temperature=0.0)  # whose costs are measured
    costs_at = found(session).policy.costs_at
    counted = [costs_at(length) for length in (5, 8, 9, 32, 33, 64)]
    assert {costs.timed for costs in counted} == {coupling == "race"}
    short = ["low bits", "plan"]  # a plan's own window is its maker's choice
    assert [[*costs.step_costs] for costs in counted] == [short] * 4 + [
        [*short, "low bits, newest"]
    ] * 2
    assert [a != b for a, b in pairwise(counted)] == [False, True, True, True, False]
    texts = [session.write(PROMPT, draft=draft).tokens for draft in ("auto", "auto", "none")]
    assert texts[0] == texts[1] and (coupling == "ratio" or texts[0] == texts[2])


FEW = {"max_new_tokens": 24}


@pytest.mark.parametrize(
    ("options", "written", "rate", "makes"),
    [
        (FEW, 0, 1, False),
        ({"max_new_tokens": 1000}, 0, 1, True),
        (FEW, 1000, 1, True),
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
    written: int,
    rate: float,
    makes: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """``written``: tokens before. Under the ratio rule another draft would be another text."""
    monkeypatch.setattr(loaded, "ROUNDING_RATE", rate * loaded.ROUNDING_RATE)
    session = load("tiny-llama", seed=1)
    session.written = written
    found(session, **options)
    assert bool(session.prepared) == makes


def test_a_warm_up_makes_all_copies() -> None:
    session = load("tiny-llama", max_new_tokens=6)
    session.warm_up([0, 0])
    assert low_bit_plan(session, session.options).plan in session.prepared


def test_the_seconds_that_copies_take_are_said_before_they_are_made(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Once: a window changes no copies."""
    session = load("tiny-llama", max_new_tokens=4)
    said = recorded(monkeypatch, type(session.model), "prepare", lambda *_: capsys.readouterr().err)
    monkeypatch.setattr(loaded, "ROUNDING_RATE", 1000.0)
    for window in (None, 8):
        session.write(PROMPT, draft="lowbit", window=window)
    assert "rounding weights for drafts takes about" in said[0] and not any(said[1:])


# Plan files


def file_of(folder: Path, value: Any) -> Path:
    """A plan file of a JSON value, or of a text as it is."""
    path = folder / "plan.json"
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return path


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (
            {"attn": [3, 1], "mlp": [2], "gamma": 5, "threshold": 0.6, "model": "x", "dtype": "y"},
            DraftPlan(LayerPlan.skipping(4, [1, 3], [2]), 5, 0.6),
        ),
        ({"mlp": [0]}, DraftPlan(LayerPlan.skipping(4, [], [0]))),
        ({"bits": 4}, DraftPlan(LayerPlan((4, 4, 4, 4), (4, 4, 4, 4), 16))),
        ({"attn": [], "window": 9}, DraftPlan(LayerPlan((16,) * 4, (16,) * 4, 16, 9))),
        (
            {"attn": [1], "bits": 8, "head_bits": 8},
            DraftPlan(LayerPlan((8, 0, 8, 8), (8, 8, 8, 8), 8)),
        ),
        (
            {"mlp": [0], "bits": {"attn": [4, 8, 16, 0], "mlp": [8, 4, 4, 16]}},
            DraftPlan(LayerPlan((4, 8, 16, 0), (0, 4, 4, 16), 16)),
        ),
        (
            {"bits": {"mlp": [4, 4, 4, 4]}},
            DraftPlan(LayerPlan((16, 16, 16, 16), (4, 4, 4, 4), 16)),
        ),
    ],
    ids=[
        "skips, gamma and threshold",
        "an MLP",
        "bits",
        "a window",
        "bits of the head",
        "bits of each",
        "bits of MLPs",
    ],
)
def test_a_plan_file_is_read_with_all_it_says(
    tmp_path: Path, value: Any, expected: DraftPlan
) -> None:
    assert read_plan(file_of(tmp_path, value), 4) == expected


def test_a_plan_file_that_was_rewritten_is_read_anew(session: Session, tmp_path: Path) -> None:
    for layers in ([1], [1, 2]):
        path = file_of(tmp_path, {"attn": layers})
        assert found(session, draft="skip", plan=path).drafter.plan.skipped_attention == layers


RATES = st.none() | st.floats(0, 1)


@given(st.builds(DraftPlan, plans(4), st.none() | st.integers(0, 64), RATES, RATES))
def test_a_plan_is_read_as_it_was_written(tmp_path_factory: Any, chosen: DraftPlan) -> None:
    assume(any(chosen.plan.attention + chosen.plan.mlp))
    path = tmp_path_factory.getbasetemp() / "written.json"
    write_plan(path, chosen, "", {})
    assert read_plan(path, 4) == chosen


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (
            {"bits": 5},
            "bits must be 4, 8 or 16, or lists of 4 such numbers for attn and mlp, found 5",
        ),
        ({"bits": 0}, "found 0"),
        ({"bits": False}, "found False"),
        ({"bits": {"attn": [4, 4, 4]}}, "bits must be 4, 8 or 16, or lists"),
        ({"bits": {"attn": [4, 4, 4, True]}}, "bits must be 4, 8 or 16, or lists"),
        ({"bits": {"head": [4, 4, 4, 4]}}, "bits must be 4, 8 or 16, or lists"),
        ({"bits": 4, "head_bits": 0}, "head_bits must be 4, 8 or 16, found 0"),
        ({"attn": [1, 1]}, "different layers"),
        ({"attn": [True]}, "attn must be a list of different layers from 0 to 3, found [True]"),
        ({"attn": [1.0]}, "found [1.0]"),
        ({"attn": [4], "mlp": []}, "from 0 to 3, found [4]"),
        ({"attn": [], "mlp": [-1]}, "mlp must be a list of different layers"),
        ({"attn": [[1]]}, "found [[1]]"),
        ({"attn": 3}, "found 3"),
        ({"attn": [], "window": 0}, "window must be a whole number of at least 1, found 0"),
        ({"attn": [], "gamma": -1}, "gamma"),
        ({"attn": [], "gamma": 65}, "gamma must be a whole number from 0 to 64, found 65"),
        ({"attn": [0, 1, 2, 3], "mlp": [0, 1, 2, 3]}, "skips every layer"),
        ({"attn": [], "threshold": 1.1}, "threshold"),
        ('{"attn": [], "threshold": NaN}', "threshold"),
        ([1, 2], "one object"),
        ({"attention": [1]}, "attn"),
        ({"attn": [], "treshold": 0.6}, "the key 'treshold' is unknown"),
        ("{", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
    ],
    ids=lambda value: f"{value!s:.40}",
)
def test_a_wrong_plan_file_is_refused_with_its_name(tmp_path: Path, value: Any, said: str) -> None:
    message = refusal(read_plan, file_of(tmp_path, value), 4)
    assert said in message and "plan.json" in message
