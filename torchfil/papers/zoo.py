"""The networks of the papers and tiny transformers, smooth in their inputs, for tests, benchmarks and examples."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor, nn

Size = int | tuple[int, int]
Activation = Callable[[], nn.Module]


def mnist_cnn(num_classes: int = 10, *, activation: Activation = nn.Tanh) -> nn.Sequential:
    """The MNIST network of Guo et al. 2022, Table 1: 30,762 parameters, inputs [batch, 1, 28, 28].

    The table's last row is a fully connected layer of 10 units; its outputs are the logits, without a tanh, which
    would keep the loss from falling. Far from the data, tanh saturates and the gradient no longer depends on the
    input; ``activation=nn.GELU`` does not saturate.

    Example:
        >>> sum(p.numel() for p in mnist_cnn().parameters())
        30762
    """
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, stride=2, padding=2),
        activation(),
        nn.AvgPool2d(2, stride=1),
        nn.Conv2d(16, 32, 3, stride=2),
        activation(),
        nn.AvgPool2d(2, stride=1),
        nn.Flatten(),
        nn.Linear(32 * 5 * 5, 32),
        activation(),
        nn.Linear(32, num_classes),
    )


def cifar_cnn(num_classes: int = 10) -> nn.Sequential:
    """The CIFAR-10 network of Guo et al. 2022, Table 2: three double convolutions, inputs [batch, 3, 32, 32].

    The outputs are logits, as in :func:`mnist_cnn`.
    """
    layers: list[nn.Module] = []
    channels = 3
    for width in (32, 64, 128):
        for _ in range(2):
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.Tanh()]
            channels = width
        layers.append(nn.AvgPool2d(2))
    layers += [nn.Flatten(), nn.Linear(128 * 4 * 4, 128), nn.Tanh(), nn.Linear(128, num_classes)]
    return nn.Sequential(*layers)


def small_alexnet(
    num_classes: int = 2,
    in_channels: int = 3,
    image_size: Size = (62, 47),
    *,
    activation: Activation = nn.Tanh,
    pool: Literal["average", "max"] = "average",
) -> nn.Sequential:
    """The small AlexNet of Mo et al. 2021, A.4: convolutions of 16, 32, 64 filters, a dense layer of 256, the logits.

    Each 3×3 convolution is followed by the activation and a 2×2 pooling. The paper does not state the padding; here it
    is 1, which keeps the size. Its ReLU and max pooling (``activation=nn.ReLU, pool="max"``) have gradients that jump
    with the input, so the smooth tanh and average pooling are the default.

    Args:
        num_classes: d_y.
        in_channels: 3 for colour.
        image_size: Height and width, at least 8; the default is the size of the paper's LFW faces.
        activation: Makes one activation module.
        pool: "average" or the paper's "max".

    Example:
        >>> sum(p.numel() for p in small_alexnet().parameters())
        597794
        >>> sum(p.numel() for p in small_alexnet(10, 1, 28).parameters())
        173578
    """
    return _convolutional((16, 32, 64), (0, 1, 2), (256,), num_classes, in_channels, image_size, activation, pool)


def vgg11(
    num_classes: int = 2,
    in_channels: int = 3,
    image_size: Size = (62, 47),
    *,
    activation: Activation = nn.Tanh,
    pool: Literal["average", "max"] = "average",
) -> nn.Sequential:
    """VGG11Net of Mo et al. 2021, A.4: eight convolutions, dense layers of 256 and 128, the logits.

    The 3×3 convolutions have 16, 16, 16, 16, 32, 32, 64, 64 filters; the last three are pooled. Padding, smooth
    defaults and arguments are those of :func:`small_alexnet`.

    Example:
        >>> sum(p.numel() for p in vgg11().parameters())
        683570
        >>> sum(p.numel() for p in vgg11(10, 1, 32).parameters())
        373018
    """
    widths = (16, 16, 16, 16, 32, 32, 64, 64)
    return _convolutional(widths, (5, 6, 7), (256, 128), num_classes, in_channels, image_size, activation, pool)


def fcnet(
    num_classes: int = 2,
    in_features: int = 3 * 62 * 47,
    *,
    width: int = 32,
    depth: int = 9,
    activation: Activation = nn.Tanh,
) -> nn.Sequential:
    """FCNet of Mo et al. 2021, A.4: eight dense layers of 32 neurons and a ninth for the logits.

    Images are flattened: ``in_features`` is channels × height × width. The paper's activation is ReLU.

    Example:
        >>> sum(p.numel() for p in fcnet().parameters())
        287234
        >>> sum(p.numel() for p in fcnet(10, 28 * 28).parameters())
        32842
    """
    if depth < 1:
        raise ValueError(f"depth={depth} leaves no layers; it must be at least 1")
    widths = (in_features, *[width] * (depth - 1), num_classes)
    return nn.Sequential(OrderedDict([("flatten", nn.Flatten()), *_dense(widths, activation)]))


def resnet18(
    num_classes: int = 10,
    in_channels: int = 3,
    *,
    width: int = 64,
    groups: int = 8,
    activation: Activation = nn.Tanh,
) -> nn.Sequential:
    """ResNet-18 with GroupNorm for small images: a 3×3 stem without pooling, four stages of two blocks, mean, logits.

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
                nn.Conv2d(in_channels, width, 3, padding=1, bias=False), nn.GroupNorm(groups, width), activation()
            ),
            blocks=nn.Sequential(*stages),
            pool=nn.AdaptiveAvgPool2d(1),
            flatten=nn.Flatten(),
            head=nn.Linear(before, num_classes),
        )
    )


class _ResidualBlock(nn.Module):
    def __init__(self, before: int, channels: int, stride: int, groups: int, activation: Activation) -> None:
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
                nn.Conv2d(before, channels, 1, stride=stride, bias=False), nn.GroupNorm(groups, channels)
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
    """A tiny pre-norm transformer for integer tokens [batch, at most ``length``]: embedding, encoder, mean, logits.

    It consists of basic modules, so ``torch.func`` can differentiate it twice, and Opacus supports it.

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
    image_size: Size = 32,
    *,
    patch: int = 4,
    width: int = 192,
    depth: int = 12,
    heads: int = 3,
    activation: Activation = nn.GELU,
) -> nn.Sequential:
    """ViT-Tiny (Touvron et al. 2021) for small images: squares of side ``patch`` as tokens, their mean for the classes.

    Layers are those of :func:`token_transformer`, with a hidden width of four times ``width``.

    Example:
        >>> sum(p.numel() for p in vit_tiny().parameters())
        5362378
    """
    height, breadth = _height_and_width(image_size)
    if height % patch or breadth % patch:
        raise ValueError(f"image_size={(height, breadth)} cannot be divided into patches of {patch}×{patch} pixels")
    return nn.Sequential(
        OrderedDict(
            patches=nn.Conv2d(in_channels, width, patch, stride=patch),
            tokens=_Tokens(),
            encoder=_Encoder((height // patch) * (breadth // patch), width, depth, heads, activation, 4 * width),
            head=nn.Linear(width, num_classes),
        )
    )


class _Tokens(nn.Module):
    """From [batch, width, height, width of the map] to [batch, places, width]."""

    def forward(self, maps: Tensor) -> Tensor:
        return maps.flatten(2).mT.contiguous()


class _Encoder(nn.Module):
    """From [batch, places, width] to [batch, width]: positions, ``depth`` pre-norm layers, a norm, the mean."""

    def __init__(self, length: int, width: int, depth: int, heads: int, activation: Activation, hidden: int) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"width={width} must be a multiple of heads={heads}")
        self.position = nn.Embedding(length, width)
        self.layers = nn.Sequential(*[_EncoderLayer(width, heads, activation, hidden) for _ in range(depth)])
        self.norm = nn.LayerNorm(width)

    def forward(self, h: Tensor) -> Tensor:
        if h.shape[1] > self.position.num_embeddings:
            raise ValueError(f"{h.shape[1]} tokens are more than length={self.position.num_embeddings}")
        places = torch.arange(h.shape[1], device=h.device).repeat(h.shape[0], 1)  # Opacus needs a batch, not a view
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
        mixed = self.queries_keys_values(self.attention_norm(h)).reshape(batch, length, 3, self.heads, -1)
        q, k, v = mixed.permute(2, 0, 3, 1, 4).unbind(0)  # [batch, heads, length, width / heads]
        weights = (q @ k.mT / q.shape[-1] ** 0.5).softmax(dim=-1)
        h = h + self.attention_output((weights @ v).transpose(1, 2).reshape(batch, length, width))
        return h + self.mlp(self.mlp_norm(h))


def _convolutional(
    widths: Sequence[int],
    pooled: Sequence[int],
    dense: Sequence[int],
    num_classes: int,
    in_channels: int,
    image_size: Size,
    activation: Activation,
    pool: Literal["average", "max"],
) -> nn.Sequential:
    if pool not in ("average", "max"):
        raise ValueError(f"pool={pool!r} must be 'average' or 'max'")
    height, breadth = _height_and_width(image_size)
    smallest = 2 ** len(pooled)
    if min(height, breadth) < smallest:
        raise ValueError(
            f"image_size={(height, breadth)} is smaller than {smallest}, and {len(pooled)} poolings would leave nothing"
        )
    layers: list[tuple[str, nn.Module]] = []
    for i, (before, width) in enumerate(pairwise((in_channels, *widths))):
        layers += [(f"conv{i + 1}", nn.Conv2d(before, width, 3, padding=1)), (f"act{i + 1}", activation())]
        if i in pooled:
            layers.append((f"pool{i + 1}", nn.AvgPool2d(2) if pool == "average" else nn.MaxPool2d(2)))
    features = widths[-1] * (height // smallest) * (breadth // smallest)
    layers += [("flatten", nn.Flatten()), *_dense((features, *dense, num_classes), activation)]
    return nn.Sequential(OrderedDict(layers))


def _dense(widths: Sequence[int], activation: Activation) -> list[tuple[str, nn.Module]]:
    layers: list[tuple[str, nn.Module]] = []
    for i, (before, width) in enumerate(pairwise(widths)):
        layers += [(f"fc{i + 1}", nn.Linear(before, width)), (f"fc{i + 1}_act", activation())]
    return layers[:-1]


def _height_and_width(size: Size) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else size
