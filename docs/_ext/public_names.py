"""The API pages show every name of ``torchfil`` as people import it, and references lead there."""

from __future__ import annotations

from typing import Any

from sphinx.util import logging
from sphinx.util.nodes import make_refnode

import torchfil

logger = logging.getLogger(__name__)


def check_names(app: Any, env: Any) -> None:
    """Warn, which ends ``make docs``, unless ``torchfil.X`` is on a page for every public X."""
    shown = {*env.domains["py"].objects, *env.domains["py"].modules}
    for name in torchfil.__all__:
        if not name.startswith("__") and f"torchfil.{name}" not in shown:
            logger.warning("torchfil.%s is on no page of docs/api under this name", name)


def resolve(app: Any, env: Any, node: Any, contnode: Any) -> Any:
    """A reference by the place of the code leads to the public name, if only one object's name ends
    like that.
    """
    parts = node.get("reftarget", "").lstrip("~.").split(".")
    foreign = len(parts) > 1 and parts[0].islower() and parts[0] != "torchfil"
    if node.get("refdomain") != "py" or foreign or not parts[-1]:
        return None
    objects = env.domains["py"].objects
    for start in range(len(parts)):
        tail = "." + ".".join(parts[start:])
        found = [
            name for name, entry in objects.items() if name.endswith(tail) and not entry.aliased
        ]
        if len(found) == 1:
            page, anchor = objects[found[0]].docname, objects[found[0]].node_id
            return make_refnode(app.builder, node["refdoc"], page, anchor, contnode, found[0])
    return None


def setup(app: Any) -> dict[str, bool]:
    """Connect them."""
    app.connect("env-check-consistency", check_names)
    app.connect("missing-reference", resolve)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
