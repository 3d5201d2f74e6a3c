"""The papers' data: exact arrays from small files, published counts from the real ones, stand-ins
of the same shape.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from paper_data import PaperData

from tests.paper_files import IWPC, real_data, write, write_mnist
from torchfil.glm import LinearRegression, SingularHessianError

IWPC_COLUMNS = (
    *("age", "amiodarone", "cyp2c9=12", "cyp2c9=13", "decr", "height"),
    *("race=black", "race=white", "vkorc1=CT", "vkorc1=TT", "weight"),
)
IWPC_INPUTS = np.array(
    [
        [0.5, 0, 0, 0, 0, 2.0, 0, 1, 1, 0, 1.5],
        [-0.5, 0, 1, 0, 1, 0.0, 0, 0, 0, 1, 3.0],
        [0.25, 1, 0, 0, 0, 1.0, 1, 0, 0, 0, -1.0],
        [1.0, 0, 0, 1, 0, -2.0, 0, 1, 0, 1, 0.5],
        [-1.0, 1, 0, 0, 1, 0.5, 0, 0, 1, 0, 0.0],
    ]
)
IWPC_DOSE = np.array([1.1, 0.7, -0.5, -1.25, 0.0])


def read(folder: Path, name: str) -> PaperData:
    data = PaperData(name, folder=folder)
    assert not data.made
    return data


def test_iwpc_entry_by_entry(tmp_path: Path) -> None:
    write(tmp_path / "iwpc" / "iwpc-scaled.csv.gz", IWPC.encode())
    task = read(tmp_path, "iwpc").iwpc(seed=3)
    order = torch.randperm(5, generator=torch.Generator().manual_seed(3)).numpy()
    assert task.columns == IWPC_COLUMNS
    np.testing.assert_array_equal(
        np.concatenate([task.train_inputs, task.test_inputs]), IWPC_INPUTS[order]
    )
    np.testing.assert_array_equal(
        np.concatenate([task.train_targets, task.test_targets]), IWPC_DOSE[order]
    )
    assert len(task.train_targets) == 4
    assert task.levels["vkorc1"] == ("CC", "CT", "TT")
    assert (task.attributes["age"], task.attributes["vkorc1"]) == ((0,), (8, 9))
    assert [task.encode("vkorc1", level).tolist() for level in ("CC", "CT", "TT")] == [
        [0, 0],
        [1, 0],
        [0, 1],
    ]
    assert task.level_numbers("vkorc1", IWPC_INPUTS).tolist() == [1, 2, 0, 2, 1]


@pytest.mark.parametrize("packed", ["", ".gz"])
def test_digits_pixel_by_pixel(tmp_path: Path, packed: str) -> None:
    write_mnist(tmp_path, 12, 3, packed)
    images, labels = read(tmp_path, "mnist").mnist()
    assert labels.tolist() == [*range(10), 0, 1]
    assert images.sum(dim=(1, 3)).nonzero().tolist() == [
        [i, 4 + 2 * label] for i, label in enumerate(labels.tolist())
    ]
    task = read(tmp_path, "mnist").mnist_zero_one(components=None, scaled=False)
    assert task.train_targets.tolist() == [0, 1, 0, 1]
    assert task.test_inputs.shape == (2, 784)
    assert task.train_inputs.max() == 1


def test_iwpc_as_published() -> None:
    """Counts; the columns 11 and 12 that the authors attack.

    Their prior's accuracy 0.367, so the same split.
    """
    task = real_data("iwpc").iwpc()
    assert (task.train_inputs.shape, task.test_inputs.shape) == ((3855, 14), (964, 14))
    assert task.attributes["vkorc1"] == (11, 12)
    shares = np.bincount(task.level_numbers("vkorc1", task.train_inputs)) / 3855
    assert shares.max() == pytest.approx(0.367, abs=5e-4)


def test_adult_as_published() -> None:
    """Counts; the column 24 that the authors attack; numerical columns standardised.

    The constant in the span.
    """
    task = real_data("adult").adult()
    assert (task.train_inputs.shape, task.test_inputs.shape) == ((30162, 86), (15060, 86))
    assert task.attributes["marital-status"] == (24,)
    assert task.train_targets.sum() == 7508
    numerical = [columns[0] for name, columns in task.attributes.items() if name not in task.levels]
    np.testing.assert_allclose(task.train_inputs[:, numerical].mean(axis=0), 0, atol=1e-12)
    np.testing.assert_allclose(task.train_inputs[:, numerical].std(axis=0, ddof=1), 1, atol=1e-12)
    with pytest.raises(SingularHessianError, match="linear combinations"):
        LinearRegression(fit_intercept=True).fit(task.train_inputs, task.train_targets)
