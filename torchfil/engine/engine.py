"""``FILPrivacyEngine``: Opacus's engine, with each example's Fisher information in addition to the
DP accountant.
"""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
import torch
from opacus import PrivacyEngine
from opacus.accountants.utils import get_noise_multiplier
from opacus.optimizers import DPOptimizer
from torch import Tensor, nn, optim
from torch.utils.data import DataLoader

from torchfil.accounting.leakage import FILKind, Leakage
from torchfil.accounting.ledger import Ledger
from torchfil.accounting.persons import Persons
from torchfil.audit.bounds import Audit, audit_scores
from torchfil.bounds import PopulationBound, Prior
from torchfil.clipping import DEFAULT_CLIP, ClipFunction, get_clip
from torchfil.engine import reading as readings
from torchfil.engine.assembly import PrivateTraining
from torchfil.engine.distributed.checkpoints import Checkpoints
from torchfil.engine.distributed.ranks import check_ranks, without_shards
from torchfil.engine.forward import without_compiler
from torchfil.engine.loader import (
    KeysOf,
    check_sampler,
    is_stream,
    loader_of_owners,
    most_in_a_pass,
    owners_of,
    split_batch,
)
from torchfil.engine.losses import NO_TARGETS, GhostCriterion
from torchfil.engine.options import (
    Accounting,
    check_modes,
    refuse_unknown,
    run_options,
    take_options,
    thresholds,
    with_owners,
    with_rate,
)
from torchfil.engine.reading import Ids, check_delta
from torchfil.engine.rows import OverRows
from torchfil.engine.saving.build import Kept, as_average, build_saved_run, check_options
from torchfil.engine.watching import TimeShare, Watch, surviving
from torchfil.fisher.models import check_modules, check_unweighted_mean, with_attributes
from torchfil.fisher.results import Estimate, Part
from torchfil.guessing import Guess
from torchfil.planning import calibration
from torchfil.private import Private
from torchfil.run.file import save
from torchfil.run.saved_run import SavedRun
from torchfil.utils.errors import OfRun, UnsupportedModuleError
from torchfil.utils.given import Batch, Targets
from torchfil.utils.noise import NoiseSource, derived_seed, log_line, noise_source
from torchfil.utils.tables import as_table
from torchfil.utils.text import html_table

__all__ = ["FILPrivacyEngine"]

logger = logging.getLogger(__name__)


class FILPrivacyEngine(OfRun, PrivacyEngine):
    """Opacus's engine, which also accounts for how much the run leaks about every example.

    The training loop stays unchanged. At each step the engine adds the example's Fisher information
    (κ⊥ (J̃ᵀJ̃ − a aᵀ) + κ∥ a aᵀ) / (σC)² to its ledger; see :mod:`torchfil.fisher`.

    Guarantees:
        * The accounting differentiates exactly the gradients that are clipped and released, under
          the same dropout masks. Their norms never exceed ``max_grad_norm``, so with Poisson
          sampling ε is Opacus's.
        * ε compares the run with one in which an example's gradients are left out (zero-out
          adjacency): the number of examples n, the sampling rate q and the divisor of the noisy
          sums are the same in both, and public. The loader gives q and divisor from n; if n must
          stay hidden, set ``sample_rate`` and ``expected_batch_size``.
        * At every step the gradient at the model's output is checked against the engine's loss. A
          loop with another loss raises an error before the step is taken.
        * A refused call or step changes nothing.

    What one run says: the sum over its steps is an unbiased estimate of an upper bound on the
    model's Fisher information (Guo et al. 2022, Theorem 3). It binds unbiased attackers, on average
    over runs. Its inverse, the MSE bound, is an estimate from one run. :meth:`merge` averages
    repeated runs.

    Augmentation: the numbers are about the tensors that the model sees. Sums by coordinate are
    refused if the data set returns other values each time an example is read.

    Dropout: the attacker is assumed to know the masks, which can only overstate the leakage.

    Args:
        accountant: "rdp" (default), "prv" or "gdp", as in Opacus.
        secure_mode: Whether noise and Poisson draws come from the operating system's cryptographic
            generator, so that nobody can compute them. The numbers are made on the CPU and copied
            to the model's device. Unlike Opacus's, it takes no package, and does not sum four draws
            against attacks on the rounding of floating-point noise. False: torch's generators,
            seeded by the operating system at every start, load and fork
            (:mod:`torchfil.utils.noise`); ``torch.manual_seed`` does not reach them.
        noise_seed: For tests: seeds both, so that a run can be repeated and resumed bit for bit.
            Whoever has the seed or a checkpoint can subtract the noise: the run file says so, and
            the gate fails such a run.
    """

    def __init__(
        self, *, accountant: str = "rdp", secure_mode: bool = False, noise_seed: int | None = None
    ) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Secure RNG turned off")
            # torchcsprng, which no longer builds
            super().__init__(accountant=accountant, secure_mode=False)
        self.secure_mode, self._noise_seed = secure_mode, noise_seed
        self._made: PrivateTraining | None = None
        self._choice: calibration.NoiseChoice | None = None

    @property
    def _training(self) -> PrivateTraining:
        if self._made is None:
            raise RuntimeError("call make_private first: there is no run to account for")
        return self._made

    def make_private(
        self,
        module: nn.Module,
        optimizer: optim.Optimizer,
        data_loader: DataLoader[Any],
        *,
        noise_multiplier: float | None = None,
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
        id_of: KeysOf = None,
        batch_to_inputs: Callable[[Any], tuple[Any, Any]] | None = None,
        accounting: Accounting | None = None,
        **options: Any,
    ) -> tuple[Any, ...]:
        """Make model, optimizer and loader private, as Opacus does, and start the accounting.

        Args:
            module: The model, in training mode, smooth in its inputs (see ``SmoothnessValidator``).
            optimizer: Any torch optimizer over its parameters that takes one gradient per step
                (LBFGS does not).
            data_loader: Draws from a data set with numbered examples; or a stream
                (``IterableDataset``), with ``id_of`` and ``poisson_sampling=False``.
            noise_multiplier: σ ≥ 0, as in Opacus; with 0 the run trains, but every FIL is infinite.
                None: 1.0; the log and the run file say that nobody chose it.
            max_grad_norm: C > 0, as in Opacus; with ``clipping="per_layer"`` a list, C_l of every
                trainable parameter in the optimizer's order.
            criterion: The loop's loss(outputs, targets). None: it is identified at the first step,
                as cross-entropy, binary cross-entropy with logits, squared error, or the model's
                own.
            batch_first: As in Opacus: False if the examples lie along the second dimension of the
                model's inputs, as in [time, batch, …]. Inputs of one dimension, outputs and targets
                have the examples first.
            loss_reduction: "mean" or "sum": how the loop's loss reduces over the batch.
            poisson_sampling: As in Opacus, except that with False subsampling gives no
                amplification: ε is that of as many Gaussian mechanisms of multiplier σ as the most
                frequent example has participations, one in each pass. With a stream it must be
                False.
            clipping: "flat", or "per_layer" as in Opacus: each parameter's gradient is clipped
                separately, noise is σ‖C‖, and the accounting differentiates exactly that
                (:mod:`torchfil.fisher.operator`), by ``vmap``.
            noise_generator: For tests: the noise's generator, as in Opacus; Poisson draws then come
                from the loader's generator, else from torch's. None: both have generators of their
                own; see the class.
            grad_sample_mode: "auto": the loop's ``backward()`` ends at the model's outputs. The
                recorded pass computes clipped sums and accounting if a trial shows that it
                reproduces plain autograd's per-example gradients, else ``vmap`` does.
                ``p.grad_sample`` stays empty. "hooks", as in Opacus, is for loops that read
                ``p.grad_sample``; "functorch" and "ew" are other names of it. "ghost" is "auto"
                with the interface of Opacus's ghost clipping: hard clip unless another is given,
                and the criterion is returned as well.
            wrap_model: As in Opacus; False means "hooks".
            rand_on_empty: As in Opacus.
            clip: A registered, calibrated clip function: "smooth" (within 0.1 % of Opacus's hard
                clipping except near the threshold), "gelu" (Guo et al.), "rsqrt", "hard". None:
                "smooth"; "hard" with ghost clipping.
            private: What is private. None: every floating-point input; if there is none, the output
                of the embedding that takes the integers.
            id_of: The examples' own ids: a function of the number in the data set, or a column of n
                keys. For a stream: the name or position of the ids in a batch, which the loop then
                does not see; or a function from a batch to its ids.
            batch_to_inputs: Maps a batch of the loader to (inputs, targets). Needed if the targets
                are neither the last item of a tuple, nor in a dict or dataclass under a name that
                begins with "label" or is one of targets, target, y, start_positions and
                end_positions.
            accounting: How to account; see :class:`Accounting`.
            **options: Those of :class:`Accounting` may be given directly, too, and then replace
                those of ``accounting``.

        People with several rows: ``owner_of`` says whose each row is. An owner is then drawn with
        all of its rows (or ``rows_per_owner`` of them), its gradient is the mean over them and is
        clipped once; ε, Fisher information, questions and every reading are about owners. The loop
        sees rows, as before; its mean over a batch's rows weights owners by their rows, and the
        step weights them equally. q is one over the number of the loader's batches, so a batch has
        as many rows on average as before. How many rows an owner has counts as public.

        A clip threshold for each example: ``clip_weights`` gives ω_i in (0, 1], in the order of the
        data set, [n], or by id (ids that are left out have 1). The clipped gradient of example i is
        multiplied by ω_i, so its norm is at most ω_i C; noise and ε stay those of C. Fisher
        information, questions, individual ε and PLIS are about the scaled gradient, with ω held
        fixed and no noise added to it: if you chose the weights from the data, the bounds do not
        count what the weights themselves reveal. Keep them as confidential as the data.

        Returns:
            The private model (the hooks object with ``wrap_model=False``), a :class:`FILOptimizer`
            and a :class:`FILDataLoader`; with "ghost" or ``views`` model, optimizer, criterion and
            loader.
        """
        accounting, unknown = take_options(accounting, options, data_loader)
        refuse_unknown(unknown, self.make_private)
        if accounting.by_owner:
            accounting, id_of = with_owners(
                accounting, id_of, data_loader, poisson_sampling=poisson_sampling
            )
        sigma, ghost = (
            1.0 if noise_multiplier is None else noise_multiplier,
            grad_sample_mode == "ghost",
        )
        module, distributed = check_ranks(without_compiler(module), data_loader, poisson_sampling)
        criterion = GhostCriterion(criterion, loss_reduction) if ghost else criterion
        module = without_compiler(module)
        if accounting.views is not None:
            criterion = OverRows(criterion, loss_reduction, views=True)
        called: dict[str, Any] = {"batch_first": batch_first, "wrap_model": wrap_model}
        mode = check_modes(clipping, grad_sample_mode, module, accounting, **called)
        limit, shares = thresholds(clipping, max_grad_norm, module, optimizer)
        self._check_unused()
        fixed = run_options(
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
            default_noise=noise_multiplier is None,
        )
        owners = owners_of(data_loader, accounting.owner_of)
        if owners is not None and accounting.by_owner:
            data_loader = loader_of_owners(
                data_loader, owners, accounting.owner_of, accounting.rows_per_owner
            )
        check_unweighted_mean(criterion)
        # layers of the user's classes
        self.validate(module=without_shards(module), optimizer=None, data_loader=None)

        prepared = data_loader
        if poisson_sampling:  # Opacus's loader draws the batches
            how: dict[str, Any] = {"distributed": distributed, "rand_on_empty": rand_on_empty}
            prepared = self._prepare_data_loader(data_loader, poisson_sampling=True, **how)
        fixed = with_rate(fixed, prepared)
        fixed.mechanism(sigma, limit)  # raises for invalid numbers
        hooks = {"grad_sample_mode": mode, "loss_reduction": loss_reduction, **called}
        training = PrivateTraining(
            module,
            optimizer.original_optimizer if isinstance(optimizer, DPOptimizer) else optimizer,
            prepared,
            fixed,
            criterion,
            id_of,
            self._noise_source(module, noise_generator, data_loader.generator),
            distributed=distributed,
            accountant=self.accountant,
            owners=owners,
            with_hooks=partial(self._prepare_model, module, **hooks) if mode != "auto" else None,
            batch_first=batch_first,
            noise_multiplier=sigma,
            max_grad_norm=limit,
        )
        self._begin(training, poisson_sampling=poisson_sampling)
        return (
            training.module,
            training.optimizer,
            *([criterion] if ghost or accounting.views else []),
            training.loader,
        )

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
        """:meth:`make_private` with the noise that spends (``target_epsilon``, ``target_delta``) in
        ``epochs``.

        ε is for zero-out adjacency, as in :meth:`make_private`. With ``poisson_sampling=False`` it
        counts participations: one in an epoch, or as many as the loader's sampler repeats an
        example at most.

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
        accounting, options = take_options(accounting, options, data_loader)
        known_batches = is_stream(data_loader) or not options.get("poisson_sampling", True)
        rate = 1.0  # every participation counts
        if not known_batches:
            rate = accounting.sample_rate or 1 / len(data_loader)
            rate *= accounting.accumulation_steps
        sigma = get_noise_multiplier(
            target_epsilon=target_epsilon,
            target_delta=target_delta,
            sample_rate=rate,
            epochs=epochs * (most_in_a_pass(data_loader) if known_batches else 1),
            accountant=self.accountant.mechanism(),
            epsilon_tolerance=epsilon_tolerance,
        )
        accounting = replace(accounting, epochs=accounting.epochs or epochs)
        return self.make_private(
            module, optimizer, data_loader, noise_multiplier=sigma, accounting=accounting, **options
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
        margin: float = 0.25,
        grid: float = 2**0.25,
        max_noise_multiplier: float = 64.0,
        train: calibration.Train | None = None,
        progress: bool = False,
        accounting: Accounting | None = None,
        **options: Any,
    ) -> tuple[Any, ...]:
        """:meth:`make_private` with the smallest noise on a grid that aims at a target for every
        example's leakage.

        Pilots choose σ: whole runs on copies of model and optimizer, with their own random numbers.
        Model, optimizer, loader and all generators stay as they were. ``print(engine.pilot)`` shows
        what was tried; after training, ``engine.check_bound()`` shows whether the run met the
        target: it is an aim, and a run that misses it warns.

        σ depends on the data and is held fixed in the bound; on the grid it is constant almost
        everywhere. ε counts only this run, so nothing from the pilots may be released. If that is
        not enough, choose σ on public data of the same kind.

        Args:
            module: The model.
            optimizer: The optimizer, with the run's learning rate.
            data_loader: The loader.
            epochs: Passes over the data; also used for ``Accounting.epochs`` if that is None.
            target_mse_bound: The smallest MSE bound that any example may end with: unbiased
                attackers, on average over runs.
            target_true_positive_rate: The largest true-positive rate that any attacker may reach on
                any example, for ``question``.
            question: Its name in ``questions=``; None: the only one.
            at_false_positive_rate: The false-positive rate for it.
            confidence: Of the end of the interval, for all examples together, that must meet the
                target.
            of: "run": the ends cover everything random in a run, which takes about twenty epochs or
                more; "probes": only the measurement error, for this run.
            margin: By how much a pilot must beat the target; runs differ.
            grid: The factor between neighbouring σ.
            max_noise_multiplier: The largest σ to try.
            train: Your loop, train(engine, model, optimizer, loader), for all epochs, if pilots
                should not train with :meth:`train_step` (for example because of a learning-rate
                schedule). None: ``criterion`` is needed.
            progress: Whether pilots show progress bars (not those inside ``train``).
            accounting: How to account.
            **options: Of :meth:`make_private`.

        Raises:
            ValueError: The target cannot be met; the message says by how much.
        """
        accounting, options = take_options(accounting, options, data_loader)
        self._check_unused()
        check_sampler(data_loader, poisson_sampling=options.get("poisson_sampling", True))
        accounting = replace(accounting, epochs=accounting.epochs or epochs)
        asked = list(accounting.questions)
        if target_true_positive_rate is None:
            question = None
        else:
            question = asked[0] if question is None and len(asked) == 1 else question
            if question not in asked:
                raise ValueError(
                    f"question={question!r} must be one of questions=, which are {asked or 'none'}"
                )
        about = (target_true_positive_rate, question, at_false_positive_rate)
        target = calibration.LeakageTarget(target_mse_bound, *about, confidence, of)
        search = calibration.NoiseSearch(margin, grid, max_noise_multiplier)
        made_of = (self._for_pilot, module, optimizer, data_loader)
        pilots = calibration.Pilots(
            *made_of, epochs, accounting, options, split_batch, train, progress
        )
        choice = calibration.choose_noise(pilots, target, search)
        made = self.make_private(
            module,
            optimizer,
            data_loader,
            noise_multiplier=choice.noise_multiplier,
            accounting=accounting,
            **options,
        )

        # the run is only aimed at its target, so it says when it misses it
        self._choice = choice
        look = calibration.warn_when_missed(
            target, lambda: None if self.ledger is None else self.totals
        )
        self.call_every(max(1, len(data_loader) // 4), look)
        logger.info(
            "noise_multiplier=%g was chosen by %d pilots",
            choice.noise_multiplier,
            len(choice.pilots),
        )
        return made

    def _noise_source(
        self, module: nn.Module, noise: torch.Generator | None, draws: torch.Generator | None
    ) -> Callable[..., NoiseSource]:
        """Makes the source of noise and Poisson draws, from these generators if they are given."""
        own: dict[str, Any] = {"secure": self.secure_mode, "seed": self._noise_seed}
        return partial(
            noise_source, device=next(module.parameters()).device, noise=noise, draws=draws, **own
        )

    def _for_pilot(self, number: int) -> FILPrivacyEngine:
        """An engine for a pilot, with noise of its own."""
        seed = None if self._noise_seed is None else derived_seed(self._noise_seed, "pilot", number)
        return FILPrivacyEngine(secure_mode=self.secure_mode, noise_seed=seed)

    @property
    def pilot(self) -> calibration.NoiseChoice:
        """The noise that :meth:`make_private_with_bound` chose, and its pilots; print it."""
        if self._choice is None:
            raise RuntimeError(
                "no noise was chosen by pilots: this run was not made by make_private_with_bound"
            )
        return self._choice

    @property
    def bound_target(self) -> calibration.LeakageTarget:
        """The target given to :meth:`make_private_with_bound`."""
        return self.pilot.target

    def check_bound(
        self, target: calibration.LeakageTarget | None = None
    ) -> calibration.TargetCheck:
        """Whether the run so far meets its target, with the numbers; print it.

        Args:
            target: None: the target of :meth:`make_private_with_bound`. Pass it if the run was made
                by :meth:`make_private`, for example to resume from a checkpoint.
        """
        return (target or self.bound_target).check(self.totals)

    def _check_unused(self) -> None:
        if self._made is not None:
            raise ValueError(
                "this engine already accounts for a run; make a new FILPrivacyEngine for another"
            )

    def _begin(self, training: PrivateTraining, *, poisson_sampling: bool) -> None:
        """Start counting every step in the accountant."""
        limit, clip = training.optimizer.max_grad_norm, training.run.options.clip.name
        logger.info("gradients are clipped to %g by the clip function %r", limit, clip)
        logger.log(*log_line(training.optimizer.noise))
        if training.optimizer.noise_multiplier == 0:
            warnings.warn(
                "noise_multiplier=0: the run has no privacy; ε and every FIL are infinite",
                stacklevel=3,
            )
        owners = training.run.owners
        if owners is not None and training.run.row_ids is None and len(owners) < len(owners.of_row):
            several = (
                "unit='row': ε and readings are about single rows, and a person has up to "
                f"{owners.counts.max()}"
            )
            warnings.warn(
                f"{several}. Read by='owner' for what this means for a person, or drop unit=.",
                stacklevel=3,
            )
        if training.run.options.default_noise:
            logger.warning("noise_multiplier was not given; the run uses the default, 1.0")
        if poisson_sampling:
            training.module.forbid_grad_accumulation()
            hook = self.accountant.get_optimizer_hook_fn(sample_rate=training.sample_rate)
        else:
            logger.info(
                "poisson_sampling=False: no amplification; ε counts the most frequent example's "
                "participations"
            )
            hook = self._account_participations
        training.optimizer.attach_step_hook(hook)
        self._made = training

    def _account_participations(self, optimizer: DPOptimizer) -> None:
        """Tell the accountant the number of participations of the most frequent example.

        Batches may be known.

        Each counts as a Gaussian release (q = 1) with the smallest noise so far. For zero-out
        adjacency this is at least what the steps of any example cost, in whatever order they came.
        """
        run = self._training.run
        smallest = min(
            [*(sigma for sigma, *_ in self.accountant.history), optimizer.noise_multiplier]
        )
        # with the current step
        self.accountant.history = [(smallest, 1.0, run.ids.most_after(run.participants()))]

    def validate(
        self,
        *,
        module: nn.Module,
        optimizer: optim.Optimizer | None,
        data_loader: DataLoader[Any] | None,
    ) -> None:
        """As in Opacus, except that torch's recurrent layers and attention, which its hooks do not
        support, may stay.

        Args:
            module: The model.
            optimizer: Not used.
            data_loader: Not used.

        Raises:
            UnsupportedModuleError: The model is not in training mode, or a module mixes examples.
        """
        if not module.training:
            raise UnsupportedModuleError(
                "The model is in eval mode; call model.train() before make_private."
            )
        check_modules(module, allow_dropout=True)

    def _prepare_model(self, module: nn.Module, **options: Any) -> Any:
        """Opacus's hooks on the model, for layers that they have rules for."""
        super().validate(module=module, optimizer=None, data_loader=None)
        return super()._prepare_model(module, **options)

    # ------------------------------------------------------------------ state

    @cached_property
    def _checkpoints(self) -> Checkpoints:
        return Checkpoints(self._training, self.accountant)

    def gather(self) -> None:
        """With several processes: collect what each has recorded; **all ranks must call it**.

        Every reading does this itself if a step was taken since, and must then also be called on
        all ranks. After ``gather()`` each rank, for example rank 0 alone, can read until the next
        step. In one process it does nothing.
        """
        self._training.run.gather()
        self._checkpoints.gather()

    def state_dict(self) -> dict[str, Any]:
        """The accounting's state: DP accountant, ledger, norm history, probes.

        Tensors and plain values only.

        It holds no state of noise or Poisson draws, unless they were seeded (``noise_seed=``,
        ``noise_generator=``).

        With several processes it is that of all of them, on every rank, and any number of ranks can
        resume from it; all ranks must call it, or :meth:`gather` before.
        """
        return self._checkpoints.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`, on an engine whose make_private was called with the
        same settings.
        """
        self._checkpoints.load_state_dict(state_dict)

    def save_checkpoint(self, *, path: str | os.PathLike[str] | IO[bytes], **options: Any) -> None:
        """As in Opacus, with the accounting, torch's random state and checksums.

        Only a complete one replaces the last.

        Torch's random state serves dropout, shuffling and augmentation. Noise and Poisson draws are
        not in it, and a checkpoint holds nothing of them (unless they were seeded). Keep it as
        confidential as the data all the same: it has the ledger and weights that were perhaps never
        released.

        With several processes all ranks must call it. A file is written by rank 0 from what all
        have, which all then load (after :meth:`gather`, rank 0 may save alone). In a folder every
        rank writes its shards of the model, and rank 0 the rest. Any number of processes can resume
        from either.

        Args:
            path: A file, or a folder: an existing one, or a name that ends with a slash.
            **options: As in Opacus: ``module``, ``optimizer``, ``checkpoint_dict`` and others.
        """
        self._checkpoints.save(path, **options)

    def load_checkpoint(
        self, *, path: str | os.PathLike[str] | IO[bytes], module: nn.Module, **options: Any
    ) -> dict[str, Any]:
        """As in Opacus, but loads tensors and plain values only (``weights_only=True``): safe on
        files from others.

        Weights, optimizer and accounting continue where they stopped, with new noise and new draws:
        two runs that resume from one checkpoint share neither. Only a run with ``noise_seed=``
        continues bit for bit, if it stopped between epochs.

        Args:
            path: A file or a folder that :meth:`save_checkpoint` wrote, with any number of
                processes.
            module: The private model.
            **options: As in Opacus: ``optimizer`` (the private one; its state is loaded only if it
                is given), ``noise_scheduler``, ``grad_clip_scheduler``, ``module_load_dict_kwargs``
                and ``torch_load_kwargs``; ``restore_random_state=False`` leaves torch's own random
                state alone.

        Returns:
            The rest of the checkpoint, with what ``checkpoint_dict`` held; its tensors are on the
            CPU.

        Raises:
            ValueError: The run was made with other data, ids, clip function, sampling or optimizer;
                nothing was changed.
            RuntimeError: The weights do not fit the module; nothing was changed.
            CheckpointError: The file is damaged or truncated, or holds what no run saves; nothing
                was changed.
        """
        return self._checkpoints.load(path, module, **options)

    # ------------------------------------------------------------------ control

    def train_step(self, inputs: Batch, targets: Targets = NO_TARGETS) -> Tensor:
        """Take a whole private step on the loader's last batch: the fast way, if torchfil may run
        it all.

            for x, y in loader:
                loss = engine.train_step(x, y)

        It replaces ``zero_grad``, the model, ``criterion``, ``backward`` and ``optimizer.step``,
        with the same clipping, noise and accounting. On a GPU the recorded pass is a CUDA graph. It
        needs ``criterion`` in :meth:`make_private`, or a model that computes its loss itself from
        labels, as Hugging Face's do:

            for batch in loader:
                loss = engine.train_step(batch)

        An example's loss is that of a batch of one: a mean over tokens is over the example's own
        tokens.

        Args:
            inputs: A tensor, a tuple of positional inputs or a dict of keyword inputs, [batch, …]
                each; moved to the model's device. Without ``targets``: the batch as the loader gave
                it.
            targets: The targets for ``criterion``.

        Returns:
            The batch's mean loss (its sum with ``loss_reduction="sum"``), NaN for an empty batch.
        """
        return self._training.step.train_step(self._training.optimizer, inputs, targets)

    def call_every(
        self, steps: int, function: Callable[[int], Any], *, share: float = 1.0
    ) -> Callable[[], None]:
        """Call a function with the number of private steps so far, whenever that is a multiple of
        ``steps``.

        It is called after the step is booked and the weights are updated, on all ranks, so it may
        read or save the run. An error in it ends the loop, with the step taken: raise one to stop
        early.

        Args:
            steps: How many.
            function: What to call.
            share: The largest share of the time that it may take: calls that would exceed it are
                left out, on all ranks alike. The first is always made. 1: all are made.

        Returns:
            A function that stops the calls.
        """
        if not steps >= 1:
            raise ValueError(f"steps={steps} must be at least 1")
        watchers, pace = (
            self._training.optimizer.watchers,
            TimeShare(share, self._training.run.ranks),
        )

        def watcher(taken: int) -> None:
            if taken % steps == 0:
                pace.call(partial(function, taken))

        watchers.append(watcher)
        return lambda: watchers.remove(watcher) if watcher in watchers else None

    def save_every(
        self,
        path: Path | str,
        *,
        steps: int = 50,
        delta: float | None = None,
        share: float = 1.0,
        **options: Any,
    ) -> Callable[[], None]:
        """:meth:`save_run` while the run trains, whenever the number of private steps is a multiple
        of ``steps``.

        Every file is complete and replaces the last one; ``torchfil watch run.parquet`` shows it.
        Weights, noise, draws and sums are the same with and without. What depends on the data set
        alone (its checksum, the blind guess) is read at the first save only: write the file that
        you keep with :meth:`save_run`. With several processes all ranks must call it, and rank 0
        writes.

        Whatever keeps a file from being written (a full disk, a folder that may not be written,
        data that cannot be read), the earlier file stays, training continues, and the next turn
        tries again. Each new cause is a warning.

        Args:
            path: The file.
            steps: After how many private steps.
            delta: δ, as in :meth:`save_run`.
            share: The largest share of the time that saving may take, such as 0.02; see
                :meth:`call_every`.
            **options: Of :meth:`save_run`.

        Returns:
            A function that ends it.
        """
        check_delta(delta, "save_every")
        check_options(options)
        kept = Kept()

        def write(_: int) -> None:
            run = self._saved_run("save_every", delta, kept=kept, **options)
            if run is not None:
                save(run, path)

        return self.call_every(steps, surviving("no run file was written", write), share=share)

    def watch(self, *, delta: float | None = None, every: int = 50, **options: Any) -> Watch:
        """Show the run while it trains: the first screens of its report, on a page that only this
        machine can open.

            with engine.watch(delta=1e-5):  # prints the address
                train()

        In a notebook, let the result be a cell's last expression: the page is shown there, and
        renewed. The notebook's file keeps it: clear the outputs before you share it.

        The numbers grow with every step, and the verdict is about the run as it is now. They are as
        **confidential** as the data. The page is drawn when somebody looks at it, in at most 2 % of
        the time.

        Args:
            delta: δ of ε; it has no default.
            every: After how many private steps the numbers may change.
            **options: Those that follow here, and those of :meth:`save_run`.
            policy: Thresholds (:func:`torchfil.gate.policy.load_policy`); None: the default ones.
            path: The run file; None: one in a private temporary folder, which ``stop()`` removes.
            port: The port; 0: a free one.
            share: The largest share of the time that saving may take; 0.02.

        Returns:
            An object with ``url`` and ``stop()``, and a context manager.
        """
        return Watch(self, steps=every, delta=delta, **options)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, steps release gradients but are not measured: the totals become lower bounds,
        with a warning.
        """
        run = self._training.run
        warnings.warn(
            "Fisher accounting is paused: totals become lower bounds of what is released",
            stacklevel=3,
        )
        with with_attributes(run, paused=True):
            yield

    def detach(self) -> None:
        """Remove all hooks: the model is a plain module again. The ledger stays.

        No further step is possible.
        """
        self._training.detach()

    def refresh_norms(self) -> None:
        """Compute every example's gradient norm for :meth:`get_individual_epsilon`, at the current
        weights.

        Dropout is off, as it is for :meth:`plis`.
        """
        training = self._training
        with training.replica.gathered():
            training.passes.refresh_norms(training.optimizer)

    # ------------------------------------------------------------------ reading

    @property
    def totals(self) -> Leakage:
        """The run's results so far: traces, bounds, attributes, tables."""
        return self._training.run.leakage

    @property
    def plan(self) -> str:
        """How steps are measured from now on, and how well the most exposed 5 % are known so far.

        By default probes and the share of measured steps are planned (:class:`Accounting`).
        """
        return str(self._training.run.pace)

    @property
    def ledger(self) -> Ledger | None:
        """The sums by example so far; None before the first private step."""
        return self._training.run.whole_ledger

    @property
    def accounting(self) -> Accounting:
        """How the run is accounted for."""
        return self._training.run.options.accounting

    @property
    def clip_weights(self) -> Tensor | None:
        """ω of every example in the order of the data set, float64 [n]; None: none were given."""
        weights = self._training.run.clip_weights
        return None if weights is None else weights.clone()

    def metrics(self, *, delta: float | None = None, prefix: str = "privacy/") -> dict[str, float]:
        """The run so far in a few floats, for a log: ``writer.add_scalar`` of each, or
        ``wandb.log(engine.metrics())``.

        ``median_fil`` and ``largest_fil`` (η̄ over the examples that were measured),
        ``smallest_mse_bound`` (of all of them: unbiased attackers, on average over runs; an
        estimate from one), ``largest_divergence/NAME`` (D of each question, the worst example and
        answer: every attacker; an estimate), ``steps``, ``measured_share``, and with δ ``epsilon``
        (everybody, a guarantee). Numbers that are not known yet are left out; before the first step
        that is all of them.

        Except for ε they depend on private data: the log is as **confidential** as the data.

        It costs a few operations on [n] numbers, about 0.1 s for 100,000 examples on one core; with
        δ also Opacus's ε, up to half a second for "rdp" and more for "prv": call it once per epoch
        rather than every step. With several processes all ranks must call it.

        Args:
            delta: δ for ε; None: without ε.
            prefix: Prepended to every name.
        """
        if self.ledger is None:
            return {}
        numbers = self.totals.summary().metrics()
        if delta is not None:
            check_delta(delta)
            numbers["epsilon"] = float(self.get_epsilon(delta))
        return {f"{prefix}{name}": value for name, value in numbers.items()}

    def __repr__(self) -> str:
        lines = readings.summary(self._made, self.accountant.mechanism())
        return "\n".join([type(self).__name__, *(f"  {title}: {text}" for title, text in lines)])

    def _repr_html_(self) -> str:
        lines = readings.summary(self._made, self.accountant.mechanism())
        return html_table(f"{type(self).__name__} (confidential)", lines)

    def _persons(self, by: str | None) -> Persons | None:
        """Owners in a run by row.

        None: the run's own examples. It needs no step, so a wrong ``by`` fails early.
        """
        run = self._training.run
        if by in (None, "owner" if run.options.accounting.by_owner else "row"):
            return None
        if by != "owner" or run.persons is None:
            raise ValueError(
                f"by={by!r} must be 'owner', which needs owner_of=, numbered rows and a single "
                "process"
            )
        return run.persons

    def _by(self, by: str | None) -> Leakage:
        """What is read by example, or by owner in a run by row."""
        persons = self._persons(by)
        return self.totals if persons is None else persons

    def get_epsilon(self, delta: float, *, by: str | None = None) -> float:
        """The accountant's ε at δ, a guarantee for every example; never below 0.

        Args:
            delta: δ.
            by: "owner", in a run with ``unit="row"``: ε of the owner with the most rows, k, who is
                in the data with all of them or absent; a guarantee for every owner. A step is a
                mixture of Gaussians with sensitivities 0, C, …, kC and binomial weights; its Rényi
                divergences in both directions are composed.
        """
        persons, history = None if by is None else self._persons(by), self.accountant.history
        if persons is None or not history:
            return readings.spent_epsilon(self.accountant, delta)
        check_delta(delta)
        return float(
            readings.epsilon_over_time(
                history, [torch.inf], delta, int(persons.owners.counts.max())
            )[0]
        )

    def get_fil(
        self, example_ids: Ids = None, *, kind: FILKind = "trace", by: str | None = None
    ) -> Estimate:
        """Fisher information loss per example: η̄ = sqrt(tr(I)/d), or η = sqrt(‖I‖₂).

        See :meth:`Leakage.get_fil`.

        Args:
            example_ids: None: all. An id given twice appears twice.
            kind: "trace" for η̄, "spectral" for η.
            by: "row", in a run whose unit is the owner: η̄ of single rows, over their own
                coordinates, without what rows share; ids are those of ``id_of``, or the rows'
                numbers. It needs ``track=("diagonal",)``. "owner", in a run with ``unit="row"``: an
                estimate of an upper bound of owners' η̄, with its error. The Fisher information
                about all private coordinates of an owner's rows is at most the sum of the rows',
                which one run estimates. Quote the upper end of its interval.
        """
        if by == "row" and self._training.run.row_ids is not None:
            return readings.fil_of_rows(self._training, self.totals, example_ids)
        return self._by(by).get_fil(example_ids, kind=kind)

    def was_measured(self, example_ids: Ids = None) -> Tensor:
        """Whether the run measured an example, bool [ids]: only then does a FIL of 0 mean no
        leakage.
        """
        return self.totals.was_measured(example_ids)

    def get_mse_bound(self, example_ids: Ids = None) -> Estimate:
        """1/η̄²: an unbiased attacker's MSE per coordinate is at least this on average.

        An estimate from one run.
        """
        return self.totals.get_mse_bound(example_ids)

    def get_smallest_mse_bound(
        self, confidence: float = 0.95, of: Part = "run"
    ) -> tuple[float, float]:
        """The smallest bound, and an end for all examples together.

        See :meth:`Leakage.get_smallest_mse_bound`.
        """
        return self.totals.get_smallest_mse_bound(confidence, of)

    def get_attribute_fil(self, example_ids: Ids = None, *, by: str | None = None) -> Estimate:
        """sqrt(I_jj) per private coordinate.

        Needs ``track=("diagonal",)``. Quote 1 / its upper end.

        With ``by="owner"``, in a run with ``unit="row"``, it estimates an upper bound for an
        attribute that has the same value in all rows of an owner: the sum of the rows' sqrt(I_jj).
        """
        return self._by(by).get_attribute_fil(example_ids)

    def get_guess(self, question: str, example_ids: Ids = None, *, by: str | None = None) -> Guess:
        """How well **any** attacker can answer a question of ``questions=`` about an example.

        See :class:`Guess`.

        Args:
            question: Its name.
            example_ids: None: all. An id given twice appears twice.
            by: "owner", in a run with ``unit="row"``, for ``Absent()``: the alternative is that all
                rows of the owner are absent. It estimates an upper bound of D from one run:
                gradients count as if they had one direction, and between a row's participations
                with their last norm. Other questions are refused, because no bound of D for a
                change in all rows is proved.
        """
        return self._by(by).get_guess(question, example_ids)

    def get_plis(self, example_ids: Ids = None) -> Tensor:
        """The PLIS summed over the run, [ids, d]; needs ``track=("plis",)``."""
        return self.totals.get_plis(example_ids)

    def plis(self, example_ids: Ids = None, *, private: bool = True) -> Any:
        """Which coordinates drive these examples' privacy loss at the current weights.

        See :class:`torchfil.PLIS`.

        Args:
            example_ids: None: all of the data set.
            private: Whether to use the clipped norm and the run's noise; otherwise the plain
                gradient signal ‖g‖².

        Returns:
            A tensor [ids, …] in the shape of the private input; for several a dict by position or
            name.
        """
        training = self._training
        rows = training.run.ids.rows(example_ids)[1].tolist()
        with training.replica.gathered():
            maps = training.passes.plis(rows, training.optimizer, private=private)
        return next(iter(maps.values())) if len(maps) == 1 else maps

    def audit(self, *, delta: float, confidence: float = 0.95) -> Audit:
        """What the run's canaries show about ε: a lower bound beside the claimed one; print it.

        It needs ``make_private(…, canaries=torchfil.Canaries(1000))``. The bound holds with
        ``confidence`` over who takes part, batches and noise; see :mod:`torchfil.audit.bounds`. A
        low bound is no evidence of privacy. A bound above the claimed ε means that accounting or
        training are wrong (:attr:`Audit.exceeds_claim`).

        Args:
            delta: δ of both.
            confidence: Of the lower bound.
        """
        check_delta(delta, "audit")
        found, canaries = self._checkpoints.canaries(), self.accounting.canaries
        if found is None or canaries is None:
            raise RuntimeError(
                "the run has no canaries: pass canaries=torchfil.Canaries(1000) to make_private"
            )
        scores, taken, divergences = (
            found[name].numpy() for name in ("scores", "taken", "divergences")
        )
        about: dict[str, Any] = {
            "kind": canaries.kind,
            "divergences": divergences,
            "confidence": confidence,
        }
        claimed, releases = float(self.get_epsilon(delta)), self.accountant.history
        return audit_scores(scores, taken, delta=delta, releases=releases, claimed=claimed, **about)

    def get_individual_epsilon(self, example_ids: Ids = None, *, delta: float) -> Estimate:
        """Each example's own ε at δ, from its own clipped norms; never above :meth:`get_epsilon`.

        It is output-specific (Yu et al. 2022): the norms belong to this run, and depend on what it
        released. It is an estimate and no guarantee; a guarantee needs a filter that stops an
        example when its budget is spent (Feldman & Zrnic 2021; Koskela et al. 2023). Between
        participations the last known norm is used; if there is none yet, ``max_grad_norm`` (times
        the example's weight of ``clip_weights``). ``Accounting(norm_refresh=…)`` computes all norms
        every so many steps. Without Poisson sampling only the example's own steps count, each with
        its own norm. The adjacency is that of ε: zero-out, with n, q and the divisor public. The
        error is not a sampling error and is given as NaN.
        """
        return readings.epsilons(self._training.run, self.accountant, example_ids, delta)

    def get_reconstruction_robustness(
        self, example_ids: Ids = None, *, prior_success: float | Sequence[float] = 0.01
    ) -> Estimate:
        """The largest success rate of any attacker, biased or not, who guesses the example, from
        its own clipped norms.

        Output-specific, like :meth:`get_individual_epsilon`: the norms belong to this one run, so
        it is an estimate (its error is given as NaN) and no guarantee; ``norm_refresh`` is
        recommended. The guarantee for everybody is :func:`torchfil.bounds.rero`, and no example is
        above it. A few milliseconds per example.

        Args:
            example_ids: None: all.
            prior_success: π₀ in (0, 1): how often the guess succeeds without the model; several
                give a curve.

        Returns:
            [ids], or [ids, priors]; batches and noise are random.
        """
        return readings.robustness(
            self._training, self.accountant.history, example_ids, prior_success
        )

    def get_population_mse_bound(
        self, prior: Prior | tuple[Any, Any] | None = None
    ) -> PopulationBound:
        """The MSE that **no** attacker gets below, biased or not, on average over people (van
        Trees); print it.

        It is about the population, not about an example. People, batches and noise are random. The
        mean trace over this run's examples estimates the population's: examples count as
        independent draws from it, and one run represents all (for several:
        :func:`torchfil.bounds.population_mse_bound` with ``merge(…).get_trace()``).

        Args:
            prior: How people's values are distributed **given everything that is public**: a
                :class:`torchfil.bounds.Prior`; a pair (low, high) of numbers or [d], for the
                smoothest density between them; None: a normal law, fitted to the run's own examples
                within each label and beyond what known columns explain. The last two are
                assumptions that claim too much for any other law. Discrete values are refused: ask
                :mod:`torchfil.questions` about them.

        Returns:
            The bound (an estimate with the error of the mean over examples), and the prior's
            variance, which is the MSE of the best guess without the model.
        """
        return readings.population_bound(self._training, prior)

    def get_rdp_mse_bound(
        self,
        diameters: float | Sequence[float] | Tensor = 1.0,
        *,
        reading: Literal["replace-one", "paper"] = "replace-one",
    ) -> float:
        """Theorem 1 of Guo et al. 2022: one MSE bound for all, from the run's Rényi divergence.

        Unbiased attackers.

        Args:
            diameters: The range of each private coordinate; one number for all.
            reading: "replace-one" converts the accountant's add/remove RDP rigorously
                (:func:`replace_one_rdp`); "paper" uses ε_RDP(2) directly.
        """
        return readings.rdp_bound(
            self.accountant.history, self.totals.num_coordinates, diameters, reading
        )

    def leakage(self, example_ids: Ids = None, *, delta: float | None = None) -> Any:
        """One table by id (a pandas table if pandas is installed); see :meth:`Leakage.leakage`.

        With δ also ``individual_epsilon``; with clip weights also ``clip_weight``. ``to_polars()``
        and ``to_arrow()`` of the table have the ids as the first column.
        """
        return as_table(*self._columns(example_ids, delta))

    def leakage_columns(
        self, example_ids: Ids = None, *, delta: float | None = None
    ) -> tuple[list[Hashable], dict[str, list[Any]]]:
        """The ids and columns of :meth:`leakage`, as lists."""
        names, columns = self._columns(example_ids, delta)
        return list(names), {name: values.tolist() for name, values in columns.items()}

    def _columns(
        self, example_ids: Ids, delta: float | None
    ) -> tuple[Sequence[Hashable], dict[str, np.ndarray]]:
        """The ids and columns of :meth:`leakage`, [ids] each."""
        names, columns = self.totals.columns(example_ids)
        asked = None if example_ids is None else names
        if delta is not None:
            columns["individual_epsilon"] = (
                self.get_individual_epsilon(asked, delta=delta).value.cpu().numpy()
            )
        if self.clip_weights is not None:
            columns["clip_weight"] = self.clip_weights.cpu().numpy()[
                self._training.run.ids.places(asked)
            ]
        return names, columns

    def group_leakage(self, group_of: Mapping[Hashable, Hashable], **options: Any) -> Any:
        """Summaries of η̄ by group; see :meth:`Leakage.groups`."""
        return self.totals.groups(group_of, **options)

    @classmethod
    def merge(cls, engines: Sequence[FILPrivacyEngine]) -> Leakage:
        """The average over repeated runs on the same data, with the run-to-run standard error, for
        reading.
        """
        return readings.average(
            [(engine._training, engine.accountant.history) for engine in engines]
        )

    # ------------------------------------------------------------------ run files and reports

    def save_run(
        self, path: str | os.PathLike[str], *, delta: float | None = None, **options: Any
    ) -> Path:
        """Write what is known about the run into one file, for ``torchfil report``, ``gate`` and
        ``inspect``.

        The file is safe to load, holds neither model nor data (except texts and the tracked
        attributes of some examples), replaces an older one only when complete, and is readable by
        its owner only. Its content is **confidential**. The run can continue afterwards. With
        several processes rank 0 writes it, and the others return the path at once.

        Args:
            path: The file; ``run.parquet`` by convention, a Parquet file (docs/run-file.md lists
                its columns). Missing folders are made.
            delta: δ for ε and for the examples' own ε; it has no default.
            **options: Those that follow here.
            title: The report's title; None: the model's name and the number of examples.
            attribute_names: One per private coordinate, in order; needs ``track=("diagonal",)``. In
                runs by owner, one per coordinate of a row: what differs between an owner's rows is
                saved as "BMI, any visit".
            attribute_units: One per private coordinate, e.g. "years".
            attribute_scales: {attribute: (unit, scale) or (unit, scale, offset)} of attributes that
                were scaled for training: the attribute is scale · input + offset in that unit.
                ``{"age": ("years", 14.2, 51.0)}`` reports errors in years instead of standard
                deviations.
            attribute_groups: {attribute: its levels' names}: combines the columns of a one-hot
                attribute; its error is that of a guess of all levels.
            unit_of_inputs: The unit of all coordinates, e.g. "grey value, 0 to 1".
            input_range: The lowest and the highest possible value of every private coordinate,
                known without looking at the data; the report then compares with a blind guess and
                with the bound from ε.
            groups: {grouping: one label per example, in the order of the data set, or a dict by
                id}.
            records: Whether to keep the tracked attributes of the ten most exposed examples and of
                three typical ones (up to 64 attributes, and no pixels): the report says what is
                unusual about them.
            texts: Every example's words, in the order of the data set, one for each position of the
                private embedding; or a tokenizer with ``decode``, or a function from a list with
                one token id to its string. The report shows the 20 most exposed examples, each
                token with its FIL and PLIS; needs ``track=("diagonal",)``. They are private data.
            attacks: Results of attacks on the run (measure "mse"); each is compared with the run's
                bounds, unless it comes from :func:`torchfil.compare_with_bounds`.
            hash_data: Whether to read the whole data set for its checksum. The spread of the data,
                which gives the error of a blind guess, is read from up to 65,536 examples; without
                ``hash_data`` from up to 2,048.
            equalised: The result of :func:`torchfil.equalise` with this ``engine``: the report then
                shows what each round did, and how groups compared before.
            metrics: What the model is good for, by name: a number, or a number and what it was
                measured on, as in ``{"accuracy": (0.93, "360 held out")}``. The report shows this
                utility beside the leakage, and prices its options in it. The public page leaves it
                out, because nobody has judged what it discloses.
        """
        run = self._saved_run("save_run", delta, **options)
        return Path(path) if run is None else save(run, path)

    def report(
        self,
        directory: str | os.PathLike[str],
        *,
        delta: float | None = None,
        redacted: bool = False,
        **options: Any,
    ) -> Path:
        """Write the run's report into a folder and return the path of its page.

        With several processes, as rank 0.

        Args:
            directory: The folder.
            delta: δ for ε and for the examples' own ε.
            redacted: Whether to leave out everything about single examples; see
                :func:`torchfil.report.write_report`.
            **options: Options of :meth:`save_run`; ``min_group`` and ``policy`` of
                ``write_report``.
        """
        from torchfil.report.page import PAGE, write_report

        writing = {name: options.pop(name) for name in ("min_group", "policy") if name in options}
        run = self._saved_run("report", delta, **options)
        return (
            Path(directory) / PAGE
            if run is None
            else write_report(run, directory, redacted=redacted, **writing)
        )

    @classmethod
    def save_merged(
        cls,
        engines: Sequence[FILPrivacyEngine],
        path: str | os.PathLike[str],
        *,
        delta: float,
        **options: Any,
    ) -> Path:
        """Save the average over repeated runs (:meth:`merge`) as one run.

        The report says how many there were.

        The numbers are about one release, on average over runs, with errors from the spread between
        runs. ε is that of one run; the file also has the ε of all runs together, in case you
        release more than one.

        Args:
            engines: At least two repetitions with the same settings on the same data.
            path: The file.
            delta: δ of ε.
            **options: Options of :meth:`save_run`; records come from the first run.
        """
        if not len(engines) >= 2:
            raise ValueError(
                f"save_merged got {len(engines)} engines; use save_run for a single run"
            )
        first, trainings = engines[0], [engine._training for engine in engines]
        run = first._saved_run("save_merged", delta, cls.merge(engines), **options)
        return (
            Path(path)
            if run is None
            else save(as_average(run, trainings, first.accountant, delta), path)
        )

    def _saved_run(
        self, called: str, delta: Any, leakage: Leakage | None = None, **options: Any
    ) -> SavedRun | None:
        """The run as it is saved; None if another process writes it (collective).

        Args:
            called: The method that needs it.
            delta: δ; None is refused.
            leakage: The average over several runs; None: this run's results.
            **options: Of :meth:`save_run`.
        """
        check_delta(delta, called)
        leakage, training = leakage or self.totals, self._training
        audit = None if self.accounting.canaries is None else self.audit(delta=delta).as_dict()
        with training.replica.gathered():  # texts are shown with their PLIS
            if training.run.ranks is not None and training.run.ranks.rank > 0:
                return None
            made_of = (training, self.accountant, self._choice, leakage)
            return build_saved_run(*made_of, delta=delta, audit=audit, **options)
