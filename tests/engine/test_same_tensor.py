"""One tensor that enters in several places is one secret: its coordinates count once, through every
place.

Batches of one tensor, too: autoencoders, and losses of the outputs alone. Brute force sees a model
in which the tensor enters once.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from tests.cases import DEVICE, relative_error
from tests.engine.brute_force import (
    C,
    Pass,
    Run,
    assert_true,
    clipped_and_jacobian,
    make,
    random_state,
    train,
)
from tests.engine.ways import Calling
from torchfil import PLIS, Private, fisher
from torchfil.private import Examples
from torchfil.questions import Change, Column

D, SIGMA = 6, 0.9
SETTINGS: dict[str, Any] = {"noise_multiplier": SIGMA, "max_grad_norm": C}
MSE = nn.functional.mse_loss
HOOKS = {"grad_sample_mode": "hooks"}


def numbers(n: int = 5, *shape: int) -> Tensor:
    return torch.randn(
        n, *(shape or (D,)), generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )


def autoencoder() -> Any:
    torch.manual_seed(1)
    net = nn.Sequential(nn.Flatten(), nn.Linear(D, 3), nn.Tanh(), nn.Linear(3, D))
    return Calling(lambda self, x: self.net(x), net=net).double()


def residual(self: Any, x: Tensor) -> Tensor:
    return torch.as_tensor(self.net(x) - x.flatten(1))


def trained(
    *tensors: Tensor, rows: Any = None, way: str = "auto", loss: Any = None, **options: Any
) -> Run:
    """A pass in batches of five.

    Brute force gets the mean square of the residual, unless told otherwise.
    """
    given = {**SETTINGS, "poisson_sampling": False, "batch_size": 5, **options}
    run = make(autoencoder(), rows or TensorDataset(*tensors), **given)
    run.plain.function, run.true_loss = residual, lambda out, _: out.square().mean()
    run.loss_fn = loss or (lambda out, y: MSE(out, y.flatten(1).to(out.dtype)))
    return train(run, steps=len(run.private), way=way)


@pytest.mark.parametrize(
    ("way", "options"), [("auto", {}), ("auto", HOOKS), ("train_step", {"criterion": nn.MSELoss()})]
)
@pytest.mark.parametrize(
    ("private", "copies"), [(None, 1), (None, 2), (Private(target=True), 2), (Private(inputs=0), 1)]
)
def test_an_autoencoder_is_differentiated_through_its_target(
    way: str, options: Any, private: Private | None, copies: int
) -> None:
    """Questions change both places, too."""
    given = {
        "private": private,
        "track": ("diagonal",),
        "questions": {"sex": Column(1, (0.0, 1.0))},
    }
    assert_true(trained(*(numbers() for _ in range(copies)), way=way, **given, **options), 1e-7)


def test_other_shapes_dtypes_names_and_probes() -> None:
    x = numbers(5, 2, 3)
    loss = lambda out, y: MSE(out, y.to(out.dtype))  # noqa: E731
    for target in (x.flatten(1), x.float().flatten(1)):
        run = trained(x, target, way="train_step", criterion=loss)
        assert_true(run)
    probes = trained(x, x, estimator="weight-probes", num_probes=300)
    expected = run.engine.get_fil().value
    torch.testing.assert_close(probes.engine.get_fil().value, expected, rtol=0.15, atol=0)
    rows = [{"x": row, "labels": row.flatten()} for row in x]
    by_name = trained(rows=rows, criterion=nn.MSELoss()).engine.get_fil().value
    torch.testing.assert_close(by_name, expected, rtol=1e-6, atol=0)


def test_a_tensor_given_twice_is_one_secret() -> None:
    torch.manual_seed(1)
    parts = {"q": nn.Linear(D, 4), "k": nn.Linear(D, 4), "o": nn.Linear(4, 3)}
    twice = Calling(
        lambda self, a, b: self.o(torch.tanh(self.q(a)) * torch.tanh(self.k(b))), **parts
    ).double()
    run = make(
        twice,
        TensorDataset(numbers(), torch.arange(5) % 3),
        **SETTINGS,
        poisson_sampling=False,
        batch_size=5,
    )
    model, one = run.model, run.plain.function
    run.model, run.plain.function = lambda x: model(x, x), lambda self, x: one(self, x, x)
    assert_true(train(run, steps=1))


def test_public_functions_and_plis() -> None:
    model, x = autoencoder().to(DEVICE), numbers().to(DEVICE)
    once = autoencoder().to(DEVICE)
    once.function = residual
    now = Pass(random_state(), model.state_dict(), x, x, list(range(5)))
    g, jacobian = clipped_and_jacobian(once, now, None, lambda out, _: out.square().mean())
    expected = jacobian.mT @ jacobian / (SIGMA * C) ** 2
    torch.testing.assert_close(
        fisher.exact_fim(model, nn.MSELoss(), x, x.clone(), **SETTINGS), expected
    )
    some = fisher.exact_fim(
        model, nn.MSELoss(), x, x, private=Private(coordinates=[0, 2]), **SETTINGS
    )
    torch.testing.assert_close(some, expected[:, [0, 2]][:, :, [0, 2]])
    slopes = PLIS(model, nn.MSELoss(), noise_std=SIGMA * C, max_grad_norm=C).attribute(x, x)
    assert (
        relative_error(slopes, 2 * torch.einsum("bpd,bp->bd", jacobian, g) / (SIGMA * C) ** 2)
        < 1e-9
    )


def test_few_equal_numbers_are_asked_about() -> None:
    model = nn.Linear(1, 1).double()
    x = torch.tensor([[0.0], [1.0], [1.0]], dtype=torch.float64)

    def fim(target: Tensor, **private: Any) -> Tensor:
        given = {"private": Private(**private)} if private else {}
        return fisher.exact_fim(model, nn.MSELoss(), x, target, **given, **SETTINGS)

    with pytest.raises(ValueError, match="same"):
        fim(x.clone())
    torch.testing.assert_close(fim(x.clone(), same=[]), fim(x + 1e-12))
    torch.testing.assert_close(fim(x.clone(), same=[(0, "target")]), fim(x))
    with pytest.raises(ValueError, match="targets"):
        Examples.build(numbers(), numbers(), Private(same=[(0, "targets")]))
    # zeros, yes or no
    states, answers = torch.zeros(2, 70, dtype=torch.float64), torch.tensor([[1.0], [0.0]])
    assert (
        Examples.build(
            (states, states.clone(), answers, answers.clone()), torch.arange(2)
        ).layout.same
        == ()
    )


def test_places_that_differ_or_agree_later() -> None:
    x, given = numbers(10), {"criterion": nn.MSELoss(), "way": "train_step", "learning_rate": 0.0}
    differ, agree = torch.cat([x[:5], -x[5:]]), torch.cat([-x[:5], x[5:]])
    with pytest.raises(ValueError, match="same="):
        trained(x, differ, **given)
    trained(x, differ, private=Private(same=[]), **given)
    engine = trained(x, agree, **given).engine
    alone = trained(x[5:], agree[5:] + 1e-13, **given).engine
    torch.testing.assert_close(engine.get_fil().value[5:], alone.get_fil().value)
    target_alone = {"y": Change({"zero": lambda x, y: (x, torch.zeros_like(y))})}
    with pytest.raises(ValueError, match="same tensor"):
        trained(x, x, questions=target_alone)


def squares(out: Tensor) -> Tensor:
    return out.square().sum()


ALONE: list[tuple[Any, Any, str]] = [
    (torch.sum, torch.sum, "auto"),
    (torch.mean, torch.mean, "auto"),
]
ALONE += [
    (lambda out: out.sum(dim=1).mean(), torch.sum, "auto"),
    (squares, squares, "inputs alone"),
]


@pytest.mark.parametrize(("of_batch", "of_one", "way"), ALONE)
def test_a_loss_of_the_outputs_alone_is_identified_or_given(
    of_batch: Any, of_one: Any, way: str
) -> None:
    """Each example's own gradient is clipped, not B times it; of batches of 5 and 3."""
    loss = lambda out, _: of_batch(out)  # noqa: E731
    run = trained(numbers(8), way=way, loss=loss, criterion=None if way == "auto" else loss)
    run.plain.function, run.true_loss = run.module.function, lambda out, _: of_one(out)
    assert_true(run)
