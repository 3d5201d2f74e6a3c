"""Sections put together into one document, with style and script inside."""

from __future__ import annotations

import re

from torchfil.report.page.context import Report, Section
from torchfil.report.page.head import asset, head, label_of
from torchfil.report.page.html import Markup, join, tag, unbroken
from torchfil.report.page.sections import cards, contents, sections
from torchfil.report.page.sections.verdict import on_the_cover

__all__ = ["render"]


def render(report: Report) -> str:
    """The whole page.

    Guarantees:
        * It loads nothing: a content security policy forbids every connection, and only the page's own script runs.
        * Every string from the run is escaped.
    """
    template, script = asset("page.html"), asset("page.js")
    label = label_of(report.summary.redacted)

    # sections with nothing to say have no number and no entry in the contents
    chapters, entries = list[Markup](), list[Section]()
    for section in sections():
        content = section.render(report)
        if content is not None:
            entries.append(section)
            heading = tag("h2", tag("span", str(len(entries)), class_="no"), section.title)
            header = tag("header", tag("span", label, class_="kept"), heading)
            chapters.append(tag("section", header, content, id=section.slug))

    title = str(report.about("title") or "Leakage report")
    values = {
        "head": head(title, redacted=report.summary.redacted, script=script),
        "title": join(title),
        "kind": join("Leakage report, public version" if report.summary.redacted else "Leakage report"),
        "made": join(_made(report)),
        "label": join(label),
        "verdict": unbroken(on_the_cover(report)),
        "warning": join(_warning(report)),
        "cards": unbroken(cards.render(report)),
        "contents": contents.render(entries),
        "sections": join(chapters),
        "script": Markup(script),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda match: values[match[1]], template)


def _made(report: Report) -> str:
    created = str(report.about("created") or "")
    version = report.about("versions", "torchfil")
    return " · ".join(filter(None, [created.replace("T", " ")[:16], f"torchfil {version}" if version else ""]))


def _warning(report: Report) -> str:
    if report.summary.redacted:
        return (
            f"Every number rests on at least {report.summary.smallest} examples, as does every difference of groups, "
            "and is rounded; nobody counts for more than ten times the median of those averaged (a hundred times for "
            "squared errors). No noise was added: somebody who knows all examples but one could still learn something "
            "about that one, as could somebody who has another public version, with other groups or of another run."
        )
    return (
        "This report names examples and tells how much is known about each. It is as private as the training data: "
        "do not pass it on. To share something, ask for the public version, which names nobody: torchfil report RUN "
        "--redacted."
    )
