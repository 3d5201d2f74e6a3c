"""Models as functions of their weights: calls with other weights, copies without weights, and refused models.

A model is refused if it mixes the examples of a batch, or draws random numbers that nobody has recorded.
"""

from __future__ import annotations

import contextlib
import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from torchfil.fisher.missing import with_second_derivatives
from torchfil.utils.errors import UnsupportedModuleError, ran_out
from torchfil.utils.trees import map_tensors

__all__ = [
    "HOOKS_INSTALLED",
    "call_with",
    "check_modules",
    "check_unweighted_mean",
    "copy_without_weights",
    "explain_derivatives",
    "explain_layers",
    "explain_randomness",
    "has_active_dropout",
    "may_drop",
    "trainable_and_constant",
    "turned",
    "with_examples_first",
    "without_opacus",
]

HOOKS_INSTALLED = "_output_capturing_hooks_installed"  # by transformers, at the first call that wants hidden states


def call_with(model: nn.Module, values: dict[str, Tensor], args: Any, kwargs: Any) -> Any:
    """``model(*args, **kwargs)`` with these parameters and buffers by name, everywhere that the model holds them.

    If a module is used twice, torch's own function swaps its parameters twice and then cannot restore them
    (pytorch/pytorch#164759); here every module is visited once.
    """
    first: dict[int, str] = {}
    tied: dict[str, Tensor] = {}
    for prefix, module in model.named_modules():
        for own, value in (*module._parameters.items(), *module._buffers.items()):
            name = f"{prefix}.{own}" if prefix else own
            source = first.setdefault(id(value), name)
            if value is not None and source in values:
                tied[name] = values[source]
    with _recurrent_without_cudnn(model), with_second_derivatives(model):
        return functional_call(model, tied, args, kwargs, tie_weights=False)


@contextlib.contextmanager
def _recurrent_without_cudnn(model: nn.Module) -> Iterator[None]:
    """Inside, recurrent layers on GPUs run without cuDNN, whose fused layers have no second derivative."""
    changed = [m for m in model.modules() if isinstance(m, nn.RNNBase) and "forward" not in vars(m)]

    def plain(forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            before = torch.backends.cudnn.enabled
            torch.backends.cudnn.enabled = False
            try:
                return forward(*args, **kwargs)
            finally:
                torch.backends.cudnn.enabled = before

        return run

    try:
        for module in changed:
            module.forward = plain(module.forward)
        yield
    finally:
        for module in changed:
            del module.forward


def trainable_and_constant(module: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The trainable parameters, and the frozen ones with the buffers, by name, detached."""
    trainable = {k: v.detach() for k, v in module.named_parameters() if v.requires_grad}
    constant = {k: v.detach() for k, v in module.named_parameters() if not v.requires_grad}
    return trainable, constant | {k: v.detach() for k, v in module.named_buffers()}


def copy_without_weights(module: nn.Module) -> nn.Module:
    """A copy of the module's structure on the meta device, free of memory and of all hooks."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    memo: dict[int, Any] = {}
    for tensor in (*module.parameters(), *module.buffers()):
        empty = tensor.detach().to("meta")
        memo[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
    for part in module.modules():
        memo |= {id(getattr(part, name)): OrderedDict() for name in hooks}
        memo[id(part.__dict__.get("autograd_grad_sample_hooks"))] = []
        memo[id(part.__dict__.get("activations"))] = []
    memo.pop(id(None), None)
    try:
        copied = copy.deepcopy(module, memo)
    except RuntimeError as error:
        raise UnsupportedModuleError(
            f"the model cannot be copied ({_first_line(error)}): it holds a tensor that was computed from parameters. "
            "Use torch.nn.utils.parametrizations.weight_norm instead of torch.nn.utils.weight_norm; detach other "
            "tensors that modules hold as attributes, or compute them in forward()."
        ) from error
    for part in copied.modules():
        vars(part).pop(HOOKS_INSTALLED, None)
    return copied


def turned(tree: Any) -> Any:
    """The same with the first two dimensions of each tensor exchanged; a tensor with one dimension stays as it is."""
    return map_tensors(lambda leaf: leaf.transpose(0, 1) if leaf.ndim > 1 else leaf, tree)


def with_examples_first(module: nn.Module) -> nn.Module:
    """A module whose inputs have the examples along their second dimension, as one that takes them along the first.

    Both have the same weights, attributes, hooks and children.

    Example:
        >>> module = nn.Flatten(0, 1)
        >>> with_examples_first(module)(torch.tensor([[1, 2], [3, 4]])), module(torch.tensor([[1, 2], [3, 4]]))
        (tensor([1, 3, 2, 4]), tensor([1, 2, 3, 4]))
    """
    kind = type(module)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return kind.__call__(self, *turned(args), **turned(kwargs))

    alias: nn.Module = object.__new__(type(kind.__name__, (kind,), {"__call__": call}))
    object.__setattr__(alias, "__dict__", module.__dict__)
    return alias


def without_opacus(model: nn.Module) -> tuple[nn.Module, nn.Module]:
    """The module that holds the weights, and the one to call: a copy if Opacus has added its hooks."""
    wrapped = any(base.__name__ == "AbstractGradSampleModule" for base in type(model).__mro__)
    live: nn.Module = model._module if wrapped else model  # type: ignore[assignment]
    hooked = wrapped or hasattr(model, "autograd_grad_sample_hooks")
    return live, copy_without_weights(live) if hooked else live


def may_drop(module: nn.Module) -> bool:
    """Whether this module itself (not its children) is of a kind that drops something in training."""
    if isinstance(module, nn.RNNBase):
        return module.num_layers > 1
    return isinstance(module, nn.modules.dropout._DropoutNd | nn.MultiheadAttention)


def has_active_dropout(module: nn.Module) -> bool:
    """Whether this module itself (not its children) would drop something now."""
    if not (module.training and may_drop(module)):
        return False
    probability = module.p if isinstance(module, nn.modules.dropout._DropoutNd) else module.dropout
    return float(probability) > 0  # type: ignore[arg-type]


def check_unweighted_mean(loss_fn: Callable[[Any, Any], Tensor]) -> None:
    """Raise for a mean weighted by class: its weights cancel for a single example, and mix the examples of a batch."""
    if not isinstance(loss_fn, nn.CrossEntropyLoss | nn.NLLLoss):
        return
    if loss_fn.weight is not None and loss_fn.reduction == "mean":
        raise ValueError(
            f"{type(loss_fn).__name__} with class weights and reduction='mean' divides by the weights of the whole "
            "batch, so no example has its own loss; pass reduction='sum', and in the loop divide by the number of "
            "examples: criterion(outputs, targets) / len(targets)"
        )


def check_modules(model: nn.Module, *, allow_dropout: bool = False) -> None:
    """Raise :class:`UnsupportedModuleError` for modules that mix examples or draw random numbers."""
    for name, module in model.named_modules():
        where = f"{name or type(model).__name__} ({type(module).__name__})"
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            trainable = any(value.requires_grad for value in module.parameters(recurse=False))
            if module.training or trainable:
                fix = "opacus.validators.ModuleValidator.fix does"
                if not type(module).__module__.startswith("torch."):  # timm's: with an activation, unknown to Opacus
                    act = f", model.get_submodule({name!r}).act" if hasattr(module, "act") else ""
                    parts = f"GroupNorm(1, {module.num_features}){act}"
                    fix = f"for each such layer: model.set_submodule({name!r}, nn.Sequential(nn.{parts}))"
                raise UnsupportedModuleError(
                    f"{where}: batch normalisation mixes the examples of a batch, so no gradient belongs to one "
                    f"example. Replace it with GroupNorm ({fix}), or freeze it and put it in eval mode."
                )
        if isinstance(module, nn.modules.instancenorm._InstanceNorm) and module.track_running_stats:
            raise UnsupportedModuleError(
                f"{where}: running statistics carry information from one example to the next outside the private "
                "gradient. Build it with track_running_stats=False."
            )
        if has_active_dropout(module) and not allow_dropout:
            raise UnsupportedModuleError(
                f"{where}: active dropout makes the gradient random, so its Jacobian is undefined. Put it in eval "
                "mode or set its probability to 0."
            )


@contextlib.contextmanager
def explain_randomness() -> Iterator[None]:
    """If ``vmap`` meets a random number, say what to do."""
    try:
        yield
    except RuntimeError as error:
        if "randomness" not in str(error):
            raise
        raise UnsupportedModuleError(
            "the model draws random numbers in its forward pass (dropout called as a function?), so its gradient's "
            "Jacobian is undefined; put it in eval mode"
        ) from error


@contextlib.contextmanager
def explain_derivatives() -> Iterator[None]:
    """If the gradient of a single example cannot be taken or differentiated, say what to do."""
    try:
        yield
    except RuntimeError as error:
        if ran_out(error):
            raise
        raise UnsupportedModuleError(
            f"one example's gradient, or its derivative, cannot be computed ({_first_line(error)}): the model does not "
            "run on a batch of one, or torch has no second derivative of an operation in the model or the loss. Write "
            "that operation with others, for example (x[:, None] - y).norm(dim=-1) instead of torch.cdist(x, y)."
        ) from error


@contextlib.contextmanager
def explain_layers(model: nn.Module) -> Iterator[None]:
    """If something inside fails, name layers that are known to fail, and what to use instead."""
    try:
        yield
    except RuntimeError as error:
        if ran_out(error):
            raise
        culprits = [
            f"{name or type(model).__name__} ({type(module).__name__}): {instead}"
            for name, module in model.named_modules()
            if (instead := _instead_of(module)) is not None
        ]
        if not culprits:
            raise
        raise UnsupportedModuleError(
            f"the gradient could not be taken example by example ({_first_line(error)}). Layers known "
            f"to prevent that: {'; '.join(culprits)}."
        ) from error


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")


def _instead_of(module: nn.Module) -> str | None:
    if isinstance(module, nn.RNNBase):
        return "use opacus.layers.DPLSTM, DPGRU or DPRNN; or estimator='weight-probes', without a map"
    if isinstance(module, nn.EmbeddingBag):
        return "give it bags of one length, [batch, T], without offsets, and mode='mean' or 'sum'"
    if isinstance(module, nn.Embedding) and (module.max_norm is not None or module.sparse):
        return "build it without max_norm and sparse"
    return None
