"""What was trained, on what, how."""

from __future__ import annotations

from typing import Any

from torchfil.report.page.context import Report, paragraph
from torchfil.report.page.html import Markup, join, number, table, tag

__all__ = ["render"]


def render(report: Report) -> Markup | None:
    """Model, data, mechanism, budget, versions, as one table; what the run does not say is left out."""
    mechanism, dataset = "mechanism", "dataset"
    shape, seed = report.about(dataset, "input_shape"), report.about("probe_seed")
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
        ("How σ was chosen", _noise_choice(report)),
        ("Clipping norm C", _clipping(report)),
        ("Sampling rate q", report.about(mechanism, "sample_rate")),
        ("Divisor of a step's noisy sum", report.about(mechanism, "expected_batch_size")),
        ("Steps T", report.about(mechanism, "steps")),
        ("Precision of the probes' products", report.about(mechanism, "probe_precision")),
        ("ε", _epsilon(report)),
        ("Noise and Poisson draws", report.about(mechanism, "noise")),
        ("Seed of the probes", None if seed is None else str(seed)),
        ("Hash of the data (SHA-256)", tag("code", str(digest)) if digest else None),
        ("Versions", ", ".join(f"{name} {v}" for name, v in (report.about("versions") or {}).items()) or None),
    ]
    shown = [[name, _shown(value)] for name, value in rows if value not in (None, "", [])]

    private = None
    if not report.summary.redacted and digest:
        hashed = "Somebody who knows all examples but one can try values of that one until the hash fits."
        private = paragraph(f"Keep the hash private. {hashed}", class_="note")
    return join(table([], shown, class_="facts"), private)


def _noise_choice(report: Report) -> str | None:
    """What the pilots aimed at; how many they were, and whether the run keeps to it, where examples may be shown."""
    choice = report.about("noise_choice")
    if choice is None or choice.get("target") is None:
        return None
    confidence = choice.get("confidence")
    aim = str(choice["target"]) + (f" (confidence {100 * confidence:g} %)" if confidence is not None else "")
    if report.summary.redacted:
        return (
            f"By pilots, trainings of copies on the same data, for this target: {aim}. Whether the run met it rests on "
            "its most exposed examples and is not part of this version. ε and the bounds take σ as given."
        )
    pilots, headroom = choice.get("num_pilots"), choice.get("headroom")
    many = "pilots" if pilots is None else f"{pilots:g} pilot{'s' * (pilots != 1)}"
    verdict = "Whether the run met it was not saved"
    if headroom is not None:
        short = f"missed it by a factor of {number(1 / headroom)}" if headroom > 0 else "cannot tell whether it met it"
        verdict = "This run met it" if headroom >= 1 else f"This run {short}"
        verdict += f" ({choice['measured']})" if choice.get("measured") else ""
    return (
        f"By {many}, trainings of copies on the same data, for this target: {aim}. {verdict}. ε and the bounds take σ "
        "as given and count this run alone: keep the pilots confidential, their number included."
    )


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
