"""The examples of attacks on networks run from end to end on small files."""

from __future__ import annotations

import json
import re
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.cases import DEVICE
from tests.paper_files import idx, write_mnist

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch, settings: str) -> Path:
    """The folder of its results; the example's picture is there."""
    pytest.importorskip("matplotlib")
    monkeypatch.setenv("TORCHFIL_DATA", str(folder))
    monkeypatch.setattr(sys, "argv", [name, "--out", str(folder / "out"), *settings.split()])
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    assert 0 < (folder / "out" / f"{name}.png").stat().st_size < 200_000
    return folder / "out"


def test_informed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """At small noise the error lies at the bound, within four of its standard errors."""
    run("attack_informed", tmp_path, monkeypatch, "--runs 20 --noise 0.01")
    found = re.findall(r"(1|5)  0.01  \S+  \S+ +(\S+) ± (\S+) ", capsys.readouterr().out)
    assert [int(d) for d, _, _ in found] == [1, 5]
    for _, ratio, error in found:
        assert abs(float(ratio) - 1) < 4 * float(error) < 2


def test_membership(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Pixels drawn at random: what the overfitted networks get right, they have memorised."""
    write_mnist(tmp_path, 40, 10)
    pixels = np.random.default_rng(0).integers(256, size=(40, 28, 28), dtype=np.uint8)
    (tmp_path / "MNIST" / "raw" / "train-images-idx3-ubyte").write_bytes(idx(pixels))
    run(
        "attack_membership",
        tmp_path,
        monkeypatch,
        f"--runs 24 --examples 14 --steps 40 --label-noise 0.5 --device {DEVICE}",
    )
    printed = capsys.readouterr().out
    areas = {name: float(area) for name, area in re.findall(r"(\S+, [\w =σ,]+): AUC (\S+) ±", printed)}
    assert len(areas) == 4
    assert min(areas["overfitted, loss threshold"], areas["overfitted, likelihood ratio"]) > 0.8
    wrong, memorised = re.findall(r"(\d+) of 14 labels are wrong; overfitted, (\S+) % of", printed)[0]
    assert 2 < int(wrong) < 12
    assert float(memorised) > 99


@pytest.mark.filterwarnings("ignore:An input array is constant")  # with so few rounds all areas may agree
def test_property(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    ensemble = pytest.importorskip("sklearn.ensemble")
    forest = ensemble.RandomForestClassifier
    monkeypatch.setattr(ensemble, "RandomForestClassifier", lambda trees, **options: forest(trees // 40, **options))
    write_mnist(tmp_path, 80, 10)
    run("attack_property", tmp_path, monkeypatch, f"--rounds 4 --examples 40 --measured 24 --device {DEVICE}")
    printed = capsys.readouterr().out
    assert printed.count("rank correlation over 5 layers") == 4
    assert "sensitivity to the target" in printed


def write_xrays(folder: Path, n: int) -> None:
    (folder / "pneumoniamnist").mkdir()
    images = torch.randint(256, (n, 28, 28), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    np.savez(
        folder / "pneumoniamnist" / "pneumoniamnist.npz",
        train_images=images.numpy(),
        train_labels=np.arange(n)[:, None] % 2,
    )


def test_inversion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torchmetrics")
    write_xrays(tmp_path, 12)
    settings = f"--images 6 --noisy-images 3 --steps 2 --chunk 4 --resamples 5 --seed 5 --device {DEVICE}"
    out = run("attack_inversion", tmp_path, monkeypatch, f"{settings} --networks 2")
    assert "plain, mean SSIM by PLIS: low third" in capsys.readouterr().out
    assert (out / "attack_inversion_plis.png").exists()
    found = json.loads((out / "attack_inversion.json").read_text())
    first, second = found["networks"]
    assert (first["seed"], second["seed"]) == (5, 6)
    assert first["plis"] != second["plis"]
    assert [len(first[arm]["ssim"]) for arm in ("plain", "noisy")] == [6, 3]
    high = [np.mean([one["plain"]["ssim"][i] for i in np.argsort(one["plis"])[-2:]]) for one in (first, second)]
    assert found["summary"]["plain"]["ssim"]["plis"]["high"][0] == pytest.approx(np.mean(high))
    parts = []
    for number in range(2):
        run("attack_inversion", tmp_path, monkeypatch, f"{settings} --skip {number}")
        parts.append(tmp_path / f"{number}.json")
        parts[-1].write_bytes((out / "attack_inversion.json").read_bytes())
    run("attack_inversion", tmp_path, monkeypatch, f"--resamples 5 --join {parts[0]} {parts[1]}")
    joined = json.loads((out / "attack_inversion.json").read_text())
    assert [network["seed"] for network in joined["networks"]] == [5, 6]
    if DEVICE == "cpu":  # sums of a GPU may differ in their last bits, and signs of small numbers with them
        assert joined == found
    with pytest.raises(SystemExit, match=r"networks .5, 5. must differ; set --skip"):
        run("attack_inversion", tmp_path, monkeypatch, f"--join {parts[0]} {parts[0]}")
    parts[1].write_text(json.dumps({**joined, "rows": [0]}))
    with pytest.raises(SystemExit, match="1.json has other settings or x-rays than .*0.json"):
        run("attack_inversion", tmp_path, monkeypatch, f"--join {parts[0]} {parts[1]}")
