"""A norm history that is entered afterwards against one that is kept step by step."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from torchfil.accounting.norms import NormHistory
from torchfil.engine.reading import individual_epsilon


def joined(value: Tensor) -> Tensor:
    """Brings together what one rank has, last norms first: the order in which ranks tell does not matter."""
    return value.flip(0)


@pytest.mark.parametrize("every", [1, 4, 100])
def test_entered_later_is_the_same(every: int) -> None:
    generator = torch.Generator().manual_seed(0)
    plain, shared = NormHistory(30), NormHistory(30, exchange=joined, every=every)
    for step in range(17):
        rows = (torch.rand(30, generator=generator) < 0.3).nonzero().flatten()
        ratio = torch.rand(len(rows), generator=generator)
        noise = 1.0 if step < 9 else 0.8  # the noise changes on the way
        for history in (plain, shared):
            history.step(rows, ratio, noise, 0.3)
            if step in (3, 16):
                history.set_ratios(torch.arange(30), torch.linspace(0.1, 1, 30) / (step + 1))
    assert shared.steps == 17
    assert not shared.is_complete
    shared.enter()
    assert shared.is_complete
    entered = shared.state_dict()
    for name, value in plain.state_dict().items():
        assert torch.equal(torch.as_tensor(value), torch.as_tensor(entered[name])), name
    rows = torch.tensor([0, 13, 29])
    assert torch.equal(individual_epsilon(plain, rows, 1e-5), individual_epsilon(shared, rows, 1e-5))
