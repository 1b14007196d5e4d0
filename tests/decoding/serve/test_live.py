"""The live page in a real browser: what is written appears as it is written, and can be looked
into.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from decoding.run.chooser import DRAFTERS
from decoding.serve import worker
from decoding.show.page import Recording
from tests.browser import find, look
from tests.serving import CONTEXT, Served, chat_folder, serving, until

if TYPE_CHECKING:
    from selenium.webdriver.chrome.webdriver import WebDriver

PROMPT = "<img src=x onerror=\"window.ran='prompt'\"> the hen"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = chat_folder(tmp_path_factory.mktemp("models") / "<b>tiny<")
    with serving(
        "--model", str(folder), "--draft", "exit", "--temperature", "0.9", "--seed", "7"
    ) as running:
        yield running


@pytest.fixture
def opened(browser: WebDriver, served: Served) -> Iterator[WebDriver]:
    """The page, on a desk-sized screen in light colours; no error may be logged, and nothing
    hostile run.
    """
    look(browser, 1200, "light")
    browser.get(served.address + "/")
    yield browser
    assert browser.get_log("browser") == []
    assert browser.execute_script("return window.ran") is None, "a text was run"
    browser.get("about:blank")
    until(lambda: served.idle)


def ask(browser: WebDriver, **fields: object) -> None:
    """Fill the form in and send it."""
    find(browser, "#wish").clear()
    find(browser, "#wish").send_keys(PROMPT)
    for name, value in fields.items():
        key = "checked" if isinstance(value, bool) else "value"
        browser.execute_script(
            f"document.getElementById(arguments[0]).{key} = arguments[1]", name, value
        )
    find(browser, "#write").click()


def wait(browser: WebDriver, true: Callable[[WebDriver], Any]) -> Any:
    from selenium.webdriver.support.ui import WebDriverWait

    return WebDriverWait(browser, 60, 0.02).until(true)


def finished(browser: WebDriver) -> bool:
    return find(browser, "#write").is_enabled()


def kept(browser: WebDriver, selector: str) -> str:
    script = (
        "return [...document.querySelectorAll(arguments[0])].map((chip) =>"
        " chip.textContent).join('')"
    )
    return browser.execute_script(
        script, f"{selector} .accepted:not(.back), {selector} .own:not(.back)"
    )


def test_the_form_begins_as_the_command_line_says(opened: WebDriver) -> None:
    values = [
        find(opened, selector).get_property("value")
        for selector in ("#draft", "#temperature", "#seed", "#budget")
    ]
    assert values == ["exit", "0.9", "7", "256"]
    drafts = [option.text for option in opened.find_elements("css selector", "#draft option")]
    assert drafts == ["none", "lookup", "exit", "lowbit"], "those that this server can make"
    opened.execute_script("document.getElementById('temperature').value = '.33'")
    assert opened.execute_script("return document.getElementById('temperature').checkValidity()")
    assert "<b>tiny<" in find(opened, "#facts").text


def test_two_columns_end_with_equal_texts_clocks_and_a_replay(opened: WebDriver) -> None:
    ask(opened, budget="20", beside=True)
    wait(opened, finished)
    assert re.fullmatch(
        r"[\d.]+ times as fast as plain decoding; the texts are equal\.",
        find(opened, "#notice").text,
    )
    clocks = [clock.text for clock in opened.find_elements("css selector", ".clock")]
    assert re.match(
        r"\d+\.\d\d s exit at layer 2 of 4 · 20 tokens · [\d.]+ tokens/s · \d+% accepted", clocks[0]
    )
    assert re.match(r"\d+\.\d\d s plain · 20 tokens · [\d.]+ tokens/s$", clocks[1])
    ours, plain = kept(opened, "#text"), kept(opened, ".sides > div:nth-child(2)")
    assert ours == plain and ours
    left, right = (box.rect for box in opened.find_elements("css selector", ".sides .text"))
    assert left["x"] + left["width"] <= right["x"], "side by side"
    find(opened, "#start").click()
    assert not opened.find_elements("css selector", "#text .round:not([hidden])")
    assert kept(opened, ".sides > div:nth-child(2)") == plain


def test_a_draft_is_dim_until_its_verdict(
    opened: WebDriver, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    verdict, observe = threading.Event(), Recording.observe

    def hesitate(recording: Recording, *seen: Any) -> None:
        verdict.wait(60)
        observe(recording, *seen)

    monkeypatch.setattr(Recording, "observe", hesitate)
    ask(opened, budget="8")
    wait(opened, lambda browser: browser.find_elements("css selector", "#text .pending .chip"))
    assert not opened.find_elements("css selector", "#text button.chip"), "no verdict yet"
    verdict.set()
    wait(opened, finished)
    assert opened.find_elements("css selector", "#text button.chip")
    assert not opened.find_elements("css selector", ".pending")


def test_stop_ends_the_text_here_and_there(
    opened: WebDriver, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    observe = Recording.observe

    def dawdle(recording: Recording, *seen: Any) -> None:
        time.sleep(0.02)  # a round: else a fast machine has written the whole text before the click
        observe(recording, *seen)

    monkeypatch.setattr(Recording, "observe", dawdle)
    ask(opened, budget=str(CONTEXT), draft="lookup", seed="3")
    wait(opened, lambda browser: browser.find_elements("css selector", "#text button.chip"))
    find(opened, "#stop").click()
    wait(opened, finished)
    assert find(opened, "#notice").text == "Stopped."
    until(lambda: served.idle)
    told = find(opened, "#stats").text
    assert "Ended by\ninterrupted" in told
    tokens = int(re.search(r"Tokens\n(\d+)", told)[1])
    assert 0 < tokens < CONTEXT - 100
    ask(opened, budget="4")
    wait(opened, finished)
    assert re.search(r"Tokens\n4\b", find(opened, "#stats").text), "another text begins afresh"


def test_what_is_wrong_is_said_on_the_page(
    opened: WebDriver, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "MAX_WAITING", -4)
    ask(opened)
    wait(opened, finished)
    assert "requests wait already" in find(opened, "#notice").text
    monkeypatch.undo()
    monkeypatch.setattr(served.worker.session.chooser, "drafting", lambda *_: 1 / 0)
    ask(opened)
    wait(opened, finished)
    assert find(opened, "#notice").text == "the request could not be answered"
    statuses = [
        re.search(r"status of (\d+)", entry["message"])[1] for entry in opened.get_log("browser")
    ]
    assert statuses == ["429", "500"], "the browser's own remarks"


def test_tokens_like_markup_are_text(
    opened: WebDriver, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    hostile = (
        "<img src=x onerror=\"window.ran='token'\"></script><script>window.ran='script'</script>"
    )
    monkeypatch.setattr(served.worker.session, "labels", lambda token: hostile)
    ask(opened, budget="4", beside=True)
    wait(opened, finished)
    assert {chip.text for chip in opened.find_elements("css selector", "#text .own")} == {hostile}
    assert not opened.find_elements("css selector", "img")


def test_a_phone_shows_it_without_scrolling_sideways(opened: WebDriver) -> None:
    look(opened, 360, "dark")
    wide = "return document.documentElement.scrollWidth"
    assert opened.execute_script(wide) == 360
    ask(opened, budget="12", beside=True)
    wait(opened, finished)
    assert opened.execute_script(wide) == 360
    above, below = (box.rect for box in opened.find_elements("css selector", ".sides .text"))
    assert above["y"] + above["height"] <= below["y"], "one below the other"
    background = opened.execute_script("return getComputedStyle(at('wish')).backgroundColor")
    brightness = [int(part) for part in re.findall(r"\d+", background)[:3]]
    assert max(brightness) < 60


def test_every_draft_on_offer_is_served(served: Served) -> None:
    page = served.ask("/", method="GET")[1].decode()
    form = json.loads(re.search('id="data">(.*?)</script>', page, re.DOTALL)[1])["form"]
    for draft in form["drafts"]:
        assert served.text(prompt="the hen", draft=draft, max_tokens=3)
    for draft in {*DRAFTERS} - {*form["drafts"]}:
        assert served.ask("/v1/completions", {"prompt": "the hen", "draft": draft})[0] == 400


def test_the_page_may_ask_its_own_server_only(served: Served) -> None:
    page = served.ask("/", method="GET")[1].decode()
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)
    assert policy.startswith("default-src 'none'; connect-src 'self'; script-src 'nonce-")
    assert not re.search(r"https?:|<link|@import|\bsrc=", page.partition("<script type")[0])
    assert "<b>tiny" not in page and "\\u003cb>tiny" in page, "the folder's name is text"
