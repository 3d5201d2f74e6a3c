"""A run file is whole, private, safe to load, opened by other programs, and says what is wrong with
it.
"""

from __future__ import annotations

import dataclasses
import io
import math
import os
import pickle
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from pyarrow import parquet

from tests.engine.damage import cut_short
from tests.report.run_cases import (
    AUDIT,
    REFUTED,
    made_up,
    owned,
    pixelated,
    with_baselines,
    with_records,
    worrying,
)
from tests.report.run_files import edited, facts_of, same
from torchfil.report import load, save
from torchfil.run.file import _CHECKSUM_SIZE
from torchfil.run.saved_run import SavedRun, Texts
from torchfil.run.stored import StoredArray
from torchfil.utils import files
from torchfil.utils.errors import RunFileError

TOKENS = np.asarray([[0.1, 0.2], [0.3, np.nan]], "f4")
UNTESTABLE: dict[str, Any] = {
    "testable": False,
    "untestable": "never saw the model",
    "blind": np.arange(3.0),
}
RUNS = {
    "numbered": made_up(),
    "named": made_up(text_ids=True),
    "questions": worrying(),
    "pixels": pixelated(side=9),
    "baselines": with_baselines(made_up()),
    "records": with_records(made_up(), math.pi),
    "persons": owned(40),
    "one example": SavedRun(about={}, ids=np.arange(1), columns={"fil": np.full(1, np.inf)}),
    "no example": SavedRun(about={}, ids=np.arange(0), columns={"fil": np.zeros(0)}),
    "names twice": made_up(groups={"sex'": np.asarray(["a"] * 40), "sex": np.asarray(["b"] * 40)}),
    "a word of Arrow's": SavedRun(
        about={"title": "ARROW:schema"},
        ids=np.asarray(["ARROW:schema", "other"]),
        columns={},
        groups={"ARROW:schema": np.full(2, "ARROW:schema")},
    ),
    "tokens": made_up(
        texts=Texts(np.asarray([5, 2]), [[" <a>", "b"], ["##c"]], TOKENS, 2 * TOKENS)
    ),
    "attacks": made_up(attacks=[dataclasses.replace(made_up().attacks[0], **UNTESTABLE)]),
    "types": SavedRun(
        about={},
        ids=np.arange(3),
        columns={kind: np.ones(3, kind) for kind in ("f2", "f4", "i1", "?")},
    ),
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
        for rows in (
            slice(None),
            slice(5, 8),
            slice(9, 9),
            np.array([39, 0, 7, 6, 6]),
            np.arange(40) % 3 == 0,
            20,
            -1,
        ):
            assert same(found.ids[rows], run.ids[rows])
            for columns in ((), (1,), (slice(1, 3),)):
                assert same(
                    found.attributes.error[(rows, *columns)], run.attributes.error[(rows, *columns)]
                )
        assert same(found.take(np.array([0, 6, 7, 20, 39])), run.take(np.array([0, 6, 7, 20, 39])))
        assert [len(part) for part in found.slices(15)] == [15, 15, 10]
        assert same(found.coded_group("sex"), run.coded_group("sex"))


@pytest.mark.parametrize("name", ["named", "questions", "numbered"])
def test_other_programs_read_the_same_values(tmp_path: Path, name: str) -> None:
    run = RUNS[name]
    path = save(run, tmp_path / "run.parquet", rows_at_once=25)
    table, facts = pd.read_parquet(path), facts_of(path)
    assert list(parquet.read_metadata(path).metadata) == [b"torchfil"], "no copy of the schema"
    assert table["id"].tolist() == run.ids.tolist()
    for column, values in run.columns.items():
        np.testing.assert_array_equal(table[column], values)
    for group, labels in run.groups.items():
        assert table[f"group_{group}"].tolist() == labels.tolist()
    for j, column in enumerate(facts["attributes"]["error"]):
        assert column == f"error_of_{run.attributes.names[j]}"
        np.testing.assert_array_equal(table[column], run.attributes.error[:, j])
    for question in run.questions:
        for j, answer in enumerate(question.answers):
            upper = table[f"divergence_high_of_{question.name}_{answer}"]
            np.testing.assert_array_equal(upper, question.divergence_high[:, j])


class TestWriting:
    def test_only_the_owner_may_read_it(self, path: Path) -> None:
        path.chmod(0o644)
        before = os.umask(0)
        try:
            save(made_up(), path)
        finally:
            os.umask(before)
        assert path.stat().st_mode & 0o777 == 0o600

    @pytest.mark.parametrize("failing", ["fsync", "replace"])
    def test_a_full_disk_leaves_the_old_file(
        self, path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
    ) -> None:
        old = path.read_bytes()

        def full(*_: Any) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(files.os, failing, full)
        with pytest.raises(OSError, match="No space left"):
            save(made_up(seed=2), path)
        assert path.read_bytes() == old
        assert [file.name for file in path.parent.iterdir()] == ["run.parquet"], (
            "no temporary file is left"
        )

    def test_what_cannot_be_kept_is_refused(self, tmp_path: Path) -> None:
        twice = dataclasses.replace(made_up().attacks[0], rows=np.array([1, 2, 1]))
        for parts, why in (
            ({"about": {"title": "x" * 2**22}}, "shorten"),
            ({"attacks": [twice]}, "several results"),
        ):
            with pytest.raises(ValueError, match=why):
                save(made_up(**parts), tmp_path / "run.parquet")
        assert not list(tmp_path.iterdir())


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
            yield chance.choice([start, chunk.dictionary_page_offset or start]) + chance.randrange(
                16
            )
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
            assert "is cut short" in self.refused(path, part)
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

    def test_other_files(self, path: Path) -> None:
        for foreign in (
            b"<html></html>",
            pickle.dumps({"a": 1}),
            b"PK\x03\x04" + bytes(99),
            bytes(9),
        ):
            assert "is not a saved run of torchfil" in self.refused(path, foreign)
        pd.DataFrame({"id": [1]}).to_parquet(path)
        assert "is not a saved run of torchfil" in self.refused(path, path.read_bytes())
        pd.read_parquet(save(made_up(), path)).to_parquet(path)  # by another program
        assert "another program changed it" in self.refused(path, path.read_bytes())
        with pytest.raises(RunFileError, match="is a folder"):
            load(path.parent)
        with pytest.raises(FileNotFoundError, match="no file"):
            load(path.with_name("nowhere.parquet"))

    @pytest.mark.parametrize(
        ("facts", "columns", "expected"),
        [
            ({"version": 1}, {}, "is of run format 1"),
            (b"{", {}, "is damaged (JSONDecodeError"),
            ({"columns": {"fil": "none"}}, {}, "Column none does not exist"),
            ({"columns": {"fil": "group_sex"}, "groups": {}}, {}, "hold no numbers"),
            ({"columns": {"fil": "fil", "again": "fil"}}, {}, "column 'fil' is named twice"),
            ({"about": []}, {}, "must be dicts"),
            ({}, {"fil": [None] * 40}, "40 cells are empty"),
            ({}, {"error_of_age": ["1"] * 40}, "do not hold numbers"),
            ({"history": {"step": ["1"]}}, {}, "must be numbers"),
            ({}, {"id": [0.5] * 40}, "integers or strings"),
        ],
        ids=lambda value: str(value)[:25],
    )
    def test_content_that_is_not_a_run(
        self, path: Path, facts: Any, columns: dict[str, Any], expected: str
    ) -> None:
        assert expected in self.refused(path, edited(path, facts, **columns).read_bytes())


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"columns": {"fil": np.zeros(4)}}, "column 'fil' has shape"),
        ({"records": {"values": np.zeros((2, 4))}}, "records: values has shape"),
        ({"records": {"rows": np.asarray([0, 12])}}, "records: rows"),
        ({"texts": {"words": [["one"]]}}, "texts has shape"),
        ({"about": {"model": "CNN"}}, "'model' is 'CNN'.*object"),
        ({"about": {"epsilon": "large"}}, "'epsilon' is 'large'.*float"),
        ({"about": {"exact": 1}}, "'exact' is 1.*bool"),
        ({"about": {"mechanism": {"steps": [3]}}}, r"'mechanism.steps' is \[3\].*float"),
        ({"about": {"dataset": {"input_range": [0, 1, 2]}}}, "'dataset.input_range' .*length 2"),
        ({"about": {"mechanism": {"unit": "household"}}}, "unit='household' must be"),
        ({"about": {"mechanism": {"unit_names": ["patient"]}}}, "two words"),
        ({"about": {"mechanism": {"unit_names": ["<b>", "{x}"]}}}, "two words"),
        *(({"about": {"audit": AUDIT | {name: math.nan}}}, rf"'audit\.{name}'") for name in AUDIT),
        *(
            ({"about": {"audit": {k: AUDIT[k] for k in AUDIT if k != name}}}, f"missing.*{name}")
            for name in AUDIT
        ),
        ({"about": {"audit": AUDIT | {"by_method": {"f-DP": math.nan}}}}, "by_method"),
        ({"about": {"audit": AUDIT | {"rates": [{"fpr": 0.1, "tpr": 1.1, "bound": None}]}}}, "tpr"),
        ({"about": {"audit": AUDIT | {"exceeds_claim": True}}}, "exceeds_claim"),
        ({"about": {"audit": REFUTED | {"exceeds_claim": False}}}, "exceeds_claim"),
        ({"about": {"audit": [1.1]}}, "audit"),
    ],
    ids=str,
)
def test_parts_that_do_not_fit_are_refused_before_they_are_written(
    changes: dict[str, Any], expected: str
) -> None:
    run = with_records(made_up(12))
    ((name, value),) = changes.items()
    before = getattr(run, name)
    wrong = dataclasses.replace(before, **value) if dataclasses.is_dataclass(before) else value
    with pytest.raises(ValueError, match=expected):
        dataclasses.replace(run, **{name: wrong})
    if name == "about":
        assert dataclasses.replace(run, about=dict.fromkeys(value))
