"""From a finished run to what is saved of it; see :mod:`torchfil.report.saved_run`."""

from __future__ import annotations

import contextlib
import datetime
import logging
import math
import platform
import random
from collections.abc import Hashable, Iterator, Mapping, Sequence
from importlib import metadata
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from torchfil._version import __version__
from torchfil.accounting.leakage import Leakage
from torchfil.bounds import rero
from torchfil.engine.epsilon import epsilon_over_time
from torchfil.engine.fingerprint import data_sha256
from torchfil.engine.loader import split_batch
from torchfil.engine.run import Run
from torchfil.engine.thumbnails import thumbnails
from torchfil.fisher.amplification import name_of_amplification
from torchfil.private import as_call
from torchfil.report.saved_run import AttackResult, Attributes, SavedRun
from torchfil.utils.trees import tensors_of

if TYPE_CHECKING:
    from torchfil.engine.engine import FILPrivacyEngine

__all__ = ["Labels", "build_saved_run"]

logger = logging.getLogger(__name__)

Labels = Mapping[Hashable, Hashable] | Sequence[Hashable]

_PRIORS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.2, 0.3, 0.5)
_RERO_WORK = 50_000_000  # sampled steps on each side
_RERO_SAMPLES = (10_000, 100_000)


def build_saved_run(
    engine: FILPrivacyEngine,
    *,
    delta: float,
    title: str | None = None,
    attribute_names: Sequence[str] | None = None,
    attribute_units: Sequence[str] | None = None,
    unit_of_inputs: str = "",
    input_range: tuple[float, float] | None = None,
    groups: Mapping[str, Labels] | None = None,
    pictures: int = 8,
    attacks: Sequence[AttackResult] = (),
    hash_data: bool = True,
) -> SavedRun:
    """Everything of an engine's run that a report needs; see :meth:`FILPrivacyEngine.save_run`."""
    run, leakage = engine._current, engine._current.leakage
    if pictures < 0:
        raise ValueError(f"pictures={pictures} must be ≥ 0: how many of the most and of the least exposed to show")
    if input_range is not None and not -math.inf < input_range[0] < input_range[1] < math.inf:
        raise ValueError(f"input_range={input_range} must be the lowest and the highest value of a coordinate, finite")
    for attack in attacks:
        if not isinstance(attack, AttackResult):
            raise TypeError(
                f"attacks holds a {type(attack).__name__}; set it beside the bounds first: "
                "torchfil.validate(engine, attack).record()"
            )
    attributes = _attributes(leakage, attribute_names, attribute_units)
    if groups is not None and not isinstance(groups, Mapping):
        raise TypeError(f"groups is a {type(groups).__name__}; name the grouping: groups={{'clinic': labels}}")
    labels = {name: _labels(name, given, leakage) for name, given in (groups or {}).items()}
    columns = {name: np.asarray(values) for name, values in leakage.columns()[1].items() if name != "fil_kind"}
    columns["epsilon"] = engine.get_individual_epsilon(delta=delta).value.cpu().numpy()
    with _global_generators_as_they_were():
        about = _about(engine, run, leakage, delta, hash_data)
        shown = thumbnails(run, columns["fil"], columns["participations"], pictures) if pictures else None
    about["title"] = title if title is not None else f"{about['model']['name']} on {len(columns['fil']):,} examples"
    about["unit_of_inputs"] = unit_of_inputs
    about["dataset"]["input_range"] = [float(end) for end in input_range] if input_range is not None else None
    return SavedRun(
        about=about,
        ids=_ids(leakage.ids.all()),
        columns=columns,
        attributes=attributes,
        groups=labels,
        pictures=shown,
        history=_history(engine, run, leakage, delta),
        bounds=_bounds(engine, leakage, input_range),
        attacks=list(attacks),
    )


@contextlib.contextmanager
def _global_generators_as_they_were() -> Iterator[None]:
    """Reading data that are augmented draws from them."""
    plain, numpys = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(plain)
        np.random.set_state(numpys)


def _about(engine: FILPrivacyEngine, run: Run, leakage: Leakage, delta: float, hash_data: bool) -> dict[str, Any]:
    settings, optimizer, name = run.settings, run.optimizer, type(run.module).__name__
    inputs, _ = split_batch(run.collate_fn([run.dataset[0]]), settings.batch_to_inputs)
    args, kwargs = as_call(inputs)
    shapes = [list(leaf.shape[1:]) for leaf in tensors_of((args, kwargs))]
    return {
        "model": {"name": name, "num_parameters": sum(p.numel() for p in run.module.parameters())},
        "dataset": {
            "num_examples": leakage.ids.num_examples,
            "num_coordinates": leakage.num_coordinates,
            "input_shape": shapes[0] if len(shapes) == 1 else shapes,
            "data_sha256": data_sha256(run.dataset) if hash_data else None,
        },
        "mechanism": {
            "noise_multiplier": float(optimizer.noise_multiplier),
            "max_grad_norm": float(optimizer.max_grad_norm),
            "clip": settings.clip.name,
            "sample_rate": run.measurer.sample_rate,
            "steps": leakage.ledger.steps,
            "steps_paused": leakage.ledger.missed_steps,
            "poisson": run.measurer.sample_rate is not None,
            "amplification": name_of_amplification(settings.amplification),
            "estimator": settings.estimator,
            "num_probes": run.pace.num_probes if settings.rel_error is None else None,
            "fil_rate": settings.fil_rate if settings.rel_error is None else None,
            "rel_error": settings.rel_error,
            "loss": run.loss.name if run.loss is not None else None,
        },
        "epsilon": float(engine.get_epsilon(delta)),
        "delta": delta,
        "accountant": engine.accountant.mechanism(),
        "versions": {
            "torchfil": __version__,
            "torch": str(torch.__version__),
            "opacus": metadata.version("opacus"),
            "python": platform.python_version(),
        },
        "seed": run.generator.initial_seed(),
        "created": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "exact": leakage.exact,
    }


def _ids(keys: list[Hashable]) -> np.ndarray:
    """Numbers as int64; anything else as text, spelled out where the texts of two keys would be the same."""
    if all(isinstance(key, int) and not isinstance(key, bool) and abs(key) < 2**63 for key in keys):
        return np.asarray(keys, dtype=np.int64)
    texts = [str(key) for key in keys]
    return np.asarray(texts if len(set(texts)) == len(texts) else [repr(key) for key in keys], dtype=str)


def _attributes(leakage: Leakage, names: Sequence[str] | None, units: Sequence[str] | None) -> Attributes | None:
    d = leakage.num_coordinates
    for what, given in (("attribute_names", names), ("attribute_units", units)):
        if given is not None and len(given) != d:
            raise ValueError(f"{what} has {len(given)} entries for {d} private coordinates; give one each, in order")
        strange = [entry for entry in given or () if not isinstance(entry, str)]
        if strange:
            raise TypeError(f"{what} holds {strange[0]!r}, a {type(strange[0]).__name__}; give texts")
    if not {"diagonal", "fim"} & leakage.ledger.sums.keys():
        if names is not None:
            raise ValueError(
                "attribute_names were given, but attributes were not tracked: make_private(track=('diagonal',))"
            )
        return None
    fil = leakage.get_attribute_fil()
    high = fil.interval(0.95)[1] if not bool(fil.standard_error.isnan().any()) else None
    return Attributes(
        names=list(names) if names is not None else [f"coordinate {j}" for j in range(d)],
        units=list(units) if units is not None else [""] * d,
        error=fil.value.reciprocal().float().cpu().numpy(),
        error_low=high.reciprocal().float().cpu().numpy() if high is not None else None,
    )


def _labels(name: str, given: Labels, leakage: Leakage) -> np.ndarray:
    ids = leakage.ids.all()
    if isinstance(given, Mapping):
        missing = [key for key in ids if key not in given]
        if missing:
            raise ValueError(f"grouping {name!r} has no label for {len(missing)} examples, e.g. {missing[:3]}")
        given = [given[key] for key in ids]
    if len(given) != len(ids):
        raise ValueError(f"grouping {name!r} has {len(given)} labels for {len(ids)} examples; give one each, in order")
    return np.asarray([str(label) for label in given], dtype=str)


def _history(engine: FILPrivacyEngine, run: Run, leakage: Leakage, delta: float) -> dict[str, np.ndarray]:
    ledger = leakage.ledger
    steps, points = run.timeline.table(ledger.steps, ledger.sums["trace"], ledger.num_coordinates)
    names = ("fil_median", "fil_q95", "fil_max")
    history = {"step": np.asarray(steps, dtype=np.int64)}
    history |= {name: points[:, place].double().numpy() for place, name in enumerate(names)}
    if engine.accountant.mechanism() == "rdp":
        history["epsilon"] = epsilon_over_time(engine.accountant.history, steps, delta)
    return history


def _bounds(engine: FILPrivacyEngine, leakage: Leakage, input_range: tuple[float, float] | None) -> dict[str, Any]:
    """Theorem 1, where inputs are known to lie in a range, and reconstruction robustness at the run's worst σ and q."""
    bounds: dict[str, Any] = {}
    if input_range is not None:
        diameter = input_range[1] - input_range[0]
        bounds["rdp_mse_bound"] = {
            "diameter": diameter,
            "replace_one": engine.get_rdp_mse_bound(diameter, reading="replace-one"),
            "paper": engine.get_rdp_mse_bound(diameter, reading="paper"),
        }
    history = engine.accountant.history
    steps = sum(count for *_, count in history)
    q = max(rate for _, rate, _ in history)
    if engine._current.measurer.sample_rate is None:  # known batches: a step counts where the example takes part
        q, steps = 1.0, int(leakage.ledger.sums["participations"].max())
    samples = int(min(max(_RERO_WORK // max(1, steps), _RERO_SAMPLES[0]), _RERO_SAMPLES[1]))
    if not steps or steps * samples > 20 * _RERO_WORK:
        logger.info("reconstruction robustness of %d steps is left out: too long to sample", steps)
        return bounds
    sigma = min(noise for noise, *_ in history)
    found = rero(
        _PRIORS,
        q=q,
        noise_multiplier=sigma,
        steps=steps,
        num_samples=samples,
        generator=torch.Generator().manual_seed(0),
    )
    bounds["rero"] = {
        "prior": list(_PRIORS),
        "success": found.interval(0.95)[1].clamp(max=1).tolist(),
        "estimate": found.value.tolist(),
        "standard_error": found.standard_error.tolist(),
    }
    return bounds
