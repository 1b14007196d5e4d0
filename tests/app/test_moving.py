"""The moving picture: all that was written, in the rhythm that was measured, and nothing that
runs.
"""

import re
from itertools import chain, pairwise
from pathlib import Path
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

import pytest
from rich.cells import cell_len
from selenium.webdriver.chrome.webdriver import WebDriver

from app.characters import Labels, visible
from app.moving import MOST_TOKENS, PAUSE, render_picture
from app.writer import Sample
from decoding.rounds import Round
from tests.commands import Run
from tests.folders import write_folder
from tests.laws import text_of

PIECES = [" the", " fox", "</text><script>", "<&>\"'", "\n", "e\u0301", "]]>", " " + "long" * 40]
LABELS = Labels(lambda token: PIECES[token].encode(), {})
MARGIN, WIDTH = 24, 800  # of the template
NAMESPACE = "{http://www.w3.org/2000/svg}"
Timeline = list[tuple[Round, float]]
PLAIN: Timeline = [
    (Round(0, [], 0, [token]), seconds)
    for token, seconds in enumerate((1.0, 2.0, 3.5, 4.0, 5.0, 6.0, 7.0, 8.0))
]
TAKEN_BACK: Timeline = [
    (Round(0, [0], 1, [0, 1], retracted=[0, 1]), 1.0),
    (Round(0, [], 0, [2], finish="length"), 2.0),
]
DRAFTED: Timeline = [
    (Round(0, [0, 1, 0, 6], 2, [0, 1, 2]), 2.0),
    (Round(3, [3, 4], 2, [3, 4, 5]), 4.0),
    (Round(6, [1], 0, [6], finish=None), 5.5),
    (Round(7, [], 0, [7], finish="length"), 6.5),
]


def picture(plain: Timeline = PLAIN, drafted: Timeline = DRAFTED) -> Element:
    return ElementTree.fromstring(rendered("tiny: <&>", plain, drafted, "a & b"))


def rendered(title: str, plain: Timeline, drafted: Timeline, draft: str) -> str:
    samples = []
    for timeline in (plain, drafted):
        samples.append(Sample(text_of([0]), draft, timeline))
        for round, _ in timeline:
            samples[-1].statistics.add(round)
    return render_picture(title, *samples, LABELS)


def lanes(svg: Element) -> list[list[Element]]:
    return [list(group) for group in svg.findall(f"{NAMESPACE}g")]


def of_kind(lane: list[Element], *kinds: str) -> list[Element]:
    return [piece for piece in lane if piece.get("class") in kinds]


def texts(pieces: list[Element]) -> list[str]:
    return [piece.text or "" for piece in pieces]


def found_in_style(svg: Element, pattern: str) -> str:
    (found,) = re.findall(pattern, svg.findtext(f"{NAMESPACE}style") or "")
    return found


def moments(svg: Element, piece: Element) -> list[float]:
    """Shares of the period at which a piece appears and disappears; at first it is not there."""
    name = piece.get("style", "").removeprefix("animation-name:")
    frames = found_in_style(svg, rf"@keyframes {name}{{(.*)}}\n?")
    absent, *shares = re.findall(r"([\d.]+)%{opacity:[01]}", frames)
    assert absent == "0"
    return [float(share) / 100 for share in shares]


def test_every_token_of_both_texts_appears() -> None:
    plain, drafted = lanes(picture())
    shown = [text.strip(" ").replace("\n", "↵") for text in PIECES]
    assert texts(of_kind(plain, "own")) == shown
    assert texts(of_kind(drafted, "accepted", "own")) == shown
    assert texts(of_kind(drafted, "rejected")) == ["the", "]]>", "fox"]
    assert texts(of_kind(drafted, "drafted")) == ["the", "fox", "the", "]]>", "<&>\"'", "↵", "fox"]


def test_times_are_those_of_the_run() -> None:
    """In slow motion, where the slower text took less than ten seconds, and behind the finished
    texts.
    """
    svg = picture()
    plain, drafted = lanes(svg)
    period = PAUSE + 2 * 8 + PAUSE
    assert float(found_in_style(svg, r"animation: ([\d.]+)s")) == period

    def at(seconds: float) -> float:
        """Share of the period that is over then."""
        return (PAUSE + 2 * seconds) / period

    for piece, (_, seconds) in zip(of_kind(plain, "own"), PLAIN, strict=True):
        assert moments(svg, piece)[-1] == pytest.approx(at(seconds), abs=1e-4)
    # The first round: a verification takes as long as a plain step, the draft's tokens the rest.
    for number, piece in enumerate(of_kind(drafted, "drafted")[:4], 1):
        drawn_and_judged = [at(number / 4), at(2)]
        assert moments(svg, piece) == pytest.approx(drawn_and_judged, abs=1e-4)
    struck = of_kind(drafted, "rejected")
    assert moments(svg, struck[0]) == pytest.approx([at(2), at(5.5)], abs=1e-4)
    assert moments(svg, struck[-1])[-1] == pytest.approx(at(5.5), abs=1e-4)


def test_speeds_and_a_legend_are_told() -> None:
    speeds = {"1.0 tokens/s", "1.2 tokens/s: 1.23 times plain"}
    legend = {"drafted", "accepted", "rejected", "slowed down 2 times", "draft: a & b"}
    assert speeds | legend <= {*picture().itertext()}


def test_tokens_that_a_banned_word_takes_back_disappear() -> None:
    svg = picture(drafted=TAKEN_BACK)
    _, drafted = lanes(svg)
    (the,) = of_kind(drafted, "accepted")
    assert the.get("opacity") == "0" and len(moments(svg, the)) == 2
    assert texts(of_kind(drafted, "rejected")) == ["the", "fox"]
    own = of_kind(drafted, "own")[-1]
    assert (own.text, own.get("x"), own.get("opacity")) == ("</text><script>", str(MARGIN), None)


def test_the_target_s_token_takes_the_place_of_the_rejected_one() -> None:
    _, drafted = lanes(picture())
    own, rejected = of_kind(drafted, "own")[0], of_kind(drafted, "rejected")[0]
    assert rejected.text == "the" and own.text == "</text><script>"
    assert int(rejected.get("x", "")) - int(own.get("x", "")) in (8, 9), "its leading space"


def test_nothing_runs_nothing_is_loaded_and_nothing_leaves_the_card() -> None:
    svg = picture()
    source = ElementTree.tostring(svg, encoding="unicode")
    tags = {element.tag.removeprefix(NAMESPACE) for element in svg.iter()}
    assert tags == {"svg", "style", "title", "rect", "text", "tspan", "g"}
    assert not re.search(r"url\(|@import|href|https?:(?!//www.w3.org/2000/svg)", source)
    for piece in chain(*lanes(svg)):
        end = int(piece.get("x", "")) + int(piece.get("textLength", ""))
        assert end <= WIDTH and float(piece.get("y", "")) < float(svg.get("height", ""))


def test_a_long_text_is_cut_and_says_so() -> None:
    long = [(Round(at, [], 0, [at % 2]), 0.2 * (at + 1)) for at in range(2 * MOST_TOKENS)]
    svg = picture(plain=long, drafted=long)
    assert [len(lane) for lane in lanes(svg)] == [MOST_TOKENS] * 2
    cut = f"in real time; the first {MOST_TOKENS} of {2 * MOST_TOKENS} tokens"
    assert cut in texts(svg.findall(f"{NAMESPACE}text"))
    assert len(ElementTree.tostring(svg)) < 60_000


def test_the_command_line_writes_that_of_the_first_text(tmp_path: Path, run: Run) -> None:
    model, file = write_folder(tmp_path / "tiny"), tmp_path / "run.svg"
    options = ["--draft", "exit", "--max-new-tokens", 9, "--num-samples", 2]
    said = run("the <hen>", "--model", model, *options, "--svg", file)
    assert f"the run as a moving picture: {file}" in said.err
    svg = ElementTree.parse(file).getroot()
    assert svg.findtext(f"{NAMESPACE}text") == "tiny: the <hen>"
    for lane in lanes(svg):
        kept = "".join(texts(of_kind(lane, "accepted", "own")))
        first, *_ = said.out.partition("\n" + "-" * 20)
        assert kept == visible(first).replace(" ", "")


def test_it_moves_in_a_browser_unless_the_reader_wants_it_still(
    browser: WebDriver, tmp_path: Path
) -> None:
    file = tmp_path / "run.svg"
    file.write_text(rendered("tiny", PLAIN, DRAFTED, "a"), encoding="utf-8")
    shown = (
        "return [...document.querySelectorAll('g:last-of-type text')].filter(piece =>"
        " getComputedStyle(piece).opacity == 1).map(piece => piece.textContent)"
    )
    at = (
        "for (const each of document.getAnimations()) { each.pause(); each.currentTime ="
        " arguments[0] }"
    )
    browser.get(file.as_uri())
    drafted = ["the", "fox", "the", "]]>"]
    browser.execute_script(at, 100)
    finished = browser.execute_script(shown)
    assert len(finished) == len(PIECES) + 1, "the first frame is the end"
    for milliseconds, pieces in (
        (3010, []),
        (6500, drafted),
        (7500, [*drafted, "</text><script>"]),
    ):
        browser.execute_script(at, milliseconds)
        assert browser.execute_script(shown) == pieces
    still = [{"name": "prefers-reduced-motion", "value": "reduce"}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": still})
    assert browser.execute_script("return document.getAnimations().length") == 0
    assert browser.execute_script(shown) == finished
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def test_no_two_texts_of_a_line_run_into_each_other() -> None:
    """Also for long names, of the model and of the draft, and for a text that is cut."""
    long = [(Round(at, [], 0, [at % 2]), 0.001 * (at + 1)) for at in range(2 * MOST_TOKENS)]
    name = "chosen each round: all layers in 4 bits; prompt lookup"
    for draft in (name, name * 3):
        svg = ElementTree.fromstring(rendered("tiny " * 40, long, long, draft))
        lines: dict[str | None, list[tuple[float, float]]] = {}
        for text in svg.findall(f"{NAMESPACE}text"):
            width = 8.5 * cell_len("".join(text.itertext()).strip())
            x = float(text.get("x", ""))
            begin = x if text.get("text-anchor") != "end" else x - width
            assert begin >= 0 and begin + width <= WIDTH
            lines.setdefault(text.get("y"), []).append((begin, begin + width))
        for line in map(sorted, lines.values()):
            assert all(left[1] < right[0] for left, right in pairwise(line))
