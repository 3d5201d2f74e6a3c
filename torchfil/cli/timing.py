"""What the accounting costs on this machine: steps of a small network, as multiples of a step of stock Opacus."""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from opacus import GradSampleModule
from opacus.optimizers import DPOptimizer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from torchfil.engine import FILPrivacyEngine
from torchfil.papers.zoo import mnist_cnn

__all__ = ["StepCost", "step_costs"]


@dataclass(frozen=True)
class StepCost:
    """The median time of a step."""

    name: str
    milliseconds: float
    relative: float


def step_costs(
    *,
    batch_size: int = 64,
    repeats: int = 5,
    device: str = "cpu",
    progress: Callable[[Iterable[int]], Iterable[int]] = iter,
) -> list[StepCost]:
    """Steps of Guo et al.'s MNIST network on random images, all variants in turns, the first turn not counted.

    Args:
        batch_size: Examples in a batch.
        repeats: Turns.
        device: Where.
        progress: Wraps the turns, e.g. a progress bar.
    """
    if batch_size < 1 or repeats < 1:
        raise ValueError(f"batch_size={batch_size} and repeats={repeats} must be at least 1")

    torch.manual_seed(0)
    x, y = torch.rand(batch_size, 1, 28, 28), torch.randint(10, (batch_size,))
    variants = {
        "stock Opacus (hooks)": _opacus_step(x, y, device),
        "training loop, 1 probe": _engine_step(x, y, device, num_probes=1, whole_step=False),
        "engine.train_step, 1 probe": _engine_step(x, y, device, num_probes=1, whole_step=True),
        "engine.train_step, 3 probes": _engine_step(x, y, device, num_probes=3, whole_step=True),
    }

    # in turns, so that a busy moment of the machine hits all of them alike
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for _ in progress(range(repeats + 1)):
        for name, step in variants.items():
            start = time.perf_counter()
            step()
            if device.startswith("cuda"):
                torch.cuda.synchronize()
            seconds[name].append(time.perf_counter() - start)

    median = {name: 1e3 * statistics.median(times[1:]) for name, times in seconds.items()}
    baseline = next(iter(median.values()))
    return [StepCost(name, value, value / baseline) for name, value in median.items()]


def _opacus_step(x: torch.Tensor, y: torch.Tensor, device: str) -> Callable[[], None]:
    model = GradSampleModule(mnist_cnn().to(device))
    optimizer = DPOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        expected_batch_size=len(x),
    )
    inputs, targets = x.to(device), y.to(device)

    def step() -> None:
        optimizer.zero_grad()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Full backward hook is firing")
            nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()

    return step


def _engine_step(
    x: torch.Tensor, y: torch.Tensor, device: str, *, num_probes: int, whole_step: bool
) -> Callable[[], None]:
    module = mnist_cnn().to(device)
    engine = FILPrivacyEngine()
    model, optimizer, loader = engine.make_private(
        module,
        torch.optim.SGD(module.parameters(), lr=0.01),
        DataLoader(TensorDataset(x, y), batch_size=len(x)),
        criterion=nn.CrossEntropyLoss(),
        num_probes=num_probes,
        poisson_sampling=False,
    )

    def step() -> None:
        for inputs, targets in loader:  # one batch
            if whole_step:
                engine.train_step(inputs, targets)
                continue
            optimizer.zero_grad()
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="Full backward hook is firing")
                nn.functional.cross_entropy(model(inputs.to(device)), targets.to(device)).backward()
            optimizer.step()

    return step
