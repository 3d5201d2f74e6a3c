"""Every estimator: unbiased, honest about its error, and as good as its variance formula says."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.cases import SIGMA, Case, build
from torchfil import fisher
from torchfil.clipping import DEFAULT_CLIP, get_clip
from torchfil.fisher import ClippedJacobian, Estimate, ExampleGradients, PoissonAmplification, estimators
from torchfil.fisher.batch import PrivateBatch
from torchfil.fisher.estimators import Draws, draw_bits, signs_of
from torchfil.fisher.mechanism import Mechanism
from torchfil.fisher.recording import RecordedJacobian, plan

SAMPLERS = ["coordinates", "input-probes", "weight-probes"]
SEEDS = 250


def regression() -> Case:
    with torch.random.fork_rng():
        torch.manual_seed(2)
        model = nn.Sequential(nn.Linear(24, 12), nn.Tanh(), nn.Linear(12, 4)).double()
        return Case(model, nn.CrossEntropyLoss(), torch.randn(2, 24).double(), torch.randint(4, (2,)))


def settings(case: Case, **more: Any) -> dict[str, Any]:
    return {"max_grad_norm": 1.2, "noise_multiplier": SIGMA, "amplification": PoissonAmplification(0.3), **more}


def repeat(
    case: Case, quantity: Any, count: int = SEEDS, *, estimator: str = "weight-probes", num_probes: int
) -> list[Estimate]:
    """What ``fim_trace`` and ``fim_diagonal`` give for these seeds; the recorded pass is tried once for all."""
    gradients, given = ExampleGradients.build(*case.arguments), settings(case)
    mechanism = Mechanism.build(given["max_grad_norm"], SIGMA, DEFAULT_CLIP, given["amplification"])
    batch = PrivateBatch(gradients, mechanism, plan(gradients))
    return [
        batch.estimate(quantity, estimator, num_probes, torch.Generator().manual_seed(seed)) for seed in range(count)
    ]


def test_repetitions_are_those_of_the_public_functions() -> None:
    case = regression()
    for quantity, function in (("trace", fisher.fim_trace), ("diagonal", fisher.fim_diagonal)):
        public = function(*case.arguments, **settings(case), num_probes=3, generator=torch.Generator().manual_seed(1))
        assert torch.equal(repeat(case, quantity, 2, num_probes=3)[1].value, public.value)


def repeat_traces(case: Case, estimator: str, num_probes: int) -> tuple[Tensor, ...]:
    """Values, errors and both ends of the 95 % interval of SEEDS independent estimates, [SEEDS, batch] each.

    Where each example draws for itself, copies of the examples in one batch are further estimates.
    """
    copies = 1 if estimator == "weight-probes" else 25
    batch = replace(case, inputs=case.inputs.repeat(copies, 1), targets=case.targets.repeat(copies))
    results = repeat(batch, "trace", SEEDS // copies, estimator=estimator, num_probes=num_probes)
    assert {r.kind for r in results} == {"estimate"}
    parts = zip(*((r.value, r.standard_error, *r.interval(0.95)) for r in results), strict=True)
    return tuple(torch.stack(part).reshape(SEEDS, len(case.targets)) for part in parts)


@pytest.mark.product
@pytest.mark.parametrize("num_probes", [3, 10])
@pytest.mark.parametrize("estimator", SAMPLERS)
def test_trace_is_unbiased_and_its_interval_covers(estimator: str, num_probes: int) -> None:
    case = regression()
    truth = fisher.fim_trace(*case.arguments, **settings(case), estimator="exact").value
    values, errors, low, high = repeat_traces(case, estimator, num_probes)
    standard_error_of_mean = values.std(dim=0) / math.sqrt(SEEDS)
    assert ((values.mean(dim=0) - truth).abs() < 4 * standard_error_of_mean).all()
    coverage = ((low <= truth) & (truth <= high)).double().mean().item()
    assert 0.90 <= coverage <= 0.99
    reported = errors.square().mean(dim=0).sqrt()
    assert torch.allclose(reported, values.std(dim=0), rtol=0.2), "the variance it reports is the variance it has"


def test_diagonal_is_unbiased_and_its_interval_covers() -> None:
    case = regression()
    truth = fisher.fim_diagonal(*case.arguments, **settings(case), estimator="exact").value
    seeds = 150
    results = repeat(case, "diagonal", seeds, estimator="weight-probes", num_probes=20)
    values = torch.stack([r.value for r in results])  # [seeds, batch, d]
    z = (values.mean(dim=0) - truth) / (values.std(dim=0) / math.sqrt(seeds))
    assert (z.abs() < 4.5).all(), "48 coordinates at once"
    assert z.abs().mean() < 1.2
    covered = torch.stack([(r.interval(0.95)[0] <= truth) & (truth <= r.interval(0.95)[1]) for r in results])
    assert 0.90 <= covered.double().mean().item() <= 0.99


@pytest.mark.parametrize("estimator", ["input-probes", pytest.param("weight-probes", marks=pytest.mark.slow)])
def test_a_single_probe_reports_a_conservative_error(estimator: str) -> None:
    case = regression()
    truth = fisher.fim_trace(*case.arguments, **settings(case), estimator="exact").value
    values, errors, low, high = repeat_traces(case, estimator, 1)
    assert (errors.square().mean(dim=0) >= values.var(dim=0)).all()
    assert ((low <= truth) & (truth <= high)).double().mean() >= 0.95


def test_all_coordinates_are_exact() -> None:
    case = regression()
    truth = fisher.fim_trace(*case.arguments, **settings(case), estimator="exact").value
    result = fisher.fim_trace(*case.arguments, **settings(case), estimator="coordinates", num_probes=24)
    assert result.kind == "exact"
    assert torch.allclose(result.value, truth, rtol=1e-10)
    assert torch.equal(result.standard_error, torch.zeros_like(truth))


@pytest.mark.parametrize("estimator", SAMPLERS)
def test_a_generator_makes_results_repeatable(estimator: str) -> None:
    case = regression()
    first, second, third = (
        fisher.fim_trace(
            *case.arguments,
            **settings(case),
            estimator=estimator,
            num_probes=3,
            generator=torch.Generator().manual_seed(seed),
        ).value
        for seed in (7, 7, 8)
    )
    assert torch.equal(first, second)
    assert not torch.equal(first, third)


def test_probes_are_drawn_afresh() -> None:
    """Redrawing the same probe fifty times would leave the error of one."""
    case = regression()
    spread = [
        torch.stack([r.value for r in repeat(case, "trace", 50, num_probes=k)]).std(dim=0).mean() for k in (2, 18)
    ]
    assert spread[0] / spread[1] == pytest.approx(3.0, rel=0.4)


def perpendicular_part(case: Case) -> tuple[Tensor, Tensor]:
    """A = φPJ of every example, [batch, p, d], and its spectrum λ(AᵀA), [batch, d]."""
    operator = ClippedJacobian(ExampleGradients.build(*case.arguments), get_clip("smooth"), 1.0)
    jacobian = operator.gradients.jacobian_columns(slice(None))
    unit, scale = operator.direction, operator.clipped_norm / operator.norm
    along = torch.einsum("bp,bpd->bd", unit, jacobian)
    part = scale[:, None, None] * (jacobian - unit[:, :, None] * along[:, None, :])
    return part, torch.linalg.eigvalsh(part.mT @ part)


def small_cnn() -> Case:
    """As the MNIST network begins, for 12 x 12 pixels."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        first = [nn.Conv2d(1, 4, 3, stride=2, padding=2), nn.Tanh(), nn.AvgPool2d(2, stride=1)]
        model = nn.Sequential(*first, nn.Conv2d(4, 8, 3, stride=2), nn.Tanh(), nn.Flatten(), nn.Linear(32, 10)).double()
        return Case(model, nn.CrossEntropyLoss(), torch.rand(1, 1, 12, 12).double(), torch.randint(10, (1,)))


@pytest.mark.parametrize("make", [small_cnn, pytest.param(lambda: build("mnist_cnn", 1), marks=pytest.mark.long)])
def test_weight_probes_beat_coordinates_by_the_predicted_factor(make: Any) -> None:
    """Variances predicted from the exact Jacobian, measured over repeated draws at equal count.

    Coordinates are drawn again for every copy of the image; the spread of all probes is that of one, times √count.
    """
    case = replace(make(), private=None)  # all pixels
    k, draws, d = 4, 200, case.inputs[0].numel()
    part, spectrum = perpendicular_part(case)
    squares = part[0].square().sum(dim=0)  # of the columns
    coordinate_variance = d**2 * squares.var() / k * (1 - k / d)
    diagonal_of_outer = part[0].square().sum(dim=1)  # (AAᵀ)_ii
    probe_variance = 2 * (spectrum[0].square().sum() - diagonal_of_outer.square().sum()) / k
    assert probe_variance <= 2 * spectrum[0].square().sum() / k
    predicted = (coordinate_variance / probe_variance).item()
    assert predicted > 5

    def trace(copies: int, **options: Any) -> Estimate:
        inputs, targets = case.inputs.repeat(copies, 1, 1, 1), case.targets.repeat(copies)
        options |= {"max_grad_norm": 1.0, "noise_multiplier": 1.0, "generator": torch.Generator().manual_seed(0)}
        return fisher.fim_trace(case.model, case.loss_fn, inputs, targets, **options)

    tolerance = 4.5 * math.sqrt(2 / draws)
    coordinates = trace(draws, estimator="coordinates", num_probes=k).value.var().item()
    probes = draws * trace(1, estimator="weight-probes", num_probes=draws * k).standard_error.square().item()
    assert coordinates == pytest.approx(coordinate_variance.item(), rel=tolerance)
    assert probes == pytest.approx(probe_variance.item(), rel=tolerance)
    assert coordinates / probes == pytest.approx(predicted, rel=2 * tolerance)


class TestRegistered:
    """What an estimator can do is asked of it, not of its name."""

    @pytest.fixture(autouse=True)
    def clean_registry(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(estimators, "_REGISTRY", dict(estimators._REGISTRY))

    def test_it_is_used_under_its_name(self) -> None:
        made = fisher.register_estimator("twice", estimators.exact)
        assert fisher.get_estimator("twice") is made
        with pytest.raises(ValueError, match="already registered; pass overwrite=True"):
            fisher.register_estimator("twice", estimators.exact)
        fisher.register_estimator("twice", estimators.exact, overwrite=True)
        case = regression()
        assert "twice" in fisher.available_estimators()
        assert fisher.fim_trace(*case.arguments, **settings(case), estimator="twice").kind == "exact"

    def test_an_exact_one_draws_nothing_and_is_called_exact(self) -> None:
        def columns(jacobian: Any, mechanism: Any, quantities: Any, draws: Draws) -> Any:
            assert draws.seeds == ()
            assert draws.columns_at_once > 1
            found = estimators.exact(jacobian, mechanism, quantities, draws)
            return {name: replace(moments, exact=False) for name, moments in found.items()}

        fisher.register_estimator("columns", columns, exact=True)
        case = regression()
        for arguments in (case.arguments, (case.model, case.loss_fn, case.inputs[:0], case.targets[:0])):
            assert fisher.fim_trace(*arguments, **settings(case), estimator="columns").kind == "exact"

    def test_one_that_the_recorded_pass_serves_is_served_by_it(self) -> None:
        seen = []

        def probes(jacobian: Any, mechanism: Any, quantities: Any, draws: Draws) -> Any:
            seen.append(type(jacobian))
            return estimators.weight_probes(jacobian, mechanism, quantities, draws)

        fisher.register_estimator("mapped", probes)
        fisher.register_estimator("recorded", probes, one_pass=True)
        case = regression()
        values = [
            fisher.fim_trace(
                *case.arguments, **settings(case), estimator=name, generator=torch.Generator().manual_seed(1)
            ).value
            for name in ("mapped", "recorded")
        ]
        assert seen == [ClippedJacobian, RecordedJacobian]
        torch.testing.assert_close(*values)

    def test_what_it_does_not_give_is_refused_before_it_is_called(self) -> None:
        fisher.register_estimator("traces", estimators.exact)
        case = regression()
        with pytest.raises(
            ValueError,
            match="estimator='traces' gives the trace only, not the diagonal; use estimator='exact' or 'weight-probes'",
        ):
            fisher.fim_diagonal(*case.arguments, **settings(case), estimator="traces")
        with pytest.raises(ValueError, match=r"for \['diagonal'\]; choose from .* the trace must be among them"):
            fisher.register_estimator("other", estimators.exact, quantities=("diagonal",))
        with pytest.raises(ValueError, match=r"for \['trace', 'colour'\]; choose from trace, diagonal, matrix"):
            fisher.register_estimator("other", estimators.exact, quantities=("trace", "colour"))  # type: ignore[arg-type]

    @pytest.mark.parametrize(
        ("given", "told"),
        [
            (lambda moments: {}, "NoneType; it must return a dict with a"),
            (lambda moments: {"trace": moments}, "NoneType"),
            (lambda moments: moments, "NoneType"),
            (lambda moments: {"diagonal": moments.mean}, "Tensor"),
            (
                lambda moments: {"diagonal": replace(moments, mean=moments.mean.sum(dim=1))},
                r"a mean and a variance of shapes .*\[2\].* of shape \[2, 24\]",
            ),
            (
                lambda moments: {"diagonal": replace(moments, variance=moments.variance[:1])},
                r"a mean and a variance of shapes .*\[1, 24\]",
            ),
        ],
    )
    def test_what_it_gives_wrongly_is_told(self, given: Any, told: str) -> None:
        def wrong(jacobian: Any, mechanism: Any, quantities: Any, draws: Draws) -> Any:
            return given(estimators.exact(jacobian, mechanism, ("diagonal",), draws)["diagonal"])

        fisher.register_estimator("wrong", wrong, quantities=("trace", "diagonal"))
        case = regression()
        with pytest.raises(ValueError, match=f"estimator 'wrong' was asked for the diagonal and gave {told}"):
            fisher.fim_diagonal(*case.arguments, **settings(case), estimator="wrong")


def test_interval_refuses_impossible_confidence() -> None:
    with pytest.raises(ValueError, match="confidence=1.0 must lie strictly between 0 and 1"):
        Estimate.exact(torch.ones(1)).interval(1.0)


def test_probes_are_fair_and_independent() -> None:
    """Between weights and between seeds; the number of weights is no multiple of what one random number gives."""
    shape = (3, 371)
    drawn = torch.stack([draw_bits(seed, torch.empty(shape, dtype=torch.int8)).flatten() for seed in range(1000)])
    assert torch.equal(drawn[7], draw_bits(7, torch.empty(drawn.shape[1], dtype=torch.int8)))
    signs = signs_of(drawn, torch.float64)
    assert set(signs.unique().tolist()) == {-1.0, 1.0}
    assert abs(float(signs.mean())) * signs.numel() ** 0.5 < 4
    for vectors in (signs, signs.T):
        products = vectors @ vectors.T / vectors.shape[1] ** 0.5  # nearly normal, with variance 1
        rows, columns = torch.triu_indices(*products.shape, offset=1)
        pairs = products[rows, columns]
        assert float(pairs.abs().max()) < 6.5
        assert abs(float(pairs.square().mean()) - 1) < 0.01


def test_an_interval_from_one_probe_covers_a_single_entry() -> None:
    """One probe's entry of the diagonal is a squared normal number, nearly: far more skewed than a sum of many."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    x, y = torch.randn(4, 3, dtype=torch.float64), torch.randint(2, (4,))
    options: dict[str, Any] = {"max_grad_norm": 1.0, "noise_multiplier": 1.0}
    exact = fisher.fim_diagonal(model, nn.CrossEntropyLoss(), x, y, estimator="exact", **options).value
    gradients = ExampleGradients.build(model, nn.CrossEntropyLoss(), x, y)
    batch = PrivateBatch(gradients, Mechanism.build(1.0, 1.0), plan(gradients))
    source, covered = torch.Generator().manual_seed(0), []
    for _ in range(200):
        found = batch.estimate("diagonal", "weight-probes", 1, source)
        low, high = found.interval(0.95)
        covered.append((low <= exact) & (exact <= high))
    assert float(torch.stack(covered).double().mean()) >= 0.94
