from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.refused import all_refused
from torchfil.clipping import (
    ClipFunction,
    available_clips,
    get_clip,
    register_clip,
    supremum_of_ratio,
)

NORMS = torch.cat([torch.zeros(1), torch.logspace(-6, 8, 20_001)]).double()


@pytest.mark.parametrize("name", ["smooth", "gelu", "hard", "rsqrt"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_calibrated_clip_never_exceeds_max_grad_norm(name: str, dtype: torch.dtype) -> None:
    clip = get_clip(name)
    assert clip.max_norm(0.7) == 0.7
    norms = torch.cat([NORMS, torch.linspace(0.01, 3.0, 100_001)]).to(dtype)
    assert (clip.scale(norms, 0.7) * norms).max() <= 0.7 * (1 + 2 * torch.finfo(dtype).eps)


class TestSmooth:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_values_and_derivatives_are_those_of_the_formula(self, dtype: torch.dtype) -> None:
        """At the threshold itself, where the formula changes its form, too.

        No power overflows or underflows.
        """
        clip, eps = get_clip("smooth"), torch.finfo(dtype).eps
        t = torch.cat(
            [torch.tensor([0.0, 1.0]), torch.logspace(-30, 30, 6001), torch.linspace(0.5, 2, 1001)]
        ).to(dtype)
        wide = t.double()
        below = wide <= 1
        inside = 1 + torch.where(below, wide, 1 / wide) ** 8
        value = torch.where(below, torch.ones_like(wide), wide) * inside ** (1 / 8)
        slope = torch.where(below, wide, torch.ones_like(wide)) ** 7 * inside ** (-7 / 8)
        assert ((clip.c(t).double() / value - 1).abs() < 4 * eps).all()
        for found in (clip.derivative(t), torch.func.vmap(torch.func.grad(clip.c))(t)):
            close = {"rtol": 32 * eps, "atol": torch.finfo(dtype).tiny}
            assert torch.allclose(found.double(), slope, **close)

    def test_second_derivatives_are_finite_and_right(self) -> None:
        """c″ = 7 t⁶ (1 + t⁸)^(−15/8), at 0 and at the threshold, too.

        In float32 for huge norms as well.
        """
        curvature = torch.func.vmap(torch.func.grad(torch.func.grad(get_clip("smooth").c)))
        t = torch.tensor([0.0, 0.3, 0.999, 1.0, 1.001, 2.0, 7.0], dtype=torch.float64)
        assert torch.allclose(curvature(t), 7 * t**6 * (1 + t**8) ** (-15 / 8), rtol=1e-9, atol=0)
        assert torch.equal(curvature(torch.tensor([1e-30, 1e25])), torch.zeros(2))


def test_the_papers_gelu_exceeds_by_its_true_constant() -> None:
    clip = get_clip("gelu-paper")
    t = torch.linspace(1, 2, 1_000_001, dtype=torch.float64)
    reached = (clip.scale(t, 1.0) * t).max().item()
    assert reached == pytest.approx(1.115219, abs=1e-6)
    assert reached > 1.115, "the paper's constant is rounded down and no bound"
    assert reached <= clip.norm_bound == clip.max_norm(1.0)


@pytest.mark.parametrize("name", ["smooth", "gelu", "gelu-paper", "hard", "rsqrt"])
def test_scale_derivative_is_the_derivative_of_scale(name: str) -> None:
    clip = get_clip(name)
    norms = torch.tensor(
        [0.0, 0.1, 0.5, 0.9, 1.3, 2.0, 30.0], dtype=torch.float64, requires_grad=True
    )
    (want,) = torch.autograd.grad(clip.scale(norms, 0.75).sum(), norms)
    assert torch.allclose(clip.scale_derivative(norms.detach(), 0.75), want, rtol=1e-12, atol=1e-14)


def test_register_checks_the_name_the_bound_the_shape_and_the_derivative(
    clean_registry: None,
) -> None:
    before = available_clips()
    refused = {
        "clip='soft'": lambda: get_clip("soft"),
        r"reaches 1\.115219": lambda: register_clip(
            "g", lambda t: nn.functional.gelu(t - 1) + 1, norm_bound=1.0
        ),
        "grows without bound": lambda: register_clip("none", torch.ones_like),
        "finite difference": lambda: register_clip(
            "wrong", lambda t: 1 + t, derivative=torch.zeros_like
        ),
        "overwrite": lambda: register_clip("gelu", lambda t: 1 + t),
        r"not at t = \[0.0\]": lambda: register_clip("infinite", lambda t: 1 + t + 1 / t),
        "smallest t": lambda: register_clip("steep", lambda t: t * t + 1e-30),
        "elementwise": lambda: register_clip("number", lambda t: 1.0),  # type: ignore[arg-type, return-value]
    }
    all_refused(refused)
    assert available_clips() == before


def test_a_bound_near_zero_is_found(clean_registry: None) -> None:
    clip = register_clip("early", lambda t: t * t + 1e-9)
    assert clip.norm_bound == pytest.approx(0.5 / 1e-9**0.5, abs=1e-3)


def test_a_users_clip_is_calibrated(clean_registry: None) -> None:
    def softplus(t: Tensor) -> Tensor:
        return torch.nn.functional.softplus(4 * (t - 1)) / 4 + 0.9

    clip = register_clip("softplus", softplus)
    assert clip.norm_bound >= supremum_of_ratio(softplus) > 1
    assert (clip.scale(NORMS, 2.0) * NORMS).max().item() <= 2.0
    assert get_clip("softplus") is clip
    assert get_clip(clip) is clip


@pytest.fixture
def clean_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    from torchfil import clipping

    registry: dict[str, ClipFunction] = dict(clipping._REGISTRY)
    monkeypatch.setattr(clipping, "_REGISTRY", registry)
