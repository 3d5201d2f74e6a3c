"""From a run to its saved form; see :mod:`torchfil.report.saved_run`."""

from __future__ import annotations

import datetime
import math
import platform
from collections.abc import Hashable, Mapping, Sequence
from importlib import metadata
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchfil._version import __version__
from torchfil.accounting.divergences import Divergence
from torchfil.accounting.leakage import Leakage
from torchfil.attacks.base import AttackResult
from torchfil.attacks.comparison import BoundComparison, compare_with_bounds
from torchfil.engine.augmentation import generators_kept
from torchfil.engine.epsilon import epsilon_over_time
from torchfil.engine.robustness import everybodys_robustness
from torchfil.engine.saving.attribute_table import AttributeGroups, AttributeScales, with_levels
from torchfil.engine.saving.data_spread import read_spread
from torchfil.engine.saving.exposed_words import TokenTexts, exposed_words
from torchfil.engine.saving.fingerprint import data_sha256
from torchfil.engine.saving.run_view import RunView
from torchfil.engine.saving.saved_attributes import attributes_of, table_to_save, yardsticks_of
from torchfil.engine.saving.thumbnails import thumbnails
from torchfil.fisher.amplification import name_of_amplification
from torchfil.planning.equalising import Equalised
from torchfil.report.saved_run import AttackRecord, QuestionRecord, SavedRun
from torchfil.utils.trees import tensors_of

__all__ = ["Labels", "build_saved_run"]

Labels = Mapping[Hashable, Hashable] | Sequence[Hashable]

_MOST_TEXTS = 20
_PRIORS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.2, 0.3, 0.5)


def build_saved_run(
    run: RunView,
    *,
    title: str | None = None,
    attribute_names: Sequence[str] | None = None,
    attribute_units: Sequence[str] | None = None,
    attribute_scales: AttributeScales | None = None,
    attribute_groups: AttributeGroups | None = None,
    unit_of_inputs: str = "",
    input_range: tuple[float, float] | None = None,
    groups: Mapping[str, Labels] | None = None,
    pictures: int = 8,
    texts: TokenTexts | None = None,
    attacks: Sequence[AttackResult | BoundComparison] = (),
    hash_data: bool = True,
    equalised: Equalised | None = None,
) -> SavedRun:
    """Everything about a run that a report needs; the options are those of :meth:`FILPrivacyEngine.save_run`."""
    _check_parts(pictures, input_range, groups)
    leakage = run.leakage
    named: dict[str, Any] = {"attribute_names": attribute_names, "attribute_units": attribute_units}
    named |= {"attribute_scales": attribute_scales, "attribute_groups": attribute_groups}
    table = table_to_save(leakage, named, with_texts=texts is not None)
    records = [_attack_record(attack, leakage) for attack in attacks]
    labels = {name: _labels(name, given, leakage) for name, given in (groups or {}).items()}
    columns = _columns(run, equalised)

    # all of these read the data set, whose augmentation would advance the generators of a continuing run
    with generators_kept():
        about = _about(run, hash_data)
        spread = read_spread(run, thorough=hash_data)
        if table is not None and spread is not None:
            table = with_levels(table, spread.coordinates)
        attributes = None if table is None else attributes_of(run, table)
        pictures = pictures if run.dataset is not None else 0  # a stream cannot be read again
        shown = thumbnails(run, columns["fil"], columns["participations"], pictures) if pictures else None

    words = exposed_words(run, texts, columns["fil"], _MOST_TEXTS) if texts is not None else None
    about["title"] = title if title is not None else f"{about['model']['name']} on {len(columns['fil']):,} examples"
    about["unit_of_inputs"] = unit_of_inputs
    about["noise_choice"] = None if run.noise_choice is None else run.noise_choice.summary(leakage)
    about["equalised"] = None if equalised is None else equalised.summary()
    about["dataset"]["input_range"] = [float(end) for end in input_range] if input_range is not None else None

    return SavedRun(
        about=about,
        ids=leakage.ids.as_array(),
        columns=columns,
        attributes=attributes,
        groups=labels,
        pictures=shown,
        texts=words,
        history=_history(run),
        bounds=_bounds(run, input_range),
        attacks=records,
        questions=[_question(leakage, name) for name in leakage.ledger.questions],
        rounds={} if equalised is None else equalised.columns(),
        yardsticks=None if spread is None else yardsticks_of(spread, table),
    )


def _check_parts(pictures: int, input_range: tuple[float, float] | None, groups: Mapping[str, Labels] | None) -> None:
    """Refuse options that fit no run."""
    if pictures < 0:
        raise ValueError(f"pictures={pictures} must be ≥ 0: how many of the most and of the least exposed to show")
    if input_range is not None and not -math.inf < input_range[0] < input_range[1] < math.inf:
        raise ValueError(f"input_range={input_range} must be the lowest and the highest value of a coordinate, finite")
    if groups is not None and not isinstance(groups, Mapping):
        raise TypeError(f"groups is a {type(groups).__name__}; name the grouping: groups={{'clinic': labels}}")


def _attack_record(attack: AttackResult | BoundComparison, leakage: Leakage) -> AttackRecord:
    """An attack compared with the run's bounds, unless it was already compared with bounds."""
    if not isinstance(attack, AttackResult | BoundComparison):
        raise TypeError(
            f"attacks contains a {type(attack).__name__}; give an AttackResult of torchfil.attacks, or what "
            "torchfil.compare_with_bounds returns"
        )
    compared = attack if isinstance(attack, BoundComparison) else compare_with_bounds(leakage, attack)
    return compared.record(leakage.ids.all())


def _about(run: RunView, hash_data: bool) -> dict[str, Any]:
    leakage, module = run.leakage, run.module
    inputs = run.inputs([0]) if run.dataset is not None else {}
    shapes = [list(leaf.shape[1:]) for leaf in tensors_of(list(inputs.values()))]
    return {
        "model": {"name": type(module).__name__, "num_parameters": sum(p.numel() for p in module.parameters())},
        "dataset": {
            "num_examples": leakage.ids.num_examples,
            # the length of the longest text belongs to one example, so a redacted report must not show it
            ("num_coordinates" if leakage.same_coordinates else "most_coordinates"): leakage.num_coordinates,
            "input_shape": shapes[0] if len(shapes) == 1 else shapes or None,
            "data_sha256": data_sha256(run.dataset) if hash_data and run.dataset is not None else None,
        },
        "mechanism": _mechanism(run),
        "epsilon": run.epsilon,
        "delta": run.delta,
        "accountant": run.accountant,
        "versions": {
            "torchfil": __version__,
            "torch": str(torch.__version__),
            "opacus": metadata.version("opacus"),
            "python": platform.python_version(),
        },
        "probe_seed": run.generator.initial_seed(),
        "created": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "exact": leakage.exact,
    }


def _mechanism(run: RunView) -> dict[str, Any]:
    options, ledger = run.options, run.leakage.ledger
    accounting = options.accounting
    paced = accounting.rel_error is not None  # then probes and rate change from step to step
    return {
        "noise_multiplier": run.noise_multiplier,
        "max_grad_norm": run.max_grad_norm,
        "clip": options.clip.name,
        "noise": run.noise,
        "sample_rate": run.options.sample_rate,
        "expected_batch_size": run.expected_batch_size,
        "steps": ledger.steps,
        "steps_paused": ledger.missed_steps,
        "poisson": run.options.sample_rate is not None,
        "stream": run.dataset is None,
        "amplification": name_of_amplification(options.amplification),
        "estimator": accounting.estimator,
        "num_probes": None if paced else run.num_probes,
        "probe_precision": accounting.execution.probe_precision_on(next(run.module.parameters()).device),
        "fil_rate": None if paced else accounting.fil_rate,
        "rel_error": accounting.rel_error,
        "loss": run.loss,
    }


def _columns(run: RunView, equalised: Equalised | None) -> dict[str, np.ndarray]:
    """Numbers by example, [n] each."""
    columns = run.leakage.arrays()
    columns["epsilon"] = run.individual_epsilon.cpu().numpy()
    if run.clip_weights is not None:
        columns["clip_weight"] = run.clip_weights.cpu().numpy()
    if equalised is not None:
        equalised.check_trained_with(run.clip_weights)
        if equalised.fil_before is not None:
            columns["fil_before"] = equalised.fil_before.double().numpy()
    return columns


def _question(leakage: Leakage, name: str) -> QuestionRecord:
    asked = leakage.ledger.questions[name]

    def divergences(part: Leakage, rows: Tensor) -> dict[str, Tensor]:
        guess = part.read(Divergence(name, asked).name, rows)
        both = {"divergence": guess.divergence.value, "divergence_high": guess.upper(0.95).divergence.value}
        return {kind: value.reshape(len(rows), len(asked.answers)) for kind, value in both.items()}

    found = leakage.by_parts(divergences)
    return QuestionRecord(name, list(asked.answers), asked.complete, found["divergence"], found["divergence_high"])


def _labels(name: str, given: Labels, leakage: Leakage) -> np.ndarray:
    ids = leakage.ids.all()
    if isinstance(given, Mapping):
        missing = [key for key in ids if key not in given]
        if missing:
            raise ValueError(f"grouping {name!r} has no label for {len(missing)} examples, e.g. {missing[:3]}")
        given = [given[key] for key in ids]
    if len(given) != len(ids):
        raise ValueError(
            f"grouping {name!r} has {len(given)} labels for {len(ids)} examples; give one for each, in order"
        )
    return np.asarray([str(label) for label in given], dtype=str)


def _history(run: RunView) -> dict[str, np.ndarray]:
    ledger = run.leakage.ledger
    steps, points = run.timeline.table(ledger.steps, ledger.sums["trace"], ledger.own_coordinates)
    names = ("fil_median", "fil_q95", "fil_max")
    history = {"step": np.asarray(steps, dtype=np.int64)}
    history |= {name: points[:, place].double().numpy() for place, name in enumerate(names)}
    if run.accountant == "rdp" and run.options.sample_rate is not None:  # else it counts participations, not steps
        history["epsilon"] = epsilon_over_time(run.releases, steps, run.delta)
    return history


def _bounds(run: RunView, input_range: tuple[float, float] | None) -> dict[str, Any]:
    """Theorem 1, if inputs are known to lie in a range, and reconstruction robustness."""
    bounds: dict[str, Any] = {}
    if input_range is not None:
        diameter = input_range[1] - input_range[0]
        bounds["rdp_mse_bound"] = {
            "diameter": diameter,
            "replace_one": run.rdp_mse_bound(diameter, reading="replace-one"),
            "paper": run.rdp_mse_bound(diameter, reading="paper"),
        }
    return {**bounds, "rero": _rero_curve(run)}


def _rero_curve(run: RunView) -> dict[str, list[float]]:
    """Success with the model, at most and (``low``) at least, by success without it."""
    curve = everybodys_robustness(run.releases, _PRIORS)
    return {"prior": list(_PRIORS), "success": curve.high.tolist(), "low": curve.low.tolist()}
