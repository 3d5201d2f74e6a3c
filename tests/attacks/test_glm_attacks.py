"""Attacks on linear models, on cases whose answer is known."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.cases import DEVICE
from tests.glm.glm_cases import CODES, COLUMNS, table
from tests.glm.glm_cases import EXACT_MODELS as MODELS
from tests.glm.test_refits import refit
from tests.refused import all_refused
from torchfil import bounds
from torchfil.attacks import GLMReconstruction, NominalAttribute, WhiteBoxInversion, prior_inversion
from torchfil.glm import SoftmaxRegression

ATTRIBUTE = NominalAttribute(COLUMNS, CODES)


def normal(*shape: int, seed: int) -> torch.Tensor:
    """As the attacks draw it."""
    return torch.randn(
        shape,
        generator=torch.Generator(DEVICE).manual_seed(seed),
        dtype=torch.float64,
        device=DEVICE,
    )


@pytest.mark.parametrize("name", ["linear", "logistic with intercept"])
def test_white_box_is_the_closest_refit(name: str) -> None:
    """Without noise always right; with it, the guess of a search over true refits.

    With much, no better than chance.
    """
    X, y, levels = table(name)
    model = MODELS[name]().fit(X, y)
    attack = WhiteBoxInversion(model, X, y, ATTRIBUTE)
    assert attack.run(0.0, 1).achieved.min() == 1
    sigma, trials = 0.05, 4
    result = attack.run(sigma, trials, seed=9)
    assert 0.4 < result.achieved.mean() < 1
    noise = sigma * normal(trials, len(attack.weights), seed=9)
    for i in range(0, len(y), 10):
        refits = [refit(name, X, y, np.ones(len(y)), i, "attribute", code) for code in range(3)]
        for trial in range(trials):
            released = model._fit.weights[:, 0] + noise[trial]
            closest = int(np.argmin([float((released - refit).norm()) for refit in refits]))
            assert result.guesses[i, trial] == closest
    assert abs(attack.run(1e6, 400, seed=1).achieved.mean() - 1 / 3) < 0.1
    assert prior_inversion(X, ATTRIBUTE).achieved.mean() == np.bincount(levels).max() / len(y)


@pytest.mark.parametrize("value_range", [None, (-3.0, 3.0)])
def test_errors_are_those_of_the_guesses(value_range: tuple[float, float] | None) -> None:
    """Without noise the example comes out.

    With noise, mean, spread and bias are those of the single guesses.
    """
    name, sigma, trials, rows = "logistic with intercept", 1e-3, 20, [3, 40, 11]
    X, y, _ = table(name)
    model = MODELS[name]().fit(X, y, sample_weight=np.linspace(0.5, 2, len(y)))
    attack = GLMReconstruction(model, X, y, value_range=value_range)
    exact = attack.guesses(attack.view.weights[None], range(len(y)))[:, 0].cpu().numpy()
    assert np.allclose(exact, X if value_range is None else X.clip(*value_range), atol=1e-6)

    result = attack.run(sigma, trials, rows=rows, seed=2)
    releases = attack.view.weights + sigma * normal(trials, 6, seed=2)
    guesses = attack.guesses(releases, rows).cpu().numpy()
    errors = np.square(guesses - X[rows][:, None]).mean(axis=2)  # [3, trials]
    assert result.ids == rows
    assert np.allclose(result.achieved, errors.mean(axis=1))
    assert np.allclose(result.standard_error, errors.std(axis=1, ddof=1) / trials**0.5)
    assert np.allclose(result.guesses, guesses.mean(axis=1))


def test_small_noise_reaches_the_information() -> None:
    """The guess errs by the inputs' part of I⁻¹, target unknown, the least that an unbiased
    attacker can.
    """
    name, sigma = "logistic with intercept", 1e-6
    X, y, _ = table(name)
    model = MODELS[name]().fit(X, y)
    result = GLMReconstruction(model, X, y).run(sigma, 2000, seed=0)
    fim = model.sensitivity(X, y).gram(slice(None)) / sigma**2
    least = torch.linalg.inv(fim).diagonal(dim1=1, dim2=2)[:, :-1].mean(dim=1).cpu().numpy()
    assert (abs(result.achieved - least) < 4.5 * result.standard_error + 0.01 * least).mean() > 0.9
    # the examples share the releases' luck
    assert abs(np.median(result.achieved / least) - 1) < 0.05
    known = bounds.mse_from_fim(
        model.sensitivity(X, y, private_target=False).gram(slice(None)) / sigma**2
    )
    assert (least > known.cpu().numpy()).all()
    assert np.median(result.squared_bias / least) < 0.01


def test_what_cannot_be_attacked_is_refused() -> None:
    X, y, levels = table("linear")
    model = MODELS["linear"]().fit(X, y)
    weighted = MODELS["ridge with intercept"]().fit(
        X, y, sample_weight=(np.arange(len(y)) > 0).astype(float)
    )
    refused = {
        "intercept": lambda: GLMReconstruction(model, X, y),
        "weight 0": lambda: GLMReconstruction(weighted, X, y),
        "margins": lambda: WhiteBoxInversion(
            SoftmaxRegression(l2=0.1).fit(X, levels), X, levels, ATTRIBUTE
        ),
        "rows .* hold none of the answers": lambda: WhiteBoxInversion(
            model, X, y, NominalAttribute([0], CODES[:, :1])
        ),
    }
    all_refused(refused)
