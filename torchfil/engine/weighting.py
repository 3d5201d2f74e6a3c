"""Does a criterion weight the examples of a batch equally? Its gradient shows this; its value hardly does.

With ℓ(batch) the criterion on a whole batch and ℓ_i on example i alone, ∂ℓ(batch)/∂o_i must be ∂ℓ_i/∂o_i times one
number: 1 for a sum, 1/B for a mean. At the start of training all losses are nearly equal, and their mean is the batch's
value whatever the weights; the gradients differ immediately.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchfil.engine.losses import (
    IdentifiedLoss,
    LossMismatchError,
    means_over_tokens,
    output_gradients,
    relative_difference,
    tolerance_of,
    weighted,
)
from torchfil.utils.trees import map_tensors, tensors_of

__all__ = ["averages_over_tokens", "check_equal_weights"]


def check_equal_weights(loss: IdentifiedLoss, outputs: Any, targets: Any) -> bool:
    """Compare the gradient of the criterion's value on a batch with those of its values on single examples.

    Returns:
        Whether it is a mean over the targets of a batch that count, so that an example's weight depends on others.

    Raises:
        LossMismatchError: It is neither the mean nor the sum over examples, nor such a mean.
    """
    outputs = map_tensors(lambda leaf: leaf.detach().requires_grad_(leaf.is_floating_point()), outputs)
    leaves = [leaf for leaf in tensors_of(outputs) if leaf.requires_grad]
    try:
        with torch.enable_grad():
            whole = loss(outputs, targets)
    except Exception:  # it takes only single examples
        return False
    if whole.numel() != 1 or not whole.requires_grad or bool(whole.isinf()):  # a sum in half precision
        return False
    at_batch = torch.autograd.grad(whole.reshape(()), leaves, allow_unused=True, materialize_grads=True)
    alone = [part for part in tensors_of(output_gradients(loss, outputs, targets)) if part.is_floating_point()]
    alone = [part.detach() for part in alone]

    def agrees(weights: Tensor) -> bool:
        return relative_difference(weighted(alone, weights), list(at_batch)) < tolerance_of(leaves[0])

    ones = torch.ones(len(leaves[0]), dtype=torch.float64, device=leaves[0].device)
    if agrees(ones / len(ones)) or agrees(ones):
        return False
    by_tokens = loss.weights(targets)
    others = [by_tokens] if by_tokens is not None else [weights for _, weights in means_over_tokens(targets)]
    if any(agrees(weights / len(ones)) for weights in others):
        return True
    raise LossMismatchError(
        f"the criterion ({loss.name}) has another gradient on this batch than the mean or the sum of its values on "
        "single examples: it weights examples by others of the batch, as class weights with reduction='mean' do, or "
        "mixes them, so no example has its own loss. Use reduction='sum' (divided by the expected batch size if you "
        "like). This step was not taken."
    )


def averages_over_tokens(loss: IdentifiedLoss, outputs: Any, targets: Any) -> bool:
    """Whether a criterion weights examples by tokens, if one of a batch has fewer targets that count (not −100).

    This is tried with two examples and on the CPU, where a criterion that does not support −100 merely raises.
    """
    if loss.weights(targets) is not None or not isinstance(targets, Tensor):
        return False
    if targets.is_floating_point() or targets.ndim < 2 or len(targets) < 2:
        return False
    outputs, targets = map_tensors(lambda leaf: leaf[:2].detach().cpu(), (outputs, targets))
    targets = targets.clone()
    targets[1, targets.shape[1] // 2 :] = -100
    try:
        return check_equal_weights(loss, outputs, targets)
    except Exception:
        return False
