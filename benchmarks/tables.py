"""The results as a page."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

__all__ = ["page"]


def page(results: dict[str, Any]) -> str:
    """Markdown of everything that was measured."""
    machine = results["machine"]
    parts = [
        f"# What the accounting costs on {machine['device']}\n\n"
        f"`python -m benchmarks{' --quick' if results['quick'] else ''}`, torch {machine['torch']}, Opacus "
        f"{machine['opacus']}, {machine['threads']} CPU threads. Whole training steps, noise and update included, "
        "drawing batches not. The methods take turns; medians.\n"
    ]
    if results["quick"]:
        parts.append("A quick run: few repeats and draws, smaller batches on a CPU. Its numbers are rough.\n")
    if results.get("models"):
        parts += [_costs(results["models"]), _equal_error(results["models"])]
    if results.get("matched"):
        parts.append(_matched(results["matched"]))
    if results.get("run", {}).get("seconds"):
        parts.append(_run(results["run"]))
    if results.get("growth"):
        parts.append(_growth(results["growth"]))
    if results.get("precision"):
        parts.append(_precision(results["precision"]))
    reasons = list(_failures(results))
    if reasons:
        parts.append("## What did not run\n\n" + "\n".join(f"- {where}: {why}" for where, why in reasons) + "\n")
    return "\n".join(parts)


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table."""
    head = list(head)
    lines = [head, ["---"] * len(head), *map(list, rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def number(value: float | None, digits: int = 3) -> str:
    """A few digits, without an exponent where it is short without; a dash for nothing."""
    if value is None:
        return "–"
    text = f"{value:.{digits}g}"
    return f"{value:,.0f}" if "e" in text and 1 <= abs(value) < 1e7 else text


def _matched(models: dict[str, Any]) -> str:
    rows = []
    for model in models.values():
        for state, found in model.get("states", {}).items():
            steps = [
                f"{1e3 * found[f'{title}_seconds']:,.2f} ms: **{number(found[f'{title}_slower'])}**"
                if f"{title}_seconds" in found
                else "–"
                for title in ("plain", "compiled")
            ]
            errors = [number(found["paper_error"]), f"{number(found['error'])} ({found['probes']})"]
            times = [f"{1e3 * found[f'{who}_seconds']:,.1f} ms" for who in ("opacus", "paper")]
            rows.append([f"{model['title']}, batch {model['batch']}", state, *errors, *times, *steps])
    head = ["", "weights", "r of 50 coordinates", "r of probes (how many)", "Opacus's step", "the paper's step"]
    return (
        "## The paper's 50 coordinates against as many probes as have their standard error\n\n"
        + table([*head, "`train_step`: how many times faster than the paper's", "compiled"], rows)
        + "\nWhole steps from one run, Opacus's included in the paper's.\n"
    )


def _run(found: dict[str, Any]) -> str:
    rows = [[title, f"{number(seconds)} s"] for title, seconds in found["seconds"].items()]
    return (
        f"## A whole run: MNIST CNN, {found['examples']:,} examples, {found['epochs']} epochs of batches of "
        f"{found['batch']}\n\n" + table(["", "from start to end"], rows) + f"\ntorchfil with rel_error = "
        f"{found['rel_error']:g} takes **{number(found['ratio'])}** of Opacus's time, capturing graphs included; the "
        f"median relative standard error of FIL at the end is {number(found['median_relative_error'])}.\n"
    )


def _costs(models: dict[str, Any]) -> str:
    titles = list(dict.fromkeys(title for found in models.values() for title in found.get("rows", {})))

    def cell(found: dict[str, Any], title: str) -> str:
        row = found.get("rows", {}).get(title, {})
        if "failed" in row:
            return "failed"
        if "seconds" not in row:
            return "–"
        memory = "" if row.get("peak_gb") is None else f", {number(row['peak_gb'])} GB"
        return f"**{number(row.get('ratio'))}** ({number(1e3 * row['seconds'])} ms{memory})"

    def paper(ratio: float | None, seconds: float | None) -> str:
        return "–" if ratio is None or seconds is None else f"**{number(ratio)}** ({number(1e3 * seconds)} ms)"

    papers = [found.get("paper", {}) for found in models.values()]
    rows = [[title, *(cell(found, title) for found in models.values())] for title in titles]
    fifty = [paper(found.get("fifty_ratio"), found.get("fifty_seconds")) for found in papers]
    rows.append(["the paper's method, 50 coordinates *", *fifty])
    for state in dict.fromkeys(state for found in papers for state in found.get("states", {})):
        for count in ("1", "3"):
            estimates = [_estimate(found, state, count) for found in papers]
            title = f"the paper's method at the error of {count} probe{'s' * (count != '1')}, {state} *"
            rows.append([title, *(paper(e.get("ratio"), e.get("seconds")) for e in estimates)])
    head = ["", *(f"{found.get('title', name)}, batch {found.get('batch', '?')}" for name, found in models.items())]
    return (
        "## Steps, in multiples of Opacus's hooks\n\n" + table(head, rows) + "\nPeak memory includes model, data and, "
        "for a CUDA graph, its capture. “rel_error” is a mean over steps, as steps differ on purpose.\n\n"
        "\\* An Opacus step plus `vmap(jvp(clip(grad(loss))))` for each coordinate: one coordinate is timed (on a CPU "
        "for some examples of the batch only, see below) and counted linearly.\n"
    )


def _estimate(paper: dict[str, Any], state: str, count: str) -> dict[str, Any]:
    found: dict[str, Any] = paper.get("states", {}).get(state, {}).get("estimates", {}).get(count, {})
    return found


def _equal_error(models: dict[str, Any]) -> str:
    head = [
        *("", "weights", "r of a coordinate", "probes", "r of the probes' estimate", "coordinates to match"),
        *("× slower, whole step", "× slower, accounting alone"),
    ]
    rows, costs = [], []
    for name, found in models.items():
        paper, title = found.get("paper", {}), found.get("title", name)
        if "coordinate_seconds" not in paper:
            continue
        mapped, peak = paper.get("mapped_coordinate_seconds"), paper.get("coordinate_peak_gb")
        by_reverse = f", by reverse over reverse mode {number(1e3 * mapped)} ms" if mapped else ""
        memory = f", {number(peak)} GB" if peak is not None else ""
        costs.append(
            f"- {title}: {number(1e3 * paper['coordinate_seconds'])} ms for a coordinate of the batch (timed on "
            f"{paper['timed_examples']} examples{memory}){by_reverse}"
        )
        for state, spread in paper.get("states", {}).items():
            for count, estimate in spread.get("estimates", {}).items():
                sampled = spread["sampled"]
                rows.append(
                    [
                        f"{title}, d = {spread['num_coordinates']:,}",
                        state,
                        f"{number(spread['coordinate_relative_std'])} (of {sampled['coordinates']})",
                        count,
                        f"{number(estimate['relative_std'])} (of {sampled['draws']})",
                        number(estimate["coordinates"]),
                        number(estimate.get("slower")),
                        number(estimate.get("slower_alone")),
                    ]
                )
    return (
        "## The paper's method against probes, at equal standard error of a step\n\n" + table(head, rows) + "\n"
        "r: relative standard deviation, and from how many draws. “Whole step”: Opacus's step and the matching "
        "coordinates against `train_step` with that many probes. “Accounting alone”: the coordinates against what the "
        "probes add to an unmeasured `train_step`. A single probe also samples the part of the Fisher information "
        "along the gradient, which is large in a trained network.\n\n" + "\n".join(costs) + "\n"
    )


def _growth(found: dict[str, Any]) -> str:
    parts = ["## Growth\n"]
    for kind, rows in found.items():
        if "seconds" not in rows:
            continue
        body = []
        for title, seconds in rows["seconds"].items():
            row = [title, *("–" if s is None else f"{number(1e3 * s)} ms" for s in seconds)]
            if kind != "probes":
                row += [number(rows["power"].get(title)), number(rows["last_power"].get(title))]
            body.append(row)
        head = [rows["what"], *map(str, rows["sizes"])]
        if kind != "probes":
            head += ["power", "power of the last two"]
        elif any(gb is not None for gb in rows["peak_gb"]):
            body.append(["peak memory", *("–" if gb is None else f"{number(gb)} GB" for gb in rows["peak_gb"])])
        parts.append(table(head, body))
        if "seconds_per_probe" in rows:
            parts.append(
                f"A line through them: {number(1e3 * rows['seconds_without'])} ms and "
                f"{number(1e3 * rows['seconds_per_probe'])} ms for each probe.\n"
            )
    parts.append("“Power”: the slope of log time over log size; 1 is linear.\n")
    return "\n".join(parts)


def _precision(found: dict[str, Any]) -> str:
    rows = []
    for model in found.values():
        for title, row in model["rows"].items():
            values = [number(row.get(key), 2) for key in ("trace_median", "trace_largest", "sum")]
            rows.append(
                [model["title"], title, *(["failed", "", "", ""] if "failed" in row else [*values, row["path"]])]
            )
    head = ["", "", "traces, median", "traces, largest", "clipped sum", "computed"]
    return "## Relative errors of lower precision, against float64\n\n" + table(head, rows)


def _failures(found: Any, where: str = "") -> Iterable[tuple[str, str]]:
    """Every "failed" in the results, with the path to it."""
    if not isinstance(found, dict):
        return
    for key, value in found.items():
        if key == "failed" and isinstance(value, str):
            yield where, value
        else:
            yield from _failures(value, f"{where}, {key}" if where else str(key))
