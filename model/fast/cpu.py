"""Decoder on a CPU: short steps, and the attention of prompts, are ``step.c``; the other layers of
prompts are torch's, on the same weights.

Gives the weights of a plan to the step, by address. Knows nothing of samples, drafts and files of
weights.
"""

import ctypes
from collections.abc import Sequence
from ctypes import c_long, c_void_p
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.cache import KVCache
from model.decoder import Decoder
from model.fast import PreparedDecoder
from model.fast.compiled import CLayer, CMatrix, CModel, CText, call, library
from model.layers import RMSNorm, rotary_table
from model.plan import FULL, LOW_BITS, LayerPlan
from model.quantise import shares_of
from model.steps import Abilities

KINDS = {torch.bfloat16: 16, torch.float32: 32}  # of numbers, as in step.c
NORMS = {  # of a block: fields of a layer in step.c, and their names here
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
UNLIMITED = 1 << 60  # positions


class FastDecoder(PreparedDecoder):
    """``Decoder`` on a CPU in bfloat16 or float32, with compiled steps.

    The bits of a position's logits and cache entries do not depend on the other rows of the step,
    of this text or of others. (``prefill``, in long chunks, does not promise this.)
    """

    abilities = Abilities(LOW_BITS, shares_steps=True, why_rows_vary=None)

    def __init__(self, model: Decoder) -> None:
        library()
        super().__init__(model)
        model.attend = attend_by_step
        if model.dtype == torch.bfloat16 and not library().has_pairs():
            for part in model.modules():
                if isinstance(part, nn.Linear):
                    part.forward = partial(multiply_widened, part)
        self.full = LayerPlan.full(self.num_layers)
        self.plans: dict[LayerPlan, Weights] = {}
        self.copies: dict[tuple[nn.Module, int], Tensor] = {}  # in few bits, each made once

    def prepare(self, plan: LayerPlan, positions: int = 1) -> "Weights":
        """Make the low-bit copies of a plan now, and return its weights, with rotary angles for
        these positions at least.
        """
        found = self.plans.get(plan)
        if found is None or found.positions < positions:
            found = self.plans[plan] = Weights(self, plan, positions)
        return found

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

        Each call has its own cache. The logits of a call have the same bits as alone.
        """
        plan = plan or self.full
        for tokens, cache, start in calls:
            cache.claim(plan.attention_layers, start, tokens.shape[1])
        weights = self.prepare(plan, max(cache.capacity for _, cache, _ in calls))
        calls = [(tokens.contiguous(), cache, start) for tokens, cache, start in calls]
        texts = [text for each in calls for text in texts_of(*each)]
        rows = [tokens.numel() for tokens, _, _ in calls]
        logits = torch.empty(sum(rows), self.vocab_size)
        array = (CText * len(texts))(*texts)
        place = c_void_p(logits.data_ptr())
        call("step", ctypes.byref(weights.model), array, c_long(len(texts)), place)
        by_call = zip(logits.split(rows), calls, strict=True)
        return [each.view(*tokens.shape, -1) for each, (tokens, _, _) in by_call]

    def copy(self, product: nn.Linear | nn.Embedding, bits: int) -> Tensor:
        """Copy of a weight in few bits, by the importance of its inputs."""
        if (product, bits) not in self.copies:
            importance = self.importance.get(product)
            self.copies[product, bits] = rounded(product.weight.detach(), bits, importance)
        return self.copies[product, bits]


class Weights:
    """Weights of a model under a plan as the step reads them, by address, with rotary angles.

    It owns all tensors there, whatever becomes of the model's, as long as a step may read them.
    """

    @torch.no_grad()
    def __init__(self, fast: FastDecoder, plan: LayerPlan, positions: int) -> None:
        self.owned: list[object] = []
        self.copy = fast.copy
        self.positions = 1 << (positions - 1).bit_length()
        config = fast.config
        model = fast.model
        angles = {}
        for rope in set(config.ropes):  # one half of each: the other repeats it
            tables = rotary_table(
                rope, config.head_dim, self.positions, torch.float32, model.device
            )
            angles[rope] = [self.address(each.chunk(2, 1)[1].contiguous()) for each in tables]
        layers = (CLayer * config.num_layers)()
        parts = zip(layers, model.layers, plan.attention, plan.mlp, strict=True)
        for number, (layer, block, attention, mlp) in enumerate(parts):
            of = block.self_attn
            layer.qkv = tuple(
                self.matrix(each, attention) for each in (of.q_proj, of.k_proj, of.v_proj)
            )
            layer.o = self.matrix(of.o_proj, attention)
            layer.gate_up = tuple(
                self.matrix(each, mlp) for each in (block.mlp.gate_proj, block.mlp.up_proj)
            )
            layer.down = self.matrix(block.mlp.down_proj, mlp)
            for field, name in NORMS[config.block].items():
                setattr(layer, field, self.scales(block.get_submodule(name)))
            if config.head_norms:
                layer.q_norm, layer.k_norm = map(self.scales, (of.q_norm, of.k_norm))
            layer.cos, layer.sin = angles[config.ropes[number]]
            layer.window = config.windows[number] or UNLIMITED
        self.owned.append(layers)
        self.model = CModel(
            layers=ctypes.addressof(layers),
            embedding=self.address(model.embed_tokens.weight),
            norm=self.scales(model.norm),
            head=self.matrix(model.lm_head or model.embed_tokens, plan.head),
            num_layers=config.num_layers,
            kind=KINDS[model.dtype],
            hidden=config.hidden_size,
            heads=config.num_heads,
            key_heads=config.num_kv_heads,
            size=config.head_dim,
            newest=plan.window or 0,
            embedding_scale=model.embedding_scale,
            eps=config.norm_eps,
            scale=config.attention_scale,
            soft_cap=config.attention_soft_cap or 0,
            final_soft_cap=config.final_soft_cap or 0,
            is_gelu=config.block == "gemma2",
        )

    def address(self, tensor: Tensor) -> int:
        """Return the address of a tensor, which is kept."""
        self.owned.append(tensor)
        return tensor.data_ptr()

    def matrix(self, product: nn.Linear | nn.Embedding, bits: int) -> ctypes.Structure:
        """Return the weights of a linear layer in these bits; 0 is none."""
        if not bits:
            return CMatrix()
        weight = product.weight.contiguous() if bits == FULL else self.copy(product, bits)
        kind = KINDS[product.weight.dtype] if bits == FULL else bits
        bias = getattr(product, "bias", None)
        bias = None if bias is None else self.address(bias.float())
        return CMatrix(self.address(weight), bias, kind, *product.weight.shape)

    def scales(self, norm: RMSNorm) -> int:
        """Return the address of the factors by which a norm scales, float32."""
        return self.address(norm.weight.float() + (1 - norm.neutral))


def rounded(weight: Tensor, bits: int, importance: Tensor | None = None) -> Tensor:
    """Return a copy of ``[out, in]`` weights in few bits, uint8 ``[blocks of 16 rows, bytes]``: the
    codes of ``model.quantise.quantise``, laid out as ``products.h`` draws them.
    """
    rows, columns = weight.shape
    block_bytes = library().low_bit_block_bytes(c_long(bits), c_long(columns))
    copy = torch.empty(-(-rows // 16), block_bytes, dtype=torch.uint8)
    shares = shares_of(importance, columns, weight.device)
    weight = weight.contiguous()
    matrix = CMatrix(weight.data_ptr(), None, KINDS[weight.dtype], rows, columns)
    places = [c_void_p(each.data_ptr()) for each in (shares, copy)]
    call("round_weights", ctypes.byref(matrix), c_long(bits), *places)
    return copy


def texts_of(tokens: Tensor, cache: KVCache, start: int) -> list[ctypes.Structure]:
    """Return the texts of a call with tokens ``[batch, T]``, each with its rows."""
    count = tokens.shape[1]
    entries = cache.addresses
    text_bytes = entries.itemsize * entries.stride(0)
    head_bytes = cache.keys[0].itemsize * cache.keys[0].stride(1)
    return [
        CText(
            tokens.data_ptr() + tokens.itemsize * count * text,
            entries.data_ptr() + text_bytes * text,
            count,
            start,
            head_bytes,
        )
        for text in range(len(tokens))
    ]


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
    """
    batch, heads, count, size = q.shape
    if k.stride() != v.stride() or k.stride()[2:] != (size, 1):
        k = k.contiguous()
        v = v.contiguous()
    queries = q.transpose(1, 2).float().contiguous()
    out = torch.empty_like(queries)
    layer = CLayer(window=window or UNLIMITED)
    model = CModel(
        layers=ctypes.addressof(layer),
        kind=KINDS[k.dtype],
        heads=heads,
        key_heads=k.shape[1],
        size=size,
        newest=newest or 0,
        scale=scale,
        soft_cap=soft_cap or 0,
    )
    for text in range(batch):
        entries = (c_void_p * 2)(k[text].data_ptr(), v[text].data_ptr())
        head_bytes = k.stride(1) * k.itemsize
        of = CText(None, ctypes.addressof(entries), count, k.shape[2] - count, head_bytes)
        places = [c_void_p(each[text].data_ptr()) for each in (queries, out)]
        call("attend", ctypes.byref(model), ctypes.byref(of), *places)
    return out.to(q.dtype).transpose(1, 2)
