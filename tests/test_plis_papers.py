"""Figures of the PLIS paper (2022), by the code of the examples; those on images need the data at hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from benchmarks.zoo import mnist_cnn
from tests.paper_files import real_data

pytest.importorskip("matplotlib")
import plis_mnist
import plis_regression

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("seed", [0, 1])
def test_figure_1_fil_and_plis_rank_the_columns_alike(seed: int) -> None:
    """Linear regression at (ε, δ) = (0.2, 1e-3): the same order, the informative columns first."""
    result = plis_regression.experiment(seed)
    assert result.epsilon <= 0.2
    assert result.explained > 0.9
    assert result.end.rank_correlation > 0.9
    assert result.run.rank_correlation > 0.9
    assert result.end.separated
    assert result.run.separated


def test_figure_2_an_x_ray_among_digits_has_a_high_plis() -> None:
    """X-rays stand out, their PLIS averaged over all labels, with and without DP.

    The clipped reading misses them: labelled at random, their gradients are clipped and their slope is gone.
    """
    data = real_data("mnist", "pneumoniamnist")
    (images, labels), (xrays, _) = data.mnist(), data.chest_xrays()
    torch.manual_seed(0)
    rows = torch.randperm(len(images))[:8000]
    images, labels = images[rows], labels[rows]
    digits, targets, strangers = images[:200], labels[:200], xrays[torch.randperm(len(xrays))[:200]]
    plain = plis_mnist.train(mnist_cnn(activation=nn.GELU), images, labels, epochs=2)
    private = plis_mnist.train_privately(mnist_cnn(activation=nn.GELU), images, labels, epochs=2, batch_size=400)
    assert private.epsilon is not None
    assert private.epsilon <= 1
    found = {}
    for name, trained, clipped in (("plain", plain, False), ("private", private, False), ("clipped", private, True)):
        plis = trained.plis(clipped=clipped)
        other = plis_mnist.strangers_scores(plis, strangers, "random" if clipped else "every")[0]
        found[name] = plis_mnist.outlier_auroc(plis.subject(digits, targets), other).value
    print(found)
    assert found["plain"] > 0.9
    assert found["private"] > 0.9
    assert found["clipped"] < 0.5
