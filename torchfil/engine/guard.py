"""Checks that refuse a step that would be accounted for wrongly.

A check leaves a flag on the device, and all flags of a step are read at once. A failed check is
then looked at closely, to say what is wrong. Checks that need more than a comparison run at the
first steps and then ever more rarely.
"""

from __future__ import annotations

import contextlib
import logging
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torchfil.engine import losses
from torchfil.engine.evidence import Evidence
from torchfil.engine.forward import ForwardPass
from torchfil.engine.loader import BatchTracker, split_batch
from torchfil.engine.losses import (
    NO_TARGETS,
    WEIGHTED_BY_TOKENS,
    IdentifiedLoss,
    LossMismatchError,
    TokenMean,
)
from torchfil.engine.options import RunOptions
from torchfil.engine.replica import Replica, buffers_kept
from torchfil.fisher.gradients import ExampleGradients, differentiable_twice, flatten
from torchfil.fisher.masks import replayed_masks
from torchfil.fisher.models import REDUCED, autocast_as, call_with
from torchfil.fisher.recording import losses_of
from torchfil.private import as_call, check_finite
from torchfil.smoothness import non_smooth_layers, non_smooth_operators
from torchfil.utils.trees import map_tensors, read_later, tensors_of

logger = logging.getLogger(__name__)

_STEPS_BETWEEN_LOOKS = 128  # steps between expensive checks; they are more frequent at the start
_FAR_APART = 5  # times the tolerance: more than lower precision can explain
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-2}
_LOOSE_TOLERANCE = 0.1  # half precision

_NOT_TAKEN = "This step was not taken."
_NOT_FINITE = (
    "the gradient of an example in this batch is NaN or infinite, though its inputs are finite: "
    "is there a function whose derivative is not finite there, such as sqrt at 0? {}"
)
_DIVERGED = (
    "the model's outputs on this batch are NaN or infinite: training has diverged. Go back to "
    "earlier weights with a smaller learning rate, or look for an overflow in the model. {}"
)
_NOTHING_LEARNED = (
    "ALL GRADIENTS OF A STEP ARE EXACTLY ZERO: the model learns nothing from this batch, whose "
    "examples have Fisher information 0 and infinite error bounds. Check the loss (cross-entropy "
    "of a single output is always 0), whether all labels are ignored (-100), and whether a part "
    "before the output is frozen or detached."
)
_WEIGHTED_BY_OPACUS = (
    "some examples have more targets that count (not -100) than others, and Opacus's hooks "
    "formed gradients of a mean over all targets of the batch, which depend on other examples. "
    "Use grad_sample_mode='auto', or a loss with reduction='sum' and loss_reduction='sum'. "
    f"{_NOT_TAKEN}"
)
OTHER_OWN_LOSS = (
    f"the loss that the model computes is not {{}} of its outputs: it has another term (a "
    "penalty, an auxiliary loss). Leave criterion= out, and give every term a weight that is not "
    f"0 from the start. {_NOT_TAKEN}"
)
_MIXED = (
    "the model's own loss mixes the examples of a batch: its gradient is no weighted sum of "
    "those of its examples. Contrastive losses, such as CLIP's and SigLIP's, compare each "
    "example with the others, so no part belongs to one. Train with a loss of one example: let "
    f"the model return what it is made from, and pass criterion= to make_private. {_NOT_TAKEN}"
)
_COPY_DIFFERS = (
    f"the engine's copy of the model gives {{}}: a forward hook, or a module attribute that is "
    "not a plain number, flag or text, changes the output. Move it into a module's forward(). "
    f"{_NOT_TAKEN}"
)
_EARLIER_BATCH = (
    "the step got a batch that was read before the last one, and would be recorded for the last "
    "one's examples. Read a batch, take its step, then read the next, without a prefetcher. "
    f"{_NOT_TAKEN}"
)


@dataclass(frozen=True)
class Flag:
    """A check whose result is still on the device.

    Attributes:
        failed: Whether it failed, bool [].
        error: Called only if it failed: raises or returns what is wrong, an exception or a warning
            to show once; None if a closer look finds nothing.
    """

    failed: Tensor
    error: Callable[[], Exception | None]


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
        self.replica, self.options, self.tracker = replica, options, tracker
        self.until_look = 0
        self._looks = self._until_rows = self._row_looks = self._opaque_changes = 0
        self._uneven = 0  # how often the model's own loss was not the mean over its examples
        self._divisor = 1  # by which the loop divides its loss, if it accumulates
        self._warned: set[str] = set()  # warnings appear only once
        self._pending: list[Flag] = []  # a GPU keeps computing until they are read, all at once
        self._reading: list[tuple[list[Flag], Callable[[], Tensor]]] = []
        self._late: list[Flag] = []  # read at the next step, because a GPU is still computing

    # ------------------------------------------------------------------ the flags of a step

    def begin_step(self) -> None:
        """Begin with what the last step has left to check."""
        self._pending, self._late, self._reading = self._late, [], []

    def forget_last_step(self) -> None:
        """Forget what a step has left to check: other weights were loaded since."""
        self._late = []

    def add(self, flag: Flag | None) -> None:
        """Add a check; None: nothing to check."""
        if flag is not None:
            self._pending.append(flag)

    def start_reading(self) -> None:
        """Start to copy the results so far to the CPU, before work is queued that they need not
        wait for.
        """
        if self._pending:
            failed = torch.stack([flag.failed for flag in self._pending])
            self._reading.append(
                (self._pending, read_later(failed) if failed.is_cuda else failed.cpu)
            )
            self._pending = []

    def raise_if_any(self) -> None:
        """Read all flags so far; raise the first error, and show new warnings."""
        self.start_reading()
        reading, late = self._reading, self._late
        self._reading, self._late = [], []
        for flags, read in reading:
            for flag, bad in zip(flags, read().tolist(), strict=True):
                error = flag.error() if bad else None
                if isinstance(error, Warning):
                    self._warn_once(str(error))
                elif error is not None:
                    raise error
        self._late = late  # of a step that is not refused

    def _warn_once(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            warnings.warn(text, stacklevel=2)

    def _tolerance(self, values: Tensor, autocast: torch.dtype | None) -> float:
        """How much such values may differ, relative to their size."""
        weight = next(self.replica.live.parameters())
        return _tolerance(values, reduced=autocast is not None or weight.dtype in REDUCED)

    # ------------------------------------------------------------------ the weights

    def check_optimizer(self, names: Sequence[str]) -> None:
        """Raise unless the optimizer has the model's trainable parameters, by name ("": unknown),
        and has some.
        """
        own, held = self.replica.weights()[0].keys(), set(names)
        if own != held or not own:
            raise RuntimeError(
                f"trainable parameters changed since make_private: of {len(own)} the optimizer "
                f"lacks {sorted(own - held)[:5]}, and it has {len(held - own)} others. Restore "
                "requires_grad and param_groups, or make the changed model private with a new "
                f"engine. {_NOT_TAKEN}"
            )

    # ------------------------------------------------------------------ the batch

    def moved(self, tree: object) -> Any:
        """The same, with its tensors on the model's device."""
        return map_tensors(lambda leaf: leaf.to(self.replica.device), tree)

    def check_inputs(self, call: ForwardPass, targets: object) -> Flag | None:
        """Are inputs and targets finite?"""
        floating = [
            leaf
            for leaf in tensors_of((call.args, call.kwargs, targets))
            if leaf.is_floating_point()
        ]
        failed = [
            ~leaf.sum(dtype=torch.float64).isfinite().to(self.replica.device) for leaf in floating
        ]
        if not failed:
            return None

        check = partial(check_finite, call.args, call.kwargs, targets)  # infinite masks are fine
        return Flag(torch.stack(failed).any() if len(failed) > 1 else failed[0], check)

    def check_batch(self, call: ForwardPass) -> Flag | None:
        """Did a step get an earlier batch than the last one read?

        Inputs decide, or targets if the inputs match no batch (they were augmented). A match with
        the last batch is right, a match with an earlier batch is wrong, and anything else passes.
        The first and last rows are compared.
        """
        now, given = (
            _with_rows(self.replica.examples_first(call.batch)),
            _with_rows((call.args, call.kwargs)),
        )
        if any(a.data_ptr() == b.data_ptr() and a.shape == b.shape for a, b in product(given, now)):
            return None
        targets = _with_rows(call.targets)
        kinds = {(leaf.shape, leaf.dtype) for leaf in (*given, *targets)}
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
            for part in (given, targets)
            for leaves in (now, before)
        )
        failed = ~input_is_last & (input_is_earlier | (target_is_earlier & ~target_is_last))
        return Flag(failed, lambda: RuntimeError(_EARLIER_BATCH))

    def check_rows(self, call: ForwardPass) -> None:
        """Now and then, raise if the model's inputs are made from several rows of the batch that
        was read.

        Rows that were changed each on its own are logged once: the numbers are about the view that
        the model saw.

        Raises:
            RuntimeError: The rows are mixed; it says how: mixup, another order, statistics of the
                batch.
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
                    f"the model's inputs are {how}: what one example adds through another's row "
                    "is not bounded by max_grad_norm. Make each row from its own example alone; "
                    f"augmentations of single examples are fine. {_NOT_TAKEN}"
                )
        self._row_looks += 1
        self._until_rows = min(2**self._row_looks, _STEPS_BETWEEN_LOOKS)
        same = any(torch.equal(given, rows) for given, rows in pairs)
        if self._row_looks == 1 and _with_rows(call.batch) and not same:
            logger.info(
                "the model's inputs are not the loader's rows: the numbers are about the views "
                "that it saw"
            )

    def look_at_first_call(self, call: ForwardPass) -> list[str]:
        """Before the first step: warn about operators whose derivative jumps.

        Raise if norms cannot be refreshed.

        Returns:
            The layers that are not smooth, or the operators that the model calls without such
            layers.
        """
        every = self.options.accounting.norm_refresh
        if every is not None:
            args, kwargs = as_call(split_batch(call.batch, self.options.batch_to_inputs)[0])
            if len(args) + len(kwargs) != len(call.args) + len(call.kwargs):
                raise ValueError(
                    f"norm_refresh={every} calls the model with a batch without its targets "
                    f"({len(args)} positional, {sorted(kwargs)} by name), unlike the loop: pass "
                    "batch_to_inputs="
                )
        with autocast_as(call.autocast, self.replica.device):
            self.replica.check_own_weights(call.args, call.kwargs)
        with self.replica.random_state_kept(), buffers_kept(self.replica.live):
            operators = non_smooth_operators(self.replica.live, call.args, call.kwargs)
        if operators:
            jumps = (
                f"the model calls {', '.join(sorted(operators))}, whose derivative jumps: "
                "bounds are not guarantees"
            )
            remedy = (
                "torchfil.SmoothnessValidator.fix(model) replaces layers; replace calls "
                "(F.relu) yourself."
            )
            warnings.warn(f"{jumps}. {remedy}", stacklevel=2)
        layers = [f"layer {where}" for where in non_smooth_layers(self.replica.live)]
        return layers or [f"a call of {name}" for name in sorted(operators)]

    # ------------------------------------------------------------------ the loss

    def targets(self, call: ForwardPass) -> Any:
        """The targets of the call, or of the batch at that time, on the model's device."""
        if call.ended_at_loss:  # the model has them among its inputs
            return None
        if call.targets is not NO_TARGETS:
            return self.moved(call.targets)
        return self.moved(split_batch(call.batch, self.options.batch_to_inputs)[1])

    def observed(self, call: ForwardPass) -> list[Tensor]:
        """∂ℓ_i/∂output_i in the training loop, for every tensor of the outputs."""
        factor = len(call.ids or ()) if self.options.loss_reduction == "mean" else 1
        # the gradient at the model's own loss is 1, whatever the batch size
        return [
            gradient * factor if gradient.ndim else gradient for gradient in call.output_gradients
        ]

    def undo_division(
        self, calls: Sequence[ForwardPass], loss: IdentifiedLoss | None, passes: int
    ) -> None:
        """If the loop has divided its loss by the number of batches that it accumulates over,
        multiply it back.

        The optimizer takes the mean over accumulated batches itself. In a last, shorter round, the
        number of batches of a full round is tried, too. Gradients that fit neither way are left as
        they are, for the check of the loss.
        """
        # more likely, the loss was not divided
        divisors = dict.fromkeys((1, passes, self._divisor))
        for divisor in divisors if len(divisors) > 1 else ():
            scaled = [
                {k: divisor * gradient for k, gradient in call.output_grads.items()}
                for call in calls
            ]
            first = replace(calls[0], output_grads=scaled[0])
            try:
                if loss is None:
                    self.identified_loss(first)
                else:
                    self.check_loss(first, loss, by_opacus=False)
            except LossMismatchError:
                continue
            self._divisor = max(self._divisor, divisor)
            for call, gradients in zip(calls, scaled, strict=True):
                call.output_grads = gradients
            return

    def identified_loss(self, call: ForwardPass) -> IdentifiedLoss:
        """The loss whose gradient reached the model's output.

        If none fits, the model's own on each example alone.
        """
        _check_finite_outputs(call)
        if not call.ended_at_loss:
            try:
                observed, reduction = self.observed(call), self.options.loss_reduction
                return losses.identify_loss(call.outputs, self.targets(call), observed, reduction)
            except LossMismatchError:
                # other outputs have a gradient, too
                if not call.output_grads.keys() <= call.loss_grads.keys():
                    raise
            call = call.with_labels()
        leaves, name = tensors_of(call.outputs), "the model's own loss on each example alone"
        place = next(k for k in call.output_grads if leaves[k].ndim == 0)
        return IdentifiedLoss(name, lambda loss, _: loss, place, is_models_own=True)

    def check_loss(self, call: ForwardPass, loss: IdentifiedLoss, *, by_opacus: bool) -> None:
        """Raise unless the gradient that reached the model's output is that of the loss.

        If a mean over a batch's tokens makes an example's weight depend on others, warn once;
        gradients that Opacus has formed contain these weights, so they are refused.
        """
        _check_finite_outputs(call)
        if call.ended_at_loss and not loss.is_models_own:
            raise LossMismatchError(OTHER_OWN_LOSS.format(loss.name))
        if losses.check_loss(loss, call.outputs, self.targets(call), self.observed(call)):
            if by_opacus:
                raise LossMismatchError(_WEIGHTED_BY_OPACUS)
            self._warn_once(WEIGHTED_BY_TOKENS)

    def check_weights(self, loss: IdentifiedLoss, targets: object) -> Flag | None:
        """Does a mean over a batch's tokens make weights depend on others? In a loop the gradients
        show it.
        """
        function = loss.function
        if WEIGHTED_BY_TOKENS in self._warned or not (
            isinstance(function, TokenMean) and function.mean
        ):
            return None
        weights = loss.weightings(targets)[-1]
        if not isinstance(weights, Tensor):
            return None
        return Flag((weights != weights[:1]).any(), lambda: UserWarning(WEIGHTED_BY_TOKENS))

    # ------------------------------------------------------------------ what the engine computed

    def evidence(self, call: ForwardPass, loss: IdentifiedLoss) -> Evidence:
        """What the live model did in a call, by row."""
        targets = self.targets(call)
        return Evidence(
            loss,
            call.outputs,
            targets,
            tensors_of(self.observed(call)) if call.output_grads else (),
            loss.weightings(targets),
            call.autocast,
        )

    def compare_outputs(
        self,
        seen: Evidence,
        ours: Sequence[Tensor],
        look: Callable[[], None],
        *,
        by_opacus: bool,
    ) -> Flag:
        """Do the gradients at the outputs, ours and the loop's, agree?

        If not, ``look`` raises if another loss is the cause.
        """
        observed = seen.output_gradients
        tolerance = self._tolerance(
            next(leaf for leaf in observed if leaf.is_floating_point()), seen.autocast
        )
        differences = losses.relative_differences(ours, observed, seen.weightings)

        def error() -> Exception | None:
            apart = float(differences.min())
            if apart <= tolerance:  # with the weights of a mean over tokens
                return (
                    LossMismatchError(_WEIGHTED_BY_OPACUS)
                    if by_opacus
                    else UserWarning(WEIGHTED_BY_TOKENS)
                )
            look()
            if apart <= _FAR_APART * tolerance:  # lower precision
                return None
            if not math.isfinite(apart):
                return RuntimeError(_NOT_FINITE.format(_NOT_TAKEN))
            theirs = (
                f"a gradient at the outputs that differs by {apart:.3g}, relative to the largest"
            )
            return RuntimeError(_COPY_DIFFERS.format(theirs))

        return Flag(~(differences[0] <= tolerance), error)

    def compare_losses(
        self, seen: Evidence, call: ForwardPass, gradients: ExampleGradients, ours: Tensor
    ) -> Flag:
        """Does each example alone, ℓ [batch], have the loss that it has at the outputs for the
        whole batch?

        The model's own loss is one number for a batch: it is compared with the mean over the
        examples. If it differs, this is a warning, and now and then (the first time, the second,
        the fourth, …) an error if it weights no examples, but mixes them.
        """
        loss, own = seen.loss, isinstance(seen.loss, IdentifiedLoss) and seen.loss.is_models_own
        with torch.no_grad(), autocast_as(seen.autocast, self.replica.device):
            if own:
                theirs = loss(seen.outputs, None)
                ours = ours.mean() if self.options.loss_reduction == "mean" else ours.sum()
            else:
                theirs = losses_of(loss, seen.outputs, seen.targets)
        distance = _distance(ours, theirs)

        def error() -> Exception | None:
            apart, size = distance.tolist()
            if not math.isfinite(apart + size):
                finite = all(bool(leaf.isfinite().all()) for leaf in tensors_of(seen.outputs))
                return RuntimeError((_NOT_FINITE if finite else _DIVERGED).format(_NOT_TAKEN))
            if own:
                assert isinstance(loss, IdentifiedLoss)
                self._uneven += 1
                looks = self._uneven & (self._uneven - 1) == 0
                mixed = _share_mixed(call, loss, gradients) if looks else 0.0
                if mixed > self._tolerance(theirs, seen.autocast):
                    return LossMismatchError(_MIXED)
                if self._uneven > 1:  # other numbers of the same
                    return None
                return UserWarning(
                    f"the model's own loss on this batch differs by {apart:.3g} from the mean "
                    "over its examples alone: the model weights examples by others of the batch. "
                    "Training and accounting use its loss on each example alone, with equal "
                    "weights."
                )
            return RuntimeError(
                "an example alone has another loss than in its batch (they differ by up to "
                f"{apart:.3g}, the largest being {size:.3g}). Either the model mixes examples, or "
                f"{_COPY_DIFFERS.format('other outputs')}"
            )

        return Flag(_is_far(distance, self._tolerance(theirs, seen.autocast)), error)

    def compare_norms(
        self, measured: Tensor, released: Tensor, calls: Sequence[ForwardPass]
    ) -> Flag:
        """Are ‖g‖ and the norms of the gradients that Opacus has formed in these passes the same,
        [batch] each?
        """
        distance = _distance(measured, released)
        tolerance = self._tolerance(released, calls[0].autocast)

        def error() -> Exception:
            apart, largest = distance.tolist()
            if not math.isfinite(apart + largest):
                return RuntimeError(_NOT_FINITE.format(_NOT_TAKEN))
            if apart <= tolerance * largest:
                return UserWarning(_NOTHING_LEARNED)
            return RuntimeError(
                "the per-example gradients that Opacus has formed differ from those of the "
                f"engine's loss (norms by up to {apart:.3g}, the largest being {largest:.3g}): "
                "part of the loss does not go through the model's output, the model mixes "
                "examples, or Opacus's rule for a layer is wrong here (convolutions with "
                "channels last in memory). grad_sample_mode='auto' needs none of its rules. "
                f"{_NOT_TAKEN}"
            )

        return Flag(_is_far(distance, tolerance) | (distance[1] == 0), error)

    def check_norms(self, norms: Tensor, losses: Tensor) -> None:
        """Is ‖g‖, [batch], finite and not all 0? A GPU, which is still computing it, answers at the
        next step.

        If it is not finite, the losses ℓ, [batch], show whether the training has diverged.
        """
        late = norms.device.type == "cuda"
        taken = (
            "It is the batch of the last step, which was taken: go back to earlier weights."
            if late
            else _NOT_TAKEN
        )
        total, finite = norms.sum(), losses.sum().isfinite()

        def error() -> Exception:
            if bool(total == 0):
                return UserWarning(_NOTHING_LEARNED)
            return RuntimeError((_NOT_FINITE if bool(finite) else _DIVERGED).format(taken))

        (self._late if late else self._pending).append(
            Flag(~total.isfinite() | (total == 0), error)
        )

    def check_live_model(
        self,
        call: ForwardPass,
        loss: IdentifiedLoss,
        gradients: ExampleGradients,
        ours: Tensor,
        regrouped: Callable[[Evidence], Evidence],
        *,
        now: bool,
    ) -> None:
        """Now and then, or ``now``, raise unless the live model's losses on a batch equal the
        engine's, [batch].

        ``regrouped`` gives what a call shows by example.

        Raises:
            RuntimeError: They differ: the model mixes examples, or something outside the modules'
                forward methods changes the output.
            LossMismatchError: The criterion's value on the batch is neither their mean nor their
                sum, or the model's own mixes the examples.
        """
        if self._opaque_changes != self.replica.opaque_changes:
            self._opaque_changes, self.until_look = self.replica.opaque_changes, 0
        self.until_look -= 1
        due = self.until_look < 0
        if not due and not now:
            return
        # check again at the next step, unless this check passes
        self.until_look = max(0, self.until_look)

        live, autocast = self.replica.live, autocast_as(call.autocast, self.replica.device)
        masks = replayed_masks(call.masks) if call.masks else contextlib.nullcontext()
        with torch.no_grad(), differentiable_twice(), buffers_kept(live), masks, autocast:
            call = replace(call, outputs=live(*call.args, **call.kwargs))
        self.add(self.compare_losses(regrouped(self.evidence(call, loss)), call, gradients, ours))
        self.raise_if_any()
        if not loss.is_models_own and losses.check_equal_weights(
            loss, call.outputs, self.targets(call)
        ):
            self._warn_once(WEIGHTED_BY_TOKENS)
        if due:  # the loss of a model that computes it is identified again at the next one
            self._looks += 1
            # most differences show early
            self.until_look = min(2**self._looks, _STEPS_BETWEEN_LOOKS)


def _share_mixed(call: ForwardPass, loss: IdentifiedLoss, gradients: ExampleGradients) -> float:
    """The share of ∇L, for the model's own loss L on this batch, that no weighting of its examples
    explains.

    This is min_w ‖∇L − Σ_i w_i g_i‖ / ‖∇L‖, by least squares. Gradients are compared as sums of 64
    · batch groups of numbers with random signs.
    """
    weights = {name: value.clone().requires_grad_() for name, value in gradients.parameters.items()}
    with torch.enable_grad(), replayed_masks(call.masks), gradients.backward_state():
        with gradients.forward_state():
            own = {**weights, **gradients.own_constants()}
            value = loss(call_with(gradients.model, own, call.args, call.kwargs), None)
        found = torch.autograd.grad(
            value, list(weights.values()), allow_unused=True, materialize_grads=True
        )
        of_batch = flatten(dict(zip(weights, found, strict=True)))
    count, size = len(gradients), gradients.num_parameters
    source = torch.Generator(gradients.device).manual_seed(0)
    signs = torch.randint(2, (size,), generator=source, device=gradients.device) * 2 - 1

    def short(gradient: Tensor) -> Tensor:
        return (
            F.pad(gradient * signs, (0, -size % (64 * count)))
            .view(-1, 64 * count)
            .sum(dim=0)
            .double()
            .cpu()
        )

    rows = [replace(gradients, examples=gradients.examples[slice(i, i + 1)]) for i in range(count)]
    alone = torch.stack([short(row.gradients()[0]) for row in rows], dim=1)  # [64 · batch, batch]
    whole = short(of_batch)[:, None]
    rest = whole - alone @ torch.linalg.lstsq(alone, whole, driver="gelsd").solution
    return float(rest.norm() / whole.norm().clamp(min=1e-300))


def check_copy(ours: Tensor, loops: Tensor, *, reduced: bool) -> None:
    """Raise unless ‖g‖ from the engine's copy of the model and from the loop's own pass agree,
    [batch] each.

    ``reduced`` says whether the model computes with fewer digits than float32 has.
    """
    apart, size = _distance(ours, loops).tolist()
    if apart > _tolerance(loops, reduced=reduced) * size:
        theirs = _COPY_DIFFERS.format(f"some that differ by up to {apart:.3g}")
        raise RuntimeError(f"the gradients' norms are at most {size:.3g}, {theirs}")


def _tolerance(values: Tensor, *, reduced: bool) -> float:
    return _LOOSE_TOLERANCE if reduced else _TOLERANCE.get(values.dtype, _LOOSE_TOLERANCE)


def _distance(ours: Tensor, theirs: Tensor) -> Tensor:
    """max |a − b| and max |b|, float64 [2]."""
    return torch.stack([(ours.to(theirs) - theirs).abs().max(), theirs.abs().max()]).double()


def _is_far(distance: Tensor, tolerance: float) -> Tensor:
    """Whether a distance is above the tolerance, relative to the size, or not finite, bool []."""
    return ~((distance[0] <= tolerance * distance[1]) & distance.isfinite().all())


def _check_finite_outputs(call: ForwardPass) -> None:
    for leaf in tensors_of(call.outputs):
        if leaf.is_floating_point() and not bool(leaf.isfinite().all()):
            raise RuntimeError(_DIVERGED.format(_NOT_TAKEN))


def _with_rows(tree: object) -> list[Tensor]:
    return [leaf for leaf in tensors_of(tree) if leaf.ndim and len(leaf)]


def _any_alike(some: list[Tensor], others: list[Tensor], device: torch.device) -> Tensor:
    """Whether any two have the same shape, dtype and numbers, in their first and last rows
    (vectors: everywhere).

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


# --------------------------------------------------------- rows that are made from several examples

# Accounting and differential privacy require that an example enters its own row of the model's
# input and no other. Mixup, CutMix, a shuffled batch and statistics of the batch violate this, and
# leave traces in the numbers: a row is a blend, a patchwork or a copy of *other* rows, or the
# batch's mean is exactly 0. An augmentation of each row on its own (noise, flips, crops) leaves no
# such trace.

_MOST_ROWS = 32  # rows of the input that are compared with all rows of the batch
_FEWEST_NUMBERS = 8  # numbers in a row that say something even if they are categories
_EXACT = 1e-5  # relative, in float32
_SHARE = 1e-2  # of another row, from which on it counts


def how_rows_mix(given: Tensor, rows: Tensor) -> str | None:
    """How the rows of an input, [batch, …], were made from several rows of the loader's batch.

    None: they were not.

    It says nothing about batches of one, about rows of fewer than eight numbers that repeat
    (categories), or about blends of rows of one or two numbers.

    Example:
        >>> rows = torch.randn(4, 9, generator=torch.Generator().manual_seed(0))
        >>> how_rows_mix(rows + 0.1, rows), how_rows_mix(0.6 * rows + 0.4 * rows.flip(0), rows)
        (None, 'blends of two rows (mixup?)')
    """
    batch, numbers = len(rows), rows[0].numel() if len(rows) else 0
    if batch < 2 or not numbers or torch.equal(given, rows):
        return None
    # equal or dependent by chance
    if numbers < _FEWEST_NUMBERS and 2 * rows.unique().numel() < rows.numel():
        return None
    x, t = (leaf.detach().reshape(batch, numbers).double() for leaf in (given, rows))
    if not (x + t).isfinite().all():  # reported with the rows' numbers
        return None
    changed = (x != t).any(dim=1).nonzero().flatten()[:_MOST_ROWS]
    if len(changed) > 1 and _are_copies(x[changed], t, changed):
        return (
            "rows in another order than the loader gave them, so they would be recorded for "
            "other examples"
        )
    if given.is_floating_point():
        if _are_blends(x[changed], t, changed):
            return "blends of two rows (mixup?)"
        if _are_centred(x) and not _are_centred(t):
            return "centred by statistics of the batch"
    if _are_patchworks(x[changed[:8]], t, changed[:8]):
        return "patchworks of two rows (CutMix?)"
    return None


def _are_copies(x: Tensor, t: Tensor, own: Tensor) -> bool:
    """Whether every row of x, [k, numbers], equals a row of t, [batch, numbers], but not its own
    row ``own``, [k].
    """
    alike = torch.cdist(x, t) == 0
    alike[torch.arange(len(own), device=own.device), own] = False
    return bool(alike.any(dim=1).all())


def _are_blends(x: Tensor, t: Tensor, own: Tensor) -> bool:
    """Whether at least half of x's rows are a·(own row) + b·(another), b ≠ 0: least squares with
    all other rows.

    Mixup may leave some rows almost unchanged. Constant rows (a change of brightness is a blend
    with one), and rows that are all blends of a few others, say nothing.
    """
    mine, count, first = t[own], len(own), t[:8]
    if t.shape[1] < 3 or int(torch.linalg.matrix_rank(first)) < min(len(first), t.shape[1], 4):
        return False
    tt, mm = t.square().sum(dim=1)[None], mine.square().sum(dim=1)[:, None]  # [1, batch], [k, 1]
    mt, xt, xm = mine @ t.T, x @ t.T, (x * mine).sum(dim=1)[:, None]
    determinant = mm * tt - mt.square()
    usable = (determinant > 1e-6 * mm * tt) & (t != t[:, :1]).any(dim=1)
    usable[torch.arange(count, device=own.device), own] = False
    determinant = torch.where(usable, determinant, 1.0)
    a, b = (tt * xm - mt * xt) / determinant, (mm * xt - mt * xm) / determinant

    # The closed form loses digits, so the best candidate of each row is checked directly.
    left = x.square().sum(dim=1)[:, None] - a * xm - b * xt
    best = torch.where(usable, left, torch.inf).argmin(dim=1)
    rows = torch.arange(count, device=own.device)
    rest = x - a[rows, best][:, None] * mine - b[rows, best][:, None] * t[best]
    small = rest.norm(dim=1) <= _EXACT * x.norm(dim=1)
    return bool(
        (small & usable[rows, best] & (b[rows, best].abs() > _SHARE)).double().mean() >= 0.5
    )


def _are_patchworks(x: Tensor, t: Tensor, own: Tensor) -> bool:
    """Whether each row of x combines numbers from its own row with several numbers from another
    row.
    """
    for row, k in zip(x, own.tolist(), strict=True):
        other = row != t[k]
        alike = (t[:, other] == row[other]).all(dim=1)
        alike[k] = False
        if (
            int(other.sum()) < _FEWEST_NUMBERS
            or not bool(alike.any())
            or not bool((row[other] != row[other][0]).any())
        ):
            return False
    return len(x) > 0


def _are_centred(x: Tensor) -> bool:
    """Whether every column, or all numbers together, have mean 0 up to rounding, though they are
    not all 0.
    """
    size = x.square().mean(dim=0).sqrt()
    columns = size > 0
    by_column = (x.mean(dim=0).abs() <= _EXACT * size)[columns]
    together = x.mean().abs() <= 1e-7 * x.square().mean().sqrt()
    return bool(columns.any()) and (bool(by_column.all()) or bool(together))
