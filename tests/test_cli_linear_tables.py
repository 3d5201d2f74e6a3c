"""``torchfil glm`` on tables as people have them: formats, doubtful columns, many rows."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.glm_command import glm, refused_glm, table_file

pytest.importorskip("sklearn")


class TestFormats:
    @pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "cp1252"])
    @pytest.mark.parametrize(("separator", "decimal"), [(",", "."), (";", "."), (";", ","), ("\t", ","), ("|", ".")])
    def test_the_same_numbers_however_they_are_written(
        self, tmp_path: Path, separator: str, decimal: str, encoding: str
    ) -> None:
        plain = json.loads(glm(table_file(tmp_path / "a.csv"), "--target", "y", "--json").stdout)
        other = table_file(tmp_path / "b.csv", separator=separator, decimal=decimal, encoding=encoding)
        found = json.loads(glm(other, "--target", "y", "--json").stdout)
        assert (found["format"]["separator"], found["format"]["decimal"]) == (separator, decimal)
        assert found["columns"] == ["größe", "art=süß"]
        assert found["summary"] == plain["summary"]

    def test_what_was_told_is_said(self, tmp_path: Path) -> None:
        path = table_file(tmp_path / "a.csv", separator=";", decimal=",", encoding="cp1252")
        shown = glm(path, "--target", "y").stdout
        assert "(Windows-1252, columns separated by semicolons, decimal commas)" in shown
        assert "if letters look wrong, use --encoding" in shown

    def test_what_is_given_counts(self, tmp_path: Path) -> None:
        path = tmp_path / "a.csv"
        path.write_bytes("a~y\n1,234~2\n1,235~3\n2,5~1\nĦ~4\n".encode("iso8859-3"))
        given = ["--separator", "~", "--decimal", ",", "--encoding", "iso8859-3"]
        line = refused_glm(path, "--target", "y", *given)
        assert "1 of 4 entries cannot be read as such: 'Ħ' in line 5" in line
        assert "--encoding 'klingon' is no encoding" in refused_glm(path, "--target", "y", "--encoding", "klingon")
        assert "--separator '~~' must be one character" in refused_glm(path, "--target", "y", "--separator", "~~")

    def test_a_comma_that_may_be_of_thousands_is_asked_for(self, tmp_path: Path) -> None:
        path = tmp_path / "a.csv"
        path.write_text("a;y\n1,234;2\n2,500;3\n4,125;5\n")
        assert "'1,234' in" in (line := refused_glm(path, "--target", "y"))
        assert "can be 1234 or 1.234; say that the comma is a decimal sign (--decimal ,)" in line
        data = json.loads(glm(path, "--target", "y", "--decimal", ",", "--private", "a", "--json").stdout)
        assert data["rows"] == 3
        assert "'1,234' in line 2" in refused_glm(path, "--target", "y", "--decimal", ".")

    def test_names_with_commas(self, tmp_path: Path) -> None:
        path = tmp_path / "a.csv"
        path.write_text('"height, cm",note,y\n1.5,a,2\n2.5,b,3\n4.5,a,5\n')
        data = json.loads(glm(path, "--target", "y", "--private", '"height, cm",note', "--json").stdout)
        assert "height, cm_fil" in data["summary"]
        assert "names stand between commas" in refused_glm(path, "--target", "y", "--private", '"height, cm')


class TestDoubtfulColumns:
    def rows(self, path: Path, n: int = 60, **columns: Any) -> Path:
        rng = np.random.default_rng(1)
        x = rng.normal(size=n)
        table = {"x": x, "y": 2 * x + rng.normal(size=n), **columns}
        lines = [",".join(table), *(",".join(map(str, row)) for row in zip(*table.values(), strict=True))]
        path.write_text("\n".join(lines))
        return path

    def test_one_bad_entry_is_reported_with_its_row(self, tmp_path: Path) -> None:
        # it turned a column of 4,819 numbers into 4,819 categories, and moved the largest leakage by a factor of 27
        path = self.rows(tmp_path / "a.csv", z=np.random.default_rng(0).normal(size=60))
        lines = path.read_text().splitlines()
        lines[17] = lines[17] + " kg"
        path.write_text("\n".join(lines))
        line = refused_glm(path, "--target", "y")
        assert "column 'z' holds numbers, but 1 of 60 entries cannot be read as such: '" in line
        assert " kg' in line 18. Correct them (the decimal sign is a point" in line
        assert line.endswith("--categorical z")
        assert "column 'z' holds numbers, but 1 of 60" in refused_glm(path, "--target", "z"), "in the target too"

    def test_lines_are_those_of_the_file(self, tmp_path: Path) -> None:
        path = tmp_path / "a.csv"
        path.write_text('a,note,y\n1,"x\ny",2\n\n2,z,3\n5 kg,z,1\n3,w,4\n')
        assert "'5 kg' in line 6" in refused_glm(path, "--target", "y")
        path.write_text('a,note,y\n1,"x\ny",2\n\n2,z,3\n5,z\n')
        assert "line 6: row 3 has 2 entries for 3 columns" in refused_glm(path, "--target", "y")

    def test_codes_among_numbers_are_categories_on_request(self, tmp_path: Path) -> None:
        grades = ["1", "2", "3", "4+"] * 15
        path = self.rows(tmp_path / "a.csv", grade=grades)
        assert "15 of 60 entries cannot be read as such: '4+' in line 5" in refused_glm(path, "--target", "y")
        data = json.loads(glm(path, "--target", "y", "--categorical", "grade", "--json").stdout)
        assert data["levels"] == {"grade": ["1", "2", "3", "4+"]}

    def test_texts_with_few_numbers_among_them_are_categories(self, tmp_path: Path) -> None:
        path = self.rows(tmp_path / "a.csv", kind=["a", "b", "7"] * 20)
        assert json.loads(glm(path, "--target", "y", "--json").stdout)["levels"] == {"kind": ["7", "a", "b"]}

    def test_an_index_is_noticed(self, tmp_path: Path) -> None:
        for name, start in (("", 0), ("Unnamed: 0", 0), ("nr", 1)):
            path = self.rows(tmp_path / "a.csv", **{name: np.arange(start, start + 60)})
            shown = name or "unnamed 3"
            line = refused_glm(path, "--target", "y")
            assert f"column '{shown}' counts the rows ({start}, {start + 1}, …): it looks like an index" in line
            for remedy in (["--ignore", shown], ["--id", shown], ["--quantity", shown]):
                assert glm(path, "--target", "y", *remedy).exit_code == 0

    def test_an_index_is_noticed_where_rows_are_left_out(self, tmp_path: Path) -> None:
        numbers: list[Any] = np.linspace(0.5, 7, 60).tolist()
        numbers[20] = ""
        path = self.rows(tmp_path / "a.csv", nr=np.arange(60), z=numbers)
        assert "column 'nr' counts the rows (0, 1, …)" in refused_glm(path, "--target", "y", "--drop-missing")

    def test_other_identifiers_are_told(self, tmp_path: Path) -> None:
        path = self.rows(tmp_path / "a.csv", patient=np.random.default_rng(0).permutation(9000)[:60])
        data = json.loads(glm(path, "--target", "y", "--json").stdout)
        assert data["notes"] == [
            "whole numbers that differ in every row: patient; for identifiers, use --ignore or --id"
        ]
        assert json.loads(glm(path, "--target", "y", "--quantity", "patient", "--json").stdout)["notes"] == []

    def test_constant_columns_are_named_together(self, tmp_path: Path) -> None:
        path = self.rows(tmp_path / "a.csv", site=["A"] * 60, year=[2020] * 60)
        line = refused_glm(path, "--target", "y")
        assert line.endswith("leave out constant columns: --ignore site,year")
        assert glm(path, "--target", "y", "--ignore", "site,year").exit_code == 0

    def test_one_thing_is_said_of_a_column(self, tmp_path: Path) -> None:
        path = self.rows(tmp_path / "a.csv", grade=[1, 2, 3] * 20)
        both = ["--categorical", "grade", "--quantity", "grade"]
        assert "cannot be a category" in refused_glm(path, "--target", "y", *both)


def long_table(path: Path, rows: int) -> Path:
    """Thirteen columns, three of them texts."""
    rng = np.random.default_rng(0)
    with path.open("w") as file:
        file.write(",".join(["site", "sex", "gene", *(f"v{k}" for k in range(9)), "y"]) + "\n")
        for start in range(0, rows, 100_000):
            size = min(100_000, rows - start)
            texts = [
                rng.choice(["A", "B", "C", "D"], size),
                rng.choice(["f", "m"], size),
                rng.choice(["CC", "CT"], size),
            ]
            numbers = [[f"{value:.4f}" for value in rng.normal(size=size)] for _ in range(10)]
            file.writelines(",".join(row) + "\n" for row in zip(*texts, *numbers, strict=True))
    return path


class TestLongTables:
    def test_pieces_fit_together(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """In pieces of 7 rows."""
        path = long_table(tmp_path / "a.csv", 300)
        whole = json.loads(glm(path, "--target", "y", "--json").stdout)
        monkeypatch.setattr("torchfil.glm.tables._PIECE", 7)
        assert json.loads(glm(path, "--target", "y", "--json").stdout) == whole
        lines = path.read_text().splitlines()
        cells = lines[251].split(",")
        lines[251] = ",".join([*cells[:5], "1.5 kg", *cells[6:]])
        path.write_text("\n".join(lines))
        assert "1 of 300 entries cannot be read as such: '1.5 kg' in line 252" in refused_glm(path, "--target", "y")
        lines[251] = ",".join([*cells[:5], "", *cells[6:]])
        path.write_text("\n".join(lines))
        assert "1 in 'v2'" in refused_glm(path, "--target", "y")
        assert json.loads(glm(path, "--target", "y", "--drop-missing", "--json").stdout)["rows"] == 299

    @pytest.mark.slow
    def test_memory_of_200_000_rows(self, tmp_path: Path) -> None:
        """A process of its own, whose peak can be read: the table itself is 13 columns of 8 bytes, 21 MB."""
        path = long_table(tmp_path / "a.csv", 200_000)
        code = (
            "import resource, sys; from torchfil.cli import main; import torchfil.glm\n"
            "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
            "main(sys.argv[1:], standalone_mode=False)\n"
            "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, file=sys.stderr)"
        )
        args = ["glm", str(path), "--target", "y", "--sigma", "0.1", "--private", "gene,v0", "--json"]
        found = subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, check=True)
        assert json.loads(found.stdout)["rows"] == 200_000
        assert int(found.stderr.split()[-1]) < 250_000  # kB: a fifth of what a million rows may take
