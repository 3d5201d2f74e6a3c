"""Models as functions of their weights: calls with other weights, their precision, copies, and
refused models.

A model is refused if it mixes the examples of a batch, or draws random numbers that nobody has
recorded.

Functions of torch without a second derivative, or with one that takes minutes, are replaced in
these calls (:func:`with_second_derivatives`).

Activation checkpointing is switched off in recorded passes. ``torch.utils.checkpoint`` runs a part
of the model again in the backward pass. By then the weights that the pass was called with are gone,
and its layers are no longer watched. A recorded pass needs all activations anyway, as the start of
a second derivative. Inside such passes, the part therefore runs as if it were not checkpointed;
``max_memory`` bounds the memory of a pass by cutting the batch into pieces. The training loop's own
forward pass keeps its checkpoints, with two exceptions: Opacus's hooks would see a layer twice, and
the loss that a model returns is differentiated with respect to its other outputs.

A training loop under ``torch.autocast`` computes layers in bfloat16 and keeps float32 weights. Its
gradients belong to that computation, so every pass over its batch runs under the same autocast.
Norms, inner products and sums of these gradients are computed in float32 or wider: see
:func:`wide`.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from functools import cache, partial
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any, Literal, get_args

import torch
import torch.utils.checkpoint as torch_checkpoint
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from torchfil.utils.errors import UnsupportedModuleError, put_back_after_errors
from torchfil.utils.given import Args, Kwargs, Outputs
from torchfil.utils.trees import map_tensors

# one number for every axis, one for each, or a name such as "same"
Extent = int | str | Sequence[int]
ProbePrecision = Literal["float32", "tf32", "bfloat16"]
PROBE_PRECISIONS: tuple[str, ...] = get_args(ProbePrecision)
_NAMED_PRECISION = hasattr(torch.backends.cudnn, "conv")  # torch 2.9; flags before
REDUCED = frozenset({torch.bfloat16, torch.float16})  # fewer digits than float32

# by transformers, at the first call that wants hidden states
HOOKS_INSTALLED = "_output_capturing_hooks_installed"
_DROPOUTS = (nn.modules.dropout._DropoutNd, nn.MultiheadAttention)
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def call_with(model: nn.Module, values: dict[str, Tensor], args: object, kwargs: Any) -> Outputs:
    """``model(*args, **kwargs)`` with these parameters and buffers by name, everywhere that the
    model holds them.

    If a module is used twice, torch's own function swaps its parameters twice and then cannot
    restore them (pytorch/pytorch#164759); here every module is visited once.
    """
    first: dict[int, str] = {}
    tied: dict[str, Tensor] = {}
    for prefix, module in model.named_modules():
        for own, value in (*module._parameters.items(), *module._buffers.items()):
            name = f"{prefix}.{own}" if prefix else own
            source = first.setdefault(id(value), name)
            if value is not None and source in values:
                tied[name] = values[source]
    with weights_kept(model), _recurrent_without_cudnn(model), with_second_derivatives(model):
        return functional_call(model, tied, args, kwargs, tie_weights=False)


def weights_kept(module: nn.Module) -> contextlib.AbstractContextManager[None]:
    """After an error inside, the module holds the weights from before: Ctrl-C can stop torch while
    it swaps them.
    """
    return put_back_after_errors(
        own for part in module.modules() for own in (part._parameters, part._buffers)
    )


def _recurrent_without_cudnn(model: nn.Module) -> contextlib.AbstractContextManager[Any]:
    """Inside, a model with recurrent layers of torch runs without cuDNN, whose fused layers have no
    second derivative.

    A substitute of such a layer does not need it.
    """
    fused = any(
        isinstance(part, nn.RNNBase) and "forward" not in vars(part) for part in model.modules()
    )
    return torch.backends.cudnn.flags(enabled=False) if fused else contextlib.nullcontext()


def trainable_and_constant(module: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The trainable parameters, and the frozen ones with the buffers, by name, detached."""
    trainable = {k: v.detach() for k, v in module.named_parameters() if v.requires_grad}
    constant = {k: v.detach() for k, v in module.named_parameters() if not v.requires_grad}
    return trainable, constant | {k: v.detach() for k, v in module.named_buffers()}


def copy_without_weights(module: nn.Module, *, keep_hooks: bool = False) -> nn.Module:
    """A copy of the module's structure on the meta device, free of memory and of all hooks.

    Functions that were set on a module, and hold the module or a method of it, hold the copy's
    instead. With ``keep_hooks`` it has the module's hooks, and detached copies of tensors that the
    module kept from its passes.
    """
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    memo: dict[int, Any] = {}
    for tensor in (*module.parameters(), *module.buffers()):
        empty = tensor.detach().to("meta")
        memo[id(tensor)] = (
            nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
        )
    for part in module.modules():
        memo |= {
            id(own := getattr(part, name)): own.copy() if keep_hooks else OrderedDict()
            for name in hooks
        }
        if keep_hooks:
            kept = [
                value
                for value in vars(part).values()
                if isinstance(value, Tensor) and not value.is_leaf
            ]
            memo |= {id(value): value.detach() for value in kept}
        memo[id(part.__dict__.get("autograd_grad_sample_hooks"))] = []
        memo[id(part.__dict__.get("activations"))] = []
    memo.pop(id(None), None)
    try:
        copied = copy.deepcopy(module, memo)
    except RuntimeError as error:
        raise UnsupportedModuleError(
            f"the model cannot be copied ({first_line(error)}): it holds a tensor computed from "
            "parameters. Use torch.nn.utils.parametrizations.weight_norm, not "
            "torch.nn.utils.weight_norm; compute others in forward()."
        ) from error
    copies = {id(live): own for live, own in zip(module.modules(), copied.modules(), strict=True)}
    for part in copied.modules():
        vars(part).pop(HOOKS_INSTALLED, None)
        vars(part).update({name: _followed(value, copies) for name, value in vars(part).items()})
    return copied


class _Globals(dict[str, Any]):
    """Some of a function's globals, replaced; the others are read where the function read them."""

    def __init__(self, replaced: dict[str, Any], outside: dict[str, Any]) -> None:
        super().__init__(replaced)
        self.outside = outside

    def __missing__(self, name: str) -> Any:
        return self.outside[name]


def _followed(value: object, copies: dict[int, Any]) -> Any:
    """The same value with the copies of the modules that it holds; itself if it holds none.

    A deep copy shares functions. So what functions, methods, partials and callable objects hold is
    followed; the copy's first pass shows if there is more.

    Args:
        value: An attribute of a copied module.
        copies: The copies by the id of the original; those made here are added.
    """
    if id(value) not in copies:
        copies[id(value)] = value  # a cycle ends here
        parts, made_of = _parts_of(value)
        own = [_followed(part, copies) for part in parts]
        if any(new is not part for new, part in zip(own, parts, strict=True)):
            copies[id(value)] = made_of(*own)
    return copies[id(value)]


def _parts_of(value: object) -> tuple[Sequence[Any], Callable[..., Any]]:
    """What a value holds, and what makes the same value of other parts."""
    if isinstance(value, FunctionType):
        return _parts_of_function(value)
    if isinstance(value, MethodType):
        return (value.__func__, value.__self__), MethodType
    if isinstance(value, CellType):  # a variable around a function; a new one is empty
        return () if value == CellType() else (value.cell_contents,), CellType
    if isinstance(value, partial):
        names, count = list(value.keywords), 1 + len(value.args)
        parts = (value.func, *value.args, *value.keywords.values())
        return parts, lambda *new: partial(
            *new[:count], **dict(zip(names, new[count:], strict=True))
        )
    called = isinstance(vars(type(value)).get("__call__"), FunctionType) and hasattr(
        value, "__dict__"
    )
    if isinstance(value, nn.Module | type) or not called:
        return (), type

    def changed(*new: object) -> object:
        other = copy.copy(value)
        vars(other).update(zip(vars(value), new, strict=True))
        return other

    return list(vars(value).values()), changed


def _parts_of_function(function: FunctionType) -> tuple[Sequence[Any], Callable[..., Any]]:
    """Its cells and defaults, and the globals that it names, except functions from elsewhere."""
    code, outside, defaults = function.__code__, function.__globals__, function.__defaults__ or ()
    cells = function.__closure__ or ()
    first, last = len(defaults), len(defaults) + len(cells)
    found = {name: outside[name] for name in _names_in(code) & outside.keys()}
    named = {
        k: v
        for k, v in found.items()
        if not isinstance(v, FunctionType) or v.__globals__ is outside
    }

    def changed(*new: Any) -> FunctionType:
        read = zip(named, new[last:], strict=True)
        own = {name: value for name, value in read if value is not named[name]}
        other = FunctionType(
            code, _Globals(own, outside), function.__name__, new[:first], new[first:last]
        )
        other.__kwdefaults__ = function.__kwdefaults__
        return other

    return (*defaults, *cells, *named.values()), changed


def _names_in(code: CodeType) -> set[str]:
    """The names that a function and those defined inside it look up."""
    inner = [part for part in code.co_consts if isinstance(part, CodeType)]
    return set(code.co_names).union(*map(_names_in, inner))


def turned(tree: object) -> Any:
    """The same with the first two dimensions of each tensor exchanged.

    A tensor with one dimension stays as it is.
    """
    return map_tensors(lambda leaf: leaf.transpose(0, 1) if leaf.ndim > 1 else leaf, tree)


def with_examples_first(module: nn.Module) -> nn.Module:
    """A module whose inputs have the examples along their second dimension, as one that takes them
    along the first.

    Both have the same weights, attributes, hooks and children.

    Example:
        >>> module = nn.Flatten(0, 1)
        >>> (
        ...     with_examples_first(module)(torch.tensor([[1, 2], [3, 4]])),
        ...     module(torch.tensor([[1, 2], [3, 4]])),
        ... )
        (tensor([1, 3, 2, 4]), tensor([1, 2, 3, 4]))
    """
    kind = type(module)

    def call(self: nn.Module, *args: object, **kwargs: object) -> Outputs:
        return kind.__call__(self, *turned(args), **turned(kwargs))

    alias: nn.Module = object.__new__(type(kind.__name__, (kind,), {"__call__": call}))
    object.__setattr__(alias, "__dict__", module.__dict__)
    return alias


def without_opacus(model: nn.Module) -> tuple[nn.Module, nn.Module]:
    """The module that holds the weights, and the one to call: a copy if Opacus has added its
    hooks.
    """
    wrapped = any(base.__name__ == "AbstractGradSampleModule" for base in type(model).__mro__)
    live: nn.Module = model._module if wrapped else model  # type: ignore[assignment]
    return live, copy_without_weights(live) if (
        wrapped or hasattr(model, "autograd_grad_sample_hooks")
    ) else live


def may_drop(module: nn.Module) -> bool:
    """Whether this module itself (not its children) is of a kind that drops something in
    training.
    """
    return isinstance(module, _DROPOUTS) or (
        isinstance(module, nn.RNNBase) and module.num_layers > 1
    )


def has_active_dropout(module: nn.Module) -> bool:
    """Whether this module itself (not its children) would drop something now."""
    if not (module.training and may_drop(module)):
        return False
    probability = module.p if isinstance(module, nn.modules.dropout._DropoutNd) else module.dropout
    return float(probability) > 0  # type: ignore[arg-type]


def check_unweighted_mean(loss_fn: Callable[[Any, Any], Tensor] | None) -> None:
    """Raise for a mean weighted by class: its weights cancel for a single example, and mix the
    examples of a batch.
    """
    by_class = isinstance(loss_fn, nn.CrossEntropyLoss | nn.NLLLoss) and loss_fn.weight is not None
    if by_class and loss_fn.reduction == "mean":  # type: ignore[union-attr]
        raise ValueError(
            f"{type(loss_fn).__name__} with class weights and reduction='mean' divides by the "
            "weights of the whole batch; pass reduction='sum', and in the loop use "
            "criterion(outputs, targets) / len(targets)"
        )


def check_modules(model: nn.Module, *, allow_dropout: bool = False) -> None:
    """Raise :class:`UnsupportedModuleError` for modules that mix examples or draw random
    numbers.
    """
    for name, module in model.named_modules():
        where = f"{name or type(model).__name__} ({type(module).__name__})"
        trains = module.training or any(
            value.requires_grad for value in module.parameters(recurse=False)
        )
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and trains:
            # timm's layers hold an activation, and are unknown to Opacus
            own = type(module).__module__.startswith("torch.")
            fix = (
                "opacus.validators.ModuleValidator.fix does"
                if own
                else "and its activation, by model.set_submodule"
            )
            wrong = f"{where}: batch normalisation mixes the examples of a batch"
            raise UnsupportedModuleError(
                f"{wrong}. Use GroupNorm ({fix}), or freeze it and put it in eval mode."
            )
        if isinstance(module, nn.modules.instancenorm._InstanceNorm) and module.track_running_stats:
            wrong = f"{where}: running statistics carry information outside the private gradient"
            raise UnsupportedModuleError(f"{wrong}. Build it with track_running_stats=False.")
        if has_active_dropout(module) and not allow_dropout:
            wrong = f"{where}: active dropout makes the gradient random"
            raise UnsupportedModuleError(
                f"{wrong}. Put it in eval mode or set its probability to 0."
            )


def first_line(error: Exception) -> str:
    """The first line of an error's text, or its kind."""
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")


def without_checkpoints() -> contextlib.AbstractContextManager[None]:
    """Inside, ``torch.utils.checkpoint`` simply calls its function, wherever and under whatever
    name it was imported.

    Example:
        >>> import torch
        >>> x = torch.ones(2, requires_grad=True)
        >>> with without_checkpoints():
        ...     y = torch.utils.checkpoint.checkpoint(torch.tanh, x, use_reentrant=False)
        >>> type(y.grad_fn).__name__
        'TanhBackward0'
    """
    plain = {
        "CheckpointFunction": _PlainCall,
        "_checkpoint_without_reentrant_generator": _nothing_around,
    }
    return with_attributes(torch_checkpoint, **plain)


class _PlainCall:
    """Replaces the autograd function of checkpoints with ``use_reentrant=True``."""

    @staticmethod
    def apply(function: Callable[..., object], preserve_rng_state: bool, *args: object) -> Any:
        warn_of_skipped_checkpoints()
        return function(*args)


def _nothing_around(*args: object, **kwargs: object) -> Iterator[None]:
    """Replaces what checkpoints with ``use_reentrant=False`` do before and after the function."""
    warn_of_skipped_checkpoints()
    yield


@cache
def warn_of_skipped_checkpoints() -> None:
    """Warn once."""
    own = "in its own passes, whose memory Execution(max_memory=…) limits in bytes"
    live = (
        "and in forward passes from which a model returns its loss, whose memory smaller "
        "batches limit"
    )
    warnings.warn(
        f"activation checkpoints are skipped where torchfil differentiates: {own}, {live}",
        stacklevel=2,
    )


def with_second_derivatives(model: nn.Module) -> contextlib.AbstractContextManager[Any]:
    """Inside, the model can be differentiated twice, even through layers that torch differentiates
    only once.

    Example:
        >>> x = torch.tensor([0.5], requires_grad=True)
        >>> with with_second_derivatives(nn.Hardsigmoid()):
        ...     y = F.hardsigmoid(x)
        >>> torch.autograd.grad(y, x, create_graph=True)[0]
        tensor([0.1667])
    """
    uses_replaced = False
    for module in model.modules():
        whole = (
            isinstance(module, _CONVOLUTIONS)
            and module.stride == module.kernel_size
            and max(module.stride) > 1
        )
        uses_replaced |= whole or isinstance(module, nn.Hardsigmoid | nn.EmbeddingBag)
    return Replaced(_REPLACED) if uses_replaced else contextlib.nullcontext()


class Replaced(TorchFunctionMode):
    """Inside, torch functions are computed by others, as a table says.

    If one returns None, by torch.
    """

    def __init__(self, table: Mapping[Any, Callable[..., object]]) -> None:
        super().__init__()
        self._table = table

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        kwargs = kwargs or {}
        own = self._table.get(func)
        result = own(*args, **kwargs) if own is not None else None
        return func(*args, **kwargs) if result is None else result


def _embedding_bag(
    input: Tensor, weight: Tensor, *, mode: str, padding_idx: int | None, **given: Any
) -> Tensor | None:
    """The sum or mean of a table's rows, where bags are rows of ``input``.

    None for other kinds of bags.

    Torch hands all options on by name.
    """
    if (
        input.ndim != 2
        or mode not in ("mean", "sum")
        or given["max_norm"] is not None
        or given["scale_grad_by_freq"]
    ):
        return None
    rows = F.embedding(input, weight, padding_idx)  # [bags, T, width]
    if given["per_sample_weights"] is not None:
        rows = rows * given["per_sample_weights"].unsqueeze(-1)
    kept = (
        torch.ones_like(input, dtype=rows.dtype)
        if padding_idx is None
        else input.ne(padding_idx).to(rows.dtype)
    )
    total = (rows * kept.unsqueeze(-1)).sum(dim=1)
    return total if mode == "sum" else total / kept.sum(dim=1, keepdim=True).clamp(min=1)


def _convolution(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Extent = 1,
    padding: Extent = 0,
    dilation: Extent = 1,
    groups: int = 1,
) -> Tensor | None:
    """A matrix product over adjacent patches, as in a vision transformer's first layer.

    None for other convolutions.

    Torch's second derivative is a convolution whose kernel is an image, dilated by the stride; it
    takes minutes for a ViT-Base.
    """
    sizes = tuple(weight.shape[2:])
    as_sizes = [
        (value,) * len(sizes) if isinstance(value, int) else value
        for value in (stride, padding, dilation)
    ]
    if (
        any(isinstance(value, str) for value in as_sizes)
        or groups != 1
        or input.ndim != weight.ndim
    ):
        return None
    if [tuple(value) for value in as_sizes] != [sizes, (0,) * len(sizes), (1,) * len(sizes)] or max(
        sizes
    ) == 1:
        return None

    # [batch, channels, n₁, k₁, n₂, k₂, …] → [batch, n₁, n₂, …, channels · k₁ · k₂ · …]
    for axis, size in zip(range(2, 2 + 2 * len(sizes), 2), sizes, strict=True):
        whole = input.shape[axis] // size * size  # the rest, less than a patch, is not used
        input = input.narrow(axis, 0, whole).unflatten(axis, (-1, size))
    places, inside = range(2, input.ndim, 2), range(3, input.ndim, 2)
    patches = input.permute(0, *places, 1, *inside).flatten(1 + len(sizes))
    return F.linear(patches, weight.flatten(1), bias).movedim(-1, 1)


_REPLACED: dict[Any, Callable[..., Tensor | None]] = {
    F.hardsigmoid: lambda input, inplace=False: torch.clamp(input / 6 + 0.5, 0, 1),
    F.embedding_bag: _embedding_bag,
    **dict.fromkeys((F.conv1d, F.conv2d, F.conv3d), _convolution),
}


# ---------------------------------------------------------------------- the precision of passes


def autocast_now(device: torch.device) -> torch.dtype | None:
    """The current dtype of autocast on this device; None: no autocast.

    Example:
        >>> with torch.autocast("cpu", dtype=torch.bfloat16):
        ...     autocast_now(torch.device("cpu"))
        torch.bfloat16
    """
    kind = device.type
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


def autocast_as(
    dtype: torch.dtype | None, device: torch.device
) -> contextlib.AbstractContextManager[Any]:
    """Inside, autocast is as :func:`autocast_now` found it, whatever it is outside.

    Casts of weights are not cached: if the whole loop runs inside one autocast, they would outlive
    an update of the weights, and they would keep the graph of a recorded pass.
    """
    kind = device.type
    if not torch.amp.is_autocast_available(kind) or (
        dtype is None and not torch.is_autocast_enabled(kind)
    ):
        return contextlib.nullcontext()
    return torch.autocast(kind, dtype=dtype, enabled=dtype is not None, cache_enabled=False)


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype for norms and sums of such numbers: float32 or wider."""
    return torch.float32 if dtype in REDUCED else dtype


def wide(value: Tensor) -> Tensor:
    """The same numbers in a dtype that is wide enough for sums; differentiable.

    Example:
        >>> wide(torch.ones(2, dtype=torch.bfloat16)).dtype
        torch.float32
    """
    return value.float() if value.dtype in REDUCED else value


def autocast_inputs(*values: Tensor | None) -> tuple[Any, ...]:
    """The tensors in autocast's dtype, as convolutions and products receive them.

    Unchanged without autocast.
    """
    dtype = autocast_now(next(value.device for value in values if value is not None))
    return (
        values
        if dtype is None
        else tuple(None if value is None else value.to(dtype) for value in values)
    )


def normalised_dtype(x: Tensor) -> torch.dtype:
    """The dtype of the output of torch's normalisation layers for x: autocast on GPUs widens it."""
    return wide_dtype(x.dtype) if x.is_cuda and autocast_now(x.device) is not None else x.dtype


def product_precision() -> str:
    """The current precision of products of float32 matrices on GPUs."""
    if _NAMED_PRECISION:
        return torch.backends.cuda.matmul.fp32_precision
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"


def convolutions_in_tf32() -> bool:
    """Whether convolutions of float32 on GPUs are computed in TF32, torch's default."""
    cudnn: Any = torch.backends.cudnn
    return bool(cudnn.conv.fp32_precision == "tf32" if _NAMED_PRECISION else cudnn.allow_tf32)


def products_in(precision: str) -> contextlib.AbstractContextManager[None]:
    """Inside, products of float32 matrices on GPUs have this precision.

    "tf32" keeps every digit of numbers that come from bfloat16 or float16, and sums in float32.
    """
    if product_precision() == precision:
        return contextlib.nullcontext()
    own = {"fp32_precision": precision} if _NAMED_PRECISION else {"allow_tf32": precision == "tf32"}
    return with_attributes(torch.backends.cuda.matmul, **own)


@contextlib.contextmanager
def set_inside(variable: ContextVar[Any], value: object) -> Iterator[None]:
    """Inside, the variable has this value."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


@contextlib.contextmanager
def with_attributes(holder: object, **values: object) -> Iterator[None]:
    """Inside, these attributes of an object or module have these values."""
    before = {name: getattr(holder, name) for name in values}
    try:
        for name, value in values.items():
            setattr(holder, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(holder, name, value)


probe_dtype: ContextVar[torch.dtype | None] = ContextVar("probe_dtype", default=None)


@contextlib.contextmanager
def probes_in(precision: ProbePrecision | None, *, reduced: bool = False) -> Iterator[None]:
    """Inside, matrix products are only as precise as a probe needs, whose own error is 20 %.

    TF32 rounds factors to 0.05 %, bfloat16 to 0.4 %; both sum in float32. Do not compute norms or
    released sums inside.

    Args:
        precision: "tf32", on GPUs; "bfloat16", for the layers' own products, and "tf32" for the
            rest; "float32". None: as outside.
        reduced: Whether the model computes in bfloat16 or float16, so that "tf32" would add no
            digits.
    """
    if precision is None:
        yield
        return
    narrow = precision == "bfloat16" or (precision == "tf32" and reduced)
    dtype, products = (
        torch.bfloat16 if narrow else None,
        products_in("ieee" if precision == "float32" else "tf32"),
    )
    with set_inside(probe_dtype, dtype), products:
        yield


def probe_inputs(*values: Tensor | None) -> tuple[Any, ...]:
    """Factors of a product in the precision of :func:`probes_in`: bfloat16, or unchanged.

    None stays None.

    Example:
        >>> with probes_in("bfloat16"):
        ...     probe_inputs(torch.ones(2), None)
        (tensor([1., 1.], dtype=torch.bfloat16), None)
    """
    dtype = probe_dtype.get()
    return (
        values
        if dtype is None
        else tuple(None if value is None else value.to(dtype) for value in values)
    )
