"""The spread of the run's data, read once in pieces: the yardstick of a blind guess."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from torchfil.engine.run_view import RunView
from torchfil.report.saved_run import Spread
from torchfil.report.yardsticks import counted_spread

__all__ = ["DataSpread", "pixels_of_coordinates", "read_spread"]

_MOST_ROWS = 2**16  # a deviation from so many is off by 0.3 %
_FEW_ROWS = 2**11  # by 1.6 %
_MOST_VALUES, _VALUES_AT_ONCE = 2**30, 2**22
_SMALLEST_IMAGE = 4


@dataclass(frozen=True, eq=False)
class DataSpread:
    """Mean, deviation and range of the private coordinates.

    Attributes:
        examples: How many examples were read.
        coordinates: The spread of each coordinate, [d]; NaN if unknown, as for submodules' outputs.
        counts: How many of the examples have the coordinate, [d]; texts may be shorter.
    """

    examples: int
    coordinates: Spread
    counts: np.ndarray

    @property
    def inputs(self) -> Spread:
        """Over all coordinates, each weighted by how many examples have it: mean, root mean variance, range."""
        known, each = self.counts > 0, self.coordinates
        weight = self.counts[known] / self.counts.sum()
        mean, variance = (np.sum(values[known] * weight) for values in (each.mean, each.std**2))
        ends = np.min(each.low[known]), np.max(each.high[known])
        return Spread(np.asarray(mean), np.asarray(math.sqrt(variance)), *map(np.asarray, ends))


def read_spread(run: RunView, *, thorough: bool) -> DataSpread | None:
    """The spread of the run's data; None for streams, and if no private coordinate has a fixed value.

    If there are more than 65,536 examples (2,048 unless ``thorough``), that many are drawn without repetition, always
    the same ones.

    Args:
        run: The run.
        thorough: Whether many examples may be read.
    """
    count = run.leakage.ids.num_examples
    if run.examples is None or count == 0:
        return None
    d = max(1, run.leakage.num_coordinates)
    most = min(_MOST_ROWS if thorough else _FEW_ROWS, max(_FEW_ROWS, _MOST_VALUES // d))
    rows = np.arange(count)
    if count > most:
        rows = np.sort(np.random.default_rng(0).choice(count, most, replace=False))

    try:
        spread, counts = counted_spread(_pieces(run, rows, max(1, min(1024, _VALUES_AT_ONCE // d))))
    except _NoValuesError:
        return None
    return DataSpread(len(rows), spread, counts) if counts.any() else None


class _NoValuesError(Exception):
    """Coordinates have no values that could be compared between examples."""


def _pieces(run: RunView, rows: np.ndarray, size: int) -> Iterator[np.ndarray]:
    """The private coordinates of these examples, [size, d] at a time; NaN if an example does not have one.

    Raises:
        _NoValuesError: They are outputs of submodules, or laid out differently from batch to batch.
    """
    assert run.examples is not None
    for start in range(0, len(rows), size):
        values = run.examples(rows[start : start + size].tolist()).values
        if values.shape[1] != run.leakage.num_coordinates or values.isnan().all():
            raise _NoValuesError
        yield values.detach().to("cpu", torch.float64).numpy()


def pixels_of_coordinates(run: RunView) -> np.ndarray | None:
    """Row and column of every private coordinate in the image, int64 [d, 2]; None if the inputs are not images."""
    if run.examples is None or run.leakage.ids.num_examples == 0:
        return None
    d = run.leakage.num_coordinates
    examples = run.examples([0])
    if examples.num_coordinates != d:
        return None
    maps = list(examples.maps(torch.arange(d, dtype=torch.float64)[None]).values())
    if len(maps) != 1 or maps[0].ndim not in (3, 4) or examples.values.isnan().any():
        return None
    places = maps[0][0]  # the coordinate at each place, NaN if there is none
    channels = places.shape[0] if places.ndim == 3 else 1
    if channels not in (1, 3) or min(places.shape[-2:]) < _SMALLEST_IMAGE:
        return None
    flat = places.reshape(-1).cpu().numpy()
    at = np.flatnonzero(~np.isnan(flat))
    at = at[np.argsort(flat[at])] % math.prod(places.shape[-2:])
    return np.stack([at // places.shape[-1], at % places.shape[-1]], axis=1).astype(np.int64)
