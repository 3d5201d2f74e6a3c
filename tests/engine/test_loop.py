"""What people write around a training loop; what is refused, and changes nothing. Ledgers are in test_equivalence.py.

Inputs and outputs of every kind, accumulation, averaged and compiled models, optimizers, samplers, pausing.
"""

from __future__ import annotations

import copy
import logging
import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)

from tests.cases import DEVICE, relative_error
from tests.engine.loops import C, assert_same_run, data, loader, network
from tests.engine.ways import LOSS, WAYS, Calling, start, step, trained, weights_of
from torchfil import FILPrivacyEngine, Private
from torchfil.fisher import NoAmplification, reference


def begun(module: nn.Module | None = None, batches: Any = None, **options: Any) -> Any:
    """The module, and what :func:`start` gives, with noise that can be repeated; batches of eight in order."""
    torch.manual_seed(1)
    module = module if module is not None else network()
    noise = torch.Generator(DEVICE).manual_seed(2)
    given = {"seed": 3, "noise_generator": noise, "lr": 0.3, **options}
    return module, *start(module, batches or loader(data(40)), "auto", **given)


def backward(model: Any, batch: Any, divisor: int = 1) -> Tensor:
    loss = LOSS(model(batch[0].to(DEVICE)), batch[1].to(DEVICE)) / divisor
    loss.backward()
    return loss


class Keywords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.left, self.right, self.head = nn.Linear(3, 4), nn.Linear(2, 4), nn.Linear(4, 3)
        self.double()

    def forward(self, left: Tensor, *, right: Tensor) -> Tensor:
        return torch.as_tensor(self.head(torch.tanh(self.left(left) + self.right(right))))


ROWS = [{"left": x[:3], "right": x[3:], "kind": y} for x, y in data(12)]


def split(batch: Any) -> Any:
    return {"left": batch["left"], "right": batch["right"]}, batch["kind"]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("private", [None, Private(inputs="right")])
def test_keywords_and_dict_batches(private: Private | None, way: str) -> None:
    """tr I against exact Jacobians; an input may be given by position as well."""
    options = {"private": private, "estimator": "exact", "amplification": "none", "batch_to_inputs": split}
    engine, model, optimizer, loader = start(Keywords(), ROWS, way, **options)
    for batch in loader:
        inputs, kinds = split({name: value.to(DEVICE) for name, value in batch.items()})
        if way == "auto":
            optimizer.zero_grad()
            LOSS(model(inputs["left"], right=inputs["right"]), kinds).backward()
            optimizer.step()
        else:
            step(engine, model, optimizer, inputs, kinds, way)
    every = {name: value.to(DEVICE) for name, value in default_collate(ROWS).items()}
    settings: Any = {"max_grad_norm": 1.0, "noise_multiplier": 1.0, "private": private}
    fim = reference.exact_fim(Keywords().to(DEVICE), LOSS, *split(every), **settings)
    assert relative_error(engine.totals.get_trace().value, torch.einsum("bii->b", fim)) < 1e-6
    assert engine.totals.num_coordinates == fim.shape[1]


def test_inputs_that_need_a_word_are_told() -> None:
    engine, model, optimizer, loader = start(Keywords(), ROWS, "auto", criterion=None)
    with pytest.raises(ValueError, match="batch_to_inputs="):
        step(engine, model, optimizer, *split(next(iter(loader))), "auto")
    tokens, kinds = torch.randint(11, (4, 4)), torch.randint(3, (4,))
    module = nn.Sequential(nn.Embedding(11, 4), nn.Flatten(), nn.Linear(16, 3))
    with pytest.raises(ValueError, match="submodule="):
        reference.exact_fim(module, LOSS, tokens, kinds, max_grad_norm=1.0, noise_multiplier=1.0)


def several(self: Any, x: Tensor) -> dict[str, Any]:
    """Outputs that are made from one another."""
    hidden = self.body(x).tanh()
    logits = self.head(hidden)
    parts = {"logits": logits, "again": logits, "probabilities": logits.softmax(dim=1), "hidden": hidden * 1}
    return {**parts, "count": torch.arange(len(x)), "name": None, "size": 3}


def of_several(outputs: Any, y: Tensor) -> Tensor:
    return F.cross_entropy(2 * outputs["logits"], y) + outputs["hidden"].square().mean(dim=1).mean()


def test_several_outputs() -> None:
    runs = []
    for way in WAYS:
        torch.manual_seed(0)
        module = Calling(several, body=network(), head=nn.Linear(3, 3).double())
        noise = torch.Generator(DEVICE).manual_seed(2)
        options = {"criterion": of_several, "seed": 1, "noise_generator": noise, "lr": 0.3}
        runs.append((trained(*start(module, data(12), way, **options), way, of_several), module))
    for run in runs[1:]:
        assert_same_run(run, runs[0], 1e-6)


def test_passes_that_do_not_train_and_gradients_that_are_thrown_away() -> None:
    module, engine, model, optimizer, batches = begun(poisson_sampling=True)
    seen = torch.zeros(40, dtype=torch.long)
    for k, batch in enumerate(batches):
        x, y = (t.to(DEVICE) for t in batch)
        model(x)  # in training mode, without a backward pass
        with torch.no_grad():
            assert torch.equal(model(x), module(x))
        model.eval()
        inputs = x.clone().requires_grad_()
        model(inputs).sum().backward()
        assert inputs.grad is not None
        model.train()
        loss = LOSS(model(x), y)
        (model if k else optimizer).zero_grad()  # after the forward pass
        loss.backward()
        if k == 2:
            model.zero_grad()
            continue
        optimizer.step()
        seen[batch._ids] += 1
    assert torch.equal(engine.ledger.sums["participations"].cpu(), seen)
    assert engine._training.run.history.steps == len(batches) - 1


def test_refusals_change_nothing() -> None:
    """Each is told; then the same batch goes on as if nothing had happened."""
    results = []
    for refused in (False, True):
        module, engine, model, optimizer, loader = begun()
        for number, (x, y) in enumerate(loader):
            x, y = x.to(DEVICE), y.to(DEVICE)
            for what in ("0.weight", "loss", "differs") if refused and number == 2 else ():
                with pytest.raises((ValueError, RuntimeError), match=what):
                    output = model(x)
                    if what == "0.weight":
                        (LOSS(output, y) + module[0].weight.square().sum()).backward()
                    elif what == "loss":
                        F.cross_entropy(output, y, label_smoothing=0.1).backward()
                    else:  # two backward passes add up
                        output.square().sum().backward(retain_graph=True)
                        LOSS(output, y).backward()
                    optimizer.step()
                optimizer.zero_grad()
            if refused and number == 2:
                with pytest.raises(RuntimeError, match="backward"):
                    optimizer.step()
                with pytest.raises(ValueError, match="requires a gradient"):
                    model(x.clone().requires_grad_())
                LOSS(model(x), y).backward()
                with pytest.raises(ValueError, match="several times"):
                    step(engine, model, type("Kept", (), {"zero_grad": int, "step": optimizer.step}), x, y)
                model.zero_grad()
            step(engine, model, optimizer, x, y)
        results.append((weights_of(module), engine.get_fil().value))
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_train_step_refuses_what_is_not_the_loaders() -> None:
    module, engine, *_, loader = begun(criterion=None)
    with pytest.raises(RuntimeError, match="criterion="):
        engine.train_step(*next(iter(loader)))
    module, engine, model, optimizer, loader = begun()
    trained(engine, model, optimizer, loader, "train_step", steps=2)
    before, sums = copy.deepcopy(module.state_dict()), {k: v.clone() for k, v in engine.ledger.sums.items()}
    epsilon = engine.get_epsilon(1e-5)
    with pytest.raises(RuntimeError, match="per-example gradients"):
        engine.train_step(torch.randn(3, 5).double(), torch.zeros(3, dtype=torch.long))
    assert all(torch.equal(v, before[k]) for k, v in module.state_dict().items())
    assert all(torch.equal(v, sums[k]) for k, v in engine.ledger.sums.items())
    assert engine.get_epsilon(1e-5) == epsilon


@pytest.mark.parametrize("way", ["auto", "train_step"])
def test_pausing_and_detaching(way: str) -> None:
    module, engine, model, optimizer, loader = begun()
    batches = iter(loader)
    batch = next(batches)
    with pytest.warns(UserWarning, match="paused"), engine.paused():
        step(engine, model, optimizer, *batch, way)
    assert int(engine.ledger.sums["missed"].sum()) == len(batch[0])
    assert engine.ledger.missed_steps == 1
    engine.train_step(*next(batches))
    engine.detach()
    model(batch[0].to(DEVICE)).sum().backward()
    assert all(p.grad is not None for p in module.parameters())
    assert model.to_standard_module() is module
    assert not any(hasattr(p, "grad_sample") for p in module.parameters())
    with pytest.raises(RuntimeError, match="no further step"):
        engine.train_step(*next(batches))


def time_first(samples: list[Any]) -> Any:
    return [torch.stack(part, dim=min(1, part[0].ndim)) for part in zip(*samples, strict=True)]


@pytest.mark.parametrize("time", [4, 5])  # five examples in a batch
def test_outputs_with_the_examples_second_are_refused(time: int) -> None:
    dataset = TensorDataset(torch.randn(5, time, 3).double(), torch.randint(3, (5, time)))
    options = {"batch": 5, "criterion": None, "batch_first": False, "loading": {"collate_fn": time_first}}
    parts = start(nn.Linear(3, 3).double(), dataset, "auto", **options)
    with pytest.raises((RuntimeError, ValueError), match="batch_first=False|alone"):
        trained(*parts, loss=lambda out, y: LOSS(out.flatten(0, 1), y.flatten()))


class TestAccumulation:
    def test_a_step_in_the_middle_of_a_draw_is_refused(self) -> None:
        module, engine, model, optimizer, batches = begun(
            batches=loader(data(48)), accumulation_steps=2, poisson_sampling=True
        )
        before, reader = weights_of(module), iter(batches)
        backward(model, next(reader))
        with pytest.raises(ValueError, match="2 batches"):
            optimizer.step()
        backward(model, next(reader))
        assert torch.equal(weights_of(module), before)
        optimizer.step()  # now it is whole
        with pytest.raises(RuntimeError, match="accumulation_steps"):
            engine.train_step(*next(reader))
        assert engine.ledger.steps == 1

    @pytest.mark.parametrize(
        ("divisor", "poisson", "match"),
        [(2, True, "accumulation_steps=2.*BatchMemoryManager"), (3, False, "0.333333 times")],
    )
    def test_other_accumulation_is_refused(self, divisor: int, poisson: bool, match: str) -> None:
        *_, model, optimizer, batches = begun(poisson_sampling=poisson)
        for _, batch in zip(range(2), batches, strict=False):
            backward(model, batch, divisor)
        with pytest.raises(ValueError, match=match):
            optimizer.step()

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"accumulation_steps": 0}, "at least 1"),
            ({"accumulation_steps": 9}, "data set"),
            ({"accumulation_steps": 2, "grad_sample_mode": "hooks"}, "grad_sample_mode"),
            ({"accumulation_steps": 2, "poisson_sampling": False}, "any number"),
        ],
    )
    def test_accumulation_that_cannot_be(self, options: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            begun(**{"poisson_sampling": True, **options})

    def test_the_noise_for_an_epsilon_is_that_of_whole_draws(self) -> None:
        found = []
        for steps, size in ((3, 16), (1, 48)):
            module = network()
            target = {"target_epsilon": 4.0, "target_delta": 1e-3, "epochs": 2, "accumulation_steps": steps}
            parts = (module, torch.optim.SGD(module.parameters(), lr=0.1), loader(data(48), size))
            made = FILPrivacyEngine().make_private_with_epsilon(*parts, **target, max_grad_norm=C)
            found.append(made[1].noise_multiplier)
        assert found[0] == found[1]


def test_a_deep_copy_is_a_plain_model() -> None:
    """As torch's averages have it: nothing of the run is copied, and passes over it are none of the run's."""
    module, engine, model, optimizer, batches = begun()
    average = AveragedModel(model)
    batch = next(iter(batches))
    backward(model, batch)
    average(batch[0].to(DEVICE))
    optimizer.step()
    average.update_parameters(model)
    assert torch.equal(weights_of(average.module), weights_of(module))
    assert engine.ledger.steps == 1
    assert [*average.module.state_dict()] == [*model.state_dict()] == [f"_module.{key}" for key in module.state_dict()]
    backward(average.module, batch)
    assert all(p.grad is not None for p in average.module.parameters())


@pytest.mark.parametrize("way", ["wrapped", "in place", "the private model"])
def test_compiled_models(way: str, caplog: pytest.LogCaptureFixture) -> None:
    """The original is trained, and the engine's own passes are not traced: the same weights, and the same FIL."""
    found = []
    for compiled in (False, True):
        module = network()
        given: Any = torch.compile(module) if compiled and way == "wrapped" else module
        if compiled and way == "in place":
            module.compile()
        with caplog.at_level(logging.INFO, logger="torchfil"):
            _, engine, model, optimizer, batches = begun(given)
        called = torch.compile(model, backend="eager") if compiled and way == "the private model" else model
        trained(engine, called, optimizer, batches, steps=2)
        found.append((weights_of(module), engine.get_fil().value.nan_to_num()))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    assert ("the private model is the original" in caplog.text) == (way != "the private model")


def test_compiled_parts_and_lbfgs_are_refused() -> None:
    module: Any = network()
    with pytest.raises(ValueError, match="LBFGS"):
        begun(module, optimizer=torch.optim.LBFGS(module.parameters()))
    module[0] = torch.compile(module[0])
    with pytest.raises(ValueError, match="compiled"):
        begun(module)


def test_a_closure_is_called_once() -> None:
    found = []
    for closed in (False, True):
        module, engine, model, optimizer, batches = begun()
        closure = partial(backward, model, next(iter(batches)))
        if not closed:
            closure()
        optimizer.step(closure if closed else None)
        found.append(weights_of(module))
        assert engine.ledger.steps == 1
    assert torch.equal(*found)


@pytest.mark.parametrize("enabled", [True, False])
def test_a_grad_scaler_is_refused_unless_it_is_off(enabled: bool) -> None:
    module, engine, model, optimizer, batches = begun()
    scaler, before = torch.amp.GradScaler(DEVICE, enabled=enabled), weights_of(module)
    x, y = next(iter(batches))
    scaler.scale(LOSS(model(x.to(DEVICE)), y.to(DEVICE))).backward()
    if not enabled:
        scaler.step(optimizer)
        scaler.update()
        assert engine.ledger.steps == 1
        return
    with pytest.raises(RuntimeError, match="bfloat16"):
        scaler.step(optimizer)
    assert torch.equal(weights_of(module), before)
    with pytest.raises(ValueError, match="GradScaler"):
        optimizer.step()


def test_samplers() -> None:
    """Poisson sampling would train on what a subset holds out; a sampler that it replaces is told, usual ones not."""
    dataset = data(40)
    with pytest.raises(ValueError, match="Subset"):
        begun(batches=DataLoader(dataset, sampler=SubsetRandomSampler(range(20))), poisson_sampling=True)
    with pytest.warns(UserWarning, match="not used"):
        begun(batches=DataLoader(dataset, sampler=range(39, -1, -1)), poisson_sampling=True)
    usual = [{"batch_size": 8}, {"batch_size": 8, "shuffle": True}]
    usual += [{"batch_sampler": BatchSampler(RandomSampler(dataset), 8, False)}]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made = [begun(batches=DataLoader(dataset, **each), poisson_sampling=True) for each in usual]
    assert [len(each[-1]) for each in made] == [5, 5, 5]
    sampler = WeightedRandomSampler([1.0] * 39 + [50.0], 8, replacement=False)
    with pytest.warns(UserWarning, match="participation"):  # each counts; nothing is taken off for chance
        engine = begun(batches=DataLoader(dataset, batch_size=8, sampler=sampler))[1]
    assert engine._training.run.options.amplification == NoAmplification()
