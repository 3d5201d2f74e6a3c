"""grad_sample_mode="auto" against hooks in the same loop: the same weights, the same ledger, the same ε."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from benchmarks import zoo
from tests.cases import DEVICE, grouped, relative_error
from tests.engine.loops import SIGMA, C, assert_same_run, data, loader, network, tokens, train
from torchfil import FILPrivacyEngine

MODES = ("hooks", "auto")


def compare(
    dataset: Any, module: nn.Module, tolerance: float = 1e-8, steps: int = 8, **options: Any
) -> FILPrivacyEngine:
    """Both modes: more than an epoch of five steps, and what differs shows in the first."""
    runs = []
    for mode in MODES:
        private = copy.deepcopy(module)
        runs.append((train(dataset, module=private, steps=steps, grad_sample_mode=mode, **options), private))
    (hooks, hooks_module), (one, one_module) = runs
    assert_same_run((one.engine, one_module), (hooks.engine, hooks_module), tolerance)
    assert all(p.grad_sample is None for p in one_module.parameters() if p.requires_grad)
    return one.engine


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"track": ("diagonal", "plis"), "num_probes": 2},
        {"track": ("sketch", "fim"), "num_probes": 2},
        {"estimator": "exact"},
        {"estimator": "input-probes"},
        {"poisson_sampling": False},
        {"criterion": nn.CrossEntropyLoss()},
        {"fil_rate": 0.5},
        {"rel_error": 0.2, "epochs": 4, "steps": 20},
        {"max_memory": 1},
        {"clip": "hard", "num_probes": 1},
        {"physical": 3},
        {"loss_reduction": "sum", "loss_fn": nn.CrossEntropyLoss(reduction="sum")},
        {"workers": 2, "steps": 4},
    ],
    ids=str,
)
def test_the_same_run_with(options: dict[str, Any]) -> None:
    compare(data(40), network(), **options)


def test_empty_batches() -> None:
    engine = compare(data(12), network(), batch_size=1, steps=20)
    assert engine.ledger is not None
    assert engine.ledger.steps == 20


@pytest.mark.parametrize("name", ["mnist_cnn", "vit_tiny"])
def test_networks(name: str) -> None:
    torch.manual_seed(0)
    size = 28 if name == "mnist_cnn" else 8
    module = zoo.mnist_cnn(3) if name == "mnist_cnn" else zoo.vit_tiny(3, 1, 8, width=8, depth=1, heads=2)
    dataset = TensorDataset(torch.rand(12, 1, size, size, dtype=torch.float64), torch.randint(3, (12,)))
    compare(dataset, module.double(), steps=3, batch_size=4, num_probes=2)


def test_tokens_and_frozen_layers() -> None:
    module, dataset, private = tokens()
    compare(dataset, module, steps=3, batch_size=4, private=private)
    frozen = network()
    frozen[0].weight.requires_grad_(False)
    compare(data(24), frozen, steps=4)


def make(module: nn.Module | None = None, **options: Any) -> Any:
    module = module if module is not None else network()
    engine = FILPrivacyEngine()
    optimizer: Any = torch.optim.SGD(module.parameters(), lr=0.3)
    given = {"noise_multiplier": SIGMA, "max_grad_norm": C, "grad_sample_mode": "auto", "seed": 3, **options}
    return engine, module, *engine.make_private(module, optimizer, loader(data(40)), **grouped(**given))


def forward(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0].to(DEVICE)), batch[1].to(DEVICE))


def test_accumulated_passes_without_poisson_sampling() -> None:
    """Two backward passes before a step, each with its own mean, as Opacus counts them."""
    results = []
    for mode in MODES:
        torch.manual_seed(1)
        engine, module, model, optimizer, private = make(
            grad_sample_mode=mode, poisson_sampling=False, noise_generator=torch.Generator(DEVICE).manual_seed(2)
        )
        for number, batch in enumerate(private, start=1):
            forward(model, batch).backward()
            if number % 2 == 0:
                optimizer.step()
                optimizer.zero_grad()
        weights = torch.cat([p.detach().flatten() for p in module.parameters()])
        results.append((weights, engine.get_fil().value, torch.tensor(engine.get_epsilon(1e-5))))
    for one, other in zip(*results, strict=True):
        assert relative_error(other, one) < 1e-8


def test_several_outputs() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = network(), nn.Linear(3, 3).double().to(DEVICE)

        def forward(self, x: Tensor) -> dict[str, Any]:
            hidden = self.body(x).tanh()
            return {
                "logits": self.head(hidden),
                "count": torch.arange(len(x)),
                "name": None,
                "size": 3,
                "hidden": hidden * 1,
            }

    def loss(outputs: Any, y: Tensor) -> Tensor:
        return F.cross_entropy(2 * outputs["logits"], y) + outputs["hidden"].square().mean(dim=1).mean()

    torch.manual_seed(0)
    compare(data(24), Two(), steps=3, loss_fn=loss, criterion=loss)


def test_outputs_may_be_changed_in_place() -> None:
    results = []
    for change in (Tensor.mul, Tensor.mul_):
        noise = torch.Generator(device=DEVICE).manual_seed(2)
        doubled = make(criterion=lambda outputs, y: F.cross_entropy(2 * outputs, y), noise_generator=noise)
        engine, module, model, optimizer, private = doubled
        x, y = (part.to(DEVICE) for part in next(iter(private)))
        attempt(model, optimizer, F.cross_entropy(change(model(x), 2), y))
        results.append((torch.cat([p.detach().flatten() for p in module.parameters()]), engine.get_fil().value))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def test_evaluation_is_as_before() -> None:
    _, module, model, _, private = make()
    x = next(iter(private))[0].to(DEVICE)
    model.eval()
    inputs = x.clone().requires_grad_()
    model(inputs).sum().backward()
    assert inputs.grad is not None
    model.train()
    with torch.no_grad():
        assert torch.equal(model(x), module(x))
    assert set(model.state_dict()) == {f"_module.{name}" for name in module.state_dict()}


def attempt(model: Any, optimizer: Any, loss: Tensor) -> None:
    loss.backward()
    optimizer.step()


def test_refusals_change_nothing() -> None:
    """Each is told; then the same batch goes on as if nothing had happened."""
    results = []
    for refused in (False, True):
        torch.manual_seed(1)
        engine, module, model, optimizer, private = make(noise_generator=torch.Generator(DEVICE).manual_seed(2))
        for number, batch in enumerate(private):
            if refused and number == 2:
                with pytest.raises(RuntimeError, match=r"it reached 0.weight directly"):
                    attempt(model, optimizer, forward(model, batch) + module[0].weight.square().sum())
                optimizer.zero_grad()
                smoothed = F.cross_entropy(model(batch[0].to(DEVICE)), batch[1].to(DEVICE), label_smoothing=0.1)
                with pytest.raises((ValueError, RuntimeError), match="loss"):
                    attempt(model, optimizer, smoothed)
                optimizer.zero_grad()
                with pytest.raises(RuntimeError, match="without a backward pass"):
                    optimizer.step()
                with pytest.raises(ValueError, match="requires a gradient"):
                    model(batch[0].to(DEVICE).clone().requires_grad_())
                forward(model, batch).backward()
                with pytest.raises(ValueError, match="called several times on one batch"):
                    attempt(model, optimizer, forward(model, batch))
                model.zero_grad()
            optimizer.zero_grad()
            attempt(model, optimizer, forward(model, batch))
        weights = torch.cat([p.detach().flatten() for p in module.parameters()])
        results.append((weights, engine.get_fil().value))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


class Behind(nn.Module):
    """Uses a child's weight without calling the child, in an operation of which nothing is known."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tensordot(x, self.layer.weight, dims=([1], [1])) + self.layer.bias


def test_what_the_recorded_pass_does_not_fit_is_mapped_over_examples(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    module = Behind().double()
    called = nn.Sequential(copy.deepcopy(module.layer))
    mapped = train(data(40), module=module, grad_sample_mode="auto", steps=6)
    hooks = train(data(40), module=called, grad_sample_mode="hooks", steps=6)
    assert_same_run((mapped.engine, module), (hooks.engine, called), 1e-8)
    told = [record.getMessage() for record in caplog.records if "mapped over examples" in record.getMessage()]
    assert len(told) == 1, "said once"


def test_a_model_that_is_not_wrapped_has_hooks() -> None:
    _, module, hooks, _, _ = make(wrap_model=False)
    assert hooks is not module
    assert hasattr(module, "autograd_grad_sample_hooks")


def test_pausing_and_train_step_and_detaching() -> None:
    engine, module, model, optimizer, private = make(criterion=nn.CrossEntropyLoss())
    batches = iter(private)
    batch = next(batches)
    with pytest.warns(UserWarning, match="paused"), engine.paused():
        attempt(model, optimizer, forward(model, batch))
    assert engine.ledger is not None
    assert engine.ledger.missed_steps == 1
    batch = next(batches)
    engine.train_step(*batch)
    engine.detach()
    output = model(batch[0].to(DEVICE))
    output.sum().backward()
    assert all(p.grad is not None for p in module.parameters())
    assert model.to_standard_module() is module
    assert not any(hasattr(p, "grad_sample") for p in module.parameters())


def start(seed: int) -> Any:
    torch.manual_seed(seed)
    noise = torch.Generator(device=DEVICE).manual_seed(8)
    engine, _, model, optimizer, private = make(rel_error=0.2, noise_generator=noise)
    return engine, model, optimizer, private


def epochs(model: Any, optimizer: Any, private: Any, count: int) -> None:
    for _ in range(count):
        for batch in private:
            optimizer.zero_grad()
            attempt(model, optimizer, forward(model, batch))


def test_a_stopped_run_goes_on_bit_for_bit(tmp_path: Path) -> None:
    whole, *loop = start(0)
    epochs(*loop, 3)
    first, model, optimizer, private = start(0)
    epochs(model, optimizer, private, 1)
    first.save_checkpoint(path=tmp_path / "run.pt", module=model, optimizer=optimizer)
    second, model, optimizer, private = start(99)
    second.load_checkpoint(path=tmp_path / "run.pt", module=model, optimizer=optimizer)
    epochs(model, optimizer, private, 2)
    assert torch.equal(second.get_fil().value, whole.get_fil().value)
    for one, other in zip(model.parameters(), loop[0].parameters(), strict=True):
        assert torch.equal(one, other)
