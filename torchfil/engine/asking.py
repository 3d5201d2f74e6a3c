"""The alternatives of a batch: its examples as the questions of the run change them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torchfil.private import Examples, as_call, as_given, check_finite
from torchfil.questions import Alternative, Question
from torchfil.utils.trees import tensors_of

__all__ = ["Places", "with_alternatives"]

Places = tuple[tuple[str, tuple[int | None, ...]], ...]  # by question: the alternative of each answer; None: absent


def with_alternatives(
    examples: Examples, questions: Mapping[str, Question], *, check_values: bool
) -> tuple[Examples, Places]:
    """The examples with their alternatives, as the questions define them.

    Args:
        examples: A batch.
        questions: By name.
        check_values: Whether to look for NaN and infinity, which has to wait for the device.

    Raises:
        ValueError: An alternative has another form or shape than the batch, or is not finite.
    """
    args, kwargs, targets = examples.public
    inputs = as_given(args, kwargs)
    alternatives: list[Examples] = []
    places: list[tuple[str, tuple[int | None, ...]]] = []
    for name, question in questions.items():
        answers = question.alternatives(inputs, targets)
        if len(answers) != len(question.answers):
            raise ValueError(
                f"the question {name!r} gave {len(answers)} alternatives for its {len(question.answers)} answers"
            )
        own: list[int | None] = []
        for answer, other in zip(question.answers, answers, strict=True):
            own.append(None if other is None else len(alternatives))
            if other is not None:
                what = f"the answer {answer!r} to the question {name!r}"
                alternatives.append(_laid_out(what, other, examples, check_values))
        places.append((name, tuple(own)))
    return replace(examples, alternatives=tuple(alternatives)), tuple(places)


def _as_call(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The inverse of :func:`as_given`."""
    args, kwargs = as_call(inputs)
    positions = sorted(key for key in kwargs if isinstance(key, int))
    return (*args, *(kwargs.pop(place) for place in positions)), kwargs


def _laid_out(what: str, other: Alternative, examples: Examples, check_values: bool) -> Examples:
    args, kwargs = _as_call(other.inputs)
    public = (args, kwargs, other.targets)
    given, true = tensors_of(public), tensors_of(examples.public)
    shapes, wanted = ([(tuple(leaf.shape), leaf.dtype) for leaf in leaves] for leaves in (given, true))
    if shapes != wanted:
        raise ValueError(
            f"{what} has tensors of {shapes}, and the batch has {wanted}; an alternative may differ only in values"
        )
    try:
        if check_values:
            check_finite(*public)
        return replace(examples.with_values(public), clip_weights=None)
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from error
