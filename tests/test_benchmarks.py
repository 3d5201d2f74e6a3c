"""The benchmark's parts: what is timed is what it says, failures are told, and the page holds
everything.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks import __main__ as command
from benchmarks import comparison, loops, paper
from benchmarks.scale_model import fitted, measured_in_float32, tables
from torchfil.fisher.operator import ClippedJacobian


def tiny() -> loops.Model:
    def build() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(9, 5), nn.Tanh(), nn.Linear(5, 10))

    return loops.Model("tiny", build, loops.random_images(1, 3), 8, 8)


def test_the_papers_columns_are_those_of_the_clipped_jacobian() -> None:
    gradients = paper.examples_of(tiny(), 6, "cpu")
    jacobian = ClippedJacobian(gradients, paper.CLIP, 0.1)
    for unit in torch.eye(9):
        direction = unit.expand(6, 9)
        want = jacobian.matvec(direction).square().sum(dim=1)
        torch.testing.assert_close(
            paper.clipped_column_norms(gradients, direction, 0.1), want, rtol=1e-3, atol=1e-7
        )


@pytest.mark.slow
def test_the_command_writes_both_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part that fails is told on the page, and a second run keeps what it is not asked for."""

    def broken(**_: object) -> dict[str, object]:
        raise RuntimeError("no such device")

    for module in (comparison, command):
        monkeypatch.setattr(module, "MODELS", {"tiny": tiny()})
    monkeypatch.setattr(command, "whole_run", broken)
    for section in command.SECTIONS:
        arguments = ["--device", "cpu", "--quick", "--out", str(tmp_path), "--sections", section]
        monkeypatch.setattr(sys, "argv", ["benchmarks", *arguments])
        command.main()
    found = json.loads((tmp_path / "cpu.json").read_text())["models"]["tiny"]
    assert not [row for row in found["rows"].values() if "failed" in row]
    text = (tmp_path / "cpu.md").read_text()
    assert "run: RuntimeError: no such device" in text


@pytest.mark.slow
def test_the_formula_is_within_a_factor_of_two_of_every_measurement() -> None:
    float32, bfloat16 = fitted(measured_in_float32())
    assert 1 < float32.off_by < 2
    assert 1 < bfloat16.off_by < 2
    assert "164 GB" in tables(float32, bfloat16)  # the ledger of a billion examples
