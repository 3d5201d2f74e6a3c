"""A run in parts reads as the same run in one file, and says what is wrong with a part."""

from __future__ import annotations

import base64
import dataclasses
import gzip
import json
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.report.run_cases import made_up
from torchfil.gate.gate import check
from torchfil.gate.policy import Policy
from torchfil.report import load, save, write_report
from torchfil.report.summary import summarise
from torchfil.run.baselines import NOT_MEASURED, status_of
from torchfil.run.parted import PartedArray, PartedColumns, PartedTexts
from torchfil.run.saved_run import SavedRun
from torchfil.utils import files
from torchfil.utils.errors import RunFileError

ROWS = 7  # in a part, of 40


def in_parts(folder: Path, *, text_ids: bool = False, seed: int = 0) -> tuple[Path, SavedRun]:
    run = made_up(text_ids=text_ids, seed=seed)
    return save(run, folder / "run.fil", rows_per_part=ROWS), run


def parts_of(path: Path) -> list[Path]:
    return sorted((path.parent / "run.fil.parts").rglob("*.part"))


def same(a: Any, b: Any) -> bool:
    if dataclasses.is_dataclass(a):
        return same(vars(a), vars(b))
    if isinstance(a, np.ndarray | PartedArray):
        a, b = np.asarray(a), np.asarray(b)
        return a.shape == b.shape and np.array_equal(a, b, equal_nan=a.dtype.kind == "f")
    if isinstance(a, dict | PartedColumns):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


@pytest.mark.parametrize("text_ids", [False, True])
def test_it_reads_as_it_was(tmp_path: Path, text_ids: bool) -> None:
    path, run = in_parts(tmp_path, text_ids=text_ids)
    found = load(path)
    assert isinstance(found.columns, PartedColumns)
    assert isinstance(found.ids, PartedTexts if text_ids else PartedArray)
    assert len(parts_of(path)) == 6
    assert same(found, run)
    assert same(found.take(slice(None)), run.take(slice(None)))
    rows = np.array([0, 6, 7, 20, 39])
    assert same(found.take(rows), run.take(rows))
    assert [len(part) for part in found.slices(15)] == [15, 15, 10]
    assert repr(summarise(found)) == repr(summarise(run))
    policy = Policy(min_mse_bound=0.1, max_individual_epsilon=1.0, max_group_disparity=1.5)
    assert same(check(found, policy), check(run, policy))


def test_reports_are_the_same(tmp_path: Path) -> None:
    path, run = in_parts(tmp_path)
    for redacted in (False, True):
        pages = [write_report(each, tmp_path / "report", redacted=redacted).read_text() for each in (run, load(path))]
        assert pages[0] == pages[1]


def test_files_are_private_and_old_parts_go(tmp_path: Path) -> None:
    path, _ = in_parts(tmp_path)
    old = parts_of(path)
    assert all(part.stat().st_mode & 0o777 == 0o600 for part in old)
    assert all(part.parent.stat().st_mode & 0o777 == 0o700 for part in old)
    in_parts(tmp_path, seed=1)
    assert len(parts_of(path)) == 6
    assert not set(old) & set(parts_of(path))
    save(made_up(), path)
    assert [each.name for each in tmp_path.iterdir()] == ["run.fil"]


@pytest.mark.parametrize("failing", ["fsync", "replace"])
def test_a_full_disk_leaves_the_old_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str) -> None:
    path, run = in_parts(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    calls = []

    def full(*arguments: Any) -> None:
        calls.append(arguments)
        if len(calls) > 3:  # in the middle of the parts
            raise OSError(28, "No space left on device")
        real(*arguments)

    real = getattr(files.os, failing)
    monkeypatch.setattr(files.os, failing, full)
    with pytest.raises(OSError, match="No space left"):
        in_parts(tmp_path, seed=2)
    assert sorted(tmp_path.rglob("*")) == before
    assert same(load(path), run)


def test_a_missing_part_is_told(tmp_path: Path) -> None:
    path, _ = in_parts(tmp_path)
    parts_of(path)[2].unlink()
    with pytest.raises(RunFileError, match=r"lacks its part .*00002.part. Copy the folder run.fil.parts with the file"):
        load(path)


def test_every_flip_and_every_cut_is_told(tmp_path: Path) -> None:
    path, _ = in_parts(tmp_path)
    chance = random.Random(0)
    for damaged in (path, *parts_of(path)[::5]):
        content = damaged.read_bytes()
        for _ in range(60):
            place = chance.randrange(len(content))
            damaged.write_bytes(
                content[:place] + bytes([content[place] ^ 1 << chance.randrange(8)]) + content[place + 1 :]
            )
            with pytest.raises(RunFileError):
                load(path)
        damaged.write_bytes(content[: chance.randrange(len(content))])
        with pytest.raises(RunFileError, match="cut short|is empty|not a saved run"):
            load(path)
        damaged.write_bytes(content)
    load(path)


def test_a_token_does_not_lead_elsewhere(tmp_path: Path) -> None:
    from torchfil.run.parts import open_parts

    with pytest.raises(ValueError, match="its parts have the token"):
        open_parts(tmp_path / "run.fil", '{"token": "../../../../etc", "parts": []}')


class TestTableOfAPart:
    """Of a run with more examples than the page holds, it has the most exposed, and says so."""

    @pytest.fixture
    def page(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
        monkeypatch.setattr("torchfil.report.page.sections.every_example.MOST_ROWS", 12)
        path, _ = in_parts(tmp_path, text_ids=True)
        return write_report(load(path), tmp_path / "report").read_text()

    def test_it_has_the_most_exposed_and_whom_the_page_names(self, page: str, tmp_path: Path) -> None:
        spec = json.loads(page.split('id="spec">')[1].split("</script>")[0])
        run = made_up(text_ids=True)
        measured = np.flatnonzero(status_of(run) != NOT_MEASURED)
        expected = set(measured[np.argsort(-run.columns["fil"][measured])][:12].tolist())
        named = set(map(int, re.findall(r'data-row="(\d+)"', page)))
        assert named - expected, "the least exposed are named, too"
        assert spec["rows"] == len(expected | named)
        assert spec["of"] == {"examples": 40, "measured": len(measured), "ranked": 12}
        packed = re.search(r'id="data-places">([^<]*)<', page)
        assert packed is not None
        assert set(gzip.decompress(base64.b64decode(packed[1]))) == expected | named
        assert f"The table has {spec['rows']} of 40 examples: the most exposed of the {len(measured)} that were" in page

    def test_the_csv_has_everybody(self, page: str, tmp_path: Path) -> None:
        assert len((tmp_path / "report" / "leakage.csv").read_text().splitlines()) == 41
