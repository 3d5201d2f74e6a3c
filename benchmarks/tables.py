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
        parts.append(_costs(results["models"]))
    if results.get("large"):
        parts.append(_large(results["large"]))
    if results.get("matched"):
        parts.append(_matched(results["matched"]))
    if results.get("run", {}).get("seconds"):
        parts.append(_run(results["run"]))
    if results.get("growth"):
        parts.append(_growth(results["growth"]))
    if results.get("precision"):
        parts.append(_precision(results["precision"]))
    if results.get("examples", {}).get("seconds"):
        parts.append(_examples(results["examples"]))
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
    """A few digits, without an exponent if that is short; a dash for None."""
    if value is None:
        return "–"
    text = f"{value:.{digits}g}"
    return f"{value:,.0f}" if "e" in text and 1 <= abs(value) < 1e7 else text


def _matched(models: dict[str, Any]) -> str:
    rows, costs = [], []
    for model in models.values():
        for state, measured in model.get("states", {}).items():
            title = f"{model['title']}, batch {model['batch']}, d = {measured['num_coordinates']:,}"
            for row in measured["rows"]:
                times = [
                    f"{number(1e3 * row[f'{how}_seconds'])} ms: **{number(row[f'{how}_slower'])}**"
                    if f"{how}_seconds" in row
                    else "–"
                    for how in ("plain", "compiled")
                ]
                coordinates = f"{number(row['coordinates'])} ({number(row['paper_error'])})"
                probes = f"{row['probes']} ({number(row['error'])})"
                rows.append([title, state, coordinates, f"{number(1e3 * row['paper_seconds'])} ms", probes, *times])
            sampled = measured["sampled"]
        if model.get("states"):
            costs.append(
                f"- {model['title']}: {number(1e3 * model['opacus_seconds'])} ms for Opacus's step, "
                f"{number(1e3 * model['coordinate_seconds'])} ms for a coordinate of the batch; errors from "
                f"{sampled['coordinates']} coordinates and {sampled['draws']} draws of probes for "
                f"{sampled['examples']} examples"
            )

    head = ["", "weights", "coordinates (error)", "the paper's step", "probes (error)"]
    return (
        "## The paper's method against probes, at equal standard error of a step\n\n"
        + table([*head, "`train_step`: how many times faster", "compiled"], rows)
        + "\nThe error is the relative standard deviation of a step's estimate, root mean square over examples. For "
        "one and three probes as many coordinates (at least one) as have their error, for the paper's 50 coordinates "
        "as many probes (at least two) as have theirs. Whole steps from one run, Opacus's included in the paper's. A "
        "single probe also samples the part of the Fisher information along the gradient, which may be large in a "
        "trained network.\n\n" + "\n".join(costs) + "\n"
    )


def _run(run: dict[str, Any]) -> str:
    rows = [[title, f"{number(seconds)} s"] for title, seconds in run["seconds"].items()]
    return (
        f"## A whole run: MNIST CNN, {run['examples']:,} examples, {run['epochs']} epochs of batches of "
        f"{run['batch']}\n\n" + table(["", "from start to end"], rows) + f"\ntorchfil with rel_error = "
        f"{run['rel_error']:g} takes **{number(run['ratio'])}** of Opacus's time, capturing graphs included; the "
        f"median relative standard error of FIL at the end is {number(run['median_relative_error'])}.\n"
    )


def _cell(row: dict[str, Any]) -> str:
    """Multiple of Opacus's step, time and memory."""
    if "failed" in row:
        return "failed"
    if "seconds" not in row:
        return "–"
    memory = "" if row.get("peak_gb") is None else f", {number(row['peak_gb'])} GB"
    return f"**{number(row.get('ratio'))}** ({number(1e3 * row['seconds'])} ms{memory})"


def _large(models: dict[str, Any]) -> str:
    columns = [
        (f"{model['title']}, batch {model['batch']}, {precision}", rows)
        for model in models.values()
        for precision, rows in model.get("precisions", {}).items()
    ]
    titles = list(dict.fromkeys(title for _, rows in columns for title in rows))
    cells = [[title, *(_cell(rows.get(title, {})) for _, rows in columns)] for title in titles]
    return (
        "## Models at full size\n\n"
        + table(["", *(name for name, _ in columns)], cells)
        + "\nMultiples of Opacus's step with hooks in the same precision; one method at a time has the device. Random "
        "weights, dropout and masks as the libraries have them. Memory is the peak of building and eight steps.\n"
    )


def _costs(models: dict[str, Any]) -> str:
    titles = list(dict.fromkeys(title for model in models.values() for title in model.get("rows", {})))

    def paper(ratio: float | None, seconds: float | None) -> str:
        return "–" if ratio is None or seconds is None else f"**{number(ratio)}** ({number(1e3 * seconds)} ms)"

    papers = [model.get("paper", {}) for model in models.values()]
    rows = [[title, *(_cell(model.get("rows", {}).get(title, {})) for model in models.values())] for title in titles]
    fifty = [paper(cost.get("fifty_ratio"), cost.get("fifty_seconds")) for cost in papers]
    rows.append(["the paper's method, 50 coordinates *", *fifty])
    head = ["", *(f"{model.get('title', name)}, batch {model.get('batch', '?')}" for name, model in models.items())]
    return (
        "## Steps, in multiples of Opacus's hooks\n\n" + table(head, rows) + "\nPeak memory includes model, data and, "
        "for a CUDA graph, its capture. “rel_error” is a mean over steps, as steps differ on purpose.\n\n"
        "\\* An Opacus step plus `vmap(jvp(clip(grad(loss))))` for each coordinate: one coordinate is timed (on a CPU "
        "for some examples of the batch only, see below) and counted linearly.\n\n"
        + "\n".join(_coordinates(models))
        + "\n"
    )


def _coordinates(models: dict[str, Any]) -> Iterable[str]:
    """The cost of a coordinate, one line for each model."""
    for name, model in models.items():
        paper, title = model.get("paper", {}), model.get("title", name)
        if "coordinate_seconds" in paper:
            mapped, peak = paper.get("mapped_coordinate_seconds"), paper.get("coordinate_peak_gb")
            by_reverse = f", by reverse over reverse mode {number(1e3 * mapped)} ms" if mapped else ""
            memory = f", {number(peak)} GB" if peak is not None else ""
            yield (
                f"- {title}: {number(1e3 * paper['coordinate_seconds'])} ms for a coordinate of the batch (timed on "
                f"{paper['timed_examples']} examples{memory}){by_reverse}"
            )


def _growth(growth: dict[str, Any]) -> str:
    parts = ["## Growth\n"]
    for kind, rows in growth.items():
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


def _examples(examples: dict[str, Any]) -> str:
    """Seconds, memory and their growth with the number of examples."""
    rows = [
        [
            stage,
            *(f"{number(s)} s, {number(gb)} GB" for s, gb in zip(seconds, examples["peak_gb"][stage], strict=True)),
            number(examples.get("power", {}).get(stage)),
        ]
        for stage, seconds in examples["seconds"].items()
    ]
    details = examples["details"]
    rows.append(["bytes an example: ledger and norm history", *(number(d["bytes_an_example"]) for d in details), ""])
    rows.append(["run file", *(f"{number(d['file_gb'])} GB" for d in details), ""])
    head = ["", *(f"{size:,} examples" for size in examples["sizes"]), "power"]
    drawn = "every example drawn" if examples["all_drawn"] else "5 steps of batch 4,096 with trace and individual ε"
    return (
        f"## Many examples: {drawn}\n\n"
        + table(head, rows)
        + "\nCPU seconds and peak resident memory of a process for each, the import of torch and torchfil included; "
        f"an example that was drawn takes {details[-1]['bytes_an_example_drawn']} bytes.\n"
    )


def _precision(models: dict[str, Any]) -> str:
    rows = []
    for model in models.values():
        for title, row in model["rows"].items():
            values = [number(row.get(key), 2) for key in ("trace_median", "trace_largest", "sum")]
            rows.append(
                [model["title"], title, *(["failed", "", "", ""] if "failed" in row else [*values, row["path"]])]
            )
    head = ["", "", "traces, median", "traces, largest", "clipped sum", "computed"]
    return "## Relative errors of lower precision, against float64\n\n" + table(head, rows)


def _failures(results: Any, where: str = "") -> Iterable[tuple[str, str]]:
    """Every "failed" in the results, with the path to it."""
    if not isinstance(results, dict):
        return
    for key, value in results.items():
        if key == "failed" and isinstance(value, str):
            yield where, value
        else:
            yield from _failures(value, f"{where}, {key}" if where else str(key))
