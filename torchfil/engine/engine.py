"""``FILPrivacyEngine``: Opacus's engine, with each example's Fisher information beside the DP accountant."""

from __future__ import annotations

import contextlib
import copy
import os
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, Literal

import torch
from opacus import PrivacyEngine
from opacus.accountants.analysis.rdp import compute_rdp
from opacus.accountants.utils import get_noise_multiplier
from opacus.grad_sample import AbstractGradSampleModule
from torch import Tensor, nn, optim
from torch.utils.data import DataLoader

from torchfil.accounting.leakage import Leakage, as_table
from torchfil.accounting.ledger import Track
from torchfil.bounds import mse_from_rdp, replace_one_rdp
from torchfil.clipping import DEFAULT_CLIP, ClipFunction, get_clip
from torchfil.engine.checkpoint import random_state, set_random_state
from torchfil.engine.epsilon import individual_epsilon
from torchfil.engine.loader import FILDataLoader, refuse_sampler
from torchfil.engine.one_pass import OnePassModule, OnePassOptimizer
from torchfil.engine.optimizer import FILOptimizer
from torchfil.engine.options import BatchToInputs, Settings, choose_amplification, refuse_modes, usual_memory
from torchfil.engine.run import Run
from torchfil.engine.saving import Labels, build_saved_run
from torchfil.fisher.amplification import Amplification
from torchfil.fisher.gradients import refuse_weighted_mean
from torchfil.fisher.mechanism import Mechanism
from torchfil.fisher.results import Estimate
from torchfil.private import Private
from torchfil.report.saved_run import AttackResult, save
from torchfil.utils.files import replaced_when_complete

__all__ = ["FILPrivacyEngine"]

_STATE_KEY = "fil_engine_state_dict"
_RANDOM_KEY = "random_state"


class FILPrivacyEngine(PrivacyEngine):
    """Opacus's engine that also accounts, for every example, how much the run leaks about it.

    The training loop stays as it is. At each step the engine adds the example's Fisher information
    (κ⊥ (J̃ᵀJ̃ − a aᵀ) + κ∥ a aᵀ) / (σC)² to its ledger; see :mod:`torchfil.fisher`.

    Guarantees:
        * The gradients that are clipped and released are exactly those that the accounting differentiates, and their
          norms never exceed ``max_grad_norm``: ε is Opacus's, unchanged.
        * At every step the gradient at the model's output is checked against the engine's loss; a loop with another
          loss raises before the step is taken.
        * A refused call or step changes nothing.

    What one run says: the sum over the realised steps is an unbiased estimate of an upper bound on the model's Fisher
    information (Guo et al. 2022, Theorem 3); :meth:`merge` averages repeated runs.

    Dropout: the attacker is taken to know the masks, which can only overstate the leakage; the accounting draws masks
    afresh at each step, so the sum is unbiased for that upper bound over masks.

    Args:
        accountant: "rdp" (default), "prv" or "gdp", as in Opacus.
        secure_mode: As in Opacus.
    """

    def __init__(self, *, accountant: str = "rdp", secure_mode: bool = False) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Secure RNG turned off")
            super().__init__(accountant=accountant, secure_mode=secure_mode)
        self._run: Run | None = None
        self._preparing: Run | None = None

    def make_private(
        self,
        module: nn.Module,
        optimizer: optim.Optimizer,
        data_loader: DataLoader[Any],
        *,
        noise_multiplier: float = 1.0,
        max_grad_norm: float = 1.0,
        criterion: Callable[[Any, Any], Tensor] | None = None,
        batch_first: bool = True,
        loss_reduction: str = "mean",
        poisson_sampling: bool = True,
        clipping: str = "flat",
        noise_generator: torch.Generator | None = None,
        grad_sample_mode: str = "hooks",
        wrap_model: bool = True,
        rand_on_empty: bool = False,
        clip: str | ClipFunction = DEFAULT_CLIP,
        private: Private | None = None,
        amplification: str | Amplification | None = None,
        theorem4_delta: float = 1e-9,
        estimator: str = "weight-probes",
        num_probes: int | None = None,
        fil_rate: float = 1.0,
        rel_error: float | None = None,
        epochs: float | None = None,
        track: Collection[Track] = (),
        sketch_rank: int = 4,
        id_of: Callable[[int], Hashable] | Sequence[Hashable] | None = None,
        batch_to_inputs: BatchToInputs | None = None,
        norm_refresh: int | None = None,
        seed: int | None = None,
        max_memory: int | None = None,
        max_ledger_memory: int = 2**32,
        cuda_graphs: bool = True,
        compile: bool = False,
    ) -> tuple[Any, FILOptimizer, FILDataLoader]:
        """Make model, optimizer and loader private, as Opacus does, and start the accounting.

        Args:
            module: The model, in training mode, smooth in its inputs (see ``SmoothnessValidator``).
            optimizer: Any torch optimizer over its parameters.
            data_loader: Draws from a data set with numbered examples.
            noise_multiplier: σ > 0, as in Opacus.
            max_grad_norm: C > 0, as in Opacus.
            criterion: The loop's loss(outputs, targets); None: identified at the first step among the standard losses.
            batch_first: Must be True.
            loss_reduction: "mean" or "sum": what the loop's loss does over the batch.
            poisson_sampling: As in Opacus.
            clipping: Must be "flat".
            noise_generator: As in Opacus.
            grad_sample_mode: "hooks", "functorch" or "ew" as in Opacus; "one-pass": no per-example gradients are formed
                by hooks (``p.grad_sample`` stays empty), the loop's ``backward()`` ends at the model's outputs, and one
                pass of the engine gives the clipped sum and the accounting, at about the price of ``train_step``.
            wrap_model: As in Opacus.
            rand_on_empty: As in Opacus.
            clip: A registered, calibrated clip function: "smooth", "gelu", "rsqrt", "hard".
            private: What is private; None: every floating-point input.
            amplification: "poisson" (exact; the default with Poisson sampling), "none" (the default without),
                "theorem4", a registered one, or an object (:class:`torchfil.fisher.amplification.Amplification`).
            theorem4_delta: δ of a step for "theorem4".
            estimator: "weight-probes", "input-probes", "coordinates" or "exact".
            num_probes: Probes per step and example; None: 3. One suffices for long runs, with conservative errors.
            fil_rate: The probability with which a step is measured (and then weighted by its inverse), in (0, 1].
            rel_error: The relative standard error of its FIL that the median example is to have at the end (that of
                tr I and of the MSE bound is twice as large): probes and skipped steps are chosen as the run goes, at
                the lowest cost.
            epochs: With ``rel_error``, the planned number of passes over the data; None: at least eight more are
                expected at any time, so a shorter run ends above the target.
            track: What to keep beside the trace: "diagonal" for attributes, "fim" or "sketch" for the spectral norm,
                "plis" for the privacy loss's derivative.
            sketch_rank: Columns of the sketch.
            id_of: The examples' own ids: a function of the number in the data set, or a column of n keys.
            batch_to_inputs: Maps a batch of the loader to (inputs, targets); needed where the targets are not the last
                item of a tuple, or one of labels, label, targets, target, y in a dict.
            norm_refresh: Every so many steps, look up every example's gradient norm for ``get_individual_epsilon``.
            seed: Of the probes; None: taken from torch's seed without drawing from its stream.
            max_memory: Of the accounting's temporary tensors, in bytes; see :mod:`torchfil.fisher.fim`. None: 1 GiB, or
                a quarter of what is free on the model's GPU now, if that is more.
            max_ledger_memory: The largest ledger, in bytes, that is made without asking.
            cuda_graphs: Whether recorded passes are captured in CUDA graphs on a GPU.
            compile: Whether those that are used often are compiled first (``torch.compile``), on a GPU: the run waits
                half a minute or more for each, and steps with many probes take half as long afterwards, or less, equal
                within rounding. Probes are then worked at together, as many as ``max_memory`` holds.

        Returns:
            The private model (the hooks object with ``wrap_model=False``), optimizer and loader.
        """
        if self._run is not None:
            raise ValueError("this engine accounts for a run already; make a new FILPrivacyEngine for another one")
        if isinstance(module, AbstractGradSampleModule) or hasattr(module, "autograd_grad_sample_hooks"):
            raise ValueError(
                "the model is private already (make_private was called on it); pass the plain module, or its _module"
            )
        _refuse_untrained_parameters(module, optimizer)
        refuse_modes(clipping, grad_sample_mode, batch_first, module, wrap_model=wrap_model)
        refuse_sampler(data_loader, poisson_sampling=poisson_sampling)
        clip = get_clip(clip)
        Mechanism.build(max_grad_norm, noise_multiplier, clip)
        settings = Settings(
            clip=clip,
            private=private,
            amplification=choose_amplification(amplification, poisson_sampling, theorem4_delta),
            estimator=estimator,
            num_probes=num_probes,
            fil_rate=fil_rate,
            rel_error=rel_error,
            epochs=epochs,
            track=tuple(track),
            sketch_rank=sketch_rank,
            loss_reduction=loss_reduction,
            batch_to_inputs=batch_to_inputs,
            norm_refresh=norm_refresh,
            max_memory=usual_memory(next(module.parameters()).device) if max_memory is None else max_memory,
            max_ledger_memory=max_ledger_memory,
            cuda_graphs=cuda_graphs,
            compile=compile,
            one_pass=grad_sample_mode == "one-pass",
        )
        count = len(data_loader.dataset)  # type: ignore[arg-type]
        keys = [id_of(i) for i in range(count)] if callable(id_of) else id_of
        generator = torch.Generator().manual_seed(torch.initial_seed() % 2**63 if seed is None else seed)
        if criterion is not None:
            refuse_weighted_mean(criterion)
        run = Run(module, settings, criterion, count, keys, generator)
        run.accountant_history = lambda: self.accountant.history  # type: ignore[method-assign]
        self._preparing = run
        try:
            private_module, private_optimizer, loader = super().make_private(
                module=module,
                optimizer=optimizer,
                data_loader=data_loader,
                noise_multiplier=noise_multiplier,
                max_grad_norm=max_grad_norm,
                batch_first=batch_first,
                loss_reduction=loss_reduction,
                poisson_sampling=poisson_sampling,
                clipping=clipping,
                noise_generator=noise_generator,
                grad_sample_mode=grad_sample_mode,
                wrap_model=wrap_model,
                rand_on_empty=rand_on_empty,
            )
        finally:
            self._preparing = None
        run.connect(private_module, private_optimizer, loader)
        self._run, self._loader, self._hooks = run, loader, private_module
        return private_module, private_optimizer, loader

    def make_private_with_epsilon(
        self,
        module: nn.Module,
        optimizer: optim.Optimizer,
        data_loader: DataLoader[Any],
        *,
        target_epsilon: float,
        target_delta: float,
        epochs: int,
        **options: Any,
    ) -> tuple[Any, FILOptimizer, FILDataLoader]:
        """:meth:`make_private` with the noise that spends (``target_epsilon``, ``target_delta``) in so many epochs."""
        if "noise_multiplier" in options:
            raise TypeError("make_private_with_epsilon chooses noise_multiplier itself; call make_private to set it")
        noise_multiplier = get_noise_multiplier(
            target_epsilon=target_epsilon,
            target_delta=target_delta,
            sample_rate=1 / len(data_loader),
            epochs=epochs,
            accountant=self.accountant.mechanism(),
        )
        options.setdefault("epochs", epochs)
        return self.make_private(module, optimizer, data_loader, noise_multiplier=noise_multiplier, **options)

    def _prepare_model(self, module: nn.Module, **settings: Any) -> Any:
        run = self._preparing
        if run is None or not run.settings.one_pass:
            return super()._prepare_model(module, **settings)
        self.validate(module=module, optimizer=None, data_loader=None)
        return OnePassModule(module, batch_first=settings["batch_first"], loss_reduction=settings["loss_reduction"])

    def _prepare_optimizer(self, **settings: Any) -> FILOptimizer:
        run = self._preparing
        assert run is not None
        generator = self.secure_rng if self.secure_mode else settings["noise_generator"]
        kind = OnePassOptimizer if run.settings.one_pass else FILOptimizer
        return kind(
            settings["optimizer"],
            clip=run.settings.clip,
            noise_multiplier=settings["noise_multiplier"],
            max_grad_norm=settings["max_grad_norm"],
            expected_batch_size=settings["expected_batch_size"],
            loss_reduction=settings["loss_reduction"],
            generator=generator,
            secure_mode=self.secure_mode,
        )

    def _prepare_data_loader(self, data_loader: DataLoader[Any], **settings: Any) -> FILDataLoader:
        run = self._preparing
        assert run is not None
        prepared = super()._prepare_data_loader(data_loader, **settings)
        dataset = data_loader.dataset
        return FILDataLoader(prepared, run.tracker, lambda: run.begin_pass(len(dataset)))  # type: ignore[arg-type]

    # ------------------------------------------------------------------ reading

    @property
    def _current(self) -> Run:
        if self._run is None:
            raise RuntimeError("call make_private first: there is no run to account for")
        return self._run

    def get_fil(
        self,
        example_ids: Iterable[Hashable] | Tensor | None = None,
        *,
        kind: Literal["trace", "spectral"] = "trace",
    ) -> Estimate:
        """Fisher information loss per example: η̄ = sqrt(tr(I)/d), or η = sqrt(‖I‖₂); see :meth:`Leakage.get_fil`."""
        return self._current.leakage.get_fil(example_ids, kind=kind)

    def was_measured(self, example_ids: Iterable[Hashable] | Tensor | None = None) -> Tensor:
        """Whether the run says anything about an example, bool [ids]: its FIL of 0 means no leakage only then."""
        return self._current.leakage.was_measured(example_ids)

    def get_mse_bound(self, example_ids: Iterable[Hashable] | Tensor | None = None) -> Estimate:
        """1/η̄², the MSE per coordinate that no unbiased attacker can get below."""
        return self._current.leakage.get_mse_bound(example_ids)

    def get_attribute_fil(self, example_ids: Iterable[Hashable] | Tensor | None = None) -> Estimate:
        """sqrt(I_jj) per private coordinate; needs ``track=("diagonal",)``."""
        return self._current.leakage.get_attribute_fil(example_ids)

    def get_plis(self, example_ids: Iterable[Hashable] | Tensor | None = None) -> Tensor:
        """The PLIS summed over the run, [ids, d]; needs ``track=("plis",)``."""
        return self._current.leakage.get_plis(example_ids)

    def plis(self, example_ids: Iterable[Hashable] | Tensor | None = None, *, private: bool = True) -> Any:
        """Which coordinates drive these examples' privacy loss at the present weights; see :class:`torchfil.PLIS`.

        Args:
            example_ids: None: all of the data set.
            private: Whether to take the clipped norm and the run's noise; otherwise the plain gradient signal ‖g‖².

        Returns:
            A tensor [ids, …] in the shape of the private input; for several a dict by position or name.
        """
        run = self._current
        maps = run.plis(run.ids.rows(example_ids)[1].tolist(), private=private)
        return next(iter(maps.values())) if len(maps) == 1 else maps

    def get_individual_epsilon(
        self, example_ids: Iterable[Hashable] | Tensor | None = None, *, delta: float
    ) -> Estimate:
        """Each example's own ε at δ, from its own clipped norms; never above :meth:`get_epsilon`.

        An estimate: between participations the last seen norm stands in, ``max_grad_norm`` where none was seen;
        ``norm_refresh`` looks the norms up more often. Its error is not a sampling error and is given as NaN.
        """
        run = self._current
        _check_delta(delta)
        _, rows = run.ids.rows(example_ids)
        value = individual_epsilon(run.history, rows.to(run.history.ratio.device), delta)
        if run.history.steps:
            value = value.clamp(max=float(self.get_epsilon(delta)))
        return Estimate(value, torch.full_like(value, float("nan")), "estimate")

    def get_rdp_mse_bound(
        self,
        diameters: float | Sequence[float] | Tensor = 1.0,
        *,
        reading: Literal["replace-one", "paper"] = "replace-one",
    ) -> float:
        """Theorem 1 of Guo et al. 2022: one MSE bound for all, from the run's Rényi divergence of order 2.

        Args:
            diameters: The range of each private coordinate; one number for all.
            reading: "replace-one" converts the accountant's add/remove RDP rigorously (:func:`replace_one_rdp`);
                "paper" takes ε_RDP(2) as it is.
        """
        if reading not in ("replace-one", "paper"):
            raise ValueError(f"reading={reading!r} must be 'replace-one' or 'paper'")
        leakage = self._current.leakage

        def rdp(order: float) -> float:
            return sum(
                float(compute_rdp(q=q, noise_multiplier=sigma, steps=steps, orders=order))
                for sigma, q, steps in self.accountant.history
            )

        epsilon = replace_one_rdp(rdp) if reading == "replace-one" else rdp(2.0)
        ranges = torch.as_tensor(diameters, dtype=torch.float64)
        return mse_from_rdp(epsilon, ranges.expand(leakage.num_coordinates))

    def leakage(self, example_ids: Iterable[Hashable] | Tensor | None = None, *, delta: float | None = None) -> Any:
        """One table by id (pandas where installed); see :meth:`Leakage.leakage`. With δ also ``individual_epsilon``."""
        return as_table(*self.leakage_columns(example_ids, delta=delta))

    def leakage_columns(
        self, example_ids: Iterable[Hashable] | Tensor | None = None, *, delta: float | None = None
    ) -> tuple[list[Hashable], dict[str, list[Any]]]:
        """The ids and columns of :meth:`leakage`."""
        names, columns = self._current.leakage.columns(example_ids)
        if delta is not None:
            columns["individual_epsilon"] = self.get_individual_epsilon(names, delta=delta).value.tolist()
        return names, columns

    def group_leakage(self, group_of: Mapping[Hashable, Hashable], **options: Any) -> Any:
        """Summaries of η̄ by group; see :meth:`Leakage.groups`."""
        return self._current.leakage.groups(group_of, **options)

    @classmethod
    def merge(cls, engines: Sequence[FILPrivacyEngine]) -> Leakage:
        """The average over repeated runs on the same data, with the run-to-run standard error, for reading."""
        if not engines:
            raise ValueError("merge needs at least one engine")
        if len(set(map(id, engines))) < len(engines):
            raise ValueError("merge was given one engine twice: a run agrees with itself, whatever its error")
        average = Leakage.average([engine._current.leakage for engine in engines])
        told = sorted({engine._mechanism() for engine in engines})
        if len(told) > 1:
            raise ValueError(
                "runs to average must share noise, clipping, subsampling, the number of steps and what is private; got "
                + "; ".join(text if len(text) < 500 else f"{text[:500]} …" for text in told)
            )
        return average

    def _mechanism(self) -> str:
        """What must be the same in repetitions of a run, in words."""
        run = self._current
        steps: Counter[tuple[float, float]] = Counter()
        for sigma, q, count in self.accountant.history:
            steps[float(sigma), float(q)] += count
        noise = ", ".join(f"{count} steps of σ = {sigma}, q = {q}" for (sigma, q), count in sorted(steps.items()))
        private = run.settings.private or Private()
        private = replace(private, coordinates=_listed(private.coordinates))
        clipping = f"C = {float(run.optimizer.max_grad_norm)}, clip {run.settings.clip.name!r}"
        mechanism = run.measurer.mechanism(run.optimizer)
        rho, q, sigma = torch.tensor([0.1, 1.0, 10.0]), mechanism.sample_rate, mechanism.noise_multiplier
        factors = ", ".join(f"{value:.6g}" for value in torch.cat(mechanism.amplification.factors(rho, q, sigma)))
        return f"{noise}, {clipping}, amplification by {factors}, {private}"

    def save_run(
        self,
        path: str | os.PathLike[str],
        *,
        delta: float,
        title: str | None = None,
        attribute_names: Sequence[str] | None = None,
        attribute_units: Sequence[str] | None = None,
        unit_of_inputs: str = "",
        input_range: tuple[float, float] | None = None,
        groups: Mapping[str, Labels] | None = None,
        pictures: int = 8,
        attacks: Sequence[AttackResult] = (),
        hash_data: bool = True,
    ) -> Path:
        """Write what is known about the run into one file, for ``torchfil report``, ``gate`` and ``inspect``.

        The file is safe to load, holds neither model nor data (but for the pictures), is replaced only when complete
        and readable by its owner only; its content is **confidential**. The run can go on afterwards, unchanged.

        Args:
            path: The file; its suffix is .fil by custom.
            delta: δ of ε and of the examples' own ε.
            title: Of the report; None: the model's name and the number of examples.
            attribute_names: One per private coordinate, in order; needs ``track=("diagonal",)``.
            attribute_units: One per private coordinate, e.g. "years".
            unit_of_inputs: Of all coordinates together, e.g. "grey value, 0 to 1".
            input_range: Between which values every private coordinate lies, known without looking at the data; gives
                the report a blind guess and the bound from ε to compare with.
            groups: {grouping: one label per example, in the order of the data set, or a dict by id}.
            pictures: How many of the most and of the least exposed examples to keep as pictures, with their PLIS, where
                inputs are images of 1 or 3 channels; 0: none.
            attacks: Results of attacks on the run.
            hash_data: Whether to read through the data set for its checksum.
        """
        run = build_saved_run(
            self,
            delta=delta,
            title=title,
            attribute_names=attribute_names,
            attribute_units=attribute_units,
            unit_of_inputs=unit_of_inputs,
            input_range=input_range,
            groups=groups,
            pictures=pictures,
            attacks=attacks,
            hash_data=hash_data,
        )
        return save(run, path)

    def report(
        self, directory: str | os.PathLike[str], *, delta: float, redacted: bool = False, **options: Any
    ) -> Path:
        """Write the run's report into a folder and return the path of its page.

        Args:
            directory: The folder.
            delta: δ of ε and of the examples' own ε.
            redacted: Whether to leave out what speaks of single examples; see :func:`torchfil.report.write_report`.
            **options: Of :meth:`save_run`; ``min_group`` of ``write_report``.
        """
        from torchfil.report.writer import write_report

        writing = {name: options.pop(name) for name in ("min_group",) if name in options}
        return write_report(build_saved_run(self, delta=delta, **options), directory, redacted=redacted, **writing)

    # ------------------------------------------------------------------ control

    def train_step(self, inputs: Any, targets: Any) -> Tensor:
        """A whole private step on the batch that the loader gave last: the fast way, for loops that can give it away.

            for x, y in loader:
                loss = engine.train_step(x, y)

        It does what ``zero_grad``, the model, ``criterion``, ``backward`` and ``optimizer.step`` do together, with the
        same clipping, noise and accounting, from one recorded pass without per-example gradients; on a GPU that pass
        is a CUDA graph. Needs ``criterion`` in :meth:`make_private`. Where one pass does not fit the model, or the
        settings ask for another estimator or a sketch, the step is taken as in a loop.

        Args:
            inputs: A tensor, a tuple of positional inputs or a dict of keyword inputs, [batch, …] each; moved to the
                model's device.
            targets: What ``criterion`` compares with.

        Returns:
            The batch's mean loss (its sum with ``loss_reduction="sum"``), NaN for an empty batch.
        """
        return self._current.train_step(inputs, targets)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, steps release gradients but are not measured: the totals become lower bounds, loudly."""
        run = self._current
        if run.paused:
            raise RuntimeError("the accounting is paused already")
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
        """Take all hooks off the model: it is a plain module again. The ledger stays, no further step can be taken."""
        self._current.detached = True
        self._current.observer.remove()
        self._hooks.remove_hooks()

    def refresh_norms(self) -> None:
        """Look up every example's gradient norm at the present weights, for :meth:`get_individual_epsilon`."""
        run = self._current
        run.refresh_norms(run.dataset, run.collate_fn)

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """The accounting's state: DP accountant, ledger, norm history, generators; tensors and plain values only."""
        run = self._current
        generators = {"loader": self._loader.generator, "noise": run.optimizer.generator}
        return {
            "accountant": dict(self.accountant.state_dict()),
            "run": run.state_dict(),
            "generators": {k: g.get_state() for k, g in generators.items() if g is not None},
            "noise": {name: float(getattr(run.optimizer, name)) for name in ("noise_multiplier", "max_grad_norm")},
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`, on an engine whose make_private was called with the same settings."""
        run = self._current
        missing = [key for key in ("accountant", "run", "generators") if key not in state_dict]
        if missing:
            raise ValueError(f"the state lacks {missing}; was it saved by FILPrivacyEngine.state_dict?")
        saved = state_dict["accountant"].get("mechanism")
        if saved != self.accountant.mechanism():
            raise ValueError(f"the state is of accountant {saved!r}, this engine's is {self.accountant.mechanism()!r}")
        if run.inside_logical_batch:
            raise RuntimeError(
                "a state can be loaded only between logical batches; finish the batch first, or call "
                "optimizer.discard_partial_batch()"
            )
        try:
            with _all_or_nothing((self.state_dict, self._set_state)):
                self._set_state(state_dict)
        except KeyError as error:
            raise ValueError(f"the state lacks {error.args[0]!r}; was it saved by another version?") from error

    def _set_state(self, state_dict: Mapping[str, Any]) -> None:
        run = self._current
        run.load_state_dict(state_dict["run"])
        self.accountant.load_state_dict(copy.deepcopy(state_dict["accountant"]))
        generators = {"loader": self._loader.generator, "noise": run.optimizer.generator}
        for key, generator in generators.items():
            if generator is not None and key in state_dict["generators"]:
                generator.set_state(state_dict["generators"][key].cpu())

    def save_checkpoint(self, *, path: str | os.PathLike[str] | IO[bytes], **options: Any) -> None:
        """As in Opacus, with the accounting and torch's random state; a file is replaced only when complete."""
        extra = dict(options.pop("checkpoint_dict", None) or {})
        extra[_STATE_KEY] = self.state_dict()
        extra[_RANDOM_KEY] = random_state()
        if not isinstance(path, (str, os.PathLike)):
            super().save_checkpoint(path=path, checkpoint_dict=extra, **options)
            return
        with replaced_when_complete(path) as temporary:
            super().save_checkpoint(path=temporary, checkpoint_dict=extra, **options)

    def load_checkpoint(
        self,
        *,
        path: str | os.PathLike[str] | IO[bytes],
        module: nn.Module,
        optimizer: optim.Optimizer | None = None,
        noise_scheduler: Any = None,
        grad_clip_scheduler: Any = None,
        module_load_dict_kwargs: dict[str, Any] | None = None,
        torch_load_kwargs: dict[str, Any] | None = None,
        restore_random_state: bool = True,
    ) -> dict[str, Any]:
        """As in Opacus, but loads tensors and plain values only (``weights_only=True``): safe on files from others.

        A run that is stopped between epochs and resumed so goes on bit for bit as if it had not been stopped;
        ``restore_random_state=False`` leaves torch's global random state alone.
        """
        checkpoint: dict[str, Any] = torch.load(path, weights_only=True, **(torch_load_kwargs or {}))
        if _STATE_KEY not in checkpoint:
            raise ValueError(f"{path} holds no Fisher accounting; it was not saved by FILPrivacyEngine.save_checkpoint")
        kwargs = module_load_dict_kwargs or {}
        _refuse_other_module(module, checkpoint["module_state_dict"], strict=kwargs.get("strict", True))
        accounting = checkpoint.pop(_STATE_KEY)
        parts = {
            "optimizer_state_dict": optimizer,
            "noise_scheduler_state_dict": noise_scheduler,
            "grad_clip_scheduler_state_dict": grad_clip_scheduler,
        }
        loaded = [(part.state_dict, part.load_state_dict) for part in (module, *parts.values()) if part is not None]
        with _all_or_nothing(*loaded, (random_state, set_random_state)):
            module.load_state_dict(checkpoint["module_state_dict"], **kwargs)
            for key, part in parts.items():
                state = checkpoint.pop(key, None)
                if part is not None and state:
                    part.load_state_dict(state)
            saved = checkpoint.pop(_RANDOM_KEY, None)
            if restore_random_state and saved is not None:
                set_random_state(saved)
            self.load_state_dict(accounting)
        for name, scheduler in (("noise_multiplier", noise_scheduler), ("max_grad_norm", grad_clip_scheduler)):
            if scheduler is not None and name in accounting.get("noise", {}):  # a scheduler goes on from where it was
                setattr(self._current.optimizer, name, accounting["noise"][name])
        return checkpoint


@contextlib.contextmanager
def _all_or_nothing(*parts: tuple[Callable[[], Any], Callable[[Any], Any]]) -> Iterator[None]:
    """What changes inside is taken back where an error comes up; a part is how to read its state, and how to set it."""
    before = [(set_state, copy.deepcopy(read())) for read, set_state in parts]
    try:
        yield
    except BaseException:
        for set_state, state in before:
            set_state(state)
        raise


def _refuse_other_module(module: nn.Module, state: Mapping[str, Any], *, strict: bool) -> None:
    """Raise unless the weights are those of such a module; nothing is loaded before."""
    own = module.state_dict()
    renames = any(part._load_state_dict_pre_hooks for part in module.modules())
    apart = sorted(own.keys() ^ state.keys()) if strict and not renames else []
    shapes = [
        f"{name} {list(value.shape)} instead of {list(own[name].shape)}"
        for name, value in state.items()
        if isinstance(value, Tensor) and isinstance(own.get(name), Tensor) and own[name].shape != value.shape
    ]
    if apart or shapes:
        found = "; ".join([*(f"only one of both has {name}" for name in apart[:5]), *shapes[:5]])
        raise ValueError(f"the checkpoint is of another model ({found}); build the same one. Nothing was loaded.")


def _refuse_untrained_parameters(module: nn.Module, optimizer: optim.Optimizer) -> None:
    """Raise where the optimizer leaves out trainable parameters: their gradients would count in norms, unreleased."""
    given = {id(p) for group in optimizer.param_groups for p in group["params"]}
    left = [name for name, p in module.named_parameters() if p.requires_grad and id(p) not in given]
    if left:
        raise ValueError(
            f"the optimizer does not hold {len(left)} trainable parameters ({', '.join(left[:5])}"
            f"{', …' if len(left) > 5 else ''}): freeze what is not trained (requires_grad_(False)), or give it to the "
            "optimizer"
        )


def _check_delta(delta: float) -> None:
    if not 0 < delta < 1:
        raise ValueError(f"delta={delta} must lie strictly between 0 and 1")


def _listed(coordinates: Any) -> Any:
    """Tensors and arrays as lists, whose text is complete."""
    if isinstance(coordinates, Mapping):
        return {key: _listed(value) for key, value in coordinates.items()}
    listed = coordinates.tolist() if hasattr(coordinates, "tolist") else coordinates
    return list(listed) if isinstance(listed, tuple | range) else listed
