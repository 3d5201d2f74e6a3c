"""What the report says of all examples together.

The only thing that a redacted report is made from.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from torchfil.gate.policy import Policy
from torchfil.gate.rules import Verdict
from torchfil.report.groups import Grouping, summarise_groups
from torchfil.report.signature import Signature
from torchfil.run import baselines
from torchfil.run.disclosure import (
    PUBLIC_HISTORY,
    Histogram,
    histogram,
    how_many,
    levels_of,
    public_facts,
    published_count,
    published_mean,
    rounded,
    smallest_group,
    windows,
)
from torchfil.run.saved_run import AttackRecord, QuestionRecord, SavedRun, jumps_of, value_at
from torchfil.run.statistics import is_spared
from torchfil.run.unit import Facts

LEVELS = (0.0, 0.5, 0.05, 0.25, 0.95, 0.01, 0.75)  # by exposure: 0 is the most exposed
FALSE_POSITIVE_RATE = 0.01  # at which attackers on questions are compared


@dataclass(frozen=True)
class ExposureLevel:
    """A typical example at one level of exposure: geometric means over ``examples`` neighbours in
    rank.

    ``ratio`` is the root of the bound's lower end (of the bound where there is none) over a typical
    blind guess's error; None where that is not known, and in public where it is made from the data:
    beside the bound it would tell the data's deviation.
    """

    level: float
    examples: int
    fil: float
    mse_bound: float
    mse_bound_low: float | None = None
    ratio: float | None = None


@dataclass(frozen=True)
class AttributeSummary:
    """By how much an unbiased guess of an attribute is off at least, by level of exposure, and
    beside a blind guess.

    Attributes:
        name: The attribute.
        unit: Of ``error`` and ``blind``.
        error: ± in its own unit (root mean square). Empty in public where the blind guess is made
            from the data: error over ratio would tell the data's deviation.
        lower_end: Whether all of it is made from the lower ends of the errors' 95 % intervals,
            otherwise from the errors.
        ratio: The same of errors over a blind guess's; empty where that is not known.
        exposed: For how many examples the ratio is below 1 (:mod:`torchfil.run.baselines`); None
            where that is not known.
        blind: What a blind guess errs by, of the most exposed example; None where it is not known,
            and in public where it is made from the data.
        levels: Of a categorical attribute, the share of each level; always empty in public.
    """

    name: str
    unit: str
    error: dict[str, float]
    lower_end: bool
    ratio: dict[str, float] = field(default_factory=dict)
    exposed: int | str | None = None
    blind: float | None = None
    levels: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class AttackSummary:
    """An attack: achieved error over the bound, by level.

    Below 1 the attack did better than the bound.

    Examples whose bound is not finite have no ratio: they were not measured, or nothing of them
    leaked.

    Attributes:
        name: Of the attack.
        threat_model: What the attacker knows.
        targets: How many examples were attacked.
        violated: For how many the error lies below the bound beyond chance.
        ratio: Achieved error over the bound, by level.
        testable: Whether the attack could have violated a bound.
        untestable: Why not, in words.
        below: For how many the error lies below the bound, by chance or not; None: too few to tell.
        blind_below: The same of a guess without the model; None: not known.
    """

    name: str
    threat_model: str
    targets: int | str
    violated: int | str
    ratio: dict[str, float] = field(default_factory=dict)
    testable: bool = True
    untestable: str = ""
    below: int | str | None = None
    blind_below: int | str | None = None


@dataclass(frozen=True)
class QuestionSummary:
    """How well any attacker can tell the true answer: the largest true-positive rate at 1 % false
    positives, by level.

    Of every example its worst answer counts, at the upper end of its 95 % interval.
    """

    name: str
    answers: list[str]
    rate: dict[str, float]
    above: dict[str, int | str]  # how many examples have a rate above 5, 10 and 50 %


@dataclass(frozen=True)
class SparedSummary:
    """How many examples had ω < 1, and the rounds of training that chose the weights.

    Attributes:
        examples: How many.
        smallest_weight: The smallest ω; None in a redacted summary, for it is one example's.
        rounds: The columns of ``SavedRun.rounds``; of a redacted summary only how many were spared,
            rounded as all counts are: the worst bound is one example's, a mean over a group may be,
            and what a score is made from is not known.
    """

    examples: int | str
    smallest_weight: float | None
    rounds: dict[str, list[float | int | str | bool]]


@dataclass(frozen=True)
class Summary:
    """All of it. With ``smallest`` > 1 it holds nothing about fewer examples than that.

    ``lowest_end`` is the geometric mean of the ``smallest`` lowest ``mse_bound_low`` of the
    measured examples; NaN if one is not known (redacted: 0 for that one), None where the run has
    none or too few. A redacted summary gives it as the low end of the most exposed too, for their
    own would be a mean over nearly the same examples, and the two would differ by few.

    ``classes`` has how many examples are in each class of exposure, HALF, BELOW, BEYOND and UNTOLD
    of :mod:`torchfil.run.baselines`; UNTOLD alone where no blind guess is known. ``exposed`` is the
    first two together. ``blind`` is a typical blind guess's error, and ``knows`` what it answers;
    in public both are None where they are made from the data, and so are the ratios to it.
    """

    redacted: bool
    smallest: int
    about: Facts
    examples: int
    not_measured: int | str
    lower_bounds: int | str
    blind: float | None
    knows: str | None
    classes: dict[int, int | str]
    exposed: int | str | None
    exposure: list[ExposureLevel]
    lowest_end: float | None
    bounds: Facts
    mse_histogram: Histogram | None
    ratio_histogram: Histogram | None
    epsilon: dict[str, float]
    attributes: list[AttributeSummary]
    groupings: list[Grouping]
    attacks: list[AttackSummary]
    questions: list[QuestionSummary]
    history: dict[str, list[float]]
    spared: SparedSummary | None = None

    @property
    def tracked(self) -> list[AttributeSummary]:
        """The attributes of which something may be told."""
        return [attribute for attribute in self.attributes if attribute.error or attribute.ratio]

    @property
    def closest(self) -> AttributeSummary | None:
        """The attribute that can be estimated most closely beside a blind guess.

        Categories have no ±.
        """
        known = [
            attribute
            for attribute in self.tracked
            if "0" in attribute.ratio and not attribute.levels
        ]
        return min(known, key=lambda attribute: attribute.ratio["0"], default=None)

    @property
    def ranked(self) -> list[AttributeSummary]:
        """The same, the most exposed first.

        Empty where neither ratios nor errors in one unit compare them.
        """
        if all(a.ratio for a in self.tracked):
            return sorted(self.tracked, key=lambda a: min(a.ratio.values()))
        alike = len({a.unit for a in self.tracked}) == 1 and all(a.error for a in self.tracked)
        return sorted(self.tracked, key=lambda a: min(a.error.values())) if alike else []


def summarise(
    run: SavedRun, *, redacted: bool = False, min_group: int = 10, policy: Policy | None = None
) -> Summary:
    """The summary of a run.

    With ``redacted``, nothing in it rests on fewer than ``min_group`` examples.

    A redacted summary also drops the hash of the data and the probes' seed: who knows all other
    examples could try values of the last until the hash fits, and repeat every probe. What
    ``policy`` states of a blind guess counts.
    """
    smallest = smallest_group(redacted, min_group)
    status = baselines.status_of(run)
    measured = status != baselines.NOT_MEASURED
    fil, bound = (run.column(name)[measured] for name in ("fil", "mse_bound"))
    low = run.column("mse_bound_low")[measured] if "mse_bound_low" in run.columns else None
    stated = None if policy is None else policy.blind_error
    ratios = baselines.error_ratios(run, stated)

    # what the data's own spread says of a blind guess is private; beside it stand counts alone
    spread = run.baselines if stated is None else None
    blind = None if redacted and spread is not None else baselines.typical_blind_error(run, stated)
    lowest_end = _lowest_end(low, smallest)
    classes = exposed = None
    if ratios is not None:
        classes = baselines.classes_of_ratios(ratios)
        exposed = how_many(ratios < 1, smallest)

    # eight bins an octave: ½ and 1 are edges, and belong to the class above them; never in public:
    # beside the bounds' histogram, which counts nearly the same on another grid, it would tell of
    # few
    by_ratio = None
    if ratios is not None and not redacted:
        told = ratios[~np.isnan(ratios)] * (1 + 1e-6)
        by_ratio = histogram(told, 1, fineness=8 / math.log10(2), origin=1.0)
    return Summary(
        redacted=redacted,
        smallest=smallest,
        about=public_facts(run.about) if redacted else run.about,
        examples=len(run.ids),
        not_measured=how_many(~measured, smallest),
        lower_bounds=how_many(status == baselines.LOWER_BOUND, smallest),
        blind=blind,
        knows=None if blind is None or spread is None else spread.knows,
        classes=class_counts(run, classes, smallest),
        exposed=exposed,
        exposure=_exposure(fil, bound, low, lowest_end, blind, smallest),
        lowest_end=lowest_end,
        bounds={name: run.bounds[name] for name in ("rdp_mse_bound", "rero") if name in run.bounds},
        mse_histogram=histogram(
            bound, smallest, fineness=8 if redacted else 12, origin=blind and blind**2
        ),
        ratio_histogram=by_ratio,
        epsilon=_epsilon(run, smallest),
        attributes=_attributes(run, smallest, policy),
        groupings=summarise_groups(run, measured, smallest),
        attacks=[_attack(attack, smallest) for attack in run.attacks],
        questions=[_question(question, measured, smallest) for question in run.questions],
        history=_history(run.history, redacted),
        spared=_spared(run, smallest),
    )


def _epsilon(run: SavedRun, smallest: int) -> dict[str, float]:
    """Individual ε by level; rounding does not lift an example's own above ε for everybody."""
    own = np.asarray(run.columns.get("epsilon", np.zeros(0)), dtype=np.float64)
    own = own[np.isfinite(own)]
    limit: float | None = run.about.get("epsilon")
    if limit is not None and not own.max(initial=0.0) <= limit * (1 + 1e-9):
        limit = None
    levels = levels_of(own, smallest, by=-own)
    return (
        levels if limit is None else {level: min(value, limit) for level, value in levels.items()}
    )


def _exposure(
    fil: np.ndarray,
    bound: np.ndarray,
    low: np.ndarray | None,
    lowest: float | None,
    blind: float | None,
    smallest: int,
) -> list[ExposureLevel]:
    """The levels, the most exposed first, whose low end in public is the lowest of all."""
    order, rows = np.argsort(-fil, kind="stable"), list[ExposureLevel]()
    for level, window in windows(len(fil), LEVELS, smallest).items():
        columns = [(fil, 1), (bound, 2), *([] if low is None else [(low, 2)])]
        means = [
            published_mean(values[order[window]], smallest, power) for values, power in columns
        ]
        row = ExposureLevel(level, len(order[window]), *means)
        if smallest > 1 and not rows:
            row = replace(row, mse_bound_low=lowest)
        if blind is not None:
            error = math.sqrt(row.mse_bound if row.mse_bound_low is None else row.mse_bound_low)
            ratio = float(baselines.ratio_to_blind_guess(error, blind))
            row = replace(row, ratio=rounded(ratio, smallest))
        rows.append(row)
    return rows


def class_counts(run: SavedRun, classes: np.ndarray | None, smallest: int) -> dict[int, int | str]:
    """How many examples are in each class of exposure, [n].

    Where these are None, how many are untold.
    """
    if classes is None:
        return {baselines.UNTOLD: how_many(~baselines.is_told(run), smallest)}
    return {each: how_many(classes == each, smallest) for each in baselines.CLASSES}


def _lowest_end(low: np.ndarray | None, smallest: int) -> float | None:
    if low is None:
        return None
    if smallest > 1:  # in public, one example without a lower end must not show as such
        low = np.where(np.isnan(low), 0.0, low)
    if np.isnan(low).any():
        return math.nan
    return levels_of(low, smallest, levels=(0.0,), power=2).get("0")


def _question(question: QuestionRecord, measured: np.ndarray, smallest: int) -> QuestionSummary:
    rates = question.rate(FALSE_POSITIVE_RATE)[measured]
    above = {f"{level:g}": how_many(rates > level, smallest) for level in (0.05, 0.1, 0.5)}
    levels = levels_of(rates, smallest, by=-rates)
    return QuestionSummary(question.name, question.answers, levels, above)


def _history(history: dict[str, np.ndarray], redacted: bool) -> dict[str, list[float]]:
    """Series over steps."""
    kept = PUBLIC_HISTORY if redacted else tuple(history)
    series = {
        name: np.asarray(history[name], dtype=np.float64).tolist()
        for name in kept
        if name in history
    }
    return series if len(series) > 1 else {}


def _attributes(run: SavedRun, smallest: int, policy: Policy | None) -> list[AttributeSummary]:
    """One summary an attribute, in their order, over the told examples.

    None where they were not tracked.
    """
    if run.attributes is None:
        return []

    # where the blind guess is made from the data, an error beside its ratio would tell the data's
    # deviation
    stated = (None, None) if policy is None else (policy.attribute_spread, policy.blind_error)
    blind, spread = baselines.blind_errors(run, *stated), run.baselines
    told, public = baselines.is_told(run), smallest > 1
    codes = baselines.public_classes(run, len(blind))
    summaries = []
    for j, (name, unit) in enumerate(zip(run.attributes.names, run.attributes.units, strict=True)):
        errors = np.asarray(run.attributes.shown[:, j], dtype=np.float64)
        from_data = spread is not None and bool(np.isfinite(spread.attribute_errors[:, j]).all())
        ratios = baselines.attribute_ratios(run, j, blind)

        # an error, its ratio and the blind guess beside them are the same example's
        rank = errors if np.isnan(ratios).all() else ratios
        known = told & ~np.isnan(rank)
        rank, guess = rank[known], blind[codes[known], j]
        errors = np.nan_to_num(errors[known], posinf=math.inf)
        own = float(guess[rank.argmin()]) if len(rank) else math.nan
        ratios = ratios[~np.isnan(ratios)]
        summaries.append(
            AttributeSummary(
                name,
                unit,
                error={} if public and from_data else levels_of(errors, smallest, by=rank),
                lower_end=run.attributes.error_low is not None,
                ratio=levels_of(np.minimum(ratios, 1.0) if public else ratios, smallest),
                exposed=how_many(ratios < 1, smallest) if len(ratios) >= smallest else None,
                blind=None if math.isnan(own) or (public and from_data) else own,
                levels={} if public or spread is None else spread.levels.get(name, {}),
            )
        )
    return summaries


def _attack(attack: AttackRecord, smallest: int) -> AttackSummary:
    """One attack, of which nothing rests on fewer than ``smallest`` examples."""
    predicted, few = np.asarray(attack.predicted, dtype=np.float64), len(attack.rows) < smallest
    bounded = np.isfinite(predicted)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.asarray(attack.achieved, dtype=np.float64)[bounded] / predicted[bounded]

    def below(errors: np.ndarray | None) -> int | str | None:
        if few or errors is None:
            return None
        return how_many((errors < predicted)[bounded], smallest)

    return AttackSummary(
        attack.name,
        attack.threat_model,
        published_count(len(attack.rows), smallest),
        how_many(attack.violated, smallest),
        {} if few else levels_of(ratio[~np.isnan(ratio)], smallest, levels=(0.0, 0.5)),
        attack.testable,
        attack.untestable or ("" if attack.testable else "one trial"),
        below(attack.achieved),
        below(attack.blind),
    )


def _spared(run: SavedRun, smallest: int) -> SparedSummary | None:
    """None where no weights were given."""
    if "clip_weight" not in run.columns and not run.rounds:
        return None
    public = smallest > 1
    kept = [name for name in run.rounds if not public or name in ("num_spared", "fresh")]
    rounds = {name: run.rounds[name].tolist() for name in kept}
    if "num_spared" in rounds:
        rounds["num_spared"] = [
            published_count(int(count), smallest) for count in rounds["num_spared"]
        ]
    return SparedSummary(
        how_many(is_spared(run), smallest),
        None if public else float(np.min(run.clip_weights, initial=1.0)),
        rounds,
    )


# ---------------------------------------------------------------------- the material of a page

# A training run, the mean over several (``about["merged"]``), or a linear model's release
# (``about["kind"]``): what is random, and how certain the numbers are, differs. All blocks of the
# page take these words from here.


@dataclass(frozen=True)
class Report:
    """The material of a page.

    Attributes:
        summary: Aggregates.
        run: The run; None where the page is redacted, so that nothing can show an example.
        files: The names of the files beside the page and what they hold.
        digests: SHA-256 of files beside the page, by name.
        verdicts: What the rules of a policy found; None where no policy was given.
        policy: The policy.
        signature: Who signed the run; None: nobody.
    """

    summary: Summary
    run: SavedRun | None = None
    files: dict[str, str] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)
    verdicts: list[Verdict] | None = None
    policy: Policy | None = None
    signature: Signature | None = None

    def about(self, *path: str) -> Any:
        """A value of ``summary.about`` by its path; None where it is not there."""
        return value_at(self.summary.about, ".".join(path))

    @property
    def is_linear(self) -> bool:
        """Whether the page is about a linear model's release."""
        return bool(self.about("kind") == "linear")

    @property
    def jumps(self) -> str:
        """What of the model is not smooth, in words; "": nothing is."""
        return jumps_of(self.summary.about)

    @property
    def runs(self) -> int:
        """Over how many runs the numbers are means; 1: one run."""
        count = self.about("merged", "runs")
        return count if isinstance(count, int) and count > 1 else 1

    @property
    def origin(self) -> str:
        """Where a number comes from, after "that is"."""
        if self.is_linear:
            return "computed in closed form, without error"
        return (
            "an estimate from one run"
            if self.runs == 1
            else f"an estimate from {self.runs} runs together"
        )


def named_level(level: float, summary: Summary) -> str:
    """A level of exposure in words: "5 % are more exposed", or in public "the 10 most exposed
    together".
    """
    if level == 0:
        return (
            f"the {summary.smallest} most exposed together"
            if summary.redacted
            else "the most exposed"
        )
    return "half are more exposed" if level == 0.5 else f"{100 * level:g} % are more exposed"
