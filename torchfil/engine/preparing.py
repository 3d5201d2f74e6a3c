"""Before a run: its options, checked, and what they say of the examples, the sampling rate and the size of a batch."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

from opacus.grad_sample import AbstractGradSampleModule
from opacus.utils.uniform_sampler import DistributedUniformWithReplacementSampler, UniformWithReplacementSampler
from torch import nn, optim
from torch.utils.data import DataLoader

from torchfil.accounting.ids import ExampleIds, GrowingIds
from torchfil.engine.augmentation import check_reads_alike
from torchfil.engine.loader import check_sampler
from torchfil.engine.module import is_in_training
from torchfil.engine.opacus_options import check_optimizer
from torchfil.engine.options import Accounting, RunOptions
from torchfil.engine.ranks import Ranks
from torchfil.engine.streams import check_stream, is_stream

__all__ = ["asked_question", "checked_options", "drawn_by_a_step", "names_of", "warn_without_noise", "with_rate"]


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
    """Add the rate of Poisson sampling; unchanged if the loader draws otherwise."""
    sampler = prepared.batch_sampler
    if not isinstance(sampler, UniformWithReplacementSampler | DistributedUniformWithReplacementSampler):
        return options
    return replace(options, sample_rate=options.accounting.accumulation_steps * float(sampler.sample_rate))


def names_of(data_loader: DataLoader[Any], id_of: Any) -> ExampleIds:
    """The examples' names; a stream has none yet."""
    if is_stream(data_loader):
        return GrowingIds()
    count = len(data_loader.dataset)  # type: ignore[arg-type]
    return ExampleIds(count, [id_of(i) for i in range(count)] if callable(id_of) else id_of)


def drawn_by_a_step(loader: DataLoader[Any], num_examples: int, ranks: Ranks | None) -> tuple[float, int]:
    """The accountant's sampling rate, and the expected size of all ranks' batches together, as in Opacus."""
    if is_stream(loader):
        assert loader.batch_size is not None
        return 1.0, loader.batch_size * (1 if ranks is None else ranks.size)
    sample_rate = 1 / len(loader)
    return sample_rate, int(num_examples * sample_rate)


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
