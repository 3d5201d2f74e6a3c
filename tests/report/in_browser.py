"""A page in Chromium: opened, clicked, searched and read. The browser itself is the fixture ``browser``."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
from selenium.webdriver.chrome.service import Service  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402
from selenium.webdriver.support.ui import WebDriverWait  # noqa: E402

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
ARGUMENTS = (
    "headless=new no-sandbox disable-gpu disable-quic no-first-run disable-background-networking "
    "disable-component-update disable-sync disable-dev-shm-usage window-size=1100,900"
)


def started(profile: Path) -> Any:
    """A browser with a profile of its own; skips the test where there is none."""
    if CHROMIUM is None or DRIVER is None:
        pytest.skip("no browser: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in [*ARGUMENTS.split(), f"user-data-dir={profile}"]:
        options.add_argument(f"--{argument}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    return webdriver.Chrome(service=Service(DRIVER), options=options)


def opened(browser: Any, page: Path) -> Any:
    browser.get(page.as_uri())
    WebDriverWait(browser, 30).until(
        lambda d: d.execute_script("const g = document.getElementById('grid'); return !g || g.dataset.ready === 'true'")
    )
    return browser


def complaints(browser: Any) -> list[Any]:
    return [entry for entry in browser.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]


def shown(browser: Any, column: int) -> list[str]:
    """The texts of a column of the rows on screen, from top to bottom."""
    lines = "[...document.querySelectorAll('#rows .line')].filter(line => !line.hidden)"
    script = f"return {lines}.map(line => line.children[arguments[0]].textContent)"
    return browser.execute_script(script, column)


def click(browser: Any, selector: str) -> None:
    browser.execute_script("document.querySelector(arguments[0]).click()", selector)


def search(browser: Any, text: str, expected: str) -> None:
    box = browser.find_element("id", "search")
    box.send_keys(Keys.CONTROL, "a")
    box.send_keys(Keys.DELETE)
    box.send_keys(text)
    WebDriverWait(browser, 5).until(lambda d: d.find_element("id", "found").text == expected)


def text_of(browser: Any, selector: str) -> str:
    text: str = browser.find_element("css selector", selector).text
    return " ".join(text.split())
