"""Recurrent layers in a recorded pass: against torch's own double backward passes, one example at a
time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from opacus.layers import DPGRU, DPLSTM, DPRNN
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import torchfil.engine  # noqa: F401  (registers Opacus's layers)
from tests.cases import DEVICE
from tests.fisher.recorded_cases import Model, check, gradients_of
from torchfil.fisher.masks import MaskLayouts, recorded_masks
from torchfil.fisher.recording import forward_pass, plan
from torchfil.fisher.rules.recurrent import run_recurrent

BATCH, TIME, WIDTH, HIDDEN = 3, 4, 3, 4
LENGTHS = torch.tensor([2, 4, 1])
KINDS: dict[str, Callable[..., nn.Module]] = {"LSTM": nn.LSTM, "GRU": nn.GRU, "RNN": nn.RNN}
KINDS |= {
    "RNN with ReLU": lambda *args, **options: nn.RNN(*args, nonlinearity="relu", **options),
    "DPLSTM": DPLSTM,
}
KINDS |= {"DPGRU": DPGRU, "DPRNN": DPRNN}
FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "batch first": {"batch_first": True},
    "no bias": {"bias": False, "batch_first": True},
    "both directions": {"bidirectional": True, "num_layers": 2},
}


def tagger(layer: Any, *, with_state: bool = False, last: bool = True) -> nn.Module:
    """A recurrent layer with a head: all states, and the last ones where asked for.

    Packed by length where given.
    """
    directions, first = 1 + layer.bidirectional, layer.batch_first

    def run(m: Any, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        x, state = torch.sin(x), None
        if with_state:
            start = (
                x.mean(dim=1)[:, :1]
                .expand(m.layer.num_layers * directions, len(x), HIDDEN)
                .contiguous()
            )
            state = (start, start.cos()) if "LSTM" in type(m.layer).__name__ else start
        given: Any = x if first else x.transpose(0, 1)
        if lengths is not None:
            given = pack_padded_sequence(given, lengths, batch_first=first, enforce_sorted=False)
        states, ends = m.layer(given, state)
        if lengths is not None:
            states, _ = pad_packed_sequence(states, batch_first=first, total_length=TIME)
        result = m.head(states if first else states.transpose(0, 1)).flatten(1)
        ends = ends if isinstance(ends, Tensor) else torch.cat(ends)
        return torch.cat([result, ends.transpose(0, 1).flatten(1)], dim=1) if last else result

    return Model(run, layer=layer, head=nn.Linear(HIDDEN * directions, 2))


def check_model(model: nn.Module, *more: Tensor) -> None:
    check(gradients_of(model, torch.randn(BATCH, TIME, WIDTH), *more), generic=(), mapped=False)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize(
    ("kind", "form"),
    [*(("LSTM", form) for form in FORMS), *((kind, "both directions") for kind in KINDS)],
)
def test_recurrent_layers(kind: str, form: str) -> None:
    check_model(tagger(KINDS[kind](WIDTH, HIDDEN, **FORMS[form])))


@pytest.mark.parametrize(("kind", "last"), [("LSTM", False), *((kind, True) for kind in KINDS)])
def test_given_states(kind: str, last: bool) -> None:
    layer = KINDS[kind](WIDTH, HIDDEN, num_layers=2, bidirectional=True, batch_first=True)
    check_model(tagger(layer, with_state=True, last=last))


@pytest.mark.parametrize("form", ["batch first", "both directions"])
@pytest.mark.parametrize("kind", ["LSTM", "GRU", "DPLSTM"])
def test_packed_sequences(kind: str, form: str) -> None:
    opacus = kind.startswith("DP")  # whose packed layers need float32 states of their own
    check_model(tagger(KINDS[kind](WIDTH, HIDDEN, **FORMS[form]), last=not opacus), LENGTHS)


@pytest.mark.parametrize("both", [False, True])
def test_dropout_is_drawn_in_torchs_order(both: bool) -> None:
    layer = nn.LSTM(WIDTH, HIDDEN, 2, batch_first=True, dropout=0.4, bidirectional=both)
    x, found = torch.randn(BATCH, TIME, WIDTH), []
    for run in (layer, partial(run_recurrent, layer, "LSTM")):
        torch.manual_seed(1)
        found.append(run(x)[0])
    torch.testing.assert_close(*found)


@pytest.mark.skipif(DEVICE == "cuda", reason="cuDNN draws its masks unseen, which is refused")
@pytest.mark.parametrize(("kind", "first"), [("LSTM", True), ("GRU", False), ("DPLSTM", False)])
def test_dropout_uses_the_masks_of_the_loop(kind: str, first: bool) -> None:
    layer = KINDS[kind](
        WIDTH, HIDDEN, num_layers=2, bidirectional=True, batch_first=first, dropout=0.4
    )
    model = tagger(layer).eval()
    gradients = gradients_of(model, torch.randn(BATCH, TIME, WIDTH))
    model.train()
    assert not plan(gradients).fits  # without masks
    x = gradients.examples.z.reshape(BATCH, TIME, WIDTH)
    with torch.no_grad(), recorded_masks() as masks:
        outputs = model(x)
        own = MaskLayouts().by_example(masks, BATCH, "tagger", lambda: model(x[:1]))
    gradients = replace(gradients, examples=replace(gradients.examples, masks=own))
    check(gradients, generic=(), mapped=False)
    recorded = forward_pass(gradients, gradients.examples.z.detach().requires_grad_())
    torch.testing.assert_close(recorded.outputs, outputs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("options", "reason"),
    [({"batch_first": True, "proj_size": 2}, "proj_size"), ({"batch_first": False}, "4 rows")],
)
def test_what_is_not_served_is_told(options: Any, reason: str) -> None:
    model = Model(
        lambda m, x: m.layer(x)[0].reshape(len(x), -1), layer=nn.LSTM(WIDTH, HIDDEN, **options)
    )
    found = plan(gradients_of(model, torch.randn(BATCH, TIME, WIDTH)))
    assert not found.fits
    assert reason in str(found.reason)
