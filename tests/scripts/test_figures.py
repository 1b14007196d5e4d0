"""The pictures that docs/figures.py draws: the files that the documents show, and true numbers."""

import re
from collections.abc import Callable
from pathlib import Path

import matplotlib
import pytest
import torch
from matplotlib.figure import Figure

from docs import figures
from search.acceptance import Acceptance
from search.prediction import expected_rounds
from tests.pictures import faults

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Source of every picture by its file's name."""
    folder = tmp_path_factory.mktemp("pictures")
    figures.write_all(folder)
    return {path.name: path.read_text(encoding="utf-8") for path in folder.iterdir()}


def test_one_document_shows_each_picture(drawn: dict[str, str]) -> None:
    texts = [document.read_text(encoding="utf-8") for document in DOCS.glob("*.md")]
    shown = [name for text in texts for name in re.findall(r"!\[[^]]*\]\((\w+\.svg)\)", text)]
    assert [shown.count(name) for name in drawn] == [1] * len(drawn)


def test_the_pictures_beside_the_documents_are_these(drawn: dict[str, str]) -> None:
    """Another version of matplotlib draws other bytes."""
    for name, source in drawn.items():
        there = (DOCS / name).read_text(encoding="utf-8")
        if f"Matplotlib v{matplotlib.__version__}," in there:
            assert there == source, f"python -m docs.figures draws another {name}"


@pytest.mark.parametrize("draw", figures.PICTURES, ids=lambda draw: draw.__name__)
def test_nothing_in_a_picture_reaches_beyond_its_frame(draw: Callable[[], Figure]) -> None:
    assert list(faults(draw)) == []


def test_the_states_of_the_programme_are_those_of_the_search() -> None:
    """In expected rounds, and in drafted tokens that the target accepts."""
    kept = torch.tensor([*figures.TEXT.values()], dtype=torch.float64)[None, None]
    length = torch.tensor([len(figures.TEXT)])
    rounds, accepted, _ = expected_rounds(
        Acceptance(kept, *[torch.ones_like(kept)] * 3, length, length), [figures.GAMMA], [0.0]
    )
    states = figures.states()
    assert states[0].sum() == pytest.approx(rounds.sum(), abs=1e-12)
    assert states[1:].sum() == pytest.approx(accepted.sum(), abs=1e-12)


def test_the_race_of_the_example_ends_as_its_picture_says() -> None:
    first, second = figures.RACES
    assert (first / figures.P).argmin() == (first / figures.Q).argmin() == figures.TOKENS.index("b")
    assert (second / figures.P).argmin() == figures.TOKENS.index("a")
    assert (second / figures.Q).argmin() == figures.TOKENS.index("b")
