"""The table of all examples, drawn by assets/page.js from packed columns. Never part of a redacted report."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from torchfil.gate.gate import concerned
from torchfil.report.page.context import Report, paragraph
from torchfil.report.page.html import Markup, join, tag
from torchfil.report.page.payload import Packed, pack, pack_text
from torchfil.report.page.sections import exposed, spared
from torchfil.report.page.wording import is_linear, origin, tabled_run
from torchfil.report.page.worst import blind_error
from torchfil.run.baselines import BLANK_WHERE_UNKNOWN, NOT_MEASURED, exposed_examples, status_of
from torchfil.run.saved_run import SavedRun
from torchfil.run.statistics import is_spared

__all__ = ["render"]

BUDGET = 14_000_000  # characters of packed columns, so that a page stays below 20 MB
ID_BUDGET = 8_000_000
MOST_ATTACKED = 20_000
MOST_LEVELS = 500  # of a grouping, to choose from
STATUSES = (
    ("all", "all examples"),
    ("exposed", "exposed"),
    ("broken", "concerned by a broken rule"),
    ("measured", "measured"),
    ("partly", "measured in part"),
    ("unmeasured", "not measured"),
    ("spared", "spared"),
)
MOST_ROWS = 1_000_000  # of a run with more examples the page has the most exposed


@dataclass(frozen=True)
class Column:
    """A column: its name in the run, heading, meaning; whether narrow screens show it, or only an example's details."""

    key: str
    label: str
    meaning: str
    narrow: bool = False
    detail: bool = False


COLUMNS = (
    Column(
        "mse_bound",
        "MSE bound",
        "an unbiased guess of the inputs errs by at least this on average (mean square per input)",
        narrow=True,
    ),
    Column("fil", "FIL η̄", "Fisher information loss; larger is more exposed", narrow=True),
    Column("mse_bound_low", "low end", "of the 95 % interval of the MSE bound: the number to quote"),
    Column("epsilon", "own ε", "the example’s own ε for this run’s outputs; an estimate, no guarantee"),
    Column("clip_weight", "weight", "ω, by which the example’s clipped gradient was multiplied; below 1 it was spared"),
    Column("sample_weight", "weight", "ω of the example in the fit, of mean 1; chosen so that examples leak alike"),
    Column("participations", "drawn", "how many batches held the example"),
    Column("fil_error", "error", "standard error of FIL from probes and skipped steps alone"),
    Column("sampling_error", "sampling", "how much the random choice of batches could change FIL"),
    Column("fil_before", "FIL before", "in the run without weights that the weights were chosen from", detail=True),
    Column("missed", "missed", "participations that were not measured", detail=True),
    Column("squared_norm", "Σ‖g̃‖²", "sum of squared clipped gradient norms", detail=True),
)


def render(report: Report) -> Markup | None:
    """The table's frame, its data and its legend."""
    whole = tabled_run(report)
    if whole is None:
        return None
    run, of, places = _shown(whole)
    spec, blocks, left_out = _packed(run, of, places, _marks(report))

    # how certain a bound is depends on the kind of run
    spec |= {"origin": origin(report), "exact": is_linear(report)}
    for entry in spec["columns"]:
        entry["meaning"] += f"; {origin(report)}" if entry["key"] == "mse_bound" else ""
    meanings = [join(tag("dt", entry["label"]), tag("dd", entry["meaning"])) for entry in spec["columns"]]

    note = ""
    if "of" in spec:
        note = (
            f"The table has {spec['rows']:,} of {spec['of']['examples']:,} examples: the most exposed of the "
            f"{spec['of']['measured']:,} that were measured, and those that this page names; leakage.csv has all. "
        )
    if left_out:
        note += f"To keep the page small, it leaves out {', '.join(left_out)}; the files beside it hold everything. "

    return join(
        paragraph(
            "Select a heading to sort, its question mark for what it means, a row for its details and a link to it. "
            "Arrow keys, Page Up and Page Down move, Enter opens, Escape closes. Examples that were not measured "
            "always stand last.",
            class_="screen",
        ),
        _frame(spec),
        paragraph("The table of all examples is not printed; leakage.csv holds it.", class_="printed"),
        tag(
            "details",
            tag("summary", "What the columns mean"),
            tag("dl", meanings, class_="legend"),
        ),
        paragraph(
            note,
            "Files beside this page: ",
            "; ".join(f"{name} ({what})" for name, what in report.files.items()),
            ". ",
            " ".join(report.notes),
            class_="note",
        ),
        tag("dialog", id="detail", aria_labelledby="detail-id"),
        Markup(f'<script type="application/json" id="spec">{_json(spec)}</script>'),
        [
            Markup(f'<script type="text/plain" id="data-{name}">{packed.data}</script>')
            for name, packed in blocks.items()
        ],
    )


def _frame(spec: dict[str, Any]) -> Markup:
    """Tools and an empty grid, by whose ids assets/page.js finds them."""
    # the spacer is as high as all rows together; only those in view are drawn
    spacer = tag("div", tag("div", id="rows", role="rowgroup"), id="spacer", role="presentation")
    grid = tag(
        "div",
        tag("div", id="head", role="rowgroup"),
        tag("p", id="help", role="status", hidden=""),
        tag("div", spacer, id="viewport", tabindex=-1, role="presentation"),
        id="grid",
        role="grid",
        tabindex=0,
        aria_label="Every example; arrow keys move, Enter opens",
    )
    scriptless = paragraph("The table needs JavaScript; the files beside this page hold the same numbers.")
    return tag("div", _tools(spec), grid, tag("noscript", scriptless), class_="everyone screen")


def _tools(spec: dict[str, Any]) -> Markup:
    """Search, and filters by status, group and threshold; the script enables them once the table was read."""

    def chooser(name: str, options: list[Any], label: str | None = None) -> Markup:
        return tag("select", options, id=name, disabled="", aria_label=label)

    statuses = [tag("option", text, value=value) for value, text in STATUSES if value in spec["statuses"]]
    groups = [
        tag(
            "optgroup",
            [tag("option", level, value=f"{i}:{j}") for j, level in enumerate(group["levels"][:MOST_LEVELS])],
            label=group["name"],
        )
        for i, group in enumerate(spec["groups"])
    ]
    columns = [tag("option", column["label"], value=column["key"]) for column in spec["columns"]]
    sides = [tag("option", "at most", value="most"), tag("option", "at least", value="least")]
    threshold = [chooser("column", columns, "Column"), chooser("side", sides, "Side")]
    anybody = tag("option", "all", value="")
    limit = tag("input", type="number", step="any", id="limit", autocomplete="off", disabled="", aria_label="Threshold")
    search = tag("input", type="search", id="search", autocomplete="off", spellcheck="false", disabled="")
    return tag(
        "div",
        tag("label", tag("span", "Find an id"), search),
        tag("label", tag("span", "Show"), chooser("filter", statuses)),
        tag("label", tag("span", "Group"), chooser("group", [anybody, *groups])) if groups else None,
        tag("span", "Only", threshold, limit, class_="threshold"),
        tag("button", "Clear filters", type="button", id="clear", hidden=""),
        tag("span", "Reading the table …", id="found", role="status"),
        class_="tools",
    )


class _Blocks:
    """Packed arrays by name, as far as they fit into the page."""

    def __init__(self) -> None:
        self.packed: dict[str, Packed] = {}
        self.left_out: list[str] = []

    def add(self, name: str, packed: Packed, label: str) -> bool:
        """Whether there is room for the array; otherwise its label is noted."""
        if len(packed.data) > BUDGET - sum(len(block.data) for block in self.packed.values()):
            self.left_out.append(label)
            return False
        self.packed[name] = packed
        return True


def _shown(run: SavedRun) -> tuple[SavedRun, dict[str, int] | None, np.ndarray | None]:
    """The examples of the table; of a run that has more, what it is a part of, and their places in the run."""
    if len(run) <= MOST_ROWS:
        return run, None, None
    is_measured = status_of(run) != NOT_MEASURED
    measured = np.flatnonzero(is_measured)
    if len(measured) > MOST_ROWS:
        fil = np.asarray(run.columns["fil"], dtype=np.float64)[measured]
        measured = measured[np.argpartition(-fil, MOST_ROWS)[:MOST_ROWS]]
    named = np.asarray([*exposed.shown_rows(run), *spared.shown_rows(run)], dtype=np.int64)
    places = np.union1d(measured, named)
    # how many by exposure are all there: of others the page cannot tell the rank
    of = {"examples": len(run), "measured": int(is_measured.sum()), "ranked": len(measured)}
    return run.take(places), of, places


def _marks(report: Report) -> dict[str, np.ndarray]:
    """Who is exposed, whom a broken rule concerns, who was spared, [n] booleans each; without what nobody can say."""
    marks = dict[str, np.ndarray]()
    assert report.run is not None
    exposed_ones = exposed_examples(report.run, blind_error(report))
    if exposed_ones is not None:
        marks["exposed"] = exposed_ones
    if report.verdicts is not None:
        marks["broken"] = np.zeros(len(report.run), dtype=bool)
        marks["broken"][concerned([verdict for verdict in report.verdicts if not verdict.passed])] = True
    if "clip_weight" in report.run.columns:
        marks["spared"] = is_spared(report.run)
    return marks


def _packed(
    run: SavedRun, of: dict[str, int] | None, places: np.ndarray | None, marks: dict[str, np.ndarray]
) -> tuple[dict[str, Any], dict[str, Packed], list[str]]:
    """The description of the data, the packed arrays by name, and what did not fit; see :func:`_shown` and `_marks`."""
    status, blocks = status_of(run), _Blocks()
    blocks.packed["status"] = pack(status)
    unknown = status == NOT_MEASURED
    spec: dict[str, Any] = {"rows": len(run.ids)}
    if of is not None and places is not None:
        spec["of"] = of
        blocks.packed["places"] = pack(places)

    for name, chosen in marks.items():
        blocks.packed[f"is-{name}"] = pack((chosen if places is None else chosen[places]).astype(np.uint8))
    spec["statuses"] = ["all", "measured", "partly", "unmeasured", *marks]

    # in the order of their worth: what comes later is left out first
    spec["ids"] = _id_kind(np.asarray(run.ids), blocks)
    spec["columns"] = _columns(run, unknown, blocks)
    spec["groups"] = _groups(run, blocks)
    spec["attributes"] = _attributes(run, unknown, blocks)
    spec["lower_ends"] = run.attributes is not None and run.attributes.error_low is not None

    spec["attacks"] = [
        {
            "name": attack.name,
            "rows": attack.rows.tolist(),
            "predicted": [float(f"{v:.4g}") for v in np.nan_to_num(attack.predicted, posinf=1e300)],
            "achieved": [float(f"{v:.4g}") for v in np.nan_to_num(attack.achieved, posinf=1e300)],
        }
        for attack in run.attacks
        if len(attack.rows) <= MOST_ATTACKED
    ]
    spec["blocks"] = {name: packed.kind for name, packed in blocks.packed.items()}
    return spec, blocks.packed, blocks.left_out


def _id_kind(ids: np.ndarray, blocks: _Blocks) -> str:
    """How the page knows the ids: "rows" (their numbers), "numbers" or "text", which are packed."""
    if np.array_equal(ids, np.arange(len(ids))):
        return "rows"
    if ids.dtype.kind != "U" and bool((np.abs(ids) < 2**53).all()):  # what JavaScript's numbers hold exactly
        blocks.packed["ids"] = pack(ids)
        return "numbers"
    texts, lengths = pack_text(ids.astype(str))
    if len(texts.data) + len(lengths.data) > ID_BUDGET:
        blocks.left_out.append("the ids (examples are numbered from 0, as in leakage.csv)")
        return "rows"
    blocks.packed |= {"ids": texts, "lengths": lengths}
    return "text"


def _columns(run: SavedRun, unknown: np.ndarray, blocks: _Blocks) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = []
    for column in COLUMNS:
        values = run.columns.get(column.key)
        if values is None or (column.key == "missed" and not values.any()):
            continue
        if column.key in BLANK_WHERE_UNKNOWN:
            values = np.where(unknown, np.nan, values.astype(np.float64))
        entry = {**asdict(column), "whole": values.dtype.kind in "biu"}
        if column.key == "mse_bound" and _is_inverse_square(values, run.columns["fil"], unknown):
            entries.append(entry | {"from_fil": True})
        elif blocks.add(column.key, pack(values), column.label):
            entries.append(entry)
    return entries


def _groups(run: SavedRun, blocks: _Blocks) -> list[dict[str, Any]]:
    entries = []
    for i, name in enumerate(run.groups):
        levels, codes = run.coded_group(name)
        if blocks.add(f"group{i}", pack(codes), name):
            entries.append({"name": name, "levels": [str(level) for level in levels], "data": f"group{i}"})
    return entries


def _attributes(run: SavedRun, unknown: np.ndarray, blocks: _Blocks) -> list[dict[str, Any]]:
    """The first attributes that fit; after one that does not, none is tried, for packing takes its time."""
    entries: list[dict[str, Any]] = []
    if run.attributes is None:
        return entries
    for j, (name, unit) in enumerate(zip(run.attributes.names, run.attributes.units, strict=True)):
        if j > len(entries):
            blocks.left_out.append(name)
            continue
        values = np.where(unknown, np.nan, np.asarray(run.attributes.shown[:, j], dtype=np.float64))
        if blocks.add(f"attribute{j}", pack(values), name):
            entries.append({"name": name, "unit": unit, "data": f"attribute{j}"})
    return entries


def _is_inverse_square(bound: np.ndarray, fil: np.ndarray, unknown: np.ndarray) -> bool:
    """Whether the page can compute the bound as 1/η̄² instead of holding it."""
    with np.errstate(divide="ignore"):
        derived = 1 / np.asarray(fil, dtype=np.float64)[~unknown] ** 2
    return bool(np.allclose(derived, bound[~unknown], rtol=1e-4))


def _json(value: Any) -> str:
    """JSON that cannot end its script element."""
    return (
        json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
        .replace("<", "\\u003c")
        .replace("&", "\\u0026")
    )
