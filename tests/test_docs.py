"""The site is complete and its links lead somewhere; Sphinx is not needed."""

from __future__ import annotations

import importlib
import importlib.util
import operator
import re
from pathlib import Path
from types import ModuleType

import pytest

import torchfil
from tests.test_public_names import offered

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *(ROOT / "examples").glob("*.md")]
PAGES += [*(ROOT / "benchmarks").glob("*.md")]
NOT_INSTALLED = ("lightning", "huggingface")  # integrations, described without what they integrate
DIRECTIVE = re.compile(r"^\.\. automodule:: (\S+)\n((?:   :.*\n)*)", flags=re.MULTILINE)
ONE_NAME = re.compile(
    r"^\.\. (?:auto(?:class|function|exception)|py:module):: (\S+)$", flags=re.MULTILINE
)


def _anchors(page: Path) -> set[str]:
    """Of its headings, as GitHub and MyST make them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#{1,3} (.*)$", text, flags=re.MULTILINE)
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_of_pages_resolve(page: Path) -> None:
    text = re.sub(r"^```(?!\{).*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for target, anchor in re.findall(r"\]\((?!https?:|mailto:)([^)#\s]*)(?:#([^)\s]*))?\)", text):
        there = (page.parent / target) if target else page
        assert there.exists(), f"{page.name} links to {target}"
        if anchor and there.suffix == ".md":
            assert anchor in _anchors(there), f"{page.name} links to {target}#{anchor}"


def _documented() -> dict[str, list[object]]:
    """What the API pages show, by name: the members that a directive names, or all that its module
    offers.
    """
    shown: dict[str, list[object]] = {}
    for page in (DOCS / "api").glob("*.md"):
        for name, options in DIRECTIVE.findall(page.read_text()):
            if ":no-members:" in options or name.split(".")[-1] in NOT_INSTALLED:
                continue
            module = importlib.import_module(name)
            members = re.search(r":members: (.+)", options)
            hidden = re.search(r":exclude-members: (.+)", options)
            names = set(members[1].split(", ") if members else module.__all__)
            for attribute in names - set(hidden[1].split(", ") if hidden else ()):
                shown.setdefault(attribute, []).append(getattr(module, attribute))
    for path in _named():
        attribute = path.rpartition(".")[2]
        shown.setdefault(attribute, []).append(
            operator.attrgetter(path.partition(".")[2])(torchfil)
        )
    return shown


def _named() -> set[str]:
    """The names that have a directive and an anchor of their own: ``torchfil.FILPrivacyEngine``."""
    return {
        name for page in (DOCS / "api").glob("*.md") for name in ONE_NAME.findall(page.read_text())
    }


def test_every_public_name_is_in_the_api_reference() -> None:
    shown = _documented()
    missing = [
        public
        for public, value in offered()
        if public != "__version__"
        and not isinstance(value, ModuleType)
        and not any(value is other for other in shown.get(public, []))
    ]
    assert not missing, "not in docs/api"
