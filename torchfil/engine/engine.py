"""``FILPrivacyEngine``: Opacus's engine, with each example's Fisher information in addition to the DP accountant."""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import cached_property, partial
from typing import IO, Any

import torch
from opacus.accountants.utils import get_noise_multiplier
from opacus.optimizers import DPOptimizer
from opacus.utils.module_utils import trainable_modules
from opacus.validators import ModuleValidator
from opacus.validators.errors import IllegalModuleConfigurationError
from opacus.validators.errors import UnsupportedModuleError as OpacusUnsupportedModuleError
from torch import Tensor, nn, optim
from torch.utils.data import DataLoader

from torchfil.clipping import DEFAULT_CLIP, ClipFunction, get_clip
from torchfil.engine.assembly import PrivateTraining, assemble
from torchfil.engine.distributed.ranks import Ranks, check_ranks
from torchfil.engine.distributed.shards import without_shards
from torchfil.engine.distributed.streams import is_stream
from torchfil.engine.forward import without_compiler
from torchfil.engine.ghost_criterion import GhostCriterion
from torchfil.engine.loader import check_sampler, split_batch
from torchfil.engine.loss_inside import NO_TARGETS
from torchfil.engine.options import SHORTCUTS, Accounting, BatchToInputs
from torchfil.engine.preparing import (
    asked_question,
    check_modes,
    checked_options,
    example_ids,
    most_in_a_pass,
    options_known_to,
    rate_and_batch_size,
    thresholds,
    warn_without_noise,
    with_rate,
)
from torchfil.engine.resuming import Checkpoints
from torchfil.engine.run import Run
from torchfil.engine.saving.run_files import RunFiles
from torchfil.engine.views import with_views
from torchfil.fisher.gradients import differentiable_twice
from torchfil.fisher.models import check_modules, check_unweighted_mean
from torchfil.fisher.results import Part
from torchfil.planning.calibration import NoiseChoice, NoiseSearch, Pilots, Train, choose_noise, warn_when_missed
from torchfil.planning.targets import LeakageTarget, TargetCheck
from torchfil.private import Private
from torchfil.utils.noise import NoiseSource, derived_seed, log_line, noise_source

__all__ = ["FILPrivacyEngine"]

logger = logging.getLogger(__name__)


class FILPrivacyEngine(RunFiles):
    """Opacus's engine, which also accounts for how much the run leaks about every example.

    The training loop stays unchanged. At each step the engine adds the example's Fisher information
    (κ⊥ (J̃ᵀJ̃ − a aᵀ) + κ∥ a aᵀ) / (σC)² to its ledger; see :mod:`torchfil.fisher`.

    Guarantees:
        * The accounting differentiates exactly the gradients that are clipped and released, under the same dropout
          masks. Their norms never exceed ``max_grad_norm``, so with Poisson sampling ε is Opacus's.
        * ε compares the run with one in which an example's gradients are left out (zero-out adjacency): the number of
          examples n, the sampling rate q and the divisor of the noisy sums are the same in both, and public. The loader
          gives q and divisor from n; if n must stay hidden, set ``sample_rate`` and ``expected_batch_size``.
        * At every step the gradient at the model's output is checked against the engine's loss. A loop with another
          loss raises an error before the step is taken.
        * A refused call or step changes nothing.

    What one run says: the sum over its steps is an unbiased estimate of an upper bound on the model's Fisher
    information (Guo et al. 2022, Theorem 3). It binds unbiased attackers, on average over runs. Its inverse, the MSE
    bound, is an estimate from one run. :meth:`merge` averages repeated runs.

    Augmentation: the numbers are about the tensors that the model sees. Sums by coordinate are refused if the data set
    returns other values each time an example is read.

    Dropout: the attacker is assumed to know the masks, which can only overstate the leakage.

    Args:
        accountant: "rdp" (default), "prv" or "gdp", as in Opacus.
        secure_mode: Whether noise and Poisson draws come from the operating system's cryptographic generator. It takes
            no package, unlike Opacus's; the numbers are made on the CPU and copied to the model's device. False:
            torch's generators, seeded by the operating system at every start, load and fork
            (:mod:`torchfil.utils.noise`); ``torch.manual_seed`` does not reach them.
        noise_seed: For tests: seeds both, so that a run can be repeated and resumed bit for bit. Whoever has the seed
            or a checkpoint can subtract the noise: the run file says so, and the gate fails such a run.
    """

    def __init__(self, *, accountant: str = "rdp", secure_mode: bool = False, noise_seed: int | None = None) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Secure RNG turned off")
            try:
                super().__init__(accountant=accountant, secure_mode=False)  # torchcsprng, which no longer builds
            except ValueError as error:
                known = "'rdp', 'gdp', 'prv', or one registered with opacus.accountants.registry.register_accountant"
                raise ValueError(f"accountant={accountant!r} is not an accountant of Opacus: {known}") from error
        self.secure_mode, self._noise_seed = secure_mode, noise_seed
        self._made: PrivateTraining | None = None
        self._choice: NoiseChoice | None = None

    def make_private(
        self,
        module: nn.Module,
        optimizer: optim.Optimizer,
        data_loader: DataLoader[Any],
        *,
        noise_multiplier: float = 1.0,
        max_grad_norm: float | Sequence[float] = 1.0,
        criterion: Callable[[Any, Any], Tensor] | None = None,
        batch_first: bool = True,
        loss_reduction: str = "mean",
        poisson_sampling: bool = True,
        clipping: str = "flat",
        noise_generator: torch.Generator | None = None,
        grad_sample_mode: str = "auto",
        wrap_model: bool = True,
        rand_on_empty: bool = False,
        clip: str | ClipFunction | None = None,
        private: Private | None = None,
        id_of: Callable[[Any], Any] | Sequence[Hashable] | int | None = None,
        batch_to_inputs: BatchToInputs | None = None,
        accounting: Accounting | None = None,
        **shortcuts: Any,
    ) -> tuple[Any, ...]:
        """Make model, optimizer and loader private, as Opacus does, and start the accounting.

        Args:
            module: The model, in training mode, smooth in its inputs (see ``SmoothnessValidator``).
            optimizer: Any torch optimizer over its parameters that takes one gradient per step (LBFGS does not).
            data_loader: Draws from a data set with numbered examples; or a stream (``IterableDataset``), with ``id_of``
                and ``poisson_sampling=False``.
            noise_multiplier: σ, as in Opacus; with 0 the run trains, but every FIL is infinite.
            max_grad_norm: C > 0, as in Opacus; with ``clipping="per_layer"`` a list, C_l of every trainable parameter
                in the optimizer's order.
            criterion: The loop's loss(outputs, targets). None: it is identified at the first step, as one of the
                standard losses or as the model's own.
            batch_first: As in Opacus: False if the examples lie along the second dimension of the model's inputs, as in
                [time, batch, …]. Inputs of one dimension, outputs and targets have the examples first.
            loss_reduction: "mean" or "sum": how the loop's loss reduces over the batch.
            poisson_sampling: As in Opacus, except that with False subsampling gives no amplification: ε is that of as
                many Gaussian mechanisms of multiplier σ as the most frequent example has participations, one in each
                pass. With a stream it must be False.
            clipping: "flat", or "per_layer" as in Opacus: each parameter's gradient is clipped separately, noise is
                σ‖C‖, and the accounting differentiates exactly that (:mod:`torchfil.fisher.layerwise`), by ``vmap``.
            noise_generator: For tests: the noise's generator, as in Opacus; Poisson draws then come from the loader's
                generator, else from torch's. None: both have generators of their own; see the class.
            grad_sample_mode: "auto": the loop's ``backward()`` ends at the model's outputs. The recorded pass computes
                clipped sums and accounting if a trial shows that it reproduces plain autograd's per-example gradients,
                else ``vmap`` does. ``p.grad_sample`` stays empty. "hooks", as in Opacus, is for loops that read
                ``p.grad_sample``; "functorch" and "ew" are other names of it. "ghost" is "auto" with the interface of
                Opacus's ghost clipping: hard clip unless another is given, and the criterion is returned as well.
            wrap_model: As in Opacus; False means "hooks".
            rand_on_empty: As in Opacus.
            clip: A registered, calibrated clip function: "smooth" (within 0.1 % of Opacus's hard clipping except near
                the threshold), "gelu" (Guo et al.), "rsqrt", "hard". None: "smooth"; "hard" with ghost clipping.
            private: What is private. None: every floating-point input; if there is none, the output of the embedding
                that takes the integers.
            id_of: The examples' own ids: a function of the number in the data set, or a column of n keys. For a
                stream: the name or position of the ids in a batch, which the loop then does not see; or a function
                from a batch to its ids.
            batch_to_inputs: Maps a batch of the loader to (inputs, targets). Needed if the targets are neither the last
                item of a tuple, nor in a dict or dataclass under a name that begins with "label" or is one of targets,
                target, y, start_positions and end_positions.
            accounting: How to account; see :class:`Accounting`.
            **shortcuts: ``num_probes``, ``rel_error``, ``track``, ``questions``, ``views``, ``accumulation_steps``,
                ``clip_weights``, ``sample_rate`` and ``expected_batch_size`` of :class:`Accounting`.

        A clip threshold for each example: ``clip_weights`` gives ω_i in (0, 1], in the order of the data set, [n], or
        by id (ids that are left out have 1). The clipped gradient of example i is multiplied by ω_i, so its norm is at
        most ω_i C; noise and ε stay those of C. Fisher information, questions, individual ε and PLIS are about the
        scaled gradient, with ω held fixed and no noise added to it: if you chose the weights from the data, the bounds
        do not count what the weights themselves reveal. Keep them as confidential as the data.

        Returns:
            The private model (the hooks object with ``wrap_model=False``), a :class:`FILOptimizer` and a
            :class:`FILDataLoader`; with "ghost" or ``views`` model, optimizer, criterion and loader.
        """
        accounting = (accounting or Accounting()).with_shortcuts(shortcuts)
        ghost = grad_sample_mode == "ghost"
        module, distributed = check_ranks(without_compiler(module), data_loader, poisson_sampling, accounting)
        criterion = GhostCriterion(criterion, loss_reduction) if ghost else criterion
        module, criterion = with_views(without_compiler(module), criterion, accounting.views, loss_reduction)
        mode = check_modes(clipping, grad_sample_mode, batch_first, module, wrap_model=wrap_model)
        limit, shares = thresholds(clipping, max_grad_norm, module, optimizer)
        self._check_unused()
        options = checked_options(
            module,
            optimizer,
            data_loader,
            accounting,
            id_of,
            mode=mode,
            clip=get_clip(clip or ("hard" if ghost else DEFAULT_CLIP)),
            shares=shares,
            private=private,
            poisson_sampling=poisson_sampling,
            loss_reduction=loss_reduction,
            batch_to_inputs=batch_to_inputs,
        )
        warn_without_noise(noise_multiplier)
        self._noise_source(module, data_loader, noise_generator)  # raises if options contradict each other
        self._check_model(module, criterion)

        prepared = self._prepare_data_loader(
            data_loader, poisson_sampling=poisson_sampling, distributed=distributed, rand_on_empty=rand_on_empty
        )
        options = with_rate(options, prepared)
        options.mechanism(noise_multiplier, limit)  # raises for invalid numbers
        ids, seed = example_ids(data_loader, id_of), accounting.generator().initial_seed()
        ranks = Ranks(seed, ids.num_examples) if distributed else None
        accounted_rate, drawn, divisor = rate_and_batch_size(prepared, ids, ranks, accounting.expected_batch_size)
        wrapper = {"batch_first": batch_first, "loss_reduction": loss_reduction}
        with_hooks = partial(self._prepare_model, module, grad_sample_mode=mode, wrap_model=wrap_model, **wrapper)
        training = assemble(
            module,
            optimizer.original_optimizer if isinstance(optimizer, DPOptimizer) else optimizer,
            prepared,
            options,
            criterion,
            ids,
            accounting.generator(),
            self._accounted_rate,
            with_hooks if mode != "auto" else None,
            wrapper,
            {
                "noise_multiplier": noise_multiplier,
                "max_grad_norm": limit,
                "expected_batch_size": divisor,
                "loss_reduction": loss_reduction,
            },
            drawn,
            self._noise_source(module, data_loader, noise_generator, ranks),
            ranks,
            id_of,
        )
        self._begin(training, limit, accounted_rate, poisson_sampling=poisson_sampling)
        return training.module, training.optimizer, *([criterion] if ghost or accounting.views else []), training.loader

    def make_private_with_epsilon(
        self,
        module: nn.Module,
        optimizer: optim.Optimizer,
        data_loader: DataLoader[Any],
        *,
        target_epsilon: float,
        target_delta: float,
        epochs: int,
        epsilon_tolerance: float = 0.01,
        accounting: Accounting | None = None,
        **options: Any,
    ) -> tuple[Any, ...]:
        """:meth:`make_private` with the noise that spends (``target_epsilon``, ``target_delta``) in ``epochs``.

        ε is for zero-out adjacency, as in :meth:`make_private`. With ``poisson_sampling=False`` it counts
        participations: one in an epoch, or as many as the loader's sampler repeats an example at most.

        Args:
            module: The model.
            optimizer: The optimizer.
            data_loader: The loader.
            target_epsilon: ε at the end.
            target_delta: δ.
            epochs: Passes over the data; also used for ``Accounting.epochs`` if that is None.
            epsilon_tolerance: How far below ``target_epsilon`` the run may end.
            accounting: How to account.
            **options: Of :meth:`make_private`.
        """
        if "noise_multiplier" in options:
            raise TypeError("make_private_with_epsilon chooses noise_multiplier itself; call make_private to set it")
        accounting = accounting or Accounting()
        known_batches = is_stream(data_loader) or not options.get("poisson_sampling", True)
        rate = 1.0  # every participation counts
        if not known_batches:
            rate = options.get("sample_rate", accounting.sample_rate) or 1 / len(data_loader)
            rate *= options.get("accumulation_steps", accounting.accumulation_steps)
        noise_multiplier = get_noise_multiplier(
            target_epsilon=target_epsilon,
            target_delta=target_delta,
            sample_rate=rate,
            epochs=epochs * (most_in_a_pass(data_loader) if known_batches else 1),
            accountant=self.accountant.mechanism(),
            epsilon_tolerance=epsilon_tolerance,
        )
        if accounting.epochs is None:
            accounting = replace(accounting, epochs=epochs)
        return self.make_private(
            module, optimizer, data_loader, noise_multiplier=noise_multiplier, accounting=accounting, **options
        )

    def make_private_with_bound(
        self,
        module: nn.Module,
        optimizer: optim.Optimizer,
        data_loader: DataLoader[Any],
        *,
        epochs: int,
        target_mse_bound: float | None = None,
        target_true_positive_rate: float | None = None,
        question: str | None = None,
        at_false_positive_rate: float = 0.01,
        confidence: float = 0.95,
        of: Part = "run",
        pilot_epochs: int | None = None,
        max_pilots: int = 8,
        margin: float = 0.25,
        grid: float = 2**0.25,
        max_noise_multiplier: float = 64.0,
        train: Train | None = None,
        progress: bool = False,
        accounting: Accounting | None = None,
        **options: Any,
    ) -> tuple[Any, ...]:
        """:meth:`make_private` with the smallest noise on a grid that aims at a target for every example's leakage.

        Pilots choose σ: whole runs on copies of model and optimizer, with their own random numbers. Model, optimizer,
        loader and all generators stay as they were. ``print(engine.pilot)`` shows what was tried; after training,
        ``engine.check_bound()`` shows whether the run met the target: it is an aim, and a run that misses it warns.

        σ depends on the data and is held fixed in the bound; on the grid it is constant almost everywhere. ε counts
        only this run, so nothing from the pilots may be released. If that is not enough, choose σ on public data of the
        same kind.

        Args:
            module: The model.
            optimizer: The optimizer, with the run's learning rate.
            data_loader: The loader.
            epochs: Passes over the data; also used for ``Accounting.epochs`` if that is None.
            target_mse_bound: The smallest MSE bound that any example may end with: unbiased attackers, on average over
                runs.
            target_true_positive_rate: The largest true-positive rate that any attacker may reach on any example, for
                ``question``.
            question: Its name in ``questions=``; None: the only one.
            at_false_positive_rate: The false-positive rate for it.
            confidence: Of the end of the interval, for all examples together, that must meet the target.
            of: "run": the ends cover everything random in a run, which takes about twenty epochs or more; "probes":
                only the measurement error, for this run.
            pilot_epochs: The length of short pilots that find a starting point; σ is chosen by whole ones.
            max_pilots: The largest number of whole pilots (and of short ones).
            margin: By how much a pilot must beat the target; runs differ.
            grid: The factor between neighbouring σ.
            max_noise_multiplier: The largest σ to try.
            train: Your loop, train(engine, model, optimizer, loader), for all epochs, if pilots should not train with
                :meth:`train_step` (for example because of a learning-rate schedule). None: ``criterion`` is needed.
            progress: Whether pilots show progress bars (not those inside ``train``).
            accounting: How to account.
            **options: Of :meth:`make_private`.

        Raises:
            ValueError: The target cannot be met; the message says by how much.
        """
        if "noise_multiplier" in options:
            raise TypeError("make_private_with_bound chooses noise_multiplier itself; call make_private to set it")
        self._check_unused()
        check_sampler(data_loader, poisson_sampling=options.get("poisson_sampling", True))
        shortcuts = {name: options.pop(name) for name in SHORTCUTS if name in options}
        accounting = (accounting or Accounting()).with_shortcuts(shortcuts)
        if accounting.epochs is None:
            accounting = replace(accounting, epochs=epochs)
        target = LeakageTarget(
            target_mse_bound,
            target_true_positive_rate,
            asked_question(question, target_true_positive_rate, accounting),
            at_false_positive_rate,
            confidence,
            of,
        )
        search = NoiseSearch(margin, grid, max_pilots, max_noise_multiplier)
        copied = (module, optimizer, data_loader)
        pilots = Pilots(self._for_pilot, *copied, epochs, accounting, options, split_batch, train, progress)
        choice = choose_noise(pilots, target, search, pilot_epochs)
        made = self.make_private(
            module, optimizer, data_loader, noise_multiplier=choice.noise_multiplier, accounting=accounting, **options
        )
        self._choice = choice
        warn_when_missed(made[1], target, lambda: self.totals, every=max(1, len(data_loader) // 4))
        logger.info("noise_multiplier=%g was chosen by %d pilots", choice.noise_multiplier, len(choice.pilots))
        return made

    def _for_pilot(self, number: int) -> FILPrivacyEngine:
        """An engine for a pilot, with noise of its own."""
        seed = None if self._noise_seed is None else derived_seed(self._noise_seed, "pilot", number)
        return FILPrivacyEngine(secure_mode=self.secure_mode, noise_seed=seed)

    @property
    def pilot(self) -> NoiseChoice:
        """The noise that :meth:`make_private_with_bound` chose, and its pilots; print it."""
        if self._choice is None:
            raise RuntimeError("no noise was chosen by pilots: this run was not made by make_private_with_bound")
        return self._choice

    @property
    def bound_target(self) -> LeakageTarget:
        """The target given to :meth:`make_private_with_bound`."""
        return self.pilot.target

    def check_bound(self, target: LeakageTarget | None = None, *, merged: bool = False) -> TargetCheck:
        """Whether the run so far meets its target, with the numbers; print it.

        Args:
            target: None: the target of :meth:`make_private_with_bound`. Pass it if the run was made by
                :meth:`make_private`, for example to resume from a checkpoint.
            merged: Whether to average with the pilots that had the same σ: independent repetitions, which make errors
                smaller. They were chosen because they met the target, so their mean is a little too good. For whole
                runs only.
        """
        repetitions = self.pilot.repetitions if merged else []
        steps = {leakage.ledger.steps for leakage in (self.totals, *repetitions)}
        if len(steps) > 1:
            raise ValueError(
                f"merged=True averages whole runs: this one has taken {self.totals.ledger.steps} steps, its pilots "
                f"{max(steps)}; train to the end, or leave merged out"
            )
        return (target or self.bound_target).check(self.totals, *repetitions)

    def _noise_source(
        self,
        module: nn.Module,
        data_loader: DataLoader[Any],
        generator: torch.Generator | None,
        ranks: Ranks | None = None,
    ) -> NoiseSource:
        """Where noise and draws come from."""
        return noise_source(
            secure=self.secure_mode,
            seed=self._noise_seed,
            noise=generator,
            draws=data_loader.generator,
            device=next(module.parameters()).device,
            rank=None if ranks is None else ranks.rank,
        )

    def _check_unused(self) -> None:
        if self._made is not None:
            raise ValueError("this engine already accounts for a run; make a new FILPrivacyEngine for another one")

    def _begin(self, training: PrivateTraining, limit: float, sample_rate: float, *, poisson_sampling: bool) -> None:
        """Start counting every step in the accountant."""
        options = training.run.options
        parts = "" if options.shares is None else ", each parameter's separately"
        logger.info("gradients are clipped to %g by the clip function %r%s", limit, options.clip.name, parts)
        logger.log(*log_line(training.optimizer.noise))
        if poisson_sampling:
            training.module.forbid_grad_accumulation()
        hook = self.accountant.get_optimizer_hook_fn(sample_rate=sample_rate)
        if not poisson_sampling:
            logger.info(
                "poisson_sampling=False: subsampling gives no amplification. ε counts as many releases of σ as the "
                "most frequent example has participations, for zero-out adjacency (its gradients left out)"
            )
            hook = partial(self._account_participations, training.run)
        training.optimizer.attach_step_hook(hook)
        self._made = training

    def _account_participations(self, run: Run, optimizer: DPOptimizer) -> None:
        """Tell the accountant the number of participations of the most frequent example; batches may be known.

        Each counts as a Gaussian release (q = 1) with the smallest noise so far. For zero-out adjacency this is at
        least what the steps of any example cost, in whatever order they came.
        """
        sigmas = [sigma for sigma, *_ in self.accountant.history]
        self.accountant.history = [(min([*sigmas, optimizer.noise_multiplier]), 1.0, run.most_participations())]

    def _check_model(self, module: nn.Module, criterion: Callable[[Any, Any], Tensor] | None) -> None:
        """Raise for models and losses that mix examples."""
        if criterion is not None:
            check_unweighted_mean(criterion)
        module = without_shards(module)  # layers of the classes to look for
        check_modules(module, allow_dropout=True)
        self.validate(module=module, optimizer=None, data_loader=None)

    def _accounted_rate(self) -> float:
        """The sampling rate of the DP accountant's last step."""
        history = self.accountant.history
        return float(history[-1][1]) if history else 1.0

    def validate(
        self, *, module: nn.Module, optimizer: optim.Optimizer | None, data_loader: DataLoader[Any] | None
    ) -> None:
        """As in Opacus, except that torch's recurrent layers and attention, which its hooks do not support, may stay.

        Args:
            module: The model.
            optimizer: Not used.
            data_loader: Not used.

        Raises:
            UnsupportedModuleError: The model is not in training mode, or a module mixes examples.
        """
        in_eval_mode = "the model is in eval mode; call model.train() before make_private"
        errors = [] if module.training else [IllegalModuleConfigurationError(in_eval_mode)]
        for _, part in trainable_modules(module):
            if type(part) in ModuleValidator.VALIDATORS and not isinstance(part, nn.RNNBase | nn.MultiheadAttention):
                errors += ModuleValidator.VALIDATORS[type(part)](part)
        if errors:
            raise OpacusUnsupportedModuleError(errors)

    def _prepare_model(self, module: nn.Module, **options: Any) -> Any:
        """Opacus's hooks on the model, for layers that they have rules for."""
        super().validate(module=module, optimizer=None, data_loader=None)
        return super()._prepare_model(module, **options_known_to(super()._prepare_model, options))

    def _prepare_data_loader(
        self, data_loader: DataLoader[Any], *, poisson_sampling: bool, **options: Any
    ) -> DataLoader[Any]:
        """Opacus's loader, which draws the batches; without Poisson sampling, the user's."""
        if not poisson_sampling:
            return data_loader
        known = options_known_to(super()._prepare_data_loader, options)
        return super()._prepare_data_loader(data_loader, poisson_sampling=True, **known)

    # ------------------------------------------------------------------ state

    @cached_property
    def _checkpoints(self) -> Checkpoints:
        return Checkpoints(self._training, self.accountant)

    def gather(self) -> None:
        """See :meth:`LeakageReading.gather`; also collects the random states of all ranks, for checkpoints."""
        super().gather()
        self._checkpoints.gather()

    def state_dict(self) -> dict[str, Any]:
        """The accounting's state: DP accountant, ledger, norm history, probes; tensors and plain values only.

        It holds no state of noise or Poisson draws, unless they were seeded (``noise_seed=``, ``noise_generator=``).

        With several processes it is that of all of them, on every rank, and any number of ranks can resume from it; all
        ranks must call it, or :meth:`gather` before.
        """
        return self._checkpoints.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`, on an engine whose make_private was called with the same settings."""
        self._checkpoints.load_state_dict(state_dict)

    def save_checkpoint(
        self, *, path: str | os.PathLike[str] | IO[bytes], asynchronous: bool = False, **options: Any
    ) -> Future[None] | None:
        """As in Opacus, with the accounting, torch's random state and checksums; only a complete one replaces the last.

        Torch's random state serves dropout, shuffling and augmentation. Noise and Poisson draws are not in it, and a
        checkpoint holds nothing of them (unless they were seeded). Keep it as confidential as the data all the same:
        it has the ledger and weights that were perhaps never released.

        With several processes all ranks must call it. A file is written by rank 0 from what all have, which all then
        load (after :meth:`gather`, rank 0 may save alone). In a folder every rank writes its shards of the model, and
        rank 0 the rest, by ``torch.distributed.checkpoint``. Any number of processes can resume from either.

        Args:
            path: A file, or a folder: an existing one, or a name that ends with a slash.
            asynchronous: Whether to write into the folder while training continues, from a copy in memory.
            **options: As in Opacus: ``module``, ``optimizer``, ``checkpoint_dict`` and others.

        Returns:
            With ``asynchronous`` a future; its ``result()`` waits until the checkpoint is on the disk and raises any
            error. The next save or load waits for it, too.
        """
        return self._checkpoints.save(path, asynchronous=asynchronous, **options)

    def load_checkpoint(
        self,
        *,
        path: str | os.PathLike[str] | IO[bytes],
        module: nn.Module,
        optimizer: optim.Optimizer | None = None,
        **options: Any,
    ) -> dict[str, Any]:
        """As in Opacus, but loads tensors and plain values only (``weights_only=True``): safe on files from others.

        Weights, optimizer and accounting continue where they stopped, with new noise and new draws: two runs that
        resume from one checkpoint share neither. Only a run with ``noise_seed=`` continues bit for bit, if it stopped
        between epochs.

        Args:
            path: A file or a folder that :meth:`save_checkpoint` wrote, with any number of processes.
            module: The private model.
            optimizer: The private optimizer; None: its state is not loaded.
            **options: As in Opacus: ``noise_scheduler``, ``grad_clip_scheduler``, ``module_load_dict_kwargs`` and
                ``torch_load_kwargs``; ``restore_random_state=False`` leaves torch's own random state alone.

        Returns:
            The rest of the checkpoint, with what ``checkpoint_dict`` held.

        Raises:
            ValueError: The run was made with other data, ids, clip function, sampling or optimizer; nothing was
                changed.
            RuntimeError: The weights do not fit the module; nothing was changed.
            CheckpointError: The file is damaged or truncated; nothing was changed.
        """
        return self._checkpoints.load(path, module, optimizer, **options)

    # ------------------------------------------------------------------ control

    def train_step(self, inputs: Any, targets: Any = NO_TARGETS) -> Tensor:
        """Take a whole private step on the loader's last batch: the fast way, if torchfil may run it all.

            for x, y in loader:
                loss = engine.train_step(x, y)

        It replaces ``zero_grad``, the model, ``criterion``, ``backward`` and ``optimizer.step``, with the same
        clipping, noise and accounting. On a GPU the recorded pass is a CUDA graph. It needs ``criterion`` in
        :meth:`make_private`, or a model that computes its loss itself from labels, as Hugging Face's do:

            for batch in loader:
                loss = engine.train_step(batch)

        An example's loss is that of a batch of one: a mean over tokens is over the example's own tokens.

        Args:
            inputs: A tensor, a tuple of positional inputs or a dict of keyword inputs, [batch, …] each; moved to the
                model's device. Without ``targets``: the batch as the loader gave it.
            targets: The targets for ``criterion``.

        Returns:
            The batch's mean loss (its sum with ``loss_reduction="sum"``), NaN for an empty batch.
        """
        training = self._training
        # all passes of the step run the same kernels, and draw the same masks
        with differentiable_twice(), training.optimizer.refuse_on_all_ranks():
            return training.step.train_step(training.optimizer, inputs, targets)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, steps release gradients but are not measured: the totals become lower bounds, with a warning."""
        run = self._training.run
        if run.paused:
            raise RuntimeError("the accounting is already paused")
        warnings.warn(
            "Fisher accounting is paused: steps taken now are released but not measured, and the totals of their "
            "examples become lower bounds",
            stacklevel=3,
        )
        run.paused = True
        try:
            yield
        finally:
            run.paused = False

    def detach(self) -> None:
        """Remove all hooks: the model is a plain module again. The ledger stays; no further step is possible."""
        self._training.detach()

    def refresh_norms(self) -> None:
        """Compute every example's gradient norm at the current weights, for :meth:`get_individual_epsilon`."""
        training = self._training
        with training.replica.gathered():
            training.looks.refresh_norms(training.optimizer)
