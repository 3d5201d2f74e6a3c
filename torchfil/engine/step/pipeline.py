"""One step in order: record → sums, norms and accounting → checks → stage; release and booking follow in the optimizer.

The user's loop and ``train_step`` are two ways in. Where Opacus's hooks have formed per-example gradients (the loop
reads ``p.grad_sample``), the sums are theirs, and the engine's own norms must agree.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from torchfil.accounting.ledger import Ledger
from torchfil.engine.loader import plain
from torchfil.engine.looks import DatasetLooks
from torchfil.engine.losses import IdentifiedLoss, check_ignored_targets_later
from torchfil.engine.optimizer import FILOptimizer
from torchfil.engine.options import RunOptions
from torchfil.engine.replica import Replica, buffers_kept
from torchfil.engine.run import Noise, Run
from torchfil.engine.step.asking import Places, with_alternatives
from torchfil.engine.step.checks import StepChecks, nothing
from torchfil.engine.step.evaluation import Evaluator
from torchfil.engine.step.forwards import ForwardPass, Observer
from torchfil.engine.step.values import StepValues, Wanted, joined
from torchfil.fisher.batch import PrivateBatch
from torchfil.fisher.draws import Draws
from torchfil.fisher.masks import call_and_record_masks, replayed_masks
from torchfil.fisher.mechanism import Mechanism
from torchfil.fisher.recording import RecordedForward
from torchfil.private import Examples, as_call, check_finite_later
from torchfil.utils.trees import tensors_of

__all__ = ["Computed", "StepPipeline"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Computed:
    """A physical batch that was computed and not staged yet.

    Attributes:
        sums: Σ_i g̃_i by parameter name; None for no example, or where Opacus has the gradients.
        backward_passes: Of the loop, that it came from.
        confirm_and_stage: Ends the checks that have begun, raising where one fails, and stages the batch.
        losses: ℓ, [batch], where they were wanted.
    """

    sums: dict[str, Tensor] | None
    backward_passes: int
    confirm_and_stage: Callable[[], None]
    losses: Tensor | None = None


@dataclass(frozen=True)
class _Setting:
    """What the batches of a step have in common; what is new in it is kept only when the step is staged."""

    noise: Noise
    loss: IdentifiedLoss | None
    ledger: Ledger
    test_matrix: Tensor | None
    measure: bool


class StepPipeline:
    """Takes the forward passes of a step and gives what is released and booked of them.

    Args:
        run: Where batches are staged.
        replica: The model.
        evaluator: Computes sums, norms and Fisher information.
        checks: Compares with what the loop did.
        observer: Has the loop's forward passes.
        looks: Looks at all examples at once.
    """

    def __init__(
        self,
        run: Run,
        replica: Replica,
        evaluator: Evaluator,
        checks: StepChecks,
        observer: Observer,
        looks: DatasetLooks,
    ) -> None:
        self.run = run
        self.options: RunOptions = run.options
        self.replica = replica
        self.evaluator = evaluator
        self.checks = checks
        self.observer = observer
        self.looks = looks
        self._closed = False
        self._last_mechanism: tuple[Noise, Mechanism] | None = None
        self._drew_nothing_at: Hashable = None  # the modules as they were when a forward pass drew no random numbers

    def _mechanism(self, noise: Noise) -> Mechanism:
        """Clipping, noise and subsampling of a release; that of the last noise is kept."""
        if self._last_mechanism is None or self._last_mechanism[0] != noise:
            made = self.options.mechanism(noise.noise_multiplier, noise.max_grad_norm)
            self._last_mechanism = noise, made
        return self._last_mechanism[1]

    # ------------------------------------------------------------------ the user's loop

    def record_forward(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], batch: Any
    ) -> tuple[Examples, RecordedForward] | None:
        """The recorded pass over the loop's inputs, by the live model; None where the loop must run it plainly."""
        loss = self.run.loss
        if loss is None or self.run.ledger is None:  # nothing was tried yet
            return None
        args, kwargs = plain((args, kwargs))
        forward = ForwardPass(None, batch, args, kwargs, None)
        try:
            examples = self._examples(forward)
        except (ValueError, TypeError):  # told at the step, where the loop expects it
            return None
        recorded = self.evaluator.recorded_forward(examples, self.replica.live_gradients(examples, loss))
        return None if recorded is None else (examples, recorded)

    def take(
        self, optimizer: FILOptimizer, norms: Tensor | None = None, clipped_norms: Tensor | None = None
    ) -> Computed:
        """Compute what the loop's finished passes release, and begin the checks.

        Args:
            optimizer: With the present noise and threshold.
            norms: ‖g‖ of the per-example gradients that Opacus has formed, [batch]; None: the sums are wanted.
            clipped_norms: ‖g̃‖ of them, [batch].
        """
        if not optimizer.inside_logical_batch and optimizer.params[0].summed_grad is None:
            self.run.drop_staged()  # of a logical batch that was given up
        self.checks.check_last_norms()
        forwards = self.observer.finished()
        if norms is None:
            self.observer.check_ready()
        else:
            forwards = _latest(forwards, len(norms))

        state = self.run.generator.get_state()
        with self.run.generator_kept(state):
            computed = self._computed(optimizer, forwards, norms, clipped_norms)

        def confirm_and_stage() -> None:
            with self.run.generator_kept(state):
                computed.confirm_and_stage()

        return replace(computed, confirm_and_stage=confirm_and_stage)

    def book(self, optimizer: FILOptimizer) -> None:
        """The logical batch has been released: enter it, and look up all norms where that is due."""
        self.run.book(optimizer)
        every = self.options.accounting.norm_refresh
        if every is not None and self.run.loss is not None and self.run.history.steps % every == 0:
            self.looks.refresh_norms(optimizer)

    def forget(self) -> None:
        """Gradients were thrown away."""
        self.observer.forget_finished()

    def backward_passes(self) -> int:
        """How many of the loop's backward passes wait for a step."""
        return len(self.observer.finished())

    def close(self) -> None:
        """No further step is taken."""
        self._closed = True
        self.observer.pending.clear()

    def _computed(
        self,
        optimizer: FILOptimizer,
        forwards: list[ForwardPass],
        norms: Tensor | None,
        clipped_norms: Tensor | None,
    ) -> Computed:
        noise = self.run.check_noise(optimizer)
        count = sum(map(_num_rows, forwards)) if norms is None else len(norms)
        ids = self.run.check_ids(forwards, count)
        measure = self.run.chooses_to_measure()
        parted = self.observer.tracker.parts
        passes = parted if parted > 1 else len(forwards)
        if not ids:
            return self._staging(None, [], ids, noise, measure, passes)

        forwards = [forward for forward in forwards if forward.ids]  # a part of a draw may be empty
        if norms is None:  # under hooks the divided gradients are those that Opacus clips
            self.checks.note_division(forwards, self.run.loss, passes)
        examples = [self._examples(forward) for forward in forwards]
        setting = self._setting(forwards[0], examples[0], noise, measure, needs_loss=norms is None)
        parts: list[StepValues] = []
        confirmations: list[Callable[[], None]] = []
        for forward, part in zip(forwards, examples, strict=True):
            values, begun = self._evaluated(forward, part, setting, summed=norms is None)
            confirmations += begun
            if values is not None:  # of several passes, the next would overwrite the sums
                parts.append(values.kept(sums=len(forwards) > 1))
        step = joined(parts) if parts else None

        # The clipped norms that count are those of what is released.
        if norms is not None and clipped_norms is not None:
            if step is not None:
                confirmations.append(self.checks.begin_norm_check(step.norm, norms))
                step = replace(step, clipped_norm=clipped_norms, sums={})
            else:
                step = StepValues(None, norms, clipped_norms, {}, None)
        assert step is not None
        return self._staging(step, confirmations, ids, noise, measure, passes, setting)

    def _setting(
        self, forward: ForwardPass, examples: Examples, noise: Noise, measure: bool, *, needs_loss: bool
    ) -> _Setting:
        """The loss, identified where it is not known yet, and the ledger, made at the first step."""
        run = self.run
        loss = run.loss
        if loss is None and (needs_loss or not run.paused):
            loss = self.checks.identified_loss(forward)
            logger.info("the training loop's loss was identified as %s", loss.name)
        ledger, test_matrix = run.ledger, run.test_matrix
        if ledger is None:
            self.checks.check_calls_for_refresh(forward)
            self.checks.warn_if_not_smooth(forward)
            ledger, test_matrix = run.new_ledger(examples.num_coordinates)
        return _Setting(noise, loss, ledger, test_matrix, measure)

    def _evaluated(
        self, forward: ForwardPass, examples: Examples, setting: _Setting, *, summed: bool
    ) -> tuple[StepValues | None, list[Callable[[], None]]]:
        """What one forward pass gives, None where nothing of it is needed, and the checks that have begun."""
        loss = setting.loss
        measured = (setting.measure or setting.noise.noise_multiplier == 0) and not self.run.paused
        if loss is None or not (summed or measured):
            if loss is not None and not self.run.paused:
                self.checks.check_loss(forward, loss)
            return None, []
        check_coordinates(examples.num_coordinates, setting.ledger)
        questions: Places = ()
        if measured and self.options.accounting.questions:
            examples, questions = with_alternatives(
                examples, self.options.accounting.questions, self._lay_out, check_values=self.run.ledger is None
            )

        # A loss that is not the loop's would spoil the trial, so it is looked at first.
        gradients = self.replica.gradients(examples, loss)
        from_loop = forward.outputs is not None
        looked_at = from_loop and not self.evaluator.has_plan(gradients)
        if looked_at:
            self.checks.check_loss(forward, loss)
        batch = PrivateBatch(gradients, self._mechanism(setting.noise), self.evaluator.plan(gradients))

        confirmations: list[Callable[[], None]] = []

        def look(at_outputs: tuple[Tensor, ...]) -> None:
            confirm = self.checks.begin_output_check(forward, at_outputs, loss)
            if self.replica.device.type != "cuda":
                confirm()  # before the costly part
            confirmations.append(confirm)

        wanted = self._wanted(setting, measured, questions, summed=summed)
        values = self.evaluator.evaluate(batch, wanted, look if from_loop else None, forward.recorded)
        if measured:
            values = self._measured_anew(batch, values, wanted, forward.ids or [])
        if from_loop and not confirmations:  # a mapped pass has no gradients at outputs, but the same losses
            if not looked_at:
                self.checks.check_loss(forward, loss)
            assert values.losses is not None
            confirmations.append(self.checks.begin_loss_check(forward, loss, values.losses))
        confirmations.append(self.checks.begin_norm_look(values.norm, values.losses) if summed else nothing)
        if not from_loop and self.replica.written:
            confirmations.append(lambda: self._write_buffers(forward, batch))
        return values, confirmations

    def _measured_anew(self, batch: PrivateBatch, values: StepValues, wanted: Wanted, ids: list[int]) -> StepValues:
        """The same, but the few examples that are chosen for it are measured with more probes."""
        rows = self.run.exposed_rows(ids, values.clipped_norm)
        if rows is None or batch.mechanism.noiseless or self.replica.written:
            return values
        examples = replace(batch.gradients.examples, alternatives=())[rows]
        few = replace(batch, gradients=replace(batch.gradients, examples=examples))
        seeds = Draws.seeds_from(self.options.accounting.extra_probes, self.run.generator)
        anew = self.evaluator.evaluate(few, replace(wanted, seeds=seeds, summed=False, questions=()), few=True)
        assert anew.additions is not None
        return values.measured_anew(rows, anew.additions)

    def _wanted(self, setting: _Setting, measured: bool, questions: Places, *, summed: bool) -> Wanted:
        accounting, pace = self.options.accounting, self.run.pace
        return Wanted(
            track=tuple(accounting.track),
            estimator=accounting.estimator,
            seeds=Draws.seeds_from(self.run.num_probes, self.run.generator) if measured else (),
            rate=pace.rate,
            summed=summed,
            test_matrix=setting.test_matrix if measured else None,
            questions=questions,
        )

    def _lay_out(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], targets: Any) -> Examples:
        return self.replica.lay_out(args, kwargs, targets, self.options.private, check_values=False)

    def _staging(
        self,
        step: StepValues | None,
        confirmations: Sequence[Callable[[], None]],
        ids: list[int],
        noise: Noise,
        measure: bool,
        backward_passes: int,
        setting: _Setting | None = None,
    ) -> Computed:
        run = self.run

        def confirm_and_stage() -> None:
            for confirm in confirmations:
                confirm()
            if setting is not None:
                run.loss, run.ledger, run.test_matrix = setting.loss, setting.ledger, setting.test_matrix
            if step is None:
                run.stage((), torch.zeros(0), None, noise, measure=measure)
            else:
                run.stage(ids, step.clipped_norm, step.additions, noise, measure=measure)
            self.observer.forget_finished()

        sums = step.sums if step is not None and step.sums else None
        return Computed(sums, backward_passes, confirm_and_stage, step.losses if step is not None else None)

    def _examples(self, forward: ForwardPass) -> Examples:
        """The examples of a forward pass with their private coordinates laid out, and their masks."""
        examples = forward.examples
        if examples is None:
            targets = self.checks.targets(forward)
            examples = self.replica.lay_out(forward.args, forward.kwargs, targets, self.options.private)
        return self._with_masks(examples, forward)

    def _with_masks(self, examples: Examples, forward: ForwardPass) -> Examples:
        return replace(examples, masks=self.replica.masks_by_example(forward.masks, forward.args, forward.kwargs))

    # ------------------------------------------------------------------ train_step

    def train_step(self, optimizer: FILOptimizer, inputs: Any, targets: Any) -> Tensor:
        """A whole private step on the current batch; see :meth:`FILPrivacyEngine.train_step`."""
        if self._closed:
            raise RuntimeError("the engine was taken off the model (detach), so no further step can be taken")
        if self.observer.tracker.parts > 1:
            raise RuntimeError(
                "train_step takes whole draws; leave out accumulation_steps and make the DataLoader with so many times "
                "its batch_size (max_memory cuts a batch into pieces by itself)"
            )
        if self.run.loss is None:
            raise RuntimeError("train_step needs the loss before it is called: pass criterion= to make_private")
        if optimizer.inside_logical_batch or optimizer._step_skip_queue:
            raise RuntimeError(
                "train_step takes whole logical batches; do not use BatchMemoryManager with it (max_memory cuts a "
                "batch into pieces by itself)"
            )
        self.checks.check_last_norms()
        self.run.drop_staged()
        with self.run.generator_kept(self.run.generator.get_state()):
            step = self._computed_without_loop(optimizer, self.run.loss, inputs, targets)
            step.confirm_and_stage()

        optimizer.release(step.sums)
        losses = step.losses if step.losses is not None else torch.zeros(0, device=self.replica.device)
        return losses.mean() if self.options.loss_reduction == "mean" else losses.sum()

    def _computed_without_loop(
        self, optimizer: FILOptimizer, loss: IdentifiedLoss, inputs: Any, targets: Any
    ) -> Computed:
        """As in a loop, but the checks of the batch itself take the place of those of the loop's passes."""
        inputs, targets = self.checks.moved(plain((inputs, targets)))
        args, kwargs = as_call(inputs)
        check_finite = check_finite_later(args, kwargs, targets)
        check_batch = self.checks.begin_batch_check((args, kwargs), targets)
        check_even = check_ignored_targets_later(loss, targets)
        tracker = self.observer.tracker
        forward = ForwardPass(tracker.ids, tracker.batch, args, kwargs, None)

        noise = self.run.check_noise(optimizer)
        examples = self.replica.lay_out(args, kwargs, targets, self.options.private, check_values=False)
        ids = self.run.check_ids([forward], len(examples))
        measure = self.run.chooses_to_measure()
        if not ids:
            return self._staging(None, [], ids, noise, measure, 1)
        if self.run.ledger is None:
            check_finite()
        if self._may_draw():
            forward.masks = self._fresh_masks(forward)
            examples = self._with_masks(examples, forward)
        setting = self._setting(forward, examples, noise, measure, needs_loss=True)
        values, confirmations = self._evaluated(forward, examples, setting, summed=True)
        assert values is not None
        values = values.kept(sums=False)  # they are released before the next pass

        def check_losses() -> None:
            assert values.losses is not None
            alone = values.output_gradients is None  # mapped: only the losses tell whether the model mixes examples
            self.checks.check_losses(forward, targets, loss, values.losses, now=alone)

        checks = [check_finite, check_batch, check_even, check_losses, *confirmations]
        return self._staging(values, checks, ids, noise, measure, 1, setting)

    def _may_draw(self) -> bool:
        """Whether a forward pass may draw random numbers; not where one drew none with the modules as they are."""
        self.replica.follow()
        return self.replica.drops_now() or self.replica.key != self._drew_nothing_at

    def _fresh_masks(self, forward: ForwardPass) -> tuple[Tensor, ...]:
        """Masks as the live model draws them for a batch; its buffers stay, as this is no pass of the loop's."""

        def run_live() -> Any:
            with torch.no_grad(), buffers_kept(self.replica.live):
                return self.replica.live(*forward.args, **forward.kwargs)

        masks = call_and_record_masks(run_live, self.replica.device, expected=True)[1]
        if not masks:
            self._drew_nothing_at = self.replica.key
        return masks

    def _write_buffers(self, forward: ForwardPass, batch: PrivateBatch) -> None:
        """Bring the model's buffers to where its forward pass takes them: once, however the passes were cut."""
        if not self.evaluator.runs_in_pieces(batch):
            self.replica.write_buffers(batch.gradients)
            return
        with torch.no_grad(), replayed_masks(forward.masks):
            self.replica.live(*forward.args, **forward.kwargs)


def check_coordinates(num_coordinates: int, ledger: Ledger) -> None:
    """Raise unless a batch has as many private coordinates as the ledger."""
    if num_coordinates != ledger.num_coordinates:
        raise ValueError(
            f"this batch has {num_coordinates} private coordinates per example, earlier ones "
            f"{ledger.num_coordinates}; pad inputs to one length so that the sums compare"
        )


def _num_rows(forward: ForwardPass) -> int:
    """How many examples went through the model."""
    sizes = [len(leaf) for leaf in tensors_of(forward.outputs) if leaf.ndim]
    return sizes[0] if sizes else len(forward.ids or ())


def _latest(forwards: list[ForwardPass], num_gradients: int) -> list[ForwardPass]:
    """The latest forward passes that account for the gradients; earlier ones were thrown away."""
    for start in range(len(forwards) - 1, -1, -1):
        if sum(len(forward.ids or ()) for forward in forwards[start:]) == num_gradients:
            return forwards[start:]
    return forwards
