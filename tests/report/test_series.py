"""Published counts over the course of training: no two of them, of whatever steps, differ by a few
examples.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from torchfil.run.series import CountSeries, Levels
from torchfil.run.statistics import published_count

M = 10


def walks(seed: int, n: int = 150, steps: int = 80, movers: int = 4, scale: int = 12) -> np.ndarray:
    """Levels of n examples over time, of whom a few move at a step, mostly down, [steps, n]."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(scale // 2, scale, n)
    found = []
    for _ in range(steps):
        rows = rng.choice(n, movers, replace=False)
        codes = codes.copy()
        codes[rows] = np.clip(codes[rows] + rng.choice([-3, -2, -1, 1], movers), 0, scale - 1)
        found.append(codes)
    return np.stack(found)


def published(
    codes: np.ndarray, scale: int, *, with_empty: bool = True
) -> list[tuple[int, np.ndarray, int]]:
    """Step, members and count of all that is published: up to a level, and between two that follow
    each other.
    """
    series, found = CountSeries(M), []
    for step, own in enumerate(codes):
        told = series.publish({"x": Levels(own, scale, with_empty=with_empty)})["x"]
        found += [(step, own <= level, count) for level, count in told.items()]
        for (low, less), (high, more) in itertools.pairwise(told.items()):
            found.append((step, (low < own) & (own <= high), more - less))
    return found


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("with_empty", [True, False])
def test_any_two_published_sets_differ_by_nobody_or_by_many(seed: int, with_empty: bool) -> None:
    codes = walks(seed)
    n, told = codes.shape[1], published(codes, 12, with_empty=with_empty)
    sets = [members for _, members, _ in told]
    for one, other in itertools.combinations([np.zeros(n, dtype=bool), *sets], 2):
        apart = int((one != other).sum())
        assert apart == 0 or apart >= M
        assert apart == n or n - apart >= M
    for _, members, count in told:
        assert abs(int(members.sum()) - count) <= M
    steps = {step for step, _, _ in told}
    assert len(steps) > 10, "the series goes on"
    assert 0 in steps


def test_names_are_kept_apart_from_each_other_too() -> None:
    """Two scales that hold nearly the same examples: the second one's counts are left out."""
    codes = np.repeat([0, 1], [50, 50])
    nearly = codes.copy()
    nearly[:3] = 1
    series = CountSeries(M)
    assert series.publish({"a": Levels(codes, 2), "b": Levels(nearly, 2)}) == {
        "a": {0: 50},
        "b": {},
    }
    assert series.publish({"a": Levels(codes, 2), "b": Levels(1 - codes, 2)}) == {
        "a": {0: 50},
        "b": {0: 50},
    }
    # those who are not counted, but for three, would be told by a sum with n
    assert CountSeries(M).publish({"a": Levels(codes, 2), "b": Levels(1 - nearly, 2)}) == {
        "a": {0: 50},
        "b": {},
    }


class TestWhoMoved:
    """Batches of one example, known to the attacker, who sees a count change and names the
    batch.
    """

    def moves(self, seed: int) -> np.ndarray:
        codes = [np.ones(120, dtype=np.int64)]
        for row in np.random.default_rng(seed).permutation(120)[:60]:
            codes.append(codes[-1].copy())
            codes[-1][row] = 0
        return np.stack(codes)

    def candidates(self, told: list[tuple[int, int]], codes: np.ndarray) -> list[int]:
        """For every pair of points with different counts: how many examples may explain it."""
        found = []
        for (one, count), (other, then) in itertools.combinations(told, 2):
            if count != then:
                found.append(int((codes[one] != codes[other]).sum()))
        return found

    def test_the_attack_works_on_pages_of_single_steps(self) -> None:
        codes = self.moves(0)
        told = [(step, published_count(int((own == 0).sum()), M)) for step, own in enumerate(codes)]
        assert 1 in self.candidates(told, codes), "rounding alone names the one who crossed"

    def test_nobody_can_be_named_in_the_series(self) -> None:
        for seed in range(5):
            codes = self.moves(seed)
            told = [(step, count) for step, _, count in published(codes, 2)]
            found = self.candidates(told, codes)
            assert len(told) >= 5
            assert min(found) >= M


@pytest.mark.parametrize("least", [1, 4, 20])
def test_neither_the_least_nor_the_largest_shows(least: int) -> None:
    """On a fine scale, moving one outlier changes nothing that is told."""
    rng = np.random.default_rng(0)
    codes = rng.integers(30, 90, 300)
    told = []
    for low, high in ((30, 89), (least, 89), (30, 89 + least), (0, 127)):
        codes[0], codes[1] = low, high
        told.append(CountSeries(M).publish({"x": Levels(codes, 129, with_empty=False)}))
    assert told[0] == told[1] == told[2] == told[3]
    assert len(told[0]["x"]) > 10


def test_small_runs_tell_nothing() -> None:
    assert CountSeries(M).publish({"x": Levels(np.arange(9) % 2, 2)}) == {"x": {}}
    assert CountSeries(M).publish({"x": Levels(np.zeros(0, dtype=np.int64), 2)}) == {"x": {0: 0}}


def test_examples_of_a_stream_join() -> None:
    """Between two counts ten examples or more have joined, or nobody has."""
    series, told = CountSeries(M), []
    for n in range(20, 60, 3):
        told.append((n, series.publish({"x": Levels(np.arange(n) % 2, 2)})["x"].get(0)))
    published = [n for n, count in told if count is not None]
    assert published[0] == 20
    assert len(published) > 1
    assert all(after // 2 - before // 2 >= M for before, after in itertools.pairwise(published))

    # those above a level, too, of whom fewer than ten may have joined
    series, codes = CountSeries(M), np.repeat([0, 1], [50, 50])
    assert series.publish({"x": Levels(codes, 2)}) == {"x": {0: 50}}
    for above, told in ((3, {}), (12, {0: 60})):
        assert series.publish(
            {"x": Levels(np.concatenate([codes, np.repeat([0, 1], [12, above])]), 2)}
        ) == {"x": told}
