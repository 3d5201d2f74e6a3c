"""Thresholds that a run has to keep, as a TOML file."""

from __future__ import annotations

import difflib
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["TEMPLATE", "Policy", "PolicyError", "load_policy", "nearest", "parse_policy"]


class PolicyError(ValueError):
    """A policy cannot be read, or asks for what the run does not have."""


@dataclass(frozen=True)
class Policy:
    """Thresholds; None: not asked for, while those with a number always apply. ``TEMPLATE`` explains each."""

    min_mse_bound: float | None = None
    mse_bound_of_concern: float | None = None
    max_share_of_concern: float | None = None
    min_attribute_error: Mapping[str, float] = field(default_factory=dict)
    max_epsilon: float | None = None
    max_individual_epsilon: float | None = None
    max_group_disparity: float | None = None
    min_group_size: int = 10
    max_violated_bounds: int = 0
    max_share_not_measured: float = 0.0
    max_examples_missed: int = 0

    def __post_init__(self) -> None:
        for name in ("max_share_of_concern", "max_share_not_measured"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 1:
                raise PolicyError(f"{name} = {value} must be a share, between 0 and 1")
        numbers = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "min_attribute_error"}
        numbers |= {f"min_attribute_error.{name}": value for name, value in self.min_attribute_error.items()}
        for name, value in numbers.items():
            if value is not None and not value >= 0:
                raise PolicyError(f"{name} = {value} must not be negative")
        if (self.mse_bound_of_concern is None) != (self.max_share_of_concern is None):
            raise PolicyError("mse_bound_of_concern and max_share_of_concern belong together; give both or neither")


def load_policy(path: str | os.PathLike[str]) -> Policy:
    """The policy of a TOML file.

    Raises:
        PolicyError: The file is missing or no TOML, has unknown keys, or values of the wrong kind.
    """
    where = Path(path)
    try:
        return parse_policy(tomllib.loads(where.read_text(encoding="utf-8")))
    except PolicyError as error:
        raise PolicyError(f"{where}: {error}") from error
    except FileNotFoundError as error:
        raise PolicyError(f"no policy {where}; `torchfil gate --init` writes a commented one") from error
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise PolicyError(f"{where} cannot be read as TOML: {error}") from error


def parse_policy(values: Mapping[str, Any]) -> Policy:
    """The policy with these values; unknown keys are refused with the nearest known one."""
    defaults = {f.name: f.default for f in fields(Policy)}
    for name, value in values.items():
        if name not in defaults:
            raise PolicyError(f"unknown key {name!r}{nearest(name, list(defaults))}")
        if name == "min_attribute_error":
            wrong = not isinstance(value, Mapping) or not all(_is_number(v) for v in value.values())
            expected = "a table of numbers by attribute"
        elif isinstance(defaults[name], int):
            wrong, expected = not isinstance(value, int) or isinstance(value, bool), "a whole number"
        else:
            wrong, expected = not _is_number(value), "a number"
        if wrong:
            raise PolicyError(f"{name} = {value!r} must be {expected}")
    return Policy(**values)


def nearest(name: str, names: Sequence[str]) -> str:
    """The end of an error message: which of the names looks most alike."""
    alike = difflib.get_close_matches(name, names, n=1, cutoff=0.0)
    return f"; did you mean {alike[0]!r}?" if alike else ""


def _is_number(value: Any) -> bool:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    try:
        return not math.isnan(value)
    except OverflowError:  # a whole number beyond all floats
        return False


TEMPLATE = """\
# A policy for `torchfil gate RUN --policy policy.toml`. Remove or comment out what you do not ask for.
# Left out, max_violated_bounds, max_share_not_measured and max_examples_missed still apply, at their strictest: 0.
# Rules on single examples take the conservative end of every 95 % interval.

# No example's MSE bound may be smaller. Per private coordinate, in the squared unit of the inputs: an attacker who
# knows everything else guesses a coordinate with at least this mean squared error.
min_mse_bound = 0.01

# At most this share of the examples may have an MSE bound under that of concern.
mse_bound_of_concern = 0.05
max_share_of_concern = 0.05

# Differential privacy: the run's ε, and the largest of the examples' own ε (output-specific: an estimate from one run).
max_epsilon = 8.0
# max_individual_epsilon = 4.0

# The median Fisher information loss of one group over that of another, in every grouping that was saved with the
# run. Fails where the run was saved without groups, or where a grouping has fewer than two groups to compare.
# max_group_disparity = 2.0
# Groups with fewer measured examples are not compared. Left out, it is 10.
min_group_size = 10

# For how many examples an attack may have beaten the bound beyond chance (more than 0: look into it).
# Left out, it is 0: one such example fails.
max_violated_bounds = 0

# Examples that no batch drew have not been measured, nor spared. Poisson sampling at rate q leaves out a share of
# (1 - q)^steps; longer runs, or averages over runs, leave out fewer.
# Left out, it is 0: one example that was not measured fails.
max_share_not_measured = 0.01

# Examples that took part in steps that were not measured (engine.paused): their bounds are no guarantees.
# Left out, it is 0: one such example fails.
max_examples_missed = 0

# The least error of a guess of an attribute, in its own unit, by the names given to save_run.
# [min_attribute_error]
# age = 5.0
"""
