"""A finished run is freed: nobody else holds its model, data, ledger, passes or GPU memory."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.cases import DEVICE
from tests.engine.loops import data, make, network
from tests.engine.test_losses import items, of_tokens
from tests.engine.ways import LOSS
from torchfil import FILPrivacyEngine
from torchfil.engine.forward import in_training

WAYS: dict[str, dict[str, Any]] = {
    "made alone": {},
    "loop": {},
    "train_step": {},
    "hooks": {"grad_sample_mode": "hooks"},
    "own loss": {"criterion": None},
    "accumulated": {"accumulation_steps": 2},
    "half a step": {},
    "owners": {"owner_of": [row // 2 for row in range(24)]},
    "norms refreshed": {"norm_refresh": 1},
    "refused": {},
    "readings": {"track": ("diagonal",)},
}
pytestmark = pytest.mark.filterwarnings("ignore")


def backward(model: Any, batch: Any) -> None:
    if isinstance(batch, dict):
        model(**{name: value.to(DEVICE) for name, value in batch.items()}).loss.backward()
    else:
        LOSS(model(batch[0].to(DEVICE)), batch[1].to(DEVICE)).backward()


def finished(way: str, module: nn.Module, folder: Path) -> dict[str, Any]:
    """The parts of a run that is over."""
    dataset: Any = items() if way == "own loss" else data(24)
    engine, _, model, optimizer, loader = make(dataset, module, **{"criterion": LOSS} | WAYS[way])
    for number, batch in enumerate(() if way == "made alone" else loader, 1):
        if way == "train_step":
            engine.train_step(*(part.to(DEVICE) for part in batch))
            continue
        backward(model, batch)
        if way == "half a step":
            break
        if way != "accumulated" or number % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()
    if way == "refused":
        spoil(engine, model, optimizer, next(iter(loader)))
    if way == "readings":
        read(engine, model, optimizer, folder)
    training = engine._training
    return {
        "engine": engine,
        "model": model,
        "module": module,
        "weight": next(module.parameters()),
        "optimizer": optimizer,
        "loader": loader,
        "run": training.run,
        "history": training.run.history,
        "copy": training.replica.template,
        "rows": dataset[0]["x"] if way == "own loss" else dataset.tensors[0],
    }


def spoil(engine: FILPrivacyEngine, model: Any, optimizer: Any, batch: Any) -> None:
    x, y = (part.to(DEVICE) for part in batch)
    backward(model, batch)
    sum(p.square().sum() for p in model.parameters()).backward()
    for refused in (optimizer.step, lambda: engine.train_step(x * float("nan"), y)):
        with pytest.raises((RuntimeError, ValueError)):
            refused()


def read(engine: FILPrivacyEngine, model: Any, optimizer: Any, folder: Path) -> None:
    parts: dict[str, Any] = {"module": model, "optimizer": optimizer}
    for path in (folder / "run.pt", f"{folder}/run/"):
        engine.save_checkpoint(path=path, **parts)
        engine.load_checkpoint(path=path, **parts)
    engine.leakage(delta=1e-5)
    engine.plis()
    engine.report(folder / "report", delta=1e-5)


def of_way(way: str) -> nn.Module:
    return of_tokens("next") if way == "own loss" else network()


@pytest.mark.parametrize("way", WAYS)
def test_a_run_is_freed_when_nobody_holds_it(way: str, tmp_path: Path) -> None:
    held = finished(way, of_way(way), tmp_path)
    parts = {name: weakref.ref(part) for name, part in held.items()}
    del held
    gc.collect()
    assert [name for name, part in parts.items() if part() is not None] == []


def kept() -> tuple[int, ...]:
    """How many modules, tensors, functions and classes there are, and modules in training."""
    gc.collect()
    kinds = [type(each) for each in gc.get_objects()]
    modules, tensors, functions, classes = (
        sum(issubclass(kind, base) for kind in kinds)
        for base in (nn.Module, torch.Tensor, type(kept), type)
    )
    return modules, tensors, functions, classes, len(in_training)


def test_twenty_runs_in_one_process_grow_by_nothing(tmp_path: Path) -> None:
    sizes = []
    for _ in range(5):
        for way in ("loop", "train_step", "hooks", "own loss"):
            finished(way, of_way(way), tmp_path)
        sizes.append(kept())
    assert sizes[-1] == sizes[1]  # the first fill caches


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("way", ["loop", "train_step", "hooks"])
def test_memory_of_a_gpu_is_back_at_the_weights(way: str, tmp_path: Path) -> None:
    """CUDA graphs included: only the model that the caller keeps is on the GPU."""

    def allocated() -> int:
        gc.collect()
        torch.cuda.synchronize()
        torch._C._cuda_clearCublasWorkspaces()  # one for each stream that had a matrix product
        return torch.cuda.memory_allocated()

    left = []
    for _ in range(5):
        module = (
            nn.Sequential(nn.Linear(5, 4096), nn.Tanh(), nn.Linear(4096, 3)).to(DEVICE).double()
        )
        before = allocated()
        finished(way, module, tmp_path)["optimizer"].zero_grad(set_to_none=True)
        left.append(allocated() - before)
    assert max(left[1:]) < 2**16  # the weights take 2**18
