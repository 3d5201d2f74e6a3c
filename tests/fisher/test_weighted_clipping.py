"""A weight for each example: every operator and public function, against jacrev of ωφ(‖g‖) g in float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.cases import DEVICE, build, relative_error
from torchfil.clipping import check_clip_weights, get_clip
from torchfil.fisher import exact_fim, fim_diagonal, fim_matrix, fim_spectral_norm, fim_trace, reference
from torchfil.fisher.gradients import ExampleGradients, flatten
from torchfil.fisher.mechanism import Mechanism, step_divergence
from torchfil.fisher.operator import ClippedJacobian
from torchfil.fisher.recording import RecordedJacobian
from torchfil.fisher.recording.graphs import signature

CLIP = get_clip("smooth")
WEIGHTS = torch.tensor([0.3, 1.0, 0.05, 0.7, 0.5], dtype=torch.float64)
CASES = ["mlp", "transformer", "private_target"]


def weighted(name: str) -> tuple[Any, ExampleGradients]:
    case = build(name, len(WEIGHTS))
    gradients = ExampleGradients.build(case.model, case.loss_fn, case.inputs, case.targets, case.private)
    return case, replace(gradients, examples=replace(gradients.examples, clip_weights=WEIGHTS.to(DEVICE)))


def truth(case: Any) -> tuple[Tensor, Tensor]:
    """g̃, [batch, p], and J̃, [batch, p, d]."""
    told = {"max_grad_norm": case.C, "private": case.private, "clip_weights": WEIGHTS}
    return (
        reference.clipped_gradients(*case.arguments, **told),
        reference.exact_jacobian(*case.arguments, mode="forward", **told),
    )


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("kind", [ClippedJacobian, RecordedJacobian])
def test_operators(name: str, kind: Any) -> None:
    case, gradients = weighted(name)
    jacobian = kind(gradients, CLIP, case.C)
    g, dense = truth(case)
    u = torch.randn(g.shape[1], dtype=g.dtype, device=DEVICE)
    v = torch.randn(dense.shape[0], dense.shape[2], dtype=g.dtype, device=DEVICE)
    along = g / g.norm(dim=1, keepdim=True)
    slope = torch.einsum("bpd,bp->bd", dense, along)
    across = torch.einsum("bpd,p->bd", dense, u) - (along @ u)[:, None] * slope
    assert relative_error(jacobian.clipped_norm, g.norm(dim=1)) < 1e-9
    assert relative_error(flatten(jacobian.clipped_sum()), g.sum(dim=0)) < 1e-9
    assert relative_error(jacobian.clipped_norm_gradient(), slope) < 1e-9
    assert relative_error(jacobian.perpendicular_rmatvec(u), across) < 1e-9
    if isinstance(jacobian, ClippedJacobian):
        assert relative_error(jacobian.matvec(v), torch.einsum("bpd,bd->bp", dense, v)) < 1e-9
        assert relative_error(jacobian.gram(), dense.mT @ dense) < 1e-9

    mechanism = Mechanism.build(case.C, 0.8, CLIP, "poisson", 0.1)
    perpendicular, parallel = mechanism.weights(g.norm(dim=1))
    row = perpendicular.sqrt()[:, None] * across + parallel.sqrt()[:, None] * slope
    assert relative_error(jacobian.folded_row(mechanism, u), row) < 1e-9


@pytest.mark.parametrize("name", CASES)
def test_released_gradients(name: str) -> None:
    case, gradients = weighted(name)
    released, g = RecordedJacobian(gradients, CLIP, case.C, measured=False), truth(case)[0]
    assert relative_error(released.clipped_norm, g.norm(dim=1)) < 1e-9
    assert relative_error(flatten(released.clipped_sum()), g.sum(dim=0)) < 1e-9


def test_public_functions() -> None:
    case, _ = weighted("mlp")
    told = {"max_grad_norm": case.C, "noise_multiplier": 0.8, "private": case.private}
    fim = reference.exact_fim(*case.arguments, clip_weights=WEIGHTS, **told)
    given: dict[str, Any] = {**told, "clip_weights": WEIGHTS.tolist()}
    assert relative_error(exact_fim(*case.arguments, **given), fim) < 1e-9
    assert relative_error(fim_matrix(*case.arguments, **given).value, fim) < 1e-9
    diagonal = fim.diagonal(dim1=1, dim2=2)
    assert relative_error(fim_diagonal(*case.arguments, estimator="exact", **given).value, diagonal) < 1e-9
    trace = fim_trace(*case.arguments, num_probes=600, generator=torch.Generator().manual_seed(0), **given)
    assert float(((trace.value - diagonal.sum(dim=1)) / trace.standard_error).abs().max()) < 4
    largest = torch.linalg.eigvalsh(fim)[:, -1]
    assert relative_error(fim_spectral_norm(*case.arguments, method="exact", **given).value, largest) < 1e-9

    assert torch.equal(exact_fim(*case.arguments, clip_weights=[1.0] * 5, **told), exact_fim(*case.arguments, **told))
    with pytest.raises(ValueError, match=r"clip_weights has shape \[2\] for a batch of 5 examples; give one weight"):
        exact_fim(*case.arguments, clip_weights=[0.5, 0.5], **told)
    with pytest.raises(ValueError, match=r"clip_weights of example 1 is 0, not in \(0, 1\]"):
        exact_fim(*case.arguments, clip_weights=[0.5, 0.0, 1, 1, 1], **told)


@pytest.mark.parametrize("rate", [None, 0.2])
@pytest.mark.parametrize("shares", [None, {"a": 0.6, "b": 0.8}])
def test_divergence(rate: float | None, shares: dict[str, float] | None) -> None:
    """KL between the releases of ωφ(‖g‖)g and ωφ(‖g′‖)g′, written down."""
    generator = torch.Generator().manual_seed(0)
    parts, limits = 1 if shares is None else 2, [0.9] if shares is None else [0.9 * share for share in shares.values()]
    g, h = torch.randn(2, 5, parts, 3, generator=generator, dtype=torch.float64)
    mechanism = Mechanism.build(0.9, 0.7, CLIP, "poisson" if rate else None, rate, shares=shares)
    products = torch.stack([(g * g).sum(-1), (h * h).sum(-1), (g * h).sum(-1)])
    got = mechanism.divergence(products if shares else products[..., 0], WEIGHTS)

    scale = WEIGHTS[:, None, None] / (0.9 * 0.7)
    u, v = ((scale * x * CLIP.scale(x.norm(dim=-1), g.new_tensor(limits))[..., None]).flatten(1) for x in (g, h))
    true = step_divergence((u * u).sum(1), (v * v).sum(1), (u * v).sum(1), rate) / (rate or 1)
    assert torch.allclose(got, true, rtol=1e-12)


def test_captured_passes_read_weights_anew() -> None:
    """A graph tells batches with weights from those without."""
    _, gradients = weighted("mlp")
    plain = replace(gradients, examples=replace(gradients.examples, clip_weights=None))
    other = replace(gradients, examples=replace(gradients.examples, clip_weights=WEIGHTS.flip(0).to(DEVICE)))
    assert signature(gradients) == signature(other) != signature(plain)
    assert len(gradients.examples.tensors) == len(plain.examples.tensors) + 1
    assert torch.equal(gradients.examples[torch.tensor([3, 0])].clip_weights.cpu(), WEIGHTS[[3, 0]])  # type: ignore[union-attr]


def test_check_names_the_first() -> None:
    check_clip_weights(torch.tensor([1.0, 1e-9]))
    with pytest.raises(ValueError, match="of example 'b' is inf, not in .*could exceed max_grad_norm"):
        check_clip_weights(torch.tensor([1.0, float("inf")]), ["a", "b"])
