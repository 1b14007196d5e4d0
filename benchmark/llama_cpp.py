"""llama.cpp on random weights: the same shape as a GGUF file, and the costs of its steps."""

import statistics
import tempfile
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch
from gguf import MODEL_ARCH, GGMLQuantizationType, GGUFWriter, get_tensor_name_map

from app.table import Row
from benchmark.contenders import load_llama_cpp
from benchmark.timing import POSITION, timed
from model import Decoder, InputError, ModelConfig

STEPS = 9  # that are timed, one after another


def check_llama_cpp(config: ModelConfig, dtype: torch.dtype) -> None:
    """Raises InputError for a shape that is no Llama in bf16, or without llama-cpp-python."""
    is_llama = config.source["model_type"] == "llama" and dtype == torch.bfloat16
    if not is_llama or find_spec("llama_cpp") is None:
        raise InputError(
            "--against llama.cpp takes shapes of Llama in bf16, and needs pip install"
            " llama-cpp-python"
        )


def write_gguf(model: Decoder, path: Path) -> None:
    """Write a Llama in bf16 as a GGUF file without a vocabulary. The rows of q and k stay in their
    order, which is another one there: no text can be read from it.
    """
    config = model.config
    writer = GGUFWriter(path, "llama")
    sizes = {
        "vocab_size": config.vocab_size,
        "context_length": config.max_positions,
        "embedding_length": config.hidden_size,
        "block_count": config.num_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "rope.dimension_count": config.head_dim,
    }
    for name, size in sizes.items():
        writer.add_uint32(f"llama.{name}", size)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("no_vocab")
    names = get_tensor_name_map(MODEL_ARCH.LLAMA, config.num_layers)
    for name, tensor in model.named_parameters():
        theirs = names.get_name(f"model.{name}", (".weight",)) or names.get_name(name, (".weight",))
        if tensor.dim() == 1:
            writer.add_tensor(theirs, tensor.float().numpy())
        else:
            data = tensor.contiguous().view(torch.uint8).numpy()
            writer.add_tensor(theirs, data, raw_dtype=GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def llama_cpp_costs(model: Decoder, prompt: int) -> Row:
    """llama.cpp's time of a step, and until the first token after a prompt."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "shape.gguf")
        write_gguf(model, path)
        theirs = load_llama_cpp(str(path), prompt + STEPS, model.device)
        theirs.eval([0] * POSITION)
        step = partial(theirs.eval, [0])
        seconds = [timed(step, model.device)[1] for _ in range(STEPS)]
        theirs.reset()
        _, first = timed(partial(theirs.eval, [0] * prompt), model.device)
    return {
        "llama.cpp, step, ms": 1e3 * statistics.median(seconds),
        f"llama.cpp, first token after {prompt}, s": first,
    }
