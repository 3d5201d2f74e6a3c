"""What a checkpoint may hold: kinds, ranges and sizes are checked before any of it is taken.

A checkpoint that comes from others is read without running code. Its values could still be such
that a run fails much later, books a wrong ε, or takes far more memory than the file has bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
import torch
from msgspec import Meta
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from torchfil.engine.optimizer import FILOptimizer
from torchfil.utils.errors import CheckpointError

_Number = Annotated[float, Meta(ge=0, le=1e12)]  # not NaN
_OrInfinite = Annotated[float, Meta(ge=0)]
_Share = Annotated[float, Meta(ge=0, le=1)]
_Count = Annotated[int, Meta(ge=0, le=2**53)]
_Dict = dict[str, Any]  # compared with the run's own, or by torch


def _parts(**kinds: object) -> Any:
    """A dict with these keys, of which any may be missing, and others."""
    return msgspec.defstruct("_Parts", [(name, kind, None) for name, kind in kinds.items()])


_Accountant = _parts(history=list[tuple[_Number, _Share, _Count]], mechanism=str)
_SUMS: Any = {
    "num_examples": _Count,
    "num_coordinates": _Count,
    "track": list[str],
    "questions": _Dict,
    "steps": _Count,
    "missed_steps": _Count,
    "trends": dict[str, Tensor],
    "sums": dict[str, Tensor],
}
_Ledger: Any = _parts(**_SUMS, draw_rate=_Share | None)
_Persons: Any = _parts(**_SUMS, draw_rate=Tensor | None)
_History = _parts(
    anchor=_Number,
    lowest=_OrInfinite,
    noiseless=bool,
    noise_multiplier=_Number,
    sample_rate=_Share,
    steps=_Count,
    levels=Tensor,
    counts=Tensor,
    ratio=Tensor,
    since=Tensor,
)
_Pace = _parts(
    num_probes=_Count,
    rate=_Share,
    spread=_Number,
    level=_Number,
    noted=tuple[Tensor, Tensor] | None,
)
_Run = _parts(
    ledger=_Ledger | None,
    history=_History,
    timeline=_parts(stride=_Count, steps=list[_Count], points=Tensor),
    seed=int,
    pace=_Pace,
    ranks=_Dict | None,
    coordinates_of_rows=Tensor,
    persons=tuple[_Persons, Tensor] | None,
)
_Engine = _parts(
    accountant=_Accountant,
    run=_Run,
    generators=list[_parts(loader=Tensor, canaries=dict[str, Tensor], noise=Tensor, draws=Tensor)],  # type: ignore[misc]
    noise=dict[str, tuple[_Number, _Number]],
    settings=_Dict,
    optimizer=str,
)
_CONTENT = _parts(
    module_state_dict=_Dict,
    fil_engine_state_dict=_Engine,
    random_state=list[_parts(cpu=Tensor, cuda=list[Tensor])],  # type: ignore[misc]
    privacy_accountant_state_dict=_Accountant,
)


def check_content(
    checkpoint: Mapping[str, Any], path: object, optimizer: FILOptimizer | None
) -> None:
    """Refuse what no run has saved: other kinds, impossible numbers, tensors that are not stored in
    full.

    Args:
        checkpoint: As it was read.
        path: Where; for the message.
        optimizer: The private optimizer that continues; None: its state is not taken.

    Raises:
        CheckpointError: The message names the first such value.
    """
    try:
        msgspec.convert(checkpoint, _CONTENT)
        for place, leaf in pytree.tree_flatten_with_path(checkpoint)[0]:
            if (
                isinstance(leaf, Tensor)
                and not isinstance(leaf, DTensor)
                and leaf.layout is torch.strided
                and leaf.untyped_storage().nbytes() < leaf.numel() * leaf.element_size()
            ):
                raise ValueError(f"{pytree.keystr(place)} is larger than what is stored of it")
        state = checkpoint.get("optimizer_state_dict")
        if optimizer is not None and state:
            _check_optimizer(state, optimizer)
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise CheckpointError(
            f"{path} holds what no run saves: {error}. Nothing was loaded: copy it again, or "
            "resume from an earlier checkpoint."
        ) from error


def _check_optimizer(state: Mapping[str, Any], optimizer: FILOptimizer) -> None:
    """Numbers are finite, and what torch's optimizers keep for a parameter has its shape, or
    broadcasts to it.
    """
    for number, (own, found) in enumerate(
        zip(optimizer.param_groups, state["param_groups"], strict=False)
    ):
        for name in found.keys() & own.keys():
            if not all(isinstance(each, int | float) for each in pytree.tree_leaves(own[name])):
                continue
            values = pytree.tree_leaves(found[name])
            fits = all(
                isinstance(each, int | float | Tensor) and 0 <= float(each) <= 1e12
                for each in values
            )
            if not fits:
                raise ValueError(f"{name} of parameter group {number} is {found[name]!r}")
    if not type(optimizer.original_optimizer).__module__.startswith("torch.optim"):
        return
    trained = [p for group in optimizer.param_groups for p in group["params"]]
    for place, kept in state["state"].items():
        for name, value in kept.items():
            if isinstance(value, Tensor):
                shape = trained[place].shape
                sizes = zip(reversed(value.shape), reversed(shape), strict=False)
                fits = len(value.shape) <= len(shape) and all(
                    size in (1, whole) for size, whole in sizes
                )
                if not fits:
                    raise ValueError(
                        f"{name} of parameter {place} has shape {list(value.shape)}, and not "
                        f"{list(shape)}"
                    )
            elif value is not None:
                fits = name == "step" and isinstance(value, int | float) and 0 <= value <= 1e12
                if not fits:
                    raise ValueError(f"{name} of parameter {place} is {value!r}")
