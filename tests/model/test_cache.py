"""KV cache: after any writes, drafts and rollbacks, logits are those of a fresh run over the text;
and a long prompt may be divided.
"""

import copy
from unittest.mock import patch

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from torch import Tensor

from model.cache import KVCache
from model.fast import accelerate
from model.fast.gpu import StaticDecoder
from model.plan import LayerPlan
from tests.configs import FAMILIES, small
from tests.laws import plans, random_model, tiny_model
from tests.oracle import VOCAB, configs

CAPACITY = 32
tokens_to_add = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=6)


class CacheMachine(RuleBasedStateMachine):
    """A text and its cache under all that decoding does with them."""

    family: str

    @initialize(data=st.data())
    def start(self, data):
        self.model = random_model(data.draw(configs(self.family)))
        self.cache = self.model.new_cache(CAPACITY)
        self.text: list[int] = []

    def run(self, tokens: list[int], start: int, plan: LayerPlan | None = None) -> Tensor:
        return self.model(torch.tensor([tokens]), self.cache, start, plan)

    def fresh(self) -> Tensor:
        return self.model(torch.tensor([self.text]))

    @precondition(lambda self: len(self.text) <= CAPACITY - 6)
    @rule(tokens=tokens_to_add)
    def prefill(self, tokens):
        self.model.prefill(torch.tensor([tokens]), self.cache, len(self.text))
        self.text += tokens

    @rule(data=st.data())
    def roll_back(self, data):
        length = data.draw(st.integers(0, len(self.text) + 3))  # beyond the end nothing changes
        self.cache.truncate(length)
        del self.text[length:]

    @rule(data=st.data(), tokens=tokens_to_add)
    def write(self, data, tokens):
        """At the end of the text, or over its last tokens, up to the whole text."""
        start = data.draw(st.integers(0, min(len(self.text), CAPACITY - 6)))
        self.text[start:] = tokens
        torch.testing.assert_close(
            self.run(tokens, start), self.fresh()[:, start:], rtol=0, atol=1e-9
        )

    @precondition(lambda self: self.text and len(self.text) <= CAPACITY - 6)
    @rule(data=st.data(), drafted=tokens_to_add)
    def draft_and_verify(self, data, drafted):
        """A round of the loop: the draft feeds the last token first, and so does the verification
        after it.
        """
        plan, last = data.draw(plans(self.model.num_layers)), len(self.text) - 1
        self.cache.truncate(last)
        for step, token in enumerate([self.text[-1], *drafted[:-1]]):
            self.run([token], last + step, plan)
        verified = self.run([self.text[-1], *drafted], last)
        self.text += drafted
        torch.testing.assert_close(verified, self.fresh()[:, last:], rtol=0, atol=1e-9)
        accepted = data.draw(st.integers(0, len(drafted)))
        length = last + 1 + accepted
        self.cache.truncate(length)
        del self.text[length:]

    @invariant()
    def every_layer_holds_the_text_and_no_more(self):
        assert self.cache.lengths == [len(self.text)] * self.model.num_layers


@pytest.mark.parametrize("family", FAMILIES)
def test_after_writes_drafts_and_rollbacks_logits_are_those_of_a_fresh_run(family):
    machine = type("Machine", (CacheMachine,), {"family": family})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=15,
            stateful_step_count=12,
            deadline=None,
            derandomize=True,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
        ),
    )


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=12, derandomize=True, deadline=None)
@given(
    length=st.integers(18, 63),
    chunk=st.sampled_from([18, 25, 40, 63]),
    rows=st.sampled_from([3, 16, 128]),
)
@torch.inference_mode()
def test_a_long_prompt_leaves_the_entries_of_one_pass_however_it_is_divided(
    family: str, length: int, chunk: int, rows: int
) -> None:
    """In chunks of any size, with attention in chunks of any size, prepared or not."""
    readable = tiny_model(family, vocab=19).float()
    fast = accelerate(copy.deepcopy(readable))
    text = torch.randint(19, (2, length), generator=torch.Generator().manual_seed(length))
    expected = readable.new_cache(64, 2)
    readable(text, expected)
    with patch("model.decoder.PREFILL_CHUNK", chunk), patch("model.layers.QUERIES", rows):
        for model in (readable, fast):
            found = model.new_cache(64, 2)
            model.prefill(text, found)
            torch.testing.assert_close(
                found.keys + found.values, expected.keys + expected.values, rtol=0, atol=5e-5
            )


FULL, SKIPPING = LayerPlan.full(3), LayerPlan.skipping(3, attention=[1], mlp=[])
ONE, TWO, OF_TWO_TEXTS = torch.tensor([[0]]), torch.tensor([[0, 1]]), torch.tensor([[0], [1]])
# the plan of a draft, the length after a rollback, and the call after it
REFUSED = {
    "hole": (FULL, 4, (ONE, 5), "layer 0: writing at 5 leaves a hole after 4 entries"),
    "hole after a rollback": (FULL, 2, (ONE, 3), "writing at 3 leaves a hole after 2 entries"),
    "layer skipped by the draft": (
        SKIPPING,
        5,
        (ONE, 5),
        "layer 1: writing at 5 leaves a hole after 4 entries",
    ),
    "fewer than none": (FULL, -5, (ONE, 5), "cannot be cut to -5 positions"),
    "beyond the capacity": (FULL, 5, (TWO, 5), "position 6 is outside the cache's 6 positions"),
    "a plan of fewer layers": (
        FULL,
        5,
        (ONE, 5, LayerPlan.full(2)),
        "a plan of 2 layers is for another model: this one has 3",
    ),
    "another number of texts": (
        FULL,
        5,
        (OF_TWO_TEXTS, 5),
        "a cache for 1 texts .* does not fit 2 texts",
    ),
}
PREPARED = {
    "readable": lambda model: model,
    "compiled": lambda model: accelerate(model.float()),
    "static": lambda model: StaticDecoder(model, captures=False),
}


@pytest.mark.parametrize("prepare", PREPARED.values(), ids=PREPARED.keys())
@pytest.mark.parametrize(
    ("plan", "length", "call", "message"), REFUSED.values(), ids=REFUSED.keys()
)
def test_a_call_that_does_not_fit_is_refused_before_any_layer_changes(
    plan, length, call, message, prepare
):
    """Four tokens by the target and one by a draft, a rollback, and the call. Later steps are as
    fast as before.
    """
    model = prepare(random_model(small(vocab_size=VOCAB)))
    cache = model.new_cache(6)
    model(torch.arange(4)[None], cache, 0)
    model(torch.tensor([[1]]), cache, 4, plan)
    tokens, *rest = call
    with pytest.raises(ValueError, match=message):
        cache.truncate(length)
        model(tokens, cache, *rest)
    assert max(cache.lengths) < rest[0] + tokens.shape[1] and model.trouble is None


def test_a_cache_refuses_what_lies_outside_it_and_stays() -> None:
    cache = KVCache(3, (1, 1, 6, 4), torch.float32, torch.device("cpu"))
    cache.claim([0, 2], 0, 4)
    with pytest.raises(ValueError, match="position -2 is before the cache's first, 0"):
        cache.claim([], -2, 1)
    for capacity, length in ((9, 9), (1, 4), (6, -1)):
        source = KVCache(3, (1, 1, capacity, 4), torch.float32, torch.device("cpu"))
        with pytest.raises(ValueError, match=f"cannot take {length} entries of one of {capacity}"):
            cache.copy_from(source, length)
    assert cache.lengths == [4, 0, 4]
