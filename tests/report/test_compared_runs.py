"""Two runs compared: matched by id, moved or not, refused where they cannot be compared, nothing of
one in public.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.report.run_cases import made_up, owned
from tests.test_cli import call, refused
from torchfil.report import save
from torchfil.report.comparison import compare_runs, in_short
from torchfil.report.page import render_comparison
from torchfil.run.baselines import UNTOLD, exposure_of
from torchfil.run.saved_run import QuestionRecord, SavedRun


def quieter(run: SavedRun, factor: float = 2.0) -> SavedRun:
    """The same run with more noise: η̄ over the factor."""
    columns = dict(run.columns)
    columns["fil"] = columns["fil"] / factor
    for name in ("mse_bound", "mse_bound_low"):
        columns[name] = columns[name] * factor**2
    mechanism = {
        **run.about["mechanism"],
        "noise_multiplier": run.about["mechanism"]["noise_multiplier"] * factor,
    }
    return dataclasses.replace(run, columns=columns, about={**run.about, "mechanism": mechanism})


@pytest.mark.parametrize("redacted", [False, True])
def test_a_run_beside_itself_has_not_moved(redacted: bool) -> None:
    run = made_up()
    same = compare_runs(run, dataclasses.replace(run, ids=run.ids.astype(str)), redacted=redacted)
    assert same.nothing_moved
    assert same.matched == 40
    assert same.ratio["mean"] == 1.0
    assert same.settings == []
    assert dataclasses.asdict(same.before) == dataclasses.asdict(same.after)
    assert all(pair.before == pair.after for pairs in same.groups.values() for pair in pairs)
    assert all(pair.before == pair.after for pair in [*same.attributes, *same.questions])
    assert ("Nothing moved" in " ".join(in_short(same))) is not redacted


def test_examples_are_matched_by_id_in_any_order() -> None:
    run = made_up(text_ids=True, attacks=[], texts=None)
    rows = np.random.default_rng(1).permutation(len(run))[:30]
    found = compare_runs(run, quieter(run).take(rows))
    assert (found.matched, found.before.alone, found.after.alone) == (30, 10, 0)
    assert found.ratio == pytest.approx({"mean": 4.0, "0": 4.0, "0.5": 4.0, "1": 4.0})
    assert found.expected == 4.0
    for name, one, other in zip(
        found.moves.ids, found.moves.before, found.moves.after, strict=True
    ):
        assert one == run.columns["mse_bound"][run.ids.tolist().index(name)]
        assert other == pytest.approx(4 * one)
    by_group = {pair.name: pair for pair in found.groups["sex"]}
    for label in np.unique(run.groups["sex"][rows]):
        own = run.columns["fil"][rows][run.groups["sex"][rows] == label]
        assert by_group[label].before == pytest.approx(math.exp(np.log(own).mean()))
        assert by_group[label].after == pytest.approx(math.exp(np.log(own).mean()) / 2)
    assert found.settings == [("noise multiplier σ", 1.0, 2.0)]


def test_who_moved_is_told_from_who_may_have_moved_by_chance() -> None:
    run = made_up()
    fil = run.columns["fil"].copy()
    half = 1 / np.sqrt(run.columns["mse_bound_low"]) - fil
    moved = fil.copy()
    moved[3] += 1.5 * math.sqrt(2) * half[3]
    moved[4] -= 1.5 * math.sqrt(2) * half[4]
    moved[5] += 0.5 * half[5]
    columns = {
        **run.columns,
        "fil": moved,
        "mse_bound": moved**-2,
        "mse_bound_low": (moved + half) ** -2,
    }
    found = compare_runs(run, dataclasses.replace(run, columns=columns))
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


def test_who_crosses_the_blind_guess_and_who_is_not_compared() -> None:
    run = made_up(
        about={"dataset": {"input_range": [0.0, 2.0]}, "mechanism": {"noise_multiplier": 1.0}}
    )
    found = compare_runs(run, quieter(run, 1.5))
    low = run.columns["mse_bound_low"]
    assert found.before.exposed == int((low < 1).sum())
    assert found.after.exposed == int((2.25 * low < 1).sum())
    assert (found.newly_exposed, found.no_longer) == (0, int(((low < 1) & (2.25 * low >= 1)).sum()))

    # more noise and fewer draws: whom the second run does not tell of is neither newly exposed nor
    # protected
    after = quieter(run, 9.0)
    after.columns["mse_bound_low"][:12] = 0.0
    found = compare_runs(run, after)
    rarely = np.bincount(exposure_of(run)[:12], minlength=4).tolist()
    assert (found.newly_exposed, found.after.classes[UNTOLD], found.after.exposed) == (0, 12, 0)
    assert [found.moved.get((each, UNTOLD), 0) for each in range(4)] == rarely
    assert "Too few draws to tell: 0 before, 12 after." in " ".join(in_short(found))

    other = made_up()
    other.columns["participations"][:3] = 0  # not measured
    other.groups["sex"][0] = "x"
    found = compare_runs(made_up(), other)
    assert (found.matched, found.before.alone, found.after.alone) == (37, 3, 3)
    other.columns["participations"][:3] = 1
    found = compare_runs(made_up(), other)
    # labels that changed are not compared
    assert (list(found.groups), len(found.notes)) == (["site"], 1)


def other_about(**changes: Any) -> SavedRun:
    return made_up(about={**made_up().about, **changes})


def asking(name: str, answers: list[str]) -> SavedRun:
    divergence = np.ones((40, len(answers)))
    return made_up(questions=[QuestionRecord(name, answers, True, divergence, divergence)])


@pytest.mark.parametrize(
    ("other", "why", "options"),
    [
        (lambda: made_up(ids=np.arange(100, 140)), "share no ids", {}),
        (lambda: made_up(ids=np.zeros(40, dtype=np.int64)), "1 different ones for 40 examples", {}),
        (lambda: other_about(dataset={"num_coordinates": 7}), "private inputs", {}),
        (lambda: other_about(linear={"private": ["age"]}), "what is private", {}),
        (lambda: owned(40), "unit of privacy is 'example' in the first and 'owner'", {}),
        (lambda: asking("smokes", ["yes", "no"]), "different questions", {}),
        (lambda: asking("sex", ["a", "b"]), "'sex' has the answers f, m in the first and a, b", {}),
        (lambda: made_up(), "at least 2", {"redacted": True, "min_group": 1}),
        (lambda: made_up().take(np.arange(37)), "3 of 40 examples", {"redacted": True}),
        (lambda: made_up().take(np.arange(4)), "4 examples are in both runs", {"redacted": True}),
    ],
)
def test_runs_that_cannot_be_compared(
    other: Callable[[], SavedRun], why: str, options: dict[str, Any]
) -> None:
    """In public, neither can those that differ by a few."""
    with pytest.raises(ValueError, match=re.escape(why)):
        compare_runs(made_up(), other(), **options)


def test_no_example_is_public() -> None:
    run = made_up(200, text_ids=True)
    louder = quieter(run, 3.7)
    found = compare_runs(run, louder, redacted=True)
    page, data = render_comparison(found), json.dumps(dataclasses.asdict(found), default=str)
    assert found.moves is None
    assert not [name for name in run.ids if name in page + data]
    for value in np.concatenate(
        [run.columns["mse_bound"], run.columns["fil"], louder.columns["mse_bound"]]
    ):
        assert f"{value:.6g}" not in data
        assert len(f"{value:.4g}") < 5 or f"{value:.4g}" not in page.partition("<body>")[2]
    groups = [
        value
        for pairs in found.groups.values()
        for pair in pairs
        for value in (pair.before, pair.after)
    ]
    assert groups
    for value in (found.ratio["mean"], found.before.fil, *found.after.bound.values(), *groups):
        assert float(f"{value:.2g}") == value
    assert set(found.ratio) == {"mean"}  # the least and the largest are one example's


def test_groupings_that_differ_by_one_person_are_not_both_public() -> None:
    site = np.asarray(["A"] * 20 + ["B"] * 20)
    run = made_up(groups={"site": site, "ward": np.where(np.arange(40) == 3, "B", site)})
    found = compare_runs(run, quieter(run), redacted=True)
    assert len(found.groups["site"]) == 2
    assert found.groups["ward"] == []
    half = run.take(np.arange(30))
    assert compare_runs(run, half, redacted=True).matched == 30


def test_the_command(tmp_path: Path) -> None:
    run, page = made_up(text_ids=True), tmp_path / "page.html"
    runs = save(run, tmp_path / "before.parquet"), save(quieter(run), tmp_path / "after.parquet")
    found = call("compare", *runs, "-o", page)
    assert found.exit_code == 0, found.output
    assert "keep them confidential" in found.stdout
    assert page.stat().st_mode & 0o777 == 0o600
    assert "Zoë 3" in page.read_text()
    data = json.loads(call("compare", *runs, "--json").stdout)
    assert data["expected"] == 4.0
    assert data["settings"] == {"noise multiplier σ": {"before": 1.0, "after": 2.0}}

    public = call("compare", *runs, "-o", page, "--redacted")
    assert public.exit_code == 0, public.output
    assert not re.search(
        "Zoë|confidential", page.read_text().partition("<body>")[2] + public.stdout
    )

    for options, why in (
        ((*runs, "-o", runs[0]), "would overwrite"),
        ((*runs, "--redacted", "--min-group", 0), "at least 2"),
    ):
        assert why in refused("compare", *options)
