"""Models, batches and gradients out of the ordinary: the three ways of training agree, or refuse."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from opacus.schedulers import ExponentialGradClip, ExponentialNoise
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.cases import grouped
from tests.engine.test_other_loops import LOSS, WAYS, examples, mlp, start, step
from torchfil import FILPrivacyEngine, Private, fisher
from torchfil.engine.losses import LossMismatchError
from torchfil.engine.whole_file import sealed_when_complete


class _WithScalar(nn.Module):
    """A temperature of no dimension, as CLIP has."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale = mlp(), nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        """As said."""
        result: Tensor = self.scale * self.inner(x)
        return result


class _Several(nn.Module):
    """Outputs that are made from one another."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """As said."""
        hidden = torch.tanh(self.body(x))
        logits = self.head(hidden)
        return {"logits": logits, "hidden": hidden, "probabilities": logits.softmax(dim=1), "again": logits}


def of_logits(outputs: Any, targets: Tensor) -> Tensor:
    return LOSS(outputs["logits"] if isinstance(outputs, dict) else outputs, targets)


@pytest.mark.parametrize("build", [_WithScalar, _Several])
def test_three_ways_agree(build: Callable[[], nn.Module]) -> None:
    traces = []
    for way in WAYS:
        torch.manual_seed(0)
        engine, model, optimizer, loader = start(build(), examples(), way, criterion=of_logits, seed=1, num_probes=3)
        for x, y in loader:
            if way == "train_step":
                engine.train_step(x, y)
            else:
                optimizer.zero_grad()
                of_logits(model(x), y).backward()
                optimizer.step()
        traces.append(engine.get_fil().value)
    assert torch.allclose(traces[0], traces[1], rtol=1e-4)
    assert torch.allclose(traces[0], traces[2], rtol=1e-4)


def test_a_scalar_parameter_against_the_exact_trace() -> None:
    x, y = examples(4)
    model, data = _WithScalar().double(), (x[:4].double(), y[:4])
    exact = fisher.fim_trace(model, LOSS, *data, estimator="exact", max_grad_norm=1.0, noise_multiplier=1.0).value
    found = fisher.fim_trace(model, LOSS, *data, num_probes=200, max_grad_norm=1.0, noise_multiplier=1.0)
    assert bool(((found.value - exact).abs() < 5 * found.standard_error).all())


class _Switch(nn.Module):
    """Mixes examples when told to, by an argument or an attribute."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head, self.stage = nn.Linear(3, 4), nn.Linear(4, 2), 0

    def forward(self, x: Tensor, *, centred: bool = False) -> Tensor:
        """As said."""
        hidden = torch.tanh(self.body(x))
        result: Tensor = self.head(hidden - hidden.mean(dim=0) if centred or self.stage else hidden)
        return result


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("by", ["argument", "integer"])
def test_a_model_that_begins_to_mix_examples_is_found_out(way: str, by: str) -> None:
    module = _Switch()
    engine, model, optimizer, loader = start(module, examples(), way)
    with pytest.raises(RuntimeError, match="mixes examples|differ from those"):
        for k, (x, y) in enumerate(loader):
            late = k >= 2
            module.stage = int(late and by == "integer")
            given = {"x": x, "centred": late} if by == "argument" else {"x": x}
            if way == "train_step":
                engine.train_step(given, y)
            else:
                optimizer.zero_grad()
                LOSS(model(given.pop("x"), **given), y).backward()
                optimizer.step()
    assert engine.leakage()["participations"].tolist() == [1] * 12 + [0] * 12


class _Root(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(3, 4, bias=False), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        """A derivative that is not finite where all inputs are 0."""
        result: Tensor = self.head(self.body(x).square().sqrt())
        return result


@pytest.mark.parametrize("way", WAYS)
def test_a_gradient_that_is_not_finite_is_not_released(way: str) -> None:
    x, y = examples()
    x[8] = 0.0
    module = _Root()
    engine, model, optimizer, loader = start(module, (x, y), way)
    batches = iter(loader)
    step(engine, model, optimizer, *next(batches), way)
    before = [p.detach().clone() for p in module.parameters()]
    with pytest.raises(RuntimeError, match="NaN or infinite, though its inputs are finite"):
        step(engine, model, optimizer, *next(batches), way)
    assert all(torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))
    assert engine.leakage()["participations"].tolist() == [1] * 6 + [0] * 18


def test_a_gpu_that_has_not_finished_tells_at_the_next_step() -> None:
    class OnGPU:
        """Norms as a GPU would hold them."""

        device = SimpleNamespace(type="cuda")

        def sum(self) -> Tensor:
            """Not finite."""
            return torch.tensor(float("nan"))

    engine, *_, loader = start(mlp(), examples())
    batches = iter(loader)
    engine.train_step(*next(batches))
    engine._training.checks.begin_norm_look(OnGPU())  # type: ignore[arg-type]
    batch = next(batches)
    with pytest.raises(RuntimeError, match="batch of the last step, which was taken"):
        engine.train_step(*batch)
    engine.train_step(*batch)
    assert engine.leakage()["participations"].tolist() == [1] * 12 + [0] * 12


@pytest.mark.parametrize("way", ["hooks", "train_step"])
def test_a_batch_that_is_used_again_after_an_empty_one_is_refused(way: str) -> None:
    engine = FILPrivacyEngine()
    module, (x, y) = mlp(), examples()
    optimizer: Any = torch.optim.SGD(module.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(x, y), batch_size=1, generator=torch.Generator().manual_seed(0))
    model, optimizer, private = engine.make_private(
        module, optimizer, loader, noise_multiplier=1.0, max_grad_norm=1.0, criterion=LOSS
    )
    last = None
    for inputs, targets in private:
        if len(targets) > 1:
            last = inputs, targets
        elif not len(targets) and last is not None:
            with pytest.raises(RuntimeError, match="0 examples were seen"):
                step(engine, model, optimizer, *last, way)
            return
    pytest.fail("no empty batch was drawn")


def test_a_tuple_that_was_read_before_is_told_from_the_last_one() -> None:
    def as_tuple(samples: list[Any]) -> tuple[Tensor, Tensor]:
        return torch.stack([x for x, _ in samples]), torch.stack([y for _, y in samples])

    engine = FILPrivacyEngine()
    module = mlp()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    loader = DataLoader(TensorDataset(*examples()), batch_size=6, collate_fn=as_tuple)
    options: dict[str, Any] = {"poisson_sampling": False, "noise_multiplier": 1.0, "max_grad_norm": 1.0}
    _, _, private = engine.make_private(module, optimizer, loader, **grouped(criterion=LOSS, **options))
    batches = iter(private)
    x, y = next(batches)
    _, _ = next(batches)
    with pytest.raises(RuntimeError, match="read before the last one"):
        engine.train_step(x.clone(), y.clone())


def test_labels_of_a_single_class_say_nothing_about_which_batch_it_is() -> None:
    x, y = examples()
    y[:6] = 0
    engine, *_, loader = start(mlp(), (x, y))
    for inputs, targets in loader:
        engine.train_step(inputs + 0.1, torch.zeros_like(targets))  # augmented and relabelled
    assert engine.leakage()["participations"].tolist() == [1] * 24


@pytest.mark.parametrize("way", WAYS)
def test_the_loaders_own_dict_as_the_models_argument(way: str) -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()

        def forward(self, batch: dict[str, Tensor]) -> Tensor:
            """Of a dict."""
            result: Tensor = self.inner(batch["x"] + 0 * batch["labels"][:, None])
            return result

    def as_dict(samples: list[Any]) -> dict[str, Tensor]:
        return {"x": torch.stack([x for x, _ in samples]), "labels": torch.stack([y for _, y in samples])}

    engine, module = FILPrivacyEngine(), Reads()
    optimizer: Any = torch.optim.SGD(module.parameters(), lr=0.0)
    loader = DataLoader(TensorDataset(*examples()), batch_size=6, collate_fn=as_dict)
    model, optimizer, private = engine.make_private(
        module,
        optimizer,
        loader,
        poisson_sampling=False,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        criterion=LOSS,
        private=Private(submodule="inner.0"),
        grad_sample_mode="auto" if way == "auto" else "hooks",
    )
    for batch in private:
        if way == "train_step":
            engine.train_step((batch,), batch["labels"])
        else:
            optimizer.zero_grad()
            LOSS(model(batch), batch["labels"]).backward()
            optimizer.step()
    assert bool((engine.get_fil().value > 0).all())


class _Counting(nn.Module):
    steps: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        """Counts its calls."""
        self.steps += 1
        result: Tensor = self.inner(x)
        return result


@pytest.mark.parametrize("max_memory", [2**30, 3000, 1])
def test_buffers_are_written_once_a_step_however_memory_cuts_it(max_memory: int) -> None:
    module = _Counting()
    engine, *_, loader = start(module, examples(), max_memory=max_memory)
    for x, y in loader:
        engine.train_step(x, y)
    assert float(module.steps) == 4


class _ByHalves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()

    def forward(self, x: Tensor) -> Tensor:
        """Larger batches in two calls, as trials of few examples do not show."""
        halves = x.chunk(2) if len(x) > 3 else (x,)
        return torch.cat([self.inner(half) for half in halves])


def test_a_batch_that_is_not_as_the_trials_is_mapped(caplog: pytest.LogCaptureFixture) -> None:
    engine, model, optimizer, loader = start(_ByHalves(), examples(), "auto", seed=1, estimator="exact")
    other, *parts, batches = start(mlp(), examples(), "auto", seed=1, estimator="exact")
    x, y = next(iter(loader))
    LOSS(model(x), y).backward()
    optimizer.step()
    assert "gradients are mapped over examples" in caplog.text
    step(other, *parts, *next(iter(batches)), "auto")
    assert torch.allclose(engine.get_fil().value, other.get_fil().value, rtol=1e-4)


class _Forgetful(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale, self.unused = mlp(), 3.0, None

    def forward(self, x: Tensor) -> Tensor:
        """With a scale, if there is one."""
        result: Tensor = self.inner(x) * getattr(self, "scale", 1.0) * getattr(self, "extra", 1.0)
        return result


@pytest.mark.product
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("change", ["deleted", "one for another", "a tensor"])
def test_attributes_that_go_are_followed_or_refused(way: str, change: str) -> None:
    module = _Forgetful()
    engine, model, optimizer, loader = start(module, examples(), way, seed=1)
    batches = iter(loader)
    step(engine, model, optimizer, *next(batches), way)
    if change == "deleted":
        del module.scale
    elif change == "one for another":
        del module.unused
        module.extra = 2.5
    else:
        module.scale = torch.tensor(1.0)  # type: ignore[assignment]
        if way == "auto":  # the loop's own pass is recorded, with whatever it uses
            step(engine, model, optimizer, *next(batches), way)
            assert engine.leakage()["participations"].tolist() == [1] * 12 + [0] * 12
            return
        with pytest.raises(RuntimeError, match="copy of the model gives|differ from those"):
            step(engine, model, optimizer, *next(batches), way)
        return
    step(engine, model, optimizer, *next(batches), way)
    fresh = _Forgetful()
    if change == "deleted":
        del fresh.scale
    else:
        fresh.extra = 2.5
    other, model, optimizer, loader = start(fresh, examples(), way, seed=1)
    for (x, y), _ in zip(loader, range(2), strict=False):
        step(other, model, optimizer, x, y, way)
    same = engine.leakage()["squared_norm"][6:12], other.leakage()["squared_norm"][6:12]
    assert same[0].tolist() == pytest.approx(same[1].tolist(), rel=1e-5)


def test_schedules_go_on_from_where_a_checkpoint_was_taken() -> None:
    def begin() -> Any:
        engine, model, optimizer, loader = start(mlp(), examples(), seed=1)
        return (
            engine,
            model,
            optimizer,
            loader,
            ExponentialNoise(optimizer, gamma=0.8),
            ExponentialGradClip(optimizer, gamma=0.9),
        )

    engine, model, optimizer, loader, noise, clip = begin()
    for x, y in loader:
        step(engine, model, optimizer, x, y, "hooks")
        noise.step()
        clip.step()
    file = io.BytesIO()
    engine.save_checkpoint(
        path=file, module=model, optimizer=optimizer, noise_scheduler=noise, grad_clip_scheduler=clip
    )
    file.seek(0)
    other, model, resumed, _, noise, clip = begin()
    other.load_checkpoint(path=file, module=model, optimizer=resumed, noise_scheduler=noise, grad_clip_scheduler=clip)
    assert resumed.noise_multiplier == pytest.approx(0.8**4)
    assert (resumed.noise_multiplier, resumed.max_grad_norm) == (optimizer.noise_multiplier, optimizer.max_grad_norm)


@pytest.mark.product
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("options", [{"estimator": "exact"}, {"track": ["sketch"]}, {"norm_refresh": 2}], ids=str)
def test_buffers_that_are_written_where_gradients_are_mapped(way: str, options: dict[str, Any]) -> None:
    if way == "auto" and "norm_refresh" not in options:
        pytest.skip("one pass serves weight probes alone")
    module = _Counting()
    engine, model, optimizer, loader = start(module, examples(), way, **options)
    for x, y in loader:
        step(engine, model, optimizer, x, y, way)
    assert float(module.steps) == 4
    assert engine.leakage()["participations"].tolist() == [1] * 24


def test_no_step_is_taken_after_detach() -> None:
    engine, *_, loader = start(mlp(), examples())
    batches = iter(loader)
    engine.train_step(*next(batches))
    engine.detach()
    with pytest.raises(RuntimeError, match="no further step can be taken"):
        engine.train_step(*next(batches))


WEIGHTS = torch.tensor([1.0, 20.0])


def test_class_weights_that_are_averaged_are_refused() -> None:
    for criterion in (nn.CrossEntropyLoss(WEIGHTS), nn.NLLLoss(WEIGHTS)):
        with pytest.raises(ValueError, match="with class weights and reduction='mean' divides by the weights"):
            start(mlp(), examples(), criterion=criterion)


@pytest.mark.parametrize(
    "criterion",
    [
        lambda outputs, targets: nn.functional.cross_entropy(outputs, targets, weight=WEIGHTS),
        lambda outputs, targets: (outputs - outputs.mean(dim=0)).square().mean() + LOSS(outputs, targets),
    ],
)
def test_train_step_refuses_a_criterion_that_weights_examples_by_others(criterion: Any) -> None:
    """On single examples the weights cancel: the model would be trained by another loss than was given."""
    module = mlp()
    engine, *_, loader = start(module, examples(), criterion=criterion)
    x, y = next(iter(loader))
    assert len(y.unique()) == 2
    for _ in range(2):  # trying again does not help
        with pytest.raises(LossMismatchError, match="no example has its own loss"):
            engine.train_step(x, y)
    assert engine.ledger is None


class _PerToken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 12)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, classes, tokens]."""
        result: Tensor = self.inner(x)
        return result.reshape(-1, 3, 4)


def _own_mean(outputs: Tensor, targets: Tensor) -> Tensor:
    """The mean over an example's own targets; 0 where none counts."""
    counted = (targets != -100).sum(dim=1).clamp(min=1)
    sums = nn.functional.cross_entropy(outputs, targets, reduction="none").sum(dim=1)
    return (sums / counted).sum()


def test_uneven_padding_counts_each_examples_own_mean() -> None:
    """A mean over a batch's tokens weights examples by others; what is trained is each example's own, told once."""
    x = examples()[0]
    targets = torch.arange(len(x) * 4).reshape(-1, 4) % 3
    targets[7, 1:] = -100
    targets[13] = -100  # nothing counts
    torch.manual_seed(0)
    module, fil = _PerToken(), []
    for criterion in (LOSS, _own_mean):
        engine, *_, loader = start(copy.deepcopy(module), (x, targets), criterion=criterion, seed=1)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for batch in loader:
                engine.train_step(*batch)
        told = [str(w.message) for w in caught if "a mean over all targets of a batch" in str(w.message)]
        assert len(told) == (criterion is LOSS)
        fil.append(engine.get_fil().value)
    assert fil[0][13] == 0
    assert torch.allclose(*fil, rtol=1e-5)


def test_a_mean_over_tokens_is_told_at_the_start() -> None:
    """By a criterion of the user's, too, and though no batch has targets that do not count."""
    x = examples()[0]
    targets = torch.arange(len(x) * 4).reshape(-1, 4) % 3
    engine, *_, loader = start(_PerToken(), (x, targets), criterion=lambda o, t: nn.functional.cross_entropy(o, t))
    with pytest.warns(UserWarning, match="a mean over all targets of a batch"):
        engine.train_step(*next(iter(loader)))


@pytest.mark.parametrize("grad_sample_mode", ["auto", "hooks"])
def test_uneven_padding_in_a_loop(grad_sample_mode: str) -> None:
    """With hooks the gradients of a batch's mean are Opacus's, and depend on other examples."""
    x = examples()[0]
    targets = torch.arange(len(x) * 4).reshape(-1, 4) % 3
    targets[7, 1:] = -100
    engine, model, optimizer, loader = start(_PerToken(), (x, targets), grad_sample_mode)

    def train() -> None:
        for inputs, y in loader:
            step(engine, model, optimizer, inputs, y, "hooks")

    if grad_sample_mode == "auto":
        with pytest.warns(UserWarning, match="a mean over all targets of a batch"):
            train()
        assert bool((engine.get_fil().value > 0).all())
    else:
        with pytest.raises(LossMismatchError, match=r"Use grad_sample_mode='auto'.*This step was not taken"):
            train()
        assert engine.leakage()["participations"].sum() == 6


@pytest.mark.parametrize(
    "criterion",
    [
        nn.CrossEntropyLoss(WEIGHTS, reduction="sum"),
        lambda outputs, targets: nn.functional.cross_entropy(outputs, targets, label_smoothing=0.1),
        lambda outputs, targets: -outputs.log_softmax(dim=1)[torch.arange(len(targets)), targets].sum(),
    ],
)
def test_train_step_takes_sums_and_means(criterion: Any) -> None:
    engine, *_, loader = start(mlp(), examples(), criterion=criterion)
    for x, y in loader:
        engine.train_step(x, y)
    assert bool((engine.get_fil().value > 0).all())


def test_a_checkpoint_that_does_not_fit_the_optimizer_changes_nothing() -> None:
    engine, model, optimizer, loader = start(mlp(), examples())
    for x, y in loader:
        step(engine, model, optimizer, x, y, "hooks")
    file = io.BytesIO()
    engine.save_checkpoint(path=file, module=model, optimizer=optimizer)
    other = FILPrivacyEngine()
    module = mlp()
    groups = [{"params": [value]} for value in module.parameters()]
    model, optimizer, loader = other.make_private(
        module,
        torch.optim.Adam(groups, lr=0.1),
        DataLoader(TensorDataset(*examples()), batch_size=6),
        poisson_sampling=False,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        criterion=LOSS,
    )
    x, y = next(iter(loader))
    step(other, model, optimizer, x, y, "hooks")
    weights, fil = [value.clone() for value in module.parameters()], other.get_fil().value
    moments = {key: value["exp_avg"].clone() for key, value in optimizer.original_optimizer.state.items()}
    file.seek(0)
    with pytest.raises(ValueError, match="different number of parameter groups"):
        other.load_checkpoint(path=file, module=model, optimizer=optimizer)
    file.seek(0)
    damaged = torch.load(file, weights_only=True)
    (random,) = [value for value in damaged.values() if isinstance(value, dict) and "cpu" in value]
    random["cpu"] = random["cpu"][:3]
    file = io.BytesIO()
    with sealed_when_complete(file) as content:
        torch.save(damaged, content)
    file.seek(0)
    with pytest.raises(RuntimeError, match="RNG state"):
        other.load_checkpoint(path=file, module=model)
    assert all(torch.equal(a, b) for a, b in zip(weights, module.parameters(), strict=True))
    assert torch.equal(other.get_fil().value, fil)
    assert all(torch.equal(optimizer.original_optimizer.state[key]["exp_avg"], value) for key, value in moments.items())


@pytest.mark.parametrize("damage", ["pace", "accountant", "generator"])
def test_a_damaged_state_changes_nothing(damage: str) -> None:
    engine, model, optimizer, loader = start(mlp(), examples())
    states = []
    for x, y in loader:
        step(engine, model, optimizer, x, y, "hooks")
        states.append(engine.state_dict())
    state = copy.deepcopy(states[0])
    if damage == "pace":
        del state["run"]["pace"]["rate"]
    elif damage == "accountant":
        del state["accountant"]["history"]
    else:
        state["run"]["generator"] = state["run"]["generator"][:3]
    fil, epsilon = engine.get_fil().value, engine.get_epsilon(1e-4)
    with pytest.raises((ValueError, RuntimeError)):
        engine.load_state_dict(state)
    assert torch.equal(engine.get_fil().value, fil)
    assert engine.get_epsilon(1e-4) == epsilon
    engine.load_state_dict(states[0])
    assert engine.get_epsilon(1e-4) < epsilon


def test_a_loaded_state_stays_what_it_was() -> None:
    engines = []
    for _ in range(2):
        engine, model, optimizer, loader = start(mlp(), examples())
        batches = iter(loader)
        step(engine, model, optimizer, *next(batches), "hooks")
        engines.append((engine, model, optimizer, batches))
    state = engines[0][0].state_dict()
    for engine, *_ in engines:
        engine.load_state_dict(state)
    epsilon = engines[1][0].get_epsilon(1e-4)
    engine, model, optimizer, batches = engines[0]
    step(engine, model, optimizer, *next(batches), "hooks")
    assert engines[1][0].get_epsilon(1e-4) == epsilon
    engine.load_state_dict(state)
    assert engine.get_epsilon(1e-4) == epsilon


def test_no_state_is_loaded_within_a_logical_batch() -> None:
    engine, model, optimizer, loader = start(mlp(), examples(), batch=12)
    state = engine.state_dict()
    with BatchMemoryManager(data_loader=loader, max_physical_batch_size=6, optimizer=optimizer) as physical:
        for k, (x, y) in enumerate(physical):
            if k == 1:
                with pytest.raises(RuntimeError, match=r"only between logical batches.*discard_partial_batch"):
                    engine.load_state_dict(state)
            step(engine, model, optimizer, x, y, "hooks")
    assert engine.leakage()["participations"].tolist() == [1] * 24
