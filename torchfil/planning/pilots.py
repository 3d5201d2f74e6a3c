"""Pilots: whole training runs on copies that choose the noise and leave the user's objects unchanged.

A pilot trains a copy of model and optimizer on the user's loader, with its own ``make_private`` and its own random
numbers. It is independent of the run that follows, which continues as if no number had been drawn.
"""

from __future__ import annotations

import contextlib
import copy
import random
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from opacus.optimizers import DPOptimizer
from torch import nn, optim
from torch.utils.data import DataLoader

from torchfil.accounting.leakage import Leakage
from torchfil.engine.loader import split_batch
from torchfil.engine.options import Accounting
from torchfil.fisher.recording.graphs import release_memory
from torchfil.utils.noise import random_state, set_random_state
from torchfil.utils.progress import with_progress

__all__ = ["Pilots", "Train", "numbers_apart"]

Train = Callable[..., None]
_BETWEEN_SEEDS = 0x9E3779B97F4A7C15
_WITH_HOOKS = ("hooks", "functorch", "ew")


@dataclass(frozen=True)
class Pilots:
    """How pilots are trained.

    Attributes:
        new_engine: Makes an engine without a run, for a pilot's number.
        module: The user's model, which is copied.
        optimizer: The user's optimizer, copied with it.
        data_loader: The user's loader.
        epochs: The epochs of the run that follows.
        accounting: The accounting of the run that follows; pilots track only the trace and the questions.
        options: The other options of ``make_private``, except the noise.
        train: The user's loop: called with the engine and what ``make_private`` returns, it trains for all epochs.
            None: ``engine.train_step`` on each batch.
        progress: Whether each pilot shows a bar with the remaining time; not for the user's loop.
    """

    new_engine: Callable[[int], Any]
    module: nn.Module
    optimizer: optim.Optimizer
    data_loader: DataLoader[Any]
    epochs: int
    accounting: Accounting
    options: Mapping[str, Any]
    train: Train | None = None
    progress: bool = False

    def __post_init__(self) -> None:
        if self.train is not None:
            return
        if self.accounting.accumulation_steps > 1:
            raise ValueError(
                f"accumulation_steps={self.accounting.accumulation_steps} is for loops, but pilots take whole draws "
                "with train_step: pass your loop, train=f(engine, model, optimizer, loader)"
            )
        if hasattr(self.optimizer.step, "_wrapped_by_lr_sched"):
            warnings.warn(
                "the optimizer has a learning-rate scheduler, which pilots do not step: the noise is chosen for the "
                "current learning rate. Pass your loop, train=f(engine, model, optimizer, loader), with a scheduler "
                "for the optimizer that it is given.",
                stacklevel=4,
            )

    def run(self, noise_multiplier: float, number: int, epochs: int | None = None) -> Leakage:
        """The leakage of a whole pilot with this noise.

        Args:
            noise_multiplier: σ.
            number: The pilot's number: each has its own random numbers.
            epochs: Its length; None: as long as the run.
        """
        seed = (torch.initial_seed() + (number + 1) * _BETWEEN_SEEDS) % 2**63
        with numbers_apart(self._generators(), seed):
            module, optimizer = self._copies()
            options = dict(self.options)
            if self.train is None and options.get("grad_sample_mode") in _WITH_HOOKS:
                options["grad_sample_mode"] = "auto"  # the same numbers, by train_step
            if self.train is None:
                options.pop("wrap_model", None)
            engine = self.new_engine(number)
            made = engine.make_private(
                module,
                optimizer,
                self.data_loader,
                noise_multiplier=noise_multiplier,
                accounting=replace(self.accounting, track=(), norm_refresh=None, seed=seed),
                **options,
            )
            if self.train is not None:
                self.train(engine, *made)
            else:
                title = f"pilot {number + 1}, σ = {noise_multiplier:.4g}"
                self._train(engine, made[-1], self.epochs if epochs is None else epochs, title)
            leakage: Leakage = engine.totals
            engine.detach()

        # its graphs and copies are no longer needed, and the next pilot checks how much memory is free
        del engine, made, module, optimizer
        release_memory()
        return leakage

    def _train(self, engine: Any, loader: Any, epochs: int, title: str) -> None:
        by_itself = self.options.get("criterion") is None  # the model computes its loss from the whole batch
        batches = (batch for _ in range(epochs) for batch in loader)
        for batch in with_progress(batches, self.progress, title, epochs * len(loader)):
            if by_itself or not isinstance(batch, Mapping):
                engine.train_step(batch)
            else:
                engine.train_step(*split_batch(batch, self.options.get("batch_to_inputs")))

    def _generators(self) -> list[torch.Generator]:
        """All generators in the options, the loader, its samplers and its data set, without repetition."""
        loader, batches = self.data_loader, self.data_loader.batch_sampler
        parts = (loader, loader.sampler, batches, getattr(batches, "sampler", None), loader.dataset, loader.collate_fn)
        values = [
            *self.options.values(),
            *(value for part in parts for value in getattr(part, "__dict__", {}).values()),
        ]
        return list({id(value): value for value in values if isinstance(value, torch.Generator)}.values())

    def _copies(self) -> tuple[nn.Module, optim.Optimizer]:
        """Copies of model and optimizer, the latter over the copy's parameters."""
        plain = self.optimizer.original_optimizer if isinstance(self.optimizer, DPOptimizer) else self.optimizer
        original = getattr(self.module, "_orig_mod", self.module)
        try:
            return copy.deepcopy((original, plain))
        except Exception as error:
            raise TypeError(
                f"pilots train copies of model and optimizer, and copy.deepcopy failed ({error}); choose "
                "noise_multiplier by runs of make_private instead, each with its own model"
            ) from error


@contextlib.contextmanager
def numbers_apart(generators: list[torch.Generator], seed: int) -> Iterator[None]:
    """Inside, torch, numpy, Python and these generators draw from this seed; afterwards they continue as before.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> with numbers_apart([], seed=1):
        ...     other = torch.rand(1)
        >>> torch.rand(1), torch.manual_seed(0).initial_seed()
        (tensor([0.4963]), 0)
    """
    states = [generator.get_state() for generator in generators]
    before = random_state(), np.random.get_state(), random.getstate()
    try:
        torch.manual_seed(seed)
        np.random.seed(seed % 2**32)
        random.seed(seed)
        for place, generator in enumerate(generators):
            generator.manual_seed((seed + place + 1) % 2**63)
        yield
    finally:
        set_random_state(before[0])
        np.random.set_state(before[1])
        random.setstate(before[2])
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
