"""Runs for the first screen: four kinds, safe and not."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from msgspec.structs import replace

from tests.report.run_cases import made_up
from torchfil.gate.policy import Policy
from torchfil.glm import LinearRegression
from torchfil.run.linear_run import linear_run
from torchfil.run.saved_run import Attributes, QuestionRecord, SavedRun, Texts

N = 200
KINDS = ("image", "table", "text", "linear")
POLICY = Policy(min_error_share=0.5, max_share_exposed=0.05, max_share_too_few_draws=0.01)
WHOLE = replace(POLICY, min_attribute_error_share=0.5, max_gain_over_guessing=0.1)


def bare(title: str, bound: np.ndarray | float, **changes: Any) -> SavedRun:
    """Inputs between 0 and 1, so that a blind guess has a squared error of 0.25.

    Nothing asked, tracked or attacked.
    """
    bounds = np.broadcast_to(np.asarray(bound, dtype=np.float64), N).copy()
    run = made_up(
        N, text_ids=True, attacks=[], questions=[], groups={}, attributes=None, texts=None
    )
    columns = {
        "fil": bounds**-0.5,
        "mse_bound": bounds,
        "mse_bound_low": 0.9 * bounds,
        "participations": np.full(N, 20),
        "missed": np.zeros(N, dtype=np.int64),
    }
    about = run.about | {"title": title, "dataset": {"num_examples": N, "input_range": [0.0, 1.0]}}
    about = {key: value for key, value in about.items() if key not in ("noise_choice", "equalised")}
    return dataclasses.replace(
        run, **{"about": about, "columns": columns, "rounds": {}, "history": {}, **changes}
    )


def some(value: float, few: float, places: list[int]) -> np.ndarray:
    """A value for all but some."""
    values = np.full(N, value)
    values[places] = few
    return values


def attributes(errors: np.ndarray) -> Attributes:
    """Age and weight, [n] errors of the former."""
    table = np.stack([errors, np.full(N, 3.0)], axis=1)
    return Attributes(["age", "weight"], ["", ""], table, table)


def question(name: str, divergence: np.ndarray) -> QuestionRecord:
    return QuestionRecord(name, ["other"], False, divergence[:, None], divergence[:, None])


def of_kind(kind: str, *, safe: bool) -> SavedRun:
    """An image, table, text or linear run.

    If not safe, three examples are known to half of a blind guess's error.
    """
    bound = 2.0 if safe else some(2.0, 0.01, [3, 4, 5])
    if kind == "image":
        return bare("X-rays", bound)
    if kind == "table":
        asked = [question("genotype", some(0.001, 0.001 if safe else 0.5, [3, 4]))]
        groups = {
            "sex": np.where(np.arange(N) % 2, "f", "m"),
            "site": np.where(np.arange(N) < 80, "A", "B"),
        }
        return bare(
            "Doses", bound, attributes=attributes(np.full(N, 2.0)), questions=asked, groups=groups
        )
    if kind == "text":
        words = [["patient", "has", "gout"], ["patient", "has", "a", "cold"]]
        eta = np.asarray([[0.1, 0.1, 0.6, np.nan], [0.1, 0.1, 0.2, 0.3]], "f4")
        return bare("Notes", bound, texts=Texts(np.arange(2), words, eta))
    return linear(0.3 if safe else 0.05)


def linear(sigma: float) -> SavedRun:
    """A least-squares fit to people of whom three have a far larger dose than all others, released
    with noise.
    """
    rng = np.random.default_rng(3)
    people = rng.normal(size=(N, 3))
    doses = people @ [1.0, -1.0, 0.5] + rng.normal(size=N)
    doses[[3, 4, 5]] += 40
    fitted = LinearRegression(l2=0.01, fit_intercept=True).fit(people, doses)
    named = {"age": [0], "weight": [1], "height": [2]}
    ids = [f"Zoë {i}" for i in range(N)]
    return linear_run(
        fitted, people, doses, sigma, attributes=named, ids=ids, title="A linear model"
    )
