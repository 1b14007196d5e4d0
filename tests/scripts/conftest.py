"""Fixture of the tests of ``generate.py``."""

import pytest

from tests.folders import write_folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a tiny random model, which no test changes."""
    return str(write_folder(tmp_path_factory.mktemp("models") / "tiny"))
