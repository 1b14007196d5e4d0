"""CUDA graphs, recorded by a pretended torch.cuda, and functions of rows as graphs of the fake
device.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import count, product
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from decoding.randomness import inverse_cdf, race_at
from decoding.sampling import probabilities
from model.fast import graphs
from model.fast.graphs import Launcher, Recorder, compile_function
from tests import fake_device

THERE = torch.device(fake_device.NAME, 0)


class PretendedCuda:
    """The parts of ``torch.cuda`` that record graphs; the end of an interrupted capture fails."""

    def __init__(self) -> None:
        self.device_now, self.current, self.recorded_on = 0, None, []
        self.numbers = count(1)  # of streams; 0 is the default
        self.CUDAGraph, self.stream = Mock(), lambda stream: nullcontext()
        self.graph_pool_handle = lambda: "pool"
        self.current_stream = lambda: self.current

    def Stream(self, device: torch.device) -> Any:
        return Mock(device=device, number=next(self.numbers))

    def set_stream(self, stream: Any) -> None:
        self.current = stream

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        before, self.device_now = self.device_now, device.index
        self.current = Mock(device=device, number=0)
        yield
        self.device_now = before

    @contextmanager
    def graph(self, graph: Any, pool: str, stream: Any) -> Iterator[None]:
        self.recorded_on.append((pool, stream, self.device_now))
        before, self.current = self.current, stream
        try:
            yield
        except BaseException:  # as torch's end of a capture does, whatever ended it
            raise RuntimeError("the capture is invalid")  # noqa: B904
        self.current = before


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> PretendedCuda:
    pretended = PretendedCuda()
    monkeypatch.setattr(graphs.torch, "cuda", pretended)
    monkeypatch.setattr(graphs.torch, "zeros", lambda *shape, device: None)
    return pretended


def test_graphs_are_recorded_on_a_stream_of_the_models_device_used_for_nothing_else(
    cuda: PretendedCuda,
) -> None:
    """And the first, which stays, is a tiny one: else a pool would die with its last graph."""
    record = Recorder(torch.device("cuda", 1))
    record(lambda: None)
    assert cuda.recorded_on == [("pool", record.stream, 1)] * 2
    assert record.stream.device.index == 1 and record.warm_up_stream is not record.stream
    assert record.smallest is not None and cuda.device_now == 0


@pytest.mark.parametrize("raised", [KeyboardInterrupt, ValueError])
def test_an_invalid_capture_restores_the_stream_and_loses_no_ctrl_c(
    cuda: PretendedCuda, raised: type[BaseException]
) -> None:
    record = Recorder(torch.device("cuda", 1))
    with pytest.raises(KeyboardInterrupt if raised is KeyboardInterrupt else RuntimeError):
        record(Mock(side_effect=[None, raised]))
    assert cuda.current.number == 0, "the stream from before"


@pytest.fixture
def nothing_compiled() -> Iterator[None]:
    """Before the test and after it."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("nothing_compiled")
def test_more_versions_are_compiled_than_torch_allows_by_default() -> None:
    """Each capacity, plan and number of rows is one: the ninth would end the fast steps."""
    multiply = compile_function(lambda x, number: x * number, backend="eager")
    for number in range(1, torch._dynamo.config.recompile_limit + 4):
        assert multiply(torch.ones(number), number).sum() == number**2


@pytest.mark.parametrize(
    ("function", "more"),
    [
        (probabilities, (None, None, None, None)),
        (probabilities, ("number", None, None, None)),
        (probabilities, ("number", "number", "number", "number")),
        (race_at, (torch.int64,)),
        (inverse_cdf, (torch.float64,)),
    ],
    ids=["greedy", "temperature", "filters", "race", "ratio"],
)
@pytest.mark.usefixtures("nothing_compiled")
@torch.inference_mode()
def test_sampling_compiles_into_one_graph(
    function: Callable[..., Tensor], more: tuple[Any, ...]
) -> None:
    """The branches of a GPU, on the meta device, which has no numbers to read."""
    arguments = [
        torch.empty((), dtype=torch.float64, device="meta")
        if each == "number"
        else each and torch.empty(1, dtype=each, device="meta")
        for each in more
    ]
    rows = torch.empty(1, 50, device="meta")
    found = compile_function(function, backend="aot_eager")(rows, *arguments)
    assert found.shape == (rows.shape if function is probabilities else (1,))


@pytest.fixture
def launch(monkeypatch: pytest.MonkeyPatch) -> Launcher:
    """Launcher of the fake device, which compiles nothing."""
    monkeypatch.setattr(graphs, "compile_function", lambda function: function)
    return Launcher(fake_device.record)


@torch.inference_mode()
def test_a_launched_function_gives_its_own_results_for_any_rows_and_numbers(
    launch: Launcher,
) -> None:
    logits = torch.randn(19, 11, generator=torch.Generator().manual_seed(0))
    keys = torch.arange(len(logits))
    for numbers, rows in product(
        [
            (0.7, 0.9, None, None),
            (1.3, 0.9, None, 4.0),
            (1.3, 0.9, None, 100.0),
            (0.7, None, None, None),
        ],
        [1, 5, len(logits)],
    ):
        found = launch(probabilities, logits[:rows].to(THERE), *numbers)
        expected = probabilities(logits[:rows], *numbers)
        torch.testing.assert_close(found.cpu(), expected)
        drawn = launch(race_at, found, keys[:rows])
        assert drawn.tolist() == race_at(expected, keys[:rows]).tolist()
    assert all(launch.graphs.values())


@torch.inference_mode()
def test_a_draw_is_from_probabilities_as_the_drafter_has_changed_them(launch: Launcher) -> None:
    keys = torch.tensor([5])
    for likeliest in range(9):
        probs = launch(probabilities, torch.ones(1, 9).to(THERE), 1.0, None, None, None)
        probs[0, likeliest] += 1e9
        assert launch(race_at, probs[0][None], keys).tolist() == [likeliest]


@pytest.mark.parametrize("trouble", ["compiler", "wrong numbers"])
@torch.inference_mode()
def test_a_function_that_cannot_be_launched_is_called_and_a_line_says_so(
    trouble: str, launch: Launcher, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def compile(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        if trouble == "compiler":
            raise torch._dynamo.exc.FailOnRecompileLimitHit("no\n more")
        return lambda *arguments: function(*arguments) / 2

    monkeypatch.setattr(graphs, "compile_function", compile)
    rows = torch.randn(2, 9)
    for _ in range(2):
        found = launch(probabilities, rows.to(THERE), 1.0, None, None, None)
        torch.testing.assert_close(found.cpu(), probabilities(rows, 1.0, None, None, None))
    said = capsys.readouterr().err
    assert said.startswith("[probabilities runs without a CUDA graph: ") and said.count("\n") == 1
