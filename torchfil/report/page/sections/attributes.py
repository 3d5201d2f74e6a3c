"""How closely single attributes could be inferred, in their own units."""

from __future__ import annotations

from torchfil.report.page.context import Report, named_level, paragraph
from torchfil.report.page.html import Markup, join, plus_minus, table

__all__ = ["render"]

MOST = 100


def render(report: Report) -> Markup | None:
    """A table by attribute; None where attributes were not tracked."""
    attributes = [attribute for attribute in report.summary.attributes if attribute.error]
    if not attributes:
        return None
    levels = [level for level in ("0", "0.05", "0.5") if any(level in a.error for a in attributes)]
    head = [
        "Attribute",
        *(named_level(float(level), report.summary.smallest, report.summary.redacted) for level in levels),
    ]
    rows = [
        [
            a.name,
            *(plus_minus(a.error[level], a.unit) if level in a.error else "" for level in levels),
        ]
        for a in attributes[:MOST]
    ]
    rest = f" The first {MOST} of {len(attributes)} attributes are shown." if len(attributes) > MOST else ""
    return join(
        paragraph(
            "An unbiased attacker who knows everything else about an example, all its other attributes included, "
            "cannot infer the attribute more closely than this: the standard error of the best guess, in the "
            "attribute’s own unit. A number much larger than the attribute’s range means that nothing is given "
            f"away.{rest}"
        ),
        table(head, rows),
        paragraph("Each attribute has its own ranking: its most exposed example need not be another’s.", class_="note"),
    )
