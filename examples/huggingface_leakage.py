"""A small BERT trained privately by a Hugging Face Trainer, and whose sentence leaks most.

Sentences are made up from ten words; the label says whether five of these are in the majority.
Words are integers, and the attacker is assumed to know them: the run measures the leakage about
their embeddings. Needs ``torchfil[huggingface]``; downloads nothing.
"""

from __future__ import annotations

import argparse
import tempfile

import torch
from torch import Tensor
from transformers import BertConfig, BertForSequenceClassification, TrainingArguments

from torchfil import Accounting, Private
from torchfil.integrations.huggingface import FILTrainer

DELTA = 1e-4
WORDS, LENGTH = 10, 9


def sentences(count: int, seed: int) -> list[dict[str, Tensor]]:
    """Examples in the form that a tokenizer returns."""
    source = torch.Generator().manual_seed(seed)
    words = torch.randint(WORDS, (count, LENGTH), generator=source)
    labels = (words >= WORDS // 2).double().mean(dim=1) > 0.5
    mask = torch.ones(LENGTH, dtype=torch.long)
    pairs = zip(words, labels, strict=True)
    return [
        {"input_ids": row, "attention_mask": mask, "labels": label.long()} for row, label in pairs
    ]


def network() -> BertForSequenceClassification:
    """A BERT of one layer, without dropout."""
    config = BertConfig(
        vocab_size=WORDS,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        intermediate_size=32,
        max_position_embeddings=LENGTH,
        num_labels=2,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return BertForSequenceClassification(config)


def main() -> None:
    """Train, then print the most exposed sentences."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--examples", type=int, default=2000)
    parser.add_argument("--noise", type=float, default=1.0, help="noise multiplier σ")
    parser.add_argument(
        "--path", default=None, help="where to write the table, as CSV (confidential)"
    )
    options = parser.parse_args()

    print(f"Data: {options.examples:,} sentences made up by rule; nothing is downloaded.")
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            num_train_epochs=options.epochs,
            per_device_train_batch_size=200,
            learning_rate=0.02,
            lr_scheduler_type="constant",
            max_grad_norm=1.0,  # C, for every example
            use_cpu=True,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        trainer = FILTrainer(
            model=network(),
            args=arguments,
            train_dataset=sentences(options.examples, seed=0),
            eval_dataset=sentences(500, seed=1),
            compute_metrics=lambda found: {
                "accuracy": float((found[0].argmax(axis=1) == found[1]).mean())
            },
            privacy={
                "noise_multiplier": options.noise,
                "private": Private(submodule="bert.embeddings.word_embeddings"),
                "accounting": Accounting(num_probes=1, fil_rate=0.25),
            },
            leakage_path=options.path,
            delta=DELTA,
        )
        trainer.train()
        accuracy = trainer.evaluate()["eval_accuracy"]

    print(
        f"accuracy {100 * accuracy:.0f} %, ε = {trainer.engine.get_epsilon(DELTA):.2f} at δ = "
        f"{DELTA:g}"
    )
    table = trainer.engine.leakage(delta=DELTA).sort_values("mse_bound")
    print(
        table[["fil", "fil_error", "sampling_error", "mse_bound", "participations"]]
        .head(5)
        .round(3)
        .to_string()
    )
    print("These numbers depend on private data and are confidential themselves.")


if __name__ == "__main__":
    main()
