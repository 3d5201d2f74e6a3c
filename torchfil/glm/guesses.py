r"""What any attacker can infer from a released linear model: questions with finitely many answers,
in closed form.

With answer a, the minimiser is w*_a (see :mod:`torchfil.glm.refits`) and the release is N(w*_a,
σ²I). The attacker sees the release and knows everything except the answer, including the other
records. Telling normal distributions apart has a known solution:

    KL = Δ²/(2σ²),     TPR = Φ(Φ⁻¹(FPR) + Δ/σ),     Δ = ‖w*_a − w*_b‖.

No attacker does better, biased or not, and the likelihood ratio attains it: bound and attack are
the same. Random are the noise of the release and, for the accuracy, the true answer (drawn from the
prior).

A question says, for every record, what it would be under each of the m answers, which answer is
true, and how common the answers are. It may ask which level a nominal attribute has, which label,
whether a number is larger by some amount, or whether the record is there at all.

**How often the best attacker is right** at telling m normal distributions N(μ_a, I) with priors π_a
apart:

The best attacker names the answer with the largest posterior. If a is true, its log posterior
exceeds that of b by a normal number with mean log(π_a/π_b) + d_ab²/2 and variance d_ab², d_ab =
‖μ_a − μ_b‖, so that

    P(right) = Σ_a π_a P(all of these are positive) = ∫ max_a π_a p_a.

For two answers this is Φ; for three, the positive quadrant of a bivariate normal, by Owen's T. For
more answers it is Σ_a π_a E_a[max_b posterior_b], E_a under N(μ_a, I): by quasi-Monte Carlo, always
the same, with an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
import torch
from scipy.special import ndtr, ndtri, owens_t
from torch import Tensor

from torchfil.glm.refits import GLMView, minimiser_changes
from torchfil.questions import Alternative, Column, Question
from torchfil.viz.common import as_array

if TYPE_CHECKING:
    from torchfil.glm.model import GeneralizedLinearModel

_POINTS, _SCRAMBLES = 128, 4  # of each sequence, for each answer
_CHUNK_NUMBERS = 2**20
_FAR = 40.0  # deviations that a normal number does not exceed
_NEAR = 1e-300


@dataclass(frozen=True, eq=False)
class NominalAttribute(Question):
    """Which of k levels does an attribute, given by columns of X, have?

    Attributes:
        columns: Its c columns.
        codes: The columns' values for each level, [k, c].
        names: The levels' names; by default their codes.

    Example:
        >>> NominalAttribute([1], np.array([[0.0], [1.0]])).levels(
        ...     np.array([[5.0, 1.0], [6.0, 0.0]])
        ... )
        array([1, 0])
    """

    complete: ClassVar[bool] = True
    columns: Sequence[int]
    codes: np.ndarray
    names: Sequence[str] | None = None

    @property
    def answers(self) -> tuple[str, ...]:
        """The levels' names."""
        shown = (
            ", ".join(f"{value:g}" for value in code)
            for code in np.asarray(self.codes, dtype=float)
        )
        return tuple(shown if self.names is None else self.names)

    def alternatives(self, inputs: Any, targets: Any) -> tuple[Alternative | None, ...]:
        """The columns with each level's code."""

        def with_code(code: np.ndarray) -> Any:
            changed = inputs.clone()
            changed[:, list(self.columns)] = torch.as_tensor(code).to(inputs)
            return changed

        return tuple(
            Alternative(with_code(code), targets) for code in np.asarray(self.codes, dtype=float)
        )

    def levels(self, X: object) -> np.ndarray:
        """The number of every row's level, [n].

        Raises:
            ValueError: A row's columns do not hold the code of any level.
        """
        values, codes = (
            as_array(X).astype(float)[:, list(self.columns)],
            np.asarray(self.codes, dtype=float),
        )
        return _own_answers((values[:, None, :] == codes).all(axis=2), self)


@dataclass(frozen=True, eq=False)
class Shift(Question):
    """Is a number as it is, or larger by some amount?

    Attributes:
        by: The amount.
        column: The column; None: the target.
    """

    by: float
    column: int | None = None

    @property
    def answers(self) -> tuple[str, ...]:
        """The amount with its sign."""
        return (f"{self.by:+g}",)

    def alternatives(self, inputs: Any, targets: Any) -> tuple[Alternative | None, ...]:
        """The column, or the target, with the amount added."""
        if self.column is None:
            return (Alternative(inputs, targets + self.by),)
        return Column(self.column, by=(self.by,)).alternatives(inputs, targets)


@dataclass(frozen=True, eq=False)
class PosedQuestion:
    """A question put to a training set.

    Attributes:
        answers: Their names, m of them.
        alternatives: What each record would be under each of the m answers; None: left out.
        truth: The number of every record's own answer, [n].
        shares: How common each answer is among the records; equal if the data do not show it, [m].
    """

    answers: tuple[str, ...]
    alternatives: Sequence[Alternative | None]
    truth: np.ndarray
    shares: np.ndarray


def ask(question: Question, view: GLMView) -> PosedQuestion:
    """The answers for every record of a training set.

    If the question names all possible answers, a record's own is the one that leaves it as it is.
    Otherwise its own comes first ("present", "as it is"), and none is known to be more common.
    """
    inputs = view.X[:, : view.num_inputs]
    given, names = question.alternatives(inputs, view.y), question.answers
    if not question.complete:
        own = "present" if any(other is None for other in given) else "as it is"
        shares = np.full(1 + len(given), 1 / (1 + len(given)))
        everybody, truth = [Alternative(inputs, view.y), *given], np.zeros(len(inputs), dtype=int)
        return PosedQuestion((own, *names), everybody, truth, shares)
    same = [~view.changed(*view.with_answer(other)) for other in given]
    truth = _own_answers(as_array(torch.stack(same, dim=1)), question)
    return PosedQuestion(names, given, truth, np.bincount(truth, minlength=len(names)) / len(truth))


def _own_answers(holds: np.ndarray, question: Question) -> np.ndarray:
    """The number of the first answer that holds for each row, [n], of booleans [n, m]."""
    lost = np.flatnonzero(~holds.any(axis=1))[:5].tolist()
    if lost:
        raise ValueError(
            f"rows {lost} hold none of the answers of {type(question).__name__}, "
            f"{list(question.answers)}; give every answer that occurs"
        )
    return holds.argmax(axis=1)


@dataclass(frozen=True, eq=False)
class BestGuess:
    """How well the best attacker answers a question, record by record.

    Confidential: it depends on private data.

    Attributes:
        answers: Their names, m of them.
        truth: The number of every record's own answer, [n].
        prior: How likely the attacker considers each answer before seeing the release, [n, m].
        distances: Δ/σ between the answers' models, [n, m, m].
        accuracy: How often the best attacker is right if answers are drawn from the prior, [n]; no
            attacker is right more often.
        accuracy_error: Its numerical error (a standard error), [n]; 0 for two and three answers.
    """

    answers: tuple[str, ...]
    truth: np.ndarray
    prior: np.ndarray
    distances: np.ndarray
    accuracy: np.ndarray
    accuracy_error: np.ndarray

    @property
    def prior_accuracy(self) -> np.ndarray:
        """How often the most likely answer is right without seeing the model, [n]."""
        return self.prior.max(axis=1)

    @property
    def divergence(self) -> np.ndarray:
        """D = KL(P_true ‖ P_answer) = Δ²/(2σ²) of every record and answer, [n, m]; 0 for its own
        answer.
        """
        return self._from_truth() ** 2 / 2

    def true_positive_rate(self, false_positive_rate: float) -> np.ndarray:
        """How often the best test names a record's own answer, [n], at this rate of naming it
        wrongly.

        Φ(Φ⁻¹(FPR) + Δ/σ): exact, and attained by the likelihood ratio, for the answer that is
        easiest to distinguish from the record's own.

        Args:
            false_positive_rate: A number in (0, 1).
        """
        if not 0 < false_positive_rate < 1:
            raise ValueError(f"false_positive_rate={false_positive_rate} must lie between 0 and 1")
        return ndtr(ndtri(false_positive_rate) + self._from_truth().max(axis=1))

    def _from_truth(self) -> np.ndarray:
        return self.distances[np.arange(len(self.truth)), self.truth]


def guess(
    model: GeneralizedLinearModel,
    X: object,
    y: object,
    question: Question,
    sigma: float,
    *,
    prior: object = None,
    progress: bool = False,
) -> BestGuess:
    """How well any attacker can answer a question about each record from the release w* + N(0,
    σ²I).

    The attacker knows the training procedure (including σ and the sample weights) and everything
    except the answer for this record. The numbers are exact: the best attacker attains them.

    Args:
        model: A fitted model of one margin.
        X: The training inputs, [n, d].
        y: The training targets, [n].
        question: ``NominalAttribute``, ``Label``, ``Shift``, ``Absent``, or any of
            :mod:`torchfil.questions` about a table.
        sigma: σ of the release.
        prior: How likely each answer is before the model is seen, [m] or [n, m]. None: as common as
            among the records; "uniform": all equal.
        progress: Whether to show a progress bar.

    Example:
        >>> from torchfil.glm import Label, LinearRegression
        >>> X, y = np.ones((4, 1)), np.array([0.0, 0.0, 1.0, 1.0])
        >>> model = LinearRegression().fit(X, y)  # the mean of y: one label moves it by 1/4
        >>> found = guess(model, X, y, Label(2), sigma=0.25)
        >>> found.divergence.round(3).tolist()
        [[0.0, 0.5], [0.0, 0.5], [0.5, 0.0], [0.5, 0.0]]
        >>> found.accuracy.round(3)  # Φ(1/2)
        array([0.691, 0.691, 0.691, 0.691])
    """
    if not sigma > 0:
        raise ValueError(
            f"sigma={sigma} must be positive: without noise the release gives everything away"
        )
    view = GLMView.build(model, X, y)
    asked = ask(question, view)
    m = len(asked.answers)
    if prior is None:
        prior = asked.shares
    elif isinstance(prior, str) and prior == "uniform":
        prior = np.full(m, 1 / m)
    chances = _checked_prior(prior, len(view.X), m)

    # distances between the answers' models; |a − b| directly, since a² + b² − 2ab cancels
    changes = minimiser_changes(view, asked.alternatives, progress=progress)  # [n, m, p]
    apart = [torch.linalg.vector_norm(changes - changes[:, [a]], dim=2) for a in range(m)]
    distances = as_array(torch.stack(apart, dim=1)) / sigma
    best = best_accuracy(distances, chances)
    return BestGuess(asked.answers, asked.truth, chances, distances, best.value, best.error)


def _checked_prior(prior: object, n: int, m: int) -> np.ndarray:
    """The checked prior as [n, m]."""
    chances = as_array(prior).astype(float)
    shape = list(chances.shape)
    if shape not in ([m], [n, m]):
        raise ValueError(
            f"prior has shape {shape}; it must be [{m}], one for each answer, or [{n}, {m}]"
        )
    if not ((chances >= 0).all() and (np.abs(chances.sum(axis=-1) - 1) < 1e-6).all()):
        raise ValueError(
            f"prior={prior} must be numbers ≥ 0 that sum to 1; divide them by their sum"
        )
    return np.broadcast_to(chances, (n, m))


# ------------------------------------------------------------- how often the best attacker is right


class BestAccuracy(NamedTuple):
    """The best attacker's chance to be right, and its numerical error.

    Attributes:
        value: [n].
        error: Its standard error, [n]; 0 for two and three answers.
    """

    value: np.ndarray
    error: np.ndarray


def best_accuracy(distances: np.ndarray, prior: np.ndarray) -> BestAccuracy:
    """∫ max_a π_a p_a for n records with m answers each.

    No attacker is right more often on average over π.

    Args:
        distances: d_ab, the distances of the answers' means in units of the noise, [n, m, m].
        prior: π, [n, m].

    Example:
        >>> d = np.array([[[0.0, 2.0], [2.0, 0.0]]])
        >>> best_accuracy(d, np.array([[0.5, 0.5]])).value.round(4)  # Φ(1)
        array([0.8413])
    """
    exact = {1: lambda _, weights: weights[:, 0], 2: _of_two, 3: _of_three}.get(prior.shape[1])
    value, error = (
        _of_many(distances, prior)
        if exact is None
        else (exact(distances, prior), np.zeros(len(prior)))
    )
    # no worse than without the model, whatever the rounding
    return BestAccuracy(np.clip(value, prior.max(axis=1), 1.0), error)


def _thresholds(distances: np.ndarray, prior: np.ndarray, a: int, b: int) -> np.ndarray:
    """(log(π_a/π_b) + d²/2)/d: by how many deviations a beats b if a is true, [n].

    The first of equals wins.
    """
    d = distances[:, a, b]
    with np.errstate(divide="ignore", invalid="ignore"):
        odds = np.log(prior[:, a]) - np.log(prior[:, b])
        result = odds / d + d / 2
    first = odds > 0 if a > b else odds >= 0
    result = np.where(d > 0, result, np.where(first, np.inf, -np.inf))
    return np.nan_to_num(result, nan=_FAR, posinf=_FAR, neginf=-_FAR).clip(-_FAR, _FAR)


def _of_two(distances: np.ndarray, prior: np.ndarray) -> np.ndarray:
    return (
        prior * np.stack([ndtr(_thresholds(distances, prior, a, 1 - a)) for a in (0, 1)], axis=1)
    ).sum(axis=1)


def _of_three(distances: np.ndarray, prior: np.ndarray) -> np.ndarray:
    result = np.zeros(len(prior))
    for a, b, c in ((0, 1, 2), (1, 2, 0), (2, 0, 1)):
        d_ab, d_ac, d_bc = distances[:, a, b], distances[:, a, c], distances[:, b, c]
        with np.errstate(divide="ignore", invalid="ignore"):
            correlation = (d_ab**2 + d_ac**2 - d_bc**2) / (2 * d_ab * d_ac)
        # if two answers coincide, one of the two conditions holds or fails for certain
        correlation = np.nan_to_num(correlation, nan=0.0, posinf=0.0, neginf=0.0).clip(-1, 1)
        first, second = _thresholds(distances, prior, a, b), _thresholds(distances, prior, a, c)
        result += prior[:, a] * _bivariate_normal(first, second, correlation)
    return result


def _bivariate_normal(h: np.ndarray, k: np.ndarray, correlation: np.ndarray) -> np.ndarray:
    """P(X ≤ h, Y ≤ k) by Owen's T: ½(Φ(h) + Φ(k)) − T(h, ·) − T(k, ·) − ½[hk < 0], with ±40 for ±∞
    and 1e-300 for 0.
    """
    h, k = (np.where(np.abs(x) < _NEAR, _NEAR, x) for x in (h, k))
    root = np.sqrt(np.maximum((1 - correlation) * (1 + correlation), 1e-30))
    with np.errstate(over="ignore"):
        tails = owens_t(h, (k - correlation * h) / (h * root)) + owens_t(
            k, (h - correlation * k) / (k * root)
        )
    return (ndtr(h) + ndtr(k)) / 2 - tails - np.where(h * k < 0, 0.5, 0.0)


def _of_many(distances: np.ndarray, prior: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The mean of the largest posterior under every answer, and its standard error, [n] each."""
    m = prior.shape[1]
    sources = [
        torch.quasirandom.SobolEngine(m - 1, scramble=True, seed=seed) for seed in range(_SCRAMBLES)
    ]
    drawn = torch.cat([source.draw(_POINTS, dtype=torch.float64) for source in sources])
    # the middle of a point's cell: none is 0
    noise = torch.special.ndtri((drawn + 2.0**-33).clamp(max=1 - 2.0**-33))
    found = []
    size = max(1, _CHUNK_NUMBERS // (len(noise) * m))
    for d, chances in zip(
        torch.as_tensor(distances).split(size), torch.tensor(prior).split(size), strict=True
    ):
        means = _coordinates(d)  # [rows, m, m − 1]
        offset = (chances.clamp(min=_NEAR).log() - means.square().sum(dim=2) / 2)[:, None]
        total = torch.zeros(len(d), _SCRAMBLES, dtype=torch.float64)
        for a in range(m):
            seen = means[:, a, None] + noise  # [rows, points, m − 1]
            largest = torch.softmax(seen @ means.mT + offset, dim=2).amax(dim=2)
            total += chances[:, a, None] * largest.view(len(d), _SCRAMBLES, -1).mean(dim=2)
        found.append(total)
    values = torch.cat(found)
    return values.mean(dim=1).numpy(), (values.std(dim=1) / _SCRAMBLES**0.5).numpy()


def _coordinates(distances: Tensor) -> Tensor:
    """Points with these distances, the widest direction first, [rows, m, m − 1].

    Distances far beyond what noise bridges are shortened, which keeps the digits of the others.
    """
    squares = -(_FAR**4) * torch.expm1(-(distances / _FAR**2).square())
    centred = squares - squares.mean(dim=1, keepdim=True)
    values, vectors = torch.linalg.eigh(-(centred - centred.mean(dim=2, keepdim=True)) / 2)
    return (vectors * values.clamp(min=0).sqrt()[:, None, :]).flip(2)[:, :, :-1]
