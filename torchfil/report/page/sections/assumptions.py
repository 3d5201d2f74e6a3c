"""What the numbers assume, in plain words."""

from __future__ import annotations

from torchfil.report.page.context import Report, paragraph
from torchfil.report.page.html import Markup, join, tag

__all__ = ["render"]


def render(report: Report) -> Markup | None:
    """Attacker, batches, clipping, and which numbers are exact, estimated or bounds."""
    points = [
        ("The attacker", _attacker(report)),
        ("The batches", _batches(report)),
        ("Clipping", _clipping(report)),
        ("Exact, estimated, bound", _certainty(report)),
        (
            "The model",
            "Its output must change smoothly with its inputs; with ReLU or max pooling the numbers do not hold.",
        ),
    ]
    return join(
        paragraph(
            "Fisher information loss (FIL, η̄) tells how much the released model changes when an example’s "
            "inputs change a little. Its inverse square is a floor under the mean squared error of every "
            "unbiased guess of these inputs: the larger the bound, the safer the example."
        ),
        tag("dl", [join(tag("dt", name), tag("dd", text)) for name, text in points if text], class_="points"),
    )


def _attacker(report: Report) -> str:
    return (
        "Knows the model, every other example, all settings and every noisy gradient of the training, and guesses "
        "without bias: right on average. An attacker who mixes in beliefs about the data is biased and may err less; "
        "only the bound on reconstruction (ReRo) holds for every attacker."
    )


def _batches(report: Report) -> str | None:
    poisson, amplification = report.about("mechanism", "poisson"), report.about("mechanism", "amplification")
    if poisson is None:
        return None
    if not poisson:
        return (
            "Batches were not drawn independently (no Poisson sampling), while the accountant’s ε assumes that they "
            "were: read ε as nominal. The attacker is taken to know which batches an example was in."
        )
    if not amplification or str(amplification).lower() in ("none", "known"):
        return "Each example entered each batch by chance, and the attacker is taken to know which batches it was in."
    return (
        "Each example entered each batch independently by chance, and the attacker does not know which. The "
        "numbers are sums over the batches of this one run; how far chance can have moved them is the sampling "
        "error. An example that no batch drew has not been measured."
    )


def _clipping(report: Report) -> str | None:
    norm, clip = report.about("mechanism", "max_grad_norm"), report.about("mechanism", "clip")
    if norm is None:
        return None
    how = f" by the smooth function “{clip}”" if clip and clip != "hard" else ""
    return (
        f"Each example’s gradient is scaled{how} to a norm of at most {norm:g} before noise is added; "
        "what clipping hides is counted as hidden."
    )


def _certainty(report: Report) -> str:
    exact, probes = report.about("exact"), report.about("mechanism", "num_probes")
    rate, target = report.about("mechanism", "fil_rate"), report.about("mechanism", "rel_error")
    if exact:
        how = "FIL was computed exactly at every step of this run."
    elif target is not None:
        how = (
            "FIL is an unbiased estimate; random probes and the share of steps were chosen for a relative standard "
            f"error of {100 * target:g} % for the median example; its error stands beside it."
        )
    else:
        drawn = f" from {probes} random probe{'s' if probes != 1 else ''} a step" if probes else ""
        some = f", on {100 * rate:g} % of the steps" if rate is not None and rate < 1 else ""
        how = f"FIL is an unbiased estimate{drawn}{some}; its standard error stands beside it."
    return (
        f"{how} The MSE bound is a floor for unbiased attackers computed from it, and its “low end” is the lower "
        "end of its 95 % interval. The bounds from ε are proven, the same for all, and loose. An example’s own ε "
        "is output-specific: an estimate from this one run, not a guarantee."
    )
