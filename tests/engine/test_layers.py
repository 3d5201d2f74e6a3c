"""Each layer around a pass makes it fast or small, and changes no number."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from tests.cases import DEVICE
from tests.engine.brute_force import Run, make, train
from tests.engine.hunger import room_for
from tests.engine.loops import assert_same_run, data, network
from torchfil import Execution
from torchfil.engine import passes
from torchfil.engine.checks import NO_CHECKS
from torchfil.engine.flags import Flags
from torchfil.fisher.recording import RecordedForward

# how the model is trained, such that the layer has work to do: graphs leave none to the others
_EAGERLY = Execution(cuda_graphs=False)
ACTIVE: dict[str, tuple[str, Execution]] = {
    "in_chunks": ("train_step", Execution(cuda_graphs=False, max_memory=8_000)),
    "finished": ("recorded", _EAGERLY),
    "halved": ("train_step", _EAGERLY),
    "captured": ("train_step", Execution()),
    "recorded_or_mapped": ("train_step", _EAGERLY),
}


class Counting:
    """The layer, which counts its calls, and those of the passes inside that show its work."""

    def __init__(self, name: str) -> None:
        self.name, self.layer = name, getattr(passes, name)
        self.outer = self.inner = 0

    def __call__(self, *given: Any) -> Any:
        first, *others = given
        layer = self.layer(self.noting(first), *others)

        def run(*step: Any) -> Any:
            self.outer += 1
            return layer(*step)

        return run

    def noting(self, measure: Callable[..., Any]) -> Callable[..., Any]:
        def run(bound: Any, *step: Any) -> Any:
            loops = isinstance(bound.forward, RecordedForward)
            self.inner += loops if self.name == "finished" else 1
            return measure(bound, *step)

        return run

    @property
    def was_active(self) -> bool:
        if self.name in ("in_chunks", "halved"):
            return self.inner > self.outer > 0
        if self.name == "captured":  # what is captured does not reach the pass inside
            return self.inner < self.outer
        return self.inner > 0


def without(name: str) -> Callable[..., Any]:
    """The same in place of the layer: its pass alone, and of two passes the one for all models."""
    return lambda *given: given[1] if name == "recorded_or_mapped" else given[0]


def begun(**options: Any) -> Run:
    torch.manual_seed(0)
    given = {
        "noise_multiplier": 0.9,
        "max_grad_norm": 0.1,
        "estimator": "weight-probes",
        "num_probes": 2,
        "criterion": nn.CrossEntropyLoss(),
        **options,
    }
    return make(copy.deepcopy(network()).double(), data(60), batch_size=16, **given)


def trained(name: str, layer: Callable[..., Any]) -> Run:
    way, execution = ACTIVE[name]
    with mock.patch.object(passes, name, layer):
        run = begun(execution=execution)
    train(run, steps=2, way=way)
    short_of_memory = name == "halved" and isinstance(layer, Counting)
    with ExitStack() as inside:
        inside.enter_context(room_for(6) if short_of_memory else nullcontext())
        inside.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        train(run, steps=len(run.passes) + 3, way=way)
    return run


@pytest.mark.parametrize("name", ACTIVE)
def test_numbers_are_the_same_without_it(name: str) -> None:
    if name == "captured" and DEVICE != "cuda":
        pytest.skip("CUDA graphs need a GPU")
    layer = Counting(name)
    ours, theirs = trained(name, layer), trained(name, without(name))
    assert layer.was_active
    assert_same_run((ours.engine, ours.module), (theirs.engine, theirs.module), 1e-9)


@pytest.mark.parametrize("way", ["recorded", "train_step", "hooks"])
def test_numbers_are_the_same_without_checks(way: str) -> None:
    """Each of them is asked in some way of training."""
    hooks = {"grad_sample_mode": "hooks"} if way == "hooks" else {}
    ours, theirs, asked = begun(**hooks), begun(**hooks), set[str]()
    theirs.engine._training.step.guard.checks = NO_CHECKS
    with mock.patch.object(Flags, "ask", noting(asked)):
        train(ours, steps=4, way=way)
    train(theirs, steps=4, way=way)
    of_way = {"Opacus's norms"} if way == "hooks" else {"norms"}
    assert asked >= {"finite inputs", "losses", "gradients at the outputs", *of_way}
    assert_same_run((ours.engine, ours.module), (theirs.engine, theirs.module), 1e-12)


def noting(asked: set[str]) -> Callable[..., None]:
    ask = Flags.ask

    def note(flags: Flags, checks: Any, about: Any) -> None:
        asked.update(check.name for check in checks)
        ask(flags, checks, about)

    return note
