"""Three cards on the first screen: who is exposed, what of them, and what to do about it.

A public page's cards are made from the summary alone, as everything in it: ``report.run`` is None there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from torchfil.gate.gate import concerned
from torchfil.report.page.context import Report, paragraph
from torchfil.report.page.html import Markup, count, join, number, tag
from torchfil.report.page.sections.groups import headline
from torchfil.report.page.sections.to_do import advice
from torchfil.report.page.wording import is_linear, over, randomness
from torchfil.report.page.worst import blind_error, exposed_count, unprotected

__all__ = ["Card", "render"]

MOST = 3  # sentences of a card


@dataclass(frozen=True)
class Card:
    """A card.

    Attributes:
        slug: "who", "what" or "todo".
        title: Its heading.
        figure: A number or a word in large letters.
        lines: Sentences below it.
        bound: Who is bound, and what is random.
    """

    slug: str
    title: str
    figure: str
    lines: list[Markup]
    bound: str
    links: list[tuple[str, str]] = field(default_factory=list)


def render(report: Report) -> Markup:
    """The three cards."""
    return tag("div", [_drawn(card) for card in (who(report), what(report), to_do(report))], class_="answers")


def _drawn(card: Card) -> Markup:
    links = [tag("a", text, href=target) for text, target in card.links]
    return tag(
        "article",
        tag("h2", card.title),
        paragraph(card.figure, class_="figure"),
        [paragraph(line) for line in card.lines],
        paragraph([[link, " "] for link in links], class_="links screen") if links else None,
        paragraph(card.bound, class_="bound-to"),
        class_="answer",
        id=f"card-{card.slug}",
    )


def who(report: Report) -> Card:
    """How many are exposed: an unbiased guess of their inputs may beat a blind one."""
    summary = report.summary
    exposed, everyone = exposed_count(report)
    lines, links = list[Markup](), list[tuple[str, str]]()

    # in large letters how many; nobody is called safe where no yardstick is known
    if exposed is None:
        figure = "Not known"
        yardstick = tag("code", "save_run(input_range=…)")
        lines.append(
            join("How far off a blind guess is was not saved (", yardstick, "): nobody can be called exposed or safe.")
        )
    elif exposed == 0:
        figure = "Nobody"
        text = "as a whole can be estimated more closely than by a blind guess. With beliefs, the model may still help."
        lines.append(join(f"Without prior beliefs, none of {everyone:,} measured examples {text}"))
    else:
        about = "about " if summary.redacted and isinstance(exposed, int) else ""
        figure = f"{about}{count(exposed)} of {everyone:,}"
        lines.append(join("examples could be estimated more closely than by a blind guess: they are exposed."))
        links.append(("Show them in the table", "#show-exposed"))

    lines += _most_unequal(report)

    # beside them those whom a rule names, and those of whom nothing is known
    lines.append(join(_smallest(report)))
    breaking = len(concerned([verdict for verdict in report.verdicts or [] if not verdict.passed]))
    if breaking:
        some = f"{breaking:,} example{'s' if breaking != 1 else ''}"
        lines.append(join(f"A broken rule concerns {some}."))
        links.append(("Show whom a broken rule concerns", "#show-broken"))
    if summary.not_measured != 0:
        lines.append(join(f"{_capital(count(summary.not_measured))} not measured: not safe, only not known."))
        links.append(("Show who was not measured", "#show-unmeasured"))
    bound = f"Unbiased attackers, on average {over(report)}. {randomness(report)}"
    return Card("who", "Who is exposed?", figure, lines, bound, links if report.run is not None else [])


def _most_unequal(report: Report) -> list[Markup]:
    """The grouping whose groups differ most, if by more than the smallest effect that is called one."""
    unequal = [grouping for grouping in report.summary.groupings if headline(grouping, report) is not None]
    if not unequal:
        return []
    worst = max(unequal, key=lambda grouping: grouping.disparity.ratio if grouping.disparity is not None else 0.0)
    assert worst.disparity is not None
    times = "beyond all measure more than" if math.isinf(worst.disparity.ratio) else ""
    times = times or f"{number(worst.disparity.ratio, 2)} times as much as"
    text = f"By {worst.name}, {worst.disparity.most} leaks {times} {worst.disparity.least} (typical FIL)."
    return [join(text)]


def what(report: Report) -> Card:
    """The worst questions and attributes, each with what a blind guess gets."""
    leaks = unprotected(report)
    links = [("All questions", "#questions")] * bool(report.summary.questions)
    links += [("All attributes", "#attributes")] * any(a.error or a.share for a in report.summary.attributes)

    # nothing asked, nothing known and nothing leaking are three answers
    if not leaks.asked:
        figure = "Not asked"
        lines = [
            join(
                "No question was asked (",
                tag("code", "questions="),
                ") and no attribute tracked (",
                tag("code", 'track=("diagonal",)'),
                "): the run tells of all inputs of an example together only.",
            )
        ]
    elif not leaks.sentences and leaks.unknown:
        figure, lines = "Not known", []
    elif not leaks.sentences:
        figure = "Nothing"
        lines = [join(f"that was asked or tracked can be estimated much better than by a blind guess ({leaks.asked}).")]
    else:
        some = len(leaks.sentences)
        figure = f"{some} of {leaks.number} tracked" if leaks.number > 1 else leaks.asked
        lines = [join(sentence) for sentence in leaks.sentences[:MOST]]
        if some > MOST:
            lines.append(join(f"{some - MOST} more below."))

    lines += [join(sentence) for sentence in leaks.unknown]
    return Card("what", "What leaks?", figure, lines, f"{_bound_by_what_leaks(report)} {randomness(report)}", links)


def _bound_by_what_leaks(report: Report) -> str:
    """Who is bound by what the card tells; without questions, that nothing in it binds a biased attacker."""
    attributes = ["Attributes: unbiased attackers."] * bool(report.summary.attributes)
    if report.summary.questions:
        return " ".join(["Questions: every attacker, if answers were as likely before as said.", *attributes])
    return " ".join([*attributes, "No question was asked: nothing in this card binds biased attackers."])


def to_do(report: Report) -> Card:
    """Noise, steps or sparing that would help, and what they would give."""
    found = advice(report)
    return Card("todo", "What to do?", found.figure, found.lines, found.bound)


def _smallest(report: Report) -> str:
    """The smallest MSE bound beside that of a blind guess."""
    summary = report.summary
    if not summary.exposure:
        return "Too few examples were measured."
    end = summary.lowest_end
    known = end is not None and not math.isnan(end)
    least = end if known else summary.exposure[0].mse_bound
    of = f", the {summary.smallest} most exposed together" if summary.redacted else ""
    kind = "exact" if is_linear(report) else "lower end of a 95 % interval" if known else "an estimate"
    blind = blind_error(report)
    beside = "" if blind is None else f"; that of a blind guess is {number(blind**2)}"
    return f"Smallest MSE bound{of}: {number(least)} ({kind}){beside}."


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
