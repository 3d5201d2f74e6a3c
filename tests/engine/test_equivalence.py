"""Every way of training against brute force in float64: what is released, and everything that is
told about it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from opacus.layers import DPLSTM
from opacus.validators import ModuleValidator
from torch import nn
from torch.utils.data import TensorDataset

from benchmarks import zoo
from tests.accounting.by_hand import assert_by_hand, logged
from tests.cases import DEVICE, GroupNormResidual, relative_error
from tests.engine import architectures as arch
from tests.engine.brute_force import (
    Run,
    Truth,
    assert_released,
    assert_true,
    images,
    make,
    texts,
    train,
)
from tests.engine.loops import assert_same_run, data, network
from tests.engine.ways import Calling
from torchfil import Private
from torchfil.questions import Absent, Label, Question

pytestmark = pytest.mark.torch_versions
SIGMA, N = 0.9, 12
WEIGHTS = torch.linspace(0.3, 1.0, N).double()[
    torch.randperm(N, generator=torch.Generator().manual_seed(1))
]
QUESTIONS: dict[str, Question] = {"member": Absent(), "label": Label(3)}
EVERYTHING: dict[str, Any] = {"track": ("diagonal", "fim", "plis"), "questions": QUESTIONS}
EVERYTHING |= {"noise_multiplier": SIGMA, "amplification": None, "criterion": nn.CrossEntropyLoss()}
EMBEDDING = Private(submodule="embedding")
HOOKS, FUNCTORCH = {"grad_sample_mode": "hooks"}, {"grad_sample_mode": "functorch"}
SUM = {"loss_reduction": "sum", "criterion": nn.CrossEntropyLoss(reduction="sum")}
WHOLE = {"way": "train_step"}
# Options of make_private, and how the loop goes.
WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "loop": ({}, {}),
    "hooks": (HOOKS, {}),
    "functorch": (FUNCTORCH, {}),
    "ghost": ({"grad_sample_mode": "ghost", "clip": "smooth"}, {}),
    "train_step": ({}, WHOLE),
    "physical batches": ({}, {"physical": 2}),
    "physical batches, hooks": (HOOKS, {"physical": 2}),
    "accumulation": ({"accumulation_steps": 2}, {"every": 2, "divided": True}),
    "accumulation, not sampled": (
        {"poisson_sampling": False, "criterion": None},
        {"every": 2, "divided": True},
    ),
    "accumulation, hooks": ({"poisson_sampling": False, **HOOKS}, {"every": 2}),
    "not sampled": ({"poisson_sampling": False}, {}),
    # masks of the third are foreseen
    "not sampled, train_step": ({"poisson_sampling": False}, {"steps": 4, **WHOLE}),
    "sum": (SUM, {}),
    "sum, hooks": ({**SUM, **HOOKS}, {}),
    "sum, train_step": (SUM, WHOLE),
    "chunks": ({"max_memory": 1}, {}),
    "chunks, hooks": ({"max_memory": 1, **HOOKS}, {}),
    "chunks, train_step": ({"max_memory": 1}, WHOLE),
    "workers, physical batches": ({"loading": {"num_workers": 2}}, {"physical": 2}),
    "empty batches": ({"batch_size": 1}, {"steps": 8}),
    "empty batches, hooks": ({"batch_size": 1, **HOOKS}, {"steps": 8}),
    "empty batches, train_step": ({"batch_size": 1}, {"steps": 8, **WHOLE}),
}


def trained(way: str, module: nn.Module | None = None, dataset: Any = None, **options: Any) -> Run:
    """A run in that way, ready to be compared."""
    made, looped = WAYS[way]
    looped = {"steps": options.pop("steps", 2), **looped}
    options = {"criterion": nn.CrossEntropyLoss(), **options, **made}
    run = make(
        network() if module is None else module.double(),
        data(N) if dataset is None else dataset,
        **options,
    )
    if "loss_reduction" in made:
        run.loss_fn = options["criterion"]
    return train(run, **looped)


@pytest.mark.parametrize("way", WAYS)
def test_ways(way: str) -> None:
    """FIM, diagonal, PLIS, D of questions, ‖g̃‖ and Σ g̃ of weighted examples, with Poisson's
    factors.
    """
    run = trained(way, **EVERYTHING, clip_weights=WEIGHTS)
    assert_true(run)
    if run.options.get("poisson_sampling", True):
        assert run.engine.accountant.history == [
            (SIGMA, pytest.approx(run.private.sample_rate), len(run.passes))
        ]
    if "physical" in way:
        assert max(map(len, run.passes)) > 1
    if "empty" in way:
        assert {0, 1} <= {len(begun.ids) for passes in run.passes for begun in passes}


@pytest.mark.parametrize("way", ["loop", "hooks", "train_step"])
def test_a_run_may_begin_with_empty_batches(way: str) -> None:
    loading = {"generator": torch.Generator().manual_seed(6)}
    run = trained(way, batch_size=1, steps=3, loading=loading, **EVERYTHING)
    assert [len(begun.ids) for passes in run.passes for begun in passes] == [0, 0, 1]
    assert_true(run)


HARD = {"clip": "hard", "max_grad_norm": 1.4}  # so that some are clipped
LIMITS = {"max_grad_norm": [0.2, 0.05, 0.3, 0.1], "clipping": "per_layer"}


@pytest.mark.parametrize("way", ["loop", "hooks", "train_step"])
@pytest.mark.parametrize("options", [HARD, {"clip": "rsqrt"}, LIMITS], ids=str)
def test_clips(options: dict[str, Any], way: str) -> None:
    assert_true(trained(way, **EVERYTHING, **options))


def frozen() -> nn.Module:
    module = network()
    module[0].requires_grad_(False)
    return module


def by_halves() -> nn.Module:
    """Larger batches in two calls, as trials of few examples do not show."""
    return Calling(
        lambda self, x: torch.cat([self.inner(half) for half in x.split(max(3, len(x) // 2))]),
        inner=network(),
    )


def positions() -> nn.Module:
    """Adds a vector by position.

    The positions are the same for all examples, and as many as the batch has examples.
    """
    table = Calling(lambda self, x, at: x + self.weight[at], weight=nn.Parameter(torch.randn(3, 4)))
    parts = {"table": table, "head": nn.Linear(4, 3)}
    return Calling(
        lambda self, x: self.head(
            self.table(x, torch.arange(3, device=x.device)).tanh().mean(dim=1)
        ),
        **parts,
    )


def scaled() -> nn.Module:
    """A temperature of no dimension, as CLIP has."""
    return Calling(
        lambda self, x: self.scale * self.body(x),
        body=network(),
        scale=nn.Parameter(torch.tensor(1.5)),
    )


def normal(*shape: int) -> Callable[[int], TensorDataset]:
    def build(n: int) -> TensorDataset:
        generator = torch.Generator().manual_seed(0)
        return TensorDataset(
            torch.randn(n, *shape, generator=generator).double(), torch.arange(n) % 3
        )

    return build


DATA: dict[str, Callable[[int], TensorDataset]] = {
    "images": images,
    "texts": partial(texts, length=3),
    "rows": data,
}
DATA |= {"pictures": normal(2, 4, 4), "pixels": normal(1, 8, 8), "sequences": normal(3, 4)}
MODELS: list[tuple[Any, ...]] = [  # how it is built, its data, and the ways
    (partial(arch.ConvNeXt, 3, 0.1), "images", "loop"),
    (partial(arch.ConvNeXt, 7, 0.1), "images", "train_step"),
    (partial(arch.Encoder, "by hand", 0.1), "texts", "loop"),
    (partial(arch.Encoder, "fused", 0.1, norm_first=False), "texts", "train_step"),
    (partial(arch.Encoder, "fused", 0.2), "texts", "chunks"),
    (partial(arch.torch_layer, 0.1), "texts", "loop"),
    (lambda: ModuleValidator.fix(arch.torch_layer(0.1)), "texts", "hooks"),
    (partial(arch.Perceptron, by="layer"), "images", "hooks"),
    (partial(arch.Perceptron, by="hand"), "images", "loop"),
    (arch.Perceptron, "images", "loop", "hooks", "physical batches", "physical batches, hooks"),
    (
        arch.Perceptron,
        "images",
        "chunks",
        "chunks, hooks",
        "chunks, train_step",
        "not sampled, train_step",
    ),
    (arch.behind, "images", "loop", "train_step", "chunks, train_step"),
    (partial(arch.MaskedOtherwise, "time first"), "images", "loop", "chunks, train_step"),
    (partial(arch.MaskedOtherwise, "shared"), "images", "loop"),
    (partial(arch.MaskedOtherwise, "shared alike"), "images", "train_step", "chunks"),
    (partial(arch.MaskedOtherwise, "flat"), "images", "train_step", "chunks"),
    (partial(arch.Checkpointed, "reentrant"), "images", "loop", "hooks"),
    (partial(arch.Checkpointed, "not reentrant"), "images", "train_step"),
    (GroupNormResidual, "pictures", "loop", "hooks"),
    (arch.lora, "rows", "loop", "hooks"),
    (frozen, "rows", "loop", "hooks"),
    (arch.Recurrent, "texts", "loop"),
    (partial(arch.Recurrent, DPLSTM), "texts", "train_step"),
    (arch.Shared, "rows", "not sampled", "not sampled, train_step"),
    (by_halves, "rows", "not sampled"),
    (positions, "sequences", "not sampled", "not sampled, train_step"),
    (scaled, "rows", "loop", "hooks", "train_step"),
]
SIZES: dict[Any, int] = {by_halves: 8, arch.Shared: 4}  # of batches
EACH = [(*model[:2], way) for model in MODELS for way in model[2:]]


@pytest.mark.parametrize(("build", "kind", "way"), EACH)
def test_models(build: Any, kind: str, way: str, caplog: pytest.LogCaptureFixture) -> None:
    """Traces and what is released, under the masks that the loop drew."""
    if DEVICE == "cuda" and build is arch.behind and "train_step" not in way:
        pytest.skip(
            "a GPU draws by other operations where no gradient is wanted, and so in this loop's "
            "passes"
        )
    options = {
        "private": EMBEDDING if kind == "texts" else None,
        "noise_multiplier": SIGMA,
        "amplification": None,
    }
    torch.manual_seed(0)
    run = trained(
        way,
        build(),
        DATA[kind](8),
        steps=1 if "chunks" in way else 2,
        batch_size=SIZES.get(build, 3),
        **options,
    )
    run.plain.around = None  # brute force knows no checkpoints
    assert_true(run)
    mapped = build in (arch.behind, by_halves)
    assert mapped or "hooks" in way or "mapped over examples" not in caplog.text


@pytest.mark.parametrize("way", ["empty batches", "hooks", "train_step"])
def test_examples_in_the_second_dimension(way: str) -> None:
    """batch_first=False, inputs [time, batch]: brute force sees the same model with the batch
    first.
    """

    def second(samples: list[Any]) -> Any:
        x, y = map(torch.stack, zip(*samples, strict=True))
        return x.t(), y

    module = arch.Recurrent(nn.LSTM if way == "empty batches" else DPLSTM, first=False)
    options = {
        "noise_multiplier": SIGMA,
        "amplification": None,
        "private": EMBEDDING,
        "batch_first": False,
    }
    run = trained(way, module, texts(8), loading={"collate_fn": second}, **options)
    run.plain.first = True
    for begun in [begun for passes in run.passes for begun in passes]:
        begun.x = begun.x.t()
    assert_true(run)


@pytest.mark.parametrize("way", ["loop", "hooks", "train_step"])
def test_parts_that_change_their_mode_and_probabilities(way: str) -> None:
    made, looped = WAYS[way]
    run = make(
        arch.Perceptron(by="layer").double(), images(8), criterion=nn.CrossEntropyLoss(), **made
    )
    for probability, training in ((0.3, True), (0.3, False), (0.0, True), (0.5, True)):
        for module in (run.module, run.plain):
            module.dropout.train(training)
            module.dropout.p = probability
        run.passes, run.released = [], []
        train(run, steps=1, **looped)
        assert_released(run, Truth(run).sums)


@pytest.mark.parametrize("way", ["loop", "hooks", "train_step"])
def test_the_random_stream_is_that_of_a_plain_loop(way: str) -> None:
    """Neither a forward pass nor a step of the accounting draws more than the model itself does."""
    run = trained(way, arch.Perceptron(), images(), track=("diagonal",), estimator="weight-probes")
    drawn = torch.rand(3, device=DEVICE)
    torch.manual_seed(4)
    for begun in [begun for passes in run.passes for begun in passes if begun.ids]:
        run.plain(begun.x)
    assert torch.equal(torch.rand(3, device=DEVICE), drawn)


PROBES: list[tuple[Any, str, dict[str, Any]]] = [
    (network, "rows", {"track": ("diagonal", "plis"), "num_probes": 2}),
    (network, "rows", {"track": ("fim",), "num_probes": 2, "poisson_sampling": False}),
    (network, "rows", {"fil_rate": 0.5, "steps": 8}),
    (network, "rows", {"rel_error": 0.2, "epochs": 4, "steps": 12}),
    (network, "rows", {"max_memory": 1}),
    (network, "rows", {"num_probes": 1, "clip": "hard", "norm_refresh": 2}),
    (partial(zoo.small_alexnet, 3, 1, 8), "pixels", {"num_probes": 2}),
    (arch.Encoder, "texts", {"private": EMBEDDING}),
]


@pytest.mark.parametrize(("build", "kind", "options"), PROBES)
def test_random_estimates_are_the_same_in_all_ways(
    build: Any, kind: str, options: dict[str, Any]
) -> None:
    """Weights, ledger, ε and individual ε of the same probes; no gradients by example are kept."""
    given = {
        "estimator": "weight-probes",
        "amplification": None,
        "noise_multiplier": SIGMA,
        **options,
    }
    torch.manual_seed(0)
    module, dataset = build(), DATA[kind](16)
    runs = {
        way: trained(way, copy.deepcopy(module), dataset, **given)
        for way in ("hooks", "loop", "train_step")
    }
    for way in ("loop", "train_step"):
        assert_same_run(*((runs[each].engine, runs[each].module) for each in (way, "hooks")), 1e-6)
        assert all(p.grad_sample is None for p in runs[way].module.parameters())


@pytest.mark.parametrize(
    ("build", "kind", "options"),
    [
        pytest.param(partial(arch.ConvNeXt, 3, 0.1), "images", {}, marks=pytest.mark.slow),
        (partial(arch.Encoder, "by hand", 0.1), "texts", {"private": EMBEDDING}),
        (network, "rows", {"clip_weights": WEIGHTS[:8], "amplification": None}),
    ],
)
def test_weight_probes_are_unbiased_and_their_errors_true(
    build: Any, kind: str, options: dict[str, Any]
) -> None:
    options = {
        "estimator": "weight-probes",
        "num_probes": 100,
        "noise_multiplier": SIGMA,
        **options,
    }
    torch.manual_seed(0)
    run = make(build().double(), DATA[kind](8), **options)
    with logged() as log:
        truth = Truth(train(run, steps=2))
    assert_released(run, truth.sums)
    assert_by_hand(run.engine.ledger, log)
    for ours, theirs in zip(log, truth.log, strict=True):
        for one, other in zip(ours.contributions, theirs.contributions, strict=True):
            assert torch.equal(one.rows, other.rows)
            column, true = one.columns["trace"], other.columns["trace"]["value"]
            error = column["variance"].sqrt().cpu()
            assert bool(((column["value"].cpu() - true).abs() <= 5 * error).all())
            assert float((error / true)[true > 0].max()) < 0.3, "few probes would show nothing"


def test_random_rows_for_empty_batches_belong_to_nobody() -> None:
    run = trained(
        "empty batches",
        dataset=data(30),
        rand_on_empty=True,
        noise_multiplier=SIGMA,
        amplification=None,
    )
    real = [len(begun.ids) > 0 for passes in run.passes for begun in passes]
    assert not all(real)
    run.passes = [each if is_real else [] for each, is_real in zip(run.passes, real, strict=True)]
    truth = Truth(run)
    assert relative_error(run.engine.totals.get_trace().value, truth.trace) < 1e-6
    assert torch.equal(
        run.engine.ledger.sums["participations"].cpu().double(), truth.participations
    )
