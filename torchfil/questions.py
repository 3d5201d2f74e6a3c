"""Questions about an example with finitely many answers: which answer could an attacker infer from
the model?

A question defines one or more alternatives for every example of a batch: the same example with
another answer (another value of a column, another label, another token), or no example at all. For
each example and alternative, the run keeps D = KL(P ‖ P′), where P and P′ are the laws of
everything that training releases with the true example and with the alternative;
:mod:`torchfil.guessing` says what D means for every attacker.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from torchfil.private import Coordinates, Inputs, as_call
from torchfil.utils.trees import map_tensors

__all__ = [
    "Absent",
    "Alternative",
    "Change",
    "Column",
    "Label",
    "OneHot",
    "Question",
    "Region",
    "Token",
    "check_questions",
]

Key = int | str


class Alternative(NamedTuple):
    """A batch with another answer: inputs and targets in the form and shapes of the true ones."""

    inputs: Any
    targets: Any


class Question:
    """What an attacker wants to know about an example; a subclass defines the answers.

    Attributes:
        complete: Whether these are all possible answers, so the true one is always among them.
    """

    complete: ClassVar[bool] = False

    @property
    def answers(self) -> tuple[str, ...]:
        """The names of the alternatives, in order."""
        raise NotImplementedError

    def alternatives(self, inputs: Inputs, targets: object) -> tuple[Alternative | None, ...]:
        """The batch with each of the answers; None: without the example.

        If an answer is the true one of an example, its alternative is the example itself, and D =
        0.

        Args:
            inputs: In the form that the model takes: a tensor, a tuple or a dict; a dict by
                position and name if the model is called with both. Do not change them in place.
            targets: As the loss takes them, or None.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class Absent(Question):
    """Was the example in the data at all (membership)?

    The alternative is the run in which its gradients are left out (zero-out adjacency): n, q and
    the divisor of the noisy sums are the same in both, and public.

    Example:
        >>> Absent().answers
        ('absent',)
    """

    @property
    def answers(self) -> tuple[str, ...]:
        """The only answer, "absent"."""
        return ("absent",)

    def alternatives(self, inputs: Inputs, targets: object) -> tuple[Alternative | None, ...]:
        """One alternative: None, the batch without the example."""
        return (None,)


@dataclass(frozen=True)
class Change(Question):
    """Any change of a batch, defined by functions.

    Attributes:
        function: ``function(inputs, targets) -> (inputs, targets)``, which returns the alternative
            for every example of the batch; or several such functions by the name of the answer.

    Example:
        >>> darker = Change(lambda inputs, targets: (inputs * 0.5, targets))
        >>> darker.alternatives(torch.ones(1, 2), None)[0].inputs
        tensor([[0.5000, 0.5000]])
    """

    function: (
        Callable[[Any, Any], tuple[Any, Any]] | Mapping[str, Callable[[Any, Any], tuple[Any, Any]]]
    )

    @property
    def _functions(self) -> Mapping[str, Callable[[Any, Any], tuple[Any, Any]]]:
        return self.function if isinstance(self.function, Mapping) else {"changed": self.function}

    @property
    def answers(self) -> tuple[str, ...]:
        """The functions' names."""
        return tuple(map(str, self._functions))

    def alternatives(self, inputs: Inputs, targets: object) -> tuple[Alternative | None, ...]:
        """The functions' results; each function gets copies, which it may change."""
        return tuple(
            _called(name, function, inputs, targets) for name, function in self._functions.items()
        )


def _called(
    name: str, function: Callable[[Any, Any], Any], inputs: object, targets: object
) -> Alternative:
    given = function(*map_tensors(Tensor.clone, (inputs, targets)))
    if not (isinstance(given, tuple) and len(given) == 2):
        raise TypeError(
            f"the answer {name!r} of Change returned a {type(given).__name__}; its function must "
            "return the pair (inputs, targets)"
        )
    return Alternative(*given)


@dataclass(frozen=True)
class Column(Question):
    """Another value of one column of a table: fixed values, or the true value plus a change.

    Attributes:
        column: The column's number, along the last dimension of the input.
        values: The possible values.
        by: Changes of the true value, instead of ``values``: (10.0,) for an age that is ten years
            higher.
        names: The answers' names; None: the values.
        input: The position or name of the input.

    Example:
        >>> Column(0, by=(10.0,)).alternatives(torch.tensor([[50.0, 1.0]]), None)[0].inputs
        tensor([[60.,  1.]])
    """

    column: int
    values: Sequence[float] = ()
    by: Sequence[float] = ()
    names: Sequence[str] | None = None
    input: Key = 0

    def __post_init__(self) -> None:
        if bool(self.values) == bool(self.by):
            raise ValueError(f"Column({self.column}) needs either values= or by=, not both")
        _check_names(self.names, len(self.values or self.by))

    @property
    def answers(self) -> tuple[str, ...]:
        """The values, or the changes with their sign."""
        return _named(
            self.names, [*(f"{value:g}" for value in self.values), *(f"{by:+g}" for by in self.by)]
        )

    def alternatives(self, inputs: Inputs, targets: object) -> tuple[Alternative | None, ...]:
        """The column with each value."""

        def fill(tensor: Tensor, value: float) -> None:
            tensor[..., self.column] = value if self.values else tensor[..., self.column] + value

        return _filled(inputs, targets, self.input, fill, self.values or self.by)


@dataclass(frozen=True)
class OneHot(Question):
    """Another value of an attribute that is coded in several columns, one of them 1 and the others
    0.

    Attributes:
        columns: The columns' numbers, along the last dimension of the input; each column is an
            answer.
        names: The names of the columns' answers; None: the column numbers.
        dropped: The name of one more answer, which has no column: all columns are low.
        high: The value that means "this one" (one value per column if columns are standardised).
        low: The value that means "not this one" (likewise).
        input: The position or name of the input.

    Example:
        >>> [
        ...     a.inputs.tolist()
        ...     for a in OneHot((0, 1)).alternatives(torch.tensor([[1.0, 0.0, 7.0]]), None)
        ... ]
        [[[1.0, 0.0, 7.0]], [[0.0, 1.0, 7.0]]]
    """

    complete: ClassVar[bool] = True
    columns: Sequence[int]
    names: Sequence[str] | None = None
    dropped: str | None = None
    high: float | Sequence[float] = 1.0
    low: float | Sequence[float] = 0.0
    input: Key = 0

    def __post_init__(self) -> None:
        count, several = len(self.columns), len(self.columns) + (self.dropped is not None) > 1
        if not several:
            raise ValueError(
                f"OneHot needs at least two answers, got the columns {list(self.columns)}; use "
                "Column"
            )
        _check_names(self.names, count)
        for name, value in (("high", self.high), ("low", self.low)):
            given = len(value) if isinstance(value, Sequence) else count
            if given != count:
                raise ValueError(f"OneHot: {name} has {given} values for {count} columns")

    @property
    def answers(self) -> tuple[str, ...]:
        """The answer without a column, if there is one, then one answer per column."""
        named = _named(self.names, [f"column {column}" for column in self.columns])
        return named if self.dropped is None else (self.dropped, *named)

    def alternatives(self, inputs: Inputs, targets: object) -> tuple[Alternative | None, ...]:
        """Each column high and the others low.

        Before these, all columns low if that is an answer.
        """

        def fill(tensor: Tensor, place: int) -> None:
            for k, column in enumerate(self.columns):
                value = self.high if k == place else self.low
                tensor[..., column] = value[k] if isinstance(value, Sequence) else value

        first = 0 if self.dropped is None else -1
        return _filled(inputs, targets, self.input, fill, range(first, len(self.columns)))


@dataclass(frozen=True)
class Label(Question):
    """Another label: every class, or every value that the target can have, is an answer.

    Attributes:
        num_classes: How many classes there are; targets are class numbers, or class probabilities
            [batch, classes].
        names: The answers' names; None: the classes' numbers, or the values.
        values: The target's possible values, instead of ``num_classes``, for targets [batch] that
            are numbers.

    Example:
        >>> [
        ...     a.targets.tolist()
        ...     for a in Label(2).alternatives(torch.zeros(2, 1), torch.tensor([0, 1]))
        ... ]
        [[0, 0], [1, 1]]
    """

    complete: ClassVar[bool] = True
    num_classes: int | None = None
    names: Sequence[str] | None = None
    values: Sequence[float] = ()

    def __post_init__(self) -> None:
        classes, values = self.num_classes, len(self.values)
        if not (values > 0 if classes is None else classes > 1 and values == 0):
            raise ValueError(
                f"Label(num_classes={classes}) needs two classes at least, or values= instead"
            )
        _check_names(self.names, len(self._labels))

    @property
    def _labels(self) -> Sequence[float]:
        return self.values if self.num_classes is None else range(self.num_classes)

    @property
    def answers(self) -> tuple[str, ...]:
        """The names of classes or values."""
        return _named(self.names, [f"{label:g}" for label in self._labels])

    def alternatives(self, inputs: Inputs, targets: object) -> tuple[Alternative | None, ...]:
        """The batch with each label as everybody's target."""
        if not isinstance(targets, Tensor):
            raise TypeError(
                f"Label needs a tensor of targets, got {type(targets).__name__}; use Change"
            )

        def labelled(label: Any) -> Tensor:
            if self.num_classes is None or not targets.is_floating_point() or targets.ndim == 1:
                return torch.full_like(targets, label)
            result = torch.zeros_like(targets)
            result[..., label] = 1
            return result

        return tuple(Alternative(inputs, labelled(label)) for label in self._labels)


@dataclass(frozen=True)
class Token(Question):
    """Another token at one position of a sequence.

    Attributes:
        position: The position in the sequence, along the second dimension of the input.
        values: The token numbers that are answers.
        names: The answers' names; None: the numbers.
        input: The position or name of the input.

    Example:
        >>> Token(1, (7,)).alternatives(torch.tensor([[3, 4, 5]]), None)[0].inputs
        tensor([[3, 7, 5]])
    """

    position: int
    values: Sequence[int]
    names: Sequence[str] | None = None
    input: Key = 0

    def __post_init__(self) -> None:
        _check_names(self.names, len(self.values))

    @property
    def answers(self) -> tuple[str, ...]:
        """The tokens' names."""
        return _named(self.names, map(str, self.values))

    def alternatives(self, inputs: Inputs, targets: object) -> tuple[Alternative | None, ...]:
        """The sequence with each token at that position."""

        def fill(tensor: Tensor, token: int) -> None:
            tensor[:, self.position] = token

        return _filled(inputs, targets, self.input, fill, self.values)


@dataclass(frozen=True, eq=False)
class Region(Question):
    """The input with a part hidden: a superpixel greyed out, or some columns set to their mean.

    Attributes:
        coordinates: A boolean mask that broadcasts to one example
            (:func:`torchfil.private.superpixel` makes one), or numbers or a slice along the last
            dimension.
        value: The value that replaces this part.
        input: The position or name of the input.

    Example:
        >>> mask = torch.tensor([[True, False], [False, False]])
        >>> Region(mask, 0.5).alternatives(torch.ones(1, 2, 2), None)[0].inputs
        tensor([[[0.5000, 1.0000],
                 [1.0000, 1.0000]]])
    """

    coordinates: Coordinates
    value: float = 0.5
    input: Key = 0

    @property
    def answers(self) -> tuple[str, ...]:
        """The only answer, "blotted out"."""
        return ("blotted out",)

    def alternatives(self, inputs: Inputs, targets: object) -> tuple[Alternative | None, ...]:
        """The batch with this value in the region."""

        def fill(tensor: Tensor, value: float) -> None:
            where = self.coordinates
            if isinstance(where, Tensor) and where.dtype == torch.bool:
                tensor.masked_fill_(where.to(tensor.device), value)
            else:
                tensor[..., where] = value

        return _filled(inputs, targets, self.input, fill, (self.value,))


def check_questions(questions: Mapping[str, Question]) -> dict[str, Question]:
    """The questions by name, checked.

    Raises:
        TypeError: This is no mapping from names to questions.
        ValueError: A question has no answers, or two answers with one name.
    """
    if not isinstance(questions, Mapping):
        raise TypeError(
            f"questions={questions!r} must name each question: questions={{'member': Absent()}}"
        )
    for name, question in questions.items():
        if not isinstance(name, str) or not name:
            raise TypeError(f"the question {name!r} needs a string as its name")
        if not isinstance(question, Question):
            raise TypeError(
                f"the question {name!r} is {question!r}; give one of torchfil.questions, such as "
                "Absent()"
            )
        answers = question.answers
        if not len(set(answers)) == len(answers) > 0:
            raise ValueError(
                f"the question {name!r} needs answers with different names, got {list(answers)}"
            )
    return dict(questions)


def _check_names(names: Sequence[str] | None, count: int) -> None:
    given = count if names is None else len(names)
    if given != count:
        raise ValueError(
            f"names has {given} entries for {count} answers; give one for each, in order"
        )


def _named(names: Sequence[str] | None, otherwise: Iterable[str]) -> tuple[str, ...]:
    return tuple(otherwise if names is None else names)


def _filled(
    inputs: object,
    targets: object,
    key: Key,
    fill: Callable[[Tensor, Any], None],
    values: Iterable[object],
) -> tuple[Alternative, ...]:
    """The batch with each value: ``fill(tensor, value)`` puts it into a copy of one input."""

    def changed(tensor: Tensor, value: object) -> Tensor:
        copy = tensor.clone()
        fill(copy, value)
        return copy

    return tuple(
        Alternative(_with_input(inputs, key, partial(changed, value=value)), targets)
        for value in values
    )


def _with_input(inputs: Any, key: Key, change: Callable[[Tensor], Tensor]) -> Any:
    """The inputs with this one changed."""
    if isinstance(inputs, Mapping):
        if key not in inputs:
            raise ValueError(
                f"input={key!r} is unknown: the model's inputs are {list(inputs)}; pass one of them"
            )
        return {**inputs, key: change(inputs[key])}
    args = as_call(inputs)[0]
    if not (isinstance(key, int) and -len(args) <= key < len(args)):
        raise ValueError(
            f"input={key!r} is not one of the model's {len(args)} positional inputs; the first is 0"
        )
    if isinstance(inputs, Tensor):
        return change(inputs)
    place = key % len(args)
    return (*args[:place], change(args[place]), *args[place + 1 :])
