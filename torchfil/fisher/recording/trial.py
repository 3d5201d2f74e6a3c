"""Whether a batched pass fits a model: a trial with two examples, against plain backward passes of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from torchfil.fisher.gradients import ExampleGradients, differentiable_twice
from torchfil.fisher.recording.cut import cut
from torchfil.fisher.recording.norms import Held, inner_products, norm_gradient, weighted_sum
from torchfil.fisher.recording.passes import holders, record
from torchfil.fisher.rules.base import rule_for
from torchfil.fisher.rules.convolution import ConvolutionRule
from torchfil.fisher.rules.generic import GenericRule
from torchfil.private import Examples

__all__ = ["Plan", "plan"]

_TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3}
_PROBE_SEED = 1
_CANDIDATES = 8  # rows among which two examples with a gradient are looked for
_FAR_ENOUGH = 0.1  # of a parameter's size


@dataclass(frozen=True)
class Plan:
    """What a trial with two examples found.

    Attributes:
        reason: Why the batched pass does not fit this model; None: it does.
        bytes_per_example: What the pass holds for one example.
        generic: The layers without a rule of their own, by name and kind; their gradients are formed one by one.
        convolutions: The share of convolutions among the layers.
    """

    reason: str | None
    bytes_per_example: int
    generic: tuple[str, ...] = ()
    convolutions: float = 1.0


def plan(gradients: ExampleGradients) -> Plan:
    """Try the pass on two examples: does it give what plain backward passes give, and how much does it hold?

    Compared are ‖g‖², ∇‖g‖², Jᵀu for one vector u, and the sum of g, which finds parameters that the model uses behind
    its modules' backs, models that mix or sort examples, and layer rules that are wrong. What could hide them:

    * Examples without a gradient, or equal ones: others are looked for. They are given as a, b, a, which is no order
      that sorting leaves alone.
    * Weights at which a part of the gradient vanishes (layers that start from 0): the trial is repeated nearby.
    * Rounding, the other way round: the gradient of an example that is learned well is a difference of nearly equal
      numbers. Where float32 disagrees, float64 decides.
    """
    held = Held([*gradients.parameters.values(), *gradients.constants.values()])
    try:
        probe = _probe(gradients)
        rows = _telling_rows(gradients, probe)
        part = replace(gradients, examples=gradients.examples[torch.tensor(rows, device=gradients.device)])
        reason = _difference(part, probe, held)
        if reason is not None and part.dtype != torch.float64:
            reason = _difference_in_float64(part, reason)
        if reason is None and _some_gradient_vanishes(part, probe):
            reason = _difference_nearby(part, probe)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever it is, mapping over examples may do, or says so
        return Plan(str(error) or type(error).__name__, 0)
    if reason is not None:
        return Plan(reason, 0)
    modules = list(holders(part.model))
    convolutions = sum(isinstance(rule_for(module), ConvolutionRule) for module in modules)
    return Plan(
        None, 2 * held.total // len(part.examples), _without_rule(part.model, modules), convolutions / len(modules)
    )


def _probe(gradients: ExampleGradients) -> Tensor:
    source = torch.Generator().manual_seed(_PROBE_SEED)
    return torch.randn(gradients.num_parameters, generator=source).to(gradients.device, gradients.dtype)


def _telling_rows(gradients: ExampleGradients, probe: Tensor) -> list[int]:
    """Rows a, b, a of two examples that differ and have gradients, as far as there are such; of a single one, it."""
    count = len(gradients)
    spread = [round(k * (count - 1) / max(1, _CANDIDATES - 1)) for k in range(_CANDIDATES)]
    candidates = list(dict.fromkeys([0, count - 1, *spread]))
    telling: list[int] = []
    for row in candidates:
        if any(_alike(gradients.examples, row, other) for other in telling):
            continue
        if bool(gradients.plain_products_of_one(row, probe)[0].any()):
            telling.append(row)
        if len(telling) == 2:
            break
    telling = list(dict.fromkeys([*telling, *candidates]))[:2]
    return [*telling, telling[0]] if count > 1 else telling


def _alike(examples: Examples, row: int, other: int) -> bool:
    return all(torch.equal(leaf[row], leaf[other]) for leaf in (examples.z, *examples.tensors))


def _some_gradient_vanishes(part: ExampleGradients, probe: Tensor) -> bool:
    """Whether a parameter has the gradient 0 for all examples, so that a trial says nothing of it."""
    total = torch.stack([part.plain_products_of_one(i, probe)[0].abs() for i in range(min(2, len(part)))]).sum(dim=0)
    return not all(bool(value.any()) for value in part.unflatten(total).values())


def _difference_nearby(part: ExampleGradients, probe: Tensor) -> str | None:
    """The difference at weights a little off the present ones; None, too, where the model has no finite gradient."""
    source = torch.Generator().manual_seed(_PROBE_SEED)

    def moved(value: Tensor) -> Tensor:
        size = float(value.square().mean().sqrt()) or 1.0
        step = torch.randn(value.shape, generator=source).to(value.device, value.dtype)
        return value + _FAR_ENOUGH * size * step

    near = replace(part, parameters={name: moved(value) for name, value in part.parameters.items()})
    found = [near.plain_products_of_one(i, probe) for i in range(min(2, len(near)))]
    if not all(bool(value.isfinite().all()) for values in found for value in values):
        return None
    reason = _difference(near, probe)
    return reason if reason is None or part.dtype == torch.float64 else _difference_in_float64(near, reason)


def _difference(part: ExampleGradients, probe: Tensor, held: Held | None = None) -> str | None:
    """What the pass and plain backward passes disagree on; None: nothing."""
    norms = norm_gradient(part, held)
    summed, rows = _summed_and_products(part, probe)
    plain = zip(*(part.plain_products_of_one(i, probe) for i in range(len(part))), strict=True)
    gradients, slopes, products = map(torch.stack, plain)
    tolerance = _TOLERANCE.get(part.dtype, 1e-3)
    squares = gradients.square().sum(dim=1)
    if not torch.allclose(norms.square, squares, rtol=tolerance, atol=tolerance * float(squares.max())):
        return "the layers' calls do not account for the whole gradient, or the model mixes examples"
    pairs = {
        "sums of gradients": (summed[None], gradients.sum(dim=0)[None]),
        "derivatives of gradients' norms": (norms.gradient, slopes),
        "derivatives of gradients' products with a probe": (rows, products),
    }
    for name, (found, true) in pairs.items():
        apart, size = (torch.linalg.vector_norm(values, dim=1) for values in (found - true, true))
        if not bool((apart <= 10 * tolerance * size.max()).all()):
            return f"plain backward passes give other {name}: a layer's rule is wrong, or the model mixes examples"
    return None


def _summed_and_products(part: ExampleGradients, u: Tensor) -> tuple[Tensor, Tensor]:
    """Σ_i g_i, [p], and Jᵀu of every example, [batch, d], from one recorded pass."""
    z = part.examples.z.detach().requires_grad_()
    with torch.enable_grad(), differentiable_twice():
        attached = cut(record(part, z))
        weight = torch.ones(len(part), dtype=part.dtype, device=part.device)
        _, cotangents = inner_products(attached, part.unflatten(u), weight)
        products = attached.pulled_back(cotangents, z).detach()
        sums = weighted_sum(attached.recording, weight)
    flat = [sums[name] if name in sums else torch.zeros_like(value) for name, value in part.parameters.items()]
    return torch.cat([value.flatten() for value in flat]), products


def _difference_in_float64(part: ExampleGradients, reason: str) -> str | None:
    """The difference that is left in float64; ``reason``, where the model does not run in it."""
    doubled = part.double()
    try:
        return _difference(doubled, _probe(doubled))
    except torch.OutOfMemoryError:
        raise
    except Exception:
        return reason


def _without_rule(model: nn.Module, modules: Sequence[nn.Module]) -> tuple[str, ...]:
    names = {id(module): name for name, module in model.named_modules()}
    found = [module for module in modules if isinstance(rule_for(module), GenericRule)]
    return tuple(f"{names[id(module)] or 'the model itself'} ({type(module).__name__})" for module in found)
