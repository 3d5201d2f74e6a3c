"""Canaries: their scores are log likelihood ratios of what was released, and people do not see
them.
"""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from tests.cases import DEVICE
from tests.engine.brute_force import Pass, clipped_gradients, random_state
from tests.engine.loops import data, make, network, step
from torchfil import Canaries
from torchfil.fisher.mechanism import largest_divergences
from torchfil.run.file import load

SIGMA, C, RATE = 0.7, 0.8, 1 / 5
LAYERS = [0.3, 0.5, 0.2, 0.4]  # C_l


MEMBERSHIP: dict[str, Any] = {"criterion": nn.CrossEntropyLoss(), "num_probes": 1}


def drawn_inputs(number: int) -> tuple[Tensor, int]:
    source = torch.Generator().manual_seed(number)
    return torch.randn(5, generator=source, dtype=torch.float64), number % 3


def trained(canaries: Canaries | None, steps: int = 12, way: str = "loop", **options: Any) -> Any:
    """A run, and of each of its steps the weights, the released sums, those of people, and who
    joined.
    """
    given = {
        "noise_multiplier": SIGMA,
        "max_grad_norm": C,
        "criterion": nn.CrossEntropyLoss(),
        "canaries": canaries,
    }
    engine, module, model, optimizer, private = make(data(40), **given | options)
    seen: list[dict[str, Any]] = []
    if optimizer.canaries is not None:
        score, join = optimizer.canaries.score, optimizer.canaries.join

        def noted_join(limits: Any) -> None:
            before = optimizer.canaries._noisy.clone()
            weights = {name: p.detach().clone() for name, p in module.named_parameters()}
            join(limits)
            seen.append({"weights": weights, "added": (optimizer.canaries._noisy - before).cpu()})

        def noted_score(limits: Any, std: float) -> None:
            seen[-1] |= {
                "left": (optimizer.canaries._noisy - optimizer.canaries._people).cpu(),
                "std": std,
            }
            score(limits, std)

        optimizer.canaries.join, optimizer.canaries.score = noted_join, noted_score
    while sum(each[2] for each in engine.accountant.history) < steps:
        for batch in private:
            if way == "train_step":
                engine.train_step(*batch)
            else:
                step(model, optimizer, batch)
    return engine, optimizer, seen


def ratios(gradients: Tensor, seen: dict[str, Any]) -> Tensor:
    """The log likelihood ratio of one step by its two normal densities, for gradients [m, p].

    The other canaries, who join with probability q/2 each, are taken to add their mean.
    """
    left, variance = seen["left"] - RATE / 2 * (gradients.sum(dim=0) - gradients), seen["std"] ** 2
    inside = -(left - gradients).square().sum(dim=1) / (2 * variance)
    outside = -left.square().sum(dim=1) / (2 * variance)
    return torch.log((1 - RATE) * torch.ones_like(inside) + RATE * (inside - outside).exp())


@pytest.mark.parametrize("way", ["loop", "train_step"])
@pytest.mark.parametrize("layers", [None, LAYERS])
@pytest.mark.parametrize("kind", [data(35, seed=9), drawn_inputs])
def test_scores_of_inputs_are_those_of_brute_force(kind: Any, layers: Any, way: str) -> None:
    options = {} if layers is None else {"max_grad_norm": layers, "clipping": "per_layer"}
    engine, optimizer, seen = trained(Canaries(30, kind), way=way, **options)
    scores = optimizer.canaries
    (x,), y = scores._gradients._batch
    truth = torch.zeros(30, dtype=torch.float64)
    for each in seen:
        begun = Pass(random_state(), each["weights"], x.to(DEVICE), y.to(DEVICE), list(range(30)))
        gradients = clipped_gradients(network(), begun, max_grad_norm=layers or C).cpu()
        truth += ratios(gradients, each)

        # what joined is a sum of gradients of some that are in
        added = each["added"]
        inside = gradients[scores.taken]
        shares = torch.linalg.lstsq(inside.T, added).solution if len(inside) else torch.zeros(0)
        assert torch.allclose(inside.T @ shares, added, atol=1e-9)
    assert len(seen) >= 12
    assert torch.allclose(scores.scores.cpu(), truth, rtol=1e-8, atol=1e-9)
    assert (scores.divergences <= largest_divergences(engine.accountant.history)[0] + 1e-9).all()
    assert (scores.divergences > 0).all()
    if not callable(kind):
        true = kind.tensors[1][:30]
        assert torch.equal(x, kind.tensors[0][:30])
        assert not (y == true).any()
        assert len((y - true).unique()) > 2


@pytest.mark.parametrize("layers", [None, LAYERS])
def test_directions_join_a_coordinate_of_their_own(layers: Any) -> None:
    options = {} if layers is None else {"max_grad_norm": layers, "clipping": "per_layer"}
    engine, optimizer, seen = trained(Canaries(40), steps=60, **options)
    scores, limits = optimizer.canaries, layers or [C] * 4
    coordinates = scores._gradients._places.tolist()
    ends = torch.tensor([p.numel() for p in optimizer.params]).cumsum(0)
    places = torch.bucketize(scores._gradients._places.cpu(), ends, right=True).tolist()
    assert len(set(coordinates)) == 40
    gradients = torch.zeros(40, ends[-1], dtype=torch.float64)
    gradients[range(40), coordinates] = torch.tensor(
        [limits[k] for k in places], dtype=torch.float64
    )
    truth, joined = torch.zeros(40, dtype=torch.float64), torch.zeros(40, dtype=torch.float64)
    for each in seen:
        truth += ratios(gradients, each)
        added = each["added"]
        joins = added[coordinates] / torch.tensor([limits[k] for k in places], dtype=torch.float64)
        assert torch.allclose(added, joins @ gradients, atol=1e-9)
        assert set(joins.round(decimals=6).tolist()) <= {
            0.0,
            1.0,
        }
        joined += joins
    assert torch.allclose(scores.scores.cpu(), truth, rtol=1e-8, atol=1e-9)
    assert (joined[~scores.taken] == 0).all()
    assert 0.1 < joined[scores.taken].mean() / len(seen) < 0.3
    if layers is None:
        assert scores.divergences[0].item() == pytest.approx(
            largest_divergences(engine.accountant.history)[0], rel=1e-9
        )


@pytest.mark.slow
def test_scores_of_directions_have_the_law_that_their_divergence_claims() -> None:
    """E_in[score] = D, and E_out[e^score] = 1, over canaries of their own coordinates."""
    torch.manual_seed(0)
    dataset = TensorDataset(torch.randn(50, 100), torch.randint(200, (50,)))
    options = {"noise_multiplier": 1.2, "canaries": Canaries(20_000), **MEMBERSHIP}
    engine, _, _, private, loader = make(dataset, nn.Linear(100, 200), 5, **options)
    for _ in range(4):
        for x, y in loader:
            engine.train_step(x, y)
    scores, taken = private.canaries.scores, private.canaries.taken
    for found, mean in (
        (scores[taken], private.canaries.divergences[0].item()),
        (scores[~taken].exp(), 1.0),
    ):
        assert found.mean().item() == pytest.approx(
            mean, abs=3 * float(found.std()) / math.sqrt(len(found))
        )
    assert float(taken.double().mean()) == pytest.approx(0.5, abs=3 * 0.5 / math.sqrt(20_000))


def test_a_run_resumes_with_its_canaries(tmp_path: Any) -> None:
    engine, optimizer, _ = trained(Canaries(20))
    state = copy.deepcopy(engine.state_dict())
    for canaries in (None, Canaries(21), Canaries(20, data(20, seed=9))):
        other = make(data(40), noise_multiplier=SIGMA, max_grad_norm=C, canaries=canaries)[0]
        with pytest.raises(ValueError, match="canaries"):
            other.load_state_dict(state)
    again, _, _, resumed, _ = make(
        data(40), noise_multiplier=SIGMA, max_grad_norm=C, canaries=Canaries(20)
    )
    again.load_state_dict(state)
    for name, value in optimizer.canaries.state_dict().items():
        assert torch.equal(getattr(resumed.canaries, name).cpu(), value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"canaries": Canaries(60)}, "60.* trains 57 weights: use fewer"),
        ({"canaries": Canaries(5), "poisson_sampling": False}, "needs Poisson sampling"),
        ({"canaries": Canaries(5), "noise_multiplier": 0.0}, "needs Poisson sampling with noise"),
        (
            {"canaries": Canaries(5, data(5, seed=9)), "owner_of": torch.arange(40) // 2},
            "use directions",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_refusals(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(data(40), **{"noise_multiplier": SIGMA, "max_grad_norm": C, **options})


def test_nobody_takes_part_twice() -> None:
    people = data(40)
    with pytest.raises(ValueError, match="take part twice"):
        make(people, noise_multiplier=SIGMA, max_grad_norm=C, canaries=Canaries(20, people))


@pytest.mark.parametrize(("weaker", "found"), [(1.0, False), (0.2, True)])
def test_an_audit_contradicts_a_run_with_less_noise_than_it_claims(
    weaker: float, found: bool, tmp_path: Path
) -> None:
    """Directions see noise that is a fifth of what the accountant is told."""
    torch.manual_seed(0)
    dataset = TensorDataset(torch.randn(40, 50), torch.randint(20, (40,)))
    options: dict[str, Any] = {"noise_multiplier": 3.0, "canaries": Canaries(1000), **MEMBERSHIP}
    engine, _, _, optimizer, loader = make(dataset, nn.Linear(50, 20), 10, **options)
    normal = optimizer.noise.normal_
    optimizer.noise.normal_ = lambda out, std: normal(out, weaker * std)
    for _ in range(10):
        for x, y in loader:
            engine.train_step(x, y)
    audit = engine.audit(delta=1e-5)
    assert audit.exceeds_claim is found
    assert (audit.epsilon > audit.claimed) is found
    if found:
        run = load(engine.save_run(tmp_path / "run.parquet", delta=1e-5))
        assert run.about["audit"] == audit.as_dict()
    assert audit.claimed == engine.get_epsilon(1e-5)
    assert len(engine.leakage()) == 40, "of people alone"
