"""A whole run, from ``make_private`` to the last epoch: Opacus against torchfil with a target
accuracy of FIL.
"""

from __future__ import annotations

import statistics
import time

import torch
from opacus import PrivacyEngine
from paper_data import ResidentDataset
from torch import nn
from torch.utils.data import DataLoader

from benchmarks import zoo
from benchmarks.loops import digits
from benchmarks.measuring import Json, synchronize
from torchfil import Accounting, Execution, FILPrivacyEngine

__all__ = ["whole_run"]

BATCH = 600
REL_ERROR = 0.05


def whole_run(device: str, *, quick: bool) -> Json:
    """Twenty epochs of the MNIST CNN on 60,000 digits (one on 6,000 if quick), in turns.

    Returns:
        "epochs", "seconds" by method, "ratio", and torchfil's median relative standard error at the
        end.
    """
    epochs, count, rounds = (1, 6000, 1) if quick else (20, 60_000, 2)
    x, y = digits(count)
    data = ResidentDataset(x.to(device), y.to(device))
    times: dict[str, list[float]] = {"Opacus, hooks": [], "torchfil train_step": []}
    error = 0.0
    for _ in range(rounds):
        times["Opacus, hooks"].append(_opacus(data, device, epochs))
        seconds, error = _torchfil(data, device, epochs)
        times["torchfil train_step"].append(seconds)
    seconds_by_method = {title: statistics.median(taken) for title, taken in times.items()}
    return {
        "epochs": epochs,
        "examples": count,
        "batch": BATCH,
        "rel_error": REL_ERROR,
        "seconds": seconds_by_method,
        "ratio": seconds_by_method["torchfil train_step"] / seconds_by_method["Opacus, hooks"],
        "median_relative_error": error,
    }


def _start(data: ResidentDataset, device: str) -> Json:
    torch.manual_seed(0)
    module = zoo.mnist_cnn().to(device)
    loader = DataLoader(
        data, BATCH, collate_fn=data.collate, generator=torch.Generator().manual_seed(1)
    )
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    return {
        "module": module,
        "optimizer": optimizer,
        "data_loader": loader,
        "noise_multiplier": 1.0,
        "max_grad_norm": 1.0,
    }


def _opacus(data: ResidentDataset, device: str, epochs: int) -> float:
    criterion, given = nn.CrossEntropyLoss(), _start(data, device)
    synchronize(device)
    start = time.perf_counter()
    model, optimizer, loader = PrivacyEngine(accountant="rdp").make_private(**given)
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()
    synchronize(device)
    return time.perf_counter() - start


def _torchfil(data: ResidentDataset, device: str, epochs: int) -> tuple[float, float]:
    given = _start(data, device)
    synchronize(device)
    start = time.perf_counter()
    engine = FILPrivacyEngine()
    memory = 2**35 if device.startswith("cuda") else 2**30
    accounting = Accounting(
        rel_error=REL_ERROR, epochs=epochs, execution=Execution(max_memory=memory)
    )
    _, _, loader = engine.make_private(
        **given, criterion=nn.CrossEntropyLoss(), accounting=accounting
    )
    for _ in range(epochs):
        for x, y in loader:
            engine.train_step(x, y)
    fil = engine.get_fil()
    synchronize(device)
    seconds = time.perf_counter() - start
    relative = fil.standard_error / fil.value
    return seconds, float(relative[fil.value > 0].median())
