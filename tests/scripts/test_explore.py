"""The page to try things out: its numbers are those of the code, and it works by mouse, keyboard,
on a narrow screen and without a network.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from selenium.webdriver.chrome.webdriver import WebDriver
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait

from decoding.proof.enumeration import Enumerator, output_law, total_variation
from decoding.proof.foreign import law_of
from decoding.randomness import Place, Randomness
from decoding.rounds import expected_speedup
from decoding.verify import verify_by_ratio
from tests.browser import find, look
from tests.laws import speculative

PAGE = Path(__file__).parents[2] / "docs/explore.html"
P = [0.4, 0.25, 0.2, 0.1, 0.05]
Q = [0.25, 0.45, 0.1, 0.1, 0.1]
EPSILON = 0.05


@pytest.fixture
def page(browser: WebDriver) -> WebDriver:
    """The page anew, on a wide screen."""
    look(browser, 1000, "light")
    browser.get(PAGE.as_uri())
    return browser


def asked(page: WebDriver, expression: str, *given: Any) -> Any:
    """Value of an expression of the page's script, with ``arguments``."""
    return page.execute_script(f"return {expression}", *given)


def until(page: WebDriver, holds: Callable[[], bool]) -> None:
    """Wait for a file to be read."""
    WebDriverWait(page, 10).until(lambda _: holds())


def test_the_ratio_rule_of_the_page_is_that_of_the_code(page: WebDriver) -> None:
    p, q = torch.tensor([P, Q], dtype=torch.float64)

    def run(randomness: Randomness) -> int:
        drafted = randomness.draw(q, Place(0))[None]
        accepted, token = verify_by_ratio(
            torch.stack((p, p)), q[None], drafted, randomness, Place(0)
        )
        return int(drafted if accepted else token)

    laws = {
        0: output_law(run, Enumerator),
        1: law_of(speculative(p, q, lambda p, q: p)).probs,
        3: law_of(speculative(p, q, lambda p, q: (p - q).clamp(min=0) + EPSILON)).probs,
    }
    for number, law in laws.items():
        found = asked(page, f"law(arguments[0], arguments[1], MISTAKES[{number}])", P, Q)
        assert found == pytest.approx([law[token] for token in range(5)], abs=1e-9)
        distance = asked(page, "distance(arguments[0], arguments[1])", P, found)
        assert distance == pytest.approx(total_variation(law, dict(enumerate(P))), abs=1e-9)


def test_a_coarse_u_accepts_what_the_model_never_writes(page: WebDriver) -> None:
    found = asked(page, "law([0.5, 0.5, 0], [0, 0, 1], MISTAKES[2])")
    assert found[2] == pytest.approx(1 / 256) and sum(found) == pytest.approx(1)


def test_a_chosen_exit_sets_its_costs_and_the_best_length(page: WebDriver) -> None:
    """Layers by the slider, bits by the buttons, with keys; the last exit is in four bits only."""
    layers, four = find(page, "#exit"), find(page, "[name=bits][value='4']")
    steps = (
        (layers, Keys.ARROW_RIGHT, 16, 2),
        (four, Keys.SPACE, 4, 2),
        (layers, Keys.END, 4, 8),
        (four, Keys.ARROW_LEFT, 16, 7),
    )
    for control, key, bits, at in steps:
        control.send_keys(key)
        exit = asked(page, f"EXITS[{bits}][{at}]")
        alpha, cost, row, length = exit["knobs"]
        assert find(page, "#exit-value").text == str(exit["layer"])
        shown = [float(find(page, f"#{id}-value").text) for id in ("alpha", "cost", "row")]
        assert shown == [alpha, cost, row]
        speeds = [expected_speedup(alpha, each, cost, 1 + row * each) for each in range(1, 13)]
        assert int(find(page, "#gamma-value").text) == length == speeds.index(max(speeds)) + 1
        assert f"{max(speeds):.2f} times" in find(page, "#exit-story").text


def test_a_tap_on_a_narrow_screen_chooses_the_bits(browser: WebDriver) -> None:
    look(browser, 400, "light")
    browser.get(PAGE.as_uri())
    find(browser, "[name=bits][value='4']").click()
    assert asked(browser, "chosenBits()") == 4
    assert find(browser, "#exit-story").text.startswith("α")


def test_drawn_tokens_settle_on_the_law_with_and_without_a_mistake(page: WebDriver) -> None:
    for mistake in range(4):
        page.execute_script(
            f"find('mistake').selectedIndex = {mistake}; setLaws(...EXAMPLES['disjoint']);"
            "drawMany(20000)"
        )
        law = asked(page, f"law(p, q, MISTAKES[{mistake}])")
        written = asked(page, "counts.written.map((count) => count / 20000)")
        assert written == pytest.approx(law, abs=0.02)
        assert asked(page, "counts.drafted.map((count) => count / 20000)") == pytest.approx(
            asked(page, "q"), abs=0.02
        )


def test_bars_follow_the_keyboard_and_the_mouse_and_still_sum_to_1(page: WebDriver) -> None:
    before = asked(page, "p")
    find(page, "#p0").send_keys(Keys.ARROW_UP, Keys.ARROW_UP)
    after = asked(page, "p")
    assert after[0] == pytest.approx(before[0] + 0.04) and sum(after) == pytest.approx(1)
    assert after[1] / after[2] == pytest.approx(before[1] / before[2])
    assert page.switch_to.active_element.get_attribute("id") == "p0"
    bar = find(page, "#q1")
    ActionChains(page).move_to_element(bar).click_and_hold().move_by_offset(
        0, -60
    ).release().perform()
    assert asked(page, "q")[1] > Q[1] and sum(asked(page, "q")) == pytest.approx(1)


def test_the_models_winner_of_the_race_does_not_depend_on_the_draft(page: WebDriver) -> None:
    for turn in range(5):
        find(page, "#again").click()
        own = find(page, "#winner").text
        guesses = set()
        for token in range(5):
            page.execute_script(f"setLaws(p, changed(q, {token}, 0.96))")
            assert find(page, "#winner").text == own
            guesses.add(find(page, "#guess").text)
        page.execute_script("setLaws(...EXAMPLES['a usual draft'])")
        assert len(guesses) > 1 or turn, "other drafts guess other tokens"


def test_the_cache_holds_every_token_but_the_last_after_each_rollback(page: WebDriver) -> None:
    """As the loop's invariant says."""
    for round in range(6):
        for stage, entries in ((0, "blue"), (3, "blue")):
            now = asked(page, f"cacheAt({4 * round + stage})")
            assert now["length"] == len(now["shown"]) - 1
            assert now["entries"] == now["later"] == [entries] * now["length"] + ["rule"]
        drafting = asked(page, f"cacheAt({4 * round + 1})")
        assert drafting["entries"].count("amber") == 4
        assert drafting["later"].count("rule") == 5
        assert drafting["laterLength"] == asked(page, f"cacheAt({4 * round}).length")
    find(page, "#next").send_keys(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT, Keys.ARROW_LEFT)
    assert "round 1 of 6: draft" in find(page, "#stage").text


def test_a_report_of_the_benchmark_sets_the_costs_of_the_machine(
    page: WebDriver, tmp_path: Path
) -> None:
    file = tmp_path / "report.json"
    file.write_text(
        '{"costs": [{"step": "verification", "tokens": 1, "plain rounds": 1.0},'
        ' {"step": "verification", "tokens": 5, "plain rounds": 1.2},'
        ' {"step": "draft step, low bits", "plain rounds": 0.4}]}'
    )
    find(page, "#file").send_keys(str(file))
    until(page, lambda: find(page, "#cost-value").text == "0.4")
    assert find(page, "#preset").get_attribute("value") == "your machine: draft step, low bits"
    assert find(page, "#row-value").text == "0.05"
    other = tmp_path / "other.json"
    other.write_text("{}")
    find(page, "#file").send_keys(str(other))
    until(page, lambda: "is no report" in find(page, "#best").text)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1000])
def test_the_page_fits_the_screen_and_asks_for_nothing(
    browser: WebDriver, width: int, scheme: str
) -> None:
    look(browser, width, scheme)
    browser.get(PAGE.as_uri())
    assert asked(browser, "document.documentElement.scrollWidth <= innerWidth")
    requests = asked(browser, "performance.getEntriesByType('resource').map((each) => each.name)")
    assert not [name for name in requests if not name.startswith(("file:", "data:"))]
    assert not browser.get_log("browser")
    source = PAGE.read_text(encoding="utf-8")
    assert source.count("http") == source.count("http://www.w3.org/2000/svg")
