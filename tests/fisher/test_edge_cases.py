"""What the docstrings guarantee at the edges, what is private, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.cases import DEVICE, SIGMA, build, relative_error
from tests.fisher.recorded_cases import Model, close
from torchfil import fisher
from torchfil.fisher import PoissonAmplification, reference
from torchfil.fisher.batch import PrivateBatch, largest_eigenvalue
from torchfil.fisher.gradients import ExampleGradients
from torchfil.private import Private, superpixel
from torchfil.utils.errors import UnsupportedModuleError

SETTINGS: dict[str, Any] = {"max_grad_norm": 1.0, "noise_multiplier": SIGMA}
FUNCTIONS = [fisher.exact_fim, fisher.fim_trace, fisher.fim_diagonal]
X, Y = torch.randn(3, 3), torch.tensor([0, 1, 0])
BAD = float("nan")
cross_entropy = nn.CrossEntropyLoss()


@pytest.mark.parametrize("amplification", [None, PoissonAmplification(0.1)])
@pytest.mark.parametrize("clip", ["smooth", "gelu"])
def test_zero_gradient(clip: str, amplification: PoissonAmplification | None) -> None:
    """A perfect fit: g = 0, J = 2 x wᵀ, and the FIM is φ(0)² JᵀJ/s², times q where subsampled.

    Never NaN.
    """
    model, x = nn.Linear(3, 1, bias=False).double(), torch.randn(4, 3).double()
    arguments: Any = (model, nn.MSELoss(), x, model(x).detach())
    settings: Any = {
        "max_grad_norm": 0.5,
        "noise_multiplier": 2.0,
        "clip": clip,
        "amplification": amplification,
    }
    scale = 1.0
    if clip == "gelu":  # c(0) = GELU(−1) + 1
        scale = 1 / (1 - 0.5 * (1 + math.erf(-1 / math.sqrt(2))))
    w, factor = model.weight.detach(), 4 * scale**2 * (0.1 if amplification else 1.0)
    want = torch.stack([factor * row.square().sum() * w.mT @ w for row in x])
    torch.testing.assert_close(fisher.exact_fim(*arguments, **settings), want, rtol=1e-8, atol=0)
    trace = fisher.fim_trace(*arguments, **settings)
    assert torch.isfinite(torch.cat([trace.value, trace.standard_error])).all()
    nowhere = fisher.fim_trace(model, lambda out, _: 0.0 * out.sum(), x, torch.zeros(4), **settings)
    assert torch.equal(nowhere.value, torch.zeros(4).double())


@pytest.mark.parametrize("estimator", ["exact", "weight-probes"])
@pytest.mark.parametrize(("name", "d"), [("mlp", 5), ("transformer", 32)])
def test_empty_batch(name: str, d: int, estimator: str) -> None:
    case = build(name, 0)
    settings = {**SETTINGS, "private": case.private}
    trace = fisher.fim_trace(*case.arguments, **settings, estimator=estimator)
    assert trace.value.shape == trace.standard_error.shape == (0,)
    assert fisher.exact_fim(*case.arguments, **settings).shape == (0, d, d)
    assert fisher.fim_diagonal(*case.arguments, **settings).value.shape == (0, d)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_numbers_that_every_function_refuses(function: Callable[..., Any]) -> None:
    case = build("mlp", 6)
    for name, wrong in ((name, wrong) for name in SETTINGS for wrong in (0.0, BAD, math.inf)):
        with pytest.raises(ValueError, match=f"{name}=.* must be positive"):
            function(*case.arguments, **{**SETTINGS, name: wrong})
    case.inputs[1, 0], case.inputs[4, 2] = BAD, -math.inf
    with pytest.raises(ValueError, match="2 of 6 rows: 1, 4"):
        function(*case.arguments, **SETTINGS)


@pytest.mark.parametrize("function", [fisher.fim_trace, fisher.fim_diagonal])
def test_options_of_estimators_are_checked(function: Callable[..., Any]) -> None:
    case = build("mlp", 2)
    for wrong in ({"estimator": "magic"}, {"estimator": "weight-probes", "num_probes": 0}):
        with pytest.raises(ValueError, match=list(wrong)[-1]):
            function(*case.arguments, **SETTINGS, **wrong)
    with pytest.raises(ValueError, match="error bar"):
        PrivateBatch.build(*case.arguments, **SETTINGS).estimate("matrix", "weight-probes")
    state = torch.get_rng_state()
    fisher.fim_trace(*case.arguments, **SETTINGS, estimator="exact")
    assert torch.equal(state, torch.get_rng_state()), "an exact result draws no random numbers"
    assert all(p.grad is None for p in case.model.parameters())
    assert torch.backends.mha.get_fastpath_enabled()


def test_a_model_that_is_not_finite_for_one_example_leaves_the_others_theirs() -> None:
    inputs, targets, others = torch.rand(4, 3) + 0.5, torch.tensor([0, 1, 1, 0]), [0, 1, 3]
    inputs[2, 1] = -1.0
    model = Model(lambda m, x: m.linear(x.log()), linear=nn.Linear(3, 2))
    found, alone = (
        largest_eigenvalue(
            fisher.exact_fim(model, cross_entropy, inputs[rows], targets[rows], **SETTINGS)
        )
        for rows in (range(4), others)
    )
    assert found[2].isinf()
    assert torch.allclose(found[others], alone)


def batch_norm(train: bool = True, frozen: bool = False) -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).train(train)
    model[1].requires_grad_(not frozen)
    return model


def of(name: str, **changed: Any) -> dict[str, Any]:
    """A case of three examples with some arguments changed."""
    arguments = build(name, 3).arguments
    return {
        **dict(zip(("model", "loss_fn", "inputs", "targets"), arguments, strict=True)),
        **changed,
    }


def classifier(model: nn.Module, **changed: Any) -> dict[str, Any]:
    return {"model": model, "loss_fn": cross_entropy, "inputs": X, "targets": Y, **changed}


def changed(**private: Any) -> dict[str, Any]:
    """The MLP with something else private."""
    return of("mlp", private=Private(**private))


TWO, TARGETS = build("two_inputs", 3).inputs, build("private_target", 3).targets
UNSUPPORTED = UnsupportedModuleError
dropping = Model(lambda m, x: m.layer(nn.functional.dropout(x)), layer=nn.Linear(3, 2))
running = {
    "model": nn.Sequential(nn.InstanceNorm1d(2, track_running_stats=True)),
    "inputs": torch.randn(3, 2, 3),
}
named = {"model": Model(lambda m, age: m.inner(age), inner=nn.Linear(3, 2)), "inputs": {"age": X}}
REFUSED: dict[str, tuple[Callable[[], dict[str, Any]], type[Exception], str]] = {
    "targets": (lambda: of("private_target", targets=TARGETS * BAD), ValueError, "targets has NaN"),
    "batch norm": (lambda: classifier(batch_norm()), UNSUPPORTED, r"1 \(BatchNorm1d\).*GroupNorm"),
    "batch norm, eval": (lambda: classifier(batch_norm(False)), UNSUPPORTED, "batch normalisation"),
    "batch norm, frozen": (
        lambda: classifier(batch_norm(True, True)),
        UNSUPPORTED,
        "batch normalisation",
    ),
    "instance norm": (lambda: classifier(**running), UNSUPPORTED, "running statistics"),
    "dropout": (
        lambda: classifier(nn.Sequential(nn.Linear(3, 2), nn.Dropout())),
        UNSUPPORTED,
        "dropout",
    ),
    "dropout, a function": (lambda: classifier(dropping), UNSUPPORTED, "random numbers"),
    "integers": (lambda: of("transformer"), ValueError, r"Private\(submodule='embedding'\)"),
    "integers, private": (lambda: of("transformer", private=Private(inputs=0)), TypeError, "int64"),
    "no submodule": (
        lambda: of("transformer", private=Private(submodule="embeddings")),
        ValueError,
        "it has",
    ),
    "not reduced": (
        lambda: of("private_target", loss_fn=nn.MSELoss(reduction="none")),
        ValueError,
        "2 numbers",
    ),
    "frozen": (
        lambda: of("mlp", model=build("mlp", 1).model.requires_grad_(False)),
        ValueError,
        "no trainable",
    ),
    "private labels": (lambda: changed(target=True), TypeError, "class probabilities"),
    "column 2.9": (lambda: changed(coordinates=[2.9]), ValueError, "do not fit"),
    "no column": (lambda: changed(coordinates=torch.zeros(5).bool()), ValueError, "choose nothing"),
    "another name": (
        lambda: classifier(**named, private=Private(coordinates={"Age": [1]})),
        ValueError,
        "Age",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    make, error, noun = REFUSED[name]
    with pytest.raises(error, match=noun):
        fisher.exact_fim(**make(), **SETTINGS)


def recurrent() -> nn.Module:
    layers = {"layer": nn.LSTM(3, 3, batch_first=True), "head": nn.Linear(3, 2)}
    return Model(lambda m, x: m.head(m.layer(x)[0][:, -1]), **layers)


def sharing() -> nn.Module:
    a, c = nn.Linear(3, 3), nn.Linear(3, 3)
    c.weight = a.weight
    return Model(lambda m, x: m.c(torch.tanh(m.b(torch.tanh(m.a(x))))), a=a, b=a, c=c)


# Layers that torch's vmap takes for others (as many examples as coordinates) or cannot map, and
# shared weights.
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "prelu": (lambda: nn.Sequential(nn.Linear(3, 4), nn.PReLU(4), nn.Linear(4, 2)), (3, 3)),
    "recurrent": (recurrent, (3, 4, 3)),
    "shared weights": (sharing, (3, 3)),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_exact_estimator_of_models_that_are_hard_to_map(name: str) -> None:
    torch.manual_seed(1)
    make, shape = MODELS[name]
    model, x, y = (
        make().double().to(DEVICE),
        torch.randn(shape, dtype=torch.float64, device=DEVICE),
        Y.to(DEVICE),
    )
    truth = torch.einsum("bii->b", reference.exact_fim(model, cross_entropy, x, y, **SETTINGS))
    for rows in (slice(None), slice(2, 3)):
        got = fisher.fim_trace(
            model, cross_entropy, x[rows], y[rows], estimator="exact", **SETTINGS
        ).value
        assert relative_error(got, truth[rows]) < 1e-9


@pytest.mark.parametrize("fault", ["once", "with a batch", "under vmap"])
def test_only_what_vmap_cannot_map_is_computed_one_by_one(
    fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    """An error that does not come again, or that examples alone give too, leaves later batches
    mapped.
    """
    raising, calls = False, 0

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        nonlocal raising, calls
        calls += 1
        if raising:
            raising = fault != "once"
            raise RuntimeError("shapes differ")
        return m.inner(x) * (x.sum().item() if fault == "under vmap" else 2.0)

    model = Model(forward, inner=nn.Linear(3, 2))
    gradients = ExampleGradients.build(model, cross_entropy, X, Y)
    want = [
        gradients.plain_products_of_one(i, torch.zeros(gradients.num_parameters))[0]
        for i in range(len(X))
    ]
    raising = fault != "under vmap"
    if fault == "with a batch":
        with pytest.raises(UnsupportedModuleError, match="shapes differ"):
            gradients.gradients()
        raising = False
    torch.testing.assert_close(gradients.gradients(), torch.stack(want))
    calls = 0
    gradients.gradients()
    mapped = fault != "under vmap"
    assert calls == (1 if mapped else len(X))
    assert [".item()" in record.getMessage() for record in caplog.records] == (
        [] if mapped else [True]
    )


ROW = superpixel(torch.arange(4).repeat_interleave(4).reshape(4, 4), 2)  # one row of every channel


@pytest.mark.parametrize(
    ("name", "whole", "part", "index"),
    [
        (
            "groupnorm_residual",
            None,
            Private(coordinates=ROW),
            ROW.expand(2, 4, 4).flatten().nonzero().flatten(),
        ),
        ("mlp", None, Private(coordinates=slice(1, 4)), [1, 2, 3]),
        ("mlp", None, Private(coordinates=[-1]), [4]),
        ("two_inputs", None, Private(inputs=1), [9, 10, 11]),
        (
            "named",
            None,
            Private(inputs=("image", "table"), coordinates={"table": [2]}),
            [*range(9), 11],
        ),
        ("private_target", Private(target=True), Private(inputs=(), target=True), [4, 5]),
    ],
)
def test_a_part_of_what_is_private_has_a_block_of_the_matrix(
    name: str, whole: Any, part: Private, index: Any
) -> None:
    given = (
        of("two_inputs", inputs=dict(zip(("image", "table"), TWO, strict=True)))
        if name == "named"
        else of(name)
    )
    full = fisher.exact_fim(**given, **SETTINGS, private=whole)
    got = fisher.exact_fim(**given, **SETTINGS, private=part)
    torch.testing.assert_close(got, full[:, index][:, :, index], rtol=1e-10, atol=1e-18)


def test_probabilities_as_private_labels() -> None:
    case = build("mlp", 3)
    given = of(
        "mlp", targets=nn.functional.one_hot(case.targets, 3).double(), private=Private(target=True)
    )
    close(fisher.exact_fim(**given, **SETTINGS), reference.exact_fim(**given, **SETTINGS))
