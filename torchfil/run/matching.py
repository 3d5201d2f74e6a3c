"""Several runs beside each other: examples matched by id, who moved, whether one leaks more, and
repetitions.

**Whether a run leaks more than an earlier one, by more than chance explains.** Two runs of one
recipe differ by noise, draws and probes. Compared are the examples that both runs tell of. For the
k most exposed of them, each run's own, with k = m (all), ⌈m/20⌉ and 1, let

    L = (1/k) Σ log η̄_i,        s² = (1/k²) Σ s_i²,        s_i = max(0, −log(η̄_i √low_i)) / 1.96,

with low_i the lower end of the MSE bound, at 95 %. More beyond chance is exp(L_after − L_before −
3√(s²_after + s²_before)) − 1. Closed forms have s = 0. An η̄ of 0 counts as the least that is not
0, and as exact. Examples share the course of the weights, which no interval has: hence 3, and not
1.96. Of 60 runs each of five small recipes, with their own first weights, at most 4.2 % of the
pairs leaked more by any of the three, none by a tenth; and with half the noise, all did. Questions
are compared by sqrt(D) at k = ⌈m/20⌉, and ε as it is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from torchfil.run import baselines
from torchfil.run.baselines import NOT_MEASURED, is_told
from torchfil.run.saved_run import MEASURED, SavedRun, audited_epsilon, value_at
from torchfil.run.unit import Facts
from torchfil.utils.tables import as_texts
from torchfil.utils.text import visible

CHANCE = 3.0  # standard errors
EXPOSED = {"all examples together": 1.0, "the 5 % most exposed": 0.05, "the most exposed": 0.0}
_SAME = 1e-9  # relative difference up to which closed forms are the same


def setting(run: SavedRun, name: str) -> Any:
    """A value of ``about`` by its path, e.g. "mechanism.sigma", "unit" or "audited" (ε).

    None: missing or empty.
    """
    audit = run.about.get("audit")
    value = value_at(
        {**run.about, "unit": run.unit.kind, "audited": audit and audited_epsilon(audit)}, name
    )
    return value if value != "" else None


def check_alike(before: SavedRun, after: SavedRun) -> None:
    """Refuse runs whose numbers mean different things."""
    for name, what in (
        ("dataset.num_coordinates", "private inputs of an example"),
        ("unit", "the unit of privacy"),
        ("unit_of_inputs", "the unit of inputs"),
        ("linear.private", "what is private"),
    ):
        one, other = (setting(run, name) for run in (before, after))
        if not (one == other or (name == "dataset.num_coordinates" and None in (one, other))):
            raise ValueError(
                f"the runs speak of different things: {what} is {one!r} in the first and "
                f"{other!r} in the second; compare runs that protect the same inputs"
            )
    one, other = (setting(run, "linear.scales") or 1.0 for run in (before, after))
    if not np.allclose(one, other, rtol=0.01, atol=0):
        raise ValueError("inputs count in deviations that differ; save with scales=None")
    asked, asked_after = ({q.name: q.answers for q in run.questions} for run in (before, after))
    both = asked.keys() & asked_after.keys()
    answers = [(asked[name], asked_after[name], f"{name!r} has the answers ") for name in both]
    if asked and asked_after and not both:
        answers = [(list(asked), list(asked_after), "")]
    for one, other, what in answers:
        if one != other:
            raise ValueError(
                f"the runs answer different questions: {what}{visible(', '.join(one))} in the "
                f"first and {visible(', '.join(other))} in the second; ask the same in both"
            )


def names_of(runs: Sequence[SavedRun]) -> list[np.ndarray]:
    """The ids of every run, [n] each, of one type, so that they can be compared.

    Raises:
        ValueError: A run has no examples, or an id twice.
    """
    if not all(len(run) for run in runs):
        raise ValueError("a run without examples cannot be compared")
    names = [np.asarray(run.ids) for run in runs]
    if len({own.dtype.kind for own in names}) > 1:
        names = [as_texts(own) for own in names]
    for own in names:
        count = len(np.unique(own))
        if count != len(own):
            raise ValueError(
                f"ids of a run repeat ({count:,} different ones for {len(own):,} examples), so "
                "that nothing is matched; save every run with ids"
            )
    return names


def matched(before: SavedRun, after: SavedRun) -> tuple[SavedRun, SavedRun]:
    """Both runs with the examples alone that both have measured, in the order of their ids."""
    one, other = names_of([before, after])
    ids, *places = np.intersect1d(one, other, assume_unique=True, return_indices=True)
    if not len(ids):
        raise ValueError(
            "the runs share no ids, by which examples are matched; save them with the ids of one "
            "list"
        )
    runs = [replace(before, attacks=[]), replace(after, attacks=[])]
    known = np.ones(len(ids), dtype=bool)
    for run, own in zip(runs, places, strict=True):
        known &= (baselines.status_of(run) != NOT_MEASURED)[own]
    if not known.any():
        raise ValueError(f"no example was measured in both runs, of {len(ids):,} that both have")
    return runs[0].take(places[0][known]), runs[1].take(places[1][known])


def clearly_moved(before: SavedRun, after: SavedRun) -> np.ndarray:
    """1, −1 or 0 by example: less exposed, more exposed, or not told apart, [m]."""
    fil, widths = [], []
    with np.errstate(divide="ignore", invalid="ignore"):
        for run in (before, after):
            fil.append(run.column("fil"))
            widths.append(np.maximum(1 / np.sqrt(run.lower_ends) - fil[-1], 0.0))
        change = fil[0] - fil[1]
        chance = np.sqrt(widths[0] ** 2 + widths[1] ** 2) + _SAME * np.maximum(*fil)
        return np.where(np.abs(change) > chance, np.sign(change), 0).astype(np.int64)


def worsening(before: SavedRun, after: SavedRun) -> tuple[dict[str, float], np.ndarray, int]:
    """By which share a run leaks more for certain, by what is compared; whom that concerns.

    How many were compared.

    It is NaN for what the earlier run tells and the later one does not: a question, or ε at the
    same δ. The places in ``after.ids`` are of those who are clearly more exposed, each by itself
    (:func:`clearly_moved`).

    Raises:
        ValueError: The runs share no ids, have an id twice, or speak of other inputs.
    """
    check_alike(before, after)
    one, other = matched(before, after)
    # what was measured in some steps alone leaks more than shown
    known = np.all(
        [is_told(run) & (baselines.status_of(run) == MEASURED) for run in (one, other)], axis=0
    )
    one, other = one.take(known), other.take(known)
    if not len(one):
        return {}, np.arange(0), 0
    errors = _errors(one), _errors(other)
    fil = one.column("fil"), other.column("fil")
    found = {name: clearly_more(fil, errors, share) for name, share in EXPOSED.items()}
    answered = {question.name: question for question in other.questions}
    for question in one.questions:
        both = [question, answered.get(question.name, question)]
        roots = [np.sqrt(np.asarray(each.divergence).max(axis=1).clip(min=0)) for each in both]
        more = clearly_more(roots, errors, 0.05) if question.name in answered else math.nan
        found[f"question “{question.name}”"] = more

    # ε is exact
    (spent, at), (now, there) = (
        (run.about.get("epsilon"), run.about.get("delta")) for run in (before, after)
    )
    if spent is not None:
        told = now is not None and at == there
        more = 0.0 if now == spent else now / spent - 1 if told and spent else math.inf
        found["ε for everybody"] = more if told else math.nan
    worse = set(as_texts(np.asarray(other.ids)[clearly_moved(one, other) < 0]))
    rows = np.flatnonzero([name in worse for name in as_texts(np.asarray(after.ids))])
    return found, rows, len(one)


def clearly_more(values: Sequence[np.ndarray], errors: Sequence[np.ndarray], share: float) -> float:
    """By which share the most exposed leak more for certain; negative: they do not.

    Args:
        values: η̄, or what grows with it, before and after, [m] each.
        errors: Standard errors of their logarithms, [m] each.
        share: Of how many of the examples; at least one.

    Example:
        >>> fil, exact = np.array([1.0, 2.0, 4.0]), np.zeros(3)
        >>> round(clearly_more((fil, 1.5 * fil), (exact, exact), 1.0), 9)
        0.5
    """
    levels, square, count = [], 0.0, max(1, math.ceil(share * len(values[0])))
    least = min(float(own[own > 0].min(initial=math.inf)) for own in values)
    for own, error in zip(values, errors, strict=True):
        most = np.argsort(-own, kind="stable")[:count]
        levels.append(float(np.log(np.maximum(own[most], least)).mean()))
        square += float((error[most] ** 2).sum()) / count**2
    change = 0.0 if levels[0] == levels[1] else levels[1] - levels[0]
    return math.expm1(min(change, 700.0) - CHANCE * math.sqrt(square))


def _errors(run: SavedRun) -> np.ndarray:
    fil = run.column("fil")
    with np.errstate(divide="ignore", invalid="ignore"):
        errors = np.maximum(0.0, -np.log(fil * np.sqrt(run.lower_ends))) / 1.96
    return np.where(fil > 0, np.nan_to_num(errors), 0.0)


# of repetitions: the data, where and how they ran, what chance chose
_MAY_DIFFER = (
    "data_sha256",
    "input_range",
    ".noise",
    "probe_precision",
    "steps_paused",
    "score_by_noise",
    ".scales",
)


def check_same_recipe(runs: Mapping[str, SavedRun]) -> None:
    """Refuse runs that are not repetitions of one recipe, by their names.

    Model, size of the data, δ and mechanism must agree: everything but noise, draws, the first
    weights and the data.
    """

    def recipe(run: SavedRun) -> dict[str, object]:
        parts: dict[str, Facts] = {
            part: run.about.get(part) or {} for part in ("model", "dataset", "mechanism", "linear")
        }
        parts["run"] = {name: run.about.get(name) for name in ("kind", "delta", "merged")}
        parts["run"]["size"] = len(run)
        return {
            f"{part}.{name}": value
            for part, values in parts.items()
            for name, value in values.items()
            if not name.endswith(_MAY_DIFFER)
        }

    (first, own), *others = ((name, recipe(run)) for name, run in runs.items())
    for name, theirs in others:
        for fact in sorted(own.keys() | theirs.keys()):
            if own.get(fact) != theirs.get(fact):
                raise ValueError(
                    f"the runs are not of one recipe: {fact} is {own.get(fact)!r} in {first} and "
                    f"{theirs.get(fact)!r} in {name}; give repetitions of one recipe, or judge "
                    "each run by itself"
                )
