"""Groups beside each other: page and gate say the same, with the size of the effect, and nothing
below it.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests.report.run_cases import made_up
from torchfil.gate.gate import check
from torchfil.gate.policy import Policy
from torchfil.report import SavedRun
from torchfil.report.summary import summarise
from torchfil.run.statistics import disparity_of, group_levels

HALF = np.r_[np.ones(11), np.full(9, 90.0)]  # its median is 1, its geometric mean is not
NOISE = np.random.default_rng(0).lognormal(0, 0.05, 500)


def grouped(levels: dict[str, np.ndarray]) -> SavedRun:
    """A run whose groups have these η̄."""
    fil = np.concatenate(list(levels.values()))
    labels = np.concatenate([np.full(len(own), name) for name, own in levels.items()])
    run = made_up(len(fil), groups={"site": labels}, attacks=[])
    run.columns["fil"][:] = fil
    with np.errstate(divide="ignore"):
        run.columns["mse_bound"][:], run.columns["mse_bound_low"][:] = fil**-2.0, 0.9 * fil**-2.0
    return run


def test_page_and_gate_say_the_same_of_any_groups() -> None:
    """Geometric means, of groups that are large enough to speak for themselves."""
    rng = np.random.default_rng(0)
    sizes = {"a": 30, "b": 12, "c": 3, "d": 1, "e": 10}
    run = grouped({name: rng.lognormal(rng.normal(), 1.0, size) for name, size in sizes.items()})
    fil, site = run.columns["fil"], run.groups["site"]
    means = [
        math.exp(np.log(fil[site == name]).mean()) for name, size in sizes.items() if size >= 10
    ]
    (verdict,) = (v for v in check(run, Policy(max_group_disparity=2.0)) if v.subject == "site")
    (grouping,) = summarise(run).groupings
    assert verdict.found == grouping.disparity.ratio == pytest.approx(max(means) / min(means))


@pytest.mark.parametrize(
    ("levels", "limit", "found"),
    [
        ({"A": HALF, "B": np.ones(20)}, 2.0, 90 ** (9 / 20)),
        ({"A": np.full(20, 0.5), "B": np.full(20, 0.2)}, 2.6, 2.5),
        ({"A": np.full(20, 0.5), "B": np.zeros(20)}, 1e9, math.inf),
        ({"A": 1.4 * NOISE, "B": NOISE}, 1.5, 1.4),
        ({"A": np.full(10, 0.3), "B": np.full(20, 0.3)}, 1.0, 1.0),
        ({"A": np.full(9, 0.5), "B": np.full(20, 0.2)}, 2.0, None),
    ],
)
def test_the_gate_on_groups(
    levels: dict[str, np.ndarray], limit: float, found: float | None
) -> None:
    run = grouped(levels)
    (verdict,) = (v for v in check(run, Policy(max_group_disparity=limit)) if v.subject == "site")
    passed = found is not None and found <= limit
    assert (verdict.passed, verdict.found) == (
        passed,
        found if found is None else pytest.approx(found),
    )
    assert verdict.rows.tolist() == ([] if passed or found is None else list(range(20)))


def test_nothing_infinite_and_alike() -> None:
    levels = group_levels(np.repeat([0.0, 1.0], 10), np.repeat([0, 1], 10), ["a", "b"])
    assert levels == {"a": 0.0, "b": 1.0}
    assert disparity_of(levels).ratio == math.inf
    assert disparity_of({"a": math.inf, "b": math.inf}) == disparity_of({"a": 0.0, "b": 0.0})
    assert disparity_of({"a": 1.0}) is None
