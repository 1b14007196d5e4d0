"""User files: what is written is whole and goes where its name leads; what is there is never taken for absent."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from model import InputError
from weights.cli.files import atomic_path, check_place, is_there, read_json, read_optional_json, write_json


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def refusal(work: Callable[[], object]) -> str:
    """The one line of the InputError that the work raises."""
    with pytest.raises(InputError) as caught:
        work()
    message = str(caught.value)
    assert message and len(message.splitlines()) == 1
    return message


# Writing


@pytest.mark.parametrize("target", ["target.json", "below/target.json"])
def test_a_link_stays_a_link_and_its_target_is_written(tmp_path: Path, target: str) -> None:
    (tmp_path / "below").mkdir()
    (tmp_path / target).write_text("old")
    (tmp_path / "first").symlink_to(target)
    (tmp_path / "second").symlink_to(tmp_path / "first")
    before = names(tmp_path)
    for number, link in enumerate(("first", "second")):
        check_place(tmp_path / link)
        write_json(tmp_path / link, number)
        assert (tmp_path / link).is_symlink() and not (tmp_path / target).is_symlink()
        assert json.loads((tmp_path / target).read_text()) == number
    assert names(tmp_path) == before and names(tmp_path / "below") <= {"target.json"}


def test_a_failed_write_through_a_link_leaves_target_and_link(tmp_path: Path) -> None:
    (tmp_path / "target").write_text("old")
    (tmp_path / "link").symlink_to("target")
    with pytest.raises(KeyboardInterrupt), atomic_path(tmp_path / "link") as temporary:
        temporary.write_text("half")
        raise KeyboardInterrupt
    assert (tmp_path / "link").is_symlink() and (tmp_path / "link").read_text() == "old"
    assert names(tmp_path) == {"target", "link"}


PLACES: dict[str, tuple[Callable[[Path], object], str]] = {
    "device": (lambda path: path.symlink_to("/dev/null"), "is no regular file"),
    "pipe": (os.mkfifo, "is no regular file"),
    "folder": (os.mkdir, "is a folder"),
    "link to a folder": (lambda path: path.symlink_to("."), "is a folder"),
    "dangling link": (lambda path: path.symlink_to("nowhere"), "is a link that leads nowhere"),
    "loop": (lambda path: path.symlink_to(path.name), "is a link that leads nowhere"),
}


@pytest.mark.parametrize(("make", "said"), PLACES.values(), ids=PLACES)
def test_what_is_no_regular_file_is_refused_and_stays(
    make: Callable[[Path], object], said: str, tmp_path: Path
) -> None:
    path = tmp_path / "out.html"
    make(path)
    kind = path.lstat().st_mode
    for work in (lambda: check_place(path), lambda: write_json(path, 1)):
        assert f"{path} {said}" in refusal(work)
    assert path.lstat().st_mode == kind and names(tmp_path) == {"out.html"}


def test_a_device_named_by_itself_is_refused_and_stays() -> None:
    assert "/dev/null is no regular file" in refusal(lambda: check_place(Path("/dev/null")))
    assert "/dev/null is no regular file" in refusal(lambda: write_json(Path("/dev/null"), 1))
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)


def test_a_place_that_can_be_written_is_left_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "old").write_text("old")
    for name in ("old", "new"):
        check_place(tmp_path / name)
    assert names(tmp_path) == {"old"} and (tmp_path / "old").read_text() == "old"


@pytest.mark.parametrize("name", ["missing/out", "x" * 300, "a\0b"])
def test_a_place_that_cannot_be_written_is_one_line(name: str, tmp_path: Path) -> None:
    assert "cannot be written" in refusal(lambda: check_place(tmp_path / name))
    assert names(tmp_path) == set()


# Reading


def test_only_what_is_absent_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "loop").symlink_to("loop")
    there = {name: is_there(tmp_path / name) for name in ("file", "dangling", "loop", "loop/below")}
    assert all(there.values()), there
    assert not any(is_there(tmp_path / name) for name in ("absent", "file/below", "absent/below", "a\0b"))


def test_what_may_not_be_looked_at_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(self: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "lstat", forbidden)
    assert is_there(tmp_path / "config.json")


def test_an_optional_file_is_empty_only_where_it_is_absent(tmp_path: Path) -> None:
    assert read_optional_json(tmp_path / "absent.json") == {}
    (tmp_path / "loop.json").symlink_to("loop.json")
    dangling = tmp_path / "dangling.json"
    dangling.symlink_to("nowhere")
    assert "loop.json cannot be read" in refusal(lambda: read_optional_json(tmp_path / "loop.json"))
    for read in (read_optional_json, read_json):
        assert "dangling.json is a link to what does not exist" in refusal(
            lambda read=read: read(tmp_path / "dangling.json")
        )
    assert "absent.json does not exist" in refusal(lambda: read_json(tmp_path / "absent.json"))
