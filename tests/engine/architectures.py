"""Small networks in the style of the day, with dropout of every spelling."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from opacus.layers import DPMultiheadAttention
from torch import Tensor, nn


def drop_path(x: Tensor, probability: float, training: bool) -> Tensor:
    """Drops a whole branch of an example, as timm writes it."""
    if probability == 0 or not training:
        return x
    keep = 1 - probability
    return x * x.new_empty((len(x),) + (1,) * (x.ndim - 1)).bernoulli_(keep).div_(keep)


class ConvNeXtBlock(nn.Module):
    """Depthwise convolution, LayerNorm over channels last, two pointwise layers, layer scale, residual."""

    def __init__(self, width: int, kernel: int, dropout: float) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, kernel, padding=kernel // 2, groups=width)
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.scale = nn.Parameter(torch.full((width,), 0.3))
        self.dropout = nn.Dropout(dropout)
        self.path = dropout

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        h = self.dropout(F.gelu(self.up(h)))
        h = self.scale * F.dropout(self.down(h), self.path, self.training)
        return x + drop_path(h.permute(0, 3, 1, 2), self.path, self.training)


class ConvNeXt(nn.Module):
    def __init__(self, kernel: int = 3, dropout: float = 0.0, width: int = 3, depth: int = 1) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, width, 2, stride=2)
        self.blocks = nn.Sequential(*(ConvNeXtBlock(width, kernel, dropout) for _ in range(depth)))
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.blocks(self.stem(x)).mean(dim=(2, 3)))
        return logits


class Attention(nn.Module):
    """Written by hand."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.queries, self.keys, self.values, self.out = (nn.Linear(width, width) for _ in range(4))
        self.dropout = nn.Dropout(dropout)

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self._split(layer(x)) for layer in (self.queries, self.keys, self.values))
        weights = self.dropout((q @ k.mT / q.shape[-1] ** 0.5).softmax(dim=-1))
        mixed: Tensor = self.out((weights @ v).transpose(1, 2).flatten(2))
        return mixed


class FusedAttention(Attention):
    """By torch's function."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self._split(layer(x)) for layer in (self.queries, self.keys, self.values))
        p = self.dropout.p if self.training else 0.0
        mixed: Tensor = self.out(F.scaled_dot_product_attention(q, k, v, dropout_p=p).transpose(1, 2).flatten(2))
        return mixed


class ReadyMade(nn.Module):
    """torch's or Opacus's module."""

    def __init__(self, kind: Any, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.inner = kind(width, heads, dropout=dropout, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        mixed: Tensor = self.inner(x, x, x, need_weights=False)[0]
        return mixed


def attention(kind: str, width: int, heads: int, dropout: float) -> nn.Module:
    ready_made: dict[str, Any] = {"torch": nn.MultiheadAttention, "opacus": DPMultiheadAttention}
    if kind in ready_made:
        return ReadyMade(ready_made[kind], width, heads, dropout)
    return {"by hand": Attention, "fused": FusedAttention}[kind](width, heads, dropout)


class EncoderBlock(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float, kind: str, norm_first: bool) -> None:
        super().__init__()
        self.attention = attention(kind, width, heads, dropout)
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 6), nn.Linear(6, width)
        self.dropout, self.norm_first = nn.Dropout(dropout), norm_first

    def _mlp(self, x: Tensor) -> Tensor:
        return F.dropout(self.down(self.dropout(F.gelu(self.up(x)))), self.dropout.p, self.training)

    def forward(self, x: Tensor) -> Tensor:
        if self.norm_first:
            x = x + self.attention(self.first(x))
            return x + drop_path(self._mlp(self.second(x)), self.dropout.p, self.training)
        x = self.first(x + self.attention(x))
        last: Tensor = self.second(x + self._mlp(x))
        return last


class Encoder(nn.Module):
    """Tokens, a bare table of positions, one block, a head on the mean."""

    def __init__(self, kind: str = "by hand", dropout: float = 0.0, *, norm_first: bool = True, length: int = 4):
        super().__init__()
        self.embedding = nn.Embedding(9, 4)
        self.positions = nn.Parameter(torch.randn(length, 4))
        self.dropout = nn.Dropout(dropout)
        self.block = EncoderBlock(4, 2, dropout, kind, norm_first)
        self.head = nn.Linear(4, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.dropout(self.embedding(tokens) + self.positions[: tokens.shape[1]])
        logits: Tensor = self.head(self.block(h).mean(dim=1))
        return logits
