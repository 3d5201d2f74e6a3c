r"""The best blind guess from what is public, and what it is off by; from data that is read once, in pieces.

Public is everything in an example but its private coordinates: labels (integers, and columns of few values, as in
:meth:`torchfil.bounds.Prior.gaussian`) and known columns. Examples with the same labels are a class. Of a private
coordinate, a blind guess answers one of three, whichever is best for the class:

(a) the mean of all other examples,
(b) the mean of the others of its class,
(c) within the class, a linear fit on everything public that is a number.

Each is judged on examples that it was not fitted to, by generalised cross validation: with n examples, r fitted numbers
and the residual sum of squares RSS,

    MSE = (RSS/n) / (1 − r/n)².

For a mean (r = 1) this is leave-one-out itself. A fit counts from n = r + 10 on. An error of few examples is chance,
so classes of fewer than 10 count together. If a class has a single example, (b) answers as (a).

Classes by all labels, by targets alone, and one class of all are compared; those with the least error are kept (one
class of all tells less about each example, so it must save a tenth of the squared error). If they
would take too much memory, labels among the inputs are given up first, then those of targets; so is the fit, if there
are so many known columns that it would not leave room for 16 classes.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np
import torch

from torchfil.bounds.mse import has_few_values
from torchfil.run.saved_run import Spread

_FEWEST = 10  # examples, beyond the numbers that were fitted
_AT_LEAST = 0.1  # of the squared error, which one class of all must save, because it tells less
_MOST_CLASSES, _MOST_NUMBERS = 2**12, 2**23  # in memory
_MOST_ERRORS = 2**15  # of attributes by class, in the facts of a run file
_NO_COLUMN = 1e-9  # a deviation, or an eigenvalue of a correlation, that is rounding


@dataclass(frozen=True, eq=False)
class ColumnMoments:
    """ColumnMoments of w columns, of which the first p are known; NaN entries do not count, and their products are NaN.

    The sum of two is that of all their rows, by Chan, Golub and LeVeque's formula, which loses no digits if the mean is
    far from 0: M2 = M2ₐ + M2_b + (x̄_b − x̄ₐ)² nₐn_b/(nₐ + n_b).

    Attributes:
        count: n of each column, [w].
        mean: x̄, [w].
        squares: M2 = Σ(x − x̄)², [w].
        low: The least value, [w].
        high: The largest, [w].
        products: Σ(x_i − x̄_i)(x_j − x̄_j), [p, w].
    """

    count: np.ndarray
    mean: np.ndarray
    squares: np.ndarray
    low: np.ndarray
    high: np.ndarray
    products: np.ndarray

    @classmethod
    def of(cls, values: np.ndarray, num_known: int = 0) -> ColumnMoments:
        """Of these rows, [rows, w]."""
        count = (~np.isnan(values)).sum(axis=0)
        mean = np.nansum(values, axis=0) / np.maximum(count, 1)
        centred = values - mean
        ends = np.fmin.reduce(values, initial=math.inf), np.fmax.reduce(values, initial=-math.inf)
        return cls(count, mean, np.nansum(centred**2, axis=0), *ends, centred[:, :num_known].T @ centred)

    def __add__(self, other: ColumnMoments) -> ColumnMoments:
        count, known = self.count + other.count, len(self.products)
        apart, share = other.mean - self.mean, other.count / np.maximum(count, 1)
        weight, ends = self.count * share, (np.minimum(self.low, other.low), np.maximum(self.high, other.high))
        squares = self.squares + other.squares + apart**2 * weight
        products = self.products + other.products + apart[:known, None] * apart * weight[:known, None]
        return ColumnMoments(count, self.mean + apart * share, squares, *ends, products)

    @property
    def spread(self) -> Spread:
        """Of the private columns; the deviation is the data's own, sqrt(M2/n)."""
        columns = self.mean, np.sqrt(self.squares / np.maximum(self.count, 1)), self.low, self.high
        return Spread(*(np.where(self.count == 0, math.nan, column)[len(self.products) :] for column in columns))

    def squared_errors(self, everybody: ColumnMoments) -> np.ndarray:
        """Summed over the rows of this class, those of guesses (a), (b) and (c), [3, d].

        Args:
            everybody: The moments of all examples.
        """
        p = len(self.products)
        n, left, of_all = self.count[p:], self.squares[p:], everybody.count[p:]
        with np.errstate(invalid="ignore", divide="ignore"):
            around_all = left + n * (self.mean - everybody.mean)[p:] ** 2
            first = np.where(of_all > 1, around_all / (1 - 1 / of_all) ** 2, 0.0)
            second = np.where(n > 1, left / (1 - 1 / n) ** 2, first)

            # what correlations with known columns explain; columns that others determine add nothing
            size = np.sqrt(self.squares[:p])
            varies = np.flatnonzero(size > _NO_COLUMN * np.sqrt(self.count[:p]) * np.abs(self.mean[:p]))
            products = self.products[varies] / size[varies, None]
            eigenvalues, basis = np.linalg.eigh(products[:, varies] / size[varies])
            kept = eigenvalues > _NO_COLUMN
            explained = ((basis[:, kept].T @ products[:, p:]) ** 2 / eigenvalues[kept, None]).sum(axis=0)
            fitted = 1 + kept.sum()
            third = np.maximum(left - explained, 0.0) / (1 - fitted / n) ** 2
        return np.stack([first, second, np.where((n - fitted >= _FEWEST) & (third >= 0), third, second)])


@dataclass(frozen=True, eq=False)
class BlindErrors:
    """What blind guesses are off by, by public class.

    Attributes:
        squares: Summed over the examples of a class, for guesses (a), (b) and (c), [3, c, d].
        counts: How many examples of a class have the coordinate, [c, d].
        classes: The class of every example, int32 [n]; c if it was not read.
        knows: What the best guess answers, in words: that of most examples.
    """

    squares: np.ndarray
    counts: np.ndarray
    classes: np.ndarray
    knows: str

    @property
    def column(self) -> dict[str, np.ndarray]:
        """The column ``public_class``; none if there is one class."""
        return {"public_class": self.classes} if len(self.counts) > 1 else {}

    def errors(self, columns: Sequence[Sequence[int]], scales: np.ndarray) -> np.ndarray:
        """The error of the best guess of each attribute (root mean square), in its unit, [c, k]; NaN: not known.

        Of several classes, examples that were not read are one more, the last, which errs as all classes together do.
        These are all that is told, [1, k], if the classes are too many for a run file; many errors have four digits.

        Args:
            columns: The coordinates of each attribute; it errs by the root mean square over them.
            scales: The factor from a coordinate to its attribute, [d].
        """
        order, starts = np.concatenate(columns), np.cumsum([0, *map(len, columns[:-1])])
        squares = np.add.reduceat(self.squares[..., order] * scales[order] ** 2, starts, axis=-1).min(axis=0)
        counts = np.add.reduceat(self.counts[:, order], starts, axis=-1)
        both = np.stack([squares, counts])
        together = both.sum(axis=1, keepdims=True)
        if squares.size > _MOST_ERRORS:
            both = together
        elif 1 < len(squares) <= self.classes.max():
            both = np.concatenate([both, together], axis=1)
        errors = np.sqrt(both[0] / np.where(both[1] > 0, both[1], math.nan))
        return errors if errors.size <= _MOST_ERRORS // 2 else np.vectorize("{:.4g}".format)(errors).astype(float)


class BlindGuess:
    """Reads private values and what is public, in pieces, and finds the best guess."""

    def __init__(self) -> None:
        self.classes: dict[bytes, ColumnMoments] = {}  # by labels
        self.codes: list[np.ndarray] = []  # each row's place among them
        self.private = self.of_target = self.floating = self.label = np.zeros(0, dtype=bool)

    def add(self, values: np.ndarray, targets: Sequence[Any], inputs: Sequence[Any]) -> None:
        """Read some examples.

        Args:
            values: Their private coordinates, [rows, d]; NaN where an example has none.
            targets: Targets, [rows, …] each; private entries are NaN.
            inputs: The same of inputs.
        """
        parts = [torch.as_tensor(part).cpu().reshape(len(values), -1) for part in (*targets, *inputs)]
        parts = [torch.zeros(len(values), 1), *parts]  # a label that all share
        public = torch.cat([part.double() for part in parts], dim=1).numpy()
        if not self.codes:
            kinds = [(place <= len(targets), part.is_floating_point()) for place, part in enumerate(parts)]
            self.private = np.isnan(public).any(axis=0)
            self.of_target, self.floating = np.repeat(kinds, [len(part[0]) for part in parts], axis=0)[~self.private].T
            self.label = np.ones_like(self.floating)
        if public.shape[1] != len(self.private):  # of another shape: nothing to compare by
            public = np.zeros((len(values), len(self.private)))
        public = np.nan_to_num(public[:, ~self.private])
        d, p = values.shape[1], public.shape[1]
        p = p if 16 * (p + d) * (3 + p) <= _MOST_NUMBERS else 0

        # labels are integers and columns of few values, and no more than memory suffices for
        label = self.label.copy()
        few = has_few_values(torch.from_numpy(np.concatenate([self._labels(), public[:, label]]))).numpy()
        label[label] = few | ~self.floating[label]
        while True:
            self._narrow(label)
            keys = [row.tobytes() for row in public[:, label] + 0.0]
            place = {key: at for at, key in enumerate(dict.fromkeys([*self.classes, *keys]))}
            if len(place) <= max(1, min(_MOST_CLASSES, _MOST_NUMBERS // ((p + d) * (3 + p)))):
                break
            label = label & self.of_target if (label & ~self.of_target).any() else np.arange(len(label)) == 0

        code, table = np.asarray([place[key] for key in keys]), np.concatenate([public[:, :p], values], axis=1)
        for key, at in place.items():
            if (own := code == at).any():
                found = ColumnMoments.of(table[own], p)
                self.classes[key] = self.classes[key] + found if key in self.classes else found
        self.codes.append(code)

    def best(self, scales: np.ndarray, rows: np.ndarray, num_examples: int) -> BlindErrors:
        """The guesses by the classes that leave the least error over all coordinates.

        Args:
            scales: A factor for each coordinate, in which they can be compared, [d].
            rows: The places of the examples that were read, [m].
            num_examples: n.
        """
        found, everybody = [], self.everybody
        for label in (np.arange(len(self.label)) == 0, self.label & self.of_target, self.label):
            classes, place = self._classes_by(label)
            codes = place[np.concatenate(self.codes)]
            sizes = np.bincount(codes)
            large = sizes >= _FEWEST
            merged = np.where(large, np.cumsum(large) - 1, large.sum())  # the small ones share the last
            squares = np.zeros((3, merged.max() + 1, len(scales)))
            counts = np.zeros(squares.shape[1:])
            for at, own in zip(merged, classes.values(), strict=True):
                squares[:, at] += own.squared_errors(everybody)
                counts[at] += np.where(everybody.count > 1, own.count, 0)[-len(scales) :]

            # the words of the guess that most examples get
            by_guess = (squares * scales**2).sum(axis=2)
            commonest = np.bincount(by_guess.argmin(axis=0), np.bincount(merged, sizes)).argmax()
            of_all = np.full(num_examples, len(counts), dtype=np.int32)
            of_all[rows] = merged[codes]
            guesses = BlindErrors(squares, counts, of_all, self._words(label)[commonest])
            found.append((by_guess.min(axis=0).sum() * (1 + _AT_LEAST * (len(counts) == 1)), guesses))
        return min(found, key=operator.itemgetter(0))[1]

    @property
    def everybody(self) -> ColumnMoments:
        """The moments of all examples."""
        return reduce(operator.add, self.classes.values())

    def _labels(self) -> np.ndarray:
        """Those of all classes, [classes, labels]."""
        return np.frombuffer(b"".join(self.classes), dtype=np.float64).reshape(-1, self.label.sum())

    def _classes_by(self, label: np.ndarray) -> tuple[dict[bytes, ColumnMoments], np.ndarray]:
        """The classes by some of their labels, and the place among them of each class."""
        classes, place = dict[bytes, ColumnMoments](), dict[bytes, int]()
        keys = [row.tobytes() for row in self._labels()[:, label[self.label]]]
        for key, own in zip(keys, self.classes.values(), strict=True):
            classes[key] = classes[key] + own if key in classes else own
            place.setdefault(key, len(place))
        return classes, np.asarray([place[key] for key in keys], dtype=np.int64)

    def _narrow(self, label: np.ndarray) -> None:
        """Tell classes by these labels alone."""
        if (label != self.label).any():
            self.classes, place = self._classes_by(label)
            self.codes, self.label = [place[code] for code in self.codes], label

    def _words(self, label: np.ndarray) -> tuple[str, str, str]:
        """What the three guesses answer."""
        varies = np.ones_like(label)
        varies[self.label] = np.ptp(self._labels(), axis=0) > 0
        by_target, by_input = (bool((label & varies & own).any()) for own in (self.of_target, ~self.of_target))
        of_class = "those with the same labels" if by_input else "its label" if by_target else "all examples"
        count = int((varies & ~(label & self.of_target)).sum())
        fit = f"a linear fit on {'its label and ' * by_target}{count} known column{'s' * (count != 1)}"
        return "the mean of all examples", f"the mean of {of_class}", fit
