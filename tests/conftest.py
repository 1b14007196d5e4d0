"""Settings and fixtures of all tests: two threads, or one in each of several processes; examples
that are the same every run; the real checkpoint.
"""

import os
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, settings

from tests.calls import status_of
from tests.commands import Outcome, Run

# Threads spin while they wait for each other. On a busy machine they so take the core from the one
# they wait for, and a product takes fifty times as long. Read when torch is loaded, so nothing here
# imports it before.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

# A name with a slash is looked for on a hub, but tests have no network.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# A background job ignores Ctrl-C, and so would the processes of the tests.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Without shrinking, since every mutant fails a law and nobody reads its example:
# --hypothesis-profile=default shrinks.
settings.register_profile(
    "reproducible", derandomize=True, deadline=None, phases=[Phase.explicit, Phase.generate]
)
settings.load_profile("reproducible")


WORKER = "PYTEST_XDIST_WORKER" in os.environ  # one of several processes that share the tests


def pytest_configure() -> None:
    """Set the threads, and compile the step once for all processes."""
    import torch

    torch.set_num_threads(1 if WORKER else 2)
    if not WORKER:  # the others would all compile the step at once
        from model.fast import accelerate
        from tests.laws import tiny_model

        model = accelerate(tiny_model("llama").float())
        model(torch.zeros(1, 1, dtype=torch.int64), model.new_cache(1), 0)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Explain skipped tests, with one line for each reason."""
    skipped = terminalreporter.stats.get("skipped", [])
    reasons = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in skipped)
    for reason, number in reasons.items():
        terminalreporter.write_line(f"{number} skipped: {reason}")


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Keep low-bit copies of this session only; compiled steps stay where they are."""
    from model.places import cache_folder

    folder = tmp_path_factory.mktemp("cache")
    (folder / "step").symlink_to(cache_folder() / "step")
    os.environ["SPECDEC_CACHE"] = str(folder)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The folder of SmolLM2 135M Instruct, fetched if it is not there."""
    from weights.fetch import fetch

    return fetch()


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny random model that can chat, which no test changes."""
    from tests.serving import chat_folder

    return chat_folder(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run ``generate.py`` in this process."""
    import generate

    def command(*arguments: object) -> Outcome:
        capsys.readouterr()
        status = status_of(generate.main, [*map(str, arguments)])
        return Outcome(status, *capsys.readouterr())

    return command


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Headless Chromium, once for all tests."""
    pytest.importorskip("selenium", reason="needs selenium (requirements-dev.txt)")
    from tests.browser import headless

    chromium = headless()
    if chromium is None:
        pytest.skip("no browser: install chromium and chromium-driver to run this test")
    yield chromium
    chromium.quit()
