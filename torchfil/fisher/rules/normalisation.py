r"""Normalisation: rules, and forward passes whose second derivative has a closed form:
LayerNorm, and GroupNorm on GPUs.

With m(·) the mean over one group of M numbers, s = (m((x − m(x))²) + eps)^{-1/2} and x̂ = s(x −
m(x)),

    ⟨v, ∂x̂⟩ = ⟨P(v), ∂x⟩,       P(v) = s (v − m(v) − x̂ m(v x̂)),
    ⟨w, ∂P(v)⟩ = ⟨P(w), ∂v⟩ − s ⟨m(w x̂) P(v) + m(v x̂) P(w) + m(v P(w)) x̂, ∂x⟩.

A second derivative therefore costs two first derivatives and three inner products per group;
torch's own is a graph of a hundred elementary operations. GroupNorm's take one kernel each on a GPU
with Triton; elsewhere torch's own is as fast.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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


class GroupNormRule(NormalisationRule):
    """:class:`NormalisationRule` for groups of channels, in one kernel if the GPU has one."""

    def __init__(self) -> None:
        super().__init__(lambda m, x: F.group_norm(x, m.num_groups, eps=m.eps), channels_first=True)

    def gradients(self, call: Call) -> dict[str, Tensor]:
        """Both sums from one kernel, if there is one."""
        if call.memo or kernels_for(call.input) is None or call.input.ndim < 3:
            return super().gradients(call)
        module: Any = call.module
        delta, x = (value.flatten(2).contiguous() for value in (call.delta, call.input))
        named = zip(
            ("weight", "bias"),
            _NormalisedSums.apply(delta, x, module.num_groups, module.eps),
            strict=True,
        )
        call.memo.update({name: value for name, value in named if name in call.parameters})
        return call.memo


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


class _NormalisedSums(Function):
    """(δ, x) ↦ Σ_t δ_t x̂_t and Σ_t δ_t over positions, [batch, channels] each, by GPU kernels."""

    @staticmethod
    def forward(
        ctx: Any, delta: Tensor, x: Tensor, groups: int, eps: float
    ) -> tuple[Tensor, Tensor]:
        variance, mean = torch.var_mean(x.reshape(len(x), groups, -1), dim=2, correction=0)
        scale = (variance + eps).rsqrt()
        sums: tuple[Tensor, Tensor] = kernels_for(x).normalised_sums(delta, x, mean, scale)
        ctx.save_for_backward(delta, x, mean, scale, *sums)
        return sums

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        delta, x, mean, scale, *sums = ctx.saved_tensors
        to_delta, to_x = kernels_for(x).normalised_sums_back(delta, x, mean, scale, sums, gradients)
        return to_delta, to_x, None, None


def _second(
    x_hat: Tensor, scale: Tensor, v: Tensor, w: Tensor, pulled_v: Tensor, pulled_w: Tensor
) -> Tensor:
    """The derivative of ⟨w, P(v)⟩ with respect to x; groups are the last dimension."""
    along_v, along_w, both = (
        ((one * other).sum(dim=-1, keepdim=True) * scale).div_(-x_hat.shape[-1])
        for one, other in ((v, x_hat), (w, x_hat), (v, pulled_w))
    )
    return torch.addcmul(torch.addcmul(pulled_v * along_w, pulled_w, along_v), x_hat, both)


class _LayerNorm(Function):
    """x ↦ x̂ over the last dimension, by torch's own kernel."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float) -> Tensor:
        result, mean, scale = torch.native_layer_norm(x, x.shape[-1:], None, None, eps)
        ctx.save_for_backward(x, result, mean, scale)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        x, x_hat, mean, scale = ctx.saved_tensors
        return _LayerPulled.apply(gradients[0], x, x_hat.detach(), mean, scale), None


class _LayerPulled(Function):
    """(v, x) ↦ P(v), with x̂, m(x) and s already computed."""

    generate_vmap_rule = True

    @staticmethod
    def forward(v: Tensor, x: Tensor, x_hat: Tensor, mean: Tensor, scale: Tensor) -> Tensor:
        return _pulled(v, x, mean, scale)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs, output)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        v, x, x_hat, mean, scale, pulled_v = ctx.saved_tensors
        w = gradients[0]
        pulled_w = _pulled(w, x, mean, scale)
        return pulled_w, _second(x_hat, scale, v, w, pulled_v, pulled_w), None, None, None


def _pulled(v: Tensor, x: Tensor, mean: Tensor, scale: Tensor) -> Tensor:
    """P(v)."""
    back = torch.ops.aten.native_layer_norm_backward
    return back(v, x, x.shape[-1:], mean, scale, None, None, [True, False, False])[0]


def layer_norm(
    x: Tensor,
    shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """``F.layer_norm`` of inputs […, *shape]; differentiable twice in x, with constant weights.

    Example:
        >>> layer_norm(torch.tensor([[1.0, 3.0]]), (2,), torch.tensor([1.0, 2.0]), eps=0.0)
        tensor([[-1.,  2.]])
    """
    result = _LayerNorm.apply(wide(x).flatten(-len(shape)), eps).reshape(x.shape)
    result = result if weight is None else result * weight
    result = result if bias is None else result + bias
    return result.to(normalised_dtype(x))


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
register_rule(nn.GroupNorm, GroupNormRule())
register_substitute(
    nn.LayerNorm, lambda m: lambda x: layer_norm(x, m.normalized_shape, m.weight, m.bias, m.eps)
)
register_substitute(
    nn.GroupNorm,
    lambda m: lambda x: group_norm(x, m.num_groups, m.weight, m.bias, m.eps),
    device="cuda",
)
