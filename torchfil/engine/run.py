"""The accounting of one training run: from a physical batch's gradients to the ledger.

A physical batch is measured before its gradients are added to the sum, staged after they were, and booked when the
logical batch is released under one draw of noise. A refusal at any point leaves model, sums and ledger unchanged.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from torchfil.accounting.contributions import Contribution
from torchfil.accounting.ids import ExampleIds
from torchfil.accounting.leakage import Conditions, Leakage
from torchfil.accounting.ledger import Ledger
from torchfil.accounting.timeline import Timeline
from torchfil.attribution.plis import susceptibility
from torchfil.engine.epsilon import NormHistory
from torchfil.engine.fused import FusedResult, Wanted, joined
from torchfil.engine.loader import BatchTracker, FILDataLoader, plain, split_batch
from torchfil.engine.losses import IdentifiedLoss, ignored_targets_check
from torchfil.engine.measuring import NOT_FINITE, Measurer
from torchfil.engine.observer import ForwardPass, Observer
from torchfil.engine.one_pass import OnePassModule, OnePassOptimizer
from torchfil.engine.optimizer import FILOptimizer
from torchfil.engine.options import Settings
from torchfil.fisher.batch import PrivateBatch
from torchfil.fisher.draws import Draws
from torchfil.fisher.gradients import ExampleGradients, refuse_unsupported_modules
from torchfil.fisher.recording import UnsupportedCallError
from torchfil.private import as_call, finiteness_check
from torchfil.utils.deferred import read_later
from torchfil.utils.trees import tensors_of

__all__ = ["Run"]

logger = logging.getLogger(__name__)


_LOOKS_PER_PASS = 8  # how often the pace is set anew and the leakage so far is noted


@dataclass(frozen=True)
class _Staged:
    """A physical batch whose logical batch has not been released yet."""

    contribution: Contribution
    ratio: Tensor  # ‖g̃‖/C, [batch]
    ids: frozenset[int]
    noise: tuple[float, float]  # σ and C when it was measured


class Run:
    """One training run under account.

    Args:
        module: The user's module, before it is wrapped.
        settings: How to account.
        criterion: The loss, or None to identify it at the first step.
        num_examples: n.
        keys: The examples' own ids, or None.
        generator: Source of the probes.
    """

    def __init__(
        self,
        module: nn.Module,
        settings: Settings,
        criterion: Callable[[Any, Any], Tensor] | None,
        num_examples: int,
        keys: Sequence[Hashable] | None,
        generator: torch.Generator,
    ) -> None:
        refuse_unsupported_modules(module, allow_dropout=True)
        self.module = module
        self.measurer = Measurer(module, settings, generator)
        self.settings = settings
        self.loss = IdentifiedLoss(_name_of(criterion), criterion) if criterion is not None else None
        self.ids = ExampleIds(num_examples, keys)
        self.generator = generator
        device = next(module.parameters()).device
        _refuse_memory(NormHistory.bytes_needed(num_examples) + Ledger.bytes_needed(num_examples, 1, (), 1), settings)
        self.history = NormHistory(num_examples, device)
        self.ledger: Ledger | None = None
        self.timeline = Timeline()
        self.test_matrix: Tensor | None = None
        self.tracker = BatchTracker()
        self.paused = False
        self.detached = False
        self.drew_masks = False  # whether dropout was active in a measured step
        self.pace = settings.pace()
        self._names = {id(value): name for name, value in module.named_parameters()}
        self._staged: list[_Staged] = []
        self._measure_this_step: bool | None = None
        self._last_norms_were_finite: Callable[[], None] = _nothing

    observer: Observer
    private_module: nn.Module
    optimizer: FILOptimizer

    def connect(self, private_module: Any, optimizer: FILOptimizer, loader: FILDataLoader) -> None:
        """Start watching the model and the optimizer."""
        self.observer = Observer(self.module, self.tracker)
        self.private_module = private_module if isinstance(private_module, nn.Module) else self.module
        self.measurer.sample_rate = loader.sample_rate
        self.dataset = loader.plain_dataset
        self.collate_fn = loader.plain_collate_fn
        self.optimizer = optimizer
        self.timeline = Timeline(self._steps_between_looks(optimizer))
        optimizer.measure = self._measure
        optimizer.on_logical_step = self._book
        optimizer.on_zero_grad = self.observer.forget_finished
        if isinstance(optimizer, OnePassOptimizer) and isinstance(private_module, OnePassModule):
            optimizer.summed = self._summed
            optimizer.on_zero_grad = private_module.forget
            private_module.hand_out, private_module.on_forget = self.observer.hand_out, self.observer.forget_finished

    @property
    def leakage(self) -> Leakage:
        """The ledger so far, for reading."""
        if self.ledger is None:
            raise RuntimeError(
                "no private step has been taken yet, so there is nothing to report; train first (optimizer.step())"
            )
        exact = self.settings.exact and not self.drew_masks
        rate = self.measurer.sample_rate if self.settings.amplification.secret_batches else None
        skipping = self.settings.rel_error is not None or self.settings.fil_rate < 1
        conditions = Conditions(exact=exact, sample_rate=rate, skipping=skipping, test_matrix=self.test_matrix)
        return Leakage(self.ledger, self.ids, conditions)

    def begin_pass(self, dataset_length: int) -> None:
        """A new pass over the loader starts: refuse leftovers of the last one."""
        self.tracker.begin_pass()
        if dataset_length != self.ids.num_examples:
            raise ValueError(
                f"the data set had {self.ids.num_examples} examples when make_private was called and has "
                f"{dataset_length} now; the ids would shift. Make a new engine for the new data set."
            )
        if self.optimizer.inside_logical_batch:
            raise RuntimeError(
                "the last pass over the loader was left in the middle of a logical batch (a break under "
                "BatchMemoryManager?): going on would add the next batch to it under one draw of noise. Call "
                "optimizer.discard_partial_batch() to forget the unfinished batch (nothing of it was released)."
            )
        self._staged.clear()
        self._measure_this_step = None
        self.optimizer._step_skip_queue.clear()

    def _forget_thrown_away(self, optimizer: FILOptimizer) -> None:
        """Drop what was staged for a logical batch that was given up."""
        if not optimizer.inside_logical_batch and optimizer.params[0].summed_grad is None:
            self._staged.clear()
            self._measure_this_step = None

    def _measure(self, optimizer: FILOptimizer, norms: Tensor) -> Callable[[], None]:
        """Measure a physical batch; the function that is returned confirms and stages it."""
        self._forget_thrown_away(optimizer)
        state = self.generator.get_state()
        with self._restoring(state):
            stage = self._measured(optimizer, norms, self.observer.finished())

        def confirm_and_stage() -> None:
            with self._restoring(state):
                stage()

        return confirm_and_stage

    @contextlib.contextmanager
    def _restoring(self, state: Tensor) -> Iterator[None]:
        """The generator goes back to that state if the work inside is refused."""
        try:
            yield
        except Exception:
            self.generator.set_state(state)
            raise

    def _measured(self, optimizer: FILOptimizer, norms: Tensor, forwards: list[ForwardPass]) -> Callable[[], None]:
        noise = self._same_noise(optimizer)
        forwards = _latest(forwards, len(norms))
        ids = self._ids(forwards, len(norms))
        rows = self._rows(ids)
        measure_this_step = self._measure_this_step
        if measure_this_step is None:
            measure_this_step = self._is_measured()
        scale = self.settings.clip.scale(norms, optimizer.max_grad_norm)
        clipped = (norms * scale).detach()
        loss, ledger, test_matrix = self.loss, self.ledger, self.test_matrix
        contribution = Contribution(rows, clipped.square(), measured=not self.paused)
        confirm: Callable[[], None] | None = None
        if len(rows):
            examples = [self.measurer.examples_of(forward) for forward in forwards]
            if loss is None and not self.paused:
                loss = self.measurer.identified_loss(forwards[0])
            if loss is not None and not self.paused and not measure_this_step:
                for forward in forwards:
                    self.measurer.check_loss(forward, loss)
            if ledger is None:
                self._refuse_other_calls(forwards[0])
                self.measurer.warn_if_not_smooth(forwards[0])
                ledger, test_matrix = self._new_ledger(examples[0].num_coordinates)
            if measure_this_step and not self.paused and loss is not None:
                parts = [
                    self.measurer.measured(forward, part, loss, optimizer, ledger, test_matrix, self.pace)
                    for forward, part in zip(forwards, examples, strict=True)
                ]
                measured_norms = torch.cat([part.norm for part in parts]).to(norms)
                at_outputs = [part.output_gradients for part in parts]
                confirm = self.measurer.confirmation(forwards, at_outputs, loss, (measured_norms, norms))
                added = {name: torch.cat([part.additions[name] for part in parts]) for name in parts[0].additions}
                contribution = Contribution(rows, clipped.square(), additions=added)

        def stage() -> None:
            if confirm is not None:
                confirm()
            self.loss, self.ledger, self.test_matrix = loss, ledger, test_matrix
            self._measure_this_step = measure_this_step
            self.drew_masks = self.drew_masks or self.measurer.draws_masks()
            self.observer.forget_finished()
            if len(rows):
                self._staged.append(_Staged(contribution, clipped / optimizer.max_grad_norm, frozenset(ids), noise))

        return stage

    def _summed(self, optimizer: OnePassOptimizer) -> tuple[list[Tensor], int]:
        """The clipped sums over a physical batch for each parameter, and its backward passes; the batch is staged."""
        self._forget_thrown_away(optimizer)
        forwards = self.observer.finished()
        assert isinstance(self.private_module, OnePassModule)
        self.private_module.refuse_unless_ready(len(forwards))
        with self._restoring(self.generator.get_state()):
            sums = self._sums_of(optimizer, forwards)
        self.observer.forget_finished()
        found = [
            torch.zeros_like(p) if sums is None else sums[self._names[id(p)]].reshape(p.shape) for p in optimizer.params
        ]
        return found, len(forwards)

    def _sums_of(self, optimizer: OnePassOptimizer, forwards: list[ForwardPass]) -> dict[str, Tensor] | None:
        """The clipped sums over these passes by parameter name, None for no example; what they add is staged."""
        self._same_noise(optimizer)
        ids = self._ids(forwards, sum(len(forward.ids or ()) for forward in forwards))
        rows = self._rows(ids)
        measure_this_step = self._measure_this_step
        if measure_this_step is None:
            measure_this_step = self._is_measured()
        if not ids:
            self._measure_this_step = measure_this_step
            return None
        if self.measurer.draws_masks():
            raise RuntimeError(
                "dropout is active: the pass that gives the gradients would draw other masks than the loop's. Use "
                "grad_sample_mode='hooks', or dropout of 0. This step was not taken."
            )
        examples = [self.measurer.examples_of(forward) for forward in forwards]
        loss = self.measurer.identified_loss(forwards[0]) if self.loss is None else self.loss
        ledger = self.ledger
        if ledger is None:
            self._refuse_other_calls(forwards[0])
            self.measurer.warn_if_not_smooth(forwards[0])
            ledger, _ = self._new_ledger(examples[0].num_coordinates)
        measured = measure_this_step and not self.paused
        steps = []
        for forward, part in zip(forwards, examples, strict=True):
            self.measurer.check_coordinates(part.num_coordinates, ledger)
            steps.append(self.measurer.summed(forward, part, loss, optimizer, self.pace, measured=measured))
        norms = torch.cat([step.norm for step in steps])
        self.measurer.confirmation(forwards, [step.output_gradients for step in steps], loss, (norms, norms))()
        self.loss, self.ledger, self._measure_this_step = loss, ledger, measure_this_step
        whole = joined(steps)
        self._stage(ids, rows, whole)
        return whole.sums

    def _stage(self, ids: list[int], rows: Tensor, step: FusedResult) -> None:
        contribution = Contribution(
            rows, step.clipped_norm.square(), measured=not self.paused, additions=step.additions or {}
        )
        ratio = step.clipped_norm / float(self.optimizer.max_grad_norm)
        self._staged.append(_Staged(contribution, ratio, frozenset(ids), self._same_noise(self.optimizer)))

    def _same_noise(self, optimizer: FILOptimizer) -> tuple[float, float]:
        """σ and C, refused where they have changed within a logical batch, whose release has one noise."""
        noise = float(optimizer.noise_multiplier), float(optimizer.max_grad_norm)
        for staged in self._staged:
            if staged.noise != noise:
                raise RuntimeError(
                    f"noise_multiplier and max_grad_norm changed from {staged.noise} to {noise} within one logical "
                    "batch: step their schedulers only after a whole one. Put them back, or call "
                    "optimizer.discard_partial_batch(). This step was not taken."
                )
        return noise

    def _is_measured(self) -> bool:
        """Whether chance chooses the present step."""
        rate = self.pace.rate
        return rate == 1 or bool(torch.rand((), generator=self.generator) < rate)

    def train_step(self, inputs: Any, targets: Any) -> Tensor:
        """A whole private step on the current batch; see :meth:`FILPrivacyEngine.train_step`."""
        optimizer = self.optimizer
        if self.detached:
            raise RuntimeError("the engine was taken off the model (detach), so no further step can be taken")
        if self.loss is None:
            raise RuntimeError("train_step needs the loss before it is called: pass criterion= to make_private")
        if optimizer.inside_logical_batch or optimizer._step_skip_queue:
            raise RuntimeError(
                "train_step takes whole logical batches; do not use BatchMemoryManager with it (max_memory cuts a "
                "batch into pieces by itself)"
            )
        look, self._last_norms_were_finite = self._last_norms_were_finite, _nothing
        look()
        inputs, targets = self.measurer.moved(plain((inputs, targets)))
        args, kwargs = as_call(inputs)
        finite = finiteness_check(args, kwargs, targets)
        with self._restoring(self.generator.get_state()):
            examples = self.measurer.lay_out(args, kwargs, targets, check_values=False)
            gradients = self.measurer.gradients_at(examples, self.loss)
            step = self._from_one_pass(gradients, args, kwargs, targets, finite)
        if step is None:
            finite()
            return self._plain_step(args, kwargs, targets)
        self.measurer.write_buffers(gradients)
        optimizer.release([step.sums[self._names[id(p)]].reshape(p.shape) for p in optimizer.params])
        return step.losses.mean() if self.settings.loss_reduction == "mean" else step.losses.sum()

    def _from_one_pass(
        self,
        gradients: ExampleGradients,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        targets: Any,
        finite: Callable[[], None],
    ) -> FusedResult | None:
        """What one recorded pass gives; None where it does not fit."""
        if not self.settings.chosen_estimator.one_pass or self.settings.needs.products:
            return None
        batch = PrivateBatch(gradients, self.measurer.mechanism(self.optimizer), self.measurer.plan(gradients))
        if (len(gradients) and not self.measurer.fits_one_pass(batch)) or self.measurer.would_write_often(batch):
            return None
        forward = ForwardPass(self.tracker.ids, self.tracker.batch, args, kwargs, None)
        try:
            return self._fused(batch, forward, targets, finite)
        except UnsupportedCallError as error:  # of a batch that is not as the trial's
            self.measurer.give_up_one_pass(gradients, str(error))
            return None

    def _fused(
        self, batch: PrivateBatch, forward: ForwardPass, targets: Any, finite: Callable[[], None]
    ) -> FusedResult:
        """The step's sums; its contribution is staged."""
        current = self._current_batch_check((forward.args, forward.kwargs), targets)
        settings, optimizer, gradients, count = self.settings, self.optimizer, batch.gradients, len(batch.gradients)
        self._staged.clear()
        ids = self._ids([forward], count)
        if not ids:
            empty = torch.zeros(0, dtype=gradients.dtype, device=gradients.device)
            nothing = {k: torch.zeros_like(v) for k, v in gradients.parameters.items()}
            return FusedResult(empty, empty, empty, nothing, None)
        measured = self._is_measured() and not self.paused
        ledger = self.ledger
        if ledger is None:
            finite()
            self._refuse_other_calls(forward)
            self.measurer.warn_if_not_smooth(forward)
            ledger, _ = self._new_ledger(gradients.num_coordinates)
        self.measurer.check_coordinates(gradients.num_coordinates, ledger)
        seeds = Draws.seeds_from(self.pace.num_probes, self.generator) if measured else ()
        wanted = Wanted(settings.track, seeds, self.pace.rate, True, False, settings.estimator)
        assert self.loss is not None
        even = ignored_targets_check(self.loss, targets)
        step = self.measurer.run_once(batch, wanted, optimizer)
        rows = self._rows(ids)
        finite()
        current()
        even()
        self._look_at_norms(step.norm)
        self.measurer.confirm_losses(forward.args, forward.kwargs, targets, self.loss, step.losses)
        self.ledger = ledger
        self._stage(ids, rows, step)
        return step

    def _look_at_norms(self, norms: Tensor) -> None:
        """Raise where a gradient is not finite; on a GPU, which has not computed them yet, at the next step."""
        total = read_later(norms.sum())

        def confirm(consequence: str) -> None:
            if not math.isfinite(float(total())):
                raise RuntimeError(NOT_FINITE.format(consequence))

        if norms.device.type != "cuda":
            confirm("This step was not taken.")
            return
        self._last_norms_were_finite = partial(
            confirm, "It was the batch of the last step, which was taken: go back to weights of before."
        )

    def _current_batch_check(self, inputs: Any, targets: Any) -> Callable[[], None]:
        """Begin to look whether a step is given a batch read before the last; what is returned raises if so.

        Inputs decide, or targets where the inputs are no batch's (they were augmented): those of the last batch are
        right, those of an earlier one are not, and nothing is said of others. Of rows the first and the last count.
        """
        now, given = _tensors(self.tracker.batch), _tensors(inputs)
        if any(a.data_ptr() == b.data_ptr() and a.shape == b.shape for a in given for b in now):
            return lambda: None
        kinds = {(leaf.shape, leaf.dtype) for leaf in (*given, *_tensors(targets))}
        before = [
            leaf for batch in self.tracker.earlier for leaf in _tensors(batch) if (leaf.shape, leaf.dtype) in kinds
        ]
        if not before:
            return lambda: None
        found = read_later(
            torch.stack(
                [
                    _any_alike(part, leaves, self.measurer.device)
                    for part in (given, _tensors(targets))
                    for leaves in (now, before)
                ]
            )
        )

        def confirm() -> None:
            input_is_last, input_is_earlier, target_is_last, target_is_earlier = found().tolist()
            if not input_is_last and (input_is_earlier or (target_is_earlier and not target_is_last)):
                raise RuntimeError(
                    "the step is given a batch that was read before the last one, and would be booked for the last "
                    "one's examples: was another batch read meanwhile (a prefetcher, an evaluation on the same "
                    "loader)? Read a batch, take its step, then read the next. This step was not taken."
                )

        return confirm

    def _plain_step(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], targets: Any) -> Tensor:
        """The step as a training loop takes it, where one batched pass does not fit the model or the settings."""
        assert self.loss is not None
        self.optimizer.zero_grad()
        loss = self.loss(self.private_module(*args, **kwargs), targets)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def _book(self, optimizer: FILOptimizer) -> None:
        """The logical batch has been released: enter what was staged."""
        for staged in self._staged:
            assert self.ledger is not None
            self.ledger.add(staged.contribution)
            self.pace.note(staged.contribution)
        if self.ledger is not None:
            self.ledger.steps += 1
            self.ledger.missed_steps += int(self.paused)
            self.timeline.note(self.ledger.steps, self.ledger.sums["trace"], self.ledger.num_coordinates)
        device = self.history.ratio.device
        rows, ratios = [s.contribution.rows for s in self._staged], [s.ratio for s in self._staged]
        self.history.step(
            _joined(rows, torch.zeros(0, dtype=torch.long, device=device)),
            _joined(ratios, torch.zeros(0, device=device)),
            float(optimizer.noise_multiplier),
            self._accounted_rate(),
        )
        self._staged.clear()
        self._measure_this_step = None
        self._set_pace(optimizer)
        every = self.settings.norm_refresh
        if every is not None and self.loss is not None and self.history.steps % every == 0:
            self.refresh_norms(self.dataset, self.collate_fn)

    def _refuse_other_calls(self, forward: ForwardPass) -> None:
        """Raise where norms shall be refreshed and the loop calls the model with other inputs than a batch's."""
        if self.settings.norm_refresh is None:
            return
        args, kwargs = as_call(split_batch(forward.batch, self.settings.batch_to_inputs)[0])
        if len(args) + len(kwargs) != len(forward.args) + len(forward.kwargs):
            raise ValueError(
                f"norm_refresh={self.settings.norm_refresh} calls the model with all of a batch but its targets "
                f"({len(args)} positional inputs, {sorted(kwargs)} by name), the loop with {len(forward.args)} and "
                f"{sorted(forward.kwargs)}; pass batch_to_inputs=a function that maps a batch to (inputs, targets)"
            )

    def _set_pace(self, optimizer: FILOptimizer) -> None:
        if self.pace.target is None or self.ledger is None:
            return
        if self.history.steps % self._steps_between_looks(optimizer) == 0:
            share = optimizer.expected_batch_size / self.ids.num_examples
            self.pace.update(self.ledger, self.history.steps * share)

    def _steps_between_looks(self, optimizer: FILOptimizer) -> int:
        return max(1, round(self.ids.num_examples / (_LOOKS_PER_PASS * optimizer.expected_batch_size)))

    def _ids(self, forwards: list[ForwardPass], num_gradients: int) -> list[int]:
        """The numbers of the examples in these passes, checked against the gradients and what is staged."""
        if not forwards and num_gradients:
            raise RuntimeError(
                "optimizer.step() was called with gradients that did not come through the private model's output; call "
                "the model that make_private returned, then loss.backward()"
            )
        ids: list[int] = []
        for forward in forwards:
            if forward.ids is None:
                raise RuntimeError(
                    "the model was trained on a batch that did not come from the loader that make_private returned, so "
                    "its examples are unknown; iterate over that loader"
                )
            ids += forward.ids
        if not ids and num_gradients <= 1:  # an empty batch, or Opacus's stand-in row for one (rand_on_empty): nobody
            return ids
        if len(ids) != num_gradients:
            raise RuntimeError(
                f"{len(ids)} examples were seen in {len(forwards)} forward passes, but there are {num_gradients} "
                "per-example gradients. Call the model once per batch, with the whole batch; to use it on parts or "
                "twice, put both calls into one module."
            )
        if len(set(ids).union(*(staged.ids for staged in self._staged))) != len(ids) + sum(
            len(staged.ids) for staged in self._staged
        ):
            raise RuntimeError(
                "an example occurs twice under one draw of noise: its gradient would count twice. Check the sampler "
                "(no replacement within a batch), do not accumulate gradients over passes that share examples."
            )
        return ids

    def _rows(self, ids: list[int]) -> Tensor:
        return torch.tensor(ids, dtype=torch.long).to(self.history.ratio.device, non_blocking=True)

    def _new_ledger(self, num_coordinates: int) -> tuple[Ledger, Tensor | None]:
        settings, device = self.settings, self.history.ratio.device
        rank = min(settings.sketch_rank, num_coordinates)
        needed = Ledger.bytes_needed(self.ids.num_examples, num_coordinates, settings.track, rank)
        needed += NormHistory.bytes_needed(self.ids.num_examples)
        _refuse_memory(needed, settings)
        logger.info("the ledger takes %.1f MiB on %s", needed / 2**20, device)
        ledger = Ledger(self.ids.num_examples, num_coordinates, track=settings.track, sketch_rank=rank, device=device)
        ledger.steps = self.history.steps  # of empty batches
        if not settings.needs.products:
            return ledger, None
        gaussian = torch.randn(num_coordinates, rank, generator=self.generator, dtype=torch.float64)
        return ledger, torch.linalg.qr(gaussian).Q.to(device)

    def refresh_norms(self, dataset: Any, collate_fn: Callable[[list[Any]], Any], batch_size: int = 256) -> None:
        """Look up every example's clipped gradient norm at the present weights, for individual ε."""
        if self.loss is None:
            raise RuntimeError("the loss is not known before the first step; pass criterion= to refresh earlier")
        device = self.history.ratio.device
        for start in range(0, self.ids.num_examples, batch_size):
            rows = range(start, min(start + batch_size, self.ids.num_examples))
            batch = collate_fn([dataset[row] for row in rows])
            ratio = self.measurer.clipped_ratios(batch, self.loss, self.optimizer.max_grad_norm)
            self.history.replace(torch.tensor(rows, device=device), ratio)

    def plis(self, rows: Sequence[int], *, private: bool, batch_size: int = 256) -> dict[Hashable, Tensor]:
        """The PLIS of these examples at the present weights, by private tensor, [rows, …]."""
        if self.loss is None:
            raise RuntimeError("the loss is not known before the first step; pass criterion= to make_private")
        optimizer, settings = self.optimizer, self.settings
        max_grad_norm = float(optimizer.max_grad_norm)
        parts: dict[Hashable, list[Tensor]] = {}
        for start in range(0, len(rows), batch_size):
            batch = self.collate_fn([self.dataset[row] for row in rows[start : start + batch_size]])
            gradients = self.measurer.gradients_of(batch, self.loss)
            found = susceptibility(
                gradients,
                noise_std=float(optimizer.noise_multiplier) * max_grad_norm if private else None,
                max_grad_norm=max_grad_norm if private else None,
                clip=settings.clip,
                max_memory=settings.max_memory,
            )
            for key, part in gradients.examples.maps(found.gradient).items():
                parts.setdefault(key, []).append(part)
        return {key: torch.cat(pieces) for key, pieces in parts.items()}

    def _accounted_rate(self) -> float:
        history = self.accountant_history()
        return float(history[-1][1]) if history else 1.0

    def accountant_history(self) -> list[tuple[float, float, int]]:
        """(σ, q, steps) of the DP accountant; replaced by the engine."""
        return []

    state_dict_keys = ("ledger", "history", "timeline", "test_matrix", "drew_masks", "generator", "pace")

    @property
    def inside_logical_batch(self) -> bool:
        """Whether something is staged that is not booked yet."""
        return bool(self._staged)

    def state_dict(self) -> dict[str, Any]:
        """Ledger, norm history, timeline, test matrix and the probes' generator."""
        if self._staged:
            raise RuntimeError("the state can be saved only between logical batches; finish the batch first")
        return {
            "ledger": self.ledger.state_dict() if self.ledger is not None else None,
            "history": self.history.state_dict(),
            "timeline": self.timeline.state_dict(),
            "test_matrix": self.test_matrix,
            "drew_masks": self.drew_masks,
            "generator": self.generator.get_state(),
            "pace": self.pace.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`; checks everything before it changes anything."""
        device = self.history.ratio.device
        missing = [key for key in self.state_dict_keys if key not in state]
        if missing:
            raise ValueError(f"the run's state lacks {missing}; was it saved by another version?")
        ledger = None
        if state["ledger"] is not None:
            ledger = Ledger.from_state_dict(state["ledger"], device)
            if ledger.num_examples != self.ids.num_examples:
                raise ValueError(
                    f"the saved ledger has {ledger.num_examples} examples, the data set {self.ids.num_examples}"
                )
            if set(ledger.track) != set(self.settings.track):
                raise ValueError(
                    f"the saved ledger tracks {ledger.track}, this run {self.settings.track}; pass the same track="
                )
        history = NormHistory(self.ids.num_examples, device)
        history.load_state_dict(state["history"])
        timeline = Timeline.from_state_dict(state["timeline"], device)
        self.generator.set_state(state["generator"].cpu())
        self.pace.load_state_dict(state["pace"])
        self.ledger, self.history, self.timeline = ledger, history, timeline
        self.drew_masks = bool(state["drew_masks"])
        matrix = state["test_matrix"]
        self.test_matrix = matrix.to(device) if matrix is not None else None
        self._staged.clear()
        self._measure_this_step = None
        self._last_norms_were_finite = _nothing


def _latest(forwards: list[ForwardPass], num_gradients: int) -> list[ForwardPass]:
    """The latest forward passes that account for the gradients; earlier ones were thrown away."""
    for start in range(len(forwards) - 1, -1, -1):
        if sum(len(forward.ids or ()) for forward in forwards[start:]) == num_gradients:
            return forwards[start:]
    return forwards


def _nothing() -> None:
    """No look to take."""


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tensors_of(tree) if leaf.ndim and len(leaf)]


def _looked_at(leaf: Tensor) -> Tensor:
    """All numbers of a vector; the first and the last row of anything larger."""
    return leaf if leaf.ndim == 1 else leaf[[0, -1]]


def _any_alike(some: list[Tensor], others: list[Tensor], device: torch.device) -> Tensor:
    """Whether any of them, on ``device``, has the numbers of any other of its shape and dtype; see ``_looked_at``.

    A tensor of one number throughout, such as labels of a single class, is no sign of anything.
    """
    pairs = [
        (_looked_at(a), _looked_at(b).to(device))
        for a in some
        for b in others
        if a.shape == b.shape and a.dtype == b.dtype
    ]
    found = [(a == b).all() & (a != a.flatten()[0]).any() for a, b in pairs]
    return torch.stack(found).any() if found else torch.zeros((), dtype=torch.bool, device=device)


def _joined(parts: list[Tensor], empty: Tensor) -> Tensor:
    return torch.cat(parts) if len(parts) > 1 else next(iter(parts), empty)


def _refuse_memory(needed: int, settings: Settings) -> None:
    if needed > settings.max_ledger_memory:
        raise MemoryError(
            f"the ledger would take {needed / 2**30:.2f} GiB, over the limit of "
            f"{settings.max_ledger_memory / 2**30:.2f} GiB. Track less (track={settings.track}), or confirm with "
            f"max_ledger_memory={needed}."
        )


def _name_of(criterion: Any) -> str:
    return repr(criterion) if isinstance(criterion, nn.Module) else getattr(criterion, "__name__", repr(criterion))
