"""Runs that somebody made to mislead: names that act on a terminal or a page, absurd numbers, files
that swell.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pickle
import tracemalloc
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from tests.report.run_cases import made_up, with_records
from tests.report.run_files import edited, facts_of, same, with_footer
from tests.test_cli import call, refused
from torchfil.engine.distributed.checkpoints import read_file, read_folder
from torchfil.report import SavedRun, load, save, write_report
from torchfil.run.columns import KEY
from torchfil.utils.errors import RunFileError
from torchfil.utils.files import file_sha256
from torchfil.utils.tables import as_texts
from torchfil.utils.text import visible

# clears the screen, writes a table that passes, hides what follows; a one-byte CSI, marks that turn
# text around
FAKE = (
    "\x1b[2J\x1b[Hmax_epsilon  50  1.0  pass\n\npassed\x1b[8m \x9b31m\r\u202egnp.exe\u2066 "
    "\u2028\x7f\x00\x07"
)


def acting(text: str) -> list[str]:
    """The characters of a text that are not seen but do something."""
    return [
        s
        for s in sorted(set(text))
        if s != "\n" and not s.isprintable() and unicodedata.category(s) != "Zs"
    ]


def with_fake_names(n: int = 40) -> SavedRun:
    name, run = FAKE, made_up(n)
    return dataclasses.replace(
        run,
        about={**run.about, "title": name, "dataset": {"data_sha256": name}, "accountant": name},
        ids=np.asarray([f"{name} {i}" for i in range(n)]),
        groups={name: np.asarray([f"{name} a", f"{name} b"] * (n // 2))},
        attributes=dataclasses.replace(
            run.attributes, names=[name, "b", "c"], units=[name, "", ""]
        ),
        questions=[dataclasses.replace(run.questions[0], name=name)],
        attacks=[dataclasses.replace(run.attacks[0], name=name, testable=False, untestable=name)],
    )


@pytest.fixture
def run(tmp_path: Path) -> Path:
    columns = {**made_up(30).columns, "paused": np.zeros(30)}
    made = with_records(made_up(30, text_ids=True, columns=columns))
    return save(made, tmp_path / "run.parquet")


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    path = tmp_path / "policy.toml"
    path.write_text(
        "max_epsilon = 1\nmax_individual_epsilon = 50\nmax_group_disparity = 1.0\nmin_attacks = 1\n"
    )
    return path


def test_names_are_shown_and_obeyed_nowhere(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the terminal, in JSON, in errors, in files for pipelines and on pages."""
    run, other = (
        save(with_fake_names(), tmp_path / "fake.parquet"),
        save(made_up(), tmp_path / "other.parquet"),
    )
    steps = tmp_path / "summary.md"
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(steps))
    gated = call("gate", run, "--policy", policy)
    assert gated.exit_code == 1
    assert gated.stdout.splitlines()[-1].startswith("FAILED: ")
    assert "passed" not in gated.stdout.splitlines()
    assert "\\x1b[2J" in gated.stdout, "shown, not dropped"
    texts = [gated.output, refused("compare", run, other), steps.read_text("utf-8")]
    for command in (("inspect", run), ("compare", run, run), ("gate", run, "--policy", policy)):
        texts += [call(*command).stdout, call(*command, "--json").stdout]
    for redacted in (True, False):
        page = write_report(load(run), tmp_path / "report", redacted=redacted)
        texts.append(page.read_text("utf-8"))
    for facts in ({"version": FAKE}, {"columns": {"fil": FAKE}}):
        texts.append(refused("gate", edited(other, facts), "--policy", policy))
    for text in texts:
        assert acting(text.replace("\x7f", "")) == []  # JSON leaves the harmless DEL

    # a file that is printed acts as its texts do, and a program that reads it prints them
    report, who, verdicts = page.parent, tmp_path / "who.csv", tmp_path / "gate.json"
    policy.write_text("min_mse_bound = 1e9\nmax_gain_over_guessing = 0.01\n")
    call("gate", run, "--policy", policy, "--list", who, "--json-file", verdicts)
    for path in (report / "leakage.csv", report / "summary.json", who, verdicts):
        text = path.read_text("utf-8")
        assert acting(text) == [], path
        if path.suffix == ".json":  # and as its reader has it
            text = "".join(leaves(json.loads(text)))
            assert acting(text) == [], path
        assert visible(FAKE) in text, path


def leaves(value: Any) -> list[str]:
    """All keys and values of a document of JSON."""
    if isinstance(value, dict):
        value = [*value, *value.values()]
    if isinstance(value, list):
        return [leaf for part in value for leaf in leaves(part)]
    return [str(value)]


class TestAbsurdNumbers:
    """Exit code 2, and never a rule that holds because a number is absurd."""

    @pytest.mark.parametrize(
        ("part", "changes"),
        [
            ("about", {"epsilon": math.nan}),
            ("about", {"mechanism": {"sample_rate": -1}}),
            ("records", {"rows": [9, 30]}),
            ("texts", {"rows": [0, 30]}),
            ("records", {"values": "words"}),
            ("records", {"values": [[1.0, 2.0]] * 2}),
        ],
        ids=str,
    )
    def test_facts(self, run: Path, policy: Path, part: str, changes: dict[str, Any]) -> None:
        crafted = edited(run, {part: {**facts_of(run)[part], **changes}})
        assert "is damaged (" in refused("gate", crafted, "--policy", policy)

    @pytest.mark.parametrize(
        "name", ["fil", "mse_bound", "epsilon", "missed", "paused", "participations", "clip_weight"]
    )
    def test_columns(self, run: Path, policy: Path, name: str) -> None:
        values = load(run).columns[name].astype(np.float64)
        for absurd in (-1.0, math.nan)[: 1 if name in ("fil", "mse_bound", "epsilon") else 2]:
            values[4] = absurd
            text = refused("gate", edited(run, **{name: values}), "--policy", policy)
            assert f"column '{name}' is {absurd} in row 4" in text  # the id stays out of logs

    def test_no_examples_and_deep_json(self, run: Path, policy: Path, tmp_path: Path) -> None:
        empty = SavedRun(
            about={"epsilon": 1.0},
            ids=np.arange(0),
            columns={"fil": np.zeros(0), "missed": np.zeros(0)},
        )
        assert "has no examples" in refused(
            "gate", save(empty, tmp_path / "empty.parquet"), "--policy", policy
        )
        deep = edited(run, b"[" * 10**5 + b"]" * 10**5)
        assert "is damaged (RecursionError" in refused("gate", deep, "--policy", policy)


class Bomb:
    """Its pickle makes a file when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


class TestSmallFiles:
    """A file takes at most 64 MiB of memory and 64 bytes for each of its own, or is refused before
    a column is read.
    """

    def crafted(
        self, path: Path, columns: dict[str, Any], facts: dict[str, Any], **options: Any
    ) -> Path:
        example = facts_of(save(made_up(4), path))
        columns = {"id": np.arange(len(next(iter(columns.values())))), **columns}
        none = {"groups": {}, "attributes": None, "questions": [], "attacks": [], "texts": None}
        known = {name: name for name in columns if name not in ("id", "words", "group_g")}
        document = {**example, **none, "history": {}, "columns": known, **facts}
        return with_footer(path, pa.table(columns), {KEY: json.dumps(document).encode()}, **options)

    def peak(self, path: Path) -> int:
        tracemalloc.start()
        try:
            assert len(load(path)) > 0
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    def test_rows_that_are_all_alike(self, tmp_path: Path) -> None:
        zeros = pa.array(np.zeros(1_000_000))
        columns = {
            "id": pa.array(np.zeros(1_000_000, np.int64)),
            **{f"c{i}": zeros for i in range(9)},
        }
        path = self.crafted(tmp_path / "run.parquet", columns, {})
        assert path.stat().st_size < 100_000
        with pytest.raises(RunFileError, match="would take 80,.* bytes of memory, more than 6"):
            load(path)

    def test_pages_that_swell(self, tmp_path: Path) -> None:
        path = self.crafted(tmp_path / "run.parquet", {"fil": np.ones(4)}, {}, compression="zstd")
        with pytest.raises(RunFileError, match=r"'id' is packed as no run's is \(ZSTD"):
            load(path)
        options = {"use_dictionary": False, "column_encoding": {"id": "DELTA_BYTE_ARRAY"}}
        path = self.crafted(path, {"id": ["a"] * 4, "fil": np.ones(4)}, {}, **options)
        with pytest.raises(RunFileError, match="packed as no run's is .*DELTA_BYTE_ARRAY"):
            load(path)

    def test_one_text_in_many_cells(self, tmp_path: Path) -> None:
        columns = {"fil": np.ones(400), "words": pa.array([["A" * 1_000_000]] * 400)}
        facts = {"texts": {"rows": list(range(400)), "words": "words", "fil": None, "plis": None}}
        path = self.crafted(tmp_path / "run.parquet", columns, facts)
        assert path.stat().st_size < 100_000
        with pytest.raises(RunFileError, match="bytes of memory, more than"):
            load(path)
        facts["texts"]["rows"] = [0] * 400
        with pytest.raises(RunFileError, match="an entry for one example twice"):
            load(self.crafted(path, {name: own[:4] for name, own in columns.items()}, facts))

    def test_long_texts_take_no_more_than_their_own_length(self, tmp_path: Path) -> None:
        n = 20_000
        columns = {"id": ["A" * 50_000, *map(str, range(n - 1))], "fil": np.ones(n)}
        path = self.crafted(tmp_path / "ids.parquet", columns, {})
        assert self.peak(path) < 2**24, "as NumPy's texts it would be 4 GB"
        columns = {"fil": np.ones(n), "group_g": pa.array(["B" * 3000] * n)}
        path = self.crafted(tmp_path / "group.parquet", columns, {"groups": {"g": "group_g"}})
        assert self.peak(path) < 2**24, "as NumPy's texts it would be 240 MB"
        for found in (load(path), load(tmp_path / "ids.parquet")):
            assert found.to_arrow().num_rows == n

    def test_a_run_of_many_examples_loads(self, tmp_path: Path) -> None:
        """Ids and labels of many examples, and numbers that are all alike, as where nothing
        leaked.
        """
        n, run = 300_000, made_up(40)
        places = np.zeros(n, np.int64)
        columns = {name: values[places] for name, values in run.columns.items()}
        groups = {name: labels[places] for name, labels in run.groups.items()}
        names = as_texts(np.arange(10**7, 10**7 + n))
        many = SavedRun(about=run.about, ids=names, columns=columns, groups=groups)
        path = save(many, tmp_path / "run.parquet")
        found = load(path)
        assert same(found.ids, names)
        assert same(found.columns, columns)


def test_numbers_that_contradict_each_other_fail_the_gate(run: Path, policy: Path) -> None:
    about, columns = facts_of(run)["about"], made_up(30).columns
    assert call("gate", run, "--policy", policy).exit_code in (0, 1), "it is judged"
    mechanism = {**about["mechanism"], "noise_multiplier": 0.0}
    low = np.where(np.arange(30) == 7, 1.01, 0.8) * columns["mse_bound"]
    question = made_up(30).questions[0]
    name, answer = question.name, question.answers[0]
    higher = {f"divergence_of_{name}_{answer}": np.asarray(question.divergence_high)[:, 0] * 1.01}
    for facts, changed, why in (
        ({"about": {**about, "mechanism": mechanism}}, {}, "it has a finite ε without noise"),
        ({"about": {**about, "delta": None}}, {}, "it has ε without δ"),
        ({}, {"id": ["a", *map(str, range(28)), "a"]}, "two examples have one id"),
        ({}, {"mse_bound_low": low}, "an interval does not contain its estimate"),
        ({}, higher, "an interval does not contain its estimate"),
    ):
        crafted = run.with_name("crafted.parquet")
        crafted.write_bytes(run.read_bytes())
        told = refused("gate", edited(crafted, facts, **changed), "--policy", policy)
        assert f"the run cannot be true: {why}" in told
    for possible in (
        {"epsilon": None, "delta": None},
        {"epsilon": math.inf, "mechanism": mechanism},
    ):
        assert call(
            "gate", edited(run, {"about": {**about, **possible}}), "--policy", policy
        ).exit_code in (1, 3)


def test_pipes_are_refused_and_not_waited_for(run: Path, policy: Path, tmp_path: Path) -> None:
    pipe, folder = tmp_path / "pipe", tmp_path / "checkpoints"
    os.mkfifo(pipe)
    folder.mkdir()
    os.mkfifo(folder / "latest")
    signed = "--signature", policy, "--allowed-signers", policy
    for command in (
        ("inspect", pipe),
        ("gate", run, "--policy", pipe),
        ("verify", run, *signed[:2], signed[2], pipe),
        ("verify", run, signed[0], pipe, *signed[2:]),
    ):
        assert "this is a pipe or a device" in refused(*command), command
    for read in (read_file, file_sha256):
        with pytest.raises(OSError, match="pipe or a device"):
            read(pipe)
    with pytest.raises(OSError, match="pipe or a device"):
        read_folder(folder)


class TestFooters:
    """Nothing in a footer is executed, and its size is no threat."""

    @pytest.mark.parametrize("name", ["arrow.py_extension_type", "tests.bomb"])
    def test_types_that_are_pickles(self, tmp_path: Path, name: str) -> None:
        class Registered(pa.ExtensionType):
            def __init__(self) -> None:
                super().__init__(pa.float64(), "tests.bomb")

            def __arrow_ext_serialize__(self) -> bytes:
                return b""

            @classmethod
            def __arrow_ext_deserialize__(cls, storage: Any, serialized: bytes) -> Any:
                pickle.loads(serialized)
                return cls()

        path, made = save(made_up(), tmp_path / "run.parquet"), tmp_path / "made"
        facts, table = parquet.read_metadata(path).metadata, parquet.read_table(path)
        extension = {
            "ARROW:extension:name": name,
            "ARROW:extension:metadata": pickle.dumps(Bomb(made)),
        }
        table = table.cast(table.schema.set(1, table.schema.field(1).with_metadata(extension)))
        with_footer(path, table, facts, store_schema=True)
        assert b"ARROW:schema" in parquet.read_metadata(path).metadata
        pa.register_extension_type(Registered())
        try:
            with pytest.raises(RunFileError, match="is not a saved run"):
                load(path)
        finally:
            pa.unregister_extension_type("tests.bomb")
        assert not made.exists()

    def test_metadata_of_others(self, tmp_path: Path) -> None:
        path = save(made_up(), tmp_path / "run.parquet")
        facts, table = parquet.read_metadata(path).metadata, parquet.read_table(path)
        for more in ({b"pandas": pickle.dumps(Bomb(tmp_path / "made"))}, {b"more": b"x"}):
            with pytest.raises(RunFileError, match="is not a saved run"):
                load(with_footer(path, table, {**facts, **more}))
        with pytest.raises(RunFileError, match="is not a saved run"):
            load(with_footer(path, table, {KEY: b" " * 2**22 + facts[KEY]}))

    def test_a_large_footer_takes_no_memory(self, tmp_path: Path) -> None:
        with open(tmp_path / "large.parquet", "wb") as file:
            file.write(b"PAR1")
            file.seek(90_000_000)
            file.write((89_000_000).to_bytes(4, "little") + b"PAR1")
        tracemalloc.start()
        with pytest.raises(RunFileError, match="not a saved run"):
            load(tmp_path / "large.parquet")
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
        tracemalloc.stop()
