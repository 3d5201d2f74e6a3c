"""What a written page holds: its elements, the words of a section, its packed columns."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np

from tests.report.run_cases import made_up
from torchfil.report import SavedRun


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


def with_unmeasured(n: int = 40) -> SavedRun:
    """Example 7 never drawn, example 8 drawn only where nothing was measured, example 9 measured in part."""
    run = made_up(n)
    columns = {name: values.copy() for name, values in run.columns.items()}
    columns["participations"][[7, 8, 9]] = [0, 2, 5]
    columns["missed"][[8, 9]] = [2, 1]
    columns["fil"][[7, 8]], columns["mse_bound"][[7, 8]], columns["sampling_error"][7] = 0, np.inf, np.inf
    return made_up(n, columns=columns)


def sentences(page: Path, slug: str) -> str:
    """The text of a section, without its elements."""
    section = re.search(rf"<section id=\"{slug}\">(.*?)</section>", page.read_text(), flags=re.DOTALL)
    assert section is not None
    return re.sub(r"<[^>]+>", "", section[1])


def table_data(page: Path) -> dict[str, Any]:
    """What the page's script draws the table from."""
    found = re.search(r'id="spec">(.*?)</script>', page.read_text(), flags=re.DOTALL)
    assert found is not None
    data: dict[str, Any] = json.loads(found[1])
    return data
