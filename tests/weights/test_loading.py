"""Loading and saving: every checkpoint layout gives the tensors it holds; every fault gives one
line that names it; and checkpoints travel both ways between this project and transformers.
"""

import filecmp
import json
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from app.common.files import read_json
from app.loaded import LoadedModel
from app.options import Options
from model.errors import InputError
from model.fast import accelerate
from model.fast.four_bits import gpu_bits
from model.parallel import Shard
from tests.calls import recorded
from tests.configs import FAMILIES, LLAMA3_ROPE, small
from tests.folders import GEMMA2, LLAMA, random_state, write_folder
from tests.laws import random_model
from tests.oracle import VOCAB, configs, lifted, oracle_logits, oracle_model, our_model
from tests.peak import held_bytes
from tests.ranks import part_of
from tests.refusal import refusal
from weights import load
from weights.checkpoint import HEAD, INDEX, STORED_DTYPES, StoredTensor, save_model
from weights.load import (
    config_of_weights,
    load_model,
    model_fingerprint,
    model_folder,
    pick_dtype,
)
from weights.tokenizer import Tokenizer

SIZES = {"vocab_size": 24, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
SMALL, SMALL_GEMMA2 = LLAMA | SIZES, GEMMA2 | SIZES
TIED = SMALL | {"tie_word_embeddings": True}
UP = "model.layers.1.mlp.up_proj.weight"


def write_json(folder: Path, value: Any, name: str = "config.json") -> Path:
    """Write a JSON value, or a text as it is; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(value if isinstance(value, str) else json.dumps(value))
    return folder


# Layouts and dtypes


@pytest.mark.parametrize("wanted", [None, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("stored", STORED_DTYPES.values(), ids=str)
@pytest.mark.parametrize(
    "config", [SMALL, SMALL_GEMMA2, TIED], ids=["llama", "gemma2", "tied llama"]
)
def test_a_file_gives_copies_of_its_tensors_in_the_wanted_dtype_or_else_their_own(
    tmp_path: Path, config: dict[str, Any], stored: torch.dtype, wanted: torch.dtype | None
) -> None:
    """Also where names lack the prefix "model.", beside derived buffers, and when the file is
    written over.
    """
    state = random_state(config, dtype=stored)
    bare = {name.removeprefix("model."): tensor for name, tensor in state.items()}
    expected = {name: tensor.to(wanted or stored) for name, tensor in bare.items()}
    buffer = {"layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    for written in state, bare | buffer:
        model = load_model(write_folder(tmp_path, config, written), wanted)
        (tmp_path / "model.safetensors").write_bytes(b"")
        torch.testing.assert_close(model.state_dict(), expected, rtol=0, atol=0)
        assert not any(parameter.requires_grad for parameter in model.parameters())


EMBEDDING = "model.embed_tokens.weight"
EXTRA = {
    "v_head.summary.weight": torch.zeros(1, 16),
    "model.mtp.layers.0.norm.weight": torch.zeros(16),
    "model.layers.0.self_attn.bias": torch.zeros(4, 4, dtype=torch.bool),
    "model.embeddings.position_ids": torch.arange(4),
}


@pytest.mark.parametrize(
    ("change", "holds_head", "said"),
    [
        (lambda state: {HEAD: state[EMBEDDING].clone()}, False, "does not read: lm_head.weight"),
        (
            lambda state: {HEAD: state[EMBEDDING].float() + 1e-9},  # equal after rounding
            False,
            "does not read: lm_head.weight",
        ),
        (
            lambda state: {HEAD: state[EMBEDDING] + 1},
            True,
            "tied in config.json, differ: both stay",
        ),
        (lambda state: {HEAD: state.pop(EMBEDDING)}, False, ""),
        (lambda _: EXTRA, False, "not read: embeddings.position_ids, layers.0.self_attn.bias, "),
    ],
    ids=["equal", "equal after rounding", "another", "a head alone", "extra"],
)
def test_a_tied_head_and_extra_tensors_are_those_of_transformers(
    change: Callable[[dict[str, Tensor]], dict[str, Tensor]],
    holds_head: bool,
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A stored head that differs from the tied embedding is kept; a line says what is not read."""
    state = random_state(TIED, dtype=torch.bfloat16)
    state |= change(state)
    model = load_model(write_folder(tmp_path, TIED, state), torch.bfloat16)
    assert (model.lm_head is not None) == (not model.config.tie_embeddings) == holds_head
    found = capsys.readouterr().err
    assert said in found and found.count("\n") == bool(said)
    oracle = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    expected = oracle(torch.tensor([[1, 2, 3]])).logits
    torch.testing.assert_close(model(torch.tensor([[1, 2, 3]])), expected, rtol=0, atol=0.1)
    options = Options(
        model=str(tmp_path), draft="model", draft_model=str(tmp_path), dtype="bfloat16"
    )
    assert LoadedModel(options).memory(9).weights == 2 * held_bytes(model), "target and draft"


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
    "a tied head that differs": {**LLAMA, "tie_word_embeddings": True},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_process_reads_its_shard_and_nothing_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: str
) -> None:
    stored = SHAPES[shape] | ({"tie_word_embeddings": False} if "differs" in shape else {})
    state = random_state(stored, dtype=torch.bfloat16)
    folder = write_folder(tmp_path, SHAPES[shape], state)
    whole = dict(load_model(folder).named_parameters())
    read = recorded(monkeypatch, StoredTensor, "read", lambda tensor, cut=None: (tensor.name, cut))
    for rank in range(2):
        shard = Shard(config_of_weights(folder, torch.bfloat16), rank, 2)
        mine = dict(load_model(folder, shard=shard).named_parameters())
        parts = {name: part_of(parameter, shard.cut(name)) for name, parameter in whole.items()}
        torch.testing.assert_close(mine, parts, rtol=0, atol=0)
        for name, cut in read[-len(mine) :]:
            assert cut == shard.cut(name.removeprefix("model."))


# Memory


def test_loading_takes_the_memory_of_the_weights_and_of_one_stored_tensor(tmp_path: Path) -> None:
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "vocab_size": 16000, "head_dim": 256}
    folder = write_folder(tmp_path / "large", SMALL | sizes)
    small = write_folder(tmp_path / "small", SMALL)
    command = [sys.executable, "-m", "tests.peak", folder, "bfloat16", small]
    taken, size = map(int, subprocess.check_output(command, text=True).split())
    assert 100e6 < size <= taken <= 1.1 * (size + 4 * 1024 * 16000), "that of the embedding"


# Faults of a checkpoint


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({UP: None}, ["Missing key", "layers.1.mlp.up_proj.weight"]),
        ({UP: torch.zeros(16, 24)}, ["up_proj.weight", "[16, 24]", "[24, 16]"]),
        ({EMBEDDING: None}, ["embed_tokens.weight is missing"]),
        ({UP: torch.zeros(24, 16, dtype=torch.int8)}, [UP, "quantised"]),
    ],
    ids=["missing", "turned", "no embedding", "int8"],
)
def test_a_wrong_tensor_is_named(
    tmp_path: Path, change: dict[str, Tensor | None], said: list[str]
) -> None:
    state = {
        name: tensor
        for name, tensor in (random_state(SMALL) | change).items()
        if tensor is not None
    }
    message = refusal(load_model, write_folder(tmp_path, SMALL, state))
    assert all(part in message for part in said), message


LFS_POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"


@pytest.mark.parametrize(
    ("name", "content", "said", "refused_by"),
    [
        ("model.safetensors", LFS_POINTER, "only points to a file that Git LFS", [load_model]),
        ("tokenizer.json", LFS_POINTER, "only points to a file that Git LFS keeps", [Tokenizer]),
        ("model.safetensors", "{", "is not a whole safetensors file", [load_model]),
        (INDEX, '{"weight_map": [1]}', f"{INDEX} is damaged", [load_model]),
        (INDEX, '{"weight_map": {"a": "1.safetensors"}}', "1.safetensors cannot be", [load_model]),
        # a pickle, which is not opened
        ("pytorch_model.bin", "", "holds no model.safetensors and no index", [load_model]),
        (INDEX, '{"weight_map": {}}', "no index that names shards", [load_model]),
        ("model-q4.gguf", "", "is in GGUF, the format of llama.cpp", [load_model, model_folder]),
        ("adapter_config.json", "", "is an adapter, not a model", [load_model, model_folder]),
    ],
)
def test_what_is_no_checkpoint_is_named(
    name: str, content: str, said: str, refused_by: list[Callable[[Any], Any]], tmp_path: Path
) -> None:
    """With a config.json beside it, or without one where a model is looked for."""
    write_folder(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    write_json(tmp_path, content, name)
    assert said in refusal(refused_by[0], tmp_path)
    (tmp_path / "config.json").unlink()
    for find in refused_by[1:]:
        for path in (tmp_path, tmp_path / name):
            assert said in refusal(find, str(path))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("x" * 5000, "weights/ holds offered"),
        ("nowhere\nat all", "weights/ holds offered"),
        # as after a plain installation, which brings the tiny models alone
        ("fetched", "fetch it: python -m weights.fetch fetched"),
    ],
    ids=["long", "lines", "fetched"],
)
def test_a_name_that_is_no_folder_says_which_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, said: str
) -> None:
    monkeypatch.setattr(load, "WEIGHTS", tmp_path)
    write_json(tmp_path / "offered", SMALL)
    write_json(tmp_path / "configs" / "fetched", SMALL)
    assert said in refusal(model_folder, name)


# Fingerprint


def test_another_tensor_makes_another_fingerprint(tmp_path: Path) -> None:
    """Of a norm of 512 bytes in a file of 9 million, too."""
    state = load_file(load.WEIGHTS / "tiny-llama" / "model.safetensors")
    config = json.loads((load.WEIGHTS / "tiny-llama" / "config.json").read_text())
    found = {model_fingerprint(write_folder(tmp_path, config, state))}
    for name in ("model.layers.3.input_layernorm.weight", "model.layers.3.mlp.up_proj.weight"):
        state[name] = torch.zeros_like(state[name])
        found.add(model_fingerprint(write_folder(tmp_path / name, config, state)))
    assert len(found) == 3


# Fuzz: whatever a config holds, a loaded model or one line


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
FIELDS = SIZES | {  # as many as any family reads
    "rope_scaling": LLAMA3_ROPE | {"original_max_position_embeddings": 64},
    "rope_parameters": None,
    "rope_local_base_freq": 100.0,
    "layer_types": ["sliding_attention", "full_attention"],
    "final_logit_softcapping": 30.0,
    "attention_bias": False,
    "mlp_bias": False,
    "quantization_config": None,
    "torch_dtype": "float32",
}


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=50)
@given(data=st.data())
def test_any_config_loads_or_is_refused_in_one_line(
    tmp_path_factory: pytest.TempPathFactory, family: str, data: st.DataObject
) -> None:
    folder = tmp_path_factory.getbasetemp() / family
    good = small(family) | FIELDS
    if not folder.exists():
        assert load_model(write_folder(folder, good)).num_layers == 2
    field, value = data.draw(st.sampled_from([*good])), data.draw(JUNK)
    if isinstance(good[field], dict) and data.draw(st.booleans()):
        value = good[field] | {data.draw(st.sampled_from([*good[field]])): value}
    write_json(folder, good | {field: value})
    with suppress(InputError):
        load_model(folder)


# What a device multiplies

T4, A100 = (7, 5), (8, 0)  # their capabilities
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


@pytest.mark.parametrize(
    ("device", "config", "stored", "asked", "picked", "said"),
    [
        ("cpu", SMALL, BF16, "auto", BF16, ""),
        ("cpu", SMALL, F16, "auto", F32, "a CPU is slow in float16: the model runs in float32"),
        ("cpu", SMALL, F16, "float16", F16, "a CPU is slow in float16: --dtype float32 is faster"),
        (A100, SMALL_GEMMA2, BF16, "auto", BF16, ""),
        (A100, SMALL, F16, "auto", F16, ""),
        (T4, SMALL, F32, "auto", F32, ""),
        (T4, SMALL, BF16, "auto", F16, "T4 is slow in bfloat16: the model runs in float16"),
        (T4, SMALL_GEMMA2, BF16, "auto", F32, "T4 is slow in bfloat16: the model runs in float32"),
        (T4, SMALL, BF16, "bfloat16", BF16, "T4 is slow in bfloat16: --dtype float16 is faster"),
    ],
)
def test_a_device_gets_the_checkpoints_dtype_or_one_that_it_multiplies(
    device: Any,
    config: dict[str, Any],
    stored: torch.dtype,
    asked: str,
    picked: torch.dtype,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """And a line says so. Activations of Gemma exceed the range of float16."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: device)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "T4")
    folder = write_folder(tmp_path, config, dtype=stored)
    kind = "cpu" if device == "cpu" else "cuda"
    assert pick_dtype(asked, folder, torch.device(kind)) == picked
    assert capsys.readouterr().err == (f"[{said}]\n" if said else "")


@pytest.mark.parametrize("has_triton", [True, False])
@pytest.mark.parametrize(
    ("capability", "bfloat16", "others"), [((7, 0), (), ()), (T4, (), (4,)), (A100, (4,), (4,))]
)
def test_a_gpu_has_four_bits_where_a_kernel_takes_them(
    capability: tuple[int, int],
    bfloat16: tuple[int, ...],
    others: tuple[int, ...],
    has_triton: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr("model.fast.four_bits.find_spec", lambda _: has_triton or None)
    found = [gpu_bits(torch.device("cuda"), dtype) for dtype in (BF16, F16, F32)]
    assert found == [bfloat16, *[others if has_triton else ()] * 2]


# Saving

TOKENS = torch.arange(14)[None] % VOCAB


def raw_config(family: str, tied: bool, **more: Any) -> dict[str, Any]:
    return small(
        family,
        hidden=16,
        layers=2,
        vocab_size=VOCAB,
        intermediate_size=24,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=None,
        tie_word_embeddings=tied,
        rope_theta=5000.0,
        rope_scaling=LLAMA3_ROPE | {"original_max_position_embeddings": 32},
        rope_local_base_freq=100.0,
        **more,
    )


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_what_one_library_saves_loads_in_the_other_with_the_same_logits(family, tied, tmp_path):
    """Ours with every weight that transformers wants, without its float32 casts; and theirs in
    several files. A model prepared for speed has the same tensors.
    """
    ours = random_model(raw_config(family, tied, attention_bias=True))
    save_model(ours, tmp_path)
    with lifted():
        oracle, report = AutoModelForCausalLM.from_pretrained(
            tmp_path, dtype=torch.float64, attn_implementation="eager", output_loading_info=True
        )
        assert not any(report.values()), report
        logits = oracle_logits(oracle, TOKENS).detach()
    oracle.save_pretrained(tmp_path / "theirs", max_shard_size=3000)
    assert (tmp_path / "theirs" / INDEX).exists()
    (tmp_path / "theirs" / "model-9-of-9.safetensors").write_text("not in the index")
    for model in (ours, load_model(tmp_path / "theirs")):
        torch.testing.assert_close(model(TOKENS), logits, rtol=0, atol=1e-9)  # in float64 too
    names = load_file(tmp_path / "model.safetensors").keys()
    save_model(accelerate(ours.float()), tmp_path)
    assert load_file(tmp_path / "model.safetensors").keys() == names


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=30, deadline=None, derandomize=True)
@given(data=st.data())
def test_every_config_survives_saving_and_loading(family, data, tmp_path_factory):
    """As transformers reads it too."""
    folder, ours = tmp_path_factory.mktemp("saved"), random_model(data.draw(configs(family)))
    save_model(ours, folder)
    again, oracle = load_model(folder), oracle_model(read_json(folder / "config.json"), seed=1)
    assert again.config == ours.config and torch.equal(again(TOKENS), ours(TOKENS))
    expected = oracle_logits(oracle, TOKENS)
    torch.testing.assert_close(our_model(oracle)(TOKENS), expected, rtol=0, atol=1e-4)


def test_a_write_that_fails_leaves_the_checkpoint_before_it_untouched(tmp_path, monkeypatch):
    """So does one that would lose a config, changed without its source."""
    model = random_model(raw_config("llama", False))
    save_model(model, tmp_path)
    model.config = replace(model.config, norm_eps=0.5)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    full = OSError(28, "No space left on device")
    monkeypatch.setattr("weights.checkpoint.write_json", Mock(side_effect=full))
    said = refusal(save_model, random_model(raw_config("gemma2", True)), tmp_path)
    assert "cannot be written: No space left on device" in said
    assert "config differs from that of its source" in refusal(save_model, model, tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_the_tokenizer_and_the_ids_that_end_a_text_go_with_the_weights(tmp_path):
    """Those of another folder, and then of this one."""
    ids = {"eos_token_id": [7, 9], "bos_token_id": 3}
    source, folder = write_folder(tmp_path / "source", LLAMA | ids), tmp_path / "saved"
    (source / "tokenizer_notes").mkdir()  # no file
    for taken_from in (source, folder):
        save_model(random_model(raw_config("llama", False)), folder, tokenizer_from=taken_from)
        assert (ids | {"hidden_size": 16}).items() <= read_json(folder / "config.json").items()
        assert filecmp.dircmp(source, folder).left_only == ["tokenizer_notes"]
        assert filecmp.cmp(folder / "tokenizer.json", source / "tokenizer.json", shallow=False)
