"""The loop's loss: identified from the gradient at the output, checked at every step; means that mix examples."""

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

from tests.cases import DEVICE
from tests.engine.loops import data, network
from tests.engine.ways import LOSS, Calling, examples, mlp, start, step, taken, trained, weights_of
from torchfil import FILPrivacyEngine
from torchfil.engine import LossMismatchError

X, Y = data(24).tensors
NUMBERS = 3 * torch.randn(24, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
BITS = (NUMBERS[:, :1] > 0).double()
SHARES = torch.randn(24, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64).softmax(dim=1)
STANDARD: list[tuple[str, Any, Tensor, int]] = [
    ("CrossEntropyLoss(reduction='mean')", F.cross_entropy, Y, 3),
    ("CrossEntropyLoss(reduction='sum')", partial(F.cross_entropy, reduction="sum"), Y, 3),
    ("BCEWithLogitsLoss(reduction='mean')", F.binary_cross_entropy_with_logits, BITS, 1),
    ("BCEWithLogitsLoss(reduction='sum')", partial(F.binary_cross_entropy_with_logits, reduction="sum"), BITS, 1),
    ("MSELoss(reduction='mean')", F.mse_loss, NUMBERS, 2),
    ("MSELoss(reduction='sum')", partial(F.mse_loss, reduction="sum"), NUMBERS, 2),
    ("MSELoss(reduction='sum')", lambda o, t: F.mse_loss(o, t, reduction="sum") / len(o), NUMBERS, 2),
    (  # targets that the loop reshapes
        "BCEWithLogitsLoss(reduction='mean')",
        lambda o, t: F.binary_cross_entropy_with_logits(o, t.unsqueeze(1).double()),
        BITS[:, 0].long(),
        1,
    ),
]


@pytest.mark.parametrize(("name", "loss", "targets", "classes"), STANDARD)
def test_standard_losses_are_identified(name: str, loss: Any, targets: Tensor, classes: int) -> None:
    reduction = "sum" if isinstance(loss, partial) else "mean"
    parts = start(network(classes=classes), (X, targets), "auto", criterion=None, loss_reduction=reduction, lr=0.3)
    engine = trained(*parts, loss=loss)
    assert engine._training.run.loss.name == name
    assert engine.get_fil().value.max() > 0


def refused(match: str, loss: Any, targets: Tensor = Y, module: nn.Module | None = None, **options: Any) -> str:
    """A loop that raises at its first step, and has changed neither the weights nor the accounting; what it says."""
    module = copy.deepcopy(module or network()).to(DEVICE)
    engine, model, optimizer, loader = start(module, (X, targets), "auto", **{"criterion": None, "lr": 0.3, **options})
    before, state = weights_of(module), engine._training.run.generator.get_state()
    with pytest.raises((LossMismatchError, RuntimeError), match=match) as told:
        trained(engine, model, optimizer, loader, loss=loss)
    assert torch.equal(before, weights_of(module))
    assert len(engine.accountant) == engine._training.run.history.steps == 0
    assert engine.ledger is None
    assert torch.equal(engine._training.run.generator.get_state(), state)
    assert all(p.summed_grad is None for p in module.parameters())
    return str(told.value)


def followed_by(last: nn.Module, classes: int = 3) -> nn.Module:
    return nn.Sequential(network(classes=classes), last)


GIVEN: list[tuple[Any, Tensor, nn.Module]] = [
    (nn.NLLLoss(), Y, followed_by(nn.LogSoftmax(dim=1))),
    (nn.BCELoss(), BITS, followed_by(nn.Sigmoid(), 1)),
    (nn.HuberLoss(), NUMBERS, network(classes=2)),
    (nn.L1Loss(), NUMBERS, network(classes=2)),
    (nn.PoissonNLLLoss(), NUMBERS.abs().round(), network(classes=2)),
    (nn.KLDivLoss(reduction="batchmean"), SHARES, followed_by(nn.LogSoftmax(dim=1))),
    (nn.KLDivLoss(reduction="sum"), SHARES, followed_by(nn.LogSoftmax(dim=1))),
    (nn.CrossEntropyLoss(label_smoothing=0.1), Y, network()),
]


@pytest.mark.parametrize(("loss", "targets", "module"), GIVEN, ids=[str(case[0]) for case in GIVEN])
def test_any_other_loss_is_refused_with_a_line_that_works(loss: Any, targets: Tensor, module: nn.Module) -> None:
    options = {"loss_reduction": "sum" if loss.reduction == "sum" else "mean"}
    refused("criterion=nn", loss, targets, module, **options)
    engine = trained(*start(copy.deepcopy(module), (X, targets), "auto", criterion=loss, **options), loss=loss)
    assert engine.get_fil().value.max() > 0


CLASSES = torch.tensor([1.0, 5.0, 0.2]).double().to(DEVICE)
WEIGHTED = partial(F.cross_entropy, weight=CLASSES)


SEEN: list[Tensor] = []


def remembering(self: Any, x: Tensor) -> Tensor:
    """A penalty on a hidden activation does not show at the output, but in the gradients' norms."""
    SEEN[:] = [torch.tanh(self.first(x))]
    return torch.as_tensor(self.last(SEEN[0]))


def around(o: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(o, t) + SEEN[0].square().sum(dim=1).mean()


@pytest.mark.parametrize(
    ("match", "loss", "options"),
    [
        ("2.5 times", lambda o, t: 2.5 * F.cross_entropy(o, t), {}),
        ("2.5 times", lambda o, t: 2.5 * F.cross_entropy(o, t), {"criterion": LOSS}),
        ("identified", nn.CrossEntropyLoss(weight=CLASSES), {}),
        ("mixes examples", WEIGHTED, {"criterion": WEIGHTED}),
        ("'sum'", partial(F.cross_entropy, reduction="sum"), {"criterion": nn.CrossEntropyLoss(reduction="sum")}),
        ("criterion|differs", F.cross_entropy, {"criterion": nn.MSELoss()}),
        ("output", around, {"module": Calling(remembering, first=network()[0], last=network()[2])}),
    ],
)
def test_what_is_not_the_engines_loss_is_refused(match: str, loss: Any, options: dict[str, Any]) -> None:
    refused(match, loss, **options)


def test_class_weights_may_be_summed_and_not_averaged() -> None:
    for mean in (nn.CrossEntropyLoss(CLASSES), nn.NLLLoss(CLASSES)):
        with pytest.raises(ValueError, match="class weights"):
            start(network(), (X, Y), "auto", criterion=mean)
    summed = nn.CrossEntropyLoss(weight=CLASSES, reduction="sum")
    options = {"criterion": summed, "loss_reduction": "sum"}
    assert trained(*start(network(), (X, Y), "auto", **options), loss=summed).get_fil().value.max() > 0


def test_a_loss_that_changes_later_raises_then() -> None:
    engine, model, optimizer, loader = start(network(), (X, Y), "auto", criterion=None)
    batches = iter(loader)
    for _ in range(2):
        step(engine, model, optimizer, *next(batches))
    before = engine.totals.get_trace().value.clone()
    with pytest.raises(LossMismatchError, match="criterion="):
        step(engine, model, optimizer, *next(batches), loss=partial(F.cross_entropy, label_smoothing=0.1))
    assert torch.equal(engine.totals.get_trace().value, before)


def two_heads(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    hidden = torch.tanh(self.body(x))
    return self.one(hidden), self.two(hidden)


def test_several_heads_and_losses() -> None:
    """The error's remedy works as it is written."""

    def epoch(**options: Any) -> FILPrivacyEngine:
        parts = {"body": network(), "one": nn.Linear(3, 3).double(), "two": nn.Linear(3, 2).double()}
        data = TensorDataset(X, Y, Y % 2)
        engine, model, optimizer, loader = start(Calling(two_heads, **parts), data, "auto", **options)
        for inputs, *targets in loader:
            outputs = model(inputs.to(DEVICE))
            sum(F.cross_entropy(o, t.to(DEVICE)) for o, t in zip(outputs, targets, strict=True)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return engine

    with pytest.raises(LossMismatchError, match="2 outputs") as told:
        epoch(criterion=None)
    lines = re.search(r"make_private\(…, criterion=(.*)\)\. If its.*batch_to_inputs=(.*)\. A target", str(told.value))
    criterion, batch_to_inputs = (eval(line, {"F": F}) for line in lines.groups())
    assert bool((epoch(criterion=criterion, batch_to_inputs=batch_to_inputs).get_fil().value > 0).all())


@pytest.mark.parametrize("way", ["auto", "hooks", "train_step"])
def test_gradients_that_are_all_zero_are_told_once(way: str) -> None:
    """Cross-entropy of a single output is 0, whatever the labels are."""
    with pytest.warns(UserWarning, match="EXACTLY ZERO") as told:
        trained(*start(network(classes=1), (X, torch.zeros(24, dtype=torch.long)), way), way)
    assert sum("EXACTLY ZERO" in str(warning.message) for warning in told) == 1


def channels_last() -> nn.Module:
    def forward(self: Any, x: Tensor) -> Tensor:
        x = self.norm(self.first(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return torch.as_tensor(self.head(self.second(torch.tanh(x)).flatten(1)))

    parts = {"second": nn.Conv2d(3, 2, 3), "head": nn.Linear(8, 2)}
    return Calling(forward, first=nn.Conv2d(1, 3, 3), norm=nn.LayerNorm(3), **parts)


def test_opacus_on_channels_last_is_blamed() -> None:
    with pytest.raises(RuntimeError, match="channels last"):
        trained(*start(channels_last(), examples(6, 1, 6, 6), "hooks"))
    assert bool((trained(*start(channels_last(), examples(6, 1, 6, 6), "auto")).get_fil().value > 0).any())


@pytest.mark.parametrize(
    "criterion",
    [
        lambda outputs, targets: F.cross_entropy(outputs, targets, weight=torch.tensor([1.0, 20.0])),
        lambda outputs, targets: (outputs - outputs.mean(dim=0)).square().mean() + LOSS(outputs, targets),
    ],
)
def test_train_step_refuses_a_criterion_that_weights_examples_by_others(criterion: Any) -> None:
    """On single examples the weights cancel: the model would be trained by another loss than was given."""
    engine, *_, loader = start(mlp(), examples(), criterion=criterion)
    x, y = next(iter(loader))
    for _ in range(2):  # trying again does not help
        with pytest.raises(LossMismatchError, match="own loss"):
            engine.train_step(x, y)
    assert engine.ledger is None


@pytest.mark.parametrize(
    "criterion",
    [
        nn.CrossEntropyLoss(torch.tensor([1.0, 20.0]), reduction="sum"),
        lambda outputs, targets: F.cross_entropy(outputs, targets, label_smoothing=0.1),
        lambda outputs, targets: -outputs.log_softmax(dim=1)[torch.arange(len(targets)), targets].sum(),
    ],
)
def test_train_step_takes_sums_and_means(criterion: Any) -> None:
    engine = trained(*start(mlp(), examples(), criterion=criterion), "train_step")
    assert bool((engine.get_fil().value > 0).all())


def per_token() -> nn.Module:
    """[batch, classes, tokens]."""
    torch.manual_seed(0)
    return Calling(lambda self, x: self.inner(x).reshape(-1, 3, 4), inner=nn.Linear(3, 12))


def own_mean(outputs: Tensor, targets: Tensor) -> Tensor:
    """The mean over an example's own targets; 0 where none counts."""
    sums = F.cross_entropy(outputs, targets, reduction="none").sum(dim=1)
    return (sums / (targets != -100).sum(dim=1).clamp(min=1)).sum()


def padded(first: int = 7) -> tuple[Tensor, Tensor]:
    targets = torch.arange(24 * 4).reshape(-1, 4) % 3
    targets[first, 1:] = targets[13] = -100  # of 13 nothing counts
    return examples()[0], targets


@pytest.mark.parametrize("criterion", [LOSS, lambda o, t: F.cross_entropy(o, t), None])
@pytest.mark.parametrize("way", ["train_step", "auto"])
def test_uneven_padding_counts_each_examples_own_mean(way: str, criterion: Any) -> None:
    """A mean over a batch's tokens weights examples by others; what is trained is each example's own, told once."""
    if criterion is None and way == "train_step":
        criterion = lambda o, t: F.cross_entropy(o[..., :], t[..., :])  # noqa: E731
    truth = trained(*start(per_token(), padded(1), criterion=own_mean, seed=1), "train_step").get_fil().value
    with pytest.warns(UserWarning, match="mean over all targets") as told:
        engine = trained(*start(per_token(), padded(1), way, criterion=criterion, seed=1), way)
    assert sum("mean over all targets" in str(warning.message) for warning in told) == 1
    assert truth[13] == 0
    assert torch.allclose(engine.get_fil().value, truth, rtol=1e-5)


@pytest.mark.parametrize("criterion", [None, lambda o, t: F.cross_entropy(o, t)])
def test_hooks_take_no_uneven_padding(criterion: Any) -> None:
    """There the gradients of a batch's mean are Opacus's, and depend on other examples."""
    engine, *parts = start(per_token(), padded(), "hooks", criterion=criterion)
    with pytest.raises(LossMismatchError, match="'auto'"):
        trained(engine, *parts)
    assert sum(taken(engine)) == 6
