"""Every tutorial runs from top to bottom, with smaller settings than on the site and without the
site's packages.
"""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest

TUTORIALS = Path(__file__).parents[1] / "docs" / "tutorials"
ELSEWHERE = ("index", "causal-lm-lora")  # the latter in tests/integrations
NOTEBOOKS = sorted(path for path in TUTORIALS.glob("*.md") if path.stem not in ELSEWHERE)
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


# which is no part of a package
RUNNER = SimpleNamespace(**runpy.run_path(str(TUTORIALS / "run.py")))


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    pytest.importorskip("sklearn")
    monkeypatch.chdir(tmp_path)
    names = RUNNER.run_notebook(path, SMALL[path.stem], tmp_path / "pictures")
    assert len(names) > 1
    assert list((tmp_path / "pictures").glob("*.png")), "a tutorial shows a picture"
