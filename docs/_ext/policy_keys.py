"""The directives ``policy-keys`` and ``policy-template``: every key of a policy, and the template, from the rules."""

from __future__ import annotations

import re
from typing import Any

from msgspec.structs import fields

from torchfil.gate.gate import template
from torchfil.gate.policy import Policy, kind_of
from torchfil.gate.rules import RULES


def as_markdown() -> str:
    """A definition list a section."""
    lines: list[str] = []
    section, kinds = "", {field.name: kind_of(field.type) for field in fields(Policy)}
    for rule in RULES.values():
        if rule.section != section:
            section = rule.section
            lines += ["", f"**{section.partition(';')[0]}**", ""]
        text = re.sub(r"(?<![\w`])[\w.]+\((?:[^()]|\([^()]*\))*\)", r"`\g<0>`", rule.help)
        shown = "off" if rule.off else f"`{str(rule.example).lower()}`"
        left_out = ""
        if rule.find is not None or rule.default not in (None, {}, ""):  # else its text says what stands in for it
            default = str(rule.default).lower() if isinstance(rule.default, bool) else f"{rule.default or 0:g}"
            left_out = f" Left out: {'not asked for' if rule.default in (None, {}) else default}."
        kind = kinds[rule.key]
        measured = f" Measured against {rule.baseline}." if rule.baseline else ""
        facts = f"{kind[0].upper()}{kind[1:]}. In the template: {shown}.{left_out}{measured}"
        lines += [f"`{rule.key}`", f": {text}", "", f"  {facts}", ""]
    return "\n".join(lines)


def setup(app: Any) -> dict[str, bool]:
    """Register the directives, which read the code, so that the page cannot fall behind it."""
    from docutils import nodes
    from sphinx.util.docutils import SphinxDirective

    class PolicyKeys(SphinxDirective):
        def run(self) -> list[Any]:
            return self.parse_text_to_nodes(as_markdown())

    class PolicyTemplate(SphinxDirective):
        def run(self) -> list[Any]:
            return [nodes.literal_block(template(), template(), language="toml")]

    app.add_directive("policy-keys", PolicyKeys)
    app.add_directive("policy-template", PolicyTemplate)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
