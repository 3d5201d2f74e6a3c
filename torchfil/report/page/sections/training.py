"""What was trained, on what, how."""

from __future__ import annotations

from typing import Any

from torchfil.report.page.context import Report, paragraph
from torchfil.report.page.html import Markup, join, number, table, tag

__all__ = ["render"]


def render(report: Report) -> Markup | None:
    """Model, data, mechanism, budget, versions, as one table; what the run does not say is left out."""
    mechanism, dataset = "mechanism", "dataset"
    shape, seed = report.about(dataset, "input_shape"), report.about("seed")
    digest = report.about(dataset, "data_sha256")
    rows = [
        ("Model", report.about("model", "class") or report.about("model", "name")),
        ("Parameters", report.about("model", "num_parameters")),
        ("Examples", report.summary.examples),
        ("Private inputs of an example", report.about(dataset, "num_coordinates")),
        ("Private inputs of the longest example", report.about(dataset, "most_coordinates")),
        ("Shape of an input", " × ".join(map(str, shape)) if isinstance(shape, list | tuple) else None),
        ("Unit of inputs", report.about("unit_of_inputs")),
        ("Noise multiplier σ", report.about(mechanism, "noise_multiplier")),
        ("Clipping norm C", _clipping(report)),
        ("Sampling rate q", report.about(mechanism, "sample_rate")),
        ("Steps T", report.about(mechanism, "steps")),
        ("Precision of the probes' products", report.about(mechanism, "probe_precision")),
        ("ε", _epsilon(report)),
        ("Seed", None if seed is None else str(seed)),
        ("Hash of the data (SHA-256)", tag("code", str(digest)) if digest else None),
        ("Versions", ", ".join(f"{name} {v}" for name, v in (report.about("versions") or {}).items()) or None),
    ]
    shown = [[name, _shown(value)] for name, value in rows if value not in (None, "", [])]

    private = None
    if not report.summary.redacted and (seed is not None or digest):
        private = paragraph(
            "Keep seed and hash private. Who knows all other examples can try values of the last until the hash "
            "fits; who knows the seed can compute the noise, unless the run drew it in secure mode.",
            class_="note",
        )
    return join(table([], shown, class_="facts"), private)


def _epsilon(report: Report) -> str | None:
    epsilon, delta, accountant = report.about("epsilon"), report.about("delta"), report.about("accountant")
    if epsilon is None:
        return None
    at = f" at δ = {number(delta)}" if delta is not None else ""
    return f"{number(epsilon)}{at}" + (f" ({accountant} accountant)" if accountant else "")


def _shown(value: Any) -> Any:
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return value if isinstance(value, str) else "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return number(value) if isinstance(value, float) else str(value)


def _clipping(report: Report) -> str | None:
    norm, clip = report.about("mechanism", "max_grad_norm"), report.about("mechanism", "clip")
    if norm is None:
        return None
    return number(float(norm)) + (f", by the function “{clip}”" if clip else "")
