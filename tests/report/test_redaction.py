"""The public version holds aggregates only: nothing of one example is in any of its bytes."""

from __future__ import annotations

import json
import re
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.report.pages import files_of, summary_of, text_of
from tests.report.run_cases import made_up, owned, with_records
from torchfil.report import SavedRun, write_report
from torchfil.report.summary import summarise
from torchfil.run.disclosure import histogram, windows

N = 240


def planted(**changes: Any) -> SavedRun:
    """A run whose ids, labels and values can be told from anything else."""
    rng = np.random.default_rng(5)
    run = owned(N, seed=4)
    columns = dict(run.columns)
    fil = columns["fil"] = rng.lognormal(size=N)
    fil[17] = 7654321.25  # one example stands out by far
    columns["mse_bound"], columns["mse_bound_low"] = fil**-2, 0.9 * fil**-2
    columns["participations"][3] = 0
    columns["num_rows"] = 3_000_017 + 31 * rng.permutation(N)  # no two persons have as many
    labels = np.array(["north"] * 120 + ["south"] * 117 + ["rare-PLANTED"] * 3)
    about = run.about | {
        "secret_note": "PLANTED-note",
        "probe_seed": 918273645,
        "created": "2024-01-01",
    }
    about["dataset"] = about["dataset"] | {
        "data_sha256": "feedc0de" * 8,
        "input_range": [0, 1],
        "path": "PLANTED-path",
    }
    about["audit"] = about["audit"] | {"by_method": {"PLANTED-method": 1.1}}
    parts: dict[str, Any] = {
        "about": about,
        "ids": np.array([f"PLANTED-{i}" for i in range(N)]),
        "columns": columns,
        "groups": {"region": labels},
        "history": {
            "step": np.arange(1, 4),
            "fil_max": fil[[1, 2, 17]],
            "epsilon": np.array([1.0, 2.0, 2.5]),
        },
        "bounds": run.bounds | {"of_example": {"PLANTED-3": 1.0}},
    }
    run = with_records(made_up(N, text_ids=True, seed=4, **parts), value=31337.0625)
    return replace(run, **changes)


def winsorised_mean(values: np.ndarray, factor: float) -> float:
    """The geometric mean, with values beyond a factor from the middle one taken as that far from
    it.
    """
    logs = np.sort(np.log(values))
    middle = (logs[(len(logs) - 1) // 2] + logs[len(logs) // 2]) / 2
    return float(
        np.exp(
            np.mean([min(max(x, middle - np.log(factor)), middle + np.log(factor)) for x in logs])
        )
    )


def numbers_of_examples(run: SavedRun) -> np.ndarray:
    """All but 1: the weight of those who were not spared, and σ."""
    columns = [v for name, v in run.columns.items() if v.dtype.kind == "f" or name == "num_rows"]
    more = run.attributes.error.ravel(), run.records.values[:, 0]
    values = np.concatenate([*columns, *more])
    return values[values != 1]


def bytes_of_examples(run: SavedRun) -> list[bytes]:
    """Ids, and every value as text and as binary numbers."""
    wanted = [str(name).encode() for name in run.ids]
    arrays = [v for name, v in run.columns.items() if v.dtype.kind == "f"] + [
        run.attributes.error.ravel()
    ]
    wanted += [
        f"{count:{form}}".encode()
        for count in run.columns["num_rows"].tolist()
        for form in ("", ",")
    ]
    arrays.append(run.records.values[:, :2].ravel())
    for value in np.concatenate(arrays).tolist():
        wanted += [struct.pack("<f", value), struct.pack("<d", value)]
        wanted += [
            text.encode()
            for text in (f"{value:.7g}", f"{value:.6g}", f"{value:.5g}")
            if len(text) >= 6
        ]
    return sorted({item for item in wanted if len(item.strip(b"\0")) > 3})


def test_nothing_of_one_example_is_in_any_byte(tmp_path: Path) -> None:
    run = planted()
    wanted = bytes_of_examples(run)
    page = write_report(run, tmp_path / "public", redacted=True)
    assert set(files_of(page)) == {"index.html", "summary.json"}
    public = b"\n".join(files_of(page).values())
    private = b"\n".join(files_of(write_report(run, tmp_path / "private")).values())
    names = [b"PLANTED", b"feedc0de", b"918273645"]
    assert all(name in private for name in names)  # the search can find them
    texts = [item for item in wanted if item.isascii() and item.decode().isprintable()]
    assert sum(item in private for item in texts) > 0.45 * len(texts)
    assert [name for name in names if name in public] == []
    assert [item for item in wanted if item in public] == []
    assert not re.search(rb"data-row=.\d|id=.spec|<img|base64|rare-", public)

    summary = summary_of(page)
    assert not summary["confidential"]
    values = numbers_of_examples(run)
    for found in map(
        float, re.findall(r"(?<![\w.])-?\d+(?:\.\d+)?(?:e-?\d+)?(?![\w.])", json.dumps(summary))
    ):
        assert not np.any(np.abs(values - found) <= 1e-7 * np.abs(values)), found
        assert found < 0.01 * 7654321 or found == summary["examples"], "one example shows through"


def test_the_same_page_whoever_the_examples_are(tmp_path: Path) -> None:
    """Ids, records, seed, hash and the curve of the most exposed example do not reach the public
    version.
    """
    run = planted()
    other = planted(
        ids=np.arange(N),
        records=None,
        about=run.about
        | {"probe_seed": 1, "dataset": run.about["dataset"] | {"data_sha256": "0" * 64}},
        history={
            "step": np.arange(1, 4),
            "fil_max": np.ones(3),
            "epsilon": np.array([1.0, 2.0, 2.5]),
        },
    )
    files = [
        files_of(write_report(each, tmp_path / "public", redacted=True)) for each in (run, other)
    ]
    assert files[0] == files[1]


def test_the_extremes_are_those_of_many() -> None:
    run = planted()
    summary = summarise(run, redacted=True, min_group=12)
    fil = np.sort(run.columns["fil"][np.arange(N) != 3])[::-1]
    most = summary.exposure[0]
    assert most.examples == 12
    assert most.fil == pytest.approx(winsorised_mean(fil[:12], 10), rel=0.05)
    assert most.mse_bound == pytest.approx(most.fil**-2, rel=0.12)  # both rounded to two digits
    assert summary.not_measured == "fewer than 12"
    assert {row.examples for row in summary.exposure} == {12}
    bins = summary.mse_histogram
    assert min(bins.counts) >= 12
    assert bins.edges[0] > 1e3 * 7654321.25**-2  # the bar does not reach to the outlier
    assert all(count % 12 == 0 for count in bins.counts)
    (region,) = summary.groupings
    assert {group.name for group in region.groups} == {"north", "2 small groups together"}
    (attack,) = summary.attacks
    assert attack.targets == "fewer than 12"
    assert attack.ratio == {}


def test_the_grid_of_a_public_histogram_does_not_tell_the_largest_value() -> None:
    values = np.random.default_rng(0).lognormal(size=1000)
    grids = []
    for largest in (1e3, 1e90, 1e180):
        values[17] = largest
        grids.append(histogram(values, 10).edges)
    assert grids == [grids[0]] * 3


def test_a_violated_bound_is_not_hidden_by_few_targets(tmp_path: Path) -> None:
    attack = planted().attacks[0]
    broken = replace(attack, achieved=attack.achieved / 9, violated=np.arange(3) > 1)
    run = planted(attacks=[attack, broken])
    assert [found.violated for found in summarise(run, redacted=True).attacks] == [
        0,
        "fewer than 10",
    ]
    assert "A bound was violated" in text_of(
        write_report(run, tmp_path / "public", redacted=True), "alerts"
    )


def test_the_lowest_end_is_that_of_many() -> None:
    run = planted()
    run.columns["mse_bound_low"][40:52] = 1e-3 * np.arange(1, 13)
    summary = summarise(run, redacted=True)
    low = np.sort(run.columns["mse_bound_low"][np.arange(N) != 3])
    assert summary.lowest_end == pytest.approx(winsorised_mean(low[:10], 100), rel=0.05)
    # two means of nearly the same would tell one
    assert summary.exposure[0].mse_bound_low == summary.lowest_end


def test_too_few_examples_give_nothing(tmp_path: Path) -> None:
    page = write_report(made_up(9), tmp_path / "public", redacted=True)
    summary = summary_of(page)
    nothing = {"exposure": [], "mse_histogram": None, "epsilon": {}, "lowest_end": None}
    assert {name: summary[name] for name in nothing} == nothing
    assert summary["groupings"][0]["groups"] == []
    assert all(attribute["error"] == {} for attribute in summary["attributes"])
    with pytest.raises(ValueError, match="min_group=1"):
        write_report(made_up(), tmp_path / "public", redacted=True, min_group=1)


@pytest.mark.parametrize("count", [1, 9, 10, 19, 20, 31, 500])
@pytest.mark.parametrize("smallest", [1, 10])
def test_windows_are_whole_and_disjoint(count: int, smallest: int) -> None:
    found = windows(count, (0.0, 0.5, 0.05, 0.95), smallest)
    members = [i for window in found.values() for i in range(window.start, window.stop)]
    assert len(members) == len(set(members)) == smallest * len(found)
    assert all(0 <= i < count for i in members)
    assert (0.0 in found) == (count == smallest or count >= 2 * smallest)
    assert not found or not 0 < count - len(members) < smallest


def test_histograms_count_everybody() -> None:
    rng = np.random.default_rng(0)
    values = np.concatenate([rng.lognormal(size=997), [0.0, np.inf, np.inf]])
    plain = histogram(values, 1)
    assert sum(plain.counts) == 997
    assert plain.outside == 3
    for count, low, high in zip(plain.counts, plain.edges[:-1], plain.edges[1:], strict=True):
        assert count == ((values > low * (1 - 1e-9)) & (values <= high * (1 + 1e-9))).sum()
    safe = histogram(values, 10)
    assert abs(sum(safe.counts) - 997) <= 5 * len(safe.counts)
    assert min(safe.counts) >= 10
    assert histogram(values[:9], 10) is None
    assert histogram(np.full(50, 2.0), 10) is None  # one bar would be the value itself
