"""Hannun et al. 2021: Table 1 and Figure 5, linear models with and without IRFIL."""

from __future__ import annotations

from functools import lru_cache

from glm_table1 import COLOURS, Setting
from matplotlib.figure import Figure
from paper_data import BinaryTask

from reproduction.rows import Check, Outcome, Row, Run, check_near, check_that
from torchfil.glm import LinearRegression, LogisticRegression, iteratively_reweighted_fil

__all__ = ["ROWS"]

# mean η, its standard deviation, test accuracy in %; without and with IRFIL
TABLE_1 = {
    "MNIST linear": ((0.040, 0.014, 100.0), (0.047, 0.000, 99.8)),
    "MNIST logistic": ((0.027, 0.012, 99.8), (0.024, 0.000, 99.7)),
    "CIFAR linear": ((0.26, 0.08, 79.8), (0.30, 0.00, 80.7)),
    "CIFAR logistic": ((0.32, 0.15, 79.9), (0.25, 0.00, 79.1)),
}
PENALTIES = {"MNIST": 8e-4, "CIFAR": 8e-5}
NEEDS = {"MNIST": ("mnist",), "CIFAR": ("cifar10",)}
DATA = {
    "MNIST": "MNIST 0/1: 12,665 digits, 20 principal components",
    "CIFAR": "CIFAR-10 plane/car: 10,000 photographs, 20 principal components; JPEG copies",
}
ROUNDS = 15
JPEG = (
    "The photographs at hand went through JPEG once, and the paper's PCA and L-BFGS are not "
    "the same code."
)


@lru_cache(maxsize=4)
def task_of(run: Run, data: str) -> BinaryTask:
    """Inputs in the unit ball, projected to 20 components."""
    readers = run.data(*NEEDS[data])
    return readers.mnist_zero_one() if data == "MNIST" else readers.cifar_plane_car()


@lru_cache(maxsize=8)
def trained(run: Run, name: str) -> Setting:
    """One cell of Table 1: the model without weights, and 15 rounds of IRFIL."""
    data, kind = name.split()
    task = task_of(run, data)
    X, y = task.train_inputs, task.train_targets
    model, targets = (
        (LinearRegression(), 2 * y - 1)
        if kind == "linear"
        else (LogisticRegression(l2=PENALTIES[data]), y)
    )
    result = iteratively_reweighted_fil(model, X, targets, rounds=2 if run.tiny else ROUNDS)
    return Setting(X, targets, y, model.fit(X, targets), result)


def table_1(run: Run, name: str) -> Outcome:
    """Mean and deviation of η and test accuracy, before and after IRFIL."""
    setting, task = trained(run, name), task_of(run, name.split()[0])
    digits = 3 if name.startswith("MNIST") else 2
    # two units of the last digit that the paper prints, for η; half a point, for the accuracy
    within = 2 * 10.0**-digits

    checks: list[Check] = []
    told = []
    pairs = (
        (setting.model, setting.result.etas[0]),
        (setting.result.model, setting.result.etas[-1]),
    )
    for label, (model, eta), theirs in zip(("", " + IRFIL"), pairs, TABLE_1[name], strict=True):
        correct = 100 * float(((model.margin(task.test_inputs) > 0) == task.test_targets).mean())
        checks += [
            check_near(f"mean η{label}", theirs[0], float(eta.mean()), within, digits),
            check_near(f"std of η{label}", theirs[1], float(eta.std()), within, digits),
            check_near(f"accuracy{label}, %", theirs[2], correct, 0.5, 1),
        ]
        told.append(f"{eta.mean():.4f} ± {eta.std():.4f}, {correct:.2f} %")
    return Outcome("; IRFIL ".join(told), tuple(checks))


def figure_5(run: Run) -> Outcome:
    """Standard deviation of η over the rounds, all four settings."""
    figure = Figure(figsize=(5, 3.2), layout="constrained")
    axis = figure.subplots()
    checks, told = [], []
    for name, style in zip(TABLE_1, ("-", "--", "-.", ":"), strict=True):
        spread = trained(run, name).result.spread
        axis.semilogy(spread, style, color=COLOURS[name.startswith("CIFAR")], label=name)
        few = spread[min(5, len(spread) - 1)] / spread[0]
        told.append(f"{name} {100 * few:.1f} %")
        checks.append(
            check_that(
                name,
                "converges after a few rounds",
                told[-1],
                "below a tenth after 5 rounds",
                few < 0.1,
            )
        )
    axis.set(xlabel="iteration", ylabel="standard deviation of η")
    axis.legend(frameon=False)
    figure.savefig(run.out / "repro_hannun_figure5.png", dpi=80)
    here = "deviation after five rounds, of that before: " + ", ".join(told)
    return Outcome(here, tuple(checks), pictures=("repro_hannun_figure5.png",))


def _table_row(name: str) -> Row:
    data = name.split()[0]
    theirs = "; IRFIL ".join(
        f"{mean:g} ± {std:g}, {correct:g} %" for mean, std, correct in TABLE_1[name]
    )
    return Row(
        id=f"hannun-table1-{name.lower().replace(' ', '-')}",
        paper="hannun",
        item=f"Table 1, {name}",
        theirs=f"mean η ± std, test accuracy: {theirs}",
        data=DATA[data],
        measure=lambda run: table_1(run, name),
        minutes=0.5,
        needs=NEEDS[data],
        reason=JPEG if data == "CIFAR" else "",
    )


ROWS = (
    *(_table_row(name) for name in TABLE_1),
    Row(
        "hannun-figure5",
        "hannun",
        "Figure 5",
        "the deviation of η falls to nothing in a few rounds of IRFIL, in all four settings",
        "MNIST 0/1 and CIFAR-10 plane/car",
        figure_5,
        1.0,
        ("mnist", "cifar10"),
    ),
)
