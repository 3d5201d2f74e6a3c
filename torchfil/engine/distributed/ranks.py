"""Several processes that train one model (``torchrun``): everything that the engine knows about ``torch.distributed``.

As in Opacus, every process ("rank") has the model in ``DifferentiallyPrivateDistributedDataParallel``, or a part of
each of its weights (``sharded``), draws from a part of the data and clips; rank 0 adds the noise to
its sum, and the sums of all ranks are added. Each example is drawn by one rank, which books what the step reveals about
it, so Fisher information needs no messages. Everything except gradients goes through a separate group (gloo, on the
CPU).
"""

from __future__ import annotations

import datetime
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from opacus.distributed import DifferentiallyPrivateDistributedDataParallel
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from torchfil.engine.distributed.sharded import check_sharded, is_sharded
from torchfil.engine.options import Accounting
from torchfil.utils.noise import derived_seed

__all__ = ["Ranks", "StepNotTakenError", "check_ranks", "part_of_sum", "shared_by"]

_TAKES, _REFUSES, _IS_LOST = 0.0, 1.0, 2.0  # a rank's answers about a step
_PATIENCE = datetime.timedelta(seconds=1)  # seconds after which a waiting rank says so
_BUCKET = 2**24  # numbers that are summed over the ranks at once


class StepNotTakenError(RuntimeError):
    """No rank takes this step, because another rank refused it or the ranks disagree."""


class Ranks:
    """The processes that train one model together, seen from one of them.

    Make it on all of them at the same time (collective).

    Args:
        seed: The seed of the probes; rank 0's counts.
        num_examples: n, which must be the same everywhere.

    Attributes:
        rank: The number of this process.
        size: The number of processes.
        seed: The seed of the probes, the same on all ranks.
        is_lost: Whether a step was refused in the middle of a logical batch, so that the ranks are out of step.
    """

    def __init__(self, seed: int, num_examples: int) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._timeout = _timeout_of_training()
        self._group = dist.new_group(backend="gloo", timeout=self._timeout)
        self._calls = 0  # of the other ranks, the same number on all
        self._saving_group: dist.ProcessGroup | None = None
        self._mesh: DeviceMesh | None = None
        told = self.objects((seed, num_examples))
        self.seed: int = told[0][0]
        sizes = [size for _, size in told]
        if len(set(sizes)) > 1:
            raise ValueError(
                f"the ranks' data sets have {sizes} examples: give every rank the whole data set; each rank then draws "
                "from its own part"
            )
        self.is_lost = False

    # ------------------------------------------------------------------ random numbers

    def probe_generator(self) -> torch.Generator:
        """The source of this rank's probes: it differs between ranks; rank 0 has that of a single process."""
        seed = derived_seed(self.seed, "probes", self.rank) if self.rank else self.seed
        return torch.Generator().manual_seed(seed)

    def common_generator(self, purpose: str, number: int = 0) -> torch.Generator:
        """A generator with the same numbers on all ranks, for each purpose and number."""
        return torch.Generator().manual_seed(derived_seed(self.seed, purpose, number))

    # ------------------------------------------------------------------ a step

    def check_together(self) -> None:
        """Raise if the ranks are no longer in the same logical batch."""
        if self.is_lost:
            raise StepNotTakenError(
                "a step was refused in the middle of a logical batch, so the ranks are no longer at the same one: "
                "resume from the last checkpoint. This step was not taken."
            )

    def agree(self, facts: Mapping[str, float | None]) -> None:
        """Continue only if all ranks take the step, under the same facts; nothing has been released yet (collective).

        Args:
            facts: By name, what must be the same on all ranks; None: this rank does not know it yet.

        Raises:
            StepNotTakenError: Another rank refuses the step, or the ranks' facts differ.
        """
        told = self._told(_TAKES, facts)
        if told[0] > _TAKES:
            raise StepNotTakenError("another rank refused this step (its own error says why), so no rank has taken it")
        for name, high, low in zip(facts, told[1::2], told[2::2], strict=True):
            if high != -low and high > -torch.inf:
                raise StepNotTakenError(
                    f"the ranks disagree on {name}: between {-low:g} and {high:g}. Do the same on every rank (step "
                    "schedulers, load the same checkpoint). This step was not taken."
                )

    def refuse(self, facts: Mapping[str, float | None], *, inside: bool) -> None:
        """Tell the other ranks, which wait in :meth:`agree`, that this rank refuses the step (collective).

        Args:
            facts: As passed to :meth:`agree`.
            inside: Whether the step was refused in the middle of a logical batch: its other parts would then meet the
                other ranks' next batch, so no further step is taken.
        """
        self._told(_IS_LOST if inside else _REFUSES, facts)

    def _told(self, answer: float, facts: Mapping[str, float | None]) -> list[float]:
        """The largest answer of all ranks, and the largest f and −f of each fact."""
        ends = [(-torch.inf, -torch.inf) if value is None else (value, -value) for value in facts.values()]
        told = torch.tensor([answer, *(end for pair in ends for end in pair)], dtype=torch.float64)
        work = dist.all_reduce(told, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        self._wait_for_all(work, facts.get("the number of steps"))
        self.is_lost = bool(told[0] == _IS_LOST)
        return told.tolist()

    def _wait_for_all(self, work: Any, steps: float | None) -> None:
        """Wait for the other ranks; a rank that waits long says so, so that missing ranks can be named.

        Raises:
            StepNotTakenError: A rank did not arrive in time, or has ended.
        """
        self._calls += 1
        begun = time.monotonic()
        try:
            try:
                work.wait(min(_PATIENCE, self._timeout / 4))
            except RuntimeError:
                if work.is_completed():
                    raise
                self._store.set(self._mark(self.rank), "waits")
                work.wait()
        except RuntimeError as error:
            waited = time.monotonic() - begun
            in_time = waited < self._timeout.total_seconds()  # a connection has ended; torch does not say whose
            missing = [] if in_time else [str(k) for k in range(self.size) if not self._store.check([self._mark(k)])]
            who = f"rank {', '.join(missing)} (of {self.size})" if missing else "another rank"
            step = "this step" if steps is None else f"step {int(steps) + 1}"
            raise StepNotTakenError(
                f"{who} did not reach the end of {step}, for which rank {self.rank} has waited {waited:.0f} s: it "
                f"hangs, is slow, or has ended ({str(error).rpartition('] ')[2]}). Its own output shows why. No rank "
                "has taken this step: restart all of them from the last checkpoint. If a rank is slow, let the others "
                "wait longer: init_process_group(timeout=…)."
            ) from error

    @property
    def _store(self) -> Any:
        """The store that each rank can read and write on its own."""
        return dist.distributed_c10d._get_default_store()

    def _mark(self, rank: int) -> str:
        """The key under which a rank says that it waits."""
        return f"torchfil/{self._group.group_name}/{self._calls}/{rank}"

    def add_up(self, gradients: Sequence[Tensor], *, mean: bool) -> None:
        """Replace the gradients by their sum over all ranks, or its mean, as Opacus does (collective)."""
        for bucket in _buckets(gradients):
            flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
            dist.all_reduce(flat)
            if mean:
                flat /= self.size
            for gradient, part in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
                gradient.copy_(part.view_as(gradient))

    # ------------------------------------------------------------------ bringing parts together; on the CPU, collective

    def meet(self) -> None:
        """Wait until all ranks arrive.

        Raises:
            RuntimeError: Some did not arrive.
        """
        try:
            dist.monitored_barrier(group=self._group, wait_all_ranks=True)
        except RuntimeError as error:
            raise RuntimeError(
                f"not all ranks came ({error}). Reading a run of several ranks, its state and checkpoints collects "
                "what each has recorded: call it on all ranks, or engine.gather() on all and then read on one."
            ) from error

    def own(self, values: Sequence[Any]) -> Any:
        """This rank's value, if there is one for each rank; None for another number of values."""
        return values[self.rank] if len(values) == self.size else None

    def objects(self, value: Any) -> list[Any]:
        """The ranks' values, in order; plain numbers and texts only."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self._group)
        return values

    def sum(self, value: Tensor) -> Tensor:
        """Σ over the ranks."""
        return self._reduced(value, dist.ReduceOp.SUM)

    def maximum(self, value: Tensor) -> Tensor:
        """The largest over the ranks."""
        return self._reduced(value, dist.ReduceOp.MAX)

    def each(self, value: Tensor) -> list[Tensor]:
        """The ranks' tensors of one shape, in order."""
        value = value.cpu().contiguous()
        values = [torch.empty_like(value) for _ in range(self.size)]
        dist.all_gather(values, value, group=self._group)
        return values

    def joined(self, value: Tensor) -> Tensor:
        """The rows of all ranks' tensors, whose numbers of rows may differ."""
        lengths = self.objects(len(value))
        padded = torch.zeros(max(lengths), *value.shape[1:], dtype=value.dtype)
        padded[: len(value)] = value.cpu()
        return torch.cat([part[:length] for part, length in zip(self.each(padded), lengths, strict=True)])

    def dealt(self, value: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        """For each rank, its rows of this rank's block; rank r's block has ``sizes[r]`` rows, [sizes[rank], …] each."""
        own = sizes[self.rank]
        received = torch.empty(self.size * own, *value.shape[1:], dtype=value.dtype)
        dist.all_to_all_single(
            received, value.detach().cpu().contiguous(), [own] * self.size, list(sizes), group=self._group
        )
        return list(received.split([own] * self.size))

    def as_blocks(self, block: Tensor, num_rows: int) -> DTensor:
        """Tensors [block, …] of all ranks as one tensor [num_rows, …]; each rank holds its block."""
        if self._mesh is None:
            self._mesh = DeviceMesh.from_group(self._group, "cpu")
        shape = torch.Size([num_rows, *block.shape[1:]])
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(block, self._mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)

    @property
    def saving_group(self) -> dist.ProcessGroup:
        """The group for checkpoints, which may be written while steps are taken."""
        if self._saving_group is None:
            self._saving_group = dist.new_group(backend="gloo")
        return self._saving_group

    def _reduced(self, value: Tensor, operation: Any) -> Tensor:
        value = value.detach().to("cpu", copy=True).contiguous()
        dist.all_reduce(value, op=operation, group=self._group)
        return value


def _timeout_of_training() -> datetime.timedelta:
    """How long the ranks wait for each other in the training's group."""
    group: Any = dist.group.WORLD
    timeouts = [group._get_backend(device).options._timeout for device in group._device_types]
    return max(timeouts, default=datetime.timedelta(minutes=30))


def part_of_sum(summed: Tensor, like: DTensor) -> Tensor:
    """This rank's part of Σ over the ranks (collective).

    Args:
        summed: This rank's term, whole.
        like: A weight of that shape, with the sharding of the result.
    """
    terms = DTensor.from_local(summed, like.device_mesh, [Partial()] * like.device_mesh.ndim, run_check=False)
    return terms.redistribute(placements=like.placements)


def shared_by(size: int, module: nn.Module) -> nn.Module:
    """The module for several processes, with rank 0's weights; unchanged for a single process (collective)."""
    return module if size == 1 else DifferentiallyPrivateDistributedDataParallel(module)


def check_ranks(
    module: nn.Module, data_loader: DataLoader[Any], poisson_sampling: bool, accounting: Accounting
) -> tuple[nn.Module, bool]:
    """The user's module, without the wrapper for several processes, and whether several train it together.

    The wrapper only synchronises the weights of all ranks when it is made. Without it, names in state dicts and in
    ``Private(submodule=…)`` are the same for any number of ranks.

    Args:
        module: The model.
        data_loader: The user's loader.
        poisson_sampling: Whether batches are drawn by Poisson sampling.
        accounting: How to account.

    Raises:
        ValueError: A way to train by several processes that cannot be accounted for.
    """
    if isinstance(module, nn.parallel.DistributedDataParallel):
        raise ValueError(
            "torch's DistributedDataParallel averages gradients before they are clipped by example. Wrap the model as "
            "for Opacus: opacus.distributed.DifferentiallyPrivateDistributedDataParallel(model)."
        )
    together = isinstance(module, DifferentiallyPrivateDistributedDataParallel)
    if isinstance(module, DifferentiallyPrivateDistributedDataParallel):
        module = module.get_submodule("module")
    if is_sharded(module):
        check_sharded(module, dist.get_world_size())
    elif not together:
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            warnings.warn(
                f"{dist.get_world_size()} processes run, and each trains its own model on all of the data. To train "
                "one model together: opacus.distributed.DifferentiallyPrivateDistributedDataParallel(model).",
                stacklevel=3,
            )
        return module, False

    # a rank cannot decide by all examples: it knows only those that it drew
    if accounting.rel_error is not None:
        raise ValueError(
            f"rel_error={accounting.rel_error} chooses probes and steps by what all examples have leaked so far, but "
            "each rank knows only a part of that; with several processes set num_probes= and fil_rate= instead"
        )
    if not poisson_sampling and not isinstance(data_loader.dataset, IterableDataset):  # a stream's ids are compared
        _check_shards(data_loader)
    return module, True


def _check_shards(data_loader: DataLoader[Any]) -> None:
    """Raise unless every example is drawn by one rank, as far as the sampler shows."""
    sampler = getattr(data_loader.batch_sampler, "sampler", None)
    if not isinstance(sampler, DistributedSampler):
        raise ValueError(
            f"without Poisson sampling each of {dist.get_world_size()} processes would draw from all of the data, and "
            "an example's gradient could count several times under one draw of noise. Give the DataLoader a "
            "torch.utils.data.DistributedSampler(dataset, drop_last=True), or use Poisson sampling."
        )
    if (sampler.num_replicas, sampler.rank) != (dist.get_world_size(), dist.get_rank()):
        raise ValueError(
            f"the DistributedSampler is for rank {sampler.rank} of {sampler.num_replicas}, and this is rank "
            f"{dist.get_rank()} of {dist.get_world_size()}; leave out num_replicas= and rank="
        )
    if not sampler.drop_last and len(data_loader.dataset) % sampler.num_replicas:  # type: ignore[arg-type]
        raise ValueError(
            "the DistributedSampler repeats examples to give all ranks the same number, and a repeated one can count "
            "twice under one draw of noise; build it with drop_last=True, or use Poisson sampling"
        )


def _buckets(gradients: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """The tensors grouped by kind, to be sent together."""
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for gradient in gradients:
        bucket = kinds.setdefault((gradient.dtype, gradient.device), [])
        bucket.append(gradient)
        if sum(part.numel() for part in bucket) >= _BUCKET:
            yield kinds.pop((gradient.dtype, gradient.device))
    yield from kinds.values()
