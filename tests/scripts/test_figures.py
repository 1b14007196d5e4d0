"""The pictures that docs/figures.py draws: the files that the documents show, and true numbers."""

import re
from collections.abc import Callable
from pathlib import Path

import matplotlib
import pytest
import torch
from matplotlib.figure import Figure

from docs import figures, layers
from model import LayerPlan
from search.acceptance import Acceptance
from search.prediction import expected_rounds
from tests.pictures import faults
from weights.load import load_model, model_folder
from weights.tokenizer import Tokenizer

DOCS = Path(__file__).parents[2] / "docs"
LAYERS_COMMAND = re.compile(r'python -m docs.layers "([^"]+)" .{1,3}--svg layers.svg')


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


def numbers(*values: float) -> list[str]:
    """As the documents print them, without the zero before the point."""
    return [f"{value:g}".removeprefix("0") for value in values]


def chapter(name: str) -> str:
    """A document on one line."""
    return " ".join((DOCS / name).read_text(encoding="utf-8").split())


def test_the_chapters_print_the_numbers_of_their_pictures() -> None:
    text = chapter("how_it_works.md")
    assert "| p, the target | {} | {} | {} |".format(*numbers(*figures.P)) in text
    assert "| q, the draft | {} | {} | {} |".format(*numbers(*figures.Q)) in text
    draft, verify = numbers(figures.DRAFT_COST, figures.VERIFY_COST)
    assert f"a draft step takes {draft} of a plain round" in text
    assert f"over three drafted tokens takes {verify}" in text
    assert f"All have v = {verify}." in text
    text = chapter("search.md")
    states = figures.states().round(2)
    kept, full, begins = numbers(figures.TEXT["The"], states[2, 2], states[0, 3])
    assert f"With probability {kept} the target keeps it" in text
    assert f"has probability {full}, and a round begins there with probability {begins}" in text


def test_the_table_of_the_short_runs_is_that_of_the_picture() -> None:
    rows = []
    for name, run in (("with the recipe", "with the recipe"), ("without", "without the recipe")):
        _, loss, agreement = figures.exits_of(run)
        second, fourth = numbers(round(agreement[1], 2), round(agreement[3], 2))
        exits = f"{loss[1]:.2f} / {loss[3]:.2f} | {second} / {fourth}"
        rows.append(f"| {name} | {loss[-1]:.3f} | {exits} |")
    assert " ".join(rows) in chapter("training.md")


def test_guesses_after_each_layer_are_those_of_an_exit_there() -> None:
    """In the picture of the chapter too, whose words are comments in its source."""
    folder = model_folder("small-llama")
    model, tokenizer = load_model(folder, torch.float32), Tokenizer(folder)
    [text] = LAYERS_COMMAND.findall(chapter("how_it_works.md"))
    ids = tokenizer.encode(text)
    _, tokens = layers.guesses(model, ids)
    for layer in (2, model.num_layers):
        plan = LayerPlan.early_exit(model.num_layers, layer)
        logits = model(torch.tensor([ids]), plan=plan)[0]
        assert tokens[layer - 1].tolist() == logits.argmax(-1).tolist()
    assert list(faults(lambda: layers.picture(model, tokenizer, text))) == []
    source = (DOCS / "layers.svg").read_text(encoding="utf-8")
    found = [tokenizer.decode([int(token)]).strip() for token in tokens[-1, -layers.TOKENS :]]
    shown = re.findall(r"<!-- (\S+)  \d\.\d\d -->", source)
    assert shown[: layers.TOKENS] == found, "python -m docs.layers draws another layers.svg"
