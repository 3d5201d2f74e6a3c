"""clip_weights: what is released of an example is ωφ(‖g‖) g, and everything that is told about it is about that."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev

from tests.cases import DEVICE, grouped, relative_error
from tests.engine.brute_force import C, Run, assert_released, begin
from tests.engine.loops import data, loader, network
from tests.engine.weighted_runs import (
    DELTA,
    QUESTIONS,
    SIGMA,
    WEIGHTS,
    N,
    Truth,
    assert_equal,
    epsilon_by_hand,
    rate_of,
    weighted,
)
from torchfil import FILPrivacyEngine
from torchfil.attribution import PLIS
from torchfil.clipping import get_clip
from torchfil.fisher import reference
from torchfil.fisher.mechanism import step_divergence
from torchfil.questions import Absent

WAYS = ["auto", "hooks", "train_step", "physical", "hooks, physical"]


@pytest.mark.parametrize("way", WAYS)
def test_what_is_released_and_its_trace(way: str) -> None:
    run = weighted(way)
    truth = Truth(run, WEIGHTS, 1e-9, None)
    assert_released(run, truth.sums)
    assert relative_error(run.engine.totals.get_trace().value, truth.fim.diagonal(dim1=1, dim2=2).sum(dim=1)) < 1e-6


@pytest.mark.parametrize("way", WAYS)
def test_everything_that_is_told(way: str) -> None:
    """FIM, diagonal, D of questions, ‖g̃‖, PLIS and individual ε under Poisson sampling, against jacrev."""
    run = weighted(
        way, noise_multiplier=SIGMA, amplification="poisson", track=("fim", "diagonal", "plis"), questions=QUESTIONS
    )
    engine, q = run.engine, rate_of(run)
    ledger, truth = engine.ledger, Truth(run, WEIGHTS, SIGMA, q)
    assert ledger is not None
    diagonal = truth.fim.diagonal(dim1=1, dim2=2)
    assert relative_error(ledger.sums["fim"], truth.fim) < 1e-6
    assert relative_error(engine.get_attribute_fil().value.square(), diagonal) < 1e-6
    assert relative_error(engine.totals.get_trace().value, diagonal.sum(dim=1)) < 1e-6
    assert relative_error(engine.get_plis(), truth.plis) < 1e-6
    assert relative_error(ledger.sums["squared_norm"], truth.squared_norm) < 1e-6
    for name, divergences in truth.divergences.items():
        value = engine.get_guess(name).divergence.value.reshape(divergences.shape)
        assert relative_error(value, divergences) < 1e-6, name

    ids = [int(WEIGHTS.argmin()), int(WEIGHTS.argmax()), run.passes[0][0].ids[0]]  # each takes its time
    by_step = torch.stack(truth.ratios, dim=1)[ids].tolist()
    own = [epsilon_by_hand(ratios, SIGMA, q) for ratios in by_step]
    assert engine.get_individual_epsilon(ids, delta=DELTA).value.tolist() == pytest.approx(own, rel=1e-6)
    assert engine.get_epsilon(DELTA) >= max(own) > min(own)


@pytest.mark.parametrize("way", ["auto", "train_step"])
def test_recorded_passes(way: str) -> None:
    """Probes are random, but along the gradient nothing is: PLIS and D of the recorded pass, which is the usual one."""
    run = weighted(
        way, noise_multiplier=SIGMA, amplification="poisson", track=("plis",), questions=QUESTIONS,
        estimator="weight-probes", num_probes=2,
    )  # fmt: skip
    truth = Truth(run, WEIGHTS, SIGMA, rate_of(run))
    assert relative_error(run.engine.get_plis(), truth.plis) < 1e-6
    value = run.engine.get_guess("label").divergence.value
    assert relative_error(value, truth.divergences["label"]) < 1e-6


def test_probes_are_unbiased() -> None:
    """The mean of many probes' traces is the truth, within its own standard error."""
    run = weighted(noise_multiplier=SIGMA, amplification="poisson", estimator="weight-probes", num_probes=400, steps=2)
    truth = Truth(run, WEIGHTS, SIGMA, rate_of(run)).fim.diagonal(dim1=1, dim2=2).sum(dim=1)
    trace = run.engine.totals.get_trace()
    seen = truth > 0
    apart = ((trace.value.cpu() - truth) / trace.standard_error.cpu())[seen]
    assert float(apart.abs().max()) < 4
    assert relative_error(trace.value, truth) < 0.05


def test_ghost_clipping() -> None:
    """Called as Opacus's is; its clip is hard."""
    module, engine = network(), FILPrivacyEngine()
    plain = copy.deepcopy(module)
    torch.manual_seed(4)
    options = grouped(seed=3, estimator="exact", amplification="none")
    model, optimizer, criterion, private = engine.make_private(
        module, torch.optim.SGD(module.parameters(), lr=0.3), loader(data(N), 6), noise_multiplier=1e-9,
        max_grad_norm=C, criterion=nn.CrossEntropyLoss(), grad_sample_mode="ghost", clip_weights=WEIGHTS, **options,
    )  # fmt: skip
    run = Run(engine, module, plain, model, optimizer, private)
    for batch in private:
        begun = begin(run, batch)
        optimizer.zero_grad()
        criterion(model(begun.x), begun.y).backward()
        optimizer.step()
        run.passes.append([begun])
        flat = torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None])
        run.released.append(flat * optimizer.expected_batch_size)

    truth = Truth(run, WEIGHTS, 1e-9, None, clip="hard")
    assert_released(run, truth.sums)
    assert relative_error(engine.totals.get_trace().value, truth.fim.diagonal(dim1=1, dim2=2).sum(dim=1)) < 1e-6


LIMITS = [0.2, 0.05, 0.3, 0.1]


@pytest.mark.parametrize("mode", ["auto", "hooks"])
def test_per_layer_clipping(mode: str) -> None:
    """g̃_l = ωφ(‖g_l‖; C_l) g_l for every parameter: FIM by jacrev, ‖g̃‖, D, and the norms of a refresh."""
    clip, module, dataset, noise = get_clip("smooth"), network(), data(N), SIGMA * math.hypot(*LIMITS)
    plain, engine = copy.deepcopy(module), FILPrivacyEngine()
    model, optimizer, private = engine.make_private(
        module, torch.optim.SGD(module.parameters(), lr=0.3), loader(dataset, 6), noise_multiplier=SIGMA,
        max_grad_norm=LIMITS, clipping="per_layer", grad_sample_mode=mode, clip_weights=WEIGHTS,
        criterion=nn.CrossEntropyLoss(),
        **grouped(seed=3, estimator="exact", track=("fim",), questions={"member": Absent()}),
    )  # fmt: skip

    def clipped(z: Tensor, y: Tensor, parameters: dict[str, Tensor], row: int) -> Tensor:
        def loss(values: dict[str, Tensor]) -> Tensor:
            return F.cross_entropy(functional_call(plain, values, (z[None],)), y[None])

        parts = zip(grad(loss)(parameters).values(), LIMITS, strict=True)
        return torch.cat([float(WEIGHTS[row]) * part.flatten() / clip.c(part.norm() / limit) for part, limit in parts])

    fim, divergence = torch.zeros(N, 5, 5).double(), torch.zeros(N).double()
    for batch in private:
        x, y = (part.to(DEVICE) for part in batch)
        parameters = {name: value.detach().clone() for name, value in module.named_parameters()}
        for row, z, label in zip(batch._ids, x, y, strict=True):
            g = clipped(z, label, parameters, row)
            jacobian = jacrev(clipped)(z, label, parameters, row)
            fim[row] += reference.poisson_fim(jacobian[None], g[None], noise, private.sample_rate)[0].cpu()
            square = g.square().sum()[None] / noise**2
            nothing = torch.zeros_like(square)
            kl = step_divergence(square, nothing, nothing, private.sample_rate) / private.sample_rate
            divergence[row] += float(kl)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    assert engine.ledger is not None
    assert relative_error(engine.ledger.sums["fim"], fim) < 1e-6
    assert relative_error(engine.get_guess("member").divergence.value.flatten(), divergence) < 1e-6
    engine.refresh_norms()
    parameters = {name: value.detach() for name, value in module.named_parameters()}
    now = [clipped(x.to(DEVICE), y.to(DEVICE), parameters, i).norm() for i, (x, y) in enumerate(dataset)]
    assert relative_error(engine._training.run.history.ratio, torch.stack(now) / math.hypot(*LIMITS)) < 1e-6


def test_looks_at_the_data_set() -> None:
    """PLIS and refreshed norms at the present weights are those of the scaled gradient; PLIS without noise is plain."""
    run = weighted(noise_multiplier=SIGMA)
    x, y = (part.to(DEVICE) for part in data(N).tensors)
    told = {"max_grad_norm": C, "clip_weights": WEIGHTS}
    at = copy.deepcopy(run.plain)
    at.load_state_dict(run.module.state_dict())
    g = reference.clipped_gradients(at, nn.CrossEntropyLoss(), x, y, **told)
    jacobian = reference.exact_jacobian(at, nn.CrossEntropyLoss(), x, y, **told)
    slopes = 2 * torch.einsum("bpd,bp->bd", jacobian, g) / (SIGMA * C) ** 2
    order = [7, 0, 13]
    assert relative_error(run.engine.plis(order), slopes[order]) < 1e-6
    run.engine.refresh_norms()
    assert relative_error(run.engine._training.run.history.ratio, g.norm(dim=1) / C) < 1e-6
    unclipped = PLIS(at, nn.CrossEntropyLoss()).attribute(x, y)
    assert relative_error(run.engine.plis(private=False), unclipped) < 1e-6


def test_divergence_is_that_of_the_simulated_release() -> None:
    """D of one participation against the mean log ratio of noisy releases, drawn or not, of ωφ(‖g‖) g."""
    run = weighted(noise_multiplier=SIGMA, amplification="poisson", questions=QUESTIONS, steps=1)
    begun, q, s = run.passes[0][0], rate_of(run), SIGMA * C
    at = copy.deepcopy(run.plain)
    at.load_state_dict(begun.weights)
    told = {"max_grad_norm": C, "clip_weights": WEIGHTS[begun.ids]}
    generator = torch.Generator().manual_seed(0)
    for place in range(2):
        x, y = begun.x[place : place + 1], begun.y[place : place + 1]
        only = {**told, "clip_weights": told["clip_weights"][place : place + 1]}
        answers = torch.tensor([0, 1, 2], device=y.device)
        clipped = [
            reference.clipped_gradients(at, nn.CrossEntropyLoss(), x, label[None], **only)[0].cpu() / s
            for label in (y[0], *answers)
        ]
        u = clipped[0]
        drawn = torch.rand(100_000, generator=generator) < q
        released = torch.randn(100_000, len(u), generator=generator, dtype=torch.float64) + drawn[:, None] * u
        for k, v in enumerate(clipped[1:]):

            def log_density(at: Tensor, released: Tensor = released) -> Tensor:
                return torch.log1p(q * torch.expm1(released @ at - at.square().sum() / 2))

            ratio = log_density(u) - log_density(v)
            value = q * float(run.engine.get_guess("label").divergence.value[begun.ids[place], k])
            assert abs(float(ratio.mean()) - value) <= 4 * float(ratio.std()) / 100_000**0.5 + 1e-12


class Scaled(nn.Module):
    """One parameter: the gradient has no direction across it, so that every probe tells the whole truth."""

    def __init__(self) -> None:
        super().__init__()
        self.size = nn.Parameter(torch.tensor([0.5], dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        h = self.size * x.sin()
        return torch.stack([h.sum(dim=1), (h * h).sum(dim=1), h[:, 0]], dim=1)


def still(weights: Any, module: nn.Module, passes: int, **options: Any) -> FILPrivacyEngine:
    """A run whose weights do not move, with known batches: every trace is ω² times that without weights."""
    engine = FILPrivacyEngine()
    torch.manual_seed(4)
    given = {"seed": 3, "amplification": "none", **options}
    made = engine.make_private(
        module.to(DEVICE), torch.optim.SGD(module.parameters(), lr=0.0), loader(data(N), 6), noise_multiplier=SIGMA,
        max_grad_norm=C, criterion=nn.CrossEntropyLoss(), clip_weights=weights, **grouped(**given),
    )  # fmt: skip
    model, optimizer, criterion, private = made if len(made) == 4 else (*made[:2], F.cross_entropy, made[2])
    every = given.get("accumulation_steps", 1)
    for _ in range(passes):
        for count, (x, y) in enumerate(private, start=1):
            (criterion(model(x.to(DEVICE)), y.to(DEVICE)) / every).backward()
            if count % every == 0:
                optimizer.step()
                optimizer.zero_grad()
    return engine


@pytest.mark.parametrize(
    ("module", "passes", "options"),
    [
        (network, 1, {"views": lambda x: torch.stack([x, x.flip(-1)], dim=1), "estimator": "exact"}),
        (network, 2, {"accumulation_steps": 2, "estimator": "exact"}),
        (network, 1, {"estimator": "input-probes"}),
        (network, 1, {"estimator": "weight-probes"}),
        (network, 1, {"estimator": "weight-probes", "max_memory": 20_000}),
        (Scaled, 18, {"num_probes": 1, "extra_probes": 8}),
    ],
    ids=["views", "accumulation", "input-probes", "weight-probes", "chunks", "extra-probes"],
)
def test_a_trace_scales_with_the_squared_weight(module: Any, passes: int, options: dict[str, Any]) -> None:
    plain, scaled = (still(w, module(), passes, **options) for w in (None, WEIGHTS))
    traces = [engine.totals.get_trace().value.cpu() for engine in (plain, scaled)]
    assert float(traces[0].max()) > 0
    assert relative_error(traces[1], WEIGHTS.square() * traces[0]) < 1e-9


@pytest.mark.parametrize("way", ["auto", "hooks", "train_step"])
def test_weights_of_one_change_nothing(way: str) -> None:
    """Bit for bit: weights, ledger, ε."""
    options = {"noise_multiplier": SIGMA, "amplification": "poisson", "estimator": "weight-probes", "num_probes": 2}
    plain, ones = (
        weighted(way, weights=w, questions=QUESTIONS, track=("diagonal", "plis"), **options)
        for w in (None, torch.ones(N))
    )
    assert_equal(ones, plain)
    FILPrivacyEngine.merge([plain.engine, ones.engine])  # the same mechanism
