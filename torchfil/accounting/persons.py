"""What a run whose unit is the row says about persons with several rows.

Each of a person's rows r = 1 … k is drawn on its own at rate q, and clipped on its own. With u_r =
g̃_r/s, s = σC, and the other people's part subtracted, the step releases a draw from

    P = Σ_S w_S φ(· − Σ_{r∈S} u_r),   w_S = q^|S| (1−q)^(k−|S|),   φ = N(0, I), S any set of rows,

and from φ if the person is absent. How many rows a person has counts as public.

**Absence.** Let A = dP/dφ = Σ_S w_S exp(⟨U_S, o⟩ − ‖U_S‖²/2). By Kahane's convexity inequality
(1985) the mean over o ~ φ of a convex function of A grows with each inner product ⟨U_S, U_T⟩,
because its derivative is half the mean of F″(A) w_S w_T e^{…} e^{…} ≥ 0. All rows on one line have
the largest inner products. So divergences of P from φ, in both directions and of every order, are
at most those of the scalar mixture with Σ_{r∈S} ‖u_r‖ in place of U_S; larger norms give more. KL(P
‖ φ) of a scalar mixture with the random centre X = Σ_{r∈S} ‖u_r‖ also grows if X becomes more
variable in the convex order: log A is convex in o, and KL = sup_g E_P g − log E_φ e^g is attained
at g = log A. So norms may be rounded up or down at random to a grid, with the same mean.

A **change** in all rows is not read from such a run: no bound of its D is known that is proved and
of use.

**D over a run.** At a step that draws some of a person's k rows, KL_t of the whole person divided
by 1 − (1−q)^k, the probability of such a step, is added to the person's D, as KL_t/q is for an
example; for one row they are the same. A row that was not drawn counts with the norm of its last
participation; if there was none, with the clipping threshold. With known batches only the rows that
were drawn count.

**Fisher information.** About the coordinates of all rows together, tr I ≤ Σ_r tr I_r, because
knowing which of the other rows were drawn only helps an attacker. A value that all rows share has
the sum of the rows' scores, so that for it sqrt(I_jj) ≤ Σ_r sqrt(I_jj of row r), by Minkowski's
inequality.

These inequalities hold for means over runs. One run estimates their right-hand sides, so its
readings are estimates of upper bounds, with errors, and about half of them lie below their mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache

import numpy as np
import torch
from scipy import special, stats
from torch import Tensor

from torchfil.accounting.ids import ExampleIds
from torchfil.accounting.leakage import Ids, Leakage
from torchfil.accounting.ledger import Contribution, Ledger
from torchfil.accounting.owners import Owners
from torchfil.accounting.quantities import QuestionSpec, question_column
from torchfil.accounting.sums import Column
from torchfil.fisher.mechanism import step_divergence
from torchfil.fisher.results import Estimate, Kind
from torchfil.guessing import Guess

Questions = Mapping[str, QuestionSpec]
ByRow = Callable[[], Leakage]
_STEPS, _ATOMS = 8, 160  # of the grid, for the largest row and at most
# rows on average, and ‖u‖: with more, which rows are drawn is as good as known
_MOST_DRAWN, _MOST_NORM = 20, 8.0
# of the nodes around the atoms, in standard deviations; persons
_REACH, _SPACING, _AT_ONCE = 9.0, 0.25, 32
# k/σ up to which drawing rows at random makes ε of a person small enough to mean something
_FARTHEST = 64


class Persons(Leakage):
    """What such a run leaked, by owner: upper bounds, estimated from one run.

    Its ledger has the divergences alone.

    Args:
        owners: Whose each row is.
        questions: The run's questions by name.
        rows: Returns what the run leaked by row.
        sample_rate: q of a row; None: batches are known.
        most: The largest possible ‖g̃‖/C of each row, [rows]; None: 1.
    """

    def __init__(
        self,
        owners: Owners,
        questions: Questions,
        rows: ByRow,
        sample_rate: float | None,
        most: Tensor | None,
    ) -> None:
        absences = {name: asked for name, asked in questions.items() if asked.membership}
        rate: Tensor | None = None
        if sample_rate is not None:
            least = torch.full_like(owners.counts, sample_rate, dtype=torch.float64)
            rate = -torch.expm1(owners.counts * torch.log1p(-least))
        ledger = Ledger(len(owners), 1, questions=absences, draw_rate=rate)
        super().__init__(ledger, ExampleIds(len(owners), owners.keys))
        self._sample_rate = sample_rate
        self.owners, self._questions, self._by_row = owners, questions, rows
        self.last = (
            torch.ones(len(owners.of_row), dtype=torch.float64)
            if most is None
            else most.double().cpu()
        )

    def book(self, rows: Tensor, ratios: Tensor, noise_multiplier: float) -> None:
        """Add a step that drew these rows, [batch], with these ‖g̃‖/C."""
        if not self.ledger.questions:
            return
        rate, owners = self._sample_rate, self.owners
        # a new one: a step may be undone
        self.last = self.last.index_copy(0, rows, ratios.double().cpu())
        counted = (
            torch.zeros(len(self.last)).index_fill(0, rows, 1.0)
            if rate is None
            else torch.ones(len(self.last))
        )
        persons = owners.of_row[rows].unique()
        counts, found = (
            owners.counts[persons],
            torch.full((len(persons),), torch.inf, dtype=torch.float64),
        )
        for count in counts.unique().tolist() if noise_multiplier else ():
            own = torch.tensor(owners.rows(persons[counts == count].tolist())).view(-1, count)
            found[counts == count] = absence_divergence(
                self.last[own] * counted[own] / noise_multiplier, rate
            )
        if isinstance(self.ledger.draw_rate, Tensor):
            found /= self.ledger.draw_rate[persons]
        columns: dict[str, Column] = {
            question_column(name): {"value": found[:, None]} for name in self.ledger.questions
        }
        # a person's D grows with the norms of its rows that were drawn
        squares = torch.zeros(len(owners), dtype=torch.float64).index_add(
            0, owners.of_row[rows], ratios.double().cpu().square()
        )
        self.ledger.add(
            Contribution(persons, squares[persons], columns=columns),
            noise_multiplier=noise_multiplier,
        )

    def get_guess(self, question: str, example_ids: Ids = None) -> Guess:
        """How well any attacker can tell whether these owners, with all of their rows, are in the
        data, [ids].
        """
        asked = self._questions.get(question)
        if asked is not None and not asked.membership:
            raise ValueError(
                f"{question!r} changes all rows of a person, for which a run by row has no proven "
                "bound: ask Absent(), or train with unit='owner', where the question is about "
                "the whole person"
            )
        return super().get_guess(question, example_ids)

    def get_trace(self, example_ids: Ids = None) -> Estimate:
        """An estimate of Σ_r tr I_r ≥ tr I of these owners, [ids].

        Probes' errors of an owner's rows, which share batches, count as if all were off together.
        """
        rows = self._by_row()
        found, every = rows.get_trace(), torch.arange(rows.ids.num_examples)
        batches, total = rows._run_variances(every.to(rows.ledger.device))["trace"]
        path = (total - batches).clamp(min=0)
        run = self._together(batches) + self._together(path.sqrt()).square()
        value, error = self._together(found.value), self._together(found.standard_error)
        kind: Kind = "lower bound" if found.kind == "lower bound" else "estimate"
        estimate = Estimate(value, error, kind, positive=True, run_error=run.sqrt())
        return estimate[self.ids.places(example_ids)]

    def was_measured(self, example_ids: Ids = None) -> Tensor:
        """Whether the run says anything about these owners, bool [ids]."""
        rows = self._by_row().was_measured()
        told = (self._together(rows.long()) > 0) & (self.get_trace().value > 0)
        return told[self.ids.places(example_ids)]

    def get_num_coordinates(self, example_ids: Ids = None) -> Tensor:
        """d of these owners: the sum over their rows, [ids]."""
        return self._together(self._by_row().get_num_coordinates())[self.ids.places(example_ids)]

    def get_attribute_fil(self, example_ids: Ids = None) -> Estimate:
        """An estimate of Σ_r sqrt(I_jj of row r) ≥ sqrt(I_jj) of a value that all rows of an owner
        share, [ids, d].

        Its run error is, relative to the value, half of the trace's, and its probes' own.
        """
        rows, trace = self._by_row().get_attribute_fil(), self.get_trace()
        value, error = (
            self._together(each.nan_to_num(nan=0.0, posinf=math.inf))
            for each in (rows.value, rows.standard_error)
        )
        value = value.where(self.was_measured()[:, None], math.nan)
        assert trace.run_error is not None
        half = torch.where(trace.value > 0, trace.run_error / trace.value / 2, trace.run_error)[
            :, None
        ]
        together = torch.hypot(half * value, error).where(half.isfinite(), half)
        run_error = torch.where(value.isinf() | (half == 0), 0.0, together)
        found = replace(trace, value=value, standard_error=error, run_error=run_error)
        return found[self.ids.places(example_ids)]

    def _together(self, values: Tensor) -> Tensor:
        """The sums over the rows of each owner, [owners, …]."""
        values = values.cpu()
        return values.new_zeros(len(self.owners), *values.shape[1:]).index_add(
            0, self.owners.of_row, values
        )


# ------------------------------------------------------------------ one step


def absence_divergence(norm: Tensor, sample_rate: float | None) -> Tensor:
    """An upper bound of KL_t = KL(P ‖ φ) of one step about the absence of each person, [persons],
    in float64.

    Args:
        norm: ‖u_r‖, u_r = g̃_r/(σC), [persons, rows]; 0 for padding.
        sample_rate: q of Poisson sampling, in (0, 1]; None: the attacker knows the batch, these
            rows are in it, and KL_t ≤ (Σ_r ‖u_r‖)²/2.

    Guarantees:
        * A person with one row has the KL_t of :func:`torchfil.fisher.mechanism.step_divergence`.
        * The result is at most E(Σ_{r∈S} ‖u_r‖)²/2, that of known draws.
        * No set of rows is enumerated: the cost grows with their number, and 10,000 rows are fine.

    Example:
        >>> [
        ...     round(absence_divergence(torch.full((1, 12), 0.5), q).item(), 4)
        ...     for q in (0.01, 0.1, 1.0)
        ... ]
        [0.002, 0.196, 18.0]
    """
    norm = norm.detach().double()
    together, squares = norm.sum(dim=1).square(), norm.square().sum(dim=1)
    if sample_rate is None or sample_rate == 1:
        return together / 2
    known = (sample_rate**2 * together + sample_rate * (1 - sample_rate) * squares) / 2
    none, rows = torch.zeros_like(squares), norm.count_nonzero(dim=1)
    result = torch.where(rows > 1, known, step_divergence(squares, none, none, sample_rate))
    hidden = (sample_rate * rows <= _MOST_DRAWN) & (norm.amax(dim=1) <= _MOST_NORM)
    for part in filter(len, ((rows > 1) & hidden).nonzero()[:, 0].split(_AT_ONCE)):
        result[part] = torch.fmin(_on_a_line(norm[part], sample_rate), known[part])
    return result.clamp(min=0)


def _on_a_line(norm: Tensor, rate: float) -> Tensor:
    """KL of the mixture with centres X on a line against φ, [persons]."""
    step = norm.amax(dim=1, keepdim=True) / _STEPS
    weights = _sums(norm / step, rate)
    atoms = step * torch.arange(weights.shape[1]).to(step)

    # what lies beyond the grid counts as known to the attacker, by convexity
    mass = weights.sum(dim=1)
    beyond = (1 - mass).clamp(min=0) * norm.sum(dim=1).square() / 2
    return _mean_log(weights, atoms) - torch.special.xlogy(mass, mass) + beyond


def _mean_log(weights: Tensor, atoms: Tensor) -> Tensor:
    """E log Σ_j w_j exp(x_j y − x_j²/2) over y ~ Σ_j w_j N(x_j, 1), [persons]; x are the atoms."""
    low, high = atoms[:, -1:].clamp(max=0) - _REACH, atoms[:, -1:].clamp(min=0) + _REACH
    count = math.ceil(float((high - low).max()) / _SPACING)
    nodes = low + (high - low) * torch.linspace(
        0, 1, count + 1, dtype=atoms.dtype, device=atoms.device
    )
    bells = (-(nodes[:, None] - atoms[:, :, None]).square() / 2).exp() / math.sqrt(2 * math.pi)
    exponents = (weights.log() - atoms.square() / 2)[:, :, None] + atoms[:, :, None] * nodes[
        :, None
    ]
    density = (weights[:, None] @ bells)[:, 0]
    return (density * exponents.logsumexp(dim=1)).sum(dim=1) * (high - low)[:, 0] / count


def _sums(norm: Tensor, rate: float) -> Tensor:
    """The law of Σ_r n_r Bernoulli(q) on 0, 1, …, [persons, atoms], without what lies beyond.

    Each n_r is rounded up or down at random, with the same mean.
    """
    below = norm.floor()
    share = norm - below  # how often n_r is rounded up
    places = torch.arange(min(_ATOMS, (_STEPS + 1) * norm.shape[1] + 1), device=norm.device)
    weights = (places == 0).to(norm).expand(len(norm), -1)
    for size, more in zip(below.T[:, :, None].long(), share.T[:, :, None], strict=True):
        source, padded = (places - size).clamp(min=-1), torch.nn.functional.pad(weights, (2, 0))
        moved = (1 - more) * padded.gather(1, source + 2) + more * padded.gather(1, source + 1)
        weights = (1 - rate) * weights + rate * moved
    return weights


@lru_cache(maxsize=1024)
def person_rdp(
    rows: int, sample_rate: float, noise_multiplier: float, orders: tuple[float, ...]
) -> np.ndarray:
    """Rényi divergences of one step about a person with k rows, absent or not, the larger of both
    directions, [orders].

    P = Σ_j Binomial(j; k, q) N(j, σ²) against N(0, σ²) (Charles et al. 2024): by Kahane's
    inequality, no gradients of norms up to C have larger ones. With k/σ above 64, or k above 256,
    it is that of all rows drawn for sure, αk²/2σ².

    Args:
        rows: k ≥ 1.
        sample_rate: q in (0, 1].
        noise_multiplier: σ ≥ 0.
        orders: α > 1 each.

    Example:
        >>> person_rdp(3, 1.0, 2.0, (2.0,)), person_rdp(3, 0.01, 2.0, (2.0,)).round(6)
        (array([2.25]), array([0.000257]))
    """
    alpha, shift = (
        np.asarray(orders, dtype=float),
        rows / noise_multiplier if noise_multiplier else math.inf,
    )
    if sample_rate == 1 or max(shift, rows / 4) > _FARTHEST:
        return alpha * shift**2 / 2
    centres = np.linspace(0, shift, rows + 1)
    log_weights = stats.binom.logpmf(np.arange(rows + 1), rows, sample_rate) - centres**2 / 2

    # the integrands A^α φ and A^(1−α) φ are sums of bumps of width 1 between −(α−1)k/σ and αk/σ
    reach = alpha.max() * shift + _REACH + 3
    nodes = np.arange(-reach, reach, _SPACING)
    log_ratio = special.logsumexp(log_weights + np.outer(nodes, centres), axis=1)
    log_normal = stats.norm.logpdf(nodes) + math.log(_SPACING)
    moments = [
        special.logsumexp(power * log_ratio + log_normal) for power in (*alpha, *(1 - alpha))
    ]
    return np.asarray(np.reshape(moments, (2, -1)).max(axis=0) / (alpha - 1)).clip(min=0)
