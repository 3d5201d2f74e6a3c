"""What the best attacker can tell of each record: against attackers who try, on made-up and on real patients."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.special import ndtr, ndtri

from torchfil.glm import (
    Absent,
    BestGuess,
    GeneralizedLinearModel,
    Label,
    LinearRegression,
    LogisticRegression,
    NominalAttribute,
    Shift,
    guess,
)
from torchfil.glm.guesses import ask
from torchfil.glm.refits import GLMView, minimiser_changes

SIGMAS = (1e-5, 1e-4, 1e-3, 1e-2)  # of the published attack
COUNTS = {3: (0.29, 0.37, 0.34), 6: (0.75, 0.13, 0.09, 0.01, 0.01, 0.01)}


def patients(n: int) -> tuple[np.ndarray, np.ndarray, dict[str, NominalAttribute]]:
    """Made up, in the shape of the warfarin data: 14 columns, attributes of three and of six levels."""
    rng = np.random.default_rng(0)
    attributes, parts, place = {}, [rng.normal(size=(n, 7))], 7
    for levels, shares in COUNTS.items():
        codes = np.vstack([np.zeros(levels - 1), np.eye(levels - 1)])
        parts.append(codes[rng.choice(levels, size=n, p=shares)])
        attributes[f"of {levels}"] = NominalAttribute(list(range(place, place + levels - 1)), codes)
        place += levels - 1
    X = np.concatenate(parts, axis=1)
    return X, X @ rng.normal(size=X.shape[1]) + rng.normal(size=n), attributes


def attacked(
    model: GeneralizedLinearModel,
    X: np.ndarray,
    y: np.ndarray,
    attribute: NominalAttribute,
    found: BestGuess,
    sigma: float,
) -> tuple[np.ndarray, np.ndarray]:
    """How often the largest posterior is right over 10,000 releases, answers drawn from the prior; and its error, [n].

    Every release w = w_truth + ξ is scored against every answer's refit, log π_b + ⟨w, w_b⟩ − ‖w_b‖²/2.
    """
    view = GLMView.build(model, X, y)
    means = minimiser_changes(view, ask(attribute, view).alternatives).numpy() / sigma  # [n, m, p]
    n, m, p = means.shape
    rng, trials, at_once = np.random.default_rng(1), 10_000, 100
    levels = np.cumsum(found.prior[0])[:-1]
    with np.errstate(divide="ignore"):
        offset = np.log(found.prior[0]) - (means**2).sum(axis=2) / 2  # [n, m]
    by_truth = means @ means.transpose(0, 2, 1) + offset[:, None]  # [n, truth, m]
    right = np.zeros(n)
    for _ in range(trials // at_once):
        truth = np.searchsorted(levels, rng.random((n, at_once)), side="right")
        noise = (means.reshape(n * m, p) @ rng.normal(size=(p, at_once))).reshape(n, m, at_once)
        scores = noise.transpose(0, 2, 1) + by_truth[np.arange(n)[:, None], truth]
        right += (scores.argmax(axis=2) == truth).sum(axis=1)
    share = right / trials
    return share, np.sqrt(np.maximum(share * (1 - share), 1 / trials) / trials)


def check_attacked(X: np.ndarray, y: np.ndarray, attribute: NominalAttribute, sigma: float) -> BestGuess:
    """The prediction for every record against the attacker who tries."""
    model = LinearRegression(l2=1e-2).fit(X, y)
    found = guess(model, X, y, attribute, sigma)
    share, error = attacked(model, X, y, attribute, found, sigma)
    off = (found.accuracy - share) / np.hypot(error, found.accuracy_error)
    prior, predicted, seen = found.prior_accuracy.mean(), found.accuracy.mean(), share.mean()
    print(f"σ = {sigma:g}: prior {prior:.4f}, predicted {predicted:.4f}, attacked {seen:.4f}; z {off.std():.2f}")
    assert np.abs(off).max() < 5
    assert off.std() < 1.15
    return found


@pytest.mark.parametrize("name", ["of 3", "of 6"])
def test_nobody_beats_it_and_the_bayes_attacker_attains_it(name: str) -> None:
    """Made-up patients: 80 of them, 10,000 releases each."""
    X, y, attributes = patients(80)
    found = check_attacked(X, y, attributes[name], 3e-2)
    assert (found.accuracy >= found.prior_accuracy).all()
    assert found.accuracy.mean() > found.prior_accuracy.mean() + 0.05


@pytest.mark.parametrize(
    ("question", "model"),
    [
        (Label(2), LogisticRegression(l2=0.05)),
        (Shift(0.5, column=2), LogisticRegression(l2=0.05)),
        (Absent(), LinearRegression(l2=0.01, fit_intercept=True)),
    ],
)
def test_distances_are_those_of_refits(question, model: GeneralizedLinearModel) -> None:  # type: ignore[no-untyped-def]
    """The one release against the other, by true refits: D, and the true-positive rate of the likelihood ratio."""
    rng = np.random.default_rng(2)
    X = rng.normal(size=(50, 4))
    y = (X[:, 0] + rng.normal(size=50) > 0).astype(float)
    sigma, row = 0.02, 17
    own = model.fit(X, y)._parameters().numpy()
    found = guess(model, X, y, question, sigma)
    changed, targets, keep = X.copy(), y.copy(), np.full(50, True)
    if isinstance(question, Label):
        targets[row] = 1 - y[row]
    elif isinstance(question, Shift):
        changed[row, 2] += 0.5
    else:
        keep[row] = False
    other = type(model)(**model.get_params()).fit(changed[keep], targets[keep])._parameters().numpy()
    distance, answer = np.linalg.norm(own - other) / sigma, 1 - found.truth[row]
    assert found.divergence[row, answer] == pytest.approx(distance**2 / 2, rel=1e-6)
    assert found.divergence[row, found.truth[row]] == 0
    noise = rng.normal(size=(100_000, len(own)))
    ratio = noise @ ((own - other) / sigma)  # of the likelihoods, up to what is constant
    line = np.quantile(ratio - distance**2, 0.95)  # where the other is true
    expected = (ratio > line).mean()
    assert found.true_positive_rate(0.05)[row] == pytest.approx(expected, abs=0.01)
    assert found.true_positive_rate(0.05)[row] == pytest.approx(ndtr(ndtri(0.05) + distance), rel=1e-6)
    even = found.prior[row].tolist() == [0.5, 0.5]
    assert not even or found.accuracy[row] == pytest.approx(ndtr(distance / 2), rel=1e-6)


def test_priors_names_and_the_table() -> None:
    X, y, attributes = patients(200)
    model, attribute = LinearRegression(l2=1e-2).fit(X, y), attributes["of 3"]
    shares = np.bincount(attribute.levels(X)) / 200
    common = guess(model, X, y, attribute, 0.05)
    assert common.prior[7].tolist() == shares.tolist()
    assert common.prior_accuracy.tolist() == [shares.max()] * 200
    uniform = guess(model, X, y, attribute, 0.05, prior="uniform")
    assert uniform.prior_accuracy == pytest.approx(np.full(200, 1 / 3))
    own = np.random.default_rng(0).dirichlet([1, 1, 1], size=200)
    mixed = guess(model, X, y, attribute, 0.05, prior=own)
    rows = [guess(model, X, y, attribute, 0.05, prior=own[k]).accuracy[k] for k in (3, 150)]
    assert mixed.accuracy[[3, 150]] == pytest.approx(rows)
    assert common.answers == ("0, 0", "1, 0", "0, 1")
    assert (common.true_positive_rate(0.01, "1, 0") == common.true_positive_rate(0.01, 1)).all()
    others = np.stack([common.true_positive_rate(0.01, k) for k in range(3)], axis=1)
    assert (common.true_positive_rate(0.01) == others.max(axis=1)).all()
    assert others[np.arange(200), common.truth] == pytest.approx(np.full(200, 0.01))
    columns = common.table()
    assert list(columns) == ["prior_accuracy", "accuracy", "divergence", "true_positive_rate"]
    assert (columns["divergence"] == common.divergence.max(axis=1)).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sigma": 0.0}, "sigma=0.0 must be positive"),
        ({"prior": [0.5, 0.5]}, r"prior has shape \[2\]; it must be \[3\]"),
        ({"prior": [0.5, 0.5, 0.5]}, "must be numbers ≥ 0 that sum to 1"),
        ({"question": Label(2)}, "answers of Label"),
        ({"question": NominalAttribute([7], np.array([[0.0], [2.0]]))}, "answers of Nominal"),
    ],
)
def test_refusals(options: dict, message: str) -> None:  # type: ignore[type-arg]
    X, y, attributes = patients(60)
    model = LinearRegression(l2=1e-2).fit(X, y)
    with pytest.raises(ValueError, match=message):
        guess(model, X, y, **{"question": attributes["of 3"], "sigma": 1.0, **options})
