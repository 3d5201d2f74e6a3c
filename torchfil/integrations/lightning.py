"""A Lightning callback that makes a fit private and accounts for every example.

Needs ``lightning`` (or ``pytorch-lightning``): ``pip install 'torchfil[lightning]'``.
"""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

from torchfil.engine import FILPrivacyEngine
from torchfil.engine.distributed.ranks import shared_by
from torchfil.engine.loader import worker_options
from torchfil.engine.watching import show_every
from torchfil.fisher.models import with_attributes
from torchfil.integrations.logger import LeakageLogger
from torchfil.integrations.table import write_table
from torchfil.utils.errors import installed_by
from torchfil.utils.given import Batch, Outputs

with installed_by("lightning", "FILCallback needs Lightning"):
    try:
        import lightning.pytorch as pl
    except ImportError:
        import pytorch_lightning as pl

__all__ = ["FILCallback"]

# attributes that belong to Lightning and to the redirection, not to the model
_NOT_THE_MODELS = vars(pl.LightningModule()).keys() - vars(nn.Module()).keys() | {"forward"}


class FILCallback(pl.Callback):
    """Makes model, optimizer and training loader private when a fit starts, and writes the leakage
    when it ends.

    In use::

        callback = FILCallback(noise_multiplier=1.0, max_grad_norm=1.0, path="leakage.csv")
        pl.Trainer(max_epochs=3, callbacks=[callback]).fit(model, loader)
        callback.engine.leakage()

    ``training_step`` stays as it is; it calls the module once per batch, as ``self(x)``. The
    trainer's checkpoints also hold the accounting: ``fit(ckpt_path=…)`` continues it. Keep them as
    confidential as the table. Logged losses and metrics are not private.

    On several devices, use ``Trainer(devices=8, strategy="ddp")``. As in Lightning, a step has
    ``batch_size`` examples per device. Rank 0 writes the table. Before reading on one rank, call
    ``callback.engine.gather()`` on all.

    Guarantees:
        * Steps, noise, ε and ledger are those of the plain loop with :class:`FILPrivacyEngine`, on
          several devices with ``DifferentiallyPrivateDistributedDataParallel``.
        * Gradients are summed once, clipped and noisy: the module is taken out of torch's
          ``DistributedDataParallel``, which would average them earlier.
        * No ``forward``, float16, sharded models (FSDP, DeepSpeed), several optimizers or training
          loaders, gradient clipping by the trainer and reloaded loaders raise when the fit starts.
        * After the fit the model is a plain module again.

    Args:
        engine: The engine, which accounts for one fit; None: a new one.
        module: The name of the only submodule that ``training_step`` calls, as
            ``self.<module>(x)``; None: the LightningModule itself, called as ``self(x)``.
        path: The CSV file to which the table is written; None: no file.
        delta: δ: if given, the table has ``individual_epsilon``, ``epsilon`` is logged after every
            epoch, and the progress bar shows it. The smallest MSE bound, which is confidential, is
            in the bar only.
        logger: Logs the leakage to all loggers of the trainer; see :class:`torchfil.LeakageLogger`.
        **options: Options of :meth:`FILPrivacyEngine.make_private`; with ``target_epsilon``,
            ``target_delta`` and ``epochs`` of :meth:`FILPrivacyEngine.make_private_with_epsilon`.
    """

    def __init__(
        self,
        *,
        engine: FILPrivacyEngine | None = None,
        module: str | None = None,
        path: str | os.PathLike[str] | None = None,
        delta: float | None = None,
        logger: LeakageLogger | None = None,
        **options: Any,
    ) -> None:
        for name in {"wrap_model", "grad_sample_mode"} & options.keys():
            raise TypeError(
                f"{name} is chosen by FILCallback: Lightning needs its own module, unwrapped; "
                "leave it out"
            )
        self.engine = engine if engine is not None else FILPrivacyEngine()
        self.module, self.path, self.delta, self.logger, self.options = (
            module,
            path,
            delta,
            logger,
            options,
        )
        self._module: nn.Module | None = None  # whose calls go through the engine
        self._accumulated = 1
        self._restored: Mapping[str, Any] | None = None

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Replace the fit's optimizer and loader with private ones, and hook the model."""
        _check_trainer(trainer)
        if trainer.ckpt_path is not None and not self._restored:
            raise ValueError(
                f"the checkpoint {trainer.ckpt_path} holds no accounting, so what its steps "
                "leaked would be missing. Resume from a fit with FILCallback, or load only "
                "public weights."
            )

        # Poisson sampling itself draws for all ranks; for other samplers, Lightning gives each rank
        # its part.
        poisson = self.options.get("poisson_sampling", True)
        with _samplers_kept(trainer) if poisson else contextlib.nullcontext():
            trainer.fit_loop.setup_data()
        loader = self._loader_of_steps(trainer, _only_loader(trainer), poisson_sampling=poisson)
        (optimizer,) = trainer.strategy.optimizers
        module = _module_to_call(pl_module, self.module)
        # another object with the very same children, parameters and buffers
        twin = copy.copy(module)
        # the engine must not copy the trainer
        vars(twin).update(dict.fromkeys(_NOT_THE_MODELS & vars(twin).keys()))

        # Torch's wrapper has given all ranks the same weights; it is not needed any more.
        trainer.strategy.model = pl_module
        model = shared_by(trainer.world_size, twin)
        prepare = (
            "make_private_with_epsilon" if "target_epsilon" in self.options else "make_private"
        )
        private, optimizer, loader = getattr(self.engine, prepare)(
            model, optimizer, loader, **self.options
        )
        self._module = module
        _redirect(module, twin, private)
        if self._restored:
            self.engine.load_state_dict(self._restored["engine"])
        if self.logger is not None:
            self.logger.load_state_dict((self._restored or {}).get("logger"))
            self.logger.attach(self.engine, *trainer.loggers)

        # The loop has already built its iterator on the plain loader; it starts again on the
        # private one.
        trainer.strategy.optimizers = [optimizer]
        fit = trainer.fit_loop
        fit._data_source = type(fit._data_source)(loader, "train_dataloader")
        fit._combined_loader = None
        with _samplers_kept(trainer):
            fit.setup_data()
        self._show_in(trainer.progress_bar_callback)

    def _show_in(self, bar: Any) -> None:
        """Show ε and the smallest bound in the progress bar alone: what is logged may go to
        dashboards of others.
        """
        if bar is not None:
            shown, plain = dict[str, str](), bar.get_metrics
            show_every(self.engine, shown.update, self.delta)
            bar.get_metrics = lambda *args: {**plain(*args), **shown}

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Batch, batch_idx: int
    ) -> None:
        """Refuse gradient accumulation that another callback has switched on."""
        if trainer.accumulate_grad_batches != 1:
            raise ValueError(
                f"accumulate_grad_batches={trainer.accumulate_grad_batches} was set during the "
                "fit, at whose start Poisson sampling fixes the batch size: pass it to Trainer"
            )

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Log ε."""
        if self.delta is not None:
            epsilon = float(self.engine.get_epsilon(self.delta))  # the same on all ranks
            pl_module.log("epsilon", epsilon, sync_dist=trainer.world_size > 1)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write the table, on one rank, and log the last point."""
        if self.logger is not None:
            self.logger.close()
        if self.path is not None:
            write_table(self.engine, self.path, self.delta, here=trainer.is_global_zero)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Remove the hooks from the model."""
        if stage == "fit" and self._module is not None:
            self.engine.detach()
            vars(self._module).pop("forward", None)
            getattr(trainer.progress_bar_callback, "__dict__", {}).pop("get_metrics", None)
            trainer.accumulate_grad_batches = self._accumulated

    def state_dict(self) -> dict[str, Any]:
        """The accounting, for the trainer's checkpoints."""
        if self._module is None:
            return {}
        return {
            "engine": self.engine.state_dict(),
            "logger": self.logger and self.logger.state_dict(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep a checkpoint's accounting until the fit starts."""
        self._restored = state_dict

    def _loader_of_steps(
        self, trainer: pl.Trainer, loader: DataLoader[Any], *, poisson_sampling: bool
    ) -> DataLoader[Any]:
        """A loader whose batch is the whole batch of a step, over accumulation and devices.

        Poisson batches cannot be accumulated: several draws with one noise would be another
        mechanism.
        """
        self._accumulated = trainer.accumulate_grad_batches
        draws_for_all = poisson_sampling and not isinstance(loader.sampler, DistributedSampler)
        size = self._accumulated * (trainer.world_size if draws_for_all else 1)
        if size == 1:
            return loader
        if loader.batch_size is None:
            raise ValueError(
                f"accumulate_grad_batches={self._accumulated} on {trainer.world_size} devices "
                "with a batch_sampler: pass batch_size= instead, which determines the size of a "
                "step"
            )

        # one batch of the loader is then the batch of one step, and the trainer does not accumulate
        trainer.accumulate_grad_batches = 1
        kept: Any = {
            "sampler": loader.sampler,
            "collate_fn": loader.collate_fn,
            "drop_last": loader.drop_last,
        }
        return DataLoader(
            loader.dataset, batch_size=size * loader.batch_size, **kept, **worker_options(loader)
        )


def _redirect(module: nn.Module, twin: nn.Module, private: nn.Module) -> None:
    """Send a module's calls in training through the engine, although Lightning holds and calls the
    module itself.

    Args:
        module: The module, whose ``forward`` is replaced on the instance.
        twin: Another object with the same parts and the plain ``forward``.
        private: What the engine made of the twin.
    """
    plain = module.forward
    # left out until now; the twin may need the trainer
    for name in _NOT_THE_MODELS & vars(module).keys():
        if not isinstance(vars(module)[name], int | float | str | dict | list | None):
            vars(twin)[name] = vars(module)[name]

    def forward(*args: Any, **kwargs: Any) -> Outputs:
        if not (module.training and torch.is_grad_enabled()):
            return plain(*args, **kwargs)

        # the module's current mode and plain attributes
        vars(twin).update(
            {name: value for name, value in vars(module).items() if name not in _NOT_THE_MODELS}
        )
        return private(*args, **kwargs)

    module.forward = forward


def _module_to_call(pl_module: pl.LightningModule, name: str | None) -> nn.Module:
    """The module that ``training_step`` calls.

    Raise an error that shows how to write ``forward`` if there is none.
    """
    if name is not None:
        return pl_module.get_submodule(name)
    if type(pl_module).forward is pl.LightningModule.forward:
        raise ValueError(
            f"{type(pl_module).__name__} has no forward(), so the model that its training_step "
            "trains is unknown. Move what computes the outputs into def forward(self, x), and "
            "call self(x) once in training_step; if that calls only one submodule: "
            "FILCallback(module='encoder')."
        )
    return pl_module


def _samplers_kept(trainer: pl.Trainer) -> contextlib.AbstractContextManager[None]:
    """Inside, no loader's sampler is replaced by one for a part of the data."""
    return with_attributes(trainer._accelerator_connector, use_distributed_sampler=False)


def _only_loader(trainer: pl.Trainer) -> DataLoader[Any]:
    combined = trainer.fit_loop._combined_loader
    loaders = combined.flattened if combined is not None else []
    if len(loaders) != 1 or not isinstance(loaders[0], DataLoader):
        raise ValueError(
            f"the fit has {len(loaders)} training loaders "
            f"({', '.join(type(part).__name__ for part in loaders)}); one torch DataLoader with "
            "numbered examples is needed"
        )
    if type(loaders[0].sampler).__name__ == "DistributedSamplerWrapper":
        raise ValueError(
            "Lightning uses what each rank's own sampler draws, so two ranks can draw the same "
            "example for one step. Use a DistributedSampler(dataset, drop_last=True), or Poisson "
            "sampling."
        )
    return loaders[0]


def _check_trainer(trainer: pl.Trainer) -> None:
    """Raise an error for fits whose steps the accounting would not describe."""
    strategy = trainer.strategy
    kinds = [base.__name__ for base in type(strategy).__mro__]
    is_parallel = "DDPStrategy" in kinds and isinstance(
        strategy.model, nn.parallel.DistributedDataParallel
    )
    if not is_parallel and "SingleDeviceStrategy" not in kinds:
        raise ValueError(
            f"distributed training by {kinds[0]} ({trainer.world_size} processes) cannot be "
            "accounted for: it needs the whole model. Pass Trainer(strategy='ddp'), or devices=1."
        )
    if trainer.precision not in ("32-true", "64-true", "bf16-mixed", "bf16-true"):
        raise ValueError(
            f"precision={trainer.precision!r} cannot be accounted for: it skips steps without "
            "noise. Pass Trainer(precision='bf16-mixed'), or '32-true'."
        )

    # the trainer must not change gradients, weights, loaders or optimizers without the engine
    hooks = {
        name: getattr(strategy, f"_{name}", None) for name in ("ddp_comm_hook", "model_averager")
    }
    names = ("gradient_clip_val", "reload_dataloaders_every_n_epochs")
    for name, value in {**{name: getattr(trainer, name) for name in names}, **hooks}.items():
        if value:
            raise ValueError(
                f"{name}={value!r} would change gradients, weights or the loader behind the "
                "engine's back; leave it out (max_grad_norm clips every example)"
            )
    if len(strategy.optimizers) != 1:
        raise ValueError(
            f"configure_optimizers returns {len(strategy.optimizers)} optimizers; return one"
        )
