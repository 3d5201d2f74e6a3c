"""What a ledger's sums say at some rows, and how far they can be off: probes, the draw of batches, the noise's path."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from torchfil.accounting.ledger import Ledger
from torchfil.accounting.path import FEWEST_PARTICIPATIONS, run_variance, typical_change
from torchfil.accounting.quantities import Reading, TrackedQuantity
from torchfil.fisher.results import Kind

__all__ = ["AT_ONCE", "Conditions", "RowReading", "divide"]

AT_ONCE = 2**18  # examples that are read together


@dataclass(frozen=True)
class Conditions:
    """The facts about a run that matter for reading its sums.

    Attributes:
        exact: Whether every measured step was measured without sampling.
        sample_rate: q, if the attacker does not know the batches; participation is then random, too. 1 for averages
            over runs, whose standard errors include it. None: batches are known.
        skipping: Whether steps were skipped at random, so that an example may have taken part without being measured.
        degrees_of_freedom: The degrees of freedom of the standard errors: runs − 1 for averages over runs. None: each
            example's own, from the spread of its steps' variances.
        test_matrix: Ω of the sketch, [d, r], if one was kept.
        typical_changes: By followed sum, the typical change for :func:`torchfil.accounting.path.run_variance`, while
            reading in parts; None: it is computed at every reading.
    """

    exact: bool = False
    sample_rate: float | None = None
    skipping: bool = False
    degrees_of_freedom: float | None = None
    test_matrix: Tensor | None = None
    typical_changes: Mapping[str, Tensor] | None = None


class RowReading:
    """Reads a ledger's sums, made under these conditions, for examples by their position in the data set."""

    def __init__(self, ledger: Ledger, conditions: Conditions) -> None:
        self._ledger, self._conditions = ledger, conditions

    @property
    def kind_when_complete(self) -> Kind:
        """The kind of numbers about an example that took part in no paused step."""
        return "exact" if self._conditions.exact else "estimate"

    def num_coordinates(self, rows: Tensor) -> Tensor:
        """d of each example, [rows]; 1 for an example that took no part."""
        return self._ledger.sums.at("num_coordinates", rows).clamp(min=1)

    def sampling_error(self, rows: Tensor, fil: Tensor) -> Tensor:
        """The standard deviation of η̄ due to the random choice of batches, [rows], given η̄."""
        deviation = self.run_variance("trace", rows)[0].sqrt()
        return torch.where(deviation.isinf(), math.inf, divide(deviation, 2 * self.num_coordinates(rows) * fil))

    def kind(self, rows: Tensor) -> Kind:
        """The kind of numbers about these examples; warns if some took part in paused steps."""
        missed = self._ledger.sums.at("missed", rows)
        if bool((missed > 0).any()):
            if self._conditions.typical_changes is not None:  # one part of a reading that has already warned
                return "lower bound"
            warnings.warn(
                f"{int((missed > 0).sum())} of {len(rows)} examples took part in paused steps: their Fisher "
                "information is a lower bound, and error bounds made from it are not guarantees",
                stacklevel=5,
            )
            return "lower bound"
        return self.kind_when_complete

    def sums_of(self, quantity: TrackedQuantity, rows: Tensor) -> dict[str, Tensor]:
        """The sums of a quantity at these rows, those of floating point in float64."""
        at_rows = {name: self._ledger.sums.at(name, rows) for name in quantity.sums(1, 1)}
        return {name: value.double() if value.is_floating_point() else value for name, value in at_rows.items()}

    def at(self, rows: Tensor) -> Reading:
        """What a tracked quantity needs to read its sums at these rows."""
        conditions = self._conditions
        return Reading(
            self.kind(rows),
            conditions.exact,
            conditions.degrees_of_freedom,
            self.sums_of(self._ledger.quantities[0], rows),  # of the trace
            conditions.test_matrix,
            self._run_errors(rows) if conditions.degrees_of_freedom is None else {},
        )

    def typical_changes(self) -> dict[str, Tensor]:
        """By followed sum, the mean relative change between compared participations, over all examples."""
        typical = {}
        for quantity in self._ledger.quantities:
            for name in quantity.followed:
                total, count = torch.zeros(()), torch.zeros(())
                for rows in torch.arange(self._ledger.num_examples, device=self._ledger.device).split(AT_ONCE):
                    participations = self._ledger.sums.at("participations", rows)
                    added = typical_change(name, self.sums_of(quantity, rows), participations)
                    total, count = total.to(added[0]) + added[0], count.to(added[1]) + added[1]
                typical[name] = total / count.clamp(min=1)
        return typical

    def run_variance(self, name: str, rows: Tensor) -> tuple[Tensor, Tensor]:
        """See :func:`torchfil.accounting.path.run_variance`."""
        conditions = self._conditions
        typical = self.typical_changes() if conditions.typical_changes is None else conditions.typical_changes
        quantity = next(each for each in self._ledger.quantities if name in each.followed)
        participations = self._ledger.sums.at("participations", rows)
        return run_variance(name, self.sums_of(quantity, rows), participations, conditions.sample_rate, typical[name])

    def _run_errors(self, rows: Tensor) -> dict[str, Tensor]:
        """How far one run can be off, apart from its probes, by followed sum."""
        followed = [name for quantity in self._ledger.quantities for name in quantity.followed]
        return {name: sum(self.run_variance(name, rows), torch.zeros(())).sqrt() for name in followed}

    def warn_of_few(self, rows: Tensor) -> None:
        """Warn about examples that look safe only because a short run with skipped steps hardly measured them."""
        few = self._ledger.sums.at("trace_measured", rows) < FEWEST_PARTICIPATIONS
        if self._conditions.skipping and self._conditions.degrees_of_freedom is None and bool(few.any()):
            warnings.warn(
                f"{int(few.sum())} of {len(rows)} examples were measured in fewer than {FEWEST_PARTICIPATIONS} of the "
                "steps that used them, because steps are skipped at random: their low FIL may be luck, and their "
                "mse_bound_low is 0. Train longer, measure more steps (fil_rate, rel_error), or average runs (merge).",
                stacklevel=4,
            )


def divide(a: Tensor, b: Tensor) -> Tensor:
    """a / b, and 0 if b is 0 or infinite: nothing was measured, or all is known, so nothing is uncertain."""
    usual = (b > 0) & b.isfinite()
    return torch.where(usual, a / b.where(usual, torch.ones_like(b)), 0.0)
