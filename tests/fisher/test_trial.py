"""The trial before a recorded pass: it leaves nothing behind, and finds rules and models that it would be wrong for."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.cases import DEVICE, relative_error
from tests.fisher.recorded_cases import BATCH
from torchfil import PLIS, fisher
from torchfil.fisher.gradients import ExampleGradients
from torchfil.fisher.recording import plan
from torchfil.fisher.recording.plan import _difference, _plain, _probe, _recorded
from torchfil.fisher.rules import register_rule, rule_for
from torchfil.fisher.rules.linear import LinearRule
from torchfil.fisher.rules.parameters import GenericRule

pytestmark = pytest.mark.torch_versions


class Unmappable(nn.Module):
    """A parameter of its own in a forward pass that looks at values: neither rule nor vmap serves it."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.eye(4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(torch.einsum("bi,ij->bj", x, self.mix)) if bool(x.sum() < 1e9) else x


def test_a_trial_leaves_nothing_behind() -> None:
    """Tanh and softmax keep their own results for their way back, which torch's hooks can turn into a cycle."""
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Softmax(-1), nn.LayerNorm(5), nn.Linear(5, 2))
    gradients = ExampleGradients.build(model, nn.CrossEntropyLoss(), torch.randn(3, 4), torch.tensor([0, 1, 0]), None)

    def doubles() -> int:
        gc.collect()
        return sum(isinstance(value, Tensor) and value.dtype == torch.float64 for value in gc.get_objects())

    assert plan(gradients).fits
    before = doubles()
    for _ in range(3):
        assert plan(gradients).fits
    assert doubles() == before


def test_a_failing_trial_is_a_reason_and_no_crash() -> None:
    x, y = torch.randn(3, 4).to(DEVICE), torch.randn(3, 4).to(DEVICE)
    found = plan(ExampleGradients.build(Unmappable().to(DEVICE), nn.MSELoss(), x, y, None))
    assert found.reason is not None
    assert "Unmappable" in found.reason


def test_rules_are_not_replaced_silently() -> None:
    with pytest.raises(ValueError, match="Linear already has a rule; pass overwrite=True to replace it"):
        register_rule(nn.Linear, GenericRule())
    assert isinstance(rule_for(nn.Linear(1, 1)), LinearRule)

    class Fresh(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    assert isinstance(rule_for(Fresh(1, 1)), GenericRule)
    register_rule(Fresh, LinearRule())
    register_rule(Fresh, rule := LinearRule(), overwrite=True)
    assert rule_for(Fresh(1, 1)) is rule


class _Doubled(nn.Linear):
    """A linear layer for rules that are wrong."""


class _WrongNormSlope(LinearRule):
    def squared_norm(self, call: Any) -> Tensor:
        """Right, with a wrong derivative."""
        right = super().squared_norm(call)
        return right + (right - right.detach())


class _WrongInner(LinearRule):
    def inner(self, call: Any, direction: Any) -> Any:
        """Right, with wrong derivatives."""
        value, derivatives = super().inner(call, direction)
        return value, [(leaf, 2 * part) for leaf, part in derivatives]


class _WrongSum(LinearRule):
    def weighted_sum(self, call: Any, weight: Tensor) -> dict[str, Tensor]:
        """Half of it."""
        return {name: value / 2 for name, value in super().weighted_sum(call, weight).items()}


@pytest.mark.parametrize(
    ("rule", "what"),
    [
        (LinearRule(), None),
        (_WrongNormSlope(), "other derivatives of gradients' norms"),
        (_WrongInner(), "other derivatives of gradients' products with a probe"),
        (_WrongSum(), "other sums of gradients"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_trial_finds_rules_that_are_wrong(rule: LinearRule, what: str | None, dtype: torch.dtype) -> None:
    register_rule(_Doubled, rule, overwrite=True)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), _Doubled(4, 4), nn.Tanh(), nn.Linear(4, 2)).to(DEVICE, dtype)
    x, y = torch.randn(BATCH, 3, device=DEVICE, dtype=dtype), torch.randn(BATCH, 2, device=DEVICE, dtype=dtype)
    reason = plan(ExampleGradients.build(model, nn.MSELoss(), x, y, None)).reason
    if what is None:
        assert reason is None
    else:
        assert reason is not None
        assert what in reason


def test_the_trial_takes_rounding_for_what_it_is() -> None:
    """Gradients of 1e-6 times what cancels in them: in float32 the pass differs from plain passes by rounding alone."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(300, 200), nn.GELU(), nn.Linear(200, 10)).to(DEVICE)
    x = torch.randn(BATCH, 300, device=DEVICE)
    with torch.no_grad():
        y = model(x) * (1 + 1e-7)
    gradients = ExampleGradients.build(model, nn.MSELoss(), x, y, None)
    probe = _probe(gradients)
    plain = _plain(gradients, probe, range(BATCH))
    if _difference(gradients, _recorded(gradients, probe), plain)[0] is None:
        pytest.skip("the pass and plain passes round alike here")
    assert plan(gradients).fits


class _Sorted(nn.Module):
    """Sorts the batch, works on it and puts it back, as packed sequences are; examples do not mix."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))

    def forward(self, x: Tensor) -> Tensor:
        """As said."""
        order = x[:, 0].detach().argsort()
        result: Tensor = self.layers(x[order])[order.argsort()]
        return result


class _Unseen(torch.autograd.Function):
    """A product that nothing sees from outside."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return a @ b

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ctx.saved_tensors
        return gradients[0] @ b.mT, a.mT @ gradients[0]


class _Behind(nn.Module):
    """Uses a weight behind its module's back; the head may start from 0."""

    def __init__(self, *, zero: bool = False) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(3, 3), nn.Linear(3, 2)
        if zero:
            nn.init.zeros_(self.head.weight)

    def forward(self, x: Tensor) -> Tensor:
        """As said."""
        result: Tensor = self.head(torch.tanh(_Unseen.apply(torch.tanh(self.body(x)), self.body.weight)))
        return result


class _Mixing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Subtracts the batch's mean."""
        hidden = torch.tanh(self.body(x))
        result: Tensor = self.head(hidden - hidden.mean(dim=0))
        return result


@pytest.mark.parametrize("rows", [[0, 1, 2, 3], [3, 2, 1, 0]])
def test_the_trial_finds_a_model_that_sorts(rows: list[int]) -> None:
    torch.manual_seed(0)
    x = torch.tensor([[1.0, 0, 0], [2, 0, 0], [3, 0, 0], [4, 0, 0]], device=DEVICE)[rows]
    y = torch.randint(2, (4,), device=DEVICE)
    assert plan(ExampleGradients.build(_Sorted().to(DEVICE), nn.CrossEntropyLoss(), x, y, None)).reason is not None


@pytest.mark.parametrize("case", ["without gradient", "equal", "zero head"])
def test_nothing_hides_from_the_trial(case: str) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(6, 3, device=DEVICE), torch.tensor([0, 1, 0, 1, 1, 0], device=DEVICE)
    model: nn.Module = _Behind(zero=case == "zero head") if case != "equal" else _Mixing()
    if case == "equal":
        x[1] = x[0]
        y[1] = y[0]
    elif case == "without gradient":
        y[:2] = -100
    gradients = ExampleGradients.build(model.to(DEVICE), nn.CrossEntropyLoss(), x, y, None)
    assert plan(gradients).reason is not None


def test_a_head_of_zeros_alone_is_no_reason() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).to(DEVICE)
    nn.init.zeros_(model[2].weight)  # type: ignore[arg-type]
    x, y = torch.randn(6, 3, device=DEVICE), torch.randint(2, (6,), device=DEVICE)
    assert plan(ExampleGradients.build(model, nn.CrossEntropyLoss(), x, y, None)).reason is None


class _InHalves(nn.Module):
    """Works on large batches in two halves, so that no call has a row for every example."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        """As said."""
        parts = x.tensor_split(2) if len(x) > 3 else (x,)
        return torch.cat([self.inner(part) for part in parts])


def test_a_batch_that_is_not_as_the_trials_is_mapped() -> None:
    torch.manual_seed(0)
    model = _InHalves().double().to(DEVICE)
    x, y = torch.randn(8, 3, device=DEVICE, dtype=torch.float64), torch.randint(2, (8,), device=DEVICE)
    assert plan(ExampleGradients.build(model, nn.CrossEntropyLoss(), x, y, None)).reason is None
    options: dict[str, Any] = {"max_grad_norm": 1.0, "noise_multiplier": 1.0}
    exact = fisher.fim_trace(model, nn.CrossEntropyLoss(), x, y, estimator="exact", **options).value
    source = torch.Generator().manual_seed(0)
    found = fisher.fim_trace(model, nn.CrossEntropyLoss(), x, y, num_probes=100, generator=source, **options)
    assert bool(((found.value - exact).abs() < 5 * found.standard_error).all())
    whole, parts = PLIS(model, nn.CrossEntropyLoss()), PLIS(model.inner, nn.CrossEntropyLoss())
    assert relative_error(whole.attribute(x, y), parts.attribute(x, y)) < 1e-12


class _Answer:
    def __init__(self, logits: Tensor) -> None:
        self.logits = logits


class _Answers(nn.Module):
    """Outputs that are no tree of tensors, or hold a number for the whole batch."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.inner = kind, nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Any:
        """As said."""
        logits = self.inner(x)
        return _Answer(logits) if self.kind == "object" else {"logits": logits, "mean": logits.mean()}


@pytest.mark.parametrize("kind", ["object", "number beside"])
def test_outputs_of_other_kinds_are_mapped(kind: str) -> None:
    def loss(outputs: Any, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs.logits if kind == "object" else outputs["logits"], targets)

    torch.manual_seed(0)
    model = _Answers(kind).double().to(DEVICE)
    x, y = torch.randn(4, 3, device=DEVICE, dtype=torch.float64), torch.randint(2, (4,), device=DEVICE)
    options: dict[str, Any] = {"max_grad_norm": 1.0, "noise_multiplier": 1.0}
    exact = fisher.fim_trace(model, loss, x, y, estimator="exact", **options).value
    found = fisher.fim_trace(model, loss, x, y, num_probes=100, generator=torch.Generator().manual_seed(0), **options)
    assert bool(((found.value - exact).abs() < 5 * found.standard_error).all())
