from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.zoo import cifar_cnn, mnist_cnn
from tests.fisher.recorded_cases import Model
from torchfil.smoothness import NonSmoothModuleError, SmoothnessValidator


def convnet() -> nn.Sequential:
    first = (
        nn.Conv2d(1, 4, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, stride=2, padding=1),
    )
    second = (nn.Conv2d(4, 4, 3), nn.LeakyReLU(), nn.AdaptiveMaxPool2d(2))
    return nn.Sequential(*first, *second, nn.Flatten(), nn.Linear(16, 3))


@pytest.mark.parametrize(
    "model", [mnist_cnn(), cifar_cnn(), nn.Sequential(nn.Linear(2, 2), nn.GELU(), nn.ELU())]
)
def test_smooth_models_pass(model: nn.Module) -> None:
    assert SmoothnessValidator.is_valid(model)


@pytest.mark.parametrize(("activation", "kind"), [("tanh", nn.Tanh), ("silu", nn.SiLU)])
def test_fix_replaces_by_the_users_choice_and_keeps_shapes(
    activation: str, kind: type[nn.Module]
) -> None:
    model = convnet().eval().double()
    before = copy.deepcopy(model.state_dict())
    fixed = SmoothnessValidator.fix(model, activation=activation)
    assert isinstance(fixed[1], kind)
    assert isinstance(fixed[4], kind)
    assert isinstance(fixed[2], nn.AvgPool2d)
    assert (fixed[2].kernel_size, fixed[2].stride, fixed[2].padding) == (3, 2, 1)
    assert isinstance(fixed[5], nn.AdaptiveAvgPool2d)
    x = torch.randn(2, 1, 9, 9).double()
    assert fixed(x).shape == model(x).shape
    assert SmoothnessValidator.is_valid(fixed, example_inputs=x)
    assert not fixed[1].training
    assert isinstance(model[1], nn.ReLU), "the original is left alone"
    assert all(torch.equal(before[key], value) for key, value in fixed.state_dict().items())


def test_transformer_layers_call_relu_by_default() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    (error,) = SmoothnessValidator.validate(layer)
    assert "feed-forward activation is F.relu" in str(error)
    fixed = SmoothnessValidator.fix(layer, activation="gelu")
    assert SmoothnessValidator.is_valid(fixed, example_inputs=torch.randn(1, 3, 8))
    assert fixed(torch.randn(1, 3, 8)).shape == (1, 3, 8)


def test_functions_called_in_forward_are_seen_by_running_the_model() -> None:
    def forward(m: Any, x: Tensor, *, scale: Tensor) -> Tensor:
        return F.max_pool1d(F.relu(m.inner(x)), 3) * scale.abs()

    model = Model(forward, inner=nn.Linear(3, 3))
    assert SmoothnessValidator.is_valid(model), "invisible without an example"
    inputs = {"x": torch.randn(2, 3), "scale": torch.randn(2, 1)}
    texts = " ".join(
        str(error) for error in SmoothnessValidator.validate(model, example_inputs=inputs)
    )
    assert "Model.forward calls relu" in texts
    assert "calls abs" in texts
    assert "max_pool" in texts


def test_dilated_max_pooling_and_unknown_activations_are_refused() -> None:
    with pytest.raises(NonSmoothModuleError, match="dilated"):
        SmoothnessValidator.fix(nn.MaxPool2d(2, dilation=2))
    with pytest.raises(ValueError, match="activation='relu'"):
        SmoothnessValidator.fix(nn.ReLU(), activation="relu")
