"""clipping="per_layer": releases what Opacus's DPPerLayerOptimizer releases, and is accounted for exactly."""

from __future__ import annotations

import copy
import logging
import math
from typing import Any

import pytest
import torch
from opacus import PrivacyEngine
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev

from tests.cases import DEVICE, grouped, relative_error
from tests.engine.loops import data, loader, network
from torchfil import FILPrivacyEngine
from torchfil.clipping import get_clip
from torchfil.fisher import reference
from torchfil.questions import Absent

LIMITS = [0.2, 0.05, 0.3, 0.1]
SIGMA = 0.9
NORM = math.hypot(*LIMITS)


def make(engine: Any, module: nn.Module, dataset: Any, **options: Any) -> Any:
    given = {
        "noise_multiplier": SIGMA,
        "max_grad_norm": LIMITS,
        "clipping": "per_layer",
        "noise_generator": torch.Generator(DEVICE).manual_seed(7),
    }
    optimizer = torch.optim.SGD(module.parameters(), lr=0.3)
    return engine.make_private(module=module, optimizer=optimizer, data_loader=loader(dataset), **{**given, **options})


def train(made: Any, steps: int, physical: int = 4) -> None:
    model, optimizer, batches = made
    with BatchMemoryManager(data_loader=batches, max_physical_batch_size=physical, optimizer=optimizer) as cut:
        for _, (x, y) in zip(range(steps), cut, strict=False):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x.to(DEVICE)), y.to(DEVICE)).backward()
            optimizer.step()


@pytest.mark.parametrize("mode", ["auto", "hooks", "functorch"])
def test_it_trains_as_opacus_does(mode: str) -> None:
    """The hard clip of every parameter, noise of σ‖C‖; Opacus adds 1e-6 to the norms that it divides by."""
    found = []
    for engine, options in (
        (PrivacyEngine(accountant="rdp"), {}),
        (FILPrivacyEngine(), {"clip": "hard", "grad_sample_mode": mode}),
    ):
        module = network()
        train(make(engine, module, data(), **options), 12)
        found.append((torch.cat([p.detach().flatten() for p in module.parameters()]), engine.get_epsilon(1e-5)))
    assert relative_error(found[1][0], found[0][0]) < 2e-5
    assert found[1][1] == found[0][1]


def clipped(module: nn.Module, weights: dict[str, Tensor], x: Tensor, y: Tensor, clip: str) -> tuple[Tensor, Tensor]:
    """g̃ [p] and J̃ [p, d] of one example, from the definition."""
    c = get_clip(clip)

    def of(z: Tensor) -> Tensor:
        def loss(weights: dict[str, Tensor]) -> Tensor:
            return nn.functional.cross_entropy(functional_call(module, weights, (z[None],)), y[None])

        parts = zip(grad(loss)(weights).values(), LIMITS, strict=True)
        return torch.cat([part.flatten() / c.c(part.norm() / c.threshold(limit)) for part, limit in parts])

    return of(x), jacrev(of)(x)


@pytest.mark.parametrize("mode", ["auto", "hooks", "train_step"])
def test_the_ledger_is_the_truth(mode: str, caplog: pytest.LogCaptureFixture) -> None:
    """Σ over participations of the exact Poisson FIM of block-wise clipped gradients, in float64."""
    module, plain, dataset = network(), network(), data(30)
    engine = FILPrivacyEngine()
    options = grouped(seed=3, estimator="exact", track=("fim",))
    if mode == "train_step":
        options["criterion"] = nn.CrossEntropyLoss()
    elif mode == "hooks":
        options["grad_sample_mode"] = "hooks"
    with caplog.at_level(logging.INFO, logger="torchfil"):
        model, optimizer, batches = make(engine, module, dataset, **options)
        q = batches.sample_rate
        expected = torch.zeros(30, 5, 5, dtype=torch.float64, device=DEVICE)
        norms = torch.zeros(30, dtype=torch.float64, device=DEVICE)
        for x, y in batches:
            weights = {name: value.detach().clone() for name, value in module.named_parameters()}
            x, y = x.to(DEVICE), y.to(DEVICE)
            for row, target in zip(x, y, strict=True):
                g, jacobian = clipped(plain, weights, row, target, "smooth")
                i = int((dataset.tensors[0].to(DEVICE) == row).all(dim=1).nonzero())
                expected[i] += reference.poisson_fim(jacobian[None], g[None], SIGMA * NORM, q)[0]
                norms[i] += g.norm() ** 2
            if mode == "train_step":
                engine.train_step(x, y)
                continue
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    ledger = engine.ledger
    assert ledger is not None
    assert relative_error(ledger.sums["squared_norm"], norms) < 1e-9
    assert relative_error(ledger.sums["trace"], expected.diagonal(dim1=1, dim2=2).sum(dim=1)) < 5e-6
    assert optimizer.max_grad_norms == pytest.approx(LIMITS)
    if mode == "auto":
        assert "mapped over examples" in caplog.text
        assert "clipping='per_layer' needs the norm of each parameter's gradient" in caplog.text


def test_norms_are_looked_up_by_layer() -> None:
    """refresh_norms: ‖g̃‖/‖C‖ of everybody at the present weights."""
    module, dataset = network(), data(20)
    engine = FILPrivacyEngine()
    made = make(engine, module, dataset, criterion=nn.CrossEntropyLoss())
    train(made, 1)
    engine.refresh_norms()
    weights = {name: value.detach() for name, value in module.named_parameters()}
    plain = copy.deepcopy(module)
    expected = [clipped(plain, weights, x.to(DEVICE), y.to(DEVICE), "smooth")[0].norm() / NORM for x, y in dataset]
    assert relative_error(engine._training.run.history.ratio, torch.stack(expected).to(torch.float32)) < 1e-5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_grad_norm": 1.0}, r"a list of 4 numbers.*max_grad_norm=\[C / 4 \*\* 0.5\] \* 4"),
        ({"max_grad_norm": [1.0, 2.0]}, "needs max_grad_norm as a list of 4 numbers"),
        ({"max_grad_norm": [1.0, 1.0, 1.0, 0.0]}, "must all be positive and finite"),
        ({"clipping": "flat"}, "pass clipping='per_layer' with them"),
        ({"clipping": "per_token"}, "must be 'flat' or 'per_layer'"),
    ],
)
def test_thresholds_that_do_not_fit_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(FILPrivacyEngine(), network(), data(), **options)


def test_frozen_parameters_have_no_threshold_and_groups_their_own_order() -> None:
    """max_grad_norm goes by the optimizer's trainable parameters, as in Opacus."""
    module = network()
    module[0].bias.requires_grad_(False)
    groups = [{"params": module[2].parameters()}, {"params": module[0].parameters()}]
    engine = FILPrivacyEngine()
    model, optimizer, batches = engine.make_private(
        module,
        torch.optim.SGD(groups, lr=0.1),
        loader(data()),
        noise_multiplier=1.0,
        max_grad_norm=[0.3, 0.2, 0.1],
        clipping="per_layer",
    )
    train((model, optimizer, batches), 2)
    by_name = engine._training.run.options.shares
    assert by_name is not None
    total = math.hypot(0.3, 0.2, 0.1)
    expected = {"0.weight": 0.1 / total, "2.weight": 0.3 / total, "2.bias": 0.2 / total}
    assert by_name == pytest.approx(expected)


def test_plis_and_absence_are_of_what_is_released() -> None:
    """∂(‖g̃‖/s)²/∂z at the present weights, and D of "absent", ‖g̃‖²/2s² a participation without subsampling."""
    module, plain, dataset = network(), network(), data(12)
    engine = FILPrivacyEngine()
    made = make(
        engine,
        module,
        dataset,
        **grouped(criterion=nn.CrossEntropyLoss(), poisson_sampling=False, questions={"there": Absent()}, seed=1),
    )
    s = SIGMA * NORM
    x, y = (part.to(DEVICE) for part in dataset.tensors)
    weights = {name: value.detach().clone() for name, value in module.named_parameters()}
    parts = [clipped(plain, weights, row, target, "smooth") for row, target in zip(x, y, strict=True)]
    slopes = torch.stack([2 * g @ jacobian / s**2 for g, jacobian in parts])
    assert relative_error(engine.plis(range(12)), slopes) < 1e-9

    train(made, 1, physical=8)  # the first eight
    divergence = next(value for name, value in engine._training.run.ledger.sums.items() if "there" in name)
    expected = torch.stack([g.square().sum() for g, _ in parts[:8]]) / (2 * s**2)
    assert relative_error(divergence[:8].flatten(), expected) < 1e-9
