"""A page in Chromium: opened, clicked, searched and read. The browser itself is the fixture ``browser``."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
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
    browser.get("about:blank")
    browser.get_log("browser")  # what pages of other tests said, such as that their server has ended
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
    """The text on screen, found and read by one script: the live page replaces its elements at any time."""
    text: str = browser.execute_script("return document.querySelector(arguments[0]).innerText", selector)
    return " ".join(text.split())


@contextlib.contextmanager
def screen(browser: Any, width: int, height: int = 900, *, dark: bool = False, printed: bool = False) -> Iterator[None]:
    """A screen of this size in pixels, or paper of this width; as it was before afterwards."""
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    theme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
    theme += [{"name": "prefers-reduced-motion", "value": "reduce"}]  # scrolls at once
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.execute_cdp_cmd("Emulation.setScrollbarsHidden", {"hidden": True})
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print" if printed else "", "features": theme})
    try:
        yield
    finally:
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "", "features": []})
        browser.execute_cdp_cmd("Emulation.setScrollbarsHidden", {"hidden": False})
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def press(browser: Any, key: str) -> None:
    """A key, for whatever has the focus."""
    codes = {"Tab": 9, "Enter": 13, "Escape": 27}
    event = {"key": key, "code": key, "windowsVirtualKeyCode": codes[key]}
    down = {"type": "rawKeyDown", **event} if key != "Enter" else {"type": "keyDown", "text": "\r", **event}
    browser.execute_cdp_cmd("Input.dispatchKeyEvent", down)
    browser.execute_cdp_cmd("Input.dispatchKeyEvent", {"type": "keyUp", **event})


def seconds_to_open(browser: Any, page: Path) -> float:
    """From the navigation until the table of examples answers."""
    browser.get("about:blank")
    start = time.perf_counter()
    opened(browser, page)
    return time.perf_counter() - start


@dataclass(frozen=True)
class Fragment:
    """A text that a reader sees, and where.

    Attributes:
        text: In one line, with plain spaces.
        row: The number of the table row, list item, paragraph or box that it stands in.
        drawn: The number of the chart that it is part of; None outside charts.
        box: Left, top, right and bottom in pixels of the page.
    """

    text: str
    row: int
    drawn: int | None
    box: tuple[float, float, float, float]


# Every text whose boxes all lie between top and height, that has an ink, is not folded away, clipped or covered.
_VISIBLE = r"""
const [height, over] = arguments, width = document.documentElement.clientWidth, out = [];
const rows = new Map(), charts = new Map();
const number = (map, key) => { if (!map.has(key)) map.set(key, map.size); return map.get(key); };
const rowOf = (e) => e.closest("tr") || e.closest("dl > div") || e.closest("li") || e.closest("text") ||
  e.closest("p, dt, dd, figcaption, summary, h1, h2, h3, h4, h5, h6, div, section, article, header") || e;
const folded = (e) => {
  for (let d = e.closest("details"); d; d = d.parentElement.closest("details")) {
    const summary = d.querySelector(":scope > summary");
    if (!d.open && !(summary && summary.contains(e))) return true;
  }
  return false;
};
const clipped = (e, box) => {
  for (let a = e; a && a !== document.body; a = a.parentElement) {
    const style = getComputedStyle(a);
    if (style.clipPath.startsWith("inset(50%")) return true;  // for screen readers
    if (style.overflowX === "visible" && style.overflowY === "visible") continue;
    if (a instanceof SVGElement && !(a instanceof SVGSVGElement)) continue;
    const own = a.getBoundingClientRect();
    if (box.left < own.left - 2 || box.right > own.right + 2 || box.top < own.top - 4 || box.bottom > own.bottom + 4)
      return true;
  }
  return false;
};
const covered = (e, box) => {
  const hit = document.elementFromPoint((box.left + box.right) / 2, (box.top + box.bottom) / 2);
  return hit && !hit.contains(e) && !e.contains(hit) && !(e.closest("svg") && e.closest("svg") === hit.closest("svg"));
};
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT), range = document.createRange();
while (walker.nextNode()) {
  const node = walker.currentNode, e = node.parentElement;
  if (!node.data.trim() || e.closest("script, style, template, noscript, title, desc") || folded(e)) continue;
  if (!e.checkVisibility({opacityProperty: true, visibilityProperty: true, contentVisibilityAuto: true})) continue;
  const style = getComputedStyle(e), ink = e instanceof SVGElement ? style.fill : style.color;
  if (parseFloat(style.fontSize) < 9 || ink === "none" || /^rgba\(.*, 0\)$/.test(ink)) continue;
  range.selectNodeContents(node);
  const boxes = [...range.getClientRects()].filter((box) => box.width > 0 && box.height > 0);
  if (!boxes.length || !boxes.every((box) => box.width > 1 && box.height > 1 && box.left >= -1 && box.top >= -1 &&
      box.right <= width + 1 && box.bottom <= height && !clipped(e, box) && (over || !covered(e, box)))) continue;
  const svg = e.closest("svg"), all = [Math.min(...boxes.map((b) => b.left)), Math.min(...boxes.map((b) => b.top)),
    Math.max(...boxes.map((b) => b.right)), Math.max(...boxes.map((b) => b.bottom))];
  out.push([node.data, number(rows, rowOf(e)), svg ? number(charts, svg) : null, all]);
}
return out;
"""


def plain(text: str) -> str:
    """In one line, with plain spaces and signs."""
    for strange, usual in (("\u00a0", " "), ("\u202f", " "), ("\u2009", " "), ("\u2212", "-"), ("\u2019", "'")):
        text = text.replace(strange, usual)
    return " ".join(text.split())


def visible(browser: Any, height: int = 900, *, covered: bool = False) -> list[Fragment]:
    """Every text within the first so many pixels of an opened page that a reader really sees, or would if uncovered."""
    browser.execute_script("window.scrollTo(0, 0)")
    found = browser.execute_script(_VISIBLE, height, covered)
    return [Fragment(plain(text), row, drawn, tuple(box)) for text, row, drawn, box in found]
