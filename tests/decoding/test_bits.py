"""Bits of low-bit drafts, chosen by measurement; importance of inputs; calibration text."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from decoding.run import bits as bits_module
from decoding.run import calibration, chooser
from decoding.run.acceptance import Continuation
from decoding.run.bits import BitsTable, measure_bits
from decoding.run.calibration import PROMPTS, TOKENS, calibration_texts, input_squares, linear_layers, weigh_inputs
from decoding.run.chooser import DraftOptions, Setting, choose
from decoding.run.costs import CostTable
from decoding.sampling import SamplingParams
from model import Decoder
from model.fast import accelerate
from model.quantise import quantise
from weights.load import load_model, model_folder
from weights.tokenizer import Tokenizer

pytest.importorskip("numba", reason="low bits are fast with numba only: pip install numba")
FOLDER = model_folder("tiny-llama")
VERIFY = (1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7, 1.8)
GREEDY = SamplingParams()


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(FOLDER)


@pytest.fixture
def model() -> Decoder:
    return accelerate(load_model(FOLDER))


@pytest.fixture(scope="module")
def few(tokenizer: Tokenizer) -> list[Continuation]:
    return calibration_texts(accelerate(load_model(FOLDER)), tokenizer, GREEDY, prompts=PROMPTS[:2])


@pytest.fixture
def setting(
    tmp_path: Path, model: Decoder, tokenizer: Tokenizer, few: list[Continuation], monkeypatch: pytest.MonkeyPatch
) -> Setting:
    monkeypatch.setattr(chooser, "calibration_texts", lambda *_: few)
    return Setting(tmp_path, model, tokenizer, GREEDY, 64)


def with_costs(monkeypatch: pytest.MonkeyPatch, costs: dict[int, float]) -> None:
    """Let a draft step cost this much, by its bits."""

    def measured(target, drafting, plan, params, coupling, known=None, **_):
        return CostTable(costs[plan.mlp[0]], VERIFY)

    monkeypatch.setattr(bits_module, "measure_costs", measured)


@torch.no_grad()
def put_on_grid(model: Decoder) -> None:
    """Give every matrix the values of its four-bit grid: a grid fitted to them is the same."""
    for layer in linear_layers(model).values():
        layer.weight.copy_(quantise(layer.weight, 4).dequantised(layer.weight.dtype))


def test_importance_is_the_mean_square_of_a_layers_inputs(model: Decoder, few: list[Continuation]) -> None:
    assert all(len(text.written) + text.unused == TOKENS for text in few)
    found = input_squares(model, few)
    assert set(found) == set(linear_layers(model))
    inputs = []
    hook = model.layers[1].mlp.down_proj.register_forward_pre_hook(lambda _, x: inputs.append(x[0][0].float()))
    for text in few:
        model.hidden(torch.tensor([[*text.prompt, *text.written]]))
    hook.remove()
    torch.testing.assert_close(found["1.mlp.down_proj"], torch.cat(inputs).square().mean(0))


def test_importance_is_measured_once_and_then_read(
    tmp_path: Path, model: Decoder, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    weigh_inputs(model, tmp_path, tokenizer)
    monkeypatch.setattr(calibration, "calibration_texts", None)  # would fail
    again = accelerate(load_model(FOLDER))
    weigh_inputs(again, tmp_path, tokenizer)
    for name, layer in linear_layers(model).items():
        assert torch.equal(layer.importance, linear_layers(again)[name].importance)


@pytest.mark.parametrize("content", [b"junk", None])
def test_a_damaged_or_foreign_importance_file_is_measured_again(
    tmp_path: Path, model: Decoder, tokenizer: Tokenizer, content: bytes | None
) -> None:
    if content is None:
        weigh_inputs(accelerate(load_model(model_folder("tiny-gemma2"))), tmp_path, Tokenizer(FOLDER))
    else:
        (tmp_path / calibration.FILE).write_bytes(content)
    weigh_inputs(model, tmp_path, tokenizer)
    assert all(len(layer.importance) == layer.weight.shape[1] for layer in linear_layers(model).values())


def test_a_model_on_whose_weights_four_bits_are_free_gets_four(
    model: Decoder, few: list[Continuation], monkeypatch: pytest.MonkeyPatch
) -> None:
    with_costs(monkeypatch, {4: 0.3, 6: 0.4, 8: 0.5})
    put_on_grid(model)
    table = measure_bits(model, few, GREEDY)
    assert table.bits == (4, 6, 8) and set(table.best_plan(4).plan.mlp) == {4}
    assert min(table.acceptance) > 0.8, "what is lost is lost by rounding inputs"


def test_the_bits_of_the_largest_predicted_speed_up_draft(
    setting: Setting, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with_costs(monkeypatch, {4: 0.9, 6: 0.2, 8: 0.9})
    drafting = choose(DraftOptions("lowbit"), setting)
    table = chooser.bits_table(setting)
    assert set(drafting.plan.mlp) == {6} and drafting.new_policy().gamma == table.gamma[1]
    assert "6 bits" in capsys.readouterr().err
    with_costs(monkeypatch, {})  # would fail: it is kept
    assert chooser.bits_table(setting) == table
    # Another rule of verification accepts otherwise, and is measured by itself.
    with pytest.raises(KeyError):
        chooser.bits_table(replace(setting, coupling="race"))


def test_where_no_bits_gain_lowbit_decodes_plainly_and_says_so(
    setting: Setting, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with_costs(monkeypatch, {4: 1.0, 6: 1.0, 8: 1.0})
    drafting = choose(DraftOptions("lowbit"), setting)
    assert drafting.new_policy().gamma == 0 and drafting.plan is None
    assert "decoding plainly" in capsys.readouterr().err
    assert set(choose(DraftOptions("lowbit", bits=6), setting).plan.mlp) == {6}
    monkeypatch.setattr(chooser, "measure_costs", lambda *_, **__: CostTable(0.0, VERIFY))
    assert choose(DraftOptions("auto"), setting).plan is None


def test_bits_whose_copies_do_not_fit_are_left_out_and_the_rest_is_not_kept(
    tmp_path: Path, model: Decoder, few: list[Continuation], monkeypatch: pytest.MonkeyPatch
) -> None:
    with_costs(monkeypatch, {4: 0.3, 6: 0.4, 8: 0.5})
    monkeypatch.setattr(bits_module, "has_memory_for", lambda model, plan: plan.mlp[0] == 4)
    table = measure_bits(model, few, GREEDY)
    assert table.bits == (4,) and not table.steady
    monkeypatch.setattr(bits_module, "has_memory_for", lambda model, plan: False)
    table = measure_bits(model, [], GREEDY)
    assert table == BitsTable() and not table.steady and table.best_plan(4) is None


def test_copies_are_freed_one_number_of_bits_at_a_time(
    model: Decoder, few: list[Continuation], monkeypatch: pytest.MonkeyPatch
) -> None:
    held = []

    def measured(target, drafting, plan, params, coupling, known=None):
        target.prepare(plan)
        held.append({bits for _, bits in target.low_bits})
        return CostTable(0.5, VERIFY)

    monkeypatch.setattr(bits_module, "measure_costs", measured)
    measure_bits(model, few, GREEDY)
    assert held == [{4, 8}, {6, 8}, {8}] and not model.low_bits  # the head is in eight bits
