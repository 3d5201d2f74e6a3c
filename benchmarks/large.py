"""The models people train, at full size: BERT-base, GPT-2 small, ViT-Base/16, ConvNeXt-Tiny, a 1B Llama with LoRA.

Weights are random (nothing is downloaded), and models are as their libraries make them: dropout, attention masks, the
loss inside the output. One method at a time uses the device, because several do not fit together. On a CPU, or with
``--quick``, the same architectures are built tiny.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from opacus import PrivacyEngine
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from benchmarks.measuring import attempt, peak_gigabytes, tidy, timed
from torchfil import Accounting, Execution, FILPrivacyEngine, Private

__all__ = ["LARGE", "LargeLoop", "LargeModel", "compare_large"]

UNIT = "Opacus, hooks"
METHODS = {
    "plain training": ("plain", 0),
    UNIT: ("hooks", 0),
    "Opacus, ghost clipping": ("ghost", 0),
    "torchfil loop, 1 probe": ("loop", 1),
    "torchfil train_step, 1 probe": ("train_step", 1),
    "torchfil train_step, 3 probes": ("train_step", 3),
}
BATCHES = 4
Batch = dict[str, Tensor]


@dataclass(frozen=True)
class LargeModel:
    """A model with its batches.

    Attributes:
        title: The name in the tables.
        needs: The packages that it needs.
        build: Builds the model, tiny if asked.
        rows: Makes a given number of examples as columns by the model's names, including "labels", tiny if asked.
        batch: Examples in a batch.
        private: The submodule whose output is private; None: the floating-point inputs.
        precisions: The precisions of training: "float32", "bf16 autocast", "bf16" (weights in bf16).
        own_loss: Whether the model computes its loss from "labels".
    """

    title: str
    needs: tuple[str, ...]
    build: Callable[[bool], nn.Module]
    rows: Callable[[int, bool], Batch]
    batch: int
    private: str | None = None
    precisions: tuple[str, ...] = ("float32", "bf16 autocast")
    own_loss: bool = True


def _texts(words: int, length: int, count: int, small: bool, *, causal: bool) -> Batch:
    """Random tokens; a quarter of the texts end early. Labels are classes, or the tokens with −100 at padding."""
    length, words = (8, 50) if small else (length, words)
    ids = torch.randint(1, words, (count, length))
    ends = torch.where(torch.arange(count) % 4 == 0, torch.randint(length // 2, length, (count,)), length)
    mask = (torch.arange(length) < ends[:, None]).long()
    # positions by example, because Opacus's hooks treat a layer's first dimension as the batch
    positions = torch.arange(length).expand(count, length).contiguous()
    labels = ids.masked_fill(mask == 0, -100) if causal else torch.randint(2, (count,))
    return {"input_ids": ids * mask, "attention_mask": mask, "position_ids": positions, "labels": labels}


def _images(count: int, small: bool, *, small_size: int = 32) -> Batch:
    size = small_size if small else 224
    return {"x": torch.randn(count, 3, size, size), "labels": torch.randint(1000 if not small else 10, (count,))}


def _bert(small: bool) -> nn.Module:
    import transformers

    sizes = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.BertConfig(**(sizes | {"intermediate_size": 16} if small else {}))
    return transformers.BertForSequenceClassification(config)


def _gpt2(small: bool) -> nn.Module:
    import transformers

    sizes = {"vocab_size": 50, "n_embd": 16, "n_layer": 1, "n_head": 2, "bos_token_id": 1, "eos_token_id": 1}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**(sizes if small else {})))


def _llama_lora(small: bool) -> nn.Module:
    """TinyLlama's shape (1.1 billion parameters), frozen, with LoRA r = 16 in attention; all held in bf16."""
    import peft
    import transformers

    sizes = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22, "num_attention_heads": 32}
    sizes |= {"num_key_value_heads": 4, "vocab_size": 32_000}
    if small:
        sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        sizes |= {"num_key_value_heads": 2, "vocab_size": 50}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).to(torch.bfloat16)
    chosen = ["q_proj", "k_proj", "v_proj", "o_proj"]
    lora = peft.LoraConfig(r=16, lora_dropout=0.05, target_modules=chosen, task_type="CAUSAL_LM")
    return peft.get_peft_model(model, lora, autocast_adapter_dtype=False)


def _timm(name: str, small: bool, **tiny: Any) -> nn.Module:
    import timm

    return timm.create_model(name, **(tiny | {"num_classes": 10} if small else {}))


_VIT = partial(_timm, "vit_base_patch16_224", embed_dim=16, depth=1, num_heads=2, img_size=32)
_CONVNEXT = partial(_timm, "convnext_tiny", depths=(1, 1, 1, 1), dims=(4, 4, 8, 8))
_TRANSFORMERS, _TIMM = ("transformers",), ("timm",)
LARGE: dict[str, LargeModel] = {
    "bert": LargeModel(
        "BERT-base, 128 tokens",
        _TRANSFORMERS,
        _bert,
        partial(_texts, 30_000, 128, causal=False),
        32,
        "bert.embeddings.word_embeddings",
    ),
    "gpt2": LargeModel(
        "GPT-2 small, 128 tokens",
        _TRANSFORMERS,
        _gpt2,
        partial(_texts, 50_000, 128, causal=True),
        16,
        "transformer.wte",
    ),
    "vit_base": LargeModel("ViT-Base/16 at 224", _TIMM, _VIT, _images, 32, own_loss=False),
    "convnext_tiny": LargeModel("ConvNeXt-Tiny at 224", _TIMM, _CONVNEXT, _images, 32, own_loss=False),
    "llama_lora": LargeModel(
        "Llama-style 1.1B, LoRA r = 16, 512 tokens",
        ("transformers", "peft"),
        _llama_lora,
        partial(_texts, 32_000, 512, causal=True),
        8,
        "base_model.model.model.embed_tokens",
        ("bf16",),
    ),
}


class _Rows(Dataset[Batch]):
    """Columns as a data set."""

    def __init__(self, columns: Batch) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(self.columns["labels"])

    def __getitem__(self, index: int) -> Batch:
        return {name: column[index] for name, column in self.columns.items()}


@dataclass
class LargeLoop:
    """Training that takes one step at a time; batches are on the device, and drawing them is not timed.

    Attributes:
        model: The model to train.
        method: "plain", "hooks", "ghost", "loop" or "train_step".
        probes: The accounting's probes.
        precision: One of the model's precisions.
        device: The device.
        small: Whether the model is tiny.
    """

    model: LargeModel
    method: str
    probes: int
    precision: str
    device: str
    small: bool
    criterion: Any = field(default_factory=nn.CrossEntropyLoss)
    engine: Any = None

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        with torch.device(self.device):  # a CPU takes half a minute to draw a billion weights
            module: Any = self.model.build(self.small)
        module = module.to(self.device).train()
        size = min(self.model.batch, 4) if self.small else self.model.batch
        columns = self.model.rows(BATCHES * size, self.small)
        loader: Any = DataLoader(_Rows({name: value.to(self.device) for name, value in columns.items()}), size)
        optimizer: Any = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.01)
        given: dict[str, Any] = {"module": module, "optimizer": optimizer, "data_loader": loader}
        given |= {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "poisson_sampling": False}

        if self.method == "hooks":
            self.engine = PrivacyEngine(accountant="rdp")
            module, optimizer, loader = self.engine.make_private(**given)
        elif self.method == "ghost":
            self.engine = PrivacyEngine(accountant="rdp")
            module, optimizer, self.criterion, loader = self.engine.make_private(
                **given, criterion=self.criterion, grad_sample_mode="ghost"
            )
        elif self.method in ("loop", "train_step"):
            self.engine = FILPrivacyEngine()
            private = None if self.model.private is None else Private(submodule=self.model.private)
            criterion = None if self.model.own_loss else self.criterion
            room = Execution(max_memory=2**36) if self.device.startswith("cuda") else Execution()
            accounting = Accounting(num_probes=self.probes, execution=room)
            module, optimizer, loader = self.engine.make_private(
                **given, private=private, criterion=criterion, accounting=accounting
            )
        self.module, self.optimizer = module, optimizer
        self.batches: Iterator[Any] = itertools.cycle(list(loader))

    def step(self) -> None:
        """One step on the next batch."""
        batch = next(self.batches)
        if self.method == "train_step":
            with self._precision():
                given = (batch,) if self.model.own_loss else ({"x": batch["x"]}, batch["labels"])
                self.engine.train_step(*given)
            return
        self.optimizer.zero_grad()
        with self._precision():
            loss = self._loss(batch)
        loss.backward()
        self.optimizer.step()

    def _loss(self, batch: Mapping[str, Tensor]) -> Any:
        """The loss as in the loop; ghost clipping needs its own criterion."""
        if not self.model.own_loss:
            return self.criterion(self.module(batch["x"]), batch["labels"])
        if self.method != "ghost":
            return self.module(**batch).loss
        logits = self.module(**{name: value for name, value in batch.items() if name != "labels"}).logits
        if logits.ndim == 2:
            return self.criterion(logits, batch["labels"])
        shifted = logits[:, :-1].contiguous()  # Opacus's criterion takes flat tokens and, separately, their shape
        return self.criterion(shifted.flatten(0, 1), batch["labels"][:, 1:].flatten(), shape=shifted.shape)

    def _precision(self) -> contextlib.AbstractContextManager[Any]:
        if self.precision != "bf16 autocast":
            return contextlib.nullcontext()
        return torch.autocast(self.device.split(":")[0], torch.bfloat16)


def compare_large(name: str, device: str, *, quick: bool) -> dict[str, Any]:
    """Time all methods on one model in every precision, one after the other.

    Returns:
        "title", "batch"; "precisions": by precision, by method "seconds", "ratio" (to Opacus's hooks in the same
        precision), "peak_gb", or "failed".

    Raises:
        ModuleNotFoundError: A package that the model needs is missing.
    """
    model = LARGE[name]
    missing = [package for package in model.needs if importlib.util.find_spec(package) is None]
    if missing:
        raise ModuleNotFoundError(f"{model.title} needs {', '.join(missing)}: pip install {' '.join(missing)}")
    small = quick or not device.startswith("cuda")
    by_precision: dict[str, Any] = {}
    for precision in model.precisions:
        rows = {
            title: attempt(partial(_measured, model, method, probes, precision, device, small))
            for title, (method, probes) in METHODS.items()
        }
        unit = rows[UNIT].get("seconds")
        for row in rows.values():
            if unit and "seconds" in row:
                row["ratio"] = row["seconds"] / unit
        by_precision[precision] = rows
    title = f"{model.title} (tiny)" if small else model.title
    return {"title": title, "batch": min(model.batch, 4) if small else model.batch, "precisions": by_precision}


def _measured(
    model: LargeModel, method: str, probes: int, precision: str, device: str, small: bool
) -> dict[str, float | None]:
    """The median time of a step, and the peak memory of building and stepping."""
    loop: LargeLoop | None = None

    def build() -> Callable[[], None]:
        nonlocal loop
        loop = LargeLoop(model, method, probes, precision, device, small)
        return loop.step

    peak = peak_gigabytes(build, device, calls=2 * BATCHES)
    if loop is None:  # peak memory is not measured on a CPU
        build()
        assert loop is not None
        loop.step()
    seconds = statistics.median(timed(loop.step, device) for _ in range(2 if small else 12))
    loop = None
    tidy()
    return {"seconds": seconds, "peak_gb": peak}
