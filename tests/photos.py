"""Photographs of the pages: ``python -m tests.photos`` takes ``docs/explore.png`` and
``docs/live.png`` anew. It needs Chromium and its driver.
"""

import sys
from pathlib import Path

from selenium.webdriver.chrome.webdriver import WebDriver
from selenium.webdriver.support.ui import WebDriverWait

from tests.browser import find, headless
from tests.serving import serving

DOCS = Path(__file__).parents[1] / "docs"
WINDOW = {"width": 1100, "height": 1300, "deviceScaleFactor": 1, "mobile": False}


def explore(browser: WebDriver) -> None:
    """The ratio rule of docs/explore.html, after three thousand tokens."""
    browser.get((DOCS / "explore.html").as_uri())
    browser.execute_script("drawMany(3000)")
    find(browser, "#ratio").screenshot(str(DOCS / "explore.png"))


def live(browser: WebDriver) -> None:
    """The page of ``make serve``, with a drafted text beside a plain one."""
    with serving() as served:
        browser.get(served.address + "/")
        find(browser, "#prompt").send_keys("What is photosynthesis?")
        browser.execute_script("at('draft').value = 'lowbit'; at('compare').checked = true")
        find(browser, "#write").click()
        WebDriverWait(browser, 120).until(lambda _: find(browser, "#write").is_enabled())
        find(browser, "body").screenshot(str(DOCS / "live.png"))


if __name__ == "__main__":
    browser = headless()
    if browser is None:
        sys.exit("no browser: install chromium and chromium-driver")
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", WINDOW)
    browser.execute_cdp_cmd("Emulation.setScrollbarsHidden", {"hidden": True})
    explore(browser)
    live(browser)
    browser.quit()
