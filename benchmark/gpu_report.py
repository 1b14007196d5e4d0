"""Report of a GPU, in one file to read and to send: do the tests pass there, and how fast is it?

``make gpu`` takes up to ten minutes. Each part is a command of its own, so that one that fails or
takes too long does not stop the others.
"""

if __name__ == "__main__":  # before anything that takes long to import
    from app.start import start

    start()

import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryFile

import torch

from app.command_line import say
from app.device import machine
from app.files import write_text
from app.parsers import MODEL, Groups, run_script

OPTIONS: Groups = {
    "": {
        "--model": MODEL,
        "--out": {
            "type": Path,
            "default": Path("gpu-report.md"),
            "metavar": "FILE",
            "help": "the report",
        },
    },
}


def parts(model: str) -> list[tuple[str, list[str], int]]:
    """Title, command and most seconds of each part."""
    python = [sys.executable, "-m"]
    bench = [*python, "benchmark", "--model", model, "--quick", "--only"]
    against = ["--against", "transformers"] if find_spec("transformers") else []
    generate = [sys.executable, "generate.py", "Why is the sky blue?", "--compare"]
    return [
        ("Driver", ["nvidia-smi"], 20),
        ("Versions", [*python, "torch.utils.collect_env"], 40),
        ("First text", [*generate, "--model", model], 90),
        ("Tests", [*python, "pytest", "-rfE", "--durations=5", "tests/model/test_cuda.py"], 200),
        ("Speed, greedy", [*bench, "speed", "first-token", "floor", *against], 150),
        ("Speed at temperature 0.7", [*bench, "speed", "--temperature", "0.7"], 100),
    ]


def section(title: str, command: list[str], seconds: int) -> tuple[bool, str]:
    """Whether a part worked, and its Markdown: how its command ended, and its output, also where it
    failed.
    """
    limited = ["timeout", "--foreground", "--kill-after=5", str(seconds), *command]
    with TemporaryFile() as output:  # a pipe would stay open while a command's own children run
        status = subprocess.run(limited, stdout=output, stderr=output, check=False).returncode
        output.seek(0)
        shown = output.read().decode(errors="replace").strip()
    ends = {124: f"was stopped after {seconds} seconds", 127: "could not start"}
    end = ends.get(status, f"ended with status {status}")
    found = f"## {title}\n\n`{shlex.join(command)}` {end}.\n\n```text\n{shown}\n```\n"
    return status == 0, found


def report(model: str, out: Path) -> None:
    """Write the report. Without a GPU, print the commands that would run."""
    if not torch.cuda.is_available():
        print(f"There is no GPU that torch {torch.__version__} can use. On one this would run:")
        for title, command, seconds in parts(model):
            print(f"  {title}, up to {seconds} seconds: {shlex.join(command)}")
        return
    ended: dict[bool, list[str]] = {True: [], False: []}
    sections = []
    for title, command, seconds in parts(model):
        say(f"{title}: up to {seconds} seconds")
        worked, found = section(title, command, seconds)
        ended[worked].append(title)
        sections.append(found)
        top = (
            f"# Report of a GPU\n\n* device: {machine(torch.device('cuda'))}\n"
            f"* worked: {', '.join(ended[True]) or 'nothing'}\n"
            f"* failed: {', '.join(ended[False]) or 'nothing'}\n"
        )
        write_text(out, "\n".join([top, *sections]))  # so that a report that is cut off is there


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns its exit status, 0 also without a GPU."""
    return run_script(
        lambda options: report(**vars(options)),
        OPTIONS,
        "python -m benchmark.gpu_report",
        __doc__,
        arguments,
    )


if __name__ == "__main__":
    sys.exit(main())
