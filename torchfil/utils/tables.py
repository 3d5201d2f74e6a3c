"""Small tables: as text, and as HTML for notebooks."""

from __future__ import annotations

import html
from collections.abc import Container, Iterable, Sequence


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
