"""What would keep the policy: options, how many rules each would break, and its cost in the user's metric.

An option is **predicted and then judged by the gate's own rules**. At fixed gradients, with σ' for σ, T' steps for T
and f = (σ'/σ)²·(T/T'),

==========================  ===================================================================================
MSE bound, its lower end    times f
errors of attributes        times √f
D of a question             over f, exactly where batches are known; at secret draws less, or 7 % more near q = 1
ε                           computed anew from σ', the sampling rate and T' (Mironov, Talwar and Zhang 2019)
too few draws               Binomial(T', q) < 5, the largest of 95 % of the counts over all examples
==========================  ===================================================================================

A linear model's release has closed forms, and the prediction is exact. Another training takes other gradients and other
draws: the smallest lower end of many examples differs by a quarter in one of ten pairs of runs that differ in nothing
but chance, and longer runs have wider intervals. So what gradients leak is predicted with a **margin** on σ',
:data:`MARGIN` times T'/T. It was chosen on 88 runs of ten kinds, of which 366 pairs were predicted from one another,
with up to 5 times the noise and 3 times the steps: the smallest lower end, its quantiles and the largest D were as
promised in 95 % each, and all together in 92 %. With 1.25 for 1.5 it is 91 % and 83 %. These runs were made before D
was capped by what the noise allows, and not repeated. Trainings whose intervals are wide differ most.

Only what was tried is offered: more noise, up to :data:`LARGEST` times as much, and more steps where some examples were
drawn too rarely. Fewer steps would leave more of them untold. Individual ε is not predicted.
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

MARGIN = 1.5  # on σ'
LARGEST = 5.0  # times σ: as far as it was tried
_EXACT = 1000.0  # times σ: as far as a linear model's closed forms are followed
_AT_ONCE = 2**16  # examples that are predicted together
_OF_EXAMPLES = ("min_", "max_gain_", "max_true_")  # begin rules on every single example: a part after the other
_INDIVIDUAL, _AUDITED = "max_individual_epsilon", "audited_epsilon_below_claimed"
_NOT_PREDICTED = (_INDIVIDUAL, "max_worsening")
_SAME = ("participations", "missed", "sampling_error", "public_class", "clip_weight")
_POWERS = {"fil": -0.5, "mse_bound": 1.0, "mse_bound_low": 1.0}  # of f, by column


@dataclass(frozen=True)
class Option:
    """A change of the run.

    Attributes:
        change: What to change, e.g. "Noise σ = 2.7".
        broken: The titles of the rules that the prediction still breaks; empty: it keeps the policy.
        rules: How many rules the policy has.
        cost: What it costs in the user's metric, e.g. "accuracy 0.91 (now 0.93)", or "not measured".
    """

    change: str
    broken: list[str]
    rules: int
    cost: str


@dataclass(frozen=True)
class Options:
    """What would help.

    Attributes:
        rows: The options, the best first; empty where nothing need be done, or nothing is known to help.
        curve: (σ, the smallest ratio to a blind guess's error, whether it was measured), ascending in σ.
        limit: What the policy asks of that ratio; None: nothing.
        others: What helps with broken rules that no option keeps, a sentence each.
    """

    rows: list[Option] = field(default_factory=list)
    curve: list[tuple[float, float, bool]] = field(default_factory=list)
    limit: float | None = None
    others: list[str] = field(default_factory=list)


_Found = tuple[float, set[str], Option]


def options_of(run: SavedRun, policy: Policy, verdicts: list[Verdict]) -> Options:
    """The options for a run whose policy is broken; none where it is kept."""
    broken = [verdict for verdict in verdicts if not verdict.passed]
    sigma, found = _sigma(run), list[_Found]()
    if not broken:
        return Options()
    if any(verdict.key == _AUDITED and verdict.tells for verdict in broken):  # predictions rest on what may be wrong
        return Options(others=[RULES[_AUDITED].advice])

    # one with more steps only where fresh draws would leave too many examples untold
    no_noise_helps = jumps_of(run.about) and any(RULES[verdict.key].fisher for verdict in broken)
    if sigma and is_told(run).any() and not no_noise_helps:
        for steps in dict.fromkeys((run.about["mechanism"].get("steps") or None, _enough_steps(run, policy))):
            found += _option(run, policy, verdicts, sigma, steps)
    found.sort(key=lambda each: len(each[2].broken))
    kept = set().union(*(keys for _, keys, _ in found))
    others = [RULES[verdict.key].remedy(verdict) for verdict in broken if verdict.key not in kept]
    if found and any(verdict.key == _INDIVIDUAL for verdict in verdicts):
        others.append("Individual ε is not predicted: the options leave its rule out.")

    ratios, curve = error_ratios(run, policy.blind_error), list[tuple[float, float, bool]]()
    if sigma and ratios is not None and not np.isnan(ratios).all() and not jumps_of(run.about):
        noises = np.geomspace(sigma, max([4 * sigma, *(noise for noise, *_ in found)]), 7).tolist()
        curve = [(noise, float(np.nanmin(ratios)) * noise / sigma, noise == sigma) for noise in noises]
    return Options([option for *_, option in found], curve, policy.min_error_share, list(dict.fromkeys(others)))


def _option(run: SavedRun, policy: Policy, verdicts: list[Verdict], sigma: float, steps: int | None) -> list[_Found]:
    """The least σ' with so many steps that keeps all rules that noise can keep: σ', the keys that it keeps, the option.

    Nothing where it would keep no broken rule, or break one that holds now.
    """
    then, longer = (run, 1.0) if steps is None else (with_steps(run, steps), steps / run.about["mechanism"]["steps"])
    judged = [verdict for verdict in verdicts if verdict.key not in _NOT_PREDICTED]
    least = {key: _least_noise(then, policy, key, sigma, longer) for key in dict.fromkeys(each.key for each in judged)}
    failing = {verdict.key for verdict in judged if not verdict.passed}
    lost = {key for key, noise in least.items() if noise is None}
    if lost - failing or not failing - lost:
        return []
    noise = max(each for each in least.values() if each is not None)
    change = f"{steps:,} steps with noise σ = {noise:g}" if longer > 1 else f"Noise σ = {noise:g}"
    titles = [RULES[v.key].named(v) for v in judged if v.key in lost and not v.passed]
    return [(noise, failing - lost, Option(change, titles, len(judged), _cost(then, noise)))]


def _least_noise(run: SavedRun, policy: Policy, key: str, sigma: float, longer: float) -> float | None:
    """The least σ' of three digits, σ or more, at which the rule is predicted to hold; None: none that was tried."""
    margin, most = (1.0, _EXACT) if run.about.get("kind") == "linear" else (longer * MARGIN, LARGEST)
    parts = run.slices(_AT_ONCE) if key.startswith(_OF_EXAMPLES) else [run]
    if key == "max_epsilon":  # the same for everybody
        parts, margin = [run.take(np.argsort(run.columns.get("participations", np.zeros(len(run))))[-1:])], 1.0
    least = sigma
    for part in parts:

        def holds(noise: float, part: SavedRun = part) -> bool:
            then = with_noise(part, noise, margin, epsilon=key == "max_epsilon")
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
    spent = _epsilon_then(run, sigma, 1.0) if epsilon else None
    then = _leaking(run, (sigma / margin / (_sigma(run) or math.nan)) ** 2, spent, noise_multiplier=sigma)
    rate, steps = (run.about["mechanism"].get(name) for name in ("sample_rate", "steps"))
    if not rate or not steps:  # known batches, or a linear model
        return then
    largest = largest_divergences([(sigma, rate, steps)])
    high: list[Any] = [_Times(each.divergence_high, 1.0, largest[not each.membership]) for each in then.questions]
    asked = zip(then.questions, high, strict=True)
    return replace(then, questions=[replace(each, divergence_high=own) for each, own in asked])


def with_steps(run: SavedRun, steps: int) -> SavedRun:
    """The same with other steps, of which every one leaks alike, and fresh draws.

    Those whom they leave untold are as many as predicted; those whom they newly tell of are like the others.
    """
    longer, told = steps / run.about["mechanism"]["steps"], is_told(run)
    then = _leaking(run, 1 / longer, _epsilon_then(run, _sigma(run) or 0.0, longer), steps=steps)
    few = np.zeros(len(run), dtype=bool)
    few[np.argsort(run.columns.get("participations", told), kind="stable")[: _num_untold(run, steps)]] = True
    columns = dict(then.columns)
    for name in columns.keys() - {"public_class"}:
        typical = np.median(columns[name][told]) if told.any() else math.nan
        columns[name] = np.where(~told & ~few, typical, columns[name])
    columns["mse_bound_low"] = np.where(few, 0.0, columns.get("mse_bound_low", columns["mse_bound"]))
    return replace(then, columns=columns)


def _leaking(run: SavedRun, factor: float, epsilon: float | None, **mechanism: float) -> SavedRun:
    """The run with f times the MSE bounds, this ε and another mechanism; only what rules read is kept."""

    def scaled(record: Any, power: float, *names: str) -> Any:
        parts = {name: getattr(record, name) for name in names}
        return replace(record, **{k: _Times(own, factor**power) for k, own in parts.items() if own is not None})

    columns = {name: run.columns[name] for name in _SAME if name in run.columns}
    columns |= {name: run.columns[name] * factor**power for name, power in _POWERS.items() if name in run.columns}
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


def _num_untold(run: SavedRun, steps: int) -> int:
    """How many examples so many steps leave untold: with Poisson sampling at most so many in 95 % of the runs."""
    mechanism, longer = run.about["mechanism"], steps / run.about["mechanism"]["steps"]
    rate, measured = mechanism.get("sample_rate"), mechanism.get("fil_rate") or 1.0
    if rate is None or run.about.get("merged"):  # known batches, or means over runs: as often as before, by the step
        rarely = run.columns.get("participations", 0) * measured * longer < FEWEST_PARTICIPATIONS
        return int((~is_told(run) & (rarely | (longer <= 1))).sum())
    share = binom.cdf(FEWEST_PARTICIPATIONS - 1, steps, rate * measured)
    return int(binom.ppf(0.95, len(run), share))


def _enough_steps(run: SavedRun, policy: Policy) -> int | None:
    """The least T' of two digits, T or more, that leaves few enough untold; T where that is not known, or too many."""
    steps, most = run.about["mechanism"].get("steps") or None, policy.max_share_too_few_draws * len(run)
    longer = [int(rounded_up(more * steps, 2)) for more in np.geomspace(1.0, 30.0, 100)[1:]] if steps else []
    return next((each for each in (steps, *longer) if each and _num_untold(run, each) <= most), steps)


def _epsilon_then(run: SavedRun, sigma: float, length: float) -> float | None:
    """ε with this σ and ``length`` times as many steps; None where the file does not tell it.

    It is Opacus's RDP accountant's, no smaller than what other accountants find, and with more noise and no more steps
    never above the run's own. Where the same formula gives less than that for the run itself, the run's noise was not
    the same at all steps.
    """
    now, before = run.about.get("epsilon"), _sigma(run) or math.nan
    if not now or not run.about.get("delta") or not run.about["mechanism"].get("steps"):
        return None
    own = now if sigma >= before and length <= 1 else math.inf
    if epsilon_of(run, [before]) >= 0.99 * now:
        own = min(own, epsilon_of(run, [sigma], length))
    return own if own < math.inf else None


def epsilon_of(run: SavedRun, sigmas: Sequence[float], length: float = 1.0) -> float:
    """ε of trainings like the run, one with each σ, ``length`` times as long: Opacus's RDP accountant's, at its orders.

    See :func:`torchfil.run.composed.rdp_of`.
    """
    return epsilon_at(rdp_of(run, sigmas, length), run.about["delta"])


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


def rounded_up(value: float, digits: int = 3) -> float:
    """The least number of so many significant digits that is not smaller.

    Example:
        >>> rounded_up(1.2301), rounded_up(2.0), rounded_up(0.010001, 2)
        (1.24, 2.0, 0.011)
    """
    step = 10.0 ** (math.floor(math.log10(value)) + 1 - digits)
    return float(f"{math.ceil(value / step - 1e-9) * step:.{digits + 2}g}")
