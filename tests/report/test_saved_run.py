"""A run file is whole, private, safe to load, opened by other programs, and says what is wrong with it."""

from __future__ import annotations

import dataclasses
import io
import multiprocessing
import os
import pickle
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from pyarrow import parquet

from tests.engine.damage import cut_short
from tests.report.run_cases import made_up, pixelated, with_yardsticks, worrying
from tests.report.run_files import edited, facts_of, same
from torchfil.gate.gate import check
from torchfil.gate.policy import Policy
from torchfil.report import load, save, write_report
from torchfil.report.summary import summarise
from torchfil.run.file import _CHECKSUM_SIZE
from torchfil.run.saved_run import SavedRun
from torchfil.run.stored import StoredArray
from torchfil.utils import files
from torchfil.utils.errors import RunFileError

RUNS = {
    "numbered": made_up(),
    "named": made_up(text_ids=True),
    "questions": worrying(),
    "pixels": pixelated(side=9),
    "baselines": with_yardsticks(made_up()),
    "one example": SavedRun(about={}, ids=np.arange(1), columns={"fil": np.full(1, np.inf)}),
    "no example": SavedRun(about={}, ids=np.arange(0), columns={"fil": np.zeros(0)}),
    "names twice": made_up(groups={"sex'": np.asarray(["a"] * 40), "sex": np.asarray(["b"] * 40)}),
    "a title of Arrow's": SavedRun(about={"title": "ARROW:schema"}, ids=np.arange(1), columns={}),
    "types": SavedRun(about={}, ids=np.arange(3), columns={kind: np.ones(3, kind) for kind in ("f2", "f4", "i1", "?")}),
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return save(made_up(), tmp_path / "run.parquet")


class TestReading:
    @pytest.mark.parametrize("rows_at_once", [1000, 7])
    @pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
    def test_it_reads_as_it_was(self, tmp_path: Path, run: SavedRun, rows_at_once: int) -> None:
        found = load(save(run, tmp_path / "run.parquet", rows_at_once=rows_at_once))
        assert same(found, run)
        assert same(load(save(found, tmp_path / "again.parquet")), run)
        assert isinstance(found.ids, StoredArray if len(run) > rows_at_once else np.ndarray)

    def test_rows_on_the_disk(self, tmp_path: Path) -> None:
        run = made_up(text_ids=True)
        found = load(save(run, tmp_path / "run.parquet", rows_at_once=7))
        for rows in (slice(None), slice(5, 8), slice(9, 9), np.array([39, 0, 7, 6, 6]), np.arange(40) % 3 == 0, 20, -1):
            assert same(found.ids[rows], run.ids[rows])
            assert found.attributes is not None
            assert run.attributes is not None
            for columns in ((), (1,), (slice(1, 3),)):
                assert same(found.attributes.error[(rows, *columns)], run.attributes.error[(rows, *columns)])
        assert same(found.take(np.array([0, 6, 7, 20, 39])), run.take(np.array([0, 6, 7, 20, 39])))
        assert [len(part) for part in found.slices(15)] == [15, 15, 10]
        assert same(found.coded_group("sex"), run.coded_group("sex"))

    def test_what_is_made_of_it(self, tmp_path: Path) -> None:
        runs = made_up(), load(save(made_up(), tmp_path / "run.parquet", rows_at_once=7))
        policy = Policy(min_mse_bound=0.1, max_individual_epsilon=1.0, max_group_disparity=1.5)
        assert same(*(check(run, policy) for run in runs))
        assert len({repr(summarise(run)) for run in runs}) == 1
        assert len({write_report(run, tmp_path / "report").read_text() for run in runs}) == 1

    @pytest.mark.slow
    def test_a_million_examples_load_in_seconds(self, tmp_path: Path) -> None:
        n = 1_000_000
        columns = {name: np.arange(n, dtype=float) for name in made_up().columns}
        groups = {"site": np.asarray(["A", "B"])[np.arange(n) % 2]}
        ids = np.asarray([f"patient-{i}" for i in range(n)])
        path = save(SavedRun(about={}, ids=ids, columns=columns, groups=groups), tmp_path / "run.parquet")
        start = time.process_time()
        run = load(path)
        assert time.process_time() - start < 10
        assert (run.ids[-1], run.groups["site"][-1]) == ("patient-999999", "B")


def read_with_polars(path: Path) -> pd.DataFrame:
    import polars

    return polars.read_parquet(path).to_pandas()


def read_with_duckdb(path: Path) -> pd.DataFrame:
    import duckdb

    return duckdb.sql(f"SELECT * FROM '{path}'").df()


@pytest.mark.parametrize("read", [pd.read_parquet, read_with_polars, read_with_duckdb])
@pytest.mark.parametrize("name", ["named", "questions", "pixels"])
def test_other_programs_read_the_same_values(tmp_path: Path, name: str, read: Any) -> None:
    run = RUNS[name]
    path = save(run, tmp_path / "run.parquet", rows_at_once=25)
    table, facts = read(path), facts_of(path)
    assert table["id"].tolist() == run.ids.tolist()
    for column, values in run.columns.items():
        np.testing.assert_array_equal(table[column], values)
    for group, labels in run.groups.items():
        assert table[f"group_{group}"].tolist() == labels.tolist()
    assert run.attributes is not None
    if name == "pixels":
        np.testing.assert_array_equal(np.stack(table["error_of_attributes"]), run.attributes.error)
    for j, column in enumerate(facts["attributes"]["error"] if name != "pixels" else ()):
        assert column == f"error_of_{run.attributes.names[j]}"
        np.testing.assert_array_equal(table[column], run.attributes.error[:, j])
    for question in run.questions:
        for j, answer in enumerate(question.answers):
            upper = table[f"divergence_high_of_{question.name}_{answer}"]
            np.testing.assert_array_equal(upper, question.divergence_high[:, j])
    assert run.pictures is not None
    assert [bytes(image) for image in table["picture"].dropna()] == [image.tobytes() for image in run.pictures.images]
    assert table["words"].notna().sum() == 2


def test_the_facts_are_one_json_document(path: Path) -> None:
    facts = facts_of(path)
    assert (facts["format"], facts["version"], facts["about"]["title"]) == ("torchfil-run", 1, "a made-up run")
    assert list(parquet.read_metadata(path).metadata) == [b"torchfil"], "no copy of the schema"


class TestWriting:
    def test_only_the_owner_may_read_it(self, tmp_path: Path) -> None:
        path = tmp_path / "run.parquet"
        path.write_text("old")
        path.chmod(0o644)
        before = os.umask(0)
        try:
            save(made_up(), path)
        finally:
            os.umask(before)
        assert path.stat().st_mode & 0o777 == 0o600

    @pytest.mark.parametrize("failing", ["fsync", "replace"])
    def test_a_full_disk_leaves_the_old_file(self, path: Path, monkeypatch: pytest.MonkeyPatch, failing: str) -> None:
        old = path.read_bytes()

        def full(*_: Any) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(files.os, failing, full)
        with pytest.raises(OSError, match="No space left"):
            save(made_up(seed=2), path)
        assert path.read_bytes() == old
        assert [file.name for file in path.parent.iterdir()] == ["run.parquet"], "no temporary file is left"

    def test_two_writers_leave_a_whole_file(self, tmp_path: Path) -> None:
        path, whole = tmp_path / "run.parquet", [made_up(2000, seed=seed) for seed in (1, 2)]
        context = multiprocessing.get_context("spawn")
        writers = [context.Process(target=_write_often, args=(path, seed)) for seed in (1, 2)]
        for writer in writers:
            writer.start()
        while any(writer.is_alive() for writer in writers):
            if path.exists():
                found = load(path)
                assert any(np.array_equal(found.columns["fil"], run.columns["fil"]) for run in whole)
        assert [writer.exitcode for writer in writers] == [0, 0]
        assert any(same(load(path), run) for run in whole)
        assert [file.name for file in tmp_path.iterdir()] == ["run.parquet"]

    def test_a_file_that_is_replaced_stays_readable(self, tmp_path: Path) -> None:
        found = load(save(made_up(), tmp_path / "run.parquet", rows_at_once=7))
        save(made_up(seed=1), tmp_path / "run.parquet")
        assert same(found, made_up())

    def test_what_cannot_be_kept_is_refused(self, tmp_path: Path) -> None:
        attack = made_up().attacks[0]
        with pytest.raises(RunFileError, match="4,194,304 allowed; shorten the title"):
            save(made_up(about={"title": "x" * 2**22}), tmp_path / "run.parquet")
        with pytest.raises(ValueError, match="several results for one example"):
            save(made_up(attacks=[dataclasses.replace(attack, rows=np.array([1, 2, 1]))]), tmp_path / "run.parquet")
        assert not list(tmp_path.iterdir())


def _write_often(path: Path, seed: int) -> None:
    for _ in range(20):
        save(made_up(2000, seed=seed), path)


def places_in(content: bytes, region: str) -> Iterator[int]:
    """200 places in the footer, at the beginnings of pages, or behind these."""
    chance, metadata = random.Random(0), parquet.read_metadata(io.BytesIO(content))
    footer = len(content) - 8 - metadata.serialized_size
    group = metadata.row_group(0)
    chunks = [group.column(j) for j in range(metadata.num_columns)]
    for _ in range(200):
        chunk = chance.choice(chunks)
        start = chunk.data_page_offset
        if region == "footer":
            yield chance.randrange(footer - _CHECKSUM_SIZE, len(content))
        elif region == "page headers":
            yield chance.choice([start, chunk.dictionary_page_offset or start]) + chance.randrange(16)
        else:
            yield chance.randrange(start + 16, chunk.data_page_offset + chunk.total_compressed_size)


class TestDamage:
    def refused(self, path: Path, content: bytes) -> str:
        path.write_bytes(content)
        with pytest.raises(RunFileError) as found:
            load(path)
        text = str(found.value)
        assert text.startswith(str(path))
        assert "\n" not in text
        assert any(remedy in text for remedy in ("again", "engine.save_run", "Install")), text
        return text

    @pytest.mark.parametrize("region", ["footer", "page headers", "data"])
    @pytest.mark.parametrize("rows_at_once", [1000, 7])
    def test_200_flips_in(self, tmp_path: Path, region: str, rows_at_once: int) -> None:
        path = save(made_up(), tmp_path / "run.parquet", rows_at_once=rows_at_once)
        content = path.read_bytes()
        for place in places_in(content, region):
            flipped = content[place] ^ 1 << place % 8
            self.refused(path, content[:place] + bytes([flipped]) + content[place + 1 :])

    def test_cuts_and_additions(self, path: Path) -> None:
        content = path.read_bytes()
        for part in cut_short(content, 100):
            assert "is cut short" in self.refused(path, part) if part else "is empty" in self.refused(path, part)
        assert "cut short" in self.refused(path, content + b"more")
        assert "checksum" in self.refused(path, content[:4] + b"more" + content[4:])

    def test_a_page_that_is_damaged_after_loading(self, tmp_path: Path) -> None:
        path = save(made_up(), tmp_path / "run.parquet", rows_at_once=7)
        found, content = load(path), bytearray(path.read_bytes())
        column = parquet.read_metadata(path).row_group(2).column(1)
        start = column.dictionary_page_offset or column.data_page_offset
        content[start + column.total_compressed_size - 1] ^= 1
        path.write_bytes(content)  # the same file, in place
        with pytest.raises(OSError, match="CRC checksum"):
            found.columns["fil"]

    @pytest.mark.parametrize("foreign", [b"<html></html>", pickle.dumps({"a": 1}), b"PK\x03\x04" + bytes(99), bytes(9)])
    def test_other_files(self, path: Path, foreign: bytes) -> None:
        assert "is not a saved run of torchfil" in self.refused(path, foreign)

    def test_other_parquet_files(self, path: Path) -> None:
        pd.DataFrame({"id": [1]}).to_parquet(path)
        assert "not a saved run of torchfil" in self.refused(path, path.read_bytes())
        pd.read_parquet(save(made_up(), path)).to_parquet(path)  # by another program
        assert "another program changed it" in self.refused(path, path.read_bytes())

    @pytest.mark.parametrize(
        ("facts", "columns", "expected"),
        [
            ({"version": 2}, {}, "is of run format 2; this torchfil reads format 1. Install"),
            ({"format": "other"}, {}, "is not a saved run of torchfil"),
            (b"[]", {}, "is not a saved run of torchfil"),
            (b"{", {}, "is damaged (JSONDecodeError"),
            ({"columns": {"fil": "none"}}, {}, "is damaged (it has no column 'none')"),
            ({"columns": {"fil": "group_sex"}}, {}, "hold no numbers"),
            ({"about": []}, {}, "about and bounds must be dicts"),
            ({"attacks": [{}]}, {}, "is damaged (KeyError"),
            ({}, {"fil": [None] * 40}, "40 cells are empty"),
            ({}, {"error_of_age": ["1"] * 40}, "do not hold numbers"),
            ({}, {"achieved_by_gradient": ["much"] * 3 + [None] * 37}, "is damaged (ArrowInvalid"),
            ({"history": {"step": ["1"]}}, {}, "must be numbers"),
            ({}, {"id": [0.5] * 40}, "ids must be [n] integers or strings"),
            ({}, {"words": [["a"]] + [None] * 39}, "1 cells are empty"),
        ],
        ids=lambda value: str(value)[:25],
    )
    def test_content_that_is_not_a_run(self, path: Path, facts: Any, columns: dict[str, Any], expected: str) -> None:
        assert expected in self.refused(path, edited(path, facts, **columns).read_bytes())

    def test_folders_and_missing_files(self, tmp_path: Path) -> None:
        with pytest.raises(RunFileError, match="is a folder, not a saved run"):
            load(tmp_path)
        with pytest.raises(FileNotFoundError, match="no file .*nowhere.parquet; a run is saved by"):
            load(tmp_path / "nowhere.parquet")


class TestParts:
    """What does not fit together is refused before it is written."""

    @pytest.mark.parametrize(
        ("changes", "expected"),
        [
            ({"columns": {"fil": np.zeros(4)}}, r"column 'fil' has shape \[4\], and not \[5\]"),
            ({"columns": {"kind": np.asarray(["a"] * 5)}}, r"columns \['kind'\] hold no numbers"),
            ({"pictures": {"rows": np.asarray([0, 1, 2, 9])}}, "pictures: rows must lie in 0 … 4, got 0 … 9"),
            ({"texts": {"words": [["one"]]}}, "texts has shape"),
            ({"about": {"model": "CNN"}}, "'model' is 'CNN', which is not a dict"),
            ({"about": {"title": 3}}, "'title' is 3, which is not a text"),
            ({"about": {"epsilon": "large"}}, "'epsilon' is 'large', which is not a number"),
            ({"about": {"delta": True}}, "'delta' is True, which is not a number"),
            ({"about": {"exact": 1}}, "'exact' is 1, which is not true or false"),
            ({"about": {"mechanism": {"steps": [3]}}}, r"'mechanism.steps' is \[3\], which is not a number"),
            ({"about": {"dataset": {"input_range": [0, 1, 2]}}}, "'dataset.input_range' is .*, which is not two"),
            ({"about": {"dataset": {"input_range": "01"}}}, "'dataset.input_range' is '01', which is not two numbers"),
        ],
        ids=str,
    )
    def test_refusals(self, changes: dict[str, Any], expected: str) -> None:
        run = made_up(5)
        ((name, value),) = changes.items()
        before = getattr(run, name)
        wrong = dataclasses.replace(before, **value) if dataclasses.is_dataclass(before) else value
        with pytest.raises(ValueError, match=expected):
            dataclasses.replace(run, **{name: wrong})
        if name == "about":
            assert dataclasses.replace(run, about=dict.fromkeys(value))
