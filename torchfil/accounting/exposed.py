r"""Which examples of a batch deserve more probes than the others.

The lower end that holds for all examples together is decided by few of them, in two ways. The most exposed have to be
known closely; they are those with the largest sums so far. And an example that hardly leaks, until one step makes up
most of its sum, rests on that step's probe alone; such steps are those whose clipped gradient is large beside what the
example has leaked so far. What a step will add is predicted as x = κ‖g̃‖², κ being the batch's ratio of Σ tr I to
Σ‖g̃‖² so far, and x²/(Σ tr I + x) is large where it counts.

Both depend on the past and on the weights, never on the probes of the step, so that measuring such examples anew, with
more probes in place of the first, keeps every sum unbiased. Nothing waits for a GPU.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["exposed_rows"]


def exposed_rows(trace: Tensor, squared_norm: Tensor, present: Tensor, count: int) -> Tensor:
    """The rows of a batch to measure with more probes, [count] or all: half the most exposed, half sudden steps.

    Args:
        trace: Σ tr I of the batch's examples so far, [batch].
        squared_norm: Σ‖g̃‖² of them so far, [batch].
        present: ‖g̃‖² at this step, [batch].
        count: How many.

    Example:
        >>> trace, squares = torch.tensor([9.0, 1.0, 0.1, 0.1]), torch.tensor([9.0, 1.0, 0.1, 0.1])
        >>> exposed_rows(trace, squares, torch.tensor([0.1, 0.1, 0.1, 0.5]), 2).tolist()
        [0, 3]
    """
    if count >= len(trace):
        return torch.arange(len(trace), device=trace.device)
    largest = trace.topk(-(-count // 2)).indices
    ahead = present * trace.sum() / squared_norm.sum().clamp(min=torch.finfo(squared_norm.dtype).tiny)
    sudden = ahead.square() / (trace + ahead).clamp(min=torch.finfo(trace.dtype).tiny)
    sudden = sudden.index_fill(0, largest, -1.0)
    return torch.cat([largest, sudden.topk(count // 2).indices])
