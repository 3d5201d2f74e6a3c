"""By how much an unbiased guess of a single attribute is off at least, in its own unit."""

from __future__ import annotations

from torchfil.report.attribute_summary import AttributeSummary
from torchfil.report.page.context import Report, named_level, paragraph
from torchfil.report.page.html import Markup, join, plus_minus, table
from torchfil.report.page.wording import certainty

__all__ = ["render"]

MOST = 24
ESTIMATE = "These are estimates from one run; how far below them the truth may lie is not known."


def render(report: Report) -> Markup | None:
    """A table by attribute; None where attributes were not tracked."""
    attributes = [attribute for attribute in report.summary.attributes if attribute.error]
    if not attributes:
        return None
    levels = [level for level in ("0", "0.05", "0.5") if any(level in a.error for a in attributes)]
    shown, chosen = _chosen(attributes)
    head = [
        "Attribute",
        *(named_level(float(level), report.summary.smallest, report.summary.redacted) for level in levels),
    ]
    rows = [
        [a.name, *(plus_minus(a.error[level], a.unit) if level in a.error else "" for level in levels)] for a in shown
    ]

    rest = f" Of {len(attributes)} attributes, {chosen} are shown; summary.json has the rest." if chosen else ""
    return join(
        paragraph(
            "An unbiased guess of the attribute, by somebody who knows everything else about the example, all its "
            "other attributes included, is off by at least this on average (root mean square, in the attribute’s own "
            "unit). ",
            certainty(report) if attributes[0].lower_end else ESTIMATE,
            " A number much larger than the attribute’s range means that the model gives an unbiased attacker nothing. "
            "Somebody who knows what values are usual can guess more closely, with bias.",
            rest,
        ),
        table(head, rows),
        paragraph("Each attribute has its own ranking: its most exposed example need not be another’s.", class_="note"),
    )


def _chosen(attributes: list[AttributeSummary]) -> tuple[list[AttributeSummary], str]:
    """All where they are few; else the most exposed where they share a unit, or the first; and which these are."""
    if len(attributes) <= MOST:
        return attributes, ""
    if len({attribute.unit for attribute in attributes}) == 1:
        return sorted(attributes, key=lambda a: min(a.error.values()))[:MOST], f"the {MOST} most exposed"
    return attributes[:MOST], f"the first {MOST}"
