"""Tables by example, for pandas, Polars, DuckDB and pyarrow: the ids are a column, and unknown numbers are null."""

from __future__ import annotations

import copy
import math
import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import polars
import pyarrow
import pytest
from pyarrow import csv

from tests.engine.loops import data, train
from torchfil import FILPrivacyEngine
from torchfil.accounting.ids import ExampleIds
from torchfil.attribution.exposure import rank_by_exposure
from torchfil.integrations.table import write_table
from torchfil.questions import Absent
from torchfil.report import load, write_report
from torchfil.run.saved_run import Attributes, SavedRun
from torchfil.utils.tables import as_table


@pytest.fixture(params=["pandas", "no pandas"])
def with_pandas(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if request.param == "no pandas":
        pyarrow.array(np.zeros(1))  # looks for pandas itself, once
        monkeypatch.setitem(sys.modules, "pandas", None)
    return bool(request.param == "pandas")


def trained(**options: Any) -> FILPrivacyEngine:
    return train(data(30), steps=6, questions={"in?": Absent()}, **options).engine


KEYS = [f"patient {i}" for i in range(30)]


@pytest.mark.parametrize("keys", [None, KEYS])
def test_leakage_for_every_reader_of_arrow(with_pandas: bool, keys: list[str] | None) -> None:
    import duckdb

    engine = trained(id_of=keys)
    table, ids = engine.leakage(delta=1e-4), keys or list(range(30))
    names, columns = engine.leakage_columns(delta=1e-4)
    assert list(names) == ids
    stream = pyarrow.RecordBatchReader.from_stream(table).read_all()
    polars_table, arrow = table.to_polars(), table.to_arrow()
    for found in (arrow, stream, polars_table.to_arrow(), duckdb.sql("SELECT * FROM stream").to_arrow_table()):
        assert found.column_names == ["id", *columns]
        assert found["id"].to_pylist() == ids
        for name, values in columns.items():
            assert found[name].to_pylist() == values
    assert polars_table.schema["fil"] == polars.Float64
    assert polars_table.schema["participations"].is_integer()
    totals = engine.totals
    for found in (polars.DataFrame(totals)["id"].to_list(), duckdb.sql("SELECT * FROM totals").to_arrow_table()["id"]):
        assert [str(each) for each in found] == [str(each) for each in ids]
    assert pyarrow.table(table)["id"].to_pylist() == ids
    if not with_pandas:  # with pandas it looks for a DataFrame first, and drops its index
        assert polars.DataFrame(table)["id"].to_list() == ids


def test_all_other_tables_speak_arrow_too(with_pandas: bool) -> None:
    engines = [trained(), trained()]
    merged = FILPrivacyEngine.merge(engines).leakage()
    assert merged.to_arrow().column_names[:2] == ["id", "fil"]
    groups = engines[0].group_leakage({i: "even" if i % 2 == 0 else "odd" for i in range(30)}).to_polars()
    assert groups["group"].to_list() == ["even", "odd"]
    assert groups["count"].to_list() == [15, 15]
    ranked = rank_by_exposure([0.5, 2.0, 1.0], ["a", "b", "c"]).to_arrow().to_pydict()
    assert ranked == {"id": ["b", "c", "a"], "plis": [2.0, 1.0, 0.5], "rank": [1, 2, 3], "quantile": [1, 2 / 3, 1 / 3]}


def test_a_dataframe_stays_a_dataframe() -> None:
    table = trained().leakage()
    assert isinstance(table, pandas.DataFrame)
    plain = pandas.DataFrame(table)
    loaded = pickle.loads(pickle.dumps(table))
    for made in (table[["fil"]], table[table.fil >= 0], table.sort_values("fil"), copy.deepcopy(table), loaded):
        assert type(made) is pandas.DataFrame
    pandas.testing.assert_frame_equal(loaded, plain)
    pandas.testing.assert_frame_equal(pandas.concat([table, table]), pandas.concat([plain, plain]))
    table["twice"] = 2 * table.fil
    assert table.to_polars()["twice"].to_list() == (2 * plain.fil).tolist()


def test_without_pandas_it_is_a_dict_of_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = trained()
    expected = engine.leakage([3, 1, 3])
    monkeypatch.setitem(sys.modules, "pandas", None)
    table = engine.leakage([3, 1, 3])
    assert isinstance(table, dict)
    assert table["id"] == [3, 1, 3]
    assert table["fil"].tolist() == expected.fil.tolist()
    monkeypatch.setitem(sys.modules, "polars", None)
    with pytest.raises(ImportError, match="pip install polars"):
        table.to_polars()


@pytest.mark.parametrize("keys", [["a", 1, "1"], [("a", 1), ("b", 2)], [7, 2**40], [], range(2, 5)])
def test_names_have_the_type_that_a_run_file_gives_them(with_pandas: bool, keys: Any) -> None:
    """One type each, and no two alike."""
    arrow = as_table(keys, {"fil": np.zeros(len(keys))}).to_arrow()
    assert arrow["id"].to_pylist() == ExampleIds(len(keys), list(keys)).as_array().tolist()


def test_what_is_not_known_is_null(with_pandas: bool) -> None:
    table = as_table([5, 6, 7], {"x": [0.5, math.nan, math.inf]}, index_name="layer")
    assert table.to_arrow().to_pydict() == {"layer": [5, 6, 7], "x": [0.5, None, math.inf]}


def test_a_table_is_written_as_it_is_read(with_pandas: bool, tmp_path: Path) -> None:
    engine = trained(id_of=KEYS)
    write_table(engine, tmp_path / "leakage.csv", delta=1e-4)
    names, columns = engine.leakage_columns(delta=1e-4)
    table = csv.read_csv(tmp_path / "leakage.csv").to_pydict()
    assert table.pop("id") == names
    assert table.pop("fil_kind") == columns.pop("fil_kind")
    assert table == {name: pytest.approx(values) for name, values in columns.items()}


def test_numbers_are_not_copied_without_pandas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    values = np.arange(1000.0)
    column = as_table(range(1000), {"x": values}).to_arrow()["x"].chunk(0)
    assert column.buffers()[1].address == values.ctypes.data


# ---------------------------------------------------------------------- saved runs


def saved() -> SavedRun:
    columns = {"fil": [0.5, 0.0, 2.0], "mse_bound": [4.0, math.inf, 0.25], "participations": [3, 0, 4]}
    return SavedRun(
        {"title": "<b>patients</b>\x1b[2J", "epsilon": 2.5, "delta": 1e-5, "mechanism": {"unit": "owner"}},
        np.array(["a", "b", "c"]),
        {name: np.asarray(values) for name, values in columns.items()} | {"missed": np.array([0, 0, 1])},
        attributes=Attributes(["age"], ["years"], np.array([[1.0], [2.0], [3.0]]), np.array([[0.5], [1.0], [1.5]])),
        groups={"ward": np.array(["x", "y", "x"])},
    )


def test_the_table_of_a_run() -> None:
    import duckdb

    run = saved()
    assert run.to_arrow().to_pydict() == {
        "id": ["a", "b", "c"],
        "status": ["measured", "not measured", "lower bound"],
        "fil": [0.5, None, 2.0],
        "mse_bound": [4.0, None, 0.25],
        "participations": [3, 0, 4],
        "missed": [0, 0, 1],
        "group ward": ["x", "y", "x"],
        "least error of age": [0.5, None, 1.5],
    }
    assert polars.DataFrame(run).equals(run.to_polars())
    assert duckdb.sql("SELECT id FROM run WHERE fil > 1").fetchall() == [("c",)]
    frame = run.to_pandas()
    assert frame.index.tolist() == ["a", "b", "c"]
    assert frame.fil[["a", "c"]].tolist() == [0.5, 2.0]


def test_the_table_of_a_run_file_is_that_of_its_report(tmp_path: Path) -> None:
    run = load(trained(track=("diagonal",)).save_run(tmp_path / "run.parquet", delta=1e-4))
    write_report(run, tmp_path / "report")
    frame = run.to_pandas()
    written = pandas.read_csv(tmp_path / "report" / "leakage.csv", index_col="id")
    pandas.testing.assert_frame_equal(frame, written, rtol=1e-6, check_dtype=False)


def test_a_run_shows_itself_in_short() -> None:
    run = saved()
    text, page = repr(run), run._repr_html_()
    assert len(repr(run.take(np.zeros(0, int)))) < len(text) < 500
    for part in ("2.5 at δ = 1e-05", "2 of 3", "median 1.25, largest 2", "people measured", "attributes, groups"):
        assert part in text
        assert part in page
    assert "confidential" in page
    assert "<b>" not in page
    assert "\x1b" not in text + page
    empty = SavedRun({}, np.zeros(0, int), {})
    assert "nothing else" in repr(empty)
