"""What the report says of all examples together; the only thing that a redacted report is made from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy import stats

from torchfil.report.aggregates import (
    Histogram,
    geometric_mean,
    histogram,
    levels_of,
    published_count,
    rounded,
    rounded_count,
    windows,
)
from torchfil.report.attack_summary import AttackSummary, summarise_attack
from torchfil.report.disclosure import Split, joined, split_beside
from torchfil.report.saved_run import Attributes, QuestionRecord, SavedRun
from torchfil.report.spared import SparedSummary, summarise_spared
from torchfil.report.status import LOWER_BOUND, NOT_MEASURED, status_of

__all__ = [
    "FALSE_POSITIVE_RATE",
    "AttributeSummary",
    "Exposure",
    "GroupSummary",
    "Grouping",
    "QuestionSummary",
    "Summary",
    "blind_guess",
    "summarise",
]

LEVELS = (0.0, 0.5, 0.05, 0.25, 0.95, 0.01, 0.75)  # by exposure: 0 is the most exposed
MOST_GROUPS = 60
FALSE_POSITIVE_RATE = 0.01  # at which attackers on questions are compared
PUBLIC = {
    "kind": None,
    "title": None,
    "created": None,
    "epsilon": None,
    "delta": None,
    "accountant": None,
    "exact": None,
    "unit_of_inputs": None,
    "model": ("class", "name", "num_parameters"),
    "dataset": ("num_examples", "num_coordinates", "input_shape", "input_range"),
    "mechanism": (
        *("sigma", "l2", "releases"),  # of a linear model
        "noise_multiplier",
        "max_grad_norm",
        "clip",
        "sample_rate",
        "steps",
        "poisson",
        "stream",
        "amplification",
        "estimator",
        "num_probes",
        "probe_precision",
        "fil_rate",
        "rel_error",
        "min_mse_bound",
        "steps_paused",
        "loss",
    ),
    "versions": ("torchfil", "torch", "opacus", "python"),
    # neither how many pilots there were nor whether their target was met: both rest on the most exposed example;
    # nothing of "equalised", whose target may be read off an example
    "noise_choice": ("target", "confidence"),
    "merged": ("runs", "epsilon_of_all"),
}


@dataclass(frozen=True)
class Exposure:
    """A typical example at one level of exposure: geometric means over ``examples`` neighbours in rank."""

    level: float
    examples: int
    fil: float
    mse_bound: float
    mse_bound_low: float | None = None


@dataclass(frozen=True)
class GroupSummary:
    """η̄ of a group: geometric mean and its simultaneous 95 % interval."""

    name: str
    examples: int
    measured: int
    fil: float
    low: float
    high: float
    compared: str  # "more", "less" or "": whether the interval lies above or below all examples' mean
    fil_before: float | None = None  # of a run without clip weights; None: not known


@dataclass(frozen=True)
class Grouping:
    """One way to split the examples."""

    name: str
    fil: float  # of all examples
    groups: list[GroupSummary]
    merged: int  # how many small groups stand together in the last row
    left_out: int  # how many groups are not shown
    ratio: float | None = None  # of the groups that are shown, the largest η̄ over the smallest
    ratio_before: float | None = None  # the same of a run without clip weights; None: not known
    withheld: bool = False  # whether it is not shown because of the groupings before it


@dataclass(frozen=True)
class AttributeSummary:
    """By how much an unbiased guess of an attribute is off at least, ± in its own unit, by level of exposure.

    With ``lower_end``, ``error`` is made from the lower ends of the errors' 95 % intervals, otherwise from the errors.
    """

    name: str
    unit: str
    error: dict[str, float]
    lower_end: bool


@dataclass(frozen=True)
class QuestionSummary:
    """How well any attacker can tell the true answer: the largest true-positive rate at 1 % false positives, by level.

    Of every example its worst answer counts, at the upper end of its 95 % interval.
    """

    name: str
    answers: list[str]
    rate: dict[str, float]
    above: dict[str, int | str]  # how many examples have a rate above 5, 10 and 50 %


@dataclass(frozen=True)
class Summary:
    """All of it. With ``smallest`` > 1 it holds nothing about fewer examples than that.

    ``lowest_end`` is the geometric mean of the ``smallest`` lowest ``mse_bound_low`` of the measured examples; NaN if
    one is not known, None where the run has none or too few. A redacted summary gives it as the low end of the most
    exposed too, for their own would be a mean over nearly the same examples, and the two would differ by few.
    """

    redacted: bool
    smallest: int
    about: dict[str, Any]
    examples: int
    not_measured: int | str
    lower_bounds: int | str
    guess: float | None
    below_guess: int | str | None
    low_below_guess: int | str | None
    exposure: list[Exposure]
    lowest_end: float | None
    bounds: dict[str, Any]
    mse_histogram: Histogram | None
    epsilon: dict[str, float]
    epsilon_histogram: Histogram | None
    attributes: list[AttributeSummary]
    groupings: list[Grouping]
    attacks: list[AttackSummary]
    questions: list[QuestionSummary]
    history: dict[str, list[float]]
    spared: SparedSummary | None = None


def blind_guess(about: dict[str, Any]) -> float | None:
    """(b − a)²/4: the MSE that answering (a + b)/2 never exceeds, for inputs in [a, b]; None if unknown."""
    ends = about.get("dataset", {}).get("input_range")
    if not isinstance(ends, list | tuple) or len(ends) != 2 or not -math.inf < ends[0] < ends[1] < math.inf:
        return None
    return (ends[1] - ends[0]) ** 2 / 4


def summarise(run: SavedRun, *, redacted: bool = False, min_group: int = 10) -> Summary:
    """The summary of a run; with ``redacted``, nothing in it rests on fewer than ``min_group`` examples.

    A redacted summary also drops the hash of the data and the seed: who knows all other examples could try values of
    the last until the hash fits, and the seed of a generator that is not cryptographic gives the noise.
    """
    if min_group < 2:
        raise ValueError(f"min_group={min_group} must be at least 2: a group of one is an example")
    smallest = min_group if redacted else 1
    status = status_of(run)
    measured = status != NOT_MEASURED
    fil, bound = (np.asarray(run.columns[name], dtype=np.float64)[measured] for name in ("fil", "mse_bound"))
    low = run.columns.get("mse_bound_low")
    low = None if low is None else np.asarray(low, dtype=np.float64)[measured]
    guess = blind_guess(run.about)

    def below(values: np.ndarray | None) -> int | str | None:
        if guess is None or values is None or len(values) < smallest:
            return None
        return published_count(int((values < guess).sum()), smallest)

    exposure, lowest_end = _exposure(fil, bound, low, smallest), _lowest_end(low, smallest)
    if redacted and exposure:
        exposure[0] = replace(exposure[0], mse_bound_low=lowest_end)

    # rounding must not lift an example's own ε above ε for everybody
    epsilon = np.asarray(run.columns.get("epsilon", np.zeros(0)), dtype=np.float64)
    epsilon = epsilon[np.isfinite(epsilon)]
    limit: float | None = run.about.get("epsilon")
    limit = float(limit) if limit is not None and len(epsilon) and epsilon.max() <= limit * (1 + 1e-9) else None

    return Summary(
        redacted=redacted,
        smallest=smallest,
        about=_public(run.about) if redacted else run.about,
        examples=len(run.ids),
        not_measured=published_count(int((~measured).sum()), smallest),
        lower_bounds=published_count(int((status == LOWER_BOUND).sum()), smallest),
        guess=guess,
        below_guess=below(bound),
        low_below_guess=below(low),
        exposure=exposure,
        lowest_end=lowest_end,
        bounds={name: run.bounds[name] for name in ("rdp_mse_bound", "rero") if name in run.bounds},
        mse_histogram=histogram(bound, smallest, fineness=8 if redacted else 12, origin=guess),
        epsilon={
            level: value if limit is None else min(value, limit)
            for level, value in levels_of(-epsilon, smallest, sign=-1).items()
        },
        epsilon_histogram=histogram(epsilon, smallest, log=False, fineness=6, origin=limit),
        attributes=_attributes(run.attributes, measured, smallest),
        groupings=_groupings(run, measured, smallest),
        attacks=[summarise_attack(attack, smallest) for attack in run.attacks],
        questions=[_question(question, measured, smallest) for question in run.questions],
        history=_history(run.history, redacted),
        spared=summarise_spared(run, smallest),
    )


def _public(about: dict[str, Any]) -> dict[str, Any]:
    """Only what is known to say nothing about single examples."""
    kept: dict[str, Any] = {}
    for key, inner in PUBLIC.items():
        value = about.get(key)
        if inner is not None and isinstance(value, dict):
            kept[key] = {name: value[name] for name in inner if name in value}
        elif inner is None and isinstance(value, str | int | float | bool):
            kept[key] = value
    return kept


def _exposure(fil: np.ndarray, bound: np.ndarray, low: np.ndarray | None, smallest: int) -> list[Exposure]:
    order = np.argsort(-fil, kind="stable")
    rows = []
    for level, window in windows(len(fil), LEVELS, smallest).items():
        members = order[window]
        rows.append(
            Exposure(
                level=level,
                examples=len(members),
                fil=rounded(geometric_mean(fil[members]), smallest),
                mse_bound=rounded(geometric_mean(bound[members]), smallest),
                mse_bound_low=None if low is None else rounded(geometric_mean(low[members]), smallest),
            )
        )
    return rows


def _lowest_end(low: np.ndarray | None, smallest: int) -> float | None:
    if low is None:
        return None
    return math.nan if np.isnan(low).any() else levels_of(low, smallest, levels=(0.0,)).get("0")


def _attributes(attributes: Attributes | None, measured: np.ndarray, smallest: int) -> list[AttributeSummary]:
    if attributes is None:
        return []
    summaries, known = [], attributes.error_low is not None
    for j, (name, unit) in enumerate(zip(attributes.names, attributes.units, strict=True)):
        errors = np.asarray(attributes.shown[measured, j], dtype=np.float64)
        summaries.append(AttributeSummary(name, unit, levels_of(errors[~np.isnan(errors)], smallest), known))
    return summaries


def _groupings(run: SavedRun, measured: np.ndarray, smallest: int) -> list[Grouping]:
    """Each in turn, beside those before it: their groups together must not single out fewer than ``smallest``."""
    groupings, cells = [], None
    for name in run.groups:
        levels, group_of = run.coded_group(name)
        split = split_beside(group_of[measured], smallest, cells)
        split = replace(split, names=[str(levels[int(code)]) for code in split.names])
        cells = joined(cells, split)
        groupings.append(_grouping(run, name, measured, smallest, split))
    return groupings


def _grouping(run: SavedRun, name: str, measured: np.ndarray, smallest: int, split: Split) -> Grouping:
    """Geometric means of η̄ by group, with Student's intervals on log η̄, widened for their number (Bonferroni)."""
    levels, group_of = run.coded_group(name)
    sizes = dict(zip(levels.tolist(), np.bincount(group_of, minlength=len(levels)).tolist(), strict=True))
    codes, names, merged = split.codes, split.names, split.merged
    if merged:
        names = [*names, f"{merged} small groups together" if merged > 1 else "one more group"]

    logs, logs_before = (_logs(run.columns.get(column), measured) for column in ("fil", "fil_before"))
    overall = float(logs.mean()) if len(logs) else math.nan

    rows = []
    for code, group in enumerate(names):
        own = logs[codes == code]
        everyone = len(own) if merged and code == len(names) - 1 else int(sizes[group])
        before = _typical(logs_before[codes == code], smallest)
        rows.append(replace(_group(group, own, everyone, overall, len(names), smallest), fil_before=before))
    rows.sort(key=lambda row: -row.fil)
    left_out = len(sizes) - (len(names) - (merged > 0)) - merged + max(len(names) - MOST_GROUPS, 0)
    shown = rows[:MOST_GROUPS]
    return Grouping(
        name,
        rounded(math.exp(overall), smallest),
        shown,
        merged,
        left_out,
        _ratio([row.fil for row in shown], smallest),
        _ratio([row.fil_before for row in shown], smallest),
        split.withheld,
    )


def _logs(fil: np.ndarray | None, measured: np.ndarray) -> np.ndarray:
    """log η̄ of the measured examples; NaN where it is not known.

    log 0 would take a whole group's mean with it: zeros count as the least that was measured.
    """
    if fil is None:
        return np.full(int(measured.sum()), math.nan)
    values = np.asarray(fil, dtype=np.float64)[measured]
    positive = values[values > 0]
    return np.log(np.maximum(values, positive.min() if len(positive) else 1.0))


def _typical(logs: np.ndarray, smallest: int) -> float | None:
    """The geometric mean of those that are known; None where they are too few."""
    logs = logs[~np.isnan(logs)]
    return rounded(math.exp(float(logs.mean())), smallest) if len(logs) >= smallest else None


def _ratio(levels: Sequence[float | None], smallest: int) -> float | None:
    """The largest over the smallest; None for fewer than two, or where one is not known, 0 or infinite."""
    known = [level for level in levels if level is not None and 0 < level < math.inf]
    return rounded(max(known) / min(known), smallest) if len(known) == len(levels) > 1 else None


def _group(name: str, logs: np.ndarray, everyone: int, overall: float, groups: int, smallest: int) -> GroupSummary:
    """One of ``groups`` groups, from log η̄ of its measured examples and the mean over all examples."""
    centre, count, half = float(logs.mean()), len(logs), math.inf
    if count > 1 and math.isfinite(centre):  # infinite where there was no noise
        spread = float(logs.std(ddof=1)) / math.sqrt(count)
        half = float(stats.t.ppf(1 - 0.025 / groups, count - 1)) * spread
    ends = (math.exp(centre - half), math.exp(centre + half)) if math.isfinite(half) else (0.0, math.inf)
    return GroupSummary(
        name,
        rounded_count(everyone, smallest),
        rounded_count(count, smallest),
        rounded(math.exp(centre), smallest),
        rounded(ends[0], smallest),
        rounded(ends[1], smallest),
        "more" if centre - half > overall else "less" if centre + half < overall else "",
    )


def _question(question: QuestionRecord, measured: np.ndarray, smallest: int) -> QuestionSummary:
    rates = question.rate(FALSE_POSITIVE_RATE)[measured]
    above = {f"{level:g}": published_count(int((rates > level).sum()), smallest) for level in (0.05, 0.1, 0.5)}
    return QuestionSummary(question.name, question.answers, levels_of(-rates, smallest, sign=-1), above)


def _history(history: dict[str, np.ndarray], redacted: bool) -> dict[str, list[float]]:
    """Series over steps; redacted: only ε, for a median or a maximum is one example's value."""
    kept = ("step", "epsilon") if redacted else tuple(history)
    series = {name: np.asarray(history[name], dtype=np.float64).tolist() for name in kept if name in history}
    return series if len(series) > 1 else {}
