"""A pytest plugin: replace Opacus's engine before its tests are imported, and record how each test ends."""

from __future__ import annotations

import functools
import json
import os
import traceback
from pathlib import Path
from typing import Any

import hypothesis
import opacus
import opacus.privacy_engine
import pytest
import torch

from .vision import import_torchvision

ENGINE_VARIABLE = "OPACUS_SUITE_ENGINE"
RESULTS_VARIABLE = "OPACUS_SUITE_RESULTS"
ROOT = Path(__file__).resolve().parents[2]

_records: dict[str, dict[str, Any]] = {}
_running: list[str] = []


def _replacement(engine: type, seeded: bool) -> type:
    """The engine class, with a note for every test that makes one.

    Where ``seeded``, its noise and draws follow ``torch.manual_seed``, as the tests expect.
    """

    class RecordedEngine(engine):  # type: ignore[misc]
        @functools.wraps(engine.__init__)
        def __init__(self, *args: Any, **options: Any) -> None:
            if _running:
                _records[_running[-1]]["engine"] = True
            super().__init__(*args, **options)

        @functools.wraps(engine.make_private)
        def make_private(self, *args: Any, **options: Any) -> Any:
            if seeded and options.get("noise_generator") is None and not self.secure_mode:
                options["noise_generator"] = torch.default_generator
            return super().make_private(*args, **options)

    RecordedEngine.__name__ = RecordedEngine.__qualname__ = engine.__name__
    return RecordedEngine


def pytest_configure(config: pytest.Config) -> None:
    import_torchvision()
    stock = os.environ[ENGINE_VARIABLE] == "stock"
    import torchfil

    if ROOT not in Path(torchfil.__file__).resolve().parents:
        raise pytest.UsageError(f"torchfil was imported from {torchfil.__file__}, not from {ROOT}")
    engine = opacus.PrivacyEngine if stock else torchfil.FILPrivacyEngine
    opacus.PrivacyEngine = opacus.privacy_engine.PrivacyEngine = _replacement(engine, seeded=not stock)
    hypothesis.settings.register_profile(
        "opacus-suite",
        max_examples=16,
        derandomize=True,
        deadline=None,
        database=None,
        phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],  # a refusal needs no smaller example
        report_multiple_bugs=False,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    hypothesis.settings.load_profile("opacus-suite")


def _processor_seconds() -> float:
    """Of this process and of the data loaders' that have ended: what a test takes, whatever else the machine does."""
    return sum(os.times()[:4])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Any:
    name = item.nodeid
    _records[name] = {"outcome": "passed", "engine": False}
    _running.append(name)
    start = _processor_seconds()
    try:
        return (yield)
    finally:
        _running.pop()
        _records[name]["seconds"] = round(_processor_seconds() - start, 2)
        _save()  # after each test: a run that is stopped has told what it knows


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    report = yield
    record = _records[item.nodeid]
    if report.skipped and record["outcome"] == "passed":
        record["outcome"] = "skipped"
    if report.failed and record["outcome"] in ("passed", "skipped") and call.excinfo is not None:
        record["outcome"] = "failed"
        record.update(_described(call.excinfo.value))
    return report


def _described(error: BaseException) -> dict[str, Any]:
    """What was raised, with which text, and by whom: the first of a group."""
    while exceptions := getattr(error, "exceptions", None):
        error = exceptions[0]
    frames = traceback.extract_tb(error.__traceback__)
    tests = [frame for frame in frames if "opacus/tests/" in frame.filename]
    last = frames[-1]
    return {
        "error": type(error).__name__,
        "text": str(error).strip().split("\n")[0][:400],
        "raised": f"{_short(last.filename)}:{last.lineno}",
        "line": f"{_short(tests[-1].filename)}:{tests[-1].lineno}" if tests else None,
    }


def _short(path: str) -> str:
    for mark in ("site-packages/", f"{ROOT}/"):
        path = path.split(mark)[-1]
    return path


def _save() -> None:
    Path(os.environ[RESULTS_VARIABLE]).write_text(json.dumps(_records, indent=1))
