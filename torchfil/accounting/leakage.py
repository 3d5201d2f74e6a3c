"""Reading a ledger: what a run leaked about each example, each attribute, each group.

All values depend on private data and are confidential themselves.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from torchfil.accounting.ledger import Ledger
from torchfil.fisher.results import Estimate, Kind

__all__ = ["ExampleIds", "Leakage", "as_table", "plain_key"]


class ExampleIds:
    """The examples' names: their numbers in the data set, or the user's own keys, one per example.

    Args:
        num_examples: n.
        keys: n distinct keys; None: 0 … n−1.
    """

    def __init__(self, num_examples: int, keys: Sequence[Hashable] | None = None) -> None:
        self.num_examples = num_examples
        given = keys.tolist() if isinstance(keys, Tensor) else keys
        self.keys = [plain_key(key) for key in given] if given is not None else None
        self._row_of: dict[Hashable, int] = {}
        if self.keys is not None:
            if len(self.keys) != num_examples:
                raise ValueError(
                    f"id_of gives {len(self.keys)} keys for {num_examples} examples; it must give one each"
                )
            self._row_of = {key: row for row, key in enumerate(self.keys)}
            if len(self._row_of) != num_examples:
                seen: set[Hashable] = set()
                twice = next(key for key in self.keys if key in seen or seen.add(key))  # type: ignore[func-returns-value]
                raise ValueError(
                    f"id_of gives {twice!r} to more than one example; keys must be distinct. To see several records of "
                    "one person together, give each its own key and pass groups."
                )

    def all(self) -> list[Hashable]:
        """Every id, in the order of the data set."""
        return list(self.keys) if self.keys is not None else list(range(self.num_examples))

    def rows(self, ids: Iterable[Hashable] | Tensor | None) -> tuple[list[Hashable], Tensor]:
        """The ids as a list and their rows, in the order asked for; an id asked for twice is answered twice."""
        if ids is None:
            return self.all(), torch.arange(self.num_examples)
        wanted = [plain_key(key) for key in (ids.tolist() if isinstance(ids, Tensor) else ids)]
        if self.keys is not None:
            unknown = [key for key in wanted if key not in self._row_of]
            rows = [self._row_of[key] for key in wanted] if not unknown else []
        else:
            unknown = [key for key in wanted if not (type(key) is int and 0 <= key < self.num_examples)]
            rows = [key for key in wanted if type(key) is int] if not unknown else []
        if unknown:
            valid = "the keys of id_of" if self.keys is not None else f"0 to {self.num_examples - 1}"
            raise KeyError(f"unknown example ids {unknown[:5]}{' …' if len(unknown) > 5 else ''}; ids are {valid}")
        return wanted, torch.tensor(rows, dtype=torch.long)


def plain_key(key: Hashable) -> Hashable:
    """NumPy's numbers and texts, and tensors of one number, as Python's."""
    return key.item() if isinstance(key, np.generic) or (isinstance(key, Tensor) and key.ndim == 0) else key


class Leakage:
    """What a run leaked, by example.

    Guarantees:
        * Every number says whether it is exact, an estimate with a standard error, or a bound.
        * Standard errors are those of the probes and skipped steps of this run. With secret batches the bound is a mean
          over which batches draw the example, too; :meth:`get_sampling_error` tells how far one run can be off.
        * Where steps were paused, the Fisher information of an example that took part in them is a lower bound,
          and reading it warns.

    Args:
        ledger: The sums.
        ids: The examples' names.
        exact: Whether every step was measured without sampling.
        test_matrix: Ω of the sketch, [d, r], where one was kept.
        sample_rate: q, where the attacker does not know the batches; then participation is part of what is random. 1
            for averages over runs, whose standard errors include it.
        skipping: Whether steps were skipped at random, so that an example may have taken part without being measured.
        degrees_of_freedom: Of the standard errors: runs − 1 for averages over runs. None: each example's own, from
            the spread of its steps' variances.
    """

    def __init__(
        self,
        ledger: Ledger,
        ids: ExampleIds,
        *,
        exact: bool,
        test_matrix: Tensor | None = None,
        sample_rate: float | None = None,
        skipping: bool = False,
        degrees_of_freedom: float | None = None,
    ) -> None:
        self.ledger = ledger
        self.ids = ids
        self.exact = exact
        self.test_matrix = test_matrix
        self.sample_rate = sample_rate
        self.skipping = skipping
        self.degrees_of_freedom = degrees_of_freedom

    @property
    def num_coordinates(self) -> int:
        """d, the number of private coordinates."""
        return self.ledger.num_coordinates

    def was_measured(self, example_ids: Iterable[Hashable] | Tensor | None = None) -> Tensor:
        """Whether the run says anything about an example, bool [ids]: its FIL of 0 means no leakage only then."""
        rows, sums = self._rows(example_ids), self.ledger.sums
        leaks = sums["trace"][rows] > 0
        return leaks if self.skipping else leaks | (sums["participations"][rows] > sums["missed"][rows])

    def get_trace(self, example_ids: Iterable[Hashable] | Tensor | None = None) -> Estimate:
        """Tr I, the Fisher information summed over the run, [ids]."""
        rows = self._rows(example_ids)
        sums = self.ledger.sums
        found = self._estimate(sums["trace"][rows], sums["variance"][rows], rows)
        if self.degrees_of_freedom is not None:
            return found
        return replace(found, certain=sums["certain"][rows], variance_limit=sums["variance_limit"][rows])

    def get_fil(
        self,
        example_ids: Iterable[Hashable] | Tensor | None = None,
        *,
        kind: Literal["trace", "spectral"] = "trace",
    ) -> Estimate:
        """Fisher information loss per example, [ids], in the order asked for.

        Args:
            example_ids: None: all. An id asked for twice is answered twice.
            kind: "trace": η̄ = sqrt(tr(I)/d). "spectral": η = sqrt(‖I‖₂), exact from a tracked "fim", a lower
                bound from a tracked "sketch" (Nyström); ``get_fil()`` times sqrt(d) bounds it from above.
        """
        if kind == "trace":
            return self.get_trace(example_ids).raised(0.5, self.num_coordinates)
        if kind != "spectral":
            raise ValueError(f"kind={kind!r} must be 'trace' or 'spectral'")
        rows = self._rows(example_ids)
        if "fim" in self.ledger.sums:
            top = torch.linalg.eigvalsh(self.ledger.sums["fim"][rows])[:, -1] if len(rows) else torch.zeros(0)
            how = self._kind(rows)
        elif "sketch" in self.ledger.sums and self.test_matrix is not None:
            top = _nystrom_norm(self.ledger.sums["sketch"][rows], self.test_matrix)
            how = "lower bound"
        else:
            raise ValueError(
                "the spectral norm of a sum cannot be read from traces; make_private with track=('fim',) for few "
                "private coordinates, or track=('sketch',)"
            )
        value = top.clamp(min=0).sqrt()
        error = torch.zeros_like(value) if self.exact or how == "lower bound" else torch.full_like(value, math.nan)
        return Estimate(value, error, how, positive=True)

    def get_mse_bound(self, example_ids: Iterable[Hashable] | Tensor | None = None) -> Estimate:
        """The MSE per coordinate that no unbiased attacker can get below, d / tr(I), [ids]; infinite where none."""
        return self.get_trace(example_ids).raised(-1.0, self.num_coordinates)

    def get_attribute_fil(self, example_ids: Iterable[Hashable] | Tensor | None = None) -> Estimate:
        """sqrt(I_jj) per private coordinate, [ids, d]; its inverse is the error of an unbiased guess of it."""
        if "diagonal" not in self.ledger.sums and "fim" not in self.ledger.sums:
            raise ValueError("attributes were not tracked; make_private with track=('diagonal',)")
        rows = self._rows(example_ids)
        if "diagonal" in self.ledger.sums:
            diagonal = self._estimate(
                self.ledger.sums["diagonal"][rows], self.ledger.sums["diagonal_variance"][rows], rows
            )
        else:
            value = self.ledger.sums["fim"][rows].diagonal(dim1=1, dim2=2)
            unknown = torch.zeros_like(value) if self.exact else torch.full_like(value, math.nan)
            diagonal = Estimate(value, unknown, self._kind(rows))
        return diagonal.raised(0.5)

    def get_plis(self, example_ids: Iterable[Hashable] | Tensor | None = None) -> Tensor:
        """Σ_t ∂(‖g̃_t‖/s_t)²/∂z over the steps that used the example, [ids, d], in the order of z.

        Unbiased where steps were skipped at random; steps that were paused are missing from it.
        """
        if "plis" not in self.ledger.sums:
            raise ValueError("PLIS was not accumulated; make_private with track=('plis',)")
        return self.ledger.sums["plis"][self._rows(example_ids)]

    def get_sampling_error(self, example_ids: Iterable[Hashable] | Tensor | None = None) -> Tensor:
        """The standard deviation of η̄ due to chance in which batches drew the example, [ids].

        The run's sum Σ_t B_t X_t, B_t ~ Bernoulli(q), has the variance Σ_t q(1−q) X_t², estimated by (1−q) Σ B_t X_t².
        0 where batches count as known; infinite for an example that was never drawn, about which one run says
        nothing. Averaging repeated runs lowers it (:meth:`FILPrivacyEngine.merge`).
        """
        rows = self._rows(example_ids)
        fil = self.get_fil(example_ids).value
        if self.sample_rate is None:
            return torch.zeros_like(fil)
        deviation = ((1 - self.sample_rate) * self.ledger.sums["square"][rows]).sqrt()
        never = self.ledger.sums["participations"][rows] == 0
        return torch.where(never, torch.full_like(fil, math.inf), _divide(deviation, 2 * self.num_coordinates * fil))

    def leakage(self, example_ids: Iterable[Hashable] | Tensor | None = None) -> Any:
        """One table by id: a pandas DataFrame where pandas is installed, else a dict of lists.

        Columns: ``fil`` (η̄), ``fil_error``, ``sampling_error``, ``fil_kind``, ``mse_bound``, ``mse_bound_low`` (the
        lower end of its 95 % interval), ``rel_error`` (``fil_error`` over ``fil``), ``participations``, ``missed``
        (participations that were not measured), ``squared_norm`` (Σ‖g̃‖²).
        """
        return as_table(*self.columns(example_ids))

    def columns(
        self, example_ids: Iterable[Hashable] | Tensor | None = None
    ) -> tuple[list[Hashable], dict[str, list[Any]]]:
        """The ids and columns of :meth:`leakage`."""
        names, rows = self.ids.rows(example_ids)
        rows = rows.to(self.ledger.device)
        fil, bound = self.get_fil(names), self.get_mse_bound(names)
        missed = self.ledger.sums["missed"][rows]
        return names, {
            "fil": fil.value.tolist(),
            "fil_error": fil.standard_error.tolist(),
            "sampling_error": self.get_sampling_error(names).tolist(),
            "fil_kind": ["lower bound" if m else self._kind_when_complete for m in missed.tolist()],
            "mse_bound": bound.value.tolist(),
            "mse_bound_low": bound.interval(0.95)[0].tolist(),
            "rel_error": _divide(fil.standard_error, fil.value).tolist(),
            "participations": self.ledger.sums["participations"][rows].tolist(),
            "missed": missed.tolist(),
            "squared_norm": self.ledger.sums["squared_norm"][rows].tolist(),
        }

    def groups(
        self,
        group_of: Mapping[Hashable, Hashable],
        *,
        threshold: float | None = None,
        quantiles: Sequence[float] = (0.05, 0.5, 0.95),
    ) -> Any:
        """Summaries of η̄ by group, a table by group.

        Args:
            group_of: id ↦ group; ids that are not in it are left out.
            threshold: Where given, the share of a group's examples with η̄ above it.
            quantiles: Which quantiles of η̄ to give.

        Returns:
            A table with ``count``, ``mean``, ``mean_error`` (an upper bound of its standard error: the errors of
            one batch's examples are correlated), ``max``, the quantiles and, with a threshold, ``share_above``.
        """
        if not hasattr(group_of, "items"):
            raise TypeError(f"group_of is a {type(group_of).__name__}; map ids to groups: dict(zip(ids, labels))")
        group_of = dict(group_of.items())
        if not group_of:
            raise ValueError("group_of is empty; map at least one example id to a group")
        nameless = [key for key, group in group_of.items() if group != group]
        if nameless:
            raise ValueError(f"group_of has NaN for {nameless[:5]}; leave such ids out, or name their group")
        members: dict[Hashable, list[Hashable]] = {}
        for key, group in group_of.items():
            members.setdefault(group, []).append(key)
        columns: dict[str, list[Any]] = {}
        for ids in members.values():
            fil = self.get_fil(ids)
            values: dict[str, Any] = {
                "count": len(ids),
                "mean": fil.value.mean().item(),
                "mean_error": fil.standard_error.mean().item(),
                "max": fil.value.max().item(),
            }
            for level in quantiles:
                values[f"q{100 * level:g}"] = torch.quantile(fil.value, level).item()
            if threshold is not None:
                values["share_above"] = (fil.value > threshold).double().mean().item()
            for name, value in values.items():
                columns.setdefault(name, []).append(value)
        return as_table(list(members), columns, index_name="group")

    @classmethod
    def average(cls, runs: Sequence[Leakage]) -> Leakage:
        """The mean over repeated runs on the same data, with the run-to-run standard error.

        Participations are the mean over runs, rounded up: 0 only for an example that no run has drawn.
        """
        first = runs[0]
        for run in runs[1:]:
            same = run.ids.all() == first.ids.all() and run.num_coordinates == first.num_coordinates
            if not same or run.ledger.track != first.ledger.track:
                raise ValueError(
                    "runs to average must share data set, private coordinates and track; got "
                    f"{[(r.ids.num_examples, r.num_coordinates, r.ledger.track) for r in runs]}"
                )
        average = Ledger.from_state_dict(first.ledger.state_dict(), first.ledger.device)
        average.steps = max(run.ledger.steps for run in runs)
        average.missed_steps = sum(run.ledger.missed_steps for run in runs)
        count = len(runs)
        for name, target in average.sums.items():
            values = torch.stack([run.ledger.sums[name].to(target.device) for run in runs])
            if name == "missed":
                target.copy_(values.sum(dim=0))
            elif name == "participations":
                target.copy_(values.double().mean(dim=0).ceil())
            else:
                target.copy_(values.mean(dim=0))
        if count > 1:
            for name, variance in (("trace", "variance"), ("diagonal", "diagonal_variance")):
                if name in average.sums:
                    values = torch.stack([run.ledger.sums[name].to(average.device) for run in runs])
                    average.sums[variance].copy_(values.var(dim=0) / count)
        return cls(
            average,
            first.ids,
            exact=count == 1 and first.exact,
            test_matrix=first.test_matrix,
            sample_rate=1.0 if count > 1 and first.sample_rate is not None else first.sample_rate,
            skipping=any(run.skipping for run in runs),
            degrees_of_freedom=count - 1.0 if count > 1 else first.degrees_of_freedom,
        )

    @property
    def _kind_when_complete(self) -> Kind:
        return "exact" if self.exact else "estimate"

    def _rows(self, example_ids: Iterable[Hashable] | Tensor | None) -> Tensor:
        return self.ids.rows(example_ids)[1].to(self.ledger.device)

    def _kind(self, rows: Tensor) -> Kind:
        missed = self.ledger.sums["missed"][rows]
        if bool((missed > 0).any()):
            warnings.warn(
                f"{int((missed > 0).sum())} of {len(rows)} examples took part in steps that were paused: their Fisher "
                "information is a lower bound, and error bounds made from it are not guarantees",
                stacklevel=4,
            )
            return "lower bound"
        return self._kind_when_complete

    def _estimate(self, value: Tensor, variance: Tensor, rows: Tensor) -> Estimate:
        freedom: float | Tensor | None = self.degrees_of_freedom
        if freedom is None:
            spread = self.ledger.sums["variance_spread"][rows]
            total = self.ledger.sums["variance"][rows].square()
            freedom = torch.where(spread > 0, total / spread, torch.full_like(spread, math.inf))
        return Estimate(value, variance.clamp(min=0).sqrt(), self._kind(rows), freedom, positive=True)


def as_table(names: Sequence[Hashable], columns: Mapping[str, list[Any]], *, index_name: str = "id") -> Any:
    """A pandas DataFrame indexed by the names, or a dict of lists where pandas is not installed."""
    try:
        import pandas
    except ImportError:
        return {index_name: list(names), **columns}
    return pandas.DataFrame(columns, index=pandas.Index(names, name=index_name, tupleize_cols=False))


def _divide(a: Tensor, b: Tensor) -> Tensor:
    """A / b, and 0 where b is 0: nothing was measured, so nothing is uncertain."""
    return torch.where(b > 0, a / b.where(b > 0, torch.ones_like(b)), torch.zeros_like(a))


def _nystrom_norm(sketch: Tensor, test_matrix: Tensor) -> Tensor:
    """The largest eigenvalue of Y (ΩᵀY)⁺ Yᵀ for Y = IΩ, [batch]; never above ‖I‖₂ for a PSD matrix I.

    With C = (ΩᵀY)^{-1/2}, it is the largest eigenvalue of C YᵀY C, an r×r matrix.
    """
    if sketch.shape[0] == 0:
        return sketch.new_zeros(0)
    core = test_matrix.to(sketch).mT @ sketch  # ΩᵀIΩ, [batch, r, r]
    values, vectors = torch.linalg.eigh((core + core.mT) / 2)
    floor = values[:, -1:].clamp(min=0) * 1e-10
    keep = values > floor
    inverse_root = torch.where(keep, values.where(keep, torch.ones_like(values)).rsqrt(), torch.zeros_like(values))
    half = sketch @ (vectors * inverse_root[:, None, :])  # Y C, [batch, d, r]
    return torch.linalg.matrix_norm(half, ord=2).square()
