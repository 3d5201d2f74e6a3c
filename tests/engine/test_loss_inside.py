"""Models that compute their loss themselves: the loop goes back from that loss, and labels are inputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.cases import DEVICE
from tests.engine.loops import assert_same_run
from tests.engine.ways import start, weights_of
from torchfil import FILPrivacyEngine
from torchfil.engine import LossMismatchError
from torchfil.engine.step import Step

COUNT, WIDTH, TOKENS, CLASSES = 24, 5, 4, 3


@dataclass
class Output:
    logits: Tensor
    loss: Tensor | None = None
    hidden: Tensor | None = None


def loss_of(kind: str, logits: Tensor, labels: Tensor, reduction: str = "mean") -> Tensor:
    """Of the next token, of every token, or no standard loss."""
    if kind == "other":
        wrong = torch.eye(CLASSES, device=labels.device)[labels.clamp(min=0)] - logits.softmax(dim=-1)
        return ((wrong**4).sum(dim=-1) * (labels != -100)).mean()
    logits, labels = (logits[:, :-1], labels[:, 1:]) if kind == "next" else (logits, labels)
    return F.cross_entropy(logits.movedim(-1, 1), labels, reduction=reduction)


class Texts(nn.Module):
    """[batch, tokens, width] to logits [batch, tokens, classes], with a loss of its own where labels are given."""

    def __init__(self, kind: str = "next") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head, self.kind = nn.Linear(WIDTH, 6), nn.Linear(6, CLASSES), kind
        self.double()

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        hidden = torch.tanh(self.body(x))
        logits = self.head(hidden)
        return Output(logits, None if labels is None else loss_of(self.kind, logits, labels), hidden)


def items(ignored: bool = False) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(COUNT, TOKENS, WIDTH, generator=generator, dtype=torch.float64)
    labels = torch.randint(CLASSES, (COUNT, TOKENS), generator=generator)
    if ignored:
        labels[::3, 2:] = labels[5] = -100
    return [{"x": row, "labels": own} for row, own in zip(x, labels, strict=True)]


def of_one(kind: str) -> Any:
    """ℓ of one example, written down once more."""

    def one(outputs: Any, labels: Tensor) -> Tensor:
        if kind == "other":
            return loss_of(kind, outputs.logits, labels)
        counted = labels[:, 1:] if kind == "next" else labels
        return loss_of(kind, outputs.logits, labels, "sum") / (counted != -100).sum().clamp(min=1)

    return one


def train(engine: Any, model: Any, optimizer: Any, loader: Any, way: str = "auto", loss: Any = None) -> Any:
    """loss: of the outputs and labels, outside of the model."""
    for batch in loader:
        batch = {key: value.to(DEVICE) for key, value in batch.items()}
        if way == "train_step":
            engine.train_step({"x": batch["x"]}, batch["labels"]) if loss else engine.train_step(batch)
            continue
        optimizer.zero_grad()
        (loss(model(batch["x"]), batch["labels"]) if loss else model(**batch).loss).backward()
        optimizer.step()
    return engine


def run(way: str, kind: str, ignored: bool, loss: Any = None) -> tuple[FILPrivacyEngine, nn.Module]:
    module, noise = Texts(kind), torch.Generator(DEVICE).manual_seed(5)
    options = {"criterion": loss, "lr": 0.3, "seed": 3, "noise_generator": noise}
    options["grad_sample_mode"] = "hooks" if way == "hooks" else "auto"
    return train(*start(module, items(ignored), **options), way, loss), module


@pytest.mark.filterwarnings("ignore:the loss is a mean over all targets")
@pytest.mark.parametrize("kind", ["next", "every", "other"])
@pytest.mark.parametrize(("way", "ignored"), [("auto", True), ("train_step", True), ("hooks", False)])
def test_the_same_run_as_with_the_loss_written_down(way: str, kind: str, ignored: bool) -> None:
    assert_same_run(run(way, kind, ignored), run("train_step", kind, ignored, of_one(kind)), 1e-9)


def test_a_scaled_loss_is_told() -> None:
    module = Texts()
    _, model, optimizer, loader = start(module, items(), "auto", criterion=None, lr=0.3)
    for factor, batch in zip((1, 0.25), loader, strict=False):
        optimizer.zero_grad()
        (factor * model(**{key: value.to(DEVICE) for key, value in batch.items()}).loss).backward()
        if factor == 1:
            optimizer.step()
    before = weights_of(module)
    with pytest.raises(LossMismatchError, match=r"0\.25 times"):
        optimizer.step()
    assert torch.equal(weights_of(module), before)


def test_a_loss_of_the_logits_is_identified() -> None:
    """Of an output with several tensors, by the one at which a gradient arrives, and labels shifted by one."""
    engine = train(*start(Texts(), items(), "auto", criterion=None), loss=lambda o, y: loss_of("next", o.logits, y))
    assert engine._training.run.loss.name == "CrossEntropyLoss(reduction='mean') of the next token"
    assert bool((engine.get_fil().value > 0).all())


def test_a_criterion_that_averages_over_tokens_in_a_loop() -> None:
    """Of the user's, whose gradient at the output shows how it weights examples; found in a later batch, too."""
    fil, data = [], items()
    data[8]["labels"][2:] = -100
    for criterion in (lambda o, y: loss_of("next", o.logits, y), of_one("next")):
        with pytest.warns(UserWarning, match="mean over all targets"):
            parts = start(Texts(), data, "auto", criterion=criterion, seed=3)
            fil.append(train(*parts, loss=lambda o, y: loss_of("next", o.logits, y)).get_fil().value)
    assert torch.allclose(*fil)


def test_train_step_without_any_loss_says_what_to_do() -> None:
    engine, *_, loader = start(Texts(), items(), "auto", criterion=None)
    batch = next(iter(loader))
    with pytest.raises(RuntimeError, match="criterion="):
        engine.train_step(batch["x"], batch["labels"])


class WithTerm(nn.Module):
    """Cross-entropy of the logits plus a term that does not go through them."""

    def __init__(self, term: str, factor: float = 2.0) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.body, self.head = nn.Linear(WIDTH, 6), nn.Linear(6, CLASSES)
        self.term, self.factor = term, factor
        self.double().to(DEVICE)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        hidden = torch.tanh(self.body(x))
        logits = self.head(hidden)
        if labels is None:
            return Output(logits)
        terms = {"hidden": hidden.square().sum(dim=1).mean(), "weights": self.body.weight.square().sum()}
        return Output(logits, F.cross_entropy(logits, labels) + self.factor * terms[self.term])


ROWS = [{"x": item["x"][0], "labels": item["labels"][0]} for item in items()]


def begun(model: nn.Module, **options: Any) -> Any:
    return start(model, ROWS, "auto", batch=8, **{"criterion": None, **options})


@pytest.mark.parametrize("way", ["auto", "train_step"])
@pytest.mark.parametrize("term", ["hidden", "weights"])
def test_a_term_beside_the_outputs_is_trained_on_and_accounted_for(way: str, term: str) -> None:
    """An auxiliary loss or a penalty (AdaLoRA's) counts in every example's gradient: ∇ of the loss of one row."""
    model = WithTerm(term)
    weights = {name: value.detach().clone() for name, value in model.named_parameters()}
    engine = train(*begun(model, estimator="exact", amplification="none"), way)

    def released(x: Tensor, label: Tensor) -> Tensor:
        def loss(w: dict[str, Tensor]) -> Tensor:
            return torch.func.functional_call(model, w, (x[None], label[None])).loss

        g = torch.cat([part.flatten() for part in torch.func.grad(loss)(weights).values()])
        return g / (1 + g.norm() ** 8) ** (1 / 8)

    rows = [(row["x"].to(DEVICE), row["labels"].to(DEVICE)) for row in ROWS]
    traces = torch.stack([torch.func.jacrev(released)(*row).square().sum() for row in rows])
    torch.testing.assert_close(engine.get_fil().value, (traces / WIDTH).sqrt())


def test_a_models_own_loss_is_identified_again_now_and_then() -> None:
    """At steps 1, 4 and 9 of nine: neither once nor at every step, though each step compares the losses."""
    parts = begun(WithTerm("hidden"))
    with patch.object(Step, "_own_pass", autospec=True, side_effect=Step._own_pass) as own_pass:
        for _ in range(3):
            train(*parts, "train_step")
    assert own_pass.call_count == 3


@pytest.mark.parametrize("way", ["auto", "train_step"])
def test_a_term_that_is_added_during_training_is_refused(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchfil.engine.forward._FORWARDS_BETWEEN_LOOKS", 8)
    model = WithTerm("weights", factor=0.0)
    parts = begun(model)
    train(*parts, way)
    model.factor = 2.0
    with pytest.raises(LossMismatchError, match="another term"):
        for _ in range(3):
            train(*parts, way)


def test_a_criterion_without_the_models_term_is_refused() -> None:
    with pytest.raises(LossMismatchError, match="another term"):
        train(*begun(WithTerm("weights"), criterion=lambda outputs, y: F.cross_entropy(outputs.logits, y)))
