"""Kept tensors: they are read as they were written, or not at all; a failure costs time only."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from model.places import cache_folder
from tests.folders import LLAMA, write_folder
from weights import kept as kept_module
from weights.kept import KeptTensors, copies_folder, describe_copies

CODES = torch.arange(1000, dtype=torch.int64).to(torch.uint8).view(10, 100)
FILE_BYTES = 1004


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "model")


def keep(model: Path, dtype: torch.dtype = torch.bfloat16, version: str = "1") -> KeptTensors:
    return KeptTensors(model, dtype, version)


def with_codes(model: Path) -> KeptTensors:
    """The kept tensors of a model: one, by the name "a"."""
    kept = keep(model)
    kept.write("a", CODES)
    return kept


def test_a_kept_tensor_is_read_bit_for_bit_and_aligned(model: Path) -> None:
    with_codes(model).write("b", CODES.float())
    found = keep(model).read("a")
    assert torch.equal(found, CODES.flatten()) and found.data_ptr() % 64 == 0
    assert torch.equal(keep(model).read("b").view(torch.float32), CODES.float().flatten())
    assert keep(model).read("c") is None


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"",
        lambda content: content[:3],
        lambda content: content[:-1],
        lambda content: content + b"\0",
        lambda content: bytes(len(content)),
        lambda content: content[:500] + b"\xff" + content[501:],
        lambda content: bytes(4),
    ],
)
def test_a_damaged_or_short_file_is_not_read_and_made_again(
    model: Path, damage: Callable[[bytes], bytes]
) -> None:
    kept = with_codes(model)
    content = (kept.folder / "a").read_bytes()
    (kept.folder / "a").write_bytes(damage(content))
    assert kept.read("a") is None
    assert (with_codes(model).folder / "a").read_bytes() == content


def test_a_copy_of_another_file_is_not_read(model: Path) -> None:
    kept = with_codes(model)
    shutil.copy(kept.folder / "a", kept.folder / "b")
    (kept.folder / "c").mkdir()
    assert kept.read("b") is None and kept.read("c") is None


def test_the_folder_is_another_for_each_determinant(tmp_path: Path, model: Path) -> None:
    first, *others = (
        keep(model).folder,
        keep(model, dtype=torch.float16).folder,
        keep(model, version="2").folder,
        keep(write_folder(tmp_path / "retrained", seed=1)).folder,
        keep(write_folder(tmp_path / "other config", LLAMA | {"rms_norm_eps": 1e-3})).folder,
    )
    assert len({first, *others}) == 5
    again = keep(write_folder(tmp_path / "elsewhere"))
    assert again.folder == first, "the model's place is not one of them"


FULL = OSError(28, "No space left on device")
FAULTS: dict[str, Callable[[Path, pytest.MonkeyPatch], object]] = {
    "read-only": lambda cache, patch: patch.setattr(os, "access", lambda *_: False),
    "a file in its place": lambda cache, patch: cache.write_text(""),
    "a full disk": lambda cache, patch: patch.setattr(
        kept_module.zlib, "crc32", Mock(side_effect=FULL)
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_folder_that_cannot_be_written_costs_one_line(
    model: Path,
    cache: Path,
    fault: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    FAULTS[fault](cache, monkeypatch)
    monkeypatch.setattr("weights.kept.LARGEST", 0)
    kept = keep(model)
    for name in ("a", "b"):
        kept.write(name, CODES)
        assert kept.read(name) is None
    kept.drop_oldest()
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "not kept" in said
    assert not list(kept.folder.glob("*"))


def test_the_least_recently_used_are_dropped_first_but_never_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading counts as use."""
    stores = [with_codes(write_folder(tmp_path / str(seed), seed=seed)) for seed in range(4)]
    for time, kept in enumerate(stores):
        os.utime(kept.folder, (time, time))
    assert keep(tmp_path / "0").read("a") is not None
    for files, left in ((4, {0, 1, 2, 3}), (2, {0, 1}), (0, {1})):
        monkeypatch.setattr("weights.kept.LARGEST", files * FILE_BYTES)
        stores[1].drop_oldest()
        assert {number for number in range(4) if stores[number].folder.exists()} == left


def test_dropping_costs_a_process_that_uses_the_copies_nothing_but_another_write(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read tensor outlives its file, and writing to it does not change the file."""
    kept = with_codes(model)
    found = kept.read("a")
    found[0] = 7
    assert kept.read("a")[0] == 0
    monkeypatch.setattr("weights.kept.LARGEST", 0)
    keep(write_folder(tmp_path / "own", seed=9)).drop_oldest()
    assert torch.equal(found[1:], CODES.flatten()[1:]) and kept.read("a") is None
    kept.write("a", CODES)
    assert torch.equal(kept.read("a"), CODES.flatten())


def test_place_and_size_are_said(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "0 bytes" in describe_copies() and str(copies_folder()) in describe_copies()
    with_codes(model)
    assert "1.0 kB" in describe_copies()
    monkeypatch.delenv("SPECDEC_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder().is_relative_to(tmp_path / "xdg")
