"""The run's data, read again: a checksum, the spread of the private coordinates, and the prior of van Trees."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import Subset, TensorDataset

from torchfil.bounds import Prior
from torchfil.engine.assembly import DatasetPasses
from torchfil.private import Examples
from torchfil.report.saved_run import Spread
from torchfil.report.yardsticks import counted_spread
from torchfil.utils.errors import require
from torchfil.utils.trees import tensors_of

_BYTES_AT_ONCE = 2**26
_READ_WHOLE = 2**30  # bytes of a TensorDataset up to which a fingerprint is of all examples, a second's work
_EXAMPLES_OF_OTHERS = 64
_MOST_ROWS = 2**16  # a deviation from so many is off by 0.3 %
_FEW_ROWS = 2**11  # by 1.6 %
_MOST_VALUES, _VALUES_AT_ONCE = 2**30, 2**22


# ------------------------------------------------------------------ which data it is


def data_sha256(dataset: Any) -> str:
    """SHA-256 over all examples in order: dtype, shape and bytes of every tensor, and the text of everything else.

    A ``TensorDataset`` is read tensor by tensor, any other data set example by example, with the same result. If
    examples change at random when read (augmentation), so does the checksum.
    """
    layouts, contents, last = dict[int, Any](), dict[int, Any](), dict[int, str]()
    for row, place, layout, content in _leaves(dataset):
        if last.get(place) != layout:
            layouts.setdefault(place, hashlib.sha256()).update(f"{row} {layout}\0".encode())
            last[place] = layout
        contents.setdefault(place, hashlib.sha256()).update(content)

    whole = hashlib.sha256(f"{len(dataset)}".encode())
    for place in sorted(layouts):
        whole.update(layouts[place].digest() + contents[place].digest())
    return whole.hexdigest()


def data_fingerprint(dataset: Any) -> str | None:
    """A checksum to recognise a data set by; None if its examples change whenever they are read.

    A ``TensorDataset`` of up to 1 GiB is read whole, of others 64 examples: it recognises other data, but not one
    changed example in a million.
    """
    n = len(dataset)
    if type(dataset) is TensorDataset and sum(t.numel() * t.element_size() for t in dataset.tensors) <= _READ_WHOLE:
        return data_sha256(dataset)
    rows = sorted({round(k * (n - 1) / _EXAMPLES_OF_OTHERS) for k in range(_EXAMPLES_OF_OTHERS + 1)})
    found = {f"{n} {data_sha256(Subset(dataset, rows))}" for _ in range(2)}
    return found.pop() if len(found) == 1 else None


def _leaves(dataset: Any) -> Iterator[tuple[int, int, str, Any]]:
    """Row, place in the example, layout and bytes of everything in the data set."""
    # a subclass may return something else, so only the class itself is read by its tensors
    if type(dataset) is TensorDataset:
        for place, values in enumerate(dataset.tensors):
            rows = max(1, _BYTES_AT_ONCE // max(1, values[:1].numel() * values.element_size()))
            for part in values.split(rows):
                yield 0, place, f"{values.dtype} {list(values.shape[1:])}", _bytes(part)
        return
    for row in range(len(dataset)):
        for place, leaf in enumerate(pytree.tree_leaves(dataset[row])):
            if isinstance(leaf, Tensor):
                yield row, place, f"{leaf.dtype} {list(leaf.shape)}", _bytes(leaf)
            elif isinstance(leaf, np.ndarray):
                yield row, place, f"numpy {leaf.dtype} {list(leaf.shape)}", leaf.tobytes()
            else:
                text = str(leaf).encode()
                yield row, place, f"{type(leaf).__name__} {len(text)}", text


def _bytes(values: Tensor) -> Any:
    """The tensor's bytes in order, for hashing."""
    if values.numel() == 0:
        return b""
    return values.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


# ------------------------------------------------------------------ how its values are spread


@dataclass(frozen=True, eq=False)
class DataSpread:
    """Mean, deviation and range of the private coordinates.

    Attributes:
        examples: How many examples were read.
        inputs: Over all coordinates, each weighted by how many examples have it: mean, root mean variance, range.
        coordinates: The spread of each coordinate, [d]; NaN if unknown, as for submodules' outputs.
    """

    examples: int
    inputs: Spread
    coordinates: Spread


def read_spread(passes: DatasetPasses, num_coordinates: int, *, thorough: bool) -> DataSpread | None:
    """The spread of the run's data; None for streams, and if no private coordinate has a fixed value.

    If there are more than 65,536 examples (2,048 unless ``thorough``), that many are drawn without repetition, always
    the same ones.

    Args:
        passes: Reads the data set.
        num_coordinates: d.
        thorough: Whether many examples may be read.
    """
    d = max(1, num_coordinates)
    rows = _some_rows(passes, d, thorough=thorough)
    if passes.dataset is None or not len(rows):
        return None

    def values() -> Iterator[np.ndarray]:
        for part in _pieces(passes, rows, max(1, min(1024, _VALUES_AT_ONCE // d))):
            # outputs of submodules have no values; texts may be laid out differently from batch to batch
            if part.values.shape[1] != num_coordinates or part.values.isnan().all():
                raise _NoValuesError
            yield part.values.detach().to("cpu", torch.float64).numpy()

    try:
        each, counts = counted_spread(values())
    except _NoValuesError:
        return None
    if not counts.any():
        return None
    known = counts > 0
    weight = counts[known] / counts.sum()
    mean, variance = (np.sum(part[known] * weight) for part in (each.mean, each.std**2))
    inputs = (mean, math.sqrt(variance), np.min(each.low[known]), np.max(each.high[known]))
    return DataSpread(len(rows), Spread(*map(np.asarray, inputs)), each)


def fitted_prior(passes: DatasetPasses) -> tuple[np.ndarray, Prior]:
    """The rows of the examples that were read, and a normal law of their private values given everything else in them.

    Everything else is public: their targets and inputs, with the private coordinates taken out.

    Raises:
        ValueError: It cannot be fitted: a stream, or coordinates without values that could be compared.
    """
    d = passes.run.leakage.num_coordinates
    remedy = "pass prior=, a law given what is public"
    require(passes.dataset is not None, f"the examples of a stream cannot be read again; {remedy}")
    rows = _some_rows(passes, d, thorough=True)
    parts = list(_pieces(passes, rows, 1024))
    values = [part.values for part in parts]
    alike = all(part.shape[1] == d and not part.isnan().any() for part in values)
    shapes = "a prior needs private values of one shape, not outputs of a submodule or texts of different lengths"
    require(alike and len({part.form for part in parts}) <= 1, f"{shapes}; {remedy}")
    public = [tensors_of(part.restore(torch.zeros_like(part.z), part.public)[:3]) for part in parts]
    return rows, Prior.gaussian(torch.cat(values).cpu(), [torch.cat(same).cpu() for same in zip(*public, strict=True)])


class _NoValuesError(Exception):
    """Coordinates have no values that could be compared between examples."""


def _some_rows(passes: DatasetPasses, d: int, *, thorough: bool) -> np.ndarray:
    """All examples, or as many of them as are read, always the same ones."""
    count = passes.run.ids.num_examples
    most = min(_MOST_ROWS if thorough else _FEW_ROWS, max(_FEW_ROWS, _MOST_VALUES // d))
    if count <= most:
        return np.arange(count)
    return np.sort(np.random.default_rng(0).choice(count, most, replace=False))


def _pieces(passes: DatasetPasses, rows: np.ndarray, size: int) -> Iterator[Examples]:
    """These examples with their private coordinates, ``size`` of them at a time."""
    for start in range(0, len(rows), size):
        yield passes.examples(rows[start : start + size].tolist())
