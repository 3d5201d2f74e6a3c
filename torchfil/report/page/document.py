"""Sections put together into one document, with style and script inside."""

from __future__ import annotations

import base64
import hashlib
import re
from importlib import resources

from torchfil.report.page.context import Report, Section
from torchfil.report.page.html import Markup, join, tag
from torchfil.report.page.sections import cards, contents, sections
from torchfil.report.page.sections.verdict import on_the_cover

__all__ = ["render"]

PRIVATE = "Confidential: made from private data"
PUBLIC = "Public version: aggregates only"


def render(report: Report) -> str:
    """The whole page.

    Guarantees:
        * It loads nothing: a content security policy forbids every connection, and only the page's own script runs.
        * Every string from the run is escaped.
    """
    assets = resources.files("torchfil.report") / "assets"
    template, style, script = ((assets / f"page.{kind}").read_text(encoding="utf-8") for kind in ("html", "css", "js"))
    label = PUBLIC if report.summary.redacted else PRIVATE

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
        "title": join(title),
        "kind": join("Leakage report, public version" if report.summary.redacted else "Leakage report"),
        "made": join(_made(report)),
        "label": join(label),
        "verdict": _unbroken(on_the_cover(report)),
        "warning": join(_warning(report)),
        "cards": _unbroken(cards.render(report)),
        "contents": contents.render(entries),
        "sections": join(chapters),
        "style": Markup(style.replace("{{label}}", label)),
        "script": Markup(script),
        # the content security policy lets this script run, by its hash, and no other
        "hash": Markup(base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda match: values[match[1]], template)


def _unbroken(text: Markup) -> Markup:
    """No line ends between a number and its per-cent sign: cards are narrow."""
    return Markup(text.replace(" %", "\u00a0%"))


def _made(report: Report) -> str:
    created = str(report.about("created") or "")
    version = report.about("versions", "torchfil")
    return " · ".join(filter(None, [created.replace("T", " ")[:16], f"torchfil {version}" if version else ""]))


def _warning(report: Report) -> str:
    if report.summary.redacted:
        return (
            f"Every number rests on at least {report.summary.smallest} examples, as does every difference of groups, "
            "and is rounded. No noise was added: somebody who knows all examples but one could still learn something "
            "about that one, as could somebody who has another public version, with other groups or of another run."
        )
    return (
        "This report names examples and tells how much is known about each. It is as private as the training data: "
        "do not pass it on. A version without single examples is written with redacted=True."
    )
