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
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from scipy.special import ndtr, ndtri

from torchfil.glm.best_attacker import best_accuracy
from torchfil.glm.refits import GLMView, minimiser_changes
from torchfil.questions import Alternative, Question
from torchfil.utils.errors import require
from torchfil.viz.common import as_array

if TYPE_CHECKING:
    from torchfil.datasets import TabularTask
    from torchfil.glm.model import GeneralizedLinearModel

__all__ = ["Asked", "BestGuess", "NominalAttribute", "Shift", "ask", "guess"]


@dataclass(frozen=True, eq=False)
class NominalAttribute(Question):
    """Which of k levels does an attribute, given by columns of X, have?

    Attributes:
        columns: Its c columns.
        codes: The columns' values for each level, [k, c].
        names: The levels' names; by default their codes.

    Example:
        >>> NominalAttribute([1], np.array([[0.0], [1.0]])).levels(np.array([[5.0, 1.0], [6.0, 0.0]]))
        array([1, 0])
    """

    complete: ClassVar[bool] = True
    columns: Sequence[int]
    codes: np.ndarray
    names: Sequence[str] | None = None

    @classmethod
    def of_task(cls, task: TabularTask, name: str) -> NominalAttribute:
        """A nominal attribute of a table, by its name."""
        codes = np.stack([task.encode(name, level) for level in task.levels[name]])
        return cls(list(task.attributes[name]), codes, task.levels[name])

    @property
    def answers(self) -> tuple[str, ...]:
        """The levels' names."""
        shown = (", ".join(f"{value:g}" for value in code) for code in np.asarray(self.codes, dtype=float))
        return tuple(shown if self.names is None else self.names)

    def alternatives(self, inputs: Any, targets: Any) -> tuple[Alternative | None, ...]:
        """The columns with each level's code."""

        def with_code(code: np.ndarray) -> Any:
            changed = inputs.clone()
            changed[:, list(self.columns)] = torch.as_tensor(code).to(inputs)
            return changed

        return tuple(Alternative(with_code(code), targets) for code in np.asarray(self.codes, dtype=float))

    def levels(self, X: Any) -> np.ndarray:
        """The number of every row's level, [n].

        Raises:
            ValueError: A row's columns do not hold the code of any level.
        """
        values, codes = as_array(X).astype(float)[:, list(self.columns)], np.asarray(self.codes, dtype=float)
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
        moved = inputs.clone()
        moved[:, self.column] += self.by
        return (Alternative(moved, targets),)


@dataclass(frozen=True, eq=False)
class Asked:
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


def ask(question: Question, view: GLMView) -> Asked:
    """The answers for every record of a training set.

    If the question names all possible answers, a record's own is the one that leaves it as it is. Otherwise its own
    comes first ("present", "as it is"), and none is known to be more common.
    """
    inputs = view.X[:, : view.num_inputs]
    given, names = question.alternatives(inputs, view.y), question.answers
    if not question.complete:
        own = "present" if any(other is None for other in given) else "as it is"
        shares = np.full(1 + len(given), 1 / (1 + len(given)))
        return Asked((own, *names), [Alternative(inputs, view.y), *given], np.zeros(len(inputs), dtype=int), shares)
    same = [~view.changed(*view.with_answer(other)) for other in given]
    truth = _own_answers(as_array(torch.stack(same, dim=1)), question)
    return Asked(names, given, truth, np.bincount(truth, minlength=len(names)) / len(truth))


def _own_answers(holds: np.ndarray, question: Question) -> np.ndarray:
    """The number of the first answer that holds for each row, [n], of booleans [n, m]."""
    lost = np.flatnonzero(~holds.any(axis=1))[:5].tolist()
    what = f"{type(question).__name__}, {list(question.answers)}"
    require(not lost, f"rows {lost} hold none of the answers of {what}; give every answer that occurs")
    return holds.argmax(axis=1)


@dataclass(frozen=True, eq=False)
class BestGuess:
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
        require(0 < false_positive_rate < 1, f"false_positive_rate={false_positive_rate} must lie between 0 and 1")
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
        known = answer in self.answers or answer in range(len(self.answers))
        require(known, f"answer={answer!r} is not one of {list(self.answers)}; give one of these, or its number")
        return self.answers.index(answer) if isinstance(answer, str) else answer


def guess(
    model: GeneralizedLinearModel,
    X: Any,
    y: Any,
    question: Question,
    sigma: float,
    *,
    prior: Any = None,
    progress: bool = False,
) -> BestGuess:
    """How well any attacker can answer a question about each record from the release w* + N(0, σ²I).

    The attacker knows the training procedure (including σ and the sample weights) and everything except the answer for
    this record. The numbers are exact: the best attacker attains them.

    Args:
        model: A fitted model of one margin.
        X: The training inputs, [n, d].
        y: The training targets, [n].
        question: ``NominalAttribute``, ``Label``, ``Shift``, ``Absent``, or any of :mod:`torchfil.questions` about a
            table.
        sigma: σ of the release.
        prior: How likely each answer is before the model is seen, [m] or [n, m]. None: as common as among the records;
            "uniform": all equal.
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
    require(sigma > 0, f"sigma={sigma} must be positive: without noise the release gives everything away")
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


def _checked_prior(prior: Any, n: int, m: int) -> np.ndarray:
    """The checked prior as [n, m]."""
    chances = as_array(prior).astype(float)
    shape = list(chances.shape)
    require(
        shape in ([m], [n, m]), f"prior has shape {shape}; it must be [{m}], a number for each answer, or [{n}, {m}]"
    )
    fine = (chances >= 0).all() and (np.abs(chances.sum(axis=-1) - 1) < 1e-6).all()
    require(bool(fine), f"prior={prior} must be numbers ≥ 0 that sum to 1; divide them by their sum")
    return np.broadcast_to(chances, (n, m))
