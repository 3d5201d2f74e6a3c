"""Why the per-example gradients that Opacus's hooks have formed may differ from plain autograd's."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from torchfil.engine.replica import Replica, buffers_kept
from torchfil.engine.step.forwards import ForwardPass

__all__ = ["why_opacus_differs"]

_MOST_NAMES = 4


def why_opacus_differs(replica: Replica, forwards: Sequence[ForwardPass]) -> str:
    """A known fault of Opacus's rules, if it affects these passes, otherwise the likely cause; with the remedy.

    Opacus 1.6 reshapes a convolution's input as if it were contiguous; if it is not, the gradients are wrong by their
    own size.
    """
    names = _not_contiguous(replica.live, forwards[0]) if forwards else []
    if names:
        return (
            "Opacus's rule for convolutions is wrong if their input is channels last in memory, as in "
            f"{', '.join(names[:_MOST_NAMES])} (a permute, a LayerNorm over channels, or memory_format=channels_last "
            "causes that). Use grad_sample_mode='auto', which needs none of Opacus's rules, or call .contiguous() "
            "before those layers."
        )
    return (
        "Either part of the loss does not go through the model's output (for example a penalty on the weights), or "
        "the model mixes examples, or Opacus's rule for a layer is wrong here: grad_sample_mode='auto' needs none of "
        "its rules."
    )


def _not_contiguous(model: nn.Module, forward: ForwardPass) -> list[str]:
    """The convolutions whose input is not contiguous in a pass over the same inputs, by name."""
    names: list[str] = []
    with contextlib.ExitStack() as stack:
        for name, module in model.named_modules():
            if isinstance(module, nn.Conv2d | nn.Conv3d):

                def note(_module: nn.Module, given: tuple[Any, ...], name: str = name) -> None:
                    if given and not given[0].is_contiguous():
                        names.append(name or "the model")

                stack.callback(module.register_forward_pre_hook(note).remove)
        stack.enter_context(torch.random.fork_rng(devices=range(torch.cuda.device_count())))
        with torch.no_grad(), buffers_kept(model):
            model(*forward.args, **forward.kwargs)
    return names
