r"""Normalisation: rules, and forward passes whose second derivative has a closed form.

With m(·) the mean over one group of M numbers, s = (m((x − m(x))²) + eps)^{-1/2} and x̂ = s(x − m(x)),

    ⟨v, ∂x̂⟩ = ⟨P(v), ∂x⟩,       P(v) = s (v − m(v) − x̂ m(v x̂)),
    ⟨w, ∂P(v)⟩ = ⟨P(w), ∂v⟩ − s ⟨m(w x̂) P(v) + m(v x̂) P(w) + m(v P(w)) x̂, ∂x⟩.

A second derivative therefore costs two first derivatives and three inner products per group; torch's own is a graph of
a hundred elementary operations. On a GPU with Triton, each takes one kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from torchfil.fisher.precision import normalised_dtype, wide
from torchfil.fisher.rules.accelerated import kernels_for
from torchfil.fisher.rules.base import LayerRule, register_rule
from torchfil.fisher.rules.call import Call
from torchfil.fisher.rules.function import Function
from torchfil.fisher.rules.substitutes import register_substitute

__all__ = ["GroupNormRule", "NormalisationRule", "group_norm", "layer_norm"]


class NormalisationRule(LayerRule):
    """A scale and a shift of a normalised input x̂: gradients Σ_t δ_t x̂_t and Σ_t δ_t, formed once and used for all."""

    parameter_names = frozenset({"weight", "bias"})

    def __init__(self, normalised: Callable[[Any, Tensor], Tensor], *, channels_first: bool) -> None:
        self.normalised = normalised
        self.channels_first = channels_first

    def gradients(self, call: Call) -> dict[str, Tensor]:
        """Σ_t δ_t x̂_t and Σ_t δ_t of every example."""
        if not call.memo:
            shape = next(iter(call.parameters.values())).shape
            if "weight" in call.parameters:
                call.memo["weight"] = self._summed(call.delta * self.normalised(call.module, call.input), shape)
            if "bias" in call.parameters:
                call.memo["bias"] = self._summed(call.delta, shape)
        return call.memo

    def _summed(self, value: Tensor, shape: torch.Size) -> Tensor:
        """The sum over positions: those after the channels, or those between batch and normalised dimensions."""
        if self.channels_first:
            return value.reshape(*value.shape[:2], -1).sum(dim=2)
        return value.reshape(len(value), -1, *shape).sum(dim=1)


class GroupNormRule(NormalisationRule):
    """:class:`NormalisationRule` for groups of channels, in one kernel if the GPU has one."""

    def __init__(self) -> None:
        super().__init__(lambda m, x: F.group_norm(x, m.num_groups, eps=m.eps), channels_first=True)

    def gradients(self, call: Call) -> dict[str, Tensor]:
        """Both sums from one kernel, if there is one."""
        if not call.memo:
            assert isinstance(call.module, nn.GroupNorm)
            sums = _normalised_sums(call.module, call.delta, call.input)
            if sums is None:
                return super().gradients(call)
            named = zip(("weight", "bias"), sums, strict=True)
            call.memo.update({name: value for name, value in named if name in call.parameters})
        return call.memo


class _GroupNorm(Function):
    """x ↦ x̂·weight + bias over groups of channels, by torch's own kernels; [batch, channels, positions]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, groups: int, eps: float) -> Tensor:
        batch, channels, positions = x.shape
        result, mean, scale = torch.native_group_norm(x, weight, bias, batch, channels, positions, groups, eps)
        ctx.save_for_backward(x, mean, scale, weight)
        ctx.groups = groups
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        return _GroupPulled.apply(gradients[0].contiguous(), *ctx.saved_tensors, ctx.groups), None, None, None, None


class _GroupPulled(Function):
    """(γ, x) ↦ P(v) for v = γ·weight."""

    generate_vmap_rule = True

    @staticmethod
    def forward(gamma: Tensor, x: Tensor, mean: Tensor, scale: Tensor, weight: Tensor | None, groups: int) -> Tensor:
        return _pulled_by_group(gamma, x, mean, scale, weight, groups)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        *tensors, ctx.groups = inputs
        ctx.save_for_backward(*tensors, output)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        gamma, x, mean, scale, weight, pulled_v = ctx.saved_tensors
        w, groups = gradients[0].contiguous(), ctx.groups
        kernels = kernels_for(x)
        if kernels is not None:
            both_derivatives = kernels.group_pulled_twice(gamma, w, x, mean, scale, weight, groups)
            return (*both_derivatives, None, None, None, None)
        batch, channels, positions = x.shape
        pulled_w = _pulled_by_group(w, x, mean, scale, None, groups)
        to_gamma = pulled_w if weight is None else pulled_w * weight[:, None]
        if not ctx.needs_input_grad[1]:
            return to_gamma, None, None, None, None, None
        size = channels // groups * positions

        def along(value: Tensor, factor: Tensor | None) -> Tensor:
            """m(value · factor · x̂), [batch, groups]."""
            centred = _dot(value, x) - mean.repeat_interleave(channels // groups, dim=1) * value.sum(dim=2)
            centred = centred if factor is None else centred * factor
            return centred.reshape(batch, groups, -1).sum(dim=2) * scale / size

        rows = (batch, groups, -1)
        both = _dot(gamma.reshape(rows), to_gamma.reshape(rows)) * scale.square() / size
        from_v, from_w = -scale * along(w, None), -scale * along(gamma, weight)
        to_x = pulled_v.reshape(rows) * from_v[:, :, None]
        to_x = torch.addcmul(to_x, pulled_w.reshape(rows), from_w[:, :, None])
        to_x = torch.addcmul(to_x, x.reshape(rows), both[:, :, None], value=-1).add_((both * mean)[:, :, None])
        return to_gamma, to_x.reshape(x.shape), None, None, None, None


def _pulled_by_group(
    value: Tensor, x: Tensor, mean: Tensor, scale: Tensor, weight: Tensor | None, groups: int
) -> Tensor:
    batch, channels, positions = x.shape
    kernels = kernels_for(x)
    if kernels is not None:
        pulled: Tensor = kernels.group_pulled(value, x, mean, scale, weight, groups)
        return pulled
    result: Tensor = torch.ops.aten.native_group_norm_backward(
        value, x, mean, scale, weight, batch, channels, positions, groups, [True, False, False]
    )[0]
    return result


class _NormalisedSums(Function):
    """(δ, x) ↦ Σ_t δ_t x̂_t and Σ_t δ_t over positions, [batch, channels] each, by GPU kernels."""

    @staticmethod
    def forward(ctx: Any, delta: Tensor, x: Tensor, groups: int, eps: float) -> tuple[Tensor, Tensor]:
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


def _normalised_sums(module: nn.GroupNorm, delta: Tensor, x: Tensor) -> tuple[Tensor, Tensor] | None:
    """Σ_t δ_t x̂_t and Σ_t δ_t over the positions of [batch, channels, …]; None if torch has to compute them."""
    if kernels_for(x) is None or x.ndim < 3:
        return None
    flat_delta, flat_x = (value.reshape(*x.shape[:2], -1).contiguous() for value in (delta, x))
    return _NormalisedSums.apply(flat_delta, flat_x, module.num_groups, module.eps)  # type: ignore[return-value]


def _dot(a: Tensor, b: Tensor) -> Tensor:
    """Inner products over the last dimension."""
    return (a * b).sum(dim=-1)


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
        w, size = gradients[0], x.shape[-1]
        pulled_w = _pulled(w, x, mean, scale)
        if not ctx.needs_input_grad[1]:
            return pulled_w, None, None, None, None
        along_v, along_w, both = (
            (_dot(one, other).unsqueeze(-1) * scale).div_(-size)
            for one, other in ((v, x_hat), (w, x_hat), (v, pulled_w))
        )
        to_x = torch.addcmul(torch.addcmul(pulled_v * along_w, pulled_w, along_v), x_hat, both)
        return pulled_w, to_x, None, None, None


def _pulled(v: Tensor, x: Tensor, mean: Tensor, scale: Tensor) -> Tensor:
    """P(v)."""
    result: Tensor = torch.ops.aten.native_layer_norm_backward(
        v, x, x.shape[-1:], mean, scale, None, None, [True, False, False]
    )[0]
    return result


def layer_norm(
    x: Tensor, shape: Sequence[int], weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
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
    x: Tensor, groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """``F.group_norm`` of inputs [batch, channels, …]; differentiable twice in x, with constant weights.

    On GPUs without Triton, torch's own derivative is used: its many operations are mostly on few numbers.

    Example:
        >>> group_norm(torch.tensor([[1.0, 3.0]]), 1, eps=0.0)
        tensor([[-1.,  1.]])
    """
    if x.device.type != "cpu" and kernels_for(x) is None:
        return F.group_norm(x, groups, weight, bias, eps)
    flat = wide(x).reshape(*x.shape[:2], -1).contiguous()
    weights = [None if value is None else wide(value) for value in (weight, bias)]
    return _GroupNorm.apply(flat, *weights, groups, eps).reshape(x.shape).to(normalised_dtype(x))


def _layer_substitute(module: nn.LayerNorm) -> Callable[[Tensor], Tensor]:
    return lambda x: layer_norm(x, module.normalized_shape, module.weight, module.bias, module.eps)


def _group_substitute(module: nn.GroupNorm) -> Callable[[Tensor], Tensor]:
    return lambda x: group_norm(x, module.num_groups, module.weight, module.bias, module.eps)


register_rule(
    nn.LayerNorm,
    NormalisationRule(lambda m, x: F.layer_norm(x, m.normalized_shape, eps=m.eps), channels_first=False),
)
register_substitute(nn.LayerNorm, _layer_substitute)
register_rule(
    nn.RMSNorm, NormalisationRule(lambda m, x: F.rms_norm(x, m.normalized_shape, eps=m.eps), channels_first=False)
)
register_rule(nn.GroupNorm, GroupNormRule())
register_substitute(nn.GroupNorm, _group_substitute)
for _kind in (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d):
    register_rule(_kind, NormalisationRule(lambda m, x: F.instance_norm(x, eps=m.eps), channels_first=True))
