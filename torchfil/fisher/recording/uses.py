"""One use of a layer in a forward pass, before its δ is known, and where the examples lie in its output."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from torchfil.fisher.rules.base import LayerRule
from torchfil.utils.trees import map_tensors, tensors_of

__all__ = ["Layouts", "Use", "Uses", "by_example", "layouts_of"]

Layouts = Mapping[
    str, tuple[int | None, ...]
]  # for each call of a layer, the dimension of the examples; None: there is none


def by_example(tensor: Tensor, dim: int, batch: int) -> Tensor:
    """The tensor as [batch, …], or [batch, k, …] if an example has k rows along ``dim`` (windows).

    Example:
        >>> by_example(torch.zeros(6, 5), 0, 3).shape, by_example(torch.zeros(4, 3), 1, 3).shape
        (torch.Size([3, 2, 5]), torch.Size([3, 4]))
    """
    first = tensor.movedim(dim, 0) if dim else tensor
    return first if len(first) == batch else first.unflatten(0, (batch, -1))


@dataclass
class Use:
    """One use of a layer.

    Attributes:
        name: The layer's name; for an operation, the names of its parameters.
        module: The layer; for an operation, a layer with the same geometry.
        args: Its positional inputs.
        kwargs: Its keyword inputs.
        output: Its output.
        dim: The dimension of the examples in inputs and output; an example may have several rows.
        rule: The rule of an operation; None: the module's rule.
        values: For an operation, its watched weights by local name: functions of parameters.
        told: For a use that a module has reported, its parameters' names in the module by their names in the rule.
    """

    name: str
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Tensor
    dim: int = 0
    rule: LayerRule | None = None
    values: Mapping[str, Tensor] = field(default_factory=dict)
    told: Mapping[str, str] | None = None
    versions: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.versions = self._versions()

    def _versions(self) -> list[int]:
        return [tensor._version for tensor in (self.output, *tensors_of((self.args, self.kwargs)))]

    def was_overwritten(self) -> bool:
        """Whether its inputs or output have been changed in place since then."""
        return self._versions() != self.versions

    def inputs_by_example(self, batch: int) -> tuple[Any, Any]:
        """Its inputs; those that run over the examples like the output are given as [batch, …]."""
        rows = self.output.shape[self.dim]
        if self.dim == 0 and rows == batch:
            return self.args, self.kwargs

        def regrouped(tensor: Tensor) -> Tensor:
            runs = tensor.ndim > self.dim and tensor.shape[self.dim] == rows
            return by_example(tensor, self.dim, batch) if runs else tensor

        inputs: tuple[Any, Any] = map_tensors(regrouped, (self.args, self.kwargs))
        return inputs


class Uses:
    """Notes the uses of layers during a forward pass over ``batch`` examples.

    Args:
        batch: The number of examples.
        clone: Whether to copy inputs and outputs, because the model overwrites them.
        layouts: Where the examples lie, as far as known; None: they are expected in the first dimension.
        learning: Whether to note only the outputs' shapes.

    Attributes:
        noted: The uses in order.
        shapes: If learning: the outputs' shapes by name, in order.
        odd: Whether some output does not have the examples first although the layouts are unknown.
    """

    def __init__(
        self, batch: int, *, clone: bool = False, layouts: Layouts | None = None, learning: bool = False
    ) -> None:
        self.batch = batch
        self.noted: list[Use] = []
        self.shapes: dict[str, list[torch.Size]] = {}
        self.odd = False
        self.learning = learning
        self._clone = clone
        self._layouts = layouts
        self._calls: Counter[str] = Counter()

    def dim_of_examples(self, name: str, shape: torch.Size) -> int | None:
        """The dimension of the examples in the next output of that name; None: there is none, or it is unknown."""
        self.shapes.setdefault(name, []).append(shape)
        turn, self._calls[name] = self._calls[name], self._calls[name] + 1
        if self._layouts is None or name not in self._layouts:
            first = shape[:1] == (self.batch,)
            self.odd = self.odd or (self._layouts is None and not first)
            return 0 if first else None
        dims = self._layouts[name]
        dim = dims[min(turn, len(dims) - 1)]
        fits = dim is not None and len(shape) > dim and shape[dim] % self.batch == 0
        return dim if fits else None

    def take(self, use: Use) -> Tensor:
        """Note a use; return the tensor that the model continues with instead of its output."""
        constant = not use.output.requires_grad
        if constant:
            use.output = use.output.detach().requires_grad_()
        if self._clone:
            use.args, use.kwargs = map_tensors(Tensor.clone, (use.args, use.kwargs))
        use.versions = use._versions()
        self.noted.append(use)
        return use.output.clone() if self._clone or constant else use.output  # a leaf must not be changed in place


def layouts_of(two: Mapping[str, list[torch.Size]], three: Mapping[str, list[torch.Size]]) -> Layouts:
    """Where the examples lie, from the shapes of passes over two and over three examples.

    Example:
        >>> two = {"a": [torch.Size((7, 2))], "b": [torch.Size((9,))]}
        >>> layouts_of(two, {"a": [torch.Size((7, 3))], "b": [torch.Size((9,))]})
        {'a': (1,), 'b': (None,)}
    """
    return {
        name: tuple(_dim_that_grows(a, b) for a, b in zip(shapes, three[name], strict=True))
        for name, shapes in two.items()
        if 0 < len(shapes) == len(three.get(name, ()))
    }


def _dim_that_grows(two: torch.Size, three: torch.Size) -> int | None:
    grows = [dim for dim, (a, b) in enumerate(zip(two, three, strict=False)) if a != b]
    one = len(two) == len(three) and len(grows) == 1 and 3 * two[grows[0]] == 2 * three[grows[0]]
    return grows[0] if one else None
