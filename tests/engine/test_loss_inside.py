"""Models that compute their loss themselves: the loop goes back from that loss, and labels are inputs."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from tests.cases import DEVICE
from tests.engine.loops import SIGMA, C, assert_same_run, loader
from torchfil import Accounting, FILPrivacyEngine
from torchfil.engine import LossMismatchError
from torchfil.engine.step import Step

COUNT, WIDTH, TOKENS, CLASSES = 24, 5, 4, 3


@dataclass
class _Output:
    logits: Tensor
    loss: Tensor | None = None
    hidden: Tensor | None = None


class _Texts(nn.Module):
    """[batch, tokens, width] to logits [batch, tokens, classes], with a loss of its own where labels are given."""

    def __init__(self, kind: str = "next") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head, self.kind = nn.Linear(WIDTH, 6), nn.Linear(6, CLASSES), kind

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        """As said."""
        hidden = torch.tanh(self.body(x))
        logits = self.head(hidden)
        if labels is None:
            return _Output(logits, hidden=hidden)
        if self.kind == "next":
            loss = F.cross_entropy(logits[:, :-1].reshape(-1, CLASSES), labels[:, 1:].reshape(-1))
        elif self.kind == "every":
            loss = F.cross_entropy(logits.movedim(-1, 1), labels)
        else:  # no standard loss
            counted = labels != -100
            wrong = torch.eye(CLASSES, device=labels.device)[labels.clamp(min=0)] - logits.softmax(dim=-1)
            loss = ((wrong**4).sum(dim=-1) * counted).mean()
        return _Output(logits, loss, hidden)


class _Data(Dataset[Any]):
    def __init__(self, ignored: bool = False) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(COUNT, TOKENS, WIDTH, generator=generator, dtype=torch.float64)
        self.labels = torch.randint(CLASSES, (COUNT, TOKENS), generator=generator)
        if ignored:
            self.labels[::3, 2:] = -100
            self.labels[5] = -100

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {"x": self.x[i], "labels": self.labels[i]}


def on_device(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key: value.to(DEVICE) for key, value in batch.items()}


def truth(kind: str) -> Any:
    """ℓ of one example, written down once more."""

    def one(outputs: Any, labels: Tensor) -> Tensor:
        if kind == "other":
            wrong = torch.eye(CLASSES, device=labels.device)[labels.clamp(min=0)] - outputs.logits.softmax(dim=-1)
            return ((wrong**4).sum(dim=-1) * (labels != -100)).mean()
        logits, labels = (outputs.logits[:, :-1], labels[:, 1:]) if kind == "next" else (outputs.logits, labels)
        total = F.cross_entropy(logits.movedim(-1, 1), labels, reduction="sum")
        return total / (labels != -100).sum().clamp(min=1)

    return one


def trained(way: str, kind: str, ignored: bool, **options: Any) -> tuple[FILPrivacyEngine, nn.Module]:
    engine = FILPrivacyEngine()
    module = _Texts(kind).double().to(DEVICE)
    model, optimizer, private = engine.make_private(
        module,
        torch.optim.SGD(module.parameters(), lr=0.3),
        loader(_Data(ignored), 6),
        poisson_sampling=False,
        noise_multiplier=SIGMA,
        max_grad_norm=C,
        noise_generator=torch.Generator(device=DEVICE).manual_seed(5),
        **options,
    )
    for batch in private:
        if way == "truth":
            engine.train_step({"x": batch["x"]}, batch["labels"])
        elif way == "train_step":
            engine.train_step(batch)
        else:
            optimizer.zero_grad()
            model(**on_device(batch)).loss.backward()
            optimizer.step()
    return engine, module


@pytest.mark.filterwarnings("ignore:the loss is a mean over all targets")
@pytest.mark.product
@pytest.mark.parametrize("ignored", [False, True])
@pytest.mark.parametrize("kind", ["next", "every", "other"])
@pytest.mark.parametrize("way", ["auto", "train_step"])
def test_the_same_run_as_with_the_loss_written_down(way: str, kind: str, ignored: bool) -> None:
    accounting = Accounting(seed=3)
    expected = trained("truth", kind, ignored, criterion=truth(kind), accounting=accounting)
    assert_same_run(trained(way, kind, ignored, accounting=accounting), expected, 1e-9)


def test_with_hooks() -> None:
    accounting = Accounting(seed=3)
    expected = trained("truth", "next", False, criterion=truth("next"), accounting=accounting)
    hooks = trained("hooks", "next", False, grad_sample_mode="hooks", accounting=accounting)
    assert_same_run(hooks, expected, 1e-9)


@pytest.fixture
def private_training() -> Any:
    engine = FILPrivacyEngine()
    module = _Texts().double().to(DEVICE)
    parts = engine.make_private(
        module,
        torch.optim.SGD(module.parameters(), lr=0.3),
        loader(_Data(), 6),
        poisson_sampling=False,
        noise_multiplier=SIGMA,
        max_grad_norm=C,
    )
    return engine, *parts


def test_a_scaled_loss_is_told(private_training: Any) -> None:
    _, model, optimizer, private = private_training
    losses = iter(private)
    model(**on_device(next(losses))).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    before = copy.deepcopy(model.state_dict())
    (0.25 * model(**on_device(next(losses))).loss).backward()
    with pytest.raises(LossMismatchError, match=r"0\.25 times that"):
        optimizer.step()
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_a_loss_of_the_logits_is_identified(private_training: Any) -> None:
    """Of an output with several tensors, by the one at which a gradient arrives, and labels shifted by one."""
    engine, model, optimizer, private = private_training
    for batch in map(on_device, private):
        optimizer.zero_grad()
        logits = model(batch["x"]).logits
        F.cross_entropy(logits[:, :-1].reshape(-1, CLASSES), batch["labels"][:, 1:].reshape(-1)).backward()
        optimizer.step()
    assert engine._training.run.loss.name == "CrossEntropyLoss(reduction='mean') of the next token"
    assert bool((engine.get_fil().value > 0).all())


def test_a_criterion_that_averages_over_tokens_in_a_loop() -> None:
    """Of the user's, whose gradient at the output shows how it weights examples; found in a later batch, too."""

    def next_token(outputs: Any, labels: Tensor) -> Tensor:
        return F.cross_entropy(outputs.logits[:, :-1].reshape(-1, CLASSES), labels[:, 1:].reshape(-1))

    accounting, dataset = Accounting(seed=3), _Data()
    dataset.labels[8, 2:] = -100
    fil = []
    for criterion in (next_token, truth("next")):
        engine = FILPrivacyEngine()
        module = _Texts().double().to(DEVICE)
        model, optimizer, private = engine.make_private(
            module,
            torch.optim.SGD(module.parameters(), lr=0.0),
            loader(dataset, 6),
            poisson_sampling=False,
            criterion=criterion,
            accounting=accounting,
        )
        with pytest.warns(UserWarning, match="a mean over all targets of a batch"):
            for batch in private:
                optimizer.zero_grad()
                next_token(model(batch["x"].to(DEVICE)), batch["labels"].to(DEVICE)).backward()
                optimizer.step()
        fil.append(engine.get_fil().value)
    assert torch.allclose(*fil)


def test_train_step_without_any_loss_says_what_to_do(private_training: Any) -> None:
    engine, _, _, private = private_training
    batch = next(iter(private))
    with pytest.raises(RuntimeError, match="pass criterion= to make_private, or labels to a model"):
        engine.train_step(batch["x"], batch["labels"])


class _WithTerm(nn.Module):
    """Cross-entropy of the logits plus a term that does not go through them."""

    def __init__(self, term: str, factor: float = 2.0) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.body, self.head = nn.Linear(WIDTH, 6), nn.Linear(6, CLASSES)
        self.term, self.factor = term, factor
        self.double().to(DEVICE)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        """As said."""
        hidden = torch.tanh(self.body(x))
        logits = self.head(hidden)
        if labels is None:
            return _Output(logits)
        terms = {"hidden": hidden.square().sum(dim=1).mean(), "weights": self.body.weight.square().sum()}
        return _Output(logits, F.cross_entropy(logits, labels) + self.factor * terms[self.term])


class _Rows(_Data):
    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {"x": self.x[i, 0], "labels": self.labels[i, 0]}


def _trained(model: nn.Module, way: str, **options: Any) -> tuple[FILPrivacyEngine, Any]:
    """The engine, and a function that trains for an epoch of three batches, by a loop or train_step."""
    engine = FILPrivacyEngine()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.0)
    private, optimizer, batches = engine.make_private(
        model, optimizer, loader(_Rows(), 8), poisson_sampling=False, max_grad_norm=1.0, **options
    )

    def train() -> None:
        for batch in batches:
            if way == "loop":
                optimizer.zero_grad()
                private(**on_device(batch)).loss.backward()
                optimizer.step()
            else:
                engine.train_step(on_device(batch))

    return engine, train


@pytest.mark.parametrize("way", ["loop", "train_step"])
@pytest.mark.parametrize("term", ["hidden", "weights"])
def test_a_term_beside_the_outputs_is_trained_on_and_accounted_for(way: str, term: str) -> None:
    """An auxiliary loss or a penalty (AdaLoRA's) counts in every example's gradient: ∇ of the loss of one row."""
    model = _WithTerm(term)
    weights = {name: value.detach().clone() for name, value in model.named_parameters()}
    data = torch.utils.data.default_collate([_Rows()[i] for i in range(COUNT)])
    accounting = Accounting(estimator="exact", amplification="none")
    engine, train = _trained(model, way, noise_multiplier=1.0, accounting=accounting)
    train()

    def released(x: Tensor, label: Tensor) -> Tensor:
        def loss(w: dict[str, Tensor]) -> Tensor:
            return torch.func.functional_call(model, w, (x[None], label[None])).loss

        g = torch.cat([part.flatten() for part in torch.func.grad(loss)(weights).values()])
        return g / (1 + g.norm() ** 8) ** (1 / 8)

    rows = zip(data["x"].to(DEVICE), data["labels"].to(DEVICE), strict=True)
    traces = torch.stack([torch.func.jacrev(released)(x, label).square().sum() for x, label in rows])
    torch.testing.assert_close(engine.get_fil().value, (traces / WIDTH).sqrt())


def test_a_models_own_loss_is_identified_again_now_and_then() -> None:
    """At steps 1, 4 and 9 of nine: neither once nor at every step, though each step compares the losses."""
    train = _trained(_WithTerm("hidden"), "train_step")[1]
    with patch.object(Step, "_own_pass", autospec=True, side_effect=Step._own_pass) as own_pass:
        for _ in range(3):
            train()
    assert own_pass.call_count == 3


@pytest.mark.parametrize("way", ["loop", "train_step"])
def test_a_term_that_is_added_during_training_is_refused(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchfil.engine.forward._FORWARDS_BETWEEN_LOOKS", 8)
    model = _WithTerm("weights", factor=0.0)
    train = _trained(model, way)[1]
    train()
    model.factor = 2.0
    with pytest.raises(LossMismatchError, match="another term"):
        for _ in range(3):
            train()


def test_a_criterion_without_the_models_term_is_refused() -> None:
    with pytest.raises(LossMismatchError, match="another term"):
        _trained(_WithTerm("weights"), "loop", criterion=lambda outputs, y: F.cross_entropy(outputs.logits, y))[1]()
