"""A fit with FILCallback is the plain loop.

What it cannot account for is refused when the fit starts.
"""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.engine.loops import step
from tests.integrations.ledgers import assert_same_run
from tests.repeatable import check_no_noise_is_shared, recorded_noise
from torchfil import Accounting, FILPrivacyEngine, LeakageLogger

pl = pytest.importorskip(
    "lightning.pytorch", reason="lightning is not installed (torchfil[lightning])"
)
from torchfil.integrations.lightning import FILCallback  # noqa: E402

LR = 0.3
PEOPLE = [f"patient {i * i % 23}" for i in range(40)]


class Classifier(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.network(x)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self(x), y)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=LR)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]


class CallsASubmodule(Classifier):
    forward = pl.LightningModule.forward

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return nn.functional.cross_entropy(self.network(batch["x"]), batch["y"])


class Manual(Classifier):
    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()

    def on_train_epoch_end(self) -> None:
        self.lr_schedulers().step()


class ByName(TensorDataset):
    def __getitem__(self, index: Any) -> dict[str, torch.Tensor]:
        x, y = super().__getitem__(index)
        return {"x": x, "y": y}

    __getitems__ = None


class WithPatients(TensorDataset):
    def __getitem__(self, index: Any) -> tuple[torch.Tensor, str, torch.Tensor]:
        x, y = super().__getitem__(index)
        return x, PEOPLE[index], y

    __getitems__ = None


def module(kind: type = Classifier) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return kind()


def loader(kind: type = TensorDataset, batch_size: int = 4, **options: Any) -> DataLoader[Any]:
    source = torch.Generator().manual_seed(0)
    data = kind(torch.randn(40, 5, generator=source), torch.randint(3, (40,), generator=source))
    return DataLoader(
        data, batch_size=batch_size, generator=torch.Generator().manual_seed(2), **options
    )


def options(**more: Any) -> dict[str, Any]:
    noise, accounting = torch.Generator().manual_seed(5), Accounting(seed=3)
    return {
        "noise_multiplier": 0.9,
        "max_grad_norm": 0.8,
        "noise_generator": noise,
        "accounting": accounting,
        **more,
    }


def trainer(callback: Any, folder: Path, **more: Any) -> Any:
    quiet: dict[str, Any] = {
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "logger": False,
    }
    more = {"max_epochs": 2, "enable_checkpointing": False, **quiet, **more}
    return pl.Trainer(accelerator="cpu", callbacks=[callback], default_root_dir=folder, **more)


def fit(
    folder: Path,
    kind: type = Classifier,
    data: Any = None,
    validated: bool = False,
    inner: Any = None,
    private: Any = None,
    **more: Any,
) -> tuple[Any, Any]:
    """The callback and the module after a fit."""
    callback, fitted = FILCallback(module=inner, **options(**private or {})), module(kind)
    trainer(callback, folder, **more).fit(
        fitted, loader(**(data or {})), loader(batch_size=10) if validated else None
    )
    return callback, fitted


def plain_loop(
    kind: type = TensorDataset, *, workers: int = 0, **more: Any
) -> tuple[FILPrivacyEngine, Any]:
    network, engine, batches = (
        module().network,
        FILPrivacyEngine(),
        loader(kind, num_workers=workers),
    )
    optimizer: Any = torch.optim.SGD(network.parameters(), lr=LR)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    # Lightning opens the plain loader once
    torch.empty((), dtype=torch.int64).random_(generator=batches.generator)
    model, optimizer, private = engine.make_private(network, optimizer, batches, **options(**more))
    for _ in range(2):
        for batch in private:
            pair = list(batch.values() if isinstance(batch, dict) else batch)
            step(model, optimizer, pair)
        scheduler.step()
    return engine, network


FITS: dict[str, dict[str, Any]] = {
    "plain": {},
    "workers": {"data": {"num_workers": 1}, "truth": {"workers": 1}},
    "manual": {"kind": Manual},
    # one batch of mean size 2·2
    "accumulated": {"data": {"batch_size": 2}, "accumulate_grad_batches": 2},
    "validated": {"validated": True, "val_check_interval": 2},
    "a module of the module": {
        "kind": CallsASubmodule,
        "inner": "network",
        "data": {"kind": ByName},
    },
}
FITS["a module of the module"]["truth"] = {"kind": ByName}
FITS["people"] = {"private": {"owner_of": PEOPLE}, "truth": {"owner_of": PEOPLE}}
FITS["people in a column"] = {
    **FITS["people"],
    "private": {"owner_of": 1},
    "data": {"kind": WithPatients},
}


@pytest.mark.parametrize("name", FITS)
def test_the_ledger_is_that_of_the_plain_loop(name: str, tmp_path: Path) -> None:
    given = dict(FITS[name])
    truth = given.pop("truth", {})
    callback, fitted = fit(tmp_path, **given)
    assert_same_run(callback.engine, fitted, *plain_loop(**truth))
    assert not any(part._forward_hooks or part._backward_hooks for part in fitted.modules())
    copy.deepcopy(fitted)
    with pytest.raises(ValueError, match="already accounts for a run"):
        trainer(callback, tmp_path).fit(fitted, loader())


def test_resumed_fits_share_no_noise(tmp_path: Path) -> None:
    def noise(epochs: int, **more: Any) -> tuple[Any, list[torch.Tensor]]:
        with recorded_noise() as drawn:
            pl.seed_everything(0)
            own = trainer(FILCallback(**options(noise_generator=None)), tmp_path, max_epochs=epochs)
            own.fit(module(), loader(), **more)
        return own, drawn

    first, before = noise(1)
    first.save_checkpoint(path := tmp_path / "fit.ckpt")
    check_no_noise_is_shared(
        before, *(noise(2, ckpt_path=path, weights_only=False)[1] for _ in range(2))
    )


def test_a_resumed_fit_goes_on_with_the_ledger(tmp_path: Path) -> None:
    for callback in (FILCallback(**options()), pl.Callback()):
        first = trainer(callback, tmp_path, max_epochs=1)
        first.fit(module(), loader())
        first.save_checkpoint(path := tmp_path / f"{type(callback).__name__}.ckpt")
    second, resumed = FILCallback(**options()), module()
    trainer(second, tmp_path).fit(resumed, loader(), ckpt_path=tmp_path / "FILCallback.ckpt")
    assert_same_run(second.engine, resumed, *plain_loop())
    with pytest.raises(ValueError, match="holds no accounting"):
        trainer(FILCallback(**options()), tmp_path).fit(module(), loader(), ckpt_path=path)


def test_the_table_is_written_and_epsilon_logged(tmp_path: Path) -> None:
    callback = FILCallback(path=tmp_path / "leakage.csv", delta=1e-5, **options())
    own = trainer(callback, tmp_path)
    own.fit(module(), loader())
    names, *rows = (tmp_path / "leakage.csv").read_text().splitlines()
    assert "individual_epsilon" in names
    assert len(rows) == 40
    assert (tmp_path / "leakage.csv").stat().st_mode & 0o077 == 0
    assert own.callback_metrics["epsilon"] == pytest.approx(callback.engine.get_epsilon(1e-5))


def test_the_leakage_is_logged_to_the_loggers_of_the_trainer(tmp_path: Path) -> None:
    from lightning.pytorch.loggers import CSVLogger

    def fitted(epochs: int, **more: Any) -> Any:
        callback = FILCallback(logger=LeakageLogger(delta=1e-4, every=5), **options())
        own = trainer(
            callback,
            tmp_path,
            max_epochs=epochs,
            logger=CSVLogger(tmp_path / "csv", version=epochs),
        )
        own.fit(module(), loader(), **more)
        return own, callback

    first, callback = fitted(1)
    table = next((tmp_path / "csv").rglob("version_1/metrics.csv")).read_text()
    assert "privacy/epsilon" in table.splitlines()[0]

    # a resumed fit remembers what was published
    first.save_checkpoint(path := tmp_path / "fit.ckpt")
    ((codes, sets),) = callback.logger.state_dict()["published"]
    with mock.patch.object(LeakageLogger, "load_state_dict") as remembered:
        fitted(2, ckpt_path=path, weights_only=False)
    (((again, same),),) = (state["published"] for (state,), _ in remembered.call_args_list)
    assert torch.equal(again, codes)
    assert same == sets


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_bf16_is_the_same_run_but_for_rounding(precision: str, tmp_path: Path) -> None:
    rounded, exact = (
        e.get_fil().value for e in (fit(tmp_path, precision=precision)[0].engine, plain_loop()[0])
    )
    assert not torch.equal(exact, rounded)
    torch.testing.assert_close(rounded, exact, rtol=0.05, atol=1e-3, equal_nan=True)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a hook of DDP": (
        {"strategy": pl.strategies.DDPStrategy(ddp_comm_hook=print), "devices": 1},
        "ddp_comm_hook",
    ),
    "clipping": ({"gradient_clip_val": 1.0}, "gradient_clip_val"),
    "reloading": ({"reload_dataloaders_every_n_epochs": 1}, "reload_dataloaders_every_n_epochs"),
    "float16": ({"precision": "16-true"}, "16-true"),
    "two loaders": ({"data": [loader(), loader()]}, "2 training loaders"),
    "no forward": ({"kind": CallsASubmodule, "data": loader(ByName)}, r"def forward\(self, x\)"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_accounted_for_is_refused(name: str, tmp_path: Path) -> None:
    (given, noun), fitted = REFUSED[name], module(REFUSED[name][0].get("kind", Classifier))
    settings = {key: value for key, value in given.items() if key not in ("kind", "data")}
    before = copy.deepcopy(fitted.state_dict())
    try:
        # DDP leaves a port and a rank there
        with mock.patch.dict(os.environ), pytest.raises(ValueError, match=noun):
            trainer(FILCallback(**options()), tmp_path, **settings).fit(
                fitted, given.get("data") or loader()
            )
        if name != "float16":  # to which Lightning itself turns the weights
            assert all(
                torch.equal(before[key], value) for key, value in fitted.state_dict().items()
            )
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def test_fabric_takes_a_plain_loader() -> None:
    """Its model and optimizer do; a loader that it has set up is refused with this remedy."""
    fabric = pytest.importorskip("lightning.fabric").Fabric(accelerator="cpu", devices=1)
    network, engine = nn.Linear(3, 2), FILPrivacyEngine()
    model, optimizer = fabric.setup(network, torch.optim.SGD(network.parameters(), lr=LR))
    plain = DataLoader(TensorDataset(torch.randn(12, 3), torch.arange(12) % 2), batch_size=4)
    with pytest.raises(
        TypeError,
        match=r"Got _FabricDataLoader. Pass the plain DataLoader",
    ):
        engine.make_private(model, optimizer, fabric.setup_dataloaders(plain), noise_multiplier=1.0)
    model, optimizer, loader = engine.make_private(model, optimizer, plain, noise_multiplier=1.0)
    for batch in loader:
        step(model, optimizer, batch)
    assert engine.get_fil().value.nan_to_num().max() > 0
