"""Small networks in the style of the day and out of the ordinary, with dropout of every spelling."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from opacus.layers import DPMultiheadAttention
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


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


class TorchLayer(nn.Module):
    """torch's encoder layer."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(9, 4), nn.Linear(4, 3)
        self.layer = nn.TransformerEncoderLayer(4, 2, 6, dropout, "gelu", batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        return torch.as_tensor(self.head(self.layer(self.embedding(tokens)).mean(dim=1)))


class Perceptron(nn.Module):
    """Dropout by a layer, by a function and by hand, on [batch, 1, 4, 4] images."""

    def __init__(self, dropout: float = 0.3, by: str = "all") -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(16, 6), nn.Linear(6, 5), nn.Linear(5, 3)
        self.dropout = nn.Dropout(dropout if by in ("all", "layer") else 0.0)
        self.by_function = dropout if by in ("all", "function") else 0.0
        self.by_hand = dropout if by in ("all", "hand") else 0.0

    def forward(self, x: Tensor) -> Tensor:
        h = self.dropout(self.first(x.flatten(1)).tanh())
        h = F.dropout(self.second(h).tanh(), self.by_function, self.training)
        if self.training and self.by_hand:
            h = h * h.new_empty(len(h), 1).bernoulli_(1 - self.by_hand)
        return torch.as_tensor(self.last(h))


class Behind(nn.Module):
    """Uses a child's weight behind its back, in an operation of which nothing is known."""

    def __init__(self, dropout: float = 0.3) -> None:
        super().__init__()
        self.layer, self.head, self.dropout = nn.Linear(16, 5), nn.Linear(5, 3), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        scores = torch.tensordot(x.flatten(1), self.layer.weight, dims=([1], [1])) + self.layer.bias
        return torch.as_tensor(self.head(self.dropout(scores.tanh())))


class MaskedOtherwise(nn.Module):
    """Masks that do not run over the examples first; a shared mask of 4 in batches of 4 looks like one of examples."""

    def __init__(self, layout: str) -> None:
        super().__init__()
        self.first, self.last, self.layout = nn.Linear(4, 4), nn.Linear(4, 3), layout

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, 4) if self.layout == "flat" else x[:, 0]
        rows = rows.transpose(0, 1) if self.layout == "time first" else rows
        h = self.first(rows).tanh()
        if self.layout.startswith("shared"):
            shape = (4,) if self.layout == "shared alike" else (1, 4)
            h = h * F.dropout(torch.ones(shape, dtype=h.dtype, device=h.device), 0.4, self.training)
        else:
            h = F.dropout(h, 0.4, self.training)
        logits: Tensor = self.last(h)
        if self.layout == "flat":
            return logits.unflatten(0, (len(x), -1)).mean(dim=1)
        return logits.mean(dim=0 if self.layout == "time first" else 1)


class Checkpointed(nn.Module):
    """Two blocks of layers with dropout, each under an activation checkpoint; ``around`` may be changed afterwards."""

    def __init__(self, kind: str, dropout: float = 0.3) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 8), nn.Linear(8, 3)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.Tanh(), nn.Dropout(dropout)) for _ in range(2)
        )
        self.around: Any = None if kind == "none" else partial(checkpoint, use_reentrant=kind == "reentrant")

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x.flatten(1))
        for block in self.blocks:
            h = h + (block(h) if self.around is None else self.around(block, h))
        return torch.as_tensor(self.last(h))


class LoRALinear(nn.Module):
    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(self.base(x) + self.up(self.down(x)))


class Recurrent(nn.Module):
    """Takes [time, batch] tokens, or [batch, time] if ``first``; a class of the last state."""

    def __init__(self, kind: Any = nn.LSTM, *, first: bool = True) -> None:
        super().__init__()
        self.embedding, self.first = nn.Embedding(9, 3), first
        self.layer, self.head = kind(3, 4), nn.Linear(4, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        states = self.layer(x.transpose(0, 1) if self.first else x)[0]
        return torch.as_tensor(self.head(states))[-1]  # of [time, batch, classes], as Opacus's hooks need it


class Experts(nn.Module):
    """Two of three experts for each example; rows are sent to them, or all experts see all rows (``mapped``)."""

    def __init__(self, mapped: bool = False, width: int = 4) -> None:
        super().__init__()
        self.gate, self.mapped = nn.Linear(width, 3), mapped
        self.experts = nn.ModuleList([nn.Sequential(nn.Linear(width, 3), nn.Tanh()) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(dim=-1).topk(2, dim=-1)
        if self.mapped:
            dense = (F.one_hot(chosen, 3) * weights[..., None]).sum(dim=1)  # [batch, experts]
            return torch.stack([dense[:, j : j + 1] * expert(x) for j, expert in enumerate(self.experts)]).sum(dim=0)
        out = torch.zeros(len(x), 3, dtype=x.dtype, device=x.device)
        for j, expert in enumerate(self.experts):
            rows, places = (chosen == j).nonzero(as_tuple=True)
            out = out.index_add(0, rows, expert(x[rows]) * weights[rows, places][:, None])
        return out
