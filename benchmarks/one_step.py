"""The cost of one step's Fisher traces, as multiples of one Opacus DP-SGD step on the same batch.

    python benchmarks/one_step.py [--batch 64] [--device cuda]

Model and method of comparison are those of Guo et al. 2022: the MNIST network, 50 coordinates.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from opacus import GradSampleModule
from opacus.optimizers import DPOptimizer
from torch import nn

from torchfil import fisher
from torchfil.zoo import mnist_cnn


def median_seconds(call: Callable[[], object], device: str, repeats: int) -> float:
    times = []
    for _ in range(repeats + 1):  # the first one warms up
        start = time.perf_counter()
        call()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    torch.manual_seed(0)
    model = mnist_cnn().to(options.device)
    x = torch.rand(options.batch, 1, 28, 28, device=options.device)
    y = torch.randint(10, (options.batch,), device=options.device)
    wrapped = GradSampleModule(mnist_cnn().to(options.device))
    optimizer = DPOptimizer(
        torch.optim.SGD(wrapped.parameters(), lr=0.01),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        expected_batch_size=options.batch,
    )

    def opacus_step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(wrapped(x), y).backward()
        optimizer.step()

    def trace(estimator: str, num_probes: int) -> fisher.Estimate:
        return fisher.fim_trace(
            model,
            nn.CrossEntropyLoss(),
            x,
            y,
            max_grad_norm=1.0,
            noise_multiplier=1.0,
            estimator=estimator,
            num_probes=num_probes,
            generator=torch.Generator().manual_seed(0),
        )

    step = median_seconds(opacus_step, options.device, options.repeats)
    print(f"MNIST network, batch {options.batch}, {options.device}: one Opacus step (hooks) {1e3 * step:.1f} ms")
    print(f"{'estimator':<16}{'probes':>7}{'× Opacus step':>16}{'relative error (median)':>26}")
    for estimator, probes in (
        ("weight-probes", 1),
        ("weight-probes", 3),
        ("input-probes", 3),
        ("coordinates", 3),
        ("coordinates", 50),
    ):
        seconds = median_seconds(lambda e=estimator, k=probes: trace(e, k), options.device, options.repeats)  # type: ignore[misc]
        result = trace(estimator, probes)
        error = (result.standard_error / result.value).median().item() if probes > 1 else float("nan")
        print(f"{estimator:<16}{probes:>7}{seconds / step:>16.1f}{error:>26.3f}")


if __name__ == "__main__":
    main()
