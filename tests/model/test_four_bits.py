"""The Triton product by weights in four bits, in Triton's interpreter on a CPU."""

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is on PyPI for Linux only")
def test_the_product_is_that_of_the_rounded_weights_and_of_each_row_alone() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.model.interpreted"],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(done.stdout.splitlines()) == 12, "each dtype and shape"
