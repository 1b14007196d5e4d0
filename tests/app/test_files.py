"""User files: atomic writing, links, permissions, and reading with errors of one line."""

import json
import os
import stat
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from app.common.files import (
    atomic_path,
    check_place,
    read_json,
    read_optional_json,
    write_json,
)
from tests.refusal import refusal


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


# Writing


def test_a_link_stays_a_link_and_its_target_is_written(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    (tmp_path / "below/target.json").write_text("old")
    (tmp_path / "link").symlink_to("below/target.json")
    check_place(tmp_path / "link")
    write_json(tmp_path / "link", 1)
    assert (tmp_path / "link").is_symlink() and read_json(tmp_path / "below/target.json") == 1
    assert names(tmp_path) == {"below", "link"} and names(tmp_path / "below") == {"target.json"}


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    write_json(path, {"old": 1})
    with pytest.raises(KeyboardInterrupt), atomic_path(path) as temporary:
        temporary.write_text("half")
        assert json.loads(path.read_text()) == {"old": 1}
        raise KeyboardInterrupt
    assert json.loads(path.read_text()) == {"old": 1} and names(tmp_path) == {"file.json"}


@pytest.mark.parametrize("mask", [0o022, 0o077], ids=oct)
def test_written_files_have_the_permissions_that_the_umask_leaves(
    tmp_path: Path, mask: int
) -> None:
    """Also where the writer replaces the temporary file, as safetensors does."""
    before = os.umask(mask)
    try:
        write_json(tmp_path / "written", 1)
        with atomic_path(tmp_path / "replaced") as temporary:
            (tmp_path / "own").touch(mode=0o600)
            os.replace(tmp_path / "own", temporary)
    finally:
        os.umask(before)
    assert {oct(stat.S_IMODE(path.stat().st_mode)) for path in tmp_path.iterdir()} == {
        oct(0o666 & ~mask)
    }


@pytest.mark.parametrize(
    ("work", "name", "said"),
    [
        (check_place, "missing/out", "does not exist"),
        (check_place, "file/out", "does not exist"),
        (check_place, "", "is a folder or a device"),
        (check_place, "pipe", "is a folder or a device"),
        (partial(write_json, value=1), "pipe", "is a folder or a device"),
    ],
)
def test_a_place_that_cannot_be_written_is_one_line(
    work: Callable[[Path], None], name: str, said: str, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "pipe")
    assert said in refusal(work, tmp_path / name)
    assert names(tmp_path) == {"file", "pipe"}


# Reading


def test_an_optional_file_is_empty_only_where_it_is_absent(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    assert read_optional_json(path) == {}
    assert "file.json cannot be read as UTF-8 text: No such file" in refusal(read_json, path)
    path.write_text("[1]")
    assert "file.json must hold one JSON object" in refusal(read_optional_json, path)
    path.write_bytes(b"\xff")
    assert "file.json cannot be read" in refusal(read_optional_json, path)
