"""grad_sample_mode="ghost": called as Opacus's ghost clipping is, releases what it releases, and is accounted for."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from opacus import PrivacyEngine
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import Tensor, nn

from tests.cases import DEVICE, relative_error
from tests.engine.loops import SIGMA, C, data, loader, network
from torchfil import FILPrivacyEngine
from torchfil.engine.losses import GhostCriterion


def make(engine: Any, module: nn.Module, dataset: Any, **options: Any) -> Any:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.3, momentum=0.5)
    given = {
        "noise_multiplier": SIGMA,
        "max_grad_norm": C / 4,
        "grad_sample_mode": "ghost",
        "criterion": nn.CrossEntropyLoss(),
        "noise_generator": torch.Generator(DEVICE).manual_seed(7),
    }
    return engine.make_private(module=module, optimizer=optimizer, data_loader=loader(dataset), **{**given, **options})


def train(made: Any, steps: int = 6, physical: int | None = None) -> list[float]:
    model, optimizer, criterion, batches = made
    losses: list[float] = []

    def one_pass(batches: Any) -> None:
        for x, y in batches:
            if len(losses) == steps:
                return
            optimizer.zero_grad()
            loss = criterion(model(x.to(DEVICE)), y.to(DEVICE))
            loss.backward()
            optimizer.step()
            losses.append(loss.item())

    if physical is None:
        one_pass(batches)
    else:
        with BatchMemoryManager(data_loader=batches, max_physical_batch_size=physical, optimizer=optimizer) as cut:
            one_pass(cut)
    return losses


@pytest.mark.parametrize(("physical", "reduction"), [(None, "mean"), (3, "mean"), (None, "sum")])
def test_it_trains_as_opacus_does(physical: int | None, reduction: str) -> None:
    """The same noise, batches and weights; Opacus adds 1e-6 to the norms that it divides by."""
    runs = []
    for engine in (PrivacyEngine(), FILPrivacyEngine()):
        module = network()
        made = make(
            engine, module, data(), loss_reduction=reduction, criterion=nn.CrossEntropyLoss(reduction=reduction)
        )
        losses = train(made, physical=physical)
        runs.append((torch.cat([p.detach().flatten() for p in module.parameters()]), losses, engine))
    (theirs, their_losses, opacus), (ours, our_losses, engine) = runs
    assert relative_error(ours, theirs) < 1e-5
    assert their_losses == pytest.approx(our_losses, rel=1e-5)
    assert engine.accountant.history == opacus.accountant.history
    assert engine.ledger is not None
    assert engine.ledger.steps == engine.accountant.history[-1][2]


def test_it_is_auto_mode_with_the_hard_clip() -> None:
    """Sums, ledger and weights are those of "auto" with clip="hard" on the same loop."""
    engines, modules = [FILPrivacyEngine(), FILPrivacyEngine()], [network(), network()]
    train(make(engines[0], modules[0], data()))
    model, optimizer, batches = make(engines[1], modules[1], data(), grad_sample_mode="auto", clip="hard")
    train((model, optimizer, nn.CrossEntropyLoss(), batches))
    for ours, theirs in zip(modules[0].parameters(), modules[1].parameters(), strict=True):
        assert torch.equal(ours, theirs)
    ours, theirs = (engine.ledger.sums["squared_norm"] for engine in engines if engine.ledger is not None)
    assert torch.equal(ours, theirs)


def test_another_clip_may_be_given() -> None:
    engine = FILPrivacyEngine()
    optimizer = make(engine, network(), data(), clip="smooth")[1]
    assert optimizer.clip.name == "smooth"
    assert make(FILPrivacyEngine(), network(), data())[1].clip.name == "hard"


def test_with_epsilon_gives_four_values_too() -> None:
    module = network()
    made = FILPrivacyEngine().make_private_with_epsilon(
        module=module,
        optimizer=torch.optim.SGD(module.parameters(), lr=0.1),
        data_loader=loader(data()),
        target_epsilon=5.0,
        target_delta=1e-5,
        epochs=2,
        max_grad_norm=C,
        grad_sample_mode="ghost",
    )
    assert len(made) == 4
    assert len(train(made, 2)) == 2


def test_hooks_that_leave_the_model_alone() -> None:
    """wrap_model=False: the loop goes on with its own model."""
    module = network()
    engine = FILPrivacyEngine()
    hooks, optimizer, criterion, batches = make(engine, module, data(), wrap_model=False)
    train((module, optimizer, criterion, batches), 3)
    assert engine.ledger is not None
    assert engine.ledger.steps == 3
    hooks.cleanup()


def test_train_step_takes_the_same_criterion() -> None:
    engines, modules = [FILPrivacyEngine(), FILPrivacyEngine()], [network(), network()]
    train(make(engines[0], modules[0], data()), 3)
    *_, batches = make(engines[1], modules[1], data())
    for _, (x, y) in zip(range(3), batches, strict=False):
        engines[1].train_step(x, y)
    for ours, theirs in zip(modules[0].parameters(), modules[1].parameters(), strict=True):
        assert relative_error(ours.detach(), theirs.detach()) < 1e-12


class Tagger(nn.Module):
    """A class for every token, [batch, length, classes]."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(3, 4), nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.outer(torch.tanh(self.inner(x)))
        return result


def test_losses_by_token_as_opacus_calls_them() -> None:
    """``criterion(logits.view(-1, V), targets.view(-1), shape=logits.shape)``, with ignored targets: an example's
    loss is the mean over those of its tokens that count."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, 6, 3, generator=generator, dtype=torch.float64)
    y = torch.randint(5, (40, 6), generator=generator)
    y[torch.rand(40, 6, generator=generator) < 0.3] = -100
    dataset = torch.utils.data.TensorDataset(x, y)
    torch.manual_seed(0)
    first = Tagger().double().to(DEVICE)
    found = []
    for engine in (PrivacyEngine(), FILPrivacyEngine()):
        module = copy.deepcopy(first)
        model, optimizer, criterion, batches = make(engine, module, dataset)
        for _, (inputs, targets) in zip(range(4), batches, strict=False):
            optimizer.zero_grad()
            logits = model(inputs.to(DEVICE))
            criterion(logits.view(-1, 5), targets.to(DEVICE).view(-1), shape=logits.shape).backward()
            optimizer.step()
        found.append(torch.cat([p.detach().flatten() for p in module.parameters()]))
    assert relative_error(found[1], found[0]) < 1e-5


class TestCriterion:
    def test_class_weights_do_not_mix_examples(self) -> None:
        """As Opacus has it: the plain mean of weighted losses, not divided by the batch's weights."""
        weight = torch.tensor([1.0, 3.0])
        outputs, targets = torch.randn(4, 2), torch.tensor([0, 1, 1, 0])
        loss = GhostCriterion(nn.CrossEntropyLoss(weight=weight), "mean")(outputs, targets)
        by_example = nn.CrossEntropyLoss(weight=weight, reduction="none")(outputs, targets)
        assert torch.allclose(loss, by_example.mean())

    def test_the_given_criterion_stays_as_it_is(self) -> None:
        criterion = nn.CrossEntropyLoss()
        GhostCriterion(criterion, "mean")(torch.randn(4, 2), torch.tensor([0, 1, 1, 0]))
        assert criterion.reduction == "mean"

    def test_a_function_of_one_number(self) -> None:
        loss = GhostCriterion(nn.functional.mse_loss, "mean")(torch.ones(3, 2), torch.zeros(3, 2))
        assert loss.item() == 1

    def test_another_reduction_is_refused(self) -> None:
        with pytest.raises(ValueError, match="pass loss_reduction='sum', or a criterion with reduction='mean'"):
            GhostCriterion(nn.CrossEntropyLoss(reduction="sum"), "mean")


def test_several_devices_are_refused() -> None:
    with pytest.raises(ValueError, match="'auto' or 'ghost', which support sharded weights as well"):
        make(FILPrivacyEngine(), network(), data(), grad_sample_mode="ghost_fsdp")
