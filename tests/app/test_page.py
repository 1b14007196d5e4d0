"""The page: text from the model stays text, and the numbers behind a round are true; in a real
browser the replay can be used by anyone.
"""

import io
import json
import re
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from selenium.webdriver.chrome.webdriver import WebDriver
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select

import generate
from app.characters import Labels
from app.page import TOP, Recording, embed, render_page
from decoding.drafters import BestOf, Draft, ModelDrafter, PromptLookup
from decoding.policies import AdaptiveExit, FixedLength
from decoding.randomness import SeededRandomness
from decoding.rounds import Round
from decoding.sampling import SamplingParams, distribution
from decoding.text import Rules, Text
from model import Decoder, LayerPlan
from tests.browser import find, look
from tests.folders import write_folder
from tests.laws import speculated, tiny_model

PIECES = [
    "</script><script>window.ran = 'script'</script>",
    "<img src=x onerror=\"window.ran = 'img'\">",
    "</ScRiPt ><!--<script>",
    "\u2028\u2029",
    "{{data}} {{nonce}}",
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


def recorded(seed: int, *, banned: str = "") -> Recording:
    """A text of hostile tokens, really written by a tiny model."""
    model = tiny_model("llama", vocab=len(PIECES))
    rules = Rules(24, banned=[banned] if banned else [])
    recording = Recording(SamplingParams(1.0), LABELS)
    rounds = speculated(
        model,
        Text([6, 7, 6], rules, model, lambda token: PIECES[token].encode()),
        lambda model, cache: ModelDrafter(model, cache, PLAN),
        AdaptiveExit(0.2, 4),
        recording.params,
        SeededRandomness(seed),
        observer=recording.observe,
    )
    for number, round in enumerate(rounds, 1):
        recording.add(round, number / 4)
    return recording


def detail(token: int, q: float | None, p: float) -> dict[str, Any]:
    draft_top = [] if q is None else [(" fox", q)]
    label = {"id": token, "text": LABELS(token)}
    return label | {"q": q, "p": p, "draft_top": draft_top, "target_top": [(" fox", p)]}


def page_of(*recordings: Recording, race: bool = False) -> str:
    facts = {"prompt": PROMPT, "facts": [("Model", "<b>tiny</b>")], "plan": asdict(PLAN)}
    samples = [recording.sample for recording in recordings]
    return render_page({**facts, "greedy": False, "race": race}, samples)


def data_of(page: str) -> Any:
    (data,) = re.findall(
        r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL
    )
    return json.loads(data)


def tokens_of(sample: dict[str, Any], rounds: int | None = None) -> list[dict[str, Any]]:
    return [token for round in sample["rounds"][:rounds] for token in round["tokens"]]


@pytest.mark.parametrize("text", [*PIECES, "\x00\x1b", "\ud800", "𝄞"])
def test_no_text_can_end_or_open_an_element(text: str) -> None:
    embedded = embed([text, {text: 1}])
    assert re.fullmatch(r"[ -;=-~]*", embedded), "only plain ASCII without <"
    assert json.loads(embedded) == [text, {text: 1}]


def test_the_page_is_one_file_with_the_elements_of_its_template_only() -> None:
    page = page_of(recorded(0))
    data = data_of(page)
    assert data["plan"] == {"attention": [16, 16, 0], "mlp": [16, 16, 0], "head": 16}
    assert len(re.findall(r"<script", page, re.IGNORECASE)) == 2
    loading = r"<img|<link|<iframe|\bsrc=|https?:|@import|url\("
    assert not re.search(loading, page.replace(embed(data), ""), re.IGNORECASE)
    (nonce,) = set(re.findall("nonce[-=][\"']?(.+?)[\"']", page))
    policy = "default-src 'none'; connect-src 'self'; script-src 'nonce-"
    assert len(nonce) == 32 and page.count(policy) == 1
    (sample,) = data["samples"]
    assert (sample["finish"], sample["seconds"]) == ("length", len(sample["rounds"]) / 4)
    assert "{{data}} {{nonce}}" in {token["text"] for token in tokens_of(sample)}
    assert all(token["text"] in dict(token["target_top"]) for token in tokens_of(sample))


def test_the_page_names_the_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also a prompt that can be read only once."""
    model, page = write_folder(tmp_path / "tiny"), tmp_path / "page.html"
    monkeypatch.setattr("sys.stdin", io.StringIO("the <hen>"))
    options = f"--prompt-file - --model {model} --draft exit --max-new-tokens 4 --html {page}"
    sampling = "--temperature 0.5 --top-p 0.9 --repetition-penalty 1.1 --seed 7"
    assert generate.main([*options.split(), *sampling.split()]) == 0
    data = data_of(page.read_text(encoding="utf-8"))
    assert data["prompt"] == "the <hen>" and not data["greedy"]
    assert dict(data["facts"]) == {
        "Model": "tiny",
        "Draft": "exit at layer 2 of 4",
        "Sampling": "temperature 0.5, top-p 0.9, repetition-penalty 1.1, --seed 7 --coupling race",
    }


# ---- the numbers behind a round: true, and without any say in what is written ----

VOCAB, START, GAMMA = 11, [3, 1, 4, 1, 5], 3
PARAMS = [
    SamplingParams(),
    SamplingParams(0.9, top_k=8),
    SamplingParams(1.0, repetition_penalty=1.3),
]


@pytest.mark.parametrize("params", PARAMS)
def test_every_number_is_that_of_a_pass_without_cache_or_loop(params: SamplingParams) -> None:
    """p and q of each token, and the lists: of p and q, but of raw probabilities in greedy
    decoding.
    """
    model, recording = tiny_model("llama", vocab=VOCAB), Recording(params, str)
    rounds = speculated(
        model,
        Text(START, Rules(24), model),
        lambda model, cache: ModelDrafter(model, cache, PLAN),
        FixedLength(GAMMA),
        params,
        SeededRandomness(1),
        observer=recording.observe,
    )
    text, checked = list(START), set()
    for round in rounds:
        details = recording.details
        assert len(details) == len(round.drafted) + 1
        for at, detail in enumerate(details):
            row = at if at < len(round.drafted) else round.accepted
            prefix = torch.tensor(text + round.drafted[:row])
            own = at == len(round.drafted)
            token = round.emitted[round.accepted] if own else round.drafted[at]
            assert int(detail["text"]) == detail["id"] == token
            assert_numbers(detail, "p", "target_top", model, None, prefix, params)
            if row < len(round.drafted):
                assert_numbers(detail, "q", "draft_top", model, PLAN, prefix, params)
                checked.add("own beside a rejected token" if own else "drafted")
            else:
                assert detail["q"] is None and detail["draft_top"] == []
        text += round.emitted
    assert checked == {"drafted", "own beside a rejected token"}


@torch.inference_mode()
def assert_numbers(
    detail: dict[str, Any],
    number: str,
    top_tokens: str,
    model: Decoder,
    plan: LayerPlan | None,
    prefix: torch.Tensor,
    params: SamplingParams,
) -> None:
    """The number is the token's probability. The list holds the likeliest tokens in order, with
    their probabilities, and the token.
    """
    logits = model(prefix[None], plan=plan)[0, -1:]
    probs = distribution(logits, prefix, params)[0]
    token = detail["id"]
    assert detail[number] == pytest.approx(probs[token].item(), abs=1e-6)
    if params.temperature == 0:
        probs = logits.softmax(-1)[0]
    top = [(int(label), prob) for label, prob in detail[top_tokens]]
    assert [prob for _, prob in top] == pytest.approx(
        [probs[other].item() for other, _ in top], abs=1e-6
    )
    best = [prob for prob in probs.sort(descending=True).values[:TOP].tolist() if prob > 0]
    assert [prob for _, prob in top[: len(best)]] == pytest.approx(best, abs=1e-6)
    assert token in [other for other, _ in top]


def test_the_list_names_the_token_even_where_it_is_impossible_and_survives_broken_numbers() -> None:
    probs = torch.tensor([[0.0, 0.6, 0.0, 0.4, 0.0, 0.0, 0.0]])
    for target, token, wanted in (
        (probs, 3, [("1", 0.6), ("3", 0.4)]),
        (probs, 5, [("1", 0.6), ("3", 0.4), ("5", 0.0)]),
        (torch.full((1, 7), torch.nan), 2, [("2", 0.0)]),
    ):
        recording = Recording(SamplingParams(1.0), str)
        nothing = Draft(torch.empty(0, dtype=int), torch.empty(0, 7))
        recording.observe(nothing, target, target, 0, torch.tensor(token))
        assert recording.details[0]["target_top"] == wanted


@pytest.mark.parametrize(
    ("round", "fates"),
    [
        (Round(5, [7, 8, 9], 3, [7, 8, 9, 1]), ["accepted", "accepted", "accepted", "own"]),
        (Round(5, [7, 8, 9], 1, [7, 2]), ["accepted", "rejected", "discarded", "own"]),
        (Round(5, [], 0, [4]), ["own"]),
        (Round(5, [7, 8, 9], 3, [7], finish="eos"), ["accepted", "discarded", "discarded"]),
        (Round(5, [7, 8, 9], 1, [7], retracted=[7]), ["accepted", "rejected", "discarded"]),
    ],
    ids=[
        "all accepted",
        "one rejected",
        "no draft",
        "ended inside the draft",
        "taken back inside the draft",
    ],
)
def test_every_token_of_a_round_has_its_verdict(round: Round, fates: list[str]) -> None:
    assert [fate for _, fate in round.verdicts()] == fates
    kept = [token for token, fate in round.verdicts() if fate in ("accepted", "own")]
    assert kept == round.emitted


def test_a_recording_names_the_drafter_of_each_round() -> None:
    """Of several, and of one that draws nothing."""
    model = tiny_model("llama", vocab=VOCAB)
    for name, make in {
        "model": lambda model, cache: BestOf({"model": ModelDrafter(model, cache, PLAN)}),
        "lookup": lambda model, cache: BestOf({"lookup": PromptLookup(VOCAB)}),
    }.items():
        recording = Recording(SamplingParams(), str)
        rounds = speculated(
            model,
            Text(START, Rules(8), model),
            make,
            FixedLength(GAMMA),
            SamplingParams(),
            SeededRandomness(1),
            observer=recording.observe,
        )
        told = [recording.add(round, 1.0) for round in rounds]
        assert {each["drafter"] for each in told if each["drafted"]} == {name}
        assert {each["drafter"] for each in told if not each["drafted"]} <= {"", name}


# ---- in a browser ----


@pytest.fixture(scope="module")
def recordings() -> list[Recording]:
    return [recorded(0), recorded(3, banned="fox")]


GLOSSARY = (Path(__file__).parents[2] / "docs/glossary.md").read_text(encoding="utf-8")


def test_words_of_the_page_have_tooltips_and_a_glossary(opened: WebDriver) -> None:
    for selector, words in [(".legend .own", ["target", "own"]), ("#details dt", ["q"])]:
        title = find(opened, selector).get_attribute("title")
        assert all(f"{word}: " in title for word in words)
    assert not find(opened, "#words").is_displayed()
    find(opened, ".legend a").click()
    terms = [each.text for each in opened.find_elements("css selector", "#words dt")]
    assert {"p", "q", "residual", "bonus"} <= {*terms}
    assert all(f"| {term}" in GLOSSARY for term in terms)


@pytest.fixture
def opened(browser: WebDriver, recordings: list[Recording], tmp_path: Path) -> Iterator[WebDriver]:
    """The page of two sampled texts, on a desk-sized screen in light colours; no error may have
    been logged.
    """
    page = tmp_path / "page.html"
    page.write_text(page_of(*recordings), encoding="utf-8")
    look(browser, 1200, "light")
    browser.get(page.as_uri())
    yield browser
    assert browser.get_log("browser") == []
    assert browser.execute_script("return window.ran") is None, (
        "something that the model wrote was run"
    )


def visible_chips(browser: WebDriver) -> list[str]:
    return browser.execute_script(
        "return [...document.querySelectorAll('.round:not([hidden]) .chip')].map(chip =>"
        " chip.textContent)"
    )


def chips_of(recording: Recording, rounds: int | None = None) -> list[str]:
    return [LABELS(token["id"]).strip() for token in tokens_of(recording.sample, rounds)]


def test_stepping_replays_every_round(opened: WebDriver, recordings: list[Recording]) -> None:
    last = len(recordings[0].sample["rounds"])
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
        "const slider = document.getElementById('slider'); slider.value = 2;"
        " slider.dispatchEvent(new Event('input'))"
    )
    assert find(opened, "#where").text == f"Round 2 of {last}"
    words = find(opened, "#cache-words").text
    second = recordings[0].sample["rounds"][1]
    before = second["position"] - 1
    assert f"Round 2: {before} entries, {before + 1 + second['drafted']} after" in words
    assert f" {before + second['emitted']} after rollback" in words


def test_hover_focus_and_tap_show_the_numbers(
    opened: WebDriver, recordings: list[Recording]
) -> None:
    tokens = tokens_of(recordings[0].sample)
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
    return (
        f"{probability:.3f}" if probability >= 0.0005 else f"{probability:.1e}".replace("e-0", "e-")
    )


def test_another_sample_can_be_chosen(opened: WebDriver, recordings: list[Recording]) -> None:
    Select(find(opened, "#sample")).select_by_index(1)
    rounds = recordings[1].sample["rounds"]
    retracted = sum(round["retracted"] for round in rounds)
    assert retracted, "the example takes nothing back"
    assert visible_chips(opened) == chips_of(recordings[1])
    assert len(opened.find_elements("css selector", "button.chip.back")) == retracted
    left = sum(round["emitted"] for round in rounds) - retracted
    assert find(opened, "#stats dd").text == str(left)


def test_the_page_opens_on_the_first_rejected_token_and_explains_it(
    opened: WebDriver, recordings: list[Recording]
) -> None:
    verdicts = [token["verdict"] for token in tokens_of(recordings[0].sample)]
    (chip,) = opened.find_elements("css selector", ".chip.shown")
    shown = opened.execute_script("return chips.indexOf(arguments[0])", chip)
    assert shown == verdicts.index("rejected")
    assert re.search(
        r"q = [\d.e-]+, the target only p = [\d.e-]+\..*p/q = [\d.e-]+, and it was rejected\."
        r"(.|\n)*takes its place: the residual token, drawn from max\(0, p − q\) scaled to sum to"
        r" 1\.",
        find(opened, "#details").text,
    )
    covers = opened.execute_script("return at('inspector').classList.contains('chosen')")
    assert not covers, "it covers nothing unasked"


def test_a_phone_shows_it_without_scrolling_sideways(opened: WebDriver) -> None:
    look(opened, 360, "dark")
    wide = "return document.documentElement.scrollWidth"
    assert opened.execute_script(wide) == 360
    opened.execute_script("inspect(chips.find(chip => chip.textContent.includes('longlong')))")
    assert opened.execute_script(wide) == 360
    assert opened.execute_script("return at('text').scrollWidth <= at('text').clientWidth")
    background = opened.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert max(int(part) for part in re.findall(r"\d+", background)[:3]) < 60


def test_under_the_race_no_ratio_is_told(opened: WebDriver, tmp_path: Path) -> None:
    page = tmp_path / "race.html"
    page.write_text(page_of(recorded(0), race=True), encoding="utf-8")
    opened.get(page.as_uri())
    expected = {
        "accepted": "the target drew it too",
        "rejected": "drew another token",
        "own": "argmin E/p",
    }
    for verdict, said in expected.items():
        opened.execute_script(
            "inspect(chips.find(chip => chip.token.verdict === arguments[0]))", verdict
        )
        told = find(opened, "#inspector").text
        assert said in told and "min(1" not in told


@pytest.mark.parametrize("race", [True, False], ids=["race", "ratio rule"])
def test_a_copied_token_is_explained_as_one(race: bool, opened: WebDriver, tmp_path: Path) -> None:
    """And the round names its drafter."""
    copied = {**detail(6, 1.0, 0.25), "verdict": "accepted"}
    own = {**detail(10, None, 0.5), "verdict": "own"}
    counts = {"position": 3, "drafted": 1, "accepted": 1, "emitted": 2, "retracted": 0}
    recording = Recording(SamplingParams(1.0), LABELS)
    recording.sample["rounds"] = [{**counts, "drafter": "lookup", "tokens": [copied, own]}]
    page = tmp_path / "copied.html"
    page.write_text(page_of(recording, race=race), encoding="utf-8")
    opened.get(page.as_uri())
    assert find(opened, "#story").text.startswith("1 drafted (lookup): 1 accepted.")
    told = find(opened, "#details").text
    assert "It was copied from the text, not drawn (q is one-hot)" in told
    assert "random numbers" not in told and "q is one-hot: 1 for the drafted token" in told
    name = "the target's own token" if race else "the bonus token"
    assert f"Then {name}, " in find(opened, "#story").text
