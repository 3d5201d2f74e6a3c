"""Activation checkpoints in the user's model: the same weights, ledger and masks as without them."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.cases import DEVICE, relative_error
from tests.engine.brute_force import assert_true, images, make, train
from torchfil.fisher import models


class Blocks(nn.Module):
    """Two blocks of layers with dropout, each under a checkpoint, if any."""

    def __init__(self, kind: str, dropout: float) -> None:
        super().__init__()
        self.kind = kind
        self.first = nn.Linear(16, 8)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.Tanh(), nn.Dropout(dropout)) for _ in range(2)
        )
        self.last = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x.flatten(1))
        for block in self.blocks:
            if self.kind == "none":
                h = h + block(h)
            else:
                h = h + checkpoint(block, h, use_reentrant=self.kind == "reentrant")  # type: ignore[no-untyped-call]
        return self.last(h)


def trained(kind: str, *, dropout: float = 0.0, way: str = "auto", **options: Any) -> Any:
    torch.manual_seed(0)
    return train(make(Blocks(kind, dropout).double(), images(12), criterion=nn.CrossEntropyLoss(), **options), way=way)


@pytest.mark.product
@pytest.mark.parametrize("way", ["auto", "train_step", "hooks"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("kind", ["reentrant", "not reentrant"])
def test_as_brute_force(kind: str, dropout: float, way: str) -> None:
    options = {"dropout": dropout, "way": way, "grad_sample_mode": "hooks" if way == "hooks" else "auto"}
    run, without = (trained(each, **options) for each in (kind, "none"))
    assert relative_error(run.engine.totals.get_trace().value, without.engine.totals.get_trace().value) < 1e-8
    run.plain.kind = "none"  # brute force knows no checkpoints
    assert_true(run)


@pytest.mark.parametrize("options", [{"estimator": "weight-probes"}, {"estimator": "weight-probes", "max_memory": 1}])
def test_recorded_passes(options: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    """No gradient is mapped over examples for a checkpoint's sake, and the log says that it is left out, once."""
    models._log_skipped_checkpoints.cache_clear()
    with caplog.at_level(logging.INFO, logger="torchfil"):
        run = trained("not reentrant", **options)
    without = trained("none", **options)
    assert relative_error(run.engine.totals.get_trace().value, without.engine.totals.get_trace().value) < 1e-8
    assert "mapped over examples" not in caplog.text
    assert caplog.text.count("activation checkpoints are skipped") == 1


def test_the_loop_keeps_its_checkpoints() -> None:
    """Outside of the accounting's passes a checkpoint runs its part twice, as ever."""
    run = trained("not reentrant")
    calls: list[int] = []
    run.module.blocks[0].register_forward_pre_hook(lambda *_: calls.append(1))
    run.module(torch.randn(2, 16, dtype=torch.float64, device=DEVICE)).sum().backward()
    assert len(calls) == 2


class Switched(Blocks):
    """Checkpoints are turned on as in Hugging Face's models: by an attribute that holds the function."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x.flatten(1))
        for block in self.blocks:
            h = h + (self.around(block, h) if self.kind == "on" else block(h))
        return self.last(h)


@pytest.mark.parametrize("way", ["auto", "train_step"])
def test_turned_on_after_make_private(way: str) -> None:
    traces = []
    for kind in ("off", "on"):
        torch.manual_seed(0)
        run = make(Switched("off", 0.3).double(), images(12), criterion=nn.CrossEntropyLoss(), estimator="exact")
        run.module.kind, run.module.around = kind, partial(checkpoint, use_reentrant=False)
        train(run, way=way)
        traces.append(run.engine.totals.get_trace().value)
    assert relative_error(traces[1], traces[0]) < 1e-8
