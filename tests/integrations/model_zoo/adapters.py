"""Parts of Hugging Face's models that are trained: LoRA by peft, the head, the biases."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from .hugging_face import bert, gpt2, llama
from .model import Model, causal_loss, logits_loss, texts

__all__ = ["MODELS"]


def adapted(dropout: float, base: Any, targets: list[str], head: str, task: str, **more: Any) -> nn.Module:
    """A model with LoRA of rank 2; the second factor, zero at first, is drawn at random, so that both are trained."""
    import peft

    config = peft.LoraConfig(r=2, lora_alpha=4, lora_dropout=dropout, target_modules=targets, task_type=task, **more)
    model = peft.get_peft_model(base(dropout, head=head), config)
    for name, value in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(value, std=0.3)
    return model


def partly(dropout: float, base: Any, parts: str) -> nn.Module:
    """The model with all else frozen than parameters whose name has this part."""
    model = base(dropout)
    for name, value in model.named_parameters():
        value.requires_grad_(parts in name)
    return model


PREFIX = "base_model.model."
OF_BERT = "bert.embeddings.word_embeddings"

MODELS = [
    Model(
        "BERT with LoRA (peft)",
        "peft",
        partial(
            adapted,
            base=bert,
            targets=["query", "value"],
            head="BertForSequenceClassification",
            task="SEQ_CLS",
        ),
        texts,
        logits_loss,
        loss_inside=True,
        private=PREFIX + OF_BERT,
    ),
    Model(
        "GPT-2 with LoRA (peft, Conv1D)",
        "peft",
        partial(adapted, base=gpt2, targets=["c_attn"], head="GPT2LMHeadModel", task="CAUSAL_LM", fan_in_fan_out=True),
        partial(texts, "words"),
        causal_loss,
        loss_inside=True,
        private=PREFIX + "transformer.wte",
    ),
    Model(
        "Llama with LoRA (peft)",
        "peft",
        partial(adapted, base=llama, targets=["q_proj", "v_proj"], head="LlamaForCausalLM", task="CAUSAL_LM"),
        partial(texts, "words"),
        causal_loss,
        loss_inside=True,
        private=PREFIX + "model.embed_tokens",
    ),
    Model(
        "BERT, head only",
        "transformers",
        partial(partly, base=bert, parts="classifier"),
        texts,
        logits_loss,
        loss_inside=True,
        private=OF_BERT,
    ),
    Model(
        "BERT, biases only (BitFit)",
        "transformers",
        partial(partly, base=bert, parts="bias"),
        texts,
        logits_loss,
        loss_inside=True,
        private=OF_BERT,
    ),
]
