"""Attacks: what was achieved against what the bound allows."""

from __future__ import annotations

from torchfil.report.page import svg
from torchfil.report.page.context import Report, paragraph
from torchfil.report.page.html import Markup, count, join, number, table, tag
from torchfil.report.saved_run import AttackRecord

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
            tag("span", count(attack.violated), class_="warn" if attack.violated != 0 else None)
            if attack.testable
            else "not testable",
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
            "“Violated” counts those below it beyond chance; one trial does not tell, and is not testable."
        ),
        table(["Attack", "Targets", least, "Median ratio", "Violated"], rows),
        [_chart(attack) for attack in run.attacks] if run is not None else None,
    )


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
        return "One trial each, whose error is a matter of chance: the bound is not tested."
    return "On or above the dashed diagonal the bound held."
