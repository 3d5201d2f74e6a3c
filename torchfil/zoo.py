"""The networks of the papers, smooth in their inputs, for tests, benchmarks and examples."""

from __future__ import annotations

from torch import nn

__all__ = ["cifar_cnn", "mnist_cnn"]


def mnist_cnn(num_classes: int = 10) -> nn.Sequential:
    """The MNIST network of Guo et al. 2022, Table 1: 30,762 parameters, inputs [batch, 1, 28, 28].

    The table's last row is a fully connected layer of 10 units; its outputs are the logits, without the tanh
    that would keep the loss from falling.

    Example:
        >>> sum(p.numel() for p in mnist_cnn().parameters())
        30762
    """
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, stride=2, padding=2),
        nn.Tanh(),
        nn.AvgPool2d(2, stride=1),
        nn.Conv2d(16, 32, 3, stride=2),
        nn.Tanh(),
        nn.AvgPool2d(2, stride=1),
        nn.Flatten(),
        nn.Linear(32 * 5 * 5, 32),
        nn.Tanh(),
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
