"""Tasks with models whose weights are sharded over the ranks (FSDP2)."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.utils.data import DataLoader, TensorDataset

from tests.distributed.rank_faults import DRAWS
from tests.distributed.rank_runs import CASES, adapter_case, make, replaying, shard, take_step, whole
from torchfil import FILPrivacyEngine, check


def nobodys_steps(noise_multiplier: float, max_grad_norm: float) -> list[Tensor]:
    """The gradients that two steps release of empty batches, in ranks that are seeded alike: noise alone."""
    torch.manual_seed(1)
    module = shard(nn.Sequential(nn.Linear(64, 64, bias=False)))
    engine = FILPrivacyEngine()
    optimizer: Any = torch.optim.SGD(module.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(torch.randn(40, 64), torch.randn(40, 64)), batch_size=10)
    options: dict[str, Any] = {"noise_multiplier": noise_multiplier, "max_grad_norm": max_grad_norm}
    _, optimizer, loader = engine.make_private(module, optimizer, loader, criterion=nn.MSELoss(), **options)
    gradients = []
    with replaying([[], [], [], []]):
        for x, y in loader:
            engine.train_step(x, y)
            gradients.append(10 * whole(next(module.parameters()).grad))
    return gradients


def bytes_here() -> tuple[int, int, int, int, str]:
    """Of weights and optimizer in all, then on this rank between steps, and the kind of the model's copy's."""
    everything = sum(p.numel() * p.element_size() for p in adapter_case()[0].parameters())
    made = make("adapters", sharded=True, batch_size=5)
    with replaying([[0, 2], [4]] if dist.get_rank() == 0 else [[1], [3]]):
        for x, y in made.loader:
            made.engine.train_step(x, y)
    parts = [p.to_local() for p in made.module.parameters()]  # type: ignore[attr-defined]
    momenta = [state["momentum_buffer"] for state in made.optimizer.original_optimizer.state.values()]
    assert all(isinstance(value, DTensor) for value in momenta)
    copied = {p.untyped_storage().data_ptr(): p for p in made.engine._training.replica.live.parameters()}
    return (
        everything,
        sum(part.numel() * part.element_size() for part in parts),
        sum(value.to_local().numel() for value in momenta),
        sum(p.untyped_storage().nbytes() for p in copied.values()),
        type(made.engine._training.replica.live.encoder.layers[0]).__name__,
    )


def evaluated() -> list[tuple[Tensor, Tensor]]:
    """After every step: what the private model gives in evaluation, and what its whole weights give."""
    made = make("digits", sharded=True, questions={})
    plain, dataset, _ = CASES["digits"]()
    pairs = []
    with replaying(DRAWS[dist.get_rank()]):
        for x, y in made.loader:
            take_step(made, x, y)
            made.model.eval()
            with torch.no_grad():
                given = made.model(dataset.tensors[0])
            made.model.train()
            for own, part in zip(plain.parameters(), made.optimizer.params, strict=True):
                own.data = whole(part)
            pairs.append((given, plain(dataset.tensors[0]).detach()))
    return pairs


def one_rank_refuses(step: str) -> tuple[list[str], list[Tensor], Tensor]:
    """Rank 1's third batch has a NaN; the errors of this rank, and the run after the steps that remain."""
    made = make("digits", sharded=True, questions={})
    errors = []
    with replaying(DRAWS[dist.get_rank()]):
        for place, (x, y) in enumerate(made.loader):
            if place == 2 and dist.get_rank() == 1:
                x = x.clone().fill_(float("nan"))
            try:
                take_step(made, x, y) if step == "loop" else made.engine.train_step(x, y)
            except (RuntimeError, ValueError) as caught:
                errors.append(f"{place} {type(caught).__name__}: {caught}")
    ledger = made.engine.ledger
    assert ledger is not None
    return errors, [whole(p) for p in made.optimizer.params], ledger.sums["participations"]


def penalty() -> str:
    """What a loop is told whose loss has a penalty on the sharded weights."""
    made = make("digits", sharded=True, questions={})
    with replaying(DRAWS[dist.get_rank()]):
        for x, y in made.loader:
            loss = nn.functional.cross_entropy(made.model(x), y)
            (loss + sum(p.square().sum().full_tensor() for p in made.module.parameters())).backward()  # type: ignore
            try:
                made.optimizer.step()
            except RuntimeError as error:
                return str(error)
    return ""


def refused() -> list[str]:
    """What make_private says to ways of sharding that cannot be accounted for."""

    def parallel(module: nn.Module) -> nn.Module:
        return parallelize_module(module, init_device_mesh("cpu", (dist.get_world_size(),)), {"0": ColwiseParallel()})

    def partly(module: nn.Module) -> nn.Module:
        return fully_shard(module, ignored_params={next(module.parameters())})

    def cast(module: nn.Module) -> nn.Module:
        return fully_shard(module, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))

    cases: list[tuple[Any, dict[str, Any]]] = [
        (lambda module: FullyShardedDataParallel(module, device_id=torch.device("cpu")), {}),
        (cast, {}),
        (partly, {}),
        (parallel, {}),
        (fully_shard, {"grad_sample_mode": "hooks"}),
        (fully_shard, {"grad_sample_mode": "ghost_fsdp"}),
        (fully_shard, {"rel_error": 0.1}),
        (lambda module: fully_shard(nn.Sequential(module, nn.BatchNorm1d(2))), {}),
    ]
    errors = []
    for wrap, options in cases:
        module = wrap(nn.Sequential(nn.Linear(4, 2)))
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        loader = DataLoader(TensorDataset(torch.randn(9, 4), torch.randint(2, (9,))), batch_size=4)
        try:
            FILPrivacyEngine().make_private(module, optimizer, loader, **options)
            errors.append("")
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")
    try:
        check(fully_shard(nn.Linear(4, 2)), (torch.randn(9, 4), torch.randint(2, (9,))))
    except ValueError as error:
        errors.append(str(error))
    return errors
