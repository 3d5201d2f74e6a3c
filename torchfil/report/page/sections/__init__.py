"""The chapters of the page, in order. A new one is a function and a registration."""

from __future__ import annotations

from collections.abc import Callable

from torchfil.report.page.context import Report, Section
from torchfil.report.page.html import Markup
from torchfil.report.page.sections import (
    assumptions,
    attacks,
    attributes,
    decision,
    distribution,
    epsilon,
    every_example,
    exposed,
    findings,
    groups,
    history,
    linear,
    merged,
    other_bounds,
    questions,
    spared,
    training,
    verdict,
    words,
)

__all__ = ["register_section", "sections"]

_SECTIONS: list[Section] = [
    Section("verdict", "May it be released?", verdict.render),
    Section("findings", "In short", findings.render),
    Section("training", "What was trained", training.render),
    Section("linear", "What was released", linear.render),
    Section("merged", "Several runs together", merged.render),
    Section("assumptions", "What the numbers assume", assumptions.render),
    Section("distribution", "How closely examples could be rebuilt", distribution.render),
    Section("bounds", "Beside other bounds", other_bounds.render),
    Section("exposed", "The most and the least exposed", exposed.render),
    Section("spared", "Who was spared", spared.render),
    Section("words", "Which words leak", words.render),
    Section("attributes", "Single attributes", attributes.render),
    Section("questions", "What any attacker can tell", questions.render),
    Section("groups", "Who is exposed more than others", groups.render),
    Section("epsilon", "Each example’s own ε", epsilon.render),
    Section("attacks", "Attacks", attacks.render),
    Section("history", "Over the course of training", history.render),
    Section("examples", "Every example", every_example.render),
    Section("decision", "Decision", decision.render),
]


def sections() -> list[Section]:
    """The registered sections, in the order of the page."""
    return list(_SECTIONS)


def register_section(
    slug: str, title: str, render: Callable[[Report], Markup | None], *, before: str = "decision"
) -> None:
    """Add a section to every report written from now on.

    Args:
        slug: Its address in the page, unique.
        title: Its heading.
        render: From the report's material to HTML (:mod:`torchfil.report.page.html`); None leaves the section out.
            In a redacted report ``report.run`` is None.
        before: The slug of the section it stands before.
    """
    slugs = [section.slug for section in _SECTIONS]
    if slug in slugs:
        raise ValueError(f"slug={slug!r} is taken by a section; take another of your own")
    if before not in slugs:
        raise ValueError(f"before={before!r} is no section; choose from {', '.join(slugs)}")
    _SECTIONS.insert(slugs.index(before), Section(slug, title, render))
