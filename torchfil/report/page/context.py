"""What a section of the page is made from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torchfil.gate.policy import Policy
from torchfil.gate.rules import Verdict
from torchfil.report.page.html import Markup, tag
from torchfil.report.signature import Signature
from torchfil.report.summary import Summary
from torchfil.run.saved_run import SavedRun

__all__ = ["Report", "Section", "named_level", "paragraph"]


@dataclass(frozen=True)
class Report:
    """The material of a page.

    Attributes:
        summary: Aggregates.
        run: The run; None where the page is redacted, so that no section can show an example.
        files: The names of the files beside the page and what they hold.
        notes: Files that could not be written, and why.
        digests: SHA-256 of files beside the page, by name.
        verdicts: What the rules of a policy found; None where no policy was given.
        policy: The policy.
        signature: Who signed the run; None: nobody.
    """

    summary: Summary
    run: SavedRun | None
    files: dict[str, str]
    notes: list[str]
    digests: dict[str, str]
    verdicts: list[Verdict] | None = None
    policy: Policy | None = None
    signature: Signature | None = None

    def about(self, *path: str) -> Any:
        """A value of ``summary.about`` by its path; None where it is not there."""
        value: Any = self.summary.about
        for key in path:
            value = value.get(key) if isinstance(value, dict) else None
        return value


@dataclass(frozen=True)
class Section:
    """A chapter of the page.

    Attributes:
        slug: Its address in the page.
        title: Its heading.
        render: Its content; None leaves the section out.
    """

    slug: str
    title: str
    render: Callable[[Report], Markup | None]


def paragraph(*parts: Any, class_: str | None = None) -> Markup:
    """A paragraph."""
    return tag("p", *parts, class_=class_)


def named_level(level: float, examples: int, redacted: bool) -> str:
    """A level of exposure in words.

    Example:
        >>> named_level(0.05, 1, False), named_level(0.0, 10, True)
        ('5 % are more exposed', 'the 10 most exposed together')
    """
    if level == 0:
        return f"the {examples} most exposed together" if redacted else "the most exposed"
    if level == 0.5:
        return "half are more exposed"
    return f"{100 * level:g} % are more exposed"
