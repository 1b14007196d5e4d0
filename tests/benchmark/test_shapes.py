"""Costs of a shape: the named configs, the speed-ups computed from costs, the picture, and wrong
input.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGUFReader

import benchmark.__main__ as command
from app.files import read_json
from benchmark import shapes
from benchmark.llama_cpp import write_gguf
from model import parse_config
from search.costs import CostTable, predicted_speedup
from tests.calls import status_of
from tests.folders import LLAMA
from tests.pictures import faults
from tests.refusal import refusal
from weights.fetch import state_of
from weights.memory import parameter_count

PUBLISHED = {  # parameters of the models, in millions
    "smollm2-135m": 134.5,
    "qwen3-0.6b": 596.0,
    "llama-3.2-1b": 1235.8,
    "gemma-2-2b": 2614.3,
    "llama-3.2-3b": 3212.7,
    "qwen3-4b": 4022.5,
    "llama-3.1-8b": 8030.3,
}


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The command's report on one small shape."""
    folder = tmp_path_factory.mktemp("shape")
    config = LLAMA | {"max_position_embeddings": 4096}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shapes, "REPEATS", 1)
        patch.setattr("benchmark.timing.BANDWIDTH_BYTES", {"cpu": 1 << 20})
        options = ["--shape", str(folder / "config.json"), "--device", "cpu"]
        options += ["--json", str(folder / "report.json"), "--plot", str(folder / "report.svg")]
        assert command.main(options) == 0
    assert (folder / "report.svg").read_text().count("<path")
    return json.loads((folder / "report.json").read_text())


def test_named_shapes_have_the_published_numbers_of_parameters() -> None:
    assert read_json(shapes.NAMED).keys() == PUBLISHED.keys()
    for name, millions in PUBLISHED.items():
        assert parameter_count(shapes.config_of(name)) / 1e6 == pytest.approx(millions, abs=0.06)


def test_random_weights_are_finite_and_of_the_config() -> None:
    config = shapes.config_of("smollm2-135m")
    model = shapes.random_model(config, torch.bfloat16, torch.device("cpu"))
    assert sum(each.numel() for each in model.parameters()) == parameter_count(config)
    assert all(each.dtype == torch.bfloat16 for each in model.parameters())
    assert all(each.isfinite().all() for each in model.parameters())


def test_speedups_of_a_shape_follow_from_its_costs(report: dict[str, Any]) -> None:
    [row] = report["shapes"]
    costs = [1.0, *(row[f"{rows} rows"] for rows in shapes.ROWS[1:])]
    table = CostTable(row["low bits"], shapes.interpolated(costs))
    for acceptance in shapes.ACCEPTANCES:
        speeds = [predicted_speedup(acceptance, length, table) for length in range(1, 9)]
        assert row[f"low bits at {acceptance}"] == pytest.approx(max(speeds))
    # the peak is that of the process, which may free the memory of earlier tests meanwhile
    assert 0 < row["copies, GB"] < row["estimate, GB"]


def test_rows_between_measured_ones_cost_what_a_line_through_these_gives() -> None:
    measured = [float(rows**2) for rows in shapes.ROWS]
    assert shapes.interpolated(measured) == [1, 4, 10, 16, 26, 36, 50, 64, 81]


def test_the_picture_of_shapes_has_no_faults(report: dict[str, Any]) -> None:
    [row] = report["shapes"]
    larger = row | {"parameters, 10⁶": 1000.0}
    assert list(faults(lambda: shapes.plot_shapes({"shapes": [row, larger]}))) == []


def test_a_gguf_file_of_a_shape_holds_its_weights_under_the_names_of_llama_cpp(
    tmp_path: Path,
) -> None:
    """The rows of q and k have another order there."""
    config = parse_config(LLAMA | {"tie_word_embeddings": True})
    model = shapes.random_model(config, torch.bfloat16, torch.device("cpu"))
    write_gguf(model, tmp_path / "model.gguf")
    read = state_of(GGUFReader(tmp_path / "model.gguf"), config)
    assert read.keys() == {f"model.{name}" for name in model.state_dict()}
    for name, tensor in model.named_parameters():
        found = read[f"model.{name}"]
        if ".q_proj" in name or ".k_proj" in name:
            found, tensor = found.flatten().sort().values, tensor.flatten().sort().values
        assert torch.equal(found, tensor), name


def test_a_shape_that_llama_cpp_cannot_run_is_refused_before_it_is_measured(
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = ["--shape", "gemma-2-2b", "--against", "llama.cpp", "--device", "cpu"]
    assert status_of(command.main, options) == 2
    assert "takes shapes of Llama in bf16" in capsys.readouterr().err


def test_a_shape_that_does_not_exist_is_refused_with_the_names(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert "give smollm2-135m, qwen3-0.6b" in refusal(shapes.config_of, "lama-1b")
    assert status_of(command.main, ["--shape", "lama-1b", "--device", "cpu"]) == 2
    assert "no shape is called 'lama-1b'" in " ".join(capsys.readouterr().err.split())
    config = tmp_path / "config.json"
    config.write_text('{"model_type": "llama"}')
    assert "hidden_size must be" in refusal(shapes.config_of, str(config))
