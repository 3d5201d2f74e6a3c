"""Passes of steps that are not measured: the gradients of a recorded pass, and nothing that leads on to z."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from benchmarks import zoo
from tests.cases import CASES, DEVICE, build, relative_error
from torchfil import Private
from torchfil.clipping import get_clip
from torchfil.fisher.gradients import ExampleGradients, flatten
from torchfil.fisher.operator import ClippedJacobian
from torchfil.fisher.recording import RecordedJacobian, forward_pass

CLIP = get_clip("smooth")


@pytest.mark.parametrize("name", CASES)
def test_as_mapped_gradients(name: str) -> None:
    case = build(name, 5)
    gradients = ExampleGradients.build(case.model, case.loss_fn, case.inputs, case.targets, case.private)
    mapped = ClippedJacobian(gradients, CLIP, 0.5)
    released = RecordedJacobian(gradients, CLIP, 0.5, measured=False)
    begun = forward_pass(gradients, gradients.examples.z.detach().requires_grad_())
    for ours in (released, RecordedJacobian(gradients, CLIP, 0.5, begun, measured=False)):
        assert relative_error(ours.norm, mapped.norm) < 1e-9
        assert relative_error(flatten(ours.clipped_sum()), flatten(mapped.clipped_sum())) < 1e-9
        assert relative_error(ours.losses, mapped.losses) < 1e-9
        assert not ours.norm.requires_grad
        assert all(not call.delta.requires_grad for call in ours.recording.calls)
    assert relative_error(released.products_with(gradients), mapped.products_with(gradients)) < 1e-9


def test_fused_attention_where_nothing_is_differentiated_twice() -> None:
    """torch's kernels are called as the model calls them; with masks of dropout, the plain ones remain."""
    torch.manual_seed(0)
    model = zoo.token_transformer(3, 20, 6, width=8, depth=1, heads=2).to(DEVICE)
    tokens, labels = torch.randint(20, (4, 6), device=DEVICE), torch.randint(3, (4,), device=DEVICE)
    private = Private(submodule="embedding")
    gradients = ExampleGradients.build(model, nn.CrossEntropyLoss(), tokens, labels, private)

    def only_math() -> bool:
        return not torch.backends.cuda.flash_sdp_enabled()

    with gradients.forward_state():
        assert only_math()
    released = replace(gradients, twice=False)
    with released.forward_state():
        assert not only_math()
    masked = replace(released, examples=replace(released.examples, masks=(torch.ones(4, 1, device=DEVICE),)))
    with masked.forward_state():
        assert only_math()
    ours, recorded = (RecordedJacobian(gradients, CLIP, 0.5, measured=measured).norm for measured in (False, True))
    assert relative_error(ours, recorded) < 1e-4
