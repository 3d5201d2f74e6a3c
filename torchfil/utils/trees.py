"""Tensors in nested tuples, lists and dicts: batches, inputs and outputs.

And reading them without waiting.

The results are those of torch's pytrees, which know more kinds but take many times as long: one
training step walks through its batch a dozen times. So tuples, lists and dicts are walked here, in
loops rather than by recursion where that is possible. Dataclasses and UserDicts are registered with
pytrees when they are first seen.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import UserDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from torchfil.utils.given import Tree

_LEAVES = (type(None), bool, int, float, str)


def tensors_of(tree: Tree) -> list[Tensor]:
    """The tensors of a tree, in the order of its leaves.

    Example:
        >>> import torch
        >>> tensors_of(({"x": torch.zeros(2)}, 3, [torch.ones(1), None]))
        [tensor([0., 0.]), tensor([1.])]
    """
    tensors: list[Tensor] = []
    waiting = [tree]
    while waiting:
        part = waiting.pop()
        kind = type(part)
        if isinstance(part, Tensor):
            tensors.append(part)
        elif kind is tuple or kind is list:
            waiting += part[::-1]
        elif kind is dict:
            waiting += reversed(part.values())
        elif kind not in _LEAVES:
            tensors += [leaf for leaf in flattened(part)[0] if isinstance(leaf, Tensor)]
    return tensors


def form_of(tree: Tree, *, shapes: bool = False) -> Hashable:
    """The tree's structure and everything in it except tensors.

    Equal for trees that differ only in tensors.

    With ``shapes``, the tensors' dtypes and shapes belong to it, without the size of the batch.

    Example:
        >>> import torch
        >>> form_of({"x": torch.zeros(2), "k": 3}) == form_of({"x": torch.ones(5), "k": 3})
        True
        >>> form_of({"x": torch.zeros(2), "k": 3}) == form_of({"x": torch.zeros(2), "k": 4})
        False
        >>> form_of([torch.zeros(2, 3)], shapes=True) == form_of([torch.zeros(5, 3)], shapes=True)
        True
        >>> form_of([torch.zeros(2, 3)], shapes=True) == form_of([torch.zeros(2, 4)], shapes=True)
        False
    """
    form: list[Hashable] = []  # a node, then its children, one after the other
    waiting = [tree]
    while waiting:
        part = waiting.pop()
        kind = type(part)
        if isinstance(part, Tensor):
            form.append((part.shape[1:], part.dtype) if shapes else Tensor)
        elif kind is tuple or kind is list:
            form.append((kind, len(part)))
            waiting += part[::-1]
        elif kind is dict:
            form.append((kind, *part))
            waiting += reversed(part.values())
        elif kind in _LEAVES:
            form.append((kind, part))
        else:
            leaves, structure = flattened(part)
            form.append(
                (
                    kind,
                    repr(structure),
                    *[None if isinstance(leaf, Tensor) else repr(leaf) for leaf in leaves],
                )
            )
            waiting += [leaf for leaf in reversed(leaves) if isinstance(leaf, Tensor)]
    return tuple(form)


def map_tensors(function: Callable[[Tensor], Any], tree: Tree) -> Tree:
    """The tree with ``function`` applied to its tensors; everything else stays.

    Example:
        >>> import torch
        >>> map_tensors(len, ({"x": torch.zeros(2)}, 3, [torch.ones(1), None]))
        ({'x': 2}, 3, [1, None])
    """
    if isinstance(tree, Tensor):
        return function(tree)
    kind = type(tree)
    if kind in _LEAVES:
        return tree
    if kind is tuple or kind is list or kind is dict:
        mapped = []
        for part in tree.values() if kind is dict else tree:
            if isinstance(part, Tensor):
                part = function(part)
            elif type(part) not in _LEAVES:
                part = map_tensors(function, part)
            mapped.append(part)
        return dict(zip(tree, mapped, strict=True)) if kind is dict else kind(mapped)
    leaves, structure = flattened(tree)
    return pytree.tree_unflatten(
        [function(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves], structure
    )


def concatenated(trees: Sequence[object]) -> Any:
    """Several trees of one structure as one: their tensors one after the other, everything else
    from the first.

    Example:
        >>> concatenated([{"x": torch.zeros(1), "k": 3}, {"x": torch.ones(1), "k": 3}])
        {'x': tensor([0., 1.]), 'k': 3}
    """
    if len(trees) == 1:
        return trees[0]
    joined = iter([torch.cat(parts) for parts in zip(*map(tensors_of, trees), strict=True)])
    return map_tensors(lambda _: next(joined), trees[0])


def flattened(tree: object) -> tuple[list[Any], pytree.TreeSpec]:
    """Leaves and structure from torch's pytrees, with which new dataclasses and UserDicts are
    registered.

    Example:
        >>> import torch
        >>> from collections import UserDict
        >>> flattened([UserDict(x=torch.zeros(1)), 3])[0]
        [tensor([0.]), 3]
    """
    while True:
        leaves, structure = pytree.tree_flatten(tree)
        unknown = {
            type(leaf)
            for leaf in leaves
            if isinstance(leaf, UserDict)
            or (dataclasses.is_dataclass(leaf) and not isinstance(leaf, type))
        }
        if not unknown:
            return leaves, structure
        for kind in unknown:
            pytree.register_pytree_node(kind, _parts_of, _with_parts)


@dataclasses.dataclass(frozen=True)
class _Holder:
    """The object that is copied to hold other values.

    Two of one type are equal when structures are compared.
    """

    kind: type
    holder: object = dataclasses.field(compare=False, repr=False)


def _parts_of(holder: Any) -> tuple[list[Any], Any]:
    """The values of a dataclass or a UserDict, and everything needed to make another one with other
    values.
    """
    if isinstance(holder, UserDict):
        return list(holder.data.values()), (_Holder(type(holder), holder), tuple(holder.data))
    names = tuple(part.name for part in dataclasses.fields(holder) if hasattr(holder, part.name))
    return [getattr(holder, name) for name in names], (_Holder(type(holder), holder), names)


def _with_parts(values: Any, context: Any) -> Any:
    made = copy.copy(context[0].holder)
    if isinstance(made, UserDict):
        made.data = dict(zip(context[1], values, strict=True))
        return made
    for name, value in zip(context[1], values, strict=True):
        object.__setattr__(made, name, value)  # works for frozen dataclasses
    return made


def read_later(values: Tensor) -> Callable[[], Tensor]:
    """Start to copy ``values`` to the CPU.

    The returned function waits for the copy and returns it.
    """
    if values.device.type != "cuda":
        return lambda: values.cpu()
    seen = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    seen.copy_(values, non_blocking=True)
    done = torch.cuda.Event()
    done.record(torch.cuda.current_stream(values.device))

    def read() -> Tensor:
        done.synchronize()
        return seen

    return read
