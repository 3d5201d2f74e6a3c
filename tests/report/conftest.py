"""One browser for all tests of pages; reports without pictures."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Chromium; tests that ask for it are skipped without."""
    from tests.report.in_browser import started

    driver = started(tmp_path_factory.mktemp("profile"))
    yield driver
    driver.quit()
