"""Figure 3 of the PLIS paper, its maps: which parts of a chest x-ray drive its privacy loss, with
and without DP.

A network learns to detect pneumonia, without and with DP-SGD, (ε, δ) = (1, 1e-5). The maps show the
x-rays with the lowest and the highest subject-level PLIS in the non-private network. The paper's
reconstructions are not repeated here.

Without the data's files, it runs on a small stand-in and says so (examples/README.md).

TORCHFIL_DATA=/path/to/data python examples/plis_xrays.py --out out
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from matplotlib.figure import Figure
from networks import mnist_cnn
from paper_data import PaperData
from plis_mnist import DELTA, MAX_GRAD_NORM, number, train, train_privately
from torch import Tensor, nn

from torchfil import PLIS, viz

DIAGNOSES = ("healthy", "pneumonia")
SHOWN = 3  # of each end


def concentration(attribution: Tensor) -> Tensor:
    """For every example, the smallest share of pixels that holds half of ‖PLIS‖²; 0.5 for an even
    map.
    """
    squares = attribution.flatten(1).square().sort(dim=1, descending=True).values
    reached = squares.cumsum(dim=1) < 0.5 * squares.sum(dim=1, keepdim=True)
    return (reached.sum(dim=1) + 1) / squares.shape[1]


def main() -> None:
    """Train both networks and save the maps."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("out"))
    options = parser.parse_args()
    data = PaperData("pneumoniamnist")
    (images, labels), test = data.chest_xrays(), data.chest_xrays("test")
    options.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    plain = train(mnist_cnn(2, activation=nn.GELU), images, labels, epochs=8)
    private = train_privately(
        mnist_cnn(2, activation=nn.GELU), images, labels, epochs=8, batch_size=500
    )
    print(f"{len(labels)} training x-rays, {100 * labels.float().mean():.0f} % with pneumonia")
    for name, trained in (("non-private", plain), ("private", private)):
        recalls = [trained.accuracy(test[0][test[1] == k], test[1][test[1] == k]) for k in (0, 1)]
        print(
            f"{name}: {recalls[0]:.0f} % of healthy and {recalls[1]:.0f} % of pneumonia test "
            "x-rays right"
        )
    print(f"private: ε = {private.epsilon:.2f} at δ = {DELTA:g}")

    readings = {
        "non-private": plain.plis(),
        "private": private.plis(),
        "private, clipped": private.plis(clipped=True),
    }
    maps = {name: plis.attribute(images, labels) for name, plis in readings.items()}
    norms = {name: heat.flatten(1).norm(dim=1) for name, heat in maps.items()}
    gradient = PLIS(private.model, nn.CrossEntropyLoss()).privacy_loss(images, labels).sqrt()
    clipped = 100 * (gradient > MAX_GRAD_NORM).float().mean()
    print(f"{clipped:.0f} % of the gradients are above the clipping norm in the private network")
    print("median share of pixels that holds half of ‖PLIS‖²:")
    for name, heat in maps.items():
        print(f"  {name}: {100 * concentration(heat).median():.1f} %")
    order = norms["non-private"].argsort()
    rows = torch.cat([order[:SHOWN], order[-SHOWN:]])
    figure = Figure(figsize=(9, 6.9), layout="constrained")
    axes = figure.subplots(1 + len(readings), len(rows))
    for column, row in enumerate(rows.tolist()):
        axes[0, column].imshow(images[row, 0], cmap="gray", vmin=0, vmax=1)
        axes[0, column].set_title(
            f"{'low' if column < SHOWN else 'high'} PLIS\n{DIAGNOSES[labels[row]]}", fontsize=10
        )
        for axis, name in zip(axes[1:, column], readings, strict=True):
            viz.show_map(images[row], maps[name][row], axis=axis)
            axis.set_title(f"‖PLIS‖ = {number(float(norms[name][row]))}", fontsize=9)
    for axis, name in zip(axes[:, 0], ("image", *readings), strict=True):
        axis.set_ylabel(name, fontsize=11)
    for axis in axes.flat:
        axis.set(xticks=[], yticks=[])
    figure.supxlabel(
        "|PLIS| by pixel; darker: larger, each map on its own scale", fontsize=9, color="0.35"
    )
    figure.savefig(options.out / "plis_xrays.png", dpi=80)
    print(f"The picture is {options.out / 'plis_xrays.png'}.")
    print("These numbers depend on private data and are confidential themselves.")


if __name__ == "__main__":
    main()
