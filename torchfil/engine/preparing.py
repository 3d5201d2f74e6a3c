"""Before a run: its options, checked, and what they say of the examples, the sampling rate and the size of a batch."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from typing import Any

from opacus.grad_sample import AbstractGradSampleModule
from opacus.utils.uniform_sampler import DistributedUniformWithReplacementSampler, UniformWithReplacementSampler
from torch import nn, optim
from torch.utils.data import DataLoader

from torchfil.accounting.ids import ExampleIds, GrowingIds
from torchfil.engine.augmentation import check_reads_alike
from torchfil.engine.distributed.ranks import Ranks
from torchfil.engine.distributed.streams import check_stream, is_stream
from torchfil.engine.forward import is_in_training
from torchfil.engine.loader import check_sampler
from torchfil.engine.opacus_options import check_optimizer
from torchfil.engine.options import Accounting, RunOptions

__all__ = [
    "asked_question",
    "checked_options",
    "drawn_by_a_step",
    "most_in_a_pass",
    "names_of",
    "warn_without_noise",
    "with_rate",
]


def checked_options(
    module: nn.Module,
    optimizer: optim.Optimizer,
    data_loader: DataLoader[Any],
    accounting: Accounting,
    id_of: Any,
    *,
    poisson_sampling: bool,
    **options: Any,
) -> RunOptions:
    """Everything fixed for the run, checked; the sampling rate is added when the loader is prepared."""
    hooked = isinstance(module, AbstractGradSampleModule) or hasattr(module, "autograd_grad_sample_hooks")
    if hooked or is_in_training(module):
        raise ValueError(
            "the model is already private (make_private was called on it); pass the plain module, or its _module"
        )
    check_optimizer(module, optimizer)

    # how batches are drawn, which ε and the amplification rest on
    if accounting.sample_rate is not None and not poisson_sampling:
        raise ValueError(
            f"sample_rate={accounting.sample_rate} is the rate of Poisson sampling, and poisson_sampling=False draws "
            "nothing at random: leave one of them out"
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


def names_of(data_loader: DataLoader[Any], id_of: Any) -> ExampleIds:
    """The examples' names; a stream has none yet."""
    if is_stream(data_loader):
        return GrowingIds()
    count = len(data_loader.dataset)  # type: ignore[arg-type]
    return ExampleIds(count, [id_of(i) for i in range(count)] if callable(id_of) else id_of)


def drawn_by_a_step(
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
        if question is not None:
            raise ValueError(f"question={question!r} is given without target_true_positive_rate=; pass that as well")
        return None
    if question is None and len(asked) == 1:
        return asked[0]
    if question not in asked:
        raise ValueError(
            f"question={question!r} must be one of questions=, which are {asked or 'none'}; pass "
            "questions={name: …} (torchfil.questions), and its name"
        )
    return question
