"""From a run to its saved form; see :mod:`torchfil.run.saved_run`."""

from __future__ import annotations

import copy
import datetime
import math
import platform
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from importlib import metadata
from typing import Any

import numpy as np
import torch
from opacus.accountants import IAccountant
from torch import Tensor

from torchfil._version import __version__
from torchfil.accounting.leakage import Leakage
from torchfil.attacks.base import AttackResult
from torchfil.attacks.comparison import BoundComparison, compare_with_bounds
from torchfil.engine.assembly import PrivateTraining
from torchfil.engine.reading import Releases, epsilon_over_time, epsilons, everybodys_robustness, rdp_bound
from torchfil.engine.saving.attributes import baselines, tracked_table
from torchfil.engine.saving.data import data_sha256, exposed_words, pixels_of_coordinates, read_spread, thumbnails
from torchfil.fisher.amplification import name_of_amplification
from torchfil.planning.calibration import NoiseChoice
from torchfil.planning.equalising import Equalised
from torchfil.run.saved_run import QuestionRecord, SavedRun
from torchfil.utils.errors import require
from torchfil.utils.noise import preserve_rng
from torchfil.utils.trees import tensors_of

Labels = Mapping[Hashable, Hashable] | Sequence[Hashable]
_PRIORS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.2, 0.3, 0.5)


def build_saved_run(
    training: PrivateTraining,
    accountant: IAccountant,
    noise_choice: NoiseChoice | None,
    leakage: Leakage,
    *,
    delta: float,
    title: str | None = None,
    unit_of_inputs: str = "",
    input_range: tuple[float, float] | None = None,
    groups: Mapping[str, Labels] | None = None,
    pictures: int = 8,
    texts: Any = None,
    attacks: Sequence[AttackResult | BoundComparison] = (),
    hash_data: bool = True,
    equalised: Equalised | None = None,
    **named: Any,
) -> SavedRun:
    """Everything about a run that a report needs; the options are those of :meth:`FILPrivacyEngine.save_run`.

    ``noise_choice`` says how pilots chose σ; None: it was given. ``leakage`` has the run's results, or their average
    over several runs. ``named`` are options of :func:`attribute_table`.
    """
    finite = input_range is None or -math.inf < input_range[0] < input_range[1] < math.inf
    require(finite, f"input_range={input_range} must be the lowest and the highest value of a coordinate, finite")
    passes, ids, d = training.passes, leakage.ids, leakage.num_coordinates
    table = tracked_table(leakage, named, with_texts=texts is not None)
    compared = [each if isinstance(each, BoundComparison) else compare_with_bounds(leakage, each) for each in attacks]
    records = [each.record(ids.all()) for each in compared]
    labels = {name: _labels(name, given, ids.all()) for name, given in (groups or {}).items()}
    columns = _columns(training, accountant, leakage, delta, equalised)

    # all of these read the data set, whose augmentation would advance the generators of a continuing run
    shown = words = None
    with preserve_rng():
        about = _about(training, accountant, leakage, delta, hash_data=hash_data)
        spread = read_spread(passes, d, thorough=hash_data)
        if table is not None and spread is not None:
            table = table.with_levels(spread.attributes)
        attributes = None if table is None else table.read(leakage, pixels_of_coordinates(passes, d))
        if pictures > 0 and passes.dataset is not None:  # a stream cannot be read again
            shown = thumbnails(training, columns, pictures)
        if texts is not None:
            words = exposed_words(training, leakage, texts, columns["fil"])

    about["title"] = title if title is not None else f"{about['model']['name']} on {ids.num_examples:,} examples"
    about["unit_of_inputs"] = unit_of_inputs
    about["noise_choice"] = None if noise_choice is None else noise_choice.summary(leakage)
    about["equalised"] = None if equalised is None else equalised.summary()
    about["dataset"]["input_range"] = [float(end) for end in input_range] if input_range is not None else None
    return SavedRun(
        about=about,
        ids=ids.as_array(),
        columns=columns,
        attributes=attributes,
        groups=labels,
        pictures=shown,
        texts=words,
        history=_history(training, accountant, leakage, delta),
        bounds=_bounds(accountant.history, d, input_range),
        attacks=records,
        questions=[_question(leakage, name) for name in leakage.ledger.questions],
        rounds={} if equalised is None else equalised.columns(),
        yardsticks=None if spread is None else baselines(spread, table),
    )


def as_average(run: SavedRun, trainings: Sequence[PrivateTraining], accountant: IAccountant, delta: float) -> SavedRun:
    """A run whose numbers are means over repetitions, without what belongs to a single one.

    The numbers are about one release, on average. An example's own ε, the course of training and the seed are left out;
    so is reconstruction robustness if batches are known, because it depends on one run's participations.

    Args:
        run: Saved from the average; everything else is that of the first run.
        trainings: All runs.
        accountant: Of the first run.
        delta: δ of the ε of all runs together (composition).
    """
    together = copy.deepcopy(accountant)
    together.history = list(accountant.history) * len(trainings)
    merged = {"runs": len(trainings), "epsilon_of_all": float(together.get_epsilon(delta))}
    kinds = [training.optimizer.noise.kind for training in trainings]
    mechanism = {**run.about["mechanism"], "noise": "seeded" if "seeded" in kinds else kinds[0]}
    known_batches = mechanism["sample_rate"] is None
    return replace(
        run,
        about={**run.about, "mechanism": mechanism, "probe_seed": None, "merged": merged},
        columns={name: values for name, values in run.columns.items() if name != "epsilon"},
        history={},
        bounds={name: bound for name, bound in run.bounds.items() if name != "rero" or not known_batches},
    )


def _labels(name: str, given: Labels, ids: Sequence[Hashable]) -> np.ndarray:
    """A grouping's labels in the order of the data set, [n]."""
    labels = [given[key] for key in ids if key in given] if isinstance(given, Mapping) else given
    fits = f"grouping {name!r} has {len(labels)} labels for {len(ids)} examples; give one for each, in order or by id"
    require(len(labels) == len(ids), fits)
    return np.asarray([str(label) for label in labels], dtype=str)


def _columns(
    training: PrivateTraining, accountant: IAccountant, leakage: Leakage, delta: float, equalised: Equalised | None
) -> dict[str, np.ndarray]:
    """Numbers by example, [n] each."""
    run, columns = training.run, leakage.arrays()
    columns["epsilon"] = epsilons(run, accountant, None, delta).value.cpu().numpy()
    if run.clip_weights is not None:
        columns["clip_weight"] = run.clip_weights.cpu().numpy()
    if equalised is not None:
        equalised.check_trained_with(run.clip_weights)
        if equalised.fil_before is not None:
            columns["fil_before"] = equalised.fil_before.double().numpy()
    return columns


def _about(
    training: PrivateTraining, accountant: IAccountant, leakage: Leakage, delta: float, *, hash_data: bool
) -> dict[str, Any]:
    passes, module = training.passes, training.replica.live
    inputs = passes.inputs([0]) if passes.dataset is not None else {}
    versions = {"torchfil": __version__, "torch": str(torch.__version__), "opacus": metadata.version("opacus")}
    shapes = [list(leaf.shape[1:]) for leaf in tensors_of(list(inputs.values()))]
    return {
        "model": {"name": type(module).__name__, "num_parameters": sum(p.numel() for p in module.parameters())},
        "dataset": {
            "num_examples": leakage.ids.num_examples,
            # the length of the longest text belongs to one example, so a redacted report must not show it
            ("num_coordinates" if leakage.ledger.same_coordinates else "most_coordinates"): leakage.num_coordinates,
            "input_shape": shapes[0] if len(shapes) == 1 else shapes or None,
            "data_sha256": data_sha256(passes.dataset) if hash_data and passes.dataset is not None else None,
        },
        "mechanism": _mechanism(training, leakage),
        "epsilon": float(accountant.get_epsilon(delta)),
        "delta": delta,
        "accountant": accountant.mechanism(),
        "versions": {**versions, "python": platform.python_version()},
        "probe_seed": training.run.generator.initial_seed(),
        "created": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "exact": leakage.conditions.exact,
    }


def _mechanism(training: PrivateTraining, leakage: Leakage) -> dict[str, Any]:
    run, optimizer, ledger = training.run, training.optimizer, leakage.ledger
    options, accounting = run.options, run.options.accounting
    parts = accounting.accumulation_steps * (1 if run.ranks is None else run.ranks.size)
    mean = optimizer.loss_reduction == "mean"
    paced = accounting.rel_error is not None  # then probes and rate change from step to step
    return {
        "noise_multiplier": float(optimizer.noise_multiplier),
        "max_grad_norm": float(optimizer.max_grad_norm),
        "clip": options.clip.name,
        "noise": optimizer.noise.kind,
        "sample_rate": options.sample_rate,
        "expected_batch_size": float(optimizer.expected_batch_size * parts) if mean else None,  # None: a sum
        "steps": ledger.steps,
        "steps_paused": ledger.missed_steps,
        "poisson": options.sample_rate is not None,
        "stream": training.passes.dataset is None,
        "amplification": name_of_amplification(options.amplification),
        "estimator": accounting.estimator,
        "num_probes": None if paced else run.pace.num_probes,
        "probe_precision": accounting.execution.probe_precision_on(next(training.replica.live.parameters()).device),
        "fil_rate": None if paced else accounting.fil_rate,
        "rel_error": accounting.rel_error,
        "loss": run.loss.name if run.loss is not None else None,
    }


def _question(leakage: Leakage, name: str) -> QuestionRecord:
    asked = leakage.ledger.questions[name]

    def divergences(part: Leakage, rows: Tensor) -> dict[str, Tensor]:
        guess = part.get_guess(name, rows)
        both = {"divergence": guess.divergence.value, "divergence_high": guess.upper(0.95).divergence.value}
        return {kind: value.reshape(len(rows), len(asked.answers)) for kind, value in both.items()}

    found = leakage.by_parts(divergences)
    return QuestionRecord(name, list(asked.answers), asked.complete, found["divergence"], found["divergence_high"])


def _history(
    training: PrivateTraining, accountant: IAccountant, leakage: Leakage, delta: float
) -> dict[str, np.ndarray]:
    """η̄ over training time, and ε."""
    ledger = leakage.ledger
    steps, points = training.run.timeline.table(ledger.steps, ledger.sums["trace"], ledger.own_coordinates)
    history = {"step": np.asarray(steps, dtype=np.int64)}
    history |= {name: points[:, j].double().numpy() for j, name in enumerate(("fil_median", "fil_q95", "fil_max"))}
    if accountant.mechanism() == "rdp" and training.run.options.sample_rate is not None:  # else it counts
        history["epsilon"] = epsilon_over_time(accountant.history, steps, delta)  # participations, not steps
    return history


def _bounds(releases: Releases, num_coordinates: int, input_range: tuple[float, float] | None) -> dict[str, Any]:
    """Theorem 1, if inputs are known to lie in a range; reconstruction robustness by success without the model."""
    bounds: dict[str, Any] = {}
    if input_range is not None:
        bounds["rdp_mse_bound"] = {"diameter": input_range[1] - input_range[0]}
        for name in ("replace-one", "paper"):
            bound = rdp_bound(releases, num_coordinates, input_range[1] - input_range[0], name)
            bounds["rdp_mse_bound"][name.replace("-", "_")] = bound
    curve = everybodys_robustness(releases, _PRIORS)
    bounds["rero"] = {"prior": list(_PRIORS), "success": curve.high.tolist(), "low": curve.low.tolist()}
    return bounds
