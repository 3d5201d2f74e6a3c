"""Which layer reveals a secret? Property inference in federated learning, with a property planted into MNIST.

Two clients train a network by FedSGD to predict whether a digit is even. Half of the digits have a grey bar, a column
of pixels that is irrelevant to the task. One client infers from the other's gradients, layer by layer, whether a batch
has bars; the tables compare the AUC with the layer's sensitivity and V-information.

Without the data's files, it runs on a small stand-in and says so (examples/README.md).

TORCHFIL_DATA=/path/to/data python examples/attack_property.py --out out
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from matplotlib.figure import Figure
from networks import small_alexnet
from paper_data import PaperData
from scipy.stats import spearmanr
from torch import nn

from torchfil.attacks.property import Client, federated_gradients, property_inference
from torchfil.attribution import LayerTable, jacobian_sensitivity, layer_gradients, v_information


def planted(images: torch.Tensor, digits: torch.Tensor, strength: float, seed: int) -> Client:
    """The task is even or odd; a random half of the images has a bar on the left."""
    images, bars = images.clone(), torch.rand(len(images), generator=torch.Generator().manual_seed(seed)) < 0.5
    images[bars, :, 4:24, 2:4] = (images[bars, :, 4:24, 2:4] + strength).clamp(max=1)
    return Client(images, digits % 2, bars)


def main() -> None:
    """Train, attack, print the tables and save the picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--strength", type=float, default=0.5)
    parser.add_argument("--examples", type=int, default=1000, help="examples of each client")
    parser.add_argument("--measured", type=int, default=400, help="the victim's examples for V-information")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    data = PaperData("mnist")
    images, digits = data.mnist()
    if data.made:  # half a minute on two cores
        options.rounds, options.measured = min(options.rounds, 30), min(options.measured, 150)
    options.out.mkdir(parents=True, exist_ok=True)

    torch.manual_seed(0)
    rows = torch.randperm(len(images))[: 2 * options.examples]
    victim, attacker = (
        planted(images[own], digits[own], options.strength, seed).to(options.device)
        for seed, own in enumerate(rows.split(options.examples), start=1)
    )
    model, loss = small_alexnet(2, 1, 28).to(options.device), nn.CrossEntropyLoss()
    seen = federated_gradients(
        model,
        loss,
        victim,
        attacker,
        rounds=options.rounds,
        batch_size=16,
        lr=0.05,
        own_batches=1,
        seed=0,
        progress=True,
    )

    few = options.measured
    single = layer_gradients(model, loss, victim.inputs[:few], victim.targets[:few])
    attacks: dict[str, LayerTable] = {
        "AUC, random forest": property_inference(seen, attacker="forest"),
        "AUC, logistic": property_inference(seen, attacker="logistic"),
    }
    measures: dict[str, LayerTable] = {
        "sensitivity to the target": jacobian_sensitivity(model, loss, victim.inputs[:60], victim.targets[:60]),
        "V-information, one example, forest": v_information(single, victim.property[:few], "forest"),
    }
    logistic = v_information(single, victim.property[:few], "logistic")
    for title, table in {**attacks, **measures, "V-information, one example, logistic": logistic}.items():
        print(f"{title}\n{table}\n")
    for attack, areas in attacks.items():
        for measure, table in measures.items():
            correlation = spearmanr(areas.value, table.value).statistic
            print(f"rank correlation over {len(table)} layers, {attack} with {measure}: {correlation:.2f}")

    save({**attacks, **measures}, options.out / "attack_property.png")
    print(f"The picture is {options.out / 'attack_property.png'}.")


def save(tables: dict[str, LayerTable], path: Path) -> None:
    """A panel for each table; in panels of AUC, a line marks guessing."""
    figure = Figure(figsize=(9, 6), layout="constrained")
    for axis, (title, table) in zip(figure.subplots(2, 2).flat, tables.items(), strict=True):
        table.plot(axis)
        axis.set_title(title, fontsize=10)
        if title.startswith("AUC"):
            axis.axhline(0.5, color="0.3", linestyle=":", linewidth=1)
            axis.set_ylim(0, 1.05)
    figure.savefig(path, dpi=80)


if __name__ == "__main__":
    main()
