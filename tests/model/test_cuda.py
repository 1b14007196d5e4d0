"""Code of GPUs: on a GPU, by an interpreter, and compiled for a GPU that is absent.

Whole texts need a GPU: tokens, waits, memory. Each captured step is compared with the readable
blocks when it is made (``StaticDecoder``). One case of each kind runs by default, and the others
under ``-m prove``.

Triton's interpreter computes its product on a CPU. It is asked for by ``TRITON_INTERPRET=1`` before
Triton is imported, so it has a process of its own: ``python -m tests.model.test_cuda``.

``python -m tests.model.test_cuda SHAPE CAPABILITY DTYPE`` compiles for an absent GPU. It needs a
CUDA build of torch, and no driver. All tensors are fake: they have a shape and a device, but no
memory. Torch's compiler asks only for the device's properties, and Triton for its compute
capability. A library that is loaded before CUDA's (LD_PRELOAD) answers which device is current.
Every kernel is compiled to PTX. The process prints, of each graph of blocks and of functions, its
launches and the most numbers that one block of threads reduces.
"""

import json
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from functools import partial
from importlib import import_module
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from app.session import Session, load
from decoding import race, randomness, rows, sampling, verify
from model.cache import static_capacity
from model.config import parse_config
from model.decoder import Decoder
from model.fast import four_bits, gpu
from model.plan import LayerPlan
from model.quantise import Quantised, quantise
from tests.peak import peak_bytes

needs_gpu = pytest.mark.skipif(
    not torch.cuda.is_available(),
    reason="needs a CUDA device: run it on a machine with an NVIDIA GPU",
)
MODELS = ["smollm2-135m-instruct", "tiny-gemma2"]
PROMPT = "Why is the sky blue?"


def each(*cases: Any) -> list[Any]:
    """Cases of a test, of which the first one runs by default."""
    return [
        pytest.param(*case, marks=[pytest.mark.prove] * (at > 0)) for at, case in enumerate(cases)
    ]


def session_of(name: str = "smollm2-135m-instruct", **options: object) -> Session:
    """A session on the GPU, which compiles its own shapes."""
    torch._dynamo.reset()
    return load(name, device="cuda", max_new_tokens=24, seed=5, **options)


@needs_gpu
@pytest.mark.parametrize(
    ("draft", "name"), each(*product(["lowbit", "auto", "lookup", "exit"], MODELS))
)
def test_a_session_writes_plain_decodings_text(name: str, draft: str, smollm2: Path) -> None:
    """All steps are graphs, and all sampling is compiled."""
    session = session_of(name)
    for prompt, temperature in product([PROMPT, "I saw a fox. " * 30], [0, 0.8]):
        plain = session.write(prompt, draft="none", temperature=temperature)
        drafted = session.write(prompt, draft=draft, temperature=temperature)
        assert drafted.tokens == plain.tokens
    steps = session.slot.cache.static.steps.values()
    assert all(step.replay != step.compute for step in steps)
    assert session.model.trouble is None and not rows.NOT_COMPILED


@needs_gpu
@pytest.mark.parametrize(
    ("draft", "coupling"), each(*product(["lowbit", "lookup", "exit"], reversed(verify.RULES)))
)
def test_a_round_waits_for_the_device_once_under_every_rule(
    draft: str, coupling: str, smollm2: Path
) -> None:
    """To read the verdict; and torch counts the copy of a text's new tokens."""
    how = {"gamma": 4, "temperature": 0.8, "top_k": 50, "top_p": 0.9}
    session = session_of(draft=draft, coupling=coupling, **how)
    session.write(PROMPT)  # compiles and captures
    rounds = session.rounds(session.begin(session.encode(PROMPT)))
    next(rounds)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        count = len(list(rounds))
        torch.cuda.set_sync_debug_mode("default")
    assert count and len(told) <= count * (2 if draft == "lookup" else 1) + 1


@needs_gpu
@pytest.mark.parametrize("name", each(*((name,) for name in MODELS)))
def test_memory_stays_within_the_estimate_captures_included(name: str, smollm2: Path) -> None:
    session = session_of(name, draft="exit", temperature=0.8, top_k=50, top_p=0.9)
    prompt = "I saw a fox. " * 90
    count = len(session.encode(prompt))
    needed = session.memory(count + 24, count)
    allowed = needed.cache + needed.workspace + needed.buffers  # those of libraries
    assert peak_bytes(lambda: session.write(prompt), session.device) <= allowed


# Products by weights in four bits

COMMAND = [sys.executable, "-m", "tests.model.test_cuda"]
DTYPES = torch.float16, torch.bfloat16, torch.float32
SIZES = (8, 32), (40, 288), (33, 256), (16, 1024)


@torch.inference_mode()
def check(name: str, dtype: torch.dtype, size: int, columns: int, device: Any) -> None:
    """The product is that of the rounded weights, and a row's is that of the row alone."""
    kernel = import_module(f"model.fast.{name}")  # Triton is optional
    generator = torch.Generator().manual_seed(size)
    rounded = quantise(torch.randn(size, columns, generator=generator), 4)
    weight = Quantised(*(each.to(device) for each in rounded))
    x = torch.randn(2, 3, columns, generator=generator).to(device, dtype)
    bias = torch.randn(size, generator=generator).to(device, dtype)
    multiply = partial(four_bits.linear, kernel.multiply, kernel.pack(weight), bias)
    by_formula = torch.nn.functional.linear(
        x.double(), weight.dequantised(torch.float64), bias.double()
    )
    tolerance = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(
        multiply(x), by_formula.to(dtype), rtol=tolerance, atol=30 * tolerance
    )
    assert torch.equal(multiply(x[1:, 2:]), multiply(x)[1:, 2:])


def test_tritons_product_is_that_of_the_rounded_weights_and_of_each_row_alone() -> None:
    pytest.importorskip("triton", reason="Triton is on PyPI for Linux only")
    subprocess.run(COMMAND, env={**os.environ, "TRITON_INTERPRET": "1"}, check=True)


@needs_gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_gpus_products_are_those_of_the_rounded_weights_and_of_each_row_alone(
    dtype: torch.dtype,
) -> None:
    if four_bits.gpu_bits(torch.device("cuda", 0), dtype):
        name = "four_bits" if dtype == torch.bfloat16 else "triton_product"
        check(name, dtype, 64, 1024, "cuda")


# Compilation for an absent GPU

# answers of CUDA's runtime: device 0 is current, and any may become so
CUDA = """
int cudaGetDevice(int *device) { *device = 0; return 0; }
int cudaGetDeviceCount(int *count) { *count = 1; return 0; }
int cudaGetLastError(void) { return 0; }
int _ZN3c104cuda9GetDeviceEPa(signed char *device) { *device = 0; return 0; }
int _ZN3c104cuda14MaybeSetDeviceEa(signed char device) { return 0; }
int _ZN3c104cuda9SetDeviceEab(signed char device, _Bool force) { return 0; }
int _ZN3c104cuda14ExchangeDeviceEa(signed char device) { return 0; }
int _ZN3c104cuda19MaybeExchangeDeviceEa(signed char device) { return 0; }
"""
LAUNCH = re.compile(r"= torch\.ops\.\w+\.[\w.]+\(|extern_kernels\.\w+\(|aten\.\w+\(|\w+\.run\(")
GRAPHS: list[tuple[int, int]] = []  # launches of each graph, and the widest reduction of a block
FILTERS = (
    *((None, None, None, None), (0.7, None, None, None), (0.7, None, 0.9, None)),
    *((0.7, None, None, 0.1), (0.7, 50.0, None, None), (0.7, 50.0, 0.9, 0.1)),
)


def pretend(capability: int) -> None:
    """Make torch, its compiler and Triton believe in a GPU of a compute capability, such as 75."""
    from torch._inductor.fx_passes import joint_graph
    from triton.backends.compiler import GPUTarget

    joint_graph.lazy_init(torch.device("cpu"))  # before a GPU's tensors would be made for it
    properties = SimpleNamespace(
        major=capability // 10,
        minor=capability % 10,
        name="absent",
        multi_processor_count=40,
        total_memory=15 << 30,
        max_threads_per_multi_processor=1024,
        max_threads_per_block=1024,
        regs_per_multiprocessor=65536,
        shared_memory_per_block=48 << 10,
        shared_memory_per_block_optin=64 << 10,
        L2_cache_size=4 << 20,
        warp_size=32,
        gcnArchName="",
    )
    answers = {
        "is_available": True,
        "device_count": 1,
        "current_device": 0,
        "get_device_properties": properties,
        "get_device_capability": divmod(capability, 10),
        "get_compute_capability": capability,
        "set_device": None,
        "_exchange_device": 0,
        "_maybe_exchange_device": 0,
        "get_rng_state": torch.zeros(16),
        "set_rng_state": None,
        "synchronize": None,
    }
    interface = "torch._dynamo.device_interface.CudaInterface"
    replaced = {
        **{
            f"{place}.{name}": lambda *_, answer=answer, **__: answer
            for name, answer in answers.items()
            for place in ("torch.cuda", interface, f"{interface}.Worker")
        },
        "torch.accelerator.is_available": lambda: False,
        "triton.runtime.driver.driver._active": SimpleNamespace(
            get_current_target=lambda: GPUTarget("cuda", capability, 32),
            get_current_device=lambda: 0,
            get_active_torch_device=lambda: torch.device("cuda"),
        ),
        "torch._inductor.runtime.triton_helpers.set_driver_to_gpu": Mock(),
        "torch._inductor.fx_passes.joint_graph.lazy_init": Mock(),
        # these compute with real tensors of the device
        "torch._inductor.fx_passes.pad_mm.can_pad": lambda *_: False,
        "torch._inductor.config.joint_graph_constant_folding": False,
        "torch._inductor.config.fx_graph_cache": False,
        "torch._inductor.graph.GraphLowering.compile_to_module": compile_kernels,
    }
    for name, value in replaced.items():
        patch(name, value, create=True).start()


def compile_graph(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
    """Compile a graph's kernels, and return what runs it as it is: a backend of torch.compile."""
    from torch._inductor.compile_fx import compile_fx

    compile_fx(graph, inputs)
    return graph.forward


def compile_kernels(lowering: Any) -> SimpleNamespace:
    """Compile the kernels of a graph's code to PTX, and return a module that computes nothing."""
    from torch._inductor.codecache import PyCodeCache

    code = lowering.codegen()[0].value
    assert "triton_spl" not in code, "a sum whose order depends on the run"
    widths = map(int, re.findall(r"size_hints=\{[^}]*'r0_': (\d+)", code))
    GRAPHS.append((len(LAUNCH.findall(code)), max(widths, default=0)))
    for name, source in re.findall(r"triton\('(\w+)', '''(.*?)'''", code, re.DOTALL):
        getattr(PyCodeCache.load(source), name).precompile(warm_cache_only=True)
    return SimpleNamespace(call=Mock())


def compile_for(shape: str, capability: str, dtype: str) -> None:
    """Compute static steps of all kinds that production makes, call the functions of rows as
    ``decoding.rows`` does, and print their graphs.
    """
    pretend(int(capability))
    gpu.compiled = partial(torch.compile, fullgraph=True, dynamic=False, backend=compile_graph)
    torch.set_default_dtype(getattr(torch, dtype))
    shapes = Path(__file__).parents[2] / "benchmark" / "shapes.json"
    config = parse_config(json.loads(shapes.read_text())[shape])
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        with torch.device("cuda"):
            model = Decoder(config).requires_grad_(False)
        model.planned = four_bits.FourBitBlocks(model)
        full = LayerPlan.full(model.num_layers)
        plans = full, LayerPlan.early_exit(model.num_layers, 4), full.in_bits(4)
        for capacity, plan in product((1024, 4096), plans):
            cache = model.new_cache(static_capacity(capacity))
            gpu.StaticStep(model, cache, plan, gpu.run_compiled).compute()
        blocks = GRAPHS.copy()
        probs = torch.empty(1, model.vocab_size, dtype=torch.float32, device="cuda")
        one = torch.empty(1, dtype=torch.float64, device="cuda")
        calls = [(sampling.probabilities, *filters) for filters in FILTERS]
        for function, *more in *calls, (randomness.inverse_cdf, one), (race.race_at, one.long()):
            rows.by_compiled_code(gpu.compiled(function), probs, *more)
    print(json.dumps([blocks, GRAPHS[len(blocks) :]]), flush=True)


@pytest.mark.prove
@pytest.mark.skipif(
    torch.version.cuda is None or torch.cuda.is_available(),
    reason="needs a CUDA build of torch, of gigabytes, from PyPI, on a machine without a GPU",
)
@pytest.mark.parametrize(
    ("shape", "capability", "dtype"),
    [
        ("llama-3.2-1b", "75", "float16"),
        ("gemma-2-2b", "75", "float32"),
        ("gemma-2-2b", "80", "bfloat16"),
        ("qwen3-0.6b", "90", "bfloat16"),
    ],
)
def test_each_kind_of_block_and_each_function_compiles_once_to_ptx(
    shape: str, capability: str, dtype: str, tmp_path: Path
) -> None:
    """Without a break: all layers, early exits and capacities of the cache share the code. No block
    of threads is left alone with a whole vocabulary.
    """
    library = str(tmp_path / "cuda.so")
    gcc = ["gcc", "-shared", "-fPIC", "-x", "c", "-", "-o", library]
    subprocess.run(gcc, input=CUDA.encode(), check=True)
    command = [*COMMAND, shape, capability, dtype]
    printed = subprocess.check_output(command, env={**os.environ, "LD_PRELOAD": library})
    blocks, functions = json.loads(printed)
    # blocks in the checkpoint's bits and in four
    assert (len(blocks), len(functions)) == (2, len(FILTERS) + 2)
    assert max(width for _, width in (*blocks, *functions)) <= 1 << 14, "less than any vocabulary"
    assert max(launches for launches, _ in blocks) <= 22


if __name__ == "__main__":
    if sys.argv[1:]:
        compile_for(*sys.argv[1:])
        os._exit(0)  # CUDA that never began cannot end
    for dtype, size in product(DTYPES, SIZES):
        check("triton_product", dtype, *size, "cpu")
