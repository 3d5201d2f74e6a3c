r"""Two runs on the same examples beside each other: what a change did, and who moved.

Examples are matched by id; only those that both runs have measured count. An example has **clearly
moved** where its two FIL differ by more than chance explains, each example by itself: with h =
1/sqrt(mse_bound_low) − η̄ the half width of each 95 % interval,

    |η̄_after − η̄_before| > sqrt(h_before² + h_after²).

Closed forms have h = 0, and any difference counts. Of examples that did not move, about one in
twenty clearly does by chance, where intervals are estimates.

Made for publication, nothing rests on fewer than ``min_group`` examples: see
:mod:`torchfil.run.disclosure`. Groups are those of the first run, cut the same way for both; runs
whose examples differ by a few are refused, for the difference of two published numbers would be
theirs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import permutations

import numpy as np

from torchfil.report.formats import lines_of
from torchfil.report.summary import class_counts
from torchfil.run import baselines
from torchfil.run.baselines import BELOW, BEYOND, CLASSES, UNTOLD
from torchfil.run.disclosure import (
    check_enough,
    how_many,
    joined,
    levels_of,
    published_count,
    published_mean,
    rounded_count,
    smallest_group,
    split_beside,
)
from torchfil.run.matching import check_alike, clearly_moved, matched, setting
from torchfil.run.saved_run import SavedRun, jumps_of
from torchfil.run.unit import Unit

SETTINGS = {
    "kind": "kind of run",
    "model.name": "model",
    "mechanism.noise_multiplier": "noise multiplier σ",
    "mechanism.sigma": "noise σ on the weights",
    "mechanism.l2": "penalty λ",
    "mechanism.releases": "releases",
    "mechanism.max_grad_norm": "clipping norm C",
    "mechanism.clip": "clip function",
    "mechanism.sample_rate": "sampling rate q",
    "mechanism.expected_batch_size": "divisor of the noisy sums",
    "mechanism.steps": "steps",
    "mechanism.amplification": "amplification",
    "epsilon": "ε for everybody",
    "delta": "δ",
    "audited": "audited ε, at least",
}


@dataclass(frozen=True)
class Pair:
    """A number before and after; ``name`` says of what."""

    name: str
    before: float
    after: float


@dataclass(frozen=True)
class Side:
    """One run, as far as the matched examples go.

    Attributes:
        title: Of the run.
        examples: How many the run has; those without a partner, or that one run did not measure,
            included.
        alone: How many of them are not compared.
        fil: Typical η̄, the geometric mean.
        bound: MSE bounds by level, "0" the smallest and "0.5" the median.
        low_end: The smallest lower end; None where the run has none.
        classes: How many are in each class of exposure (:mod:`torchfil.run.baselines`); UNTOLD
            alone where no blind guess is known.
        exposed: How many are exposed; None: that is not known.
    """

    title: str
    examples: int
    alone: int | str
    fil: float
    bound: dict[str, float]
    low_end: float | None
    classes: dict[int, int | str]
    exposed: int | str | None


@dataclass(frozen=True, eq=False)
class Moves:
    """The matched examples one by one; never part of a public page.

    Attributes:
        ids: [m].
        before: MSE bounds before, [m].
        after: MSE bounds after, [m].
        clearly: 1: clearly less exposed after, −1: clearly more, 0: neither, int [m].
        newly_exposed: Whether exposed after and not before, [m] booleans; None: not known.
    """

    ids: np.ndarray
    before: np.ndarray
    after: np.ndarray
    clearly: np.ndarray
    newly_exposed: np.ndarray | None


@dataclass(frozen=True, eq=False)
class Comparison:
    """Two runs compared.

    Attributes:
        redacted: Whether it may be published.
        smallest: The least number of examples behind a number.
        unit: What an example is.
        before: The first run.
        after: The second run.
        matched: How many examples are compared.
        settings: What differs: name, before, after.
        ratio: The MSE bounds after over those before: their geometric mean ("mean") and, unless
            redacted, the least, the median and the largest ("0", "0.5", "1").
        expected: (σ_after/σ_before)², by which the bounds would have grown at the same gradients;
            None: σ is the same, or not known.
        exact: Whether both runs are closed forms.
        less: How many are clearly less exposed after.
        more: How many are clearly more exposed after.
        newly_exposed: How many are exposed after and were protected beyond a blind guess before;
            None: not known.
        no_longer: How many were exposed before and are protected beyond a blind guess after; None:
            not known.
        moved: How many went from one class of exposure to another, by the two; empty where no blind
            guess is known.
        attributes: The least error of unbiased guesses, of the most exposed example of each
            attribute.
        questions: The largest true-positive rate of any attacker at 1 % false positives, of the
            worst example.
        groups: By grouping, each group's typical η̄.
        notes: What could not be compared, and why.
        moves: Single examples; None where redacted.
    """

    redacted: bool
    smallest: int
    unit: Unit
    before: Side
    after: Side
    matched: int
    settings: list[tuple[str, object, object]]
    ratio: dict[str, float]
    expected: float | None
    exact: bool
    less: int | str
    more: int | str
    newly_exposed: int | str | None
    no_longer: int | str | None
    moved: dict[tuple[int, int], int | str]
    attributes: list[Pair]
    questions: list[Pair]
    groups: dict[str, list[Pair]]
    notes: list[str] = field(default_factory=list)
    moves: Moves | None = None

    @property
    def nothing_moved(self) -> bool:
        """Whether no example has clearly moved."""
        return self.less == 0 and self.more == 0

    @property
    def is_same(self) -> bool:
        """Whether the two runs have the same numbers, not merely none that can be told apart."""
        return self.nothing_moved and (
            self.exact or self.ratio.get("0") == self.ratio.get("1") == 1.0
        )


def compare_runs(
    before: SavedRun, after: SavedRun, *, redacted: bool = False, min_group: int = 10
) -> Comparison:
    """What changed from one run to another on the same examples.

    Args:
        before: A saved run.
        after: Another, of the same private inputs.
        redacted: Whether to leave out everything about fewer than ``min_group`` examples.
        min_group: At least 2.

    Raises:
        ValueError: The runs share no ids, have an id twice, speak of other inputs or ask other
            questions, or, redacted, differ by too few examples.

    Example:
        >>> from torchfil.run.saved_run import SavedRun
        >>> columns = {"fil": np.array([1.0, 2.0]), "mse_bound": np.array([1.0, 0.25])}
        >>> run = SavedRun(about={}, ids=np.arange(2), columns=columns)
        >>> compare_runs(run, run).nothing_moved
        True
    """
    smallest = smallest_group(redacted, min_group)
    check_alike(before, after)
    sizes = len(before), len(after)
    before, after = matched(before, after)
    if redacted:
        check_enough(sizes, len(before), smallest)

    found = _exposures(before, after)
    newly = no_longer = None
    moved: dict[tuple[int, int], int | str] = {}
    if found is not None:
        # nobody is newly exposed who was untold before: nothing says that it was protected
        newly = (found[0] == BEYOND) & (found[1] <= BELOW)
        no_longer = (found[0] <= BELOW) & (found[1] == BEYOND)
        for one, other in permutations(CLASSES, 2):
            which = (found[0] == one) & (found[1] == other)
            if which.any():
                moved[one, other] = how_many(which, smallest)
    bounds = before.column("mse_bound"), after.column("mse_bound")
    moves = Moves(np.asarray(before.ids), *bounds, clearly_moved(before, after), newly)
    settings = [
        (text, setting(before, name), setting(after, name)) for name, text in SETTINGS.items()
    ]
    models = zip(("first", "second"), map(jumps_of, (before.about, after.about)), strict=True)
    no_bound = "run’s model is not smooth, so its error bounds are no guarantees"
    notes = [f"The {which} {no_bound}: {jumps}." for which, jumps in models if jumps]
    sides = [
        _side(run, size, classes, smallest)
        for run, size, classes in zip((before, after), sizes, found or (None, None), strict=True)
    ]
    return Comparison(
        redacted=redacted,
        smallest=smallest,
        unit=before.unit,
        before=sides[0],
        after=sides[1],
        matched=rounded_count(len(before), smallest),
        settings=[(text, one, other) for text, one, other in settings if one != other],
        ratio=_ratio(*bounds, smallest),
        expected=_expected(before, after),
        exact=all(run.about.get("kind") == "linear" for run in (before, after)),
        less=how_many(moves.clearly > 0, smallest),
        more=how_many(moves.clearly < 0, smallest),
        newly_exposed=None if newly is None else how_many(newly, smallest),
        no_longer=None if no_longer is None else how_many(no_longer, smallest),
        moved=moved,
        attributes=_attributes(before, after, smallest),
        questions=_questions(before, after, smallest, notes),
        groups=_groups(before, after, smallest, notes),
        notes=notes,
        moves=None if redacted else moves,
    )


def _expected(before: SavedRun, after: SavedRun) -> float | None:
    """(σ′/σ)²: at the same gradients, or the same fit, Fisher information is proportional to
    1/σ².
    """
    for name in ("mechanism.sigma", "mechanism.noise_multiplier"):
        one, other = setting(before, name), setting(after, name)
        if one and other and one != other:
            return float((other / one) ** 2)
    return None


def _exposures(before: SavedRun, after: SavedRun) -> tuple[np.ndarray, np.ndarray] | None:
    """The classes of exposure in both runs, [m] each, where both hold the same blind guess.

    None otherwise.
    """
    blind, blind_after = (baselines.blind_error_of_inputs(run) for run in (before, after))
    one, other = (baselines.exposure_of(run) for run in (before, after))
    if blind is None or blind_after is None or one is None or other is None:
        return None
    return (one, other) if np.allclose(blind, blind_after, rtol=1e-6, atol=0) else None


def _side(run: SavedRun, examples: int, classes: np.ndarray | None, smallest: int) -> Side:
    low_end = levels_of(run.lower_ends, smallest, levels=(0.0,), power=2).get("0")
    return Side(
        title=str(run.about.get("title") or "a saved run"),
        examples=examples,
        alone=published_count(examples - len(run), smallest),
        fil=published_mean(run.column("fil"), smallest),
        bound=levels_of(run.column("mse_bound"), smallest, levels=(0.0, 0.5), power=2),
        low_end=low_end if "mse_bound_low" in run.columns else None,
        classes=class_counts(run, classes, smallest),
        exposed=None if classes is None else how_many(classes <= BELOW, smallest),
    )


def _ratio(before: np.ndarray, after: np.ndarray, smallest: int) -> dict[str, float]:
    """Of the examples whose bounds are positive and finite in both.

    Published only where few others are left out.
    """
    usual = (before > 0) & (after > 0) & np.isfinite(before) & np.isfinite(after)
    ratio = after[usual] / before[usual]
    if len(ratio) < smallest or 0 < len(before) - len(ratio) < smallest:
        return {}
    levels = {} if smallest > 1 else {"0": 0.0, "0.5": 0.5, "1": 1.0}
    quantiles = {name: float(np.quantile(ratio, level)) for name, level in levels.items()}
    return {"mean": published_mean(ratio, smallest, 2), **quantiles}


def _worst(
    name: str, before: np.ndarray, after: np.ndarray, smallest: int, sign: int
) -> list[Pair]:
    """The most exposed example's number on both sides, if known; ``sign`` −1 where the largest is
    the worst.
    """
    known = (values[~np.isnan(values)].astype(np.float64) for values in (before, after))
    worst = [levels_of(own, smallest, levels=(0.0,), by=sign * own) for own in known]
    return [Pair(name, *(levels["0"] for levels in worst))] if all(worst) else []


def _attributes(before: SavedRun, after: SavedRun, smallest: int) -> list[Pair]:
    one, other = before.attributes, after.attributes
    if one is None or other is None:
        return []
    places = {named: at for at, named in enumerate(zip(other.names, other.units, strict=True))}
    pairs = list[Pair]()
    for place, (name, unit) in enumerate(zip(one.names, one.units, strict=True)):
        if (name, unit) in places:
            errors = np.asarray(one.shown[:, place])
            errors_after = np.asarray(other.shown[:, places[name, unit]])
            pairs += _worst(f"{name}, {unit}" if unit else name, errors, errors_after, smallest, 1)
    return pairs


def _questions(before: SavedRun, after: SavedRun, smallest: int, notes: list[str]) -> list[Pair]:
    asked, asked_after = (
        {question.name: question for question in run.questions} for run in (before, after)
    )
    for name in sorted(asked.keys() ^ asked_after.keys()):
        notes.append(f"The question “{name}” was asked in one run only.")
    both = [name for name in asked if name in asked_after]
    return [
        pair
        for name in both
        for pair in _worst(name, asked[name].rate(), asked_after[name].rate(), smallest, -1)
    ]


def _groups(
    before: SavedRun, after: SavedRun, smallest: int, notes: list[str]
) -> dict[str, list[Pair]]:
    """Each grouping that both runs have alike, beside those before it."""
    groups: dict[str, list[Pair]] = {}
    both, cells = (before.column("fil"), after.column("fil")), None
    for name in (name for name in before.groups if name in after.groups):
        labels = np.asarray(before.groups[name])
        if not np.array_equal(labels, np.asarray(after.groups[name])):
            notes.append(
                f"By {name}, {before.unit.many} have other labels in the second run: not compared."
            )
            continue
        split = split_beside(labels, smallest, cells)
        cells = joined(cells, split)
        pairs = []
        for code, label in enumerate(split.shown()):
            means = (published_mean(own[split.codes == code], smallest) for own in both)
            pairs.append(Pair(label, *means))
        groups[name] = sorted(
            pairs, key=lambda pair: -pair.before if math.isfinite(pair.before) else 0.0
        )
        if not pairs:
            notes.append(
                f"By {name}, groups are too small, or would tell of too few beside other groupings."
            )
    return groups


def in_short(comparison: Comparison) -> list[str]:
    """What a reader with one minute should know, a sentence each."""
    return lines_of("in_short.html", comparison=comparison, untold=UNTOLD)


def changes(comparison: Comparison) -> list[tuple[str, object, object]]:
    """The table of both runs: what, before, after."""
    before, after = comparison.before, comparison.after
    least = (
        f"the {comparison.smallest} smallest MSE bounds together"
        if comparison.redacted
        else "smallest MSE bound"
    )
    rows: list[tuple[str, object, object]] = [
        ("typical FIL η̄ (geometric mean)", before.fil, after.fil),
        ("median MSE bound", before.bound.get("0.5"), after.bound.get("0.5")),
        (least, before.bound.get("0"), after.bound.get("0")),
        *([] if comparison.exact else [(f"{least}, lower end", before.low_end, after.low_end)]),
        *((CLASSES[each], before.classes.get(each), after.classes.get(each)) for each in CLASSES),
        (f"{comparison.unit.many} of the run", before.examples, after.examples),
        ("of these not compared", before.alone, after.alone),
    ]
    return [row for row in rows if row[1] is not None or row[2] is not None]
