"""A training loop with Fisher accounting, as a multiple of the same loop in stock Opacus, in one run.

    python benchmarks/engine_loop.py [--models mnist cifar] [--batch 256] [--steps 10] [--device cuda] [--json FILE]

The networks of Guo et al. 2022, a ResNet-18 with GroupNorm and a transformer on tokens, on random data;
the private step, noise and update included, the drawing of batches not; all variants take turns. "fused" is
``engine.train_step``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from opacus import PrivacyEngine
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from torchfil import FILPrivacyEngine, Private, zoo

warnings.filterwarnings("ignore")

CRITERION = nn.CrossEntropyLoss()


def images(count: int, channels: int, size: int) -> TensorDataset:
    return TensorDataset(torch.rand(count, channels, size, size), torch.randint(10, (count,)))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], TensorDataset], int, Private | None]] = {
    "mnist": (zoo.mnist_cnn, lambda n: images(n, 1, 28), 600, None),
    "cifar": (zoo.cifar_cnn, lambda n: images(n, 3, 32), 200, None),
    "resnet18": (zoo.resnet18, lambda n: images(n, 3, 32), 128, None),
    "tokens": (
        lambda: zoo.token_transformer(2, 1000, 64, width=128, depth=6, heads=4),
        lambda n: TensorDataset(torch.randint(1000, (n, 64)), torch.randint(2, (n,))),
        64,
        Private(submodule="embedding"),
    ),
}


class Loop:
    """A private loop that can take one step at a time."""

    def __init__(self, name: str, options: argparse.Namespace, *, stock: bool, fused: bool = False, **settings: Any):
        build, data, batch, private = MODELS[name]
        batch = options.batch or batch
        torch.manual_seed(0)
        self.device, self.fused = options.device, fused
        module = build().to(self.device)
        plain = torch.optim.SGD(module.parameters(), lr=0.01)
        dataset = data(20 * batch)
        loader = DataLoader(dataset, batch_size=batch, generator=torch.Generator().manual_seed(1))
        self.engine: Any = PrivacyEngine(accountant="rdp") if stock else FILPrivacyEngine()
        if not stock:
            settings |= {"criterion": CRITERION, "private": private, "max_memory": 2**35}
        self.optimizer: Any
        self.model, self.optimizer, private_loader = self.engine.make_private(
            module=module, optimizer=plain, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0, **settings
        )
        self.batches = itertools.cycle(list(itertools.islice(iter(private_loader), 8)))

    def step(self) -> None:
        """One step on the next batch."""
        x, y = next(self.batches)
        x, y = x.to(self.device), y.to(self.device)
        if self.fused:
            self.engine.train_step(x, y)
            return
        self.optimizer.zero_grad()
        CRITERION(self.model(x), y).backward()
        self.optimizer.step()


def seconds(loops: dict[str, Loop], steps: int) -> dict[str, float]:
    """The median time of a step of each, taken in turns."""
    times: dict[str, list[float]] = {title: [] for title in loops}
    for turn in range(steps + 8):
        for title, loop in loops.items():
            _synchronize(loop.device)
            start = time.perf_counter()
            loop.step()
            _synchronize(loop.device)
            if turn >= 8:
                times[title].append(time.perf_counter() - start)
    return {title: statistics.median(values) for title, values in times.items()}


def peak_memory(loop: Loop) -> float:
    """What a step allocates on the GPU beyond what is held already, in GB; 0 on a CPU."""
    if not loop.device.startswith("cuda"):
        return 0.0
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    loop.step()
    loop.optimizer.zero_grad(set_to_none=True)
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 1e9


def _synchronize(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["mnist"], choices=list(MODELS))
    parser.add_argument("--batch", type=int, default=None, help="the papers' sizes where not given")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    variants: dict[str, dict[str, Any]] = {
        "stock Opacus (hooks)": {"stock": True},
        "loop, 1 probe": {"stock": False, "num_probes": 1},
        "loop, 3 probes": {"stock": False, "num_probes": 3},
        "loop, 3 probes, a quarter of the steps": {"stock": False, "num_probes": 3, "fil_rate": 0.25},
        "fused, 1 probe": {"stock": False, "fused": True, "num_probes": 1},
        "fused, 3 probes": {"stock": False, "fused": True, "num_probes": 3},
        "fused, 1 probe, no graph": {"stock": False, "fused": True, "num_probes": 1, "cuda_graphs": False},
    }
    results: list[dict[str, Any]] = []
    for name in options.models:
        batch = options.batch or MODELS[name][2]
        print(f"{name}, batch {batch}, {options.device}, torch {torch.__version__}")
        loops = {
            title: Loop(name, options, **settings)
            for title, settings in variants.items()
            if options.device.startswith("cuda") or not title.endswith("no graph")
        }
        found = seconds(loops, options.steps)
        stock = found["stock Opacus (hooks)"]
        for title, took in found.items():
            peak = peak_memory(loops[title])
            memory = f"  {peak:5.2f} GB" if peak else ""
            print(f"  {title:<40}{1e3 * took:9.1f} ms{took / stock:7.2f} × stock{memory}", flush=True)
            row = {"model": name, "batch": batch, "variant": title, "seconds": took, "ratio": took / stock}
            results.append({**row, "peak_gb": peak})
        del loops
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
