"""Two runs compared: matched by id, moved or not, refused where they cannot be compared, nothing of one in public."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.report.run_cases import made_up
from tests.test_cli import call, refused
from torchfil.report import save
from torchfil.report.comparison import compare_runs, in_short
from torchfil.report.page import render_comparison
from torchfil.run.saved_run import QuestionRecord, SavedRun


def quieter(run: SavedRun, factor: float = 2.0) -> SavedRun:
    """The same run with more noise: η̄ over the factor."""
    columns = dict(run.columns)
    columns["fil"] = columns["fil"] / factor
    for name in ("mse_bound", "mse_bound_low"):
        columns[name] = columns[name] * factor**2
    mechanism = {**run.about["mechanism"], "noise_multiplier": run.about["mechanism"]["noise_multiplier"] * factor}
    return dataclasses.replace(run, columns=columns, about={**run.about, "mechanism": mechanism})


def shuffled(run: SavedRun, rows: np.ndarray) -> SavedRun:
    """Some examples in another order, with what has an entry for each."""
    return dataclasses.replace(
        run,
        ids=run.ids[rows],
        columns={name: values[rows] for name, values in run.columns.items()},
        groups={name: values[rows] for name, values in run.groups.items()},
        attributes=None,
        pictures=None,
        texts=None,
        attacks=[],
        questions=[
            dataclasses.replace(q, divergence=q.divergence[rows], divergence_high=q.divergence_high[rows])
            for q in run.questions
        ],
    )


@pytest.mark.parametrize("text_ids", [False, True])
@pytest.mark.parametrize("redacted", [False, True])
def test_a_run_beside_itself_has_not_moved(text_ids: bool, redacted: bool) -> None:
    run = made_up(text_ids=text_ids)
    same = compare_runs(run, run, redacted=redacted)
    assert same.nothing_moved
    assert same.ratio["mean"] == 1.0
    assert same.settings == []
    assert dataclasses.asdict(same.before) == dataclasses.asdict(same.after)
    assert all(pair.before == pair.after for pairs in same.groups.values() for pair in pairs)
    assert all(pair.before == pair.after for pair in [*same.attributes, *same.questions])
    assert ("Nothing moved" in " ".join(in_short(same))) is not redacted


def test_examples_are_matched_by_id_in_any_order() -> None:
    run = made_up(text_ids=True)
    rows = np.random.default_rng(1).permutation(len(run))[:30]
    part = shuffled(quieter(run), rows)
    found = compare_runs(run, part)
    assert found.matched == 30
    assert (found.before.alone, found.after.alone) == (10, 0)
    assert found.moves is not None
    assert found.ratio == pytest.approx({"mean": 4.0, "0": 4.0, "0.5": 4.0, "1": 4.0})
    assert found.expected == 4.0
    for name, one, other in zip(found.moves.ids, found.moves.before, found.moves.after, strict=True):
        place = run.ids.tolist().index(name)
        assert one == run.columns["mse_bound"][place]
        assert other == pytest.approx(4 * one)
    by_group = {pair.name: pair for pair in found.groups["sex"]}
    for label in np.unique(run.groups["sex"][rows]):
        own = run.columns["fil"][rows][run.groups["sex"][rows] == label]
        assert by_group[label].before == pytest.approx(math.exp(np.log(own).mean()))
        assert by_group[label].after == pytest.approx(math.exp(np.log(own).mean()) / 2)
    assert found.settings == [("noise multiplier σ", 1.0, 2.0)]
    numbers = made_up()
    assert compare_runs(numbers, dataclasses.replace(numbers, ids=numbers.ids.astype(str))).matched == 40


def test_who_moved_is_told_from_who_may_have_moved_by_chance() -> None:
    run = made_up()
    fil = run.columns["fil"].copy()
    half = 1 / np.sqrt(run.columns["mse_bound_low"]) - fil
    moved = fil.copy()
    moved[3] += 1.5 * math.sqrt(2) * half[3]
    moved[4] -= 1.5 * math.sqrt(2) * half[4]
    moved[5] += 0.5 * half[5]
    columns = {**run.columns, "fil": moved, "mse_bound": moved**-2, "mse_bound_low": (moved + half) ** -2}
    found = compare_runs(run, dataclasses.replace(run, columns=columns))
    assert found.moves is not None
    assert np.flatnonzero(found.moves.clearly).tolist() == [3, 4]
    assert found.moves.clearly[[3, 4, 5]].tolist() == [-1, 1, 0]
    assert (found.less, found.more) == (1, 1)


def test_chance_moves_one_in_twenty() -> None:
    """Both runs drawn around the same truth, with the intervals that their errors have."""
    rng, n = np.random.default_rng(0), 20_000
    truth, error = rng.lognormal(size=n) + 5, 0.1
    both = []
    for _ in range(2):
        fil = truth + error * rng.normal(size=n)
        columns = {"fil": fil, "mse_bound": fil**-2, "mse_bound_low": (fil + 1.96 * error) ** -2}
        both.append(SavedRun(about={}, ids=np.arange(n), columns=columns))
    found = compare_runs(*both)
    assert isinstance(found.less, int)
    assert isinstance(found.more, int)
    assert (found.less + found.more) / n == pytest.approx(0.05, abs=0.005)


def test_who_crosses_the_blind_guess() -> None:
    run = made_up(about={"dataset": {"input_range": [0.0, 2.0]}, "mechanism": {"noise_multiplier": 1.0}})
    found = compare_runs(run, quieter(run, 1.5))
    low = run.columns["mse_bound_low"]
    assert found.before.exposed == int((low < 1).sum())
    assert found.after.exposed == int((2.25 * low < 1).sum())
    assert (found.newly_exposed, found.no_longer) == (0, int(((low < 1) & (2.25 * low >= 1)).sum()))


def test_examples_that_one_run_did_not_measure_are_left_out() -> None:
    run = made_up()
    columns = {**run.columns, "participations": run.columns["participations"].copy()}
    columns["participations"][:3] = 0
    found = compare_runs(run, dataclasses.replace(run, columns=columns))
    assert (found.matched, found.before.alone, found.after.alone) == (37, 3, 3)


def other_about(**changes: Any) -> SavedRun:
    run = made_up()
    return dataclasses.replace(run, about={**run.about, **changes})


def asking(name: str, answers: list[str]) -> SavedRun:
    divergence = np.ones((40, len(answers)))
    return made_up(questions=[QuestionRecord(name, answers, True, divergence, divergence)])


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (lambda: made_up(ids=np.arange(100, 140)), "share no ids"),
        (lambda: made_up(ids=np.zeros(40, dtype=np.int64)), "has the id 0 40 times"),
        (lambda: other_about(dataset={"num_coordinates": 7}), "private inputs of an example is 3 in the first and 7"),
        (lambda: other_about(unit_of_inputs="years"), "unit of inputs is None in the first and 'years'"),
        (lambda: other_about(linear={"private": ["age"]}), "what is private is None in the first and"),
        (lambda: asking("smokes", ["yes", "no"]), "answer different questions: sex in the first, smokes in the second"),
        (lambda: asking("sex", ["a", "b"]), "'sex' has the answers f, m in the first and a, b"),
    ],
)
def test_runs_that_cannot_be_compared(other: Any, why: str) -> None:
    with pytest.raises(ValueError, match=re.escape(why)):
        compare_runs(made_up(), other())
    with pytest.raises(ValueError, match="at least 2"):
        compare_runs(made_up(), made_up(), redacted=True, min_group=1)


def test_labels_that_changed_are_not_compared() -> None:
    run = made_up()
    labels = run.groups["sex"].copy()
    labels[0] = "x"
    found = compare_runs(run, dataclasses.replace(run, groups={**run.groups, "sex": labels}))
    assert list(found.groups) == ["site"]
    assert found.notes == ["By sex, examples have other labels in the second run: not compared."]


class TestPublic:
    def test_no_example_is_in_it(self) -> None:
        run = made_up(text_ids=True)
        found = compare_runs(run, quieter(run, 3.7), redacted=True)
        assert found.moves is None
        page = render_comparison(found)
        data = json.dumps(dataclasses.asdict(dataclasses.replace(found, moves=None)), default=str)
        for name in run.ids:
            assert name not in page
        for values in (run.columns["mse_bound"], run.columns["fil"], quieter(run, 3.7).columns["mse_bound"]):
            for value in values:
                assert f"{value:.6g}" not in data
                assert f"{value:.4g}" not in page.partition("<body>")[2]

    def test_numbers_have_two_digits(self) -> None:
        run = made_up(200)
        found = compare_runs(run, quieter(run, 3.7), redacted=True)
        groups = [value for pairs in found.groups.values() for pair in pairs for value in (pair.before, pair.after)]
        assert groups
        for value in (found.ratio["mean"], found.before.fil, *found.after.bound.values(), *groups):
            assert float(f"{value:.2g}") == value
        assert set(found.ratio) == {"mean"}  # the least and the largest are one example's

    def test_runs_that_differ_by_a_few_are_refused(self) -> None:
        run = made_up()
        with pytest.raises(ValueError, match="3 of 40 examples of one run are not compared"):
            compare_runs(run, shuffled(run, np.arange(37)), redacted=True)
        assert compare_runs(run, shuffled(run, np.arange(30)), redacted=True).matched == 30
        with pytest.raises(ValueError, match="4 examples are in both runs, fewer than min_group=10"):
            compare_runs(run, shuffled(run, np.arange(4)), redacted=True)

    def test_groupings_that_differ_by_one_person_are_not_both_shown(self) -> None:
        run = made_up()
        site = np.asarray(["A"] * 20 + ["B"] * 20)
        other = site.copy()
        other[3] = "B"
        run = dataclasses.replace(run, groups={"site": site, "ward": other})
        found = compare_runs(run, quieter(run), redacted=True)
        assert len(found.groups["site"]) == 2
        assert found.groups["ward"] == []


class TestPage:
    def test_the_page_loads_nothing_and_escapes(self) -> None:
        run = other_about(title="<script>alert(1)</script>")
        page = render_comparison(compare_runs(run, quieter(run)))
        assert "<script" not in page
        assert "&lt;script&gt;" in page
        assert "default-src 'none'" in page
        assert not re.search(r'(?:src|href)="(?!data:|#)', page)
        assert page.count("<svg") == 2  # wide and narrow

    def test_the_scatter_has_a_dot_for_each(self) -> None:
        run = made_up()
        page = render_comparison(compare_runs(run, quieter(run)))
        assert page.count("<circle") == 2 * len(run)


class TestCommand:
    @pytest.fixture
    def runs(self, tmp_path: Path) -> tuple[Path, Path]:
        run = made_up(text_ids=True)
        return save(run, tmp_path / "before.parquet"), save(quieter(run), tmp_path / "after.parquet")

    def test_text_json_and_page(self, runs: tuple[Path, Path], tmp_path: Path) -> None:
        page = tmp_path / "page.html"
        found = call("compare", *runs, "-o", page)
        assert found.exit_code == 0, found.output
        assert "noise multiplier σ" in found.stdout
        assert "After the change 40 are clearly less exposed, and none is clearly more exposed." in found.stdout
        assert "keep them confidential" in found.stdout
        assert page.stat().st_mode & 0o777 == 0o600
        assert "Zoë 3" in page.read_text()
        data = json.loads(call("compare", *runs, "--json").stdout)
        assert data["expected"] == 4.0
        assert data["settings"] == {"noise multiplier σ": {"before": 1.0, "after": 2.0}}
        assert "Nothing moved" in call("compare", runs[0], runs[0]).stdout

    def test_the_public_page(self, runs: tuple[Path, Path], tmp_path: Path) -> None:
        page = tmp_path / "page.html"
        found = call("compare", *runs, "-o", page, "--redacted")
        assert found.exit_code == 0, found.output
        assert "confidential" not in found.stdout
        assert "Zoë" not in page.read_text() + found.stdout

    def test_mistakes_take_one_line(self, runs: tuple[Path, Path], tmp_path: Path) -> None:
        assert "is one of the runs" in refused("compare", *runs, "-o", runs[0])
        assert "no file" in refused("compare", runs[0], tmp_path / "none.parquet")
        other = save(made_up(), tmp_path / "other.parquet")
        assert "share no ids" in refused("compare", runs[0], other)
        assert "at least 2" in refused("compare", *runs, "--redacted", "--min-group", 0)
