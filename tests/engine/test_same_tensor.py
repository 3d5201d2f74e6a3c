"""One tensor that enters in several places is one secret: its coordinates count once, through every place.

Batches of one tensor, too: autoencoders, and losses of the outputs alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev
from torch.utils.data import TensorDataset

from tests.engine.ways import Calling, start, weights_of
from torchfil import PLIS, FILPrivacyEngine, Private, fisher
from torchfil.engine.losses import LossMismatchError
from torchfil.private import Examples
from torchfil.questions import Change, Column

D = 6
SIGMA, C = 0.9, 0.8
SETTINGS: dict[str, Any] = {"noise_multiplier": SIGMA, "max_grad_norm": C}
MSE = nn.functional.mse_loss


def numbers(n: int = 5, *shape: int) -> Tensor:
    return torch.randn(n, *(shape or (D,)), generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def autoencoder() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.Sequential(nn.Flatten(), nn.Linear(D, 3), nn.Tanh(), nn.Linear(3, D)).double()


def released(model: nn.Module, loss: Callable[..., Tensor], z: Tensor) -> Tensor:
    """g̃ of one example, [p]; loss: of a function that calls the model, and of z, [1, …]."""
    weights = {name: value.detach() for name, value in model.named_parameters()}
    gradients = grad(lambda w: loss(lambda *inputs: functional_call(model, w, inputs), z))(weights)
    g = torch.cat([part.flatten() for part in gradients.values()])
    return g / (1 + (g.norm() / C) ** 8) ** (1 / 8)


def truth(model: nn.Module, loss: Callable[..., Tensor], x: Tensor) -> Tensor:
    """J̃ᵀJ̃/(σC)² of each example with all derivatives, [batch, d, d]."""
    rows = [jacrev(lambda z: released(model, loss, z.reshape(1, *x.shape[1:])))(row.flatten()) for row in x]
    return torch.stack([row.T @ row for row in rows]) / (SIGMA * C) ** 2


def reconstruction(model: Any, x: Tensor) -> Tensor:
    return MSE(model(x), x.flatten(1))


def assert_fil(engine: FILPrivacyEngine, fim: Tensor, rtol: float = 1e-7) -> None:
    expected = (fim.diagonal(dim1=1, dim2=2).sum(1) / D).sqrt()
    torch.testing.assert_close(engine.get_fil().value, expected, rtol=rtol, atol=0)


def run(model: nn.Module, dataset: Any, step: Any, **options: Any) -> FILPrivacyEngine:
    """One pass in batches of five, exactly accounted for; step: a batch's loss, "train_step", or "inputs alone"."""
    dataset = TensorDataset(*dataset) if isinstance(dataset, tuple) else dataset
    given = {**SETTINGS, "criterion": None, "estimator": "exact", "amplification": "none", "track": ("diagonal",)}
    engine, private, optimizer, loader = start(model, dataset, "auto", batch=5, **{**given, **options})
    for batch in loader:
        optimizer.zero_grad()
        if isinstance(step, str):
            engine.train_step(batch[0], *batch[-1:] if step == "train_step" else ())
            continue
        step(private, batch).backward()
        optimizer.step()
    return engine


def by_loop(model: Any, batch: Any) -> Tensor:
    return MSE(model(batch[0]), batch[-1].flatten(1))


WAYS: dict[str, tuple[Any, dict[str, Any]]] = {
    "loop": (by_loop, {}),
    "hooks": (by_loop, {"grad_sample_mode": "hooks"}),
    "train_step": ("train_step", {"criterion": nn.MSELoss()}),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("private", [None, Private(target=True), Private(inputs=0)])
def test_an_autoencoder_is_differentiated_through_its_target(way: str, private: Private | None) -> None:
    step, options = WAYS[way]
    x = numbers()
    expected = truth(autoencoder(), reconstruction, x)
    engine = run(autoencoder(), (x, x.clone()), step, private=private, **options)
    assert_fil(engine, expected)
    diagonal = expected.diagonal(dim1=1, dim2=2)
    torch.testing.assert_close(engine.totals.get("diagonal").value, diagonal, rtol=1e-8, atol=0)
    assert_fil(run(autoencoder(), (x,), step, private=private, **options), expected)


def test_other_shapes_dtypes_and_probes() -> None:
    x = numbers(5, 2, 3)
    expected = truth(autoencoder(), reconstruction, x)
    loss = lambda out, y: MSE(out, y.to(out.dtype))  # noqa: E731
    for target in (x.flatten(1), x.float().flatten(1)):
        assert_fil(run(autoencoder(), (x, target), "train_step", criterion=loss), expected, 1e-6)
    probes = {"estimator": "weight-probes", "num_probes": 300, "track": ()}
    assert_fil(run(autoencoder(), (x, x), by_loop, **probes), expected, 0.15)


def twice() -> nn.Module:
    torch.manual_seed(1)
    parts = {"q": nn.Linear(D, 4), "k": nn.Linear(D, 4), "o": nn.Linear(4, 3)}
    return Calling(lambda self, a, b: self.o(torch.tanh(self.q(a)) * torch.tanh(self.k(b))), **parts).double()


def test_a_tensor_given_twice_is_one_secret() -> None:
    x, loss = numbers(), nn.functional.cross_entropy
    zeros = torch.zeros(5, dtype=torch.long)
    expected = truth(twice(), lambda model, z: loss(model(z, z), zeros[:1]), x)
    assert_fil(run(twice(), (x, zeros), lambda model, batch: loss(model(batch[0], batch[0]), batch[1])), expected)


def test_names_of_a_dict_batch() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = autoencoder()

        def forward(self, pixels: Tensor) -> Tensor:
            return torch.as_tensor(self.net(pixels))

    x = numbers()
    rows = [{"pixels": row, "labels": row.clone()} for row in x]
    step = lambda model, batch: MSE(model(pixels=batch["pixels"]), batch["labels"])  # noqa: E731
    assert_fil(run(Named(), rows, step, criterion=nn.MSELoss()), truth(autoencoder(), reconstruction, x))


def test_public_functions_and_plis() -> None:
    model, x = autoencoder(), numbers()
    expected = truth(model, reconstruction, x)
    torch.testing.assert_close(fisher.exact_fim(model, nn.MSELoss(), x, x.clone(), **SETTINGS), expected)
    some = fisher.exact_fim(model, nn.MSELoss(), x, x, private=Private(coordinates=[0, 2]), **SETTINGS)
    torch.testing.assert_close(some, expected[:, [0, 2]][:, :, [0, 2]])
    slopes = PLIS(model, nn.MSELoss(), noise_std=SIGMA * C, max_grad_norm=C).attribute(x, x)
    norm = grad(lambda z: released(model, reconstruction, z[None]).square().sum() / (SIGMA * C) ** 2)
    torch.testing.assert_close(slopes, torch.stack([norm(row) for row in x]))


def test_questions_change_both_places() -> None:
    """KL between answers 0 and 1 is ‖g̃₁ − g̃₀‖²/2(σC)² with the target changed, too."""
    model, x = autoencoder(), numbers()
    changed = [x.clone() for _ in range(3)]
    changed[1][:, 1], changed[2][:, 1] = 0.0, 1.0
    true, zero, one = (
        torch.stack([released(model, reconstruction, row[None]) for row in rows]).detach() for rows in changed
    )
    expected = torch.stack([(other - true).square().sum(1) for other in (zero, one)], dim=1)
    engine = run(model, (x, x), by_loop, track=(), questions={"sex": Column(1, (0.0, 1.0))})
    torch.testing.assert_close(engine.get_guess("sex").divergence.value, expected / (2 * (SIGMA * C) ** 2))
    alone = {"y": Change({"zero": lambda x, y: (x, torch.zeros_like(y))})}
    with pytest.raises(ValueError, match="same tensor"):
        run(autoencoder(), (x, x), by_loop, track=(), questions=alone)


def test_few_equal_numbers_are_asked_about() -> None:
    model = nn.Linear(1, 1).double()
    x = torch.tensor([[0.0], [1.0], [1.0]], dtype=torch.float64)

    def fim(target: Tensor, **private: Any) -> Tensor:
        given = {"private": Private(**private)} if private else {}
        return fisher.exact_fim(model, nn.MSELoss(), x, target, **given, **SETTINGS)

    with pytest.raises(ValueError, match="same"):
        fim(x.clone())
    torch.testing.assert_close(fim(x.clone(), same=[]), fim(x + 1e-12))
    expected = truth(model, lambda m, z: (m(z) - z).square().sum(), x)
    torch.testing.assert_close(fim(x.clone(), same=[(0, "target")]), expected)
    torch.testing.assert_close(fim(x), expected)
    with pytest.raises(ValueError, match="targets"):
        Examples.build(numbers(), numbers(), Private(same=[(0, "targets")]))
    states, answers = torch.zeros(2, 70, dtype=torch.float64), torch.tensor([[1.0], [0.0]])  # zeros, yes or no
    assert Examples.build((states, states.clone(), answers, answers.clone()), torch.arange(2)).layout.same == ()


def test_places_that_differ_or_agree_later() -> None:
    x, given = numbers(10), {"criterion": nn.MSELoss()}
    differ, agree = torch.cat([x[:5], -x[5:]]), torch.cat([-x[:5], x[5:]])
    with pytest.raises(ValueError, match="same="):
        run(autoencoder(), (x, differ), "train_step", **given)
    run(autoencoder(), (x, differ), "train_step", private=Private(same=[]), **given)
    engine = run(autoencoder(), (x, agree), "train_step", **given)
    alone = run(autoencoder(), (x[5:], agree[5:] + 1e-13), "train_step", **given)
    torch.testing.assert_close(engine.get_fil().value[5:], alone.get_fil().value)


@pytest.mark.parametrize(
    ("of_batch", "of_one"),
    [
        (torch.sum, torch.sum),
        (torch.mean, torch.mean),
        (lambda out: -out.mean(), torch.mean),
        (lambda out: out.sum(dim=1).mean(), torch.sum),
    ],
)
def test_a_loss_of_the_outputs_alone_is_identified(of_batch: Any, of_one: Any) -> None:
    x = numbers(8)  # in batches of 5 and 3: a sum over the batch does not depend on its size
    expected = truth(autoencoder(), lambda model, z: of_one(model(z)), x)
    assert_fil(run(autoencoder(), (x,), lambda model, batch: of_batch(model(batch[0]))), expected)


@pytest.mark.parametrize("loss", [lambda out, _: out.square().sum(), lambda out, _: out.sum()])
def test_a_criterion_of_the_outputs_alone(loss: Any) -> None:
    x = numbers()
    expected = truth(autoencoder(), lambda model, z: loss(model(z), None), x)
    assert_fil(run(autoencoder(), (x,), "inputs alone", criterion=loss), expected)


def test_a_sum_is_released_as_the_sum_of_clipped_gradients() -> None:
    """Each example's own gradient is clipped, not B times it."""
    x, model, plain = numbers(), autoencoder(), autoencoder()
    options = {"noise_multiplier": 0.0, "max_grad_norm": 100.0, "clip": "hard", "lr": 1.0, "track": ()}
    with pytest.warns(UserWarning, match="no privacy"):
        run(model, (x,), lambda private, batch: private(batch[0]).sum(), **options)
    plain(x).sum().backward()
    slope = torch.cat([p.grad.flatten() for p in plain.parameters()])
    torch.testing.assert_close(weights_of(autoencoder()) - weights_of(model), slope / 5)


def test_an_input_as_the_loops_target_gets_advice_that_works() -> None:
    x, labels = numbers(), torch.arange(5)
    step = lambda model, batch: MSE(model(batch[0]), batch[0])  # noqa: E731
    with pytest.raises(LossMismatchError, match=r"batch_to_inputs=lambda batch: \(batch\[0\], batch\[0\]\)"):
        run(autoencoder(), (x, labels), step)
    engine = run(autoencoder(), (x, labels), step, batch_to_inputs=lambda batch: (batch[0], batch[0]))
    assert_fil(engine, truth(autoencoder(), reconstruction, x))
