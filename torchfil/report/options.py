"""What would keep the policy: the noise with which every rule is kept, and its cost in the user's
metric.

A σ is **predicted and then judged by the gate's own rules**; it is offered only if it keeps all of
them, those at the level "error" at least. At fixed gradients, with σ' for σ and f = (σ'/σ)²,

==========================  ====================================================================
MSE bound, its lower end    times f
errors of attributes        times √f
D of a question             over f where batches are known; else less, or 7 % more near q = 1
ε                           computed anew from σ', q and the steps (Mironov, Talwar and Zhang)
individual ε                at most that
too few draws               Binomial(steps, q) < 5, the largest of 95 % of all examples' counts
==========================  ====================================================================

A linear model's release has closed forms, and the prediction is exact. Another training takes other
gradients and other draws: the smallest lower end of many examples differs by a quarter in one of
ten pairs of runs that differ in nothing but chance. So what gradients leak is predicted with a
**margin** on σ', :data:`MARGIN`. It was chosen on 88 runs of ten kinds, of which 366 pairs were
predicted from one another, with up to 5 times the noise: the smallest lower end, its quantiles and
the largest D were as promised in 95 % each, and all together in 92 %. With 1.25 for 1.5 it is 91 %
and 83 %. These runs were made before D was capped by what the noise allows, and not repeated.
Trainings whose intervals are wide differ most.

Only what was tried is offered: more noise, up to :data:`LARGEST` times as much. Another number of
steps is not: a trial of a run that was drawn too rarely kept all rules where the prediction broke
two. ``tests/report/test_options.py`` trains runs of other kinds again as advised.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from scipy.stats import binom

from torchfil.accounting.sums import FEWEST_PARTICIPATIONS
from torchfil.fisher.mechanism import largest_divergences
from torchfil.gate.policy import Policy
from torchfil.gate.rules import RULES, Verdict
from torchfil.run.baselines import is_told
from torchfil.run.composed import epsilon_at, rdp_of
from torchfil.run.matching import setting
from torchfil.run.saved_run import SavedRun
from torchfil.run.unit import counted

MARGIN = 1.5  # on σ'
LARGEST = 5.0  # times σ: as far as it was tried
_EXACT = 1000.0  # times σ: as far as a linear model's closed forms are followed
_AT_ONCE = 2**16  # examples that are predicted together
# begin rules on every single example: a part after the other
_OF_EXAMPLES = ("min_", "max_gain_", "max_true_")
_AUDITED, _WORSENING, _FEW = (
    "audited_epsilon_below_claimed",
    "max_worsening",
    "max_share_too_few_draws",
)
_OF_NOISE = ("max_epsilon", "max_individual_epsilon")  # follow from the noise, and need no margin
_SAME = ("participations", "missed", "paused", "sampling_error", "public_class", "clip_weight")
_POWERS = {"fil": -0.5, "mse_bound": 1.0, "mse_bound_low": 1.0}  # of f, by column


@dataclass(frozen=True)
class Options:
    """What would help.

    Attributes:
        sigma: The least noise that is predicted to keep every rule; None: none is known, or nothing
            need be done.
        change: The same in a sentence, with its cost in the user's metric; "" where nothing is
            predicted.
        others: What helps with the rules that no noise is known to keep, a sentence each.
    """

    sigma: float | None = None
    change: str = ""
    others: list[str] = field(default_factory=list)


def options_of(run: SavedRun, policy: Policy, verdicts: list[Verdict]) -> Options:
    """What would keep a policy that is broken; nothing where it is kept.

    Where rules at the level "error" are broken, those at "warn" may stay so.
    """
    broken = [verdict for verdict in verdicts if not verdict.passed]
    if not broken:
        return Options()
    # predictions rest on what may be wrong
    if any(verdict.key == _AUDITED and verdict.tells for verdict in broken):
        return Options(others=[RULES[_AUDITED].advice])

    # those that stop a release, and those that hold now
    stop = [verdict for verdict in broken if verdict.level == "error"] or broken
    held = [verdict for verdict in verdicts if verdict.passed and verdict.key != _WORSENING]
    least = _least_noises(run, policy, stop, held)
    noises = [noise for noise in least.values() if noise is not None]
    lost = [verdict for verdict in verdicts if verdict.key in least and least[verdict.key] is None]
    others = list(dict.fromkeys(RULES[verdict.key].remedy(verdict) for verdict in lost))
    if lost:
        return Options(None, "No noise alone is known to keep every rule.", others)
    change = _in_words(run, max(noises), len(broken) - len(stop))
    return Options(max(noises), change, others)


def _in_words(run: SavedRun, noise: float, warnings: int) -> str:
    keeps = "keeps" if run.about.get("kind") == "linear" else "is predicted to keep"
    still = f", with {counted(warnings, 'warning')}" if warnings else ""
    return f"Noise σ = {noise:g} {keeps} every rule{still}; its cost: {_cost(run, noise)}."


def _least_noises(
    run: SavedRun, policy: Policy, stop: Sequence[Verdict], held: Sequence[Verdict]
) -> dict[str, float | None]:
    """The least noise for each rule that must hold.

    None: none that was tried, or nothing can be predicted.
    """
    sigma = _sigma(run)
    if not sigma or not is_told(run).any():
        return dict.fromkeys(verdict.key for verdict in stop)
    return {
        key: _least_noise(run, policy, key, sigma)
        for key in dict.fromkeys(each.key for each in (*stop, *held))
    }


def _least_noise(run: SavedRun, policy: Policy, key: str, sigma: float) -> float | None:
    """The least σ' of three digits, σ or more, at which the rule is predicted to hold.

    None: none that was tried.
    """
    margin, most = (1.0, _EXACT) if run.about.get("kind") == "linear" else (MARGIN, LARGEST)
    if key == _FEW:  # of fresh draws, whatever the noise
        return sigma if _num_untold(run) <= policy.max_share_too_few_draws * len(run) else None
    of_examples = key.startswith(_OF_EXAMPLES)
    parts = run.slices(_AT_ONCE) if of_examples else iter([run])
    if key in _OF_NOISE:  # the same for everybody
        parts, margin = (
            iter(
                [run.take(np.argsort(run.columns.get("participations", np.zeros(len(run))))[-1:])]
            ),
            1.0,
        )
    least = sigma
    for part in parts:

        def holds(noise: float, part: SavedRun = part) -> bool:
            then = with_noise(part, noise, margin, epsilon=key in _OF_NOISE, tables=of_examples)
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


def with_noise(
    run: SavedRun, sigma: float, margin: float = 1.0, *, epsilon: bool = True, tables: bool = True
) -> SavedRun:
    """What the rules of a gate would see of the run with other noise, at fixed gradients.

    Args:
        run: A run whose σ is known, or some of its examples.
        sigma: σ'.
        margin: What gradients leak is predicted at σ'/margin. What the noise itself allows of a D
            needs none.
        epsilon: Whether ε is wanted, which takes a while.
        tables: Whether attributes and questions are, which may take much memory.
    """
    factor = (sigma / margin / (_sigma(run) or math.nan)) ** 2
    spent = _epsilon_then(run, sigma) if epsilon else None
    columns = {name: run.columns[name] for name in _SAME if name in run.columns}
    columns |= {
        name: run.columns[name] * factor**power
        for name, power in _POWERS.items()
        if name in run.columns
    }
    if spent is not None and "epsilon" in run.columns:
        columns["epsilon"] = np.full(len(run), spent)
    mechanism = {**run.about["mechanism"], "noise_multiplier": sigma}
    then = replace(
        run, about={**run.about, "epsilon": spent, "mechanism": mechanism}, columns=columns
    )
    if not tables:
        return then
    attributes = run.attributes
    if attributes is not None:
        low = (
            None
            if attributes.error_low is None
            else np.asarray(attributes.error_low) * math.sqrt(factor)
        )
        attributes = replace(
            attributes, error=np.asarray(attributes.error) * math.sqrt(factor), error_low=low
        )

    # known batches and a linear model's release have no cap
    rate, steps = (setting(run, f"mechanism.{name}") for name in ("sample_rate", "steps"))
    caps = largest_divergences([(sigma, rate, steps)]) if rate and steps else (math.inf, math.inf)
    questions = [
        replace(
            asked,
            divergence=np.asarray(asked.divergence) / factor,
            divergence_high=np.minimum(
                np.asarray(asked.divergence_high) / factor, caps[not asked.membership]
            ),
        )
        for asked in run.questions
    ]
    return replace(then, attributes=attributes, questions=questions)


def _sigma(run: SavedRun) -> float | None:
    own: float | None = setting(run, "mechanism.noise_multiplier")
    return setting(run, "mechanism.sigma") if own is None else own


def _num_untold(run: SavedRun) -> int:
    """How many examples as many fresh draws leave untold: with Poisson sampling at most so many in
    95 % of the runs.
    """
    rate, steps = (setting(run, f"mechanism.{name}") for name in ("sample_rate", "steps"))
    # known batches, closed forms, or means over runs
    if rate is None or not steps or run.about.get("merged"):
        return int((~is_told(run)).sum())
    share = binom.cdf(FEWEST_PARTICIPATIONS - 1, steps, rate)
    return int(binom.ppf(0.95, len(run), share))


def _epsilon_then(run: SavedRun, sigma: float) -> float | None:
    """ε with this σ; None where the file does not tell it.

    It is Opacus's RDP accountant's, no smaller than what other accountants find, and with more
    noise never above the run's own. Where the same formula gives less than that for the run itself,
    the run's noise was not the same at all steps.
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
    return epsilon_at(np.sum([rdp_of(run, sigma) for sigma in sigmas], axis=0), run.about["delta"])


def _cost(run: SavedRun, sigma: float) -> str:
    """What σ' costs: the score of a linear model.

    Of others nobody measured it. Pilots spent ε, too.
    """
    linear = run.about.get("linear") or {}
    if not linear.get("score_by_noise"):
        metrics = (run.about.get("metrics") or {}).items()
        now = ", ".join(f"{name} {metric['value']:.3g}" for name, metric in metrics)
        told = f"not measured (now {now})" if now else "not measured"
        pilots = setting(run, "noise_choice.pilot_noise_multipliers")
        if not pilots or not run.about.get("delta"):
            return told
        return f"{told}; ε = {epsilon_of(run, [*pilots, sigma]):.3g} with its pilots"
    name, blind = linear.get("score_name", "score"), linear.get("blind_score", 0.0)
    noises, scores = np.asarray(sorted(linear["score_by_noise"]), dtype=np.float64).T
    now, then = np.interp(np.log([_sigma(run) or math.nan, sigma]), np.log(noises), scores)
    if then <= blind:
        at_most = (
            f"{name} below 0"
            if blind == 0
            else f"{name} {then:.2f}, no more than the commonest class has"
        )
        return f"{at_most}: the model would be useless"
    if sigma > noises[-1]:
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
