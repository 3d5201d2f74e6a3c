"""The spread of the run's data, read once in pieces: the yardstick of a blind guess, and the prior of van Trees."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from torchfil.bounds import Prior
from torchfil.engine.looks import DatasetLooks
from torchfil.engine.saving.run_view import RunView
from torchfil.report.saved_run import Spread
from torchfil.report.yardsticks import counted_spread
from torchfil.utils.trees import tensors_of

__all__ = ["DataSpread", "fitted_prior", "pixels_of_coordinates", "read_spread"]

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
    rows = _some_rows(count, d, thorough=thorough)
    try:
        spread, counts = counted_spread(_pieces(run, rows, max(1, min(1024, _VALUES_AT_ONCE // d))))
    except _NoValuesError:
        return None
    return DataSpread(len(rows), spread, counts) if counts.any() else None


def _some_rows(count: int, d: int, *, thorough: bool) -> np.ndarray:
    """All examples, or as many of them as are read, always the same ones."""
    most = min(_MOST_ROWS if thorough else _FEW_ROWS, max(_FEW_ROWS, _MOST_VALUES // d))
    if count <= most:
        return np.arange(count)
    return np.sort(np.random.default_rng(0).choice(count, most, replace=False))


def fitted_prior(looks: DatasetLooks) -> tuple[np.ndarray, Prior]:
    """The rows of the examples that were read, and a normal law of their private values given everything else in them.

    Everything else is public: their targets and inputs, with the private coordinates taken out.

    Raises:
        ValueError: It cannot be fitted: a stream, or coordinates without values that could be compared.
    """
    d = looks.run.leakage.num_coordinates
    if looks.dataset is None:
        raise ValueError("the examples of a stream cannot be read again; pass prior=, a law given what is public")
    rows = _some_rows(looks.run.ids.num_examples, d, thorough=True)
    parts = [looks.examples(rows[start : start + 1024].tolist()) for start in range(0, len(rows), 1024)]
    values = [part.values for part in parts]
    if len({part.form for part in parts}) > 1 or any(part.shape[1] != d or part.isnan().any() for part in values):
        raise ValueError(
            "a prior needs private values of one shape, and these are outputs of a submodule, or texts of different "
            "lengths; pass prior=, a law given what is public"
        )
    public = [tensors_of(part.restore(torch.zeros_like(part.z), part.public)[:3]) for part in parts]
    return rows, Prior.gaussian(torch.cat(values).cpu(), [torch.cat(same).cpu() for same in zip(*public, strict=True)])


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
