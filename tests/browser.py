"""Steps of the tests of pages in a browser."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from selenium.webdriver.chrome.webdriver import WebDriver
    from selenium.webdriver.remote.webelement import WebElement


def look(browser: WebDriver, width: int, scheme: str) -> None:
    """At a window of this width, in "light" or "dark" colours."""
    feature = {"name": "prefers-color-scheme", "value": scheme}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
    screen = {"width": width, "height": 740, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)


def find(browser: WebDriver, selector: str) -> WebElement:
    return browser.find_element("css selector", selector)
