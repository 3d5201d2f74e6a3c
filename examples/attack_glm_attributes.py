"""Attribute inversion: VKORC1 of warfarin patients (IWPC), marital status (Adult), Hannun et al.
2021, Figures 6 and 7.

White-box and black-box accuracy at several noise scales, compared with the prior and an ideal
inverter; then white-box accuracy by decile of η, before and after reweighting (IRFIL).

Without the data's files, it runs on a small stand-in and says so (examples/README.md).

TORCHFIL_DATA=/path/to/data python examples/attack_glm_attributes.py --out out
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch
from paper_data import PaperData, TabularTask

from torchfil.attacks import AttackResult, NominalAttribute, WhiteBoxInversion, prior_inversion
from torchfil.attacks.attributes import accuracies
from torchfil.attacks.base import release_noise
from torchfil.glm import (
    GeneralizedLinearModel,
    LinearRegression,
    LogisticRegression,
    SoftmaxRegression,
    iteratively_reweighted_fil,
)
from torchfil.glm.refits import GLMView

matplotlib.use("Agg")
from matplotlib import pyplot

SIGMAS = (1e-5, 1e-4, 1e-3, 1e-2)
SIGMA = 1e-3  # of the deciles
COLOURS = {"white-box": "#0072B2", "black-box": "#D55E00", "prior": "#4D4D4D", "ideal": "#009E73"}
ROUND_COLOURS = ("#D55E00", "#E69F00", "#0072B2")


class BlackBoxInversion:
    """Fredrikson et al. 2014: argmax over levels v of log p(v) + log π(prediction for x_i with
    level v, y_i).

    π is a Gaussian in the residual with the released model's own variance on the training set, Σ(y
    − ŷ)²/(n − p), for least squares; for logistic regression, the share of label y among the
    training examples with that prediction.

    Threat model: the attacker knows everything about the example except the attribute (including
    its target), how common each level is, and how well the model does; the model answers queries.
    """

    def __init__(
        self,
        model: LinearRegression | LogisticRegression,
        X: np.ndarray,
        y: np.ndarray,
        attribute: NominalAttribute,
    ) -> None:
        self.view, self.attribute = GLMView.build(model, X, y), attribute
        self.truth = torch.as_tensor(attribute.levels(X))
        self.prior = torch.bincount(self.truth, minlength=len(attribute.codes)) / len(X)

    def run(self, sigma: float, trials: int = 100, *, seed: int | None = None) -> AttackResult:
        """Attack every example in each of ``trials`` releases w* + N(0, σ²I).

        Measure "accuracy".
        """
        noise = sigma * release_noise(sigma, trials, self.view.weights, seed)
        guesses = torch.cat([self.best(part) for part in noise.split(10)], dim=1)
        known = (
            "knows the rest of the example, its target, the attribute's distribution, "
            "predictions and statistics"
        )
        return accuracies("black-box attribute inversion", known, guesses, self.truth)

    def best(self, noise: torch.Tensor) -> torch.Tensor:
        """The level that fits each release best, [n, part]: the margin without the attribute, plus
        the level's part.
        """
        codes = torch.as_tensor(np.asarray(self.attribute.codes, dtype=float)).to(self.view.X)
        weights = (self.view.weights + noise).mT  # [p, part]
        own, margins = weights[list(self.attribute.columns)], self.view.X @ weights
        rest = margins - codes[self.truth] @ own
        score = self.gaussian if self.view.loss.name == "squared" else self.confusion
        scores = [score(margins, rest + code @ own) for code in codes]
        return (torch.stack(scores, dim=1) + self.prior.log()[:, None]).argmax(dim=1)

    def gaussian(self, margins: torch.Tensor, tried: torch.Tensor) -> torch.Tensor:
        """The log density of each residual at the margins that are tried, [n, part]."""
        y, (n, p) = self.view.y[:, None], self.view.X.shape
        variance = (margins - y).square().sum(dim=0) / max(n - p, 1)
        return -0.5 * (tried - y).square() / variance

    def confusion(self, margins: torch.Tensor, tried: torch.Tensor) -> torch.Tensor:
        """log of the share of each example's own label among those with the prediction that is
        tried, [n, part].
        """
        predicted, label = margins > 0, self.view.y[:, None] > 0.5

        def log_share(prediction: bool) -> torch.Tensor:
            among = predicted == prediction
            share = (among & label).sum(dim=0) / among.sum(dim=0).clamp(min=1)
            return torch.where(label, share, 1 - share).double().clamp(min=1e-300).log()

        return torch.where(tried > 0, log_share(True), log_share(False))


def ideal_inversion(
    X: np.ndarray, y: np.ndarray, attribute: NominalAttribute, *, l2: float = 1e-4
) -> AttackResult:
    """A softmax regression of the attribute on everything else, fitted on the same examples.

    No model is released: this attacker succeeds through what the other columns reveal, not through
    what the model leaks. It knows the population perfectly (here: the training set itself).
    """
    truth = attribute.levels(X)
    inputs = np.column_stack([np.delete(X, list(attribute.columns), axis=1), y])
    guesses = torch.as_tensor(
        SoftmaxRegression(l2=l2, fit_intercept=True).fit(inputs, truth).predict(inputs)
    )
    threat_model = "knows the rest of the example, its target and the population; sees no model"
    return accuracies("ideal", threat_model, guesses[:, None], torch.as_tensor(truth))


def accuracy_by_part(result: AttackResult, score: np.ndarray, parts: int = 10) -> np.ndarray:
    """The accuracy in parts of equal size, ordered by score (deciles of η), [parts]."""
    order = np.argsort(score, kind="stable")
    return np.array([result.achieved[part].mean() for part in np.array_split(order, parts)])


def main() -> None:
    """Print the tables and save the figure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=10, help="rounds of reweighting")
    parser.add_argument(
        "--logistic", action="store_true", help="also Adult by logistic regression (minutes)"
    )
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    data = PaperData("iwpc", "adult")
    patients, people = data.iwpc(), data.adult()

    signs = 2 * people.train_targets - 1
    settings: list[tuple[str, TabularTask, GeneralizedLinearModel, np.ndarray, str]] = [
        ("IWPC, linear", patients, LinearRegression(l2=1e-2), patients.train_targets, "vkorc1"),
        ("Adult, linear", people, LinearRegression(l2=1e-3), signs, "marital-status"),
    ]
    if options.logistic:
        model = LogisticRegression(l2=1e-3, tolerance=1e-12)
        settings.append(("Adult, logistic", people, model, people.train_targets, "marital-status"))

    figure, axes = pyplot.subplots(
        len(settings), 2, figsize=(10, 3.6 * len(settings)), constrained_layout=True
    )
    for row, (title, task, model, y, name) in zip(axes, settings, strict=True):
        attribute = task.question(name)
        print(f"{title}: {name}, {len(y):,} examples, {len(attribute.codes)} levels")
        over_noise(row[0], title, model, task.train_inputs, y, attribute, options.trials)
        rounds = sorted({0, min(2, options.rounds), options.rounds})
        by_decile(row[1], model, task.train_inputs, y, attribute, rounds, options.trials)
    figure.savefig(options.out / "attack_glm_attributes.png", dpi=80)
    print(f"the figure is in {options.out}/")


def over_noise(
    axis: Any,
    title: str,
    model: GeneralizedLinearModel,
    X: np.ndarray,
    y: np.ndarray,
    attribute: NominalAttribute,
    trials: int,
) -> None:
    """Accuracy at each σ, with the standard deviation over releases."""
    model.fit(X, y)
    start = time.perf_counter()
    white = WhiteBoxInversion(model, X, y, attribute, progress=True)
    print(f"  all refits in {time.perf_counter() - start:.2f} s")
    attacks: dict[str, Any] = {
        "white-box": white,
        "black-box": BlackBoxInversion(model, X, y, attribute),
    }
    truth = attribute.levels(X)[:, None]
    for name, attack in attacks.items():
        guesses = [attack.run(sigma, trials, seed=0).guesses for sigma in SIGMAS]
        # [sigmas, trials]
        accuracies = np.stack([(guess == truth).mean(axis=0) for guess in guesses])
        print(
            f"  {name:<10}"
            + "".join(f"{s:>8g}: {a:.3f}" for s, a in zip(SIGMAS, accuracies.mean(1), strict=True))
        )
        axis.errorbar(
            SIGMAS,
            accuracies.mean(axis=1),
            accuracies.std(axis=1),
            fmt="o-",
            color=COLOURS[name],
            capsize=3,
            label=name,
        )
    for name, result in (
        ("ideal", ideal_inversion(X, y, attribute)),
        ("prior", prior_inversion(X, attribute)),
    ):
        print(f"  {name:<10}{result.achieved.mean():.3f}")
        axis.axhline(result.achieved.mean(), color=COLOURS[name], linestyle="--", label=name)
    axis.set(xscale="log", xlabel="σ", ylabel="accuracy", title=title, ylim=(0, 1.03))
    axis.legend(frameon=False, fontsize="small")


def by_decile(
    axis: Any,
    model: GeneralizedLinearModel,
    X: np.ndarray,
    y: np.ndarray,
    attribute: NominalAttribute,
    rounds: Sequence[int],
    trials: int,
) -> None:
    """White-box accuracy by decile of the first η, after some rounds of reweighting."""
    eta = None
    for number, colour in zip(rounds, ROUND_COLOURS, strict=False):
        fitted = model.fit(X, y)
        if number:
            columns = attribute.columns
            fitted = iteratively_reweighted_fil(
                model, X, y, rounds=number, clamp=(0, 100), attribute=columns
            ).model
        if eta is None:
            eta = fitted.fil(X, y, attributes={"a": attribute.columns})["a"]
        deciles = accuracy_by_part(
            WhiteBoxInversion(fitted, X, y, attribute).run(SIGMA, trials, seed=1), eta
        )
        print(f"  {number:>2} rounds  " + " ".join(f"{value:.3f}" for value in deciles))
        axis.plot(
            range(1, 11), deciles, "o-", color=colour, label=f"{number} rounds of reweighting"
        )
    axis.set(
        xlabel="decile of η (10: leaks most)",
        ylabel="white-box accuracy",
        title=f"by decile, σ = {SIGMA:g}",
        ylim=(0, 1.03),
        xticks=range(1, 11),
    )
    axis.legend(frameon=False, fontsize="small", loc="lower right")


if __name__ == "__main__":
    main()
