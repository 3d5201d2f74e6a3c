"""The benchmark's parts: what is timed is what it says, failures are told, and the page holds everything."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

sys.path.append(str(Path(__file__).parents[1]))
from benchmarks import __main__ as command
from benchmarks import comparison, loops, measuring, paper
from benchmarks.tables import number
from torchfil.fisher.operator import ClippedJacobian


def tiny() -> loops.Model:
    def build() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(9, 5), nn.Tanh(), nn.Linear(5, 10))

    return loops.Model("tiny", build, loops.random_images(1, 3), 8, 8, learnable=True)


def test_the_papers_columns_are_those_of_the_clipped_jacobian() -> None:
    gradients = paper.examples_of(tiny(), 6, "cpu", train_steps=3)
    directions = paper.random_directions(gradients.examples.z, 9, torch.Generator().manual_seed(0))
    assert torch.equal(torch.stack(directions).sum(dim=0), torch.ones(6, 9))  # every coordinate once
    jacobian = ClippedJacobian(gradients, paper.CLIP, 0.1)
    for direction in directions:
        want = jacobian.matvec(direction).square().sum(dim=1)
        torch.testing.assert_close(paper.clipped_column_norms(gradients, direction, 0.1), want, rtol=1e-3, atol=1e-7)


def test_spreads_match_what_they_are_of() -> None:
    found = paper.spreads(tiny(), "cpu", examples=8, coordinates=9, draws=200)
    for count, estimate in found["estimates"].items():
        assert estimate["ratio_of_means"] == pytest.approx(1, abs=0.1), count
        want = (found["coordinate_relative_std"] / estimate["relative_std"]) ** 2
        assert estimate["coordinates"] == pytest.approx(min(max(want, 1), 9))
    assert found["estimates"]["3"]["relative_std"] < found["estimates"]["1"]["relative_std"]


def test_a_call_that_fails_leaves_its_reason_and_the_others_go_on() -> None:
    calls = []

    def breaks() -> None:
        calls.append("breaks")
        if len(calls) > 2:
            raise RuntimeError("out of\nmemory")

    found = measuring.seconds_in_turns({"a": lambda: None, "b": breaks}, "cpu", repeats=3, warm_up=2)
    assert found["b"] == {"failed": "RuntimeError: out of memory"}
    assert 0 <= found["a"]["seconds"] < 0.1
    assert len(calls) == 3


def test_slopes() -> None:
    assert measuring.power([1, 2, 4], [5, 10, 20]) == pytest.approx(1)
    assert measuring.line([2, 4, 8], [7, 11, 19]) == pytest.approx((3, 2))


def test_all_methods_see_the_same_batches() -> None:
    ids = []
    for variant in loops.variants("cpu").values():
        loop = loops.Loop(tiny(), variant, "cpu", batches=3)
        ids.append([next(loop.batches)[0].sum().item() for _ in range(3)])
    assert all(one == ids[0] for one in ids)


def test_numbers_are_short() -> None:
    assert [number(v) for v in (None, 0.01234, 12.34, 1234.5, 1e9)] == ["–", "0.0123", "12.3", "1,234", "1e+09"]


def test_the_command_writes_both_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a tiny model; a part that fails is told on the page, and a second run keeps what it is not asked for."""
    for module in (comparison, command):
        monkeypatch.setattr(module, "MODELS", {"tiny": tiny()})
    arguments = ["benchmarks", "--device", "cpu", "--quick", "--out", str(tmp_path), "--sections"]
    monkeypatch.setattr(sys, "argv", [*arguments, "models"])
    command.main()
    found = json.loads((tmp_path / "cpu.json").read_text())
    rows = found["models"]["tiny"]["rows"]
    assert rows[loops.UNIT]["ratio"] == 1
    assert not [row for row in rows.values() if "failed" in row]
    states = found["models"]["tiny"]["paper"]["states"]
    assert set(states) == {"initial weights", "after 300 plain steps"}
    assert states["initial weights"]["estimates"]["1"]["slower"] > 0

    def broken(*_: object, **__: object) -> dict[str, object]:
        raise RuntimeError("no such device")

    monkeypatch.setattr(command, "growth", broken)
    monkeypatch.setattr(sys, "argv", [*arguments, "growth"])
    command.main()
    text = (tmp_path / "cpu.md").read_text()
    assert "growth: RuntimeError: no such device" in text
    assert "torchfil train_step, 1 probe" in text
    assert text in capsys.readouterr().out
