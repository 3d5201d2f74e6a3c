"""train_step against the loop: the same weights, the same ledger, the same ε."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from benchmarks import zoo
from tests.cases import DEVICE, grouped
from tests.engine.loops import SIGMA, C, assert_same_run, data, loader, network, tokens
from torchfil import FILPrivacyEngine

LOSS = nn.CrossEntropyLoss()


def trained(
    whole: bool, dataset: Any, module: nn.Module, *, steps: int = 6, batch_size: int = 8, **options: Any
) -> Any:
    """The engine, the module and the losses after so many steps, with fixed batches, noise and probes."""
    module = copy.deepcopy(module).to(DEVICE)
    engine = FILPrivacyEngine()
    options = {"noise_multiplier": SIGMA, "max_grad_norm": C, "seed": 3, "criterion": LOSS, **options}
    optimizer: Any = torch.optim.SGD(module.parameters(), lr=0.3, momentum=0.5)
    noise = torch.Generator(device=DEVICE).manual_seed(5)
    model, optimizer, private = engine.make_private(
        module, optimizer, loader(dataset, batch_size), **grouped(noise_generator=noise, **options)
    )
    losses: list[Tensor] = []
    while len(losses) < steps:
        for x, y in private:
            if whole:
                losses.append(engine.train_step(x, y))
            else:
                optimizer.zero_grad()
                loss = options["criterion"](model(x.to(DEVICE)), y.to(DEVICE))
                loss.backward()
                optimizer.step()
                losses.append(loss.detach())
            if len(losses) == steps:
                break
    return engine, module, torch.stack(losses)


def compare(dataset: Any, module: nn.Module, tolerance: float = 1e-6, **options: Any) -> FILPrivacyEngine:
    loop, loop_module, loop_losses = trained(False, dataset, module, **options)
    whole, whole_module, whole_losses = trained(True, dataset, module, **options)
    assert_same_run((whole, whole_module), (loop, loop_module), tolerance)
    assert torch.allclose(whole_losses, loop_losses, rtol=tolerance, atol=tolerance, equal_nan=True)
    return whole


def test_the_same_run() -> None:
    compare(data(93), network(), track=("diagonal", "plis"), num_probes=2)


@pytest.mark.parametrize(
    "options",
    [
        {"poisson_sampling": False},
        {"amplification": "none"},
        {"fil_rate": 0.5},
        {"max_memory": 1},
        {"clip": "hard"},
        {"num_probes": 1},
        {"criterion": nn.CrossEntropyLoss(reduction="sum"), "loss_reduction": "sum"},
        {"estimator": "exact"},
        {"track": ("sketch",)},
    ],
    ids=str,
)
def test_the_same_run_with(options: dict[str, Any]) -> None:
    compare(data(40), network(), **options)


def test_empty_batches() -> None:
    dataset = data(12)
    engine = compare(dataset, network(), batch_size=1, steps=20)
    assert engine.ledger is not None
    assert engine.ledger.steps == 20


def images(n: int = 12, classes: int = 3, size: int = 28, channels: int = 1) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(n, channels, size, size, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.randint(classes, (n,), generator=generator))


@pytest.mark.parametrize(
    "model",
    [
        lambda: (zoo.mnist_cnn(3), images()),
        lambda: (zoo.small_alexnet(3, 1, 8), images(size=8)),
        lambda: (zoo.vit_tiny(3, 1, 8, width=8, depth=1, heads=2), images(size=8)),
    ],
    ids=["mnist_cnn", "small_alexnet", "vit_tiny"],
)
def test_networks(model: Any) -> None:
    torch.manual_seed(0)
    module, dataset = model()
    compare(dataset, module.double(), steps=3, batch_size=4, num_probes=2)


def test_tokens() -> None:
    module, dataset, private = tokens()
    compare(dataset, module, steps=3, batch_size=4, private=private)


def test_frozen_layers_and_models_that_one_pass_does_not_fit() -> None:
    torch.manual_seed(0)
    frozen = network()
    frozen[0].weight.requires_grad_(False)
    compare(data(24), frozen, steps=4)

    class Folded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x[:, None].reshape(-1, 5)) if x.ndim == 2 else self.layer(x)

    compare(data(24), nn.Sequential(nn.Linear(5, 5), nn.Tanh(), Folded()).double(), steps=4)


def test_single_precision() -> None:
    dataset = data(40)
    single = TensorDataset(dataset.tensors[0].float(), dataset.tensors[1])
    compare(single, network().float(), tolerance=1e-3)


class TestRefusals:
    def test_the_loss_must_be_known(self) -> None:
        with pytest.raises(RuntimeError, match="pass criterion= to make_private"):
            trained(True, data(16), network(), criterion=None)

    def test_a_batch_that_is_not_the_loaders(self) -> None:
        engine, module, _ = trained(True, data(16), network(), steps=2)
        before = copy.deepcopy(module.state_dict())
        sums = {k: v.clone() for k, v in engine.ledger.sums.items()}
        epsilon = engine.get_epsilon(1e-5)
        with pytest.raises(RuntimeError, match="per-example gradients"):
            engine.train_step(torch.randn(3, 5).double(), torch.zeros(3, dtype=torch.long))
        assert all(torch.equal(v, before[k]) for k, v in module.state_dict().items())
        assert all(torch.equal(v, sums[k]) for k, v in engine.ledger.sums.items())
        assert engine.get_epsilon(1e-5) == epsilon

    def test_pausing(self) -> None:
        engine, _, _ = trained(True, data(16), network(), steps=2)
        with pytest.warns(UserWarning, match="paused"), engine.paused():
            for x, y in engine._training.loader:
                engine.train_step(x, y)
                break
        assert int(engine.ledger.sums["missed"].sum()) == len(x)
