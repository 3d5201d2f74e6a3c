"""The examples that a confidential page names: the most exposed, and the table of all of them.

Nothing of it is part of a redacted report: a public context has no field for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property

import numpy as np

from torchfil.gate.gate import concerned
from torchfil.gate.policy import Policy
from torchfil.gate.rules import Verdict
from torchfil.report.formats import percent
from torchfil.report.summary import Report
from torchfil.run import baselines
from torchfil.run.baselines import NOT_MEASURED, UNTOLD, status_of
from torchfil.run.saved_run import BLANK_WHERE_UNKNOWN, SavedRun
from torchfil.run.statistics import is_spared
from torchfil.run.unit import Facts
from torchfil.utils.tables import as_texts

MOST = 10
# deviations from the mean; share of those drawn as often; share of a group
FAR, OFTEN, RARE = 2.0, 0.05, 0.05


@dataclass(frozen=True)
class Exposed:
    """An example that is exposed more than others.

    Attributes:
        row: Its place in the run; the page's script opens its details from it.
        id: As saved.
        ratio: Its least error over a blind guess's; None: no blind guess is known.
        bound: Its MSE bound, lower end.
        success: How often any attacker answers each question correctly at most.
        epsilon: Its individual ε; None where there is none.
        flagged: By how many measures.
        why: What is unusual about it, in words.
    """

    row: int
    id: str
    ratio: float | None
    bound: float
    success: list[float]
    epsilon: float | None
    flagged: int
    why: str


class Measures:
    """Every example of a run by every measure: all inputs together, single attributes, each
    question, individual ε.

    Args:
        run: The run of a confidential page.
        policy: Whose limits flag examples; what it states of blind guesses counts.
    """

    def __init__(self, run: SavedRun, policy: Policy | None) -> None:
        self.run, self.policy = run, policy or Policy()
        self.told = baselines.is_told(run)
        self.bounds = run.lower_ends
        self.ratios = baselines.error_ratios(run, self.policy.blind_error)
        self.success = {question.name: question.success() for question in run.questions}

    @cached_property
    def blind_errors(self) -> np.ndarray:
        """What a blind guess of every attribute is off by, by public class, [c, k].

        What a policy states counts.
        """
        return baselines.blind_errors(
            self.run, self.policy.attribute_spread, self.policy.blind_error
        )

    @property
    def errors(self) -> np.ndarray:
        """By which examples are ranked, [n]: their ratios, or bounds where no ratio is known."""
        return self.bounds if self.ratios is None else self.ratios

    @cached_property
    def closest(self) -> np.ndarray | None:
        """The smallest ratio over the attributes of an example, [n], NaN where untold.

        None: none is known.
        """
        attributes = self.run.attributes
        if attributes is None or np.isnan(self.blind_errors).all():
            return None
        found = np.full(len(self.run), math.inf)
        parts = baselines.attribute_ratio_parts(self.run, attributes.shown, self.blind_errors)
        for rows, ratios in parts:
            found[rows] = np.fmin.reduce(ratios, axis=1)
        return np.where(self.told, found, math.nan)

    @cached_property
    def flags(self) -> dict[str, np.ndarray]:
        """Whom each measure flags, [n] booleans: closer than a blind guess, or above what the
        policy allows.
        """
        flags = dict[str, np.ndarray]()
        if self.ratios is not None:
            flags["all inputs"] = self.ratios < 1
        if self.closest is not None:
            flags["single attributes"] = self.closest < 1
        gain, limit = self.policy.max_gain_over_guessing, self.policy.max_individual_epsilon
        if gain is not None:
            flags |= {
                f"“{name}”": self.told & ~(found - 0.5 <= gain)
                for name, found in self.success.items()
            }
        if limit is not None and "epsilon" in self.run.columns:
            flags["individual ε"] = self.run.columns["epsilon"] > limit
        return flags

    def most(self) -> list[Exposed]:
        """Those that most measures flag and, among them, with the smallest error.

        Nobody of whom too little is told.
        """
        rows = np.flatnonzero(self.told)
        flagged = sum(self.flags.values(), np.zeros(len(self.run), dtype=np.int64))
        order = rows[np.lexsort((self.errors[rows], -flagged[rows]))][:MOST].tolist()
        epsilon = self.run.columns.get("epsilon")
        return [
            Exposed(
                row,
                str(self.run.ids[row]),
                None if self.ratios is None else float(self.ratios[row]),
                float(self.bounds[row]),
                [float(found[row]) for found in self.success.values()],
                None if epsilon is None else float(epsilon[row]),
                int(flagged[row]),
                "; ".join(why),
            )
            for row, why in zip(order, _reasons(self.run, order), strict=True)
        ]


def _reasons(run: SavedRun, rows: Iterable[int]) -> Iterator[list[str]]:
    """What is unusual about each of these examples."""
    kept = (
        {}
        if run.records is None
        else dict(zip(run.records.rows.tolist(), run.records.values, strict=True))
    )
    groups = {f"{name} ": run.coded_group(name) for name in run.groups}
    if "public_class" in run.columns:
        groups["its label"] = np.unique(run.columns["public_class"], return_inverse=True)
    drawn = run.columns.get("participations")
    for row in rows:
        reasons = list[str]()

        # attributes at the end of their range, or two deviations from their mean; the farthest two
        if row in kept and run.baselines is not None and run.attributes is not None:
            spread, values, names = run.baselines.attributes, kept[row], run.attributes.names
            with np.errstate(invalid="ignore", divide="ignore"):
                away = np.nan_to_num(np.abs(values - spread.mean) / spread.std)
            for j in np.argsort(-away, kind="stable")[:2]:
                end = (
                    "lowest"
                    if values[j] <= spread.low[j]
                    else "highest"
                    if values[j] >= spread.high[j]
                    else ""
                )
                if FAR <= away[j] < math.inf:
                    reasons.append(f"{end} {names[j]}" if end else f"{names[j]} far from the mean")
        if drawn is not None and float(np.mean(drawn >= drawn[row])) <= OFTEN:
            reasons.append(f"drawn {int(drawn[row]):,} times")

        # groups, and labels, of few; where most groups are small, that is nothing unusual
        for name, (levels, codes) in groups.items():
            share = float(np.mean(codes == codes[row]))
            if share < RARE and len(levels) * RARE < 1:
                text = name if name == "its label" else f"{name}{levels[codes[row]]}"
                reasons.append(f"{text} is rare ({percent(share)})")
        yield reasons


@dataclass(frozen=True)
class ShownToken:
    """A token of a text: its size, and its share of the text."""

    word: str
    size: float
    share: float


def tokens_of(run: SavedRun) -> list[tuple[str, dict[str, list[ShownToken]]]]:
    """Each saved text by id: its tokens by their share of its FIL and, where it was saved, of its
    PLIS.
    """
    if run.texts is None:
        return []
    maps = {"FIL": run.texts.fil} | ({} if run.texts.plis is None else {"PLIS": run.texts.plis})
    return [
        (
            str(run.ids[row]),
            {name: _tokens(words, sizes[place][: len(words)]) for name, sizes in maps.items()},
        )
        for place, (row, words) in enumerate(zip(run.texts.rows, run.texts.words, strict=True))
    ]


def _tokens(words: list[str], sizes: np.ndarray) -> list[ShownToken]:
    """Tokens without the blanks around them, and a sign for one that is nothing else.

    Shares are s²/Σ s².
    """
    squares = np.nan_to_num(np.asarray(sizes, dtype=np.float64)) ** 2
    shares = squares / (squares.sum() or 1.0)
    parts = zip(words, sizes.tolist(), shares.tolist(), strict=True)
    return [ShownToken(word.strip() or "␣", size, share) for word, size, share in parts]


# ---------------------------------------------------------------------- the table of all examples


MOST_ROWS = 10_000  # of a run with more examples the page has the most exposed
MOST_NAMED = 1_000  # of the down-weighted besides
MOST_CELLS = 150_000  # of attributes, so that the page stays small
INFINITE = 1e300  # what JSON has in its stead; the page's script shows it as ∞


@dataclass(frozen=True)
class TableColumn:
    """A column: its key, heading, meaning.

    Whether narrow screens show it, or only an example's details.

    ``kind`` is "times" for multiples of a blind guess's error, "rate" for shares of correct
    answers, "" for others.
    """

    key: str
    label: str
    meaning: str
    narrow: bool = False
    detail: bool = False
    kind: str = ""


_BESIDE = (
    "the least error of an unbiased estimate (lower end), as a multiple of a blind guess’s error"
)
RATIO = TableColumn("ratio", "error", _BESIDE, narrow=True, kind="times")
COLUMNS = (
    TableColumn("num_rows", "rows", "how many of them the example has, which is taken as public"),
    TableColumn(
        "epsilon",
        "individual ε",
        "ε of this example for this run’s outputs; an estimate, no guarantee",
    ),
    TableColumn("participations", "drawn", "how many batches held the example"),
    TableColumn(
        "clip_weight", "weight", "ω, by which the example’s clipped gradient was multiplied"
    ),
    TableColumn(
        "sample_weight",
        "weight",
        "ω of the example in the fit, of mean 1, so that examples leak alike",
    ),
    TableColumn(
        "mse_bound",
        "MSE bound",
        "an unbiased estimate of the inputs has at least this mean squared error per input",
    ),
    TableColumn(
        "mse_bound_low", "lower end", "of the 95 % interval of the MSE bound: the number to quote"
    ),
    TableColumn("fil", "FIL η̄", "Fisher information loss; larger is more exposed", narrow=True),
    TableColumn(
        "fil_error",
        "error of FIL",
        "its standard error from probes and skipped steps alone",
        detail=True,
    ),
    TableColumn(
        "sampling_error",
        "sampling",
        "how much the random choice of batches could change FIL",
        detail=True,
    ),
    TableColumn(
        "fil_before",
        "FIL before",
        "in the run without weights, from which weights were chosen",
        detail=True,
    ),
    TableColumn("missed", "missed", "participations that were not measured", detail=True),
    TableColumn("paused", "paused", "participations in paused steps", detail=True),
    TableColumn("squared_norm", "Σ‖g̃‖²", "sum of squared clipped gradient norms", detail=True),
)


@dataclass(frozen=True)
class Table:
    """What the page's script draws.

    Attributes:
        data: The columns, as JSON takes them.
        filters: By value, what the filter calls some of the examples.
        left_out: The attributes that would have made the page too large.
    """

    data: Facts
    filters: dict[str, str]
    left_out: list[str]


def table_of(report: Report, measures: Measures, named: Iterable[int]) -> Table:
    """The most exposed examples and those that the page names, with all that the run says of
    each.
    """
    whole = measures.run
    status = status_of(whole)
    measured = np.flatnonzero(status != NOT_MEASURED)
    fil = np.asarray(whole.columns["fil"], dtype=np.float64)
    places = np.arange(len(whole))
    if len(whole) > MOST_ROWS:
        # the smallest errors first, then what nobody can tell
        order = np.argsort(np.where(measures.told, measures.errors, math.inf), kind="stable")
        weighted = np.flatnonzero(is_spared(whole))[:MOST_NAMED]
        places = np.union1d(
            order[:MOST_ROWS], np.r_[weighted, np.asarray(list(named), dtype=np.int64)]
        )
    run = whole if len(places) == len(whole) else whole.take(places)

    unknown = (status == NOT_MEASURED)[places]
    marks = _marks(measures, report.verdicts or [])
    attributes, left_out = _attributes(measures, run, unknown)
    ranked = np.sort(fil[measured])
    data = {
        "ids": as_texts(np.asarray(run.ids)).tolist(),
        "places": None if run is whole else places.tolist(),
        "status": "".join(map(str, status[places].tolist())),
        "rank": (1 + len(ranked) - np.searchsorted(ranked, fil[places], side="right")).tolist(),
        "measured": len(measured),
        "marks": {
            name: "".join("01"[on] for on in chosen[places].tolist())
            for name, (_, chosen) in marks.items()
        },
        "columns": _columns(measures, run, places, unknown, exact=report.is_linear),
        "groups": [
            {"name": name, "levels": levels.tolist(), "codes": codes.tolist()}
            for name, (levels, codes) in ((name, run.coded_group(name)) for name in run.groups)
        ],
        "attributes": attributes,
        "attacks": [
            {"name": attack.name, "rows": attack.rows.tolist()}
            | {part: _json_numbers(getattr(attack, part)) for part in ("predicted", "achieved")}
            for attack in run.attacks
        ],
        "origin": report.origin,
        "exact": report.is_linear,
    }
    return Table(data, {name: text for name, (text, _) in marks.items()}, left_out)


def _marks(measures: Measures, verdicts: Sequence[Verdict]) -> dict[str, tuple[str, np.ndarray]]:
    """The filters by value, each with its name and whom it shows, [n] booleans: the four classes,
    whom broken rules concern, the down-weighted.
    """
    marks, run = dict[str, tuple[str, np.ndarray]](), measures.run
    if measures.ratios is not None:
        classes = baselines.classes_of_ratios(measures.ratios)
        for each, text in baselines.CLASSES.items():
            marks[f"class-{each}"] = text, classes == each
        marks["exposed"] = "exposed: the first two together", measures.ratios < 1
    else:
        marks[f"class-{UNTOLD}"] = baselines.CLASSES[UNTOLD], ~measures.told
    known = [
        verdict
        for verdict in verdicts
        if not verdict.passed and len(verdict.rows) and verdict.found is not None
    ]
    everybody = np.arange(len(run))
    if known:
        marks["broken"] = "concerned by a broken rule", np.isin(everybody, concerned(known))
    for place, verdict in enumerate(known if len(known) > 1 else []):
        marks[f"rule-{place}"] = verdict.rule, np.isin(everybody, verdict.rows)
    if "clip_weight" in run.columns:
        marks["weighted"] = "down-weighted", is_spared(run)
    return marks


def _columns(
    measures: Measures, run: SavedRun, places: np.ndarray, unknown: np.ndarray, *, exact: bool
) -> list[Facts]:
    """Those that the run has.

    A column that says the same of everybody is left out, but for what a table needs.
    """
    entries = list[Facts]()

    def add(column: TableColumn, values: np.ndarray) -> None:
        numbers = {"whole": values.dtype.kind in "biu", "values": _json_numbers(values, 4)}
        entries.append(asdict(column) | {"meaning": run.unit.say(column.meaning)} | numbers)

    if measures.ratios is not None:
        add(RATIO, measures.ratios[places])
    for name, success in measures.success.items():
        meaning = (
            "how often any attacker tells the true answer from another, equally likely one, at most"
        )
        values = np.where(measures.told, success, math.nan)[places]
        add(TableColumn(f"question-{name}", f"“{name}”", meaning, kind="rate"), values)
    for column in COLUMNS:
        values = run.columns.get(column.key)
        if values is None or (
            column.key not in ("fil", "mse_bound", "num_rows") and np.unique(values).size < 2
        ):
            continue
        if column.key == "mse_bound_low" and exact:
            continue  # bounds are exact, and their own lower ends
        if column.key in BLANK_WHERE_UNKNOWN:
            values = np.where(unknown, np.nan, values.astype(np.float64))
        add(column, values)
    return entries


def _attributes(
    measures: Measures, run: SavedRun, unknown: np.ndarray
) -> tuple[list[Facts], list[str]]:
    """The first attributes that fit, infinite where beyond a blind guess's error, and the names of
    the others.
    """
    if run.attributes is None:
        return [], []
    fit, blind = MOST_CELLS // max(len(run), 1), measures.blind_errors
    # which have no ±
    entries, categories = [], {} if run.baselines is None else run.baselines.levels
    for j, (name, unit) in enumerate(
        zip(run.attributes.names[:fit], run.attributes.units[:fit], strict=True)
    ):
        if name in categories:
            continue
        values = np.where(unknown, np.nan, np.asarray(run.attributes.shown[:, j], dtype=np.float64))
        values[np.isinf(values)] = math.nan  # nothing leaked, and a blind guess is not known
        values[baselines.attribute_ratios(run, j, blind) >= 1] = math.inf
        entries.append({"name": name, "unit": unit, "values": _json_numbers(values, 3)})
    return entries, run.attributes.names[fit:]


def _json_numbers(values: np.ndarray, digits: int = 4) -> list[float | int | None]:
    """Numbers as JSON has them: NaN is null, infinity 1e300."""
    if values.dtype.kind in "biu":
        return list(map(int, values.tolist()))
    finite = np.clip(np.asarray(values, dtype=np.float64), -INFINITE, INFINITE)
    return [
        None if math.isnan(value) else float(f"{value:.{digits}g}") for value in finite.tolist()
    ]
