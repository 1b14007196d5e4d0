"""Loading: every checkpoint layout gives the tensors it holds; every fault gives one line that
names it.
"""

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from app import plan_file
from app.plan_file import DraftPlan, read_plan
from model import Cut, InputError, LayerPlan, Shard
from model.fast import gpu_bits
from tests.configs import LLAMA3_ROPE
from tests.folders import GEMMA2, LLAMA, random_state, write_folder
from tests.laws import plans
from tests.ranks import part_of
from tests.refusal import line_of, refusal
from weights import load
from weights.load import (
    StoredTensor,
    load_model,
    model_fingerprint,
    model_folder,
    pick_dtype,
)

SIZES = {"vocab_size": 24, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
SMALL, SMALL_GEMMA2 = LLAMA | SIZES, GEMMA2 | SIZES
TIED = SMALL | {"tie_word_embeddings": True}
UP = "model.layers.1.mlp.up_proj.weight"


def write_config(folder: Path, config: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def assert_holds(model: torch.nn.Module, state: dict[str, Tensor], dtype: torch.dtype) -> None:
    """The model has the state's numbers, all of them and no others, in ``dtype``."""
    parameters = dict(model.named_parameters())
    assert {name.removeprefix("model.") for name in state} == set(parameters)
    for name, tensor in state.items():
        parameter = parameters[name.removeprefix("model.")]
        assert parameter.dtype == dtype and not parameter.requires_grad
        assert torch.equal(parameter, tensor.to(dtype)), name


# Layouts and dtypes


@pytest.mark.parametrize(
    "config", [SMALL, SMALL_GEMMA2, TIED], ids=["llama", "gemma2", "tied llama"]
)
def test_a_single_file_gives_copies_of_the_tensors_it_holds(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    """Also where names lack the prefix "model.", beside derived buffers, and when the file is
    written over.
    """
    state = random_state(config)
    assert_holds(load_model(write_folder(tmp_path, config, state)), state, torch.float32)
    bare = {name.removeprefix("model."): tensor for name, tensor in state.items()}
    buffer = {"layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    model = load_model(write_folder(tmp_path, config, bare | buffer))
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.write(bytes(os.fstat(file.fileno()).st_size))
    assert_holds(model, state, torch.float32)


def test_a_stored_head_that_equals_the_tied_embedding_is_accepted_and_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In its dtype or another; and one that differs is refused, since libraries disagree on it."""
    embedding = torch.randn(24, 16).bfloat16()
    state = random_state(TIED) | {"model.embed_tokens.weight": embedding}
    for head in (embedding.clone(), embedding.float()):
        folder = write_folder(tmp_path, TIED, state | {"lm_head.weight": head})
        assert_holds(load_model(folder), state, torch.bfloat16)
        assert "equals the tied embed_tokens.weight" in capsys.readouterr().err
    write_folder(tmp_path, TIED, state | {"lm_head.weight": embedding + 1})
    assert "set tie_word_embeddings to false there" in refusal(load_model, tmp_path)


def test_shards_give_the_tensors_they_hold(tmp_path: Path) -> None:
    state, folder = random_state(SMALL), write_config(tmp_path, SMALL)
    for number in range(3):
        shard = dict(list(state.items())[number::3])
        save_file(shard, folder / f"model-{number:05}-of-00003.safetensors")
    assert_holds(load_model(folder), state, torch.float32)
    first, second, _ = sorted(folder.glob("*.safetensors"))
    second.unlink()
    said = refusal(load_model, folder)
    assert "fetch or export both again" in said and "Missing key" in said
    first.unlink()
    assert "embed_tokens.weight is missing: fetch the whole" in refusal(load_model, folder)


@pytest.mark.parametrize("wanted", [None, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "stored", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str
)
def test_weights_come_in_the_wanted_dtype_or_else_their_own(
    tmp_path: Path, stored: torch.dtype, wanted: torch.dtype | None
) -> None:
    state = random_state(SMALL, dtype=stored)
    assert_holds(load_model(write_folder(tmp_path, SMALL, state), wanted), state, wanted or stored)


# The shard of one of several processes

SHAPES: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "gemma2": GEMMA2,
    "biases and a tied head": {
        **LLAMA,
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
    },
    "qwen2": {**LLAMA, "model_type": "qwen2"},
    "qwen3": {**LLAMA, "model_type": "qwen3", "attention_bias": True},
    "gemma3_text": {**GEMMA2, "model_type": "gemma3_text"},
    "one key head": {**GEMMA2, "num_key_value_heads": 1, "vocab_size": 263},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_process_reads_its_shard_and_nothing_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: str
) -> None:
    folder = write_folder(tmp_path, SHAPES[shape], dtype=torch.bfloat16)
    whole, read_one = load_model(folder), StoredTensor.read
    for rank in range(2):
        shard, read = Shard(whole.config, rank, 2), {}

        def counted(tensor: StoredTensor, cut: Cut, read: dict[str, Tensor] = read) -> Tensor:
            return read.setdefault(tensor.name, read_one(tensor, cut))

        with monkeypatch.context() as patch:
            patch.setattr(StoredTensor, "read", counted)
            model = load_model(folder, shard=shard)
        mine = dict(model.named_parameters())
        assert mine.keys() == dict(whole.named_parameters()).keys()
        for name, parameter in whole.named_parameters():
            kept = part_of(parameter, shard.cut(name))
            stored = name if name.startswith("lm_head") else f"model.{name}"
            assert torch.equal(mine[name], kept) and read[stored].numel() == kept.numel(), name


# Memory


def test_loading_takes_the_memory_of_the_weights_and_of_one_stored_tensor(tmp_path: Path) -> None:
    config = SMALL | {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "vocab_size": 16000,
        "num_attention_heads": 16,
        "head_dim": 64,
    }
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in random_state(config).items()}
    state = {name: torch.zeros(shape) for name, shape in shapes.items()}
    folder = write_folder(tmp_path / "large", config, state)
    small = write_folder(tmp_path / "small", SMALL)
    command = [sys.executable, "-m", "tests.peak", folder, "bfloat16", small]
    root = Path(__file__).parents[2]
    taken, size = map(int, subprocess.check_output(command, cwd=root, text=True).split())
    largest = 4 * max(map(math.prod, shapes.values()))
    assert 100e6 < size <= taken <= 1.1 * (size + largest)


# Faults of a checkpoint


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({UP: None}, ["Missing key", "layers.1.mlp.up_proj.weight"]),
        (
            {"model.layers.1.mlp.up_proj.bias": torch.zeros(24)},
            ["Unexpected key", "layers.1.mlp.up_proj.bias"],
        ),
        ({UP: torch.zeros(16, 24)}, ["up_proj.weight", "[16, 24]", "[24, 16]"]),
        ({UP.removeprefix("model."): torch.zeros(24, 16)}, [UP, "is stored twice"]),
        # the config ties it to the embedding
        ({"lm_head.weight": torch.zeros(24, 16)}, ["lm_head.weight"]),
        ({UP: torch.zeros(24, 16, dtype=torch.int8)}, [UP, "quantised"]),
    ],
    ids=["missing", "extra", "turned", "twice", "head", "int8"],
)
def test_a_wrong_tensor_is_named(
    tmp_path: Path, change: dict[str, Tensor | None], said: list[str]
) -> None:
    state = random_state(TIED) | change
    state = {name: tensor for name, tensor in state.items() if tensor is not None}
    message = refusal(load_model, write_folder(tmp_path, TIED, state))
    assert all(part in message for part in said), message


@pytest.mark.parametrize("kept", [0, 7, 100, -1])
def test_a_truncated_file_is_refused(tmp_path: Path, kept: int) -> None:
    file = write_folder(tmp_path, SMALL) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    assert "model.safetensors is not a whole safetensors file" in refusal(load_model, tmp_path)


def test_a_pickle_is_refused_unopened(tmp_path: Path) -> None:
    """It would be unpickled in vain."""
    folder = write_config(tmp_path / "model", SMALL)
    (folder / "pytorch_model.bin").write_bytes(b"no pickle")
    assert "holds no model.safetensors and no shards" in refusal(load_model, folder)


@pytest.mark.parametrize("name", ["x" * 5000, "nowhere\nat all"], ids=["long", "lines"])
def test_a_name_that_is_no_folder_says_which_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr("weights.load.WEIGHTS", tmp_path / "weights")
    write_config(tmp_path / "weights" / "offered", SMALL)
    assert "offered" in refusal(model_folder, name)


# Plan files


def write_plan(tmp_path: Path, value: Any) -> Path:
    path = tmp_path / "plan.json"
    path.write_text(value if isinstance(value, str) else json.dumps(value), encoding="utf-8")
    return path


def test_another_tensor_makes_another_fingerprint(tmp_path: Path) -> None:
    """Of a norm of 512 bytes in a file of 9 million, too."""
    folder = Path(shutil.copytree(load.WEIGHTS / "tiny-llama", tmp_path / "model"))
    found = {model_fingerprint(folder)}
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for name in ("model.layers.3.input_layernorm.weight", "model.layers.3.mlp.up_proj.weight"):
        tensors[name] = torch.zeros_like(tensors[name])
        save_file(tensors, file)
        found.add(model_fingerprint(folder))
    assert len(found) == 3


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (
            {"attn": [3, 1], "mlp": [2], "gamma": 5, "threshold": 0.6, "model": "x", "dtype": "y"},
            DraftPlan(LayerPlan.skipping(4, [1, 3], [2]), 5, 0.6),
        ),
        ({"mlp": [0]}, DraftPlan(LayerPlan.skipping(4, [], [0]))),
        ({"bits": 4}, DraftPlan(LayerPlan((4, 4, 4, 4), (4, 4, 4, 4), 16))),
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
    ids=["skips, gamma and threshold", "an MLP", "bits", "and of the head", "of each", "of MLPs"],
)
def test_a_plan_file_is_read_with_all_it_says(
    tmp_path: Path, value: Any, expected: DraftPlan
) -> None:
    assert read_plan(write_plan(tmp_path, value), 4) == expected


@given(plan=plans(4))
def test_a_plan_is_read_as_it_was_written(
    tmp_path_factory: pytest.TempPathFactory, plan: LayerPlan
) -> None:
    path = tmp_path_factory.getbasetemp() / "written.json"
    plan_file.write_plan(path, DraftPlan(plan, 3), "", {})
    assert read_plan(path, 4) == DraftPlan(plan, 3)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"bits": 5}, "bits must be 4, 8 or 16, found 5"),
        ({"bits": 6}, "bits must be 4, 8 or 16, found 6"),
        ({"bits": 0}, "bits must be 4, 8 or 16, found 0"),
        ({"bits": False}, "found False"),
        ({"bits": {"attn": [4, 4, 4]}}, "lists of 4 numbers of bits"),
        ({"bits": {"attn": [4, 4, 4, True]}}, "lists of 4 numbers of bits"),
        ({"bits": {"head": [4, 4, 4, 4]}}, "lists of 4 numbers of bits for attn and mlp"),
        ({"bits": 4, "head_bits": 0}, "head_bits must be 4, 8 or 16, found 0"),
        ({"attn": [1, 1]}, "different layers"),
        ({"attn": [True]}, "attn must be a list of different layers from 0 to 3, found [True]"),
        ({"attn": [1.0]}, "found [1.0]"),
        ({"attn": [4], "mlp": []}, "from 0 to 3, found [4]"),
        ({"attn": [], "mlp": [-1]}, "mlp must be a list of different layers"),
        ({"attn": [[1]]}, "found [[1]]"),
        ({"attn": 3}, "found 3"),
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
    message = refusal(read_plan, write_plan(tmp_path, value), 4)
    assert said in message and "plan.json" in message


# Fuzz: whatever the files hold, a loaded model or one line


JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.integers(-2, 70)
    | st.floats()
    | st.sampled_from(
        [
            "",
            "llama",
            "gemma2",
            "default",
            "linear",
            "dynamic",
            "llama3",
            "yarn",
            "a\nb",
            "\ud800",
            "x" * 300,
        ]
    )
    | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4)
    ),
    max_leaves=8,
)
FULL_LLAMA = SMALL | {
    "rope_scaling": {
        **LLAMA3_ROPE,
        "rope_theta": 1e4,
        "factor": 2.0,
        "original_max_position_embeddings": 64,
    },
    "rope_parameters": None,
    "attention_bias": False,
    "mlp_bias": False,
    "quantization_config": None,
    "torch_dtype": "float32",
}
FULL_GEMMA2 = SMALL_GEMMA2 | {
    "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"},
    "layer_types": ["sliding_attention", "full_attention"],
    "final_logit_softcapping": 30.0,
}
FULL_GEMMA3 = SMALL_GEMMA2 | {
    "model_type": "gemma3_text",
    "rope_local_base_freq": 100.0,
    "sliding_window_pattern": 2,
}
FULL_QWEN2 = SMALL | {
    "model_type": "qwen2",
    "sliding_window": 4,
    "use_sliding_window": True,
    "max_window_layers": 1,
}


@st.composite
def damaged(draw: st.DrawFn, good: dict[str, Any]) -> Any:
    """A good JSON object of which some values, at any depth, were dropped, replaced or scaled."""
    value = json.loads(json.dumps(good))
    for _ in range(draw(st.integers(1, 3))):
        inner = [each for each in value.values() if isinstance(each, (dict, list))]
        holder = draw(st.sampled_from([each for each in (value, *inner) if each] or [{"": 0}]))
        places = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
        place = draw(st.sampled_from(places))
        kind = draw(st.sampled_from(["drop", "junk", "scale", "add"]))
        if kind == "drop":
            del holder[place]
        elif kind == "add" and isinstance(holder, dict):
            holder[draw(st.text(max_size=5))] = draw(JUNK)
        elif kind == "scale" and isinstance(holder[place], (int, float)):
            holder[place] *= draw(st.sampled_from([-1, 0, 2, 3, 10**6, 10**12, 10**300]))
        else:
            holder[place] = draw(JUNK)
    return value


@pytest.mark.parametrize(
    "good",
    [FULL_LLAMA, FULL_GEMMA2, FULL_GEMMA3, FULL_QWEN2],
    ids=["llama", "gemma2", "gemma3", "qwen2"],
)
@settings(max_examples=80)
@given(data=st.data())
def test_any_config_loads_or_is_refused_in_one_line(
    tmp_path_factory: pytest.TempPathFactory, good: dict[str, Any], data: st.DataObject
) -> None:
    folder = tmp_path_factory.getbasetemp() / good["model_type"]
    if not folder.exists():
        assert load_model(write_folder(folder, good)).num_layers == 2
    write_config(folder, data.draw(damaged(good)))
    try:
        model = load_model(folder)
    except InputError as error:
        line_of(error)
    else:
        assert all(parameter.device.type == "cpu" for parameter in model.parameters())


@settings(max_examples=150)
@given(plan=damaged({"attn": [0, 2], "mlp": [1], "gamma": 4, "threshold": 0.5}) | JUNK)
def test_any_plan_file_is_read_or_refused_in_one_line(
    tmp_path_factory: pytest.TempPathFactory, plan: Any
) -> None:
    path = write_plan(tmp_path_factory.getbasetemp(), json.dumps(plan))
    try:
        read = read_plan(path, 4)
    except InputError as error:
        line_of(error)
    else:
        assert read.plan.num_layers == 4 and (read.gamma is None or read.gamma >= 0)


def test_a_model_that_is_fetched_says_how(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a plain installation, which brings the tiny models alone."""
    name = "smollm2-135m-instruct"
    shutil.copytree(load.WEIGHTS / "configs", tmp_path / "configs")
    monkeypatch.setattr(load, "WEIGHTS", tmp_path)
    assert f"fetch it: python -m weights.fetch {name}" in refusal(model_folder, name)


@pytest.mark.parametrize("capability", [(7, 0), (7, 5), (8, 0), (8, 9), (9, 0), (12, 0)])
@pytest.mark.parametrize("config", [SMALL, SMALL_GEMMA2], ids=["llama", "gemma2"])
def test_a_gpu_that_emulates_bfloat16_gets_another_dtype_and_its_four_bit_kernel(
    capability: tuple[int, int],
    config: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Gemma's activations exceed the range of float16."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    folder = write_folder(tmp_path, config, dtype=torch.bfloat16)
    device = torch.device("cuda")
    is_old = capability < (8, 0)
    narrow = torch.float16 if config is SMALL else torch.float32
    assert pick_dtype("auto", folder, device) == (narrow if is_old else torch.bfloat16)
    assert gpu_bits(device, torch.bfloat16) == (() if is_old else (4,))
    for found, bits in (object(), (4,)), (None, ()):
        monkeypatch.setattr("model.fast.find_spec", lambda name, found=found: found)
        assert gpu_bits(device, narrow) == (bits if capability >= (7, 5) else ()), "Triton's"
    said = capsys.readouterr().err
    expected = f"[Tesla T4 only emulates bfloat16: the model runs in {narrow}]\n"
    assert said == (expected.replace("torch.", "") if is_old else "")
    assert pick_dtype("bfloat16", folder, device) == torch.bfloat16, "done as asked"
    assert bool(capsys.readouterr().err) is is_old
    cpu = torch.device("cpu")
    assert pick_dtype("auto", folder, cpu) == torch.bfloat16
    assert pick_dtype("float16", folder, cpu) == torch.float32


def test_numbers_that_exceed_float16_are_refused_by_name(tmp_path: Path) -> None:
    state = random_state(SMALL, dtype=torch.bfloat16)
    state[UP][0, 0] = 1e5
    folder = write_folder(tmp_path, SMALL, state)
    assert f"numbers of {UP.removeprefix('model.')} exceed float16" in refusal(
        load_model, folder, torch.float16
    )
    assert load_model(folder, torch.float32).dtype == torch.float32
