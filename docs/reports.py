"""Six reports as people see them: digits, patients, notes, a linear model, two runs compared, the
public page.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from torchfil.gate.gate import template
from torchfil.gate.policy import load_policy
from torchfil.glm import LinearRegression
from torchfil.report import compare_runs, write_report
from torchfil.report.page import render_comparison
from torchfil.run.linear_run import linear_run
from torchfil.run.saved_run import (
    Attributes,
    Baselines,
    QuestionRecord,
    Records,
    SavedRun,
    Spread,
    Texts,
)

COUNT, STEPS = 3855, 600
GENOTYPES, SITES = ["CC", "CT", "TT"], [f"site {k}" for k in range(1, 7)]
MECHANISM = {
    "max_grad_norm": 1.0,
    "clip": "smooth",
    "steps": STEPS,
    "sample_rate": 1 / 15,
    "poisson": True,
}
MECHANISM |= {
    "amplification": "poisson",
    "estimator": "weight-probes",
    "num_probes": 2,
    "fil_rate": 1.0,
}
ABOUT: dict[str, Any] = {
    "title": "Warfarin doses, made-up patients",
    "model": {"name": "Sequential", "num_parameters": 129},
    "dataset": {"num_examples": COUNT, "num_coordinates": 14, "input_shape": [14]},
    "delta": 1e-5,
    "accountant": "rdp",
    "versions": {"torchfil": "0.1.0"},
    "created": "2026-11-17T12:00:00+00:00",
    "exact": False,
}


def patients(noise: float = 1.0) -> SavedRun:
    """Warfarin patients that nobody is, trained on with so many times the noise of the run that
    fails its policy.
    """
    rng = np.random.default_rng(7)
    race = rng.choice(["Asian", "Black", "White"], p=[0.31, 0.12, 0.57], size=COUNT)
    fil = rng.lognormal(-0.62, 0.42, size=COUNT) / noise * np.where(race == "Black", 1.35, 1.0)
    epsilon = 6.4 / noise**1.2

    # attributes in their own units, and how they are spread
    deviations = np.array([14.4, 10.6, 21.8, 0.3])
    lowest, highest = np.array([0.75, 1.2, 0.9, 1.55]), np.array([1.3, 1.8, 1.5, 2.1])
    error = deviations * rng.uniform(lowest, highest, size=(COUNT, 4)) / fil[:, None]
    attributes = Attributes(
        ["age", "height", "weight", "smokes"], ["years", "cm", "kg", ""], error * 1.2, error
    )
    means, ends = [60.0, 168.0, 78.0, 0.1], [[18.0, 130.0, 35.0, 0.0], [98.0, 203.0, 180.0, 1.0]]
    spread = Spread(np.array(means), deviations, *map(np.array, ends))
    guess = "the mean of its label", np.asarray([1.0]), deviations[None]
    baselines = Baselines(spread, {"smokes": {"no": 0.9, "yes": 0.1}}, *guess)

    # of the closest estimates, what the data say
    rows = np.argsort((error / deviations)[:, :3].min(axis=1))[:24]
    inside = np.percentile(ends, [25, 75], axis=0)
    values = np.clip(np.random.default_rng(8).normal(means, deviations, size=(24, 4)), *inside)
    values[:, 3] = np.nan
    records = Records(rows, values)

    # questions: whoever leaks more is told more easily from other answers
    genotype = rng.choice(3, p=[0.37, 0.35, 0.28], size=COUNT)
    apart = fil[:, None] ** 2 * rng.uniform(0.02, 0.09, size=(COUNT, 3))
    divergence = np.where(np.arange(3) == genotype[:, None], 0.0, apart)
    questions = [
        QuestionRecord("genotype", GENOTYPES, True, divergence, 1.25 * divergence),
        QuestionRecord(
            "member", ["absent"], False, 0.008 * fil[:, None] ** 2, 0.011 * fil[:, None] ** 2
        ),
    ]

    looks = np.arange(1, STEPS + 1, 40)
    columns = {
        "fil": fil,
        "fil_error": 0.04 * fil,
        "sampling_error": 0.09 * fil,
        "mse_bound": fil**-2,
        "mse_bound_low": fil**-2 * rng.uniform(0.72, 0.86, size=COUNT),
        "participations": rng.poisson(40, size=COUNT),
        "missed": np.zeros(COUNT, int),
        "epsilon": epsilon * np.clip(fil / fil.max(), 0.1, 1) ** 0.6,
    }
    rero = {"prior": [0.01, 0.1, 0.3, 0.5], "success": [0.3, 0.6, 0.8, 0.9]}
    return SavedRun(
        about=ABOUT
        | {"mechanism": MECHANISM | {"noise_multiplier": 0.8 * noise}, "epsilon": epsilon},
        ids=np.asarray([f"P{1000 + k}" for k in range(COUNT)]),
        columns=columns,
        attributes=attributes,
        groups={"race": race, "site": rng.choice(SITES, size=COUNT)},
        questions=questions,
        baselines=baselines,
        records=records,
        bounds={"rdp_mse_bound": {"replace_one": 0.004}, "rero": rero},
        history={"step": looks, "epsilon": epsilon * np.sqrt(looks / STEPS)},
    )


def of_shares(title: str, share: np.ndarray, blind: float, **parts: Any) -> SavedRun:
    """Lower ends at so many times a blind guess's error, [n].

    One in eight was drawn too rarely to tell.
    """
    rng, n = np.random.default_rng(1), len(share)
    drawn = np.where(rng.random(n) < 0.125, rng.integers(1, 5, size=n), rng.poisson(30, size=n) + 5)
    bound = (blind * share) ** 2 / 0.8
    columns = {
        "fil": bound**-0.5,
        "fil_error": 0.04 * bound**-0.5,
        "sampling_error": 0.1 * bound**-0.5,
        "mse_bound": bound,
        "mse_bound_low": np.where(drawn < 5, 0.0, 0.8 * bound),
        "participations": drawn,
        "missed": np.zeros(n, int),
    }
    nothing = Spread(*(np.zeros(0) for _ in range(4)))
    about = ABOUT | {
        "title": title,
        "mechanism": MECHANISM | {"noise_multiplier": 1.1},
        "epsilon": 4.2,
    }
    member = 2 * (0.06 / np.maximum(share, 0.2))[:, None] ** 2
    asked = [QuestionRecord("member", ["absent"], False, 0.8 * member, member)]
    return SavedRun(
        about=about | {"dataset": {"num_examples": n, "input_range": [0.0, 1.0]}},
        ids=np.arange(n),
        columns=columns,
        questions=asked,
        baselines=Baselines(
            nothing, {}, "the mean of its label", np.asarray([blind]), nothing.std[None]
        ),
        **parts,
    )


def digits() -> SavedRun:
    """Handwritten digits, of which the strangest few leak most."""
    from sklearn.datasets import load_digits

    data, rng, n = load_digits(), np.random.default_rng(7), 1000
    pixels, labels = data.data[:n] / 16, data.target[:n]
    means = np.stack([pixels[labels == label].mean(axis=0) for label in range(10)])
    strange = np.square(pixels - means[labels]).mean(axis=1)
    share = rng.lognormal(1.1, 0.35, size=n) * (np.median(strange) / strange) ** 1.5
    run = of_shares("Handwritten digits", share, 0.18, groups={"label": labels.astype(str)})
    return dataclasses.replace(run, about=run.about | {"unit_of_inputs": "grey value, 0 to 1"})


NOTES = """patient reports gout in the left foot since March
no finding , follow up in a year
mother died of Huntington disease at 52
was treated in Uppsala after a fall from a roof"""


def notes() -> SavedRun:
    """Doctors' notes; names of places and diseases leak most."""
    rng, n = np.random.default_rng(5), 600
    share, words = rng.lognormal(0.9, 0.5, size=n), [line.split() for line in NOTES.splitlines()]
    leaked = np.full((len(words), max(map(len, words))), np.nan, "f4")
    for row, line in enumerate(words):
        leaked[row, : len(line)] = [
            0.02 * len(word) * (3 if word.istitle() else 1) for word in line
        ]
    texts = Texts(np.argsort(share)[: len(words)], words, leaked)
    groups = {"ward": np.where(np.arange(n) % 3 == 0, "surgery", "medicine")}
    return of_shares("Doctors’ notes", share, 0.9, texts=texts, groups=groups)


def doses() -> SavedRun:
    """A linear model of doses, released with noise."""
    rng, n = np.random.default_rng(3), 400
    people = np.stack(
        [rng.normal(60, 14, n), rng.normal(78, 20, n), rng.normal(168, 10, n)], axis=1
    )
    target = 40 - 0.3 * people[:, 0] + 0.1 * people[:, 1] + rng.standard_t(3, size=n) * 5
    fitted = LinearRegression(l2=0.01, fit_intercept=True).fit(people, target)
    units = {"age": "years", "weight": "kg", "height": "cm"}
    named, sex = (
        {name: [place] for place, name in enumerate(units)},
        np.where(rng.random(n) < 0.5, "f", "m"),
    )
    scores = {"score": fitted.score(people, target), "blind_score": 0.0}
    options = {
        "attribute_units": units,
        "groups": {"sex": sex},
        "scores": scores,
        "title": "Doses, a linear model",
    }
    return linear_run(fitted, people, target, 0.01, attributes=named, **options)


def six_reports(folder: Path) -> dict[str, Path]:
    """Written into a folder, by name."""
    (folder / "policy.toml").write_text(template())
    policy = load_policy(folder / "policy.toml")
    kinds = {"image": digits, "table": patients, "text": notes, "linear": doses}
    pages = {
        name: write_report(made(), folder / name, policy=policy) for name, made in kinds.items()
    }
    pages["compared"] = folder / "compared.html"
    pages["compared"].write_text(render_comparison(compare_runs(patients(), patients(3.5))))
    pages["public"] = write_report(patients(), folder / "public", redacted=True)
    return pages
