"""Stopping and resuming, all or nothing; pausing, tables and groups.

The statistics of a probed run.
"""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from opacus.schedulers import ExponentialGradClip, ExponentialNoise
from opacus.utils.batch_memory_manager import BatchMemoryManager
from scipy import stats
from torch import nn

from tests.cases import DEVICE, grouped
from tests.engine.loops import SIGMA, C, data, loader, make, network, step, train
from torchfil import FILPrivacyEngine

NOBODY = torch.zeros(0, dtype=torch.long)
OPTIONS: dict[str, Any] = {
    "noise_multiplier": SIGMA, "max_grad_norm": C, "track": ("diagonal", "plis"), "fil_rate": 0.7,
}  # fmt: skip


def start(seed: int = 0, groups: bool = False) -> Any:
    torch.manual_seed(seed)
    module = network()
    engine = FILPrivacyEngine()
    parameters: Any = (
        [{"params": [p]} for p in module.parameters()] if groups else module.parameters()
    )
    optimizer: Any = torch.optim.SGD(parameters, lr=0.2, momentum=0.9)
    noise = torch.Generator(device=DEVICE).manual_seed(8)
    return engine, *engine.make_private(
        module, optimizer, loader(data(60)), **grouped(noise_generator=noise, **OPTIONS)
    )


def epochs(model: Any, optimizer: Any, private: Any, count: int) -> None:
    for _ in range(count):
        for batch in private:
            step(model, optimizer, batch)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


class TestResume:
    @pytest.mark.parametrize("kind", ["run.pt", "folder/"])
    def test_bit_for_bit(self, tmp_path: Path, kind: str) -> None:
        whole, model, optimizer, private = start()
        epochs(model, optimizer, private, 1)
        path = f"{tmp_path}/{kind}"
        whole.save_checkpoint(path=path, module=model, optimizer=optimizer)
        epochs(model, optimizer, private, 1)

        second, model, optimizer, private = start(seed=99)
        second.load_checkpoint(path=path, module=model, optimizer=optimizer)
        epochs(model, optimizer, private, 1)
        assert same(second.state_dict(), whole.state_dict())
        assert second.get_epsilon(1e-5) == whole.get_epsilon(1e-5)
        assert [path.name for path in tmp_path.iterdir()] == [kind.strip("/")], (
            "no temporary file is left"
        )

    def test_probes_are_those_of_seed_step_and_piece(self) -> None:
        """A step that was refused and is taken again has the same.

        Every step, batch, piece and use has its own.
        """
        run = train(data(40), steps=1, num_probes=2, seed=5).engine._training.run
        found = {
            run.probe_seeds(2, use, piece) for use in ("probes", "others") for piece in range(2)
        }
        assert run.probe_seeds(2, "probes", 1) == run.probe_seeds(2, "probes", 1)
        for change in (
            lambda: run.staged.append(run),
            run.clear_batch,
            lambda: run.history.step(NOBODY, NOBODY, 1, 1),
        ):
            change()
            found.add(run.probe_seeds(2, "probes", 0))
        assert len(found) == 6
        assert len({seed for seeds in found for seed in seeds}) == 12

    def test_schedules_go_on_from_where_a_checkpoint_was_taken(self) -> None:
        found, file = [], io.BytesIO()
        for method in ("save_checkpoint", "load_checkpoint"):
            engine, model, optimizer, private = start()
            noise, clip = (
                ExponentialNoise(optimizer, gamma=0.8),
                ExponentialGradClip(optimizer, gamma=0.9),
            )
            if method == "save_checkpoint":
                epochs(model, optimizer, private, 1)
                noise.step()
                clip.step()
            schedulers = {"noise_scheduler": noise, "grad_clip_scheduler": clip}
            getattr(engine, method)(path=file, module=model, optimizer=optimizer, **schedulers)
            file.seek(0)
            found.append((optimizer.noise_multiplier, optimizer.max_grad_norm))
        assert found[0] == found[1] == pytest.approx((0.8 * SIGMA, 0.9 * C))


class TestAllOrNothing:
    def test_no_state_is_loaded_within_a_logical_batch(self) -> None:
        engine, model, optimizer, private = start()
        state = engine.state_dict()
        with BatchMemoryManager(
            data_loader=private, max_physical_batch_size=3, optimizer=optimizer
        ) as physical:
            for batch in physical:
                epochs(model, optimizer, [batch], 1)
                if optimizer.inside_logical_batch:
                    with pytest.raises(RuntimeError, match="discard_partial_batch"):
                        engine.load_state_dict(state)
        assert engine.accountant.history[-1][2] == len(private)


class TestPaused:
    def test_totals_become_lower_bounds_loudly(self) -> None:
        engine, model, optimizer, private = start()
        epochs(model, optimizer, private, 1)
        complete = engine.totals.get_trace().value.clone()
        with pytest.warns(UserWarning, match="paused"), engine.paused():
            epochs(model, optimizer, private, 1)
        paused = engine.ledger.sums["paused"]
        assert paused.sum() > 0
        with pytest.warns(UserWarning, match="paused steps"):
            kinds = engine.get_fil().kind, engine.get_mse_bound().kind, engine.leakage()["fil_kind"]
        assert kinds[:2] == ("lower bound", "upper bound")
        assert [kind == "lower bound" for kind in kinds[2]] == (paused > 0).tolist()
        assert torch.equal(engine.ledger.sums["trace"], complete)
        assert engine.get_fil((paused == 0).nonzero().flatten().tolist()).kind == "estimate"
        assert (
            engine.accountant.history[-1][2]
            == engine._training.run.history.steps
            == 2 * len(private)
        )


def frozen_run(n: int, passes: int, draws: int = 2, **options: Any) -> FILPrivacyEngine:
    """A run whose weights do not change."""
    torch.manual_seed(0)
    module, engine = nn.Linear(5, 3).double().to(DEVICE), FILPrivacyEngine()
    plain = loader(
        data(n), n // (2 if n == 24 else 4), generator=torch.Generator().manual_seed(draws)
    )
    given = grouped(noise_multiplier=SIGMA, max_grad_norm=C, **options)
    made = engine.make_private(module, torch.optim.SGD(module.parameters(), lr=0.0), plain, **given)
    epochs(*made, passes)
    return engine


def check_calibration(
    options: dict[str, Any],
    runs: int,
    critical: float = 4.0,
    coverage: Any = (0.90, 0.99),
    rtol: float = 0.15,
) -> None:
    """Frozen weights, the same batches: many seeds of the probes against the exact sums.

    A bias of one example is looked for, and one that all share: their mean over a run is known far
    better. A skipped step is one for all, which leaves less to be learned of the spread from each
    run.
    """
    truth = frozen_run(24, 8, estimator="exact").totals.get_trace().value
    results = [frozen_run(24, 8, seed=s, **options).totals.get_trace() for s in range(runs)]
    values = torch.stack([r.value for r in results])
    z = (values.mean(dim=0) - truth) / (values.std(dim=0) / math.sqrt(runs))
    assert (z.abs() < critical).all()
    by_run = (values / truth).mean(dim=1)
    assert abs(float(by_run.mean()) - 1) < critical * float(by_run.std()) / math.sqrt(runs)
    ends = [r.interval(0.95, "probes") for r in results]
    covered = torch.stack([(low <= truth) & (truth <= high) for low, high in ends])
    assert coverage[0] <= covered.double().mean().item() <= coverage[1]
    reported = torch.stack([r.standard_error.square() for r in results]).mean(dim=0).sqrt()
    assert torch.allclose(reported.mean(), values.std(dim=0).mean(), rtol=rtol)


SKIPPED = {"num_probes": 3, "fil_rate": 0.5}


@pytest.mark.slow
def test_probed_runs_are_unbiased_and_their_errors_calibrated() -> None:
    check_calibration({"num_probes": 3}, 30)
    # of skipped steps, errors are foreseen, rather too large
    check_calibration(SKIPPED, 60, coverage=(0.90, 1.0), rtol=1.0)


def test_few_probed_runs_are_unbiased_and_their_errors_no_worse_than_told() -> None:
    """What few runs can tell: Student's t, as likely as four standard deviations are."""
    critical = float(stats.t.isf(stats.norm.sf(4), 7))
    check_calibration({"num_probes": 3}, 8, critical, coverage=(0.85, 1.0), rtol=0.4)


def test_sampling_error_is_the_spread_over_batches() -> None:
    """Frozen weights, many draws of the batches: the spread of η̄² about its mean is what one run
    reports.

    Examples are drawn independently: 144 of them in 10 runs tell as much of the spread as 24 in 60.
    """
    leakages = [frozen_run(144, 2, seed, estimator="exact").totals for seed in range(10)]
    traces = torch.stack([leakage.get_trace().value for leakage in leakages])
    squares = torch.stack([leakage.ledger.sums["trace_square"].double() for leakage in leakages])
    reported = squares.mean(dim=0).sqrt()
    assert torch.allclose(reported.mean(), traces.std(dim=0).mean(), rtol=0.1)
    never = leakages[0].ledger.sums["participations"] == 0
    assert torch.equal(torch.isinf(leakages[0].get_sampling_error()), never)
    public = make(data(96), poisson_sampling=False)
    epochs(*public[2:], 1)
    assert not public[0].totals.get_sampling_error().any()
