"""The pages in a real browser: they load without a word, answer on the first screen, sort, filter,
open and print.

Needs Chromium and its driver (Debian: ``apt-get install chromium chromium-driver``) and selenium;
skips without.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.report import in_browser
from tests.report.accessibility import violations
from tests.report.in_browser import click, complaints, opened, screen, search, shown, text_of
from tests.report.prepared_runs import POLICY, WHOLE, of_kind
from tests.report.run_cases import made_up
from torchfil.report import SavedRun, compare_runs, write_report
from torchfil.report.page import render_comparison

EVIL = "<script>window.ran = true</script>"
Keys, WebDriverWait = in_browser.Keys, in_browser.WebDriverWait


def strange() -> SavedRun:
    """Ids that would run, or turn text around, and an example that was not measured."""
    run = made_up(300, text_ids=True)
    ids = run.ids.astype("<U60")
    ids[5], ids[6] = EVIL, "turned \u202egnp.exe"
    run.columns["participations"][11], run.columns["fil"][11], run.columns["mse_bound"][11] = (
        0,
        0,
        np.inf,
    )
    return made_up(300, ids=ids, columns=run.columns)


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    reports: dict[str, tuple[SavedRun, dict[str, Any]]] = {
        "small": (strange(), {}),
        "public": (strange(), {"redacted": True}),
        "text": (of_kind("text", safe=True), {"policy": POLICY}),
        "image": (of_kind("image", safe=False), {"policy": POLICY}),
        "table": (of_kind("table", safe=False), {"policy": WHOLE}),
        "linear": (of_kind("linear", safe=False), {}),
    }
    found = {
        name: write_report(run, folder / name, **options)
        for name, (run, options) in reports.items()
    }
    for name, redacted in (("compared", False), ("compared public", True)):
        runs = made_up(300, text_ids=True), made_up(300, text_ids=True, seed=1)
        found[name] = folder / f"{name}.html"
        found[name].write_text(render_comparison(compare_runs(*runs, redacted=redacted)))
    return found


def found(browser: Any, text: str) -> None:
    WebDriverWait(browser, 5).until(lambda d: d.find_element("id", "found").text == text)


def column(browser: Any, key: str) -> list[str]:
    """The texts of a column, by its key, of the rows on screen."""
    script = (
        "return [...document.querySelectorAll('#head [role=columnheader]')].map((cell) => "
        "cell.dataset.key)"
    )
    return shown(browser, browser.execute_script(script).index(key))


def unfolded(browser: Any, page: Path) -> None:
    """Opened, with the table of all examples unfolded, as a reader does it."""
    opened(browser, page)
    browser.find_element("css selector", "#all-examples summary").click()


def test_pages_load_without_a_word_and_run_no_script_of_the_data(
    browser: Any, pages: dict[str, Path]
) -> None:
    for name, page in pages.items():
        opened(browser, page)
        assert complaints(browser) == [], name
        assert browser.execute_script("return window.ran") is None
        if "public" in name:
            hidden = '#grid, dialog, img, .stamp, #first a[href^="#show"]'
            assert (
                browser.execute_script(f"return document.querySelectorAll('{hidden}').length") == 0
            )
            assert "Zoë" not in text_of(browser, "body")


def test_the_table_sorts_and_searches_and_keeps_the_unmeasured_last(
    browser: Any, pages: dict[str, Path]
) -> None:
    unfolded(browser, pages["small"])
    bounds = [float(text.replace(",", "")) for text in column(browser, "mse_bound")]
    assert len(bounds) > 9
    assert bounds == sorted(bounds)
    click(browser, "#head [data-key=fil] button")
    largest = [float(text.replace(",", "")) for text in column(browser, "fil")]
    assert largest == sorted(largest, reverse=True)
    for _ in range(2):
        browser.find_element("id", "grid").send_keys(Keys.END)
        assert (shown(browser, 0)[-1], column(browser, "fil")[-1]) == ("Zoë 11", "not measured")
        click(browser, "#head [data-key=fil] button")
    search(browser, "Zoë 27", "11 of 300 examples")
    assert shown(browser, 0)[0] == "Zoë 27"  # the whole id first, then those that hold it
    for text, written in ((EVIL, EVIL), ("turned", "turned \\u202egnp.exe")):
        search(browser, text, "1 of 300 examples")
        WebDriverWait(browser, 5).until(
            lambda driver, written=written: shown(driver, 0) == [written]
        )


def test_filters_work_together_and_numbers_lead_to_them(
    browser: Any, pages: dict[str, Path]
) -> None:
    opened(browser, pages["image"])
    three = ["Zoë 3", "Zoë 4", "Zoë 5"]
    for address in ("#show-exposed", "#show-broken", "#show-class-0", "#show-class-0"):
        browser.find_element("css selector", f"main a[href='{address}']").send_keys(Keys.ENTER)
        found(browser, "3 of 200 examples")
        assert sorted(shown(browser, 0)) == three
        # the table has the focus
        browser.switch_to.active_element.send_keys(Keys.ARROW_DOWN, Keys.ENTER)
        dialog = browser.find_element("id", "detail")
        assert dialog.find_element("tag name", "h3").text in three
        dialog.send_keys(Keys.ESCAPE)
        click(browser, "#clear")
        found(browser, "200 examples")

    unfolded(browser, pages["small"])
    run = strange()
    women, low = run.groups["sex"] == "f", run.columns["mse_bound"] <= 0.5
    script = (
        "arguments[0].value = arguments[1]; arguments[0].dispatchEvent(new Event(arguments[2]))"
    )
    for name, value in (
        ("group", "0:0"),
        ("column", "mse_bound"),
        ("limit", "0.5"),
        ("filter", "weighted"),
    ):
        event = "input" if name == "limit" else "change"
        browser.execute_script(script, browser.find_element("id", name), value, event)
    found(browser, f"{(women & low & (run.columns['clip_weight'] < 1)).sum()} of 300 examples")


def closed(browser: Any) -> None:
    """The dialog is closed, and its address gone, which happens a moment later."""
    dialog = browser.find_element("id", "detail")
    dialog.send_keys(Keys.ESCAPE)
    WebDriverWait(browser, 5).until(
        lambda d: dialog.get_attribute("open") is None and "#" not in d.current_url
    )


def test_an_example_opens_by_key_and_by_address(browser: Any, pages: dict[str, Path]) -> None:
    unfolded(browser, pages["small"])
    view, dialog = browser.find_element("id", "grid"), browser.find_element("id", "detail")
    view.send_keys(Keys.ARROW_DOWN, Keys.ARROW_DOWN, Keys.ENTER)
    WebDriverWait(browser, 5).until(lambda d: dialog.get_attribute("open") is not None)
    assert dialog.find_element("tag name", "h3").text == shown(browser, 0)[1]
    assert "Number 2 of 299 by FIL" in dialog.text
    closed(browser)

    browser.get("about:blank")  # the table is folded away
    browser.get(pages["small"].as_uri() + "#example-Zo%C3%AB%2011")
    WebDriverWait(browser, 10).until(
        lambda d: d.find_element("id", "detail").get_attribute("open") is not None
    )
    assert "it is not safe" in text_of(browser, "#detail")
    closed(browser)
    browser.execute_script("location.hash = 'example-nobody'")
    found(browser, "The table has no example of this address")


@pytest.mark.slow
def test_axe_finds_nothing(browser: Any, pages: dict[str, Path]) -> None:
    """On wide and narrow screens, light and dark, everything unfolded."""
    unfold = "for (const fold of document.querySelectorAll('details')) fold.open = true"
    for width, dark in ((1280, False), (1280, True), (400, False)):
        with screen(browser, width, dark=dark):
            for name, page in pages.items():
                opened(browser, page).execute_script(unfold)
                assert violations(browser) == [], (name, width, dark)
                widths = (
                    "return document.documentElement.scrollWidth - "
                    "document.documentElement.clientWidth"
                )
                assert browser.execute_script(widths) <= 0, (name, width)
