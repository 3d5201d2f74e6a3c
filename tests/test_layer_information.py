"""What classifiers learn from a layer's gradients: nothing from noise, the entropy from a copy."""

from __future__ import annotations

import math
import sys

import numpy as np
import pytest

from tests.refused import all_refused
from torchfil.attribution import v_information


def _noise(seed: int, n: int = 120, features: int = 10) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    return generator.normal(size=(n, features)), generator.integers(2, size=n)


@pytest.mark.parametrize(
    ("seeds", "largest"), [(8, 0.04), pytest.param(30, 0.02, marks=pytest.mark.slow)]
)
def test_an_independent_property_gives_nothing(seeds: int, largest: float) -> None:
    covered, values = [], []
    for seed in range(seeds):
        X, p = _noise(seed)
        table = v_information({"layer": X}, p, seed=seed)
        covered.append(table.low[0] <= 0 <= table.high[0])
        values.append(table.value[0])
    # nominal 0.95; the training half's chance is not in the interval
    assert np.mean(covered) >= 0.85
    assert abs(np.mean(values)) < largest
    X, p = _noise(0, features=400)  # far more features than examples
    assert abs(v_information({"layer": X}, p).value[0]) < 0.05


def test_a_copied_property_gives_its_entropy() -> None:
    X, p = _noise(1, n=200)
    X[:, 3] = p
    layers = {"noise": X[:, :4] * [1, 1, 1, 0], "copy": X[:, :4]}
    table = v_information(layers, [("man", "woman")[i] for i in p])
    assert table.layers == ("noise", "copy")
    assert table.low[0] <= 0 <= table.high[0]
    entropy = -sum(q * math.log(q) for q in (p.mean(), 1 - p.mean()))
    np.testing.assert_allclose(table.value[1:], entropy, atol=0.03)
    assert (table.high - table.low < 0.1)[1:].all()


def test_layers_of_any_width_compare_where_noise_varies_less() -> None:
    """0.221 nats in 10 and in 100 features: projected to one width they agree."""
    truth, p, values = 0.221, np.arange(200) % 2, []
    for seed in range(4):
        wide = np.random.default_rng(seed).normal(size=(200, 100))
        wide[:, 10:] *= 0.1
        wide[:, 0] += 1.4993 * p  # two normal laws so far apart
        table = v_information({"narrow": wide[:, :10], "wide": wide}, p, seed=seed)
        values.append(table.value)
    narrow, wide_value = np.mean(values, axis=0)
    assert abs(wide_value - narrow) < 3 * np.hypot(*table.standard_error) / 2
    assert truth / 3 < min(narrow, wide_value) <= max(narrow, wide_value) < truth, "biased down"


def test_forests_see_what_lines_do_not() -> None:
    X, _ = _noise(2, n=200, features=1)
    X += np.sign(X)
    p = (np.abs(X[:, 0]) > np.median(np.abs(X))).astype(int)
    assert v_information({"layer": X}, p).high[0] < 0.1
    table = v_information({"layer": X}, p, "forest")
    assert table.value[0] > 0.55


def test_v_information_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    X, p = _noise(0, n=20)
    refused = {
        "a constant says nothing": lambda: v_information({"l": X}, np.ones(20)),
        "merge classes": lambda: v_information({"l": X}, X[:, 0]),
        "not finite": lambda: v_information({"l": np.where(X > 1, np.nan, X)}, p),
    }
    all_refused(refused)
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(ImportError, match=r"pip install 'torchfil\[glm\]'"):
        v_information({"l": X}, p)
