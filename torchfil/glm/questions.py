"""Questions with finitely many answers about one record of a linear model's training set.

A question says, for every record, what it would be under each of the m answers, which answer is true, and how common
the answers are. It may ask which level a nominal attribute has, which label, whether a number is larger by some amount,
or whether the record is there at all. :func:`torchfil.glm.guess` computes how often the best attacker is right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from torchfil.glm.refits import Alternative
from torchfil.viz.common import as_array

if TYPE_CHECKING:
    from torchfil.datasets import TabularTask
    from torchfil.glm.view import GLMView

__all__ = ["Absent", "Asked", "Label", "NominalAttribute", "Question", "Shift"]


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

    @classmethod
    def of_task(cls, task: TabularTask, name: str) -> NominalAttribute:
        """A nominal attribute of a table, by its name."""
        codes = np.stack([task.encode(name, level) for level in task.levels[name]])
        return cls(list(task.attributes[name]), codes, task.levels[name])

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
