"""The results as a page."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from benchmarks.measuring import Json

__all__ = ["page"]


def page(results: Json) -> str:
    """Markdown of everything that was measured."""
    machine = results["machine"]
    parts = [
        f"# What the accounting costs on {machine['device']}\n\n"
        f"`python -m benchmarks{' --quick' if results['quick'] else ''}`, torch "
        f"{machine['torch']}, Opacus {machine['opacus']}, {machine['threads']} CPU threads. Whole "
        "training steps, noise and update included, drawing batches not. The methods take turns; "
        "medians.\n"
    ]
    if results["quick"]:
        parts.append(
            "A quick run: few repeats and draws, smaller batches on a CPU. Its numbers are rough.\n"
        )
    if results.get("models"):
        parts.append(_costs(results["models"]))
    if results.get("run", {}).get("seconds"):
        parts.append(_run(results["run"]))
    reasons = list(_failures(results))
    if reasons:
        parts.append(
            "## What did not run\n\n"
            + "\n".join(f"- {where}: {why}" for where, why in reasons)
            + "\n"
        )
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


def _run(run: Json) -> str:
    rows = [[title, f"{number(seconds)} s"] for title, seconds in run["seconds"].items()]
    return (
        f"## A whole run: MNIST CNN, {run['examples']:,} examples, {run['epochs']} epochs of "
        f"batches of {run['batch']}\n\n"
        + table(["", "from start to end"], rows)
        + f"\ntorchfil with rel_error = {run['rel_error']:g} takes **{number(run['ratio'])}** of "
        "Opacus's time, capturing graphs included; the median relative standard error of FIL "
        f"at the end is {number(run['median_relative_error'])}.\n"
    )


def _cell(row: Json) -> str:
    """Multiple of Opacus's step, time and memory."""
    if "failed" in row:
        return "failed"
    if "seconds" not in row:
        return "–"
    memory = "" if row.get("peak_gb") is None else f", {number(row['peak_gb'])} GB"
    return f"**{number(row.get('ratio'))}** ({number(1e3 * row['seconds'])} ms{memory})"


def _costs(models: Json) -> str:
    titles = list(
        dict.fromkeys(title for model in models.values() for title in model.get("rows", {}))
    )

    def paper(ratio: float | None, seconds: float | None) -> str:
        return (
            "–"
            if ratio is None or seconds is None
            else f"**{number(ratio)}** ({number(1e3 * seconds)} ms)"
        )

    papers = [model.get("paper", {}) for model in models.values()]
    rows = [
        [title, *(_cell(model.get("rows", {}).get(title, {})) for model in models.values())]
        for title in titles
    ]
    fifty = [paper(cost.get("fifty_ratio"), cost.get("fifty_seconds")) for cost in papers]
    rows.append(["the paper's method, 50 coordinates *", *fifty])
    head = [
        "",
        *(
            f"{model.get('title', name)}, batch {model.get('batch', '?')}"
            for name, model in models.items()
        ),
    ]
    return (
        "## Steps, in multiples of Opacus's hooks\n\n"
        + table(head, rows)
        + "\nPeak memory includes model, data and, for a CUDA graph, its capture. “rel_error” is "
        "a mean over steps, as steps differ on purpose.\n\n"
        "\\* An Opacus step plus `vmap(jvp(clip(grad(loss))))` for each coordinate: one "
        "coordinate is timed (on a CPU for some examples of the batch only, see below) and "
        "counted linearly.\n\n" + "\n".join(_coordinates(models)) + "\n"
    )


def _coordinates(models: Json) -> Iterable[str]:
    """The cost of a coordinate, one line for each model."""
    for name, model in models.items():
        paper, title = model.get("paper", {}), model.get("title", name)
        if "coordinate_seconds" in paper:
            peak = paper.get("coordinate_peak_gb")
            memory = f", {number(peak)} GB" if peak is not None else ""
            yield (
                f"- {title}: {number(1e3 * paper['coordinate_seconds'])} ms for a coordinate of "
                f"the batch (timed on {paper['timed_examples']} examples{memory})"
            )


def _failures(results: Any, where: str = "") -> Iterable[tuple[str, str]]:
    """Every "failed" in the results, with the path to it."""
    if not isinstance(results, dict):
        return
    for key, value in results.items():
        if key == "failed" and isinstance(value, str):
            yield where, value
        else:
            yield from _failures(value, f"{where}, {key}" if where else str(key))
