"""Property inference from gradients: what a client's updates reveal about its data (Melis et al. 2019; Mo et al. 2021).

Two clients train together by FedSGD: in every round each sends the mean gradient of one batch. One of them is the
attacker. It subtracts its own gradient from what the server sends, which leaves the other's. From gradients of its own
data, with and without the property, at the same weights, it learns to tell whether a batch has the property.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from torchfil.attacks.base import make_generator
from torchfil.attribution.exposure import auroc
from torchfil.attribution.layers import LayerTable, layer_gradients
from torchfil.fisher.gradients import LossFunction
from torchfil.utils.errors import installed_by, require
from torchfil.utils.text import with_progress

Attacker = Literal["logistic", "forest"]


@dataclass(frozen=True)
class Client:
    """One client's data: inputs [n, …], targets [n] and the property, [n] booleans, which the task does not use."""

    inputs: Tensor
    targets: Tensor
    property: Tensor

    def __post_init__(self) -> None:
        sizes = [len(self.inputs), len(self.targets), len(self.property)]
        require(len(set(sizes)) == 1, f"inputs, targets and property have {sizes} entries; give the same number")
        both = 0 < int(self.property.sum()) < len(self.property)
        require(both, "all examples have the property, or none has; a client needs both kinds")

    def to(self, device: torch.device | str) -> Client:
        """The same client with its data on a device."""
        return Client(self.inputs.to(device), self.targets.to(device), self.property.to(device))

    def batch(self, size: int, with_property: bool, source: torch.Generator) -> tuple[Tensor, Tensor]:
        """Inputs and targets of ``size`` examples, all with the property or all without, drawn with replacement."""
        rows = (self.property.bool() == with_property).nonzero().squeeze(1)
        drawn = rows[torch.randint(len(rows), (size,), generator=source, device=rows.device)]
        return self.inputs[drawn], self.targets[drawn]


@dataclass(frozen=True)
class FederatedGradients:
    """By layer, the mean gradients of batches, [batches, N_l], and whether each batch has the property, [batches].

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
    seed: int | None = None,
    generator: torch.Generator | None = None,
    progress: bool = False,
) -> FederatedGradients:
    """Train a network by FedSGD with two clients, in place, and note what the attacker can see.

    In each round, a fair coin decides whether the victim's batch has the property. The attacker's own update comes from
    a batch of random examples, and the server takes the mean of both. The attacker removes its own part and computes
    gradients of ``own_batches`` own batches with the property and as many without.

    Args:
        model: Trained in place.
        loss_fn: ``loss_fn(outputs, targets)``.
        victim: The client that is attacked.
        attacker: The client that attacks.
        rounds: The rounds of FedSGD; each gives one observed gradient.
        batch_size: The batch size of both clients.
        lr: The server's learning rate.
        own_batches: The attacker's batches of each kind in each round.
        seed: The seed of the batches and coins; or
        generator: Their source.
        progress: Whether to show a bar.
    """
    source = make_generator(generator, seed, victim.property.device)
    known, observed = list[dict[str, Tensor]](), list[dict[str, Tensor]]()
    kinds = [False] * own_batches + [True] * own_batches
    coins = torch.rand(rounds, generator=source, device=victim.property.device) < 0.5
    coins[:2] = torch.tensor([False, True], device=coins.device)  # both kinds occur

    def mean_gradient(x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return layer_gradients(model, loss_fn, x, y, batch=len(x))

    for number in with_progress(range(rounds), progress, "rounds", rounds):
        sent = mean_gradient(*victim.batch(batch_size, bool(coins[number]), source))
        known += [mean_gradient(*attacker.batch(batch_size, kind, source)) for kind in kinds]
        rows = torch.randint(len(attacker.targets), (batch_size,), generator=source, device=coins.device)
        own = mean_gradient(attacker.inputs[rows], attacker.targets[rows])
        server = {layer: (sent[layer] + own[layer]) / 2 for layer in sent}
        observed.append({layer: 2 * server[layer] - own[layer] for layer in server})
        _descend(model, server, lr)
    return FederatedGradients(_stacked(known), torch.tensor(kinds).repeat(rounds), _stacked(observed), coins.cpu())


def property_inference(
    seen: FederatedGradients, *, attacker: Attacker = "forest", bootstrap: int = 200, seed: int = 0
) -> LayerTable:
    """AUC of an attacker who sees one layer's gradient, for each layer, with a 95 % bootstrap interval over batches.

    Threat model: the attacker takes part in FedSGD with one other client, sees that client's gradient of a layer and
    has its own data with known property. An AUC of 0.5 is guessing; 1 means that every batch is right. Intervals are
    over batches of these clients. With few examples per client (100), whose own differences show in a gradient, the
    interval for an unrelated property missed 0.5 in a quarter to a half of the repetitions; with 3,000 in none to a
    tenth.

    Args:
        seen: From :func:`federated_gradients`.
        attacker: "forest" (200 trees) or "logistic" (ridge); features are standardised.
        bootstrap: The number of resamples of the observed batches.
        seed: The seed of the forest and the resamples.

    Raises:
        ImportError: scikit-learn is not installed.
    """
    truth = seen.observed_property.cpu().numpy().astype(bool)
    draws = np.random.default_rng(seed).integers(len(truth), size=(bootstrap, len(truth)))
    draws = np.stack([row for row in draws if 0 < truth[row].sum() < len(truth)])
    values, resampled = [], []
    for layer in seen.known:
        scores = _scores(seen.known[layer], seen.known_property, seen.observed[layer], attacker, seed)
        values.append(auroc(scores, truth).value)
        resampled.append([auroc(scores[row], truth[row]).value for row in draws])
    low, high = np.quantile(resampled, [0.025, 0.975], axis=1)
    error = np.std(resampled, axis=1, ddof=1)
    return LayerTable(tuple(seen.known), np.array(values), low, high, error, f"AUC ({attacker})", "AUC")


def _scores(known: Tensor, labels: Tensor, observed: Tensor, attacker: Attacker, seed: int) -> np.ndarray:
    with installed_by("glm", "property inference needs scikit-learn"):
        from sklearn.ensemble import RandomForestClassifier
        from sklearn.linear_model import LogisticRegression
        from sklearn.pipeline import make_pipeline
        from sklearn.preprocessing import StandardScaler
    require(attacker in ("forest", "logistic"), f"attacker={attacker!r} must be 'forest' or 'logistic'")
    forest, ridge = RandomForestClassifier(200, random_state=seed), LogisticRegression(C=0.1, max_iter=500)
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
