"""A finished run: what a report, a gate or another program reads, without the model and the
data.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from decimal import ROUND_FLOOR, Context
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, Union

import numpy as np
import torch
from scipy.special import ndtr, ndtri
from torch import Tensor

from torchfil.guessing import largest_success, largest_true_positive_rate
from torchfil.run.unit import Facts, Unit, unit_of
from torchfil.utils.errors import RunFileError, installed_by
from torchfil.utils.tables import ArrowTable, Columns, as_texts
from torchfil.utils.text import html_table, visible

if TYPE_CHECKING:
    from torchfil.run.stored import StoredArray

MEASURED, LOWER_BOUND, NOT_MEASURED = 0, 1, 2
_STATUS = np.array(["measured", "lower bound", "not measured"])
# columns
BLANK_WHERE_UNKNOWN = ("fil", "fil_error", "sampling_error", "mse_bound", "mse_bound_low")
# an array with an entry for every example, or one on the disk
ByExample = Union[np.ndarray, "StoredArray"]


@dataclass(frozen=True, eq=False)
class Attributes:
    """How well single attributes could be inferred.

    Attributes:
        names: k names.
        units: k units, "" where there is none.
        error: 1/sqrt(I_jj) in the attribute's own unit, [n, k]: an unbiased guess is off by at
            least this, on average. An estimate from one run; infinite where nothing leaked.
        error_low: The lower end of its 95 % interval, [n, k], or None where it is not known.
    """

    names: list[str]
    units: list[str]
    error: ByExample
    error_low: ByExample | None = None

    def __post_init__(self) -> None:
        if not all(isinstance(text, str) for text in (*self.names, *self.units)):
            raise ValueError("names and units of attributes must be texts")
        for name, count in Counter(self.names).most_common(1):
            if count != 1:
                raise ValueError(
                    f"attribute {name!r} is named {count} times; names must differ, such as "
                    f"'{name} = …' for each level of a one-hot attribute"
                )

    @property
    def shown(self) -> ByExample:
        """What is shown, [n, k]: the lower end.

        The error itself, an estimate, where that end is not known.
        """
        return self.error if self.error_low is None else self.error_low


@dataclass(frozen=True, eq=False)
class Spread:
    """How values are spread over examples: mean, standard deviation and range, of one thing or [k]
    each.

    NaN where it is not known. Of a categorical attribute ``std`` alone is: the root mean squared
    error, over levels, of answering every level's share.
    """

    mean: np.ndarray
    std: np.ndarray
    low: np.ndarray
    high: np.ndarray


@dataclass(frozen=True, eq=False)
class Baselines:
    """How the data is spread, for somebody who guesses without the model.

    Private: never part of a public page.

    A blind guess answers the best that is public: ``knows`` says what. Examples with the same
    public label are a class; the column ``public_class`` has the place of each example's.

    Attributes:
        attributes: Of each attribute, [k], in its own unit; [0] where attributes were not tracked.
        levels: By categorical attribute, the share of each level.
        knows: What the blind guess answers, after "a blind guess answers".
        errors: What it is off by (root mean square over inputs), by class, [c].
        attribute_errors: The same of each attribute, in its own unit, [c, k] or, the same in all
            classes, [1, k].
    """

    attributes: Spread
    levels: dict[str, dict[str, float]]
    knows: str
    errors: np.ndarray
    attribute_errors: np.ndarray


@dataclass(frozen=True, eq=False)
class QuestionRecord:
    """How well any attacker could tell the true answer of a question from others.

    Attributes:
        name: Of the question.
        answers: m names.
        complete: Whether the answers are all that are possible, the true one among them (with D =
            0).
        divergence: D = KL(P ‖ P′), [n, m].
        divergence_high: The upper end of its 95 % interval, [n, m].
        law: "normal" where P and P′ are normal laws of one covariance, as in a linear model's
            release, so that D tells what the best attacker attains; "any": D bounds it.
        membership: Whether it asks if the example is in the data at all.
    """

    name: str
    answers: list[str]
    complete: bool
    divergence: ByExample
    divergence_high: ByExample
    law: str = "any"
    membership: bool = False

    def rate(self, false_positive_rate: float = 0.01) -> np.ndarray:
        """The largest true-positive rate of any attacker, over all answers, at the upper ends, [n].

        Φ(Φ⁻¹(FPR) + sqrt(2D)) between normal laws; NaN where D is not known.
        """
        at, most = false_positive_rate, largest_true_positive_rate
        return self._attained(lambda d: ndtr(ndtri(at) + np.sqrt(2 * d)), lambda d: most(d, at))

    def success(self) -> np.ndarray:
        """How often any attacker tells the true answer from the worst other one, equally likely, at
        most, [n].

        Φ(sqrt(D/2)) between normal laws; NaN where D is not known.
        """
        return self._attained(lambda d: ndtr(np.sqrt(d / 2)), lambda d: largest_success(d, 0.5))

    def _attained(
        self, normal: Callable[[np.ndarray], np.ndarray], bound: Callable[[Tensor], Tensor]
    ) -> np.ndarray:
        worst = np.asarray(self.divergence_high, dtype=np.float64).max(axis=1)
        found, known = np.full(len(worst), np.nan), ~np.isnan(worst)
        at = worst[known]
        found[known] = normal(at) if self.law == "normal" else bound(torch.from_numpy(at)).numpy()
        return found


@dataclass(frozen=True, eq=False)
class Records:
    """The attributes of some examples, as they stand in the data.

    Private: never part of a public page.

    With beliefs aside, 95 % of an unbiased attacker's estimates at the bound lie within value ±
    1.96 · error (:attr:`Attributes.error`).

    Attributes:
        rows: Places in ``ids``, [m], the most exposed first, then some next to the median of η̄.
        values: In the attributes' own units, float64 [m, k]; NaN for categories.
    """

    rows: np.ndarray
    values: np.ndarray


@dataclass(frozen=True, eq=False)
class Texts:
    """Some examples as words or tokens, with how much of each leaks.

    Attributes:
        rows: Places in ``ids``, [m].
        words: m lists of words.
        fil: η_t = sqrt(Σ_j I_jj / w) over the w coordinates of word t, [m, T]; NaN behind a text's
            end.
        plis: ‖∂PL/∂z_t‖ over the same coordinates, at the weights when it was saved, [m, T]; None:
            not known.
    """

    rows: np.ndarray
    words: list[list[str]]
    fil: np.ndarray
    plis: np.ndarray | None = None


@dataclass(frozen=True, eq=False)
class AttackRecord:
    """What an attack achieved beside what the bound allows; made by ``BoundComparison.record``.

    Attributes:
        name: Of the attack.
        threat_model: What the attacker knows, in a sentence.
        rows: The attacked examples' places in ``ids``, [m].
        predicted: The bound, [m].
        achieved: The attack's error in the same unit, [m].
        violated: Whether ``achieved`` lies below the bound beyond chance, [m] booleans.
        testable: Whether the attack saw the model, in more than one trial, so that it could have
            violated a bound.
        untestable: Why not, in words; "" where it could.
        blind: The error of a guess without the model, [m], or None where it is not known.
    """

    name: str
    threat_model: str
    rows: np.ndarray
    predicted: np.ndarray
    achieved: np.ndarray
    violated: np.ndarray
    testable: bool = True
    untestable: str = ""
    blind: np.ndarray | None = None


def checked_metrics(metrics: Mapping[str, object] | None) -> dict[str, Facts]:
    """What a model is good for, as ``SavedRun.about["metrics"]`` keeps it.

    Args:
        metrics: By name a finite number, or a pair of it and a text, what it was measured on.

    Example:
        >>> checked_metrics({"accuracy": (0.93, "on 360 held out")})
        {'accuracy': {'value': 0.93, 'on': '360 held out'}}
    """
    if not isinstance(metrics, Mapping | None):
        raise ValueError(f"metrics={metrics!r} must be a dict, e.g. {{'accuracy': 0.93}}")
    kept = {}
    for name, given in (metrics or {}).items():
        value, on = given if isinstance(given, tuple) and len(given) == 2 else (given, "")
        number = float(value) if hasattr(value, "__float__") else math.nan
        if not (isinstance(name, str) and isinstance(on, str) and math.isfinite(number)):
            raise ValueError(
                f"metrics={{{name!r}: {given!r}}} must be a finite number, or (number, what it "
                "was measured on)"
            )
        kept[name] = {"value": number, "on": on.removeprefix("on ")}
    return kept


@dataclass(frozen=True, eq=False)
class SavedRun(ArrowTable):
    """A finished run, as arrays and plain values. Confidential: it depends on private data.

    For pandas, Polars, DuckDB and other readers of Arrow it is a table with one row per example,
    the columns of a report's leakage.csv: :meth:`to_pandas`, :meth:`to_polars`, :meth:`to_arrow`,
    ``__arrow_c_stream__``.

    Attributes:
        about: JSON values: title, model (with not_smooth: the layers or calls whose derivative
            jumps), dataset, mechanism, epsilon, delta, accountant, versions, probe_seed, created,
            exact; kind "linear" and linear for a linear model's release
            (:mod:`torchfil.run.linear_run`); merged for the mean over several runs; metrics, by
            name {value, on}: what the model is good for, and on what; noise_choice where pilots
            chose σ, equalised where torchfil.equalise chose the clip weights; audit, what canaries
            showed beside the claimed ε (``engine.audit(delta=…).as_dict()``), None without
            canaries.
        ids: The examples' names, [n], int64 or strings (of Python's, dtype object, where they come
            from a file).
        columns: By name, [n] each: fil, fil_error, sampling_error, mse_bound, mse_bound_low,
            participations, missed (those that were not measured), paused (those in paused steps)
            where there are any, squared_norm, epsilon (individual) where it was computed,
            clip_weight where weights were given, and fil_before, the FIL of a run without them
            (NaN: not measured), where it was saved; num_rows, how many rows each person has, where
            the unit is the person.
        attributes: Per-attribute errors, where they were tracked.
        groups: By grouping, [n] labels (strings) each.
        records: The attributes of the most exposed examples, and of typical ones, as they stand in
            the data.
        texts: The most exposed examples as words.
        history: Over training time: step [t], fil_median, fil_q95, fil_max [t]; may be empty.
        bounds: JSON values: rdp_mse_bound, rero; may be empty.
        attacks: Results of attacks; may be empty.
        questions: What any attacker could tell; may be empty.
        rounds: What torchfil.equalise did, by name, [r] numbers each: worst, worst_end, spread,
            num_below, num_spared, smallest_weight, score, epsilon, seconds, fresh (NaN: not known);
            may be empty.
        baselines: How the data is spread; None where the data could not be read again.
    """

    about: Facts
    ids: ByExample
    columns: Mapping[str, np.ndarray]
    attributes: Attributes | None = None
    groups: Mapping[str, np.ndarray] = field(default_factory=dict)
    history: dict[str, np.ndarray] = field(default_factory=dict)
    bounds: Facts = field(default_factory=dict)
    attacks: list[AttackRecord] = field(default_factory=list)
    questions: list[QuestionRecord] = field(default_factory=list)
    texts: Texts | None = None
    rounds: dict[str, np.ndarray] = field(default_factory=dict)
    baselines: Baselines | None = None
    records: Records | None = None

    def __post_init__(self) -> None:
        if not (isinstance(self.about, dict) and isinstance(self.bounds, dict)):
            raise ValueError("about and bounds must be dicts")
        _check_kinds(self.about)
        if not (self.ids.ndim == 1 and self.ids.dtype.kind in "iUO"):
            raise ValueError(
                f"ids must be [n] integers or strings, got {self.ids.dtype} {list(self.ids.shape)}"
            )
        text = [
            name
            for name, values in _unread(self.columns).items()
            if values.dtype.kind not in "biuf"
        ]
        if text:
            raise ValueError(f"columns {text} hold no numbers; put labels into groups")
        for what, found, expected in self._shapes():
            if found != expected:
                raise ValueError(f"{what} has shape {list(found)}, and not {list(expected)}")
        for what, part in self._of_some():
            first, last = int(part.rows.min(initial=0)), int(part.rows.max(initial=0))
            inside = not len(part.rows) or 0 <= first <= last < len(self)
            if not inside:
                raise ValueError(
                    f"{what}: rows must lie in 0 … {len(self) - 1}, got {first} … {last}"
                )
        if self.baselines is not None:
            strange = self.baselines.levels.keys() - set(
                self.attributes.names if self.attributes is not None else ()
            )
            if strange:
                raise ValueError(f"baselines: levels of {sorted(strange)}, which are no attributes")
            classes, count = self.columns.get("public_class"), len(self.baselines.errors)
            inside = (
                count == 1
                if classes is None
                else not len(self) or 0 <= classes.min() <= classes.max() < count
            )
            if not inside:
                raise ValueError(
                    f"baselines have {count} public classes, which are not those of public_class"
                )
        self._check_values()

    def _shapes(self) -> Iterator[tuple[str, tuple[int, ...], tuple[int, ...]]]:
        """What has a shape, the shape that it has, and the one that fits the rest of the run."""
        n, k = len(self), 0 if self.attributes is None else len(self.attributes.names)
        for kind, columns in (("column", self.columns), ("grouping", self.groups)):
            yield from (
                (f"{kind} {name!r}", values.shape, (n,))
                for name, values in _unread(columns).items()
            )
        if self.attributes is not None:
            yield "attributes: units", (len(self.attributes.units),), (k,)
            for name, values in _arrays_of(self.attributes).items():
                yield f"attributes: {name}", values.shape, (n, k)
        for question in self.questions:
            for values in _arrays_of(question).values():
                yield f"question {question.name!r}", values.shape, (n, len(question.answers))

        # a record has all attributes; a blind guess errs by public class
        if self.records is not None:
            yield "records: values", self.records.values.shape, (len(self.records.rows), k)
        if self.baselines is not None:
            yield from (
                ("baselines", np.shape(values), (k,))
                for values in vars(self.baselines.attributes).values()
            )
            by_class, classes = self.baselines.attribute_errors, len(self.baselines.errors)
            yield (
                "baselines: attribute_errors",
                by_class.shape,
                (classes if len(by_class) > 1 else 1, k),
            )
        for name, series in (("history", self.history), ("rounds", self.rounds)):
            length = max((values.size for values in series.values()), default=0)
            yield from (
                (f"{name}: {column!r}", values.shape, (length,))
                for column, values in series.items()
            )
        for what, part in self._of_some():
            for values in _arrays_of(part).values():
                yield what, (len(values),), (len(part.rows),)

    def _of_some(self) -> Iterator[tuple[str, Any]]:
        """What has entries for some examples, by their rows: its name, and the record."""
        if self.records is not None:
            yield "records", self.records
        if self.texts is not None:
            yield "texts", self.texts
        for attack in self.attacks:
            yield f"attack {attack.name!r}", attack

    def _check_values(self) -> None:
        """No number that no run has: a rule must not hold because a value is absurd."""
        for name in (name for name in _COLUMNS if name in self.columns):
            values = self.columns[name]
            wrong = np.flatnonzero(~(values >= 0) if name in _KNOWN_COLUMNS else values < 0)
            if len(wrong):
                row = int(wrong[0])
                raise ValueError(f"column {name!r} is {values[row]} in row {row}, which cannot be")

    def __len__(self) -> int:
        return len(self.ids)

    def take(self, rows: np.ndarray | slice) -> SavedRun:
        """Some of the examples, in memory, as if the run had no others.

        Records and texts are left out.

        Args:
            rows: Their places, ascending, or a slice.
        """
        places = np.arange(len(self))[rows]
        attacks = []
        for attack in self.attacks:
            inside = np.isin(attack.rows, places)
            kept = _rows_of(attack, inside)
            attacks.append(replace(kept, rows=np.searchsorted(places, attack.rows[inside])))
        return replace(
            self,
            ids=np.asarray(self.ids[rows]),
            columns={name: values[rows] for name, values in _unread(self.columns).items()},
            attributes=self.attributes and _rows_of(self.attributes, rows),
            groups={name: values[rows] for name, values in _unread(self.groups).items()},
            records=None,
            texts=None,
            attacks=attacks,
            questions=[_rows_of(question, rows) for question in self.questions],
        )

    def slices(self, size: int) -> Iterator[SavedRun]:
        """The run in parts of so many examples, one after the other.

        One part where there is none.
        """
        for start in range(0, max(len(self), 1), size):
            yield self.take(slice(start, start + size))

    def coded_group(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """A grouping's different labels, sorted, and the place of each example's among them,
        [n].
        """
        from torchfil.run.stored import coded  # needs pyarrow

        return coded(_unread(self.groups)[name])

    def column(self, name: str) -> np.ndarray:
        """A column in double precision, [n].

        Raises:
            RunFileError: The run was saved without it.
        """
        if name not in self.columns:
            raise RunFileError(
                f"the run has no column {name!r}; it has {', '.join(self.columns) or 'none'}"
            )
        return np.asarray(self.columns[name], dtype=np.float64)

    @property
    def lower_ends(self) -> np.ndarray:
        """The lower ends of the MSE bounds, [n]; the bounds themselves where no ends were saved."""
        return self.column("mse_bound_low" if "mse_bound_low" in self.columns else "mse_bound")

    def to_arrow(self) -> Any:
        """The table as a ``pyarrow.Table``: :func:`leakage_columns`."""
        return Columns(leakage_columns(self)).to_arrow()

    def to_pandas(self) -> Any:
        """The table as a pandas DataFrame by id, as ``engine.leakage()``."""
        with installed_by("report", "to_pandas needs pandas"):
            return self.to_arrow().to_pandas().set_index("id")

    def __repr__(self) -> str:
        return "\n".join(["SavedRun", *(f"  {title}: {text}" for title, text in self._lines())])

    def _repr_html_(self) -> str:
        return html_table("SavedRun (confidential)", self._lines())

    def _lines(self) -> list[tuple[str, str]]:
        """The run in short, as (name, text)."""
        about, lines = self.about, [("title", visible(str(self.about.get("title", ""))))]
        if about.get("epsilon") is not None:
            lines.append(
                (
                    "ε",
                    f"{about['epsilon']:.3g} at δ = {about.get('delta')} (a guarantee for "
                    "everybody)",
                )
            )
        if "fil" in self.columns:
            fil = self.column("fil")[status_of(self) != NOT_MEASURED]
            lines.append((f"{self.unit.many} measured", f"{len(fil):,} of {len(self):,}"))
            if len(fil):
                bounds = "unbiased attackers, on average over runs"
                lines.append(
                    ("FIL η̄", f"median {np.median(fil):.3g}, largest {fil.max():.3g} ({bounds})")
                )
        names = ("attributes", "groups", "questions", "attacks", "records", "texts", "baselines")
        kept = [name for name in names if getattr(self, name)]
        return [
            *lines,
            ("columns", ", ".join(self.columns)),
            ("also has", ", ".join(kept) or "nothing else"),
        ]

    @property
    def unit(self) -> Unit:
        """What bounds, ε and ids are about, by the mechanism's unit and unit_names."""
        return unit_of(self.about.get("mechanism") or {})

    @property
    def clip_weights(self) -> np.ndarray:
        """ω that each example's clipped gradient was multiplied by, [n]; 1 where none were
        given.
        """
        return self.columns.get("clip_weight", np.ones(len(self)))


# entries by example, or by row
_ARRAYS: dict[type, tuple[str, ...]] = {
    Attributes: ("error", "error_low"),
    QuestionRecord: ("divergence", "divergence_high"),
    AttackRecord: ("predicted", "achieved", "violated", "blind"),
    Records: ("values",),
    Texts: ("words", "fil", "plis"),
}


def _arrays_of(record: object) -> dict[str, Any]:
    """What a record has an entry of for each example, or for each of its rows."""
    arrays = {name: getattr(record, name) for name in _ARRAYS[type(record)]}
    return {name: values for name, values in arrays.items() if values is not None}


def _rows_of(record: Any, rows: np.ndarray | slice) -> Any:
    """The record of some of them."""
    return replace(record, **{name: values[rows] for name, values in _arrays_of(record).items()})


def status_of(run: SavedRun) -> np.ndarray:
    """MEASURED, LOWER_BOUND (some participations were in paused steps) or NOT_MEASURED, uint8 [n].

    Of an example that no batch drew, whose every step was skipped, or of which too little was
    measured to tell, η̄ is NaN: one run says nothing of it.
    """
    columns = run.columns
    fil = run.column("fil")
    unknown = np.isnan(fil)
    missed = np.asarray(columns.get("missed", np.zeros(len(fil))))
    if "participations" in columns:
        unknown |= np.asarray(columns["participations"]) - missed <= 0
    paused = np.asarray(columns.get("paused", np.zeros(len(fil))))
    return np.where(unknown, NOT_MEASURED, np.where(paused > 0, LOWER_BOUND, MEASURED)).astype(
        np.uint8
    )


def leakage_columns(run: SavedRun) -> dict[str, np.ndarray]:
    """The columns of a run's table, and of a report's leakage.csv, [n] each.

    They are id, status, the run's columns, groups, and "least error of" every attribute: the lower
    end of the error's interval, or the error itself where the end is not known. What was not
    measured is NaN (an empty cell), not zero.
    """
    status = status_of(run)
    unknown = status == NOT_MEASURED
    table: dict[str, np.ndarray] = {"id": np.asarray(run.ids), "status": _STATUS[status]}
    for name, values in run.columns.items():
        blank = name in BLANK_WHERE_UNKNOWN
        table[name] = np.where(unknown, np.nan, values.astype(np.float64)) if blank else values
    table |= {f"group {name}": as_texts(labels) for name, labels in run.groups.items()}
    if run.attributes is not None:
        for j, name in enumerate(run.attributes.names):
            errors = np.asarray(run.attributes.shown[:, j], dtype=np.float64)
            table[f"least error of {name}"] = np.where(unknown, np.nan, errors)
    return table


def _unread(columns: Mapping[str, np.ndarray]) -> Mapping[str, ByExample]:
    """Columns by name with their shapes and types, of which those of a large file are not read
    yet.
    """
    return getattr(columns, "data", columns)


# of every example; NaN would count as none
_KNOWN_COLUMNS = ("participations", "missed", "paused", "clip_weight", "num_rows")
_COLUMNS = (
    *(
        "fil",
        "fil_error",
        "sampling_error",
        "mse_bound",
        "mse_bound_low",
        "squared_norm",
        "epsilon",
        "fil_before",
    ),
    *_KNOWN_COLUMNS,
)
_REFUTED = 0.001  # an audit refutes the claimed ε where its p-value is smaller


@cache
def _about_type() -> type:
    """Of what kind the entries of ``about`` are that others read; any may be missing or None."""
    from msgspec import Meta, defstruct

    number, share = Annotated[float, Meta(ge=0)], Annotated[float, Meta(ge=0, le=1)]  # not NaN
    pair = tuple[float, float]

    def part(**kinds: Any) -> Any:
        return defstruct("_Part", [(name, kind | None, None) for name, kind in kinds.items()])

    rate = defstruct("_Rate", [("fpr", share), ("tpr", share), ("bound", share | None)])
    audit = {
        **dict.fromkeys(("epsilon", "claimed", "ceiling", "num_canaries"), number),
        **dict.fromkeys(("delta", "confidence", "p_value"), share),
        "kind": str,
        "exceeds_claim": bool,
        "by_method": dict[str, number],  # type: ignore[valid-type]
        "rates": list[rate],  # type: ignore[valid-type]
    }
    mechanism = """noise_multiplier sigma l2 releases max_grad_norm steps num_probes rel_error
        expected_batch_size"""
    return part(
        kind=str,
        title=str,
        accountant=str,
        created=str,
        exact=bool,
        epsilon=number,
        delta=share,
        versions=dict,
        metrics=dict,
        model=part(num_parameters=number, not_smooth=list[str]),
        dataset=part(input_range=pair),
        mechanism=part(
            sample_rate=share,
            fil_rate=share,
            probe_precision=str,
            noise_multiplier_default=bool,
            **dict.fromkeys(mechanism.split(), number),
        ),
        noise_choice=part(target=str, confidence=share, num_pilots=number, headroom=number),
        equalised=part(
            question=str, stopped=str, met=bool, target=number, epsilon_of_all_rounds=number
        ),
        linear=part(score_by_noise=list[pair]),
        merged=part(runs=number, epsilon_of_all=number),
        audit=defstruct("_Audit", list(audit.items())),
    )


def value_at(values: object, path: str) -> Any:
    """A value in nested dicts by its path; None where it is not there.

    Example:
        >>> (
        ...     value_at({"mechanism": {"sigma": 2.0}}, "mechanism.sigma"),
        ...     value_at({"mechanism": None}, "mechanism.sigma"),
        ... )
        (2.0, None)
    """
    for key in path.split("."):
        values = values.get(key) if isinstance(values, Mapping) else None
    return values


def audited_epsilon(audit: Facts) -> float:
    """The audited ε as readers see it: a lower bound, so rounded down to two digits, or to three
    above the claim.

    Example:
        >>> (
        ...     audited_epsilon({"epsilon": 1.199, "claimed": 2.5}),
        ...     audited_epsilon({"epsilon": 2.559, "claimed": 2.5}),
        ... )
        (1.1, 2.55)
    """
    digits = Context(2 + (audit["epsilon"] > audit["claimed"]), ROUND_FLOOR)
    return float(digits.create_decimal(f"{audit['epsilon']}"))


def jumps_of(about: Facts) -> str:
    """What of a run's model is not smooth, in words; "": nothing is.

    Example:
        >>> (
        ...     jumps_of({"model": {"not_smooth": ["layer 1 (ReLU)"]}}),
        ...     jumps_of({"model": {"not_smooth": []}}),
        ... )
        ('layer 1 (ReLU)', '')
    """
    names = value_at(about, "model.not_smooth") or []
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _check_kinds(about: Facts) -> None:
    """Raise for entries of another kind than whoever reads them expects."""
    from msgspec import ValidationError, convert  # not before a run is made

    try:
        # as a file has them: NumPy's numbers are numbers, too
        audit: Any = convert(json.loads(json.dumps(about)), _about_type()).audit
    except ValidationError as error:
        reason, _, path = str(error).partition(" - at `$.")
        name = path.rstrip("`")
        raise ValueError(f"about: {name!r} is {value_at(about, name)!r}: {reason}") from error
    checked_metrics(
        {name: (each["value"], each["on"]) for name, each in (about.get("metrics") or {}).items()}
    )
    unit_of(about.get("mechanism") or {})
    if audit is not None and audit.exceeds_claim != (audit.p_value < _REFUTED):
        raise ValueError(
            f"about: 'audit.exceeds_claim' is not what p_value < {_REFUTED} says; save the run "
            "again"
        )
