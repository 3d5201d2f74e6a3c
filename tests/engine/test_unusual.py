"""Models, batches and loops out of the ordinary: followed in all three ways of training, or refused.

Models that torch.func does not run, one example after the other, are compared with the same function that it runs.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from opacus.schedulers import ExponentialNoise
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.cases import DEVICE, relative_error
from tests.engine.architectures import Experts
from tests.engine.ways import LOSS, WAYS, Calling, examples, mlp, start, step, taken, trained, weights_of
from torchfil import Private, fisher
from torchfil.fisher.gradients import ExampleGradients
from torchfil.utils.errors import UnsupportedModuleError

PLAIN = {"noise_multiplier": 1e-9, "max_grad_norm": 1e3, "clip": "hard"}  # p.grad is that of plain training


def assert_plain_gradient(module: nn.Module, same: nn.Module, x: Tensor, y: Tensor) -> None:
    LOSS(same(x), y).backward()
    for got, want in zip(module.parameters(), same.parameters(), strict=True):
        assert torch.allclose(got.grad, want.grad, atol=1e-5)


class Changing(nn.Module):
    """Reads attributes that a schedule may change, counts its calls in a buffer, and keeps its last inputs."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale, self.unused, self.last = mlp(), 3.0, None, 0.0
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.last = x.detach().clone()
        return torch.as_tensor(self.inner(x) * getattr(self, "scale", 1.0) * getattr(self, "extra", 1.0))


def delete_scale(module: Any) -> None:
    del module.scale


def one_for_another(module: Any) -> None:
    del module.unused
    module.extra = 2.5


CHANGES = [lambda module: setattr(module, "scale", 10.0), delete_scale, one_for_another]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("change", CHANGES)
def test_attributes_that_change_are_followed(way: str, change: Callable[[Any], None]) -> None:
    module, same = Changing(), Changing()
    engine, model, optimizer, loader = start(module, examples(), way, **PLAIN)
    batches = iter(loader)
    step(engine, model, optimizer, *next(batches), way)
    change(module)
    change(same)
    module.last = 0.0
    x, y = next(batches)
    step(engine, model, optimizer, x, y, way)
    assert_plain_gradient(module, same, x, y)


@pytest.mark.parametrize("way", WAYS)
def test_an_attribute_that_becomes_a_tensor(way: str) -> None:
    module = Calling(lambda self, x: self.inner(x) * self.scale, inner=mlp(), scale=3.0)
    engine, model, optimizer, loader = start(module, examples(), way)
    batches = iter(loader)
    step(engine, model, optimizer, *next(batches), way)
    module.scale = torch.tensor(1.0)
    if way == "auto":  # the loop's own pass is recorded, with whatever it uses
        step(engine, model, optimizer, *next(batches), way)
        assert sum(taken(engine)) == 12
    else:
        with pytest.raises(RuntimeError, match="copy of the model|differ"):
            step(engine, model, optimizer, *next(batches), way)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "options",
    [{}, {"max_memory": 1}, {"max_memory": 3000}, {"estimator": "exact"}, {"track": ["sketch"]}, {"norm_refresh": 2}],
    ids=str,
)
def test_buffers_are_written_once_a_step(way: str, options: dict[str, Any]) -> None:
    if way == "auto" and {"estimator", "track"} & set(options):
        pytest.skip("one pass serves weight probes alone")
    module = Changing()
    engine = trained(*start(module, examples(), way, **options), way)
    assert float(module.calls) == 4
    assert taken(engine) == [1] * 24


@pytest.mark.parametrize("way", WAYS)
def test_a_forward_hook_that_changes_the_output_is_refused(way: str) -> None:
    module = mlp()
    module[1].register_forward_hook(lambda module, inputs, output: 3 * output)
    with pytest.raises(RuntimeError, match="copy of the model|differ"):
        trained(*start(module, examples(), way), way)


@pytest.mark.parametrize("way", WAYS)
def test_batch_normalisation_that_wakes_up_is_refused(way: str) -> None:
    """Frozen and in eval mode it is taken; model.train() after a validation puts it back into training."""
    module = nn.Sequential(nn.Conv2d(1, 3, 2), nn.BatchNorm2d(3), nn.Tanh(), nn.Flatten(), nn.Linear(12, 2))
    module[1].requires_grad_(False).eval()
    engine, model, optimizer, loader = start(module, examples(24, 1, 3, 3), way)
    batches = iter(loader)
    step(engine, model, optimizer, *next(batches), way)
    model.eval()
    model.train()
    with pytest.raises(UnsupportedModuleError, match="batch normalisation"):
        step(engine, model, optimizer, *next(batches), way)
    module[1].eval()
    step(engine, model, optimizer, *next(batches), way)
    assert sum(taken(engine)) == 12


def test_a_layer_that_is_frozen_stays_where_it_is() -> None:
    module = mlp()
    engine, *_, loader = start(module, examples(), "auto", lr=0.1)
    batches = iter(loader)
    engine.train_step(*next(batches))
    module[0].requires_grad_(False)
    frozen, moved = module[0].weight.clone(), module[2].weight.clone()
    engine.train_step(*next(batches))
    assert torch.equal(module[0].weight, frozen)
    assert not torch.equal(module[2].weight, moved)


class Switch(nn.Module):
    """Mixes examples when told to, by an argument or an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.stage = nn.Linear(3, 4), nn.Linear(4, 2), 0

    def forward(self, x: Tensor, *, centred: Any = None) -> Tensor:
        hidden = torch.tanh(self.body(x))
        return torch.as_tensor(self.head(hidden if centred is None and not self.stage else hidden - hidden.mean(dim=0)))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("by", ["argument", "integer"])
def test_a_model_that_begins_to_mix_examples_is_found_out(way: str, by: str) -> None:
    module = Switch()
    engine, model, optimizer, loader = start(module, examples(), way)
    with pytest.raises(RuntimeError, match="mixes examples|differ"):
        for k, (x, y) in enumerate(loader):
            module.stage = int(k >= 2 and by == "integer")
            given = {"x": x, "centred": torch.ones(len(x))} if k >= 2 and by == "argument" else {"x": x}
            step(engine, model, optimizer, given, y, way)
    assert taken(engine) == [1] * 12 + [0] * 12


def root() -> nn.Module:
    """A derivative that is not finite where all inputs are 0."""
    parts = {"body": nn.Linear(3, 4, bias=False), "head": nn.Linear(4, 2)}
    return Calling(lambda self, x: self.head(self.body(x).square().sqrt()), **parts)


@pytest.mark.parametrize("way", WAYS)
def test_a_gradient_that_is_not_finite_is_not_released(way: str) -> None:
    x, y = examples()
    x[8] = 0.0
    module = root()
    engine, model, optimizer, loader = start(module, (x, y), way, lr=0.1)
    batches = iter(loader)
    step(engine, model, optimizer, *next(batches), way)
    before = weights_of(module)
    with pytest.raises(RuntimeError, match="NaN"):
        step(engine, model, optimizer, *next(batches), way)
    assert torch.equal(before, weights_of(module))
    assert taken(engine) == [1] * 6 + [0] * 18


def test_a_gpu_that_has_not_finished_tells_at_the_next_step() -> None:
    on_gpu: Any = SimpleNamespace(device=SimpleNamespace(type="cuda"), sum=lambda: torch.tensor(float("nan")))
    engine, *_, loader = start(mlp(), examples())
    batches = iter(loader)
    engine.train_step(*next(batches))
    guard = engine._training.step.guard
    guard.begin_step()
    guard.check_norms(on_gpu, torch.ones(1))
    guard.raise_if_any()
    batch = next(batches)
    with pytest.raises(RuntimeError, match="last step"):
        engine.train_step(*batch)
    engine.train_step(*batch)
    assert taken(engine) == [1] * 12 + [0] * 12


def by_halves() -> nn.Module:
    """Larger batches in two calls, as trials of few examples do not show."""
    return Calling(lambda self, x: torch.cat([self.inner(half) for half in x.split(max(3, len(x) // 2))]), inner=mlp())


def test_a_batch_that_is_not_as_the_trials_is_mapped(caplog: pytest.LogCaptureFixture) -> None:
    ours, theirs = (
        trained(*start(module, examples(), "auto", estimator="exact"), steps=1) for module in (by_halves(), mlp())
    )
    assert "mapped over examples" in caplog.text
    assert torch.allclose(ours.get_fil().value, theirs.get_fil().value, rtol=1e-4)


@pytest.mark.parametrize(("way", "clear"), [("hooks", True), ("auto", True), ("auto", False)])
def test_a_sum_is_not_released_twice(way: str, clear: bool) -> None:
    """model.zero_grad() does not reach the clipped sums, and a loop may clear nothing at all."""
    alike = torch.ones(24, 3), torch.ones(24, dtype=torch.long)
    engine, model, optimizer, loader = start(mlp(), alike, way, max_grad_norm=0.1, noise_multiplier=1e-6)
    norms = []
    for x, y in loader:
        if clear:
            model.zero_grad()
        LOSS(model(x), y).backward()
        optimizer.step()
        norms.append(float(torch.cat([p.summed_grad.flatten() for p in optimizer.params]).norm()))
    assert norms == pytest.approx(norms[:1] * 4, rel=1e-6)
    assert 0 < norms[0] <= 6 * 0.1 * (1 + 1e-6)
    assert taken(engine) == [1] * 24


def with_positions() -> nn.Module:
    """Adds a vector by position; the positions are the same for all examples."""
    torch.manual_seed(0)
    positions = Calling(lambda self, x, at: x + self.weight[at], weight=nn.Parameter(torch.randn(5, 3)))
    parts = {"positions": positions, "head": nn.Linear(3, 2)}
    return Calling(lambda self, x: self.head(self.positions(x, torch.arange(5)).tanh().mean(dim=1)), **parts)


@pytest.mark.parametrize("way", ["auto", "train_step"])
@pytest.mark.parametrize("batch", [4, 5])
def test_an_argument_of_the_batchs_length_by_chance_is_still_shared(way: str, batch: int) -> None:
    module = with_positions()
    engine, model, optimizer, loader = start(module, examples(20, 5, 3), way, batch=batch, **PLAIN)
    x, y = next(iter(loader))
    step(engine, model, optimizer, x, y, way)
    assert_plain_gradient(module, with_positions(), x, y)


def as_tuple(samples: list[Any]) -> Any:
    return tuple(torch.stack(part) for part in zip(*samples, strict=True))


@pytest.mark.parametrize("collate", [None, as_tuple])
def test_train_step_refuses_a_batch_that_was_not_read_last(collate: Any) -> None:
    """A prefetcher reads one batch ahead: the step would be booked for the examples of the next."""
    engine, *_, loader = start(mlp(), examples(), "train_step", loading={"collate_fn": collate})
    batches = iter(loader)
    (x, y), (x2, y2) = next(batches), next(batches)
    for given in ((x, y), (x.clone(), y.clone()), (x + 0.1, y.clone()), (x.clone(), y2)):
        if collate is None or given[0] is not x:
            with pytest.raises(RuntimeError, match="read before"):
                engine.train_step(*given)
    engine.train_step(x2, y2)
    assert taken(engine) == [0] * 6 + [1] * 6 + [0] * 12


@pytest.mark.parametrize("way", ["hooks", "train_step"])
def test_a_batch_that_is_used_again_after_an_empty_one_is_refused(way: str) -> None:
    loading = {"generator": torch.Generator().manual_seed(0)}
    engine, model, optimizer, loader = start(mlp(), examples(), way, batch=1, poisson_sampling=True, loading=loading)
    last = None
    for inputs, targets in loader:
        if len(targets) > 1:
            last = inputs, targets
        elif not len(targets) and last is not None:
            with pytest.raises(RuntimeError, match="0 examples"):
                step(engine, model, optimizer, *last, way)
            return
    pytest.fail("no empty batch was drawn")


@pytest.mark.parametrize("way", ["hooks", "auto"])
def test_noise_that_changes_within_a_logical_batch_is_refused(way: str) -> None:
    engine, model, optimizer, loader = start(mlp(), examples(), way, batch=24)
    scheduler = ExponentialNoise(optimizer, gamma=0.5)
    with BatchMemoryManager(data_loader=loader, max_physical_batch_size=12, optimizer=optimizer) as parts:
        batches = iter(parts)
        step(engine, model, optimizer, *next(batches), way)
        scheduler.step()
        with pytest.raises(RuntimeError, match="logical"):
            step(engine, model, optimizer, *next(batches), way)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("habit", ["pop", "rewrite", "whole"])
def test_dict_batches_that_a_loop_changes_or_gives_on(way: str, habit: str) -> None:
    module = Calling(lambda self, x: self.inner(x["input"] if isinstance(x, dict) else x), inner=mlp())
    first = int(habit == "rewrite")
    rows = [{"input": x, "labels": y + first} for x, y in zip(*examples(), strict=True)]
    engine, model, optimizer, loader = start(module, rows, way, private=Private(submodule="inner.0"))
    for batch in loader:
        if habit == "whole":
            if way == "train_step":
                engine.train_step((batch,), batch["labels"])
                continue
            LOSS(model(batch), batch["labels"]).backward()
            optimizer.step()
            optimizer.zero_grad()
            continue
        if habit == "rewrite":
            batch["labels"] = batch["labels"] - 1
        labels = batch.pop("labels") if habit == "pop" and way != "train_step" else batch["labels"]
        step(engine, model, optimizer, batch["input"], labels, way)
    assert taken(engine) == [1] * 24
    assert bool((engine.get_fil().value > 0).all())


def test_two_backward_passes_through_one_output_add_up() -> None:
    """In a loop whose backward pass ends at the outputs; the sum is not the engine's loss."""
    _, model, optimizer, loader = start(mlp(), examples(), "auto")
    x, y = next(iter(loader))
    output = model(x)
    (100 * output.square()).sum().backward(retain_graph=True)
    LOSS(output, y).backward()
    with pytest.raises(ValueError, match="differs"):
        optimizer.step()


def test_own_batch_samplers_and_batches_that_are_used_again() -> None:
    reused = SimpleNamespace()

    def collate(samples: list[Any]) -> Any:
        reused.x, reused.y = as_tuple(samples)
        return reused

    halves: Any = [list(range(12)), list(range(12, 24))]
    data = DataLoader(TensorDataset(*examples()), batch_sampler=halves, collate_fn=collate)
    parts = start(mlp(), data, batch_to_inputs=lambda batch: (batch.x, batch.y))
    for batch in parts[-1]:
        step(*parts[:3], batch.x, batch.y)
    assert taken(parts[0]) == [1] * 24


@pytest.mark.parametrize("way", WAYS)
def test_norms_that_could_not_be_refreshed_are_told_at_the_first_step(way: str) -> None:
    x, y = examples()
    data = TensorDataset(x, torch.arange(24), y)
    for split in (None, lambda batch: (batch[0], batch[2])):
        engine, model, optimizer, loader = start(mlp(), data, way, norm_refresh=1, batch_to_inputs=split)
        x, _, y = next(iter(loader))
        if split is None:
            with pytest.raises(ValueError, match="norm_refresh"):
                step(engine, model, optimizer, x, y, way)
            assert engine.accountant.history == []
        else:
            step(engine, model, optimizer, x, y, way)
            assert sum(taken(engine)) == 6


def test_train_step_takes_what_was_changed_and_no_targets() -> None:
    """Augmented and relabelled batches; labels of a single class; a loss that looks at the outputs alone."""
    x, y = examples()
    one_class = y.clone()
    one_class[:6] = 0
    alone = {"criterion": lambda out, _: out.square().mean(), "batch_to_inputs": lambda batch: (batch[0], None)}
    cases: list[tuple[Any, Any, dict[str, Any]]] = [
        ((x, y + 1, torch.arange(24)), lambda label: label - 1, {}),
        ((x, one_class), torch.zeros_like, {}),
        ((x, y), lambda _: None, alone),
    ]
    for data, relabelled, options in cases:
        engine, *_, loader = start(mlp(), data, "train_step", **options)
        for inputs, labels, *_ in loader:
            engine.train_step(inputs + 0.1, relabelled(labels))
        assert taken(engine) == [1] * 24


class OldTanh(torch.autograd.Function):
    """An autograd function without setup_context, as Bloom's GELU and peft's LoHa have."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.tanh()

    @staticmethod
    def backward(ctx: Any, delta: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return delta * (1 - x.tanh().square())


def bent(mapped: bool) -> nn.Module:
    """A tanh that is called one way or the other, and a weight that is not used."""
    bend: Any = torch.tanh if mapped else OldTanh.apply
    parts = {"first": nn.Linear(4, 5), "head": nn.Linear(5, 3), "unused": nn.Parameter(torch.ones(2))}
    return Calling(lambda self, x: self.head(bend(self.first(x))), **parts)


def distances(mapped: bool) -> nn.Module:
    def far(self: Any, x: Tensor) -> Tensor:
        apart = (x[:, None] - self.centres).norm(dim=-1) if mapped else torch.cdist(x, self.centres)
        return torch.as_tensor(self.head(apart.neg().exp()))

    return Calling(far, centres=nn.Parameter(torch.randn(5, 4)), head=nn.Linear(5, 3))


def pair(kind: Any) -> tuple[nn.Module, nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    models = [kind(mapped).to(DEVICE, torch.float64) for mapped in (False, True)]
    models[1].load_state_dict(models[0].state_dict())
    return *models, torch.randn(6, 4, dtype=torch.float64, device=DEVICE), (torch.arange(6) % 3).to(DEVICE)


@pytest.mark.parametrize("kind", [Experts, bent])
def test_products_are_those_of_the_mapped_model(kind: Any) -> None:
    *models, x, y = pair(kind)
    ours, theirs = (ExampleGradients.build(model, LOSS, x, y) for model in models)
    v, u = torch.randn(6, 4).to(x), torch.randn(6, ours.num_parameters).to(x)
    products = [("gradients_and_losses",), ("jvp", v), ("vjp", u), ("vjp", u[0]), ("jacobian_columns", slice(1, 3))]
    for name, *given in products:
        for a, b in zip(getattr(ours, name)(*given), getattr(theirs, name)(*given), strict=True):
            assert relative_error(a, b) < 1e-12, name
    assert len(ExampleGradients.build(models[0], LOSS, x[:0], y[:0]).gradients()) == 0


def test_an_operation_without_a_second_derivative_is_named_and_its_remedy_works() -> None:
    *models, x, y = pair(distances)
    settings: Any = {"max_grad_norm": 1.0, "noise_multiplier": 1.0}
    with pytest.raises(UnsupportedModuleError, match="_cdist_backward"):
        fisher.fim_trace(models[0], LOSS, x, y, **settings)
    assert float(fisher.fim_trace(models[1], LOSS, x, y, **settings).value.min()) > 0


def test_weights_that_a_hook_computes_are_refused_and_the_remedy_works() -> None:
    with pytest.warns(FutureWarning):
        old = nn.Sequential(torch.nn.utils.weight_norm(nn.Linear(3, 2)), nn.Tanh())
    with pytest.raises(UnsupportedModuleError, match="parametrizations"):
        start(old, examples(), "auto")
    start(nn.Sequential(torch.nn.utils.parametrizations.weight_norm(nn.Linear(3, 2)), nn.Tanh()), examples(), "auto")


def sum_of_graphs(self: Any, x: Tensor, edges: Tensor, graph: Tensor) -> Tensor:
    source, to = edges
    sums = torch.zeros(int(graph.max()) + 1, 3).index_add(0, graph, x.index_add(0, to, x[source]))
    return torch.as_tensor(self.head(sums))


def test_graphs_with_all_nodes_in_one_tensor_are_refused() -> None:
    def collate(items: list[Any]) -> Any:
        edges = torch.cat([item[1] + 4 * k for k, item in enumerate(items)], dim=1)
        graph = torch.arange(len(items)).repeat_interleave(4)
        return torch.cat([item[0] for item in items]), edges, graph, torch.stack([item[2] for item in items])

    items: Any = [(torch.randn(4, 3), torch.randint(4, (2, 5)), torch.tensor(i)) for i in range(3)]
    options = {"criterion": None, "loading": {"collate_fn": collate}}
    _, model, optimizer, loader = start(Calling(sum_of_graphs, head=nn.Linear(3, 3)), items, "auto", batch=3, **options)
    *inputs, y = next(iter(loader))
    LOSS(model(*inputs), y).backward()
    with pytest.raises(ValueError, match="pad graphs"):
        optimizer.step()
