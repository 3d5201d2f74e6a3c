"""Guo et al. 2022: Tables 1 to 4 and the smooth clipping of Appendix C."""

from __future__ import annotations

import torch
from torch import nn

from benchmarks.zoo import cifar_cnn, mnist_cnn
from reproduction.rows import Outcome, Row, Run, check_near, check_that
from torchfil.clipping import get_clip

__all__ = ["ROWS"]


def architecture(
    model: nn.Module, size: tuple[int, ...], layers: list[str], theirs: list[str]
) -> Outcome:
    """Does the network match the table?"""
    output = tuple(model(torch.zeros(1, *size)).shape)
    count = sum(p.numel() for p in model.parameters())
    checks = (
        check_that(
            "layers with weights",
            ", ".join(theirs),
            ", ".join(layers),
            "the same",
            layers == theirs,
        ),
        check_that("outputs", "10", str(output[-1]), "the same", output == (1, 10)),
    )
    return Outcome(
        f"{count:,} parameters; the last layer gives logits, without the tanh that the table names",
        checks,
    )


def weights_of(model: nn.Module) -> list[str]:
    """The layers in words."""
    told = []
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d):
            size, stride, padding = layer.kernel_size[0], layer.stride[0], layer.padding[0]
            told.append(f"{layer.out_channels}@{size}×{size}/{stride}+{padding}")
        elif isinstance(layer, nn.Linear):
            told.append(f"{layer.out_features} units")
    return told


def table_1(run: Run) -> Outcome:
    """The MNIST network."""
    theirs = ["16@3×3/2+2", "32@3×3/2+0", "32 units", "10 units"]
    return architecture(mnist_cnn(), (1, 28, 28), weights_of(mnist_cnn()), theirs)


def table_2(run: Run) -> Outcome:
    """The CIFAR-10 network."""
    theirs = [f"{width}@3×3/1+1" for width in (32, 32, 64, 64, 128, 128)] + [
        "128 units",
        "10 units",
    ]
    return architecture(cifar_cnn(), (3, 32, 32), weights_of(cifar_cnn()), theirs)


def smooth_clipping(run: Run) -> Outcome:
    """The largest norm that the GELU clipping lets through, in units of C."""
    norms = torch.linspace(1e-3, 50, 200_001, dtype=torch.float64)
    largest = float((norms * get_clip("gelu-paper").scale(norms, 1.0)).max())
    return Outcome(
        f"{largest:.4f} C", (check_near("largest clipped norm over C", 1.115, largest, 0.001),)
    )


ROWS = (
    Row("guo-table1", "guo", "Table 1", "the MNIST network", "–", table_1, 0.1),
    Row("guo-table2", "guo", "Table 2", "the CIFAR-10 network", "–", table_2, 0.1),
    Row(
        "guo-tables3-4",
        "guo",
        "Tables 3 and 4",
        "the grids of Figure 5: 432 and 600 settings, ten runs each",
        "–",
        None,
        reason="Settings, no results. Single points are run in the rows of Figure 5; the grids "
        "are 10,320 trainings.",
    ),
    Row(
        "guo-appendix-c",
        "guo",
        "Appendix C, smooth clipping",
        "‖g̃‖ ≤ 1.115 C",
        "a grid of 200,001 norms",
        smooth_clipping,
        0.1,
    ),
)
