"""Reading a run: every example's leakage, bounds, tables, averages over runs."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from opacus import PrivacyEngine
from opacus.accountants.analysis.rdp import compute_rdp
from torch import Tensor

from torchfil.accounting.leakage import Leakage, as_table
from torchfil.accounting.ledger import Ledger
from torchfil.bounds import PopulationBound, Prior, mse_from_rdp, population_mse_bound, replace_one_rdp
from torchfil.engine.assembly import PrivateTraining
from torchfil.engine.epsilon import (
    everybodys_robustness,
    individual_epsilon,
    individual_robustness,
    robustness_with_known_batches,
)
from torchfil.engine.metrics import engine_lines, engine_table, engine_text
from torchfil.engine.options import Accounting
from torchfil.engine.saving.data_spread import fitted_prior
from torchfil.engine.saving.merged import mechanism_in_words
from torchfil.fisher.results import Estimate, Part
from torchfil.guessing import Guess
from torchfil.planning.calibration import NoiseChoice

__all__ = ["LeakageReading"]


class LeakageReading(PrivacyEngine):
    """The part of the engine that reads: FIL, bounds, attributes, groups, individual ε."""

    _made: PrivateTraining | None
    _choice: NoiseChoice | None = None

    @property
    def _training(self) -> PrivateTraining:
        if self._made is None:
            raise RuntimeError("call make_private first: there is no run to account for")
        return self._made

    @property
    def totals(self) -> Leakage:
        """The run's results so far: traces, bounds, attributes, tables."""
        return self._training.run.leakage

    @property
    def ledger(self) -> Ledger | None:
        """The sums by example so far; None before the first private step."""
        return self._training.run.whole_ledger[0]

    def gather(self) -> None:
        """With several processes: collect what each has recorded; **all ranks must call it**.

        Every reading does this itself if a step was taken since, and must then also be called on all ranks. After
        ``gather()`` each rank, for example rank 0 alone, can read until the next step. In one process it does nothing.
        """
        self._training.run.gather()

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
        """The run so far in a few floats, for a log: ``writer.add_scalar`` of each, or ``wandb.log(engine.metrics())``.

        ``median_fil`` and ``largest_fil`` (η̄ over the examples that were measured), ``smallest_mse_bound`` (of all of
        them: unbiased attackers, on average over runs; an estimate from one), ``largest_divergence/NAME`` (D of each
        question, the worst example and answer: every attacker; an estimate), ``steps``, ``measured_share``, and with δ
        ``epsilon`` (everybody, a guarantee). Numbers that are not known yet are left out; before the first step that is
        all of them.

        Except for ε they depend on private data: the log is as **confidential** as the data.

        It costs a few operations on [n] numbers, about 0.1 s for 100,000 examples on one core; with δ also Opacus's ε,
        up to half a second for "rdp" and more for "prv": call it once per epoch rather than every step. With several
        processes all ranks must call it.

        Args:
            delta: δ for ε; None: without ε.
            prefix: Prepended to every name.
        """
        if self.ledger is None:
            return {}
        numbers = self.totals.summary().metrics()
        if delta is not None:
            _check_delta(delta)
            numbers["epsilon"] = float(self.get_epsilon(delta))
        return {f"{prefix}{name}": value for name, value in numbers.items()}

    def __repr__(self) -> str:
        return engine_text(type(self).__name__, self._lines())

    def _repr_html_(self) -> str:
        return engine_table(type(self).__name__, self._lines())

    def _lines(self) -> list[tuple[str, str]]:
        made = self._made
        optimizer, ranks = (None, None) if made is None else (made.optimizer, made.run.ranks)
        return engine_lines(self.accountant.mechanism(), optimizer, ranks, lambda: self.totals)

    def get_fil(
        self,
        example_ids: Iterable[Hashable] | Tensor | None = None,
        *,
        kind: Literal["trace", "spectral"] = "trace",
    ) -> Estimate:
        """Fisher information loss per example: η̄ = sqrt(tr(I)/d), or η = sqrt(‖I‖₂); see :meth:`Leakage.get_fil`."""
        return self.totals.get_fil(example_ids, kind=kind)

    def was_measured(self, example_ids: Iterable[Hashable] | Tensor | None = None) -> Tensor:
        """Whether the run measured an example, bool [ids]: only then does a FIL of 0 mean no leakage."""
        return self.totals.was_measured(example_ids)

    def get_mse_bound(self, example_ids: Iterable[Hashable] | Tensor | None = None) -> Estimate:
        """1/η̄²: an unbiased attacker's MSE per coordinate is at least this on average; an estimate from one run."""
        return self.totals.get_mse_bound(example_ids)

    def get_smallest_mse_bound(self, confidence: float = 0.95, of: Part = "run") -> tuple[float, float]:
        """The smallest bound, and an end for all examples together; see :meth:`Leakage.get_smallest_mse_bound`."""
        return self.totals.get_smallest_mse_bound(confidence, of)

    def get_attribute_fil(self, example_ids: Iterable[Hashable] | Tensor | None = None) -> Estimate:
        """sqrt(I_jj) per private coordinate; needs ``track=("diagonal",)``. Quote 1 / its upper end."""
        return self.totals.get_attribute_fil(example_ids)

    def get_guess(self, question: str, example_ids: Iterable[Hashable] | Tensor | None = None) -> Guess:
        """How well **any** attacker can answer a question of ``questions=`` about an example; see :class:`Guess`."""
        return self.totals.get_guess(question, example_ids)

    def get_plis(self, example_ids: Iterable[Hashable] | Tensor | None = None) -> Tensor:
        """The PLIS summed over the run, [ids, d]; needs ``track=("plis",)``."""
        return self.totals.get_plis(example_ids)

    def plis(self, example_ids: Iterable[Hashable] | Tensor | None = None, *, private: bool = True) -> Any:
        """Which coordinates drive these examples' privacy loss at the current weights; see :class:`torchfil.PLIS`.

        Args:
            example_ids: None: all of the data set.
            private: Whether to use the clipped norm and the run's noise; otherwise the plain gradient signal ‖g‖².

        Returns:
            A tensor [ids, …] in the shape of the private input; for several a dict by position or name.
        """
        training = self._training
        rows = training.run.ids.rows(example_ids)[1].tolist()
        with training.replica.gathered():
            maps = training.looks.plis(rows, training.optimizer, private=private)
        return next(iter(maps.values())) if len(maps) == 1 else maps

    def get_individual_epsilon(
        self, example_ids: Iterable[Hashable] | Tensor | None = None, *, delta: float
    ) -> Estimate:
        """Each example's own ε at δ, from its own clipped norms; never above :meth:`get_epsilon`.

        It is output-specific (Yu et al. 2022): the norms belong to this run, and depend on what it released. It is an
        estimate and no guarantee; a guarantee needs a filter that stops an example when its budget is spent (Feldman &
        Zrnic 2021; Koskela et al. 2023). Between participations the last known norm is used; if there is none yet,
        ``max_grad_norm`` (times the example's weight of ``clip_weights``). ``Accounting(norm_refresh=…)`` computes all
        norms every so many steps. Without Poisson sampling only the example's own steps count, each with its own norm.
        The adjacency is that of ε: zero-out, with n, q and the divisor public. The error is not a sampling error and is
        given as NaN.
        """
        run = self._training.run
        _check_delta(delta)
        rows = run.ids.places(example_ids)
        history = run.whole_history
        value = individual_epsilon(history, rows.to(history.device), delta)
        if history.steps:
            value = value.clamp(max=float(self.get_epsilon(delta)))
        return Estimate(value, torch.full_like(value, float("nan")), "estimate")

    def get_reconstruction_robustness(
        self,
        example_ids: Iterable[Hashable] | Tensor | None = None,
        *,
        prior_success: float | Sequence[float] = 0.01,
    ) -> Estimate:
        """The largest success rate of any attacker, biased or not, who guesses the example, from its own clipped norms.

        Output-specific, like :meth:`get_individual_epsilon`: the norms belong to this one run, so it is an estimate
        (its error is given as NaN) and no guarantee; ``norm_refresh`` is recommended. The guarantee for everybody is
        :func:`torchfil.bounds.rero`, and no example is above it. A few milliseconds per example.

        Args:
            example_ids: None: all.
            prior_success: π₀ in (0, 1): how often the guess succeeds without the model; several give a curve.

        Returns:
            [ids], or [ids, priors]; batches and noise are random.
        """
        run, optimizer = self._training.run, self._training.optimizer
        prior = torch.as_tensor(prior_success, dtype=torch.float64)
        priors = prior.reshape(-1).tolist()
        rows = run.ids.rows(example_ids)[1]
        releases = list(self.accountant.history)
        ledger, history = self.ledger, run.whole_history
        if run.options.sample_rate is None and ledger is not None:  # known batches: only the example's own steps
            noise = min((sigma for sigma, *_ in releases), default=1.0) * float(optimizer.max_grad_norm)
            norms = ledger.sums["squared_norm"][rows.to(ledger.device)]
            value = robustness_with_known_batches(norms, noise, priors)
        else:
            value = individual_robustness(history, rows.to(history.device), priors)
            value = value.minimum(everybodys_robustness(releases, priors, tolerance=0.02).high)
        value = value.reshape(len(rows), *prior.shape)
        return Estimate(value, torch.full_like(value, float("nan")), "estimate")

    def get_population_mse_bound(self, prior: Prior | tuple[Any, Any] | None = None) -> PopulationBound:
        """The MSE that **no** attacker gets below, biased or not, on average over people (van Trees); print it.

        It is about the population, not about an example. People, batches and noise are random. The mean trace over this
        run's examples estimates the population's: examples count as independent draws from it, and one run represents
        all (for several: :func:`torchfil.bounds.population_mse_bound` with ``merge(…).get_trace()``).

        Args:
            prior: How people's values are distributed **given everything that is public**: a
                :class:`torchfil.bounds.Prior`; a pair (low, high) of numbers or [d], for the smoothest density between
                them; None: a normal law, fitted to the run's own examples within each label and beyond what known
                columns explain. The last two are assumptions that claim too much for any other law. Discrete values are
                refused: ask :mod:`torchfil.questions` about them.

        Returns:
            The bound (an estimate with the error of the mean over examples), and the prior's variance, which is the MSE
            of the best guess without the model.
        """
        leakage = self.totals
        if not leakage.same_coordinates:
            raise ValueError(
                "examples have different numbers of private coordinates (texts of different lengths), but a "
                "population bound needs one number: take those of one length, "
                "torchfil.bounds.population_mse_bound(engine.totals.get_trace(ids), d, prior)"
            )
        trace = leakage.get_trace()
        if prior is None:
            rows, prior = fitted_prior(self._training.looks)
            trace = trace[torch.from_numpy(rows)]
        elif isinstance(prior, tuple) and len(prior) == 2:
            prior = Prior.box(*prior, num_coordinates=leakage.num_coordinates)
        elif not isinstance(prior, Prior):
            raise TypeError(
                f"prior={type(prior).__name__}: a law fitted to values alone ignores what is public; leave it out to "
                "fit the run's own examples, or pass Prior.gaussian(values, known=[labels, …])"
            )
        return population_mse_bound(trace, leakage.num_coordinates, prior)

    def get_rdp_mse_bound(
        self,
        diameters: float | Sequence[float] | Tensor = 1.0,
        *,
        reading: Literal["replace-one", "paper"] = "replace-one",
    ) -> float:
        """Theorem 1 of Guo et al. 2022: one MSE bound for all, from the run's Rényi divergence; unbiased attackers.

        Args:
            diameters: The range of each private coordinate; one number for all.
            reading: "replace-one" converts the accountant's add/remove RDP rigorously (:func:`replace_one_rdp`);
                "paper" uses ε_RDP(2) directly.
        """
        if reading not in ("replace-one", "paper"):
            raise ValueError(f"reading={reading!r} must be 'replace-one' or 'paper'")
        leakage = self.totals

        def rdp(order: float) -> float:
            return sum(
                float(compute_rdp(q=q, noise_multiplier=sigma, steps=steps, orders=order))
                for sigma, q, steps in self.accountant.history
            )

        epsilon = replace_one_rdp(rdp) if reading == "replace-one" else rdp(2.0)
        ranges = torch.as_tensor(diameters, dtype=torch.float64)
        return mse_from_rdp(epsilon, ranges.expand(leakage.num_coordinates))

    def leakage(self, example_ids: Iterable[Hashable] | Tensor | None = None, *, delta: float | None = None) -> Any:
        """One table by id (a pandas table if pandas is installed); see :meth:`Leakage.leakage`.

        With δ also ``individual_epsilon``; with clip weights also ``clip_weight``.
        """
        return as_table(*self.leakage_columns(example_ids, delta=delta))

    def leakage_columns(
        self, example_ids: Iterable[Hashable] | Tensor | None = None, *, delta: float | None = None
    ) -> tuple[list[Hashable], dict[str, list[Any]]]:
        """The ids and columns of :meth:`leakage`."""
        names, columns = self.totals.columns(example_ids)
        if delta is not None:
            columns["individual_epsilon"] = self.get_individual_epsilon(names, delta=delta).value.tolist()
        weights = self.clip_weights
        if weights is not None:
            rows = self._training.run.ids.rows(names)[1]
            columns["clip_weight"] = weights.cpu()[rows].tolist()
        return names, columns

    def group_leakage(self, group_of: Mapping[Hashable, Hashable], **options: Any) -> Any:
        """Summaries of η̄ by group; see :meth:`Leakage.groups`."""
        return self.totals.groups(group_of, **options)

    @classmethod
    def merge(cls, engines: Sequence[LeakageReading]) -> Leakage:
        """The average over repeated runs on the same data, with the run-to-run standard error, for reading."""
        if not engines:
            raise ValueError("merge needs at least one engine")
        if len(set(map(id, engines))) < len(engines):
            raise ValueError(
                "merge got one engine twice: a run agrees with itself, whatever its error; pass different runs"
            )
        average = Leakage.average([engine.totals for engine in engines])
        told = sorted({mechanism_in_words(engine._training, engine.accountant.history) for engine in engines})
        if len(told) > 1:
            raise ValueError(
                "runs to average must share noise, clipping (and clip_weights), subsampling, the number of steps and "
                "what is private; got " + "; ".join(text if len(text) < 500 else f"{text[:500]} …" for text in told)
            )
        return average


def _check_delta(delta: float) -> None:
    if not 0 < delta < 1:
        raise ValueError(f"delta={delta} must lie strictly between 0 and 1")
