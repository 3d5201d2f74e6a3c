"""What people write around a training loop: accumulation, averaged weights, compiled models, optimizers, samplers."""

from __future__ import annotations

import copy
import logging
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from tests.cases import DEVICE, grouped, relative_error
from tests.engine.loops import SIGMA, C, data, loader, network
from torchfil import FILPrivacyEngine
from torchfil.fisher import reference


def make(
    module: nn.Module | None = None, optimizer: Any = None, dataset: Any = None, batches: Any = None, **options: Any
) -> Any:
    module = module if module is not None else network()
    engine = FILPrivacyEngine()
    optimizer = optimizer if optimizer is not None else torch.optim.SGD(module.parameters(), lr=0.3)
    given = {
        "noise_multiplier": SIGMA,
        "max_grad_norm": C,
        "seed": 3,
        "noise_generator": torch.Generator(DEVICE).manual_seed(2),
        **options,
    }
    batches = batches if batches is not None else loader(dataset if dataset is not None else data(40))
    return engine, module, *engine.make_private(module, optimizer, batches, **grouped(**given))


def loss_of(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0].to(DEVICE)), batch[1].to(DEVICE))


def weights_of(module: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in module.parameters()])


class TestAccumulation:
    @pytest.mark.parametrize("criterion", [None, nn.CrossEntropyLoss()])
    def test_a_divided_loss_is_the_loss(self, criterion: Any) -> None:
        """loss / k over k batches: the mean gradient, each example clipped to C, with the ledger of undivided ones."""
        found = []
        for divisor in (1, 2):
            torch.manual_seed(1)
            engine, module, model, optimizer, batches = make(
                poisson_sampling=False, criterion=criterion, estimator="exact"
            )
            for number, batch in enumerate(batches, start=1):
                (loss_of(model, batch) / divisor).backward()
                if number % 2 == 0 or number == len(batches):  # 5 batches: the last round is a short one
                    optimizer.step()
                    optimizer.zero_grad()
            found.append((weights_of(module), engine.ledger.sums["trace"], engine.accountant.history))
        assert torch.equal(found[0][0], found[1][0])
        assert torch.equal(found[0][1], found[1][1])
        assert found[0][2] == found[1][2]

    def test_the_ledger_is_the_truth(self) -> None:
        """Without Poisson sampling every example takes part once under one noise: its own J̃ᵀJ̃/(σC)²."""
        dataset, plain = data(16), network()
        engine, _, model, optimizer, batches = make(
            dataset=dataset, poisson_sampling=False, estimator="exact", batches=loader(dataset, 4)
        )
        for batch in batches:
            (loss_of(model, batch) / 4).backward()
        optimizer.step()
        x, y = (part.to(DEVICE) for part in dataset.tensors)
        truth = reference.exact_fim(plain, F.cross_entropy, x, y, max_grad_norm=C, noise_multiplier=SIGMA)
        assert relative_error(engine.ledger.sums["trace"], truth.diagonal(dim1=1, dim2=2).sum(dim=1)) < 1e-9
        assert engine.ledger.sums["participations"].tolist() == [1] * 16
        clipped = reference.clipped_gradients(plain, F.cross_entropy, x, y, max_grad_norm=C)
        released = torch.cat([p.summed_grad.flatten() for p in optimizer.params])
        assert relative_error(released, clipped.sum(dim=0)) < 1e-9

    def test_another_scale_is_still_refused(self) -> None:
        _, _, model, optimizer, batches = make(poisson_sampling=False, criterion=nn.CrossEntropyLoss())
        for _, batch in zip(range(2), batches, strict=False):
            (loss_of(model, batch) / 3).backward()
        with pytest.raises(ValueError, match="It is 0.333333 times that: the loop scales its loss"):
            optimizer.step()

    def test_poisson_batches_are_refused_with_a_remedy_that_works(self) -> None:
        engine, _, model, optimizer, batches = make()
        for _, batch in zip(range(2), batches, strict=False):
            (loss_of(model, batch) / 2).backward()
        remedies = "accumulation_steps=2.*BatchMemoryManager"
        with pytest.raises(ValueError, match=remedies):
            optimizer.step()

        dataset = data(40)
        engine, _, model, optimizer, batches = make(dataset=dataset, batches=loader(dataset, 2 * 8))
        with BatchMemoryManager(data_loader=batches, max_physical_batch_size=8, optimizer=optimizer) as parts:
            for batch in parts:
                loss_of(model, batch).backward()
                optimizer.step()
                optimizer.zero_grad()
        assert engine.ledger.steps == len(batches)

    @pytest.mark.parametrize("divided", [False, True])
    def test_poisson_batches_that_are_parts_of_one_draw(self, divided: bool) -> None:
        """accumulation_steps=3 of batches of 4 is a run with batches of 12: draws, weights, ledger, ε."""
        dataset, found = data(48), []
        for steps, size in ((3, 4), (1, 12)):
            engine, module, model, optimizer, batches = make(
                batches=loader(dataset, size), accumulation_steps=steps, estimator="exact"
            )
            assert len(batches) == 12 // size * 4
            for number, batch in enumerate(batches, start=1):
                if len(batch[0]):  # an empty part may be left out
                    (loss_of(model, batch) / (steps if divided else 1)).backward()
                if number % steps == 0:
                    optimizer.step()
                    optimizer.zero_grad()
            sums = engine.ledger.sums
            found.append((weights_of(module), sums["trace"], engine.accountant.history, sums["participations"]))
            assert batches.sample_rate == pytest.approx(1 / 4)
        assert torch.equal(found[0][3], found[1][3])
        assert relative_error(found[0][0], found[1][0]) < 1e-9
        assert relative_error(found[0][1], found[1][1]) < 1e-9
        assert found[0][2][0][1] == pytest.approx(found[1][2][0][1])
        assert found[0][2][0][2] == found[1][2][0][2] == 4

    def test_a_step_in_the_middle_of_a_draw_is_refused(self) -> None:
        engine, module, model, optimizer, batches = make(batches=loader(data(48), 8), accumulation_steps=2)
        before = weights_of(module)
        reader = iter(batches)
        loss_of(model, next(reader)).backward()
        with pytest.raises(ValueError, match="not over the 2 batches of one draw"):
            optimizer.step()
        loss_of(model, next(reader)).backward()
        assert torch.equal(weights_of(module), before)
        optimizer.step()  # now it is whole
        assert engine.ledger.steps == 1

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"accumulation_steps": 0}, "must be at least 1"),
            ({"accumulation_steps": 9}, "hold more than the data set"),
            ({"accumulation_steps": 2, "grad_sample_mode": "hooks"}, "is for Poisson sampling in grad_sample_mode"),
            ({"accumulation_steps": 2, "poisson_sampling": False}, "any number of batches may be accumulated"),
        ],
    )
    def test_accumulation_that_cannot_be(self, options: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            make(**options)

    @pytest.mark.slow
    def test_the_noise_for_an_epsilon_is_that_of_whole_draws(self) -> None:
        found = []
        for steps, size in ((3, 4), (1, 12)):
            module = network()
            _, optimizer, _ = FILPrivacyEngine().make_private_with_epsilon(
                module,
                torch.optim.SGD(module.parameters(), lr=0.1),
                loader(data(48), size),
                target_epsilon=4.0,
                target_delta=1e-3,
                epochs=2,
                max_grad_norm=C,
                accumulation_steps=steps,
            )
            found.append(optimizer.noise_multiplier)
        assert found[0] == found[1]

    def test_train_step_takes_whole_draws(self) -> None:
        engine, _, _, _, batches = make(accumulation_steps=2, criterion=nn.CrossEntropyLoss())
        x, y = next(iter(batches))
        with pytest.raises(RuntimeError, match="train_step takes whole draws: leave out accumulation_steps"):
            engine.train_step(x, y)


class TestAveragedWeights:
    def test_torch_averages_beside_the_private_model(self) -> None:
        """A deep copy is a plain model; nothing of the run is copied, and passes over it are none of the run's."""
        engine, module, model, optimizer, batches = make()
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        expected: Tensor | None = None
        for _, batch in zip(range(3), batches, strict=False):
            loss_of(model, batch).backward()
            loss_of(average, batch)
            optimizer.step()
            optimizer.zero_grad()
            average.update_parameters(model)
            now = weights_of(module)
            expected = now if expected is None else 0.5 * expected + 0.5 * now
        assert expected is not None
        assert torch.allclose(weights_of(average.module), expected)
        assert engine.ledger.steps == 3
        copied = average.module
        assert [*copied.state_dict()] == [*model.state_dict()]
        assert copied._module is not module
        assert not hasattr(next(iter(copied.parameters())), "_post_accumulate_grad_hooks") or (
            next(iter(copied.parameters()))._post_accumulate_grad_hooks is None
        )

    def test_a_copy_may_be_trained_by_itself(self) -> None:
        _, _, model, *_ = make()
        plain = copy.deepcopy(model)
        F.cross_entropy(
            plain(torch.randn(4, 5, dtype=torch.float64, device=DEVICE)), torch.zeros(4).long().to(DEVICE)
        ).backward()
        assert all(p.grad is not None for p in plain.parameters())
        plain.zero_grad()
        assert plain.training == model.training


class TestCompiledModels:
    def train(self, module: nn.Module, given: nn.Module) -> Tensor:
        engine = FILPrivacyEngine()
        model, optimizer, batches = engine.make_private(
            given,
            torch.optim.SGD(given.parameters(), lr=0.3),
            loader(data(40)),
            noise_multiplier=SIGMA,
            max_grad_norm=C,
            noise_generator=torch.Generator(DEVICE).manual_seed(2),
        )
        for _, batch in zip(range(3), batches, strict=False):
            loss_of(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        return weights_of(module)

    @pytest.mark.parametrize("way", ["wrapped", "in place"])
    def test_the_original_is_trained(self, way: str, caplog: pytest.LogCaptureFixture) -> None:
        expected = self.train(plain := network(), plain)
        module = network()
        given: Any = module
        if way == "wrapped":
            given = torch.compile(module)
        else:
            module.compile()
        with caplog.at_level(logging.INFO, logger="torchfil"):
            found = self.train(module, given)
        assert torch.equal(found, expected)
        assert "the private model is the original" in caplog.text

    def test_compiling_the_private_model_changes_nothing(self) -> None:
        """The engine's own passes are not traced: the same weights, and the same FIL from the same probes."""
        found = []
        for compiled in (False, True):
            torch.manual_seed(0)
            engine, _, model, optimizer, batches = make(network())
            called: Any = torch.compile(model, backend="eager") if compiled else model
            for _, batch in zip(range(3), batches, strict=False):
                loss_of(called, batch).backward()
                optimizer.step()
                optimizer.zero_grad()
            found.append((weights_of(model), engine.get_fil().value))
        assert torch.equal(found[0][0], found[1][0])
        assert torch.equal(found[0][1].nan_to_num(), found[1][1].nan_to_num())

    def test_a_compiled_part_is_refused(self) -> None:
        module = network()
        module[0] = torch.compile(module[0])  # type: ignore[assignment]
        with pytest.raises(ValueError, match="the part '0' of the model was compiled separately"):
            make(module)


class TestOptimizers:
    def test_lbfgs_is_refused(self) -> None:
        module = network()
        with pytest.raises(ValueError, match="LBFGS evaluates the loss several times in one step"):
            make(module, torch.optim.LBFGS(module.parameters()))

    @pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}, {"amsgrad": True}])
    def test_faster_and_other_adams(self, options: dict[str, Any]) -> None:
        found = []
        for more in ({} if "amsgrad" not in options else options, options):
            module = network()
            _, _, model, optimizer, batches = make(module, torch.optim.Adam(module.parameters(), **more))
            for _, batch in zip(range(3), batches, strict=False):
                loss_of(model, batch).backward()
                optimizer.step()
                optimizer.zero_grad()
            found.append(weights_of(module))
        assert relative_error(found[1], found[0]) < 1e-9

    def test_a_closure_is_called_once(self) -> None:
        found = []
        for closed in (False, True):
            engine, module, model, optimizer, batches = make()
            for _, batch in zip(range(3), batches, strict=False):
                optimizer.zero_grad()
                if closed:

                    def closure(batch: Any = batch, model: Any = model) -> Tensor:
                        loss = loss_of(model, batch)
                        loss.backward()
                        return loss

                    optimizer.step(closure)
                else:
                    loss_of(model, batch).backward()
                    optimizer.step()
            found.append(weights_of(module))
            assert engine.ledger.steps == 3
        assert torch.equal(*found)

    def test_groups_and_schedulers(self) -> None:
        """The learning rate of each group follows its scheduler; the accounting does not depend on it."""
        module = network()
        groups = [{"params": module[0].parameters(), "lr": 0.0}, {"params": module[2].parameters()}]
        engine, _, model, optimizer, batches = make(module, torch.optim.SGD(groups, lr=0.3))
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
        before = module[0].weight.detach().clone()
        for _, batch in zip(range(3), batches, strict=False):
            loss_of(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        assert torch.equal(module[0].weight, before)
        assert optimizer.original_optimizer.param_groups[1]["lr"] == pytest.approx(0.3 / 8)
        assert engine.ledger.steps == 3

    def test_a_grad_scaler_is_refused(self) -> None:
        _, module, model, optimizer, batches = make(criterion=nn.CrossEntropyLoss())
        scaler = torch.amp.GradScaler(DEVICE)
        before = weights_of(module)
        scaler.scale(loss_of(model, next(iter(batches)))).backward()
        with pytest.raises(RuntimeError, match=r"GradScaler skips a step.*bfloat16, which needs no scaler"):
            scaler.step(optimizer)
        assert torch.equal(weights_of(module), before)
        with pytest.raises(ValueError, match="a GradScaler"):
            optimizer.step()

    def test_a_grad_scaler_that_is_off_is_none(self) -> None:
        engine, _, model, optimizer, batches = make()
        scaler = torch.amp.GradScaler(DEVICE, enabled=False)
        scaler.scale(loss_of(model, next(iter(batches)))).backward()
        scaler.step(optimizer)
        scaler.update()
        assert engine.ledger.steps == 1


class Backwards(Sampler[int]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Any:
        return iter(range(self.size - 1, -1, -1))

    def __len__(self) -> int:
        return self.size


class TestSamplers:
    def batches(self, sampler: Any, dataset: Any) -> Any:
        return DataLoader(dataset, batch_size=8, sampler=sampler)

    def test_a_subset_is_not_poisson_sampled(self) -> None:
        """Poisson sampling would train on what was held out."""
        with pytest.raises(ValueError, match=r"torch.utils.data.Subset\(dataset, indices\)"):
            make(batches=self.batches(SubsetRandomSampler(range(20)), data(40)))

    def test_a_sampler_that_is_replaced_is_told(self) -> None:
        with pytest.warns(UserWarning, match=r"the loader's sampler \(Backwards\) is not used"):
            make(batches=self.batches(Backwards(40), data(40)))

    def test_weights_without_poisson_sampling(self) -> None:
        """Each participation counts; nothing is taken off for chance."""
        sampler = WeightedRandomSampler([1.0] * 39 + [50.0], 8, replacement=False)
        with pytest.warns(UserWarning, match="take part more often, and each participation counts") as told:
            engine, _, model, optimizer, batches = make(batches=self.batches(sampler, data(40)), poisson_sampling=False)
        assert len(told) == 1
        for _ in range(5):
            for batch in batches:
                loss_of(model, batch).backward()
                optimizer.step()
                optimizer.zero_grad()
        assert engine.ledger.sums["participations"][39] >= 4

    def test_usual_samplers_are_not_talked_about(self) -> None:
        dataset = data(40)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            loaders = [
                self.batches(None, dataset),
                DataLoader(dataset, batch_size=8, shuffle=True),
                DataLoader(dataset, batch_sampler=BatchSampler(RandomSampler(dataset), 8, False)),
            ]
            private = [make(batches=loader)[-1] for loader in loaders]
        assert [len(each) for each in private] == [5, 5, 5]
