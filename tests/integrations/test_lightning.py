"""A fit with FILCallback is the plain loop; what it cannot account for is refused when the fit starts."""

from __future__ import annotations

import copy
import csv
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.integrations.ledgers import assert_same_run
from tests.repeatable import check_no_noise_is_shared, recorded_noise
from torchfil import Accounting, FILPrivacyEngine

pl = pytest.importorskip("lightning.pytorch", reason="lightning is not installed (torchfil[lightning])")
from torchfil.integrations.lightning import FILCallback  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
LR = 0.3


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


def module(kind: type = Classifier) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return kind()


def loader(kind: type = TensorDataset, batch_size: int = 4, **options: Any) -> DataLoader[Any]:
    source = torch.Generator().manual_seed(0)
    data = kind(torch.randn(40, 5, generator=source), torch.randint(3, (40,), generator=source))
    return DataLoader(data, batch_size=batch_size, generator=torch.Generator().manual_seed(2), **options)


def options() -> dict[str, Any]:
    noise = torch.Generator().manual_seed(5)
    return {"noise_multiplier": 0.9, "max_grad_norm": 0.8, "noise_generator": noise, "accounting": Accounting(seed=3)}


def trainer(callback: Any, tmp_path: Path, **more: Any) -> Any:
    quiet: dict[str, Any] = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    more = {"max_epochs": 2, "enable_checkpointing": False, **more}
    return pl.Trainer(accelerator="cpu", callbacks=[callback], default_root_dir=tmp_path, **quiet, **more)


def plain_loop(kind: type = TensorDataset, workers: int = 0, epochs: int = 2) -> tuple[FILPrivacyEngine, nn.Module]:
    network = module().network
    optimizer: Any = torch.optim.SGD(network.parameters(), lr=LR)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    engine = FILPrivacyEngine()
    batches: Any = loader(kind, num_workers=workers)
    torch.empty((), dtype=torch.int64).random_(generator=batches.generator)  # Lightning opens the plain loader once
    model, optimizer, batches = engine.make_private(network, optimizer, batches, **options())
    for _ in range(epochs):
        for batch in batches:
            x, y = batch.values() if isinstance(batch, dict) else batch
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        scheduler.step()
    return engine, network


@pytest.mark.parametrize(
    ("kind", "data", "workers"),
    [
        (Classifier, TensorDataset, 0),
        (Classifier, TensorDataset, 1),
        (Manual, TensorDataset, 0),
        (CallsASubmodule, ByName, 0),
    ],
)
def test_the_ledger_is_that_of_the_plain_loop(kind: type, data: type, workers: int, tmp_path: Path) -> None:
    callback = FILCallback(module="network" if kind is CallsASubmodule else None, **options())
    fitted = module(kind)
    trainer(callback, tmp_path).fit(fitted, loader(data, num_workers=workers), val_dataloaders=None)
    assert_same_run(callback.engine, fitted, *plain_loop(data, workers))


def test_resumed_fits_share_no_noise(tmp_path: Path) -> None:
    def fit(**more: Any) -> tuple[Any, list[torch.Tensor]]:
        with recorded_noise() as drawn:
            callback = FILCallback(**{**options(), "noise_generator": None})
            pl.seed_everything(0)
            fit = trainer(callback, tmp_path, max_epochs=more.pop("epochs"))
            fit.fit(module(), loader(), **more)
        return fit, drawn

    first, before = fit(epochs=1)
    first.save_checkpoint(path := tmp_path / "fit.ckpt")
    resumed = [fit(epochs=2, ckpt_path=path, weights_only=False)[1] for _ in range(2)]
    check_no_noise_is_shared(before, *resumed)


def test_the_table_is_written_and_epsilon_logged(tmp_path: Path) -> None:
    callback = FILCallback(path=tmp_path / "leakage.csv", delta=1e-5, **options())
    fit = trainer(callback, tmp_path)
    fit.fit(module(), loader(), loader(batch_size=10))
    with open(tmp_path / "leakage.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["id"]) for row in rows] == list(range(40))
    assert [float(row["fil"]) for row in rows] == pytest.approx(callback.engine.get_fil().value.tolist())
    assert "individual_epsilon" in rows[0]
    assert (tmp_path / "leakage.csv").stat().st_mode & 0o077 == 0
    assert fit.callback_metrics["epsilon"] == pytest.approx(callback.engine.get_epsilon(1e-5))


def test_noise_from_a_target_epsilon(tmp_path: Path) -> None:
    callback = FILCallback(target_epsilon=5.0, target_delta=1e-3, epochs=2)
    trainer(callback, tmp_path).fit(module(), loader())
    assert 4.5 < callback.engine.get_epsilon(1e-3) <= 5.0


def test_after_the_fit_the_model_is_plain_again(tmp_path: Path) -> None:
    callback = FILCallback(**options())
    fitted = module()
    trainer(callback, tmp_path).fit(fitted, loader())
    assert not any(part._forward_hooks or part._backward_hooks for part in fitted.modules())
    copy.deepcopy(fitted)
    with pytest.raises(ValueError, match="already accounts for a run"):
        trainer(callback, tmp_path).fit(fitted, loader())


def test_a_resumed_fit_goes_on_with_the_ledger(tmp_path: Path) -> None:
    first = FILCallback(**options())
    fit = trainer(first, tmp_path, max_epochs=1)
    fit.fit(module(), loader())
    fit.save_checkpoint(tmp_path / "last.ckpt")
    second, resumed = FILCallback(**options()), module()
    trainer(second, tmp_path).fit(resumed, loader(), ckpt_path=tmp_path / "last.ckpt")
    assert_same_run(second.engine, resumed, *plain_loop())


def test_a_checkpoint_without_accounting_is_refused(tmp_path: Path) -> None:
    fit = trainer(pl.Callback(), tmp_path, max_epochs=1)
    fit.fit(module(), loader())
    fit.save_checkpoint(tmp_path / "last.ckpt")
    with pytest.raises(ValueError, match="holds no accounting"):
        trainer(FILCallback(**options()), tmp_path).fit(module(), loader(), ckpt_path=tmp_path / "last.ckpt")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"strategy": pl.strategies.DDPStrategy(ddp_comm_hook=print), "devices": 1}, "ddp_comm_hook"),
        ({"gradient_clip_val": 1.0}, "gradient_clip_val=1.0"),
        ({"reload_dataloaders_every_n_epochs": 1}, "reload_dataloaders_every_n_epochs=1"),
    ],
)
def test_what_cannot_be_accounted_for_is_refused(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    if "strategy" in settings and torch.distributed.is_available() is False:
        pytest.skip("torch was built without distributed")
    fitted = module()
    before = copy.deepcopy(fitted.state_dict())
    with pytest.raises(ValueError, match=message):
        trainer(FILCallback(**options()), tmp_path, **settings).fit(fitted, loader())
    assert all(torch.equal(before[name], value) for name, value in fitted.state_dict().items())
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def test_accumulation_draws_one_large_batch(tmp_path: Path) -> None:
    """k batches of B in one step are one Poisson batch of mean size kB: σ, q and ledger of a batch size of kB."""
    callback, fitted = FILCallback(**options()), module()
    fit = trainer(callback, tmp_path, accumulate_grad_batches=2)
    fit.fit(fitted, loader(batch_size=2))
    assert fit.global_step == 20
    assert fit.accumulate_grad_batches == 2
    assert_same_run(callback.engine, fitted, *plain_loop())


def test_what_is_set_on_the_module_counts(tmp_path: Path) -> None:
    """An attribute that a schedule changes, and the trainer's own number of passes."""

    class Cooling(Classifier):
        temperature = 1.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.network(x) / self.temperature

        def on_train_epoch_start(self) -> None:
            self.temperature = 1.0 + self.current_epoch

    def by_hand() -> tuple[FILPrivacyEngine, nn.Module]:
        class Cool(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.network, self.temperature = module().network, 1.0

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.network(x) / self.temperature

        network, engine, batches = Cool(), FILPrivacyEngine(), loader()
        optimizer: Any = torch.optim.SGD(network.parameters(), lr=LR)
        torch.empty((), dtype=torch.int64).random_(generator=batches.generator)
        model, optimizer, private = engine.make_private(network, optimizer, batches, **options())
        for epoch in range(2):
            network.temperature = 1.0 + epoch
            for x, y in private:
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
            optimizer.param_groups[0]["lr"] *= 0.5
        return engine, network

    callback, fitted = FILCallback(**options()), module(Cooling)
    trainer(callback, tmp_path).fit(fitted, loader())
    assert_same_run(callback.engine, fitted, *by_hand())


def test_validation_changes_nothing(tmp_path: Path) -> None:
    callback, fitted = FILCallback(**options()), module()
    trainer(callback, tmp_path, val_check_interval=2).fit(fitted, loader(), loader(batch_size=10))
    assert_same_run(callback.engine, fitted, *plain_loop())


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_bf16_is_the_same_run_but_for_rounding(precision: str, tmp_path: Path) -> None:
    callback = FILCallback(**options())
    trainer(callback, tmp_path, precision=precision).fit(module(), loader())
    rounded, exact = callback.engine.get_fil().value, plain_loop()[0].get_fil().value
    assert not torch.equal(exact, rounded)
    torch.testing.assert_close(rounded, exact, rtol=0.05, atol=1e-3)


def test_no_gradients_of_single_examples_are_formed(tmp_path: Path) -> None:
    class Looking(Classifier):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            assert not any(part._forward_hooks or part._backward_hooks for part in self.modules())
            assert all(getattr(p, "grad_sample", None) is None for p in self.parameters())

    trainer(FILCallback(**options()), tmp_path, max_epochs=1).fit(module(Looking), loader())


def test_float16_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="precision='16-true' cannot be accounted for"):
        trainer(FILCallback(**options()), tmp_path, precision="16-true").fit(module(), loader())


def test_scheduled_accumulation_is_refused_too(tmp_path: Path) -> None:
    fit = trainer(FILCallback(**options()), tmp_path)
    fit.callbacks.append(pl.callbacks.GradientAccumulationScheduler({1: 2}))
    with pytest.raises(ValueError, match="accumulate_grad_batches=2"):
        fit.fit(module(), loader())


def test_two_loaders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="2 training loaders"):
        trainer(FILCallback(**options()), tmp_path).fit(module(), [loader(), loader()])


def test_modules_without_forward_are_told_how_to_write_it(tmp_path: Path) -> None:
    fitted = module(CallsASubmodule)
    before = copy.deepcopy(fitted.state_dict())
    with pytest.raises(ValueError, match=r"CallsASubmodule has no forward.*def forward\(self, x\)"):
        trainer(FILCallback(**options()), tmp_path).fit(fitted, loader(ByName))
    assert all(torch.equal(before[name], value) for name, value in fitted.state_dict().items())


class AutoEncoder(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Sequential(nn.Linear(5, 3), nn.Tanh()), nn.Linear(3, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decoder(self.encoder(x))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return nn.functional.mse_loss(self(batch[0]), batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=LR)


def test_an_autoencoder_is_accounted_for_as_in_a_loop(tmp_path: Path) -> None:
    """Lightning's first example; tests/engine/test_same_tensor.py compares the loop with brute force."""
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(0))
    settings: dict[str, Any] = {
        "noise_multiplier": 1.0,
        "max_grad_norm": 1.0,
        "poisson_sampling": False,
        "accounting": Accounting(estimator="exact", amplification="none"),
    }
    callback = FILCallback(**settings)
    trainer(callback, tmp_path, max_epochs=1).fit(module(AutoEncoder), DataLoader(TensorDataset(x), 4))

    own = module(AutoEncoder)
    network = nn.Sequential(own.encoder, own.decoder)
    engine = FILPrivacyEngine()
    optimizer: Any = torch.optim.SGD(network.parameters(), lr=LR)
    model, optimizer, batches = engine.make_private(network, optimizer, DataLoader(TensorDataset(x), 4), **settings)
    for (rows,) in batches:
        nn.functional.mse_loss(model(rows), rows).backward()
        optimizer.step()
    torch.testing.assert_close(callback.engine.get_fil().value, engine.get_fil().value)


@pytest.mark.parametrize("option", [{"wrap_model": True}, {"grad_sample_mode": "hooks"}])
def test_the_mode_cannot_be_chosen(option: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=next(iter(option))):
        FILCallback(**option)


def test_optimizers_of_several_gradients_a_step_are_refused(tmp_path: Path) -> None:
    class Quasi(Classifier):
        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters())

    with pytest.raises(ValueError, match="LBFGS evaluates the loss several times"):
        trainer(FILCallback(**options()), tmp_path).fit(module(Quasi), loader())


def test_the_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    example = Path(__file__).parents[2] / "examples" / "lightning_leakage.py"
    monkeypatch.setattr(sys, "argv", [example.name, "--epochs", "1", "--path", str(tmp_path / "leakage.csv")])
    runpy.run_path(str(example), run_name="__main__")
    assert "ε = " in capsys.readouterr().out
    assert (tmp_path / "leakage.csv").exists()
