"""Attacks on the public page: differences of groups, and the best linear guess from all that is
published.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.report.pages import files_of, summary_of
from tests.report.run_cases import made_up
from torchfil.report import SavedRun, write_report
from torchfil.report.comparison import compare_runs
from torchfil.report.groups import Grouping, GroupSummary, joined, split_beside
from torchfil.report.summary import summarise
from torchfil.run.saved_run import Attributes

SMALLEST = 10


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
