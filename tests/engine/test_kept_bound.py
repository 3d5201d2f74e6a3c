"""``min_mse_bound``: an example's weight falls as it nears the bound that is to be kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.cases import DEVICE
from tests.engine.brute_force import SIGMA, C, clipped_and_jacobian, images, make, train
from torchfil import Accounting
from torchfil.accounting.sparing import weights_for_the_rest
from torchfil.report.run_file import load
from torchfil.report.writer import write_report


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def run(way: str = "auto", steps: int = 12, **options: Any) -> Any:
    return train(make(network(), images(), criterion=nn.CrossEntropyLoss(), **options), way=way, steps=steps)


@pytest.fixture(scope="module")
def free() -> torch.Tensor:
    """The bounds at the end of a run that spares nobody."""
    return run().engine.get_mse_bound().value


@pytest.mark.parametrize("way", ["auto", "train_step"])
def test_every_bound_is_kept_and_nobody_else_is_spared(free: torch.Tensor, way: str) -> None:
    kept = 2 * float(free.min())
    spared = run(way, min_mse_bound=kept)
    bounds, weights = spared.engine.get_mse_bound().value, spared.engine.clip_weights
    assert float(free.min()) < kept <= float(bounds.min())
    assert bool((weights[free < kept] < 1).all())
    assert bool((weights[bounds > 2 * kept] == 1).all())


@pytest.mark.parametrize("way", ["auto", "train_step"])
def test_what_is_booked_is_that_of_the_weights_at_each_step(free: torch.Tensor, way: str) -> None:
    """Brute force, with weights that follow from its own sums."""
    kept = 2 * float(free.min())
    spared = run(way, min_mse_bound=kept)
    weights = torch.ones(len(free), dtype=torch.float64, device=DEVICE)
    traces = torch.zeros_like(weights)
    for passes, released in zip(spared.passes, spared.released, strict=True):
        total = torch.zeros_like(released)
        for begun in passes:
            if not begun.ids:
                continue
            clipped, jacobian = clipped_and_jacobian(spared.plain, begun)
            omega = weights[begun.ids]
            total += (omega[:, None] * clipped).sum(dim=0)
            traces[begun.ids] += omega.square() * jacobian.square().sum(dim=(1, 2)) / (SIGMA * C) ** 2
            weights[begun.ids] = weights_for_the_rest(kept * traces[begun.ids] / 16)
        assert float((released - total).norm()) < 1e-6 * C
    assert torch.allclose(spared.engine.totals.get_trace().value.to(traces), traces, rtol=1e-6)
    assert torch.equal(spared.engine.clip_weights, weights)
    assert float(weights.min()) < 1


def test_given_weights_come_first(free: torch.Tensor) -> None:
    given = torch.full((len(free),), 0.5, dtype=torch.float64)
    spared = run(min_mse_bound=2 * float(free.median()), clip_weights=given)  # which leaves a quarter of the leakage
    weights = spared.engine.clip_weights.cpu()
    assert bool((weights <= given).all())
    assert 0 < int((weights < given).sum()) < len(free)


def test_a_resumed_run_goes_on_with_its_weights(free: torch.Tensor) -> None:
    kept = 2 * float(free.min())
    first = run(min_mse_bound=kept)
    state = first.engine._training.run.state_dict()
    other = make(network(), images(), criterion=nn.CrossEntropyLoss(), min_mse_bound=kept)
    other.engine._training.run.load_state_dict(state)
    before = first.engine.clip_weights
    assert torch.equal(other.engine.clip_weights, before)
    train(first, steps=len(first.passes) + 3)
    assert not torch.equal(first.engine.clip_weights, before)
    assert torch.equal(other.engine.clip_weights, before), "a state is a copy"
    assert float(other.engine.clip_weights.min()) < 1
    unlike = make(network(), images(), criterion=nn.CrossEntropyLoss(), min_mse_bound=2 * kept)
    with pytest.raises(ValueError, match="keeps min_mse_bound"):
        unlike.engine._training.run.load_state_dict(state)


def test_estimates_by_probes_do_not_flatter(free: torch.Tensor) -> None:
    """Weights follow estimates of the past only, so that the sums of estimates stay unbiased."""
    kept, ratios = 2 * float(free.min()), []
    for seed in range(10):
        spared = make(
            network(),
            images(),
            criterion=nn.CrossEntropyLoss(),
            min_mse_bound=kept,
            estimator="weight-probes",
            num_probes=1,
        )
        spared.engine._training.run.generator.manual_seed(seed)
        exact = torch.zeros(len(free), dtype=torch.float64, device=DEVICE)
        for step in range(1, 10):
            weights = spared.engine.clip_weights
            train(spared, steps=step)
            for begun in spared.passes[-1]:
                if begun.ids:
                    jacobian = clipped_and_jacobian(spared.plain, begun)[1]
                    part = jacobian.square().sum(dim=(1, 2)) / (SIGMA * C) ** 2
                    exact[begun.ids] += weights[begun.ids].square() * part
        ratios.append(float(spared.engine.totals.get_trace().value.sum() / exact.sum()))
    mean = torch.tensor(ratios)
    assert abs(float(mean.mean()) - 1) < 4 * float(mean.std()) / len(ratios) ** 0.5


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"min_mse_bound": 0.0}, "positive, finite"),
        ({"min_mse_bound": 1.0, "fil_rate": 0.5}, "leave out rel_error and fil_rate"),
        ({"min_mse_bound": 1.0, "rel_error": 0.1}, "leave out rel_error and fil_rate"),
    ],
)
def test_what_cannot_be_kept_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Accounting(**options)


def test_run_file_and_report_tell_of_it(free: torch.Tensor, tmp_path: Path) -> None:
    kept = 2 * float(free.min()) / SIGMA**2
    spared = run(min_mse_bound=kept, noise_multiplier=1.0)
    saved = load(spared.engine.save_run(tmp_path / "run.fil", delta=1e-5, pictures=0))
    assert saved.about["mechanism"]["min_mse_bound"] == kept
    assert np.array_equal(saved.clip_weights, spared.engine.clip_weights.cpu().numpy())
    page = write_report(saved, tmp_path / "private").read_text()
    assert "Weights are those at the end of the run" in page
    assert "each followed from its own example" in page
