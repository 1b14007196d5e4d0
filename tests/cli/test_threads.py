"""How long torch's idle threads stay awake is set before torch is loaded, by every command that
decodes.
"""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WATCH = """
import os, sys
class Watch:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            print(os.environ.get("GOMP_SPINCOUNT"), flush=True)
            os._exit(0)
sys.meta_path.insert(0, Watch())
import runpy
runpy.run_module("{module}", run_name="__main__")
"""


@pytest.mark.parametrize("module", ["generate", "train", "search", "benchmark", "training.corpus"])
def test_idle_threads_soon_sleep_in_every_command(module: str) -> None:
    """Read when torch is loaded, so it must be there by then."""
    environment = {"PATH": ""}
    run = subprocess.run(
        [sys.executable, "-c", WATCH.format(module=module)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert run.stdout.strip() == "1000", run.stderr
