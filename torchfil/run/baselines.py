"""What a number is measured against: a blind guess, which knows everything public and not the
model.

An error of 0.3 says nothing by itself. A blind guess answers the best that public values allow: the
mean of the example's label, or a linear fit on known columns
(:class:`~torchfil.run.saved_run.Baselines`). What it is off by (root mean square) is known for
every public class, and so for every example. The **ratio** of an error is the error over that of
the blind guess.

One rule says who is exposed, in page, gate, ``compare``, table and terminal. By the lower end of
the error's 95 % interval (the error itself where no end is kept), an example is

====================  ============================================================================
:data:`HALF`          protected only to half a blind guess's error or less
:data:`BELOW`         protected to less than a blind guess's error
:data:`BEYOND`        protected beyond a blind guess's error; beliefs may still come closer
:data:`UNTOLD`        drawn too rarely to tell: never, or too seldom for a lower end
====================  ============================================================================

**Exposed** are the first two. What a blind guess errs by is taken, in this order, from

1. what the caller states (a policy's ``blind_error`` and ``attribute_spread``),
2. the baselines that the run file keeps,
3. the range [a, b] of the inputs: always answering the middle is off by (b − a)/2 at most.

None of the three: None, and no ratio is told. Baselines are made from private data: they stay out
of public pages, which may show counts of many examples together.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import ArrayLike

from torchfil.run.saved_run import LOWER_BOUND as LOWER_BOUND
from torchfil.run.saved_run import NOT_MEASURED as NOT_MEASURED
from torchfil.run.saved_run import ByExample, QuestionRecord, SavedRun, Spread
from torchfil.run.saved_run import status_of as status_of
from torchfil.run.unit import Facts

HALF, BELOW, BEYOND, UNTOLD = range(4)
CLASSES = {
    HALF: "protected only to half a blind guess’s error or less",
    BELOW: "protected to less than a blind guess’s error",
    BEYOND: "protected beyond a blind guess’s error",
    UNTOLD: "too few draws to tell",
}
_AT_ONCE = 2**16  # rows whose attributes are in memory together


def range_error(about: Facts) -> float | None:
    """(b − a)/2: what answering (a + b)/2 is never off by more than, for inputs in [a, b].

    None where none is known.

    Example:
        >>> range_error({"dataset": {"input_range": [0.0, 1.0]}})
        0.5
    """
    ends = (about.get("dataset") or {}).get("input_range")
    if (
        not isinstance(ends, list | tuple)
        or len(ends) != 2
        or not -math.inf < ends[0] < ends[1] < math.inf
    ):
        return None
    return float(ends[1] - ends[0]) / 2


def public_classes(run: SavedRun, count: int) -> np.ndarray:
    """The place of each example's public class among ``count`` blind guesses, [n]; 0 where there is
    one for all.
    """
    classes = np.asarray(run.columns.get("public_class", np.zeros(len(run), dtype=np.int64)))
    return np.minimum(classes, count - 1)


def blind_error_of_inputs(run: SavedRun, stated: float | None = None) -> np.ndarray | None:
    """What a blind guess of one input is off by (root mean square over inputs), in the inputs'
    unit, [n].

    None: not known. 0 where nothing is left to guess.

    Args:
        run: A saved run.
        stated: What the caller knows of it.
    """
    if stated is None and run.baselines is not None and np.isfinite(run.baselines.errors).all():
        return run.baselines.errors[public_classes(run, len(run.baselines.errors))]
    error = stated if stated is not None else range_error(run.about)
    return None if error is None else np.full(len(run), error)


def typical_blind_error(run: SavedRun, stated: float | None = None) -> float | None:
    """The same over all examples (root mean square), for a sentence; None: not known."""
    errors = blind_error_of_inputs(run, stated)
    return None if errors is None or not len(errors) else float(np.sqrt(np.mean(errors**2)))


def blind_errors(
    run: SavedRun, stated: Mapping[str, float] | None = None, inputs: float | None = None
) -> np.ndarray:
    """What a blind guess of every attribute is off by (root mean square), by public class, [c, k].

    NaN: not known.

    In the attribute's unit; 0 for an attribute that never differs within a class: nothing about it
    is left to guess.

    Args:
        run: A saved run with attributes.
        stated: By attribute, what the caller knows of it.
        inputs: What the caller knows of a blind guess of an input; it stands in for attributes
            without a baseline.
    """
    assert run.attributes is not None
    of_inputs = inputs if inputs is not None else range_error(run.about)
    errors = np.full((1, len(run.attributes.names)), math.nan if of_inputs is None else of_inputs)
    if run.baselines is not None:
        known = run.baselines.attribute_errors
        errors = np.where(np.isfinite(known), known, errors)
    for place, name in enumerate(run.attributes.names if stated else ()):
        errors[:, place] = (stated or {}).get(name, errors[:, place])
    return errors


def ratio_to_blind_guess(error: ArrayLike, blind: ArrayLike) -> np.ndarray:
    """error/blind, in the shape of both.

    NaN where either is not known, infinite where nothing is left to guess.

    Example:
        >>> ratio_to_blind_guess([0.19, 3.0, np.inf], 0.5).tolist()
        [0.38, 6.0, inf]
    """
    errors, guess = np.asarray(error, dtype=np.float64), np.asarray(blind, dtype=np.float64)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(guess == 0, math.inf, errors / guess)


def attribute_ratio_parts(
    run: SavedRun, errors: ByExample, blind: np.ndarray
) -> Iterator[tuple[slice, np.ndarray]]:
    """Errors of attributes over those of a blind guess, a part of the examples after the other:
    which, and [rows, k].

    Args:
        run: A saved run with attributes.
        errors: [n, k].
        blind: :func:`blind_errors`, [c, k].
    """
    codes = public_classes(run, len(blind))
    for start in range(0, len(run), _AT_ONCE):
        rows = slice(start, start + _AT_ONCE)
        yield (
            rows,
            ratio_to_blind_guess(np.asarray(errors[rows], dtype=np.float64), blind[codes[rows]]),
        )


def is_told(run: SavedRun) -> np.ndarray:
    """Which examples were drawn often enough to tell a lower end of their MSE bound, [n] booleans.

    A lower end of 0 beside a bound above 0 is none. Without noise the bound is 0 itself, and told.
    """
    bound, low = run.column("mse_bound"), run.lower_ends
    return (status_of(run) != NOT_MEASURED) & ((low > 0) | (bound == 0))


def error_ratios(run: SavedRun, stated: float | None = None) -> np.ndarray | None:
    """The least error of an unbiased estimate (lower end) over that of a blind guess, [n].

    NaN where untold.

    None: what a blind guess errs by is not known.

    Args:
        run: A saved run.
        stated: What a blind guess of an input errs by, where the caller knows.
    """
    blind = blind_error_of_inputs(run, stated)
    if blind is None:
        return None
    errors = np.sqrt(run.lower_ends)
    return np.where(is_told(run), ratio_to_blind_guess(errors, blind), math.nan)


def classes_of_ratios(ratios: ArrayLike) -> np.ndarray:
    """The rule: HALF, BELOW, BEYOND or, where a ratio is NaN, UNTOLD; uint8 in its shape.

    Example:
        >>> classes_of_ratios([0.2, 0.5, 1.0, np.inf, np.nan]).tolist()
        [0, 1, 2, 2, 3]
    """
    ratios = np.asarray(ratios, dtype=np.float64)
    told = np.where(ratios < 0.5, HALF, np.where(ratios < 1, BELOW, BEYOND))
    return np.where(np.isnan(ratios), UNTOLD, told).astype(np.uint8)


def exposure_of(run: SavedRun, stated: float | None = None) -> np.ndarray | None:
    """The class of every example, by all its inputs together, uint8 [n].

    None: no blind guess is known.
    """
    ratios = error_ratios(run, stated)
    return None if ratios is None else classes_of_ratios(ratios)


def attribute_ratios(run: SavedRun, attribute: int, blind: np.ndarray) -> np.ndarray:
    """The least error of an estimate of one attribute over that of a blind guess, [n].

    NaN where the example is untold, its attributes were not tracked (``fil_ids``) or no blind guess
    is known.

    Args:
        run: A saved run with attributes.
        attribute: Its place among ``run.attributes.names``.
        blind: :func:`blind_errors`, [c, k].
    """
    assert run.attributes is not None
    errors = np.asarray(run.attributes.shown[:, attribute], dtype=np.float64)
    tracked = ~np.isnan(np.asarray(run.attributes.error[:, attribute], dtype=np.float64))
    codes = public_classes(run, len(blind))
    ratios = ratio_to_blind_guess(
        np.nan_to_num(errors, nan=0.0, posinf=math.inf), blind[codes, attribute]
    )
    return np.where(tracked & is_told(run), ratios, math.nan)


def answer_shares(question: QuestionRecord, rows: np.ndarray) -> np.ndarray | None:
    """How often each answer is the true one, [m]; None where the run does not tell.

    A complete question has the true answer among its own, as the only one with D = 0.

    Args:
        question: Of a saved run.
        rows: Which examples count, [n] booleans.

    Example:
        >>> divergence = np.array([[0.0, 0.3], [0.2, 0.0], [0.0, 0.1], [0.0, 0.4]])
        >>> asked = QuestionRecord("sex", ["f", "m"], True, divergence, divergence)
        >>> answer_shares(asked, np.ones(4, dtype=bool)).tolist()
        [0.75, 0.25]
    """
    zero = np.asarray(question.divergence)[rows] == 0
    told = zero[zero.sum(axis=1) == 1]
    return told.mean(axis=0) if question.complete and len(told) else None


def level_shares(spread: Spread) -> np.ndarray:
    """How often a column takes the larger of its two values, [d].

    NaN for columns of more values, or of one.

    By Bhatia and Davis, variance ≤ (high − mean)(mean − low), with equality where only the two ends
    occur: a column of two values is known by its mean, deviation and range.

    Example:
        >>> from torchfil.run.blind_guess import ColumnMoments
        >>> level_shares(
        ...     ColumnMoments.of(np.array([[0.0, 1.0], [1.0, 2.0], [0.0, 7.0], [0.0, 7.0]])).spread
        ... ).tolist()
        [0.25, nan]
    """
    width = spread.high - spread.low
    with np.errstate(invalid="ignore", divide="ignore"):
        share = (spread.mean - spread.low) / width
        two = np.abs(spread.std**2 - share * (1 - share) * width**2) <= 1e-6 * width**2
    return np.where(two & (width > 0), share, math.nan)
