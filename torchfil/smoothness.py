"""Whether a model is smooth enough for Fisher information, and how to make it smooth.

The Fisher information of a step needs the derivative of the gradient, that is, the second
derivative of the network. With ReLU or max pooling, the gradient jumps as the input changes: its
Jacobian exists almost everywhere but misses the jumps, and the Cramér–Rao bound computed from it
can fail.

Registered rules judge modules, as in Opacus's ``ModuleValidator``. Non-smooth functions that a
``forward`` calls directly are found only by running the model: pass ``example_inputs``.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from torchfil.private import Inputs, as_call
from torchfil.utils.errors import UnsupportedModuleError
from torchfil.utils.given import Args, Kwargs

__all__ = [
    "ACTIVATIONS",
    "NonSmoothModuleError",
    "SmoothnessValidator",
    "non_smooth_operators",
    "register_smoothness_rule",
]

logger = logging.getLogger(__name__)


class NonSmoothModuleError(UnsupportedModuleError):
    """A module whose gradient jumps with its input."""


ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "tanh": nn.Tanh,
    "gelu": nn.GELU,
    "softplus": nn.Softplus,
    "silu": nn.SiLU,
}

Fixer = Callable[[Any, str], nn.Module]
_RULES: dict[type[nn.Module], tuple[str, Fixer | None, Callable[[Any], bool]]] = {}


def register_smoothness_rule(
    module_type: type[nn.Module],
    reason: str,
    *,
    fix: Fixer | None = None,
    applies: Callable[[Any], bool] = lambda module: True,
) -> None:
    """Declare a module type non-smooth.

    Args:
        module_type: The exact type; subclasses need their own rule.
        reason: What is wrong, for the error message.
        fix: (module, activation name) ↦ a smooth replacement; None if there is none.
        applies: Whether an instance is non-smooth; by default every instance is.
    """
    _RULES[module_type] = (reason, fix, applies)


class SmoothnessValidator:
    """Finds the non-smooth layers of a model and replaces them.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        >>> [str(error) for error in SmoothnessValidator.validate(model)]
        ['1 (ReLU): its derivative jumps. Use SmoothnessValidator.fix(...) or a smooth layer.']
        >>> SmoothnessValidator.fix(model, activation="softplus")[1]
        Softplus(beta=1.0, threshold=20.0)
    """

    @staticmethod
    def validate(
        model: nn.Module, *, example_inputs: Inputs | None = None, strict: bool = False
    ) -> list[NonSmoothModuleError]:
        """The non-smooth layers of a model, one error each.

        Args:
            model: Any module.
            example_inputs: A batch in the form that the model takes. If given, the model runs once,
                and non-smooth functions that its forward pass calls (``F.relu``, ``torch.max`` …)
                are also named.
            strict: Whether to raise the errors instead of returning them.

        Raises:
            NonSmoothModuleError: If ``strict`` and something is non-smooth; the text names every
                layer.
        """
        remedy = "Use SmoothnessValidator.fix(model, activation=...) or a smooth layer."
        errors = [
            NonSmoothModuleError(f"{w}: {why}. {remedy}")
            for w, why in non_smooth_layers(model).items()
        ]

        # Layers are named above; in a copy without them, only the forward pass can still call
        # something non-smooth.
        if example_inputs is not None:
            smooth_model = _fixed(copy.deepcopy(model), "tanh", {}, lenient=True)
            for operator in sorted(non_smooth_operators(smooth_model, *as_call(example_inputs))):
                where = f"{type(model).__name__}.forward calls {operator}, whose derivative jumps"
                remedy = (
                    "Call a smooth function instead (torch.tanh, F.gelu, F.softplus, F.avg_pool2d)."
                )
                errors.append(NonSmoothModuleError(f"{where}. {remedy}"))

        if strict and errors:
            raise NonSmoothModuleError("; ".join(map(str, errors)))
        return errors

    @staticmethod
    def is_valid(model: nn.Module, *, example_inputs: Inputs | None = None) -> bool:
        """Whether nothing non-smooth was found."""
        return not SmoothnessValidator.validate(model, example_inputs=example_inputs)

    @staticmethod
    def fix(model: nn.Module, *, activation: str = "tanh") -> nn.Module:
        """A copy of the model with non-smooth activations and max pooling replaced.

        Weights, device, dtype, hooks and training mode stay. Max pooling becomes average pooling of
        the same geometry. Layers without a smooth counterpart stay, and :meth:`validate` names
        them.

        Args:
            model: Any module.
            activation: "tanh", "gelu", "softplus" or "silu", or a name added to ``ACTIVATIONS``.

        Raises:
            NonSmoothModuleError: The model has dilated max pooling.
        """
        if activation not in ACTIVATIONS:
            raise ValueError(
                f"activation={activation!r} is unknown; use one of {', '.join(ACTIVATIONS)}"
            )
        return _fixed(copy.deepcopy(model), activation, {})


def non_smooth_layers(model: nn.Module) -> dict[str, str]:
    """Why each layer that is not smooth is none, by its name and type, as in "1 (ReLU)"."""
    found = {}
    for name, module in model.named_modules():
        reason = _reason(module)
        if reason is not None:
            found[f"{name or type(model).__name__} ({type(module).__name__})"] = reason
    return found


def _reason(module: nn.Module) -> str | None:
    rule = _RULES.get(type(module))
    if rule is not None and rule[2](module):
        return rule[0]
    if (
        isinstance(module, (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer))
        and module.activation is F.relu
    ):
        return "its feed-forward activation is F.relu, whose derivative jumps"
    return None


def _fixed(
    module: nn.Module, activation: str, done: dict[int, nn.Module], *, lenient: bool = False
) -> nn.Module:
    """The module with its non-smooth parts replaced.

    If ``lenient``, parts that cannot be replaced stay.
    """
    if id(module) in done:  # a module that is used twice stays one module
        return done[id(module)]

    rule = _RULES.get(type(module))
    if rule is not None and rule[1] is not None and rule[2](module):
        try:
            replacement = rule[1](module, activation).train(module.training)
        except NonSmoothModuleError:
            if not lenient:
                raise
            done[id(module)] = module
            return module
        logger.info("replaced %s by %s", module, replacement)
        done[id(module)] = replacement
        return replacement

    done[id(module)] = module
    for name, child in list(module._modules.items()):
        if child is not None:
            module._modules[name] = _fixed(child, activation, done, lenient=lenient)
    if (
        isinstance(module, (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer))
        and module.activation is F.relu
    ):
        module.activation = ACTIVATIONS[activation]()
    return module


class _RecordNonSmooth(TorchDispatchMode):
    """Records which non-smooth operators are called while it is active."""

    names = frozenset(
        """
        relu leaky_relu prelu _prelu_kernel threshold hardtanh hardswish hardsigmoid relu6 selu
        hardshrink softshrink rrelu_with_noise abs sign sgn floor ceil round maximum minimum max min
        amax amin sort topk median mode clamp clamp_min clamp_max max_pool1d max_pool2d max_pool3d
        max_pool2d_with_indices max_pool3d_with_indices mkldnn_max_pool2d adaptive_max_pool1d
        adaptive_max_pool2d adaptive_max_pool3d fractional_max_pool2d
        """.split()  # noqa: SIM905
    )

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        name = func.overloadpacket.__name__.removesuffix("_")  # in-place operators end in _
        floating = bool(args) and isinstance(args[0], Tensor) and args[0].is_floating_point()
        if floating and name in self.names:
            self.seen.add(name)
        return func(*args, **(kwargs or {}))


def non_smooth_operators(
    model: nn.Module, args: Sequence[object], kwargs: Mapping[str, object]
) -> set[str]:
    """The non-smooth operators that one forward pass calls, in its layers or directly."""
    with torch.no_grad(), _RecordNonSmooth() as record:
        model(*args, **kwargs)
    return record.seen


def _activation(module: nn.Module, activation: str) -> nn.Module:
    return ACTIVATIONS[activation]()


def _average_pool(pool: type[nn.Module], module: nn.Module, activation: str) -> nn.Module:
    dilation = module.dilation if isinstance(module.dilation, tuple) else (module.dilation,)
    if any(value != 1 for value in dilation):
        raise NonSmoothModuleError(
            f"{module}: dilated max pooling has no smooth counterpart; replace it by hand"
        )
    return pool(
        module.kernel_size, stride=module.stride, padding=module.padding, ceil_mode=module.ceil_mode
    )


def _adaptive_average_pool(pool: type[nn.Module], module: nn.Module, activation: str) -> nn.Module:
    return pool(module.output_size)


_JUMPS = "its derivative jumps"
_MAXIMUM_JUMPS = "the choice of the maximum jumps"
_ACTIVATIONS = """
    ReLU ReLU6 LeakyReLU PReLU RReLU Hardtanh Hardswish Hardsigmoid Hardshrink Softshrink Threshold
    SELU
""".split()  # noqa: SIM905
for _name in _ACTIVATIONS:
    register_smoothness_rule(getattr(nn, _name), _JUMPS, fix=_activation)
register_smoothness_rule(
    nn.ELU, _JUMPS + " unless alpha = 1", fix=_activation, applies=lambda m: m.alpha != 1
)
for _kind, _fix in (("", _average_pool), ("Adaptive", _adaptive_average_pool)):
    for _n in "123":
        _fixer = partial(_fix, getattr(nn, f"{_kind}AvgPool{_n}d"))
        register_smoothness_rule(getattr(nn, f"{_kind}MaxPool{_n}d"), _MAXIMUM_JUMPS, fix=_fixer)
for _type in (nn.FractionalMaxPool2d, nn.FractionalMaxPool3d):
    register_smoothness_rule(_type, _MAXIMUM_JUMPS)
