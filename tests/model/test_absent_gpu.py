"""Compilation for an absent GPU: ``python -m tests.model.test_absent_gpu SHAPE CAPABILITY DTYPE``.

It needs a CUDA build of torch, and no driver. All tensors are fake: they have a shape and a device,
but no memory. Torch's compiler asks only for the device's properties, and Triton for its compute
capability. A library that is loaded before CUDA's (LD_PRELOAD) answers which device is current.
Every kernel is compiled to PTX. The process prints, of each graph of blocks and of functions, its
launches and the most numbers that one block of threads reduces.
"""

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from runpy import run_path
from tempfile import NamedTemporaryFile
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from decoding.race import race_at
from decoding.randomness import inverse_cdf
from decoding.rows import by_compiled_code
from decoding.sampling import probabilities
from model.config import parse_config
from model.decoder import Decoder
from model.families import build
from model.fast import gpu
from model.fast.four_bits import FourBitBlocks
from model.plan import LayerPlan
from model.quantise import GROUP, Quantised
from model.steps import static_capacity

SHAPES = Path(__file__).parents[2] / "benchmark" / "shapes.json"
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
WIDEST = 1 << 14  # numbers that a block of threads may reduce, less than any vocabulary
GRAPHS: list[tuple[int, int]] = []  # launches of each graph, and the widest reduction of a block
FILTERS = (
    *((None, None, None, None), (0.7, None, None, None), (0.7, 0.9, None, None)),
    *((0.7, None, 0.1, None), (0.7, None, None, 50.0), (0.7, 0.9, 0.1, 50.0)),
)


def pretend(capability: int) -> None:
    """Make torch, its compiler and Triton believe in a GPU of a compute capability, such as 75."""
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor.fx_passes import joint_graph, pad_mm
    from torch._inductor.runtime import triton_helpers
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    joint_graph.lazy_init(torch.device("cpu"))  # before a GPU's tensors would be made for it
    joint_graph.lazy_init = Mock()
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
    for name, answer in answers.items():
        for place in torch.cuda, CudaInterface, CudaInterface.Worker:
            setattr(place, name, lambda *_, answer=answer, **__: answer)
    torch.accelerator.is_available = lambda: False
    driver._active = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", capability, 32),
        get_current_device=lambda: 0,
        get_active_torch_device=lambda: torch.device("cuda"),
    )
    triton_helpers.set_driver_to_gpu = Mock()
    # these compute with real tensors of the device
    pad_mm.can_pad = lambda *_: False
    torch._inductor.config.joint_graph_constant_folding = False
    torch._inductor.config.fx_graph_cache = False


def compile_graph(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
    """Compile a graph's kernels, and return what runs it as it is: a backend of torch.compile."""
    from torch._inductor.compile_fx import compile_fx
    from torch._inductor.graph import GraphLowering

    with patch.object(GraphLowering, "compile_to_module", compile_kernels):
        compile_fx(graph, inputs)
    return graph.forward


def compile_kernels(lowering: Any) -> SimpleNamespace:
    """Compile the kernels of a graph's code to PTX, and return a module that computes nothing."""
    code = lowering.codegen()[0].value
    assert "triton_spl" not in code, "a sum whose order depends on the run"
    widths = map(int, re.findall(r"size_hints=\{[^}]*'r0_': (\d+)", code))
    GRAPHS.append((len(LAUNCH.findall(code)), max(widths, default=0)))
    for name, source in re.findall(r"triton\('(\w+)', '''(.*?)'''", code, re.DOTALL):
        with NamedTemporaryFile("w", suffix=".py") as file:  # Triton reads the source of a kernel
            file.write(source)
            file.flush()
            getattr(SimpleNamespace(**run_path(file.name)), name).precompile(warm_cache_only=True)
    return SimpleNamespace(call=Mock())


def fake_rounded(linear: nn.Linear | nn.Embedding, bits: int) -> Quantised:
    rows, columns = linear.weight.shape
    codes = torch.empty(rows, columns, dtype=torch.uint8, device="cuda")
    scale = torch.empty(rows, columns // GROUP, dtype=torch.bfloat16, device="cuda")
    return Quantised(codes, scale, scale)


def compile_steps(model: Decoder) -> None:
    """Compute static steps of all kinds that production makes."""
    model.planned = FourBitBlocks(model)
    model.planned.rounded = fake_rounded
    full = LayerPlan.full(model.num_layers)
    plans = full, LayerPlan.early_exit(model.num_layers, 4), full.in_bits(4)
    for capacity, plan in product((1024, 4096), plans):
        cache = model.new_cache(static_capacity(capacity))
        gpu.StaticStep(model, cache, plan, gpu.run_compiled).compute()


def compile_functions(vocab: int) -> None:
    """Call the functions of rows, as ``decoding.rows`` does."""
    probs = torch.empty(1, vocab, dtype=torch.float32, device="cuda")
    one = torch.empty(1, dtype=torch.float64, device="cuda")
    for filters in FILTERS:
        by_compiled_code(gpu.compiled(probabilities), probs, *filters)
    by_compiled_code(gpu.compiled(inverse_cdf), probs, one)
    by_compiled_code(gpu.compiled(race_at), probs, one.long())


def main(shape: str, capability: str, dtype: str) -> None:
    pretend(int(capability))
    config = parse_config(json.loads(SHAPES.read_text())[shape])
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    gpu.compiled = partial(torch.compile, fullgraph=True, dynamic=False, backend=compile_graph)
    torch.set_default_dtype(getattr(torch, dtype))
    with fake, torch.no_grad():
        with torch.device("cuda"):
            model = build(config).requires_grad_(False)
        compile_steps(model)
        blocks = len(GRAPHS)
        compile_functions(model.vocab_size)
    print(json.dumps([GRAPHS[:blocks], GRAPHS[blocks:]]))


@pytest.mark.prove
@pytest.mark.skipif(
    torch.version.cuda is None or importlib.util.find_spec("triton") is None,
    reason="needs a CUDA build of torch, of gigabytes, with Triton: pip install torch from PyPI",
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
    command = "gcc", "-shared", "-fPIC", "-x", "c", "-", "-o", library
    subprocess.run(command, input=CUDA.encode(), check=True)
    done = subprocess.run(
        [sys.executable, "-m", "tests.model.test_absent_gpu", shape, capability, dtype],
        env={**os.environ, "LD_PRELOAD": library},
        capture_output=True,
        text=True,
    )
    assert not done.returncode, done.stderr[-2000:]
    blocks, functions = json.loads(done.stdout)
    # blocks in the checkpoint's bits and in four
    assert (len(blocks), len(functions)) == (2, len(FILTERS) + 2)
    assert max(width for _, width in (*blocks, *functions)) <= WIDEST
    assert max(launches for launches, _ in blocks) <= 22


if __name__ == "__main__":
    main(*sys.argv[1:])
    sys.stdout.flush()
    os._exit(0)  # CUDA that never began cannot end
