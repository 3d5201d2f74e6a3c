"""The stages between record and stage that a step of the user's loop and one of ``train_step`` share."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from torchfil.accounting.ledger import Ledger
from torchfil.engine.asking import Places, with_alternatives
from torchfil.engine.executor import Executor, Started
from torchfil.engine.loader import is_target_name
from torchfil.engine.looks import DatasetLooks
from torchfil.engine.losses import IdentifiedLoss, LossMismatchError
from torchfil.engine.measure import StepValues, Wanted
from torchfil.engine.options import RunOptions
from torchfil.engine.replica import Replica
from torchfil.engine.run import Run
from torchfil.engine.staging import Noise
from torchfil.engine.step.batch_checks import nothing
from torchfil.engine.step.checks import StepChecks
from torchfil.engine.step.forwards import ForwardPass, Observer
from torchfil.fisher.draws import Draws
from torchfil.fisher.gradients import ExampleGradients
from torchfil.fisher.masks import replayed_masks
from torchfil.fisher.mechanism import Mechanism
from torchfil.private import Examples, Private

__all__ = ["Computed", "Setting", "StepStages", "private_without_labels"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Computed:
    """A physical batch that was computed and not staged yet.

    Attributes:
        sums: Σ_i g̃_i by parameter name; None for no example, or where Opacus has the gradients.
        backward_passes: The number of the loop's backward passes that it came from.
        confirm_and_stage: Ends the checks that have begun, raises if one fails, and stages the batch.
        losses: ℓ, [batch], if they were wanted.
    """

    sums: dict[str, Tensor] | None
    backward_passes: int
    confirm_and_stage: Callable[[], None]
    losses: Tensor | None = None


@dataclass(frozen=True)
class Setting:
    """What the batches of a step have in common; new findings are kept only when the step is staged."""

    noise: Noise
    loss: IdentifiedLoss | None
    ledger: Ledger
    test_matrix: Tensor | None
    measure: bool


class StepStages:
    """Turns a forward pass into what is staged.

    Args:
        run: Stages the batches.
        replica: The model.
        executor: Computes sums, norms and Fisher information.
        checks: Compares them with what the loop did.
        observer: Holds the loop's forward passes.
        looks: Looks at all examples at once.
    """

    def __init__(
        self,
        run: Run,
        replica: Replica,
        executor: Executor,
        checks: StepChecks,
        observer: Observer,
        looks: DatasetLooks,
    ) -> None:
        self.run = run
        self.options: RunOptions = run.options
        self.replica = replica
        self.executor = executor
        self.checks = checks
        self.observer = observer
        self.looks = looks
        self._closed = False
        self._last_mechanism: tuple[Noise, Mechanism] | None = None

    def _mechanism(self, noise: Noise) -> Mechanism:
        """Clipping, noise and subsampling of a release; the last mechanism is kept for reuse."""
        if self._last_mechanism is None or self._last_mechanism[0] != noise:
            made = self.options.mechanism(noise.noise_multiplier, noise.max_grad_norm)
            self._last_mechanism = noise, made
        return self._last_mechanism[1]

    def _setting(
        self, forward: ForwardPass, examples: Examples, loss: IdentifiedLoss | None, noise: Noise, measure: bool
    ) -> Setting:
        """What is the same for all batches of a step; the first step creates the ledger."""
        run = self.run
        ledger, test_matrix = run.ledger, run.test_matrix
        if ledger is None:
            self.checks.check_calls_for_refresh(forward)
            self.checks.warn_if_not_smooth(forward)
            ledger, test_matrix = run.new_ledger(examples.num_coordinates)
        return Setting(noise, loss, ledger, test_matrix, measure)

    def _identified(self, forward: ForwardPass) -> IdentifiedLoss:
        """The loss that the loop uses; the model's own loss if the loop uses it, and no other loss fits."""
        try:
            loss = self.checks.identified_loss(forward)
        except LossMismatchError:
            if not forward.uses_own_loss_alone:
                raise
            loss = self.checks.own_loss(forward.made_whole())
        if self.run.loss is None:
            logger.info("the training loop's loss was identified as %s", loss.name)
        return loss

    def _evaluated(
        self, forward: ForwardPass, examples: Examples, setting: Setting, *, summed: bool
    ) -> tuple[StepValues | None, list[Callable[[], None]]]:
        """The values of one forward pass (None if none are needed), and the checks that have begun."""
        loss = setting.loss
        measured = (setting.measure or setting.noise.noise_multiplier == 0) and not self.run.paused
        if loss is None or not (summed or measured):
            if loss is not None and not self.run.paused:
                self.checks.check_loss(forward, loss, by_opacus=True)
            return None, []
        setting.ledger.check_coordinates(examples.num_coordinates)
        examples = self._with_weights(examples, forward.ids or [])
        questions: Places = ()
        if measured and self.options.accounting.questions:
            examples, questions = with_alternatives(
                examples, self.options.accounting.questions, check_values=self.run.ledger is None
            )

        # A wrong loss would spoil the trial, so the loss is checked first.
        gradients = self._in_precision(self.replica.gradients(examples, loss), forward.autocast)
        from_loop = forward.outputs is not None
        looked_at = from_loop and not self.executor.knows(gradients)
        if looked_at:
            self.checks.check_loss(forward, loss, by_opacus=not summed)
        mechanism = self._mechanism(setting.noise)
        wanted = self._wanted(setting, measured, questions, summed=summed)
        started, forward.recorded = Started(forward.recorded), None
        values = self.executor.run(gradients, mechanism, wanted, started)

        confirmations: list[Callable[[], None]] = []
        if from_loop and values.output_gradients is not None:
            confirmations.append(
                self.checks.begin_output_check(forward, values.output_gradients, loss, by_opacus=not summed)
            )
        if measured:
            values = self._measured_anew(gradients, mechanism, values, wanted, forward.ids or [])
        if from_loop and not confirmations:  # a mapped pass has no gradients at outputs, but the same losses
            if not looked_at:
                self.checks.check_loss(forward, loss, by_opacus=not summed)
            assert values.losses is not None
            confirmations.append(self.checks.begin_loss_check(forward, loss, values.losses))
        confirmations.append(self.checks.begin_norm_look(values.norm, values.losses) if summed else nothing)
        if not from_loop:
            confirmations.append(self.checks.begin_weight_look(loss, examples.public[2]))
        if not from_loop and self.replica.written:
            confirmations.append(lambda: self._write_buffers(forward, gradients))
        return values, confirmations

    def _in_precision(self, gradients: ExampleGradients, autocast: torch.dtype | None) -> ExampleGradients:
        probe_precision = self.options.accounting.execution.probe_precision_on(self.replica.device)
        return replace(gradients, autocast=autocast, probe_precision=probe_precision)

    def _measured_anew(
        self, gradients: ExampleGradients, mechanism: Mechanism, values: StepValues, wanted: Wanted, ids: list[int]
    ) -> StepValues:
        """The same values, with a few chosen examples measured again with more probes."""
        rows = self.run.exposed_rows(ids, values.clipped_norm)
        if rows is None or mechanism.noiseless or self.replica.written:
            return values
        few = replace(gradients, examples=replace(gradients.examples, alternatives=())[rows])
        seeds = Draws.seeds_from(self.options.accounting.extra_probes, self.run.generator)
        again = replace(wanted, seeds=seeds, summed=False, questions=())
        anew = self.executor.run(few, mechanism, again, few=True)
        assert anew.additions is not None
        return values.measured_anew(rows, anew.additions)

    def _wanted(self, setting: Setting, measured: bool, questions: Places, *, summed: bool) -> Wanted:
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

    def _staging(
        self,
        step: StepValues | None,
        confirmations: Sequence[Callable[[], None]],
        ids: list[int],
        noise: Noise,
        measure: bool,
        backward_passes: int,
        setting: Setting | None = None,
        num_coordinates: Tensor | int | None = None,
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
                run.stage(
                    ids, step.clipped_norm, step.additions, noise, measure=measure, num_coordinates=num_coordinates
                )
            self.observer.forget_finished()

        sums = step.sums if step is not None and step.sums else None
        return Computed(sums, backward_passes, confirm_and_stage, step.losses if step is not None else None)

    def _examples(self, forward: ForwardPass) -> Examples:
        """The examples of a forward pass, with their private coordinates and masks."""
        examples = forward.examples
        if examples is None:
            targets = self.checks.targets(forward)
            private = self._private(forward.args, forward.kwargs)
            examples = self.replica.lay_out(forward.args, forward.kwargs, targets, private)
        return self._with_masks(examples, forward)

    def _private(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Private | None:
        return private_without_labels(self.options.private, args, kwargs)

    def _with_masks(self, examples: Examples, forward: ForwardPass) -> Examples:
        return replace(examples, masks=self.replica.masks_by_example(forward.masks, forward.args, forward.kwargs))

    def _with_weights(self, examples: Examples, ids: Sequence[int]) -> Examples:
        """The examples with their weights ω; unchanged if nobody has one."""
        weights = self.run.weights_of(ids)
        return examples if weights is None else replace(examples, clip_weights=weights)

    def _write_buffers(self, forward: ForwardPass, gradients: ExampleGradients) -> None:
        """Update the model's buffers as its forward pass would, once, however the passes were cut."""
        if not self.executor.runs_in_pieces(gradients):
            self.replica.write_buffers(gradients)
            return
        with torch.no_grad(), replayed_masks(forward.masks):
            self.replica.live(*forward.args, **forward.kwargs)


def private_without_labels(private: Private | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Private | None:
    """What is private; if this is not specified, labels among the inputs are not private."""
    labels = [key for key in kwargs if is_target_name(key)]
    if private is not None or not labels:
        return private
    named: dict[int | str, Any] = dict(enumerate(args))
    named.update(kwargs)
    floating = [key for key, leaf in named.items() if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    others = [key for key in floating if key not in labels]
    return Private(inputs=others) if others and others != floating else None
