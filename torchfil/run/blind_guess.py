r"""The best blind guess from what is public, and what it is off by.

From data that is read once, in pieces.

Public is everything in an example but its private coordinates. Examples whose public targets are
the same labels (whole numbers) are a class. Everything public is a known column z besides. Of a
private coordinate x, a blind guess answers one of four, whichever is best for the class:

(a) the mean of all other examples,
(b) the mean of the others of its class,
(c) a linear fit on the known columns, over all examples,
(d) the same within the class.

All four answer x̄ + (z − z̄)B, with means of all examples or of the class, and B = 0 for a mean.
Each is judged on examples that it was not fitted to, by generalised cross validation: with n
examples, r fitted numbers and the residual sum of squares RSS,

    MSE = (RSS/n) / (1 − r/n)².

For a mean (r = 1) this is leave-one-out itself. A guess of too few examples (a mean of one, a fit
of fewer than r + 10) answers as the one before it in the list. An error of few examples is chance,
so classes of fewer than 10 count together. If classes would take too much memory, all examples are
one class; if there are so many known columns that they would not leave room for 16 classes, there
is no fit.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, reduce

import numpy as np
from numpy.typing import ArrayLike

from torchfil.run.saved_run import Spread

GUESSES = (
    "the mean of all examples",
    "the mean of its label",
    *("a linear fit on what is public",) * 2,
)
_FEWEST = 10  # examples, beyond the numbers that were fitted
_MOST_CLASSES, _MOST_NUMBERS = 2**12, 2**23  # in memory
_MOST_ERRORS = 2**14  # of attributes by class, in the facts of a run file
_NO_COLUMN = 1e-9  # a deviation, or an eigenvalue of a correlation, that is rounding


@dataclass(frozen=True, eq=False)
class ColumnMoments:
    """Moments of w columns, of which the first p are known.

    NaN entries do not count, and their products are NaN.

    The sum of two is that of all their rows, by Chan, Golub and LeVeque's formula, which loses no
    digits if the mean is far from 0: M2 = M2ₐ + M2_b + (x̄_b − x̄ₐ)² nₐn_b/(nₐ + n_b).

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
        return cls(
            count, mean, np.nansum(centred**2, axis=0), *ends, centred[:, :num_known].T @ centred
        )

    def __add__(self, other: ColumnMoments) -> ColumnMoments:
        count, known = self.count + other.count, len(self.products)
        apart, share = other.mean - self.mean, other.count / np.maximum(count, 1)
        weight, ends = (
            self.count * share,
            (np.minimum(self.low, other.low), np.maximum(self.high, other.high)),
        )
        squares = self.squares + other.squares + apart**2 * weight
        products = (
            self.products + other.products + apart[:known, None] * apart * weight[:known, None]
        )
        return ColumnMoments(count, self.mean + apart * share, squares, *ends, products)

    def pooled(self, places: np.ndarray) -> ColumnMoments:
        """Of the private columns, those of one place as one column, [places]; by the same formula.

        Args:
            places: The place of each private column, from 0 on, [d].
        """
        parts = (self.count, self.mean, self.squares, self.low, self.high)
        count, mean, squares, low, high = (part[len(self.products) :] for part in parts)
        first, total = np.unique(places, return_index=True)[1], np.bincount(places, count)
        away = mean - mean[first][places]
        apart = np.bincount(places, count * away) / np.maximum(total, 1)
        squares = np.bincount(places, squares + count * (away - apart[places]) ** 2)
        ends = low[first].copy(), high[first].copy()
        np.minimum.at(ends[0], places, low)
        np.maximum.at(ends[1], places, high)
        return ColumnMoments(total, mean[first] + apart, squares, *ends, self.products[:0, :0])

    @property
    def spread(self) -> Spread:
        """Of the private columns; the deviation is the data's own, sqrt(M2/n)."""
        columns = self.mean, np.sqrt(self.squares / np.maximum(self.count, 1)), self.low, self.high
        return Spread(
            *(
                np.where(self.count == 0, math.nan, column)[len(self.products) :]
                for column in columns
            )
        )

    @cached_property
    def fit(self) -> tuple[np.ndarray, int]:
        """Slopes B of the private columns on the known ones, [p, d], and the rank of the known
        ones.

        Columns with gaps have slopes of 0.
        """
        p = len(self.products)
        size = np.sqrt(self.squares[:p])
        varies = size > _NO_COLUMN * np.sqrt(self.count[:p]) * np.abs(self.mean[:p])
        scale = np.divide(1.0, size, out=np.zeros(p), where=varies)[:, None]
        correlations = scale * self.products[:, :p] * scale.T
        inverse = np.linalg.pinv(correlations, rcond=_NO_COLUMN, hermitian=True)
        rank = int(np.linalg.matrix_rank(correlations, tol=_NO_COLUMN, hermitian=True))
        return scale * (inverse @ (scale * np.nan_to_num(self.products[:, p:]))), rank

    def squared_errors(self, everybody: ColumnMoments) -> np.ndarray:
        """Summed over the rows of this class, those of guesses (a) to (d), [4, d].

        With centred sums S of the class and u = x − zB, RSS = S_xx − 2B·S_zx + B·S_zz·B + n(ū − ū
        of the source)².

        Args:
            everybody: The moments of all examples.
        """
        p, found = len(self.products), [np.zeros(len(self.mean) - len(self.products))]
        among, across = self.products[:, :p], np.nan_to_num(self.products[:, p:])
        for has_slopes in (False, True):
            for source in (everybody, self):
                slopes, rank = source.fit if has_slopes else (np.zeros_like(across), 0)
                n, apart = source.count[p:], self.mean - source.mean
                left = self.squares[p:] + ((among @ slopes - 2 * across) * slopes).sum(axis=0)
                left = (
                    np.maximum(left, 0.0) + self.count[p:] * (apart[p:] - apart[:p] @ slopes) ** 2
                )
                unfitted = 1 - (1 + rank) / np.maximum(n, 1)
                enough = n >= 1 + rank + (_FEWEST if has_slopes else 1)
                found.append(np.divide(left, unfitted**2, out=found[-1].copy(), where=enough))
        return np.stack(found[1:])


class BlindGuess:
    """Reads private values and what is public, in pieces, and then tells what blind guesses are off
    by.

    Attributes:
        squares: Summed over the examples of a class, those of guesses (a) to (d), [4, c, d].
        counts: How many examples of a class have the coordinate, [c, d].
        classes: The class of every example, int32 [n]; c if it was not read.
        knows: What the best guess answers, in words: that of most examples.
    """

    def __init__(self) -> None:
        self.moments: dict[bytes, ColumnMoments] = {}  # of classes, by labels
        self.codes: list[np.ndarray] = []  # each row's place among them
        # of all public columns, and of those with no private entry
        self.private = self.label = np.zeros(0, dtype=bool)

    def add(
        self, values: np.ndarray, targets: Sequence[ArrayLike], inputs: Sequence[ArrayLike]
    ) -> None:
        """Read some examples.

        Args:
            values: Their private coordinates, [rows, d]; NaN where an example has none.
            targets: Targets, [rows, …] each; private entries are NaN.
            inputs: The same of inputs.
        """
        parts = [
            np.asarray(part, dtype=np.float64).reshape(len(values), -1)
            for part in (*targets, *inputs)
        ]
        public = np.concatenate([np.zeros((len(values), 0)), *parts], axis=1)
        if not self.codes:
            self.private = np.isnan(public).any(axis=0)
            of_target = np.arange(public.shape[1]) < sum(
                part.shape[1] for part in parts[: len(targets)]
            )
            self.label = (of_target & (public % 1 == 0).all(axis=0))[~self.private]
        if public.shape[1] != len(self.private):  # of another shape: nothing to compare by
            public = np.zeros((len(values), len(self.private)))
        public = np.nan_to_num(public[:, ~self.private])
        d, p = values.shape[1], public.shape[1]
        p = p if 16 * (p + d) * (3 + p) <= _MOST_NUMBERS else 0

        # if classes are too many, or what looked like labels is not, all examples are one class
        labels = public[:, self.label] + 0.0
        keys = [row.tobytes() for row in labels]
        place = {key: at for at, key in enumerate(dict.fromkeys([*self.moments, *keys]))}
        if (
            len(place) > min(_MOST_CLASSES, _MOST_NUMBERS // ((p + d) * (3 + p)))
            or (labels % 1).any()
        ):
            self.label[:] = False
            self.moments = (
                {b"": reduce(operator.add, self.moments.values())} if self.moments else {}
            )
            keys, place = [b""] * len(keys), {b"": 0}

        code, table = (
            np.asarray([place[key] for key in keys]),
            np.concatenate([public[:, :p], values], axis=1),
        )
        for key, at in place.items():
            if (own := code == at).any():
                found = ColumnMoments.of(table[own], p)
                self.moments[key] = self.moments[key] + found if key in self.moments else found
        self.codes.append(code)

    def judged(self, scales: np.ndarray, rows: np.ndarray, num_examples: int) -> BlindGuess:
        """The same after all examples were read, with what the guesses err by.

        Args:
            scales: A factor for each coordinate, in which they can be compared, [d].
            rows: The places of the examples that were read, [m].
            num_examples: n.
        """
        codes = np.concatenate(self.codes) * (len(self.moments) > 1)
        sizes = np.bincount(codes)
        large = sizes >= _FEWEST
        merged = np.where(large, np.cumsum(large) - 1, large.sum())  # the small ones share the last
        self.squares = np.zeros((4, merged.max() + 1, len(scales)))
        self.counts = np.zeros(self.squares.shape[1:])
        for at, own in zip(merged, self.moments.values(), strict=True):
            self.squares[:, at] += own.squared_errors(self.everybody)
            self.counts[at] += np.where(self.everybody.count > 1, own.count, 0)[-len(scales) :]
        self.classes = np.full(num_examples, len(self.counts), dtype=np.int32)
        self.classes[rows] = merged[codes]

        # the words of the guess that most examples get; a fit that saves less than 1 % says no more
        # than a mean
        best = ((self.squares * scales**2).sum(axis=2).T * [1, 1, 1.01, 1.01]).argmin(axis=1)
        self.knows = GUESSES[np.bincount(best, np.bincount(merged, sizes)).argmax()]
        return self

    @cached_property
    def everybody(self) -> ColumnMoments:
        """The moments of all examples, after they were read."""
        return reduce(operator.add, self.moments.values())

    @property
    def column(self) -> dict[str, np.ndarray]:
        """The column ``public_class``; none if there is one class."""
        return {"public_class": self.classes} if len(self.counts) > 1 else {}

    def errors(self, columns: Sequence[Sequence[int]], scales: np.ndarray) -> np.ndarray:
        """The error of the best guess of each attribute (root mean square), in its unit, [c, k].

        NaN: not known.

        Of several classes, examples that were not read are one more, the last, which errs as all
        classes together do. These are all that is told, [1, k], if the classes are too many for a
        run file.

        Args:
            columns: The coordinates of each attribute; it errs by the root mean square over them.
            scales: The factor from a coordinate to its attribute, [d].
        """
        order, starts = np.concatenate(columns), np.cumsum([0, *map(len, columns[:-1])])
        squares = np.add.reduceat(
            self.squares[..., order] * scales[order] ** 2, starts, axis=-1
        ).min(axis=0)
        counts = np.add.reduceat(self.counts[:, order], starts, axis=-1)
        both = np.stack([squares, counts])
        together = both.sum(axis=1, keepdims=True)
        if squares.size > _MOST_ERRORS:
            both = together
        elif 1 < len(squares) <= self.classes.max():
            both = np.concatenate([both, together], axis=1)
        return np.sqrt(both[0] / np.where(both[1] > 0, both[1], math.nan))
