r"""A linear model's release as a saved run: the same file, page and gate as for a training run.

What is released is w* + N(0, σ²I), once. All numbers are closed forms (:mod:`torchfil.glm`) and
have no error: ``mse_bound_low`` is ``mse_bound``. What is random is the noise on the weights; there
are no steps, no batches, no clipping, and no accountant's ε.

Columns have units of their own, and a mean of squared years and squared milligrams means nothing.
Therefore every private coordinate j counts in units of its standard deviation s_j over the rows, in
which the mean of all rows is off by 1 (root mean square):

    η̄² = Σ_j s_j² I_jj / d,        mse_bound = 1/η̄².

Single attributes stand in their own units. ``scales=None`` leaves all units as they are.
"""

from __future__ import annotations

import datetime
import hashlib
import math
import os
import platform
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from torchfil._version import __version__
from torchfil.glm.fil import Release, information_by_coordinate
from torchfil.glm.guesses import BestGuess, guess
from torchfil.glm.solver import tangent_basis
from torchfil.run.blind_guess import BlindGuess
from torchfil.run.file import save
from torchfil.run.saved_run import (
    Attributes,
    Baselines,
    QuestionRecord,
    Records,
    SavedRun,
    Spread,
    checked_metrics,
)
from torchfil.run.statistics import RECORDED_ATTRIBUTES, RECORDED_EXAMPLES, most_exposed_and_typical
from torchfil.run.unit import Facts
from torchfil.utils.tables import plain_names
from torchfil.viz.common import Values, as_array

if TYPE_CHECKING:
    from torchfil.glm import IRFIL, Composition, GeneralizedLinearModel, Question

Columns = Sequence[Any] | slice
Released = tuple[Any, float]  # a fitted model, σ
_ROWS_AT_ONCE = 2**13


def save_linear_run(
    path: str | os.PathLike[str],
    model: GeneralizedLinearModel | IRFIL | Composition,
    X: Values,
    y: Values,
    sigma: float | None,
    **options: Any,
) -> Path:
    """Write what :func:`linear_run` gives into a file, for ``torchfil report``, ``gate``,
    ``inspect`` and ``compare``.

    Args:
        path: The file; ``run.parquet`` by custom. Readable by its owner only.
        model: As for :func:`linear_run`.
        X: The training inputs, [n, d].
        y: The training targets, [n].
        sigma: σ.
        **options: Of :func:`linear_run`.
    """
    return save(linear_run(model, X, y, sigma, **options), path)


def linear_run(
    model: GeneralizedLinearModel | IRFIL | Composition,
    X: Values,
    y: Values,
    sigma: float | None,
    *,
    ids: Sequence[Hashable] | None = None,
    title: str | None = None,
    attributes: Mapping[str, Columns] | None = None,
    attribute_units: Mapping[str, str] | None = None,
    private_target: bool | None = None,
    target: str = "target",
    groups: Mapping[str, Sequence[object]] | None = None,
    questions: Mapping[str, Question | BestGuess] | None = None,
    scales: Literal["deviation"] | Sequence[float] | None = "deviation",
    scores: Mapping[str, float] | None = None,
    metrics: Mapping[str, object] | None = None,
    hash_data: bool = True,
) -> SavedRun:
    """What releasing w* + N(0, σ²I) leaks about every row.

    Confidential: it depends on private data.

    Args:
        model: Fitted; or what :func:`torchfil.glm.iteratively_reweighted_fil` gave, whose weights
            are held fixed; or a :class:`torchfil.glm.Composition` of several releases.
        X: The training inputs, [n, d].
        y: The training targets, [n].
        sigma: σ of the release; None for a composition, which has its own.
        ids: The rows' names; None: their numbers.
        title: Of the report.
        attributes: {name: columns}: what is private; the attacker knows all else. None: every
            column by itself.
        attribute_units: {name: unit}, e.g. {"age": "years"}.
        private_target: Whether y is private, too. None: where no ``attributes`` are named.
        target: The target's name.
        groups: {grouping: one label per row}.
        questions: {name: what an attacker asks, or what :func:`torchfil.glm.guess` gave for it}.
        scales: s of every private coordinate, in units of which it counts. "deviation": its
            standard deviation over the rows; None: 1.
        scores: Further scores of the model, such as ``blind_score``, that of a model without
            inputs.
        metrics: What the released model is good for, as in :meth:`FILPrivacyEngine.save_run`.
            Besides, a single release keeps what other noise would cost: the model's expected score
            on these rows at σ/4 … 32σ.
        hash_data: Whether to keep a checksum of X and y.

    Raises:
        ValueError: Lengths do not fit, or a question is asked of several releases.

    Example:
        >>> from torchfil.glm import LinearRegression
        >>> X, y = np.eye(2), np.array([1.0, 2.0])
        >>> run = linear_run(LinearRegression().fit(X, y), X, y, sigma=0.5, scales=None)
        >>> bool(
        ...     np.allclose(
        ...         run.columns["mse_bound"], LinearRegression().fit(X, y).mse_bound(X, y, 0.5)
        ...     )
        ... )
        True
    """
    (releases, reweighted), utility = _releases(model, sigma), checked_metrics(metrics)
    first = releases[0][0]
    with_target = attributes is None if private_target is None else private_target
    parts = [
        Release(each.sensitivity(X, y, private_target=with_target), scale)
        for each, scale in releases
    ]
    width, coordinates = first.n_features_in_, parts[0].sensitivity.num_coordinates
    names = _attribute_columns(
        first, attributes, {target: list(range(width, coordinates))} if with_target else {}
    )
    private = sorted({column for own in names.values() for column in own})
    guess_of_private, values = _blind_guess(X, y, coordinates, private)
    spread = _scales(scales, values[1])

    n, square, error = (
        len(parts[0].sensitivity.X),
        *_measured(parts, spread, private, list(names.values())),
    )
    with np.errstate(divide="ignore"):
        bound = 1 / square
    # nothing was missed, and nothing is estimated
    columns = {
        "fil": np.sqrt(square),
        "mse_bound": bound,
        "mse_bound_low": bound,
        "missed": np.zeros(n, np.int64),
    }
    if reweighted is not None:  # beside η̄ of the same model fitted without weights
        from sklearn.base import clone

        unweighted = clone(first).fit(X, y).sensitivity(X, y, private_target=with_target)
        before, _ = _measured([Release(unweighted, releases[0][1])], spread, private, [])
        columns |= {
            "sample_weight": np.asarray(reweighted, dtype=np.float64),
            "fil_before": np.sqrt(before),
        }

    blind = guess_of_private.judged(1 / spread[private], np.arange(n), n)
    units, labels = attribute_units or {}, groups or {}
    _check_lengths(n, ids, labels)
    about = _about(releases, n, len(private), title, hashed=(X, y) if hash_data else None)
    linear: Facts = {"private": list(names), "reweighted": reweighted is not None}
    linear |= {name: float(value) for name, value in (scores or {}).items()}
    if scales is not None:
        linear["scales"] = spread[private].tolist()
        about["unit_of_inputs"] = (
            "standard deviations of the column" if isinstance(scales, str) else "given units"
        )
    if len(releases) == 1:
        linear["score_name"] = first.score_name
        linear["score_by_noise"] = _score_by_noise(*releases[0], X, y)
    about |= {"linear": linear, "metrics": utility}
    return SavedRun(
        about=about,
        ids=plain_names(range(n) if ids is None else ids),
        columns=columns | blind.column,
        attributes=Attributes(list(names), [units.get(name, "") for name in names], error, error),
        groups={
            name: np.asarray([str(label) for label in own], dtype=str)
            for name, own in labels.items()
        },
        questions=[
            _question(name, asked, releases, X, y) for name, asked in (questions or {}).items()
        ],
        baselines=_baselines(values, spread, private, names, blind),
        records=_records(X, y, columns["fil"], list(names.values())),
    )


def _measured(
    parts: list[Release], spread: np.ndarray, private: list[int], attributes: list[list[int]]
) -> tuple[np.ndarray, np.ndarray]:
    """η̄² of every row, [n], and the least error of each attribute, [n, k].

    A few rows at a time: I_jj of a long table would take as much memory as the table.
    """
    n = len(parts[0].sensitivity.X)
    square, error = np.empty(n), np.empty((n, len(attributes)), dtype=np.float32)
    for rows, information in information_by_coordinate(parts):
        square[rows] = (information * spread**2)[:, private].mean(axis=1)
        for place, own in enumerate(attributes):
            with np.errstate(divide="ignore"):
                error[rows, place] = 1 / np.sqrt(information[:, own].mean(axis=1))
    return square, error


def _check_lengths(
    n: int, ids: Sequence[Hashable] | None, groups: Mapping[str, Sequence[object]]
) -> None:
    given = {f"grouping {name!r}": labels for name, labels in groups.items()}
    for what, entries in (given if ids is None else {"ids": ids, **given}).items():
        if len(entries) != n:
            raise ValueError(
                f"{what} has {len(entries)} entries for {n} rows; give one each, in order"
            )


def _releases(model: Any, sigma: float | None) -> tuple[list[Released], np.ndarray | None]:
    """Models with the σ of their release, and the weights that were chosen from the data, where
    there are such.
    """
    if hasattr(model, "releases"):  # a composition
        if sigma is not None:
            raise ValueError(
                f"sigma={sigma}: a composition has a σ for each of its releases; pass sigma=None"
            )
        return list(model.releases), None
    if sigma is None or not 0 < sigma < float("inf"):
        raise ValueError(
            f"sigma={sigma} must be positive and finite: without noise the release gives "
            "everything away"
        )
    if hasattr(model, "etas"):  # of iteratively_reweighted_fil
        return [(model.model, float(sigma))], model.sample_weight
    return [(model, float(sigma))], None


def _score_by_noise(
    model: GeneralizedLinearModel, sigma: float, X: Values, y: Values
) -> list[list[float]]:
    """Pairs of a σ and the mean score over its noise, on the fitted rows.

    Without those whose mean is not finite.
    """
    noises = [sigma * 2 ** (step / 2) for step in range(-4, 11)]
    scores = [model.expected_score(X, y, noise) for noise in noises]
    return [
        [noise, score] for noise, score in zip(noises, scores, strict=True) if math.isfinite(score)
    ]


def _attribute_columns(
    model: GeneralizedLinearModel,
    attributes: Mapping[str, Columns] | None,
    of_target: Mapping[str, list[int]],
) -> dict[str, list[int]]:
    """Each private attribute's columns, by number.

    The target's come last, under a name of its own.
    """
    if attributes is None:
        names = getattr(
            model, "feature_names_in_", [f"column {j}" for j in range(model.n_features_in_)]
        )
        found = {str(name): [j] for j, name in enumerate(names)}
    else:
        if not attributes:
            raise ValueError(
                "attributes is empty: nothing would be private; None makes every column private"
            )
        found = {name: model.column_numbers(part) for name, part in attributes.items()}
    for target, own in of_target.items():
        while target in found:
            target += " (target)"
        found[target] = own
    return found


def _blind_guess(
    X: Values, y: Values, coordinates: int, private: list[int]
) -> tuple[BlindGuess, np.ndarray]:
    """What is private beside what is public.

    And mean, deviation and range of private coordinates, [4, d + t].

    A target of k classes is a corner of a simplex, with k − 1 coordinates within it: each has the
    deviation sqrt(Σ p(1 − p)/(k − 1)), and nothing else about it is told.
    """
    inputs, targets, guess = as_array(X), as_array(y), BlindGuess()
    width = inputs.shape[1]
    known, own, t = (
        np.setdiff1d(np.arange(width), private),
        [j for j in private if j < width],
        coordinates - width,
    )
    is_number = t < 2 and targets.dtype.kind in "biuf"
    labels = targets if is_number else np.unique(targets, return_inverse=True)[1].reshape(-1)
    of_target = labels[:, None] if is_number or not t else tangent_basis(t + 1).numpy()[labels]
    for start in range(0, len(inputs), _ROWS_AT_ONCE):  # a long table takes its memory once
        rows = slice(start, start + _ROWS_AT_ONCE)
        block = np.asarray(inputs[rows], dtype=float)
        values = np.concatenate([block[:, own], of_target[rows, :t]], axis=1)
        guess.add(values, [] if t else [labels[rows]], [block[:, known]])

    spread = np.full((4, coordinates), np.nan)
    spread[:, private] = list(vars(guess.everybody.spread).values())
    if t and not is_number:
        spread[1, width:] = np.sqrt(np.mean(spread[1, width:] ** 2))
        spread[[0, 2, 3], width:] = np.nan
    return guess, spread


def _scales(scales: Sequence[float] | str | None, deviations: np.ndarray) -> np.ndarray:
    """s of every private coordinate, in units of which it counts, [d + t]."""
    if scales is None:
        return np.ones_like(deviations)
    if isinstance(scales, str):
        if scales != "deviation":
            raise ValueError(f"scales={scales!r} must be 'deviation', numbers or None")
        # a column with one value has nothing to guess: it counts as it is
        return np.where(deviations > 0, deviations, 1.0)
    given = np.asarray(scales, dtype=float)
    if not (given.shape == deviations.shape and bool(((given > 0) & np.isfinite(given)).all())):
        raise ValueError(
            f"scales must be {len(deviations)} positive numbers, one for each private coordinate, "
            "targets last"
        )
    return given


def _baselines(
    values: np.ndarray,
    scales: np.ndarray,
    private: list[int],
    names: Mapping[str, list[int]],
    blind: BlindGuess,
) -> Baselines:
    """What a blind guess errs by: of private coordinates together in their unit, of each attribute
    in its own.

    An attribute of several columns has a deviation alone, the root mean square over its columns, as
    its error is.
    """
    by_name = np.full((4, len(names)), np.nan)
    for place, own in enumerate(names.values()):
        by_name[1, place] = np.sqrt(np.mean(values[1, own] ** 2))
        if len(own) == 1:
            by_name[:, place] = values[:, own[0]]
    errors = blind.errors([range(len(private))], 1 / scales[private])[:, 0]
    by_attribute = blind.errors(
        [list(map(private.index, own)) for own in names.values()], np.ones(len(private))
    )
    return Baselines(Spread(*by_name), {}, blind.knows, errors, by_attribute)


def _records(X: Values, y: Values, fil: np.ndarray, columns: list[list[int]]) -> Records | None:
    """The attributes of the 10 rows that leak most and of typical ones.

    None for more than 64 attributes.
    """
    if len(columns) > RECORDED_ATTRIBUTES:
        return None
    rows, _ = most_exposed_and_typical(fil, np.ones(len(fil), dtype=bool), RECORDED_EXAMPLES)
    targets = as_array(y)[rows]
    last = targets if targets.dtype.kind in "biuf" else np.full(len(rows), np.nan)
    table = np.column_stack([as_array(X)[rows], last]).astype(float)
    values = table[:, [own[0] for own in columns]]
    return Records(rows, np.where([len(own) == 1 for own in columns], values, np.nan))


def _question(
    name: str, asked: Question | BestGuess, releases: Sequence[Released], X: Values, y: Values
) -> QuestionRecord:
    """D = Δ²/(2σ²) between normal laws, of which the best attacker's success is known exactly."""
    if not isinstance(asked, BestGuess):
        if len(releases) != 1:
            raise ValueError(
                f"question {name!r}: they are answered for one release, not for {len(releases)}"
            )
        asked = guess(releases[0][0], X, y, asked, releases[0][1])
    answers, divergence = list(asked.answers), asked.divergence

    # where all have the same answer (the row is there, the number is what it is), the others are
    # what could be
    first = int(asked.truth[0])
    complete = bool((asked.truth != first).any())
    if not complete and len(answers) > 1:
        answers, divergence = (
            answers[:first] + answers[first + 1 :],
            np.delete(divergence, first, axis=1),
        )
    return QuestionRecord(name, answers, complete, divergence, divergence, law="normal")


def _about(
    releases: Sequence[Released],
    n: int,
    coordinates: int,
    title: str | None,
    *,
    hashed: tuple[Values, Values] | None,
) -> Facts:
    model, sigma = releases[0]
    sizes = [
        np.size(each.coef_) + each.fit_intercept * np.size(each.intercept_) for each, _ in releases
    ]
    digest, alone = None if hashed is None else _digest(*hashed), len(releases) == 1
    name = ", ".join(type(each).__name__ for each, _ in releases)

    # no steps and no ε: noise was added once to each released fit, and what follows is in closed
    # form
    return {
        "kind": "linear",
        "title": f"{name} on {n:,} examples" if title is None else title,
        "model": {
            "name": name,
            "num_parameters": sum(sizes),
            "not_smooth": [],  # the loss is a smooth function of the linear predictor
        },
        "dataset": {"num_examples": n, "num_coordinates": coordinates, "data_sha256": digest},
        "mechanism": {
            "sigma": sigma if alone else None,
            "sigmas": None if alone else [scale for _, scale in releases],
            "releases": len(releases),
            "l2": float(model.l2) if alone else None,
        },
        "unit_of_inputs": "",
        **dict.fromkeys(("epsilon", "delta", "accountant")),
        "versions": {
            "torchfil": __version__,
            "torch": str(torch.__version__),
            "python": platform.python_version(),
        },
        "created": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "exact": True,
    }


def _digest(X: Values, y: Values) -> str:
    """SHA-256 of the inputs and targets as they were fitted."""
    digest = hashlib.sha256()
    for values in (as_array(X), as_array(y)):
        digest.update(f"{values.dtype.str}{values.shape}".encode())
        digest.update(np.ascontiguousarray(values).tobytes())
    return digest.hexdigest()
