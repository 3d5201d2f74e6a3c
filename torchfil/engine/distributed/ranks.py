"""Several processes that train one model (``torchrun``): everything that the engine knows about
``torch.distributed``.

As in Opacus, every process ("rank") has the model in
``DifferentiallyPrivateDistributedDataParallel``, or a part of each of its weights, draws from a
part of the data and clips; rank 0 adds the noise to its sum, and the sums of all ranks are added.
Each example is drawn by one rank, which books what the step reveals about it, so Fisher information
needs no messages. Everything except gradients goes through a separate group (gloo, on the CPU).

The state of such a run is one for all ranks, from which any number of them can resume
(:class:`Whole`). It holds the sums of all ranks, and which rank booked each example. The same
number of ranks therefore resumes with the same rows, bit for bit if each draws from its own part of
the data. With another number of ranks, rank 0 takes all rows; sums over ranks are the same.

Models whose weights are sharded over the ranks (FSDP2, ``fully_shard``): each rank keeps its part
of every weight, of its gradient and of the optimizer's state. Fisher information needs two backward
passes through all layers, but FSDP's hooks free a layer's weights after the first one. So all
passes of the engine run on a copy of the model without FSDP, whose weights are gathered when a step
begins and freed when it ends. Sums of clipped gradients are added over the ranks, and each rank
keeps its part.
"""

from __future__ import annotations

import contextlib
import copy
import datetime
import time
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from opacus.distributed import DifferentiallyPrivateDistributedDataParallel
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from torchfil.accounting.ledger import Ledger
from torchfil.accounting.sums import compared
from torchfil.engine.replica import Replica, is_plain

_HOOKS = [name for name in vars(nn.Module()) if name.endswith("_hooks")]
_OF_FSDP = ("__composable_api_state_key", "_is_fsdp_managed_module", "_fsdp_use_orig_params")


def is_sharded(module: nn.Module) -> bool:
    """Whether weights of the module are split over several ranks.

    Example:
        >>> is_sharded(nn.Linear(2, 1))
        False
    """
    parts = (*module.modules(), *module.parameters())
    return any(isinstance(part, FSDPModule | FullyShardedDataParallel | DTensor) for part in parts)


def check_sharded(module: nn.Module, num_ranks: int) -> None:
    """Raise for ways to shard a model in which a step would differ from the accounting.

    Args:
        module: A model for which :func:`is_sharded` is True.
        num_ranks: The number of processes; each draws its own examples.
    """
    remedy = "Use FSDP2: torch.distributed.fsdp.fully_shard for each block, then for the model."
    if any(isinstance(part, FullyShardedDataParallel) for part in module.modules()):
        raise ValueError(
            f"FullyShardedDataParallel (FSDP1) flattens the weights of several layers. {remedy}"
        )
    if not any(_fsdp_modules(module)):
        raise ValueError(
            f"the weights are sharded, but not by FSDP: each rank draws its own examples. {remedy}"
        )

    # what FSDP's hooks do to weights and inputs, the accounting's own passes do not
    for part in _fsdp_modules(module):
        policy = part._get_fsdp_state()._mp_policy
        casts = (
            f"mp_policy={policy} casts inside FSDP's hooks, which the accounting's passes do "
            "not run"
        )
        remedy = "Leave it out and call the model under torch.autocast(dtype=torch.bfloat16)."
        if not (policy.param_dtype is None and policy.output_dtype is None):
            raise ValueError(f"{casts}. {remedy}")
        part.reshard()  # a pass without a gradient leaves the outermost weights gathered

    # each rank's gradients must reach every rank's shard once
    for name, value in module.named_parameters():
        fits = not value.requires_grad  # a frozen weight is the same on all ranks
        if isinstance(value, DTensor):
            *outer, last = value.placements
            replicated = all(isinstance(placement, Replicate) for placement in outer)
            fits = (
                value.device_mesh.size() == num_ranks
                and replicated
                and isinstance(last, Shard | Replicate)
            )
        remedy = (
            "call fully_shard on the whole model after its blocks, without ignored_params=, "
            "with a mesh of all"
        )
        if not fits:
            raise ValueError(
                f"{name} is trained but not sharded over all {num_ranks} ranks, each of which "
                f"draws its own examples: {remedy} ranks in which all dimensions except the last "
                "replicate"
            )


def _fsdp_modules(module: nn.Module) -> Iterator[Any]:
    yield from (part for part in module.modules() if isinstance(part, FSDPModule))


def without_shards(module: nn.Module) -> nn.Module:
    """The module itself; for a sharded one, a copy of its structure without FSDP, whose weights are
    still missing.

    The copy has the modules' own classes and the user's hooks, and shares buffers and weights that
    are not sharded. A sharded weight is a parameter of the whole shape that holds NaN and takes no
    memory.

    Args:
        module: Any module; a sharded one has its weights in parts.
    """
    if not is_sharded(module):
        return module
    memo: dict[int, Any] = {id(value): value for value in (*module.parameters(), *module.buffers())}
    for value in module.parameters():
        if isinstance(value, DTensor):
            memo[id(value)] = nn.Parameter(_nothing(value), value.requires_grad)
    parts = list(module.modules())
    for part in parts:
        kind = type(part)
        if issubclass(kind, FSDPModule):  # a class made by FSDP, with the user's class as a base
            kind = kind.__mro__[getattr(kind, "_orig_cls_mro_index", 2)]
        memo[id(part)] = object.__new__(kind)

    # all modules are in the memo, so that attributes that refer to a module refer to its copy
    for part in parts:
        own = {
            name: copy.deepcopy(value, memo)
            for name, value in vars(part).items()
            if name not in (*_HOOKS, "_buffers") and not name.startswith(_OF_FSDP)
        }
        own |= {name: OrderedDict(_own_hooks(vars(part)[name], name)) for name in _HOOKS}
        vars(memo[id(part)]).update(own, _buffers=part._buffers)
    whole: nn.Module = memo[id(module)]
    return whole


def _own_hooks(hooks: dict[int, Any], name: str) -> Iterator[tuple[int, Any]]:
    """The hooks of calls that FSDP did not register; none of state dicts."""
    for key, hook in hooks.items():
        if "state_dict" not in name and not (getattr(hook, "__module__", None) or "").startswith(
            "torch.distributed."
        ):
            yield key, hook


def _nothing(value: Tensor) -> Tensor:
    """NaN in the shape of a tensor, without using its memory."""
    return torch.full((), float("nan"), dtype=value.dtype, device=value.device).expand(value.shape)


def part_like(whole: object, like: object) -> Any:
    """This rank's part of a tensor that is the same on all ranks.

    Anything else, and without sharding, all of it.

    Args:
        whole: The tensor.
        like: A DTensor of its shape, with the sharding of the result.
    """
    if not isinstance(like, DTensor) or not isinstance(whole, Tensor) or like.shape != whole.shape:
        return whole
    return distribute_tensor(
        whole.to(like.device), like.device_mesh, like.placements, src_data_rank=None
    )


class ShardedReplica(Replica):
    """A :class:`Replica` of a sharded module; ``live`` is the copy without FSDP, which has weights
    during a step.

    Args:
        module: The user's module.
        whole: :func:`without_shards` of it, which may take several rows of an example.
    """

    def __init__(self, module: nn.Module, whole: nn.Module) -> None:
        super().__init__(whole)
        self._sharded = module
        self._weights_here = False
        self._twins = list(zip(module.modules(), whole.modules(), strict=True))
        weights = zip(module.parameters(), whole.parameters(), strict=True)
        self._shards = [(part, own) for part, own in weights if isinstance(part, DTensor)]

    def gather(self) -> bool:
        """Gather all weights, and bring the modules up to date with the user's (collective unless
        already done).
        """
        for module, copied in self._twins:
            for name, value in vars(module).items():
                if is_plain(value) and not name.startswith(_OF_FSDP):
                    vars(copied)[name] = value
        if self._weights_here:
            return False
        self._reshard()
        with torch.no_grad():
            for part, own in self._shards:
                own.data = part.full_tensor()
                own.requires_grad_(part.requires_grad)
        self._weights_here = True
        return True

    def free_weights(self) -> None:
        """Free the weights; each rank keeps its part."""
        for part, own in self._shards:
            own.data, own.grad = _nothing(part), None
        self._weights_here = False
        self._reshard()

    def _reshard(self) -> None:
        """Free what FSDP has gathered for passes without a gradient.

        It would miss the update of these weights.
        """
        for part in _fsdp_modules(self._sharded):
            part.reshard()


# after which a rank that waits for others says that it is here
_PATIENCE = datetime.timedelta(seconds=1)
_TAKES, _REFUSES, _IS_LOST = 0.0, 1.0, 2.0  # a rank's answers about a step


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
        is_lost: Whether a step was refused in the middle of a logical batch, so that the ranks are
            out of step.
    """

    def __init__(self, seed: int, num_examples: int) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        world: Any = dist.group.WORLD
        timeouts = [world._get_backend(device).options._timeout for device in world._device_types]
        # with the timeout of training
        self._group = dist.new_group(
            backend="gloo", timeout=max(timeouts, default=datetime.timedelta(minutes=30))
        )
        seeds, sizes = zip(*self.objects((seed, num_examples)), strict=True)
        self.seed: int = seeds[0]
        if len(set(sizes)) != 1:
            raise ValueError(
                f"the ranks' data sets have {list(sizes)} examples: give every rank all of it; "
                "each draws from a part"
            )
        self.is_lost, self._votes = False, 0

    # ------------------------------------------------------------------ a step

    def check_together(self) -> None:
        """Raise if the ranks are no longer in the same logical batch."""
        if self.is_lost:
            raise StepNotTakenError(
                "a step was refused in the middle of a logical batch, so the ranks are no longer "
                "at the same one: resume from the last checkpoint. This step was not taken."
            )

    def agree(self, facts: Mapping[str, float | None]) -> None:
        """Continue only if all ranks take the step, under the same facts.

        Nothing has been released yet (collective).

        Args:
            facts: By name, what must be the same on all ranks; None: this rank does not know it
                yet.

        Raises:
            StepNotTakenError: Another rank refuses the step, or the ranks' facts differ.
        """
        answer, *ends = self._reduce_votes(_TAKES, facts)
        if answer > _TAKES:
            raise StepNotTakenError(
                "another rank refused this step (its own error says why), so no rank has taken it"
            )
        for name, high, low in zip(facts, ends[::2], ends[1::2], strict=True):
            if high != -low and high > -torch.inf:
                raise StepNotTakenError(
                    f"the ranks disagree on {name}: between {-low:g} and {high:g}. Step "
                    "schedulers and load checkpoints on every rank. This step was not taken."
                )

    def refuse(self, facts: Mapping[str, float | None], *, inside: bool) -> None:
        """Tell the other ranks, which wait in :meth:`agree`, that this rank refuses the step
        (collective).

        Args:
            facts: As passed to :meth:`agree`.
            inside: Whether the step was refused in the middle of a logical batch: its other parts
                would then meet the other ranks' next batch, so no further step is taken.
        """
        self._reduce_votes(_IS_LOST if inside else _REFUSES, facts)

    def _reduce_votes(self, answer: float, facts: Mapping[str, float | None]) -> list[float]:
        """The largest answer of all ranks, and the largest f and −f of each fact.

        Raises:
            StepNotTakenError: A rank did not arrive in time, or has ended.
        """
        ends = [
            (-torch.inf, -torch.inf) if value is None else (value, -value)
            for value in facts.values()
        ]
        votes = torch.tensor([answer, *(end for pair in ends for end in pair)], dtype=torch.float64)
        store, self._votes = dist.distributed_c10d._get_default_store(), self._votes + 1
        marks = [
            f"torchfil/{self._group.group_name}/{self._votes}/{rank}" for rank in range(self.size)
        ]
        try:
            work = dist.all_reduce(votes, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
            try:
                work.wait(_PATIENCE)
            except RuntimeError:  # from now on, the others can see that this rank is here
                store.set(marks[self.rank], "")
                work.wait()
        except RuntimeError as error:
            who = "another rank"
            with contextlib.suppress(RuntimeError):  # the store may have ended with its rank
                time.sleep(1)  # if a connection ended, the others are about to see it
                absent = [
                    f"rank {rank}" for rank, mark in enumerate(marks) if not store.check([mark])
                ]
                who = " and ".join(absent) or who
            step, reason = (
                int(facts["the number of steps"] or 0) + 1,
                str(error).rpartition("] ")[2],
            )
            raise StepNotTakenError(
                f"{who} did not reach the end of step {step}, which no rank has taken ({reason}): "
                "restart all from the last checkpoint, or wait longer: "
                "init_process_group(timeout=…)"
            ) from error
        self.is_lost = bool(votes[0] == _IS_LOST)
        return votes.tolist()

    def add_up(self, gradients: Sequence[Tensor], *, mean: bool) -> None:
        """Replace the gradients by their sum over all ranks, or its mean, as Opacus does
        (collective).
        """
        messages = [dist.all_reduce(gradient, async_op=True) for gradient in gradients]
        for gradient, message in zip(gradients, messages, strict=True):
            message.wait()
            if mean:
                gradient /= self.size

    # ---------------------------------------------- bringing parts together; on the CPU, collective

    def meet(self) -> None:
        """Wait until all ranks arrive.

        Raises:
            RuntimeError: Some did not arrive.
        """
        try:
            dist.monitored_barrier(group=self._group, wait_all_ranks=True)
        except RuntimeError as error:
            raise RuntimeError(
                f"not all ranks came ({error}). Read a run on all ranks, or call engine.gather() "
                "on all and then read on one."
            ) from error

    def objects(self, value: object) -> list[Any]:
        """The ranks' values, in order; plain values and small tensors on the CPU."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self._group)
        return values

    def sum(self, value: Tensor, operation: object = dist.ReduceOp.SUM) -> Tensor:
        """Σ over the ranks."""
        value = value.detach().to("cpu", copy=True).contiguous()
        dist.all_reduce(value, op=operation, group=self._group)
        return value

    def maximum(self, value: Tensor) -> Tensor:
        """The largest over the ranks."""
        return self.sum(value, dist.ReduceOp.MAX)

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
        return torch.cat(
            [part[:length] for part, length in zip(self.each(padded), lengths, strict=True)]
        )


@dataclass(frozen=True)
class Whole:
    """What all ranks had booked when they were last combined.

    Attributes:
        steps: The number of steps taken.
        ledger: The sums of all ranks, on the CPU; None if nobody was drawn yet.
        parts: The rest of the state: the number of ranks, and each example's, [n].
    """

    steps: int
    ledger: Ledger | None
    parts: dict[str, Any]

    @classmethod
    def of(
        cls,
        ranks: Ranks,
        steps: int,
        own: Ledger | None,
        new_ledger: Callable[[int], Ledger],
    ) -> Whole:
        """Combine the parts (collective).

        Args:
            ranks: The processes.
            steps: The number of steps taken.
            own: This rank's ledger; None if it has none.
            new_ledger: Returns an empty one for d coordinates.
        """
        parts: dict[str, Any] = {"size": ranks.size}
        num_coordinates = max(ranks.objects(0 if own is None else own.laid_out))
        if not num_coordinates:
            return cls(steps, None, parts)
        ledger = own or new_ledger(num_coordinates)  # after empty batches only
        parts["booked_by"] = (
            torch.stack(ranks.each(ledger.sums["participations"])).argmax(dim=0).short()
        )
        parts["trends"] = ranks.objects(ledger.trends())
        return cls(steps, whole_ledger(ledger, ranks), parts)


def whole_ledger(part: Ledger, ranks: Ranks) -> Ledger:
    """The ledger of all ranks together, on the CPU; this rank's part is unchanged (collective).

    Sums are added. With Poisson draws an example is on one rank alone (:func:`move_rows`).
    Otherwise several may have drawn it, and the changes between their draws are not all known: the
    changes between the parts' last values replace the missing ones, without subtracting the probes'
    noise: this can only make the run's error larger.
    """
    kept = part.track, part.questions, part.draw_rate
    whole = Ledger(part.num_examples, part.laid_out, "cpu", *kept)
    whole.steps, whole.missed_steps = part.steps, part.missed_steps
    kinds = ("ratio", "relative", "previous_level", "last_level")
    latest = {f"{each.name}_{kind}" for each in part.predicted for kind in kinds}
    for name, value in part.sums.items():
        largest = name == "num_coordinates" or name in latest
        whole.sums[name].copy_(ranks.maximum(value) if largest else ranks.sum(value))
    draws = ranks.each(part.sums["participations"] - part.sums["paused"])
    for quantity in part.predicted if part.draw_rate is None else ():
        for last, changes, seen in (
            ("previous", "near", lambda count: (count - 1).clamp(min=0)),
            ("last", "far", compared),
        ):
            name = f"{quantity.name}_{last}"
            values = ranks.each(part.sums[name])
            wide = [each.view(-1, *(1,) * (values[0].ndim - 1)) for each in draws]
            between, latest_value = changes_between(values, wide)
            every = torch.stack(wide)
            missing = seen(every.sum(dim=0)) - seen(every).sum(dim=0)
            whole.sums[name].copy_(latest_value)
            whole.sums[f"{quantity.name}_{changes}"].add_(between * missing)
    return whole


def move_rows(
    own: Ledger | None,
    ranks: Ranks,
    held: Tensor,
    new_ledger: Callable[[int], Ledger],
) -> Ledger | None:
    """Give every example, with all that is known of it, to the rank that can draw it from now on
    (collective). Only that rank predicts what it adds. Sums by coordinate stay where they are.

    Args:
        own: This rank's ledger; None if it has none.
        ranks: The processes.
        held: Which examples this rank can draw, [n].
        new_ledger: Returns an empty one for d coordinates.
    """
    num_coordinates = max(ranks.objects(0 if own is None else own.laid_out))
    if not num_coordinates:
        return None
    ledger = own or new_ledger(num_coordinates)
    for block in ledger.sums.blocks:
        whole = ranks.sum(block).to(block.device)
        block.copy_(torch.where(held.to(block.device)[:, None], whole, torch.zeros_like(whole)))
    ledger.held = held.to(ledger.device)
    return ledger


def changes_between(last: Sequence[Tensor], measured: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """The mean square of the changes from one part's last value to the next part's, and the last of
    all, [n, …] each.

    Args:
        last: For each part, the value at the last compared participation.
        measured: For each part, how often it was measured; parts with 0 are skipped.

    Example:
        >>> last, measured = (
        ...     torch.tensor([[1.0, 5.0], [0.0, 0.0], [4.0, 0.0]]),
        ...     torch.tensor([[2, 1], [0, 0], [1, 0]]),
        ... )
        >>> changes_between(last.unbind(), measured.unbind())
        (tensor([9., 0.]), tensor([4., 5.]))
    """
    before, seen = torch.zeros_like(last[0]), torch.zeros_like(measured[0])
    changes = torch.zeros_like(last[0])
    for value, count in zip(last, measured, strict=True):
        here = count > 0
        changes += torch.where(here & (seen > 0), (value - before).square(), 0.0)
        before, seen = torch.where(here, value, before), seen + here
    return changes / (seen - 1).clamp(min=1), before


def take_part(ranks: Ranks, saved: Mapping[str, Any] | None, ledger: Ledger | None) -> None:
    """Keep in a ledger of all ranks only the rows that this rank has booked.

    Args:
        ranks: The processes.
        saved: ``Whole.parts``; None: the state of a single process.
        ledger: The sums of all ranks; changed in place.
    """
    ranks.is_lost, booked_by = False, None
    if saved is not None and saved["size"] == ranks.size:
        booked_by = saved.get("booked_by")
    if ledger is not None:
        if booked_by is not None and saved is not None:
            ledger.load_trends(saved["trends"][ranks.rank])
        owner = torch.zeros(ledger.num_examples) if booked_by is None else booked_by.cpu()
        ledger.held = (owner == ranks.rank).to(ledger.device)
        for value in ledger.sums.values():
            value[(owner != ranks.rank).to(ledger.device)] = 0


def part_of_sum(summed: Tensor, like: DTensor) -> Tensor:
    """This rank's part of Σ over the ranks (collective).

    Args:
        summed: This rank's term, whole.
        like: A weight of that shape, with the sharding of the result.
    """
    terms = DTensor.from_local(
        summed, like.device_mesh, [Partial()] * like.device_mesh.ndim, run_check=False
    )
    return terms.redistribute(placements=like.placements)


def shared_by(size: int, module: nn.Module) -> nn.Module:
    """The module for several processes, with rank 0's weights.

    Unchanged for a single process (collective).
    """
    return module if size == 1 else DifferentiallyPrivateDistributedDataParallel(module)


def check_ranks(
    module: nn.Module, data_loader: DataLoader[Any], poisson_sampling: bool
) -> tuple[nn.Module, bool]:
    """The user's module, without the wrapper for several processes, and whether several train it
    together.

    The wrapper only synchronises the weights of all ranks when it is made. Without it, names in
    state dicts and in ``Private(submodule=…)`` are the same for any number of ranks.

    Args:
        module: The model.
        data_loader: The user's loader.
        poisson_sampling: Whether batches are drawn by Poisson sampling.

    Raises:
        ValueError: A way to train by several processes that cannot be accounted for.
    """
    wrapper = "opacus.distributed.DifferentiallyPrivateDistributedDataParallel(model)"
    if isinstance(module, nn.parallel.DistributedDataParallel):
        raise ValueError(
            "torch's DistributedDataParallel averages gradients before they are clipped by "
            f"example; use {wrapper}"
        )
    together = isinstance(module, DifferentiallyPrivateDistributedDataParallel)
    module = module.get_submodule("module") if together else module
    size = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if is_sharded(module):
        check_sharded(module, size)
    elif not together:
        if size > 1:
            alone = f"{size} processes run, and each trains its own model on all of the data"
            warnings.warn(f"{alone}. To train one model together: {wrapper}.", stacklevel=3)
        return module, False

    # a stream's ids are compared
    if not poisson_sampling and not isinstance(data_loader.dataset, IterableDataset):
        sampler = getattr(data_loader.batch_sampler, "sampler", None)
        divides = len(data_loader.dataset) % size == 0  # type: ignore[arg-type]
        if not (isinstance(sampler, DistributedSampler) and (divides or sampler.drop_last)):
            raise ValueError(
                f"without Poisson sampling each of the {size} processes must draw from its own "
                "part of the data, nobody twice: a gradient could count several times under one "
                "draw of noise. Use a torch.utils.data.DistributedSampler(dataset, "
                "drop_last=True), or Poisson sampling."
            )
    return module, True
