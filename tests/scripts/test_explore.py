"""The page to try things out: its numbers are those of the code, and it works by mouse, keyboard,
on a narrow screen and without a network.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from selenium.webdriver.chrome.webdriver import WebDriver
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait

from decoding.proof.enumeration import output_law
from decoding.proof.foreign import law_of
from decoding.randomness import Place, Randomness
from decoding.rounds import expected_speedup
from decoding.verify import Rule
from tests.browser import find, look
from tests.laws import speculative

PAGE = Path(__file__).parents[2] / "docs/explore.html"
P = [0.4, 0.25, 0.2, 0.1, 0.05]
Q = [0.25, 0.45, 0.1, 0.1, 0.1]
SVG = "http://www.w3.org/2000/svg"  # a name, which is not asked for
MISTAKES = {  # of the ratio rule: the residual that each draws from
    1: lambda p, q: p,
    3: lambda p, q: (p - q).clamp(min=0) + 0.05,
}
CROSSED = """return [...document.querySelectorAll("polyline")].some((line) => {
  const places = Array.from({ length: 501 }, (_, at) => at / 500 * line.getTotalLength());
  const boxes = [...line.closest("svg").querySelectorAll("text")].map((text) => text.getBBox());
  return places.map((place) => line.getPointAtLength(place)).some(({ x, y }) =>
    boxes.some((box) => x > box.x && x < box.x + box.width && y > box.y && y < box.y + box.height));
})"""


@pytest.fixture
def page(browser: WebDriver) -> WebDriver:
    """The page anew, on a wide screen."""
    look(browser, 1000, "light")
    browser.get(PAGE.as_uri())
    return browser


def asked(page: WebDriver, expression: str, *given: Any) -> Any:
    """Value of an expression of the page's script, with ``arguments``."""
    return page.execute_script(f"return {expression}", *given)


@pytest.mark.parametrize("rule", ["ratio", "block"])
def test_a_round_of_the_page_is_one_of_the_code(page: WebDriver, rule: str) -> None:
    p, q = torch.tensor([P, Q], dtype=torch.float64)

    def run(randomness: Randomness) -> str:
        drafted = torch.stack([randomness.draw(q, Place(place)) for place in range(2)])
        accepted, token = Rule(rule, 0).verify(
            p.expand(3, -1), q.expand(2, -1), drafted, randomness, Place(0)
        )
        return "".join("abcde"[each] for each in (*drafted[:accepted].tolist(), int(token)))

    found = dict(asked(page, f"[...roundLaw(arguments[0], arguments[1], '{rule}')]", P, Q))
    assert found == pytest.approx(output_law(run))


@pytest.mark.parametrize("rule", ["ratio", "block", "race"])
def test_every_rule_of_the_page_writes_the_models_texts_and_no_mistake_does(
    page: WebDriver, rule: str
) -> None:
    p, q = [0.3, 0.5, 0.2, 0.0, 0.0], [0.6, 0.4, 0.0, 0.0, 0.0]
    for number in range(asked(page, f"MISTAKES.{rule}.length")):
        rounds = f"roundLaw(arguments[0], arguments[1], '{rule}', MISTAKES.{rule}[{number}])"
        distance = asked(page, f"variation(textLaw({rounds}, 3), arguments[0])", p, q)
        assert distance > 0.001 if number else distance < 1e-12


def test_a_mistake_in_the_ratio_rule_changes_the_first_token_as_in_the_code(
    page: WebDriver,
) -> None:
    p, q = torch.tensor([P, Q], dtype=torch.float64)
    for number, residual in MISTAKES.items():
        rounds = f"roundLaw(arguments[0], arguments[1], 'ratio', MISTAKES.ratio[{number}])"
        found = dict(asked(page, f"[...textLaw({rounds}, 1)]", P, Q))
        law = law_of(speculative(p, q, residual)).probs
        assert found == pytest.approx({"abcde"[token]: weight for token, weight in law.items()})


@pytest.mark.parametrize(
    ("rule", "number"), [("ratio", 0), ("ratio", 2), ("block", 1), ("race", 0)]
)
def test_drawn_tokens_settle_on_the_law(page: WebDriver, rule: str, number: int) -> None:
    find(page, f"[value={rule}]").click()
    page.execute_script(
        f"find('mistake').selectedIndex = {number}; setLaws(...EXAMPLES['a draft too sure']);"
        "drawMany(20000)"
    )
    rounds = asked(page, "[...roundLaw(p, q, chosenRule(), find('mistake').value)]")
    tokens = [sum(weight * text.count(token) for text, weight in rounds) for token in "abcde"]
    for counted, law in (("written", tokens), ("drafted", asked(page, "q"))):
        counts = asked(page, f"counts.{counted}")
        shares = [each / sum(counts) for each in counts]
        assert shares == pytest.approx([each / sum(law) for each in law], abs=0.02)


def test_bars_follow_the_keyboard_and_the_mouse_and_still_sum_to_1(page: WebDriver) -> None:
    find(page, "#p0").send_keys(Keys.ARROW_UP, Keys.ARROW_UP)
    after = asked(page, "p")
    assert after == pytest.approx([0.44, *(each * 0.56 / 0.6 for each in P[1:])])
    assert page.switch_to.active_element.get_attribute("id") == "p0"
    ActionChains(page).drag_and_drop_by_offset(find(page, "#q1"), 0, -60).perform()
    assert asked(page, "q")[1] > Q[1] and sum(asked(page, "q")) == pytest.approx(1)


def test_the_models_winner_of_the_race_does_not_depend_on_the_draft(page: WebDriver) -> None:
    guesses = set()
    for _ in range(5):
        find(page, "#again").click()
        own = find(page, "#winner").text
        for token in range(5):
            page.execute_script(f"setLaws(p, changed(q, {token}, 0.96))")
            assert find(page, "#winner").text == own
            guesses.add((own, find(page, "#guess").text))
    assert len(guesses) > len(dict(guesses)), "other drafts guess other tokens"


def test_a_chosen_set_of_sublayers_sets_its_costs_and_the_best_length(page: WebDriver) -> None:
    """By the slider, the buttons, clicks and keys; the plan is that of the shipped model."""
    plan = json.loads((PAGE.parents[1] / "weights/small-llama/plan.json").read_text())
    for control, act, said in (
        ("#exit", Keys.ARROW_RIGHT, "(recorded)"),  # three layers
        ("#sublayer0", Keys.SPACE, "(estimated)"),
        ("#sublayer0", None, "(recorded)"),
        ("[name=bits][value='4']", Keys.SPACE, "(recorded)"),
        ("#plan", None, "(recorded)"),
    ):
        find(page, control).send_keys(act) if act else find(page, control).click()
        alpha, cost, row, length = asked(page, "draftOf(drafting, chosenBits()).knobs")
        knobs = [find(page, knob).get_attribute("value") for knob in ("#alpha", "#gamma")]
        assert [*map(float, knobs)] == [alpha, length]
        speeds = [expected_speedup(alpha, each, cost, 1 + row * each) for each in range(1, 13)]
        assert length == speeds.index(max(speeds)) + 1
        story = find(page, "#exit-story").text
        assert said in story and f"{max(speeds):.2f} times" in story
    drafting = asked(page, "drafting")
    left = [layer for layer in range(14) if not drafting[layer]]
    assert left == plan["attn"] and drafting[14:] == [layer < 3 for layer in range(14)]


def test_the_cache_holds_every_token_but_the_last_after_each_rollback(page: WebDriver) -> None:
    """As the loop's invariant says."""
    for begin in range(0, 24, 4):  # the stages of each round
        for now in (asked(page, f"cacheAt({begin})"), asked(page, f"cacheAt({begin + 3})")):
            assert now["length"] == len(now["shown"]) - 1
            assert now["entries"] == now["later"] == ["blue"] * now["length"] + ["rule"]
        now = asked(page, f"cacheAt({begin + 1})")
        found = now["entries"].count("amber"), now["later"].count("rule"), now["laterLength"]
        assert found == (4, 5, asked(page, f"cacheAt({begin}).length"))
    find(page, "#next").send_keys(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT, Keys.ARROW_LEFT)
    assert "round 1 of 6: draft" in find(page, "#stage").text


def test_a_report_of_the_benchmark_sets_the_costs_of_the_machine(
    page: WebDriver, tmp_path: Path
) -> None:
    (tmp_path / "other.json").write_text("{}")
    (tmp_path / "report.json").write_text(
        '{"costs": [{"step": "verification", "tokens": 1, "plain rounds": 1.0},'
        ' {"step": "verification", "tokens": 5, "plain rounds": 1.2},'
        ' {"step": "draft step, low bits", "tokens": 1, "plain rounds": 0.4}]}'
    )
    find(page, "#file").send_keys(str(tmp_path / "report.json"))
    WebDriverWait(page, 10).until(lambda _: find(page, "#cost-value").text == "0.4")
    assert find(page, "#row-value").text == "0.05"
    find(page, "#file").send_keys(str(tmp_path / "other.json"))
    WebDriverWait(page, 10).until(lambda _: "is no report" in find(page, "#best").text)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1000])
def test_the_page_fits_the_screen_and_asks_for_nothing(
    browser: WebDriver, width: int, scheme: str
) -> None:
    """No curve crosses a label."""
    look(browser, width, scheme)
    browser.get_log("browser")  # forgets what other pages logged
    browser.get(PAGE.as_uri())
    assert asked(browser, "document.documentElement.scrollWidth <= innerWidth")
    for name in asked(browser, "performance.getEntriesByType('resource').map((each) => each.name)"):
        assert name.startswith(("file:", "data:"))
    find(browser, "[name=bits][value='4']").click()
    assert not browser.execute_script(CROSSED) and not browser.get_log("browser")
    assert PAGE.read_text(encoding="utf-8").replace(SVG, "").count("http") == 0
