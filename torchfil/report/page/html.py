"""HTML built from plain values: every string is escaped unless it was built here, direction marks as well."""

from __future__ import annotations

import html
import math
import re
from typing import Any

from torchfil.utils.text import visible

__all__ = ["Markup", "count", "join", "number", "percent", "plus_minus", "table", "tag", "unbroken"]

MOST_SIDE_BY_SIDE = 3  # columns of a table that fit on a narrow screen
VOID = {"br", "hr", "img", "input", "line", "rect", "circle", "path", "col"}


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


def join(*parts: Any) -> Markup:
    """Parts in a row; None is left out, lists are opened, what is not markup is escaped."""
    texts: list[str] = []
    for part in parts:
        if part is None:
            continue
        if isinstance(part, list | tuple):
            texts.append(join(*part))
        else:
            texts.append(part if isinstance(part, Markup) else _escaped(part))
    return Markup("".join(texts))


def tag(name: str, /, *children: Any, **attributes: Any) -> Markup:
    """An element; ``class_`` is class, ``aria_label`` is aria-label; None leaves an attribute out.

    Example:
        >>> print(tag("p", "1 < 2 ", tag("b", "really"), class_="note"))
        <p class="note">1 &lt; 2 <b>really</b></p>
    """
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{_escaped(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in VOID:
        return (
            Markup(f"<{name}{written}>")
            if name in ("br", "hr", "img", "input", "col")
            else Markup(f"<{name}{written}/>")
        )
    return Markup(f"<{name}{written}>{join(*children)}</{name}>")


def _escaped(value: Any) -> str:
    return html.escape(visible(str(value), keep="\n\t"))


def unbroken(text: Markup) -> Markup:
    """No line ends between a number and its per-cent sign, as it would on narrow screens and in cards."""
    return Markup(text.replace(" %", "\u00a0%"))


def table(head: list[Any], rows: list[list[Any]], *, class_: str = "plain", caption: str | None = None) -> Markup:
    """A table whose first column names its rows; on narrow screens one of many columns becomes a list a row."""
    stacked = len(head) > MOST_SIDE_BY_SIDE
    labels = [_plain(cell) if stacked else None for cell in head] if head else [None] * max(map(len, rows), default=0)

    def line(row: list[Any]) -> Markup:
        cells = [tag("td", cell, data_label=label) for cell, label in zip(row[1:], labels[1:], strict=False)]
        return tag("tr", tag("th", row[0], scope="row"), cells)

    return tag(
        "div",
        tag(
            "table",
            tag("caption", caption) if caption else None,
            tag("thead", tag("tr", [tag("th", cell, scope="col") for cell in head])) if head else None,
            tag("tbody", [line(row) for row in rows]),
            class_=f"{class_} stacked" if stacked else class_,
        ),
        class_="scroll",
    )


def _plain(cell: Any) -> str:
    """A heading without its elements, for an attribute."""
    return html.unescape(re.sub(r"<[^>]*>", "", cell)) if isinstance(cell, Markup) else str(cell)


def number(value: float | None, digits: int = 3, *, even: bool = False) -> str:
    r"""Three significant digits, a true minus sign, a power of ten outside 0.001 … 99,999.

    Args:
        value: None and NaN are unknown.
        digits: How many significant ones.
        even: Whether to keep zeros at the end, for columns of numbers.

    Example:
        >>> number(0.12345), number(1234567.0), number(float("inf")), number(2.0), number(1e-5)
        ('0.123', '1.23 ×\xa010⁶', '∞', '2', '10⁻⁵')
        >>> number(2.0, even=True)
        '2.00'
    """
    if value is None or math.isnan(value):
        return "unknown"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    if value == 0:
        return "0"
    mantissa, power = f"{value:.{digits - 1}e}".split("e")
    if -3 <= int(power) <= 4:
        return _trimmed(f"{float(f'{mantissa}e{power}'):,.{max(digits - 1 - int(power), 0)}f}", even).replace("-", "−")
    raised = "10" + str(int(power)).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    mantissa = _trimmed(mantissa, even).replace("-", "−")
    return raised if mantissa == "1" else f"{mantissa} × {raised}"


def _trimmed(text: str, even: bool) -> str:
    return text.rstrip("0").rstrip(".") if "." in text and not even else text


def plus_minus(error: float, unit: str) -> str:
    """± an error in its unit, in one piece."""
    return f"±\u00a0{number(error)}" + (f"\u00a0{unit}" if unit else "")


def count(value: int | str) -> str:
    """A count with thousands separated; words stay."""
    return f"{value:,}" if isinstance(value, int) else value


def percent(share: float) -> str:
    """A share in percent, without pretending that little is nothing or much is all.

    Example:
        >>> percent(0.1234), percent(0.0001), percent(1.0), percent(0.9999)
        ('12 %', 'below 0.1 %', '100 %', 'above 99.9 %')
    """
    if 0 < share < 0.001:
        return "below 0.1 %"
    if 0.999 < share < 1:
        return "above 99.9 %"
    return f"{100 * share:.1f} %" if 0 < share < 0.095 or 0.905 < share < 1 else f"{100 * share:.0f} %"
