"""PLIS from the engine: at the present weights, and summed over a run (as in test_equivalence.py)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.cases import DEVICE, relative_error
from tests.engine.loops import SIGMA, C, data, network, train
from tests.engine.ways import LOSS, step
from torchfil import PLIS, FILPrivacyEngine, fisher


def test_at_the_present_weights() -> None:
    """By id; a model that Opacus has hooked is called through a copy without hooks, with its present weights."""
    dataset, module, plain = data(16), network(), network()
    run = train(dataset, steps=2, module=module, id_of=[f"p{i}" for i in range(16)])
    plain.load_state_dict(module.state_dict())
    x, y = (tensor.to(DEVICE) for tensor in dataset.tensors)
    mechanism: dict[str, Any] = {"noise_std": SIGMA * C, "max_grad_norm": C}
    for private, options in ((True, mechanism), (False, {})):
        want = PLIS(plain, LOSS, **options).attribute(x, y)
        assert relative_error(run.engine.plis(private=private), want) < 1e-10
        assert relative_error(run.engine.plis(["p7", "p3"], private=private), want[[7, 3]]) < 1e-10
        for model in (run.model, module, run.model.eval()):
            assert relative_error(PLIS(model, LOSS, **options).attribute(x, y), want) < 1e-10
    exact: dict[str, Any] = {"max_grad_norm": C, "noise_multiplier": SIGMA, "estimator": "exact"}
    traces = [fisher.fim_trace(model, LOSS, x, y, **exact).value for model in (run.model, plain)]
    assert relative_error(*traces) < 1e-10
    run.model.train()
    step(run.engine, run.model, run.optimizer, *next(iter(run.loader)))
    with pytest.raises(KeyError, match="unknown example ids"):
        run.engine.plis(["nobody"])
    with pytest.raises(ValueError, match="'plis'"):
        run.engine.get_plis()
    with pytest.raises(RuntimeError, match="make_private"):
        FILPrivacyEngine().plis()


def test_skipped_steps_leave_it_unbiased() -> None:
    """The mean over many runs of the same three steps, each measured with probability ½, is the full sum.

    A step is measured for all its examples or for none, so the deviations are those of three coins.
    """
    options: dict[str, Any] = {"steps": 3, "track": ("plis",)}
    full = train(data(16), **options).engine.get_plis()
    parts = torch.stack([train(data(16), fil_rate=0.5, seed=s, **options).engine.get_plis() for s in range(16)])
    error = parts.std(dim=0) / 4
    deviation = ((parts.mean(dim=0) - full).abs() / error.clamp(min=1e-30))[full.abs() > 0]
    assert float(deviation.max()) < 4
