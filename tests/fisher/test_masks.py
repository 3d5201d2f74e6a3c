"""Random numbers of a forward pass: recorded once, the same in every later pass, whatever its
shape.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.cases import DEVICE
from tests.engine.brute_force import random_state
from torchfil.fisher.masks import MaskLayouts, call_and_record_masks, recorded_masks, replayed_masks
from torchfil.utils.errors import UnsupportedModuleError

BATCH, WIDTH = 5, 6
CPU = torch.device("cpu")


def attention(x: Tensor) -> Tensor:
    """One head over two positions."""
    rows = x.unflatten(-1, (2, 3))
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(rows, rows, rows, dropout_p=0.4).flatten(-2)


# What a model may draw, of [batch, 6].
DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda x: F.dropout(x, 0.4),
    "drop path": lambda x: x * x.new_empty(len(x), 1).bernoulli_(0.6).div_(0.6),
    "randn": lambda x: x + torch.randn(x.shape, dtype=x.dtype, device=x.device),
    "attention": attention,
    "two": lambda x: F.dropout(F.dropout(x, 0.2).tanh(), 0.3),
}
dropout = DRAWS["dropout"]


def inputs() -> Tensor:
    return torch.randn(
        BATCH, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    ).to(DEVICE)


def recorded(draw: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    """What it gives, and the masks by example."""
    torch.manual_seed(1)
    with recorded_masks() as masks:
        outputs = draw(x)
    return outputs, MaskLayouts().by_example(masks, len(x), "a kind", lambda: draw(x[:1]))


@pytest.mark.parametrize("name", DRAWS)
def test_replayed_in_every_pass(name: str) -> None:
    """A plain pass, one over some rows, one example alone, a mapped one, a mapped one over some
    rows; derivatives.
    """
    x, draw = inputs().requires_grad_(), DRAWS[name]
    torch.manual_seed(1)
    plain, state = draw(x), random_state()
    outputs, masks = recorded(draw, x)
    assert torch.equal(outputs, plain)
    assert torch.equal(random_state(), state), "the same numbers were drawn, and no others"
    assert all(mask.shape[0] == BATCH for mask in masks)
    for rows in (slice(None), slice(1, 4), slice(2, 3)):
        mapped = vmap(lambda row: draw(row[None])[0], randomness="different")
        for run in (draw, mapped):
            with replayed_masks(tuple(mask[rows] for mask in masks)):
                torch.testing.assert_close(run(x[rows]), outputs[rows], rtol=1e-12, atol=1e-14)
    with replayed_masks(masks):
        (found,) = torch.autograd.grad(draw(x).square().sum(), x)
    (expected,) = torch.autograd.grad(outputs.square().sum(), x)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
    assert torch.equal(random_state(), state), "nothing is drawn anew"


def test_masks_are_kept_as_drawn_whatever_happens_to_them() -> None:
    with recorded_masks() as masks:
        drawn = torch.rand(3, device=DEVICE)
        expected = drawn.clone()
        drawn.zero_()
    for _ in range(2):  # nor can a pass spoil it for the next
        with replayed_masks(masks):
            again = torch.rand(3, device=DEVICE)
        assert torch.equal(again, expected)
        again.zero_()
    x = inputs()
    outputs, by_example = recorded(dropout, x)
    with replayed_masks(by_example):
        torch.testing.assert_close(dropout(x.float()), outputs.float())


@pytest.mark.parametrize(
    ("again", "copies", "noun"),
    [
        (DRAWS["two"], 1, "more random numbers"),
        (dropout, 2, "fewer random numbers"),
        (lambda x: dropout(torch.ones(5, 7, device=DEVICE)), 1, "shape"),
    ],
)
def test_other_draws_are_refused(again: Any, copies: int, noun: str) -> None:
    x = inputs()
    _, masks = recorded(dropout, x)
    with pytest.raises(UnsupportedModuleError, match=noun), replayed_masks(masks * copies):
        again(x)
    with pytest.raises(UnsupportedModuleError, match="rrelu_with_noise"), recorded_masks():
        F.rrelu(x, training=True)  # draws slopes and gives values


class TestLayouts:
    """Masks need not run over the examples first."""

    @pytest.mark.parametrize(
        ("shape", "of_one", "dim"),
        [((10, 3), (2, 3), 0), ((5, 5, 2), (5, 1, 2), 1), ((5, 6), (5, 6), None)],
    )
    def test_by_example(
        self, shape: tuple[int, ...], of_one: tuple[int, ...], dim: int | None
    ) -> None:
        """The first example alone shows where the examples lie; the last mask is one for all."""
        mask = torch.rand(shape)
        expected = (
            mask.expand(5, *shape) if dim is None else mask.unflatten(dim, (5, -1)).movedim(dim, 0)
        )
        (found,) = MaskLayouts().by_example([mask], 5, "kind", lambda: torch.rand(of_one))
        assert torch.equal(found, expected)

    def test_masks_are_drawn_without_the_model_once_two_batches_drew_alike(self) -> None:
        """The same numbers as the model draws from the same state, for any batch size."""
        model = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.25), nn.Linear(6, 6), nn.Dropout(0.5))
        layouts = MaskLayouts()

        def drawn(x: Tensor) -> tuple[Tensor, ...]:
            _, masks = call_and_record_masks(lambda: model(x), CPU, expected=True)
            layouts.by_example(masks, len(x), "kind", lambda: model(x[:1]))
            return masks

        drawn(torch.randn(5, 4))
        assert layouts.again("kind", 5, CPU) is None
        drawn(torch.randn(7, 4))
        torch.manual_seed(3)
        again = layouts.again("kind", 9, CPU)
        torch.manual_seed(3)
        for ours, models in zip(again, drawn(torch.ones(9, 4)), strict=True):
            assert torch.equal(ours, models)


@pytest.mark.parametrize("draws", [True, False])
@pytest.mark.parametrize("expected", [True, False])
def test_unexpected_draws_are_recorded_in_a_second_call_from_the_same_state(
    expected: bool, draws: bool
) -> None:
    calls: list[int] = []

    def function() -> Tensor:
        calls.append(1)
        return F.dropout(torch.ones(4, device=DEVICE), 0.5, training=draws)

    torch.manual_seed(0)
    plain, state = function(), random_state()
    torch.manual_seed(0)
    calls.clear()
    outputs, masks = call_and_record_masks(function, torch.device(DEVICE), expected=expected)
    assert len(calls) == (2 if draws and not expected else 1)
    assert torch.equal(outputs, plain)
    assert torch.equal(outputs, 2 * masks[0]) if draws else masks == ()
    assert torch.equal(random_state(), state)
