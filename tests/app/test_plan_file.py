"""Plan files: read with all they say, written as they are read, and refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given

from app.plan_file import DraftPlan, read_plan, write_plan
from model.plan import LayerPlan
from tests.laws import plans
from tests.refusal import refusal


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


@given(plan=plans(4))
def test_a_plan_is_read_as_it_was_written(tmp_path_factory: Any, plan: LayerPlan) -> None:
    path = tmp_path_factory.getbasetemp() / "written.json"
    write_plan(path, DraftPlan(plan, 3), "", {})
    assert read_plan(path, 4) == DraftPlan(plan, 3)


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
