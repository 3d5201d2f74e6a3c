"""What the docstrings guarantee at the edges, and the exact texts of the refusals."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.cases import DEVICE, SIGMA, TinyTransformer, build, relative_error
from torchfil import PLIS, fisher
from torchfil.fisher import PoissonAmplification, reference
from torchfil.private import Examples, Private, superpixel
from torchfil.utils.errors import UnsupportedModuleError

SETTINGS: dict[str, Any] = {"max_grad_norm": 1.0, "noise_multiplier": SIGMA}
FUNCTIONS: list[Callable[..., Any]] = [
    fisher.exact_fim,
    fisher.fim_matrix,
    fisher.fim_trace,
    fisher.fim_diagonal,
    fisher.fim_spectral_norm,
]


@pytest.mark.parametrize("amplification", [None, PoissonAmplification(0.1)])
@pytest.mark.parametrize("clip", ["smooth", "gelu", "gelu-paper", "hard", "rsqrt"])
def test_zero_gradient(clip: str, amplification: PoissonAmplification | None) -> None:
    """A perfect fit: g = 0, J = 2 x wᵀ, and the FIM is φ(0)² JᵀJ/s², times q where subsampled; never NaN."""
    model = nn.Linear(3, 1, bias=False).double()
    x = torch.randn(4, 3).double()
    y = model(x).detach()
    fim = fisher.exact_fim(
        model, nn.MSELoss(), x, y, max_grad_norm=0.5, noise_multiplier=2.0, clip=clip, amplification=amplification
    )
    w = model.weight.detach()
    scale = fisher_scale_at_zero(clip) ** 2 * (0.1 if amplification else 1.0)
    want = torch.stack([scale * 4 * row.square().sum() * w.mT @ w for row in x])
    assert torch.allclose(fim, want, rtol=1e-8)
    trace = fisher.fim_trace(
        model, nn.MSELoss(), x, y, max_grad_norm=0.5, noise_multiplier=2.0, clip=clip, amplification=amplification
    )
    assert torch.isfinite(trace.value).all()
    assert torch.isfinite(trace.standard_error).all()


def fisher_scale_at_zero(clip: str) -> float:
    if clip.startswith("gelu"):  # c(0) = GELU(−1) + 1
        return 1 / (1 - 0.5 * (1 + math.erf(-1 / math.sqrt(2))))
    return 1.0


def test_zero_loss_everywhere_gives_zero() -> None:
    model = nn.Linear(3, 2)
    trace = fisher.fim_trace(model, lambda out, _: 0.0 * out.sum(), torch.randn(3, 3), torch.zeros(3), **SETTINGS)
    assert torch.equal(trace.value, torch.zeros(3))


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("sigma", [0.0, -1.0, float("nan"), float("inf")])
def test_sigma_must_be_positive(function: Callable[..., Any], sigma: float) -> None:
    case = build("mlp", 2)
    with pytest.raises(
        ValueError, match=r"noise_multiplier=.* must be positive and finite: without noise, all information leaks"
    ):
        function(*case.arguments, max_grad_norm=1.0, noise_multiplier=sigma)


@pytest.mark.parametrize("C", [0.0, -1.0, float("nan"), float("inf")])
def test_max_grad_norm_must_be_positive(C: float) -> None:
    case = build("mlp", 2)
    with pytest.raises(ValueError, match=r"max_grad_norm=.* must be positive and finite"):
        fisher.exact_fim(*case.arguments, max_grad_norm=C, noise_multiplier=1.0)


@pytest.mark.parametrize("estimator", ["exact", "coordinates", "input-probes", "weight-probes"])
def test_empty_batch(estimator: str) -> None:
    for name, d in (("mlp", 5), ("transformer", 32)):
        case = build(name, 0)
        settings = {**SETTINGS, "private": case.private}
        trace = fisher.fim_trace(*case.arguments, **settings, estimator=estimator)
        assert trace.value.shape == trace.standard_error.shape == (0,)
        assert fisher.exact_fim(*case.arguments, **settings).shape == (0, d, d)
        assert fisher.fim_diagonal(*case.arguments, **settings).value.shape == (0, d)
        for method in ("lanczos", "exact"):
            assert fisher.fim_spectral_norm(*case.arguments, **settings, method=method).value.shape == (0,)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_non_finite_rows_are_named(function: Callable[..., Any], bad: float) -> None:
    case = build("mlp", 6)
    inputs = case.inputs.clone()
    inputs[1, 0] = inputs[4, 2] = bad
    with pytest.raises(
        ValueError, match=r"inputs has NaN or infinite values in 2 of 6 rows: 1, 4\. Drop or impute"
    ) as no:
        function(case.model, case.loss_fn, inputs, case.targets, **SETTINGS)
    assert str(no.value).endswith("(the first in column 0).")


class Logarithm(nn.Module):
    """NaN for an example with a negative number."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x.log())


@pytest.mark.parametrize("method", ["lanczos", "exact"])
def test_a_model_that_is_not_finite_for_one_example_leaves_the_others_theirs(method: Any) -> None:
    inputs, targets = torch.rand(4, 3) + 0.5, torch.tensor([0, 1, 1, 0])
    inputs[2, 1] = -1.0
    torch.manual_seed(0)
    model, others = Logarithm(), [0, 1, 3]
    found, alone = (
        fisher.fim_spectral_norm(
            model, nn.CrossEntropyLoss(), inputs[rows], targets[rows], method=method, **SETTINGS
        ).value
        for rows in (range(4), others)
    )
    assert found[2].isinf()
    assert torch.allclose(found[others], alone)


def test_non_finite_targets_and_named_inputs_are_named() -> None:
    case = build("private_target", 3)
    targets = case.targets.clone()
    targets[2] = float("nan")
    with pytest.raises(ValueError, match=r"targets has NaN or infinite values in 1 of 3 rows: 2\."):
        fisher.exact_fim(case.model, case.loss_fn, case.inputs, targets, **SETTINGS)
    two = build("two_inputs", 3)
    table = two.inputs[1].clone()
    table[0] = float("nan")
    with pytest.raises(ValueError, match=r"inputs\[1\] has NaN or infinite values in 1 of 3 rows: 0\."):
        fisher.exact_fim(two.model, two.loss_fn, (two.inputs[0], table), two.targets, **SETTINGS)


def test_batch_norm_is_refused_unless_frozen_in_eval_mode() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    arguments = (model, nn.CrossEntropyLoss(), torch.randn(3, 3), torch.tensor([0, 1, 0]))
    for prepare in (lambda: None, model.eval):
        prepare()
        with pytest.raises(UnsupportedModuleError, match=r"1 \(BatchNorm1d\): batch normalisation mixes .* GroupNorm"):
            fisher.exact_fim(*arguments, **SETTINGS)
    model[1].requires_grad_(False)
    assert torch.isfinite(fisher.exact_fim(*arguments, **SETTINGS)).all()
    model.train()
    with pytest.raises(UnsupportedModuleError, match="batch normalisation"):
        fisher.exact_fim(*arguments, **SETTINGS)


def test_running_statistics_of_instance_norm_are_refused() -> None:
    model = nn.Sequential(nn.InstanceNorm1d(2, track_running_stats=True), nn.Flatten(), nn.Linear(6, 2))
    with pytest.raises(UnsupportedModuleError, match=r"0 \(InstanceNorm1d\): running statistics"):
        fisher.exact_fim(model, nn.CrossEntropyLoss(), torch.randn(2, 2, 3), torch.tensor([0, 1]), **SETTINGS)


def test_active_dropout_is_refused_as_module_and_as_function() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 2))
    arguments = (nn.CrossEntropyLoss(), torch.randn(3, 3), torch.tensor([0, 1, 0]))
    with pytest.raises(UnsupportedModuleError, match=r"1 \(Dropout\): active dropout .* eval mode"):
        fisher.exact_fim(model, *arguments, **SETTINGS)
    assert torch.isfinite(fisher.exact_fim(model.eval(), *arguments, **SETTINGS)).all()

    class Functional(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(nn.functional.dropout(x, 0.5))

    with pytest.raises(UnsupportedModuleError, match="draws random numbers in its forward pass"):
        fisher.exact_fim(Functional(3, 2), *arguments, **SETTINGS)


def test_integer_inputs_without_a_submodule_are_refused() -> None:
    case = build("transformer", 2)
    with pytest.raises(ValueError, match=r"no input is floating-point.*Private\(submodule='embedding'\)"):
        fisher.exact_fim(*case.arguments, **SETTINGS)
    with pytest.raises(TypeError, match=r"private input 0 has dtype torch.int64; .* submodule='…'"):
        fisher.exact_fim(*case.arguments, **SETTINGS, private=Private(inputs=0))


def test_wrong_submodules_are_refused() -> None:
    case = build("transformer", 2)
    with pytest.raises(
        ValueError, match=r"submodule='embeddings' is not a submodule of TinyTransformer; it has embedding, encoder"
    ):
        fisher.exact_fim(*case.arguments, **SETTINGS, private=Private(submodule="embeddings"))

    class Unused(TinyTransformer):
        def __init__(self) -> None:
            super().__init__()
            self.unused = nn.Embedding(3, 2)

    with pytest.raises(ValueError, match="submodule 'unused' is not called in a forward pass over these inputs"):
        unused = Private(submodule="unused")
        fisher.exact_fim(Unused().to(DEVICE, torch.float64), *case.arguments[1:], **SETTINGS, private=unused)


def test_loss_with_several_numbers_per_example_is_refused() -> None:
    case = build("private_target", 3)
    with pytest.raises(
        ValueError, match=r"loss_fn gave 2 numbers \(shape \(1, 2\)\) for one example; .*reduction='mean' or 'sum'"
    ):
        fisher.exact_fim(case.model, nn.MSELoss(reduction="none"), case.inputs, case.targets, **SETTINGS)


def test_prelu_inside_the_exact_estimator() -> None:
    """As many examples as coordinates: a rule of torch for PReLU takes one for the other."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 4), nn.PReLU(4), nn.Linear(4, 2)).double().to(DEVICE)
    x, y = torch.randn(3, 3, dtype=torch.float64, device=DEVICE), torch.randint(2, (3,), device=DEVICE)
    loss = nn.CrossEntropyLoss()
    together = fisher.fim_trace(model, loss, x, y, estimator="exact", **SETTINGS).value
    alone = [fisher.fim_trace(model, loss, x[i : i + 1], y[i : i + 1], estimator="exact", **SETTINGS) for i in range(3)]
    truth = reference.exact_fim(model, loss, x, y, **SETTINGS).diagonal(dim1=1, dim2=2).sum(dim=1)
    assert relative_error(together, truth) < 1e-9
    assert relative_error(torch.cat([one.value for one in alone]), truth) < 1e-9


@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss, nn.NLLLoss])
def test_a_mean_weighted_by_class_is_refused(loss: type[nn.Module]) -> None:
    model, x, y = nn.Linear(3, 2), torch.randn(4, 3), torch.tensor([0, 1, 1, 0])
    weight = torch.tensor([1.0, 50.0])
    with pytest.raises(ValueError, match=r"class weights and reduction='mean' divides by .* pass reduction='sum'"):
        fisher.fim_trace(model, loss(weight=weight), x, y, **SETTINGS)
    with pytest.raises(ValueError, match="class weights"):
        PLIS(model, loss(weight=weight)).attribute(x, y)
    assert fisher.fim_trace(model, loss(weight=weight, reduction="sum"), x, y, **SETTINGS).value.shape == (4,)


def test_mean_sum_and_unreduced_losses_agree_on_one_example() -> None:
    case = build("mlp", 4)
    results = [
        fisher.exact_fim(case.model, nn.CrossEntropyLoss(reduction=r), case.inputs, case.targets, **SETTINGS)
        for r in ("mean", "sum", "none")
    ]
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_disagreeing_batch_sizes_are_refused() -> None:
    case = build("mlp", 4)
    with pytest.raises(ValueError, match=r"disagree on the number of examples: their shapes are \[\(4, 5\), \(3,\)\]"):
        fisher.exact_fim(case.model, case.loss_fn, case.inputs, case.targets[:3], **SETTINGS)


def test_a_model_without_trainable_parameters_is_refused() -> None:
    case = build("mlp", 2)
    case.model.requires_grad_(False)
    with pytest.raises(ValueError, match="Sequential has no trainable parameter"):
        fisher.exact_fim(*case.arguments, **SETTINGS)


def test_private_class_labels_are_refused_and_probabilities_work() -> None:
    case = build("mlp", 3)
    with pytest.raises(TypeError, match=r"the private target has dtype torch.int64; .*class probabilities"):
        fisher.exact_fim(*case.arguments, **SETTINGS, private=Private(target=True))
    one_hot = nn.functional.one_hot(case.targets, 3).double()
    arguments = (case.model, case.loss_fn, case.inputs, one_hot)
    got = fisher.exact_fim(*arguments, **SETTINGS, private=Private(target=True))
    assert got.shape == (3, 8, 8)
    want = reference.exact_fim(*arguments, **SETTINGS, private=Private(target=True))
    assert relative_error(got, want) < 1e-8


@pytest.mark.parametrize("function", [fisher.fim_trace, fisher.fim_diagonal, fisher.fim_matrix])
def test_unknown_estimators_and_probe_counts_are_refused(function: Callable[..., Any]) -> None:
    case = build("mlp", 2)
    with pytest.raises(ValueError, match=r"estimator='magic' is unknown; use one of coordinates, exact"):
        function(*case.arguments, **SETTINGS, estimator="magic")
    with pytest.raises(ValueError, match="num_probes=0 must be at least 1"):
        function(*case.arguments, **SETTINGS, estimator="weight-probes", num_probes=0)
    with pytest.raises(ValueError, match="max_memory=0 must be a positive number of bytes"):
        function(*case.arguments, **SETTINGS, max_memory=0)


def test_trace_only_estimators_refuse_the_diagonal() -> None:
    case = build("mlp", 2)
    with pytest.raises(ValueError, match=r"estimator='coordinates' gives the trace only, not the diagonal"):
        fisher.fim_diagonal(*case.arguments, **SETTINGS, estimator="coordinates")
    with pytest.raises(ValueError, match="num_probes=1 gives a full matrix no error bar"):
        fisher.fim_matrix(*case.arguments, **SETTINGS, estimator="weight-probes", num_probes=1)


class TestPrivateCoordinates:
    def test_a_mask_is_a_block_of_the_full_matrix(self) -> None:
        case = build("groupnorm_residual", 2)
        segments = torch.arange(4).repeat_interleave(4).reshape(4, 4)
        mask = superpixel(segments, 2)  # one row of every channel
        full = fisher.exact_fim(*case.arguments, **SETTINGS)
        index = mask.expand(2, 4, 4).reshape(-1).nonzero().flatten()
        part = fisher.exact_fim(*case.arguments, **SETTINGS, private=Private(coordinates=mask))
        assert torch.allclose(part, full[:, index][:, :, index], rtol=1e-10)

    @pytest.mark.parametrize("columns", [[0, 3], slice(1, 4), torch.tensor([4, 1]), [-1]])
    def test_columns_are_a_block_of_the_full_matrix(self, columns: Any) -> None:
        case = build("mlp", 2)
        full = fisher.exact_fim(*case.arguments, **SETTINGS)
        index = torch.zeros(5, dtype=torch.bool)
        index[columns] = True
        part = fisher.exact_fim(*case.arguments, **SETTINGS, private=Private(coordinates=columns))
        assert torch.allclose(part, full[:, index][:, :, index], rtol=1e-10)

    def test_one_of_two_inputs_by_position_and_by_name(self) -> None:
        case = build("two_inputs", 3)
        full = fisher.exact_fim(*case.arguments, **SETTINGS)
        assert full.shape[1] == 12
        by_position = fisher.exact_fim(*case.arguments, **SETTINGS, private=Private(inputs=1))
        assert torch.allclose(by_position, full[:, 9:, 9:], rtol=1e-10)
        named = {"image": case.inputs[0], "table": case.inputs[1]}
        arguments = (case.model, case.loss_fn, named, case.targets)
        by_name = fisher.exact_fim(*arguments, **SETTINGS, private=Private(inputs="table"))
        assert torch.equal(by_name, by_position)
        columns = Private(inputs=("image", "table"), coordinates={"table": [2]})
        assert torch.allclose(
            fisher.exact_fim(*arguments, **SETTINGS, private=columns)[:, 9, 9], full[:, 11, 11], rtol=1e-10
        )

    def test_the_target_alone(self) -> None:
        case = build("private_target", 3)
        both = fisher.exact_fim(*case.arguments, **SETTINGS, private=Private(target=True))
        alone = fisher.exact_fim(*case.arguments, **SETTINGS, private=Private(inputs=(), target=True))
        assert torch.allclose(alone, both[:, 4:, 4:], rtol=1e-10)

    def test_the_gradient_of_the_embedding_itself_counts(self) -> None:
        """Freezing the embedding must change the FIM: its gradient is part of what is released."""
        case = build("transformer", 2)
        trained = fisher.exact_fim(*case.arguments, **SETTINGS, private=case.private)
        case.model.embedding.requires_grad_(False)
        frozen = fisher.exact_fim(*case.arguments, **SETTINGS, private=case.private)
        assert relative_error(frozen, trained) > 0.01

    def test_maps_put_values_back_where_they_belong(self) -> None:
        case = build("two_inputs", 2)
        private = Private(coordinates={1: [0, 2]}, inputs=(1,))
        examples = Examples.build(case.inputs, case.targets, private)
        assert torch.equal(examples.z, case.inputs[1][:, [0, 2]])
        maps = examples.maps(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        assert list(maps) == [1]
        assert torch.equal(maps[1].nan_to_num(-1), torch.tensor([[1.0, -1.0, 2.0], [3.0, -1.0, 4.0]]))

    @pytest.mark.parametrize(
        ("private", "message"),
        [
            (
                Private(coordinates=torch.ones(7, dtype=torch.bool)),
                r"do not fit one example of input 0, which has",
            ),
            (Private(coordinates=[5]), r"coordinates=\[5\] do not fit one example of input 0, which has shape \(5,\)"),
            (Private(coordinates=torch.zeros(5, dtype=torch.bool)), "choose nothing"),
            (Private(inputs="x"), r"private input 'x' is not among the inputs \[0\]"),
        ],
    )
    def test_refusals(self, private: Private, message: str) -> None:
        case = build("mlp", 2)
        with pytest.raises(ValueError, match=message):
            fisher.exact_fim(*case.arguments, **SETTINGS, private=private)

    def test_a_label_that_does_not_occur(self) -> None:
        with pytest.raises(ValueError, match=r"label 9 does not occur in segments; it holds \[0, 1\]"):
            superpixel(torch.tensor([0, 1]), 9)


def test_a_refused_call_leaves_model_and_random_state_alone() -> None:
    case = build("mlp", 3)
    before = {k: v.clone() for k, v in case.model.state_dict().items()}
    state = torch.get_rng_state()
    with pytest.raises(ValueError, match="unknown"):
        fisher.fim_trace(*case.arguments, **SETTINGS, estimator="magic")
    assert torch.equal(state, torch.get_rng_state())
    fisher.fim_trace(*case.arguments, **SETTINGS, estimator="exact")
    assert torch.equal(state, torch.get_rng_state()), "an exact result draws no random numbers"
    assert all(torch.equal(before[k], v) for k, v in case.model.state_dict().items())
    assert all(p.grad is None for p in case.model.parameters())
    assert torch.backends.mha.get_fastpath_enabled()


@pytest.mark.parametrize("kind", [nn.GRU, nn.RNN, nn.LSTM])
def test_recurrent_layers_that_cannot_be_mapped_run_one_example_after_the_other(kind: Any) -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.head = kind(3, 3, batch_first=True), nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            """The last output."""
            result: Tensor = self.head(self.layer(x)[0][:, -1])
            return result

    torch.manual_seed(0)
    x, y = torch.randn(3, 4, 3).double(), torch.randint(2, (3,))
    arguments: Any = (Reads().double(), nn.CrossEntropyLoss(), x, y)
    settings: Any = {"max_grad_norm": 1.0, "noise_multiplier": 1.0}
    got = fisher.fim_trace(*arguments, estimator="exact", **settings).value
    want = reference.exact_fim(*arguments, **settings).diagonal(dim1=1, dim2=2).sum(dim=1)
    assert torch.allclose(got, want, rtol=1e-8)


class _Flat(nn.Module):
    """Takes a number for each example, and gives one, [batch] both."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(1, 3), nn.Tanh(), nn.Linear(3, 1)).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As said."""
        return self.inner(x.reshape(-1, 1)).squeeze(-1)


@pytest.mark.parametrize("private", [Private(), Private(target=True), Private(inputs=(), target=True)])
@pytest.mark.parametrize("estimator", ["exact", "weight-probes", "input-probes"])
def test_one_number_per_example(private: Private, estimator: str) -> None:
    """Inputs and targets of shape [n] are those of shape [n, 1]."""
    torch.manual_seed(0)
    flat = _Flat()
    x, y = torch.randn(5).double(), torch.randn(5).double()
    found = [
        fisher.fim_trace(
            model,
            nn.MSELoss(),
            *data,
            private=private,
            estimator=estimator,
            max_grad_norm=1.0,
            noise_multiplier=1.0,
            generator=torch.Generator().manual_seed(1),
        ).value
        for model, data in ((flat, (x, y)), (flat.inner, (x[:, None], y[:, None])))
    ]
    torch.testing.assert_close(found[0], found[1])


def test_what_is_private_is_named_once_and_right() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 2)

        def forward(self, age: torch.Tensor) -> torch.Tensor:
            """One input with a name."""
            result: torch.Tensor = self.inner(age)
            return result

    x, y = torch.randn(3, 4), torch.tensor([0, 1, 1])

    def measured(private: Private, inputs: Any) -> None:
        model = Named() if isinstance(inputs, dict) else nn.Linear(4, 2)
        fisher.exact_fim(model, nn.CrossEntropyLoss(), inputs, y, private=private, **SETTINGS)

    with pytest.raises(ValueError, match=r"coordinates are given for \['Age'\], but only \['age'\] are private"):
        measured(Private(coordinates={"Age": [1]}), {"age": x})
    with pytest.raises(ValueError, match=r"private inputs \[0, 0\] name one input twice"):
        measured(Private(inputs=(0, 0)), x)
    with pytest.raises(ValueError, match="do not fit one example"):
        measured(Private(coordinates=[2.9]), x)  # type: ignore[list-item]
    assert Examples.build(x, y, Private(coordinates=[True, False, True, True])).num_coordinates == 3
    ones: tuple[Any, ...] = (np.int64(1), torch.tensor(1), np.array([1]))
    for one in ones:
        assert Examples.build(x, y, Private(coordinates=one)).num_coordinates == 1
    zeros: tuple[Any, ...] = (np.int64(0), [np.int64(0)], np.array([0]))
    for first in zeros:
        assert Examples.build(x, y, Private(inputs=first)).num_coordinates == 4
