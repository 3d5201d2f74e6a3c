"""One step in order: record → sums, norms and accounting → checks → stage; release and booking follow in the optimizer.

The user's loop and ``train_step`` are the two entry points. If Opacus's hooks have formed per-example gradients (the
loop reads ``p.grad_sample``), the sums come from them, and the engine's own norms must agree.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from torchfil.engine.batches import make_current, plain
from torchfil.engine.graphs import StartedGraph
from torchfil.engine.loader import split_batch
from torchfil.engine.losses import NO_TARGETS, IdentifiedLoss, LossInside, LossMismatchError
from torchfil.engine.measure import StepValues, joined
from torchfil.engine.optimizer import FILOptimizer
from torchfil.engine.replica import buffers_kept
from torchfil.engine.step.checks import OTHER_OWN_LOSS
from torchfil.engine.step.forwards import ForwardPass
from torchfil.engine.step.stages import Computed, StepStages
from torchfil.fisher.gradients import differentiable_twice
from torchfil.fisher.masks import call_and_record_masks
from torchfil.fisher.precision import autocast_now
from torchfil.fisher.recording import RecordedForward
from torchfil.private import Examples, as_call, check_finite_later
from torchfil.utils.trees import tensors_of

__all__ = ["StepPipeline"]


class StepPipeline(StepStages):
    """Takes the forward passes of a step and computes what is released and booked.

    Args:
        run: Stages the batches.
        replica: The model.
        executor: Computes sums, norms and Fisher information.
        checks: Compares them with what the loop did.
        observer: Holds the loop's forward passes.
        looks: Looks at all examples at once.
    """

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self._inside = LossInside(self.replica)
        self._computes_loss = False  # whether train_step found the loss in the model's outputs
        self._drew_nothing_at: Hashable = None  # the modules as they were when a forward pass drew no random numbers

    # ------------------------------------------------------------------ the user's loop

    def record_forward(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], batch: Any
    ) -> tuple[Examples, RecordedForward | StartedGraph] | None:
        """The forward half of the pass over the loop's inputs; None if the loop must run a plain pass.

        It is recorded by the live model, or replayed as a CUDA graph with masks that are drawn without the model.
        """
        loss = self.run.loss
        if loss is None or self.run.ledger is None:  # there was no trial yet
            return None
        args, kwargs = plain((args, kwargs))
        forward = ForwardPass(None, batch, args, kwargs, None)
        try:
            examples = self._examples(forward)
        except (ValueError, TypeError):  # reported at the step, where the loop expects it
            return None

        # on a CPU the live model's own pass is recorded
        gradients = self._in_precision(self.replica.live_gradients(examples, loss), autocast_now(self.replica.device))
        recorded = self.executor.begin_live(gradients)
        if recorded is not None:
            return examples, recorded
        if self.replica.device.type != "cuda":
            return None

        # on a GPU a graph is replayed, which needs masks and weights beforehand
        drawn = self.replica.masks_again(args, kwargs) if self.replica.drops_now() else ()
        if drawn is None:
            return None
        ids = self.observer.tracker.ids
        if ids is None or len(ids) != len(examples):  # reported at the step
            return None
        masked = replace(examples, masks=self.replica.masks_by_example(drawn, args, kwargs))
        masked = self._with_weights(masked, ids)
        copied = self._in_precision(self.replica.gradients(masked, loss), gradients.autocast)
        begun = self.executor.begin_graph(copied)
        return None if begun is None else (examples, begun)

    def take(
        self, optimizer: FILOptimizer, norms: Tensor | None = None, clipped_norms: Tensor | None = None
    ) -> Computed:
        """Compute what the loop's finished passes release, and begin the checks.

        Args:
            optimizer: Has the current noise and threshold.
            norms: ‖g‖ of the per-example gradients that Opacus has formed, [batch]; None: compute the sums.
            clipped_norms: Their ‖g̃‖, [batch].
        """
        self.replica.gather()  # first, because a rank that refuses would leave the others waiting
        if not optimizer.inside_logical_batch and optimizer.params[0].summed_grad is None:
            self.run.staged.clear()  # left from a logical batch that was given up
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
        """Book the released logical batch, and refresh all norms if that is due."""
        self.run.book(optimizer)
        every = self.options.accounting.norm_refresh
        if every is not None and self.run.loss is not None and self.run.history.steps % every == 0:
            self.looks.refresh_norms(optimizer)
        self.replica.let_go()

    def forget(self) -> None:
        """Forget gradients that were discarded."""
        self.observer.forget_finished()

    def clip_weights(self, num_gradients: int) -> Tensor | None:
        """ω of the examples in the loop's finished passes, [batch]; None: all 1, or another number of examples."""
        ids = [number for forward in _latest(self.observer.finished(), num_gradients) for number in forward.ids or ()]
        return self.run.weights_of(ids) if len(ids) == num_gradients else None

    def backward_passes(self) -> int:
        """How many of the loop's backward passes await a step."""
        return len(self.observer.finished())

    def facts(self) -> dict[str, float | None]:
        """What must be the same on all ranks, by name; None: not known yet."""
        ledger = self.run.ledger
        size = ledger.laid_out if ledger is not None and ledger.by_coordinate else None
        return {"the number of steps": self.run.history.steps, "the number of private coordinates": size}

    def settle_ids(self) -> None:
        """See :meth:`LogicalBatch.settle_ids`."""
        self.run.staged.settle_ids()

    def give_up(self) -> None:
        """Give up the logical batch, which is not released."""
        self.run.staged.clear()
        self.replica.let_go()

    def refused(self) -> None:
        """Note that this process has refused a step; a single process may recover from that."""
        self.replica.let_go()

    def close(self) -> None:
        """Take no further steps."""
        self._closed = True
        self.observer.pending.clear()

    def _computed(
        self,
        optimizer: FILOptimizer,
        forwards: list[ForwardPass],
        norms: Tensor | None,
        clipped_norms: Tensor | None,
    ) -> Computed:
        noise = self.run.staged.check_noise(optimizer)
        count = sum(map(_num_rows, forwards)) if norms is None else len(norms)
        ids = self.run.check_ids(forwards, count)
        measure = self.run.chooses_to_measure()
        parted = self.observer.tracker.parts
        passes = parted if parted > 1 else len(forwards)
        if not ids:
            return self._staging(None, [], ids, noise, measure, passes)

        forwards = [forward for forward in forwards if forward.ids]  # a part of a draw may be empty
        if norms is None:  # with hooks, Opacus clips the divided gradients
            self.checks.note_division(forwards, self.run.loss, passes)
        for forward in forwards:
            self.checks.check_rows(forward)
        examples = [self._examples(forward) for forward in forwards]
        loss = self.run.loss
        if loss is None and (norms is None or not self.run.paused):
            loss = self._identified(forwards[0])
        if loss is not None and loss.is_models_own:  # its labels are inputs
            forwards = [forward.made_whole() for forward in forwards]
            examples = [self._examples(forward) for forward in forwards]
        setting = self._setting(forwards[0], examples[0], loss, noise, measure)
        parts: list[StepValues] = []
        confirmations: list[Callable[[], None]] = []
        for forward, part in zip(forwards, examples, strict=True):
            values, begun = self._evaluated(forward, part, setting, summed=norms is None)
            confirmations += begun
            if values is not None:  # the next of several passes would overwrite the sums
                parts.append(values.kept(sums=len(forwards) > 1))
        step = joined(parts) if parts else None

        # The clipped norms of the released gradients count.
        if norms is not None and clipped_norms is not None:
            if step is not None:
                confirmations.append(self.checks.begin_norm_check(step.norm, norms, forwards))
                step = replace(step, clipped_norm=clipped_norms, sums={})
            else:
                step = StepValues(None, norms, clipped_norms, {}, None)
        assert step is not None
        return self._staging(step, confirmations, ids, noise, measure, passes, setting, _own(examples))

    # ------------------------------------------------------------------ train_step

    def train_step(self, optimizer: FILOptimizer, inputs: Any, targets: Any = NO_TARGETS) -> Tensor:
        """A whole private step on the current batch; see :meth:`FILPrivacyEngine.train_step`."""
        self.replica.gather()
        if self._closed:
            raise RuntimeError("the engine was detached from the model, so no further step can be taken")
        if self.observer.tracker.parts > 1:
            raise RuntimeError(
                "train_step takes whole draws; leave out accumulation_steps and multiply the DataLoader's batch_size "
                "by it (max_memory splits a batch automatically)"
            )
        if optimizer.inside_logical_batch or optimizer._step_skip_queue:
            raise RuntimeError(
                "train_step takes whole logical batches; do not use BatchMemoryManager with it (max_memory splits a "
                "batch automatically)"
            )
        self.checks.check_last_norms()
        self.run.staged.clear()
        with self.run.generator_kept(self.run.generator.get_state()):
            step = self._computed_without_loop(optimizer, inputs, targets)
            step.confirm_and_stage()

        optimizer.release(step.sums)
        losses = step.losses if step.losses is not None else torch.zeros(0, device=self.replica.device)
        return losses.mean() if self.options.loss_reduction == "mean" else losses.sum()

    def _computed_without_loop(self, optimizer: FILOptimizer, inputs: Any, targets: Any) -> Computed:
        """As in a loop, but with checks of the batch itself instead of the loop's passes."""
        make_current((inputs, targets))  # a batch that was passed on unread
        forward, loss = self._called_without_loop(*self.checks.moved(plain((inputs, targets))))
        args, kwargs, targets = forward.args, forward.kwargs, forward.targets
        check_finite = check_finite_later(args, kwargs, targets)
        check_batch = self.checks.begin_batch_check((args, kwargs), targets)

        noise = self.run.staged.check_noise(optimizer)
        if not any(len(leaf) for leaf in tensors_of((args, kwargs)) if leaf.ndim):  # many models cannot run on it
            ids = self.run.check_ids([forward], 0)
            return self._staging(None, [], ids, noise, self.run.chooses_to_measure(), 1)
        private = self._private(args, kwargs)
        examples = self.replica.lay_out(args, kwargs, targets, private, check_values=False)
        ids = self.run.check_ids([forward], len(examples))
        measure = self.run.chooses_to_measure()
        assert loss is not None
        if self.run.ledger is None:
            check_finite()
        self.checks.check_rows(forward)
        if self._may_draw():
            again = self.replica.masks_again(forward.args, forward.kwargs)
            forward.masks = self._fresh_masks(forward) if again is None else again
            examples = self._with_masks(examples, forward)
        setting = self._setting(forward, examples, loss, noise, measure)
        values, confirmations = self._evaluated(forward, examples, setting, summed=True)
        assert values is not None
        values = values.kept(sums=False)  # they are released before the next pass

        def check_losses() -> None:
            assert values.losses is not None
            alone = values.output_gradients is None  # if mapped, only the losses show whether the model mixes examples
            self.checks.check_losses(forward, targets, loss, values.losses, now=alone)

        checks = [check_finite, check_batch, check_losses, *confirmations]
        return self._staging(values, checks, ids, noise, measure, 1, setting, examples.own_coordinates)

    def _called_without_loop(self, inputs: Any, targets: Any) -> tuple[ForwardPass, IdentifiedLoss | None]:
        """The call of the model that a step replaces, and the loss; None for an empty batch before they are known."""
        if targets is NO_TARGETS and (self.options.batch_to_inputs is not None or not isinstance(inputs, Mapping)):
            inputs, targets = split_batch(inputs, self.options.batch_to_inputs)
        args, kwargs = self.replica.examples_first(as_call(inputs))
        loss = self.run.loss
        due = loss is None or (self._computes_loss and self.checks.until_look <= 0)
        if due and all(len(leaf) for leaf in tensors_of((args, kwargs)) if leaf.ndim):
            self._inside.made_from.clear()
            found = self._identified(self._own_pass(args, kwargs))
            if loss is not None and found.name != loss.name:
                raise LossMismatchError(OTHER_OWN_LOSS.format(loss.name))
            loss, self._computes_loss = found, True

        # Labels from which a model computes its loss are targets, unless the model cannot run without them.
        without = kwargs
        if targets is None or targets is NO_TARGETS:
            without, targets = self._inside.without_labels(kwargs)
        if targets is NO_TARGETS or (loss is not None and loss.is_models_own):
            without, targets = kwargs, None
        tracker = self.observer.tracker
        autocast = autocast_now(self.replica.device)
        return ForwardPass(tracker.ids, tracker.batch, args, without, None, targets, autocast=autocast), loss

    def _own_pass(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ForwardPass:
        """A pass of a model that computes its loss, as if a loop had called backward() on it."""

        def run_live() -> Any:
            with torch.enable_grad(), differentiable_twice(), buffers_kept(self.replica.live):
                return self.replica.live(*args, **kwargs)

        with self.replica.random_state_kept():
            outputs, masks = call_and_record_masks(run_live, self.replica.device, expected=True)
        losses = self._inside.losses_in(outputs)
        if not losses:
            raise RuntimeError(
                "train_step needs the loss before it is called: pass criterion= to make_private, or labels to a model "
                "that computes its loss itself"
            )
        call = self._inside.call(args, kwargs, outputs, masks)
        autocast = autocast_now(self.replica.device)
        forward = ForwardPass.of_call(self.observer.tracker, call, outputs, masks=masks, autocast=autocast)
        forward.arrived[losses[0]] = torch.ones((), device=self.replica.device)
        return forward

    def _may_draw(self) -> bool:
        """Whether a forward pass may draw random numbers; not if one drew none with the modules in this state."""
        self.replica.follow()
        return self.replica.drops_now() or self.replica.key != self._drew_nothing_at

    def _fresh_masks(self, forward: ForwardPass) -> tuple[Tensor, ...]:
        """Masks as the live model draws them for a batch; its buffers stay unchanged: this is not the loop's pass."""

        def run_live() -> Any:
            with torch.no_grad(), buffers_kept(self.replica.live):
                return self.replica.live(*forward.args, **forward.kwargs)

        masks = call_and_record_masks(run_live, self.replica.device, expected=True)[1]
        if not masks:
            self._drew_nothing_at = self.replica.key
        return masks


def _own(parts: Sequence[Examples]) -> Tensor | int:
    """How many private coordinates belong to each example of several passes, [examples], or one number for all."""
    if len(parts) == 1:
        return parts[0].own_coordinates
    by_part = [torch.as_tensor(part.own_coordinates, device=part.z.device).expand(len(part)) for part in parts]
    return torch.cat(by_part)


def _num_rows(forward: ForwardPass) -> int:
    """How many examples went through the model."""
    sizes = [len(leaf) for leaf in tensors_of(forward.outputs) if leaf.ndim]
    return sizes[0] if sizes else len(forward.ids or ())


def _latest(forwards: list[ForwardPass], num_gradients: int) -> list[ForwardPass]:
    """The latest forward passes that account for the gradients; earlier ones were discarded."""
    for start in range(len(forwards) - 1, -1, -1):
        if sum(len(forward.ids or ()) for forward in forwards[start:]) == num_gradients:
            return forwards[start:]
    return forwards
