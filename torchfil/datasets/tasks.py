"""Inputs and targets for linear models, train and test: pictures as vectors, tables by attribute."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["BinaryTask", "TabularTask", "levels_of", "one_hot", "projected"]


@dataclass(frozen=True)
class BinaryTask:
    """A binary classification task: inputs [n, d] in the unit ball or projected from it, targets 0 or 1."""

    train_inputs: np.ndarray
    train_targets: np.ndarray
    test_inputs: np.ndarray
    test_targets: np.ndarray


@dataclass(frozen=True)
class TabularTask:
    """A task on named attributes: numerical ones in one column each, nominal ones one-hot with one level dropped.

    Attributes:
        train_inputs: [n, d].
        train_targets: [n].
        test_inputs: [m, d].
        test_targets: [m].
        columns: The d columns' names: ``"age"`` for a numerical attribute, ``"vkorc1=CT"`` for a nominal one's level.
        attributes: Each attribute's columns.
        levels: Each nominal attribute's levels, including the one without a column (all zeros).
    """

    train_inputs: np.ndarray
    train_targets: np.ndarray
    test_inputs: np.ndarray
    test_targets: np.ndarray
    columns: tuple[str, ...]
    attributes: dict[str, tuple[int, ...]]
    levels: dict[str, tuple[str, ...]]

    def encode(self, attribute: str, level: str) -> np.ndarray:
        """The entries of the attribute's columns, [its columns], for this level; zeros for the dropped level.

        Raises:
            ValueError: There is no such nominal attribute or level.
        """
        if attribute not in self.levels:
            raise ValueError(f"{attribute!r} is not a nominal attribute; those are {list(self.levels)}")
        if level not in self.levels[attribute]:
            raise ValueError(f"{level!r} is not a level of {attribute!r}; those are {list(self.levels[attribute])}")
        names = [self.columns[column] for column in self.attributes[attribute]]
        return np.asarray([name == f"{attribute}={level}" for name in names], dtype=float)

    def level_numbers(self, attribute: str, inputs: np.ndarray) -> np.ndarray:
        """The index in ``levels[attribute]`` of every row's level, [n]: the inverse of :meth:`encode`.

        Raises:
            ValueError: There is no such nominal attribute, or a row's columns do not encode a level.
        """
        if attribute not in self.levels:
            raise ValueError(f"{attribute!r} is not a nominal attribute; those are {list(self.levels)}")
        codes = np.stack([self.encode(attribute, level) for level in self.levels[attribute]])  # [levels, its columns]
        values = inputs[:, list(self.attributes[attribute])]
        equal = (values[:, None, :] == codes).all(axis=2)  # [n, levels]
        if not equal.any(axis=1).all():
            wrong = int(equal.any(axis=1).argmin())
            raise ValueError(
                f"row {wrong} has {values[wrong].tolist()} for {attribute!r}, which does not encode a level"
            )
        return equal.argmax(axis=1)


def levels_of(rows: Sequence[Mapping[str, str]], name: str) -> tuple[str, ...]:
    """The levels of a nominal attribute, sorted."""
    return tuple(sorted({row[name] for row in rows}))


def one_hot(
    rows: Sequence[Mapping[str, str]],
    names: Sequence[str],
    levels: Mapping[str, tuple[str, ...]],
    dropped: Mapping[str, str],
) -> tuple[tuple[str, ...], dict[str, tuple[int, ...]], np.ndarray]:
    """The columns' names, each attribute's columns and the entries, [n, d]; attributes without levels are numbers."""
    columns: list[str] = []
    attributes: dict[str, tuple[int, ...]] = {}
    parts = []
    for name in names:
        values = np.asarray([row[name] for row in rows])
        if name in levels:
            unknown = sorted(set(values.tolist()) - set(levels[name]))
            if unknown:
                raise ValueError(f"the training set has no {name} {unknown}; its levels are {list(levels[name])}")
            kept = [level for level in levels[name] if level != dropped[name]]
            titles, part = [f"{name}={level}" for level in kept], (values[:, None] == np.asarray(kept)).astype(float)
        else:
            titles, part = [name], values.astype(float)[:, None]
        parts.append(part)
        attributes[name] = tuple(range(len(columns), len(columns) + len(titles)))
        columns += titles
    return tuple(columns), attributes, np.concatenate(parts, axis=1)


def _principal(centred: np.ndarray) -> np.ndarray:
    """The principal directions of rows [n, d] as columns, largest first; from an SVD if n < d."""
    if len(centred) < centred.shape[1]:
        return np.linalg.svd(centred, full_matrices=False)[2].T
    return np.linalg.eigh(centred.T @ centred)[1][:, ::-1]


def projected(
    inputs: np.ndarray,
    targets: np.ndarray,
    test_inputs: np.ndarray,
    test_targets: np.ndarray,
    components: int | None,
    scaled: bool,
) -> BinaryTask:
    """Pictures as Hannun et al. 2021 prepare them.

    Args:
        inputs: [n, d].
        targets: [n], 0 or 1.
        test_inputs: [m, d].
        test_targets: [m].
        components: Centre at the training mean and project onto this many principal components of the training set;
            ``None``: leave the inputs as they are.
        scaled: Whether to divide each split by its own largest norm.
    """
    if scaled:
        inputs = inputs / np.linalg.norm(inputs, axis=1).max()
        test_inputs = test_inputs / np.linalg.norm(test_inputs, axis=1).max()
    if components is not None:
        mean = inputs.mean(axis=0)
        centred = inputs - mean
        directions = _principal(centred)[:, :components]
        inputs, test_inputs = centred @ directions, (test_inputs - mean) @ directions
    return BinaryTask(inputs, targets, test_inputs, test_targets)
