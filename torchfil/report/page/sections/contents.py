"""The contents: a bar beside the page where there is room, folded above it where there is not."""

from __future__ import annotations

from collections.abc import Sequence

from torchfil.report.page.context import Section
from torchfil.report.page.html import Markup, tag

__all__ = ["render"]


def render(chapters: Sequence[Section]) -> Markup:
    """Links to the chapters that have something to say, in their order; assets/page.js unfolds them on wide screens."""
    entries = [tag("li", tag("a", chapter.title, href=f"#{chapter.slug}")) for chapter in chapters]
    folded = tag("details", tag("summary", "Contents"), tag("ol", entries), id="contents")
    return tag("nav", folded, class_="side screen", aria_label="Contents")
