"""The head of every page: what it may load and run, its title, its style."""

from __future__ import annotations

import base64
import hashlib
from importlib import resources

from torchfil.report.page.html import Markup, tag

__all__ = ["asset", "head", "label_of"]


def asset(name: str) -> str:
    """A file of the page: ``page.html``, ``page.css`` or ``page.js``."""
    return (resources.files("torchfil.report") / "assets" / name).read_text(encoding="utf-8")


def label_of(redacted: bool) -> str:
    """Who may read the page, as it stands above all else and on every sheet."""
    return "Public version: aggregates only" if redacted else "Confidential: made from private data"


def head(title: str, *, redacted: bool, script: str = "") -> Markup:
    """The element ``head``.

    Guarantees:
        * The page loads nothing: a content security policy forbids every connection.
        * Of scripts only the given one runs, by its hash; without one, none.

    Args:
        title: Of the page; escaped.
        redacted: Whether it is the public version.
        script: The text of the page's own script.
    """
    allowed = "img-src data:; style-src 'unsafe-inline'"  # pictures, the empty icon among them, stand in the page
    if script:
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        allowed += f"; script-src 'sha256-{digest}'"
    policy = f"default-src 'none'; {allowed}; base-uri 'none'; form-action 'none'"
    style = asset("page.css").replace("{{label}}", label_of(redacted))
    return tag(
        "head",
        Markup(f'<meta charset="utf-8">\n<meta http-equiv="Content-Security-Policy" content="{policy}">\n'),
        Markup('<meta name="viewport" content="width=device-width, initial-scale=1">\n'),
        Markup('<meta name="color-scheme" content="light dark">\n<meta name="referrer" content="no-referrer">\n'),
        tag("title", title),
        Markup('\n<link rel="icon" href="data:,">\n'),
        tag("style", Markup(style)),
    )
