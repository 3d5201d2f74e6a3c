"""Two gloo ranks in Lightning's and in Hugging Face's loop are one process with the same draws
(float64).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

from tests.distributed.rank_pool import RankPool
from tests.distributed.rank_runs import Draws, as_one, replaying
from tests.opacus_suite.vision import import_torchvision
from torchfil import Accounting
from torchfil.engine.loader import FILBatchSampler, FILPoissonSampler

if find_spec("torchvision") is not None:  # before Lightning imports it in the ranks, too
    import_torchvision()
pytest.importorskip("lightning.pytorch", reason="lightning is not installed (torchfil[lightning])")
state = pytest.importorskip(
    "accelerate.state", reason="accelerate is not installed (torchfil[huggingface])"
)
pytest.importorskip("transformers", reason="transformers is not installed (torchfil[huggingface])")

from tests.integrations import test_huggingface as hugging_face  # noqa: E402
from tests.integrations import test_lightning as lightning  # noqa: E402
from tests.integrations.ledgers import DELTA  # noqa: E402
from torchfil.integrations.huggingface import FILTrainer  # noqa: E402
from torchfil.integrations.lightning import FILCallback  # noqa: E402

# each rank predicts from what it measured itself: nothing is predicted of known batches
EXACT = Accounting(seed=3, estimator="exact", amplification="none")


@dataclass
class Fitted:
    """What a fit leaves behind."""

    weights: list[Tensor]
    columns: dict[str, list[Any]]
    epsilon: float
    draws: list[list[int]]
    steps: int
    logged: Any

    @classmethod
    def by(
        cls, engine: Any, module: nn.Module, draws: list[list[int]], steps: int, logged: Any
    ) -> Fitted:
        weights = [p.detach().clone() for p in module.parameters()]
        columns, epsilon = engine.leakage_columns(delta=DELTA)[1], float(engine.get_epsilon(DELTA))
        return cls(weights, columns, epsilon, draws, steps, logged)


@contextmanager
def as_a_rank(module: nn.Module, replayed: Draws | None) -> Iterator[tuple[int, list[list[int]]]]:
    """Inside, the environment is that of a process which torchrun has started.

    Gives the number of ranks and draws.

    A list notes the examples of every batch of this process. Of the ranks' weights, which differ,
    rank 0's count.
    """
    draws: list[list[int]] = []

    def noting(plain: Callable[[Any], Iterator[list[int]]]) -> Any:
        def note(sampler: Any) -> Iterator[list[int]]:
            for drawn in plain(sampler):
                draws.append(list(drawn))
                yield drawn

        return note

    several = dist.is_initialized()
    rank, size = (dist.get_rank(), dist.get_world_size()) if several else (0, 1)
    with torch.no_grad():
        for p in module.parameters():
            p.mul_(1 + rank)
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    values = (
        dict(zip(names, map(str, (rank, rank, size, size, "127.0.0.1", 1)), strict=True))
        if several
        else {}
    )
    with (
        mock.patch.dict(os.environ, values),
        replaying(replayed),
        mock.patch.object(FILPoissonSampler, "__iter__", noting(FILPoissonSampler.__iter__)),
        mock.patch.object(FILBatchSampler, "__iter__", noting(FILBatchSampler.__iter__)),
    ):
        yield size, draws


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
    accumulated: int = 1,
    **options: Any,
) -> Fitted:
    """A fit in this process, as one of several ranks where there are any."""
    Path(folder).mkdir(exist_ok=True)
    source, saved = torch.Generator().manual_seed(0), Path(folder) / "last.ckpt"
    x, y = (
        torch.randn(n, 5, generator=source, dtype=torch.float64),
        torch.randint(3, (n,), generator=source),
    )
    if bad is not None:
        x[bad] = torch.nan
    module = lightning.module()
    settings = lightning.options(accounting=EXACT, **options)
    callback = FILCallback(path=Path(folder) / "leakage.csv", delta=DELTA, **settings)
    with as_a_rank(module, replayed) as (size, draws):
        ranks = {"devices": size, "strategy": "ddp" if size > 1 else "auto", "precision": "64-true"}
        steps = {"max_epochs": epochs, "accumulate_grad_batches": accumulated}
        trainer = lightning.trainer(callback, Path(folder), **ranks, **steps)
        loading: dict[str, Any] = {"generator": torch.Generator().manual_seed(2)}
        if weighted:
            loading = {
                "sampler": WeightedRandomSampler(torch.ones(n).tolist(), n, replacement=False)
            }
        loader = DataLoader(TensorDataset(x, y), batch_size=batch_size, **loading)
        trainer.fit(module, loader, ckpt_path=saved if resumed else None)
        trainer.save_checkpoint(saved)
    logged = float(trainer.callback_metrics["epsilon"])
    return Fitted.by(callback.engine, module, draws, trainer.global_step, logged)


def lightning_refusal(folder: str, **options: Any) -> str:
    try:
        lightning_fit(folder, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was refused"


def trainer_fit(
    folder: str,
    *,
    n: int = 19,
    batch_size: int = 3,
    replayed: Draws | None = None,
    **options: Any,
) -> Fitted:
    """A training run in this process, as one of several ranks where there are any."""
    Path(folder).mkdir(exist_ok=True)
    model = hugging_face.model().double()
    given = {"model": model, "train_dataset": hugging_face.examples(n), "delta": DELTA}
    given |= {
        "privacy": hugging_face.privacy(accounting=EXACT, **options),
        "leakage_path": Path(folder) / "leakage.csv",
    }
    state.AcceleratorState._reset_state(reset_partial_state=True)
    with as_a_rank(model, replayed) as (_, draws):
        sizes = {"per_device_train_batch_size": batch_size, "logging_steps": 2}
        trainer = hugging_face.made(Path(folder), kind=FILTrainer, given=given, **sizes)
        trainer.train()
    state.PartialState._reset_state()
    logged = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
    return Fitted.by(trainer.engine, model, draws, trainer.state.global_step, logged)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    with RankPool(2, tmp_path_factory.mktemp("ranks"), preloaded=[__name__]) as pool:
        yield pool


def assert_same(parts: list[Fitted], alone: Fitted) -> None:
    assert any(each > 0 for each in alone.columns["fil"])
    for part in parts:
        assert part.steps == alone.steps
        for a, b in zip(part.weights, alone.weights, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
        assert part.epsilon == pytest.approx(alone.epsilon, rel=1e-12)
        assert part.columns.keys() == alone.columns.keys()
        for name, column in alone.columns.items():
            same = (
                column
                if isinstance(column[0], str)
                else pytest.approx(column, rel=1e-6, abs=1e-9, nan_ok=True)
            )
            assert part.columns[name] == same, name


def all_draws(parts: list[Fitted]) -> list[list[int]]:
    return as_one([part.draws for part in parts])


@pytest.mark.parametrize(
    ("fit", "options"),
    [
        (lightning_fit, {}),
        pytest.param(lightning_fit, {"accumulated": 2, "batch_size": 2}, marks=pytest.mark.slow),
        (trainer_fit, {}),
    ],
)
def test_two_ranks_are_one_process(
    ranks: RankPool, tmp_path: Path, fit: Any, options: dict[str, Any]
) -> None:
    parts, size = ranks.run(fit, str(tmp_path), **options), 8 if fit is lightning_fit else 6
    alone = fit(str(tmp_path / "alone"), batch_size=size, replayed=all_draws(parts))
    assert_same(parts, alone)
    for part in parts:
        assert part.logged == pytest.approx(alone.logged, rel=1e-6)
    assert (tmp_path / "leakage.csv").read_text().count("\n") == 1 + len(alone.columns["fil"])


def test_a_fit_of_ranks_goes_on_from_its_checkpoint(ranks: RankPool, tmp_path: Path) -> None:
    """On ranks, and in one process."""
    begun, saved = ranks.run(lightning_fit, str(tmp_path), epochs=1), tmp_path / "last.ckpt"
    checkpoint = saved.read_bytes()
    resumed = ranks.run(lightning_fit, str(tmp_path), resumed=True)
    saved.write_bytes(checkpoint)
    by_one = lightning_fit(str(tmp_path), batch_size=8, resumed=True)
    for parts in (resumed, [by_one]):
        draws = [*all_draws(begun), *all_draws(parts)]
        assert_same(parts, lightning_fit(str(tmp_path / "alone"), batch_size=8, replayed=draws))


def test_refusals_end_the_fit_on_all_ranks(ranks: RankPool, tmp_path: Path) -> None:
    told = ranks.run(lightning_refusal, str(tmp_path), bad=3)
    assert sum("StepNotTakenError: another rank refused" in each for each in told) == 1
    assert sum("nan" in each.lower() or "finite" in each for each in told) == 1
    told = ranks.run(lightning_refusal, str(tmp_path), poisson_sampling=False)  # 41 examples
    assert all("must draw from its own part of the data" in each for each in told)
    told = ranks.run(lightning_refusal, str(tmp_path), poisson_sampling=False, weighted=True)
    assert all("two ranks can draw the same" in each for each in told)
