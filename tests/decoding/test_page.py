"""The page: text from the model stays text, and in a real browser the replay can be used by anyone."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import generate
from decoding.drafters import ModelDrafter
from decoding.policies import AdaptiveExit, FixedLength
from decoding.randomness import SeededRandomness
from decoding.rounds import Round
from decoding.sampling import SamplingParams
from decoding.show.details import Detail
from decoding.show.labels import Labels
from decoding.show.page import Heading, Recording, embed, render_page
from decoding.speculate import speculate
from decoding.text import Rules, Text
from model import InputError, LayerPlan
from tests.browser import find, look
from tests.folders import write_folder
from tests.laws import tiny_model
from weights.cli.files import check_place

if TYPE_CHECKING:
    from selenium.webdriver.chrome.webdriver import WebDriver

PIECES = [
    "</script><script>window.ran = 'script'</script>",
    "<img src=x onerror=\"window.ran = 'img'\">",
    "</ScRiPt ><!--<script>",
    "\u2028\u2029",
    "{{data}} {{policy}}",
    "&lt;b&gt;\"'`\\",
    " fox",
    "\n",
    "javascript:window.ran='link'",
    " " + "long" * 40,
    " the",
]
LABELS = Labels(lambda token: PIECES[token].encode(), {})
PLAN = LayerPlan.early_exit(3, 2)
PROMPT = "<h1 onclick=alert(1)>Write</h1>"


def recorded(seed: int, *, temperature: float = 1.0, banned: str = "") -> Recording:
    """A text of hostile tokens, really written by a tiny model."""
    model = tiny_model("llama", vocab=len(PIECES))
    prompt = [6, 7, 6]
    cache = model.new_cache(model.max_positions)
    with torch.inference_mode():
        model.prefill(torch.tensor([prompt[:-1]]), cache)
    text = Text(prompt, Rules(24, banned=[banned] if banned else []), model, lambda token: PIECES[token].encode())
    policy, params = AdaptiveExit(0.2, 4), SamplingParams(temperature)
    recording = Recording(policy, params, LABELS)
    drafter, randomness = ModelDrafter(model, cache, PLAN), SeededRandomness(seed)
    rounds = speculate(model, cache, text, drafter, policy, params, randomness, observer=recording.observe)
    for number, round in enumerate(rounds, 1):
        recording.add(round, number / 4)
    return recording


def long_run(rounds: int) -> Recording:
    """Rounds of four drafted tokens, of which none to all are accepted in turn."""
    recording, position = Recording(FixedLength(4), SamplingParams(1.0), LABELS), 3
    for number in range(rounds):
        accepted, length = number % 5, 4
        recording.details = [Detail(token, 0.5, 0.25, [(6, 0.5)], [(6, 0.25)]) for token in [6] * length + [8]]
        recording.add(Round(position, [6] * length, accepted, [6] * accepted + [8]), number / 4)
        position += accepted + 1
    return recording


def page_of(*recordings: Recording, greedy: bool = False, plan: LayerPlan | None = PLAN, race: bool = False) -> str:
    return render_page(Heading(PROMPT, [("Model", "<b>tiny</b>")], plan, greedy, race), recordings)


def data_of(page: str) -> Any:
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    return json.loads(data)


@pytest.mark.parametrize("text", [*PIECES, "\x00\x1b", "\ud800", "𝄞"])
def test_no_text_can_end_or_open_an_element(text: str) -> None:
    embedded = embed([text, {text: 1}])
    assert re.fullmatch(r"[ !-%'-;=?-~]*", embedded), "only plain ASCII without <, > and &"
    assert json.loads(embedded) == [text, {text: 1}]


def test_the_page_is_one_file_with_the_elements_of_its_template_only() -> None:
    page = page_of(recorded(0))
    assert len(re.findall(r"<script", page, re.IGNORECASE)) == 2
    without_data = page.replace(embed(data_of(page)), "")
    assert not re.search(r"<img|<link|<iframe|\bsrc=|https?:|@import|url\(", without_data, re.IGNORECASE)
    assert page.count("default-src 'none'; script-src 'sha256-") == 1
    assert data_of(page)["labels"]["4"] == "{{data}} {{policy}}"


def test_the_page_holds_what_the_rounds_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Round, list[Detail]]] = []
    add = Recording.add
    monkeypatch.setattr(
        Recording, "add", lambda self, round, seconds: seen.append((round, self.details)) or add(self, round, seconds)
    )
    data = data_of(page_of(recorded(1)))
    assert data["plan"] == {"attention": [16, 16, 0], "mlp": [16, 16, 0], "head": 16}
    ((sample),) = data["samples"]
    assert sample["finish"] == "length" and 0 < sample["seconds"] < len(sample["rounds"]) / 4, "without examining"
    assert sample["rounds"][0]["threshold"] == 0.2, "the threshold a round was drafted under, not the one it led to"
    assert any(round["threshold"] != 0.2 for round in sample["rounds"])
    for shown, (round, details) in zip(sample["rounds"], seen, strict=True):
        assert [(token["id"], token["verdict"]) for token in shown["tokens"]] == round.verdicts()
        assert details
        for token, detail in zip(shown["tokens"], details, strict=False):
            assert token["p"] == pytest.approx(detail.p, rel=1e-5)
            assert token["q"] == (detail.q and pytest.approx(detail.q, rel=1e-5))
            assert [other for other, _ in token["target_top"]] == [other for other, _ in detail.target_top]


def test_a_text_broken_off_before_its_first_round_has_a_page() -> None:
    data = data_of(page_of(Recording(AdaptiveExit(0.5), SamplingParams(), LABELS), plan=None))
    assert data["plan"] is None
    assert data["samples"] == [{"rounds": [], "finish": "interrupted", "seconds": 0.0}]


@pytest.mark.parametrize(("name", "said"), [("missing/page.html", "does not exist"), (".", "is a folder")])
def test_a_place_that_cannot_be_written_is_refused_before_anything_is_loaded(
    name: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generate, "load_model", None)
    assert generate.main(["the hen", "--html", str(tmp_path / name)]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("error: ") and captured.err.count("\n") == 1
    assert said in captured.err
    assert list(tmp_path.iterdir()) == []


def test_checking_a_place_leaves_the_file_there_as_it_was(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text("an older page")
    with pytest.raises(InputError, match="gamma"):
        generate.run(generate.parse_arguments(["the", "--html", str(page), "--draft", "exit", "--gamma", "-1"]))
    check_place(page)
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"] and page.read_text() == "an older page"


def test_the_page_names_the_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also a prompt that can be read only once."""
    model, page = write_folder(tmp_path / "tiny"), tmp_path / "page.html"
    monkeypatch.setattr("sys.stdin", io.StringIO("the <hen>"))
    sampling = ["--temperature", "0.5", "--top-p", "0.9", "--repetition-penalty", "1.1", "--seed", "7"]
    options = ["--prompt-file", "-", "--model", str(model), "--draft", "exit", "--max-new-tokens", "4", *sampling]
    assert generate.main([*options, "--html", str(page)]) == 0
    data = data_of(page.read_text(encoding="utf-8"))
    assert data["prompt"] == "the <hen>" and not data["greedy"]
    assert data["facts"] == [
        ["Model", "tiny"],
        ["Draft", "exit at layer 2 of 4"],
        ["Sampling", "temperature 0.5, top-p 0.9, repetition penalty 1.1, --seed 7 --coupling race"],
    ]


# ---- in a browser ----


@pytest.fixture(scope="module")
def recordings() -> list[Recording]:
    return [recorded(0), recorded(3, banned="fox")]


@pytest.fixture
def opened(browser: WebDriver, recordings: list[Recording], tmp_path: Path) -> Iterator[WebDriver]:
    """The page of two sampled texts, on a desk-sized screen in light colours; no error may have been logged."""
    page = tmp_path / "page.html"
    page.write_text(page_of(*recordings), encoding="utf-8")
    look(browser, 1200, "light")
    browser.get(page.as_uri())
    yield browser
    assert browser.get_log("browser") == []
    assert browser.execute_script("return window.ran") is None, "something that the model wrote was run"


def open_long_run(browser: WebDriver, rounds: int, folder: Path, width: int = 1200) -> None:
    page = folder / "long.html"
    page.write_text(page_of(long_run(rounds)), encoding="utf-8")
    look(browser, width, "light")
    browser.get(page.as_uri())


def visible_chips(browser: WebDriver) -> list[str]:
    script = "return [...document.querySelectorAll('.round:not([hidden]) .chip')].map(chip => chip.textContent)"
    return browser.execute_script(script)


def chips_of(recording: Recording, rounds: int) -> list[str]:
    return [LABELS(token["id"]).strip() for round in recording.rounds[:rounds] for token in round["tokens"]]


def test_stepping_replays_every_round(opened: WebDriver, recordings: list[Recording]) -> None:
    last = len(recordings[0].rounds)
    assert find(opened, "#where").text == f"Round {last} of {last}"
    find(opened, "#start").click()
    assert visible_chips(opened) == []
    for number in range(1, last + 1):
        find(opened, "#step").click()
        assert visible_chips(opened) == chips_of(recordings[0], number)
    assert not find(opened, "#step").is_enabled()
    find(opened, "#back").click()
    assert visible_chips(opened) == chips_of(recordings[0], last - 1)
    opened.execute_script(
        "const slider = document.getElementById('slider'); slider.value = 2; slider.dispatchEvent(new Event('input'))"
    )
    assert find(opened, "#where").text == f"Round 2 of {last}"
    words = find(opened, "#cache-words").text
    second = recordings[0].rounds[1]
    position, drafted = second["position"], second["drafted"]
    after = position + second["emitted"] - 1
    assert f"Round 2: {position - 1} entries, {position + drafted} after" in words
    assert f" {after} after rollback" in words


def test_playing_reaches_the_last_round_and_stops(opened: WebDriver, recordings: list[Recording]) -> None:
    from selenium.webdriver.support.ui import WebDriverWait

    last = len(recordings[0].rounds)
    opened.execute_script(f"show({last - 2})")
    find(opened, "#play").click()
    assert find(opened, "#play").text == "Pause"
    WebDriverWait(opened, 20, 0.1).until(lambda browser: find(browser, "#play").text == "Play")
    assert find(opened, "#where").text == f"Round {last} of {last}"


def test_hover_focus_and_tap_show_the_numbers(opened: WebDriver, recordings: list[Recording]) -> None:
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.keys import Keys

    tokens = [token for round in recordings[0].rounds for token in round["tokens"]]
    chips = opened.find_elements("css selector", "#text .chip")

    def told(at: int) -> None:
        token, said = tokens[at], find(opened, "#inspector").text
        assert shown_number(token["p"]) in said
        if token["q"] is not None:
            assert shown_number(token["q"]) in said
        if token["verdict"] in ("accepted", "rejected") and token["q"]:
            assert token["verdict"] in said.lower()
            assert shown_number(min(1, token["p"] / token["q"])) in said
        rows = opened.find_elements("css selector", "#inspector .row")
        assert len(rows) == len(token["draft_top"]) + len(token["target_top"])

    ActionChains(opened).move_to_element(chips[1]).perform()
    told(1)
    chips[0].click()
    told(0)
    opened.switch_to.active_element.send_keys(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    told(3)
    opened.switch_to.active_element.send_keys(Keys.END)
    told(len(chips) - 1)


def shown_number(probability: float) -> str:
    if probability in (0, 1):
        return f"{probability:.0f}"
    return f"{probability:.3f}" if probability >= 0.0005 else f"{probability:.1e}".replace("e-0", "e-")


def test_another_sample_can_be_chosen_and_shows_what_was_taken_back(
    opened: WebDriver, recordings: list[Recording]
) -> None:
    from selenium.webdriver.support.ui import Select

    Select(find(opened, "#sample")).select_by_index(1)
    retracted = sum(round["retracted"] for round in recordings[1].rounds)
    assert retracted, "the example takes nothing back"
    assert visible_chips(opened) == chips_of(recordings[1], len(recordings[1].rounds))
    assert len(opened.find_elements("css selector", "button.chip.back")) == retracted
    tokens = find(opened, "#stats dd").text
    assert tokens == str(sum(round["emitted"] - round["retracted"] for round in recordings[1].rounds))


def test_it_opens_on_the_first_rejected_token_and_explains_it(opened: WebDriver, recordings: list[Recording]) -> None:
    verdicts = [token["verdict"] for round in recordings[0].rounds for token in round["tokens"]]
    (chip,) = opened.find_elements("css selector", ".chip.shown")
    assert opened.execute_script("return chips.indexOf(arguments[0])", chip) == verdicts.index("rejected")
    told = find(opened, "#details").text
    assert re.search(r"q = [\d.e-]+, the target only p = [\d.e-]+\..*p/q = [\d.e-]+, and it was rejected\.", told)
    assert "takes its place: the residual token, drawn from max(0, p − q) scaled to sum to 1." in told
    assert not opened.execute_script("return at('inspector').classList.contains('chosen')"), "it covers nothing unasked"


def test_the_bits_of_every_sublayer_are_shown(opened: WebDriver, tmp_path: Path) -> None:
    page = tmp_path / "bits.html"
    page.write_text(page_of(recorded(0), plan=LayerPlan((16, 4, 0), (8, 4, 4))), encoding="utf-8")
    opened.get(page.as_uri())
    colours = "return [...at(arguments[0]).children].map((field) => getComputedStyle(field).backgroundColor)"
    attention, mlp = opened.execute_script(colours, "attention"), opened.execute_script(colours, "mlp")
    assert attention[1] == mlp[1] == mlp[2] and len({*attention, *mlp}) == 4
    words = "the first at the left. as the target runs it in 8 bits in 4 bits skipped"
    assert " ".join(find(opened, "#plan-words").text.split()).endswith(words)


def test_the_targets_token_is_told_by_its_kind(opened: WebDriver, tmp_path: Path) -> None:
    open_long_run(opened, 5, tmp_path)
    chips = opened.find_elements("css selector", "#text .own")
    for chip, kind, source in (
        (chips[1], "the residual token", "replaces the rejected “fox”: drawn from the residual, max(0, p − q)"),
        (chips[4], "the bonus token", "its verification told p for one position more: drawn from this p"),
    ):
        chip.click()
        told = find(opened, "#details").text
        assert kind in told and source in told
    assert find(opened, "#story").text == "4 drafted: 4 accepted. Then the bonus token, “javascript:window.ran='link'”."


@pytest.mark.parametrize("button", ["#slider", "#back", "#step"])
def test_a_round_that_is_asked_for_is_scrolled_to(opened: WebDriver, tmp_path: Path, button: str) -> None:
    open_long_run(opened, 100, tmp_path)
    slide = "at('slider').value = arguments[0]; at('slider').dispatchEvent(new Event('input'))"
    in_sight = """const box = at('text').getBoundingClientRect(), it = groups[arguments[0]].getBoundingClientRect();
      return it.top >= box.top - 1 && it.bottom <= box.bottom + 1;"""
    for asked in (3, 97, 40):
        opened.execute_script(slide, asked)
        if button == "#slider":
            assert opened.execute_script(in_sight, asked - 1)
            continue
        opened.execute_script("at('text').scrollTop = arguments[0] < 50 ? 1e6 : 0", asked)
        find(opened, button).click()
        assert opened.execute_script(in_sight, asked if button == "#step" else asked - 2)


@pytest.mark.parametrize("width", [1200, 360])
def test_a_hundred_rounds_are_legible_in_the_picture_of_the_cache(
    opened: WebDriver, tmp_path: Path, width: int
) -> None:
    """Every entry that a round adds can be told from its neighbours, and the round on show is in sight."""
    open_long_run(opened, 100, tmp_path, width)
    boxes = """return [...document.querySelectorAll(arguments[0])].map((each) => {
      const { left, right, width, height } = each.getBoundingClientRect();
      return { left, right, width, height };
    });"""
    kept, rolled = opened.execute_script(boxes, "#cache .kept"), opened.execute_script(boxes, "#cache .rolled")
    (frame,) = opened.execute_script(boxes, "#cache-box")
    for number, (stays, goes) in enumerate(zip(kept, rolled, strict=True)):
        accepted = number % 5
        assert stays["width"] >= 4
        assert stays["height"] >= 10 * (accepted + 1) and goes["height"] >= 10 * (4 - accepted)
    assert frame["left"] - 1 <= kept[-1]["left"] and kept[-1]["right"] <= frame["right"] + 1
    opened.execute_script("go(1)")
    first = opened.execute_script(boxes, "#cache .kept")[0]
    assert frame["left"] - 1 <= first["left"] and first["right"] <= frame["right"] + 1


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_shows_it_without_scrolling_sideways(opened: WebDriver, scheme: str) -> None:
    look(opened, 360, scheme)
    assert opened.execute_script("return document.documentElement.scrollWidth") == 360
    opened.execute_script("inspect(chips.find(chip => chip.textContent.includes('longlong')))")
    assert opened.execute_script("return document.documentElement.scrollWidth") == 360
    assert opened.execute_script("return at('text').scrollWidth <= at('text').clientWidth")
    background = opened.execute_script("return getComputedStyle(document.body).backgroundColor")
    brightness = [int(part) for part in re.findall(r"\d+", background)[:3]]
    assert (min(brightness) > 200) if scheme == "light" else (max(brightness) < 60)


def test_on_a_phone_the_details_of_a_tapped_token_cover_neither_it_nor_the_controls(
    opened: WebDriver, tmp_path: Path
) -> None:
    open_long_run(opened, 40, tmp_path, 360)
    on_top = """const { left, top, width, height } = arguments[0].getBoundingClientRect();
      const there = document.elementFromPoint(left + width / 2, top + height / 2);
      return arguments[0].contains(there);"""
    chips = opened.find_elements("css selector", "#text .accepted")
    for chip in (chips[0], chips[20], chips[-1]):
        opened.execute_script("arguments[0].scrollIntoView({block: 'end'}); arguments[0].click()", chip)
        assert opened.execute_script(on_top, chip) and opened.execute_script(on_top, find(opened, "#details p"))
        for place in (0, 300, 100_000):
            opened.execute_script("scrollTo(0, arguments[0])", place)
            for name in ("start", "back", "play", "step", "slider", "where"):
                assert opened.execute_script(on_top, find(opened, f"#{name}")), (name, place)
    find(opened, "#back").click()
    assert opened.execute_script(on_top, find(opened, ".chip.shown")), "the details follow the replay"
    opened.execute_script("go(0)")
    assert not opened.execute_script("return at('inspector').classList.contains('chosen')")


@pytest.mark.parametrize("way", ["button", "escape"])
def test_on_a_phone_the_details_can_be_closed_and_opened_again(opened: WebDriver, way: str) -> None:
    from selenium.webdriver.common.keys import Keys

    look(opened, 360, "light")
    fixed = "return getComputedStyle(at('inspector')).position === 'fixed'"
    chip = find(opened, "#text .chip")
    for _ in range(2):
        assert not opened.execute_script(fixed)
        opened.execute_script("arguments[0].click()", chip)
        assert opened.execute_script(fixed)
        if way == "button":
            find(opened, "#close").click()
        else:
            find(opened, "body").send_keys(Keys.ESCAPE)
    assert not opened.execute_script(fixed)


def test_under_the_race_no_ratio_is_told(opened: WebDriver, tmp_path: Path) -> None:
    page = tmp_path / "race.html"
    page.write_text(page_of(recorded(0), race=True), encoding="utf-8")
    opened.get(page.as_uri())
    for verdict, said in (
        ("accepted", "the target drew it too"),
        ("rejected", "drew another token"),
        ("own", "argmin E/p"),
    ):
        opened.execute_script("inspect(chips.find(chip => chip.token.verdict === arguments[0]))", verdict)
        told = find(opened, "#inspector").text
        assert said in told and "min(1" not in told


def test_greedy_rounds_without_a_draft_have_a_page_too(opened: WebDriver, tmp_path: Path) -> None:
    recording = Recording(AdaptiveExit(0.5), SamplingParams(), LABELS)
    recording.details = [Detail(6, None, 1.0, [], [(6, 0.4), (7, 0.3)])]
    recording.add(Round(5, [], 0, [6]), 1.0)
    page = tmp_path / "plain.html"
    page.write_text(
        page_of(recording, Recording(AdaptiveExit(0.5), SamplingParams(), LABELS), greedy=True, plan=None),
        encoding="utf-8",
    )
    opened.get(page.as_uri())
    find(opened, "#text .own").click()
    assert "raw probabilities" in find(opened, "#inspector").text
    assert "Nothing was drafted" in find(opened, "#inspector").text
    assert not find(opened, "#plan-card").is_displayed()
    opened.execute_script("build(data.samples[1])")
    assert find(opened, "#where").text == "Round 0 of 0"
