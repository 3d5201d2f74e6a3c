"""Batches of one tensor: autoencoders, and losses of the outputs alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.data import DataLoader, TensorDataset

from tests.engine.test_same_tensor import D, autoencoder, by_loop, numbers, reconstruction, run, truth
from torchfil import FILPrivacyEngine
from torchfil.engine.losses import LossMismatchError

LOSSES: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {  # the loop's, one example's
    "sum": (lambda out: out.sum(), lambda out: out.sum()),
    "mean": (lambda out: out.mean(), lambda out: out.mean()),
    "minus the mean": (lambda out: -out.mean(), lambda out: -out.mean()),
    "mean of sums": (lambda out: out.sum(dim=1).mean(), lambda out: out.sum()),
}


def expected_fil(loss: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    fim = truth(autoencoder(), lambda model, weights, z: loss(functional_call(model, weights, (z,))), x)
    return (fim.diagonal(dim1=1, dim2=2).sum(1) / D).sqrt()


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_of_the_outputs_alone_is_identified(name: str) -> None:
    of_batch, of_one = LOSSES[name]
    x = numbers(8)  # in batches of 5 and 3: a sum over the batch does not depend on its size

    def step(_engine: Any, model: Any, optimizer: Any, batch: Any) -> None:
        of_batch(model(batch[0])).backward()
        optimizer.step()

    engine = run(autoencoder(), TensorDataset(x), step)
    torch.testing.assert_close(engine.get_fil().value, expected_fil(of_one, x))


def test_a_sum_is_released_as_the_sum_of_clipped_gradients() -> None:
    """Each example's own gradient is clipped, not B times it."""
    x, model = numbers(5), autoencoder()
    private, optimizer, loader = FILPrivacyEngine().make_private(
        model,
        torch.optim.SGD(model.parameters(), lr=1.0),
        DataLoader(TensorDataset(x), batch_size=5),
        noise_multiplier=0.0,
        max_grad_norm=100.0,
        clip="hard",
        poisson_sampling=False,
    )
    before = [p.detach().clone() for p in model.parameters()]
    for (rows,) in loader:
        private(rows).sum().backward()
        optimizer.step()
    plain = autoencoder()
    plain(x).sum().backward()
    for p, old, other in zip(model.parameters(), before, plain.parameters(), strict=True):
        torch.testing.assert_close(old - p, other.grad / 5)


def test_a_criterion_of_the_outputs_alone() -> None:
    x = numbers()
    for given in (lambda out, _: out.square().sum(), lambda out, _: out.sum()):
        engine = run(
            autoencoder(), TensorDataset(x), lambda engine, *rest: engine.train_step(rest[-1][0]), criterion=given
        )
        torch.testing.assert_close(engine.get_fil().value, expected_fil(lambda out, given=given: given(out, None), x))


def test_an_autoencoder_on_one_tensor() -> None:
    x = numbers()
    expected = truth(autoencoder(), reconstruction, x).diagonal(dim1=1, dim2=2).sum(1)
    engine = run(autoencoder(), TensorDataset(x), by_loop)
    torch.testing.assert_close(engine.get_fil().value, (expected / D).sqrt())


def test_an_input_as_the_loops_target_gets_advice_that_works() -> None:
    x, labels = numbers(), torch.arange(5)
    expected = truth(autoencoder(), reconstruction, x).diagonal(dim1=1, dim2=2).sum(1)

    def step(_engine: Any, model: Any, optimizer: Any, batch: Any) -> None:
        nn.functional.mse_loss(model(batch[0]), batch[0]).backward()
        optimizer.step()

    with pytest.raises(LossMismatchError, match=r"batch_to_inputs=lambda batch: \(batch\[0\], batch\[0\]\)"):
        run(autoencoder(), TensorDataset(x, labels), step)
    engine = run(autoencoder(), TensorDataset(x, labels), step, batch_to_inputs=lambda batch: (batch[0], batch[0]))
    torch.testing.assert_close(engine.get_fil().value, (expected / D).sqrt())
