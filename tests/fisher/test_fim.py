"""Every fast path against brute-force Jacobians in float64, and in float32 to its own precision."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import vmap

from tests.cases import CASES, CLIPS, DEVICE, SIGMA, Case, build, relative_error
from tests.engine.brute_force import Pass, clipped_and_jacobian
from tests.fisher.recorded_cases import Truth, check_products, close, gradients_of
from torchfil import fisher
from torchfil.clipping import DEFAULT_CLIP, check_clip_weights, get_clip
from torchfil.fisher import ClippedJacobian, ExampleGradients, PoissonAmplification, reference
from torchfil.fisher.batch import PrivateBatch
from torchfil.fisher.mechanism import Mechanism, step_divergence
from torchfil.fisher.recording import RecordedJacobian
from torchfil.fisher.recording.graphs import signature

TOLERANCE = 1e-8
OMEGA = torch.tensor([0.3, 1.0, 0.05, 0.7, 0.5], dtype=torch.float64)
pytestmark = pytest.mark.torch_versions


@dataclass(frozen=True)
class Exact:
    """A case with its g̃, [batch, p], and J̃, [batch, p, d].

    Ω: a weight for each example, [batch], or None.
    """

    name: str
    case: Case
    settings: dict[str, Any]
    clipped: Tensor
    jacobian: Tensor

    @classmethod
    def of(cls, name: str, batch: int, clip: str) -> Exact:
        case, omega = (
            build(name, batch),
            None if name == "mlp" else torch.linspace(0.1, 1, batch).double().to(DEVICE),
        )
        settings = {
            "max_grad_norm": case.C,
            "clip": clip,
            "private": case.private,
            "clip_weights": omega,
        }
        jacobian = reference.exact_jacobian(*case.arguments, **settings, mode=case.mode)
        return cls(
            name, case, settings, reference.clipped_gradients(*case.arguments, **settings), jacobian
        )


SETTINGS = [
    ("mlp", 1, DEFAULT_CLIP),
    *(("mlp", 7, clip) for clip in CLIPS),
    *((n, 4, DEFAULT_CLIP) for n in CASES if n != "mlp"),
]


@pytest.fixture(scope="module", params=SETTINGS, ids=lambda each: "-".join(map(str, each)))
def exact(request: pytest.FixtureRequest) -> Exact:
    """Every model with the default clip function, all but one with weights, and every clip function
    on the MLP.
    """
    return Exact.of(*request.param)


def check_dense(
    op: ClippedJacobian, clipped: Tensor, jacobian: Tensor, mechanism: Mechanism
) -> Truth:
    """All that an operator computes, from g̃ and J̃."""
    batch, p, d = jacobian.shape
    source = torch.Generator().manual_seed(1)
    v, u, probes = (
        torch.randn(n, k, generator=source).to(jacobian)
        for n, k in ((batch, d), (batch, p), (3, p))
    )
    truth, gram = Truth.of_dense(clipped, jacobian, probes), jacobian.mT @ jacobian
    across = gram - truth.along[:, :, None] * truth.along[:, None, :]
    check_products(op, truth, mechanism)
    close(op.clipped_gradient, clipped)
    for got, want in (
        (op.matvec(v), torch.einsum("bpd,bd->bp", jacobian, v)),
        (op.rmatvec(u), torch.einsum("bpd,bp->bd", jacobian, u)),
        (op.rmatvec(u[0]), torch.einsum("bpd,p->bd", jacobian, u[0])),
        (op.dense(), jacobian),
        (op.gram(columns_at_once=d // 4 + 1), gram),
        (op.perpendicular_gram(d // 2 + 1), across),
        (op.perpendicular_diagonal(), across.diagonal(dim1=1, dim2=2)),
        (op.perpendicular_diagonal(d // 2 + 1), across.diagonal(dim1=1, dim2=2)),
    ):
        assert relative_error(got, want) < TOLERANCE
    return truth


def test_operators(exact: Exact) -> None:
    """The mapped and the recorded one."""
    case, clip, omega = exact.case, get_clip(exact.settings["clip"]), exact.settings["clip_weights"]
    gradients = ExampleGradients.build(*case.arguments, case.private)
    gradients = replace(gradients, examples=replace(gradients.examples, clip_weights=omega))
    mechanism = Mechanism.build(case.C, 0.8, clip, "poisson", 0.1)
    truth = check_dense(
        ClippedJacobian(gradients, clip, case.C), exact.clipped, exact.jacobian, mechanism
    )
    check_products(RecordedJacobian(gradients, mechanism), truth, mechanism)


@pytest.mark.parametrize("amplification", [None, PoissonAmplification(0.2)])
def test_fim(exact: Exact, amplification: Any) -> None:
    case, J, s = exact.case, exact.jacobian, SIGMA * exact.case.C
    settings = {**exact.settings, "noise_multiplier": SIGMA, "amplification": amplification}
    fim = reference.poisson_fim(J, exact.clipped, s, 0.2) if amplification else J.mT @ J / s**2
    diagonal = fim.diagonal(dim1=1, dim2=2)
    for got, want in (
        (fisher.fim_trace(*case.arguments, **settings, estimator="exact"), diagonal.sum(dim=1)),
        (fisher.fim_diagonal(*case.arguments, **settings, estimator="exact"), diagonal),
    ):
        assert got.kind == "exact"
        assert relative_error(got.value, want) < TOLERANCE
    assert relative_error(fisher.exact_fim(*case.arguments, **settings), fim) < TOLERANCE
    single = fisher.exact_fim(
        *build(exact.name, len(fim), dtype=torch.float32).arguments, **settings
    )
    assert single.dtype == torch.float32
    assert relative_error(single, fim) < 1e-4


class TestMemory:
    @pytest.mark.parametrize("estimator", ["exact", "weight-probes"])
    def test_chunks_change_nothing(self, estimator: str) -> None:
        case = build("mlp", 7)
        settings = {
            "max_grad_norm": case.C,
            "noise_multiplier": SIGMA,
            "estimator": estimator,
            "num_probes": 3,
        }
        whole, *parts = (
            fisher.fim_trace(
                *case.arguments,
                **settings,
                generator=torch.Generator().manual_seed(5),
                max_memory=memory,
            )
            for memory in (2**30, 4_000, 1)
        )
        for part in parts:
            torch.testing.assert_close(part.value, whole.value, rtol=1e-12, atol=0)
            torch.testing.assert_close(
                part.standard_error, whole.standard_error, rtol=1e-9, atol=1e-14
            )

    def test_the_ceiling_caps_what_is_held_at_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The largest block of gradients or Jacobian columns that any call returns stays under
        it.
        """
        case, sizes, original = build("mlp", 7), [], ExampleGradients._map

        def watched(self: ExampleGradients, *args: Any) -> Tensor:
            result = original(self, *args)
            sizes.append(result.nbytes)
            return result

        monkeypatch.setattr(ExampleGradients, "_map", watched)
        p = sum(value.numel() for value in case.model.parameters())
        fisher.exact_fim(
            *case.arguments, max_grad_norm=case.C, noise_multiplier=SIGMA, max_memory=20 * p * 8
        )
        assert p * 8 <= max(sizes) <= 20 * p * 8 < 7 * p * 5 * 8

    def test_probes_that_cannot_be_worked_at_together(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        """A model that cannot be mapped meets one probe after the other, which is said once."""

        class Stubborn(RecordedJacobian):
            def perpendicular_rmatvec(self, u: Tensor) -> Tensor:
                if torch._C._functorch.is_batchedtensor(u):
                    raise RuntimeError("not so")
                return super().perpendicular_rmatvec(u)

        gradients, mechanism = (
            ExampleGradients.build(*build("mlp", 3).arguments),
            Mechanism.build(1.0, 1.0, "gelu"),
        )
        probes = torch.randn(3, gradients.num_parameters, dtype=torch.float64, device=DEVICE)
        with caplog.at_level("INFO"):
            found = [
                list(Stubborn(gradients, mechanism).perpendicular_rows(probes, 2)) for _ in range(2)
            ]
        assert [record.message for record in caplog.records] == [
            "probes are processed one by one: not so"
        ]
        want = list(RecordedJacobian(gradients, mechanism).perpendicular_rows(probes))
        assert all(
            torch.equal(row, true) for rows in found for row, true in zip(rows, want, strict=True)
        )


def test_probed_traces_and_matrices_converge_to_the_exact_ones() -> None:
    case = build("mlp", 5)
    settings: dict[str, Any] = {
        "max_grad_norm": case.C,
        "noise_multiplier": SIGMA,
        "clip_weights": OMEGA.tolist(),
    }
    exact = fisher.exact_fim(*case.arguments, **settings)
    batch, generator = (
        PrivateBatch.build(*case.arguments, **settings),
        torch.Generator().manual_seed(3),
    )
    found = batch.measure(("trace", "matrix"), "weight-probes", 500, generator).estimates
    for probed, want in ((found["matrix"], exact), (found["trace"], torch.einsum("bii->b", exact))):
        assert ((probed.value - want).abs() <= 5 * probed.standard_error + 1e-12).all()
        assert relative_error(probed.value, want) < 0.2


@pytest.mark.parametrize("amplification", [None, PoissonAmplification(0.05)])
@pytest.mark.parametrize("clip", ["smooth", "hard"])
def test_one_folded_probe_has_the_whole_matrix_as_its_mean(clip: str, amplification: Any) -> None:
    """Over all 2^p sign vectors, the mean of r rᵀ is the amplified Fisher information, clipping
    included.
    """
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Tanh(), nn.Linear(2, 1, bias=False))
    gradients = gradients_of(model, torch.randn(4, 2))
    mechanism, p = Mechanism.build(1.5, 0.8, clip, amplification), gradients.num_parameters
    jacobian = RecordedJacobian(gradients, mechanism)
    signs = torch.cartesian_prod(
        *[torch.tensor([1.0, -1.0], dtype=torch.float64, device=DEVICE)] * p
    )
    rows = vmap(partial(jacobian.folded_row, mechanism))(signs)
    want = PrivateBatch(gradients, mechanism).estimate("matrix", "exact").value
    close(torch.einsum("ubd,ube->bde", rows, rows) / len(signs), want)


class TestWeights:
    """A weight ω for each example: ωφ(‖g‖) g is released."""

    def test_wrong_ones_are_refused_and_captured_passes_read_them_anew(self) -> None:
        """A graph tells batches with weights from those without."""
        arguments = build("mlp", 5).arguments
        with pytest.raises(ValueError, match="example 'b' is inf"):
            check_clip_weights(torch.tensor([1.0, float("inf")]), ["a", "b"])
        plain = ExampleGradients.build(*arguments)
        one, other = (
            replace(plain, examples=replace(plain.examples, clip_weights=w))
            for w in (OMEGA, OMEGA.flip(0))
        )
        assert signature(one) == signature(other) != signature(plain)
        assert len(one.examples.tensors) == len(plain.examples.tensors) + 1

    @pytest.mark.parametrize("rate", [None, 0.2])
    @pytest.mark.parametrize("shares", [None, {"a": 0.6, "b": 0.8}])
    def test_divergence(self, rate: float | None, shares: dict[str, float] | None) -> None:
        """KL between the releases of ωφ(‖g‖)g and ωφ(‖g′‖)g′, written down."""
        clip, limits = get_clip("smooth"), [0.9 * share for share in (shares or {"": 1.0}).values()]
        source = torch.Generator().manual_seed(0)
        g, h = torch.randn(2, 5, len(limits), 3, generator=source, dtype=torch.float64)
        mechanism = Mechanism.build(
            0.9, 0.7, clip, "poisson" if rate else None, rate, shares=shares
        )
        products = torch.stack([(g * g).sum(-1), (h * h).sum(-1), (g * h).sum(-1)])
        got = mechanism.divergence(products if shares else products[..., 0], OMEGA)
        scale = OMEGA[:, None, None] / (0.9 * 0.7)
        u, v = (
            (scale * x * clip.scale(x.norm(dim=-1), g.new_tensor(limits))[..., None]).flatten(1)
            for x in (g, h)
        )
        true = step_divergence((u * u).sum(1), (v * v).sum(1), (u * v).sum(1), rate) / (rate or 1)
        close(got, true, 1e-12)


class TestByParameter:
    """Gradients clipped parameter by parameter."""

    LIMITS = (0.3, 0.8, 0.1, 2.0)
    C, Q = math.hypot(*LIMITS), 0.2

    def setting(self, zero: bool = False) -> tuple[ExampleGradients, dict[str, float]]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
        if zero:  # no gradient reaches the first layer
            model[2].weight.data.zero_()
        x, y = torch.randn(6, 4, dtype=torch.float64), torch.randint(3, (6,))
        names = [name for name, _ in model.named_parameters()]
        shares = {name: limit / self.C for name, limit in zip(names, self.LIMITS, strict=True)}
        return ExampleGradients.build(model, nn.CrossEntropyLoss(), x, y), shares

    def brute(self, gradients: ExampleGradients, clip: str = "smooth") -> tuple[Tensor, Tensor]:
        """g̃ [batch, p] and J̃ [batch, p, d] by jacrev of the definition."""
        x, y = gradients.examples.z, gradients.examples.public[2]
        begun = Pass(torch.get_rng_state(), gradients.model.state_dict(), x, y, list(range(len(x))))
        return clipped_and_jacobian(
            gradients.model, begun, clip=clip, max_grad_norm=list(self.LIMITS)
        )

    @pytest.mark.parametrize("zero", [False, True])
    @pytest.mark.parametrize("clip", ["smooth", "gelu"])
    def test_every_product_against_jacrev(self, clip: str, zero: bool) -> None:
        gradients, shares = self.setting(zero)
        mechanism = Mechanism.build(self.C, 0.7, clip, "poisson", self.Q, shares=shares)
        check_dense(
            ClippedJacobian(gradients, get_clip(clip), self.C, shares),
            *self.brute(gradients, clip),
            mechanism,
        )

    def test_no_gradient_at_all_gives_zeros(self) -> None:
        """The loss does not depend on the model: everything is 0, nothing NaN."""
        gradients, shares = self.setting()
        gradients = replace(gradients, loss_fn=lambda outputs, _: 0 * outputs.sum())
        jacobian = ClippedJacobian(gradients, get_clip("smooth"), self.C, shares)
        for value in (
            jacobian.clipped_norm,
            jacobian.clipped_norm_gradient(),
            jacobian.perpendicular_gram(),
        ):
            assert torch.equal(value, torch.zeros_like(value))
