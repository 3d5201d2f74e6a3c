"""Accessibility faults of an opened page, as axe-core finds them.

axe-core comes with the package selenium-axe-python (MPL 2.0; a test dependency, no part of
torchfil). Its rules on names, roles, contrast, headings, tables and the keyboard follow WCAG 2.2 A
and AA, and good practice.
"""

from __future__ import annotations

import functools
from importlib import resources
from importlib.util import find_spec
from typing import Any

import pytest

PACKAGE = "selenium_axe_python"
_RUN = """
const done = arguments[arguments.length - 1];
axe.run(document, {resultTypes: ["violations"]})
  .then((found) => done(found.violations), (e) => done(String(e)));
"""


@functools.cache
def axe_source() -> str:
    """The script of axe-core; skips the test where it is not installed."""
    if find_spec(PACKAGE) is None:
        pytest.skip("axe-core is not installed: pip install selenium-axe-python")
    return (resources.files(PACKAGE) / "axe-core" / "axe.min.js").read_text(encoding="utf-8")


def violations(browser: Any) -> list[str]:
    """One line for each fault: the rule, how bad it is, where, and what helps.

    The driver runs the script itself, so that the page's content security policy, which forbids all
    others, stays.
    """
    browser.execute_script(axe_source())
    browser.set_script_timeout(60)
    found = browser.execute_async_script(_RUN)
    assert isinstance(found, list), found
    return [
        f"{rule['id']} ({rule['impact']}) at {' '.join(map(str, node['target']))}: {rule['help']}"
        for rule in found
        for node in rule["nodes"]
    ]
