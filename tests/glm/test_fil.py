"""Closed forms against finite differences of refits, implicit differentiation and singular
values.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.glm.glm_cases import CASES, D, N, data
from torchfil.glm import Composition, GeneralizedLinearModel, LinearRegression, SoftmaxRegression
from torchfil.glm.fil import largest_eigenvalues
from torchfil.glm.solver import Objective, SoftmaxLoss, minimise


def move(
    model: GeneralizedLinearModel, X: np.ndarray, y: np.ndarray, i: int, z: torch.Tensor
) -> tuple[Any, Any]:
    """The data with example i moved by z = (inputs, target), as tensors.

    A softmax's target within the simplex.
    """
    inputs, targets, _ = model._tensors(X, y, None)
    loss = model._loss()
    shift = loss.basis(z) @ z[D:] if isinstance(loss, SoftmaxLoss) else z[D]
    first = torch.cat([z[:D], torch.zeros(inputs.shape[1] - D, dtype=z.dtype)])
    chosen = torch.arange(len(X)) == i
    return (
        inputs + chosen[:, None] * first,
        targets + (chosen[:, None] * shift if targets.ndim > 1 else chosen * shift),
    )


def objective(
    model: GeneralizedLinearModel, X: torch.Tensor, y: torch.Tensor, weights: np.ndarray
) -> Objective:
    penalised = torch.tensor([1.0] * D + [0.0] * (X.shape[1] - D), dtype=torch.float64)
    return Objective(
        model._loss(), X, y, torch.tensor(weights), model.l2, penalised, model._fit.weights.shape[1]
    )


def coordinates(model: GeneralizedLinearModel) -> int:
    return D + (len(model.classes_) - 1 if isinstance(model, SoftmaxRegression) else 1)


def refitted_jacobian(
    model: GeneralizedLinearModel, X: np.ndarray, y: np.ndarray, weights: np.ndarray, i: int
) -> np.ndarray:
    """∂U*/∂z by central differences of refits, with Richardson's extrapolation, [pK, d + t]."""
    columns = []
    for direction in torch.eye(coordinates(model), dtype=torch.float64):
        slopes = []
        for step in (1e-3, 5e-4):
            ends = [
                minimise(
                    objective(model, *move(model, X, y, i, sign * step * direction), weights),
                    tolerance=1e-13,
                    max_iterations=100,
                )
                for sign in (1, -1)
            ]
            slopes.append((ends[0].weights - ends[1].weights) / (2 * step))
        columns.append(((4 * slopes[1] - slopes[0]) / 3).flatten())
    return torch.stack(columns, dim=1).numpy()


@pytest.fixture(params=list(CASES), scope="module")
def fitted(request: pytest.FixtureRequest) -> Any:
    X, y, weights = data(request.param, weighted=True)
    return CASES[request.param]().set_params(tolerance=1e-13).fit(X, y, weights), X, y, weights


def test_jacobian_is_the_derivative_of_the_refitted_minimiser(fitted: Any) -> None:
    model, X, y, weights = fitted
    want = refitted_jacobian(model, X, y, weights, 7)
    assert (
        np.abs(model.sensitivity(X, y).jacobian(7).numpy() - want).max() < 1e-7 * np.abs(want).max()
    )


def check_every_granularity(
    ask: Any, X: np.ndarray, y: np.ndarray, jacobians: np.ndarray, **options: Any
) -> None:
    """η of examples, attributes and groups, from singular values of ∂U*/∂z / σ, [n, pK, d + t]."""

    def largest(parts: np.ndarray) -> Any:
        return pytest.approx(np.linalg.norm(parts, 2, axis=(1, 2)), rel=1e-9)

    assert ask(X, y, **options) == largest(jacobians)
    frobenius = np.linalg.norm(jacobians, axis=(1, 2)) / np.sqrt(jacobians.shape[2])
    assert ask(X, y, **options, kind="trace") == pytest.approx(frobenius, rel=1e-9)
    sets = {"one": [2], "two": [0, 3], "slice": slice(1, 4)}
    for name, eta in ask(X, y, **options, attributes=sets).items():
        assert eta == largest(jacobians[:, :, sets[name]])
    tangent = np.linalg.svd(np.ones((1, 3)))[2][1:].T  # of the simplex, [3, 2]
    one_hot = ask(X, y, **options, attributes={"race": [0, 1, 2]}, one_hot=True)["race"]
    assert one_hot == largest(jacobians[:, :, :3] @ tangent)
    labels = np.array(["a" if i % 3 else "b" for i in range(N)])
    for label, eta in ask(X, y, **options, groups=labels.tolist()).items():
        together = np.concatenate(list(jacobians[labels == label]), axis=1)
        assert eta == pytest.approx(np.linalg.norm(together, 2), rel=1e-9)


@pytest.mark.parametrize("private_target", [True, False])
def test_fil_against_singular_values(fitted: Any, private_target: bool) -> None:
    model, X, y, _ = fitted
    sensitivity = model.sensitivity(X, y, private_target=private_target)
    jacobians = np.stack([sensitivity.jacobian(i).numpy() for i in range(N)]) / 0.5
    assert jacobians.shape[2] == (coordinates(model) if private_target else D)
    check_every_granularity(model.fil, X, y, jacobians, private_target=private_target, sigma=0.5)


@pytest.mark.parametrize(
    "names",
    [("linear with intercept", "ridge", "pseudo-huber"), ("softmax", "softmax with intercept")],
)
@pytest.mark.parametrize("private_target", [True, False])
def test_compositions_against_stacked_jacobians(
    names: tuple[str, ...], private_target: bool
) -> None:
    X, y, weights = data(names[0], True)
    models = [CASES[name]().fit(X, y, weights if k else None) for k, name in enumerate(names)]
    releases = list(zip(models, (0.5, 0.8, 1.1), strict=False))
    parts = [(m.sensitivity(X, y, private_target=private_target), s) for m, s in releases]
    stacked = np.stack(
        [np.concatenate([part.jacobian(i).numpy() / s for part, s in parts]) for i in range(N)]
    )
    whole, options = Composition(releases), {"private_target": private_target}
    check_every_granularity(whole.fil, X, y, stacked, **options)
    assert np.allclose(
        whole.mse_bound(X, y, **options), 1 / whole.fil(X, y, **options, kind="trace") ** 2
    )


def test_a_softmax_released_by_class_leaks_as_by_margin() -> None:
    """The Gram matrix of ∂W/∂z, W = UBᵀ in all its entries, is that of ∂U/∂z."""
    X, y, _ = data("softmax", False)
    model = SoftmaxRegression(l2=0.03).fit(X, y)
    assert np.allclose(model.coef_.sum(axis=0), 0, atol=1e-12)
    jacobian = model.sensitivity(X, y).jacobian(4)
    basis = SoftmaxLoss(3).basis(jacobian)
    by_class = torch.einsum("ck,akz->acz", basis, jacobian.view(D, 2, -1)).flatten(0, 1)
    assert torch.allclose(by_class.mT @ by_class, jacobian.mT @ jacobian, atol=1e-14)


def test_a_composition_refuses_what_does_not_belong_together() -> None:
    X, y, _ = data("softmax", False)
    softmax, linear = CASES["softmax"]().fit(X, y), CASES["ridge"]().fit(X, y)
    with pytest.raises(ValueError, match="private_target=False"):
        Composition([(softmax, 1.0), (linear, 1.0)]).fil(X, y)
    with pytest.raises(ValueError, match="columns"):
        Composition([(linear, 1.0), (LinearRegression(l2=0.1).fit(X[:, :3], y), 1.0)])


def test_largest_eigenvalues_by_lanczos(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchfil.glm.fil._DENSE_OPERATIONS", 0)
    generator = torch.Generator().manual_seed(0)
    factor = torch.randn(5, 150, 150, generator=generator, dtype=torch.float64)
    matrices = factor @ factor.mT
    assert torch.allclose(
        largest_eigenvalues(matrices), torch.linalg.eigvalsh(matrices)[:, -1], rtol=1e-9
    )
    assert (largest_eigenvalues(torch.zeros(2, 150, 150)) == 0).all()
