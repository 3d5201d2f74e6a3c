"""The random probes of one measurement; they do not depend on how the batch is cut into chunks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

__all__ = ["Draws", "GivenDraws", "draw_bits", "signs_of"]


@dataclass(frozen=True)
class Draws:
    """The randomness of one call; it does not depend on how the batch is cut into chunks.

    Attributes:
        seeds: One seed per probe.
        rows: Which examples of the batch the current chunk holds.
        batch: The number of examples of the whole batch.
        columns_at_once: How many columns of J the exact estimator may hold.
        probes_at_once: How many weight probes may be processed together, if the Jacobian supports it.
    """

    seeds: tuple[int, ...]
    rows: slice
    batch: int
    columns_at_once: int
    probes_at_once: int = 1

    @classmethod
    def seeds_from(cls, num_probes: int, generator: torch.Generator | None) -> tuple[int, ...]:
        """Seeds for ``num_probes`` probes from a generator (None: torch's global one)."""
        device = generator.device if generator is not None else torch.device("cpu")
        return tuple(torch.randint(2**62, (num_probes,), generator=generator, device=device).tolist())

    def signs(self, *shape: int, like: Tensor) -> Iterator[Tensor]:
        """For each probe, a tensor of ±1 of that shape, with ``like``'s dtype and device."""
        for seed in self.seeds:
            yield signs_of(draw_bits(seed, torch.empty(shape, dtype=torch.int8, device=like.device)), like.dtype)


def draw_bits(seed: int, bits: Tensor, source: torch.Generator | None = None) -> Tensor:
    """Fill ``bits`` with the zeros and ones of that seed; on a CPU, each random number gives 64 of them.

    ``source`` is seeded again; None: a new generator.
    """
    source = (source or torch.Generator(device=bits.device)).manual_seed(seed)
    if bits.device.type != "cpu":
        return bits.random_(0, 2, generator=source)
    words = torch.empty(-(-bits.numel() // 64), dtype=torch.int64).random_(-(2**63), None, generator=source)
    drawn = np.unpackbits(words.numpy().view(np.uint8), count=bits.numel())
    return bits.copy_(torch.from_numpy(drawn).reshape(bits.shape))


def signs_of(bits: Tensor, dtype: torch.dtype) -> Tensor:
    """±1 for ones and zeros."""
    return bits.to(dtype).mul_(2).sub_(1)


@dataclass(frozen=True)
class GivenDraws(Draws):
    """Draws whose probes already exist in the right shape; for passes that are captured once and replayed."""

    probes: tuple[Tensor, ...] = ()

    def signs(self, *shape: int, like: Tensor) -> Iterator[Tensor]:
        """The probes."""
        return iter(self.probes)
