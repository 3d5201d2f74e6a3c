"""Leakage of one attribute: VKORC1 of warfarin patients (IWPC) and marital status (Adult), Hannun
et al. 2021, § 6.4.

Figure 6a: the attribute's η for four penalties λ. Figures 7a and 7c: how reweighting makes it equal
for everybody, with the weights held fixed.

Without the data's files, it runs on a small stand-in and says so (examples/README.md).

TORCHFIL_DATA=/path/to/data python examples/glm_iwpc.py --out out
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import numpy as np
from paper_data import PaperData, TabularTask

from torchfil.glm import (
    IRFIL,
    GeneralizedLinearModel,
    LinearRegression,
    LogisticRegression,
    iteratively_reweighted_fil,
)

matplotlib.use("Agg")
from matplotlib import pyplot

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7")  # colour-blind readers can distinguish them
SIGMA = 1e-3  # of figure 7; figure 6a is at σ = 1
PENALTIES = (1e-5, 1e-3, 1e-1, 1.0)


@dataclass(frozen=True)
class Setting:
    """A model on a task, with the attribute to protect."""

    title: str
    task: TabularTask
    model: GeneralizedLinearModel
    targets: np.ndarray
    attribute: str

    @property
    def columns(self) -> list[int]:
        """The attribute's columns."""
        return list(self.task.attributes[self.attribute])

    @property
    def prior(self) -> float:
        """The share of the attribute's commonest level: the accuracy of guessing it for
        everybody.
        """
        numbers = self.task.level_numbers(self.attribute, self.task.train_inputs)
        return float(np.bincount(numbers).max() / len(numbers))

    def score(self, model: GeneralizedLinearModel) -> str:
        """The test error: MSE of the dose, accuracy of the income."""
        margin, targets = model.margin(self.task.test_inputs), self.task.test_targets
        if self.attribute == "vkorc1":
            return f"MSE {np.square(margin - targets).mean():.4f}"
        return f"{100 * ((margin > 0) == targets).mean():.2f} %"


def main() -> None:
    """Print the table and save the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--rounds", type=int, default=10, help="rounds of reweighting")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    data = PaperData("iwpc", "adult")
    patients, people = data.iwpc(), data.adult()

    y = people.train_targets
    settings = (
        Setting(
            "IWPC linear", patients, LinearRegression(l2=1e-2), patients.train_targets, "vkorc1"
        ),
        Setting("Adult linear", people, LinearRegression(l2=1e-3), 2 * y - 1, "marital-status"),
        Setting("Adult logistic", people, LogisticRegression(l2=1e-3), y, "marital-status"),
    )

    histories = []
    print(
        f"{'σ = ' + format(SIGMA, 'g'):<16}{'attribute':<16}{'prior':>6}"
        f"{'mean η ± std':>24}{'max η':>10}{'test':>12}"
    )
    for setting in settings:
        X = setting.task.train_inputs
        result = reweighted(setting.model, X, setting.targets, setting.columns, options.rounds)
        plain = setting.model.fit(X, setting.targets)
        for title, eta, model in (
            (
                f"{setting.title:<16}{setting.attribute:<16}{setting.prior:>6.3f}",
                result.etas[0],
                plain,
            ),
            (f"{'  + IRFIL':<38}", result.etas[-1], result.model),
        ):
            spread = f"{eta.mean() / SIGMA:.4f} ± {eta.std() / SIGMA:.4f}"
            print(f"{title}{spread:>24}{eta.max() / SIGMA:>10.4f}{setting.score(model):>12}")
        histories.append((setting, result))

    _penalties(settings[0], options.out / "glm_figure6a.png")
    _rounds(histories, options.out / "glm_figure7.png")
    print(f"figures 6a, 7a and 7c are in {options.out}/")


def reweighted(
    model: GeneralizedLinearModel, X: np.ndarray, y: np.ndarray, columns: Sequence[int], rounds: int
) -> IRFIL:
    """Weights of at most 100 that equalise the η of an attribute, given by its columns, with the
    weights held fixed.

    The limit of 100 matters only for logistic regression on Adult: some incomes are so certain that
    η is 1e-14 at σ = 1, and the first round would give those examples all the weight.
    """
    return iteratively_reweighted_fil(model, X, y, rounds=rounds, clamp=(0, 100), attribute=columns)


def _penalties(setting: Setting, path: Path) -> None:
    """Histograms of the attribute's η on a logarithmic axis."""
    X, y = setting.task.train_inputs, setting.targets
    etas = {
        l2: LinearRegression(l2=l2).fit(X, y).fil(X, y, attributes={"a": setting.columns})["a"]
        for l2 in PENALTIES
    }
    everything = np.concatenate(list(etas.values()))
    bins = list(np.geomspace(everything.min(), everything.max(), 100))
    figure, axis = pyplot.subplots(figsize=(6.5, 4.8), constrained_layout=True)
    for (l2, eta), colour, style in zip(etas.items(), COLOURS, ("-", "--", "-.", ":"), strict=True):
        counts, _ = np.histogram(eta, bins)
        label = (
            f"$\\lambda = 10^{{{np.log10(l2):.0f}}}$: mean {1e3 * eta.mean():.2f}, largest "
            f"{1e3 * eta.max():.1f}"
        )
        axis.step(bins[:-1], counts, style, where="post", color=colour, linewidth=1.6, label=label)
    axis.set(
        title="IWPC, linear regression",
        xscale="log",
        xlabel=f"η of {setting.attribute.upper()} (σ = 1)",
        ylabel="patients",
        ylim=(0, None),
    )
    figure.legend(title="η in thousandths", loc="outside lower center", ncols=2)
    figure.savefig(path, dpi=90)


def _rounds(histories: Sequence[tuple[Setting, IRFIL]], path: Path) -> None:
    """Bands of η's quantiles over the rounds."""
    figure, axes = pyplot.subplots(
        1, len(histories), figsize=(11, 4), sharey=True, constrained_layout=True
    )
    for axis, (setting, result) in zip(axes, histories, strict=True):
        eta = result.etas / SIGMA
        rounds = np.arange(len(eta))
        for low, high, opacity in ((0.01, 0.99, 0.15), (0.1, 0.9, 0.3), (0.25, 0.75, 0.5)):
            lower, upper = np.quantile(eta, [low, high], axis=1)
            label = f"quantiles {100 * low:.0f} % to {100 * high:.0f} %"
            axis.fill_between(
                rounds, lower, upper, color=COLOURS[0], alpha=opacity, linewidth=0, label=label
            )
        axis.plot(rounds, eta.mean(axis=1), "o-", color=COLOURS[1], markersize=4, label="mean")
        axis.set(
            title=f"{setting.title}: {setting.attribute}",
            xlabel="round of reweighting",
            yscale="log",
        )
    axes[0].set_ylabel(f"η of the attribute (σ = {SIGMA:g})")
    axes[0].set_yticks([0.1, 0.3, 1, 3, 10], ["0.1", "0.3", "1", "3", "10"])
    axes[0].minorticks_off()
    axes[0].legend(loc="lower right")
    figure.savefig(path, dpi=90)


if __name__ == "__main__":
    main()
