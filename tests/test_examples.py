"""Examples run from end to end: every one without any data, some on small files with what they print looked at."""

from __future__ import annotations

import json
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

from tests.test_datasets import IWPC, idx, write, write_adult
from torchfil.datasets import SOURCES, stand_ins
from torchfil.fisher.results import Estimate

EXAMPLES = Path(__file__).parents[1] / "examples"

# how each runs in a second or two; {out} is a folder
QUICK = {
    "attack_glm_attributes": "--out {out} --rounds 1 --trials 3",
    "attack_glm_reconstruction": "--out {out} --trials 20 --sample 2 --sample-trials 200 --device cpu",
    "attack_informed": "--out {out} --runs 20 --noise 0.01",
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
SLOW |= {"plis_regression", "plis_xrays"}
NEEDS = {"attack_inversion": "torchmetrics", "huggingface_leakage": "transformers", "lightning_leakage": "lightning"}


def test_every_example_is_in_the_list_and_in_the_readme() -> None:
    names = {path.stem for path in EXAMPLES.glob("*.py")}
    assert set(QUICK) == names
    readme = (EXAMPLES / "README.md").read_text()
    assert {name for name in names if f"[{name}]({name}.py)" not in readme} == set()
    for link in re.findall(r"\]\((\.\./[^)]*)\)", readme):
        assert (EXAMPLES / link).is_file(), link
    for name, origin in SOURCES.items():
        assert f"| `{name}` | [" in readme
        assert f"]({origin.page})" in readme


@pytest.fixture
def few_made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins of few rows, forests of few trees: what is learned is not looked at here."""
    ensemble = pytest.importorskip("sklearn.ensemble")
    forest = ensemble.RandomForestClassifier
    monkeypatch.setattr(ensemble, "RandomForestClassifier", lambda trees, **options: forest(trees // 40, **options))
    for name, count in (("mnist", 120), ("chest_xrays", 40), ("cifar10", 80)):
        whole = getattr(stand_ins, name)
        monkeypatch.setattr(stand_ins, name, lambda *args, w=whole, n=count: tuple(part[:n] for part in w(*args)))


@pytest.mark.filterwarnings("ignore:An input array is constant")  # so few rounds
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.UndefinedMetricWarning")
@pytest.mark.usefixtures("few_made_up")
@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in QUICK])
def test_every_example_runs_without_data(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In an empty folder, without files: the first line says which data it is."""
    for package in ("matplotlib", "pandas", NEEDS.get(name, "sklearn")):
        pytest.importorskip(package)
    (tmp_path / "empty").mkdir()
    monkeypatch.setenv("TORCHFIL_DATA", str(tmp_path / "empty"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setattr(sys, "argv", [name, *QUICK[name].format(out=tmp_path / "out").split()])
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith("Data: ")
    assert "stand-in for" in first or "nothing is downloaded" in first


def test_attribute_leakage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    write(tmp_path / "iwpc" / "iwpc-scaled.csv", IWPC)
    write_adult(tmp_path)
    monkeypatch.setenv("TORCHFIL_DATA", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["glm_iwpc.py", "--out", str(tmp_path / "out"), "--rounds", "2"])
    runpy.run_path(str(EXAMPLES / "glm_iwpc.py"), run_name="__main__")
    assert "IWPC linear" in capsys.readouterr().out
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"glm_figure6a.png", "glm_figure7.png"}


def test_attribute_inversion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    write(tmp_path / "iwpc" / "iwpc-scaled.csv", IWPC)
    write_adult(tmp_path)
    monkeypatch.setenv("TORCHFIL_DATA", str(tmp_path))
    out = tmp_path / "out"
    monkeypatch.setattr(sys, "argv", ["attack", "--out", str(out), "--rounds", "1", "--trials", "5", "--logistic"])
    runpy.run_path(str(EXAMPLES / "attack_glm_attributes.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert "white-box    1e-05: 1.000" in printed
    assert printed.count("  1 rounds  ") == 3  # deciles of all three models
    assert (out / "attack_glm_attributes.png").exists()


def test_reconstruction_of_digits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    write_mnist(tmp_path, 200, 40)
    monkeypatch.setenv("TORCHFIL_DATA", str(tmp_path))
    out = tmp_path / "out"
    settings = "--trials 20 --digits 150 --sample 2 --sample-trials 40 --device cpu"
    monkeypatch.setattr(sys, "argv", ["attack", "--out", str(out), *settings.split()])
    runpy.run_path(str(EXAMPLES / "attack_glm_reconstruction.py"), run_name="__main__")
    printed = capsys.readouterr().out
    for label in ("known", "unknown"):
        assert f"label {label}, pixels kept in [0, 1]: 20 releases" in printed
        assert f"label {label}, 2 digits, 40 releases" in printed
    names = {f"attack_glm_reconstruction_{part}.png" for part in ("known", "unknown", "bias", "digits")}
    assert {path.name for path in out.iterdir()} == names


def write_mnist(folder: Path, train: int, test: int) -> None:
    """Digits that can be learned: a bright row for each label."""
    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for name, count in (("train", train), ("t10k", test)):
        labels = torch.arange(count, dtype=torch.uint8) % 10
        images = torch.zeros(count, 28, 28, dtype=torch.uint8)
        images[torch.arange(count), 4 + 2 * labels.long()] = 255
        (raw / f"{name}-images-idx3-ubyte").write_bytes(idx(images.numpy()))
        (raw / f"{name}-labels-idx1-ubyte").write_bytes(idx(labels.numpy()))


def test_private_training_on_digits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both accountings follow the same run, and the exact factors never bound less than Theorem 4."""
    pytest.importorskip("matplotlib")
    write_mnist(tmp_path, 120, 40)
    monkeypatch.setenv("TORCHFIL_DATA", str(tmp_path))
    settings = "--device cpu --batch 30 --steps 8 --looks 3 --lr 0.5 --noise-multiplier 1 --ema 0.5"
    monkeypatch.setattr(sys, "argv", ["mnist_dpsgd.py", "--out", str(tmp_path / "out"), *settings.split()])
    runpy.run_path(str(EXAMPLES / "mnist_dpsgd.py"), run_name="__main__")
    found = json.loads((tmp_path / "out" / "mnist_dpsgd.json").read_text())
    exact, theorem4 = found["runs"]
    assert exact["curve"]["step"] == [1, 4, 8]
    assert exact["curve"]["accuracy"] == theorem4["curve"]["accuracy"]
    assert all(a > b for a, b in zip(exact["curve"]["smallest"], theorem4["curve"]["smallest"], strict=True))
    assert exact["curve"]["smallest"] == sorted(exact["curve"]["smallest"], reverse=True)
    ends = [exact["result"][f"smallest_95_{kind}"] for kind in ("every", "each", "together")]
    assert ends == sorted(ends)
    assert 0 < ends[0] < ends[-1] < exact["result"]["smallest"]
    assert exact["result"]["epsilon"] == theorem4["result"]["epsilon"]
    assert 0 < (tmp_path / "out" / "mnist_dpsgd.png").stat().st_size < 200_000


def test_two_rounds_on_digits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second round's weights come from the first, and ε is that of both."""
    write_mnist(tmp_path, 120, 40)
    monkeypatch.setenv("TORCHFIL_DATA", str(tmp_path))
    settings = "--device cpu --batch 30 --steps 4 --looks 1 --noise-multiplier 1 --two-rounds --target 1e4 --seed 3"
    monkeypatch.setattr(sys, "argv", ["mnist_dpsgd.py", "--out", str(tmp_path / "out"), *settings.split()])
    with pytest.warns(UserWarning, match="held fixed"):
        runpy.run_path(str(EXAMPLES / "mnist_dpsgd.py"), run_name="__main__")
    first, second = (run["result"] for run in json.loads((tmp_path / "out" / "mnist_dpsgd.json").read_text())["runs"])
    assert first["down_weighted"] == 0 < second["down_weighted"]
    assert first["epsilon"] == second["epsilon"] < second["epsilon_of_all_rounds"]
    told = capsys.readouterr().out
    assert f"{second['down_weighted']} down-weighted" in told
    assert f"ε of all rounds together: {second['epsilon_of_all_rounds']:.2f}" in told


def test_questions_about_patients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    write(tmp_path / "iwpc" / "iwpc-scaled.csv", IWPC)
    monkeypatch.setenv("TORCHFIL_DATA", str(tmp_path))
    settings = "--steps 6 --rate 0.5 --attacked 1 --runs 40"
    monkeypatch.setattr(sys, "argv", ["questions", "--out", str(tmp_path / "out"), *settings.split()])
    runpy.run_path(str(EXAMPLES / "questions_iwpc.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert "right at most, if wrong 1 % of the time" in printed
    assert "not testable" in printed  # 40 runs do not show one wrong answer in a thousand
    assert (tmp_path / "out" / "questions_iwpc.png").exists()


@pytest.mark.parametrize(
    "goals", [("sex",), pytest.param(("sex", "race", "question"), marks=pytest.mark.slow)], ids=["one", "all"]
)
def test_equal_leakage_of_made_up_people(
    goals: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without files --quick makes records up; every goal leaves its rounds and numbers."""
    monkeypatch.setenv("TORCHFIL_DATA", str(tmp_path / "nothing"))
    settings = "--quick --steps 8 --examples 120 --rounds 2" + (" --only sex" if len(goals) == 1 else "")
    monkeypatch.setattr(sys, "argv", ["equalise_adult.py", "--out", str(tmp_path / "out"), *settings.split()])
    runpy.run_path(str(EXAMPLES / "equalise_adult.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert printed.count("held fixed in these bounds") == len(goals)
    found = json.loads((tmp_path / "out" / "equalise_adult.json").read_text())
    assert set(found) == {"plain", *goals}
    assert found["sex"]["rounds"] <= 2
    assert found["plain"]["sex_ratio"] >= 1


def test_leakage_by_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("pandas")
    settings = "--notes 60 --epochs 1 --batch 12"
    monkeypatch.setattr(sys, "argv", ["text_leakage.py", "--out", str(tmp_path / "out"), *settings.split()])
    names = runpy.run_path(str(EXAMPLES / "text_leakage.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert printed.count("η̄ = ") == 8
    assert "Words by their mean η" in printed
    assert (tmp_path / "out" / "index.html").exists()

    # a block's η from its coordinates': the mean square, and no error that coordinates could not add up to
    class Engine:
        def get_attribute_fil(self) -> Estimate:
            value = torch.tensor([3.0, 4.0]).repeat(1, names["WIDTH"])
            return Estimate(value, torch.full_like(value, 0.1), "estimate")

    eta, error = names["leakage_by_word"](Engine())
    torch.testing.assert_close(eta, torch.full((1, 2), 12.5**0.5))
    torch.testing.assert_close(error, torch.full((1, 2), 0.1 * 3.5 / 12.5**0.5))
