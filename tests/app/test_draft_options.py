"""Options of drafting: the policy that they mean, with and without a plan's own."""

import pytest

from app.draft_options import DraftOptions, policy_for
from app.plan_file import DraftPlan
from decoding.policies import AdaptiveExit, ConfidenceGate, FixedLength, Policy
from decoding.sampling import SamplingParams
from model import InputError, LayerPlan

FULL = LayerPlan.full(2)
PLAN = DraftPlan(FULL, gamma=6, threshold=0.7)
Seen = tuple[type[Policy], int, float | None]


def policy(options: DraftOptions, plan: DraftPlan | None, temperature: float = 0.0) -> Policy:
    default = plan.new_policy if plan else lambda: FixedLength(4)
    return policy_for(options, SamplingParams(temperature), default, plan)()


def seen(found: Policy) -> Seen:
    """Kind, length and threshold."""
    return type(found), found.gamma, getattr(found, "threshold", None)


@pytest.mark.parametrize(
    ("given", "plan", "expected"),
    [
        ({}, None, (FixedLength, 4, None)),
        ({}, PLAN, (AdaptiveExit, 6, 0.7)),
        ({}, DraftPlan(FULL, gamma=0), (FixedLength, 0, None)),
        ({"adaptive": True}, DraftPlan(FULL, gamma=0), (FixedLength, 0, None)),
        ({"gamma": 2}, DraftPlan(FULL, gamma=0), (FixedLength, 2, None)),
        ({"gamma": 2}, PLAN, (FixedLength, 2, None)),
        ({"adaptive": False}, PLAN, (FixedLength, 6, None)),
        ({"adaptive": False}, None, (FixedLength, 4, None)),
        ({"adaptive": True}, None, (AdaptiveExit, 8, 0.8)),
        ({"adaptive": True, "gamma": 3}, None, (AdaptiveExit, 3, 0.8)),
        ({"adaptive": True, "gamma": 3}, PLAN, (AdaptiveExit, 3, 0.7)),
    ],
)
def test_what_an_option_does_not_say_the_plan_says(
    given: dict[str, object], plan: DraftPlan | None, expected: Seen
) -> None:
    """But for a draft that is plain, which is drafted only where a length is given."""
    options = DraftOptions("exit", **given)
    assert seen(policy(options, plan)) == expected
    gated = policy(DraftOptions("exit", **given, min_target_confidence=0.4), plan)
    if expected[1]:
        assert isinstance(gated, ConfidenceGate) and gated.least == 0.4
        assert seen(gated.inner) == expected
    else:
        assert seen(gated) == expected


def test_the_first_threshold_of_sampled_texts_is_lower() -> None:
    assert seen(policy(DraftOptions("exit", adaptive=True), None, 1.0)) == (AdaptiveExit, 8, 0.5)


def test_an_option_out_of_range_or_without_effect_is_named() -> None:
    for given, field in (
        ({"kind": "nonsense"}, "draft"),
        ({"kind": "lookup", "bits": 4}, "bits"),
        ({"kind": "auto", "gamma": 4}, "gamma"),
        ({"kind": "exit", "gamma": -1}, "gamma"),
        ({"kind": "exit", "min_target_confidence": 1.5}, "min_target_confidence"),
        ({"kind": "model"}, "draft_model"),
    ):
        with pytest.raises(InputError) as caught:
            DraftOptions(**given)
        assert caught.value.field == field
