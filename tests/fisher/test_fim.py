"""Every fast path against brute-force Jacobians in float64, and in float32 to its own precision."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev, vmap

from tests.cases import CASES, CLIPS, DEVICE, SIGMA, Case, build, relative_error
from tests.fisher.recorded_cases import Model, Truth, check_products, close, gradients_of
from torchfil import fisher
from torchfil.clipping import DEFAULT_CLIP, check_clip_weights, get_clip
from torchfil.fisher import ClippedJacobian, ExampleGradients, PoissonAmplification, reference
from torchfil.fisher.batch import PrivateBatch
from torchfil.fisher.estimators import Draws, draw_bits, get_estimator, signs_of
from torchfil.fisher.mechanism import Mechanism, step_divergence
from torchfil.fisher.recording import RecordedJacobian, plan
from torchfil.fisher.recording.graphs import signature

TOLERANCE = 1e-8
OMEGA = torch.tensor([0.3, 1.0, 0.05, 0.7, 0.5], dtype=torch.float64)
pytestmark = pytest.mark.torch_versions


@dataclass(frozen=True)
class Exact:
    """A case with its g̃, [batch, p], and J̃, [batch, p, d]."""

    name: str
    clip: str
    case: Case
    clipped: Tensor
    jacobian: Tensor

    @classmethod
    def of(cls, name: str, batch: int, clip: str = DEFAULT_CLIP, **more: Any) -> Exact:
        case = build(name, batch)
        settings = {"max_grad_norm": case.C, "clip": clip, "private": case.private, **more}
        jacobian = reference.exact_jacobian(*case.arguments, **settings, mode=case.mode)
        return cls(name, clip, case, reference.clipped_gradients(*case.arguments, **settings), jacobian)

    @property
    def settings(self) -> dict[str, Any]:
        case = self.case
        return {"max_grad_norm": case.C, "noise_multiplier": SIGMA, "clip": self.clip, "private": case.private}

    @property
    def fim(self) -> Tensor:
        return self.jacobian.mT @ self.jacobian / (SIGMA * self.case.C) ** 2


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((name, batch, clip), id=f"{name}-{clip}-{batch}", marks=() if quick else pytest.mark.slow)
        for name in CASES
        for clip in CLIPS
        for batch in ((1, 7) if name == "mlp" and clip == DEFAULT_CLIP else (7,))
        for quick in [clip == DEFAULT_CLIP or name == "mlp"]
    ],
)
def exact(request: pytest.FixtureRequest) -> Exact:
    """Every model with the default clip function, and every clip function on the MLP; slowly, each with each."""
    return Exact.of(*request.param)


def check_dense(op: ClippedJacobian, clipped: Tensor, jacobian: Tensor, mechanism: Mechanism) -> Truth:
    """All that an operator computes, from g̃ and J̃."""
    batch, p, d = jacobian.shape
    source = torch.Generator().manual_seed(1)
    v, u, probes = (torch.randn(n, k, generator=source).to(jacobian) for n, k in ((batch, d), (batch, p), (3, p)))
    truth, gram = Truth.of_dense(clipped, jacobian, probes), jacobian.mT @ jacobian
    across = gram - truth.along[:, :, None] * truth.along[:, None, :]
    check_products(op, truth, mechanism)
    close(op.clipped_gradient, clipped)
    for got, want in (
        (op.matvec(v), torch.einsum("bpd,bd->bp", jacobian, v)),
        (op.rmatvec(u), torch.einsum("bpd,bp->bd", jacobian, u)),
        (op.rmatvec(u[0]), torch.einsum("bpd,p->bd", jacobian, u[0])),
        (op.dense(), jacobian),
        (op.gram(), gram),
        (op.gram(columns_at_once=d // 4 + 1), gram),
        (op.perpendicular_squared_norm(v), torch.einsum("bd,bde,be->b", v, across, v)),
        (op.perpendicular_gram_matvec(v), torch.einsum("bde,be->bd", across, v)),
        (op.perpendicular_gram(d // 2 + 1), across),
        (op.perpendicular_diagonal(), across.diagonal(dim1=1, dim2=2)),
        (op.perpendicular_diagonal(d // 2 + 1), across.diagonal(dim1=1, dim2=2)),
    ):
        assert relative_error(got, want) < TOLERANCE
    return truth


def test_operator(exact: Exact) -> None:
    case, clip = exact.case, get_clip(exact.clip)
    gradients = ExampleGradients.build(*case.arguments, case.private)
    mechanism = Mechanism.build(case.C, 0.8, clip, "poisson", 0.1)
    truth = check_dense(ClippedJacobian(gradients, clip, case.C), exact.clipped, exact.jacobian, mechanism)
    check_products(RecordedJacobian(gradients, clip, case.C), truth, mechanism)
    u = truth.probes[0]
    plain = torch.stack([gradients.plain_products_of_one(i, u)[2] for i in range(len(gradients))])
    close(plain, gradients.vjp(u))


@pytest.mark.parametrize("amplification", [None, PoissonAmplification(0.2)])
def test_fim(exact: Exact, amplification: Any) -> None:
    case, settings, fim = exact.case, {**exact.settings, "amplification": amplification}, exact.fim
    if amplification:
        fim = reference.poisson_fim(exact.jacobian, exact.clipped, SIGMA * case.C, 0.2)
    diagonal = fim.diagonal(dim1=1, dim2=2)
    for got, want in (
        (fisher.fim_trace(*case.arguments, **settings, estimator="exact"), diagonal.sum(dim=1)),
        (fisher.fim_diagonal(*case.arguments, **settings, estimator="exact"), diagonal),
        (fisher.fim_matrix(*case.arguments, **settings), fim),
    ):
        assert got.kind == "exact"
        assert relative_error(got.value, want) < TOLERANCE
    norm = fisher.fim_spectral_norm(*case.arguments, **settings, iterations=40)
    assert norm.kind == "lower bound"
    assert relative_error(norm.value, torch.linalg.eigvalsh(fim)[:, -1]) < TOLERANCE
    single = fisher.exact_fim(*build(exact.name, len(fim), dtype=torch.float32).arguments, **settings)
    assert single.dtype == torch.float32
    assert relative_error(single, fim) < 1e-4


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


class TestMemory:
    @pytest.mark.parametrize(
        "estimator", [pytest.param("exact", marks=pytest.mark.slow), "coordinates", "input-probes", "weight-probes"]
    )
    def test_chunks_change_nothing(self, estimator: str) -> None:
        case = build("groupnorm_residual", 7)
        settings = {"max_grad_norm": case.C, "noise_multiplier": SIGMA, "estimator": estimator, "num_probes": 3}
        whole, *parts = (
            fisher.fim_trace(*case.arguments, **settings, generator=torch.Generator().manual_seed(5), max_memory=memory)
            for memory in (2**30, 200_000, 1)
        )
        for part in parts:
            torch.testing.assert_close(part.value, whole.value, rtol=1e-12, atol=0)
            torch.testing.assert_close(part.standard_error, whole.standard_error, rtol=1e-9, atol=1e-14)

    def test_the_ceiling_caps_what_is_held_at_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The largest block of gradients or Jacobian columns that any call returns stays under it."""
        case, sizes, original = build("groupnorm_residual", 7), [], ExampleGradients._map

        def watched(self: ExampleGradients, *args: Any) -> Tensor:
            result = original(self, *args)
            sizes.append(result.nbytes)
            return result

        monkeypatch.setattr(ExampleGradients, "_map", watched)
        p = sum(value.numel() for value in case.model.parameters())
        fisher.exact_fim(*case.arguments, max_grad_norm=case.C, noise_multiplier=SIGMA, max_memory=60 * p * 8)
        assert p * 8 <= max(sizes) <= 60 * p * 8 < 7 * p * 32 * 8

    @pytest.mark.skipif(DEVICE != "cpu", reason="on GPUs probes are processed one by one")
    @pytest.mark.parametrize(
        ("name", "passes", "at_once"),
        [("transformer", 100, 5), ("transformer", 2, 2), ("transformer", 0.5, 1), ("mnist_cnn", 100, 1)],
    )
    def test_it_decides_how_many_probes_are_worked_at_together(
        self, name: str, passes: float, at_once: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The trace is the same."""
        case, found = build(name, 4), set()
        gradients = ExampleGradients.build(*case.arguments, case.private)
        true, memory = RecordedJacobian.perpendicular_rows, int(passes * 4 * plan(gradients).bytes_per_example)

        def rows(self: RecordedJacobian, probes: Any, at_once: int = 1) -> Any:
            found.add(at_once)
            return true(self, probes, at_once)

        monkeypatch.setattr(RecordedJacobian, "perpendicular_rows", rows)
        batch = PrivateBatch(gradients, Mechanism.build(1.0, 1.0))
        estimate = batch.estimate("trace", "weight-probes", 5, torch.Generator().manual_seed(3), memory)
        assert found == {at_once}
        jacobian, empty = RecordedJacobian(gradients, batch.mechanism.clip, 1.0), torch.empty(gradients.num_parameters)
        seeds = Draws.seeds_from(5, torch.Generator().manual_seed(3))
        signs = [signs_of(draw_bits(seed, empty.to(torch.int8)), torch.float64) for seed in seeds]
        squares = torch.stack([jacobian.perpendicular_rmatvec(u).square().sum(dim=1) for u in signs])
        close(estimate.value, squares.mean(dim=0) + jacobian.clipped_norm_gradient().square().sum(dim=1), 1e-10)

    def test_probes_that_cannot_be_worked_at_together(self, caplog: pytest.LogCaptureFixture) -> None:
        """A model that cannot be mapped meets one probe after the other, which is said once."""

        class Stubborn(RecordedJacobian):
            def perpendicular_rmatvec(self, u: Tensor) -> Tensor:
                if torch._C._functorch.is_batchedtensor(u):
                    raise RuntimeError("not so")
                return super().perpendicular_rmatvec(u)

        gradients, clip = ExampleGradients.build(*build("mlp", 3).arguments), get_clip("gelu")
        probes = torch.randn(3, gradients.num_parameters, dtype=torch.float64, device=DEVICE)
        with caplog.at_level("INFO"):
            found = [list(Stubborn(gradients, clip, 1.0).perpendicular_rows(probes, 2)) for _ in range(2)]
        assert [record.message for record in caplog.records] == ["probes are processed one by one: not so"]
        want = list(RecordedJacobian(gradients, clip, 1.0).perpendicular_rows(probes))
        assert all(torch.equal(row, true) for rows in found for row, true in zip(rows, want, strict=True))


def test_frozen_parameters_release_nothing() -> None:
    case = build("mlp", 3)
    settings = {"max_grad_norm": case.C, "noise_multiplier": SIGMA}
    case.model[0].requires_grad_(False)
    want = reference.exact_fim(*case.arguments, **settings)
    assert relative_error(fisher.exact_fim(*case.arguments, **settings), want) < TOLERANCE
    case.model[0].requires_grad_(True)
    assert relative_error(fisher.exact_fim(*case.arguments, **settings), want) > 0.01


def test_shared_weights() -> None:
    torch.manual_seed(0)
    a, c = nn.Linear(4, 4), nn.Linear(4, 4)
    model = Model(lambda m, x: m.c(torch.tanh(m.b(torch.tanh(m.a(x))))), a=a, b=a, c=c).double().to(DEVICE)
    c.weight = weight = a.weight
    arguments = (model, nn.MSELoss(), *(torch.randn(3, 4).double().to(DEVICE) for _ in range(2)))
    settings = {"max_grad_norm": 1.0, "noise_multiplier": SIGMA}
    assert relative_error(fisher.exact_fim(*arguments, **settings), reference.exact_fim(*arguments, **settings)) < 1e-8
    assert a.weight is c.weight is weight
    assert [name for name, _ in model.named_parameters()] == ["a.weight", "a.bias", "c.bias"]
    assert weight.requires_grad


def test_probed_matrix_converges_to_the_exact_one() -> None:
    case = build("mlp", 3)
    settings = {"max_grad_norm": case.C, "noise_multiplier": SIGMA}
    exact, source = fisher.exact_fim(*case.arguments, **settings), torch.Generator().manual_seed(3)
    probed = fisher.fim_matrix(*case.arguments, **settings, estimator="weight-probes", num_probes=500, generator=source)
    assert ((probed.value - exact).abs() <= 5 * probed.standard_error + 1e-12).all()
    assert relative_error(probed.value, exact) < 0.2


def test_lanczos_is_a_lower_bound_that_converges() -> None:
    case = build("mlp", 3)
    settings = {"max_grad_norm": case.C, "noise_multiplier": SIGMA}
    exact = fisher.fim_spectral_norm(*case.arguments, **settings, method="exact")
    assert exact.kind == "exact"
    found = [
        fisher.fim_spectral_norm(
            *case.arguments, **settings, generator=torch.Generator().manual_seed(0), iterations=iterations
        ).value
        for iterations in (2, 5, 40)
    ]
    assert all((value <= exact.value * (1 + 1e-12)).all() for value in found)
    assert (found[0] <= found[1]).all()
    assert (found[1] <= found[2]).all()
    assert relative_error(found[2], exact.value) < 1e-6


@pytest.mark.parametrize("amplification", [None, PoissonAmplification(0.05)])
@pytest.mark.parametrize("clip", CLIPS)
def test_one_folded_probe_has_the_whole_matrix_as_its_mean(clip: str, amplification: Any) -> None:
    """Over all 2^p sign vectors, the mean of r rᵀ is the amplified Fisher information, clipping included."""
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Tanh(), nn.Linear(2, 1, bias=False))
    gradients = gradients_of(model, torch.randn(4, 2))
    mechanism, p = Mechanism.build(1.5, 0.8, clip, amplification), gradients.num_parameters
    jacobian = RecordedJacobian(gradients, mechanism.clip, mechanism.max_grad_norm)
    signs = torch.cartesian_prod(*[torch.tensor([1.0, -1.0], dtype=torch.float64, device=DEVICE)] * p)
    rows = vmap(partial(jacobian.folded_row, mechanism))(signs)
    settings: dict[str, Any] = {"max_grad_norm": 1.5, "noise_multiplier": 0.8, "clip": clip}
    x, y = gradients.examples.z, gradients.examples.public[2]
    want = fisher.exact_fim(model, nn.MSELoss(), x, y, **settings, amplification=amplification)
    close(torch.einsum("ubd,ube->bde", rows, rows) / len(signs), want)


def test_the_part_along_the_gradient_is_not_left_to_chance() -> None:
    """Var ‖r‖² = 2‖AAᵀ‖² + 4aᵀAAᵀa at most: what lies along the gradient alone does not vary."""
    case = build("mlp", 5)
    mechanism, gradients = Mechanism.build(case.C, 1.0), ExampleGradients.build(*case.arguments)
    jacobian = RecordedJacobian(gradients, mechanism.clip, case.C)
    rest = ClippedJacobian(gradients, mechanism.clip, case.C).perpendicular_gram() / case.C**2
    a, source = jacobian.clipped_norm_gradient() / case.C, torch.Generator(device=DEVICE).manual_seed(0)
    signs = torch.randint(0, 2, (1500, gradients.num_parameters), generator=source, device=DEVICE) * 2.0 - 1
    values = vmap(partial(jacobian.folded_row, mechanism))(signs.to(a)).square().sum(dim=2)
    largest = 2 * rest.square().sum(dim=(1, 2)) + 4 * torch.einsum("bd,bde,be->b", a, rest, a)
    assert (values.var(dim=0) <= 1.15 * largest).all()
    assert (largest < 2 * (rest + a[:, :, None] * a[:, None, :]).square().sum(dim=(1, 2))).all()


class TestWeights:
    """A weight ω for each example: ωφ(‖g‖) g is released."""

    def weighted(self, case: Case) -> ExampleGradients:
        gradients = ExampleGradients.build(*case.arguments, case.private)
        return replace(gradients, examples=replace(gradients.examples, clip_weights=OMEGA.to(DEVICE)))

    @pytest.mark.parametrize("name", ["mlp", "transformer", "private_target"])
    def test_operators(self, name: str) -> None:
        exact = Exact.of(name, 5, clip_weights=OMEGA)
        clip, C = get_clip(DEFAULT_CLIP), exact.case.C
        mechanism, gradients = Mechanism.build(C, 0.8, clip, "poisson", 0.1), self.weighted(exact.case)
        truth = check_dense(ClippedJacobian(gradients, clip, C), exact.clipped, exact.jacobian, mechanism)
        check_products(RecordedJacobian(gradients, clip, C), truth, mechanism)

    def test_public_functions(self) -> None:
        case = build("mlp", 5)
        told: dict[str, Any] = {"max_grad_norm": case.C, "noise_multiplier": 0.8}
        fim = reference.exact_fim(*case.arguments, clip_weights=OMEGA, **told)
        given, diagonal = {**told, "clip_weights": OMEGA.tolist()}, fim.diagonal(dim1=1, dim2=2)
        close(fisher.exact_fim(*case.arguments, **given), fim)
        close(fisher.fim_diagonal(*case.arguments, estimator="exact", **given).value, diagonal)
        source = torch.Generator().manual_seed(0)
        trace = fisher.fim_trace(*case.arguments, num_probes=600, generator=source, **given)
        assert float(((trace.value - diagonal.sum(dim=1)) / trace.standard_error).abs().max()) < 4
        largest = fisher.fim_spectral_norm(*case.arguments, method="exact", **given).value
        close(largest, torch.linalg.eigvalsh(fim)[:, -1])
        ones = fisher.exact_fim(*case.arguments, clip_weights=[1.0] * 5, **told)
        assert torch.equal(ones, fisher.exact_fim(*case.arguments, **told))
        for wrong in ([0.5, 0.5], [0.5, 0.0, 1, 1, 1]):
            with pytest.raises(ValueError, match="clip_weights"):
                fisher.exact_fim(*case.arguments, clip_weights=wrong, **told)
        with pytest.raises(ValueError, match="example 'b' is inf"):
            check_clip_weights(torch.tensor([1.0, float("inf")]), ["a", "b"])

    @pytest.mark.parametrize("rate", [None, 0.2])
    @pytest.mark.parametrize("shares", [None, {"a": 0.6, "b": 0.8}])
    def test_divergence(self, rate: float | None, shares: dict[str, float] | None) -> None:
        """KL between the releases of ωφ(‖g‖)g and ωφ(‖g′‖)g′, written down."""
        clip, limits = get_clip("smooth"), [0.9 * share for share in (shares or {"": 1.0}).values()]
        source = torch.Generator().manual_seed(0)
        g, h = torch.randn(2, 5, len(limits), 3, generator=source, dtype=torch.float64)
        mechanism = Mechanism.build(0.9, 0.7, clip, "poisson" if rate else None, rate, shares=shares)
        products = torch.stack([(g * g).sum(-1), (h * h).sum(-1), (g * h).sum(-1)])
        got = mechanism.divergence(products if shares else products[..., 0], OMEGA)
        scale = OMEGA[:, None, None] / (0.9 * 0.7)
        u, v = ((scale * x * clip.scale(x.norm(dim=-1), g.new_tensor(limits))[..., None]).flatten(1) for x in (g, h))
        true = step_divergence((u * u).sum(1), (v * v).sum(1), (u * v).sum(1), rate) / (rate or 1)
        close(got, true, 1e-12)

    def test_captured_passes_read_them_anew(self) -> None:
        """A graph tells batches with weights from those without."""
        gradients = self.weighted(build("mlp", 5))
        plain = replace(gradients, examples=replace(gradients.examples, clip_weights=None))
        other = replace(gradients, examples=replace(gradients.examples, clip_weights=OMEGA.flip(0).to(DEVICE)))
        assert signature(gradients) == signature(other) != signature(plain)
        assert len(gradients.examples.tensors) == len(plain.examples.tensors) + 1
        assert torch.equal(gradients.examples[torch.tensor([3, 0])].clip_weights.cpu(), OMEGA[[3, 0]])  # type: ignore[union-attr]


class TestByParameter:
    """Gradients clipped parameter by parameter."""

    LIMITS = (0.3, 0.8, 0.1, 2.0)
    C, S, Q = math.hypot(*LIMITS), 0.7 * math.hypot(*LIMITS), 0.2

    def setting(self, zero: bool = False, moved: float = 0.0) -> tuple[ExampleGradients, dict[str, float]]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
        if zero:  # no gradient reaches the first layer
            model[2].weight.data.zero_()
        x, y = torch.randn(6, 4, dtype=torch.float64) + moved, torch.randint(3, (6,))
        names = [name for name, _ in model.named_parameters()]
        shares = {name: limit / self.C for name, limit in zip(names, self.LIMITS, strict=True)}
        return ExampleGradients.build(model, nn.CrossEntropyLoss(), x, y), shares

    def brute(self, gradients: ExampleGradients, clip: str = "smooth") -> tuple[Tensor, Tensor]:
        """g̃ [batch, p] and J̃ [batch, p, d] by jacrev of the definition, one example after the other."""
        c, model = get_clip(clip), gradients.model

        def clipped_of(target: Tensor) -> Callable[[Tensor], Tensor]:
            def clipped(z: Tensor) -> Tensor:
                def loss(weights: dict[str, Tensor]) -> Tensor:
                    return gradients.loss_fn(functional_call(model, weights, (z[None],)), target[None])

                parts = []
                for part, limit in zip(grad(loss)(gradients.parameters).values(), self.LIMITS, strict=True):
                    square = part.square().sum()
                    norm = torch.where(square == 0, 0.0, torch.where(square == 0, 1.0, square).sqrt())
                    parts.append(part.flatten() / c.c(norm / c.threshold(limit)))
                return torch.cat(parts)

            return clipped

        pairs = [(clipped_of(y), z) for y, z in zip(gradients.examples.public[2], gradients.examples.z, strict=True)]
        return torch.stack([f(z) for f, z in pairs]), torch.stack([jacrev(f)(z) for f, z in pairs])

    @pytest.mark.parametrize("zero", [False, True])
    @pytest.mark.parametrize("clip", ["smooth", "hard", "gelu", "rsqrt"])
    def test_every_product_against_jacrev(self, clip: str, zero: bool) -> None:
        gradients, shares = self.setting(zero)
        mechanism = Mechanism.build(self.C, 0.7, clip, "poisson", self.Q, shares=shares)
        check_dense(ClippedJacobian(gradients, get_clip(clip), self.C, shares), *self.brute(gradients, clip), mechanism)

    def test_no_gradient_at_all_gives_zeros(self) -> None:
        """The loss does not depend on the model: everything is 0, nothing NaN."""
        gradients, shares = self.setting()
        gradients = replace(gradients, loss_fn=lambda outputs, _: 0 * outputs.sum())
        jacobian = ClippedJacobian(gradients, get_clip("smooth"), self.C, shares)
        for value in (jacobian.clipped_norm, jacobian.clipped_norm_gradient(), jacobian.perpendicular_gram()):
            assert torch.equal(value, torch.zeros_like(value))

    def test_one_parameter_is_ordinary_clipping(self) -> None:
        gradients = gradients_of(nn.Linear(4, 3, bias=False), torch.randn(5, 4))
        flat, one = (ClippedJacobian(gradients, get_clip("smooth"), 0.4, s) for s in (None, {"weight": 1.0}))
        close(one.dense(), flat.dense(), 1e-12)
        close(one.clipped_norm_gradient(), flat.clipped_norm_gradient(), 1e-12)
        close(one.perpendicular_gram(), flat.perpendicular_gram(), 1e-12)

    @pytest.mark.parametrize("amplification", [None, "poisson"])
    def test_fim_and_divergences(self, amplification: str | None) -> None:
        """s = σ‖C‖ for all parameters; subsampling weighs the direction of the whole clipped gradient."""
        gradients, shares = self.setting()
        others = self.setting(moved=0.3)[0]
        clipped, dense = self.brute(gradients)
        mechanism = Mechanism.build(self.C, 0.7, "smooth", amplification, self.Q, shares=shares)
        batch, rate = PrivateBatch(gradients, mechanism), self.Q if amplification else None
        fim = reference.poisson_fim(dense, clipped, self.S, self.Q) if rate else dense.mT @ dense / self.S**2
        tolerance = 2e-6 if rate else 1e-9  # of the tabulated factors
        trace = fim.diagonal(dim1=1, dim2=2).sum(dim=1)
        assert relative_error(batch.estimate("matrix", "exact").value, fim) < tolerance
        assert relative_error(batch.estimate("trace", "exact").value, trace) < tolerance

        (_, jacobian), *_ = batch.chunks(2**30, 8)
        for products, h in (
            (jacobian.products_with(others), self.brute(others)[0]),
            (jacobian.products_alone(), torch.zeros_like(clipped)),
        ):
            inner = [(a * b).sum(dim=1) / self.S**2 for a, b in ((clipped, clipped), (h, h), (clipped, h))]
            close(mechanism.divergence(products), step_divergence(*inner, rate) / (rate or 1), 1e-10)

    @pytest.mark.parametrize(("estimator", "probes"), [("weight-probes", 1), ("weight-probes", 3), ("input-probes", 3)])
    def test_estimators_are_unbiased(self, estimator: str, probes: int) -> None:
        gradients, shares = self.setting()
        mechanism = Mechanism.build(self.C, 0.7, "smooth", "poisson", self.Q, shares=shares)
        batch = PrivateBatch(gradients, mechanism)
        (_, jacobian), *_ = batch.chunks(2**30, 8)
        source, function = torch.Generator().manual_seed(0), get_estimator(estimator).function
        seeds = [Draws.seeds_from(probes, source) for _ in range(100)]
        found = [function(jacobian, mechanism, ("trace",), Draws(seed, slice(0, 6), 6, 1)) for seed in seeds]
        draws = torch.stack([moments["trace"].mean for moments in found])
        error = (draws.mean(dim=0) - batch.estimate("trace", "exact").value) / (draws.std(dim=0) / math.sqrt(100))
        assert float(error.abs().max()) < 4
