"""What canaries show about ε, and what they cost.

    python -m benchmarks.audits --data digits --out digits.json
    python -m benchmarks.audits --data mnist --device cuda --canaries 10000 --out mnist.json
    python -m benchmarks.audits --cost [--device cuda]
    python -m benchmarks.audits --draw digits.json mnist.json --picture audits.png

For every ε and seed a run is trained with the noise that spends this ε, and audited at the same δ.
The table has the audited ε by both methods, the most that so many canaries can show, and the
accuracy beside that of a run without canaries. Runs are sound, so at most one in twenty should be
audited above its claim. ``--cost`` compares the step of MNIST's CNN with and without canaries, in
turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Callable
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import torch
from paper_data import real_data, small_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks import zoo
from benchmarks.measuring import Json, synchronize
from torchfil import Canaries, FILPrivacyEngine
from torchfil.utils.files import replaced_when_complete

DELTA = 1e-5
KINDS = ("directions", "mislabelled")


Task = tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor], nn.Module, int, int, float, float]


def digits() -> Task:
    """Scikit-learn's digits, a wide network; batch size, epochs, learning rate and C."""
    images, labels = small_digits()
    x, order = (
        images.flatten(1),
        torch.randperm(len(labels), generator=torch.Generator().manual_seed(0)),
    )
    network = nn.Sequential(nn.Linear(64, 200), nn.Tanh(), nn.Linear(200, 10))
    return (
        (x[order[:1440]], labels[order[:1440]]),
        (x[order[1440:]], labels[order[1440:]]),
        network,
        144,
        20,
        1.0,
        1.0,
    )


def mnist() -> Task:
    """MNIST, the paper's CNN."""
    data = real_data("mnist")
    return data.mnist(), data.mnist("test"), zoo.mnist_cnn(), 3000, 20, 40.0, 0.1


TASKS = {"digits": digits, "mnist": mnist}


def private_run(
    task: Callable[[], Task], canaries: Canaries | None, epsilon: float, seed: int, device: str
) -> tuple[FILPrivacyEngine, Any, float]:
    """A run that spends ε, its optimizer and its accuracy on held-out data."""
    torch.manual_seed(seed)
    train, test, network, batch, epochs, lr, limit = task()
    network.to(device)
    data = TensorDataset(*(part.to(device) for part in train))
    engine = FILPrivacyEngine()
    _, optimizer, loader = engine.make_private_with_epsilon(
        network,
        torch.optim.SGD(network.parameters(), lr=lr, momentum=0.5),
        DataLoader(data, batch),
        target_epsilon=epsilon,
        target_delta=DELTA,
        epochs=epochs,
        max_grad_norm=limit,
        criterion=nn.CrossEntropyLoss(),
        canaries=canaries,
    )
    with engine.paused():  # Fisher information is not what is tested
        for _ in range(epochs):
            for x, y in loader:
                engine.train_step(x, y)
    x, y = (part.to(device) for part in test)
    with torch.no_grad():
        right = network.eval()(x).argmax(dim=1) == y
    return engine, optimizer, float(right.double().mean())


def audited(name: str, kind: str, count: int, epsilon: float, seed: int, device: str) -> Json:
    """One run and its audit, as numbers."""
    start = time.perf_counter()
    held_out = (
        None
        if kind == "directions"
        else TensorDataset(*(part.to(device) for part in TASKS[name]()[1]))
    )
    engine, optimizer, accuracy = private_run(
        TASKS[name], Canaries(count, held_out), epsilon, seed, device
    )
    trained, audit = time.perf_counter() - start, engine.audit(delta=DELTA)
    found = {
        "data": name,
        "seed": seed,
        "accuracy": accuracy,
        "seconds": trained,
        **audit.as_dict(),
    }
    found["seconds_of_audit"] = time.perf_counter() - start - trained
    return found | {"noise_multiplier": float(optimizer.noise_multiplier)}


def print_row(found: Json) -> None:
    methods = ", ".join(f"{name} {value:.2f}" for name, value in found["by_method"].items())
    claim = (
        f"{found['data']:7} {found['num_canaries']:6} {found['kind']:11} claimed "
        f"{found['claimed']:5.2f}"
    )
    rest = (
        f"ceiling {found['ceiling']:.2f}, p {found['p_value']:.2g}, accuracy "
        f"{found['accuracy']:.4f}"
    )
    print(
        f"{claim}, audited ≥ {found['epsilon']:.2f} ({methods}), {rest}, seed {found['seed']}",
        flush=True,
    )


def cost(device: str, steps: int, batch: int = 256) -> list[Json]:
    """Milliseconds of a step of MNIST's CNN without canaries and with a thousand, in turns."""
    torch.manual_seed(0)
    x, y = torch.rand(batch * 40, 1, 28, 28), torch.randint(10, (batch * 40,))
    held_out = TensorDataset(x[:1000].to(device), y[:1000].to(device))
    kinds = {"none": None, "directions": Canaries(1000), "mislabelled": Canaries(1000, held_out)}
    results = []
    for way in ("loop", "train_step"):
        runs: Json = {}
        for name, canaries in kinds.items():
            network, engine = zoo.mnist_cnn().to(device), FILPrivacyEngine()
            data = TensorDataset(x.to(device), y.to(device))
            made = engine.make_private(
                network,
                torch.optim.SGD(network.parameters(), lr=0.1),
                DataLoader(data, batch),
                noise_multiplier=1.0,
                max_grad_norm=1.0,
                criterion=nn.CrossEntropyLoss(),
                num_probes=1,
                canaries=canaries,
            )
            runs[name] = (engine, *made[:2], chain.from_iterable(repeat(made[2])), list[float]())
        for number in range(steps):
            for name, (engine, model, optimizer, batches, times) in runs.items():
                if name == "mislabelled" and number % 4:
                    continue
                x_, y_ = next(batches)
                synchronize(device)
                start = time.perf_counter()
                one_step(way, engine, model, optimizer, x_, y_)
                synchronize(device)
                times.append((time.perf_counter() - start) / len(x_) * batch)
        medians = {
            name: 1e3 * statistics.median(run[-1][len(run[-1]) // 3 :])
            for name, run in runs.items()
        }
        results.append({"way": way, "device": device, **medians})
        ratios = ", ".join(
            f"{name} {value:.2f} ms ({value / medians['none']:.2f})"
            for name, value in medians.items()
        )
        print(f"{way:10} {ratios}", flush=True)
    return results


def one_step(
    way: str,
    engine: FILPrivacyEngine,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    x: Tensor,
    y: Tensor,
) -> None:
    if way == "train_step":
        engine.train_step(x, y)
        return
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()


def draw(files: list[Path], picture: Path) -> None:
    """Audited against claimed ε: a point for each run, the ceilings, and the line that sound audits
    stay below.
    """
    import matplotlib.pyplot as plt

    rows = [
        row
        for file in files
        for row in json.loads(file.read_text())["runs"]
        if row["kind"] == "directions"
    ]
    figure, axis = plt.subplots(figsize=(6.4, 4.4))
    groups = sorted({(row["data"], row["num_canaries"]) for row in rows})
    for place, (name, count) in enumerate(groups):
        own = [row for row in rows if (row["data"], row["num_canaries"]) == (name, count)]
        shift = 1 + 0.03 * (place - (len(groups) - 1) / 2)
        label = (
            f"{name.replace('mnist', 'MNIST')}, {count:,} canaries (can show at most "
            f"{own[0]['ceiling']:.1f})"
        )
        axis.plot(
            [shift * row["claimed"] for row in own],
            [row["epsilon"] for row in own],
            "o",
            ms=5,
            label=label,
        )
    axis.plot([0, 9], [0, 9], color="0.4", lw=1, label="as much as claimed")
    axis.plot([4], [1.8], "k*", ms=11, label="CIFAR-10, white box (Steinke et al. 2023)")
    axis.set(
        xlabel="claimed ε (groups are drawn side by side)", ylabel="audited ε (lower bound, 95 %)"
    )
    axis.set(xlim=(0, 9), ylim=(0, 9))
    axis.legend(frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(picture, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.audits", description=__doc__)
    parser.add_argument("--data", nargs="+", default=["digits"], choices=list(TASKS))
    parser.add_argument("--epsilons", nargs="+", type=float, default=[1.0, 2.0, 4.0, 8.0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--canaries", nargs="+", type=int, default=[1000, 10_000])
    parser.add_argument("--kind", default="directions", choices=KINDS)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--cost", action="store_true")
    parser.add_argument("--steps", type=int, default=60, help="of --cost")
    parser.add_argument("--draw", nargs="+", type=Path, default=[])
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    if options.draw:
        draw(options.draw, options.picture)
        return
    if options.cost:
        results: Json = {"cost": cost(options.device, options.steps)}
    else:
        results = {"runs": [], "without_canaries": []}
        for name in options.data:
            for epsilon in options.epsilons:
                for seed in range(options.seeds):
                    plain = private_run(TASKS[name], None, epsilon, seed, options.device)[2]
                    results["without_canaries"].append(
                        {"data": name, "claimed": epsilon, "accuracy": plain}
                    )
                    for count in options.canaries:
                        found = audited(name, options.kind, count, epsilon, seed, options.device)
                        print_row(found)
                        results["runs"].append(found)
    if options.out is not None:
        with replaced_when_complete(options.out) as file:
            Path(file).write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
