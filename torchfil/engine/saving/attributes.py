"""From private coordinates to the attributes of a run file: names, units, scales, and one-hot levels combined.

A coordinate x_j that was standardised for training is reported in its own unit as scale · x_j + offset, and its error
as |scale|/sqrt(I_jj). The levels of a one-hot attribute are **one** attribute. Let w_j be the distance between the two
values of a column, p_j the share of examples that have level j, and T = Σ_j w_j² I_jj the trace of the m levels'
information. An unbiased guess of the levels, each 0 or 1, is off by at least

    sqrt( r² / (m T) )      (root mean square over levels; r = m − 1 if every example has one of the levels, else m),

because tr(I⁻¹) ≥ r²/tr(I) on the r directions in which levels can change. A blind guess answers with the shares, and is
off by sqrt( Σ_j p_j(1 − p_j) / m ). A plain attribute is the case m = r = 1 with w = 1/scale.
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
from torchfil.gate.policy import nearest
from torchfil.run.baselines import level_shares
from torchfil.run.saved_run import Attributes, Spread, Yardsticks
from torchfil.utils.errors import require

NO_LEVEL = "none of these"
_EXACT = 1e-6  # shares that sum to 1 up to rounding
_LARGEST_ATTRIBUTES = 2**31  # bytes of a table that is mostly empty
_MOST_ATTRIBUTES = 2**15  # whose names and spread fit into a run file's metadata


@dataclass(frozen=True, eq=False)
class AttributeTable:
    """The k attributes of a run, in the order of their first coordinates.

    Attributes:
        coordinates: The names of the d private coordinates.
        names: The names of the attributes.
        units: Their units; "" if there is none.
        columns: The coordinates of each attribute; several are the levels of a one-hot attribute.
        scales: The factor from a coordinate to its attribute, 1/w_j for a level, [d].
        offsets: What is added to it, [d].
        directions: r of each attribute, [k].
    """

    coordinates: list[str]
    names: list[str]
    units: list[str]
    columns: list[list[int]]
    scales: np.ndarray
    offsets: np.ndarray
    directions: np.ndarray

    def errors(self, information: Tensor) -> Tensor:
        """The least error of unbiased guesses, in the attributes' units, [rows, k].

        Args:
            information: I_jj, [rows, d].
        """
        sizes = torch.tensor([len(own) for own in self.columns])
        order = torch.tensor([j for own in self.columns for j in own], device=information.device)
        attribute = torch.arange(len(sizes)).repeat_interleave(sizes).to(information.device)
        scales, directions = (torch.as_tensor(each).to(information) for each in (self.scales, self.directions))
        trace = information.new_zeros(len(information), len(sizes))
        trace.index_add_(1, attribute, (information / scales**2)[:, order])
        return directions * (sizes.to(information) * trace).rsqrt()

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

    def read(self, leakage: Leakage, pixels: np.ndarray | None) -> Attributes:
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
        plain = len(self.names) == len(self.coordinates)
        return Attributes(self.names, self.units, found["error"], low, pixels if plain else None)


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
    )


def _place_of(name: str, coordinates: Sequence[str], where: str) -> int:
    """Which coordinate has this name."""
    if name not in coordinates:
        raise ValueError(f"{where}: {name!r} is not an attribute{nearest(str(name), coordinates)}")
    return coordinates.index(name)


def tracked_table(leakage: Leakage, named: Mapping[str, Any], *, with_texts: bool) -> AttributeTable | None:
    """The attributes to save; None, with a warning, for too many of them, or if the table would be mostly empty.

    Coordinates of words have no names; the words identify them.

    Args:
        leakage: The run's results.
        named: Options of :func:`attribute_table`.
        with_texts: Whether words are saved.
    """
    count, d = leakage.ids.num_examples, leakage.num_coordinates
    table = attribute_table(d, **named)
    given = [name for name, value in named.items() if value is not None]
    if not {"diagonal", "fim"} & leakage.ledger.sums.keys():
        remedy = "but attributes were not tracked: make_private(track=('diagonal',))"
        require(not given, f"{', '.join(given)} were given, {remedy}")
        return None
    if not given and with_texts:
        return None
    reason = None
    if leakage.ledger.chosen and 8 * count * d > _LARGEST_ATTRIBUTES:
        reason = f"a table of {count:,} examples and {d:,} attributes would be mostly empty"
    elif len(table.names) > _MOST_ATTRIBUTES:
        reason = f"a run file names {_MOST_ATTRIBUTES:,} of them at most, and there are {len(table.names):,}"
    if reason is not None:
        remedy = "read them with engine.get_attribute_fil(ids)"
        warnings.warn(f"attributes are not saved: {reason}; {remedy}", stacklevel=5)
    return None if reason is not None else table


def baselines(spread: Yardsticks, table: AttributeTable | None) -> Yardsticks:
    """The error of a blind guess of inputs, and of attributes if there are any, from that of the coordinates."""
    by_attribute = (Spread(*np.zeros((4, 0))), {}) if table is None else table.spread(spread.attributes)
    return Yardsticks(spread.examples, spread.inputs, *by_attribute)


def _level_shares(spread: Spread) -> np.ndarray:
    """How often each level holds, [d]; a level that never changes holds always if it is 1, and otherwise never."""
    shares = level_shares(spread)
    return np.where(np.isnan(shares), np.abs(spread.mean - 1) < _EXACT, shares)
