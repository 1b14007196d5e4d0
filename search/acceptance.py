"""How often the target would accept what a layer plan drafts: at every position of a text, in one pass.

The text was written by the target itself. Then, by Bayes' rule, token x that the text holds was an accepted draft
with probability min(p, q)(x) / p(x) = min(1, q(x) / p(x)), p being the target's distribution there and q the
draft's: all that is needed are the two probabilities of the text's own tokens. (The mean of that ratio over
x ~ p is Σ min(p, q), the acceptance probability of arXiv 2211.17192, theorem 3.5.) In greedy decoding it is
whether the two largest logits agree.

Under the exponential race (arXiv 2408.07978) draft and target draw with the same exponentials E. Both draw x where
E_y > E_x·max(p_y/p_x, q_y/q_x) for every other y: with probability 1 / Σ_y max(p_y/p_x, q_y/q_x), since the E are
independent and of rate 1. Given that the target drew the text's x, with p_x, so does the draft with probability
1 / Σ_y max(p_y, p_x·q_y/q_x), and not at all where q_x = 0. That takes whole rows of p, which are made anew from the
target's last hidden states: to keep them would take much room.

A self-draft reads the target's keys and values up to where its round began, and its own from there. So q also
depends on the token's *depth*, its place in the round, and all depths of all positions run side by side: at depth d,
the query of position i sees the target's entries before position i - d, then the entries that the draft
itself made at depths 0 ... d on its way from there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from decoding.sampling import SamplingParams, distribution
from model import Decoder, KVCache, LayerPlan
from model.layers import Positions, Sight, hiding, place
from model.plan import FULL
from model.twins import Twins

DEPTHS = 3  # deeper ones are taken to be like the last; on SmolLM2 that moves acceptance rates by .01 at most

GROUP = 6  # texts of similar length that go through the model together; more would only be padded more


@dataclass(frozen=True)
class Text:
    """A prompt and what the target wrote after it; ``room`` more tokens were allowed when it ended the text itself."""

    prompt: tuple[int, ...]
    written: tuple[int, ...]
    room: int = 0


@dataclass(frozen=True)
class Acceptance:
    """What becomes of the draft of token t of text b, drafted as number d of its round: four ``[B, D, M]`` float64.

    M is the longest text's length; entries beyond a text's own length mean nothing. D is 1 where the depth makes no
    difference.

    ``accept``      the probability that the target accepts a draft here, given that the text holds token t
    ``confidence``  the raw softmax probability that the draft gives token t
    ``likeliest``   the largest raw softmax probability among what the draft may draw
    ``share``       the probability that it draws that one: 1 in greedy decoding
    """

    accept: Tensor
    confidence: Tensor
    likeliest: Tensor
    share: Tensor


class TargetEntries:
    """Stands where a KVCache would: a layer's attention sees the target's entries, then those of the pass itself."""

    def __init__(self, cache: KVCache) -> None:
        self.cache = cache

    def write(self, layer: int, start: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """``[B, K, n, D]`` new keys and values -> ``[B, K, S + n, D]``, S positions of the target first."""
        return torch.cat((self.cache.keys[layer], keys), 2), torch.cat((self.cache.values[layer], values), 2)


class TextBatch:
    """A few texts side by side, what one pass of the target leaves behind of them, and a plan's pass over them.

    Kept are the target's keys and values, and the states before each layer at the positions that drafts start
    from, so that a plan's pass begins at the first sublayer it skips.
    """

    def __init__(self, model: Decoder, twins: Twins, texts: Sequence[Text], depths: int) -> None:
        self.model, self.twins, self.depths = model, twins, depths
        self.longest = max(len(text.written) for text in texts)
        # Token t of the text follows position begin + t. A pad is seen by no token of the text: attention is causal.
        begin = torch.tensor([len(text.prompt) - 1 for text in texts], device=model.device)
        self.fed = begin[:, None] + torch.arange(self.longest, device=model.device)
        tokens = torch.zeros(len(texts), int(self.fed.max()) + 1, dtype=torch.int64, device=model.device)
        for row, text in zip(tokens, texts, strict=True):
            ids = [*text.prompt, *text.written[:-1]]
            row[: len(ids)] = torch.tensor(ids)
        cache = model.new_cache(tokens.shape[1], len(texts))
        self.states = self._target_states(tokens, cache)
        self.entries = TargetEntries(cache)
        self.shallow, self.deep = (self._positions(count, cache.capacity) for count in (1, depths))

    def _target_states(self, tokens: Tensor, cache: KVCache) -> list[Tensor]:
        """The states ``[B, M, hidden]`` before each layer and after the last, at the fed positions; fills the cache."""
        x = self.model.embed(tokens)
        positions = place(self.model.config, 0, tokens.shape[1], x)
        rows = torch.arange(len(tokens), device=x.device)[:, None]
        states = [x[rows, self.fed]]
        for block in self.model.layers:
            x = block(x, positions, cache, attention=True, mlp=True)
            states.append(x[rows, self.fed])
        return states

    def _positions(self, depths: int, capacity: int) -> Positions:
        """Where ``depths · M`` queries stand, depth by depth, and what each sees: target's entries, then the pass's."""
        config, count = self.model.config, self.longest
        angles = place(config, 0, capacity, self.states[0])
        fed = self.fed.repeat(1, depths)
        cos, sin = (table[fed][:, None] for table in (angles.cos, angles.sin))
        depth = torch.arange(depths, device=fed.device).repeat_interleave(count)
        at = torch.arange(count, device=fed.device).repeat(depths)
        began = at - depth  # the token that the query's round began with
        # Its own way to here: the same round, at every depth up to this one.
        own = (began[:, None] == began[None, :]) & (depth[None, :] <= depth[:, None])
        key = torch.arange(capacity, device=fed.device)
        target = key < (fed - depth)[..., None]
        groups = config.num_heads // config.num_kv_heads
        sights = {}
        for window in set(config.windows):
            near_own, near_target = own, target
            if window is not None:
                near_own = own & (depth[:, None] - depth[None, :] < window)
                near_target = target & (key > fed[..., None] - window)
            seen = torch.cat((near_target, near_own.expand(len(fed), -1, -1)), 2)
            mask = hiding(seen, cos.dtype)[:, None, None].repeat(1, 1, groups, 1, 1)
            sights[window] = Sight(len(at), capacity, mask)
        return Positions(0, cos, sin, sights)

    def draft_states(self, plan: LayerPlan, deep: bool) -> Tensor:
        """The states ``[B, D, M, hidden]`` after the plan's last sublayer.

        Up to the first skipped sublayer draft and target are the same, and so are their entries; from there on
        depths differ as soon as an attention runs. So early exits have one depth and cost nothing but the head.
        """
        whole = [attention == mlp == FULL for attention, mlp in zip(plan.attention, plan.mlp, strict=True)]
        first = whole.index(False) if not all(whole) else len(whole)
        x, positions = self.states[first], self.shallow
        for layer in range(first, len(whole)):
            if deep and layer > first and plan.attention[layer] and positions is self.shallow:
                x, positions = x.repeat(1, self.depths, 1), self.deep
            attention, mlp = plan.attention[layer], plan.mlp[layer]
            block = self.twins.block(layer, attention, mlp)
            x = block(x, positions, self.entries, attention=attention > 0, mlp=mlp > 0)
        return x.unflatten(1, (-1, self.longest))


def raced_together(p: Tensor, q: Tensor, tokens: Tensor) -> Tensor:
    """The probability that the draft draws each token in the race, given that the target does; see above.

    ``p``, ``q`` ``[M, vocab]`` and ``tokens`` ``[M, 1]`` -> ``[M, 1]``.
    """
    drafted = q.gather(1, tokens)
    slower = torch.maximum(p, p.gather(1, tokens) * (q / drafted))
    return torch.where(drafted > 0, 1 / slower.sum(-1, keepdim=True).clamp(min=1), 0.0)


class Calibration:
    """Texts that a target wrote, and what it would make of any plan's drafts of them."""

    @torch.inference_mode()
    def __init__(
        self,
        model: Decoder,
        texts: Sequence[Text],
        params: SamplingParams,
        depths: int = DEPTHS,
        coupling: str = "ratio",
    ) -> None:
        self.model, self.texts, self.params = model, list(texts), params
        self.race = coupling == "race" and params.temperature > 0
        self.longest = max(len(text.written) for text in texts)
        by_length = sorted(range(len(texts)), key=lambda number: len(texts[number].prompt))
        self.groups = [by_length[first : first + GROUP] for first in range(0, len(texts), GROUP)]
        # Kernels of low bits are slow for many rows: here rounded weights are written out.
        self.twins = Twins(model)
        batches = ([texts[number] for number in group] for group in self.groups)
        self.batches = [TextBatch(model, self.twins, batch, depths) for batch in batches]
        self.target = torch.ones(len(texts), 1, self.longest, dtype=torch.float64)
        if params.temperature and not self.race:
            self.target = self._judge([batch.states[-1][:, None] for batch in self.batches]).accept

    @torch.inference_mode()
    def acceptance(self, plan: LayerPlan, *, deep: bool = True) -> Acceptance:
        """What the target makes of the drafts of ``plan`` at every position and depth (not ``deep``: the first)."""
        states = [batch.draft_states(plan, deep) for batch in self.batches]
        return self._judge(states, self.twins.head(plan.head))

    def first_token_rate(self, plan: LayerPlan) -> float:
        """The mean acceptance of a round's first drafted token: quick, and enough to rank sublayers."""
        accept = self.acceptance(plan, deep=False).accept[:, 0]
        lengths = [len(text.written) for text in self.texts]
        return sum(row[:length].sum().item() for row, length in zip(accept, lengths, strict=True)) / sum(lengths)

    def _judge(self, states: Sequence[Tensor], head: Callable[[Tensor], Tensor] | None = None) -> Acceptance:
        """The head, the model's own by default, over each batch's ``[B, D, M, hidden]``.

        A text and depth at a time: logits take much room.
        """
        found = torch.ones(4, len(self.texts), states[0].shape[1], self.longest, dtype=torch.float64)
        for group, batch, rows in zip(self.groups, self.batches, states, strict=True):
            for number, last, text_states in zip(group, batch.states[-1], rows, strict=True):
                text = self.texts[number]
                length = len(text.written)
                target = self._probs(self._logits(last[:length]), text) if self.race else None
                for depth, state in enumerate(text_states):
                    measured = self._measure(self._logits(state[:length], head), text, target)
                    found[:, number, depth, :length] = measured.cpu()
        # A probability of the target can round to 0 where the text was written in other chunks than it is read.
        smallest = torch.finfo(found.dtype).tiny
        return Acceptance((found[0] / self.target.clamp(min=smallest)).clamp(max=1.0), *found[1:])

    def _logits(self, state: Tensor, head: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """Hidden states ``[M, hidden]`` -> logits ``[M, vocab]`` in at least float32."""
        logits = self.model.logits(state[None], head)[0]
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    def _probs(self, logits: Tensor, text: Text) -> Tensor:
        """The distributions ``[M, vocab]`` that the text's tokens would be drawn from."""
        context = torch.tensor([*text.prompt, *text.written[:-1]], device=logits.device)
        return distribution(logits, context, self.params)

    def _measure(self, wide: Tensor, text: Text, target: Tensor | None) -> Tensor:
        """Draft logits ``[M, vocab]`` -> four columns ``[4, M]``, of which the last three are Acceptance's.

        The first is the draft's probability of the text's tokens; with the ``target``'s rows p, it is that of drawing
        them with the target in the race.
        """
        written = torch.tensor(text.written, device=wide.device)[:, None]
        if self.params.temperature == 0 and self.params.repetition_penalty == 1:
            best = wide.argmax(-1, keepdim=True)  # where distribution() puts its 1, without a row of zeros around it
            drawn, share = (best == written).double(), torch.ones_like(best)
        else:
            probs = self._probs(wide, text)
            best = probs.argmax(-1, keepdim=True)
            drawn, share = probs.gather(1, written), probs.gather(1, best)
            if target is not None:
                drawn = raced_together(target.double(), probs.double(), written)
        total = wide.logsumexp(-1, keepdim=True)
        confidence, likeliest = ((wide.gather(1, token) - total).exp() for token in (written, best))
        return torch.stack([column[:, 0].double() for column in (drawn, confidence, likeliest, share)])
