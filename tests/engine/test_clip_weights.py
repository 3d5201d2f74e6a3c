"""clip_weights: what is released of an example is ωφ(‖g‖) g, and everything that is told about it
is about that.

test_equivalence.py compares every way of training with brute force under such weights.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.cases import DEVICE, relative_error
from tests.engine.brute_force import C, Pass, Truth, clipped_and_jacobian, random_state
from tests.engine.loops import data, loader, network
from tests.engine.test_epsilon import spent
from tests.engine.test_equivalence import EVERYTHING, LIMITS, SIGMA, WEIGHTS, N, trained
from tests.engine.ways import LOSS, Calling
from torchfil import FILPrivacyEngine
from torchfil.attribution import PLIS

DELTA = 1e-5
POISSON: dict[str, Any] = {"noise_multiplier": SIGMA, "amplification": None}


def test_individual_epsilon() -> None:
    """From ‖g̃‖/C at every step; σC/‖g̃‖ is rounded down to the grid, as documented."""
    run = trained("loop", **POISSON, clip_weights=WEIGHTS)
    ids = [int(WEIGHTS.argmin()), int(WEIGHTS.argmax())]  # each takes its time
    own = []
    for ratios in torch.stack(Truth(run).ratios, dim=1)[ids].tolist():
        levels = [math.floor(math.log(1 / ratio) / math.log(1.05) + 1e-5) for ratio in ratios]
        own.append(spent([SIGMA * 1.05**level for level in levels], run.private.sample_rate, DELTA))
    assert run.engine.get_individual_epsilon(ids, delta=DELTA).value.tolist() == pytest.approx(
        own, rel=1e-6
    )
    assert run.engine.get_epsilon(DELTA) >= max(own) > min(own)


@pytest.mark.parametrize("way", ["loop", "train_step"])
def test_recorded_passes(way: str) -> None:
    """Probes are random, but along the gradient nothing is: PLIS and D of the recorded pass, which
    is the usual one.
    """
    options = {**EVERYTHING, "track": ("plis",), "estimator": "weight-probes", "num_probes": 2}
    run = trained(way, clip_weights=WEIGHTS, **options)
    truth = Truth(run)
    assert relative_error(run.engine.get_plis(), truth.plis) < 1e-6
    assert (
        relative_error(
            run.engine.get_guess("label").divergence.value, truth.divergences["label"][1]
        )
        < 1e-6
    )


@pytest.mark.parametrize("limits", [{"max_grad_norm": C}, LIMITS])
def test_looks_at_the_data_set(limits: dict[str, Any]) -> None:
    """PLIS and refreshed norms at the present weights are those of the scaled gradient.

    PLIS without noise is plain.

    Clipped parameter by parameter, there is no recorded pass.
    """
    run = trained("loop", noise_multiplier=SIGMA, clip_weights=WEIGHTS, **limits)
    x, y = (part.to(DEVICE) for part in data(N).tensors)
    now = Pass(random_state(), run.module.state_dict(), x, y, list(range(N)))
    g, jacobian = clipped_and_jacobian(
        run.plain, now, clip_weights=WEIGHTS, max_grad_norm=limits["max_grad_norm"]
    )
    slopes = 2 * torch.einsum("bpd,bp->bd", jacobian, g) / run.noise_std**2
    assert relative_error(run.engine.plis([7, 0, 11]), slopes[[7, 0, 11]]) < 1e-6
    run.engine.refresh_norms()
    assert (
        relative_error(
            run.engine._training.run.history.ratio, g.norm(dim=1) * SIGMA / run.noise_std
        )
        < 1e-6
    )
    assert (
        relative_error(run.engine.plis(private=False), PLIS(run.module, LOSS).attribute(x, y))
        < 1e-6
    )


def of_one_parameter() -> nn.Module:
    """The gradient has no direction across it, so that every probe tells the whole truth."""

    def forward(self: Any, x: Tensor) -> Tensor:
        h = self.size * x.sin()
        return torch.stack([h.sum(dim=1), (h * h).sum(dim=1), h[:, 0]], dim=1)

    return Calling(forward, size=nn.Parameter(torch.tensor([0.5], dtype=torch.float64)))


@pytest.mark.parametrize(
    ("build", "steps", "options"),
    [
        (network, 2, {"estimator": "weight-probes", "max_memory": 20_000}),
        (of_one_parameter, 56, {"estimator": "weight-probes", "num_probes": 1}),
    ],
)
def test_a_trace_scales_with_the_squared_weight(
    build: Any, steps: int, options: dict[str, Any]
) -> None:
    """In runs whose weights do not move, where no prediction is shared among examples."""
    given = {"noise_multiplier": SIGMA, "learning_rate": 0.0, "steps": steps, **options}
    given |= {"poisson_sampling": False, "num_probes": 1}
    plain, scaled = (
        trained("train_step", build(), clip_weights=weights, **given)
        .engine.totals.get_trace()
        .value.cpu()
        for weights in (None, WEIGHTS)
    )
    assert float(plain.max()) > 0
    assert relative_error(scaled, WEIGHTS.square() * plain) < 1e-9


def given_as(weights: Any, **options: Any) -> Any:
    engine, module = FILPrivacyEngine(), network()
    parts = module, torch.optim.SGD(module.parameters(), lr=0.1), loader(data(N), 6)
    engine.make_private(*parts, clip_weights=weights, **options)
    return engine.clip_weights


def test_they_are_given_by_order_or_by_id() -> None:
    names = [f"person {i}" for i in range(N)]
    expected = torch.ones(N, dtype=torch.float64)
    expected[3] = 0.25
    cases: list[tuple[Any, Any]] = [
        (expected, {}),
        (expected.numpy(), {}),
        (expected.tolist(), {}),
        ({3: 0.25}, {}),
    ]
    for given, options in [*cases, ({"person 3": torch.tensor(0.25)}, {"id_of": names})]:
        weights = given_as(given, **options)
        assert weights.dtype == torch.float64
        assert torch.equal(weights.cpu(), expected)


@pytest.mark.parametrize(
    ("given", "options", "error", "noun"),
    [
        ({4: 1.5}, {}, ValueError, "example 4 is 1.5"),
        ({4: 0.0}, {}, ValueError, "leave it out"),
        ({4: math.nan}, {}, ValueError, "nan"),
        ({99: 0.5}, {}, KeyError, "99"),
        ([0.5] * 3, {}, ValueError, "shape"),
    ],
)
def test_what_does_not_fit_is_refused(given: Any, options: Any, error: Any, noun: str) -> None:
    with pytest.raises(error, match=noun):
        given_as(given, **options)
