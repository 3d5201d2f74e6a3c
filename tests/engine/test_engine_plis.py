"""PLIS from the engine: at the present weights, and summed over a run."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from tests.cases import DEVICE, relative_error
from tests.engine.loops import SIGMA, C, data, network, train
from torchfil import PLIS, FILPrivacyEngine, fisher


def at(module: nn.Module, *, private: bool = True) -> PLIS:
    if not private:
        return PLIS(module, nn.CrossEntropyLoss())
    return PLIS(module, nn.CrossEntropyLoss(), noise_std=SIGMA * C, max_grad_norm=C)


@pytest.mark.parametrize("private", [True, False])
def test_at_the_present_weights(private: bool) -> None:
    dataset, module = data(40), network()
    run = train(dataset, steps=4, module=module, id_of=[f"p{i}" for i in range(40)])
    x, y = (tensor.to(DEVICE) for tensor in dataset.tensors)
    want = at(module, private=private).attribute(x, y)
    assert relative_error(run.engine.plis(private=private), want) < 1e-10
    some = run.engine.plis(["p7", "p3"], private=private)
    assert relative_error(some, want[[7, 3]]) < 1e-10
    with pytest.raises(KeyError, match="unknown example ids"):
        run.engine.plis(["nobody"])


@pytest.mark.parametrize("physical", [None, 3])
def test_summed_over_a_run(physical: int | None) -> None:
    dataset = data(40)
    run = train(dataset, steps=10, physical=physical, track=("plis",))
    inputs = dataset.tensors[0]
    want = torch.zeros(40, 5, dtype=torch.float64)
    for step in run.steps:
        x, y = torch.cat(step.x), torch.cat(step.y)
        if len(x):
            rows = [int((inputs == row).all(dim=1).nonzero()) for row in x]
            module = copy.deepcopy(network())
            module.load_state_dict(step.weights)
            want[rows] += at(module).attribute(x.to(DEVICE), y.to(DEVICE)).cpu()
    assert relative_error(run.engine.get_plis(), want) < 1e-8
    assert relative_error(run.engine.get_plis([5]), want[[5]]) < 1e-8


@pytest.mark.parametrize("runs", [16, pytest.param(60, marks=pytest.mark.slow)])
def test_skipped_steps_leave_it_unbiased(runs: int) -> None:
    """The mean over many runs of the same three steps, each measured with probability ½, is the full sum.

    A step is measured for all its examples or for none, so the deviations are those of three coins.
    """
    dataset = data(16)
    full = train(dataset, steps=3, track=("plis",)).engine.get_plis()
    parts = torch.stack(
        [train(dataset, steps=3, track=("plis",), fil_rate=0.5, seed=s).engine.get_plis() for s in range(runs)]
    )
    error = parts.std(dim=0) / runs**0.5
    seen = full.abs() > 0
    deviation = ((parts.mean(dim=0) - full).abs() / error.clamp(min=1e-30))[seen]
    assert float(deviation.max()) < 4


def test_refusals() -> None:
    run = train(data(16), steps=2)
    with pytest.raises(ValueError, match=r"make_private with track=\('plis',\)"):
        run.engine.get_plis()
    engine = FILPrivacyEngine()
    with pytest.raises(RuntimeError, match="call make_private first"):
        engine.plis()


def test_a_private_model_can_be_asked_directly() -> None:
    """A model that Opacus has hooked is called through a copy without hooks, with its present weights."""
    dataset, module = data(16), network()
    run = train(dataset, steps=2, module=module)
    x, y = (tensor.to(DEVICE) for tensor in dataset.tensors)
    plain = network()
    plain.load_state_dict(module.state_dict())
    want = at(plain).attribute(x, y)
    for model in (run.model, module, run.model.eval()):
        assert relative_error(at(model).attribute(x, y), want) < 1e-10
        exact: dict[str, Any] = {"max_grad_norm": C, "noise_multiplier": SIGMA, "estimator": "exact"}
        trace = fisher.fim_trace(model, nn.CrossEntropyLoss(), x, y, **exact).value
        assert relative_error(trace, fisher.fim_trace(plain, nn.CrossEntropyLoss(), x, y, **exact).value) < 1e-10
    run.model.train()
    run.optimizer.zero_grad()
    for x, y in run.loader:
        nn.functional.cross_entropy(run.model(x.to(DEVICE)), y.to(DEVICE)).backward()
        run.optimizer.step()
        break
