"""What people read: small tables, progress bars, CSV files, and texts without formulas or control
characters.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
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
# first characters of cells that Excel, LibreOffice or Google Sheets computes
FORMULA = tuple("=+-@\t\r\n＝＋－＠")
NUMBER = re.compile(r"[+-](\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
Columns = Mapping[str, Sequence[Any] | np.ndarray]


def inert(text: str) -> str:
    """The text, with a leading apostrophe if a spreadsheet would compute it.

    Numbers stay as they are.

    Different texts stay different: a text that already starts like such a result gets one more
    apostrophe.

    Example:
        >>> inert("=cmd()"), inert("'=cmd()"), inert("-5"), inert("-5+cmd()"), inert("patient 7")
        ("'=cmd()", "''=cmd()", '-5', "'-5+cmd()", 'patient 7')
    """
    if not text.lstrip("'").startswith(FORMULA) or NUMBER.fullmatch(text):
        return text
    return f"'{text}"


def visible(text: str, keep: str = "") -> str:
    r"""The text with escapes for characters that act instead of being seen: controls, line ends,
    direction marks.

    A name from a file could otherwise clear a terminal, write a verdict of its own or turn a line
    around.

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


def marked(text: str) -> str:
    r"""The text in one line, as Markdown that shows it: none of its characters is read as a sign.

    Example:
        >>> print(marked("a*b\n<script>"))
        a\*b \<script\>
    """
    return re.sub(r"[\\`*_{}\[\]<>#|~&$]", r"\\\g<0>", visible(re.sub(r"\s+", " ", text)))


def write_csv(path: str | os.PathLike[str], columns: Columns, *, digits: int | None = None) -> None:
    """Write columns of one length, in UTF-8, one line per row after a line of names.

    Guarantees:
        * The file is replaced only when complete, and only its owner may read it (mode 0600).
        * Names and cells that are text are :func:`inert` and :func:`visible`; NaN is an empty cell.

    Args:
        path: The file.
        columns: By name, [n] each: numbers, or anything else as its text.
        digits: Significant digits of floating-point numbers; None: as many as are needed to read
            the same number back.
    """
    write_csv_parts(path, [columns], digits=digits)


def write_csv_parts(
    path: str | os.PathLike[str], parts: Iterable[Columns], *, digits: int | None = None
) -> None:
    """The same for a table that comes in parts, each with the same columns and some of the rows."""
    import pyarrow as pa
    from pyarrow import csv

    with replaced_when_complete(path) as temporary, contextlib.ExitStack() as stack:
        writer = None
        for columns in parts:
            table = pa.table(
                {_text_cell(name): _cells(values, digits) for name, values in columns.items()}
            )
            writer = writer or stack.enter_context(csv.CSVWriter(temporary, table.schema))
            writer.write_table(table)


def _cells(values: Sequence[object] | np.ndarray, digits: int | None) -> Any:
    """An Arrow array of numbers, of which NaN are empty, or of inert texts."""
    import pyarrow as pa

    numbers = isinstance(values, np.ndarray) or {*map(type, values)} <= {int, float}
    array = np.asarray(values if numbers else [])
    if numbers and array.dtype.kind == "f":
        return pa.array(
            array if digits is None else _rounded(array.astype(np.float64), digits),
            from_pandas=True,
        )
    return pa.array(
        array
        if numbers and array.dtype.kind in "iu"
        else [_text_cell(str(value)) for value in values]
    )


@functools.lru_cache(maxsize=1024)
def _text_cell(text: str) -> str:
    return visible(inert(text))


def _rounded(values: np.ndarray, digits: int) -> np.ndarray:
    """To so many significant digits, so that no more are needed to write the numbers."""
    with np.errstate(all="ignore"):
        places = digits - 1 - np.floor(np.log10(np.abs(values)))
        scale = 10.0 ** np.abs(places)
        rounded = np.where(
            places > 0, np.rint(values * scale) / scale, np.rint(values / scale) * scale
        )
    return np.where(np.abs(places) <= 22, rounded, values)  # larger powers of ten are not exact


def aligned(rows: Sequence[Sequence[str]], left: Container[int] = ()) -> list[str]:
    """Lines with aligned cells.

    The columns ``left`` are aligned to the left, the others to the right.

    Example:
        >>> aligned([("step", "ms"), ("1", "12.5")], left=[0])
        ['step    ms', '1     12.5']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = enumerate(zip(row, widths, strict=True))
        lines.append(
            "  ".join(
                cell.ljust(width) if n in left else cell.rjust(width) for n, (cell, width) in cells
            )
        )
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


def json_ready(value: object, *, for_people: bool = False) -> Any:
    """The same in JSON's own types; anything else as text.

    Args:
        value: Numbers, texts and arrays, also in lists and dicts.
        for_people: Whether texts are :func:`visible`, and infinite numbers "infinite" and
            "-infinite"; otherwise texts stay, so that an id is found by it, and infinite numbers
            are null, as NaN is.

    Example:
        >>> (
        ...     json_ready({1: np.array([0.5, np.inf, np.nan])}),
        ...     json_ready((-np.inf,), for_people=True),
        ... )
        ({'1': [0.5, None, None]}, ['-infinite'])
    """
    ready = functools.partial(json_ready, for_people=for_people)
    if isinstance(value, dict):
        return {ready(str(key)): ready(part) for key, part in value.items()}
    if isinstance(value, list | tuple | np.ndarray):
        return [*map(ready, value)]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return {math.inf: "infinite", -math.inf: "-infinite"}.get(value) if for_people else None
    value = value if isinstance(value, str | int | float | None) else str(value)
    return visible(value) if for_people and isinstance(value, str) else value


def with_progress(
    items: Iterable[Item], progress: bool, title: str, total: int | None = None
) -> Iterable[Item]:
    """The items, counted by a progress bar (tqdm) if ``progress`` is true.

    Example:
        >>> list(with_progress(range(3), False, "steps"))
        [0, 1, 2]
    """
    if not progress:
        return items
    from tqdm.auto import tqdm

    return tqdm(items, desc=title, total=total)


def most_alike(name: str, names: Sequence[str]) -> str | None:
    """The first of the names that contains this one, or else the one that looks most alike.

    None: none does.

    Example:
        >>> (
        ...     most_alike("noise", ["clip", "noise_multiplier"]),
        ...     most_alike("aeg", ["age"]),
        ...     most_alike("height", ["age"]),
        ... )
        ('noise_multiplier', 'age', None)
    """
    longer = [known for known in names if name in known and len(name) > 2]
    return next(iter(longer or difflib.get_close_matches(name, names, n=1, cutoff=0.6)), None)


def nearest(name: str, names: Sequence[str]) -> str:
    """The end of an error message: which of the names looks most alike, or which there are.

    Example:
        >>> nearest("aeg", ["age", "sex"]), nearest("height", ["age", "sex"])
        ("; did you mean 'age'?", "; there are 'age', 'sex'")
    """
    alike = most_alike(name, names)
    if alike is not None:
        return f"; did you mean {alike!r}?"
    shown = ", ".join(repr(known) for known in names[:6])
    return f"; there are {shown}{' …' if len(names) > 6 else ''}" if names else ""
