"""Run every command of the README and of docs/, in order, with short settings: ``python -m
tests.readme``, or of some of them: ``python -m tests.readme judge.md``.

Each document becomes one shell script in a copy of the checkout, so no document may need what
another one's commands leave behind, and nothing here is changed. One document runs at a time: two
steps on the same cores would wait for each other's threads. Any exit status but 0 is a failure.
"""

import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

SKIPPED = (  # beginnings of commands that are not run
    "make test",  # it is what runs before this
    "python -m tests.mutants",  # make test runs every mutant
    "torchrun",  # make test starts such processes itself
    "python -m benchmark --off-grid",  # making the copy takes minutes
)
SAMPLE = "training/sample/stories.jsonl"
FEW_TRIALS = "--trials 3 --max-new-tokens 12 --calibration ~/prompts.txt"
FEW_TEXTS = "--model tiny-llama --quick --max-new-tokens 8"
# What comes after a command to make it short, by the first beginning that fits; argparse takes the
# last value that is given.
SHORT = {
    "python -m search --context": f"{FEW_TRIALS} --context 100",
    "python -m search": FEW_TRIALS,
    "python -m benchmark --shape": "",  # it reads no model
    "python -m benchmark --context": f"{FEW_TEXTS} --context 100 200",
    "python -m benchmark ": FEW_TEXTS,
    "python -m training.corpus": f"--model tiny-llama --tokens 40 && cat {SAMPLE} >> corpus.jsonl",
    "python train.py --data corpus.jsonl --start-from": "--steps 2 --batch 2 --context 64",
    "python train.py": "--steps 2 --batch 2 --context 64 --vocab-size 400",
    "make serve": "ADDRESS=8000",
}
MODEL = "weights/smollm2-135m-instruct"
READY = (".venv/ready", ".venv/ready-dev", ".venv/ready-serve", f"{MODEL}/model.safetensors")
MAKE = " ".join(["make", *(f"-o {target}" for target in READY)])  # installs and fetches nothing
INSTALLED = (  # into an environment that has the packages of this one, but not the checkout
    'python -m venv --without-pip ~/own && echo "{packages}" >'
    " ~/own/lib/python{version}/site-packages/packages.pth && ~/own/bin/python -m pip install"
    " --quiet --disable-pip-version-check --no-deps . && (cd ~ && own/bin/python -c 'import"
    " specdec; specdec.load')"
)
# The shell keeps what a command exports; told STATUS COMMAND prints its line.
PROLOGUE = r"""
set -a
told() {
    [ $1 = 0 ] && echo "ok: $2" && return
    failed=$((failed + 1))
    echo "FAILED with status $1: $2"
    cat ~/said
}
stop() { [ -z "$server" ] || { kill -- -$server; wait $server; }; } 2>/dev/null
serve() {
    stop
    setsid bash -c "exec $1" &
    server=$!
    until (exec 3<>/dev/tcp/127.0.0.1/PORT) 2>/dev/null; do
        kill -0 $server || return 1
        sleep .2
    done
}
trap stop EXIT
"""
LIMIT = 1800  # seconds that a document may take


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


def runnable(kind: str, content: str) -> str:
    """The step in shell, with short settings."""
    if kind != "sh":
        reader = "python -" if kind == "python" else f"cat > {kind}"
        return f"{reader} <<'THE END'\n{content}THE END"
    if content == "pip install .":  # not into the environment of the tests
        return INSTALLED.format(
            packages=sysconfig.get_path("purelib"), version=sysconfig.get_python_version()
        )
    command = content.replace("python generate.py", "python generate.py --max-new-tokens 8")
    fitting = (options for beginning, options in SHORT.items() if command.startswith(beginning))
    command += f" {next(fitting, '')}"
    command = re.sub("^make ", f"{MAKE} ", command)
    is_server = content.startswith("make serve") or " --serve " in content
    return f"serve {shlex.quote(command)}" if is_server else command


def script(document: str) -> str:
    """The shell script of a document, whose exit status is the number of failed commands."""
    lines = [PROLOGUE]
    for kind, content in steps(document):
        shown = content if kind == "sh" else f"{kind}: {content.splitlines()[0]} ..."
        if content.startswith(SKIPPED):
            lines.append(f"echo skipped: {shlex.quote(shown)}")
            continue
        step = f"{{\n{runnable(kind, content)}\n}} >~/said 2>&1 </dev/null"
        lines.append(f"{step}\ntold $? {shlex.quote(shown)}")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    return "\n".join([*lines, "exit $failed"]).replace("8000", port).replace("PORT", port)


def failures(document: str, *, inside: bool = True) -> int:
    """Run a document's commands as a reader would, before the environment is entered or ``inside``
    it; returns how many failed.
    """
    ours = Path(sys.prefix, "bin")
    path = [each for each in os.environ["PATH"].split(os.pathsep) if Path(each) != ours]
    caches = shutil.ignore_patterns(
        ".git", ".venv", "__pycache__", ".*_cache", ".hypothesis", "smollm2-*"
    )
    with tempfile.TemporaryDirectory(prefix="readme-") as folder:
        checkout, home = Path(folder, "checkout"), Path(folder, "home")
        shutil.copytree(ROOT, checkout, ignore=caches)
        (checkout / ".venv").symlink_to(sys.prefix)
        shutil.copytree(ROOT / MODEL, checkout / MODEL, copy_function=os.symlink)
        home.mkdir()
        (home / "prompts.txt").write_text("A fox\nA cat\nA hen\nA dog\n", encoding="utf-8")
        environment = os.environ | {
            "PATH": os.pathsep.join([str(ours)] * inside + path),
            "HOME": str(home),
            "OMP_NUM_THREADS": "1",
        }
        return subprocess.run(
            ["env", "-u", "VIRTUAL_ENV", "-u", "PYTHONPATH", "bash", "-c", script(document)],
            cwd=checkout,
            env=environment,
            timeout=LIMIT,
        ).returncode


def main(names: list[str]) -> int:
    failed = 0
    for document in DOCUMENTS:
        if not names or document.name in names:
            print(f"{document.name}:", flush=True)
            text = document.read_text(encoding="utf-8")
            failed += failures(text, inside=document.name != "README.md")
    print(f"{failed} commands failed" if failed else "every command works as printed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
