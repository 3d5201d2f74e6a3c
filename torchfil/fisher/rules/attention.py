"""Multi-head attention in steps.

torch's own is a single function, which hides what each weight is applied to; here its projections
are linear layers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchfil.fisher.rules.substitutes import register_substitute


def attends_in_steps(module: nn.MultiheadAttention) -> bool:
    """Whether :func:`_in_steps` can compute it: it must not add rows to keys and values."""
    return (
        module.bias_k is None
        and not module.add_zero_attn
        and type(module).forward is nn.MultiheadAttention.forward
    )


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
    """``module.forward`` with its projections as linear layers.

    Dropout draws in the same order as torch.
    """
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
        weights = (
            F.dropout(scores.flatten(0, 1), dropout).unflatten(0, scores.shape[:2])
            if dropout
            else scores
        )
        heads = weights @ v
        weights = weights.mean(dim=1) if average_attn_weights else weights
    else:
        heads = F.scaled_dot_product_attention(q, k, v, mask, dropout)

    # Its memory layout is torch's own, time first, so that dropout after it draws in the same
    # order.
    result = module.out_proj(heads.transpose(1, 2).flatten(2)).transpose(0, 1).contiguous()
    return result.transpose(0, 1) if module.batch_first else result, weights


def _projected(
    module: nn.MultiheadAttention, query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, ...]:
    """Queries, keys and values, [batch, T, heads·width] each."""
    bias = module.in_proj_bias
    if module._qkv_same_embed_dim and query is key and key is value:
        return F.linear(query, module.in_proj_weight, bias).chunk(3, dim=-1)
    own = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
    matrices = module.in_proj_weight.chunk(3) if module._qkv_same_embed_dim else own
    biases = (None,) * 3 if bias is None else bias.chunk(3)
    return tuple(
        F.linear(x, weight, b)
        for x, weight, b in zip((query, key, value), matrices, biases, strict=True)
    )


def _added_to_scores(padding: Tensor | None, mask: Tensor | None, q: Tensor) -> Tensor | None:
    """Both masks as a single one that broadcasts to [batch, heads, T, S]."""
    if mask is not None:
        mask = _additive(
            mask.reshape(*q.shape[:2], *mask.shape[1:]) if mask.ndim == 3 else mask, q.dtype
        )
    if padding is None:
        return mask
    bias = _additive(padding, q.dtype).reshape(len(q), 1, 1, -1)
    return bias if mask is None else mask + bias


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """−∞ where a boolean mask is True, and 0 elsewhere; other masks are added as they are."""
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, -torch.inf)


register_substitute(nn.MultiheadAttention, _substitute)
