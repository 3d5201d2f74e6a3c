"""Walking through nested batches gives what torch's pytrees give."""

from __future__ import annotations

from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from torchfil.utils.trees import form_of, map_tensors, tensors_of

Pair = namedtuple("Pair", "left right")
A, B, C = torch.zeros(2), torch.ones(3), torch.arange(4)
NESTED = (A, 1, [B, {"z": C, "a": None}], 2.5, True)
TREES: list[Any] = [A, None, (), {}, NESTED, {"b": A, "a": (B, B)}, OrderedDict(b=A, a=B)]
TREES += [(Pair(A, Pair(B, C)), object), [torch.nn.Parameter(B), {1, 2}, torch.Size([2]), 1j]]


@pytest.mark.parametrize("tree", TREES, ids=range(len(TREES)))
def test_tensors_and_structure_are_those_of_pytrees(tree: Any) -> None:
    expected = [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]
    assert [id(leaf) for leaf in tensors_of(tree)] == [id(leaf) for leaf in expected]
    mapped = pytree.tree_map(
        lambda leaf: ("seen", id(leaf)) if isinstance(leaf, Tensor) else leaf, tree
    )
    found = map_tensors(lambda leaf: ("seen", id(leaf)), tree)
    assert found == mapped
    assert type(found) is type(mapped)
    assert hash(form_of(tree)) == hash(form_of(tree))


@dataclass(frozen=True)
class _Output:
    logits: Tensor
    names: tuple[str, ...] = ()
    loss: Tensor | None = None


class _Encoding(UserDict):  # type: ignore[type-arg]
    pass


@pytest.mark.parametrize("tree", [_Output(A), (_Encoding(x=A, y=[_Output(A, loss=A)]), 3)], ids=str)
def test_dataclasses_and_user_dicts_are_walked_through(tree: Any) -> None:
    found = tensors_of(tree)
    assert any(leaf is A for leaf in found)
    moved = map_tensors(lambda leaf: leaf + 1, tree)
    assert type(moved) is type(tree)
    assert all(torch.equal(b, a + 1) for a, b in zip(found, tensors_of(moved), strict=True))
    # the first is left as it was
    assert all(a is b for a, b in zip(found, tensors_of(tree), strict=True))
    assert form_of(tree) == form_of(moved)
    in_dims = pytree.tree_map(lambda leaf: 0 if isinstance(leaf, Tensor) else None, tree)
    assert (
        torch.func.vmap(lambda part: tensors_of(part)[0].sum(), in_dims=(in_dims,))(tree).shape
        == A.shape
    )
