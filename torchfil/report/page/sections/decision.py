"""The block to sign."""

from __future__ import annotations

from torchfil.report.page.context import Report, paragraph
from torchfil.report.page.html import Markup, join, tag
from torchfil.report.page.sections import findings
from torchfil.report.page.sections.verdict import broken_rules, in_a_word, in_short

__all__ = ["render"]


def render(report: Report) -> Markup | None:
    """Title, verdict and findings, decision, remarks, name, date and signature; what is signed is named by its hash."""
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

    return join(
        _what_is_signed(report),
        paragraph("Write here before printing; the page does not save what is written.", class_="screen"),
        _who_vouches(report),
        paragraph("Your signature below covers this page and:") if report.digests else None,
        signed,
        _form(choices),
    )


def _who_vouches(report: Report) -> Markup:
    """The run's signature by key; of a public page without checksums, which could be tried out."""
    found = report.signature
    if found is None:
        why = " A checksum does not show who made it ("
        return paragraph(tag("b", "The run is not signed."), why, tag("code", "torchfil sign"), " does).")
    files = []
    for file in found.files:
        digest = None if report.summary.redacted else [": SHA-256 ", tag("code", file.sha256)]
        files.append(tag("li", f"{file.role} {file.name}{' (not compared here)' * (not file.compared)}", digest))
    when = f", verified at {found.verified}. The signature covers:"
    meaning = paragraph("It proves who vouches for these files, not that the numbers in them are true.")
    who = paragraph("The run is signed by ", tag("b", found.signer), " with ", tag("code", found.key), when)
    return join(who, tag("ul", files, class_="digest"), meaning)


def _what_is_signed(report: Report) -> Markup:
    """Title, verdict and findings once more: the sheet that is signed may be parted from the rest."""
    title = paragraph(tag("b", str(report.about("title") or "Leakage report")))
    found = tag("div", findings.render(report), class_="repeated")
    if report.summary.redacted:
        return join(title, found)
    verdict = paragraph(tag("b", in_a_word(report)), ": ", in_short(report))
    return join(title, verdict, tag("div", broken_rules(report), class_="repeated"), found)


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
