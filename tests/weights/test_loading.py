"""Loading: every checkpoint layout gives the tensors it holds; every fault gives one line that names it."""

from __future__ import annotations

import json
import math
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load as parse_bytes
from safetensors.torch import save as serialise
from safetensors.torch import save_file
from torch import Tensor

from decoding.run import plan_file
from decoding.run.cost_file import kept
from decoding.run.costs import CostTable
from decoding.run.plan_file import DraftPlan, read_plan
from model import InputError, LayerPlan
from tests.folders import GEMMA2, LLAMA, random_state
from tests.laws import plans
from weights.load import load_model
from weights.names import model_folder

SMALL = LLAMA | {"vocab_size": 24, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
SMALL_GEMMA2 = GEMMA2 | {"vocab_size": 24, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
TIED = SMALL | {"tie_word_embeddings": True}
INDEX = "model.safetensors.index.json"


def write_config(folder: Path, config: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def write_weights(folder: Path, config: dict[str, Any], state: dict[str, Tensor]) -> Path:
    write_config(folder, config)
    save_file(state, folder / "model.safetensors")
    return folder


def write_shards(folder: Path, state: dict[str, Tensor], shards: int = 3) -> Path:
    """The state dealt to shards in turn, with their index."""
    write_config(folder, SMALL)
    names = [f"model-{number}-of-{shards}.safetensors" for number in range(shards)]
    places = {tensor: names[number % shards] for number, tensor in enumerate(state)}
    for name in names:
        save_file({tensor: state[tensor] for tensor in state if places[tensor] == name}, folder / name)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}), encoding="utf-8")
    return folder


def assert_holds(model: torch.nn.Module, state: dict[str, Tensor], dtype: torch.dtype) -> None:
    """The model has the state's numbers, all of them and no others, in ``dtype``."""
    parameters = dict(model.named_parameters())
    assert {name.removeprefix("model.") for name in state} == set(parameters)
    for name, tensor in state.items():
        parameter = parameters[name.removeprefix("model.")]
        assert parameter.dtype == dtype and not parameter.requires_grad
        assert torch.equal(parameter, tensor.to(dtype)), name


def refusal(folder: Path, dtype: torch.dtype | None = None) -> str:
    """The message of the InputError that loading the folder raises: one line."""
    with pytest.raises(InputError) as caught:
        load_model(folder, dtype)
    return one_line(caught.value)


def one_line(error: InputError) -> str:
    message = str(error)
    assert message.strip() and len(message.splitlines()) == 1
    return message


# Layouts and dtypes


@pytest.mark.parametrize("config", [SMALL, SMALL_GEMMA2, TIED], ids=["llama", "gemma2", "tied llama"])
def test_a_single_file_gives_the_tensors_it_holds(tmp_path: Path, config: dict[str, Any]) -> None:
    state = random_state(config)
    assert_holds(load_model(write_weights(tmp_path, config, state)), state, torch.float32)


def test_shards_give_the_tensors_they_hold(tmp_path: Path) -> None:
    state = random_state(SMALL)
    assert_holds(load_model(write_shards(tmp_path, state)), state, torch.float32)


def test_names_without_the_model_prefix_are_understood(tmp_path: Path) -> None:
    state = random_state(SMALL)
    bare = {name.removeprefix("model."): tensor for name, tensor in state.items()}
    assert_holds(load_model(write_weights(tmp_path, SMALL, bare)), state, torch.float32)


@pytest.mark.parametrize("wanted", [None, torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("stored", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_weights_come_in_the_wanted_dtype_or_else_their_own(
    tmp_path: Path, stored: torch.dtype, wanted: torch.dtype | None
) -> None:
    state = random_state(SMALL, dtype=stored)
    assert_holds(load_model(write_weights(tmp_path, SMALL, state), wanted), state, wanted or stored)


def test_tensors_of_several_slices_come_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weights.load.SLICE_BYTES", 100)
    state = random_state(SMALL)
    assert_holds(load_model(write_weights(tmp_path, SMALL, state), torch.bfloat16), state, torch.bfloat16)


def test_both_config_layouts_of_transformers_give_the_same_model(tmp_path: Path) -> None:
    rope = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope["original_max_position_embeddings"] = 64
    base = {key: value for key, value in SMALL.items() if key != "rope_theta"}
    older = base | {"rope_theta": 5000.0, "rope_scaling": rope, "torch_dtype": "float32"}
    newer = base | {"rope_parameters": {"rope_theta": 5000.0, **rope}, "dtype": "float32"}
    state = random_state(SMALL)
    models = [load_model(write_weights(tmp_path / name, raw, state)) for name, raw in (("4", older), ("5", newer))]
    assert models[0].config == models[1].config
    assert models[0].config.rope.theta == 5000.0 and models[0].config.rope.kind == "llama3"
    tokens = torch.arange(12)[None]
    assert torch.equal(models[0](tokens), models[1](tokens))


def test_derived_rotary_buffers_are_ignored(tmp_path: Path) -> None:
    state = random_state(SMALL)
    with_buffer = state | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    assert_holds(load_model(write_weights(tmp_path, SMALL, with_buffer)), state, torch.float32)


def test_a_copy_of_a_tied_embedding_is_ignored(tmp_path: Path) -> None:
    state = random_state(TIED)
    with_copy = state | {"lm_head.weight": state["model.embed_tokens.weight"].clone()}
    model = load_model(write_weights(tmp_path, TIED, with_copy))
    assert model.lm_head is None
    assert_holds(model, state, torch.float32)


def test_a_head_that_is_not_the_embedding_is_refused_where_the_config_ties_them(tmp_path: Path) -> None:
    """transformers runs such a head in spite of the config; to ignore it would be another model."""
    state = random_state(TIED)
    other = state["model.embed_tokens.weight"].clone()
    other[-1, -1] += 1
    message = refusal(write_weights(tmp_path, TIED, state | {"lm_head.weight": other}))
    assert "lm_head.weight" in message and "tie_word_embeddings" in message


# Memory

PEAK = """
import resource, sys
from pathlib import Path
import torch
from weights.load import DTYPES, load_model
folder, dtype = Path(sys.argv[1]), DTYPES[sys.argv[2]]
def high_water(): return int(next(l for l in open("/proc/self/status") if l.startswith("VmHWM")).split()[1]) * 1024
def resident(): return int(next(l for l in open("/proc/self/status") if l.startswith("VmRSS")).split()[1]) * 1024
load_model(Path(sys.argv[3]), dtype)  # warms up allocators and lazy imports
before = resident()
model = load_model(folder, dtype)
size = sum(parameter.nbytes for parameter in model.parameters())
print(high_water() - before, size)
"""


@pytest.mark.parametrize(
    ("stored", "wanted"),
    [("bfloat16", "bfloat16"), ("float32", "bfloat16"), ("bfloat16", "float32")],
)
def test_loading_takes_little_more_memory_than_the_weights(tmp_path: Path, stored: str, wanted: str) -> None:
    config = SMALL | {"hidden_size": 1024, "intermediate_size": 4096, "vocab_size": 32000, "num_attention_heads": 16}
    config |= {"head_dim": 64}
    folder = tmp_path / "large"
    dtype = getattr(torch, stored)
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in random_state(config).items()}
    write_weights(folder, config, {name: torch.zeros(shape, dtype=dtype) for name, shape in shapes.items()})
    small = write_weights(tmp_path / "small", SMALL, random_state(SMALL))
    run = subprocess.run(
        [sys.executable, "-c", PEAK, folder, wanted, small], capture_output=True, text=True, check=True
    )
    taken, size = map(int, run.stdout.split())
    assert size > 150e6
    assert size <= taken <= 1.3 * size


# Faults of a checkpoint


def test_a_missing_tensor_is_named_with_the_shape_it_should_have(tmp_path: Path) -> None:
    state = random_state(SMALL)
    del state["model.layers.1.mlp.up_proj.weight"]
    message = refusal(write_weights(tmp_path, SMALL, state))
    assert "layers.1.mlp.up_proj.weight" in message and "missing" in message and "[24, 16]" in message


def test_an_extra_tensor_is_named_with_its_shape(tmp_path: Path) -> None:
    state = random_state(SMALL) | {"model.layers.1.mlp.up_proj.bias": torch.zeros(24)}
    message = refusal(write_weights(tmp_path, SMALL, state))
    assert "layers.1.mlp.up_proj.bias" in message and "[24]" in message


@pytest.mark.parametrize("shape", [(16, 24), (24, 15), (384,), (1, 24, 16), ()], ids=str)
def test_a_mis_shaped_tensor_is_named_with_both_shapes(tmp_path: Path, shape: tuple[int, ...]) -> None:
    state = random_state(SMALL) | {"model.layers.1.mlp.up_proj.weight": torch.zeros(shape)}
    message = refusal(write_weights(tmp_path, SMALL, state))
    assert "layers.1.mlp.up_proj.weight" in message and str(list(shape)) in message and "[24, 16]" in message


@pytest.mark.parametrize("kept", [0, 4, 7, 8, 100, -1])
def test_a_truncated_file_is_refused(tmp_path: Path, kept: int) -> None:
    file = write_weights(tmp_path, SMALL, random_state(SMALL)) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    assert "model.safetensors is not a whole safetensors file" in refusal(tmp_path)


class Trap:
    """Unpickled, it leaves a mark: the proof that a pickle was opened."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return os.mkdir, (str(self.mark),)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "consolidated.00.pth"])
def test_pickled_weights_are_refused_unopened(tmp_path: Path, name: str) -> None:
    write_config(tmp_path, SMALL)
    torch.save(Trap(tmp_path / "mark"), tmp_path / name)
    message = refusal(tmp_path)
    assert name in message and "pickle" in message and "not loaded" in message and "save_pretrained" in message
    assert not (tmp_path / "mark").exists()


def test_an_index_that_names_pickles_is_refused_unopened(tmp_path: Path) -> None:
    write_config(tmp_path, SMALL)
    torch.save(Trap(tmp_path / "mark"), tmp_path / "pytorch_model.bin")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"model.norm.weight": "pytorch_model.bin"}}))
    assert "pytorch_model.bin" in refusal(tmp_path)
    assert not (tmp_path / "mark").exists()


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    assert "holds no model.safetensors" in refusal(write_config(tmp_path, SMALL))


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    (write_shards(tmp_path, random_state(SMALL)) / "model-1-of-3.safetensors").unlink()
    message = refusal(tmp_path)
    assert "model-1-of-3.safetensors', which is no safetensors file of the folder" in message


@pytest.mark.parametrize("shard", ["../outside.safetensors", "/etc/passwd", "a/b.safetensors", "", ".", ".."])
def test_an_index_that_leaves_the_folder_is_refused(tmp_path: Path, shard: str) -> None:
    write_config(tmp_path / "model", SMALL)
    save_file(random_state(SMALL), tmp_path / "outside.safetensors")
    (tmp_path / "model" / INDEX).write_text(json.dumps({"weight_map": {"model.norm.weight": shard}}))
    assert INDEX in refusal(tmp_path / "model")


@pytest.mark.parametrize(
    "dtype", [torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool, torch.float8_e4m3fn], ids=str
)
def test_quantised_tensors_are_refused_by_name(tmp_path: Path, dtype: torch.dtype) -> None:
    state = random_state(SMALL)
    name = "model.layers.0.mlp.up_proj.weight"
    state[name] = state[name].to(dtype)
    message = refusal(write_weights(tmp_path, SMALL, state))
    assert name in message and "quantised" in message


@pytest.mark.parametrize(
    "name", ["x" * 5000, "nowhere", "nowhere\nat all", ""], ids=["long", "plain", "lines", "empty"]
)
def test_a_name_that_is_no_folder_says_what_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write_config(tmp_path / "known", SMALL)
    monkeypatch.setattr("weights.names.WEIGHTS", tmp_path / "weights")
    write_config(tmp_path / "weights" / "offered", SMALL)
    with pytest.raises(InputError) as caught:
        model_folder(name)
    assert one_line(caught.value)
    assert name == "" or "offered" in str(caught.value)


# Plan files


def write_plan(tmp_path: Path, value: Any) -> Path:
    path = tmp_path / "plan.json"
    path.write_text(value if isinstance(value, str) else json.dumps(value), encoding="utf-8")
    return path


def test_a_plan_file_is_read_with_all_it_says(tmp_path: Path) -> None:
    plan = {"attn": [3, 1], "mlp": [2], "gamma": 5, "threshold": 0.6, "model": "x", "score": 1.2}
    expected = DraftPlan(LayerPlan.skipping(4, [1, 3], [2]), 5, 0.6)
    assert read_plan(write_plan(tmp_path, plan), 4) == expected
    assert read_plan(write_plan(tmp_path, {"mlp": [0]}), 4) == DraftPlan(LayerPlan.skipping(4, [], [0]))


@pytest.mark.parametrize(
    ("value", "attention", "mlp", "head"),
    [
        ({"bits": 4}, (4, 4, 4, 4), (4, 4, 4, 4), 16),
        ({"attn": [1], "bits": 8, "head_bits": 8}, (8, 0, 8, 8), (8, 8, 8, 8), 8),
        ({"mlp": [0], "bits": {"attn": [4, 8, 16, 0], "mlp": [8, 4, 4, 16]}}, (4, 8, 16, 0), (0, 4, 4, 16), 16),
        ({"bits": {"mlp": [4, 4, 4, 4]}}, (16, 16, 16, 16), (4, 4, 4, 4), 16),
    ],
)
def test_a_plan_file_says_the_bits_of_all_sublayers_or_of_each_and_of_the_head(
    tmp_path: Path, value: Any, attention: tuple[int, ...], mlp: tuple[int, ...], head: int
) -> None:
    assert read_plan(write_plan(tmp_path, value), 4).plan == LayerPlan(attention, mlp, head)


@given(plan=plans(4))
def test_a_plan_is_read_as_it_was_written(tmp_path_factory: pytest.TempPathFactory, plan: LayerPlan) -> None:
    path = tmp_path_factory.getbasetemp() / "written.json"
    plan_file.write_plan(path, DraftPlan(plan, 3), "", {})
    assert read_plan(path, 4) == DraftPlan(plan, 3)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"bits": 5}, "bits must be 4, 6, 8 or 16, or 4 of them"),
        ({"bits": {"attn": [4, 4]}}, "bits must be 4, 6, 8 or 16, or 4 of them"),
        ({"bits": {"attn": [4, 4, 4, 3]}}, "bits must be 4, 6, 8 or 16, or 4 of them"),
        ({"bits": {"head": 8}}, "bits must be 4, 6, 8 or 16, or 4 of them"),
        ({"bits": 4, "head_bits": 0}, "head_bits must be 4, 6, 8 or 16, found 0"),
        ({"attn": [4], "mlp": []}, "attn of layer 4, but this model has layers 0..3"),
        ({"attn": [], "mlp": [-1]}, "mlp of layer -1"),
        ({"attn": [10**30]}, "layers 0..3"),
        ({"attn": ["1"]}, "attn must be a list of layer numbers"),
        ({"attn": [1.0]}, "attn must be a list of layer numbers"),
        ({"attn": None}, "attn must be a list of layer numbers"),
        ({"attn": [], "mlp": 3}, "mlp must be a list of layer numbers"),
        ({"attn": [], "gamma": -1}, "gamma"),
        ({"attn": [], "gamma": 2.5}, "gamma"),
        ({"attn": [], "threshold": 1.1}, "threshold"),
        ('{"attn": [], "threshold": NaN}', "threshold"),
        ({"attn": [], "threshold": "high"}, "threshold"),
        ([1, 2], "one object"),
        ({"gamma": 4}, "attn"),
        ({"attention": [1]}, "attn"),
        ("{", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ('{"attn": [' + "9" * 5000 + "]}", "not valid JSON"),
    ],
    ids=lambda value: f"{value!s:.40}",
)
def test_a_wrong_plan_file_is_refused_with_its_name(tmp_path: Path, value: Any, said: str) -> None:
    with pytest.raises(InputError) as caught:
        read_plan(write_plan(tmp_path, value), 4)
    assert said in one_line(caught.value) and "plan.json" in str(caught.value)


def test_a_plan_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"nothing\.json does not exist"):
        read_plan(tmp_path / "nothing.json", 4)
    with pytest.raises(InputError, match="cannot be read"):
        read_plan(tmp_path, 4)


# Cost tables kept beside a model


MEASURED = CostTable(0.5, (1.0, 1.25, 1.5))


def costs_of(folder: Path, model: torch.nn.Module) -> tuple[CostTable, bool]:
    """The table that comes back, and whether it had to be measured."""
    calls = []
    costs = kept(folder, model, "lookup", CostTable, lambda: calls.append(1) or MEASURED)
    return costs, bool(calls)


def test_costs_are_measured_once_and_then_read(tmp_path: Path) -> None:
    model = load_model(write_weights(tmp_path, SMALL, random_state(SMALL)))
    assert costs_of(tmp_path, model) == (MEASURED, True)
    assert costs_of(tmp_path, model) == (MEASURED, False)


def test_costs_measured_on_a_busy_machine_are_not_kept(tmp_path: Path) -> None:
    model = load_model(write_weights(tmp_path, SMALL, random_state(SMALL)))
    busy = CostTable(0.5, (1.0, 1.25, 1.5), steady=False)
    assert kept(tmp_path, model, "lookup", CostTable, lambda: busy) is busy
    assert not (tmp_path / "costs.json").exists()


@pytest.mark.parametrize(
    "entry",
    [
        {},
        {"draft": 0.5},
        {"draft": 0.5, "verify": []},
        {"draft": 0.5, "verify": "123"},
        {"draft": 0.5, "verify": [1.0, 0.0]},
        {"draft": math.nan, "verify": [1.0, 1.1]},
        {"draft": -1, "verify": [1.0, 1.1]},
        {"draft": 10**400, "verify": [1.0, 1.1]},
        {"draft": 0.5, "verify": [1.0, None]},
        None,
    ],
    ids=lambda entry: f"{entry!s:.40}",
)
def test_a_damaged_cost_table_is_measured_again_and_mended(tmp_path: Path, entry: Any) -> None:
    model = load_model(write_weights(tmp_path, SMALL, random_state(SMALL)))
    costs_of(tmp_path, model)
    (key,) = json.loads((tmp_path / "costs.json").read_text())
    (tmp_path / "costs.json").write_text(json.dumps({key: entry, "another machine": {"kept": 1}}))
    assert costs_of(tmp_path, model) == (MEASURED, True)
    assert costs_of(tmp_path, model) == (MEASURED, False)
    assert json.loads((tmp_path / "costs.json").read_text())["another machine"] == {"kept": 1}


@pytest.mark.parametrize("text", ["", "[]", '{"\\ud800": 1}'])
def test_a_damaged_cost_file_is_measured_again(tmp_path: Path, text: str) -> None:
    model = load_model(write_weights(tmp_path, SMALL, random_state(SMALL)))
    (tmp_path / "costs.json").write_text(text)
    assert costs_of(tmp_path, model) == (MEASURED, True)


# Fuzz: whatever the files hold, a loaded model or one line


JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.integers(-2, 70)
    | st.floats()
    | st.sampled_from(
        ["", "llama", "gemma2", "default", "linear", "dynamic", "llama3", "yarn", "a\nb", "\ud800", "x" * 300]
    )
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
    max_leaves=8,
)
ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 2.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FULL_LLAMA = SMALL | {
    "rope_scaling": ROPE,
    "rope_parameters": None,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "hidden_act": "silu",
    "quantization_config": None,
    "torch_dtype": "float32",
}
FULL_GEMMA2 = SMALL_GEMMA2 | {
    "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"},
    "layer_types": ["sliding_attention", "full_attention"],
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "hidden_activation": "gelu_pytorch_tanh",
}


@st.composite
def damaged(draw: st.DrawFn, good: dict[str, Any]) -> Any:
    """A good JSON object of which some values, at any depth, were dropped, replaced or scaled."""
    value = json.loads(json.dumps(good))
    for _ in range(draw(st.integers(1, 3))):
        holder = value
        keys = [key for key, inner in value.items() if isinstance(inner, (dict, list)) and inner]
        if keys and draw(st.booleans()):
            holder = value[draw(st.sampled_from(keys))]
        places = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
        if not places:
            continue
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


def loads_or_says_why(folder: Path) -> None:
    """The law of the fuzz; and no tensor is ever made that the files could not fill."""
    on_disk = sum(file.stat().st_size for file in folder.iterdir())
    real, taken = torch.empty, []

    def counted(*args: Any, **kwargs: Any) -> Tensor:
        shape = args[0] if args and not isinstance(args[0], int) else args
        device = torch.device(kwargs.get("device") or torch.get_default_device())
        if device.type != "meta":
            dtype = kwargs.get("dtype") or torch.get_default_dtype()
            taken.append(math.prod(shape) * dtype.itemsize)
            assert sum(taken) <= on_disk, "more memory asked for than the files hold"
        return real(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", counted)
        try:
            model = load_model(folder)
        except InputError as error:
            one_line(error)
        else:
            assert taken and all(parameter.device.type == "cpu" for parameter in model.parameters())


def loading(folder: Path) -> Path:
    """The folder, after a check that it loads before it is damaged."""
    assert load_model(folder).num_layers == 2
    return folder


@pytest.fixture(scope="module")
def llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return loading(write_weights(tmp_path_factory.mktemp("llama"), FULL_LLAMA, random_state(FULL_LLAMA)))


@pytest.fixture(scope="module")
def gemma2_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return loading(write_weights(tmp_path_factory.mktemp("gemma2"), FULL_GEMMA2, random_state(FULL_GEMMA2)))


@settings(max_examples=300)
@given(config=damaged(FULL_LLAMA))
def test_any_llama_config_loads_or_is_refused_in_one_line(llama_folder: Path, config: Any) -> None:
    write_config(llama_folder, config)
    loads_or_says_why(llama_folder)


@settings(max_examples=300)
@given(config=damaged(FULL_GEMMA2))
def test_any_gemma2_config_loads_or_is_refused_in_one_line(gemma2_folder: Path, config: Any) -> None:
    write_config(gemma2_folder, config)
    loads_or_says_why(gemma2_folder)


@pytest.fixture(scope="module")
def sharded_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return loading(write_shards(tmp_path_factory.mktemp("shards"), random_state(SMALL)))


SHARD_NAMES = st.sampled_from(
    [
        "model-0-of-3.safetensors",
        "model-1-of-3.safetensors",
        "config.json",
        INDEX,
        "..",
        "x" * 300,
        "a\nb",
        "\ud800",
        "\0",
    ]
)


@settings(max_examples=300)
@given(data=st.data())
def test_any_index_loads_or_is_refused_in_one_line(sharded_folder: Path, data: st.DataObject) -> None:
    state = list(random_state(SMALL))
    good = {name: f"model-{number % 3}-of-3.safetensors" for number, name in enumerate(state)}
    changes = st.dictionaries(st.sampled_from(state) | st.text(max_size=5), SHARD_NAMES, min_size=1, max_size=3)
    index = data.draw(
        changes.map(lambda changed: {"weight_map": good | changed})
        | st.sets(st.sampled_from(state)).map(lambda kept: {"weight_map": {name: good[name] for name in kept}})
        | damaged({"metadata": {"total_size": 1}, "weight_map": good})
        | JUNK
    )
    (sharded_folder / INDEX).write_text(json.dumps(index), encoding="utf-8")
    loads_or_says_why(sharded_folder)


@settings(max_examples=300)
@given(plan=damaged({"attn": [0, 2], "mlp": [1], "gamma": 4, "threshold": 0.5}) | JUNK)
def test_any_plan_file_is_read_or_refused_in_one_line(tmp_path_factory: pytest.TempPathFactory, plan: Any) -> None:
    path = write_plan(tmp_path_factory.getbasetemp(), json.dumps(plan))
    try:
        read = read_plan(path, 4)
    except InputError as error:
        one_line(error)
    else:
        assert read.plan.num_layers == 4 and (read.gamma is None or read.gamma >= 0)


NAMES = st.text(max_size=8) | st.sampled_from(
    ["norm.weight", "lm_head.weight", "model.", "layers.0", "layers.٣.x", "layers.99999.x", "layers.123456.x.weight"]
)


def header_of(data: bytes) -> tuple[dict[str, Any], bytes]:
    length = struct.unpack("<Q", data[:8])[0]
    return json.loads(data[8 : 8 + length]), data[8 + length :]


@st.composite
def damaged_bytes(draw: st.DrawFn, good: bytes) -> bytes:
    """A safetensors file with bytes flipped, cut off, cut out or put in, or with another header."""
    kind = draw(st.sampled_from(["flip", "truncate", "remove", "insert", "length", "header"]))
    header, body = header_of(good)
    near_header = st.integers(0, len(good) - len(body) + 16)
    at = draw(near_header | st.integers(len(good) - len(body), len(good) - 1))
    if kind == "flip":
        return good[:at] + bytes([good[at] ^ draw(st.integers(1, 255))]) + good[at + 1 :]
    if kind == "truncate":
        return good[:at]
    if kind == "remove":
        return good[:at] + good[at + draw(st.integers(1, 64)) :]
    if kind == "insert":
        return good[:at] + draw(st.binary(min_size=1, max_size=16)) + good[at:]
    if kind == "length":
        return struct.pack("<Q", draw(st.integers(0, 2**64 - 1) | st.integers(0, 3000))) + good[8:]
    name = draw(st.sampled_from(sorted(set(header) - {"__metadata__"})))
    entry = header.pop(name)
    change = draw(st.sampled_from(["dtype", "shape", "data_offsets", "name", "everything"]))
    if change == "name":
        header[draw(st.text(max_size=8))] = entry
    elif change == "everything":
        header[name] = draw(JUNK)
    else:
        dtypes = st.sampled_from(["F16", "F64", "I64", "U8", "BOOL", "F8_E5M2", "F4", "C64", "Q4", ""])
        sizes = st.lists(st.sampled_from([0, 1, 2, 16, 24, 384, 2**31, 2**62, 2**63, 2**64, -1]), max_size=4)
        header[name] = entry | {change: draw(dtypes if change == "dtype" else sizes | JUNK)}
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


@st.composite
def sound_bytes(draw: st.DrawFn, good: bytes) -> bytes:
    """A safetensors file as the format wants it, of which some tensors are not as the model wants them."""
    state = parse_bytes(good)
    for name in draw(st.sets(st.sampled_from(sorted(state)), min_size=1, max_size=2)):
        tensor = state.pop(name)
        kind = draw(st.sampled_from(["drop", "dtype", "shape", "rename", "copy", "nothing"]))
        if kind == "dtype":
            other = draw(st.sampled_from([torch.float16, torch.bfloat16, torch.int32, torch.bool, torch.float8_e5m2]))
            state[name] = tensor.to(other)
        elif kind == "shape":
            state[name] = tensor.flatten() if draw(st.booleans()) else tensor[..., : draw(st.integers(0, 5))].clone()
        elif kind == "rename":
            state[draw(NAMES)] = tensor
        elif kind == "copy":
            state |= {name: tensor, draw(NAMES): tensor.clone()}
        elif kind == "nothing":
            state[name] = tensor
    return serialise(state)


@pytest.fixture(scope="module")
def weights_folder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    folder = loading(write_weights(tmp_path_factory.mktemp("weights"), SMALL, random_state(SMALL)))
    return folder, (folder / "model.safetensors").read_bytes()


@settings(max_examples=500)
@given(data=st.data())
def test_any_bytes_as_weights_load_or_are_refused_in_one_line(
    weights_folder: tuple[Path, bytes], data: st.DataObject
) -> None:
    folder, good = weights_folder
    (folder / "model.safetensors").write_bytes(
        data.draw(damaged_bytes(good) | sound_bytes(good) | st.binary(max_size=100))
    )
    loads_or_says_why(folder)
