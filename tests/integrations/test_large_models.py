"""The benchmark's large models, built tiny, take steps by every method of torchfil's; the examples run."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.large import LARGE, LargeLoop


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama_lora"])
def test_texts(name: str) -> None:
    for package in LARGE[name].needs:
        pytest.importorskip(package)
    for precision in LARGE[name].precisions:
        for method in ("loop", "train_step"):
            loop = LargeLoop(LARGE[name], method, 1, precision, "cpu", small=True)
            loop.step()
            assert float(loop.engine.get_fil().value.max()) > 0
            assert all(torch.isfinite(value).all() for value in loop.module.parameters())


@pytest.mark.parametrize(
    ("name", "package", "settings"), [("lightning", "lightning", ""), ("huggingface", "transformers", "--examples 400")]
)
def test_the_example_runs(
    name: str,
    package: str,
    settings: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip(package)
    example = Path(__file__).parents[2] / "examples" / f"{name}_leakage.py"
    given = ["--epochs", "1", "--path", str(tmp_path / "leakage.csv"), *settings.split()]
    monkeypatch.setattr(sys, "argv", [example.name, *given])
    runpy.run_path(str(example), run_name="__main__")
    assert "ε = " in capsys.readouterr().out
    assert (tmp_path / "leakage.csv").exists()
