"""The papers' networks, a ResNet and tiny transformers, smooth in their inputs, for benchmarks and
tests.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Literal

import torch
from networks import (
    Activation,
    Size,
    cifar_cnn,
    convolutional,
    dense_layers,
    mnist_cnn,
    small_alexnet,
)
from torch import Tensor, nn

__all__ = [
    "cifar_cnn",
    "fcnet",
    "mnist_cnn",
    "resnet18",
    "small_alexnet",
    "token_transformer",
    "vgg11",
    "vit_tiny",
]


def vgg11(
    num_classes: int = 2,
    in_channels: int = 3,
    image_size: Size = (62, 47),
    *,
    activation: Activation = nn.Tanh,
    pool: Literal["average", "max"] = "average",
) -> nn.Sequential:
    """VGG11Net of Mo et al. 2021, A.4: eight convolutions, dense layers of 256 and 128, the logits.

    The 3×3 convolutions have 16, 16, 16, 16, 32, 32, 64, 64 filters; the last three are pooled.
    Padding, smooth defaults and arguments are those of :func:`small_alexnet`.

    Example:
        >>> sum(p.numel() for p in vgg11().parameters())
        683570
        >>> sum(p.numel() for p in vgg11(10, 1, 32).parameters())
        373018
    """
    widths = (16, 16, 16, 16, 32, 32, 64, 64)
    return convolutional(
        widths, (5, 6, 7), (256, 128), num_classes, in_channels, image_size, activation, pool
    )


def fcnet(
    num_classes: int = 2,
    in_features: int = 3 * 62 * 47,
    *,
    width: int = 32,
    depth: int = 9,
    activation: Activation = nn.Tanh,
) -> nn.Sequential:
    """FCNet of Mo et al. 2021, A.4: eight dense layers of 32 neurons and a ninth for the logits.

    Images are flattened: ``in_features`` is channels × height × width. The paper's activation is
    ReLU.

    Example:
        >>> sum(p.numel() for p in fcnet().parameters())
        287234
        >>> sum(p.numel() for p in fcnet(10, 28 * 28).parameters())
        32842
    """
    widths = (in_features, *[width] * (depth - 1), num_classes)
    return nn.Sequential(
        OrderedDict([("flatten", nn.Flatten()), *dense_layers(widths, activation)])
    )


def resnet18(
    num_classes: int = 10,
    in_channels: int = 3,
    *,
    width: int = 64,
    groups: int = 8,
    activation: Activation = nn.Tanh,
) -> nn.Sequential:
    """ResNet-18 with GroupNorm for small images: a 3×3 stem without pooling, four stages of two
    blocks, mean, logits.

    No operation works in place, because Opacus's hooks do not allow that.

    Args:
        num_classes: Outputs.
        in_channels: 3 for colour.
        width: Channels of the first stage, a multiple of ``groups``; later stages double it.
        groups: The number of groups of every GroupNorm.
        activation: Makes one activation module; the original's is ReLU.

    Example:
        >>> sum(p.numel() for p in resnet18().parameters())
        11173962
    """
    stages: list[nn.Module] = []
    before = width
    for stage in range(4):
        channels = width * 2**stage
        for block in range(2):
            stride = 2 if stage > 0 and block == 0 else 1
            stages.append(_ResidualBlock(before, channels, stride, groups, activation))
            before = channels
    return nn.Sequential(
        OrderedDict(
            stem=nn.Sequential(
                nn.Conv2d(in_channels, width, 3, padding=1, bias=False),
                nn.GroupNorm(groups, width),
                activation(),
            ),
            blocks=nn.Sequential(*stages),
            pool=nn.AdaptiveAvgPool2d(1),
            flatten=nn.Flatten(),
            head=nn.Linear(before, num_classes),
        )
    )


class _ResidualBlock(nn.Module):
    def __init__(
        self, before: int, channels: int, stride: int, groups: int, activation: Activation
    ) -> None:
        super().__init__()
        self.branch = nn.Sequential(
            nn.Conv2d(before, channels, 3, stride=stride, padding=1, bias=False),
            nn.GroupNorm(groups, channels),
            activation(),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.GroupNorm(groups, channels),
        )
        same = stride == 1 and before == channels
        self.shortcut = (
            nn.Identity()
            if same
            else nn.Sequential(
                nn.Conv2d(before, channels, 1, stride=stride, bias=False),
                nn.GroupNorm(groups, channels),
            )
        )
        self.activation = activation()

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(self.branch(x) + self.shortcut(x))


def token_transformer(
    num_classes: int = 2,
    vocabulary: int = 100,
    length: int = 16,
    *,
    width: int = 32,
    depth: int = 2,
    heads: int = 4,
    activation: Activation = nn.GELU,
) -> nn.Sequential:
    """A tiny pre-norm transformer for integer tokens [batch, at most ``length``]: embedding,
    encoder, mean, logits.

    It consists of basic modules, so ``torch.func`` can differentiate it twice, and Opacus supports
    it.

    Example:
        >>> model = token_transformer()
        >>> sum(p.numel() for p in model.parameters())
        20930
        >>> model(torch.zeros(5, 16, dtype=torch.long)).shape
        torch.Size([5, 2])
    """
    return nn.Sequential(
        OrderedDict(
            embedding=nn.Embedding(vocabulary, width),
            encoder=_Encoder(length, width, depth, heads, activation, 2 * width),
            head=nn.Linear(width, num_classes),
        )
    )


def vit_tiny(
    num_classes: int = 10,
    in_channels: int = 3,
    image_size: int = 32,
    *,
    patch: int = 4,
    width: int = 192,
    depth: int = 12,
    heads: int = 3,
    activation: Activation = nn.GELU,
) -> nn.Sequential:
    """ViT-Tiny (Touvron et al. 2021) for small images: squares of side ``patch`` as tokens, their
    mean for the classes.

    Layers are those of :func:`token_transformer`, with a hidden width of four times ``width``.

    Example:
        >>> sum(p.numel() for p in vit_tiny().parameters())
        5362378
    """
    return nn.Sequential(
        OrderedDict(
            patches=nn.Conv2d(in_channels, width, patch, stride=patch),
            tokens=_Tokens(),
            encoder=_Encoder(
                (image_size // patch) ** 2, width, depth, heads, activation, 4 * width
            ),
            head=nn.Linear(width, num_classes),
        )
    )


class _Tokens(nn.Module):
    """From [batch, width, height, width of the map] to [batch, places, width]."""

    def forward(self, maps: Tensor) -> Tensor:
        return maps.flatten(2).mT.contiguous()


class _Encoder(nn.Module):
    """From [batch, places, width] to [batch, width]: positions, ``depth`` pre-norm layers, a norm,
    the mean.
    """

    def __init__(
        self, length: int, width: int, depth: int, heads: int, activation: Activation, hidden: int
    ) -> None:
        super().__init__()
        self.position = nn.Embedding(length, width)
        self.layers = nn.Sequential(
            *[_EncoderLayer(width, heads, activation, hidden) for _ in range(depth)]
        )
        self.norm = nn.LayerNorm(width)

    def forward(self, h: Tensor) -> Tensor:
        # Opacus needs a batch, not a view
        places = torch.arange(h.shape[1], device=h.device).repeat(h.shape[0], 1)
        return self.norm(self.layers(h + self.position(places))).mean(dim=1)


class _EncoderLayer(nn.Module):
    def __init__(self, width: int, heads: int, activation: Activation, hidden: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.attention_output = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, hidden), activation(), nn.Linear(hidden, width))

    def forward(self, h: Tensor) -> Tensor:
        batch, length, width = h.shape
        mixed = self.queries_keys_values(self.attention_norm(h)).reshape(
            batch, length, 3, self.heads, -1
        )
        q, k, v = mixed.permute(2, 0, 3, 1, 4).unbind(0)  # [batch, heads, length, width / heads]
        weights = (q @ k.mT / q.shape[-1] ** 0.5).softmax(dim=-1)
        h = h + self.attention_output((weights @ v).transpose(1, 2).reshape(batch, length, width))
        return h + self.mlp(self.mlp_norm(h))
