"""Costs of rounds: their units, their measurement, and the formulas that use them."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.chooser import Setting
from app.plan_file import DraftPlan
from app.writer import Drafting, Writer
from decoding.policies import AdaptiveExit
from decoding.sampling import SamplingParams
from decoding.text import Rules
from decoding.verify import Rule
from model import Decoder, LayerPlan
from model.fast.gpu import StaticDecoder
from search import costs as costs_module
from search.costs import CostTable, drafting_under, measure_costs, predicted_speedup
from tests.calls import recorded
from tests.folders import byte_tokenizer
from tests.laws import tiny_model
from tests.refusal import refusal

VOCAB = 7


def setting_of(model: Decoder, temperature: float = 0.0, coupling: str = "ratio") -> Setting:
    params = SamplingParams(temperature)
    return Setting(Path(), model, byte_tokenizer(), params, model.max_positions, coupling)


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A clock of the loop that counts the entries appended to this list."""
    work: list[int] = []
    monkeypatch.setattr(Writer, "clock", lambda writer: float(sum(work)))
    monkeypatch.setattr(costs_module, "PATIENCE", 0.0)
    return work


def counting(work: list[int]) -> Decoder:
    """A model of three layers that counts MLPs times rows."""
    model = tiny_model("llama", vocab=VOCAB)
    for layer in model.layers:
        layer.mlp.register_forward_hook(lambda _, inputs, __: work.append(inputs[0].shape[1]))
    return model


@pytest.mark.parametrize(
    ("temperature", "coupling"), [(0.0, "ratio"), (1.0, "ratio"), (1.0, "race")]
)
def test_costs_are_in_units_of_a_plain_round(
    work: list[int], temperature: float, coupling: str
) -> None:
    """3 per row of the target, 1 per draft step under a plan of one layer, however many drafts are
    accepted.
    """
    setting = setting_of(counting(work), temperature, coupling)
    exit_1 = LayerPlan.early_exit(3, 1)
    chosen = [DraftPlan(exit_1, 3), DraftPlan(exit_1, 2, 1.0)]  # the second would stop at once
    drafts = [drafting_under(setting, each) for each in chosen]
    known, *tables = measure_costs(setting, [(1, 2), (3, 4, 5)], drafts, longest=3)
    assert known == CostTable(0.0, (1.0, 2.0, 3.0, 4.0))
    for table in tables:
        assert table == replace(known, draft=pytest.approx(1 / 3), first=pytest.approx(0, abs=1e-9))


def test_rounds_of_full_length_still_read_confidences_where_their_policy_does(
    work: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their reading is a part of the costs of a plan with a threshold."""
    read = recorded(monkeypatch, AdaptiveExit, "keep_drafting", lambda _, confidence: confidence)
    setting = setting_of(counting(work))
    for threshold in (None, 1.0):
        assert not read
        draft = drafting_under(setting, DraftPlan(LayerPlan.early_exit(3, 1), 2, threshold))
        measure_costs(setting, [(1, 2)], [draft], longest=2)
    assert read


@pytest.mark.usefixtures("work")
def test_a_disturbed_turn_does_not_change_a_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """The median over the turns counts, and the turn that warms up does not."""
    verifying = iter([9.0, 2.0, 9.0, 2.0])

    def scripted(*of: object) -> tuple[list[int], float]:
        return [], next(verifying) if of[2].new_policy().gamma else 1.0

    monkeypatch.setattr(costs_module, "write_timed", scripted)
    found = measure_costs(setting_of(tiny_model("llama")), [(1, 2)], [], longest=1)
    assert found == [CostTable(0.0, (1.0, 2.0))]


@pytest.mark.usefixtures("work")
def test_a_first_draft_step_may_cost_more_than_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The example of the module: 3 ms, and 2 ms for each of three others."""
    seconds = {"known": [11, 11.5, 12, 12], "plan": [14, 0, 0, 21], "plain": [10]}

    def scripted(_: object, __: object, way: Drafting, ___: object) -> tuple[list[int], float]:
        return [], seconds[way.name][way.new_policy().gamma - 1]

    monkeypatch.setattr(costs_module, "write_timed", scripted)
    setting = setting_of(tiny_model("llama"))
    draft = drafting_under(setting, DraftPlan(LayerPlan.early_exit(3, 1), 4))
    _, table = measure_costs(setting, [(1, 2)], [draft], longest=4)
    assert (table.draft, table.first) == pytest.approx((0.2, 0.1))
    assert table.verify == (1.0, 1.1, 1.15, 1.2, 1.2) and table.of_round(4) == pytest.approx(2.1)


def test_prompts_take_turns_and_are_cut_to_the_context(
    work: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = counting(work)
    seen = recorded(monkeypatch, Writer, "begin", lambda _, prompt: len(prompt))
    measure_costs(setting_of(model), [[1] * 3, [1] * model.max_positions], [], longest=1)
    cut = model.max_positions - 2 * costs_module.ROUNDS
    assert {*seen[:2]} == {3, cut} and seen[:2] == seen[2:4]


def test_a_context_too_short_for_a_draft_of_full_length_is_refused() -> None:
    model = tiny_model("llama", vocab=VOCAB)
    model.max_positions = 18
    line = refusal(measure_costs, setting_of(model), [(1, 2)], [], longest=8)
    assert "18 tokens is too short" in line and "37 or more" in line


def test_measuring_ends_when_patience_does(
    work: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = []
    for patience in (0.0, math.inf):
        monkeypatch.setattr(costs_module, "PATIENCE", patience)
        work.clear()
        measure_costs(setting_of(counting(work)), [(1, 2)], [], longest=1)
        counts.append(len(work))
    least, most = costs_module.LEAST_TURNS, costs_module.MOST_TURNS
    assert counts[0] * most == counts[1] * least


def test_a_cache_made_while_costs_were_measured_serves_texts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Texts are written in inference mode, and torch refuses to write its tensors outside of it."""
    monkeypatch.setattr(costs_module, "PATIENCE", 0.0)
    model = StaticDecoder(tiny_model("llama", vocab=VOCAB), compiled=False)
    setting = setting_of(model)
    draft = drafting_under(setting, DraftPlan(LayerPlan.early_exit(model.num_layers, 1), 2))
    measure_costs(setting, [(1, 2, 3)], [draft], longest=2)
    assert not model.new_cache(8).keys[0].is_inference() and len(model.steps) <= 2
    writer = Writer(model, 12)
    writer.begin([1, 2, 3])
    text = writer.new_text(Rules(5))
    sample = writer.write(text, writer.plain, SamplingParams(), Coupling("ratio", 0))
    assert len(text.generated) == 5 and sample.trouble is None


@given(alpha=st.floats(0, 0.999), length=st.integers(0, 12), draft=st.floats(0, 1))
@settings(derandomize=True)
def test_the_predicted_speedup_is_the_published_quotient_of_tokens_over_the_cost(
    alpha: float, length: int, draft: float
) -> None:
    costs = CostTable(draft, tuple(1 + rows / 4 for rows in range(13)))
    tokens, cost = (1 - alpha ** (length + 1)) / (1 - alpha), length * draft + 1 + length / 4
    assert predicted_speedup(alpha, length, costs) == pytest.approx(tokens / cost, rel=1e-9)
    assert predicted_speedup(1.0, length, costs) == pytest.approx((length + 1) / cost)
