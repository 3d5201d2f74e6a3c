"""A Hugging Face ``Trainer`` that trains privately and accounts for every example.

A ``TrainerCallback`` cannot replace the trainer's loader, so this is a subclass of ``Trainer``.
Needs ``transformers`` and ``accelerate``: ``pip install 'torchfil[huggingface]'``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

from torchfil.engine import FILPrivacyEngine
from torchfil.integrations.table import write_table

try:
    from transformers import Trainer
except ImportError as error:
    raise ImportError("FILTrainer needs transformers; install it: pip install 'torchfil[huggingface]'") from error

__all__ = ["FILTrainer"]


class FILTrainer(Trainer):
    """A ``Trainer`` whose ``train()`` is a private run under account.

    In use::

        trainer = FILTrainer(
            model=model, args=TrainingArguments("out", max_grad_norm=1.0), train_dataset=data,
            privacy={"noise_multiplier": 1.0, "private": Private(submodule="bert.embeddings.word_embeddings")},
            leakage_path="leakage.csv",
        )
        trainer.train()
        trainer.engine.leakage()

    The loss is ``criterion(logits, labels)``, computed outside the model, as a mean over examples. What
    ``TrainingArguments`` calls ``max_grad_norm`` is C, the clipping threshold of every example. Batches are drawn by
    Poisson sampling with a mean size of ``per_device_train_batch_size``.

    The loss and the ``grad_norm`` that the trainer logs are those of the plain batch: they are not private.

    Guarantees:
        * Steps, noise, ε and ledger are those of the plain loop with :class:`FILPrivacyEngine`.
        * Gradient accumulation, mixed precision, several devices, compiled or checkpointed models, label smoothing and
          ``compute_loss_func`` raise at construction; resuming from a checkpoint, which does not hold the accounting,
          raises.
        * After ``train()`` the model is a plain module again.

    Args:
        *args: As in ``Trainer``.
        privacy: Options of :meth:`FILPrivacyEngine.make_private`; with ``target_epsilon``, ``target_delta`` and
            ``epochs`` of :meth:`FILPrivacyEngine.make_private_with_epsilon`.
        criterion: The loss of (logits, labels); it must weigh every example alike, which is checked at each step.
        engine: None: a new one. It accounts for one call of ``train()``.
        leakage_path: Where the table is written, as CSV; None: nowhere.
        delta: δ, for the table's ``individual_epsilon``.
        **options: As in ``Trainer``.
    """

    def __init__(
        self,
        *args: Any,
        privacy: Mapping[str, Any] | None = None,
        criterion: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy,
        engine: FILPrivacyEngine | None = None,
        leakage_path: str | os.PathLike[str] | None = None,
        delta: float | None = None,
        **options: Any,
    ) -> None:
        super().__init__(*args, **options)
        self.privacy = dict(privacy or {})
        elsewhere = {
            "max_grad_norm": "TrainingArguments(max_grad_norm=…)",
            "criterion": "FILTrainer(criterion=…)",
            "wrap_model": "nothing: the model is not wrapped",
        }
        for name in elsewhere.keys() & self.privacy.keys():
            raise TypeError(f"privacy has {name!r}, which is set by {elsewhere[name]}; leave it out")
        _check_trainer(self)
        self.criterion = criterion
        self.engine = engine if engine is not None else FILPrivacyEngine()
        self.leakage_path = leakage_path
        self.delta = delta

    def train(self, resume_from_checkpoint: str | bool | None = None, **options: Any) -> Any:
        """As in ``Trainer``; writes the table at the end."""
        if resume_from_checkpoint:
            raise ValueError(
                f"resume_from_checkpoint={resume_from_checkpoint!r}: the trainer's checkpoints do not hold the "
                "accounting, so what the earlier steps leaked would be missing from the table; train in one go"
            )
        result = super().train(**options)
        self.engine.detach()
        if self.leakage_path is not None:
            write_table(self.engine, self.leakage_path, self.delta)
        return result

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Make model, optimizer and loader private; called once, when training starts."""
        # the same loader, but for batches as plain dicts
        plain = super().get_train_dataloader()
        loader: DataLoader[Any] = DataLoader(
            plain.dataset,
            batch_sampler=plain.batch_sampler,
            collate_fn=_AsDict(plain.collate_fn),
            num_workers=plain.num_workers,
            pin_memory=plain.pin_memory,
            worker_init_fn=plain.worker_init_fn,
            multiprocessing_context=plain.multiprocessing_context,
            prefetch_factor=plain.prefetch_factor,
            persistent_workers=plain.persistent_workers,
        )

        self.model.train()
        prepare = "make_private_with_epsilon" if "target_epsilon" in self.privacy else "make_private"
        _, self.optimizer, private_loader = getattr(self.engine, prepare)(
            self.model,
            self.create_optimizer(),
            loader,
            max_grad_norm=self.args.max_grad_norm,
            criterion=self._loss_of,
            wrap_model=False,
            **self.privacy,
        )

        # Opacus learns from the first batch what an empty one looks like
        private_loader.plain_collate_fn([private_loader.plain_dataset[0]])
        return private_loader

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """As in ``Trainer``, with the per-example gradients of the last step cleared.

        Poisson sampling can draw nobody, which many models cannot compute with: such a step releases noise alone.
        """
        self.optimizer.zero_grad()
        if len(inputs["labels"]) > 0:
            return super().training_step(model, inputs, num_items_in_batch)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.grad_sample = parameter.new_zeros(0, *parameter.shape)
        return torch.zeros((), device=self.args.device)

    def compute_loss(
        self, model: Any, inputs: Mapping[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """``criterion(logits, labels)``, with the labels kept from the model."""
        outputs = model(**{name: value for name, value in inputs.items() if name != "labels"})
        loss = self._loss_of(outputs, inputs["labels"])
        return (loss, outputs) if return_outputs else loss

    def _loss_of(self, outputs: Any, labels: Tensor) -> Tensor:
        return self.criterion(outputs["logits"], labels)


class _AsDict:
    """Collates as before, into a plain dict, which can carry example ids out of a worker."""

    def __init__(self, collate_fn: Callable[[list[Any]], Any]) -> None:
        self.collate_fn = collate_fn

    def __call__(self, samples: list[Any]) -> dict[str, Any]:
        return dict(self.collate_fn(samples))


def _check_trainer(trainer: Any) -> None:
    """Raise for runs whose steps the accounting would not describe."""
    args = trainer.args
    if args.gradient_accumulation_steps != 1:
        raise ValueError(
            f"gradient_accumulation_steps={args.gradient_accumulation_steps} cannot be accounted for: with Poisson "
            "sampling every batch is a step of its own. Raise per_device_train_batch_size instead; the accounting cuts "
            "a batch into pieces that fit max_memory."
        )
    if trainer.accelerator.mixed_precision != "no":
        raise ValueError(
            f"mixed precision ({trainer.accelerator.mixed_precision}) cannot be accounted for: the gradients that are "
            "released would be rounded or scaled, those that are differentiated not. Leave fp16 and bf16 out."
        )
    if args.world_size > 1 or args.n_gpu > 1 or trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
        raise ValueError(
            f"distributed training ({args.world_size} processes, {args.n_gpu} GPUs in this one) is not supported by "
            "FILPrivacyEngine yet; train on one device (CUDA_VISIBLE_DEVICES=0)"
        )

    reasons = {
        "torch_compile": "the accounting differentiates the model as it is written",
        "gradient_checkpointing": "every layer would be seen twice; max_memory limits the accounting's memory",
        "auto_find_batch_size": "a run that is begun again would be accounted for once",
        "label_smoothing_factor": "pass criterion=nn.CrossEntropyLoss(label_smoothing=…) instead",
    }
    for name, reason in reasons.items():
        if getattr(args, name):
            raise ValueError(f"{name}={getattr(args, name)!r} is not supported: {reason}")
    if trainer.compute_loss_func is not None:
        raise ValueError("compute_loss_func is not supported; pass the loss of (logits, labels) as criterion=")
