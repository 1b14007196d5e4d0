"""Fixtures of the tests of ``generate.py``."""

import pytest

import generate
from tests.commands import Outcome, Run
from tests.folders import write_folder


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run ``generate.py`` in this process."""

    def command(*arguments: object) -> Outcome:
        try:
            status = generate.main([*map(str, arguments)])
        except SystemExit as end:  # argparse's
            status = end.code
        return Outcome(status, *capsys.readouterr())

    return command


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a tiny random model, which no test changes."""
    return str(write_folder(tmp_path_factory.mktemp("models") / "tiny"))
