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
from benchmarks import comparison, loops, matched, measuring, paper
from benchmarks.tables import number, page
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


def test_matching_probes_have_the_error_of_fifty_coordinates() -> None:
    """Both by drawing again and again: columns without replacement, and squares of Gaussians for the probes."""
    generator, d, repeats = torch.Generator().manual_seed(0), 200, 20_000
    columns = torch.rand(d, generator=generator, dtype=torch.float64).square()
    r_column, r_three = float(columns.std(correction=0) / columns.mean()), 0.3
    error, probes = matched.matching_probes(r_column, r_three, d)
    chosen = torch.rand(repeats, d, generator=generator).argsort(dim=1)[:, : paper.PAPER_COORDINATES]
    means = columns[chosen].mean(dim=1)
    assert float(means.std() / means.mean()) == pytest.approx(error, rel=0.03)
    spread = r_three * 3**0.5  # of one probe
    drawn = 1 + spread * torch.randn(repeats, probes, generator=generator, dtype=torch.float64)
    assert float(drawn.mean(dim=1).std()) < 1.02 * error < float(drawn[:, 1:].mean(dim=1).std()) * 1.05
    with pytest.raises(ValueError, match="are exact"):
        matched.matching_probes(0.5, 0.1, 50)


def test_the_matched_steps_are_put_together_from_what_was_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 5), nn.Tanh(), nn.Linear(5, 10))

    monkeypatch.setattr(matched, "MODELS", {"tiny": loops.Model("tiny", build, loops.random_images(1, 8), 8, 8)})
    monkeypatch.setattr(matched, "coordinate_cost", lambda *_, **__: {"coordinate_seconds": 0.5})
    (state,) = matched.matched("tiny", "cpu", quick=True)["states"].values()
    assert state["probes"] >= 2
    assert state["paper_seconds"] == pytest.approx(state["opacus_seconds"] + 25)
    assert state["plain_slower"] == pytest.approx(state["paper_seconds"] / state["plain_seconds"])
    assert "matched" in command.SECTIONS
    assert f"({state['probes']})" in page(
        {
            "machine": command.machine("cpu"),
            "quick": True,
            "matched": {"tiny": {"title": "t", "batch": 8, "states": {"s": state}}},
        }
    )


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
