"""Proofs of :mod:`torchfil.run.disclosure`: what is published tells of nobody or of ten or more.

Counts are enumerated; counts over the course of training, groups and their means are attacked: by
differences, and by the best linear guess from all that is published.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.report.pages import files_of, summary_of
from tests.report.run_cases import made_up
from torchfil.report import SavedRun, write_report
from torchfil.report.comparison import compare_runs
from torchfil.report.groups import Grouping, GroupSummary
from torchfil.report.summary import summarise
from torchfil.run.disclosure import (
    CountSeries,
    Levels,
    joined,
    published_count,
    split_beside,
)
from torchfil.run.saved_run import Attributes

SMALLEST = 10


class TestCounts:
    """Every count up to 60, and every two of nested sets, for every least group up to 12."""

    @pytest.mark.parametrize("smallest", range(2, 13))
    def test_neither_a_count_nor_a_difference_tells_of_few(self, smallest: int) -> None:
        may_be: dict[int | str, set[int]] = {}
        for count in range(5 * smallest):
            may_be.setdefault(published_count(count, smallest), set()).add(count)
        few = may_be.pop(f"fewer than {smallest}")
        assert few == set(range(1, smallest)), "that there are some, and not how many"
        assert may_be[0] == {0}
        assert all(shown % smallest == 0 for shown in may_be)
        for one, other in itertools.combinations_with_replacement(sorted(may_be), 2):
            apart = {b - a for a in may_be[one] for b in may_be[other] if b >= a}
            assert not apart <= few, "always nobody, or enough, may stand behind the difference"


def run_of(fil: np.ndarray, groups: dict[str, np.ndarray]) -> SavedRun:
    n = len(fil)
    columns = {
        "fil": fil,
        "mse_bound": fil**-2,
        "mse_bound_low": 0.9 * fil**-2,
        "participations": np.full(n, 9),
        "missed": np.zeros(n, dtype=np.int64),
    }
    return SavedRun(
        about={"dataset": {"input_range": [0, 1]}}, ids=np.arange(n), columns=columns, groups=groups
    )


def published(
    groupings: Sequence[Grouping], groups: Mapping[str, np.ndarray]
) -> list[tuple[np.ndarray, float]]:
    """Who stands behind each published mean, as an attacker knows it who knows all groups, and log
    of the mean.
    """
    found = []
    for grouping in groupings:
        labels = groups[grouping.name]
        named = {group.name for group in grouping.groups}
        for group in grouping.groups:
            members = (
                labels == group.name if group.name in labels else ~np.isin(labels, list(named))
            )
            found.append((members, float(np.log(group.fil))))
    return found


def best_linear_guess(
    means: Sequence[tuple[np.ndarray, float]], mean: float, spread: float, noise: float
) -> np.ndarray:
    """The posterior mean of every log η̄, [n], from means over known members, for a prior N(mean,
    spread²) each.

    Where two sets of members differ by one example, this is their difference; ``noise`` is what
    rounding leaves.
    """
    who = np.stack([members / members.sum() for members, _ in means])  # [k, n]
    told = np.asarray([value for _, value in means]) - mean
    gram = spread**2 * who @ who.T + noise**2 * np.eye(len(told))
    return mean + spread**2 * who.T @ np.linalg.lstsq(gram, told, rcond=1e-14)[0]


def two_groupings(
    rng: np.random.Generator, flips: int
) -> tuple[np.ndarray, dict[str, np.ndarray], int]:
    """Examples, a random grouping, the same with some examples in the other group, and one of
    these.
    """
    n = int(rng.integers(40, 90))
    labels = rng.permutation(np.where(np.arange(n) < rng.integers(15, n - 14), "a", "b"))
    rows = rng.choice(n, flips, replace=False)
    moved = np.where(np.isin(np.arange(n), rows), np.where(labels == "a", "b", "a"), labels)
    return rng.lognormal(size=n), {"first": labels, "second": moved}, int(rows[0])


class TestDifferencing:
    def errors(
        self, *, redacted: bool, flips: int, noise: float, seed: int = 0
    ) -> tuple[np.ndarray, np.ndarray]:
        """Of 120 attacked examples the squared errors of log η̄: of the attack, and of the
        prior.
        """
        rng = np.random.default_rng(seed)
        attacked, blind = [], []
        for _ in range(120):
            fil, groups, target = two_groupings(rng, flips)
            summary = summarise(run_of(fil, groups), redacted=redacted)
            logs = np.log(fil)
            means = published(summary.groupings, groups)
            guess = best_linear_guess(means, logs.mean(), logs.std(), noise)
            attacked.append((guess[target] - logs[target]) ** 2)
            blind.append((logs.mean() - logs[target]) ** 2)
        return np.asarray(attacked), np.asarray(blind)

    def test_the_attack_works_on_numbers_that_are_not_protected(self) -> None:
        attacked, blind = self.errors(redacted=False, flips=1, noise=1e-6)
        assert np.sqrt(attacked).max() < 0.01, "everybody's η̄ within 1 %"
        assert blind.mean() > 0.5

    @pytest.mark.parametrize("flips", [1, 2, 9])
    def test_groupings_that_differ_by_few_give_nothing_away(self, flips: int) -> None:
        attacked, blind = self.errors(redacted=True, flips=flips, noise=0.02)
        assert attacked.mean() > (1 - 1 / SMALLEST) * blind.mean() * 0.97
        assert (np.sqrt(attacked) < 0.05).mean() <= (np.sqrt(blind) < 0.05).mean() + 0.03

    def test_random_groupings_of_many_kinds(self) -> None:
        """Several groupings with several groups, some alike: nobody is told better than as one of
        ten.
        """
        rng = np.random.default_rng(1)
        unexplained = []
        for _ in range(120):
            n = int(rng.integers(40, 160))
            groups: dict[str, np.ndarray] = {}
            for number in range(int(rng.integers(2, 7))):
                fresh = rng.choice(list("abcde")[: int(rng.integers(2, 6))], n)
                alike = list(groups.values())[-1].copy() if groups and rng.random() < 0.6 else fresh
                alike[rng.choice(n, 3)] = "a"
                groups[f"grouping {number}"] = alike
            fil = rng.lognormal(size=n)
            logs = np.log(fil)
            means = published(summarise(run_of(fil, groups), redacted=True).groupings, groups)
            guess = (
                best_linear_guess(means, logs.mean(), logs.std(), 0.02)
                if means
                else np.full(n, logs.mean())
            )
            unexplained.append(np.square(guess - logs).mean() / logs.var())
        assert np.mean(unexplained) > 1 - 1 / SMALLEST


def test_a_reconstruction_from_the_public_files(tmp_path: Path) -> None:
    """Thirty yes-or-no groupings of 60 examples: as many equations as it takes, were they all
    answered.
    """
    rng = np.random.default_rng(2)
    fil = rng.lognormal(size=60)
    groups = {f"grouping {k}": rng.choice(["a", "b"], 60) for k in range(60)}
    logs = np.log(fil)

    def explained(summary: Sequence[Grouping], noise: float) -> float:
        guess = best_linear_guess(published(summary, groups), logs.mean(), logs.std(), noise)
        return 1 - float(np.square(guess - logs).mean() / logs.var())

    assert explained(summarise(run_of(fil, groups)).groupings, 1e-6) > 0.95
    page = write_report(run_of(fil, groups), tmp_path / "public", redacted=True)
    data = summary_of(page)["groupings"]
    assert [row["name"] for row in data] == list(groups)
    again = [
        Grouping(**{**row, "groups": [GroupSummary(**group) for group in row["groups"]]})
        for row in data
    ]
    assert sum(bool(grouping.groups) for grouping in again) >= 1
    assert explained(again, 0.02) < 1 / SMALLEST
    assert "Not shown: beside the groupings above" in page.read_text(encoding="utf-8")


class TestOutliers:
    """Ten in a group, nine of whom the attacker knows; the tenth leaks as nobody else does."""

    OTHERS = np.asarray([0.5, 0.6, 0.8, 0.9, 1.0, 1.1, 1.2, 1.5, 1.7])

    def run(self, fil: float) -> SavedRun:
        everybody = np.concatenate([[fil], self.OTHERS, np.linspace(0.4, 2.0, 20)])
        groups = {"site": np.asarray(["A"] * 10 + ["B"] * 20)}
        run = run_of(everybody, groups)
        spared = {"fil_before": everybody, "epsilon": everybody, "clip_weight": np.ones(30)}
        error = np.stack([1 / everybody, everybody], axis=1)
        attributes = Attributes(["age", "height"], ["", ""], error, error)
        return dataclasses.replace(run, columns={**run.columns, **spared}, attributes=attributes)

    def recovered(self, fil: float, *, redacted: bool) -> float:
        """What nine known members and the group's mean give of the tenth."""
        (grouping,) = summarise(self.run(fil), redacted=redacted).groupings
        (mean,) = (group.fil for group in grouping.groups if group.name == "A")
        return float(mean**10 / self.OTHERS.prod())

    def test_the_mean_of_a_group(self) -> None:
        assert self.recovered(1e4, redacted=False) == pytest.approx(1e4), "the attack works"
        assert self.recovered(1e4, redacted=True) < 17, (
            "ten times the group's median, within rounding"
        )
        assert self.recovered(1e-4, redacted=True) > 1 / 17
        assert self.recovered(1.0, redacted=True) == pytest.approx(1.0, rel=0.7), (
            "usual values count as they are"
        )

    def test_no_file_tells_by_how_much_somebody_stands_out(self, tmp_path: Path) -> None:
        """Of the tenth, all files say the same for a leakage of a hundred times the median as for a
        million times.
        """
        files = []
        for fil in (1e2, 1e4, 1e6):
            files.append(files_of(write_report(self.run(fil), tmp_path / f"{fil}", redacted=True)))
        assert files[0] == files[1] == files[2]
        compared = [
            compare_runs(self.run(fil), self.run(1.0), redacted=True) for fil in (1e2, 1e4, 1e6)
        ]
        assert repr(compared[0]) == repr(compared[1]) == repr(compared[2])

    def test_one_lower_end_of_zero_or_none(self) -> None:
        """It neither makes the published number useless nor shows; ten of them do."""
        run, ends = self.run(1.0), []
        for odd in (1e-6, 0.0, np.nan):
            run.columns["mse_bound_low"][0] = odd
            ends.append(summarise(run, redacted=True).lowest_end)
        assert ends[0] == ends[1] == ends[2] > 0.1
        run.columns["mse_bound_low"][:10] = 0.0
        assert summarise(run, redacted=True).lowest_end == 0


class TestCells:
    def test_no_cell_is_small_whatever_is_asked_for(self) -> None:
        """Cells of all published groupings together: what is left out, complements and
        intersections among them.
        """
        rng = np.random.default_rng(0)
        shown = 0
        for _ in range(200):
            n, cells = int(rng.integers(10, 200)), None
            for _ in range(int(rng.integers(1, 6))):
                labels = rng.choice(list("abcdefgh")[: int(rng.integers(1, 8))], n)
                split = split_beside(labels, SMALLEST, cells)
                cells = joined(cells, split)
                shown += len(split.names)
            assert np.bincount(cells).min() >= SMALLEST
        assert shown > 700, "something is published"

    def test_small_groups_cannot_be_had_as_a_difference(self) -> None:
        labels = np.array(["a"] * 50 + ["b"] * 20 + ["c"] * 3)
        split = split_beside(labels, 10)
        assert split.names == ["a"]  # b joined c, for otherwise c were everybody less a and b
        assert split.merged == 2
        assert np.bincount(split.codes).tolist() == [50, 23]
        assert set(split_beside(np.array(["a"] * 4 + ["b"] * 3), 10).codes) == {-1}
        assert split_beside(labels, 1).names == ["a", "b", "c"]

    def test_groups_are_shown_or_coarsened_where_that_helps(self) -> None:
        """Site C has women only but for three: it goes together with others."""
        run = made_up(
            400,
            groups={
                "sex": np.array(["f", "m"] * 200),
                "site": np.repeat(["A", "B", "C", "D"], 100),
            },
        )
        summary = summarise(run, redacted=True)
        assert [(len(grouping.groups), grouping.withheld) for grouping in summary.groupings] == [
            (2, False),
            (4, False),
        ]
        sex = np.array(["f", "m"] * 100 + ["f"] * 30 + ["m"] * 3)
        site = np.array(["A"] * 100 + ["B"] * 100 + ["C"] * 33)
        split = split_beside(site, 10, joined(None, split_beside(sex, 10)))
        assert (split.names, split.merged, split.withheld) == (["B"], 2, False)

    def test_group_means_have_two_digits(self) -> None:
        (grouping,) = summarise(
            made_up(100, groups={"g": np.array(["a", "b"] * 50)}), redacted=True
        ).groupings
        for group in grouping.groups:
            for value in (group.fil, group.low, group.high):
                assert value == float(f"{value:.2g}")
        assert grouping.fil == float(f"{grouping.fil:.2g}")

        run = made_up(40)
        run.columns["participations"] = np.zeros(40, dtype=np.int64)  # nothing measured
        assert [grouping.groups for grouping in summarise(run, redacted=True).groupings] == [[], []]


# ---------------------------------------------------------------------- counts over time


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


def told_counts(
    codes: np.ndarray, scale: int, *, with_empty: bool = True
) -> list[tuple[int, np.ndarray, int]]:
    """Step, members and count of all that is published: up to a level, and between two that follow
    each other.
    """
    series, found = CountSeries(SMALLEST), []
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
    n, told = codes.shape[1], told_counts(codes, 12, with_empty=with_empty)
    sets = [members for _, members, _ in told]
    for one, other in itertools.combinations([np.zeros(n, dtype=bool), *sets], 2):
        apart = int((one != other).sum())
        assert apart == 0 or apart >= SMALLEST
        assert apart == n or n - apart >= SMALLEST
    for _, members, count in told:
        assert abs(int(members.sum()) - count) <= SMALLEST
    steps = {step for step, _, _ in told}
    assert len(steps) > 10, "the series goes on"
    assert 0 in steps


def test_names_are_kept_apart_from_each_other_too() -> None:
    """Two scales that hold nearly the same examples: the second one's counts are left out."""
    codes = np.repeat([0, 1], [50, 50])
    nearly = codes.copy()
    nearly[:3] = 1
    series = CountSeries(SMALLEST)
    assert series.publish({"a": Levels(codes, 2), "b": Levels(nearly, 2)}) == {
        "a": {0: 50},
        "b": {},
    }
    assert series.publish({"a": Levels(codes, 2), "b": Levels(1 - codes, 2)}) == {
        "a": {0: 50},
        "b": {0: 50},
    }
    # those who are not counted, but for three, would be told by a sum with n
    assert CountSeries(SMALLEST).publish({"a": Levels(codes, 2), "b": Levels(1 - nearly, 2)}) == {
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
        told = [
            (step, published_count(int((own == 0).sum()), SMALLEST))
            for step, own in enumerate(codes)
        ]
        assert 1 in self.candidates(told, codes), "rounding alone names the one who crossed"

    def test_nobody_can_be_named_in_the_series(self) -> None:
        for seed in range(5):
            codes = self.moves(seed)
            told = [(step, count) for step, _, count in told_counts(codes, 2)]
            found = self.candidates(told, codes)
            assert len(told) >= 5
            assert min(found) >= SMALLEST


@pytest.mark.parametrize("least", [1, 4, 20])
def test_neither_the_least_nor_the_largest_shows(least: int) -> None:
    """On a fine scale, moving one outlier changes nothing that is told."""
    rng = np.random.default_rng(0)
    codes = rng.integers(30, 90, 300)
    told = []
    for low, high in ((30, 89), (least, 89), (30, 89 + least), (0, 127)):
        codes[0], codes[1] = low, high
        told.append(CountSeries(SMALLEST).publish({"x": Levels(codes, 129, with_empty=False)}))
    assert told[0] == told[1] == told[2] == told[3]
    assert len(told[0]["x"]) > 10


def test_small_runs_tell_nothing() -> None:
    assert CountSeries(SMALLEST).publish({"x": Levels(np.arange(9) % 2, 2)}) == {"x": {}}
    assert CountSeries(SMALLEST).publish({"x": Levels(np.zeros(0, dtype=np.int64), 2)}) == {
        "x": {0: 0}
    }


def test_examples_of_a_stream_join() -> None:
    """Between two counts ten examples or more have joined, or nobody has."""
    series, told = CountSeries(SMALLEST), []
    for n in range(20, 60, 3):
        told.append((n, series.publish({"x": Levels(np.arange(n) % 2, 2)})["x"].get(0)))
    published = [n for n, count in told if count is not None]
    assert published[0] == 20
    assert len(published) > 1
    assert all(
        after // 2 - before // 2 >= SMALLEST for before, after in itertools.pairwise(published)
    )

    # those above a level, too, of whom fewer than ten may have joined
    series, codes = CountSeries(SMALLEST), np.repeat([0, 1], [50, 50])
    assert series.publish({"x": Levels(codes, 2)}) == {"x": {0: 50}}
    for above, told in ((3, {}), (12, {0: 60})):
        assert series.publish(
            {"x": Levels(np.concatenate([codes, np.repeat([0, 1], [12, above])]), 2)}
        ) == {"x": told}
