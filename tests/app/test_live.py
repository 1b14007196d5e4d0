"""The live page in a real browser: each round appears as it is written."""

import time
from collections.abc import Iterator

import pytest
from selenium.webdriver.chrome.webdriver import WebDriver

from app.characters import Labels
from tests.browser import find, look
from tests.calls import recorded, until
from tests.serving import CONTEXT, Served, chat_folder, serving

PROMPT = "<img src=x onerror=\"window.ran='prompt'\"> the hen"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = chat_folder(tmp_path_factory.mktemp("models") / "<b>tiny<")
    given = "--draft", "exit", "--temperature", "0.9", "--max-new-tokens", "99"
    with serving("--model", str(folder), *given) as running:
        yield running


@pytest.fixture
def opened(browser: WebDriver, served: Served) -> Iterator[WebDriver]:
    """The page, on a desk-sized screen in light colours; nothing hostile may run."""
    look(browser, 1200, "light")
    browser.get(served.address + "/")
    yield browser
    assert browser.execute_script("return window.ran") is None, "a text was run"
    browser.get("about:blank")
    until(lambda: not served.worker.jobs)


def ask(browser: WebDriver, **fields: object) -> None:
    """Fill the form in, and send it."""
    for name, value in {"prompt": PROMPT, **fields}.items():
        key = "checked" if isinstance(value, bool) else "value"
        browser.execute_script(f"at(arguments[0]).{key} = arguments[1]", name, value)
    find(browser, "#write").click()


def test_two_columns_end_with_equal_texts_and_their_speeds(opened: WebDriver) -> None:
    """The form begins as the command line says, and the folder's name is no markup."""
    wanted = {"draft": "exit", "temperature": "0.9", "limit": "99"}
    assert {name: find(opened, f"#{name}").get_property("value") for name in wanted} == wanted
    assert "<b>tiny<" in find(opened, "#model").text
    assert find(opened, "#draft").text.split() == ["auto", "none", "lookup", "exit", "lowbit"]
    ask(opened, limit="20", seed="7", compare=True)
    until(find(opened, "#write").is_enabled)
    assert "times as fast as plain decoding; the texts are equal" in find(opened, "#notice").text
    clocks = [each.text for each in opened.find_elements("css selector", ".clock")]
    for clock, draft in zip(clocks, ("exit at layer 2 of 4", "plain"), strict=True):
        assert f" s: {draft} · 20 tokens · " in clock
    assert opened.get_log("browser") == []


def test_stop_ends_the_text_here_and_there(
    opened: WebDriver, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    # each token takes a while: else a fast machine has written the whole text before the click
    recorded(monkeypatch, Labels, "__call__", lambda *_: time.sleep(0.01))
    ask(opened, limit=str(CONTEXT), draft="lookup", seed="3")
    until(lambda: opened.find_elements("css selector", ".chip.own[data-id]"))
    find(opened, "#stop").click()
    until(lambda: not served.worker.jobs)
    until(lambda: find(opened, "#notice").text == "stopped")
    ask(opened, prompt="hen " * CONTEXT)
    until(lambda: "shorten the prompt" in find(opened, "#notice").text)


def test_tokens_like_markup_are_text_and_fit_a_phone(
    opened: WebDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    hostile = "<img src=x onerror=\"window.ran='token'\"></script><script>window.ran=1</script>"
    monkeypatch.setattr(Labels, "__call__", lambda self, token: hostile)
    look(opened, 360, "dark")
    ask(opened, limit="4", compare=True)
    until(find(opened, "#write").is_enabled)
    chips = opened.find_elements("css selector", ".chip[data-id]")
    assert {chip.text for chip in chips} == {hostile}
    assert not opened.find_elements("css selector", "img")
    assert opened.execute_script("return document.documentElement.scrollWidth") == 360
