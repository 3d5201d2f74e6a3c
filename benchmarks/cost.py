"""What a private step costs, as README shows it: whole epochs with the real Poisson loader, and
preloaded batches.

    python -m benchmarks.cost [--device cuda] [--models mnist resnet18 …] [--epochs 5] [--out
    FILE.json]

Every method trains the same model on the same data, all methods in turns of one epoch. The unit is
an epoch of stock Opacus with hooks. Milliseconds are those of a batch of the expected size, because
the draws of an epoch vary. In the first table the loader draws, fetches and moves every batch; in
the second the batches lie on the device already. "Full speed after" counts the steps of a new run
until one takes at most 1.5 times as long as a later one, and the seconds that those first steps
take in excess. The third table ("planned") trains 20 epochs with a plan and says what an epoch
costs on average, how the last one is measured, and how well the most exposed 5 % are known.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from opacus import PrivacyEngine
from opacus.layers import DPLSTM
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from benchmarks import zoo
from benchmarks.measuring import Json, reason_of, synchronize, tidy
from torchfil import FILPrivacyEngine, Private

UNIT = "Opacus, hooks"
KINDS = ("epochs", "preloaded")
METHODS = {
    UNIT: ("hooks", 0),
    "loop, 1 probe": ("loop", 1),
    "train_step, 1 probe": ("train_step", 1),
    "train_step, 3 probes": ("train_step", 3),
}
PLANNED, PLANNED_EPOCHS = "train_step, planned", 20
SLOW = 1.5  # times the later steps


class Columns(Dataset[dict[str, Tensor]]):
    """Examples as dicts, as Hugging Face's models take them."""

    def __init__(self, columns: Mapping[str, Tensor]) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: column[index] for name, column in self.columns.items()}


Data = Columns | TensorDataset
Build = Callable[[], tuple[nn.Module, Data]]


@dataclass(frozen=True)
class Case:
    """A model with its data: ``build()`` makes both anew, from the same seed."""

    title: str
    batch: int
    build: Build
    private: Private | None = None
    autocast: bool = False  # with bfloat16


def _pictures(model: Callable[[], nn.Module], count: int, channels: int, size: int) -> Build:
    def build() -> tuple[nn.Module, Data]:
        data = TensorDataset(torch.rand(count, channels, size, size), torch.randint(10, (count,)))
        return model(), data

    return build


def _texts(
    model: Callable[[], nn.Module], count: int, length: int, words: int, *, causal: bool = False
) -> Build:
    def build() -> tuple[nn.Module, Data]:
        ids = torch.randint(1, words, (count, length))
        # by example, as Opacus's hooks need it
        positions = torch.arange(length).expand(count, length).contiguous()
        labels = ids if causal else torch.randint(2, (count,))
        columns = {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "position_ids": positions,
        }
        return model(), Columns({**columns, "labels": labels})

    return build


def _bert(*, base: bool = False, lora: bool = False) -> nn.Module:
    import transformers

    small = {
        "vocab_size": 1000,
        "hidden_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
    }
    small |= {"intermediate_size": 512, "max_position_embeddings": 128}
    model = transformers.BertForSequenceClassification(
        transformers.BertConfig(**({} if base else small))
    )
    if not lora:
        return model
    import peft

    return peft.get_peft_model(
        model, peft.LoraConfig(r=8, target_modules=["query", "value"], task_type="SEQ_CLS")
    )


def _gpt2(*, base: bool = False) -> nn.Module:
    import transformers

    small = {"vocab_size": 1000, "n_embd": 128, "n_layer": 4, "n_head": 4, "n_positions": 128}
    small |= {"bos_token_id": 1, "eos_token_id": 1}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**({} if base else small)))


def _llama(*, layers: int = 22) -> nn.Module:
    """TinyLlama's shape (1.1 billion parameters), frozen, with LoRA r = 16 in attention.

    All held in bfloat16.
    """
    import peft
    import transformers

    sizes = {
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
    }
    config = transformers.LlamaConfig(**sizes, num_hidden_layers=layers, vocab_size=32_000)
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    chosen = ["q_proj", "k_proj", "v_proj", "o_proj"]
    lora = peft.LoraConfig(r=16, lora_dropout=0.05, target_modules=chosen, task_type="CAUSAL_LM")
    return peft.get_peft_model(model, lora, autocast_adapter_dtype=False)


def _timm(name: str, **sizes: int) -> nn.Module:
    """timm, also where ``make test-integrations`` puts it: beside the environment, with torchvision
    without CUDA.
    """
    sys.path.append(str(Path(sys.prefix) / "vision"))
    from tests.opacus_suite.vision import import_torchvision

    import_torchvision()
    import timm

    return timm.create_model(name, num_classes=10, **sizes)


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = DPLSTM(16, 64, batch_first=True), nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])


def _sequences() -> tuple[nn.Module, Data]:
    return _Recurrent(), TensorDataset(torch.randn(640, 32, 16), torch.randint(10, (640,)))


WORDS = Private(submodule="transformer.wte")
EMBEDDINGS = Private(submodule="bert.embeddings")
ADAPTED = Private(submodule="base_model.model.bert.embeddings")
TOKENS = Private(submodule="base_model.model.model.embed_tokens")
VIT = partial(_timm, "vit_base_patch16_224")
SMALL_VIT = partial(VIT, img_size=32, patch_size=4, embed_dim=96, depth=4, num_heads=4)
BERT_TEXTS = _texts(partial(_bert, base=True), 640, 128, 30_000)
LORA_TEXTS = _texts(partial(_bert, base=True, lora=True), 640, 128, 30_000)
CASES = {
    "cpu": {
        "mnist": Case("MNIST CNN", 256, _pictures(zoo.mnist_cnn, 2560, 1, 28)),
        "vit": Case("small ViT", 64, _pictures(SMALL_VIT, 512, 3, 32)),
        "bert": Case("small BERT", 32, _texts(_bert, 256, 64, 1000), EMBEDDINGS),
        "lora": Case("LoRA on it", 32, _texts(partial(_bert, lora=True), 256, 64, 1000), ADAPTED),
        "gpt2": Case("small GPT-2", 16, _texts(_gpt2, 128, 64, 1000, causal=True), WORDS),
        "dplstm": Case("DPLSTM", 64, _sequences),
    },
    "cuda": {
        "mnist": Case("MNIST CNN", 600, _pictures(zoo.mnist_cnn, 60_000, 1, 28)),
        "resnet18": Case("ResNet-18, GroupNorm", 128, _pictures(zoo.resnet18, 5120, 3, 32)),
        "bert": Case("BERT-base", 32, BERT_TEXTS, EMBEDDINGS),
        "bert_bfloat16": Case(
            "BERT-base, bfloat16 autocast", 32, BERT_TEXTS, EMBEDDINGS, autocast=True
        ),
        "lora": Case("LoRA r = 8 on BERT-base", 32, LORA_TEXTS, ADAPTED),
        "gpt2": Case(
            "GPT-2 small",
            16,
            _texts(partial(_gpt2, base=True), 160, 128, 50_000, causal=True),
            WORDS,
        ),
        "vit": Case("ViT-Base/16", 32, _pictures(VIT, 320, 3, 224)),
        "convnext": Case(
            "ConvNeXt-Tiny", 32, _pictures(partial(_timm, "convnext_tiny"), 320, 3, 224)
        ),
        "llama": Case(
            "Llama 1.1B, LoRA r = 16, bfloat16",
            8,
            _texts(_llama, 80, 512, 32_000, causal=True),
            TOKENS,
        ),
    },
}


class Run:
    """A model in training by one method."""

    def __init__(
        self, case: Case, method: str, num_probes: int, device: str, *, preloaded: bool
    ) -> None:
        torch.manual_seed(0)
        self.method, self.device = method, device
        self.autocast = torch.autocast(device.split(":")[0], torch.bfloat16, enabled=case.autocast)
        module, data = case.build()
        if preloaded:
            data = _on(device, data)
        module = module.to(device).train()
        optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.01)
        self.engine: Any = PrivacyEngine() if method == "hooks" else FILPrivacyEngine(noise_seed=1)
        given: dict[str, Any] = {}
        if method != "hooks":
            given = {"private": case.private, "num_probes": num_probes or None}
            if not num_probes:
                given["epochs"] = PLANNED_EPOCHS
            if isinstance(data, TensorDataset) and method == "train_step":
                given["criterion"] = nn.CrossEntropyLoss()
        self.model, self.optimizer, self.loader = self.engine.make_private(
            module=module,
            optimizer=optimizer,
            data_loader=DataLoader(data, batch_size=case.batch),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            **given,
        )
        self.batches: Any = list(self.loader) if preloaded else self.loader

    def epoch(self) -> tuple[float, int]:
        """Seconds and examples of a pass over the batches."""
        synchronize(self.device)
        start, examples = time.perf_counter(), 0
        for batch in self.batches:
            self.step(batch)
            examples += len(batch["labels"] if isinstance(batch, Mapping) else batch[1])
        synchronize(self.device)
        return time.perf_counter() - start, examples

    def step(self, batch: Any) -> None:
        """One step."""
        if isinstance(batch, Mapping):
            moved = {name: leaf.to(self.device, non_blocking=True) for name, leaf in batch.items()}
            if not len(moved["labels"]):
                return
            self._step((moved,), lambda: self.model(**moved).loss)
        else:
            x, y = (leaf.to(self.device, non_blocking=True) for leaf in batch)
            self._step((x, y), lambda: nn.functional.cross_entropy(self.model(x), y))

    def _step(self, given: tuple[object, ...], loss_of: Callable[[], Tensor]) -> None:
        with self.autocast:
            if self.method == "train_step":
                self.engine.train_step(*given)
                return
            self.optimizer.zero_grad()
            loss = loss_of()
        loss.backward()
        self.optimizer.step()

    def first_steps(self, count: int) -> list[float]:
        """Seconds of each of the first steps, fetching not counted."""
        times: list[float] = []
        while len(times) < count:
            for batch in self.batches:
                synchronize(self.device)
                start = time.perf_counter()
                self.step(batch)
                synchronize(self.device)
                times.append(time.perf_counter() - start)
        return times[:count]


def _on(device: str, data: Data) -> Data:
    if isinstance(data, TensorDataset):
        return TensorDataset(*(part.to(device) for part in data.tensors))
    return Columns({name: part.to(device) for name, part in data.columns.items()})


def measure(case: Case, device: str, epochs: int, *, preloaded: bool, first: int = 40) -> Json:
    """Milliseconds of a step by each method, its ratio to Opacus's, and how a new run begins."""
    runs: dict[str, Run] = {}
    rows: Json = {}
    for title, (method, probes) in METHODS.items():
        try:
            runs[title] = Run(case, method, probes, device, preloaded=preloaded)
            start = time.perf_counter()
            begun = runs[title].first_steps(
                first if device.startswith("cuda") and not preloaded else 4
            )
            later = statistics.median(begun[len(begun) // 2 :])
            slow = [k for k, seconds in enumerate(begun) if seconds > SLOW * later]
            excess = sum(begun[k] - later for k in slow)
            rows[title] = {
                "slow_steps": len(slow),
                "last_slow_step": max(slow, default=-1) + 1,
                "excess": excess,
            }
            rows[title]["began_in"] = time.perf_counter() - start
        except Exception as error:
            runs.pop(title, None)
            rows[title] = {"failed": reason_of(error)}
    taken: dict[str, list[tuple[float, int]]] = {title: [] for title in runs}
    for _ in range(epochs + 1):  # the first of each is a warm-up
        for title, run in runs.items():
            taken[title].append(run.epoch())
    for title, parts in taken.items():
        rows[title]["ms"] = (
            1e3
            * case.batch
            * statistics.median(seconds / examples for seconds, examples in parts[1:])
        )
    for row in rows.values():
        if "ms" in row and "ms" in rows[UNIT]:
            row["ratio"] = row["ms"] / rows[UNIT]["ms"]
    runs.clear()
    tidy()
    return {"title": case.title, "batch": case.batch, "rows": rows}


def measure_plan(case: Case, device: str) -> Json:
    """What 20 epochs cost under the default plan, as a multiple of Opacus's, batches preloaded."""
    unit = Run(case, "hooks", 0, device, preloaded=True)
    run = Run(case, "train_step", 0, device, preloaded=True)
    unit.first_steps(4)
    expected = case.batch * len(run.loader)
    taken: list[float] = []
    units: list[float] = []
    for epoch in range(PLANNED_EPOCHS):
        # graphs of other numbers of probes are captured in a run's first steps, and count
        seconds, _ = run.epoch()
        taken.append(1e3 * case.batch * seconds / expected)
        if epoch % 4 == 0:
            seconds, examples = unit.epoch()
            units.append(1e3 * case.batch * seconds / examples)
    milliseconds = statistics.median(units)
    sums = run.engine.totals.ledger.sums
    rows = {
        UNIT: {"ms": milliseconds, "ratio": 1.0},
        PLANNED: {
            "ms": statistics.mean(taken),
            "ratio": statistics.mean(taken) / milliseconds,
            "by_epoch": [round(each / milliseconds, 3) for each in taken],
            "measured": float(sums["measured"].sum() / sums["participations"].sum()),
            "plan": str(run.engine.plan),
        },
    }
    return {"title": case.title, "batch": case.batch, "rows": rows}


def table(results: Json, kind: str) -> str:
    """Ratios and milliseconds as a Markdown table."""
    shown = [part[kind] for part in results.values() if kind in part]
    lines = [
        "| | " + " | ".join(f"{part['title']}, batch {part['batch']}" for part in shown) + " |"
    ]
    lines.append("|---" * (len(shown) + 1) + "|")
    for method in (*METHODS, PLANNED):
        cells = []
        if not any(method in part["rows"] for part in shown):
            continue
        for part in shown:
            row = part["rows"].get(method, {})
            cells.append(
                f"{row['ratio']:.2f} ({row['ms']:.1f} ms)"
                if "ratio" in row
                else row.get("failed", "–")[:40]
            )
        lines.append(f"| {method} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.cost", description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--models", nargs="+")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--tables", nargs="+", default=list(KINDS), choices=[*KINDS, "planned"])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    cases = CASES["cuda" if options.device.startswith("cuda") else "cpu"]
    machine = (
        torch.cuda.get_device_name() if options.device.startswith("cuda") else platform.machine()
    )
    results: Json = {}
    for name in options.models or cases:
        results[name] = {}
        for kind in options.tables:
            try:
                results[name][kind] = (
                    measure_plan(cases[name], options.device)
                    if kind == "planned"
                    else measure(
                        cases[name], options.device, options.epochs, preloaded=kind == "preloaded"
                    )
                )
            except Exception as error:
                print(name, kind, reason_of(error), flush=True)
            print(name, kind, json.dumps(results[name].get(kind, {}).get("rows")), flush=True)
            if options.out is not None:
                options.out.write_text(
                    json.dumps(
                        {"machine": machine, "torch": torch.__version__, **results}, indent=1
                    )
                )
    for kind in options.tables:
        print(f"\n{kind}\n\n{table(results, kind)}")


if __name__ == "__main__":
    main()
