"""Accuracy against the smallest MSE bound, with and without sparing, at several noise scales, on small digits.

Each point is one private training. Without sparing, more noise raises the smallest bound and lowers accuracy. With
``min_mse_bound`` set to a multiple of the bound at the same noise, examples that come close to it are spared, and
training continues with the others. Bounds bind unbiased attackers and are estimates from one run, per pixel value in
[0, 1].

python examples/sparing_digits.py --out out
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from torchfil import FILPrivacyEngine
from torchfil.datasets.stand_ins import small_digits, small_digits_in_words

TRAINED = 1500
BATCH = 150
Point = dict[str, float]


def trained(images: Tensor, labels: Tensor, sigma: float, steps: int, seed: int, keep: float | None) -> Point:
    """One private training: its smallest bound, its accuracy on unseen digits, and how many digits it spared."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
    loader = DataLoader(TensorDataset(images[:TRAINED], labels[:TRAINED]), BATCH)
    engine = FILPrivacyEngine()
    private, _, batches = engine.make_private(
        model,
        torch.optim.SGD(model.parameters(), lr=0.5),
        loader,
        noise_multiplier=sigma,
        max_grad_norm=1.0,
        criterion=nn.CrossEntropyLoss(),
        min_mse_bound=keep,
        num_probes=2,
    )
    taken = 0
    while taken < steps:
        for x, y in batches:
            engine.train_step(x, y)
            taken += 1
            if taken == steps:
                break
    with torch.no_grad():
        right = (private(images[TRAINED:]).argmax(1) == labels[TRAINED:]).float().mean()
    spared = 0 if engine.clip_weights is None else int((engine.clip_weights < 1).sum())
    return {"bound": engine.get_smallest_mse_bound()[0], "accuracy": 100 * float(right), "spared": spared}


def draw(lines: dict[str, list[Point]], path: Path) -> None:
    """The figure."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.5, 3.6), layout="constrained")
    axes = figure.add_subplot()
    for (name, points), style in zip(lines.items(), ("o-", "s-", "^-"), strict=True):
        axes.plot([p["bound"] for p in points], [p["accuracy"] for p in points], style, label=name)
    axes.set(xscale="log", xlabel="smallest MSE bound of 1,500 digits", ylabel="test accuracy, %")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)


def main() -> None:
    """Train, print, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sigmas", type=float, nargs="+", default=[0.5, 1.0, 2.0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("out"))
    options = parser.parse_args()
    print(f"Data: {small_digits_in_words()}; nothing is downloaded.")
    images, labels = small_digits()
    images = images.flatten(1)

    lines: dict[str, list[Point]] = {"nobody spared": [], "3 × the bound kept": [], "10 × the bound kept": []}
    print("    σ      kept  smallest bound  accuracy  spared   (means over seeds; of bounds the geometric one)")
    for sigma in options.sigmas:
        plain = [trained(images, labels, sigma, options.steps, seed, None) for seed in range(options.seeds)]
        for points, factor in zip(lines.values(), (None, 3, 10), strict=True):
            runs = plain
            if factor is not None:  # of the same seed's run without sparing
                runs = [
                    trained(images, labels, sigma, options.steps, seed, factor * before["bound"])
                    for seed, before in enumerate(plain)
                ]
            found = torch.tensor([[run[key] for key in ("bound", "accuracy", "spared")] for run in runs])
            point = {
                "sigma": sigma,
                "bound": float(found[:, 0].log().mean().exp()),
                "accuracy": float(found[:, 1].mean()),
                "spared": float(found[:, 2].mean()),
            }
            points.append(point)
            numbers = f"{point['bound']:14.3g}  {point['accuracy']:6.1f} %  {point['spared']:6.0f}"
            print(f"{sigma:5g}  {factor or '–':>8}  {numbers}")

    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "sparing_digits.json").write_text(json.dumps(lines, indent=1))
    draw(lines, options.out / "sparing_digits.png")
    print(f"\nThe picture is {options.out / 'sparing_digits.png'}.")
    print("These numbers depend on private data and are confidential themselves.")


if __name__ == "__main__":
    main()
