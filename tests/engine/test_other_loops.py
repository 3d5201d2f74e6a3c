"""Loops and schedules that are not as the engine takes them to be: refused, or accounted for rightly."""

from __future__ import annotations

import copy
import io
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from opacus.schedulers import ExponentialNoise
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, TensorDataset

from tests.engine.ways import LOSS, WAYS, examples, mlp, start, step
from torchfil import FILPrivacyEngine


@pytest.mark.parametrize(("way", "clear"), [("hooks", True), ("auto", True), ("auto", False)])
def test_a_sum_is_not_released_twice(way: str, clear: bool) -> None:
    """model.zero_grad() does not reach the clipped sums, and a loop may clear nothing at all."""
    alike = torch.ones(24, 3), torch.ones(24, dtype=torch.long)
    engine, model, optimizer, loader = start(mlp(), alike, way, max_grad_norm=0.1, noise_multiplier=1e-6)
    norms = []
    for x, y in loader:
        if clear:
            model.zero_grad()
        LOSS(model(x), y).backward()
        optimizer.step()
        norms.append(float(torch.cat([p.summed_grad.flatten() for p in optimizer.params]).norm()))
    assert norms == pytest.approx(norms[:1] * 4, rel=1e-6)
    assert 0 < norms[0] <= 6 * 0.1 * (1 + 1e-6)
    assert engine.leakage()["participations"].tolist() == [1] * 24


class _Positions(nn.Module):
    """Adds a vector by position; the positions are the same for all examples."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 3))

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """As said."""
        return x + self.weight[positions]


class _WithPositions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.positions, self.head = _Positions(), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        result: Tensor = self.head(torch.tanh(self.positions(x, torch.arange(5))).mean(dim=1))
        return result


@pytest.mark.parametrize("way", ["auto", "train_step"])
@pytest.mark.parametrize("batch", [4, 5])
def test_an_argument_of_the_batch_s_length_by_chance_is_still_shared(way: str, batch: int) -> None:
    module = _WithPositions()
    options = {"noise_multiplier": 1e-9, "max_grad_norm": 1e3, "clip": "hard", "batch": batch}
    engine, model, optimizer, loader = start(module, examples(20, 5, 3), way, **options)
    x, y = next(iter(loader))
    step(engine, model, optimizer, x, y, way)
    same = _WithPositions()
    LOSS(same(x), y).backward()
    for got, want in zip(module.parameters(), same.parameters(), strict=True):
        assert torch.allclose(got.grad, want.grad, atol=1e-5)  # type: ignore[arg-type]


def test_train_step_refuses_a_batch_that_was_not_read_last() -> None:
    """A prefetcher reads one batch ahead: the step would be booked for the examples of the next."""
    engine, _, _, loader = start(mlp(), examples(), "train_step")
    batches = iter(loader)
    x, y = next(batches)
    x2, y2 = next(batches)
    assert not torch.equal(y, y2)
    for given in ((x, y), (x.clone(), y), (x + 0.1, y.clone()), (x.clone(), y2)):
        with pytest.raises(RuntimeError, match="got a batch that was read before the last one"):
            engine.train_step(*given)
    engine.train_step(x2, y2)
    assert engine.leakage()["participations"].tolist() == [0] * 6 + [1] * 6 + [0] * 12


@pytest.mark.parametrize("way", ["hooks", "auto"])
def test_noise_that_changes_within_a_logical_batch_is_refused(way: str) -> None:
    engine, model, optimizer, loader = start(mlp(), examples(), way, batch=24)
    scheduler = ExponentialNoise(optimizer, gamma=0.5)
    with BatchMemoryManager(data_loader=loader, max_physical_batch_size=12, optimizer=optimizer) as parts:
        batches = iter(parts)
        step(engine, model, optimizer, *next(batches), way)
        scheduler.step()
        with pytest.raises(RuntimeError, match=r"changed from \(1\.0, 1\.0\) to \(0\.5, 1\.0\) within one logical"):
            step(engine, model, optimizer, *next(batches), way)


def test_the_order_of_what_is_tracked_does_not_matter() -> None:
    file = io.BytesIO()
    engine, model, optimizer, loader = start(mlp(), examples(), track=("plis", "diagonal"))
    step(engine, model, optimizer, *next(iter(loader)), "hooks")
    engine.save_checkpoint(path=file, module=model, optimizer=optimizer)
    file.seek(0)
    other, model, optimizer, _ = start(mlp(), examples(), track=("plis", "diagonal"))
    other.load_checkpoint(path=file, module=model, optimizer=optimizer)
    assert torch.equal(other.get_fil().value, engine.get_fil().value)


def test_a_checkpoint_of_another_model_changes_nothing() -> None:
    file = io.BytesIO()
    engine, model, optimizer, loader = start(mlp(), examples())
    step(engine, model, optimizer, *next(iter(loader)), "hooks")
    engine.save_checkpoint(path=file, module=model, optimizer=optimizer)
    file.seek(0)
    module = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    other, model, optimizer, _ = start(module, examples())
    before = copy.deepcopy(module.state_dict())
    with pytest.raises(RuntimeError, match=r"size mismatch for _module\.0\.weight"):
        other.load_checkpoint(path=file, module=model, optimizer=optimizer)
    assert other.accountant.history == []
    assert other.state_dict()["run"]["ledger"] is None
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


class _Named(Dataset[Any]):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        x, y = examples()
        return {"input": x[index], "labels": y[index]}


@pytest.mark.parametrize("way", ["hooks", "auto"])
def test_labels_may_be_taken_out_of_a_dict(way: str) -> None:
    engine, model, optimizer, loader = start(mlp(), _Named(), way)
    for batch in loader:
        labels = batch.pop("labels")
        step(engine, model, optimizer, batch["input"], labels, way)
    assert engine.leakage()["participations"].tolist() == [1] * 24


def test_two_backward_passes_through_one_output_add_up() -> None:
    """In a loop whose backward pass ends at the outputs; the sum is not the engine's loss."""
    _, model, optimizer, loader = start(mlp(), examples(), "auto")
    x, y = next(iter(loader))
    optimizer.zero_grad()
    output = model(x)
    (100 * output.square()).sum().backward(retain_graph=True)
    LOSS(output, y).backward()
    with pytest.raises(ValueError, match="differs from that of the engine's loss"):
        optimizer.step()


class _Halves(BatchSampler):
    def __init__(self) -> None:
        pass

    def __iter__(self) -> Iterator[list[int]]:
        return iter([list(range(12)), list(range(12, 24))])

    def __len__(self) -> int:
        return 2


def test_a_batch_sampler_of_one_s_own() -> None:
    module, engine = mlp(), FILPrivacyEngine()
    model, optimizer, loader = engine.make_private(
        module,
        torch.optim.SGD(module.parameters(), lr=0.0),
        DataLoader(TensorDataset(*examples()), batch_sampler=_Halves()),
        poisson_sampling=False,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    for x, y in loader:
        step(engine, model, optimizer, x, y, "hooks")
    assert engine.leakage()["participations"].tolist() == [1] * 24


@pytest.mark.parametrize("way", WAYS)
def test_parameters_that_the_optimizer_does_not_train_are_told(way: str) -> None:
    module = mlp()
    optimizer = torch.optim.SGD(module[0].parameters(), lr=0.1)  # type: ignore[index, union-attr]
    loader = DataLoader(TensorDataset(*examples()), batch_size=6)
    mode = "auto" if way == "auto" else "hooks"
    with pytest.raises(ValueError, match=r"does not hold 2 trainable ones \(\['2\.weight', '2\.bias'\]\)"):
        FILPrivacyEngine().make_private(module, optimizer, loader, grad_sample_mode=mode)


def test_ids_from_numpy() -> None:
    engine, model, optimizer, loader = start(mlp(), examples())
    for x, y in loader:
        step(engine, model, optimizer, x, y, "hooks")
    fil = engine.get_fil().value
    worst = np.argsort(fil.numpy())[-3:]
    assert torch.equal(engine.get_fil(worst).value, fil[torch.from_numpy(worst)])
    with pytest.raises(KeyError, match="unknown example ids .True."):
        engine.get_fil([True])


class _Counting(nn.Module):
    """A buffer that counts its calls."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        """As said."""
        self.calls += 1
        result: Tensor = self.inner(x)
        return result


@pytest.mark.parametrize("way", WAYS)
def test_buffers_are_written_by_the_loop_s_passes_alone(way: str) -> None:
    module = _Counting()
    engine, model, optimizer, loader = start(module, examples(), way)
    for x, y in loader:
        step(engine, model, optimizer, x, y, way)
    assert float(module.calls) == 4


@pytest.mark.parametrize("way", WAYS)
def test_norms_that_could_not_be_refreshed_are_told_at_the_first_step(way: str) -> None:
    module, (x, y) = mlp(), examples()
    data = TensorDataset(x, torch.arange(24), y)
    engine, model, optimizer, loader = start(module, data, way, norm_refresh=1)
    x, _, y = next(iter(loader))
    with pytest.raises(ValueError, match=r"norm_refresh=1 calls the model .* \(2 positional inputs, .* pass batch_to"):
        step(engine, model, optimizer, x, y, way)
    assert engine.accountant.history == []
    split = {"batch_to_inputs": lambda batch: (batch[0], batch[2])}
    engine, model, optimizer, loader = start(mlp(), data, way, norm_refresh=1, **split)
    x, _, y = next(iter(loader))
    step(engine, model, optimizer, x, y, way)
    assert engine.leakage()["participations"].sum() == 6


def test_train_step_takes_targets_and_inputs_that_were_changed() -> None:
    x, y = examples()
    engine, *_, loader = start(mlp(), (x, y + 1, torch.arange(24)), "train_step")
    for image, label, _ in loader:
        engine.train_step(image + 0.1, label - 1)
    assert engine.leakage()["participations"].tolist() == [1] * 24


def test_train_step_without_targets() -> None:
    """The loss looks at the outputs alone; another batch was read before."""
    options = {
        "criterion": lambda outputs, _: outputs.square().mean(),
        "batch_to_inputs": lambda batch: (batch[0], None),
    }
    engine, *_, loader = start(mlp(), examples(), "train_step", **options)
    for x, _ in loader:
        engine.train_step(x + 0.1, None)
    assert engine.leakage()["participations"].tolist() == [1] * 24


class _Reused:
    x: Tensor
    y: Tensor


def test_a_batch_object_that_is_used_again() -> None:
    reused = _Reused()

    def collate(samples: list[Any]) -> _Reused:
        reused.x, reused.y = (torch.stack(list(part)) for part in zip(*samples, strict=True))
        return reused

    module, engine = mlp(), FILPrivacyEngine()
    model, optimizer, loader = engine.make_private(
        module,
        torch.optim.SGD(module.parameters(), lr=0.0),
        DataLoader(TensorDataset(*examples()), batch_size=6, collate_fn=collate),
        poisson_sampling=False,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        batch_to_inputs=lambda batch: (batch.x, batch.y),
    )
    for batch in loader:
        step(engine, model, optimizer, batch.x, batch.y, "hooks")
    assert engine.leakage()["participations"].tolist() == [1] * 24


class _FromOne(_Named):
    def __getitem__(self, index: int) -> dict[str, Tensor]:
        item = super().__getitem__(index)
        return {**item, "labels": item["labels"] + 1}


@pytest.mark.parametrize("way", WAYS)
def test_labels_may_be_rewritten_in_the_batch(way: str) -> None:
    engine, model, optimizer, loader = start(mlp(), _FromOne(), way)
    for batch in loader:
        batch["labels"] = batch["labels"] - 1
        step(engine, model, optimizer, batch["input"], batch["labels"], way)
    assert engine.leakage()["participations"].tolist() == [1] * 24


@pytest.mark.parametrize("way", WAYS)
def test_a_stand_in_for_an_empty_batch_is_nobody(way: str) -> None:
    torch.manual_seed(3)
    options = {"batch": 1, "poisson_sampling": True, "rand_on_empty": True}
    engine, model, optimizer, loader = start(mlp(), examples(), way, **options)
    drawn = []
    for x, y in loader:
        step(engine, model, optimizer, x, y, way)
        drawn.append(len(engine._training.step.observer.tracker.ids))
    assert 0 in drawn
    assert engine.leakage()["participations"].sum() == sum(drawn)
    assert sum(steps for *_, steps in engine.accountant.history) == len(loader)
