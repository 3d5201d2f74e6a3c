"""Every tutorial as an .ipynb file, linked at the top of its page; ``docs/tutorials/run.py`` writes
them.
"""

from __future__ import annotations

import os
import re
import runpy
from pathlib import Path
from typing import Any

HOW = "index.md#open-as-a-notebook"


def write(app: Any) -> None:
    """Before pages are read."""
    runner = runpy.run_path(str(Path(app.srcdir) / "tutorials" / "run.py"))
    runner["write_notebooks"](Path(app.config.NOTEBOOKS))


def link(app: Any, docname: str, source: list[str]) -> None:
    """Put the link below the title of a tutorial."""
    folder, _, name = docname.partition("/")
    notebook = Path(app.config.NOTEBOOKS) / f"{name}.ipynb"
    if folder == "tutorials" and notebook.exists():
        place = os.path.relpath(notebook, Path(app.srcdir) / "tutorials")
        shown = f"{{download}}`Open as a notebook <{place}>` ([how]({HOW}))"
        source[0] = re.sub(r"^# .*$", rf"\g<0>\n\n{shown}", source[0], count=1, flags=re.MULTILINE)


def setup(app: Any) -> dict[str, bool]:
    """Connect them."""
    app.add_config_value("NOTEBOOKS", None, "", ())
    app.connect("builder-inited", write)
    app.connect("source-read", link)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
