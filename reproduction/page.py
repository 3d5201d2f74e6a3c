"""The page docs/reproduction.md, written from the records and the registry alone."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.measuring import Json
from reproduction.records import Record, earlier_record
from reproduction.rows import PAPERS, Row

__all__ = ["PICTURES", "joined", "page", "with_earlier"]

# The pictures on the page, with a description of the paper's own figure.
PICTURES = {
    "repro_hannun_figure2_mnist.png": "Hannun et al., Figure 2, MNIST: histograms of η by class. "
    "Theirs has two modes as well, the digit 0 to the right.",
    "repro_hannun_figure3_mnist.png": "Hannun et al., Figure 3, MNIST: smallest and largest η. "
    "Theirs are typical ones and idiosyncratic digits as well; "
    "24 of the 100 largest are shared by both models, theirs "
    "and ours.",
    "repro_hannun_figure5.png": "Hannun et al., Figure 5: deviation of η over iterations of "
    "IRFIL. Theirs falls to nothing in a few iterations, too.",
    "repro_hannun_figure6c.png": "Hannun et al., Figure 6c: white-box accuracy over η̄ for four "
    "penalties. Theirs falls with η̄ along nearly one curve.",
    "repro_hannun_figure7_iwpc_deciles.png": "Hannun et al., Figure 7b: white-box accuracy by "
    "decile of η. Theirs rises steeply at first and is "
    "flat after ten iterations.",
    "repro_guo_figure2.png": "Guo et al., Figure 2: bounds by digit. Theirs has Rényi DP's line "
    "at 0.1 and all digits to the right of 1.",
    "repro_guo_figure3.png": "Guo et al., Figure 3: bound against the attack's error. Theirs hugs "
    "the line at the lower end, with some digits below it at the upper.",
    "repro_guo_figure5_poisson.png": "Guo et al., Figure 5, MNIST: one run by torchfil's exact "
    "factors, from left to right. Theirs shows one dot for each "
    "of 432 settings.",
    "repro_guo_figure5_theorem4.png": "The same run accounted by the paper's Theorem 4.",
    "repro_guo_figure5_gpu.png": "Guo et al., Figure 5, MNIST, best accuracy: the example's "
    "recipe on a GPU, from left to right. Theirs crosses 1 at 97 % "
    "with the largest dFIL, at 95 % with Rényi DP.",
    "repro_guo_figure6_gpu.png": "Guo et al., Figure 6: photographs of highest and lowest dFIL. "
    "Theirs shows unusual views above and typical ones below as "
    "well; here both rows are mostly planes and ships.",
    "repro_plis_figure1.png": "The PLIS paper, Figure 1: three features, of which only the middle "
    "one is informative. Theirs looks alike.",
    "repro_plis_figure2.png": "The PLIS paper, Figure 2: digits and an x-ray with their maps.",
    "repro_plis_table1.png": "The PLIS paper, Figure 3: x-rays of low and high PLIS and what a "
    "gradient gives away, without and with DP.",
    "repro_mo_figure1_alexnet.png": "Mo et al., Figure 1, AlexNet: V-information, sensitivity and "
    "AUC by layer. All three of theirs peak at layer 4, fc1.",
    "repro_mo_figure2.png": "Mo et al., Figure 2: the attack's AUC by layer of VGG11Net, for "
    "three planted properties. Theirs peaks in layer 9 for all three.",
}
OTHER = "other"
ORDER = ("agrees", "agrees in part", "differs")


def joined(path: Path, fresh: Mapping[str, Record]) -> dict[str, Record]:
    """The records of a file, replaced by newer measurements."""
    before: dict[str, Record] = json.loads(path.read_text()) if path.exists() else {}
    return dict(sorted((before | dict(fresh)).items()))


def with_earlier(rows: Sequence[Row], records: Mapping[str, Record]) -> dict[str, Record]:
    """The records of the registry's rows, and earlier results if there is nothing newer."""
    found = {}
    for row in rows:
        if row.id in records:
            found[row.id] = dict(records[row.id])
        elif row.earlier is not None:
            found[row.id] = earlier_record(row)
    return found


def page(rows: Sequence[Row], records: Mapping[str, Record], *, pictures: str = "images/") -> str:
    """Markdown: a summary, a table for each paper, reasons, pictures, every check, and the
    machines.
    """
    found = with_earlier(rows, records)
    parts = [INTRODUCTION, _summary(rows, found), HOW]
    for paper, title in PAPERS.items():
        own = [row for row in rows if row.paper == paper]
        parts += [
            f"## {title}",
            _table(own, found),
            _reasons(own, found),
            _pictures(paper, found, pictures),
        ]
    parts += ["## Every check", CHECKS, _checks(rows, found), "## Machines", _machines(found)]
    return "\n\n".join(part for part in parts if part) + "\n"


INTRODUCTION = """---
orphan: true
---

# The papers' tables and figures, measured here

*This page is written by `python -m reproduction --write-page` from `docs/reproduction.json` and the
registry in `reproduction`; it is not edited by hand.*

torchfil builds on four papers. Every table and figure of theirs is a row below: what they report,
what our code measures, on which data, in what time, and whether both agree. Where they do not, the
reason is given as far as it is known."""

HOW = """* `make reproduce` measures what two cores do within an hour; `make reproduce-gpu` the
  rest. Both go on where they ended.
* `python -m reproduction --list` names the rows; `--only plis-figure1,guo-figure2` runs
  single ones.
* Data: the folder that `TORCHFIL_DATA` names (examples/README.md). Where files are missing a row
  runs on made-up data and says so.
* **stand-in**: not the paper's own setting: other data, a smaller run, or a detail that the paper
  does not give. What differs is said.
* **Time** is processor time. Rows that share a training are timed by the one that runs first.
* **Who is bound:** bounds on the mean squared error bind *unbiased* attackers who know everything
  but one example; what is random is the noise (and, in DP-SGD, the draw of batches). η and PLIS are
  measures, no bounds on an attacker's success.
* Pictures are drawn by our code with the axes of the papers'; theirs are described in words."""

CHECKS = """What was compared in each row, and by which rule both count as the same. A row *agrees*
where all its checks hold, *in part* where some do, and *differs* where none does."""


def _summary(rows: Sequence[Row], found: Mapping[str, Record]) -> str:
    """How many rows of each paper agree."""
    lines = [
        "| paper | rows with a result | agree | agree in part | differ | … of these, stand-ins | "
        "not measured |",
        "|---|---|---|---|---|---|---|",
    ]
    total: Counter[str] = Counter()
    for paper, title in PAPERS.items():
        own = [row for row in rows if row.paper == paper]
        counts = Counter(_kind(found[row.id]["verdict"]) for row in own if row.id in found)
        counts["stand-ins"] = sum(
            found[row.id]["verdict"].startswith("stand-in") for row in own if row.id in found
        )
        counts["not measured"] = sum(row.id not in found for row in own)
        total += counts
        lines.append(_summary_line(title.split(",")[0] if paper != "plis" else "PLIS 2022", counts))
    lines.append(_summary_line("**all**", total))
    seconds = sum(
        record.get("processor_seconds", 0.0) for record in found.values() if not _on_gpu(record)
    )
    cited = sum("earlier" in record for record in found.values())
    earlier = "One result was" if cited == 1 else f"{cited} results were"
    return "\n".join(lines) + (
        f"\n\n{earlier} measured earlier, on a GPU, and cited. Processor time of all rows "
        f"measured on a CPU: {seconds / 60:.0f} minutes."
    )


def _summary_line(title: str, counts: Counter[str]) -> str:
    measured = sum(counts[kind] for kind in (*ORDER, OTHER))
    cells = [
        measured,
        *(counts[kind] for kind in ORDER),
        counts["stand-ins"],
        counts["not measured"],
    ]
    return f"| {title} | " + " | ".join(map(str, cells)) + " |"


def _kind(verdict: str) -> str:
    plain = verdict.removeprefix("stand-in: ")
    return plain if plain in ORDER else OTHER


def _on_gpu(record: Record) -> bool:
    return "CPU" not in record["machine"]["device"]


def _table(rows: Sequence[Row], found: Mapping[str, Record]) -> str:
    lines = ["| | they report | here | data | time | |", "|---|---|---|---|---|---|"]
    for row in rows:
        record = found.get(row.id)
        cells = [f"**{row.item}**<br>`{row.id}`", row.theirs, *_cells(row, record)]
        lines.append(
            "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"
        )
    return "\n".join(lines)


def _cells(row: Row, record: Record | None) -> list[str]:
    """Result, data, time and verdict."""
    if record is None:
        return ["–", row.data, "–", "not run" if row.measure is not None else "nothing to measure"]
    data = row.data
    if record["made_up"]:
        data += f" (made up: files of {', '.join(record['made_up'])} are not at hand)"
    if "earlier" in record:
        earlier = record["earlier"]
        source = f"measured earlier ({_link(earlier['source'])}): `{earlier['command']}`"
        return [f"{record['here']}; {source}", data, record["machine"]["device"], record["verdict"]]
    seconds = record["processor_seconds"]
    time = f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.1f} min"
    if _on_gpu(record):
        time = f"{record['seconds']:.0f} s, {record['machine']['device']}"
    return [record["here"], data, time, record["verdict"]]


def _link(source: str) -> str:
    """A page of the documentation as a link, another file by its name."""
    return (
        f"[{source}]({source.removeprefix('docs/')})"
        if source.startswith("docs/")
        else f"`{source}`"
    )


def _reasons(rows: Sequence[Row], found: Mapping[str, Record]) -> str:
    """What differs from the paper's setting, and why results differ."""
    lines = []
    for row in rows:
        record = found.get(row.id)
        agrees = record is not None and _kind(record["verdict"]) == "agrees"
        told = [f"Setting: {row.stand_in}."] if row.stand_in else []
        if row.reason and (record is not None or row.measure is None):
            told.append(row.reason)
        if record is not None and not agrees:
            failed = [
                f"{check['what']} ({check['theirs']}; here {check['ours']})"
                for check in record["checks"]
                if not check["holds"]
            ]
            told.insert(0, f"Does not hold: {'; '.join(failed)}.")
        if told:
            lines.append(f"* **{row.item}** (`{row.id}`). " + " ".join(told))
    return (
        "**Differences, and settings that are not the papers':**\n\n" + "\n".join(lines)
        if lines
        else ""
    )


def _pictures(paper: str, found: Mapping[str, Record], folder: str) -> str:
    drawn = {name for record in found.values() for name in record["pictures"]}
    shown = [name for name in PICTURES if name in drawn and name.startswith(f"repro_{paper}_")]
    return "\n\n".join(
        f"![{PICTURES[name].split(':')[0]}]({folder}{name})\n\n*{PICTURES[name]}*" for name in shown
    )


def _checks(rows: Sequence[Row], found: Mapping[str, Record]) -> str:
    lines = ["| row | what | theirs | ours | rule | |", "|---|---|---|---|---|---|"]
    for row in rows:
        for check in found[row.id]["checks"] if row.id in found else ():
            cells = [f"`{row.id}`", check["what"], check["theirs"], check["ours"], check["rule"]]
            cells.append("holds" if check["holds"] else "**does not hold**")
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


def _machines(found: Mapping[str, Record]) -> str:
    """Each machine once, with the days and the rows."""
    groups: dict[str, list[Record]] = {}
    for record in found.values():
        if "earlier" not in record:
            groups.setdefault(json.dumps(record["machine"]), []).append(record)
    lines = []
    for key, records in groups.items():
        told: Json = json.loads(key)
        days = sorted({record["date"] for record in records})
        parts = [
            f"{name} {value}"
            for name, value in told.items()
            if name not in ("device", "cores", "threads")
        ]
        lines.append(
            f"* {told['device']}, {told['cores']} cores, {told['threads']} threads used; "
            f"{', '.join(parts)}; {len(records)} rows, {days[0]}"
            + (f" to {days[-1]}" if len(days) > 1 else "")
        )
    return "\n".join(lines)
