"""The loop and train_step: inputs and outputs of every kind, refusals that change nothing, pausing and going on."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset, default_collate

from tests.cases import DEVICE, relative_error
from tests.engine.loops import assert_same_run, data, network
from tests.engine.ways import LOSS, WAYS, Calling, start, step, trained, weights_of
from torchfil import Private
from torchfil.clipping import get_clip
from torchfil.fisher import ClippedJacobian, ExampleGradients, reference
from torchfil.fisher.recording import RecordedJacobian


class Keywords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.left, self.right, self.head = nn.Linear(3, 4), nn.Linear(2, 4), nn.Linear(4, 3)
        self.double()

    def forward(self, left: Tensor, *, right: Tensor) -> Tensor:
        return torch.as_tensor(self.head(torch.tanh(self.left(left) + self.right(right))))


def rows(n: int = 12) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, 5, generator=generator, dtype=torch.float64)
    return [{"left": row[:3], "right": row[3:], "kind": i % 3} for i, row in enumerate(x)]


def split(batch: Any) -> Any:
    return {"left": batch["left"], "right": batch["right"]}, batch["kind"]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("private", [None, Private(inputs="right")])
def test_keywords_and_dict_batches(private: Private | None, way: str) -> None:
    """tr I against exact Jacobians; an input may be given by position as well."""
    module, plain = Keywords(), Keywords().to(DEVICE)
    options = {"private": private, "estimator": "exact", "amplification": "none", "batch_to_inputs": split}
    engine, model, optimizer, loader = start(module, rows(), way, **options)
    for batch in loader:
        inputs, kinds = split({name: value.to(DEVICE) for name, value in batch.items()})
        if way == "auto":
            optimizer.zero_grad()
            LOSS(model(inputs["left"], right=inputs["right"]), kinds).backward()
            optimizer.step()
        else:
            step(engine, model, optimizer, inputs, kinds, way)
    every = {name: value.to(DEVICE) for name, value in default_collate(rows()).items()}
    settings: Any = {"max_grad_norm": 1.0, "noise_multiplier": 1.0, "private": private}
    fim = reference.exact_fim(plain, LOSS, *split(every), **settings)
    assert relative_error(engine.totals.get_trace().value, torch.einsum("bii->b", fim)) < 1e-6
    assert engine.totals.num_coordinates == fim.shape[1]


def test_private_targets_and_a_model_that_is_not_wrapped() -> None:
    x, y = data(12).tensors[0], data(12, d=2, seed=1).tensors[0]
    options = {"private": Private(target=True), "criterion": nn.MSELoss(), "wrap_model": False}
    module = network(classes=2)
    engine, hooks, optimizer, loader = start(module, (x, y), "auto", estimator="exact", amplification="none", **options)
    assert hooks is not module
    trained(engine, module, optimizer, loader, loss=F.mse_loss)
    settings: Any = {"max_grad_norm": 1.0, "noise_multiplier": 1.0, "private": Private(target=True)}
    fim = reference.exact_fim(network(classes=2), nn.MSELoss(), x.to(DEVICE), y.to(DEVICE), **settings)
    assert relative_error(engine.totals.get_trace().value, torch.einsum("bii->b", fim)) < 1e-6
    assert engine.totals.num_coordinates == 7


class Tokens(nn.Module):
    """Counts its calls, and may embed one token less than it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(11, 4), nn.Linear(4, 3)
        self.calls, self.shorter = 0, False
        self.to(DEVICE, torch.float64)

    def forward(self, tokens: Tensor) -> Tensor:
        self.calls += 1
        return torch.as_tensor(self.head(self.embedding(tokens[:, int(self.shorter) :]).tanh().mean(dim=1)))


def test_inputs_that_need_a_word_are_told() -> None:
    with pytest.raises(ValueError, match="batch_to_inputs="):
        engine, model, optimizer, loader = start(Keywords(), rows(), "auto", criterion=None)
        batch = next(iter(loader))
        step(engine, model, optimizer, *split(batch), "auto")
    tokens, kinds = torch.randint(11, (4, 4)), torch.randint(3, (4,))
    module = nn.Sequential(nn.Embedding(11, 4), nn.Flatten(), nn.Linear(16, 3))
    with pytest.raises(ValueError, match="submodule="):
        reference.exact_fim(module, LOSS, tokens, kinds, max_grad_norm=1.0, noise_multiplier=1.0)


def test_the_shape_of_a_submodules_output_is_read_once_for_every_length() -> None:
    module, private = Tokens(), Private(submodule="embedding")
    tokens, kinds = torch.randint(11, (20, 6)), torch.randint(3, (20,))
    engine, *_ = start(module, (tokens, kinds), "auto", private=private)

    def calls(length: int) -> int:
        before = module.calls
        given = engine._training.replica.lay_out((tokens[:5, :length].to(DEVICE),), {}, kinds[:5].to(DEVICE), private)
        assert given.z.shape == (5, 4 * length)
        return module.calls - before

    assert [calls(length) for length in (6, 6, 4, 6, 4)] == [1, 0, 1, 0, 0]
    module.eval()
    assert [calls(length) for length in (6, 6)] == [1, 0]

    gradients = ExampleGradients.build(module, LOSS, tokens[:5].to(DEVICE), kinds[:5].to(DEVICE), private)
    module.shorter = True
    for kind in (ClippedJacobian, RecordedJacobian):
        with pytest.raises(ValueError, match="shape"):
            kind(gradients, get_clip("gelu"), 1.0)


def several(self: Any, x: Tensor) -> dict[str, Any]:
    """Outputs that are made from one another."""
    hidden = self.body(x).tanh()
    logits = self.head(hidden)
    parts = {"logits": logits, "again": logits, "probabilities": logits.softmax(dim=1), "hidden": hidden * 1}
    return {**parts, "count": torch.arange(len(x)), "name": None, "size": 3}


def of_several(outputs: Any, y: Tensor) -> Tensor:
    if isinstance(outputs, Tensor):
        return LOSS(outputs, y)
    return F.cross_entropy(2 * outputs["logits"], y) + outputs["hidden"].square().mean(dim=1).mean()


def with_scalar(self: Any, x: Tensor) -> Tensor:
    """A temperature of no dimension, as CLIP has."""
    return torch.as_tensor(self.scale * self.body(x))


@pytest.mark.parametrize("scalar", [False, True])
def test_several_outputs_and_scalar_parameters(scalar: bool) -> None:
    runs = []
    for way in WAYS:
        torch.manual_seed(0)
        parts = {"scale": nn.Parameter(torch.tensor(1.5).double())} if scalar else {"head": nn.Linear(3, 3).double()}
        module = Calling(with_scalar if scalar else several, body=network(), **parts)
        noise = torch.Generator(DEVICE).manual_seed(2)
        options = {"criterion": of_several, "seed": 1, "noise_generator": noise, "lr": 0.3}
        runs.append((trained(*start(module, data(12), way, **options), way, of_several), module))
    for run in runs[1:]:
        assert_same_run(run, runs[0], 1e-6)


def begun(**options: Any) -> Any:
    torch.manual_seed(1)
    module = network()
    given = {"noise_generator": torch.Generator(DEVICE).manual_seed(2), "seed": 3, "lr": 0.3, **options}
    given["loading"] = {"generator": torch.Generator().manual_seed(2)}
    return module, *start(module, data(24), "auto", **given)


def test_outputs_may_be_changed_in_place() -> None:
    results = []
    for change in (Tensor.mul, Tensor.mul_):
        module, engine, model, optimizer, loader = begun(criterion=lambda outputs, y: LOSS(2 * outputs, y))
        trained(engine, model, optimizer, loader, loss=lambda out, y, change=change: LOSS(change(out, 2), y), steps=1)
        results.append((weights_of(module), engine.get_fil().value))
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_evaluation_is_as_before() -> None:
    module, _, model, _, loader = begun()
    x = next(iter(loader))[0].to(DEVICE)
    model.eval()
    inputs = x.clone().requires_grad_()
    model(inputs).sum().backward()
    assert inputs.grad is not None
    model.train()
    with torch.no_grad():
        assert torch.equal(model(x), module(x))
    assert set(model.state_dict()) == {f"_module.{name}" for name in module.state_dict()}


def test_refusals_change_nothing() -> None:
    """Each is told; then the same batch goes on as if nothing had happened."""
    results = []
    for refused in (False, True):
        module, engine, model, optimizer, loader = begun()
        for number, (x, y) in enumerate(loader):
            x, y = x.to(DEVICE), y.to(DEVICE)
            for what in ("0.weight", "loss") if refused and number == 2 else ():
                with pytest.raises((ValueError, RuntimeError), match=what):
                    if what == "0.weight":
                        (LOSS(model(x), y) + module[0].weight.square().sum()).backward()
                    else:
                        F.cross_entropy(model(x), y, label_smoothing=0.1).backward()
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


def tagging(mean: bool) -> nn.Module:
    """[time, batch, width] to the classes of each time, or to those of their mean."""
    head = nn.Linear(3, 3).double()
    return Calling(lambda self, x: self.head(x).mean(dim=0) if mean else self.head(x), head=head)


def time_first(samples: list[Any]) -> Any:
    return [torch.stack(part, dim=min(1, part[0].ndim)) for part in zip(*samples, strict=True)]


@pytest.mark.parametrize("time", [4, 5])  # five examples in a batch
def test_outputs_with_the_examples_second_are_refused(time: int) -> None:
    dataset = TensorDataset(torch.randn(5, time, 3).double(), torch.randint(3, (5, time)))
    options = {"batch": 5, "batch_first": False, "criterion": None, "loading": {"collate_fn": time_first}}
    parts = start(tagging(mean=False), dataset, "auto", **options)
    with pytest.raises((RuntimeError, ValueError), match="batch_first=False|alone"):
        trained(*parts, loss=lambda out, y: LOSS(out.flatten(0, 1), y.flatten()))


def test_examples_second_and_nobody_drawn() -> None:
    dataset = TensorDataset(torch.randn(3, 5, 3).double(), torch.arange(3))
    options = {"batch": 1, "batch_first": False, "poisson_sampling": True, "loading": {"collate_fn": time_first}}
    parts = start(tagging(mean=True), dataset, "auto", **options)
    for _ in range(4):
        trained(*parts)
    assert parts[0].ledger.steps == 12
