"""Divergences in the ledger against brute force: every way of training, models without derivatives, several answers."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.cases import DEVICE, relative_error
from tests.engine import made
from tests.engine.architectures import ConvNeXt, Encoder
from tests.engine.brute_force import C, Run, clipped_gradients, images, make, texts, train
from torchfil import FILPrivacyEngine, Private
from torchfil.fisher.mechanism import step_divergence
from torchfil.questions import Absent, Change, Label, Question, Region, Token

SIGMA = 0.9
TOP = torch.tensor([[True] * 4] * 2 + [[False] * 4] * 2)
OF_IMAGES: dict[str, Question] = {
    "member": Absent(),
    "label": Label(3),
    "top": Region(TOP, 0.5),
    "negative": Change(lambda inputs, targets: (-inputs, targets)),
}


def divergences(run: Run, question: Question, *, q: float | None = None, submodule: str | None = None) -> Tensor:
    """Σ KL_t of every example and answer, [n, answers], example by example and with the loop's own masks."""
    total = torch.zeros(run.engine.ledger.num_examples, len(question.answers), dtype=torch.float64)
    for passes in run.passes:
        for begun in passes:
            if not begun.ids:
                continue
            own = clipped_gradients(run.plain, begun, submodule) / (SIGMA * C)
            for k, other in enumerate(question.alternatives(begun.x, begun.y)):
                # one example changes at a time, among its true companions: their masks must not matter
                v = torch.zeros_like(own)
                if other is not None:
                    at = replace(begun, x=other.inputs, y=other.targets)
                    v = clipped_gradients(run.plain, at, submodule) / (SIGMA * C)
                products = [(a * b).sum(dim=1) for a, b in ((own, own), (v, v), (own, v))]
                total[begun.ids, k] += (step_divergence(*products, q) / (q or 1)).cpu()
    return total


def assert_true(run: Run, questions: dict[str, Question], **options: Any) -> None:
    for name, question in questions.items():
        truth = divergences(run, question, **options)
        value = run.engine.get_guess(name).divergence.value
        value = value[:, None] if len(question.answers) == 1 else value
        assert float(truth.max()) > 0
        assert relative_error(value, truth) < 1e-6, name


class Rectified(nn.Module):
    """ReLU, max pooling and a layer that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.twice, self.head = nn.Conv2d(1, 2, 3, padding=1), nn.Linear(8, 8), nn.Linear(8, 3)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        h = F.max_pool2d(F.relu(self.conv(x)), 2).flatten(1)
        logits: Tensor = self.head(F.relu(self.twice(F.relu(self.twice(h)))))
        return logits


def ask(questions: Any = OF_IMAGES, module: nn.Module | None = None, dataset: Any = None, **options: Any) -> Run:
    """A run that is ready to train, measured by one probe."""
    options = {"noise_multiplier": SIGMA, "estimator": "weight-probes", "num_probes": 1, **options}
    module = Rectified() if module is None else module
    return make(module, dataset or images(), questions=questions, criterion=nn.CrossEntropyLoss(), **options)


@pytest.mark.parametrize("way", ["auto", "hooks", "train_step"])
def test_relu_and_shared_weights_in_every_way(way: str) -> None:
    run = ask(grad_sample_mode="hooks" if way == "hooks" else "auto")
    assert_true(train(run, way=way), OF_IMAGES)


@pytest.mark.parametrize("physical", [None, 2])
def test_poisson_and_physical_batches(physical: int | None) -> None:
    run = train(ask(amplification="poisson"), steps=4, physical=physical)
    assert_true(run, OF_IMAGES, q=run.engine._training.run.options.sample_rate)


@pytest.mark.parametrize(("way", "dropout"), [("auto", 0.2), ("train_step", 0.0), ("train_step", 0.2)])
def test_blocks_with_bare_parameters_and_masks(way: str, dropout: float) -> None:
    torch.manual_seed(0)
    questions = {"negative": OF_IMAGES["negative"]}
    assert_true(train(ask(questions, ConvNeXt(3, dropout).double()), way=way, steps=2), questions)


def test_tokens_of_an_encoder() -> None:
    torch.manual_seed(0)
    questions: dict[str, Question] = {"first word": Token(0, (1, 2)), "label": Label(3)}
    run = ask(questions, Encoder("by hand", 0.0).double(), texts(), private=Private(submodule="embedding"))
    assert_true(train(run, steps=2), questions, submodule="embedding")


@pytest.mark.parametrize(
    ("options", "steps"),
    [({"estimator": "exact", "max_memory": 2**16}, 2), ({"extra_probes": 4, "batch_size": 8}, 40)],
    ids=["mapped", "few anew"],
)
def test_other_estimators(options: dict[str, Any], steps: int) -> None:
    """Mapped gradients; and the few that are measured anew keep the divergences of the first pass."""
    questions = {"member": Absent(), "negative": OF_IMAGES["negative"]}
    assert_true(train(ask(questions, **options), steps=steps), questions)


def test_true_answers_have_no_divergence_and_without_noise_others_are_known() -> None:
    guess = train(ask({"label": Label(3)}), steps=3).engine.get_guess("label")
    labels = images().tensors[1]
    own = guess.divergence.value[torch.arange(len(labels)), labels.to(DEVICE)]
    assert float(own.abs().max()) < 1e-10
    rates = guess.true_positive_rate(0.01)
    assert rates.shape == (len(labels), 3)
    assert float(rates.min()) >= 0.01 - 1e-12
    with pytest.warns(UserWarning):
        run = train(ask({"label": Label(3)}, noise_multiplier=0.0), steps=2)
    guess = run.engine.get_guess("label")
    values = guess.divergence.value[run.engine.totals.ledger.sums["participations"] > 0]
    assert bool(((values == 0) | values.isinf()).all())
    assert bool(values.isinf().any())
    assert float(guess.true_positive_rate(0.01).max()) == 1.0


@pytest.mark.parametrize("runs", [9, pytest.param(25, marks=pytest.mark.slow)])
def test_skipped_steps_are_weighted(runs: int) -> None:
    """The mean over runs at the same weights, each of eight steps that are measured with probability 1/2."""

    def divergence(rate: float, seed: int) -> tuple[Tensor, Tensor]:
        options = {"fil_rate": rate, "seed": seed, "questions": {"member": Absent()}, "num_probes": 1}
        options |= {"noise_multiplier": SIGMA, "max_grad_norm": C, "poisson_sampling": False}
        engine, _, model, optimizer, batches = made.make(images(8), Rectified().to(DEVICE), 8, **options)
        optimizer.param_groups[0]["lr"] = 0.0
        for _ in range(8):
            made.step(model, optimizer, next(iter(batches)))
        found = engine.get_guess("member").divergence
        return found.value[0], found.standard_error[0]

    truth, _ = divergence(1.0, 0)
    values, errors = map(torch.stack, zip(*(divergence(0.5, seed) for seed in range(runs)), strict=True))
    assert float(values.std()) > 0
    assert abs(float(values.mean() - truth)) < 3 * float(values.std()) / runs**0.5
    assert 0.5 < float(errors.square().mean().sqrt() / values.std()) < 2


def test_tables_groups_averages_and_states_know_questions() -> None:
    runs = [train(ask(seed=seed), steps=8) for seed in (1, 2)]
    engine = runs[0].engine
    _, columns = engine.leakage_columns(delta=1e-5)
    assert columns["label_divergence"] == engine.get_guess("label").divergence.value.amax(dim=1).tolist()
    rates = torch.tensor(columns["member_true_positive_rate"])
    assert bool((rates >= engine.get_guess("member").true_positive_rate(0.01).cpu() - 1e-9).all())
    groups = engine.group_leakage({i: "even" if i % 2 == 0 else "odd" for i in range(16)}, question="label")
    assert float(groups["max"].max()) == max(columns["label_divergence"])
    both = torch.stack([run.engine.get_guess("member").divergence.value for run in runs])
    average = FILPrivacyEngine.merge([run.engine for run in runs]).get_guess("member")
    assert torch.allclose(average.divergence.value, both.mean(dim=0))
    assert bool((average.upper().divergence.value >= both.mean(dim=0)).all())
    assert engine.get_guess("member", [0, 1]).divergence.value.device.type == DEVICE
    short = train(ask({"member": Absent()}), steps=2).engine
    assert bool(short.get_guess("member").upper().divergence.value.isinf().any()), "one run: hardly drawn"

    again = ask()
    again.engine.load_state_dict(engine.state_dict())
    assert torch.equal(again.engine.get_guess("label").divergence.value, engine.get_guess("label").divergence.value)
    with pytest.raises(ValueError, match="questions="):
        short.load_state_dict(engine.state_dict())
    with pytest.raises(ValueError, match=r"\['member'\]"):
        short.get_guess("label")


def overwrite(inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    return inputs.zero_(), targets


@pytest.mark.parametrize(
    ("question", "noun"),
    [
        (Change(lambda inputs, targets: (inputs[:, :, :2], targets)), "values"),
        (Change(lambda inputs, targets: inputs), "pair"),
        (Change(lambda inputs, targets: (inputs / 0, targets)), "changed"),
        (Token(0, (1,), input="words"), "input="),
        (Change(overwrite), None),  # its copies
    ],
)
def test_faulty_alternatives_are_told_and_change_nothing(question: Question, noun: str | None) -> None:
    run = ask({"odd": question})
    before = copy.deepcopy(run.module.state_dict())
    if noun is None:
        assert float(train(run, steps=1).passes[0][0].x.abs().max()) > 0
        return
    with pytest.raises((ValueError, TypeError), match=noun):
        train(run, steps=1)
    assert all(torch.equal(value, before[name]) for name, value in run.module.state_dict().items())
    assert run.engine.ledger is None
