"""Private coordinates as attributes with names, units and scales; one-hot levels as one attribute.

A coordinate x_j that was standardised for training is reported in its own unit as scale · x_j +
offset, and its error as |scale|/sqrt(I_jj). The levels of a one-hot attribute are **one**
attribute. Let w_j be the distance between the two values of a column, p_j the share of examples
that have level j, and T = Σ_j w_j² I_jj the trace of the m levels' information. An unbiased guess
of the levels, each 0 or 1, is off by at least

    sqrt( r² / (m T) )      (root mean square over levels;
                            r = m − 1 if every example has one of the levels, else m),

because tr(I⁻¹) ≥ r²/tr(I) on the r directions in which levels can change. A blind guess answers
with the shares, and is off by sqrt( Σ_j p_j(1 − p_j) / m ). A plain attribute is the case m = r = 1
with w = 1/scale.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchfil.accounting.leakage import Leakage
from torchfil.engine.assembly import DatasetPasses, PrivateTraining
from torchfil.run.baselines import level_shares
from torchfil.run.blind_guess import BlindGuess
from torchfil.run.saved_run import Attributes, Baselines, Records, Spread
from torchfil.run.statistics import RECORDED_ATTRIBUTES, RECORDED_EXAMPLES, most_exposed_and_typical
from torchfil.utils.text import nearest

NO_LEVEL = "none of these"
_EXACT = 1e-6  # shares that sum to 1 up to rounding
_MOST_ATTRIBUTES = 2**15  # whose names and spread fit into a run file's metadata

Scale = tuple[str, float] | tuple[str, float, float]


@dataclass(frozen=True, eq=False)
class AttributeTable:
    """The k attributes of a run, in the order of their first coordinates.

    An owner with several rows has an attribute in each of them. The row counts in which it can be
    estimated most closely: its error is the least, and its lower end the least lower end, over the
    owner's rows. At least 95 % of such ends lie below the least error, as that of the closest row
    does.

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
        """The least error of unbiased guesses, in the attributes' units, [rows, k].

        Of an owner's rows the closest.
        """
        return self.errors_by_row(information).amin(dim=2)

    def errors_by_row(self, information: Tensor) -> Tensor:
        """The same in each of an owner's K rows, [rows, k, K].

        Args:
            information: I_jj, [rows, d of z]; 0 in rows that an owner does not have.
        """
        attribute = np.zeros(len(self.coordinates), np.int64)
        for number, own in enumerate(self.columns):
            attribute[own] = number
        k, many = len(self.columns), int(self.rows.max(initial=0)) + 1
        cells = torch.as_tensor(
            attribute[self.places] * many + self.rows, device=information.device
        )
        by_level = information / torch.as_tensor(self.scales[self.places]).to(information) ** 2
        trace = information.new_zeros(len(information), k * many).index_add_(1, cells, by_level)
        factors = self.directions / np.sqrt([len(own) for own in self.columns])  # r/√m
        return (
            torch.as_tensor(factors).to(information)[:, None]
            * trace.unflatten(1, (k, many)).rsqrt()
        )

    def with_levels(self, spread: Spread) -> AttributeTable:
        """The table with facts from the data about its levels: the distance of values, whether one
        always holds.

        Raises:
            ValueError: A column of a group takes more than two values, or several levels hold at
                once.
        """
        two_values, shares, width = (
            level_shares(spread),
            _level_shares(spread),
            spread.high - spread.low,
        )
        scales, directions = self.scales.copy(), self.directions.copy()
        for place, own in enumerate(self.columns):
            if len(own) == 1:
                continue
            where = f"attribute_groups[{self.names[place]!r}]"
            many = ", ".join(
                repr(self.coordinates[j]) for j in own if math.isnan(two_values[j]) and width[j] > 0
            )
            if many:
                raise ValueError(f"{where}: {many} takes more than two values; leave it out")
            together = float(shares[own].sum())
            if together > 1 + _EXACT:
                raise ValueError(
                    f"{where}: on average {together:.3g} of its levels hold at once; "
                    "they are not levels of one attribute"
                )
            scales[own] = 1 / np.where(width[own] > 0, width[own], 1.0)
            directions[place] = len(own) - (together >= 1 - _EXACT)
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
                held = shares[own]
                rows.append((math.nan, math.sqrt((held * (1 - held)).mean()), math.nan, math.nan))
                levels[name] = dict(
                    zip((self.coordinates[j] for j in own), held.tolist(), strict=True)
                )
                if 1 - held.sum() > _EXACT:
                    levels[name][NO_LEVEL] = float(1 - held.sum())
                continue
            j = own[0]
            given = np.asarray([spread.mean[j], spread.low[j], spread.high[j]])
            # a negative scale exchanges the ends
            mean, *ends = (given * self.scales[j] + self.offsets[j]).tolist()
            rows.append((mean, float(spread.std[j] * abs(self.scales[j])), min(ends), max(ends)))
            if not math.isnan(two_values[j]):
                share = float(two_values[j])
                levels[name] = {f"{ends[0]:.6g}": 1 - share, f"{ends[1]:.6g}": share}
        return Spread(*np.asarray(rows, dtype=np.float64).reshape(-1, 4).T), levels

    def read(self, leakage: Leakage) -> Attributes:
        """How well each attribute of every example could be inferred."""

        def errors(leakage: Leakage, rows: Tensor) -> dict[str, Tensor]:
            """The least errors and their lower ends, [rows, k] each."""
            fil = leakage.get_attribute_fil(rows)
            ends = {"error": fil.value, "error_low": fil.interval(0.95)[1]}
            squares = {name: eta.double().square() for name, eta in ends.items()}
            found = {
                name: self.errors(value.nan_to_num(nan=0.0, posinf=math.inf)).float()
                for name, value in squares.items()
            }
            # nothing is known of any of an attribute's coordinates, or nothing but zeros
            untold = self.errors(squares["error"].isnan().double()).isfinite()
            found["error"] = found["error"].masked_fill(found["error"].isinf() & untold, math.nan)
            return found

        found = leakage.by_parts(errors)
        return Attributes(self.names, self.units, found["error"], found["error_low"])

    def records(
        self, leakage: Leakage, passes: DatasetPasses, columns: Mapping[str, np.ndarray]
    ) -> Records | None:
        """The attributes of the most exposed examples and of typical ones.

        None for more than 64 attributes.

        Args:
            leakage: The run's results, by which an owner's closest row is chosen.
            passes: Reads the data set.
            columns: With η̄ ("fil"), [n]; NaN: not measured.
        """
        fil = columns["fil"]
        rows, _ = most_exposed_and_typical(fil, ~np.isnan(fil), RECORDED_EXAMPLES)
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
                values[:, number] = (
                    table[np.arange(len(rows)), places] * self.scales[j] + self.offsets[j]
                )
        return Records(rows, values)


def attribute_table(
    num_coordinates: int,
    attribute_names: Sequence[str] | None = None,
    attribute_units: Sequence[str] | None = None,
    attribute_scales: Mapping[str, Scale] | None = None,
    attribute_groups: Mapping[str, Sequence[str]] | None = None,
) -> AttributeTable:
    """The table, after all arguments are checked; ``save_run`` describes them.

    Raises:
        ValueError: A name that does not exist, one in two groups, a scale that is 0 or not finite,
            too few names.
        TypeError: A scale without its unit.
    """
    d = num_coordinates
    for what, given in (("attribute_names", attribute_names), ("attribute_units", attribute_units)):
        if given is not None and len(given) != d:
            raise ValueError(
                f"{what} has {len(given or ())} entries for {d} private coordinates; give one each"
            )
    coordinates = (
        [f"coordinate {j}" for j in range(d)] if attribute_names is None else list(attribute_names)
    )
    units = [""] * d if attribute_units is None else list(attribute_units)
    group_of = _group_of(attribute_groups or {}, coordinates)

    factors, offsets = np.ones(d), np.zeros(d)
    for name, scale in (attribute_scales or {}).items():
        where = f"attribute_scales[{name!r}]"
        j = _place_of(name, coordinates, where)
        if j in group_of:
            raise ValueError(
                f"{where}: it is a level of {group_of[j]!r}, whose levels are shares; leave it out"
            )
        units[j], factors[j], offsets[j] = _checked_scale(where, scale)

    members: dict[str | int, list[int]] = {}  # by group, or by coordinate
    for j in range(d):
        members.setdefault(group_of.get(j, j), []).append(j)
    return AttributeTable(
        coordinates,
        [key if isinstance(key, str) else coordinates[key] for key in members],
        ["" if isinstance(key, str) else units[key] for key in members],
        list(members.values()),
        factors,
        offsets,
        np.asarray([max(1, len(own) - 1) for own in members.values()]),
        np.arange(d),
        np.zeros(d, dtype=np.int64),
    )


def _checked_scale(where: str, scale: Scale) -> tuple[str, float, float]:
    """Unit, scale and offset of an attribute."""
    if not isinstance(scale, tuple | list) or len(scale) not in (2, 3):
        raise TypeError(
            f"{where} = {scale!r} must be (unit, scale) or (unit, scale, offset): ('years', 14.2)"
        )
    unit, factor, offset = (*scale, 0.0)[:3]
    if not (factor != 0 and math.isfinite(factor) and math.isfinite(offset)):
        raise ValueError(
            f"{where} = {scale!r}: the scale must be finite and not 0, the offset finite"
        )
    return unit, factor, offset


def _group_of(groups: Mapping[str, Sequence[str]], coordinates: Sequence[str]) -> dict[int, str]:
    """The group of each coordinate that is a level of one."""
    group_of: dict[int, str] = {}
    for group, levels in groups.items():
        where = f"attribute_groups[{group!r}]"
        for level in levels:
            j = _place_of(level, coordinates, where)
            if j in group_of:
                raise ValueError(
                    f"{where} names {level!r}, which {group_of.get(j)!r} already has; leave one out"
                )
            group_of[j] = group
    return group_of


def _place_of(name: str, coordinates: Sequence[str], where: str) -> int:
    """Which coordinate has this name."""
    if name not in coordinates:
        raise ValueError(f"{where}: {name!r} is not an attribute{nearest(str(name), coordinates)}")
    return coordinates.index(name)


def attributes_tracked(leakage: Leakage) -> bool:
    """Whether Fisher information was kept by coordinate."""
    return not {"diagonal", "fim"}.isdisjoint(leakage.ledger.sums)


def of_any_row(training: PrivateTraining, **named: Any) -> AttributeTable:
    """The table of a run by owner: one attribute for all of an owner's rows ("dose, any visit").

    Neither names nor their number depend on how many rows anybody has.

    Raises:
        ValueError: Some levels of a one-hot attribute are shared by an owner's rows, and others are
            not.
    """
    slots: Any = training.passes.examples([0]).layout.slots
    keys = list(dict.fromkeys(slot.key for slot in slots))
    shared = dict(
        sorted(((keys.index(slot.key), j), slot.shared) for slot in slots for j in slot.columns)
    )
    of_row, once = {column: place for place, column in enumerate(shared)}, list(shared.values())
    table = attribute_table(len(once), **named)

    # where each coordinate belongs, and what all rows share
    owns = [
        (of_row[keys.index(slot.key), j], row)
        for slot in slots
        for row in slot.rows
        for j in slot.columns
    ]
    names = []
    for name, own in zip(table.names, table.columns, strict=True):
        kinds = {once[j] for j in own}
        if len(kinds) != 1:
            raise ValueError(
                f"attribute_groups[{name!r}]: rows share some of its levels; share all of them"
            )
        names.append(
            name
            if kinds == {True}
            else f"{name}, any {training.run.options.accounting.unit_names[1]}"
        )
    places, rows = np.asarray(owns).T
    return replace(table, names=names, places=places, rows=rows)


def tracked_table(
    training: PrivateTraining, leakage: Leakage, named: Mapping[str, Any], *, with_texts: bool
) -> AttributeTable | None:
    """The attributes to save.

    None if they were not tracked, or, with a warning, if there are too many of them.

    Coordinates of words have no names; the words identify them.

    Args:
        training: The run.
        leakage: Its results.
        named: Options of :func:`attribute_table`, for a row where the run is by owner.
        with_texts: Whether words are saved.
    """
    by_row = training.run.max_rows is not None and training.run.options.accounting.by_owner
    table = (
        of_any_row(training, **named)
        if by_row
        else attribute_table(leakage.num_coordinates, **named)
    )
    given = ", ".join(name for name, value in named.items() if value is not None)
    if not attributes_tracked(leakage):
        if given:
            raise ValueError(
                f"{given} were given, but attributes were not tracked: track=('diagonal',)"
            )
        return None
    if with_texts and not given:
        return None
    if len(table.names) <= _MOST_ATTRIBUTES:
        return table
    warnings.warn(
        f"attributes are not saved: a run file names {_MOST_ATTRIBUTES:,} of them at most, and "
        f"there are {len(table.names):,}; read them with engine.get_attribute_fil(ids)",
        stacklevel=5,
    )
    return None


def baselines(blind: BlindGuess, table: AttributeTable | None) -> Baselines:
    """The error of a blind guess of inputs, and of attributes if there are any.

    The squared error of a level's share, Σ(x − p)² over a class of n, is n·p(1 − p)·w²: levels
    count as coordinates do.
    """
    d = len(blind.everybody.spread.std)
    told = blind.knows, blind.errors([range(d)], np.ones(d))[:, 0]
    if table is None:
        return Baselines(Spread(*np.zeros((4, 0))), {}, *told, np.zeros((1, 0)))
    of_z = [np.flatnonzero(np.isin(table.places, own)).tolist() for own in table.columns]
    spread = table.spread(blind.everybody.pooled(table.places).spread)
    return Baselines(*spread, *told, blind.errors(of_z, table.scales[table.places]))


def _level_shares(spread: Spread) -> np.ndarray:
    """How often each level holds, [d].

    A level that never changes holds always if it is 1, and otherwise never.
    """
    shares = level_shares(spread)
    return np.where(np.isnan(shares), np.abs(spread.mean - 1) < _EXACT, shares)
