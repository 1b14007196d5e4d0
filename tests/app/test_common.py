"""What all commands share: exit status, one line per failure and closed streams in a shell; atomic
writing of user files, links, permissions, and reading with errors of one line.
"""

import json
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from app.common.command_line import run_command
from app.common.files import (
    atomic_path,
    check_place,
    read_json,
    read_optional_json,
    write_json,
)
from model.errors import InputError
from tests.commands import Outcome
from tests.refusal import refusal

ROOT = Path(__file__).parents[2]
# Commands in a shell

SCRIPT = """
import os, sys, types
model = sys.modules["model"] = types.ModuleType("model")  # without torch, which is slow
model.__path__ = [os.environ["PYTHONPATH"] + "/model"]
from app.common.command_line import run_command, start
from app.common.parsers import parser_of

def little():
    print("a little")

def failed():
    print("a little")
    raise sys.modules["model.errors"].InputError("wrong")

def echo():
    print(ascii(input()))

def much():
    for number in range(50_000):
        print("line", number)

def much_noise():
    for number in range(50_000):
        print("line", number, file=sys.stderr)

def foreign():
    print("caf\\u00e9 \\u65e5 \\udcff")
    print("caf\\u00e9", file=sys.stderr)

def help():
    parser_of({}, prog="script", description="words").parse_args(["--help"])

def stand_in():
    print("fine")

if sys.argv[1] == "stand_in":  # any object may be a stream
    sys.stdin = object()
start()
sys.exit(run_command(globals()[sys.argv[1]]))
"""

NO_SPACE = "error: a file or a stream cannot be read or written: No space left on device\n"
CLOSED = "error: standard input, output or error is closed: give /dev/null instead\n"


@pytest.mark.parametrize(
    ("line", "work", "expected"),
    [
        ("$RUN > /dev/full", "little", Outcome(2, "", NO_SPACE)),
        ("$RUN > /dev/full", "much", Outcome(2, "", NO_SPACE)),
        ("$RUN > /dev/full", "help", Outcome(2, "", NO_SPACE)),
        ("$RUN | head -n 1", "much", Outcome(0, "line 0\n", "")),
        ("export PYTHONUNBUFFERED=1; $RUN | head -n 1", "much", Outcome(0, "line 0\n", "")),
        (
            "$RUN 2>&1 | head -n 1; echo ${PIPESTATUS[0]}",
            "much_noise",
            Outcome(0, "line 0\n0\n", ""),
        ),
        ("$RUN | true; echo ${PIPESTATUS[0]}", "little", Outcome(0, "0\n", "")),
        ("$RUN | true; echo ${PIPESTATUS[0]}", "failed", Outcome(0, "2\n", "error: wrong\n")),
        ("$RUN > /dev/full", "failed", Outcome(2, "", "error: wrong\n")),
        ("$RUN", "stand_in", Outcome(0, "fine\n", "")),
        ("$RUN <&-", "little", Outcome(2, "", CLOSED)),
        ("$RUN >&-", "little", Outcome(2, "", CLOSED)),
        ("$RUN 2>&-", "little", Outcome(2, "", "")),
        (
            "export PYTHONIOENCODING=ascii; $RUN",
            "foreign",
            Outcome(0, "caf? ? ?\n", "caf?\n"),
        ),
        (
            r"export PYTHONIOENCODING=utf-8; printf '\xff\n' | $RUN",
            "echo",
            Outcome(0, r"'\udcff'" + "\n", ""),
        ),
    ],
)
@pytest.mark.skipif(sys.platform != "linux", reason="needs /dev/full: run it on Linux")
def test_in_a_shell_a_failure_is_one_line_and_a_reader_that_has_gone_is_met_with_silence(
    line: str, work: str, expected: Outcome, tmp_path: Path
) -> None:
    """In the line of shell, $RUN stands for a command that calls a function of the script."""
    (tmp_path / "script.py").write_text(SCRIPT)
    command = f"'{sys.executable}' '{tmp_path}/script.py' {work}"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", line.replace("$RUN", command)],
        env=os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": ""},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert Outcome(done.returncode, done.stdout, done.stderr) == expected


@pytest.mark.parametrize(
    ("work", "line"),
    [
        (
            Mock(side_effect=InputError("'a\nb\x1b[31m' is wrong:\nfix it")),
            "'a b [31m' is wrong: fix it\n",
        ),
        (
            Mock(side_effect=FileNotFoundError(2, "No such file", "a\nb")),
            "a b cannot be read or written: No such file\n",
        ),
        (
            Mock(side_effect=OSError(5, "Input error")),
            "a file or a stream cannot be read or written: Input error\n",
        ),
        (
            Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory.\nTried")),
            "out of memory: ask for less, or free some first (CUDA out of memory. Tried)\n",
        ),
        (lambda: torch.empty(2**50), "out of memory: ask for less, or free some first ("),
    ],
    ids=["input", "file", "no file", "device memory", "host memory"],
)
def test_a_failure_is_one_line_and_status_2(
    work: Callable[[], None], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert Outcome(run_command(work), *capsys.readouterr()).complaint.startswith(f"error: {line}")


def test_a_mistake_of_ours_keeps_its_traceback() -> None:
    with pytest.raises(RuntimeError, match="shapes differ"):
        run_command(Mock(side_effect=RuntimeError("shapes differ")))


@pytest.mark.parametrize(
    ("work", "interrupted", "expected"),
    [
        (lambda: None, "go on", Outcome(0, "", "")),
        (lambda: 130, "go on", Outcome(130, "", "")),
        (Mock(side_effect=SystemExit(2)), "go on", Outcome(2, "", "")),
        (Mock(side_effect=SystemExit(1)), "go on", Outcome(1, "", "")),
        (Mock(side_effect=KeyboardInterrupt), "", Outcome(130, "", "")),
        (Mock(side_effect=KeyboardInterrupt), "go on", Outcome(130, "", "go on\n")),
    ],
    ids=["done", "with a status", "the parser's", "of the work", "Ctrl-C", "Ctrl-C with a line"],
)
def test_the_status_is_that_of_the_work_and_130_on_ctrl_c_with_the_line_of_the_command(
    work: Callable[[], int | None],
    interrupted: str,
    expected: Outcome,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert Outcome(run_command(work, interrupted), *capsys.readouterr()) == expected


WATCH = """
import os, signal, sys
class Watch:
    def find_spec(self, name, path=None, target=None):
        if name == "{module}":
            {action}
sys.meta_path.insert(0, Watch())
"""
START = """\"\"\"

if __name__ == "__main__":  # before anything that takes long to import
    from app.common.command_line import start

    start()
"""


@pytest.mark.parametrize(
    ("program", "module", "action", "status"),
    [
        # 130 in a shell
        (["generate.py"], "torch.nn", "os.kill(os.getpid(), signal.SIGINT)", -signal.SIGINT),
        *(
            (program, "torch", "os._exit(os.environ.get('GOMP_SPINCOUNT') != '1000')", 0)
            for program in (["generate.py"], ["-c", "import specdec; specdec.load"])
        ),
    ],
    ids=["Ctrl-C", "threads", "threads of a Python program"],
)
def test_while_a_command_is_imported_ctrl_c_is_silent_and_idle_threads_are_told_to_sleep(
    program: list[str], module: str, action: str, status: int, tmp_path: Path
) -> None:
    """What is done when the module is imported. Torch reads the variable when it is loaded."""
    (tmp_path / "sitecustomize.py").write_text(WATCH.format(module=module, action=action))
    done = subprocess.run(
        [sys.executable, *program, "--help"],
        cwd=ROOT,
        env={"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout, done.stderr) == (status, "", "")


def test_every_command_begins_with_start() -> None:
    """Directly behind its docstring. The proof runs without ``app``."""
    texts = [path.read_text() for path in (*ROOT.glob("*.py"), *ROOT.glob("[!.]*/**/*.py"))]
    commands = [
        each for each in texts if each.endswith("sys.exit(main())\n") and "from app." in each
    ]
    assert len(commands) > 7 and all(START in each for each in commands)


# Writing files


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


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


# Reading files


def test_an_optional_file_is_empty_only_where_it_is_absent(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    assert read_optional_json(path) == {}
    assert "file.json cannot be read as UTF-8 text: No such file" in refusal(read_json, path)
    path.write_text("[1]")
    assert "file.json must hold one JSON object" in refusal(read_optional_json, path)
    path.write_bytes(b"\xff")
    assert "file.json cannot be read" in refusal(read_optional_json, path)
