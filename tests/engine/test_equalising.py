"""``torchfil.equalise``: stand-ins whose leakage responds as it is told to, then small real
runs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import torchfil
from tests.cases import DEVICE
from tests.engine.loops import data, loader, make
from torchfil import FILPrivacyEngine
from torchfil.accounting.ids import ExampleIds
from torchfil.engine import Equalised
from torchfil.fisher.results import Estimate
from torchfil.guessing import Guess, largest_true_positive_rate
from torchfil.report import load

pytestmark = pytest.mark.filterwarnings("ignore:The clip weights were computed from private data")


class StandIn:
    """What a run says, from exposures e = 1/bound or D."""

    def __init__(
        self, exposure: Tensor, error: float = 0.0, measured: Tensor | None = None
    ) -> None:
        self.value = exposure.double()
        self.estimate = Estimate(self.value, error * self.value, "estimate", positive=True)
        self.measured = (
            torch.ones(len(exposure), dtype=torch.bool) if measured is None else measured
        )
        self.ids = ExampleIds(len(exposure))

    def get_mse_bound(self) -> Estimate:
        return self.estimate.raised(-1.0)

    def was_measured(self) -> Tensor:
        return self.measured

    def get_guess(self, question: str) -> Guess:
        assert question == "member"
        return Guess(self.estimate)


class Trainer:
    """Exposures that respond as ω^power, times chance from run to run."""

    def __init__(
        self, unit: Tensor, *, power: float = 2.0, chance: float = 0.0, error: float = 0.0
    ) -> None:
        self.unit, self.power, self.chance, self.error = unit.double(), power, chance, error
        self.seen: list[Tensor | None] = []

    def __call__(self, weights: Tensor | None) -> StandIn:
        self.seen.append(weights)
        weights = torch.ones_like(self.unit) if weights is None else weights
        luck = torch.exp(self.chance * torch.randn_like(self.unit) - self.chance**2 / 2)
        return StandIn(self.unit * weights**self.power * luck, self.error)


@pytest.fixture
def unit() -> Tensor:
    """A few of 2,000 examples stand out."""
    torch.manual_seed(3)
    return torch.exp(1.2 * torch.randn(2000)) / 10


def equalise(train: Any, target: float | None = 1.0, **options: Any) -> Any:
    return torchfil.equalise(train, target=target, **{"confidence": None, **options})


def test_a_response_of_the_square_needs_one_round(unit: Tensor) -> None:
    train = Trainer(unit)
    with pytest.warns(UserWarning, match="private data"):
        result = equalise(lambda weights: (train(weights), 0.9835))
    assert (result.met, result.stopped, train.seen[0], len(train.seen)) == (
        True,
        "target met",
        None,
        2,
    )
    assert result.history[0].worst == pytest.approx(1 / unit.max().item(), rel=1e-5)
    assert result.history[1].worst == result.worst >= 1.0
    spared = unit > 1 / 1.5  # the default margin
    assert torch.equal(result.weights < 1, spared)
    assert (result.num_spared, result.history[0].num_below) == (
        int(spared.sum()),
        int((unit > 1).sum()),
    )
    assert torch.equal(result.next_weights, result.weights)
    assert [each.score for each in result.history] == [0.9835, 0.9835]
    assert result.epsilon_of_all_rounds is None


@pytest.mark.parametrize(
    ("power", "options", "stopped", "rounds"),
    [
        (1.2, {"max_rounds": 8}, "target met", range(3, 9)),
        (0.0, {"max_rounds": 9}, "no further progress", [3]),
        (2.0, {"floor": 0.7, "max_rounds": 9}, "floor", range(1, 10)),
        (2.0, {"max_rounds": 1}, "max_rounds", [1]),
    ],
    ids=["a weaker response", "weights that nobody uses", "the floor", "one round"],
)
def test_where_it_stops(
    unit: Tensor, power: float, options: dict[str, Any], stopped: str, rounds: Any
) -> None:
    result = equalise(Trainer(unit, power=power), **options)
    assert (result.stopped, result.met) == (stopped, stopped == "target met")
    assert len(result.history) in rounds
    if power == 0 or rounds == [1]:
        assert result.num_spared == 0  # the first round was no worse, and is returned
    if stopped == "floor":
        assert result.weights.min() == 0.7
    if rounds == [1]:
        train = Trainer(unit)
        second = equalise(train, weights=result.next_weights)
        assert (second.met, len(second.history)) == (True, 1)
        assert torch.equal(train.seen[0], result.next_weights)


def test_chance_finds_new_people_every_round_and_ends_are_on_the_safe_side(unit: Tensor) -> None:
    """By estimates of single runs the target is met after some rounds.

    By ends of intervals the truth meets it.
    """
    train = Trainer(unit, chance=0.3)
    result = equalise(train, max_rounds=12, margin=2.0)
    assert result.met
    for before, after in zip(train.seen[1:], train.seen[2:], strict=False):
        assert bool((after <= before).all())  # whoever was exposed once stays spared
    # by chance, some were never seen at their true value
    assert float((unit * result.weights.square()).max()) <= 1.3
    train = Trainer(unit, chance=0.3, error=0.3)
    result = torchfil.equalise(train, target=1.0, max_rounds=12, margin=2.0)
    assert result.met
    assert result.worst > result.worst_end >= 1.0 > result.history[0].worst_end
    assert float((unit * result.weights.square()).max()) <= 1.0


def test_without_a_target_a_share_is_spared_and_a_question_is_aimed_at(unit: Tensor) -> None:
    result = equalise(Trainer(unit), None, margin=1.0)
    assert (result.met, result.num_spared) == (True, 20)  # 1 % of 2,000
    assert result.target == pytest.approx(1 / unit.sort().values[-21].item(), rel=1e-5)
    assert result.history[1].spread < result.history[0].spread
    assert equalise(Trainer(unit), None, share=0.1, margin=1.0).num_spared == 200
    result = equalise(Trainer(unit), 0.25, question="member", margin=1.0)
    rates = largest_true_positive_rate(unit.double(), 0.01)
    assert result.met
    assert result.worst <= 0.25
    assert result.history[0].worst == pytest.approx(float(rates.max()), rel=1e-6)
    assert torch.equal(result.weights < 1, rates > 0.25)


def test_public_cells(unit: Tensor) -> None:
    """ω is a function of the cell, whose members need no more than it."""
    cells = torch.arange(2000) // 10
    by_cell, alone = (equalise(Trainer(unit), by=by).weights.view(200, 10) for by in (cells, None))
    assert torch.equal(by_cell, alone.amin(dim=1, keepdim=True).expand(-1, 10))


def test_what_is_not_known_of_an_example(unit: Tensor) -> None:
    """Nobody who was not measured is spared; what another run would draw is left to the margin.

    No interval.
    """

    def run(
        exposure: Tensor, error: Any = 0.0, measured: Any = None, run_error: float = 0.0
    ) -> Any:
        def train(weights: Tensor | None) -> StandIn:
            stand_in = StandIn(exposure * (1 if weights is None else weights**2), measured=measured)
            value, errors = stand_in.value, torch.as_tensor(error).double().expand(len(exposure))
            more = {"run_error": run_error * value} if run_error else {}
            stand_in.estimate = Estimate(value, errors, "estimate", positive=True, **more)
            return stand_in

        return train

    assert equalise(run(unit, measured=unit < unit.max())).weights[unit.argmax()] == 1
    wide = torchfil.equalise(run(unit, run_error=3.0), target=1.0)
    assert (wide.met, wide.num_spared) == (True, equalise(Trainer(unit)).num_spared)
    two = torch.tensor([0.1, 4.0])
    result = torchfil.equalise(run(two, torch.tensor([0.0, torch.inf])), target=1.0)
    assert (result.met, result.history[0].without_interval) == (True, 1)
    assert result.weights[1] < 0.5
    for train, options, noun in (
        (run(two, torch.inf), {"confidence": 0.95}, "probes give nobody"),
        (run(two * torch.inf), {}, "without limit"),
        (run(two, measured=torch.zeros(2, dtype=torch.bool)), {}, "measured nobody"),
    ):
        with pytest.raises(ValueError, match=noun):
            equalise(train, **options)


# ------------------------------------------------------------ small runs, and what a run file keeps

DELTA = 1e-5
SIDES = ["left" if row % 3 else "right" for row in range(40)]


def train_small(weights: Tensor | None, passes: int = 3) -> tuple[FILPrivacyEngine, float]:
    """Private training of a small network on forty examples, with the same draws and noise at each
    call.
    """
    torch.manual_seed(3)
    plain = loader(data(40), generator=None)
    options = {"criterion": nn.CrossEntropyLoss(), "estimator": "exact"}
    engine, *_, private = make(plain, clip_weights=weights, **options)
    for _ in range(passes):
        for x, y in private:
            engine.train_step(x.to(DEVICE), y.to(DEVICE))
    return engine, 0.75


@pytest.fixture(scope="module")
def equalised() -> Equalised:
    """Two rounds on forty examples, of which the most exposed quarter is spared."""
    options = {"max_rounds": 2, "margin": 4.0, "delta": DELTA}
    return torchfil.equalise(train_small, share=0.25, confidence=None, **options)


def test_of_real_runs_epsilon_adds_up_over_rounds(equalised: Equalised) -> None:
    """The most exposed are spared, and what is reported is the engine's own."""
    assert equalised.worst > equalised.history[0].worst
    assert equalised.worst == pytest.approx(equalised.engine.get_smallest_mse_bound()[0], rel=1e-6)
    assert torch.equal(equalised.engine.clip_weights, equalised.weights)
    single = equalised.history[0].epsilon
    assert single == pytest.approx(float(equalised.engine.get_epsilon(DELTA)))
    assert single < equalised.epsilon_of_all_rounds < 2 * single
    with pytest.raises(ValueError, match="clip_weights=weights"):
        equalise(lambda weights: train_small(None), None, share=0.05)


def test_rounds_and_the_exposure_before_come_back(equalised: Equalised, tmp_path: Path) -> None:
    path = equalised.engine.save_run(
        tmp_path / "run.parquet", delta=DELTA, groups={"side": SIDES}, equalised=equalised
    )
    run = load(path)
    names = ("target", "met", "stopped", "epsilon_of_all_rounds")
    assert run.about["equalised"] == {
        "question": None,
        **{name: getattr(equalised, name) for name in names},
    }
    for name in ("worst", "num_spared", "score", "fresh", "epsilon"):
        assert run.rounds[name].tolist() == [getattr(each, name) for each in equalised.history]
    assert run.rounds["num_spared"][0] == 0 < run.rounds["num_spared"][1]
    assert np.isfinite(run.columns["fil_before"]).any()


def test_another_run_is_refused(equalised: Equalised, tmp_path: Path) -> None:
    weights = torch.full((40,), 0.5)
    other, _ = train_small(weights, 1)
    with pytest.raises(ValueError, match="other clip weights"):
        other.save_run(tmp_path / "run.parquet", delta=DELTA, equalised=equalised)
    assert not (tmp_path / "run.parquet").exists()
    run = load(other.save_run(tmp_path / "run.parquet", delta=DELTA))
    assert run.about["equalised"] is run.about["noise_choice"] is None
    assert run.rounds == {}
