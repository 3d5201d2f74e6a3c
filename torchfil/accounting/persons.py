"""What a run whose unit is the row says about persons with several rows.

Each of a person's rows r = 1 … k is drawn on its own at rate q, and clipped on its own. With u_r = g̃_r/s, s = σC, and
the other people's part subtracted, the step releases a draw from

    P = Σ_S w_S φ(· − Σ_{r∈S} u_r),   w_S = q^|S| (1−q)^(k−|S|),   φ = N(0, I), S any set of the rows.

P′ is the same with other gradients v_r: 0 if the person is absent, those of changed rows if all rows were changed. How
many rows a person has counts as public.

**Absence.** Let A = dP/dφ = Σ_S w_S exp(⟨U_S, o⟩ − ‖U_S‖²/2). By Kahane's convexity inequality (1985) the mean over
o ~ φ of a convex function of A grows with each inner product ⟨U_S, U_T⟩, because its derivative is half the mean of
F″(A) w_S w_T e^{…} e^{…} ≥ 0. All rows on one line have the largest inner products. So divergences of P from φ, in both
directions and of every order, are at most those of the scalar mixture with Σ_{r∈S} ‖u_r‖ in place of U_S; larger norms
give more. KL(P ‖ φ) of a scalar mixture with the random centre X = Σ_{r∈S} ‖u_r‖ also grows if X becomes more variable
in the convex order: log A is convex in o, and KL = sup_g E_P g − log E_φ e^g is attained at g = log A. So norms may be
rounded up or down at random to a grid, with the same mean.

**Change.** The mixture whose centres are X along one line, and ρX along another one, with the rows' smallest cosine c
between the lines: n_r = max(‖u_r‖, ‖v_r‖/ρ) rounded up to a grid, ρ = Σ‖v_r‖/Σ‖u_r‖, c = min_r ⟨u_r, v_r⟩/(ρ n_r²).
That no arrangement of the rows has a larger divergence was **checked numerically**, by gradient ascent over
arrangements of two and three rows in two and three dimensions. It is proved for c = −1, because KL grows with
⟨U_S, U_T⟩ and ⟨V_S, V_T⟩ and falls with ⟨U_S, V_T⟩, by the argument of Kahane's inequality.

**D over a run.** At a step that draws some of a person's k rows, KL_t of the whole person divided by 1 − (1−q)^k, the
probability of such a step, is added to the person's D, as KL_t/q is for an example; for one row they are the same. A
row that was not drawn counts with the gradients of its last participation. If there was none, the worst is assumed:
gradients at the clipping threshold, in opposite directions for a change. With known batches only the rows that were
drawn count.

**Fisher information.** About the coordinates of all rows together, tr I ≤ Σ_r tr I_r, because knowing which of the
other rows were drawn only helps an attacker. A value that all rows share has the sum of the rows' scores, so that for
it sqrt(tr I) ≤ Σ_r sqrt(tr I_r), by Minkowski's inequality.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import lru_cache

import numpy as np
import torch
from scipy import special, stats
from torch import Tensor

from torchfil.accounting.ids import ExampleIds
from torchfil.accounting.leakage import Ids, Leakage
from torchfil.accounting.ledger import Contribution, Ledger
from torchfil.accounting.owners import Owners
from torchfil.accounting.quantities import Conditions, Divergence, QuestionSpec
from torchfil.fisher.mechanism import step_divergence
from torchfil.fisher.results import Estimate, Kind

Questions = Mapping[str, QuestionSpec]
ByRow = Callable[[], Leakage]
PRODUCTS = "products of the questions"  # ‖g̃‖², ‖g̃′‖² and ⟨g̃, g̃′⟩ over C², of each answer, [batch, answers, 3]
_STEPS, _ATOMS = 8, 160  # of the grid, for the largest row and at most
_MOST_DRAWN, _MOST_NORM = 20, 8.0  # rows on average, and ‖u‖: with more, which rows are drawn is as good as known
_REACH, _SPACING, _AT_ONCE = 9.0, 0.25, 32  # of the nodes around the atoms, in standard deviations; persons
_FARTHEST = 64  # k/σ up to which drawing rows at random makes ε of a person small enough to mean something


class Persons(Leakage):
    """What such a run leaked, by owner: upper bounds, estimated from one run. Its ledger has the divergences alone.

    If steps were paused, they are missing, and the numbers are labelled as lower bounds.

    Args:
        owners: Whose each row is.
        questions: The run's questions by name.
        rows: Returns what the run leaked by row.
        how: How the sums are made.
        most: The largest possible ‖g̃‖/C of each row, [rows]; None: 1.
    """

    def __init__(self, owners: Owners, questions: Questions, rows: ByRow, how: Conditions, most: Tensor | None) -> None:
        super().__init__(Ledger(len(owners), 1, questions=questions), ExampleIds(len(owners), owners.keys), how)
        self.owners, self._by_row = owners, rows
        change = [float(not asked.membership) for asked in questions.values() for _ in asked.answers]
        worst = torch.tensor([(1.0, other, -other) for other in change], dtype=torch.float64).view(-1, 3)
        shares = torch.ones(len(owners.of_row)) if most is None else most.cpu()
        self.last = shares.square()[:, None, None] * worst  # as of each row's last participation, [rows, answers, 3]

    def book(self, rows: Tensor, products: Tensor, noise_multiplier: float, measured: float) -> None:
        """Add a step that drew these rows, [batch], with these ``PRODUCTS``; such steps are measured at this rate."""
        rate, owners, asked = self.conditions.sample_rate, self.owners, self.ledger.questions
        self.last[rows] = products.double().cpu()
        counted = torch.zeros(len(self.last)).index_fill(0, rows, 1.0) if rate is None else torch.ones(len(self.last))
        persons = owners.of_row[rows].unique()
        counts, found = owners.counts[persons], torch.empty(len(persons), self.last.shape[1], dtype=torch.float64)
        for count in counts.unique().tolist():
            own = torch.tensor(owners.rows(persons[counts == count].tolist())).view(-1, count)
            squares = self.last[own] * counted[own][..., None, None] / (noise_multiplier or 1.0) ** 2
            true, other, inner = squares.permute(3, 0, 2, 1).flatten(1, 2)  # [persons · answers, rows] each
            found[counts == count] = person_divergence(true, other, inner, rate).view(len(own), -1)
        found = found if noise_multiplier else torch.full_like(found, torch.inf)
        if rate is not None:
            found /= -torch.expm1(counts * torch.tensor(-rate, dtype=torch.float64).log1p())[:, None]
        added: dict[str, Tensor] = {}
        for name, part in zip(asked, found.split([len(each.answers) for each in asked.values()], dim=1), strict=True):
            added |= Divergence(name, asked[name]).added(part, measured, skipping=measured < 1)
        self.ledger.add(Contribution(persons, torch.zeros(len(persons)), additions=added))

    def get_trace(self, example_ids: Ids = None) -> Estimate:
        """tr I of these owners, at most: the sum over their rows, [ids]. Its error is not known."""
        return self._summed(self._by_row().get_trace().value, example_ids)

    def get_num_coordinates(self, example_ids: Ids = None) -> Tensor:
        """d of these owners: the sum over their rows, [ids]."""
        return self._summed(self._by_row().get_num_coordinates(), example_ids).value

    def get_attribute_fil(self, example_ids: Ids = None) -> Estimate:
        """sqrt(I_jj) of a value that all rows of an owner share, at most: the sum over the rows, [ids, d]."""
        return self._summed(self._by_row().get_attribute_fil().value, example_ids)

    def _summed(self, values: Tensor, example_ids: Ids) -> Estimate:
        sums = torch.zeros(len(self.owners), *values.shape[1:], dtype=values.dtype)
        value = sums.index_add(0, self.owners.of_row, values.cpu())[self.ids.places(example_ids)]
        return Estimate(value, value * torch.nan, self._kind(value), positive=True)

    def _kind(self, rows: Tensor) -> Kind:
        return "lower bound" if self._by_row().ledger.missed_steps else "upper bound"


# ------------------------------------------------------------------ one step


def person_divergence(squared: Tensor, squared_other: Tensor, product: Tensor, sample_rate: float | None) -> Tensor:
    """An upper bound of KL_t = KL(P ‖ P′) of one step about all rows of each person, [persons], in float64.

    Args:
        squared: ‖u_r‖², u_r = g̃_r/(σC), [persons, rows]; 0 for padding.
        squared_other: ‖v_r‖² of the alternative; 0 if the person is absent.
        product: ⟨u_r, v_r⟩.
        sample_rate: q of Poisson sampling, in (0, 1]; None: the attacker knows the batch, these rows are in it, and
            KL_t ≤ (Σ_r ‖u_r − v_r‖)²/2.

    Guarantees:
        * A person with one row has the KL_t of :func:`torchfil.fisher.mechanism.step_divergence`.
        * The result is at most E‖Σ_{r∈S} (u_r − v_r)‖²/2, taken as if all differences had one direction.
        * No set of rows is enumerated: the cost grows with their number, and 10,000 rows are fine.

    Example:
        >>> twelve, none = torch.full((1, 12), 0.25), torch.zeros(1, 12)
        >>> [round(person_divergence(twelve, none, none, q).item(), 4) for q in (0.01, 0.1, 1.0)]
        [0.002, 0.196, 18.0]
    """
    true, other, inner = (value.detach().double() for value in (squared, squared_other, product))
    gap = (true + other - 2 * inner).clamp(min=0)
    apart = gap.sqrt().sum(dim=1).square()
    if sample_rate is None or sample_rate == 1:
        return apart / 2
    known = (sample_rate**2 * apart + sample_rate * (1 - sample_rate) * gap.sum(dim=1)) / 2
    single = step_divergence(true.sum(dim=1), other.sum(dim=1), inner.sum(dim=1), sample_rate)
    larger = torch.maximum(true, other)
    rows = larger.count_nonzero(dim=1)
    result = torch.where(rows > 1, known, single)
    hidden = (sample_rate * rows <= _MOST_DRAWN) & (larger.amax(dim=1) <= _MOST_NORM**2)
    for part in filter(len, ((rows > 1) & hidden).nonzero()[:, 0].split(_AT_ONCE)):
        found = _on_two_lines(true[part].sqrt(), other[part].sqrt(), inner[part], sample_rate)
        result[part] = torch.fmin(found, known[part])
    return result.clamp(min=0)


def _on_two_lines(norm: Tensor, other: Tensor, inner: Tensor, rate: float) -> Tensor:
    """KL of the mixture with centres X on one line against that with ρX on a line at the cosine c, [persons]."""
    ratio = other.sum(dim=1) / norm.sum(dim=1)
    ratio = torch.where(ratio.isinf(), 1.0, ratio)[:, None]  # infinite: nothing but the alternative has gradients
    norm = torch.maximum(norm, (other / ratio).nan_to_num(0))
    cosine = (inner / (ratio * norm.square())).nan_to_num(1, posinf=1).amin(dim=1, keepdim=True).clamp(-1, 1)
    step = norm.amax(dim=1, keepdim=True) / _STEPS
    weights = _sums(norm / step, rate, ratio > 0)
    atoms = step * torch.arange(weights.shape[1]).to(step)

    # what lies beyond the grid counts as known to the attacker, by convexity
    mass = weights.sum(dim=1)
    beyond = (1 - mass).clamp(min=0) * (norm.sum(dim=1).square() * (1 + ratio * (ratio - 2 * cosine))[:, 0]) / 2
    log_other = _mean_log(weights, cosine * atoms, ratio * atoms) if ratio.any() else torch.special.xlogy(mass, mass)
    return _mean_log(weights, atoms, atoms) - log_other + beyond


def _mean_log(weights: Tensor, atoms: Tensor, centres: Tensor) -> Tensor:
    """E log Σ_j w_j exp(c_j y − c_j²/2) over y ~ Σ_j w_j N(x_j, 1), [persons]; x are the atoms, c the centres."""
    low, high = atoms[:, -1:].clamp(max=0) - _REACH, atoms[:, -1:].clamp(min=0) + _REACH
    count = math.ceil(float((high - low).max()) / _SPACING)
    nodes = low + (high - low) * torch.linspace(0, 1, count + 1, dtype=atoms.dtype, device=atoms.device)
    bells = (-(nodes[:, None] - atoms[:, :, None]).square() / 2).exp() / math.sqrt(2 * math.pi)
    exponents = (weights.log() - centres.square() / 2)[:, :, None] + centres[:, :, None] * nodes[:, None]
    density = (weights[:, None] @ bells)[:, 0]
    return (density * exponents.logsumexp(dim=1)).sum(dim=1) * (high - low)[:, 0] / count


def _sums(norm: Tensor, rate: float, up: Tensor) -> Tensor:
    """The law of Σ_r n_r Bernoulli(q) on 0, 1, …, [persons, atoms], without what lies beyond.

    Each n_r is rounded up, or at random with the same mean.
    """
    below = torch.where(up, (norm - 1e-9).ceil(), norm.floor())
    share = (norm - below).clamp(min=0)  # how often n_r is rounded up
    places = torch.arange(min(_ATOMS, (_STEPS + 1) * norm.shape[1] + 1), device=norm.device)
    weights = (places == 0).to(norm).expand(len(norm), -1)
    for size, more in zip(below.T[:, :, None].long(), share.T[:, :, None], strict=True):
        source, padded = (places - size).clamp(min=-1), torch.nn.functional.pad(weights, (2, 0))
        moved = (1 - more) * padded.gather(1, source + 2) + more * padded.gather(1, source + 1)
        weights = (1 - rate) * weights + rate * moved
    return weights


@lru_cache(maxsize=1024)
def person_rdp(rows: int, sample_rate: float, noise_multiplier: float, orders: tuple[float, ...]) -> np.ndarray:
    """Rényi divergences of one step about a person with k rows, absent or not, the larger of both directions, [orders].

    P = Σ_j Binomial(j; k, q) N(j, σ²) against N(0, σ²) (Charles et al. 2024): by Kahane's inequality, no gradients of
    norms up to C have larger ones. With k/σ above 64, or k above 256, it is that of
    all rows drawn for sure, αk²/2σ².

    Args:
        rows: k ≥ 1.
        sample_rate: q in (0, 1].
        noise_multiplier: σ ≥ 0.
        orders: α > 1 each.

    Example:
        >>> person_rdp(3, 1.0, 2.0, (2.0,)), person_rdp(3, 0.01, 2.0, (2.0,)).round(6)
        (array([2.25]), array([0.000257]))
    """
    alpha, shift = np.asarray(orders, dtype=float), rows / noise_multiplier if noise_multiplier else math.inf
    if sample_rate == 1 or max(shift, rows / 4) > _FARTHEST:
        return alpha * shift**2 / 2
    centres = np.linspace(0, shift, rows + 1)
    log_weights = stats.binom.logpmf(np.arange(rows + 1), rows, sample_rate) - centres**2 / 2

    # the integrands A^α φ and A^(1−α) φ are sums of bumps of width 1 between −(α−1)k/σ and αk/σ
    reach = alpha.max() * shift + _REACH + 3
    nodes = np.arange(-reach, reach, _SPACING)
    log_ratio = special.logsumexp(log_weights + np.outer(nodes, centres), axis=1)
    log_normal = stats.norm.logpdf(nodes) + math.log(_SPACING)
    moments = [special.logsumexp(power * log_ratio + log_normal) for power in (*alpha, *(1 - alpha))]
    return np.asarray(np.reshape(moments, (2, -1)).max(axis=0) / (alpha - 1)).clip(min=0)
