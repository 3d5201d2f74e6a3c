"""A run file is whole, private, safe to load, and says what is wrong with it."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import pickle
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save as to_bytes

from tests.report.run_cases import made_up
from torchfil.report import load, save
from torchfil.run.arrays import pack
from torchfil.run.file import _whole_file
from torchfil.run.saved_run import SavedRun
from torchfil.utils import files
from torchfil.utils.errors import RunFileError


def same(a: Any, b: Any) -> bool:
    if dataclasses.is_dataclass(a):
        return type(a) is type(b) and same(vars(a), vars(b))
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b, equal_nan=a.dtype.kind == "f")
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


@pytest.mark.parametrize("text_ids", [False, True])
def test_round_trip(tmp_path: Path, text_ids: bool) -> None:
    run = made_up(text_ids=text_ids)
    assert same(load(save(run, tmp_path / "run.fil")), run)


def test_round_trip_of_the_least_there_can_be(tmp_path: Path) -> None:
    for count in (0, 1):
        run = SavedRun(about={}, ids=np.arange(count), columns={"fil": np.full(count, np.inf)})
        assert same(load(save(run, tmp_path / "run.fil")), run)


def test_only_the_owner_may_read_it(tmp_path: Path) -> None:
    path = tmp_path / "run.fil"
    path.write_text("old")
    path.chmod(0o644)
    before = os.umask(0)
    try:
        save(made_up(), path)
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o600


class TestErrors:
    @pytest.fixture
    def content(self, tmp_path: Path) -> bytes:
        return save(made_up(), tmp_path / "run.fil").read_bytes()

    def refused(self, path: Path, content: bytes) -> str:
        path.write_bytes(content)
        with pytest.raises(RunFileError) as found:
            load(path)
        assert "\n" not in str(found.value)
        return str(found.value)

    def test_cut_short_anywhere(self, tmp_path: Path, content: bytes) -> None:
        for length in (9, 500, len(content) // 2, len(content) - 1):
            assert "is cut short" in self.refused(tmp_path / "cut.fil", content[:length])
        assert "is empty" in self.refused(tmp_path / "cut.fil", b"")

    def test_damaged_anywhere(self, tmp_path: Path, content: bytes) -> None:
        header = 8 + int.from_bytes(content[:8], "little")
        for place in (header, header + 123, len(content) - 1):
            changed = content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]
            assert "damaged: its checksum" in self.refused(tmp_path / "bad.fil", changed)
        changed = content.replace(b"made-up", b"genuine")
        assert len(changed) == len(content)
        assert "damaged: its checksum" in self.refused(tmp_path / "bad.fil", changed)

    def test_bytes_beyond_the_end(self, tmp_path: Path, content: bytes) -> None:
        assert "damaged" in self.refused(tmp_path / "long.fil", content + b"more")

    def test_another_version(self, tmp_path: Path) -> None:
        newer = to_bytes({"ids": np.arange(2)}, {"format": "torchfil-run", "version": "3"})
        assert "is of run format 3; this torchfil reads formats 1 and 2. Install" in self.refused(
            tmp_path / "v.fil", newer
        )

    @pytest.mark.parametrize(
        "foreign",
        [
            b"<html></html>",
            pickle.dumps({"a": 1}),
            b"PK\x03\x04" + bytes(100),
            bytes(100),
            (2).to_bytes(8, "little") + b"{}",
            (2).to_bytes(8, "little") + b"[]",
            to_bytes({"weight": np.zeros(3)}),
        ],
    )
    def test_not_a_run(self, tmp_path: Path, foreign: bytes) -> None:
        assert "is not a saved run of torchfil" in self.refused(tmp_path / "other.fil", foreign)

    def test_folders_and_missing_files(self, tmp_path: Path) -> None:
        with pytest.raises(RunFileError, match="is a folder, not a saved run"):
            load(tmp_path)
        with pytest.raises(FileNotFoundError, match="no file .*nowhere.fil; a run is saved by"):
            load(tmp_path / "nowhere.fil")

    def test_parts_that_do_not_fit_are_refused_before_they_are_written(self) -> None:
        run = made_up(5)
        with pytest.raises(ValueError, match=r"column 'fil' has shape \[4\] for 5 examples"):
            dataclasses.replace(run, columns={"fil": np.zeros(4)})
        with pytest.raises(ValueError, match=r"columns \['kind'\] hold no numbers"):
            dataclasses.replace(run, columns={"kind": np.asarray(["a"] * 5)})
        assert run.pictures is not None
        with pytest.raises(ValueError, match="pictures: rows must lie in 0 … 4, got 0 … 9"):
            dataclasses.replace(run, pictures=dataclasses.replace(run.pictures, rows=np.asarray([0, 1, 2, 9])))

    def test_inconsistent_content_with_a_right_checksum(self, tmp_path: Path, content: bytes) -> None:
        arrays, header = pack(made_up())
        arrays["column/fil"] = arrays["column/fil"][:-1]
        odd = self.refused(tmp_path / "odd.fil", _whole_file(arrays, header))
        assert "column 'fil' has shape [39] for 40 examples" in odd
        del header["about"]
        assert "is damaged (KeyError: 'about')" in self.refused(tmp_path / "odd.fil", _whole_file(arrays, header))


@pytest.mark.parametrize("failing", ["fsync", "replace"])
def test_a_full_disk_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str) -> None:
    path = save(made_up(seed=1), tmp_path / "run.fil")
    old = path.read_bytes()

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, failing, full)
    with pytest.raises(OSError, match="No space left"):
        save(made_up(seed=2), path)
    assert path.read_bytes() == old
    assert [file.name for file in tmp_path.iterdir()] == ["run.fil"], "no temporary file is left"


def _write_often(path: Path, seed: int, barrier: Any) -> None:
    barrier.wait()
    for _ in range(20):
        save(made_up(2000, seed=seed), path)


def test_two_writers_leave_a_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "run.fil"
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(3)
    writers = [context.Process(target=_write_often, args=(path, seed, barrier)) for seed in (1, 2)]
    for writer in writers:
        writer.start()
    barrier.wait()
    whole = [made_up(2000, seed=seed) for seed in (1, 2)]
    while any(writer.is_alive() for writer in writers):
        if path.exists():
            found = load(path)
            assert any(np.array_equal(found.columns["fil"], run.columns["fil"]) for run in whole)
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    found = load(path)
    assert any(same(found, run) for run in whole)
    assert [file.name for file in tmp_path.iterdir()] == ["run.fil"]


@pytest.mark.slow
def test_a_million_examples_load_in_seconds(tmp_path: Path) -> None:
    n = 1_000_000
    ids = np.asarray([f"patient-{i}" for i in range(n)])
    columns = {name: np.arange(n, dtype=float) for name in made_up().columns}
    groups = {"site": np.asarray(["A", "B"])[np.arange(n) % 2]}
    path = save(SavedRun(about={}, ids=ids, columns=columns, groups=groups), tmp_path / "run.fil")
    start = time.process_time()
    run = load(path)
    seconds = time.process_time() - start
    assert seconds < 10
    assert run.ids[-1] == "patient-999999"
    assert run.groups["site"][-1] == "B"


def test_the_header_is_plain_json(tmp_path: Path) -> None:
    content = save(made_up(), tmp_path / "run.fil").read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])["__metadata__"]
    assert header["format"] == "torchfil-run"
    assert json.loads(header["about"])["title"] == "a made-up run"


@pytest.mark.parametrize(
    ("entry", "value", "expected"),
    [
        ("model", "CNN", "'model' is 'CNN', which is not a dict"),
        ("title", 3, "'title' is 3, which is not a text"),
        ("epsilon", "large", "'epsilon' is 'large', which is not a number"),
        ("delta", True, "'delta' is True, which is not a number"),
        ("exact", 1, "'exact' is 1, which is not true or false"),
        ("mechanism", {"steps": [3]}, r"'mechanism.steps' is \[3\], which is not a number"),
        ("dataset", {"input_range": [0, 1, 2]}, r"'dataset.input_range' is \[0, 1, 2\], which is not two numbers"),
        ("dataset", {"input_range": "01"}, "'dataset.input_range' is '01', which is not two numbers"),
    ],
)
def test_entries_of_another_kind_are_refused(entry: str, value: Any, expected: str) -> None:
    given = made_up()
    with pytest.raises(ValueError, match=f"about: {expected}"):
        dataclasses.replace(given, about={**given.about, entry: value})
    assert dataclasses.replace(given, about={**given.about, entry: None}).about[entry] is None


def test_texts_come_back_and_must_fit_their_rows(tmp_path: Path) -> None:
    run = made_up()
    back = load(save(run, tmp_path / "run.fil"))
    assert run.texts is not None
    assert back.texts is not None
    assert back.texts.words == run.texts.words
    np.testing.assert_array_equal(back.texts.fil, run.texts.fil)
    np.testing.assert_array_equal(back.texts.rows, run.texts.rows)
    with pytest.raises(ValueError, match="texts: 2 rows, but arrays of"):
        dataclasses.replace(run, texts=dataclasses.replace(run.texts, words=[["one"]]))
