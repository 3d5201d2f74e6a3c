"""The one noise source that tests inject: noise and draws from torch's generators, so that runs can be repeated."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torchfil.engine.engine
from torchfil.utils.noise import NoiseKind, NoiseSource, Seeded, noise_source


class Repeatable(Seeded):
    """Follows ``torch.manual_seed`` and the loader's generator; what reads its kind sees the usual one."""

    kind: NoiseKind = "OS-seeded"


def repeatable(**options: Any) -> NoiseSource:
    """As :func:`noise_source`, but repeatable where nothing is chosen."""
    if options.get("secure") or options.get("seed") is not None or options.get("noise") is not None:
        return noise_source(**options)
    return Repeatable(draws=options.get("draws"), device=options.get("device", "cpu"), rank=options.get("rank"))


def inject() -> None:
    """Inject it into every run of this process."""
    torchfil.engine.engine.noise_source = repeatable


@contextmanager
def not_injected() -> Iterator[None]:
    """Inside, runs draw as they do for users."""
    torchfil.engine.engine.noise_source = noise_source
    try:
        yield
    finally:
        inject()
