"""Functions of rows as a GPU computes them: reductions in two levels, and compiled code."""

import math
from collections.abc import Callable
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from decoding import rows
from decoding.race import race_at
from decoding.rows import ADDED, COMPARED, by_compiled_code, first_least, running_sums
from decoding.sampling import probabilities

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
    monkeypatch.setattr(rows, "NOT_COMPILED", set())
    monkeypatch.setattr(rows, "compiled", Mock(side_effect=RuntimeError("no\n Triton")))
    given = torch.empty(2, 9, device="meta"), torch.empty(2, dtype=torch.int64, device="meta")
    for _ in range(2):
        assert rows.compute(race_at, *given).shape == (2,)
    assert caplog.messages == ["[race_at runs uncompiled: RuntimeError: no Triton]"]
