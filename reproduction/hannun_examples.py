"""Hannun et al. 2021: whose η is large (Figures 1 to 4)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from glm_table1 import CLASSES, COLOURS
from matplotlib.figure import Figure

from reproduction.hannun_table1 import DATA, NEEDS, trained
from reproduction.rows import Outcome, Row, Run, check_near, check_that
from torchfil.glm import LinearRegression

__all__ = ["ROWS"]


def figure_1(run: Run) -> Outcome:
    """η of an example, of an attribute and of a group, against blocks of the Jacobian of all
    data.
    """
    task = run.data("iwpc").iwpc()
    n = 40
    X, y = task.train_inputs[:n], task.train_targets[:n]
    columns = list(task.attributes["vkorc1"])
    model = LinearRegression(l2=1e-2).fit(X, y)

    # w* as a function of all data at once, differentiated by autograd: [d, n, d + 1].
    def minimiser(data: torch.Tensor) -> torch.Tensor:
        inputs, targets = data[:, :-1], data[:, -1]
        hessian = inputs.T @ inputs + n * 1e-2 * torch.eye(inputs.shape[1], dtype=data.dtype)
        return torch.linalg.solve(hessian, inputs.T @ targets)

    data = torch.as_tensor(np.column_stack([X, y]), dtype=torch.float64)
    jacobian: Any = torch.autograd.functional.jacobian(minimiser, data)
    jacobian = jacobian.numpy()
    width = jacobian.shape[0]

    groups = np.arange(n) % 2
    pairs = {
        "an example": (model.fil(X, y), [np.linalg.norm(jacobian[:, i], 2) for i in range(n)]),
        "an attribute of an example": (
            model.fil(X, y, attributes={"a": columns})["a"],
            [np.linalg.norm(jacobian[:, i, columns], 2) for i in range(n)],
        ),
        "a group": (
            list(model.fil(X, y, groups=list(groups)).values()),
            [np.linalg.norm(jacobian[:, groups == g].reshape(width, -1), 2) for g in (0, 1)],
        ),
    }
    errors = {
        name: float(np.max(np.abs(np.array(a) / np.array(b) - 1))) for name, (a, b) in pairs.items()
    }
    rule = "relative difference below 1e-6"
    checks = [
        check_that(f"η of {name}", "a block of the FIM", f"{e:.1e} off", rule, e < 1e-6)
        for name, e in errors.items()
    ]
    here = (
        f"closed forms and blocks of the full Jacobian ({width} × {jacobian[0].size}) differ by "
        f"{max(errors.values()):.0e} at most"
    )
    return Outcome(here, tuple(checks), {"relative differences": errors})


def figure_2(run: Run, data: str) -> Outcome:
    """Histograms of η by class, both models."""
    more, less = (0, 1) if data == "MNIST" else (1, 0)  # which class leaks more, by the paper
    figure = Figure(figsize=(8, 3), layout="constrained")
    checks, told = [], []
    for axis, kind in zip(figure.subplots(1, 2), ("linear", "logistic"), strict=True):
        setting = trained(run, f"{data} {kind}")
        bins = np.histogram_bin_edges(setting.eta, 60)
        means = [float(setting.eta[setting.classes == k].mean()) for k in (0, 1)]
        for k in (0, 1):
            axis.hist(
                setting.eta[setting.classes == k],
                bins,
                color=COLOURS[k],
                alpha=0.65,
                label=CLASSES[data][k],
            )
            axis.axvline(means[k], color=COLOURS[k], linestyle="--")
        axis.set(title=f"{data}, {kind}", xlabel="η", ylabel="examples")
        told.append(f"{kind}: {CLASSES[data][0]} {means[0]:.4f}, {CLASSES[data][1]} {means[1]:.4f}")
        who = CLASSES[data][more]
        checks.append(
            check_that(
                f"{kind}: larger mean η", who, told[-1], f"{who} above", means[more] > means[less]
            )
        )
    axis.legend(frameon=False)
    name = f"repro_hannun_figure2_{data.lower()}.png"
    figure.savefig(run.out / name, dpi=80)
    return Outcome("mean η, " + "; ".join(told), tuple(checks), pictures=(name,))


def figure_3(run: Run, data: str, count: int = 8) -> Outcome:
    """Images with the smallest and largest η, and how many of the hundred largest both models
    share.
    """
    settings = {kind: trained(run, f"{data} {kind}") for kind in ("linear", "logistic")}
    readers = run.data(*NEEDS[data])
    pixels: np.ndarray
    if data == "MNIST":
        pixels = readers.mnist_zero_one(components=None, scaled=False).train_inputs.reshape(
            -1, 28, 28
        )
    else:
        pixels = readers.cifar_plane_car(components=None, scaled=False).train_inputs.reshape(
            -1, 32, 32, 3
        )

    figure = Figure(figsize=(8, 4.6), layout="constrained")
    axes = figure.subplots(4, count)
    for part, (kind, setting) in enumerate(settings.items()):
        order = np.argsort(setting.eta)
        for row, chosen in ((2 * part, order[:count]), (2 * part + 1, order[::-1][:count])):
            for axis, example in zip(axes[row], chosen, strict=True):
                axis.imshow(pixels[example], cmap="gray")
                axis.set_title(f"{setting.eta[example]:.3f}", fontsize=8, pad=2)
                axis.set(xticks=[], yticks=[])
            axes[row, 0].set_ylabel(
                f"{kind}\n{'smallest' if row % 2 == 0 else 'largest'}", fontsize=8
            )
    name = f"repro_hannun_figure3_{data.lower()}.png"
    figure.savefig(run.out / name, dpi=70)

    # The smallest are typical images of one class; the paper's text has the overlap.
    usual = 1 if data == "MNIST" else 0
    shares = [
        float((s.classes[np.argsort(s.eta)[:100]] == usual).mean()) for s in settings.values()
    ]
    largest = [set(np.argsort(setting.eta)[-100:].tolist()) for setting in settings.values()]
    shared, theirs = len(largest[0] & largest[1]), 24 if data == "MNIST" else 34
    who = CLASSES[data][usual]
    told = f"{100 * shares[0]:.0f} % (linear) and {100 * shares[1]:.0f} % (logistic)"
    checks = (
        check_that(
            "the smallest η",
            f"{who}s",
            told,
            f"most of the 100 smallest are {who}s",
            min(shares) > 0.5,
        ),
        check_near("of the 100 largest η, in both models", theirs, shared, 10, 0),
    )
    return Outcome(
        f"of the 100 smallest η, {told} are {who}s; {shared} of the 100 largest are shared",
        checks,
        pictures=(name,),
    )


def figure_4(run: Run, count: int = 2000) -> Outcome:
    """η against the loss and the gradient's norm, MNIST linear, 2,000 examples."""
    setting = trained(run, "MNIST linear")
    shown = np.random.default_rng(0).permutation(len(setting.targets))[:count]
    X, eta, classes = setting.inputs[shown], setting.eta[shown], setting.classes[shown]
    residual = setting.model.margin(X) - setting.targets[shown]
    alternatives = {
        "loss ℓ": 0.5 * np.square(residual),
        "gradient norm ‖∇ℓ‖": np.abs(residual) * np.linalg.norm(X, axis=1),
    }
    figure = Figure(figsize=(8, 3), layout="constrained")
    correlations = {}
    for axis, (label, values) in zip(
        figure.subplots(1, 2, sharey=True), alternatives.items(), strict=True
    ):
        correlations[label] = float(np.corrcoef(values, eta)[0, 1])
        for k in (0, 1):
            axis.scatter(
                values[classes == k],
                eta[classes == k],
                s=4,
                color=COLOURS[k],
                label=CLASSES["MNIST"][k],
            )
        axis.set(xlabel=label, title=f"correlation {correlations[label]:.2f}")
    figure.axes[0].set_ylabel("η")
    figure.axes[1].legend(frameon=False)
    figure.savefig(run.out / "repro_hannun_figure4.png", dpi=70)

    # "A low η invariably implies a low loss": where the losses of the fifth with the lowest η lie
    # among all losses.
    loss = alternatives["loss ℓ"]
    low = eta <= np.quantile(eta, 0.2)
    highest = float((loss <= loss[low].max()).mean())
    above = float((loss[eta >= np.quantile(eta, 0.9)] < np.median(loss)).mean())
    checks = [
        check_that(f"η and {label}", "correlated", f"{value:.2f}", "correlation above 0", value > 0)
        for label, value in correlations.items()
    ]
    checks += [
        check_that(
            "a low η",
            "a low loss",
            f"largest loss at quantile {highest:.2f}",
            "the fifth of lowest η has no loss above the 95 % quantile",
            highest <= 0.95,
        ),
        check_that(
            "a high η",
            "occurs at any loss",
            f"{100 * above:.0f} % of the top tenth",
            "some of the top tenth have a loss below the median",
            above > 0,
        ),
    ]
    told = "; ".join(
        f"correlation with the {label} {value:.2f}" for label, value in correlations.items()
    )
    here = f"{told}. Of the tenth of highest η, {100 * above:.0f} % have a loss below the median"
    return Outcome(here, tuple(checks), pictures=("repro_hannun_figure4.png",))


ROWS = (
    Row(
        "hannun-figure1",
        "hannun",
        "Figure 1",
        "an illustration: the FIM of an example or attribute is a block of that of all data",
        "IWPC, 40 patients",
        figure_1,
        0.1,
        ("iwpc",),
    ),
    *(
        Row(
            f"hannun-figure2-{data.lower()}",
            "hannun",
            f"Figure 2, {data}",
            theirs,
            DATA[data],
            lambda run, data=data: figure_2(run, data),  # type: ignore[misc]
            0.5,
            NEEDS[data],
        )
        for data, theirs in (
            ("MNIST", "two modes; digit 0 has the larger η, in both models"),
            ("CIFAR", "class means apart; cars have the larger η, in both models"),
        )
    ),
    *(
        Row(
            f"hannun-figure3-{data.lower()}",
            "hannun",
            f"Figure 3, {data}",
            theirs,
            DATA[data],
            lambda run, data=data: figure_3(run, data),  # type: ignore[misc]
            0.5,
            NEEDS[data],
        )
        for data, theirs in (
            (
                "MNIST",
                "the smallest η are ones written in a very typical manner, the largest "
                "idiosyncratic; 24 of the 100 largest in both models",
            ),
            (
                "CIFAR",
                "the smallest η are small planes on blue sky, the largest idiosyncratic; 34 of "
                "the 100 largest in both models",
            ),
        )
    ),
    Row(
        "hannun-figure4",
        "hannun",
        "Figure 4",
        "η correlates with loss and gradient norm; a low η means a low loss, a high η occurs "
        "throughout",
        DATA["MNIST"] + ", 2,000 of them",
        figure_4,
        0.3,
        ("mnist",),
    ),
)
