"""What it costs to clip people instead of rows: a step over the same rows, with the row and with
the owner as the unit.

    python -m benchmarks.owners [--device cuda] [--rows 240] [--steps 30] [--out FILE.json]

Both runs train the same model on the same batches of rows, in turns; only the unit differs. The
result is the ratio of the median times of a step. "ragged" are people with 1 to 20 rows, drawn
evenly.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks import zoo
from benchmarks.measuring import Json, synchronize
from torchfil import Accounting, FILPrivacyEngine

BATCHES = 4


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(32, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 10)
    )


MODELS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "table, MLP": (mlp, (32,)),
    "MNIST, CNN": (zoo.mnist_cnn, (1, 28, 28)),
    "ResNet-18": (zoo.resnet18, (3, 32, 32)),
}
PEOPLE = {"1 row": (1, 1), "4 rows": (4, 4), "12 rows": (12, 12), "ragged": (1, 20)}


def owners_of(fewest: int, most: int, rows: int) -> Tensor:
    """The owner of every row, of batches with about so many."""
    counts = torch.randint(fewest, most + 1, (BATCHES * rows * 2 // (fewest + most),))
    return torch.arange(len(counts)).repeat_interleave(counts)


class Timed:
    """A private run whose steps are timed, on batches that were read beforehand."""

    def __init__(
        self, model: nn.Module, data: TensorDataset, owner_of: Tensor | None, way: str, device: str
    ) -> None:
        self.model, self.way, self.times = model.to(device), way, list[float]()
        self.engine, optimizer = FILPrivacyEngine(), torch.optim.SGD(model.parameters(), lr=0.01)
        private: dict[str, Any] = {
            "noise_multiplier": 1.0,
            "max_grad_norm": 1.0,
            "criterion": nn.CrossEntropyLoss(),
        }
        self.private, self.optimizer, loader = self.engine.make_private(
            self.model,
            optimizer,
            DataLoader(data, batch_size=-(-len(data) // BATCHES)),
            poisson_sampling=False,
            accounting=Accounting(num_probes=1, amplification="none", owner_of=owner_of),
            **private,
        )
        self.device, self.batches = device, list(loader)

    def step(self, number: int) -> None:
        """One step, timed."""
        x, y = (part.to(self.device) for part in self.batches[number % len(self.batches)])
        synchronize(self.device)
        start = time.perf_counter()
        if self.way == "train_step":
            self.engine.train_step(x, y)
        else:
            self.optimizer.zero_grad()
            F.cross_entropy(self.private(x), y).backward()
            self.optimizer.step()
        synchronize(self.device)
        self.times.append((time.perf_counter() - start) / len(x))


def measure(name: str, people: str, way: str, steps: int, device: str, batch: int) -> Json:
    """Microseconds per row of a step in both runs, and their ratio."""
    build, shape = MODELS[name]
    torch.manual_seed(0)
    owners = owners_of(*PEOPLE[people], batch)
    data = TensorDataset(torch.rand(len(owners), *shape), torch.randint(10, (len(owners),)))
    runs = []
    for owner_of in (None, owners):
        torch.manual_seed(1)
        runs.append(Timed(build(), data, owner_of, way, device))
    for number in range(steps):
        for run in runs:
            run.step(number)
    rows, people_ = (1e6 * statistics.median(run.times[len(run.times) // 3 :]) for run in runs)
    return {
        "model": name,
        "people": people,
        "way": way,
        "row": rows,
        "owner": people_,
        "ratio": people_ / rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.owners", description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--models", nargs="+", default=["table, MLP", "MNIST, CNN"], choices=list(MODELS)
    )
    parser.add_argument("--rows", type=int, default=240, help="of a batch, about")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    results = []
    for name in options.models:
        for people in PEOPLE:
            for way in ("loop", "train_step"):
                found = measure(name, people, way, options.steps, options.device, options.rows)
                times = "{row:8.1f} → {owner:8.1f} µs a row, {ratio:.2f} times".format(**found)
                print(f"{name:12} {people:8} {way:10} {times}")
                results.append(found)
    if options.out is not None:
        machine = {
            "processor": platform.processor(),
            "device": options.device,
            "torch": torch.__version__,
        }
        options.out.write_text(json.dumps({"machine": machine, "results": results}, indent=1))


if __name__ == "__main__":
    main()
