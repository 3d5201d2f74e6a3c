r"""Several released models together: what an attacker learns who sees all of them.

Noise is independent from release to release, so that everything adds, by id. An example that is
missing in a run was not in its data, and that release adds nothing about it.

===================  =====================================  =====================================
number               of the releases k together             who is bound
===================  =====================================  =====================================
MSE bound            1/b = Σ 1/b_k, as I = Σ I_k            attackers without prior beliefs, on
                                                            average
its lower end        of the lower ends, each at 95 %;       the same
                     one release untold: all untold
error of attributes  1/e² = Σ 1/e_k², ends likewise         the same
D of a question      D = Σ D_k, ends likewise               every attacker, as in each run
ε at δ               Σ ε_k at Σ δ_k, or what Rényi          every attacker; everybody
                     divergences give
individual ε         Σ ε_k at Σ δ_k, an estimate            every attacker; nothing is guaranteed
===================  =====================================  =====================================

The Rényi divergences D_α of releases add, too. Where every file tells its mechanism (σ, q and
steps, which account for the ε of Opacus's RDP accountant), ε follows from their sum at the largest
δ_k, and counts if it is not above Σ ε_k.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from torchfil.accounting.persons import person_rdp
from torchfil.run.baselines import is_told
from torchfil.run.matching import check_alike, names_of, setting
from torchfil.run.saved_run import ByExample, QuestionRecord, SavedRun
from torchfil.run.unit import Facts

_COLUMNS = ("fil", "mse_bound", "mse_bound_low", "participations", "missed", "epsilon")
_DIVERGENCES = ("divergence", "divergence_high")
# that add; others: 1
_POWERS = {"fil": 2, "mse_bound": -1, "mse_bound_low": -1, "error": -2, "error_low": -2}
_ORDERS = np.concatenate([np.arange(11, 110) / 10, np.arange(12, 64)])  # Opacus's own


def rdp_of(run: SavedRun, sigma: float) -> np.ndarray:
    """Rényi divergences at the orders of Opacus's accountant of a training like the run with this
    σ, [151].

    Where batches are known, q = 1 and the most frequent example's participations count.

    Args:
        run: Whose sampling rate and steps are known.
        sigma: σ.
    """
    rate, count = run.about["mechanism"].get("sample_rate"), run.about["mechanism"]["steps"]
    if rate is None:
        rate, count = 1.0, int(np.max(run.columns.get("participations", 0), initial=0))
    return count * person_rdp(1, rate, sigma, tuple(_ORDERS.tolist()))


def epsilon_at(rdp: np.ndarray, delta: float) -> float:
    """ε of Rényi divergences, by Balle et al. (2020), Theorem 21."""
    epsilon = rdp + np.log1p(-1 / _ORDERS) - (np.log(delta) + np.log(_ORDERS)) / (_ORDERS - 1)
    return max(float(epsilon.min()), 0.0)  # in this order, NaN stays NaN


def compose(runs: Sequence[SavedRun]) -> SavedRun:
    """All releases as one run, which every rule of a gate can judge.

    See the module for each number.

    Ids must mean the same people in all runs. Texts, records, other columns and the course of
    training are left out. Of all together is not known: a question that a run did not ask (D =
    NaN), attributes that one did not track, and, where the first run has not everybody, groups and
    what a blind guess errs by.

    Args:
        runs: Two or more, of the same private inputs.

    Raises:
        ValueError: The runs share no ids, have an id twice, or speak of other inputs.

    Example:
        >>> columns = {"fil": np.array([1.0, 2.0]), "mse_bound": np.array([1.0, 0.25])}
        >>> run = SavedRun(about={}, ids=np.arange(2), columns=columns)
        >>> compose([run, run]).columns["mse_bound"].tolist()
        [0.5, 0.125]
    """
    first, names = runs[0], names_of(runs)
    for run, own in zip(runs[1:], names[1:], strict=True):
        _check_adds(first, run)
        if not len(np.intersect1d(own, names[0])) > 0:
            raise ValueError(
                "a released run shares no ids with the first; give runs whose ids mean the same "
                "people"
            )

    # the first run's examples stay where they are; those of others come behind them
    everyone, first_at = np.unique(np.concatenate(names), return_index=True)
    ids = np.concatenate([names[0], everyone[first_at >= len(first)]])
    order, everybody = np.argsort(ids), len(ids) == len(first)
    places = [order[np.searchsorted(ids, own, sorter=order)] for own in names]
    total = _added(runs, places, len(ids))

    # what does not add
    columns = {key: total[key] for key in total if isinstance(key, str)} | {
        "clip_weight": np.ones(len(ids))
    }
    for run, place in zip(runs, places, strict=True):
        np.minimum.at(columns["clip_weight"], place, run.clip_weights)
    if everybody and "public_class" in first.columns:
        columns["public_class"] = first.columns["public_class"]
    tracked = {
        key[-1]: values for key, values in total.items() if key[-1] in ("error", "error_low")
    }
    attributes = first.attributes if tracked else None
    if attributes is not None:
        attributes = replace(attributes, error=tracked["error"], error_low=tracked.get("error_low"))
    return SavedRun(
        about=_about(runs),
        ids=ids,
        columns=columns,
        attributes=attributes,
        groups={name: np.asarray(labels) for name, labels in first.groups.items()}
        if everybody
        else {},
        attacks=[
            replace(each, rows=place[each.rows])
            for run, place in zip(runs, places, strict=True)
            for each in run.attacks
        ],
        questions=_questions(runs, total, len(ids)),
        baselines=first.baselines
        if everybody and (attributes is None) == (first.attributes is None)
        else None,
    )


def _check_adds(first: SavedRun, run: SavedRun) -> None:
    """Both speak of the same inputs, with the same d of η̄² = tr(I)/d."""
    check_alike(first, run)
    for name in ("dataset.num_coordinates", "dataset.most_coordinates"):
        one, other = setting(first, name), setting(run, name)
        if one != other:
            raise ValueError(
                f"{name} is {one} and {other}, so that nothing adds; leave the other run out"
            )


Key = str | tuple[str, ...]  # of a column; of errors of attributes, or of divergences of answers


def _added(
    runs: Sequence[SavedRun], places: Sequence[np.ndarray], count: int
) -> dict[Key, np.ndarray]:
    """What every run tells, of all together.

    Each run's examples stand at its places among ``count``.
    """
    parts, total = [_parts(run) for run in runs], dict[Key, np.ndarray]()
    with np.errstate(divide="ignore"):
        for key in (key for key in parts[0] if all(key in part for part in parts)):
            power = _POWERS.get(key, 1) if isinstance(key, str) else _POWERS.get(key[-1], 1)
            total[key] = np.zeros((count, *parts[0][key].shape[1:]))
            for place, part in zip(places, parts, strict=True):
                total[key][place] += np.asarray(part[key], dtype=np.float64) ** power
            total[key] **= 1 / power
    return total


def _questions(
    runs: Sequence[SavedRun], total: Mapping[Key, np.ndarray], count: int
) -> list[QuestionRecord]:
    """Every question that was asked in a run; D is not known where another run did not ask it."""
    found = []
    for asked in {each.name: each for run in runs for each in run.questions}.values():
        unknown = np.full((count, len(asked.answers)), np.nan)
        exact, high = (
            total.get((asked.name, asked.law, *asked.answers, part), unknown)
            for part in _DIVERGENCES
        )
        found.append(replace(asked, divergence=exact, divergence_high=high))
    return found


def _parts(run: SavedRun) -> dict[Key, ByExample]:
    """What adds, to the power that :data:`_POWERS` tells, by what it is about: columns, attributes,
    answers.
    """
    parts: dict[Key, ByExample] = {
        name: run.columns[name] for name in _COLUMNS if name in run.columns
    }
    if "missed" in parts:
        parts["paused"] = run.columns.get("paused", np.zeros(len(run)))
    if "mse_bound_low" in parts:
        parts["mse_bound_low"] = np.where(is_told(run), parts["mse_bound_low"], 0.0)
    if (of := run.attributes) is not None:
        parts |= {(*of.names, *of.units, "error"): of.error}
        parts |= {} if of.error_low is None else {(*of.names, *of.units, "error_low"): of.error_low}
    for each in run.questions:
        parts |= {
            (each.name, each.law, *each.answers, part): getattr(each, part) for part in _DIVERGENCES
        }
    return parts


def _about(runs: Sequence[SavedRun]) -> Facts:
    """The facts that rules read, of all releases together."""
    epsilon, delta, how = _epsilon(runs)
    noises, ranges, jumps = (
        [setting(run, name) for run in runs]
        for name in ("mechanism.noise", "dataset.input_range", "model.not_smooth")
    )
    audits = [run.about["audit"] for run in runs if run.about.get("audit")]
    # the worst first
    audits.sort(key=lambda audit: (not audit["exceeds_claim"], audit["claimed"] - audit["epsilon"]))
    speaks = bool(audits) and (audits[0]["exceeds_claim"] or len(audits) == len(runs))
    return {
        "title": " + ".join(str(run.about.get("title", "a saved run")) for run in runs),
        "kind": "linear" * all(run.about.get("kind") == "linear" for run in runs),
        "model": {"not_smooth": list(dict.fromkeys(name for own in jumps for name in own or []))},
        "dataset": {
            "input_range": ranges[0] if all(each == ranges[0] for each in ranges) else None
        },
        "mechanism": {
            "unit": setting(runs[0], "mechanism.unit"),
            "unit_names": setting(runs[0], "mechanism.unit_names"),
            "noise": "seeded" if "seeded" in noises else noises[0],
        },
        "unit_of_inputs": runs[0].about.get("unit_of_inputs", ""),
        "epsilon": epsilon,
        "delta": delta,
        "accountant": how,
        "audit": audits[0] if speaks else None,
        "released": {"runs": len(runs), "epsilon": how},
    }


def _epsilon(runs: Sequence[SavedRun]) -> tuple[float | None, float | None, str]:
    """ε and δ of all, and how they were composed."""
    own: list[Any] = [(run.about.get("epsilon"), run.about.get("delta")) for run in runs]
    if any(None in pair for pair in own):
        return None, None, "none: a release has no ε"
    epsilon, delta = (float(sum(values)) for values in zip(*own, strict=True))
    plain = epsilon, delta, "sum of ε and of δ"
    rdp = np.zeros(len(_ORDERS))
    for run, (spent, at) in zip(runs, own, strict=True):
        sigma, steps = (setting(run, f"mechanism.{name}") for name in ("noise_multiplier", "steps"))
        if not (sigma and sigma > 0.05 and steps and at and run.about.get("accountant") == "rdp"):
            return plain
        one = rdp_of(run, sigma)
        if epsilon_at(one, at) < (1 - 1e-6) * spent:
            return plain  # its noise was not the same at all steps
        rdp += one
    largest = max(at for _, at in own)
    tight = epsilon_at(rdp, largest)
    return (tight, largest, "sum of Rényi divergences") if tight <= epsilon else plain
