"""Reconstruction of MNIST digits 0 and 1 from a logistic regression, and the bounds (Guo et al.
2022, Figures 3, 4).

Output perturbation with λ = 1e-2 and σ = 1e-5: so little noise that some digits can be recognised.
Each of the 12,665 digits is attacked in 1,000 releases, with and without keeping pixels in [0, 1]
(minutes on two cores, seconds on a GPU).

Without the data's files, it runs on a small stand-in and says so (examples/README.md).

TORCHFIL_DATA=/path/to/data python examples/attack_glm_reconstruction.py --out out
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import matplotlib
import numpy as np
import torch
from paper_data import PaperData
from scipy import stats

import torchfil
from torchfil.attacks import GLMReconstruction
from torchfil.glm import LogisticRegression

matplotlib.use("Agg")
from matplotlib import pyplot

RANGE = (0.0, 1.0)  # of pixels


def main() -> None:
    """Print what was achieved and save the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--trials", type=int, default=1000)
    parser.add_argument("--sigma", type=float, default=1e-5)
    parser.add_argument("--l2", type=float, default=1e-2)
    parser.add_argument("--digits", type=int, default=None, help="train on this many of the 12,665")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    data = PaperData("mnist")
    if data.made:  # half a minute on two cores
        options.trials = min(options.trials, 200)
    task = data.mnist_zero_one(components=None, scaled=False)

    X, y, sigma = (
        task.train_inputs[: options.digits],
        task.train_targets[: options.digits],
        options.sigma,
    )
    model = LogisticRegression(options.l2, fit_intercept=True, device=options.device).fit(X, y)
    print(
        f"test accuracy {100 * model.score(task.test_inputs, task.test_targets):.2f} %, on "
        f"{options.device}"
    )

    for value_range in (None, RANGE):
        attack = GLMReconstruction(model, X, y, value_range=value_range)
        start = time.perf_counter()
        result = attack.run(sigma, options.trials, seed=options.seed)
        comparison = torchfil.compare_with_bounds(model, result, X=X, y=y)
        describe(attack, comparison, time.perf_counter() - start)
    title = f"{len(y):,} digits, {options.trials:,} releases each"
    figure = comparison.plot(title=title, blind=blind_guess(X))
    figure.savefig(options.out / "attack_glm_reconstruction.png", dpi=80)

    released = model.release(sigma, torch.Generator().manual_seed(options.seed))
    pictures(attack, comparison.predicted, X, released, options.out)
    print(f"figures are in {options.out}/")


def blind_guess(X: np.ndarray) -> float:
    """The mean squared error per pixel of guessing the mean digit for every digit."""
    return float(X.var(axis=0).mean())


def describe(
    attack: GLMReconstruction, comparison: torchfil.BoundComparison, seconds: float
) -> None:
    """Rank correlation, violations, and the share of bias in the error."""
    predicted, achieved, bias = (
        comparison.predicted,
        comparison.attack.achieved,
        comparison.attack.squared_bias,
    )
    ratio, violated = comparison.ratio, comparison.violated
    low = predicted < 1
    kept = "guesses unchanged" if attack.value_range is None else "pixels kept in [0, 1]"
    print(f"{kept}: {comparison.attack.trials} releases, {seconds:.1f} s")
    for where, chosen in (("bound below 1", low), ("all", np.ones_like(low))):
        correlation = stats.spearmanr(predicted[chosen], achieved[chosen]).statistic
        share = 100 * violated[chosen].mean()
        print(
            f"  {where}: {chosen.sum():,} digits, Spearman {correlation:.3f}, median ratio "
            f"{np.median(ratio[chosen]):.3g}, smallest {ratio[chosen].min():.3g}, violated "
            f"{share:.1f} %, mean error {achieved[chosen].mean():.3g}"
        )
    if bias is not None and violated.any() and not violated.all():
        part = bias / achieved
        print(
            f"  bias² in the error, median: {100 * np.median(part[violated]):.0f} % where "
            f"violated, {100 * np.median(part[~violated]):.0f} % elsewhere; smallest where "
            f"violated {100 * part[violated].min():.1f} %; smallest violated bound "
            f"{predicted[violated].min():.3g}"
        )


def pictures(
    attack: GLMReconstruction,
    bound: np.ndarray,
    X: np.ndarray,
    released: torch.Tensor,
    folder: Path,
    number: int = 8,
) -> None:
    """The digits with the lowest and the highest bounds, above their reconstructions from one
    release.
    """
    order = np.argsort(bound)
    figure, axes = pyplot.subplots(4, number, figsize=(number, 4.9), constrained_layout=True)
    for top, rows, label in (
        (0, order[:number], "lowest bounds"),
        (2, order[-number:], "highest bounds"),
    ):
        guesses = attack.guesses(released[None], rows.tolist())[:, 0].cpu().numpy()
        for column, row in enumerate(rows):
            for axis, image in (
                (axes[top, column], X[row]),
                (axes[top + 1, column], guesses[column]),
            ):
                axis.imshow(image.reshape(28, 28), cmap="gray", vmin=0, vmax=1)
                axis.set(xticks=[], yticks=[])
            axes[top, column].set_title(f"{bound[row]:.1e}", fontsize=8)
        axes[top, 0].set_ylabel(f"{label}:\ntraining digit", fontsize=8)
        axes[top + 1, 0].set_ylabel("reconstruction", fontsize=8)
    figure.savefig(folder / "attack_glm_reconstruction_digits.png", dpi=90)


if __name__ == "__main__":
    main()
