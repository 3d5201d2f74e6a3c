"""Optional progress bars."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

Item = TypeVar("Item")


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
