"""Small HTML tables for notebooks."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

__all__ = ["html_table"]


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
