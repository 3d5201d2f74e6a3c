"""Five questions in a minute: ``python -m tests.report.one_minute [FOLDER]``. Needs Chromium.

An officer opens a report, looks at the first 900 pixels of a screen 1280 wide, and wants to know: may it be released,
why not, who is exposed, what leaks, what to change? The answers to ten prepared runs were written beforehand
(:func:`tests.report.prepared_runs.ten_runs`), and changed since in four places: every σ got the margin of the options,
the linear model's 0.203 and 0.124 were read off the gate when its baseline became a fit on the target, the limit of
too few draws was filled in, and no σ is offered where groups leak unequally. They are looked up in the text that is
really visible there and nowhere else. Numbers have to stand beside what they are about: in the same table row, list
item, paragraph or box, or on the same line of a chart.

The script also opens a report of 60,000 examples: it has to be ready within two seconds and to weigh 3 MB at most.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.report.in_browser import Fragment, opened, plain, screen, seconds_to_open, started, visible
from tests.report.prepared_runs import TOO_FEW, Answers, ten_runs
from torchfil.report import write_report

QUESTIONS = ("release?", "why?", "who?", "what leaks?", "what to change?")
VERDICTS = ("May be released", "Do not release", "Cannot tell yet")
WIDTH, HEIGHT = 1280, 900
EXAMPLES, MEGABYTES, SECONDS = 60_000, 3.0, 2.0

# what the page calls things
RULES = {
    "min_error_share": r"closest|estimate",
    "max_share_exposed": r"share of exposed|exposed",
    "max_gain_over_guessing": r"any attacker",
    "min_attribute_error_share": r"attribute",
    "max_group_disparity": r"group",
    TOO_FEW: r"too few draws",
}
CLASSES = (
    r"half a blind guess's error",
    r"less than a blind guess's error",
    r"beyond a blind guess's error",
    r"too few draws to tell",
)
KEPT = r"\ball( \d+)? rules\b|\b(no|none|0)( of( the)? \d+)? rules?\b"
NO_QUESTION = r"without questions|no question"
CHANGES = {
    "noise": r"(noise|σ)",
    "nothing": r"nothing (needs to|has to|to|must) (be )?change|no change",
    "groups": r"no noise alone.*does not make groups alike",
    "draws": r"more (draws|steps|runs)|longer|average over",
}
_NUMBER = re.compile(r"(?<![\w.,])-?(\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?)( ?%|×)?(?![\w]|[.,]\d)")


def numbers(text: str) -> set[tuple[float, str]]:
    """The numbers of a text with "%" or "", whatever they are written like: 3,212 and 0.50 and 6 % and 2×."""
    return {(float(value.replace(",", "")), unit.strip().replace("×", "")) for value, unit in _NUMBER.findall(text)}


def lines_of(fragments: list[Fragment]) -> list[str]:
    """What stands together: rows, items, paragraphs and boxes; of charts what is level."""
    rows: dict[int, list[str]] = {}
    drawn: dict[tuple[int, int], list[str]] = {}
    levels: dict[int, list[float]] = {}
    for each in fragments:
        if each.drawn is None:
            rows.setdefault(each.row, []).append(each.text)
            continue
        middle, known = (each.box[1] + each.box[3]) / 2, levels.setdefault(each.drawn, [])
        level = next((place for place, other in enumerate(known) if abs(other - middle) < 6), len(known))
        known += [middle] * (level == len(known))
        drawn.setdefault((each.drawn, level), []).append(each.text)
    return [plain(" ".join(texts)) for texts in (*rows.values(), *drawn.values())]


def holds(line: str, words: str = "", *values: str | int, text: str = "") -> bool:
    """Whether a line has these words (a pattern), all of these numbers, and the text as a word of its own."""
    found = numbers(line)
    whole = not text or re.search(rf"(?<!\w){re.escape(text)}(?!\w)", line) is not None
    return whole and re.search(words, line, re.IGNORECASE) is not None and all(numbers(str(v)) <= found for v in values)


def _has_nearly(line: str, number: str) -> bool:
    return any(float(number) <= value <= 1.01 * float(number) for value, _ in numbers(line))


def missing(answers: Answers, lines: list[str]) -> Iterator[tuple[str, str]]:
    """Each answer that the lines do not give: the question, and what was expected."""

    def told(words: str = "", *values: str | int, text: str = "") -> bool:
        return any(holds(line, words, *values, text=text) for line in lines)

    if [verdict for verdict in VERDICTS if told(text=verdict)] != [answers.release]:
        yield "release?", f"“{answers.release}” and no other verdict"

    for key, subject, found, limit in answers.why:
        if not told(RULES[key], *filter(None, (found, limit)), text=subject):
            yield "why?", f"{key} {subject}: {found}, limit {limit}"
    if not answers.why and not told(KEPT):
        yield "why?", "that all rules are kept"

    for count, words in zip(answers.who, CLASSES, strict=True):
        if not told(words, count):
            yield "who?", f"{count} “{words}”"
    if not told(text=answers.most):
        yield "who?", f"the most exposed, {answers.most}"

    for name, without, most in answers.leaks:
        either = (
            rf"\b{without}.*\b{most}|\b{most}.*\b{without}[^%]*without"  # 50 % → 51 %; 51 % (50 % without the model)
        )
        if not told(either, without, most, text=name):
            yield "what leaks?", f"question “{name}”: {without} → {most}"
    for name, error, blind, unit in answers.attributes:
        if not told(unit, error, blind, text=name):
            yield "what leaks?", f"attribute “{name}”: {error} {unit} instead of {blind}"
    if not answers.leaks and not told(NO_QUESTION):
        yield "what leaks?", "that no question was asked"

    kind, *sigma = answers.change
    near = [line for line in lines if all(_has_nearly(line, each) for each in sigma)]  # σ is searched for to 1 %
    if not any(holds(line, CHANGES[kind]) for line in near):
        yield "what to change?", " ".join(answers.change)


def unanswered(browser: Any, folder: Path) -> dict[str, tuple[list[tuple[str, str]], list[str]]]:
    """By run, what its first screen does not answer, and the lines that are visible there."""
    found = {}
    with screen(browser, WIDTH, HEIGHT):
        for place, (name, (run, policy, answers)) in enumerate(ten_runs().items()):
            opened(browser, write_report(run, folder / f"report {place}", policy=policy))
            lines = lines_of(visible(browser, HEIGHT))
            found[name] = list(missing(answers, lines)), lines
    return found


def table(found: dict[str, tuple[list[tuple[str, str]], list[str]]]) -> str:
    """Run × question, then what is missing and what was visible instead."""
    width = max(map(len, found))
    rows = [f"{'':{width}}  " + "  ".join(QUESTIONS)]
    for name, (lacking, _) in found.items():
        asked = {question for question, _ in lacking}
        cells = ("missing" if question in asked else "found" for question in QUESTIONS)
        rows.append(
            f"{name:{width}}  " + "  ".join(f"{cell:{len(q)}}" for cell, q in zip(cells, QUESTIONS, strict=True))
        )
    for name, (lacking, lines) in found.items():
        if lacking:
            rows += ["", f"{name}: missing", *(f"  {question} {what}" for question, what in lacking)]
            rows += ["visible", *(f"  | {line}" for line in lines)]
    return "\n".join(rows)


def large_page(browser: Any, folder: Path) -> tuple[float, float]:
    """Of a report of 60,000 examples, its megabytes and the seconds until its table answers."""
    from benchmarks.many_examples import synthetic_run

    page = write_report(synthetic_run(EXAMPLES), folder / "large")
    return page.stat().st_size / 1e6, seconds_to_open(browser, page)


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(name)
        browser = started(Path(name) / "profile")
        try:
            found = unanswered(browser, folder)
            print(table(found))
            size, seconds = large_page(browser, folder)
        finally:
            browser.quit()
    limits = f"at most {MEGABYTES:g} MB and {SECONDS:g} s"
    print(f"\n{EXAMPLES:,} examples: {size:.2f} MB, ready in {seconds:.2f} s ({limits})")
    if any(lacking for lacking, _ in found.values()) or size > MEGABYTES or seconds > SECONDS:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
