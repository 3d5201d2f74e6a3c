"""batch_first=False, inputs [time, batch, …]: the same run as with batch_first=True, and the truth by brute force."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from opacus.layers import DPLSTM
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev
from torch.utils.data import DataLoader, TensorDataset

from tests.cases import DEVICE, grouped, relative_error
from tests.engine.loops import assert_same_run
from torchfil import FILPrivacyEngine, Private
from torchfil.clipping import DEFAULT_CLIP, get_clip

TIME, WIDTH, WORDS, COUNT, SIGMA, C = 5, 3, 7, 12, 0.9, 0.8


class Recurrent(nn.Module):
    """Takes [time, batch], or [batch, time] if ``first``; lengths [batch] say where a text ends."""

    def __init__(self, first: bool, kind: Any = nn.LSTM) -> None:
        super().__init__()
        self.words, self.first = nn.Embedding(WORDS, WIDTH), first
        self.layer, self.head = kind(WIDTH, 4), nn.Linear(4, 3)

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        states = self.layer(self.words(tokens.t() if self.first else tokens))[0]
        outputs: Tensor = self.head(states)  # [time, batch, classes], as Opacus's hooks need it
        return outputs[lengths - 1, torch.arange(len(lengths))]


class Averaging(nn.Module):
    """Takes [time, batch, width]."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(WIDTH, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(self.head(self.layer(x).tanh())).mean(dim=0)


def texts() -> TensorDataset:
    source = torch.Generator().manual_seed(0)
    words = torch.randint(WORDS, (COUNT, TIME), generator=source)
    return TensorDataset(words, torch.arange(COUNT) % TIME + 1, torch.randint(3, (COUNT,), generator=source))


def second(samples: list[Any]) -> Any:
    first, *others = zip(*samples, strict=True)
    return torch.stack(first, dim=1), *map(torch.stack, others)


def trained(module: nn.Module, data: Any, way: str, *, first: bool, steps: int = 4, **options: Any) -> FILPrivacyEngine:
    size = options.pop("batch_size", TIME)  # as long as wide
    engine, mode = FILPrivacyEngine(), way if way in ("hooks", "functorch") else "auto"
    options = {"noise_multiplier": SIGMA, "max_grad_norm": C, "seed": 3, "poisson_sampling": False, **options}
    torch.manual_seed(4)
    model, optimizer, loader = engine.make_private(
        module,
        torch.optim.SGD(module.parameters(), lr=0.3),
        DataLoader(data, batch_size=size, collate_fn=None if first else second, drop_last=True),
        criterion=nn.CrossEntropyLoss(),
        grad_sample_mode=mode,
        batch_first=first,
        noise_generator=torch.Generator(DEVICE).manual_seed(5),
        **grouped(**options),
    )
    while steps > 0:
        for *inputs, y in loader:
            inputs, y = [x.to(DEVICE) for x in inputs], y.to(DEVICE)
            if way == "train_step":
                engine.train_step(tuple(inputs), y)
            else:
                optimizer.zero_grad()
                F.cross_entropy(model(*inputs), y).backward()
                optimizer.step()
            steps -= 1
    return engine


@pytest.mark.parametrize("way", ["loop", "train_step", "hooks"])
def test_it_is_the_run_with_the_batch_first(way: str) -> None:
    runs = []
    for first in (True, False):
        torch.manual_seed(1)
        module = Recurrent(first, nn.LSTM if way == "loop" else DPLSTM).double().to(DEVICE)
        options = {"private": Private(submodule="words"), "norm_refresh": None if way == "loop" else 2}
        runs.append((trained(module, texts(), "loop" if first else way, first=first, **options), module))
    assert_same_run(runs[1], runs[0], 1e-9)
    if way == "hooks":
        plis = [engine.plis([2, 0]) for engine, _ in runs]  # read from the data set itself
        assert relative_error(plis[1].flatten(), plis[0].flatten()) < 1e-9


@pytest.mark.parametrize("way", ["loop", "train_step", "functorch"])
def test_one_step_is_that_of_each_example_alone(way: str) -> None:
    torch.manual_seed(0)
    module = Averaging().double().to(DEVICE)
    x, y = torch.randn(TIME, TIME, WIDTH, dtype=torch.float64), torch.randint(3, (TIME,))
    parameters = {name: value.detach().clone().cpu() for name, value in module.named_parameters()}
    plain, clip = Averaging().double(), get_clip(DEFAULT_CLIP)

    def clipped(z: Tensor, i: int) -> Tensor:
        def loss(parameters: dict[str, Tensor]) -> Tensor:
            return F.cross_entropy(functional_call(plain, parameters, (z[:, None],)), y[i : i + 1])

        g = torch.cat([part.flatten() for part in grad(loss)(parameters).values()])
        return g / clip.c(g.norm() / clip.threshold(C))

    # x[i] is [time, width], and a batch [time, batch, width]
    truth = [jacrev(clipped)(x[i], i).square().sum() / (SIGMA * C) ** 2 for i in range(TIME)]
    engine = trained(module, TensorDataset(x, y), way, first=False, steps=1, estimator="exact", amplification="none")
    assert relative_error(engine.totals.get_trace().value.cpu(), torch.stack(truth)) < 1e-9


def test_poisson_sampling_may_draw_nobody() -> None:
    engine = trained(
        Averaging().double().to(DEVICE),
        TensorDataset(torch.randn(3, TIME, WIDTH, dtype=torch.float64), torch.arange(3)),
        "loop",
        first=False,
        batch_size=1,
        steps=12,
        poisson_sampling=True,
    )
    assert engine.ledger is not None
    assert engine.accountant.history[0][2] >= 12 > int(engine.ledger.sums["participations"].sum()) / 2


@pytest.mark.parametrize("time", [4, TIME])  # TIME examples in a batch
def test_outputs_with_the_examples_second_are_refused(time: int) -> None:
    class Tagging(Averaging):
        def forward(self, x: Tensor) -> Tensor:
            return torch.as_tensor(self.head(self.layer(x).tanh()))

    module, engine = Tagging().double().to(DEVICE), FILPrivacyEngine()
    data = TensorDataset(torch.randn(TIME, time, WIDTH, dtype=torch.float64), torch.randint(3, (TIME, time)))
    model, optimizer, loader = engine.make_private(
        module,
        torch.optim.SGD(module.parameters(), lr=0.3),
        DataLoader(
            data,
            batch_size=TIME,
            collate_fn=lambda items: [torch.stack(part, dim=1) for part in zip(*items, strict=True)],
        ),
        poisson_sampling=False,
        batch_first=False,
    )
    for x, y in loader:
        F.cross_entropy(model(x.to(DEVICE)).flatten(0, 1), y.to(DEVICE).flatten()).backward()
        with pytest.raises((RuntimeError, ValueError), match="batch_first=False|alone has another loss"):
            optimizer.step()
