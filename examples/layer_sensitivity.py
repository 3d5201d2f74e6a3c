"""Which layer's gradient leaks? A network learns whether a chest x-ray is mirrored.

Its gradients reveal pneumonia.

Shows the sensitivity of every layer's gradient to the target, before and after training, and what
an attacker who sees the gradient of one x-ray learns from each layer about a diagnosis that is not
the network's task (Mo et al. 2021).

Without the data's files, it runs on a small stand-in and says so (examples/README.md).

TORCHFIL_DATA=/path/to/data python examples/layer_sensitivity.py --out out
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from networks import small_alexnet
from paper_data import PaperData
from torch import Tensor, nn

from torchfil.attribution import LayerTable, jacobian_sensitivity, layer_gradients, v_information

TRAINED, SENSITIVITY_EXAMPLES, ATTACKED = 2500, 100, 300


def xrays(data: PaperData, split: str) -> tuple[Tensor, Tensor, Tensor]:
    """Images [n, 1, 28, 28] in [0, 1], half of them mirrored; which are mirrored.

    Which show pneumonia.
    """
    images, pneumonia = data.chest_xrays(split)
    order = torch.randperm(len(images))  # the file is sorted by diagnosis
    images, pneumonia = images[order], pneumonia[order]
    mirrored = torch.randint(2, (len(images),))
    return (
        torch.where(mirrored[:, None, None, None] == 1, images.flip(3), images),
        mirrored,
        pneumonia,
    )


def train(model: nn.Module, images: Tensor, targets: Tensor) -> None:
    """Two epochs, enough to learn the task."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(2):
        for rows in torch.randperm(len(images)).split(64):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[rows]), targets[rows]).backward()
            optimizer.step()


def main() -> None:
    """Print the tables and save the picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("out"))
    options = parser.parse_args()
    data = PaperData("pneumoniamnist")
    options.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    images, mirrored, _ = xrays(data, "train")
    test_images, test_mirrored, pneumonia = xrays(data, "test")
    model, loss_fn = small_alexnet(2, 1, 28), nn.CrossEntropyLoss()

    def measure() -> tuple[LayerTable, LayerTable]:
        few, some = slice(SENSITIVITY_EXAMPLES), slice(ATTACKED)
        sensitivity = jacobian_sensitivity(model, loss_fn, test_images[few], test_mirrored[few])
        gradients = layer_gradients(model, loss_fn, test_images[some], test_mirrored[some])
        return sensitivity, v_information(gradients, pneumonia[some])

    results = {"before training": measure()}
    train(model, images[:TRAINED], mirrored[:TRAINED])
    results["after training"] = measure()
    correct = 100 * (model(test_images).argmax(1) == test_mirrored).float().mean()
    share = pneumonia[:ATTACKED].float().mean().item()
    entropy = -share * np.log(share) - (1 - share) * np.log(1 - share)
    print(
        f"Mirrored or not: {correct:.1f} % right after training. The diagnosis holds "
        f"{entropy:.3f} nats."
    )
    for title, tables in results.items():
        for table in tables:
            print(f"\n{title}: {table}")
    save(results, entropy, options.out / "layer_sensitivity.png")
    print(
        "\nA well-fitted example's gradient is nearly 0; divided by its range, it is sensitive to "
        "its target."
    )
    print(f"The picture is {options.out / 'layer_sensitivity.png'}.")
    print("These numbers depend on private data and are confidential themselves.")


def save(results: dict[str, tuple[LayerTable, LayerTable]], entropy: float, path: Path) -> None:
    """Sensitivity above, V-information below; before training on the left, after on the right."""
    figure = Figure(figsize=(9, 6), layout="constrained")
    axes = figure.subplots(2, 2)
    axes[1, 1].sharey(axes[1, 0])
    for column, (title, (sensitivity, information)) in enumerate(results.items()):
        sensitivity.plot(axes[0, column])
        axes[0, column].set_title(f"sensitivity to the target, {title}", fontsize=10)
        information.plot(axes[1, column])
        axes[1, column].set_title(f"V-information (lower estimate), {title}", fontsize=10)
        axes[1, column].axhline(entropy, color="#D55E00", linestyle="--", linewidth=1.2)
        axes[1, column].text(
            -0.4, entropy, "the diagnosis itself", color="#D55E00", fontsize=9, va="bottom"
        )
        axes[1, column].set_ylim(top=1.15 * entropy)
    figure.savefig(path, dpi=90)


if __name__ == "__main__":
    main()
