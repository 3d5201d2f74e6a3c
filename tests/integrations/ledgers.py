"""Are two runs the same?"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from torchfil import FILPrivacyEngine

DELTA = 1e-5


def assert_same_run(
    ours: FILPrivacyEngine, fitted: nn.Module, truth: FILPrivacyEngine, trained: nn.Module
) -> None:
    """Tables, ε and weights agree to float tolerance, and something leaked."""
    assert truth.get_fil().value.nan_to_num().max() > 0
    (names, columns), (true_names, true_columns) = (
        ours.leakage_columns(delta=DELTA),
        truth.leakage_columns(delta=DELTA),
    )
    assert names == true_names
    assert columns.pop("fil_kind") == true_columns.pop("fil_kind")
    for name, column in true_columns.items():
        assert columns[name] == pytest.approx(column, rel=1e-5, nan_ok=True), name
    assert ours.get_epsilon(DELTA) == pytest.approx(truth.get_epsilon(DELTA))
    for a, b in zip(fitted.parameters(), trained.parameters(), strict=True):
        torch.testing.assert_close(a, b)
