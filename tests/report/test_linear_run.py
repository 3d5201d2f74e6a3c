"""A linear model's run: the closed forms of torchfil.glm in the file, the page and the gate that training runs have."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.special import erf

from tests.glm.glm_cases import CASES, data

pytest.importorskip("sklearn")

from torchfil.gate.gate import check
from torchfil.gate.policy import Policy
from torchfil.glm import (
    Absent,
    Composition,
    LinearRegression,
    NominalAttribute,
    Shift,
    guess,
    iteratively_reweighted_fil,
)
from torchfil.report import load, write_report
from torchfil.report.summary import summarise
from torchfil.run.baselines import blind_error_of_inputs, blind_errors, exposed_examples
from torchfil.run.linear_run import linear_run, save_linear_run

SIGMA = 0.3


@pytest.fixture(params=list(CASES))
def fitted(request: pytest.FixtureRequest) -> Any:
    X, y, weights = data(request.param, weighted=True)
    return CASES[request.param]().fit(X, y, weights), X, y


def patients() -> tuple[Any, np.ndarray, np.ndarray]:
    """A least-squares fit with a genotype of three levels in columns 1 and 2."""
    rng = np.random.default_rng(0)
    genotype = rng.integers(3, size=60)
    X = np.column_stack([rng.normal(50, 12, 60), np.eye(3)[genotype][:, 1:]])
    y = 0.1 * X[:, 0] + 2 * X[:, 2] + rng.normal(size=60)
    return LinearRegression(l2=0.01, fit_intercept=True).fit(X, y), X, y


CODES = np.array([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]])


def test_information_by_coordinate_is_that_of_the_jacobian(fitted: Any) -> None:
    model, X, y = fitted
    for private_target in (True, False):
        sensitivity = model.sensitivity(X, y, private_target=private_target)
        want = np.stack([sensitivity.jacobian(i).square().sum(dim=0).numpy() for i in range(len(X))])
        assert np.allclose(sensitivity.diagonal(slice(0, len(X))).numpy(), want, rtol=1e-9, atol=1e-15)


def test_numbers_as_they_are_are_those_of_the_library(fitted: Any) -> None:
    model, X, y = fitted
    run = linear_run(model, X, y, SIGMA, scales=None)
    assert np.allclose(run.columns["fil"], model.fil(X, y, SIGMA, kind="trace"))
    assert np.allclose(run.columns["mse_bound"], model.mse_bound(X, y, SIGMA))
    assert run.attributes is not None
    bound = model.mse_bound(X, y, SIGMA, attributes={str(j): [j] for j in range(X.shape[1])})
    for j in range(X.shape[1]):
        assert np.allclose(run.attributes.error[:, j], np.sqrt(bound[str(j)]), rtol=1e-6)
    assert run.attributes.names[-1] == "target"
    known = linear_run(model, X, y, SIGMA, scales=None, private_target=False)
    assert np.allclose(known.columns["fil"], model.fil(X, y, SIGMA, kind="trace", private_target=False))


def test_in_units_of_deviations_it_does_not_matter_how_a_column_is_written(fitted: Any) -> None:
    """Against the Jacobian: η̄² = Σ_j s_j² I_jj / d."""
    model, X, y = fitted
    run = linear_run(model, X, y, SIGMA)
    sensitivity = model.sensitivity(X, y)
    t = sensitivity.num_coordinates - X.shape[1]
    shares = np.unique(y, return_counts=True)[1] / len(y)
    of_target = y.std() if t == 1 else np.sqrt((shares * (1 - shares)).sum() / t)
    spread = np.append(X.std(axis=0), [of_target] * t)
    for i in range(0, len(X), 6):
        information = (sensitivity.jacobian(i).numpy() ** 2).sum(axis=0) / SIGMA**2
        assert run.columns["fil"][i] == pytest.approx(np.sqrt((spread**2 * information).mean()))

    # without a penalty, the fit to months instead of years is the same model
    if model.l2 == 0:
        months = X * np.array([12.0, 1.0, 1.0, 1.0])
        again = type(model)(l2=0.0).fit(months, y, model._training_weight.numpy())
        J = np.stack([again.sensitivity(months, y).jacobian(i).numpy() for i in range(len(X))])
        J[:, 0] *= 12  # noise of σ on a weight per month is another release: the weights are taken back to years
        want = np.sqrt(((J * np.append(months.std(axis=0), y.std())) ** 2).sum(axis=(1, 2)) / 5) / SIGMA
        assert np.allclose(run.columns["fil"], want)


def test_attributes_of_several_columns_and_only_those_are_private() -> None:
    model, X, y = patients()
    named = {"genotype": [1, 2]}
    run = linear_run(model, X, y, SIGMA, attributes=named, attribute_units={"genotype": "0/1"}, scales=None)
    assert run.attributes is not None
    assert (run.attributes.names, run.attributes.units) == (["genotype"], ["0/1"])
    want = model.mse_bound(X, y, SIGMA, attributes=named)["genotype"]
    assert np.allclose(run.columns["mse_bound"], want)
    assert np.allclose(run.attributes.error[:, 0], np.sqrt(want), rtol=1e-6)
    assert run.about["dataset"]["num_coordinates"] == 2


def test_questions_are_exact_and_not_merely_bounded() -> None:
    model, X, y = patients()
    asked: dict[str, Any] = {
        "genotype": NominalAttribute([1, 2], CODES, ["CC", "CT", "TT"]),
        "age": Shift(10, 0),
        "there": Absent(),
    }
    run = linear_run(model, X, y, 0.05, questions=asked)
    for record, question in zip(run.questions, asked.values(), strict=True):
        best = guess(model, X, y, question, 0.05)
        assert np.allclose(record.rate(0.01), best.true_positive_rate(0.01))
        two = np.sqrt(2 * best.divergence.max(axis=1))
        assert np.allclose(record.success(), 0.5 * (1 + erf(two / 8**0.5)))
    assert [record.answers for record in run.questions] == [["CC", "CT", "TT"], ["+10"], ["absent"]]
    assert [record.complete for record in run.questions] == [True, False, False]
    precomputed = linear_run(model, X, y, 0.05, questions={"age": guess(model, X, y, asked["age"], 0.05)})
    assert np.allclose(precomputed.questions[0].divergence, run.questions[1].divergence)


def test_the_weights_of_irfil_and_the_leakage_before() -> None:
    model, X, y = patients()
    reweighted = iteratively_reweighted_fil(model, X, y, rounds=3, kind="trace")
    run = linear_run(reweighted, X, y, SIGMA, scales=None)
    assert np.allclose(run.columns["fil"], reweighted.etas[-1] / SIGMA)
    assert np.allclose(run.columns["fil_before"], reweighted.etas[0] / SIGMA)
    assert np.allclose(run.columns["sample_weight"], reweighted.sample_weight)
    assert run.about["linear"]["reweighted"] is True


def test_several_releases_together() -> None:
    model, X, y = patients()
    once, twice = linear_run(model, X, y, SIGMA), linear_run(Composition([(model, SIGMA)] * 2), X, y, None)
    assert np.allclose(twice.columns["fil"], 2**0.5 * once.columns["fil"])
    with pytest.raises(ValueError, match="a composition has a σ for each"):
        linear_run(Composition([(model, SIGMA)]), X, y, SIGMA)
    other = LinearRegression(l2=1.0, fit_intercept=True).fit(X, y)
    both = Composition([(model, SIGMA), (other, 0.1)])
    run = linear_run(both, X, y, None, scales=None)
    assert np.allclose(run.columns["fil"], both.fil(X, y, kind="trace"))
    assert run.about["mechanism"]["releases"] == 2
    with pytest.raises(ValueError, match="for one release, not for 2"):
        linear_run(both, X, y, None, questions={"there": Absent()})


def test_the_file_holds_it_all(tmp_path: Path) -> None:
    model, X, y = patients()
    options: dict[str, Any] = {
        "ids": [f"p{i}" for i in range(60)],
        "groups": {"sex": ["f", "m"] * 30},
        "questions": {"there": Absent()},
        "scores": {"score": 0.5},
        "title": "doses",
    }
    path = save_linear_run(tmp_path / "run.parquet", model, X, y, 0.05, **options)
    assert path.stat().st_mode & 0o777 == 0o600
    run, want = load(path), linear_run(model, X, y, 0.05, **options)
    assert run.about | {"created": ""} == want.about | {"created": ""}
    assert all(np.array_equal(run.columns[name], want.columns[name]) for name in want.columns)
    assert np.array_equal(run.questions[0].rate(), want.questions[0].rate())
    assert np.asarray(run.ids).tolist() == options["ids"]


def test_the_gate_judges_it_as_any_run() -> None:
    model, X, y = patients()
    run = linear_run(model, X, y, SIGMA, questions={"there": Absent()})
    least = float(run.columns["mse_bound"].min())
    for limit, passed in ((0.99 * least, True), (1.01 * least, False)):
        verdicts = {verdict.rule: verdict for verdict in check(run, Policy(min_mse_bound=limit))}
        assert verdicts["min_mse_bound"].passed is passed
        assert verdicts["max_share_not_measured"].passed
        assert verdicts["max_examples_missed"].passed
    (verdict,) = [v for v in check(run, Policy(max_epsilon=3.0)) if v.rule == "max_epsilon"]
    assert not verdict.passed  # a linear model's release has no accountant's ε
    gain = float(run.questions[0].success().max()) - 0.5
    for limit, passed in ((gain + 1e-6, True), (gain - 1e-6, False)):
        rule = next(v for v in check(run, Policy(max_gain_over_guessing=limit)) if v.rule.startswith("max_gain"))
        assert rule.passed is passed


def test_a_blind_guess_is_known_from_the_rows() -> None:
    """In deviations it is off by 1; an attribute by its own deviation, one of several columns by theirs together."""
    model, X, y = patients()
    run = linear_run(model, X, y, SIGMA, attributes={"age": [0], "genotype": [1, 2]}, private_target=True)
    assert run.yardsticks is not None
    assert blind_error_of_inputs(run) == pytest.approx(1.0)
    shares = X[:, 1:].mean(axis=0)
    want = [X[:, 0].std(), np.sqrt((shares * (1 - shares)).mean()), y.std()]
    assert np.allclose(blind_errors(run), want)
    low, high = run.yardsticks.attributes.low, run.yardsticks.attributes.high
    assert (low[0], high[0]) == (X[:, 0].min(), X[:, 0].max())
    assert np.isnan(low[1])
    exposed = exposed_examples(run)
    assert exposed is not None
    assert exposed.tolist() == (run.columns["mse_bound"] < 1).tolist()
    plain = linear_run(model, X, y, SIGMA, scales=None)
    assert blind_error_of_inputs(plain) == pytest.approx(np.sqrt(np.append(X, y[:, None], axis=1).var(axis=0).mean()))


def test_the_noise_that_the_page_suggests_keeps_the_policy_and_not_much_less_does(tmp_path: Path) -> None:
    model, X, y = patients()
    asked: dict[str, Any] = {"genotype": NominalAttribute([1, 2], CODES), "there": Absent()}
    for policy in (
        Policy(max_gain_over_guessing=0.1),
        Policy(max_true_positive_rate={"there": 0.05}),
        Policy(min_mse_bound=2.0, min_error_share=0.9),
    ):
        run = linear_run(model, X, y, 0.05, questions=asked)
        text = write_report(run, tmp_path / "page", policy=policy).read_text()
        found = re.search(r'id="card-todo".*?<p class="figure">σ = ([\d.]+)</p>', text, flags=re.DOTALL)
        assert found is not None
        sigma = float(found[1])
        for factor, kept in ((1.0, True), (0.98, False)):
            verdicts = check(linear_run(model, X, y, factor * sigma, questions=asked), policy)
            assert all(verdict.passed for verdict in verdicts) is kept


@pytest.mark.parametrize("redacted", [False, True])
def test_the_page_says_nothing_of_runs_that_there_were_not(tmp_path: Path, redacted: bool) -> None:
    """No batches, no probes, no intervals of examples: the numbers are exact, and the page does not say otherwise."""
    model, X, y = patients()
    asked: dict[str, Any] = {"genotype": NominalAttribute([1, 2], CODES), "there": Absent()}
    run = linear_run(model, X, y, 0.05, questions=asked, groups={"sex": ["f", "m"] * 30})
    page = write_report(run, tmp_path / "page", redacted=redacted).read_text()
    told = re.sub(r"<(style|script)>.*?</\1>", "", page, flags=re.DOTALL)  # with the table's own words, as JSON
    for words in ("one run", "low end", "lower end", "an estimate", "of a batch", "more probes", "fewer steps"):
        assert words not in told, words
    assert redacted or "(mean square per input); computed in closed form, without error" in told
    assert '"exact":true' in told or redacted


def test_nothing_of_one_row_is_public(tmp_path: Path) -> None:
    model, X, y = patients()
    run = linear_run(model, X, y, SIGMA, groups={"sex": ["f", "m"] * 30}, scores={"score": 0.123456})
    page = write_report(run, tmp_path / "public", redacted=True)
    text = page.read_text() + (page.parent / "summary.json").read_text()
    assert run.about["dataset"]["data_sha256"] not in text
    assert "0.123456" not in text
    assert json.loads((page.parent / "summary.json").read_text())["about"]["kind"] == "linear"
    assert summarise(run, redacted=True).about["mechanism"] == {"sigma": SIGMA, "l2": 0.01, "releases": 1}


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"sigma": 0.0}, "must be positive"),
        ({"sigma": None}, "must be positive"),
        ({"ids": [1]}, "ids has 1 entries for 60 rows"),
        ({"groups": {"sex": ["f"]}}, "'sex' has 1 labels for 60 rows"),
        ({"attributes": {}}, "nothing would be private"),
        ({"scales": [1.0]}, "4 positive numbers"),
        ({"scales": "range"}, "must be 'deviation'"),
    ],
)
def test_refusals(changes: dict[str, Any], why: str) -> None:
    model, X, y = patients()
    options: dict[str, Any] = {"sigma": SIGMA, **changes}
    with pytest.raises(ValueError, match=why):
        linear_run(model, X, y, **options)
