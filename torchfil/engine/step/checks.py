"""Compare what the loop did with what the engine computed, and refuse a step that would be accounted for wrongly.

A check begins early and ends late: it returns a function that raises if the check fails. In between, a GPU keeps
computing.
"""

from __future__ import annotations

import contextlib
import logging
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from torchfil.engine.batches import BatchTracker
from torchfil.engine.loader import split_batch
from torchfil.engine.losses import (
    NO_TARGETS,
    WEIGHTED_BY_TOKENS,
    IdentifiedLoss,
    LossMismatchError,
    check_equal_weights,
    check_loss,
    identify_loss,
    relative_differences,
)
from torchfil.engine.options import RunOptions
from torchfil.engine.replica import Replica, buffers_kept
from torchfil.engine.step.batch_checks import STEPS_BETWEEN_LOOKS, BatchChecks, nothing
from torchfil.engine.step.forwards import ForwardPass
from torchfil.engine.step.opacus_faults import why_opacus_differs
from torchfil.fisher.gradients import differentiable_twice
from torchfil.fisher.masks import replayed_masks
from torchfil.fisher.precision import autocast_as, is_reduced
from torchfil.fisher.recording import losses_of
from torchfil.smoothness import non_smooth_operators
from torchfil.utils.deferred import read_later
from torchfil.utils.trees import flattened, map_tensors, tensors_of

__all__ = ["OTHER_OWN_LOSS", "StepChecks", "check_copy"]

logger = logging.getLogger(__name__)

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
_WEIGHTED_BY_OPACUS = (
    "some examples of this batch have more targets that count (not -100) than others, and Opacus's hooks formed "
    "gradients of a mean over all of them, which depend on other examples. Use grad_sample_mode='auto', where each "
    "example's loss is the mean over its own targets, or a loss with reduction='sum' and loss_reduction='sum'. This "
    "step was not taken."
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


def check_copy(ours: Tensor, loops: Tensor, *, reduced: bool = False) -> None:
    """Raise unless ‖g‖ from the engine's copy of the model and from the loop's own pass agree, [batch] each.

    ``reduced`` says whether the model computes with fewer digits than float32 has.
    """
    ((apart, size),) = _begin_comparison([(ours, loops)])()
    if apart > (_LOOSE_TOLERANCE if reduced else _TOLERANCE.get(loops.dtype, _LOOSE_TOLERANCE)) * size:
        theirs = f"some that differ by up to {apart:.3g}"
        raise RuntimeError(f"the gradients' norms are at most {size:.3g}, {_COPY_DIFFERS.format(theirs)}")


class StepChecks(BatchChecks):
    """Compares a step of the loop with the engine's own computation.

    Args:
        replica: The model.
        options: How the run is accounted for.
        tracker: Knows which batches were read.

    Attributes:
        until_look: The number of steps before :meth:`check_losses` looks again.
    """

    def __init__(self, replica: Replica, options: RunOptions, tracker: BatchTracker) -> None:
        super().__init__(replica, options, tracker)
        self.last_norms_were_finite: Callable[[], None] = nothing
        self.until_look = 0
        self._looks = 0
        self._opaque_changes = 0
        self._divisor = 1  # how the loop divides its loss, if it accumulates
        self._told: set[str] = set()  # the beginnings of warnings that appear only once

    def _tolerance(self, values: Tensor, forward: ForwardPass) -> float:
        """How much such values may differ, relative to their size."""
        reduced = forward.autocast is not None or is_reduced(next(self.replica.live.parameters()).dtype)
        return _LOOSE_TOLERANCE if reduced else _TOLERANCE.get(values.dtype, _LOOSE_TOLERANCE)

    def targets(self, forward: ForwardPass) -> Any:
        """The targets of the call, or of the batch at that time, on the model's device."""
        if forward.ended_at_loss:  # the model has them among its inputs
            return None
        if forward.targets is not NO_TARGETS:
            return self.moved(forward.targets)
        return self.moved(split_batch(forward.batch, self.options.batch_to_inputs)[1])

    def observed(self, forward: ForwardPass) -> Any:
        """∂ℓ_i/∂output_i in the training loop, in the outputs' structure."""
        factor = forward.divided_by * (len(forward.ids or ()) if self.options.loss_reduction == "mean" else 1)

        def scaled(gradient: Tensor) -> Tensor:  # the gradient at the model's own loss is 1, whatever the batch size
            return gradient * (factor if gradient.ndim else forward.divided_by)

        return map_tensors(scaled, forward.output_gradients)

    def note_division(self, forwards: Sequence[ForwardPass], loss: IdentifiedLoss | None, passes: int) -> None:
        """Note whether the loop has divided its loss by the number of batches that it accumulates over.

        The optimizer already takes the mean over accumulated batches, so such a division changes nothing. In a last,
        shorter round, the number of batches of an earlier full round is accepted, too.
        """
        divisors = dict.fromkeys((1, passes, self._divisor))  # more likely, the loss was not divided
        if len(divisors) == 1:
            return
        for divisor in divisors:
            for forward in forwards:
                forward.divided_by = divisor
            if self._is_loss_of(forwards[0], loss):
                self._divisor = max(self._divisor, divisor)
                return
        for forward in forwards:
            forward.divided_by = 1

    def _is_loss_of(self, forward: ForwardPass, loss: IdentifiedLoss | None) -> bool:
        """Whether the gradient at the outputs is that of this loss; for None, of a loss that is identified."""
        with contextlib.suppress(LossMismatchError):
            if loss is None:
                self.identified_loss(forward)
            else:
                check_loss(loss, forward.outputs, self.targets(forward), self.observed(forward))
            return True
        return False

    def identified_loss(self, forward: ForwardPass) -> IdentifiedLoss:
        """The loss whose gradient reached the model's output."""
        _check_finite_outputs(forward)
        if forward.ended_at_loss:
            return self.own_loss(forward)
        observed, reduction = self.observed(forward), self.options.loss_reduction
        return identify_loss(forward.outputs, self.targets(forward), observed, reduction)

    def own_loss(self, forward: ForwardPass) -> IdentifiedLoss:
        """The model's own loss, on each example alone."""
        leaves = flattened(forward.outputs)[0]
        return IdentifiedLoss.of_model(forward.outputs, next(k for k in forward.arrived if leaves[k].ndim == 0))

    def check_loss(self, forward: ForwardPass, loss: IdentifiedLoss, *, by_opacus: bool = False) -> None:
        """Raise unless the gradient that reached the model's output is that of the loss."""
        _check_finite_outputs(forward)
        if forward.ended_at_loss and not loss.is_models_own:
            raise LossMismatchError(OTHER_OWN_LOSS.format(loss.name))
        if check_loss(loss, forward.outputs, self.targets(forward), self.observed(forward)):
            self._weighted_by_tokens(by_opacus=by_opacus)

    def _weighted_by_tokens(self, *, by_opacus: bool) -> None:
        """Warn that examples' weights depend on others; raise if gradients that Opacus has formed contain them."""
        if by_opacus:
            raise LossMismatchError(_WEIGHTED_BY_OPACUS)
        self._warn_once(WEIGHTED_BY_TOKENS)

    def begin_output_check(
        self, forward: ForwardPass, ours: Sequence[Tensor], loss: IdentifiedLoss, *, by_opacus: bool
    ) -> Callable[[], None]:
        """Begin to compare the gradients at the outputs with the loop's; the result raises if they differ."""
        observed, weightings = tensors_of(self.observed(forward)), loss.weightings(self.targets(forward))
        tolerance = self._tolerance(next(leaf for leaf in observed if leaf.is_floating_point()), forward)
        compared = read_later(relative_differences(list(ours), observed, weightings))

        def confirm() -> None:
            differences = compared().tolist()
            if differences[0] <= tolerance:
                return
            if not all(map(math.isfinite, differences)):
                _check_finite_outputs(forward)
                raise RuntimeError(_NOT_FINITE.format(_NOT_TAKEN))
            if min(differences) <= tolerance:
                self._weighted_by_tokens(by_opacus=by_opacus)
                return
            self.check_loss(forward, loss, by_opacus=by_opacus)  # a more specific error, if the loss is the cause
            if min(differences) > _FAR_APART * tolerance:
                theirs = f"a gradient at the outputs that differs by {min(differences):.3g}, relative to the largest"
                raise RuntimeError(_COPY_DIFFERS.format(theirs))

        return confirm

    def begin_loss_check(self, forward: ForwardPass, loss: IdentifiedLoss, ours: Tensor) -> Callable[[], None]:
        """Begin to compare ℓ of each example alone, [batch], with its loss at the outputs for the loop's batch."""
        if loss.is_models_own:
            return self._begin_own_loss_check(forward, loss, ours)
        with torch.no_grad(), autocast_as(forward.autocast, self.replica.device):
            theirs = losses_of(loss, forward.outputs, self.targets(forward))
        tolerance = self._tolerance(theirs, forward)
        compared = _begin_comparison([(ours.to(theirs), theirs)])

        def confirm() -> None:
            ((apart, size),) = compared()
            if not (math.isfinite(apart) and math.isfinite(size)):
                _check_finite_outputs(forward)
                raise RuntimeError(_NOT_FINITE.format(_NOT_TAKEN))
            if apart > tolerance * size:
                raise _alone_differs(apart, size)

        return confirm

    def _begin_own_loss_check(self, forward: ForwardPass, loss: IdentifiedLoss, ours: Tensor) -> Callable[[], None]:
        """Begin to compare the mean of ℓ of each example alone, [batch], with the model's loss on the batch."""
        whole = loss(forward.outputs, None)
        alone = ours.mean() if self.options.loss_reduction == "mean" else ours.sum()
        compared = _begin_comparison([(alone.to(whole), whole)])

        def confirm() -> None:
            ((apart, size),) = compared()
            if not math.isfinite(apart):
                raise RuntimeError(_DIVERGED.format(_NOT_TAKEN))
            if apart > self._tolerance(whole, forward) * size:
                self._warn_once(
                    f"the model's own loss on this batch differs by {apart:.3g} from the mean over its examples alone: "
                    "the model weights examples by others of the batch, or mixes them. Training and accounting use "
                    "the model's loss on each example alone, every example with the same weight."
                )

        return confirm

    def begin_weight_look(self, loss: IdentifiedLoss, targets: Any) -> Callable[[], None]:
        """Begin to check whether a mean over a batch's tokens makes an example's weight depend on others; warn once."""
        uneven = loss.weighs_unevenly(targets)
        if uneven is None or _beginning(WEIGHTED_BY_TOKENS) in self._told:
            return nothing
        some_weigh_more = read_later(uneven)
        return lambda: self._weighted_by_tokens(by_opacus=False) if bool(some_weigh_more()) else None

    def _warn_once(self, text: str) -> None:
        if _beginning(text) not in self._told:
            self._told.add(_beginning(text))
            warnings.warn(text, stacklevel=2)

    def begin_norm_check(
        self, measured: Tensor, released: Tensor, forwards: Sequence[ForwardPass]
    ) -> Callable[[], None]:
        """Begin to compare ‖g‖ with the norms of the gradients that Opacus has formed in these passes, [batch] each."""
        tolerance = self._tolerance(released, forwards[0])
        compared = _begin_comparison([(measured.to(released), released)])

        def confirm() -> None:
            ((distance, largest),) = compared()
            if not (math.isfinite(distance) and math.isfinite(largest)):
                raise RuntimeError(_NOT_FINITE.format(_NOT_TAKEN))
            if largest == 0:
                self._warn_once(_NOTHING_LEARNED)
            if distance > tolerance * largest:
                why = why_opacus_differs(self.replica, forwards)
                raise RuntimeError(
                    "the per-example gradients that Opacus has formed differ from those of the engine's loss (norms by "
                    f"up to {distance:.3g}, the largest being {largest:.3g}). {why} "
                    "This step was not taken."
                )

        return confirm

    def begin_norm_look(self, norms: Tensor, losses: Tensor | None = None) -> Callable[[], None]:
        """Begin to check whether ‖g‖ is finite, [batch]; on a GPU, which is still computing it, until the next step.

        If it is not, the losses ℓ, [batch], show whether the training has diverged.
        """
        total = read_later(norms.sum())

        def confirm(consequence: str) -> None:
            size = float(total())
            if not math.isfinite(size):
                diverged = losses is not None and not bool(losses.isfinite().all())
                raise RuntimeError((_DIVERGED if diverged else _NOT_FINITE).format(consequence))
            if size == 0:
                self._warn_once(_NOTHING_LEARNED)

        if norms.device.type != "cuda":
            return lambda: confirm(_NOT_TAKEN)
        taken = "It was the batch of the last step, which was taken: go back to earlier weights."
        self.last_norms_were_finite = lambda: confirm(taken)
        return nothing

    def check_last_norms(self) -> None:
        """Raise if the last step's gradients turned out not to be finite."""
        look, self.last_norms_were_finite = self.last_norms_were_finite, nothing
        look()

    def check_losses(
        self, forward: ForwardPass, targets: Any, loss: IdentifiedLoss, ours: Tensor, *, now: bool = False
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

        few = range(min(len(ours), _EXAMPLES_TO_LOOK_AT))
        live_model, autocast = self.replica.live, autocast_as(forward.autocast, self.replica.device)
        kept = buffers_kept(live_model), replayed_masks(forward.masks)
        with torch.no_grad(), differentiable_twice(), kept[0], kept[1], autocast:
            outputs = live_model(*forward.args, **forward.kwargs)
        if loss.is_models_own:
            self._begin_own_loss_check(replace(forward, outputs=outputs), loss, ours)()
            return
        with torch.no_grad(), autocast_as(forward.autocast, self.replica.device):
            live = torch.stack([loss(*_one_example((outputs, targets), i)).reshape(()) for i in few])
        if not bool(live.isfinite().all()):
            raise RuntimeError(_DIVERGED.format(_NOT_TAKEN))
        apart, size = float((live - ours[: len(few)]).abs().max()), float(live.abs().max())
        if apart > self._tolerance(ours, forward) * size:
            raise (
                _alone_differs(apart, size)
                if now
                else RuntimeError(
                    f"the model's losses on this batch are at most {size:.4g}, "
                    f"{_COPY_DIFFERS.format(f'some that differ by up to {apart:.3g}')}"
                )
            )
        if check_equal_weights(loss, outputs, targets):
            self._warn_once(WEIGHTED_BY_TOKENS)
        self._looks += 1
        self.until_look = min(2**self._looks, STEPS_BETWEEN_LOOKS)  # most differences show early

    def warn_if_not_smooth(self, forward: ForwardPass) -> None:
        """Warn about operators whose derivative jumps, in layers or called by the forward pass itself."""
        with self.replica.random_state_kept(), buffers_kept(self.replica.live):
            operators = non_smooth_operators(self.replica.live, forward.args, forward.kwargs)
        if operators:
            warnings.warn(
                f"the model calls {', '.join(sorted(operators))}, whose derivative jumps: its Fisher information "
                "misses the jumps, and error bounds made from it are not guarantees. "
                "torchfil.SmoothnessValidator.fix(model) replaces layers (nn.ReLU, nn.MaxPool2d); calls in forward "
                "(F.relu, F.max_pool2d) are for you to replace, e.g. by torch.tanh and F.avg_pool2d.",
                stacklevel=2,
            )


def _beginning(text: str) -> str:
    """The part of a warning that is the same each time."""
    return text[:20]


def _alone_differs(apart: float, size: float) -> RuntimeError:
    return RuntimeError(
        f"an example alone has another loss than in its batch (they differ by up to {apart:.3g}, the largest being "
        f"{size:.3g}). Either the model mixes examples, so that no gradient belongs to one of them, or "
        + _COPY_DIFFERS.format("other outputs")
    )


def _begin_comparison(pairs: Sequence[tuple[Tensor, Tensor]]) -> Callable[[], list[list[float]]]:
    """For each pair (a, b), max |a − b| and max |b|, read when needed."""
    extremes = [torch.stack([(a - b).abs().max(), b.abs().max()]).double() for a, b in pairs]
    read = read_later(torch.stack([part.to(extremes[0].device) for part in extremes]))
    return lambda: read().tolist()


def _check_finite_outputs(forward: ForwardPass) -> None:
    for leaf in tensors_of(forward.outputs):
        if leaf.is_floating_point() and not bool(leaf.isfinite().all()):
            raise RuntimeError(_DIVERGED.format(_NOT_TAKEN))


def _one_example(tree: Any, i: int) -> Any:
    return map_tensors(lambda leaf: leaf[i : i + 1] if leaf.ndim else leaf, tree)
