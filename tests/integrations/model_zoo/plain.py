"""torch's and Opacus's own modules, as people put them together."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from .model import CLASSES, EXAMPLES, WORDS, Model, images, seeded, tokens

__all__ = ["MODELS"]

WIDTH = 6


class Recurrent(nn.Module):
    """Words, a recurrent layer, a head on its last state."""

    def __init__(self, dropout: float, kind: Any) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.layer = kind(WIDTH, WIDTH, num_layers=2, dropout=dropout, batch_first=True)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.layer(self.embedding(words))[0][:, -1])


class Attending(nn.Module):
    """Words, an attention layer, a head on its mean."""

    def __init__(self, dropout: float, kind: Any) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.layer = kind(WIDTH, 2, dropout=dropout, batch_first=True)

    def forward(self, words: Tensor) -> Tensor:
        h = self.embedding(words)
        return self.head(self.layer(h, h, h, need_weights=False)[0].mean(dim=1))


class Encoding(nn.Module):
    """Words, torch's transformer, a head on its mean."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, CLASSES)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.layers(self.embedding(words)).mean(dim=1))


class BagOfWords(nn.Module):
    """The mean of the words, two layers."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.EmbeddingBag(WORDS, WIDTH, mode="mean")
        self.hidden, self.dropout, self.head = nn.Linear(WIDTH, 5), nn.Dropout(dropout), nn.Linear(5, CLASSES)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.dropout(self.hidden(self.embedding(words)).tanh()))


class TwoHeads(nn.Module):
    """A class and a number for each example."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.trunk, self.dropout = nn.Linear(7, 6), nn.Dropout(dropout)
        self.classes, self.number = nn.Linear(6, CLASSES), nn.Linear(6, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = self.dropout(self.trunk(x).tanh())
        return {"classes": self.classes(h), "number": self.number(h)[:, 0]}


class UNet(nn.Module):
    """Down, up, and a bridge; a class for each pixel."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.SiLU())
        self.down = nn.Sequential(nn.Conv2d(4, 6, 3, stride=2, padding=1), nn.GroupNorm(2, 6), nn.SiLU())
        self.dropout, self.up = nn.Dropout2d(dropout), nn.ConvTranspose2d(6, 4, 2, stride=2)
        self.head = nn.Conv2d(8, CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.head(torch.cat([h, self.up(self.dropout(self.down(h)))], dim=1))


def mlp(dropout: float) -> nn.Module:
    """Two layers."""
    return nn.Sequential(nn.Linear(7, 6), nn.Tanh(), nn.Dropout(dropout), nn.Linear(6, CLASSES))


def of_opacus(name: str) -> Any:
    """A layer of Opacus."""
    import opacus.layers

    return getattr(opacus.layers, name)


def recurrent(dropout: float, name: str) -> nn.Module:
    """A recurrent model with torch's or Opacus's layer."""
    return Recurrent(dropout, of_opacus(name) if name.startswith("DP") else getattr(nn, name))


def attending(dropout: float, name: str) -> nn.Module:
    """An attention model with torch's or Opacus's layer."""
    return Attending(dropout, of_opacus(name) if name.startswith("DP") else getattr(nn, name))


def rows() -> TensorDataset:
    """Rows of a table, with a class each."""
    source = seeded()
    x = torch.randn(EXAMPLES, 7, generator=source, dtype=torch.float64)
    return TensorDataset(x, torch.randint(CLASSES, (EXAMPLES,), generator=source))


class WithNumbers(TensorDataset):
    """Rows of a table, with a class and a number each."""

    def __getitem__(self, index: Any) -> Any:
        x, y = super().__getitem__(index)
        return x, {"classes": y, "number": x.sum()}

    __getitems__ = None


def two_targets() -> TensorDataset:
    """Rows with both targets."""
    return WithNumbers(*rows().tensors)


def both(outputs: dict[str, Tensor], targets: dict[str, Tensor]) -> Tensor:
    """The sum of two losses."""
    of_class = F.cross_entropy(outputs["classes"], targets["classes"])
    return of_class + 0.5 * F.mse_loss(outputs["number"], targets["number"])


def segmented() -> TensorDataset:
    """Pictures with a class for each pixel."""
    x = images().tensors[0]
    return TensorDataset(x, torch.randint(CLASSES, (EXAMPLES, 8, 8), generator=seeded(1)))


def text(name: str, family: str, build: Any, private: str = "embedding") -> Model:
    """A line of the table."""
    return Model(name, family, build, tokens, F.cross_entropy, private=private)


MODELS = [
    *(text(f"Opacus {name}", "opacus", partial(recurrent, name=name)) for name in ("DPLSTM", "DPGRU")),
    text("Opacus DPMultiheadAttention", "opacus", partial(attending, name="DPMultiheadAttention")),
    *(text(f"torch {name}", "torch", partial(recurrent, name=name)) for name in ("LSTM", "GRU")),
    text("torch MultiheadAttention", "torch", partial(attending, name="MultiheadAttention")),
    text("torch TransformerEncoder", "torch", Encoding),
    text("EmbeddingBag classifier", "torch", BagOfWords),
    Model("two heads, two losses", "torch", TwoHeads, two_targets, both, criterion_needed=True),
    Model("U-Net", "torch", UNet, segmented, F.cross_entropy),
    Model("multilayer perceptron", "torch", mlp, rows, F.cross_entropy),
]
