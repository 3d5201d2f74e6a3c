"""A page in Chromium: opened, clicked, searched and read.

The browser itself is the fixture ``browser``.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
from selenium.webdriver.chrome.service import Service  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402
from selenium.webdriver.support.ui import WebDriverWait  # noqa: E402

CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
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
    browser.get("about:blank")
    # what pages of other tests said, such as that their server has ended
    browser.get_log("browser")
    browser.get(page.as_uri())
    WebDriverWait(browser, 30).until(
        lambda d: d.execute_script(
            "const g = document.getElementById('grid'); return !g || g.dataset.ready === 'true'"
        )
    )
    return browser


def complaints(browser: Any) -> list[Any]:
    return [
        entry for entry in browser.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")
    ]


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
    """The text on screen, found and read by one script: the live page replaces its elements at any
    time.
    """
    text: str = browser.execute_script(
        "return document.querySelector(arguments[0]).innerText", selector
    )
    return " ".join(text.split())


@contextlib.contextmanager
def screen(
    browser: Any, width: int, height: int = 900, *, dark: bool = False, printed: bool = False
) -> Iterator[None]:
    """A screen of this size in pixels, or paper of this width; as it was before afterwards."""
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    theme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
    theme += [{"name": "prefers-reduced-motion", "value": "reduce"}]  # scrolls at once
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.execute_cdp_cmd("Emulation.setScrollbarsHidden", {"hidden": True})
    browser.execute_cdp_cmd(
        "Emulation.setEmulatedMedia", {"media": "print" if printed else "", "features": theme}
    )
    try:
        yield
    finally:
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "", "features": []})
        browser.execute_cdp_cmd("Emulation.setScrollbarsHidden", {"hidden": False})
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
