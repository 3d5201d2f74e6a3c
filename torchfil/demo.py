"""The demonstration: private training on scikit-learn's handwritten digits, watched by the engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from torchfil.engine import FILPrivacyEngine

__all__ = ["DELTA", "DigitsRun", "digits_network", "train_on_digits"]

DELTA = 1e-4


@dataclass(frozen=True)
class DigitsRun:
    """The engine after training, the data [1797, 1, 8, 8] in [0, 1] with labels [1797], and the model."""

    engine: FILPrivacyEngine
    images: Tensor
    labels: Tensor
    model: nn.Module

    def accuracy(self) -> float:
        """On the training digits."""
        device = next(self.model.parameters()).device
        with torch.no_grad():
            return float((self.model(self.images.to(device)).argmax(1).cpu() == self.labels).float().mean())


def digits_network() -> nn.Sequential:
    """A small network, smooth in its inputs."""
    return nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.Tanh(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(128, 10))


def train_on_digits(
    *,
    epochs: int = 8,
    noise_multiplier: float = 1.0,
    device: str = "cpu",
    seed: int = 0,
    after_epoch: Callable[[int, DigitsRun], None] | None = None,
) -> DigitsRun:
    """An ordinary Opacus loop with the engine in it; needs scikit-learn.

    Args:
        epochs: Over 1,797 digits in batches of 128 on average.
        noise_multiplier: σ.
        device: Where to train.
        seed: Of weights, batches, noise and probes.
        after_epoch: Called with the number of epochs done and the run so far.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError(
            "the digits come with scikit-learn, which is not installed: pip install 'torchfil[glm]'"
        ) from error
    torch.manual_seed(seed)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16  # pixels in [0, 1]
    labels = torch.tensor(digits.target)
    loader = DataLoader(TensorDataset(images, labels), batch_size=128)
    model = digits_network().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
    engine = FILPrivacyEngine()
    private, optimizer, loader = engine.make_private(
        model, optimizer, loader, noise_multiplier=noise_multiplier, track=("diagonal",)
    )
    run = DigitsRun(engine, images, labels, private)
    for epoch in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(private(x.to(device)), y.to(device)).backward()
            optimizer.step()
        if after_epoch is not None:
            after_epoch(epoch + 1, run)
    return run
