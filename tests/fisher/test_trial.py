"""The trial before a recorded pass: it leaves nothing behind, and finds rules and models that it
would be wrong for.
"""

from __future__ import annotations

import gc
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.cases import DEVICE, relative_error
from tests.fisher.recorded_cases import BATCH, Model, _Unseen
from torchfil import PLIS, fisher
from torchfil.fisher.gradients import ExampleGradients
from torchfil.fisher.mechanism import Mechanism
from torchfil.fisher.recording import RecordedJacobian, plan
from torchfil.fisher.rules import register_rule
from torchfil.fisher.rules.linear import LinearRule

pytestmark = pytest.mark.torch_versions
EYE = torch.eye(4)
SETTINGS: dict[str, Any] = {"max_grad_norm": 1.0, "noise_multiplier": 1.0}


def reason(model: nn.Module, x: Tensor, y: Tensor, loss: Any = None) -> str | None:
    """Why a recorded pass does not serve; None: it does."""
    given = (model.to(DEVICE), loss or nn.CrossEntropyLoss(), x.to(DEVICE), y.to(DEVICE))
    return plan(ExampleGradients.build(*given)).reason


def doubles() -> int:
    """How many tensors of float64 are in memory."""
    return sum(
        isinstance(value, Tensor) and value.dtype == torch.float64 for value in gc.get_objects()
    )


def two_layers(width: int = 4) -> dict[str, nn.Module]:
    torch.manual_seed(0)
    return {"body": nn.Linear(3, width), "head": nn.Linear(width, 2)}


def test_a_trial_leaves_nothing_behind() -> None:
    """Tanh and softmax keep their own results for their way back, which torch's hooks can turn into
    a cycle.
    """
    model = nn.Sequential(
        nn.Linear(4, 5), nn.Tanh(), nn.Softmax(-1), nn.LayerNorm(5), nn.Linear(5, 2)
    )
    gradients = ExampleGradients.build(
        model, nn.CrossEntropyLoss(), torch.randn(3, 4), torch.tensor([0, 1, 0])
    )

    def left() -> tuple[int, int]:
        gc.collect()
        return doubles(), sum(isinstance(value, nn.Module) for value in gc.get_objects())

    before = left()
    for _ in range(3):
        assert plan(gradients).fits
    assert left() == before


class _Doubled(nn.Linear):
    """A linear layer for rules that are wrong."""


class _WrongNormSlope(LinearRule):
    def squared_norm(self, call: Any) -> Tensor:
        right = super().squared_norm(call)
        return right + (right - right.detach())


class _WrongInner(LinearRule):
    def inner(self, call: Any, direction: Any) -> Any:
        value, derivatives = super().inner(call, direction)
        return value, [(leaf, 2 * part) for leaf, part in derivatives]


class _WrongForOne(LinearRule):
    def inner(self, call: Any, direction: Any) -> Any:
        value, derivatives = super().inner(call, direction)
        wrong = torch.ones_like(call.delta[:, :1])
        wrong[1] = 2
        return value, [(leaf, wrong * part) for leaf, part in derivatives]


class _WrongSum(LinearRule):
    def weighted_sum(self, call: Any, weight: Tensor) -> dict[str, Tensor]:
        return {name: value / 2 for name, value in super().weighted_sum(call, weight).items()}


@pytest.mark.parametrize(
    ("rule", "what"),
    [
        (LinearRule(), "None"),
        (_WrongNormSlope(), "derivatives of gradients' norms"),
        (_WrongInner(), "products with a probe"),
        (_WrongForOne(), "products with a probe"),
        (_WrongSum(), "sums of gradients"),
    ],
)
def test_rules_that_are_wrong_are_found(rule: LinearRule, what: str) -> None:
    register_rule(_Doubled, rule, overwrite=True)
    for dtype in (torch.float32, torch.float64):
        model = nn.Sequential(
            nn.Linear(3, 4), nn.Tanh(), _Doubled(4, 4), nn.Tanh(), nn.Linear(4, 2)
        ).to(dtype)
        x, y = torch.randn(BATCH, 3, dtype=dtype), torch.randn(BATCH, 2, dtype=dtype)
        assert what in str(reason(model, x, y, F.mse_loss))


def behind(m: Any, x: Tensor) -> Tensor:
    """Uses a parameter behind its module's back, in a way that nothing sees from outside."""
    return m.head(torch.tanh(_Unseen.apply(torch.tanh(m.body(x)), m.body.bias)))


def mixing(m: Any, x: Tensor) -> Tensor:
    hidden = torch.tanh(m.body(x))
    return m.head(hidden - hidden.mean(dim=0))


def sorting(m: Any, x: Tensor) -> Tensor:
    """Sorts the batch, works on it and puts it back, as packed sequences are.

    Examples do not mix.
    """
    order = x[:, 0].detach().argsort()
    return m.head(torch.tanh(m.body(x[order])))[order.argsort()]


@pytest.mark.parametrize(
    "case", ["without gradient", "equal", "zero head", "sorted", "sorted the other way"]
)
def test_nothing_hides_from_the_trial(case: str) -> None:
    layers = two_layers(4 if case == "equal" else 3)
    x, y = torch.randn(6, 3), torch.tensor([0, 1, 0, 1, 1, 0])
    run = behind
    if case == "equal":
        run, x[1], y[1] = mixing, x[0], y[0]
    elif case == "without gradient":
        y[:2] = -100
    elif case == "zero head":
        nn.init.zeros_(layers["head"].weight)  # type: ignore[arg-type]
    elif "sorted" in case:
        run, x = sorting, x[x[:, 0].argsort(descending="other" in case)]
    assert reason(Model(run, **layers), x, y) is not None


def in_halves(m: Any, x: Tensor) -> Tensor:
    """Works on large batches in two halves, so that no call has a row for every example."""
    parts = x.tensor_split(2) if len(x) > 3 else (x,)
    return torch.cat([m.inner(part) for part in parts])


# Not as in the trial, or outputs that are no tree of tensors, or hold a number for the whole batch.
MAPPED: dict[str, tuple[Any, Any]] = {
    "in halves": (in_halves, F.cross_entropy),
    "object": (
        lambda m, x: SimpleNamespace(logits=m.inner(x)),
        lambda out, y: F.cross_entropy(out.logits, y),
    ),
    "number": (
        lambda m, x: (m.inner(x), m.inner(x).mean()),
        lambda out, y: F.cross_entropy(out[0], y),
    ),
}


@pytest.mark.parametrize("case", MAPPED)
def test_what_one_pass_does_not_serve_is_mapped(case: str) -> None:
    torch.manual_seed(0)
    run, loss = MAPPED[case]
    model = Model(run, inner=nn.Linear(3, 2)).double().to(DEVICE)
    x, y = (
        torch.randn(8, 3, device=DEVICE, dtype=torch.float64),
        torch.randint(2, (8,), device=DEVICE),
    )
    exact = fisher.fim_trace(model, loss, x, y, estimator="exact", **SETTINGS).value
    source = torch.Generator().manual_seed(0)
    found = fisher.fim_trace(model, loss, x, y, num_probes=100, generator=source, **SETTINGS)
    assert bool(((found.value - exact).abs() < 5 * found.standard_error).all())
    if case == "in halves":
        whole, parts = (PLIS(each, loss).attribute(x, y) for each in (model, model.inner))
        assert relative_error(whole, parts) < 1e-12


class Caching(nn.Module):
    """Keeps a tensor of its first call, of that call's dtype."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.inner, self.where, self.kept = nn.Linear(3, 2), where, None
        self.by_size: dict[int, Tensor] = {}
        self.holder = SimpleNamespace(kept=None)

    def forward(self, x: Tensor) -> Tensor:
        made, size = torch.linspace(0, 1, x.shape[-1], dtype=x.dtype, device=x.device), x.shape[-1]
        if self.where == "dict":
            return self.inner(x + self.by_size.setdefault(size, made))
        holder: Any = self if self.where == "attribute" else self.holder
        holder.kept = made if holder.kept is None else holder.kept
        return self.inner(x + holder.kept)


@pytest.mark.parametrize("where", ["attribute", "dict", "object"])
def test_a_trial_leaves_no_tensor_in_the_model(where: str) -> None:
    x, y, model = torch.randn(3, 3), torch.tensor([0, 1, 0]), Caching(where)
    assert reason(model, x, y) is None
    assert model(x.to(DEVICE)).dtype == torch.float32


def test_a_trial_in_float64_shows_which_arguments_are_shared() -> None:
    """A layer without a rule is given rows that all examples share, in a later batch as many as it
    has examples.
    """

    def forward(m: Any, x: Tensor) -> Tensor:
        return m.head(m.layer(x, m.rows))

    product = "bi,ij,kj->bj"
    layer = Model(
        lambda m, x, rows: torch.einsum(product, x, m.mix, rows), mix=nn.Parameter(torch.rand(4, 4))
    )
    model = Model(forward, layer=layer, head=nn.Linear(4, 2)).to(DEVICE)
    model.rows = torch.rand(5, 4, device=DEVICE)
    x, y = torch.randn(5, 4, device=DEVICE), torch.randint(2, (5,), device=DEVICE)
    gradients = ExampleGradients.build(model, nn.CrossEntropyLoss(), x, y)
    found = plan(gradients)
    assert found.generic == ("layer (Model)",)
    recorded = RecordedJacobian(replace(gradients, facts=found.facts), Mechanism.build(**SETTINGS))
    assert relative_error(recorded.norm, gradients.gradients().norm(dim=1)) < 1e-5


def without_float64(patch: pytest.MonkeyPatch) -> None:
    def double(_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    patch.setattr(ExampleGradients, "double", double)


@pytest.mark.parametrize("rule", [LinearRule(), _WrongInner()])
def test_rounding_is_no_wrong_rule(rule: LinearRule, monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16 a trial differs by more than in float32, even if every rule is right."""
    register_rule(_Doubled, rule, overwrite=True)
    torch.manual_seed(0)
    layers = [layer for _ in range(6) for layer in (_Doubled(8, 8), nn.LayerNorm(8), nn.GELU())]
    model = nn.Sequential(nn.Linear(3, 8), *layers, nn.Linear(8, 2)).bfloat16()
    given = model, torch.randn(BATCH, 3).bfloat16(), torch.randint(2, (BATCH,))
    assert (reason(*given) is None) == (type(rule) is LinearRule)
    without_float64(monkeypatch)
    said = str(reason(*given))
    assert ("rounding alone can explain" in said) == (type(rule) is LinearRule)
    assert ("rule is wrong" in said) == (type(rule) is _WrongInner)


def test_a_trial_follows_hooks_and_passes_over_what_a_model_remembers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The copy that it runs on has the model's hooks, and can be made even if the model keeps a
    tensor with a graph.
    """
    caplog.set_level("INFO", "torchfil")

    def forward(m: Any, x: Tensor) -> Tensor:
        m.seen = m.inner(x)
        return torch.tanh(m.seen)

    x, y, model = torch.randn(3, 3), torch.tensor([0, 1, 0]), Model(forward, inner=nn.Linear(3, 2))
    model(x)
    assert reason(model, x, y) is None
    assert "does not run in float64" not in caplog.text
    model.inner.register_forward_hook(lambda _module, _inputs, output: output - output.mean(dim=0))
    assert reason(model, x, y) is not None
