"""The models, and one training step by every method in the comparison."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from opacus import PrivacyEngine
from opacus.data_loader import DPDataLoader
from paper_data import real_data
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks import zoo
from torchfil import Accounting, Execution, FILPrivacyEngine, Private
from torchfil.questions import Change

__all__ = ["MODELS", "UNIT", "Loop", "Model", "Variant", "variants"]

UNIT = "Opacus, hooks"
Data = Callable[[int], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Model:
    """A network with its data.

    Attributes:
        title: The name in the tables.
        build: Builds the network.
        data: Makes a given number of examples and labels.
        cuda_batch: The expected batch on a GPU.
        cpu_batch: The expected batch on a CPU.
        private: What is private.
    """

    title: str
    build: Callable[[], nn.Module]
    data: Data
    cuda_batch: int
    cpu_batch: int
    private: Private | None = None

    def batch(self, device: str) -> int:
        """The expected batch on this device."""
        return self.cuda_batch if device.startswith("cuda") else self.cpu_batch


def random_images(channels: int, size: int) -> Data:
    """Random pixels."""
    return lambda n: (torch.rand(n, channels, size, size), torch.randint(10, (n,)))


def digits(count: int) -> tuple[Tensor, Tensor]:
    """MNIST's digits if they are on this machine, repeated if there are too few.

    Else random pixels.
    """
    try:
        images, labels = _mnist()
    except FileNotFoundError:
        return random_images(1, 28)(count)
    rows = torch.arange(count) % len(images)
    return images[rows], labels[rows]


@cache
def _mnist() -> tuple[Tensor, Tensor]:
    return real_data("mnist").mnist()


def sentences(count: int) -> tuple[Tensor, Tensor]:
    """64 random tokens of 1,000.

    The label says whether one tenth of the tokens outnumbers another tenth.
    """
    tokens = torch.randint(1000, (count, 64))
    return tokens, ((tokens % 10 == 3).sum(dim=1) > (tokens % 10 == 7).sum(dim=1)).long()


MODELS: dict[str, Model] = {
    "mnist": Model("MNIST CNN", zoo.mnist_cnn, digits, 600, 256),
    "cifar": Model("CIFAR CNN", zoo.cifar_cnn, random_images(3, 32), 200, 32),
    "resnet18": Model("ResNet-18 with GroupNorm", zoo.resnet18, random_images(3, 32), 128, 4),
    "vit": Model("ViT-Tiny", zoo.vit_tiny, random_images(3, 32), 64, 4),
    "tokens": Model(
        "6-layer token transformer",
        lambda: zoo.token_transformer(2, 1000, 64, width=128, depth=6, heads=4),
        sentences,
        64,
        4,
        Private(submodule="embedding"),
    ),
}


@dataclass(frozen=True)
class Variant:
    """A way to train.

    Attributes:
        method: "plain", "hooks", "ghost", "loop" (an unchanged loop under torchfil) or
            "train_step".
        accounting: torchfil's.
        mode: Its ``grad_sample_mode``.
        paused: Whether nothing is measured.
        mean: Whether to report the mean time instead of the median, because steps differ by design.
    """

    method: str
    accounting: Accounting = field(default_factory=lambda: Accounting(num_probes=1))
    mode: str = "auto"
    paused: bool = False
    mean: bool = False


def _other_label(inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    return inputs, (targets + 1) % 2


def variants(device: str) -> dict[str, Variant]:
    """The methods to compare, by title; the second one is the unit."""
    chosen = {
        "plain SGD": Variant("plain"),
        UNIT: Variant("hooks"),
        "Opacus, ghost clipping": Variant("ghost"),
        "torchfil loop, 1 probe": Variant("loop"),
        "torchfil loop, Opacus's hooks, 1 probe": Variant("loop", mode="hooks"),
        "torchfil train_step, not measured": Variant("train_step", paused=True),
        "torchfil train_step, 1 probe": Variant("train_step"),
        "torchfil train_step, 3 probes": Variant("train_step", Accounting(num_probes=3)),
        "torchfil train_step, 1 probe, 1 question": Variant(
            "train_step", Accounting(num_probes=1, questions={"label": Change(_other_label)})
        ),
    }
    if device.startswith("cuda"):
        chosen["torchfil train_step, 1 probe, no CUDA graph"] = Variant(
            "train_step", Accounting(num_probes=1, execution=Execution(cuda_graphs=False))
        )
    chosen["torchfil train_step, rel_error = 0.05 over 100 epochs"] = Variant(
        "train_step", Accounting(rel_error=0.05, epochs=100), mean=True
    )
    return chosen


class Loop:
    """Training that takes one step at a time.

    The data are on the device, and drawing batches is not timed.

    Args:
        model: The model to train.
        variant: The method.
        device: The device.
        batch: The expected batch; None: the model's own.
        batches: How many batches are used in turn: of twenty drawn batches, those closest to the
            expected size.
    """

    def __init__(
        self,
        model: Model,
        variant: Variant,
        device: str,
        batch: int | None = None,
        batches: int = 8,
    ) -> None:
        torch.manual_seed(0)
        batch = batch or model.batch(device)
        self.variant, self.device = variant, device
        module = model.build().to(device)
        self.criterion: Any = nn.CrossEntropyLoss()
        self.optimizer: Any = torch.optim.SGD(module.parameters(), lr=0.01)
        self.engine: Any = None

        x, y = model.data(20 * batch)
        dataset = TensorDataset(x.to(device), y.to(device))
        loader = DataLoader(dataset, batch_size=batch, generator=torch.Generator().manual_seed(1))
        given: dict[str, Any] = {
            "module": module,
            "optimizer": self.optimizer,
            "data_loader": loader,
            "noise_multiplier": 1.0,
            "max_grad_norm": 1.0,
        }

        if variant.method == "plain":
            loader = DPDataLoader.from_data_loader(loader)
        elif variant.method == "hooks":
            self.engine = PrivacyEngine(accountant="rdp")
            module, self.optimizer, loader = self.engine.make_private(**given)
        elif variant.method == "ghost":
            self.engine = PrivacyEngine(accountant="rdp")
            module, self.optimizer, self.criterion, loader = self.engine.make_private(
                **given, criterion=self.criterion, grad_sample_mode="ghost"
            )
        else:
            self.engine = FILPrivacyEngine()
            memory = 2**35 if device.startswith("cuda") else 2**33
            execution = replace(variant.accounting.execution, max_memory=memory)
            if variant.method == "train_step":
                given["criterion"] = self.criterion
            module, self.optimizer, loader = self.engine.make_private(
                **given,
                private=model.private,
                grad_sample_mode=variant.mode,
                accounting=replace(variant.accounting, execution=execution),
            )

        # all methods draw the same batches, from the loader's seed
        self.model = module
        drawn = sorted(loader, key=lambda drawn: abs(len(drawn[1]) - batch))
        self.batches = itertools.cycle(drawn[:batches])
        if variant.paused:
            self._pause = self.engine.paused()
            self._pause.__enter__()

    def step(self) -> None:
        """One step on the next batch."""
        x, y = next(self.batches)
        if self.variant.method == "train_step":
            self.engine.train_step(x, y)
            return
        self.optimizer.zero_grad()
        self.criterion(self.model(x), y).backward()
        self.optimizer.step()
