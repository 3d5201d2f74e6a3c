"""Attacks: what was achieved against what the bound allows."""

from __future__ import annotations

from torchfil.report.page import svg
from torchfil.report.page.context import Report, paragraph
from torchfil.report.page.html import Markup, count, join, number, percent, table, tag
from torchfil.run.saved_run import AttackRecord

__all__ = ["render"]

MOST_POINTS = 1000


def render(report: Report) -> Markup | None:
    """A table of attacks and, where examples may be shown, bound against achieved error."""
    attacks = report.summary.attacks
    if not attacks:
        return paragraph("No attack was run. The bounds above do not depend on one, but an attack would test them.")
    rows = [
        [
            tag("span", attack.name, tag("span", attack.threat_model, class_="under")),
            count(attack.targets),
            number(attack.ratio.get("0"), even=True) if attack.ratio else "not shown",
            number(attack.ratio.get("0.5"), even=True) if attack.ratio else "not shown",
            _below(attack.below, attack.targets),
            _below(attack.blind_below, attack.targets),
            tag("span", count(attack.violated), class_="warn" if attack.violated != 0 else None)
            if attack.testable
            else tag("span", "not testable", tag("span", attack.untestable, class_="under")),
        ]
        for attack in attacks
    ]

    redacted = report.summary.redacted
    least = f"The {report.summary.smallest} smallest ratios together" if redacted else "Smallest ratio"
    run = report.run
    return join(
        paragraph(
            "The ratio is the error that the attack achieved over the bound: 1 would meet the bound, less would "
            "break it (by chance, or because the attack is biased). Targets without a finite bound have none. "
            "“Below” is the share of targets whose error lies below the bound; beside it stands the same for a blind "
            "guess, which never saw the model: where the two are alike, the attack told nothing that the data do not "
            "tell by themselves. “Violated” counts targets below the bound beyond chance. An attack of one trial, or "
            "one that never saw the model, tests nothing: it can neither keep nor break a bound."
        ),
        table(["Attack", "Targets", least, "Median ratio", "Below", "Blind guess below", "Violated"], rows),
        [_chart(attack) for attack in run.attacks] if run is not None else None,
    )


def _below(number_of: int | str | None, targets: int | str) -> str:
    """As a share of the targets; in words where there are too few."""
    if number_of is None:
        return "not known"
    if not isinstance(number_of, int) or not isinstance(targets, int) or not targets:
        return str(number_of)
    return percent(min(number_of / targets, 1.0))


def _chart(attack: AttackRecord) -> Markup:
    total = len(attack.rows)
    step = max(1, -(-total // MOST_POINTS))
    points = [
        (float(a), float(b), bool(c))
        for a, b, c in zip(attack.predicted, attack.achieved, attack.violated, strict=True)
    ]
    shown = [point for i, point in enumerate(points) if i % step == 0 or point[2]]
    few = f" {len(shown):,} of {total:,} are drawn, all violations among them." if len(shown) < total else ""
    return svg.figure(
        lambda width: svg.scatter(
            shown, width=width, title=f"error achieved by {attack.name}", axis="bound on the error"
        ),
        f"One dot for each attacked example. {_reading(attack)}{few}",
        label=f"Achieved error against bound for {attack.name}",
    )


def _reading(attack: AttackRecord) -> str:
    if not attack.testable:
        why = attack.untestable or "one trial"
        return f"The bound is not tested ({why}): an error below it may be chance, or knowledge from elsewhere."
    return "On or above the dashed diagonal the bound held."
