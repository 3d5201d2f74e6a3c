"""Stand-ins: the shapes, names and ranges of what they stand in for; always the same; something to learn in each."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.test_datasets import IWPC, write
from torchfil.datasets import SOURCES, Readers, TabularTask, is_at_hand, iwpc, pictures, real_or_stand_in, stand_ins


def nearest_mean(train: tuple[torch.Tensor, torch.Tensor], test: tuple[torch.Tensor, torch.Tensor]) -> float:
    """How often the class of the nearest mean is right."""
    images, labels = train[0].flatten(1), train[1]
    means = torch.stack([images[labels == label].mean(0) for label in labels.unique()])
    return float((torch.cdist(test[0].flatten(1), means).argmin(1) == test[1]).float().mean())


@pytest.mark.parametrize("sklearn", [True, False])
def test_digits(sklearn: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if sklearn:
        pytest.importorskip("sklearn")
    else:
        monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    images, labels = stand_ins.mnist()
    assert images.shape == (1500, 1, 28, 28)
    assert 0 <= images.min() < images.max() <= 1
    assert set(labels.tolist()) == set(range(10))
    assert nearest_mean((images, labels), stand_ins.mnist("test")) > (0.8 if sklearn else 0.4)
    torch.testing.assert_close(stand_ins.mnist()[0], images, rtol=0, atol=0)
    task = stand_ins.mnist_zero_one(components=None, scaled=False)
    assert task.train_inputs.shape[1] == 784
    assert set(task.train_targets) == set(task.test_targets) == {0.0, 1.0}


def test_pictures() -> None:
    images, labels = stand_ins.cifar10()
    assert images.shape == (1200, 3, 32, 32)
    assert 0 <= images.min() < images.max() <= 1
    assert nearest_mean((images, labels), stand_ins.cifar10("test")) > 0.3
    task = stand_ins.cifar_plane_car()
    assert task.train_inputs.shape[1] == task.test_inputs.shape[1] == 20
    assert np.linalg.norm(task.train_inputs, axis=1).max() <= 1
    assert len(task.train_targets) > 200


def test_chests() -> None:
    images, ill = stand_ins.chest_xrays()
    assert images.shape == (800, 1, 28, 28)
    assert 0 <= images.min() < images.max() <= 1
    assert nearest_mean((images, ill), stand_ins.chest_xrays("test")) > 0.6
    mirrored = images.flip(3)
    both = torch.cat([images, mirrored]), torch.arange(2).repeat_interleave(800)
    assert nearest_mean(both, both) > 0.8


def check_task(task: TabularTask) -> None:
    assert np.isfinite(task.train_inputs).all()
    assert task.train_inputs.shape[1] == task.test_inputs.shape[1] == len(task.columns)
    for name in task.levels:
        assert set(task.level_numbers(name, task.train_inputs)) == set(range(len(task.levels[name])))


def test_tables(tmp_path: Path) -> None:
    patients, people = stand_ins.iwpc(), stand_ins.adult()
    check_task(patients)
    check_task(people)
    write(tmp_path / "iwpc" / "iwpc-scaled.csv", IWPC)
    assert set(patients.attributes) == set(iwpc(tmp_path).attributes)
    assert patients.train_inputs.shape == (800, 14)  # as many columns as the real table has
    assert people.levels["marital-status"] == ("unmarried", "married")
    assert 0.2 < people.train_targets.mean() < 0.6
    weights = np.linalg.lstsq(patients.train_inputs, patients.train_targets, rcond=None)[0]
    assert np.var(patients.test_targets - patients.test_inputs @ weights) < 0.7


def test_real_files_count_where_they_are(tmp_path: Path) -> None:
    write(tmp_path / "iwpc" / "iwpc-scaled.csv", IWPC)
    said: list[str] = []
    readers = real_or_stand_in("iwpc", "adult", folder=tmp_path, say=said.append)
    assert isinstance(readers, Readers)
    assert readers.made == {"adult"}
    assert said[0] == f"Data: IWPC (warfarin doses), from {tmp_path}."
    assert said[1].startswith("Data: a stand-in for Adult (UCI): 1,500 people made up by rule. Results will differ")
    assert len(readers.iwpc(seed=1).train_targets) == 4
    assert len(readers.adult().train_targets) == 1000
    assert [name for name in SOURCES if is_at_hand(name, tmp_path)] == ["iwpc"]
    with pytest.raises(ValueError, match="no data set 'imagenet'"):
        is_at_hand("imagenet", tmp_path)


def test_every_reader_has_a_stand_in_and_a_description(tmp_path: Path) -> None:
    readers = real_or_stand_in(*SOURCES, folder=tmp_path, say=lambda line: None)
    assert readers.made == set(SOURCES)
    assert set(stand_ins.DESCRIPTIONS) == set(SOURCES)
    assert readers.chest_xrays is stand_ins.chest_xrays
    assert readers.mnist_zero_one is stand_ins.mnist_zero_one


def test_principal_directions_of_few_rows_are_those_of_the_covariance() -> None:
    """Up to signs."""
    draws = np.random.default_rng(1)
    few = draws.normal(size=(6, 9))
    task = pictures.projected((few, np.zeros(6)), (few[:2], np.zeros(2)), 3, scaled=False)
    centred = few - few.mean(axis=0)
    directions = np.linalg.eigh(centred.T @ centred)[1][:, ::-1][:, :3]
    np.testing.assert_allclose(np.abs(task.train_inputs), np.abs(centred @ directions), atol=1e-12)
    np.testing.assert_allclose(np.abs(task.test_inputs), np.abs(centred[:2] @ directions), atol=1e-12)
