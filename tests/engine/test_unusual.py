"""Models, batches and loops out of the ordinary: followed in all three ways of training, or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from opacus.schedulers import ExponentialNoise
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import Tensor, nn

from tests.cases import DEVICE
from tests.engine.ways import LOSS, WAYS, Calling, examples, mlp, start, step, taken, trained, weights_of
from torchfil import fisher
from torchfil.utils.errors import UnsupportedModuleError

PLAIN = {"noise_multiplier": 1e-9, "max_grad_norm": 1e3, "clip": "hard"}  # p.grad is that of plain training


def changing() -> Any:
    """Reads attributes that a schedule may change, counts its calls in a buffer, and keeps its last inputs."""

    def forward(self: Any, x: Tensor) -> Tensor:
        self.calls += 1
        self.last = x.detach().clone()
        return torch.as_tensor(self.inner(x) * getattr(self, "scale", 1.0) * getattr(self, "extra", 1.0))

    return Calling(forward, inner=mlp(), scale=3.0, unused=None, last=0.0, calls=nn.Buffer(torch.zeros(())))


def one_for_another(module: Any) -> None:
    del module.unused
    module.extra = 2.5


@pytest.mark.parametrize("way", WAYS)
def test_attributes_that_change_are_followed(way: str) -> None:
    module, same = changing(), changing().to(DEVICE)
    engine, model, optimizer, loader = start(module, examples(), way, **PLAIN)
    batches = iter(loader)
    step(engine, model, optimizer, *next(batches), way)
    for change in (lambda it: setattr(it, "scale", 10.0), lambda it: delattr(it, "scale"), one_for_another):
        change(module)
        change(same)
        module.last = 0.0
        x, y = next(batches)
        step(engine, model, optimizer, x, y, way)
        same.zero_grad()
        LOSS(same(x.to(DEVICE)), y.to(DEVICE)).backward()
        for got, want in zip(module.parameters(), same.parameters(), strict=True):
            assert torch.allclose(got.grad, want.grad, atol=1e-5)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("options", [{}, {"max_memory": 1}, {"estimator": "exact"}, {"norm_refresh": 2}], ids=str)
def test_buffers_are_written_once_a_step(way: str, options: dict[str, Any]) -> None:
    if way == "auto" and "estimator" in options:
        pytest.skip("one pass serves weight probes alone")
    module = changing()
    engine = trained(*start(module, examples(), way, **options), way)
    assert float(module.calls) == 4
    assert taken(engine) == [1] * 24


@pytest.mark.parametrize("way", WAYS)
def test_a_forward_hook_that_changes_the_output_is_refused(way: str) -> None:
    module = mlp()
    module[1].register_forward_hook(lambda module, inputs, output: 3 * output)
    with pytest.raises(RuntimeError, match="copy of the model|differ"):
        trained(*start(module, examples(), way), way)


def with_batch_norm() -> Any:
    """Frozen and in eval mode it is taken; model.train() after a validation puts it back into training."""
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2))
    module[1].requires_grad_(False).eval()
    return module


def mixing() -> Any:
    def forward(self: Any, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.body(x))
        return torch.as_tensor(self.head(hidden - hidden.mean(dim=0) if self.stage else hidden))

    return Calling(forward, body=nn.Linear(3, 4), head=nn.Linear(4, 2), stage=0)


def root() -> Any:
    """Its derivative is not finite where all inputs are 0."""
    parts = {"body": nn.Linear(3, 4, bias=False), "head": nn.Linear(4, 2)}
    return Calling(lambda self, x: self.head(self.body(x).square().sqrt()), **parts)


REFUSED: dict[str, tuple[Any, Any, str]] = {  # a model, and what happens after the first step
    "batch norm": (with_batch_norm, lambda it: it.train(), "batch normalisation"),
    "mixing": (mixing, lambda it: setattr(it, "stage", 1), "mixes examples|differ"),
    "not finite": (root, lambda _: None, "NaN"),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("what", REFUSED)
def test_what_would_give_wrong_numbers_is_not_released(what: str, way: str) -> None:
    build, change, match = REFUSED[what]
    module, (x, y) = build(), examples()
    if what == "not finite":
        x[8] = 0.0
    engine, model, optimizer, loader = start(module, (x, y), way, lr=0.1)
    batches = iter(loader)
    step(engine, model, optimizer, *next(batches), way)
    before = weights_of(module)
    change(module)
    with pytest.raises((RuntimeError, ValueError), match=match):
        step(engine, model, optimizer, *next(batches), way)
    assert torch.equal(before, weights_of(module))
    assert taken(engine) == [1] * 6 + [0] * 18


@pytest.mark.parametrize(("way", "clear"), [("hooks", True), ("auto", True), ("auto", False)])
def test_a_sum_is_not_released_twice(way: str, clear: bool) -> None:
    """model.zero_grad() does not reach the clipped sums, and a loop may clear nothing at all."""
    alike = torch.ones(24, 3), torch.ones(24, dtype=torch.long)
    engine, model, optimizer, loader = start(mlp(), alike, way, max_grad_norm=0.1, noise_multiplier=1e-6)
    norms = []
    for x, y in loader:
        if clear:
            model.zero_grad()
        LOSS(model(x.to(DEVICE)), y.to(DEVICE)).backward()
        optimizer.step()
        norms.append(float(torch.cat([p.summed_grad.flatten() for p in optimizer.params]).norm()))
    assert norms == pytest.approx(norms[:1] * 4, rel=1e-6)
    assert 0 < norms[0] <= 6 * 0.1 * (1 + 1e-6)
    assert taken(engine) == [1] * 24


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
    batches = iter(loader)
    last = tuple(next(batch for batch in batches if len(batch[1]) > 1))
    next(batch for batch in batches if len(batch[1]) == 0)
    with pytest.raises(RuntimeError, match="0 examples"):
        step(engine, model, optimizer, *last, way)


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
def test_norms_that_could_not_be_refreshed_are_told_at_the_first_step(way: str) -> None:
    """A batch of three tensors: which of them are the model's inputs?"""
    x, y = examples()
    engine, model, optimizer, loader = start(mlp(), (x, torch.arange(24), y), way, norm_refresh=1)
    x, _, y = next(iter(loader))
    with pytest.raises(ValueError, match="norm_refresh"):
        step(engine, model, optimizer, x, y, way)
    assert engine.accountant.history == []


def test_an_operation_without_a_second_derivative_is_named() -> None:
    parts = {"centres": nn.Parameter(torch.randn(5, 3)), "head": nn.Linear(5, 2)}
    far = Calling(lambda self, x: self.head(torch.cdist(x, self.centres).neg().exp()), **parts)
    with pytest.raises(UnsupportedModuleError, match="_cdist_backward"):
        fisher.fim_trace(far, LOSS, *examples(6), max_grad_norm=1.0, noise_multiplier=1.0)


def test_weights_that_a_hook_computes_are_refused_and_the_remedy_works() -> None:
    with pytest.warns(FutureWarning):
        old = nn.Sequential(torch.nn.utils.weight_norm(nn.Linear(3, 2)), nn.Tanh())
    with pytest.raises(UnsupportedModuleError, match="parametrizations"):
        start(old, examples(), "auto")
    start(nn.Sequential(torch.nn.utils.parametrizations.weight_norm(nn.Linear(3, 2)), nn.Tanh()), examples(), "auto")


def test_graphs_with_all_nodes_in_one_tensor_are_refused() -> None:
    def collate(items: list[Any]) -> Any:
        graph = torch.arange(len(items)).repeat_interleave(4)
        return torch.cat([item[0] for item in items]), graph, torch.stack([item[1] for item in items])

    def sums(self: Any, x: Tensor, graph: Tensor) -> Tensor:
        return torch.as_tensor(self.head(torch.zeros(int(graph.max()) + 1, 3).to(x).index_add(0, graph, x)))

    items: Any = [(torch.randn(4, 3), torch.tensor(i)) for i in range(3)]
    options = {"criterion": None, "loading": {"collate_fn": collate}}
    _, model, optimizer, loader = start(Calling(sums, head=nn.Linear(3, 3)), items, "auto", batch=3, **options)
    *inputs, y = (part.to(DEVICE) for part in next(iter(loader)))
    LOSS(model(*inputs), y).backward()
    with pytest.raises(ValueError, match="pad graphs"):
        optimizer.step()
