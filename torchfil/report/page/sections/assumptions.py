"""What the numbers assume, in plain words."""

from __future__ import annotations

from torchfil.report.page.context import Report, paragraph
from torchfil.report.page.html import Markup, join, tag
from torchfil.report.page.sections import linear
from torchfil.report.page.wording import is_linear, num_merged, over

__all__ = ["render"]


def render(report: Report) -> Markup | None:
    """Attacker, batches, clipping, which numbers are estimates and which bounds, and what is not counted."""
    points = [
        ("The attacker", _attacker(report)),
        ("The batches", _batches(report)),
        ("What ε compares", _adjacency(report)),
        ("Clipping", _clipping(report)),
        ("Noise", _NOISE.get(str(report.about("mechanism", "noise")))),
        ("Weights", _weights(report)),
        ("Estimates and bounds", _certainty(report)),
        (
            "The model",
            "Its output must change smoothly with its inputs; with ReLU or max pooling the numbers do not hold.",
        ),
        (
            "Augmentation",
            "The numbers are about the tensors that the model saw. Where flips, crops or other views were drawn at "
            "random, FIL is about the views.",
        ),
        (
            "Not counted",
            "Early stopping, choosing among models, and learning-rate schedules that look at losses on private data "
            "give something away themselves. Neither ε nor FIL counts it, nor other runs on the same data.",
        ),
    ]
    points = linear.assumptions(report) if is_linear(report) else points

    return join(
        paragraph(
            "Fisher information loss (FIL, η̄) tells how much the released model changes when an example’s "
            f"inputs change a little. The inverse of its mean square {over(report)} is a lower bound of the "
            "mean squared error of every unbiased guess of these inputs: the larger the bound, the safer the example."
        ),
        tag("dl", [join(tag("dt", name), tag("dd", text)) for name, text in points if text], class_="points"),
    )


_REAL = "ε and the bounds assume noise in real arithmetic; computers round it."
_NOISE = {
    "OS-seeded": (
        "Noise and draws came from generators of their own, which the operating system seeded with at least 63 bits. "
        f"They are good generators, but not cryptographic ones. {_REAL}"
    ),
    "cryptographic": f"Noise and draws came from the operating system’s cryptographic generator. {_REAL}",
    "seeded": (
        "Noise and draws were seeded, as for a test: whoever has the seed or a checkpoint can subtract the noise, and "
        "then neither ε nor any bound holds. Do not release this model."
    ),
}


def _attacker(report: Report) -> str:
    return (
        "Knows the model, every other example, all settings and every noisy gradient of the training, and guesses "
        "without bias: right on average over repeated trainings. An attacker who mixes in beliefs about the data is "
        "biased and may err less; ε and the bound on reconstruction (ReRo) hold for every attacker."
    )


def _batches(report: Report) -> str | None:
    poisson, amplification = report.about("mechanism", "poisson"), report.about("mechanism", "amplification")
    if poisson is None:
        return None
    if not poisson:
        came = (
            "The examples came as a stream"
            if report.about("mechanism", "stream")
            else "Batches were passes over the data"
        )
        return (
            f"{came}, in an order that the attacker is taken to know, so subsampling gives no amplification. ε counts "
            "how often the most frequent example took part."
        )
    if not amplification or str(amplification).lower() in ("none", "known"):
        return "Each example entered each batch by chance, and the attacker is taken to know which batches it was in."
    return (
        "Each example entered each batch independently by chance, and the attacker does not know which. The "
        "numbers are sums over the batches of this one run; how much the random choice of batches could change them is "
        "the sampling error. An example that no batch drew has not been measured."
    )


def _adjacency(report: Report) -> str | None:
    if report.about("mechanism", "poisson") is None:
        return None
    return (
        "This training and one in which an example’s gradients are left out, while all others keep their places, and "
        "the number of examples, the sampling rate and the divisor of the noisy sums stay the same (“zero-out”). The "
        "same holds for questions about whether somebody took part."
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


def _weights(report: Report) -> str | None:
    if report.summary.spared is None:
        return None
    return (
        "Some examples’ gradients were multiplied by a weight of their own, at most 1, after clipping, so that they "
        "leak less; the noise stayed the same. All numbers here take these weights as fixed: the bounds on unbiased "
        "attackers, on average over repeated trainings with the same weights and new batches and noise, as well as ε "
        "and the numbers that hold for every attacker. Weights that were computed from private data, as "
        "torchfil.equalise does, tell something themselves, for instance that a spared person stood out, and nothing "
        "here counts it: keep them as confidential as the data. Weights that were set from public attributes alone "
        "tell nothing."
    )


def _certainty(report: Report) -> str:
    exact, probes = report.about("exact"), report.about("mechanism", "num_probes")
    rate, target = report.about("mechanism", "fil_rate"), report.about("mechanism", "rel_error")
    if exact:
        how = "FIL was computed without probes at every step of this run."
    elif target is not None:
        how = (
            "FIL was measured with random probes, at some of the steps, chosen for a relative standard error of "
            f"{100 * target:g} % for the median example; it stands beside each."
        )
    else:
        drawn = f" from {probes} random probe{'s' if probes != 1 else ''} a step" if probes else ""
        some = f", on {100 * rate:g} % of the steps" if rate is not None and rate < 1 else ""
        how = f"FIL was measured{drawn}{some}; the standard error of the probes stands beside it."

    # several runs show how far they differ; of one run that is an estimate, too
    if num_merged(report) > 1:
        return (
            f"FIL² is the mean over {num_merged(report)} runs, and its error the one from run to run; the MSE bound is "
            "its inverse. The “low end” is the lower end of the bound’s 95 % interval, of each example by itself. The "
            "bounds from ε are proven, the same for all, and loose."
        )
    return (
        f"{how} FIL² and the MSE bound, its inverse, are estimates from one run: with other batches and other noise "
        "the training would have gone another way, and an inverse of an estimate is too large on average. The “low "
        "end” is the lower end of the bound’s 95 % interval, of each example by itself, which allows for probes, "
        "batches and the way that the noise has led the weights. The bounds from ε are proven, the same for all, and "
        "loose. An example’s own ε is an estimate that belongs to this run’s outputs."
    )
