"""The cost model: fitted to what was measured, and what it says of messages and memory is what the library does."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.scale_model import MODELS_READ_OUT, Size, booking_seconds, fitted, measured_in_float32, tables


def test_the_formula_is_within_a_factor_of_two_of_every_measurement() -> None:
    float32, bfloat16 = fitted(measured_in_float32())
    assert 1 < float32.off_by < 2
    assert 1 < bfloat16.off_by < 2
    rows = tables(float32, bfloat16).splitlines()
    assert len(rows) == 2 + 2 * 3 * 3
    assert {row.count("|") for row in rows} == {10}


def test_sizes() -> None:
    small = Size(examples=1e6, **MODELS_READ_OUT["10⁸, all trained, float32"])  # type: ignore[arg-type]
    assert small.gradient_bytes == small.accounting_bytes == 0  # of one process
    assert replace(small, ranks=2).gradient_bytes == 4 * small.trained  # as the tests of messages measure
    assert small.ledger_bytes == pytest.approx(1e6 * small.ledger_bytes / small.examples)
    assert small.model_bytes == 20e8
    eight, sixty_four = (replace(small, ranks=ranks).accounting_bytes for ranks in (8, 64))
    assert sixty_four - eight == 72 * 56  # norms and η̄ do not grow with the ranks


def test_booking_is_timed() -> None:
    assert booking_seconds(examples=1000, batch=10, steps=3) > 0
