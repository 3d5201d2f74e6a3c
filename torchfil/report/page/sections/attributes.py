"""How closely single attributes can be guessed, as shares of a blind guess's error; raw numbers on demand."""

from __future__ import annotations

from torchfil.report.attribute_summary import AttributeSummary
from torchfil.report.page import svg
from torchfil.report.page.context import Report, named_level, paragraph
from torchfil.report.page.html import Markup, count, join, number, percent, plus_minus, table, tag
from torchfil.report.page.maps import grid_of_shares, maps_of_shares
from torchfil.report.page.wording import certainty
from torchfil.run.baselines import share_in_words

__all__ = ["render"]

MOST, FEWEST_PIXELS = 24, 16
ESTIMATE = "These are estimates from one run; how far below them the truth may lie is not known."
WHO = (
    "An unbiased guess of the attribute, by somebody who knows everything else about the example, all its other "
    "attributes included, is off by at least this on average (root mean square), "
)
BLIND = (
    "as a share of what a blind guess errs by: that of somebody who knows how the data is spread, but not the model. "
    "“No better than guessing” means that an unbiased estimate errs more than a blind guess. Somebody who knows what "
    "values are usual may still gain from the model, with bias; the questions of this report bind such attackers too. "
)
NO_YARDSTICK = (
    "in the attribute’s own unit: the run does not tell how the data is spread, so that no share of a blind guess can "
    "be told. If a number far exceeds the attribute’s range, an unbiased estimate errs more than a blind guess. "
    "Somebody who knows what values are usual may still gain from the model, with bias. "
)


def render(report: Report) -> Markup | None:
    """A table by attribute, or maps where attributes are pixels; None where attributes were not tracked."""
    attributes = [attribute for attribute in report.summary.attributes if attribute.error or attribute.share]
    if not attributes:
        return None
    told = certainty(report) if attributes[0].lower_end else ESTIMATE
    pixels = [a for a in attributes if a.pixel is not None and a.share]
    if len(pixels) >= FEWEST_PIXELS and len(pixels) == len(attributes):
        return join(paragraph(WHO, BLIND, told), _maps(pixels, report), _details(attributes, report))

    beside_guess = any(attribute.share for attribute in attributes)
    shown, chosen = _chosen(attributes)
    rest = f" Of {len(attributes)} attributes, {chosen} are shown; summary.json has the rest." if chosen else ""
    return join(
        paragraph(WHO, BLIND if beside_guess else NO_YARDSTICK, told, rest),
        _shares(shown, report) if beside_guess else _errors(shown, report),
        paragraph("Each attribute has its own ranking: its most exposed example need not be another’s.", class_="note"),
        _details(shown, report) if beside_guess else None,
    )


def _shares(attributes: list[AttributeSummary], report: Report) -> Markup:
    """Shares by level of exposure, and how many examples are exposed at all."""
    levels = _levels(attributes)
    head = ["Attribute", *_named(levels, report), "examples guessed more closely than blindly"]
    rows = [
        [
            a.name,
            *(_told(a, level) for level in levels),
            "not known" if a.exposed is None else count(a.exposed),
        ]
        for a in attributes
    ]
    return table(head, rows)


def _told(attribute: AttributeSummary, level: str) -> str:
    """A share in short; the error itself where there is nothing to measure it against."""
    if level in attribute.share:
        share = attribute.share[level]
        return share_in_words(share) if share >= 1 else share_in_words(share).split(" of a ")[0]
    return plus_minus(attribute.error[level], attribute.unit) if level in attribute.error else ""


def _errors(attributes: list[AttributeSummary], report: Report) -> Markup:
    """± in the attributes' own units."""
    levels = _levels(attributes)
    rows = [
        [a.name, *(plus_minus(a.error[level], a.unit) if level in a.error else "" for level in levels)]
        for a in attributes
    ]
    return table(["Attribute", *_named(levels, report)], rows)


def _details(attributes: list[AttributeSummary], report: Report) -> Markup | None:
    """The raw numbers, and what the blind guess knows; nothing of either in public where it is made from the data."""
    shown = [a for a in _chosen(attributes)[0] if a.error]
    if not shown:
        return None
    blind = [
        [a.name, plus_minus(a.blind, a.unit) if a.blind is not None else "not known", _data(a, report)] for a in shown
    ]
    private = report.run is not None and report.run.yardsticks is not None
    return tag(
        "details",
        tag("summary", "The numbers in the attributes’ own units"),
        _errors(shown, report),
        table(["Attribute", "a blind guess errs by", "the data"], blind) if private else None,
    )


def _data(attribute: AttributeSummary, report: Report) -> str:
    """How the data is spread, in words; private."""
    if attribute.levels:
        shares = sorted(attribute.levels.items(), key=lambda item: -item[1])
        named = ", ".join(f"{name} {percent(share)}" for name, share in shares[:6])
        return f"{named}{' …' if len(shares) > 6 else ''}"
    run = report.run
    if run is None or run.attributes is None or run.yardsticks is None:
        return ""
    place, spread = run.attributes.names.index(attribute.name), run.yardsticks.attributes
    low, high, mean = (number(float(values[place])) for values in (spread.low, spread.high, spread.mean))
    return f"{low} to {high}, {mean} on average"


def _maps(pixels: list[AttributeSummary], report: Report) -> Markup:
    """One picture a level of exposure: the stronger the colour, the more closely a pixel can be guessed."""
    levels = _levels(pixels)
    grids = {
        name: grid_of_shares([a.pixel for a in pixels if a.pixel], [a.share.get(level, 1.0) for a in pixels])
        for level, name in zip(levels, _named(levels, report), strict=True)
    }
    exposed = [a for a in pixels if a.exposed != 0]
    worst = min(pixels, key=lambda a: min(a.share.values()))
    caption = (
        f"The stronger the colour, the more closely a pixel can be guessed. {len(exposed):,} of {len(pixels):,} can be "
        f"guessed more closely than blindly for somebody; the most exposed is {worst.name}: "
        f"{share_in_words(min(worst.share.values()))}. Each pixel has its own ranking of examples; of several channels "
        "the most exposed is drawn, and so it is of blocks where a picture is large."
    )
    return svg.figure(
        lambda width: maps_of_shares(grids, width=width),
        caption,
        label="Maps of the least error of unbiased guesses by pixel, as shares of a blind guess’s error",
    )


def _levels(attributes: list[AttributeSummary]) -> list[str]:
    return [level for level in ("0", "0.05", "0.5") if any(level in {**a.error, **a.share} for a in attributes)]


def _named(levels: list[str], report: Report) -> list[str]:
    return [named_level(float(level), report.summary.smallest, report.summary.redacted) for level in levels]


def _chosen(attributes: list[AttributeSummary]) -> tuple[list[AttributeSummary], str]:
    """All where they are few; else the most exposed where they can be compared, or the first; and which these are."""
    if len(attributes) <= MOST:
        return attributes, ""
    if all(attribute.share for attribute in attributes):
        return sorted(attributes, key=lambda a: min(a.share.values()))[:MOST], f"the {MOST} most exposed"
    if len({attribute.unit for attribute in attributes}) == 1 and all(attribute.error for attribute in attributes):
        return sorted(attributes, key=lambda a: min(a.error.values()))[:MOST], f"the {MOST} most exposed"
    return attributes[:MOST], f"the first {MOST}"
