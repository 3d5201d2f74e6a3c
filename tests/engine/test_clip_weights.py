"""clip_weights: what is released of an example is ωφ(‖g‖) g, and everything that is told about it is about that.

test_equivalence.py compares every way of training with brute force under such weights.
"""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from opacus.accountants import RDPAccountant
from opacus.accountants.analysis.rdp import compute_rdp, get_privacy_spent
from torch import Tensor, nn

from tests.cases import DEVICE, relative_error
from tests.engine.brute_force import C, Pass, Run, Truth, clipped_and_jacobian, clipped_gradients, make, random_state
from tests.engine.brute_force import train as train_run
from tests.engine.loops import data, loader, network
from tests.engine.test_equivalence import EVERYTHING, QUESTIONS, SIGMA, WEIGHTS, N, trained
from tests.engine.ways import LOSS, Calling, start
from torchfil import Accounting, FILPrivacyEngine
from torchfil.attribution import PLIS
from torchfil.report import load

DELTA = 1e-5
POISSON: dict[str, Any] = {"noise_multiplier": SIGMA, "amplification": None}


@cache
def rdp(level: int, q: float) -> Any:
    return compute_rdp(q=q, noise_multiplier=SIGMA * 1.05**level, steps=1, orders=RDPAccountant.DEFAULT_ALPHAS)


def epsilon_by_hand(ratios: list[float], q: float) -> float:
    """ε of one example from its ‖g̃‖/C at every step; σC/‖g̃‖ is rounded down to the grid, as documented."""
    total = sum(rdp(math.floor(math.log(1 / ratio) / math.log(1.05) + 1e-5), q) for ratio in ratios)
    return float(get_privacy_spent(orders=RDPAccountant.DEFAULT_ALPHAS, rdp=total, delta=DELTA)[0])


@pytest.mark.parametrize("way", ["loop", "physical batches, hooks"])
def test_individual_epsilon(way: str) -> None:
    run = trained(way, **POISSON, clip_weights=WEIGHTS)
    truth, q = Truth(run), run.private.sample_rate
    ids = [int(WEIGHTS.argmin()), int(WEIGHTS.argmax())]  # each takes its time
    own = [epsilon_by_hand(ratios, q) for ratios in torch.stack(truth.ratios, dim=1)[ids].tolist()]
    assert run.engine.get_individual_epsilon(ids, delta=DELTA).value.tolist() == pytest.approx(own, rel=1e-6)
    assert run.engine.get_epsilon(DELTA) >= max(own) > min(own)


@pytest.mark.parametrize("way", ["loop", "train_step"])
def test_recorded_passes(way: str) -> None:
    """Probes are random, but along the gradient nothing is: PLIS and D of the recorded pass, which is the usual one."""
    options = {**EVERYTHING, "track": ("plis",), "estimator": "weight-probes", "num_probes": 2}
    run = trained(way, clip_weights=WEIGHTS, **options)
    truth = Truth(run)
    assert relative_error(run.engine.get_plis(), truth.plis) < 1e-6
    assert relative_error(run.engine.get_guess("label").divergence.value, truth.divergences["label"]) < 1e-6


def test_looks_at_the_data_set() -> None:
    """PLIS and refreshed norms at the present weights are those of the scaled gradient; PLIS without noise is plain."""
    run = trained("loop", noise_multiplier=SIGMA, clip_weights=WEIGHTS)
    x, y = (part.to(DEVICE) for part in data(N).tensors)
    now = Pass(random_state(), run.module.state_dict(), x, y, list(range(N)))
    g, jacobian = clipped_and_jacobian(run.plain, now, clip_weights=WEIGHTS)
    slopes = 2 * torch.einsum("bpd,bp->bd", jacobian, g) / (SIGMA * C) ** 2
    assert relative_error(run.engine.plis([7, 0, 11]), slopes[[7, 0, 11]]) < 1e-6
    run.engine.refresh_norms()
    assert relative_error(run.engine._training.run.history.ratio, g.norm(dim=1) / C) < 1e-6
    assert relative_error(run.engine.plis(private=False), PLIS(run.module, LOSS).attribute(x, y)) < 1e-6


def test_divergence_is_that_of_the_simulated_release() -> None:
    """D of one participation against the mean log ratio of noisy releases, drawn or not, of ωφ(‖g‖) g."""
    run = trained("loop", **POISSON, questions=QUESTIONS, clip_weights=WEIGHTS, steps=1)
    begun, q, s = run.passes[0][0], run.private.sample_rate, SIGMA * C
    generator = torch.Generator().manual_seed(0)

    def released(labels: Tensor) -> Tensor:
        at = Pass(begun.state, begun.weights, begun.x, labels, begun.ids)
        return clipped_gradients(run.plain, at, clip_weights=WEIGHTS).cpu() / s

    true, answers = released(begun.y), [released(torch.full_like(begun.y, k)) for k in range(3)]
    for place, u in enumerate(true[:2]):
        drawn = torch.rand(100_000, generator=generator) < q
        seen = torch.randn(100_000, len(u), generator=generator, dtype=torch.float64) + drawn[:, None] * u
        log_density = [torch.log1p(q * torch.expm1(seen @ v - v @ v / 2)) for v in (u, *(a[place] for a in answers))]
        for k, other in enumerate(log_density[1:]):
            ratio = log_density[0] - other
            value = q * float(run.engine.get_guess("label").divergence.value[begun.ids[place], k])
            assert abs(float(ratio.mean()) - value) <= 4 * float(ratio.std()) / 100_000**0.5 + 1e-12


def of_one_parameter() -> nn.Module:
    """The gradient has no direction across it, so that every probe tells the whole truth."""

    def forward(self: Any, x: Tensor) -> Tensor:
        h = self.size * x.sin()
        return torch.stack([h.sum(dim=1), (h * h).sum(dim=1), h[:, 0]], dim=1)

    return Calling(forward, size=nn.Parameter(torch.tensor([0.5], dtype=torch.float64)))


@pytest.mark.parametrize(
    ("build", "steps", "options"),
    [
        (network, 2, {"estimator": "input-probes"}),
        (network, 2, {"estimator": "weight-probes"}),
        (network, 2, {"estimator": "weight-probes", "max_memory": 20_000}),
        (of_one_parameter, 48, {"estimator": "weight-probes", "num_probes": 1, "extra_probes": 8}),
    ],
)
def test_a_trace_scales_with_the_squared_weight(build: Any, steps: int, options: dict[str, Any]) -> None:
    """In runs whose weights do not move."""
    given = {"noise_multiplier": SIGMA, "learning_rate": 0.0, "steps": steps, **options}
    runs = [trained("train_step", build(), clip_weights=weights, **given) for weights in (None, WEIGHTS)]
    plain, scaled = (run.engine.totals.get_trace().value.cpu() for run in runs)
    assert float(plain.max()) > 0
    assert relative_error(scaled, WEIGHTS.square() * plain) < 1e-9


def assert_equal(run: Run, other: Run) -> None:
    """Weights, ledger and ε, bit for bit."""
    for ours, theirs in zip(run.module.parameters(), other.module.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert run.engine.ledger.sums.keys() == other.engine.ledger.sums.keys()
    for name, value in other.engine.ledger.sums.items():
        assert torch.equal(run.engine.ledger.sums[name], value), name
    assert torch.equal(*(each.engine.get_individual_epsilon([0, 4], delta=DELTA).value for each in (run, other)))
    assert run.engine.get_epsilon(DELTA) == other.engine.get_epsilon(DELTA)


@pytest.mark.parametrize("way", ["loop", "hooks", "train_step"])
def test_weights_of_one_change_nothing(way: str) -> None:
    options = {**EVERYTHING, "track": ("diagonal", "plis"), "estimator": "weight-probes", "num_probes": 2}
    plain, ones = (trained(way, clip_weights=w, **options) for w in (None, torch.ones(N)))
    assert_equal(ones, plain)
    FILPrivacyEngine.merge([plain.engine, ones.engine])  # the same mechanism
    noise = torch.Generator(DEVICE).manual_seed(5)
    options = {**plain.options, "clip_weights": torch.ones(N), "noise_generator": noise}
    resumed = make(network(), data(N), **options)
    resumed.engine.load_state_dict(plain.engine.state_dict())
    assert torch.equal(resumed.engine.get_fil().value, plain.engine.get_fil().value)


def given_as(weights: Any, **options: Any) -> Any:
    engine, module = FILPrivacyEngine(), network()
    parts = module, torch.optim.SGD(module.parameters(), lr=0.1), loader(data(N), 6)
    engine.make_private(*parts, clip_weights=weights, **options)
    return engine.clip_weights


def test_they_are_given_by_order_or_by_id() -> None:
    names = [f"person {i}" for i in range(N)]
    expected = torch.ones(N, dtype=torch.float64)
    expected[3] = 0.25
    cases: list[tuple[Any, Any]] = [(expected, {}), (expected.numpy(), {}), (expected.tolist(), {}), ({3: 0.25}, {})]
    for given, options in [*cases, ({"person 3": torch.tensor(0.25)}, {"id_of": names})]:
        weights = given_as(given, **options)
        assert weights.dtype == torch.float64
        assert torch.equal(weights.cpu(), expected)
    with pytest.raises(ValueError, match="twice"):
        given_as(expected, accounting=Accounting(clip_weights=expected))
    engine = start(network(), data(N), "auto", clip_weights=expected)[0]
    expected_before = expected.clone()
    expected.zero_()
    engine.clip_weights.zero_()  # what was given, and what is told, may change afterwards
    assert torch.equal(engine.clip_weights.cpu(), expected_before)
    with pytest.raises(ValueError, match="'person 3'"):
        given_as({"person 3": 2.0}, id_of=names)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({4: 1.5}, ValueError, "example 4 is 1.5"),
        ({4: 0.0}, ValueError, "leave it out"),
        ({4: -1.0, 5: 2.0}, ValueError, "1 more"),
        ({4: math.nan}, ValueError, "nan"),
        ({99: 0.5}, KeyError, "99"),
        ([0.5] * 3, ValueError, "shape"),
        (0.5, ValueError, "shape"),
    ],
)
def test_what_does_not_fit_is_refused(given: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        given_as(given)


def kept(weights: Any = WEIGHTS) -> Run:
    return make(network(), data(N), criterion=LOSS, clip_weights=weights, track=("fim",), **POISSON)


def test_a_resumed_run_is_the_truth(tmp_path: Path) -> None:
    whole, first = train_run(kept(), steps=6), train_run(kept(), steps=3)
    path = tmp_path / "checkpoint.pt"
    first.engine.save_checkpoint(path=path, module=first.model, optimizer=first.optimizer)
    second = kept({i: float(w) for i, w in enumerate(WEIGHTS)})
    second.engine.load_checkpoint(path=path, module=second.model, optimizer=second.optimizer)
    train_run(second, steps=3)
    assert_equal(second, whole)
    changed = WEIGHTS.clone()
    changed[4] = 0.125
    for other in (changed, None):
        run = kept(other)
        with pytest.raises(ValueError, match="clip_weights"):
            run.engine.load_state_dict(first.engine.state_dict())
        assert run.engine.ledger is None
        with pytest.raises(ValueError, match="clip_weights"):
            FILPrivacyEngine.merge([first.engine, train_run(run, steps=3).engine])


def test_tables_and_run_files(tmp_path: Path) -> None:
    for weights in (WEIGHTS, None):
        engine = train_run(kept(weights), steps=1).engine
        names, columns = engine.leakage_columns([5, 2])
        saved = load(engine.save_run(tmp_path / f"{weights is None}.parquet", delta=DELTA, pictures=0))
        assert names == [5, 2]
        assert saved.clip_weights.tolist() == ([1.0] * N if weights is None else WEIGHTS.tolist())
        assert ("clip_weight" in columns) == ("clip_weight" in saved.columns) == (weights is not None)
        assert weights is None or columns["clip_weight"] == WEIGHTS[[5, 2]].tolist()
