"""Assembles the parts of a private training run: each part receives what it needs when it is
made.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from opacus.accountants import IAccountant
from opacus.data_loader import CollateFnWithEmpty
from opacus.grad_sample import AbstractGradSampleModule
from torch import Tensor, nn, optim
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from torchfil.accounting.ids import ExampleIds
from torchfil.accounting.owners import Owners
from torchfil.attribution.plis import susceptibility
from torchfil.engine import loader
from torchfil.engine.canaries import canary_scores
from torchfil.engine.distributed.ranks import Ranks, ShardedReplica, is_sharded, without_shards
from torchfil.engine.forward import HookedForward, LoopForward, Observer, RecordedModule
from torchfil.engine.guard import Guard
from torchfil.engine.losses import IdentifiedLoss
from torchfil.engine.optimizer import FILOptimizer, GradSampleOptimizer
from torchfil.engine.options import RunOptions, example_ids, rate_and_batch_size
from torchfil.engine.passes import Passes
from torchfil.engine.replica import Replica, is_plain
from torchfil.engine.rows import many_rows, rows_by_owner
from torchfil.engine.run import Run
from torchfil.engine.step import Step
from torchfil.fisher.batch import PrivateBatch
from torchfil.fisher.gradients import ExampleGradients
from torchfil.fisher.masks import call_and_record_masks
from torchfil.fisher.models import call_with, with_attributes
from torchfil.private import Examples, as_call
from torchfil.utils.errors import UnsupportedModuleError
from torchfil.utils.noise import NoiseSource, preserve_rng
from torchfil.utils.trees import map_tensors

logger = logging.getLogger(__name__)

_BATCH = 256  # examples of a pass over the data set


class DatasetPasses:
    """Reads examples from the data set itself and differentiates at the current weights.

    Args:
        run: The run that they belong to.
        replica: The model.
        dataset: The user's data set; None: a stream, which cannot be read again.
        collate_fn: Makes a batch from its items.
    """

    def __init__(
        self, run: Run, replica: Replica, dataset: Any, collate_fn: Callable[[list[Any]], Any]
    ) -> None:
        self.run, self.replica, self.dataset, self.collate_fn = run, replica, dataset, collate_fn
        self._owners = run.owners if run.options.accounting.by_owner else None

    def refresh_norms(self, optimizer: FILOptimizer) -> None:
        """Compute every example's clipped gradient norm, for individual ε.

        Several ranks share the work.
        """
        options, limit, ranks = self.run.options, float(optimizer.max_grad_norm), self.run.ranks
        first, apart = (0, 1) if ranks is None else (ranks.rank, ranks.size)
        with self._without_dropout():
            for rows, gradients in self._batches(range(first, self.run.ids.num_examples, apart)):
                chunks = PrivateBatch(gradients, options.mechanism(1.0, limit)).chunks(
                    options.max_memory, 4
                )
                ratio = torch.cat([jacobian.clipped_norm for _, jacobian in chunks]) / limit
                self.run.history.set_ratios(torch.tensor(rows), ratio)

    def plis(
        self, rows: Sequence[int], optimizer: FILOptimizer, *, private: bool
    ) -> dict[Hashable, Tensor]:
        """The PLIS of these examples, by private tensor, [rows, …]; NaN at padding."""
        options, limit = self.run.options, float(optimizer.max_grad_norm)
        parts, place = dict[Hashable, list[Tensor]](), dict[int, int]()
        with self._without_dropout():
            # owners come in another order
            for found, gradients in self._batches(list(dict.fromkeys(rows))):
                place |= {row: len(place) + k for k, row in enumerate(found)}
                mechanism = (
                    options.mechanism(float(optimizer.noise_multiplier), limit) if private else None
                )
                slopes = susceptibility(
                    gradients, mechanism, max_memory=options.max_memory
                ).gradient
                for key, part in gradients.examples.maps(slopes).items():
                    parts.setdefault(key, []).append(part)
        return {key: _joined(pieces)[[place[row] for row in rows]] for key, pieces in parts.items()}

    def examples(self, rows: Sequence[int]) -> Examples:
        """These examples with their private coordinates; owners with all of their rows."""
        return next(self._pieces(rows, together=True))[1]

    def inputs(self, rows: Sequence[int]) -> dict[Any, Any]:
        """The model's inputs for these examples, by position and by name, [rows, …] each.

        An owner's are its first.
        """
        owners = self._owners
        first = rows if owners is None else [owners.rows([row])[0] for row in rows]
        args, kwargs = as_call(self._batch(first)[0])
        return {**dict(enumerate(args)), **kwargs}

    def check_copy(self) -> None:
        """If functions were set on modules, raise now if the first example shows that the copy
        needs the live model.
        """
        values = [
            value for module in self.replica.template.modules() for value in vars(module).values()
        ]
        functions = [
            value for value in values if isinstance(value, FunctionType | MethodType | partial)
        ]
        if self.dataset is None or all(map(is_plain, functions)):
            return
        try:
            with preserve_rng():
                given = map_tensors(
                    lambda leaf: leaf.to(self.replica.device), as_call(self._batch([0])[0])
                )
            self.replica.check_own_weights(*self.replica.examples_first(given))
        except UnsupportedModuleError:
            raise
        except Exception as error:
            # the loop may call the model otherwise; its first step checks once more
            logger.info("make_private cannot call the model on the first example: %s", error)

    def _batch(self, rows: Sequence[int]) -> tuple[Any, Any]:
        items = [self.dataset[row] for row in rows]
        return loader.split_batch(self.collate_fn(items), self.run.options.batch_to_inputs)

    def _pieces(
        self, rows: Sequence[int], *, together: bool
    ) -> Iterator[tuple[Sequence[int], Examples]]:
        """These examples, given by number, with their private coordinates.

        Owners have the rows that a step would draw, whose values are checked; ``together``, all of
        them, as they are, and room for those of the largest.
        """
        parts: Sequence[Any] = [None]
        owners, options, max_rows = self._owners, self.run.options, self.run.max_rows
        if owners is not None:
            largest = int(owners.counts.max()) if together else None
            with preserve_rng():
                rows = owners.rows(rows, None if together else options.accounting.rows_per_owner)
            parts, max_rows = rows_by_owner(rows, owners, together=largest), largest or max_rows
        inputs, targets = map_tensors(lambda leaf: leaf.to(self.replica.device), self._batch(rows))
        args, kwargs = self.replica.examples_first(as_call(inputs))
        how: dict[str, Any] = {"check_values": not together, "max_rows": max_rows}
        for part in parts:
            laid_out = self.replica.lay_out(
                args, kwargs, targets, options.private, part=part, **how
            )
            yield rows if part is None else part.owners, laid_out

    def _batches(self, rows: Sequence[int]) -> Iterator[tuple[Sequence[int], ExampleGradients]]:
        loss = self.run.loss
        if self.dataset is None:
            raise RuntimeError(
                "the examples of a stream cannot be read again; this needs numbered examples"
            )
        if loss is None:
            raise RuntimeError(
                "the loss is not known before the first step; pass criterion= to make_private"
            )
        for start in range(0, len(rows), _BATCH):
            for part, examples in self._pieces(rows[start : start + _BATCH], together=False):
                weighted = replace(examples, clip_weights=self.run.weights_of(part))
                yield (
                    part,
                    self._with_masks(
                        self.replica.gradients(weighted, self.run.loss_of_examples(loss))
                    ),
                )

    @contextlib.contextmanager
    def _without_dropout(self) -> Iterator[None]:
        """Inside, the copy drops nothing (where it makes views, it still does), and no random state
        moves.
        """
        whole, *parts = self.replica.template.modules()
        views = self.run.options.accounting.views is not None
        with preserve_rng(), self.replica.random_state_kept(), contextlib.ExitStack() as stack:
            for module in parts if views else (whole, *parts):
                stack.enter_context(with_attributes(module, training=False))
            stack.enter_context(
                with_attributes(self.replica, key=(self.replica.key, "without dropout"))
            )
            yield

    def _with_masks(self, gradients: ExampleGradients) -> ExampleGradients:
        """The same for random numbers that the model draws all the same, for views or inside
        itself.
        """
        args, kwargs, _ = gradients.examples.public

        def run() -> None:
            with torch.no_grad(), gradients.forward_state():
                call_with(
                    gradients.model,
                    {**gradients.parameters, **gradients.own_constants()},
                    args,
                    kwargs,
                )

        masks = call_and_record_masks(run, self.replica.device, expected=False)[1]
        own = self.replica.masks_by_example(masks, args, kwargs)
        return (
            replace(gradients, examples=replace(gradients.examples, masks=own))
            if masks
            else gradients
        )


def _joined(pieces: Sequence[Tensor]) -> Tensor:
    """The rows of all pieces, [rows, …], with NaN beyond the positions of shorter texts."""
    if pieces[0].ndim == 1:
        return torch.cat(list(pieces))
    return pad_sequence(
        [row for piece in pieces for row in piece], batch_first=True, padding_value=math.nan
    )


class UnfinishedBatchError(RuntimeError, ValueError):
    """A pass over the loader ended in the middle of a logical batch.

    Also a ValueError, as in Opacus.
    """


class PrivateTraining:
    """The parts of a run, each made from the ones before.

    Args:
        module: The user's module.
        optimizer: The user's optimizer.
        prepared: The loader as Opacus has prepared it.
        options: How to account.
        criterion: The loss; None: to be identified.
        id_of: The examples' ids, or where to find them in a batch of a stream.
        new_noise: Makes the source of noise and Poisson draws of a rank; None: a single process.
        distributed: Whether several processes train together.
        accountant: The DP accountant.
        owners: Who owns which row, if that is known.
        with_hooks: Returns the module with Opacus's hooks; None: mode "auto", which needs none.
        batch_first: Whether the examples lie along the first dimension of the model's inputs.
        **released: σ and C, for Opacus's optimizer.

    Attributes:
        run: Sums and state.
        replica: The model and its weightless copy.
        step: Takes the steps.
        passes: Reads examples outside steps.
        module: The private model that the loop calls (the hooks object with ``wrap_model=False``).
        optimizer: The private optimizer.
        loader: The private loader.
        sample_rate: The DP accountant's sampling rate.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: optim.Optimizer,
        prepared: DataLoader[Any],
        options: RunOptions,
        criterion: Callable[[Any, Any], Tensor] | None,
        id_of: Any,
        new_noise: Callable[..., NoiseSource],
        *,
        distributed: bool,
        accountant: IAccountant,
        owners: Owners | None,
        with_hooks: Callable[[], Any] | None,
        batch_first: bool,
        **released: Any,
    ) -> None:
        accounting, stream = options.accounting, loader.is_stream(prepared)
        rows = data = loader.dataset_of(prepared)
        row_ids = None
        self._tracker = loader.BatchTracker()
        self._tracker.parts = accounting.accumulation_steps
        if stream:
            ids = ExampleIds(0, [], grows=True)
        elif isinstance(data, loader.OwnerRows):
            rows = data.dataset
            ids, row_ids = example_ids(data, data.owners.keys), example_ids(rows, id_of)
            self._tracker.example_of = data.owners.of_row.tolist().__getitem__
        else:
            ids = example_ids(data, id_of)
        ranks = Ranks(accounting.probe_seed(), ids.num_examples) if distributed else None
        rate, whole_batch, divisor = rate_and_batch_size(
            prepared, ids, ranks, accounting.expected_batch_size
        )
        noise = new_noise(rank=None if ranks is None else ranks.rank)
        sharded, reduction = is_sharded(module), options.loss_reduction
        self.sample_rate = rate
        own = without_shards(module)
        if accounting.views is not None or accounting.by_owner:
            own = many_rows(own, accounting.views)
        self.replica = (
            ShardedReplica(module, own) if sharded else Replica(own, batch_first=batch_first)
        )
        self._observer = Observer(self._tracker)
        seed = accounting.probe_seed() if ranks is None else ranks.seed
        loss = IdentifiedLoss.of(criterion) if criterion is not None else None
        drawn = whole_batch * self._tracker.parts
        self.run = Run(
            options, loss, ids, self.replica.device, seed, accountant, drawn, ranks, owners, row_ids
        )
        if stream:
            self._tracker.rows_of = self.run.rows_of
        self.passes = DatasetPasses(
            self.run, self.replica, None if stream else rows, prepared.collate_fn
        )
        # they keep the weights' addresses
        graphs = accounting.execution.cuda_graphs and not sharded
        size, recorded = (
            math.ceil(whole_batch / (1 if ranks is None else ranks.size)),
            options.shares is None,
        )
        passes = Passes(
            self.replica, size, options.max_memory, cuda_graphs=graphs, recorded=recorded
        )
        guard = Guard(self.replica, options, self._tracker)
        self.step = Step(
            self.run, self.replica, passes, guard, self._observer, self.passes.refresh_norms
        )

        if not sharded:
            self.passes.check_copy()

        # The model comes last, after everything that could be refused: from here on it has hooks.
        self._watcher: HookedForward | None = None
        self.module: AbstractGradSampleModule
        kind = FILOptimizer
        if with_hooks is None:
            forward = LoopForward(self.replica, self._observer, self.step.begin_forward)
            self.module = RecordedModule(
                module, loop_forward=forward, batch_first=batch_first, loss_reduction=reduction
            )
        else:
            self.module, self._watcher = with_hooks(), HookedForward(self.replica, self._observer)
            kind = GradSampleOptimizer
        self.optimizer = kind(
            optimizer,
            clip=options.clip,
            step=self.step,
            names={id(value): name for name, value in module.named_parameters()},
            noise=noise,
            shares=options.shares,
            ranks=ranks,
            expected_batch_size=divisor,
            loss_reduction=reduction,
            **released,
        )
        self._show_example(prepared)
        if accounting.canaries is not None:
            self.optimizer.canaries = canary_scores(
                accounting.canaries, self.step, self.optimizer, rows, prepared.collate_fn
            )
        self.loader: loader.FILStreamLoader | loader.FILDataLoader
        if stream:
            self.loader = loader.FILStreamLoader(
                prepared, self._tracker, self._begin_pass, id_of, ranks
            )
        else:
            self.loader = loader.FILDataLoader(prepared, self._tracker, self._begin_pass, noise)

    def _show_example(self, prepared: DataLoader[Any]) -> None:
        """Show Opacus's collate function, which also makes empty batches, what a batch looks
        like.
        """
        if isinstance(prepared.collate_fn, CollateFnWithEmpty):
            if not self.replica.batch_first:
                prepared.collate_fn.__class__ = loader.EmptySecond
            with preserve_rng():
                prepared.collate_fn([prepared.dataset[0]])

    def _begin_pass(self) -> None:
        """At the start of a pass over the loader, refuse leftovers of the last one and a changed
        length of the data.
        """
        self._tracker.begin_pass()
        self._observer.check_stepped(self.run.history.steps)
        if self.passes.dataset is not None:
            before, now = (self.run.row_ids or self.run.ids).num_examples, len(self.passes.dataset)
            if before != now:
                raise ValueError(
                    f"the data set had {before} examples when make_private was called and has "
                    f"{now} now; the ids would shift. Make a new engine for the new data set."
                )
        if self.optimizer.inside_logical_batch:
            raise UnfinishedBatchError(
                "the last pass was left in the middle of a logical batch, whose noise the next "
                "one would share: call optimizer.discard_partial_batch() (none of it was released)"
            )
        self.run.clear_batch()
        self.optimizer._step_skip_queue.clear()

    def detach(self) -> None:
        """Remove all hooks from the model."""
        if self._watcher is not None:
            self._watcher.remove()
        self.step.close()
        self.module.remove_hooks()
