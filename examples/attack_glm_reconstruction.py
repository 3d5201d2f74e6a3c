"""Reconstruction of MNIST digits 0 and 1 from a logistic regression, and the bounds (Guo et al. 2022, Figures 3, 4).

Output perturbation with λ = 1e-2 and σ = 1e-5: so little noise that some digits can be recognised. Each of the 12,665
digits is attacked in 1,000 releases, with and without knowing the label, with and without keeping pixels in [0, 1]
(minutes on two cores, seconds on a GPU). For some digits, the bound for biased attackers is also computed.

Without the data's files, it runs on a small stand-in and says so (examples/README.md).

TORCHFIL_DATA=/path/to/data python examples/attack_glm_reconstruction.py --out out
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch
from paper_data import PaperData
from scipy import stats

import torchfil
from torchfil.attacks import BiasedBound, GLMReconstruction, biased_bound
from torchfil.attacks.glm_reconstruction import LabelIs
from torchfil.glm import LogisticRegression

matplotlib.use("Agg")
from matplotlib import pyplot

RANGE = (0.0, 1.0)  # of pixels
LABELS: tuple[LabelIs, ...] = ("unknown", "known")


def main() -> None:
    """Print what was achieved and save the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--trials", type=int, default=1000)
    parser.add_argument("--sigma", type=float, default=1e-5)
    parser.add_argument("--l2", type=float, default=1e-2)
    parser.add_argument("--no-intercept", action="store_true", help="fit no intercept; the attack then needs the label")
    parser.add_argument("--digits", type=int, default=None, help="train on this many of the 12,665")
    parser.add_argument("--sample", type=int, default=100, help="digits for the bound on biased attackers")
    parser.add_argument("--sample-trials", type=int, default=4000, help="releases for that bound")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    data = PaperData("mnist")
    if data.made:  # half a minute on two cores
        options.trials, options.sample = min(options.trials, 200), min(options.sample, 20)
        options.sample_trials = min(options.sample_trials, 1000)
    task = data.mnist_zero_one(components=None, scaled=False)

    X, y, sigma = task.train_inputs[: options.digits], task.train_targets[: options.digits], options.sigma
    intercept = not options.no_intercept
    model = LogisticRegression(options.l2, fit_intercept=intercept, device=options.device).fit(X, y)
    print(f"test accuracy {100 * model.score(task.test_inputs, task.test_targets):.2f} %, on {options.device}")

    def attacked(attack: GLMReconstruction, trials: int, rows: Any = None) -> torchfil.BoundComparison:
        result = attack.run(sigma, trials, rows=rows, seed=options.seed)
        return torchfil.compare_with_bounds(model, result, X=X, y=y)

    in_range: dict[LabelIs, GLMReconstruction] = {}
    for label in LABELS if intercept else ("known",):
        for value_range in (None, RANGE):
            attack = GLMReconstruction(model, X, y, label=label, value_range=value_range)
            start = time.perf_counter()
            comparison = attacked(attack, options.trials)
            describe(attack, comparison, time.perf_counter() - start)
        in_range[label] = attack
        title = f"{len(y):,} digits, {options.trials:,} releases each, label {label}"
        figure = comparison.plot(title=title, blind=blind_guess(X))
        figure.savefig(options.out / f"attack_glm_reconstruction_{label}.png", dpi=80)

    # Some digits, evenly spaced by bound, against the bound for biased guesses.
    order = np.argsort(comparison.predicted)
    sample = order[np.linspace(0, len(order) - 1, min(options.sample, len(order))).round().astype(int)]
    trials, seed = options.sample_trials, options.seed + 1
    results = {
        label: (attacked(attack, trials, sample), biased_bound(attack, sigma, sample, trials, seed=seed))
        for label, attack in in_range.items()
    }
    biased(results, options.out)

    released = model.release(sigma, torch.Generator().manual_seed(options.seed))
    pictures(attack, comparison.predicted, X, released, options.out)
    print(f"figures are in {options.out}/")


def blind_guess(X: np.ndarray) -> float:
    """The mean squared error per pixel of guessing the mean digit for every digit."""
    return float(X.var(axis=0).mean())


def describe(attack: GLMReconstruction, comparison: torchfil.BoundComparison, seconds: float) -> None:
    """Rank correlation, violations, and the share of bias in the error."""
    predicted, achieved, bias = comparison.predicted, comparison.attack.achieved, comparison.attack.squared_bias
    ratio, violated = comparison.ratio, comparison.violated
    low = predicted < 1
    kept = "guesses unchanged" if attack.value_range is None else "pixels kept in [0, 1]"
    print(f"label {attack.label}, {kept}: {comparison.attack.trials} releases, {seconds:.1f} s")
    for where, chosen in (("bound below 1", low), ("all", np.ones_like(low))):
        correlation = stats.spearmanr(predicted[chosen], achieved[chosen]).statistic
        share = 100 * violated[chosen].mean()
        print(
            f"  {where}: {chosen.sum():,} digits, Spearman {correlation:.3f}, median ratio "
            f"{np.median(ratio[chosen]):.3g}, smallest {ratio[chosen].min():.3g}, violated {share:.1f} %, "
            f"mean error {achieved[chosen].mean():.3g}"
        )
    if bias is not None and violated.any() and not violated.all():
        part = bias / achieved
        print(
            f"  bias² in the error, median: {100 * np.median(part[violated]):.0f} % where violated, "
            f"{100 * np.median(part[~violated]):.0f} % elsewhere; smallest where violated "
            f"{100 * part[violated].min():.1f} %; smallest violated bound {predicted[violated].min():.3g}"
        )


def biased(results: dict[LabelIs, tuple[torchfil.BoundComparison, BiasedBound]], folder: Path) -> None:
    """Some digits against both bounds: for unbiased attackers, and for attackers with this attacker's bias."""
    size = (5 * len(results), 4)
    figure, axes = pyplot.subplots(1, len(results), figsize=size, constrained_layout=True, sharey=True, squeeze=False)
    for axis, (label, (unbiased, own)) in zip(axes[0], results.items(), strict=True):
        comparison = torchfil.compare_with_bounds(own.bound, unbiased.attack)
        broken, ratio = unbiased.violated, comparison.ratio
        print(
            f"label {label}, {len(broken)} digits, {comparison.attack.trials} releases: {broken.sum()} below the bound "
            f"for unbiased attackers, {comparison.violated.sum()} below the bound for this bias; error over the latter "
            f"{ratio.min():.3f} to {ratio.max():.3f}, median {np.median(ratio):.3f}"
        )
        for where, chosen in (("broken", broken), ("held", ~broken)):
            if chosen.any():
                low, middle, high = np.quantile(own.response[chosen], (0, 0.5, 1))
                print(f"  {where}: the mean guess follows the digit by {low:.3f} to {high:.3f}, median {middle:.3f}")
        axis.plot(unbiased.predicted, unbiased.predicted, color="#4D4D4D", label="bound for unbiased attackers")
        axis.plot(unbiased.predicted, own.bound, "+", color="#D55E00", label="bound for this attacker's bias")
        axis.plot(unbiased.predicted, comparison.attack.achieved, ".", color="#0072B2", label="achieved")
        axis.set(xscale="log", yscale="log", ylim=(5e-7, 1e3), xlabel="bound for unbiased attackers")
        axis.set_title(f"label {label}, pixels kept in [0, 1]")
    axes[0, 0].set_ylabel("mean squared error per pixel")
    axes[0, 0].legend(frameon=False, fontsize="small")
    figure.savefig(folder / "attack_glm_reconstruction_bias.png", dpi=80)


def pictures(
    attack: GLMReconstruction, bound: np.ndarray, X: np.ndarray, released: torch.Tensor, folder: Path, number: int = 8
) -> None:
    """The digits with the lowest and the highest bounds, above their reconstructions from one release."""
    order = np.argsort(bound)
    figure, axes = pyplot.subplots(4, number, figsize=(number, 4.9), constrained_layout=True)
    for top, rows, label in ((0, order[:number], "lowest bounds"), (2, order[-number:], "highest bounds")):
        guesses = attack.reconstruct(released, rows.copy())[0].cpu().numpy()
        for column, row in enumerate(rows):
            for axis, image in ((axes[top, column], X[row]), (axes[top + 1, column], guesses[column])):
                axis.imshow(image.reshape(28, 28), cmap="gray", vmin=0, vmax=1)
                axis.set(xticks=[], yticks=[])
            axes[top, column].set_title(f"{bound[row]:.1e}", fontsize=8)
        axes[top, 0].set_ylabel(f"{label}:\ntraining digit", fontsize=8)
        axes[top + 1, 0].set_ylabel("reconstruction", fontsize=8)
    figure.savefig(folder / "attack_glm_reconstruction_digits.png", dpi=90)


if __name__ == "__main__":
    main()
