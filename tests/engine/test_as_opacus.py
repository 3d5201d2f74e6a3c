"""Ghost clipping, clipping="per_layer" and seeded noise: called as in Opacus, they release what it releases.

Their ledgers are in test_equivalence.py.
"""

from __future__ import annotations

import copy
import logging
import math
from typing import Any

import pytest
import torch
from opacus import PrivacyEngine
from opacus.optimizers import DPOptimizer
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn
from torch.utils.data import TensorDataset

from tests.cases import DEVICE, relative_error
from tests.engine.brute_force import Pass, clipped_and_jacobian, random_state
from tests.engine.loops import SIGMA, C, data, loader, network
from tests.engine.ways import LOSS, start, trained, weights_of
from torchfil import FILPrivacyEngine
from torchfil.clipping import get_clip
from torchfil.engine.losses import GhostCriterion
from torchfil.engine.optimizer import FILOptimizer
from torchfil.utils.noise import Seeded


def make(engine: Any, module: nn.Module, dataset: Any = None, **options: Any) -> Any:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.3, momentum=0.5)
    noise = torch.Generator(DEVICE).manual_seed(7)
    given = {"noise_multiplier": SIGMA, "max_grad_norm": C / 4, "grad_sample_mode": "ghost", "criterion": LOSS}
    given |= {"noise_generator": noise} | options
    return engine.make_private(module=module, optimizer=optimizer, data_loader=loader(dataset or data()), **given)


def train(made: Any, steps: int = 6) -> list[float]:
    model, optimizer, criterion, batches = made
    losses: list[float] = []
    for _, (x, y) in zip(range(steps), batches, strict=False):
        optimizer.zero_grad()
        loss = criterion(model(x.to(DEVICE)), y.to(DEVICE))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(("physical", "reduction"), [(None, "mean"), (3, "mean"), (None, "sum")])
def test_ghost_clipping_trains_as_opacus_does(physical: int | None, reduction: str) -> None:
    """The same noise, batches and weights; Opacus adds 1e-6 to the norms that it divides by."""
    runs = []
    for engine in (PrivacyEngine(), FILPrivacyEngine()):
        module = network()
        criterion = nn.CrossEntropyLoss(reduction=reduction)
        model, optimizer, loss, batches = make(engine, module, loss_reduction=reduction, criterion=criterion)
        if physical is None:
            losses = train((model, optimizer, loss, batches))
        else:
            limits = {"data_loader": batches, "max_physical_batch_size": physical, "optimizer": optimizer}
            with BatchMemoryManager(**limits) as cut:
                losses = train((model, optimizer, loss, cut))
        runs.append((weights_of(module), losses, engine))
    (theirs, their_losses, opacus), (ours, our_losses, engine) = runs
    assert relative_error(ours, theirs) < 1e-5
    assert their_losses == pytest.approx(our_losses, rel=1e-5)
    assert engine.accountant.history == opacus.accountant.history
    assert engine.ledger.steps == engine.accountant.history[-1][2]


def test_the_clip_of_ghost_clipping_is_hard_unless_another_is_given() -> None:
    assert make(FILPrivacyEngine(), network(), clip="smooth")[1].clip.name == "smooth"
    assert make(FILPrivacyEngine(), network())[1].clip.name == "hard"
    with pytest.raises(ValueError, match="'ghost'"):
        make(FILPrivacyEngine(), network(), grad_sample_mode="ghost_fsdp")


def test_with_epsilon_and_without_wrapping() -> None:
    """Four values as well; wrap_model=False: the loop goes on with its own model."""
    module, engine = network(), FILPrivacyEngine()
    target = {"target_epsilon": 5.0, "target_delta": 1e-5, "epochs": 2, "epsilon_tolerance": 1.0}
    parts = {"optimizer": torch.optim.SGD(module.parameters(), lr=0.1), "data_loader": loader(data())}
    hooks, *made = engine.make_private_with_epsilon(
        module=module, **parts, **target, max_grad_norm=C, grad_sample_mode="ghost", wrap_model=False
    )
    assert len(train((module, *made), 2)) == 2
    assert engine.ledger.steps == 2
    hooks.cleanup()


def test_losses_by_token_as_opacus_calls_them() -> None:
    """``criterion(logits.view(-1, V), targets.view(-1), shape=logits.shape)``, with ignored targets: an example's
    loss is the mean over those of its tokens that count."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, 6, 3, generator=generator, dtype=torch.float64)
    y = torch.randint(5, (40, 6), generator=generator)
    y[torch.rand(40, 6, generator=generator) < 0.3] = -100
    first, found = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 5)).double().to(DEVICE), []
    for engine in (PrivacyEngine(), FILPrivacyEngine()):
        module = copy.deepcopy(first)
        model, optimizer, criterion, batches = make(engine, module, TensorDataset(x, y))

        def by_token(logits: Any, targets: Any, criterion: Any = criterion) -> Any:
            return criterion(logits.view(-1, 5), targets.view(-1), shape=logits.shape)

        train((model, optimizer, by_token, batches), 4)
        found.append(weights_of(module))
    assert relative_error(found[1], found[0]) < 1e-5


def test_the_criterion_of_ghost_clipping() -> None:
    """As Opacus has it: the plain mean of weighted losses; what was given stays as it is."""
    given = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 3.0]))
    outputs, targets = torch.randn(4, 2), torch.tensor([0, 1, 1, 0])
    by_example = nn.CrossEntropyLoss(weight=given.weight, reduction="none")(outputs, targets)
    assert torch.allclose(GhostCriterion(given, "mean")(outputs, targets), by_example.mean())
    assert given.reduction == "mean"
    assert GhostCriterion(nn.functional.mse_loss, "mean")(torch.ones(3, 2), torch.zeros(3, 2)).item() == 1
    with pytest.raises(ValueError, match="loss_reduction"):
        GhostCriterion(nn.CrossEntropyLoss(reduction="sum"), "mean")


LIMITS = [0.2, 0.05, 0.3, 0.1]
NORM = math.hypot(*LIMITS)


def make_per_layer(engine: Any, module: nn.Module, dataset: Any = None, **options: Any) -> Any:
    given = {"noise_multiplier": SIGMA, "max_grad_norm": LIMITS, "clipping": "per_layer"} | options
    optimizer = torch.optim.SGD(module.parameters(), lr=0.3)
    return engine.make_private(module=module, optimizer=optimizer, data_loader=loader(dataset or data()), **given)


@pytest.mark.parametrize("mode", ["auto", "hooks", "functorch"])
def test_per_layer_clipping_trains_as_opacus_does(mode: str) -> None:
    """The hard clip of every parameter, noise of σ‖C‖; Opacus adds 1e-6 to the norms that it divides by."""
    found = []
    ours: dict[str, Any] = {"clip": "hard", "grad_sample_mode": mode}
    for engine, options in ((PrivacyEngine(accountant="rdp"), {}), (FILPrivacyEngine(), ours)):
        module = network()
        options["noise_generator"] = torch.Generator(DEVICE).manual_seed(7)
        trained(engine, *make_per_layer(engine, module, **options))
        found.append((weights_of(module), engine.get_epsilon(1e-5)))
    assert relative_error(found[1][0], found[0][0]) < 2e-5
    assert found[1][1] == found[0][1]


def test_looks_are_at_what_is_released(caplog: pytest.LogCaptureFixture) -> None:
    """PLIS, ∂(‖g̃‖/s)²/∂z at the present weights, and ‖g̃‖/‖C‖ of a refresh; the recorded pass has no such norms."""
    module, dataset, weights = network(), data(12), torch.linspace(0.3, 1, 12).double()
    options = {"max_grad_norm": LIMITS, "clipping": "per_layer", "noise_multiplier": SIGMA, "clip_weights": weights}
    with caplog.at_level(logging.INFO, logger="torchfil"):
        parts = start(module, dataset, "auto", lr=0.3, **options)
        engine = trained(*parts, steps=1)
    assert "mapped over examples" in caplog.text
    x, y = (part.to(DEVICE) for part in dataset.tensors)
    now = Pass(random_state(), module.state_dict(), x, y, list(range(12)))
    g, jacobian = clipped_and_jacobian(network(), now, max_grad_norm=LIMITS, clip_weights=weights)
    slopes = 2 * torch.einsum("bpd,bp->bd", jacobian, g) / (SIGMA * NORM) ** 2
    assert relative_error(engine.plis(range(12)), slopes) < 1e-9
    engine.refresh_norms()
    assert relative_error(engine._training.run.history.ratio, g.norm(dim=1) / NORM) < 1e-5
    assert parts[2].max_grad_norms == pytest.approx(LIMITS)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_grad_norm": 1.0}, "list of 4"),
        ({"max_grad_norm": [1.0, 2.0]}, "list of 4"),
        ({"max_grad_norm": [1.0, 1.0, 1.0, 0.0]}, "positive"),
        ({"clipping": "flat"}, "'per_layer'"),
        ({"clipping": "per_token"}, "'per_layer'"),
    ],
)
def test_thresholds_that_do_not_fit_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_per_layer(FILPrivacyEngine(), network(), **options)


def test_frozen_parameters_have_no_threshold_and_groups_their_own_order() -> None:
    """max_grad_norm goes by the optimizer's trainable parameters, as in Opacus."""
    module = network()
    module[0].bias.requires_grad_(False)
    groups = [{"params": module[2].parameters()}, {"params": module[0].parameters()}]
    options = {"max_grad_norm": [0.3, 0.2, 0.1], "clipping": "per_layer", "optimizer": torch.optim.SGD(groups, lr=0.1)}
    engine = trained(*start(module, data(12), "auto", **options), loss=LOSS)
    total = math.hypot(0.3, 0.2, 0.1)
    expected = {"0.weight": 0.1 / total, "2.weight": 0.3 / total, "2.bias": 0.2 / total}
    assert engine._training.run.options.shares == pytest.approx(expected)


@pytest.mark.parametrize("noise_multiplier", [0.7, 0.0])
def test_seeded_noise_is_opacus_own(noise_multiplier: float) -> None:
    """Number by number, also for sums that do not lie in order."""
    found = []
    seeded = [torch.Generator(DEVICE).manual_seed(3) for _ in range(2)]
    ours = {"clip": get_clip("hard"), "step": None, "names": {}, "noise": Seeded(seeded[1])}
    for kind, options in ((DPOptimizer, {"generator": seeded[0]}), (FILOptimizer, ours)):
        parameters = [nn.Parameter(torch.zeros(3, 4, device=DEVICE)), nn.Parameter(torch.zeros(5, device=DEVICE))]
        optimizer = kind(
            torch.optim.SGD(parameters, lr=0.1),
            noise_multiplier=noise_multiplier,
            max_grad_norm=1.5,
            expected_batch_size=4,
            **options,
        )
        parameters[0].summed_grad = torch.arange(12.0, device=DEVICE).reshape(4, 3).mT  # type: ignore[attr-defined]
        parameters[1].summed_grad = torch.ones(5, device=DEVICE)  # type: ignore[attr-defined]
        optimizer.add_noise()
        found.append([parameter.grad for parameter in parameters])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
