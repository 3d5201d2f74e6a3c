"""The papers' image networks, smooth in their inputs."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Literal

from torch import nn

Size = int | tuple[int, int]
Activation = Callable[[], nn.Module]


def mnist_cnn(num_classes: int = 10, *, activation: Activation = nn.Tanh) -> nn.Sequential:
    """The MNIST network of Guo et al. 2022, Table 1: 30,762 parameters, inputs [batch, 1, 28, 28].

    The table's last row is a fully connected layer of 10 units; its outputs are the logits, without
    a tanh, which would keep the loss from falling. Far from the data, tanh saturates and the
    gradient no longer depends on the input; ``activation=nn.GELU`` does not saturate.

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
    """The CIFAR-10 network of Guo et al. 2022, Table 2: three double convolutions, inputs [batch,
    3, 32, 32].

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
    """The small AlexNet of Mo et al. 2021, A.4: convolutions of 16, 32, 64 filters, a dense layer
    of 256, the logits.

    Each 3×3 convolution is followed by the activation and a 2×2 pooling. The paper does not state
    the padding; here it is 1, which keeps the size. Its ReLU and max pooling (``activation=nn.ReLU,
    pool="max"``) have gradients that jump with the input, so the smooth tanh and average pooling
    are the default.

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
    return convolutional(
        (16, 32, 64), (0, 1, 2), (256,), num_classes, in_channels, image_size, activation, pool
    )


def convolutional(
    widths: Sequence[int],
    pooled: Sequence[int],
    dense: Sequence[int],
    num_classes: int,
    in_channels: int,
    image_size: Size,
    activation: Activation,
    pool: Literal["average", "max"],
) -> nn.Sequential:
    """3×3 convolutions of these widths, some of them pooled, and dense layers of these widths and
    the classes'.
    """
    height, breadth = (image_size, image_size) if isinstance(image_size, int) else image_size
    smallest = 2 ** len(pooled)
    layers: list[tuple[str, nn.Module]] = []
    for i, (before, width) in enumerate(pairwise((in_channels, *widths))):
        layers += [
            (f"conv{i + 1}", nn.Conv2d(before, width, 3, padding=1)),
            (f"act{i + 1}", activation()),
        ]
        if i in pooled:
            layers.append(
                (f"pool{i + 1}", nn.AvgPool2d(2) if pool == "average" else nn.MaxPool2d(2))
            )
    features = widths[-1] * (height // smallest) * (breadth // smallest)
    layers += [
        ("flatten", nn.Flatten()),
        *dense_layers((features, *dense, num_classes), activation),
    ]
    return nn.Sequential(OrderedDict(layers))


def dense_layers(widths: Sequence[int], activation: Activation) -> list[tuple[str, nn.Module]]:
    """Named linear layers of these widths, with an activation between them."""
    layers: list[tuple[str, nn.Module]] = []
    for i, (before, width) in enumerate(pairwise(widths)):
        layers += [(f"fc{i + 1}", nn.Linear(before, width)), (f"fc{i + 1}_act", activation())]
    return layers[:-1]
