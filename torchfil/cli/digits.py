"""The demonstration: private training on small digits, watched by the engine."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from torchfil.accounting.quantities import Track
from torchfil.datasets.stand_ins import small_digits
from torchfil.engine import FILPrivacyEngine

DELTA = 1e-4


@dataclass(frozen=True)
class DigitsRun:
    """The engine, the data with its labels, and the private model."""

    engine: FILPrivacyEngine
    images: Tensor
    labels: Tensor
    model: nn.Module

    def saved(self, path: str | os.PathLike[str]) -> Path:
        """Save the run, with the digits as groups and the pixels as attributes."""
        return self.engine.save_run(
            path,
            delta=DELTA,
            title="Small digits, trained privately",
            attribute_names=[f"pixel {row},{column}" for row in range(8) for column in range(8)],
            attribute_units=["grey value"] * 64,
            unit_of_inputs="grey value, 0 to 1",
            input_range=(0.0, 1.0),
            groups={"digit": self.labels.tolist()},
        )

    def accuracy(self) -> float:
        """On the training digits."""
        device = next(self.model.parameters()).device
        with torch.no_grad():
            return float((self.model(self.images.to(device)).argmax(1).cpu() == self.labels).float().mean())


def digits() -> tuple[Tensor, Tensor]:
    """scikit-learn's 1,797 handwritten digits, or drawn ones without it: [1797, 1, 8, 8] in [0, 1], labels [1797]."""
    return small_digits()


def digits_network() -> nn.Sequential:
    """A small network, smooth in its inputs."""
    return nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.Tanh(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(128, 10))


def train_on_digits(
    *,
    epochs: int = 20,
    noise_multiplier: float = 1.0,
    device: str = "cpu",
    seed: int = 0,
    progress: Callable[[Iterable[int]], Iterable[int]] = iter,
    after_epoch: Callable[[int, DigitsRun], None] | None = None,
) -> DigitsRun:
    """An ordinary Opacus loop with the engine in it.

    Args:
        epochs: Over 1,797 digits in batches of 128 on average.
        noise_multiplier: σ.
        device: Where to train.
        seed: The seed of weights and probes; batches and noise differ at every call.
        progress: Wraps the epochs, e.g. a progress bar.
        after_epoch: Called with the number of epochs done and the run so far.
    """
    torch.manual_seed(seed)
    images, labels = digits()
    loader = DataLoader(TensorDataset(images, labels), batch_size=128)
    model = digits_network().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
    engine = FILPrivacyEngine()
    track: tuple[Track, ...] = ("diagonal",)
    private, private_optimizer, private_loader = engine.make_private(
        model, optimizer, loader, noise_multiplier=noise_multiplier, track=track
    )
    run = DigitsRun(engine, images, labels, private)
    for epoch in progress(range(epochs)):
        for x, y in private_loader:
            private_optimizer.zero_grad()
            nn.functional.cross_entropy(private(x.to(device)), y.to(device)).backward()
            private_optimizer.step()
        if after_epoch is not None:
            after_epoch(epoch + 1, run)
    return run
