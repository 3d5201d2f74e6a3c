"""A pytest plugin: replace Opacus's engine before its tests are imported, and record how each test
ends.
"""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path
from typing import Any

import hypothesis
import opacus
import opacus.privacy_engine
import pytest
import torch

import torchfil

from .vision import import_torchvision

ENGINE_VARIABLE = "OPACUS_SUITE_ENGINE"
RESULTS_VARIABLE = "OPACUS_SUITE_RESULTS"
ROOT = Path(__file__).resolve().parents[2]

_records: dict[str, dict[str, Any]] = {}


def _replacement(engine: type, seeded: bool) -> type:
    """The engine class, with a note for every test that makes one.

    Where ``seeded``, its noise and draws follow ``torch.manual_seed``, as the tests expect.
    """

    class RecordedEngine(engine):  # type: ignore[misc]
        @functools.wraps(engine.__init__)
        def __init__(self, *args: Any, **options: Any) -> None:
            if _records:
                _records[next(reversed(_records))]["engine"] = True  # of the test that is running
            super().__init__(*args, **options)

        @functools.wraps(engine.make_private)
        def make_private(self, *args: Any, **options: Any) -> Any:
            if seeded and options.get("noise_generator") is None and not self.secure_mode:
                options["noise_generator"] = torch.default_generator
            return super().make_private(*args, **options)

    RecordedEngine.__name__ = RecordedEngine.__qualname__ = engine.__name__
    return RecordedEngine


def pytest_configure() -> None:
    import_torchvision()
    stock = os.environ[ENGINE_VARIABLE] == "stock"
    engine = opacus.PrivacyEngine if stock else torchfil.FILPrivacyEngine
    opacus.PrivacyEngine = opacus.privacy_engine.PrivacyEngine = _replacement(
        engine, seeded=not stock
    )
    hypothesis.settings.register_profile(
        "opacus-suite",
        max_examples=16,
        derandomize=True,
        deadline=None,
        database=None,
        # a refusal needs no smaller example
        phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],
        report_multiple_bugs=False,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    hypothesis.settings.load_profile("opacus-suite")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Any:
    record = _records[item.nodeid] = {"outcome": "passed", "engine": False}
    start = os.times()
    result = yield
    # of this process and of the data loaders' that have ended: whatever else the machine does
    record["seconds"] = round(sum(os.times()[:4]) - sum(start[:4]), 2)
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    report = yield
    record = _records[item.nodeid]
    if report.skipped and record["outcome"] == "passed":
        record["outcome"] = "skipped"
    if report.failed and record["outcome"] != "failed" and call.excinfo is not None:
        error = call.excinfo.value
        while exceptions := getattr(error, "exceptions", None):
            error = exceptions[0]
        text = str(error).strip().split("\n")[0][:400]
        record |= {"outcome": "failed", "error": f"{type(error).__name__}: {text}"}
    return report


def pytest_sessionfinish() -> None:
    Path(os.environ[RESULTS_VARIABLE]).write_text(json.dumps(_records, indent=1))
