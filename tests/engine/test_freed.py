"""A finished run is freed: nobody else holds its model, data, ledger or passes."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from tests.engine.loops import data, make, network, step

OPTIONS: dict[str, dict[str, Any]] = {
    "loop": {},
    "train_step": {},
    "hooks": {"grad_sample_mode": "hooks"},
    "owners": {"owner_of": [row // 2 for row in range(24)]},
    "refused": {},
    "readings": {"track": ("diagonal",)},
}


@pytest.mark.parametrize("way", OPTIONS)
@pytest.mark.filterwarnings("ignore")
def test_a_run_is_freed_when_nobody_holds_it(way: str, tmp_path: Path) -> None:
    def finished() -> dict[str, weakref.ref[Any]]:
        module, dataset = network(), data(24)
        engine, _, model, optimizer, batches = make(
            dataset, module, criterion=nn.CrossEntropyLoss(), **OPTIONS[way]
        )
        for x, y in batches:
            if way == "train_step":
                engine.train_step(x, y)
            else:
                step(model, optimizer, (x, y))
        if way == "refused":
            x, y = next(iter(batches))
            with pytest.raises((RuntimeError, ValueError)):
                engine.train_step(x * float("nan"), y)
        if way == "readings":
            parts = {"path": tmp_path / "run.pt", "module": model, "optimizer": optimizer}
            engine.save_checkpoint(**parts)
            engine.load_checkpoint(**parts)
            engine.leakage(delta=1e-5)
            engine.plis()
            engine.report(tmp_path / "report", delta=1e-5)
        training = engine._training
        held = {
            "engine": engine,
            "model": model,
            "optimizer": optimizer,
            "loader": batches,
            "data": dataset,
        }
        held |= {
            "module": module,
            "run": training.run,
            "ledger": engine.ledger,
            "copy": training.replica.template,
        }
        return {name: weakref.ref(part) for name, part in held.items()}

    parts = finished()
    gc.collect()
    assert [name for name, part in parts.items() if part() is not None] == []
