"""Every fast path against brute-force Jacobians in float64, and in float32 to its own precision."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.cases import CASES, CLIPS, DEVICE, SIGMA, Case, build, relative_error
from torchfil import fisher
from torchfil.clipping import DEFAULT_CLIP, get_clip
from torchfil.fisher import ClippedJacobian, ExampleGradients, PoissonAmplification, reference

TOLERANCE = 1e-8
pytestmark = pytest.mark.torch_versions


@dataclass(frozen=True)
class Truth:
    name: str
    clip: str
    case: Case
    jacobian: Tensor
    clipped: Tensor

    @property
    def settings(self) -> dict[str, Any]:
        case = self.case
        return {"max_grad_norm": case.C, "noise_multiplier": SIGMA, "clip": self.clip, "private": case.private}

    @property
    def gram(self) -> Tensor:
        return self.jacobian.mT @ self.jacobian

    @property
    def norm_gradient(self) -> Tensor:
        unit = self.clipped / self.clipped.norm(dim=1, keepdim=True)
        return torch.einsum("bpd,bp->bd", self.jacobian, unit)


def brute_force(name: str, batch: int, clip: str) -> Truth:
    case = build(name, batch)
    settings = {"max_grad_norm": case.C, "clip": clip, "private": case.private}
    jacobian = reference.exact_jacobian(*case.arguments, **settings, mode=case.mode)
    return Truth(name, clip, case, jacobian, reference.clipped_gradients(*case.arguments, **settings))


def pairs() -> list[Any]:
    """Every model with the default clip function, and every clip function on the MLP; slowly, each with each."""
    return [
        pytest.param((name, batch, clip), id=f"{name}-{clip}-{batch}", marks=() if is_quick else pytest.mark.slow)
        for name in CASES
        for clip in CLIPS
        for is_quick in [name == "mlp" or clip == DEFAULT_CLIP]
        for batch in (1, 7)
    ]


@pytest.fixture(scope="module", params=pairs())
def truth(request: pytest.FixtureRequest) -> Truth:
    """Computed once for all the tests of a pair."""
    return brute_force(*request.param)


def operator(case: Case, clip: str) -> ClippedJacobian:
    return ClippedJacobian(ExampleGradients.build(*case.arguments, case.private), get_clip(clip), case.C)


class TestAgainstBruteForce:
    def test_operator(self, truth: Truth) -> None:
        op = operator(truth.case, truth.clip)
        batch, p, d = truth.jacobian.shape
        generator = torch.Generator().manual_seed(1)
        v = torch.randn(batch, d, generator=generator, dtype=torch.float64).to(DEVICE)
        u = torch.randn(batch, p, generator=generator, dtype=torch.float64).to(DEVICE)
        assert relative_error(op.clipped_gradient, truth.clipped) < TOLERANCE
        assert relative_error(op.clipped_norm, truth.clipped.norm(dim=1)) < TOLERANCE
        difference = (op.clipped_norm_gradient() - truth.norm_gradient).norm()  # a hard clip has a = 0
        assert difference < TOLERANCE * truth.jacobian.norm()
        assert relative_error(op.matvec(v), torch.einsum("bpd,bd->bp", truth.jacobian, v)) < TOLERANCE
        assert relative_error(op.rmatvec(u), torch.einsum("bpd,bp->bd", truth.jacobian, u)) < TOLERANCE
        assert relative_error(op.rmatvec(u[0]), torch.einsum("bpd,p->bd", truth.jacobian, u[0])) < TOLERANCE
        assert relative_error(op.dense(), truth.jacobian) < TOLERANCE
        assert relative_error(op.gram(), truth.gram) < TOLERANCE
        assert relative_error(op.gram(columns_at_once=d // 4 + 1), truth.gram) < TOLERANCE

    def test_fim(self, truth: Truth) -> None:
        settings = truth.settings
        fim = truth.gram / (SIGMA * truth.case.C) ** 2
        diagonal = fim.diagonal(dim1=1, dim2=2)
        assert relative_error(fisher.exact_fim(*truth.case.arguments, **settings), fim) < TOLERANCE
        trace = fisher.fim_trace(*truth.case.arguments, **settings, estimator="exact")
        assert trace.kind == "exact"
        assert relative_error(trace.value, diagonal.sum(dim=1)) < TOLERANCE
        got = fisher.fim_diagonal(*truth.case.arguments, **settings, estimator="exact").value
        assert relative_error(got, diagonal) < TOLERANCE
        norm = fisher.fim_spectral_norm(*truth.case.arguments, **settings, iterations=40)
        assert norm.kind == "lower bound"
        assert relative_error(norm.value, torch.linalg.eigvalsh(fim)[:, -1]) < TOLERANCE

    def test_poisson_fim(self, truth: Truth) -> None:
        settings = {**truth.settings, "amplification": PoissonAmplification(0.2)}
        fim = reference.poisson_fim(truth.jacobian, truth.clipped, SIGMA * truth.case.C, 0.2)
        assert relative_error(fisher.exact_fim(*truth.case.arguments, **settings), fim) < TOLERANCE
        got = fisher.fim_trace(*truth.case.arguments, **settings, estimator="exact").value
        assert relative_error(got, fim.diagonal(dim1=1, dim2=2).sum(dim=1)) < TOLERANCE
        norm = fisher.fim_spectral_norm(*truth.case.arguments, **settings, iterations=40)
        assert relative_error(norm.value, torch.linalg.eigvalsh(fim)[:, -1]) < TOLERANCE

    def test_float32_agrees_to_1e_4(self, truth: Truth) -> None:
        case = build(truth.name, len(truth.jacobian), dtype=torch.float32)
        fim = fisher.exact_fim(*case.arguments, **truth.settings)
        assert fim.dtype == torch.float32
        assert relative_error(fim, truth.gram / (SIGMA * case.C) ** 2) < 1e-4
        trace = fisher.fim_trace(*case.arguments, **truth.settings, estimator="exact").value
        assert relative_error(trace, torch.einsum("bii->b", truth.gram) / (SIGMA * case.C) ** 2) < 1e-4


def check_whole_fim(case: Case, truth: Tensor) -> None:
    """The FIM of all 784 pixels, from the Jacobian of all 30,762 parameters, [1, p, d]."""
    fim = fisher.exact_fim(*case.arguments, max_grad_norm=case.C, noise_multiplier=SIGMA)
    assert fim.shape == (1, 784, 784)
    assert relative_error(fim, truth.mT @ truth / (SIGMA * case.C) ** 2) < TOLERANCE


@pytest.mark.slow
def test_whole_mnist_cnn() -> None:
    """Forward mode column by column; a product of reverse mode with a random vector shows a wrong entry anywhere."""
    case = build("mnist_cnn", 1)
    forward = reference.exact_jacobian(*case.arguments, max_grad_norm=case.C, mode="forward")
    x, clip = case.inputs.clone().requires_grad_(), get_clip(DEFAULT_CLIP)
    loss = case.loss_fn(case.model(x), case.targets)
    gradient = torch.autograd.grad(loss, list(case.model.parameters()), create_graph=True)
    g = torch.cat([part.flatten() for part in gradient])
    clipped = g / clip.c(g.norm() / clip.threshold(case.C))
    for u in torch.randn(3, len(g), generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(DEVICE):
        (product,) = torch.autograd.grad(clipped @ u, x, retain_graph=True)
        assert relative_error(product.flatten(), u @ forward[0]) < TOLERANCE
    check_whole_fim(case, forward)


@pytest.mark.long
def test_whole_mnist_cnn_against_jacrev() -> None:
    """Reverse mode row by row."""
    case = build("mnist_cnn", 1)
    truth = reference.exact_jacobian(*case.arguments, max_grad_norm=case.C)
    forward = reference.exact_jacobian(*case.arguments, max_grad_norm=case.C, mode="forward")
    assert relative_error(forward, truth) < TOLERANCE
    check_whole_fim(case, truth)


@pytest.mark.parametrize(
    "estimator", [pytest.param("exact", marks=pytest.mark.slow), "coordinates", "input-probes", "weight-probes"]
)
def test_result_does_not_depend_on_the_chunks(estimator: str) -> None:
    case = build("groupnorm_residual", 7)
    settings = {"max_grad_norm": case.C, "noise_multiplier": SIGMA, "estimator": estimator, "num_probes": 3}
    results = []
    for max_memory in (2**30, 200_000, 1):
        generator = torch.Generator().manual_seed(5)
        results.append(fisher.fim_trace(*case.arguments, **settings, generator=generator, max_memory=max_memory))
    for other in results[1:]:
        assert relative_error(other.value, results[0].value) < 1e-12
        assert torch.allclose(other.standard_error, results[0].standard_error, rtol=1e-9, atol=1e-14)


def test_max_memory_caps_what_is_held_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest block of gradients or Jacobian columns that any call returns stays under the ceiling."""
    case = build("groupnorm_residual", 7)
    largest = 0
    original = ExampleGradients._map

    def watched(self: ExampleGradients, *args: object) -> Tensor:
        nonlocal largest
        result = original(self, *args)  # type: ignore[arg-type]
        largest = max(largest, result.numel() * result.element_size())
        return result

    monkeypatch.setattr(ExampleGradients, "_map", watched)
    p = sum(value.numel() for value in case.model.parameters())
    ceiling = 60 * p * 8
    fisher.exact_fim(*case.arguments, max_grad_norm=case.C, noise_multiplier=SIGMA, max_memory=ceiling)
    assert p * 8 <= largest <= ceiling
    unlimited_block = 7 * p * 32 * 8
    assert largest < unlimited_block


def test_frozen_parameters_release_nothing() -> None:
    case = build("mlp", 3)
    case.model[0].requires_grad_(False)
    got = fisher.exact_fim(*case.arguments, max_grad_norm=case.C, noise_multiplier=SIGMA)
    want = reference.exact_fim(*case.arguments, max_grad_norm=case.C, noise_multiplier=SIGMA)
    assert relative_error(got, want) < TOLERANCE
    case.model[0].requires_grad_(True)
    assert relative_error(fisher.exact_fim(*case.arguments, max_grad_norm=case.C, noise_multiplier=SIGMA), want) > 0.01


def test_shared_weights() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 4)
            self.b = self.a
            self.c = nn.Linear(4, 4)
            self.c.weight = self.a.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))

    torch.manual_seed(0)
    model = Shared().double().to(DEVICE)
    weight, names = model.a.weight, [name for name, _ in model.named_parameters()]
    arguments = (
        model,
        nn.MSELoss(),
        torch.randn(3, 4).double().to(DEVICE),
        torch.randn(3, 4).double().to(DEVICE),
    )
    settings = {"max_grad_norm": 1.0, "noise_multiplier": SIGMA}
    assert relative_error(fisher.exact_fim(*arguments, **settings), reference.exact_fim(*arguments, **settings)) < 1e-8
    assert model.a.weight is model.b.weight is model.c.weight is weight
    assert [name for name, _ in model.named_parameters()] == names == ["a.weight", "a.bias", "c.bias"]
    assert weight.requires_grad


def test_probed_matrix_converges_to_the_exact_one() -> None:
    case = build("mlp", 3)
    settings = {"max_grad_norm": case.C, "noise_multiplier": SIGMA}
    exact = fisher.exact_fim(*case.arguments, **settings)
    probed = fisher.fim_matrix(
        *case.arguments,
        **settings,
        estimator="weight-probes",
        num_probes=500,
        generator=torch.Generator().manual_seed(3),
    )
    assert ((probed.value - exact).abs() <= 5 * probed.standard_error + 1e-12).all()
    assert relative_error(probed.value, exact) < 0.2


def test_lanczos_is_a_lower_bound_that_converges() -> None:
    case = build("mlp", 3)
    settings = {"max_grad_norm": case.C, "noise_multiplier": SIGMA, "generator": torch.Generator().manual_seed(0)}
    exact = fisher.fim_spectral_norm(*case.arguments, **settings, method="exact")
    assert exact.kind == "exact"
    previous = torch.zeros(3, dtype=torch.float64, device=DEVICE)
    for iterations in (2, 5, 40):
        settings["generator"] = torch.Generator().manual_seed(0)
        found = fisher.fim_spectral_norm(*case.arguments, **settings, iterations=iterations)
        assert (found.value <= exact.value * (1 + 1e-12)).all()
        assert (found.value >= previous).all()
        previous = found.value
    assert relative_error(previous, exact.value) < 1e-6
