"""The first thing on the page: may it be released, by the policy that was given, and if not, why not.

The first screen tells broken rules in plain words; the chapter has every rule with its numbers and its key.
"""

from __future__ import annotations

from torchfil.gate.gate import in_words
from torchfil.gate.rules import Verdict, told_apart
from torchfil.report.page.context import Report, paragraph
from torchfil.report.page.html import Markup, join, tag

__all__ = ["broken_rules", "in_a_word", "in_short", "on_the_cover", "render"]

MOST = 5  # broken rules on the first screen


def render(report: Report) -> Markup | None:
    """Whether the policy is kept, and each broken rule in words; left out of the public version.

    Whether a rule is kept may hang on a single example, and so would a public verdict.
    """
    if report.summary.redacted:
        return None
    verdicts = report.verdicts
    if verdicts is None:
        return join(
            paragraph(
                "Nobody has said what this model may leak, so this page does not say whether it may be released. ",
                tag("code", "torchfil gate --init"),
                " writes a policy to start from; ",
                tag("code", "torchfil report RUN --policy policy.toml"),
                " writes this page with a verdict.",
            ),
        )

    broken = [verdict for verdict in verdicts if not verdict.passed]
    kept = [verdict for verdict in verdicts if verdict.passed]
    listed = [
        tag("ul", [tag("li", _with_numbers(verdict)) for verdict in broken], class_="findings") if broken else None,
        _kept_rules(kept) if kept else None,
    ]
    return join(paragraph(in_short(report)), listed)


def on_the_cover(report: Report) -> Markup:
    """The verdict in a word, a sentence and the broken rules; nothing in the public version."""
    if report.summary.redacted:
        return join()
    text, kind = _word(report)
    return tag(
        "div",
        paragraph(tag("a", text, href="#verdict"), class_="stamp"),
        tag("div", paragraph(in_short(report)), broken_rules(report, MOST)),
        class_=f"verdict {kind}",
    )


def broken_rules(report: Report, most: int | None = None) -> Markup | None:
    """Each broken rule in words, up to so many; None where there is none."""
    broken = [verdict for verdict in report.verdicts or [] if not verdict.passed]
    if not broken:
        return None
    rest = [] if most is None else broken[most:]
    more = tag("li", tag("a", f"{len(rest):,} more broken rules", href="#verdict")) if rest else None
    return tag("ul", [tag("li", in_words(verdict)) for verdict in broken[:most]], more)


def in_a_word(report: Report) -> str:
    """PASS, FAIL or NO POLICY."""
    return _word(report)[0]


def _word(report: Report) -> tuple[str, str]:
    if report.verdicts is None:
        return "NO POLICY", "open"
    return ("PASS", "pass") if all(verdict.passed for verdict in report.verdicts) else ("FAIL", "fail")


def in_short(report: Report) -> str:
    """The verdict in a sentence."""
    verdicts = report.verdicts
    if verdicts is None:
        return "No policy was given: nothing says whether the model may be released."
    broken = sum(not verdict.passed for verdict in verdicts)
    rules = f"{len(verdicts)} rule{'s' if len(verdicts) > 1 else ''} of the policy"
    if broken == 0:
        return f"The run keeps the {rules}. They speak of what they name; other leakage is for you to judge."
    return f"The run breaks {broken} of the {rules}: by the policy the model must not be released."


def _with_numbers(verdict: Verdict) -> Markup:
    """What a rule is about, the limit and what was found, and for how many."""
    limit, found = told_apart(verdict.limit, verdict.found)
    concerned = f" {verdict.offending:,} example{'s' if verdict.offending > 1 else ''} concerned." * bool(
        verdict.offending
    )
    sentence = f"{verdict.detail[:1].upper()}{verdict.detail[1:]}: {found}, where the policy says {limit}.{concerned}"
    return join(sentence, " ", tag("code", verdict.rule))


def _kept_rules(kept: list[Verdict]) -> Markup:
    title = f"{len(kept)} rule{'s' if len(kept) > 1 else ''} kept"
    return tag("details", tag("summary", title), tag("ul", [tag("li", _with_numbers(verdict)) for verdict in kept]))
