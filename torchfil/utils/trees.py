"""Tensors in nested tuples, lists and dicts, as batches, inputs and outputs come.

The same as torch's pytrees give, which know more kinds and take many times as long: one training step walks through
its batch a dozen times.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

__all__ = ["form_of", "kind_of", "map_tensors", "tensors_of"]

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
        tensors += [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def form_of(tree: Any) -> Hashable:
    """The tree's structure and all that is no tensor in it; equal for trees that differ in tensors alone.

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
    leaves, structure = pytree.tree_flatten(tree)
    return (kind, repr(structure), *[Tensor if isinstance(leaf, Tensor) else repr(leaf) for leaf in leaves])


def kind_of(tree: Any) -> Hashable:
    """:func:`form_of` with the tensors' dtypes and shapes, the size of the batch aside.

    Example:
        >>> import torch
        >>> kind_of([torch.zeros(2, 3)]) == kind_of([torch.zeros(5, 3)]), kind_of([torch.zeros(2, 4)]) == kind_of([])
        (True, False)
    """
    return tuple((leaf.shape[1:], leaf.dtype) for leaf in tensors_of(tree)), form_of(tree)


def map_tensors(function: Callable[[Tensor], Any], tree: Any) -> Any:
    """The tree with ``function`` applied to its tensors; all else stays.

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
    return pytree.tree_map(lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf, tree)
