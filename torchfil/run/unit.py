"""What a run binds, in words: an example, a person with all of its rows, or single rows of
persons.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

Facts = dict[str, Any]  # JSON values by name


def plural(word: str) -> str:
    """The plural of an English word.

    Example:
        >>> [plural(word) for word in ("visit", "person", "family", "address")]
        ['visits', 'people', 'families', 'addresses']
    """
    ending = "es" if word.endswith(("s", "x", "ch", "sh")) else "s"
    return "people" if word == "person" else re.sub("(?<=[^aeiou])y$", "ie", word) + ending


def counted(some: int, word: str) -> str:
    """So many of them.

    Example:
        >>> counted(1, "visit"), counted(1200, "visit")
        ('1 visit', '1,200 visits')
    """
    return f"{some:,} {word if some == 1 else plural(word)}"


@dataclass(frozen=True)
class Unit:
    """The unit of privacy of a run.

    Attributes:
        kind: "owner": a person with all of its rows; "row": single rows, of persons who may have
            several; "example": a row, of which nobody said whose it is.
        one: What one of them is called.
        many: What several of them are called.
        person: What a person is called.
        row: What one of a person's rows is called.
    """

    kind: str
    one: str
    many: str
    person: str
    row: str

    def say(self, sentence: str) -> str:
        """What the sentence says of examples, said of this unit.

        For sentences without names from the data.

        Example:
            >>> unit_of({"unit": "owner", "unit_names": ["patient", "visit"]}).say(
            ...     "An example is one of 3 examples."
            ... )
            'A patient is one of 3 patients.'
        """
        a = f"{'an' if self.one[0] in 'aeio' else 'a'} {self.one}"
        for old, new in (("an example", a), ("examples", self.many), ("example", self.one)):
            sentence = sentence.replace(old, new).replace(
                old.capitalize(), new[0].upper() + new[1:]
            )
        return sentence


def unit_of(facts: Facts) -> Unit:
    """The unit that a saved run's mechanism tells; an example where it does not.

    Raises:
        ValueError: It is none of these, or is not called by two words.
    """
    kind: str = facts.get("unit") or "example"
    names = tuple(facts.get("unit_names") or ("person", "row"))
    if kind not in ("example", "owner", "row"):
        raise ValueError(f"unit={kind!r} must be 'example', 'owner' or 'row'")
    words = [isinstance(name, str) and re.fullmatch(r"\w[\w -]{0,39}", name) for name in names]
    if not (len(words) == 2 and all(words)):
        raise ValueError(f"unit_names={names!r} must be two words: for a person, and for a row")
    one = {"owner": names[0], "row": names[1]}.get(kind, kind)
    return Unit(kind, one, plural(one), *names)
