"""Directives that read the code: every key of a policy, the presets, how a gate ends."""

from __future__ import annotations

import re
import textwrap
from typing import Any

from msgspec.structs import fields

from torchfil.gate.gate import OUTCOMES, template
from torchfil.gate.policy import PRESETS, Policy, kind_of, preset
from torchfil.gate.rules import RULES


def as_markdown() -> str:
    """A definition list a section, from the template's comments."""
    lines: list[str] = []
    known = {field.name: field for field in fields(Policy)}
    for part in template().split("\n\n"):
        if title := re.match(r"# --- (.*) ---", part):
            lines += ["", f"**{title[1].partition(';')[0]}**", ""]
            continue
        named = re.findall(r"^(?:# )?\[?(\w+)(?: = |\])", part, re.M)
        key = next((name for name in named if name in known), None)
        if key is None:  # what stands above all keys
            continue
        told = [line.removeprefix("# ") for line in part.splitlines()]
        text = " ".join(line for line in told if not re.match(r"\w+ = |\[", line))
        example = next(line for line in reversed(told) if " = " in line)
        text = re.sub(r"(?<![\w`])[\w.]+\((?:[^()]|\([^()]*\))*\)", r"`\g<0>`", text)
        shown = "off" if f"# {example}" in part else f"`{example.partition(' = ')[2]}`"
        kind = kind_of(known[key].type)
        default = (
            ""
            if getattr(Policy(), key) not in (None, {}) or key not in RULES
            else " Left out: not asked for."
        )
        measured = (
            f" Measured against {RULES[key].baseline}."
            if key in RULES and RULES[key].baseline
            else ""
        )
        facts = f"{kind[0].upper()}{kind[1:]}. In the template: {shown}.{default}{measured}"
        lines += [f"`{key}`", f": {text}", "", f"  {facts}", ""]
    return "\n".join(lines)


def presets_as_markdown() -> str:
    """Every preset, whole."""
    shown = [
        f"**`{name}`**\n\n```toml\n{preset(name).strip()}\n```"
        for name in PRESETS
        if name != "default"
    ]
    return "\n\n".join(shown)


def outcomes_as_markdown() -> str:
    """A table of how a gate ends."""
    rows = [
        f"| {each.code} | {each.word} | {each.decision or '–'} | {each.meaning} |"
        for each in OUTCOMES
    ]
    return "\n".join(
        ["| exit code | outcome | on the page | when |", "|---|---|---|---|", *sorted(rows)]
    )


def setup(app: Any) -> dict[str, bool]:
    """Register the directives, so that no page can fall behind the code."""
    from docutils import nodes
    from sphinx.util.docutils import SphinxDirective

    def directive(make: Any) -> type[SphinxDirective]:
        def run(self: Any) -> list[Any]:
            return self.parse_text_to_nodes(textwrap.dedent(make()))

        return type("FromCode", (SphinxDirective,), {"run": run})

    class PolicyTemplate(SphinxDirective):
        def run(self) -> list[Any]:
            return [nodes.literal_block(template(), template(), language="toml")]

    app.add_directive("policy-keys", directive(as_markdown))
    app.add_directive("policy-presets", directive(presets_as_markdown))
    app.add_directive("gate-outcomes", directive(outcomes_as_markdown))
    app.add_directive("policy-template", PolicyTemplate)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
