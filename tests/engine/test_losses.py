"""The loop's loss: identified from the gradient at the output, checked at every step.

Means that mix examples.

Models that compute their loss themselves: the loop goes back from that loss, and labels are inputs.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import default_collate

from tests.cases import DEVICE, relative_error
from tests.engine.loops import assert_same_run, data, network
from tests.engine.ways import LOSS, Calling, examples, start, step, taken, trained, weights_of
from torchfil import FILPrivacyEngine
from torchfil.engine import LossMismatchError
from torchfil.fisher import models, reference

BCE = F.binary_cross_entropy_with_logits
X, Y = data(24).tensors
NUMBERS = 3 * torch.randn(24, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
BITS = (NUMBERS[:, :1] > 0).double()
STANDARD: list[tuple[str, Any, Tensor, int]] = [
    ("CrossEntropyLoss(reduction='mean')", F.cross_entropy, Y, 3),
    ("BCEWithLogitsLoss(reduction='mean')", BCE, BITS, 1),
    ("BCEWithLogitsLoss(reduction='sum')", partial(BCE, reduction="sum"), BITS, 1),
    ("MSELoss(reduction='mean')", F.mse_loss, NUMBERS, 2),
    ("MSELoss(reduction='sum')", partial(F.mse_loss, reduction="sum"), NUMBERS, 2),
    (
        "MSELoss(reduction='sum')",
        lambda o, t: F.mse_loss(o, t, reduction="sum") / len(o),
        NUMBERS,
        2,
    ),
    (
        "BCEWithLogitsLoss(reduction='mean')",
        lambda o, t: BCE(o, t.unsqueeze(1).double()),
        BITS[:, 0].long(),
        1,
    ),
]


@pytest.mark.parametrize(("name", "loss", "targets", "classes"), STANDARD)
def test_standard_losses_are_identified(
    name: str, loss: Any, targets: Tensor, classes: int
) -> None:
    reduction = "sum" if isinstance(loss, partial) else "mean"
    parts = start(
        network(classes=classes),
        (X, targets),
        "auto",
        criterion=None,
        loss_reduction=reduction,
        lr=0.3,
    )
    engine = trained(*parts, loss=loss)
    assert engine._training.run.loss.name == name
    assert engine.get_fil().value.max() > 0


CLASSES = torch.tensor([1.0, 5.0, 0.2]).double().to(DEVICE)
WEIGHTED, SMOOTHED = (
    partial(F.cross_entropy, weight=CLASSES),
    partial(F.cross_entropy, label_smoothing=0.1),
)


TWO_HEADS = Calling(lambda self, x: (self.one(x), self.two(x)), one=network(), two=network(seed=2))
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
        ("criterion=nn", nn.NLLLoss(), {"module": nn.Sequential(network(), nn.LogSoftmax(dim=1))}),
        ("2.5 times", lambda o, t: 2.5 * F.cross_entropy(o, t), {}),
        ("identified", nn.CrossEntropyLoss(weight=CLASSES), {}),
        ("mixes examples", WEIGHTED, {"criterion": WEIGHTED}),
        (
            "'sum'",
            partial(F.cross_entropy, reduction="sum"),
            {"criterion": nn.CrossEntropyLoss(reduction="sum")},
        ),
        ("criterion|differs", F.cross_entropy, {"criterion": nn.MSELoss()}),
        (
            "2 outputs",
            lambda o, t: F.cross_entropy(o[0], t) + F.cross_entropy(o[1], t),
            {"module": TWO_HEADS},
        ),
        ("output", around, {"module": Calling(remembering, first=network()[0], last=network()[2])}),
    ],
)
def test_what_is_not_the_engines_loss_is_refused(
    match: str, loss: Any, options: dict[str, Any]
) -> None:
    """At the first step, which changes neither the weights nor the accounting."""
    options = {"criterion": None, "lr": 0.3, "module": network(), **options}
    module = copy.deepcopy(options.pop("module")).to(DEVICE)
    engine, *parts = start(module, (X, Y), "auto", **options)
    before = weights_of(module)
    with pytest.raises((LossMismatchError, RuntimeError), match=match):
        trained(engine, *parts, loss=loss)
    assert torch.equal(before, weights_of(module))
    assert len(engine.accountant) == engine._training.run.history.steps == 0
    assert engine.ledger is None
    assert all(p.summed_grad is None for p in module.parameters())


def test_a_loss_that_changes_later_raises_then() -> None:
    engine, model, optimizer, loader = start(network(), (X, Y), "auto", criterion=None)
    batches = iter(loader)
    for _ in range(2):
        step(engine, model, optimizer, *next(batches))
    before = engine.totals.get_trace().value.clone()
    with pytest.raises(LossMismatchError, match="criterion="):
        step(engine, model, optimizer, *next(batches), loss=SMOOTHED)
    assert torch.equal(engine.totals.get_trace().value, before)


def centred(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - outputs.mean(dim=0)).square().mean() + LOSS(outputs, targets)


@pytest.mark.parametrize("criterion", [partial(F.cross_entropy, weight=CLASSES.float()), centred])
def test_train_step_refuses_a_criterion_that_weights_examples_by_others(criterion: Any) -> None:
    """On single examples the weights cancel: the model would be trained by another loss than was
    given.
    """
    engine, *_, loader = start(network().float(), (X.float(), Y), criterion=criterion)
    x, y = next(iter(loader))
    for _ in range(2):  # trying again does not help
        with pytest.raises(LossMismatchError, match="own loss"):
            engine.train_step(x, y)
    assert engine.ledger is None


def per_token() -> nn.Module:
    """[batch, classes, tokens]."""
    torch.manual_seed(0)
    return Calling(lambda self, x: self.inner(x).reshape(-1, 3, 4), inner=nn.Linear(3, 12))


def own_mean(outputs: Tensor, targets: Tensor) -> Tensor:
    """The mean over an example's own targets; 0 where none counts."""
    sums = F.cross_entropy(outputs, targets, reduction="none").sum(dim=1)
    return (sums / (targets != -100).sum(dim=1).clamp(min=1)).sum()


def padded(first: int) -> tuple[Tensor, Tensor]:
    targets = torch.arange(24 * 4).reshape(-1, 4) % 3
    targets[first, 1:] = targets[13] = -100  # of 13 nothing counts
    return examples()[0], targets


@pytest.mark.parametrize("criterion", [LOSS, lambda o, t: F.cross_entropy(o, t), None])
@pytest.mark.parametrize("way", ["train_step", "auto"])
def test_uneven_padding_counts_each_examples_own_mean(way: str, criterion: Any) -> None:
    """A mean over a batch's tokens weights examples by others.

    What is trained is each example's own, told once.
    """
    if criterion is None and way == "train_step":
        pytest.skip("train_step needs a criterion")
    first = 7 if way == "auto" else 1  # a loop tells it in a later batch, too
    truth = (
        trained(*start(per_token(), padded(first), criterion=own_mean, seed=1), "train_step")
        .get_fil()
        .value
    )
    with pytest.warns(UserWarning, match="mean over all targets") as told:
        engine = trained(*start(per_token(), padded(first), way, criterion=criterion, seed=1), way)
    assert sum("mean over all targets" in str(warning.message) for warning in told) == 1
    assert truth[13] == 0
    assert torch.allclose(engine.get_fil().value, truth, rtol=1e-5)


@pytest.mark.parametrize("rate", [1.0, 0.01])
@pytest.mark.parametrize("criterion", [None, lambda o, t: F.cross_entropy(o, t)])
def test_hooks_take_no_uneven_padding(criterion: Any, rate: float) -> None:
    """There the gradients of a batch's mean are Opacus's, and depend on other examples.

    Measured or not.
    """
    engine, *parts = start(per_token(), padded(7), "hooks", criterion=criterion, fil_rate=rate)
    with pytest.raises(LossMismatchError, match="'auto'"):
        trained(engine, *parts)
    assert sum(taken(engine)) == 6


TOKENS = 4


@dataclass
class Output:
    logits: Tensor
    loss: Tensor | None = None
    hidden: Tensor | None = None


def loss_of(kind: str, logits: Tensor, labels: Tensor, reduction: str = "mean") -> Tensor:
    """Of the next token, or no standard loss."""
    if kind == "other":
        wrong = torch.eye(3, device=labels.device)[labels.clamp(min=0)] - logits.softmax(dim=-1)
        return ((wrong**4).sum(dim=-1) * (labels != -100)).mean()
    return F.cross_entropy(logits[:, :-1].movedim(-1, 1), labels[:, 1:], reduction=reduction)


def loss_of_one(kind: str, outputs: Any, labels: Tensor) -> Tensor:
    """ℓ of one example, written down once more."""
    if kind == "other":
        return loss_of(kind, outputs.logits, labels)
    return loss_of(kind, outputs.logits, labels, "sum") / (labels[:, 1:] != -100).sum().clamp(min=1)


class Own(nn.Module):
    """[batch, …, 5] to logits [batch, …, 3], with a loss of its own where labels are given."""

    def __init__(self, loss: Any) -> None:
        super().__init__()
        self.inner, self.loss, self.factor = network(), loss, 2.0

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        logits = self.inner(x)
        return Output(logits, None if labels is None else self.loss(self, x, logits, labels))


def of_tokens(kind: str) -> nn.Module:
    return Own(lambda _self, _x, logits, labels: loss_of(kind, logits, labels))


def items(ignored: bool = False) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(24, TOKENS, 5, generator=generator, dtype=torch.float64)
    labels = torch.randint(3, (24, TOKENS), generator=generator)
    if ignored:
        labels[::3, 2:] = labels[5] = -100
    return [{"x": row, "labels": own} for row, own in zip(x, labels, strict=True)]


def by_itself(
    engine: Any, model: Any, optimizer: Any, loader: Any, way: str = "auto", loss: Any = None
) -> Any:
    """One pass; loss: of the outputs and labels, outside of the model."""
    for batch in loader:
        batch = {key: value.to(DEVICE) for key, value in batch.items()}
        if way == "train_step":
            engine.train_step({"x": batch["x"]}, batch["labels"]) if loss else engine.train_step(
                batch
            )
            continue
        optimizer.zero_grad()
        (loss(model(batch["x"]), batch["labels"]) if loss else model(**batch).loss).backward()
        optimizer.step()
    return engine


@pytest.mark.filterwarnings("ignore:the loss is a mean over all targets")
@pytest.mark.parametrize("kind", ["next", "other"])
@pytest.mark.parametrize(
    ("way", "ignored"), [("auto", True), ("train_step", True), ("hooks", False)]
)
def test_a_models_own_loss_gives_the_same_run_as_that_loss_written_down(
    way: str, kind: str, ignored: bool
) -> None:
    def run(way: str, loss: Any) -> tuple[FILPrivacyEngine, nn.Module]:
        module, mode = of_tokens(kind), "hooks" if way == "hooks" else "auto"
        options = {"lr": 0.3, "seed": 3, "noise_generator": torch.Generator(DEVICE).manual_seed(5)}
        return by_itself(
            *start(module, items(ignored), mode, criterion=loss, **options), way, loss
        ), module

    assert_same_run(run(way, None), run("train_step", partial(loss_of_one, kind)), 1e-9)


@pytest.mark.parametrize("way", ["auto", "hooks"])
def test_a_models_own_loss_that_the_loop_scales_is_refused(way: str) -> None:
    _, model, optimizer, loader = start(of_tokens("next"), items(), way, criterion=None)
    batch = {key: value.to(DEVICE) for key, value in next(iter(loader)).items()}
    (model(**batch).loss / 2).backward()
    with pytest.raises(LossMismatchError, match="0.5 times"):
        optimizer.step()


class Reading(Own):
    """Its outputs depend on the labels."""

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        logits = self.inner(x if labels is None else x + labels.clamp(min=0)[..., None])
        return Output(logits, None if labels is None else self.loss(self, x, logits, labels))


@pytest.mark.parametrize("way", ["auto", "hooks", "train_step"])
def test_labels_that_change_the_outputs_stay_inputs(way: str) -> None:
    """Of a model that has read them, the loss is no function of what it would give without."""
    module = Reading(lambda _self, _x, logits, labels: loss_of("next", logits, labels))
    plain = copy.deepcopy(module).to(DEVICE)
    options: dict[str, Any] = {"criterion": None, "estimator": "exact", "amplification": None}
    engine = by_itself(
        *start(module, items(), "hooks" if way == "hooks" else "auto", **options), way
    )
    batch: Any = {name: value.to(DEVICE) for name, value in default_collate(items()).items()}
    settings: Any = {"max_grad_norm": 1.0, "noise_multiplier": 1.0}
    fim = reference.exact_fim(
        plain, lambda out, y: loss_of("next", out.logits, y), batch, batch["labels"], **settings
    )
    assert relative_error(engine.totals.get_trace().value, torch.einsum("bii->b", fim)) < 1e-6


def test_a_loss_of_the_logits_is_identified() -> None:
    """Of an output with several tensors, by the one at which a gradient arrives, and labels shifted
    by one.
    """
    parts = start(of_tokens("next"), items(), "auto", criterion=None)
    engine = by_itself(*parts, loss=lambda o, y: loss_of("next", o.logits, y))
    assert engine._training.run.loss.name == "CrossEntropyLoss(reduction='mean') of the next token"
    assert bool((engine.get_fil().value > 0).all())


class Checkpointed(nn.Module):
    """A block with dropout and the model's own loss, each under a checkpoint.

    The block's input is an output, too.
    """

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.first, self.block = network(), nn.Sequential(network(3), nn.Dropout(0.3))
        self.reentrant = reentrant

    def around(self, part: Any, *inputs: Tensor) -> Any:
        if self.reentrant is None:
            return part(*inputs)
        return checkpoint(part, *inputs, use_reentrant=self.reentrant)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        hidden = self.first(x)
        logits = self.around(self.block, hidden)
        if labels is None:
            return Output(logits)
        return Output(logits, self.around(partial(loss_of, "next"), logits, labels), hidden)


@pytest.mark.filterwarnings("ignore:the loss is a mean over all targets")
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("way", ["auto", "train_step", "hooks"])
def test_checkpoints_in_a_model_with_its_own_loss_change_nothing(way: str, reentrant: bool) -> None:
    def run(reentrant: bool | None) -> tuple[FILPrivacyEngine, nn.Module]:
        torch.manual_seed(0)
        module, mode = Checkpointed(reentrant), "hooks" if way == "hooks" else "auto"
        options = {"lr": 0.3, "seed": 3, "noise_generator": torch.Generator(DEVICE).manual_seed(5)}
        return by_itself(*start(module, items(), mode, criterion=None, **options), way), module

    models.warn_of_skipped_checkpoints.cache_clear()
    with pytest.warns(UserWarning, match="checkpoints are skipped"):
        found = run(reentrant)
    assert_same_run(found, run(None), 1e-9)


class Both(Own):
    """(loss, logits), as Hugging Face's models return tuples."""

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        out = super().forward(x, labels)
        return (x.sum() if out.loss is None else out.loss), out.logits


@pytest.mark.parametrize("labelled", [True, False])
@pytest.mark.parametrize("mode", ["ghost", "auto"])
def test_a_criterion_of_one_output_of_several(mode: str, labelled: bool) -> None:
    """Opacus's tutorial on BERT: ``criterion(outputs[1], y)`` of a model with its own loss."""

    def run(module: Any, call: Any) -> tuple[FILPrivacyEngine, nn.Module]:
        options = {"noise_generator": torch.Generator(DEVICE).manual_seed(5), "seed": 3, "lr": 0.3}
        engine, model, optimizer, *more = start(
            module, (X, X, X, Y), grad_sample_mode=mode, **options
        )
        for batch in more[-1]:
            x, *_, y = [leaf.to(DEVICE) for leaf in batch]
            optimizer.zero_grad()
            (more[0] if mode == "ghost" else LOSS)(call(model, x, y), y).backward()
            optimizer.step()
        return engine, getattr(module, "inner", module)

    both = Both(lambda _self, _x, logits, labels: F.cross_entropy(logits, labels))
    ours = run(both, lambda model, x, y: model(x, labels=y if labelled else None)[1])
    assert_same_run(ours, run(network(), lambda model, x, _: model(x)), 1e-9)


TERMS: dict[str, Any] = {  # that do not go through the logits
    "hidden": lambda inner, x: inner[:2](x).square().sum(dim=1).mean(),
    "weights": lambda inner, _: inner[0].weight.square().sum(),
}
ROWS = [{"x": x, "labels": y} for x, y in zip(X, Y, strict=True)]


def with_term(term: str, **options: Any) -> tuple[Any, Any]:
    """Cross-entropy plus a term, as an auxiliary loss or AdaLoRA's penalty."""
    module: Any = Own(
        lambda self, x, logits, y: (
            F.cross_entropy(logits, y) + self.factor * TERMS[term](self.inner, x)
        )
    )
    return module, start(module, ROWS, "auto", batch=8, **{"criterion": None, **options})


@pytest.mark.parametrize("way", ["auto", "train_step"])
@pytest.mark.parametrize("term", TERMS)
def test_a_term_beside_the_outputs_is_trained_on_and_accounted_for(way: str, term: str) -> None:
    """It counts in every example's gradient: ∇ of the loss of one row."""
    engine = by_itself(*with_term(term, estimator="exact", amplification="none")[1], way)

    def forward(self: Any, x: Tensor) -> Tensor:
        return torch.cat([self.inner(x), TERMS[term](self.inner, x).expand(len(x), 1)], dim=1)

    def loss(outputs: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(outputs[:, :3], y) + 2 * outputs[:, 3].mean()

    settings: Any = {"max_grad_norm": 1.0, "noise_multiplier": 1.0}
    fim = reference.exact_fim(
        Calling(forward, inner=network()), loss, X.to(DEVICE), Y.to(DEVICE), **settings
    )
    assert relative_error(engine.totals.get_trace().value, torch.einsum("bii->b", fim)) < 1e-6


@pytest.mark.parametrize("way", ["auto", "train_step"])
def test_a_term_that_is_added_during_training_is_refused(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torchfil.engine.forward._FORWARDS_BETWEEN_LOOKS", 8)
    module, parts = with_term("weights")
    module.factor = 0.0
    by_itself(*parts, way)
    module.factor = 2.0
    with pytest.raises(LossMismatchError, match="another term"):
        for _ in range(3):
            by_itself(*parts, way)


def test_a_criterion_without_the_models_term_is_refused() -> None:
    with pytest.raises(LossMismatchError, match="another term"):
        by_itself(
            *with_term("weights", criterion=lambda outputs, y: F.cross_entropy(outputs.logits, y))[
                1
            ]
        )


def pairs(self: Any, x: Tensor, logits: Tensor, labels: Tensor) -> Tensor:
    """SigLIP's: each row's view against every row's label."""
    views = (
        nn.functional.normalize(logits, dim=-1)
        @ nn.functional.normalize(F.one_hot(labels, 3).to(x), dim=-1).mT
    )
    return -F.logsigmoid((4 * views - 1) * (2 * torch.eye(len(x)).to(x) - 1)).sum(dim=-1).mean()


class LossAlone(Own):
    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        return Output(torch.zeros(len(x), 1), super().forward(x, labels).loss)


@pytest.mark.parametrize("kind", [Own, LossAlone])
@pytest.mark.parametrize("way", ["auto", "train_step", "hooks"])
def test_a_models_own_loss_that_mixes_examples_is_refused(way: str, kind: Any) -> None:
    module = kind(pairs)
    before = [value.clone() for value in module.parameters()]
    engine, *parts = start(
        module, ROWS, "hooks" if way == "hooks" else "auto", batch=8, criterion=None, lr=0.3
    )
    with pytest.raises(
        LossMismatchError, match="own loss mixes the examples of a batch.*CLIP.*criterion="
    ):
        by_itself(engine, *parts, way)
    assert engine.ledger is None
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), before, strict=True))


def uneven(self: Any, x: Tensor, logits: Tensor, labels: Tensor) -> Tensor:
    """A mean with a weight for each example, and a term that does not go through the logits."""
    weights = x[:, 0].exp()
    losses = F.cross_entropy(logits, labels, reduction="none") + self.inner[:2](x).square().sum(
        dim=1
    )
    return (weights * losses).sum() / weights.sum()


@pytest.mark.parametrize("drops", [False, True])
@pytest.mark.parametrize("way", ["auto", "train_step"])
def test_a_models_own_loss_that_weights_examples_is_told_and_trained_without_weights(
    way: str, drops: bool
) -> None:
    def own(kind: Any) -> Any:
        module = Own(kind)
        module.inner.insert(2, nn.Dropout(0.5 if drops else 0.0))
        torch.manual_seed(3)  # of the masks
        return start(
            module, ROWS, "auto", batch=8, criterion=None, estimator="exact", amplification="none"
        )

    with pytest.warns(
        UserWarning, match="the model weights examples by others of the batch"
    ) as told:
        engine = by_itself(*own(uneven), way)
    assert sum("own loss on this batch" in str(warning.message) for warning in told) == 1
    even = by_itself(
        *own(
            lambda self, x, o, y: F.cross_entropy(o, y) + self.inner[:2](x).square().sum(1).mean()
        ),
        way,
    )
    assert relative_error(engine.totals.get_trace().value, even.totals.get_trace().value) < 1e-9
