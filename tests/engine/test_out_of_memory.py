"""A pass that runs out of memory is repeated in smaller pieces: the same draws, noise and numbers.

Said once.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
import weakref
from typing import Any
from weakref import WeakSet

import pytest
import torch
from torch import Tensor, nn

from tests.cases import DEVICE
from tests.engine.brute_force import Run, make, take, train
from tests.engine.hunger import room_for
from tests.engine.loops import assert_same_run, data, network
from tests.engine.test_state import same
from torchfil.fisher.operator import ClippedJacobian
from torchfil.fisher.recording import RecordedJacobian
from torchfil.questions import Label

WAYS: dict[str, dict[str, Any]] = {
    "recorded": {},
    "train_step": {},
    "dropout": {
        "module": nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Dropout(0.4), nn.Linear(6, 3))
    },
    "exact": {"estimator": "exact", "questions": {"label": Label(3)}},
    "per layer": {"clipping": "per_layer", "max_grad_norm": [0.05] * 4},
    "hooks": {"grad_sample_mode": "hooks"},
}
QUICK = ("dropout", "exact", "hooks")
SLOW = pytest.mark.slow


def begun(way: str = "recorded", **more: Any) -> Run:
    options = {
        "noise_multiplier": 0.9,
        "max_grad_norm": 0.1,
        "estimator": "weight-probes",
        "amplification": None,
    }
    options |= {"criterion": nn.CrossEntropyLoss(), **WAYS[way], **more}
    module = copy.deepcopy(options.pop("module", network())).double()
    return make(module, data(60), batch_size=16, **options)


def go_on(run: Run, way: str, steps: int = 2) -> None:
    train(run, steps=len(run.passes) + steps, way=way)


def state_of(run: Run) -> tuple[Any, Any]:
    return copy.deepcopy((run.engine.state_dict(), run.module.state_dict()))


def assert_same(cut: Run, whole: Run, tolerance: float = 1e-9) -> None:
    assert_same_run((cut.engine, cut.module), (whole.engine, whole.module), tolerance)


@pytest.mark.parametrize(
    ("way", "skipped"),
    [("exact", 1), *(pytest.param(way, 0, marks=[] if way in QUICK else [SLOW]) for way in WAYS)],
)
def test_the_same_numbers_as_without(way: str, skipped: int) -> None:
    """Masks are drawn once, also where memory ends in a step whose first pieces had succeeded."""
    if way == "dropout" and DEVICE == "cuda":
        pytest.skip("a captured pass asks for no memory")
    whole = begun(way)
    go_on(whole, way)
    go_on(whole, way)
    cut = begun(way)  # with the same random numbers
    go_on(cut, way)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with room_for(4, skipped) as device:
            go_on(cut, way)
    assert device.refused
    assert skipped or max(device.served) <= 4
    assert_same(cut, whole)
    (text,) = [str(warning.message) for warning in told if "out of memory" in str(warning.message)]
    assert "Execution(max_memory=" in text


class Hungry(nn.Module):
    """A layer that runs out of memory in passes of the user's own, where it is told to."""

    fails = False

    def forward(self, x: Tensor) -> Tensor:
        if self.fails:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return x


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("way", ["recorded", "hooks"])
@pytest.mark.parametrize("own", [False, True])
def test_a_step_without_memory_is_not_taken_and_can_be_repeated(way: str, own: bool) -> None:
    """Not even one example fits, or the user's own pass fails: with memory again, it is as if
    nothing had been.
    """
    layer = Hungry() if own else nn.Identity()
    module = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), layer, nn.Linear(6, 3))
    run, whole = (begun(way, module=module) for _ in range(2))
    batches = iter(run.private)
    take(run, next(batches))
    batch, before = next(batches), state_of(run)
    if own:
        run.module[2].fails = True
    with (
        contextlib.nullcontext() if own else room_for(0),
        pytest.raises(torch.OutOfMemoryError) as refused,
    ):
        take(run, batch)
    assert own or "step was not taken" in str(refused.value)
    assert same(state_of(run), before)
    if own:
        run.module[2].fails = False
    take(run, batch)
    go_on(whole, way)
    assert_same(run, whole, 1e-12)


class Held:
    """How many Jacobians and sums of clipped gradients are in memory at once, at most."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.jacobians: WeakSet[Any] = WeakSet()
        self.sums: list[weakref.ref[Tensor]] = []
        self.most_jacobians = self.most_sums = self.pieces = 0
        for kind in (RecordedJacobian, ClippedJacobian):
            patch.setattr(kind, "clipped_sum", self.counting(kind.clipped_sum))

    def counting(self, own: Any) -> Any:
        def clipped_sum(jacobian: Any, mask: Any = None) -> Any:
            self.pieces += 1
            self.jacobians.add(jacobian)
            found = own(jacobian, mask)
            self.sums += map(weakref.ref, found.values())
            alive = sum(each() is not None for each in self.sums) / len(found)
            self.most_jacobians = max(self.most_jacobians, len(self.jacobians))
            self.most_sums = max(self.most_sums, alive)
            return found

        return clipped_sum


@pytest.mark.parametrize("way", ["recorded", "train_step", "per layer"])
@pytest.mark.parametrize("every", [1, 4])
def test_pieces_are_added_as_they_come(
    way: str, every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A smaller limit holds no more sums.

    The numbers are the same. every: so many backward passes for a step.
    """
    if way == "train_step" and every > 1:
        pytest.skip("train_step takes whole batches")
    whole, cut = (begun(way, max_memory=limit, poisson_sampling=every == 1) for limit in (2**20, 1))
    train(whole, steps=2, way=way, every=every)
    held = Held(monkeypatch)
    train(cut, steps=2, way=way, every=every)
    assert held.pieces > 20
    assert held.most_sums <= 2
    assert held.most_jacobians == 1
    assert_same(cut, whole)
