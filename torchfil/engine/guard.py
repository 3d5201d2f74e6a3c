"""Checks that refuse a step that would be accounted for wrongly.

A check leaves a flag on the device, and all flags of a step are read at once. A failed check is
then looked at closely, to say what is wrong. Checks that need more than a comparison run at the
first steps and then ever more rarely.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torchfil.engine import losses
from torchfil.engine.checks import (
    DIVERGED,
    NOT_TAKEN,
    WEIGHTED_BY_OPACUS,
    Checks,
    Found,
    Uneven,
    with_rows,
)
from torchfil.engine.evidence import Evidence
from torchfil.engine.flags import Flags
from torchfil.engine.forward import ForwardPass
from torchfil.engine.loader import BatchTracker, split_batch
from torchfil.engine.losses import (
    NO_TARGETS,
    WEIGHTED_BY_TOKENS,
    IdentifiedLoss,
    LossMismatchError,
)
from torchfil.engine.measure import StepValues
from torchfil.engine.mixing import how_rows_mix
from torchfil.engine.options import RunOptions
from torchfil.engine.replica import Replica, buffers_kept
from torchfil.fisher.gradients import ExampleGradients, differentiable_twice
from torchfil.fisher.masks import replayed_masks
from torchfil.fisher.models import REDUCED, autocast_as
from torchfil.private import as_call
from torchfil.smoothness import non_smooth_layers, non_smooth_operators
from torchfil.utils.trees import map_tensors, tensors_of

logger = logging.getLogger(__name__)

_STEPS_BETWEEN_LOOKS = 128  # steps between expensive checks; they are more frequent at the start
OTHER_OWN_LOSS = (
    f"the loss that the model computes is not {{}} of its outputs: it has another term (a "
    "penalty, an auxiliary loss). Leave criterion= out, and give every term a weight that is not "
    f"0 from the start. {NOT_TAKEN}"
)


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
        self._uneven = Uneven()
        self._divisor = 1  # by which the loop divides its loss, if it accumulates
        self.flags, self.checks = Flags(), Checks()

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
                f"engine. {NOT_TAKEN}"
            )

    # ------------------------------------------------------------------ the batch

    def moved(self, tree: object) -> Any:
        """The same, with its tensors on the model's device."""
        return map_tensors(lambda leaf: leaf.to(self.replica.device), tree)

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
            for given in with_rows((call.args, call.kwargs))
            for rows in with_rows(self.replica.examples_first(call.batch))
            if given.shape == rows.shape and given.dtype == rows.dtype
        ]
        for given, rows in pairs:
            how = how_rows_mix(given, rows)
            if how is not None:
                raise RuntimeError(
                    f"the model's inputs are {how}: what one example adds through another's row "
                    "is not bounded by max_grad_norm. Make each row from its own example alone; "
                    f"augmentations of single examples are fine. {NOT_TAKEN}"
                )
        self._row_looks += 1
        self._until_rows = min(2**self._row_looks, _STEPS_BETWEEN_LOOKS)
        same = any(torch.equal(given, rows) for given, rows in pairs)
        if self._row_looks == 1 and with_rows(call.batch) and not same:
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
                raise LossMismatchError(WEIGHTED_BY_OPACUS)
            self.flags.warn_once(WEIGHTED_BY_TOKENS)

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

    def found(
        self,
        call: ForwardPass,
        loss: IdentifiedLoss,
        gradients: ExampleGradients,
        values: StepValues,
        regrouped: Callable[[Evidence], Evidence],
        *,
        by_opacus: bool = False,
    ) -> Found:
        """A pass beside what the live model did in this call.

        Args:
            call: The call, with outputs.
            loss: The loss of a row.
            gradients: The examples of the pass.
            values: Its results.
            regrouped: What a call shows by example.
            by_opacus: Whether Opacus's gradients are released.
        """
        assert values.losses is not None
        return Found(
            call,
            gradients,
            values.losses,
            values.output_gradients,
            regrouped(self.evidence(call, loss)),
            self.is_reduced(call),
            self.options.loss_reduction,
            partial(self.check_loss, call, loss, by_opacus=by_opacus),
            by_opacus,
            self._uneven,
        )

    def is_reduced(self, call: ForwardPass) -> bool:
        """Whether the model computes with fewer digits than float32 has."""
        weight = next(self.replica.live.parameters())
        return call.autocast is not None or weight.dtype in REDUCED

    def check_live_model(
        self,
        call: ForwardPass,
        loss: IdentifiedLoss,
        gradients: ExampleGradients,
        values: StepValues,
        regrouped: Callable[[Evidence], Evidence],
        *,
        now: bool,
    ) -> None:
        """Now and then, or ``now``, raise unless the live model's losses on a batch equal the
        engine's.

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

        # nobody has called backward on these outputs
        def looked(seen: Evidence) -> Evidence:
            return regrouped(replace(seen, output_gradients=()))

        about = self.found(call, loss, gradients, values, looked)
        self.flags.ask(self.checks.examples, about)
        self.flags.raise_if_any()
        if not loss.is_models_own and losses.check_equal_weights(
            loss, call.outputs, self.targets(call)
        ):
            self.flags.warn_once(WEIGHTED_BY_TOKENS)
        if due:  # the loss of a model that computes it is identified again at the next one
            self._looks += 1
            # most differences show early
            self.until_look = min(2**self._looks, _STEPS_BETWEEN_LOOKS)


def _check_finite_outputs(call: ForwardPass) -> None:
    for leaf in tensors_of(call.outputs):
        if leaf.is_floating_point() and not bool(leaf.isfinite().all()):
            raise RuntimeError(DIVERGED.format(NOT_TAKEN))
