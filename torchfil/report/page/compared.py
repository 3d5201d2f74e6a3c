"""Two runs compared, as one page: what was changed, what that did, who moved. One file, which loads nothing."""

from __future__ import annotations

from typing import Any

import numpy as np

from torchfil.report.comparison import Comparison, Moves, Pair, Side
from torchfil.report.page import svg
from torchfil.report.page.context import paragraph
from torchfil.report.page.head import head, label_of
from torchfil.report.page.html import Markup, count, join, number, table, tag, unbroken

__all__ = ["changes", "in_short", "render_comparison"]

MOST_POINTS, MOST_MOVED = 2000, 10
TRAINED, ADDED = "its noise and its draw of batches", "the noise that is added to the weights"  # what is random


def render_comparison(comparison: Comparison) -> str:
    """The whole page.

    Guarantees:
        * It loads nothing and runs no script: a content security policy forbids both.
        * Every string from the runs is escaped.
        * Redacted, it holds no id and no number of fewer than ``smallest`` examples.
    """
    one, other = comparison.before.title, comparison.after.title
    title = f"{one} → {other}" if one != other else f"{one}, before and after"

    # a chapter without anything to say is left out, and numbers follow
    chapters = [
        ("findings", "In short", tag("ul", [tag("li", text) for text in in_short(comparison)], class_="findings")),
        ("settings", "What was changed", _settings(comparison)),
        ("numbers", "Before and after", _numbers(comparison)),
        ("moved", "Who moved", _moved(comparison)),
        ("questions", "What any attacker can tell", _questions(comparison)),
        ("attributes", "Single attributes", _attributes(comparison)),
        ("groups", "Groups", _groups(comparison)),
        ("notes", "What was not compared", _notes(comparison)),
    ]
    shown = [(slug, name, content) for slug, name, content in chapters if content is not None]
    sections = [
        tag("section", tag("header", tag("h2", tag("span", str(place), class_="no"), name)), content, id=slug)
        for place, (slug, name, content) in enumerate(shown, start=1)
    ]

    cover = tag(
        "header",
        paragraph("Two runs compared", class_="kind"),
        tag("h1", title),
        paragraph(_warning(comparison), class_="warning"),
        class_="cover",
    )
    band = tag("div", tag("span", label_of(comparison.redacted)), class_="band")
    body = tag("body", band, unbroken(tag("main", cover, sections)))
    return f"<!doctype html>\n{tag('html', head(title, redacted=comparison.redacted), body, lang='en')}\n"


def in_short(comparison: Comparison) -> list[str]:
    """What a reader with one minute should know, a sentence each."""
    c, about = comparison, "about " * comparison.redacted
    lines = [f"{about}{c.matched:,} examples are in both runs, matched by id.".capitalize()]
    if c.nothing_moved:
        lines.append(
            "Nothing moved: every example has the same numbers in both."
            if _is_same(c)
            else "Nobody clearly moved: no example’s FIL differs by more than chance explains."
        )
    else:
        clearly = "" if c.exact else " clearly"
        more, less = ("none is" if some == 0 else f"{count(some)} are" for some in (c.more, c.less))
        lines.append(
            f"After the change {less}{clearly} less exposed, and {more}{clearly} more exposed."
            + ("" if c.exact else " Of examples that did not move, about one in twenty looks so by chance.")
        )

    # by how much, beside what the noise alone would have done
    if c.ratio and not _is_same(c):
        grown = f"Typically, the MSE bound after is {number(c.ratio['mean'])} times that before"
        if c.expected is not None:
            grown += f"; the change of σ alone, at the same {_fixed(c)}, makes it {number(c.expected)} times"
        lines.append(grown + ".")
    if c.before.exposed is not None and c.after.exposed is not None:
        lines.append(
            f"Exposed (an unbiased estimate may beat a blind guess): {count(c.before.exposed)} before, "
            f"{count(c.after.exposed)} after ({count(c.newly_exposed or 0)} newly)."
        )

    for pair in c.questions:
        lines.append(
            f"“{pair.name}”: any attacker is right in at most {_percent(pair.after)} of the runs, where wrong in 1 %; "
            f"before, in {_percent(pair.before)}."
        )
    bound = (
        f"MSE bounds bind unbiased attackers, on average over {ADDED if c.exact else f'the run: {TRAINED}'}; biased "
        "attackers may err less. Questions bind every attacker."
    )
    return [*lines, bound]


def changes(comparison: Comparison) -> list[tuple[str, Any, Any]]:
    """The table of both runs: what, before, after."""
    before, after = comparison.before, comparison.after
    least = f"the {comparison.smallest} smallest MSE bounds together" if comparison.redacted else "smallest MSE bound"
    rows: list[tuple[str, Any, Any]] = [
        ("typical FIL η̄ (geometric mean)", before.fil, after.fil),
        ("median MSE bound", before.bound.get("0.5"), after.bound.get("0.5")),
        (least, before.bound.get("0"), after.bound.get("0")),
        *([] if comparison.exact else [(f"{least}, lower end", before.low_end, after.low_end)]),
        ("exposed examples", before.exposed, after.exposed),
        ("examples of the run", before.examples, after.examples),
        ("of these not compared", before.alone, after.alone),
    ]
    return [row for row in rows if row[1] is not None or row[2] is not None]


def _is_same(comparison: Comparison) -> bool:
    """Whether the two runs have the same numbers, not merely none that can be told apart."""
    same = comparison.exact or comparison.ratio.get("0") == comparison.ratio.get("1") == 1.0
    return comparison.nothing_moved and same


def _fixed(comparison: Comparison) -> str:
    return "fit" if comparison.exact else "gradients"


def _warning(comparison: Comparison) -> str:
    if comparison.redacted:
        return (
            f"Every number rests on at least {comparison.smallest} examples and is rounded, and nobody counts for "
            "more than ten times the median of those averaged (squared errors: a hundred). No noise was added: "
            "somebody who knows all examples but one could still learn something about that one, as could somebody who "
            "has another public version."
        )
    return "This page names examples. It is as private as the training data: do not pass it on."


def _settings(comparison: Comparison) -> Markup:
    if not comparison.settings:
        return paragraph("Both runs were made with the same settings, as far as they were saved.")
    rows = [[name, _value(before), _value(after)] for name, before, after in comparison.settings]
    return table(["", "before", "after"], rows)


def _numbers(comparison: Comparison) -> Markup:
    rows = [[name, _value(before), _value(after)] for name, before, after in changes(comparison)]
    return join(table(["", "before", "after"], rows), _runs(comparison.before, comparison.after))


def _runs(before: Side, after: Side) -> Markup:
    return paragraph(f"Before: {before.title}. After: {after.title}.", class_="note")


def _moved(comparison: Comparison) -> Markup | None:
    """The picture and the names; a public page has neither."""
    moves = comparison.moves
    if moves is None:
        return None
    change = _log_change(moves)
    down = [row for row in np.argsort(change, kind="stable") if change[row] < 0][:MOST_MOVED]
    up = [row for row in np.argsort(-change, kind="stable") if change[row] > 0][:MOST_MOVED]
    parts = [_scatter(moves, comparison.exact)]
    for rows, title in ((down, "Now more exposed"), (up, "Now less exposed")):
        if rows:
            parts += [tag("h3", title), _named(moves, rows, exact=comparison.exact)]
    if moves.newly_exposed is not None and moves.newly_exposed.any():
        ids = [str(name) for name in moves.ids[moves.newly_exposed]]
        rest = f" and {len(ids) - 50:,} more" if len(ids) > 50 else ""
        parts.append(paragraph(tag("b", "Newly exposed: "), ", ".join(ids[:50]), rest, "."))
    return join(*parts)


def _log_change(moves: Moves) -> np.ndarray:
    """log(bound after / bound before), [m]; 0 where both are 0 or infinite."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.nan_to_num(np.log(moves.after) - np.log(moves.before), nan=0.0, posinf=np.inf, neginf=-np.inf)


def _scatter(moves: Moves, exact: bool) -> Markup:
    # all that clearly moved are worth drawing before those that did not
    order = np.argsort(-np.abs(moves.clearly), kind="stable")[:MOST_POINTS]
    points = [(float(moves.before[row]), float(moves.after[row]), bool(moves.clearly[row] < 0)) for row in order]
    drawn = f" {len(points):,} of {len(moves.ids):,} are drawn." if len(points) < len(moves.ids) else ""
    which = "more exposed" if exact else "clearly more exposed"
    return svg.figure(
        lambda width: svg.scatter(points, width=width, title="MSE bound after", axis="MSE bound before"),
        f"One dot for each example. Above the dashed diagonal it is less exposed than before, below it more; filled "
        f"in the colour of exposure: {which} now.{drawn}",
        label="MSE bounds of the matched examples after against before",
    )


def _named(moves: Moves, rows: list[int], *, exact: bool) -> Markup:
    words = {1: "less", -1: "more"} if exact else {1: "clearly less", -1: "clearly more", 0: "within chance"}
    lines = [
        [
            str(moves.ids[row]),
            number(float(moves.before[row])),
            number(float(moves.after[row])),
            words[int(moves.clearly[row])],
        ]
        for row in rows
    ]
    return table(["Example", "MSE bound before", "after", "exposed"], lines)


def _questions(comparison: Comparison) -> Markup | None:
    if not comparison.questions:
        return None
    rows = [[pair.name, _percent(pair.before), _percent(pair.after)] for pair in comparison.questions]
    return join(
        table(["Question", "before", "after"], rows),
        paragraph(
            f"Of {_whom(comparison)}, in how many runs any attacker, biased or not, can be right who is wrong in 1 % "
            f"of them{'' if comparison.exact else '; at the upper end of the 95 % interval where it is estimated'}.",
            class_="note",
        ),
    )


def _attributes(comparison: Comparison) -> Markup | None:
    if not comparison.attributes:
        return None
    return join(
        _pairs("Attribute", comparison.attributes),
        paragraph(
            f"Of {_whom(comparison)}, by how much an unbiased guess is off at least (root mean square"
            f"{'' if comparison.exact else ', lower end'}), in the attribute’s own unit. Larger is safer.",
            class_="note",
        ),
    )


def _groups(comparison: Comparison) -> Markup | None:
    shown = {name: pairs for name, pairs in comparison.groups.items() if pairs}
    if not shown:
        return None
    return join(
        paragraph("Typical FIL η̄ (geometric mean) of each group; smaller is safer."),
        [join(tag("h3", f"By {name}"), _pairs("Group", pairs)) for name, pairs in shown.items()],
    )


def _pairs(what: str, pairs: list[Pair]) -> Markup:
    return table([what, "before", "after"], [[p.name, number(p.before), number(p.after)] for p in pairs])


def _notes(comparison: Comparison) -> Markup | None:
    return tag("ul", [tag("li", note) for note in comparison.notes]) if comparison.notes else None


def _whom(comparison: Comparison) -> str:
    return f"the {comparison.smallest} most exposed together" if comparison.redacted else "the most exposed example"


def _percent(rate: float) -> str:
    return f"{100 * min(rate, 1.0):.3g} %"


def _value(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "none" if value is None else str(value)
    return f"{value:,}" if isinstance(value, int) else number(value)
