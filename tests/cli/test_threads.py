"""How long torch's idle threads stay awake is set before torch is loaded, by every command that
decodes.
"""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("module", ["generate", "train", "search", "benchmark", "training.corpus"])
def test_idle_threads_soon_sleep_in_every_command(module: str) -> None:
    """Read when torch is loaded, so it must be there by then."""
    environment = {"PATH": ""}
    run = subprocess.run(
        [sys.executable, "-m", "tests.until_torch", module],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert run.stdout.strip() == "1000", run.stderr
