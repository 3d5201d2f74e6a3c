"""Runs for the first screen: four kinds, safe and not; and ten with the answers that a reader must find."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from msgspec.structs import replace
from scipy.special import ndtri

from tests.report.run_cases import made_up
from torchfil.gate.policy import Policy
from torchfil.glm import LinearRegression
from torchfil.run.linear_run import linear_run
from torchfil.run.saved_run import Attributes, Baselines, Pictures, QuestionRecord, SavedRun, Spread, Texts

N = 200
TOO_FEW = "max_share_too_few_draws"  # the gate's limit for examples of which too few draws tell nothing
KINDS = ("image", "table", "text", "linear")
POLICY = Policy(min_error_share=0.5, max_share_exposed=0.05, max_share_too_few_draws=0.01)
WHOLE = replace(POLICY, min_attribute_error_share=0.5, max_gain_over_guessing=0.1)


def bare(title: str, bound: np.ndarray | float, **changes: Any) -> SavedRun:
    """Inputs between 0 and 1, so that a blind guess has a squared error of 0.25; nothing asked, tracked or attacked."""
    bounds = np.broadcast_to(np.asarray(bound, dtype=np.float64), N).copy()
    run = made_up(N, text_ids=True, attacks=[], questions=[], groups={}, attributes=None, pictures=None, texts=None)
    columns = {
        "fil": bounds**-0.5,
        "mse_bound": bounds,
        "mse_bound_low": 0.9 * bounds,
        "participations": np.full(N, 20),
        "missed": np.zeros(N, dtype=np.int64),
    }
    about = run.about | {"title": title, "dataset": {"num_examples": N, "input_range": [0.0, 1.0]}}
    about = {key: value for key, value in about.items() if key not in ("noise_choice", "equalised")}
    return dataclasses.replace(run, **{"about": about, "columns": columns, "rounds": {}, "history": {}, **changes})


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
    """An image, table, text or linear run; if not safe, three examples are known to half of a blind guess's error."""
    rng, bound = np.random.default_rng(3), 2.0 if safe else some(2.0, 0.01, [3, 4, 5])
    if kind == "image":
        images = rng.integers(256, size=(6, 8, 8), dtype=np.uint8)
        return bare("X-rays", bound, pictures=Pictures(np.arange(6), images, rng.normal(size=(6, 8, 8)).astype("f4")))
    if kind == "table":
        asked = [question("genotype", some(0.001, 0.001 if safe else 0.5, [3, 4]))]
        groups = {"sex": np.where(np.arange(N) % 2, "f", "m"), "site": np.where(np.arange(N) < 80, "A", "B")}
        return bare("Doses", bound, attributes=attributes(np.full(N, 2.0)), questions=asked, groups=groups)
    if kind == "text":
        words = [["patient", "has", "gout"], ["patient", "has", "a", "cold"]]
        eta = np.asarray([[0.1, 0.1, 0.6, np.nan], [0.1, 0.1, 0.2, 0.3]], "f4")
        return bare("Notes", bound, texts=Texts(np.arange(2), words, eta))
    return linear(0.3 if safe else 0.05)


def linear(sigma: float) -> SavedRun:
    """A least-squares fit to people of whom three have a far larger dose than all others, released with noise."""
    rng = np.random.default_rng(3)
    people = rng.normal(size=(N, 3))
    doses = people @ [1.0, -1.0, 0.5] + rng.normal(size=N)
    doses[[3, 4, 5]] += 40
    fitted = LinearRegression(l2=0.01, fit_intercept=True).fit(people, doses)
    named = {"age": [0], "weight": [1], "height": [2]}
    ids = [f"Zoë {i}" for i in range(N)]
    return linear_run(fitted, people, doses, sigma, attributes=named, ids=ids, title="A linear model")


# ------------------------------------------------- ten runs, with the answers that an officer must find in a minute


@dataclasses.dataclass(frozen=True)
class Answers:
    """What the first screen has to say of a prepared run, written by hand before anybody looked at a page.

    Numbers are texts as a reader sees them, of three digits at most. The words around them are the page's own
    (:mod:`tests.report.one_minute` knows them).

    Attributes:
        release: "May be released", "Do not release" or "Cannot tell yet". Do not: a rule is broken by a number. Cannot
            tell: rules fail only because too little was drawn.
        why: The broken rules: (key, attribute, question or grouping, found, limit).
        who: How many examples are protected only to half a blind guess's error or less, to less than a blind guess's
            error, and beyond it, and about how many too few draws tell nothing.
        most: The id of the most exposed example of which something is known.
        leaks: Questions: (name, success without the model, at most with it).
        attributes: Attributes that are not protected: (name, how close, a blind guess's error, unit).
        change: ("noise", σ that keeps every rule), ("nothing",), ("draws",), or ("groups",): no noise makes them alike.
    """

    release: str
    why: tuple[tuple[str, str, str, str], ...]
    who: tuple[int, int, int, int]
    most: str
    leaks: tuple[tuple[str, str, str], ...] = ()
    attributes: tuple[tuple[str, str, str, str], ...] = ()
    change: tuple[str, ...] = ("nothing",)


def graded(title: str, shares: dict[int, float], rest: float = 3.0, **changes: Any) -> SavedRun:
    """Lower ends at these shares of a blind guess's error, which is 0.5; of all others at ``rest``."""
    low = np.full(N, rest)
    low[list(shares)] = list(shares.values())
    return bare(title, (0.5 * low) ** 2 / 0.9, **changes)


def told_apart(
    name: str, total_variation: float, places: slice, answers: tuple[str, ...] = ("absent",)
) -> QuestionRecord:
    """Some are told with success 1/2 + TV/2, by D = 2 TV²; the others with 50.1 %. Two answers are equally common."""
    divergence = np.full((N, 1), 2 * 0.002**2)
    divergence[places] = 2 * total_variation**2
    if len(answers) == 2:
        divergence = divergence * (np.arange(2) != np.arange(N)[:, None] % 2)  # the true one has D = 0
    return QuestionRecord(name, list(answers), len(answers) == 2, divergence, divergence)


def of_patients(shares: dict[int, float]) -> dict[str, Any]:
    """Ages and weights, known to these shares of a blind guess's 12 years and, of all, to three times its 20 kg."""
    error = np.tile([36.0, 60.0], (N, 1))
    error[list(shares), 0] = 12 * np.asarray(list(shares.values()))
    spread = Spread(*map(np.asarray, ([50.0, 75.0], [12.0, 20.0], [18.0, 40.0], [95.0, 150.0])))
    table = Attributes(["age", "weight"], ["years", "kg"], 1.2 * error, error)
    guess = "the mean of its label", np.asarray([0.5]), spread.std[None]
    return {"attributes": table, "baselines": Baselines(spread, {}, *guess)}


def _images(rows: list[int]) -> Pictures:
    rng = np.random.default_rng(3)
    images = rng.integers(256, size=(len(rows), 8, 8), dtype=np.uint8)
    return Pictures(np.asarray(rows), images, rng.normal(size=images.shape).astype("f4"))


def _notes(rows: list[int]) -> Texts:
    words = [["patient", "has", "gout"], ["patient", "has", "a", "cold"], ["no", "finding"]][: len(rows)]
    return Texts(np.asarray(rows), words, np.linspace(0.1, 0.6, 4 * len(rows)).reshape(-1, 4).astype("f4"))


def _linear(sigma: float, shares: dict[int, float], success: float) -> SavedRun:
    """A linear model's release, which has no draws: lower ends are bounds, in deviations, and laws are normal."""
    run, low = linear(sigma), np.full(N, 4.0)
    low[list(shares)] = list(shares.values())
    columns = {"fil": 1 / low, "mse_bound": low**2, "mse_bound_low": low**2, "missed": np.zeros(N, dtype=np.int64)}
    errors = 3 * np.tile(run.baselines.attributes.std, (N, 1))
    asked = np.full((N, 1), 2 * ndtri(success) ** 2)
    scores = {"score": 0.62, "released_score": 0.6, "blind_score": 0.0}
    return dataclasses.replace(
        run,
        about=run.about | {"linear": run.about["linear"] | scores},
        columns=columns,
        attributes=dataclasses.replace(run.attributes, error=errors, error_low=errors),
        questions=[QuestionRecord("smoker", ["no"], False, asked, asked, law="normal")],
    )


def _rarely_drawn() -> SavedRun:
    """Half of the examples were drawn four times at most, so that their lower ends are 0, however large the bound."""
    asked = told_apart("member", 0.02, slice(None))
    run = graded("Doses, few steps", {120: 2.0}, rest=5.0, questions=[asked], **of_patients({}))
    rare = np.arange(N) < N // 2
    columns = dict(run.columns)
    columns["participations"] = np.where(rare, 1 + np.arange(N) % 4, 20)
    columns["mse_bound"] = np.where(rare, 10.8**2, columns["mse_bound"])
    columns["mse_bound_low"] = np.where(rare, 0.0, columns["mse_bound_low"])
    columns["fil"] = columns["mse_bound"] ** -0.5
    return dataclasses.replace(run, columns=columns)


MEMBER = ("member", "50 %", "51 %")
ASKED = replace(POLICY, max_gain_over_guessing=0.1)


def ten_runs() -> dict[str, tuple[SavedRun, Policy, Answers]]:
    """By name, a run, the policy that it is held against, and the answers."""
    member = told_apart("member", 0.02, slice(None))
    wards = np.where(np.arange(N) < 100, "A", "B")
    by_ward = dict.fromkeys(range(100), 2.0) | {9: 0.25, 10: 0.45, 11: 0.45}
    merged = graded("X-rays, three runs", {23: 1.25}, questions=[member], pictures=_images([23, 0]))
    merged.about["merged"] = {"runs": 3, "epsilon_of_all": 4.1}
    close = {17: 0.2, 40: 0.4, 41: 0.45} | dict.fromkeys(range(50, 59), 0.8)
    genotype = ("CC", "CT")
    return {
        "image, not safe": (
            graded("X-rays", close, questions=[member], pictures=_images([17, 40, 41, 50, 0])),
            ASKED,
            Answers(
                "Do not release",
                (("min_error_share", "", "0.2", "0.5"), ("max_share_exposed", "", "6 %", "5 %")),
                (3, 9, 188, 0),
                "Zoë 17",
                (MEMBER,),
                change=("noise", "3.75"),
            ),
        ),
        "image, safe, merged": (merged, ASKED, Answers("May be released", (), (0, 0, 200, 0), "Zoë 23", (MEMBER,))),
        "table, not safe": (
            graded(
                "Doses",
                {88: 0.3, 3: 0.35} | dict.fromkeys(range(100, 106), 0.9),
                questions=[told_apart("genotype", 0.4, slice(80, 92), genotype), member],
                **of_patients({}),
            ),
            ASKED,
            Answers(
                "Do not release",
                (("min_error_share", "", "0.3", "0.5"), ("max_gain_over_guessing", "genotype", "70 %", "60 %")),
                (2, 6, 192, 0),
                "Zoë 88",
                (("genotype", "50 %", "70 %"), MEMBER),
                change=("noise", "3"),
            ),
        ),
        "table, safe, policy kept": (
            graded("Doses", {61: 1.1}, questions=[told_apart("genotype", 0.12, slice(8), genotype)], **of_patients({})),
            WHOLE,
            Answers("May be released", (), (0, 0, 200, 0), "Zoë 61", (("genotype", "50 %", "56 %"),)),
        ),
        "table, one attribute leaks": (
            graded(
                "Doses", {140: 1.2}, questions=[member], **of_patients({140: 0.35} | dict.fromkeys(range(30, 36), 0.4))
            ),
            WHOLE,
            Answers(
                "Do not release",
                (("min_attribute_error_share", "age", "0.35", "0.5"),),
                (0, 0, 200, 0),
                "Zoë 140",
                (MEMBER,),
                (("age", "4.2", "12", "years"),),
                ("noise", "2.15"),
            ),
        ),
        "text, not safe, unequal groups": (
            graded("Notes", by_ward, rest=6.0, questions=[member], groups={"ward": wards}, texts=_notes([9, 10, 0])),
            replace(ASKED, max_group_disparity=2.0),
            Answers(
                "Do not release",
                (("min_error_share", "", "0.25", "0.5"), ("max_group_disparity", "ward", "3.16", "2")),
                (3, 0, 197, 0),
                "Zoë 9",
                (MEMBER,),
                change=("groups",),
            ),
        ),
        "text, safe, no question": (
            graded("Notes", {30: 0.7, 31: 0.9, 32: 0.9, 33: 0.9}, texts=_notes([30, 31])),
            POLICY,
            Answers("May be released", (), (0, 4, 196, 0), "Zoë 30"),
        ),
        "linear, not safe": (
            _linear(0.05, {5: 0.2, 6: 0.6}, 0.7),
            ASKED,
            Answers(
                "Do not release",
                (("min_error_share", "", "0.203", "0.5"), ("max_gain_over_guessing", "smoker", "70 %", "60 %")),
                (1, 1, 198, 0),
                "Zoë 5",
                (("smoker", "50 %", "70 %"),),
                change=("noise", "0.124"),
            ),
        ),
        "linear, safe": (
            _linear(0.3, {77: 1.5}, 0.52),
            ASKED,
            Answers("May be released", (), (0, 0, 200, 0), "Zoë 77", (("smoker", "50 %", "52 %"),)),
        ),
        "too few draws": (
            _rarely_drawn(),
            ASKED,
            Answers(
                "Cannot tell yet",
                ((TOO_FEW, "", "50 %", "1 %"),),
                (0, 0, 100, 100),
                "Zoë 120",
                (MEMBER,),
                change=("draws",),
            ),
        ),
    }
