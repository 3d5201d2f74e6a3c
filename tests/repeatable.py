"""The one noise source that tests inject: noise and draws from torch's generators, so that runs can
be repeated.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import combinations
from typing import Any
from unittest import mock

from torch import Tensor

import torchfil.engine.engine
from torchfil.utils.noise import NoiseKind, NoiseSource, Seeded, noise_source


class Repeatable(Seeded):
    """Follows ``torch.manual_seed`` and the loader's generator.

    What reads its kind sees the usual one.
    """

    kind: NoiseKind = "OS-seeded"


def repeatable(**options: Any) -> NoiseSource:
    """As :func:`noise_source`, but repeatable where nothing is chosen."""
    if options.get("secure") or options.get("seed") is not None or options.get("noise") is not None:
        return noise_source(**options)
    return Repeatable(
        draws=options.get("draws"), device=options.get("device", "cpu"), rank=options.get("rank")
    )


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


@contextmanager
def recorded_noise() -> Iterator[list[Tensor]]:
    """Inside, runs draw as they do for users; the noise of every parameter and step is noted."""
    drawn: list[Tensor] = []
    plain = NoiseSource.normal_

    def noting(self: NoiseSource, out: Tensor, std: float) -> Tensor:
        drawn.append(plain(self, out, std).detach().flatten().cpu().double() / std)
        return out

    with not_injected(), mock.patch.object(NoiseSource, "normal_", noting):
        yield drawn


def check_no_noise_is_shared(*runs: list[Tensor]) -> None:
    """No two draws of noise in these runs begin alike."""
    tensors = [noise[:64] for run in runs for noise in run if len(noise) >= 16]
    assert len(tensors) >= 2 * len(runs)
    for one, other in combinations(tensors, 2):
        size = min(len(one), len(other))
        assert float((one[:size] - other[:size]).abs().median()) > 0.05  # 0.95 if independent
