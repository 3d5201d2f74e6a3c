"""The directive ``policy-keys``: every key of a policy, from ``Policy`` and the comments of ``policy.toml``."""

from __future__ import annotations

import re
from dataclasses import MISSING, dataclass, fields
from typing import Any

from torchfil.gate.policy import TEMPLATE, Policy


@dataclass(frozen=True)
class Key:
    """One key of a policy."""

    name: str
    section: str  # of the template
    text: str  # what the template says above it
    in_template: str  # its value there; "off": it stands there as a comment
    left_out: str  # what holds where a policy does not name it


def policy_keys() -> list[Key]:
    """The keys in the order of the template.

    The template has sections (``# --- Groups ---``), and in them paragraphs: lines of explanation, then one key or
    more (``key = value``, ``# key = value`` where it is off, ``# [key]`` for a table). Keys that follow each other
    without an explanation share the one above them.
    """
    defaults = {f.name: f.default if f.default is not MISSING else {} for f in fields(Policy)}
    keys: list[Key] = []
    section, text, was_key = "", [], False
    for line in TEMPLATE.splitlines():
        heading = re.fullmatch(r"# --- (.*) ---", line)
        assignment = re.fullmatch(r"(# )?(?:(\w+) = (\S+)|\[(\w+)\])", line)
        name = (assignment[2] or assignment[4]) if assignment else None

        if heading:
            section, text = heading[1].partition(";")[0], []
        elif name in defaults:
            value = "off" if assignment[1] else assignment[3]
            keys.append(Key(name, section, " ".join(text), value, _in_words(defaults[name])))
        elif not line:
            text = []
        elif not assignment:
            text = [line[2:]] if was_key else [*text, line[2:]]
        was_key = name in defaults
    return keys


def _in_words(default: Any) -> str:
    return "not asked for" if default in (None, {}) else f"{default:g}"


def as_markdown(keys: list[Key]) -> str:
    """A definition list a section."""
    lines: list[str] = []
    section = None
    for key in keys:
        if key.section != section:
            section = key.section
            lines += ["", f"**{section}**", ""]
        text = re.sub(r" Left out, it is [\d.]+(?=[.:])", "", key.text)  # said below
        text = re.sub(r"(?<![\w`])[\w.]+\((?:[^()]|\([^()]*\))*\)", r"`\g<0>`", text)
        template = "off" if key.in_template == "off" else f"`{key.in_template}`"
        lines += [f"`{key.name}`", f": {text}", "", f"  In the template: {template}. Left out: {key.left_out}.", ""]
    return "\n".join(lines)


def setup(app: Any) -> dict[str, bool]:
    """Register the directive."""
    from sphinx.util.docutils import SphinxDirective

    class PolicyKeys(SphinxDirective):
        """Reads the code, so that the page cannot fall behind it."""

        def run(self) -> list[Any]:
            return self.parse_text_to_nodes(as_markdown(policy_keys()))

    app.add_directive("policy-keys", PolicyKeys)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
