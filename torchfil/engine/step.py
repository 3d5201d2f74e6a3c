"""One private step, from the batch to the ledger: measure, check, release, book.

``train_step`` and the user's loop are two entries that meet in :meth:`Step.measure`. In the loop,
the forward pass begins in the model's call (:meth:`Step.begin_forward`), and ``optimizer.step()``
does the rest. If Opacus's hooks have formed per-example gradients, the sums come from them, and the
engine's own norms must agree.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchfil.engine.checks import Given, Norms, Released, Weighting
from torchfil.engine.evidence import Evidence
from torchfil.engine.forward import ForwardPass, LossInside, Observer, StartedGraph
from torchfil.engine.guard import OTHER_OWN_LOSS, Guard
from torchfil.engine.loader import is_target_name, make_current, plain, split_batch
from torchfil.engine.losses import (
    NO_TARGETS,
    WEIGHTED_BY_TOKENS,
    IdentifiedLoss,
    LossMismatchError,
    placed,
)
from torchfil.engine.measure import Places, StepValues, Wanted, joined
from torchfil.engine.optimizer import FILOptimizer
from torchfil.engine.passes import Passes
from torchfil.engine.replica import Replica, buffers_kept
from torchfil.engine.rows import OverRows, OwnedRows
from torchfil.engine.run import Run
from torchfil.fisher.gradients import ExampleGradients, differentiable_twice
from torchfil.fisher.masks import call_and_record_masks, replayed_masks
from torchfil.fisher.mechanism import Mechanism
from torchfil.fisher.models import autocast_now
from torchfil.fisher.recording import Plan, RecordedForward
from torchfil.private import Examples, Private, as_call, as_given, check_finite
from torchfil.private.batches import ROWS, Public, as_rows
from torchfil.questions import Absent, Alternative, Question
from torchfil.utils.given import Args, Batch, Kwargs, Targets
from torchfil.utils.trees import map_tensors, tensors_of

logger = logging.getLogger(__name__)


class _Piece(NamedTuple):
    """The examples of a call that one pass takes, with their ids.

    ``part`` are the rows of these examples, if they are owners; ``is_first`` says if it is the
    call's first piece.
    """

    call: ForwardPass
    ids: list[int]
    examples: Examples
    part: OwnedRows | None
    is_first: bool


class Step:
    """Takes the steps of a run.

    Args:
        run: Keeps what is booked.
        replica: The model.
        passes: Compute sums, norms and Fisher information.
        guard: Compares them with what the loop did.
        observer: Holds the loop's forward passes.
        refresh_norms: Computes every example's norm anew, for individual ε.

    Attributes:
        backward_passes: The number of the loop's backward passes that the current step came from.
    """

    def __init__(
        self,
        run: Run,
        replica: Replica,
        passes: Passes,
        guard: Guard,
        observer: Observer,
        refresh_norms: Callable[[FILOptimizer], None],
    ) -> None:
        self.run, self.options, self.replica = run, run.options, replica
        self.passes, self.guard, self.observer = passes, guard, observer
        self._refresh_norms = refresh_norms
        self._inside = LossInside(replica)
        self._computes_loss = False  # whether train_step found the loss in the model's outputs
        # the modules as they were when a forward pass drew no random numbers
        self._drew_nothing_at: Hashable = None
        self._closed = False
        self.backward_passes = 1
        precision = run.options.accounting.execution.probe_precision_on(replica.device)
        self._probe_precision = (
            None if replica.device.type == "cpu" and precision == "float32" else precision
        )
        # the same until a scheduler changes σ or C
        self._mechanism_with = lru_cache(1)(run.options.mechanism)

    # ------------------------------------------------------------------ the two entries

    def train_step(
        self, optimizer: FILOptimizer, inputs: object, targets: object = NO_TARGETS
    ) -> Tensor:
        """A whole private step on the current batch; see :meth:`FILPrivacyEngine.train_step`."""
        found: list[StepValues | None] = []

        def measure() -> Mapping[str, Tensor] | None:
            self.replica.gather()
            self.replica.follow()
            if self._closed:
                raise RuntimeError(
                    "the engine was detached from the model, so no further step can be taken"
                )
            if (
                self.observer.tracker.parts > 1
                or optimizer.inside_logical_batch
                or optimizer._step_skip_queue
            ):
                raise RuntimeError(
                    "train_step takes whole draws: leave out accumulation_steps, and multiply "
                    "batch_size"
                )
            self.run.clear_batch()
            with differentiable_twice():  # all passes run the same kernels, and draw the same masks
                call, loss = self._call_without_loop(inputs, targets)
                values = self.measure(optimizer, [call], loss)
            found.append(values)
            return None if values is None else values.sums

        optimizer.release(measure)
        values = found[0]
        empty = torch.zeros(0, device=self.replica.device)
        losses = empty if values is None or values.losses is None else values.losses
        return losses.mean() if self.options.loss_reduction == "mean" else losses.sum()

    def finished_calls(
        self, optimizer: FILOptimizer, num_gradients: int | None = None
    ) -> list[ForwardPass]:
        """The loop's calls that went backward, to be measured for this step.

        Args:
            optimizer: Knows whether a logical batch has begun.
            num_gradients: How many per-example gradients Opacus has formed; None: the engine
                computes the sums.
        """
        self.replica.gather()  # first, because a rank that refuses would leave the others waiting
        self.replica.follow()
        if not optimizer.inside_logical_batch and optimizer.params[0].summed_grad is None:
            self.run.clear_batch()  # left from a logical batch that was given up
        calls = self.observer.finished()
        self.observer.check_ready(
            calls, self.replica.live.training, by_opacus=num_gradients is not None
        )
        return calls if num_gradients is None else _latest(calls, num_gradients)

    # ------------------------------------------------------------------ where they meet

    def measure(
        self,
        optimizer: FILOptimizer,
        calls: Sequence[ForwardPass],
        loss: IdentifiedLoss | None,
        norms: Tensor | None = None,
        clipped_norms: Tensor | None = None,
    ) -> StepValues | None:
        """Losses, norms, sums and Fisher information of these calls.

        A refusal leaves everything as it was.

        The values are staged, to be booked when they are released; None: there is no example.

        Args:
            optimizer: Has the current noise and threshold.
            calls: Of the model, by the loop or instead of it.
            loss: The loss; None: not identified yet.
            norms: ‖g‖ of the per-example gradients that Opacus has formed, [batch]; None: compute
                the sums.
            clipped_norms: Their ‖g̃‖, [batch].
        """
        run, guard = self.run, self.guard
        values: StepValues | None = None
        noise = run.check_noise(optimizer)
        guard.flags.begin_step()
        ids = run.check_ids(
            calls, sum([call.num_rows for call in calls]) if norms is None else len(norms)
        )
        parts = self.observer.tracker.parts
        self.backward_passes = parts if parts > 1 else len(calls)
        if not ids:
            guard.flags.raise_if_any()
            self.observer.forget_finished()
            return None

        # what the batches are, and which loss the loop uses
        pieces, loss = self._batches_and_loss(calls, loss, summed=norms is None)
        calls, examples = [piece.call for piece in pieces], [piece.examples for piece in pieces]
        if run.ledger is None:
            run.not_smooth = guard.look_at_first_call(calls[0])
        ledger = run.ledger_for(examples)

        # what the batches show is read before the costly part, or meanwhile
        if self.replica.device.type == "cpu":
            guard.flags.raise_if_any()
        else:
            guard.flags.start_reading()

        # the passes, and what they must agree with
        measures = (run.chooses_to_measure() or noise.noise_multiplier == 0) and not run.paused
        if loss is not None and (norms is None or measures):
            accounting = self.options.accounting
            wanted = Wanted(tuple(accounting.track), accounting.estimator, norms is None)
            values = self._values_of_all(
                pieces, loss, self._mechanism_with(*noise), wanted, measures
            )
        if norms is not None and clipped_norms is not None:
            values = self._released_by_opacus(values, calls, loss, norms, clipped_norms)
        guard.flags.raise_if_any()
        assert values is not None

        # nothing can be refused from here on
        if run.loss is None and loss is not None:
            logger.info("the training loop's loss was identified as %s", loss.name)
        run.loss, run.ledger = loss, ledger
        run.stage(ids, values, noise, _own_coordinates(pieces, run))
        self.observer.forget_finished()
        return values

    def _released_by_opacus(
        self,
        values: StepValues | None,
        calls: Sequence[ForwardPass],
        loss: IdentifiedLoss | None,
        norms: Tensor,
        clipped_norms: Tensor,
    ) -> StepValues:
        """The values of gradients that Opacus has formed and that are released: their own clipped
        norms count.
        """
        if values is not None:
            about = Released(values.norm, norms, self.guard.is_reduced(calls[0]))
            self.guard.flags.ask(self.guard.checks.released, about)
            return replace(values, clipped_norm=clipped_norms, sums={})
        if loss is not None and not self.run.paused:
            for call in calls:
                self.guard.check_loss(call, loss, by_opacus=True)
        return StepValues(None, norms, clipped_norms, {}, None)

    def _batches_and_loss(
        self, calls: Sequence[ForwardPass], loss: IdentifiedLoss | None, *, summed: bool
    ) -> tuple[list[_Piece], IdentifiedLoss | None]:
        """The private examples of the calls with masks, and the loss (of a row, if examples have
        several).
        """
        run, guard = self.run, self.guard
        calls = [call for call in calls if call.ids]  # a part of a draw may be empty
        if loss is not None and calls[0].outputs is not None and not loss.is_models_own:
            loss = placed(loss, calls[0].outputs, guard.targets(calls[0]), guard.observed(calls[0]))
        # with hooks, Opacus clips the divided gradients
        if summed and calls[0].outputs is not None:
            guard.undo_division(calls, loss, self.backward_passes)
        pieces = [piece for call in calls for piece in self._checked_pieces(call)]
        if loss is None and (summed or not run.paused):
            loss = guard.identified_loss(calls[0])
        if loss is None:
            return pieces, None
        if loss.is_models_own:
            pieces = self._with_labels(calls, pieces)
        if calls[0].outputs is None and WEIGHTED_BY_TOKENS not in guard.flags.warned:
            guard.flags.ask(guard.checks.weighting, Weighting(loss, self._targets(calls[0])))
        return pieces, loss

    def _with_labels(self, calls: Sequence[ForwardPass], pieces: list[_Piece]) -> list[_Piece]:
        """The pieces for a loss that the model computes itself, from labels among its inputs."""
        if any(call.whole is not None for call in calls):
            pieces = [piece for call in calls for piece in self._pieces(call.with_labels())]
        if pieces[0].part is not None:
            raise ValueError(
                "the model's loss is not made from its outputs alone, so an owner's rows have no "
                "losses of their own: return what it is made from, and pass criterion= to "
                "make_private"
            )
        return pieces

    def _checked_pieces(self, call: ForwardPass) -> list[_Piece]:
        """:meth:`_pieces`, with the checks of the batch."""
        guard = self.guard
        # a loop's forward pass belongs to the batch that it had read
        earlier = guard.tracker.earlier if call.outputs is None else ()
        # the first step has looked at targets at once
        targets = None if self.run.ledger is None else self._targets(call)
        about = Given(call, targets, self.replica, tuple(earlier))
        guard.flags.ask(guard.checks.batch, about)
        guard.check_rows(call)
        return self._pieces(call)

    def _values_of_all(
        self,
        pieces: Sequence[_Piece],
        loss: IdentifiedLoss,
        mechanism: Mechanism,
        wanted: Wanted,
        measures: bool,
    ) -> StepValues:
        """The values of all pieces together.

        On a GPU, copies that later replays do not overwrite.
        """
        on_gpu, several = self.replica.device.type == "cuda", len(pieces) > 1

        def of_piece(place: int) -> StepValues:
            count = self.run.pace.num_probes if measures else 0
            seeds = self.run.probe_seeds(count, "probes", place)
            found = self._values(pieces[place], loss, mechanism, seeds, wanted)
            return found.kept(sums=several) if on_gpu else found

        return joined(map(of_piece, range(len(pieces))))

    def _values(
        self,
        piece: _Piece,
        row_loss: IdentifiedLoss,
        mechanism: Mechanism,
        seeds: tuple[int, ...],
        wanted: Wanted,
    ) -> StepValues:
        """The values of one piece, measured by probes with these seeds if any, with its checks."""
        call, part, ids, examples = piece.call, piece.part, piece.ids, piece.examples
        run, guard, from_loop = self.run, self.guard, call.outputs is not None
        loss = run.loss_of_examples(row_loss)
        weights = run.weights_of(ids)
        examples = examples if weights is None else replace(examples, clip_weights=weights)
        # clipped norms tell who was in the data
        asked = self.options.accounting.questions.items()
        questions = {name: each for name, each in asked if not isinstance(each, Absent)}
        if seeds and questions:
            examples, places = with_alternatives(
                examples, questions, check_values=run.ledger is None
            )
            wanted = replace(wanted, questions=places)

        # a wrong loss would spoil the trial, so the loss is checked first
        gradients = self._in_precision(self.replica.gradients(examples, loss), call.autocast)
        plan = self.passes.plans.known(gradients)
        if plan is None and from_loop:
            guard.check_loss(call, row_loss, by_opacus=not wanted.summed)
        plan = plan or self.passes.plans.of(gradients)
        with differentiable_twice() if seeds else contextlib.nullcontext():
            values = self.passes.run(
                gradients, plan, mechanism, seeds, wanted, call.take_recorded()
            )

        # does the engine's pass agree with the loop's, or with the live model's?
        assert values.losses is not None
        # if so, only the losses show whether the model mixes examples
        mapped = values.output_gradients is None
        by_opacus = not wanted.summed

        def regrouped(seen: Evidence) -> Evidence:
            return seen.of_owners(part, loss) if isinstance(loss, OverRows) and part else seen

        if not from_loop:
            guard.flags.raise_if_any()
            guard.check_live_model(call, row_loss, gradients, values, regrouped, now=mapped)
        else:
            about = guard.found(call, row_loss, gradients, values, regrouped, by_opacus=by_opacus)
            if mapped:
                about.look()
            guard.flags.ask(guard.checks.examples, about)
        if wanted.summed:
            guard.flags.ask(guard.checks.norms, Norms.of(values.norm, values.losses))
        if not from_loop and self.replica.written and piece.is_first:
            guard.flags.raise_if_any()
            self._write_buffers(call, gradients, plan)
        return replace(values, output_gradients=None)  # of another shape in every piece

    def _in_precision(
        self, gradients: ExampleGradients, autocast: torch.dtype | None
    ) -> ExampleGradients:
        return replace(gradients, autocast=autocast, probe_precision=self._probe_precision)

    def _targets(self, call: ForwardPass) -> Any:
        """The targets of a call's rows."""
        return call.targets if call.outputs is None else self.guard.targets(call)

    def _pieces(self, call: ForwardPass) -> list[_Piece]:
        """The examples of a call, with their private coordinates and masks.

        Owners with about as many rows together.
        """
        inputs: tuple[Any, dict[str, Any]] = (call.args, call.kwargs)
        if call.outputs is None and (
            self.replica.drops_now() or self.replica.key != self._drew_nothing_at
        ):
            again = self.replica.masks_again(*inputs)
            call.masks = self._fresh_masks(call) if again is None else again
        parts: Sequence[OwnedRows | None] = (
            self.run.by_owner(call) if self.options.accounting.by_owner else [None]
        )
        pieces: list[_Piece] = []
        for part in parts:
            examples, groups = call.examples, None
            if examples is None:
                groups = None if part is None else part.index
                private, first = (
                    private_without_labels(self.options.private, *inputs),
                    self.run.ledger is None,
                )
                examples = self.replica.lay_out(
                    *inputs,
                    self._targets(call),
                    private,
                    check_values=first,
                    part=part,
                    max_rows=self.run.max_rows,
                )
            elif part is not None:  # a pass over owners has drawn the masks
                inputs = examples.public[:2]
            masks = self.replica.masks_by_example(call.masks, *inputs, groups)
            examples = replace(examples, masks=masks) if masks else examples
            pieces.append(
                _Piece(
                    call,
                    call.ids or [] if part is None else part.owners,
                    examples,
                    part,
                    not pieces,
                )
            )
        return pieces

    def gradients_of(self, inputs: object, targets: object) -> list[ExampleGradients]:
        """The gradients of other examples at the current weights.

        None before the loss and a first batch are known.
        """
        loss = self.run.loss
        if loss is None or self.run.ledger is None:  # the first batch decides what is private
            return []
        call, _ = self._call_without_loop(inputs, targets)
        return [
            self.replica.gradients(piece.examples, loss)
            for piece in self._pieces(replace(call, ids=None))
        ]

    # ------------------------------------------------------------------ the loop's forward pass

    def begin_forward(
        self, args: Args, kwargs: Kwargs, batch: object
    ) -> tuple[Examples, RecordedForward | StartedGraph, Any] | None:
        """The forward half of the pass over the loop's inputs, with its outputs.

        None: the loop runs a plain pass.

        It is recorded by the live model, or replayed as a CUDA graph with masks that are drawn
        without the model.
        """
        loss = self.run.loss
        if loss is None or self.run.ledger is None:  # there was no trial yet
            return None
        ids = self.observer.tracker.ids
        try:
            pieces = self._pieces(ForwardPass(ids, batch, args, kwargs, ()))
        except (ValueError, TypeError):  # reported at the step, where the loop expects it
            return None
        if len(pieces) != 1:  # owners with many rows, and some with few
            return None
        examples, part, own_loss = (
            pieces[0].examples,
            pieces[0].part,
            self.run.loss_of_examples(loss),
        )

        # on a CPU the live model's own pass is recorded
        gradients = self.replica.live_gradients(examples, own_loss)
        gradients = self._in_precision(gradients, autocast_now(self.replica.device))
        recorded = self.passes.begin(gradients)
        if recorded is not None:
            return (
                examples,
                recorded,
                recorded.outputs if part is None else part.in_order(recorded.outputs),
            )
        if self.replica.device.type != "cuda":
            return None

        # on a GPU a graph is replayed, which needs masks and weights beforehand
        drawn = self.replica.masks_again(*examples.public[:2]) if self.replica.drops_now() else ()
        # reported at the step
        if drawn is None or ids is None or len(pieces[0].ids) != len(examples):
            return None
        masks = self.replica.masks_by_example(drawn, *examples.public[:2])
        masked = replace(examples, masks=masks, clip_weights=self.run.weights_of(pieces[0].ids))
        of_copy = self.replica.gradients(masked, own_loss)
        begun = self.passes.begin_graph(self._in_precision(of_copy, gradients.autocast))
        if begun is None:
            return None
        return examples, begun, begun.outputs if part is None else part.in_order(begun.outputs)

    # ----------------------------------------------------------------- a call instead of the loop's

    def _call_without_loop(
        self, inputs: Batch, targets: Targets
    ) -> tuple[ForwardPass, IdentifiedLoss | None]:
        """The call of the model that a step replaces, and the loss.

        None for an empty batch before they are known.
        """
        make_current((inputs, targets))  # a batch that was passed on unread
        inputs, targets = self.guard.moved(plain((inputs, targets)))
        if targets is NO_TARGETS and (
            self.options.batch_to_inputs is not None or not isinstance(inputs, Mapping)
        ):
            inputs, targets = split_batch(inputs, self.options.batch_to_inputs)
        args, kwargs = self.replica.examples_first(as_call(inputs))
        # many models cannot run on it
        empty = not any(len(leaf) for leaf in tensors_of((args, kwargs)) if leaf.ndim)
        loss = self.run.loss
        if not empty and (loss is None or (self._computes_loss and self.guard.until_look <= 0)):
            self._inside.made_from.clear()
            found = self.guard.identified_loss(self._own_pass(args, kwargs))
            if loss is not None and found.name != loss.name:
                raise LossMismatchError(OTHER_OWN_LOSS.format(loss.name))
            loss, self._computes_loss = found, True

        # Labels from which a model computes its loss are targets, unless the model cannot run
        # without them.
        without = kwargs
        if targets is None or targets is NO_TARGETS:
            without, targets = self._inside.without_labels(kwargs)
        if targets is NO_TARGETS or (loss is not None and loss.is_models_own):
            without, targets = kwargs, None
        tracker = self.observer.tracker
        autocast = autocast_now(self.replica.device)
        return ForwardPass(
            tracker.ids, tracker.batch, args, without, None, targets, autocast=autocast
        ), loss

    def _own_pass(self, args: Args, kwargs: Kwargs) -> ForwardPass:
        """A pass of a model that computes its loss, as if a loop had called backward() on it."""
        outputs, masks = self._inside.run_live(args, kwargs)
        losses = self._inside.losses_in(outputs)
        if not losses:
            raise RuntimeError(
                "train_step needs the loss: pass criterion= to make_private, or labels to a model"
            )
        forward = self._inside.forward_pass(self.observer.tracker, args, kwargs, outputs, masks)
        forward.output_grads[losses[0]] = torch.ones((), device=self.replica.device)
        return forward

    def _fresh_masks(self, call: ForwardPass) -> tuple[Tensor, ...]:
        """Masks as the live model draws them for a batch.

        Its buffers stay unchanged: this is not the loop's pass.
        """

        def run_live() -> Any:
            with torch.no_grad(), buffers_kept(self.replica.live):
                return self.replica.live(*call.args, **call.kwargs)

        masks = call_and_record_masks(run_live, self.replica.device, expected=True)[1]
        self.replica.follow()  # the pass may have changed attributes
        if not masks:
            self._drew_nothing_at = self.replica.key
        return masks

    def _write_buffers(self, call: ForwardPass, gradients: ExampleGradients, plan: Plan) -> None:
        """Update the model's buffers as its forward pass would, once, however the passes were
        cut.
        """
        if not (self.passes.in_pieces(len(gradients), plan) or self.options.accounting.by_owner):
            self.replica.write_buffers(gradients)
            return
        with torch.no_grad(), replayed_masks(call.masks):
            self.replica.live(*call.args, **call.kwargs)

    # ------------------------------------------------------------ what the optimizer tells and asks

    def book(self, optimizer: FILOptimizer) -> None:
        """Book the released logical batch, in accountant and ledger or in neither."""
        with self.run.all_or_none():
            optimizer.step_hook(optimizer)
            self.run.book(optimizer, self.observer.tracker.held)
        self.replica.free_weights()

    def end(self, optimizer: FILOptimizer) -> None:
        """After the update, do what is due now and then; refreshing all norms is collective."""
        self.run.end_step()
        every = self.options.accounting.norm_refresh
        if every is not None and self.run.loss is not None and self.run.history.steps % every == 0:
            with self.replica.gathered():
                self._refresh_norms(optimizer)

    def clip_weights(self, num_gradients: int) -> Tensor | None:
        """ω of the examples in the loop's finished passes, [batch].

        None: all 1, or another number of examples.
        """
        ids = [
            number
            for call in _latest(self.observer.finished(), num_gradients)
            for number in call.ids or ()
        ]
        return self.run.weights_of(ids) if len(ids) == num_gradients else None

    def facts(self) -> dict[str, float | None]:
        """What must be the same on all ranks, by name; None: not known yet."""
        ledger = self.run.ledger
        size = ledger.laid_out if ledger is not None and ledger.by_coordinate else None
        return {
            "the number of steps": self.run.history.steps,
            "the number of private coordinates": size,
        }

    def give_up(self) -> None:
        """Give up the logical batch, which is not released."""
        self.run.clear_batch()
        self.replica.free_weights()

    def close(self) -> None:
        """Take no further steps."""
        self._closed = True
        self.observer.forget_finished()


def private_without_labels(
    private: Private | None, args: Args, kwargs: Mapping[str, Any]
) -> Private | None:
    """What is private; if this is not specified, labels among the inputs are not private."""
    if private is not None or not kwargs:
        return private
    named: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
    floating = [
        key for key, leaf in named.items() if isinstance(leaf, Tensor) and leaf.is_floating_point()
    ]
    others = [key for key in floating if key not in kwargs or not is_target_name(key)]
    return Private(inputs=others) if others and others != floating else None


def _own_coordinates(pieces: Sequence[_Piece], run: Run) -> Tensor | int:
    """How many private coordinates belong to each example of several passes, [examples], or one
    number for all.
    """
    counts = [run.coordinates_of(piece.call, piece.examples, piece.part) for piece in pieces]
    if len(pieces) == 1:
        return counts[0]
    parts = [
        (torch.as_tensor(count), len(piece.examples))
        for count, piece in zip(counts, pieces, strict=True)
    ]
    return torch.cat([count.to(pieces[0].examples.z.device).expand(size) for count, size in parts])


def _latest(calls: list[ForwardPass], num_gradients: int) -> list[ForwardPass]:
    """The latest calls that account for the gradients; earlier ones were discarded."""
    for start in range(len(calls) - 1, -1, -1):
        if sum(len(call.ids or ()) for call in calls[start:]) == num_gradients:
            return calls[start:]
    return calls


def with_alternatives(
    examples: Examples, questions: Mapping[str, Question], *, check_values: bool
) -> tuple[Examples, Places]:
    """The examples with their alternatives, as the questions define them.

    Args:
        examples: A batch.
        questions: By name.
        check_values: Whether to look for NaN and infinity, which has to wait for the device.

    Raises:
        ValueError: An alternative has another form or shape than the batch, or is not finite.
    """
    args, kwargs, targets = (
        as_rows(*examples.public) if ROWS in examples.public[1] else examples.public
    )
    inputs = as_given(args, kwargs)
    alternatives: list[Examples] = []
    places: list[tuple[str, tuple[int | None, ...]]] = []
    for name, question in questions.items():
        answers = question.alternatives(inputs, targets)
        if len(answers) != len(question.answers):
            raise ValueError(
                f"the question {name!r} gave {len(answers)} alternatives for its "
                f"{len(question.answers)} answers"
            )
        own: list[int | None] = []
        for answer, other in zip(question.answers, answers, strict=True):
            own.append(None if other is None else len(alternatives))
            if other is not None:
                what = f"the answer {answer!r} to the question {name!r}"
                alternatives.append(_laid_out(what, other, examples, check_values))
        places.append((name, tuple(own)))
    return replace(examples, alternatives=tuple(alternatives)), tuple(places)


def _laid_out(what: str, other: Alternative, examples: Examples, check_values: bool) -> Examples:
    args, kwargs = as_call(other.inputs)
    # as_given names positional inputs by place
    positions = sorted(key for key in kwargs if isinstance(key, int))
    public: Public = ((*args, *(kwargs.pop(place) for place in positions)), kwargs, other.targets)
    rows = examples.public[1].get(ROWS)
    if rows is not None:  # questions are about all rows of an owner
        args, kwargs, targets = map_tensors(lambda leaf: leaf.unflatten(0, rows.shape), public)
        public = (args, {**kwargs, ROWS: rows}, targets)
    given, true = tensors_of(public), tensors_of(examples.public)
    shapes, wanted = (
        [(tuple(leaf.shape), leaf.dtype) for leaf in leaves] for leaves in (given, true)
    )
    if shapes != wanted:
        raise ValueError(
            f"{what} has tensors of {shapes}, and the batch has {wanted}; an alternative may "
            "differ only in values"
        )
    try:
        if check_values:
            check_finite(*public)
        return replace(examples.with_values(public), clip_weights=None)
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from error
