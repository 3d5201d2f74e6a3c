"""Gradients by layer, how each moves with the input against the full Jacobian, and the table of a
number for each.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from benchmarks import zoo
from tests.refused import all_refused
from torchfil.attribution import jacobian_sensitivity, layer_gradients, layers
from torchfil.utils.errors import UnsupportedModuleError


def small_case(name: str, n: int = 3) -> tuple[nn.Module, Any, Tensor, Tensor]:
    """A small network in float64, its loss, inputs and targets."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        labels = torch.randint(3, (n,))
        cases: dict[str, tuple[nn.Module, Tensor]] = {
            "fcnet": (zoo.fcnet(3, 5, width=4), torch.randn(n, 5)),
            "token_transformer": (
                zoo.token_transformer(3, 7, 4, width=4, heads=2, depth=1),
                torch.randint(7, (n, 4)),
            ),
            "regression": (zoo.fcnet(2, 4, width=3, depth=3), torch.randn(n, 4)),
        }
        model, x = cases[name]
        x = x.double() if x.is_floating_point() else x
        if name == "regression":
            return model.double(), nn.MSELoss(), x, torch.randn(n, 2, dtype=torch.float64)
        return model.double(), nn.CrossEntropyLoss(), x, labels


def own_parameters(model: nn.Module) -> dict[str, list[nn.Parameter]]:
    found: dict[str, list[nn.Parameter]] = {}
    for layer, module in model.named_modules():
        own = [p for p in module.parameters(recurse=False) if p.requires_grad]
        if own:
            found[layer] = own
    return found


@pytest.mark.parametrize("name", ["token_transformer", "regression"])
def test_layer_gradients_are_autograds(name: str) -> None:
    model, loss_fn, x, y = small_case(name, n=4)
    gradients = layer_gradients(model, loss_fn, x, y)
    means = layer_gradients(model, loss_fn, x, y, batch=2)
    own = own_parameters(model)
    assert list(gradients) == list(own)
    for layer, parameters in own.items():
        rows = []
        for i in range(4):
            parts = torch.autograd.grad(loss_fn(model(x[i : i + 1]), y[i : i + 1]), parameters)
            rows.append(torch.cat([part.flatten() for part in parts]))
        torch.testing.assert_close(gradients[layer], torch.stack(rows))
        torch.testing.assert_close(means[layer], torch.stack(rows).reshape(2, 2, -1).mean(dim=1))


def _brute_force(
    model: nn.Module, loss_fn: Any, x: Tensor, y: Tensor, wrt: str
) -> dict[str, np.ndarray]:
    """{layer: [n]} from one full Jacobian per example and layer."""
    result: dict[str, np.ndarray] = {}
    for layer, own in own_parameters(model).items():
        values = []
        for i in range(len(x)):
            target = y[i : i + 1]
            if not target.is_floating_point():
                target = nn.functional.one_hot(target, 3).double()

            def gradient(
                t: Tensor, own: list[nn.Parameter] = own, i: int = i, target: Tensor = target
            ) -> Tensor:
                inputs, truth = (x[i : i + 1], t) if wrt == "target" else (t, target)
                parts = torch.autograd.grad(loss_fn(model(inputs), truth), own, create_graph=True)
                return torch.cat([part.flatten() for part in parts])

            t = target if wrt == "target" else x[i : i + 1]
            g = gradient(t.clone().requires_grad_()).detach().numpy()
            jacobian = torch.autograd.functional.jacobian(gradient, t).reshape(len(g), -1).numpy()
            values.append(np.linalg.norm(jacobian) / (len(g) ** 0.5 * (g.max() - g.min())))
        result[layer] = np.array(values)
    return result


@pytest.mark.parametrize("wrt", ["target", "input"])
@pytest.mark.parametrize("name", ["fcnet", "regression"])
def test_sensitivity_is_that_of_the_full_jacobian(
    name: str, wrt: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = small_case(name)
    truth = _brute_force(*case, wrt)
    monkeypatch.setattr(layers, "DEFAULT_MAX_MEMORY", 1)  # one example after the other
    table = jacobian_sensitivity(*case, wrt)
    assert table.layers == tuple(truth)
    values = np.stack(list(truth.values()))
    np.testing.assert_allclose(table.value, values.mean(axis=1), rtol=1e-8)
    np.testing.assert_allclose(table.standard_error, values.std(axis=1, ddof=1) / 3**0.5, rtol=1e-7)
    assert (table.low <= table.value).all()
    assert (table.value <= table.high).all()


def test_frozen_layers_are_left_out_and_shared_ones_counted_once() -> None:
    torch.manual_seed(0)
    shared, frozen = nn.Linear(3, 3), nn.Linear(3, 3).requires_grad_(False)
    tied = nn.Sequential(shared, nn.Tanh(), shared, nn.Tanh(), frozen, nn.Linear(3, 3)).double()
    tied[5].weight = shared.weight
    args = (tied, nn.CrossEntropyLoss(), torch.randn(2, 3).double(), torch.tensor([0, 2]))
    table = jacobian_sensitivity(*args)
    assert table.layers == ("0", "5")
    # its bias; the weight counts for the first that holds it
    assert layer_gradients(*args)["5"].shape == (2, 3)
    np.testing.assert_allclose(table.value[0], _brute_force(*args, "target")["0"].mean(), rtol=1e-8)
    assert tied[5].weight is tied[0].weight is shared.weight


def test_refusals() -> None:
    model, loss_fn, x, y = small_case("fcnet")
    refused = {
        "batch=2 must divide the 3": lambda: layer_gradients(model, loss_fn, x, y, batch=2),
        "Private": lambda: jacobian_sensitivity(*small_case("token_transformer"), "input"),
        "wrt='label'": lambda: jacobian_sensitivity(model, loss_fn, x, y, "label"),  # type: ignore[arg-type]
        "class numbers 0 … 3": lambda: jacobian_sensitivity(
            model, loss_fn, x, torch.tensor([0, 3, 1])
        ),
        "no example": lambda: layer_gradients(model, loss_fn, x[:0], y[:0]),
    }
    all_refused(refused)
    normalised = nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3)).double()
    with pytest.raises(UnsupportedModuleError, match="GroupNorm"):
        jacobian_sensitivity(normalised, loss_fn, x, y)
    assert normalised[1].num_batches_tracked == 0
