r"""Privacy-loss input susceptibility: which attributes of an example drive its loss of privacy
(PLIS, 2022).

    PL = ‖g‖²/s²,      PLIS = ∂PL/∂z = 2 Jᵀg / s²,      J = ∂g/∂z.

Under DP-SGD, g is the clipped gradient g̃ and s = σC the noise's standard deviation. Then PLIS =
2‖g̃‖ a / s², where a = ∂‖g̃‖/∂z is the direction that exact Poisson accounting weights by κ∥
(:mod:`torchfil.fisher.operator`). Without noise, s = 1 (the "gradient signal").
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from torchfil.clipping import DEFAULT_CLIP, ClipFunction, get_clip
from torchfil.fisher.amplification import NoAmplification
from torchfil.fisher.batch import PrivateBatch
from torchfil.fisher.gradients import DEFAULT_MAX_MEMORY, ExampleGradients, LossFunction
from torchfil.fisher.mechanism import Mechanism
from torchfil.fisher.recording import Plan, RecordedJacobian, UnsupportedCallError, plan
from torchfil.fisher.recording.graphs import CapturedPass, signature
from torchfil.private import Examples, Inputs, Private
from torchfil.utils.trees import concatenated

logger = logging.getLogger(__name__)

_UNCLIPPED = ClipFunction(
    "none", torch.ones_like, torch.zeros_like, norm_bound=math.inf, calibrated=False
)
_MOST_GRAPHS = 8
_WORKING_VECTORS = 6  # vectors of length p per example, if gradients must be formed


@dataclass(frozen=True)
class Susceptibility:
    """PL, [batch], and PLIS = ∂PL/∂z, [batch, d]."""

    privacy_loss: Tensor
    gradient: Tensor


def unclipped(noise_std: float) -> Mechanism:
    """A mechanism that adds noise of that standard deviation, and does not clip."""
    return Mechanism(1.0, noise_std, _UNCLIPPED, NoAmplification())


def recorded_norms(gradients: ExampleGradients, mechanism: Mechanism) -> tuple[Tensor, Tensor]:
    """‖g̃‖, [batch], and a = ∂‖g̃‖/∂z, [batch, d]: a forward pass, a backward pass, and a backward
    pass through both.
    """
    jacobian = RecordedJacobian(gradients, mechanism)
    return jacobian.clipped_norm, jacobian.clipped_norm_gradient()


class _GraphedNorms:
    """:func:`recorded_norms`, on a GPU as a CUDA graph, from the second batch of a kind on."""

    def __init__(self) -> None:
        self.usable = True
        self._captured: dict[Hashable, CapturedPass | None] = {}  # None: seen once

    def __call__(self, gradients: ExampleGradients, mechanism: Mechanism) -> tuple[Tensor, Tensor]:
        if not self.usable or gradients.device.type != "cuda":
            return recorded_norms(gradients, mechanism)

        key = (
            len(gradients),
            signature(gradients),
            tuple(module.training for module in gradients.model.modules()),
        )
        if key not in self._captured:
            if len(self._captured) >= _MOST_GRAPHS:
                self._captured.clear()
            self._captured[key] = None
            return recorded_norms(gradients, mechanism)

        def stages(given: ExampleGradients) -> Iterator[tuple[Tensor, Tensor]]:
            yield recorded_norms(given, mechanism)

        try:
            captured = self._captured[key] or CapturedPass(gradients, len(gradients), stages)
            self._captured[key] = captured
            ((norm, slope),) = captured.replay(gradients.examples)
        except RuntimeError as error:
            logger.warning("PLIS could not be captured in a CUDA graph and runs eagerly: %s", error)
            self.usable = False
            self._captured.clear()
            return recorded_norms(gradients, mechanism)
        return norm.clone(), slope.clone()  # the next replay overwrites them


def susceptibility(
    gradients: ExampleGradients,
    mechanism: Mechanism | None = None,
    *,
    max_memory: int = DEFAULT_MAX_MEMORY,
    batch_plan: Plan | None = None,
    recorded_pass: Callable[[ExampleGradients, Mechanism], tuple[Tensor, Tensor]] = recorded_norms,
) -> Susceptibility:
    """PL = ‖g̃‖²/s² and PLIS = 2‖g̃‖a/s² of every example of a batch.

    If the layers allow, this takes one recorded pass without per-example gradients
    (:mod:`torchfil.fisher.recording`), otherwise gradients mapped over examples; in chunks either
    way.

    Args:
        gradients: The examples with model and loss, and their clip weights ω, if any.
        mechanism: How gradients are clipped, and s; None: the gradient signal, not clipped, not
            weighted, and s = 1.
        max_memory: The bytes for a chunk's graph or gradients; a chunk has at least one example.
        batch_plan: An earlier result of :func:`torchfil.fisher.recording.plan` for such a batch.
        recorded_pass: How to compute ‖g̃‖ and a if the layers allow a recorded pass.
    """
    if mechanism is None:
        mechanism, plain = unclipped(1.0), replace(gradients.examples, clip_weights=None)
        gradients = replace(gradients, examples=plain)
    parts: list[tuple[Tensor, Tensor]] = []
    if len(gradients) and mechanism.shares is None:
        batch_plan = batch_plan if batch_plan is not None else plan(gradients)
        chunks = gradients.chunks(max_memory, batch_plan.bytes_per_example)
        with contextlib.suppress(UnsupportedCallError):  # of a batch that is not as the trial's
            parts = (
                [recorded_pass(part, mechanism) for _, part in chunks] if batch_plan.fits else []
            )
    if not parts:
        mapped = PrivateBatch(gradients, mechanism).chunks(max_memory, _WORKING_VECTORS)
        parts = [
            (jacobian.clipped_norm, jacobian.clipped_norm_gradient()) for _, jacobian in mapped
        ]
    norm, slope = concatenated(parts)
    factor = mechanism.noise_std**-2
    return Susceptibility(factor * norm.square(), 2 * factor * norm[:, None] * slope)


class PLIS:
    """An attribution of each example's privacy loss to its input, in the shape of the input.

    It is positive where a larger value would raise the example's privacy loss, negative where it
    would lower it; its size says how fast.

    Guarantees:
        * Examples do not mix: if a model mixes them in a recorded pass, this is detected, and they
          are processed one by one.
        * A zero gradient gives a map of zeros.
        * The model is not changed, and no ``.grad`` is touched.

    Args:
        model: Any module without batch normalisation and active dropout, on any device.
        loss_fn: ``loss_fn(outputs, targets)``, an ordinary torch loss; mean or sum reduction.
        noise_std: s = σC, the standard deviation of DP-SGD's noise; None: without noise, s = 1.
        max_grad_norm: C; None: no clipping.
        clip: The clip function, if there is clipping.
        private: Which coordinates to attribute to; None: every floating-point input.
            ``Private(submodule="embedding")`` attributes to the output of an embedding, for integer
            inputs.
        max_memory: The bytes that the computation may hold besides the model and the result, as
            estimated from two examples.
        cuda_graphs: Whether batches of a known size run as CUDA graphs on a GPU.

    Attributes:
        method: How the last batch was processed: "recorded pass", or "mapped gradients" with the
            reason.

    Example:
        For ℓ = (wx)² with w = 2 at x = 3: g = 2wx², PL = 4w²x⁴, PLIS = 16w²x³.

        >>> model = nn.Linear(1, 1, bias=False)
        >>> _ = nn.init.constant_(model.weight, 2.0)
        >>> PLIS(model, nn.MSELoss()).attribute(torch.tensor([[3.0]]), torch.zeros(1, 1))
        tensor([[1728.]])
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFunction,
        noise_std: float | None = None,
        max_grad_norm: float | None = None,
        clip: str | ClipFunction = DEFAULT_CLIP,
        *,
        private: Private | None = None,
        max_memory: int = DEFAULT_MAX_MEMORY,
        cuda_graphs: bool = True,
    ) -> None:
        for name, value in (
            ("noise_std", noise_std),
            ("max_grad_norm", max_grad_norm),
            ("max_memory", max_memory),
        ):
            if value is not None and not value > 0:
                raise ValueError(f"{name}={value} must be positive; leave it out to have none")
        self.model, self.loss_fn, self.private, self.max_memory = (
            model,
            loss_fn,
            private,
            max_memory,
        )
        std, limit = 1.0 if noise_std is None else noise_std, max_grad_norm
        clipped = (
            None
            if limit is None
            else Mechanism(limit, std / limit, get_clip(clip), NoAmplification())
        )
        self.mechanism = clipped or unclipped(std)
        self.method: str | None = None
        self._plans: dict[Hashable, Plan] = {}
        self._recorded_pass = _GraphedNorms() if cuda_graphs else recorded_norms

    def attribute(self, inputs: Inputs, targets: object) -> Any:
        """The PLIS of every example, in the shape of the inputs.

        Args:
            inputs: A tensor, a tuple of positional inputs or a dict of keyword inputs, [batch, …]
                each.
            targets: The targets for ``loss_fn``, [batch, …].

        Returns:
            For one private tensor (the usual case) a tensor of its shape; for several a dict by
            position or name, with the key "target" for a private target. Coordinates that are not
            private are NaN.
        """
        examples, measured = self._measured(inputs, targets)
        maps = examples.maps(measured.gradient)
        return next(iter(maps.values())) if len(maps) == 1 else maps

    def privacy_loss(self, inputs: Inputs, targets: object) -> Tensor:
        """PL = ‖g̃‖²/s² of every example, [batch]."""
        return self._measured(inputs, targets)[1].privacy_loss

    def subject(self, inputs: Inputs, targets: object) -> Tensor:
        """The subject-level PLIS of every example: the norm over all its private coordinates,
        [batch].
        """
        return torch.linalg.vector_norm(self._measured(inputs, targets)[1].gradient, dim=1)

    def _measured(self, inputs: Inputs, targets: object) -> tuple[Examples, Susceptibility]:
        gradients = ExampleGradients.build(self.model, self.loss_fn, inputs, targets, self.private)
        batch_plan = self._plan(gradients) if len(gradients) else None
        if batch_plan is not None:
            reason = batch_plan.reason
            self.method = "recorded pass" if reason is None else f"mapped gradients: {reason}"
        options: dict[str, Any] = {
            "max_memory": self.max_memory,
            "recorded_pass": self._recorded_pass,
        }
        return gradients.examples, susceptibility(
            gradients, self.mechanism, batch_plan=batch_plan, **options
        )

    def _plan(self, gradients: ExampleGradients) -> Plan:
        training = tuple(module.training for module in gradients.model.modules())
        kind = (
            gradients.examples.form,
            gradients.num_coordinates,
            gradients.dtype,
            gradients.device,
        )
        key = (*kind, training, tuple(gradients.parameters))
        if key in self._plans:
            return self._plans[key]
        batch_plan = plan(gradients)
        if len(gradients) > 1:  # one example cannot show whether examples mix
            self._plans[key] = batch_plan
        return batch_plan


def subject_norms(attribution: Tensor) -> Tensor:
    """‖PLIS‖₂ of every example over all coordinates, [batch]; NaN (not private) counts as nothing.

    Example:
        >>> subject_norms(torch.tensor([[[3.0], [4.0]]]))
        tensor([5.])
    """
    return torch.linalg.vector_norm(attribution.nan_to_num(nan=0.0).flatten(1), dim=1)


def column_norms(attribution: Tensor) -> Tensor:
    """The size of the PLIS by column of a table [batch, columns], or the norm over all dimensions
    except the last.

    Example:
        >>> column_norms(torch.tensor([[-1.0, 2.0]]))
        tensor([[1., 2.]])
    """
    values = attribution.nan_to_num(nan=0.0)
    return torch.linalg.vector_norm(values.reshape(len(values), -1, values.shape[-1]), dim=1)


def token_norms(attribution: Tensor) -> Tensor:
    """‖∂PL/∂z_t‖ of every token t of a text, over its embedding's coordinates, [batch, T].

    NaN at padding.

    Args:
        attribution: The PLIS of an embedding's output, [batch, T, width].

    Example:
        >>> token_norms(torch.tensor([[[3.0, 4.0], [float("nan")] * 2]]))
        tensor([[5., nan]])
    """
    return torch.linalg.vector_norm(attribution.flatten(2), dim=2)


def superpixel_norms(attribution: Tensor, segments: Tensor) -> Tensor:
    """The norm over each superpixel, [batch, labels], in the order of the sorted labels.

    Args:
        attribution: [batch, …, H, W].
        segments: Integer labels, [H, W] for all examples or [batch, H, W].

    Example:
        >>> superpixel_norms(
        ...     torch.tensor([[[3.0, 1.0], [4.0, 2.0]]]), torch.tensor([[0, 7], [0, 7]])
        ... )
        tensor([[5.0000, 2.2361]])
    """
    height_and_width = attribution.shape[-2:]
    if not (
        segments.shape[-2:] == height_and_width
        and segments.ndim in (2, 3)
        and not segments.is_floating_point()
    ):
        raise ValueError(
            f"segments of {segments.dtype} and shape {tuple(segments.shape)} must be integer "
            f"labels of shape {tuple(height_and_width)}, or one such map per example"
        )
    labels, numbers = segments.unique(return_inverse=True)
    batch = len(attribution)
    squares = (
        attribution.nan_to_num(nan=0.0)
        .square()
        .reshape(batch, -1, height_and_width.numel())
        .sum(dim=1)
    )
    numbers = numbers.reshape(-1, height_and_width.numel()).expand(batch, -1).to(squares.device)
    return squares.new_zeros(batch, len(labels)).scatter_add(1, numbers, squares).sqrt()
