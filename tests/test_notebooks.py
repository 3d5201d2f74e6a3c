"""Every tutorial runs from top to bottom, with smaller settings than on the site and without the site's packages."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

TUTORIALS = Path(__file__).parents[1] / "docs" / "tutorials"
NOTEBOOKS = sorted(path for path in TUTORIALS.glob("*.md") if path.stem != "index")
# what the tests put in place of the first cell's values
SMALL: dict[str, dict[str, object]] = {
    "causal-lm-lora": {"EPOCHS": 1, "PLAIN_EPOCHS": 1, "PUBLIC_STEPS": 20},
    "choosing-noise": {"EPOCHS": 4, "PATIENTS": 60, "ROUNDS": 1},
    "ci-gate": {"EPOCHS": 1},
    "clinic-table": {"EPOCHS": 1},
    "first-report": {"EPOCHS": 1},
    "images-plis": {"STEPS": 20},
    "linear-models": {"SIGMA_GRID": 3, "RELEASES": 200},
    "text-lora": {"EPOCHS": 1, "PUBLIC_STEPS": 20},
    "visits": {"EPOCHS": 1, "PATIENTS": 30},
}


RUNNER = SimpleNamespace(**runpy.run_path(str(TUTORIALS / "run.py")))  # which is no part of a package


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    pytest.importorskip("sklearn")
    if path.stem == "causal-lm-lora":  # make test-integrations has them
        pytest.importorskip("transformers")
        pytest.importorskip("peft")
    monkeypatch.chdir(tmp_path)
    names = RUNNER.run_notebook(path, SMALL[path.stem], tmp_path / "pictures")
    assert len(names) > 1
    assert list((tmp_path / "pictures").glob("*.png")), "a tutorial shows a picture"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_is_a_notebook_for_jupytext_and_listed(path: Path) -> None:
    assert path.stem in SMALL
    text, index = path.read_text(), (TUTORIALS / "index.md").read_text()
    assert "format_name: myst\n" in text.partition("\n---\n")[0]
    assert f"]({path.name})" in index
    assert f"\n{path.stem}\n" in index
    cells = RUNNER.code_cells(text)
    assert cells[0][0] == "[parameters]"
    assert len(cells) == len(re.findall(r"^```\{code-cell\}", text, flags=re.MULTILINE))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_becomes_an_ipynb_file(path: Path) -> None:
    nbformat = pytest.importorskip("nbformat")
    text = path.read_text()
    notebook = nbformat.from_dict(RUNNER.as_notebook(text))
    nbformat.validate(notebook)
    codes = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert "pip" in notebook.cells[0].source
    assert codes[1].metadata.tags == ["parameters"]
    assert [cell.source.strip() for cell in codes[1:]] == [code.strip() for _, code in RUNNER.code_cells(text)]
    shown = "".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    assert not re.search(r"\.md\)|```\{|code-cell|<a ", shown)
    assert len(shown) > 0.9 * len(RUNNER.CELL.sub("", text.partition("\n---\n")[2]).replace("\n\n", "\n"))


def test_one_runs_as_a_script_and_all_are_written(tmp_path: Path) -> None:
    written = RUNNER.write_notebooks(tmp_path / "new")
    assert [file.stem for file in written] == [path.stem for path in NOTEBOOKS]
    cells = json.loads((tmp_path / "new" / "linear-models.ipynb").read_text())["cells"]
    codes = [cell["source"] for cell in cells if cell["cell_type"] == "code"]
    codes.insert(2, "\n".join(f"{name} = {value}" for name, value in SMALL["linear-models"].items()))
    script = tmp_path / "script.py"
    script.write_text("import matplotlib\nmatplotlib.use('agg')\n" + "\n".join(codes))
    run = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert len(run.stdout.splitlines()) > 3


INSTALL = """
import importlib.util, subprocess
importlib.util.find_spec = lambda name: None
subprocess.run = lambda command, check: print(command[-1])
"""


def test_the_first_cell_installs_a_wheel_if_there_is_one(tmp_path: Path) -> None:
    source = RUNNER.as_notebook(NOTEBOOKS[0].read_text())["cells"][0]["source"]
    for wheel in (None, tmp_path / "torchfil-1.0-py3-none-any.whl"):
        if wheel is not None:
            wheel.touch()
        command = [sys.executable, "-c", INSTALL + source]
        shown = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout.strip()
        assert re.fullmatch(rf"{re.escape(str(wheel or 'torchfil'))}\[report,glm(,hf)?\]", shown)
