"""What make_private and a step refuse, each as one table: the error's type, one noun of its text.

Nothing changes.
"""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

from tests.cases import DEVICE
from tests.engine.loops import data, loader, make, network, step
from torchfil import Accounting, Execution, FILPrivacyEngine
from torchfil.questions import Absent

NAN = math.nan
ACCOUNTING: list[dict[str, Any]] = [  # the first name is in the text
    *({"rel_error": value} for value in (0.0, 5.0, NAN)),
    *({name: 0} for name in ("num_probes", "epochs", "accumulation_steps", "norm_refresh")),
    *({name: value} for name in ("fil_rate", "sample_rate") for value in (0.0, 1.5, NAN)),
    {"expected_batch_size": 0},
    {"num_probes": 2, "rel_error": 0.1},
    {"fil_rate": 0.5, "rel_error": 0.1},
    {"estimator": "exact", "rel_error": 0.1},
    {"estimator": "magic"},
    {"amplification": "magic"},
    {"track": "spectrum"},
    {"num_probes": 1, "track": ("fim",)},
]


@pytest.mark.parametrize("options", ACCOUNTING, ids=str)
def test_accounting_refuses_at_construction(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        Accounting(**options)


class Mute:
    def factors(self, rho: Tensor, q: float | None, sigma: float) -> tuple[Tensor, Tensor]:
        return rho, rho


def test_other_objects_refuse_at_construction() -> None:
    for wrong, noun in ((3, "factors"), (Mute(), "secret_batches")):
        with pytest.raises(TypeError, match=noun):
            Accounting(amplification=wrong)
    for options in ({"max_memory": 0}, {"probe_precision": "fp8"}):
        with pytest.raises(ValueError, match=next(iter(options))):
            Execution(**options)
    with pytest.raises(ValueError, match="rpd"):
        FILPrivacyEngine(accountant="rpd")


def layers(*parts: nn.Module) -> nn.Module:
    return nn.Sequential(*parts).double().to(DEVICE)


def padded() -> dict[str, Any]:
    module = nn.Sequential(nn.Embedding(5, 4, padding_idx=0), nn.Flatten(), nn.Linear(12, 3)).to(
        DEVICE
    )
    dataset = TensorDataset(torch.randint(5, (40, 3)), torch.randint(3, (40,)))
    return {"dataset": dataset, "module": module, "grad_sample_mode": "hooks"}


WEIGHTED = DataLoader(data(40), 8, sampler=WeightedRandomSampler(torch.rand(40).tolist(), 40))
MAKING: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    **{
        f"noise {s}": ({"noise_multiplier": s}, ValueError, "noise_multiplier")
        for s in (-1.0, NAN, math.inf)
    },
    "threshold": ({"max_grad_norm": -1.0}, ValueError, "max_grad_norm"),
    "adaptive clipping": ({"clipping": "adaptive"}, ValueError, "factors"),
    "one threshold for all layers": ({"clipping": "per_layer"}, ValueError, "list of 4"),
    "a layer without": (
        {"clipping": "per_layer", "max_grad_norm": [1.0, 1.0, 1.0, 0.0]},
        ValueError,
        "positive",
    ),
    "mode": ({"grad_sample_mode": "ghost_fsdp"}, ValueError, "sharded"),
    "clip that exceeds C": ({"clip": "gelu-paper"}, ValueError, "exceed"),
    "unknown clip": ({"clip": "soft"}, ValueError, "registered"),
    "reduction": ({"loss_reduction": "none"}, ValueError, "'mean' or 'sum'"),
    "amplification": (
        {"amplification": "poisson", "poisson_sampling": False},
        ValueError,
        "poisson_sampling",
    ),
    "rate of known batches": (
        {"sample_rate": 0.5, "poisson_sampling": False},
        ValueError,
        "leave one",
    ),
    "no memory": ({"max_ledger_memory": 10}, MemoryError, "Track less"),
    "weighted draws": ({"dataset": WEIGHTED}, ValueError, "same probability"),
    "repeated draws": (
        {"dataset": WEIGHTED, "poisson_sampling": False},
        ValueError,
        "replacement=False",
    ),
    "nobody": (
        {"dataset": DataLoader(TensorDataset(torch.zeros(0, 5), torch.zeros(0)), 4)},
        ValueError,
        "empty",
    ),
    "no batch size": ({"dataset": DataLoader(data(40), batch_size=None)}, ValueError, "batch_size"),
    "batch norm": (
        {"module": layers(nn.Linear(5, 6), nn.BatchNorm1d(6))},
        ValueError,
        "batch normalisation",
    ),
    "eval mode": ({"module": network().eval()}, ValueError, r"model\.train\(\)"),
    "padding": (padded(), ValueError, "padding_idx"),
    "class weights": (
        {"criterion": nn.CrossEntropyLoss(torch.ones(3).double())},
        ValueError,
        "reduction='sum'",
    ),
    "too few ids": ({"id_of": list(range(39))}, ValueError, "39 keys"),
    "one id": ({"id_of": ["x"] * 40}, ValueError, "more than one"),
    "a text for a question": ({"questions": {"member": "absent"}}, TypeError, "Absent"),
    "questions without names": ({"questions": [Absent()]}, TypeError, "name"),
}


@pytest.mark.parametrize("case", MAKING)
def test_make_private_refuses_and_touches_nothing(case: str) -> None:
    options, error, noun = MAKING[case]
    module = options.get("module") or network()
    with pytest.raises(error, match=noun):
        make(**{**options, "module": module})
    assert not hasattr(module, "autograd_grad_sample_hooks")
    assert not any(part._forward_hooks for part in module.modules())


def test_optimizers_of_other_parameters_and_engines_in_use() -> None:
    module, engine = network(), FILPrivacyEngine(accountant="gdp")
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    few = torch.optim.SGD(module[0].parameters(), lr=0.1)
    with pytest.raises(ValueError, match="lacks 2 trainable"):
        engine.make_private(module, few, loader(data(24)))
    module[2] = nn.Linear(6, 3).double().to(DEVICE)
    with pytest.raises(ValueError, match="2 foreign"):
        engine.make_private(module, optimizer, loader(data(24)))
    used, module, model, _, private = make()
    with pytest.raises(ValueError, match="already accounts"):
        used.make_private(network(), optimizer, private)
    for again in (model, module):
        with pytest.raises(ValueError, match="already private"):
            FILPrivacyEngine().make_private(again, optimizer, loader(data(40)))


# ------------------------------------------------------------------ steps


class Run:
    def __init__(self, **options: Any) -> None:
        self.engine, self.module, self.model, self.optimizer, self.private = make(**options)

    def take(self, model: Any = None, batch: Any = None, loss: Any = F.cross_entropy) -> None:
        """A forward and a backward pass over a batch, and a step."""
        step(model or self.model, self.optimizer, batch or next(iter(self.private)), loss)


class Positions(nn.Module):
    """One row for the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.positions, self.out = nn.Embedding(1, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x + self.positions(torch.zeros(1, dtype=torch.long, device=x.device)))


def one_nan() -> DataLoader[Any]:
    x, y = data(8).tensors
    x[3, 1] = NAN
    return DataLoader(TensorDataset(x, y), batch_size=8)


def a_part(run: Run) -> None:
    run.take(batch=[part[1:] for part in next(iter(run.private))])


def shrink(run: Run) -> None:
    run.private.plain_dataset.tensors = data(30).tensors
    next(iter(run.private))


def summed(output: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(output, y, reduction="sum")


def both(outputs: Any, y: Tensor) -> Tensor:
    return (F.cross_entropy(outputs[0], y) + F.cross_entropy(outputs[1], y)) / 2


def twice(run: Run) -> None:
    run.take(model=lambda x: (run.model(x), run.model(x + 0.1 * torch.randn_like(x))), loss=both)


def pieces_that_share_examples(run: Run) -> None:
    """Two physical batches of one logical batch, which one noise covers."""
    batch = next(iter(run.private))
    run.optimizer.signal_skip_step(do_skip=True)
    run.take(batch=batch)
    run.take(batch=batch)


def noise_as_target(run: Run) -> None:
    (x,) = (part.to(DEVICE) for part in next(iter(run.private)))
    noise = torch.randn_like(x)
    F.mse_loss(run.model(x + noise), noise).backward()
    run.optimizer.step()


BARE = TensorDataset(data(16).tensors[0])
FIRST = {"poisson_sampling": False}
STEPS: dict[str, tuple[dict[str, Any], Any, type[Exception], str]] = {
    "eval mode": ({}, lambda run: run.take(run.model.eval()), RuntimeError, r"model\.train\(\)"),
    "the model as passed": ({}, lambda run: run.take(run.module), RuntimeError, "returned model"),
    "a sum for a mean": ({}, lambda run: run.take(loss=summed), ValueError, "loss_reduction='sum'"),
    "two passes": ({}, twice, ValueError, "one module"),
    "an example in two pieces": ({}, pieces_that_share_examples, RuntimeError, "twice"),
    "noise of the loop": (
        {"dataset": BARE, "module": network(5, 5)},
        noise_as_target,
        ValueError,
        r"forward\(\)",
    ),
    "NaN": ({"dataset": one_nan(), **FIRST}, Run.take, ValueError, "1 of 8 rows: 3"),
    "ledger": (
        {"track": ("fim",), "max_ledger_memory": 10_000},
        Run.take,
        MemoryError,
        "max_ledger_memory",
    ),
    "one row": (
        {"module": Positions().double(), "grad_sample_mode": "hooks"},
        Run.take,
        RuntimeError,
        "one row",
    ),
    "elsewhere": (
        {},
        lambda run: run.take(batch=data(8).tensors),
        RuntimeError,
        "loader that make_private",
    ),
    "a part of a batch": ({}, a_part, (RuntimeError, ValueError), "once per batch|disagree"),
    "another length": ({}, shrink, ValueError, "has 30 now"),
}


@pytest.mark.parametrize("case", STEPS)
def test_a_step_that_is_refused_changes_nothing(case: str) -> None:
    options, provoke, error, noun = STEPS[case]
    run = Run(**copy.deepcopy(options))
    before = copy.deepcopy(run.module.state_dict())
    with pytest.raises(error, match=noun):
        provoke(run)
    assert all(torch.equal(value, before[name]) for name, value in run.module.state_dict().items())
    assert run.engine.accountant.history == []
    if case in ("eval mode", "the model as passed"):
        batch = next(iter(run.private))
        run.model.train()
        run.take(batch=batch)
        assert run.engine.leakage(delta=1e-3)["participations"].sum() == len(batch[0])


def test_a_logical_batch_that_was_left_must_be_discarded() -> None:
    """Whose next one a worker has prefetched."""
    engine, module, model, optimizer, private = make(loader(data(60), 12, num_workers=1))
    manager = {"data_loader": private, "max_physical_batch_size": 3, "optimizer": optimizer}

    def train(until: Any = lambda: False) -> list[int]:
        seen: list[int] = []
        with BatchMemoryManager(**manager) as batches:
            for batch in batches:
                step(model, optimizer, batch)
                seen += batch._ids
                if until():
                    break
        return seen

    train(until=lambda: optimizer.inside_logical_batch)
    weights = {k: v.clone() for k, v in module.state_dict().items()}
    with pytest.raises(RuntimeError, match="discard_partial_batch"):
        train()
    assert all(torch.equal(weights[k], v) for k, v in module.state_dict().items())
    assert engine._training.run.history.steps == len(engine.accountant.history) == 0
    optimizer.discard_partial_batch()
    train()
    assert engine._training.run.history.steps == engine.accountant.history[-1][2] == len(private)
    assert (engine.ledger.sums["participations"] <= len(private)).all()
    # at its end, it may be left: prefetched or not
    seen = train(until=lambda: not optimizer.inside_logical_batch)
    assert len(seen) == len(set(seen))
    assert engine._training.run.history.steps == len(private) + 1


def test_reading_needs_a_step_and_lists_of_ids() -> None:
    with pytest.raises(RuntimeError, match="make_private first"):
        FILPrivacyEngine().get_fil()
    run = Run(id_of=[f"person {i}" for i in range(40)])
    with pytest.raises(RuntimeError, match="no private step"):
        run.engine.get_fil()
    assert run.engine.get_individual_epsilon(delta=1e-5).value.tolist() == [0.0] * 40
    run.take()
    with pytest.raises(TypeError, match="for one example"):
        run.engine.get_fil("person 7")
    for read, noun in (
        (run.engine.get_plis, "plis"),
        (lambda: run.engine.get_fil(kind="spectral"), "fim"),
    ):
        with pytest.raises(ValueError, match=noun):
            read()
    with pytest.raises(ValueError, match="delta"):
        run.engine.get_individual_epsilon(delta=0)


def test_a_run_is_neither_copied_nor_pickled() -> None:
    """Copying torch's optimizer changes its class: a copy that failed broke every private optimizer
    of the process.
    """
    assert copy.deepcopy(FILPrivacyEngine()).accountant.history == []  # of no run yet
    run = Run()
    for part in (run.engine, run.optimizer, run.private):
        for take in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(
                TypeError, match=r"^FIL.* cannot be copied or pickled.*save_checkpoint"
            ):
                take(part)
    copy.deepcopy((run.model, run.optimizer.state_dict()))
    for each in (run, Run()):
        each.take()
