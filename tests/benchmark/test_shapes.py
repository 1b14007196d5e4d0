"""Costs and rounds of a shape: the named configs, and the speed-ups that follow from costs."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from app.common.files import read_json
from benchmark import __main__ as command
from benchmark import shapes, timing
from benchmark.picture import picture
from decoding.drafters import ModelDrafter
from model.plan import LayerPlan
from tests.folders import LLAMA
from tests.laws import tiny_model
from weights.memory import parameter_count

PUBLISHED = {  # parameters of the models
    "smollm2-135m": 134.5e6,
    "qwen3-0.6b": 596.0e6,
    "llama-3.2-1b": 1235.8e6,
    "gemma-2-2b": 2614.3e6,
    "llama-3.2-3b": 3212.7e6,
    "qwen3-4b": 4022.5e6,
    "llama-3.1-8b": 8030.3e6,
}


def test_named_shapes_have_the_published_numbers_of_parameters() -> None:
    counts = {name: parameter_count(shapes.config_of(name)) for name in read_json(shapes.NAMED)}
    assert counts == pytest.approx(PUBLISHED, abs=6e4)


def test_costs_of_a_shape_are_in_its_plain_steps_and_give_its_speedups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock that only steps move: of a row two seconds, of each row more and of each step of a
    draft half a second. At acceptance 0.8 drafts of two tokens are best: (1 + 0.8 + 0.64) / 2.
    """
    clock = [0.0]

    def run_steps(drafter: ModelDrafter, step: shapes.Step, turn: int = 0) -> None:
        clock[0] += step.count * (0.5 if drafter.plan else 2 + 0.5 * (step.rows - 1))

    monkeypatch.setattr(shapes, "run_steps", run_steps)
    monkeypatch.setattr(timing, "now", lambda device: clock[0])
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"max_position_embeddings": 4096}))
    given = "--shape", str(tmp_path / "config.json"), "--plot", str(tmp_path / "report.svg")
    assert command.main([*given, "--device", "cpu", "--json", str(tmp_path / "report.json")]) == 0
    rows = json.loads((tmp_path / "report.json").read_text())["shapes"]
    verification = [(row["tokens"], row["plain rounds"], row["ms"]["median"]) for row in rows[:5]]
    assert verification == [(n, 1 + (n - 1) / 4, 2000 + 500 * (n - 1)) for n in shapes.ROWS]
    drafts = [(row["plain rounds"], row["at 0.6"], row["at 0.8"]) for row in rows[5:-2]]
    assert drafts == [pytest.approx((0.25, 1.6 / 1.5, 2.44 / 2))] * 3
    named = [row["step"].removeprefix("draft step, ") for row in rows[5:]]
    assert named == ["exit", "low bits", "exit in low bits", "prompt", "prompt"]


def test_rounds_have_the_given_acceptance_rates(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By a clock that moves a second with each step of the target, drafts of four tokens that are
    accepted whole write five tokens a second, and drafts that are rejected one. Lines name their
    shape; a fall-back of the model is told, and no row.
    """
    clock = [0.0]
    model = tiny_model("llama")

    def step(module: torch.nn.Module, given: tuple[Any, ...]) -> None:
        clock[0] += not any(isinstance(each, LayerPlan) for each in given)

    model.register_forward_pre_hook(step)
    monkeypatch.setattr(timing, "now", lambda device: clock[0])
    monkeypatch.setattr(shapes, "shape_model", lambda *given: model)
    monkeypatch.setattr(shapes, "bandwidth", lambda device: 1.0)
    monkeypatch.setattr(shapes, "ROUNDS_ACCEPT", (0.0, 1.0))
    monkeypatch.setattr(shapes, "TOKENS", 25)
    model.trouble = "steps have fallen back"
    plain, *drafts = shapes.measure_rounds("toy", model.dtype, model.device)
    assert capsys.readouterr().err == "[toy: steps have fallen back]\n"
    lines = picture({"rounds": [plain, *drafts]}).axes[0].lines
    assert [line.get_label() for line in lines] == ["toy, exit"]
    assert plain["tokens/s"] == 1
    assert [(row["decoder"], row["speed-up"]) for row in drafts] == [("exit", 1), ("exit", 5)]
