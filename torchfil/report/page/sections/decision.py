"""The block to sign."""

from __future__ import annotations

from torchfil.report.page.context import Report, paragraph
from torchfil.report.page.html import Markup, join, tag
from torchfil.report.page.sections.verdict import in_short

__all__ = ["render"]


def render(report: Report) -> Markup | None:
    """Title and verdict, decision, remarks, name, date and signature; what is signed is named by its hash."""
    what = "This version of the report" if report.summary.redacted else "The model"
    done = "published" if report.summary.redacted else "released"
    choices = [
        (f"{what} may be {done}.", "yes"),
        (f"{what} may be {done} under the conditions below.", "conditions"),
        (f"{what} must not be {done}.", "no"),
    ]
    signed = [
        paragraph(f"{name}: SHA-256 ", tag("code", digest), class_="digest") for name, digest in report.digests.items()
    ]

    title = str(report.about("title") or "Leakage report")
    return join(
        None if report.summary.redacted else paragraph(tag("b", title), ": ", in_short(report)),
        paragraph(
            "Write here before printing; the page does not save what is written. ",
            "Signed is this page together with:" if report.digests else None,
        ),
        signed,
        _form(choices),
    )


def _form(choices: list[tuple[str, str]]) -> Markup:
    """A form that goes nowhere: it is printed and signed. ``autocomplete`` keeps browsers from remembering it."""

    def field(name: str) -> Markup:
        return tag("label", tag("span", name), tag("input", type="text", autocomplete="off"), class_="field")

    radios = [
        tag("label", tag("input", type="radio", name="decision", value=value), tag("span", text), class_="choice")
        for text, value in choices
    ]
    signature = tag("div", tag("span", "Signature"), tag("div", class_="line"), class_="field")
    return tag(
        "form",
        tag("fieldset", tag("legend", "Decision"), radios),
        tag("label", tag("span", "Conditions and remarks"), tag("textarea", rows=4), class_="field"),
        tag("div", field("Name and role"), field("Date"), signature, class_="signatures"),
        class_="decision",
        autocomplete="off",
    )
