"""Checks that refuse a step that would be accounted for wrongly.

A check leaves a flag on the device, and all flags of a step are read at once (:class:`Flags`). A failed check is then
looked at closely, to say what is wrong. Checks that need more than a comparison run at the first steps and then ever
more rarely.
"""

from __future__ import annotations

import contextlib
import logging
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from torchfil.engine.forward import ForwardPass
from torchfil.engine.loader import BatchTracker, split_batch
from torchfil.engine.loss_inside import NO_TARGETS
from torchfil.engine.losses import (
    IdentifiedLoss,
    LossMismatchError,
    ModelLoss,
    check_loss,
    identify_loss,
    scale_of_loss,
)
from torchfil.engine.options import RunOptions
from torchfil.engine.replica import Replica, buffers_kept
from torchfil.engine.row_mixing import how_rows_mix
from torchfil.engine.token_means import WEIGHTED_BY_TOKENS, TokenMean, uneven
from torchfil.engine.weighting import averages_over_tokens, check_equal_weights
from torchfil.fisher.gradients import differentiable_twice
from torchfil.fisher.masks import replayed_masks
from torchfil.fisher.precision import autocast_as, is_reduced
from torchfil.fisher.recording import losses_of
from torchfil.private import as_call, check_finite
from torchfil.private.batches import named_inputs
from torchfil.smoothness import non_smooth_operators
from torchfil.utils.deferred import read_later
from torchfil.utils.trees import flattened, map_tensors, tensors_of

__all__ = ["OTHER_OWN_LOSS", "Flag", "Flags", "Guard", "check_copy"]

logger = logging.getLogger(__name__)

_STEPS_BETWEEN_LOOKS = 128  # steps between expensive checks; they are more frequent at the start
_EXAMPLES_TO_LOOK_AT = 8
_FAR_APART = 5  # times the tolerance: more than lower precision can explain
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-2}
_LOOSE_TOLERANCE = 0.1  # half precision

_NOT_FINITE = (
    "the gradient of an example in this batch is NaN or infinite, though its inputs are finite: is there a function "
    "whose derivative is not finite there, such as sqrt at 0? {}"
)
_DIVERGED = (
    "the model's outputs on this batch are NaN or infinite: training has diverged. Go back to earlier weights with a "
    "smaller learning rate, or look for an overflow in the model. {}"
)
_NOT_TAKEN = "This step was not taken."
_NOTHING_LEARNED = (
    "ALL GRADIENTS OF A STEP ARE EXACTLY ZERO: the model learns nothing from this batch, its examples have Fisher "
    "information 0, and bounds on an attacker's error are infinite, which says nothing about a model that does train. "
    "Check the loss (cross-entropy of a single output is always 0; a regression needs a squared error), whether all "
    "labels are ignored (-100), and whether a part before the output is frozen or detached."
)
_INPUT_IS_TARGET = (
    "the loop's loss is {name} with the model's input {key!r} as the target, not the batch's targets. Say so: "
    "batch_to_inputs=lambda batch: (batch[0], batch[0]), with that input in both places. This step was not taken."
)
_DRAWN_IN_LOOP = (
    "If the loop draws the target (noise, in diffusion), draw it in the model: def forward(self, x): noise = "
    "torch.randn_like(x); return self.net(x + noise) - noise, with criterion=lambda outputs, _: outputs.square().mean()"
)
OTHER_OWN_LOSS = (
    "the loss that the model computes is not {} of its outputs: it has another term (a penalty, an auxiliary loss), "
    "which criterion= does not have or which was added during training. Leave criterion= out, and give every term a "
    "weight that is not 0 from the start. This step was not taken."
)
_COPY_DIFFERS = (
    "the engine's copy of the model gives {}: a forward hook, or a module attribute that is not a plain number, flag "
    "or text, changes the output, and the copy does not have it. Move it into a module's forward(). This step was not "
    "taken."
)
_EARLIER_BATCH = (
    "the step got a batch that was read before the last one, and would be recorded for the last one's examples: was "
    "another batch read meanwhile (a prefetcher, an evaluation on the same loader)? Read a batch, take its step, then "
    "read the next. This step was not taken."
)


@dataclass(frozen=True)
class Flag:
    """A check whose result is still on the device.

    Attributes:
        failed: Whether it failed, bool [].
        error: What is wrong, made only if it failed: an exception to raise, a warning to show once, or None if a closer
            look finds nothing.
    """

    failed: Tensor
    error: Callable[[], Exception | None]


class Flags:
    """The checks of one step; a GPU keeps computing until they are read, all at once.

    Args:
        flags: Checks that were left by the last step.
    """

    def __init__(self, flags: Sequence[Flag] = ()) -> None:
        self.pending = list(flags)
        self._started: list[tuple[list[Flag], Callable[[], Tensor]]] = []
        self.later: list[Flag] = []  # read at the next step

    def add(self, *flags: Flag | None) -> None:
        """Add checks; None: nothing to check."""
        self.pending += [flag for flag in flags if flag is not None]

    def start_reading(self) -> None:
        """Start to copy the results so far to the CPU, before work is queued that they need not wait for."""
        if self.pending:
            self._started.append((self.pending, read_later(torch.stack([flag.failed for flag in self.pending]))))
            self.pending = []

    def errors(self) -> list[Exception]:
        """What the failed checks found."""
        self.start_reading()
        failed = [
            flag for flags, read in self._started for flag, bad in zip(flags, read().tolist(), strict=True) if bad
        ]
        self._started = []
        return [error for flag in failed if (error := flag.error()) is not None]


class Guard:
    """Compares a step with the batch that was read, with the loop's loss, and with the live model.

    Args:
        replica: The model.
        options: How the run is accounted for.
        tracker: Knows which batches were read.

    Attributes:
        until_look: The number of steps before :meth:`check_live_model` looks again.
    """

    def __init__(self, replica: Replica, options: RunOptions, tracker: BatchTracker) -> None:
        self.replica = replica
        self.options = options
        self.tracker = tracker
        self.until_look = 0
        self._looks = self._until_rows = self._row_looks = 0
        self._opaque_changes = 0
        self._divisor = 1  # how the loop divides its loss, if it accumulates
        self._token_mean: TokenMean | None = None  # that the loop was found to use
        self._warned: set[str] = set()  # the beginnings of warnings that appear only once
        self._late: list[Flag] = []  # about the last step, which a GPU was still computing

    def flags(self) -> Flags:
        """The checks of a new step, with what the last one has left."""
        return Flags(self._late)

    def forget_last_step(self) -> None:
        """Forget what a step has left to check: other weights were loaded since."""
        self._late = []

    def raise_if_any(self, flags: Flags) -> None:
        """Read all flags of a step; raise the first error, and show new warnings."""
        errors, self._late = flags.errors(), []
        for error in errors:
            if not isinstance(error, Warning):
                raise error
            self._warn_once(str(error))
        self._late = flags.later

    def _warn_once(self, text: str) -> None:
        if text[:20] not in self._warned:  # the rest may have numbers
            self._warned.add(text[:20])
            warnings.warn(text, stacklevel=2)

    def _tolerance(self, values: Tensor, call: ForwardPass) -> float:
        """How much such values may differ, relative to their size."""
        reduced = call.autocast is not None or is_reduced(next(self.replica.live.parameters()).dtype)
        return _LOOSE_TOLERANCE if reduced else _TOLERANCE.get(values.dtype, _LOOSE_TOLERANCE)

    # ------------------------------------------------------------------ the batch

    def moved(self, tree: Any) -> Any:
        """The same, with its tensors on the model's device."""
        return map_tensors(lambda leaf: leaf.to(self.replica.device), tree)

    def check_inputs(self, call: ForwardPass, targets: Any) -> Flag | None:
        """Are inputs and targets finite?"""
        floating = [leaf for leaf in tensors_of((call.args, call.kwargs, targets)) if leaf.is_floating_point()]
        if not floating:
            return None
        failed = [~leaf.sum(dtype=torch.float64).isfinite().to(self.replica.device) for leaf in floating]

        def error() -> Exception | None:  # infinite masks are fine
            try:
                check_finite(call.args, call.kwargs, targets)
            except ValueError as found:
                return found
            return None

        return Flag(torch.stack(failed).any() if len(failed) > 1 else failed[0], error)

    def check_batch(self, inputs: Any, targets: Any) -> Flag | None:
        """Did a step get an earlier batch than the last one read?

        Inputs decide, or targets if the inputs match no batch (they were augmented). A match with the last batch is
        right, a match with an earlier batch is wrong, and anything else passes. The first and last rows are compared.
        """
        now, given = _with_rows(self.replica.examples_first(self.tracker.batch)), _with_rows(inputs)
        if any(a.data_ptr() == b.data_ptr() and a.shape == b.shape for a in given for b in now):
            return None
        kinds = {(leaf.shape, leaf.dtype) for leaf in (*given, *_with_rows(targets))}
        before = [
            leaf
            for batch in self.tracker.earlier
            for leaf in _with_rows(self.replica.examples_first(batch))
            if (leaf.shape, leaf.dtype) in kinds
        ]
        if not before:
            return None
        input_is_last, input_is_earlier, target_is_last, target_is_earlier = (
            _any_alike(part, leaves, self.replica.device)
            for part in (given, _with_rows(targets))
            for leaves in (now, before)
        )
        failed = ~input_is_last & (input_is_earlier | (target_is_earlier & ~target_is_last))
        return Flag(failed, lambda: RuntimeError(_EARLIER_BATCH))

    def check_rows(self, call: ForwardPass) -> None:
        """Now and then, raise if the model's inputs are made from several rows of the batch that was read.

        Rows that were changed each on its own are logged once: the numbers are about the view that the model saw.

        Raises:
            RuntimeError: The rows are mixed; it says how: mixup, another order, statistics of the batch.
        """
        self._until_rows -= 1
        if self._until_rows >= 0 or self.options.batch_to_inputs is not None:
            return
        pairs = [
            (given, rows.to(given.device))
            for given in _with_rows((call.args, call.kwargs))
            for rows in _with_rows(self.replica.examples_first(call.batch))
            if given.shape == rows.shape and given.dtype == rows.dtype
        ]
        for given, rows in pairs:
            how = how_rows_mix(given, rows)
            if how is not None:
                raise RuntimeError(
                    f"the model's inputs are {how}: an example then enters another example's row, its gradient is "
                    "not bounded by max_grad_norm, and what leaks about it is not accounted for. Make each row of "
                    "the model's inputs from its own example alone; augmentations of single examples are fine. "
                    "This step was not taken."
                )
        self._row_looks += 1
        self._until_rows = min(2**self._row_looks, _STEPS_BETWEEN_LOOKS)
        if (
            self._row_looks == 1
            and _with_rows(call.batch)
            and not any(torch.equal(given, rows) for given, rows in pairs)
        ):
            logger.info("the model's inputs are not the loader's rows: the numbers are about the views that it saw")

    def look_at_first_call(self, call: ForwardPass) -> None:
        """Before the first step: warn about operators whose derivative jumps; raise if norms cannot be refreshed."""
        every = self.options.accounting.norm_refresh
        if every is not None:
            args, kwargs = as_call(split_batch(call.batch, self.options.batch_to_inputs)[0])
            if len(args) + len(kwargs) != len(call.args) + len(call.kwargs):
                raise ValueError(
                    f"norm_refresh={every} calls the model with a batch without its targets ({len(args)} positional "
                    f"inputs, {sorted(kwargs)} by name), unlike the loop; pass batch_to_inputs="
                )
        with self.replica.random_state_kept(), buffers_kept(self.replica.live):
            operators = non_smooth_operators(self.replica.live, call.args, call.kwargs)
        if operators:
            warnings.warn(
                f"the model calls {', '.join(sorted(operators))}, whose derivative jumps: its Fisher information "
                "misses the jumps, and error bounds made from it are not guarantees. "
                "torchfil.SmoothnessValidator.fix(model) replaces layers; replace calls in forward (F.relu) yourself.",
                stacklevel=2,
            )

    # ------------------------------------------------------------------ the loss

    def targets(self, call: ForwardPass) -> Any:
        """The targets of the call, or of the batch at that time, on the model's device."""
        if call.ended_at_loss:  # the model has them among its inputs
            return None
        if call.targets is not NO_TARGETS:
            return self.moved(call.targets)
        return self.moved(split_batch(call.batch, self.options.batch_to_inputs)[1])

    def observed(self, call: ForwardPass) -> Any:
        """∂ℓ_i/∂output_i in the training loop, in the outputs' structure."""
        factor = call.divided_by * (len(call.ids or ()) if self.options.loss_reduction == "mean" else 1)

        def scaled(gradient: Tensor) -> Tensor:  # the gradient at the model's own loss is 1, whatever the batch size
            return gradient * (factor if gradient.ndim else call.divided_by)

        return map_tensors(scaled, call.output_gradients)

    def note_division(self, calls: Sequence[ForwardPass], loss: IdentifiedLoss | None, passes: int) -> None:
        """Note whether the loop has divided its loss by the number of batches that it accumulates over.

        The optimizer already takes the mean over accumulated batches, so such a division changes nothing. In a last,
        shorter round, the number of batches of an earlier full round is accepted, too.
        """
        divisors = dict.fromkeys((1, passes, self._divisor))  # more likely, the loss was not divided
        if len(divisors) == 1:
            return
        for divisor in divisors:
            for call in calls:
                call.divided_by = divisor
            if self._is_loss_of(calls[0], loss):
                self._divisor = max(self._divisor, divisor)
                return
        for call in calls:
            call.divided_by = 1

    def _is_loss_of(self, call: ForwardPass, loss: IdentifiedLoss | None) -> bool:
        """Whether the gradient at the outputs is that of this loss; for None, of a standard loss."""
        if loss is None:
            with contextlib.suppress(LossMismatchError):
                self.identified_loss(call)
                return True
            return False
        scale = scale_of_loss(loss, call.outputs, self.targets(call), self.observed(call))
        return scale is not None and math.isclose(scale, 1, rel_tol=1e-2)

    def identified_loss(self, call: ForwardPass) -> IdentifiedLoss:
        """The loss whose gradient reached the model's output."""
        _check_finite_outputs(call)
        if call.ended_at_loss:
            return self.own_loss(call)
        outputs, observed, reduction = call.outputs, self.observed(call), self.options.loss_reduction
        try:
            return identify_loss(outputs, self.targets(call), observed, reduction)
        except LossMismatchError as error:
            for key, given in named_inputs(call.args, call.kwargs).items():
                with contextlib.suppress(LossMismatchError):
                    name = identify_loss(outputs, given.value, observed, reduction).name
                    error.args = (_INPUT_IS_TARGET.format(name=name, key=key),)
                    break
            else:
                if tensors_of(outputs)[0].shape == tensors_of((call.args, call.kwargs))[0].shape:
                    error.args = (f"{error} {_DRAWN_IN_LOOP}",)
            if not call.uses_own_loss_alone:
                raise
        return self.own_loss(call.with_labels())

    def own_loss(self, call: ForwardPass) -> IdentifiedLoss:
        """The model's own loss, on each example alone."""
        leaves = flattened(call.outputs)[0]
        place = next(k for k in call.output_grads if leaves[k].ndim == 0)
        number = sum(isinstance(leaf, Tensor) and leaf.ndim == 0 for leaf in leaves[:place])
        return IdentifiedLoss("the model's own loss on each example alone", ModelLoss(number))

    def check_loss(self, call: ForwardPass, loss: IdentifiedLoss) -> None:
        """Raise unless the gradient that reached the model's output is that of the loss."""
        _check_finite_outputs(call)
        if call.ended_at_loss and not loss.is_models_own:
            raise LossMismatchError(OTHER_OWN_LOSS.format(loss.name))
        mean = check_loss(loss, call.outputs, self.targets(call), self.observed(call))
        if mean is not None:
            self._token_mean = mean
            self._warn_once(WEIGHTED_BY_TOKENS)

    def check_weights(self, loss: IdentifiedLoss, targets: Any, *, by_opacus: bool) -> Flag | None:
        """Does a mean over a batch's tokens make an example's weight depend on others?

        Gradients that Opacus has formed contain these weights, so they are refused.
        """
        weights = self._weights(loss, targets)
        if weights is None or (not by_opacus and WEIGHTED_BY_TOKENS[:20] in self._warned):
            return None
        if not by_opacus:
            return Flag(uneven(weights), lambda: UserWarning(WEIGHTED_BY_TOKENS))
        return Flag(
            uneven(weights),
            lambda: LossMismatchError(
                "some examples of this batch have more targets that count (not -100) than others, and Opacus's "
                "hooks formed gradients of a mean over all of them, which depend on other examples. Use "
                "grad_sample_mode='auto', where each example's loss is the mean over its own targets, or a loss "
                "with reduction='sum' and loss_reduction='sum'. This step was not taken."
            ),
        )

    def _weights(self, loss: IdentifiedLoss, targets: Any) -> Tensor | None:
        """The loop's weights of the examples, [batch], if they depend on others' targets; None: all equal."""
        weights = loss.weights(targets)
        return self._token_mean.weights(targets) if weights is None and self._token_mean is not None else weights

    # ------------------------------------------------------------------ what the engine computed

    def compare_outputs(self, call: ForwardPass, ours: Sequence[Tensor], loss: IdentifiedLoss) -> Flag | None:
        """Do the gradients at the outputs, ours and the loop's, agree?"""
        weights = self._weights(loss, self.targets(call))
        pairs = [
            (a if weights is None else a * weights.to(a.dtype).reshape(-1, *[1] * (a.ndim - 1)), b)
            for a, b in zip(ours, tensors_of(self.observed(call)), strict=True)
            if b.is_floating_point() and b.numel()
        ]
        if not pairs:
            return None
        tolerance = self._tolerance(pairs[0][1], call)
        distances = _distances(pairs)

        def error() -> Exception | None:
            apart, size = max(distances.tolist(), key=lambda pair: pair[0] / max(pair[1], 1e-30))
            known = self._token_mean
            try:
                if not bool(distances.isfinite().all()):
                    _check_finite_outputs(call)
                    return RuntimeError(_NOT_FINITE.format(_NOT_TAKEN))
                self.check_loss(call, loss)  # a more specific error, if the loss is the cause
            except (LossMismatchError, RuntimeError) as found:
                return found
            # unless the examples have different weights, or lower precision explains it
            if self._token_mean is not known or apart <= _FAR_APART * tolerance * size:
                return None
            theirs = f"one that differs by up to {apart:.3g}"
            return RuntimeError(
                f"the gradient at the model's output is at most {size:.3g}, {_COPY_DIFFERS.format(theirs)}"
            )

        return Flag(_far(distances, tolerance), error)

    def compare_losses(self, call: ForwardPass, loss: IdentifiedLoss, ours: Tensor) -> Flag:
        """Does each example alone, ℓ [batch], have the loss that it has at the outputs for the loop's batch?"""
        if loss.is_models_own:
            return self._compare_own_loss(call, loss, ours)
        with torch.no_grad(), autocast_as(call.autocast, self.replica.device):
            theirs = losses_of(loss, call.outputs, self.targets(call))
        distances = _distances([(ours.to(theirs), theirs)])

        def error() -> Exception:
            apart, size = distances[0].tolist()
            if math.isfinite(apart) and math.isfinite(size):
                return _alone_differs(apart, size)
            finite = all(bool(leaf.isfinite().all()) for leaf in tensors_of(call.outputs))
            return RuntimeError((_NOT_FINITE if finite else _DIVERGED).format(_NOT_TAKEN))

        return Flag(_far(distances, self._tolerance(theirs, call)), error)

    def _compare_own_loss(self, call: ForwardPass, loss: IdentifiedLoss, ours: Tensor) -> Flag:
        """Is the mean of ℓ of each example alone, [batch], the model's loss on the batch?"""
        whole = loss(call.outputs, None)
        alone = ours.mean() if self.options.loss_reduction == "mean" else ours.sum()
        distances = _distances([(alone.to(whole), whole)])

        def error() -> Exception:
            apart = float(distances[0, 0])
            if not math.isfinite(apart):
                return RuntimeError(_DIVERGED.format(_NOT_TAKEN))
            return UserWarning(
                f"the model's own loss on this batch differs by {apart:.3g} from the mean over its examples alone: "
                "the model weights examples by others of the batch, or mixes them. Training and accounting use "
                "the model's loss on each example alone, every example with the same weight."
            )

        return Flag(_far(distances, self._tolerance(whole, call)), error)

    def compare_norms(self, measured: Tensor, released: Tensor, calls: Sequence[ForwardPass]) -> Flag:
        """Are ‖g‖ and the norms of the gradients that Opacus has formed in these passes the same, [batch] each?"""
        distances = _distances([(measured.to(released), released)])
        tolerance = self._tolerance(released, calls[0])

        def error() -> Exception:
            apart, largest = distances[0].tolist()
            if not (math.isfinite(apart) and math.isfinite(largest)):
                return RuntimeError(_NOT_FINITE.format(_NOT_TAKEN))
            if apart <= tolerance * largest:
                return UserWarning(_NOTHING_LEARNED)
            return RuntimeError(
                "the per-example gradients that Opacus has formed differ from those of the engine's loss (norms by "
                f"up to {apart:.3g}, the largest being {largest:.3g}). Either part of the loss does not go through the "
                "model's output, or the model mixes examples, or Opacus's rule for a layer is wrong here, as that for "
                "convolutions is if their input is channels last in memory. grad_sample_mode='auto' needs none of its "
                "rules. This step was not taken."
            )

        return Flag(_far(distances, tolerance) | (distances[0, 1] == 0), error)

    def check_norms(self, norms: Tensor, losses: Tensor, flags: Flags) -> None:
        """Is ‖g‖, [batch], finite and not all 0? A GPU, which is still computing it, answers at the next step.

        If it is not finite, the losses ℓ, [batch], show whether the training has diverged.
        """
        late = norms.device.type == "cuda"
        consequence = "It was the batch of the last step, which was taken: go back to earlier weights."
        total = norms.sum()
        finite = losses.sum().isfinite()

        def error() -> Exception:
            if bool(total == 0):
                return UserWarning(_NOTHING_LEARNED)
            return RuntimeError(
                (_NOT_FINITE if bool(finite) else _DIVERGED).format(consequence if late else _NOT_TAKEN)
            )

        (flags.later if late else flags.pending).append(Flag(~total.isfinite() | (total == 0), error))

    def check_live_model(
        self, call: ForwardPass, targets: Any, loss: IdentifiedLoss, ours: Tensor, *, now: bool = False
    ) -> None:
        """Now and then, or ``now``, raise unless the live model's losses on a batch equal the engine's, [batch].

        Raises:
            RuntimeError: They differ: something outside the modules' forward methods changes the output.
            LossMismatchError: The criterion's value on the batch is neither their mean nor their sum.
        """
        if self._opaque_changes != self.replica.opaque_changes:
            self._opaque_changes, self.until_look = self.replica.opaque_changes, 0
        self.until_look -= 1
        if self.until_look >= 0 and not now:
            return
        self.until_look = 0  # check again at the next step, unless this check passes

        live, device = self.replica.live, self.replica.device
        kept = buffers_kept(live), replayed_masks(call.masks)
        with torch.no_grad(), differentiable_twice(), kept[0], kept[1], autocast_as(call.autocast, device):
            outputs = live(*call.args, **call.kwargs)
        if loss.is_models_own:
            flags = Flags([self._compare_own_loss(replace(call, outputs=outputs), loss, ours)])
            self.raise_if_any(flags)
            return
        few = range(min(len(ours), _EXAMPLES_TO_LOOK_AT))
        with torch.no_grad(), autocast_as(call.autocast, device):
            losses = torch.stack([loss(*_one_example((outputs, targets), i)).reshape(()) for i in few])
        if not bool(losses.isfinite().all()):
            raise RuntimeError(_DIVERGED.format(_NOT_TAKEN))
        apart, size = float((losses - ours[: len(few)]).abs().max()), float(losses.abs().max())
        if apart > self._tolerance(ours, call) * size:
            theirs = f"some that differ by up to {apart:.3g}"
            raise (
                _alone_differs(apart, size)
                if now
                else RuntimeError(
                    f"the model's losses on this batch are at most {size:.4g}, {_COPY_DIFFERS.format(theirs)}"
                )
            )
        if check_equal_weights(loss, outputs, targets) or (
            self._looks == 0 and averages_over_tokens(loss, outputs, targets)
        ):
            self._warn_once(WEIGHTED_BY_TOKENS)
        self._looks += 1
        self.until_look = min(2**self._looks, _STEPS_BETWEEN_LOOKS)  # most differences show early


def check_copy(ours: Tensor, loops: Tensor, *, reduced: bool = False) -> None:
    """Raise unless ‖g‖ from the engine's copy of the model and from the loop's own pass agree, [batch] each.

    ``reduced`` says whether the model computes with fewer digits than float32 has.
    """
    apart, size = _distances([(ours, loops)])[0].tolist()
    if apart > (_LOOSE_TOLERANCE if reduced else _TOLERANCE.get(loops.dtype, _LOOSE_TOLERANCE)) * size:
        theirs = f"some that differ by up to {apart:.3g}"
        raise RuntimeError(f"the gradients' norms are at most {size:.3g}, {_COPY_DIFFERS.format(theirs)}")


def _alone_differs(apart: float, size: float) -> RuntimeError:
    return RuntimeError(
        f"an example alone has another loss than in its batch (they differ by up to {apart:.3g}, the largest being "
        f"{size:.3g}). Either the model mixes examples, so that no gradient belongs to one of them, or "
        + _COPY_DIFFERS.format("other outputs")
    )


def _distances(pairs: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """For each pair (a, b), max |a − b| and max |b|, float64 [pairs, 2]."""
    extremes = [torch.stack([(a - b).abs().max(), b.abs().max()]).double() for a, b in pairs]
    return torch.stack([part.to(extremes[0].device) for part in extremes])


def _far(distances: Tensor, tolerance: float) -> Tensor:
    """Whether a distance is above the tolerance, relative to the size, or not finite, bool []."""
    return ~((distances[:, 0] <= tolerance * distances[:, 1]) & distances.isfinite().all(dim=1)).all()


def _check_finite_outputs(call: ForwardPass) -> None:
    for leaf in tensors_of(call.outputs):
        if leaf.is_floating_point() and not bool(leaf.isfinite().all()):
            raise RuntimeError(_DIVERGED.format(_NOT_TAKEN))


def _one_example(tree: Any, i: int) -> Any:
    return map_tensors(lambda leaf: leaf[i : i + 1] if leaf.ndim else leaf, tree)


def _with_rows(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tensors_of(tree) if leaf.ndim and len(leaf)]


def _any_alike(some: list[Tensor], others: list[Tensor], device: torch.device) -> Tensor:
    """Whether any two have the same shape, dtype and numbers, in their first and last rows (vectors: everywhere).

    A constant tensor, such as labels of a single class, does not count.
    """
    pairs = [
        (a, b.to(device)) if a.ndim == 1 else (a[[0, -1]], b[[0, -1]].to(device))
        for a in some
        for b in others
        if a.shape == b.shape and a.dtype == b.dtype
    ]
    alike = [(a == b).all() & (a != a.flatten()[0]).any() for a, b in pairs]
    return torch.stack(alike).any() if alike else torch.zeros((), dtype=torch.bool, device=device)
