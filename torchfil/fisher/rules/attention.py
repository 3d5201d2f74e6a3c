r"""Attention: multi-head attention in steps, and scaled dot product attention with a closed second derivative on GPUs.

torch's own multi-head attention is a single function, which hides what each weight is applied to; here its projections
are linear layers.

For the scaled dot product, let S = s qkᵀ + bias, P = softmax(S) by rows, D = P∘M for dropout's mask M (divided by the
share that it keeps), O = Dv, γ the gradient at O, and m(a) the sum of a row. The backward pass is

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
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from torchfil.fisher.models import REDUCED, autocast_as, autocast_inputs, product_precision, products_in
from torchfil.fisher.rules.substitutes import FUNCTIONS, Function, kernels_for, register_substitute


def attends_in_steps(module: nn.MultiheadAttention) -> bool:
    """Whether :func:`_in_steps` can compute it: it must not add rows to keys and values."""
    return module.bias_k is None and not module.add_zero_attn and type(module).forward is nn.MultiheadAttention.forward


def _substitute(module: nn.MultiheadAttention) -> Callable[..., tuple[Tensor, Tensor | None]]:
    def forward(query: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
        served = attends_in_steps(module) and query.ndim == 3 and not query.is_nested
        return (_in_steps if served else type(module).forward)(module, query, *args, **options)

    return forward


def _in_steps(
    module: nn.MultiheadAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """``module.forward`` with its projections as linear layers; dropout draws in the same order as torch."""
    # A tensor that is passed three times stays one tensor, so one product suffices.
    turned = {id(x): x if module.batch_first else x.transpose(0, 1) for x in (query, key, value)}
    q, k, v = (
        x.unflatten(-1, (module.num_heads, -1)).transpose(1, 2)  # [batch, heads, T, width]
        for x in _projected(module, *(turned[id(x)] for x in (query, key, value)))
    )
    mask = _added_to_scores(key_padding_mask, attn_mask, q)
    dropout = module.dropout if module.training else 0.0
    weights = None
    if need_weights:
        scores = (q * q.shape[-1] ** -0.5) @ k.mT
        scores = torch.softmax(scores if mask is None else scores + mask, dim=-1)
        weights = F.dropout(scores.flatten(0, 1), dropout).unflatten(0, scores.shape[:2]) if dropout else scores
        heads = weights @ v
        weights = weights.mean(dim=1) if average_attn_weights else weights
    else:
        heads = F.scaled_dot_product_attention(q, k, v, mask, dropout)

    # Its memory layout is torch's own, time first, so that dropout after it draws in the same order.
    result = module.out_proj(heads.transpose(1, 2).flatten(2)).transpose(0, 1).contiguous()
    return result.transpose(0, 1) if module.batch_first else result, weights


def _projected(module: Any, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
    """Queries, keys and values, [batch, T, heads·width] each."""
    bias = module.in_proj_bias
    if module._qkv_same_embed_dim and query is key and key is value:
        return F.linear(query, module.in_proj_weight, bias).chunk(3, dim=-1)
    own = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
    matrices = module.in_proj_weight.chunk(3) if module._qkv_same_embed_dim else own
    biases = (None,) * 3 if bias is None else bias.chunk(3)
    return tuple(F.linear(x, weight, b) for x, weight, b in zip((query, key, value), matrices, biases, strict=True))


def _added_to_scores(padding: Tensor | None, mask: Tensor | None, q: Tensor) -> Tensor | None:
    """Both masks as a single one that broadcasts to [batch, heads, T, S]."""
    if mask is not None:
        mask = _additive(mask.reshape(*q.shape[:2], *mask.shape[1:]) if mask.ndim == 3 else mask, q.dtype)
    if padding is None:
        return mask
    bias = _additive(padding, q.dtype).reshape(len(q), 1, 1, -1)
    return bias if mask is None else mask + bias


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """−∞ where a boolean mask is True, and 0 elsewhere; other masks are added as they are."""
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, -torch.inf)


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
    return torch.ops.aten.native_dropout_backward(value, keep, 1 / constants.share)


def _second(
    p: Tensor, dp: Tensor, c: Tensor, d: Tensor, keep: Tensor | None, constants: _Constants
) -> tuple[Tensor, ...]:
    """dS, A and E, for d = γc_vᵀ; all [rows, T, T]."""
    kernels = kernels_for(p)
    if kernels is not None:
        return kernels.attention_pulled_twice(p, dp, c, d, keep, 1 / constants.share)

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
    reduced, dtype = cast[0].dtype in REDUCED, cast[0].dtype
    q, k, v = ((x.float() if reduced else x).reshape(-1, *x.shape[2:]).contiguous() for x in cast)

    # Drawn by dropout itself, in the scores' shape, so that masks are recorded and replayed like torch's own.
    keep = None
    scores = torch.Size((*query.shape[:2], query.shape[2], key.shape[2]))
    if dropout_p > 0:
        ones = torch.ones(scores, dtype=dtype, device=q.device)
        keep = torch.native_dropout(ones, dropout_p, True)[1].reshape(-1, *scores[2:])
    if is_causal:
        attn_mask = torch.ones(scores[2:], dtype=torch.bool, device=q.device).tril()
    bias = None
    if attn_mask is not None:  # True is where attention is allowed
        bias = _additive(~attn_mask if attn_mask.dtype == torch.bool else attn_mask, q.dtype)
    chosen = query.shape[-1] ** -0.5 if scale is None else scale
    constants = _Constants(chosen, 1 - dropout_p, query.shape[:2], reduced=reduced)
    return _Attention.apply(q, k, v, bias, keep, constants).to(dtype).reshape(*query.shape[:3], value.shape[-1])


def _on_gpu(query: Any, *args: Any, **options: Any) -> Tensor | None:
    served = isinstance(query, Tensor) and kernels_for(query, reduced=True) is not None
    return attention(query, *args, **options) if served else None


register_substitute(nn.MultiheadAttention, _substitute)
FUNCTIONS["cuda"][F.scaled_dot_product_attention] = _on_gpu
