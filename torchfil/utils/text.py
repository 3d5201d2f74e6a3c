"""What people read: small tables, progress bars, CSV files, and texts without formulas or control characters."""

from __future__ import annotations

import csv
import difflib
import html
import math
import os
import re
import unicodedata
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from torchfil.utils.files import replaced_when_complete

Item = TypeVar("Item")
FORMULA = tuple("=+-@\t\r\n＝＋－＠")  # first characters of cells that Excel, LibreOffice or Google Sheets computes
NUMBER = re.compile(r"[+-](\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
Columns = Mapping[str, Sequence[Any] | np.ndarray]
CHUNK = 50_000  # rows converted to text at a time


def inert(text: str) -> str:
    """The text, with a leading apostrophe if a spreadsheet would compute it; numbers stay as they are.

    Different texts stay different: a text that already starts like such a result gets one more apostrophe.

    Example:
        >>> inert("=cmd()"), inert("'=cmd()"), inert("-5"), inert("-5+cmd()"), inert("patient 7")
        ("'=cmd()", "''=cmd()", '-5', "'-5+cmd()", 'patient 7')
    """
    if not text.lstrip("'").startswith(FORMULA) or NUMBER.fullmatch(text):
        return text
    return f"'{text}"


def visible(text: str, keep: str = "") -> str:
    r"""The text with escapes for characters that act instead of being seen: controls, line ends, direction marks.

    A name from a file could otherwise clear a terminal, write a verdict of its own or turn a line around.

    Args:
        text: Any text.
        keep: Characters that stay as they are.

    Example:
        >>> print(visible("age \x1b[2J\nPASS \u202egnp"), visible("Zoë"))
        age \x1b[2J\nPASS \u202egnp Zoë
    """

    def escaped(sign: str) -> str:
        seen = sign.isprintable() or sign in keep or unicodedata.category(sign) == "Zs"
        return sign if seen else sign.encode("unicode_escape").decode()

    return text if text.isprintable() else "".join(map(escaped, text))


def write_csv(path: str | os.PathLike[str], columns: Columns, *, digits: int | None = None) -> None:
    """Write columns of one length, in UTF-8, one line per row after a line of names.

    Guarantees:
        * The file is replaced only when complete, and only its owner may read it (mode 0600).
        * Names and cells that are text are :func:`inert`; NaN is an empty cell.

    Args:
        path: The file.
        columns: By name, [n] each: numbers, or anything else as its text.
        digits: Significant digits of floating-point numbers; None: as many as are needed to read the same number back.
    """
    write_csv_parts(path, [columns], digits=digits)


def write_csv_parts(path: str | os.PathLike[str], parts: Iterable[Columns], *, digits: int | None = None) -> None:
    """The same for a table that comes in parts, each with the same columns and some of the rows."""
    with (
        replaced_when_complete(path) as temporary,
        open(temporary, "w", encoding="utf-8", errors="replace", newline="") as file,
    ):
        writer = csv.writer(file)  # lines end with CR LF: only then do older Pythons quote a cell with CR or LF
        for place, columns in enumerate(parts):
            if place == 0:
                writer.writerow([inert(name) for name in columns])
            for start in range(0, len(next(iter(columns.values()))), CHUNK):
                cells = [_cells(values[start : start + CHUNK], digits) for values in columns.values()]
                writer.writerows(zip(*cells, strict=True))


def _cells(values: Sequence[Any] | np.ndarray, digits: int | None) -> list[Any]:
    if isinstance(values, np.ndarray) and values.dtype.kind == "f" and digits is None and not np.isnan(values).any():
        return values.tolist()  # the writer keeps every digit of a float
    pattern = "%r" if digits is None else f"%.{digits}g"
    return [_cell(value, pattern) for value in (values.tolist() if isinstance(values, np.ndarray) else values)]


def _cell(value: Any, pattern: str) -> Any:
    if isinstance(value, float):
        return "" if math.isnan(value) else pattern % float(value)
    return value if isinstance(value, int) else inert(str(value))


def aligned(rows: Sequence[Sequence[str]], left: Container[int] = ()) -> list[str]:
    """Lines with aligned cells; the columns ``left`` are aligned to the left, the others to the right.

    Example:
        >>> aligned([("step", "ms"), ("1", "12.5")], left=[0])
        ['step    ms', '1     12.5']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = enumerate(zip(row, widths, strict=True))
        lines.append("  ".join(cell.ljust(width) if n in left else cell.rjust(width) for n, (cell, width) in cells))
    return [line.rstrip() for line in lines]


def html_table(caption: str, rows: Iterable[Sequence[str]], header: Sequence[str] = ()) -> str:
    """A table of texts, all of them escaped.

    Example:
        >>> html_table("a < b", [("steps", "3")])
        '<table><caption>a &lt; b</caption><tbody><tr><td>steps</td><td>3</td></tr></tbody></table>'
    """

    def line(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    head = f"<thead>{line(header, 'th')}</thead>" if header else ""
    body = "".join(line(row, "td") for row in rows)
    return f"<table><caption>{html.escape(caption)}</caption>{head}<tbody>{body}</tbody></table>"


def with_progress(items: Iterable[Item], progress: bool, title: str, total: int | None = None) -> Iterable[Item]:
    """The items, counted by a progress bar (tqdm) if ``progress`` is true.

    Example:
        >>> list(with_progress(range(3), False, "steps"))
        [0, 1, 2]
    """
    if not progress:
        return items
    from tqdm.auto import tqdm

    bar: Any = tqdm(items, desc=title, total=total)
    return bar


def nearest(name: str, names: Sequence[str]) -> str:
    """The end of an error message: which of the names looks most alike, or which there are.

    Example:
        >>> nearest("aeg", ["age", "sex"]), nearest("height", ["age", "sex"])
        ("; did you mean 'age'?", "; there are 'age', 'sex'")
    """
    alike = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    if alike:
        return f"; did you mean {alike[0]!r}?"
    shown = ", ".join(repr(known) for known in names[:6])
    return f"; there are {shown}{' …' if len(names) > 6 else ''}" if names else ""
