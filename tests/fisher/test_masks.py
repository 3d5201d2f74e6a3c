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
from tests.fisher.recorded_cases import Model
from torchfil.fisher import ExampleGradients
from torchfil.fisher.masks import MaskLayouts, RandomWatch, call_and_record_masks, recorded_masks, replayed_masks
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
    "in place": lambda x: F.dropout(x * 1, 0.4, inplace=True),
    "dropout1d": lambda x: F.dropout1d(x.unflatten(1, (3, 2)), 0.4).flatten(1),
    "dropout2d": lambda x: F.dropout2d(x[..., None, None], 0.4).flatten(1),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.4, training=True),
    "feature_alpha_dropout": lambda x: F.feature_alpha_dropout(x[..., None], 0.4, training=True).flatten(1),
    "drop path": lambda x: x * x.new_empty(len(x), 1).bernoulli_(0.6).div_(0.6),
    "bernoulli": lambda x: x * torch.bernoulli(torch.full_like(x, 0.6)),
    "rand_like": lambda x: x * torch.rand_like(x),
    "randn": lambda x: x + torch.randn(x.shape, dtype=x.dtype, device=x.device),
    "normal_": lambda x: x + torch.empty_like(x).normal_(),
    "gumbel": lambda x: F.gumbel_softmax(x, dim=-1),
    "attention": attention,
    "two": lambda x: F.dropout(F.dropout(x, 0.2).tanh(), 0.3),
}
dropout = DRAWS["dropout"]


def inputs() -> Tensor:
    return torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(DEVICE)


def recorded(draw: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    """What it gives, and the masks by example."""
    torch.manual_seed(1)
    with recorded_masks() as masks:
        outputs = draw(x)
    return outputs, MaskLayouts().by_example(masks, len(x), "a kind", lambda: draw(x[:1]))


def random_state() -> Tensor:
    return torch.cuda.get_rng_state() if DEVICE == "cuda" else torch.get_rng_state()


@pytest.mark.parametrize("name", DRAWS)
def test_replayed_in_every_pass(name: str) -> None:
    """A plain pass, one over some rows, one example alone, a mapped one, a mapped one over some rows; derivatives."""
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


class TestReplaying:
    @pytest.mark.parametrize("shape", [(), (WIDTH,), (1, WIDTH), (BATCH, 1)])
    def test_raw_masks_serve_the_same_batch(self, shape: tuple[int, ...]) -> None:
        x = inputs()
        with recorded_masks() as masks:
            outputs = x * torch.rand(shape, device=DEVICE)
        with replayed_masks(masks):
            assert torch.equal(x * torch.rand(shape, device=DEVICE), outputs)

    def test_values_in_other_dtypes(self) -> None:
        x = inputs()
        outputs, masks = recorded(dropout, x)
        with replayed_masks(masks):
            torch.testing.assert_close(dropout(x.float()), outputs.float())

    def test_a_mask_that_is_changed_afterwards_is_kept_as_drawn(self) -> None:
        with recorded_masks() as masks:
            drawn = torch.rand(3, device=DEVICE)
            expected = drawn.clone()
            drawn.zero_()
        for _ in range(2):  # nor can a pass spoil it for the next
            with replayed_masks(masks):
                again = torch.rand(3, device=DEVICE)
            assert torch.equal(again, expected)
            again.zero_()

    def test_nothing_is_recorded_where_nothing_is_drawn(self) -> None:
        x, model = inputs(), nn.Sequential(nn.Linear(WIDTH, 3), nn.Dropout(0.5)).double().to(DEVICE).eval()
        with recorded_masks() as masks:
            model(x)
            F.dropout(x, 0.5, training=False)
            nn.Linear(3, 3, device="meta")
        assert masks == []
        torch.manual_seed(0)
        with replayed_masks(()):
            ours = torch.rand(3)
        torch.manual_seed(0)
        assert torch.equal(ours, torch.rand(3))

    @pytest.mark.parametrize(
        ("again", "copies", "noun"),
        [
            (DRAWS["two"], 1, "more random numbers"),
            (dropout, 2, "fewer random numbers"),
            (lambda x: dropout(torch.ones(5, 7, device=DEVICE)), 1, "shape"),
        ],
    )
    def test_other_draws_are_refused(self, again: Any, copies: int, noun: str) -> None:
        x = inputs()
        _, masks = recorded(dropout, x)
        with pytest.raises(UnsupportedModuleError, match=noun), replayed_masks(masks * copies):
            again(x)

    def test_errors(self) -> None:
        """RReLU draws slopes and gives values; an error inside is not covered up."""
        x = inputs()
        with pytest.raises(UnsupportedModuleError, match="rrelu_with_noise"), recorded_masks():
            F.rrelu(x, training=True)
        with pytest.raises(ZeroDivisionError), replayed_masks(recorded(dropout, inputs())[1]):
            _ = 1 / 0


class TestLayouts:
    """Masks need not run over the examples first."""

    def by_example(self, shape: tuple[int, ...], batch: int, of_one: tuple[int, ...]) -> tuple[Tensor, int]:
        """The masks by example, twice, and how often the first example was run."""
        layouts, runs = MaskLayouts(), []
        mask = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
        first, second = (
            layouts.by_example([mask], batch, "kind", lambda: runs.append(torch.rand(of_one)))[0] for _ in range(2)
        )
        assert torch.equal(first, second)
        return first, len(runs)

    @pytest.mark.parametrize(
        ("shape", "of_one", "expected"),
        [
            ((5, 6), (1, 6), torch.arange(30.0).reshape(5, 1, 6)),
            ((10, 3, 3), (2, 3, 3), torch.arange(90.0).reshape(5, 2, 3, 3)),
            *(
                ((t, 5, 2), (t, 1, 2), torch.arange(t * 10.0).reshape(t, 5, 2).transpose(0, 1)[:, :, None])
                for t in (3, 5)
            ),
            # one for all, also where it looks like one of the examples
            *((s, s, torch.arange(float(torch.Size(s).numel())).reshape(1, *s).expand(5, *s)) for s in ((5,), (5, 6))),
            ((), (), torch.zeros(5)),
        ],
    )
    def test_by_example(self, shape: tuple[int, ...], of_one: tuple[int, ...], expected: Tensor) -> None:
        found, runs = self.by_example(shape, 5, of_one)
        assert torch.equal(found, expected)
        assert runs == 1
        assert self.by_example((1, 6), 1, (1, 6))[1] == 0, "a single example needs no look"

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
        MaskLayouts().by_example(masks, 5, "kind", lambda: seen.extend([torch.rand(()), torch.rand(2, 1)]))
        assert [value.tolist() for value in seen] == [0.25, [[0.0], [5.0]]]

    def test_what_fits_no_layout_is_refused(self) -> None:
        with pytest.raises(UnsupportedModuleError, match="shape"):
            self.by_example((5, 6), 5, (1, 7))
        with pytest.raises(UnsupportedModuleError, match="fewer random numbers"):
            MaskLayouts().by_example([torch.rand(5)], 5, "kind", lambda: None)

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
        assert again is not None
        for ours, models in zip(again, drawn(torch.ones(9, 4)), strict=True):
            assert torch.equal(ours, models)
        for batch in (3, 4, 5):  # and so on: masks that were drawn without the model count as drawn alike
            again = layouts.again("kind", batch, CPU)
            assert again is not None
            layouts.by_example(again, batch, "kind", pytest.fail)

    def test_a_kind_that_draws_otherwise_is_not_drawn_without_the_model(self) -> None:
        """Numbers that are not one probability's, and a kind that changes its mind, need the model."""
        layouts = MaskLayouts()
        for function in (
            *[lambda: torch.rand(3)] * 3,
            *(lambda p=p: F.dropout(torch.ones(3), p) for p in (0.1, 0.2, 0.3)),
        ):
            _, masks = call_and_record_masks(function, CPU, expected=True)
            layouts.by_example(masks, 4, "kind", function)
            assert layouts.again("kind", 4, CPU) is None


@pytest.mark.parametrize("name", ["dropout", "drop path", "attention", "alpha_dropout"])
def test_gradients_jacobian_and_chunks_under_given_masks(name: str) -> None:
    draw = DRAWS[name]

    def run(m: Any, x: Tensor) -> Tensor:
        h = m.first(x).tanh()
        return m.last(draw(h) if m.training else h)

    torch.manual_seed(0)
    model = Model(run, first=nn.Linear(WIDTH, WIDTH), last=nn.Linear(WIDTH, 3)).double().to(DEVICE)
    x, y = inputs(), (torch.arange(BATCH) % 3).to(DEVICE)
    bound = ExampleGradients.build(model.eval(), nn.CrossEntropyLoss(), x, y)
    outputs, masks = recorded(model.train(), x)
    gradients = replace(bound, examples=replace(bound.examples, masks=masks))
    losses = F.cross_entropy(outputs, y, reduction="none")
    rows = [torch.autograd.grad(loss, list(model.parameters()), retain_graph=True) for loss in losses]
    expected = torch.stack([torch.cat([part.flatten() for part in row]) for row in rows])
    torch.testing.assert_close(gradients.gradients(), expected)
    pieces = [part.gradients() for _, part in gradients.chunks(1, 1)]
    assert [len(piece) for piece in pieces] == [1] * BATCH
    torch.testing.assert_close(torch.cat(pieces), expected)

    jacobian, v = gradients.jacobian_columns(slice(None)), torch.ones_like(x)
    u = torch.linspace(-1, 1, jacobian.shape[1], dtype=torch.float64, device=DEVICE)
    torch.testing.assert_close(gradients.jvp(v), jacobian.sum(dim=2))
    torch.testing.assert_close(gradients.vjp(u), torch.einsum("bpd,p->bd", jacobian, u))
    for i in range(BATCH):
        g, _, row = gradients.plain_products_of_one(i, u)
        torch.testing.assert_close(g, expected[i])
        torch.testing.assert_close(row, u @ jacobian[i])


class TestWatch:
    def test_moves_with_draws_alone_and_goes_back(self) -> None:
        watch = RandomWatch(torch.device(DEVICE))
        torch.zeros(3).sum()
        torch.rand(2, generator=torch.Generator().manual_seed(3))
        assert not watch.moved()
        first = torch.rand(3, device=DEVICE)
        assert watch.moved()
        watch.rewind()
        assert not watch.moved()
        assert torch.equal(torch.rand(3, device=DEVICE), first)

    @pytest.mark.parametrize("draws", [True, False])
    @pytest.mark.parametrize("expected", [True, False])
    def test_calls(self, expected: bool, draws: bool) -> None:
        """Unexpected draws are recorded in a second call from the same random state."""
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
