"""From a run to its saved form; see :mod:`torchfil.run.saved_run`.

Private coordinates become attributes with names, units and scales, and one-hot levels are combined.

A coordinate x_j that was standardised for training is reported in its own unit as scale · x_j + offset, and its error
as |scale|/sqrt(I_jj). The levels of a one-hot attribute are **one** attribute. Let w_j be the distance between the two
values of a column, p_j the share of examples that have level j, and T = Σ_j w_j² I_jj the trace of the m levels'
information. An unbiased guess of the levels, each 0 or 1, is off by at least

    sqrt( r² / (m T) )      (root mean square over levels; r = m − 1 if every example has one of the levels, else m),

because tr(I⁻¹) ≥ r²/tr(I) on the r directions in which levels can change. A blind guess answers with the shares, and is
off by sqrt( Σ_j p_j(1 − p_j) / m ). A plain attribute is the case m = r = 1 with w = 1/scale.
"""

from __future__ import annotations

import copy
import datetime
import inspect
import math
import platform
import warnings
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
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
from torchfil.engine.saving.data import are_pixels, data_sha256, exposed_words, read_blind_guess
from torchfil.fisher.amplification import name_of_amplification
from torchfil.planning.calibration import NoiseChoice
from torchfil.planning.equalising import Equalised
from torchfil.run.baselines import level_shares
from torchfil.run.blind_guess import BlindGuess
from torchfil.run.saved_run import Attributes, Baselines, QuestionRecord, Records, SavedRun, Spread, checked_metrics
from torchfil.run.statistics import RECORDED_ATTRIBUTES, RECORDED_EXAMPLES, most_exposed_and_typical
from torchfil.run.unit import counted, unit_of
from torchfil.utils.errors import require
from torchfil.utils.noise import preserve_rng
from torchfil.utils.text import nearest
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
    records: bool = True,
    texts: Any = None,
    attacks: Sequence[AttackResult | BoundComparison] = (),
    hash_data: bool = True,
    equalised: Equalised | None = None,
    metrics: Mapping[str, Any] | None = None,
    audit: dict[str, Any] | None = None,
    kept: dict[Any, Any] | None = None,
    **named: Any,
) -> SavedRun:
    """Everything about a run that a report needs; the options are those of :meth:`FILPrivacyEngine.save_run`.

    ``noise_choice`` says how pilots chose σ; None: it was given. ``leakage`` has the run's results, or their average
    over several runs. ``audit`` is what canaries showed, as JSON values. ``kept`` keeps what was read from the data set
    until the next save of the run; None: it is read again. ``named`` are options of :func:`attribute_table`.
    """
    kept = {} if kept is None else kept
    utility = checked_metrics(metrics)
    finite = input_range is None or -math.inf < input_range[0] < input_range[1] < math.inf
    require(finite, f"input_range={input_range} must be the lowest and the highest value of a coordinate, finite")
    passes, ids, d = training.passes, leakage.ids, leakage.num_coordinates
    table = tracked_table(training, leakage, named, with_texts=texts is not None)
    compared = [each if isinstance(each, BoundComparison) else compare_with_bounds(leakage, each) for each in attacks]
    attacked = [each.record(ids.all()) for each in compared]
    labels = {name: _labels(name, given, ids.all()) for name, given in (groups or {}).items()}
    columns = _columns(training, accountant, leakage, delta, equalised)

    # all of these read the data set, whose augmentation would advance the generators of a continuing run
    words = people = None
    with preserve_rng():
        if hash_data and passes.dataset is not None and "data" not in kept:
            kept["data"] = data_sha256(passes.dataset)
        about = _about(training, accountant, leakage, delta, kept.get("data"))
        kept[d] = blind = kept[d] if d in kept else read_blind_guess(passes, d, thorough=hash_data)
        columns |= {} if blind is None else blind.column
        if table is not None and blind is not None:
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
    about["dataset"]["input_range"] = [float(end) for end in input_range] if input_range is not None else None
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


def check_options(options: Mapping[str, Any]) -> None:
    """Raise a TypeError for an option that ``save_run`` does not have."""
    known = {name for each in (build_saved_run, attribute_table) for name in inspect.signature(each).parameters}
    for name in options.keys() - known:
        raise TypeError(f"Unknown option {name!r} of save_run{nearest(name, sorted(known))}")


def as_average(run: SavedRun, trainings: Sequence[PrivateTraining], accountant: IAccountant, delta: float) -> SavedRun:
    """A run whose numbers are means over repetitions, without what belongs to a single one.

    The numbers are about one release, on average. An example's own ε, the course of training, the seed and an audit are
    left out; so is reconstruction robustness if batches are known, because it depends on one run's participations.

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
        about={**run.about, "mechanism": mechanism, "probe_seed": None, "audit": None, "merged": merged},
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
    run, columns, owners = training.run, leakage.arrays(), training.run.owners
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
    training: PrivateTraining, accountant: IAccountant, leakage: Leakage, delta: float, data_sha256: str | None
) -> dict[str, Any]:
    passes, module = training.passes, training.replica.live
    same = leakage.ledger.same_coordinates and not training.run.options.accounting.by_owner
    inputs = passes.inputs([0]) if passes.dataset is not None else {}
    versions = {"torchfil": __version__, "torch": str(torch.__version__), "opacus": metadata.version("opacus")}
    shapes = [list(leaf.shape[1:]) for leaf in tensors_of(list(inputs.values()))]
    return {
        "model": {
            "name": type(module).__name__,
            "num_parameters": sum(p.numel() for p in module.parameters()),
            "not_smooth": training.run.not_smooth,
        },
        "dataset": {
            "num_examples": leakage.ids.num_examples,
            # the longest text, or the most rows, belong to one example, so a redacted report must not show it
            ("num_coordinates" if same else "most_coordinates"): leakage.num_coordinates,
            "input_shape": shapes[0] if len(shapes) == 1 else shapes or None,
            "data_sha256": data_sha256,
        },
        "mechanism": _mechanism(training, leakage),
        "epsilon": reading.spent_epsilon(accountant, delta),
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

    # what a reader needs to judge the numbers, and to predict other noise or steps
    return {
        "noise_multiplier": float(optimizer.noise_multiplier),
        "noise_multiplier_default": options.default_noise,
        "max_grad_norm": float(optimizer.max_grad_norm),
        "clip": options.clip.name,
        "noise": optimizer.noise.kind,
        "sample_rate": options.sample_rate,
        "expected_batch_size": float(optimizer.expected_batch_size * parts) if mean else None,  # None: a sum
        "steps": ledger.steps,
        "steps_paused": ledger.missed_steps,
        "unit": "example" if accounting.owner_of is None else accounting.unit,
        **{name: getattr(accounting, name) for name in ("unit_names", "row_reduction", "rows_per_owner")},
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
        high = guess.upper(0.95).divergence.value
        both = {"divergence": guess.divergence.value.clamp(max=guess.largest), "divergence_high": high}
        return {kind: value.reshape(len(rows), len(asked.answers)) for kind, value in both.items()}

    found = leakage.by_parts(divergences)
    answers, both = list(asked.answers), (found["divergence"], found["divergence_high"])
    return QuestionRecord(name, answers, asked.complete, *both, membership=asked.membership)


def _history(
    training: PrivateTraining, accountant: IAccountant, leakage: Leakage, delta: float
) -> dict[str, np.ndarray]:
    """η̄ over training time, and ε."""
    ledger = leakage.ledger
    steps, points = training.run.timeline.table(ledger.steps, ledger.sums["trace"], ledger.own_coordinates)
    history = {"step": np.asarray(steps, dtype=np.int64)}
    history |= {name: points[:, j].double().numpy() for j, name in enumerate(("fil_median", "fil_q95", "fil_max"))}
    if accountant.mechanism() == "rdp" and training.run.options.sample_rate is not None:  # else it counts
        history["epsilon"] = reading.epsilon_over_time(accountant.history, steps, delta)  # participations, not steps
    return history


def _bounds(releases: Releases, input_range: tuple[float, float] | None) -> dict[str, Any]:
    """Theorem 1, if inputs are known to lie in a range; reconstruction robustness by success without the model."""
    bounds: dict[str, Any] = {}
    if input_range is not None:
        diameter, names = input_range[1] - input_range[0], {"replace_one": "replace-one", "paper": "paper"}
        found = {key: reading.rdp_bound(releases, 1, diameter, name) for key, name in names.items()}  # whatever d is
        bounds["rdp_mse_bound"] = {"diameter": diameter, **found}
    curve = reading.everybodys_robustness(releases, _PRIORS)
    bounds["rero"] = {"prior": list(_PRIORS), "success": curve.high.tolist(), "low": curve.low.tolist()}
    return bounds


# ------------------------------------------------------------------ attributes


NO_LEVEL = "none of these"
_EXACT = 1e-6  # shares that sum to 1 up to rounding
_MOST_ATTRIBUTES = 2**15  # whose names and spread fit into a run file's metadata


@dataclass(frozen=True, eq=False)
class AttributeTable:
    """The k attributes of a run, in the order of their first coordinates.

    An owner with several rows has an attribute in each of them. The row counts in which it can be estimated most
    closely: its error is the least, and its lower end the least lower end, over the owner's rows. At least 95 % of such
    ends lie below the least error, as that of the closest row does.

    Attributes:
        coordinates: The names of the d private coordinates, of a row where owners have several.
        names: The names of the attributes.
        units: Their units; "" if there is none.
        columns: The coordinates of each attribute; several are the levels of a one-hot attribute.
        scales: The factor from a coordinate to its attribute, 1/w_j for a level, [d].
        offsets: What is added to it, [d].
        directions: r of each attribute, [k].
        places: Which of the d each of z is, [d of z].
        rows: In which of an owner's rows, [d of z]; 0 without owners, and for what rows share.
    """

    coordinates: list[str]
    names: list[str]
    units: list[str]
    columns: list[list[int]]
    scales: np.ndarray
    offsets: np.ndarray
    directions: np.ndarray
    places: np.ndarray
    rows: np.ndarray

    def errors(self, information: Tensor) -> Tensor:
        """The least error of unbiased guesses, in the attributes' units, [rows, k]; of an owner's rows the closest."""
        return self.errors_by_row(information).amin(dim=2)

    def errors_by_row(self, information: Tensor) -> Tensor:
        """The same in each of an owner's K rows, [rows, k, K].

        Args:
            information: I_jj, [rows, d of z]; 0 in rows that an owner does not have.
        """
        sizes, attribute = np.asarray([len(own) for own in self.columns]), np.zeros(len(self.coordinates), np.int64)
        for number, own in enumerate(self.columns):
            attribute[own] = number
        many = int(self.rows.max(initial=0)) + 1
        cell = torch.as_tensor(attribute[self.places] * many + self.rows, device=information.device)
        scales = torch.as_tensor(self.scales[self.places]).to(information)
        trace = information.new_zeros(len(information), len(sizes) * many).index_add_(1, cell, information / scales**2)
        counts, directions = (torch.as_tensor(each).to(information)[:, None] for each in (sizes, self.directions))
        return directions * (counts * trace.unflatten(1, (len(sizes), many))).rsqrt()

    def with_levels(self, spread: Spread) -> AttributeTable:
        """The table with facts from the data about its levels: the distance of values, whether one always holds.

        Raises:
            ValueError: A column of a group takes more than two values, or several levels hold at once.
        """
        two_values, shares, width = level_shares(spread), _level_shares(spread), spread.high - spread.low
        scales, directions = self.scales.copy(), self.directions.copy()
        for place, own in enumerate(self.columns):
            if len(own) == 1:
                continue
            where = f"attribute_groups[{self.names[place]!r}]"
            many = [self.coordinates[j] for j in own if math.isnan(two_values[j]) and width[j] > 0]
            require(not many, f"{where}: {', '.join(map(repr, many))} takes more than two values; leave it out")
            together = sum(shares[own].tolist())
            one = f"{where}: on average {together:.3g} of its levels hold at once; they are not levels of one attribute"
            require(together <= 1 + _EXACT, one)
            scales[own] = 1 / np.where(width[own] > 0, width[own], 1.0)
            directions[place] = len(own) - (1 if 1 - together <= _EXACT else 0)
        return replace(self, scales=scales, directions=directions)

    def spread(self, spread: Spread) -> tuple[Spread, dict[str, dict[str, float]]]:
        """The attributes' own spread, [k] each, and the shares of levels by categorical attribute.

        Args:
            spread: The coordinates' spread, [d] each.
        """
        two_values, shares = level_shares(spread), _level_shares(spread)
        rows, levels = [], dict[str, dict[str, float]]()
        for name, own in zip(self.names, self.columns, strict=True):
            if len(own) > 1:
                held = shares[own].tolist()
                levels[name] = {self.coordinates[j]: share for j, share in zip(own, held, strict=True)}
                if 1 - sum(held) > _EXACT:
                    levels[name][NO_LEVEL] = 1 - sum(held)
                error = math.sqrt(sum(share * (1 - share) for share in held) / len(held))
                rows.append((math.nan, error, math.nan, math.nan))
                continue

            # one coordinate: a negative scale reverses its range
            j, scale = own[0], float(self.scales[own[0]])
            given = (spread.mean[j], spread.low[j], spread.high[j])
            mean, *ends = (float(value) * scale + self.offsets[j] for value in given)
            rows.append((mean, float(spread.std[j]) * abs(scale), min(ends), max(ends)))
            if not math.isnan(two_values[j]):
                share = float(two_values[j])
                levels[name] = dict(zip((f"{end:.6g}" for end in ends), (1 - share, share), strict=True))
        return Spread(*np.asarray(rows, dtype=np.float64).reshape(-1, 4).T), levels

    def read(self, leakage: Leakage) -> Attributes:
        """How well each attribute of every example could be inferred."""

        def errors(leakage: Leakage, rows: Tensor) -> dict[str, Tensor]:
            """The least errors and their lower ends, [rows, k] each, and which rows are unknown, [rows]."""
            fil = leakage.get_attribute_fil(rows)
            error, low = (self.errors(eta.double().square()) for eta in (fil.value, fil.interval(0.95)[1]))
            unknown = fil.standard_error.isnan() & ~fil.value.isnan()  # unknown for ids that were not chosen
            low = low.where(~error.isnan(), math.nan)
            return {"error": error.float(), "error_low": low.float(), "is_unknown": unknown.any(dim=1)}

        found = leakage.by_parts(errors)
        low = None if found["is_unknown"].any() else found["error_low"]
        return Attributes(self.names, self.units, found["error"], low)

    def records(self, leakage: Leakage, passes: DatasetPasses, columns: Mapping[str, np.ndarray]) -> Records | None:
        """The attributes of the most exposed examples and of typical ones; None for more than 64 attributes.

        Args:
            leakage: The run's results, by which an owner's closest row is chosen.
            passes: Reads the data set.
            columns: With η̄ ("fil") and "participations", [n] each.
        """
        rows, _ = most_exposed_and_typical(columns["fil"], columns["participations"] > 0, RECORDED_EXAMPLES)
        if not len(rows) or len(self.names) > RECORDED_ATTRIBUTES:
            return None

        def closest(part: Leakage, rows: Tensor) -> dict[str, Tensor]:
            """Of each attribute the row in which it can be estimated most closely, [rows, k]."""
            highest = part.get_attribute_fil(rows).interval(0.95)[1]
            return {"row": self.errors_by_row(highest.double().square()).argmin(dim=2)}

        # one number each, and of those in several rows one of these
        chosen = leakage.by_parts(closest, torch.as_tensor(rows))["row"]
        table = passes.examples(rows.tolist()).values.detach().cpu().double().numpy()
        values = np.full(chosen.shape, math.nan)
        for number, (j, *levels) in enumerate(self.columns):
            if not levels:
                places = np.flatnonzero(self.places == j)[chosen[:, number]]
                values[:, number] = table[np.arange(len(rows)), places] * self.scales[j] + self.offsets[j]
        return Records(rows, values)


def attribute_table(
    num_coordinates: int,
    attribute_names: Sequence[str] | None = None,
    attribute_units: Sequence[str] | None = None,
    attribute_scales: Mapping[str, tuple[str, float] | tuple[str, float, float]] | None = None,
    attribute_groups: Mapping[str, Sequence[str]] | None = None,
) -> AttributeTable:
    """The table, after all arguments are checked; ``save_run`` describes them.

    Raises:
        ValueError: A name that does not exist, one in two groups, a scale that is 0 or not finite, too few names.
        TypeError: A scale without its unit.
    """
    names, units = attribute_names, attribute_units
    for what, given in (("attribute_names", names), ("attribute_units", units)):
        fits = given is None or len(given) == num_coordinates
        require(fits, f"{what} has {len(given or ())} entries for {num_coordinates} private coordinates; give one each")
    coordinates = list(names) if names is not None else [f"coordinate {j}" for j in range(num_coordinates)]
    own_units = list(units) if units is not None else [""] * num_coordinates
    group_of: dict[int, str] = {}
    for group, levels in (attribute_groups or {}).items():
        where = f"attribute_groups[{group!r}]"
        for level in levels:
            j = _place_of(level, coordinates, where)
            require(j not in group_of, f"{where} names {level!r}, which {group_of.get(j)!r} already has; leave one out")
            group_of[j] = group

    factors, offsets = np.ones(num_coordinates), np.zeros(num_coordinates)
    for name, scale in (attribute_scales or {}).items():
        where = f"attribute_scales[{name!r}]"
        j = _place_of(name, coordinates, where)
        own = f"{where}: it is a level of {group_of.get(j)!r}, whose levels are shares; leave it out"
        require(j not in group_of, own)
        if not isinstance(scale, tuple | list) or len(scale) not in (2, 3):
            raise TypeError(f"{where} = {scale!r} must be (unit, scale) or (unit, scale, offset): ('years', 14.2)")
        own_units[j], factors[j], offsets[j] = (*scale, 0.0)[:3]
        usable = factors[j] != 0 and math.isfinite(factors[j]) and math.isfinite(offsets[j])
        require(bool(usable), f"{where} = {scale!r}: the scale must be finite and not 0, the offset finite")

    members: dict[str | int, list[int]] = {}  # by group, or by coordinate
    for j in range(num_coordinates):
        members.setdefault(group_of.get(j, j), []).append(j)
    return AttributeTable(
        coordinates,
        [key if isinstance(key, str) else coordinates[key] for key in members],
        ["" if isinstance(key, str) else own_units[key] for key in members],
        list(members.values()),
        factors,
        offsets,
        np.asarray([max(1, len(own) - 1) for own in members.values()]),
        np.arange(num_coordinates),
        np.zeros(num_coordinates, dtype=np.int64),
    )


def _place_of(name: str, coordinates: Sequence[str], where: str) -> int:
    """Which coordinate has this name."""
    require(name in coordinates, f"{where}: {name!r} is not an attribute{nearest(str(name), coordinates)}")
    return coordinates.index(name)


def of_any_row(training: PrivateTraining, **named: Any) -> AttributeTable:
    """The table of a run by owner: one attribute for all of an owner's rows ("dose, any visit").

    Neither names nor their number depend on how many rows anybody has.

    Raises:
        ValueError: Some levels of a one-hot attribute are shared by an owner's rows, and others are not.
    """
    slots: Any = training.passes.examples([0]).layout.slots
    keys = list(dict.fromkeys(slot.key for slot in slots))
    shared = dict(sorted(((keys.index(slot.key), j), slot.shared) for slot in slots for j in slot.columns))
    of_row, once = {column: place for place, column in enumerate(shared)}, list(shared.values())
    table = attribute_table(len(once), **named)

    # where each coordinate belongs, and what all rows share
    owns = [(of_row[keys.index(slot.key), j], row) for slot in slots for row in slot.rows for j in slot.columns]
    names = []
    for name, own in zip(table.names, table.columns, strict=True):
        kinds = {once[j] for j in own}
        require(len(kinds) == 1, f"attribute_groups[{name!r}]: rows share some of its levels; share all of them")
        names.append(name if kinds == {True} else f"{name}, any {training.run.options.accounting.unit_names[1]}")
    places, rows = np.asarray(owns).T
    return replace(table, names=names, places=places, rows=rows)


def tracked_table(
    training: PrivateTraining, leakage: Leakage, named: Mapping[str, Any], *, with_texts: bool
) -> AttributeTable | None:
    """The attributes to save; None, with a warning, for too many of them.

    Coordinates of words have no names; the words identify them.

    Args:
        training: The run.
        leakage: Its results.
        named: Options of :func:`attribute_table`, for a row where the run is by owner.
        with_texts: Whether words are saved.
    """
    run = training.run
    by_row = run.max_rows is not None and run.options.accounting.by_owner
    table = of_any_row(training, **named) if by_row else attribute_table(leakage.num_coordinates, **named)
    given = [name for name, value in named.items() if value is not None]
    if not {"diagonal", "fim"} & leakage.ledger.sums.keys():
        require(not given, f"{', '.join(given)} were given, but attributes were not tracked: track=('diagonal',)")
        return None
    if not given and with_texts:
        return None
    if len(table.names) > _MOST_ATTRIBUTES:
        reason = f"a run file names {_MOST_ATTRIBUTES:,} of them at most, and there are {len(table.names):,}"
        warnings.warn(f"attributes are not saved: {reason}; read them with engine.get_attribute_fil(ids)", stacklevel=5)
        return None
    return table


def baselines(blind: BlindGuess, table: AttributeTable | None) -> Baselines:
    """The error of a blind guess of inputs, and of attributes if there are any.

    The squared error of a level's share, Σ(x − p)² over a class of n, is n·p(1 − p)·w²: levels count as coordinates do.
    """
    d = len(blind.everybody.spread.std)
    told = blind.knows, blind.errors([range(d)], np.ones(d))[:, 0]
    if table is None:
        return Baselines(Spread(*np.zeros((4, 0))), {}, *told, np.zeros((1, 0)))
    of_z = [np.flatnonzero(np.isin(table.places, own)).tolist() for own in table.columns]
    spread = table.spread(blind.everybody.pooled(table.places).spread)
    return Baselines(*spread, *told, blind.errors(of_z, table.scales[table.places]))


def _level_shares(spread: Spread) -> np.ndarray:
    """How often each level holds, [d]; a level that never changes holds always if it is 1, and otherwise never."""
    shares = level_shares(spread)
    return np.where(np.isnan(shares), np.abs(spread.mean - 1) < _EXACT, shares)
