"""Hannun et al. 2021, § 6.4: IRFIL equalises the leakage of one attribute (Figure 7), on IWPC and
UCI Adult.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from attack_glm_attributes import accuracy_by_part
from glm_iwpc import COLOURS, SIGMA, reweighted
from matplotlib.figure import Figure
from paper_data import TabularTask

from reproduction.rows import Outcome, Row, Run, check_that
from torchfil.attacks import WhiteBoxInversion
from torchfil.glm import IRFIL, LinearRegression

__all__ = ["ROWS"]

L2 = {"IWPC": 1e-2, "Adult": 1e-3}
NAMES = {"IWPC": "vkorc1", "Adult": "marital-status"}
NEEDS = {"IWPC": ("iwpc",), "Adult": ("adult",)}
ROUNDS, TRIALS = 10, 100


@lru_cache(maxsize=2)
def task_of(run: Run, data: str) -> TabularTask:
    """Patients or census takers."""
    readers = run.data(*NEEDS[data])
    return readers.iwpc() if data == "IWPC" else readers.adult()


@lru_cache(maxsize=2)
def reweighted_task(run: Run, data: str, rounds: int) -> tuple[LinearRegression, IRFIL]:
    """IRFIL on the attribute's η, by least squares."""
    task = task_of(run, data)
    y = task.train_targets if data == "IWPC" else 2 * task.train_targets - 1
    model = LinearRegression(l2=L2[data])
    return model, reweighted(
        model, task.train_inputs, y, list(task.attributes[NAMES[data]]), rounds
    )


def figure_7_eta(run: Run, data: str) -> Outcome:
    """The attribute's η over rounds of IRFIL."""
    result = reweighted_task(run, data, 2 if run.tiny else ROUNDS)[1]
    eta = result.etas / SIGMA
    rounds = np.arange(len(eta))
    figure = Figure(figsize=(4.6, 3.2), layout="constrained")
    axis = figure.subplots()
    for low, high, opacity in ((0.01, 0.99, 0.2), (0.1, 0.9, 0.35), (0.25, 0.75, 0.5)):
        ends = np.quantile(eta, [low, high], axis=1)
        axis.fill_between(rounds, *ends, color=COLOURS[0], alpha=opacity, linewidth=0)
    axis.plot(rounds, eta.mean(axis=1), "o-", color=COLOURS[1], markersize=3)
    axis.set(
        xlabel="iteration of IRFIL",
        ylabel=f"η of {NAMES[data]} (σ = 1e-3)",
        yscale="log",
        title=data,
    )
    name = f"repro_hannun_figure7_{data.lower()}.png"
    figure.savefig(run.out / name, dpi=80)

    # Relative to the mean, which IRFIL also changes.
    ratio = [float(row.std() / row.mean()) for row in eta]
    last, two = ratio[-1], ratio[min(2, len(ratio) - 1)]
    told = f"{ratio[0]:.2f}, {two:.3f}, {last:.1e}"
    checks = (
        check_that(
            "η of all examples",
            "rapidly converge to the same value",
            told,
            "std/mean below 0.05 after ten rounds",
            last < 0.05,
        ),
    )
    here = (
        f"std/mean of η before, after two and after {len(eta) - 1} rounds: {told}; mean "
        f"{eta[0].mean():.3g} and {eta[-1].mean():.3g}"
    )
    return Outcome(here, checks, pictures=(name,))


def figure_7_deciles(run: Run, data: str) -> Outcome:
    """White-box accuracy by decile of the first η, after 0, 2 and 10 rounds."""
    task = task_of(run, data)
    X, y = task.train_inputs, task.train_targets if data == "IWPC" else 2 * task.train_targets - 1
    attribute = task.question(NAMES[data])
    plain = LinearRegression(l2=L2[data]).fit(X, y)
    eta = plain.fil(X, y, attributes={"a": attribute.columns})["a"]

    figure = Figure(figsize=(4.6, 3.2), layout="constrained")
    axis = figure.subplots()
    deciles = {}
    for rounds, colour in zip((0, 2, 2 if run.tiny else ROUNDS), COLOURS, strict=False):
        model = reweighted_task(run, data, rounds)[1].model if rounds else plain
        attack = WhiteBoxInversion(model, X, y, attribute)
        deciles[rounds] = accuracy_by_part(
            attack.run(SIGMA, 3 if run.tiny else TRIALS, seed=1), eta
        )
        axis.plot(
            range(1, 11),
            deciles[rounds],
            "o-",
            color=colour,
            markersize=3,
            label=f"{rounds} iterations",
        )
    axis.set(
        xlabel="decile of the initial η", ylabel="white-box accuracy", ylim=(0, 1.03), title=data
    )
    axis.legend(frameon=False)
    name = f"repro_hannun_figure7_{data.lower()}_deciles.png"
    figure.savefig(run.out / name, dpi=80)

    # The difference between the highest and the lowest accuracy of a decile.
    ranges = {rounds: float(np.ptp(values)) for rounds, values in deciles.items()}
    first, second, last = (ranges[key] for key in (0, 2, max(ranges)))
    checks = (
        check_that(
            "highest decile, first",
            "much more susceptible",
            f"{deciles[0][-1]:.2f} against {deciles[0][0]:.2f}",
            "0.2 or more above the lowest",
            deciles[0][-1] - deciles[0][0] >= 0.2,
        ),
        check_that(
            "after two iterations",
            "flattened substantially",
            f"range {second:.2f} of {first:.2f}",
            "range at most half",
            second <= first / 2,
        ),
        check_that(
            "after ten", "nearly constant", f"range {last:.2f}", "range at most 0.15", last <= 0.15
        ),
    )
    here = (
        "range over deciles "
        + ", ".join(f"{value:.2f} after {rounds}" for rounds, value in ranges.items())
        + " rounds"
    )
    return Outcome(here, checks, {str(k): v.tolist() for k, v in deciles.items()}, (name,))


ROWS = (
    *(
        Row(
            f"hannun-figure7{'a' if data == 'IWPC' else 'c'}",
            "hannun",
            f"Figure 7{'a' if data == 'IWPC' else 'c'}, {data}",
            "the attribute's η rapidly converge to one value over rounds of IRFIL (σ = 1e-3)",
            f"{where}, least squares; {NAMES[data]}",
            lambda run, data=data: figure_7_eta(run, data),  # type: ignore[misc]
            0.3,
            NEEDS[data],
        )
        for data, where in (("IWPC", "3,855 patients"), ("Adult", "30,162 people"))
    ),
    *(
        Row(
            f"hannun-figure7{'b' if data == 'IWPC' else 'd'}",
            "hannun",
            f"Figure 7{'b' if data == 'IWPC' else 'd'}, {data}",
            "white-box accuracy: the top decile much more susceptible at first, flat after two "
            "rounds, nearly constant after ten",
            f"{where}, least squares; {NAMES[data]}; σ = 1e-3, 100 releases",
            lambda run, data=data: figure_7_deciles(run, data),  # type: ignore[misc]
            0.5,
            NEEDS[data],
        )
        for data, where in (("IWPC", "3,855 patients"), ("Adult", "30,162 people"))
    ),
)
