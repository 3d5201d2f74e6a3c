"""A linear model's run: the closed forms of torchfil.glm in the file, the page and the gate that
training runs have.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.special import erf

from tests.glm.glm_cases import CASES, CODES, data
from tests.report.pages import files_of, summary_of

pytest.importorskip("sklearn")

from torchfil.glm import (
    Absent,
    Composition,
    LinearRegression,
    NominalAttribute,
    Shift,
    SoftmaxRegression,
    guess,
    iteratively_reweighted_fil,
)
from torchfil.report import load, write_report
from torchfil.report.summary import summarise
from torchfil.run.baselines import BELOW, blind_error_of_inputs, blind_errors, exposure_of
from torchfil.run.linear_run import linear_run, save_linear_run

SIGMA = 0.3


@pytest.fixture(scope="module")
def patients() -> tuple[Any, np.ndarray, np.ndarray]:
    """A least-squares fit with a genotype of three levels in columns 1 and 2."""
    rng = np.random.default_rng(0)
    genotype = rng.integers(3, size=60)
    X = np.column_stack([rng.normal(50, 12, 60), np.eye(3)[genotype][:, 1:]])
    y = 0.1 * X[:, 0] + 2 * X[:, 2] + rng.normal(size=60)
    return LinearRegression(l2=0.01, fit_intercept=True).fit(X, y), X, y


ASKED: dict[str, Any] = {
    "genotype": NominalAttribute([1, 2], CODES, ["CC", "CT", "TT"]),
    "there": Absent(),
}


@pytest.mark.parametrize("case", CASES)
def test_numbers_are_those_of_the_library_and_of_the_jacobian(case: str) -> None:
    """As they are, and in units of deviations: η̄² = Σ_j s_j² I_jj / d."""
    X, y, weights = data(case, weighted=True)
    model = CASES[case]().fit(X, y, weights)
    run = linear_run(model, X, y, SIGMA, scales=None)
    assert np.allclose(run.columns["fil"], model.fil(X, y, SIGMA, kind="trace"))
    assert np.allclose(run.columns["mse_bound"], model.mse_bound(X, y, SIGMA))
    assert run.attributes.names[-1] == "target"
    bound = model.mse_bound(X, y, SIGMA, attributes={str(j): [j] for j in range(X.shape[1])})
    for j in range(X.shape[1]):
        assert np.allclose(run.attributes.error[:, j], np.sqrt(bound[str(j)]), rtol=1e-6)
    known = linear_run(model, X, y, SIGMA, scales=None, private_target=False)
    assert np.allclose(
        known.columns["fil"], model.fil(X, y, SIGMA, kind="trace", private_target=False)
    )

    for private_target in (False, True):
        sensitivity = model.sensitivity(X, y, private_target=private_target)
        squared = np.stack(
            [sensitivity.jacobian(i).square().sum(dim=0).numpy() for i in range(len(X))]
        )
        assert np.allclose(
            sensitivity.diagonal(slice(0, len(X))).numpy(), squared, rtol=1e-9, atol=1e-15
        )
    t = sensitivity.num_coordinates - X.shape[1]
    shares = np.unique(y, return_counts=True)[1] / len(y)
    of_target = y.std() if t == 1 else np.sqrt((shares * (1 - shares)).sum() / t)
    spread = np.append(X.std(axis=0), [of_target] * t)
    want = np.sqrt((spread**2 * squared).mean(axis=1)) / SIGMA
    assert linear_run(model, X, y, SIGMA).columns["fil"] == pytest.approx(want)


def test_attributes_of_several_columns_and_only_those_are_private(patients: Any) -> None:
    model, X, y = patients
    named = {"genotype": [1, 2]}
    run = linear_run(
        model, X, y, SIGMA, attributes=named, attribute_units={"genotype": "0/1"}, scales=None
    )
    assert (run.attributes.names, run.attributes.units) == (["genotype"], ["0/1"])
    want = model.mse_bound(X, y, SIGMA, attributes=named)["genotype"]
    assert np.allclose(run.columns["mse_bound"], want)
    assert np.allclose(run.attributes.error[:, 0], np.sqrt(want), rtol=1e-6)
    assert run.about["dataset"]["num_coordinates"] == 2
    assert np.isnan(run.records.values).all()


def test_questions_are_exact_and_not_merely_bounded(patients: Any) -> None:
    model, X, y = patients
    asked: dict[str, Any] = {**ASKED, "age": Shift(10, 0)}
    run = linear_run(model, X, y, 0.05, questions=asked)
    for record, question in zip(run.questions, asked.values(), strict=True):
        best = guess(model, X, y, question, 0.05)
        assert np.allclose(record.rate(0.01), best.true_positive_rate(0.01))
        two = np.sqrt(2 * best.divergence.max(axis=1))
        assert np.allclose(record.success(), 0.5 * (1 + erf(two / 8**0.5)))
    assert [record.answers for record in run.questions] == [["CC", "CT", "TT"], ["absent"], ["+10"]]
    assert [record.complete for record in run.questions] == [True, False, False]
    precomputed = linear_run(
        model, X, y, 0.05, questions={"age": guess(model, X, y, asked["age"], 0.05)}
    )
    assert np.allclose(precomputed.questions[0].divergence, run.questions[2].divergence)


def test_weights_of_irfil_and_several_releases_together(patients: Any) -> None:
    model, X, y = patients
    reweighted = iteratively_reweighted_fil(model, X, y, rounds=3, kind="trace")
    run = linear_run(reweighted, X, y, SIGMA, scales=None)
    assert np.allclose(run.columns["fil"], reweighted.etas[-1] / SIGMA)
    assert np.allclose(run.columns["fil_before"], reweighted.etas[0] / SIGMA)
    assert np.allclose(run.columns["sample_weight"], reweighted.sample_weight)
    assert run.about["linear"]["reweighted"] is True

    once, twice = (
        linear_run(model, X, y, SIGMA),
        linear_run(Composition([(model, SIGMA)] * 2), X, y, None),
    )
    assert np.allclose(twice.columns["fil"], 2**0.5 * once.columns["fil"])
    both = Composition(
        [(model, SIGMA), (LinearRegression(l2=1.0, fit_intercept=True).fit(X, y), 0.1)]
    )
    run = linear_run(both, X, y, None, scales=None)
    assert np.allclose(run.columns["fil"], both.fil(X, y, kind="trace"))
    assert run.about["mechanism"]["releases"] == 2
    with pytest.raises(ValueError, match="composition has a σ"):
        linear_run(both, X, y, SIGMA)
    with pytest.raises(ValueError, match="for one release"):
        linear_run(both, X, y, None, questions={"there": Absent()})


def test_the_file_holds_it_all_and_nothing_of_one_row_is_public(
    patients: Any, tmp_path: Path
) -> None:
    model, X, y = patients
    options: dict[str, Any] = {
        "ids": [f"p{i}" for i in range(60)],
        "groups": {"sex": ["f", "m"] * 30},
        "questions": {"there": Absent()},
        "metrics": {"R²": (0.123456, "60 fitted rows")},
        "title": "doses",
    }
    path = save_linear_run(tmp_path / "run.parquet", model, X, y, 0.05, **options)
    assert path.stat().st_mode & 0o777 == 0o600
    run, want = load(path), linear_run(model, X, y, 0.05, **options)
    assert run.about | {"created": ""} == want.about | {"created": ""}
    assert all(np.array_equal(run.columns[name], want.columns[name]) for name in want.columns)
    assert np.array_equal(run.questions[0].rate(), want.questions[0].rate())
    assert np.asarray(run.ids).tolist() == options["ids"]

    page = write_report(run, tmp_path / "public", redacted=True)
    content = b"".join(files_of(page).values()).decode()
    assert run.about["dataset"]["data_sha256"] not in content
    assert "0.123456" not in content
    assert "60 fitted rows" not in content
    assert "60 fitted rows" in write_report(run, tmp_path / "private").read_text()
    score = dict(run.about["linear"]["score_by_noise"])
    assert min(score) == 0.05 / 4
    assert max(score) == pytest.approx(32 * 0.05)
    assert score[0.05] == model.expected_score(X, y, 0.05)
    assert all(str(round(value, 6)) not in content for value in score.values())
    assert run.about["linear"]["score_name"] == "R²"
    with pytest.raises(ValueError, match="score_by_noise"):
        replace(run, about={**run.about, "linear": {"score_by_noise": ["high"]}})
    assert summary_of(page)["about"]["kind"] == "linear"
    assert summarise(run, redacted=True).about["mechanism"] == {
        "sigma": 0.05,
        "l2": 0.01,
        "releases": 1,
    }


def test_a_blind_guess_is_known_from_the_rows(patients: Any) -> None:
    """If all is private, the mean of other rows, in deviations.

    Attributes of several columns by theirs together.
    """
    model, X, y = patients
    others = len(X) / (len(X) - 1)  # a mean that leaves the row out errs so much more
    run = linear_run(
        model, X, y, SIGMA, attributes={"age": [0], "genotype": [1, 2]}, private_target=True
    )
    assert run.baselines.knows == "the mean of all examples"
    assert blind_error_of_inputs(run) == pytest.approx(others)
    shares = X[:, 1:].mean(axis=0)
    want = [X[:, 0].std(), np.sqrt((shares * (1 - shares)).mean()), y.std()]
    assert np.allclose(blind_errors(run), np.asarray(want) * others)
    assert np.allclose(run.baselines.attributes.std, want)
    low, high = run.baselines.attributes.low, run.baselines.attributes.high
    assert (low[0], high[0]) == (X[:, 0].min(), X[:, 0].max())
    assert np.isnan(low[1])
    exposed = exposure_of(run) <= BELOW
    assert exposed.tolist() == (run.columns["mse_bound"] < others**2).tolist()
    plain = linear_run(model, X, y, SIGMA, scales=None)
    whole = np.append(X, y[:, None], axis=1)
    assert blind_error_of_inputs(plain) == pytest.approx(others * np.sqrt(whole.var(axis=0).mean()))


def test_a_blind_guess_knows_targets_and_columns_that_are_not_private() -> None:
    """A column from another and the target by least squares.

    Of classes, the best of their own mean and everybody's.
    """
    rng = np.random.default_rng(0)
    X = rng.normal(size=(150, 2)) @ np.array([[1.0, 0.8], [0.0, 1.0]])
    y = X[:, 0] + 0.3 * rng.normal(size=150)
    run = linear_run(LinearRegression(l2=0.01).fit(X, y), X, y, SIGMA, attributes={"a": [0]})
    design = np.column_stack([np.ones(150), X[:, 1], y])
    hat = design @ np.linalg.pinv(design)
    left = (X[:, 0] - hat @ X[:, 0]) / (1 - np.diag(hat))
    assert run.baselines.knows == "a linear fit on what is public"
    assert float(blind_errors(run)[0, 0]) == pytest.approx(np.sqrt(np.mean(left**2)), rel=0.02)
    assert run.baselines.errors[0] * X[:, 0].std() == pytest.approx(
        run.baselines.attribute_errors[0, 0]
    )

    y = np.repeat(["a", "b", "c"], 50)
    X += 3 * (y == "b")[:, None]
    model = SoftmaxRegression(l2=0.1).fit(X, y)
    known, secret = (linear_run(model, X, y, SIGMA, private_target=flag) for flag in (False, True))
    assert known.baselines.knows == "the mean of its label"
    assert known.columns["public_class"].tolist() == np.repeat([0, 1, 2], 50).tolist()
    want = [X[y == label].std(axis=0) * 50 / 49 for label in "abc"]
    np.testing.assert_allclose(blind_errors(known), want)
    assert "public_class" not in secret.columns
    assert blind_errors(secret)[0, -1] == pytest.approx(np.sqrt(3 * 2 / 9 / 2) * 150 / 149)
