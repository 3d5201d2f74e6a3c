"""Opacus's options of ``make_private``: which of them can be accounted for, and what they mean for the accounting."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn, optim

from torchfil.engine.distributed.shards import is_sharded
from torchfil.engine.views import ManyViews

__all__ = ["WHY_NOT_ADAPTIVE", "check_accumulation", "check_modes", "check_optimizer", "options_known_to", "thresholds"]

WHY_NOT_ADAPTIVE = "it adapts the threshold by counting factors below 1, and a smooth clip has only such factors"
MODES = ("auto", "ghost", "hooks", "functorch", "ew")
_WITHOUT = {"rand_on_empty": False, "wrap_model": True}  # what Opacus 1.5 does, which has no such options


def check_modes(clipping: str, grad_sample_mode: str, batch_first: bool, module: nn.Module, *, wrap_model: bool) -> str:
    """The mode to use; raise for options of Opacus whose release the accounting would not describe."""
    if clipping not in ("flat", "per_layer"):
        reason = WHY_NOT_ADAPTIVE if clipping == "adaptive" else "it is not known"
        raise ValueError(f"clipping={clipping!r} cannot be accounted for: {reason}. Use 'flat' or 'per_layer'.")
    if grad_sample_mode not in MODES:
        sharded = "is for sharded weights, which 'auto' and 'ghost' support as well"
        reason = sharded if "fsdp" in grad_sample_mode else "is not known"
        raise ValueError(
            f"grad_sample_mode={grad_sample_mode!r} {reason}. Use 'auto', which forms no per-example gradients, or one "
            f"of {', '.join(map(repr, MODES[1:]))}."
        )
    mode = "auto" if grad_sample_mode == "ghost" else grad_sample_mode
    mode = "hooks" if mode == "auto" and not wrap_model else mode
    if mode != "auto" and isinstance(module, ManyViews):
        raise ValueError(
            f"views= needs grad_sample_mode='auto' and wrap_model=True: {mode!r} forms one gradient per view, not one "
            "per example"
        )
    if mode != "auto" and is_sharded(module):
        raise ValueError(
            f"the model is sharded (fully_shard), and {mode!r} keeps each example's gradient of all weights; use "
            "grad_sample_mode='auto' with wrap_model=True"
        )
    if not batch_first and (mode == "ew" or isinstance(module, ManyViews) or is_sharded(module)):
        raise ValueError(
            "batch_first=False does not go with grad_sample_mode='ew', views= or sharded weights: give the model its "
            "inputs batch first and let it transpose them; layers inside may have the positions first"
        )

    # Opacus's hooks give the padding row a gradient that torch does not.
    padded = [
        name
        for name, part in module.named_modules()
        if isinstance(part, nn.Embedding) and part.padding_idx is not None and part.weight.requires_grad
    ]
    if padded and mode == "hooks":
        raise ValueError(
            f"the embeddings {padded} have a padding_idx: torch's gradient of that row is zero and Opacus's is not, so "
            "the released gradients would differ from the accounted ones. Use grad_sample_mode='auto', set "
            "padding_idx = None on them (the row is then trained like any other), or freeze them "
            "(requires_grad_(False))."
        )
    return mode


def options_known_to(method: Callable[..., Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a method of Opacus, without those that came in a later Opacus than the installed one.

    Raises:
        ValueError: One of those asks for something else than what the installed Opacus does.

    Example:
        >>> def prepare(loader, *, distributed): ...
        >>> options_known_to(prepare, {"distributed": False, "rand_on_empty": False})
        {'distributed': False}
    """
    known = inspect.signature(method).parameters
    for name in options.keys() - known.keys():
        if options[name] != _WITHOUT[name]:
            raise ValueError(
                f"{name}={options[name]!r} needs a later Opacus than the installed one: pip install 'opacus>=1.6', or "
                f"leave it out ({name}={_WITHOUT[name]!r})"
            )
    return {name: value for name, value in options.items() if name in known}


def check_accumulation(accumulation_steps: int, mode: str, *, poisson_sampling: bool) -> None:
    """Raise if a draw cannot be split into several batches."""
    if accumulation_steps != 1 and (mode != "auto" or not poisson_sampling):
        raise ValueError(
            f"accumulation_steps={accumulation_steps} is for Poisson sampling in grad_sample_mode='auto', not for "
            f"{mode!r} with poisson_sampling={poisson_sampling}; without Poisson sampling leave it out: any number of "
            "batches may be accumulated"
        )


def thresholds(
    clipping: str, max_grad_norm: float | Sequence[float], module: nn.Module, optimizer: optim.Optimizer
) -> tuple[float, dict[str, float] | None]:
    """‖C‖, and C_l/‖C‖ by the trainable parameters' names, None for one threshold on the whole gradient.

    Example:
        >>> model = nn.Linear(2, 1)
        >>> thresholds("per_layer", [3.0, 4.0], model, optim.SGD(model.parameters(), lr=0.1))
        (5.0, {'weight': 0.6, 'bias': 0.8})
    """
    names = {id(p): name for name, p in module.named_parameters() if p.requires_grad}
    order = [names[id(p)] for group in optimizer.param_groups for p in group["params"] if id(p) in names]
    several = not isinstance(max_grad_norm, (int, float))
    if clipping != "per_layer":
        if several:
            raise ValueError(f"max_grad_norm={max_grad_norm} has several numbers: pass clipping='per_layer' with them")
        return float(max_grad_norm), None  # type: ignore[arg-type]
    if not several or len(max_grad_norm) != len(order):  # type: ignore[arg-type]
        raise ValueError(
            f"clipping='per_layer' needs max_grad_norm as a list of {len(order)} numbers, one for each of {order}, got "
            f"{max_grad_norm}. For C together: max_grad_norm=[C / {len(order)} ** 0.5] * {len(order)}."
        )
    limits = [float(limit) for limit in max_grad_norm]  # type: ignore[union-attr]
    if not all(math.isfinite(limit) and limit > 0 for limit in limits):
        raise ValueError(f"max_grad_norm={limits} must all be positive and finite")

    together = math.hypot(*limits)
    by_name = {name: limit / together for name, limit in zip(order, limits, strict=True)}
    return together, {name: by_name[name] for name in names.values()}  # in the order of the gradients


def check_optimizer(module: nn.Module, optimizer: optim.Optimizer) -> None:
    """Raise unless the optimizer takes one gradient per step, of the module's trainable parameters and no others."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(
            f"{type(optimizer).__name__} evaluates the loss and its gradient several times in one step (its step() "
            "needs a closure), and each evaluation would be a separate release, which the accountant does not count. "
            "Use an optimizer that takes one gradient per step, such as SGD, Adam or AdamW."
        )
    own = {id(p): name for name, p in module.named_parameters()}
    given = {id(p) for group in optimizer.param_groups for p in group["params"]}
    strange = len(given - own.keys())
    if strange:
        raise ValueError(
            f"Module parameters are different than optimizer Parameters: {strange} of the optimizer's {len(given)} are "
            "not the module's. Was a layer replaced after the optimizer was made (ModuleValidator.fix, a new head)? "
            "Make the optimizer from the parameters of the module that you pass here."
        )
    left = [name for name, p in module.named_parameters() if p.requires_grad and id(p) not in given]
    if left:
        raise ValueError(
            f"the optimizer does not hold {len(left)} trainable parameters "
            f"({', '.join(left[:5])}{', …' if len(left) > 5 else ''}): freeze those that are not trained "
            "(requires_grad_(False)), or give them to the optimizer"
        )
