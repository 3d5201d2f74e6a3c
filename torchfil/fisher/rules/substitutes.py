"""Substitutes for layers and functions with a slow second derivative, used inside a recorded pass.

The outputs are the same. Derivatives with respect to the layers' weights are not defined, because a
recorded pass treats weights as constants. Each family of layers registers its own substitutes.

A substitute of a layer with several weights also reports each use of a weight. From outside, a
recorded pass sees only the layer's input and output; in between, a recurrent layer uses four
weights at every time step. Its substitute reports what each weight was applied to and the result,
as if each were a layer.

Products of batches of small matrices, which the rules use, are here, too.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from contextvars import ContextVar
from typing import Any, Generic, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch._functorch.utils import unwrap_dead_wrappers

from torchfil.fisher.models import (
    REDUCED,
    convolutions_in_tf32,
    product_precision,
    products_in,
    set_inside,
)

logger = logging.getLogger(__name__)

Entry = TypeVar("Entry")


class _Substitute(NamedTuple):
    """Makes the substitute for a module's method.

    Whether that reports all uses of parameters, and on which device.
    """

    make: Callable[[Any], Callable[..., Any]]
    method: str
    reports_uses: bool
    device: str | None


# Torch's functions that recorded passes compute otherwise, by device, for
# :class:`torchfil.fisher.models.Replaced`.
FUNCTIONS: dict[str, dict[Callable[..., Any], Callable[..., Tensor | None]]] = {
    "cpu": {},
    "cuda": {},
}

# the forward pass does not depend on them
_HARMLESS = frozenset({"extra_repr", "reset_parameters"})


def keeps_forward(kind: type[nn.Module], base: type[nn.Module]) -> bool:
    """Whether a subclass computes the same as its base: it overrides nothing that the base defines.

    Example:
        >>> class Named(nn.Linear):
        ...     def extra_repr(self):
        ...         return "mine"
        >>> class Other(nn.Linear):
        ...     def forward(self, x):
        ...         return 2 * super().forward(x)
        >>> keeps_forward(Named, nn.Linear), keeps_forward(Other, nn.Linear)
        (True, False)
    """
    if base is nn.Module:
        return True
    below = kind.__mro__[: kind.__mro__.index(base)]
    vital = {"forward", "__call__", "__getattr__", "__getattribute__"}
    for part in base.__mro__:
        if part not in (nn.Module, object):
            names = {*vars(part), *getattr(part, "__annotations__", ())}
            vital |= {name for name in names if not name.startswith("__") and name not in _HARMLESS}
    return not any(vital & set(vars(part)) for part in below)


class Registry(Generic[Entry]):
    """Entries by class of module; or by the class's full name, if its library may be missing."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.entries: dict[type[nn.Module] | str, Entry] = {}
        # a run may make classes
        self._found: WeakKeyDictionary[type[nn.Module], Entry | None] = WeakKeyDictionary()

    def add(self, kind: type[nn.Module] | str, entry: Entry, *, overwrite: bool) -> None:
        """Enter something for a class.

        ValueError if that has an entry, and ``overwrite`` is False.
        """
        if kind in self.entries and not overwrite:
            name = kind if isinstance(kind, str) else kind.__name__
            raise ValueError(f"{name} already has a {self.what}; pass overwrite=True to replace it")
        self.entries[kind] = entry
        self._found.clear()

    def find(self, kind: type[nn.Module]) -> Entry | None:
        """The entry of a class, or of the base class whose forward pass it keeps."""
        if kind not in self._found:
            self._found[kind] = self._find(kind)
        return self._found[kind]

    def _find(self, kind: type[nn.Module]) -> Entry | None:
        for base in kind.__mro__:
            entry = self.entries.get(base) or self.entries.get(
                f"{base.__module__}.{base.__qualname__}"
            )
            if entry is not None and keeps_forward(kind, base):
                return entry
        return None


_SUBSTITUTES: Registry[_Substitute] = Registry("substitute")


def register_substitute(
    kind: type[nn.Module] | str,
    make: Callable[[Any], Callable[..., Any]],
    *,
    method: str = "forward",
    reports_uses: bool = False,
    device: str | None = None,
    overwrite: bool = False,
) -> None:
    """Compute modules of this class, and of subclasses that keep its forward pass, by
    ``make(module)``.

    Args:
        kind: The class; or its full name, if its library may be missing:
            ``transformers.activations.NewGELUActivation``.
        make: Returns the substitute for the method of a module.
        method: The method that it replaces.
        reports_uses: Whether the substitute reports all uses of the module's parameters by
            :func:`report_use`.
        device: The only kind of device on which it is used ("cuda"); None: all.
        overwrite: Whether to replace the class's current substitute.

    Raises:
        ValueError: The class already has a substitute, and ``overwrite`` is False.
    """
    _SUBSTITUTES.add(kind, _Substitute(make, method, reports_uses, device), overwrite=overwrite)


@contextlib.contextmanager
def with_substitutes(
    model: nn.Module, but: Collection[nn.Module] = (), device: str = "cpu"
) -> Iterator[None]:
    """Inside, layers that have a substitute on this device ("cpu", "cuda") are computed by it.

    Exceptions are methods set on a module itself, subclasses with another forward pass, and the
    modules ``but``.
    """
    changed: list[tuple[nn.Module, str]] = []
    try:
        for module in model.modules():
            found = _SUBSTITUTES.find(type(module))
            if found is None or found.device not in (None, device):
                continue
            if found.method not in vars(module) and module not in but:
                setattr(module, found.method, found.make(module))
                changed.append((module, found.method))
        yield
    finally:
        for module, method in changed:
            delattr(module, method)


def is_served(value: Any) -> bool:
    """Whether substitutes of functions apply: to a differentiated tensor on a CPU, in float32 or
    float64.

    They do not apply under autocast, which cannot see inside them.
    """
    if not isinstance(value, Tensor) or not value.requires_grad or value.device.type != "cpu":
        return False
    return value.dtype in (torch.float32, torch.float64) and not torch.is_autocast_enabled("cpu")


def kernels_for(tensor: Tensor, *, reduced: bool = False) -> Any:
    """The module :mod:`torchfil.fisher.rules.kernels`.

    None if torch must compute: CPUs, no Triton, other dtypes.

    ``reduced`` says that bfloat16 and float16 are served, too. Triton launches on the current GPU,
    whichever GPU holds the tensors, so tensors of other GPUs are not served.
    """
    if not tensor.is_cuda or tensor.device.index != torch.cuda.current_device():
        return None
    served = tensor.dtype in (torch.float32, torch.float64) or (reduced and tensor.dtype in REDUCED)
    return _kernels(tensor.device) if served else None


@functools.cache
def _kernels(device: torch.device) -> Any:
    """The kernels, tried once: Triton may be missing, lack a compiler, or not support the GPU."""
    try:
        from torchfil.fisher.rules import kernels

        kernels.gelu_pulled_twice(*torch.ones(3, 8, device=device))
    except Exception as error:
        logger.info(
            "Triton does not work on %s, so second derivatives are slower: %s", device, error
        )
        return None
    return kernels


class Function(torch.autograd.Function):
    """:class:`torch.autograd.Function` for positional arguments without defaults.

    torch binds the arguments to the signature of ``forward`` at every call, which takes longer than
    all the rest (on two CPU cores, a step of a ViT-Tiny took 6 % longer).
    """

    @classmethod
    def apply(cls, *args: object) -> Tensor:
        """As in torch; a tuple if the function has several results."""
        if torch._C._are_functorch_transforms_active():
            return super().apply(*args)
        return super(torch.autograd.Function, cls).apply(*unwrap_dead_wrappers(args))  # type: ignore[misc]


# The module, its rule, a, the output, and the parameters' names in the module by their names in the
# rule.
Listener = Callable[[nn.Module, Any, Tensor, Tensor, Mapping[str, str]], None]

_listener: ContextVar[Listener | None] = ContextVar("listener", default=None)


def reports_uses(module: nn.Module) -> bool:
    """Whether the uses of the module's and its children's parameters are reported inside a recorded
    pass.
    """
    found = _SUBSTITUTES.find(type(module))
    return found is not None and found.reports_uses


def report_use(
    module: nn.Module, rule: object, a: Tensor, output: Tensor, names: Mapping[str, str]
) -> Tensor:
    """Report that parameters were applied to ``a``, [batch, …], with the result ``output``, [batch,
    …].

    Args:
        module: The layer.
        rule: The rule of a layer with only these parameters.
        a: The tensor that they were applied to.
        output: The result.
        names: The parameters' names in the module by their names in the rule.

    Returns:
        The tensor to continue with instead of ``output``.
    """
    listener = _listener.get()
    if listener is None:
        return output
    if not output.requires_grad:
        output = output.detach().requires_grad_()
    listener(module, rule, a, output, names)
    return output


def listening(listener: Listener) -> contextlib.AbstractContextManager[None]:
    """Inside, ``listener`` is called with the arguments of every :func:`report_use`."""
    return set_inside(_listener, listener)


# whether products are of a convolution
_of_patches: ContextVar[bool] = ContextVar("of_patches", default=False)


@contextlib.contextmanager
def products_of_patches(like: Tensor) -> Iterator[None]:
    """Inside, products have the precision that the user has set for convolutions of such tensors.

    A product of patches is a convolution, which torch computes in TF32 on GPUs by default; it does
    not do so for other matrix products.
    """
    precision = "tf32" if like.is_cuda and convolutions_in_tf32() else product_precision()
    with set_inside(_of_patches, True), products_in(precision):
        yield


class _BatchedProduct(Function):
    """a @ b over leading dimensions, whose derivative is as precise as it.

    On CPUs, a transposed b is copied first.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(a: Tensor, b: Tensor) -> Tensor:
        return a @ (b.contiguous() if b.device.type == "cpu" else b)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.of_patches = _of_patches.get()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None]:
        a, b = ctx.saved_tensors
        (gradient,) = gradients
        with products_of_patches(gradient) if ctx.of_patches else contextlib.nullcontext():
            left = batched_product(gradient, b.mT) if ctx.needs_input_grad[0] else None
            right = batched_product(a.mT, gradient) if ctx.needs_input_grad[1] else None
        return left, right


def batched_product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b over leading dimensions, differentiable any number of times."""
    return _BatchedProduct.apply(a, b) if torch.is_grad_enabled() else _BatchedProduct.forward(a, b)


class _Gram(Function):
    """x ↦ x xᵀ over leading dimensions; its derivative, (γ + γᵀ)x, is one product."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return _BatchedProduct.forward(x, x.mT)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.of_patches = _of_patches.get()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        ((x,), (gradient,)) = ctx.saved_tensors, gradients
        with products_of_patches(gradient) if ctx.of_patches else contextlib.nullcontext():
            return batched_product(gradient + gradient.mT, x)


def gram(x: Tensor) -> Tensor:
    """x xᵀ of factors […, T, p], […, T, T], differentiable any number of times."""
    return _Gram.apply(x)
