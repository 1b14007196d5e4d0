"""Shared behaviour of command lines in a shell: exit status, one line per failure, closed
streams.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from cli.command_line import run_command
from model import InputError
from weights import fetch

ROOT = Path(__file__).parents[2]
SCRIPT = """
import os, sys, time, types
model = sys.modules["model"] = types.ModuleType("model")  # without torch, which is slow
model.__path__ = [os.environ["PYTHONPATH"] + "/model"]
from cli.command_line import OneLineParser, run_command
from cli.start import start

def little():
    print("a little")

def much():
    for number in range(50_000):
        print("line", number)

def much_noise():
    for number in range(50_000):
        print("line", number, file=sys.stderr)

def sleep():
    print("ready", flush=True)
    time.sleep(60)

def foreign():
    print("caf\\u00e9 \\u65e5 \\udcff")
    print("caf\\u00e9", file=sys.stderr)

def help():
    OneLineParser(prog="script", description="words").parse_args(["--help"])

start()
sys.exit(run_command(globals()[sys.argv[1]], "interrupted: go on with it"))
"""
Shell = Callable[..., subprocess.CompletedProcess]


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    """Runs one function of the script above by a line of shell, in which $RUN stands for it."""
    (tmp_path / "script.py").write_text(SCRIPT)

    def run(line: str, *arguments: str, **more: str) -> subprocess.CompletedProcess:
        command = " ".join(
            f"'{part}'" for part in (sys.executable, tmp_path / "script.py", *arguments)
        )
        environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": ""} | more
        line = line.replace("$RUN", command)
        return subprocess.run(
            ["bash", "-o", "pipefail", "-c", line], env=environment, capture_output=True, timeout=60
        )

    return run


# Failures


def test_a_deleted_working_directory_is_one_line(shell: Shell) -> None:
    done = shell("cd $(mktemp -d); rmdir $PWD; $RUN", "little")
    assert (done.returncode, done.stdout) == (2, b"")
    assert done.stderr == b"error: the working directory was deleted: change to another\n"


def outcome(
    work: Callable[[], int | None], capsys: pytest.CaptureFixture[str], *more: str
) -> tuple[int, str]:
    """Exit status and text on standard error; standard output is empty."""
    status = run_command(work, *more)
    said = capsys.readouterr()
    assert said.out == ""
    return status, said.err


def raising(error: BaseException) -> Callable[[], None]:
    def work() -> None:
        raise error

    return work


def test_the_status_is_that_of_the_work(capsys: pytest.CaptureFixture[str]) -> None:
    assert outcome(lambda: None, capsys) == (0, "")
    assert outcome(lambda: 130, capsys) == (130, "")


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
            "error: standard output cannot be read or written: Input error\n",
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
    assert outcome(raising(error), capsys) == (2, line)


def test_the_hosts_memory_too_may_run_out(capsys: pytest.CaptureFixture[str]) -> None:
    status, said = outcome(lambda: torch.empty(2**50), capsys)
    assert status == 2 and said.startswith("error: out of memory: ") and said.count("\n") == 1


def test_a_mistake_of_ours_keeps_its_traceback() -> None:
    with pytest.raises(RuntimeError, match="shapes"):
        run_command(raising(RuntimeError("shapes differ")))
    with pytest.raises(SystemExit):
        run_command(raising(SystemExit(2)))


def test_ctrl_c_is_130_with_the_line_of_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert outcome(raising(KeyboardInterrupt()), capsys) == (130, "")
    assert outcome(raising(KeyboardInterrupt()), capsys, "go on with it") == (
        130,
        "go on with it\n",
    )
    (tmp_path / "script.py").write_text(SCRIPT)
    with subprocess.Popen(
        [sys.executable, tmp_path / "script.py", "sleep"],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert (process.returncode, said) == (130, "interrupted: go on with it\n")


INTERRUPT = """
import os, signal, sys
class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == os.environ["INTERRUPT_AT"]:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupt())
"""


@pytest.mark.parametrize("command", [["generate.py"], ["-m", "weights.fetch"]], ids=" ".join)
def test_ctrl_c_while_a_command_is_imported_ends_it_without_a_word(
    command: list[str], tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(INTERRUPT)
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "INTERRUPT_AT": "torch.nn"}
    done = subprocess.run(
        [sys.executable, *command, "--help"], cwd=ROOT, env=environment, capture_output=True
    )
    # 130 in a shell
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, b"", b"")


# Standard streams


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full: run it on Linux")
@pytest.mark.parametrize("work", ["little", "much", "help"])
def test_a_full_disk_is_one_line(work: str, shell: Shell) -> None:
    line = b"error: standard output cannot be read or written: No space left on device\n"
    done = shell("$RUN > /dev/full", work)
    assert (done.returncode, done.stderr) == (2, line)


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_has_gone_is_met_with_silence_and_status_0(
    unbuffered: str, shell: Shell
) -> None:
    done = shell("$RUN | head -n 1", "much", PYTHONUNBUFFERED=unbuffered)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"line 0\n", b"")


def test_progress_and_what_is_written_at_the_end_may_find_no_reader(shell: Shell) -> None:
    done = shell("$RUN 2>&1 | head -n 1; echo ${PIPESTATUS[0]}", "much_noise")
    assert (done.stdout, done.stderr) == (b"line 0\n0\n", b"")
    done = shell("$RUN | true; echo ${PIPESTATUS[0]}", "little")
    assert (done.stdout, done.stderr) == (b"0\n", b"")


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-"])
def test_a_closed_stream_is_wrong_input(closed: str, shell: Shell) -> None:
    done = shell(f"$RUN {closed}", "little")
    assert done.returncode == 2 and b"a little" not in done.stdout
    line = b"error: standard input, output or error is closed: give /dev/null instead\n"
    assert done.stderr == (b"" if closed == "2>&-" else line)


def test_a_character_that_the_terminal_cannot_show_does_not_end_the_text(shell: Shell) -> None:
    done = shell("$RUN", "foreign", PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stdout, done.stderr) == (0, b"caf? ? ?\n", b"caf?\n")


def test_a_mistyped_option_is_one_line_that_names_the_command(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended:
        fetch.main(["--wrong"])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and said.endswith("; see python -m weights.fetch --help\n")
    assert said.count("\n") == 1
