"""Recurrent layers in a recorded pass: against torch's own double backward passes, one example at a time."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from opacus.layers import DPGRU, DPLSTM, DPRNN
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import torchfil.engine  # noqa: F401  (registers Opacus's layers)
from tests.cases import DEVICE
from tests.fisher.recorded_cases import norm_gradient
from torchfil.clipping import get_clip
from torchfil.fisher.gradients import ExampleGradients
from torchfil.fisher.masks import MaskLayouts, recorded_masks
from torchfil.fisher.recording import RecordedJacobian, forward_pass, plan
from torchfil.fisher.rules.recurrent import CELLS, recurrence

BATCH, TIME, WIDTH, HIDDEN = 4, 5, 3, 4
KINDS: dict[str, Callable[..., nn.Module]] = {
    "LSTM": nn.LSTM,
    "GRU": nn.GRU,
    "RNN": nn.RNN,
    "RNN with ReLU": lambda *args, **options: nn.RNN(*args, nonlinearity="relu", **options),
    "DPLSTM": DPLSTM,
    "DPGRU": DPGRU,
    "DPRNN": DPRNN,
}
FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "batch first": {"batch_first": True},
    "two layers": {"num_layers": 2, "batch_first": True},
    "no bias": {"bias": False, "batch_first": True},
    "both directions": {"bidirectional": True, "num_layers": 2},
}


class Tagger(nn.Module):
    """A recurrent layer with a head: all states, and the last ones where asked for; packed by length where given."""

    def __init__(self, layer: nn.Module, *, with_state: bool = False, last: bool = True) -> None:
        super().__init__()
        self.layer = layer
        directions = 2 if layer.bidirectional else 1
        self.head = nn.Linear(HIDDEN * directions, 2)
        self.with_state, self.last = with_state, last

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        first = self.layer.batch_first
        x = torch.sin(x) if first else torch.sin(x).transpose(0, 1)
        batch = x.shape[0 if first else 1]
        state = None
        if self.with_state:
            count = self.layer.num_layers * (2 if self.layer.bidirectional else 1)
            start = x.mean(dim=1 if first else 0)[:, :1].expand(count, batch, HIDDEN).contiguous()
            state = (start, start.cos()) if "LSTM" in type(self.layer).__name__ else start
        given = x
        if lengths is not None:
            given = pack_padded_sequence(x, lengths, batch_first=first, enforce_sorted=False)
        states, last = self.layer(given, state)
        if lengths is not None:
            states, _ = pad_packed_sequence(states, batch_first=first, total_length=TIME)
        states = states if first else states.transpose(0, 1)
        result: Tensor = self.head(states).flatten(1)
        if self.last:
            ends = last if isinstance(last, Tensor) else torch.cat(last)
            result = torch.cat([result, ends.transpose(0, 1).flatten(1)], dim=1)
        return result


def examples_of(model: nn.Module, *more: Tensor) -> ExampleGradients:
    torch.manual_seed(1)
    x = torch.randn(BATCH, TIME, WIDTH, dtype=torch.float64, device=DEVICE)
    model = model.double().to(DEVICE)
    with torch.no_grad():
        y = torch.randn_like(model(x, *more))
    return ExampleGradients.build(model, nn.MSELoss(), (x, *more), y)


def check(gradients: ExampleGradients) -> None:
    """Norms, slopes, Jᵀu one by one and together, and sums, against plain backward passes."""
    found = plan(gradients)
    assert found.fits, found.reason
    assert found.generic == ()

    torch.manual_seed(2)
    probes = torch.randn(2, gradients.num_parameters, dtype=torch.float64, device=DEVICE)
    plain = [[gradients.plain_products_of_one(i, u) for i in range(len(gradients))] for u in probes]
    g, slopes = (torch.stack([row[k] for row in plain[0]]) for k in (0, 1))
    got = norm_gradient(gradients)
    torch.testing.assert_close(got.square, g.square().sum(dim=1), rtol=1e-10, atol=0)
    torch.testing.assert_close(got.gradient, slopes, rtol=1e-8, atol=1e-10)

    jacobian = RecordedJacobian(gradients, get_clip("gelu"), 1.0)
    unit = g / g.norm(dim=1, keepdim=True)
    for at_once in (1, 2):
        for u, products, rows in zip(probes, plain, jacobian.perpendicular_rows(probes, at_once), strict=True):
            along = (unit @ u)[:, None] * jacobian.norm_gradient()
            want = jacobian.scale[:, None] * (torch.stack([row[2] for row in products]) - along)
            torch.testing.assert_close(rows, want, rtol=1e-8, atol=1e-10)

    sums = torch.cat([part.flatten() for part in jacobian.clipped_sum().values()])
    torch.testing.assert_close(sums, jacobian.scale @ g, rtol=1e-9, atol=1e-12)
    assert not any("forward" in vars(module) for module in gradients.model.modules())


def quickly(*pairs: tuple[Any, Any], quick: Callable[[Any, Any], bool]) -> list[Any]:
    """Pairs of which some are quick, and the others slow."""
    return [pytest.param(*pair, marks=() if quick(*pair) else pytest.mark.slow) for pair in pairs]


@pytest.mark.parametrize(
    ("kind", "form"),
    quickly(
        *itertools.product(KINDS, FORMS),
        quick=lambda kind, form: kind == "LSTM" or form in ("plain", "both directions"),
    ),
)
def test_recurrent_layers(kind: str, form: str) -> None:
    torch.manual_seed(0)
    check(examples_of(Tagger(KINDS[kind](WIDTH, HIDDEN, **FORMS[form]))))


@pytest.mark.parametrize(
    ("kind", "last"),
    quickly(*itertools.product(KINDS, [True, False]), quick=lambda kind, last: last or kind == "LSTM"),
)
def test_given_states(kind: str, last: bool) -> None:
    torch.manual_seed(0)
    layer = KINDS[kind](WIDTH, HIDDEN, num_layers=2, bidirectional=True, batch_first=True)
    check(examples_of(Tagger(layer, with_state=True, last=last)))


@pytest.mark.parametrize("form", ["batch first", "both directions"])
@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN", "DPLSTM", "DPGRU"])
def test_packed_sequences(kind: str, form: str) -> None:
    torch.manual_seed(0)
    opacus = kind.startswith("DP")  # whose packed layers need float32 states of their own
    model = Tagger(KINDS[kind](WIDTH, HIDDEN, **FORMS[form]), last=not opacus)
    check(examples_of(model, torch.tensor([3, 5, 1, 4])))


def test_probes_are_worked_at_together(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    with caplog.at_level("INFO"):
        check(examples_of(Tagger(nn.LSTM(WIDTH, HIDDEN, num_layers=2))))
    assert "one by one" not in caplog.text


@pytest.mark.parametrize("frozen", ["weight_ih_l0", "weight_hh_l0", "bias_hh_l0"])
def test_a_frozen_parameter(frozen: str) -> None:
    torch.manual_seed(0)
    layer = nn.GRU(WIDTH, HIDDEN, batch_first=True)
    layer.get_parameter(frozen).requires_grad_(False)
    check(examples_of(Tagger(layer)))


class Twice(nn.Module):
    """A layer that reads its own output."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        states, last = self.layer(x)
        return self.layer(states, last)[0].flatten(1)


def test_a_layer_that_is_used_twice() -> None:
    torch.manual_seed(0)
    check(examples_of(Twice()))


@pytest.mark.skipif(DEVICE == "cuda", reason="cuDNN draws its masks unseen, which is refused")
@pytest.mark.parametrize(
    ("kind", "first"),
    quickly(
        *itertools.product(["LSTM", "GRU", "RNN", "DPLSTM", "DPGRU", "DPRNN"], [True, False]),
        quick=lambda kind, first: first == (kind in ("LSTM", "DPGRU", "RNN")),
    ),
)
def test_dropout_uses_the_masks_of_the_loop(kind: str, first: bool) -> None:
    torch.manual_seed(0)
    layer = KINDS[kind](WIDTH, HIDDEN, num_layers=2, bidirectional=True, batch_first=first, dropout=0.4)
    model = Tagger(layer).eval()
    gradients = examples_of(model)
    model.train()
    assert not plan(gradients).fits  # without masks

    (x,), _, _, _ = gradients.examples.restore(gradients.examples.z, gradients.examples.public)
    with torch.no_grad(), recorded_masks() as masks:
        outputs = model(x)
        own = MaskLayouts().by_example(masks, BATCH, "tagger", lambda: model(x[:1]))
    gradients = replace(gradients, examples=replace(gradients.examples, masks=own))
    check(gradients)
    recorded = forward_pass(gradients, gradients.examples.z.detach().requires_grad_())
    torch.testing.assert_close(recorded.outputs, outputs, rtol=1e-12, atol=1e-12)


class Sum(nn.Module):
    """A recurrent layer alone, with options that a recorded pass does not take."""

    def __init__(self, layer: nn.Module, *, one: bool = False) -> None:
        super().__init__()
        self.layer, self.one = layer, one

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x[0] if self.one else x)[0].reshape(len(x), -1)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (Sum(nn.LSTM(WIDTH, HIDDEN, batch_first=True, proj_size=2)), "proj_size=2; use proj_size=0"),
        (Sum(nn.LSTM(WIDTH, HIDDEN, batch_first=False)), "is given 5 rows for 3 examples"),
    ],
)
def test_what_is_not_served_is_told(model: nn.Module, reason: str) -> None:
    found = plan(examples_of(model))
    assert not found.fits
    assert reason in str(found.reason)


@pytest.mark.parametrize("drops", [True, False])
@pytest.mark.parametrize("mode", CELLS)
def test_second_derivatives(mode: str, drops: bool) -> None:
    torch.manual_seed(0)
    cell, draw = CELLS[mode], {"dtype": torch.float64, "device": DEVICE}
    gates = torch.randn(3, 2, cell.gates * HIDDEN, **draw, requires_grad=True)
    start = [torch.randn(2, HIDDEN, **draw, requires_grad=True) for _ in range(1 + cell.has_memory)]
    weight = torch.randn(cell.gates * HIDDEN, HIDDEN, **draw)
    drop = F.dropout(torch.ones(3, 2, HIDDEN, **draw), 0.4) if drops else None

    def run(gates: Tensor, h: Tensor, m: Tensor | None = None) -> tuple[Tensor, ...]:
        return tuple(value for value in recurrence(cell, gates, h, m, weight, drop) if value is not None)

    assert gradcheck(run, (gates, *start))
    assert gradgradcheck(run, (gates, *start))
