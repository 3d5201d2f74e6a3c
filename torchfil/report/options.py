"""What would keep the policy: the noise with which every rule is kept, and its cost in the user's metric.

A σ is **predicted and then judged by the gate's own rules**; it is offered only if it keeps all of them, those at the
level "error" at least. At fixed gradients, with σ' for σ and f = (σ'/σ)²,

==========================  ===================================================================================
MSE bound, its lower end    times f
errors of attributes        times √f
D of a question             over f, exactly where batches are known; at secret draws less, or 7 % more near q = 1
ε                           computed anew from σ', the sampling rate and the steps (Mironov, Talwar and Zhang 2019)
individual ε                at most that
too few draws               Binomial(steps, q) < 5, the largest of 95 % of the counts over all examples
==========================  ===================================================================================

A linear model's release has closed forms, and the prediction is exact. Another training takes other gradients and other
draws: the smallest lower end of many examples differs by a quarter in one of ten pairs of runs that differ in nothing
but chance. So what gradients leak is predicted with a **margin** on σ', :data:`MARGIN`. It was chosen on 88 runs of ten
kinds, of which 366 pairs were predicted from one another, with up to 5 times the noise: the smallest lower end, its
quantiles and the largest D were as promised in 95 % each, and all together in 92 %. With 1.25 for 1.5 it is 91 % and
83 %. These runs were made before D was capped by what the noise allows, and not repeated. Trainings whose intervals are
wide differ most.

Only what was tried is offered: more noise, up to :data:`LARGEST` times as much. Another number of steps is not: a trial
of a run that was drawn too rarely kept all rules where the prediction broke two.
``tests/report/test_options.py`` trains runs of other kinds again as advised.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from scipy.stats import binom

from torchfil.accounting.quantities import FEWEST_PARTICIPATIONS
from torchfil.fisher.mechanism import largest_divergences
from torchfil.gate.policy import Policy
from torchfil.gate.rules import RULES, Verdict
from torchfil.run.baselines import error_ratios, is_told
from torchfil.run.composed import epsilon_at, rdp_of
from torchfil.run.saved_run import SavedRun, jumps_of
from torchfil.run.unit import counted

MARGIN = 1.5  # on σ'
LARGEST = 5.0  # times σ: as far as it was tried
_EXACT = 1000.0  # times σ: as far as a linear model's closed forms are followed
_AT_ONCE = 2**16  # examples that are predicted together
_OF_EXAMPLES = ("min_", "max_gain_", "max_true_")  # begin rules on every single example: a part after the other
_AUDITED, _WORSENING, _FEW = "audited_epsilon_below_claimed", "max_worsening", "max_share_too_few_draws"
_OF_NOISE = ("max_epsilon", "max_individual_epsilon")  # follow from the noise, and need no margin
_SAME = ("participations", "missed", "sampling_error", "public_class", "clip_weight")
_POWERS = {"fil": -0.5, "mse_bound": 1.0, "mse_bound_low": 1.0}  # of f, by column


@dataclass(frozen=True)
class Options:
    """What would help.

    Attributes:
        sigma: The least noise that is predicted to keep every rule; None: none is known, or nothing need be done.
        change: The same in a sentence, with its cost in the user's metric; "" where nothing is predicted.
        curve: (σ, the smallest ratio to a blind guess's error, whether it was measured), ascending in σ.
        limit: What the policy asks of that ratio; None: nothing.
        others: What helps with the rules that no noise is known to keep, a sentence each.
    """

    sigma: float | None = None
    change: str = ""
    curve: list[tuple[float, float, bool]] = field(default_factory=list)
    limit: float | None = None
    others: list[str] = field(default_factory=list)


def options_of(run: SavedRun, policy: Policy, verdicts: list[Verdict]) -> Options:
    """What would keep a policy that is broken; nothing where it is kept.

    Where rules at the level "error" are broken, those at "warn" may stay so.
    """
    broken = [verdict for verdict in verdicts if not verdict.passed]
    sigma, linear = _sigma(run), run.about.get("kind") == "linear"
    if not broken:
        return Options()
    if any(verdict.key == _AUDITED and verdict.tells for verdict in broken):  # predictions rest on what may be wrong
        return Options(others=[RULES[_AUDITED].advice])

    # the least noise for each rule that must hold: those that stop a release, and those that hold now
    stop = [verdict for verdict in broken if verdict.level == "error"] or broken
    needed = dict.fromkeys(verdict.key for verdict in verdicts if verdict.passed or verdict in stop)
    least: dict[str, float | None] = dict.fromkeys(verdict.key for verdict in stop)
    if sigma and is_told(run).any():
        least = {key: _least_noise(run, policy, key, sigma) for key in needed if key != _WORSENING or key in least}
    noises = [noise for noise in least.values() if noise is not None]
    noise, change = None, "No noise alone is known to keep every rule."
    if len(noises) == len(least):
        noise, warns = max(noises), len(broken) - len(stop)
        still = f", with {counted(warns, 'warning')}" * bool(warns)
        change = f"Noise σ = {noise:g} {'keeps' if linear else 'is predicted to keep'} every rule{still}"
        change += f"; its cost: {_cost(run, noise)}."
    lost = [verdict for verdict in verdicts if verdict.key in least and least[verdict.key] is None]
    others = [RULES[verdict.key].remedy(verdict) for verdict in lost]

    ratios, curve = error_ratios(run, policy.blind_error), list[tuple[float, float, bool]]()
    if sigma and ratios is not None and not np.isnan(ratios).all() and not jumps_of(run.about):
        drawn = np.geomspace(sigma, max(4 * sigma, noise or 0.0), 7).tolist()
        curve = [(each, float(np.nanmin(ratios)) * each / sigma, each == sigma) for each in drawn]
    return Options(noise, change, curve, policy.min_error_share, list(dict.fromkeys(others)))


def _least_noise(run: SavedRun, policy: Policy, key: str, sigma: float) -> float | None:
    """The least σ' of three digits, σ or more, at which the rule is predicted to hold; None: none that was tried."""
    margin, most = (1.0, _EXACT) if run.about.get("kind") == "linear" else (MARGIN, LARGEST)
    if key == _FEW:  # of fresh draws, whatever the noise
        return sigma if _num_untold(run) <= policy.max_share_too_few_draws * len(run) else None
    parts = run.slices(_AT_ONCE) if key.startswith(_OF_EXAMPLES) else [run]
    if key in _OF_NOISE:  # the same for everybody
        parts, margin = [run.take(np.argsort(run.columns.get("participations", np.zeros(len(run))))[-1:])], 1.0
    least = sigma
    for part in parts:

        def holds(noise: float, part: SavedRun = part) -> bool:
            then = with_noise(part, noise, margin, epsilon=key in _OF_NOISE)
            return all(verdict.passed for verdict in RULES[key].measure(then, policy))

        if holds(least):
            continue
        low, least = least, most * sigma
        if low >= least or not holds(least):
            return None
        while least > 1.005 * low:
            middle = math.sqrt(low * least)
            low, least = (low, middle) if holds(middle) else (middle, least)
        least = rounded_up(least)
    return least


def with_noise(run: SavedRun, sigma: float, margin: float = 1.0, *, epsilon: bool = True) -> SavedRun:
    """What the rules of a gate would see of the run with other noise, at fixed gradients.

    Args:
        run: A run whose σ is known, or some of its examples.
        sigma: σ'.
        margin: What gradients leak is predicted at σ'/margin. What the noise itself allows of a D needs none.
        epsilon: Whether ε is wanted, which takes a while.
    """
    spent = _epsilon_then(run, sigma) if epsilon else None
    then = _leaking(run, (sigma / margin / (_sigma(run) or math.nan)) ** 2, spent, noise_multiplier=sigma)
    rate, steps = (run.about["mechanism"].get(name) for name in ("sample_rate", "steps"))
    if not rate or not steps:  # known batches, or a linear model
        return then
    largest = largest_divergences([(sigma, rate, steps)])
    high: list[Any] = [_Times(each.divergence_high, 1.0, largest[not each.membership]) for each in then.questions]
    asked = zip(then.questions, high, strict=True)
    return replace(then, questions=[replace(each, divergence_high=own) for each, own in asked])


def _leaking(run: SavedRun, factor: float, epsilon: float | None, **mechanism: float) -> SavedRun:
    """The run with f times the MSE bounds, this ε and another mechanism; only what rules read is kept."""

    def scaled(record: Any, power: float, *names: str) -> Any:
        parts = {name: getattr(record, name) for name in names}
        return replace(record, **{k: _Times(own, factor**power) for k, own in parts.items() if own is not None})

    columns = {name: run.columns[name] for name in _SAME if name in run.columns}
    columns |= {name: run.columns[name] * factor**power for name, power in _POWERS.items() if name in run.columns}
    if epsilon is not None and "epsilon" in run.columns:
        columns["epsilon"] = np.full(len(run), epsilon)
    attributes = None if run.attributes is None else scaled(run.attributes, 0.5, "error", "error_low")
    asked = [scaled(each, -1.0, "divergence", "divergence_high") for each in run.questions]
    about = {**run.about, "epsilon": epsilon, "mechanism": {**run.about["mechanism"], **mechanism}}
    return replace(run, about=about, columns=columns, attributes=attributes, questions=asked)


def _sigma(run: SavedRun) -> float | None:
    mechanism = run.about.get("mechanism") or {}
    return mechanism.get("noise_multiplier", mechanism.get("sigma"))


class _Times:
    """A table times a number, at most another, of which only what is read is computed."""

    def __init__(self, table: Any, factor: float, most: float = math.inf) -> None:
        self.table, self.factor, self.most, self.shape = table, factor, most, table.shape

    def __getitem__(self, where: Any) -> np.ndarray:
        return np.minimum(np.asarray(self.table[where]) * self.factor, self.most)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self[:], dtype=dtype)


def _num_untold(run: SavedRun) -> int:
    """How many examples as many fresh draws leave untold: with Poisson sampling at most so many in 95 % of the runs."""
    rate, steps, measured = (run.about["mechanism"].get(name) for name in ("sample_rate", "steps", "fil_rate"))
    if rate is None or not steps or run.about.get("merged"):  # known batches, closed forms, or means over runs
        return int((~is_told(run)).sum())
    share = binom.cdf(FEWEST_PARTICIPATIONS - 1, steps, rate * (measured or 1.0))
    return int(binom.ppf(0.95, len(run), share))


def _epsilon_then(run: SavedRun, sigma: float) -> float | None:
    """ε with this σ; None where the file does not tell it.

    It is Opacus's RDP accountant's, no smaller than what other accountants find, and with more noise never above the
    run's own. Where the same formula gives less than that for the run itself, the run's noise was not the same at all
    steps.
    """
    now, before = run.about.get("epsilon"), _sigma(run) or math.nan
    if not now or not run.about.get("delta") or not run.about["mechanism"].get("steps"):
        return None
    own = now if sigma >= before else math.inf
    if epsilon_of(run, [before]) >= 0.99 * now:
        own = min(own, epsilon_of(run, [sigma]))
    return own if own < math.inf else None


def epsilon_of(run: SavedRun, sigmas: Sequence[float]) -> float:
    """ε of trainings like the run, one with each σ: Opacus's RDP accountant's, at its orders.

    See :func:`torchfil.run.composed.rdp_of`.
    """
    return epsilon_at(rdp_of(run, sigmas), run.about["delta"])


def _cost(run: SavedRun, sigma: float) -> str:
    """What σ' costs: the score of a linear model; of others nobody measured it. Pilots spent ε, too."""
    linear, metrics = run.about.get("linear") or {}, run.about.get("metrics") or {}
    pairs = np.asarray(sorted(linear.get("score_by_noise") or []), dtype=np.float64).reshape(-1, 2)
    if not len(pairs):
        now = ", ".join(f"{name} {metric['value']:.3g}" for name, metric in metrics.items())
        pilots = (run.about.get("noise_choice") or {}).get("pilot_noise_multipliers")
        told = f"not measured (now {now})" if now else "not measured"
        if not pilots or not run.about.get("delta"):
            return told
        return f"{told}; ε = {epsilon_of(run, [*pilots, sigma]):.3g} with its pilots"
    name, blind = linear.get("score_name", "score"), linear.get("blind_score", 0.0)
    now, then = np.interp(np.log([_sigma(run) or math.nan, sigma]), np.log(pairs[:, 0]), pairs[:, 1])
    if then <= blind:
        at_most = f"{name} below 0" if blind == 0 else f"{name} {then:.2f}, no more than the commonest class has"
        return f"{at_most}: the model would be useless"
    if sigma > pairs[-1, 0]:
        return f"not measured (now {name} {now:.2f})"
    return f"{name} {then:.2f} (now {now:.2f})"


def rounded_up(value: float) -> float:
    """The least number of three significant digits that is not smaller.

    Example:
        >>> rounded_up(1.2301), rounded_up(2.0)
        (1.24, 2.0)
    """
    step = 10.0 ** (math.floor(math.log10(value)) - 2)
    return float(f"{math.ceil(value / step - 1e-9) * step:.5g}")
