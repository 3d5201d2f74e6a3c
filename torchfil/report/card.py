"""What a model card may say of a run: a section of Markdown with metadata, and a CycloneDX bill of
materials.

All of it is made from the summary of the public page (:func:`torchfil.report.summary.summarise`
with ``redacted=True``) and from nothing else: who publishes both, with the same ``min_group``,
tells no more than with one of them. Words and numbers are chosen in ``templates/card_facts.txt``,
once for all documents.

A **decision** is the exception. "Do not release" may hang on a single example, and so may "May be
released". A card therefore has a decision only if somebody names the policy, and only "May be
released": no other card is written. What is then told of everybody is one bit, that all of them
keep the policy's rules. A model that is released after a gate with a known policy tells the same.
What a rule found is never told.
"""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass

from markupsafe import Markup

from torchfil.gate.gate import check, decision, large_delta
from torchfil.gate.policy import LIMITS, Policy
from torchfil.gate.rules import RULES
from torchfil.report import formats
from torchfil.report.summary import Report, named_level, summarise
from torchfil.run.baselines import CLASSES
from torchfil.run.saved_run import SavedRun
from torchfil.run.unit import Facts, unit_of
from torchfil.utils.errors import installed_by
from torchfil.utils.text import json_ready, marked, visible

__all__ = ["Card", "NotReleasedError", "card_of", "merged"]

BEGIN, END = "<!-- torchfil: begin -->", "<!-- torchfil: end -->"
_NO_LIMITS = ("name", "extends", "aggregate", "levels", "declared")
_PARTS = re.compile(
    r"\A(?:(\s*---[ \t]*\r?\n)(.*?)(^---[ \t]*(?:\r?\n|\Z)))?(.*)\Z", re.DOTALL | re.MULTILINE
)
_BEHIND_VALUE = re.compile(r"\s*(^[ \t]*#.*\s*)*\Z", re.MULTILINE)  # white space and comments


class NotReleasedError(ValueError):
    """The decision of the policy that the card should name is another than "May be released"."""


@dataclass(frozen=True)
class Card:
    """What may be published of a run.

    Attributes:
        section: Markdown between two markers, by which a later section replaces it.
        metadata: For the front matter of a card on the Hugging Face Hub: ``tags`` and
            ``model-index``.
        bom: A CycloneDX 1.6 document with one machine-learning model.
    """

    section: str
    metadata: Facts
    bom: Facts


def card_of(run: SavedRun, *, min_group: int = 10, policy: Policy | None = None) -> Card:
    """The card of a run.

    Guarantees:
        * It holds no id and no value of one example; every number rests on ``min_group`` examples
          or more.
        * Every text of the run is escaped.
        * The same run gives the same card.

    Args:
        run: A saved run.
        min_group: The least number of examples behind a number, at least 2.
        policy: Its name, limits and decision are published; None: none is.

    Raises:
        NotReleasedError: The policy's decision is another than "May be released".
    """
    limits = {} if policy is None else _limits_kept(run, policy)

    # facts first, which all documents share
    report = Report(summarise(run, redacted=True, min_group=min_group))
    numbers, points = list[Facts](), list[tuple[str, str]]()

    def number(
        value: object, low: float | None = None, high: float | None = None, **words: str
    ) -> None:
        known = {
            name: end
            for name, end in (("lower", low), ("upper", high))
            if end is not None and math.isfinite(end)
        }
        if value is not None and value == value:
            told = {"value": json_ready(value, for_people=True), "ends": known}
            numbers.append({name: _line(text) for name, text in words.items()} | told)

    def point(topic: str, *, caller: Callable[[], str]) -> str:
        points.extend([(_line(topic), text)] if (text := _line(caller()).strip()) else [])
        return ""

    context = {
        "report": report,
        "summary": report.summary,
        "numbers": numbers,
        "points": points,
        "number": number,
        "point": point,
        "policy": policy,
        "limits": limits,
        "classes": CLASSES,
        "unit": unit_of(report.about("mechanism") or {}),
        "title": _line(report.about("title") or "model"),
        "warned": large_delta(report.about("delta"), len(run)),
        "level": named_level,
        "root": math.sqrt,
    }
    _rendered("card_facts.txt", _line, context)
    documents = json.loads(_rendered("card.json", str, context))
    section = re.sub(
        r"\n{3,}", "\n\n", _rendered("card.md", lambda text: Markup(marked(text)), context)
    ).strip()
    return Card(f"{BEGIN}\n{section}\n{END}", documents["metadata"], documents["bom"])


def _limits_kept(run: SavedRun, policy: Policy) -> dict[str, object]:
    """The limits of a policy that a run keeps, at the level "error", and the settings that they are
    read with.
    """
    verdicts = check(run, policy)
    if "max_worsening" in {verdict.key for verdict in verdicts}:
        raise ValueError(
            "the policy’s max_worsening needs an earlier run, which a card has not; take the rule "
            "out of its policy"
        )
    kept = [verdict.key for verdict in verdicts if verdict.level == "error"]  # others may be broken
    if not any(key in LIMITS for key in kept):
        raise ValueError("the policy has no limit of its own at the level error; set one")
    if (word := decision(verdicts)) != "May be released":
        raise NotReleasedError(
            f"the policy’s decision is “{word}”, which may hang on a single example and stays out "
            "of public cards; leave the policy out for a card without a decision"
        )
    settings = [
        name for name in Policy.__struct_fields__ if name not in RULES and name not in _NO_LIMITS
    ]
    chosen = [name for name in settings if getattr(policy, name) != getattr(Policy(), name)]
    return {key: getattr(policy, key) for key in (*kept, *chosen)}


def _line(text: str) -> str:
    return visible(re.sub(r"\s+", " ", text))


def _rendered(name: str, shown: Callable[[str], str], context: dict[str, object]) -> str:
    """A template; values that are texts, and no markup of its own, go through ``shown``."""
    env = formats.templates().overlay(
        finalize=lambda v: shown(v) if type(v) is str else "" if v is None else v
    )
    return env.get_template(name).render(context)


# ---------------------------------------------------------------------- into an existing card


def merged(text: str, card: Card) -> str:
    """A card's text with this section and these metadata; from "", a new card.

    Guarantees:
        * Outside the markers and of the front matter's other keys every character stays; so do
          other tags and other results of ``model-index``. Done once more, it changes nothing.

    Raises:
        ValueError: The front matter cannot be read or is not closed, or the markers are not one of
            each, in order.
    """
    opening, front, closing, body = _PARTS.findall(text)[0]
    line_end, rule = ("\r\n", "---\r\n") if "\r\n" in text else ("\n", "---\n")
    if not bool(opening) and body.lstrip().startswith("---"):
        raise ValueError(
            "the card begins with --- but no line --- closes its front matter; add one"
        )
    if not (body.count(BEGIN) == body.count(END) <= 1 and body.find(BEGIN) <= body.find(END)):
        raise ValueError(
            f"the card must have {BEGIN} and {END} once each, in this order, or neither; correct "
            "them"
        )

    # the section at its place, or at the end
    gap = line_end * (1 + (bool(body) and not body.endswith("\n")))
    before, _, rest = body.partition(BEGIN) if BEGIN in body else (body + gap, "", END + line_end)
    body = before + card.section.replace("\n", line_end) + rest.partition(END)[2]
    return (
        (opening or rule) + _front_matter(front, card.metadata, line_end) + (closing or rule) + body
    )


def _front_matter(text: str, metadata: Facts, line_end: str) -> str:
    """The front matter with tags and results of both.

    A result of torchfil in the index is replaced.
    """
    with installed_by("card", "metadata of a model card need PyYAML"):
        import yaml
    try:
        old = yaml.safe_load(text) or {}
        if not isinstance(old.get("tags") or [], list):
            raise ValueError(f"tags: {old.get('tags')} must be a list")
        own, kept = metadata["model-index"][0], copy.deepcopy(old.get("model-index") or [{}])
        for each in kept:
            each["results"] = [
                one for one in each.get("results") or [] if one["task"] != own["results"][0]["task"]
            ]
        index = [{**own, **kept[0], "results": kept[0]["results"] + own["results"]}, *kept[1:]]
        new = {
            "tags": list(dict.fromkeys([*(old.get("tags") or []), *metadata["tags"]])),
            "model-index": index,
        }

        # the lines of these two keys alone
        for key in (key for key in new if old.get(key) != new[key]):
            keys = getattr(yaml.compose(text), "value", [])
            spans = [
                (name.start_mark.index, value.end_mark.index)
                for name, value in keys
                if name.value == key
            ]
            start, end = (spans or [(len(text), len(text))])[0]
            behind = _BEHIND_VALUE.search(text[start:end])[0] if spans else line_end  # type: ignore[index]
            lines = yaml.safe_dump(
                {key: new[key]}, allow_unicode=True, sort_keys=False, width=math.inf
            ).rstrip()
            text = text[:start] + lines.replace("\n", line_end) + behind + text[end:]
        if yaml.safe_load(text) != {**old, **new}:
            raise ValueError("tags and model-index must be on lines of their own")
    except (yaml.YAMLError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise ValueError(
            f"the card’s front matter takes no metadata; correct it: {_line(str(error))}"
        ) from error
    return text
