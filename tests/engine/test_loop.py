"""What people write around a training loop.

What is refused, and changes nothing. Ledgers are in test_equivalence.py.

Inputs and outputs of every kind, accumulation, averaged and compiled models, optimizers, samplers,
pausing; models and batches out of the ordinary are followed in all three ways of training, or
refused.
"""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from opacus.accountants import RDPAccountant
from opacus.schedulers import ExponentialNoise
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils._named_member_accessor import NamedMemberAccessor
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import (
    DataLoader,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from tests.cases import DEVICE, relative_error
from tests.engine.loops import C, assert_same_run, data, loader, network
from tests.engine.test_state import same
from tests.engine.ways import (
    LOSS,
    WAYS,
    Calling,
    examples,
    mlp,
    start,
    step,
    taken,
    trained,
    weights_of,
)
from torchfil import FILPrivacyEngine
from torchfil.accounting.norms import NormHistory
from torchfil.engine import measure
from torchfil.engine.optimizer import FILOptimizer
from torchfil.engine.replica import Replica
from torchfil.engine.run import Run
from torchfil.fisher import NoAmplification
from torchfil.utils.errors import UnsupportedModuleError


def begun(module: nn.Module | None = None, batches: Any = None, **options: Any) -> Any:
    """The module, and what :func:`start` gives, with noise that can be repeated.

    Batches of eight in order.
    """
    torch.manual_seed(1)
    module = module if module is not None else network()
    noise = torch.Generator(DEVICE).manual_seed(2)
    given = {"seed": 3, "noise_generator": noise, "lr": 0.3, **options}
    return module, *start(module, batches or loader(data(40)), "auto", **given)


def backward(model: Any, batch: Any, divisor: int = 1) -> Tensor:
    loss = LOSS(model(batch[0].to(DEVICE)), batch[1].to(DEVICE)) / divisor
    loss.backward()
    return loss


def several(self: Any, x: Tensor) -> dict[str, Any]:
    """Outputs that are made from one another."""
    hidden = self.body(x).tanh()
    logits = self.head(hidden)
    parts = {
        "logits": logits,
        "again": logits,
        "probabilities": logits.softmax(dim=1),
        "hidden": hidden * 1,
    }
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


@pytest.mark.parametrize("mode", ["auto", "hooks"])
def test_another_loss_of_one_of_several_outputs_is_refused(mode: str) -> None:
    module = Calling(several, body=network(), head=nn.Linear(3, 3).double())
    engine, model, optimizer, batches = start(module, data(12), mode, criterion=of_several)
    x, y = (part.to(DEVICE) for part in next(iter(batches)))
    outputs = model(x)
    (of_several(outputs, y) + outputs["hidden"].mean()).backward()
    with pytest.raises(ValueError, match="differs"):
        optimizer.step()
    assert engine.accountant.history == []


Habit = Callable[[Any, FILPrivacyEngine, Any, Any, Tensor, Tensor], None]


def plainly(
    _module: Any, engine: FILPrivacyEngine, model: Any, optimizer: Any, x: Tensor, y: Tensor
) -> None:
    step(engine, model, optimizer, x, y)


def after_other_passes(
    module: Any, _engine: Any, model: Any, optimizer: Any, x: Tensor, y: Tensor
) -> None:
    model(x)  # in training mode, without a backward pass
    with torch.no_grad():
        assert torch.equal(model(x), module(x))
    model.eval()
    inputs = x.clone().requires_grad_()
    model(inputs).sum().backward()
    assert inputs.grad is not None
    model.train()
    backward(model, (x, y))
    model.zero_grad()  # these gradients are thrown away
    loss = LOSS(model(x), y)
    optimizer.zero_grad()  # after the forward pass
    loss.backward()
    optimizer.step()


def after_refusals(
    module: Any, engine: FILPrivacyEngine, model: Any, optimizer: Any, x: Tensor, y: Tensor
) -> None:
    """Of losses that are not the engine's, steps without a backward pass or with two, and batches
    of one's own.
    """
    wrong: dict[str, Any] = {
        "0.weight": lambda out: [LOSS(out, y) + module[0].weight.square().sum()],
        "loss": lambda out: [F.cross_entropy(out, y, label_smoothing=0.1)],
        "differs": lambda out: [out.square().sum(), LOSS(out, y)],  # which add up
    }
    for match, losses in wrong.items():
        with pytest.raises((ValueError, RuntimeError), match=match):
            for loss in losses(model(x)):
                loss.backward(retain_graph=True)
            optimizer.step()
        optimizer.zero_grad()
    with pytest.raises(RuntimeError, match="backward"):
        optimizer.step()
    with pytest.raises(ValueError, match="requires a gradient"):
        model(x.clone().requires_grad_())
    for _ in range(2):
        backward(model, (x, y))
    with pytest.raises(ValueError, match="several times"):
        optimizer.step()
    model.zero_grad()
    with pytest.raises(RuntimeError, match="per-example gradients"):
        engine.train_step(torch.randn_like(x[:3]), y[:3])
    step(engine, model, optimizer, x, y)


def trained_by(habit: Habit, module: nn.Module | None = None) -> list[Tensor]:
    """Weights, what the accountant was told, and the ledger after three steps."""
    module, engine, model, optimizer, batches = begun(module)
    for _, (x, y) in zip(range(3), batches, strict=False):
        habit(module, engine, model, optimizer, x.to(DEVICE), y.to(DEVICE))
    assert engine.ledger.steps == 3
    return [
        weights_of(module),
        torch.tensor(engine.accountant.history),
        *engine.ledger.sums.values(),
    ]


HABITS = [after_other_passes, after_refusals]


@pytest.mark.parametrize("habit", HABITS)
def test_habits_that_change_nothing(habit: Habit) -> None:
    assert all(
        torch.equal(one, other)
        for one, other in zip(trained_by(habit), trained_by(plainly), strict=True)
    )


@pytest.mark.parametrize("mode", ["auto", "hooks"])
def test_gradients_that_the_model_drops_are_nobodys(mode: str) -> None:
    """model.zero_grad() alone: what came after it is released, and booked for its examples."""
    _, engine, model, optimizer, batches = begun(grad_sample_mode=mode)
    first, second = itertools.islice(batches, 2)
    backward(model, first)
    model.zero_grad()
    backward(model, second)
    optimizer.step()
    assert taken(engine) == [0] * 8 + [1] * 8 + [0] * 24


@pytest.mark.parametrize("compiled", [torch.compile, lambda module: module.compile() or module])
def test_of_a_compiled_model_the_original_is_trained(compiled: Any) -> None:
    """The engine's own passes are not traced."""
    ours, theirs = trained_by(plainly, compiled(network())), trained_by(plainly)
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("way", ["auto", "train_step"])
def test_pausing_and_detaching(way: str) -> None:
    module, engine, model, optimizer, loader = begun()
    batches = iter(loader)
    batch = next(batches)
    with pytest.warns(UserWarning, match="paused"), engine.paused():
        step(engine, model, optimizer, *batch, way)
    assert (int(engine.ledger.sums["paused"].sum()), engine.ledger.missed_steps) == (
        len(batch[0]),
        1,
    )
    engine.detach()
    model(batch[0].to(DEVICE)).sum().backward()
    assert all(p.grad is not None for p in module.parameters())
    assert not any(part._forward_hooks or part._backward_hooks for part in module.modules())
    assert model.to_standard_module() is module
    assert not any(hasattr(p, "grad_sample") for p in module.parameters())
    with pytest.raises(RuntimeError, match="no further step"):
        engine.train_step(*next(batches))


def time_first(samples: list[Any]) -> Any:
    return [torch.stack(part, dim=min(1, part[0].ndim)) for part in zip(*samples, strict=True)]


@pytest.mark.parametrize("time", [4, 5])  # five examples in a batch
def test_outputs_with_the_examples_second_are_refused(time: int) -> None:
    dataset = TensorDataset(torch.randn(5, time, 3).double(), torch.randint(3, (5, time)))
    options = {
        "batch": 5,
        "criterion": None,
        "batch_first": False,
        "loading": {"collate_fn": time_first},
    }
    parts = start(nn.Linear(3, 3).double(), dataset, "auto", **options)
    with pytest.raises((RuntimeError, ValueError), match="batch_first=False|alone"):
        trained(*parts, loss=lambda out, y: LOSS(out.flatten(0, 1), y.flatten()))


class TestAccumulation:
    def test_a_step_in_the_middle_of_a_draw_is_refused(self) -> None:
        given = {"batches": loader(data(48)), "accumulation_steps": 2, "poisson_sampling": True}
        module, engine, model, optimizer, batches = begun(**given)
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
        [(2, True, "accumulation_steps=.*BatchMemoryManager"), (3, False, "0.333333 times")],
    )
    def test_other_accumulation_is_refused(self, divisor: int, poisson: bool, match: str) -> None:
        *_, model, optimizer, batches = begun(poisson_sampling=poisson)
        for _, batch in zip(range(2), batches, strict=False):
            backward(model, batch, divisor)
        with pytest.raises(ValueError, match=match):
            optimizer.step()

    @pytest.mark.parametrize(
        ("mode", "at_once"), [("auto", False), ("auto", True), ("hooks", False)]
    )
    def test_no_micro_batch_of_many_is_dropped(self, mode: str, at_once: bool) -> None:
        """80 of two examples are one batch of 160, also if their losses are added up for one
        backward pass.
        """
        runs = []
        for size in (2, 160):
            module, engine, model, optimizer, batches = begun(
                batches=loader(data(160), size), grad_sample_mode=mode
            )
            optimizer.zero_grad()
            losses = (
                [LOSS(model(x.to(DEVICE)), y.to(DEVICE)) for x, y in batches] if at_once else []
            )
            for batch in () if at_once else batches:
                backward(model, batch)
            if at_once:
                torch.stack(losses).sum().backward()
            optimizer.step()
            assert taken(engine) == [1] * 160
            runs.append(weights_of(module))
        assert relative_error(*runs) < 1e-12

    def test_a_draw_may_have_many_parts(self) -> None:
        given = {
            "batches": loader(data(140), 2),
            "accumulation_steps": 70,
            "poisson_sampling": True,
        }
        _, engine, model, optimizer, batches = begun(**given)
        for batch in batches:
            backward(model, batch)
        optimizer.step()
        assert taken(engine) == [1] * 140

    def test_passes_that_only_log_are_not_kept(self) -> None:
        *_, model, _optimizer, batches = begun()
        x, _ = next(iter(batches))
        passes = []
        for _ in range(3):
            model(x.to(DEVICE))
            passes.append(len(model._observer.waiting))
        assert passes == [0, 0, 0]

    def test_the_noise_for_an_epsilon_is_that_of_whole_draws(self) -> None:
        found = []
        for steps, size in ((3, 16), (1, 48)):
            module = network()
            target = {
                "target_epsilon": 4.0,
                "target_delta": 1e-3,
                "epochs": 2,
                "accumulation_steps": steps,
            }
            parts = (module, torch.optim.SGD(module.parameters(), lr=0.1), loader(data(48), size))
            made = FILPrivacyEngine().make_private_with_epsilon(*parts, **target, max_grad_norm=C)
            found.append(made[1].noise_multiplier)
        assert found[0] == found[1]


@pytest.mark.parametrize("way", WAYS)
def test_schedulers_and_hooks_see_every_step(way: str) -> None:
    """A scheduler over the private optimizer counts its steps, and torch's hooks run around each
    update.
    """
    engine, model, optimizer, batches = start(mlp(), examples(), way, lr=0.8)
    seen: list[str] = []
    plain, inner = optimizer.original_optimizer, optimizer.step
    plain.register_step_pre_hook(lambda *_: seen.append("before"))
    plain.register_step_post_hook(lambda *_: seen.append("after"))
    accountant = optimizer.step_hook
    optimizer.attach_step_hook(lambda stepped: (seen.append("released"), accountant(stepped)))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    assert optimizer.step is not inner  # by which it counts
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*lr_scheduler")
        for x, y in batches:
            step(engine, model, optimizer, x, y, way)
            scheduler.step()
    assert seen == ["released", "before", "after"] * len(batches)
    assert plain.param_groups[0]["lr"] == 0.8 * 0.5 ** len(batches)
    assert engine.ledger is not None
    assert engine.ledger.steps == len(batches)


def test_a_deep_copy_is_a_plain_model() -> None:
    """As torch's averages have it: nothing of the run is copied, and passes over it are none of the
    run's.
    """
    module, engine, model, optimizer, batches = begun()
    average = AveragedModel(model)
    batch = next(iter(batches))
    backward(model, batch)
    average(batch[0].to(DEVICE))
    optimizer.step()
    average.update_parameters(model)
    assert torch.equal(weights_of(average.module), weights_of(module))
    assert engine.ledger.steps == 1
    backward(average.module, batch)
    assert all(p.grad is not None for p in average.module.parameters())


def test_compiled_parts_and_lbfgs_are_refused() -> None:
    module: Any = network()
    with pytest.raises(ValueError, match="LBFGS"):
        begun(module, optimizer=torch.optim.LBFGS(module.parameters()))
    module[0] = torch.compile(module[0])
    with pytest.raises(ValueError, match="compiled"):
        begun(module)


def test_a_grad_scaler_is_refused() -> None:
    module, _, model, optimizer, batches = begun()
    scaler, before = torch.amp.GradScaler(DEVICE), weights_of(module)
    x, y = next(iter(batches))
    scaler.scale(LOSS(model(x.to(DEVICE)), y.to(DEVICE))).backward()
    with pytest.raises(RuntimeError, match="bfloat16"):
        scaler.step(optimizer)
    assert torch.equal(weights_of(module), before)


def test_samplers() -> None:
    """Poisson sampling would train on what a subset holds out.

    A sampler that it replaces is told.
    """
    dataset = data(40)
    with pytest.raises(ValueError, match="Subset"):
        begun(
            batches=DataLoader(dataset, sampler=SubsetRandomSampler(range(20))),
            poisson_sampling=True,
        )
    with pytest.warns(UserWarning, match="not used"):
        begun(batches=DataLoader(dataset, sampler=range(39, -1, -1)), poisson_sampling=True)
    sampler = WeightedRandomSampler([1.0] * 39 + [50.0], 8, replacement=False)
    # each counts; nothing is taken off for chance
    with pytest.warns(UserWarning, match="participation"):
        engine = begun(batches=DataLoader(dataset, batch_size=8, sampler=sampler))[1]
    assert engine._training.run.options.amplification == NoAmplification()


# ----------------------------------------------------------- models and batches out of the ordinary

# p.grad is that of plain training
PLAIN = {"noise_multiplier": 1e-9, "max_grad_norm": 1e3, "clip": "hard"}


def changing() -> Any:
    """Reads attributes that a schedule may change, counts its calls in a buffer, and keeps its last
    inputs.
    """

    def forward(self: Any, x: Tensor) -> Tensor:
        self.calls += 1
        self.last = x.detach().clone()
        return torch.as_tensor(
            self.inner(x) * getattr(self, "scale", 1.0) * getattr(self, "extra", 1.0)
        )

    return Calling(
        forward, inner=mlp(), scale=3.0, unused=None, last=0.0, calls=nn.Buffer(torch.zeros(()))
    )


def one_for_another(module: Any) -> None:
    del module.unused
    module.extra = 2.5


@pytest.mark.parametrize("way", WAYS)
def test_attributes_that_change_are_followed(way: str) -> None:
    module, same = changing(), changing().to(DEVICE)
    engine, model, optimizer, loader = start(module, examples(), way, **PLAIN)
    batches = iter(loader)
    step(engine, model, optimizer, *next(batches), way)
    for change in (
        lambda it: setattr(it, "scale", 10.0),
        lambda it: delattr(it, "scale"),
        one_for_another,
    ):
        change(module)
        change(same)
        module.last = 0.0
        x, y = next(batches)
        step(engine, model, optimizer, x, y, way)
        same.zero_grad()
        LOSS(same(x.to(DEVICE)), y.to(DEVICE)).backward()
        for got, want in zip(module.parameters(), same.parameters(), strict=True):
            assert torch.allclose(got.grad, want.grad, atol=1e-5)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "options", [{}, {"max_memory": 1}, {"estimator": "exact"}, {"norm_refresh": 2}], ids=str
)
def test_buffers_are_written_once_a_step(way: str, options: dict[str, Any]) -> None:
    if way == "auto" and "estimator" in options:
        pytest.skip("one pass serves weight probes alone")
    module = changing()
    engine = trained(*start(module, examples(), way, **options), way)
    assert float(module.calls) == 4
    assert taken(engine) == [1] * 24


def test_buffers_are_written_once_for_people_with_few_and_many_rows() -> None:
    """Who are measured in several pieces."""
    owners, module = torch.cat([torch.zeros(18).long(), torch.arange(1, 7)]), changing()
    options = {"batch": 24, "owner_of": owners, "grad_sample_mode": "auto"}
    engine = trained(*start(module, examples(), "train_step", **options), "train_step")
    assert float(module.calls) == 1
    assert taken(engine) == [1] * 7


LATER: list[tuple[str, dict[str, Any]]] = [
    ("train_step", {}),
    ("hooks", {}),
    ("auto", {"estimator": "exact"}),
]


@pytest.mark.parametrize(("way", "options"), LATER, ids=str)
def test_a_forward_hook_that_comes_during_training_is_refused_at_once(
    way: str, options: dict[str, Any]
) -> None:
    """Where the loop's own pass is no part of the numbers.

    A look that is due later would come too late.
    """
    module = mlp()
    engine, model, optimizer, loader = start(module, examples(), way, **options)
    batches = iter(loader)
    step(engine, model, optimizer, *next(batches), way)
    module[1].register_forward_hook(lambda module, inputs, output: 3 * output)
    with pytest.raises(RuntimeError, match="copy of the model|differ"):
        step(engine, model, optimizer, *next(batches), way)
    assert taken(engine) == [1] * 6 + [0] * 18


def test_a_penalty_on_something_inside_the_model_is_refused_at_once() -> None:
    """Also where the engine has recorded the pass, and no parameter gets the gradient."""

    def forward(self: Any, x: Tensor) -> Tensor:
        self.hidden.append(torch.tanh(self.body(x)))
        return torch.as_tensor(self.head(self.hidden[-1]))

    module = Calling(forward, body=nn.Linear(3, 4), head=nn.Linear(4, 2), hidden=[])
    engine, model, optimizer, loader = start(module, examples(), "auto")
    batches = iter(loader)
    step(engine, model, optimizer, *next(batches))
    with pytest.raises(RuntimeError, match="does not go through the model's output"):
        step(
            engine,
            model,
            optimizer,
            *next(batches),
            loss=lambda out, y: LOSS(out, y) + module.hidden[-1].sum(),
        )
    assert taken(engine) == [1] * 6 + [0] * 18


def with_batch_norm() -> Any:
    """Frozen and in eval mode it is taken.

    Model.train() after a validation puts it back into training.
    """
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2))
    module[1].requires_grad_(False).eval()
    return module


def mixing() -> Any:
    def forward(self: Any, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.body(x))
        return torch.as_tensor(self.head(hidden - hidden.mean(dim=0) if self.stage else hidden))

    return Calling(forward, body=nn.Linear(3, 4), head=nn.Linear(4, 2), stage=0)


def root() -> Any:
    """Its derivative is not finite where all inputs are 0."""
    parts = {"body": nn.Linear(3, 4, bias=False), "head": nn.Linear(4, 2)}
    return Calling(lambda self, x: self.head(self.body(x).square().sqrt()), **parts)


REFUSED: dict[str, tuple[Any, Any, str]] = {  # a model, and what happens after the first step
    "batch norm": (with_batch_norm, lambda it: it.train(), "batch normalisation"),
    "mixing": (mixing, lambda it: setattr(it, "stage", 1), "mixes examples|differ"),
    "not finite": (root, lambda _: None, "NaN"),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("what", REFUSED)
def test_what_would_give_wrong_numbers_is_not_released(what: str, way: str) -> None:
    build, change, match = REFUSED[what]
    module, (x, y) = build(), examples()
    if what == "not finite":
        x[8] = 0.0
    engine, model, optimizer, loader = start(module, (x, y), way, lr=0.1)
    batches = iter(loader)
    step(engine, model, optimizer, *next(batches), way)
    before = weights_of(module)
    change(module)
    with pytest.raises((RuntimeError, ValueError), match=match):
        step(engine, model, optimizer, *next(batches), way)
    assert torch.equal(before, weights_of(module))
    assert taken(engine) == [1] * 6 + [0] * 18


@pytest.mark.parametrize("way", WAYS)
def test_gradients_that_are_not_finite_are_explained_at_the_first_step(
    way: str, caplog: pytest.LogCaptureFixture
) -> None:
    """With secret batches too. The next batch is tried anew: nothing is known of the model."""
    module, (x, y) = root(), examples()
    finite = x.clone()
    x[:] = 0.0
    options = {"lr": 0.1, "poisson_sampling": True}
    engine, model, optimizer, loader = start(module, (x, y), way, **options)
    batches = iter(loader)
    with pytest.raises(RuntimeError, match="is NaN or infinite, though its inputs are finite"):
        step(engine, model, optimizer, *next(batches), way)
    optimizer.zero_grad()
    x.copy_(finite)
    x, y = next(batches)
    step(engine, model, optimizer, x, y, way)
    assert sum(taken(engine)) == len(x) > 0
    assert "mapped over examples" not in caplog.text


@pytest.mark.parametrize(("way", "clear"), [("hooks", True), ("auto", True), ("auto", False)])
def test_a_sum_is_not_released_twice(way: str, clear: bool) -> None:
    """model.zero_grad() does not reach the clipped sums, and a loop may clear nothing at all."""
    alike = torch.ones(24, 3), torch.ones(24, dtype=torch.long)
    engine, model, optimizer, loader = start(
        mlp(), alike, way, max_grad_norm=0.1, noise_multiplier=1e-6
    )
    norms = []
    for x, y in loader:
        if clear:
            model.zero_grad()
        LOSS(model(x.to(DEVICE)), y.to(DEVICE)).backward()
        optimizer.step()
        norms.append(float(torch.cat([p.summed_grad.flatten() for p in optimizer.params]).norm()))
    assert norms == pytest.approx(norms[:1] * 4, rel=1e-6)
    assert 0 < norms[0] <= 6 * 0.1 * (1 + 1e-6)
    assert taken(engine) == [1] * 24


def as_tuple(samples: list[Any]) -> Any:
    return tuple(torch.stack(part) for part in zip(*samples, strict=True))


@pytest.mark.parametrize("collate", [None, as_tuple])
def test_train_step_refuses_a_batch_that_was_not_read_last(collate: Any) -> None:
    """A prefetcher reads one batch ahead: the step would be booked for the examples of the next."""
    engine, *_, loader = start(mlp(), examples(), "train_step", loading={"collate_fn": collate})
    batches = iter(loader)
    (x, y), (x2, y2) = next(batches), next(batches)
    for given in ((x, y), (x.clone(), y.clone()), (x + 0.1, y.clone()), (x.clone(), y2)):
        if collate is None or given[0] is not x:
            with pytest.raises(RuntimeError, match="read before"):
                engine.train_step(*given)
    engine.train_step(x2, y2)
    assert taken(engine) == [0] * 6 + [1] * 6 + [0] * 12


@pytest.mark.parametrize("way", ["hooks", "train_step"])
def test_a_batch_that_is_used_again_after_an_empty_one_is_refused(way: str) -> None:
    loading = {"generator": torch.Generator().manual_seed(0)}
    engine, model, optimizer, loader = start(
        mlp(), examples(), way, batch=1, poisson_sampling=True, loading=loading
    )
    batches = iter(loader)
    last = tuple(next(batch for batch in batches if len(batch[1]) > 1))
    next(batch for batch in batches if len(batch[1]) == 0)
    with pytest.raises(RuntimeError, match="0 examples"):
        step(engine, model, optimizer, *last, way)


@pytest.mark.parametrize("way", ["hooks", "auto"])
def test_noise_that_changes_within_a_logical_batch_is_refused(way: str) -> None:
    engine, model, optimizer, loader = start(mlp(), examples(), way, batch=24)
    scheduler = ExponentialNoise(optimizer, gamma=0.5)
    with BatchMemoryManager(
        data_loader=loader, max_physical_batch_size=12, optimizer=optimizer
    ) as parts:
        batches = iter(parts)
        step(engine, model, optimizer, *next(batches), way)
        scheduler.step()
        with pytest.raises(RuntimeError, match="logical"):
            step(engine, model, optimizer, *next(batches), way)


def test_weights_that_a_hook_computes_are_refused_and_the_remedy_works() -> None:
    with pytest.warns(FutureWarning):
        old = nn.Sequential(torch.nn.utils.weight_norm(nn.Linear(3, 2)), nn.Tanh())
    with pytest.raises(UnsupportedModuleError, match="parametrizations"):
        start(old, examples(), "auto")
    start(
        nn.Sequential(torch.nn.utils.parametrizations.weight_norm(nn.Linear(3, 2)), nn.Tanh()),
        examples(),
        "auto",
    )


# ------------------------------------------------------------------ Ctrl-C


def accountant_stopped(self: Any, **_: float) -> None:
    self.history.pop()  # as Opacus's do, before they append
    raise KeyboardInterrupt


STOPS: dict[str, tuple[Any, str, Any]] = {
    "in a pass": (measure, "values_of", KeyboardInterrupt),
    "before the sums are complete": (FILOptimizer, "_check_skip_next_step", KeyboardInterrupt),
    "before the accountant": (FILOptimizer, "scale_grad", KeyboardInterrupt),
    "in the accountant": (RDPAccountant, "step", accountant_stopped),
    "between accountant and ledger": (Run, "book", KeyboardInterrupt),
    "in the ledger": (NormHistory, "step", KeyboardInterrupt),
}


def booked(engine: FILPrivacyEngine) -> Any:
    state = engine.state_dict()
    return copy.deepcopy((state["accountant"], state["run"]["ledger"], state["run"]["history"]))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("place", STOPS)
def test_ctrl_c_before_the_update_undoes_the_step(place: str, way: str) -> None:
    module = network()
    given = {"lr": 0.3, "poisson_sampling": True}
    engine, model, optimizer, batches = start(module, loader(data(40)), way, **given)
    trained(engine, model, optimizer, batches, way, steps=3)
    before, weights = booked(engine), weights_of(module)
    x, y = next(iter(batches))
    cut, name, effect = STOPS[place]
    with (
        mock.patch.object(cut, name, autospec=True, side_effect=effect),
        pytest.raises(KeyboardInterrupt),
    ):
        step(engine, model, optimizer, x, y, way)
    assert same(booked(engine), before)
    assert torch.equal(weights_of(module), weights)
    assert not engine._training.run.staged
    assert all(getattr(p, "summed_grad", None) is None for p in module.parameters())
    trained(engine, model, optimizer, batches, way, steps=2)
    assert engine.ledger is not None
    assert engine.ledger.steps == sum(steps for *_, steps in engine.accountant.history) == 5


@pytest.mark.parametrize(
    ("place", "name", "error"),
    [
        (Replica, "free_weights", KeyboardInterrupt),  # between the ledger and the update
        (torch.optim.SGD, "step", KeyboardInterrupt),
        (torch.optim.SGD, "step", MemoryError),
    ],
)
def test_a_booked_step_whose_update_was_cut_short_is_told(
    place: Any, name: str, error: type[BaseException]
) -> None:
    engine, model, optimizer, batches = begun(poisson_sampling=True)[1:]
    trained(engine, model, optimizer, batches, steps=1)
    with mock.patch.object(place, name, side_effect=[error, None]), pytest.raises(error):
        trained(engine, model, optimizer, batches, steps=1)
    with pytest.warns(UserWarning, match="its update was cut short"):
        trained(engine, model, optimizer, batches, steps=1)
    trained(engine, model, optimizer, batches, steps=1)  # and said once
    assert engine.ledger.steps == sum(steps for *_, steps in engine.accountant.history) == 4


@pytest.mark.skipif(DEVICE == "cuda", reason="CUDA graphs swap no weights")
@pytest.mark.parametrize("way", ["auto", "train_step"])
@pytest.mark.parametrize("call", [1, 2])
def test_ctrl_c_while_torch_swaps_weights_leaves_the_known_ones(way: str, call: int) -> None:
    module = network()
    engine, *parts = start(module, data(40), way)
    trained(engine, *parts, way, steps=2)
    template = engine._training.replica.template
    held = [*module.parameters(), *template.parameters()]
    swap, calls = NamedMemberAccessor.swap_tensors_dict, itertools.count(1)

    def stopped(self: Any, named: Any, allow_missing: bool = False) -> Any:
        if next(calls) != call:
            return swap(self, named, allow_missing)
        swap(self, dict(itertools.islice(named.items(), 1)), allow_missing)
        raise KeyboardInterrupt

    with (
        mock.patch.object(NamedMemberAccessor, "swap_tensors_dict", stopped),
        pytest.raises(KeyboardInterrupt),
    ):
        trained(engine, *parts, way, steps=1)
    now = [*module.parameters(), *template.parameters()]
    assert all(a is b for a, b in zip(now, held, strict=True))
    trained(engine, *parts, way, steps=1)


def test_ctrl_c_leaves_autograd_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a step, and in a reading that passes over examples."""
    engine, *parts = start(network(), data(40), "train_step")

    def train() -> None:
        trained(engine, *parts, "train_step", steps=1)

    def stopped(*_: Any) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    for work in (train, engine.plis):
        monkeypatch.setattr(torch.no_grad, "__exit__", stopped)
        with pytest.raises(KeyboardInterrupt):
            work()
        assert torch.is_grad_enabled()
        train()
