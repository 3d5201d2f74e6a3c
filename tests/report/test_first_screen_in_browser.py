"""The first screen and the table's filters, links and help in a real browser; needs Chromium, skips without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.report.in_browser import (
    Keys,
    WebDriverWait,
    click,
    complaints,
    cut,
    cut_tables,
    opened,
    search,
    shown,
    text_of,
)
from tests.report.prepared_runs import KINDS, POLICY, WHOLE, of_kind
from tests.report.run_cases import made_up
from torchfil.report import write_report

WORDS = {"pass": "PASS", "fail": "FAIL", "open": "NO POLICY"}
TOPS = "return [...document.querySelectorAll('.stamp, .answer .figure')].map(e => e.getBoundingClientRect().bottom)"


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Every kind with every verdict, and its public version."""
    folder, found = tmp_path_factory.mktemp("first"), {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torchfil.report.figures.find_spec", lambda name: None)
        for kind in KINDS:
            safe, unsafe, policy = of_kind(kind, safe=True), of_kind(kind, safe=False), POLICY
            if kind == "table":
                policy = WHOLE
            found[f"{kind} pass"] = write_report(safe, folder / f"{kind}-pass", policy=policy)
            found[f"{kind} fail"] = write_report(unsafe, folder / f"{kind}-fail", policy=policy)
            found[f"{kind} open"] = write_report(unsafe, folder / f"{kind}-open")
            found[f"{kind} public"] = write_report(unsafe, folder / f"{kind}-public", redacted=True)
        found["full"] = write_report(made_up(300, text_ids=True), folder / "full")
    return found


@pytest.mark.parametrize("verdict", WORDS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_first_screen_answers(kind: str, verdict: str, browser: Any, pages: dict[str, Path]) -> None:
    opened(browser, pages[f"{kind} {verdict}"])
    assert text_of(browser, ".stamp") == WORDS[verdict]
    assert text_of(browser, "#card-who .figure") == ("Nobody" if verdict == "pass" else "3 of 200")
    todo = text_of(browser, "#card-todo .figure")
    assert todo == "Nothing" if verdict == "pass" else todo.startswith("σ = ")
    assert ("must not be released" in text_of(browser, ".verdict")) == (verdict == "fail")

    # all of it above the fold, beside the open contents
    bottoms = browser.execute_script(TOPS)
    assert len(bottoms) == 4
    assert max(bottoms) <= browser.execute_script("return innerHeight")
    assert browser.execute_script("return document.getElementById('contents').open")
    assert complaints(browser) == []


def test_details_of_a_linear_model_are_exact(browser: Any, pages: dict[str, Path]) -> None:
    browser.get("about:blank")
    browser.get(pages["linear fail"].as_uri() + "#example-Zo%C3%AB%204")
    dialog = browser.find_element("id", "detail")
    WebDriverWait(browser, 10).until(lambda d: dialog.get_attribute("open") is not None)
    bound = of_kind("linear", safe=False).columns["mse_bound"][4]
    told = f"error of {bound:.3g} or more per input on average (computed in closed form, without error)."
    assert told in text_of(browser, "#detail")
    assert "low end" not in text_of(browser, "#detail")
    dialog.send_keys(Keys.ESCAPE)


@pytest.mark.parametrize("kind", KINDS)
def test_the_public_cards(kind: str, browser: Any, pages: dict[str, Path]) -> None:
    opened(browser, pages[f"{kind} public"])
    assert browser.execute_script("return document.querySelectorAll('.stamp, #first a[href^=\"#show\"]').length") == 0
    assert text_of(browser, "#card-who .figure") == "fewer than 10 of 200"
    assert complaints(browser) == []


@pytest.mark.parametrize("page", ["image fail", "table fail", "text open", "linear pass", "full"])
def test_nothing_is_cut_at_400_pixels(page: str, narrow: Any, pages: dict[str, Path]) -> None:
    opened(narrow, pages[page])
    assert narrow.execute_script("return document.documentElement.scrollWidth") <= 400
    assert cut(narrow) == []
    assert cut_tables(narrow) == []  # before, eight of a full page were, one 627 pixels wide in 345
    assert not narrow.execute_script("return document.getElementById('contents').open")
    assert narrow.find_element("css selector", ".stamp").is_displayed()


def test_cards_lead_to_the_filtered_table(browser: Any, pages: dict[str, Path]) -> None:
    opened(browser, pages["image fail"])
    browser.find_element("link text", "Show them in the table").click()
    WebDriverWait(browser, 5).until(lambda d: d.find_element("id", "found").text == "3 of 200 examples")
    assert sorted(shown(browser, 0)) == ["Zoë 3", "Zoë 4", "Zoë 5"]
    top = browser.execute_script("return document.getElementById('examples').getBoundingClientRect().top")
    assert 0 <= top < 200
    click(browser, "#clear")
    assert browser.find_element("id", "found").text == "200 examples"
    click(browser, "a[href='#show-broken']")
    WebDriverWait(browser, 5).until(lambda d: d.find_element("id", "found").text == "3 of 200 examples")
    assert complaints(browser) == []


def test_filters_work_together(browser: Any, pages: dict[str, Path]) -> None:
    opened(browser, pages["full"])
    everybody = made_up(300, text_ids=True)
    bound, sex = everybody.columns["mse_bound"], everybody.groups["sex"]

    def choose(name: str, value: str) -> None:
        script = "arguments[0].value = arguments[1]; arguments[0].dispatchEvent(new Event(arguments[2]))"
        event = "input" if name == "limit" else "change"
        browser.execute_script(script, browser.find_element("id", name), value, event)

    choose("group", "0:0")
    assert browser.find_element("id", "found").text == f"{(sex == 'f').sum()} of 300 examples"
    choose("limit", "0.5")
    both = f"{((sex == 'f') & (bound <= 0.5)).sum()} of 300 examples"
    WebDriverWait(browser, 5).until(lambda d: d.find_element("id", "found").text == both)
    choose("side", "least")
    assert browser.find_element("id", "found").text == f"{((sex == 'f') & (bound >= 0.5)).sum()} of 300 examples"
    choose("filter", "spared")
    spared = everybody.columns["clip_weight"] < 1
    together = f"{((sex == 'f') & (bound >= 0.5) & spared).sum()} of 300 examples"
    assert browser.find_element("id", "found").text == together
    click(browser, "#clear")
    assert browser.find_element("id", "found").text == "300 examples"


def test_an_address_opens_an_example_and_an_example_gives_its_address(
    browser: Any,
    pages: dict[str, Path],
) -> None:
    browser.get("about:blank")
    browser.get(pages["full"].as_uri() + "#example-Zo%C3%AB%2027")
    dialog = browser.find_element("id", "detail")
    WebDriverWait(browser, 10).until(lambda d: dialog.get_attribute("open") is not None)
    assert dialog.find_element("tag name", "h3").text == "Zoë 27"
    dialog.send_keys(Keys.ESCAPE)
    WebDriverWait(browser, 5).until(lambda d: "#" not in d.current_url)
    search(browser, "Zoë 11", "11 of 300 examples")
    browser.find_element("id", "grid").send_keys(Keys.HOME, Keys.ENTER)
    WebDriverWait(browser, 5).until(lambda d: d.current_url.endswith("#example-Zo%C3%AB%2011"))
    assert dialog.find_element("class name", "copy").text == "Copy link"
    dialog.find_element("class name", "close").click()
    browser.execute_script("location.hash = 'example-nobody'")
    WebDriverWait(browser, 5).until(lambda d: "no example of this address" in d.find_element("id", "found").text)
    assert dialog.get_attribute("open") is None
    assert complaints(browser) == []


def test_column_help_with_the_keyboard(browser: Any, pages: dict[str, Path]) -> None:
    opened(browser, pages["full"])
    button = browser.find_element("css selector", "[data-key=fil] .help")
    assert button.get_attribute("aria-label") == "What is “FIL η̄”?"
    button.send_keys(Keys.ENTER)
    assert text_of(browser, "#help").startswith("FIL η̄: Fisher information loss")
    assert button.get_attribute("aria-expanded") == "true"
    button.send_keys(Keys.ESCAPE)
    assert not browser.find_element("id", "help").is_displayed()
    assert button.get_attribute("aria-expanded") == "false"
    assert browser.execute_script("return document.querySelector('[data-key=fil]').ariaSort") == "none"


def test_chapters_are_marked_while_reading(browser: Any, pages: dict[str, Path]) -> None:
    opened(browser, pages["full"])
    browser.execute_script("document.getElementById('groups').scrollIntoView({behavior: 'instant'})")

    def marked() -> list[str]:
        return [link.text for link in browser.find_elements("css selector", "#contents a[aria-current]")]

    wanted = ["Who is exposed more than others"]
    WebDriverWait(browser, 5).until(lambda _: marked() == wanted)
    assert marked() == wanted


def test_the_contents_are_not_printed_and_the_signature_has_a_page_with_verdict_and_findings(
    browser: Any, pages: dict[str, Path]
) -> None:
    opened(browser, pages["table fail"])
    paper = {"width": 658, "height": 971, "deviceScaleFactor": 1, "mobile": False}  # A4 within its margins
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", paper)
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    try:
        height = "return document.getElementById('decision').getBoundingClientRect().height"
        assert browser.execute_script(height) < 971
        assert not browser.find_element("id", "contents").is_displayed()
        assert browser.find_element("css selector", ".stamp").is_displayed()
        assert browser.find_element("css selector", "#decision .repeated").is_displayed()
    finally:
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
