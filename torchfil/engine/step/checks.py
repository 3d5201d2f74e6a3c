"""What the loop did beside what the engine computed: a step that is not accounted for rightly is refused.

A check begins early and ends late: what is returned raises. In between a GPU goes on computing.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torchfil.engine.loader import BatchTracker, split_batch
from torchfil.engine.losses import (
    IdentifiedLoss,
    LossMismatchError,
    check_equal_weights,
    check_loss,
    identify_loss,
    scale_of_loss,
)
from torchfil.engine.options import RunOptions
from torchfil.engine.replica import Replica, buffers_kept
from torchfil.engine.step.forwards import ForwardPass
from torchfil.fisher.masks import replayed_masks
from torchfil.fisher.recording import losses_of
from torchfil.private import as_call
from torchfil.smoothness import non_smooth_operators
from torchfil.utils.deferred import read_later
from torchfil.utils.trees import map_tensors, tensors_of

__all__ = ["StepChecks", "check_copy"]

_STEPS_BETWEEN_LOOKS = 128  # at whether the live model still gives what its copy does
_EXAMPLES_TO_LOOK_AT = 8
_FAR_APART = 5  # times the tolerance: beyond what lower precision does
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-2}

_NOT_FINITE = (
    "the gradient of an example in this batch is NaN or infinite, though its inputs are finite: is there a function "
    "whose derivative is not finite there, such as sqrt at 0? {}"
)
_DIVERGED = (
    "the model's outputs on this batch are NaN or infinite: the training has diverged. Go back to earlier weights with "
    "a smaller learning rate, or look for an overflow in the model. {}"
)
_NOT_TAKEN = "This step was not taken."
_COPY_DIFFERS = (
    "the engine's copy of the model gives {}: a forward hook, or an attribute of a module that is no plain number, "
    "flag or text, changes the output, and the copy does not have it. Move it into a module's forward(). This step "
    "was not taken."
)


def nothing() -> None:
    """No look to take."""


def check_copy(ours: Tensor, loops: Tensor) -> None:
    """Raise unless ‖g‖ by the engine's copy of the model and by the loop's own pass agree, [batch] each."""
    ((apart, size),) = _begin_comparison([(ours, loops)])()
    if apart > _TOLERANCE.get(loops.dtype, 0.1) * size:
        theirs = f"some that differ by up to {apart:.3g}"
        raise RuntimeError(f"the gradients' norms are at most {size:.3g}, {_COPY_DIFFERS.format(theirs)}")


class StepChecks:
    """Compares a step of the loop with the engine's own computation.

    Args:
        replica: The model.
        options: How the run is accounted for.
        tracker: Knows the batches that were read.
    """

    def __init__(self, replica: Replica, options: RunOptions, tracker: BatchTracker) -> None:
        self.replica = replica
        self.options = options
        self.tracker = tracker
        self.last_norms_were_finite: Callable[[], None] = nothing
        self._until_look = 0
        self._opaque_changes = 0
        self._divisor = 1  # of the loop's loss, where it accumulates

    def targets(self, forward: ForwardPass) -> Any:
        """The targets of the batch that was current, on the model's device."""
        return self.moved(split_batch(forward.batch, self.options.batch_to_inputs)[1])

    def moved(self, tree: Any) -> Any:
        """The same with its tensors on the model's device."""
        return map_tensors(lambda leaf: leaf.to(self.replica.device), tree)

    def observed(self, forward: ForwardPass) -> Any:
        """∂ℓ_i/∂output_i as the training loop has it, in the outputs' structure."""
        factor = forward.divided_by * (len(forward.ids or ()) if self.options.loss_reduction == "mean" else 1)
        return map_tensors(lambda gradient: gradient * factor, forward.output_gradients)

    def note_division(self, forwards: Sequence[ForwardPass], loss: IdentifiedLoss | None, passes: int) -> None:
        """Note where the loop has divided its loss by the number of batches that it accumulates over.

        The optimizer takes the mean over accumulated batches by itself, so that the division says the same again. Of a
        last, shorter round the number of a full one before it counts, too.
        """
        divisors = dict.fromkeys((1, passes, self._divisor))  # an undivided loss is the likelier reading
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
        """Whether the gradient at the outputs is that of the loss, or of a standard one for None."""
        if loss is None:
            with contextlib.suppress(LossMismatchError):
                self.identified_loss(forward)
                return True
            return False
        scale = scale_of_loss(loss, forward.outputs, self.targets(forward), self.observed(forward))
        return scale is not None and math.isclose(scale, 1, rel_tol=1e-2)

    def identified_loss(self, forward: ForwardPass) -> IdentifiedLoss:
        """The loss whose gradient came back to the model's output."""
        _check_finite_outputs(forward)
        return identify_loss(
            forward.outputs, self.targets(forward), self.observed(forward), self.options.loss_reduction
        )

    def check_loss(self, forward: ForwardPass, loss: IdentifiedLoss) -> None:
        """Raise unless the gradient that came back to the model's output is that of the loss."""
        _check_finite_outputs(forward)
        check_loss(loss, forward.outputs, self.targets(forward), self.observed(forward))

    def begin_output_check(
        self, forward: ForwardPass, ours: Sequence[Tensor], loss: IdentifiedLoss
    ) -> Callable[[], None]:
        """Begin to compare the gradients at the outputs with the loop's; what is returned raises where they differ."""
        observed = tensors_of(self.observed(forward))
        pairs = [(a, b) for a, b in zip(ours, observed, strict=True) if b.is_floating_point() and b.numel()]
        if not pairs:
            return nothing
        tolerance = _TOLERANCE.get(pairs[0][1].dtype, 0.1)
        compared = _begin_comparison(pairs)

        def confirm() -> None:
            distances = compared()
            if not all(math.isfinite(number) for pair in distances for number in pair):
                _check_finite_outputs(forward)
                raise RuntimeError(_NOT_FINITE.format(_NOT_TAKEN))
            if all(apart <= tolerance * size for apart, size in distances):
                return
            self.check_loss(forward, loss)  # says more, if it is the loss
            apart, size = max(distances, key=lambda pair: pair[0] / max(pair[1], 1e-30))
            if apart > _FAR_APART * tolerance * size:
                theirs = f"one that differs by up to {apart:.3g}"
                raise RuntimeError(
                    f"the gradient at the model's output is at most {size:.3g}, {_COPY_DIFFERS.format(theirs)}"
                )

        return confirm

    def begin_loss_check(self, forward: ForwardPass, loss: IdentifiedLoss, ours: Tensor) -> Callable[[], None]:
        """Begin to compare ℓ of each example alone, [batch], with its loss at the outputs of the loop's batch."""
        with torch.no_grad():
            theirs = losses_of(loss, forward.outputs, self.targets(forward))
        tolerance = _TOLERANCE.get(theirs.dtype, 0.1)
        compared = _begin_comparison([(ours.to(theirs), theirs)])

        def confirm() -> None:
            ((apart, size),) = compared()
            if not (math.isfinite(apart) and math.isfinite(size)):
                _check_finite_outputs(forward)
                raise RuntimeError(_NOT_FINITE.format(_NOT_TAKEN))
            if apart > tolerance * size:
                raise _alone_differs(apart, size)

        return confirm

    def begin_norm_check(self, measured: Tensor, released: Tensor) -> Callable[[], None]:
        """Begin to compare ‖g‖ with the norms of the gradients that Opacus has formed, [batch] each."""
        tolerance = _TOLERANCE.get(released.dtype, 0.1)
        compared = _begin_comparison([(measured.to(released), released)])

        def confirm() -> None:
            ((distance, largest),) = compared()
            if not (math.isfinite(distance) and math.isfinite(largest)):
                raise RuntimeError(_NOT_FINITE.format(_NOT_TAKEN))
            if distance > tolerance * largest:
                raise RuntimeError(
                    "the per-example gradients that Opacus has formed differ from those of the engine's loss (norms by "
                    f"up to {distance:.3g}, the largest being {largest:.3g}). Either part of the loss does not go "
                    "through the model's output (a penalty on the weights, say), or the model mixes examples, or "
                    "Opacus's rule for a layer is wrong here (its convolutions are after a LayerNorm over channels): "
                    "grad_sample_mode='auto' needs none of its rules. This step was not taken."
                )

        return confirm

    def begin_norm_look(self, norms: Tensor, losses: Tensor | None = None) -> Callable[[], None]:
        """Begin to look whether ‖g‖ is finite, [batch]; on a GPU, which is still computing it, until the next step.

        Where it is not, the losses ℓ, [batch], tell whether the training has diverged.
        """
        total = read_later(norms.sum())

        def confirm(consequence: str) -> None:
            if not math.isfinite(float(total())):
                diverged = losses is not None and not bool(losses.isfinite().all())
                raise RuntimeError((_DIVERGED if diverged else _NOT_FINITE).format(consequence))

        if norms.device.type != "cuda":
            return lambda: confirm(_NOT_TAKEN)
        taken = "It was the batch of the last step, which was taken: go back to weights of before."
        self.last_norms_were_finite = lambda: confirm(taken)
        return nothing

    def check_last_norms(self) -> None:
        """Raise where the last step's gradients have turned out not to be finite."""
        look, self.last_norms_were_finite = self.last_norms_were_finite, nothing
        look()

    def check_losses(
        self, forward: ForwardPass, targets: Any, loss: IdentifiedLoss, ours: Tensor, *, now: bool = False
    ) -> None:
        """Now and then, or ``now``, raise unless the live model's losses on a batch are the engine's, [batch].

        Raises:
            RuntimeError: They differ: something outside the modules' own forward methods changes the output.
            LossMismatchError: The criterion's value on the batch is neither their mean nor their sum.
        """
        if self._opaque_changes != self.replica.opaque_changes:
            self._opaque_changes, self._until_look = self.replica.opaque_changes, 0
        self._until_look -= 1
        if self._until_look >= 0 and not now:
            return
        self._until_look = 0  # again at the next step, unless this look ends well

        few = range(min(len(ours), _EXAMPLES_TO_LOOK_AT))
        with torch.no_grad(), buffers_kept(self.replica.live), replayed_masks(forward.masks):
            outputs = self.replica.live(*forward.args, **forward.kwargs)
        with torch.no_grad():
            live = torch.stack([loss(*_one_example((outputs, targets), i)).reshape(()) for i in few])
        if not bool(live.isfinite().all()):
            raise RuntimeError(_DIVERGED.format(_NOT_TAKEN))
        apart, size = float((live - ours[: len(few)]).abs().max()), float(live.abs().max())
        if apart > _TOLERANCE.get(ours.dtype, 0.1) * size:
            raise (
                _alone_differs(apart, size)
                if now
                else RuntimeError(
                    f"the model's losses on this batch are at most {size:.4g}, "
                    f"{_COPY_DIFFERS.format(f'some that differ by up to {apart:.3g}')}"
                )
            )
        check_equal_weights(loss, outputs, targets, ours)
        self._until_look = _STEPS_BETWEEN_LOOKS

    def begin_batch_check(self, inputs: Any, targets: Any) -> Callable[[], None]:
        """Begin to look whether a step is given a batch read before the last; what is returned raises if so.

        Inputs decide, or targets where the inputs are no batch's (they were augmented): those of the last batch are
        right, those of an earlier one are not, and nothing is said of others. Of rows the first and the last count.
        """
        now, given = _tensors(self.tracker.batch), _tensors(inputs)
        if any(a.data_ptr() == b.data_ptr() and a.shape == b.shape for a in given for b in now):
            return nothing
        kinds = {(leaf.shape, leaf.dtype) for leaf in (*given, *_tensors(targets))}
        before = [
            leaf for batch in self.tracker.earlier for leaf in _tensors(batch) if (leaf.shape, leaf.dtype) in kinds
        ]
        if not before:
            return nothing

        device = self.replica.device
        alike = [_any_alike(part, leaves, device) for part in (given, _tensors(targets)) for leaves in (now, before)]
        answers = read_later(torch.stack(alike))

        def confirm() -> None:
            input_is_last, input_is_earlier, target_is_last, target_is_earlier = answers().tolist()
            if not input_is_last and (input_is_earlier or (target_is_earlier and not target_is_last)):
                raise RuntimeError(
                    "the step is given a batch that was read before the last one, and would be booked for the last "
                    "one's examples: was another batch read meanwhile (a prefetcher, an evaluation on the same "
                    "loader)? Read a batch, take its step, then read the next. This step was not taken."
                )

        return confirm

    def warn_if_not_smooth(self, forward: ForwardPass) -> None:
        """Warn of operators whose derivative jumps, in layers or called by the forward pass itself."""
        devices = range(torch.cuda.device_count())
        with torch.random.fork_rng(devices=devices), buffers_kept(self.replica.live):
            operators = non_smooth_operators(self.replica.live, forward.args, forward.kwargs)
        if operators:
            warnings.warn(
                f"the model calls {', '.join(sorted(operators))}, whose derivative jumps: its Fisher information "
                "misses the jumps, and error bounds made from it are not guarantees. "
                "torchfil.SmoothnessValidator.fix(model) replaces such layers.",
                stacklevel=2,
            )

    def check_calls_for_refresh(self, forward: ForwardPass) -> None:
        """Raise where norms shall be refreshed and the loop calls the model with other inputs than a batch's."""
        every = self.options.accounting.norm_refresh
        if every is None:
            return
        args, kwargs = as_call(split_batch(forward.batch, self.options.batch_to_inputs)[0])
        if len(args) + len(kwargs) != len(forward.args) + len(forward.kwargs):
            raise ValueError(
                f"norm_refresh={every} calls the model with all of a batch but its targets ({len(args)} positional "
                f"inputs, {sorted(kwargs)} by name), the loop with {len(forward.args)} and {sorted(forward.kwargs)}; "
                "pass batch_to_inputs=a function that maps a batch to (inputs, targets)"
            )


def _alone_differs(apart: float, size: float) -> RuntimeError:
    return RuntimeError(
        f"an example alone has another loss than in its batch (apart by up to {apart:.3g}, the largest being "
        f"{size:.3g}). Either the model mixes examples, so that no gradient belongs to one of them, or "
        + _COPY_DIFFERS.format("other outputs")
    )


def _begin_comparison(pairs: Sequence[tuple[Tensor, Tensor]]) -> Callable[[], list[list[float]]]:
    """For each pair (a, b), max |a − b| and max |b|, once they are asked for."""
    extremes = [torch.stack([(a - b).abs().max(), b.abs().max()]).double() for a, b in pairs]
    read = read_later(torch.stack([part.to(extremes[0].device) for part in extremes]))
    return lambda: read().tolist()


def _check_finite_outputs(forward: ForwardPass) -> None:
    for leaf in tensors_of(forward.outputs):
        if leaf.is_floating_point() and not bool(leaf.isfinite().all()):
            raise RuntimeError(_DIVERGED.format(_NOT_TAKEN))


def _one_example(tree: Any, i: int) -> Any:
    return map_tensors(lambda leaf: leaf[i : i + 1] if leaf.ndim else leaf, tree)


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
    alike = [(a == b).all() & (a != a.flatten()[0]).any() for a, b in pairs]
    return torch.stack(alike).any() if alike else torch.zeros((), dtype=torch.bool, device=device)
