"""What is advised was tried: runs of several kinds are trained again as advised, and the gate finds
what was promised.

What each case promises was written before the margin was chosen, and the margin was chosen on other
networks, data and seeds than these. Those that asked for more than five times the noise, or for
another number of steps, which is not predicted, are gone.
"""

from __future__ import annotations

import dataclasses
import math
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
from opacus.accountants import RDPAccountant
from scipy.stats import binom
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.report.run_cases import ABOVE, AUDIT, REFUTED, made_up, worrying
from torchfil import FILPrivacyEngine
from torchfil.fisher.amplification import poisson_amplification
from torchfil.fisher.mechanism import step_divergence
from torchfil.gate.gate import check, outcome
from torchfil.gate.policy import Policy
from torchfil.glm import Absent as AbsentRow
from torchfil.glm import LinearRegression
from torchfil.questions import Absent, Change
from torchfil.report.options import MARGIN, Options, epsilon_of, options_of, with_noise
from torchfil.run.baselines import error_ratios, is_told
from torchfil.run.file import load
from torchfil.run.linear_run import linear_run
from torchfil.run.saved_run import Baselines, QuestionRecord, SavedRun, Spread

DELTA = 1e-4
Train = Callable[[float, int, int, Path], SavedRun]


# ---------------------------------------------------------------------- what is advised comes true


def patients(n: int, d: int, seed: int) -> tuple[Tensor, Tensor]:
    """Rows of which some lie far out, with a label of two kinds."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, d, generator=generator)
    x[: n // 25] *= 2.5
    score = x @ torch.randn(d, generator=generator) + torch.randn(n, generator=generator)
    return x, (score > 0).long()


def digits(n: int) -> tuple[Tensor, Tensor]:
    from sklearn.datasets import load_digits

    found = load_digits()
    pictures = torch.tensor(found.images[:n], dtype=torch.float32)[:, None] / 16
    return pictures, torch.tensor(found.target[:n])


def logistic() -> nn.Module:
    return nn.Linear(6, 2)


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2))


def convolutional() -> nn.Module:
    first = nn.Conv2d(1, 4, 3, padding=1)
    return nn.Sequential(first, nn.Tanh(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(64, 10))


def network(
    data: tuple[Tensor, Tensor], module: Callable[[], nn.Module], lr: float = 0.2, **options: Any
) -> Train:
    """Trains it privately, with new weights, draws and noise for every seed, and saves the run."""

    def train(sigma: float, steps: int, seed: int, folder: Path) -> SavedRun:
        torch.manual_seed(seed)
        own, engine = module(), FILPrivacyEngine(noise_seed=seed)
        shuffled = torch.Generator().manual_seed(seed)
        plain = DataLoader(TensorDataset(*data), batch_size=50, shuffle=True, generator=shuffled)
        given = {"noise_multiplier": sigma, "max_grad_norm": 1.0, **options}
        # individual ε, of which no case asks, takes longest
        nobodys = SimpleNamespace(value=torch.zeros(len(data[0])))
        with (
            warnings.catch_warnings(),
            mock.patch("torchfil.engine.reading.epsilons", return_value=nobodys),
        ):
            warnings.simplefilter("ignore")
            *_, loader = engine.make_private(
                own,
                torch.optim.SGD(own.parameters(), lr=lr),
                plain,
                criterion=nn.CrossEntropyLoss(),
                **given,
            )
            batches = (each for _ in range(steps) for each in loader)
            for _ in range(steps):
                engine.train_step(*next(batches))
            path = folder / f"{seed}.parquet"
            return load(engine.save_run(path, delta=DELTA, records=False, hash_data=False))

    return train


class Case(NamedTuple):
    """A run, and a rule that it breaks: a least share's limit is a multiple of what was found."""

    train: Train
    sigma: float
    steps: int
    seed: int
    rule: str
    limit: float


BRIGHTER = {"member": Absent(), "brighter": Change(lambda x, y: (x * 1.5, y))}
CASES = {
    "logistic, table": Case(
        network(patients(250, 6, 21), logistic), 1.0, 100, 71, "min_error_share", 2.0
    ),
    "perceptron, known batches, two questions": Case(
        network(patients(300, 4, 22), perceptron, poisson_sampling=False, questions=BRIGHTER),
        *(2.0, 60, 79, "max_gain_over_guessing", 0.45),
    ),
    "digits, attributes": Case(
        network(digits(250), convolutional, track=("diagonal",), lr=0.5),
        *(1.0, 80, 71, "min_attribute_error_share", 1.5),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_what_is_advised_keeps_the_policy_when_it_is_done(name: str, tmp_path: Path) -> None:
    train, sigma, steps, seed, rule, limit = CASES[name]
    run = train(sigma, steps, seed, tmp_path)
    if rule.startswith("min_"):
        limit *= {each.key: each.found for each in check(run, Policy(**{rule: 1e-9}))}[rule]
    policy = Policy(**{rule: limit}, allow_seeded_noise=True, max_share_too_few_draws=0.01)
    verdicts = check(run, policy)
    assert {verdict.key for verdict in verdicts if not verdict.passed} == {rule}
    advice = options_of(run, policy, verdicts).sigma
    assert advice is not None
    again = train(advice, steps, seed + 1, tmp_path)
    assert {verdict.key for verdict in check(again, policy) if not verdict.passed} == set()


def test_the_gate_passes_with_the_noise_that_is_offered(tmp_path: Path) -> None:
    """A quick sister."""
    test_what_is_advised_keeps_the_policy_when_it_is_done("logistic, table", tmp_path)


# ---------------------------------------------------------------------- the prediction


def accountants(releases: list[tuple[float, float, int]]) -> float:
    accountant = RDPAccountant()
    accountant.history = releases
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the largest order
        return float(accountant.get_epsilon(1e-5))


def sampled(
    steps: int = 300, rate: float = 0.07, sigma: float = 1.0, n: int = 2000, seed: int = 0
) -> SavedRun:
    """As the demo was: Poisson sampling, a lower end for everybody who was drawn five times, a
    question.
    """
    rng = np.random.default_rng(seed)
    drawn = rng.binomial(steps, rate, size=n)
    bound = np.where(
        drawn > 0, 40 * sigma**2 / np.maximum(drawn, 1) * rng.lognormal(sigma=0.3, size=n), np.inf
    )
    columns = {
        "fil": bound**-0.5,
        "mse_bound": bound,
        "mse_bound_low": np.where(drawn < 5, 0.0, 0.5 * bound),
        "participations": drawn,
        "missed": np.zeros(n, dtype=np.int64),
        "public_class": np.arange(n) % 2,
    }
    divergence = (drawn / 200 / sigma**2)[:, None]
    asked = QuestionRecord("member", ["absent"], False, divergence, 1.2 * divergence)
    mechanism = {"noise_multiplier": sigma, "steps": steps, "sample_rate": rate, "noise": "secure"}
    about = {"mechanism": mechanism, "delta": 1e-5, "epsilon": accountants([(sigma, rate, steps)])}
    run = made_up(n, attacks=[], groups={}, attributes=None, texts=None, rounds={}, history={})
    no = Spread(*np.zeros((4, 0)))
    blind = Baselines(
        no, {}, "the mean of the example’s label", np.asarray([1.0, 1.2]), np.zeros((1, 0))
    )
    return dataclasses.replace(
        run, about=about, columns=columns, questions=[asked], baselines=blind
    )


def advised(run: SavedRun, **limits: Any) -> Options:
    policy = Policy(**{"max_share_too_few_draws": 1.0, **limits})
    return options_of(run, policy, check(run, policy))


def test_the_prediction_of_a_linear_model_is_the_model_with_that_noise() -> None:
    """Closed forms: bounds, errors of attributes and divergences are those of the release with
    σ'.
    """
    x = np.random.default_rng(31).normal(size=(50, 3))
    y = x.sum(axis=1) ** 2
    fitted = LinearRegression(l2=0.01, fit_intercept=True).fit(x, y)
    asked = {"member": AbsentRow()}
    run, truth = (linear_run(fitted, x, y, sigma, questions=asked) for sigma in (0.1, 0.35))
    then = with_noise(run, 0.35)
    for name in ("fil", "mse_bound", "mse_bound_low"):
        np.testing.assert_allclose(then.columns[name], truth.columns[name])
    np.testing.assert_allclose(then.attributes.error_low, truth.attributes.error_low, rtol=1e-6)
    np.testing.assert_allclose(
        then.questions[0].divergence_high, truth.questions[0].divergence_high
    )


@pytest.mark.parametrize("rate", [None, 0.01, 0.2, 0.9])
@pytest.mark.parametrize("factor", [1.1, 4.0, 100.0])
def test_noise_lowers_leakage_at_least_as_predicted(rate: float | None, factor: float) -> None:
    """Of a step: D/f with known batches, less with secret draws.

    And κ/s², whose κ falls with the noise.

    Where nearly everybody is drawn, both may be up to 7.1 % above.
    """
    size = torch.linspace(0.05, 3.0, 20, dtype=torch.float64)
    most = 1.071 if rate == 0.9 else 1 + 1e-6
    for other, product in ((0 * size, 0 * size), (size, 0.3 * size)):
        now, then = (step_divergence(size / f, other / f, product / f, rate) for f in (1.0, factor))
        assert bool((then <= most * now / factor).all())
        assert rate is not None or torch.allclose(then, now / factor)
    if rate is not None:
        for now, then in zip(
            *(poisson_amplification((size / f).sqrt(), rate) for f in (1.0, factor)), strict=True
        ):
            assert bool((then <= most * now).all())


@pytest.mark.parametrize("sigma", [0.4, 1.0, 6.0])
@pytest.mark.parametrize(("rate", "steps"), [(0.01, 3000), (0.2, 100), (1.0, 7)])
def test_epsilon_is_the_accountants(sigma: float, rate: float, steps: int) -> None:
    run = sampled(steps, rate, sigma, n=20)
    assert epsilon_of(run, [sigma]) == pytest.approx(run.about["epsilon"], rel=1e-8)
    both = accountants([(sigma, rate, steps), (3.0, rate, steps)])
    assert epsilon_of(run, [sigma, 3.0]) == pytest.approx(both, rel=1e-8)
    run.about["mechanism"]["sample_rate"] = None
    most = int(run.columns["participations"].max())
    assert epsilon_of(run, [sigma]) == pytest.approx(accountants([(sigma, 1.0, most)]), rel=1e-8)


@pytest.mark.parametrize(("steps", "offered"), [(300, True), (174, False), (99, False)])
def test_noise_is_offered_only_where_fresh_draws_tell_of_enough(steps: int, offered: bool) -> None:
    """With 174 steps 0.2 % are untold in this run, 0.24 % are expected in the next, and 0.4 % may
    well be.
    """
    run = sampled(steps=steps)
    untold = (np.random.default_rng(1).binomial(steps, 0.07, size=(1000, len(run))) < 5).mean(
        axis=1
    )
    limit = max(float((~is_told(run)).mean()), binom.cdf(4, 174, 0.07)) if steps == 174 else 0.01
    assert (np.quantile(untold, 0.95) <= limit) is np.bool_(offered)
    found = advised(run, min_error_share=1.0, max_share_too_few_draws=limit)
    assert (found.sigma is not None) is offered
    assert len(found.others) == (not offered)
    known = dataclasses.replace(
        run, about={**run.about, "mechanism": {**run.about["mechanism"], "sample_rate": None}}
    )
    few = float((~is_told(run)).mean())
    # drawn as often again
    assert advised(known, min_error_share=1.0, max_share_too_few_draws=few).sigma is not None


# ---------------------------------------------------------------------- the options


@pytest.mark.parametrize(
    ("limits", "helped"),
    [
        ({"min_error_share": 1.5}, True),
        ({"max_share_exposed": 0.01, "blind_error": 2.0}, True),
        ({"min_mse_bound": 2.0}, True),
        ({"mse_bound_of_concern": 3.0, "max_share_of_concern": 0.1}, True),
        ({"max_gain_over_guessing": 0.05}, True),
        ({"max_true_positive_rate": {"member": 0.1}}, True),
        ({"max_epsilon": 2.0}, True),
        ({"max_gain_over_guessing": 0.001}, False),  # more than was tried
        ({"min_attacks": 1}, False),
        ({"max_individual_epsilon": 1.0}, False),
        ({"max_group_disparity": 2.0}, False),
        ({"min_attribute_error_share": 0.5}, False),
    ],
)
def test_the_least_noise_is_found_and_what_noise_does_not_keep_is_said(
    limits: dict[str, Any], helped: bool
) -> None:
    run = sampled()
    found = advised(run, **limits)
    assert (found.sigma is not None, len(found.others)) == ((True, 0) if helped else (False, 1))
    if helped:
        sigma, policy = found.sigma, Policy(max_share_too_few_draws=1, **limits)
        margin = 1.0 if "max_epsilon" in limits else MARGIN
        for noise, holds in ((sigma, True), (0.985 * sigma, False)):
            then = check(with_noise(run, noise / margin), policy)
            assert all(verdict.passed for verdict in then if verdict.key in limits) is holds


@pytest.mark.parametrize(
    ("audit", "offered"),
    [(AUDIT, (True, 0)), (None, (False, 1)), (ABOVE, (False, 1)), (REFUTED, (False, 1))],
)
def test_nothing_is_predicted_from_a_run_that_its_audit_doubts(
    audit: Any, offered: tuple[bool, int]
) -> None:
    run = dataclasses.replace(sampled(), about=sampled().about | {"audit": audit})
    found = advised(run, min_error_share=1.5, audited_epsilon_below_claimed=True)
    # what is wrong first, or the audit that is missing
    assert (found.sigma is not None, len(found.others)) == offered


def test_noise_is_offered_only_if_it_keeps_every_rule() -> None:
    """Of two broken rules it keeps one: no option, unless the other stops no release, and then it
    is said so.
    """
    run, limits = sampled(), {"min_error_share": 1.5, "min_attacks": 1}
    found = advised(run, **limits)
    assert found.sigma is None
    assert len(found.others) == 1
    paused = dataclasses.replace(run, columns=run.columns | {"paused": np.ones(len(run))})
    assert advised(paused, min_error_share=1.5).sigma is None
    warned = advised(run, **limits, levels={"min_attacks": "warn"})
    assert warned.sigma == advised(run, min_error_share=1.5).sigma
    assert "every rule, with 1 warning" in warned.change
    policy = Policy(max_share_too_few_draws=1.0, **limits, levels={"min_attacks": "warn"})
    assert outcome(check(with_noise(run, warned.sigma / MARGIN), policy)).code == 0


def test_examples_are_predicted_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    run = worrying()
    limits = {
        "min_error_share": 0.9,
        "min_attribute_error_share": 0.6,
        "max_gain_over_guessing": 0.3,
    }
    limits |= {"mse_bound_of_concern": 0.1, "max_share_of_concern": 0.0}
    whole = advised(run, **limits)
    monkeypatch.setattr("torchfil.report.options._AT_ONCE", 7)
    assert advised(run, **limits) == whole
    assert whole.sigma is not None


@pytest.mark.parametrize(
    "mechanism",
    [
        {},
        {"noise_multiplier": None},
        {"noise_multiplier": 0.0, "steps": 9},
        {"sigma": None, "releases": 2},
    ],
)
def test_nothing_is_advised_where_the_noise_is_not_known(mechanism: dict[str, Any]) -> None:
    run = sampled()
    epsilon = math.inf if mechanism.get("noise_multiplier") == 0 else run.about["epsilon"]
    about = {**run.about, "mechanism": mechanism, "epsilon": epsilon}
    found = advised(dataclasses.replace(run, about=about), min_error_share=5.0)
    assert (found.sigma, len(found.others)) == (None, 1)
    assert advised(run) == Options()  # the policy is kept


@pytest.mark.parametrize(
    ("about", "cost"),
    [
        (
            {"noise_choice": {"pilot_noise_multipliers": [1.0, 1.2]}},
            "not measured; ε = "
            f"{accountants([(each, 0.07, 300) for each in (1.0, 1.2, 3.0)]):.3g} with its pilots",
        ),
        (
            {"linear": {"score_name": "R²", "score_by_noise": [[1.0, 0.72], [8.0, 0.12]]}},
            "R² 0.4# (now 0.72)",
        ),
        (
            {"linear": {"score_name": "R²", "score_by_noise": [[1.0, 0.72], [2.0, -9.0]]}},
            "R² below 0: the model would be useless",
        ),
    ],
)
def test_cost(about: dict[str, Any], cost: str) -> None:
    run = sampled()
    limit = 2 * float(np.nanmin(error_ratios(run)))
    found = advised(dataclasses.replace(run, about={**run.about, **about}), min_error_share=limit)
    said = found.change.partition("its cost: ")[2].removesuffix(".")
    assert re.sub(r"(?<=0\.4)\d", "#", said) == cost
