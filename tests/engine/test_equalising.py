"""``torchfil.equalise``: stand-ins whose leakage responds as it is told to, then small real runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import torchfil
from torchfil import FILPrivacyEngine
from torchfil.accounting.ids import ExampleIds
from torchfil.fisher.results import Estimate
from torchfil.guessing import Guess, largest_true_positive_rate
from torchfil.questions import Absent

pytestmark = pytest.mark.filterwarnings("ignore:The clip weights were computed from private data")


class StandIn:
    """What a run says, from exposures e = 1/bound or D."""

    def __init__(self, exposure: Tensor, error: float = 0.0, measured: Tensor | None = None) -> None:
        self.value = exposure.double()
        self.estimate = Estimate(self.value, error * self.value, "estimate", positive=True)
        self.measured = torch.ones(len(exposure), dtype=torch.bool) if measured is None else measured
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

    def __init__(self, unit: Tensor, *, power: float = 2.0, chance: float = 0.0, error: float = 0.0) -> None:
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
    torch.manual_seed(0)
    return torch.exp(1.2 * torch.randn(2000)) / 10


def test_a_response_of_the_square_needs_one_round(unit: Tensor) -> None:
    train = Trainer(unit)
    result = torchfil.equalise(train, target=1.0, confidence=None)
    assert result.met
    assert result.stopped == "target met"
    assert train.seen[0] is None
    assert len(train.seen) == 2
    assert result.history[0].worst == pytest.approx(1 / unit.max().item(), rel=1e-5)
    assert result.worst >= 1.0
    assert result.history[1].worst == result.worst
    spared = unit > 1 / 1.5  # the default margin
    assert torch.equal(result.weights < 1, spared)
    assert result.num_spared == int(spared.sum())
    assert result.history[0].num_below == int((unit > 1).sum())
    assert result.weights.min() >= 1 / 16
    assert torch.equal(result.next_weights, result.weights)


def test_rounds_are_counted_where_asked_for(unit: Tensor, capsys: pytest.CaptureFixture[str]) -> None:
    torchfil.equalise(Trainer(unit), target=1.0, confidence=None)
    assert capsys.readouterr().err == ""
    torchfil.equalise(Trainer(unit), target=1.0, confidence=None, progress=True)
    assert "rounds" in capsys.readouterr().err


def test_a_weaker_response_takes_more_rounds(unit: Tensor) -> None:
    result = torchfil.equalise(Trainer(unit, power=1.2), target=1.0, confidence=None, max_rounds=8)
    assert result.met
    assert 2 < len(result.history) <= 8


def test_weights_that_nobody_uses_are_told(unit: Tensor) -> None:
    result = torchfil.equalise(Trainer(unit, power=0.0), target=1.0, confidence=None, max_rounds=9)
    assert not result.met
    assert result.stopped == "no further progress"
    assert len(result.history) == 3
    assert result.num_spared == 0  # the first round was no worse, and is returned
    assert "two rounds in a row did not help" in str(result)


def test_the_floor(unit: Tensor) -> None:
    result = torchfil.equalise(Trainer(unit), target=1.0, confidence=None, floor=0.7, max_rounds=9)
    assert not result.met
    assert result.stopped == "floor"
    assert result.weights.min() == 0.7
    assert "lower floor=" in str(result)


def test_chance_finds_new_people_every_round(unit: Tensor) -> None:
    """By estimates of single runs the target is met after some rounds; what an average over runs says is told."""
    train = Trainer(unit, chance=0.3)
    result = torchfil.equalise(train, target=1.0, confidence=None, max_rounds=12, margin=2.0)
    assert result.met
    for before, after in zip(train.seen[1:], train.seen[2:], strict=False):
        assert before is not None
        assert after is not None
        assert bool((after <= before).all())  # whoever was exposed once stays spared
    mean_exposure = unit * result.weights.square()
    assert float(mean_exposure.max()) <= 1.3  # by chance, some were never seen at their true value


def test_ends_of_intervals_are_on_the_safe_side(unit: Tensor) -> None:
    """With errors as reported, the truth meets the target where the ends do."""
    train = Trainer(unit, chance=0.3, error=0.3)
    result = torchfil.equalise(train, target=1.0, max_rounds=12, margin=2.0)
    assert result.met
    assert result.worst_end >= 1.0 > result.history[0].worst_end
    assert result.worst > result.worst_end
    assert float((unit * result.weights.square()).max()) <= 1.0


def test_fresh_runs_report_what_was_not_chosen(unit: Tensor) -> None:
    train = Trainer(unit, chance=0.3)
    result = torchfil.equalise(train, target=1.0, confidence=None, max_rounds=12, fresh_runs=1)
    assert [each.fresh for each in result.history] == [False] * (len(train.seen) - 1) + [True]
    assert train.seen[-1] is not None
    assert torch.equal(train.seen[-1], result.weights)
    assert result.worst == result.history[-1].worst
    assert result.met == (result.worst >= 1)
    assert ("the target is met" in str(result)) == result.met
    assert "from 1 fresh run" in str(result)


def test_runs_of_one_seed_are_not_fresh(unit: Tensor) -> None:
    with pytest.raises(ValueError, match="repeated a run to the last digit"):
        torchfil.equalise(Trainer(unit), target=1.0, confidence=None, fresh_runs=1)


def test_without_a_target_a_share_is_spared(unit: Tensor) -> None:
    result = torchfil.equalise(Trainer(unit), confidence=None, margin=1.0)
    assert result.met
    assert result.num_spared == 20  # 1 % of 2,000
    assert result.target == pytest.approx(1 / unit.sort().values[-21].item(), rel=1e-5)
    assert torchfil.equalise(Trainer(unit), confidence=None, share=0.1, margin=1.0).num_spared == 200
    spreads = [each.spread for each in result.history]
    assert spreads[1] < spreads[0]


def test_a_question(unit: Tensor) -> None:
    result = torchfil.equalise(Trainer(unit), target=0.25, question="member", confidence=None, margin=1.0)
    rates = largest_true_positive_rate(unit.double(), 0.01)
    assert result.met
    assert result.worst <= 0.25
    assert result.history[0].worst == pytest.approx(float(rates.max()), rel=1e-6)
    assert torch.equal(result.weights < 1, rates > 0.25)
    assert "every attacker" in str(result)


def test_groups_alone(unit: Tensor) -> None:
    """Means become equal by one factor a group; nobody is spared for himself."""
    label = torch.arange(2000) % 2
    exposure = unit * torch.tensor([1.0, 2.25])[label]
    result = torchfil.equalise(Trainer(exposure, power=1.6), groups=label, max_rounds=6)
    assert result.met
    assert result.target is None
    ratios = [each.group_ratio or 0.0 for each in result.history]
    assert ratios[0] == pytest.approx(1.5, rel=0.05)
    assert ratios[-1] <= 1.05
    assert len(result.weights.unique()) == 2
    assert bool((result.weights[label == 0] == 1).all())
    assert set(result.history[0].group_means) == {0, 1}
    assert result.chosen is result.history[-1]
    assert f"the largest mean over the smallest is {ratios[-1]:.3f}" in str(result)


def test_groups_and_a_target(unit: Tensor) -> None:
    label = [("f", "m")[i % 2] for i in range(2000)]
    exposure = unit * torch.tensor([1.0, 2.25])[torch.arange(2000) % 2]
    named = dict(enumerate(label))
    result = torchfil.equalise(Trainer(exposure), target=1.0, confidence=None, groups=named, max_rounds=6)
    assert result.met
    assert result.worst >= 1
    assert (result.history[-1].group_ratio or 0) <= 1.05


def test_public_cells(unit: Tensor) -> None:
    """ω is a function of the cell: its members need no more than it, and one of them needs it."""
    cells = torch.arange(2000) // 10
    result = torchfil.equalise(Trainer(unit), target=1.0, confidence=None, by=cells)
    alone = torchfil.equalise(Trainer(unit), target=1.0, confidence=None)
    assert result.met
    for cell in range(200):
        assert len(result.weights[cells == cell].unique()) == 1
        assert result.weights[cells == cell][0] == alone.weights[cells == cell].min()


def test_going_on_from_earlier_weights(unit: Tensor) -> None:
    first = torchfil.equalise(Trainer(unit), target=1.0, confidence=None, max_rounds=1)
    assert not first.met
    assert first.stopped == "max_rounds"
    assert first.num_spared == 0
    train = Trainer(unit)
    second = torchfil.equalise(train, target=1.0, confidence=None, weights=first.next_weights)
    assert second.met
    assert len(second.history) == 1
    assert train.seen[0] is not None
    assert torch.equal(train.seen[0], first.next_weights)


def test_unmeasured_examples_are_left_alone(unit: Tensor) -> None:
    measured = unit < unit.max()

    def train(weights: Tensor | None) -> StandIn:
        return StandIn(unit * (1 if weights is None else weights**2), measured=measured)

    result = torchfil.equalise(train, target=1.0, confidence=None)
    assert result.met
    assert result.weights[unit.argmax()] == 1


def test_what_another_run_would_draw_is_left_to_the_margin(unit: Tensor) -> None:
    """A run's own error is wide where single steps decide: going by it would spare half of all examples."""

    def train(weights: Tensor | None) -> StandIn:
        stand_in = StandIn(unit * (1 if weights is None else weights**2))
        zero = torch.zeros_like(stand_in.value)
        stand_in.estimate = Estimate(stand_in.value, zero, "estimate", positive=True, run_error=3 * stand_in.value)
        return stand_in

    result = torchfil.equalise(train, target=1.0)
    assert result.met
    assert result.num_spared == torchfil.equalise(Trainer(unit), target=1.0, confidence=None).num_spared


def test_examples_without_an_interval_count_by_their_estimate() -> None:
    def train(error: Tensor) -> Callable[[Tensor | None], Any]:
        def run(weights: Tensor | None) -> StandIn:
            stand_in = StandIn(torch.tensor([0.1, 4.0]) * (1 if weights is None else weights**2))
            untold = torch.where(error > 0, torch.inf, 0.0).double()
            stand_in.estimate = Estimate(stand_in.value, untold, "estimate", positive=True)
            return stand_in

        return run

    result = torchfil.equalise(train(torch.tensor([0.0, 1.0])), target=1.0)
    assert result.met
    assert result.history[0].without_interval == 1
    assert result.weights[1] < 0.5
    with pytest.raises(ValueError, match="the probes give nobody an error"):
        torchfil.equalise(train(torch.tensor([1.0, 1.0])), target=1.0)


def test_scores_and_text(unit: Tensor) -> None:
    train = Trainer(unit)
    result = torchfil.equalise(lambda weights: (train(weights), 0.9835), target=1.0, confidence=None)
    assert [each.score for each in result.history] == [0.9835, 0.9835]
    text = str(result)
    for part in ("unbiased attackers", "target 1", "0.9835", "held fixed", "2 trainings", "as in IRFIL"):
        assert part in text
    assert "group ratio" not in text
    assert "ε  " not in text
    assert result.epsilon_of_all_rounds is None


def test_the_caveat_is_a_warning(unit: Tensor) -> None:
    with pytest.warns(UserWarning, match="computed from private data and are held fixed"):
        torchfil.equalise(Trainer(unit), target=1.0, confidence=None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_rounds": 0}, "max_rounds=0 must be at least 1"),
        ({"fresh_runs": -1}, "fresh_runs=-1 must be 0"),
        ({"floor": 0.0}, "floor=0.0 must lie in"),
        ({"margin": 0.5}, "margin=0.5 must be at least 1"),
        ({"delta": 1.0}, "delta=1.0 must lie strictly"),
        ({"weights": torch.tensor([0.5, 1.5])}, "clip_weights of example 1 is 1.5"),
        ({"groups": [0, 1], "by": [0, 1, 2]}, "must each have one entry per example"),
    ],
)
def test_options_that_are_none_are_named_before_training(options: dict[str, Any], message: str) -> None:
    def train(weights: Tensor | None) -> StandIn:
        raise AssertionError("trained")

    with pytest.raises(ValueError, match=message):
        torchfil.equalise(train, **options)


def test_what_is_no_training(unit: Tensor) -> None:
    with pytest.raises(ValueError, match="leak without limit"):
        torchfil.equalise(lambda weights: StandIn(torch.full((3,), torch.inf)), target=1.0)
    with pytest.raises(ValueError, match="measured nobody"):
        torchfil.equalise(lambda weights: StandIn(unit, measured=torch.zeros(2000, dtype=torch.bool)), target=1.0)


class Digits:
    """Private training of a small network on handwritten digits, another seed at each call."""

    def __init__(
        self, examples: int = 300, steps: int = 60, batch: int = 75, sigma: float = 1.0, **options: Any
    ) -> None:
        digits = load_digits()
        self.inputs = torch.tensor(digits.data / 16, dtype=torch.float32)
        self.targets = torch.tensor(digits.target)
        self.train_set = TensorDataset(self.inputs[:examples], self.targets[:examples])
        self.examples, self.steps, self.batch, self.sigma, self.options = examples, steps, batch, sigma, options
        self.seed = 0
        self.forgets = False
        self.accountant = "rdp"

    def __call__(self, weights: Tensor | None) -> tuple[FILPrivacyEngine, float]:
        self.seed += 1
        torch.manual_seed(self.seed)
        model = nn.Sequential(nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 10))
        engine = FILPrivacyEngine(accountant=self.accountant)
        private_model, _, loader = engine.make_private(
            model,
            torch.optim.SGD(model.parameters(), lr=1.0),
            DataLoader(self.train_set, batch_size=self.batch),
            noise_multiplier=self.sigma,
            criterion=nn.CrossEntropyLoss(),
            clip_weights=None if self.forgets else weights,
            **self.options,
        )
        done = 0
        while done < self.steps:
            for batch in loader:
                engine.train_step(*batch)
                done += 1
        with torch.no_grad():
            guesses = private_model(self.inputs[self.examples :]).argmax(dim=1)
        return engine, float((guesses == self.targets[self.examples :]).double().mean())


@pytest.mark.parametrize("accountant", ["rdp", "gdp"])
def test_digits_share_and_epsilon(accountant: str) -> None:
    """A real run: the most exposed are spared, what is reported is the engine's own, and ε adds up over rounds."""
    train = Digits(examples=100, steps=12, batch=40)
    train.accountant = accountant
    result = torchfil.equalise(train, share=0.05, margin=4.0, confidence=None, max_rounds=2, delta=1e-4)
    assert result.worst > result.history[0].worst
    assert result.worst == pytest.approx(result.engine.get_smallest_mse_bound()[0], rel=1e-6)
    assert torch.equal(result.engine.clip_weights, result.weights)
    assert 0 < result.history[-1].score <= 1  # type: ignore[operator]
    single = result.history[0].epsilon
    assert single is not None
    assert single == pytest.approx(float(result.engine.get_epsilon(1e-4)))
    assert result.epsilon_of_all_rounds is not None
    assert single < result.epsilon_of_all_rounds < 2 * single
    assert f"ε of all 2 rounds together: {result.epsilon_of_all_rounds:.3g}" in str(result)


def test_an_engine_without_the_weights_is_refused() -> None:
    train = Digits(steps=8)
    train.forgets = True
    with pytest.raises(ValueError, match=r"its engine has none; pass them on: make_private\(…, clip_weights=weights\)"):
        torchfil.equalise(train, share=0.05, confidence=None)


@pytest.mark.slow
def test_digits_meet_a_target() -> None:
    """With intervals: every lower end reaches twice what the worst had, and fresh runs on average do, too."""
    train = Digits(steps=80)
    pilot = torchfil.equalise(train, share=0.05, max_rounds=1)
    target = 2 * pilot.worst_end
    result = torchfil.equalise(train, target=target, max_rounds=8, fresh_runs=2)
    assert result.stopped == "target met"
    assert result.worst >= target
    assert result.history[-1].score > pilot.history[0].score - 0.05  # type: ignore[operator]


@pytest.mark.slow
def test_digits_question() -> None:
    train = Digits(steps=60, questions={"member": Absent()})
    result = torchfil.equalise(train, question="member", share=0.05, confidence=None, max_rounds=4)
    assert result.worst < result.history[0].worst
    rates = result.leakage.get_guess("member").true_positive_rate(0.01)
    assert result.worst == pytest.approx(float(rates.max()), rel=1e-4)


@pytest.mark.slow
def test_digits_groups() -> None:
    """Classes leak differently; common factors bring their means together."""
    train = Digits(steps=100)
    result = torchfil.equalise(train, groups=train.targets[:300], group_ratio=1.2, max_rounds=6)
    ratios = [each.group_ratio or 0.0 for each in result.history]
    assert result.met
    assert ratios[-1] <= 1.2 < ratios[0]
