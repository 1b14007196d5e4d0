"""The live page in a real browser: what is written appears as it is written, and can be looked
into.
"""

import json
import re
import threading
import time
from collections.abc import Iterator

import pytest
from selenium.webdriver.chrome.webdriver import WebDriver
from selenium.webdriver.remote.webelement import WebElement

from app.draft_options import KINDS
from app.page import Recording
from app.server import worker
from tests.browser import find, look
from tests.calls import recorded
from tests.serving import CONTEXT, Served, chat_folder, serving, until

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


def ask(browser: WebDriver, *, finish: bool = True, **fields: object) -> None:
    """Fill the form in, send it, and wait for the end of the text."""
    find(browser, "#wish").clear()
    find(browser, "#wish").send_keys(PROMPT)
    for name, value in fields.items():
        key = "checked" if isinstance(value, bool) else "value"
        browser.execute_script(
            f"document.getElementById(arguments[0]).{key} = arguments[1]", name, value
        )
    find(browser, "#write").click()
    if finish:
        finished(browser)


def finished(browser: WebDriver) -> None:
    until(find(browser, "#write").is_enabled)


def found(browser: WebDriver, selector: str) -> list[WebElement]:
    return browser.find_elements("css selector", selector)


def kept(browser: WebDriver, selector: str) -> str:
    return browser.execute_script(
        "return [...document.querySelectorAll(arguments[0])].map((chip) =>"
        " chip.textContent).join('')",
        f"{selector} .accepted:not(.back), {selector} .own:not(.back)",
    )


def test_the_form_begins_as_the_command_line_says(opened: WebDriver) -> None:
    wanted = {"draft": "exit", "temperature": "0.9", "seed": "7", "budget": "256"}
    assert {name: find(opened, f"#{name}").get_property("value") for name in wanted} == wanted
    drafts = [option.text for option in found(opened, "#draft option")]
    assert drafts == ["none", "lookup", "exit", "lowbit"], "those that this server can make"
    opened.execute_script("document.getElementById('temperature').value = '.33'")
    assert opened.execute_script("return document.getElementById('temperature').checkValidity()")
    assert "<b>tiny<" in find(opened, "#facts").text


def test_two_columns_end_with_equal_texts_clocks_and_a_replay(opened: WebDriver) -> None:
    ask(opened, budget="20", beside=True)
    faster = r"[\d.]+ times as fast as plain decoding; the texts are equal\."
    assert re.fullmatch(faster, find(opened, "#notice").text)
    first, second = (clock.text for clock in found(opened, ".clock"))
    speed = r" · 20 tokens · [\d.]+ tokens/s"
    assert re.match(rf"\d+\.\d\d s exit at layer 2 of 4{speed} · \d+% accepted", first)
    assert re.match(rf"\d+\.\d\d s plain{speed}$", second)
    plain = kept(opened, ".sides > div:nth-child(2)")
    assert plain and kept(opened, "#text") == plain
    left, right = (box.rect for box in found(opened, ".sides .text"))
    assert left["x"] + left["width"] <= right["x"], "side by side"
    find(opened, "#start").click()
    assert not found(opened, "#text .round:not([hidden])")
    assert kept(opened, ".sides > div:nth-child(2)") == plain


def test_a_draft_is_dim_until_its_verdict(
    opened: WebDriver, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    verdict = threading.Event()
    recorded(monkeypatch, Recording, "observe", lambda *seen: verdict.wait(60))
    ask(opened, budget="8", finish=False)
    until(lambda: found(opened, "#text .pending .chip"))
    assert not found(opened, "#text button.chip"), "no verdict yet"
    verdict.set()
    finished(opened)
    assert found(opened, "#text button.chip") and not found(opened, ".pending")


def test_stop_ends_the_text_here_and_there(
    opened: WebDriver, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Each round takes a while: else a fast machine has written the whole text before the click.
    recorded(monkeypatch, Recording, "observe", lambda *seen: time.sleep(0.02))
    ask(opened, finish=False, budget=str(CONTEXT), draft="lookup", seed="3")
    until(lambda: found(opened, "#text button.chip"))
    find(opened, "#stop").click()
    finished(opened)
    assert find(opened, "#notice").text == "Stopped."
    until(lambda: served.idle)
    told = find(opened, "#stats").text
    assert "Ended by\ninterrupted" in told
    assert 0 < int(re.search(r"Tokens\n(\d+)", told)[1]) < CONTEXT - 100
    ask(opened, budget="4")
    assert re.search(r"Tokens\n4\b", find(opened, "#stats").text), "another text begins afresh"


def test_what_is_wrong_is_said_on_the_page(
    opened: WebDriver, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "MAX_WAITING", -4)
    ask(opened)
    assert "requests wait already" in find(opened, "#notice").text
    monkeypatch.undo()
    monkeypatch.setattr(served.worker.session.setting, "drafting", lambda *_: 1 / 0)
    ask(opened)
    assert find(opened, "#notice").text == "the request could not be answered"
    remarks = [entry["message"] for entry in opened.get_log("browser")]
    statuses = [re.search(r"status of (\d+)", remark)[1] for remark in remarks]
    assert statuses == ["429", "500"], "the browser's own remarks"


def test_tokens_like_markup_are_text(
    opened: WebDriver, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    hostile = (
        "<img src=x onerror=\"window.ran='token'\"></script><script>window.ran='script'</script>"
    )
    monkeypatch.setattr(served.worker.session, "labels", lambda token: hostile)
    ask(opened, budget="4", beside=True)
    assert {chip.text for chip in found(opened, "#text .own")} == {hostile}
    assert not found(opened, "img")


def test_a_phone_shows_it_without_scrolling_sideways(opened: WebDriver) -> None:
    look(opened, 360, "dark")
    wide = "return document.documentElement.scrollWidth"
    assert opened.execute_script(wide) == 360
    ask(opened, budget="12", beside=True)
    assert opened.execute_script(wide) == 360
    above, below = (box.rect for box in found(opened, ".sides .text"))
    assert above["y"] + above["height"] <= below["y"], "one below the other"
    background = opened.execute_script("return getComputedStyle(at('wish')).backgroundColor")
    assert max(int(part) for part in re.findall(r"\d+", background)[:3]) < 60


def test_every_draft_on_offer_is_served(served: Served) -> None:
    page = served.ask("/", method="GET")[1].decode()
    form = json.loads(re.search('id="data">(.*?)</script>', page, re.DOTALL)[1])["form"]
    for draft in form["drafts"]:
        assert served.text(prompt="the hen", draft=draft, max_tokens=3)
    for draft in {*KINDS} - {*form["drafts"]}:
        assert served.ask("/v1/completions", {"prompt": "the hen", "draft": draft})[0] == 400


def test_the_page_may_ask_its_own_server_only(served: Served) -> None:
    page = served.ask("/", method="GET")[1].decode()
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)
    assert policy.startswith("default-src 'none'; connect-src 'self'; script-src 'nonce-")
    assert not re.search(r"https?:|<link|@import|\bsrc=", page.partition("<script type")[0])
    assert "<b>tiny" not in page and "\\u003cb>tiny" in page, "the folder's name is text"
