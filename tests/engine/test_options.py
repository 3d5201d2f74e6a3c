"""What the options of make_private do, as in Opacus where it has them.

What they refuse is in test_refusals.py.

Ghost clipping, clipping="per_layer" and seeded noise release what Opacus releases; ledgers are in
test_equivalence.py.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from opacus import PrivacyEngine
from opacus.schedulers import ExponentialGradClip, ExponentialNoise
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from tests.cases import DEVICE, relative_error
from tests.engine.brute_force import Truth, make, take
from tests.engine.loops import SIGMA, data, loader, network, physical_batches
from tests.engine.ways import LOSS, start, trained, weights_of
from torchfil import Accounting, FILPrivacyEngine, clipping

GHOST: dict[str, Any] = {"grad_sample_mode": "ghost", "criterion": LOSS}
GHOST |= {"noise_multiplier": SIGMA, "max_grad_norm": 0.2}
SUM = {"loss_reduction": "sum", "criterion": nn.CrossEntropyLoss(reduction="sum")}
LIMITS = [0.2, 0.05, 0.3, 0.1]
PER_LAYER: dict[str, Any] = {
    "noise_multiplier": SIGMA,
    "max_grad_norm": LIMITS,
    "clipping": "per_layer",
}
TARGET: dict[str, Any] = {
    "target_epsilon": 3.0,
    "target_delta": 1e-3,
    "epochs": 2,
    "epsilon_tolerance": 0.2,
}


def private(engine: Any = None, module: Any = None, batches: Any = None, **options: Any) -> Any:
    module = network() if module is None else module
    given = {"optimizer": torch.optim.SGD(module.parameters(), lr=0.3, momentum=0.5), **options}
    given |= {
        "noise_generator": torch.Generator(DEVICE).manual_seed(7),
        "data_loader": batches or loader(data(24)),
    }
    engine = engine or FILPrivacyEngine()
    return (engine.make_private_with_epsilon if "epochs" in options else engine.make_private)(
        module=module, **given
    )


def train(model: Any, optimizer: Any, criterion: Any, batches: Any, steps: int = 6) -> list[float]:
    losses: list[float] = []
    for _, (x, y) in zip(range(steps), batches, strict=False):
        optimizer.zero_grad()
        loss = criterion(model(x.to(DEVICE)), y.to(DEVICE))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def by_token(criterion: Any) -> Any:
    """An example's loss is the mean over those of its tokens that count, as Opacus is called for
    it.
    """
    return lambda logits, targets: criterion(
        logits.view(-1, 5), targets.view(-1), shape=logits.shape
    )


def tokens() -> tuple[nn.Module, TensorDataset]:
    generator = torch.Generator().manual_seed(0)
    x, y = (
        torch.randn(48, 6, 3, generator=generator).double(),
        torch.randint(5, (48, 6), generator=generator),
    )
    y[torch.rand(48, 6, generator=generator) < 0.3] = -100
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 5)).double().to(
        DEVICE
    ), TensorDataset(x, y)


@pytest.mark.parametrize(
    ("options", "ours", "how"),
    [
        (GHOST, {}, None),
        (GHOST, {}, "physical batches"),
        (GHOST, {}, "tokens"),
        ({**GHOST, **SUM}, {}, None),
        *(
            (PER_LAYER, {"clip": "hard", "grad_sample_mode": mode}, None)
            for mode in ("auto", "hooks", "functorch")
        ),
    ],
)
def test_training_is_opacus_own(options: Any, ours: Any, how: str | None) -> None:
    """The same noise, batches, weights and steps.

    Opacus adds 1e-6 to the norms that it divides by.
    """
    runs = []
    for engine, more in ((PrivacyEngine(accountant="rdp"), {}), (FILPrivacyEngine(), ours)):
        module, dataset = tokens() if how == "tokens" else (network(), data(48))
        model, optimizer, *given, batches = private(
            engine, module, loader(dataset), **options, **more
        )
        criterion = given[0] if given else LOSS
        with physical_batches(batches, optimizer, 3 if how == "physical batches" else None) as cut:
            losses = train(
                model, optimizer, by_token(criterion) if how == "tokens" else criterion, cut
            )
        runs.append((weights_of(module), losses, engine))
    (theirs, their_losses, opacus), (ours, our_losses, engine) = runs
    assert relative_error(ours, theirs) < 1e-5
    assert their_losses == pytest.approx(our_losses, rel=1e-5)
    assert engine.accountant.history == opacus.accountant.history
    assert engine.ledger.steps == engine.accountant.history[-1][2]
    assert "clip" not in more or optimizer.max_grad_norms == pytest.approx(LIMITS)


def test_frozen_parameters_have_no_threshold_and_groups_their_own_order() -> None:
    """max_grad_norm goes by the optimizer's trainable parameters, as in Opacus."""
    module = network()
    module[0].bias.requires_grad_(False)
    groups = [{"params": module[2].parameters()}, {"params": module[0].parameters()}]
    options = {
        "max_grad_norm": [0.3, 0.2, 0.1],
        "clipping": "per_layer",
        "optimizer": torch.optim.SGD(groups, lr=0.1),
    }
    engine = trained(*start(module, data(12), "auto", **options), loss=LOSS)
    total = math.hypot(0.3, 0.2, 0.1)
    expected = {"0.weight": 0.1 / total, "2.weight": 0.3 / total, "2.bias": 0.2 / total}
    assert engine._training.run.options.shares == pytest.approx(expected)


@pytest.mark.parametrize(("rate", "steps"), [({}, 6), ({"sample_rate": 0.35}, 4)])
def test_the_target_is_spent_with_opacus_noise(rate: dict[str, float], steps: int) -> None:
    """Also at a rate that is given, whose passes have ⌊1/q⌋ steps.

    The accounting is told how many epochs there are.
    """
    engine = FILPrivacyEngine()
    _, optimizer, batches = private(engine, criterion=LOSS, num_probes=5, **rate, **TARGET)
    for _ in range(2):
        for x, y in batches:
            engine.train_step(x, y)
    assert engine.accountant.history[0][1:] == (rate.get("sample_rate", 1 / 3), steps)
    assert 2.4 < engine.get_epsilon(1e-3) <= 3.0
    accounting: Accounting = engine._training.run.options.accounting
    assert (accounting.epochs, accounting.num_probes) == (2, 5)
    if not rate:
        opacus = private(PrivacyEngine(accountant="rdp"), max_grad_norm=1.0, **TARGET)
        assert opacus[1].noise_multiplier == optimizer.noise_multiplier


class TestPublicSizes:
    """With q and the divisor given, a step's scale does not tell how many examples there are
    (opacus#571, #819).
    """

    def scale(self, n: int, **options: Any) -> tuple[float, Any]:
        """The spread of a step's released gradient over 20,000 weights, and the settings of the
        run.
        """
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(20, 900), nn.Tanh(), nn.Linear(900, 2))
        examples = TensorDataset(torch.randn(n, 20), torch.randint(2, (n,)))
        options = {"noise_multiplier": 20.0, "max_grad_norm": 0.1, "criterion": LOSS, **options}
        engine = FILPrivacyEngine()
        _, optimizer, batches = private(engine, module, loader(examples, 100), **options)
        engine.train_step(*next(iter(batches)))
        released = torch.cat([p.grad.flatten() for p in module.parameters()])
        told = (
            len(batches),
            optimizer.expected_batch_size,
            engine.accountant.history,
            batches.sample_rate,
        )
        return float(released.std()), told

    def test_the_scale_is_that_of_the_given_sizes(self) -> None:
        given = {"sample_rate": 0.1, "expected_batch_size": 80}
        (here, told), (_, same), (half, less) = (self.scale(n, **given) for n in (1000, 999, 500))
        assert told == same == less == (10, 80, [(20.0, 0.1, 1)], 0.1)
        assert here == pytest.approx(20.0 * 0.1 / 80, rel=0.03)
        assert half == pytest.approx(here, rel=0.03)
        assert self.scale(500)[0] == pytest.approx(20.0 * 0.1 / 100, rel=0.03)  # 500 // 5
        assert private(expected_batch_size=7, poisson_sampling=False)[1].expected_batch_size == 7


class Louder:
    """κ = 1 + q + σ, which shows what it was given."""

    secret_batches = True

    def factors(self, rho: Tensor, q: float, sigma: float) -> tuple[Tensor, Tensor]:
        return torch.full_like(rho, 1 + q + sigma), torch.full_like(rho, 1 + q + sigma)


@pytest.mark.parametrize(
    ("way", "amplification", "clip"),
    [
        ("auto", Louder(), "smooth"),
        ("hooks", Louder(), "quartic"),
        ("train_step", "poisson", "quartic"),
    ],
)
def test_clips_of_ones_own_and_amplifications_follow_schedulers(
    way: str, amplification: Any, clip: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clipping, "_REGISTRY", dict(clipping._REGISTRY))
    clipping.register_clip("quartic", lambda t: (1 + t**4) ** 0.25)
    options = {
        "noise_multiplier": 0.9,
        "max_grad_norm": 0.5,
        "amplification": amplification,
        "clip": clip,
    }
    options |= {"criterion": LOSS, "grad_sample_mode": "hooks" if way == "hooks" else "auto"}
    run = make(network(), data(24), batch_size=8, **options)
    schedulers = (
        ExponentialNoise(run.optimizer, gamma=0.7),
        ExponentialGradClip(run.optimizer, gamma=0.95),
    )
    truth = None
    for k, batch in enumerate(run.private):
        run.options |= {"noise_multiplier": 0.9 * 0.7**k, "max_grad_norm": 0.5 * 0.95**k}
        run.passes, run.released = (
            [[take(run, batch, way)]],
            [torch.zeros_like(weights_of(run.module))],
        )
        truth = Truth(run, truth)
        for scheduler in schedulers:
            scheduler.step()
    assert truth is not None
    assert relative_error(run.engine.totals.get_trace().value, truth.trace) < 1e-6
    history = run.engine.accountant.history
    assert [noise for noise, *_ in history] == pytest.approx([0.9 * 0.7**k for k in range(3)])
    assert (
        run.engine.get_individual_epsilon(delta=1e-5).value.max()
        <= run.engine.get_epsilon(1e-5) + 1e-9
    )
