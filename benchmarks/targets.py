"""Does ``make_private_with_bound`` reach its target? Runs over several seeds, each with its pilots.

    OMP_NUM_THREADS=1 python -m benchmarks.targets --data digits
    python -m benchmarks.targets --data mnist --device cuda

For each seed: the pilots, whether the run met the target at the stated confidence, test accuracy
(training accuracy on digits) and time. MNIST is the paper's CNN on 60,000 digits (``TORCHFIL_DATA``
names the folder), batches of 2,048, in 24 epochs: the fewest in which every one of so many examples
is drawn five times with near certainty.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from paper_data import ResidentDataset, real_data, small_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader

from benchmarks import zoo
from benchmarks.measuring import Json
from torchfil import Accounting, FILPrivacyEngine
from torchfil.questions import Absent
from torchfil.utils.files import replaced_when_complete

__all__ = ["TASKS", "Task", "kept"]


@dataclass(frozen=True)
class Task:
    """What is trained, and how."""

    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    network: nn.Module
    batch: int
    lr: float
    momentum: float
    max_grad_norm: float
    clip: str
    accounting: Accounting


def digits_task(count: int) -> Task:
    """A tanh network on a number of scikit-learn's digits."""
    images, labels = small_digits()
    data = images[:count].flatten(1), labels[:count]
    network = nn.Sequential(nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 10))
    return Task(data, data, network, 60, 0.5, 0.0, 1.0, "smooth", Accounting())


def mnist_task(count: int) -> Task:
    """The paper's CNN on a number of MNIST digits."""
    data = real_data("mnist")
    images, labels = data.mnist()
    accounting = Accounting(num_probes=1)
    return Task(
        (images[:count], labels[:count]),
        data.mnist("test"),
        zoo.mnist_cnn(),
        2048,
        1.5,
        0.9,
        0.1,
        "rsqrt",
        accounting,
    )


# how it is made, examples, epochs
TASKS = {"digits": (digits_task, 600, 20), "mnist": (mnist_task, 60_000, 24)}


def kept(
    name: str,
    seed: int,
    device: str,
    *,
    examples: int | None,
    epochs: int | None,
    rate: float | None,
    **options: Any,
) -> Json:
    """One run with its pilots, as numbers; both texts are printed.

    Args:
        name: The task's name.
        seed: The seed of weights, batches, noise and probes.
        device: The device.
        examples: The number of examples; None: the task's.
        epochs: The number of epochs; None: the task's.
        rate: The wanted true-positive rate of "was it in the data" at 1 % false positives; None: no
            such target.
        **options: Options of ``make_private_with_bound``.
    """
    make, usual_examples, usual_epochs = TASKS[name]
    epochs = epochs or usual_epochs
    torch.manual_seed(seed)
    task = make(examples or usual_examples)
    network = task.network.to(device)
    data = ResidentDataset(*(part.to(device) for part in task.train))
    loader = DataLoader(
        data, task.batch, collate_fn=data.collate, generator=torch.Generator().manual_seed(seed)
    )
    if rate is not None:
        options |= {"target_true_positive_rate": rate, "questions": {"member": Absent()}}

    start = time.perf_counter()
    engine = FILPrivacyEngine()
    _, _, private = engine.make_private_with_bound(
        network,
        torch.optim.SGD(network.parameters(), lr=task.lr, momentum=task.momentum),
        loader,
        epochs=epochs,
        criterion=nn.CrossEntropyLoss(),
        max_grad_norm=task.max_grad_norm,
        clip=task.clip,
        accounting=task.accounting,
        **options,
    )
    for _ in range(epochs):
        for x, y in private:
            engine.train_step(x, y)
    check = engine.check_bound()
    seconds = time.perf_counter() - start

    with torch.no_grad():
        images, labels = (part.to(device) for part in task.test)
        accuracy = 100 * float((network(images).argmax(1) == labels).float().mean())
    print(f"seed {seed}: {engine.pilot}\n{check}")
    print(f"  accuracy {accuracy:.2f} %, {seconds:.0f} s in all\n", flush=True)
    return {
        "seed": seed,
        "noise_multiplier": engine.pilot.noise_multiplier,
        "pilots": [(pilot.noise_multiplier, pilot.check.headroom) for pilot in engine.pilot.pilots],
        "met": check.met,
        "headroom": check.headroom,
        "mse_bound": check.mse_bound,
        "true_positive_rate": check.true_positive_rate,
        "accuracy": accuracy,
        "seconds": seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", choices=list(TASKS), default="digits")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument(
        "--target", type=float, default=1.0, help="the wanted smallest MSE bound; 0: none"
    )
    parser.add_argument(
        "--rate", type=float, default=None, help="the wanted rate of 'was it in the data'"
    )
    parser.add_argument("--examples", type=int, default=None)
    parser.add_argument("--epochs", type=int, default=None)
    parser.add_argument("--margin", type=float, default=0.25)
    parser.add_argument("--of", choices=("run", "probes"), default="run")
    parser.add_argument("--out", type=Path, default=None, help="a JSON file")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    runs = []
    for seed in range(options.seeds):
        runs.append(
            kept(
                options.data,
                seed,
                options.device,
                examples=options.examples,
                epochs=options.epochs,
                rate=options.rate,
                target_mse_bound=options.target or None,
                margin=options.margin,
                of=options.of,
            )
        )
        if options.out is not None:
            with replaced_when_complete(options.out) as path:
                Path(path).write_text(
                    json.dumps({"options": {**vars(options), "out": None}, "runs": runs}, indent=1)
                )
    print(f"met in {sum(run['met'] for run in runs)} of {len(runs)} seeds")


if __name__ == "__main__":
    main()
