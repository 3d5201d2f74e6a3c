"""Any layer without its own rule."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from torchfil.fisher.rules.base import Call, LayerRule, UnsupportedCallError, register_rule

_roles: WeakKeyDictionary[nn.Module, dict[int | str, str]] = WeakKeyDictionary()


class GenericRule(LayerRule):
    """Any module: its own vector-Jacobian product, example by example (vmapped).

    An argument's length shows whether it has a row for each example or is shared by all. If a shared argument happens
    to have the batch's length, an earlier call decides, usually the trial with two examples.
    """

    words = "none: gradients formed example by example (vmap)"

    def gradients(self, call: Call) -> dict[str, Tensor]:
        """The module's own backward pass from δ, example by example."""
        of_args = tuple(_dimension(call, slot, x) for slot, x in enumerate(call.args))
        of_kwargs = {name: _dimension(call, name, x) for name, x in call.kwargs.items()}
        module = _WithoutOwnHooks(call.module)

        def one(args: Any, kwargs: Any, delta: Tensor) -> dict[str, Tensor]:
            def output(parameters: dict[str, Tensor]) -> Tensor:
                single = tuple(x[None] if dim == 0 else x for x, dim in zip(args, of_args, strict=True))
                named = {name: x[None] if of_kwargs[name] == 0 else x for name, x in kwargs.items()}
                weights = {f"module.{name}": value for name, value in (parameters | call.constants).items()}
                result = functional_call(module, weights, single, named)
                first: Tensor = result[0] if isinstance(result, tuple) else result
                return first

            return vjp(output, call.parameters)[1](delta.unsqueeze(0))[0]

        try:
            mapped = vmap(one, in_dims=(of_args, of_kwargs, 0))
            with _WeightsApart():
                return mapped(call.args, dict(call.kwargs), call.delta)
        except RuntimeError as error:
            raise UnsupportedCallError(f"{call.name} ({type(call.module).__name__}): {error}") from error


class _WeightsApart(TorchFunctionMode):
    """Inside, layer_norm and instance_norm apply their weights in a separate operation.

    Otherwise vmap(vjp) has correct values but a wrong derivative with respect to the input (torch 2.13;
    docs/decisions.md).
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _NORMS:
            return func(*args, **kwargs)
        given = dict(zip(_NORMS[func], args, strict=False)) | kwargs
        weight, bias = given.pop("weight", None), given.pop("bias", None)
        result = func(**given)
        by_channel = (-1, *[1] * (result.ndim - 2)) if func is F.instance_norm else tuple(given["normalized_shape"])
        result = result if weight is None else result * weight.reshape(by_channel)
        return result if bias is None else result + bias.reshape(by_channel)


_LAYER_NORM = ("input", "normalized_shape", "weight", "bias", "eps", "cudnn_enable")
_INSTANCE_NORM = ("input", "running_mean", "running_var", "weight", "bias", "use_input_stats", "momentum", "eps")
_NORMS = {F.layer_norm: _LAYER_NORM, torch.layer_norm: _LAYER_NORM, F.instance_norm: _INSTANCE_NORM}


def _dimension(call: Call, slot: int | str, value: Any) -> int | None:
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
            f"{call.name} ({type(call.module).__name__}): argument {slot} has {value.shape[0]} rows for {batch} "
            "examples, and one for each in another call"
        )
    roles[slot] = "shared"
    return None


class _WithoutOwnHooks(nn.Module):
    """The module without its hooks: a recorded pass keeps inputs and outputs from between them."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.forward(*args, **kwargs)


register_rule(nn.Module, GenericRule())
