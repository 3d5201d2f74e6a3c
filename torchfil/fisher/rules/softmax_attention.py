r"""Scaled dot product attention on GPUs, with its second derivative in closed form.

Let S = s qkᵀ + bias, P = softmax(S) by rows, D = P∘M for dropout's mask M (divided by the share that it keeps), O = Dv,
γ the gradient at O, and m(a) the sum of a row. The backward pass is

    dP = (γvᵀ)∘M,   dS = P∘(dP − m(dP∘P)),   dq = s dS k,   dk = s dSᵀq,   dv = Dᵀγ.

Given cotangents c_q, c_k, c_v of dq, dk, dv, with C = s(c_q kᵀ + q c_kᵀ) and a = m(C∘P), the cotangents of their inputs
are

    of γvᵀ:  A = P∘(C − a)∘M,           of P:  B = C∘(dP − m(dP∘P)) − a dP + (γc_vᵀ)∘M,
    of S:    E = P∘(B − m(B∘P)),
    of γ:  Av + Dc_v,   of v:  Aᵀγ,   of q:  s(dS c_k + E k),   of k:  s(dSᵀc_q + Eᵀq).

Apart from matrix products, this is one kernel; torch's own second derivative is thirty operations on matrices of the
size of P.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from torchfil.fisher.precision import autocast_as, autocast_inputs, is_reduced, product_precision, products_in
from torchfil.fisher.rules.accelerated import kernels_for
from torchfil.fisher.rules.function import Function
from torchfil.fisher.rules.substitutes import register_function

__all__ = ["attention"]


class _Attention(Function):
    """(q, k, v) ↦ O, [rows, T, width] each; ``keep`` is dropout's mask, of which ``share`` is kept."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, keep: Tensor | None, constants: _Constants
    ) -> Tensor:
        with constants.products(q.device):
            scores = _scaled(q, k.mT, constants.scale)
            if bias is not None:
                scores = (scores.view(*constants.heads, *scores.shape[1:]) + bias).view(scores.shape)
            p = torch.softmax(scores, dim=-1)
            ctx.save_for_backward(q, k, v, p, keep)
            ctx.constants = constants
            return _dropped(p, keep, constants) @ v

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        return (*_AttentionPulled.apply(gradients[0], *ctx.saved_tensors, ctx.constants), None, None, None)


class _AttentionPulled(Function):
    """(γ, q, k, v) ↦ (dq, dk, dv), where P is a function of q and k."""

    @staticmethod
    def forward(
        ctx: Any, gamma: Tensor, q: Tensor, k: Tensor, v: Tensor, p: Tensor, keep: Tensor | None, constants: _Constants
    ) -> tuple[Tensor, Tensor, Tensor]:
        with constants.products(q.device):
            dp = _dropped(gamma @ v.mT, keep, constants)
            ds: Tensor = torch.ops.aten._softmax_backward_data(dp, p, -1, p.dtype)
            ctx.save_for_backward(gamma, q, k, v, p, keep, dp)
            ctx.constants = constants
            scale = constants.scale
            return _scaled(ds, k, scale), _scaled(ds.mT, q, scale), _dropped(p, keep, constants).mT @ gamma

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        c_q, c_k, c_v = gradients
        gamma, q, k, v, p, keep, dp = ctx.saved_tensors
        constants: _Constants = ctx.constants
        with constants.products(q.device):
            c = torch.baddbmm(_scaled(q, c_k.mT, constants.scale), c_q, k.mT, alpha=constants.scale)
            ds, a, e = _second(p, dp, c, gamma @ c_v.mT, keep, constants)
            to_gamma = torch.baddbmm(a @ v, _dropped(p, keep, constants), c_v)
            to_q = _scaled(ds, c_k, constants.scale).baddbmm_(e, k, alpha=constants.scale)
            to_k = _scaled(ds.mT, c_q, constants.scale).baddbmm_(e.mT, q, alpha=constants.scale)
            return to_gamma, to_q, to_k, a.mT @ gamma, None, None, None


class _Constants:
    """Constants of a call: s, dropout's share, [batch, heads], and whether TF32 loses no digits."""

    def __init__(self, scale: float, share: float, heads: torch.Size, *, reduced: bool) -> None:
        self.scale, self.share, self.heads, self.reduced = scale, share, heads, reduced

    @contextlib.contextmanager
    def products(self, device: torch.device) -> Iterator[None]:
        """Inside, numbers that come from bfloat16 are multiplied in TF32, which keeps all their digits."""
        with autocast_as(None, device), products_in("tf32" if self.reduced else product_precision()):
            yield


def _scaled(a: Tensor, b: Tensor, scale: float) -> Tensor:
    """s · a b."""
    return torch.baddbmm(a.new_empty(()), a, b, beta=0, alpha=scale)


def _dropped(value: Tensor, keep: Tensor | None, constants: _Constants) -> Tensor:
    """value ∘ M."""
    if keep is None:
        return value
    result: Tensor = torch.ops.aten.native_dropout_backward(value, keep, 1 / constants.share)
    return result


def _second(
    p: Tensor, dp: Tensor, c: Tensor, d: Tensor, keep: Tensor | None, constants: _Constants
) -> tuple[Tensor, Tensor, Tensor]:
    """dS, A and E, for d = γc_vᵀ; all [rows, T, T]."""
    kernels = kernels_for(p)
    if kernels is not None:
        result: tuple[Tensor, Tensor, Tensor] = kernels.attention_pulled_twice(p, dp, c, d, keep, 1 / constants.share)
        return result

    def mean(value: Tensor) -> Tensor:
        return (value * p).sum(dim=-1, keepdim=True)

    centred, along = dp - mean(dp), mean(c)
    of_p = c * centred - along * dp + _dropped(d, keep, constants)
    return p * centred, _dropped(p * (c - along), keep, constants), p * (of_p - mean(of_p))


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor | None:
    """``F.scaled_dot_product_attention`` of [batch, heads, T, width], differentiable twice; None if not supported.

    Example:
        >>> q, k, v = (torch.randn(2, 3, 4, 5, requires_grad=True) for _ in range(3))
        >>> torch.allclose(attention(q, k, v), F.scaled_dot_product_attention(q, k, v), atol=1e-6)
        True
    """
    if enable_gqa and query.ndim == key.ndim == value.ndim == 4:  # several heads of queries share one of keys
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    given = (query, key, value)
    if any(x.ndim != 4 or x.shape[:2] != query.shape[:2] for x in given) or dropout_p >= 1:
        return None
    if not any(x.requires_grad for x in given) or (attn_mask is not None and attn_mask.requires_grad):
        return None
    cast = autocast_inputs(*given)
    reduced, dtype = is_reduced(cast[0].dtype), cast[0].dtype
    q, k, v = ((x.float() if reduced else x).reshape(-1, *x.shape[2:]).contiguous() for x in cast)

    # Drawn by dropout itself, in the scores' shape, so that masks are recorded and replayed like torch's own.
    keep = None
    scores = torch.Size((*query.shape[:2], query.shape[2], key.shape[2]))
    if dropout_p > 0:
        ones = torch.ones(scores, dtype=dtype, device=q.device)
        keep = torch.native_dropout(ones, dropout_p, True)[1].reshape(-1, *scores[2:])
    bias = _bias(attn_mask, scores, is_causal, q)
    chosen = query.shape[-1] ** -0.5 if scale is None else scale
    constants = _Constants(chosen, 1 - dropout_p, query.shape[:2], reduced=reduced)
    result = _Attention.apply(q, k, v, bias, keep, constants)
    return result.to(dtype).reshape(*query.shape[:3], value.shape[-1])


def _bias(mask: Tensor | None, shape: torch.Size, is_causal: bool, like: Tensor) -> Tensor | None:
    """The bias that is added to the scores; it broadcasts to [batch, heads, T, S]."""
    if is_causal:
        mask = torch.ones(shape[2:], dtype=torch.bool, device=like.device).tril()
    if mask is None or mask.dtype != torch.bool:
        return None if mask is None else mask.to(like.dtype)
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill(~mask, float("-inf"))


def _on_gpu(query: Any, *args: Any, **options: Any) -> Tensor | None:
    served = isinstance(query, Tensor) and kernels_for(query, reduced=True) is not None
    return attention(query, *args, **options) if served else None


register_function(F.scaled_dot_product_attention, _on_gpu, device="cuda")
