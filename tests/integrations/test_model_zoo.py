"""docs/models.md tells the truth: every model runs or is refused as it says, and what runs is right
to 1e-6.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.append(str(Path(sys.prefix) / "vision"))  # where the Makefile puts timm and torchvision
for package in ("transformers", "peft", "timm", "torchvision"):
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed (make test-integrations)", allow_module_level=True)

from tests.integrations.model_zoo.outcomes import (  # noqa: E402
    CASES,
    DOCS,
    MODELS,
    Case,
    outcome_of,
    read_table,
    text_of,
)
from tests.integrations.model_zoo.truth import assert_true, trained  # noqa: E402

WRITTEN = read_table(DOCS.read_text())
REMEDY = "run make models, which writes docs/models.md anew"
# over 5 s on a busy machine
SLOW = ("convnext", "Deberta", "nfnet", "resnet", "swin", "Swin", "T5", "Wav2Vec2")


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            case,
            id=str(case),
            marks=pytest.mark.slow if any(name in case.name for name in SLOW) else (),
        )
        for case in CASES
    ],
)
def test_a_model_does_what_the_page_says(case: Case) -> None:
    outcome = outcome_of(case)
    assert case in WRITTEN, REMEDY
    assert outcome == WRITTEN[case], REMEDY


def test_the_page_has_every_model_and_is_as_it_would_be_written() -> None:
    assert set(WRITTEN) == set(CASES), REMEDY
    assert read_table(text_of(WRITTEN)) == WRITTEN


@pytest.mark.parametrize("forged", ["masks", "probes", "weights", "released"])
def test_the_truth_notices(forged: str) -> None:
    run = trained(MODELS["multilayer perceptron"], "loop", dropout=True)
    assert_true(run)
    step: Any = run.steps[-1]
    forgeries = {
        "masks": {"state": torch.Generator().manual_seed(9).get_state()},
        "probes": {"seeds": tuple(seed + 1 for seed in step.seeds)},
        "weights": {"weights": {**step.weights, "0.weight": step.weights["0.weight"] * (1 + 1e-4)}},
        "released": {"released": step.released * (1 + 1e-5)},
    }
    run.steps[-1] = replace(step, **forgeries[forged])
    with pytest.raises(AssertionError, match="off by"):
        assert_true(run)
