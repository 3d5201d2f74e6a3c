"""Who was trained with a smaller weight: by id in the private page, as a number in the public one,
as a note.
"""

from __future__ import annotations

import csv
import math
from pathlib import Path

import numpy as np
import pytest

from tests.report.pages import files_of, summary_of, table_data, text_of
from tests.report.run_cases import SPARED, made_up
from torchfil.report import write_report
from torchfil.report.summary import summarise
from torchfil.run.disclosure import published_count


def test_ids_and_weights_stand_in_the_private_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = made_up(text_ids=True)
    run.columns["fil_before"][7] = math.nan
    page = write_report(run, tmp_path / "report")
    assert "3 of 40 examples" in text_of(page, "spared")
    data = table_data(page)
    assert [place for place, mark in enumerate(data["marks"]["weighted"]) if mark == "1"] == list(
        SPARED
    )
    columns = {column["key"]: column["values"] for column in data["columns"]}
    assert columns["clip_weight"] == pytest.approx(run.columns["clip_weight"], rel=1e-3)
    assert columns["fil_before"][7] is None
    # they are in the table, however many others are not
    monkeypatch.setattr("torchfil.report.examples.MOST_ROWS", 2)
    assert set(SPARED) <= set(table_data(write_report(run, tmp_path / "report"))["places"])
    with open(page.parent / "leakage.csv", newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["clip_weight"]) for row in rows] == pytest.approx(
        run.columns["clip_weight"], rel=1e-6
    )
    assert rows[7]["fil_before"] == ""


def test_nothing_of_single_examples_is_public(tmp_path: Path) -> None:
    run = made_up(240, text_ids=True)
    page = write_report(run, tmp_path / "public", redacted=True)
    private, public = files_of(write_report(run, tmp_path / "private")), files_of(page)
    weights = run.columns["clip_weight"][list(SPARED)].tolist()
    single = [f"Zoë {row}" for row in SPARED]
    single += [form for weight in weights for form in (f"{weight:.4g}", f"{weight:.7g}")]
    single += [
        "0.0123",
        "0.0987",
        "0.0876",
        "0.595",
        "1.87",
        "0.9835",
        "7 pilots",
        "at least 0.125",
    ]
    # found there
    assert [
        each for each in single if not any(each.encode() in data for data in private.values())
    ] == []
    assert [each for each in single if any(each.encode() in data for data in public.values())] == []
    section, told = text_of(page, "spared"), summary_of(page)["about"]
    assert "Fewer than 10 of 240 examples were trained with a weight ω below 1" in section
    assert "0.1" not in section  # a target may come from a share, and so from an example
    assert told["noise_choice"] == {"target": "every MSE bound at least 0.1", "confidence": 0.95}
    assert "equalised" not in told

    run.columns["clip_weight"][:] = np.where(np.isin(np.arange(240), (100, 101)), 0.3, 1.0)
    # who it was is not there
    assert files_of(write_report(run, tmp_path / "other", redacted=True)) == public


def test_public_counts_are_rounded() -> None:
    run = made_up(240, rounds={**made_up().rounds, "num_spared": np.asarray([0, 127])})
    run.columns["clip_weight"][:127] = 0.5
    spared = summarise(run, redacted=True).spared
    assert spared is not None
    assert (spared.examples, spared.smallest_weight) == (130, None)
    assert spared.rounds == {"num_spared": [0, 130], "fresh": [False, True]}
    assert [published_count(count, 10) for count in (0, 1, 9, 10)] == [
        0,
        *["fewer than 10"] * 2,
        10,
    ]


@pytest.mark.parametrize("redacted", [False, True])
def test_groups_before_and_after(redacted: bool) -> None:
    """Before, one half leaked four times as much as the other; now 1.5 times."""
    half = np.arange(240) < 120
    run = made_up(240, groups={"sex": np.where(half, "f", "m")})
    run.columns["fil"][:], run.columns["fil_before"][:] = (
        np.where(half, 0.3, 0.2),
        np.where(half, 0.8, 0.2),
    )
    run.columns["mse_bound"][:] = run.columns["fil"] ** -2
    (grouping,) = summarise(run, redacted=redacted).groupings
    assert (grouping.disparity.ratio, grouping.disparity_before.ratio) == (
        pytest.approx(1.5),
        pytest.approx(4.0),
    )
    assert [group.fil_before for group in grouping.groups] == pytest.approx([0.8, 0.2])
    run.columns["fil_before"][:100] = math.nan  # those who were not measured before do not count
    assert summarise(run, redacted=redacted).groupings[0].disparity_before.ratio == pytest.approx(
        4.0
    )
    run.columns["fil_before"][:115] = math.nan  # five of a group are left, too few to speak for it
    assert summarise(run, redacted=redacted).groupings[0].disparity_before is None
