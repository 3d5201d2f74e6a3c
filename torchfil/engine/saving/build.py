"""From a run to its saved form; see :mod:`torchfil.run.saved_run`."""

from __future__ import annotations

import copy
import datetime
import inspect
import math
import platform
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
from torchfil.engine import reading
from torchfil.engine.assembly import DatasetPasses, PrivateTraining
from torchfil.engine.reading import Releases
from torchfil.engine.saving.attributes import attribute_table, baselines, tracked_table
from torchfil.engine.saving.data import are_pixels, data_sha256, exposed_words, read_blind_guess
from torchfil.fisher.amplification import name_of_amplification
from torchfil.planning.calibration import NoiseChoice
from torchfil.planning.equalising import Equalised
from torchfil.run.blind_guess import BlindGuess
from torchfil.run.saved_run import AttackRecord, QuestionRecord, SavedRun, checked_metrics
from torchfil.run.unit import counted, unit_of
from torchfil.utils.noise import preserve_rng
from torchfil.utils.text import nearest
from torchfil.utils.trees import tensors_of

Labels = Mapping[Hashable, Hashable] | Sequence[Hashable]
_PRIORS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.2, 0.3, 0.5)


@dataclass
class Kept:
    """What the saves of a run read from the data set once: its checksum, and the blind guess by
    d.
    """

    checksum: str | None = None
    blind: dict[int, BlindGuess | None] = field(default_factory=dict)


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
    records: bool = True,
    texts: object = None,
    attacks: Sequence[AttackResult | BoundComparison] = (),
    hash_data: bool = True,
    equalised: Equalised | None = None,
    metrics: Mapping[str, object] | None = None,
    audit: Mapping[str, object] | None = None,
    kept: Kept | None = None,
    **named: Any,
) -> SavedRun:
    """Everything about a run that a report needs.

    The options are those of :meth:`FILPrivacyEngine.save_run`.

    ``noise_choice`` says how pilots chose σ; None: it was given. ``leakage`` has the run's results,
    or their average over several runs. ``audit`` is what canaries showed, as JSON values. ``kept``
    keeps what was read from the data set until the next save of the run; None: it is read again.
    ``named`` are options of :func:`attribute_table`.
    """
    kept = kept or Kept()
    utility = checked_metrics(metrics)
    _check_range(input_range)
    passes, ids, d = training.passes, leakage.ids, leakage.num_coordinates
    table = tracked_table(training, leakage, named, with_texts=texts is not None)
    attacked, labels = _attack_records(leakage, attacks), _labels(groups or {}, ids.all())
    columns = _columns(training, accountant, leakage, delta, equalised)

    # all of these read the data set, whose augmentation would advance the generators of a
    # continuing run
    words = people = None
    with preserve_rng():
        checksum, blind = _read_once(passes, d, kept, thorough=hash_data)
        about = _about(training, accountant, leakage, delta, checksum)
        if blind is not None:
            columns |= blind.column
            if table is not None:
                table = table.with_levels(blind.everybody.pooled(table.places).spread)
        attributes = None if table is None else table.read(leakage)
        if table is not None and table.names == table.coordinates and are_pixels(passes, d):
            records = False
        if records and table is not None and blind is not None:  # a stream cannot be read again
            people = table.records(leakage, passes, columns)
        if texts is not None:
            words = exposed_words(training, leakage, texts, columns["fil"])

    data = counted(ids.num_examples, unit_of(about["mechanism"]).one)
    about["title"] = title if title is not None else f"{about['model']['name']} on {data}"
    about["unit_of_inputs"] = unit_of_inputs
    about["noise_choice"] = None if noise_choice is None else noise_choice.summary(leakage)
    about["metrics"] = utility
    about["audit"] = audit
    about["equalised"] = None if equalised is None else equalised.summary()
    about["dataset"]["input_range"] = None if input_range is None else list(map(float, input_range))
    return SavedRun(
        about=about,
        ids=ids.as_array(),
        columns=columns,
        attributes=attributes,
        groups=labels,
        records=people,
        texts=words,
        history=_history(training, accountant, leakage, delta),
        bounds=_bounds(accountant.history, input_range),
        attacks=attacked,
        questions=[_question(leakage, name) for name in leakage.ledger.questions],
        rounds={} if equalised is None else equalised.columns(),
        baselines=None if blind is None else baselines(blind, table),
    )


def _check_range(input_range: tuple[float, float] | None) -> None:
    if input_range is not None and not -math.inf < input_range[0] < input_range[1] < math.inf:
        raise ValueError(
            f"input_range={input_range} must be the lowest and the highest value of a coordinate, "
            "finite"
        )


def check_options(options: Mapping[str, object]) -> None:
    """Raise a TypeError for an option that ``save_run`` does not have."""
    known = {
        name
        for each in (build_saved_run, attribute_table)
        for name in inspect.signature(each).parameters
    }
    for name in options.keys() - known:
        raise TypeError(f"Unknown option {name!r} of save_run{nearest(name, sorted(known))}")


def as_average(
    run: SavedRun, trainings: Sequence[PrivateTraining], accountant: IAccountant, delta: float
) -> SavedRun:
    """A run whose numbers are means over repetitions, without what belongs to a single one.

    The numbers are about one release, on average. An example's own ε, the course of training, the
    seed and an audit are left out; so is reconstruction robustness if batches are known, because it
    depends on one run's participations.

    Args:
        run: Saved from the average; everything else is that of the first run.
        trainings: All runs.
        accountant: Of the first run.
        delta: δ of the ε of all runs together (composition).
    """
    together = copy.deepcopy(accountant)
    together.history = list(accountant.history) * len(trainings)
    merged = {"runs": len(trainings), "epsilon_of_all": reading.spent_epsilon(together, delta)}
    kinds = [training.optimizer.noise.kind for training in trainings]
    mechanism = {**run.about["mechanism"], "noise": "seeded" if "seeded" in kinds else kinds[0]}
    known_batches = mechanism["sample_rate"] is None
    return replace(
        run,
        about={
            **run.about,
            "mechanism": mechanism,
            "probe_seed": None,
            "audit": None,
            "merged": merged,
        },
        columns={name: values for name, values in run.columns.items() if name != "epsilon"},
        history={},
        bounds={
            name: bound for name, bound in run.bounds.items() if name != "rero" or not known_batches
        },
    )


def _read_once(
    passes: DatasetPasses, d: int, kept: Kept, *, thorough: bool
) -> tuple[str | None, BlindGuess | None]:
    """The data's checksum and the blind guess, unless an earlier save of the run has read them."""
    if thorough and passes.dataset is not None and kept.checksum is None:
        kept.checksum = data_sha256(passes.dataset)
    if d not in kept.blind:
        kept.blind[d] = read_blind_guess(passes, d, thorough=thorough)
    return kept.checksum, kept.blind[d]


def _attack_records(
    leakage: Leakage, attacks: Sequence[AttackResult | BoundComparison]
) -> list[AttackRecord]:
    """What attacks reached beside the bounds; a comparison with other bounds is kept as it is."""
    compared = [
        each if isinstance(each, BoundComparison) else compare_with_bounds(leakage, each)
        for each in attacks
    ]
    return [each.record(leakage.ids.all()) for each in compared]


def _labels(groups: Mapping[str, Labels], ids: Sequence[Hashable]) -> dict[str, np.ndarray]:
    """Each grouping's labels in the order of the data set, [n]."""
    found = {}
    for name, given in groups.items():
        labels = (
            [given[key] for key in ids if key in given] if isinstance(given, Mapping) else given
        )
        if len(labels) != len(ids):
            raise ValueError(
                f"grouping {name!r} has {len(labels)} labels for {len(ids)} examples; "
                "give one for each, in order or by id"
            )
        found[name] = np.asarray([str(label) for label in labels], dtype=str)
    return found


def _columns(
    training: PrivateTraining,
    accountant: IAccountant,
    leakage: Leakage,
    delta: float,
    equalised: Equalised | None,
) -> dict[str, np.ndarray]:
    """Numbers by example, [n] each."""
    run, columns, owners = training.run, leakage.arrays(), training.run.owners
    if not columns["paused"].any():
        del columns["paused"]
    if owners is not None and run.options.accounting.by_owner:
        columns["num_rows"] = owners.counts.numpy()
    columns["epsilon"] = reading.epsilons(run, accountant, None, delta).value.cpu().numpy()
    if run.clip_weights is not None:
        columns["clip_weight"] = run.clip_weights.cpu().numpy()
    if equalised is not None:
        equalised.check_trained_with(run.clip_weights)
        if equalised.fil_before is not None:
            columns["fil_before"] = equalised.fil_before.double().numpy()
    return columns


def _about(
    training: PrivateTraining,
    accountant: IAccountant,
    leakage: Leakage,
    delta: float,
    data_sha256: str | None,
) -> dict[str, Any]:
    passes, module = training.passes, training.replica.live
    same = leakage.ledger.same_coordinates and not training.run.options.accounting.by_owner
    inputs = passes.inputs([0]) if passes.dataset is not None else {}
    versions = {
        "torchfil": __version__,
        "torch": str(torch.__version__),
        "opacus": metadata.version("opacus"),
    }
    shapes = [list(leaf.shape[1:]) for leaf in tensors_of(list(inputs.values()))]
    return {
        "model": {
            "name": type(module).__name__,
            "num_parameters": sum(p.numel() for p in module.parameters()),
            "not_smooth": training.run.not_smooth,
        },
        "dataset": {
            "num_examples": leakage.ids.num_examples,
            # the longest text, or the most rows, belong to one example, so a redacted report must
            # not show it
            ("num_coordinates" if same else "most_coordinates"): leakage.num_coordinates,
            "input_shape": shapes[0] if len(shapes) == 1 else shapes or None,
            "data_sha256": data_sha256,
        },
        "mechanism": _mechanism(training, leakage),
        "epsilon": reading.spent_epsilon(accountant, delta),
        "delta": delta,
        "accountant": accountant.mechanism(),
        "versions": {**versions, "python": platform.python_version()},
        "probe_seed": training.run.seed,
        "created": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "exact": leakage.conditions.exact,
    }


def _mechanism(training: PrivateTraining, leakage: Leakage) -> dict[str, object]:
    run, optimizer, ledger = training.run, training.optimizer, leakage.ledger
    options, accounting = run.options, run.options.accounting
    parts = accounting.accumulation_steps * (1 if run.ranks is None else run.ranks.size)
    mean = optimizer.loss_reduction == "mean"
    planned = run.pace.is_planned  # then probes and rate change from step to step

    # what a reader needs to judge the numbers, and to predict other noise or steps
    return {
        "noise_multiplier": float(optimizer.noise_multiplier),
        "noise_multiplier_default": options.default_noise,
        "max_grad_norm": float(optimizer.max_grad_norm),
        "clip": options.clip.name,
        "noise": optimizer.noise.kind,
        "sample_rate": options.sample_rate,
        # None: a sum
        "expected_batch_size": float(optimizer.expected_batch_size * parts) if mean else None,
        "steps": ledger.steps,
        "steps_paused": ledger.missed_steps,
        "unit": "example" if accounting.owner_of is None else accounting.unit,
        **{
            name: getattr(accounting, name)
            for name in ("unit_names", "row_reduction", "rows_per_owner")
        },
        "poisson": options.sample_rate is not None,
        "stream": training.passes.dataset is None,
        "amplification": name_of_amplification(options.amplification),
        "estimator": accounting.estimator,
        "num_probes": None if planned else run.pace.num_probes,
        "probe_precision": accounting.execution.probe_precision_on(
            next(training.replica.live.parameters()).device
        ),
        "fil_rate": None if planned else accounting.fil_rate,
        "rel_error": accounting.rel_error,
        "loss": run.loss.name if run.loss is not None else None,
    }


def _question(leakage: Leakage, name: str) -> QuestionRecord:
    asked = leakage.ledger.questions[name]

    def divergences(part: Leakage, rows: Tensor) -> dict[str, Tensor]:
        guess = part.get_guess(name, rows)
        high = guess.upper(0.95).divergence.value
        both = {
            "divergence": guess.divergence.value.clamp(0, guess.largest),
            "divergence_high": high,
        }
        return {kind: value.reshape(len(rows), len(asked.answers)) for kind, value in both.items()}

    found = leakage.by_parts(divergences)
    answers, both = list(asked.answers), (found["divergence"], found["divergence_high"])
    return QuestionRecord(name, answers, asked.complete, *both, membership=asked.membership)


def _history(
    training: PrivateTraining, accountant: IAccountant, leakage: Leakage, delta: float
) -> dict[str, np.ndarray]:
    """η̄ over training time, and ε."""
    ledger = leakage.ledger
    steps, points = training.run.timeline.table(
        ledger.steps, ledger.traces(), ledger.own_coordinates
    )
    history = {"step": np.asarray(steps, dtype=np.int64)}
    history |= {
        name: points[:, j].double().numpy()
        for j, name in enumerate(("fil_median", "fil_q95", "fil_max"))
    }
    # else it counts
    if accountant.mechanism() == "rdp" and training.run.options.sample_rate is not None:
        # participations, not steps
        history["epsilon"] = reading.epsilon_over_time(accountant.history, steps, delta)
    return history


def _bounds(
    releases: Releases, input_range: tuple[float, float] | None
) -> dict[str, dict[str, object]]:
    """Theorem 1, if inputs are known to lie in a range.

    Reconstruction robustness by success without the model.
    """
    bounds: dict[str, dict[str, object]] = {}
    if input_range is not None:
        diameter, names = (
            input_range[1] - input_range[0],
            {"replace_one": "replace-one", "paper": "paper"},
        )
        # whatever d is
        found = {key: reading.rdp_bound(releases, 1, diameter, name) for key, name in names.items()}
        bounds["rdp_mse_bound"] = {"diameter": diameter, **found}
    curve = reading.everybodys_robustness(releases, _PRIORS)
    bounds["rero"] = {
        "prior": list(_PRIORS),
        "success": curve.high.tolist(),
        "low": curve.low.tolist(),
    }
    return bounds
