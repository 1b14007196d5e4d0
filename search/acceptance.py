"""Acceptance rate of a layer plan's drafts, from one forward pass over texts.

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

A step of the pass reads the target's entries before it and its own, as the first step of a draft
does. Later steps of a draft read entries that the draft made. Knows nothing of costs.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from app.session import Session
from decoding.sampling import distribution
from model.decoder import Decoder
from model.layers import attend_masked, causal_mask, layer_positions
from model.low_bits import PlannedBlocks
from model.plan import LayerPlan
from search.texts import Continuation


def accepted_by_ratio(p: Tensor, q: Tensor, tokens: Tensor) -> Tensor:
    """Return the acceptance probability ``[M, 1]`` of the draft of each token under the ratio rule,
    given that the text holds the token.

    ``p`` and ``q`` ``[M, vocab]`` are the target's and the draft's distributions, ``tokens`` ``[M,
    1]`` int64.
    """
    # p can round to 0 where the text was written in other chunks than it is read.
    of_target = p.gather(1, tokens).double().clamp(min=torch.finfo(torch.float64).tiny)
    return (q.gather(1, tokens).double() / of_target).clamp(max=1)


def accepted_by_race(p: Tensor, q: Tensor, tokens: Tensor) -> Tensor:
    """Return the acceptance probability ``[M, 1]`` likewise under the exponential race: 1 / Σ_y
    max(p_y, p_x · q_y / q_x) for the text's token x, and 0 where q_x = 0.
    """
    drafted = q.gather(1, tokens)
    # Not q / drafted first, which is infinite where q_x is subnormal.
    slower = torch.maximum(p, p.gather(1, tokens) * q / drafted)
    return torch.where(drafted > 0, 1 / slower.sum(-1, keepdim=True).clamp(min=1), 0.0)


# By the names of the rules of verification that a plan can be searched for
ACCEPTED = {"race": accepted_by_race, "ratio": accepted_by_ratio}


class TargetPass:
    """The target's pass over a text without its last token: over ``length`` tokens.

    ``cache`` has its entries. ``last`` ``[1, M, hidden]`` are its states after the last layer at
    the M ``positions`` whose logits predict the ``written`` tokens ``[M, 1]``.
    """

    def __init__(self, model: Decoder, text: Continuation) -> None:
        count = len(text.written)
        self.context = torch.tensor([*text.prompt, *text.written[:-1]], device=model.device)
        self.written = torch.tensor(text.written, device=model.device)[:, None]
        self.length = len(self.context)
        self.positions = torch.arange(self.length, device=model.device)[-count:]
        self.cache = model.new_cache(self.length + count)
        self.last = model.hidden(self.context[None], self.cache)[:, -count:]

    def draft_states(self, planned: PlannedBlocks, plan: LayerPlan) -> Tensor:
        """Return the states ``[1, M, hidden]`` after the last layer of a draft's first step at each
        position.

        The M keys of these steps stand in the cache after the target's. Each query sees its own of
        them, and the target's before it, as far as the windows of family and plan reach. With the
        target's keys at positions 0 to 2, and steps at 1 and 2, the keys marked by x are unseen:

                         target's   the steps'
            key          0  1  2       1  2
            query at 1   .  x  x       .  x
            query at 2   .  .  x       x  .
        """
        own = self.positions
        keys = torch.cat((torch.arange(self.length, device=own.device), own))
        is_own = torch.arange(len(keys), device=own.device) >= self.length
        unseen = torch.where(is_own, keys != own[:, None], keys >= own[:, None])

        def attend(q: Tensor, k: Tensor, v: Tensor, window: int | None, **rest: Any) -> Tensor:
            mask = causal_mask(own, keys, window, q.dtype, plan.window)
            return attend_masked(q, k, v, mask.masked_fill_(unseen, -torch.inf), **rest)

        x = planned.model.embed(self.context[None, own])
        places = layer_positions(planned.model.config, int(own[0]), len(own), x, attend)
        # A layer writes its keys from start on: behind the target's, not over them.
        for (block, attention, mlp), place in zip(planned.blocks(plan), places, strict=True):
            x = block(
                x, replace(place, start=self.length), self.cache, attention=attention, mlp=mlp
            )
        return x


class Calibration:
    """Texts written by a target, with its passes over them, on which the acceptance of any plan's
    drafts is measured.

    Low-bit weights of all plans are kept, expanded to the model's dtype, since low-bit kernels are
    slow for many rows.
    """

    @torch.inference_mode()
    def __init__(self, session: Session, texts: Sequence[Continuation]) -> None:
        self.model = session.model
        self.params = session.options.params
        self.accepted = ACCEPTED[session.options.rule.name]
        self.planned = PlannedBlocks(self.model)
        self.passes = [TargetPass(self.model, text) for text in texts]

    @torch.inference_mode()
    def acceptance(self, plan: LayerPlan) -> float:
        """Return α, the mean probability that a token drafted under the plan is accepted."""
        found = []
        head = self.planned.head(plan.head)
        for text in self.passes:
            states = text.draft_states(self.planned, plan)
            p = distribution(self.model.logits(text.last)[0], text.context, self.params)
            q = distribution(self.model.logits(states, head)[0], text.context, self.params)
            found.append(self.accepted(p, q, text.written)[:, 0].double())
        return torch.cat(found).mean().item()
