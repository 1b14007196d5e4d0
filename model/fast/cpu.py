"""Decoder on a CPU: short steps, and the attention of prompts, are ``step.c``; the other layers of
prompts are torch's, on the same weights.

Gives the weights of a plan to the step, by address. Knows nothing of samples, drafts and files of
weights.
"""

import copy
import ctypes
import threading
from collections.abc import Sequence
from ctypes import c_void_p
from functools import lru_cache, partial
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.cache import KVCache
from model.config import Rope
from model.decoder import Decoder
from model.fast import PreparedDecoder
from model.fast.library import library, structure
from model.layers import RMSNorm, attend_causally, rotary_table
from model.plan import FULL, LOW_BITS, SINKS, LayerPlan
from model.quantise import shares_of
from model.steps import Abilities

NORMS = {  # of a block: fields of a Layer in step.c, and their names here
    "llama": {
        "attention_norm": "input_layernorm",
        "mlp_norm": "post_attention_layernorm",
    },
    "gemma2": {
        "attention_norm": "input_layernorm",
        "attention_post_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_post_norm": "post_feedforward_layernorm",
    },
}
KINDS = {torch.bfloat16: 16, torch.float32: 32}  # of numbers in step.c: bits
IS_GELU = {"silu": False, "gelu_pytorch_tanh": True}  # the activations of step.c
# Weights that are kept by address, each of a plan and a size of cache: a text has two or three, a
# search has hundreds
PLANS = 16
one_at_a_time = threading.Lock()  # step.c has one pool of threads, and one memory of a step


CMatrix = structure("Matrix")
CLayer = structure("Layer")
CAttention = structure("AttentionConfig")
CModel = structure("Model")
CText = structure("Text")


def call(function: str, *arguments: object) -> None:
    """Call a function of ``step.c`` on torch's number of threads, with tensors by address."""
    values = [each.data_ptr() if isinstance(each, Tensor) else each for each in arguments]
    with one_at_a_time:
        library().use_threads(torch.get_num_threads())
        getattr(library(), function)(*values)


class FastDecoder(PreparedDecoder):
    """``Decoder`` on a CPU in bfloat16 or float32, with compiled steps.

    The bits of a position's logits and cache entries do not depend on the other rows of the step,
    of this text or of others. (``prefill``, in long chunks, does not promise this.)
    """

    abilities = Abilities(LOW_BITS, shares_steps=True, why_rows_vary=None)

    def __init__(self, model: Decoder) -> None:
        step = library()  # first: where it cannot be compiled, the model stays as it is
        super().__init__(model)
        self.dtype = model.dtype  # of weights by address, whatever the model is cast to
        model.attend = attend_by_step
        if model.dtype == torch.bfloat16 and not step.has_pairs():
            for part in model.modules():
                if isinstance(part, nn.Linear):
                    part.forward = partial(multiply_widened, part)
        self.weights = lru_cache(PLANS)(partial(Weights, self))
        self.copies: dict[tuple[nn.Module, int], Tensor] = {}  # in few bits, each made once
        # of the entries of a cache, which stay where they are
        self.addresses: WeakKeyDictionary[KVCache, Tensor] = WeakKeyDictionary()

    def __deepcopy__(self, memo: dict[int, object]) -> "FastDecoder":
        """Return a decoder of a copied model, with no weights by address yet."""
        return FastDecoder(copy.deepcopy(self.model, memo))

    def prepare(self, plan: LayerPlan) -> None:
        Weights(self, plan, 1)  # makes copies, which are kept

    def __call__(
        self,
        tokens: Tensor,
        cache: KVCache | None = None,
        start: int = 0,
        plan: LayerPlan | None = None,
    ) -> Tensor:
        """Return the logits ``[batch, T, vocab]`` float32 after tokens ``[batch, T]`` from
        ``start`` on.
        """
        if cache is None:
            return self.model(tokens, cache, start, plan)
        return self.together([(tokens, cache, start)], plan)[0]

    def together(
        self, calls: Sequence[tuple[Tensor, KVCache, int]], plan: LayerPlan | None = None
    ) -> list[Tensor]:
        """Return the logits of calls ``(tokens, cache, start)`` under one plan, in as few steps as
        possible.

        Each call has its own cache. The logits of a call have the same bits as alone. Raises
        IndexError for ids outside of the vocabulary, and ValueError where a cache does not fit, as
        ``LayerPlan.of`` and ``Steps.check`` do, before any cache changes; and ValueError for a
        model that was cast since it was accelerated.
        """
        plan = LayerPlan.of(self.num_layers, plan)
        if self.model.dtype != self.dtype:
            raise ValueError("the model was cast to another dtype since: accelerate it again")
        if not calls:
            return []
        ids = torch.cat([tokens.flatten() for tokens, _, _ in calls])
        if ids.is_floating_point() or ((ids < 0) | (ids >= self.vocab_size)).any():
            raise IndexError(f"a token id is no whole number in 0..{self.vocab_size - 1}")
        for tokens, cache, start in calls:
            self.check(plan, tokens, cache, start)
        capacity = max(cache.capacity for _, cache, _ in calls)
        weights = self.weights(plan, 1 << (capacity - 1).bit_length())  # sizes double: few are made
        texts: list[ctypes.Structure] = []
        for tokens, cache, start in calls:
            rows = tokens.shape[1]
            cache.claim(plan.attention_layers, start, rows)
            head_bytes = cache.keys[0].itemsize * cache.keys[0].stride(1)
            if cache not in self.addresses:
                self.addresses[cache] = addresses_of(cache)
            texts += [
                CText(entries=each.data_ptr(), rows=rows, start=start, head_bytes=head_bytes)
                for each in self.addresses[cache]
            ]
        logits = torch.empty(len(ids), self.vocab_size, dtype=torch.float32, device="cpu")
        call("step", weights.model, (CText * len(texts))(*texts), len(texts), ids.long(), logits)
        by_call = zip(logits.split([tokens.numel() for tokens, _, _ in calls]), calls, strict=True)
        return [each.view(*tokens.shape, self.vocab_size) for each, (tokens, _, _) in by_call]

    def low_bit_copy(self, product: nn.Linear | nn.Embedding, bits: int) -> Tensor:
        """Return the copy of a weight in few bits, made once, by the importance of its inputs."""
        if (product, bits) not in self.copies:
            importance = self.importance.get(product)
            self.copies[product, bits] = rounded(product.weight.detach(), bits, importance)
        return self.copies[product, bits]


def addresses_of(cache: KVCache) -> Tensor:
    """Return the addresses of each text's keys and values, int64 ``[batch, layers, 2]``."""
    return torch.tensor(
        [
            [
                [keys[text].data_ptr(), values[text].data_ptr()]
                for keys, values in zip(cache.keys, cache.values, strict=True)
            ]
            for text in range(len(cache.keys[0]))
        ],
        device="cpu",
    )


class Weights:
    """Weights of a model under a plan as the step reads them, by address, with rotary angles for
    ``positions``.

    It keeps the memory of all these tensors, also where the model gets others. Matrices in the
    checkpoint's bits are the model's own: a step sees changes in place. Norms, biases and low-bit
    copies are as they were when this was made: after a change of these, make a new decoder.
    """

    @torch.no_grad()
    def __init__(self, fast: FastDecoder, plan: LayerPlan, positions: int) -> None:
        self.owned: list[object] = []
        self.low_bit_copy = fast.low_bit_copy
        config = fast.config
        model = fast.model
        angles = {
            rope: [self.address(each) for each in angle_table(rope, config.head_dim, positions)]
            for rope in set(config.ropes)
        }
        parts = zip(
            model.layers, plan.attention, plan.mlp, config.ropes, config.windows, strict=True
        )
        layers = (CLayer * config.num_layers)(
            *(
                self.layer(block, attention, mlp, angles[rope], window)
                for block, attention, mlp, rope, window in parts
            )
        )
        self.model = CModel(
            layers=layers,
            embedding=self.address(model.embed_tokens.weight.contiguous()),
            norm=self.scales(model.norm),
            head=self.matrix(model.lm_head or model.embed_tokens, plan.head),
            attention=attention_config(
                config.num_heads,
                config.num_kv_heads,
                config.head_dim,
                model.dtype,
                scale=config.attention_scale,
                soft_cap=config.attention_soft_cap,
                newest=plan.window,
            ),
            num_layers=config.num_layers,
            hidden=config.hidden_size,
            embedding_scale=model.embedding_scale,
            eps=config.norm_eps,
            final_soft_cap=config.final_soft_cap or 0,
            is_gelu=IS_GELU[config.family.activation],
        )

    def layer(
        self,
        block: nn.Module,
        attention: int,
        mlp: int,
        angles: list[int],
        window: int | None,
    ) -> ctypes.Structure:
        """Return the weights of a block, those of each sublayer in its number of bits."""
        sublayer = block.self_attn
        family = sublayer.config.family
        norms = {
            field: self.scales(block.get_submodule(name))
            for field, name in NORMS[family.block].items()
        }
        if family.head_norms:
            norms |= {
                "q_norm": self.scales(sublayer.q_norm),
                "k_norm": self.scales(sublayer.k_norm),
            }
        return CLayer(
            qkv=tuple(
                self.matrix(each, attention)
                for each in (sublayer.q_proj, sublayer.k_proj, sublayer.v_proj)
            ),
            o=self.matrix(sublayer.o_proj, attention),
            gate_up=tuple(
                self.matrix(each, mlp) for each in (block.mlp.gate_proj, block.mlp.up_proj)
            ),
            down=self.matrix(block.mlp.down_proj, mlp),
            cos=angles[0],
            sin=angles[1],
            window=window or 0,
            **norms,
        )

    def address(self, tensor: Tensor) -> int:
        """Return the address of a tensor, whose memory is kept: a parameter's own may change."""
        self.owned.append(tensor.detach())
        return tensor.data_ptr()

    def matrix(self, product: nn.Linear | nn.Embedding, bits: int) -> ctypes.Structure:
        """Return the weights of a linear layer in these bits; 0 is none."""
        if not bits:
            return CMatrix()
        weight = product.weight.contiguous() if bits == FULL else self.low_bit_copy(product, bits)
        kind = KINDS[weight.dtype] if bits == FULL else bits
        bias = getattr(product, "bias", None)
        place = None if bias is None else self.address(bias.float())
        rows, columns = product.weight.shape
        return CMatrix(
            weights=self.address(weight), bias=place, kind=kind, rows=rows, columns=columns
        )

    def scales(self, norm: RMSNorm) -> int:
        """Return the address of the factors by which a norm scales, float32."""
        return self.address(norm.weight.float() + (1 - norm.neutral))


def attention_config(
    heads: int,
    key_heads: int,
    size: int,
    dtype: torch.dtype,
    *,
    scale: float,
    soft_cap: float | None,
    newest: int | None,
) -> ctypes.Structure:
    """Return what the layers of a model share of attention, for the step."""
    return CAttention(
        kind=KINDS[dtype],
        heads=heads,
        key_heads=key_heads,
        heads_per_key=heads // key_heads,
        head_size=size,
        newest=newest or 0,
        sinks=SINKS,
        scale=scale,
        soft_cap=soft_cap or 0,
    )


@lru_cache(maxsize=4)  # of up to two ropes, for two sizes of caches; plans share them
def angle_table(rope: Rope, size: int, positions: int) -> list[Tensor]:
    """Return cosine and sine ``[positions, size / 2]``, float32."""
    tables = rotary_table(rope, size, positions, torch.float32, torch.device("cpu"))
    # the second halves, since the first of sine has the other sign
    return [each.chunk(2, 1)[1].contiguous() for each in tables]


def rounded(weight: Tensor, bits: int, importance: Tensor | None) -> Tensor:
    """Return a copy of ``[out, in]`` weights in few bits, uint8 ``[blocks of 16 rows, bytes]``: the
    codes of ``model.quantise.quantise``, laid out as ``products.h`` draws them. Raises ValueError
    for other bits than ``LOW_BITS``, for which the step would write past the copy.
    """
    if bits not in LOW_BITS:
        raise ValueError(f"weights are rounded to one of {LOW_BITS} bits, not to {bits}")
    rows, columns = weight.shape
    block_bytes = library().low_bit_block_bytes(bits, columns)
    made = torch.empty(-(-rows // 16), block_bytes, dtype=torch.uint8, device="cpu")
    shares = shares_of(importance, columns, weight.device)
    weight = weight.contiguous()
    matrix = CMatrix(
        weights=weight.data_ptr(), kind=KINDS[weight.dtype], rows=rows, columns=columns
    )
    call("round_weights", matrix, bits, shares, made)
    return made


def multiply_widened(product: nn.Linear, x: Tensor) -> Tensor:
    """Compute a linear layer of a prompt ``[..., in]`` bf16 in float32, with weights widened for
    this call: where the processor does not multiply bf16, torch would do so several times slower.
    """
    bias = None if product.bias is None else product.bias.float()
    return F.linear(x.float(), product.weight.float(), bias).to(x.dtype)


def attend_by_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int | None,
    *,
    scale: float,
    soft_cap: float | None,
    newest: int | None = None,
) -> Tensor:
    """Compute ``model.layers.attend_causally`` by the step's attention: q ``[B, H, T, D]``, k and v
    ``[B, K, S, D]`` with K dividing H -> ``[B, H, T, D]``.

    The step writes by address, which autograd does not see: tensors that require gradients are
    attended to by ``attend_causally`` itself, as are those of a model that was cast since.
    """
    if k.dtype not in KINDS or any(each.requires_grad for each in (q, k, v)):
        return attend_causally(q, k, v, window, scale=scale, soft_cap=soft_cap, newest=newest)
    batch, heads, count, size = q.shape
    if k.stride() != v.stride() or k.stride()[2:] != (size, 1):
        k = k.contiguous()
        v = v.contiguous()
    queries = q.transpose(1, 2).float().contiguous()
    out = torch.empty_like(queries)
    config = attention_config(
        heads, k.shape[1], size, k.dtype, scale=scale, soft_cap=soft_cap, newest=newest
    )
    for number in range(batch):
        entries = (c_void_p * 2)(k[number].data_ptr(), v[number].data_ptr())
        text = CText(
            entries=ctypes.addressof(entries),
            rows=count,
            start=k.shape[2] - count,
            head_bytes=k.stride(1) * k.itemsize,
        )
        call("attend", config, text, window or 0, queries[number], out[number])
    return out.to(q.dtype).transpose(1, 2)
