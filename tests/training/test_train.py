"""Training: text, of which nothing is lost; the recipe against values computed by hand; runs,
reproducible and resumable.
"""

import json
import math
import shutil
from itertools import chain, pairwise, repeat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import train
from model.config import parse_config
from model.decoder import Decoder
from model.plan import LayerPlan
from tests.calls import interrupted, recorded, status_of
from tests.folders import GEMMA2, LLAMA, write_folder
from tests.refusal import refusal
from training import run as runs
from training.recipe import (
    CURRICULA,
    dropout_rates,
    exit_weights,
    growth_from_scratch,
    layer_outputs,
    recipe_loss,
)
from training.run import LOG, OPTIONS, STATE
from training.text import Rows, read_documents, rows_of, train_tokenizer
from weights.load import load_model
from weights.tokenizer import Tokenizer

SHAPE = {"num_hidden_layers": 3, "hidden_size": 16, "intermediate_size": 24, "head_dim": 8}

# Text

DOCUMENTS = [
    f"The {a} hen met {b * b} foxes.\n\nThey all went home at {b + 7} by the {c} road."
    for a in ("brown", "small", "clever", "old")
    for b in range(30)
    for c in ("red", "sly", "shy")
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("learnt")
    train_tokenizer(DOCUMENTS, 300, folder)
    return Tokenizer(folder)


def test_a_jsonl_line_is_a_text_or_a_prompt_with_its_response(tmp_path: Path) -> None:
    """Each may hold the line separators of Unicode."""
    whole, parts = '{"text": "One\u2028two\x85."}', '{"prompt": "Say two. ", "response": "\\nTwo."}'
    path = tmp_path / "a.jsonl"
    path.write_bytes(f'{whole}\r\n{parts}\n{{"text": " "}}'.encode())
    assert read_documents([path]) == ["One\u2028two\x85.", "Say two.\n\nTwo."]


def test_a_document_is_coded_as_chat_would_code_its_prompt(tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode_chat([{"role": "user", "content": "The hen met"}])
    assert tokenizer.encode("The hen met\n\nThey all went home.")[: len(prompt)] == prompt


def test_every_document_is_trained_on_or_held_out_and_has_an_end(
    tokenizer: Tokenizer,
) -> None:
    train, held_out = (
        [*windows[:, 0].tolist(), *windows[-1, 1:].tolist()]
        for windows in (rows.windows for rows in rows_of(DOCUMENTS, tokenizer, 9))
    )
    assert len(held_out) > 0

    def documents(ids: list[int]) -> list[tuple[int, ...]]:
        ends = [0, *(at + 1 for at, token in enumerate(ids) if token == 1)]
        return [tuple(ids[start:end]) for start, end in pairwise(ends)]

    assert sorted(documents(train) + documents(held_out)) == sorted(
        (*tokenizer.encode(each), 1) for each in DOCUMENTS
    )
    assert not set(documents(train)) & set(documents(held_out))


@pytest.mark.parametrize(
    ("ids", "ending", "expected"),
    [
        (
            [5, 6, 2, 7, 8, 9, 10, 11, 12, 13, 2, 14, 2, 15, 16, 17, 2],
            [2],
            [
                [5, 6, 2, 7],
                [7, 8, 9, 10],
                [10, 11, 12, 13],
                [13, 2, 14, 2],
                [14, 2, 15, 16],
                [15, 16, 17, 2],
            ],
        ),
        ([*range(12)], [], [[0, 1, 2, 3], [3, 4, 5, 6], [6, 7, 8, 9]]),
    ],
    ids=["documents", "no ends"],
)
def test_a_row_begins_with_a_document_or_a_whole_number_of_rows_into_a_longer_one(
    ids: list[int], ending: list[int], expected: list[list[int]]
) -> None:
    rows = Rows(np.array(ids, dtype=np.int32), ending, 4)
    picked = rows.pick(400, torch.Generator().manual_seed(0))
    assert picked.shape == (400, 4) and picked.dtype == torch.int64
    assert picked.unique(dim=0).tolist() == expected


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("a.jsonl", '{"text": "fine"}\n{"text"\n', "a.jsonl, line 2 is not valid JSON"),
        (
            "a.jsonl",
            '{"prompt": "no response"}\n',
            'line 1 needs "text", or "prompt" and "response"',
        ),
        ("a.jsonl", "[1]\n", 'line 1 needs "text"'),
        ("a.jsonl", b"\xff\xfe", "cannot be read as UTF-8"),
        ("a.jsonl", '{"text": "a"}\n{"text": "bad \\ud800"}', "a.jsonl, line 2 holds half a"),
    ],
)
def test_wrong_data_is_refused_by_name(
    tmp_path: Path, name: str, content: str | bytes, complaint: str
) -> None:
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    assert complaint in refusal(read_documents, [tmp_path / name])


# The recipe


def test_layer_dropout_grows_over_depth_and_from_scratch_over_time() -> None:
    # t = 2 of T = 5: exp(2 ln2 / 4) - 1 = sqrt 2 - 1
    growth = {0: 0, 2: 0.41421356237, 4: 1}
    assert {step: growth_from_scratch(step, 5) for step in growth} == pytest.approx(growth)
    # L = 4: exp(l ln2 / 3) - 1 for l = 0..3
    for grown in growth.values():
        by_hand = [0.0, 0.25992104989 * grown, 0.58740105197 * grown, grown]
        assert dropout_rates(4, 0.5, grown) == pytest.approx([0.5 * rate for rate in by_hand])


# L = 4, e_scale = 1/2: below the last half of the sums 0, 1, 3; at the last 3 + 1/2·(0+1+2) = 9/2.
# By a power of 1/2 the sums are √s·√3, by 0 they are all 3. L = 2: the only sum is 0⁰ = 1.
@pytest.mark.parametrize(
    ("power", "by_hand"),
    [
        (1.0, [0, 0.5, 1.5, 4.5]),
        (0.5, [0, 0.86602540378, 1.5, 4.5]),
        (0.0, [1.5, 1.5, 1.5, 4.5]),
        (0.0, [0.5, 1.5]),
    ],
)
def test_exit_weights_are_the_papers_sums_flattened_by_a_power_and_made_to_sum_to_one(
    power: float, by_hand: list[float]
) -> None:
    found = exit_weights(np.ones(len(by_hand) - 1, dtype=bool), 0.5, power)
    assert found == pytest.approx([each / sum(by_hand) for each in by_hand])


# rotational: every third exit, shifted by one each step; gradual: layer l of L = 8 is on from step
# (8 - l)·12/16 of T = 12, that is 6, 5.25, 4.5, ...
@pytest.mark.parametrize(
    ("curriculum", "on"),
    [
        ("rotational", [[0, 3, 6], [1, 4], [2, 5], [0, 3, 6]]),
        ("gradual", [[], [], [6], [4, 5, 6], [3, 4, 5, 6], [2, 3, 4, 5, 6], [*range(7)]]),
    ],
)
def test_a_curriculum_turns_exits_on(curriculum: str, on: list[list[int]]) -> None:
    found = [CURRICULA[curriculum](8, step, 12, 3) for step in range(len(on))]
    assert [np.flatnonzero(each).tolist() for each in found] == on


def tiny(raw: dict[str, Any] = LLAMA) -> tuple[Decoder, Tensor]:
    model = Decoder(parse_config({**raw, **SHAPE})).double()
    model.initialise(0.2, torch.Generator().manual_seed(1))
    return model, torch.randint(0, 200, (4, 9), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("raw", [LLAMA, GEMMA2], ids=["llama", "gemma2"])
def test_a_layers_output_is_what_an_early_exit_speaks_from(raw: dict[str, Any]) -> None:
    model, tokens = tiny(raw)
    for layer, hidden in enumerate(layer_outputs(model, tokens)):
        torch.testing.assert_close(
            model.logits(hidden), model(tokens, plan=LayerPlan.early_exit(3, layer + 1))
        )


def test_a_dropped_layer_is_dropped_whole_for_its_sample_alone() -> None:
    model, tokens = tiny()
    kept = torch.tensor([[True] * 4, [True, False, True, False], [False] * 4])
    *_, hidden = layer_outputs(model, tokens, kept)
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
    total = recipe_loss(model, tokens, torch.ones(3, 4) > 0, [0.25, 0.0, 0.75], taught=share)
    first, _, last = (
        model.logits(hidden).float() for hidden in layer_outputs(model, tokens[:, :-1])
    )
    text = torch.nn.functional.one_hot(tokens[:, 1:], model.vocab_size)
    # no gradient teaches the teacher
    target = (1 - share) * text + share * torch.softmax(last, -1).detach()
    pairs = (target, first), (text, last)
    early, late = (-(each * torch.log_softmax(logits, -1)).sum(-1).mean() for each, logits in pairs)
    by_hand = 0.25 * early + 0.75 * late
    assert total.item() == pytest.approx(by_hand.item(), rel=1e-6)
    found, expected = (torch.autograd.grad(each, model.parameters()) for each in (total, by_hand))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_the_learning_rate_warms_up_in_a_line_and_falls_along_a_cosine_to_a_tenth() -> None:
    rates = {0: 0.1, 4: 0.5, 9: 1.0, 10: 1.0, 60: 0.55, 110: 0.1}
    assert {step: train.learning_rate(step, 110, 10) for step in rates} == pytest.approx(rates)


# Runs

CONFIG = {**LLAMA, **SHAPE}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """The documents, beside a config."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    path = tmp_path / "text.jsonl"
    path.write_text("\n".join(json.dumps({"text": each}) for each in DOCUMENTS), encoding="utf-8")
    return path


def arguments(text: Path, out: Path, **changed: Any) -> list[str]:
    given = {
        "data": text,
        "out": out,
        "config": text.parent / "config.json",
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
    options = (
        f"--{name.replace('_', '-')}={value}" for name, value in given.items() if value is not None
    )
    return [*options, "--no-autocast"]


def state_of(out: Path) -> dict[str, Any]:
    return torch.load(out / STATE, weights_only=True)


def test_a_run_learns_and_leaves_an_ordinary_model_folder(
    data: Path, tmp_path: Path, capsys: Any
) -> None:
    out = tmp_path / "run"
    command = arguments(data, out, steps=40, save_every=20, learning_rate=0.01)
    assert train.main(command) == 0
    *rows, judged = map(json.loads, (out / LOG).read_text(encoding="utf-8").splitlines())
    losses = [row["loss"] for row in rows if "loss" in row]
    assert len(losses) == 40 and losses[-1] < 0.7 * losses[0]
    assert judged["step"] == 40 and len(judged["held_out_loss"]) == 3
    assert judged["agreement"][-1] == 1
    assert (load_model(out).dtype, load_model(out).num_layers) == (torch.bfloat16, 3)
    ids = json.loads((out / "generation_config.json").read_text())
    assert ids == {"bos_token_id": 0, "eos_token_id": 1}, "transformers reads them there"
    capsys.readouterr()
    assert train.main(command) == 0, "there is nothing left to do"
    assert capsys.readouterr().err.endswith(f"[all 40 steps are done: the model is in {out}]\n")
    state = state_of(out)
    for damaged in {}, {**state, "optimisers": []}:
        torch.save(damaged, out / STATE)
        assert f"{STATE} is damaged: " in refusal_of(command, capsys)


def test_a_killed_run_goes_on_to_the_same_losses_and_weights(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights and moments bit for bit, by AdamW and Muon. It is saved early, and repeats a step
    that was not saved.
    """
    assert train.main(arguments(data, tmp_path / "whole", muon_rate=0.02)) == 0
    killed = arguments(data, tmp_path / "killed", muon_rate=0.02)
    for first_save, calls, saved in (-1.0, 2, 1), (train.FIRST_SAVE, 3, 2):
        with monkeypatch.context() as patch:
            patch.setattr(train, "monotonic", lambda: 0.0)
            patch.setattr(train, "FIRST_SAVE", first_save)
            interrupted(patch, train, "backward", calls)
            assert train.main(killed) == 130
        assert state_of(tmp_path / "killed")["step"] == saved
    assert train.main(killed) == 0
    assert (tmp_path / "killed" / LOG).read_bytes() == (tmp_path / "whole" / LOG).read_bytes()
    whole, again = (
        [state["model"], *(each["state"] for each in state["optimisers"])]
        for state in (state_of(tmp_path / name) for name in ("whole", "killed"))
    )
    torch.testing.assert_close(again, whole, rtol=0, atol=0)


def test_a_run_is_not_continued_with_other_options_or_another_text(
    data: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But from another folder, on the same text and config in other files, and saved at other
    steps.
    """
    run, moved, other = tmp_path / "run", tmp_path / "moved", tmp_path / "other.json"
    assert train.main(arguments(data, run, steps=1)) == 0
    run.rename(moved)
    data = data.rename(tmp_path / "renamed.jsonl")
    other.write_text(json.dumps(CONFIG), encoding="utf-8")
    assert train.main(arguments(data, moved, steps=1, save_every=7, config=other)) == 0
    other.write_text(json.dumps(CONFIG | {"rms_norm_eps": 0.1}), encoding="utf-8")
    for document in ("16", "29"):  # to train on, and held out
        more = f"{data.read_text()}\n{json.dumps({'text': document})}"
        (tmp_path / document).write_text(more, encoding="utf-8")
    for changed, held in (
        ({"data": tmp_path / "16"}, "--data of other contents"),
        ({"data": tmp_path / "29"}, "--data of other contents"),
        ({"config": other}, "--config of other contents"),
        ({"config": None, "start_from": moved, "vocab_size": None}, "--start-from None"),
        ({"learning_rate": 0.5}, "--learning-rate 0.002"),
    ):
        said = refusal_of(arguments(data, moved, steps=1, **changed), capsys)
        assert f"holds a run with {held}: give the same, or another --out" in said
    monkeypatch.setitem(OPTIONS[""], "--new", {"default": 7, "help": "unknown to the run"})
    command = arguments(data, moved, steps=1)
    assert train.main(command) == 0, "by its default the run goes on"
    assert "holds a run with --new 7: give" in refusal_of([*command, "--new=8"], capsys)


def test_training_goes_on_from_a_checkpoint_of_either_family_with_its_tokenizer(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint is looked for once. A run that is killed while it writes its model has written
    its state, and then writes the model again.
    """
    found = recorded(monkeypatch, runs, "model_folder", str)
    saved = recorded(monkeypatch, runs, "save_model", lambda *_, **__: state_of(out)["step"])
    start, out = write_folder(tmp_path / "start", GEMMA2 | SHAPE, eos_ids=(263,)), tmp_path / "run"
    changed = {
        "config": None,
        "vocab_size": None,
        "start_from": start,
        "learning_rate": 1e-9,
        "steps": 2,
    }
    interrupted(monkeypatch, shutil, "copyfile", 1)
    statuses = [train.main(arguments(data, out, **changed)) for _ in range(2)]
    assert statuses == [130, 0] and found == [str(start)] * 2 and saved == [2, 2]
    before, after = (load_model(each, torch.float32).state_dict() for each in (start, out))
    torch.testing.assert_close(after, before, rtol=1e-2, atol=1e-2)
    assert (out / "tokenizer.json").read_bytes() == (start / "tokenizer.json").read_bytes()
    assert (
        train.main(
            arguments(data, out, **changed | {"start_from": start.rename(tmp_path / "moved")})
        )
        == 0
    )


def test_a_non_finite_loss_stops_the_run_and_keeps_the_last_good_checkpoint(
    data: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    loss, factors = train.recipe_loss, chain([1] * 7, [math.nan], repeat(1))
    monkeypatch.setattr(train, "recipe_loss", lambda *inputs: loss(*inputs) * next(factors))
    said = refusal_of(arguments(data, out), capsys)
    assert "the loss or its gradient is non-finite in step 4: the last saved state is kept" in said
    assert state_of(out)["step"] in (2, 3)
    assert all(tensor.isfinite().all() for tensor in state_of(out)["model"].values())


def contents(folder: Path) -> dict[Path, bytes]:
    """The files of a folder, and what they hold."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def refusal_of(command: list[str], capsys: Any) -> str:
    """The last line that a refused command says: the whole of its error."""
    assert status_of(train.main, command) == 2
    return capsys.readouterr().err.splitlines()[-1].removeprefix("error: ")


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        ({"steps": 0}, "--steps: must be from 1 to 2147483647, found 0"),
        ({"rotation": 10**20}, "--rotation: must be from 1 to 2147483647, found 1000"),
        ({"steps": "many"}, "--steps: invalid number value: 'many'"),
        ({"layer_dropout": 1.5}, "--layer-dropout: must be from 0 to 1, found 1.5"),
        ({"config": None}, "give either --config or --start-from"),
        (
            {"config": None, "start_from": "other", "vocab_size": 777},
            "--start-from brings its tokenizer: leave out --vocab-size",
        ),
        ({"start_from": "tiny-llama"}, "give either --config or --start-from"),
        ({"context": 4096}, "more than the config's 256 positions"),
        ({"vocab_size": 20}, "--vocab-size: must be from 258 to 16777216, found 20"),
        ({"vocab_size": 2**31}, "--vocab-size: must be from 258 to 16777216, found 2147"),
        ({"data": "nowhere.jsonl"}, "nowhere.jsonl cannot be read"),
        ({"data": "same.jsonl"}, "1 different documents, with "),
        ({"config": "nowhere.json"}, "nowhere.json cannot be read"),
        ({"out": "text.jsonl"}, "the folder text.jsonl does not exist or is read-only"),
        (
            {"out": "text.jsonl/run", "config": None, "start_from": "other"},
            "the folder text.jsonl does not exist or is read-only",
        ),
        ({"out": "other"}, "holds a model without the state of a run"),
        (
            {"out": "other", "config": None, "vocab_size": None, "start_from": "other"},
            "holds a model without the state of a run",
        ),
        ({"config": None, "start_from": ""}, "give either --config or --start-from"),
        ({"learning_rate": "inf"}, "--learning-rate: must be at least 0 and finite, found inf"),
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
    write_folder(tmp_path / "other", CONFIG, eos_ids=(263,))
    (tmp_path / "other" / STATE).parent.mkdir()  # of a run whose state was deleted
    before = contents(tmp_path)
    assert complaint in refusal_of(
        arguments(data, **{"out": Path("deep/in/run"), **changed}), capsys
    )
    assert contents(tmp_path) == before
