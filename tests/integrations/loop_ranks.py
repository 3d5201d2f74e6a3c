"""Fits by Lightning and by Hugging Face's Trainer, on several ranks and, with the same draws, in one process."""

from __future__ import annotations

import gc
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from tests.opacus_suite.vision import import_torchvision

# before Lightning and transformers import it, which may lack its compiled part
if find_spec("torchvision") is not None:
    import_torchvision()
import lightning.pytorch as pl
import transformers
from accelerate.state import AcceleratorState, PartialState
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

from tests.distributed.rank_runs import replaying
from tests.integrations.model_zoo.hugging_face import BERT_DROPS, ENCODER, built
from tests.integrations.model_zoo.model import EXAMPLES, texts
from torchfil import Accounting, FILPrivacyEngine, Private
from torchfil.engine.loader import FILBatchSampler, FILPoissonSampler
from torchfil.integrations.huggingface import FILTrainer
from torchfil.integrations.lightning import FILCallback

DELTA = 1e-5
Draws = Sequence[Sequence[int]]


@dataclass
class Fitted:
    """What a fit leaves behind."""

    weights: list[Tensor]
    columns: dict[str, list[Any]]
    epsilon: float
    draws: list[list[int]]
    steps: int
    notes: Any = None


def settings(**more: Any) -> dict[str, Any]:
    noise = torch.Generator().manual_seed(5)
    accounting = Accounting(seed=3, estimator="exact")
    return {"noise_multiplier": 0.9, "noise_generator": noise, "accounting": accounting, **more}


def fitted(
    engine: FILPrivacyEngine, module: nn.Module, draws: list[list[int]], steps: int, notes: Any = None
) -> Fitted:
    columns = engine.leakage_columns(delta=DELTA)[1]
    weights = [p.detach().clone() for p in module.parameters()]
    return Fitted(weights, columns, float(engine.get_epsilon(DELTA)), draws, steps, notes)


@contextmanager
def as_a_rank() -> Iterator[int]:
    """Inside, the environment is that of a process which torchrun has started; gives the number of ranks."""
    if not dist.is_initialized():
        yield 1
        return
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    with mock.patch.dict(os.environ, {**names, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}):
        yield int(size)


@contextmanager
def noting_draws() -> Iterator[list[list[int]]]:
    """Gives a list in which the examples of every batch of this process are noted."""
    draws: list[list[int]] = []
    patches = []
    for kind in (FILBatchSampler, FILPoissonSampler):

        def note(sampler: Any, plain: Callable[[Any], Iterator[list[int]]] = kind.__iter__) -> Iterator[list[int]]:
            for drawn in plain(sampler):
                draws.append(list(drawn))
                yield drawn

        patches.append(mock.patch.object(kind, "__iter__", note))
    with patches[0], patches[1]:
        yield draws


@contextmanager
def replaying_batches(draws: Draws | None) -> Iterator[None]:
    """In place of what the loader's own sampler draws, without Poisson sampling."""
    left = iter(draws or [])

    def replay(sampler: Any) -> Iterator[list[int]]:
        sampler._on_start()
        yield from (list(drawn) for drawn in itertools.islice(left, len(sampler)))

    with mock.patch.object(FILBatchSampler, "__iter__", replay) if draws is not None else nullcontext():
        yield


# ---------------------------------------------------------------------- Lightning


class Classifier(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.network(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self(x), y)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("seen", float(len(batch[1])), reduce_fx="sum", sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.3, momentum=0.5)


class Looks(pl.Callback):
    """At what torch's wrapper has left."""

    def __init__(self) -> None:
        self.wrappers = -1
        self.is_plain = False

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.wrappers = sum(type(each) is nn.parallel.DistributedDataParallel for each in gc.get_objects())
        self.is_plain = trainer.strategy.model is pl_module


def lightning_fit(
    folder: str,
    *,
    n: int = 41,
    batch_size: int = 4,
    epochs: int = 2,
    replayed: Draws | None = None,
    resumed: bool = False,
    bad: int | None = None,
    weighted: bool = False,
    trainer_options: dict[str, Any] | None = None,
    **options: Any,
) -> Fitted:
    """A fit in this process, as one of several ranks where there are any."""
    torch.manual_seed(1 + (dist.get_rank() if dist.is_initialized() else 0))  # rank 0's weights count
    source = torch.Generator().manual_seed(0)
    x, y = torch.randn(n, 5, generator=source, dtype=torch.float64), torch.randint(3, (n,), generator=source)
    if bad is not None:
        x[bad] = torch.nan
    module, dataset = Classifier(), TensorDataset(x, y)
    callback = FILCallback(path=Path(folder) / "leakage.csv", delta=DELTA, max_grad_norm=0.8, **settings(**options))
    Path(folder).mkdir(exist_ok=True)
    looks, saved = Looks(), Path(folder) / "last.ckpt"
    quiet: dict[str, Any] = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    quiet |= {"num_sanity_val_steps": 0, "enable_checkpointing": False}
    with as_a_rank() as size, noting_draws() as draws, replaying(replayed), replaying_batches(replayed):
        ranks = {"devices": size, "strategy": "ddp" if size > 1 else "auto", "accelerator": "cpu"}
        quiet |= {"default_root_dir": folder, "max_epochs": epochs, "precision": "64-true", **(trainer_options or {})}
        trainer = pl.Trainer(callbacks=[callback, looks], **ranks, **quiet)
        loader = DataLoader(dataset, batch_size=batch_size, generator=torch.Generator().manual_seed(2))
        if weighted:
            sampler = WeightedRandomSampler(torch.ones(n).tolist(), n, replacement=False)
            loader = DataLoader(dataset, batch_size=batch_size, sampler=sampler)
        trainer.fit(module, loader, DataLoader(dataset, batch_size=8), ckpt_path=saved if resumed else None)
        trainer.save_checkpoint(saved)
    notes = {
        "wrappers": looks.wrappers,
        "is_plain": looks.is_plain and "forward" not in vars(module),
        "logged": float(trainer.callback_metrics["epsilon"]),
        "seen": float(trainer.callback_metrics["seen"]),
    }
    return fitted(callback.engine, module, draws, trainer.global_step, notes)


def lightning_refusal(folder: str, **options: Any) -> str:
    try:
        lightning_fit(folder, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was refused"


# ---------------------------------------------------------------------- Hugging Face


def trainer_fit(
    folder: str,
    *,
    n: int = 25,
    batch_size: int = 3,
    epochs: float = 2,
    replayed: Draws | None = None,
    resumed: str | None = None,
    arguments: dict[str, Any] | None = None,
    **options: Any,
) -> Fitted:
    """A training run in this process, as one of several ranks where there are any."""
    torch.manual_seed(1 + (dist.get_rank() if dist.is_initialized() else 0))
    model = built(0.0, ("BertForSequenceClassification", ENCODER, BERT_DROPS)).double()
    data = [texts()[i % EXAMPLES] for i in range(n)]
    Path(folder).mkdir(exist_ok=True)
    AcceleratorState._reset_state(reset_partial_state=True)
    with as_a_rank(), noting_draws() as draws, replaying(replayed), replaying_batches(replayed):
        sizes = {"per_device_train_batch_size": batch_size, "num_train_epochs": epochs, "max_grad_norm": 0.8}
        rate = {"learning_rate": 0.1, "lr_scheduler_type": "constant", "optim": "sgd", "use_cpu": True, "seed": 7}
        quiet: dict[str, Any] = {"report_to": [], "logging_steps": 2, "disable_tqdm": True, "save_strategy": "no"}
        args = transformers.TrainingArguments(folder, **{**sizes, **rate, **quiet, **(arguments or {})})
        trainer = FILTrainer(
            model=model,
            args=args,
            train_dataset=data,  # type: ignore[arg-type]
            privacy=settings(private=Private(submodule="bert.embeddings.word_embeddings"), **options),
            leakage_path=Path(folder) / "leakage.csv",
            delta=DELTA,
        )
        trainer.train(resume_from_checkpoint=resumed)
        notes = {
            "wrappers": sum(type(each) is nn.parallel.DistributedDataParallel for each in gc.get_objects()),
            "logged": [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry],
        }
    PartialState._reset_state()
    return fitted(trainer.engine, model, draws, trainer.state.global_step, notes)
