"""What any attacker can tell: the largest rate of right guesses at few wrong ones."""

from __future__ import annotations

from torchfil.report.page.context import Report, named_level, paragraph
from torchfil.report.page.html import Markup, join, table
from torchfil.report.page.wording import is_linear, randomness
from torchfil.report.summary import FALSE_POSITIVE_RATE, QuestionSummary

__all__ = ["render"]

_MOST_ANSWERS = 6


def render(report: Report) -> Markup | None:
    """A table by question; None where none was asked."""
    questions = report.summary.questions
    if not questions:
        return None
    levels = [level for level in ("0", "0.05", "0.5") if any(level in question.rate for question in questions)]
    head = [
        "Question",
        "Answers",
        *(named_level(float(level), report.summary.smallest, report.summary.redacted) for level in levels),
        "Examples above 5 %",
        "above 50 %",
    ]
    rows = [
        [
            question.name,
            _answers(question),
            *(_percent(question.rate[level]) if level in question.rate else "" for level in levels),
            _count(question.above["0.05"]),
            _count(question.above["0.5"]),
        ]
        for question in questions
    ]

    percent = f"{100 * FALSE_POSITIVE_RATE:g} %"
    return join(
        paragraph(
            "These numbers bind every attacker, biased or not, whatever else it knows. Let one look at everything "
            f"that was released, and claim that an example has its true answer, wrongly in at most {percent} of "
            f"such runs. The table says in how many runs it can be right. {percent} means that it can only guess; "
            "100 % that nothing is hidden."
        ),
        table(head, rows),
        paragraph(
            randomness(report),
            " The numbers are those of the worst of each question’s answers, ",
            "computed in closed form: the best attacker attains them."
            if is_linear(report)
            else "estimated, at the upper end of the 95 % interval of each example by itself.",
            class_="note",
        ),
    )


def _answers(question: QuestionSummary) -> str:
    names = ", ".join(question.answers[:_MOST_ANSWERS])
    return names + (" …" if len(question.answers) > _MOST_ANSWERS else "")


def _percent(rate: float) -> str:
    return f"{100 * min(rate, 1.0):.3g} %"


def _count(count: int | str) -> str:
    return f"{count:,}" if isinstance(count, int) else count
