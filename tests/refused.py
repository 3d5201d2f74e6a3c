"""Refusals as a table: each call raises, and its message holds the noun before it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest


def all_refused(calls: Mapping[str, Callable[[], Any]]) -> None:
    """Each call raises ValueError or TypeError, whose text has the key (a regular expression)."""
    for noun, call in calls.items():
        with pytest.raises((ValueError, TypeError), match=noun):
            pytest.fail(f"{noun}: not refused, but {call()}")
