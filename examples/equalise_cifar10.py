"""Sparing the few who are exposed, on photographs: the CIFAR network of Guo et al. 2022 on a part
of CIFAR-10.

``torchfil.equalise`` trains in rounds, each with clip weights from the round before. It prints the
smallest MSE bound of all photographs (it binds unbiased attackers, per pixel value in [0, 1]), how
many photographs were spared, and the test accuracy. The weights depend on the data and are held
fixed in the bounds, as in IRFIL.

Without the data's files, it runs on a small stand-in and says so (examples/README.md).

TORCHFIL_DATA=/path/to/data python examples/equalise_cifar10.py --examples 2000 --device cuda
"""

from __future__ import annotations

import argparse

import torch
from networks import cifar_cnn
from paper_data import PaperData, ResidentDataset
from torch import Tensor, nn
from torch.utils.data import DataLoader

import torchfil
from torchfil import Accounting, FILPrivacyEngine


def balanced(labels: Tensor, count: int) -> Tensor:
    """Rows with equally many of each class, because the file has more of some."""
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    classes = labels.unique()
    return torch.cat([order[labels[order] == label][: count // len(classes)] for label in classes])


def main() -> None:
    """Print the rounds."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--examples", type=int, default=2000)
    parser.add_argument("--test-examples", type=int, default=2000)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch", type=int, default=200)
    parser.add_argument("--lr", type=float, default=1.0)
    parser.add_argument("--noise-multiplier", type=float, default=1.0, help="σ")
    parser.add_argument("--threshold", type=float, default=1.0, help="C")
    parser.add_argument("--share", type=float, default=0.01, help="share of photographs to spare")
    parser.add_argument("--margin", type=float, default=1.5)
    parser.add_argument("--rounds", type=int, default=2, help="largest number of trainings")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    data_sets = PaperData("cifar10")
    if data_sets.made:  # a minute on two cores
        options.examples, options.steps, options.batch = (
            min(options.examples, 300),
            min(options.steps, 20),
            60,
        )
    (images, labels), (test_images, test_labels) = (
        data_sets.cifar10("train"),
        data_sets.cifar10("test"),
    )

    rows, test_rows = (
        balanced(labels, options.examples),
        balanced(test_labels, options.test_examples),
    )
    data = ResidentDataset(images[rows].to(options.device), labels[rows].to(options.device))
    test_images, test_labels = (
        test_images[test_rows].to(options.device),
        test_labels[test_rows].to(options.device),
    )
    calls = 0

    def train(weights: Tensor | None) -> tuple[FILPrivacyEngine, float]:
        nonlocal calls
        calls += 1
        torch.manual_seed(calls)
        model = cifar_cnn().to(options.device)
        engine = FILPrivacyEngine()
        private_model, _, loader = engine.make_private(
            model,
            torch.optim.SGD(model.parameters(), lr=options.lr),
            DataLoader(data, batch_size=options.batch, collate_fn=data.collate),
            noise_multiplier=options.noise_multiplier,
            max_grad_norm=options.threshold,
            criterion=nn.CrossEntropyLoss(),
            clip_weights=weights,
            accounting=Accounting(num_probes=1),
        )
        done = 0
        while done < options.steps:
            for batch in loader:
                engine.train_step(*batch)
                done += 1
                if done == options.steps:
                    break
        with torch.no_grad():
            right = [
                (private_model(x).argmax(dim=1) == y).double()
                for x, y in zip(test_images.split(500), test_labels.split(500), strict=True)
            ]
        return engine, float(torch.cat(right).mean())

    result = torchfil.equalise(
        train,
        share=options.share,
        margin=options.margin,
        confidence=None,
        max_rounds=options.rounds,
        delta=1e-5,
    )
    print(f"{len(rows):,} photographs, {options.steps} steps of {options.batch}\n{result}")


if __name__ == "__main__":
    main()
