"""Assembles the parts of a private training run: each part receives what it needs when it is made."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn, optim
from torch.utils.data import DataLoader

from torchfil.accounting.ids import ExampleIds, GrowingIds
from torchfil.engine.distributed.ranks import Ranks
from torchfil.engine.distributed.shards import ShardedReplica, is_sharded
from torchfil.engine.distributed.streams import FILStreamLoader
from torchfil.engine.executor import Executor
from torchfil.engine.forward import HookedForward, LoopForward, Observer, RecordedModule
from torchfil.engine.guard import Guard
from torchfil.engine.loader import BatchTracker, EmptySecond, FILDataLoader
from torchfil.engine.looks import DatasetLooks
from torchfil.engine.losses import IdentifiedLoss
from torchfil.engine.optimizer import FILOptimizer, GradSampleOptimizer
from torchfil.engine.options import RunOptions
from torchfil.engine.replica import Replica
from torchfil.engine.run import Run
from torchfil.engine.step import Step
from torchfil.utils.noise import NoiseSource, preserve_rng

__all__ = ["PrivateTraining", "assemble"]


@dataclass(frozen=True)
class PrivateTraining:
    """The parts that ``make_private`` has assembled.

    Attributes:
        run: Sums and state.
        replica: The model and its weightless copy.
        step: Takes the steps.
        looks: Looks at examples outside steps.
        module: The private model that the loop calls (the hooks object with ``wrap_model=False``).
        optimizer: The private optimizer.
        loader: The private loader.
        watcher: Watches the model under Opacus's hooks; None in mode "auto".
    """

    run: Run
    replica: Replica
    step: Step
    looks: DatasetLooks
    module: Any
    optimizer: FILOptimizer
    loader: FILDataLoader | FILStreamLoader
    watcher: HookedForward | None

    def detach(self) -> None:
        """Remove all hooks from the model."""
        if self.watcher is not None:
            self.watcher.remove()
        self.step.close()
        self.module.remove_hooks()


def assemble(
    module: nn.Module,
    optimizer: optim.Optimizer,
    prepared: DataLoader[Any],
    options: RunOptions,
    criterion: Callable[[Any, Any], torch.Tensor] | None,
    ids: ExampleIds,
    generator: torch.Generator,
    accounted_rate: Callable[[], float],
    with_hooks: Callable[[], Any] | None,
    wrapper_settings: dict[str, Any],
    optimizer_settings: dict[str, Any],
    whole_batch: int,
    noise: NoiseSource,
    ranks: Ranks | None = None,
    id_of: Any = None,
) -> PrivateTraining:
    """The parts of a run, each made from the ones before.

    Args:
        module: The user's module.
        optimizer: The user's optimizer.
        prepared: The loader as Opacus has prepared it.
        options: How to account.
        criterion: The loss; None: to be identified.
        ids: The examples' names.
        generator: Source of the probes.
        accounted_rate: Returns the sampling rate of the DP accountant's last step.
        with_hooks: Returns the module with Opacus's hooks; None: mode "auto", which needs none.
        wrapper_settings: Settings of the private model in mode "auto".
        optimizer_settings: Settings of Opacus's optimizer; as in Opacus, ``expected_batch_size`` is that of one rank.
        whole_batch: How many examples a batch has on average, of all ranks together.
        noise: The source of noise and Poisson draws.
        ranks: The processes that train together; None: a single one.
        id_of: Where to find the ids in a batch of a stream.
    """
    stream = isinstance(ids, GrowingIds)
    loss = IdentifiedLoss.of(criterion) if criterion is not None else None
    sharded = is_sharded(module)
    replica = ShardedReplica(module) if sharded else Replica(module, batch_first=wrapper_settings["batch_first"])
    tracker = BatchTracker()
    tracker.parts = options.accounting.accumulation_steps
    observer = Observer(tracker)
    expected_batch = whole_batch
    if ranks is not None:
        generator = ranks.probe_generator()
        expected_batch = math.ceil(whole_batch / ranks.size)
    whole_batch *= tracker.parts
    run = Run(options, loss, ids, replica.device, generator, accounted_rate, whole_batch, ranks)
    looks = DatasetLooks(run, replica, None if stream else prepared.dataset, prepared.collate_fn)
    execution = options.accounting.execution
    executor = Executor(
        replica,
        expected_batch,
        options.max_memory,
        cuda_graphs=execution.cuda_graphs and not sharded,  # a graph reads weights at their old addresses
        recorded=options.shares is None,
    )
    step = Step(run, replica, executor, Guard(replica, options, tracker), observer, looks.refresh_norms)

    # The model comes last, after everything that could be refused: from here on it has hooks.
    watcher, private_module = None, None
    if with_hooks is None:
        loop_forward = LoopForward(replica, observer, step.begin_forward)
        private_module = RecordedModule(module, loop_forward=loop_forward, **wrapper_settings)
    else:
        private_module = with_hooks()
        watcher = HookedForward(replica, observer)
    names = {id(value): name for name, value in module.named_parameters()}
    kind = FILOptimizer if with_hooks is None else GradSampleOptimizer
    private_optimizer = kind(
        optimizer,
        clip=options.clip,
        step=step,
        names=names,
        noise=noise,
        shares=options.shares,
        ranks=ranks,
        **optimizer_settings,
    )

    def begin_pass() -> None:
        tracker.begin_pass()
        _check_pass(run, observer, private_optimizer, None if stream else len(prepared.dataset))  # type: ignore[arg-type]

    _prepare_empty_batches(prepared, batch_first=replica.batch_first)
    loader: FILDataLoader | FILStreamLoader
    if stream:
        loader = FILStreamLoader(prepared, tracker, begin_pass, id_of, ranks)
    else:
        loader = FILDataLoader(prepared, tracker, begin_pass, noise)
    return PrivateTraining(run, replica, step, looks, private_module, private_optimizer, loader, watcher)


def _prepare_empty_batches(prepared: DataLoader[Any], *, batch_first: bool) -> None:
    """Let Opacus's collate function learn what batches look like: the first that is drawn may be empty."""
    if hasattr(prepared.collate_fn, "first_batch"):
        if not batch_first:
            prepared.collate_fn.__class__ = EmptySecond
        with preserve_rng():
            prepared.collate_fn([prepared.dataset[0]])


class UnfinishedBatchError(RuntimeError, ValueError):
    """A pass over the loader ended in the middle of a logical batch; also a ValueError, as in Opacus."""


def _check_pass(run: Run, observer: Observer, optimizer: FILOptimizer, dataset_length: int | None) -> None:
    """At the start of a pass over the loader, refuse leftovers of the last pass and a changed length of the data."""
    observer.check_stepped(run.history.steps)
    if dataset_length is not None and dataset_length != run.ids.num_examples:
        raise ValueError(
            f"the data set had {run.ids.num_examples} examples when make_private was called and has "
            f"{dataset_length} now; the ids would shift. Make a new engine for the new data set."
        )
    if optimizer.inside_logical_batch:
        raise UnfinishedBatchError(
            "the last pass over the loader was left in the middle of a logical batch (a break under "
            "BatchMemoryManager?): continuing would add the next batch to it under one draw of noise. Call "
            "optimizer.discard_partial_batch() to drop the unfinished batch (none of it was released)."
        )
    run.batch.clear()
    optimizer._step_skip_queue.clear()
