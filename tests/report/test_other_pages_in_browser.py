"""Two runs compared, and texts token by token, in a real browser; needs Chromium, skips without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.report.in_browser import complaints, cut, cut_tables, opened, pale_texts, text_of
from tests.report.prepared_runs import bare, linear
from tests.report.run_cases import made_up
from tests.report.test_compared_runs import quieter
from torchfil.report import SavedRun, write_report
from torchfil.report.comparison import compare_runs
from torchfil.report.page.compared import render_comparison
from torchfil.run.saved_run import Texts

NOTES = (
    "The patient , a retired glassblower from Murano , has had gout since the spring of 1998 and takes allopurinol .",
    "She has a cold .",
    "Donaudampfschifffahrtselektrizitätenhauptbetriebswerkbauunterbeamtengesellschaft is what he wrote .",
)
PAGES = ("compared", "compared public", "compared linear", "tokens")


def with_tokens() -> SavedRun:
    """Three notes, a long one, a short one and one with a word that no line holds; FIL and PLIS of each token."""
    rng = np.random.default_rng(0)
    words = [[f" {word}" for word in note.split()] for note in NOTES]
    longest = max(map(len, words))
    sizes = [[*rng.lognormal(size=len(text)), *[np.nan] * (longest - len(text))] for text in words]
    fil = np.asarray(sizes, "f4")
    return bare("Notes", 2.0, texts=Texts(np.asarray([7, 3, 5]), words, fil, (1 / fil).astype("f4")))


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("others")
    run = made_up(300, text_ids=True)
    after = quieter(run, 1.6)
    after.columns["fil"] = after.columns["fil"].copy()
    after.columns["fil"][:9] *= 9  # some are more exposed, in spite of the noise
    after.columns["mse_bound"][:9] /= 81
    after.columns["mse_bound_low"][:9] /= 81
    runs = {
        "compared": compare_runs(run, after),
        "compared public": compare_runs(run, after, redacted=True),
        "compared linear": compare_runs(linear(0.05), linear(0.1)),
    }
    found = {name: folder / f"{name.replace(' ', '-')}.html" for name in runs}
    for name, comparison in runs.items():
        found[name].write_text(render_comparison(comparison))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torchfil.report.figures.find_spec", lambda name: None)
        found["tokens"] = write_report(with_tokens(), folder / "tokens")
    return found


@pytest.mark.parametrize("page", PAGES)
class TestEveryPage:
    def test_it_loads_without_a_word(self, page: str, browser: Any, pages: dict[str, Path]) -> None:
        opened(browser, pages[page])
        public = page == "compared public"
        label = "Public version: aggregates only" if public else "Confidential: made from private data"
        assert text_of(browser, ".band span") == label
        assert browser.find_element("tag name", "h1").is_displayed()
        assert pale_texts(browser) == []
        assert complaints(browser) == []

    def test_nothing_is_cut_at_400_pixels(self, page: str, narrow: Any, pages: dict[str, Path]) -> None:
        """A word of 80 letters stood out of the page by 287 pixels."""
        opened(narrow, pages[page])
        assert narrow.execute_script("return document.documentElement.scrollWidth") <= 400
        assert cut(narrow) == []
        assert cut_tables(narrow) == []

    def test_it_can_be_read_in_the_dark(self, page: str, dark: Any, pages: dict[str, Path]) -> None:
        """The strongest tokens had a contrast of 4.46."""
        opened(dark, pages[page])
        ground = dark.execute_script("return getComputedStyle(document.documentElement).backgroundColor")
        assert ground == "rgb(23, 24, 26)"
        assert pale_texts(dark) == []


class TestCompared:
    def test_what_changed_stands_on_the_first_screen(self, browser: Any, pages: dict[str, Path]) -> None:
        opened(browser, pages["compared"])
        first = browser.find_element("css selector", ".findings")
        assert first.find_elements("tag name", "li")[1].location["y"] < browser.execute_script("return innerHeight")
        told = text_of(browser, "#findings")
        assert "After the change 291 are clearly less exposed, and 9 are clearly more exposed." in told
        assert "over the run: its noise and its draw of batches" in told
        assert "1.6" in text_of(browser, "#settings")
        assert "Zoë 4" in text_of(browser, "#moved")

    def test_the_public_page_has_aggregates(self, browser: Any, pages: dict[str, Path]) -> None:
        opened(browser, pages["compared public"])
        assert "About 300 examples are in both runs" in text_of(browser, "#findings")
        assert "Zoë" not in text_of(browser, "body")

    def test_of_linear_models_all_is_exact(self, browser: Any, pages: dict[str, Path]) -> None:
        opened(browser, pages["compared linear"])
        told = text_of(browser, "body")
        assert "After the change 200 are less exposed, and none is more exposed." in told
        assert "on average over the noise that is added to the weights" in told
        for words in ("clearly", "lower end", "batches", "interval"):
            assert words not in told


class TestTokens:
    def test_words_are_shaded_and_told_to_the_keyboard(self, browser: Any, pages: dict[str, Path]) -> None:
        opened(browser, pages["tokens"])
        assert text_of(browser, "#card-who .figure") == "Nobody"
        assert text_of(browser, "#words h3") == "Zoë 7"
        shown = browser.find_elements("css selector", "#words .word")
        assert len(shown) == 2 * sum(len(note.split()) for note in NOTES)  # by FIL and by PLIS
        script = "return getComputedStyle(arguments[0]).backgroundColor"
        strongest = browser.find_element("css selector", '#words .word[style*="--share: 100%"]')
        weakest = browser.find_element("css selector", '#words .word[style*="--share: 0%"], #words .word')
        assert browser.execute_script(script, strongest) != browser.execute_script(script, weakest)
        browser.execute_script("arguments[0].focus({focusVisible: true})", strongest)
        after = "return getComputedStyle(arguments[0], '::after').content"
        assert "% of the text, η =" in browser.execute_script(after, strongest)
