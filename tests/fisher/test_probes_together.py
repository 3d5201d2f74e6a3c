"""Probes that are worked at together give what they give one by one, and memory decides how many."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.cases import CASES, DEVICE, build, relative_error
from tests.fisher.recorded_cases import BATCH, LAYERS, Flat
from torchfil.fisher.batch import PrivateBatch
from torchfil.fisher.estimators import Draws, draw_bits, signs_of
from torchfil.fisher.gradients import ExampleGradients
from torchfil.fisher.mechanism import Mechanism
from torchfil.fisher.recording import RecordedJacobian, plan

pytestmark = pytest.mark.torch_versions


@pytest.mark.skipif(DEVICE != "cpu", reason="on GPUs probes are processed one by one")
@pytest.mark.parametrize("name", [*LAYERS, *CASES])
def test_probes_are_worked_at_together(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """No layer forces them apart."""
    if name in CASES:
        case = build(name, BATCH)
        gradients = ExampleGradients.build(*case.arguments, case.private)
    else:
        make, shape = LAYERS[name]
        model, x = Flat(make()).double(), torch.randn(BATCH, *shape, dtype=torch.float64)
        gradients = ExampleGradients.build(model, nn.MSELoss(), x, torch.zeros_like(model(x)).detach())
    jacobian = RecordedJacobian(gradients, Mechanism.build(1.0, 0.7, "gelu").clip, 1.0)
    probes = torch.randn(4, gradients.num_parameters, dtype=torch.float64)
    with caplog.at_level("INFO"), warnings.catch_warnings():
        warnings.simplefilter("error")
        together = torch.stack(list(jacobian.perpendicular_rows(probes, 4)))
    assert [record.message for record in caplog.records] == []
    one_by_one = torch.stack(list(jacobian.perpendicular_rows(probes)))
    assert torch.allclose(together, one_by_one, rtol=1e-9, atol=1e-11 * float(one_by_one.abs().max()))


def test_probes_that_cannot_be_worked_at_together(caplog: pytest.LogCaptureFixture) -> None:
    """A model that cannot be mapped meets one probe after the other, which is said once."""
    case = build("mlp", BATCH)
    gradients = ExampleGradients.build(*case.arguments, case.private)

    class Stubborn(RecordedJacobian):
        def perpendicular_rmatvec(self, u: Tensor) -> Tensor:
            if torch._C._functorch.is_batchedtensor(u):
                raise RuntimeError("not so")
            return super().perpendicular_rmatvec(u)

    clip = Mechanism.build(1.0, 0.7, "gelu").clip
    probes = torch.randn(3, gradients.num_parameters, dtype=torch.float64, device=DEVICE)
    with caplog.at_level("INFO"):
        for _ in range(2):
            found = list(Stubborn(gradients, clip, 1.0).perpendicular_rows(probes, 2))
    assert [record.message for record in caplog.records] == ["probes are processed one by one: not so"]
    for row, want in zip(found, RecordedJacobian(gradients, clip, 1.0).perpendicular_rows(probes), strict=True):
        assert torch.equal(row, want)


@pytest.mark.skipif(DEVICE != "cpu", reason="on GPUs probes are processed one by one")
@pytest.mark.parametrize(
    ("name", "passes", "at_once"),
    [("transformer", 100, 5), ("transformer", 2, 2), ("transformer", 0.5, 1), ("mnist_cnn", 100, 1)],
)
def test_memory_and_layers_decide_how_many_probes_are_worked_at_together(
    name: str, passes: float, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trace is the same."""
    case, found = build(name, 4), []
    gradients = ExampleGradients.build(*case.arguments, case.private)
    true, known = RecordedJacobian.perpendicular_rows, plan(gradients)

    def rows(self: RecordedJacobian, probes: Any, at_once: int = 1) -> Any:
        found.append(at_once)
        return true(self, probes, at_once)

    monkeypatch.setattr(RecordedJacobian, "perpendicular_rows", rows)
    memory = int(passes * 4 * known.bytes_per_example)
    batch, draw = PrivateBatch(gradients, Mechanism.build(1.0, 1.0)), lambda: torch.Generator().manual_seed(3)
    estimate = batch.estimate("trace", "weight-probes", 5, draw(), memory)
    assert set(found) == {at_once}
    monkeypatch.undo()
    jacobian, signs = RecordedJacobian(gradients, batch.mechanism.clip, 1.0), []
    for seed in Draws.seeds_from(5, draw()):
        signs.append(signs_of(draw_bits(seed, torch.empty(gradients.num_parameters, dtype=torch.int8)), torch.float64))
    squares = torch.stack([jacobian.perpendicular_rmatvec(u).square().sum(dim=1) for u in signs])
    want = squares.mean(dim=0) + jacobian.clipped_norm_gradient().square().sum(dim=1)
    assert relative_error(estimate.value, want) < 1e-10
