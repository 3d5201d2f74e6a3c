"""What a written page holds: its elements, what a reader sees of a part, the data of its table, its
files.
"""

from __future__ import annotations

import html
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any


class Elements(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def elements(page: Path) -> list[tuple[str, dict[str, str | None]]]:
    parser = Elements()
    parser.feed(page.read_text())
    return parser.found


def source(page: Path, slug: str) -> str:
    """The HTML of the section or card with this id; "" where the page has none."""
    found = re.search(
        rf'<(section|article|header)\b[^>]*id="{slug}">(.*?)</\1>',
        page.read_text(),
        flags=re.DOTALL,
    )
    return "" if found is None else found[2]


def text_of(page: Path, slug: str) -> str:
    """What a reader sees of it, in one line."""
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", source(page, slug))).split())


def table_data(page: Path) -> dict[str, Any]:
    """What the page's script draws the table from."""
    data: dict[str, Any] = json.loads(page.read_text().split('id="spec">')[1].split("</script>")[0])
    return data


def summary_of(page: Path) -> dict[str, Any]:
    """The file of numbers beside a page."""
    data: dict[str, Any] = json.loads((page.parent / "summary.json").read_text())
    return data


def files_of(page: Path) -> dict[str, bytes]:
    """By name, the files of a report."""
    return {path.name: path.read_bytes() for path in page.parent.iterdir()}
