"""Saved runs made up for tests."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from torchfil.run.saved_run import (
    AttackRecord,
    Attributes,
    Baselines,
    QuestionRecord,
    Records,
    SavedRun,
    Spread,
    Texts,
)

_RATES = [{"fpr": 0.01, "tpr": 0.031, "bound": 0.082}, {"fpr": 0.05, "tpr": 0.117, "bound": None}]
AUDIT: dict[str, Any] = {
    "epsilon": 1.1,
    "claimed": 2.5,
    "delta": 1e-5,
    "num_canaries": 1000,
    "kind": "directions",
}
AUDIT |= {
    "p_value": 1.0,
    "exceeds_claim": False,
    "confidence": 0.95,
    "ceiling": 5.78,
    "rates": _RATES,
}
AUDIT |= {"by_method": {"dp": 0.9, "fdp": 1.1}}
ABOVE = AUDIT | {"epsilon": 2.7, "p_value": 0.01}
REFUTED = AUDIT | {"epsilon": 3.4, "p_value": 1e-9, "exceeds_claim": True}
SPARED = (0, 1, 2)  # their places, the most spared last


def _question(n: int) -> QuestionRecord:
    divergence = np.stack([np.linspace(0, 3, n), np.linspace(1, 0, n)], axis=1)
    return QuestionRecord("sex", ["f", "m"], True, divergence, 1.1 * divergence)


def made_up(n: int = 40, *, text_ids: bool = False, seed: int = 0, **changes: Any) -> SavedRun:
    """A run with every part filled: two groups, three attributes, one attack, one question.

    Three examples were spared, in two rounds of training.
    """
    rng = np.random.default_rng(seed)
    fil = rng.lognormal(size=n)
    parts: dict[str, Any] = {
        "about": {
            "title": "a made-up run",
            "model": {"name": "Sequential", "num_parameters": 12},
            "dataset": {
                "num_examples": n,
                "num_coordinates": 3,
                "input_shape": [3],
                "data_sha256": "0" * 64,
            },
            "mechanism": {
                "noise_multiplier": 1.0,
                "max_grad_norm": 1.0,
                "clip": "gelu",
                "steps": 50,
            },
            "epsilon": 2.5,
            "delta": 1e-5,
            "accountant": "rdp",
            "versions": {"torchfil": "0"},
            "probe_seed": 3,
            "created": "2024-01-01T00:00:00+00:00",
            "exact": False,
            "noise_choice": {
                "target": "every MSE bound at least 0.1",
                "confidence": 0.95,
                "num_pilots": 7,
                "headroom": 1.25,
                "measured": "smallest bound 0.13, at least 0.125 (95 %)",
            },
            "equalised": {"question": None, "target": 0.1, "met": True, "stopped": "target met"},
            "audit": AUDIT,
        },
        "ids": np.asarray([f"Zoë {i}" for i in range(n)]) if text_ids else np.arange(n),
        "columns": {
            "fil": fil,
            "fil_error": 0.05 * fil,
            "sampling_error": 0.1 * fil,
            "mse_bound": fil**-2,
            "mse_bound_low": 0.8 * fil**-2,
            "participations": rng.integers(1, 9, size=n),
            "missed": np.zeros(n, dtype=np.int64),
            "squared_norm": rng.random(n),
            "epsilon": 2.5 * rng.random(n),
            "clip_weight": np.where(
                np.isin(np.arange(n), SPARED), 2 ** (-0.25 * (1 + np.arange(n))), 1.0
            ),
            "fil_before": np.where(np.isin(np.arange(n), SPARED), 3.07, 1.03) * fil,
        },
        "attributes": Attributes(
            ["age", "height", "vkorc1=CT"], ["years", "cm", ""], 1 + rng.random((n, 3))
        ),
        "groups": {
            "sex": rng.choice(np.asarray(["f", "m"]), size=n),
            "site": np.asarray(["A"] * n),
        },
        "texts": Texts(
            np.arange(2),
            [["she", "has", "<gout>"], ["cold"]],
            np.asarray([[0.1, 0.2, 0.5], [0.3, np.nan, np.nan]], "f4"),
        ),
        "history": {"step": np.asarray([1, 2, 4]), "fil_median": np.asarray([0.1, 0.2, 0.3])},
        "bounds": {
            "rdp_mse_bound": {"paper": 0.2, "replace_one": 0.1},
            "rero": {"prior": [0.1], "success": [0.3]},
        },
        "attacks": [
            AttackRecord(
                "gradient",
                "knows all else",
                np.arange(3),
                np.ones(3),
                np.asarray([2.0, 1.5, 3.0]),
                np.zeros(3, bool),
            )
        ],
        "questions": [_question(n)],
        "rounds": {
            "worst": np.asarray([0.0123, 0.0987]),
            "worst_end": np.asarray([0.0112, 0.0876]),
            "num_below": np.asarray([3, 0]),
            "num_spared": np.asarray([0, 3]),
            "smallest_weight": np.asarray([1.0, 0.5946]),
            "score": np.asarray([0.9835, 0.9836]),
            "epsilon": np.asarray([math.nan, math.nan]),
            "seconds": np.asarray([61.0, 62.0]),
            "fresh": np.asarray([False, True]),
        },
    }
    return SavedRun(**{**parts, **changes})


def audited(audit: dict[str, Any] | None, n: int = 20) -> SavedRun:
    """A run with this audit."""
    return made_up(n, about=made_up(n).about | {"audit": audit})


def owned(
    n: int, unit: str = "owner", more: dict[str, Any] | None = None, **changes: Any
) -> SavedRun:
    """A run whose data knows the patients of its visits: by patient, 1, 2, 3 … visits each, or by
    visit.
    """
    run = made_up(n, text_ids=True, **changes)
    facts = {
        "unit": unit,
        "unit_names": ["patient", "visit"],
        "row_reduction": "mean",
        "rows_per_owner": None,
    }
    mechanism = (
        run.about["mechanism"]
        | facts
        | {"poisson": True, "amplification": "poisson", "noise": "OS-seeded"}
        | (more or {})
    )
    columns = dict(run.columns) | ({"num_rows": 1 + np.arange(n)} if unit == "owner" else {})
    return dataclasses.replace(run, about=run.about | {"mechanism": mechanism}, columns=columns)


def with_records(run: SavedRun, value: float = 71.25) -> SavedRun:
    """The run, with two records of two numbers and a category each."""
    values = [[value, 2 * value, np.nan], [value / 3, 0.0, np.nan]]
    return dataclasses.replace(run, records=Records(np.asarray([9, 2]), np.asarray(values)))


def worrying(*, safe: bool = False) -> SavedRun:
    """Inputs between 0 and 1.

    One example in a hundred is known to 0.14, its age to 0.1, whether it smokes to 90 %.
    """
    n = 100
    bound = np.full(n, 4.0)
    error, divergence = np.full((n, 2), 2.0), np.full((n, 1), 1e-3)
    if not safe:
        bound[7], error[7, 0], divergence[7] = 0.02, 0.1, 2.0
    run = made_up(n, attacks=[])
    columns = {
        **run.columns,
        "mse_bound": bound,
        "mse_bound_low": bound,
        "participations": np.full(n, 9),
    }
    return dataclasses.replace(
        run,
        about={**run.about, "dataset": {"input_range": [0.0, 1.0]}},
        columns=columns,
        attributes=Attributes(["age", "height"], ["", ""], error, error),
        questions=[QuestionRecord("smokes", ["no"], False, divergence, divergence)],
    )


def with_baselines(
    run: SavedRun, std: float | list[float] = 0.5, **levels: dict[str, float]
) -> SavedRun:
    """The run, with a blind guess that is off by ``std``: of inputs by its mean square, of
    attributes each.
    """
    deviations = np.broadcast_to(
        np.asarray(std, dtype=np.float64), len(run.attributes.names)
    ).copy()
    ends = (98765.4, -87654.3, 76543.2)  # found nowhere else: tests look for them
    by_attribute = [ends[0] + deviations, deviations, ends[1] - deviations, ends[2] + deviations]
    errors = "the mean of its label", np.sqrt([np.mean(deviations**2)]), deviations[None]
    baselines = Baselines(Spread(*by_attribute), levels, *errors)
    return dataclasses.replace(run, baselines=baselines)


def pixelated(n: int = 60, side: int = 8) -> SavedRun:
    """Every pixel is an attribute: the upper left quarter can be guessed to 0.1, the rest to 9."""
    rows, columns = np.divmod(np.arange(side * side), side)
    close = (rows < side // 2) & (columns < side // 2)
    error = np.where(close, 0.1, 9.0) * (
        1 + 0.01 * np.random.default_rng(0).random((n, side * side))
    )
    names = [f"pixel {row},{column}" for row, column in zip(rows, columns, strict=True)]
    return with_baselines(
        made_up(n, attributes=Attributes(names, [""] * len(names), error, error)), 0.25
    )
