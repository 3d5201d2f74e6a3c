"""Every example runs from end to end without any data."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

from tests.paper_files import few_made_up

EXAMPLES = Path(__file__).parents[1] / "examples"
HELPERS = {"paper_data", "networks"}

# how each runs in a second or two; {out} is a folder
QUICK = {
    "attack_glm_attributes": "--out {out} --rounds 1 --trials 3",
    "attack_glm_reconstruction": "--out {out} --trials 20 --device cpu",
    "attack_informed": "--out {out} --runs 2 --noise 0.01",
    "attack_inversion": "--out {out} --images 6 --noisy-images 3 --steps 2 --chunk 4 --resamples 5",
    "attack_membership": "--out {out} --runs 24 --examples 12 --steps 2",
    "attack_property": "--out {out} --rounds 4 --examples 40 --measured 24",
    "digits_leakage": "--epochs 1",
    "digits_one_step": "",
    "equalise_adult": "--out {out} --steps 4 --examples 80 --rounds 1",
    "equalise_cifar10": "--examples 20 --test-examples 20 --steps 1 --rounds 1",
    "glm_iwpc": "--out {out} --rounds 1",
    "glm_table1": "--out {out}",
    "huggingface_leakage": "--epochs 1 --examples 40",
    "layer_sensitivity": "--out {out}",
    "lightning_leakage": "--epochs 1",
    "mnist_dpsgd": "--out {out} --device cpu --batch 20 --steps 3 --looks 2 --amplifications "
    "poisson",
    "plis_mnist": "--out {out}",
    "plis_regression": "--out {out} --seeds 1",
    "plis_xrays": "--out {out}",
    "questions_iwpc": "--out {out} --steps 6 --rate 0.5",
    "text_leakage": "--out {out} --notes 40 --epochs 1 --batch 12",
}
SLOW = {"attack_glm_reconstruction", "glm_table1", "plis_mnist"}  # they draw many pictures
# they train many models
SLOW |= {"attack_membership", "attack_property", "layer_sensitivity", "text_leakage"}
SLOW |= {"plis_regression", "plis_xrays", "attack_glm_attributes", "questions_iwpc"}
NEEDS = {
    "attack_inversion": "torchmetrics",
    "huggingface_leakage": "transformers",
    "lightning_leakage": "lightning",
}


@pytest.mark.filterwarnings("ignore:An input array is constant")  # so few rounds
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.UndefinedMetricWarning")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(path.stem, marks=[pytest.mark.slow] * (path.stem in SLOW))
        for path in sorted(EXAMPLES.glob("*.py"))
        if path.stem not in HELPERS
    ],
)
def test_every_example_runs_without_data(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In an empty folder, without files: the first line says which data it is."""
    for package in ("matplotlib", "pandas", NEEDS.get(name, "sklearn")):
        pytest.importorskip(package)
    few_made_up(monkeypatch, digits=120, chests=40, stripes=80)
    monkeypatch.setenv("TORCHFIL_DATA", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [name, *QUICK[name].format(out=tmp_path / "out").split()])
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith("Data: ")
    assert "stand-in for" in first or "nothing is downloaded" in first
