"""Tables by example, for pandas, Polars, DuckDB and pyarrow: the ids are a column, and unknown
numbers are null.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

import numpy as np
import pandas
import polars
import pyarrow
import pytest

from tests.engine.loops import data, train
from torchfil.accounting.ids import ExampleIds
from torchfil.integrations.table import write_table
from torchfil.report import load, write_report
from torchfil.utils.tables import as_table

KEYS = [f"patient {i}" for i in range(30)]


@pytest.fixture(params=["pandas", "no pandas"])
def with_pandas(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if request.param == "no pandas":
        pyarrow.array(np.zeros(1))  # looks for pandas itself, once
        monkeypatch.setitem(sys.modules, "pandas", None)
    return bool(request.param == "pandas")


def test_leakage_for_every_reader_of_arrow(with_pandas: bool, tmp_path: Path) -> None:
    engine = train(data(30), steps=6, id_of=KEYS).engine
    table, (names, columns) = engine.leakage(delta=1e-4), engine.leakage_columns(delta=1e-4)
    write_table(engine, tmp_path / "leakage.csv", delta=1e-4)
    assert list(names) == KEYS
    stream = pyarrow.RecordBatchReader.from_stream(table).read_all()
    for found in (table.to_arrow(), stream, table.to_polars().to_arrow()):
        assert found.column_names == ["id", *columns]
        assert found["id"].to_pylist() == KEYS
        for name, values in columns.items():
            assert found[name].to_pylist() == [None if v != v else v for v in values]
    written = polars.read_csv(tmp_path / "leakage.csv")
    assert written["id"].to_list() == KEYS
    assert written["fil"].to_numpy() == pytest.approx(columns["fil"], nan_ok=True)


@pytest.mark.parametrize("keys", [["a", 1, "1"], [("a", 1), ("b", 2)], [7, 2**40], []])
def test_names_have_the_type_that_a_run_file_gives_them(
    with_pandas: bool, keys: list[object]
) -> None:
    """One type each, and no two alike; what is not known is null."""
    arrow = as_table(keys, {"fil": np.full(len(keys), math.nan)}).to_arrow()
    assert arrow["id"].to_pylist() == ExampleIds(len(keys), list(keys)).as_array().tolist()
    assert arrow["fil"].to_pylist() == [None] * len(keys)


def test_the_table_of_a_run_file_is_that_of_its_report(tmp_path: Path) -> None:
    engine = train(data(30), steps=6, track=("diagonal",)).engine
    run = load(engine.save_run(tmp_path / "run.parquet", delta=1e-4))
    write_report(run, tmp_path / "report")
    written = pandas.read_csv(tmp_path / "report" / "leakage.csv", index_col="id")
    pandas.testing.assert_frame_equal(run.to_pandas(), written, rtol=1e-6, check_dtype=False)
