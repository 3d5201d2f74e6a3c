"""The result that every attack gives."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from torchfil.attacks.base import AttackResult, make_generator
from torchfil.utils.text import with_progress


def test_tensors_become_arrays_and_lengths_are_checked() -> None:
    result = AttackResult("a", "t", torch.tensor([3, 1]), torch.tensor([0.5, 1.0]), measure="mse", trials=2)
    assert result.ids == [3, 1]
    assert isinstance(result.achieved, np.ndarray)
    with pytest.raises(ValueError, match="standard_error has shape .3. for 2 ids"):
        AttackResult("a", "t", [3, 1], np.ones(2), "mse", 2, standard_error=np.ones(3))
    with pytest.raises(ValueError, match="trials=0 must be at least 1"):
        AttackResult("a", "t", [3], np.ones(1), "mse", 0)


def test_a_seed_or_a_generator() -> None:
    first, second = (torch.rand(3, generator=make_generator(None, 5)) for _ in range(2))
    assert torch.equal(first, second)
    own = torch.Generator()
    assert make_generator(own, None) is own
    assert make_generator(None, None).initial_seed() != make_generator(None, None).initial_seed()
    with pytest.raises(ValueError, match="seed=5 and a generator are both given"):
        make_generator(own, 5)


@pytest.mark.parametrize("progress", [False, True])
def test_progress_leaves_items_alone(progress: bool) -> None:
    assert list(with_progress([1, 2], progress, "counting")) == [1, 2]
