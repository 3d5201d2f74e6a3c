"""The pages in a real browser: they load without a word, answer on the first screen, sort, filter, open and print.

Needs Chromium and its driver (Debian: ``apt-get install chromium chromium-driver``) and selenium; skips without.
"""

from __future__ import annotations

import base64
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.report.in_browser import (
    Keys,
    WebDriverWait,
    click,
    complaints,
    cut,
    cut_tables,
    opened,
    pale_texts,
    search,
    shown,
    text_of,
)
from tests.report.prepared_runs import POLICY, WHOLE, bare, linear, of_kind
from tests.report.run_cases import made_up
from torchfil.report import SavedRun, compare_runs, write_report
from torchfil.report.page import render_comparison
from torchfil.run.saved_run import Texts

EVIL = "<script>window.ran = true</script>"
ROWS = 10_400
TOPS = "return [...document.querySelectorAll('.stamp, .answer .figure')].map(e => e.getBoundingClientRect().bottom)"
NOTES = (
    "The patient , a retired glassblower from Murano , has had gout since the spring of 1998 and takes allopurinol .",
    "Donaudampfschifffahrtselektrizitätenhauptbetriebswerkbauunterbeamtengesellschaft is what he wrote .",
)


def with_tokens() -> SavedRun:
    """Two notes, one with a word that no line holds; FIL and PLIS of each token."""
    rng = np.random.default_rng(0)
    words = [[f" {word}" for word in note.split()] for note in NOTES]
    longest = max(map(len, words))
    fil = np.asarray([[*rng.lognormal(size=len(text)), *[np.nan] * (longest - len(text))] for text in words], "f4")
    return bare("Notes", 2.0, texts=Texts(np.asarray([7, 3]), words, fil, (1 / fil).astype("f4")))


def strange() -> SavedRun:
    """Ids that would run, or turn text around, and an example that was not measured."""
    run = made_up(300, text_ids=True)
    ids = run.ids.astype("<U60")
    ids[5], ids[6] = EVIL, "turned \u202egnp.exe"
    columns = {name: values.copy() for name, values in run.columns.items()}
    columns["participations"][11], columns["fil"][11], columns["mse_bound"][11] = 0, 0, np.inf
    return made_up(300, text_ids=True, ids=ids, columns=columns)


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    run, quieter = made_up(300, text_ids=True), made_up(300, text_ids=True, seed=1)
    reports: dict[str, tuple[SavedRun, dict[str, Any]]] = {
        "small": (strange(), {}),
        "public": (strange(), {"redacted": True}),
        "large": (made_up(ROWS, text_ids=True, pictures=None, attributes=None), {}),
        "tokens": (with_tokens(), {}),
        "image pass": (of_kind("image", safe=True), {"policy": POLICY}),
        "image fail": (of_kind("image", safe=False), {"policy": POLICY}),
        "table fail": (of_kind("table", safe=False), {"policy": WHOLE}),
        "linear open": (of_kind("linear", safe=False), {}),
    }
    found = {name: write_report(run, folder / name, **options) for name, (run, options) in reports.items()}
    compared = {
        "compared": compare_runs(run, quieter),
        "compared public": compare_runs(run, quieter, redacted=True),
        "compared linear": compare_runs(linear(0.05), linear(0.1)),
    }
    for name, comparison in compared.items():
        found[name] = folder / f"{name}.html"
        found[name].write_text(render_comparison(comparison))
    return found


def found(browser: Any, text: str) -> None:
    WebDriverWait(browser, 5).until(lambda d: d.find_element("id", "found").text == text)


def test_pages_load_without_a_word_and_run_no_script_of_the_data(browser: Any, pages: dict[str, Path]) -> None:
    for name, page in pages.items():
        opened(browser, page)
        assert complaints(browser) == [], name
        assert browser.execute_script("return window.ran") is None
        widths = "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
        assert browser.execute_script(widths) <= 0, name
        if "public" in name:
            hidden = '#grid, dialog, img, .stamp, #first a[href^="#show"]'
            assert browser.execute_script(f"return document.querySelectorAll('{hidden}').length") == 0
            assert "Zoë" not in text_of(browser, "body")


@pytest.mark.parametrize(
    ("page", "verdict", "exposed"),
    [("image pass", "PASS", "Nobody"), ("image fail", "FAIL", "3 of 200"), ("linear open", "NO POLICY", "3 of 200")],
)
def test_the_first_screen_answers(page: str, verdict: str, exposed: str, browser: Any, pages: dict[str, Path]) -> None:
    opened(browser, pages[page])
    assert text_of(browser, ".stamp") == verdict
    assert text_of(browser, "#card-who .figure") == exposed
    todo = text_of(browser, "#card-todo .figure")
    assert todo == "Nothing" if verdict == "PASS" else todo.startswith("σ = ")

    # all of it above the fold, beside the open contents
    assert max(browser.execute_script(TOPS)) <= browser.execute_script("return innerHeight")
    assert browser.execute_script("return document.getElementById('contents').open")


def test_nothing_is_cut_at_400_pixels(narrow: Any, pages: dict[str, Path]) -> None:
    for name in ("small", "image fail", "table fail", "linear open", "tokens", "compared", "compared public"):
        opened(narrow, pages[name])
        assert narrow.execute_script("return document.documentElement.scrollWidth") <= 400, name
        assert cut(narrow) == [], name
        assert cut_tables(narrow) == [], name


def test_texts_stand_out_in_light_and_dark(browser: Any, pages: dict[str, Path], request: Any) -> None:
    for name in ("public", "tokens", "compared"):
        assert pale_texts(opened(browser, pages[name])) == []
    dark = request.getfixturevalue("dark")
    for name in ("public", "tokens", "compared"):
        assert pale_texts(opened(dark, pages[name])) == []
    paper = "return getComputedStyle(document.documentElement).backgroundColor"
    assert max(map(int, re.findall(r"\d+", dark.execute_script(paper))[:3])) < 60
    opened(dark, pages["public"]).find_element("id", "theme").click()
    assert min(map(int, re.findall(r"\d+", dark.execute_script(paper))[:3])) > 200


def test_the_table_sorts_and_searches_and_keeps_the_unmeasured_last(browser: Any, pages: dict[str, Path]) -> None:
    opened(browser, pages["small"])
    bounds = [float(text.replace(",", "")) for text in shown(browser, 1)]
    assert bounds == sorted(bounds)
    click(browser, "#head [data-key=fil] button")
    largest = [float(text.replace(",", "")) for text in shown(browser, 2)]
    assert largest == sorted(largest, reverse=True)
    for _ in range(2):
        browser.find_element("id", "grid").send_keys(Keys.END)
        assert (shown(browser, 0)[-1], shown(browser, 2)[-1]) == ("Zoë 11", "not measured")
        click(browser, "#head [data-key=fil] button")
    search(browser, "Zoë 27", "11 of 300 examples")
    assert shown(browser, 0)[0] == "Zoë 27"  # the whole id first, then those that hold it
    for text, written in ((EVIL, EVIL), ("turned", "turned \\u202egnp.exe")):
        search(browser, text, "1 of 300 examples")
        WebDriverWait(browser, 5).until(lambda driver, written=written: shown(driver, 0) == [written])


def test_filters_work_together_and_cards_lead_to_them(browser: Any, pages: dict[str, Path]) -> None:
    opened(browser, pages["image fail"])
    browser.find_element("link text", "Show them in the table").click()
    found(browser, "3 of 200 examples")
    assert sorted(shown(browser, 0)) == ["Zoë 3", "Zoë 4", "Zoë 5"]
    click(browser, "#clear")
    found(browser, "200 examples")

    opened(browser, pages["small"])
    run = strange()
    women, low = run.groups["sex"] == "f", run.columns["mse_bound"] <= 0.5
    for name, value in (("group", "0:0"), ("limit", "0.5"), ("filter", "spared")):
        script = "arguments[0].value = arguments[1]; arguments[0].dispatchEvent(new Event(arguments[2]))"
        event = "input" if name == "limit" else "change"
        browser.execute_script(script, browser.find_element("id", name), value, event)
    found(browser, f"{(women & low & (run.columns['clip_weight'] < 1)).sum()} of 300 examples")


def test_an_example_opens_by_key_and_by_address(browser: Any, pages: dict[str, Path]) -> None:
    opened(browser, pages["small"])
    view, dialog = browser.find_element("id", "grid"), browser.find_element("id", "detail")
    view.send_keys(Keys.ARROW_DOWN, Keys.ARROW_DOWN, Keys.ENTER)
    WebDriverWait(browser, 5).until(lambda d: dialog.get_attribute("open") is not None)
    assert dialog.find_element("tag name", "h3").text == shown(browser, 0)[1]
    assert "Number 2 of 299 by exposure" in dialog.text
    assert re.search(r"age\s± [\d.]+ years", dialog.text)
    dialog.send_keys(Keys.ESCAPE)
    WebDriverWait(browser, 5).until(lambda d: dialog.get_attribute("open") is None and "#" not in d.current_url)
    click(browser, "button[data-row]")
    assert dialog.find_element("tag name", "img").get_attribute("naturalWidth") == "6"

    for page, address, told in (
        ("small", "Zo%C3%AB%2011", "This run says nothing about it; it is not safe."),
        ("linear open", "Zo%C3%AB%204", "(computed in closed form, without error)."),
    ):
        browser.get("about:blank")
        browser.get(pages[page].as_uri() + f"#example-{address}")
        WebDriverWait(browser, 10).until(lambda d: d.find_element("id", "detail").get_attribute("open") is not None)
        assert told in text_of(browser, "#detail")
        browser.find_element("id", "detail").send_keys(Keys.ESCAPE)
    browser.execute_script("location.hash = 'example-nobody'")
    found(browser, "The table has no example of this address")


def test_help_contents_and_tokens_with_the_keyboard(browser: Any, pages: dict[str, Path]) -> None:
    opened(browser, pages["small"])
    button = browser.find_element("css selector", "[data-key=fil] .help")
    button.send_keys(Keys.ENTER)
    assert text_of(browser, "#help").startswith("FIL η̄: Fisher information loss")
    button.send_keys(Keys.ESCAPE)
    assert not browser.find_element("id", "help").is_displayed()
    browser.execute_script("document.getElementById('groups').scrollIntoView({behavior: 'instant'})")
    marked = "return [...document.querySelectorAll('#contents a[aria-current]')].map(link => link.textContent)"
    WebDriverWait(browser, 5).until(lambda d: d.execute_script(marked) == ["Who is exposed more than others"])

    opened(browser, pages["tokens"])
    strongest = browser.find_element("css selector", '#words .word[style*="--share: 100%"]')
    browser.execute_script("arguments[0].focus({focusVisible: true})", strongest)
    after = "return getComputedStyle(arguments[0], '::after').content"
    assert "% of the text, η =" in browser.execute_script(after, strongest)


def test_it_prints_and_the_signature_has_a_page(browser: Any, pages: dict[str, Path]) -> None:
    opened(browser, pages["table fail"])
    pdf = base64.b64decode(browser.execute_cdp_cmd("Page.printToPDF", {"preferCSSPageSize": True})["data"])
    assert 4 <= pdf.count(b"/Type /Page\n") <= 20  # the table of all examples stays on the screen
    paper = {"width": 658, "height": 971, "deviceScaleFactor": 1, "mobile": False}  # A4 within its margins
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", paper)
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    try:
        height = "return document.getElementById('decision').getBoundingClientRect().height"
        assert browser.execute_script(height) < 971
        assert not browser.find_element("id", "contents").is_displayed()
        assert browser.find_element("css selector", "#decision .repeated").is_displayed()
    finally:
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_many_rows_scroll(browser: Any, pages: dict[str, Path]) -> None:
    assert pages["large"].stat().st_size < 3_000_000
    opened(browser, pages["large"])
    text = browser.find_element("id", "found").text
    rows = int(text.split()[0].replace(",", ""))
    assert 10_000 <= rows < ROWS
    assert browser.execute_script("return document.querySelectorAll('#rows .line').length") < 40
    view, first = browser.find_element("id", "viewport"), shown(browser, 0)
    browser.execute_script("arguments[0].scrollTop = arguments[0].scrollHeight / 2", view)
    WebDriverWait(browser, 5).until(lambda d: shown(d, 0) != first)
    browser.find_element("id", "grid").send_keys(Keys.END)
    selected = "return document.querySelector('#rows [aria-selected=true]').ariaRowIndex"
    assert browser.execute_script(selected) == str(rows + 1)
