"""Attributes in their own units, one-hot levels as one: against slow references, and refused where
they do not fit.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from tests.engine.loops import train
from torchfil import Private
from torchfil.engine.saving.attributes import attribute_table
from torchfil.report import load
from torchfil.run.blind_guess import ColumnMoments

NAMES = ["age", "a=1", "a=2", "a=3", "smokes"]
GROUPS = {"a": ["a=1", "a=2", "a=3"]}
DELTA = 1e-5


def table_of_people(n: int = 60, *, standardised: bool = False) -> TensorDataset:
    """Age, one attribute of three levels as three columns, and one of two."""
    generator = torch.Generator().manual_seed(0)
    level = torch.multinomial(
        torch.tensor([0.6, 0.3, 0.1]), n, replacement=True, generator=generator
    )
    level[:3] = torch.arange(3)
    one_hot = nn.functional.one_hot(level, 3).double()
    if standardised:
        one_hot = (one_hot - one_hot.mean(dim=0)) / one_hot.std(dim=0)
    age = torch.randn(n, 1, generator=generator, dtype=torch.float64)
    smokes = (torch.rand(n, 1, generator=generator) < 0.25).double()
    target = torch.randint(3, (n,), generator=generator)
    return TensorDataset(torch.cat([age, one_hot, smokes], dim=1), target)


@pytest.fixture(scope="module")
def trained() -> Any:
    return train(table_of_people(), steps=12, track=("diagonal",))


class TestSaved:
    def test_scales_levels_and_baselines(self, trained: Any, tmp_path: Path) -> None:
        scales, options = (
            {"age": ("years", -14.2, 51.0)},
            {"delta": DELTA, "attribute_names": NAMES},
        )
        path = trained.engine.save_run(
            tmp_path / "run.parquet", attribute_scales=scales, attribute_groups=GROUPS, **options
        )
        run = load(path)
        assert (run.attributes.names, run.attributes.units) == (
            ["age", "a", "smokes"],
            ["years", "", ""],
        )
        error, plain = (
            np.asarray(run.attributes.error),
            1 / trained.engine.get_attribute_fil().value.numpy(),
        )
        np.testing.assert_allclose(error[:, [0, 2]], plain[:, [0, 4]] * [14.2, 1.0], 1e-5)
        trace = np.nansum(plain[:, 1:4] ** -2, axis=1)
        trace[np.isnan(plain[:, 1:4]).all(axis=1)] = np.nan  # of those who were never drawn
        np.testing.assert_allclose(error[:, 1], np.sqrt(4 / (3 * trace)), rtol=1e-5)
        assert np.isfinite(error).mean() > 0.5
        assert (np.asarray(run.attributes.error_low) <= np.nan_to_num(error, nan=np.inf)).all()

        x = table_of_people().tensors[0].numpy()
        age, shares = 51 - 14.2 * x[:, 0], x[:, 1:4].mean(axis=0)
        known = run.baselines.attributes
        blind = math.sqrt(np.sum(shares * (1 - shares)) / 3)
        np.testing.assert_allclose(known.std, [age.std(), blind, x[:, 4].std()], rtol=1e-9)
        np.testing.assert_allclose(known.mean[[0, 2]], [age.mean(), x[:, 4].mean()])
        np.testing.assert_allclose([known.low[0], known.high[0]], [age.min(), age.max()])
        assert set(run.baselines.levels) == {"a", "smokes"}
        assert run.baselines.levels["a"] == pytest.approx(
            dict(zip(NAMES[1:4], shares, strict=True))
        )
        assert run.baselines.levels["smokes"] == pytest.approx(
            {"0": 1 - x[:, 4].mean(), "1": x[:, 4].mean()}
        )

        records, drawn = run.records, run.columns["participations"] > 0
        np.testing.assert_array_equal(
            records.rows[:10], np.argsort(-run.columns["fil"] * drawn, kind="stable")[:10]
        )
        expected_values = np.stack([age, np.full(60, np.nan), x[:, 4]], axis=1)[records.rows]
        np.testing.assert_allclose(records.values, expected_values)
        assert len(records.rows) == 13
        plain = trained.engine.save_run(tmp_path / "without.parquet", records=False, **options)
        assert load(plain).records is None

    def test_chosen_coordinates_and_pixels(self, tmp_path: Path) -> None:
        images = torch.rand(
            24, 1, 6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
        )
        dataset = TensorDataset(images, torch.randint(3, (24,)))
        model = nn.Sequential(nn.Flatten(), nn.Linear(30, 3)).double()
        chosen = [7, 12, 29]
        mask = (
            torch.zeros(1, 6, 5, dtype=torch.bool)
            .flatten()
            .index_fill(0, torch.tensor(chosen), True)
            .view(1, 6, 5)
        )
        engine = train(
            dataset, steps=4, module=model, track=("diagonal",), private=Private(coordinates=mask)
        ).engine
        run = load(engine.save_run(tmp_path / "run.parquet", delta=DELTA))
        assert run.records is None, "of pixels none are kept"
        assert run.attributes.names == [f"coordinate {j}" for j in range(3)]
        np.testing.assert_allclose(
            run.baselines.attributes.std, images.flatten(1)[:, chosen].std(dim=0, correction=0)
        )


class TestGroups:
    def test_the_bound_holds_for_the_best_unbiased_guess(self) -> None:
        """r²/(m tr I) is at most the mean squared error of the efficient estimator on the simplex,
        tr(I⁻¹)/m.
        """
        rng = np.random.default_rng(0)
        columns = np.eye(3)[rng.integers(3, size=50)]
        table = attribute_table(3, ["x", "y", "z"], None, None, {"level": ["x", "y", "z"]})
        table = table.with_levels(ColumnMoments.of(columns).spread)
        basis = np.linalg.svd(np.ones((1, 3)))[2][1:].T  # directions in which shares can change
        for _ in range(50):
            root = rng.normal(size=(3, 4))
            information = root @ root.T
            best = np.trace(np.linalg.inv(basis.T @ information @ basis)) / 3
            told = (
                float(table.errors(torch.as_tensor(np.diag(information).copy())[None])[0, 0]) ** 2
            )
            assert told <= best * (1 + 1e-12)

    def test_standardised_columns_are_told_as_shares(self) -> None:
        plain, scaled = (
            table_of_people(standardised=flag).tensors[0].numpy() for flag in (False, True)
        )
        information = torch.rand(4, 5, dtype=torch.float64) + 0.1
        tables = []
        for x in (plain, scaled):
            spread = ColumnMoments.of(x).spread
            tables.append(
                (attribute_table(5, NAMES, None, None, GROUPS).with_levels(spread), spread)
            )
        (first, of_plain), (second, of_scaled) = tables
        widths = torch.as_tensor(scaled.max(axis=0) - scaled.min(axis=0))
        widths[[0, 4]] = 1.0
        torch.testing.assert_close(
            first.errors(information * widths**2)[:, 1], second.errors(information)[:, 1]
        )
        np.testing.assert_allclose(
            first.spread(of_plain)[0].std[1], second.spread(of_scaled)[0].std[1]
        )
        assert first.spread(of_plain)[1]["a"] == pytest.approx(second.spread(of_scaled)[1]["a"])


REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"attribute_scales": {"agee": ("years", 1.0)}}, ValueError, "did you mean 'age'"),
    ({"attribute_scales": {"age": ("years", 1.0, math.nan)}}, ValueError, "offset"),
    ({"attribute_groups": {"a": ["a=1", "a=2"], "b": ["a=2", "a=3"]}}, ValueError, "already"),
    ({"attribute_groups": {"smokes": ["a=1", "a=2"]}}, ValueError, "'smokes' is named 2 times"),
    ({"attribute_groups": {"a": ["age", "a=2"]}}, ValueError, "more than two values"),
    ({"attribute_groups": {"a": [*NAMES[1:4], "smokes"]}}, ValueError, "hold at once"),
    (
        {"attribute_groups": GROUPS, "attribute_scales": {"a=1": ("", 2.0)}},
        ValueError,
        "level of 'a'",
    ),
]


@pytest.mark.parametrize(("wrong", "kind", "noun"), REFUSED)
def test_what_does_not_fit_is_refused_and_nothing_written(
    trained: Any, tmp_path: Path, wrong: dict[str, Any], kind: type[Exception], noun: str
) -> None:
    with pytest.raises(kind, match=noun):
        trained.engine.save_run(
            tmp_path / "run.parquet", delta=DELTA, attribute_names=NAMES, **wrong
        )
    assert not list(tmp_path.iterdir())
