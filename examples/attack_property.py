"""Which layer reveals a secret? Property inference in federated learning, with a property planted
into MNIST.

Two clients train a network by FedSGD to predict whether a digit is even: in every round each sends
the mean gradient of one batch. One of them is the attacker (Melis et al. 2019; Mo et al. 2021). It
subtracts its own gradient from what the server sends, which leaves the other's; from gradients of
its own data, with and without the property, at the same weights, it learns to tell whether a batch
has the property. Half of the digits have a grey bar, a column of pixels that is irrelevant to the
task. One client infers from the other's gradients, layer by layer, whether a batch has bars; the
tables compare the AUC with the layer's sensitivity and V-information.

Without the data's files, it runs on a small stand-in and says so (examples/README.md).

TORCHFIL_DATA=/path/to/data python examples/attack_property.py --out out
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from matplotlib.figure import Figure
from networks import small_alexnet
from paper_data import PaperData
from scipy.stats import spearmanr
from sklearn.ensemble import RandomForestClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import Tensor, nn

from torchfil.attribution import LayerTable, jacobian_sensitivity, layer_gradients, v_information
from torchfil.attribution.exposure import auroc
from torchfil.fisher.gradients import LossFunction

Attacker = Literal["logistic", "forest"]


@dataclass(frozen=True)
class Client:
    """One client's data: inputs [n, …], targets [n] and the property, [n] booleans, which the task
    does not use.
    """

    inputs: Tensor
    targets: Tensor
    property: Tensor

    def to(self, device: torch.device | str) -> Client:
        """The same client with its data on a device."""
        return Client(self.inputs.to(device), self.targets.to(device), self.property.to(device))

    def batch(
        self, size: int, with_property: bool, source: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """Inputs and targets of ``size`` examples, all with the property or all without, drawn with
        replacement.
        """
        rows = (self.property.bool() == with_property).nonzero().squeeze(1)
        drawn = rows[torch.randint(len(rows), (size,), generator=source, device=rows.device)]
        return self.inputs[drawn], self.targets[drawn]


@dataclass(frozen=True)
class FederatedGradients:
    """By layer, the mean gradients of batches, [batches, N_l], and whether each batch has the
    property, [batches].

    Attributes:
        known: The attacker's own gradients, at the weights of each round.
        known_property: Their labels.
        observed: The victim's gradients, as the attacker sees them.
        observed_property: The truth about them.
    """

    known: dict[str, Tensor]
    known_property: Tensor
    observed: dict[str, Tensor]
    observed_property: Tensor


def federated_gradients(
    model: nn.Module,
    loss_fn: LossFunction,
    victim: Client,
    attacker: Client,
    *,
    rounds: int,
    batch_size: int = 32,
    lr: float = 0.01,
    own_batches: int = 2,
    seed: int = 0,
) -> FederatedGradients:
    """Train a network by FedSGD with two clients, in place, and note what the attacker can see.

    In each round, a fair coin decides whether the victim's batch has the property. The attacker's
    own update comes from a batch of random examples, and the server takes the mean of both. The
    attacker removes its own part and computes gradients of ``own_batches`` own batches with the
    property and as many without.

    Args:
        model: Trained in place.
        loss_fn: ``loss_fn(outputs, targets)``.
        victim: The client that is attacked.
        attacker: The client that attacks.
        rounds: The rounds of FedSGD; each gives one observed gradient.
        batch_size: The batch size of both clients.
        lr: The server's learning rate.
        own_batches: The attacker's batches of each kind in each round.
        seed: The seed of the batches and coins.
    """
    source = torch.Generator(victim.property.device).manual_seed(seed)
    known, observed = list[dict[str, Tensor]](), list[dict[str, Tensor]]()
    kinds = [False] * own_batches + [True] * own_batches
    coins = torch.rand(rounds, generator=source, device=victim.property.device) < 0.5
    coins[:2] = torch.tensor([False, True], device=coins.device)  # both kinds occur

    def mean_gradient(x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return layer_gradients(model, loss_fn, x, y, batch=len(x))

    for number in range(rounds):
        sent = mean_gradient(*victim.batch(batch_size, bool(coins[number]), source))
        known += [mean_gradient(*attacker.batch(batch_size, kind, source)) for kind in kinds]
        rows = torch.randint(
            len(attacker.targets), (batch_size,), generator=source, device=coins.device
        )
        own = mean_gradient(attacker.inputs[rows], attacker.targets[rows])
        server = {layer: (sent[layer] + own[layer]) / 2 for layer in sent}
        observed.append({layer: 2 * server[layer] - own[layer] for layer in server})
        _descend(model, server, lr)
    return FederatedGradients(
        _stacked(known), torch.tensor(kinds).repeat(rounds), _stacked(observed), coins.cpu()
    )


def property_inference(
    seen: FederatedGradients, *, attacker: Attacker = "forest", bootstrap: int = 200, seed: int = 0
) -> LayerTable:
    """AUC of an attacker who sees one layer's gradient, for each layer, with a 95 % bootstrap
    interval over batches.

    Threat model: the attacker takes part in FedSGD with one other client, sees that client's
    gradient of a layer and has its own data with known property. An AUC of 0.5 is guessing; 1 means
    that every batch is right. Intervals are over batches of these clients. With few examples per
    client (100), whose own differences show in a gradient, the interval for an unrelated property
    missed 0.5 in a quarter to a half of the repetitions; with 3,000 in none to a tenth.

    Args:
        seen: From :func:`federated_gradients`.
        attacker: "forest" (200 trees) or "logistic" (ridge); features are standardised.
        bootstrap: The number of resamples of the observed batches.
        seed: The seed of the forest and the resamples.
    """
    truth = seen.observed_property.cpu().numpy().astype(bool)
    draws = np.random.default_rng(seed).integers(len(truth), size=(bootstrap, len(truth)))
    draws = np.stack([row for row in draws if 0 < truth[row].sum() < len(truth)])
    values, resampled = [], []
    for layer in seen.known:
        scores = _scores(
            seen.known[layer], seen.known_property, seen.observed[layer], attacker, seed
        )
        values.append(auroc(scores, truth).value)
        resampled.append([auroc(scores[row], truth[row]).value for row in draws])
    low, high = np.quantile(resampled, [0.025, 0.975], axis=1)
    error = np.std(resampled, axis=1, ddof=1)
    return LayerTable(
        tuple(seen.known), np.array(values), low, high, error, f"AUC ({attacker})", "AUC"
    )


def _scores(
    known: Tensor, labels: Tensor, observed: Tensor, attacker: Attacker, seed: int
) -> np.ndarray:
    forest, ridge = (
        RandomForestClassifier(200, random_state=seed),
        LogisticRegression(C=0.1, max_iter=500),
    )
    pipeline = make_pipeline(StandardScaler(), forest if attacker == "forest" else ridge)
    fitted = pipeline.fit(known.cpu().numpy(), labels.cpu().numpy())
    return np.asarray(fitted.predict_proba(observed.cpu().numpy())[:, 1])


def _stacked(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {layer: torch.cat([row[layer] for row in rows]) for layer in rows[0]}


def _descend(model: nn.Module, gradients: dict[str, Tensor], lr: float) -> None:
    """θ ← θ − lr g, with gradients by layer [1, N_l] in the order of the layer's parameters."""
    left = {layer: gradient[0] for layer, gradient in gradients.items()}
    with torch.no_grad():
        for name, value in model.named_parameters():
            if value.requires_grad:
                layer = name.rpartition(".")[0]
                piece, left[layer] = left[layer].tensor_split([value.numel()])
                value.sub_(piece.reshape(value.shape), alpha=lr)


def planted(images: torch.Tensor, digits: torch.Tensor, strength: float, seed: int) -> Client:
    """The task is even or odd; a random half of the images has a bar on the left."""
    images, bars = (
        images.clone(),
        torch.rand(len(images), generator=torch.Generator().manual_seed(seed)) < 0.5,
    )
    images[bars, :, 4:24, 2:4] = (images[bars, :, 4:24, 2:4] + strength).clamp(max=1)
    return Client(images, digits % 2, bars)


def main() -> None:
    """Train, attack, print the tables and save the picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--strength", type=float, default=0.5)
    parser.add_argument("--examples", type=int, default=1000, help="examples of each client")
    parser.add_argument(
        "--measured", type=int, default=400, help="the victim's examples for V-information"
    )
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
    )

    few = options.measured
    single = layer_gradients(model, loss, victim.inputs[:few], victim.targets[:few])
    attacks: dict[str, LayerTable] = {
        "AUC, random forest": property_inference(seen, attacker="forest"),
        "AUC, logistic": property_inference(seen, attacker="logistic"),
    }
    measures: dict[str, LayerTable] = {
        "sensitivity to the target": jacobian_sensitivity(
            model, loss, victim.inputs[:60], victim.targets[:60]
        ),
        "V-information, one example, forest": v_information(
            single, victim.property[:few], "forest"
        ),
    }
    logistic = v_information(single, victim.property[:few], "logistic")
    for title, table in {
        **attacks,
        **measures,
        "V-information, one example, logistic": logistic,
    }.items():
        print(f"{title}\n{table}\n")
    for attack, areas in attacks.items():
        for measure, table in measures.items():
            correlation = spearmanr(areas.value, table.value).statistic
            print(
                f"rank correlation over {len(table)} layers, {attack} with {measure}: "
                f"{correlation:.2f}"
            )

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
