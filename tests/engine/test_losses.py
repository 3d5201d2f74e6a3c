"""The loop's loss: identified from the gradient at the output, checked at every step."""

from __future__ import annotations

import copy
import re
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from tests.cases import DEVICE, grouped
from tests.engine.loops import data, loader, network, train
from torchfil import FILPrivacyEngine
from torchfil.engine import LossMismatchError


def regression_data(n: int = 40, outputs: int = 2) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, 5, generator=generator, dtype=torch.float64)
    return TensorDataset(x, 3 * torch.randn(n, outputs, generator=generator, dtype=torch.float64))


def binary_data(n: int = 40, shape: tuple[int, ...] = (1,)) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, 5, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.randint(2, (n, *shape), generator=generator).double())


STANDARD = [
    ("CrossEntropyLoss", F.cross_entropy, data(40), network()),
    ("BCEWithLogitsLoss", F.binary_cross_entropy_with_logits, binary_data(), network(classes=1)),
    ("MSELoss", F.mse_loss, regression_data(), network(classes=2)),
]


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize(("name", "function", "dataset", "module"), STANDARD, ids=[case[0] for case in STANDARD])
def test_the_three_argument_call_identifies_standard_losses(
    name: str, function: Any, dataset: TensorDataset, module: nn.Module, reduction: str
) -> None:

    run = train(
        dataset,
        steps=4,
        module=copy.deepcopy(module),
        loss_fn=lambda o, t: function(o, t, reduction=reduction),
        loss_reduction=reduction,
    )
    assert run.engine._training.run.loss is not None
    assert run.engine._training.run.loss.name == f"{name}(reduction={reduction!r})"
    assert run.engine.get_fil().value.max() > 0


def test_targets_that_the_loop_reshapes() -> None:
    """y of shape [B] against outputs [B, 1]: the usual unsqueeze(1).float()."""
    dataset = TensorDataset(torch.randn(40, 5).double(), torch.randint(2, (40,)))
    run = train(
        dataset,
        steps=3,
        module=network(classes=1),
        loss_fn=lambda o, t: F.binary_cross_entropy_with_logits(o, t.unsqueeze(1).double()),
    )
    assert run.engine._training.run.loss is not None
    assert run.engine._training.run.loss.name.startswith("BCEWithLogitsLoss")


def test_summed_squares_over_the_batch_size() -> None:
    run = train(
        regression_data(),
        steps=2,
        module=network(classes=2),
        loss_fn=lambda o, t: F.mse_loss(o, t, reduction="sum") / len(o),
    )
    assert run.engine._training.run.loss is not None
    assert run.engine._training.run.loss.name == "MSELoss(reduction='sum')"


def check_unchanged_after(error: type[Exception], match: str, **options: Any) -> FILPrivacyEngine:
    """A loop that raises at its first step, and has changed neither the weights nor the accounting."""
    module = options.pop("module", network())
    loss_fn = options.pop("loss_fn")
    dataset = options.pop("dataset", data(40))
    engine = FILPrivacyEngine()
    optimizer: Any = torch.optim.SGD(module.parameters(), lr=0.3)
    model, optimizer, private = engine.make_private(module, optimizer, loader(dataset), **grouped(**options))
    before = {k: v.clone() for k, v in module.state_dict().items()}
    state = engine._training.run.generator.get_state()
    x, y = next(iter(private))
    assert len(x) > 1
    loss_fn(model(x.to(DEVICE)), y.to(DEVICE)).backward()
    with pytest.raises(error, match=match):
        optimizer.step()
    assert all(torch.equal(before[k], v) for k, v in module.state_dict().items())
    assert len(engine.accountant) == 0
    assert engine.ledger is None
    assert engine._training.run.history.steps == 0
    assert torch.equal(engine._training.run.generator.get_state(), state)
    assert all(p.summed_grad is None for p in module.parameters())
    return engine


def distributions(n: int = 40) -> TensorDataset:
    logits = torch.randn(n, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return TensorDataset(data(n).tensors[0], logits.softmax(dim=1))


def counts(n: int = 40) -> TensorDataset:
    x, y = regression_data(n).tensors
    return TensorDataset(x, y.abs().round())


def followed_by(last: nn.Module, classes: int = 3) -> nn.Module:
    return nn.Sequential(network(classes=classes), last)


GIVEN = [
    (nn.NLLLoss(), data(40), followed_by(nn.LogSoftmax(dim=1))),
    (nn.BCELoss(), binary_data(), followed_by(nn.Sigmoid(), 1)),
    (nn.HuberLoss(), regression_data(), network(classes=2)),
    (nn.SmoothL1Loss(), regression_data(), network(classes=2)),
    (nn.L1Loss(), regression_data(), network(classes=2)),
    (nn.PoissonNLLLoss(), counts(), network(classes=2)),
    (nn.KLDivLoss(reduction="batchmean"), distributions(), followed_by(nn.LogSoftmax(dim=1))),
    (nn.KLDivLoss(reduction="sum"), distributions(), followed_by(nn.LogSoftmax(dim=1))),
    (nn.CrossEntropyLoss(label_smoothing=0.1), data(40), network()),
]


@pytest.mark.parametrize(("loss", "dataset", "module"), GIVEN, ids=[str(case[0]) for case in GIVEN])
def test_any_other_loss_is_refused_with_a_line_that_works(loss: Any, dataset: TensorDataset, module: nn.Module) -> None:
    options: dict[str, Any] = {"loss_fn": loss, "loss_reduction": "sum" if loss.reduction == "sum" else "mean"}
    check_unchanged_after(
        LossMismatchError,
        r"not one of those that are identified.*make_private\(…, criterion=nn\.NLLLoss\(\)\)",
        dataset=dataset,
        module=copy.deepcopy(module).to(DEVICE),
        **options,
    )
    run = train(dataset, steps=3, module=copy.deepcopy(module), criterion=loss, **options)
    assert run.engine.get_fil().value.max() > 0


def test_a_scaled_loss_is_named_with_its_factor() -> None:
    check_unchanged_after(
        LossMismatchError,
        r"It looks like CrossEntropyLoss\(reduction='mean'\). It is 2\.5 times that: the loop scales its loss",
        loss_fn=lambda o, t: 2.5 * F.cross_entropy(o, t),
    )
    check_unchanged_after(
        LossMismatchError,
        r"It is 2\.5 times that: the loop scales its loss",
        loss_fn=lambda o, t: 2.5 * F.cross_entropy(o, t),
        criterion=nn.CrossEntropyLoss(),
    )


def test_class_weights_raise_even_when_declared_because_their_mean_mixes_examples() -> None:
    weighted = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 5.0, 0.2]).double().to(DEVICE))
    check_unchanged_after(LossMismatchError, "not one of those that are identified", loss_fn=weighted)
    mean = partial(F.cross_entropy, weight=weighted.weight)
    check_unchanged_after(LossMismatchError, "one that mixes examples", loss_fn=mean, criterion=mean)
    with pytest.raises(ValueError, match="divides by the weights of the whole batch"):
        train(data(40), steps=3, loss_fn=weighted, criterion=weighted)
    summed = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 5.0, 0.2]).double().to(DEVICE), reduction="sum")
    run = train(data(40), steps=3, loss_fn=summed, criterion=summed, loss_reduction="sum")
    assert run.engine.get_fil().value.max() > 0


def test_a_wrong_loss_reduction_is_told() -> None:
    check_unchanged_after(
        LossMismatchError,
        "it takes the sum over the batch: pass loss_reduction='sum'",
        loss_fn=lambda o, t: F.cross_entropy(o, t, reduction="sum"),
        criterion=nn.CrossEntropyLoss(reduction="sum"),
    )


def test_a_loss_that_changes_later_raises_then() -> None:
    dataset, module = data(40), network()
    engine = FILPrivacyEngine()
    optimizer: Any = torch.optim.SGD(module.parameters(), lr=0.3)
    model, optimizer, private = engine.make_private(module, optimizer, loader(dataset))
    for step, (x, y) in enumerate(private):
        x, y = x.to(DEVICE), y.to(DEVICE)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y, label_smoothing=0.1 if step == 2 else 0.0).backward()
        if step < 2:
            optimizer.step()
            continue
        taken = engine.totals.get_trace().value.clone()
        with pytest.raises(LossMismatchError, match=r"criterion=.*This step was not taken"):
            optimizer.step()
        assert torch.equal(engine.totals.get_trace().value, taken)
        break


def test_a_criterion_that_does_not_fit_the_batch_is_told() -> None:
    check_unchanged_after(
        LossMismatchError,
        r"the criterion \(MSELoss\(\)\) fails on one example|differs from that of the engine's loss",
        loss_fn=F.cross_entropy,
        criterion=nn.MSELoss(),
    )


def test_a_loss_that_goes_round_the_output_is_caught() -> None:
    """A penalty on a hidden activation does not show at the output, but in the gradients' norms."""

    class Remembers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = network()[0], network()[2]

        def forward(self, x: Any) -> Any:
            self.hidden = torch.tanh(self.first(x))
            return self.last(self.hidden)

    module = Remembers()

    def loss(o: Any, t: Any) -> Any:
        return F.cross_entropy(o, t) + module.hidden.square().sum(dim=1).mean()

    check_unchanged_after(
        RuntimeError, "part of the loss does not go through the model's output", module=module, loss_fn=loss
    )


class _TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.one, self.two = nn.Linear(5, 4), nn.Linear(4, 3), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """As said."""
        hidden = torch.tanh(self.body(x))
        return self.one(hidden), self.two(hidden)


def two_losses(outputs: Any, targets: Any) -> Tensor:
    return F.cross_entropy(outputs[0], targets[0]) + F.cross_entropy(outputs[1], targets[1])


def test_several_heads_and_losses() -> None:
    """The error's remedy works as it is written."""
    x, y = data(24).tensors
    dataset = TensorDataset(x, y, y % 2)

    def trained(**options: Any) -> FILPrivacyEngine:
        engine = FILPrivacyEngine()
        module = _TwoHeads().double().to(DEVICE)
        model, optimizer, private = engine.make_private(
            module, torch.optim.SGD(module.parameters(), lr=0.1), loader(dataset), poisson_sampling=False, **options
        )
        for inputs, *targets in private:
            optimizer.zero_grad()
            two_losses(model(inputs.to(DEVICE)), [part.to(DEVICE) for part in targets]).backward()
            optimizer.step()
        return engine

    with pytest.raises(LossMismatchError, match="It has a gradient at 2 outputs of the model") as refused:
        trained()
    lines = re.search(
        r"make_private\(…, criterion=(.*)\)\. If its.*batch_to_inputs=(.*)\. A target", str(refused.value)
    )
    assert lines is not None
    criterion, batch_to_inputs = (eval(line, {"F": F}) for line in lines.groups())
    engine = trained(criterion=criterion, batch_to_inputs=batch_to_inputs)
    assert bool((engine.get_fil().value > 0).all())


@pytest.mark.parametrize("way", ["auto", "hooks", "train_step"])
def test_gradients_that_are_all_zero_are_told_loudly(way: str) -> None:
    """Cross-entropy of a single output is 0, whatever the labels are."""
    engine, module = FILPrivacyEngine(), network(classes=1)
    model, optimizer, private = engine.make_private(
        module,
        torch.optim.SGD(module.parameters(), lr=0.1),
        loader(TensorDataset(data(24).tensors[0], torch.zeros(24, dtype=torch.long))),
        poisson_sampling=False,
        criterion=nn.CrossEntropyLoss(),
        grad_sample_mode="hooks" if way == "hooks" else "auto",
    )
    with pytest.warns(UserWarning, match="ALL GRADIENTS OF A STEP ARE EXACTLY ZERO") as told:
        for x, y in private:
            if way == "train_step":
                engine.train_step(x, y)
                continue
            optimizer.zero_grad()
            F.cross_entropy(model(x.to(DEVICE)), y.to(DEVICE)).backward()
            optimizer.step()
    assert sum("EXACTLY ZERO" in str(warning.message) for warning in told) == 1


class _ChannelsLast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = nn.Conv2d(1, 3, 3), nn.LayerNorm(3)
        self.second, self.head = nn.Conv2d(3, 2, 3), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        """As said."""
        x = self.norm(self.first(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        result: Tensor = self.head(self.second(torch.tanh(x)).flatten(1))
        return result


def test_opacus_on_channels_last_is_blamed() -> None:
    dataset = TensorDataset(torch.randn(24, 1, 6, 6).double(), torch.arange(24) % 3)
    module = _ChannelsLast().double()
    with pytest.raises(RuntimeError, match=r"channels last in memory.*grad_sample_mode='auto'"):
        train(dataset, steps=1, module=copy.deepcopy(module), grad_sample_mode="hooks")
    assert bool((train(dataset, steps=3, module=module).engine.get_fil().value > 0).any())
