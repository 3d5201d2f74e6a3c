"""What any attacker can tell: the largest rate of right guesses at few wrong ones."""

from __future__ import annotations

from torchfil.report.page.context import Report, named_level, paragraph
from torchfil.report.page.html import Markup, join, percent, table, tag
from torchfil.report.page.wording import is_linear, randomness
from torchfil.report.prior_guesses import prior_guess
from torchfil.report.summary import FALSE_POSITIVE_RATE, QuestionSummary
from torchfil.run.baselines import NOT_MEASURED, status_of

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

    wrongly = f"{100 * FALSE_POSITIVE_RATE:g} %"
    return join(
        paragraph(
            "These numbers bind every attacker, biased or not, whatever else it knows"
            f"{'' if is_linear(report) else ' except which steps drew the example'}. Let one look at everything "
            f"that was released, and claim that an example has its true answer, wrongly in at most {wrongly} of "
            f"such runs. The table says in how many runs it can be right. {wrongly} means that it can only guess; "
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
        _beside_shares(report),
    )


def _beside_shares(report: Report) -> Markup | None:
    """The same beside the answers' own shares, which are the data's: not in the public version."""
    if report.run is None:
        return None

    # a question without all answers has no prior, and no row
    measured = status_of(report.run) != NOT_MEASURED
    found = [(question.name, prior_guess(question, measured)) for question in report.run.questions]
    rows = [
        [name, percent(guess.blind), percent(guess.most), percent(guess.mean)]
        for name, guess in found
        if guess is not None
    ]
    if not rows:
        return None

    # a mean hides rare answers, which the last paragraph says
    return join(
        tag("h3", "Beside what is common"),
        paragraph(
            "Somebody who knows of an example only how common each answer is does best to name the commonest always. "
            "With everything that was released no such attacker is right more often than this, on average over what is "
            "random and over the answer, drawn as it is common. Who knows more beforehand starts from more."
        ),
        table(
            ["Question", "Naming the commonest", "The most exposed, at most", "All examples on average, at most"], rows
        ),
        paragraph(
            "A mean over answers says little about examples with a rare one. The table above, and “not protected” on "
            "the first screen, are about an example’s true answer beside one other.",
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
