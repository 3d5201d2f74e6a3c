"""Guo et al. 2022: Figures 5 and 6 on a part of CIFAR-10."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import mnist_dpsgd
import numpy as np
import torch
from equalise_cifar10 import balanced
from matplotlib.figure import Figure
from paper_data import ResidentDataset
from scipy import stats
from torch import Tensor, nn
from torch.utils.data import DataLoader

from benchmarks.measuring import Json
from benchmarks.zoo import cifar_cnn
from reproduction.rows import Outcome, Row, Run, check_that
from torchfil import Accounting, FILPrivacyEngine

__all__ = ["ROWS"]


@dataclass(frozen=True)
class Photographs:
    """Private training on photographs, in the terms of Table 4."""

    examples: int
    batch: int
    steps: int
    noise_multiplier: float
    lr: float
    momentum: float = 0.5
    max_grad_norm: float = 1.0
    classes: tuple[int, ...] | None = None


SMALL = Photographs(
    examples=1000, batch=50, steps=100, noise_multiplier=0.5, lr=0.3, classes=(0, 1)
)
FIGURE_6 = Photographs(examples=18_000, batch=200, steps=5000, noise_multiplier=0.5, lr=0.1)
FIGURE_5 = Photographs(
    examples=18_000, batch=200, steps=12_500, noise_multiplier=0.5, lr=0.1, max_grad_norm=0.5
)


@lru_cache(maxsize=2)
def private_photographs(run: Run, setting: Photographs, gpu: bool) -> Json:
    """Train; the bounds of all photographs, their losses under the trained network, the test
    accuracy, the images.
    """
    device = run.device if gpu else "cpu"
    readers = run.data("cifar10")
    parts = []
    for split in ("train", "test"):
        images, labels = readers.cifar10(split)
        kept = (
            torch.isin(labels, torch.tensor(setting.classes))
            if setting.classes
            else torch.ones_like(labels, dtype=torch.bool)
        )
        images, labels = images[kept], labels[kept]
        rows = (
            balanced(labels, min(setting.examples, len(labels)))
            if setting.classes
            else torch.arange(len(labels))
        )
        parts.append((images[rows].to(device), labels[rows].to(device)))
    if run.tiny:
        setting = replace(setting, batch=4, steps=2)
        parts = [(images[:16], labels[:16]) for images, labels in parts]

    # One private run, as Algorithm 1 of the paper; momentum and clipping are the paper's.
    torch.manual_seed(0)
    model = cifar_cnn().to(device)
    data = ResidentDataset(*parts[0])
    engine = FILPrivacyEngine()
    private, _, loader = engine.make_private(
        model,
        torch.optim.SGD(model.parameters(), lr=setting.lr, momentum=setting.momentum),
        DataLoader(
            data, setting.batch, collate_fn=data.collate, generator=torch.Generator().manual_seed(0)
        ),
        noise_multiplier=setting.noise_multiplier,
        max_grad_norm=setting.max_grad_norm,
        criterion=nn.CrossEntropyLoss(),
        clip="gelu",
        accounting=Accounting(num_probes=1),
    )
    for _, x, y in mnist_dpsgd.batches(loader, setting.steps):
        engine.train_step(x, y)
    module = private.to_standard_module()
    return {
        "bound": engine.get_mse_bound().value.cpu().numpy(),
        "loss": losses(module, *parts[0]),
        "accuracy": mnist_dpsgd.accuracy(module, *parts[1]),
        "renyi": engine.get_rdp_mse_bound(reading="paper"),
        "epsilon": engine.get_epsilon(1e-5),
        "images": parts[0][0].cpu(),
    }


@torch.no_grad()
def losses(model: nn.Module, images: Tensor, labels: Tensor) -> np.ndarray:
    """The loss of every photograph, [n]."""
    parts = [
        nn.functional.cross_entropy(model(x), y, reduction="none")
        for x, y in zip(images.split(500), labels.split(500), strict=True)
    ]
    return torch.cat(parts).cpu().numpy()


def figure_6(run: Run, setting: Photographs, gpu: bool) -> Outcome:
    """Which photographs leak most and least, and are those that leak most harder to classify?"""
    trained = private_photographs(run, setting, gpu)
    bound, loss = trained["bound"], trained["loss"]
    order = np.argsort(bound)  # the smallest bound leaks most
    tenth = max(1, len(order) // 10)
    most, least = float(loss[order[:tenth]].mean()), float(loss[order[-tenth:]].mean())
    correlation = float(stats.spearmanr(1 / bound, loss).statistic)

    # Above, those that leak most; below, those that leak least among drawn ones: nothing is known
    # about the others.
    order = order[np.isfinite(bound[order])]
    shown = min(8, max(1, len(order) // 2))
    figure = Figure(figsize=(8, 2.6), layout="constrained")
    axes = figure.subplots(2, shown, squeeze=False)
    for row, chosen, label in ((0, order[:shown], "highest"), (1, order[::-1][:shown], "lowest")):
        for axis, example in zip(axes[row], chosen, strict=True):
            axis.imshow(trained["images"][int(example)].permute(1, 2, 0).clamp(0, 1))
            axis.set_title(f"{bound[example] ** -0.5:.2g}", fontsize=8, pad=2)
            axis.set(xticks=[], yticks=[])
        axes[row, 0].set_ylabel(f"{label} dFIL", fontsize=8)
    name = "repro_guo_figure6_gpu.png" if gpu else "repro_guo_figure6.png"
    figure.savefig(run.out / name, dpi=60)

    here = (
        f"test accuracy {trained['accuracy']:.1f} %; mean loss {most:.2f} in the tenth of highest "
        f"dFIL, {least:.2f} in that of lowest; rank correlation of dFIL and loss {correlation:.2f}"
    )
    checks = (
        check_that(
            "photographs of high dFIL",
            "hard to classify",
            f"mean loss {most:.2f}",
            "higher mean loss than the tenth of lowest",
            most > least,
        ),
        check_that(
            "photographs of low dFIL",
            "typical, easy",
            f"mean loss {least:.2f}",
            "below the mean of all",
            least < loss.mean(),
        ),
    )
    return Outcome(here, checks, {"spearman": correlation, "epsilon": trained["epsilon"]}, (name,))


def figure_5_photographs(run: Run) -> Outcome:
    """A point of the CIFAR-10 grid, on the available part of CIFAR-10."""
    trained = private_photographs(run, FIGURE_5, True)
    smallest = float(trained["bound"].min())
    here = (
        f"{trained['accuracy']:.1f} % right; smallest bound {smallest:.2g}, median "
        f"{np.median(trained['bound']):.2g}; Rényi DP {trained['renyi']:.2g}"
    )
    checks = (
        check_that(
            "accuracy at MSE ≥ 0.1",
            "64 %",
            f"{trained['accuracy']:.1f} % at {smallest:.2g}",
            "62 % or more at 0.1 or more",
            trained["accuracy"] >= 62 and smallest >= 0.1,
        ),
        check_that(
            "the bound from the largest dFIL",
            "above Rényi DP's",
            f"{smallest:.2g} and {trained['renyi']:.2g}",
            "above",
            smallest > trained["renyi"],
        ),
    )
    return Outcome(here, checks, {"epsilon": trained["epsilon"]})


ROWS = (
    Row(
        "guo-figure5-cifar",
        "guo",
        "Figure 5, CIFAR-10",
        "55 % before Rényi DP's bound crosses 1; MSE ≥ 0.1 at 64 % by the largest dFIL",
        "18,000 photographs of CIFAR-10; σ = 0.5, C = 0.5, ρ = 0.1, batch 200, T = 12,500",
        figure_5_photographs,
        6,
        ("cifar10",),
        gpu=True,
        stand_in="18,000 of 50,000 photographs, one point of 600, one run",
        reason="The part of CIFAR-10 at hand has 18,000 of 50,000 photographs: fewer to learn "
        "from, and each is drawn 2.8 times as often.",
    ),
    Row(
        "guo-figure6",
        "guo",
        "Figure 6",
        "photographs of high dFIL are hard to classify even for humans, those of low dFIL are "
        "typical",
        "1,000 planes and cars of CIFAR-10; σ = 0.5, C = 1, ρ = 0.3, batch 50, T = 100",
        lambda run: figure_6(run, SMALL, False),
        3,
        ("cifar10",),
        stand_in="two classes, 100 steps instead of 5,000",
        reason="The tenths differ clearly, the order within them hardly (rank correlation 0.13). "
        "The tenth of lowest dFIL counts the few photographs that were never drawn, whose "
        "dFIL is 0.",
    ),
    Row(
        "guo-figure6-gpu",
        "guo",
        "Figure 6, the paper's setting",
        "as above",
        "18,000 photographs of CIFAR-10; σ = 0.5, C = 1, ρ = 0.1, batch 200, T = 5,000",
        lambda run: figure_6(run, FIGURE_6, True),
        3,
        ("cifar10",),
        gpu=True,
        stand_in="18,000 of 50,000 photographs",
    ),
)
