"""The page of a report, and that of two compared runs: templates over one context.

A template a block, in ``templates/``; all of them see the fields of one context object and nothing else. The public
page has a smaller one, of aggregates: a block that asks for more, be it by mistake, cannot be rendered from it.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING, Any

import numpy as np
from markupsafe import Markup

from torchfil.gate.gate import concerned, in_words, large_delta
from torchfil.gate.rules import Verdict, told_apart
from torchfil.report import examples, formats
from torchfil.report.charts import attack_points, charts_of, comparison_chart, rdp_bounds, rero_points
from torchfil.report.comparison import Comparison, changes, in_short
from torchfil.report.context import Report, named_level
from torchfil.report.leaks import Advice, Leaks, PriorGuess, advise, prior_guess, unprotected
from torchfil.report.summary import AttributeSummary, Summary
from torchfil.report.svg import Chart
from torchfil.run.baselines import NOT_MEASURED, share_in_words, share_of_blind_guess, status_of
from torchfil.run.saved_run import SavedRun
from torchfil.utils.errors import require
from torchfil.utils.text import visible

if TYPE_CHECKING:
    from jinja2 import Environment

MOST_ATTRIBUTES, MOST_MOVED = 24, 10


@dataclass(frozen=True)
class ChosenAttributes:
    """The attributes that a table shows: all where they are few, else the most exposed where they can be compared.

    Attributes:
        shown: In the order of the table.
        ranked: Whether they are the most exposed; otherwise the first.
    """

    shown: list[AttributeSummary]
    ranked: bool

    @property
    def worst(self) -> AttributeSummary:
        """The one with the smallest share of a blind guess's error."""
        return min(self.shown, key=lambda a: min(a.share.values()))


@dataclass(frozen=True)
class PublicContext:
    """Everything that the templates of a public page can see: aggregates, and what is made from them.

    Attributes:
        report: The material; of a public page without the run.
        summary: Aggregates.
        leaks: The questions and attributes that are not protected.
        advice: What to do.
        charts: By name.
        chosen_attributes: Those that tables show.
        rounds_table: How the weights of spared examples were chosen: a head, and a line for each training.
        rdp_bounds: Bounds from ε, by name.
        rero: Success without and with the model.
        from_data: Whether the error of a blind guess is made from the data, and may be told.
        num_breaking: How many examples a broken rule concerns.
    """

    report: Report
    summary: Summary
    leaks: Leaks
    advice: Advice
    charts: dict[str, Chart]
    chosen_attributes: ChosenAttributes
    rounds_table: list[list[str]]
    rdp_bounds: dict[str, float]
    rero: list[tuple[float, float]]
    from_data: bool
    num_breaking: int


@dataclass(frozen=True)
class PrivateContext(PublicContext):
    """What the templates of a confidential page see besides.

    Attributes:
        run: The run.
        verdicts: What the rules of a policy found; None where no policy was given.
        ends: The most and the least exposed examples.
        named_spared: Those with the smallest weights.
        texts: Tokens, text by text.
        priors: Questions beside the data's own prior.
        spread: Of attributes the smallest and largest value and the mean.
        num_drawn: How many dots each attack's chart has.
        table: The table of examples.
    """

    run: SavedRun
    verdicts: list[Verdict] | None
    ends: examples.Ends
    named_spared: examples.Spared
    texts: list[tuple[str, dict[str, list[examples.Token]]]]
    priors: dict[str, PriorGuess]
    spread: dict[str, tuple[float, float, float]]
    num_drawn: list[int]
    table: examples.Table


def context_of(report: Report) -> PublicContext:
    """The context of a page: a :class:`PrivateContext` unless the report is redacted."""
    summary, run, leaks = report.summary, report.run, unprotected(report)
    broken = [verdict for verdict in report.verdicts or [] if not verdict.passed]
    public = PublicContext(
        report=report,
        summary=summary,
        leaks=leaks,
        advice=advise(report, leaks),
        charts=charts_of(report),
        chosen_attributes=_chosen(summary.tracked),
        rounds_table=_rounds(summary),
        rdp_bounds=rdp_bounds(summary),
        rero=rero_points(summary),
        from_data=run is not None and run.yardsticks is not None,
        num_breaking=len(concerned(broken)),
    )
    if run is None:
        return public

    measured = status_of(run) != NOT_MEASURED
    priors = {question.name: prior_guess(question, measured) for question in run.questions}
    ends, spared = examples.most_and_least_exposed(report.tabled_run()), examples.spared_examples(run)
    named = [it.row for it in ends.most + ends.least] + [row for row, _, _ in spared.rows]
    return PrivateContext(
        **vars(public),
        run=run,
        verdicts=report.verdicts,
        ends=ends,
        named_spared=spared,
        texts=examples.tokens_of(run),
        priors={name: guess for name, guess in priors.items() if guess is not None},
        spread=_spread(run),
        num_drawn=[len(attack_points(attack)) for attack in run.attacks],
        table=examples.table_of(report, named),
    )


def _chosen(tracked: list[AttributeSummary]) -> ChosenAttributes:
    if len(tracked) > MOST_ATTRIBUTES and all(a.share for a in tracked):
        return ChosenAttributes(sorted(tracked, key=lambda a: min(a.share.values()))[:MOST_ATTRIBUTES], True)
    if len(tracked) > MOST_ATTRIBUTES and len({a.unit for a in tracked}) == 1 and all(a.error for a in tracked):
        return ChosenAttributes(sorted(tracked, key=lambda a: min(a.error.values()))[:MOST_ATTRIBUTES], True)
    return ChosenAttributes(tracked[:MOST_ATTRIBUTES], False)


def _rounds(summary: Summary) -> list[list[str]]:
    """A head and one line for each training; columns that no round has are left out."""
    rounds = {} if summary.spared is None else summary.spared.rounds
    columns: dict[str, tuple[str, Callable[[Any], str]]] = {
        "num_spared": ("Spared", formats.count),
        "smallest_weight": ("Least ω", formats.number),
        "worst": ("Worst", formats.number),
        "worst_end": ("its end", formats.number),
        "num_below": ("Short", formats.count),
        "group_ratio": ("Groups", formats.number),
        "score": ("Score", lambda score: formats.number(score, 4)),
        "epsilon": ("ε", formats.number),
        "seconds": ("Seconds", lambda seconds: f"{seconds:,.0f}"),
    }
    known = [
        name
        for name in columns
        if any(not (isinstance(value, float) and math.isnan(value)) for value in rounds.get(name, []))
    ]
    fresh = rounds.get("fresh", [False] * len(rounds.get("num_spared", [])))
    lines = [
        [f"{place + 1}{', fresh' * bool(is_fresh)}", *(columns[name][1](rounds[name][place]) for name in known)]
        for place, is_fresh in enumerate(fresh)
    ]
    return [["Training", *(columns[name][0] for name in known)], *lines]


def _spread(run: SavedRun) -> dict[str, tuple[float, float, float]]:
    if run.attributes is None or run.yardsticks is None:
        return {}
    spread = run.yardsticks.attributes
    ends = zip(spread.low.tolist(), spread.high.tolist(), spread.mean.tolist(), strict=True)
    return dict(zip(run.attributes.names, ends, strict=True))


@dataclass(frozen=True)
class Section:
    """A chapter of the page.

    Attributes:
        slug: Its address in the page.
        title: Its heading.
        confidential: Whether a public page leaves it out.
        render: Its content; None: the template of its slug.
    """

    slug: str
    title: str
    confidential: bool = False
    render: Callable[[Report], Markup | None] | None = None


_SECTIONS = [
    Section("verdict", "May it be released?", confidential=True),
    Section("findings", "In short"),
    Section("training", "What was trained"),
    Section("linear", "What was released"),
    Section("merged", "Several runs together"),
    Section("assumptions", "What the numbers assume"),
    Section("distribution", "How closely examples could be rebuilt"),
    Section("bounds", "Beside other bounds"),
    Section("exposed", "The most and the least exposed", confidential=True),
    Section("spared", "Who was spared"),
    Section("words", "Which words leak", confidential=True),
    Section("attributes", "Single attributes"),
    Section("questions", "What any attacker can tell"),
    Section("groups", "Who is exposed more than others"),
    Section("epsilon", "Individual ε"),
    Section("attacks", "Attacks"),
    Section("history", "Over the course of training"),
    Section("examples", "Every example", confidential=True),
    Section("decision", "Decision"),
]


def register_section(
    slug: str, title: str, render: Callable[[Report], Markup | None], *, before: str = "decision"
) -> None:
    """Add a section to every report written from now on.

    Args:
        slug: Its address in the page, unique.
        title: Its heading.
        render: From the report's material to HTML (``markupsafe.Markup``: what is not is escaped); None leaves the
            section out. In a redacted report ``report.run`` is None.
        before: The slug of the section it stands before.
    """
    slugs = [section.slug for section in _SECTIONS]
    require(slug not in slugs, f"slug={slug!r} is taken by a section; take another of your own")
    require(before in slugs, f"before={before!r} is no section; choose from {', '.join(slugs)}")
    _SECTIONS.insert(slugs.index(before), Section(slug, title, render=render))


def render(report: Report) -> str:
    """The whole page.

    Guarantees:
        * It loads nothing: a content security policy forbids every connection, and only the page's own script runs.
        * Every string from the run is escaped.
    """
    context, public = vars(context_of(report)), report.run is None

    # sections with nothing to say have no number and no entry in the contents
    sections = list[tuple[Section, Markup]]()
    for section in _SECTIONS:
        if section.render is not None:
            content = section.render(report)
        else:
            content = None if public and section.confidential else block(section.slug, context)
        if content:
            sections.append((section, content))
    cover = block("cards", context) if public else block("cover", context) + block("cards", context)
    title, script = str(report.about("title") or "Leakage report"), Markup(asset("page.js"))
    page = {**context, "sections": sections, "cover": _unbroken(cover), "title": title, "script": script}
    return _environment().get_template("page.html").render(page | _dress(public))


def render_comparison(comparison: Comparison) -> str:
    """The whole page of two compared runs.

    Guarantees:
        * It loads nothing and runs no script: a content security policy forbids both.
        * Every string from the runs is escaped.
        * Redacted, it holds no id and no number of fewer than ``smallest`` examples.
    """
    one, other, moves = comparison.before.title, comparison.after.title, comparison.moves
    context: dict[str, Any] = {
        "comparison": comparison,
        "title": f"{one} → {other}" if one != other else f"{one}, before and after",
        "script": "",
        "in_short": in_short(comparison),
        "changes": changes(comparison),
    }
    if moves is not None:
        # by log(after / before); 0 where both bounds are 0 or infinite
        with np.errstate(divide="ignore", invalid="ignore"):
            change = np.nan_to_num(np.log(moves.after) - np.log(moves.before), nan=0.0, posinf=np.inf, neginf=-np.inf)
        down, up = np.argsort(change, kind="stable"), np.argsort(-change, kind="stable")
        chart, drawn = comparison_chart(moves)
        context |= {
            "moved": moves,
            "moved_down": [row for row in down[:MOST_MOVED] if change[row] < 0],
            "moved_up": [row for row in up[:MOST_MOVED] if change[row] > 0],
            "newly": [] if moves.newly_exposed is None else moves.ids[moves.newly_exposed].tolist(),
            "chart": chart,
            "drawn": drawn,
        }
    page = _environment().get_template("compared.html").render(context | _dress(comparison.redacted))
    head, body = page.split("<body>", 1)
    return f"{head.lstrip()}<body>{_unbroken(Markup(body))}"


def block(name: str, context: Mapping[str, Any]) -> Markup:
    """A block of the page from its template, its lines joined."""
    text = _environment().get_template(f"{name}.html").render(context)
    return Markup(re.sub(r"\s*\n\s*", " ", text).strip())


def asset(name: str) -> str:
    """A file of the page: ``charts.css``, ``page.css`` or ``page.js``."""
    return (resources.files("torchfil.report") / "assets" / name).read_text(encoding="utf-8")


def label_of(redacted: bool) -> str:
    """Who may read the page, as it stands above all else and on every sheet."""
    return "Public version: aggregates only" if redacted else "Confidential: made from private data"


def _dress(redacted: bool) -> dict[str, Any]:
    label = label_of(redacted)
    style = asset("charts.css") + asset("page.css").replace("{{label}}", label)
    return {"label": label, "style": Markup(style)}


def _unbroken(text: Markup) -> Markup:
    """No line ends between a number and its per-cent sign, as it would on narrow screens and in cards."""
    return text.replace(" %", "\u00a0%")


@functools.cache
def _environment() -> Environment:
    """Templates that escape every value, show what acts instead of being seen, and stop at what they do not know."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    def safe(value: Any) -> Any:
        if value is None:
            return ""
        return visible(value, keep="\n\t") if isinstance(value, str) and not isinstance(value, Markup) else value

    environment = Environment(
        loader=PackageLoader("torchfil.report"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=safe,
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.do"],
    )
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    environment.tests["infinite"] = math.isinf
    environment.globals |= {"told_apart": told_apart, "large_delta": large_delta}
    environment.filters |= {name: getattr(formats, name) for name in formats.__all__}
    environment.filters |= {
        "in_words": in_words,
        "levels_in": _levels_in,
        "named_level": named_level,
        "plural": lambda some, name: f"{some:,} {name}{'' if some == 1 else 's'}",
        "sha256": lambda text: base64.b64encode(hashlib.sha256(text.encode()).digest()).decode(),
        "share_in_words": share_in_words,
        "share_of": lambda error, guess: share_in_words(float(share_of_blind_guess(error, guess**0.5))),
    }
    return environment


def _levels_in(tables: Iterable[Mapping[str, float]]) -> list[str]:
    """The levels of exposure that some of the tables have."""
    tables = list(tables)
    return [level for level in ("0", "0.05", "0.5") if any(level in table for table in tables)]
