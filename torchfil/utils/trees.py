"""Tensors in nested tuples, lists and dicts: batches, inputs and outputs.

The results are those of torch's pytrees, which know more kinds but take many times as long: one training step walks
through its batch a dozen times. Dataclasses and UserDicts are registered with pytrees when they are first seen.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import UserDict
from collections.abc import Callable, Hashable
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

__all__ = ["flattened", "form_of", "kind_of", "map_tensors", "tensors_of"]

_LEAVES = (type(None), bool, int, float, str)


def tensors_of(tree: Any) -> list[Tensor]:
    """The tensors of a tree, in the order of its leaves.

    Example:
        >>> import torch
        >>> tensors_of(({"x": torch.zeros(2)}, 3, [torch.ones(1), None]))
        [tensor([0., 0.]), tensor([1.])]
    """
    tensors: list[Tensor] = []
    _collect(tree, tensors)
    return tensors


def _collect(tree: Any, tensors: list[Tensor]) -> None:
    kind = type(tree)
    if isinstance(tree, Tensor):
        tensors.append(tree)
    elif kind is tuple or kind is list:
        for part in tree:
            _collect(part, tensors)
    elif kind is dict:
        for part in tree.values():
            _collect(part, tensors)
    elif kind not in _LEAVES:
        tensors += [leaf for leaf in flattened(tree)[0] if isinstance(leaf, Tensor)]


def form_of(tree: Any) -> Hashable:
    """The tree's structure and everything in it except tensors; equal for trees that differ only in tensors.

    Example:
        >>> import torch
        >>> form_of({"x": torch.zeros(2), "k": 3}) == form_of({"x": torch.ones(5), "k": 3})
        True
        >>> form_of({"x": torch.zeros(2), "k": 3}) == form_of({"x": torch.zeros(2), "k": 4})
        False
    """
    kind = type(tree)
    if isinstance(tree, Tensor):
        return Tensor
    if kind is tuple or kind is list:
        return (kind, *[form_of(part) for part in tree])
    if kind is dict:
        return (kind, *[(key, form_of(part)) for key, part in tree.items()])
    if kind in _LEAVES:
        return (kind, tree)
    leaves, structure = flattened(tree)
    return (kind, repr(structure), *[Tensor if isinstance(leaf, Tensor) else repr(leaf) for leaf in leaves])


def kind_of(tree: Any) -> Hashable:
    """:func:`form_of` with the tensors' dtypes and shapes, without the size of the batch.

    Example:
        >>> import torch
        >>> kind_of([torch.zeros(2, 3)]) == kind_of([torch.zeros(5, 3)]), kind_of([torch.zeros(2, 4)]) == kind_of([])
        (True, False)
    """
    return tuple((leaf.shape[1:], leaf.dtype) for leaf in tensors_of(tree)), form_of(tree)


def map_tensors(function: Callable[[Tensor], Any], tree: Any) -> Any:
    """The tree with ``function`` applied to its tensors; everything else stays.

    Example:
        >>> import torch
        >>> map_tensors(len, ({"x": torch.zeros(2)}, 3, [torch.ones(1), None]))
        ({'x': 2}, 3, [1, None])
    """
    kind = type(tree)
    if isinstance(tree, Tensor):
        return function(tree)
    if kind is tuple:
        return tuple([map_tensors(function, part) for part in tree])
    if kind is list:
        return [map_tensors(function, part) for part in tree]
    if kind is dict:
        return {key: map_tensors(function, part) for key, part in tree.items()}
    if kind in _LEAVES:
        return tree
    leaves, structure = flattened(tree)
    mapped = [function(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    return pytree.tree_unflatten(mapped, structure)


def flattened(tree: Any) -> tuple[list[Any], pytree.TreeSpec]:
    """Leaves and structure from torch's pytrees, with which new dataclasses and UserDicts are registered.

    Example:
        >>> import torch
        >>> from collections import UserDict
        >>> flattened([UserDict(x=torch.zeros(1)), 3])[0]
        [tensor([0.]), 3]
    """
    while True:
        leaves, structure = pytree.tree_flatten(tree)
        unknown = {type(leaf) for leaf in leaves if _has_parts(leaf)}
        if not unknown:
            return leaves, structure
        for kind in unknown:
            pytree.register_pytree_node(kind, _parts_of, _with_parts)


def _has_parts(leaf: Any) -> bool:
    return isinstance(leaf, UserDict) or (dataclasses.is_dataclass(leaf) and not isinstance(leaf, type))


def _parts_of(holder: Any) -> tuple[list[Any], Any]:
    """The values of a dataclass or a UserDict, and everything needed to make another one with other values."""
    if isinstance(holder, UserDict):
        return list(holder.data.values()), (_Holder(holder), tuple(holder.data))
    names = tuple(part.name for part in dataclasses.fields(holder) if hasattr(holder, part.name))
    return [getattr(holder, name) for name in names], (_Holder(holder), names)


def _with_parts(values: Any, context: Any) -> Any:
    made = copy.copy(context[0].holder)
    if isinstance(made, UserDict):
        made.data = dict(zip(context[1], values, strict=True))
        return made
    for name, value in zip(context[1], values, strict=True):
        object.__setattr__(made, name, value)  # works for frozen dataclasses
    return made


class _Holder:
    """The object that is copied to hold other values; two of one type are equal when structures are compared."""

    def __init__(self, holder: Any) -> None:
        self.holder = holder

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Holder) and type(self.holder) is type(other.holder)

    def __hash__(self) -> int:
        return hash(type(self.holder))

    def __repr__(self) -> str:
        return type(self.holder).__name__
