"""Examples run from end to end: every one without any data, some on small files with what they print looked at."""

from __future__ import annotations

import json
import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from paper_data import SOURCES

from tests.paper_files import few_made_up, write_mnist, write_tables

EXAMPLES = Path(__file__).parents[1] / "examples"
HELPERS = {"paper_data", "networks"}

# how each runs in a second or two; {out} is a folder
QUICK = {
    "attack_glm_attributes": "--out {out} --rounds 1 --trials 3",
    "attack_glm_reconstruction": "--out {out} --trials 20 --device cpu",
    "attack_informed": "--out {out} --runs 4 --noise 0.01",
    "attack_inversion": "--out {out} --images 6 --noisy-images 3 --steps 2 --chunk 4 --resamples 5",
    "attack_membership": "--out {out} --runs 24 --examples 12 --steps 2",
    "attack_property": "--out {out} --rounds 4 --examples 40 --measured 24",
    "digits_leakage": "--epochs 1",
    "digits_one_step": "",
    "equalise_adult": "--out {out} --steps 4 --examples 80 --rounds 1 --only sex",
    "equalise_cifar10": "--examples 20 --test-examples 20 --steps 1 --rounds 1",
    "glm_iwpc": "--out {out} --rounds 1",
    "glm_table1": "--out {out}",
    "huggingface_leakage": "--epochs 1 --examples 40",
    "layer_sensitivity": "--out {out}",
    "lightning_leakage": "--epochs 1",
    "mnist_dpsgd": "--out {out} --device cpu --batch 20 --steps 3 --looks 2 --amplifications poisson",
    "plis_mnist": "--out {out}",
    "plis_regression": "--out {out} --seeds 1",
    "plis_xrays": "--out {out}",
    "questions_iwpc": "--out {out} --steps 6 --rate 0.5",
    "text_leakage": "--out {out} --notes 40 --epochs 1 --batch 12",
}
SLOW = {"attack_glm_reconstruction", "glm_table1", "plis_mnist"}  # they draw many pictures
SLOW |= {"attack_membership", "attack_property", "layer_sensitivity", "text_leakage"}  # they train many models
SLOW |= {"plis_regression", "plis_xrays", "attack_glm_attributes", "questions_iwpc"}  # below on tables, in part
NEEDS = {"attack_inversion": "torchmetrics", "huggingface_leakage": "transformers", "lightning_leakage": "lightning"}


Start = Callable[[str, str], tuple[dict[str, Any], str]]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Start:
    """Runs an example with these settings on the data in the folder, and gives its names and what it prints."""

    def run(name: str, settings: str) -> tuple[dict[str, Any], str]:
        for package in ("matplotlib", "pandas", NEEDS.get(name, "sklearn")):
            pytest.importorskip(package)
        monkeypatch.setenv("TORCHFIL_DATA", str(tmp_path))
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", [name, *settings.format(out=tmp_path / "out").split()])
        names = runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        return names, capsys.readouterr().out

    return run


def test_every_example_is_in_the_list_and_in_the_readme() -> None:
    names = {path.stem for path in EXAMPLES.glob("*.py")} - HELPERS
    assert set(QUICK) == names
    readme = (EXAMPLES / "README.md").read_text()
    assert {name for name in names if f"[{name}]({name}.py)" not in readme} == set()
    for link in re.findall(r"\]\((\.\./[^)]*)\)", readme):
        assert (EXAMPLES / link).is_file(), link
    for name, origin in SOURCES.items():
        assert f"| `{name}` | [" in readme
        assert f"]({origin.page})" in readme


@pytest.mark.filterwarnings("ignore:An input array is constant")  # so few rounds
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.UndefinedMetricWarning")
@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in QUICK])
def test_every_example_runs_without_data(name: str, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """In an empty folder, without files: the first line says which data it is."""
    few_made_up(monkeypatch, digits=120, chests=40, stripes=80)
    first = start(name, QUICK[name])[1].splitlines()[0]
    assert first.startswith("Data: ")
    assert "stand-in for" in first or "nothing is downloaded" in first


@pytest.mark.parametrize(
    ("name", "settings", "printed"),
    [
        ("attack_glm_attributes", "--rounds 1 --trials 5 --logistic", "white-box    1e-05: 1.000"),
        # 40 runs do not show one wrong answer in a thousand
        ("questions_iwpc", "--steps 6 --rate 0.5 --attacked 1 --runs 40", "not testable"),
    ],
)
def test_on_tables(name: str, settings: str, printed: str, start: Start, tmp_path: Path) -> None:
    write_tables(tmp_path)
    assert printed in start(name, f"--out {{out}} {settings}")[1]
    assert {path.name for path in (tmp_path / "out").glob("*.png")} == {f"{name}.png"}


def test_private_training_on_digits(start: Start, tmp_path: Path) -> None:
    """Both accountings follow the same run, and the exact factors never bound less than Theorem 4."""
    write_mnist(tmp_path, 120, 40)
    settings = "--out {out} --device cpu --batch 30 --steps 8 --looks 3 --lr 0.5 --noise-multiplier 1 --ema 0.5"
    start("mnist_dpsgd", settings)
    exact, theorem4 = json.loads((tmp_path / "out" / "mnist_dpsgd.json").read_text())["runs"]
    assert exact["curve"]["step"] == [1, 4, 8]
    assert exact["curve"]["accuracy"] == theorem4["curve"]["accuracy"]
    assert all(a > b for a, b in zip(exact["curve"]["smallest"], theorem4["curve"]["smallest"], strict=True))
    assert exact["curve"]["smallest"] == sorted(exact["curve"]["smallest"], reverse=True)
    ends = [exact["result"][f"smallest_95_{kind}"] for kind in ("every", "each", "together")]
    assert ends == sorted(ends)
    assert 0 < ends[0] < ends[-1] < exact["result"]["smallest"]
    assert exact["result"]["epsilon"] == theorem4["result"]["epsilon"]


def test_inversions_of_several_networks_are_joined(start: Start, tmp_path: Path) -> None:
    """What two calls attacked through one network each, with the statistics over both."""
    found, parts = tmp_path / "out" / "attack_inversion.json", [tmp_path / f"{number}.json" for number in range(2)]
    settings = "--out {out} --images 6 --noisy-images 3 --steps 2 --chunk 4 --resamples 5 --seed 5 --device cpu"
    for number, part in enumerate(parts):
        start("attack_inversion", f"{settings} --skip {number}")
        part.write_bytes(found.read_bytes())
    join = "--out {out} --resamples 5 --join"
    start("attack_inversion", f"{join} {parts[0]} {parts[1]}")
    joined = json.loads(found.read_text())
    first, second = joined["networks"]
    assert (first["seed"], second["seed"]) == (5, 6)
    high = [np.mean([one["plain"]["ssim"][i] for i in np.argsort(one["plis"])[-2:]]) for one in (first, second)]
    assert joined["summary"]["plain"]["ssim"]["plis"]["high"][0] == pytest.approx(np.mean(high))
    with pytest.raises(SystemExit, match="must differ"):
        start("attack_inversion", f"{join} {parts[0]} {parts[0]}")
