"""What to do: more noise, fewer steps, or smaller weights for a few, with a σ and what it would give."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import numpy as np

from torchfil.gate.gate import concerned, factor_for_all
from torchfil.gate.rules import RULES, Verdict, lower_ends, rounded_up, worst_divergence
from torchfil.report.context import Report
from torchfil.report.formats import number
from torchfil.report.leaks import Leaks
from torchfil.run.baselines import NOT_MEASURED, is_exposed, status_of
from torchfil.run.saved_run import SavedRun

__all__ = ["Advice", "advise"]

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
        given.append(("exposed", "", now, int(is_exposed(np.sqrt(factor * low), report.blind_error).sum())))
    if run.questions:
        worst = max(run.questions, key=lambda question: worst_divergence(run, question.name) or 0.0)
        high = np.asarray(worst.divergence_high, dtype=np.float64)[status_of(run) != NOT_MEASURED]
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
