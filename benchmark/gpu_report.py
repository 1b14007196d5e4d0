"""Report of a GPU, in one file to read and to send: do the tests pass there, and how fast is it?

``make gpu`` takes up to fifteen minutes. Each part is a command of its own, so that one that fails
does not stop the others. One that takes too long is interrupted, as by Ctrl-C, and shows what it
has found so far. What tells most comes first.
"""

if __name__ == "__main__":  # before anything that takes long to import
    from app.common.command_line import start

    start()

import argparse
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryFile

import torch

from app.common.device import pick_device
from app.common.files import write_text
from app.common.parsers import MODEL, Groups, script

OPTIONS: Groups = {
    "": {
        "--model": MODEL,
        "--out": {
            "type": Path,
            "default": Path("gpu-report.md"),
            "metavar": "FILE",
            "help": "the report",
        },
    }
}
# By the exit status; 137 is that of a command that does not end when it is interrupted.
ENDS = {0: "worked", 124: "took too long", 127: "could not start", 137: "took too long"}


def parts(model: str) -> list[tuple[str, list[str], int]]:
    """Return the title, the command and the most seconds of each part."""
    python = [sys.executable, "-m"]
    bench = [*python, "benchmark", "--model", model, "--quick", "--only"]
    tests = [*python, "pytest", "-rfE", "--durations=5", "tests/model/test_cuda.py"]
    rounds = [*python, "benchmark", "--rounds"]
    return [
        ("Driver", ["nvidia-smi"], 20),
        ("Versions", [*python, "torch.utils.collect_env"], 40),
        (
            "First text",
            [sys.executable, "generate.py", "Why is the sky blue?", "--compare", "--model", model],
            90,
        ),
        ("Tests, one of each kind", tests, 180),
        ("Rounds of Llama 3.2 1B", [*rounds, "llama-3.2-1b"], 100),
        ("Rounds of Llama 3.1 8B", [*rounds, "llama-3.1-8b"], 120),
        (
            "Speed, greedy",
            [*bench, "costs", "speed", "first-token"]
            + (["--against", "transformers"] if find_spec("transformers") else []),
            120,
        ),
        ("Speed at temperature 0.7", [*bench, "speed", "--temperature", "0.7"], 80),
        ("Tests, all others", [*tests, "-m", "prove"], 150),
    ]


def report(options: argparse.Namespace) -> None:
    """Write the report after each part, so that one that is cut off is there. Without a GPU, print
    the commands that would run.
    """
    has_gpu = pick_device(None).type == "cuda"
    if not has_gpu:
        print(f"There is no GPU that torch {torch.__version__} can use. On one this would run:")
    written = "# Report of a GPU\n"
    for title, command, seconds in parts(options.model):
        print(f"{title}, up to {seconds} seconds: {shlex.join(command)}", flush=True)
        if has_gpu:
            written += section(title, command, seconds)
            write_text(options.out, written)


def section(title: str, command: list[str], seconds: int) -> str:
    """Return the Markdown of a part: how its command ended, and its output."""
    limited = ["timeout", "--foreground", "--signal=INT", "--kill-after=10", str(seconds), *command]
    with TemporaryFile() as output:  # a pipe would stay open while a command's own children run
        status = subprocess.run(limited, stdout=output, stderr=output, check=False).returncode
        output.seek(0)
        shown = output.read().decode(errors="replace").strip()
    end = ENDS.get(status, f"failed with status {status}")
    return f"\n## {title}: {end}\n\n`{shlex.join(command)}`\n\n```text\n{shown}\n```\n"


main = script(report, OPTIONS, "python -m benchmark.gpu_report", __doc__)


if __name__ == "__main__":
    sys.exit(main())
