"""Examples run from end to end on small files."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest
from test_datasets import IWPC, write, write_adult

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_attribute_leakage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    write(tmp_path / "iwpc" / "iwpc-scaled.csv", IWPC)
    write_adult(tmp_path)
    monkeypatch.setenv("TORCHFIL_DATA", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["glm_iwpc.py", "--out", str(tmp_path / "out"), "--rounds", "2"])
    runpy.run_path(str(EXAMPLES / "glm_iwpc.py"), run_name="__main__")
    assert "IWPC linear" in capsys.readouterr().out
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"glm_figure6a.png", "glm_figure7.png"}
