"""The benchmark's parts: what is timed is what it says, failures are told, and the page holds everything."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks import __main__ as command
from benchmarks import comparison, loops, paper, targets, zoo
from benchmarks import many_examples as many
from benchmarks.scale_model import fitted, measured_in_float32, tables
from torchfil import SmoothnessValidator
from torchfil.fisher.operator import ClippedJacobian
from torchfil.report import load


def tiny() -> loops.Model:
    def build() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(9, 5), nn.Tanh(), nn.Linear(5, 10))

    return loops.Model("tiny", build, loops.random_images(1, 3), 8, 8)


def test_the_papers_columns_are_those_of_the_clipped_jacobian() -> None:
    gradients = paper.examples_of(tiny(), 6, "cpu", train_steps=3)
    directions = paper.random_directions(gradients.examples.z, 9, torch.Generator().manual_seed(0))
    assert torch.equal(torch.stack(directions).sum(dim=0), torch.ones(6, 9))  # every coordinate once
    jacobian = ClippedJacobian(gradients, paper.CLIP, 0.1)
    for direction in directions:
        want = jacobian.matvec(direction).square().sum(dim=1)
        torch.testing.assert_close(paper.clipped_column_norms(gradients, direction, 0.1), want, rtol=1e-3, atol=1e-7)


def test_coordinates_and_probes_estimate_the_same() -> None:
    gradients = paper.examples_of(tiny(), 8, "cpu")
    generator = torch.Generator().manual_seed(1)
    columns = paper.column_estimates(gradients, 9, generator)
    drawn = paper.traces(gradients, 3, 133, generator)
    torch.testing.assert_close(drawn.mean(dim=0), columns.mean(dim=0), rtol=0.15, atol=0)


def test_all_methods_see_the_same_batches() -> None:
    ids = []
    for variant in loops.variants("cpu").values():
        loop = loops.Loop(tiny(), variant, "cpu", batches=3)
        ids.append([next(loop.batches)[0].sum().item() for _ in range(3)])
    assert all(one == ids[0] for one in ids)


@pytest.mark.slow
def test_the_command_writes_both_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a tiny model; a part that fails is told on the page, and a second run keeps what it is not asked for."""
    for module in (comparison, command):
        monkeypatch.setattr(module, "MODELS", {"tiny": tiny()})
    arguments = ["benchmarks", "--device", "cpu", "--quick", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", [*arguments, "--sections", "models"])
    command.main()
    found = json.loads((tmp_path / "cpu.json").read_text())
    rows = found["models"]["tiny"]["rows"]
    assert rows[loops.UNIT]["ratio"] == 1
    assert not [row for row in rows.values() if "failed" in row]
    paper_rows = found["models"]["tiny"]["paper"]
    unit = rows[loops.UNIT]["seconds"]
    assert paper_rows["fifty_seconds"] == pytest.approx(unit + 50 * paper_rows["coordinate_seconds"])

    def broken(*_: object, **__: object) -> dict[str, object]:
        raise RuntimeError("no such device")

    monkeypatch.setattr(command, "growth", broken)
    monkeypatch.setattr(sys, "argv", [*arguments, "--sections", "growth"])
    command.main()
    text = (tmp_path / "cpu.md").read_text()
    assert "growth: RuntimeError: no such device" in text
    assert "torchfil train_step, 1 probe" in text
    assert text in capsys.readouterr().out


def test_targets_are_checked_over_seeds(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("sklearn")
    run = targets.kept("digits", 0, "cpu", examples=60, epochs=2, rate=0.5, target_mse_bound=0.1, of="probes")
    assert run["met"] == (run["headroom"] >= 1)
    assert run["noise_multiplier"] in [sigma for sigma, *_ in run["pilots"]]
    assert "seed 0: σ = " in capsys.readouterr().out


def test_a_run_of_many_examples_states_its_bytes(tmp_path: Path) -> None:
    found = many.train_and_save(300, tmp_path / "run.parquet", all_drawn=True)
    assert found["bytes_an_example"] == found["bytes_an_example_drawn"] == 136
    assert len(load(tmp_path / "run.parquet")) == 300


@pytest.mark.slow
def test_every_stage_of_many_examples_runs() -> None:
    found = many.many_examples([300])
    assert list(found["seconds"]) == list(found["peak_gb"]) == list(many.STAGES)
    assert all(0 < gb[0] < 4 for gb in found["peak_gb"].values())


# --- the zoo

IMAGE_NETWORKS: dict[str, Callable[..., nn.Sequential]] = {"small_alexnet": zoo.small_alexnet, "vgg11": zoo.vgg11}


@pytest.mark.parametrize("name", IMAGE_NETWORKS)
@pytest.mark.parametrize(("channels", "size"), [(1, 28), (3, 32), (3, (62, 47)), (3, (64, 64)), (2, 8)])
def test_image_networks_take_every_size(name: str, channels: int, size: int | tuple[int, int]) -> None:
    model = IMAGE_NETWORKS[name](5, channels, size)
    height, width = (size, size) if isinstance(size, int) else size
    assert model(torch.rand(2, channels, height, width)).shape == (2, 5)
    assert SmoothnessValidator.validate(model) == []


def test_the_layers_are_those_of_the_paper() -> None:
    def shapes(model: nn.Module) -> list[tuple[int, ...]]:
        return [tuple(value.shape) for name, value in model.named_parameters() if name.endswith("weight")]

    assert [shape[0] for shape in shapes(zoo.small_alexnet())] == [16, 32, 64, 256, 2]
    assert [shape[0] for shape in shapes(zoo.vgg11())] == [16, 16, 16, 16, 32, 32, 64, 64, 256, 128, 2]
    assert [shape[0] for shape in shapes(zoo.fcnet())] == [32] * 8 + [2]


# --- the cost model


@pytest.mark.slow
def test_the_formula_is_within_a_factor_of_two_of_every_measurement() -> None:
    float32, bfloat16 = fitted(measured_in_float32())
    assert 1 < float32.off_by < 2
    assert 1 < bfloat16.off_by < 2
    rows = tables(float32, bfloat16).splitlines()
    assert len(rows) == 2 + 2 * 3 * 3
    assert {row.count("|") for row in rows} == {10}
