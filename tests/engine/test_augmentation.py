"""Data sets that give another view of an example each time: refused where coordinates are summed, else left alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset

from tests.cases import DEVICE, grouped
from tests.engine.loops import SIGMA, C, data, loader, network, train
from torchfil import FILPrivacyEngine, Private, fisher

BY_COORDINATE = ("diagonal", "fim", "sketch", "plis")


class Views(Dataset[Any]):
    """(x, y), or more, as a transform of both makes it at every read."""

    def __init__(self, transform: Callable[[Tensor, Tensor], Any], n: int = 24) -> None:
        self.plain = data(n)
        self.transform = transform
        self.reads = 0

    def __len__(self) -> int:
        return len(self.plain)

    def __getitem__(self, row: int) -> Any:
        self.reads += 1
        return self.transform(*self.plain[row])


def flipped(x: Tensor, y: Tensor) -> Any:
    return (x.flip(-1) if torch.rand(()) < 0.5 else x), y


def make(dataset: Any, module: nn.Module | None = None, **options: Any) -> FILPrivacyEngine:
    module = module if module is not None else network()
    engine = FILPrivacyEngine()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.3)
    engine.make_private(module, optimizer, loader(dataset), **grouped(**options))
    return engine


@pytest.mark.parametrize("track", BY_COORDINATE)
@pytest.mark.parametrize("seed", range(5))
def test_random_views_are_refused_where_coordinates_are_summed(track: str, seed: int) -> None:
    torch.manual_seed(seed)
    with pytest.raises(ValueError, match=rf"track=\('{track}',\) sums by coordinate.*Track the trace only"):
        make(Views(flipped), track=(track,))


def test_the_trace_is_kept_and_nothing_is_read_twice() -> None:
    dataset = Views(flipped)
    make(dataset)
    assert dataset.reads < 16  # Opacus reads one or two, for the shape of an empty batch
    assert bool((train(Views(flipped), steps=3).engine.get_fil().value > 0).any())


@pytest.mark.parametrize(
    "draw", [lambda: float(torch.rand(())), random.random, lambda: float(np.random.rand())], ids=["torch", "py", "np"]
)
def test_every_generator_is_seen_and_left_as_it_was(draw: Callable[[], float]) -> None:
    def states() -> Any:
        return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()

    before = states()
    with pytest.raises(ValueError, match="sums by coordinate"):
        make(Views(lambda x, y: (x + draw(), y)), track=("diagonal",))
    assert states() == before


def test_data_that_read_alike_are_taken() -> None:
    make(data(24), track=BY_COORDINATE[:1])
    make(Subset(Views(lambda x, y: (2 * x - 1, y)), [5, 2, 7, 1]), track=("diagonal", "sketch"))
    assert make(Views(lambda x, y: (x.where(x > 0, torch.nan), y)), track=("diagonal",))  # NaN is equal to itself


class WithNoise(nn.Module):
    """A model that is given noise, or a flag, beside the example."""

    def __init__(self) -> None:
        super().__init__()
        self.network = network()

    def forward(self, x: Tensor, beside: Tensor) -> Any:
        return self.network(x + beside.to(x.dtype)[:, None])


def test_only_what_is_private_must_read_alike() -> None:
    # random targets, and integers beside a floating-point input, have no coordinates
    make(Views(lambda x, y: (x, torch.randint(3, ()))), track=("diagonal",))
    make(Views(lambda x, y: (x, torch.randint(2, ()), y)), WithNoise(), track=("diagonal",))

    # a floating-point input counts as private until it is said what is
    noisy = Views(lambda x, y: (x, torch.rand((), dtype=torch.float64), y))
    with pytest.raises(ValueError, match=r"or name the private: private=Private\(inputs=…\)"):
        make(noisy, WithNoise(), track=("diagonal",))
    make(noisy, WithNoise(), track=("diagonal",), private=Private(inputs=0))

    # a private target is compared, too
    with pytest.raises(ValueError, match="sums by coordinate"):
        make(Views(lambda x, y: (x, torch.rand(3))), track=("diagonal",), private=Private(target=True))


def test_integers_decide_where_nothing_is_floating_point() -> None:
    module = nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(20, 3)).double()
    masked = Views(lambda x, y: (torch.randint(9, (5,)), y))
    with pytest.raises(ValueError, match="sums by coordinate"):
        make(masked, module, track=("diagonal",), private=Private(submodule="0"))


def test_a_collate_function_that_draws_is_refused() -> None:
    def jittered(samples: list[Any]) -> Any:
        x, y = (torch.stack(part) for part in zip(*samples, strict=True))
        return x + torch.rand(len(x), 1, dtype=x.dtype), y

    engine, module = FILPrivacyEngine(), network()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.3)
    plain = loader(data(24), collate_fn=jittered)
    with pytest.raises(ValueError, match="sums by coordinate"):
        engine.make_private(module, optimizer, plain, track=("diagonal",))
    engine.make_private(module, optimizer, plain)  # nothing was touched


class Flips(nn.Module):
    """The remedy: a flip inside the model, drawn for each example."""

    def __init__(self, drawn: list[Tensor]) -> None:
        super().__init__()
        self.note = drawn.append

    def forward(self, x: Tensor) -> Tensor:
        flips = torch.rand(len(x), 1, dtype=x.dtype, device=x.device) < 0.5
        if len(x) == 24:
            self.note(flips)
        return torch.where(flips, x.flip(-1), x)


@pytest.mark.parametrize("mode", ["auto", "hooks"])
def test_a_flip_inside_the_model_keeps_the_examples_own_coordinates(mode: str) -> None:
    dataset, drawn, plain = data(24), list[Tensor](), network()
    module = nn.Sequential(Flips(drawn), plain).to(DEVICE)
    run = train(
        dataset,
        steps=1,
        batch_size=24,
        module=module,
        grad_sample_mode=mode,
        poisson_sampling=False,
        estimator="exact",
        track=("diagonal",),
    )

    # the truth: the diagonal at the views that were drawn, each flipped back
    at = network()
    x, y = run.steps[0].x[0], run.steps[0].y[0]
    flips = drawn[0].cpu()
    view = torch.where(flips, x.flip(-1), x)
    options: Any = {"max_grad_norm": C, "noise_multiplier": SIGMA, "estimator": "exact", "clip": "smooth"}
    diagonal = fisher.fim_diagonal(at.cpu(), nn.CrossEntropyLoss(), view, y, **options).value
    truth = torch.where(flips, diagonal.flip(-1), diagonal)

    rows = torch.tensor([int((dataset.tensors[0] == row).all(dim=1).nonzero()) for row in x])
    assert flips.any()
    assert not flips.all()
    assert torch.allclose(run.engine.get_attribute_fil(rows).value.cpu().square(), truth, rtol=1e-6)
    assert not torch.allclose(diagonal, truth, rtol=0.1)
