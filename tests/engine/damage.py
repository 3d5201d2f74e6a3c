"""Damaged copies of a file."""

from __future__ import annotations

import random
from collections.abc import Iterator


def flipped(content: bytes, count: int) -> Iterator[bytes]:
    """Copies with one bit changed each: one in every ``1/count`` of the file."""
    chance = random.Random(0)
    for k in range(count):
        start, end = (part * len(content) // count for part in (k, k + 1))
        place = chance.randrange(start, max(start + 1, end))
        yield (
            content[:place]
            + bytes([content[place] ^ (1 << chance.randrange(8))])
            + content[place + 1 :]
        )


def cut_short(content: bytes, count: int) -> Iterator[bytes]:
    """Copies that end too early, in every part of the file."""
    chance = random.Random(1)
    for k in range(count):
        start, end = (part * len(content) // count for part in (k, k + 1))
        yield content[: chance.randrange(start, max(start + 1, end))]
    yield content[:-1]
