"""What TRL's SFTTrainer has prepared trains as the same model that TRL has never touched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integrations.ledgers import assert_same_run
from torchfil import Accounting

pytest.importorskip("trl", reason="trl is not installed")
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    TrainingArguments,
)
from trl import SFTConfig, SFTTrainer

from tests.integrations.test_huggingface import QUIET, RATE
from torchfil.integrations.huggingface import FILTrainer

WORDS = ["the", "a", "cat", "dog", "sat", "ran", "on", "mat", "fast", ".", "?"]
TEXTS = [
    {"prompt": "the cat", "completion": " sat on the mat"},
    {"prompt": "a dog", "completion": " ran fast"},
] * 6
LORA: Any = {"task_type": "CAUSAL_LM", "target_modules": ["q_proj", "v_proj"]}
COMMON: dict[str, Any] = {**QUIET, **RATE, "num_train_epochs": 2, "bf16": False}
COMMON |= {"per_device_train_batch_size": 4}


def words() -> Any:
    tokenizer = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="?")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="?", pad_token="?", eos_token="."
    )


def llama() -> Any:
    torch.manual_seed(1)
    shape = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=len(WORDS), pad_token_id=10, eos_token_id=9, **shape)
    )


def prepared(folder: Path, **more: Any) -> Any:
    return SFTTrainer(
        llama(),
        SFTConfig(str(folder), **COMMON, **more),
        train_dataset=Dataset.from_list(TEXTS),
        processing_class=words(),
        peft_config=LoraConfig(**LORA),
    )


def trained(model: Any, args: Any, sft: Any) -> FILTrainer:
    noise = torch.Generator().manual_seed(5)
    privacy = {
        "noise_multiplier": 0.9,
        "noise_generator": noise,
        "accounting": Accounting(seed=3, num_probes=1),
    }
    given: dict[str, Any] = {
        "train_dataset": sft.train_dataset,
        "data_collator": sft.data_collator,
        "privacy": privacy,
    }
    trainer = FILTrainer(model=model, args=args, **given)
    trainer.train()
    return trainer


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_run_is_that_of_a_model_that_trl_has_not_touched(
    checkpointing: bool, tmp_path: Path
) -> None:
    sft = prepared(tmp_path, gradient_checkpointing=checkpointing)
    assert "forward" in vars(sft.model.get_base_model()), (
        "TRL no longer sets a forward: this tests nothing"
    )
    untouched = get_peft_model(llama(), LoraConfig(**LORA))
    untouched.load_state_dict(sft.model.state_dict())
    before = {
        name: value.clone() for name, value in untouched.named_parameters() if value.requires_grad
    }

    ours = trained(sft.model, sft.args, sft)
    plain = trained(untouched, TrainingArguments(str(tmp_path), **COMMON), sft)
    assert_same_run(ours.engine, ours.model, plain.engine, plain.model)
    named = dict(ours.model.named_parameters())
    assert all(not torch.equal(named[name], value) for name, value in before.items())
    assert len(before) == 8
