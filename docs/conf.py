"""Sphinx: the guide, executed tutorials, and reference pages from the code.

Run by ``make docs``.
"""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torchfil import __version__

HERE = Path(__file__).parent
BUILD = HERE.parent / "build"
sys.path.insert(0, str(HERE / "_ext"))
# the notebooks' processes import this tree's torchfil, whatever is installed
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, [str(HERE.parent), os.environ.get("PYTHONPATH")])
)

project = "torchfil"
author = "the torchfil authors"
release = version = __version__
extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "myst_nb",
    "sphinx_click",
    "sphinx_copybutton",
    "sphinx_design",
    "live_report",
    "policy_keys",
    "public_names",
    "notebooks",
]
source_suffix = {".md": "myst-nb", ".rst": "restructuredtext"}
exclude_patterns = ["_ext", "_static", "**/README.md"]

smartquotes = False  # "--json" stays two hyphens

html_theme = "furo"
html_title = f"torchfil {__version__}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_copyright = False
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#0b5c8c", "color-brand-content": "#0b5c8c"},
    "dark_css_variables": {"color-brand-primary": "#6fb7e6", "color-brand-content": "#6fb7e6"},
    "navigation_with_keys": True,
}
pygments_style, pygments_dark_style = "friendly", "github-dark"
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

autodoc_default_options = {"members": True, "show-inheritance": True, "member-order": "bysource"}
autodoc_typehints = "signature"
suppress_warnings = [
    "ref.python"
]  # Question and Guess are names of two packages each, in signatures without their module
autodoc_typehints_format = "short"
autodoc_mock_imports = ["lightning", "pytorch_lightning", "transformers"]
napoleon_numpy_docstring = False
napoleon_use_rtype = False

myst_heading_anchors = 3
myst_enable_extensions = ["attrs_inline", "colon_fence", "deflist", "dollarmath"]
# Tutorials are run once and kept until their code changes; `rm -rf build/notebooks` runs all anew.
nb_execution_mode = "cache"
nb_execution_cache_path = str(BUILD / "notebooks")
nb_execution_timeout = 180
nb_execution_raise_on_error = True
nb_execution_show_tb = True
nb_merge_streams = True
nb_execution_excludepatterns = ["guide/*", "api/*", "reference/*"]
if not all(map(find_spec, ("peft", "transformers"))):  # this page then shows no results
    nb_execution_excludepatterns.append("tutorials/causal-lm-lora*")

# `make linkcheck` looks at links inside of the site; other people's pages come and go.
linkcheck_ignore = [r"https?://.*"]
linkcheck_anchors = True

LIVE_REPORT = BUILD / "live-report"  # made by docs/_ext/live_report.py before pages are written
LIVE_REPORT.mkdir(parents=True, exist_ok=True)
html_extra_path = [str(LIVE_REPORT)]
NOTEBOOKS = BUILD / "ipynb"  # written by docs/_ext/notebooks.py


def keep_formulas(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Formulas stand indented after an empty line; keep their layout."""

    def indent(line: str) -> int:
        return len(line) - len(line.lstrip())

    for i in range(len(lines) - 1, 1, -1):
        if not lines[i].strip() or lines[i - 1].strip():
            continue
        before = next((line for line in reversed(lines[:i]) if line.strip()), "")
        is_list_or_code = lines[i].lstrip().startswith(
            ("* ", "- ", ">>>")
        ) or before.rstrip().endswith("::")
        if indent(lines[i]) > indent(before) and not is_list_or_code:
            lines[i:i] = [" " * indent(before) + "::", ""]


def skip_scikit_learn(
    app: Any, what: str, name: str, obj: Any, skip: bool, options: Any
) -> bool | None:
    """Methods that scikit-learn generates are documented there."""
    return True if name.startswith("set_") and name.endswith("_request") else None


def literal_examples(app: Any, ctx: Any, lines: list[str]) -> None:
    """Paragraphs that a command's help keeps as they are: code.

    Sphinx-click gives them as "| " lines.
    """
    kept: list[str] = []
    for line in lines:
        if line.startswith("| "):
            # the first line is the paragraph's title, "Examples:"
            starts = not kept or not kept[-1].startswith("   ")
            kept += [line[2:].rstrip() + ":", "", "   "] if starts else ["   " + line[2:]]
        else:
            kept.append(line)
    lines[:] = kept


def setup(app: Any) -> None:
    """Connect them."""
    app.connect("sphinx-click-process-description", literal_examples)
    app.connect("autodoc-process-docstring", keep_formulas, priority=100)
    app.connect("autodoc-skip-member", skip_scikit_learn)
