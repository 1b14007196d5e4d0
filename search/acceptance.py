"""Acceptance probabilities of a layer plan's drafts, at every position and depth of a text, from
one forward pass.

The text was written by the target itself. By Bayes' rule, its token x was an accepted draft with
probability min(p, q)(x) / p(x) = min(1, q(x) / p(x)), where p is the target's distribution at that
position and q the draft's. (The mean of this ratio over x ~ p is Σ min(p, q), the acceptance
probability of arXiv 2211.17192, theorem 3.5.) In greedy decoding it is 1 where the two largest
logits agree, else 0. A pass that reads the text instead of drafting (teacher forcing) gives p and q
at all positions at once.

Under the exponential race (arXiv 2408.07978) draft and target draw with the same exponentials E.
Both draw x where E_y > E_x·max(p_y/p_x, q_y/q_x) for every other y: with probability 1 / Σ_y
max(p_y/p_x, q_y/q_x), since the E are independent and of rate 1. Given that the target drew x, with
probability p_x, so does the draft with probability 1 / Σ_y max(p_y, p_x·q_y/q_x), and 0 where q_x =
0.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from decoding.run.calibration import Continuation
from decoding.sampling import SamplingParams, distribution
from model import Decoder, LayerPlan, ModelConfig
from model.layers import Positions, attend, layer_positions
from model.twins import Twins

# deeper drafts are taken to be accepted like the last: an error of .01 at most on SmolLM2
DEPTHS = 3


@dataclass(frozen=True)
class Acceptance:
    """Probabilities of the draft for token t of text b, drafted as number d + 1 of its round: ``[B,
    D, M]`` float64.

    M is the longest text's length. Entries beyond a text's length are undefined, as are those of t
    < d.

    ``accept``      of the target accepting the draft, given that the text holds token t
    ``confidence``  raw softmax probability that the draft gives token t
    ``likeliest``   raw softmax probability of the draft's likeliest token
    ``share``       of the draft drawing that token: 1 in greedy decoding
    ``lengths``     ``[B]`` int64, tokens of each text; ``limits`` the same with the unused budget
    """

    accept: Tensor
    confidence: Tensor
    likeliest: Tensor
    share: Tensor
    lengths: Tensor
    limits: Tensor


def positions_at_all_depths(
    config: ModelConfig, first: int, count: int, depths: int, like: Tensor
) -> list[Positions]:
    """Positions and masks, per layer, of ``depths · count`` draft queries, depth by depth, on the
    device and in the dtype of like.

    Query (d, i) is the draft's step at position ``first + i`` as number d (from 0) of its round,
    which began at position first + i - d. One pass can compute all of them. First, an accepted
    draft has the text's tokens, so the inputs of every step are known; steps whose draft has left
    the text were rejected and need no computing. Second, a step reads only keys and values of the
    past: before its round those of the target's pass over the text, and within it those that the
    draft wrote at depths 0 ... d. So it depends on its position and depth only. Third, these are
    outputs of other queries of the same pass, layer by layer: query (d, i) sees the target's
    entries at positions below first + i - d, and the entries of queries (0, i - d), (1, i - d + 1),
    ..., (d, i), one diagonal of the pass. The mask has this pattern, so that the result equals the
    loop's.
    """
    length = first + count
    depth = torch.arange(depths, device=like.device).repeat_interleave(count)[:, None]
    at = first + torch.arange(count, device=like.device).repeat(depths)[:, None]
    began, of_target = at - depth, torch.arange(length, device=like.device)
    seen = torch.cat((of_target < began, (began == began.T) & (depth >= depth.T)), 1)
    key = torch.cat((of_target, at[:, 0]))
    masks = {
        window: torch.where(seen & (key > at - (window or length)), 0.0, -torch.inf).to(like.dtype)
        for window in set(config.windows)
    }

    def attend_at_depths(
        q: Tensor, k: Tensor, v: Tensor, window: int | None, **constants: Any
    ) -> Tensor:
        return attend(q, k, v, masks[window], **constants)

    return [
        Positions(length, each.cos[at[:, 0]], each.sin[at[:, 0]], attend_at_depths)
        for each in layer_positions(config, 0, length, like)
    ]


class TargetPass:
    """The target's pass over one text, and a plan's pass, whose keys and values stand behind the
    target's in the cache.

    ``context`` ``[n]`` is the text without its last token; ``embedded`` and ``last`` ``[1, M,
    hidden]`` are the states before the first and after the last layer, at the M positions whose
    logits predict the written tokens.
    """

    def __init__(self, model: Decoder, text: Continuation, depths: int) -> None:
        first, count = len(text.prompt) - 1, len(text.written)
        self.context = torch.tensor([*text.prompt, *text.written[:-1]], device=model.device)
        self.written = torch.tensor(text.written, device=model.device)[:, None]
        self.cache = model.new_cache(first + count + depths * count)
        self.last = model.hidden(self.context[None], self.cache)[:, first:]
        self.embedded = model.embed(self.context[None, first:])
        self.positions = positions_at_all_depths(model.config, first, count, depths, self.last)

    def draft_states(self, twins: Twins, plan: LayerPlan) -> Tensor:
        """The states ``[D, M, hidden]`` after the plan's last sublayer."""
        count = len(self.written)
        x = self.embedded.repeat(1, len(self.positions[0].cos) // count, 1)
        for layer, (attention, mlp) in enumerate(zip(plan.attention, plan.mlp, strict=True)):
            block = twins.block(layer, attention, mlp)
            x = block(x, self.positions[layer], self.cache, attention=attention > 0, mlp=mlp > 0)
        return x[0].unflatten(0, (-1, count))


def accepted_by_ratio(p: Tensor, q: Tensor, tokens: Tensor) -> Tensor:
    """The probability ``[M, 1]`` that a draft of each token was accepted, given that the text holds
    it; see above.

    ``p`` and ``q`` ``[M, vocab]`` are the target's and the draft's distributions, ``tokens`` ``[M,
    1]`` int64.
    """
    p, q = p.gather(1, tokens).double(), q.gather(1, tokens).double()
    # p can round to 0 where the text was written in other chunks than it is read.
    return (q / p.clamp(min=torch.finfo(p.dtype).tiny)).clamp(max=1)


def accepted_by_race(p: Tensor, q: Tensor, tokens: Tensor) -> Tensor:
    """The same for the exponential race."""
    drafted = q.gather(1, tokens)
    slower = torch.maximum(p, p.gather(1, tokens) * (q / drafted))
    return torch.where(drafted > 0, 1 / slower.sum(-1, keepdim=True).clamp(min=1), 0.0)


class Calibration:
    """Texts written by a target, with its passes over them, on which the acceptance of any plan's
    drafts is measured.

    The first ``depths`` are computed exactly, deeper drafts are taken to be like the last. Low-bit
    weights of all plans are kept, expanded to the model's dtype, since low-bit kernels are slow for
    many rows.
    """

    @torch.inference_mode()
    def __init__(
        self,
        model: Decoder,
        texts: Sequence[Continuation],
        params: SamplingParams,
        coupling: str = "ratio",
        depths: int = DEPTHS,
    ) -> None:
        self.model, self.texts, self.params, self.coupling = model, texts, params, coupling
        self.depths, self.twins = depths, Twins(model)
        self.accepted = {"ratio": accepted_by_ratio, "race": accepted_by_race}[coupling]
        self.passes = [TargetPass(model, text, depths) for text in texts]
        self.lengths = torch.tensor([len(text.written) for text in texts])
        self.limits = self.lengths + torch.tensor([text.unused for text in texts])

    @torch.inference_mode()
    def acceptance(self, plan: LayerPlan, count: int | None = None) -> Acceptance:
        """Acceptance of the plan's drafts at every position and depth of the first ``count`` texts
        (None: of all).
        """
        passes, lengths, limits = self.passes[:count], self.lengths[:count], self.limits[:count]
        found = torch.ones(4, len(passes), self.depths, int(lengths.max()), dtype=torch.float64)
        head = self.twins.head(plan.head)
        for text, columns, length in zip(passes, found.unbind(1), lengths, strict=True):
            target = distribution(self.model.logits(text.last)[0], text.context, self.params)
            # one by one, since logits are large
            for depth, states in enumerate(text.draft_states(self.twins, plan)):
                logits = self.model.logits(states[None], head)[0]
                draft = distribution(logits, text.context, self.params)
                best = draft.argmax(-1, keepdim=True)
                wide = logits.to(draft.dtype)
                norm = wide.logsumexp(-1, keepdim=True)
                measured = (
                    self.accepted(target, draft, text.written),
                    (wide.gather(1, text.written) - norm).exp(),
                    (wide.gather(1, best) - norm).exp(),
                    draft.gather(1, best),
                )
                columns[:, depth, :length] = torch.cat(measured, 1).T.cpu()
        return Acceptance(*found, lengths, limits)
