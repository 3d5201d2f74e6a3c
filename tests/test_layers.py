"""Gradients by layer, and the table of a number for each."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from tests.layer_cases import own_parameters, small_case
from tests.refused import all_refused
from torchfil.attribution import LayerTable, layer_gradients


@pytest.mark.parametrize("name", ["small_alexnet", "token_transformer", "regression"])
def test_layer_gradients_are_autograds(name: str) -> None:
    model, loss_fn, x, y = small_case(name, n=4)
    gradients = layer_gradients(model, loss_fn, x, y)
    means = layer_gradients(model, loss_fn, x, y, batch=2)
    own = own_parameters(model, bias=True)
    assert list(gradients) == list(own)
    for layer, parameters in own.items():
        rows = []
        for i in range(4):
            parts = torch.autograd.grad(loss_fn(model(x[i : i + 1]), y[i : i + 1]), parameters)
            rows.append(torch.cat([part.flatten() for part in parts]))
        torch.testing.assert_close(gradients[layer], torch.stack(rows))
        torch.testing.assert_close(means[layer], torch.stack(rows).reshape(2, 2, -1).mean(dim=1))


def test_layer_gradients_refuse() -> None:
    model, loss_fn, x, y = small_case("fcnet")
    all_refused(
        {
            "batch=2 must divide the 3": lambda: layer_gradients(model, loss_fn, x, y, batch=2),
            "batch=0": lambda: layer_gradients(model, loss_fn, x, y, batch=0),
            "no example": lambda: layer_gradients(model, loss_fn, x[:0], y[:0]),
            "disagree on the number of": lambda: layer_gradients(model, loss_fn, x, y[:2]),
            "no trainable parameter": lambda: layer_gradients(model.requires_grad_(False), loss_fn, x, y),
        }
    )


def _table(layers: tuple[str, ...], value: Any) -> LayerTable:
    value = np.asarray(value, dtype=float)
    return LayerTable(layers, value, 0.9 * value, 1.2 * value, 0.05 * value, "measure", "unit")


def test_the_table_reads_well() -> None:
    text = str(_table(("", "conv1", "encoder.layers.0.attention"), [0.0031, 12.5, 3])).splitlines()
    assert text[0] == "measure [unit]"
    assert text[2].startswith("(model)")
    assert text[3].split() == ["conv1", "12.5000", "11.2500", "15.0000"]
    assert len({len(line) for line in text[1:]}) == 1
    frame = _table(("a", "b"), [1, 2]).to_pandas()
    assert list(frame.columns) == ["value", "low", "high", "standard_error"]
    assert frame.loc["b", "high"] == 2.4


def test_the_picture() -> None:
    names = tuple(f"encoder.layers.{i}" for i in range(12))
    figure = _table(names, range(12)).plot()
    axis = figure.axes[0]
    assert [label.get_text() for label in axis.get_xticklabels()] == list(names)
    assert len(axis.patches) == 12
    assert _table(("a", "b"), [math.inf, 2]).plot(axis) is figure
    assert [text.get_text() for text in axis.texts] == ["inf"]
