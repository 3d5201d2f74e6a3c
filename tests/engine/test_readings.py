"""What an engine answers: tables by id and by group, numbers for a log, PLIS, and what print and a
notebook show.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.cases import DEVICE, relative_error
from tests.engine.loops import SIGMA, C, data, make, network, train
from tests.engine.ways import LOSS, step
from torchfil import PLIS, FILPrivacyEngine, fisher
from torchfil.questions import Absent
from torchfil.report import load


def test_columns_and_groups() -> None:
    engine = train(data(40), steps=30).engine  # everybody is drawn
    table = engine.leakage()
    seen = table[table.participations > 0]
    assert (seen.mse_bound_low < seen.mse_bound).all()
    assert torch.allclose(
        torch.tensor(seen.mse_bound.values), 1 / torch.tensor(seen.fil.values) ** 2
    )
    group_of = {i: "even" if i % 2 == 0 else "odd" for i in range(40)}
    row = engine.group_leakage(group_of, threshold=0.1, quantiles=(0.5,)).loc["even"]
    values = engine.get_fil(range(0, 40, 2)).value
    expected = [values.mean(), values.max(), values.quantile(0.5), (values > 0.1).double().mean()]
    assert row["count"] == 20
    assert row[["mean", "max", "q50", "share_above"]].tolist() == pytest.approx(
        [float(v) for v in expected]
    )


@pytest.mark.parametrize("undrawn", [[], [3], [29], [3, 4, 20]])
def test_numbers_stay_with_their_ids_whoever_was_not_drawn(undrawn: list[int]) -> None:
    """A single example that no batch drew moved everybody behind it by one."""
    totals = train(data(30), steps=20, track=("diagonal",)).engine.totals
    for name in ("participations", "measured", "trace"):
        totals.ledger.sums[name][undrawn] = 0
    columns = totals.arrays()
    np.testing.assert_array_equal(
        columns["participations"], totals.ledger.sums["participations"].cpu()
    )
    np.testing.assert_array_equal(columns["fil"], totals.get_fil().value.cpu())


def same(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


def test_ids_are_answered_as_asked(tmp_path: Path) -> None:
    engine = train(data(40), steps=4).engine
    for ids in ([40], [-1], [1.5], ["a"]):
        with pytest.raises(KeyError, match="0 to 39"):
            engine.get_fil(ids)
    everything = engine.get_fil().value
    same(engine.get_fil([3, 1, 3]).value, everything[[3, 1, 3]])
    assert list(engine.leakage([3, 1, 3]).index) == [3, 1, 3]
    assert engine.get_fil([]).value.shape == (0,)
    keys, numbers = [f"patient-{i}" for i in range(40)], list(range(100, 140))
    for id_of, names in (
        (keys, keys),
        (lambda i: f"patient-{i}", keys),
        (torch.tensor(numbers), numbers),
    ):
        named = train(data(40), steps=4, id_of=id_of, max_grad_norm=0.01).engine
        assert list(named.leakage().index) == names
        same(named.get_fil([names[7]]).value, named.get_fil().value[[7]])
        with pytest.raises(KeyError, match="keys of id_of"):
            named.get_fil([7])
    assert load(named.save_run(tmp_path / "run.parquet", delta=1e-4)).ids.dtype == np.int64


def trained(**options: Any) -> FILPrivacyEngine:
    engine, *_, loader = make(criterion=nn.CrossEntropyLoss(), **options)
    for batch in loader:
        engine.train_step(*batch)
    return engine


def test_the_numbers_are_those_of_the_readings() -> None:
    engine = trained(questions={"<member>": Absent()})
    metrics, measured = engine.metrics(delta=1e-5), engine.was_measured()
    fil, bound = engine.get_fil().value[measured], engine.get_mse_bound().value[measured]
    expected = {
        "privacy/steps": 5.0,
        "privacy/measured_share": float(measured.double().mean()),
        "privacy/median_fil": float(fil.median()),
        "privacy/largest_fil": float(fil.max()),
        "privacy/smallest_mse_bound": float(bound.min()),
        "privacy/largest_divergence/<member>": float(
            engine.get_guess("<member>").divergence.value[measured].max()
        ),
        "privacy/epsilon": engine.get_epsilon(1e-5),
    }
    assert metrics == pytest.approx(expected, rel=1e-6)
    assert all(type(value) is float for value in metrics.values())
    assert 0 < metrics["privacy/measured_share"] < 1
    assert metrics["privacy/smallest_mse_bound"] == pytest.approx(
        engine.get_smallest_mse_bound()[0]
    )
    assert set(engine.metrics(prefix="")) == {
        name.removeprefix("privacy/") for name in expected
    } - {"epsilon"}


# ------------------------------------------------------------------ PLIS


def test_at_the_present_weights() -> None:
    """By id; a model that Opacus has hooked is called through a copy without hooks, with its
    present weights.
    """
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
