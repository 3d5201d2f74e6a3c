"""Parameters outside layers: where they meet the examples in a forward pass.

A module without a rule may use a parameter θ anywhere: as the scale of a branch, a table of positions, a class token.
A function of θ alone, θ′ = f(θ) (slices, views, an exponential), is the same for all examples. When θ′ meets something
that depends on the examples, in an elementwise operation or a concatenation, every example gets a separate view of θ′.
The gradient at that view is this example's gradient, and the derivative of f takes it back to θ. If θ′ is the weight of
an operation that is a layer in itself (``F.linear``), that layer's rule serves it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from torchfil.fisher.recording.uses import Use, Uses
from torchfil.fisher.rules.parameters import Operation, operation_of
from torchfil.utils.trees import map_tensors, tensors_of

__all__ = ["Meeting", "WatchedParameters"]

_ELEMENTWISE = frozenset(
    {"add", "addcmul", "clamp", "div", "expand_as", "lerp", "maximum", "minimum", "mul", "pow", "rsub", "sub"}
    | {"true_divide", "where"}
)
_TYPE_OF_ANOTHER = frozenset({"to", "type_as"})  # the other arguments' values do not matter
_ATTENTION = "scaled_dot_product_attention"
_JOINING = frozenset({"cat", "concat", "concatenate"})
_PRODUCTS = frozenset({"bmm", "matmul"})


@dataclass(frozen=True)
class Meeting:
    """Where a function of parameters met the examples.

    Attributes:
        rows: A view of the value for each example, [batch, …]; a leaf.
        value: θ′, attached to the parameters. Broadcast, with the examples first, it gives ``rows``; it has no batch.
        names: The names of the parameters.
        dim: The dimension of the examples in ``rows``; an example may have several rows.
    """

    rows: Tensor
    value: Tensor
    names: tuple[str, ...]
    dim: int = 0


class WatchedParameters(TorchFunctionMode):
    """Inside, if a model is called with :attr:`leaves` as its parameters, each example meets its own view of them.

    Guarantees:
        * The model's outputs are unchanged.
        * A use that is not understood is left as it is. Its parameter's name is then in :attr:`unserved`; or, if the
          use cannot be seen from here (an autograd function), the loss has a gradient at the parameter's leaf.

    Args:
        parameters: θ by name.
        inputs: The model's inputs, a tree.
        uses: Notes the uses of layers.

    Attributes:
        leaves: The parameters to call the model with.
        meetings: In the order of the forward pass.
        unserved: The names of parameters that were used in another way.
    """

    def __init__(self, parameters: Mapping[str, Tensor], inputs: Any, uses: Uses) -> None:
        super().__init__()
        self.leaves = {name: value.detach().requires_grad_() for name, value in parameters.items()}
        self.meetings: list[Meeting] = []
        self.unserved: set[str] = set()
        self._uses = uses
        self._functions: dict[int, tuple[Tensor, tuple[str, ...]]] = {}  # functions of parameters alone: of which
        for name, leaf in self.leaves.items():
            self._functions[id(leaf)] = leaf, (name,)
        self._of_examples: Any = WeakTensorKeyDictionary()  # not tracked by autograd: tokens, masks
        for tensor in tensors_of(inputs):
            self._of_examples[tensor] = True

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = tensors_of((args, kwargs))
        ours = [tensor for tensor in tensors if id(tensor) in self._functions]
        looked_at = tensors[:1] if func.__name__ in _TYPE_OF_ANOTHER else tensors
        others = any(self._depends_on_examples(tensor) for tensor in looked_at if id(tensor) not in self._functions)
        if ours and others:
            operation = operation_of(func, args, kwargs)
            if operation is not None and self._understands(operation):
                return self._used(operation)
            args, kwargs = self._met(func.__name__, args, kwargs, tensors)

        result = func(*args, **kwargs)
        if isinstance(result, Tensor | tuple | list):
            for tensor in tensors_of(result):
                if others and not tensor.requires_grad and not _takes_the_shape_only(func.__name__):
                    self._of_examples[tensor] = True
                elif ours and not others and tensor.requires_grad:
                    self._keep(tensor, ours)
        return result

    def _depends_on_examples(self, tensor: Tensor) -> bool:
        return tensor.requires_grad or tensor in self._of_examples

    def _keep(self, tensor: Tensor, sources: list[Tensor]) -> None:
        self._functions[id(tensor)] = tensor, self._names(sources)

    def _names(self, tensors: Iterable[Tensor]) -> tuple[str, ...]:
        """The names of the parameters that these tensors are functions of."""
        return tuple(
            dict.fromkeys(
                name for tensor in tensors if id(tensor) in self._functions for name in self._functions[id(tensor)][1]
            )
        )

    def _understands(self, operation: Operation) -> bool:
        """Whether its input depends on the examples, and its weights do not."""
        return id(operation.input) not in self._functions and not any(
            self._depends_on_examples(weight) and id(weight) not in self._functions
            for weight in operation.weights.values()
        )

    def _used(self, operation: Operation) -> Tensor:
        """The operation's output with constant weights, and the use noted if the examples' dimension is known."""
        names, weights = ", ".join(self._names(operation.weights.values())), operation.weights
        output = operation.run({local: weight.detach() for local, weight in weights.items()})
        dim = self._uses.dim_of_examples(f"{names} ({type(operation.module).__name__})", output.shape)
        if self._uses.learning or dim is None:
            self.unserved.update(self._names(weights.values()))
            return output
        values = {local: weight for local, weight in weights.items() if id(weight) in self._functions}
        use = Use(names, operation.module, (operation.input,), {}, output, dim, operation.rule, values)
        return self._uses.take(use)

    def _met(self, operation: str, args: Any, kwargs: Any, tensors: list[Tensor]) -> tuple[Any, Any]:
        """The arguments, with functions of parameters replaced by a view for every example."""
        in_place, operation = operation.endswith("_") and not operation.startswith("_"), operation.strip("_")
        shape = self._met_in(operation, args, kwargs, tensors)
        served = (shape is not None or operation in _JOINING) and "out" not in kwargs
        served = served and not (in_place and id(args[0]) in self._functions)
        meetings: list[Meeting] = []

        def rows_of(tensor: Tensor) -> Tensor:
            if id(tensor) not in self._functions:
                return tensor
            meeting = self._meeting(tensor, _shape_for(tensor, shape, operation), operation) if served else None
            if meeting is None:
                self.unserved.update(self._functions[id(tensor)][1])
                return tensor
            meetings.append(meeting)
            return meeting.rows

        replaced: tuple[Any, Any] = map_tensors(rows_of, (args, kwargs))
        self.meetings += meetings
        return replaced

    def _met_in(self, operation: str, args: Any, kwargs: Any, tensors: list[Tensor]) -> torch.Size | None:
        """The shape that functions of parameters are broadcast to (for products, without the last two); None: none."""
        if operation in _ELEMENTWISE:
            return torch.broadcast_shapes(*(tensor.shape for tensor in tensors))
        if operation in _PRODUCTS and all(tensor.ndim > 1 for tensor in tensors):
            return torch.broadcast_shapes(*(tensor.shape[:-2] for tensor in tensors))
        if operation == _ATTENTION:  # a bias that is added to the scores
            given = dict(zip(("query", "key", "value"), args, strict=False)) | kwargs
            if not any(id(given.get(name)) in self._functions for name in ("query", "key", "value")):
                return torch.Size((*given["query"].shape[:-1], given["key"].shape[-2]))
        return None

    def _meeting(self, tensor: Tensor, shape: torch.Size, operation: str) -> Meeting | None:
        """The meeting; None if the examples' dimension is not known."""
        names = self._functions[id(tensor)][1]
        dim = self._uses.dim_of_examples(f"{', '.join(names)} ({operation})", shape)
        if dim is None or self._uses.learning:
            return None
        value, aligned = tensor, (1,) * (len(shape) - tensor.ndim) + tensor.shape
        if aligned[dim] != 1:  # repeated for the examples: the first one's part serves for all
            if aligned[dim] != shape[dim]:
                return None
            value = tensor.reshape(aligned).narrow(dim, 0, shape[dim] // self._uses.batch)
        if dim > 0:
            value = value.reshape(value.shape if value.ndim == len(shape) else aligned).movedim(dim, 0)
        return Meeting(tensor.detach().expand(shape).requires_grad_(), value, names, dim)


def _takes_the_shape_only(operation: str) -> bool:
    return operation.startswith("new_") or operation in ("empty_like", "full_like", "ones_like", "zeros_like")


def _shape_for(tensor: Tensor, shape: torch.Size | None, operation: str) -> torch.Size:
    """The shape that a function of parameters is broadcast to when it meets the examples."""
    if shape is None:
        return tensor.shape
    return torch.Size((*shape, *tensor.shape[-2:])) if operation in _PRODUCTS else shape
