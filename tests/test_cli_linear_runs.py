"""``torchfil glm --save``: the saved run, its page, gate and comparison."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.glm_command import glm, refused_glm
from tests.test_cli import call

pytest.importorskip("sklearn")


class TestSavedRuns:
    """``--save`` and ``--report``: page, gate and inspect of a linear model's release."""

    @pytest.fixture
    def table(self, tmp_path: Path) -> Path:
        rng = np.random.default_rng(0)
        genotype, sex = rng.choice(["CC", "CT", "TT"], 60), rng.choice(["f", "m"], 60)
        rows = [
            f"p{i},{50 + 10 * rng.normal():.2f},{genotype[i]},{sex[i]},{20 + (genotype[i] == 'TT') + rng.normal():.3f}"
            for i in range(60)
        ]
        path = tmp_path / "patients.csv"
        path.write_text("\n".join(["name,age,vkorc1,sex,dose", *rows]))
        return path

    def saved(self, table: Path, *options: Any) -> Any:
        from torchfil.report import load

        path = table.parent / "run.parquet"
        found = glm(table, "--target", "dose", "--id", "name", "--save", path, "--sigma", "0.1", *options)
        assert found.exit_code == 0, found.output
        assert f"run: {path}" in found.stdout
        return load(path)

    def test_the_run_holds_the_numbers_of_the_library(self, table: Path) -> None:
        from torchfil.glm import LinearRegression, NominalAttribute, guess
        from torchfil.glm.tables import read_table

        run = self.saved(table, "--private", "vkorc1,age", "--question", "vkorc1", "--group", "sex")
        encoded = read_table(table, "dose", id_column="name")
        X, y = encoded.inputs, encoded.targets
        model = LinearRegression(l2=1e-2, fit_intercept=True).fit(X, y)
        columns = {name: list(encoded.attributes[name]) for name in ("vkorc1", "age")}
        bound = model.mse_bound(X, y, 0.1, attributes=columns)
        assert run.attributes.names == ["age", "vkorc1"]
        for place, name in enumerate(run.attributes.names):
            assert np.allclose(run.attributes.error[:, place], np.sqrt(bound[name]), rtol=1e-6)
        one_by_one = {str(c): [c] for own in columns.values() for c in own}
        eta = model.fil(X, y, 0.1, attributes=one_by_one, kind="trace")
        square = sum((eta[c] * X[:, int(c)].std()) ** 2 for c in eta) / 3
        assert np.allclose(run.columns["mse_bound"], 1 / square)
        codes = np.eye(3)[:, 1:]
        best = guess(model, X, y, NominalAttribute(columns["vkorc1"], codes), 0.1)
        assert np.allclose(run.questions[0].rate(0.01), best.true_positive_rate(0.01))
        assert run.ids.tolist() == [f"p{i}" for i in range(60)]
        assert set(run.groups["sex"]) == {"f", "m"}

    def test_a_grouping_need_not_be_an_input(self, table: Path) -> None:
        run = self.saved(table, "--ignore", "sex", "--group", "sex")
        assert run.attributes.names == ["age", "vkorc1", "dose"]
        assert set(run.groups) == {"sex"}

    def test_page_gate_and_inspect(self, table: Path, tmp_path: Path) -> None:
        self.saved(table, "--question", "vkorc1,absent")
        run, policy = tmp_path / "run.parquet", tmp_path / "policy.toml"
        shown = call("inspect", run).stdout
        assert "the fitted weights, once, with noise σ = 0.1" in shown
        assert "most exposed (closed forms)" in shown
        for limit, code in ((1e-9, 0), (1e9, 1)):
            policy.write_text(f"min_mse_bound = {limit}")
            assert call("gate", run, "--policy", policy).exit_code == code
            page = tmp_path / f"page {code}"
            assert call("report", run, "-o", page, "--policy", policy).exit_code == 0
            text = (page / "index.html").read_text()
            assert ("PASS" if code == 0 else "FAIL") in text
            assert "output perturbation" in text
            assert "no accountant tells an ε" in text
            for untrue in ("repeated trainings", "noisy gradient", "from one run", "partly by luck", "probes"):
                assert untrue not in text.partition("<main>")[2].partition('<section id="examples">')[0], untrue
        policy.write_text("max_epsilon = 8.0")
        found = call("gate", run, "--policy", policy)
        assert found.exit_code == 1
        assert "has no accountant's ε: take the rule out" in found.stdout

    def test_the_page_at_once(self, table: Path, tmp_path: Path) -> None:
        found = glm(table, "--target", "dose", "--id", "name", "--report", tmp_path / "page", "--json")
        page = Path(json.loads(found.stdout)["page"])
        assert page == tmp_path / "page" / "index.html"
        assert "p17" in page.read_text() + (page.parent / "leakage.csv").read_text()

    def test_another_sigma_compared(self, table: Path, tmp_path: Path) -> None:
        for sigma in ("0.1", "0.3"):
            glm(table, "--target", "dose", "--id", "name", "--sigma", sigma, "--save", tmp_path / f"{sigma}.parquet")
        found = json.loads(call("compare", tmp_path / "0.1.parquet", tmp_path / "0.3.parquet", "--json").stdout)
        assert found["expected"] == pytest.approx(9.0)
        assert found["ratio"] == pytest.approx({"mean": 9.0, "0": 9.0, "0.5": 9.0, "1": 9.0})
        assert (found["less"], found["more"]) == (60, 0)

    def test_mistakes(self, table: Path, tmp_path: Path) -> None:
        common = (table, "--target", "dose", "--id", "name")
        assert "is the data file" in refused_glm(*common, "--save", table)
        assert "is the data file" in refused_glm(*common, "--report", table)
        twice = (*common, "--save", tmp_path / "x", "--out", tmp_path / "x")
        assert "written to already" in refused_glm(*twice)
        assert "names a folder" in refused_glm(*common, "--report", tmp_path / "page.html")
        assert "no column 'seks'; did you mean 'sex'" in refused_glm(*common, "--group", "seks")
        assert not (tmp_path / "run.parquet").exists()
        assert table.read_text().startswith("name,age")
