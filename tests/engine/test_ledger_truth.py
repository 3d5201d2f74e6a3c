"""The ledger of a real run against a hand-written loop of exact Jacobians at the recorded weights and batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.cases import DEVICE, relative_error
from tests.engine.loops import SIGMA, C, data, loader, network, train, truth
from torchfil import FILPrivacyEngine
from torchfil.clipping import DEFAULT_CLIP, get_clip
from torchfil.fisher import ClippedJacobian, ExampleGradients, Theorem4Amplification

EXACT: dict[str, Any] = {"estimator": "exact", "track": ("diagonal", "fim", "sketch"), "sketch_rank": 5}
pytestmark = pytest.mark.torch_versions


def check(run: Any, dataset: Any, q: float | None, clip: str = DEFAULT_CLIP) -> None:
    fim, participations = truth(run, dataset, q=q, module=network(), clip=clip)
    engine = run.engine
    diagonal = fim.diagonal(dim1=1, dim2=2)
    seen = participations > 0
    trace = engine.totals.get_trace()
    assert trace.kind == "exact"
    assert relative_error(trace.value, diagonal.sum(dim=1)) < 1e-6
    assert relative_error(engine.get_fil().value, (diagonal.sum(dim=1) / fim.shape[1]).sqrt()) < 1e-6
    assert relative_error(engine.get_attribute_fil().value, diagonal.sqrt()) < 1e-6
    norm = torch.linalg.eigvalsh(fim)[:, -1].clamp(min=0).sqrt()
    assert relative_error(engine.get_fil(kind="spectral").value, norm) < 1e-6
    assert torch.equal(engine.ledger.sums["participations"].cpu(), participations)
    bound = engine.get_mse_bound().value.cpu()
    assert relative_error(bound[seen], fim.shape[1] / diagonal.sum(dim=1)[seen]) < 1e-6
    assert torch.isinf(bound[~seen]).all()
    sketch = engine.ledger.sums["sketch"]
    assert relative_error(sketch, fim @ engine._training.run.test_matrix.cpu()) < 1e-6


@pytest.mark.parametrize("amplification", ["none", "poisson"])
@pytest.mark.parametrize("n", [93, 99])
def test_plain_loop(n: int, amplification: str) -> None:
    dataset = data(n)
    run = train(dataset, steps=15, **EXACT, amplification=amplification)  # into the second epoch
    rate = run.loader.batch_sampler.sample_rate
    assert rate == 1 / len(loader(dataset))
    check(run, dataset, rate if amplification == "poisson" else None)


@pytest.mark.parametrize("clip", ["hard", "rsqrt"])
def test_other_clips(clip: str) -> None:
    dataset = data(40)
    check(train(dataset, steps=8, **EXACT, clip=clip), dataset, 1 / 5, clip=clip)


@pytest.mark.parametrize("amplification", ["none", "poisson"])
def test_batch_memory_manager_with_physical_batches_of_three(amplification: str) -> None:
    dataset = data(40)
    run = train(dataset, steps=7, physical=3, **EXACT, amplification=amplification)  # into the second epoch
    assert any(len(step.x) > 1 for step in run.steps)
    check(run, dataset, 1 / 5 if amplification == "poisson" else None)


def test_two_workers() -> None:
    dataset = data(45)
    check(train(dataset, workers=2, steps=8, **EXACT), dataset, 1 / 6)


def test_two_workers_and_batch_memory_manager() -> None:
    dataset = data(40)
    run = train(dataset, workers=2, physical=3, steps=6, **EXACT)
    check(run, dataset, 1 / 5)


def test_empty_batches() -> None:
    dataset = data(93)
    run = train(dataset, batch_size=1, steps=25, **EXACT)
    sizes = [len(torch.cat(step.x)) for step in run.steps]
    assert 0 in sizes, "this seed must give empty batches"
    assert run.engine.ledger.steps == 25
    check(run, dataset, run.loader.sample_rate)


def test_random_rows_for_empty_batches_belong_to_nobody() -> None:
    dataset = data(30)
    run = train(dataset, batch_size=1, steps=20, **EXACT, rand_on_empty=True)
    real = [all((dataset.tensors[0] == row).all(dim=1).any() for row in step.x[0]) for step in run.steps]
    assert not all(real)
    run.steps[:] = [step for step, is_real in zip(run.steps, real, strict=True) if is_real]
    check(run, dataset, run.loader.sample_rate)


def test_shuffled_loader_without_poisson_sampling() -> None:
    dataset = data(40)
    run = train(dataset, steps=10, **EXACT, poisson_sampling=False)
    check(run, dataset, None)
    assert run.engine.ledger.sums["participations"].tolist() == [2] * 40


def test_theorem_4_on_request() -> None:
    dataset = data(40)
    run = train(dataset, steps=6, estimator="exact", amplification=Theorem4Amplification(delta=1e-6))
    fim, _ = truth(run, dataset, q=None, module=network())
    kappa = Theorem4Amplification(delta=1e-6).kappa(1 / 5, SIGMA)
    assert relative_error(run.engine.totals.get_trace().value, kappa * torch.einsum("bii->b", fim)) < 1e-6


def test_sum_reduction() -> None:
    dataset = data(40)
    run = train(
        dataset,
        steps=6,
        **EXACT,
        loss_reduction="sum",
        loss_fn=lambda o, t: nn.functional.cross_entropy(o, t, reduction="sum"),
    )
    check(run, dataset, 1 / 5)


def test_functorch_gradients() -> None:
    dataset = data(40)
    check(train(dataset, steps=6, **EXACT, grad_sample_mode="functorch"), dataset, 1 / 5)


def test_a_low_rank_sketch_is_a_lower_bound() -> None:
    dataset = data(40)
    run = train(dataset, steps=10, estimator="exact", track=("fim",))
    low = train(dataset, steps=10, estimator="exact", track=("sketch",), sketch_rank=2)
    exact, sketch = run.engine.get_fil(kind="spectral"), low.engine.get_fil(kind="spectral")
    assert sketch.kind == "lower bound"
    seen = exact.value > 0
    assert (sketch.value[seen] <= exact.value[seen] * (1 + 1e-9)).all()
    assert (sketch.value[seen] > 0.5 * exact.value[seen]).double().mean() > 0.8
    upper = low.engine.get_fil().value * 5**0.5
    assert (exact.value <= upper * (1 + 1e-9)).all()


def test_what_is_released_is_what_is_accounted() -> None:
    """The optimizer's clipped sum equals the sum of the clipped gradients that the accounting differentiates."""
    dataset, module = data(40), network()
    engine = FILPrivacyEngine()
    optimizer: Any = torch.optim.SGD(module.parameters(), lr=0.1)
    model, optimizer, private = engine.make_private(
        module, optimizer, loader(dataset), noise_multiplier=SIGMA, max_grad_norm=C
    )
    reference_model = network()
    for x, y in private:
        x, y = x.to(DEVICE), y.to(DEVICE)
        reference_model.load_state_dict(module.state_dict())
        gradients = ExampleGradients.build(reference_model, nn.CrossEntropyLoss(), x, y)
        clipped = ClippedJacobian(gradients, get_clip(DEFAULT_CLIP), C).clipped_gradient
        assert (clipped.norm(dim=1) <= C).all()
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        summed = torch.cat([p.summed_grad.flatten() for p in module.parameters()])
        assert relative_error(summed, clipped.sum(dim=0)) < 1e-12
        for leave_out in range(len(x)):
            without = summed - clipped[leave_out]
            assert (summed - without).norm() <= C * (1 + 1e-12), "the sensitivity of the noisy sum"
