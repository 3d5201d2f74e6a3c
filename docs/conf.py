"""Sphinx: the guide and the pages of docs/ as they stand, and the API from the docstrings. Run by ``make docs``."""

from __future__ import annotations

from typing import Any

from torchfil import __version__

project = "torchfil"
author = "the torchfil authors"
release = version = __version__
extensions = ["sphinx.ext.autodoc", "sphinx.ext.napoleon", "myst_parser"]
source_suffix = {".md": "markdown", ".rst": "restructuredtext"}
html_theme = "alabaster"
html_theme_options = {"description": "How much does a trained model leak about each example?", "page_width": "1100px"}
html_show_copyright = False

autodoc_default_options = {"members": True, "show-inheritance": True, "member-order": "bysource"}
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_mock_imports = ["lightning", "pytorch_lightning", "transformers"]
napoleon_numpy_docstring = False
napoleon_use_rtype = False
myst_heading_anchors = 3


def keep_formulas(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Formulas stand indented after an empty line; keep their layout."""

    def indent(line: str) -> int:
        return len(line) - len(line.lstrip())

    for i in range(len(lines) - 1, 1, -1):
        if not lines[i].strip() or lines[i - 1].strip():
            continue
        before = next((line for line in reversed(lines[:i]) if line.strip()), "")
        is_list_or_code = lines[i].lstrip().startswith(("* ", "- ", ">>>")) or before.rstrip().endswith("::")
        if indent(lines[i]) > indent(before) and not is_list_or_code:
            lines[i:i] = [" " * indent(before) + "::", ""]


def skip_scikit_learn(app: Any, what: str, name: str, obj: Any, skip: bool, options: Any) -> bool | None:
    """Methods that scikit-learn generates are documented there."""
    return True if name.startswith("set_") and name.endswith("_request") else None


def setup(app: Any) -> None:
    """Connect the two."""
    app.connect("autodoc-process-docstring", keep_formulas, priority=100)
    app.connect("autodoc-skip-member", skip_scikit_learn)
