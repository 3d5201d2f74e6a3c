"""Questions at the data's own prior: nobody beats the bound, and the page does not mix it with that
of two answers.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from tests.report.pages import files_of, text_of
from tests.report.prepared_runs import bare
from torchfil.guessing import largest_success
from torchfil.report import write_report
from torchfil.report.leaks import PriorGuess, largest_success_at, prior_guess
from torchfil.run.saved_run import QuestionRecord


def kl(p: np.ndarray, q: np.ndarray) -> float:
    return float(np.sum(p * np.log(p / q)))


def asked_of(laws: np.ndarray, truth: int, law: str = "any") -> QuestionRecord:
    """One record whose answers release these laws over finitely many outcomes, [m, outcomes]."""
    divergence = np.array([[kl(laws[truth], other) for other in laws]])
    return QuestionRecord(
        "q", [f"a{i}" for i in range(len(laws))], True, divergence, divergence, law
    )


class TestBound:
    @pytest.mark.parametrize("answers", [2, 3, 5])
    def test_the_best_attacker_does_not_beat_it(self, answers: int) -> None:
        """Of 100 random releases each: naming the likeliest answer is the best that anybody can do
        (Bayes).
        """
        rng, gaps = np.random.default_rng(answers), []
        for _ in range(100):
            laws = rng.dirichlet(np.full(6, rng.choice([0.5, 2.0, 20.0])), size=answers) + 1e-12
            laws /= laws.sum(axis=1, keepdims=True)
            prior = rng.dirichlet(np.full(answers, rng.choice([0.3, 3.0])))
            best = float((prior[:, None] * laws).max(axis=0).sum())
            for truth in range(answers):
                (bound,) = largest_success_at(asked_of(laws, truth), prior)
                gaps.append(bound - best)
        assert min(gaps) > -1e-12
        assert np.median(gaps) < 0.2  # it says something

    def test_of_two_answers_it_is_that_of_the_library(self) -> None:
        high = np.array([[0.0, 0.0], [0.02, 0.0], [0.0, 0.3], [4.0, 0.0], [0.0, np.inf]])
        asked = QuestionRecord("q", ["a", "b"], True, high, high)
        for share in (0.5, 0.2, 0.99):
            expected = largest_success(high.max(axis=1).tolist(), share)
            assert largest_success_at(asked, np.array([share, 1 - share])) == pytest.approx(
                expected.numpy()
            )

    def test_of_two_normal_laws_it_is_attained(self) -> None:
        """By integration: P = N(0, 1), P' = N(d, 1), D = d²/2."""
        x = np.linspace(-12, 14, 200_001)
        for apart in (0.1, 0.8, 2.5):
            high = np.array([[0.0, apart**2 / 2]])
            prior = np.array([0.7, 0.3])
            best = np.maximum(0.7 * stats.norm.pdf(x), 0.3 * stats.norm.pdf(x, apart)).sum() * (
                x[1] - x[0]
            )
            normal = QuestionRecord("q", ["a", "b"], True, high, high, "normal")
            assert largest_success_at(normal, prior) == pytest.approx(best, abs=1e-6)
            assert largest_success_at(dataclasses.replace(normal, law="any"), prior)[0] > best

    def test_of_several_normal_laws_nobody_beats_it(self) -> None:
        rng = np.random.default_rng(0)
        x = np.linspace(-20, 20, 20_001)
        for _ in range(50):
            means, prior = (
                rng.normal(scale=rng.choice([0.3, 2.0]), size=4),
                rng.dirichlet(np.ones(4)),
            )
            best = (prior[:, None] * stats.norm.pdf(x, means[:, None])).max(axis=0).sum() * (
                x[1] - x[0]
            )
            for truth in range(4):
                high = (means - means[truth])[None] ** 2 / 2
                asked = QuestionRecord("q", list("abcd"), True, high, high, "normal")
                assert largest_success_at(asked, prior)[0] > best - 1e-6

    def test_ends_and_what_the_run_does_not_tell(self) -> None:
        prior = np.array([0.2, 0.5, 0.3])
        nothing = QuestionRecord("q", ["a", "b", "c"], True, np.zeros((2, 3)), np.zeros((2, 3)))
        assert largest_success_at(nothing, prior).tolist() == [0.5, 0.5]
        high = np.array([[0.0, np.inf, np.inf], [np.inf, np.inf, 0.0]])
        all_told = dataclasses.replace(nothing, divergence_high=high)
        assert largest_success_at(all_told, prior).tolist() == [1.0, 1.0]
        unknown = dataclasses.replace(
            nothing, divergence_high=np.array([[0.0, np.nan, 0.1], [0.2, 0.1, 0.0]])
        )
        assert np.isnan(largest_success_at(unknown, prior)).tolist() == [True, False]

        truth, everybody = np.random.default_rng(0).integers(3, size=50), np.ones(50, dtype=bool)
        high = np.where(np.arange(3) == truth[:, None], 0.0, 0.1)
        asked = QuestionRecord("q", list("abc"), True, high, high)
        found = prior_guess(asked, everybody)
        assert isinstance(found, PriorGuess)
        assert found.blind == np.bincount(truth).max() / 50
        assert found.blind < found.mean <= found.most < 0.6
        assert prior_guess(dataclasses.replace(asked, complete=False), everybody) is None
        assert prior_guess(asked, ~everybody) is None
        assert (
            prior_guess(dataclasses.replace(asked, divergence_high=high + np.nan), everybody)
            is None
        )


def test_the_page_starts_from_the_commonest_answer_and_the_public_one_does_not_tell_it(
    tmp_path: Path,
) -> None:
    """Of 200 patients 80, 70 and 50 have a genotype.

    Ten of the rarest are told apart, all others hardly.
    """
    truth = np.repeat([0, 1, 2], [80, 70, 50])
    high = np.where(np.arange(3) == truth[:, None], 0.0, 1e-4)
    high[-10:, :2] = 0.5
    run = bare(
        "Doses", 2.0, questions=[QuestionRecord("genotype", ["CC", "CT", "TT"], True, high, high)]
    )
    page = write_report(run, tmp_path / "report")
    # TV ≤ sqrt(0.5/2) = 1/2: 0.4 + (0.4 + 0.35)/2 around the truth, 0.4 + 0.35·1 + 0.25/2 around
    # the commonest
    assert re.search("genotype, all answers .*40 % → 77.5 %", text_of(page, "questions"))
    assert "genotype 40 % 78 % 42 %" in text_of(page, "rates")
    public = b"".join(
        files_of(write_report(run, tmp_path / "report", redacted=True)).values()
    ).decode()
    assert not re.search(r"commonest|40\s%", public)
