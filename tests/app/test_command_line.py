"""Shared behaviour of command lines in a shell: exit status, one line per failure, closed
streams.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from app.common.command_line import run_command
from model.errors import InputError
from tests.commands import Outcome
from weights import fetch

ROOT = Path(__file__).parents[2]
SCRIPT = """
import os, sys, types
model = sys.modules["model"] = types.ModuleType("model")  # without torch, which is slow
model.__path__ = [os.environ["PYTHONPATH"] + "/model"]
from app.common.command_line import run_command, start
from app.common.parsers import parser_of

def little():
    print("a little")

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

start()
sys.exit(run_command(globals()[sys.argv[1]]))
"""
Shell = Callable[..., Outcome]


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    """Runs one function of the script above by a line of shell, in which $RUN stands for it."""
    (tmp_path / "script.py").write_text(SCRIPT)

    def run(line: str, *arguments: str, **more: str) -> Outcome:
        command = " ".join(
            f"'{part}'" for part in (sys.executable, tmp_path / "script.py", *arguments)
        )
        environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": ""} | more
        bash = ["bash", "-o", "pipefail", "-c", line.replace("$RUN", command)]
        done = subprocess.run(bash, env=environment, capture_output=True, text=True, timeout=60)
        return Outcome(done.returncode, done.stdout, done.stderr)

    return run


# Failures


def test_a_deleted_working_directory_is_one_line(shell: Shell) -> None:
    line = "error: the working directory was deleted: change to another\n"
    assert shell("cd $(mktemp -d); rmdir $PWD; $RUN", "little") == Outcome(2, "", line)


def outcome(
    work: Callable[[], int | None], capsys: pytest.CaptureFixture[str], *more: str
) -> Outcome:
    status = run_command(work, *more)
    return Outcome(status, *capsys.readouterr())


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (InputError("'a\nb\x1b[31m' is wrong:\nfix it"), "error: 'a b [31m' is wrong: fix it\n"),
        (
            FileNotFoundError(2, "No such file", "a\nb"),
            "error: a b cannot be read or written: No such file\n",
        ),
        (
            OSError(5, "Input error"),
            "error: a file or a stream cannot be read or written: Input error\n",
        ),
        (
            torch.OutOfMemoryError("CUDA out of memory.\nTried"),
            "error: out of memory: ask for less, or free some first (CUDA out of memory. Tried)\n",
        ),
    ],
    ids=["input", "file", "no file", "device memory"],
)
def test_a_failure_is_one_line_and_status_2(
    error: Exception, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert outcome(Mock(side_effect=error), capsys) == Outcome(2, "", line)


def test_the_hosts_memory_too_may_run_out(capsys: pytest.CaptureFixture[str]) -> None:
    said = outcome(lambda: torch.empty(2**50), capsys).complaint
    assert said.startswith("error: out of memory: ")


@pytest.mark.parametrize("mistake", [RuntimeError("shapes differ"), SystemExit(2)], ids=repr)
def test_a_mistake_of_ours_keeps_its_traceback(mistake: BaseException) -> None:
    with pytest.raises(type(mistake), match=str(mistake)):
        run_command(Mock(side_effect=mistake))


def test_the_status_is_that_of_the_work_and_130_on_ctrl_c_with_the_line_of_the_command(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert outcome(lambda: None, capsys, "go on") == Outcome(0, "", "")
    assert outcome(lambda: 130, capsys, "go on") == Outcome(130, "", "")
    interrupted = Mock(side_effect=KeyboardInterrupt)
    assert outcome(interrupted, capsys) == Outcome(130, "", "")
    assert outcome(interrupted, capsys, "go on") == Outcome(130, "", "go on\n")


WATCH = """
import os, signal, sys
class Watch:
    def find_spec(self, name, path=None, target=None):
        if name == "{module}":
            {action}
sys.meta_path.insert(0, Watch())
"""


def stopped_at(
    module: str, action: str, command: list[str], folder: Path, **environment: str
) -> subprocess.CompletedProcess[str]:
    """A command that does this when it imports this module; its folder is for the watch."""
    (folder / "sitecustomize.py").write_text(WATCH.format(module=module, action=action))
    return subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env=environment | {"PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("command", [["generate.py"], ["-m", "weights.fetch"]], ids=" ".join)
def test_ctrl_c_while_a_command_is_imported_ends_it_without_a_word(
    command: list[str], tmp_path: Path
) -> None:
    interrupt = "os.kill(os.getpid(), signal.SIGINT)"
    done = stopped_at("torch.nn", interrupt, [*command, "--help"], tmp_path, **os.environ)
    # 130 in a shell
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


@pytest.mark.parametrize("module", ["generate", "train", "search", "benchmark", "training.corpus"])
def test_idle_threads_soon_sleep_in_every_command(module: str, tmp_path: Path) -> None:
    """Read when torch is loaded, so it must be there by then."""
    tell = "os._exit(os.environ.get('GOMP_SPINCOUNT') != '1000')"
    done = stopped_at("torch", tell, ["-m", module], tmp_path, PATH="")
    assert (done.returncode, done.stderr) == (0, "")


# Standard streams


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full: run it on Linux")
@pytest.mark.parametrize("work", ["little", "much", "help"])
def test_a_full_disk_is_one_line(work: str, shell: Shell) -> None:
    line = "error: a file or a stream cannot be read or written: No space left on device\n"
    assert shell("$RUN > /dev/full", work) == Outcome(2, "", line)


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_has_gone_is_met_with_silence_and_status_0(
    unbuffered: str, shell: Shell
) -> None:
    done = shell("$RUN | head -n 1", "much", PYTHONUNBUFFERED=unbuffered)
    assert done == Outcome(0, "line 0\n", "")


def test_progress_and_what_is_written_at_the_end_may_find_no_reader(shell: Shell) -> None:
    done = shell("$RUN 2>&1 | head -n 1; echo ${PIPESTATUS[0]}", "much_noise")
    assert done == Outcome(0, "line 0\n0\n", "")
    assert shell("$RUN | true; echo ${PIPESTATUS[0]}", "little") == Outcome(0, "0\n", "")


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-"])
def test_a_closed_stream_is_wrong_input(closed: str, shell: Shell) -> None:
    line = "error: standard input, output or error is closed: give /dev/null instead\n"
    assert shell(f"$RUN {closed}", "little") == Outcome(2, "", "" if closed == "2>&-" else line)


def test_a_character_that_the_terminal_cannot_show_does_not_end_the_text(shell: Shell) -> None:
    done = shell("$RUN", "foreign", PYTHONIOENCODING="ascii")
    assert done == Outcome(0, "caf? ? ?\n", "caf?\n")


def test_a_mistyped_option_is_one_line_that_names_the_command(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended:
        fetch.main(["--wrong"])
    said = Outcome(ended.value.code, *capsys.readouterr()).complaint
    assert said.endswith("; see python -m weights.fetch --help\n")
