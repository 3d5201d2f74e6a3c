"""Guo et al. 2022 on linear models: § 4's example, Figures 1 to 4."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import torch
from attack_glm_reconstruction import RANGE, blind_guess
from matplotlib.figure import Figure
from paper_data import BinaryTask
from scipy import stats

import torchfil
from reproduction.rows import Outcome, Row, Run, check_near, check_that
from torchfil.attacks import GLMReconstruction
from torchfil.bounds import mse_from_rdp
from torchfil.glm import LogisticRegression

__all__ = ["ROWS"]

L2 = 1e-2
FIGURE_2_SIGMA, FIGURE_3_SIGMA = 1e-2, 1e-5
TRIALS = 100
DIGITS = "MNIST 0/1: 12,665 digits, 784 pixels"


@lru_cache(maxsize=2)
def fitted(run: Run, intercept: bool) -> tuple[BinaryTask, LogisticRegression]:
    """Logistic regression on all pixels, λ = 1e-2."""
    task = run.data("mnist").mnist_zero_one(components=None, scaled=False)
    model = LogisticRegression(L2, fit_intercept=intercept)
    return task, model.fit(task.train_inputs, task.train_targets)


def figure_1(run: Run) -> Outcome:
    """The numbers of §§ 2 to 4, besides the picture of both games."""
    advantage = [(math.exp(epsilon) - 1) / (math.exp(epsilon) + 1) for epsilon in (0.1, 2.0)]
    right = [100 * (value + 1) / 2 for value in advantage]
    bound = mse_from_rdp(2.0, [100.0])
    checks = (
        check_near("membership told right at ε = 0.1, %", 53, right[0], 1, 0),
        check_that("… at ε = 2", "> 88 %", f"{right[1]:.1f} %", "88 % or more", right[1] >= 88),
        check_near("MSE bound for ages in [0, 100] at ε = 2", 391, bound, 1, 0),
        check_that(
            "its root", "≈ 19", f"{math.sqrt(bound):.1f}", "19 to 20", 19 <= math.sqrt(bound) < 20
        ),
    )
    here = f"{right[0]:.1f} %, {right[1]:.1f} %; MSE ≥ {bound:.0f}, root {math.sqrt(bound):.1f}"
    return Outcome(here, checks)


def figure_2(run: Run) -> Outcome:
    """The bound of every digit at σ = 1e-2, and Rényi DP's bound for all."""
    task, model = fitted(run, False)
    X, y = task.train_inputs, task.train_targets
    bound = model.mse_bound(X, y, sigma=FIGURE_2_SIGMA, private_target=False)
    correct = 100 * float(((model.margin(task.test_inputs) > 0) == task.test_targets).mean())
    epsilon = 2 / (len(y) * L2 * FIGURE_2_SIGMA)  # the text's formula
    renyi = mse_from_rdp(epsilon, [1.0])

    # The paper's axes: bounds on a logarithmic scale, with Rényi DP's line and MSE = 1.
    figure = Figure(figsize=(5.2, 3.2), layout="constrained")
    axis = figure.subplots()
    axis.hist(
        bound,
        list(np.geomspace(min(bound.min(), renyi), bound.max(), 80)),
        color="#D55E00",
        label="dFIL, by digit",
    )
    axis.axvline(renyi, color="#0072B2", linestyle="--", label="Rényi DP")
    axis.axvline(1, color="0.3", label="MSE = 1")
    axis.set(xscale="log", xlabel="lower bound on the MSE", ylabel="digits")
    axis.legend(frameon=False)
    figure.savefig(run.out / "repro_guo_figure2.png", dpi=80)

    spread = math.log10(bound.max() / bound.min())
    checks = (
        check_near("test accuracy, %", 99.95, correct, 0.05, 2),
        check_near("ε of order 2", 1.58, epsilon, 0.01, 2),
        check_that(
            "Rényi DP's bound", "≈ 0.1", f"{renyi:.3f}", "0.05 to 0.15", 0.05 <= renyi <= 0.15
        ),
        check_that(
            "bounds by digit",
            "all > 1",
            f"smallest {bound.min():.2f}",
            "all > 1",
            bool(bound.min() > 1),
        ),
        check_that(
            "their range",
            "extremely wide",
            f"{spread:.1f} powers of ten",
            "two powers of ten or more",
            spread >= 2,
        ),
    )
    here = (
        f"{correct:.2f} % right; Rényi DP {renyi:.3f} at ε = {epsilon:.2f}; bounds by digit from "
        f"{bound.min():.2f} to {bound.max():.2g}. (The authors' code takes ε = 4/(nλσ)²: "
        f"{epsilon**2:.2f}.)"
    )
    return Outcome(here, checks, pictures=("repro_guo_figure2.png",))


@lru_cache(maxsize=2)
def attacked(run: Run, in_range: bool) -> tuple[GLMReconstruction, torchfil.BoundComparison]:
    """Attacks on every digit at σ = 1e-5, with and without keeping pixels in [0, 1]."""
    task, model = fitted(run, True)
    X, y = task.train_inputs, task.train_targets
    attack = GLMReconstruction(model, X, y, value_range=RANGE if in_range else None)
    result = attack.run(FIGURE_3_SIGMA, 5 if run.tiny else TRIALS, seed=0)
    return attack, torchfil.compare_with_bounds(model, result, X=X, y=y)


def figure_3(run: Run) -> Outcome:
    """The bound against the error of the attack, digit by digit."""
    _, comparison = attacked(run, True)
    predicted, achieved, violated = (
        comparison.predicted,
        comparison.attack.achieved,
        comparison.violated,
    )
    low = predicted < 1
    correlation = float(stats.spearmanr(predicted, achieved).statistic)
    lower_end = (
        float(stats.spearmanr(predicted[low], achieved[low]).statistic)
        if low.sum() > 2
        else math.nan
    )

    # On the line, the attack meets the bound; digits below it beyond chance are coloured.
    figure = Figure(figsize=(4.6, 4), layout="constrained")
    axis = figure.subplots()
    for chosen, colour, label in (
        (~violated, "#0072B2", "above the bound"),
        (violated, "#D55E00", "below it"),
    ):
        axis.scatter(
            predicted[chosen], achieved[chosen], s=2, color=colour, label=label, rasterized=True
        )
    ends = [float(predicted.min()), float(achieved.max())]
    axis.plot(ends, ends, color="black", linewidth=1)
    axis.axvline(1, color="0.4", linestyle=":")
    axis.set(
        xscale="log",
        yscale="log",
        xlabel="lower bound on the MSE by dFIL",
        ylabel="MSE of the attack",
    )
    axis.legend(frameon=False, markerscale=4)
    figure.savefig(run.out / "repro_guo_figure3.png", dpi=80)

    # Bounds above 1 say that nothing is learnt; bounds below 1 must hold for the attackers that
    # they bind.
    as_it_is = attacked(run, False)[1].violated
    shares = {
        name: 100 * float(v[low].mean()) if low.any() else math.nan
        for name, v in (("kept", violated), ("as", as_it_is))
    }
    blind = blind_guess(fitted(run, True)[0].train_inputs)
    checks = (
        check_that(
            "bound and error",
            "closely correlated, above all at the lower end",
            f"{correlation:.2f} (all), {lower_end:.2f} (bound below 1)",
            "rank correlation above 0.9 below 1",
            lower_end > 0.9,
        ),
        check_that(
            "digits below the bound",
            "some, by bias; the majority above",
            f"{100 * violated.mean():.0f} %",
            "some, fewer than half",
            0 < violated.mean() < 0.5,
        ),
        check_that(
            "where the bound is below 1, guesses as they are",
            "the bound holds",
            f"{shares['as']:.1f} % below it",
            "at most 5 % below it beyond chance",
            shares["as"] <= 5,
        ),
    )
    here = (
        f"rank correlation {correlation:.2f}, {lower_end:.2f} where the bound is below 1 "
        f"({int(low.sum()):,} digits). Below the bound beyond chance: {100 * violated.mean():.0f} "
        f"% of all, {shares['kept']:.1f} % of those with a bound below 1; with guesses as they "
        f"are, {100 * as_it_is.mean():.1f} % and {shares['as']:.1f} %. Guessing the mean digit "
        f"errs by {blind:.3f}"
    )
    smallest = float(predicted[violated].min()) if violated.any() else None
    return Outcome(here, checks, {"smallest violated bound": smallest}, ("repro_guo_figure3.png",))


def figure_4(run: Run, shown: int = 8) -> Outcome:
    """Digits with the highest and lowest dFIL, and their reconstructions from one release."""
    attack, comparison = attacked(run, True)
    task, model = fitted(run, True)
    released = model.release(FIGURE_3_SIGMA, torch.Generator().manual_seed(0))
    order = np.argsort(comparison.predicted)
    rows = np.concatenate([order[:shown], order[-shown:]])
    guesses = attack.guesses(released[None], rows.tolist())[:, 0].numpy()
    truth = task.train_inputs[rows]

    figure = Figure(figsize=(9, 1.8), layout="constrained")
    axes = figure.subplots(2, 2 * shown)
    for column in range(2 * shown):
        for axis, image in ((axes[0, column], truth[column]), (axes[1, column], guesses[column])):
            axis.imshow(image.reshape(28, 28), cmap="gray", vmin=0, vmax=1)
            axis.set(xticks=[], yticks=[])
    axes[0, 0].set_ylabel("digit", fontsize=8)
    axes[1, 0].set_ylabel("guess", fontsize=8)
    figure.suptitle("highest dFIL to the left, lowest to the right", fontsize=9)
    figure.savefig(run.out / "repro_guo_figure4.png", dpi=80)

    # A guess counts if it beats the mean digit, which needs no model.
    errors = np.square(guesses - truth).mean(axis=1)
    blind = blind_guess(task.train_inputs)
    top, bottom = float(errors[:shown].max()), float(errors[shown:].min())
    checks = (
        check_that(
            "digits of highest dFIL",
            "reconstructed",
            f"largest error {top:.1e}",
            "each with less than a tenth of the mean digit's error",
            top < blind / 10,
        ),
        check_that(
            "digits of lowest dFIL",
            "the attack fails",
            f"smallest error {bottom:.2f}",
            "each worse than the mean digit",
            bottom > blind,
        ),
    )
    here = (
        f"error of the {shown} of highest dFIL at most {top:.1e}, of the {shown} of lowest at "
        f"least {bottom:.2f}; the mean digit has {blind:.3f}"
    )
    return Outcome(here, checks, pictures=("repro_guo_figure4.png",))


ROWS = (
    Row(
        "guo-figure1",
        "guo",
        "Figure 1 and the numbers of §§ 2–4",
        "both games, an illustration; beside it: membership 53 % at ε = 0.1, > 88 % at ε = 2; "
        "ages in [0, 100] at ε = 2: MSE ≥ 391, ± 19",
        "formulas",
        figure_1,
        0.1,
        reason="e²/(e² + 1) is 88.08 %.",
    ),
    Row(
        "guo-figure2",
        "guo",
        "Figure 2",
        "99.95 % right, ε = 1.58, Rényi DP's bound ≈ 0.1, all dFIL bounds > 1, over an extremely "
        "wide range",
        DIGITS + "; λ = σ = 1e-2",
        figure_2,
        0.5,
        ("mnist",),
    ),
    Row(
        "guo-figure3",
        "guo",
        "Figure 3",
        "10,000 releases: bound and error closely correlated, most digits above the bound, some "
        "(biased) below it, none of consequence where the bound is below 1",
        DIGITS + f"; λ = 1e-2, σ = 1e-5, {TRIALS} releases, pixels kept in [0, 1]",
        figure_3,
        2,
        ("mnist",),
        reason="An attacker who knows that pixels lie in [0, 1] makes better guesses, and biased "
        "ones: the bound speaks about unbiased attackers. The paper does not say whether "
        "its guesses are kept in the range.",
    ),
    Row(
        "guo-figure4",
        "guo",
        "Figure 4",
        "the eight digits of highest dFIL are reconstructed perfectly, the eight of lowest are not",
        DIGITS + "; one release, σ = 1e-5",
        figure_4,
        0.1,
        ("mnist",),
    ),
)
