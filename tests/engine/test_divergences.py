"""Divergences in the ledger against brute force: every way of training, models without derivatives, several answers."""

from __future__ import annotations

import copy
import io
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.cases import DEVICE, grouped, relative_error
from tests.engine.architectures import ConvNeXt, Encoder
from tests.engine.brute_force import C, Run, clipped_gradients, images, make, texts, train
from tests.engine.loops import loader
from torchfil import FILPrivacyEngine, Private
from torchfil.fisher.mechanism import step_divergence
from torchfil.questions import Absent, Change, Label, Question, Region, Token

SIGMA = 0.9
EMBEDDING = Private(submodule="embedding")
TOP = torch.tensor([[True] * 4] * 2 + [[False] * 4] * 2)
OF_IMAGES: dict[str, Question] = {
    "member": Absent(),
    "label": Label(3),
    "top": Region(TOP, 0.5),
    "negative": Change(lambda inputs, targets: (-inputs, targets)),
}


def divergences(run: Run, question: Question, *, q: float | None = None, submodule: str | None = None) -> Tensor:
    """Σ KL_t of every example and answer, [n, answers], example by example and with the loop's own masks."""
    ledger = run.engine.ledger
    assert ledger is not None
    total = torch.zeros(ledger.num_examples, len(question.answers), dtype=torch.float64)
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


@pytest.mark.parametrize("way", ["auto", "hooks", "train_step"])
def test_relu_and_shared_weights_in_every_way(way: str) -> None:
    mode = "hooks" if way == "hooks" else "auto"
    run = make(
        Rectified(), images(), grad_sample_mode=mode, criterion=nn.CrossEntropyLoss(), questions=OF_IMAGES,
        estimator="weight-probes", num_probes=1, noise_multiplier=SIGMA,
    )  # fmt: skip
    assert_true(train(run, way=way), OF_IMAGES)


@pytest.mark.parametrize("physical", [None, 2])
def test_poisson_and_physical_batches(physical: int | None) -> None:
    run = make(
        Rectified(), images(), questions=OF_IMAGES, amplification="poisson", estimator="weight-probes", num_probes=1,
        noise_multiplier=SIGMA,
    )  # fmt: skip
    train(run, steps=4, physical=physical)
    assert_true(run, OF_IMAGES, q=run.engine._training.run.options.sample_rate)


@pytest.mark.parametrize("way", ["auto", "train_step"])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_blocks_with_bare_parameters_and_masks(way: str, dropout: float) -> None:
    torch.manual_seed(0)
    questions: dict[str, Question] = {"negative": OF_IMAGES["negative"]}
    run = make(
        ConvNeXt(3, dropout).double(), images(), questions=questions, criterion=nn.CrossEntropyLoss(),
        estimator="weight-probes", num_probes=1, noise_multiplier=SIGMA,
    )  # fmt: skip
    assert_true(train(run, way=way, steps=2), questions)


def test_tokens_of_an_encoder() -> None:
    torch.manual_seed(0)
    questions: dict[str, Question] = {"first word": Token(0, (1, 2)), "label": Label(3)}
    run = make(
        Encoder("by hand", 0.0).double(), texts(), questions=questions, private=EMBEDDING, noise_multiplier=SIGMA,
        estimator="weight-probes", num_probes=1,
    )  # fmt: skip
    assert_true(train(run, steps=2), questions, submodule="embedding")


def test_mapped_gradients_and_the_exact_estimator() -> None:
    questions: dict[str, Question] = {"member": Absent(), "negative": OF_IMAGES["negative"]}
    run = make(Rectified(), images(), questions=questions, noise_multiplier=SIGMA, max_memory=2**16)
    assert_true(train(run, steps=2), questions)


def test_true_answer_has_no_divergence() -> None:
    run = make(Rectified(), images(), questions={"label": Label(3)}, noise_multiplier=SIGMA)
    train(run, steps=3)
    guess = run.engine.get_guess("label")
    labels = images().tensors[1]
    own = guess.divergence.value[torch.arange(len(labels)), labels.to(guess.divergence.value.device)]
    assert float(own.abs().max()) < 1e-10
    rates = guess.true_positive_rate(0.01)
    assert rates.shape == (len(labels), 3)
    assert float(rates.min()) >= 0.01 - 1e-12


@pytest.mark.parametrize("runs", [9, pytest.param(25, marks=pytest.mark.slow)])
def test_skipped_steps_are_weighted(runs: int) -> None:
    """The mean over runs at the same weights, each of eight steps that are measured with probability 1/2."""

    def divergence(rate: float, seed: int) -> tuple[Tensor, Tensor]:
        module = Rectified().to(DEVICE)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
        engine = FILPrivacyEngine()
        options = grouped(fil_rate=rate, seed=seed, questions={"member": Absent()}, num_probes=1)
        model, optimizer, batches = engine.make_private(
            module, optimizer, loader(images(8), 8), noise_multiplier=SIGMA, max_grad_norm=C, poisson_sampling=False,
            **options,
        )  # fmt: skip
        for _ in range(8):
            for x, y in batches:
                optimizer.zero_grad()
                F.cross_entropy(model(x.to(DEVICE)), y.to(DEVICE)).backward()
                optimizer.step()
        found = engine.get_guess("member").divergence
        return found.value[0], found.standard_error[0]

    truth, _ = divergence(1.0, 0)
    values, errors = map(torch.stack, zip(*(divergence(0.5, seed) for seed in range(runs)), strict=True))
    assert float(values.std()) > 0
    assert abs(float(values.mean() - truth)) < 3 * float(values.std()) / runs**0.5
    assert 0.5 < float(errors.square().mean().sqrt() / values.std()) < 2


def test_state_survives_and_other_questions_are_refused() -> None:
    run = make(Rectified(), images(), questions=OF_IMAGES, noise_multiplier=SIGMA)
    train(run, steps=2)
    file = io.BytesIO()
    torch.save(run.engine.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    again = make(Rectified(), images(), questions=OF_IMAGES, noise_multiplier=SIGMA)
    again.engine.load_state_dict(state)
    assert torch.equal(again.engine.get_guess("label").divergence.value, run.engine.get_guess("label").divergence.value)
    other = make(Rectified(), images(), questions={"member": Absent()}, noise_multiplier=SIGMA)
    with pytest.raises(ValueError, match="questions="):
        other.engine.load_state_dict(state)


def test_without_noise_what_differs_is_known() -> None:
    with pytest.warns(UserWarning):
        run = make(Rectified(), images(), questions={"label": Label(3)}, noise_multiplier=0.0)
        train(run, steps=2)
    guess = run.engine.get_guess("label")
    drawn = run.engine.totals.ledger.sums["participations"] > 0
    values = guess.divergence.value[drawn]
    assert bool(((values == 0) | values.isinf()).all())
    assert bool(values.isinf().any())
    assert float(guess.true_positive_rate(0.01).max()) == 1.0


@pytest.mark.parametrize(
    ("question", "message"),
    [
        (Change(lambda inputs, targets: (inputs[:, :, :2], targets)), "may differ only in values"),
        (Change(lambda inputs, targets: inputs), "must return the pair"),
        (Change(lambda inputs, targets: (inputs / 0, targets)), "changed"),
        (Token(0, (1,), input="words"), "pass input="),
    ],
)
def test_faulty_alternatives_are_told_and_change_nothing(question: Question, message: str) -> None:
    run = make(Rectified(), images(), questions={"odd": question}, noise_multiplier=SIGMA)
    before = copy.deepcopy(run.module.state_dict())
    with pytest.raises((ValueError, TypeError), match=message):
        train(run, steps=1)
    assert all(torch.equal(value, before[name]) for name, value in run.module.state_dict().items())
    assert run.engine.ledger is None


def test_a_function_may_change_its_copies() -> None:
    def overwrite(inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return inputs.zero_(), targets

    run = make(Rectified(), images(), questions={"odd": Change(overwrite)}, noise_multiplier=SIGMA)
    train(run, steps=1)
    assert float(run.passes[0][0].x.abs().max()) > 0


@pytest.mark.parametrize(
    ("questions", "message"),
    [
        ({"member": "absent"}, "Absent\\(\\)"),
        ([Absent()], "must name each question"),
        ({"": Absent()}, "needs a string as its name"),
    ],
)
def test_faulty_questions_are_refused_at_once(questions: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        make(Rectified(), images(), questions=questions)


def test_unknown_questions_name_those_that_were_asked() -> None:
    run = make(Rectified(), images(), questions={"member": Absent()}, noise_multiplier=SIGMA)
    train(run, steps=1)
    with pytest.raises(ValueError, match=r"\['member'\]"):
        run.engine.get_guess("label")


def test_device_of_the_answers() -> None:
    run = make(Rectified(), images(), questions={"member": Absent()}, noise_multiplier=SIGMA)
    train(run, steps=1)
    assert run.engine.get_guess("member", [0, 1]).divergence.value.device.type == DEVICE


def test_tables_groups_and_averages_know_questions() -> None:
    runs = []
    for seed in (1, 2):
        run = make(Rectified(), images(), questions=OF_IMAGES, noise_multiplier=SIGMA, seed=seed, num_probes=1,
                   estimator="weight-probes")  # fmt: skip
        runs.append(train(run, steps=12))
    engine = runs[0].engine
    _, columns = engine.leakage_columns(delta=1e-5)
    guess = engine.get_guess("label")
    assert columns["label_divergence"] == guess.divergence.value.amax(dim=1).tolist()
    rates = torch.tensor(columns["member_true_positive_rate"])
    assert bool((rates >= engine.get_guess("member").true_positive_rate(0.01).cpu() - 1e-9).all())
    groups = engine.group_leakage({i: "even" if i % 2 == 0 else "odd" for i in range(16)}, question="label")
    assert float(groups["max"].max() if hasattr(groups, "columns") else max(groups["max"])) == max(
        columns["label_divergence"]
    )
    average = FILPrivacyEngine.merge([run.engine for run in runs])
    both = torch.stack([run.engine.get_guess("member").divergence.value for run in runs])
    assert torch.allclose(average.get_guess("member").divergence.value, both.mean(dim=0))
    assert bool((average.get_guess("member").upper().divergence.value >= both.mean(dim=0)).all())


def test_one_run_does_not_tell_of_examples_that_were_hardly_drawn() -> None:
    run = make(Rectified(), images(), questions={"member": Absent()}, noise_multiplier=SIGMA)
    train(run, steps=4)
    assert bool(run.engine.get_guess("member").upper().divergence.value.isinf().any())


def test_extra_probes_leave_questions_alone() -> None:
    """The few that are measured anew keep the divergences of the first pass."""
    questions: dict[str, Question] = {"member": Absent(), "negative": OF_IMAGES["negative"]}
    run = make(
        Rectified(), images(), questions=questions, noise_multiplier=SIGMA, estimator="weight-probes", num_probes=1,
        extra_probes=4, batch_size=8,
    )  # fmt: skip
    assert_true(train(run, steps=40), questions)
