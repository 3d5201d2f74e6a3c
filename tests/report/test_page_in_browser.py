"""The page in a real browser: it loads without errors, sorts, searches, opens details, turns dark and prints.

Needs Chromium and its driver (Debian: ``apt-get install chromium chromium-driver``) and selenium; skips without.
"""

from __future__ import annotations

import base64
import re
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.report.in_browser import Keys, WebDriverWait, click, complaints, opened, search, shown
from tests.report.run_cases import made_up
from torchfil.report import write_report

EVIL = "<script>window.ran = true</script>"
ROWS = 50_000


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A small report with everything, its public version, and a large one."""
    folder = tmp_path_factory.mktemp("reports")
    run = made_up(300, text_ids=True)
    ids = run.ids.astype("<U60")
    ids[5], ids[6] = EVIL, "turned \u202egnp.exe"
    columns = {name: values.copy() for name, values in run.columns.items()}
    columns["participations"][11], columns["fil"][11], columns["mse_bound"][11] = 0, 0, np.inf
    small = made_up(300, text_ids=True, ids=ids, columns=columns)
    large = made_up(ROWS, text_ids=True, pictures=None, attributes=None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torchfil.report.figures.find_spec", lambda name: None)
        return {
            "small": write_report(small, folder / "small"),
            "public": write_report(small, folder / "public", redacted=True),
            "large": write_report(large, folder / "large"),
        }


def test_the_page_loads_without_a_word_and_runs_no_script_of_the_data(browser: Any, reports: dict[str, Path]) -> None:
    for name in ("small", "public"):
        opened(browser, reports[name])
        assert complaints(browser) == []
        assert browser.execute_script("return window.ran") is None
        wide = browser.execute_script(
            "return [document.documentElement.scrollWidth, document.documentElement.clientWidth]"
        )
        assert wide[0] <= wide[1]
    assert browser.execute_script("return document.querySelectorAll('#grid, dialog, img').length") == 0


def test_marks_that_turn_text_around_are_shown(browser: Any, reports: dict[str, Path]) -> None:
    opened(browser, reports["small"])
    search(browser, "turned", "1 of 300 examples")
    assert shown(browser, 0) == ["turned \\u202egnp.exe"]


def test_the_table_sorts_and_keeps_the_unmeasured_last(browser: Any, reports: dict[str, Path]) -> None:
    opened(browser, reports["small"])
    bounds = [float(text.replace(",", "")) for text in shown(browser, 1)]
    assert bounds == sorted(bounds)
    click(browser, "#head [data-key=fil] button")
    largest = [float(text.replace(",", "")) for text in shown(browser, 2)]
    assert largest == sorted(largest, reverse=True)
    assert browser.execute_script("return document.querySelector('#head [data-key=fil]').ariaSort") == "descending"
    for _ in range(2):
        browser.find_element("id", "grid").send_keys(Keys.END)
        assert shown(browser, 2)[-1] == "not measured"
        assert shown(browser, 0)[-1] == "Zoë 11"
        click(browser, "#head [data-key=fil] button")
    click(browser, "#head [data-key=id] button")
    names = shown(browser, 0)
    assert names == sorted(names)


def test_search_finds_an_id(browser: Any, reports: dict[str, Path]) -> None:
    opened(browser, reports["small"])
    search(browser, "Zoë 27", "11 of 300 examples")
    assert shown(browser, 0)[0] == "Zoë 27"  # the whole id first, then those that hold it
    search(browser, EVIL, "1 of 300 examples")
    assert shown(browser, 0) == [EVIL]
    search(browser, "nobody", "0 of 300 examples")
    assert shown(browser, 0) == []
    assert complaints(browser) == []


def test_details_open_and_close_with_the_keyboard(browser: Any, reports: dict[str, Path]) -> None:
    opened(browser, reports["small"])
    view = browser.find_element("id", "grid")
    view.send_keys(Keys.ARROW_DOWN, Keys.ARROW_DOWN, Keys.ENTER)
    dialog = browser.find_element("id", "detail")
    WebDriverWait(browser, 5).until(lambda d: dialog.get_attribute("open") is not None)
    assert dialog.find_element("tag name", "h3").text == shown(browser, 0)[1]
    assert "Number 2 of 299 by exposure" in dialog.text
    assert re.search(r"age\s± [\d.]+ years", dialog.text)
    dialog.send_keys(Keys.ESCAPE)
    WebDriverWait(browser, 5).until(lambda d: dialog.get_attribute("open") is None)
    assert browser.switch_to.active_element == view
    click(browser, "button[data-row]")
    WebDriverWait(browser, 5).until(lambda d: dialog.get_attribute("open") is not None)
    assert dialog.find_element("tag name", "img").get_attribute("naturalWidth") == "6"
    dialog.find_element("class name", "close").click()
    search(browser, "Zoë 11", "11 of 300 examples")
    view.send_keys(Keys.HOME, Keys.ENTER)
    WebDriverWait(browser, 5).until(lambda d: dialog.get_attribute("open") is not None)
    assert "This run says nothing about it; it is not safe." in dialog.text
    dialog.send_keys(Keys.ESCAPE)
    assert complaints(browser) == []


def test_dark_and_light(browser: Any, reports: dict[str, Path]) -> None:
    paper = "return getComputedStyle(document.documentElement).backgroundColor"

    def brightness() -> float:
        return float(np.mean([int(part) for part in re.findall(r"\d+", browser.execute_script(paper))[:3]]))

    opened(browser, reports["public"])
    assert brightness() > 200
    browser.find_element("id", "theme").click()
    assert brightness() < 60
    browser.find_element("id", "theme").click()
    assert brightness() > 200
    browser.execute_cdp_cmd(
        "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": "dark"}]}
    )
    try:
        opened(browser, reports["public"])
        assert brightness() < 60
    finally:
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def test_a_narrow_screen_needs_no_sideways_scrolling(browser: Any, reports: dict[str, Path]) -> None:
    size = {"width": 375, "height": 800, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        opened(browser, reports["small"])
        assert browser.execute_script("return document.documentElement.scrollWidth") <= 375
        assert browser.execute_script("return getComputedStyle(document.querySelector('.wide')).display") == "none"
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_it_prints(browser: Any, reports: dict[str, Path]) -> None:
    opened(browser, reports["small"])
    pdf = base64.b64decode(browser.execute_cdp_cmd("Page.printToPDF", {"preferCSSPageSize": True})["data"])
    assert pdf.startswith(b"%PDF")
    pages = pdf.count(b"/Type /Page\n")
    assert 4 <= pages <= 20  # the table of all examples stays on the screen
    streams = re.findall(rb"stream\r?\n(.*?)endstream", pdf, flags=re.DOTALL)
    assert any(zlib.decompressobj().decompress(stream) for stream in streams if stream[:1] == b"\x78")


def test_many_rows_scroll(browser: Any, reports: dict[str, Path]) -> None:
    assert reports["large"].stat().st_size < 2_000_000
    opened(browser, reports["large"])
    assert browser.find_element("id", "found").text == f"{ROWS:,} examples"
    lines = browser.execute_script("return document.querySelectorAll('#rows .line').length")
    assert lines < 40
    view = browser.find_element("id", "viewport")
    first = shown(browser, 0)
    for position in (0.5, 1.0):
        browser.execute_script("arguments[0].scrollTop = arguments[0].scrollHeight * arguments[1]", view, position)
        WebDriverWait(browser, 5).until(lambda d, before=first: shown(d, 0) != before)
        first = shown(browser, 0)
    bounds = [float(text.replace(",", "")) for text in shown(browser, 1) if "×" not in text]
    assert bounds == sorted(bounds)
    browser.find_element("id", "grid").send_keys(Keys.END)
    selected = "return document.querySelector('#rows [aria-selected=true]').ariaRowIndex"
    assert browser.execute_script(selected) == str(ROWS + 1)
    search(browser, "Zoë 49999", f"1 of {ROWS:,} examples")
    assert complaints(browser) == []
