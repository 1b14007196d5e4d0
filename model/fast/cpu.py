"""Decoder on a CPU: short steps are ``step.c``, prompts are read by torch on the same weights.

Here the C files are compiled, once for a machine, and given the weights of a plan by address. Knows
nothing of samples, drafts and files of weights.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import torch
from torch import Tensor, nn

from model.cache import KVCache
from model.decoder import Abilities, Decoder
from model.errors import InputError
from model.fast import PreparedDecoder
from model.layers import RMSNorm, attend_causally, rotary_table
from model.places import cache_folder
from model.plan import FULL, LOW_BITS, LayerPlan
from model.quantise import GROUP, shares_of

STEP = Path(__file__).with_name("step.c")
SOURCES = [STEP, *(STEP.with_name(name) for name in ("threads.h", "products.h", "round.c"))]
FLAGS = ["-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]
FLAGS += ["-fno-strict-aliasing", "-shared", "-fPIC", "-pthread"]
KINDS = {torch.bfloat16: 16, torch.float32: 32}  # of numbers, as in step.c
LANES = 16  # rows of weights in a block of few bits
MOST_ROWS = 64  # of a step
UNLIMITED = 1 << 60  # positions
FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
one_at_a_time = threading.Lock()  # step.c has one pool of threads, and one memory of a step


def structure(name: str, **fields: type) -> type[ctypes.Structure]:
    """Return a structure of ``step.c`` with these fields."""
    return type(name, (ctypes.Structure,), {"_fields_": list(fields.items())})


P, L, F = ctypes.c_void_p, ctypes.c_long, ctypes.c_float
Matrix = structure("Matrix", weights=P, bias=P, kind=L, rows=L, columns=L)
Layer = structure(
    "Layer",
    **{"qkv": Matrix * 3, "o": Matrix, "gate_up": Matrix * 2, "down": Matrix},
    **dict.fromkeys(["attention_norm", "attention_post_norm", "mlp_norm", "mlp_post_norm"], P),
    **dict.fromkeys(["q_norm", "k_norm", "cos", "sin"], P),
    window=L,
)
Model = structure(
    "Model",
    **{"layers": P, "embedding": P, "norm": P, "head": Matrix},
    **dict.fromkeys(["num_layers", "kind", "hidden", "heads", "key_heads", "size"], L),
    **dict.fromkeys(["embedding_scale", "eps", "scale", "soft_cap", "final_soft_cap"], F),
    is_gelu=ctypes.c_int32,
)
Text = structure("Text", tokens=P, entries=P, rows=L, start=L, head_bytes=L)


def compiler() -> list[str]:
    """Return the command of a C compiler: the system's, or that of the package ``ziglang``. Raises
    InputError where there is none.
    """
    if shutil.which("cc"):
        return ["cc"]
    if find_spec("ziglang"):
        return [sys.executable, "-m", "ziglang", "cc"]
    raise InputError("there is no C compiler: install one as cc, or run pip install ziglang")


def processor() -> bytes:
    """Return what tells this machine's kind of processor from others."""
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_bytes().splitlines()
        names = b"model name", b"flags", b"CPU part", b"Features"
        return b"".join(sorted({line for line in lines if line.startswith(names)}))
    return f"{platform.machine()} {platform.processor()}".encode()


def target() -> list[str]:
    """Return the flags that name the processor; SPECDEC_MARCH names another, and its flags."""
    forced = os.environ.get("SPECDEC_MARCH")
    option = "-mcpu" if platform.machine() in ("aarch64", "arm64") else "-march"
    return f"{option}={forced or 'native'}".split()


@cache
def library() -> ctypes.CDLL:
    """Return the compiled step. Raises InputError where it cannot be compiled."""
    flags = FLAGS + target()
    parts = [path.read_bytes() for path in SOURCES] + [" ".join(flags).encode(), processor()]
    kept = cache_folder() / "step" / f"{hashlib.sha256(b'|'.join(parts)).hexdigest()[:24]}.so"
    with suppress(OSError):
        return ctypes.CDLL(str(kept))
    print("compiling the decoding step for this machine, once", file=sys.stderr)
    with TemporaryDirectory() as folder:
        made = Path(folder) / kept.name
        command = [*compiler(), *flags, str(STEP), "-o", str(made)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            error = next((line for line in done.stderr.splitlines() if "error" in line), "")
            raise InputError(f"{command[0]} cannot compile step.c: {error or done.returncode}")
        with suppress(OSError):  # a full disk, or a folder that cannot be written
            kept.parent.mkdir(parents=True, exist_ok=True)
            whole = shutil.copy(made, f"{kept}.{os.getpid()}")
            os.replace(whole, kept)
        return ctypes.CDLL(str(made))


class Prepared(NamedTuple):
    """Weights of a model under a plan as the step reads them, with the owners of that memory."""

    model: ctypes.Structure
    positions: int  # of the rotary angles
    owners: list[object]


class FastDecoder(PreparedDecoder):
    """``Decoder`` on a CPU in bfloat16 or float32, with compiled steps.

    The bits of a position's logits and cache entries do not depend on the other rows of the step,
    of this text or of others. (``prefill``, in long chunks, does not promise this.)
    """

    abilities = Abilities(LOW_BITS, shares_steps=True, why_rows_vary=None)

    def __init__(self, model: Decoder) -> None:
        super().__init__(model)
        self.library = library()
        model.attend = attend_by_flash
        self.full = LayerPlan.full(self.num_layers)
        self.plans: dict[LayerPlan, Prepared] = {}
        self.copies: dict[tuple[nn.Module, int], Tensor] = {}  # in few bits

    def prepare(self, plan: LayerPlan) -> None:
        """Make the low-bit copies of a plan now."""
        if plan not in self.plans:
            self.plans[plan] = self._prepared(plan, 1)

    def __call__(
        self,
        tokens: Tensor,
        cache: KVCache | None = None,
        start: int = 0,
        plan: LayerPlan | None = None,
    ) -> Tensor:
        """Logits ``[batch, T, vocab]`` float32 after tokens ``[batch, T]`` from ``start`` on."""
        if cache is None:
            return self.model(tokens, cache, start, plan)
        return self.together([(tokens, cache, start)], plan)[0]

    def together(
        self, calls: Sequence[tuple[Tensor, KVCache, int]], plan: LayerPlan | None = None
    ) -> list[Tensor]:
        """Logits of calls ``(tokens, cache, start)`` under one plan, in as few steps as possible.

        Each call has its own cache. The logits of a call have the same bits as alone.
        """
        plan = plan or self.full
        for tokens, cache, start in calls:
            cache.claim(plan.attention_layers, start, tokens.shape[1])
        positions = max(cache.capacity for _, cache, _ in calls)
        prepared = self.plans.get(plan)
        if prepared is None or prepared.positions < positions:
            prepared = self.plans[plan] = self._prepared(plan, positions)
        calls = [(tokens.contiguous(), cache, start) for tokens, cache, start in calls]
        logits = torch.empty(sum(tokens.numel() for tokens, _, _ in calls), self.vocab_size)
        done = 0
        for texts in steps_of([text for call in calls for text in texts_of(*call)]):
            arguments = ctypes.byref(prepared.model), (Text * len(texts))(*texts), len(texts)
            with one_at_a_time:
                self.library.use_threads(torch.get_num_threads())
                self.library.step(*arguments, P(logits[done:].data_ptr()))
            done += sum(text.rows for text in texts)
        by_call = logits.split([tokens.numel() for tokens, _, _ in calls])
        return [each.view(*call[0].shape, -1) for each, call in zip(by_call, calls, strict=True)]

    @torch.no_grad()
    def _prepared(self, plan: LayerPlan, positions: int) -> Prepared:
        """Weights of a plan, with rotary angles for these positions at least."""
        model = self.model
        config = model.config
        owners: list[object] = [model]
        size = 1 << (positions - 1).bit_length()

        def address(tensor: Tensor) -> int:
            owners.append(tensor)
            return tensor.data_ptr()

        def matrix(product: nn.Linear | nn.Embedding, bits: int) -> ctypes.Structure:
            if not bits:
                return Matrix()
            weight = product.weight if bits == FULL else self._copy(product, bits)
            bias = getattr(product, "bias", None)
            return Matrix(
                address(weight.contiguous()),
                None if bias is None else address(bias.float()),
                KINDS[model.dtype] if bits == FULL else bits,
                *product.weight.shape,
            )

        def scales(norm: RMSNorm) -> int:
            return address(norm.weight.float() + (1 - norm.neutral))

        angles = {}
        for rope in set(config.ropes):  # one half of each: the other repeats it
            tables = rotary_table(rope, config.head_dim, size, torch.float32, model.device)
            angles[rope] = [address(each.chunk(2, 1)[1].contiguous()) for each in tables]
        layers = (Layer * config.num_layers)()
        for layer, block, attention, mlp, rope, window in zip(
            layers, model.layers, plan.attention, plan.mlp, config.ropes, config.windows, strict=True
        ):
            of = block.self_attn
            layer.qkv = tuple(matrix(each, attention) for each in (of.q_proj, of.k_proj, of.v_proj))
            layer.o = matrix(of.o_proj, attention)
            layer.gate_up = matrix(block.mlp.gate_proj, mlp), matrix(block.mlp.up_proj, mlp)
            layer.down = matrix(block.mlp.down_proj, mlp)
            norms = [scales(part) for part in block.children() if isinstance(part, RMSNorm)]
            before, after = (norms[::2], norms[1::2]) if len(norms) > 2 else (norms, (None, None))
            layer.attention_norm, layer.mlp_norm = before
            layer.attention_post_norm, layer.mlp_post_norm = after
            if config.head_norms:
                layer.q_norm, layer.k_norm = scales(of.q_norm), scales(of.k_norm)
            layer.cos, layer.sin = angles[rope]
            layer.window = window or UNLIMITED
        owners.append(layers)
        found = Model(
            layers=ctypes.addressof(layers),
            embedding=address(model.embed_tokens.weight),
            norm=scales(model.norm),
            head=matrix(model.lm_head or model.embed_tokens, plan.head),
            num_layers=config.num_layers,
            kind=KINDS[model.dtype],
            hidden=config.hidden_size,
            heads=config.num_heads,
            key_heads=config.num_kv_heads,
            size=config.head_dim,
            embedding_scale=model.embedding_scale,
            eps=config.norm_eps,
            scale=config.attention_scale,
            soft_cap=config.attention_soft_cap or 0,
            final_soft_cap=config.final_soft_cap or 0,
            is_gelu=config.block == "gemma2",
        )
        return Prepared(found, size, owners)

    def _copy(self, product: nn.Linear | nn.Embedding, bits: int) -> Tensor:
        """Copy of a weight in few bits, by the importance of its inputs; made once."""
        if (product, bits) not in self.copies:
            importance = self.importance.get(product)
            self.copies[product, bits] = rounded(product.weight.detach(), bits, importance)
        return self.copies[product, bits]


def rounded(weight: Tensor, bits: int, importance: Tensor | None = None) -> Tensor:
    """Return a copy of ``[out, in]`` weights in few bits, uint8 ``[blocks of 16 rows, bytes]``: the
    codes of ``model.quantise.quantise``, laid out as ``code_tile`` in ``step.c`` reads them.
    """
    rows, columns = weight.shape
    groups = -(-columns // GROUP)
    block_bytes = groups * 320 if bits == 4 else groups * 512 + 64
    copy = torch.empty(-(-rows // LANES), block_bytes, dtype=torch.uint8)
    shares = shares_of(importance, columns, weight.device)
    weight = weight.contiguous()
    matrix = Matrix(weight.data_ptr(), None, KINDS[weight.dtype], rows, columns)
    with one_at_a_time:
        library().use_threads(torch.get_num_threads())
        library().round_weights(
            ctypes.byref(matrix), L(bits), P(shares.data_ptr()), P(copy.data_ptr())
        )
    return copy


def texts_of(tokens: Tensor, cache: KVCache, start: int) -> Iterator[ctypes.Structure]:
    """Yield the rows of a call, text by text, and at most ``MOST_ROWS`` at a time."""
    texts, count = tokens.shape
    entries = cache.addresses
    for text in range(texts):
        for first in range(0, count, MOST_ROWS):
            yield Text(
                tokens.data_ptr() + 8 * (text * count + first),
                entries.data_ptr() + entries.stride(0) * 8 * text,
                min(MOST_ROWS, count - first),
                start + first,
                cache.keys[0].stride(1) * cache.keys[0].itemsize,
            )


def steps_of(texts: Sequence[ctypes.Structure]) -> Iterator[list[ctypes.Structure]]:
    """Yield the texts of each step, of ``MOST_ROWS`` rows at most. A text that was cut is in
    several steps, since all but its last part fill one.
    """
    step: list[ctypes.Structure] = []
    for text in texts:
        if step and sum(each.rows for each in step) + text.rows > MOST_ROWS:
            yield step
            step = []
        step.append(text)
    yield step


def attend_by_flash(
    q: Tensor, k: Tensor, v: Tensor, window: int | None, *, scale: float, soft_cap: float | None
) -> Tensor:
    """``model.layers.attend_causally``, by torch's fused kernel, without a mask where the last T of
    S positions attend to all before them.

    The kernel also returns the logarithm of each softmax's divisor. With it, the attentions of the
    same queries to two sets of keys are joined: to the keys before the chunk, which need no mask,
    and within the chunk, where the kernel skips the masked half of the scores. q ``[B, H, T, D]``,
    k and v ``[B, K, S, D]`` with K dividing H -> ``[B, H, T, D]``.
    """
    count = q.shape[2]
    size = k.shape[2]
    if count in (1, size) or soft_cap is not None or (window is not None and size > window):
        return attend_causally(q, k, v, window, scale=scale, soft_cap=soft_cap)
    before = size - count
    chunk = FLASH(q, k[:, :, before:], v[:, :, before:], is_causal=True, scale=scale)
    earlier = FLASH(q, k[:, :, :before], v[:, :, :before], scale=scale)
    out, log_sums = (torch.stack(pair) for pair in zip(chunk, earlier, strict=True))
    shares = log_sums.softmax(0).reshape(out.shape[:-1])
    return (out * shares[..., None]).sum(0).to(q.dtype)
