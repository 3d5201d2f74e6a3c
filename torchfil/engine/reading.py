"""What the engine's readings compute: individual ε, bounds beyond the ledger's, averages over runs,
a summary.

Each is a function of the run; :class:`torchfil.engine.engine.FILPrivacyEngine` describes them for
users.

Individual ε is each example's own RDP, from its own clipped gradient norms. If the sensitivity of a
Gaussian mechanism to example i is ‖g̃_i‖ ≤ C, a step has for i the RDP of the noise multiplier
σC/‖g̃_i‖ (Feldman & Zrnic 2021; Yu et al. 2022). Norms are rounded up to a grid
(:mod:`torchfil.accounting.norms`), so that the numbers are computed once per grid value at the end.
Between participations the last known norm is used, or C if there is none yet; therefore
``norm_refresh`` is recommended. Without Poisson sampling batches may be known, and only the steps
that used the example count. The result is **output-specific** (Yu et al. 2022): the norms depend on
what this run released. It is an estimate; a guarantee needs a filter (Feldman & Zrnic 2021; Koskela
et al. 2023).

Reconstruction robustness for everybody is a bound on every attacker's chance of success. With an
example's own norms, ‖g̃‖ in place of C, it is an **estimate** for the same reasons.
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from opacus.accountants import IAccountant, RDPAccountant
from opacus.accountants.analysis.rdp import compute_rdp, get_privacy_spent
from scipy import special
from torch import Tensor

from torchfil.accounting.leakage import Leakage
from torchfil.accounting.norms import NormHistory
from torchfil.accounting.persons import person_rdp
from torchfil.accounting.rows import first_of_equal
from torchfil.bounds import (
    Bracket,
    PopulationBound,
    Prior,
    mse_from_rdp,
    population_mse_bound,
    replace_one_rdp,
    rero,
)
from torchfil.bounds.reconstruction import success_by_counts
from torchfil.engine.assembly import PrivateTraining
from torchfil.engine.run import Run, weights_in_words
from torchfil.engine.saving.data import fitted_prior
from torchfil.fisher.results import Estimate
from torchfil.private import Private

Ids = Iterable[Hashable] | Tensor | None
Releases = Sequence[tuple[float, float, int]]  # a DP accountant's history: σ, q, how many steps
_AT_ONCE = 65_536  # examples that are processed together
_MOST_SETTINGS = 32  # different (σ, q) that are composed without rounding


def check_delta(delta: float | None, needed_by: str = "") -> None:
    """Raise unless 0 < δ < 1; ``needed_by`` names the method that was called without it."""
    if delta is None:
        raise TypeError(f"{needed_by} needs delta=, e.g. 1e-5.")
    if not 0 < delta < 1:
        raise ValueError(f"delta={delta} must lie strictly between 0 and 1")


def epsilons(run: Run, accountant: IAccountant, example_ids: Ids, delta: float) -> Estimate:
    """Individual ε at δ, [ids], never above the accountant's."""
    check_delta(delta)
    rows, history = run.ids.places(example_ids), run.whole_history
    value = individual_epsilon(history, rows.to(history.device), delta)
    if history.steps:
        value = value.clamp(max=spent_epsilon(accountant, delta))
    return Estimate(value, torch.full_like(value, float("nan")), "estimate")


def fil_of_rows(training: PrivateTraining, leakage: Leakage, row_ids: Ids) -> Estimate:
    """η̄ of single rows of owners, [ids]: sqrt(Σ I_jj/d) over a row's own coordinates.

    The errors of its coordinates count as if all were off together, because they come from the same
    probes.
    """
    run: Any = training.run
    rows = run.row_ids.places(row_ids)
    owners, each = run.owners.of_row[rows].unique(return_inverse=True)
    diagonal = leakage.get_attribute_fil(
        [run.owners.keys[owner] for owner in owners.tolist()]
    ).source
    assert diagonal is not None  # it is the root of I_jj
    own = (
        training.passes.examples(owners.tolist())[each]
        .of_rows(run.owners.place[rows])
        .to(diagonal[0].value.device)
    )
    parts = diagonal[0].value, diagonal[0].standard_error
    value, error = (torch.where(own, part[each], 0.0).sum(dim=1) for part in parts)
    return Estimate(value, error, diagonal[0].kind, positive=True).raised(
        0.5, own.sum(dim=1).clamp(min=1)
    )


def robustness(
    training: PrivateTraining,
    releases: Releases,
    example_ids: Ids,
    prior_success: float | Sequence[float],
) -> Estimate:
    """The largest success rate of any attacker who guesses the example, [ids] or [ids, priors],
    from its own norms.
    """
    run = training.run
    prior = torch.as_tensor(prior_success, dtype=torch.float64)
    priors = prior.reshape(-1).tolist()
    rows = run.ids.rows(example_ids)[1]
    ledger, history = run.whole_ledger, run.whole_history
    # known batches: only the example's own steps
    if run.options.sample_rate is None and ledger is not None:
        noise = min((sigma for sigma, *_ in releases), default=1.0) * float(
            training.optimizer.max_grad_norm
        )
        value = robustness_with_known_batches(
            ledger.sums["squared_norm"][rows.to(ledger.device)], noise, priors
        )
    else:
        value = individual_robustness(history, rows.to(history.device), priors)
        value = value.minimum(everybodys_robustness(releases, priors, tolerance=0.02).high)
    value = value.reshape(len(rows), *prior.shape)
    return Estimate(value, torch.full_like(value, float("nan")), "estimate")


def individual_epsilon(history: NormHistory, rows: Tensor, delta: float) -> Tensor:
    """ε_i at δ of these examples, [rows], output-specific, by the RDP accountant's own orders and
    conversion.
    """
    if history.noiseless:
        return torch.full((len(rows),), math.inf, dtype=torch.float64)
    if history.steps == 0:
        return torch.zeros(len(rows), dtype=torch.float64)
    multipliers = history.multipliers()
    needed, places = first_of_equal(history.untouched(rows))
    result = [torch.zeros(0, dtype=torch.float64)]
    for part in rows[needed].split(_AT_ONCE):
        counts = history.counts_of(part).cpu().double().numpy()
        used = np.flatnonzero(counts.sum(axis=0)).tolist() or [-1]  # any level, if nobody took part
        per_step = np.stack(
            [_rdp_per_step(history.sample_rate, multipliers[level]) for level in used]
        )
        result.append(torch.from_numpy(_epsilon_from_rdp(counts[:, used] @ per_step, delta)))
    return torch.cat(result)[places.cpu()]


def spent_epsilon(accountant: IAccountant, delta: float) -> float:
    """The accountant's ε at δ, bit for bit.

    For "rdp" what was computed once for q and σ is not computed again.

    At a large δ, Opacus's formulas go below 0, where they mean 0; before the first step, some of
    them fail.
    """
    check_delta(delta)
    if not accountant.history:
        return 0.0
    if accountant.mechanism() != "rdp":
        epsilon = accountant.get_epsilon(delta)
    else:
        rdp = sum(
            _rdp_per_step(float(q), float(sigma)) * steps for sigma, q, steps in accountant.history
        )
        epsilon = get_privacy_spent(orders=RDPAccountant.DEFAULT_ALPHAS, rdp=rdp, delta=delta)[0]
    return max(float(epsilon), 0.0)  # in this order, NaN stays NaN


def epsilon_over_time(
    history: Releases, steps: Sequence[float], delta: float, rows: int = 1
) -> np.ndarray:
    """The RDP accountant's ε at δ after each of these numbers of steps, [t], for its history of (σ,
    q, steps).

    It is that of a person with so many rows, drawn and clipped one by one; see :func:`person_rdp`.
    """
    rdp = np.zeros((len(steps), len(RDPAccountant.DEFAULT_ALPHAS)))
    before = 0
    for sigma, q, count in history:
        rdp += np.outer((np.asarray(steps) - before).clip(0, count), _rdp_per_step(q, sigma, rows))
        before += count
    return _epsilon_from_rdp(rdp, delta)


def _epsilon_from_rdp(rdp: np.ndarray, delta: float) -> np.ndarray:
    """The least ε over all orders, [k], from RDP [k, orders], which is overwritten."""
    orders = np.asarray(RDPAccountant.DEFAULT_ALPHAS, dtype=float)
    rdp += np.log((orders - 1) / orders) - (math.log(delta) + np.log(orders)) / (orders - 1)
    return np.fmin.reduce(rdp, axis=1).clip(min=0)


@lru_cache(maxsize=2**14)  # a scheduled σ has as many values as steps
def _rdp_per_step(q: float, noise_multiplier: float, rows: int = 1) -> np.ndarray:
    orders = RDPAccountant.DEFAULT_ALPHAS
    if rows > 1:
        return person_rdp(rows, float(q), float(noise_multiplier), tuple(orders))
    return np.asarray(compute_rdp(q=q, noise_multiplier=noise_multiplier, steps=1, orders=orders))


def everybodys_robustness(
    releases: Sequence[tuple[float, float, int]],
    prior_success: Sequence[float],
    tolerance: float = 1e-3,
) -> Bracket:
    """The success of any attacker against anybody, [priors], for the accountant's history of (σ, q,
    steps).

    With more than 32 different settings, σ is rounded down to steps of 2 %: the upper end stays
    valid, and the lower end is π₀.
    """
    prior = torch.as_tensor(prior_success, dtype=torch.float64)
    if not releases:
        return Bracket(prior, prior)
    sigmas, rates, steps = (list(column) for column in zip(*releases, strict=True))
    if min(sigmas) == 0:  # nothing is robust
        return Bracket(torch.ones_like(prior), torch.ones_like(prior))
    rounded = len({(float(sigma), float(q)) for sigma, q, _ in releases}) > _MOST_SETTINGS
    if rounded:
        lowest, rates = min(sigmas), [max(rates)] * len(rates)
        sigmas = [
            lowest * 1.02 ** math.floor(math.log(sigma / lowest) / math.log(1.02))
            for sigma in sigmas
        ]
    found = rero(prior_success, q=rates, noise_multiplier=sigmas, steps=steps, tolerance=tolerance)
    return Bracket(prior, found.high) if rounded else found


def individual_robustness(
    history: NormHistory, rows: Tensor, prior_success: Sequence[float]
) -> Tensor:
    """The same from the examples' own norms, rounded up, [rows, priors]; the batches are secret."""
    if history.noiseless:
        return torch.ones(len(rows), len(prior_success), dtype=torch.float64)
    if history.steps == 0 or len(rows) == 0:
        return torch.tensor(prior_success, dtype=torch.float64).expand(len(rows), -1).clone()
    counts = history.counts_of(rows).cpu().numpy()
    return torch.from_numpy(
        success_by_counts(prior_success, history.sample_rate, history.multipliers(), counts)
    )


def robustness_with_known_batches(
    squared_norm: Tensor, noise_std: float, prior_success: Sequence[float]
) -> Tensor:
    """Φ(Φ⁻¹(π₀) + sqrt(Σ‖g̃‖²)/s), [rows, priors], for an attacker who knows every batch (two
    normal laws).

    Args:
        squared_norm: Σ‖g̃‖² over the steps that used the example, [rows].
        noise_std: s = σC, the smallest of the run.
        prior_success: π₀, [priors].
    """
    distance = (
        squared_norm.double().cpu().numpy()[:, None] ** 0.5 / noise_std if noise_std > 0 else np.inf
    )
    shifted = special.ndtri(np.asarray(prior_success, dtype=float)) + distance
    return torch.from_numpy(
        special.ndtr(np.broadcast_to(shifted, (len(squared_norm), len(prior_success))))
    )


# ------------------------------------------------------------------ bounds and a summary


def population_bound(
    training: PrivateTraining, prior: Prior | tuple[Any, Any] | None
) -> PopulationBound:
    """van Trees: the MSE that no attacker gets below, on average over people."""
    leakage = training.run.leakage
    if not leakage.ledger.same_coordinates:
        raise ValueError(
            "examples have different numbers of private coordinates; take those of one length: "
            "torchfil.bounds.population_mse_bound(engine.totals.get_trace(ids), d, prior)"
        )
    trace = leakage.get_trace()
    if prior is None:
        rows, prior = fitted_prior(training.passes)
        trace = trace[torch.from_numpy(rows)]
    elif isinstance(prior, tuple):
        prior = Prior.box(*prior, num_coordinates=leakage.num_coordinates)
    elif not isinstance(prior, Prior):
        raise TypeError(
            f"prior={type(prior).__name__}: a law fitted to values alone ignores what is public; "
            "leave it out, or pass Prior.gaussian(values, known=[labels, …])"
        )
    return population_mse_bound(trace, leakage.num_coordinates, prior)


def rdp_bound(releases: Releases, num_coordinates: int, diameters: object, reading: str) -> float:
    """Theorem 1 of Guo et al. 2022, with the run's Rényi divergence."""
    if reading not in ("replace-one", "paper"):
        raise ValueError(f"reading={reading!r} must be 'replace-one' or 'paper'")

    def rdp(order: float) -> float:
        parts = [
            compute_rdp(q=q, noise_multiplier=sigma, steps=steps, orders=order)
            for sigma, q, steps in releases
        ]
        return sum(map(float, parts))

    epsilon = replace_one_rdp(rdp) if reading == "replace-one" else rdp(2.0)
    return mse_from_rdp(
        epsilon, torch.as_tensor(diameters, dtype=torch.float64).expand(num_coordinates)
    )


def summary(training: PrivateTraining | None, accountant: str) -> list[tuple[str, str]]:
    """What is known about a run, as (name, text).

    With several processes, reading it would need all of them.
    """
    if training is None:
        return [("accountant", accountant), ("run", "none yet: call make_private")]
    run, optimizer = training.run, training.optimizer
    noise = f"σ = {float(optimizer.noise_multiplier):g}, C = {float(optimizer.max_grad_norm):g}"
    lines = [("accountant", accountant), ("noise and clipping", noise)]
    if run.ranks is not None:
        return [*lines, ("run", f"rank {run.ranks.rank}; call metrics() on all ranks to read it")]
    if run.ledger is None:
        return [*lines, ("run", "no step yet")]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a warning would repeat that steps were paused
        return [*lines, *run.leakage.summary().lines()]


# ------------------------------------------------------------------ several runs


def average(runs: Sequence[tuple[PrivateTraining, Releases]]) -> Leakage:
    """The average over repeated runs with the same mechanism, each given with its accountant's
    history.
    """
    if not runs:
        raise ValueError("merge needs at least one engine")
    if len({id(training) for training, _ in runs}) < len(runs):
        raise ValueError(
            "merge got one engine twice: a run agrees with itself, whatever its error; pass "
            "different runs"
        )
    mean = Leakage.average([training.run.leakage for training, _ in runs])
    mechanisms = sorted({_mechanism_in_words(*each) for each in runs})
    got = "; ".join(text if len(text) < 500 else f"{text[:500]} …" for text in mechanisms)
    if len(mechanisms) != 1:
        raise ValueError(
            "runs to average must share noise, clipping (and clip_weights), subsampling, the "
            f"number of steps and what is private; got {got}"
        )
    return mean


def _mechanism_in_words(training: PrivateTraining, releases: Releases) -> str:
    """In words, what must be the same in repetitions of a run."""
    options, optimizer = training.run.options, training.optimizer
    steps: Counter[tuple[float, float]] = Counter()
    for sigma, q, count in releases:
        steps[float(sigma), float(q)] += count
    noise = ", ".join(
        f"{count} steps of σ = {sigma}, q = {q}" for (sigma, q), count in sorted(steps.items())
    )

    words = weights_in_words(training.run.clip_weights), training.run.rows_in_words
    limits = optimizer.max_grad_norms or float(optimizer.max_grad_norm)
    clipping = ", ".join([f"C = {limits}, clip {options.clip.name!r}", *filter(None, words)])

    # An amplification may be any object, so its factors are compared, not its name.
    mechanism = options.mechanism(
        float(optimizer.noise_multiplier) or 1.0, float(optimizer.max_grad_norm)
    )
    factors = torch.cat(mechanism.weights(mechanism.noise_std * torch.tensor([0.1, 1.0, 10.0])))
    amplification = ", ".join(f"{value:.6g}" for value in factors * mechanism.noise_std**2)

    private = options.private or Private()
    lengths = None if private.lengths is None else "given"  # functions differ only by their address
    private = replace(private, coordinates=_listed(private.coordinates), lengths=lengths)
    return f"{noise}, {clipping}, amplification by {amplification}, {private}"


def _listed(coordinates: object) -> Any:
    """Tensors and arrays as lists, whose text is complete."""
    if isinstance(coordinates, Mapping):
        return {key: _listed(value) for key, value in coordinates.items()}
    listed = coordinates.tolist() if hasattr(coordinates, "tolist") else coordinates
    return list(listed) if isinstance(listed, tuple | range) else listed
