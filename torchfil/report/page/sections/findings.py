"""The first chapter: what a reader with one minute should know."""

from __future__ import annotations

import math

from torchfil.gate.gate import large_delta
from torchfil.report.page.context import Report
from torchfil.report.page.html import Markup, count, join, number, percent, tag
from torchfil.report.page.sections.groups import headline
from torchfil.report.page.wording import every_attacker, is_linear, origin, over
from torchfil.report.summary import Summary

__all__ = ["render"]

FEW_PARTICIPATIONS = 20


def render(report: Report) -> Markup | None:
    """One sentence for each finding."""
    items = [
        *_budget(report),
        *_exposure(report),
        *_short_run(report),
        *_unmeasured(report),
        *_spared(report),
        *_groups(report),
        *_attacks(report),
    ]
    return tag("ul", [tag("li", item) for item in items], class_="findings")


def _budget(report: Report) -> list[Markup]:
    epsilon, delta = report.about("epsilon"), report.about("delta")
    text = join(tag("b", f"{report.summary.examples:,} examples"), " were trained on")
    if epsilon is not None and delta is not None:
        text = join(
            text, f" with differential privacy of ε\u00a0=\u00a0{number(epsilon)} at δ\u00a0=\u00a0{number(delta)}"
        )
    delta_is_large = large_delta(delta, report.summary.examples)
    return [join(text, "."), *([tag("b", f"{delta_is_large}.", class_="warn")] if delta_is_large else [])]


def _exposure(report: Report) -> list[Markup]:
    summary = report.summary
    if not summary.exposure:
        return [join("Too few examples were measured to say anything about exposure.")]
    worst = summary.exposure[0]
    whom = f"the {worst.examples} most exposed examples together" if summary.redacted else "the most exposed example"
    most_exposed = join(
        f"An unbiased guess of {whom} has a mean squared error of{' an estimated' * (not is_linear(report))} ",
        tag("b", number(worst.mse_bound)),
        f" or more per input on average (its MSE bound{_unit(report)}). That is {origin(report)}",
        None if is_linear(report) else _lowest_end(summary, worst.mse_bound),
        ".",
    )
    return [most_exposed, join(_who_is_bound(report)), *_below_guess(report)]


def _who_is_bound(report: Report) -> str:
    return (
        f"These bounds bind unbiased attackers: those whose guesses are right on average {over(report)}. Somebody who "
        f"starts from beliefs about the data is biased and may come closer; {every_attacker(report)}."
    )


def _below_guess(report: Report) -> list[Markup]:
    """How many could be estimated more closely than by a blind guess; nothing where its error is not known."""
    summary = report.summary
    if summary.guess is None or summary.below_guess is None:
        return []
    if summary.below_guess == 0:
        text = join(tag("b", "No measured example"), " has")
    else:
        text = join(tag("b", _capital(_share(summary.below_guess, report))), " have")
    # the range of the inputs tells no more than what a guess never exceeds, their spread tells what it errs by
    most = "" if report.run is not None and report.run.yardsticks is not None else " at most"
    guess = f"of a blind guess, {number(summary.guess)}{most}, which needs no model and is open to every attacker"
    text = join(text, f" an MSE bound below the squared error {guess}")
    if summary.low_below_guess not in (None, summary.below_guess):
        text = join(
            text, "; allowing for the uncertainty of the measurement, ", _share(summary.low_below_guess, report)
        )
    return [join(text, ".")]


def _lowest_end(summary: Summary, smallest_bound: float) -> Markup:
    """What the uncertainty of the measurement leaves of the bounds."""
    if summary.lowest_end is None or math.isnan(summary.lowest_end):
        return join("; how far below it the truth may lie is not known")
    if summary.lowest_end == 0 < smallest_bound:
        return join(
            "; for some examples, drawn too rarely, one run does not tell how far below its estimate the truth may lie "
            "(a low end of 0)"
        )
    which = (
        f"; the {summary.smallest} lowest lower ends (95 %, each example by itself) together give "
        if summary.redacted
        else "; no measured example’s lower end (95 %, each example by itself) is below "
    )
    return join(which, tag("b", number(summary.lowest_end)))


def _short_run(report: Report) -> list[Markup]:
    """A warning where steps were left out at random and few are left for an example."""
    rate, q, steps = (report.about("mechanism", name) for name in ("fil_rate", "sample_rate", "steps"))
    if rate is None or steps is None or rate >= 1:
        return []
    measured = rate * steps * (1 if q is None else q)
    if measured >= FEW_PARTICIPATIONS:
        return []
    return [
        join(
            tag("b", f"About {number(measured, 2)} measured participations stand behind each example", class_="warn"),
            f": {100 * rate:g} % of the steps were measured, in a short run. Numbers of single examples are then "
            "mostly chance, and the safest-looking are so by luck. Measure every step (fil_rate = 1), or train longer.",
        )
    ]


def _unmeasured(report: Report) -> list[Markup]:
    summary, items = report.summary, []
    if summary.not_measured != 0:
        items.append(
            join(
                tag("b", f"{_some(summary.not_measured, summary)} examples were not measured", class_="warn"),
                " (no batch drew them, or their steps were left out). They are not safe: this run says nothing "
                "about them.",
            )
        )
    if summary.lower_bounds != 0:
        items.append(
            join(
                f"{_some(summary.lower_bounds, summary)} examples were measured in some of their steps only: "
                "their leakage is larger than shown."
            )
        )
    return items


def _spared(report: Report) -> list[Markup]:
    spared = report.summary.spared
    if spared is None or spared.examples == 0:
        return []
    return [
        join(
            tag("b", f"{_some(spared.examples, report.summary)} examples were spared"),
            ": they were trained with a smaller weight, so that they leak less. The numbers here take the weights as "
            "fixed; what the weights themselves tell is not counted.",
        )
    ]


def _groups(report: Report) -> list[Markup]:
    """Of each grouping whose groups differ enough: who leaks how much more than whom."""
    told = [(grouping, headline(grouping, report)) for grouping in report.summary.groupings]
    return [join("By ", tag("i", grouping.name), ": ", text) for grouping, text in told if text is not None]


def _attacks(report: Report) -> list[Markup]:
    if not report.summary.attacks:
        return [join("No attack was run.")]
    broken = [attack for attack in report.summary.attacks if attack.violated != 0]
    tested = [attack for attack in report.summary.attacks if attack.testable]
    if not tested and not broken:
        reasons = ", ".join(f"{attack.name} ({attack.untestable})" for attack in report.summary.attacks)
        return [join(tag("b", "No attack tested the bounds"), f": {reasons}. They stand on theory alone.")]
    if not broken:
        names = ", ".join(attack.name for attack in tested)
        return [join(f"No attack that tested the bounds ({names}) did better than they allow.")]
    names = ", ".join(attack.name for attack in broken)
    return [
        join(
            tag("b", "A bound was violated", class_="warn"),
            " by: ",
            names,
            ". Do not rely on this report before the cause is found.",
        )
    ]


def _some(number_of: int | str, summary: Summary) -> str:
    about = "about " if summary.redacted and isinstance(number_of, int) else ""
    return _capital(f"{about}{count(number_of)}")


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _share(some: int | str | None, report: Report) -> str:
    unmeasured = report.summary.not_measured
    everyone = report.summary.examples - (unmeasured if isinstance(unmeasured, int) else 0)
    if not isinstance(some, int):
        return f"{some} examples"
    about = "about " if report.summary.redacted else ""
    return f"{about}{some:,} of {everyone:,} examples ({percent(min(some / max(everyone, 1), 1.0))})"


def _unit(report: Report) -> str:
    unit = report.about("unit_of_inputs")
    return f"; unit: {unit}, squared" if unit else ""
