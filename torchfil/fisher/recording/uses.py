"""The uses of layers and parameters in a forward pass, before their δ is known, and where the
examples lie in them.

A module without a rule may use a parameter θ anywhere: as the scale of a branch, a table of
positions, a class token. A function of θ alone, θ′ = f(θ) (slices, views, an exponential), is the
same for all examples. When θ′ meets something that depends on the examples, in an elementwise
operation or a concatenation, every example gets a separate view of θ′. The gradient at that view is
this example's gradient, and the derivative of f takes it back to θ. If θ′ is the weight of an
operation that is a layer in itself (``F.linear``), that layer's rule serves it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from torchfil.fisher.rules.base import LayerRule
from torchfil.fisher.rules.parameters import Operation, operation_of
from torchfil.utils.given import Args, Kwargs
from torchfil.utils.trees import map_tensors, tensors_of

# by layer, the examples' dimension in each call's output; None: none
Layouts = Mapping[str, tuple[int | None, ...]]

_ELEMENTWISE = frozenset(
    {
        "add",
        "addcmul",
        "clamp",
        "div",
        "expand_as",
        "lerp",
        "maximum",
        "minimum",
        "mul",
        "pow",
        "rsub",
        "sub",
    }
    | {"true_divide", "where"}
)
_TYPE_OF_ANOTHER = frozenset({"to", "type_as"})  # the other arguments' values do not matter
_ATTENTION = "scaled_dot_product_attention"
_JOINING = frozenset({"cat", "concat", "concatenate"})
_PRODUCTS = frozenset({"bmm", "matmul"})


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
        rule: The rule of an operation or of a reported use; None: the module's rule.
        values: For an operation, its watched weights by local name: functions of parameters.
        reported: For a use that a module has reported, its parameters' names in the module by their
            names in the rule.
        versions: Its inputs and output, and how often each had been changed in place.
    """

    name: str
    module: nn.Module
    args: Args
    kwargs: Kwargs
    output: Tensor
    dim: int = 0
    rule: LayerRule | None = None
    values: Mapping[str, Tensor] = field(default_factory=dict)
    reported: Mapping[str, str] | None = None
    versions: list[tuple[Tensor, int]] = field(default_factory=list)

    def inputs_by_example(self, batch: int) -> tuple[Any, Any]:
        """Its inputs; those that run over the examples like the output are given as [batch, …]."""
        rows = self.output.shape[self.dim]
        if self.dim == 0 and rows == batch:
            return self.args, self.kwargs

        def regrouped(tensor: Tensor) -> Tensor:
            runs = tensor.ndim > self.dim and tensor.shape[self.dim] == rows
            return by_example(tensor, self.dim, batch) if runs else tensor

        return map_tensors(regrouped, (self.args, self.kwargs))


class Uses:
    """Notes the uses of layers during a forward pass over ``batch`` examples.

    Args:
        batch: The number of examples.
        clone: Whether to copy inputs and outputs, because the model overwrites them.
        layouts: Where the examples lie, as far as known; None: they are expected in the first
            dimension.
        learning: Whether to note only the outputs' shapes.

    Attributes:
        noted: The uses in order.
        shapes: The outputs' shapes by name, in order.
        layout_unknown: Whether some output does not have the examples first although the layouts
            are unknown.
    """

    def __init__(
        self,
        batch: int,
        *,
        clone: bool = False,
        layouts: Layouts | None = None,
        learning: bool = False,
    ) -> None:
        self.batch, self.learning = batch, learning
        self.noted: list[Use] = []
        self.shapes: dict[str, list[torch.Size]] = {}
        self.layout_unknown = False
        self._clone, self._layouts = clone, layouts
        self._calls: Counter[str] = Counter()

    def dim_of_examples(self, name: str, shape: torch.Size) -> int | None:
        """The dimension of the examples in the next output of that name.

        None: there is none, or it is unknown.
        """
        if self.learning:
            self.shapes.setdefault(name, []).append(shape)
        if self._layouts is None or name not in self._layouts:
            first = shape[:1] == (self.batch,)
            self.layout_unknown = self.layout_unknown or (self._layouts is None and not first)
            return 0 if first else None
        turn, self._calls[name] = self._calls[name], self._calls[name] + 1
        dims = self._layouts[name]
        dim = dims[min(turn, len(dims) - 1)]
        return (
            dim if (dim is not None and len(shape) > dim and shape[dim] % self.batch == 0) else None
        )

    def take(self, use: Use) -> Tensor:
        """Note a use; return the tensor that the model continues with instead of its output."""
        constant = not use.output.requires_grad
        if constant:
            use.output = use.output.detach().requires_grad_()
        if self._clone:
            use.args, use.kwargs = map_tensors(Tensor.clone, (use.args, use.kwargs))
        self.note(use)
        # a leaf must not be changed in place
        return use.output.clone() if self._clone or constant else use.output

    def note(self, use: Use) -> None:
        """Note a use with the versions of its tensors."""
        use.versions += [
            (tensor, tensor._version) for tensor in tensors_of((use.output, use.args, use.kwargs))
        ]
        self.noted.append(use)

    def overwritten(self) -> bool:
        """Whether an input or an output of a layer has been changed in place since it was noted."""
        return any(
            tensor._version != version for use in self.noted for tensor, version in use.versions
        )


def layouts_of(
    two: Mapping[str, list[torch.Size]], three: Mapping[str, list[torch.Size]]
) -> Layouts:
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


@dataclass(frozen=True)
class ParameterUse:
    """Where a function of parameters met the examples.

    Attributes:
        rows: A view of the value for each example, [batch, …]; a leaf.
        value: θ′, attached to the parameters. Broadcast, with the examples first, it gives
            ``rows``; it has no batch.
        names: The names of the parameters.
        dim: The dimension of the examples in ``rows``; an example may have several rows.
    """

    rows: Tensor
    value: Tensor
    names: tuple[str, ...]
    dim: int = 0


class WatchedParameters(TorchFunctionMode):
    """Inside, if a model is called with :attr:`leaves` as its parameters, each example meets its
    own view of them.

    Guarantees:
        * The model's outputs are unchanged.
        * A use that is not understood is left as it is. Its parameter's name is then in
          :attr:`unserved`; or, if the use cannot be seen from here (an autograd function), the loss
          has a gradient at the parameter's leaf.

    Args:
        parameters: θ by name.
        inputs: The model's inputs, a tree.
        uses: Notes the uses of layers.

    Attributes:
        leaves: The parameters to call the model with.
        meetings: In the order of the forward pass.
        unserved: The names of parameters that were used in another way.
    """

    def __init__(self, parameters: Mapping[str, Tensor], inputs: object, uses: Uses) -> None:
        super().__init__()
        self.leaves = {name: value.detach().requires_grad_() for name, value in parameters.items()}
        self.meetings: list[ParameterUse] = []
        self.unserved: set[str] = set()
        self._uses = uses
        # functions of parameters alone, and of which
        own = {id(leaf): (leaf, (name,)) for name, leaf in self.leaves.items()}
        self._functions: dict[int, tuple[Tensor, tuple[str, ...]]] = {**own}
        self._of_examples = WeakTensorKeyDictionary()  # not tracked by autograd: tokens, masks
        for tensor in tensors_of(inputs) if self.leaves else ():
            self._of_examples[tensor] = True

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = tensors_of((args, kwargs))
        ours = [tensor for tensor in tensors if id(tensor) in self._functions]
        looked_at = tensors[:1] if func.__name__ in _TYPE_OF_ANOTHER else tensors
        others = any(
            self._depends_on_examples(tensor)
            for tensor in looked_at
            if id(tensor) not in self._functions
        )
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
                    self._functions[id(tensor)] = tensor, self._names(ours)
        return result

    def _depends_on_examples(self, tensor: Tensor) -> bool:
        return tensor.requires_grad or tensor in self._of_examples

    def _names(self, tensors: Iterable[Tensor]) -> tuple[str, ...]:
        """The names of the parameters that these tensors are functions of."""
        functions = [
            self._functions[id(tensor)] for tensor in tensors if id(tensor) in self._functions
        ]
        return tuple(dict.fromkeys(name for _, names in functions for name in names))

    def _understands(self, operation: Operation) -> bool:
        """Whether its input depends on the examples, and its weights do not."""
        others = [
            weight for weight in operation.weights.values() if id(weight) not in self._functions
        ]
        return id(operation.input) not in self._functions and not any(
            map(self._depends_on_examples, others)
        )

    def _used(self, operation: Operation) -> Tensor:
        """The operation's output with constant weights, and the use noted if the examples'
        dimension is known.
        """
        names, weights = ", ".join(self._names(operation.weights.values())), operation.weights
        output = operation.run({local: weight.detach() for local, weight in weights.items()})
        dim = self._uses.dim_of_examples(
            f"{names} ({type(operation.module).__name__})", output.shape
        )
        if self._uses.learning or dim is None:
            self.unserved.update(self._names(weights.values()))
            return output
        values = {
            local: weight for local, weight in weights.items() if id(weight) in self._functions
        }
        use = Use(
            names, operation.module, (operation.input,), {}, output, dim, operation.rule, values
        )
        return self._uses.take(use)

    def _met(
        self, operation: str, args: Args, kwargs: Kwargs, tensors: list[Tensor]
    ) -> tuple[Any, Any]:
        """The arguments, with functions of parameters replaced by a view for every example."""
        in_place, operation = (
            operation.endswith("_") and not operation.startswith("_"),
            operation.strip("_"),
        )
        shape = self._met_in(operation, args, kwargs, tensors)
        served = (shape is not None or operation in _JOINING) and "out" not in kwargs
        served = served and not (in_place and id(args[0]) in self._functions)

        def rows_of(tensor: Tensor) -> Tensor:
            if id(tensor) not in self._functions:
                return tensor
            meeting = self._meeting(tensor, shape, operation) if served else None
            if meeting is None:
                self.unserved.update(self._functions[id(tensor)][1])
                return tensor
            self.meetings.append(meeting)
            return meeting.rows

        return map_tensors(rows_of, (args, kwargs))

    def _met_in(
        self, operation: str, args: Args, kwargs: Kwargs, tensors: list[Tensor]
    ) -> torch.Size | None:
        """The shape that functions of parameters are broadcast to (for products, without the last
        two); None: none.
        """
        if operation in _ELEMENTWISE:
            return torch.broadcast_shapes(*(tensor.shape for tensor in tensors))
        if operation in _PRODUCTS and all(tensor.ndim > 1 for tensor in tensors):
            return torch.broadcast_shapes(*(tensor.shape[:-2] for tensor in tensors))
        if operation == _ATTENTION:  # a bias that is added to the scores
            given = dict(zip(("query", "key", "value"), args, strict=False)) | kwargs
            if not any(
                id(given.get(name)) in self._functions for name in ("query", "key", "value")
            ):
                return torch.Size((*given["query"].shape[:-1], given["key"].shape[-2]))
        return None

    def _meeting(
        self, tensor: Tensor, shape: torch.Size | None, operation: str
    ) -> ParameterUse | None:
        """The meeting in a shape from :meth:`_met_in`.

        None if the examples' dimension is not known.
        """
        if shape is None or operation in _PRODUCTS:
            shape = tensor.shape if shape is None else torch.Size((*shape, *tensor.shape[-2:]))
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
            value = value.reshape(value.shape if value.ndim == len(shape) else aligned).movedim(
                dim, 0
            )
        return ParameterUse(tensor.detach().expand(shape).requires_grad_(), value, names, dim)


def _takes_the_shape_only(operation: str) -> bool:
    return operation.startswith("new_") or operation in (
        "empty_like",
        "full_like",
        "ones_like",
        "zeros_like",
    )
