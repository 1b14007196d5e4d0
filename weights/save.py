"""Saving of a model as a Hugging Face folder: ``config.json`` and ``model.safetensors``.

Knows nothing of training.
"""

import shutil
from itertools import chain
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file

from app.common.files import atomic_path, read_optional_json, write_json
from model.decoder import Decoder
from model.errors import explaining

TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
REPLACED = (*TOKEN_IDS, "dtype")  # fields of a model's config.json that are not copied as they are
# glob patterns of a folder's tokenizer files
TOKENIZER_FILES = ("tokenizer*", "*_tokens*.json", "chat_template.jinja", "generation_config.json")


def save_model(model: Decoder, folder: Path, *, tokenizer_from: Path | None = None) -> None:
    """Write a folder that ``load_model`` and transformers can load, in the model's dtype.

    ``tokenizer_from`` is a model folder whose tokenizer, chat template and special token ids are
    copied too. Raises InputError when the folder cannot be written.
    """
    state = {
        name if name.startswith("lm_head.") else f"model.{name}": parameter.detach().contiguous()
        for name, parameter in model.named_parameters()
    }
    source = read_optional_json(tokenizer_from / "config.json") if tokenizer_from else {}
    config = {
        **{key: value for key, value in model.config.source.items() if key not in REPLACED},
        **{key: source[key] for key in TOKEN_IDS if key in source},
        "vocab_size": model.vocab_size,
        "tie_word_embeddings": model.config.tie_embeddings,
        "torch_dtype": str(model.dtype).removeprefix("torch."),
    }
    with explaining(f"{folder} cannot be written", (OSError, SafetensorError)):
        with atomic_path(folder / "model.safetensors") as temporary:
            save_file(state, temporary, metadata={"format": "pt"})
            write_json(folder / "config.json", config)
        if tokenizer_from is not None and tokenizer_from.resolve() != folder.resolve():
            for path in chain.from_iterable(map(tokenizer_from.glob, TOKENIZER_FILES)):
                with atomic_path(folder / path.name) as temporary:
                    shutil.copyfile(path, temporary)
