"""From the arguments of ``make_private`` to a run's checked options, its examples' ids and its sampling rate."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from opacus.grad_sample import AbstractGradSampleModule
from opacus.utils.uniform_sampler import DistributedUniformWithReplacementSampler, UniformWithReplacementSampler
from torch import nn, optim
from torch.utils.data import DataLoader

from torchfil.accounting.ids import ExampleIds, GrowingIds
from torchfil.engine.assembly import ManyViews, check_reads_alike
from torchfil.engine.distributed.ranks import Ranks
from torchfil.engine.distributed.shards import is_sharded
from torchfil.engine.distributed.streams import check_stream, is_stream
from torchfil.engine.forward import is_in_training
from torchfil.engine.loader import check_sampler
from torchfil.engine.options import WHY_NOT_ADAPTIVE, Accounting, RunOptions
from torchfil.utils.errors import require

__all__ = [
    "asked_question",
    "check_modes",
    "checked_options",
    "example_ids",
    "most_in_a_pass",
    "options_known_to",
    "rate_and_batch_size",
    "thresholds",
    "warn_without_noise",
    "with_rate",
]

_HOOKS = ("hooks", "functorch", "ew")  # Opacus's ways to form p.grad_sample; the first serves for all of them
_WITHOUT = {"rand_on_empty": False, "wrap_model": True}  # what Opacus 1.5 does, which has no such options


def check_modes(clipping: str, grad_sample_mode: str, batch_first: bool, module: nn.Module, *, wrap_model: bool) -> str:
    """The mode to use, "auto" or "hooks"; raise for options whose release the accounting would not describe."""
    if clipping not in ("flat", "per_layer"):
        reason = WHY_NOT_ADAPTIVE if clipping == "adaptive" else "it is not known"
        raise ValueError(f"clipping={clipping!r} cannot be accounted for: {reason}. Use 'flat' or 'per_layer'.")
    known = ("auto", "ghost", *_HOOKS)
    if grad_sample_mode not in known:
        sharded = "is for sharded weights, which 'auto' and 'ghost' support as well"
        reason = sharded if "fsdp" in grad_sample_mode else "is not known"
        raise ValueError(f"grad_sample_mode={grad_sample_mode!r} {reason}. Use one of {', '.join(map(repr, known))}.")
    mode = "hooks" if grad_sample_mode in _HOOKS or not wrap_model else "auto"

    # Hooks form one gradient for each view, not for each example, and of all weights.
    recorded = mode == "auto" and batch_first
    for name, given in (("views=", isinstance(module, ManyViews)), ("a sharded model", is_sharded(module))):
        needs = f"{name} needs grad_sample_mode='auto' with wrap_model=True and batch_first=True"
        require(recorded or not given, needs)

    # Opacus's hooks give the padding row a gradient that torch does not.
    embeddings = [(name, part) for name, part in module.named_modules() if isinstance(part, nn.Embedding)]
    padded = [name for name, part in embeddings if part.padding_idx is not None and part.weight.requires_grad]
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
        later = f"{name}={options[name]!r} needs a later Opacus than the installed one: pip install 'opacus>=1.6'"
        require(options[name] == _WITHOUT[name], f"{later}, or leave it out ({name}={_WITHOUT[name]!r})")
    return {name: value for name, value in options.items() if name in known}


def thresholds(
    clipping: str, max_grad_norm: float | Sequence[float], module: nn.Module, optimizer: optim.Optimizer
) -> tuple[float, dict[str, float] | None]:
    """‖C‖, and C_l/‖C‖ by the trainable parameters' names, None for one threshold on the whole gradient.

    Example:
        >>> model = nn.Linear(2, 1)
        >>> thresholds("per_layer", [3.0, 4.0], model, optim.SGD(model.parameters(), lr=0.1))
        (5.0, {'weight': 0.6, 'bias': 0.8})
    """
    several = not isinstance(max_grad_norm, (int, float))
    if clipping != "per_layer":
        require(not several, f"max_grad_norm={max_grad_norm} has several numbers: pass clipping='per_layer' with them")
        return float(max_grad_norm), None  # type: ignore[arg-type]
    names = {id(p): name for name, p in module.named_parameters() if p.requires_grad}
    order = [names[id(p)] for group in optimizer.param_groups for p in group["params"] if id(p) in names]
    if not several or len(max_grad_norm) != len(order):  # type: ignore[arg-type]
        raise ValueError(
            f"clipping='per_layer' needs max_grad_norm as a list of {len(order)} numbers, one for each of {order}, got "
            f"{max_grad_norm}. For C together: max_grad_norm=[C / {len(order)} ** 0.5] * {len(order)}."
        )
    limits = [float(limit) for limit in max_grad_norm]  # type: ignore[union-attr]
    require(all(0 < limit < math.inf for limit in limits), f"max_grad_norm={limits} must all be positive and finite")

    together = math.hypot(*limits)
    by_name = {name: limit / together for name, limit in zip(order, limits, strict=True)}
    return together, {name: by_name[name] for name in names.values()}  # in the order of the gradients


def _check_optimizer(module: nn.Module, optimizer: optim.Optimizer) -> None:
    """Raise unless the optimizer takes one gradient per step, of the module's trainable parameters and no others."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(
            f"{type(optimizer).__name__} evaluates the loss and its gradient several times in one step (its step() "
            "needs a closure), and each evaluation would be a separate release, which the accountant does not count. "
            "Use an optimizer that takes one gradient per step, such as SGD, Adam or AdamW."
        )
    own = {id(p) for p in module.parameters()}
    given = {id(p) for group in optimizer.param_groups for p in group["params"]}
    left = [name for name, p in module.named_parameters() if p.requires_grad and id(p) not in given]
    if given - own or left:
        raise ValueError(
            f"Module parameters are different than optimizer Parameters: {len(given - own)} of the optimizer's "
            f"{len(given)} are not the module's, and it does not hold {len(left)} trainable parameters "
            f"({', '.join(left[:5])}{', …' if len(left) > 5 else ''}): freeze those that are not trained "
            "(requires_grad_(False)). Make the optimizer from the parameters of the module that you pass here, after "
            "layers were replaced (ModuleValidator.fix, a new head)."
        )


def checked_options(
    module: nn.Module,
    optimizer: optim.Optimizer,
    data_loader: DataLoader[Any],
    accounting: Accounting,
    id_of: Any,
    *,
    mode: str,
    poisson_sampling: bool,
    **options: Any,
) -> RunOptions:
    """Everything fixed for the run, checked; the sampling rate is added when the loader is prepared."""
    hooked = isinstance(module, AbstractGradSampleModule) or hasattr(module, "autograd_grad_sample_hooks")
    private = "the model is already private (make_private was called on it); pass the plain module, or its _module"
    require(not hooked and not is_in_training(module), private)
    _check_optimizer(module, optimizer)

    # how batches are drawn, which ε and the amplification rest on
    rate = accounting.sample_rate
    fixed = f"sample_rate={rate} is the rate of Poisson sampling, and poisson_sampling=False: leave one of them out"
    require(rate is None or poisson_sampling, fixed)
    if accounting.accumulation_steps != 1 and not (mode == "auto" and poisson_sampling):
        raise ValueError(
            f"accumulation_steps={accounting.accumulation_steps} is for Poisson sampling in grad_sample_mode='auto'; "
            "without Poisson sampling leave it out: any number of batches may be accumulated"
        )
    if is_stream(data_loader):
        check_stream(data_loader, accounting, id_of, poisson_sampling=poisson_sampling)
    else:
        check_sampler(data_loader, poisson_sampling=poisson_sampling)

    run_options = RunOptions(
        accounting,
        amplification=accounting.amplification_for(poisson_sampling=poisson_sampling),
        sample_rate=None,
        max_memory=accounting.execution.memory_on(next(module.parameters()).device),
        **options,
    )
    if not is_stream(data_loader):
        check_reads_alike(data_loader.dataset, data_loader.collate_fn, run_options)
    return run_options


def warn_without_noise(noise_multiplier: float) -> None:
    """Warn if there is no noise."""
    if noise_multiplier == 0:
        warnings.warn(
            "noise_multiplier=0: the run trains without privacy; ε and the FIL of every example that takes part "
            "are infinite",
            stacklevel=3,
        )


def with_rate(options: RunOptions, prepared: DataLoader[Any]) -> RunOptions:
    """Add the rate of Poisson sampling, at which the loader draws from now on; unchanged if it draws otherwise.

    With a given rate q a pass has ⌊1/q⌋ batches.
    """
    sampler, given = prepared.batch_sampler, options.accounting.sample_rate
    if not isinstance(sampler, UniformWithReplacementSampler | DistributedUniformWithReplacementSampler):
        return options
    if given is not None:
        vars(sampler).update(dict.fromkeys(("steps", "num_batches"), int(1 / given + 1e-9)), sample_rate=given)
    return replace(options, sample_rate=options.accounting.accumulation_steps * float(sampler.sample_rate))


def example_ids(data_loader: DataLoader[Any], id_of: Any) -> ExampleIds:
    """The examples' ids; a stream has none yet."""
    if is_stream(data_loader):
        return GrowingIds()
    count = len(data_loader.dataset)  # type: ignore[arg-type]
    return ExampleIds(count, [id_of(i) for i in range(count)] if callable(id_of) else id_of)


def rate_and_batch_size(
    loader: DataLoader[Any], ids: ExampleIds, ranks: Ranks | None, divisor: float | None
) -> tuple[float, int, float]:
    """The accountant's sampling rate, the mean size of all ranks' batches together, and one rank's divisor.

    As in Opacus, the divisor is that mean size if none is given.
    """
    size = 1 if ranks is None else ranks.size
    if is_stream(loader):
        assert loader.batch_size is not None
        rate, drawn = 1.0, loader.batch_size * size
    else:
        rate = float(getattr(loader.batch_sampler, "sample_rate", 1 / len(loader)))
        drawn = max(1, int(ids.num_examples * rate))
    return rate, drawn, (divisor or drawn) / size


def most_in_a_pass(loader: DataLoader[Any]) -> int:
    """How often an example takes part in a pass without Poisson sampling, at most: 1, unless the sampler repeats."""
    sampler = getattr(loader.batch_sampler, "sampler", None)
    if is_stream(loader) or sampler is None:
        return 1
    return max(1, math.ceil(len(sampler) / len(loader.dataset)))  # type: ignore[arg-type]


def asked_question(question: str | None, rate: float | None, accounting: Accounting) -> str | None:
    """The question that a target is about; the only one if none is named. None: there is no such target."""
    asked = list(accounting.questions)
    if rate is None:
        require(question is None, f"question={question!r} is given without target_true_positive_rate=; pass both")
        return None
    if question is None and len(asked) == 1:
        return asked[0]
    require(question in asked, f"question={question!r} must be one of questions=, which are {asked or 'none'}")
    return question
