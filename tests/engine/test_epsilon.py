"""ε: Opacus's own, and each example's."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from opacus import PrivacyEngine
from opacus.accountants import RDPAccountant
from opacus.accountants.analysis.rdp import compute_rdp, get_privacy_spent
from torch import nn
from torch.utils.data import RandomSampler, TensorDataset

from tests.cases import DEVICE
from tests.engine.loops import SIGMA, C, Trained, data, exact_epsilon, loader, network, train
from torchfil import FILPrivacyEngine, bounds
from torchfil.accounting.norms import NormHistory
from torchfil.engine.reading import individual_epsilon
from torchfil.gate.gate import check
from torchfil.gate.policy import Policy
from torchfil.report import load

warnings.filterwarnings("ignore", message="Secure RNG")
warnings.filterwarnings("ignore", message="Optimal order")


@pytest.mark.parametrize("accountant", ["rdp", "prv", "gdp"])
def test_epsilon_equals_stock_opacus(accountant: str) -> None:
    spent = []
    for kind in (PrivacyEngine, FILPrivacyEngine):
        module = network()
        engine = kind(accountant=accountant)
        optimizer: Any = torch.optim.SGD(module.parameters(), lr=0.1)
        model, optimizer, private = engine.make_private(
            module=module,
            optimizer=optimizer,
            data_loader=loader(data(93)),
            noise_multiplier=SIGMA,
            max_grad_norm=C,
        )
        for x, y in private:
            optimizer.zero_grad()
            F.cross_entropy(model(x.to(DEVICE)), y.to(DEVICE)).backward()
            optimizer.step()
        spent.append((engine.get_epsilon(1e-5), engine.accountant.history))
    assert spent[0] == spent[1]


def test_default_accountant_is_rdp_and_the_keyword_call_works() -> None:
    assert FILPrivacyEngine().accountant.mechanism() == "rdp"


def test_make_private_with_epsilon_spends_its_target() -> None:
    module = network()
    engine = FILPrivacyEngine()
    optimizer: Any = torch.optim.SGD(module.parameters(), lr=0.1)
    model, optimizer, private = engine.make_private_with_epsilon(
        module=module,
        optimizer=optimizer,
        data_loader=loader(data(96)),
        target_epsilon=3.0,
        target_delta=1e-3,
        epochs=2,
        max_grad_norm=C,
        num_probes=2,
    )
    for _ in range(2):
        for x, y in private:
            optimizer.zero_grad()
            F.cross_entropy(model(x.to(DEVICE)), y.to(DEVICE)).backward()
            optimizer.step()
    assert 2.9 < engine.get_epsilon(1e-3) <= 3.0
    assert engine._training.run.options.accounting.num_probes == 2


def train_known(passes: int, plain: Any = None, engine: Any = None, **options: Any) -> Trained:
    """Passes over 20 examples in batches of 4 without Poisson sampling."""
    module = network()
    engine = engine or FILPrivacyEngine()
    plain = plain or loader(data(20), 4, shuffle=True)
    make = engine.make_private_with_epsilon if "target_epsilon" in options else engine.make_private
    options = {"max_grad_norm": C, "poisson_sampling": False, "criterion": nn.CrossEntropyLoss(), **options}
    made = make(module, torch.optim.SGD(module.parameters(), lr=0.1), plain, **options)
    for _ in range(passes):
        for x, y in made[2]:
            engine.train_step(x, y)
    return Trained(engine, *made, [])


@pytest.mark.parametrize("accountant", ["rdp", "prv", "gdp"])
def test_without_poisson_sampling_every_participation_counts(accountant: str) -> None:
    """Five passes are five Gaussian mechanisms of multiplier σ for everybody, however many steps a pass has."""
    engine = train_known(5, engine=FILPrivacyEngine(accountant=accountant), noise_multiplier=1.0).engine
    exact, found = exact_epsilon(5**0.5, 1e-5), engine.get_epsilon(1e-5)
    assert exact == pytest.approx(11.48, abs=0.01)
    assert engine.accountant.history == [(1.0, 1.0, 5)]
    assert found > exact - 0.05
    if accountant != "gdp":  # its formula for Poisson sampling is loose at q = 1
        assert found < exact + (0.05 if accountant == "prv" else 1.0)


def test_a_sampler_that_repeats_is_counted() -> None:
    examples = data(20)
    twice = loader(examples, 4, sampler=RandomSampler(examples, num_samples=40))
    run = train_known(3, twice, noise_multiplier=1.0)
    assert run.engine.accountant.history == [(1.0, 1.0, 6)]
    again = train_known(3, twice, target_epsilon=8.0, target_delta=1e-5, epochs=3)
    assert 7.9 <= again.engine.get_epsilon(1e-5) <= 8.0


@pytest.mark.parametrize("accountant", ["rdp", "prv", "gdp"])
def test_noise_for_a_target_epsilon_without_poisson_sampling(accountant: str) -> None:
    engine = FILPrivacyEngine(accountant=accountant)
    run = train_known(2, engine=engine, target_epsilon=8.0, target_delta=1e-5, epochs=2)
    assert 7.9 <= engine.get_epsilon(1e-5) <= 8.0
    assert exact_epsilon(2**0.5 / run.optimizer.noise_multiplier, 1e-5) <= 8.0


def test_individual_epsilon_without_poisson_sampling() -> None:
    """Gradients far above C: everybody's own ε is that of the Gaussian mechanism, of as many steps as it took part."""
    x, y = data(20).tensors
    run = train_known(3, loader(TensorDataset(1e4 * x, y), 4), noise_multiplier=2.0, max_grad_norm=1e-3, clip="hard")
    own = run.engine.get_individual_epsilon(delta=1e-5).value
    assert own.tolist() == pytest.approx([run.engine.get_epsilon(1e-5)] * 20, rel=1e-6)
    assert own.min() >= exact_epsilon(3**0.5 / 2, 1e-5)


def test_participations_go_on_from_a_checkpoint() -> None:
    first = train_known(2, noise_multiplier=1.0)
    other = train_known(0, noise_multiplier=1.0)
    other.engine.load_state_dict(first.engine.state_dict())
    for x, y in other.loader:
        other.engine.train_step(x, y)
    assert other.engine.accountant.history == [(1.0, 1.0, 3)]


def test_known_batches_are_saved_and_reported(tmp_path: Path) -> None:
    """The gate's ε and ReRo are those of the participations; q and the divisor are kept."""
    engine = train_known(5, noise_multiplier=1.0, expected_batch_size=6).engine
    saved = load(engine.save_run(tmp_path / "run.parquet", delta=1e-5))
    assert saved.about["epsilon"] >= exact_epsilon(5**0.5, 1e-5)
    assert not {verdict.rule: verdict for verdict in check(saved, Policy(max_epsilon=8.0))}["max_epsilon"].passed
    assert (saved.about["mechanism"]["sample_rate"], saved.about["mechanism"]["expected_batch_size"]) == (None, 6)
    rero = saved.bounds["rero"]
    known = bounds.rero(rero["prior"], q=1.0, noise_multiplier=1.0, steps=5)
    assert rero["success"] == pytest.approx(known.high.tolist())
    assert "epsilon" not in saved.history  # by step it is not known
    text = engine.report(tmp_path / "report", delta=1e-5).read_text()
    assert "ε counts how often the most frequent example took part" in text
    assert "(“zero-out”)" in text


def test_known_batches_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="torchfil"):
        train_known(2, noise_multiplier=1.0)
    assert sum("no amplification" in record.message for record in caplog.records) == 1


def rounded_epsilon(ratios: list[float], q: float, sigma: float, delta: float, grid: float = 1.05) -> float:
    orders = RDPAccountant.DEFAULT_ALPHAS
    rdp = sum(
        compute_rdp(
            q=q,
            noise_multiplier=sigma * grid ** math.floor(math.log(1 / ratio) / math.log(grid) + 1e-5),
            steps=1,
            orders=orders,
        )
        for ratio in ratios
    )
    return float(get_privacy_spent(orders=orders, rdp=rdp, delta=delta)[0])


def test_history_by_hand() -> None:
    """Unseen: C stands in; seen: the last norm; every step counts for everybody."""
    history = NormHistory(3)
    nobody = torch.zeros(0, dtype=torch.long)
    history.step(torch.tensor([0]), torch.tensor([0.5]), 1.0, 0.1)
    history.step(nobody, torch.zeros(0), 1.0, 0.1)
    history.step(torch.tensor([0, 1]), torch.tensor([0.25, 0.9]), 1.0, 0.1)
    history.step(nobody, torch.zeros(0), 1.0, 0.1)
    got = individual_epsilon(history, torch.arange(3), 1e-5)
    want = [[0.5, 0.5, 0.25, 0.25], [1.0, 1.0, 0.9, 0.9], [1.0] * 4]
    for value, ratios in zip(got.tolist(), want, strict=True):
        assert value == pytest.approx(rounded_epsilon(ratios, 0.1, 1.0, 1e-5), rel=1e-9)
    assert got[0] < got[1] < got[2]


def test_rounding_never_understates() -> None:
    orders = RDPAccountant.DEFAULT_ALPHAS
    for ratio in (0.03, 0.3, 0.62, 0.95, 0.999):
        history = NormHistory(1)
        for _ in range(5):
            history.step(torch.tensor([0]), torch.tensor([ratio]), 1.2, 0.2)
        exact = 5 * compute_rdp(q=0.2, noise_multiplier=1.2 / ratio, steps=1, orders=orders)
        epsilon = get_privacy_spent(orders=orders, rdp=exact, delta=1e-6)[0]
        got = individual_epsilon(history, torch.tensor([0]), 1e-6).item()
        assert max(epsilon, 0) <= got * (1 + 1e-9)
        assert got < 1.2 * max(epsilon, 0.05)


def test_a_changing_noise_multiplier_is_accounted_step_by_step() -> None:
    history = NormHistory(2)
    orders = RDPAccountant.DEFAULT_ALPHAS
    sigmas = [1.0, 0.9, 0.8, 1.1]
    for sigma in sigmas:
        history.step(torch.zeros(0, dtype=torch.long), torch.zeros(0), sigma, 0.1)
    assert history.counts_of(torch.arange(2)).sum(dim=1).tolist() == [4, 4]
    exact = sum(compute_rdp(q=0.1, noise_multiplier=s, steps=1, orders=orders) for s in sigmas)
    epsilon = get_privacy_spent(orders=orders, rdp=exact, delta=1e-5)[0]
    got = individual_epsilon(history, torch.arange(2), 1e-5)
    assert (got >= epsilon * (1 - 1e-9)).all()
    assert (got <= 1.15 * epsilon).all()


def test_worst_example_never_exceeds_the_engines_epsilon() -> None:
    engine = train(data(93), steps=30).engine
    individual = engine.get_individual_epsilon(delta=1e-5)
    assert individual.kind == "estimate"
    assert individual.value.max() <= engine.get_epsilon(1e-5)
    assert individual.value.min() < engine.get_epsilon(1e-5), "calm examples spend less"
    table = engine.leakage(delta=1e-5)
    assert table["individual_epsilon"].tolist() == individual.value.tolist()


def test_an_example_that_always_hits_the_clip_spends_the_engines_epsilon() -> None:
    """A regression target far out of reach: hard clipping leaves a norm of exactly C at every step."""
    x = data(40).tensors[0]
    y = torch.zeros(40, 3, dtype=torch.float64)
    y[0] = 1e6
    run = train(
        TensorDataset(x, y),
        steps=15,
        module=nn.Linear(5, 3).double(),
        loss_fn=F.mse_loss,
        clip="hard",
    )
    engine = run.engine
    assert engine._training.run.history.ratio[0].item() == pytest.approx(1.0, abs=1e-6)
    value = engine.get_individual_epsilon([0], delta=1e-5).value.item()
    assert value == pytest.approx(engine.get_epsilon(1e-5), rel=1e-9)


def test_norm_refresh_looks_everybody_up() -> None:
    """Clipped softly: by hard clipping or nearly so, all norms of this model would be C, up to the history's grid."""
    dataset = data(40)
    stale = train(dataset, steps=6, clip="gelu").engine
    fresh = train(dataset, steps=6, clip="gelu", norm_refresh=1).engine
    assert (fresh._training.run.history.ratio < 1).all(), "nobody keeps the stand-in"
    assert (stale._training.run.history.ratio == 1).any()
    fresh_epsilon = fresh.get_individual_epsilon(delta=1e-5).value
    assert fresh_epsilon.mean() < stale.get_individual_epsilon(delta=1e-5).value.mean()
    fresh.refresh_norms()
    module = network()
    module.load_state_dict(fresh._training.replica.live.state_dict())
    from torchfil.clipping import get_clip
    from torchfil.fisher import ClippedJacobian, ExampleGradients

    gradients = ExampleGradients.build(module, nn.CrossEntropyLoss(), *(t.to(DEVICE) for t in dataset.tensors))
    want = ClippedJacobian(gradients, get_clip("gelu"), C).clipped_norm / C
    assert torch.allclose(fresh._training.run.history.ratio.double(), want, rtol=1e-5)


def test_rdp_bound_from_the_accountants_history() -> None:
    engine = train(data(40), steps=7).engine

    def rdp(order: float) -> float:
        return float(compute_rdp(q=1 / 5, noise_multiplier=SIGMA, steps=7, orders=order))

    paper = bounds.mse_from_rdp(rdp(2.0), [2.0] * 5)
    assert engine.get_rdp_mse_bound(2.0, reading="paper") == pytest.approx(paper, rel=1e-9)
    rigorous = engine.get_rdp_mse_bound(torch.full((5,), 2.0))
    assert rigorous < paper
    assert rigorous >= bounds.mse_from_rdp(1.5 * rdp(4.0) + rdp(3.0), [2.0] * 5) * (1 - 1e-9)
    with pytest.raises(ValueError, match="reading='mine' must be"):
        engine.get_rdp_mse_bound(reading="mine")  # type: ignore[arg-type]


def test_impossible_delta_is_refused() -> None:
    engine = train(data(40), steps=2).engine
    with pytest.raises(ValueError, match="delta=0 must lie strictly between 0 and 1"):
        engine.get_individual_epsilon(delta=0)


@pytest.mark.parametrize("noise", [1.0, 0.7, 1.3])
def test_levels_are_those_of_the_formula(noise: float) -> None:
    """The last level k with anchor · 1.05^(k − 8) ≤ noise/ratio; level 0 also for what is below, or no number."""
    ratio = torch.cat([torch.rand(5000), torch.tensor([1.05**-k for k in range(100)] + [1.0, 0.0, 1e-30, math.nan])])
    history = NormHistory(len(ratio))
    history.anchor, history.noise_multiplier = 1.0, noise
    found = history.levels_of(ratio)
    position = 8 + math.log(noise) / math.log(1.05) - ratio.double().clamp(min=1e-12).log() / math.log(1.05)
    expected = position.add(1e-5).floor().clamp(0, 95).nan_to_num(0).long()
    on_an_edge = (position.add(1e-5) - position.add(1e-5).round()).abs() < 1e-5
    assert torch.equal(found[~on_an_edge], expected[~on_an_edge])
    assert bool(((found - expected).abs() <= 1).all())
    assert float(on_an_edge.double().mean()) < 0.05
