"""A Hugging Face ``Trainer`` that trains privately and accounts for every example.

A ``TrainerCallback`` cannot replace the trainer's loader, so this is a subclass of ``Trainer``.
Needs ``transformers`` and ``accelerate``: ``pip install 'torchfil[huggingface]'``.
"""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler

from torchfil.engine import FILPrivacyEngine
from torchfil.engine.distributed.checkpoints import read_file, write_file
from torchfil.engine.distributed.ranks import shared_by
from torchfil.engine.loader import worker_options
from torchfil.engine.watching import show_every
from torchfil.fisher.models import check_unweighted_mean, with_attributes
from torchfil.integrations.logger import LeakageLogger
from torchfil.integrations.table import write_table
from torchfil.private import decoder_tokens
from torchfil.utils.errors import installed_by
from torchfil.utils.given import Batch, Targets

with installed_by("huggingface", "FILTrainer needs transformers"):
    from transformers import (
        Trainer,
        TrainerCallback,
        TrainerControl,
        TrainerState,
        TrainingArguments,
    )

__all__ = ["STATE_FILE", "FILTrainer"]

STATE_FILE = "torchfil_state.pt"  # in each of the trainer's checkpoints


class FILTrainer(Trainer):
    """A ``Trainer`` whose ``train()`` is a private, accounted run.

    In use::

        trainer = FILTrainer(
            model=model,
            args=TrainingArguments("out", max_grad_norm=1.0),
            train_dataset=data,
            privacy={
                "noise_multiplier": 1.0,
                "private": Private(submodule="bert.embeddings.word_embeddings"),
            },
            leakage_path="leakage.csv",
        )
        trainer.train()
        trainer.engine.leakage()

    Every batch is one :meth:`FILPrivacyEngine.train_step`. ``max_grad_norm`` of
    ``TrainingArguments`` is C, the clipping threshold of every example. Poisson sampling draws each
    step's batch, with a mean size of ``per_device_train_batch_size`` ·
    ``gradient_accumulation_steps``; it is processed in pieces that fit into
    ``Execution(max_memory=…)``, so accumulation costs no memory.

    On several devices (``torchrun`` or ``accelerate launch``) this is the mean size per device, as
    in ``Trainer``. Rank 0 writes the table and checkpoints. Before reading on one rank, call
    ``trainer.engine.gather()`` on all.

    The loss is the model's own, on each example alone: a mean over tokens is over the example's own
    tokens.

    The loss that the trainer logs is the loss of the plain batch: it is not private. The
    ``grad_norm`` that it logs is the norm of the released, noisy gradient.

    Guarantees:
        * Steps, noise, ε and ledger are those of the plain loop with :class:`FILPrivacyEngine`, on
          several devices with ``DifferentiallyPrivateDistributedDataParallel``. Gradients are
          summed once, clipped and noisy.
        * Batches of an evaluation are not accounted for.
        * Checkpoints hold the accounting (:data:`STATE_FILE`, as confidential as the table). A
          resumed run continues weights, ε and ledger, with new noise and new batches; if noise and
          draws are seeded, in one process, it equals an uninterrupted run. A checkpoint without the
          accounting is refused.
        * fp16, several GPUs in one process, sharded models (FSDP, DeepSpeed), compiled models,
          ``compute_loss_func``, and a ``compute_loss`` of a subclass or of another trainer beside
          it raise at construction. A ``training_step`` of a subclass that does not call this one
          raises at its first step.
        * After ``train()`` the model is a plain module again.

    Args:
        *args: As in ``Trainer``.
        privacy: Options of :meth:`FILPrivacyEngine.make_private`; with ``target_epsilon``,
            ``target_delta`` and ``epochs`` of :meth:`FILPrivacyEngine.make_private_with_epsilon`.
        criterion: Another loss, a function of (logits, labels); it must weight all examples
            equally, which is checked. None: the model's own loss, which it computes from labels.
        engine: The engine, which accounts for one call of ``train()``; None: a new one.
        leakage_path: The CSV file to which the table is written; None: no file.
        delta: δ, for the table's ``individual_epsilon`` and for ε in the progress bar, beside the
            smallest MSE bound.
        logger: Logs the leakage by :meth:`log`, where ``report_to`` says; see
            :class:`torchfil.LeakageLogger`.
        **options: As in ``Trainer``.
    """

    def __init__(
        self,
        *args: Any,
        privacy: Mapping[str, Any] | None = None,
        criterion: Callable[[Tensor, Tensor], Tensor] | None = None,
        engine: FILPrivacyEngine | None = None,
        leakage_path: str | os.PathLike[str] | None = None,
        delta: float | None = None,
        logger: LeakageLogger | None = None,
        **options: Any,
    ) -> None:
        _check_class(type(self))
        super().__init__(*args, **options)
        self.privacy = dict(privacy or {})
        _check_trainer(self)
        self.engine = engine if engine is not None else FILPrivacyEngine()
        self.leakage_path, self.delta, self.logger = leakage_path, delta, logger
        self.criterion = None if criterion is None else _of_logits(criterion)
        self._label_names = list(self.label_names or ["labels"])
        self._weights_before: dict[str, Any] = {}
        self._pass = _PassOverData()
        self._pass.logger = logger
        self.callback_handler.callbacks.insert(0, self._pass)  # before those that end a log

    # ------------------------------------------------------------------ a run

    def train(self, resume_from_checkpoint: str | bool | None = None, **options: object) -> Any:
        """As in ``Trainer``; writes the table at the end."""
        with _one_batch_a_step(self):
            result = super().train(resume_from_checkpoint=resume_from_checkpoint, **options)
        self.engine.detach()
        if self.leakage_path is not None:
            write_table(
                self.engine, self.leakage_path, self.delta, here=self.is_world_process_zero()
            )
        return result

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Make model, optimizer and loader private; called once, when training starts."""
        # The same loader, with batches as plain dicts and with its own generator, whose state a
        # checkpoint holds.
        plain = super().get_train_dataloader()
        seed = self.args.data_seed if self.args.data_seed is not None else self.args.seed
        workers = {**worker_options(plain), "generator": torch.Generator().manual_seed(seed)}
        batches = (
            plain.batch_sampler
            if self.args.world_size == 1
            else self._batches_of_ranks(plain.dataset, seed)
        )
        collate = partial(_as_dict, plain.collate_fn)
        loader: DataLoader[Any] = DataLoader(
            plain.dataset, batch_sampler=batches, collate_fn=collate, **workers
        )

        owner_of, rows = self.privacy.get("owner_of"), self.train_dataset
        # a column that the trainer takes out
        if isinstance(owner_of, str) and hasattr(rows, "__len__"):
            found = (
                rows[owner_of] if hasattr(rows, "column_names") else (row[owner_of] for row in rows)
            )
            self.privacy["owner_of"] = list(found)

        self.model.train()
        prepare = (
            "make_private_with_epsilon" if "target_epsilon" in self.privacy else "make_private"
        )
        parts = shared_by(self.args.world_size, self.model), self.create_optimizer(), loader
        given: dict[str, Any] = {"max_grad_norm": self.args.max_grad_norm}
        if self.criterion is not None:
            given |= {"criterion": self.criterion, "batch_to_inputs": self._split}
        _, optimizer, private_loader = getattr(self.engine, prepare)(
            *parts, **given, **self.privacy
        )
        self.optimizer = _StepTaken(optimizer)
        self._pass.loader = private_loader
        if self.logger is not None:
            self.logger.attach(self.engine, self._log_at)
        show_every(self.engine, self._show, self.delta)
        return private_loader

    def _log_at(self, numbers: dict[str, float], step: int) -> None:
        """Log where the trainer reports, at a step that it counts later."""
        before, self.state.global_step = self.state.global_step, step
        try:
            self.log(numbers)
        finally:
            self.state.global_step = before

    def _show(self, numbers: dict[str, str]) -> None:
        """Show ε and the smallest bound in the progress bar alone: what is logged goes to
        ``report_to``.
        """
        for callback in self.callback_handler.callbacks:
            if getattr(callback, "training_bar", None) is not None:
                callback.training_bar.set_postfix(numbers)

    def _batches_of_ranks(self, dataset: Any, seed: int) -> BatchSampler:
        """The batches of this rank.

        With Poisson sampling, only their size matters: that of all ranks together.
        """
        size, drop_last = self._train_batch_size, self.args.dataloader_drop_last
        if self.privacy.get("poisson_sampling", True):
            return BatchSampler(RandomSampler(dataset), self.args.world_size * size, drop_last)
        return BatchSampler(DistributedSampler(dataset, seed=seed, drop_last=True), size, drop_last)

    def _prepare_for_training(self, *args: object, **options: object) -> tuple[Any, Any]:
        """As in ``Trainer``, without the wrappers of torch and accelerate: no step goes through the
        former.

        The latter's outputs would be copies from which no loss is made; every step has its own
        autocast.
        """
        model, loader = super()._prepare_for_training(*args, **options)
        self.model_wrapped = self.accelerator.unwrap_model(model, keep_fp32_wrapper=False)
        return self.model_wrapped, loader

    def training_step(
        self, model: nn.Module, inputs: Batch, num_items_in_batch: object = None
    ) -> Tensor:
        """A whole private step; the trainer's own ``optimizer.step()`` does nothing after it.

        Poisson sampling can draw an empty batch: such a step releases only noise, and its loss is
        0.
        """
        model.train()
        self._pass.stepped = True
        with self.accelerator.autocast():
            return self.engine.train_step(self._prepare_inputs(inputs)).detach().nan_to_num()

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Mapping[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: object = None,
    ) -> Any:
        """The loss of an evaluation batch."""
        if self.criterion is None:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        batch, labels = self._split(inputs)
        outputs = model(**batch)
        loss = self.criterion(outputs, labels)
        return (loss, outputs) if return_outputs else loss

    def _split(self, batch: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
        """The model's inputs, and the labels: one tensor, or several by name."""
        names = [name for name in self._label_names if name in batch]
        if not names:
            raise ValueError(
                f"the batch has {sorted(batch)}, but no {' or '.join(self._label_names)}: name "
                "them so in every example, or pass TrainingArguments(label_names=[…])"
            )
        inputs = {name: value for name, value in batch.items() if name not in names}
        labels = {name: batch[name] for name in names}
        if len(names) == 1:
            labels = labels[names[0]]
            tokens = (
                decoder_tokens(self.model, labels) if "decoder_input_ids" not in inputs else None
            )
            if tokens is not None:  # made from labels, hidden from the model
                inputs["decoder_input_ids"] = tokens
        return inputs, labels

    # ------------------------------------------------------------------ checkpoints

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        state: dict[str, Any] = {
            "engine": self.engine.state_dict(),
            "pass_start": self._pass.start,
        }  # collective: on all ranks
        state["logger"] = self.logger and self.logger.state_dict()
        if self.args.should_save:
            write_file(Path(output_dir) / STATE_FILE, state)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            state = read_file(Path(checkpoint) / STATE_FILE)
            try:
                self.engine.load_state_dict(state["engine"])
            except Exception:
                self.model.load_state_dict(self._weights_before)
                raise
            self._pass.resumed, self._weights_before = state["pass_start"], {}
            if self.logger is not None:
                self.logger.load_state_dict(state["logger"])
        super()._load_optimizer_and_scheduler(checkpoint)

    def _load_from_checkpoint(
        self, resume_from_checkpoint: str, model: nn.Module | None = None
    ) -> None:
        if not (Path(resume_from_checkpoint) / STATE_FILE).exists():
            raise ValueError(
                f"{resume_from_checkpoint} has no {STATE_FILE}, so what its steps leaked would be "
                "missing. Resume from a checkpoint of FILTrainer (without save_only_model=True)."
            )
        # kept if the accounting is refused
        self._weights_before = copy.deepcopy(self.model.state_dict())
        super()._load_from_checkpoint(resume_from_checkpoint, model)


class _PassOverData(TrainerCallback):
    """Keeps the generator's state from the start of the current pass over the data, so a resumed
    pass can repeat it.

    Attributes:
        loader: The private loader.
        start: The state of its generator at the start of the current pass.
        resumed: The same for a checkpoint's pass, until it starts again.
        stepped: Whether a private step was taken since the trainer's last one.
        logger: What logs the run.
    """

    logger: LeakageLogger | None = None
    loader: Any = None
    start: Tensor | None = None
    resumed: Tensor | None = None
    stepped = False

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        """Raise if an overridden ``training_step`` has taken no private step.

        Nothing was trained by then.
        """
        if not self.stepped:
            raise ValueError(
                "training_step was overridden and took no private step: let it call "
                "super().training_step(model, inputs), without a backward()"
            )
        self.stepped = False

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        """Record the generator's state, or restore it if a pass was interrupted."""
        sampler = getattr(self.loader.batch_sampler, "sampler", None)
        if isinstance(sampler, DistributedSampler):
            sampler.set_epoch(int(state.epoch or 0))
        if (
            self.resumed is not None
            and state.global_step % len(self.loader) > 0
            and not args.ignore_data_skip
        ):
            self.loader.generator.set_state(self.resumed)
        self.resumed, self.start = None, self.loader.generator.get_state()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        """Log the last point while dashboards are open."""
        if self.logger is not None:
            self.logger.close()


class _StepTaken(optim.Optimizer):
    """The private optimizer as schedulers and checkpoints see it.

    The engine has already taken the step.
    """

    def __init__(self, optimizer: optim.Optimizer) -> None:
        self.optimizer = optimizer

    def __getattr__(self, name: str) -> object:  # param_groups, state, defaults
        return getattr(vars(self)["optimizer"], name)

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        """Do nothing."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing."""

    def state_dict(self) -> dict[str, object]:
        """The private optimizer's."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, object]) -> None:
        """Load the private optimizer's state."""
        self.optimizer.load_state_dict(state_dict)


def _of_logits(criterion: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    """The user's loss as a function of outputs and labels."""
    check_unweighted_mean(criterion)

    def loss(outputs: Mapping[str, Tensor], labels: Targets) -> Tensor:
        return criterion(outputs["logits"], labels)

    return loss


def _as_dict(collate_fn: Callable[[list[Any]], Any], samples: list[Any]) -> dict[str, Any]:
    """A batch as a plain dict, which can carry example ids out of a worker."""
    return dict(collate_fn(samples))


@contextlib.contextmanager
def _one_batch_a_step(trainer: Trainer) -> Iterator[None]:
    """Inside, each step has one batch, whose mean size is that of all accumulated batches.

    Poisson batches cannot be accumulated: several draws with one noise would be another mechanism.
    """
    size = trainer.args.gradient_accumulation_steps * trainer._train_batch_size
    with (
        with_attributes(trainer.args, gradient_accumulation_steps=1),
        with_attributes(trainer, _train_batch_size=size),
    ):
        yield


def _check_class(kind: type[FILTrainer]) -> None:
    """Raise for methods of other trainers that would never be called; ``training_step`` may extend
    FILTrainer's.
    """
    others = [each for each in kind.__mro__ if each not in FILTrainer.__mro__]
    behind = [each for each in others if not issubclass(each, FILTrainer)]
    dropped = [f"{each.__name__}.compute_loss" for each in others if "compute_loss" in vars(each)]
    dropped += [
        f"{each.__name__}.training_step" for each in behind if "training_step" in vars(each)
    ]
    if dropped:
        raise ValueError(
            f"{' and '.join(dropped)} would never be called, because the engine computes the loss "
            "and takes the step. Pass another loss of (logits, labels) as criterion=. What "
            "another trainer prepares (TRL's SFTTrainer), take from it: "
            "FILTrainer(model=other.model, args=other.args, train_dataset=other.train_dataset, "
            "data_collator=other.data_collator, …)."
        )


def _check_trainer(trainer: FILTrainer) -> None:
    """Raise an error for runs whose steps the accounting would not describe, and for options that
    are set elsewhere.
    """
    args, accelerator = trainer.args, trainer.accelerator
    elsewhere = sorted({"max_grad_norm", "criterion", "batch_to_inputs"} & trainer.privacy.keys())
    if elsewhere:
        raise TypeError(
            f"privacy has {', '.join(elsewhere)}, but these are set by "
            "TrainingArguments(max_grad_norm=…, label_names=…) and FILTrainer(criterion=…); "
            "leave it out"
        )

    # what would make the released gradient another one
    if accelerator.mixed_precision not in ("no", "bf16"):
        raise ValueError(
            f"mixed precision {accelerator.mixed_precision!r} is not accounted for: it skips "
            "steps without noise. Use bf16=True, which needs no scale."
        )
    sharded = trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled
    if args.n_gpu > 1 or sharded or getattr(accelerator, "parallelism_config", None) is not None:
        raise ValueError(
            f"distributed training of this kind ({args.n_gpu} GPUs in one process, or a sharded "
            "model) cannot be accounted for. Use torchrun, or one device "
            "(CUDA_VISIBLE_DEVICES=0)."
        )
    if args.torch_compile or args.auto_find_batch_size:
        raise ValueError(
            "torch_compile=True and auto_find_batch_size=True cannot be accounted for; leave them "
            "out"
        )
    if args.label_smoothing_factor:
        raise ValueError(
            f"label_smoothing_factor={args.label_smoothing_factor} has no effect on the model's "
            "own loss; pass criterion=nn.CrossEntropyLoss(label_smoothing=…)"
        )
    if trainer.compute_loss_func is not None:
        raise ValueError(
            "compute_loss_func is not called in training, which the engine does; pass the loss of "
            "(logits, labels) as criterion="
        )
