"""Random numbers of a forward pass: recorded once, the same in every later pass, whatever its shape."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.cases import DEVICE
from torchfil.fisher import ExampleGradients
from torchfil.fisher.masks import MaskLayouts, RandomWatch, call_and_record_masks, recorded_masks, replayed_masks
from torchfil.utils.errors import UnsupportedModuleError

BATCH, WIDTH = 5, 6


def attention(x: Tensor) -> Tensor:
    """One head over two positions."""
    rows = x.unflatten(-1, (2, 3))
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(rows, rows, rows, dropout_p=0.4).flatten(-2)


def drop_path(x: Tensor) -> Tensor:
    return x * x.new_empty(len(x), 1).bernoulli_(0.6).div_(0.6)


# What a model may draw, of [batch, 6].
DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda x: F.dropout(x, 0.4),
    "in place": lambda x: F.dropout(x * 1, 0.4, inplace=True),
    "dropout1d": lambda x: F.dropout1d(x.unflatten(1, (3, 2)), 0.4).flatten(1),
    "dropout2d": lambda x: F.dropout2d(x[..., None, None], 0.4).flatten(1),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.4, training=True),
    "feature_alpha_dropout": lambda x: F.feature_alpha_dropout(x[..., None], 0.4, training=True).flatten(1),
    "drop path": drop_path,
    "bernoulli": lambda x: x * torch.bernoulli(torch.full_like(x, 0.6)),
    "rand_like": lambda x: x * torch.rand_like(x),
    "randn": lambda x: x + torch.randn(x.shape, dtype=x.dtype, device=x.device),
    "normal_": lambda x: x + torch.empty_like(x).normal_(),
    "gumbel": lambda x: F.gumbel_softmax(x, dim=-1),
    "attention": attention,
    "two": lambda x: F.dropout(F.dropout(x, 0.2).tanh(), 0.3),
}


def inputs() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(BATCH, WIDTH, generator=generator, dtype=torch.float64).to(DEVICE)


def recorded(draw: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    """What it gives, and the masks by example."""
    torch.manual_seed(1)
    with recorded_masks() as masks:
        outputs = draw(x)
    return outputs, MaskLayouts().by_example(masks, len(x), "a kind", lambda: draw(x[:1]))


def random_state() -> Tensor:
    return torch.cuda.get_rng_state() if DEVICE == "cuda" else torch.get_rng_state()


class TestReplaying:
    @pytest.mark.parametrize("name", DRAWS)
    def test_recording_changes_nothing(self, name: str) -> None:
        x, draw = inputs(), DRAWS[name]
        torch.manual_seed(1)
        plain = draw(x)
        state = random_state()
        outputs, masks = recorded(draw, x)
        assert torch.equal(outputs, plain)
        assert torch.equal(random_state(), state), "the same numbers were drawn, and no others"
        assert all(mask.shape[0] == BATCH for mask in masks)

    @pytest.mark.parametrize("name", DRAWS)
    def test_in_every_pass(self, name: str) -> None:
        """A plain pass, one over some rows, one example alone, a mapped one, a mapped one over some rows."""
        x, draw = inputs(), DRAWS[name]
        outputs, masks = recorded(draw, x)
        state = random_state()

        def mapped(rows: slice) -> Tensor:
            result: Tensor = vmap(lambda row: draw(row[None])[0], randomness="different")(x[rows])
            return result

        for rows in (slice(None), slice(1, 4), slice(2, 3)):
            part = tuple(mask[rows] for mask in masks)
            for run in (lambda rows=rows: draw(x[rows]), lambda rows=rows: mapped(rows)):
                with replayed_masks(part):
                    torch.testing.assert_close(run(), outputs[rows], rtol=1e-12, atol=1e-14)
        assert torch.equal(random_state(), state), "nothing is drawn anew"

    @pytest.mark.parametrize("name", DRAWS)
    def test_derivatives(self, name: str) -> None:
        x, draw = inputs().requires_grad_(), DRAWS[name]
        outputs, masks = recorded(draw, x)
        (expected,) = torch.autograd.grad(outputs.square().sum(), x)
        with replayed_masks(masks):
            (found,) = torch.autograd.grad(draw(x).square().sum(), x)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)

    def test_as_recorded(self) -> None:
        """The raw masks serve a pass over the same batch, whatever their layout."""
        x = inputs()
        for shape in ((), (WIDTH,), (1, WIDTH), (BATCH, 1)):

            def draw(x: Tensor, shape: tuple[int, ...] = shape) -> Tensor:
                return x * torch.rand(shape, device=x.device)

            with recorded_masks() as masks:
                outputs = draw(x)
            with replayed_masks(masks):
                assert torch.equal(draw(x), outputs)

    def test_values_in_other_dtypes(self) -> None:
        x = inputs()
        outputs, masks = recorded(lambda x: F.dropout(x, 0.4), x)
        with replayed_masks(masks):
            torch.testing.assert_close(F.dropout(x.float(), 0.4), outputs.float())

    def test_a_mask_that_is_changed_afterwards_is_kept_as_drawn(self) -> None:
        with recorded_masks() as masks:
            drawn = torch.rand(3, device=DEVICE)
            expected = drawn.clone()
            drawn.zero_()
        with replayed_masks(masks):
            again = torch.rand(3, device=DEVICE)
        assert torch.equal(again, expected)
        again.zero_()
        assert torch.equal(masks[0], expected), "nor can a pass spoil it for the next"

    def test_without_masks_nothing_changes(self) -> None:
        torch.manual_seed(0)
        expected = torch.rand(3)
        torch.manual_seed(0)
        with replayed_masks(()):
            assert torch.equal(torch.rand(3), expected)

    def test_nothing_is_recorded_where_nothing_is_drawn(self) -> None:
        x = inputs()
        model = nn.Sequential(nn.Linear(WIDTH, 3), nn.Dropout(0.5), nn.LayerNorm(3)).double().to(DEVICE).eval()
        with recorded_masks() as masks:
            model(x)
            F.dropout(x, 0.5, training=False)
            torch.zeros(3).fill_(1.0)
        assert masks == []

    def test_more_and_fewer_draws_are_refused(self) -> None:
        x = inputs()
        _, masks = recorded(lambda x: F.dropout(x, 0.4), x)
        more, fewer = "draws more random numbers than in the", "draws fewer random numbers than .* dropout 0 there"
        with pytest.raises(UnsupportedModuleError, match=more), replayed_masks(masks):
            DRAWS["two"](x)
        with pytest.raises(UnsupportedModuleError, match=fewer), replayed_masks(masks * 2):
            F.dropout(x, 0.4)

    def test_tensors_without_values_draw_nothing(self) -> None:
        x = inputs()
        _, masks = recorded(lambda x: F.dropout(x, 0.4) + nn.Linear(3, 3, device="meta").in_features, x)
        assert len(masks) == 1
        with replayed_masks(masks):
            nn.Linear(3, 3, device="meta")
            F.dropout(x, 0.4)

    def test_other_shapes_are_refused(self) -> None:
        _, masks = recorded(lambda x: F.dropout(x, 0.4), inputs())
        told = r"of shape \(5, 7\) where the loop drew \(5, 1, 6\)"
        with pytest.raises(UnsupportedModuleError, match=told), replayed_masks(masks):
            F.dropout(torch.ones(5, 7, device=DEVICE), 0.4)

    def test_numbers_that_nobody_sees_are_refused(self) -> None:
        """RReLU draws slopes and gives values."""
        told = "rrelu_with_noise.* cannot be seen from outside"
        with pytest.raises(UnsupportedModuleError, match=told), recorded_masks():
            F.rrelu(inputs(), training=True)

    def test_an_error_inside_is_not_covered_up(self) -> None:
        _, masks = recorded(lambda x: F.dropout(x, 0.4), inputs())
        with pytest.raises(ZeroDivisionError), replayed_masks(masks):
            _ = 1 / 0


class TestLayouts:
    """Masks need not run over the examples first."""

    def by_hand(self, shape: tuple[int, ...], batch: int, drawn: Callable[[int], tuple[int, ...]]) -> tuple[Any, int]:
        """The masks by example, twice, and how often the first example was run."""
        runs = 0
        layouts = MaskLayouts()

        def run_first() -> None:
            nonlocal runs
            runs += 1
            torch.rand(drawn(1))

        mask = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
        results = [layouts.by_example([mask], batch, "kind", run_first) for _ in range(2)]
        assert torch.equal(results[0][0], results[1][0])
        return results[0][0], runs

    def test_examples_first(self) -> None:
        found, runs = self.by_hand((5, 6), 5, lambda n: (n, 6))
        assert runs == 1
        assert torch.equal(found, torch.arange(30.0).reshape(5, 1, 6))

    def test_heads_beside_examples(self) -> None:
        found, _ = self.by_hand((10, 3, 3), 5, lambda n: (2 * n, 3, 3))
        assert torch.equal(found, torch.arange(90.0).reshape(5, 2, 3, 3))

    @pytest.mark.parametrize("time", [3, 5])
    def test_time_first(self, time: int) -> None:
        found, _ = self.by_hand((time, 5, 2), 5, lambda n: (time, n, 2))
        expected = torch.arange(time * 10.0).reshape(time, 5, 2).transpose(0, 1)[:, :, None]
        assert torch.equal(found, expected)

    @pytest.mark.parametrize("shape", [(5,), (1, 6), (5, 6), ()])
    def test_one_for_all(self, shape: tuple[int, ...]) -> None:
        """Also where it looks like one of the examples."""
        found, _ = self.by_hand(shape, 5, lambda n: shape)
        assert found.shape == (5, *shape)
        assert all(torch.equal(row, found[0]) for row in found)

    def test_a_single_example_needs_no_look(self) -> None:
        found, runs = self.by_hand((1, 6), 1, lambda n: (n, 6))
        assert (found.shape, runs) == ((1, 1, 6), 0)

    def test_other_sizes_of_the_same_kind_are_known(self) -> None:
        layouts, runs = MaskLayouts(), []
        for batch in (4, 7, 3):
            (found,) = layouts.by_example([torch.rand(2, batch)], batch, "kind", lambda: runs.append(torch.rand(2, 1)))
            assert found.shape == (batch, 2, 1)
        assert len(runs) == 1

    def test_the_first_example_gets_what_the_batch_drew_for_it(self) -> None:
        """So that a model whose way depends on what it draws goes the same one."""
        masks = [torch.tensor(0.25), torch.arange(10.0).reshape(2, 5)]
        seen: list[Tensor] = []

        def run_first() -> None:
            seen.append(torch.rand(()))
            seen.append(torch.rand(2, 1))

        MaskLayouts().by_example(masks, 5, "kind", run_first)
        assert torch.equal(seen[0], masks[0])
        assert torch.equal(seen[1], torch.tensor([[0.0], [5.0]]))

    def test_what_fits_no_layout_is_refused(self) -> None:
        with pytest.raises(UnsupportedModuleError, match=r"of shape \(1, 7\) where the loop drew \(5, 6\)"):
            self.by_hand((5, 6), 5, lambda n: (n, 7))
        with pytest.raises(UnsupportedModuleError, match="fewer random numbers"):
            MaskLayouts().by_example([torch.rand(5)], 5, "kind", lambda: None)


class TestGradients:
    """Per-example gradients, their Jacobian and chunks under given masks."""

    def gradients(self, draw: Callable[[Tensor], Tensor]) -> tuple[ExampleGradients, nn.Module]:
        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                torch.manual_seed(0)
                self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
                self.double().to(DEVICE)

            def forward(self, x: Tensor) -> Tensor:
                h = self.first(x).tanh()
                logits: Tensor = self.last(draw(h) if self.training else h)
                return logits

        model, x = Model(), inputs()
        y = torch.randint(3, (BATCH,), generator=torch.Generator().manual_seed(0)).to(DEVICE)
        bound = ExampleGradients.build(model.eval(), nn.CrossEntropyLoss(), x, y)
        model.train()
        _, masks = recorded(lambda x: model(x), x)
        return replace(bound, examples=replace(bound.examples, masks=masks)), model

    @pytest.mark.parametrize("name", ["dropout", "drop path", "attention", "alpha_dropout"])
    def test_against_autograd(self, name: str) -> None:
        gradients, model = self.gradients(DRAWS[name])
        x, y = inputs(), gradients.examples.public[2]
        torch.manual_seed(1)
        losses = F.cross_entropy(model(x), y, reduction="none")
        rows = [torch.autograd.grad(loss, list(model.parameters()), retain_graph=True) for loss in losses]
        expected = torch.stack([torch.cat([part.flatten() for part in row]) for row in rows])
        torch.testing.assert_close(gradients.gradients(), expected)
        pieces = [part.gradients() for _, part in gradients.chunks(1, 1)]
        assert [len(piece) for piece in pieces] == [1] * BATCH
        torch.testing.assert_close(torch.cat(pieces), expected)
        u = torch.ones_like(expected[0])
        for i in range(BATCH):
            torch.testing.assert_close(gradients.plain_products_of_one(i, u)[0], expected[i])

    @pytest.mark.parametrize("name", ["dropout", "attention"])
    def test_products_are_those_of_one_jacobian(self, name: str) -> None:
        gradients, _ = self.gradients(DRAWS[name])
        jacobian = gradients.jacobian_columns(slice(None))
        v = torch.ones(BATCH, WIDTH, dtype=torch.float64, device=DEVICE)
        u = torch.linspace(-1, 1, jacobian.shape[1], dtype=torch.float64, device=DEVICE)
        torch.testing.assert_close(gradients.jvp(v), jacobian.sum(dim=2))
        torch.testing.assert_close(gradients.vjp(u), torch.einsum("bpd,p->bd", jacobian, u))


class TestWatch:
    def test_moves_with_draws_alone(self) -> None:
        watch = RandomWatch(torch.device(DEVICE))
        torch.zeros(3).sum()
        torch.Generator().manual_seed(3)
        torch.rand(2, generator=torch.Generator())
        assert not watch.moved()
        torch.rand(2, device=DEVICE)
        assert watch.moved()

    def test_goes_back(self) -> None:
        watch = RandomWatch(torch.device(DEVICE))
        first = torch.rand(3, device=DEVICE)
        watch.rewind()
        assert not watch.moved()
        assert torch.equal(torch.rand(3, device=DEVICE), first)

    @pytest.mark.parametrize("expected", [True, False])
    def test_calls_that_draw(self, expected: bool) -> None:
        """Unexpected draws are recorded in a second call from the same random state."""
        calls = 0

        def function() -> Tensor:
            nonlocal calls
            calls += 1
            return F.dropout(torch.ones(4, device=DEVICE), 0.5)

        torch.manual_seed(0)
        plain = function()
        state = random_state()
        torch.manual_seed(0)
        calls = 0
        outputs, masks = call_and_record_masks(function, torch.device(DEVICE), expected=expected)
        assert calls == (1 if expected else 2)
        assert torch.equal(outputs, plain)
        assert torch.equal(outputs, 2 * masks[0])
        assert torch.equal(random_state(), state)

    @pytest.mark.parametrize("expected", [True, False])
    def test_calls_that_draw_nothing(self, expected: bool) -> None:
        calls: list[int] = []
        outputs, masks = call_and_record_masks(lambda: calls.append(1) or 3, torch.device(DEVICE), expected=expected)
        assert (outputs, masks, len(calls)) == (3, (), 1)


def test_masks_are_drawn_without_the_model_once_two_batches_drew_alike() -> None:
    """The same numbers as the model draws from the same state, for any batch size."""
    model = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.25), nn.Linear(6, 6), nn.Dropout(0.5))
    layouts, device = MaskLayouts(), torch.device("cpu")

    def drawn(x: Tensor) -> tuple[Tensor, ...]:
        _, masks = call_and_record_masks(lambda: model(x), device, expected=True)
        layouts.by_example(masks, len(x), "kind", lambda: model(x[:1]))
        return masks

    drawn(torch.randn(5, 4))
    assert layouts.again("kind", 5, device) is None
    drawn(torch.randn(7, 4))
    torch.manual_seed(3)
    again = layouts.again("kind", 9, device)
    torch.manual_seed(3)
    assert again is not None
    for ours, models in zip(again, drawn(torch.randn(9, 4, generator=torch.Generator().manual_seed(0))), strict=True):
        assert torch.equal(ours, models)
    for batch in (3, 4, 5):  # and so on: masks that were drawn without the model count as drawn alike
        again = layouts.again("kind", batch, device)
        assert again is not None
        layouts.by_example(again, batch, "kind", pytest.fail)


def test_a_kind_that_draws_otherwise_is_not_drawn_without_the_model() -> None:
    """Numbers that are not one probability's, and a kind that changes its mind, need the model."""
    layouts, device = MaskLayouts(), torch.device("cpu")

    def draw(function: Callable[[], Tensor], batch: int) -> None:
        _, masks = call_and_record_masks(function, device, expected=True)
        layouts.by_example(masks, batch, "kind", function)

    for _ in range(3):
        draw(lambda: torch.rand(3), 4)
    assert layouts.again("kind", 4, device) is None
    for probability in (0.1, 0.2, 0.3):
        draw(lambda p=probability: nn.functional.dropout(torch.ones(3), p), 4)  # type: ignore[misc]
    assert layouts.again("kind", 4, device) is None
