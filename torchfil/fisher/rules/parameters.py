"""What has no rule of its own: any other layer, parameters that meet the examples directly, layers
called as functions.

The last two concern only watched parameters (:mod:`torchfil.fisher.recording.uses`). A function
such as ``F.linear(x, weight)`` corresponds to a layer with the same geometry and no weights; the
layer's rule does the rest.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap
from torch.nn import functional as F

from torchfil.fisher.models import Extent, Replaced, weights_kept, wide
from torchfil.fisher.rules.base import (
    Call,
    LayerRule,
    UnsupportedCallError,
    register_rule,
    rule_for,
)
from torchfil.fisher.rules.convolution import convolve
from torchfil.fisher.rules.linear import TransposedLinearRule
from torchfil.fisher.rules.normalisation import group_norm, layer_norm
from torchfil.utils.given import Args, Kwargs

_roles: WeakKeyDictionary[nn.Module, dict[int | str, str]] = WeakKeyDictionary()


def share_roles(model: nn.Module, copied: nn.Module) -> None:
    """Whatever calls of a copy's modules show about their arguments holds for the model's modules
    as well.
    """
    for own, other in zip(model.modules(), copied.modules(), strict=True):
        _roles[other] = _roles.setdefault(own, {})


class GenericRule(LayerRule):
    """Any module: its own vector-Jacobian product, example by example (vmapped).

    An argument's length shows whether it has a row for each example or is shared by all. If a
    shared argument happens to have the batch's length, an earlier call decides, usually the trial
    with two examples.
    """

    words = "none: gradients formed example by example (vmap)"

    def gradients(self, call: Call) -> dict[str, Tensor]:
        """The module's own backward pass from δ, example by example."""
        of_args = tuple(_dimension(call, slot, x) for slot, x in enumerate(call.args))
        of_kwargs = {name: _dimension(call, name, x) for name, x in call.kwargs.items()}
        module = _WithoutOwnHooks(call.module)

        def one(args: Args, kwargs: Kwargs, delta: Tensor) -> dict[str, Tensor]:
            def output(parameters: dict[str, Tensor]) -> Tensor:
                single = tuple(
                    x[None] if dim == 0 else x for x, dim in zip(args, of_args, strict=True)
                )
                named = {name: x[None] if of_kwargs[name] == 0 else x for name, x in kwargs.items()}
                weights = {
                    f"module.{name}": value for name, value in (parameters | call.constants).items()
                }
                result = functional_call(module, weights, single, named)
                return result[0] if isinstance(result, tuple) else result

            return vjp(output, call.parameters)[1](delta.unsqueeze(0))[0]

        try:
            mapped = vmap(one, in_dims=(of_args, of_kwargs, 0))
            with weights_kept(module), Replaced(_WEIGHTS_APART):
                return mapped(call.args, dict(call.kwargs), call.delta)
        except RuntimeError as error:
            raise UnsupportedCallError(
                f"{call.name} ({type(call.module).__name__}): {error}"
            ) from error


def _weights_apart(function: Any, names: tuple[str, ...], *args: Any, **kwargs: Any) -> Tensor:
    """layer_norm or instance_norm, whose arguments have these names, with weights applied in a
    separate operation.

    Otherwise vmap(vjp) has correct values but a wrong derivative with respect to the input (torch
    2.13; docs/decisions.md).
    """
    given = dict(zip(names, args, strict=False)) | kwargs
    weight, bias = given.pop("weight", None), given.pop("bias", None)
    result: Tensor = function(**given)
    by_channel = (
        (-1, *[1] * (result.ndim - 2))
        if function is F.instance_norm
        else tuple(given["normalized_shape"])
    )
    result = result if weight is None else result * weight.reshape(by_channel)
    return result if bias is None else result + bias.reshape(by_channel)


_LAYER_NORM = ("input", "normalized_shape", "weight", "bias", "eps", "cudnn_enable")
_INSTANCE_NORM = (
    "input",
    "running_mean",
    "running_var",
    "weight",
    "bias",
    "use_input_stats",
    "momentum",
    "eps",
)
_NORMS = {F.layer_norm: _LAYER_NORM, torch.layer_norm: _LAYER_NORM, F.instance_norm: _INSTANCE_NORM}
_WEIGHTS_APART = {
    norm: functools.partial(_weights_apart, norm, names) for norm, names in _NORMS.items()
}


def _dimension(call: Call, slot: int | str, value: object) -> int | None:
    """0 if the argument has a row for each example; None if all examples share it."""
    if not isinstance(value, Tensor) or value.ndim == 0:
        return None

    roles, batch = _roles.setdefault(call.module, {}), len(call.delta)
    fits = value.shape[0] == batch
    if fits and roles.get(slot) != "shared":
        if batch > 1:
            roles[slot] = "by example"
        return 0

    if not fits and roles.get(slot) == "by example":
        raise UnsupportedCallError(
            f"{call.name} ({type(call.module).__name__}): argument {slot} has {value.shape[0]} "
            f"rows for {batch} examples, and one for each in another call"
        )
    roles[slot] = "shared"
    return None


class _WithoutOwnHooks(nn.Module):
    """The module without its hooks: a recorded pass keeps inputs and outputs from between them."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: object, **kwargs: object) -> Any:
        return self.module.forward(*args, **kwargs)


class ParameterRule(LayerRule):
    """θ′ = f(θ), of which each example has a separate view with the gradient δ: g = J_fᵀ Σ δ,
    formed once.

    The sum runs over all positions to which one number of θ′ was broadcast.

    Args:
        value: θ′, attached to the parameters; it broadcasts to δ, but not along the batch.
        leaves: θ by name.
    """

    words = "bare parameter, where it meets the examples"

    def __init__(self, value: Tensor, leaves: Mapping[str, Tensor]) -> None:
        self.value, self.leaves = value, leaves

    def gradients(self, call: Call) -> dict[str, Tensor]:
        """J_fᵀ Σ δ of every example."""
        if not call.memo:
            delta, shape = call.delta, self.value.shape
            aligned = (1,) * (delta.ndim - len(shape)) + shape
            broadcast = [k for k in range(1, delta.ndim) if aligned[k] == 1 and delta.shape[k] > 1]
            summed = (delta.sum(dim=broadcast) if broadcast else delta).reshape(len(delta), *shape)
            (name, leaf), *more = self.leaves.items()
            plain = self.value is leaf and not more
            call.memo.update(
                {name: summed} if plain else _at_leaves({"": self.value}, self.leaves, {"": summed})
            )
        return call.memo


class ReparametrisedRule(LayerRule):
    """A layer whose weights are functions θ′ = f(θ) of parameters: its rule's gradients at θ′,
    multiplied by J_fᵀ.

    Examples are weight standardisation and normalisation, pruning, and slices of one weight.

    Args:
        rule: The layer's own rule.
        values: θ′ by local name, attached to the parameters.
        leaves: θ by name.
    """

    words = "weights made from parameters: closed form, then back to the parameters"

    def __init__(
        self, rule: LayerRule, values: Mapping[str, Tensor], leaves: Mapping[str, Tensor]
    ) -> None:
        self.rule, self.values, self.leaves = rule, values, leaves

    def gradients(self, call: Call) -> dict[str, Tensor]:
        """J_fᵀ times the layer's own gradients, formed once."""
        if not call.memo:
            call.memo.update(
                _at_leaves(self.values, self.leaves, self.rule.gradients(self._own_call(call)))
            )
        return call.memo

    def weighted_sum(self, call: Call, weight: Tensor) -> dict[str, Tensor]:
        """As in :class:`LayerRule`; J_fᵀ is applied once, to the sum."""
        summed = self.rule.weighted_sum(self._own_call(call), weight)
        return _at_leaves(self.values, self.leaves, summed, by_example=False)

    def _own_call(self, call: Call) -> Call:
        """The call in the form that the layer's own rule expects."""
        return replace(
            call, parameters={name: value.detach() for name, value in self.values.items()}, memo={}
        )


def _at_leaves(
    values: Mapping[str, Tensor],
    leaves: Mapping[str, Tensor],
    gradients: Mapping[str, Tensor],
    by_example: bool = True,
) -> dict[str, Tensor]:
    """Gradients at θ from those at θ′; with ``by_example``, both are [batch, …]."""
    made = [values[name] for name in gradients]
    given = [gradient.to(values[name].dtype) for name, gradient in gradients.items()]
    options = {
        "create_graph": by_example and torch.is_grad_enabled(),
        "is_grads_batched": by_example,
    }
    by_leaf = torch.autograd.grad(made, list(leaves.values()), given, retain_graph=True, **options)
    return dict(zip(leaves, map(wide, by_leaf), strict=True))


@dataclass(frozen=True)
class Operation:
    """One call of a function that is a layer.

    Attributes:
        module: A layer with the same geometry.
        rule: Its rule.
        input: a.
        weights: The weights by the layer's local names.
        run: Computes the output from weights by name.
    """

    module: nn.Module
    rule: LayerRule
    input: Tensor
    weights: dict[str, Tensor]
    run: Callable[[Mapping[str, Tensor]], Tensor]


def operation_of(
    function: object, args: tuple[object, ...], kwargs: Mapping[str, object]
) -> Operation | None:
    """The layer that the call corresponds to; None if it is not a known layer.

    Example:
        >>> x, weight = torch.ones(2, 3), torch.ones(4, 3)
        >>> operation_of(F.linear, (x, weight), {}).module
        Linear(in_features=3, out_features=4, bias=False)
        >>> operation_of(torch.add, (x, x), {}) is None
        True
    """
    read = _READERS.get(function)
    try:
        return None if read is None else read(*args, **kwargs)
    except TypeError:  # not the usual signature
        return None


def _operation(
    module: nn.Module,
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    function: Callable[..., Tensor],
    rule: LayerRule | None = None,
) -> Operation:
    """``function(weight, bias)`` as a layer's operation."""
    weights = {
        name: value for name, value in (("weight", weight), ("bias", bias)) if value is not None
    }
    run = lambda w: function(w.get("weight"), w.get("bias"))  # noqa: E731
    return Operation(module, rule or rule_for(module), input, weights, run)


@functools.lru_cache(maxsize=1024)
def _stand_in(kind: type[nn.Module], *args: object, **kwargs: object) -> nn.Module:
    """A layer without weights. It draws no random numbers, because a pass counts them."""
    weightless: Callable[..., nn.Module] = type(
        kind.__name__, (kind,), {"reset_parameters": lambda self: None}
    )
    return weightless(*args, **kwargs, device="meta")


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Operation | None:
    if weight.ndim != 2:
        return None
    module = _stand_in(nn.Linear, weight.shape[1], weight.shape[0], bias=False)
    return _operation(module, input, weight, bias, lambda w, b: F.linear(input, w, b))


def _product(input: Tensor, other: Tensor) -> Operation | None:
    """input @ other, of a weight [in, out]."""
    if other.ndim != 2 or input.ndim < 2:
        return None
    module = _stand_in(nn.Linear, *other.shape, bias=False)
    return _operation(module, input, other, None, lambda w, b: input @ w, TransposedLinearRule())


def _product_plus(
    input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1
) -> Operation | None:
    """input + mat1 @ mat2, of a bias [out] and a weight [in, out]: GPT-2's Conv1D."""
    if input.ndim != 1 or beta != 1 or alpha != 1:
        return None
    module = _stand_in(nn.Linear, *mat2.shape, bias=False)
    return _operation(
        module, mat1, mat2, input, lambda w, b: torch.addmm(b, mat1, w), TransposedLinearRule()
    )


def _convolution(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Extent = 1,
    padding: Extent = 0,
    dilation: Extent = 1,
    groups: int = 1,
) -> Operation | None:
    outputs, inputs, *size = weight.shape
    if input.ndim != weight.ndim:
        return None
    kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[len(size) - 1]
    walk = (_each(value, len(size)) for value in (stride, padding, dilation))
    module = _stand_in(kind, inputs * groups, outputs, tuple(size), *walk, groups, bias=False)
    return _operation(module, input, weight, bias, lambda w, b: convolve(module, input, w, b))


def _each(value: Extent, axes: int) -> Extent:
    """One number for every axis; strings stay as they are."""
    if isinstance(value, int):
        return (value,) * axes
    return value if isinstance(value, str) else tuple(value) * (axes if len(value) == 1 else 1)


def _layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *_: object,
    **__: object,
) -> Operation | None:
    shape = tuple(normalized_shape)
    module = _stand_in(nn.LayerNorm, shape, eps, elementwise_affine=False)
    return _operation(module, input, weight, bias, lambda w, b: layer_norm(input, shape, w, b, eps))


def _rms_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Operation | None:
    shape = tuple(normalized_shape)
    module = _stand_in(nn.RMSNorm, shape, eps, elementwise_affine=False)
    return _operation(module, input, weight, None, lambda w, b: F.rms_norm(input, shape, w, eps))


def _group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *_: object,
    **__: object,
) -> Operation | None:
    module = _stand_in(nn.GroupNorm, num_groups, input.shape[1], eps, affine=False)
    return _operation(
        module, input, weight, bias, lambda w, b: group_norm(input, num_groups, w, b, eps)
    )


def _embedding(
    input: Tensor, weight: Tensor, padding_idx: int | None = None, **given: object
) -> Operation | None:
    if given.get("max_norm") is not None or given.get("scale_grad_by_freq"):
        return None
    module = _stand_in(nn.Embedding, *weight.shape, padding_idx)
    return _operation(module, input, weight, None, lambda w, b: F.embedding(input, w, padding_idx))


def _rows(table: Tensor, index: object) -> Operation | None:
    """table[index], for integers that differ between examples."""
    if (
        not isinstance(index, Tensor)
        or index.dtype not in (torch.int64, torch.int32)
        or table.ndim != 2
    ):
        return None
    return _embedding(index, table)


_READERS: dict[Any, Callable[..., Operation | None]] = {
    F.linear: _linear,
    **dict.fromkeys(
        (torch.matmul, torch.mm, Tensor.matmul, Tensor.mm, Tensor.__matmul__), _product
    ),
    Tensor.__rmatmul__: lambda self, other: _product(other, self),
    **dict.fromkeys((torch.addmm, Tensor.addmm), _product_plus),
    **dict.fromkeys((F.conv1d, F.conv2d, F.conv3d), _convolution),
    **dict.fromkeys((F.layer_norm, torch.layer_norm), _layer_norm),
    **dict.fromkeys((F.rms_norm, torch.rms_norm), _rms_norm),
    **dict.fromkeys((F.group_norm, torch.group_norm), _group_norm),
    F.embedding: _embedding,
    Tensor.__getitem__: _rows,
}

register_rule(nn.Module, GenericRule())
