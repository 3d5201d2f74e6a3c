"""What a number is measured against: the error of a blind guess, by somebody who knows the data but not the model.

An error of 0.3 says nothing by itself. A blind guess answers the mean of every attribute and is off by its standard
deviation (root mean square); of a categorical attribute it answers the share of every level. The **share** of an error
is the error over that of the blind guess: 0.38 is read "38 % of a blind guess's error", and from 1 on an
unbiased estimate errs more than a blind guess ("no better than guessing"); with beliefs, the model may still help.

**Exposed** is who can be guessed more closely than blindly: the lower end of the error's 95 % interval lies below the
blind guess (the error itself where no such end is known, and what is not known counts as exposed). Page, gate and
``inspect`` all ask :func:`is_exposed`.

What a blind guess errs by is taken, in this order, from

1. what the caller states (a policy's ``blind_error`` and ``attribute_spread``),
2. the spread of the data that the run file keeps (:class:`~torchfil.run.saved_run.Baselines`),
3. the range [a, b] of the inputs: always answering the middle is off by (b − a)/2 at most.

None of the three: None, and no share is told. The spread is made from private data: the values in 2. stay out of public
pages, which may show shares of many examples together.

========================================  ==========================================================================
:func:`status_of`                         whom the run measured: no leakage and no measurement look alike
:func:`blind_error_of_inputs`             what a blind guess of one input errs by; None: not known
:func:`blind_errors`                      the same of every attribute, [k]; NaN: not known
:func:`share_of_blind_guess`              errors over it, capped at 1
:func:`share_in_words`                    "38 % of a blind guess's error", "no better than guessing"
:func:`is_exposed`                        the rule
:func:`exposed_examples`                  which examples of a run are exposed, by all their inputs, [n]
:func:`attribute_exposure`                which are, by one attribute, [n]
:func:`gain_over_guessing`                of a question: how much more often than half of the time anybody is right
:func:`answer_shares`                     of a question: how often each answer is the true one
:func:`spread_of`, :func:`level_shares`   the data's spread, from its rows in pieces
:func:`values_and_levels`                 what some rows of the data hold, attribute by attribute
========================================  ==========================================================================
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from torchfil.run.saved_run import QuestionRecord, SavedRun, Spread

NO_LEVEL = "none of these"
MEASURED, LOWER_BOUND, NOT_MEASURED = 0, 1, 2
BLANK_WHERE_UNKNOWN = ("fil", "fil_error", "sampling_error", "mse_bound", "mse_bound_low")  # columns


def status_of(run: SavedRun) -> np.ndarray:
    """MEASURED, LOWER_BOUND (some participations were not measured) or NOT_MEASURED, uint8 [n].

    An example that no batch drew, or whose every step was skipped, has η̄ = 0 in the table; one run says nothing of it.
    """
    columns = run.columns
    fil = np.asarray(columns["fil"], dtype=np.float64)
    unknown = np.isnan(fil)
    missed = np.asarray(columns.get("missed", np.zeros(len(fil))))
    if "participations" in columns:
        unknown |= np.asarray(columns["participations"]) - missed <= 0
    if "sampling_error" in columns:
        unknown |= np.isinf(np.asarray(columns["sampling_error"], dtype=np.float64))
    mechanism = run.about.get("mechanism", {})
    rate = mechanism.get("fil_rate")
    if mechanism.get("rel_error") is not None or (rate is not None and rate < 1):
        unknown |= fil == 0
    return np.where(unknown, NOT_MEASURED, np.where(missed > 0, LOWER_BOUND, MEASURED)).astype(np.uint8)


def range_error(about: Mapping[str, Any]) -> float | None:
    """(b − a)/2: what answering (a + b)/2 is never off by more than, for inputs in [a, b]; None where none is known.

    Example:
        >>> range_error({"dataset": {"input_range": [0.0, 1.0]}})
        0.5
    """
    ends = about.get("dataset", {}).get("input_range")
    if not isinstance(ends, list | tuple) or len(ends) != 2 or not -math.inf < ends[0] < ends[1] < math.inf:
        return None
    return float(ends[1] - ends[0]) / 2


def blind_error_of_inputs(run: SavedRun, stated: float | None = None) -> float | None:
    """What a blind guess of one input is off by (root mean square over inputs), in the inputs' unit; None: not known.

    Args:
        run: A saved run.
        stated: What the caller knows of it.
    """
    if stated is not None:
        return stated
    if run.baselines is not None and 0 < run.baselines.inputs.std < math.inf:
        return float(run.baselines.inputs.std)
    return range_error(run.about)


def blind_errors(run: SavedRun, stated: Mapping[str, float] | None = None, inputs: float | None = None) -> np.ndarray:
    """What a blind guess of every attribute is off by (root mean square), in the attribute's unit, [k]; NaN: not known.

    0 for an attribute that never differs between examples: nothing about it is left to guess, and nobody is exposed.

    Args:
        run: A saved run with attributes.
        stated: By attribute, what the caller knows of it.
        inputs: What the caller knows of a blind guess of an input; it stands in for attributes without a spread.
    """
    assert run.attributes is not None
    of_inputs = inputs if inputs is not None else range_error(run.about)
    errors = np.full(len(run.attributes.names), math.nan if of_inputs is None else of_inputs)
    if run.baselines is not None:
        errors = np.where(np.isfinite(run.baselines.attributes.std), run.baselines.attributes.std, errors)
    for place, name in enumerate(run.attributes.names if stated else ()):
        errors[place] = (stated or {}).get(name, errors[place])
    return errors


def share_of_blind_guess(error: Any, blind: Any) -> np.ndarray:
    """min(error/blind, 1), in the shape of both; NaN where either is not known, 1 where nothing is left to guess.

    Example:
        >>> share_of_blind_guess([0.19, 3.0, np.inf], 0.5).tolist()
        [0.38, 1.0, 1.0]
    """
    errors, guess = np.asarray(error, dtype=np.float64), np.asarray(blind, dtype=np.float64)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(guess == 0, 1.0, np.minimum(errors / guess, 1.0))


def share_in_words(share: float) -> str:
    """A share for readers; rounded down, so that 99.6 % does not look like guessing.

    Example:
        >>> share_in_words(0.384), share_in_words(1.0), share_in_words(0.002), share_in_words(float("nan"))
        ('38 % of a blind guess’s error', 'no better than guessing', 'below 1 % of a blind guess’s error', 'unknown')
    """
    if math.isnan(share):
        return "unknown"
    if share >= 1:
        return "no better than guessing"
    percent = math.floor(100 * share + 1e-9)
    return f"{f'{percent}' if percent else 'below 1'} % of a blind guess’s error"


def is_exposed(error: Any, blind: Any) -> np.ndarray:
    """Whether a guess with the model can be closer than a blind one: not (error ≥ blind), in the shape of both.

    An error that is not known (NaN) counts as exposed: nothing says that it is not.

    Args:
        error: The least error of an unbiased guess, at the lower end of its interval; ∞ where nothing leaked.
        blind: The error of a blind guess.

    Example:
        >>> is_exposed([0.4, 0.5, np.inf, np.nan], 0.5).tolist()
        [True, False, False, True]
    """
    return ~(np.asarray(error, dtype=np.float64) >= np.asarray(blind, dtype=np.float64))


def exposed_examples(run: SavedRun, blind: float | None = None) -> np.ndarray | None:
    """Which measured examples are exposed, by all their inputs together, [n] booleans; None: no blind guess is known.

    Args:
        run: A saved run.
        blind: The error of a blind guess of an input; None: :func:`blind_error_of_inputs`.
    """
    blind = blind_error_of_inputs(run, blind)
    if blind is None:
        return None
    name = "mse_bound_low" if "mse_bound_low" in run.columns else "mse_bound"
    exposed = is_exposed(np.sqrt(np.asarray(run.column(name), dtype=np.float64)), blind)
    return exposed & (status_of(run) != NOT_MEASURED)


def attribute_exposure(run: SavedRun, attribute: int, blind: float) -> np.ndarray:
    """Which measured examples are exposed by one attribute, [n] booleans.

    Examples whose attributes were not tracked (``fil_ids``) are left out, as those that were not measured are.

    Args:
        run: A saved run with attributes.
        attribute: Its place among ``run.attributes.names``.
        blind: What a blind guess of it errs by (:func:`blind_errors`); NaN: nobody is told to be exposed.
    """
    assert run.attributes is not None
    if math.isnan(blind):
        return np.zeros(len(run), dtype=bool)
    tracked = ~np.isnan(np.asarray(run.attributes.error[:, attribute]))
    error = np.asarray(run.attributes.shown[:, attribute])
    return is_exposed(error, blind) & tracked & (status_of(run) != NOT_MEASURED)


def gain_over_guessing(question: QuestionRecord) -> np.ndarray:
    """How much more often than half of the time any attacker tells the true answer from another, likely one, [n].

    For the worst of the answers, at the upper end of its 95 % interval; NaN where that is not known.
    """
    return question.success() - 0.5


def answer_shares(question: QuestionRecord, rows: np.ndarray | None = None) -> dict[str, float] | None:
    """How often each answer is the true one; None where the run does not tell.

    A complete question has the true answer among its own, as the only one with D = 0.

    Args:
        question: Of a saved run.
        rows: Which examples count, [n] booleans; None: all.

    Example:
        >>> divergence = np.array([[0.0, 0.3], [0.2, 0.0], [0.0, 0.1], [0.0, 0.4]])
        >>> answer_shares(QuestionRecord("sex", ["f", "m"], True, divergence, divergence))
        {'f': 0.75, 'm': 0.25}
    """
    if not question.complete:
        return None
    zero = np.asarray(question.divergence)[slice(None) if rows is None else rows] == 0
    told = zero[zero.sum(axis=1) == 1]
    if not len(told):
        return None
    return dict(zip(question.answers, told.mean(axis=0).tolist(), strict=True))


def spread_of(pieces: Iterable[np.ndarray]) -> Spread:
    """Mean, standard deviation and range of every column, from rows in pieces; NaN entries do not count.

    Args:
        pieces: [rows, d] each; memory is needed for one at a time.

    Example:
        >>> spread_of([np.array([[0.0], [1.0]]), np.array([[2.0]])]).std.round(3).tolist()
        [0.816]
    """
    return counted_spread(pieces)[0]


def counted_spread(pieces: Iterable[np.ndarray]) -> tuple[Spread, np.ndarray]:
    """As :func:`spread_of`, and how many entries of every column were known, [d].

    Pieces are merged by Chan, Golub and LeVeque's formula, which loses no digits where the mean is far from 0:
    M2 = M2ₐ + M2_b + (x̄_b − x̄ₐ)² nₐn_b/(nₐ + n_b). The deviation is the data's own, sqrt(M2/n).
    """
    count: Any = np.zeros(())
    mean = squares = np.zeros(())
    low, high = np.asarray(math.inf), np.asarray(-math.inf)
    for piece in pieces:
        values = np.asarray(piece, dtype=np.float64)
        known = ~np.isnan(values)
        number = known.sum(axis=0)
        own_mean = np.where(known, values, 0.0).sum(axis=0) / np.maximum(number, 1)
        own_squares = (np.where(known, values - own_mean, 0.0) ** 2).sum(axis=0)

        # both parts together; a column that has no entry here moves nothing
        total = np.maximum(count + number, 1)
        apart = own_mean - mean
        squares = squares + own_squares + apart**2 * (count * number / total)
        mean = mean + apart * (number / total)
        count = count + number
        low = np.minimum(low, np.where(known, values, math.inf).min(axis=0, initial=math.inf))
        high = np.maximum(high, np.where(known, values, -math.inf).max(axis=0, initial=-math.inf))

    columns = (mean, np.sqrt(squares / np.maximum(count, 1)), low, high)
    return Spread(*(np.where(count == 0, math.nan, column) for column in columns)), count


def level_shares(spread: Spread) -> np.ndarray:
    """How often a column takes the larger of its two values, [d]; NaN for columns of more values, or of one.

    By Bhatia and Davis, variance ≤ (high − mean)(mean − low), with equality where only the two ends occur: a column of
    two values is known by its mean, deviation and range.

    Example:
        >>> level_shares(spread_of([np.array([[0.0, 1.0], [1.0, 2.0], [0.0, 7.0], [0.0, 7.0]])])).tolist()
        [0.25, nan]
    """
    width = spread.high - spread.low
    with np.errstate(invalid="ignore", divide="ignore"):
        share = (spread.mean - spread.low) / width
        two = np.abs(spread.std**2 - share * (1 - share) * width**2) <= 1e-6 * width**2
    return np.where(two & (width > 0), share, math.nan)


def values_and_levels(
    table: np.ndarray, columns: Sequence[list[int]], names: Sequence[str], spread: Spread
) -> tuple[np.ndarray, list[list[str]]]:
    """What some rows hold: the value of an attribute of one column, and which column holds of one with several.

    Args:
        table: [m, d].
        columns: Those of each of k attributes. Several are levels if each has two values at most.
        names: Of the d columns.
        spread: Of the d columns, over the whole data.

    Returns:
        Values, [m, k], NaN for several columns; and levels, m lists of k texts, "" where there is none.

    Example:
        >>> data = np.array([[30.0, 0, 1], [40.0, 0, 0], [50.0, 1, 0]])
        >>> values_and_levels(data[:2], [[0], [1, 2]], ["age", "AA", "AG"], spread_of([data]))[1]
        [['', 'AG'], ['', 'none of these']]
    """
    values = np.where([len(own) == 1 for own in columns], table[:, [own[0] for own in columns]], math.nan)
    levels = [[""] * len(columns) for _ in table]
    width, has_many = spread.high - spread.low, np.isnan(level_shares(spread))
    middle = np.where(width > 0, spread.low + width / 2, 0.5)  # a level that never changes holds if it is 1
    for place, own in enumerate(columns):
        if len(own) > 1 and not (has_many & (width > 0))[own].any():
            for row, holds in zip(levels, table[:, own] > middle[own], strict=True):
                row[place] = names[own[int(holds.argmax())]] if holds.any() else NO_LEVEL
    return values, levels
