"""Small runs of every way of training, whose numbers are kept: a change of the code must leave them
as they are.

Each is in float64 on the CPU, with seeded noise and draws, and returns everything that a run says:
the released gradient of each step, the weights, the ledger, ε, individual ε and D.

    python -m tests.golden.runs           # what differs from the kept numbers, by run
    python -m tests.golden.runs --write   # keep today's instead; say why in the commit
"""

from __future__ import annotations

import argparse
import copy
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from benchmarks import zoo
from tests.cases import grouped
from torchfil import FILPrivacyEngine, Private
from torchfil.questions import Absent, Change, Column, Label, Token

KEPT = Path(__file__).with_name("kept.npz")
N, D, CLASSES, DELTA = 31, 5, 3, 1e-3
Found = dict[str, np.ndarray]


def dataset(seed: int, draw: Callable[[torch.Generator], Tensor]) -> TensorDataset:
    source = torch.Generator().manual_seed(seed)
    return TensorDataset(draw(source), torch.randint(CLASSES, (N,), generator=source))


def table() -> TensorDataset:
    return dataset(0, lambda source: torch.randn(N, D, generator=source, dtype=torch.float64))


def images() -> TensorDataset:
    return dataset(1, lambda source: torch.rand(N, 1, 6, 6, generator=source, dtype=torch.float64))


def texts() -> TensorDataset:
    return dataset(2, lambda source: torch.randint(20, (N, 6), generator=source))


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return make().double()


def mlp(dropout: float = 0.0) -> nn.Module:
    return seeded(
        lambda: nn.Sequential(
            nn.Linear(D, 6), nn.Tanh(), nn.Dropout(dropout), nn.Linear(6, CLASSES)
        )
    )


def convolutions() -> nn.Module:
    def make() -> nn.Module:
        first = nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.Tanh()
        return nn.Sequential(*first, nn.AvgPool2d(2), nn.Flatten(), nn.Linear(16, CLASSES))

    return seeded(make)


def transformer() -> nn.Module:
    return seeded(lambda: zoo.token_transformer(CLASSES, 20, 6, width=8, depth=1, heads=2))


class Run:
    """A run that is ready to train, and what it has released."""

    def __init__(
        self, module: nn.Module, dataset: Any, batch: int = 8, optimizer: Any = None, **options: Any
    ) -> None:
        given = {
            "noise_multiplier": 0.9,
            "max_grad_norm": 0.8,
            "seed": 3,
            "criterion": nn.CrossEntropyLoss(),
            **options,
        }
        self.engine, self.module, self.released = FILPrivacyEngine(noise_seed=7), module, []
        chosen = optimizer or (lambda trained: torch.optim.SGD(trained, lr=0.3))
        trained = [p for p in module.parameters() if p.requires_grad]
        self.model, self.optimizer, *criterion, self.loader = self.engine.make_private(
            module, chosen(trained), DataLoader(dataset, batch_size=batch), **grouped(**given)
        )
        self.criterion = criterion[0] if criterion else nn.functional.cross_entropy
        torch.manual_seed(5)  # dropout
        plain = self.optimizer.scale_grad

        def noting() -> None:
            plain()
            self.released.append(
                torch.cat([p.grad.detach().flatten() for p in self.optimizer.params])
            )

        self.optimizer.scale_grad = noting

    def loop(self, batches: Any = None) -> Run:
        for x, y in self.loader if batches is None else batches:
            self.optimizer.zero_grad()
            self.criterion(self.model(x), y).backward()
            self.optimizer.step()
        return self

    def whole_steps(self) -> Run:
        for x, y in self.loader:
            self.engine.train_step(x, y)
        return self

    def found(self) -> Found:
        """All numbers of the run, by name."""
        engine = self.engine
        assert engine.ledger is not None
        numbers = {f"ledger.{name}": value for name, value in engine.ledger.sums.items()}
        numbers["released"] = torch.stack(self.released)
        numbers["weights"] = torch.cat([p.detach().flatten() for p in self.module.parameters()])
        numbers["epsilon"] = torch.tensor(float(engine.get_epsilon(DELTA)))
        numbers["individual_epsilon"] = engine.get_individual_epsilon(delta=DELTA).value
        numbers["mse_bound"] = engine.get_mse_bound().value
        for name in engine.ledger.questions:
            numbers[f"D.{name}"] = engine.get_guess(name).divergence.value
            # without its cap
            numbers[f"D_high.{name}"] = engine.get_guess(name).divergence.interval(0.95)[1]
        return {name: value.detach().cpu().double().numpy() for name, value in numbers.items()}


def resumed() -> Found:
    """A checkpoint after the first of two passes, from which a new process would continue."""
    first = Run(mlp(), table(), num_probes=2).loop()
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/run.pt"
        first.engine.save_checkpoint(path=path, module=first.model, optimizer=first.optimizer)
        second = Run(mlp(), table(), num_probes=2)
        second.engine.load_checkpoint(path=path, module=second.model, optimizer=second.optimizer)
    return second.loop().found()


def accumulated() -> Found:
    run = Run(mlp(), table(), batch=4, accumulation_steps=2)
    for number, (x, y) in enumerate(run.loader):
        run.criterion(run.model(x), y).backward()
        if number % 2:
            run.optimizer.step()
            run.optimizer.zero_grad()
    return run.found()


def in_physical_batches() -> Found:
    run = Run(mlp(), table(), batch=12)
    with BatchMemoryManager(
        data_loader=run.loader, max_physical_batch_size=5, optimizer=run.optimizer
    ) as batches:
        return run.loop(batches).found()


class Stream(IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Iterator[Any]:
        x, y = table().tensors
        yield from zip(x, y, (f"person {row}" for row in range(N)), strict=True)


class OwnLoss(nn.Module):
    """A model that computes its loss itself."""

    def __init__(self) -> None:
        super().__init__()
        self.network = mlp()

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.network(x)
        given = {} if labels is None else {"loss": nn.functional.cross_entropy(logits, labels)}
        return {**given, "logits": logits}


class Named(TensorDataset):
    def __getitem__(self, row: Any) -> dict[str, Tensor]:
        x, y = super().__getitem__(row)
        return {"x": x, "labels": y}

    __getitems__ = None


def with_its_own_loss() -> Found:
    run = Run(OwnLoss(), Named(*table().tensors), criterion=None)
    for batch in run.loader:
        run.optimizer.zero_grad()
        run.model(**batch)["loss"].backward()
        run.optimizer.step()
    return run.found()


def two_views(x: Tensor) -> Tensor:
    return torch.stack([x, 0.5 * x + 0.1], dim=1)


QUESTIONS = {
    "member": Absent(),
    "label": Label(CLASSES),
    "first": Column(0, by=(0.5, -0.5), names=("more", "less")),
    "own": Change(lambda inputs, targets: (0.9 * inputs, targets)),
}
ADAM: dict[str, Any] = {"track": ("diagonal", "plis"), "num_probes": 2}
ADAM["optimizer"] = lambda trained: torch.optim.Adam(trained, lr=0.02)
TEXTS: dict[str, Any] = {
    "private": Private(submodule="embedding"),
    "questions": {"second": Token(1, [3, 4])},
}
HARD: dict[str, Any] = {
    "clip": "hard",
    "loss_reduction": "sum",
    "criterion": nn.CrossEntropyLoss(reduction="sum"),
}
RUNS: dict[str, Callable[[], Found]] = {
    "loop": lambda: Run(mlp(), table()).loop().loop().found(),
    "loop, loss identified": lambda: (
        Run(mlp(), table(), criterion=None, num_probes=2).loop().found()
    ),
    "train_step": lambda: Run(mlp(), table(), num_probes=2).whole_steps().whole_steps().found(),
    "hooks": lambda: Run(mlp(), table(), grad_sample_mode="hooks", num_probes=2).loop().found(),
    "ghost": lambda: Run(mlp(), table(), grad_sample_mode="ghost").loop().found(),
    "exact": lambda: (
        Run(mlp(), table(), estimator="exact", track=("diagonal", "fim")).loop().found()
    ),
    "dropout": lambda: Run(mlp(0.3), table()).loop().found(),
    "chunks": lambda: Run(convolutions(), images(), max_memory=2**14).whole_steps().found(),
    "accumulation": accumulated,
    "BatchMemoryManager": in_physical_batches,
    "questions": lambda: Run(mlp(), table(), questions=QUESTIONS).loop().found(),
    "questions, train_step": lambda: Run(mlp(), table(), questions=QUESTIONS).whole_steps().found(),
    "clip weights": lambda: (
        Run(mlp(), table(), clip_weights=torch.linspace(0.3, 1, N)).loop().found()
    ),
    "per layer": lambda: (
        Run(mlp(), table(), clipping="per_layer", max_grad_norm=[0.4] * 4).loop().found()
    ),
    "without Poisson sampling": lambda: (
        Run(mlp(), table(), poisson_sampling=False).loop().loop().found()
    ),
    "resumed": resumed,
    "stream": lambda: Run(mlp(), Stream(), poisson_sampling=False, id_of=2).loop().found(),
    "Adam, all quantities": lambda: Run(convolutions(), images(), **ADAM).loop().found(),
    "steered": lambda: Run(mlp(), table(), rel_error=0.3, epochs=3).loop().loop().loop().found(),
    "planned": lambda: Run(mlp(), table(), epochs=3).loop().loop().loop().found(),
    "texts": lambda: Run(transformer(), texts(), **TEXTS).loop().found(),
    "own loss": with_its_own_loss,
    "views": lambda: Run(mlp(), table(), views=two_views).loop().found(),
    "hard clip, sum": lambda: Run(mlp(), table(), **HARD).whole_steps().found(),
}


def two_ranks() -> Found:
    """In one of two processes; what all of them have released and booked."""
    from opacus.distributed import DifferentiallyPrivateDistributedDataParallel as Shared

    run = Run(Shared(mlp()), table(), questions={"member": Absent()}).loop()
    run.engine.gather()
    return run.found()


def bert() -> Found:
    """A small Hugging Face model with padding and dropout, which computes its loss itself."""
    import transformers

    sizes = {"vocab_size": 20, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"intermediate_size": 16, "max_position_embeddings": 8, "num_labels": CLASSES}
    config = transformers.BertConfig(**sizes)
    module = seeded(lambda: transformers.BertForSequenceClassification(config))
    words, labels = texts().tensors
    mask = (torch.arange(6)[None] < 3 + torch.arange(N)[:, None] % 4).long()
    data = [
        {"input_ids": w, "attention_mask": m, "labels": y}
        for w, m, y in zip(words, mask, labels, strict=True)
    ]
    run = Run(module, data, criterion=None)
    for batch in run.loader:
        run.optimizer.zero_grad()
        run.model(**batch).loss.backward()
        run.optimizer.step()
    return run.found()


def differences(name: str, found: Found) -> dict[str, float]:
    """The largest difference of each number from the kept one, relative to the largest.

    Infinite if one is missing.
    """
    kept = {
        key.split("/", 1)[1]: value for key, value in _kept().items() if key.split("/")[0] == name
    }
    apart = {}
    for key in kept.keys() | found.keys():
        a, b = kept.get(key), found.get(key)
        if (
            a is None
            or b is None
            or a.shape != b.shape
            or not np.array_equal(np.isfinite(a), np.isfinite(b))
        ):
            apart[key] = np.inf
            continue
        finite = np.isfinite(a)
        scale = np.abs(a[finite]).max(initial=1e-30)
        # a small part of the trace, whose rounding differs between kinds of CPUs
        if key == "ledger.certain":
            scale = max(scale, 1e-3 * np.abs(kept["ledger.trace"]).max())
        apart[key] = float(np.abs(a[finite] - b[finite]).max(initial=0.0) / scale)
    return apart


def _kept() -> Found:
    if not KEPT.exists():
        return {}
    with np.load(KEPT) as file:
        return dict(file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    kept = _kept()
    for name, run in {**RUNS, **_others()}.items():
        found = copy.deepcopy(run())
        print(f"{name:30} {max(differences(name, found).values(), default=np.inf):.1e}", flush=True)
        kept = {key: value for key, value in kept.items() if key.split("/")[0] != name}
        kept |= {f"{name}/{key}": value for key, value in found.items()}
    if options.write:
        np.savez_compressed(KEPT, **kept)


def _others() -> dict[str, Callable[[], Found]]:
    """The runs that need more than this process and the usual packages."""
    from importlib.util import find_spec

    from tests.distributed.rank_pool import RankPool

    def ranks() -> Found:
        with tempfile.TemporaryDirectory() as folder, RankPool(2, Path(folder)) as pool:
            return pool.run(two_ranks)[0]

    return {"two ranks": ranks, **({"BERT": bert} if find_spec("transformers") is not None else {})}


if __name__ == "__main__":
    main()
