"""Reading a ledger: what a run leaked about each example, each attribute, each group.

All values depend on private data and are confidential, too.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from torchfil.accounting import sums as summing
from torchfil.accounting.ids import ExampleIds
from torchfil.accounting.ledger import Ledger, check_repetitions, mean_ledger
from torchfil.accounting.quantities import (
    Conditions,
    Reading,
    TrackedQuantity,
    question_column,
)
from torchfil.accounting.rows import first_of_equal
from torchfil.accounting.sums import FEWEST_PARTICIPATIONS, OWN_SUMS
from torchfil.fisher.batch import largest_eigenvalue
from torchfil.fisher.results import Estimate, Kind, Part
from torchfil.guessing import Guess
from torchfil.utils.tables import ArrowTable, Columns, as_table
from torchfil.utils.text import html_table, nearest

__all__ = ["Leakage", "LeakageSummary"]

Ids = Iterable[Hashable] | Tensor | None  # None: all; an id given twice appears twice
FILKind = Literal["trace", "spectral"]

_AT_ONCE = 2**18  # examples that are read together


class _Positions(ExampleIds):
    """Examples that are named by their position in the data set."""

    def places(self, ids: Ids) -> Tensor:
        return ids if isinstance(ids, Tensor) else super().places(ids)


@dataclass(frozen=True)
class LeakageSummary:
    """What a run says about all of its measured examples together.

    Confidential, like all measurements.

    Attributes:
        examples: n.
        measured: For how many of them the run says anything.
        steps: Private steps so far.
        kind: The kind of the numbers: "exact", "estimate" or "lower bound" (of the FIL, if steps
            were paused).
        median_fil: The median of η̄ over the measured examples; NaN if there are none, like the
            next two.
        largest_fil: The largest η̄.
        smallest_mse_bound: 1/η̄² of the most exposed example: unbiased attackers, on average over
            runs; an estimate.
        divergences: By question, the largest D over examples and answers: every attacker; an
            estimate.
    """

    examples: int
    measured: int
    steps: int
    kind: Kind
    median_fil: float
    largest_fil: float
    smallest_mse_bound: float
    divergences: dict[str, float]

    def metrics(self) -> dict[str, float]:
        """The numbers by name, as floats; unknown ones are left out."""
        numbers = {"steps": float(self.steps), "measured_share": self.measured / self.examples}
        numbers |= {
            name: getattr(self, name)
            for name in ("median_fil", "largest_fil", "smallest_mse_bound")
        }
        numbers |= {
            f"largest_divergence/{question}": value for question, value in self.divergences.items()
        }
        return {name: value for name, value in numbers.items() if not math.isnan(value)}

    def lines(self) -> list[tuple[str, str]]:
        """The content as (name, text)."""
        lines = [
            ("steps", f"{self.steps:,}"),
            ("examples measured", f"{self.measured:,} of {self.examples:,}"),
        ]
        if self.measured:
            fil = f"median {self.median_fil:.3g}, largest {self.largest_fil:.3g} ({self.kind})"
            bound = f"{self.smallest_mse_bound:.3g} (unbiased attackers; from one run, an estimate)"
            lines += [("FIL η̄", fil), ("smallest MSE bound", bound)]
            lines += [
                (
                    f"D of {name!r}",
                    f"largest {value:.3g} (every attacker; from one run, an estimate)",
                )
                for name, value in self.divergences.items()
            ]
        return lines


class Leakage(ArrowTable):
    """What a run leaked, by example.

    Guarantees:
        * Every number says whether it is exact, an estimate with a standard error, or a bound.
        * Standard errors are those of the probes and skipped steps of this run. The bounds are
          about the mean over everything random in a run, so intervals also cover the draw of the
          batches and the path of the noise (:mod:`torchfil.accounting.sums`);
          ``interval(confidence, "probes")`` leaves them out. An example that was measured in fewer
          than five steps has no interval (its ends are 0 and ∞): an estimate from one run.
        * Intervals hold for an example chosen beforehand. The safest-looking of many examples look
          safe partly by luck: more of their lower ends are too high.
        * If steps were paused, the Fisher information of an example that took part in them is a
          lower bound, and reading it warns.
        * If a step had no noise, the FIL of its examples is infinite and their MSE bound 0, both
          with error 0: sampling cannot change them.

    Args:
        ledger: The sums.
        ids: The examples' names.
        conditions: How the sums were made; None: by sampling, with known batches, without skipped
            steps.
    """

    def __init__(
        self, ledger: Ledger, ids: ExampleIds, conditions: Conditions | None = None
    ) -> None:
        self.ledger = ledger
        self.ids = ids
        self.conditions = conditions or Conditions()

    @property
    def num_coordinates(self) -> int:
        """d, the number of private coordinates; the largest one, if examples differ."""
        return self.ledger.num_coordinates

    def get_num_coordinates(self, example_ids: Ids = None) -> Tensor:
        """d of each example, [ids], without padding; 1 for an example that took no part."""
        return self.ledger.sums.at("num_coordinates", self._rows(example_ids)).clamp(min=1)

    def was_measured(self, example_ids: Ids = None) -> Tensor:
        """Whether the run says anything about an example, bool [ids].

        It does not if the example was never drawn and measured, or so rarely that the estimate of
        its trace is below 0.
        """
        rows, sums = self._rows(example_ids), self.ledger.sums
        measured = sums.at("measured", rows) > 0
        trace, variance, square = (
            sums.at(name, rows) for name in ("trace", "variance", "trace_square")
        )
        return measured & ((trace > 0) | (trace == 0) & (variance == 0) & (square == 0))

    def get(self, name: str, example_ids: Ids = None) -> Any:
        """A tracked quantity, read from its sums, [ids, …].

        See :mod:`torchfil.accounting.quantities`.

        Args:
            name: The quantity's name.
            example_ids: None: all. An id given twice appears twice.
        """
        by_name = {quantity.name: quantity for quantity in self.ledger.quantities}
        if name not in by_name:
            raise ValueError(f"{name!r} was not tracked; make_private with track=({name!r},)")
        rows = self._rows(example_ids)
        return by_name[name].read(self._sums_of(by_name[name], rows), self._reading(rows))

    def get_trace(self, example_ids: Ids = None) -> Estimate:
        """tr I, the Fisher information summed over the run, [ids]."""
        return self.get("trace", example_ids)

    def get_fil(self, example_ids: Ids = None, *, kind: FILKind = "trace") -> Estimate:
        """Fisher information loss (FIL) per example, [ids], in the given order.

        Args:
            example_ids: None: all. An id given twice appears twice.
            kind: "trace": η̄ = sqrt(tr(I)/d), with the example's own d. "spectral": η = sqrt(‖I‖₂),
                exact from a tracked "fim"; ``get_fil()`` times sqrt(d) bounds it from above.
        """
        if kind == "trace":
            return self._raised(0.5, example_ids)
        if kind != "spectral":
            raise ValueError(f"kind={kind!r} must be 'trace' or 'spectral'")
        if "fim" in self.ledger.track:
            rows = self._rows(example_ids)
            norm = largest_eigenvalue(self.ledger.sums.at("fim", rows))
            return self._reading(rows).without_variance(norm).raised(0.5)
        raise ValueError(
            "the spectral norm of a sum cannot be read from traces; make_private with "
            "track=('fim',), for few private coordinates"
        )

    def get_mse_bound(self, example_ids: Ids = None) -> Estimate:
        """d / tr(I), [ids], infinite if nothing leaked: an unbiased attacker's MSE per coordinate
        is at least this.

        This holds on average over runs, with tr(I) the mean over runs. From one run it is an
        estimate, which is too large on average (Jensen): quote the lower end of its interval.
        """
        return self._raised(-1.0, example_ids)

    def _raised(self, exponent: float, example_ids: Ids) -> Estimate:
        """(tr I / d)^exponent, [ids]; NaN where the run does not say anything."""
        trace = self.get_trace(example_ids)
        told = self.was_measured(example_ids).to(trace.value.device)
        if trace.run_error is not None:  # predicted alone, it was not measured exactly
            alone = ~told & trace.run_error.isinf()
            error = torch.where(alone, math.inf, trace.standard_error)
            trace = replace(trace, standard_error=error)
        found = trace.raised(exponent, self.get_num_coordinates(example_ids))
        value, error = found.value.where(told, math.nan), found.standard_error.where(told, math.nan)
        return replace(found, value=value, standard_error=error)

    def get_smallest_mse_bound(
        self, confidence: float = 0.95, of: Part = "run"
    ) -> tuple[float, float]:
        """The smallest bound of all measured examples, and an end below all of their bounds.

        The end holds for all examples together with that probability, however many there are: which
        true bound is the smallest does not depend on chance, and the smallest of all lower ends is
        at most the lower end of that example. So one example's one-sided interval serves all.
        (Intervals for every example at once would need ends of 1 − (1 − confidence)/n each.)

        Args:
            confidence: The probability.
            of: As in :meth:`torchfil.fisher.results.Estimate.interval`.

        Returns:
            The smallest estimate, and the end; both infinite if nobody was measured.
        """
        if not 0.5 < confidence < 1:
            raise ValueError(
                f"confidence={confidence}, of one end, must lie strictly between 0.5 and 1"
            )
        bound, measured = self.get_mse_bound(), self.was_measured()
        low = bound.interval(2 * confidence - 1, of)[0]
        if not measured.any():
            return math.inf, math.inf
        return float(bound.value[measured].min()), float(low[measured].min())

    def get_attribute_fil(self, example_ids: Ids = None) -> Estimate:
        """sqrt(I_jj) per private coordinate, [ids, d]; NaN where too little was measured to tell.

        On average over runs, an unbiased guess of the coordinate is off by at least 1/sqrt(I_jj).
        Quote the inverse of the interval's upper end.
        """
        if "diagonal" not in self.ledger.track and "fim" in self.ledger.track:
            rows = self._rows(example_ids)
            diagonal = self.ledger.sums.at("fim", rows).diagonal(dim1=1, dim2=2)
            return self._reading(rows).without_variance(diagonal).raised(0.5)
        tracked: Estimate = self.get("diagonal", example_ids)
        told = self.was_measured(example_ids).to(tracked.value.device)[:, None]
        told = told & (tracked.value >= 0)
        found = tracked.raised(0.5)
        value, error = (each.where(told, math.nan) for each in (found.value, found.standard_error))
        return replace(found, value=value, standard_error=error)

    def get_plis(self, example_ids: Ids = None) -> Tensor:
        """Σ_t ∂(‖g̃_t‖/s_t)²/∂z over the steps that used the example, [ids, d], in the order of z.

        It is unbiased if steps were skipped at random; paused steps are missing.
        """
        return self.get("plis", example_ids)

    def summary(self) -> LeakageSummary:
        """The run in a few numbers, over all measured examples.

        For a log, ``summary().metrics()``.
        """
        # a few operations on [n] numbers and one transfer from a GPU
        measured = self.was_measured()
        estimate = self.get_fil()
        fil = estimate.value[measured]
        worst = {
            name: self.get_guess(name).divergence.value[measured] for name in self.ledger.questions
        }

        # read together, because every float() of a tensor on a GPU waits for it
        if len(fil):
            numbers = [
                fil.median(),
                fil.max(),
                *(divergence.max() for divergence in worst.values()),
            ]
            median, largest, *divergences = torch.stack(
                [number.double() for number in numbers]
            ).tolist()
        else:
            median, largest, divergences = math.nan, math.nan, [math.nan] * len(worst)
        return LeakageSummary(
            examples=self.ids.num_examples,
            measured=len(fil),
            steps=self.ledger.steps,
            kind=estimate.kind,
            median_fil=median,
            largest_fil=largest,
            smallest_mse_bound=math.inf if largest == 0 else largest**-2,
            divergences=dict(zip(worst, divergences, strict=True)),
        )

    def __repr__(self) -> str:
        return "Leakage: " + "; ".join(f"{name} {text}" for name, text in self._lines())

    def _repr_html_(self) -> str:
        return html_table("Leakage (confidential)", self._lines())

    def _lines(self) -> list[tuple[str, str]]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the numbers already show what is missing
            return self.summary().lines()

    def get_guess(self, question: str, example_ids: Ids = None) -> Guess:
        """How well any attacker can tell the true answer of an example from others, [ids, answers].

        Args:
            question: Its name in ``make_private(…, questions={name: …})``.
            example_ids: None: all. An id given twice appears twice.
        """
        asked = self.ledger.questions
        if not asked:
            raise ValueError(
                "This run was trained without questions. Ask them in make_private(…, "
                f"questions={{{question!r}: …}})."
            )
        if question not in asked:
            raise ValueError(f"This run was not asked {question!r}{nearest(question, list(asked))}")
        guess: Guess = self.get(question_column(question), example_ids)
        return guess

    def get_sampling_error(self, example_ids: Ids = None) -> Tensor:
        """The standard deviation of η̄ due to the random choice of batches, [ids].

        It is the part of the run's error that :mod:`torchfil.accounting.sums` estimates by
        Σ B_t (1−q)(X_t − X̂_t)². It is 0 if batches count as known, and infinite for an example
        that was never drawn. Averaging repeated runs lowers it (:meth:`FILPrivacyEngine.merge`).
        """
        rows, d = self._rows(example_ids), self.get_num_coordinates(example_ids)
        fil = (self.ledger.sums.at("trace", rows) / d).clamp(min=0).sqrt()
        deviation = self._run_variances(rows)["trace"][0].sqrt()
        return torch.where(deviation.isinf(), math.inf, _divide(deviation, 2 * d * fil))

    def leakage(self, example_ids: Ids = None) -> Any:
        """One table by id: a pandas DataFrame if pandas is installed, else a dict of columns, the
        ids under "id".

        Both also have ``to_arrow()``, ``to_polars()`` and an Arrow stream, with the ids as the
        first column (:mod:`torchfil.utils.tables`).

        Columns: ``fil`` (η̄), ``fil_error`` (of the probes and skipped steps), ``sampling_error``
        (of the draw of batches), ``fil_kind``, ``mse_bound``, ``mse_bound_low`` (the lower end of
        its 95 % interval, which covers both and the path of the noise; 0: no end is claimed, the
        bound is an estimate from one run), ``rel_error`` (``fil_error`` over ``fil``),
        ``participations``, ``missed`` (those that were not measured), ``paused`` (those in paused
        steps, if there are any), ``squared_norm`` (Σ‖g̃‖²), ``num_coordinates`` (d, if it differs
        between examples; 0: took no part). For
        every question: ``NAME_divergence`` (D of its worst answer) and ``NAME_true_positive_rate``
        (the largest of any attacker at 1 % false positives, at the upper end of D).

        Read the top of the table rather than its end: the examples that look safest were partly
        lucky in this run. If a short run skips steps at random (``fil_rate``, ``rel_error``), they
        are the ones that were hardly measured.
        """
        return as_table(*self.columns(example_ids))

    def to_arrow(self) -> Any:
        """The table of :meth:`leakage` as a ``pyarrow.Table``, the ids as its first column."""
        names, columns = self.columns()
        return Columns({"id": names, **columns}).to_arrow()

    def columns(self, example_ids: Ids = None) -> tuple[Sequence[Hashable], dict[str, np.ndarray]]:
        """The ids and columns of :meth:`leakage`, [ids] each."""
        names, rows = self.ids.rows(example_ids)
        arrays, complete = self.arrays(rows), "exact" if self.conditions.exact else "estimate"
        columns: dict[str, np.ndarray] = {}
        for name, values in arrays.items():
            if name == "mse_bound":
                columns["fil_kind"] = np.where(arrays["paused"] > 0, "lower bound", complete)
            if name != "paused" or values.any():
                columns[name] = values
        return names, columns

    def arrays(self, rows: Tensor | None = None) -> dict[str, np.ndarray]:
        """The numeric columns of :meth:`leakage`, [rows] each, for examples by their position in
        the data set.
        """
        return self.by_parts(Leakage._columns, rows)

    def by_parts(
        self, read: Callable[[Leakage, Tensor], Mapping[str, Tensor]], rows: Tensor | None = None
    ) -> dict[str, np.ndarray]:
        """The values that a function reads by example, computed for one part of the examples after
        the other.

        This needs little memory besides the result. Warnings appear once.

        Args:
            read: Maps a copy of this object, whose ids are positions in the data set, and some of
                these to values by name, [rows, …] each.
            rows: Positions in the data set; None: all.
        """
        rows = torch.arange(self.ids.num_examples) if rows is None else rows
        rows = rows.to(self.ledger.device)
        self._kind(rows)
        self._warn_of_few(rows)
        spreads = {} if self.conditions.averaged else self._spreads()
        conditions = replace(self.conditions, spreads=spreads)
        once = Leakage(self.ledger, _Positions(self.ids.num_examples), conditions)

        # examples that were never drawn have the same values
        undrawn = self.ledger.sums.at("participations", rows) == 0
        if isinstance(self.ledger.draw_rate, Tensor):
            undrawn = torch.zeros_like(undrawn)
        needed, places = first_of_equal(undrawn)
        parts = [
            {name: values.cpu().numpy() for name, values in read(once, part).items()}
            for part in rows[needed].split(_AT_ONCE)
        ]
        found = {
            name: np.concatenate([part.pop(name) for part in parts]) for name in list(parts[0])
        }
        # they were moved to the end, and be it one alone
        return (
            {name: found.pop(name)[places.cpu().numpy()] for name in list(found)}
            if undrawn.any()
            else found
        )

    def _columns(self, rows: Tensor) -> dict[str, Tensor]:
        """See :meth:`arrays`."""
        sums, fil, bound = self.ledger.sums, self.get_fil(rows), self.get_mse_bound(rows)
        columns = {
            "fil": fil.value,
            "fil_error": fil.standard_error,
            "sampling_error": self.get_sampling_error(rows),
            "mse_bound": bound.value,
            "mse_bound_low": bound.interval(0.95)[0],
            "rel_error": _divide(fil.standard_error, fil.value).where(~fil.value.isnan(), math.nan),
            "participations": sums.at("participations", rows),
            "missed": sums.at("participations", rows) - sums.at("measured", rows),
            "paused": sums.at("paused", rows),
            "squared_norm": sums.at("squared_norm", rows),
        }
        if not self.ledger.same_coordinates:
            columns["num_coordinates"] = sums.at("num_coordinates", rows)
        for question in self.ledger.questions:
            guess = self.get_guess(question, rows)
            columns[f"{question}_divergence"] = _worst(guess.divergence.value)
            columns[f"{question}_true_positive_rate"] = _worst(
                guess.upper(0.95).true_positive_rate(0.01)
            )
        return columns

    def groups(
        self,
        group_of: Mapping[Hashable, Hashable],
        *,
        threshold: float | None = None,
        quantiles: Sequence[float] = (0.05, 0.5, 0.95),
        question: str | None = None,
    ) -> Any:
        """Summaries of η̄ by group, a table by group.

        With ``question``, of the D of its worst answer instead.

        Args:
            group_of: id ↦ group; ids that are not in it are left out.
            threshold: If given, adds the share of a group's examples with η̄ (or D) above it.
            quantiles: Which quantiles of η̄ (or D) to include.
            question: The name of a question.

        Returns:
            A table with ``count``, ``known`` (of how many of them the run says anything: the rest
            are left out of the other columns), ``mean``, ``mean_error`` (an upper bound of its
            standard error: the errors of one batch's examples are correlated), ``max``, the
            quantiles and, with a threshold, ``share_above``. They are NaN if nobody is known.
        """
        members: dict[Hashable, list[Hashable]] = {}
        for key, group in group_of.items():
            members.setdefault(group, []).append(key)
        columns: dict[str, list[Any]] = {}
        for ids in members.values():
            fil = self.get_fil(ids) if question is None else self._worst_divergence(question, ids)
            told = ~fil.value.isnan()
            known = int(told.sum())
            fil = fil[told] if known else fil
            values = {
                "count": len(ids),
                "known": known,
                "mean": fil.value.mean().item(),
                "mean_error": fil.standard_error.mean().item(),
                "max": fil.value.max().item(),
                **{f"q{100 * level:g}": _quantile(fil.value, level) for level in quantiles},
            }
            if threshold is not None:
                above = (fil.value > threshold).double().mean().item()
                values["share_above"] = above if known else math.nan
            for name, value in values.items():
                columns.setdefault(name, []).append(value)
        return as_table(list(members), columns, index_name="group")

    def _worst_divergence(self, question: str, ids: Ids) -> Estimate:
        """D of each example's worst answer, [ids]."""
        found = self.get_guess(question, ids).divergence
        value = found.value.reshape(len(found.value), -1)
        worst = value.argmax(dim=1, keepdim=True)
        error = found.standard_error.reshape(value.shape).gather(1, worst)[:, 0]
        return Estimate(value.gather(1, worst)[:, 0], error, found.kind)

    @classmethod
    def average(cls, runs: Sequence[Leakage]) -> Leakage:
        """The mean over repeated runs on the same data, with the run-to-run standard error.

        Participations are the mean over runs, rounded up: 0 only for an example that no run has
        drawn.
        """
        ids, ledgers = [run.ids for run in runs], [run.ledger for run in runs]
        check_repetitions(ids, ledgers)
        skipping = any(run.conditions.skipping for run in runs)
        conditions = replace(runs[0].conditions, skipping=skipping)
        if len(runs) == 1:
            return cls(mean_ledger(ledgers), ids[0], conditions)
        rows = torch.arange(ids[0].num_examples, device=ledgers[0].device)
        errors = [run._run_variances(rows.to(run.ledger.device)) for run in runs]
        of_runs = {
            name: torch.stack([every[name][1].to(rows.device) for every in errors])
            for name in errors[0]
        }
        conditions = replace(conditions, exact=False, averaged=True)
        return cls(mean_ledger(ledgers, of_runs), ids[0], conditions)

    def _rows(self, example_ids: Ids) -> Tensor:
        return self.ids.places(example_ids).to(self.ledger.device)

    # --------------------------------------------------- examples by their position in the data set

    def _kind(self, rows: Tensor) -> Kind:
        """The kind of numbers about these examples; warns if some took part in paused steps."""
        paused = self.ledger.sums.at("paused", rows)
        if not (paused > 0).any():
            return "exact" if self.conditions.exact else "estimate"
        # not one part of a reading that has already warned
        if self.conditions.spreads is None:
            missing = f"{int((paused > 0).sum())} of {len(rows)} examples took part in paused steps"
            warnings.warn(
                f"{missing}: their FIL is a lower bound, and error bounds are not guarantees",
                stacklevel=5,
            )
        return "lower bound"

    def _sums_of(self, quantity: TrackedQuantity, rows: Tensor) -> dict[str, Tensor]:
        """The sums of a quantity at these rows, those of floating point in float64."""
        at_rows = {name: self.ledger.sums.at(name, rows) for name in quantity.summed(1).layout}
        return {
            name: value.double() if value.is_floating_point() else value
            for name, value in at_rows.items()
        }

    def _reading(self, rows: Tensor) -> Reading:
        """What a tracked quantity needs to read its sums at these rows."""
        errors = {name: every.sqrt() for name, (_, every) in self._run_variances(rows).items()}
        return Reading(
            self.conditions,
            self._kind(rows),
            self._sums_of(self.ledger.quantities[0], rows),
            errors,
        )

    def _spreads(self) -> dict[str, summing.Spread]:
        """By predicted sum, how much examples of like exposure vary."""
        return {
            each.name: summing.path_spread(each.name, self.ledger.sums)
            for each in self.ledger.predicted
        }

    def _run_variances(self, rows: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        """By predicted sum, the variance due to the batches, and all of it, [rows, …] each."""
        sums, found = self.ledger.sums, {}
        averaged = self.conditions.averaged
        spreads = {} if averaged else self.conditions.spreads or self._spreads()
        own = {name: sums.at(name, rows) for name in OWN_SUMS}
        for each in self.ledger.predicted:
            assert each.variance is not None
            mine = self._sums_of(each, rows)
            if averaged:
                found[each.name] = (mine[each.variance] * 0, mine[each.variance])
                continue
            found[each.name] = summing.run_variance(
                each.name,
                each.variance,
                {**mine, **own},
                spreads[each.name],
                self.ledger.draw_rate is None,
            )
        return found

    def _warn_of_few(self, rows: Tensor) -> None:
        """Warn about examples that look safe only because a short run with skipped steps hardly
        measured them.
        """
        sums = self.ledger.sums
        few = sums.at("participations", rows) < FEWEST_PARTICIPATIONS
        few |= sums.at("measured", rows) == 0
        if self.conditions.skipping and not self.conditions.averaged and bool(few.any()):
            told = (
                f"{int(few.sum())} of {len(rows)} examples were drawn in fewer than "
                f"{FEWEST_PARTICIPATIONS} steps, or never measured"
            )
            remedy = (
                "Train longer, measure more steps (fil_rate, rel_error), or average runs (merge)."
            )
            warnings.warn(
                f"{told}: their FIL may be luck, and their mse_bound_low is 0. {remedy}",
                stacklevel=4,
            )


def _divide(a: Tensor, b: Tensor) -> Tensor:
    """a / b, and 0 if b is 0 or infinite: nothing was measured, or all is known, so nothing is
    uncertain.
    """
    usual = (b > 0) & b.isfinite()
    return torch.where(usual, a / b.where(usual, torch.ones_like(b)), 0.0)


def _worst(values: Tensor) -> Tensor:
    """The largest over answers, [ids]."""
    return values.reshape(len(values), -1).amax(dim=1)


def _quantile(values: Tensor, level: float) -> float:
    """:func:`torch.quantile` by linear interpolation, for values that may be infinite."""
    place = level * (len(values) - 1)
    low, high = values.sort().values[[math.floor(place), math.ceil(place)]].tolist()
    return low if low == high else low + (place - math.floor(place)) * (high - low)
