"""The replay finds seeded faults, each by its own sentence, and is silent on sound runs."""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import opacus.optimizers.optimizer as opacus_optimizer
import pytest
import torch
from opacus import PrivacyEngine
from opacus.optimizers import DPOptimizer
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter as LoaderIterator

from tests.test_cli import call, refused
from torchfil.audit import Canaries
from torchfil.audit import replay as replays
from torchfil.audit.replay import Replay, replay
from torchfil.engine import FILPrivacyEngine
from torchfil.pytest_plugin import assert_private_step as assert_private_step
from torchfil.utils import noise

N, BATCH, STEPS = 120, 15, 6
INPUTS = torch.randn(N, 16, generator=torch.Generator().manual_seed(0))
LABELS = (INPUTS[:, :4] @ torch.randn(4, 3, generator=torch.Generator().manual_seed(1))).argmax(1)
DATA = TensorDataset(INPUTS, LABELS)


def mlp(dropout: float = 0.0, *first: nn.Module) -> nn.Module:
    return nn.Sequential(*first, nn.Linear(16, 6), nn.Tanh(), nn.Dropout(dropout), nn.Linear(6, 3))


def cnn() -> nn.Module:
    layers = [nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.Tanh(), nn.Dropout2d(0.2), nn.Flatten()]
    return nn.Sequential(nn.Unflatten(1, (1, 4, 4)), *layers, nn.Linear(16, 3))


class Flipped(Dataset[Any]):
    """Augmentation: every reading flips and shifts at random."""

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> Any:
        x = INPUTS[index] + 0.1 * torch.randn(16)
        return (x.flip(0) if torch.rand(()) < 0.5 else x), LABELS[index]


def sgd(parameters: Any) -> Any:
    return torch.optim.SGD(parameters, lr=0.5)


def trained(
    data: Any,
    *,
    engine: Any = PrivacyEngine,
    model: Callable[[], nn.Module] = mlp,
    optimizer: Callable[[Any], Any] = sgd,
    spoil: Callable[[SimpleNamespace], Any] = lambda run: None,
    each: Callable[[SimpleNamespace], Any] = lambda run: None,
    then: Callable[[SimpleNamespace], Any] = lambda run: None,
    by_engine: bool = False,
    physical: int | None = None,
    workers: int = 0,
    part: bool = False,
    **options: Any,
) -> None:
    """An ordinary private loop; faults are planted once, before each step and after it."""
    run = SimpleNamespace(data=data, engine=engine(), module=model(), last=None)
    loader: Any = DataLoader(
        Subset(data, range(5, N)) if part else data, BATCH, shuffle=True, num_workers=workers
    )
    given = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, **options}
    made = run.engine.make_private(
        module=run.module, optimizer=optimizer(run.module.parameters()), data_loader=loader, **given
    )
    run.model, run.optimizer, run.loader = made[0], made[1], made[-1]
    criterion = made[2] if len(made) == 4 else nn.CrossEntropyLoss()
    spoil(run)
    if physical is not None:
        sizes: Any = {
            "data_loader": run.loader,
            "max_physical_batch_size": physical,
            "optimizer": run.optimizer,
        }
        run.loader = BatchMemoryManager(**sizes).__enter__()
    for _ in range(2):  # epochs
        for batch in run.loader:
            run.x, run.y = batch
            if by_engine:
                run.engine.train_step(run.x, run.y)
                continue
            run.optimizer.zero_grad()
            if each(run) == "skip":
                continue
            run.loss = criterion(run.model(run.x), run.y)
            run.loss.backward()
            run.optimizer.step()
            then(run)


def replayed(
    data: Any = DATA, seed: int = 0, steps: int = STEPS, hidden: Any = None, **options: Any
) -> Replay:
    how = {"examples": options.pop("examples", None), "n_is_public": hidden is None}
    return replay(lambda given: trained(given, **options), data, seed=seed, steps=steps, **how)


# ---------------------------------------------------------------------- sound runs

FIL = {"engine": FILPrivacyEngine}
SOUND: dict[str, dict[str, Any]] = {
    "opacus, Adam": {"optimizer": lambda parameters: torch.optim.Adam(parameters, lr=0.05)},
    "opacus, ghost, dropout": {"model": lambda: mlp(0.3), "grad_sample_mode": "ghost"},
    "opacus, physical batches": {"model": lambda: mlp(0.3), "physical": 6},
    "opacus, workers": {"data": Flipped(), "workers": 1, "model": lambda: mlp(0.3)},
    "opacus, sum": {"loss_reduction": "sum", "part": True},
    "torchfil, CNN": {**FIL, "model": cnn},
    "torchfil, train_step, dropout": {
        **FIL,
        "by_engine": True,
        "model": lambda: mlp(0.3),
        "criterion": nn.functional.cross_entropy,
    },
    "torchfil, physical batches": {**FIL, "physical": 6},
    "torchfil, augmentation": {**FIL, "data": Flipped()},
    "torchfil, without Poisson sampling": {**FIL, "poisson_sampling": False, "steps": 12},
    "torchfil, owners of rows": {**FIL, "owner_of": torch.arange(len(LABELS)) // 3},
    "torchfil, canaries": {**FIL, "canaries": Canaries(50)},
    "torchfil, hidden n": {**FIL, "hidden": True, "sample_rate": 0.125, "expected_batch_size": 15},
}


@pytest.mark.parametrize("name", SOUND)
def test_sound_runs_are_silent(name: str) -> None:
    found = replayed(**SOUND[name])
    assert found.passed, str(found)
    assert found.releases == SOUND[name].get("steps", STEPS)


@pytest.mark.usefixtures("noise_of_users")
@pytest.mark.parametrize("secure", [False, True])
def test_noise_of_users_is_repeated(secure: bool) -> None:
    found = replayed(engine=lambda: FILPrivacyEngine(secure_mode=secure))
    assert found.passed, str(found)


# ---------------------------------------------------------------------- faults


def noise_made_by(change: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    plain = opacus_optimizer._generate_noise
    return lambda **options: change(plain(**options))


def clip_doubled(run: SimpleNamespace) -> None:
    plain = run.optimizer.clip_and_accumulate

    def doubled() -> None:
        run.optimizer.max_grad_norm = 2.0
        plain()
        run.optimizer.max_grad_norm = 1.0

    run.optimizer.clip_and_accumulate = doubled


class Twice:
    """Draws the first example of each batch again."""

    def __init__(self, batches: Any) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[list[int]]:
        return (batch + batch[:1] for batch in self.batches)

    def __len__(self) -> int:
        return len(self.batches)


def drawn_twice(run: SimpleNamespace) -> None:
    loader = run.loader
    run.loader = DataLoader(
        loader.dataset, batch_sampler=Twice(loader.batch_sampler), collate_fn=loader.collate_fn
    )


class Standardised(nn.Module):
    """A batch norm that no validator knows; or running means in a buffer, which nothing uses."""

    def __init__(self, *, running: bool) -> None:
        super().__init__()
        self.running = running
        self.register_buffer("mean", torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        if self.running:
            self.mean = 0.9 * self.mean + 0.1 * x.sum(0).detach()
            return x
        return (x - x.mean(0)) / (x.var(0, unbiased=False) + 0.1).sqrt()


def hook(count: Callable[[Any], Any]) -> Callable[[SimpleNamespace], Any]:
    return lambda run: run.optimizer.attach_step_hook(lambda optimizer: count(run))


def count_half(run: SimpleNamespace) -> None:
    run.steps = getattr(run, "steps", 0) + 1
    if run.steps % 2:
        run.engine.accountant.step(noise_multiplier=1.0, sample_rate=0.125)


def with_last_batch(run: SimpleNamespace) -> None:
    last, run.last = run.last, (run.x[:9], run.y[:9])
    if last is not None:
        run.x, run.y = torch.cat([run.x, last[0]]), torch.cat([run.y, last[1]])


def gradient_after_noise(run: SimpleNamespace) -> None:
    counting = run.optimizer.step_hook

    def add(optimizer: Any) -> None:
        counting(optimizer)
        optimizer.params[-1].grad += 0.001 * run.x.sum(0)[:3]

    run.optimizer.attach_step_hook(add)


def lr_from_loss(run: SimpleNamespace) -> None:
    run.optimizer.param_groups[0]["lr"] = float(run.loss.detach())


def raises_for_large(run: SimpleNamespace) -> None:
    if run.x.numel() and run.x.max() > 100:
        raise OverflowError("too large")


def setting(name: str, value: Callable[[Any], Any]) -> Callable[[SimpleNamespace], Any]:
    return lambda run: setattr(run.optimizer, name, value(run))


def counting(**counted: float) -> Callable[[SimpleNamespace], Any]:
    """The accountant is told other numbers."""
    return hook(lambda run: run.engine.accountant.step(**counted))


HALVED = noise_made_by(lambda drawn: drawn / 2)
NOT_IN_ONE_LAYER = noise_made_by(lambda drawn: drawn * (drawn.shape != (3, 6)))
FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "noise halved": ({"generate": HALVED}, "noise of parameter 0"),
    "a layer without noise": (
        {"generate": NOT_IN_ONE_LAYER},
        "noise of parameter 2 of 18 numbers has 0 times",
    ),
    "clip doubled": ({"spoil": clip_doubled}, "more than C = 1"),
    "same noise": (
        {"then": lambda run: torch.manual_seed(0)},
        "noises of steps 2 and 3 have correlation 1",
    ),
    "an example twice": ({"spoil": drawn_twice}, "is drawn 2 times"),
    "true batch size": (
        {"each": setting("expected_batch_size", lambda run: max(1, len(run.x)))},
        "divisor",
    ),
    "batch norm": (
        {"model": lambda: mlp(0.0, Standardised(running=False))},
        "more than C = 1.*BatchNorm",
    ),
    "running statistics": ({"model": lambda: mlp(0.0, Standardised(running=True))}, "buffers"),
    "rate understated": (
        {"spoil": counting(noise_multiplier=1.0, sample_rate=0.02), "steps": 12},
        "q = 0.02 gives 29",
    ),
    "half of the steps": ({"spoil": hook(count_half)}, "counts 3 of 6 releases"),
    "σ overstated": (
        {"spoil": counting(noise_multiplier=2.0, sample_rate=0.125)},
        "counts σ = 2, the optimizer has 1",
    ),
    "leak into the next batch": ({"each": with_last_batch}, "was not drawn"),
    "gradient after the noise": ({"spoil": gradient_after_noise}, "weights and optimizer state is"),
    "learning rate from the loss": ({"then": lr_from_loss}, "setting of the optimizer is"),
    "C from the data": (
        {"each": setting("max_grad_norm", lambda run: float(run.x.norm(dim=1).sum()) / 50 + 0.1)},
        "the C is",
    ),
    "an error": ({"each": raises_for_large}, "OverflowError"),
    "fixed size": ({"poisson_sampling": False, "steps": 14}, "Poisson sampling"),
    "hidden n": ({"hidden": True}, "with 119 of 120 examples the divisor is 14 instead of 15"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_seeded_fault_is_found(name: str) -> None:
    options, sentence = FAULTS[name]
    options = dict(options)
    generate = options.pop("generate", opacus_optimizer._generate_noise)
    with mock.patch.object(opacus_optimizer, "_generate_noise", generate):
        found = replayed(**options)
    assert not found.passed
    assert any(re.search(sentence, finding) for finding in found.findings), str(found)


# ---------------------------------------------------------------- refusals, and what is left behind


class Stream(IterableDataset[Any]):
    """Without a length."""

    def __iter__(self) -> Iterator[Any]:
        return iter(DATA)


def raises(data: Any) -> None:
    raise KeyError("no such column")


@pytest.mark.parametrize(
    ("train", "data", "options", "said"),
    [
        (trained, Stream(), {}, "no numbered examples"),
        (lambda data: trained(DATA), DATA, {}, "no private step"),
        (trained, DATA, {"examples": [N]}, r"examples=\[120\] were not drawn"),
    ],
)
def test_what_cannot_be_replayed_is_refused(
    train: Any, data: Any, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        replay(train, data, steps=2, **options)


def test_an_error_of_the_user_is_the_users() -> None:
    with pytest.raises(KeyError, match="no such column"):
        replay(raises, DATA)


def test_everything_is_restored() -> None:
    owners = (DPOptimizer, PrivacyEngine, LoaderIterator, DataLoader, nn.Module, noise)
    before = [dict(vars(owner)) for owner in owners]
    state = torch.get_rng_state()
    for train in (trained, raises):
        with contextlib.suppress(KeyError):
            replay(train, DATA, steps=1)
    assert [dict(vars(owner)) for owner in owners] == before
    assert torch.equal(torch.get_rng_state(), state)


def test_dropout_is_coupled_by_example() -> None:
    """Without it, a sound run would not pass: other masks change the sum where the example is left
    out.
    """
    with mock.patch.object(
        replays._Run, "_rows", lambda run, shape, numbers, ids: numbers.new_ones(shape)
    ):
        assert not replayed(model=lambda: mlp(0.5)).passed


# -------------------------------------------------------------- in tests, and from the command line


def test_the_fixture_asserts(assert_private_step: Any) -> None:
    assert_private_step(trained, DATA, steps=2)
    with pytest.raises(AssertionError, match="n is not public"):
        assert_private_step(trained, DATA, steps=2, n_is_public=False)


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_training.py").write_text(
        "from tests.audit.test_replay import DATA, trained, raises\n"
        "def train(data):\n    print('training')\n    trained(data)\n"
        "def data():\n    return DATA\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    named = ("audit", "own_training:train", "--steps", "2", "--data")
    sound = call(*named, "own_training:data")
    assert sound.exit_code == 0
    assert "does not prove privacy" in sound.stdout
    found = call(*named, "own_training:DATA", "--hidden-n", "--json")
    assert found.exit_code == 1
    assert "n is not public" in json.loads(found.stdout)["findings"][0]
    assert "KeyError: 'no such column'" in refused(
        "audit", "own_training:raises", "--data", "own_training:DATA"
    )
