"""A batch as a model takes it: its inputs by name, its values."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchfil.utils.given import Args, Kwargs, Targets, Tree
from torchfil.utils.trees import map_tensors, tensors_of

Inputs = Tensor | Sequence[Any] | Mapping[str, Any]
Key = int | str
Path = tuple[Any, ...]
Public = Any  # a tuple of positional inputs, keyword inputs and targets

# the input that says which of its owner's rows each row is, [batch, K]; −1: padding
ROWS = "rows_of_owner"


def as_given(args: tuple[object, ...], kwargs: Mapping[str, object]) -> Any:
    """A call's inputs in the form of a batch; a dict by position and name if the call has both.

    Example:
        >>> as_given((1,), {}), as_given((1, 2), {}), as_given((1,), {"mask": 2})
        (1, (1, 2), {0: 1, 'mask': 2})
    """
    if not kwargs:
        return args[0] if len(args) == 1 else args
    return {**dict(enumerate(args)), **kwargs}


class Input(NamedTuple):
    """One input: its place in (args, kwargs), its value, and what the model calls it."""

    path: Path
    value: Tree
    name: str = ""


def named_inputs(
    args: Args, kwargs: Mapping[str, Any], model: nn.Module | None = None
) -> dict[Key, Input]:
    """All inputs by position or name; inputs inside dicts, lists and tuples have a name with dots.

    The model's ``forward`` tells the names of positional inputs.

    Example:
        >>> list(named_inputs((1, {"age": 2}), {"visit": {"dose": 3, "days": [4, 5]}}))
        [0, '1.age', 'visit.dose', 'visit.days.0', 'visit.days.1']
        >>> list(named_inputs(({"age": 2},), {}))  # a model that takes one dict
        ['age']
        >>> named_inputs((1,), {}, nn.Linear(1, 1))[0].name
        'input'
    """
    named: dict[Key, Input] = {}
    names = () if model is None else _parameter_names(type(model).forward)

    def visit(key: Key, path: Path, value: Tree) -> None:
        if not isinstance(value, dict) and type(value) not in (tuple, list):
            named[key] = Input(
                path, value, names[key] if isinstance(key, int) and key < len(names) else str(key)
            )
            return
        # the only input, so its parts need no prefix
        whole = len(args) == 1 and not kwargs and len(path) == 2
        for part, inner in value.items() if isinstance(value, dict) else enumerate(value):
            visit(str(part) if whole else f"{key}.{part}", (*path, part), inner)

    for place, value in enumerate(args):
        visit(place, (0, place), value)
    for key, value in kwargs.items():
        visit(key, (1, key), value)
    return named


def _parameter_names(forward: Callable[..., object]) -> tuple[str, ...]:
    try:
        parameters = list(inspect.signature(forward).parameters.values())[1:]
    except (TypeError, ValueError):  # not written in Python
        return ()
    return tuple(each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD)


def is_mask(name: str) -> bool:
    """Whether an input of this name holds a mask or positions.

    Such inputs are not private by default.

    Example:
        >>> [
        ...     is_mask(name)
        ...     for name in ("attention_mask", "position_ids", "pixel_values", "position")
        ... ]
        [True, True, False, False]
    """
    return "mask" in name.lower() or name.lower().endswith(("position_ids", "pos_ids"))


def as_rows(
    args: tuple[object, ...], kwargs: Mapping[str, object], targets: object
) -> tuple[Args, Any, Any]:
    """The rows of all owners one after the other: tensors [batch · K, …] instead of [batch, K, …],
    without ``ROWS``.
    """
    others = {key: value for key, value in kwargs.items() if key != ROWS}
    flat: tuple[Args, Any, Any] = map_tensors(
        lambda leaf: leaf.flatten(0, 1), (args, others, targets)
    )
    return flat


def first_example(tree: object) -> Any:
    """Copies of the first rows of all tensors, in new memory; rows of zeros for an empty batch."""
    return map_tensors(
        lambda leaf: leaf[:1].clone() if len(leaf) else leaf.new_zeros((1, *leaf.shape[1:])), tree
    )


def check_finite(args: Args, kwargs: Kwargs, targets: Targets) -> None:
    """Raise an error that names the rows if an input or a target is NaN or infinite.

    Masks may be infinite.
    """
    parts = [(f"inputs[{i}]" if len(args) > 1 else "inputs", part) for i, part in enumerate(args)]
    parts += [*((f"inputs[{key!r}]", part) for key, part in kwargs.items()), ("targets", targets)]
    for name, part in parts:
        for leaf in tensors_of(part):
            if not leaf.is_floating_point() or math.isfinite(leaf.sum(dtype=torch.float64)):
                continue
            strange = leaf.isnan() if is_mask(name) else ~leaf.isfinite()
            rows = strange.reshape(len(leaf), -1).any(dim=1).nonzero().flatten().tolist()
            if rows:
                shown = ", ".join(map(str, rows[:10])) + (", …" if len(rows) > 10 else "")
                column = (
                    f" (the first in column {int(strange[rows[0]].nonzero()[0])})"
                    if leaf.ndim == 2
                    else ""
                )
                raise ValueError(
                    f"{name} has NaN or infinite values in {len(rows)} of {len(leaf)} rows: "
                    f"{shown}. Drop or impute these examples; their FIL is undefined{column}."
                )
