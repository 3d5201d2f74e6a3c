"""Figure 1 of the PLIS paper: which columns of a private linear regression leak, by FIL and by
PLIS.

Twenty columns, three of them informative; DP-SGD to (ε, δ) = (0.2, 1e-3). At the final weights,
over all examples,

    FIL_j = sqrt(mean of I_jj),      PLIS_j = mean of |∂PL/∂x_j|,

where I is the Fisher information of one more step at those weights, if the attacker knows the
batches. The same numbers for the sums over the whole run are also printed.

python examples/plis_regression.py --out out
"""

from __future__ import annotations

import argparse
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
from matplotlib.figure import Figure
from scipy import stats
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from torchfil import Accounting, FILPrivacyEngine, fisher

warnings.filterwarnings("ignore", message="Full backward hook is firing")
COLUMNS, INFORMATIVE = 20, (3, 9, 16)
WEIGHTS, LABEL_NOISE = (1.0, -1.5, 2.0), 0.5
EPSILON, DELTA = 0.2, 1e-3
MAX_GRAD_NORM = 8.0


@dataclass(frozen=True)
class Columns:
    """Leakage by column, [20] each."""

    fil: Tensor
    plis: Tensor

    @property
    def rank_correlation(self) -> float:
        """Spearman's rank correlation over the columns."""
        return float(stats.spearmanr(self.fil, self.plis).statistic)

    @property
    def separated(self) -> bool:
        """Whether every informative column is above every other one, in both measures."""
        inside = torch.zeros(COLUMNS, dtype=torch.bool)
        inside[list(INFORMATIVE)] = True
        return all(
            bool(values[inside].min() > values[~inside].max()) for values in (self.fil, self.plis)
        )


@dataclass(frozen=True)
class Result:
    """Leakage at the final weights and over the run, ε, the variance explained, the share of
    gradients above C.
    """

    end: Columns
    run: Columns
    epsilon: float
    explained: float
    clipped: float


def experiment(
    seed: int, examples: int = 2000, epochs: int = 10, max_grad_norm: float = MAX_GRAD_NORM
) -> Result:
    """One draw of data, one private training, both measures."""
    torch.manual_seed(seed)
    inputs = torch.randn(examples, COLUMNS)
    weights = torch.zeros(COLUMNS)
    weights[list(INFORMATIVE)] = torch.tensor(WEIGHTS)
    targets = inputs @ weights[:, None] + LABEL_NOISE * torch.randn(examples, 1)

    plain, loss_fn = nn.Linear(COLUMNS, 1), nn.MSELoss()
    engine = FILPrivacyEngine()
    model, optimizer, loader = engine.make_private_with_epsilon(
        plain,
        torch.optim.SGD(plain.parameters(), lr=0.1),
        DataLoader(TensorDataset(inputs, targets), batch_size=examples // 5),
        target_epsilon=EPSILON,
        target_delta=DELTA,
        epochs=epochs,
        max_grad_norm=max_grad_norm,
        accounting=Accounting(estimator="exact", track=("diagonal", "plis")),
    )
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            loss_fn(model(x), y).backward()
            optimizer.step()

    # The leakage of the whole run, and of one more step at the final weights.
    over_run = Columns(
        engine.get_attribute_fil().value.square().mean(0).sqrt(), engine.get_plis().abs().mean(0)
    )
    plis = engine.plis().abs().mean(0)
    trained = model.to_standard_module()
    diagonal = fisher.fim_diagonal(
        trained,
        loss_fn,
        inputs,
        targets,
        max_grad_norm=max_grad_norm,
        noise_multiplier=optimizer.noise_multiplier,
        estimator="exact",
    )

    with torch.no_grad():
        residual = trained(inputs) - targets
    norm = 2 * residual[:, 0].abs() * (inputs.square().sum(1) + 1).sqrt()
    return Result(
        end=Columns(diagonal.value.mean(0).sqrt(), plis),
        run=over_run,
        epsilon=engine.get_epsilon(DELTA),
        explained=1 - float(residual.square().mean() / targets.var()),
        clipped=float((norm > max_grad_norm).float().mean()),
    )


def main() -> None:
    """Print the agreement over seeds and save the bars of the first."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument(
        "--max-grad-norm", type=float, default=MAX_GRAD_NORM, help="clipping norm C"
    )
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    print("Data: tables made up by rule; nothing is downloaded.")
    print(
        "Spearman's rank correlation of FIL and PLIS over 20 columns; are the 3 informative ones "
        "on top?\n"
    )
    print(
        f"{'seed':>4}{'ε':>8}{'explained':>12}{'clipped':>10}{'at the end':>14}"
        f"{'on top':>8}{'run':>10}{'on top':>8}"
    )
    results = [
        experiment(seed, max_grad_norm=options.max_grad_norm) for seed in range(options.seeds)
    ]
    for seed, result in enumerate(results):
        print(
            f"{seed:>4}{result.epsilon:>8.3f}{result.explained:>12.3f}{result.clipped:>10.2f}",
            end="",
        )
        for columns, width in ((result.end, 14), (result.run, 10)):
            print(
                f"{columns.rank_correlation:>{width}.3f}{'yes' if columns.separated else 'no':>8}",
                end="",
            )
        print()
    save(results[0].end, options.out / "plis_regression.png")
    print(f"\nThe picture of seed 0 is {options.out / 'plis_regression.png'}.")
    print("These numbers depend on private data and are confidential themselves.")


def save(columns: Columns, path: Path) -> None:
    """FIL on the left, PLIS on the right, one bar per column."""
    figure = Figure(figsize=(9, 4.6), layout="constrained")
    titles = ("FIL: sqrt(mean of $I_{jj}$)", "PLIS: mean of |∂PL/∂$x_j$|")
    for axis, values, title in zip(
        figure.subplots(1, 2, sharey=True), (columns.fil, columns.plis), titles, strict=True
    ):
        for informative, colour, hatch in ((True, "#D55E00", "//"), (False, "#0072B2", None)):
            rows = [j for j in range(COLUMNS) if (j in INFORMATIVE) == informative]
            name = "informative" if informative else "uninformative"
            axis.barh(
                rows,
                values[rows],
                color=colour,
                hatch=hatch,
                edgecolor="white",
                linewidth=0,
                label=name,
            )
        axis.set(title=title, yticks=range(COLUMNS))
        axis.ticklabel_format(axis="x", style="sci", scilimits=(-2, 3))
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(axis="y", labelsize=8, length=0)
    figure.axes[0].set(ylabel="column", ylim=(COLUMNS - 0.4, -0.6))
    figure.axes[1].legend(loc="lower right", frameon=False)
    figure.savefig(path, dpi=90)


if __name__ == "__main__":
    main()
