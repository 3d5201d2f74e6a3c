"""A PLIS map of a batch of MNIST images as a multiple of a plain pass (forward and backward) over
the same batch.

python -m benchmarks.plis_map [--device cuda] [--batch 256]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from torch import nn

from benchmarks import zoo
from benchmarks.measuring import seconds_in_turns
from torchfil import PLIS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch", type=int, default=256)
    options = parser.parse_args()
    torch.manual_seed(0)
    model, loss_fn = zoo.mnist_cnn().to(options.device), nn.CrossEntropyLoss()
    x = torch.rand(options.batch, 1, 28, 28, device=options.device)
    y = torch.randint(10, (options.batch,), device=options.device)
    kinds = {
        "gradient signal": PLIS(model, loss_fn),
        "private": PLIS(model, loss_fn, noise_std=1.0, max_grad_norm=1.0),
    }

    def forward_and_backward() -> None:
        model.zero_grad()
        loss_fn(model(x), y).backward()

    work: dict[str, Callable[[], object]] = {
        "forward": lambda: model(x),
        "pass": forward_and_backward,
    }
    work |= {name: lambda plis=plis: plis.attribute(x, y) for name, plis in kinds.items()}  # type: ignore[misc]
    rows = seconds_in_turns(work, options.device, repeats=15)
    times = {name: row["seconds"] for name, row in rows.items()}
    backward = times["pass"] - times["forward"]
    print(f"MNIST CNN, batch {options.batch}, {options.device}, torch {torch.__version__}")
    print(
        f"  a plain pass, forward and backward: {1e3 * times['pass']:.1f} ms (backward alone "
        f"{1e3 * backward:.1f} ms)"
    )
    for name in kinds:
        ratio, alone = times[name] / times["pass"], times[name] / backward
        print(
            f"  PLIS, {name}: {ratio:.2f} plain passes ({alone:.2f} times the backward pass alone)"
        )


if __name__ == "__main__":
    main()
