"""Table 1 of Hannun et al. 2021 beside ours, with figures 2 and 5, on MNIST 0/1 and CIFAR plane/car.

TORCHFIL_DATA=/path/to/data python examples/glm_table1.py --out out
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib
import numpy as np

from torchfil.datasets import DataNotFoundError, cifar_plane_car, mnist_zero_one
from torchfil.glm import IRFIL, LinearRegression, LogisticRegression, iteratively_reweighted_fil

matplotlib.use("Agg")
from matplotlib import pyplot

PAPER = {
    "MNIST linear": ("0.040 ± 0.014, 100", "0.047 ± 0.000, 99.8"),
    "MNIST logistic": ("0.027 ± 0.012, 99.8", "0.024 ± 0.000, 99.7"),
    "CIFAR linear": ("0.26 ± 0.08, 79.8", "0.30 ± 0.00, 80.7"),
    "CIFAR logistic": ("0.32 ± 0.15, 79.9", "0.25 ± 0.00, 79.1"),
}
COLOURS = ("#0072B2", "#E69F00")  # told apart by colour-blind readers


def main() -> None:
    """Print the table and save the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("out"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    try:
        tasks = {"MNIST": (mnist_zero_one(), 8e-4), "CIFAR": (cifar_plane_car(), 8e-5)}
    except DataNotFoundError as error:
        raise SystemExit(f"skipped: {error}") from None
    histories: dict[str, tuple[IRFIL, np.ndarray]] = {}
    print(f"{'':<16}{'paper: mean η ± std, accuracy':>32}{'ours':>28}")
    for data, (task, l2) in tasks.items():
        X, y = task.train_inputs, task.train_targets
        for name, model, targets in (
            ("linear", LinearRegression(), 2 * y - 1),
            ("logistic", LogisticRegression(l2=l2), y),
        ):
            result = iteratively_reweighted_fil(model, X, targets, rounds=15)
            plain = model.fit(X, targets)
            histories[f"{data} {name}"] = (result, y)
            rows = (("", plain, result.etas[0]), (" + IRFIL", result.model, result.etas[-1]))
            for (label, fitted, eta), paper in zip(rows, PAPER[f"{data} {name}"], strict=True):
                correct = 100 * ((fitted.margin(task.test_inputs) > 0) == task.test_targets).mean()
                title = label or f"{data} {name}"
                print(f"{title:<16}{paper:>32}{eta.mean():>15.4f} ± {eta.std():.4f}, {correct:.2f}")
    _histograms(histories, options.out / "glm_figure2.png")
    _convergence(histories, options.out / "glm_figure5.png")
    print(f"figures 2 and 5 are in {options.out}/")


def _histograms(histories: dict[str, tuple[IRFIL, np.ndarray]], path: Path) -> None:
    classes = {"MNIST": ("digit 0", "digit 1"), "CIFAR": ("plane", "car")}
    figure, axes = pyplot.subplots(2, 2, figsize=(9, 6), constrained_layout=True)
    for axis, (name, (result, y)) in zip(axes.flat, histories.items(), strict=True):
        bins = np.histogram_bin_edges(result.etas[0], 60)
        for value, colour, label in zip((0, 1), COLOURS, classes[name.split()[0]], strict=True):
            axis.hist(result.etas[0][y == value], bins, color=colour, alpha=0.65, label=label)
        axis.set(title=name, xlabel="Fisher information loss η (σ = 1)", ylabel="examples")
        axis.legend()
    figure.savefig(path, dpi=90)


def _convergence(histories: dict[str, tuple[IRFIL, np.ndarray]], path: Path) -> None:
    figure, axis = pyplot.subplots(figsize=(6, 4), constrained_layout=True)
    for (name, (result, _)), style in zip(histories.items(), ("-", "--", "-.", ":"), strict=True):
        colour = COLOURS[name.startswith("CIFAR")]
        axis.semilogy(result.spread, style, color=colour, linewidth=2, label=name)
    axis.set(xlabel="round of reweighting", ylabel="standard deviation of η")
    axis.legend()
    figure.savefig(path, dpi=90)


if __name__ == "__main__":
    main()
