"""Compilation of GPU code where there is no GPU: see ``tests.model.absent_gpu``."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tests.model.absent_gpu import build_library

KINDS = 2  # of blocks, in the checkpoint's bits and in four
CAPACITIES = 2
FUNCTIONS = 8


@pytest.mark.prove
@pytest.mark.skipif(
    torch.version.cuda is None or find_spec("triton") is None,
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
    """Without a break, and again only for another capacity of the cache: an early exit and the
    other layers share the code.
    """
    done = subprocess.run(
        [sys.executable, "-m", "tests.model.absent_gpu", shape, capability, dtype],
        env={**os.environ, "LD_PRELOAD": str(build_library(tmp_path))},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    blocks, functions = (int(line.split()[0]) for line in done.stdout.splitlines())
    assert (blocks, functions) == (KINDS * CAPACITIES, FUNCTIONS)
