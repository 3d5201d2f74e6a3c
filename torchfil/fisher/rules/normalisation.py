r"""Normalisation: rules, and on GPUs a GroupNorm whose second derivative has a closed form.

With m(·) the mean over one group of M numbers, s = (m((x − m(x))²) + eps)^{-1/2} and x̂ = s(x −
m(x)),

    ⟨v, ∂x̂⟩ = ⟨P(v), ∂x⟩,       P(v) = s (v − m(v) − x̂ m(v x̂)),
    ⟨w, ∂P(v)⟩ = ⟨P(w), ∂v⟩ − s ⟨m(w x̂) P(v) + m(v x̂) P(w) + m(v P(w)) x̂, ∂x⟩.

A second derivative therefore costs two first derivatives and three inner products per group;
torch's own is a graph of a hundred elementary operations. On a GPU with Triton, each takes one
kernel; elsewhere torch's own is as fast.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from torchfil.fisher.models import normalised_dtype, wide
from torchfil.fisher.rules.base import Call, LayerRule, register_rule
from torchfil.fisher.rules.substitutes import Function, kernels_for, register_substitute


class NormalisationRule(LayerRule):
    """A scale and a shift of a normalised input x̂: gradients Σ_t δ_t x̂_t and Σ_t δ_t, formed once
    and used for all.
    """

    words = "normalisation, closed form"
    parameter_names = frozenset({"weight", "bias"})

    def __init__(
        self, normalised: Callable[[Any, Tensor], Tensor], *, channels_first: bool
    ) -> None:
        self.normalised = normalised
        self.channels_first, self.takes_rows = channels_first, not channels_first

    def gradients(self, call: Call) -> dict[str, Tensor]:
        """Σ_t δ_t x̂_t and Σ_t δ_t of every example."""
        if not call.memo:
            shape = next(iter(call.parameters.values())).shape
            if "weight" in call.parameters:
                call.memo["weight"] = self._summed(
                    call.delta * self.normalised(call.module, call.input), shape
                )
            if "bias" in call.parameters:
                call.memo["bias"] = self._summed(call.delta, shape)
        return call.memo

    def _summed(self, value: Tensor, shape: torch.Size) -> Tensor:
        """The sum over positions: those after the channels, or those between batch and normalised
        dimensions.
        """
        if self.channels_first:
            return value.reshape(*value.shape[:2], -1).sum(dim=2)
        return value.reshape(len(value), -1, *shape).sum(dim=1)


class _GroupNorm(Function):
    """x ↦ x̂·weight + bias over groups of channels, by torch's own kernels; [batch, channels,
    positions].
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, groups: int, eps: float
    ) -> Tensor:
        batch, channels, positions = x.shape
        result, mean, scale = torch.native_group_norm(
            x, weight, bias, batch, channels, positions, groups, eps
        )
        ctx.save_for_backward(x, mean, scale, weight)
        ctx.groups = groups
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        return (
            _GroupPulled.apply(gradients[0].contiguous(), *ctx.saved_tensors, ctx.groups),
            None,
            None,
            None,
            None,
        )


class _GroupPulled(Function):
    """(γ, x) ↦ P(v) for v = γ·weight."""

    @staticmethod
    def forward(
        ctx: Any,
        gamma: Tensor,
        x: Tensor,
        mean: Tensor,
        scale: Tensor,
        weight: Tensor | None,
        groups: int,
    ) -> Tensor:
        ctx.save_for_backward(x, mean, scale, weight, gamma)
        ctx.groups = groups
        return kernels_for(x).group_pulled(gamma, x, mean, scale, weight, groups)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, mean, scale, weight, gamma = ctx.saved_tensors
        w = gradients[0].contiguous()
        found = kernels_for(x).group_pulled_twice(gamma, w, x, mean, scale, weight, ctx.groups)
        return (*found, None, None, None, None)


def group_norm(
    x: Tensor,
    groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """``F.group_norm`` of inputs [batch, channels, …].

    Differentiable twice in x, with constant weights.

    Example:
        >>> group_norm(torch.tensor([[1.0, 3.0]]), 1, eps=0.0)
        tensor([[-1.,  1.]])
    """
    if kernels_for(x) is None:
        return F.group_norm(x, groups, weight, bias, eps)
    flat = wide(x).reshape(*x.shape[:2], -1).contiguous()
    weights = [None if value is None else wide(value) for value in (weight, bias)]
    return _GroupNorm.apply(flat, *weights, groups, eps).reshape(x.shape).to(normalised_dtype(x))


def _register(
    kind: type[nn.Module], normalised: Callable[[Any, Tensor], Tensor], *, channels_first: bool
) -> None:
    register_rule(kind, NormalisationRule(normalised, channels_first=channels_first))


_register(
    nn.LayerNorm, lambda m, x: F.layer_norm(x, m.normalized_shape, eps=m.eps), channels_first=False
)
_register(
    nn.RMSNorm, lambda m, x: F.rms_norm(x, m.normalized_shape, eps=m.eps), channels_first=False
)
for _kind in (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d):
    _register(_kind, lambda m, x: F.instance_norm(x, eps=m.eps), channels_first=True)
_register(nn.GroupNorm, lambda m, x: F.group_norm(x, m.num_groups, eps=m.eps), channels_first=True)
register_substitute(
    nn.GroupNorm,
    lambda m: lambda x: group_norm(x, m.num_groups, m.weight, m.bias, m.eps),
    device="cuda",
)
