"""What only a GPU can show: memory ceilings as the allocator sees them, and agreement with the CPU."""

from __future__ import annotations

import pytest
import torch
from cases import relative_error
from torch import nn

from torchfil import fisher, zoo

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def peak_bytes(max_memory: int, estimator: str) -> int:
    torch.manual_seed(0)
    model = zoo.mnist_cnn().cuda()
    x, y = torch.rand(1024, 1, 28, 28, device="cuda"), torch.randint(10, (1024,), device="cuda")

    def trace(rows: slice) -> None:
        fisher.fim_trace(
            model,
            nn.CrossEntropyLoss(),
            x[rows],
            y[rows],
            max_grad_norm=1.0,
            noise_multiplier=1.0,
            estimator=estimator,
            num_probes=2,
            max_memory=max_memory,
        )

    trace(slice(0, 2))  # the libraries' own workspaces come with their first use
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    trace(slice(None))
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("estimator", ["weight-probes", "input-probes", "coordinates"])
def test_peak_memory_follows_the_ceiling(estimator: str) -> None:
    """Activations come on top of max_memory: a few times the inputs of the chunk, which shrink with it."""
    small, large = peak_bytes(32 * 2**20, estimator), peak_bytes(512 * 2**20, estimator)
    print(f"{estimator}: peak {small / 2**20:.0f} MiB under 32 MiB, {large / 2**20:.0f} MiB under 512 MiB")
    assert small < 3 * 32 * 2**20
    assert large < 3 * 512 * 2**20
    assert small < large / 3


def test_exact_peak_memory() -> None:
    """784 columns of 30,762 numbers are 92 MiB an example; in blocks they fit under the ceiling."""
    peak = peak_bytes(256 * 2**20, "exact")
    print(f"exact: peak {peak / 2**20:.0f} MiB under 256 MiB")
    assert peak < 4 * 256 * 2**20


def test_same_probes_same_numbers_as_on_the_cpu_up_to_the_device_generator() -> None:
    torch.manual_seed(0)
    model = zoo.mnist_cnn().double()
    x, y = torch.rand(4, 1, 28, 28).double(), torch.randint(10, (4,))
    settings = {"max_grad_norm": 1.0, "noise_multiplier": 1.0, "estimator": "exact"}
    cpu = fisher.fim_trace(model, nn.CrossEntropyLoss(), x, y, **settings).value
    gpu = fisher.fim_trace(model.cuda(), nn.CrossEntropyLoss(), x.cuda(), y.cuda(), **settings).value
    assert relative_error(gpu, cpu) < 1e-8
