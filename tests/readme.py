"""Run every command of the README and of docs/, in order, with short settings: ``python -m
tests.readme``.

Each document gets a copy of the checkout, so no document may need what another one's commands leave
behind, and nothing here is changed. One document runs at a time: two steps on the same cores would
wait for each other's threads. Any exit status but 0 is a failure.
"""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

SKIPPED = {  # beginnings of commands that are not run, and why
    "make test": "it is what runs before this",
    "python -m tests.mutants": "make test runs every mutant",
    "torchrun": "make test starts such processes itself",
    "python -m benchmark --off-grid": "making the copy takes minutes",
}
SAMPLE = "training/sample/stories.jsonl"
# What comes after a command to make it short; argparse takes the last value that is given.
SHORT = {
    "python -m search": "--trials 3 --max-new-tokens 12 --calibration ~/prompts.txt",
    "python -m benchmark ": "--model tiny-llama --quick --max-new-tokens 8",
    "python -m training.corpus": f"--model tiny-llama --tokens 40 && cat {SAMPLE} >> corpus.jsonl",
    "python train.py": "--steps 2 --batch 2 --context 64 --vocab-size 400",
}
READY = [
    ".venv/ready",
    ".venv/ready-dev",
    ".venv/ready-serve",
    "weights/smollm2-135m-instruct/model.safetensors",
]
EDITABLE = (  # into an environment that has the packages of this one, but not the checkout
    'python -m venv --without-pip ~/own && echo "{packages}" >'
    " ~/own/lib/python{version}/site-packages/packages.pth && ~/own/bin/python -m pip install"
    " --quiet --disable-pip-version-check --no-deps -e ."
)
LIMIT = 300  # seconds that a command may take


def steps(document: str) -> Iterator[tuple[str, str]]:
    """Each command of the ``sh`` blocks, each ``python`` block, and each block that is to be saved
    as a file.
    """
    for block in re.finditer(r"^```(sh|python)\n(.*?)^```", document, re.MULTILINE | re.DOTALL):
        kind, content = block[1], block[2]
        if kind == "sh":
            yield from (("sh", command) for command in commands(content))
        elif saved := re.search(
            r"Save this as `([\w.]+)`[^`]*(`[^`]+`[^`]*)?$", document[: block.start()]
        ):
            yield saved[1], content
        else:
            yield kind, content


def commands(block: str) -> Iterator[str]:
    """The commands of a block, without comments: lines that end in a backslash and loops are one
    command.
    """
    command = ""
    for line in block.splitlines():
        command += re.sub(r"(^|\s+)#.*", "", line) + "\n"
        open_loop = command.lstrip().startswith("for ") and line != "done"
        if command.strip() and not line.endswith("\\") and not open_loop:
            yield command.strip()
            command = ""


def shortened(command: str) -> str:
    """The same command with short settings."""
    command = command.replace("python generate.py", "python generate.py --max-new-tokens 8")
    for beginning, options in SHORT.items():
        if command.startswith(beginning):
            command += f" {options}"
    return re.sub(r"^make ", "".join(["make ", *(f"-o {path} " for path in READY)]), command)


@dataclass
class Session:
    """A shell in a copy of the checkout, as a reader has it: before the environment is entered, or
    ``inside`` it. What a command exports, the next one finds.
    """

    folder: Path
    inside: bool = True
    python: str = sys.executable
    server: subprocess.Popen[bytes] | None = None
    said: str = ""  # by the last command

    def __post_init__(self) -> None:
        caches = shutil.ignore_patterns(
            ".git", ".venv", "__pycache__", ".*_cache", ".hypothesis", "smollm2-*"
        )
        self.checkout, self.home = self.folder / "checkout", self.folder / "home"
        shutil.copytree(ROOT, self.checkout, ignore=caches)
        (self.checkout / ".venv").symlink_to(sys.prefix)
        model = "weights/smollm2-135m-instruct"
        shutil.copytree(ROOT / model, self.checkout / model, copy_function=os.symlink)
        self.home.mkdir()
        (self.home / "prompts.txt").write_text("A fox\nA cat\nA hen\nA dog\n", encoding="utf-8")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = str(free.getsockname()[1])

    @cached_property
    def environment(self) -> dict[str, str]:
        """The variables of the shell: before ``inside``, nothing leads to the environment that has
        torch.
        """
        ours = Path(sys.prefix, "bin").resolve()
        path = [
            each for each in os.environ["PATH"].split(os.pathsep) if Path(each).resolve() != ours
        ]
        unset = ("VIRTUAL_ENV", "PYTHONPATH")
        return {
            **{name: value for name, value in os.environ.items() if name not in unset},
            "PATH": os.pathsep.join([f"{sys.prefix}/bin"] * self.inside + path),
            "HOME": str(self.home),
            "OMP_NUM_THREADS": "1",
        }

    def do(self, kind: str, content: str) -> int:
        """Run a command or a ``python`` block, or save a file; returns the exit status."""
        content = content.replace("8000", self.port)
        if kind not in ("sh", "python"):
            (self.checkout / kind).write_text(content, encoding="utf-8")
            return 0
        if kind == "python":
            return self.run(
                [self.python, "-c", content],
                self.checkout if self.python == sys.executable else self.home,
            )
        if content.startswith("make serve") or " --serve " in content:
            return self.serve(content)
        command = shortened(content)
        if content == "pip install -e .":
            # Into another environment, so that the one of the tests stays as it is.
            command = EDITABLE.format(
                packages=sysconfig.get_path("purelib"), version=sysconfig.get_python_version()
            )
            self.python = str(self.home / "own/bin/python")
        kept = self.home / "environment"
        status = self.run(["bash", "-aec", f"{command}\nenv -0 >{kept}"], self.checkout)
        if not status:
            each_variable = kept.read_text().split("\0")[:-1]
            self.environment = dict(each.split("=", 1) for each in each_variable)
        return status

    def run(self, command: list[str], folder: Path) -> int:
        """The exit status of a command in ``folder``; 124 if it does not end in time."""
        try:
            done = subprocess.run(
                command,
                cwd=folder,
                env=self.environment,
                capture_output=True,
                stdin=subprocess.DEVNULL,
                timeout=LIMIT,
            )
        except subprocess.TimeoutExpired:
            self.said = f"no end within {LIMIT} s"
            return 124
        self.said = (done.stdout + done.stderr).decode(errors="replace")
        return done.returncode

    def serve(self, command: str) -> int:
        """Start a server in place of the one that runs; 0 once it answers."""
        self.stop()
        command = shortened(command) + (
            f" ADDRESS={self.port}" if command.startswith("make") else ""
        )
        self.server = subprocess.Popen(
            ["bash", "-c", f"exec {command}"],
            cwd=self.checkout,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        end = time.monotonic() + LIMIT
        while time.monotonic() < end and self.server.poll() is None:
            with socket.socket() as client:
                if client.connect_ex(("127.0.0.1", int(self.port))) == 0:
                    return 0
            time.sleep(0.2)
        status = self.server.poll() or 124
        self.stop()
        return status

    def stop(self) -> None:
        """End the server, if one runs: not by Ctrl-C, which a background job may ignore."""
        if self.server is not None:
            if self.server.poll() is None:
                os.killpg(self.server.pid, signal.SIGTERM)
            self.said = self.server.communicate(timeout=LIMIT)[0].decode(errors="replace")
            self.server = None


def failures(name: str, document: str, *, inside: bool = True) -> int:
    """Run a document's commands, each with a line of its own; returns how many failed."""
    failed = 0
    with tempfile.TemporaryDirectory(prefix="readme-") as folder:
        session = Session(Path(folder), inside)
        try:
            for kind, content in steps(document):
                shown = content if kind == "sh" else f"{kind}: {content.splitlines()[0]} ..."
                skipped = [why for begin, why in SKIPPED.items() if content.startswith(begin)]
                began = time.monotonic()
                status = 0 if skipped else session.do(kind, content)
                ended = f"{'FAILED' if status else 'ok'} {time.monotonic() - began:.1f} s"
                verdict = f"skipped ({skipped[0]})" if skipped else ended
                print(f"{name}: {verdict}: {shown}".replace("\n", " "), flush=True)
                if status:
                    failed += 1
                    print(f"exit status {status}\n{session.said}", flush=True)
        finally:
            session.stop()
    return failed


def main() -> int:
    texts = {document.name: document.read_text(encoding="utf-8") for document in DOCUMENTS}
    failed = sum(failures(name, text, inside=name != "README.md") for name, text in texts.items())
    print(f"{failed} commands failed" if failed else "every command works as printed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
