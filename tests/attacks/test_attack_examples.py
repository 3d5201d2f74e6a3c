"""The examples of attacks on networks run from end to end on small files."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch, settings: str) -> Path:
    pytest.importorskip("matplotlib")
    monkeypatch.setenv("TORCHFIL_DATA", str(folder))
    monkeypatch.setattr(sys, "argv", [name, "--out", str(folder / "out"), *settings.split()])
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    return folder / "out" / f"{name}.png"


def test_inversion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "pneumoniamnist").mkdir()
    images = torch.randint(256, (12, 28, 28), dtype=torch.uint8).numpy()
    np.savez(
        tmp_path / "pneumoniamnist" / "pneumoniamnist.npz",
        train_images=images,
        train_labels=np.arange(12)[:, None] % 2,
    )
    picture = run("attack_inversion", tmp_path, monkeypatch, "--sample 9 --steps 3")
    assert 0 < picture.stat().st_size < 200_000
    assert "mean SSIM: low-PLIS third" in capsys.readouterr().out
