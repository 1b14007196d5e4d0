"""Acceptance probabilities of a layer plan's drafts, at every position and depth of a text, from
one forward pass.

The text was written by the target itself. A pass that reads it instead of drafting (teacher
forcing) gives p and q, the distributions of target and draft, at all its positions at once. How
probable is it that the text's token x was an accepted draft?

Under the ratio rule (arXiv 2211.17192):

1. A round drafts x and accepts it with probability q(x) · min(1, p(x) / q(x)) = min(p, q)(x).
2. The text has the target's law, so that it holds x with probability p(x).
3. By Bayes' rule, where the text holds x, it was an accepted draft with probability
   min(p, q)(x) / p(x) = min(1, q(x) / p(x)). With p(x) = 0.5 and q(x) = 0.2 this is 0.4.

The mean over x ~ p is Σ min(p, q), the acceptance probability of theorem 3.5. In greedy decoding
the probability is 1 where the two largest logits agree, else 0.

Under the exponential race (arXiv 2408.07978):

1. Target and draft draw with the same exponentials E: the target argmin E/p, the draft argmin E/q.
2. Both draw x where E_y > E_x · max(p_y / p_x, q_y / q_x) for every other y.
3. The E are independent and of rate 1, so that this has probability
   1 / Σ_y max(p_y / p_x, q_y / q_x), where y = x adds 1 to the sum.
4. The target draws x with probability p_x. Divided by it, the probability is
   1 / Σ_y max(p_y, p_x · q_y / q_x), and 0 where q_x = 0.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from app.chooser import Setting
from decoding.sampling import distribution
from model import Decoder, LayerPlan, ModelConfig, Twins
from model.layers import Positions, attend_masked, layer_positions
from search.texts import Continuation

# deeper drafts are taken to be accepted like the last: an error of .01 at most on SmolLM2
DEPTHS = 3


@dataclass(frozen=True)
class Acceptance:
    """Probabilities of the draft for token t of text b, drafted as number d + 1 of its round:
    ``[B, D, M]`` float64.

    M is the longest text's length. Entries beyond a text's length are 1, and those of t < d mean
    nothing: a round cannot begin before the text.

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

    Query (d, t) is the draft's step at position t, as number d (from 0) of a round that began at
    t - d. One pass can compute all of them:

    1. An accepted draft has the text's tokens, so that the input of every step is known. A step
       whose draft has left the text was rejected before, and need not be computed.
    2. A step reads the target's keys and values at positions before its round, and those that the
       draft wrote in this round. So it depends on its position and depth only.
    3. The draft's keys and values are made by other queries of the pass, layer by layer.

    For two depths of the positions 5, 6 and 7, a query (row) sees the keys marked x:

    =======  ==========  ==  ==  ======  ======  ======  ======  ======
    query    target 0-4  5   6   (0, 5)  (0, 6)  (0, 7)  (1, 6)  (1, 7)
    =======  ==========  ==  ==  ======  ======  ======  ======  ======
    (0, 5)   x                   x
    (0, 6)   x           x               x
    (0, 7)   x           x   x                   x
    (1, 6)   x                   x                       x
    (1, 7)   x           x               x                       x
    =======  ==========  ==  ==  ======  ======  ======  ======  ======

    Sliding windows take away the keys that are too far behind.
    """
    length = first + count
    depth = torch.arange(depths, device=like.device).repeat_interleave(count)[:, None]
    at = first + torch.arange(count, device=like.device).repeat(depths)[:, None]
    began = at - depth
    of_target = torch.arange(length, device=like.device)
    of_same_round = (began == began.T) & (depth >= depth.T)
    seen = torch.cat((of_target < began, of_same_round), 1)
    key = torch.cat((of_target, at[:, 0]))
    masks = {
        window: torch.where(seen & (key > at - (window or length)), 0.0, -torch.inf).to(like.dtype)
        for window in set(config.windows)
    }

    def attend_at_depths(
        q: Tensor, k: Tensor, v: Tensor, window: int | None, **constants: Any
    ) -> Tensor:
        return attend_masked(q, k, v, masks[window], **constants)

    return [
        Positions(length, each.cos[at[:, 0]], each.sin[at[:, 0]], attend_at_depths)
        for each in layer_positions(config, 0, length, like)
    ]


class TargetPass:
    """The target's pass over one text, and a plan's pass, whose keys and values stand after the
    target's in the cache.

    ``context`` ``[n]`` is the text without its last token; ``embedded`` and ``last`` ``[1, M,
    hidden]`` are the states before the first and after the last layer, at the M positions whose
    logits predict the written tokens.
    """

    def __init__(self, model: Decoder, text: Continuation, depths: int) -> None:
        first = len(text.prompt) - 1
        count = len(text.written)
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
    """Acceptance probability ``[M, 1]`` of the draft of each token under the ratio rule, given that
    the text holds the token.

    ``p`` and ``q`` ``[M, vocab]`` are the target's and the draft's distributions, ``tokens`` ``[M,
    1]`` int64.
    """
    # p can round to 0 where the text was written in other chunks than it is read.
    of_target = p.gather(1, tokens).double().clamp(min=torch.finfo(torch.float64).tiny)
    return (q.gather(1, tokens).double() / of_target).clamp(max=1)


def accepted_by_race(p: Tensor, q: Tensor, tokens: Tensor) -> Tensor:
    """Acceptance probability ``[M, 1]`` likewise under the exponential race: 1 / Σ_y max(p_y,
    p_x · q_y / q_x) for the text's token x, and 0 where q_x = 0.
    """
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
        setting: Setting,
        texts: Sequence[Continuation],
        depths: int = DEPTHS,
    ) -> None:
        self.model = setting.model
        self.params = setting.params
        self.depths = depths
        self.twins = Twins(self.model)
        self.accepted = {"ratio": accepted_by_ratio, "race": accepted_by_race}[setting.coupling]
        self.passes = [TargetPass(self.model, text, depths) for text in texts]
        self.lengths = torch.tensor([len(text.written) for text in texts])
        self.limits = self.lengths + torch.tensor([text.unused for text in texts])

    @torch.inference_mode()
    def acceptance(self, plan: LayerPlan) -> Acceptance:
        """Acceptance of the plan's drafts at every position and depth of the texts."""
        shape = len(self.passes), self.depths, int(self.lengths.max())
        accept, confidence, likeliest, share = torch.ones(4, *shape, dtype=torch.float64)
        head = self.twins.head(plan.head)
        for number, text in enumerate(self.passes):
            target = distribution(self.model.logits(text.last)[0], text.context, self.params)
            # one by one, since logits are large
            for depth, states in enumerate(text.draft_states(self.twins, plan)):
                logits = self.model.logits(states[None], head)[0]
                draft = distribution(logits, text.context, self.params)
                best = draft.argmax(-1, keepdim=True)
                raw = logits.to(draft.dtype).softmax(-1)
                place = number, depth, slice(len(text.written))
                accept[place] = self.accepted(target, draft, text.written)[:, 0]
                confidence[place] = raw.gather(1, text.written)[:, 0]
                likeliest[place] = raw.gather(1, best)[:, 0]
                share[place] = draft.gather(1, best)[:, 0]
        return Acceptance(accept, confidence, likeliest, share, self.lengths, self.limits)
