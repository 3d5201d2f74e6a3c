"""How each kind of layer makes an example's gradient, and its norm, from the layer's input a and output gradient δ.

A layer that applies its weight W at T positions t (pixels, tokens) has the gradient Σ_t δ_t a_tᵀ, and

    ‖Σ_t δ_t a_tᵀ‖² = Σ_{t,s} (δ_t·δ_s)(a_t·a_s):

the *ghost* form, T²(p_in + p_out) operations; forming the gradient takes T·p_in·p_out. The cheaper is chosen. Every
formula is differentiable in a and δ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap
from torch.nn import functional as F

from torchfil.fisher.rules.call import Call, UnsupportedCallError
from torchfil.fisher.rules.convolution import convolve_back, padded_input, patches, patches_by_position
from torchfil.fisher.rules.normalisation import normalised_sums
from torchfil.fisher.rules.products import batched_product, gram, outer_square, products_of_patches
from torchfil.fisher.rules.substitutes import with_substitutes
from torchfil.fisher.rules.tracing import being_traced

__all__ = ["Derivatives", "LayerRule", "register_rule", "rule_for"]

Derivatives = list[tuple[Tensor, Tensor]]  # with respect to what, and the derivative


class LayerRule:
    """The gradient of one call by its trainable parameters; subclasses may have a cheaper norm."""

    def gradients(self, call: Call) -> dict[str, Tensor]:
        """Every example's gradient by local parameter name, [batch, …]."""
        raise NotImplementedError

    def squared_norm(self, call: Call) -> Tensor:
        """Σ over the call's parameters of ‖gradient‖², [batch]."""
        return total_square(self.gradients(call).values(), call.delta)

    def inner(self, call: Call, direction: Mapping[str, Tensor], weight: Tensor) -> tuple[Tensor, Derivatives]:
        """⟨gradient, u⟩, [batch], and the derivatives of Σ_i weight_i⟨gradient_i, u⟩ at the call's inputs and δ.

        Every operation that u goes into is linear in it, and none is recorded: it may be mapped over many u.

        Args:
            call: The call.
            direction: U, of the parameters' shapes.
            weight: [batch].
        """
        with torch.enable_grad():
            gradients = self.gradients(call)
        value, outputs, cotangents = weight.new_zeros(len(weight)), [], []
        for name, gradient in gradients.items():
            value = value + (gradient.detach() * direction[name]).reshape(len(weight), -1).sum(dim=1)
            if gradient.requires_grad:
                outputs.append(gradient)
                cotangents.append(_per_example(weight, gradient) * direction[name])
        if not outputs:
            return value, []
        found = torch.autograd.grad(outputs, call.leaves, cotangents, retain_graph=True, allow_unused=True)
        return value, [(leaf, part) for leaf, part in zip(call.leaves, found, strict=True) if part is not None]

    def weighted_sum(self, call: Call, weight: Tensor) -> dict[str, Tensor]:
        """Σ_i weight_i · gradient_i by local parameter name, for weights [batch]; not differentiable."""
        with torch.no_grad():
            return {name: torch.einsum("i,i...", weight, g) for name, g in self.gradients(call).items()}


def _per_example(weight: Tensor, like: Tensor) -> Tensor:
    """Weights [batch] in the shape [batch, 1, …]."""
    return weight.reshape(-1, *[1] * (like.ndim - 1))


def total_square(gradients: Iterable[Tensor], like: Tensor) -> Tensor:
    """Σ ‖gradient‖² over tensors [batch, …], [batch], in the dtype of ``like``."""
    return sum((g.reshape(len(g), -1).square().sum(dim=1) for g in gradients), start=like.new_zeros(len(like)))


_roles: WeakKeyDictionary[nn.Module, dict[int | str, str]] = WeakKeyDictionary()


class GenericRule(LayerRule):
    """Any module: its own vector-Jacobian product, example by example (vmapped).

    Whether an argument has a row for each example or is shared by all is told by its length. Where that is the batch's
    by chance, what an earlier call has shown counts: the trial of two examples, mostly.
    """

    def gradients(self, call: Call) -> dict[str, Tensor]:
        batch = len(call.delta)

        def one(args: Any, kwargs: Any, delta: Tensor) -> dict[str, Tensor]:
            def output(parameters: dict[str, Tensor]) -> Tensor:
                single = [_one_more(x) if d == 0 else x for x, d in zip(args, in_dims[0], strict=True)]
                named = {k: _one_more(x) if in_dims[1][k] == 0 else x for k, x in kwargs.items()}
                result = functional_call(call.module, {**parameters, **call.constants}, tuple(single), named)
                first: Tensor = result[0] if isinstance(result, tuple) else result
                return first

            return vjp(output, call.parameters)[1](delta.unsqueeze(0))[0]

        roles = _roles.setdefault(call.module, {})

        def dim(slot: int | str, value: Any) -> int | None:
            if not isinstance(value, Tensor) or value.ndim == 0:
                return None
            fits = value.shape[0] == batch
            if fits and roles.get(slot) != "shared":
                if batch > 1:
                    roles[slot] = "by example"
                return 0
            if not fits and roles.get(slot) == "by example":
                raise UnsupportedCallError(
                    f"{call.name} ({type(call.module).__name__}): argument {slot} has {value.shape[0]} rows for "
                    f"{batch} examples, and one for each in another call"
                )
            roles[slot] = "shared"
            return None

        in_dims = (
            tuple(dim(slot, x) for slot, x in enumerate(call.args)),
            {k: dim(k, x) for k, x in call.kwargs.items()},
            0,
        )
        try:
            result: dict[str, Tensor] = vmap(one, in_dims=in_dims)(call.args, dict(call.kwargs), call.delta)
        except RuntimeError as error:
            raise UnsupportedCallError(f"{call.name} ({type(call.module).__name__}): {error}") from error
        return result


def _one_more(value: Tensor) -> Tensor:
    return value.unsqueeze(0)


class LinearInWeightsRule(LayerRule):
    """Layers whose output is linear in their parameters together: ⟨g, u⟩ = ⟨δ, layer(a; weights := u)⟩.

    Attributes:
        channels: Which dimension of the output the channels lie in.
    """

    channels = -1

    def inner(self, call: Call, direction: Mapping[str, Tensor], weight: Tensor) -> tuple[Tensor, Derivatives]:
        """As in :class:`LayerRule`, by the layer with u as its weights, and its way back from weighted δ."""
        frozen = {name: torch.zeros_like(value) for name, value in call.constants.items()}
        each, delta = _per_example(weight, call.delta), call.delta.detach()
        with torch.no_grad(), with_substitutes(call.module):
            output = functional_call(call.module, {**direction, **frozen}, call.args, dict(call.kwargs))
            output = self.visible(call, output)
        derivatives = [(call.delta, each * output)] if call.delta.requires_grad else []
        if call.input.requires_grad:
            if call.memo.get("weight of delta") is not weight:  # mostly the same for every u
                call.memo["weight of delta"], call.memo["weighted delta"] = weight, each * delta
            derivatives.append((call.input, self.way_back(call, direction, call.memo["weighted delta"])))
        by_position = (delta * output).sum(dim=self.channels)  # a compiler's reductions follow the memory this way
        return by_position.reshape(len(delta), -1).sum(dim=1), derivatives

    def visible(self, call: Call, output: Tensor) -> Tensor:
        """The output, 0 where the parameters get no gradient."""
        return output

    def way_back(self, call: Call, direction: Mapping[str, Tensor], delta: Tensor) -> Tensor:
        """The derivative of ⟨δ, layer(a; weights := u)⟩ with respect to a."""
        raise NotImplementedError


class OuterProductRule(LinearInWeightsRule):
    """A weight met as Σ_t δ_t a_tᵀ, and a bias as Σ_t δ_t, in groups; subclasses lay a and δ out."""

    def factors(self, call: Call) -> tuple[Tensor, Tensor]:
        """A as [batch, groups, T, p_in] and δ as [batch, groups, T, p_out]."""
        raise NotImplementedError

    def gradients(self, call: Call) -> dict[str, Tensor]:
        a, delta = self.factors(call)
        result = {}
        if "weight" in call.parameters:
            result["weight"] = batched_product(delta.mT, a).reshape(len(a), *call.parameters["weight"].shape)
        if "bias" in call.parameters:
            result["bias"] = delta.sum(dim=2).flatten(1)
        return result

    def norm_factors(self, call: Call) -> tuple[Tensor, Tensor]:
        """:meth:`factors`, with the inputs of a position in any order."""
        return self.factors(call)

    def squared_norm(self, call: Call) -> Tensor:
        a, delta = self.norm_factors(call)
        positions, groups, p_in, p_out = a.shape[2], a.shape[1], a.shape[3], delta.shape[3]
        weight, bias = "weight" in call.parameters, "bias" in call.parameters
        if positions == groups == 1:
            square = delta.square().sum(dim=(1, 2, 3))
            return square * (a.square().sum(dim=(1, 2, 3)) * weight + bias)
        result = delta.new_zeros(len(delta))
        if weight and positions * (p_in + p_out) < p_in * p_out:
            result = (gram(a) * gram(delta)).sum(dim=(1, 2, 3))
        elif weight and being_traced():
            result = outer_square(a, delta)
        elif weight:  # the narrower of both is the one that may have to be copied
            gradient = batched_product(a.mT, delta) if p_out <= p_in else batched_product(delta.mT, a)
            result = gradient.square().sum(dim=(1, 2, 3))
        if bias:
            result = result + delta.sum(dim=2).square().sum(dim=(1, 2))
        return result


class LinearRule(OuterProductRule):
    """Inputs [batch, …, in], outputs [batch, …, out]."""

    def way_back(self, call: Call, direction: Mapping[str, Tensor], delta: Tensor) -> Tensor:
        return delta @ direction["weight"] if "weight" in direction else torch.zeros_like(call.input)

    def weighted_sum(self, call: Call, weight: Tensor) -> dict[str, Tensor]:
        """As in :class:`LayerRule`, one product over examples and positions."""
        result = {}
        with torch.no_grad():
            delta = (call.delta * weight.reshape(-1, *[1] * (call.delta.ndim - 1))).flatten(0, -2)
            if "weight" in call.parameters:
                result["weight"] = delta.mT @ call.input.flatten(0, -2)
            if "bias" in call.parameters:
                result["bias"] = delta.sum(dim=0)
        return result

    def factors(self, call: Call) -> tuple[Tensor, Tensor]:
        a, delta = call.input, call.delta
        return a.reshape(len(a), 1, -1, a.shape[-1]), delta.reshape(len(delta), 1, -1, delta.shape[-1])


class ConvolutionRule(OuterProductRule):
    """In one, two or three dimensions, with stride, padding of any mode, dilation and groups.

    Products of patches are as precise as the user lets convolutions be.
    """

    channels = 1

    def way_back(self, call: Call, direction: Mapping[str, Tensor], delta: Tensor) -> Tensor:
        assert isinstance(call.module, nn.Conv1d | nn.Conv2d | nn.Conv3d)
        if "weight" not in direction:
            return torch.zeros_like(call.input)
        return convolve_back(call.module, delta, direction["weight"], call.input)

    def gradients(self, call: Call) -> dict[str, Tensor]:
        with products_of_patches(call.delta):
            return super().gradients(call)

    def squared_norm(self, call: Call) -> Tensor:
        with products_of_patches(call.delta):
            return super().squared_norm(call)

    def weighted_sum(self, call: Call, weight: Tensor) -> dict[str, Tensor]:
        """As in :class:`LayerRule`, by the backward pass of the convolution itself."""
        module, result = call.module, {}
        assert isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d)
        with torch.no_grad():
            delta = call.delta * weight.reshape(-1, *[1] * (call.delta.ndim - 1))
            if "weight" in call.parameters:
                axes = len(module.kernel_size)
                result["weight"] = torch.ops.aten.convolution_backward(
                    delta,
                    self._padded(call),
                    call.parameters["weight"],
                    None,
                    module.stride,
                    [0] * axes,
                    module.dilation,
                    False,
                    [0] * axes,
                    module.groups,
                    [False, True, False],
                )[1]
            if "bias" in call.parameters:
                result["bias"] = delta.transpose(0, 1).flatten(1).sum(dim=1)
        return result

    @staticmethod
    def _padded(call: Call) -> Tensor:
        module, a = call.module, call.input
        assert isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d)
        if a.ndim != 2 + len(module.kernel_size):
            raise UnsupportedCallError(f"{call.name}: a convolution of inputs without a batch dimension")
        return padded_input(module, a)

    def factors(self, call: Call) -> tuple[Tensor, Tensor]:
        module, a, delta = call.module, call.input, call.delta
        assert isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d)
        positions = delta.shape[2:].numel()
        if isinstance(module, nn.Conv2d) and a.ndim == 4:
            columns = patches(module, a)  # [batch, in·kernel, T]
            return (
                columns.reshape(len(a), module.groups, -1, positions).mT,
                delta.reshape(len(a), module.groups, -1, positions).mT,
            )
        view = self._padded(call)
        for axis, (size, stride, dilation) in enumerate(
            zip(module.kernel_size, module.stride, module.dilation, strict=True)
        ):
            view = view.unfold(2 + axis, dilation * (size - 1) + 1, stride)[..., ::dilation]
        batch, groups, axes = len(a), module.groups, len(module.kernel_size)
        view = view.reshape(batch, groups, -1, *view.shape[2:])  # [batch, groups, in, *positions, *kernel]
        view = view.movedim(2, 2 + axes)  # [batch, groups, *positions, in, *kernel]
        return (
            view.reshape(batch, groups, positions, -1),
            delta.reshape(batch, groups, -1, positions).mT,
        )

    def norm_factors(self, call: Call) -> tuple[Tensor, Tensor]:
        module, a, delta = call.module, call.input, call.delta
        if not (being_traced() and isinstance(module, nn.Conv2d) and module.groups == 1 and a.ndim == 4):
            return self.factors(call)
        return patches_by_position(module, a)[:, None], delta.permute(0, 2, 3, 1).flatten(1, 2)[:, None]


class NormalisationRule(LayerRule):
    """A scale and a shift of a normalised input x̂: gradients Σ_t δ_t x̂_t and Σ_t δ_t, formed once for all questions."""

    def __init__(self, normalised: Callable[[Any, Tensor], Tensor], *, channels_first: bool) -> None:
        self.normalised = normalised
        self.channels_first = channels_first

    def gradients(self, call: Call) -> dict[str, Tensor]:
        if not call.memo:
            shape = next(iter(call.parameters.values())).shape
            if "weight" in call.parameters:
                call.memo["weight"] = self._summed(call.delta * self.normalised(call.module, call.input), shape)
            if "bias" in call.parameters:
                call.memo["bias"] = self._summed(call.delta, shape)
        return call.memo

    def _summed(self, value: Tensor, shape: torch.Size) -> Tensor:
        """Over positions: those behind the channels, or those between batch and the normalised dimensions."""
        if self.channels_first:
            return value.reshape(*value.shape[:2], -1).sum(dim=2)
        return value.reshape(len(value), -1, *shape).sum(dim=1)


class GroupNormRule(NormalisationRule):
    """:class:`NormalisationRule` for groups of channels, in one kernel where the GPU has one."""

    def __init__(self) -> None:
        super().__init__(lambda m, x: F.group_norm(x, m.num_groups, eps=m.eps), channels_first=True)

    def gradients(self, call: Call) -> dict[str, Tensor]:
        if not call.memo:
            assert isinstance(call.module, nn.GroupNorm)
            sums = normalised_sums(call.module, call.delta, call.input)
            if sums is None:
                return super().gradients(call)
            named = zip(("weight", "bias"), sums, strict=True)
            call.memo.update({name: value for name, value in named if name in call.parameters})
        return call.memo


class EmbeddingRule(LinearInWeightsRule):
    """Rows of a table, [batch, …] numbers to [batch, …, width]: ‖g‖² = Σ_{t,s} 1[token_t = token_s] δ_t·δ_s."""

    def gradients(self, call: Call) -> dict[str, Tensor]:
        tokens, delta = self._layout(call)
        table = call.parameters["weight"]
        empty = delta.new_zeros(len(delta), *table.shape)
        index = tokens[:, :, None].expand(-1, -1, table.shape[1])
        return {"weight": empty.scatter_add(1, index, delta)}

    def weighted_sum(self, call: Call, weight: Tensor) -> dict[str, Tensor]:
        """As in :class:`LayerRule`, added to the table's rows."""
        with torch.no_grad():
            tokens, delta = self._layout(call)
            empty = torch.zeros_like(call.parameters["weight"])
            return {"weight": empty.index_add(0, tokens.flatten(), (delta * weight[:, None, None]).flatten(0, 1))}

    def squared_norm(self, call: Call) -> Tensor:
        tokens, delta = self._layout(call)
        same = (tokens[:, :, None] == tokens[:, None, :]).to(delta.dtype)
        return (gram(delta) * same).sum(dim=(1, 2))

    def visible(self, call: Call, output: Tensor) -> Tensor:
        assert isinstance(call.module, nn.Embedding)
        padding = call.module.padding_idx
        return output if padding is None else output * call.input.ne(padding).unsqueeze(-1)

    @staticmethod
    def _layout(call: Call) -> tuple[Tensor, Tensor]:
        """The tokens, [batch, T], and δ, [batch, T, width], 0 at padding."""
        module = call.module
        assert isinstance(module, nn.Embedding)
        if module.max_norm is not None or module.scale_grad_by_freq:
            raise UnsupportedCallError(f"{call.name}: max_norm and scale_grad_by_freq change the gradient")
        tokens = call.input.reshape(len(call.delta), -1)
        delta = call.delta.reshape(*tokens.shape, -1)
        if module.padding_idx is not None:
            delta = delta * (tokens != module.padding_idx)[:, :, None]
        return tokens, delta


_RULES: dict[type[nn.Module], LayerRule] = {}
_GENERIC = GenericRule()


def register_rule(kind: type[nn.Module], rule: LayerRule) -> None:
    """Use ``rule`` for modules of exactly this class.

    Raises:
        TypeError: ``kind`` is no class of modules, or ``rule`` no instance of a rule.
    """
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        raise TypeError(f"{kind!r} is no class of modules; register a rule for a subclass of torch.nn.Module")
    if not isinstance(rule, LayerRule):
        raise TypeError(f"{rule!r} is no layer rule; pass an instance of a LayerRule, {kind.__name__}Rule() say")
    _RULES[kind] = rule


def rule_for(module: nn.Module) -> LayerRule:
    """The rule of the module's class, or the generic one."""
    return _RULES.get(type(module), _GENERIC)


register_rule(nn.Linear, LinearRule())
for _convolution in (nn.Conv1d, nn.Conv2d, nn.Conv3d):
    register_rule(_convolution, ConvolutionRule())
register_rule(nn.Embedding, EmbeddingRule())
register_rule(
    nn.LayerNorm,
    NormalisationRule(lambda m, x: F.layer_norm(x, m.normalized_shape, eps=m.eps), channels_first=False),
)
register_rule(
    nn.RMSNorm, NormalisationRule(lambda m, x: F.rms_norm(x, m.normalized_shape, eps=m.eps), channels_first=False)
)
register_rule(nn.GroupNorm, GroupNormRule())
for _instance in (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d):
    register_rule(_instance, NormalisationRule(lambda m, x: F.instance_norm(x, eps=m.eps), channels_first=True))
