"""Numbers as readers see them, on the page, in its charts and in the terminal."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from torchfil.run.unit import counted, plural
from torchfil.utils.text import visible

if TYPE_CHECKING:
    from jinja2 import Environment

__all__ = [
    "capital",
    "count",
    "counted",
    "number",
    "percent",
    "plural",
    "plus_minus",
    "rate",
    "shown",
    "times",
]


def number(value: float | None, digits: int = 3, *, even: bool = False) -> str:
    r"""Three significant digits, a true minus sign, a power of ten outside 0.001 … 99,999.

    Args:
        value: None and NaN are unknown.
        digits: How many significant ones.
        even: Whether to keep zeros at the end, for columns of numbers.

    Example:
        >>> number(0.12345), number(1234567.0), number(float("inf")), number(2.0), number(1e-5)
        ('0.123', '1.23 ×\xa010⁶', '∞', '2', '10⁻⁵')
        >>> number(2.0, even=True)
        '2.00'
    """
    if value is None or math.isnan(value):
        return "unknown"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    if value == 0:
        return "0"

    def trimmed(text: str) -> str:
        return (text.rstrip("0").rstrip(".") if "." in text and not even else text).replace(
            "-", "−"
        )

    mantissa, power = f"{value:.{digits - 1}e}".split("e")
    if -3 <= int(power) <= 4:
        return trimmed(f"{float(f'{mantissa}e{power}'):,.{max(digits - 1 - int(power), 0)}f}")
    raised = "10" + str(int(power)).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return raised if trimmed(mantissa) == "1" else f"{trimmed(mantissa)} ×\u00a0{raised}"


def times(ratio: float, *, even: bool = False) -> str:
    """A multiple of three digits; what is below 1 does not look like 1.

    Example:
        >>> times(0.2969), times(0.9999), times(1.4), times(8123.0), times(float("nan"))
        ('0.297×', '0.999×', '1.4×', '8,120×', 'unknown')
    """
    return number(min(ratio, 0.999) if ratio < 1 else ratio, even=even) + "×" * (
        not math.isnan(ratio)
    )


def plus_minus(error: float, unit: str = "") -> str:
    """± an error in its unit, in one piece."""
    return f"±\u00a0{number(error)}" + (f"\u00a0{unit}" if unit else "")


def count(value: int | str) -> str:
    """A count with thousands separated; words stay."""
    return f"{value:,}" if isinstance(value, int) else str(value)


def percent(share: float) -> str:
    """A share in percent, without pretending that little is nothing or much is all.

    Example:
        >>> percent(0.1234), percent(0.0001), percent(1.0), percent(0.9999), percent(0.0)
        ('12 %', 'below 0.1 %', '100 %', 'above 99.9 %', '0 %')
    """
    if 0 < share < 0.001:
        return "below 0.1 %"
    if 0.999 < share < 1:
        return "above 99.9 %"
    return (
        f"{100 * share:.1f} %" if 0 < share < 0.095 or 0.905 < share < 1 else f"{100 * share:.0f} %"
    )


def rate(share: float) -> str:
    """The share of runs in which an attacker is right, in percent with three digits.

    At most 100 %.
    """
    return f"{100 * min(share, 1.0):.3g} %"


def capital(text: str) -> str:
    """The text with a capital letter."""
    return text[:1].upper() + text[1:]


def shown(value: object) -> str:
    """A setting of a run, whatever it is.

    Example:
        >>> shown(True), shown(12000), shown(0.5), shown(None), shown("rdp")
        ('yes', '12,000', '0.5', 'none', 'rdp')
    """
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        return f"{value:,}" if isinstance(value, int) else number(value)
    return "none" if value is None else str(value)


@functools.cache
def templates() -> Environment:
    """Templates that escape every value, show what acts instead of being seen, and stop at what
    they do not know.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined

    def safe(value: object) -> object:
        if value is None:
            return ""
        return (
            visible(value, keep="\n\t")
            if isinstance(value, str) and not isinstance(value, Markup)
            else value
        )

    blocks: dict[str, Any] = {
        "trim_blocks": True,
        "lstrip_blocks": True,
        "extensions": ["jinja2.ext.do"],
    }
    loader = PackageLoader("torchfil.report")
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, finalize=safe, **blocks
    )
    environment.filters |= {name: globals()[name] for name in (*__all__, "visible")}
    return environment


def lines_of(name: str, **context: object) -> list[str]:
    """The lines of a template of plain text; no value makes a line of its own."""
    told = templates().overlay(
        autoescape=False, finalize=lambda v: visible(v) if isinstance(v, str) else v
    )
    return [line for line in told.get_template(name).render(context).split("\n") if line.strip()]
