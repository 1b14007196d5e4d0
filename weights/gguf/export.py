"""A loaded Llama -> a GGUF file that llama.cpp runs: the weights and sizes alone, without a vocabulary.

The inverse of what ``weights.gguf.llama`` reads: llama.cpp's tensor names, and the rows of q and k
interleaved. Token ids go in and come out; llama.cpp is told how many there are, not what they spell.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from gguf import GGMLQuantizationType, GGUFWriter
from torch import Tensor

from model import Decoder, InputError
from model.config import Rope
from model.layers import inverse_frequencies
from weights.files import atomic_path, one_line
from weights.gguf.llama import BLOCK_NAMES, OUTER_NAMES
from weights.load import load_model

if TYPE_CHECKING:
    import llama_cpp

STORED_AS = {
    torch.float32: GGMLQuantizationType.F32,
    torch.float16: GGMLQuantizationType.F16,
    torch.bfloat16: GGMLQuantizationType.BF16,
}


def write_gguf(model: Decoder, path: Path) -> None:
    """Write the model's weights in its own dtype (norms in float32, which llama.cpp asks for), atomically.

    Raises InputError for a model that llama.cpp's "llama" architecture does not compute as we do.
    """
    config = model.config
    if config.family != "llama" or config.attention_bias or config.mlp_bias or model.dtype not in STORED_AS:
        raise InputError("llama.cpp is handed only Llama models without biases, in float32, float16 or bfloat16")
    with atomic_path(path) as temporary:
        writer = GGUFWriter(temporary, "llama")
        writer.add_vocab_size(config.vocab_size)
        writer.add_context_length(config.max_positions)
        writer.add_embedding_length(config.hidden_size)
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_block_count(config.num_layers)
        writer.add_head_count(config.num_heads)
        writer.add_head_count_kv(config.num_kv_heads)
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
        writer.add_rope_dimension_count(config.head_dim)
        writer.add_rope_freq_base(config.rope.theta)
        writer.add_layer_norm_rms_eps(config.norm_eps)
        writer.add_tokenizer_model("none")
        heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}
        for name, tensor in model.state_dict().items():
            part = name.removesuffix(".weight").rpartition(".")[2]
            _add(writer, llama_cpp_name(name), interleave(tensor, heads[part]) if part in heads else tensor)
        if config.rope.kind != "default":
            _add(writer, "rope_freqs.weight", _frequency_divisors(model))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


def interleave(rows: Tensor, heads: int) -> Tensor:
    """``[heads · head_dim, columns]`` in Hugging Face's row order -> llama.cpp's.

    Within each head, rows i and i + head_dim / 2 turn together; in the file they lie side by side.
    """
    return rows.view(heads, 2, -1, rows.shape[1]).transpose(1, 2).reshape(rows.shape)


def llama_cpp_name(name: str) -> str:
    """A parameter's name in ``model.Llama`` -> llama.cpp's name of the tensor."""
    outer = {theirs.removeprefix("model."): ours for ours, theirs in OUTER_NAMES.items()}
    block = {theirs: ours for ours, theirs in BLOCK_NAMES.items()}
    short = name.removesuffix(".weight")
    if short in outer:
        return f"{outer[short]}.weight"
    _, layer, part = short.split(".", 2)
    return f"blk.{layer}.{block[part]}.weight"


def _frequency_divisors(model: Decoder) -> Tensor:
    """What llama.cpp divides the plain rotary frequencies by, ``[head_dim / 2]`` float32."""
    config, cpu = model.config, torch.device("cpu")
    stretched = inverse_frequencies(config.rope, config.head_dim, torch.float32, cpu)
    return inverse_frequencies(Rope(config.rope.theta), config.head_dim, torch.float32, cpu) / stretched


def _add(writer: GGUFWriter, name: str, tensor: Tensor) -> None:
    """One tensor, as raw bytes; a vector in float32."""
    tensor = (tensor.float() if tensor.dim() == 1 else tensor).contiguous().cpu()
    writer.add_tensor(name, tensor.view(torch.uint8).numpy(), raw_dtype=STORED_AS[tensor.dtype])


def open_in_llama_cpp(folder: Path, dtype: torch.dtype, device: torch.device, context: int) -> llama_cpp.Llama:
    """The model of a folder in llama.cpp, in ``dtype``, for ``context`` tokens and with as many threads as torch has.

    Needs llama-cpp-python. Raises InputError for a model or device that it cannot run.
    """
    import llama_cpp

    if device.type != "cpu" and not llama_cpp.llama_supports_gpu_offload():
        raise InputError(f"this llama-cpp-python was built without support for {device.type}")
    threads = torch.get_num_threads()
    with tempfile.TemporaryDirectory() as temporary:
        file = Path(temporary) / "model.gguf"
        write_gguf(load_model(folder, dtype), file)
        try:
            return llama_cpp.Llama(
                str(file),
                n_ctx=context,
                n_threads=threads,
                n_threads_batch=threads,
                n_gpu_layers=0 if device.type == "cpu" else -1,
                use_mmap=False,  # the file is deleted once it is read
                verbose=False,
            )
        except ValueError as error:
            raise InputError(f"llama.cpp does not take the model: {one_line(error)}") from None
