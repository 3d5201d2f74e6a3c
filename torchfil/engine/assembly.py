"""Assembles the parts of a private training run: each part receives what it needs when it is made."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.utils.data import DataLoader

from torchfil.accounting.ids import ExampleIds, GrowingIds
from torchfil.attribution.plis import susceptibility
from torchfil.engine.distributed.ranks import Ranks
from torchfil.engine.distributed.shards import ShardedReplica, is_sharded
from torchfil.engine.distributed.streams import FILStreamLoader
from torchfil.engine.executor import Executor
from torchfil.engine.forward import HookedForward, LoopForward, Observer, RecordedModule
from torchfil.engine.guard import Guard
from torchfil.engine.loader import BatchTracker, EmptySecond, FILDataLoader, split_batch
from torchfil.engine.losses import IdentifiedLoss
from torchfil.engine.optimizer import FILOptimizer, GradSampleOptimizer
from torchfil.engine.options import RunOptions
from torchfil.engine.replica import Replica
from torchfil.engine.run import Run
from torchfil.engine.step import Step
from torchfil.fisher.batch import PrivateBatch
from torchfil.fisher.gradients import ExampleGradients
from torchfil.private import Examples, as_call
from torchfil.utils.noise import NoiseSource, preserve_rng
from torchfil.utils.trees import map_tensors

_BATCH = 256  # examples of a pass over the data set
_EXAMPLES_TO_READ = 16  # a flip with probability 1/2 goes unnoticed once in 65,536 runs


class DatasetPasses:
    """Reads examples from the data set itself and differentiates at the current weights.

    Args:
        run: The run that they belong to.
        replica: The model.
        dataset: The user's data set; None: a stream, which cannot be read again.
        collate_fn: Makes a batch from its items.
    """

    def __init__(self, run: Run, replica: Replica, dataset: Any, collate_fn: Callable[[list[Any]], Any]) -> None:
        self.run, self.replica, self.dataset, self.collate_fn = run, replica, dataset, collate_fn

    def refresh_norms(self, optimizer: FILOptimizer) -> None:
        """Compute every example's clipped gradient norm, for individual ε; several ranks share the work."""
        options, limit, ranks = self.run.options, float(optimizer.max_grad_norm), self.run.ranks
        first, apart = (0, 1) if ranks is None else (ranks.rank, ranks.size)
        for rows, gradients in self._batches(range(first, self.run.ids.num_examples, apart)):
            chunks = PrivateBatch(gradients, options.mechanism(1.0, limit)).chunks(options.max_memory, 4)
            ratio = torch.cat([jacobian.clipped_norm for _, jacobian in chunks]) / limit
            self.run.history.set_ratios(torch.tensor(rows), ratio)

    def plis(self, rows: Sequence[int], optimizer: FILOptimizer, *, private: bool) -> dict[Hashable, Tensor]:
        """The PLIS of these examples, by private tensor, [rows, …]; NaN at padding."""
        options, limit = self.run.options, float(optimizer.max_grad_norm)
        parts: dict[Hashable, list[Tensor]] = {}
        for _, gradients in self._batches(rows):
            if private and options.shares is not None:
                # ∂(‖g̃‖/s)²/∂z = 2‖g̃‖a/s², [batch, d], if each parameter's gradient is clipped separately
                mechanism = options.mechanism(float(optimizer.noise_multiplier), limit)
                chunks = [jacobian for _, jacobian in PrivateBatch(gradients, mechanism).chunks(options.max_memory, 8)]
                terms = [2 * part.clipped_norm[:, None] * part.clipped_norm_gradient() for part in chunks]
                slopes = torch.cat(terms) / mechanism.noise_std**2
            else:
                slopes = susceptibility(
                    gradients,
                    noise_std=float(optimizer.noise_multiplier) * limit if private else None,
                    max_grad_norm=limit if private else None,
                    clip=options.clip,
                    max_memory=options.max_memory,
                ).gradient
            for key, part in gradients.examples.maps(slopes).items():
                parts.setdefault(key, []).append(part)
        return {key: _joined(pieces) for key, pieces in parts.items()}

    def examples(self, rows: Sequence[int], *, check_values: bool = False) -> Examples:
        """These examples with their private coordinates."""
        options, device = self.run.options, self.replica.device
        inputs, targets = map_tensors(lambda leaf: leaf.to(device), self._batch(rows))
        args, kwargs = self.replica.examples_first(as_call(inputs))
        return self.replica.lay_out(args, kwargs, targets, options.private, check_values=check_values)

    def inputs(self, rows: Sequence[int]) -> dict[Any, Any]:
        """The model's inputs for these examples, by position and by name, [rows, …] each."""
        return _by_name(self._batch(rows)[0])

    def _batch(self, rows: Sequence[int]) -> tuple[Any, Any]:
        return split_batch(self.collate_fn([self.dataset[row] for row in rows]), self.run.options.batch_to_inputs)

    def _batches(self, rows: Sequence[int]) -> Iterator[tuple[Sequence[int], ExampleGradients]]:
        loss = self.run.loss
        if self.dataset is None:
            raise RuntimeError("the examples of a stream cannot be read again; this needs numbered examples")
        if loss is None:
            raise RuntimeError("the loss is not known before the first step; pass criterion= to make_private")
        for start in range(0, len(rows), _BATCH):
            part = rows[start : start + _BATCH]
            weighted = replace(self.examples(part, check_values=True), clip_weights=self.run.weights_of(part))
            yield part, self.replica.gradients(weighted, loss)


def _by_name(inputs: Any) -> dict[Any, Any]:
    """The inputs of a call by position and by name."""
    args, kwargs = as_call(inputs)
    return {**dict(enumerate(args)), **kwargs}


def _joined(pieces: Sequence[Tensor]) -> Tensor:
    """The rows of all pieces, [rows, …], with NaN beyond the positions of shorter texts."""
    if pieces[0].ndim == 1:
        return torch.cat(list(pieces))
    length = max(piece.shape[1] for piece in pieces)
    joined = pieces[0].new_full((sum(map(len, pieces)), length, *pieces[0].shape[2:]), float("nan"))
    for part, piece in zip(joined.split([len(piece) for piece in pieces]), pieces, strict=True):
        part[:, : piece.shape[1]] = piece
    return joined


class UnfinishedBatchError(RuntimeError, ValueError):
    """A pass over the loader ended in the middle of a logical batch; also a ValueError, as in Opacus."""


class PrivateTraining:
    """The parts of a run, each made from the ones before.

    Args:
        module: The user's module.
        optimizer: The user's optimizer.
        prepared: The loader as Opacus has prepared it.
        options: How to account.
        criterion: The loss; None: to be identified.
        ids: The examples' names.
        id_of: Where to find the ids in a batch of a stream.
        noise: The source of noise and Poisson draws.
        ranks: The processes that train together; None: a single one.
        whole_batch: How many examples a batch has on average, of all ranks together.
        accounted_rate: Returns the sampling rate of the DP accountant's last step.
        with_hooks: Returns the module with Opacus's hooks; None: mode "auto", which needs none.
        batch_first: Whether the examples lie along the first dimension of the model's inputs.
        **released: Settings of Opacus's optimizer; as in Opacus, ``expected_batch_size`` is that of one rank.

    Attributes:
        run: Sums and state.
        replica: The model and its weightless copy.
        step: Takes the steps.
        passes: Reads examples outside steps.
        module: The private model that the loop calls (the hooks object with ``wrap_model=False``).
        optimizer: The private optimizer.
        loader: The private loader.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: optim.Optimizer,
        prepared: DataLoader[Any],
        options: RunOptions,
        criterion: Callable[[Any, Any], Tensor] | None,
        ids: ExampleIds,
        id_of: Any,
        noise: NoiseSource,
        ranks: Ranks | None,
        *,
        whole_batch: int,
        accounted_rate: Callable[[], float],
        with_hooks: Callable[[], Any] | None,
        batch_first: bool,
        **released: Any,
    ) -> None:
        stream, sharded, reduction = isinstance(ids, GrowingIds), is_sharded(module), options.loss_reduction
        self.replica = ShardedReplica(module) if sharded else Replica(module, batch_first=batch_first)
        self._tracker = BatchTracker()
        self._tracker.parts = options.accounting.accumulation_steps
        self._observer = Observer(self._tracker)
        generator = options.accounting.generator() if ranks is None else ranks.probe_generator()
        loss = IdentifiedLoss.of(criterion) if criterion is not None else None
        drawn = whole_batch * self._tracker.parts
        self.run = Run(options, loss, ids, self.replica.device, generator, accounted_rate, drawn, ranks)
        self._dataset: Any = None if stream else prepared.dataset
        self.passes = DatasetPasses(self.run, self.replica, self._dataset, prepared.collate_fn)
        executor = Executor(
            self.replica,
            math.ceil(whole_batch / (1 if ranks is None else ranks.size)),
            options.max_memory,
            cuda_graphs=options.accounting.execution.cuda_graphs and not sharded,  # they keep the weights' addresses
            recorded=options.shares is None,
        )
        guard = Guard(self.replica, options, self._tracker)
        self.step = Step(self.run, self.replica, executor, guard, self._observer, self.passes.refresh_norms)

        # The model comes last, after everything that could be refused: from here on it has hooks.
        self._watcher: HookedForward | None = None
        self.module: Any
        if with_hooks is None:
            forward = LoopForward(self.replica, self._observer, self.step.begin_forward)
            settings: dict[str, Any] = {"batch_first": batch_first, "loss_reduction": reduction}
            self.module = RecordedModule(module, loop_forward=forward, **settings)
        else:
            self.module, self._watcher = with_hooks(), HookedForward(self.replica, self._observer)
        parts: dict[str, Any] = {"clip": options.clip, "shares": options.shares, "loss_reduction": reduction}
        parts |= {"names": {id(value): name for name, value in module.named_parameters()}, "step": self.step}
        kind = FILOptimizer if with_hooks is None else GradSampleOptimizer
        self.optimizer = kind(optimizer, noise=noise, ranks=ranks, **parts, **released)
        if hasattr(prepared.collate_fn, "first_batch"):  # it learns what batches look like: the first may be empty
            if not self.replica.batch_first:
                prepared.collate_fn.__class__ = EmptySecond
            with preserve_rng():
                prepared.collate_fn([prepared.dataset[0]])
        self.loader: FILDataLoader | FILStreamLoader
        if stream:
            self.loader = FILStreamLoader(prepared, self._tracker, self._begin_pass, id_of, ranks)
        else:
            self.loader = FILDataLoader(prepared, self._tracker, self._begin_pass, noise)

    def _begin_pass(self) -> None:
        """At the start of a pass over the loader, refuse leftovers of the last one and a changed length of the data."""
        self._tracker.begin_pass()
        self._observer.check_stepped(self.run.history.steps)
        if self._dataset is not None and len(self._dataset) != self.run.ids.num_examples:
            raise ValueError(
                f"the data set had {self.run.ids.num_examples} examples when make_private was called and has "
                f"{len(self._dataset)} now; the ids would shift. Make a new engine for the new data set."
            )
        if self.optimizer.inside_logical_batch:
            raise UnfinishedBatchError(
                "the last pass over the loader was left in the middle of a logical batch (a break under "
                "BatchMemoryManager?): continuing would add the next batch to it under one draw of noise. Call "
                "optimizer.discard_partial_batch() to drop the unfinished batch (none of it was released)."
            )
        self.run.clear_batch()
        self.optimizer._step_skip_queue.clear()

    def detach(self) -> None:
        """Remove all hooks from the model."""
        if self._watcher is not None:
            self._watcher.remove()
        self.step.close()
        self.module.remove_hooks()
