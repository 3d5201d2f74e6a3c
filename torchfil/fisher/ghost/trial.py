"""Whether a batched pass fits a model: a trial with two examples, against plain backward passes of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from torchfil.fisher.ghost.norms import Held, inner_products, norm_gradient, weighted_sum
from torchfil.fisher.ghost.recording import UnsupportedCallError, cut, holders, record
from torchfil.fisher.ghost.rules import ConvolutionRule, GenericRule, rule_for
from torchfil.fisher.gradients import ExampleGradients, differentiable_twice
from torchfil.trees import map_tensors

__all__ = ["Plan", "plan"]

_TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3}
_PROBE_SEED = 1


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
    """Try the pass on the first two examples: does it give what plain backward passes give, and how much does it hold?

    Compared are ‖g‖², ∇‖g‖², Jᵀu for one vector u, and the sum of g, which finds parameters that the model uses behind
    its modules' backs, models that mix examples, and layer rules that are wrong. Where they differ, rounding may be the
    reason (the gradient of an example that is learned well is a difference of nearly equal numbers): float64 decides.
    """
    part = replace(gradients, examples=gradients.examples[slice(0, 2)])
    held = Held([*part.parameters.values(), *part.constants.values()])
    try:
        reason = _difference(part, held)
        if reason is not None and part.dtype != torch.float64:
            reason = _difference_in_float64(part, reason)
    except torch.OutOfMemoryError:
        raise
    except (UnsupportedCallError, RuntimeError) as error:
        reason = str(error)
    if reason is not None:
        return Plan(reason, 0)
    modules = list(holders(part))
    convolutions = sum(isinstance(rule_for(module), ConvolutionRule) for module in modules)
    return Plan(
        None, 2 * held.total // len(part.examples), _without_rule(part.model, modules), convolutions / len(modules)
    )


def _difference(part: ExampleGradients, held: Held | None = None) -> str | None:
    """What the pass and plain backward passes disagree on; None: nothing."""
    source = torch.Generator().manual_seed(_PROBE_SEED)
    probe = torch.randn(part.num_parameters, generator=source).to(part.device, part.dtype)
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
            return f"plain backward passes give other {name}: a layer's rule is wrong"
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

    def double(value: Tensor) -> Tensor:
        return value.double() if value.is_floating_point() else value

    examples = replace(part.examples, z=part.examples.z.double(), public=map_tensors(double, part.examples.public))
    parameters, constants = map_tensors(double, (part.parameters, part.constants))
    try:
        return _difference(replace(part, examples=examples, parameters=parameters, constants=constants))
    except RuntimeError:
        return reason


def _without_rule(model: nn.Module, modules: Sequence[nn.Module]) -> tuple[str, ...]:
    names = {id(module): name for name, module in model.named_modules()}
    found = [module for module in modules if isinstance(rule_for(module), GenericRule)]
    return tuple(f"{names[id(module)] or 'the model itself'} ({type(module).__name__})" for module in found)
