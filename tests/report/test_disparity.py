"""Groups beside each other: page and gate say the same, with the size of the effect, and nothing below it."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from tests.report.pages import text_of
from tests.report.run_cases import made_up
from torchfil.gate.gate import check
from torchfil.gate.policy import Policy
from torchfil.gate.rules import Verdict
from torchfil.report import SavedRun, write_report
from torchfil.report.summary import summarise
from torchfil.run.statistics import disparity_of, group_levels

RNG = np.random.default_rng(0)
HALF = np.r_[np.ones(11), np.full(9, 90.0)]  # its median is 1, its geometric mean is not
NOISE, WIDE = RNG.lognormal(0, 0.05, 500), RNG.lognormal(0, 2.0, (2, 12))


def grouped(levels: dict[str, np.ndarray]) -> SavedRun:
    """A run whose groups have these η̄."""
    fil = np.concatenate(list(levels.values()))
    labels = np.concatenate([np.full(len(own), name) for name, own in levels.items()])
    run = made_up(len(fil), groups={"site": labels}, attacks=[])
    run.columns["fil"][:] = fil
    with np.errstate(divide="ignore"):
        run.columns["mse_bound"][:], run.columns["mse_bound_low"][:] = fil**-2.0, 0.9 * fil**-2.0
    return run


def judged(run: SavedRun, limit: float = 2.0) -> Verdict:
    return next(verdict for verdict in check(run, Policy(max_group_disparity=limit)) if verdict.subject == "site")


def test_page_and_gate_say_the_same_of_any_groups() -> None:
    """Geometric means, of groups that are large enough to speak for themselves."""
    rng = np.random.default_rng(0)
    sizes = {"a": 30, "b": 12, "c": 3, "d": 1, "e": 10}
    run = grouped({name: rng.lognormal(rng.normal(), 1.0, size) for name, size in sizes.items()})
    fil, site = run.columns["fil"], run.groups["site"]
    means = [math.exp(np.log(fil[site == name]).mean()) for name, size in sizes.items() if size >= 10]
    (grouping,) = summarise(run).groupings
    assert grouping.disparity is not None
    assert judged(run).found == grouping.disparity.ratio == pytest.approx(max(means) / min(means))


@pytest.mark.parametrize(
    ("levels", "limit", "passed", "found"),
    [
        ({"A": HALF, "B": np.ones(20)}, 2.0, False, 90 ** (9 / 20)),
        ({"A": np.full(10, 0.3), "B": np.full(20, 0.3)}, 1.0, True, 1.0),
        ({"A": np.full(20, 0.5), "B": np.zeros(20)}, 1e9, False, math.inf),
        ({"A": np.full(9, 0.5), "B": np.full(20, 0.2)}, 2.0, False, None),
    ],
)
def test_the_gate(levels: dict[str, np.ndarray], limit: float, passed: bool, found: float | None) -> None:
    verdict = judged(grouped(levels), limit)
    assert (verdict.passed, verdict.found) == (passed, found if found is None else pytest.approx(found))
    assert verdict.rows.tolist() == ([] if passed or found is None else list(range(20)))


def test_nothing_infinite_and_alike() -> None:
    levels = group_levels(np.repeat([0.0, 1.0], 10), np.repeat([0, 1], 10), ["a", "b"])
    found = disparity_of(levels)
    assert levels == {"a": 0.0, "b": 1.0}
    assert found is not None
    assert found.ratio == math.inf
    assert disparity_of({"a": math.inf, "b": math.inf}) == disparity_of({"a": 0.0, "b": 0.0})
    assert disparity_of({"a": 1.0}) is None


@pytest.mark.parametrize(
    ("levels", "told"),
    [
        ({"A": np.full(20, 0.5), "B": np.full(20, 0.2)}, "A has 2.5 times the FIL of B"),
        ({"A": np.full(20, 0.5), "B": np.zeros(20)}, "A leaks beyond all measure beside B"),
        ({"A": 1.4 * NOISE, "B": NOISE}, "Clearly above all examples: A."),
        ({"A": 1.08 * NOISE, "B": NOISE}, "smaller differences are not called"),  # too small
        ({"A": 1.3 * WIDE[0], "B": WIDE[1]}, "smaller differences are not called"),  # by chance
        ({"A": np.full(9, 0.5), "B": np.full(20, 0.2)}, "Fewer than two groups have 10 measured"),
    ],
)
def test_the_page(tmp_path: Path, levels: dict[str, np.ndarray], told: str) -> None:
    text = text_of(write_report(grouped(levels), tmp_path / "report"), "groups")
    assert told in text
    assert ("times the FIL of" in text) == (told.startswith(("A has", "Clearly")))
