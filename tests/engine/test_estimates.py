"""Estimates at the bound: the low-rank formula against the dense one, its limits, digits, and what a file keeps."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from tests.engine.loops import train
from torchfil import Private
from torchfil.engine.saving.estimates import Beliefs, estimates_at_the_bound
from torchfil.report import Pictures, load

DELTA = 1e-5


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def covariance(law: Beliefs) -> Tensor:
    """S, dense."""
    return law.isotropic * torch.eye(len(law.mean), dtype=torch.float64) + law.factor.T @ law.factor


def dense_posterior(law: Beliefs, estimate: Tensor, variance: Tensor) -> Tensor:
    """m + S(S + V)⁻¹(x̂ − m) from the coordinates of finite variance: the others say nothing."""
    known, dense = variance.isfinite(), covariance(law)
    inner = dense[known][:, known] + variance[known].diag()
    return law.mean + dense[:, known] @ torch.linalg.solve(inner, (estimate - law.mean)[known])


@pytest.mark.parametrize(("n", "d"), [(1, 4), (2, 16), (12, 1), (40, 16), (30, 50)])
def test_the_low_rank_form_is_the_dense_one(n: int, d: int) -> None:
    others = normal(n, d) @ normal(d, d, seed=1) / d**0.5 + normal(d, seed=2)
    law = Beliefs.fitted(others)
    torch.testing.assert_close(law.mean, others.mean(dim=0))
    x, scale = normal(d, seed=3), normal(d, seed=4).exp().square()
    some_infinite = torch.where(torch.arange(d) % 3 == 1, math.inf, scale)
    for variance in (scale, 1e-4 * scale, 1e4 * scale, some_infinite):
        found, want = law.combined_with(x, variance), dense_posterior(law, x, variance)
        assert float((found - want).abs().max()) < 1e-10


@pytest.mark.parametrize(("n", "d"), [(2, 16), (12, 5), (200, 8)])
def test_the_shrinkage_is_that_of_scikit_learn(n: int, d: int) -> None:
    reference = pytest.importorskip("sklearn.covariance")
    others = normal(n, d) * torch.arange(1, d + 1)
    dense = covariance(Beliefs.fitted(others))
    np.testing.assert_allclose(dense, reference.OAS().fit(others.numpy()).covariance_, rtol=1e-10, atol=1e-10)
    assert float(torch.linalg.eigvalsh(dense).min()) > 0, "however few they are"


def test_errors_are_those_of_many_draws() -> None:
    """Unbiased: rms over draws. With beliefs, over people drawn from them, tr((S⁻¹ + V⁻¹)⁻¹)/d; both beside chance."""
    law, variance = Beliefs.fitted(normal(20, 6) * torch.arange(1, 7)), normal(6, seed=1).exp()
    root = torch.linalg.cholesky(covariance(law))
    people = law.mean + normal(1500, 6, seed=2) @ root.T
    noisy = people + normal(1500, 6, seed=3) * variance.sqrt()
    posterior = torch.stack([law.combined_with(each, variance) for each in noisy])
    expected = torch.linalg.inv(torch.linalg.inv(covariance(law)) + (1 / variance).diag()).trace() / 6
    assert float((posterior - people).square().mean()) == pytest.approx(float(expected), rel=0.04)

    drawn = [estimates_at_the_bound(people[0], variance, people[1:9], seed)[0][0] for seed in range(1000)]
    error = float(estimates_at_the_bound(people[0], variance, people[1:9], 0)[1][0])
    assert float((torch.stack(drawn) - people[0]).square().mean().sqrt()) == pytest.approx(error, rel=0.03)


# ------------------------------------------------------------------ in a run file


IMAGES = torch.rand(40, 1, 5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
CLASSES = torch.arange(40) % 3
CLASSES[7] = 3  # the only one of its label


def saved(path: Path, targets: Tensor, images: Tensor = IMAGES, **options: Any) -> tuple[Any, Pictures]:
    module = nn.Sequential(nn.Flatten(), nn.Linear(30, 4 if targets.ndim == 1 else 1)).double()
    loss = nn.functional.cross_entropy if targets.ndim == 1 else nn.functional.mse_loss
    options |= {"module": module, "loss_fn": loss, "max_grad_norm": 0.01}  # all are clipped: few ε need be computed
    engine = train(TensorDataset(images, targets), steps=6, batch_size=20, **options).engine
    run = load(engine.save_run(path, delta=DELTA, pictures=38))
    return run, run.pictures


def as_bytes(values: Tensor, low: float = 0.0, high: float = 1.0) -> np.ndarray:
    return ((values.clamp(low, high) - low) / (high - low) * 255).round().byte().numpy()


@pytest.mark.parametrize("kind", ["labels", "numbers", "diagonal", "signed"])
def test_estimates_go_into_the_file(tmp_path: Path, kind: str) -> None:
    """Others have the label; where it has no others, or the target is a number, they are all."""
    images = 3 * IMAGES - 1 if kind == "signed" else IMAGES
    targets = IMAGES.sum(dim=(1, 2, 3))[:, None] if kind == "numbers" else CLASSES
    tracked = ("diagonal",) if kind == "diagonal" else ()
    run, pictures = saved(tmp_path / "run.parquet", targets, images, track=tracked)
    assert (pictures.estimates.shape[1:], pictures.estimates.dtype) == ((3, 5, 6), np.uint8)
    x = images.flatten(1)
    low, high = (float(x[pictures.rows].min()), float(x[pictures.rows].max())) if kind == "signed" else (0.0, 1.0)
    for place, row in enumerate(pictures.rows.tolist()):
        like = torch.ones(40, dtype=torch.bool) if kind == "numbers" or row == 7 else targets == targets[row]
        like[row] = False
        variance = torch.full((30,), float(run.columns["mse_bound"][row]), dtype=torch.float64)
        if kind == "diagonal":
            variance = torch.from_numpy(run.attributes.error[row].astype(np.float64)).square()
        estimates, errors = estimates_at_the_bound(x[row], variance, x[like], seed=row)
        np.testing.assert_allclose(pictures.errors[place], errors, rtol=1e-5)
        assert np.abs(pictures.estimates[place].astype(int) - as_bytes(estimates.view(3, 5, 6), low, high)).max() <= 1
        np.testing.assert_array_equal(pictures.images[place], as_bytes(images[row, 0], low, high))
    assert pictures.typical == min(3, max(0, len(pictures.rows) - 38))


def test_only_private_pixels_are_estimated(tmp_path: Path) -> None:
    mask = torch.zeros(1, 5, 6, dtype=torch.bool)
    mask[:, :2] = True
    _, pictures = saved(tmp_path / "run.parquet", CLASSES, private=Private(coordinates=mask))
    np.testing.assert_array_equal(pictures.estimates[:, :, 2:], np.repeat(pictures.images[:, None, 2:], 3, axis=1))
    row = int(pictures.rows[0])
    like = (torch.arange(40) != row) & ((CLASSES[row] == CLASSES) | (row == 7))
    blind = (IMAGES[like, 0, :2].mean(dim=0) - IMAGES[row, 0, :2]).square().mean().sqrt()
    assert pictures.errors[0, 2] == pytest.approx(float(blind), rel=1e-5)


@pytest.mark.parametrize("alone", [False, True])
def test_an_image_that_is_public_or_alone_has_no_estimates(tmp_path: Path, alone: bool) -> None:
    private, count = None if alone else Private(inputs=[], target=True), 1 if alone else 40
    _, pictures = saved(tmp_path / "run.parquet", normal(count, 1), IMAGES[:count], private=private)
    assert pictures.estimates is pictures.errors is None
    assert pictures.images.shape[1:] == (5, 6)
