"""The models on which every fast path is compared with brute force.

With TORCHFIL_TEST_DEVICE=cuda in the environment the same tests run on a GPU.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import zoo
from torchfil.private import Private

CLIPS = ("smooth", "gelu", "gelu-paper", "hard", "rsqrt")
SIGMA = 1.7
DEVICE = os.environ.get("TORCHFIL_TEST_DEVICE", "cpu")


class GroupNormResidual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 4, 3, padding=1)
        self.norm = nn.GroupNorm(2, 4)
        self.branch = nn.Conv2d(4, 4, 3, padding=1)
        self.head = nn.Linear(4 * 2 * 2, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.norm(self.stem(x)))
        h = h + torch.tanh(self.branch(h))
        return self.head(nn.functional.avg_pool2d(h, 2).flatten(1))


class TinyTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        layer = nn.TransformerEncoderLayer(
            8, 2, 12, dropout=0.0, activation="gelu", batch_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(8, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.encoder(self.embedding(tokens)).mean(dim=1))


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Conv2d(1, 2, 2)
        self.table = nn.Linear(3, 4)
        self.head = nn.Linear(2 * 2 * 2 + 4, 2)

    def forward(self, image: Tensor, table: Tensor) -> Tensor:
        return self.head(torch.cat([self.image(image).flatten(1), self.table(table)], dim=1).tanh())


@dataclass(frozen=True)
class Case:
    model: nn.Module
    loss_fn: Callable[[Any, Any], Tensor]
    inputs: Any
    targets: Any
    private: Private | None = None
    mode: str = "reverse"
    C: float = 1.0  # such that some of seven examples are clipped hard and some are not

    @property
    def arguments(self) -> tuple[Any, ...]:
        return self.model, self.loss_fn, self.inputs, self.targets


def mlp(batch: int) -> Case:
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    return Case(
        model, nn.CrossEntropyLoss(), torch.randn(batch, 5), torch.randint(3, (batch,)), C=1.4
    )


def mnist_cnn(batch: int) -> Case:
    pixels = torch.zeros(1, 28, 28, dtype=torch.bool)
    pixels[:, 4:24:5, 3:27:4] = True
    more: Any = {"private": Private(coordinates=pixels), "mode": "forward", "C": 2.5}
    images, labels = torch.rand(batch, 1, 28, 28), torch.randint(10, (batch,))
    return Case(zoo.mnist_cnn(), nn.CrossEntropyLoss(), images, labels, **more)


def groupnorm_residual(batch: int) -> Case:
    images, labels = torch.randn(batch, 2, 4, 4), torch.randint(3, (batch,))
    return Case(GroupNormResidual(), nn.CrossEntropyLoss(), images, labels, C=1.8)


def transformer(batch: int) -> Case:
    tokens, private = torch.randint(11, (batch, 4)), Private(submodule="embedding")
    return Case(
        TinyTransformer(),
        nn.CrossEntropyLoss(),
        tokens,
        torch.randint(3, (batch,)),
        private,
        C=2.05,
    )


def two_inputs(batch: int) -> Case:
    inputs = (torch.randn(batch, 1, 3, 3), torch.randn(batch, 3))
    return Case(TwoInputs(), nn.CrossEntropyLoss(), inputs, torch.randint(2, (batch,)), C=1.45)


def private_target(batch: int) -> Case:
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    return Case(
        model,
        nn.MSELoss(),
        torch.randn(batch, 4),
        torch.randn(batch, 2),
        Private(target=True),
        C=2.0,
    )


MAKERS = (mlp, mnist_cnn, groupnorm_residual, transformer, two_inputs, private_target)
CASES: dict[str, Callable[[int], Case]] = {make.__name__: make for make in MAKERS}


def build(name: str, batch: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Case:
    """A case with weights and data drawn from the seed, the same numbers in every dtype."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        case = CASES[name](batch)

    def convert(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return leaf.to(DEVICE, dtype if leaf.is_floating_point() else leaf.dtype)

    inputs = (
        tuple(map(convert, case.inputs)) if isinstance(case.inputs, tuple) else convert(case.inputs)
    )
    return replace(
        case, model=case.model.to(DEVICE, dtype), inputs=inputs, targets=convert(case.targets)
    )


def relative_error(value: Tensor, truth: Tensor) -> float:
    """‖value − truth‖ / ‖truth‖ over all entries."""
    value, truth = value.double().cpu(), truth.double().cpu()
    return ((value - truth).norm() / truth.norm()).item()


def grouped(**options: Any) -> dict[str, Any]:
    """Options of ``make_private`` with those of the accounting and of the execution put where they
    belong.
    """
    from torchfil import Accounting, Execution

    def taken(kind: Any) -> dict[str, Any]:
        return {f.name: options.pop(f.name) for f in dataclasses.fields(kind) if f.name in options}

    execution = Execution(**taken(Execution))
    accounting = Accounting(**{"execution": execution, **taken(Accounting)})
    return {**options, "accounting": accounting}
