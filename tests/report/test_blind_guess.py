"""The best blind guess from what is public: against explicit leave-one-out, and from data to the
class of exposure.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from tests.engine.loops import train
from torchfil import Private
from torchfil.engine.saving import data as saving
from torchfil.run.baselines import BELOW, BEYOND, blind_errors, exposure_of, typical_blind_error
from torchfil.run.blind_guess import BlindGuess, ColumnMoments
from torchfil.run.file import load

RNG = np.random.default_rng(0)
LABELS = np.repeat([0, 1, 2], [40, 60, 50])
VALUES = RNG.normal([1e3, 0.0], [1.0, 5.0], size=(150, 2)) * (1 + LABELS[:, None]) + 9 * (
    LABELS[:, None] == 1
)


def read(values: Any, targets: Any = (), inputs: Any = (), size: int = 1000) -> BlindGuess:
    guess = BlindGuess()
    for start in range(0, len(values), size):
        part = slice(start, start + size)
        guess.add(values[part], [each[part] for each in targets], [each[part] for each in inputs])
    return guess.judged(np.ones(values.shape[1]), np.arange(len(values)), len(values))


def errors(found: BlindGuess) -> np.ndarray:
    """Of every coordinate by class, and of all together in the last column, [c, d + 1]."""
    d = found.counts.shape[1]
    return found.errors([*([j] for j in range(d)), range(d)], np.ones(d))


def test_columns_of_one_place_are_one_column() -> None:
    """Moments of a value in up to three rows of a person are those of all rows, beside a value that
    rows share.
    """
    rng, places = np.random.default_rng(1), np.asarray([1, 1, 1, 0, 2])
    values = rng.normal(1e3, [1.0, 2.0, 3.0, 4.0, 5.0], size=(40, 5))
    values[5:, 1], values[1:, 2] = np.nan, np.nan
    moments = ColumnMoments.of(np.concatenate([np.ones((40, 2)), values], axis=1), 2)
    for found in (moments.pooled(places).spread, (moments + moments).pooled(places).spread):
        for place in range(3):
            own = values[:, places == place]
            own = own[~np.isnan(own)]
            told = [getattr(found, name)[place] for name in ("mean", "std", "low", "high")]
            np.testing.assert_allclose(
                told, [own.mean(), own.std(), own.min(), own.max()], rtol=1e-10
            )
    alone, plain = moments.pooled(np.arange(5)).spread, moments.spread
    assert all((getattr(alone, name) == getattr(plain, name)).all() for name in vars(plain))


def left_out(values: np.ndarray, design: np.ndarray) -> np.ndarray:
    """Explicitly: the error at each row of least squares on all other rows, [n, d]."""
    rows = np.arange(len(values))
    fits = [
        np.linalg.lstsq(design[rows != row], values[rows != row], rcond=None)[0] for row in rows
    ]
    return values - np.stack([design[row] @ fit for row, fit in enumerate(fits)])


def test_means_leave_the_example_out() -> None:
    found = read(VALUES, [LABELS])
    of_all = left_out(VALUES, np.ones((150, 1))) ** 2
    assert found.knows == "the mean of its label"
    np.testing.assert_array_equal(found.classes, LABELS)
    for label in range(3):
        own = label == LABELS
        of_class = left_out(VALUES[own], np.ones((own.sum(), 1))) ** 2
        np.testing.assert_allclose(
            found.squares[:2, label], [of_all[own].sum(axis=0), of_class.sum(axis=0)], rtol=1e-9
        )
        # fits: below
        squares = np.stack(
            [of_all[own].sum(axis=0), of_class.sum(axis=0), *found.squares[2:, label]]
        )
        want = np.append(squares.min(axis=0), squares.mean(axis=1).min()) / own.sum()
        np.testing.assert_allclose(errors(found)[label], np.sqrt(want), rtol=1e-9)
    assert len(np.unique(errors(found)[:, 2].round(3))) == 3
    alone = read(VALUES)
    assert (alone.knows, alone.column) == ("the mean of all examples", {})
    np.testing.assert_allclose(errors(alone)[0, 2], np.sqrt(of_all.mean()), rtol=1e-9)


def test_fits_are_judged_as_if_the_example_were_left_out() -> None:
    known = RNG.normal(size=(400, 3))
    values = known @ RNG.normal(size=(3, 2)) + RNG.normal(size=(400, 2))
    found = read(values, [], [known])
    brute = left_out(values, np.column_stack([np.ones(400), known]))
    assert found.knows == "a linear fit on what is public"
    np.testing.assert_allclose(
        errors(found)[0], np.sqrt([*np.mean(brute**2, axis=0), np.mean(brute**2)]), rtol=0.02
    )

    # of an offset by label, that of all examples is told by class; a target that is a number is a
    # known column
    labels = np.arange(400) % 2
    shifted = values + RNG.normal(size=(400, 2)) * (1 + labels[:, None])
    found = read(shifted, [labels], [known])
    brute = left_out(shifted, np.column_stack([np.ones(400), known, labels])) ** 2
    want = [np.r_[own.sum(axis=0)] for own in (brute[labels == 0], brute[labels == 1])]
    np.testing.assert_allclose(found.squares[2], want, rtol=0.02)

    # by label, with other slopes
    turned = np.where(labels[:, None] == 0, values, -values)
    found = read(turned, [labels], [known])
    assert found.knows == "a linear fit on what is public"
    for label in range(2):
        own = labels == label
        brute = left_out(turned[own], np.column_stack([np.ones(200), known[own]]))
        np.testing.assert_allclose(errors(found)[label, 2], np.sqrt(np.mean(brute**2)), rtol=0.02)
    assert read(values, [known[:, 0]]).knows == "a linear fit on what is public"
    # what is known is no secret
    assert errors(read(known @ np.ones((3, 1)), [], [known])).max() < 1e-6
    noise = RNG.normal(size=(60, 40))  # forty columns that say nothing
    assert errors(read(values[:60], [], [noise]))[0, 2] > 0.9 * values[:60].std()


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_pieces_and_gaps_change_nothing(size: int) -> None:
    known, values = RNG.normal(1e4, 1.0, size=(150, 2)), VALUES.copy()
    values[::3, 1] = np.nan
    few = (known > 1e4).astype(float)  # columns of two values
    whole, found = (read(values, [LABELS], [known, few], rows) for rows in (150, size))
    assert whole.knows == found.knows
    np.testing.assert_allclose(errors(found), errors(whole), rtol=1e-12)
    without = read(values, [LABELS], [], size)
    for label in range(3):
        there = values[(label == LABELS) & ~np.isnan(values[:, 1]), 1]
        want = np.sqrt(np.mean(left_out(there[:, None], np.ones((len(there), 1))) ** 2))
        assert errors(without)[label, 1] <= want * (1 + 1e-9)
    # one example has it: nobody to learn from
    never = read(np.where(np.arange(150)[:, None] > 0, [1.0, np.nan], 2.0))
    assert np.isnan(errors(never)[0, 1])
    assert np.isfinite(errors(never)[0, [0, 2]]).all()


def test_rare_labels_count_together_and_one_alone_is_guessed_as_everybody() -> None:
    labels = np.r_[LABELS, [7, 8, 8]]
    values = np.concatenate([VALUES, [[1.0, 2.0], [4.0, 5.0], [4.1, 5.2]]])
    found = read(values, [labels])
    of_all = left_out(values, np.ones((153, 1))) ** 2
    assert found.classes[-3:].tolist() == [3] * 3
    np.testing.assert_allclose(found.squares[0, 3], of_all[-3:].sum(axis=0))
    np.testing.assert_allclose(found.squares[1, 3], of_all[-3] + 2 * (values[-1] - values[-2]) ** 2)
    assert np.isnan(errors(read(values[:1]))).all()


class TestSaved:
    @staticmethod
    def saved(
        tmp_path: Path, x: Any, y: Any, private: Any = None, outputs: int = 2, **options: Any
    ) -> Any:
        dataset = TensorDataset(torch.as_tensor(x, dtype=torch.float64), torch.as_tensor(y))
        loss = {"loss_fn": nn.functional.mse_loss} if outputs == 1 else {}
        given = {"module": nn.Linear(x.shape[1], outputs).double(), "private": private, **loss}
        engine = train(dataset, steps=3, track=("diagonal",), **given).engine
        return load(engine.save_run(tmp_path / "run.parquet", delta=1e-5, **options))

    def test_who_is_exposed_is_told_by_the_label(self, tmp_path: Path) -> None:
        """Off by more than a label's mean, and by less than everybody's: beyond a blind guess, and
        was not before.
        """
        y = np.arange(80) % 2
        x = (
            np.where(y[:, None] == 0, -1.0, 1.0)
            + RNG.normal(size=(80, 3)) * np.where(y == 0, 0.1, 0.3)[:, None]
        )
        run = self.saved(tmp_path, x, y)
        first, second = run.baselines.errors
        assert (first, second) == pytest.approx(
            (x[y == 0].std(axis=0).mean(), x[y == 1].std(axis=0).mean()), rel=0.05
        )
        np.testing.assert_array_equal(run.columns["public_class"], y)
        assert run.columns["public_class"].dtype == np.int32
        bound = {name: np.full(80, 0.2**2) for name in ("mse_bound", "mse_bound_low")}
        counts = {"participations": np.full(80, 9), "fil": np.full(80, 5.0)}
        run = dataclasses.replace(run, columns={**run.columns, **bound, **counts})
        assert exposure_of(run).tolist() == np.where(y == 0, BEYOND, BELOW).tolist()
        # as if nothing were public
        assert set(exposure_of(run, stated=float(x.std())).tolist()) == {0}

    def test_known_columns_private_targets_and_levels(self, tmp_path: Path) -> None:
        x, y = RNG.normal(size=(90, 4)), np.arange(90) % 3
        x[:, 0] = x[:, 2] - x[:, 3]
        run = self.saved(
            tmp_path, x, y, Private(coordinates=torch.tensor([True, True, False, False])), outputs=3
        )
        errors = blind_errors(run)
        assert errors[:, 0].max() < 1e-6
        assert errors[:, 1].min() > 0.5
        secret = self.saved(tmp_path, x, x[:, :1], Private(target=True), outputs=1)
        assert (secret.baselines.knows, "public_class" in secret.columns) == (
            "the mean of all examples",
            False,
        )

        level = np.where(RNG.random(90) < 0.8, y, RNG.integers(3, size=90))
        table = np.column_stack([np.eye(3)[level], x[:, 1]])
        run = self.saved(
            *(tmp_path, table, y),
            outputs=3,
            attribute_names=["a", "b", "c", "age"],
            attribute_groups={"kind": ["a", "b", "c"]},
            attribute_scales={"age": ("years", -10.0)},
        )
        for label in range(3):
            own = y == label
            share = table[own, :3].mean(axis=0)
            kind = np.sqrt(np.sum(share * (1 - share)) / 3) * 30 / 29
            fit = x[:, 1] - np.polyval(np.polyfit(y, x[:, 1], 1), y)
            by_all = [(x[:, 1] - x[:, 1].mean()) * 90 / 89, fit * 90 / 88]
            age = 10 * min(
                *(np.sqrt(np.mean(each[own] ** 2)) for each in by_all), x[own, 1].std() * 30 / 29
            )
            np.testing.assert_allclose(blind_errors(run)[label], [kind, age], rtol=1e-6)

    def test_examples_that_were_not_read_are_a_class_of_their_own(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        y = np.arange(120) % 2
        x = RNG.normal(size=(120, 2)) * (1 + 4 * y[:, None])
        monkeypatch.setattr(saving, "_FEW_ROWS", 60)
        run = self.saved(tmp_path, x, y, hash_data=False)
        classes, errors = run.columns["public_class"], run.baselines.errors
        assert (np.sum(classes == 2), len(errors)) == (60, 3)
        read = classes < 2
        assert len(set(zip(classes[read].tolist(), y[read].tolist(), strict=True))) == 2
        sizes = np.bincount(classes[read])
        assert errors[2] == pytest.approx(np.sqrt(np.sum(sizes * errors[:2] ** 2) / 60))
        assert blind_errors(run).shape == (3, 2)
        assert typical_blind_error(run) == pytest.approx(errors[2])
