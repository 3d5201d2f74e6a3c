"""A Lightning fit on handwritten digits, made private by a callback, and whose digit leaks most.

The module and its ``training_step`` are ordinary Lightning code. Needs ``torchfil[lightning]``.
"""

from __future__ import annotations

import argparse
import logging
from typing import Any

import lightning.pytorch as pl
import torch
from paper_data import small_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from torchfil.integrations.lightning import FILCallback

DELTA = 1e-4


class Digits(pl.LightningModule):
    """A small network, smooth in its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1),
            nn.Tanh(),
            nn.AvgPool2d(2),
            nn.Flatten(),
            nn.Linear(128, 10),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Class scores, [batch, 10]."""
        return self.network(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """The mean cross entropy."""
        x, y = batch
        return nn.functional.cross_entropy(self(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain SGD; the callback makes it private."""
        return torch.optim.SGD(self.parameters(), lr=1.0, momentum=0.5)


def main() -> None:
    """Fit, then print the most exposed digits."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--noise", type=float, default=1.0, help="noise multiplier σ")
    parser.add_argument(
        "--path", default=None, help="where to write the table, as CSV (confidential)"
    )
    options = parser.parse_args()

    print("Data: scikit-learn's 1,797 handwritten digits; nothing is downloaded.")
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    pl.seed_everything(0)
    images, labels = small_digits()  # [1797, 1, 8, 8], pixels in [0, 1]
    loader = DataLoader(TensorDataset(images, labels), batch_size=128)

    callback = FILCallback(noise_multiplier=options.noise, path=options.path, delta=DELTA)
    trainer = pl.Trainer(
        max_epochs=options.epochs,
        accelerator="cpu",
        callbacks=[callback],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Digits(), loader)

    print(f"ε = {callback.engine.get_epsilon(DELTA):.2f} at δ = {DELTA:g}")
    table = callback.engine.leakage(delta=DELTA).sort_values("mse_bound")
    print(
        table[["fil", "fil_error", "sampling_error", "mse_bound", "participations"]]
        .head(5)
        .round(3)
        .to_string()
    )
    print("These numbers depend on private data and are confidential themselves.")


if __name__ == "__main__":
    main()
