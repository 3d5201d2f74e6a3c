"""Table 1 of Hannun et al. 2021 next to ours, with figures 2 to 5, on MNIST 0/1 and CIFAR
plane/car.

Without the data's files, it runs on a small stand-in and says so (examples/README.md).

TORCHFIL_DATA=/path/to/data python examples/glm_table1.py --out out
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import numpy as np
from paper_data import PaperData

from torchfil.glm import (
    IRFIL,
    GeneralizedLinearModel,
    LinearRegression,
    LogisticRegression,
    iteratively_reweighted_fil,
)

matplotlib.use("Agg")
from matplotlib import pyplot

PAPER = {
    "MNIST linear": ("0.040 ± 0.014, 100", "0.047 ± 0.000, 99.8"),
    "MNIST logistic": ("0.027 ± 0.012, 99.8", "0.024 ± 0.000, 99.7"),
    "CIFAR linear": ("0.26 ± 0.08, 79.8", "0.30 ± 0.00, 80.7"),
    "CIFAR logistic": ("0.32 ± 0.15, 79.9", "0.25 ± 0.00, 79.1"),
}
COLOURS = ("#0072B2", "#E69F00")  # colour-blind readers can distinguish them
CLASSES = {"MNIST": ("digit 0", "digit 1"), "CIFAR": ("plane", "car")}


@dataclass(frozen=True)
class Setting:
    """One model on one data set, unweighted (``model``) and reweighted (``result``)."""

    inputs: np.ndarray
    targets: np.ndarray
    classes: np.ndarray
    model: GeneralizedLinearModel
    result: IRFIL

    @property
    def eta(self) -> np.ndarray:
        """η of every example in the unweighted model, [n]."""
        return self.result.etas[0]


def main() -> None:
    """Print the table and save the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("out"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    data_sets = PaperData("mnist", "cifar10")
    tasks = {
        "MNIST": (data_sets.mnist_zero_one(), 8e-4),
        "CIFAR": (data_sets.cifar_plane_car(), 8e-5),
    }

    settings: dict[str, Setting] = {}
    print(f"{'':<16}{'paper: mean η ± std, accuracy':>32}{'ours':>28}")
    for data, (task, l2) in tasks.items():
        X, y = task.train_inputs, task.train_targets
        for name, model, targets in (
            ("linear", LinearRegression(), 2 * y - 1),
            ("logistic", LogisticRegression(l2=l2), y),
        ):
            result = iteratively_reweighted_fil(model, X, targets, rounds=15)
            plain = model.fit(X, targets)
            settings[f"{data} {name}"] = Setting(X, targets, y, plain, result)
            rows = (("", plain, result.etas[0]), (" + IRFIL", result.model, result.etas[-1]))
            for (label, fitted, eta), paper in zip(rows, PAPER[f"{data} {name}"], strict=True):
                correct = 100 * ((fitted.margin(task.test_inputs) > 0) == task.test_targets).mean()
                title = label or f"{data} {name}"
                print(f"{title:<16}{paper:>32}{eta.mean():>15.4f} ± {eta.std():.4f}, {correct:.2f}")

    _histograms(settings, options.out / "glm_figure2.png")
    _extremes(settings, data_sets, options.out / "glm_figure3.png")
    _scatter(settings["MNIST linear"], options.out / "glm_figure4.png")
    _convergence(settings, options.out / "glm_figure5.png")
    print(f"figures 2 to 5 are in {options.out}/")


def _histograms(settings: dict[str, Setting], path: Path) -> None:
    figure, axes = pyplot.subplots(2, 2, figsize=(9, 6), constrained_layout=True)
    for axis, (name, setting) in zip(axes.flat, settings.items(), strict=True):
        bins = np.histogram_bin_edges(setting.eta, 60)
        for value, colour, label in zip((0, 1), COLOURS, CLASSES[name.split()[0]], strict=True):
            eta = setting.eta[setting.classes == value]
            axis.hist(eta, bins, color=colour, alpha=0.65, label=f"{label}, mean {eta.mean():.3f}")
            axis.axvline(eta.mean(), color=colour, linestyle="--", linewidth=2)
        axis.set(title=name, xlabel="Fisher information loss η (σ = 1)", ylabel="examples")
        axis.legend()
    figure.savefig(path, dpi=90)


def _extremes(
    settings: dict[str, Setting], data_sets: PaperData, path: Path, count: int = 8
) -> None:
    """The images with the smallest and largest η.

    Rows have the same order with and without projection.
    """
    pixels = {
        "MNIST": data_sets.mnist_zero_one(components=None, scaled=False).train_inputs.reshape(
            -1, 28, 28
        ),
        "CIFAR": data_sets.cifar_plane_car(components=None, scaled=False).train_inputs.reshape(
            -1, 32, 32, 3
        ),
    }
    figure = pyplot.figure(figsize=(7.5, 8.6), constrained_layout=True)
    grid = figure.add_gridspec(len(settings), 1)
    for row, (name, setting) in enumerate(settings.items()):
        part = figure.add_subfigure(grid[row])
        part.suptitle(f"{name}: smallest η above, largest η below", fontsize=11)
        order = np.argsort(setting.eta)
        shown = np.concatenate([order[:count], order[::-1][:count]])
        for axis, example in zip(part.subplots(2, count).flat, shown, strict=True):
            axis.imshow(pixels[name.split()[0]][example], cmap="gray")
            axis.set_title(f"{setting.eta[example]:.3f}", fontsize=9, pad=2)
            axis.axis("off")
    figure.savefig(path, dpi=68)


def _scatter(setting: Setting, path: Path, count: int = 2000) -> None:
    """η against ℓ = ½(wᵀx − y)² and ‖∇_w ℓ‖ = |wᵀx − y|‖x‖ for random examples."""
    shown = np.random.default_rng(0).permutation(len(setting.targets))[:count]
    X, eta, classes = setting.inputs[shown], setting.eta[shown], setting.classes[shown]
    residual = setting.model.margin(X) - setting.targets[shown]
    figure, axes = pyplot.subplots(1, 2, figsize=(9, 4), sharey=True, constrained_layout=True)
    alternatives = {
        "loss ℓ": 0.5 * np.square(residual),
        "norm of the gradient ‖∇ℓ‖": np.abs(residual) * np.linalg.norm(X, axis=1),
    }
    for axis, (label, values) in zip(axes, alternatives.items(), strict=True):
        for value, colour, title, marker in zip(
            (0, 1), COLOURS, CLASSES["MNIST"], "ox", strict=True
        ):
            rows = classes == value
            axis.scatter(
                values[rows],
                eta[rows],
                s=8,
                marker=marker,
                linewidths=0.8,
                color=colour,
                label=title,
            )
        axis.set(xlabel=label, title=f"correlation {np.corrcoef(values, eta)[0, 1]:.2f}")
    axes[0].set_ylabel("Fisher information loss η (σ = 1)")
    axes[1].legend()
    figure.savefig(path, dpi=90)


def _convergence(settings: dict[str, Setting], path: Path) -> None:
    figure, axis = pyplot.subplots(figsize=(6, 4), constrained_layout=True)
    for (name, setting), style in zip(settings.items(), ("-", "--", "-.", ":"), strict=True):
        colour = COLOURS[name.startswith("CIFAR")]
        axis.semilogy(setting.result.spread, style, color=colour, linewidth=2, label=name)
    axis.set(xlabel="round of reweighting", ylabel="standard deviation of η")
    axis.legend()
    figure.savefig(path, dpi=90)


if __name__ == "__main__":
    main()
