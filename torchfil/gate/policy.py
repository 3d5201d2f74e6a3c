"""Thresholds that a run has to keep, as a TOML file.

What each key means is said in :mod:`torchfil.gate.rules`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import msgspec
from msgspec import Meta

from torchfil.utils.files import check_regular
from torchfil.utils.text import nearest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = [
    "PRESETS",
    "Policy",
    "PolicyError",
    "kind_of",
    "load_policy",
    "nearest",
    "parse_policy",
    "preset",
    "tomllib",
]

Share = Annotated[float, Meta(ge=0, le=1, description="a share, between 0 and 1")]
Number = Annotated[
    float, Meta(ge=0, le=sys.float_info.max, description="a number, 0 or more and finite")
]
Error = Annotated[
    float, Meta(gt=0, le=sys.float_info.max, description="a number, positive and finite")
]
Count = Annotated[int, Meta(ge=0, le=2**63 - 1, description="a whole number, 0 or more")]
Text = Annotated[str, Meta(max_length=2000, description="a text of up to 2,000 characters")]
Level = Annotated[str, Meta(pattern=r"^(off|warn|error)\Z", description='"off", "warn" or "error"')]
Worst = Annotated[str, Meta(pattern=r"^pessimistic\Z", description='"pessimistic", or left out')]
Flag = Annotated[bool, Meta(description="true or false")]

PRESETS = ("default", "research", "clinical", "public-release")


class PolicyError(ValueError):
    """A policy cannot be read, or asks for what the run does not have."""


class Policy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Thresholds; None: not asked for, while those with a number always apply.

    The template explains each.

    ``name`` is how the page calls the policy, by default its file's name. ``declared`` is what
    people state and no run can show (prior, intended use, owner of the decision): the page repeats
    it word for word.

    Values are checked however the policy is made: NaN, a boolean for a number and a number out of
    range are refused.
    """

    name: Text = ""
    extends: Text = ""
    aggregate: Worst | None = None
    min_error_share: Number | None = None
    max_share_exposed: Share | None = None
    blind_error: Error | None = None
    min_attribute_error_share: Number | None = None
    max_gain_over_guessing: Share | None = None
    unit: Annotated[str, Meta(pattern=r"^person\Z", description='"person", or left out')] | None = (
        None
    )
    max_epsilon: Number | None = None
    max_individual_epsilon: Number | None = None
    audited_epsilon_below_claimed: Flag = False
    min_mse_bound: Number | None = None
    mse_bound_of_concern: Number | None = None
    max_share_of_concern: Share | None = None
    max_worsening: Number | None = None
    max_group_disparity: Number | None = None
    min_group_size: Count = 10
    min_attacks: Count = 0
    max_violated_bounds: Count = 0
    max_share_spared: Share | None = None
    max_share_too_few_draws: Share = 0.0
    max_examples_missed: Count = 0
    allow_seeded_noise: Flag = False
    at_false_positive_rate: Share = 0.01
    attribute_spread: dict[str, Error] = {}
    min_attribute_error: dict[str, Number] = {}
    max_true_positive_rate: dict[str, Number] = {}
    levels: dict[str, Level] = {}
    declared: dict[str, Text] = {}

    def __post_init__(self) -> None:
        for field in msgspec.structs.fields(type(self)):
            value = getattr(self, field.name)
            try:
                msgspec.convert(value, field.type)
            except msgspec.ValidationError as error:
                raise PolicyError(
                    f"{field.name} = {value!r} must be {kind_of(field.type)}"
                ) from error
        if (self.mse_bound_of_concern is None) != (self.max_share_of_concern is None):
            raise PolicyError(
                "mse_bound_of_concern and max_share_of_concern belong together; give both or "
                "neither"
            )


# what limits nothing unless a policy sets it
LIMITS = [
    name
    for name in Policy.__struct_fields__
    if name.startswith(("min_", "max_", "unit", "audited_"))
    and isinstance(getattr(Policy(), name), bool | dict | None)
]


def kind_of(annotation: Any) -> str:
    """What a field of a policy takes, in words.

    Example:
        >>> kind_of(Share | None), kind_of(dict[str, Number])
        ('a share, between 0 and 1', 'a table by name, each a number, 0 or more and finite')
    """
    if get_origin(annotation) is dict:
        return f"a table by name, each {kind_of(get_args(annotation)[1])}"
    while not hasattr(annotation, "__metadata__"):
        annotation = get_args(annotation)[0]  # of one that may be None
    return str(annotation.__metadata__[0].description)


def load_policy(path: str | os.PathLike[str]) -> Policy:
    """The policy of a TOML file.

    Raises:
        PolicyError: The file is missing or no TOML, has unknown keys or values of the wrong kind,
            or limits nothing.
    """
    where = Path(path)
    try:
        check_regular(where)
        name = "the policy" if where.stem == "policy" else where.stem
        policy = parse_policy({"name": name, **tomllib.loads(where.read_text(encoding="utf-8"))})
    except FileNotFoundError as error:
        raise PolicyError(
            f"no policy {where}; `torchfil gate --init` writes a commented one"
        ) from error
    except PolicyError as error:
        raise PolicyError(f"{where}: {error}") from error
    except (OSError, ValueError) as error:  # a folder, no UTF-8, no TOML
        raise PolicyError(f"{where} cannot be read as TOML: {error}") from error
    limits = [name for name in LIMITS if policy.levels.get(name) != "off"]
    if all(getattr(policy, name) == getattr(Policy(), name) for name in limits):
        raise PolicyError(
            f"{where}: the policy limits nothing, so that every run would pass; set at least one "
            f"of {', '.join(limits)} (`torchfil gate --init` writes a commented policy)"
        )
    return policy


def parse_policy(values: Mapping[str, object]) -> Policy:
    """The policy with these values over those of the preset that it extends, its tables entry by
    entry.

    Raises:
        PolicyError: A key, told with the nearest known one, or a preset is not known, or a value is
            of the wrong kind.
    """
    for name in values:
        if name not in Policy.__struct_fields__:
            raise PolicyError(f"unknown key {name!r}{nearest(name, Policy.__struct_fields__)}")
    base = tomllib.loads(preset(str(values["extends"]))) if values.get("extends") else {}
    tables = {
        name: base[name] | value
        for name, value in values.items()
        if name in base and isinstance(value, dict)
    }
    return Policy(**{**base, **values, **tables})


def preset(name: str) -> str:
    """One of :data:`PRESETS`, a policy file with a reason for every threshold."""
    if name not in PRESETS:
        raise PolicyError(f"no preset {name!r}{nearest(name, PRESETS)}")
    return (resources.files("torchfil.gate") / "presets" / f"{name}.toml").read_text(
        encoding="utf-8"
    )
