"""Layer rules: how to compute an example's gradient, and its norm, from a layer's input a and
output gradient δ.

A layer that applies its weight W at T positions t (pixels, tokens) has the gradient Σ_t δ_t a_tᵀ,
and

    ‖Σ_t δ_t a_tᵀ‖² = Σ_{t,s} (δ_t·δ_s)(a_t·a_s).

This is the Gram form, with T²(p_in + p_out) operations; forming the gradient takes T·p_in·p_out.
The rule chooses the cheaper one. Every formula is differentiable in a and δ. Each file of this
folder holds one family of layers: its rule and, if torch's own second derivative is slow, a
substitute for its forward pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from torchfil.fisher.models import REDUCED, wide
from torchfil.fisher.rules.substitutes import Registry, batched_product, gram
from torchfil.utils.given import Args
from torchfil.utils.trees import map_tensors, tensors_of

Derivatives = list[tuple[Tensor, Tensor]]  # with respect to what, and the derivative


class UnsupportedCallError(Exception):
    """The model uses a parameter in a way that a recorded pass cannot attribute to examples."""


@dataclass(frozen=True)
class Call:
    """One use of a module that holds trainable parameters.

    Attributes:
        name: The module's name, as in ``named_modules``.
        module: The module.
        rule: The rule that computes gradients from the rest.
        args: Its positional inputs.
        kwargs: Its keyword inputs.
        delta: δ, the gradient of the summed loss at its output, [batch, …]; differentiable.
        parameters: Its trainable parameters by local name, detached.
        constants: Its other parameters and buffers by local name.
        shared_names: The model's name of each trainable parameter; tied weights share one name.
        memo: Results that a rule has computed for this call and may use again.
        narrow: The call as it was recorded, if this one is its :meth:`wide` form; None: this is the
            recorded one.
    """

    name: str
    module: nn.Module
    rule: LayerRule
    args: Args
    kwargs: Mapping[str, Any]
    delta: Tensor
    parameters: dict[str, Tensor]
    constants: dict[str, Tensor]
    shared_names: dict[str, str]
    memo: dict[str, Tensor] = field(default_factory=dict, compare=False)
    narrow: Call | None = field(default=None, compare=False)

    @cached_property
    def input(self) -> Tensor:
        """a, the first positional input, [batch, …].

        Raises:
            UnsupportedCallError: It is not a tensor, or its first dimension does not run over the
                examples.
        """
        value = self.args[0] if self.args else None
        if (
            not isinstance(value, Tensor)
            or value.ndim == 0
            or value.shape[0] != self.delta.shape[0]
        ):
            raise UnsupportedCallError(
                f"{self.name}: the first dimension of its input does not run over the examples"
            )
        return value

    @cached_property
    def leaves(self) -> tuple[Tensor, ...]:
        """Its inputs and δ, if they can be differentiated.

        An input that is passed twice appears once.
        """
        if self.narrow is not None:
            return self.narrow.leaves
        return tuple({id(value): value for value in self._tensors if value.requires_grad}.values())

    @cached_property
    def is_wide(self) -> bool:
        """Whether :meth:`wide` is the call itself."""
        return REDUCED.isdisjoint(
            [value.dtype for value in (*self._tensors, *self.parameters.values())]
        )

    def wide(self) -> Call:
        """The same call in float32 or wider, so that rules lose no digits in norms and sums.

        Itself if it is wide.

        The leaves remain those of the recorded call; the wide tensors are attached to them.
        """
        if self.is_wide:
            return self
        with torch.enable_grad():
            args, kwargs, delta = map_tensors(wide, (self.args, dict(self.kwargs), self.delta))
        own, fixed = map_tensors(wide, (self.parameters, self.constants))
        return replace(
            self,
            args=args,
            kwargs=kwargs,
            delta=delta,
            parameters=own,
            constants=fixed,
            narrow=self,
        )

    def by_row(self) -> Call:
        """The call with the rows of all examples as its batch, if δ and inputs are [batch, k,
        …].
        """
        rows = self.delta.shape[:2]

        def flat(value: Tensor) -> Tensor:
            return value.flatten(0, 1) if value.shape[:2] == rows else value

        with torch.enable_grad():
            args, kwargs, delta = map_tensors(flat, (self.args, dict(self.kwargs), self.delta))
        return replace(self, args=args, kwargs=kwargs, delta=delta, memo={})

    def origin(self, leaf: Tensor) -> Tensor:
        """The recorded tensor whose wide form this tensor of the call is."""
        if self.narrow is None:
            return leaf
        pairs = zip(self._tensors, self.narrow._tensors, strict=True)
        return next((recorded for own, recorded in pairs if own is leaf), leaf)

    @cached_property
    def _tensors(self) -> list[Tensor]:
        return tensors_of((self.args, dict(self.kwargs), self.delta))


class LayerRule:
    """The gradient of one call with respect to its trainable parameters.

    Subclasses may have a cheaper norm.

    Calls arrive in float32 or wider.

    Attributes:
        narrow_probes: Whether :meth:`inner` also accepts calls in the recorded dtype, if probes
            need no more digits.
        parameter_names: The local names of the parameters that it supports; None: any.
        words: What :func:`torchfil.check` calls it; empty: the class's name.
        takes_rows: Whether an example may have several rows, [batch, k, …]; else
            :class:`SummedRule` adds them up.
    """

    words = ""
    takes_rows = False
    narrow_probes = False
    parameter_names: frozenset[str] | None = None

    def gradients(self, call: Call) -> dict[str, Tensor]:
        """Every example's gradient by local parameter name, [batch, …]."""
        raise NotImplementedError

    def squared_norm(self, call: Call) -> Tensor:
        """Σ over the call's parameters of ‖gradient‖², [batch]."""
        return total_square(self.gradients(call).values(), call.delta)

    def products(self, call: Call, other: Call) -> Tensor:
        """‖g‖², ‖g′‖² and ⟨g, g′⟩, [3, batch], where g′ are the same examples' gradients in another
        pass.

        All three are computed in the same form, so that ‖g − g′‖², made from them, has only their
        rounding errors.
        """
        return products_of(self.gradients(call), self.gradients(other), call.delta)

    def inner(self, call: Call, direction: Mapping[str, Tensor]) -> tuple[Tensor, Derivatives]:
        """⟨gradient, u⟩, [batch], and the derivatives of Σ_i ⟨gradient_i, u⟩ at the call's inputs
        and δ.

        Every operation on u is linear in u, and none is recorded, so this may be mapped over many
        u.

        Args:
            call: The call.
            direction: u, in the parameters' shapes.
        """
        with torch.enable_grad():
            gradients = self.gradients(call)
        batch = len(call.delta)
        value, outputs, cotangents = call.delta.new_zeros(batch), [], []
        for name, gradient in gradients.items():
            value = value + (gradient.detach() * direction[name]).reshape(batch, -1).sum(dim=1)
            if gradient.requires_grad:
                outputs.append(gradient)
                cotangents.append(direction[name].expand(gradient.shape))
        if not outputs:
            return value, []
        derivatives = torch.autograd.grad(
            outputs, call.leaves, cotangents, retain_graph=True, allow_unused=True
        )
        return value, [
            (leaf, part)
            for leaf, part in zip(call.leaves, derivatives, strict=True)
            if part is not None
        ]

    def squares_lightly(self, call: Call) -> bool:
        """Whether the graph of :meth:`squared_norm` needs less memory than its derivatives."""
        return False

    def weighted_sum(self, call: Call, weight: Tensor) -> dict[str, Tensor]:
        """Σ_i weight_i · gradient_i by local parameter name, for weights [batch].

        Not differentiable.
        """
        with torch.no_grad():
            return {
                name: torch.einsum("i,i...", weight, g) for name, g in self.gradients(call).items()
            }


class SummedRule(LayerRule):
    """A layer that is called on several rows of each example, by a rule that knows single rows:
    their gradients add up.

    Args:
        rule: The rule.
    """

    def __init__(self, rule: LayerRule) -> None:
        self.rule, self.words = rule, rule.words

    def gradients(self, call: Call) -> dict[str, Tensor]:
        """Σ over rows."""
        by_row = self.rule.gradients(call.by_row())
        return {
            name: each.unflatten(0, call.delta.shape[:2]).sum(dim=1)
            for name, each in by_row.items()
        }

    def weighted_sum(self, call: Call, weight: Tensor) -> dict[str, Tensor]:
        """As in :class:`LayerRule`, by the rule of a row."""
        return self.rule.weighted_sum(call.by_row(), weight.repeat_interleave(call.delta.shape[1]))


def total_square(gradients: Iterable[Tensor], like: Tensor) -> Tensor:
    """Σ ‖gradient‖² over tensors [batch, …], [batch], in the dtype of ``like``."""
    return sum(
        (g.reshape(len(g), -1).square().sum(dim=1) for g in gradients),
        start=like.new_zeros(len(like)),
    )


def products_of(own: Mapping[str, Tensor], other: Mapping[str, Tensor], like: Tensor) -> Tensor:
    """‖g‖², ‖g′‖² and ⟨g, g′⟩ of gradients by name, [batch, …] each, [3, batch], in the dtype of
    ``like``.
    """
    total = like.new_zeros(3, len(like))
    for name, gradient in own.items():
        g, h = gradient.flatten(1), other[name].flatten(1)
        total = total + torch.stack([(a * b).sum(dim=1) for a, b in ((g, g), (h, h), (g, h))])
    return total


class LinearInWeightsRule(LayerRule):
    """Layers whose output is jointly linear in their parameters: ⟨g, u⟩ = ⟨δ, layer(a; weights :=
    u)⟩.

    Attributes:
        channels: The dimension of the channels in the output.
    """

    channels = -1
    parameter_names = frozenset({"weight", "bias"})

    def inner(self, call: Call, direction: Mapping[str, Tensor]) -> tuple[Tensor, Derivatives]:
        """As in :class:`LayerRule`, by the layer with u as its weights, and its backward pass from
        δ.
        """
        delta = call.delta.detach()
        if "weight" in direction:
            with torch.no_grad():
                output = self.output(call, direction)
        else:  # a bias alone, whatever the input
            by_channel = [1] * delta.ndim
            by_channel[self.channels] = -1
            output = direction["bias"].reshape(by_channel).expand(delta.shape)
        derivatives = [(call.delta, output)] if call.delta.requires_grad else []
        if call.input.requires_grad and "weight" in direction:
            derivatives.append((call.input, self.input_grad(call, direction, delta)))
        # reductions then follow the memory order
        by_position = (wide(delta) * output).sum(dim=self.channels)
        return by_position.reshape(len(delta), -1).sum(dim=1), derivatives

    def output(self, call: Call, direction: Mapping[str, Tensor]) -> Tensor:
        """layer(a; weights := u), with a bias of 0 if u has none."""
        raise NotImplementedError

    def input_grad(self, call: Call, direction: Mapping[str, Tensor], delta: Tensor) -> Tensor:
        """The derivative of ⟨δ, layer(a; weights := u)⟩ with respect to a."""
        raise NotImplementedError


class OuterProductRule(LinearInWeightsRule):
    """A weight with the gradient Σ_t δ_t a_tᵀ, and a bias with Σ_t δ_t, in groups.

    Subclasses arrange a and δ.
    """

    def factors(self, call: Call) -> tuple[Tensor, Tensor]:
        """a as [batch, groups, T, p_in] and δ as [batch, groups, T, p_out]."""
        raise NotImplementedError

    def gradients(self, call: Call) -> dict[str, Tensor]:
        """Σ_t δ_t a_tᵀ and Σ_t δ_t of every example."""
        a, delta = self.factors(call)
        result = {}
        if "weight" in call.parameters:
            result["weight"] = batched_product(delta.mT, a).reshape(
                len(a), *call.parameters["weight"].shape
            )
        if "bias" in call.parameters:
            result["bias"] = delta.sum(dim=2).flatten(1)
        return result

    def squared_norm(self, call: Call) -> Tensor:
        """‖Σ_t δ_t a_tᵀ‖² + ‖Σ_t δ_t‖², [batch], in the cheaper of the two forms."""
        a, delta = self.factors(call)
        positions, groups, p_in, p_out = a.shape[2], a.shape[1], a.shape[3], delta.shape[3]
        weight, bias = "weight" in call.parameters, "bias" in call.parameters
        if positions == groups == 1:
            square = delta.square().sum(dim=(1, 2, 3))
            return square * (a.square().sum(dim=(1, 2, 3)) * weight + bias)
        result = delta.new_zeros(len(delta))
        if weight and positions * (p_in + p_out) < p_in * p_out:
            result = (gram(a) * gram(delta)).sum(dim=(1, 2, 3))
        elif weight:  # copy the narrower one, if a copy is needed
            gradient = (
                batched_product(a.mT, delta) if p_out <= p_in else batched_product(delta.mT, a)
            )
            result = gradient.square().sum(dim=(1, 2, 3))
        if bias:
            result = result + delta.sum(dim=2).square().sum(dim=(1, 2))
        return result

    def weighted_sum(self, call: Call, weight: Tensor) -> dict[str, Tensor]:
        """As in :class:`LayerRule`, by the layer's own backward pass from weighted δ."""
        result = {}
        with torch.no_grad():
            delta = call.delta * weight.reshape(-1, *[1] * (call.delta.ndim - 1))
            if "weight" in call.parameters:
                result["weight"] = self.weight_grad(call, delta)
            if "bias" in call.parameters:
                result["bias"] = delta.sum(
                    dim=[k for k in range(delta.ndim) if k != self.channels % delta.ndim]
                )
        return result

    def weight_grad(self, call: Call, delta: Tensor) -> Tensor:
        """Σ δ_t a_tᵀ over all examples, in the weight's shape."""
        raise NotImplementedError

    def squares_lightly(self, call: Call) -> bool:
        """True in the Gram form: its matrices have T² numbers, fewer than the T·p of a and δ."""
        a, delta = call.input, call.delta
        positions, p_in, p_out = (
            delta[0].numel() // delta.shape[self.channels],
            a.shape[-1],
            delta.shape[-1],
        )
        in_gram_form = "weight" in call.parameters and positions * (p_in + p_out) < p_in * p_out
        return self.channels == -1 and in_gram_form and 4 * positions < p_in + p_out

    def products(self, call: Call, other: Call) -> Tensor:
        """As in :class:`LayerRule`, in the cheaper of the two forms."""
        (a, delta), (b, epsilon) = self.factors(call), self.factors(other)
        positions, p_in, p_out = a.shape[2], a.shape[3], delta.shape[3]
        if positions > 1 and positions * (p_in + p_out) >= p_in * p_out:
            return super().products(call, other)
        total = delta.new_zeros(3, len(delta))
        for k, (x, y, d, e) in enumerate(
            ((a, a, delta, delta), (b, b, epsilon, epsilon), (a, b, delta, epsilon))
        ):
            if "weight" in call.parameters:
                total[k] = (batched_product(x, y.mT) * batched_product(d, e.mT)).sum(dim=(1, 2, 3))
            if "bias" in call.parameters:
                total[k] += (d.sum(dim=2) * e.sum(dim=2)).sum(dim=(1, 2))
        return total


_RULES: Registry[LayerRule] = Registry("rule")


def register_rule(kind: type[nn.Module] | str, rule: LayerRule, *, overwrite: bool = False) -> None:
    """Use ``rule`` for modules of this class, and of subclasses that keep its forward pass.

    The rule of ``nn.Module`` serves all classes without their own.

    Args:
        kind: The class; or its full name, if its library may be missing:
            ``transformers.pytorch_utils.Conv1D``.
        rule: The rule.
        overwrite: Whether to replace the class's current rule.

    Raises:
        ValueError: The class already has a rule, and ``overwrite`` is False.
    """
    _RULES.add(kind, rule, overwrite=overwrite)


def rule_for(module: nn.Module) -> LayerRule:
    """The rule of the module's class, or of the base class whose forward pass it keeps.

    Otherwise the generic rule.

    A module whose weight is a function of other parameters (weight normalisation, pruning) gets the
    generic rule.
    """
    rule = _RULES.find(type(module))
    assert rule is not None  # at least that of nn.Module
    if rule.parameter_names is not None:
        for name, value in module._parameters.items():
            if value is not None and name not in rule.parameter_names:
                return _RULES.entries[nn.Module]
    return rule
