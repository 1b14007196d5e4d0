"""The training recipe against values computed by hand, and the run: reproducible, resumable,
shared.
"""

import argparse
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import train
from model import Decoder, build, parse_config
from tests.folders import GEMMA2, LLAMA, write_folder
from tests.ranks import started
from weights.load import load_model

SHAPE = {"num_hidden_layers": 3, "hidden_size": 16, "intermediate_size": 24}
TEXT = "\n".join(
    json.dumps({"text": f"The {a} hen saw {b * b} of the {c} foxes by the {b + 7} old trees."})
    for a in ("brown", "small", "clever", "old")
    for b in range(30)
    for c in ("red", "sly", "shy")
)


def recipe(**changed: Any) -> argparse.Namespace:
    """Options of the recipe, for 12 steps."""
    given = {
        "steps": 12,
        "layer_dropout": 0.2,
        "start_from": None,
        "exit_scale": 1.0,
        "exit_power": 1.0,
    }
    return argparse.Namespace(**given | {"curriculum": "rotational", "rotation": 1} | changed)


def exits(layers: int, step: int, **changed: Any) -> list[float]:
    return train.exit_weights(recipe(**changed), layers, step)


def test_layer_dropout_grows_over_depth_and_from_scratch_over_time() -> None:
    # L = 4: exp(l ln2 / 3) - 1 for l = 0..3
    by_hand = [0.0, 0.25992104989, 0.58740105197, 1.0]
    for step in (0, 57):
        rates = train.dropout_rates(recipe(start_from="folder", steps=100), 4, step)
        assert rates == pytest.approx([0.2 * d for d in by_hand])
    # t = 2 of T = 5: exp(2 ln2 / 4) - 1 = sqrt 2 - 1
    last = [train.dropout_rates(recipe(steps=5), 4, step)[3] for step in (0, 2, 4)]
    assert last == pytest.approx([0, 0.2 * 0.41421356237, 0.2])


def test_exit_weights_are_the_papers_sums_made_to_sum_to_one() -> None:
    # L = 4, e_scale = 1/2: below the last 0, 1/2, 3/2; the last 3 + 1/2·(0+1+2) = 9/2; together
    # 13/2
    assert exits(4, 0, exit_scale=0.5) == pytest.approx([0, 1 / 13, 3 / 13, 9 / 13])


def test_the_rotational_curriculum_takes_every_rth_exit_and_shifts_by_one_a_step() -> None:
    on = [[bool(weight) for weight in exits(8, step, rotation=3)] for step in range(4)]
    # layer 0 weighs nothing by its sum
    assert on[0] == [False, False, False, True, False, False, True, True]
    assert on[1] == [False, True, False, False, True, False, False, True]
    assert on[2] == [False, False, True, False, False, True, False, True]
    assert on[3] == on[0]


def test_the_gradual_curriculum_goes_from_the_last_exit_to_the_first_by_half_of_the_run() -> None:
    # L = 4 of T = 12 steps: layer l is on from step (4 - l)·12/8, that is 6, 4.5, 3 for layers 0,
    # 1, 2
    first_on = [
        next(s for s in range(12) if exits(4, s, curriculum="gradual")[layer])
        for layer in (1, 2, 3)
    ]
    assert first_on == [5, 3, 0]


def tiny(raw: dict[str, Any] = LLAMA) -> tuple[Decoder, Tensor]:
    model = build(parse_config({**raw, **SHAPE, "head_dim": 8})).double()
    model.initialise(0.2, torch.Generator().manual_seed(1))
    return model, torch.randint(0, 200, (4, 9), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("raw", [LLAMA, GEMMA2], ids=["llama", "gemma2"])
def test_a_layers_output_is_what_an_early_exit_speaks_from(raw: dict[str, Any]) -> None:
    from model import LayerPlan

    model, tokens = tiny(raw)
    for layer, hidden in enumerate(train.layer_outputs(model, tokens)):
        torch.testing.assert_close(
            model.logits(hidden), model(tokens, plan=LayerPlan.early_exit(3, layer + 1))
        )


def test_a_dropped_layer_is_dropped_whole_for_its_sample_alone() -> None:
    from model import LayerPlan

    model, tokens = tiny()
    kept = torch.tensor([[True] * 4, [True, False, True, False], [False] * 4])
    *_, hidden = train.layer_outputs(model, tokens, kept)
    without = {True: LayerPlan.skipping(3, [2], [2]), False: LayerPlan.skipping(3, [1, 2], [1, 2])}
    for row in range(4):
        alone = model.hidden(tokens[row : row + 1], plan=without[bool(kept[1, row])])
        torch.testing.assert_close(hidden[row : row + 1], alone)


@pytest.mark.parametrize("share", [0.0, 0.75])
def test_an_exits_target_is_the_text_mixed_with_a_share_of_the_last_layers_probabilities(
    share: float,
) -> None:
    """The loss is the weighted sum of the exits' losses; its gradients are those of a loss computed
    by hand.
    """
    model, tokens = tiny()
    model.requires_grad_()
    total = train.recipe_loss(model, tokens, None, [0.25, 0.0, 0.75], taught=share)
    first, _, last = (
        model.logits(hidden).float() for hidden in train.layer_outputs(model, tokens[:, :-1])
    )
    text = torch.nn.functional.one_hot(tokens[:, 1:], model.vocab_size)
    # no gradient teaches the teacher
    target = (1 - share) * text + share * torch.softmax(last, -1).detach()
    pairs = (target, first), (text, last)
    early, late = (-(each * torch.log_softmax(logits, -1)).sum(-1).mean() for each, logits in pairs)
    by_hand = 0.25 * early + 0.75 * late
    assert total.item() == pytest.approx(by_hand.item(), rel=1e-6)
    parameters = list(model.parameters())
    expected = torch.autograd.grad(by_hand, parameters)
    for found, each in zip(torch.autograd.grad(total, parameters), expected, strict=True):
        torch.testing.assert_close(found, each, rtol=1e-4, atol=1e-6)


def test_the_learning_rate_warms_up_in_a_line_and_falls_along_a_cosine_to_a_tenth() -> None:
    rates = [train.learning_rate(step, 110, 10) for step in (0, 4, 9, 10, 60, 110)]
    assert rates == pytest.approx([0.1, 0.5, 1.0, 1.0, 0.55, 0.1])


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "text.jsonl"
    path.write_text(TEXT, encoding="utf-8")
    return path


def arguments(text: Path, out: Path, **changed: Any) -> list[str]:
    config = text.parent / "config.json"
    if not config.exists():
        config.write_text(json.dumps({**LLAMA, **SHAPE, "head_dim": 8}), encoding="utf-8")
    options = {
        "data": text,
        "out": out,
        "config": config,
        "vocab_size": 300,
        "steps": 6,
        "batch": 2,
        "accumulate": 2,
        "context": 24,
        "warm_up": 2,
        "rotation": 2,
        "layer_dropout": 0.5,
        "save_every": 2,
        "device": "cpu",
        **changed,
    }
    given = (
        (f"--{name.replace('_', '-')}", str(value))
        for name, value in options.items()
        if value is not None
    )
    return [*(part for pair in given for part in pair), "--no-autocast"]


def log_of(out: Path) -> list[dict[str, Any]]:
    return [
        json.loads(line)
        for line in (out / "training" / "log.jsonl").read_text(encoding="utf-8").splitlines()
    ]


def state_of(out: Path) -> dict[str, Any]:
    return torch.load(out / "training" / "state.pt", weights_only=True)


def assert_same_state(out: Path, other: Path) -> None:
    """Weights and moments, bit for bit."""
    one, same = (
        [part.get("state", part) for part in state_of(each)["parts"]] for each in (out, other)
    )
    torch.testing.assert_close(one, same, rtol=0, atol=0)


def test_a_run_learns_and_leaves_an_ordinary_model_folder(
    data: Path, tmp_path: Path, capsys: Any
) -> None:
    out = tmp_path / "run"
    assert train.main(arguments(data, out, steps=40, save_every=20, learning_rate=0.01)) == 0
    losses = [row["loss"] for row in log_of(out) if "loss" in row]
    assert len(losses) == 40 and losses[-1] < 0.7 * losses[0]
    judged = [row for row in log_of(out) if "agreement" in row][-1]
    assert (
        judged["step"] == 40 and len(judged["held_out_loss"]) == 3 and judged["agreement"][-1] == 1
    )
    model = load_model(out)
    assert model.dtype == torch.bfloat16 and model.num_layers == 3
    assert "loss" in capsys.readouterr().err


def test_a_killed_run_goes_on_to_the_same_losses_and_weights(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By AdamW and Muon; after a step that was not saved."""
    assert train.main(arguments(data, tmp_path / "whole", muon_rate=0.02)) == 0
    backward = train.backward

    def killed(*inputs: Any) -> Tensor:
        if inputs[3] == 3:
            raise KeyboardInterrupt
        return backward(*inputs)

    monkeypatch.setattr(train, "backward", killed)
    assert train.main(arguments(data, tmp_path / "killed", muon_rate=0.02)) == 130
    monkeypatch.setattr(train, "backward", backward)
    assert train.main(arguments(data, tmp_path / "killed", muon_rate=0.02)) == 0
    assert log_of(tmp_path / "killed") == log_of(tmp_path / "whole")
    assert_same_state(tmp_path / "killed", tmp_path / "whole")


def test_a_run_never_replaces_a_model_that_it_did_not_make(
    data: Path, tmp_path: Path, capsys: Any
) -> None:
    other = write_folder(tmp_path / "other", {**LLAMA, **SHAPE, "head_dim": 8}, eos_ids=(263,))
    before = (other / "model.safetensors").read_bytes()
    for start in ({}, {"tokenizer": other}, {"config": None, "start_from": other}):
        assert train.main(arguments(data, other, **start)) == 2
        assert "holds a model that train.py did not make" in one_line(capsys)
    assert (other / "model.safetensors").read_bytes() == before


def test_a_run_is_not_continued_with_other_options(data: Path, tmp_path: Path, capsys: Any) -> None:
    assert train.main(arguments(data, tmp_path / "run", steps=1)) == 0
    for changed in ({"learning_rate": 0.5}, {"tokenizer": write_folder(tmp_path / "other")}):
        assert train.main(arguments(data, tmp_path / "run", steps=1, **changed)) == 2
        (name,) = changed
        assert f"holds a run with {name} " in one_line(capsys)
    state = tmp_path / "run" / train.STATE
    whole = state.read_bytes()
    state.write_bytes(whole[:99])
    assert train.main(arguments(data, tmp_path / "run", steps=1)) == 2 and "is damaged" in one_line(
        capsys
    )
    state.write_bytes(whole)
    (tmp_path / "run").rename(tmp_path / "moved")
    assert train.main(arguments(data, tmp_path / "moved", steps=1, save_every=7)) == 0, (
        "the run itself still goes on"
    )


def test_two_processes_train_as_one_that_accumulates(data: Path, tmp_path: Path) -> None:
    assert train.main(arguments(data, tmp_path / "one", vocab_size=300)) == 0
    with started(train.main, [arguments(data, tmp_path / "two", accumulate=1)] * 2) as processes:
        ended = [process.ended() for process in processes]
    assert [each.status for each in ended] == [0, 0], ended
    one, two = (state_of(tmp_path / run)["parts"][0] for run in ("one", "two"))
    torch.testing.assert_close(two, one, rtol=1e-4, atol=1e-6)
    assert [row["loss"] for row in log_of(tmp_path / "two") if "loss" in row] == pytest.approx(
        [row["loss"] for row in log_of(tmp_path / "one") if "loss" in row], rel=1e-5
    )


def test_training_goes_on_from_a_checkpoint_of_either_family_with_its_tokenizer(
    data: Path, tmp_path: Path
) -> None:
    start = write_folder(tmp_path / "start", {**GEMMA2, **SHAPE, "head_dim": 8}, eos_ids=(263,))
    options = arguments(
        data, tmp_path / "run", config=None, start_from=start, learning_rate=1e-9, steps=2
    )
    assert train.main(options) == 0
    before, after = load_model(start, torch.float32), load_model(tmp_path / "run", torch.float32)
    for name, parameter in before.named_parameters():
        torch.testing.assert_close(after.get_parameter(name), parameter, rtol=1e-2, atol=1e-2)
    assert (tmp_path / "run" / "tokenizer.json").read_bytes() == (
        start / "tokenizer.json"
    ).read_bytes()


def test_a_non_finite_loss_stops_the_run_and_keeps_the_last_good_checkpoint(
    data: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    assert train.main(arguments(data, out)) == 0
    (out / "training" / "state.pt").rename(tmp_path / "kept")
    loss = train.recipe_loss
    calls = iter(range(1000))

    def breaks(*inputs: Any) -> Tensor:
        return loss(*inputs) * (math.nan if next(calls) == 7 else 1)

    monkeypatch.setattr(train, "recipe_loss", breaks)
    assert train.main(arguments(data, out)) == 2
    assert one_line(capsys).startswith("error: the loss or its gradient is non-finite in step")
    assert all(tensor.isfinite().all() for tensor in state_of(out)["parts"][0].values())
    assert load_model(out).num_layers == 3


def one_line(capsys: Any) -> str:
    """The last line said: the whole of an error, so no traceback and no message of several
    lines.
    """
    said = capsys.readouterr().err
    assert "Traceback" not in said and said.splitlines()[-1].startswith("error: ")
    return said.splitlines()[-1]


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        ({"steps": 0}, "--steps: must be from 1 to inf, found 0"),
        ({"steps": "many"}, "--steps: invalid number value: 'many'"),
        ({"layer_dropout": 1.5}, "--layer-dropout: must be from 0 to 1, found 1.5"),
        ({"config": None}, "one of the arguments --config --start-from is required"),
        ({"context": 4096}, "more than the config's 256 positions"),
        ({"vocab_size": 20}, "--vocab-size: must be from 258 to inf, found 20"),
        ({"data": "nowhere.txt"}, "nowhere.txt cannot be read"),
        ({"data": "same.jsonl"}, "1 different documents, with "),
        ({"config": "nowhere.json"}, "nowhere.json cannot be read"),
        ({"out": "text.jsonl"}, "text.jsonl"),
    ],
)
def test_wrong_input_is_refused_in_one_line(
    data: Path,
    tmp_path: Path,
    capsys: Any,
    monkeypatch: pytest.MonkeyPatch,
    changed: dict[str, Any],
    complaint: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "same.jsonl").write_text('{"text": "One text."}\n' * 6000, encoding="utf-8")
    try:
        status = train.main(arguments(data, **{"out": Path("deep/in/run"), **changed}))
    except SystemExit as end:  # argparse's
        status = end.code
    assert status == 2
    assert complaint in one_line(capsys)
    assert not (tmp_path / "deep" / "in" / "run" / "model.safetensors").exists()
