"""Does the recorded pass fit a model? A trial with two examples, compared with plain backward passes of each."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from torchfil.fisher.gradients import ExampleGradients
from torchfil.fisher.recording.cut import cut
from torchfil.fisher.recording.doubled import in_double
from torchfil.fisher.recording.norms import Held, inner_products, squares_and_slopes, weighted_sum
from torchfil.fisher.recording.passes import learn_layouts, record, watch_parameters
from torchfil.fisher.rules.base import Call, LayerRule
from torchfil.fisher.rules.convolution import ConvolutionRule
from torchfil.fisher.rules.generic import GenericRule
from torchfil.fisher.rules.parameters import ParameterRule
from torchfil.private import Examples

__all__ = ["Plan", "plan"]

logger = logging.getLogger(__name__)

_TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3}
_PROBE_SEED = 1
_CANDIDATES = 8  # rows searched for two examples with a gradient
_MOST_NAMES = 4
_FAR_ENOUGH = 0.1  # of a parameter's size


@dataclass(frozen=True)
class Plan:
    """What a trial with two examples found.

    Attributes:
        reason: Why the recorded pass does not fit this model; None: it does.
        bytes_per_example: The memory that the pass holds for one example.
        generic: The layers without their own rule, by name and kind; their gradients are formed one by one.
        convolutions: The share of convolutions among the layers.
        tried_in: The dtype of the trial: float64, or the model's own dtype if it does not run in float64.
    """

    reason: str | None
    bytes_per_example: int
    generic: tuple[str, ...] = ()
    convolutions: float = 1.0
    tried_in: torch.dtype = torch.float64

    @property
    def fits(self) -> bool:
        """Whether the recorded pass serves the model."""
        return self.reason is None


def plan(gradients: ExampleGradients) -> Plan:
    """Try the pass on two examples: does it agree with plain backward passes, and how much memory does it hold?

    The trial compares ‖g‖², ∇‖g‖², Jᵀu for one vector u, and the sum of g. This finds parameters that the model uses
    outside their modules, models that mix or sort examples, and wrong layer rules. Three things could hide such faults:

    * Examples without a gradient, or two equal ones: the trial looks for others. It passes them as a, b, a, an order
      that sorting would change.
    * Weights at which a part of the gradient vanishes (layers that start at 0): the trial is repeated nearby.
    * Rounding: a wrong second derivative may pass a comparison in float32, and the gradient of a well-learned example
      is a difference of nearly equal numbers. The trial therefore runs in float64, and in the model's own dtype only if
      the model does not run in float64.
    """
    if gradients.dtype != torch.float64:
        try:
            with in_double(gradients) as doubled:
                return _tried(doubled, gradients.dtype)
        except Exception as error:  # a kernel without float64, or too little memory: use the model's own dtype
            logger.info("the trial does not run in float64: %s", error)
    try:
        return _tried(gradients, gradients.dtype)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # mapping over examples may still work, or will report the error
        return Plan(str(error) or type(error).__name__, 0, tried_in=gradients.dtype)


def _tried(gradients: ExampleGradients, dtype: torch.dtype) -> Plan:
    """The plan from a trial in the gradients' dtype, for passes in ``dtype``; errors are raised."""
    held = Held([*gradients.parameters.values(), *gradients.constants.values()])
    probe = _probe(gradients)
    rows, plain = _telling_rows(gradients, probe)
    part = replace(gradients, examples=gradients.examples[torch.tensor(rows, device=gradients.device)])
    recorded = _recorded(part, probe, held)
    reason = _difference(part, recorded, plain)
    for another_way in (_learn_layouts, _watch_what_is_missing):
        if reason is not None and another_way(part, recorded, plain):
            recorded = _recorded(part, probe, held := held.anew())
            reason = _difference(part, recorded, plain)
    if reason is None and _some_gradient_vanishes(part, plain):
        reason = _difference_nearby(part, probe)
    if reason is not None:
        return Plan(reason, 0, tried_in=gradients.dtype)

    rules = {call.module: call.rule for call in recorded.calls if not isinstance(call.rule, ParameterRule)}
    convolutions = sum(isinstance(rule, ConvolutionRule) for rule in rules.values())
    size = 2 * held.total * dtype.itemsize // (gradients.dtype.itemsize * len(part.examples))
    return Plan(None, size, _without_rule(part.model, rules), convolutions / max(1, len(rules)), gradients.dtype)


@dataclass(frozen=True)
class _Plain:
    """Results of plain backward passes: g, [rows, p], ∇‖g‖² and Jᵀu, [rows, d]."""

    gradients: Tensor
    slopes: Tensor
    products: Tensor

    @classmethod
    def of(
        cls,
        gradients: ExampleGradients,
        probe: Tensor,
        rows: Sequence[int],
        by_row: dict[int, tuple[Tensor, Tensor, Tensor]] | None = None,
    ) -> _Plain:
        """The results for these rows, each computed once; ``by_row`` holds the earlier ones."""
        by_row = {} if by_row is None else by_row
        for row in rows:
            if row not in by_row:
                by_row[row] = gradients.plain_products_of_one(row, probe)
        return cls(*map(torch.stack, zip(*(by_row[row] for row in rows), strict=True)))


@dataclass(frozen=True)
class _Recorded:
    """Results of a recorded pass: ‖g‖², [rows], ∇‖g‖² and Jᵀu, [rows, d], Σ g, [p], and its calls."""

    squares: Tensor
    slopes: Tensor
    products: Tensor
    summed: Tensor
    calls: tuple[Call, ...]


def _probe(gradients: ExampleGradients) -> Tensor:
    """A normal vector, [p], drawn on the gradients' device: a CPU needs half a second for a hundred million numbers."""
    device = gradients.device
    source = torch.Generator(device).manual_seed(_PROBE_SEED)
    return torch.randn(gradients.num_parameters, generator=source, device=device).to(gradients.dtype)


def _telling_rows(gradients: ExampleGradients, probe: Tensor) -> tuple[list[int], _Plain]:
    """Rows a, b, a of two different examples with gradients, if there are such; if there is one example, its row."""
    count = len(gradients)
    spread = [round(k * (count - 1) / max(1, _CANDIDATES - 1)) for k in range(_CANDIDATES)]
    candidates = list(dict.fromkeys([0, count - 1, *spread]))

    telling: list[int] = []
    by_row: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
    for row in candidates:
        if any(_alike(gradients.examples, row, other) for other in telling):
            continue
        by_row[row] = gradients.plain_products_of_one(row, probe)
        if bool(by_row[row][0].any()):
            telling.append(row)
        if len(telling) == 2:
            break

    telling = list(dict.fromkeys([*telling, *candidates]))[:2]
    rows = [*telling, telling[0]] if count > 1 else telling
    return rows, _Plain.of(gradients, probe, rows, by_row)


def _alike(examples: Examples, row: int, other: int) -> bool:
    return all(torch.equal(leaf[row], leaf[other]) for leaf in (examples.z, *examples.tensors))


def _some_gradient_vanishes(part: ExampleGradients, plain: _Plain) -> bool:
    """Whether a parameter has the gradient 0 for all examples, so that a trial says nothing about it."""
    return not all(bool(value.any()) for value in part.unflatten(plain.gradients.abs().sum(dim=0)).values())


def _difference_nearby(part: ExampleGradients, probe: Tensor) -> str | None:
    """The difference at slightly changed weights; None also if the model has no finite gradient there."""
    source = torch.Generator(part.device).manual_seed(_PROBE_SEED)

    def moved(value: Tensor) -> Tensor:
        size = float(value.square().mean().sqrt()) or 1.0
        step = torch.randn(value.shape, generator=source, device=value.device).to(value.dtype)
        return value + _FAR_ENOUGH * size * step

    near = replace(part, parameters={name: moved(value) for name, value in part.parameters.items()})
    plain = _Plain.of(near, probe, _laid_out(near))
    if not all(bool(value.isfinite().all()) for value in (plain.gradients, plain.slopes, plain.products)):
        return None
    return _difference(near, _recorded(near, probe), plain)


def _laid_out(part: ExampleGradients) -> list[int]:
    """The examples a, b, a of a trial as separate rows."""
    return [0, 1, 0][: len(part)]


def _difference(part: ExampleGradients, recorded: _Recorded, plain: _Plain) -> str | None:
    """What the recorded pass and plain backward passes disagree on; None: nothing."""
    tolerance = _TOLERANCE.get(plain.gradients.dtype, 1e-3)
    if not _norms_agree(recorded, plain):
        names = _parameters_apart(part, recorded.summed - plain.gradients.sum(dim=0), tolerance)
        listed = f" of {', '.join(names[:_MOST_NAMES])}{', …' if len(names) > _MOST_NAMES else ''}" if names else ""
        return f"the layers' calls do not account for the whole gradient{listed}, or the model mixes examples"

    pairs = {
        "sums of gradients": (recorded.summed[None], plain.gradients.sum(dim=0)[None]),
        "derivatives of gradients' norms": (recorded.slopes, plain.slopes),
        "derivatives of gradients' products with a probe": (recorded.products, plain.products),
    }
    for name, (fast, true) in pairs.items():
        apart, size = (torch.linalg.vector_norm(values, dim=1) for values in (fast - true, true))
        if not bool((apart <= 10 * tolerance * size.max()).all()):
            return f"plain backward passes give other {name}: a layer's rule is wrong, or the model mixes examples"
    return None


def _norms_agree(recorded: _Recorded, plain: _Plain) -> bool:
    squares = plain.gradients.square().sum(dim=1)
    tolerance = _TOLERANCE.get(squares.dtype, 1e-3)
    return torch.allclose(recorded.squares, squares, rtol=tolerance, atol=tolerance * float(squares.max()))


def _learn_layouts(part: ExampleGradients, recorded: _Recorded, plain: _Plain) -> bool:
    """Learn where the examples lie: a dimension of the batch's size may be another one. Return whether it was new."""
    return learn_layouts(part)


def _watch_what_is_missing(part: ExampleGradients, recorded: _Recorded, plain: _Plain) -> bool:
    """Watch the parameters whose gradients the pass misses; return whether there are any."""
    if _norms_agree(recorded, plain):
        return False
    missing = recorded.summed - plain.gradients.sum(dim=0)
    return watch_parameters(part.model, _parameters_apart(part, missing, _TOLERANCE.get(part.dtype, 1e-3)))


def _parameters_apart(part: ExampleGradients, apart: Tensor, tolerance: float) -> list[str]:
    """The parameters for which a difference, [p], is not zero."""
    sizes = {name: float(torch.linalg.vector_norm(value)) for name, value in part.unflatten(apart).items()}
    return [name for name, size in sizes.items() if size > tolerance * max(sizes.values())]


def _recorded(part: ExampleGradients, probe: Tensor, held: Held | None = None) -> _Recorded:
    """Everything that the trial compares, from one recorded pass; ``held`` counts the bytes that its norms keep."""
    z = part.examples.z.detach().requires_grad_()
    with torch.enable_grad(), part.backward_state():
        with held.counting() if held is not None else nullcontext():
            recording = record(part, z)
        attached = cut(recording)
        norms = squares_and_slopes(attached, z, held)
        weight = torch.ones(len(part), dtype=part.dtype, device=part.device)
        _, cotangents = inner_products(attached, part.unflatten(probe))
        products = attached.pulled_back(cotangents, z).detach()
        sums = weighted_sum(recording, weight)

    flat = [sums[name] if name in sums else torch.zeros_like(value) for name, value in part.parameters.items()]
    summed = torch.cat([value.flatten() for value in flat])
    return _Recorded(norms.square, norms.gradient, products, summed, recording.calls)


def _without_rule(model: nn.Module, rules: Mapping[nn.Module, LayerRule]) -> tuple[str, ...]:
    return tuple(
        f"{name or 'the model itself'} ({type(module).__name__})"
        for name, module in model.named_modules()
        if isinstance(rules.get(module), GenericRule)
    )
