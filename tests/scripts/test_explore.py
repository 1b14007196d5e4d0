"""The page to try things out: its numbers are those of the code, and it works by mouse, keyboard,
on a narrow screen and without a network.
"""

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
KNOBS = ("exit", "alpha", "cost", "row", "gamma")
SVG = "http://www.w3.org/2000/svg"  # a name, which is not asked for


@pytest.fixture
def page(browser: WebDriver) -> WebDriver:
    """The page anew, on a wide screen."""
    look(browser, 1000, "light")
    browser.get(PAGE.as_uri())
    return browser


def asked(page: WebDriver, expression: str, *given: Any) -> Any:
    """Value of an expression of the page's script, with ``arguments``."""
    return page.execute_script(f"return {expression}", *given)


def test_the_ratio_rule_of_the_page_is_that_of_the_code(page: WebDriver) -> None:
    p, q = torch.tensor([P, Q], dtype=torch.float64)

    def run(randomness: Randomness) -> int:
        drafted = randomness.draw(q, Place(0))[None]
        rows = torch.stack((p, p)), q[None]
        accepted, token = verify_by_ratio(*rows, drafted, randomness, Place(0))
        return int(drafted if accepted else token)

    laws = {
        0: output_law(run, Enumerator),
        1: law_of(speculative(p, q, lambda p, q: p)).probs,
        3: law_of(speculative(p, q, lambda p, q: (p - q).clamp(min=0) + 0.05)).probs,
    }
    for number, law in laws.items():
        found = asked(page, f"law(arguments[0], arguments[1], MISTAKES[{number}])", P, Q)
        assert found == pytest.approx([law[token] for token in range(5)], abs=1e-9)
        distance = asked(page, "distance(arguments[0], arguments[1])", P, found)
        assert distance == pytest.approx(total_variation(law, dict(enumerate(P))), abs=1e-9)
    coarse = asked(page, "law([0.5, 0.5, 0], [0, 0, 1], MISTAKES[2])")
    assert coarse == pytest.approx([255 / 512, 255 / 512, 1 / 256])


def test_a_chosen_exit_sets_its_costs_and_the_best_length(page: WebDriver) -> None:
    """Layers by the slider, bits by the buttons, with keys; the last exit is in four bits only."""
    for control, key, bits, at in (
        ("#exit", Keys.ARROW_RIGHT, 16, 2),
        ("[name=bits][value='4']", Keys.SPACE, 4, 2),
        ("#exit", Keys.END, 4, 8),
        ("[name=bits][value='4']", Keys.ARROW_LEFT, 16, 7),
    ):
        find(page, control).send_keys(key)
        exit = asked(page, f"EXITS[{bits}][{at}]")
        alpha, cost, row, length = exit["knobs"]
        for name, value in zip(KNOBS, [exit["layer"], *exit["knobs"]], strict=True):
            assert float(find(page, f"#{name}-value").text) == value
        speeds = [expected_speedup(alpha, each, cost, 1 + row * each) for each in range(1, 13)]
        assert length == speeds.index(max(speeds)) + 1
        assert f"{max(speeds):.2f} times" in find(page, "#exit-story").text


@pytest.mark.parametrize("mistake", range(4))
def test_drawn_tokens_settle_on_the_law(page: WebDriver, mistake: int) -> None:
    """With each mistake, and without one (0)."""
    page.execute_script(
        f"find('mistake').selectedIndex = {mistake}; setLaws(...EXAMPLES['disjoint']);"
        "drawMany(20000)"
    )
    for counted, law in (("written", f"law(p, q, MISTAKES[{mistake}])"), ("drafted", "q")):
        shares = asked(page, f"counts.{counted}.map((count) => count / 20000)")
        assert shares == pytest.approx(asked(page, law), abs=0.02)


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
    look(browser, width, scheme)
    browser.get(PAGE.as_uri())
    assert asked(browser, "document.documentElement.scrollWidth <= innerWidth")
    for name in asked(browser, "performance.getEntriesByType('resource').map((each) => each.name)"):
        assert name.startswith(("file:", "data:"))
    find(browser, "[name=bits][value='4']").click()
    assert asked(browser, "chosenBits()") == 4 and not browser.get_log("browser")
    assert PAGE.read_text(encoding="utf-8").replace(SVG, "").count("http") == 0
