"""From one gradient back to the chest x-ray: gradient inversion on an untrained network, without and with DP noise.

The x-rays of lowest and of highest subject-level PLIS of a random sample are attacked (Geiping et al. 2020); are those
of high PLIS found better? Mean SSIM of each third, with 95 % intervals; then the same with clipping and noise.

TORCHFIL_DATA=/path/to/data python examples/attack_inversion.py --out out
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from torchfil import PLIS
from torchfil.attacks.inversion import invert_gradients, observed_gradients
from torchfil.attacks.similarity import haarpsi, require_ssim, ssim
from torchfil.datasets import DataNotFoundError, chest_xrays
from torchfil.zoo import mnist_cnn

SHOWN = 6


def interval(values: Tensor) -> str:
    """The mean with its 95 % interval."""
    half = 1.96 * values.std() / len(values) ** 0.5
    return f"{values.mean():.3f} [{values.mean() - half:.3f}, {values.mean() + half:.3f}]"


def main() -> None:
    """Invert, compare and save the picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--sample", type=int, default=210)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--restarts", type=int, default=1)
    parser.add_argument("--noise-multiplier", type=float, default=1.0)
    options = parser.parse_args()
    require_ssim()
    try:
        images, labels = chest_xrays()
    except DataNotFoundError as error:
        raise SystemExit(f"skipped: {error}") from None
    options.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    rows = torch.randperm(len(images))[: options.sample]
    images, labels = images[rows], labels[rows]
    model, loss = mnist_cnn(2, activation=nn.Tanh), nn.CrossEntropyLoss()
    order = PLIS(model, loss).subject(images, labels).argsort()
    images, labels = images[order], labels[order]
    third = options.sample // 3

    def attack(noise_multiplier: float) -> Tensor:
        clip = 1.0 if noise_multiplier else None
        seen = observed_gradients(
            model, loss, images, labels, max_grad_norm=clip, noise_multiplier=noise_multiplier, seed=1
        )
        return invert_gradients(
            model,
            loss,
            seen,
            labels,
            shape=tuple(images.shape[1:]),
            restarts=options.restarts,
            steps=options.steps,
            seed=2,
            progress=True,
        ).images

    found = {"without noise": attack(0.0), f"DP, σ = {options.noise_multiplier:g}": attack(options.noise_multiplier)}
    for name, guesses in found.items():
        for measure, judge in (("SSIM", ssim), ("HaarPSI", haarpsi)):
            values = judge(guesses, images)
            print(
                f"{name}, mean {measure}: low-PLIS third {interval(values[:third])}, "
                f"high-PLIS third {interval(values[-third:])}, all {interval(values)}"
            )
    shown = torch.cat([torch.arange(SHOWN // 2), torch.arange(len(images) - SHOWN // 2, len(images))])
    figure = Figure(figsize=(8, 4.4), layout="constrained")
    axes = figure.subplots(1 + len(found), SHOWN)
    for column, row in enumerate(shown.tolist()):
        axes[0, column].set_title(f"{'low' if column < SHOWN // 2 else 'high'} PLIS", fontsize=9)
        axes[0, column].imshow(images[row, 0].numpy(), cmap="gray", vmin=0, vmax=1)
        for axis, guesses in zip(axes[1:, column], found.values(), strict=True):
            axis.imshow(guesses[row, 0].numpy(), cmap="gray", vmin=0, vmax=1)
            axis.set_title(f"SSIM {ssim(guesses[row : row + 1], images[row : row + 1]).item():.2f}", fontsize=8)
    for axis, name in zip(axes[:, 0], ("x-ray", *found), strict=True):
        axis.set_ylabel(name, fontsize=9)
    for axis in axes.flat:
        axis.set(xticks=[], yticks=[])
    figure.savefig(options.out / "attack_inversion.png", dpi=80)
    print(f"The picture is {options.out / 'attack_inversion.png'}. It shows private data.")


if __name__ == "__main__":
    main()
