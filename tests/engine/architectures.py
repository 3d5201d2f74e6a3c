"""Small networks in the style of the day and out of the ordinary, with dropout of every
spelling.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.engine.ways import Calling


def drop_path(x: Tensor, probability: float, training: bool) -> Tensor:
    """Drops a whole branch of an example, as timm writes it."""
    if probability == 0 or not training:
        return x
    keep = 1 - probability
    return x * x.new_empty((len(x),) + (1,) * (x.ndim - 1)).bernoulli_(keep).div_(keep)


def _convnext_block(self: Any, x: Tensor) -> Tensor:
    h = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
    h = self.dropout(F.gelu(self.up(h)))
    h = self.scale * F.dropout(self.down(h), self.dropout.p, self.training)
    return x + drop_path(h.permute(0, 3, 1, 2), self.dropout.p, self.training)


class ConvNeXt(nn.Sequential):
    """Depthwise convolution, LayerNorm over channels last, two pointwise layers, layer scale,
    residual.
    """

    def __init__(self, kernel: int = 3, dropout: float = 0.0, width: int = 3) -> None:
        block = Calling(
            _convnext_block,
            depthwise=nn.Conv2d(width, width, kernel, padding=kernel // 2, groups=width),
            norm=nn.LayerNorm(width),
            up=nn.Linear(width, 2 * width),
            down=nn.Linear(2 * width, width),
            scale=nn.Parameter(torch.full((width,), 0.3)),
            dropout=nn.Dropout(dropout),
        )
        mean = Calling(lambda self, x: x.mean(dim=(2, 3)))
        super().__init__(nn.Conv2d(1, width, 2, stride=2), block, mean, nn.Linear(width, 3))


def _attention(self: Any, x: Tensor) -> Tensor:
    """Written by hand, or by torch's function."""
    q, k, v = (
        layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        for layer in (self.queries, self.keys, self.values)
    )
    if self.fused:
        mixed = F.scaled_dot_product_attention(
            q, k, v, dropout_p=self.dropout.p if self.training else 0.0
        )
    else:
        mixed = self.dropout((q @ k.mT / q.shape[-1] ** 0.5).softmax(dim=-1)) @ v
    return self.out(mixed.transpose(1, 2).flatten(2))


def attention(kind: str, width: int, heads: int, dropout: float) -> nn.Module:
    layers = {name: nn.Linear(width, width) for name in ("queries", "keys", "values", "out")}
    return Calling(
        _attention, heads=heads, fused=kind == "fused", dropout=nn.Dropout(dropout), **layers
    )


class Encoder(nn.Module):
    """Tokens, a bare table of positions, one block (or torch's own layer), a head on the mean."""

    def __init__(
        self, kind: str = "by hand", dropout: float = 0.0, *, norm_first: bool = True
    ) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(9, 4), nn.Parameter(torch.randn(4, 4))
        self.dropout, self.norm_first = nn.Dropout(dropout), norm_first
        self.attention = attention(kind, 4, 2, dropout)
        self.first, self.second = nn.LayerNorm(4), nn.LayerNorm(4)
        self.up, self.down, self.head = nn.Linear(4, 6), nn.Linear(6, 4), nn.Linear(4, 3)

    def _mlp(self, x: Tensor) -> Tensor:
        return F.dropout(self.down(self.dropout(F.gelu(self.up(x)))), self.dropout.p, self.training)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.dropout(self.embedding(tokens) + self.positions[: tokens.shape[1]])
        if self.norm_first:
            x = x + self.attention(self.first(x))
            x = x + drop_path(self._mlp(self.second(x)), self.dropout.p, self.training)
        else:
            x = self.first(x + self.attention(x))
            x = self.second(x + self._mlp(x))
        return self.head(x.mean(dim=1))


def _torch_layer(self: Any, tokens: Tensor) -> Tensor:
    return self.head(self.layer(self.embedding(tokens)).mean(dim=1))


def torch_layer(dropout: float) -> nn.Module:
    """torch's encoder layer."""
    layer = nn.TransformerEncoderLayer(4, 2, 6, dropout, "gelu", batch_first=True)
    return Calling(_torch_layer, embedding=nn.Embedding(9, 4), layer=layer, head=nn.Linear(4, 3))


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
        return self.last(h)


def behind(dropout: float = 0.3) -> nn.Module:
    """Uses a child's weight behind its back, in an operation of which nothing is known."""

    def forward(self: Any, x: Tensor) -> Tensor:
        scores = torch.tensordot(x.flatten(1), self.layer.weight, dims=([1], [1])) + self.layer.bias
        return self.head(self.dropout(scores.tanh()))

    return Calling(
        forward, layer=nn.Linear(16, 5), head=nn.Linear(5, 3), dropout=nn.Dropout(dropout)
    )


class MaskedOtherwise(nn.Module):
    """Masks that do not run over the examples first.

    A shared mask of 4 in batches of 4 looks like one of examples.
    """

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
    """Two blocks of layers with dropout, each under an activation checkpoint; ``around`` may be
    changed afterwards.
    """

    def __init__(self, kind: str, dropout: float = 0.3) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 8), nn.Linear(8, 3)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.Tanh(), nn.Dropout(dropout))
            for _ in range(2)
        )
        self.around: Any = (
            None if kind == "none" else partial(checkpoint, use_reentrant=kind == "reentrant")
        )

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x.flatten(1))
        for block in self.blocks:
            h = h + (block(h) if self.around is None else self.around(block, h))
        return self.last(h)


class Shared(nn.Module):
    """A layer without a rule, one of whose arguments all examples share.

    It has as many rows as a batch of 4.
    """

    def __init__(self) -> None:
        super().__init__()
        product = "bi,ij,kj->bj"
        self.layer = Calling(
            lambda m, x, rows: torch.einsum(product, x, m.mix, rows),
            mix=nn.Parameter(torch.rand(5, 3)),
        )
        self.head = nn.Linear(3, 3)
        self.register_buffer("rows", torch.rand(4, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.layer(x, self.rows)))


def beside(base: nn.Linear) -> nn.Module:
    """A trained product of two small layers beside a frozen one."""
    down, up = (
        nn.Linear(base.in_features, 2, bias=False),
        nn.Linear(2, base.out_features, bias=False),
    )
    parts = {"base": base.requires_grad_(False), "down": down, "up": up}
    return Calling(lambda self, x: self.base(x) + self.up(self.down(x)), **parts)


def lora(width: int = 5, out: int = 3) -> nn.Module:
    """Two layers of low rank beside frozen ones."""
    return nn.Sequential(beside(nn.Linear(width, 6)), nn.Tanh(), beside(nn.Linear(6, out)))


class Recurrent(nn.Module):
    """Takes [time, batch] tokens, or [batch, time] if ``first``; a class of the last state."""

    def __init__(self, kind: Any = nn.LSTM, *, first: bool = True) -> None:
        super().__init__()
        self.embedding, self.first = nn.Embedding(9, 3), first
        self.layer, self.head = kind(3, 4), nn.Linear(4, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        states = self.layer(x.transpose(0, 1) if self.first else x)[0]
        return self.head(states)[-1]  # of [time, batch, classes], as Opacus's hooks need it
