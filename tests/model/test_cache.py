"""The cache: whatever is appended, drafted and taken back, logits are those of a fresh run over the text."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor

from model import Decoder, KVCache, LayerPlan, build, parse_config
from tests.oracle import FAMILIES, VOCAB, configs, plans, randomise

CAPACITY = 32
both_families = pytest.mark.parametrize("family", FAMILIES)
tokens_to_add = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=6)


def random_model(raw: dict) -> Decoder:
    model = build(parse_config(raw)).double().requires_grad_(False)
    randomise(model, 0)
    return model


def small_model(family: str, **more: object) -> Decoder:
    raw = {"model_type": family, "vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24, "head_dim": 4}
    raw |= {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 3, "sliding_window": 4}
    return random_model(raw | more)


def held(cache: KVCache, length: int) -> list[Tensor]:
    """A copy of everything the cache holds before position ``length``."""
    return [tensor[:, :, :length].clone() for tensor in [*cache.keys, *cache.values]]


class CacheMachine(RuleBasedStateMachine):
    """A text and its cache under everything that decoding does to them."""

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
    def append(self, tokens):
        start = len(self.text)
        self.text += tokens
        torch.testing.assert_close(self.run(tokens, start), self.fresh()[:, start:], rtol=0, atol=1e-9)

    @precondition(lambda self: len(self.text) <= CAPACITY - 6)
    @rule(tokens=tokens_to_add)
    def prefill(self, tokens):
        self.model.prefill(torch.tensor([tokens]), self.cache, len(self.text))
        self.text += tokens

    @rule(data=st.data())
    def roll_back(self, data):
        length = data.draw(st.integers(0, len(self.text)))
        self.cache.truncate(length)
        del self.text[length:]

    @precondition(lambda self: self.text)
    @rule(data=st.data(), tokens=tokens_to_add)
    def overwrite_from_an_earlier_position(self, data, tokens):
        start = data.draw(st.integers(0, min(len(self.text) - 1, CAPACITY - 6)))
        self.text[start:] = tokens
        torch.testing.assert_close(self.run(tokens, start), self.fresh()[:, start:], rtol=0, atol=1e-9)

    @precondition(lambda self: len(self.text) <= CAPACITY - 6)
    @rule(data=st.data(), drafted=tokens_to_add)
    def draft_and_reject(self, data, drafted):
        plan, before, length = data.draw(plans(self.model.num_layers)), held(self.cache, CAPACITY), len(self.text)
        for step, token in enumerate(drafted):
            self.run([token], length + step, plan)
        self.cache.truncate(length)
        assert self.cache.lengths == [length] * self.model.num_layers
        after = held(self.cache, CAPACITY)
        assert all(torch.equal(a[:, :, :length], b[:, :, :length]) for a, b in zip(before, after, strict=True))

    @precondition(lambda self: self.text and len(self.text) <= CAPACITY - 6)
    @rule(data=st.data(), drafted=tokens_to_add)
    def draft_and_verify(self, data, drafted):
        """A round of the loop: the draft feeds the last token first, and so does the verification after it."""
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
        assert self.cache.length == len(self.text)


class LlamaCache(CacheMachine):
    family = "llama"


class Gemma2Cache(CacheMachine):
    family = "gemma2"


checks = [HealthCheck.too_slow, HealthCheck.filter_too_much]
machine_settings = settings(
    max_examples=60, stateful_step_count=12, deadline=None, derandomize=True, suppress_health_check=checks
)
TestLlamaCacheEqualsFreshRuns = LlamaCache.TestCase
TestGemma2CacheEqualsFreshRuns = Gemma2Cache.TestCase
TestLlamaCacheEqualsFreshRuns.settings = TestGemma2CacheEqualsFreshRuns.settings = machine_settings


@both_families
@pytest.mark.parametrize("length", [2, 3, 4, 5, 9])
def test_a_draft_across_the_windows_edge_leaves_no_trace_when_rejected(family, length):
    """Two caches, one of which never saw the draft, go on identically to the last bit."""
    model = small_model(family)
    text = torch.arange(length)[None]
    never, rejected = model.new_cache(CAPACITY), model.new_cache(CAPACITY)
    for cache in (never, rejected):
        model.prefill(text, cache)
    plan = LayerPlan.skipping(3, attention=[1], mlp=[0])
    for step in range(6):
        model(torch.tensor([[7]]), rejected, length + step, plan)
    rejected.truncate(length)
    for step in range(6):
        token = torch.tensor([[step]])
        assert torch.equal(model(token, rejected, length + step), model(token, never, length + step))


@both_families
@pytest.mark.parametrize("skipped", [[0], [2], [0, 1, 2]], ids=["first", "last", "every"])
def test_positions_stay_right_when_attention_is_skipped(family, skipped):
    """They come from the caller, not from how much some layer has stored."""
    model = small_model(family)
    text, draft = torch.arange(6)[None], torch.tensor([[9, 8, 7]])
    plan = LayerPlan.skipping(3, attention=skipped, mlp=[])
    cache = model.new_cache(CAPACITY)
    model(text, cache, 0)
    drafted = torch.cat([model(draft[:, step : step + 1], cache, 6 + step, plan) for step in range(3)], dim=1)
    at_once = model.new_cache(CAPACITY)
    model(text, at_once, 0)
    torch.testing.assert_close(drafted, model(draft, at_once, 6, plan), rtol=0, atol=1e-12)
    assert cache.lengths == [6 if layer in skipped else 9 for layer in range(3)]
    assert cache.length == 6
    verified = model(draft, cache, 6)
    torch.testing.assert_close(verified, model(torch.cat((text, draft), 1))[:, 6:], rtol=0, atol=1e-12)


@both_families
def test_feeding_the_whole_text_again_replaces_it(family):
    model, text = small_model(family), torch.arange(9)[None]
    cache = model.new_cache(CAPACITY)
    model(text, cache, 0)
    before = held(cache, 9)
    torch.testing.assert_close(model(text, cache, 0), model(text), rtol=0, atol=1e-12)
    assert cache.length == 9
    assert all(torch.equal(a, b) for a, b in zip(before, held(cache, 9), strict=True))


@both_families
def test_a_prompt_of_several_prefill_chunks_equals_one_pass(family):
    model = small_model(family, max_position_embeddings=2048)
    text = (torch.arange(1100) * 7 % VOCAB)[None]
    cache = model.new_cache(1101)
    model.prefill(text, cache)
    after = model(torch.tensor([[3]]), cache, 1100)
    whole = model(torch.cat((text, torch.tensor([[3]])), 1))
    torch.testing.assert_close(after, whole[:, -1:], rtol=0, atol=1e-9)


def test_a_write_that_leaves_a_hole_is_refused():
    model = small_model("llama")
    cache = model.new_cache(CAPACITY)
    model(torch.arange(4)[None], cache, 0)
    with pytest.raises(ValueError, match="writing at 5 leaves a hole after 4 entries"):
        model(torch.tensor([[1]]), cache, 5)
    cache.truncate(2)
    with pytest.raises(ValueError, match="writing at 3 leaves a hole after 2 entries"):
        model(torch.tensor([[1]]), cache, 3)
    with pytest.raises(ValueError, match="layer 0: writing at -1 leaves a hole"):
        model(torch.tensor([[1]]), cache, -1)


def test_a_target_that_goes_on_after_its_draft_without_its_own_entries_is_refused():
    """A skipped attention leaves its layer behind: the full model cannot read on as if nothing were missing."""
    model = small_model("llama")
    cache = model.new_cache(CAPACITY)
    model(torch.arange(4)[None], cache, 0)
    model(torch.tensor([[1]]), cache, 4, LayerPlan.skipping(3, attention=[1], mlp=[]))
    with pytest.raises(ValueError, match="layer 1: writing at 5 leaves a hole after 4 entries"):
        model(torch.tensor([[1]]), cache, 5)


def test_a_write_beyond_the_capacity_is_refused():
    model = small_model("gemma2")
    cache = model.new_cache(4)
    model(torch.arange(4)[None], cache, 0)
    with pytest.raises(ValueError, match="position 4 is outside the cache's 4 positions"):
        model(torch.tensor([[1]]), cache, 4)


def test_truncating_beyond_the_end_changes_nothing():
    model = small_model("llama")
    cache = model.new_cache(CAPACITY)
    model(torch.arange(4)[None], cache, 0)
    cache.truncate(9)
    assert cache.lengths == [4, 4, 4]


def test_tokens_without_a_cache_stand_at_the_beginning():
    with pytest.raises(ValueError, match="start must be 0"):
        small_model("llama")(torch.tensor([[1]]), None, 3)
