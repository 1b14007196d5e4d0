"""``distribution`` equals transformers' processors, row by row, also at the edges; and rows are
computed on a GPU as on a CPU.
"""

import math
from collections.abc import Callable
from functools import partial
from unittest.mock import Mock

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from decoding.race import race_at
from decoding.randomness import inverse_cdf
from decoding.rows import (
    ADDED,
    COMPARED,
    by_compiled_code,
    compute,
    first_least,
    running_sums,
)
from decoding.sampling import SamplingParams, distribution, probabilities
from tests.refusal import refusal

VOCAB = 8
scores = st.sampled_from([-math.inf, -20.0, -3.0, -1.0, -0.5, 0.0, 0.25, 1.0, 1.0, 2.0, 7.5, 30.0])
# without ties under every penalty
DISTINCT = [-math.inf, -20.0, -3.0, -1.1, -0.5, 0.0, 0.25, 1.0, 2.0, 3.1, 7.5, 30.0]
rows = st.lists(scores, min_size=VOCAB, max_size=VOCAB).filter(lambda row: max(row) > -math.inf)
contexts = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=6)
params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.05, 0.5, 0.7, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 2, 5, VOCAB, 100]),
    top_p=st.sampled_from([1e-6, 0.1, 0.5, 0.9, 0.999999, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.7]),
    frequency_penalty=st.sampled_from([0.0, 0.3, -0.7]),
    presence_penalty=st.sampled_from([0.0, 1.1, -0.9]),
)


def transformers_distribution(
    row: list[float], context: list[int], params: SamplingParams
) -> Tensor:
    """Probabilities by transformers' processors, in the order of its ``generate``, in float64; and
    OpenAI's penalties, which it has not.
    """

    def subtract_penalties(ids: Tensor, scores: Tensor) -> Tensor:
        counts = torch.bincount(ids[0], minlength=VOCAB).double()
        return scores - params.frequency_penalty * counts - params.presence_penalty * counts.sign()

    processors = [
        RepetitionPenaltyLogitsProcessor(params.repetition_penalty),
        subtract_penalties,
        TemperatureLogitsWarper(params.temperature),
        *([TopKLogitsWarper(params.top_k)] if params.top_k else []),
        *([TopPLogitsWarper(params.top_p)] if params.top_p < 1 else []),
        *([MinPLogitsWarper(params.min_p)] if params.min_p else []),
    ]
    logits = torch.tensor([row], dtype=torch.float64)
    return LogitsProcessorList(processors)(torch.tensor([context]), logits).softmax(-1)[0]


@settings(max_examples=250, derandomize=True, deadline=None)
@given(
    row=rows | st.permutations(DISTINCT).map(lambda row: row[:VOCAB]),
    context=contexts,
    params=params,
)
def test_a_distribution_is_that_of_transformers_processors(
    row: list[float], context: list[int], params: SamplingParams
) -> None:
    """Token by token; sorted where equal scores may lie on the edge of top-p, since either may
    stay.
    """
    ours = distribution(torch.tensor([row], dtype=torch.float64), torch.tensor(context), params)[0]
    theirs = transformers_distribution(row, context, params)
    if not set(row) <= set(DISTINCT) or len(set(row)) < VOCAB:
        ours, theirs = ours.sort().values, theirs.sort().values
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


@given(row=rows, context=contexts)
@settings(derandomize=True, deadline=None)
def test_temperature_zero_is_exactly_one_hot_at_the_first_largest_logit(
    row: list[float], context: list[int]
) -> None:
    probs = distribution(torch.tensor([row]), torch.tensor(context), SamplingParams(0.0))[0]
    assert probs.tolist() == [float(token == row.index(max(row))) for token in range(VOCAB)]


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str
)
@given(row=rows, temperature=st.sampled_from([1e-3, 1e-10, 1e-30, 5e-324]))
@settings(derandomize=True, deadline=None)
def test_a_temperature_towards_zero_tends_to_greedy_and_never_to_nan(
    dtype: torch.dtype, row: list[float], temperature: float
) -> None:
    """Ties share the probability evenly in the limit; without ties it is greedy decoding's
    one-hot. Half-precision logits give float32 probabilities.
    """
    best = torch.tensor(row) == max(row)
    logits = torch.tensor([row], dtype=dtype)
    probs = distribution(logits, torch.tensor([0]), SamplingParams(temperature))[0]
    expected = (best / best.sum()).to(torch.promote_types(dtype, torch.float32))
    torch.testing.assert_close(probs, expected, rtol=0, atol=1e-7)


@given(row=rows, params=params, forbidden=st.sets(st.integers(0, VOCAB - 1), min_size=1))
@settings(derandomize=True, deadline=None)
def test_a_forbidden_token_has_probability_zero_and_the_others_are_filtered_without_it(
    row: list[float], params: SamplingParams, forbidden: set[int]
) -> None:
    """Forbidding acts before the filters: top-k 2 keeps the two likeliest of the allowed tokens."""
    allowed = torch.tensor([token not in forbidden for token in range(VOCAB)])
    left = [score if token not in forbidden else -math.inf for token, score in enumerate(row)]
    assume(max(left) > -math.inf)
    ours = distribution(torch.tensor([row]), torch.tensor([0]), params, allowed[None])
    theirs = distribution(torch.tensor([left]), torch.tensor([0]), params)
    assert ours[0, sorted(forbidden)].tolist() == [0.0] * len(forbidden)
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(
    ("row", "allowed"),
    [
        ([1.0, math.nan], [True, True]),
        ([1.0, math.inf], [True, True]),
        ([1.0, 2.0], [False, False]),
        ([-math.inf, 0.5], [True, False]),
    ],
    ids=str,
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_with_a_non_finite_number_or_without_a_possible_token_is_all_zeros(
    row: list[float], allowed: list[bool], temperature: float
) -> None:
    """And the row beside it is a distribution."""
    logits, masks = torch.tensor([row, [1.0, 0.5]]), torch.tensor([allowed, [True, True]])
    found = distribution(logits, torch.tensor([0, 0]), SamplingParams(temperature), masks)
    assert found[0].tolist() == [0.0, 0.0] and found[1].sum().item() == pytest.approx(1.0)


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": math.nan},
        {"top_k": -1},
        {"top_k": 1.5},
        {"top_p": 0.0},
        {"top_p": math.nan},
        {"min_p": math.nan},
        {"repetition_penalty": math.nan},
        {"frequency_penalty": 2.5},
        {"presence_penalty": math.nan},
    ],
    ids=str,
)
def test_a_parameter_outside_its_range_is_refused_by_name(wrong: dict[str, float]) -> None:
    assert next(iter(wrong)).replace("_", "-") in refusal(SamplingParams, **wrong)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(0.7),
        *(SamplingParams(1.0, top_p=top_p) for top_p in (0.05, 0.5, 0.9, 0.99, 0.9999999)),
        *(SamplingParams(temperature, top_p=0.9) for temperature in (0.1, 0.7, 3.0, 50.0)),
        SamplingParams(0.7, top_k=40),
        SamplingParams(5.0, top_k=9000, top_p=0.8),
        SamplingParams(1.0, min_p=0.001),
        SamplingParams(2.0, min_p=1e-9),
        SamplingParams(0.7, 50, 0.9, 0.05),
        SamplingParams(3.0, 0, 0.95, 0.01),
    ],
    ids=str,
)
def test_a_cpu_draws_from_the_distribution_of_a_gpu(params: SamplingParams) -> None:
    """On a CPU the filters see few tokens of a large vocabulary, on a GPU all of them."""
    generator = torch.Generator().manual_seed(3)
    logits = 4 * torch.randn(4, 49152, generator=generator, dtype=torch.float64)
    logits[3, 5] = math.nan
    found = distribution(logits, torch.tensor([0] * 4), params)
    top_p = params.top_p if params.top_p < 1 else None
    filters = float(params.top_k) or None, top_p, params.min_p or None
    of_gpu = probabilities(logits, params.temperature or None, *filters)
    torch.testing.assert_close(found, of_gpu, rtol=1e-9, atol=0)
    if top_p and params == SamplingParams(params.temperature, top_p=top_p):
        probs = (logits[:3] / params.temperature).softmax(-1)
        kept = probs.where(found[:3] > 0, 0).sum(-1)
        assert (kept >= top_p).all() and (kept - top_p < probs.amax(-1)).all()


def test_the_tokens_of_top_p_do_not_depend_on_the_number_of_threads() -> None:
    """The top-p lies between torch's sums on one and on two threads, so that these would decide."""

    def on_threads(count: int, work: Callable[[], Tensor]) -> Tensor:
        torch.set_num_threads(count)
        return work()

    threads = torch.get_num_threads()
    for seed in range(20):
        weights = torch.rand(200_000, generator=torch.Generator().manual_seed(seed)) / 1e6
        weights[:2] = torch.tensor([0.11, 0.9])
        top_p = sum(0.9 / on_threads(count, weights.sum).item() for count in (1, 2)) / 2
        params = SamplingParams(1.0, top_p=top_p)
        drawn = partial(distribution, weights.log()[None], torch.tensor([0]), params)
        assert torch.equal(on_threads(1, drawn), on_threads(2, drawn))
    torch.set_num_threads(threads)


# Rows as a GPU computes them: reductions in two levels, and compiled code

SIZES = (1, COMPARED - 1, COMPARED + 1, 3 * COMPARED, ADDED + 1, 2 * ADDED, 128256)


@pytest.mark.parametrize("size", SIZES)
def test_the_first_of_the_least_numbers_is_that_of_argmin(size: int) -> None:
    """With many ties, and with infinities; a row of these gives a place within the row."""
    numbers = torch.randint(9, (4, size), generator=torch.Generator().manual_seed(size)).double()
    numbers[0, numbers[0] > 4] = math.inf
    numbers[1] = -numbers[1]
    numbers[3] = math.inf
    found = first_least(numbers)
    assert torch.equal(found[:3], numbers[:3].argmin(-1)) and 0 <= found[3] < size


@pytest.mark.parametrize("size", SIZES)
def test_running_sums_are_cumulative_and_never_fall(size: int) -> None:
    """Numbers without rounding errors have the sums of torch. The sums of others do not fall, and
    stay where a number is 0.
    """
    whole = torch.randint(9, (3, size), generator=torch.Generator().manual_seed(size)).double()
    assert torch.equal(running_sums(whole), whole.cumsum(-1))
    steps = running_sums(whole / 7).diff()
    assert (steps >= 0).all() and not steps[whole[:, 1:] == 0].any()


@pytest.mark.parametrize(
    ("function", "more"),
    [
        (probabilities, (None, None, None, None)),
        (probabilities, (0.7, 5.0, 0.9, 0.1)),
        (race_at, (torch.arange(5),)),
    ],
    ids=["greedy", "filters", "race"],
)
@torch.inference_mode()
def test_sampling_is_one_graph_for_any_rows_and_numbers(
    function: Callable[..., Tensor], more: tuple[object, ...]
) -> None:
    torch._dynamo.reset()
    backend = Mock(side_effect=lambda graph, inputs: graph.forward)
    code = torch.compile(function, fullgraph=True, dynamic=False, backend=backend)
    probs = torch.rand(5, 300, generator=torch.Generator().manual_seed(2))
    for count in (5, 1, 3):
        given = [
            each[:count].clone() if isinstance(each, Tensor) else each and each / count
            for each in more
        ]
        found = by_compiled_code(code, probs[:count], *given)
        assert torch.equal(found, function(probs[:count], *given))
    assert backend.call_count == 1


def test_a_function_that_does_not_compile_is_called_and_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A lack of memory is no failure of the compiler."""
    monkeypatch.setattr("decoding.rows.NOT_COMPILED", set())
    monkeypatch.setattr("decoding.rows.compiled", Mock(side_effect=RuntimeError("no\n Triton")))
    given = torch.empty(2, 9, device="meta"), torch.empty(2, dtype=torch.int64, device="meta")
    for _ in range(2):
        assert compute(race_at, *given).shape == (2,)
    monkeypatch.setattr("decoding.rows.compiled", Mock(side_effect=torch.OutOfMemoryError))
    with pytest.raises(torch.OutOfMemoryError):
        compute(inverse_cdf, *given)
    assert caplog.messages == ["[race_at runs uncompiled: RuntimeError: no Triton]"]
