"""torch's and Opacus's own modules, as people put them together."""

from __future__ import annotations

from functools import partial
from typing import Any

import opacus.layers
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from tests.fisher.recorded_cases import Model as Made

from .model import CLASSES, EXAMPLES, WORDS, Model, labelled, seeded, tokens

WIDTH = 6


def words(dropout: float, kind: str) -> nn.Module:
    """Words, a layer of torch's or Opacus's, a head on its last state or on its mean."""
    layer: Any = getattr(opacus.layers if kind.startswith("DP") else nn, kind)
    table, head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, CLASSES)
    if "Attention" in kind:
        made = layer(WIDTH, 2, dropout=dropout, batch_first=True)

        def run(m: Any, x: Tensor) -> Tensor:
            return m.head(m.layer(*[m.embedding(x)] * 3, need_weights=False)[0].mean(dim=1))
    else:
        made = layer(WIDTH, WIDTH, num_layers=2, dropout=dropout, batch_first=True)

        def run(m: Any, x: Tensor) -> Tensor:
            return m.head(m.layer(m.embedding(x))[0][:, -1])

    return Made(run, embedding=table, head=head, layer=made)


def encoder(dropout: float) -> nn.Module:
    """Words, torch's transformer, a head on its mean."""
    table, head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, CLASSES)
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout, batch_first=True)
    layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return Made(
        lambda m, x: m.head(m.layers(m.embedding(x)).mean(dim=1)),
        embedding=table,
        head=head,
        layers=layers,
    )


def bag_of_words(dropout: float) -> nn.Module:
    """The mean of the words, two layers."""
    bag = nn.EmbeddingBag(WORDS, WIDTH, mode="mean")
    rest = nn.Sequential(nn.Linear(WIDTH, 5), nn.Tanh(), nn.Dropout(dropout), nn.Linear(5, CLASSES))
    return Made(lambda m, x: m.rest(m.embedding(x)), embedding=bag, rest=rest)


def two_heads(dropout: float) -> nn.Module:
    """A class and a number for each example."""

    def run(m: Any, x: Tensor) -> dict[str, Tensor]:
        h = m.dropout(m.trunk(x).tanh())
        return {"classes": m.classes(h), "number": m.number(h)[:, 0]}

    heads: dict[str, Any] = {"classes": nn.Linear(6, CLASSES), "number": nn.Linear(6, 1)}
    return Made(run, trunk=nn.Linear(7, 6), dropout=nn.Dropout(dropout), **heads)


def unet(dropout: float) -> nn.Module:
    """Down, up, and a bridge; a class for each pixel."""

    def run(m: Any, x: Tensor) -> Tensor:
        h = m.first(x)
        return m.head(torch.cat([h, m.up(m.dropout(m.down(h)))], dim=1))

    first = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.SiLU())
    down = nn.Sequential(nn.Conv2d(4, 6, 3, stride=2, padding=1), nn.GroupNorm(2, 6), nn.SiLU())
    up, head = nn.ConvTranspose2d(6, 4, 2, stride=2), nn.Conv2d(8, CLASSES, 1)
    return Made(run, first=first, down=down, dropout=nn.Dropout2d(dropout), up=up, head=head)


def mlp(dropout: float) -> nn.Module:
    """Two layers."""
    return nn.Sequential(nn.Linear(7, 6), nn.Tanh(), nn.Dropout(dropout), nn.Linear(6, CLASSES))


def two_targets() -> list[tuple[Tensor, dict[str, Tensor]]]:
    """Rows of a table, with a class and a number each."""
    return [(x, {"classes": y, "number": x.sum()}) for x, y in labelled(7)]


def both(outputs: dict[str, Tensor], targets: dict[str, Tensor]) -> Tensor:
    """The sum of two losses."""
    of_class = F.cross_entropy(outputs["classes"], targets["classes"])
    return of_class + 0.5 * F.mse_loss(outputs["number"], targets["number"])


def segmented() -> TensorDataset:
    """Pictures with a class for each pixel."""
    classes = torch.randint(CLASSES, (EXAMPLES, 8, 8), generator=seeded(1))
    return TensorDataset(labelled(1, 8, 8).tensors[0], classes)


def text(name: str, build: Any) -> Model:
    """A line of the table."""
    return Model(name, build, tokens, F.cross_entropy, private="embedding")


MODELS = [
    *(
        text(f"Opacus {kind}", partial(words, kind=kind))
        for kind in ("DPLSTM", "DPGRU", "DPMultiheadAttention")
    ),
    *(
        text(f"torch {kind}", partial(words, kind=kind))
        for kind in ("LSTM", "GRU", "MultiheadAttention")
    ),
    text("torch TransformerEncoder", encoder),
    text("EmbeddingBag classifier", bag_of_words),
    Model("two heads, two losses", two_heads, two_targets, both, criterion_needed=True),
    Model("U-Net", unet, segmented, F.cross_entropy),
    Model("multilayer perceptron", mlp, partial(labelled, 7), F.cross_entropy),
]
