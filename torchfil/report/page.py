"""The page of a report, and that of two compared runs: templates over one context.

A template a block, in ``templates/``; all of them see one context (:func:`context_of`) and nothing
else. The public page has a smaller one, of aggregates: a block that asks for more, be it by
mistake, cannot be rendered from it.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import hashlib
import json
import math
import os
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from markupsafe import Markup

from torchfil.gate.gate import check, decision, default_policy, large_delta
from torchfil.gate.policy import Policy
from torchfil.gate.rules import RULES, STATES, Verdict
from torchfil.report import charts, examples, formats
from torchfil.report.comparison import Comparison, changes, in_short
from torchfil.report.leaks import prior_guess
from torchfil.report.options import Options, options_of
from torchfil.report.signature import Signature
from torchfil.report.summary import Report, named_level, summarise
from torchfil.run import baselines
from torchfil.run.saved_run import SavedRun, audited_epsilon, leakage_columns
from torchfil.run.unit import unit_of
from torchfil.utils.errors import RunFileError
from torchfil.utils.files import explain_disk_full, file_sha256, flush, temporary_beside
from torchfil.utils.text import json_ready, write_csv_parts

if TYPE_CHECKING:
    from jinja2 import Environment

MOST_MOVED = 10


@dataclass(frozen=True)
class Ruling:
    """What a policy says of a run.

    Attributes:
        word: Of three words, what to do.
        policy: The policy's name.
        declared: What people stated beside it, word for word.
        rows: Each rule as (state, title, found, limit), in the order of the states.
    """

    word: str
    policy: str
    declared: dict[str, str]
    rows: list[tuple[str, str, str, str]]

    def count(self, *states: str) -> int:
        """How many rules are in one of these states."""
        return sum(state in states for state, *_ in self.rows)


def ruling_of(verdicts: list[Verdict], policy: Policy) -> Ruling:
    """The verdicts of a policy as a table.

    What a rule misses is told without the code that would keep it.
    """
    rows = []
    for verdict in verdicts:
        title, found, limit = RULES[verdict.key].row(verdict)
        found = verdict.detail.partition(": ")[0] if verdict.found is None else found
        rows.append((verdict.state, title, found, limit))
    rows.sort(key=lambda row: list(STATES).index(row[0]))
    return Ruling(decision(verdicts), policy.name or "the policy", policy.declared, rows)


def context_of(report: Report, live: float | None = None) -> dict[str, object]:
    """Everything that the templates of a page can see, by name.

    A public page has aggregates and what is made from them alone:

    * ``report``, the material, of a public page without the run, its ``summary`` and its ``unit``;
    * ``charts`` by name, and ``answers``, questions without and with the model.

    A confidential page has besides:

    * ``run``; ``ruling``, what the policy says, None where the run does not keep what its rules are
      about; ``options``, what would keep the policy;
    * ``most``, the most exposed examples, and ``measures``, by which examples are flagged;
    * ``texts``, tokens text by text;
    * ``live``, of a page that follows a run file: when it was written, in seconds since 1970; such
      a page has no table;
    * ``priors``, questions beside the data's own prior; ``table``, the table of examples.
    """
    run, verdicts, policy = report.run, report.verdicts, report.policy
    measures = None if run is None else examples.Measures(run, policy)
    answers = charts.answers_of(report, measures)
    public = {
        "report": report,
        "summary": report.summary,
        "unit": unit_of(report.about("mechanism") or {}),
        "charts": charts.charts_of(report, answers),
        "answers": answers,
        "live": live,
    }
    if run is None or measures is None:
        return public

    ruling, options = None, Options()
    if verdicts is not None and policy is not None:
        ruling, options = ruling_of(verdicts, policy), options_of(run, policy, verdicts)
    most = measures.most()
    priors = {question.name: prior_guess(question, measures.told) for question in run.questions}
    return {
        **public,
        "run": run,
        "ruling": ruling,
        "options": options,
        "most": most,
        "measures": list(measures.flags),
        "with_ratio": measures.ratios is not None,
        "texts": examples.tokens_of(run),
        "priors": {name: guess for name, guess in priors.items() if guess is not None},
        "table": None if live else examples.table_of(report, measures, [each.row for each in most]),
    }


@dataclass(frozen=True)
class Section:
    """A chapter of the page.

    Attributes:
        slug: Its address in the page.
        title: Its heading.
        confidential: Whether a public page leaves it out.
        place: "card" on the first screens, "half" beside its neighbour there, or "fold" below.
    """

    slug: str
    title: str
    confidential: bool = False
    place: str = "fold"


_SECTIONS = [
    Section("verdict", "May it be released?", confidential=True, place="card"),
    Section("alerts", "Before you read on", place="card"),
    Section("closeness", "How close could somebody get?", place="card"),
    Section("questions", "What could anybody learn?", place="half"),
    Section("most-exposed", "Who is exposed most?", confidential=True, place="card"),
    Section("groups", "Are groups treated alike?", place="half"),
    Section("options", "What would fix it?", confidential=True, place="half"),
    Section("attributes", "Single attributes"),
    Section("words", "Which words leak", confidential=True),
    Section("rates", "Questions at few false alarms"),
    Section("attacks", "Attacks"),
    Section("distribution", "Bounds in numbers"),
    Section("bounds", "Beside other bounds"),
    Section("audit", "The audit of ε"),
    Section("epsilon", "Individual ε"),
    Section("spared", "Down-weighted examples"),
    Section("linear", "What was released"),
    Section("merged", "Several runs together"),
    Section("training", "What was trained"),
    Section("assumptions", "What the numbers assume"),
    Section("files", "Files beside this page"),
    Section("decision", "Decision"),
]


def render(report: Report, live: float | None = None) -> str:
    """The whole page; of a page that follows a run, the first screens.

    Guarantees:
        * It loads nothing: a content security policy forbids every connection, and only the page's
          own script runs. A page that follows a run asks its own server for news.
        * Every string from the run is escaped.
    """
    context, public = context_of(report, live), report.run is None

    # sections with nothing to say are left out
    shown = [section for section in _SECTIONS if not (public and section.confidential)]
    shown = [section for section in shown if not (live and section.place == "fold")]
    contents = [(section, block(section.slug, context)) for section in shown]
    sections = [(section, content) for section, content in contents if content]
    title, script = (
        str(report.about("title") or "Leakage report"),
        Markup(asset("live.js" if live else "page.js")),
    )
    page = {**context, "sections": sections, "title": title, "script": script}
    return _environment().get_template("page.html").render(page | _dress(public))


def render_waiting(name: str) -> str:
    """The page that follows a run file of this name before it can be read."""
    page = {"title": name, "live": 0, "script": Markup(asset("live.js")), **_dress(False)}
    return _environment().get_template("waiting.html").render(page).lstrip()


def render_comparison(comparison: Comparison) -> str:
    """The whole page of two compared runs.

    Guarantees:
        * It loads nothing and runs no script: a content security policy forbids both.
        * Every string from the runs is escaped.
        * Redacted, it holds no id and no number of fewer than ``smallest`` examples.
    """
    one, other, moves = comparison.before.title, comparison.after.title, comparison.moves
    context: dict[str, object] = {
        "comparison": comparison,
        "title": f"{one} → {other}" if one != other else f"{one}, before and after",
        "script": "",
        "in_short": in_short(comparison),
        "changes": changes(comparison),
    }
    if moves is not None:
        # by log(after / before); 0 where both bounds are 0 or infinite
        with np.errstate(divide="ignore", invalid="ignore"):
            change = np.nan_to_num(
                np.log(moves.after) - np.log(moves.before), nan=0.0, posinf=np.inf, neginf=-np.inf
            )
        down, up = np.argsort(change, kind="stable"), np.argsort(-change, kind="stable")
        context |= {
            "moved": moves,
            "moved_down": [row for row in down[:MOST_MOVED] if change[row] < 0],
            "moved_up": [row for row in up[:MOST_MOVED] if change[row] > 0],
            "newly": [] if moves.newly_exposed is None else moves.ids[moves.newly_exposed].tolist(),
        }
    return (
        _environment()
        .get_template("compared.html")
        .render(context | _dress(comparison.redacted))
        .lstrip()
    )


def block(name: str, context: Mapping[str, object]) -> Markup:
    """A block of the page from its template, its lines joined."""
    text = _environment().get_template(f"{name}.html").render(context)
    return Markup(re.sub(r"\s*\n\s*", " ", text).strip())


def asset(name: str) -> str:
    """A file of the page: ``page.css``, ``page.js`` or ``live.js``."""
    return (resources.files("torchfil.report") / "assets" / name).read_text(encoding="utf-8")


def digest_of(text: str) -> str:
    """SHA-256 of a script, as a content security policy names it."""
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _dress(redacted: bool) -> dict[str, object]:
    """Who may read the page, as it stands above all else and on every sheet; and its style."""
    label = (
        "Public version: aggregates only" if redacted else "Confidential: made from private data"
    )
    return {"label": label, "style": Markup(asset("page.css").replace("{{label}}", label))}


@functools.cache
def _environment() -> Environment:
    """The templates with all that pages are made from."""
    environment = formats.templates()
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    environment.tests["infinite"] = math.isinf
    environment.globals |= {
        "large_delta": large_delta,
        "classes": baselines.CLASSES,
        "tones": charts.TONES,
    }
    environment.globals["states"] = STATES
    environment.globals["ctime"] = time.ctime
    environment.filters |= {"named_level": named_level, "plainly": _plainly, "sha256": digest_of}
    environment.filters["audited"] = audited_epsilon
    return environment


def _plainly(sentence: str) -> str:
    """What to do, without the code that does it; "" where nothing else is left.

    Example:
        >>> (
        ...     _plainly("Choose σ for ε: make_private_with_epsilon(…)."),
        ...     _plainly("Train without noise_seed=."),
        ... )
        ('Choose σ for ε.', '')
    """
    said = sentence.partition(": ")[0].rstrip(".")
    return "" if re.search(r"\w[(=]", said) else f"{said}."


# ---------------------------------------------------------------- the folder: complete or not there


PAGE, SUMMARY, MARKER = "index.html", "summary.json", "torchfil-report"
_AT_ONCE = 2**18  # rows of leakage.csv that are written together


def write_report(
    run: SavedRun,
    directory: str | os.PathLike[str],
    *,
    redacted: bool = False,
    min_group: int = 10,
    policy: Policy | None = None,
    signature: Signature | None = None,
    digests: Mapping[str, str] | None = None,
) -> Path:
    """Write a report: ``index.html``, ``summary.json`` and, unless redacted, a table of all
    examples.

    Guarantees:
        * The folder is replaced only when the new report is complete. A folder that is not a report
          is never replaced.
        * Only the owner may read it (folder 0700, files 0600).
        * The page loads nothing from anywhere and opens from the disk.
        * Redacted: no file holds an id, a value of one example, the data's hash or the seed; every
          number rests on ``min_group`` examples or more. No noise is added: it is not a
          differentially private release.

    Args:
        run: What to report.
        directory: The folder to write; missing folders above it are made.
        redacted: Whether to write the version that may be published.
        min_group: The least number of examples behind a number of the redacted version, at least 2.
        policy: Thresholds (:func:`torchfil.gate.policy.load_policy`): the page begins with the
            verdict. None: those of the template (:func:`torchfil.gate.gate.default_policy`), which
            the page then names.
        signature: Who signed the run (:func:`torchfil.report.signature.verify`); None: the page
            says that nobody did.
        digests: SHA-256 by name (run file, policy, weights), for the sheet to sign; a redacted page
            has none.

    Returns:
        The path of ``index.html``.
    """
    report = report_of(run, policy, redacted=redacted, min_group=min_group)
    summary, verdicts, policy = report.summary, report.verdicts, report.policy
    files, shown = dict[str, str](), {} if redacted else dict(digests or {})
    with _replaced_folder(Path(directory)) as folder:
        # every example, with a digest for the page, which is signed by hand
        if not redacted:
            write_csv_parts(
                folder / "leakage.csv", map(leakage_columns, run.slices(_AT_ONCE)), digits=7
            )
            files["leakage.csv"] = f"every {run.unit.one}"
            shown["leakage.csv"] = file_sha256(folder / "leakage.csv")

        report = replace(report, files=files, digests=shown, signature=signature)
        files[SUMMARY], verdict = "the aggregates", dict[str, object]()
        if verdicts is not None and policy is not None:
            rules = [each.as_dict() for each in verdicts]
            verdict = {"policy": policy.name, "decision": decision(verdicts), "verdict": rules}
        content = {
            "format": MARKER,
            "confidential": not redacted,
            **asdict(summary),
            **verdict,
            "signed_by": None if signature is None else signature.signer,
            "files": files,
        }
        text = json.dumps(
            json_ready(content, for_people=True), indent=1, ensure_ascii=False, allow_nan=False
        )
        (folder / SUMMARY).write_text(text, encoding="utf-8")

        # the page comes last: it names the files beside it
        (folder / PAGE).write_text(render(report), encoding="utf-8", errors="replace")
    return Path(directory) / PAGE


def report_of(
    run: SavedRun, policy: Policy | None, *, redacted: bool = False, min_group: int = 10
) -> Report:
    """The material of a page; the arguments are those of :func:`write_report`."""
    for name in ("fil", "mse_bound"):
        if name not in run.columns:
            raise ValueError(
                f"the run has no column {name!r}, which a report is about; it has "
                f"{sorted(run.columns)}"
            )
    # a verdict may hang on a single example
    if policy is not None and redacted:
        raise ValueError("A public page carries no verdict; drop policy= or redacted=True.")
    if redacted:
        return Report(summarise(run, redacted=True, min_group=min_group))
    judging, verdicts = policy or default_policy(run), None
    try:
        verdicts = check(run, judging)
    except RunFileError:  # the run keeps too little; nobody asked for a verdict
        if policy is not None:
            raise
    summary = summarise(run, min_group=min_group, policy=judging)
    return Report(summary, run, verdicts=verdicts, policy=judging)


@contextlib.contextmanager
def _replaced_folder(target: Path) -> Iterator[Path]:
    """A new folder beside ``target`` that takes its place at the end, and vanishes if anything
    fails.
    """
    target = target.resolve()
    check_replaceable(target)
    with explain_disk_full(target), temporary_beside(target, folder=True) as temporary:
        beside = Path(temporary)
        new = beside / "new"
        new.mkdir(mode=0o700)
        yield new
        for path in new.iterdir():
            path.chmod(0o600)
            flush(path)

        # writing took its time: somebody may have put a file into the folder meanwhile
        check_replaceable(target)
        if target.exists():
            target.rename(beside / "old")
        try:
            new.rename(target)
        except BaseException:
            if (beside / "old").exists():
                (beside / "old").rename(target)
            raise


def check_replaceable(target: Path) -> None:
    """Refuse to replace anything but nothing, an empty folder or a report."""
    if not target.exists():
        return
    if not target.is_dir():
        raise FileExistsError(f"{target} is a file; name a folder for the report")
    own_files: set[str] = set()
    with contextlib.suppress(OSError, ValueError, AttributeError, KeyError, TypeError):
        summary = json.loads((target / SUMMARY).read_text(encoding="utf-8"))
        if summary.get("format") == MARKER:
            own_files = {PAGE, SUMMARY, *summary["files"]}
    foreign = sorted(path.name for path in target.iterdir() if path.name not in own_files)
    if foreign:
        raise FileExistsError(
            f"{target} holds {', '.join(foreign[:3])}{' …' if len(foreign) > 3 else ''}, which is "
            "no part of a report, and is not replaced; name a new folder"
        )
