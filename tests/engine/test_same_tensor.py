"""One tensor that enters in several places is one secret: its coordinates count once, through every place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev
from torch.utils.data import DataLoader, TensorDataset

from torchfil import PLIS, Accounting, FILPrivacyEngine, Private, fisher
from torchfil.private import Examples
from torchfil.questions import Change, Column

D = 6
SIGMA, C = 0.9, 0.8


def numbers(n: int = 5, *shape: int) -> Tensor:
    return torch.randn(n, *(shape or (D,)), generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def autoencoder() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.Sequential(nn.Flatten(), nn.Linear(D, 3), nn.Tanh(), nn.Linear(3, D)).double()


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(1)
            self.q, self.k, self.o = nn.Linear(D, 4), nn.Linear(D, 4), nn.Linear(4, 3)
        self.double()

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.o(torch.tanh(self.q(a)) * torch.tanh(self.k(b)))


def truth(model: nn.Module, loss: Callable[[nn.Module, dict[str, Tensor], Tensor], Tensor], x: Tensor) -> Tensor:
    """I/(σC)² of each example as J̃ᵀJ̃ with all derivatives, [batch, d, d], by a plain Jacobian."""
    weights = {name: value.detach().clone() for name, value in model.named_parameters()}

    def released(z: Tensor) -> Tensor:
        gradients = grad(lambda w: loss(model, w, z.reshape(1, *x.shape[1:])))(weights)
        g = torch.cat([part.flatten() for part in gradients.values()])
        return g / (1 + (g.norm() / C) ** 8) ** (1 / 8)

    rows = [jacrev(released)(row.flatten()) for row in x]
    return torch.stack([row.T @ row for row in rows]) / (SIGMA * C) ** 2


def reconstruction(model: nn.Module, weights: dict[str, Tensor], x: Tensor) -> Tensor:
    return nn.functional.mse_loss(functional_call(model, weights, (x,)), x.flatten(1))


def run(model: nn.Module, dataset: Any, step: Callable[..., None], **options: Any) -> FILPrivacyEngine:
    """One step over everything, exactly accounted for."""
    engine = FILPrivacyEngine()
    accounting = {"estimator": "exact", "amplification": "none", "track": ("diagonal",)}
    accounting |= options.pop("accounting", {})
    private, optimizer, loader = engine.make_private(
        model,
        torch.optim.SGD(model.parameters(), lr=0.0),
        DataLoader(dataset, batch_size=5),
        noise_multiplier=SIGMA,
        max_grad_norm=C,
        poisson_sampling=False,
        accounting=Accounting(**accounting),
        **options,
    )
    for batch in loader:
        optimizer.zero_grad()
        step(engine, private, optimizer, batch)
    return engine


def by_loop(_engine: Any, model: Any, optimizer: Any, batch: Any) -> None:
    nn.functional.mse_loss(model(batch[0]), batch[-1].flatten(1)).backward()
    optimizer.step()


def by_train_step(engine: Any, _model: Any, _optimizer: Any, batch: Any) -> None:
    engine.train_step(batch[0], batch[-1])


WAYS = {
    "loop": (by_loop, {}),
    "hooks": (by_loop, {"grad_sample_mode": "hooks"}),
    "train_step": (by_train_step, {"criterion": nn.MSELoss()}),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("private", [None, Private(target=True), Private(inputs=0)])
def test_an_autoencoder_is_differentiated_through_its_target(way: str, private: Private | None) -> None:
    step, options = WAYS[way]
    model, x = autoencoder(), numbers()
    expected = truth(model, reconstruction, x)
    engine = run(model, TensorDataset(x, x.clone()), step, private=private, **options)
    torch.testing.assert_close(engine.get_fil().value, (expected.diagonal(dim1=1, dim2=2).sum(1) / D).sqrt())
    torch.testing.assert_close(
        engine.totals.get("diagonal").value, expected.diagonal(dim1=1, dim2=2), rtol=1e-8, atol=0
    )


def test_a_weight_probe_sees_the_target_too() -> None:
    model, x = autoencoder(), numbers()
    expected = truth(model, reconstruction, x).diagonal(dim1=1, dim2=2).sum(1)
    probes = {"estimator": "weight-probes", "num_probes": 300, "track": ()}
    engine = run(model, TensorDataset(x, x), by_loop, accounting=probes)
    torch.testing.assert_close(engine.get_fil().value ** 2 * D, expected, rtol=0.3, atol=0)


@pytest.mark.parametrize("flattened", [False, True])
def test_a_target_in_another_shape_or_dtype_is_the_same_tensor(flattened: bool) -> None:
    model, x = autoencoder(), numbers(5, 2, 3)
    expected = truth(model, reconstruction, x).diagonal(dim1=1, dim2=2).sum(1)
    target = x.flatten(1) if flattened else x.float().flatten(1)
    loss = lambda out, y: nn.functional.mse_loss(out, y.to(out.dtype))  # noqa: E731
    engine = run(model, TensorDataset(x, target), by_train_step, criterion=loss)
    torch.testing.assert_close(engine.get_fil().value, (expected / D).sqrt(), rtol=1e-6, atol=0)


def test_a_tensor_given_twice_is_one_secret() -> None:
    model, x = Twice(), numbers()
    y = torch.arange(5) % 3

    def release(row: int) -> Callable[..., Tensor]:
        return lambda m, w, z: nn.functional.cross_entropy(functional_call(m, w, (z, z)), y[row : row + 1])

    expected = torch.stack([truth(model, release(i), x[i : i + 1])[0].trace() for i in range(5)])

    def step(_engine: Any, private: Any, optimizer: Any, batch: Any) -> None:
        nn.functional.cross_entropy(private(batch[0], batch[0]), batch[1]).backward()
        optimizer.step()

    engine = run(model, TensorDataset(x, y), step)
    torch.testing.assert_close(engine.get_fil().value, (expected / D).sqrt())


def test_names_of_a_dict_batch() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = autoencoder()

        def forward(self, pixels: Tensor) -> Tensor:
            return self.net(pixels)

    model, x = Named(), numbers()
    expected = truth(model, reconstruction, x).diagonal(dim1=1, dim2=2).sum(1)

    def step(engine: Any, _model: Any, _optimizer: Any, batch: Any) -> None:
        engine.train_step({"pixels": batch["pixels"]}, batch["labels"])

    rows = [{"pixels": row, "labels": row.clone()} for row in x]
    engine = run(model, rows, step, criterion=nn.MSELoss())
    torch.testing.assert_close(engine.get_fil().value, (expected / D).sqrt())


def test_public_functions_and_plis() -> None:
    model, x = autoencoder(), numbers()
    expected = truth(model, reconstruction, x)
    options: dict[str, Any] = {"noise_multiplier": SIGMA, "max_grad_norm": C}
    matrix = fisher.exact_fim(model, nn.MSELoss(), x, x.clone(), **options)
    torch.testing.assert_close(matrix, expected)
    slopes = PLIS(model, nn.MSELoss(), noise_std=SIGMA * C, max_grad_norm=C).attribute(x, x)

    def norm(z: Tensor) -> Tensor:
        weights = {name: value.detach() for name, value in model.named_parameters()}
        gradients = grad(lambda w: reconstruction(model, w, z[None]))(weights)
        g = torch.cat([part.flatten() for part in gradients.values()])
        return (g / (1 + (g.norm() / C) ** 8) ** (1 / 8)).square().sum() / (SIGMA * C) ** 2

    torch.testing.assert_close(slopes, torch.stack([grad(norm)(row) for row in x]))


def test_some_coordinates_of_both_places() -> None:
    model, x = autoencoder(), numbers()
    expected = truth(model, reconstruction, x)[:, [0, 2]][:, :, [0, 2]]
    matrix = fisher.exact_fim(
        model, nn.MSELoss(), x, x, private=Private(coordinates=[0, 2]), noise_multiplier=SIGMA, max_grad_norm=C
    )
    torch.testing.assert_close(matrix, expected)


def test_a_question_changes_both_places() -> None:
    """KL between answers 0 and 1 is ‖g̃₁ − g̃₀‖²/2(σC)² with the target changed, too."""
    model, x = autoencoder(), numbers()
    weights = {name: value.detach().clone() for name, value in model.named_parameters()}

    def released(z: Tensor) -> Tensor:
        gradients = grad(lambda w: reconstruction(model, w, z[None]))(weights)
        g = torch.cat([part.flatten() for part in gradients.values()])
        return g / (1 + (g.norm() / C) ** 8) ** (1 / 8)

    def with_value(value: float) -> Tensor:
        changed = x.clone()
        changed[:, 1] = value
        return torch.stack([released(row) for row in changed])

    expected = torch.stack(
        [(with_value(v) - torch.stack([released(r) for r in x])).square().sum(1) for v in (0.0, 1.0)], dim=1
    )
    asked = {"track": (), "questions": {"sex": Column(1, (0.0, 1.0))}}
    engine = run(model, TensorDataset(x, x), by_loop, accounting=asked)
    torch.testing.assert_close(engine.get_guess("sex").divergence.value, expected / (2 * (SIGMA * C) ** 2))


def test_a_question_about_the_target_alone_is_refused() -> None:
    asked = {"track": (), "questions": {"y": Change({"zero": lambda x, y: (x, torch.zeros_like(y))})}}
    with pytest.raises(ValueError, match="same tensor"):
        run(autoencoder(), TensorDataset(numbers(), numbers()), by_loop, accounting=asked)


def test_few_equal_numbers_are_asked_about() -> None:
    model = nn.Linear(1, 1).double()
    x = torch.tensor([[0.0], [1.0], [1.0]], dtype=torch.float64)
    options: dict[str, Any] = {"noise_multiplier": SIGMA, "max_grad_norm": C}
    with pytest.raises(ValueError, match="same"):
        fisher.exact_fim(model, nn.MSELoss(), x, x.clone(), **options)
    apart = fisher.exact_fim(model, nn.MSELoss(), x, x.clone(), private=Private(same=[]), **options)
    other = fisher.exact_fim(model, nn.MSELoss(), x, x + 1e-12, **options)
    torch.testing.assert_close(apart, other)
    one = fisher.exact_fim(model, nn.MSELoss(), x, x.clone(), private=Private(same=[(0, "target")]), **options)
    expected = truth(model, lambda m, w, z: (functional_call(m, w, (z,)) - z).square().sum(), x)
    torch.testing.assert_close(one, expected)
    torch.testing.assert_close(fisher.exact_fim(model, nn.MSELoss(), x, x, **options), expected)


def test_zeros_and_two_yes_or_no_attributes_stay_apart() -> None:
    states = torch.zeros(2, 70, dtype=torch.float64)
    answers = torch.tensor([[1.0], [0.0]])
    assert Examples.build((states, states.clone(), answers, answers.clone()), torch.arange(2)).layout.same == ()


def test_places_that_differ_later_are_refused() -> None:
    x = numbers(10)
    y = torch.cat([x[:5], -x[5:]])
    with pytest.raises(ValueError, match=r"Private\(same=\[\]\)"):
        run(autoencoder(), TensorDataset(x, y), by_train_step, criterion=nn.MSELoss())
    run(autoencoder(), TensorDataset(x, y), by_train_step, criterion=nn.MSELoss(), private=Private(same=[]))


def test_equal_numbers_in_a_later_batch_change_nothing() -> None:
    x = numbers(10)
    y = torch.cat([-x[:5], x[5:]])
    engine = run(autoencoder(), TensorDataset(x, y), by_train_step, criterion=nn.MSELoss())
    alone = run(autoencoder(), TensorDataset(x[5:], y[5:] + 1e-13), by_train_step, criterion=nn.MSELoss())
    torch.testing.assert_close(engine.get_fil().value[5:], alone.get_fil().value)


def test_wrong_names_are_refused() -> None:
    with pytest.raises(ValueError, match="targets"):
        Examples.build(numbers(), numbers(), Private(same=[(0, "targets")]))
