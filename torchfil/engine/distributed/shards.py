"""Models whose weights are sharded over the ranks (FSDP2, ``fully_shard``): the whole model is gathered for a step.

Each rank keeps its part of every weight, of its gradient and of the optimizer's state. Fisher information needs two
backward passes through all layers, but FSDP's hooks free a layer's weights after the first one. So all passes of the
engine run on a copy of the model without FSDP, whose weights are gathered when a step begins and freed when it ends.
Sums of clipped gradients are added over the ranks, and each rank keeps its part.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from torchfil.engine.replica import Replica, is_plain
from torchfil.utils.errors import require

_HOOKS = [name for name in vars(nn.Module()) if name.endswith("_hooks")]
_OF_FSDP = ("__composable_api_state_key", "_is_fsdp_managed_module", "_fsdp_use_orig_params")


def is_sharded(module: nn.Module) -> bool:
    """Whether weights of the module are split over several ranks.

    Example:
        >>> is_sharded(nn.Linear(2, 1))
        False
    """
    parts = (*module.modules(), *module.parameters())
    return any(isinstance(part, FSDPModule | FullyShardedDataParallel | DTensor) for part in parts)


def check_sharded(module: nn.Module, num_ranks: int) -> None:
    """Raise for ways to shard a model in which a step would differ from the accounting.

    Args:
        module: A model for which :func:`is_sharded` is True.
        num_ranks: The number of processes; each draws its own examples.
    """
    remedy = "Use FSDP2: torch.distributed.fsdp.fully_shard for each block, then for the model."
    first = any(isinstance(part, FullyShardedDataParallel) for part in module.modules())
    require(not first, f"FullyShardedDataParallel (FSDP1) flattens the weights of several layers. {remedy}")
    other = f"the weights are sharded, but not by FSDP: each rank draws its own examples. {remedy}"
    require(any(_fsdp_modules(module)), other)

    # what FSDP's hooks do to weights and inputs, the accounting's own passes do not
    for part in _fsdp_modules(module):
        policy = part._get_fsdp_state()._mp_policy
        casts = f"mp_policy={policy} casts inside FSDP's hooks, which the accounting's passes do not run"
        remedy = "Leave it out and call the model under torch.autocast(dtype=torch.bfloat16)."
        require(policy.param_dtype is None and policy.output_dtype is None, f"{casts}. {remedy}")
        part.reshard()  # a pass without a gradient leaves the outermost weights gathered

    # each rank's gradients must reach every rank's shard once
    for name, value in module.named_parameters():
        fits = not value.requires_grad  # a frozen weight is the same on all ranks
        if isinstance(value, DTensor):
            *outer, last = value.placements
            replicated = all(isinstance(placement, Replicate) for placement in outer)
            fits = value.device_mesh.size() == num_ranks and replicated and isinstance(last, Shard | Replicate)
        remedy = "call fully_shard on the whole model after its blocks, without ignored_params=, with a mesh of all"
        unshared = f"{name} is trained but not sharded over all {num_ranks} ranks, each of which draws its own examples"
        require(fits, f"{unshared}: {remedy} ranks in which all dimensions except the last replicate")


def _fsdp_modules(module: nn.Module) -> Iterator[Any]:
    yield from (part for part in module.modules() if isinstance(part, FSDPModule))


def without_shards(module: nn.Module) -> nn.Module:
    """The module itself; for a sharded one, a copy of its structure without FSDP, whose weights are still missing.

    The copy has the modules' own classes and the user's hooks, and shares buffers and weights that are not sharded. A
    sharded weight is a parameter of the whole shape that holds NaN and takes no memory.

    Args:
        module: Any module; a sharded one has its weights in parts.
    """
    if not is_sharded(module):
        return module
    memo: dict[int, Any] = {id(value): value for value in (*module.parameters(), *module.buffers())}
    for value in module.parameters():
        if isinstance(value, DTensor):
            memo[id(value)] = nn.Parameter(_nothing(value), value.requires_grad)
    parts = list(module.modules())
    for part in parts:
        kind = type(part)
        if issubclass(kind, FSDPModule):  # a class made by FSDP, with the user's class as a base
            kind = kind.__mro__[getattr(kind, "_orig_cls_mro_index", 2)]
        memo[id(part)] = object.__new__(kind)

    # all modules are in the memo, so that attributes that refer to a module refer to its copy
    for part in parts:
        own = {
            name: copy.deepcopy(value, memo)
            for name, value in vars(part).items()
            if name not in (*_HOOKS, "_buffers") and not name.startswith(_OF_FSDP)
        }
        own |= {name: OrderedDict(_own_hooks(vars(part)[name], name)) for name in _HOOKS}
        vars(memo[id(part)]).update(own, _buffers=part._buffers)
    whole: nn.Module = memo[id(module)]
    return whole


def _own_hooks(hooks: dict[int, Any], name: str) -> Iterator[tuple[int, Any]]:
    """The hooks of calls that FSDP did not register; none of state dicts."""
    for key, hook in hooks.items():
        if "state_dict" not in name and not (getattr(hook, "__module__", None) or "").startswith("torch.distributed."):
            yield key, hook


def _nothing(value: Tensor) -> Tensor:
    """NaN in the shape of a tensor, without using its memory."""
    return torch.full((), float("nan"), dtype=value.dtype, device=value.device).expand(value.shape)


def part_like(whole: Any, like: Any) -> Any:
    """This rank's part of a tensor that is the same on all ranks; anything else, and without sharding, all of it.

    Args:
        whole: The tensor.
        like: A DTensor of its shape, with the sharding of the result.
    """
    if not isinstance(like, DTensor) or not isinstance(whole, Tensor) or like.shape != whole.shape:
        return whole
    return distribute_tensor(whole.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


class ShardedReplica(Replica):
    """A :class:`Replica` of a sharded module; ``live`` is the copy without FSDP, which has weights during a step.

    Args:
        module: The user's module.
    """

    def __init__(self, module: nn.Module) -> None:
        whole = without_shards(module)
        super().__init__(whole)
        self._sharded = module
        self._weights_here = False
        self._twins = list(zip(module.modules(), whole.modules(), strict=True))
        weights = zip(module.parameters(), whole.parameters(), strict=True)
        self._shards = [(part, own) for part, own in weights if isinstance(part, DTensor)]

    def gather(self) -> bool:
        """Gather all weights, and bring the modules up to date with the user's (collective unless already done)."""
        for module, copied in self._twins:
            for name, value in vars(module).items():
                if is_plain(value) and not name.startswith(_OF_FSDP):
                    vars(copied)[name] = value
        if self._weights_here:
            return False
        self._reshard()
        with torch.no_grad():
            for part, own in self._shards:
                own.data = part.full_tensor()
                own.requires_grad_(part.requires_grad)
        self._weights_here = True
        return True

    def free_weights(self) -> None:
        """Free the weights; each rank keeps its part."""
        for part, own in self._shards:
            own.data, own.grad = _nothing(part), None
        self._weights_here = False
        self._reshard()

    def _reshard(self) -> None:
        """Free what FSDP has gathered for passes without a gradient; it would miss the update of these weights."""
        for part in _fsdp_modules(self._sharded):
            part.reshard()
