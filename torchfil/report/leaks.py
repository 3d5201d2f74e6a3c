"""The questions and attributes that are not protected, and how much more noise would protect them.

Everything is measured as the gate measures it (:mod:`torchfil.run.baselines`): exposed is whose least error, at the
lower end, lies below a blind guess's, of all inputs or of an attribute; a question is not protected where any attacker
tells the true answer from another, equally likely one, in more than the allowed share of cases above one half.

Questions also stand beside the data's own prior: "guessed correctly in 71 % of cases instead of 39 %". A run keeps
D_a = KL(P ‖ P_a) from an example's true answer t to every other, P_a the law of all that is released. Let the answers
be as likely before as they are common among the examples, π. Whoever names the commonest is right in max π of the
cases; whoever sees the release, and names a on A_a, in

    Σ_a π_a P_a(A_a) ≤ Σ_a π_a P_r(A_a) + Σ_a π_a TV(P_a, P_r) ≤ max π + Σ_{a≠r} π_a TV(P_a, P_r)

for any answer r, since the A_a share all releases among them. TV(P_t, P_a) follows from D_a, and TV is a distance:
TV(P_a, P_r) ≤ TV(P_t, P_a) + TV(P_t, P_r). The smaller bound of r = t and r = the commonest answer is taken; with two
answers that is :func:`torchfil.guessing.largest_success`, and between two normal laws the best attacker's own success.

It binds **every attacker to whom the answers are as likely before as they are common**, on average over an answer that
is drawn so and over the release. Somebody who knows more of the person beforehand starts from more than max π. And the
mean over answers hides those with a rare one: :func:`torchfil.run.baselines.gain_over_guessing`, between two
equally likely answers, does not, and says who is not protected.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from scipy.special import ndtr

from torchfil.gate.gate import concerned, factor_for_all
from torchfil.gate.rules import (
    RULES,
    Verdict,
    divergence_of_gain,
    format_distinct,
    lower_ends,
    rounded_up,
    worst_divergence,
)
from torchfil.glm.guesses import best_accuracy
from torchfil.guessing import divergence_of_rate, largest_total_variation
from torchfil.report.formats import number
from torchfil.report.summary import FALSE_POSITIVE_RATE, AttributeSummary, Report
from torchfil.run import baselines
from torchfil.run.saved_run import QuestionRecord, SavedRun

GAIN = 0.1  # above one half: what the template of a policy allows


@dataclass(frozen=True)
class PriorGuess:
    """How often an answer is named rightly by somebody who knows how common each is.

    Attributes:
        blind: Without the model: the share of the commonest answer.
        most: With all that was released, at most, of the most exposed example.
        mean: The same, on average over the examples.
    """

    blind: float
    most: float
    mean: float


@dataclass(frozen=True)
class Leak:
    """A question or an attribute that is not protected.

    Attributes:
        name: Of the question or attribute.
        factor: By how much σ² would have to grow, at fixed gradients, until it were protected.
        examples: Of how many examples; rounded or in words in public; None: not published.
        success: Of a question: how often the worst example's answer is told from another, equally likely one.
        prior: Of a question: the same beside the data's own prior; None: not known.
        rate: Of a question in public: right at 1 % false alarms.
        error: Of an attribute: how close an unbiased guess may come, written.
        blind: Of an attribute: what a blind guess is off by, written.
        unit: Of both.
        share: Of an attribute in public: of a blind guess's error.
    """

    name: str
    factor: float
    examples: int | str | None
    success: float | None = None
    prior: PriorGuess | None = None
    rate: float | None = None
    error: str = ""
    blind: str = ""
    unit: str = ""
    share: float | None = None


@dataclass(frozen=True)
class Leaks:
    """What is not protected.

    Attributes:
        questions: How many were asked.
        attributes: How many were tracked.
        found: What is not protected, the worst first, questions before attributes.
        unknown: The attributes whose error cannot be held against anything.
        factor: By how much σ² would have to grow until all of it were protected; 1: it is.
    """

    questions: int
    attributes: int
    found: list[Leak]
    unknown: list[AttributeSummary]

    @property
    def factor(self) -> float:
        """The largest of what is found; 1 where nothing is."""
        return max((leak.factor for leak in self.found), default=1.0)


def unprotected(report: Report) -> Leaks:
    """The questions and attributes that are not protected."""
    summary, policy = report.summary, report.policy
    if report.run is None:
        found = [_public_questions(report), _public_attributes(report)]
    else:
        found = [_questions(report, report.run), _attributes(report, report.run)]

    # what a policy states serves as a blind guess, too
    stated = {} if policy is None else policy.attribute_spread
    unknown = [a for a in summary.attributes if a.error and not a.share and a.name not in stated]
    if policy is not None and policy.blind_error is not None:
        unknown = []
    ranked = [leak for leaks in found for leak in sorted(leaks, key=lambda leak: -leak.factor)]
    return Leaks(len(summary.questions), len(summary.tracked), ranked, unknown)


def _questions(report: Report, run: SavedRun) -> list[Leak]:
    limit = None if report.policy is None else report.policy.max_gain_over_guessing
    limit = GAIN if limit is None else limit
    measured, leaks = baselines.status_of(run) != baselines.NOT_MEASURED, []
    for question in run.questions:
        gains = baselines.gain_over_guessing(question)[measured]
        wrong = int((~(gains <= limit)).sum())
        if wrong:
            target = divergence_of_gain(limit, question.law)
            factor = (worst_divergence(run, question.name) or 0.0) / target if target > 0 else math.inf
            success, prior = 0.5 + float(np.nanmax(gains)), prior_guess(question, measured)
            leaks.append(Leak(question.name, factor, wrong, success=success, prior=prior))
    return leaks


def _public_questions(report: Report) -> list[Leak]:
    """From the published levels alone; a rate of 5 % at 1 % false alarms is taken for protected."""
    leaks = []
    for question in sorted(report.summary.questions, key=lambda q: -q.rate.get("0", 0.0)):
        above = question.above["0.05"]
        if above != 0 and "0" in question.rate:
            rate = min(question.rate["0"], 1.0)
            high = divergence_of_rate(rate, FALSE_POSITIVE_RATE) if rate < 1 else math.inf
            leaks.append(Leak(question.name, high / divergence_of_rate(0.05, FALSE_POSITIVE_RATE), above, rate=rate))
    return leaks


def _attributes(report: Report, run: SavedRun) -> list[Leak]:
    """Those whose blind guess is known and beaten."""
    if run.attributes is None:
        return []
    policy, leaks = report.policy, []
    given = (None, None) if policy is None else (policy.attribute_spread, policy.blind_error)
    blind = baselines.blind_errors(run, *given)
    for place, (name, unit) in enumerate(zip(run.attributes.names, run.attributes.units, strict=True)):
        exposed, usual = baselines.attribute_exposure(run, place, float(blind[place])), float(blind[place])
        if exposed.any():
            # the closest that a guess of somebody's may come; NaN is not known, and counted as exposed
            errors = np.asarray(run.attributes.shown[:, place], dtype=np.float64)[exposed]
            least = float(np.nanmin(errors)) if not np.isnan(errors).all() else 0.0
            factor = (usual / least) ** 2 if least > 0 else math.inf
            written, close = format_distinct(usual, least)
            leaks.append(Leak(name, factor, int(exposed.sum()), error=close, blind=written, unit=unit))
    return leaks


def _public_attributes(report: Report) -> list[Leak]:
    """From the published shares alone."""
    leaks = []
    for attribute in report.summary.attributes:
        share = min(attribute.share.values(), default=1.0)
        if share < 1 and attribute.exposed != 0:
            factor = share**-2 if share > 0 else math.inf
            leaks.append(Leak(attribute.name, factor, attribute.exposed, share=share))
    return leaks


def prior_guess(question: QuestionRecord, rows: np.ndarray) -> PriorGuess | None:
    """The question at the data's own prior; None where the run does not tell the true answers, or some D.

    Args:
        question: Of a saved run.
        rows: Which examples were measured, [n] booleans.

    Example:
        >>> divergence = np.array([[0.0, 0.02], [0.02, 0.0], [0.0, 0.0002], [0.0, 0.0]])
        >>> asked = QuestionRecord("sex", ["f", "m"], True, divergence, divergence)
        >>> found = prior_guess(asked, np.array([True, True, True, False]))
        >>> f"{found.blind:.3f} {found.most:.3f} {found.mean:.3f}"  # 2/3, and up to 1/3 · sqrt(D/2) more
        '0.667 0.700 0.690'
    """
    shares = baselines.answer_shares(question, rows)
    if shares is None:
        return None
    prior = np.asarray(list(shares.values()))
    success = largest_success_at(question, prior)[rows]
    if np.isnan(success).any():
        return None
    return PriorGuess(float(prior.max()), float(success.max()), float(success.mean()))


def largest_success_at(question: QuestionRecord, prior: np.ndarray) -> np.ndarray:
    """How often any attacker with this prior names the right answer at most, at the upper ends of D, [n].

    Args:
        question: A complete one: the true answer is among its own.
        prior: π, [m].
    """
    high = np.asarray(question.divergence_high, dtype=np.float64)
    truth = np.asarray(question.divergence).argmin(axis=1)
    if question.law == "normal" and len(prior) == 2:
        distances = np.sqrt(2 * high.max(axis=1))[:, None, None] * (1 - np.eye(2))
        return best_accuracy(distances, np.broadcast_to(prior, high.shape)).value

    # from the true answer to every other, [n, m]
    known = ~np.isnan(high)
    variation = np.full(high.shape, np.nan)
    if question.law == "normal":
        variation = 2 * ndtr(np.sqrt(high / 2)) - 1
    else:
        variation[known] = largest_total_variation(torch.from_numpy(high[known])).numpy()
    np.put_along_axis(variation, truth[:, None], 0.0, axis=1)

    # around the true answer, or around the commonest
    commonest = int(prior.argmax())
    beside = np.minimum(variation + variation[:, commonest, None], 1.0)
    beside[:, commonest] = 0.0
    return np.minimum(prior.max() + np.minimum(variation @ prior, beside @ prior), 1.0)


# ---------------------------------------------------------------------- what to do about it


FEW = 0.1  # up to this share of the examples, sparing them is better than noise for all


@dataclass(frozen=True)
class Advice:
    """What would help.

    Attributes:
        case: "policy" (rules are broken), "nothing", "baseline" (no blind guess is known), "measure" (of some examples
            the run does not tell enough), "unpublished" (how much noise rests on numbers that are not published) or
            "noise" (for everything that was measured).
        kept: Whether there is a policy, and it is kept.
        factor: (σ'/σ)²; None: noise alone does not help, or nothing need be done.
        sigma: σ'; None where σ is not known.
        steps: How many of the run's steps would do the same; 0: none, or not known.
        helped: Of how many broken rules.
        others: What helps with the other broken rules.
        given: What the noise would give, as (what, name, now, then): "smallest" (MSE bound), "exposed", "question".
        spare: How many alone need it, where they are few.
        spare_by: The code that spares them.
    """

    case: str
    kept: bool = False
    factor: float | None = None
    sigma: float | None = None
    steps: int = 0
    helped: int = 0
    others: list[str] = field(default_factory=list)
    given: list[tuple[str, str, float, float]] = field(default_factory=list)
    spare: int = 0
    spare_by: list[str] = field(default_factory=list)


def advise(report: Report, leaks: Leaks) -> Advice:
    """What would keep the policy where it is broken; otherwise what could be better, or that nothing need be done."""
    broken = [verdict for verdict in report.verdicts or [] if not verdict.passed]
    if broken:
        factor, others = factor_for_all(broken)
        remedies = list(
            dict.fromkeys(RULES[verdict.key].remedy(verdict) for verdict in others)
        )  # one may serve several
        found = Advice("policy", helped=len(broken) - len(others), others=remedies)
        return found if factor is None else _with_noise(report, found, factor, broken)

    kept, exposed = report.verdicts is not None, report.num_exposed
    if leaks.factor <= 1 and exposed in (None, 0):
        return Advice("baseline" if exposed is None else "nothing", kept)

    # the σ at which a blind guess would be as good as any estimate; of a public page, from what it publishes
    summary, blind = report.summary, report.blind_error
    end = summary.exposure[0].mse_bound if summary.exposure else math.inf
    end = end if summary.lowest_end is None else summary.lowest_end
    needed = 1.0 if blind is None else blind**2 / end if end > 0 else math.inf
    factor = max(leaks.factor, needed)
    if factor <= 1 or (report.run is None and needed < factor == math.inf):
        # in public: too few are exposed, a rate is rounded to 100 %, or a blind guess is made from private data
        return Advice("unpublished", kept)
    return _with_noise(report, Advice("noise", kept), factor, []) if factor < math.inf else Advice("measure", kept)


def _with_noise(report: Report, found: Advice, factor: float, broken: list[Verdict]) -> Advice:
    """The advice with a rounded σ, the steps that would do the same, what that gives, and whom to spare instead."""
    steps, sigma = report.about("mechanism", "steps"), None
    if report.sigma is not None:
        sigma = rounded_up(report.sigma * math.sqrt(factor))
        factor = (sigma / report.sigma) ** 2
    fewer = math.floor(steps / factor) if isinstance(steps, int) and steps > 1 else 0
    found = replace(found, factor=factor, sigma=sigma, steps=fewer)
    if report.run is None:
        return found
    spare, by = _sparing(report, report.run, broken, factor)
    return replace(found, given=_given(report, report.run, factor), spare=spare, spare_by=by)


def _given(report: Report, run: SavedRun, factor: float) -> list[tuple[str, str, float, float]]:
    """What f = (σ'/σ)² would give: the smallest bound, how many are exposed, the worst question."""
    given, low, now = list[tuple[str, str, float, float]](), lower_ends(run), int(report.exposed_rows.sum())
    if len(low) and 0 < low[0] < math.inf:
        given.append(("smallest", "", float(low[0]), float(factor * low[0])))
    if now:
        given.append(("exposed", "", now, int(baselines.is_exposed(np.sqrt(factor * low), report.blind_error).sum())))
    if run.questions:
        worst = max(run.questions, key=lambda question: worst_divergence(run, question.name) or 0.0)
        high = np.asarray(worst.divergence_high, dtype=np.float64)[baselines.status_of(run) != baselines.NOT_MEASURED]
        success = [float(np.nanmax(replace(worst, divergence_high=high / f).success())) for f in (1.0, factor)]
        given.append(("question", worst.name, success[0], success[1]))
    return given


def _sparing(report: Report, run: SavedRun, broken: list[Verdict], factor: float) -> tuple[int, list[str]]:
    """Where few need it: how many, and the code that spares these instead of adding noise for all."""
    some = len(concerned(broken)) if broken else int(report.exposed_rows.sum())
    if not 0 < some <= FEW * len(run):
        return 0, []
    if report.is_linear:
        return some, ["torchfil.glm.iteratively_reweighted_fil(…)"]

    # bounds and questions can be spared by name; attributes only as part of their example
    aims, codes = {RULES[verdict.key].equalise for verdict in broken}, list[str]()
    if not broken or "bound" in aims:
        codes.append(f"torchfil.equalise(target={number(float(f'{factor * lower_ends(run)[0]:.2g}'))})")
    questions = {verdict.key: verdict.subject for verdict in broken if RULES[verdict.key].equalise == "question"}
    codes += [f'torchfil.equalise(question="{name}", target=…)' for name in questions.values()]
    return (some, codes) if codes else (0, [])
