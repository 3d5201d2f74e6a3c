"""Opacus's optimizer with a clip function of choice, and two moments at which the engine is told."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from opacus.optimizers import DPOptimizer
from opacus.optimizers.optimizer import _check_processed_flag, _mark_as_processed
from torch import Tensor, optim

from torchfil.clipping import ClipFunction

__all__ = ["FILOptimizer"]


class FILOptimizer(DPOptimizer):
    """A :class:`DPOptimizer` that clips by g̃ = φ(‖g‖) g with a registered clip function.

    The sensitivity of the noisy sum is ``clip.max_norm(max_grad_norm)``: ``max_grad_norm`` for calibrated clips.

    Args:
        optimizer: The wrapped torch optimizer.
        clip: The clip function.
        **settings: As in :class:`DPOptimizer`.
    """

    def __init__(self, optimizer: optim.Optimizer, *, clip: ClipFunction, **settings: Any) -> None:
        super().__init__(optimizer, **settings)
        self.clip = clip
        self.measure: Callable[[FILOptimizer, Tensor], Callable[[], None]] | None = None
        self.on_logical_step: Callable[[FILOptimizer], None] | None = None
        self.on_zero_grad: Callable[[], None] | None = None
        self._whole_batch = False

    def per_sample_norms(self) -> Tensor:
        """‖g‖ of each example of the present physical batch, [batch]."""
        samples = self.grad_samples
        device = samples[0].device
        if len(samples[0]) == 0:
            return torch.zeros(0, device=device, dtype=samples[0].dtype)
        sizes = {len(sample) for sample in samples}
        if len(sizes) > 1:
            shapes = [
                tuple(p.shape) for p, sample in zip(self.params, samples, strict=True) if len(sample) == min(sizes)
            ]
            raise RuntimeError(
                f"per-example gradients of {min(sizes)} and of {max(sizes)} examples in one step: the parameters of "
                f"shape {shapes} saw one row for the whole batch (position embeddings do). Give them a row per example "
                "(position_ids in the batch), or freeze them (requires_grad_(False))."
            )
        parts = [torch.linalg.vector_norm(sample.reshape(len(sample), -1), dim=1).to(device) for sample in samples]
        return torch.linalg.vector_norm(torch.stack(parts, dim=1), dim=1)

    def clip_and_accumulate(self) -> None:
        """Clip every example's gradient and add it to ``p.summed_grad``.

        The engine measures, then confirms and records, before anything is added; a GPU sums meanwhile.
        """
        self.drop_released_sums()
        for p in self.params:
            _check_processed_flag(p.grad_sample)
        norms = self.per_sample_norms()
        record = self.measure(self, norms) if self.measure is not None else None
        scale = self.clip.scale(norms, self.max_grad_norm)
        sums = []
        for p in self.params:
            grad_sample = self._get_flat_grad_sample(p).to(p.dtype)
            weight = scale.to(grad_sample.device, p.dtype)
            sums.append((weight @ grad_sample[:, None].flatten(1)).reshape(grad_sample.shape[1:]))
        if record is not None:
            record()
        for p, summed in zip(self.params, sums, strict=True):
            p.summed_grad = summed if p.summed_grad is None else p.summed_grad + summed
            _mark_as_processed(p.grad_sample)

    def drop_released_sums(self) -> None:
        """Forget sums of a step that was taken, where nothing has cleared them: added to, they would be released again.

        ``model.zero_grad()`` does not reach them; Opacus refuses the next step then.
        """
        for p in self.params:
            if p.summed_grad is not None and hasattr(p.summed_grad, "_processed"):
                p.summed_grad = None

    def pre_step(self, closure: Callable[[], float] | None = None) -> bool | None:
        """As in Opacus; tells the engine when a logical batch has been released."""
        proceed: bool | None = super().pre_step(closure)
        if proceed and self.on_logical_step is not None:
            self.on_logical_step(self)
        return proceed

    def add_noise(self) -> None:
        """As in Opacus, the same numbers in fewer steps."""
        std = self.noise_multiplier * self.max_grad_norm
        if self.secure_mode or std == 0:
            super().add_noise()
            return
        noises = []
        for p in self.params:
            _check_processed_flag(p.summed_grad)
            noise = torch.empty_like(p.summed_grad, memory_format=torch.contiguous_format)
            noises.append(noise.normal_(0, std, generator=self.generator))
        torch._foreach_add_(noises, [p.summed_grad for p in self.params])
        for p, noise in zip(self.params, noises, strict=True):
            p.grad = noise.view_as(p)
            _mark_as_processed(p.summed_grad)

    def scale_grad(self) -> None:
        """As in Opacus, the same numbers in fewer steps."""
        if self.loss_reduction == "mean" and self.params:
            torch._foreach_div_([p.grad for p in self.params], self.expected_batch_size * self.accumulated_iterations)

    @property
    def accumulated_iterations(self) -> int:
        """As in Opacus: backward passes since the last step; 1 where sums were given."""
        return 1 if self._whole_batch else int(super().accumulated_iterations)

    def release(self, sums: Sequence[Tensor]) -> None:
        """Take a whole step from given sums of clipped gradients, one for each of ``params``: noise, scale, update."""
        for group in self.original_optimizer.param_groups:
            for p in group["params"]:
                p.grad = None
        for p, summed in zip(self.params, sums, strict=True):
            p.summed_grad = summed
        self._whole_batch = True
        try:
            self.add_noise()
            self.scale_grad()
            if self.step_hook is not None:
                self.step_hook(self)
        finally:
            self._whole_batch = False
        if self.on_logical_step is not None:
            self.on_logical_step(self)
        self.original_optimizer.step()
        for p in self.params:
            p.summed_grad = None

    def zero_grad(self, set_to_none: bool = False) -> None:
        """As in Opacus."""
        super().zero_grad(set_to_none)
        if self.on_zero_grad is not None:
            self.on_zero_grad()

    @property
    def inside_logical_batch(self) -> bool:
        """Whether physical batches were accumulated whose logical batch has not ended."""
        return bool(self._is_last_step_skipped)

    def discard_partial_batch(self) -> None:
        """Forget what an unfinished logical batch has accumulated; nothing of it was released."""
        for p in self.params:
            p.summed_grad = None
            p.grad_sample = None
        self._step_skip_queue.clear()
        self._is_last_step_skipped = False
        self.original_optimizer.zero_grad()
        if self.on_zero_grad is not None:
            self.on_zero_grad()
