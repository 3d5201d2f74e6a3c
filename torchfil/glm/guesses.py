r"""What any attacker can infer from a released linear model: questions with finitely many answers, in closed form.

With answer a, the minimiser is w*_a (see :mod:`torchfil.glm.refits`) and the release is N(w*_a, σ²I). The attacker sees
the release and knows everything except the answer, including the other records. Telling normal distributions apart has
a known solution:

    KL = Δ²/(2σ²),     TPR = Φ(Φ⁻¹(FPR) + Δ/σ),     Δ = ‖w*_a − w*_b‖.

No attacker does better, biased or not, and the likelihood ratio attains it: bound and attack are the same. Random are
the noise of the release and, for the accuracy, the true answer (drawn from the prior).

A question says, for every record, what it would be under each of the m answers, which answer is true, and how common
the answers are. It may ask which level a nominal attribute has, which label, whether a number is larger by some amount,
or whether the record is there at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from scipy.special import ndtr, ndtri

from torchfil.glm.best_attacker import best_accuracy
from torchfil.glm.refits import Alternative, GLMView, minimiser_changes
from torchfil.viz.common import as_array

if TYPE_CHECKING:
    from torchfil.glm.model import GeneralizedLinearModel

__all__ = ["Absent", "Asked", "Guess", "Label", "NominalAttribute", "Question", "Shift", "guess"]


@dataclass(frozen=True, eq=False)
class Asked:
    """A question put to a training set.

    Attributes:
        answers: Their names, m of them.
        alternatives: What each record would be under each of the m answers.
        truth: The number of every record's own answer, [n].
        shares: How common each answer is among the records; equal if the data do not show it, [m].
    """

    answers: tuple[str, ...]
    alternatives: Sequence[Alternative]
    truth: np.ndarray
    shares: np.ndarray


class Question(Protocol):
    """Something with finitely many answers that an attacker wants to know about a record."""

    def ask(self, view: GLMView) -> Asked:
        """The answers for every record of a training set."""


@dataclass(frozen=True, eq=False)
class NominalAttribute:
    """Which of k levels does an attribute, given by columns of X, have?

    Attributes:
        columns: Its c columns.
        codes: The columns' values for each level, [k, c].
        names: The levels' names; by default their codes.

    Example:
        >>> NominalAttribute([1], np.array([[0.0], [1.0]])).levels(np.array([[5.0, 1.0], [6.0, 0.0]]))
        array([1, 0])
    """

    columns: Sequence[int]
    codes: np.ndarray
    names: Sequence[str] | None = None

    def levels(self, X: Any) -> np.ndarray:
        """The number of every row's level, [n].

        Raises:
            ValueError: A row's columns do not hold the code of any level.
        """
        values = as_array(X).astype(float)[:, list(self.columns)]
        where = f"columns {list(self.columns)}"
        return _places(values, np.asarray(self.codes, dtype=float), where, "codes; give every level's code")

    def ask(self, view: GLMView) -> Asked:
        """Every level in turn; see :class:`Question`."""
        codes = torch.as_tensor(np.asarray(self.codes, dtype=float))
        names = [_shown(code) for code in codes.tolist()] if self.names is None else self.names
        alternatives = [Alternative.with_values(view, self.columns, code) for code in codes]
        truth = self.levels(view.X)
        return Asked(tuple(names), alternatives, truth, _shares(truth, len(codes)))


@dataclass(frozen=True, eq=False)
class Label:
    """Which of these values does the target have?

    Attributes:
        values: The k values of the target: ``(0, 1)`` for a logistic regression.
        names: The values' names.
    """

    values: Sequence[float]
    names: Sequence[str] | None = None

    def ask(self, view: GLMView) -> Asked:
        """Every value in turn; see :class:`Question`."""
        names = [f"{value:g}" for value in self.values] if self.names is None else self.names
        alternatives = [Alternative(view.X, torch.full_like(view.y, value)) for value in self.values]
        values = np.asarray(self.values, dtype=float)[:, None]
        truth = _places(as_array(view.y)[:, None], values, "the target", "values; give every value")
        return Asked(tuple(names), alternatives, truth, _shares(truth, len(values)))


@dataclass(frozen=True, eq=False)
class Shift:
    """Is a number as it is, or larger by some amount?

    Attributes:
        by: The amount.
        column: The column; None: the target.
    """

    by: float
    column: int | None = None

    def ask(self, view: GLMView) -> Asked:
        """The record as it is, then the other; see :class:`Question`."""
        if self.column is None:
            moved = Alternative(view.X, view.y + self.by)
        else:
            moved = Alternative.with_values(view, [self.column], view.X[:, [self.column]] + self.by)
        return _against(view, moved, "as it is", f"{self.by:+g}")


@dataclass(frozen=True)
class Absent:
    """Is the record in the training set, or was the model fitted to the n − 1 others?"""

    def ask(self, view: GLMView) -> Asked:
        """The record present, then absent; see :class:`Question`."""
        return _against(view, Alternative(view.X, view.y, present=False), "present", "absent")


@dataclass(frozen=True, eq=False)
class Guess:
    """How well the best attacker answers a question, record by record. Confidential: it depends on private data.

    Attributes:
        answers: Their names, m of them.
        truth: The number of every record's own answer, [n].
        prior: How likely the attacker considers each answer before seeing the release, [n, m].
        distances: Δ/σ between the answers' models, [n, m, m].
        accuracy: How often the best attacker is right if answers are drawn from the prior, [n]; no attacker is right
            more often.
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
        """D = KL(P_true ‖ P_answer) = Δ²/(2σ²) of every record and answer, [n, m]; 0 for its own answer."""
        return self._from_truth() ** 2 / 2

    def true_positive_rate(self, false_positive_rate: float, answer: int | str | None = None) -> np.ndarray:
        """How often the best test names a record's own answer, [n], at this rate of naming it wrongly.

        Φ(Φ⁻¹(FPR) + Δ/σ): exact, and attained by the likelihood ratio.

        Args:
            false_positive_rate: A number in (0, 1).
            answer: The other answer, by number or name (FPR for the records whose own it is); None: for each record
                the one that is easiest to distinguish from its own.
        """
        if not 0 < false_positive_rate < 1:
            raise ValueError(f"false_positive_rate={false_positive_rate} must lie between 0 and 1")
        distance = self._from_truth()
        shift = distance.max(axis=1) if answer is None else distance[:, self._number(answer)]
        return ndtr(ndtri(false_positive_rate) + shift)

    def table(self, false_positive_rate: float = 0.01) -> dict[str, np.ndarray]:
        """One column [n] each: ``prior_accuracy``, ``accuracy``, ``divergence``, ``true_positive_rate``.

        The last two are for the answer that is easiest to distinguish from the record's own. Pass the table to
        ``pandas.DataFrame``.
        """
        return {
            "prior_accuracy": self.prior_accuracy,
            "accuracy": self.accuracy,
            "divergence": self.divergence.max(axis=1),
            "true_positive_rate": self.true_positive_rate(false_positive_rate),
        }

    def _from_truth(self) -> np.ndarray:
        return self.distances[np.arange(len(self.truth)), self.truth]

    def _number(self, answer: int | str) -> int:
        if isinstance(answer, str) and answer in self.answers:
            return self.answers.index(answer)
        if isinstance(answer, int) and 0 <= answer < len(self.answers):
            return answer
        raise ValueError(f"answer={answer!r} is not one of {list(self.answers)}; give one of these, or its number")


def guess(
    model: GeneralizedLinearModel,
    X: Any,
    y: Any,
    question: Question,
    sigma: float,
    *,
    prior: Any = None,
    progress: bool = False,
) -> Guess:
    """How well any attacker can answer a question about each record from the release w* + N(0, σ²I).

    The attacker knows the training procedure (including σ and the sample weights) and everything except the answer for
    this record. The numbers are exact: the best attacker attains them.

    Args:
        model: A fitted model of one margin.
        X: The training inputs, [n, d].
        y: The training targets, [n].
        question: ``NominalAttribute``, ``Label``, ``Shift``, ``Absent``, or your own.
        sigma: σ of the release.
        prior: How likely each answer is before the model is seen, [m] or [n, m]. None: as common as among the records;
            "uniform": all equal.
        progress: Whether to show a progress bar.

    Example:
        >>> from torchfil.glm import Label, LinearRegression
        >>> X, y = np.ones((4, 1)), np.array([0.0, 0.0, 1.0, 1.0])
        >>> model = LinearRegression().fit(X, y)  # the mean of y: one label moves it by 1/4
        >>> found = guess(model, X, y, Label([0, 1]), sigma=0.25)
        >>> found.divergence.round(3).tolist()
        [[0.0, 0.5], [0.0, 0.5], [0.5, 0.0], [0.5, 0.0]]
        >>> found.accuracy.round(3)  # Φ(1/2)
        array([0.691, 0.691, 0.691, 0.691])
    """
    if not sigma > 0:
        raise ValueError(f"sigma={sigma} must be positive: without noise the release gives everything away")
    view = GLMView.build(model, X, y)
    asked = question.ask(view)
    n, m = len(view.X), len(asked.answers)
    if prior is None:
        prior = asked.shares
    elif isinstance(prior, str) and prior == "uniform":
        prior = np.full(m, 1 / m)
    chances = _checked_prior(prior, n, m)

    # distances between the answers' models; |a − b| directly, since a² + b² − 2ab cancels
    changes = minimiser_changes(view, asked.alternatives, progress=progress)  # [n, m, p]
    apart = [torch.linalg.vector_norm(changes - changes[:, [a]], dim=2) for a in range(m)]
    distances = as_array(torch.stack(apart, dim=1)) / sigma
    best = best_accuracy(distances, chances)
    return Guess(asked.answers, asked.truth, chances, distances, best.value, best.error)


def _checked_prior(prior: Any, n: int, m: int) -> np.ndarray:
    """The checked prior as [n, m]."""
    chances = as_array(prior).astype(float)
    if chances.shape not in ((m,), (n, m)):
        raise ValueError(
            f"prior has shape {list(chances.shape)}; it must be [{m}], a number for each answer, or [{n}, {m}]"
        )
    wrong = ~((chances >= 0).all(axis=-1) & (np.abs(chances.sum(axis=-1) - 1) < 1e-6))
    if wrong.any():
        shown = chances if chances.ndim == 1 else chances[wrong.argmax()]
        raise ValueError(f"prior={shown.tolist()} must be numbers ≥ 0 that sum to 1; divide them by their sum")
    return np.broadcast_to(chances, (n, m))


def _against(view: GLMView, other: Alternative, own_name: str, other_name: str) -> Asked:
    """The record as it is against one alternative; neither is known to be more common."""
    own = Alternative(view.X, view.y)
    return Asked((own_name, other_name), [own, other], np.zeros(len(view.X), dtype=int), np.full(2, 0.5))


def _places(values: np.ndarray, codes: np.ndarray, where: str, remedy: str) -> np.ndarray:
    """Which of the codes [k, c] each row [n, c] holds, [n]."""
    equal = (values[:, None, :] == codes).all(axis=2)  # [n, k]
    if not equal.any(axis=1).all():
        wrong = int(equal.any(axis=1).argmin())
        raise ValueError(
            f"row {wrong} holds {values[wrong].tolist()} in {where}, which is not one of the {codes.tolist()} {remedy}"
        )
    return equal.argmax(axis=1)


def _shares(truth: np.ndarray, answers: int) -> np.ndarray:
    return np.bincount(truth, minlength=answers) / len(truth)


def _shown(code: list[float]) -> str:
    return ", ".join(f"{value:g}" for value in code)
