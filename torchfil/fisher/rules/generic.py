"""Any layer without a rule of its own."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap

from torchfil.fisher.rules.base import LayerRule, register_rule
from torchfil.fisher.rules.call import Call, UnsupportedCallError

__all__ = ["GenericRule"]

_roles: WeakKeyDictionary[nn.Module, dict[int | str, str]] = WeakKeyDictionary()


class GenericRule(LayerRule):
    """Any module: its own vector-Jacobian product, example by example (vmapped).

    Whether an argument has a row for each example or is shared by all is told by its length. Where that is the batch's
    by chance, what an earlier call has shown counts: the trial of two examples, mostly.
    """

    def gradients(self, call: Call) -> dict[str, Tensor]:
        """The module's own way back from δ, example by example."""
        of_args = tuple(_dimension(call, slot, x) for slot, x in enumerate(call.args))
        of_kwargs = {name: _dimension(call, name, x) for name, x in call.kwargs.items()}
        module = _WithoutOwnHooks(call.module)

        def one(args: Any, kwargs: Any, delta: Tensor) -> dict[str, Tensor]:
            def output(parameters: dict[str, Tensor]) -> Tensor:
                single = tuple(_one_more(x) if dim == 0 else x for x, dim in zip(args, of_args, strict=True))
                named = {name: _one_more(x) if of_kwargs[name] == 0 else x for name, x in kwargs.items()}
                weights = {f"module.{name}": value for name, value in (parameters | call.constants).items()}
                result = functional_call(module, weights, single, named)
                first: Tensor = result[0] if isinstance(result, tuple) else result
                return first

            return vjp(output, call.parameters)[1](delta.unsqueeze(0))[0]

        try:
            mapped = vmap(one, in_dims=(of_args, of_kwargs, 0))
            result: dict[str, Tensor] = mapped(call.args, dict(call.kwargs), call.delta)
        except RuntimeError as error:
            raise UnsupportedCallError(f"{call.name} ({type(call.module).__name__}): {error}") from error
        return result


def _dimension(call: Call, slot: int | str, value: Any) -> int | None:
    """0 where the argument has a row for each example; None: it is shared by all."""
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
    """The module, but for its own hooks: what a recorded pass keeps lies between them."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.forward(*args, **kwargs)


def _one_more(value: Tensor) -> Tensor:
    return value.unsqueeze(0)


register_rule(nn.Module, GenericRule())
