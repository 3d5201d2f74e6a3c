"""Layer-wise measures: sensitivity against the brute-force Jacobian, V-information against what must come out."""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from torchfil import Private, zoo
from torchfil.attribution import LayerTable, jacobian_sensitivity, layer_gradients, v_information
from torchfil.utils.errors import UnsupportedModuleError

NORMS = ("fro", 1, math.inf)


def _small(name: str, n: int = 3) -> tuple[nn.Module, Any, Tensor, Tensor]:
    """A small network in float64, its loss, inputs and targets."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        images, labels = torch.rand(n, 1, 8, 8), torch.randint(3, (n,))
        loss: nn.Module = nn.CrossEntropyLoss()
        model: nn.Module
        if name == "small_alexnet":
            model = zoo.small_alexnet(3, 1, 8)
        elif name == "vgg11":
            model = zoo.vgg11(3, 1, 8)
        elif name == "fcnet":
            model, images = zoo.fcnet(3, 5, width=4), torch.randn(n, 5)
        elif name == "vit_tiny":
            model = zoo.vit_tiny(3, 1, 8, width=4, heads=2, depth=1)
        elif name == "token_transformer":
            model = zoo.token_transformer(3, 7, 4, width=4, heads=2, depth=2)
            images = torch.randint(7, (n, 4))
        elif name == "regression":
            model, loss = zoo.fcnet(2, 4, width=3, depth=3), nn.MSELoss()
            images, labels = torch.randn(n, 4), torch.randn(n, 2, dtype=torch.float64)
        else:
            raise KeyError(name)
        images = images.double() if images.is_floating_point() else images
        return model.double(), loss, images, labels


def _own_parameters(model: nn.Module, bias: bool) -> dict[str, list[nn.Parameter]]:
    found: dict[str, list[nn.Parameter]] = {}
    for layer, module in model.named_modules():
        own = [p for key, p in module.named_parameters(recurse=False) if p.requires_grad and (bias or key != "bias")]
        if own:
            found[layer] = own
    return found


def _forward_mode(model: nn.Module, loss_fn: Any, x: Tensor, y: Tensor, wrt: str, norm: Any) -> dict[str, float]:
    """The normalised mean by layer from forward-mode Jacobians, for networks too wide for row by row."""
    weights = {name: value.detach() for name, value in model.named_parameters()}
    totals: dict[str, float] = {}
    for i in range(len(x)):
        point = (x[i : i + 1], nn.functional.one_hot(y[i : i + 1], 3).double())

        def gradient(inputs: Tensor, target: Tensor) -> dict[str, Tensor]:
            return torch.func.grad(lambda w: loss_fn(torch.func.functional_call(model, w, (inputs,)), target))(weights)

        jacobians = torch.func.jacfwd(gradient, argnums=1 if wrt == "target" else 0)(*point)
        gradients = gradient(*point)
        for layer in _own_parameters(model, bias=True):
            names = [name for name in weights if name.rpartition(".")[0] == layer]
            g = torch.cat([gradients[name].flatten() for name in names]).numpy()
            J = np.concatenate([jacobians[name].reshape(weights[name].numel(), -1).numpy() for name in names])
            value = {
                "fro": np.linalg.norm(J) / len(g) ** 0.5,
                1: np.abs(J).mean(axis=0).sum(),
                math.inf: np.abs(J).max(),
            }
            totals[layer] = totals.get(layer, 0.0) + value[norm] / (g.max() - g.min()) / len(x)
    return totals


def _brute_force(
    model: nn.Module, loss_fn: Any, x: Tensor, y: Tensor, wrt: str, norm: Any, normalised: bool, bias: bool = True
) -> dict[str, np.ndarray]:
    """{layer: [n]} from one full Jacobian per example and layer."""
    result: dict[str, np.ndarray] = {}
    for layer, own in _own_parameters(model, bias).items():
        values = []
        for i in range(len(x)):
            target = y[i : i + 1]
            if not target.is_floating_point():
                target = nn.functional.one_hot(target, 3).double()

            def gradient(t: Tensor, own: list[nn.Parameter] = own, i: int = i, target: Tensor = target) -> Tensor:
                inputs, truth = (x[i : i + 1], t) if wrt == "target" else (t, target)
                parts = torch.autograd.grad(loss_fn(model(inputs), truth), own, create_graph=True)
                return torch.cat([part.flatten() for part in parts])

            t = target if wrt == "target" else x[i : i + 1]
            g = gradient(t.clone().requires_grad_()).detach().numpy()
            jacobian = torch.autograd.functional.jacobian(gradient, t).reshape(len(g), -1).numpy()
            value = {"fro": np.linalg.norm(jacobian), 1: np.abs(jacobian).sum(), math.inf: np.abs(jacobian).max()}[norm]
            if normalised:
                value /= {"fro": len(g) ** 0.5, 1: len(g), math.inf: 1}[norm] * (g.max() - g.min())
            values.append(value)
        result[layer] = np.array(values)
    return result


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("normalised", [True, False])
@pytest.mark.parametrize("wrt", ["target", "input"])
@pytest.mark.parametrize("name", ["fcnet", "regression"])
def test_sensitivity_is_that_of_the_full_jacobian(name: str, wrt: Any, norm: Any, normalised: bool) -> None:
    case = _small(name)
    truth = _brute_force(*case, wrt, norm, normalised)
    table = jacobian_sensitivity(*case, wrt, norm, normalised)
    assert table.layers == tuple(truth)
    values = np.stack(list(truth.values()))
    np.testing.assert_allclose(table.value, values.mean(axis=1), rtol=1e-8)
    np.testing.assert_allclose(table.standard_error, values.std(axis=1, ddof=1) / 3**0.5, rtol=1e-7)
    assert (table.low <= table.value).all()
    assert (table.value <= table.high).all()


@pytest.mark.parametrize(
    ("name", "wrt", "norm"),
    [
        ("small_alexnet", "target", "fro"),
        ("vgg11", "target", 1),
        ("vit_tiny", "target", math.inf),
        ("vit_tiny", "input", "fro"),
        ("token_transformer", "target", "fro"),
        ("token_transformer", "target", 1),
    ],
)
def test_sensitivity_of_the_zoo(name: str, wrt: Any, norm: Any) -> None:
    case = _small(name, n=2)
    truth = _forward_mode(*case, wrt, norm)
    table = jacobian_sensitivity(*case, wrt, norm)
    assert table.layers == tuple(truth)
    np.testing.assert_allclose(table.value, list(truth.values()), rtol=1e-8)


@pytest.mark.parametrize("chunk_size", [1, 2, 7, 1000])
def test_chunks_change_nothing(chunk_size: int) -> None:
    case = _small("fcnet", n=5)
    for wrt in ("target", "input"):
        whole = jacobian_sensitivity(*case, wrt)  # type: ignore[arg-type]
        pieces = jacobian_sensitivity(*case, wrt, chunk_size=chunk_size)  # type: ignore[arg-type]
        np.testing.assert_allclose(pieces.value, whole.value, rtol=1e-12)
        np.testing.assert_allclose(pieces.standard_error, whole.standard_error, rtol=1e-10)


def test_weights_alone() -> None:
    case = _small("fcnet")
    truth = _brute_force(*case, "target", "fro", True, bias=False)
    table = jacobian_sensitivity(*case, bias=False)
    np.testing.assert_allclose(table.value, [value.mean() for value in truth.values()], rtol=1e-8)


def test_one_hot_targets_and_the_reduction_change_nothing() -> None:
    model, loss_fn, x, y = _small("fcnet")
    table = jacobian_sensitivity(model, loss_fn, x, y)
    one_hot = nn.functional.one_hot(y, 3).double()
    np.testing.assert_allclose(jacobian_sensitivity(model, loss_fn, x, one_hot).value, table.value)
    summed = jacobian_sensitivity(model, nn.CrossEntropyLoss(reduction="sum"), x, y)
    np.testing.assert_allclose(summed.value, table.value)
    functional = jacobian_sensitivity(model, nn.functional.cross_entropy, x, y)
    np.testing.assert_allclose(functional.value, table.value)


def test_maps_of_class_numbers() -> None:
    torch.manual_seed(0)
    model = nn.Conv2d(1, 3, 1).double()
    x, y = torch.rand(2, 1, 2, 2).double(), torch.randint(3, (2, 2, 2))
    numbers = jacobian_sensitivity(model, nn.CrossEntropyLoss(), x, y)
    probabilities = nn.functional.one_hot(y, 3).movedim(-1, 1).double()
    np.testing.assert_allclose(
        numbers.value, jacobian_sensitivity(model, nn.CrossEntropyLoss(), x, probabilities).value
    )


def test_an_embedding_can_be_what_moves() -> None:
    model, loss_fn, tokens, y = _small("token_transformer", n=2)
    embedded = model.get_submodule("embedding")(tokens).detach()
    after = nn.Sequential(model.get_submodule("encoder"), model.get_submodule("head"))
    truth = _brute_force(after, loss_fn, embedded, y, "input", "fro", False)
    table = jacobian_sensitivity(model, loss_fn, tokens, y, Private(submodule="embedding"), normalised=False)
    assert table.measure == "sensitivity of gradients to the output of embedding"
    got = dict(zip(table.layers, table.value, strict=True))
    np.testing.assert_allclose(got["head"], truth["1"].mean(), rtol=1e-8)
    np.testing.assert_allclose(got["encoder.layers.0.mlp.0"], truth["0.layers.0.mlp.0"].mean(), rtol=1e-8)


def test_frozen_layers_are_left_out_and_shared_ones_counted_once() -> None:
    model, loss_fn, x, y = _small("fcnet")
    model.get_submodule("fc2").requires_grad_(False)
    model.get_submodule("fc4").bias.requires_grad_(False)  # type: ignore[union-attr]
    truth = _brute_force(model, loss_fn, x, y, "target", "fro", True)
    table = jacobian_sensitivity(model, loss_fn, x, y)
    assert table.layers == tuple(f"fc{i}" for i in (1, 3, 4, 5, 6, 7, 8, 9)) == tuple(truth)
    np.testing.assert_allclose(table.value, [value.mean() for value in truth.values()], rtol=1e-8)

    torch.manual_seed(0)
    shared = nn.Linear(3, 3)
    tied = nn.Sequential(shared, nn.Tanh(), shared, nn.Tanh(), nn.Linear(3, 3)).double()
    tied[4].weight = shared.weight
    args = (tied, loss_fn, torch.randn(2, 3).double(), torch.tensor([0, 2]))
    table = jacobian_sensitivity(*args)
    assert table.layers == ("0", "4")
    assert layer_gradients(*args)["4"].shape == (2, 3)  # its bias; the weight counts for the first that holds it
    np.testing.assert_allclose(table.value[0], _brute_force(*args, "target", "fro", True)["0"].mean(), rtol=1e-8)
    assert tied[4].weight is tied[0].weight is shared.weight


def test_a_dead_layer_has_no_sensitivity() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    nn.init.constant_(model[0].bias, -100.0)
    table = jacobian_sensitivity(model, nn.CrossEntropyLoss(), torch.rand(3, 2), torch.tensor([0, 1, 0]))
    assert table.value[0] == 0
    assert table.value[1] > 0


def test_one_example_has_no_standard_error() -> None:
    table = jacobian_sensitivity(*_small("fcnet", n=1))
    assert np.isfinite(table.value).all()
    assert np.isnan(table.standard_error).all()
    assert "nan" in str(table)
    table.plot()


def test_sensitivity_refuses() -> None:
    model, loss_fn, x, y = _small("fcnet")
    with pytest.raises(TypeError, match="Private.submodule"):
        jacobian_sensitivity(*_small("token_transformer"), "input")
    with pytest.raises(ValueError, match="wrt='label'"):
        jacobian_sensitivity(model, loss_fn, x, y, "label")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="norm=2"):
        jacobian_sensitivity(model, loss_fn, x, y, norm=2)
    with pytest.raises(ValueError, match="chunk_size=0"):
        jacobian_sensitivity(model, loss_fn, x, y, chunk_size=0)
    with pytest.raises(ValueError, match="run from 0 to 3.*3 outputs"):
        jacobian_sensitivity(model, loss_fn, x, torch.tensor([0, 3, 1]))
    with pytest.raises(TypeError, match="does not take class probabilities"):
        jacobian_sensitivity(model, nn.NLLLoss(), x, y)
    with pytest.raises(ValueError, match="not class numbers"):
        jacobian_sensitivity(model, loss_fn, x, y[:, None])
    with pytest.raises(TypeError, match="tensor of targets, got list"):
        jacobian_sensitivity(model, loss_fn, x, [0, 1, 2])
    with pytest.raises(ValueError, match="no example"):
        jacobian_sensitivity(model, loss_fn, x[:0], y[:0].double()[:, None].expand(0, 3))
    normalised = nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3)).double()
    with pytest.raises(UnsupportedModuleError, match="GroupNorm"):
        jacobian_sensitivity(normalised, loss_fn, x, y)
    assert normalised[1].num_batches_tracked == 0
    with pytest.raises(UnsupportedModuleError, match="dropout"):
        layer_gradients(nn.Sequential(nn.Linear(5, 3), nn.Dropout(0.1)).double(), loss_fn, x, y)


@pytest.mark.parametrize("name", ["small_alexnet", "token_transformer", "regression"])
def test_layer_gradients_are_autograds(name: str) -> None:
    model, loss_fn, x, y = _small(name, n=4)
    gradients = layer_gradients(model, loss_fn, x, y)
    means = layer_gradients(model, loss_fn, x, y, batch=2)
    own = _own_parameters(model, bias=True)
    assert list(gradients) == list(own)
    for layer, parameters in own.items():
        rows = []
        for i in range(4):
            parts = torch.autograd.grad(loss_fn(model(x[i : i + 1]), y[i : i + 1]), parameters)
            rows.append(torch.cat([part.flatten() for part in parts]))
        torch.testing.assert_close(gradients[layer], torch.stack(rows))
        torch.testing.assert_close(means[layer], torch.stack(rows).reshape(2, 2, -1).mean(dim=1))


def test_layer_gradients_refuse() -> None:
    model, loss_fn, x, y = _small("fcnet")
    with pytest.raises(ValueError, match="batch=2 must divide the 3 examples.*drop the last 1"):
        layer_gradients(model, loss_fn, x, y, batch=2)
    with pytest.raises(ValueError, match="batch=0"):
        layer_gradients(model, loss_fn, x, y, batch=0)
    with pytest.raises(ValueError, match="no example"):
        layer_gradients(model, loss_fn, x[:0], y[:0])
    with pytest.raises(ValueError, match="disagree on the number of examples"):
        layer_gradients(model, loss_fn, x, y[:2])
    with pytest.raises(ValueError, match="no trainable parameter"):
        layer_gradients(model.requires_grad_(False), loss_fn, x, y)


def _noise(seed: int, n: int = 120, features: int = 10) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    return generator.normal(size=(n, features)), generator.integers(2, size=n)


@pytest.mark.parametrize(("seeds", "largest"), [(8, 0.04), pytest.param(30, 0.02, marks=pytest.mark.slow)])
def test_an_independent_property_gives_nothing(seeds: int, largest: float) -> None:
    covered, values = [], []
    for seed in range(seeds):
        X, p = _noise(seed)
        table = v_information({"layer": X}, p, seed=seed)
        covered.append(table.low[0] <= 0 <= table.high[0])
        values.append(table.value[0])
    assert np.mean(covered) >= 0.85  # nominal 0.95; the training half's chance is not in the interval
    assert abs(np.mean(values)) < largest
    X, p = _noise(0, features=400)  # far more features than examples
    assert abs(v_information({"layer": X}, p).value[0]) < 0.05


@pytest.mark.parametrize("labels", [(0, 1), ("man", "woman"), (False, True)])
def test_a_copied_property_gives_its_entropy(labels: tuple[Any, Any]) -> None:
    X, p = _noise(1, n=200)
    X[:, 3] = p
    layers = {"noise": X[:, :3], "copy": X, "alone": X[:, 3:4]}
    table = v_information(layers, [labels[i] for i in p], width=None)
    assert table.layers == ("noise", "copy", "alone")
    assert table.unit == "nats"
    assert table.low[0] <= 0 <= table.high[0]
    entropy = -sum(q * math.log(q) for q in (p.mean(), 1 - p.mean()))
    np.testing.assert_allclose(table.value[1:], entropy, atol=0.03)
    assert (table.high - table.low < 0.1)[1:].all()


def _as_wide_as(rng: np.random.Generator, p: np.ndarray, features: int, noise: float) -> np.ndarray:
    """Two normal laws 1.499 apart in the first feature: 0.221 nats; the first ten vary by 1, the rest by ``noise``."""
    X = rng.normal(size=(len(p), features))
    X[:, 10:] *= noise
    X[:, 0] += 1.4993 * p
    return X


@pytest.mark.parametrize(("runs", "paired"), [(4, True), pytest.param(24, False, marks=pytest.mark.long)])
def test_layers_of_any_width_compare_where_noise_varies_less(runs: int, paired: bool) -> None:
    """0.221 nats in 10 and in 100 features: projected to one width they agree, as they are they do not."""
    truth, p = 0.221, np.arange(200) % 2
    projected, plain, errors = [], [], []
    for seed in range(runs):
        rng = np.random.default_rng(seed)
        wide = _as_wide_as(rng, p, 100, noise=0.1)
        rotation = np.linalg.qr(rng.normal(size=(100, 100)))[0]
        narrow_layer = wide[:, :10] if paired else _as_wide_as(rng, p, 10, noise=1.0)
        layers = {"narrow": narrow_layer, "wide": wide, "turned": wide @ rotation}
        table = v_information(layers, p, seed=seed)
        projected.append(table.value)
        errors.append(table.standard_error)
        plain.append(v_information({name: layers[name] for name in ("narrow", "wide")}, p, seed=seed, width=None).value)

    narrow, wide, turned = np.mean(projected, axis=0)
    error = np.sqrt(np.square(errors).mean(axis=0) / runs)
    assert abs(wide - narrow) < 3 * math.hypot(error[0], error[1])
    assert turned == pytest.approx(wide, abs=1e-3)
    assert truth / 3 < narrow < truth, "biased down"
    assert truth / 3 < wide < truth
    differences = np.asarray(plain)[:, 0] - np.asarray(plain)[:, 1]
    assert differences.mean() > 3 * differences.std(ddof=1) / math.sqrt(runs)


def test_what_components_do_not_hold_is_lost() -> None:
    """Where all features vary alike, no projection brings the information back; the estimate stays below the truth."""
    p = np.arange(200) % 2
    for width in (10, None):
        found = [
            v_information(
                {"wide": _as_wide_as(np.random.default_rng(seed), p, 100, noise=1.0)}, p, seed=seed, width=width
            ).value[0]
            for seed in range(6)
        ]
        assert np.mean(found) < 0.12


def test_one_width_for_all_is_that_of_the_narrowest() -> None:
    X, p = _noise(5, features=50)
    X[:, 0] += 2 * p
    table = v_information({"narrow": X[:, :4], "wide": X}, p)
    assert table.value[0] == v_information({"narrow": X[:, :4]}, p, width=4).value[0]
    assert table.value[1] == v_information({"wide": X}, p, width=4).value[0]
    assert table.measure == "V-information (logistic, 4 components), lower estimate"
    flat = np.repeat(X[:, :1], 6, axis=1)  # of rank one
    np.testing.assert_allclose(
        v_information({"flat": flat}, p).value, v_information({"one": X[:, :1]}, p).value, rtol=1e-6
    )


def test_forests_see_what_lines_do_not() -> None:
    X, p = _noise(2, n=200, features=1)
    X[:, 0] += np.where(X[:, 0] > 0, 1, -1)
    p = (np.abs(X[:, 0]) > np.median(np.abs(X[:, 0]))).astype(int)
    assert v_information({"layer": X}, p).high[0] < 0.1
    table = v_information({"layer": X}, p, "forest")
    assert table.value[0] > 0.55
    assert np.isfinite(table.low).all()


def test_any_classifier_and_several_classes() -> None:
    from sklearn.naive_bayes import GaussianNB
    from sklearn.svm import LinearSVC

    generator = np.random.default_rng(0)
    p = generator.integers(3, size=240)
    X = np.eye(3)[p] + 0.05 * generator.normal(size=(240, 3))
    table = v_information({"layer": torch.tensor(X)}, torch.tensor(p), GaussianNB())
    assert table.measure == "V-information (GaussianNB, all features), lower estimate"
    np.testing.assert_allclose(table.value, math.log(3), atol=0.05)
    with pytest.raises(TypeError, match="LinearSVC has no fit and predict_proba"):
        v_information({"layer": X}, p, LinearSVC())


def test_wide_gradients() -> None:
    X, p = _noise(3, n=120, features=600)
    X[:, :60] += 2 * p[:, None]
    whole, few = v_information({"l": X}, p, width=None), v_information({"l": X}, p, width=5)
    assert whole.value[0] > 0.4
    assert few.value[0] > 0.5
    from torchfil.attribution.layer_information import _features

    inside, outside = _features(X[:60], X[60:], None, True)  # the rotation keeps every inner product
    mean, deviation = X[:60].mean(axis=0), X[:60].std(axis=0)
    Z, new = (X[:60] - mean) / deviation, (X[60:] - mean) / deviation
    scale = (Z**2).sum() / 60
    np.testing.assert_allclose(inside @ inside.T, Z @ Z.T / scale, atol=1e-10)
    np.testing.assert_allclose(outside @ inside.T, new @ Z.T / scale, atol=1e-10)
    for columns in (4, 600):  # more rows than columns, or fewer
        projected, _ = _features(X[:, :columns], X[:, :columns], 2, False)
        left = np.linalg.svd(X[:, :columns] - X[:, :columns].mean(axis=0), full_matrices=False)[0]
        np.testing.assert_allclose(np.abs(projected), np.abs(left[:, :2]) * math.sqrt(len(X)), atol=1e-8)


def test_the_split_can_be_given_and_seeds_are_kept() -> None:
    X, p = _noise(4)
    rows = np.arange(0, 120, 3)
    table = v_information({"l": X}, p, test_rows=rows)
    mask = np.zeros(120, dtype=bool)
    mask[rows] = True
    assert table.value == v_information({"l": X}, p, test_rows=mask).value
    X[:, 0] = p
    X[:20, 0] = 0.5
    first, again, other = (v_information({"l": X}, p, seed=seed) for seed in (5, 5, 6))
    assert (first.value, first.low, first.high) == (again.value, again.low, again.high)
    assert first.value != other.value


def test_the_interval_is_calibrated_for_a_fixed_predictor() -> None:
    """Where the training half is large, the interval covers the gain of its predictor on the population."""
    X, p = _noise(6, n=20_000, features=2)
    X[:, 0] += 0.5 * p
    population = v_information({"l": X}, p).value[0]
    covered = []
    for seed in range(20):
        rows = np.random.default_rng(seed).choice(20_000, 2200, replace=False)
        table = v_information({"l": X[rows]}, p[rows], test_rows=np.arange(300), seed=seed)
        covered.append(table.low[0] <= population <= table.high[0])
    assert np.mean(covered) >= 0.8


def test_v_information_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    X, p = _noise(0, n=20)
    with pytest.raises(ValueError, match="constant property"):
        v_information({"l": X}, np.ones(20))
    with pytest.raises(ValueError, match="cut a continuous property"):
        v_information({"l": X}, X[:, 0])
    with pytest.raises(ValueError, match="0 held-out examples"):
        v_information({"l": X}, p, test_rows=np.flatnonzero(p == 0)[:3])
    with pytest.raises(ValueError, match=r"gradients\['l'\] has shape \(19, 10\)"):
        v_information({"l": X[:19]}, p)
    with pytest.raises(ValueError, match="NaN or infinite"):
        v_information({"l": np.where(X > 1, np.nan, X)}, p)
    with pytest.raises(TypeError, match="dict"):
        v_information(X, p)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="family='linear'"):
        v_information({"l": X}, p, "linear")
    for bad in ({"test_share": 1.0}, {"smoothing": 0.0}, {"bootstrap": 0}, {"width": 0}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            v_information({"l": X}, p, **bad)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(ImportError, match=r"pip install 'torchfil\[glm\]'"):
        v_information({"l": X}, p)


def _table(layers: tuple[str, ...], value: Any) -> LayerTable:
    value = np.asarray(value, dtype=float)
    return LayerTable(layers, value, 0.9 * value, 1.2 * value, 0.05 * value, "measure", "unit")


def test_the_table_reads_well() -> None:
    text = str(_table(("", "conv1", "encoder.layers.0.attention"), [0.0031, 12.5, 3])).splitlines()
    assert text[0] == "measure [unit]"
    assert text[2].startswith("(model)")
    assert text[3].split() == ["conv1", "12.5000", "11.2500", "15.0000"]
    assert len({len(line) for line in text[1:]}) == 1
    assert "1.00e-09" in str(_table(("a", "b"), [1e-9, 1]))
    frame = _table(("a", "b"), [1, 2]).to_pandas()
    assert list(frame.columns) == ["value", "low", "high", "standard_error"]
    assert frame.index.name == "layer"
    assert frame.loc["b", "high"] == 2.4


def test_the_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    names = tuple(f"encoder.layers.{i}.queries_keys_values" for i in range(12))
    figure = _table(names, range(12)).plot()
    FigureCanvasAgg(figure).draw()
    axis = figure.axes[0]
    assert [label.get_text() for label in axis.get_xticklabels()] == list(names)
    assert len(axis.patches) == 12
    for label in axis.get_xticklabels():
        box = label.get_window_extent()
        assert box.x0 >= -1  # nothing is cut off
        assert box.y0 >= -1
    assert _table(("a", "b"), [math.inf, 2]).plot(axis) is figure
    assert [text.get_text() for text in axis.texts] == ["inf"]
    assert len(axis.patches) == 13
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.delitem(sys.modules, "torchfil.viz._notebook")  # as before anything was drawn
    with pytest.raises(ImportError, match=r"pip install 'torchfil\[report\]'"):
        _table(("a",), [1]).plot()
