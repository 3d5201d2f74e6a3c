"""A training loop with Fisher accounting, as a multiple of the same loop in stock Opacus.

    python benchmarks/engine_loop.py [--batch 256] [--steps 10] [--device cuda]

The MNIST network of Guo et al. 2022 on random images; the private step, noise and update included, the drawing of
batches not.
"""

from __future__ import annotations

import argparse
import itertools
import time
import warnings
from typing import Any

import torch
from opacus import PrivacyEngine
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from torchfil import FILPrivacyEngine
from torchfil.zoo import mnist_cnn

warnings.filterwarnings("ignore")


def seconds_per_step(engine: Any, options: argparse.Namespace, **settings: Any) -> float:
    torch.manual_seed(0)
    count = options.batch * 20
    dataset = TensorDataset(torch.rand(count, 1, 28, 28), torch.randint(10, (count,)))
    module = mnist_cnn().to(options.device)
    optimizer: Any = torch.optim.SGD(module.parameters(), lr=0.1)
    loader = DataLoader(dataset, batch_size=options.batch, generator=torch.Generator().manual_seed(1))
    model, optimizer, private = engine.make_private(
        module=module, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0, **settings
    )
    start = 0.0
    batches = [batch for _, batch in zip(range(options.steps + 2), itertools.cycle(private), strict=False)]
    for step, batch in enumerate(batches):
        x, y = batch
        if step == 2:  # two steps warm up
            _synchronize(options.device)
            start = time.perf_counter()
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x.to(options.device)), y.to(options.device)).backward()
        optimizer.step()
    _synchronize(options.device)
    return (time.perf_counter() - start) / options.steps


def _synchronize(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    stock = seconds_per_step(PrivacyEngine(accountant="rdp"), options)
    print(f"MNIST network, batch {options.batch}, {options.device}: stock Opacus (hooks) {1e3 * stock:.1f} ms a step")
    for name, settings in (
        ("1 probe", {"num_probes": 1}),
        ("3 probes", {"num_probes": 3}),
        ("3 probes, a quarter of the steps", {"num_probes": 3, "fil_rate": 0.25}),
        ("3 probes, diagonal", {"num_probes": 3, "track": ("diagonal",)}),
    ):
        ratio = seconds_per_step(FILPrivacyEngine(), options, **settings) / stock
        print(f"{name:<36}{ratio:>6.1f} × stock Opacus")


if __name__ == "__main__":
    main()
