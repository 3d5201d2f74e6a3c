"""From private coordinates to the attributes of a run file: names, units, scales, and one-hot levels combined.

A coordinate x_j that was standardised for training is reported in its own unit as scale · x_j + offset, and its error
as |scale|/sqrt(I_jj). The levels of a one-hot attribute are **one** attribute. Let w_j be the distance between the two
values of a column, p_j the share of examples that have level j, and T = Σ_j w_j² I_jj the trace of the m levels'
information. An unbiased guess of the levels, each 0 or 1, is off by at least

    sqrt( r² / (m T) )      (root mean square over levels; r = m − 1 if every example has one of the levels, else m),

because tr(I⁻¹) ≥ r²/tr(I) on the r directions in which levels can change. A blind guess answers with the shares, and is
off by sqrt( Σ_j p_j(1 − p_j) / m ).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchfil.report.policy import nearest
from torchfil.report.saved_run import Spread
from torchfil.report.yardsticks import level_shares

__all__ = ["AttributeGroups", "AttributeScales", "AttributeTable", "attribute_table", "with_levels"]

AttributeScales = Mapping[str, tuple[str, float] | tuple[str, float, float]]
AttributeGroups = Mapping[str, Sequence[str]]

NO_LEVEL = "none of these"
_EXACT = 1e-6  # shares that sum to 1 up to rounding


@dataclass(frozen=True)
class _Attribute:
    """One attribute: a coordinate with its scale, or several coordinates, the levels of one."""

    name: str
    unit: str
    columns: tuple[int, ...]
    scale: float = 1.0
    offset: float = 0.0

    @property
    def is_group(self) -> bool:
        return len(self.columns) > 1


@dataclass(frozen=True, eq=False)
class AttributeTable:
    """The attributes of a run, in the order of their first coordinates.

    Attributes:
        coordinates: The names of the d private coordinates.
        attributes: The attributes made from them.
        widths: For each coordinate, the distance between its two values; 1 if it is not a level, [d].
        directions: r of each group.
    """

    coordinates: list[str]
    attributes: list[_Attribute]
    widths: np.ndarray
    directions: dict[str, int] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        """The names of the k attributes."""
        return [each.name for each in self.attributes]

    @property
    def units(self) -> list[str]:
        """The units of the k attributes; "" if there is none."""
        return [each.unit for each in self.attributes]

    def errors(self, information: Tensor) -> Tensor:
        """The least error of unbiased guesses, in the attributes' units, [rows, k].

        Args:
            information: I_jj, [rows, d].
        """
        first = [each.columns[0] for each in self.attributes]
        scales = torch.tensor([abs(each.scale) for each in self.attributes], dtype=information.dtype)
        errors = scales.to(information.device) * information[:, first].rsqrt()
        for place, each in enumerate(self.attributes):
            if each.is_group:
                widths = torch.as_tensor(self.widths[list(each.columns)]).to(information)
                trace = (information[:, list(each.columns)] * widths**2).sum(dim=1)
                errors[:, place] = self.directions[each.name] * (len(each.columns) * trace).rsqrt()
        return errors

    def spread(self, spread: Spread) -> tuple[Spread, dict[str, dict[str, float]]]:
        """The attributes' own spread, [k] each, and the shares of levels by categorical attribute.

        Args:
            spread: The coordinates' spread, [d] each.
        """
        shares, rows, levels = level_shares(spread), [], dict[str, dict[str, float]]()
        for each in self.attributes:
            if each.is_group:
                own = _shares_of_group(spread, each)
                levels[each.name] = {self.coordinates[j]: share for j, share in zip(each.columns, own, strict=True)}
                if 1 - sum(own) > _EXACT:
                    levels[each.name][NO_LEVEL] = 1 - sum(own)
                error = math.sqrt(sum(share * (1 - share) for share in own) / len(own))
                rows.append((math.nan, error, math.nan, math.nan))
                continue

            # one coordinate: a negative scale reverses its range
            j = each.columns[0]
            mean, *ends = (
                float(values[j]) * each.scale + each.offset for values in (spread.mean, spread.low, spread.high)
            )
            rows.append((mean, float(spread.std[j]) * abs(each.scale), min(ends), max(ends)))
            if not math.isnan(shares[j]):
                both = (f"{end:.6g}" for end in ends)
                levels[each.name] = dict(zip(both, (1 - float(shares[j]), float(shares[j])), strict=True))
        columns = np.asarray(rows, dtype=np.float64).reshape(-1, 4).T
        return Spread(*columns), levels


def attribute_table(
    num_coordinates: int,
    names: Sequence[str] | None,
    units: Sequence[str] | None,
    scales: AttributeScales | None,
    groups: AttributeGroups | None,
) -> AttributeTable:
    """The table, after all arguments are checked; ``save_run`` describes them.

    Raises:
        ValueError: A name that does not exist, one in two groups, a scale that is 0 or not finite, too few names.
        TypeError: An argument of the wrong type.
    """
    _check_texts(num_coordinates, names, units)
    coordinates = list(names) if names is not None else [f"coordinate {j}" for j in range(num_coordinates)]
    members = _checked_groups(groups or {}, coordinates)
    told = _checked_scales(scales or {}, coordinates, {column: name for name, own in members.items() for column in own})

    first_of = {min(own): name for name, own in members.items()}
    hidden = {column for own in members.values() for column in own}
    attributes = []
    for j, name in enumerate(coordinates):
        unit = units[j] if units is not None else ""
        if j in first_of:
            attributes.append(_Attribute(first_of[j], "", tuple(members[first_of[j]])))
        elif j not in hidden:
            attributes.append(
                _Attribute(name, told[name][0] if name in told else unit, (j,), *told.get(name, ("",))[1:])
            )
    directions = {name: len(own) - 1 for name, own in members.items()}
    return AttributeTable(coordinates, attributes, np.ones(num_coordinates), directions)


def with_levels(table: AttributeTable, spread: Spread) -> AttributeTable:
    """The table with facts from the data about its groups: the distance of values, whether one level always holds.

    Raises:
        ValueError: A column of a group takes more than two values, or several levels hold at once.
    """
    widths, directions = table.widths.copy(), dict(table.directions)
    for each in table.attributes:
        if not each.is_group:
            continue
        columns, shares = list(each.columns), level_shares(spread)
        apart = spread.high - spread.low
        for j in columns:
            if math.isnan(shares[j]) and apart[j] > 0:
                raise ValueError(
                    f"attribute_groups[{each.name!r}]: {table.coordinates[j]!r} takes more than two values, between "
                    f"{spread.low[j]:g} and {spread.high[j]:g}, so it is not a level; leave it out of the group"
                )
        widths[columns] = np.where(apart[columns] > 0, apart[columns], 1.0)
        together = sum(_shares_of_group(spread, each))
        if together > 1 + _EXACT:
            raise ValueError(
                f"attribute_groups[{each.name!r}]: on average {together:.3g} of its levels hold at once; they are not "
                "levels of one attribute. Give them as separate attributes"
            )
        directions[each.name] = len(columns) - (1 if 1 - together <= _EXACT else 0)
    return AttributeTable(table.coordinates, table.attributes, widths, directions)


def _shares_of_group(spread: Spread, group: _Attribute) -> list[float]:
    """How often each level holds; a level that never changes holds always if it is 1, and otherwise never."""
    shares = level_shares(spread)
    return [
        float(shares[j]) if not math.isnan(shares[j]) else float(abs(spread.mean[j] - 1) < _EXACT)
        for j in group.columns
    ]


def _check_texts(d: int, names: Sequence[str] | None, units: Sequence[str] | None) -> None:
    for what, given in (("attribute_names", names), ("attribute_units", units)):
        if given is not None and len(given) != d:
            raise ValueError(f"{what} has {len(given)} entries for {d} private coordinates; give one each, in order")
        strange = [entry for entry in given or () if not isinstance(entry, str)]
        if strange:
            raise TypeError(f"{what} holds {strange[0]!r}, a {type(strange[0]).__name__}; give texts")


def _checked_groups(groups: AttributeGroups, coordinates: list[str]) -> dict[str, list[int]]:
    """For each group, the places of its columns, in order."""
    if not isinstance(groups, Mapping):
        raise TypeError(
            f"attribute_groups is a {type(groups).__name__}; name the attribute: attribute_groups={{'genotype': [...]}}"
        )
    place, taken = {name: j for j, name in enumerate(coordinates)}, dict[str, str]()
    members: dict[str, list[int]] = {}
    for group, columns in groups.items():
        where = f"attribute_groups[{group!r}]"
        if not isinstance(group, str) or isinstance(columns, str) or not isinstance(columns, Sequence):
            raise TypeError(f"{where} = {columns!r} must be a list of attribute names under a name")
        if len(columns) < 2:
            raise ValueError(f"{where} has {len(columns)} columns; a group joins two levels or more")
        for column in columns:
            if column not in place:
                hint = nearest(str(column), coordinates)
                raise ValueError(f"{where} names {column!r}, which is not an attribute{hint}")
            if column in taken:
                raise ValueError(f"{where} names {column!r}, which {taken[column]!r} already has; each has one group")
            taken[column] = group
        members[group] = sorted(place[column] for column in columns)

    # a group may have the name of one of its columns, but not of a column that stays
    for group, own in members.items():
        if group in place and place[group] not in own:
            raise ValueError(f"attribute_groups[{group!r}] has the name of an attribute; name it differently")
    return members


def _checked_scales(
    scales: AttributeScales, coordinates: list[str], group_of: Mapping[int, str]
) -> dict[str, tuple[Any, ...]]:
    """For each attribute, its unit, scale and, if given, offset."""
    if not isinstance(scales, Mapping):
        raise TypeError(
            f"attribute_scales is a {type(scales).__name__}; name the attribute: "
            "attribute_scales={'age': ('years', 14.2, 51.0)}"
        )

    checked = {}
    for name, told in scales.items():
        # the attribute must exist, and must not be a level of a one-hot attribute
        where = f"attribute_scales[{name!r}]"
        if name not in coordinates:
            raise ValueError(f"{where}: there is no such attribute{nearest(str(name), coordinates)}")
        if coordinates.index(name) in group_of:
            raise ValueError(
                f"{where}: it is a level of {group_of[coordinates.index(name)]!r}, whose levels are shares; "
                "leave it out of attribute_scales"
            )

        # a unit, and numbers by which errors can be multiplied
        if not isinstance(told, tuple | list) or len(told) not in (2, 3) or not isinstance(told[0], str):
            raise TypeError(
                f"{where} = {told!r} must be (unit, scale) or (unit, scale, offset), such as ('years', 14.2)"
            )
        if any(isinstance(value, bool) or not isinstance(value, int | float | np.number) for value in told[1:]):
            raise TypeError(f"{where} = {told!r}: scale and offset must be numbers")
        numbers = [float(value) for value in told[1:]]
        if numbers[0] == 0 or not all(map(math.isfinite, numbers)):
            raise ValueError(
                f"{where} = {told!r}: the scale must be finite and not 0, the offset finite; it is what the attribute "
                "was divided by, such as its standard deviation"
            )
        checked[name] = (told[0], *numbers)
    return checked
