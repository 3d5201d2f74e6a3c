"""Thresholds that a run has to keep, as a TOML file."""

from __future__ import annotations

import difflib
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from importlib import resources
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["TEMPLATE", "Policy", "PolicyError", "load_policy", "nearest", "parse_policy"]

TEMPLATE = (resources.files("torchfil.gate") / "policy.toml").read_text(encoding="utf-8")
_TABLES = {"min_attribute_error": "attribute", "attribute_spread": "attribute", "max_true_positive_rate": "question"}
_SHARES = (
    "max_share_exposed",
    "max_share_of_concern",
    "max_share_spared",
    "max_share_not_measured",
    "at_false_positive_rate",
    "max_gain_over_guessing",
)
# a policy without any of these lets every run pass that was measured
_LIMITS = (
    "min_error_share",
    "max_share_exposed",
    "min_mse_bound",
    "max_share_of_concern",
    "min_attribute_error_share",
    "min_attribute_error",
    "max_gain_over_guessing",
    "max_true_positive_rate",
    "max_epsilon",
    "max_individual_epsilon",
    "max_group_disparity",
    "max_share_spared",
)


class PolicyError(ValueError):
    """A policy cannot be read, or asks for what the run does not have."""


@dataclass(frozen=True)
class Policy:
    """Thresholds; None: not asked for, while those with a number always apply. ``TEMPLATE`` explains each."""

    min_error_share: float | None = None
    max_share_exposed: float | None = None
    blind_error: float | None = None
    min_mse_bound: float | None = None
    mse_bound_of_concern: float | None = None
    max_share_of_concern: float | None = None
    min_attribute_error_share: float | None = None
    attribute_spread: Mapping[str, float] = field(default_factory=dict)
    min_attribute_error: Mapping[str, float] = field(default_factory=dict)
    max_gain_over_guessing: float | None = None
    max_true_positive_rate: Mapping[str, float] = field(default_factory=dict)
    at_false_positive_rate: float = 0.01
    max_epsilon: float | None = None
    max_individual_epsilon: float | None = None
    max_group_disparity: float | None = None
    min_group_size: int = 10
    min_attacks: int = 0
    max_violated_bounds: int = 0
    max_share_spared: float | None = None
    max_share_not_measured: float = 0.0
    max_examples_missed: int = 0
    allow_seeded_noise: bool = False

    def __post_init__(self) -> None:
        for name in _SHARES:
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 1:
                raise PolicyError(f"{name} = {value} must be a share, between 0 and 1")
        numbers = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in _TABLES}
        for table in _TABLES:
            numbers |= {f"{table}.{name}": value for name, value in getattr(self, table).items()}
        for name, value in numbers.items():
            if value is not None and not value >= 0:
                raise PolicyError(f"{name} = {value} must not be negative")
        for name, value in {"blind_error": self.blind_error, **self.attribute_spread}.items():
            if value is not None and not 0 < value < math.inf:
                raise PolicyError(f"{name} = {value}: what a blind guess errs by must be positive and finite")
        if (self.mse_bound_of_concern is None) != (self.max_share_of_concern is None):
            raise PolicyError("mse_bound_of_concern and max_share_of_concern belong together; give both or neither")


def load_policy(path: str | os.PathLike[str]) -> Policy:
    """The policy of a TOML file.

    Raises:
        PolicyError: The file is missing or no TOML, has unknown keys or values of the wrong kind, or limits nothing.
    """
    where = Path(path)
    try:
        policy = parse_policy(tomllib.loads(where.read_text(encoding="utf-8")))
        _check_limits(policy)
        return policy
    except PolicyError as error:
        raise PolicyError(f"{where}: {error}") from error
    except FileNotFoundError as error:
        raise PolicyError(f"no policy {where}; `torchfil gate --init` writes a commented one") from error
    except IsADirectoryError as error:
        raise PolicyError(f"{where} is a folder, not a policy; name the TOML file in it") from error
    except UnicodeDecodeError as error:
        raise PolicyError(f"{where} is no text in UTF-8, which TOML asks for; save it as UTF-8") from error
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise PolicyError(f"{where} cannot be read as TOML: {error}") from error


def parse_policy(values: Mapping[str, Any]) -> Policy:
    """The policy with these values; unknown keys are refused with the nearest known one."""
    defaults = {f.name: f.default for f in fields(Policy)}
    for name, value in values.items():
        if name not in defaults:
            raise PolicyError(f"unknown key {name!r}{nearest(name, list(defaults))}")
        if name in _TABLES:
            wrong = not isinstance(value, Mapping) or not all(_is_number(v) for v in value.values())
            expected = f"a table of numbers by {_TABLES[name]}"
        elif isinstance(defaults[name], bool):
            wrong, expected = not isinstance(value, bool), "true or false"
        elif isinstance(defaults[name], int):
            wrong, expected = not isinstance(value, int) or isinstance(value, bool), "a whole number"
        else:
            wrong, expected = not _is_number(value), "a number"
        if wrong:
            raise PolicyError(f"{name} = {value!r} must be {expected}")
    return Policy(**values)


def _check_limits(policy: Policy) -> None:
    """Refuse a policy that every run passes that was measured at all."""
    if not any(getattr(policy, name) not in (None, {}) for name in _LIMITS):
        raise PolicyError(
            "the policy limits nothing, so that every run would pass; set at least one of "
            f"{', '.join(_LIMITS)} (`torchfil gate --init` writes a commented policy)"
        )


def nearest(name: str, names: Sequence[str]) -> str:
    """The end of an error message: which of the names looks most alike, or which there are.

    Example:
        >>> nearest("aeg", ["age", "sex"]), nearest("height", ["age", "sex"])
        ("; did you mean 'age'?", "; there are 'age', 'sex'")
    """
    alike = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    if alike:
        return f"; did you mean {alike[0]!r}?"
    shown = ", ".join(repr(known) for known in names[:6])
    return f"; there are {shown}{' …' if len(names) > 6 else ''}" if names else ""


def _is_number(value: Any) -> bool:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    try:
        return not math.isnan(value)
    except OverflowError:  # a whole number beyond all floats
        return False
