"""A static step computes what the ordinary one does, whoever replays it, and is given up where it does not."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from decoding.costs import LONGEST_DRAFT
from decoding.drafters import ModelDrafter
from decoding.policies import FixedLength
from decoding.randomness import SeededRandomness
from decoding.sampling import SamplingParams
from decoding.speculate import speculate
from decoding.text import Rules, Text
from model import Decoder, LayerPlan
from model.fast import graphs
from model.fast.graphs import ROWS, GraphedDecoder, StaticStep, spans_of
from model.fast.prepare import fuse
from model.fast.recorder import Recorder, first_cause
from model.fast.shared_keys import PART, SharedKeys, joined
from model.layers import attend, sight
from tests.laws import plans, tiny_model
from tests.pretended import PretendedRecorder

FAMILIES = ["llama", "gemma2"]
VOCAB = 19


def graphed(family: str = "llama", recorder: Any = None, layers: int = 3) -> tuple[Decoder, GraphedDecoder]:
    """The same model, as it is and with static steps."""
    ordinary, prepared = (tiny_model(family, vocab=VOCAB, layers=layers) for _ in range(2))
    return ordinary, GraphedDecoder(fuse(prepared), recorder)


@pytest.mark.parametrize("recorder", [None, PretendedRecorder], ids=["unrecorded", "recorded"])
@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=20, derandomize=True, deadline=None)
@given(
    steps=st.lists(st.tuples(plans(), st.sampled_from([1, 2, 5, ROWS, ROWS + 1])), min_size=1, max_size=4),
    prompt=st.integers(1, 9),
    seed=st.integers(0, 99),
)
@torch.inference_mode()
def test_static_steps_give_the_ordinary_logits_at_any_position_and_plan(
    family: str, recorder: Any, steps: list[tuple[LayerPlan, int]], prompt: int, seed: int
) -> None:
    """Rejected entries lie beyond the length; two caches of one model are written in turns."""
    ordinary, static = graphed(family, recorder and recorder())
    generator = torch.Generator().manual_seed(seed)
    caches = ordinary.new_cache(64), static.new_cache(64), static.new_cache(64)
    models = ordinary, static, static
    text = torch.randint(VOCAB, (1, prompt), generator=generator)
    for model, cache in zip(models, caches, strict=True):
        model.prefill(text, cache)
    for plan, count in steps:
        for tokens, under in ((torch.randint(VOCAB, (1, count), generator=generator), plan), (text[:, :1], None)):
            expected, *found = (
                model(tokens, cache, prompt, under) for model, cache in zip(models, caches, strict=True)
            )
            for logits in found:
                torch.testing.assert_close(logits, expected, rtol=0, atol=1e-10)
            assert caches[0].lengths == caches[1].lengths == caches[2].lengths
            if under is plan:
                for cache in caches:
                    cache.truncate(prompt)
        prompt += 1
    assert static.trouble is None and static.row_invariant


@pytest.mark.parametrize("family", FAMILIES)
def test_the_loop_writes_the_same_text_with_static_steps(family: str) -> None:
    """And really with them: plain steps, drafts and verifications, none of them given up."""
    texts, models = [], graphed(family, PretendedRecorder())
    for model in models:
        cache = model.new_cache(64)
        with torch.inference_mode():
            model.prefill(torch.tensor([[1, 2, 3]]), cache)
        drafter = ModelDrafter(model, cache, LayerPlan.early_exit(model.num_layers, 1))
        params, randomness = SamplingParams(temperature=0.9), SeededRandomness(5, model.device)
        text = Text([1, 2, 3, 4], Rules(40), model)
        rounds = speculate(model, cache, text, drafter, FixedLength(3), params, randomness)
        texts.append([token for round in rounds for token in round.emitted])
    assert texts[0] == texts[1]
    static = models[1]
    assert static.trouble is None
    assert set(static.arenas[0].steps) == {drafter.plan, LayerPlan.full(static.num_layers)}


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_a_rows_bits_depend_on_nothing_but_what_it_sees(family: str) -> None:
    """Not on its company, not on the cache's capacity and so not on the span, across the end of a part of keys."""
    _, static = graphed(family, layers=2)
    text = torch.randint(VOCAB, (1, PART + 40), generator=torch.Generator().manual_seed(0))
    logits, start = {}, PART - 20
    for capacity in (PART + 40, 3 * PART, 8 * PART):
        for count in (1, 5, ROWS):
            cache = static.new_cache(capacity)
            static.prefill(text[:, :start], cache)
            steps = [static(text[:, at : at + count], cache, at) for at in range(start, start + 32, count)]
            logits[capacity, count] = torch.cat(steps, 1)[:, :32]
    first, *others = logits.values()
    assert all(torch.equal(first, other) for other in others)


@settings(max_examples=40, derandomize=True, deadline=None)
@given(
    start=st.integers(0, 3 * PART - 4),
    window=st.none() | st.integers(1, 2 * PART),
    soft_cap=st.sampled_from([None, 50.0]),
    seed=st.integers(0, 99),
)
def test_shared_keys_give_ordinary_attention(start: int, window: int | None, soft_cap: float | None, seed: int) -> None:
    generator, count, span = torch.Generator().manual_seed(seed), 4, 3 * PART
    q = torch.randn(1, 4, count, 8, generator=generator, dtype=torch.float64)
    k, v = torch.randn(2, 1, 2, span, 8, generator=generator, dtype=torch.float64)
    end = start + count
    sees = sight(start, count, window, 2, q)
    how = {"scale": 0.7, "soft_cap": soft_cap}
    expected = attend(q, k[:, :, :end], v[:, :, :end], sees, **how)
    shared = SharedKeys.of(torch.arange(start, end), span, window, 2, q.dtype)
    torch.testing.assert_close(shared.attend(q, k, v, **how), expected, rtol=1e-9, atol=1e-12)


@given(st.integers(1, 40), st.integers(0, 9))
def test_zeros_after_the_last_part_change_no_bit_of_the_sum(parts: int, more: int) -> None:
    numbers = torch.randn(parts, 64, generator=torch.Generator().manual_seed(parts))
    assert torch.equal(joined(numbers), joined(torch.cat((numbers, torch.zeros(more, 64)))))


@given(st.integers(1, 9 * PART))
def test_spans_double_up_to_the_whole_parts_that_hold_a_text(positions: int) -> None:
    spans = spans_of(positions)
    assert spans[0] == PART and spans[-1] - PART < positions <= spans[-1]
    assert all(wide <= 2 * narrow and wide % PART == 0 for narrow, wide in pairwise(spans))


@torch.inference_mode()
def test_texts_of_one_process_share_what_was_recorded() -> None:
    """The next cache lies where one was that nobody holds any more, and begins empty; a larger one is recorded anew."""
    recorder = PretendedRecorder()
    _, static = graphed(recorder=recorder)
    cache, token = static.new_cache(40), torch.tensor([[1]])
    first = static(token, cache, 0)
    assert recorder.recorded == 1
    other = static.new_cache(40)
    static(token, other, 0)
    assert recorder.recorded == 2 and len(static.arenas) == 2
    del cache
    again = static.new_cache(PART)
    assert again.lengths == [0] * static.num_layers and not any(each.any() for each in (*again.keys, *again.values))
    assert torch.equal(static(token, again, 0), first) and recorder.recorded == 2
    del again, other
    static(token, static.new_cache(PART + 1), 0)
    assert recorder.recorded == 4 and len(static.arenas) == 1


@torch.inference_mode()
def test_recording_leaves_the_entries_of_a_text_as_they_were() -> None:
    """Also at the very end of its memory, where the recorded steps are tried."""
    _, static = graphed(recorder=PretendedRecorder())
    cache = static.new_cache(PART)
    static.prefill(torch.randint(VOCAB, (1, PART - 1), generator=torch.Generator().manual_seed(1)), cache)
    before = [entries.clone() for entries in (*cache.keys, *cache.values)]
    static.record(cache, LayerPlan.early_exit(static.num_layers, 1))
    for kept, entries in zip(before, (*cache.keys, *cache.values), strict=True):
        assert torch.equal(kept[:, :, :PART], entries[:, :, :PART])


def test_a_static_step_that_computes_something_else_is_never_used(monkeypatch: pytest.MonkeyPatch) -> None:
    compute = StaticStep.compute

    def turned(step: StaticStep) -> None:
        compute(step)
        step.desk.logits.copy_(step.desk.logits.flip(-1))

    monkeypatch.setattr(StaticStep, "compute", turned)
    check_gives_up("away from the ordinary step's")


def test_a_static_step_that_gives_nan_is_never_used(monkeypatch: pytest.MonkeyPatch) -> None:
    compute = StaticStep.compute

    def broken(step: StaticStep) -> None:
        compute(step)
        step.desk.logits.fill_(math.nan)

    monkeypatch.setattr(StaticStep, "compute", broken)
    check_gives_up("away from the ordinary step's")


def test_a_static_step_that_writes_to_wrong_places_is_never_used(monkeypatch: pytest.MonkeyPatch) -> None:
    compute = StaticStep.compute

    def misplaced(step: StaticStep) -> None:
        step.desk.start -= 1
        compute(step)

    monkeypatch.setattr(StaticStep, "compute", misplaced)
    check_gives_up("away from the ordinary step's")


def test_a_step_that_cannot_be_computed_is_never_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(step: StaticStep) -> None:
        raise RuntimeError("no kernel for this")

    monkeypatch.setattr(StaticStep, "compute", fails)
    check_gives_up("no kernel for this")


@torch.inference_mode()
def check_gives_up(reason: str) -> None:
    """All steps are the prepared model's own, to the last bit."""
    _, static = graphed()
    caches = static.model.new_cache(16), static.new_cache(16)
    for start in range(3):
        tokens = torch.tensor([[start]])
        assert torch.equal(static(tokens, caches[1], start), static.model(tokens, caches[0], start))
    assert static.trouble is not None and reason in static.trouble


class Failing(PretendedRecorder):
    """Fails as a GPU does: ending a recording that was torn off fails as well."""

    def record(self, function: Callable[[], None]) -> Callable[[], None]:
        try:
            raise RuntimeError("operation not permitted\nwhen stream is capturing")
        finally:
            raise RuntimeError("the recording was torn off")


@torch.inference_mode()
def test_where_recording_fails_static_steps_go_on_unrecorded_and_the_first_cause_is_told() -> None:
    _, static = graphed(recorder=Failing())
    _, sound = graphed(recorder=PretendedRecorder())
    caches = static.new_cache(16), sound.new_cache(16)
    for start in range(3):
        tokens = torch.tensor([[start]])
        assert torch.equal(static(tokens, caches[0], start), sound(tokens, caches[1], start))
    assert static.trouble == "steps are not recorded as CUDA graphs: operation not permitted"


@torch.inference_mode()
def test_a_step_whose_rows_depend_on_their_company_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    compute = StaticStep.compute

    def varying(step: StaticStep) -> None:
        compute(step)
        step.desk.logits.mul_(1 + 1e-6 * step.desk.count)

    monkeypatch.setattr(StaticStep, "compute", varying)
    _, static = graphed()
    static(torch.tensor([[1]]), static.new_cache(16), 0)
    assert static.trouble is None and not static.row_invariant and "alone" in static.why_rows_vary


@torch.inference_mode()
def test_a_static_step_leaves_no_hole_and_does_not_outgrow_the_cache() -> None:
    _, static = graphed()
    cache, token = static.new_cache(8), torch.tensor([[1]])
    for start in range(3):
        static(token, cache, start)
    with pytest.raises(ValueError, match="leaves a hole"):
        static(token, cache, 5)
    with pytest.raises(ValueError, match="outside the cache"):
        static(torch.tensor([[1] * 6]), cache, 3)


@torch.inference_mode()
def test_neither_steps_nor_caches_are_kept_alive_by_each_other() -> None:
    _, static = graphed()
    cache = static.new_cache(8)
    static(torch.tensor([[1]]), cache, 0)
    assert len(static.lent) == 1
    gc.collect()
    gc.disable()
    try:
        del cache
        assert len(static.lent) == 0
        dead = static.arenas.pop().steps.popitem()[1]
        assert len(dead) == 1
    finally:
        gc.enable()


class Stream:
    """Stands for a CUDA stream."""

    def wait_stream(self, other: Stream) -> None: ...


class Cuda:
    """Stands for ``torch.cuda`` and a graph: it knows the current stream, and what is diverted to a pool."""

    def __init__(self) -> None:
        self.stream_now, self.diverted, self.log = Stream(), False, []
        self.Stream, self.CUDAGraph = Stream, lambda: self

    def graph_pool_handle(self) -> tuple[int, int]:
        return (0, 1)

    def device(self, device: torch.device) -> Any:
        return nullcontext()

    def current_stream(self) -> Stream:
        return self.stream_now

    def set_stream(self, stream: Stream) -> None:
        self.stream_now = stream

    def stream(self, stream: Stream) -> Any:
        @contextmanager
        def context() -> Any:
            before, self.stream_now = self.stream_now, stream
            yield
            self.stream_now = before  # as torch's own: not where something was raised

        return context()

    def capture_begin(self, pool: tuple[int, int]) -> None:
        self.diverted, self.torn = True, False

    def capture_end(self) -> None:
        if self.torn:
            raise RuntimeError("the recording was torn off")
        self.diverted = False

    def replay(self) -> None:
        self.log.append("replayed")

    def end_allocating(self, device: int, pool: tuple[int, int]) -> None:
        if not self.diverted:
            raise RuntimeError("not currently recording")
        self.diverted = False


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    made = Cuda()
    monkeypatch.setattr("model.fast.recorder.torch.cuda", made)
    monkeypatch.setattr("model.fast.recorder.torch._C._cuda_endAllocateToPool", made.end_allocating, raising=False)
    return made


def test_a_recorder_runs_once_before_it_records_and_comes_back_to_the_stream_it_was_on(cuda: Cuda) -> None:
    recorder, before = Recorder(torch.device("cuda", 0)), cuda.stream_now
    replay = recorder.record(lambda: cuda.log.append((cuda.stream_now is recorder.stream, cuda.diverted)))
    assert cuda.log == [(True, False), (True, True)]
    assert cuda.stream_now is before and not cuda.diverted
    replay()
    assert cuda.log[-1] == "replayed"


@pytest.mark.parametrize("at", [1, 2])
def test_a_failing_recording_leaves_stream_and_allocator_and_tells_what_went_wrong_first(cuda: Cuda, at: int) -> None:
    recorder, before, calls = Recorder(torch.device("cuda", 0)), cuda.stream_now, []

    def function() -> None:
        calls.append(1)
        if len(calls) == at:
            cuda.torn = True
            raise RuntimeError("no such kernel")

    with pytest.raises(RuntimeError, match=r"^no such kernel$"):
        recorder.record(function)
    assert cuda.stream_now is before and not cuda.diverted


def test_the_first_cause_is_the_innermost_error() -> None:
    try:
        try:
            raise ValueError("first\nand more")
        except ValueError:
            raise RuntimeError("second") from None
    except RuntimeError as error:
        assert first_cause(error) == "first"


def test_a_step_has_rows_for_the_longest_draft_and_the_token_after_it() -> None:
    assert LONGEST_DRAFT < graphs.ROWS
