"""Opacus's optimizer with any clip function; it reports clipping and each release to the engine.

Noise is added only here: ``step()`` is clip and accumulate → noise → scale → update.
:meth:`FILOptimizer.release` is such a step with sums that come from elsewhere.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from opacus.optimizers import DPOptimizer
from opacus.optimizers.optimizer import _check_processed_flag, _mark_as_processed
from torch import Tensor, optim
from torch.distributed.tensor import DTensor

from torchfil.audit.canaries import CanaryScores
from torchfil.clipping import ClipFunction
from torchfil.engine.distributed.ranks import Ranks, StepNotTakenError, part_of_sum
from torchfil.fisher.models import wide_dtype
from torchfil.utils.errors import OfRun
from torchfil.utils.noise import NoiseSource

__all__ = ["FILOptimizer", "GradSampleOptimizer"]


class FILOptimizer(OfRun, DPOptimizer):
    """A :class:`DPOptimizer` whose clipped sums come from the engine: no per-example gradient is
    formed.

    The sensitivity of the noisy sum is ``clip.max_norm(max_grad_norm)``: ``max_grad_norm`` for
    calibrated clips.

    Args:
        optimizer: The wrapped torch optimizer.
        clip: The clip function.
        step: The :class:`~torchfil.engine.step.Step` that provides the sums, and books releases.
        names: The parameters' names by identity.
        noise: The source of the noise.
        shares: C_l/C by name, if each parameter's gradient is clipped separately.
        ranks: The processes that train together; None: a single one. With several, rank 0 adds the
            noise, and gradients are summed over the ranks, as in Opacus.
        **settings: As in :class:`DPOptimizer`.

    Attributes:
        initial_noise: σ and C before any scheduler, by name.
        canaries: Those that audit the run; they join where noise is added.
        watchers: Called with the number of private steps, after each.
    """

    def __init__(
        self,
        optimizer: optim.Optimizer,
        *,
        clip: ClipFunction,
        step: Any,
        names: Mapping[int, str],
        noise: NoiseSource,
        shares: Mapping[str, float] | None = None,
        ranks: Ranks | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(optimizer, **settings)
        self.clip, self.noise, self.initial_noise = clip, noise, self._noise_now()
        self._step, self._ranks, self._names, self._shares = step, ranks, names, shares
        # gives the sums of the current step
        self._measure: Callable[[], Mapping[str, Tensor] | None] | None = None
        self._answered = False  # whether the other ranks know if this one takes the current step
        self.canaries: CanaryScores | None = None
        self.watchers: list[Callable[[int], None]] = []

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """A ``GradScaler`` reads this before it steps.

        Raises:
            RuntimeError: Always: a scaler skips steps depending on the batch's gradients, which
                nothing accounts for.
        """
        raise RuntimeError(
            "a GradScaler skips a step if a gradient overflows, which reveals something without "
            "noise. Use autocast with bfloat16, which needs no scaler. This step was not taken."
        )

    @property
    def max_grad_norms(self) -> list[float] | None:
        """C_l for each of ``params``, as in Opacus's per-layer clipping.

        None: gradients are clipped as a whole.
        """
        if self._shares is None:
            return None
        return [float(self.max_grad_norm) * self._shares[name] for name in self.parameter_names]

    @property
    def parameter_names(self) -> list[str]:
        """The names of ``params``.

        Empty for those that the model did not have when it was made private.
        """
        return [self._names.get(id(p), "") for p in self.params]

    @property
    def grad_samples(self) -> list[Tensor]:
        """No per-example gradients are formed: each parameter has an empty one."""
        return [torch.zeros(0, dtype=p.dtype, device=p.device) for p in self.params]

    @property
    def accumulated_iterations(self) -> int:
        """As in Opacus: backward passes since the last step; during a step, those of this step."""
        # an empty batch may have none
        return len(self._step.observer.finished()) or self._step.backward_passes or 1

    def clip_and_accumulate(self) -> None:
        """Add the clipped sums of the current physical batch to ``p.summed_grad``.

        A refusal changes nothing.
        """
        self.drop_released_sums()
        step = self._step
        if self._measure is None:
            values = step.measure(self, step.finished_calls(self), step.run.loss)
            sums = None if values is None else values.sums
        else:
            sums = self._measure()
            for group in self.param_groups:
                for p in group["params"]:
                    p.grad = p.summed_grad = None
        for p, summed in zip(self.params, self._by_parameter(sums), strict=True):
            if p.summed_grad is not None:
                summed = p.summed_grad + summed
            elif self._check_skip_next_step(pop_next=False):
                summed = summed.clone()  # the next physical batch's pass may overwrite it
            p.summed_grad = summed

    def drop_released_sums(self) -> None:
        """Forget the sums of the last step if nothing has cleared them.

        Otherwise they would be released again.

        ``model.zero_grad()`` does not clear them; in that case Opacus refuses the next step.
        """
        for p in self.params:
            if p.summed_grad is not None and hasattr(p.summed_grad, "_processed"):
                p.summed_grad = None

    def pre_step(self, closure: Callable[[], float] | None = None) -> bool | None:
        """As in Opacus; the engine books a logical batch together with the accountant, whom
        ``step_hook`` informs.
        """
        with self.refuse_on_all_ranks():
            self._step.guard.check_optimizer(self.parameter_names)
            self.clip_and_accumulate()
            if self._check_skip_next_step():
                self._is_last_step_skipped = True
                return False
            self.add_noise()
            self.scale_grad()
            self._step.book(self)
            self._is_last_step_skipped = False
            return True

    @torch.enable_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """As in Opacus; after a whole step, watchers are called.

        Ctrl-C before the update undoes the logical batch.
        """
        if not self._step.run.is_updated:
            self._step.run.is_updated = True
            warnings.warn(
                "the last step was counted, but its update was cut short: ε and all readings are "
                "too large, at most by this step. To undo it, load an earlier checkpoint.",
                stacklevel=3,
            )
        with self.watched():
            try:
                return super().step(closure)
            except (KeyboardInterrupt, StepNotTakenError):
                self.discard_partial_batch()
                self._step.give_up()
                raise

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """At the end, if a private step was taken inside, refresh norms and call the watchers."""
        history = self._step.run.history
        before = history.steps
        yield
        if history.steps > before:
            self._step.end(self)
            for watcher in list(self.watchers):
                watcher(history.steps)

    @contextlib.contextmanager
    def refuse_on_all_ranks(self) -> Iterator[None]:
        """If a step is refused inside, all ranks refuse it, and none waits for another."""
        if self._ranks is None:
            yield
            return
        self._ranks.check_together()
        self._answered = False
        try:
            yield
        except StepNotTakenError:
            raise
        except Exception:
            if not self._answered:
                self._ranks.refuse(
                    self._facts(), inside=self.inside_logical_batch or bool(self._step_skip_queue)
                )
            self._step.replica.free_weights()
            raise

    def _facts(self) -> dict[str, float | None]:
        """What must be the same on all ranks."""
        return {**self._noise_now(), **self._step.facts()}

    def _noise_now(self) -> dict[str, float]:
        """σ and C, which schedulers may change."""
        return {
            "noise_multiplier": float(self.noise_multiplier),
            "max_grad_norm": float(self.max_grad_norm),
        }

    def add_noise(self) -> None:
        """As in Opacus, the same numbers in fewer operations.

        Only the sums if another rank adds the noise.
        """
        if self._ranks is not None:
            self._answered = True
            self._ranks.agree(self._facts())
            self._step.run.participants()
            if self._ranks.rank > 0:
                self._set_gradients([p.summed_grad.clone() for p in self.params])
                return

        std = self.noise_multiplier * self.max_grad_norm
        sums = [p.summed_grad for p in self.params]
        limits = self.max_grad_norms or [float(self.max_grad_norm)] * len(sums)
        if self.canaries is None:
            noises = [
                torch.empty_like(each, memory_format=torch.contiguous_format) for each in sums
            ]
        else:
            noises = self.canaries.begin(sums)
        for noise in noises:
            _ = self.noise.normal_(noise, std) if std else noise.zero_()
        torch._foreach_add_(noises, sums)
        if self.canaries is not None:
            self.canaries.join(limits)
            self.canaries.score(limits, std)
        self._set_gradients(noises)

    def _set_gradients(self, noisy_sums: Sequence[Tensor]) -> None:
        """Set ``p.grad`` to this rank's gradients.

        For a sharded weight, to its part of the sum (collective).
        """
        for p, noisy in zip(self.params, noisy_sums, strict=True):
            _check_processed_flag(p.summed_grad)
            # sums and noise of a model held in bfloat16 are float32
            gradient = noisy.view(p.shape).to(p.dtype)
            p.grad = part_of_sum(gradient, p) if isinstance(p, DTensor) else gradient
            _mark_as_processed(p.summed_grad)

    def scale_grad(self) -> None:
        """As in Opacus, the same numbers in fewer operations.

        Afterwards the gradients are those of all ranks.
        """
        if self.loss_reduction == "mean" and self.params:
            torch._foreach_div_(
                [p.grad for p in self.params],
                self.expected_batch_size * self.accumulated_iterations,
            )
        if self._ranks is not None:
            mean = self.loss_reduction == "mean"
            self._ranks.add_up(
                [p.grad for p in self.params if not isinstance(p, DTensor)], mean=mean
            )
            sharded: Any = [p.grad for p in self.params if isinstance(p, DTensor)]  # already summed
            if mean and sharded:
                torch._foreach_div_(sharded, self._ranks.size)

    def _by_parameter(self, sums: Mapping[str, Tensor] | None) -> list[Tensor]:
        """The sums for each of ``params``; 0 if there are none."""
        if sums is None:
            return [
                torch.zeros(p.shape, dtype=wide_dtype(p.dtype), device=p.device)
                for p in self.params
            ]
        return [
            sums[name].view(p.shape)
            for name, p in zip(self.parameter_names, self.params, strict=True)
        ]

    def release(self, measure: Callable[[], Mapping[str, Tensor] | None]) -> None:
        """Take a whole step from sums of clipped gradients instead of a loop's backward passes.

        Args:
            measure: Returns the sums by parameter name; None: of no example. It is called within
                the step.
        """
        self._measure = measure
        try:
            self.step()  # as others call it: schedulers replace it to count steps
        finally:
            self._measure = None
        for p in self.params:
            p.summed_grad = None

    def zero_grad(self, set_to_none: bool = False) -> None:
        """As in Opacus."""
        super().zero_grad(set_to_none)
        self._step.observer.forget_finished()

    @property
    def inside_logical_batch(self) -> bool:
        """Whether physical batches of an unfinished logical batch have been accumulated."""
        return bool(self._is_last_step_skipped)

    def discard_partial_batch(self) -> None:
        """Discard an unfinished logical batch; nothing of it was released."""
        for p in self.params:
            p.summed_grad = None
            p.grad_sample = None
        self._step_skip_queue.clear()
        self._is_last_step_skipped = False
        self.original_optimizer.zero_grad()
        self._step.observer.forget_finished()


class GradSampleOptimizer(FILOptimizer):
    """A :class:`FILOptimizer` that clips the per-example gradients of Opacus's hooks, g̃ = ωφ(‖g‖)
    g.

    If each parameter is clipped separately, g̃_l = ωφ_l(‖g_l‖) g_l.
    """

    @property
    def grad_samples(self) -> list[Tensor]:
        """As in Opacus; none are needed for a step from given sums."""
        return (
            [self._get_flat_grad_sample(p) for p in self.params]
            if self._measure is None
            else super().grad_samples
        )

    def clip_and_accumulate(self) -> None:
        """Clip every example's gradient and add it to ``p.summed_grad``, once the engine has
        measured and checked.
        """
        if self._measure is not None:
            super().clip_and_accumulate()
            return
        self.drop_released_sums()
        for p in self.params:
            _check_processed_flag(p.grad_sample)
        parts = self._norms_by_parameter()
        norms, scale = self._norms_and_scale(parts)
        clipped = torch.linalg.vector_norm(scale * parts, dim=1)
        calls = self._step.finished_calls(self, len(norms))
        self._step.measure(self, calls, self._step.run.loss, norms, clipped.detach())
        for p, factor in zip(self.params, scale.unbind(dim=1), strict=True):
            grad_sample = self._get_flat_grad_sample(p).to(wide_dtype(p.dtype))
            summed = (factor.to(grad_sample) @ grad_sample[:, None].flatten(1)).reshape(
                grad_sample.shape[1:]
            )
            p.summed_grad = summed if p.summed_grad is None else p.summed_grad + summed
            _mark_as_processed(p.grad_sample)

    def _norms_and_scale(self, parts: Tensor) -> tuple[Tensor, Tensor]:
        """‖g‖ of each example, [batch], and ωφ of each of its parts, [batch, parameters]."""
        norms = torch.linalg.vector_norm(parts, dim=1)
        limits = self.max_grad_norms
        if limits is None:
            scale = self.clip.scale(norms, self.max_grad_norm)[:, None].expand_as(parts)
        else:
            scale = self.clip.scale(parts, parts.new_tensor(limits))
        weights = self._step.clip_weights(len(parts))
        return norms, scale if weights is None else weights.to(scale)[:, None] * scale

    def _norms_by_parameter(self) -> Tensor:
        """‖g_l‖ of each example of the current physical batch, [batch, parameters]."""
        samples = self.grad_samples
        device, sizes = samples[0].device, {len(sample) for sample in samples}
        if len(sizes) > 1:
            shapes = [tuple(sample.shape[1:]) for sample in samples if len(sample) == min(sizes)]
            raise RuntimeError(
                f"gradients of {min(sizes)} and of {max(sizes)} examples: parameters {shapes} saw "
                "one row for all. Use grad_sample_mode='auto', or give them a row per example."
            )
        flat = [sample[:, None].flatten(1) for sample in samples]
        parts = [
            torch.linalg.vector_norm(part, dim=1, dtype=wide_dtype(part.dtype)).to(device)
            for part in flat
        ]
        return torch.stack(parts, dim=1)
